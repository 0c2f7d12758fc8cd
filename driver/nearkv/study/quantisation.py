"""What quantising K and V does to attention of a real model: the blocks and the figure of docs/formats.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearkv.estimate.report import sheet
from nearkv.hf.record import LayerRows
from nearkv.quantise import PRESETS, CacheFormat, quantise

from . import blocks
from .tables import Table

COMMAND = "nearkv study quantisation --write docs"
PAGE = "formats.md"
FIGURE = "figures/quantisation.png"
TEXT = """\
The lighthouse at Skerry Point was built in 1871 from granite that came by sea, two blocks at a time, because
no road reached the headland. Its first keeper, a widow named Agnes Moir, wrote down the weather every evening
for thirty-one years; her notebooks are still read by people who want to know how the storms have changed. On
the ninth of January 1894 she noted a wind "that took the words out of my mouth", and a steamer, the Corrie
Bell, that passed so close that she could see the cook at the galley door. What became of the ship is not
known. In the spring the lamp was changed from colza oil to paraffin, which burned brighter and smelled worse.

def moving_average(values, width):
    # The mean of the last `width` values at every place, from the first full window on.
    total, means = sum(values[:width]), []
    for index in range(width, len(values)):
        means.append(total / width)
        total += values[index] - values[index - width]
    return means + [total / width]

Prices per kilogram: apples 2.10, pears 2.45, quinces 3.80, medlars 4.20. If a basket holds three kilograms of
apples and half a kilogram of quinces, it costs 3 x 2.10 + 0.5 x 3.80 = 8.20. Question: what does a basket
with one kilogram of each fruit cost? Answer: 2.10 + 2.45 + 3.80 + 4.20 = 12.55.
"""
_SKIPPED_ROWS, _EVERY = 32, 8
"""Of the query rows, these first are left out, and of the others every so many is taken."""
PARTS: dict[str, tuple[bool, bool]] = {"K and V": (True, True), "K": (True, False), "V": (False, True)}
"""Which of the rows are quantised."""


@dataclass(frozen=True)
class Errors:
    """What quantising does to the outputs of one layer: queries by query heads, each a vector.

    Parameters
    ----------
    relative : |o - e| / |e| of each output o against the exact one e, float64 [queries, q_heads].
    cosine : of the angle between them.
    """

    relative: Tensor
    cosine: Tensor


@dataclass(frozen=True)
class Measured:
    """One preset over all layers.

    Parameters
    ----------
    preset : the format.
    errors : by which rows are quantised, an entry per layer.
    saturated : elements of K and V that saturated.
    elements : of K and V.
    row_bytes : of K and V of one KV head, with scales.
    bits : of an element, its share of the scales included.
    """

    preset: str
    errors: Mapping[str, Sequence[Errors]]
    saturated: int
    elements: int
    row_bytes: int
    bits: float

    def relative(self, part: str = "K and V") -> Tensor:
        """Mean relative error of each layer."""
        return torch.stack([layer.relative.mean() for layer in self.errors[part]])

    def cosine(self) -> Tensor:
        """Cosines of all outputs."""
        return torch.stack([layer.cosine for layer in self.errors["K and V"]])


def measure(layers: Sequence[LayerRows], begin: Callable[[str], None]) -> list[Measured]:
    """Every preset; `begin` hears of each."""
    exact = [weights(layer, layer.k.double()) for layer in layers]
    found = []
    for preset in PRESETS.values():
        begin(preset.name)
        found.append(_measured(preset, layers, exact))
    return found


def _measured(preset: CacheFormat, layers: Sequence[LayerRows], exact: Sequence[Tensor]) -> Measured:
    assert preset.v is not None
    errors: dict[str, list[Errors]] = {part: [] for part in PARTS}
    saturated = elements = 0
    for layer, exact_weights in zip(layers, exact, strict=True):
        k, v = quantise(layer.k, preset.k), quantise(layer.v, preset.v)
        saturated += k.saturated + v.saturated
        elements += layer.k.numel() + layer.v.numel()
        of_k, of_v = (exact_weights, weights(layer, k.values())), (layer.v.double(), v.values())
        wanted = output(of_k[0], of_v[0])
        for part, (with_k, with_v) in PARTS.items():
            errors[part].append(_errors(output(of_k[with_k], of_v[with_v]), wanted))
    head_dim, value_dim = layers[0].k.shape[-1], layers[0].v.shape[-1]
    bits = (preset.k.bits_per_element(head_dim) + preset.v.bits_per_element(value_dim)) / 2
    return Measured(preset.name, errors, saturated, elements, preset.row_bytes(head_dim, value_dim), bits)


def weights(layer: LayerRows, k: Tensor) -> Tensor:
    """Causal softmax weights in float64 of some query rows, which are rounded to fp16 as a device takes them.

    Returns
    -------
    [kv_heads, group, queries, rows].
    """
    rows = torch.arange(_SKIPPED_ROWS, layer.q.shape[0], _EVERY)
    kv_heads, head_dim = k.shape[1:]
    q = layer.q[rows].to(torch.float16).double().view(len(rows), kv_heads, -1, head_dim)
    scores = torch.einsum("qhgd,rhd->hgqr", q, k) * layer.scale
    hidden = torch.arange(k.shape[0]) > rows.unsqueeze(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def output(of_rows: Tensor, v: Tensor) -> Tensor:
    """Attention outputs [queries, q_heads, value_dim] of weights and V rows."""
    return torch.einsum("hgqr,rhd->qhgd", of_rows, v).flatten(1, 2)


def _errors(found: Tensor, exact: Tensor) -> Errors:
    size = exact.norm(dim=-1)
    return Errors((found - exact).norm(dim=-1) / size, (found * exact).sum(-1) / (found.norm(dim=-1) * size))


def table(found: Sequence[Measured], layers: Sequence[LayerRows]) -> Table:
    """The page's table."""
    queries, q_heads = found[0].errors["K"][0].relative.shape
    context, kv_heads, _ = layers[0].k.shape
    rows = []
    for one in found:
        cosine, relative = one.cosine(), one.relative()
        rows.append(
            {
                "preset": f"`{one.preset}`",
                "bits": f"{one.bits:.4g}",
                "bytes": one.row_bytes,
                "saturated": percent(one.saturated / one.elements),
                "cosine": beside_one(float(cosine.mean())),
                "least": beside_one(float(cosine.min())),
                "relative": percent(float(relative.mean())),
                "layer": percent(float(relative.max())),
                "k": percent(float(one.relative("K").mean())),
                "v": percent(float(one.relative("V").mean())),
            }
        )
    return Table(
        name="errors",
        title=(
            f"Outputs of {len(layers)} layers, {q_heads} query heads and {queries} query rows, over up to "
            f"{context} rows of {kv_heads} KV heads"
        ),
        columns={
            "preset": "preset",
            "bits": "bits an element",
            "bytes": "bytes a row",
            "saturated": "saturated",
            "cosine": "cosine, mean",
            "least": "least",
            "relative": "relative error, mean",
            "layer": "worst layer",
            "k": "K alone",
            "v": "V alone",
        },
        rows=rows,
    )


def percent(share: float) -> str:
    """A share as a percentage of two digits.

    Examples
    --------
    >>> percent(0.0123), percent(0.00003), percent(0.0)
    ('1.2 %', '0.003 %', '0')
    """
    return f"{100 * share:.2g} %" if share else "0"


def beside_one(cosine: float) -> str:
    """A cosine near 1 with two digits of what it lacks.

    Examples
    --------
    >>> beside_one(0.99766), beside_one(0.99999971)
    ('0.9977', '0.99999971')
    """
    lacks = max(1 - cosine, 1e-12)
    digits = next(n for n in range(1, 13) if round(lacks, n) >= 10 ** (1 - n) or n == 12)
    return f"{cosine:.{digits}f}"


def write(folder: Path, found: Sequence[Measured], layers: Sequence[LayerRows]) -> list[Path]:
    """Write the page's block and its figure; the files written."""
    blocks.check(folder, PAGE)
    block = table(found, layers).markdown()
    text = blocks.filled((folder / PAGE).read_text(), {"errors": block}, COMMAND, where=folder / PAGE)
    (folder / PAGE).write_text(text)
    (folder / FIGURE).write_bytes(figure(found, block))
    return [folder / PAGE, folder / FIGURE]


def figure(found: Sequence[Measured], block: str) -> bytes:
    """Error by size of an element, and by layer; it carries the digest of the page's block."""
    drawing = sheet(12.5, 4.6)
    left, right = drawing.subplots(1, 2)
    for index, one in enumerate(found):
        colour = f"C{index}"
        mean = 100 * float(one.relative().mean())
        left.plot(one.bits, mean, "o", color=colour, label=one.preset)
        left.plot(one.bits, 100 * float(one.relative("V").mean()), "x", color=colour)
        right.plot((100 * one.relative()).tolist(), color=colour, linewidth=1.2)
    left.set_xlabel("bits of an element, scales included")
    left.set_ylabel("mean relative error, %")
    left.set_title("o: K and V    x: V alone", fontsize=9)
    right.set_xlabel("layer")
    right.set_title("K and V", fontsize=9)
    for plot in (left, right):
        plot.set_yscale("log")
        plot.grid(True, alpha=0.3)
    drawing.legend(loc="outside lower center", ncols=len(found), frameon=False, fontsize=9)
    return blocks.png(drawing, block)


def to_dict(found: Sequence[Measured]) -> dict[str, Any]:
    """Figures of every preset as plain values."""
    return {
        one.preset: {
            "bits": one.bits,
            "row_bytes": one.row_bytes,
            "saturated": one.saturated,
            "elements": one.elements,
            "cosine_mean": float(one.cosine().mean()),
            "cosine_min": float(one.cosine().min()),
            "relative_error": {part: float(one.relative(part).mean()) for part in PARTS},
            "relative_error_of_layers": one.relative().tolist(),
        }
        for one in found
    }
