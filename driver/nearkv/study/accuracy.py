"""The contract's error against float64, variant by variant: the block of docs/numerics.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from nearkv_hw.abi.formats import SCALE_FORMATS
from torch import Tensor

from nearkv.quantise import PRESETS, Quantised, RowFormat, attention_arguments, decode, quantise
from nearkv.reference import decode_attention, page_summaries, select_pages
from nearkv.reference.threads import threads_for

from . import blocks
from .tables import Table

COMMAND = "nearkv study accuracy --write docs"
PAGE = "numerics.md"
SPREADS = (0.3, 3.0, 20.0, 100.0)
"""Standard deviations of the scores."""
_ROWS, _Q_HEADS, _KV_HEADS, _HEAD_DIM = 4096, 4, 2, 64
_LATENT_ROWS = 2048


@dataclass(frozen=True)
class Case:
    """One call of the reference, and the numbers that it is over.

    Parameters
    ----------
    q : bfloat16 [1, query_rows, q_heads, head_dim].
    rows : K, V and their formats, as `attention_arguments` has them.
    k, v : float64 [rows, kv_heads, dim] that the codes stand for.
    scale : of the scores.
    options : what else the call is given.
    visible : bool [query_rows or 1, q_heads or 1, rows], what the options say of visibility.
    softcap, slopes : as in the call.
    """

    q: Tensor
    rows: Mapping[str, Any]
    k: Tensor
    v: Tensor
    scale: float
    options: Mapping[str, Any] = field(default_factory=dict)
    visible: Tensor | None = None
    softcap: float | None = None
    slopes: Tensor | None = None

    def found(self) -> Tensor:
        """The reference's answer, float64 [query_rows, q_heads, value_dim]."""
        options = {"softcap": self.softcap, "alibi_slopes": self.slopes, **self.options}
        output: Tensor = decode_attention(self.q, scale=self.scale, **self.rows, **options)
        return output[0].double()

    def exact(self) -> Tensor:
        """The same in float64."""
        query_rows, _, head_dim = self.q.shape[1:]
        rows, kv_heads = self.k.shape[:2]
        q = self.q[0].double().view(query_rows, kv_heads, -1, head_dim)
        scores = torch.einsum("thgd,rhd->thgr", q, self.k).flatten(1, 2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            places = torch.arange(rows - query_rows, rows)
            distances = torch.arange(rows) - places.unsqueeze(1)
            scores = scores + self.slopes.double().unsqueeze(1) * distances.unsqueeze(1)
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible, -torch.inf)
        weights = scores.softmax(-1).view(query_rows, kv_heads, -1, rows)
        return torch.einsum("thgr,rhd->thgd", weights, self.v).flatten(1, 2)

    def error(self) -> float:
        """The largest error, relative to the largest output."""
        exact = self.exact()
        return float((self.found() - exact).abs().max() / exact.abs().max())


@lru_cache
def normal(*shape: int, seed: int) -> Tensor:
    """float64 numbers of about a normal distribution, the same bits on every machine."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(0, 1 << 20, (12, *shape), generator=generator)  # twelve have the variance 1
    return (parts.sum(0) - 12 * ((1 << 20) - 1) / 2) / (1 << 20)


def _case(
    spread: float,
    *,
    k_format: RowFormat = PRESETS["bf16"].k,
    v_format: RowFormat | None = PRESETS["bf16"].k,
    query_rows: int = 1,
    rows: int = _ROWS,
    heads: tuple[int, int] = (_Q_HEADS, _KV_HEADS),
    dims: tuple[int, int] = (_HEAD_DIM, _HEAD_DIM),
    **more: Any,
) -> Case:
    """A case of random rows; without `v_format` V is part of the K row."""
    q = normal(1, query_rows, heads[0], dims[0], seed=1).to(torch.bfloat16)
    k = quantise(normal(rows, heads[1], dims[0], seed=2).float(), k_format)
    v = None if v_format is None else quantise(normal(rows, heads[1], dims[1], seed=3).float(), v_format)
    arguments = attention_arguments(*(_batched(x) for x in (k, v) if x is not None))
    if v is None:
        arguments["value_dim"] = dims[1]
    values = k.values()[..., : dims[1]] if v is None else v.values()
    return Case(q, arguments, k.values(), values, spread * dims[0] ** -0.5, **more)


def _batched(rows: Quantised) -> Quantised:
    """Rows as those of a batch of one."""
    scales = None if rows.scales is None else rows.scales.unsqueeze(0)
    return Quantised(rows.format, rows.codes.unsqueeze(0), scales, rows.head_scale, rows.saturated)


_SLOPES = torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(_Q_HEADS)])
"""Those of a model with four heads."""


def _softcap(cap: float, slopes: Tensor | None = None) -> Callable[[float], Case]:
    return lambda spread: _case(spread, softcap=cap, slopes=slopes)


def _window(spread: float) -> Case:
    rows, places = torch.arange(_ROWS), torch.arange(_ROWS - 4, _ROWS).unsqueeze(1)
    seen = (rows <= places) & ((rows > places - 1024) | (rows < 4))
    options = {"window": 1024, "kept_rows": 4}
    return _case(spread, query_rows=4, options=options, visible=seen.unsqueeze(1))


def _tree(spread: float) -> Case:
    """Eight draft tokens, each after the one at half its number."""
    tree = torch.eye(8, dtype=torch.bool)
    for token in range(1, 8):
        tree[token] |= tree[(token - 1) // 2]
    seen = torch.cat([torch.ones(8, _ROWS - 8, dtype=torch.bool), tree], dim=1)
    return _case(spread, query_rows=8, options={"tree": tree}, visible=seen.unsqueeze(1))


def _pages(spread: float) -> Case:
    """A quarter of the pages."""
    plain = _case(spread)
    summaries = page_summaries(plain.rows["k"], page_rows=16)
    found = select_pages(plain.q, summaries, scale=plain.scale, count=_ROWS // 64)
    seen = found.pages[0].repeat_interleave(16, dim=1).repeat_interleave(_Q_HEADS // _KV_HEADS, dim=0)
    return _case(spread, options={"pages": found.pages, "page_rows": 16}, visible=seen.unsqueeze(0))


def _codebook(spread: float) -> Case:
    """K and V of 4-bit codes with a table per head and e4m3 scales per 32 elements."""
    row = RowFormat("int4", "e4m3", 32)
    plain = _case(spread, k_format=row, v_format=row)
    tables = {
        f"{name}_lut": normal(_KV_HEADS, 16, seed=seed).to(torch.float16)
        for name, seed in (("k", 4), ("v", 5))
    }
    values = []
    for name in "kv":
        index = plain.rows[name][0].to(torch.int64)
        heads = torch.arange(_KV_HEADS).unsqueeze(1)
        scales = decode(plain.rows[f"{name}_scales"][0], SCALE_FORMATS["e4m3"]).repeat_interleave(32, dim=-1)
        values.append(tables[f"{name}_lut"].double()[heads, index] * scales)
    arguments = {**plain.rows, "k_format": "lut4", "v_format": "lut4", **tables}
    return Case(plain.q, arguments, values[0], values[1], plain.scale)


def _latent(row: RowFormat) -> Callable[[float], Case]:
    return lambda spread: _case(
        spread, k_format=row, v_format=None, rows=_LATENT_ROWS, heads=(8, 1), dims=(576, 512)
    )


def _preset(name: str) -> Callable[[float], Case]:
    return lambda spread: _case(spread, k_format=PRESETS[name].k, v_format=PRESETS[name].k)


VARIANTS: dict[str, Callable[[float], Case]] = {
    "plain": _case,
    **{f"softcap {cap:g}": _softcap(cap) for cap in (5.0, 30.0, 50.0, 100.0)},
    "ALiBi": lambda spread: _case(spread, slopes=_SLOPES),
    "softcap 50, ALiBi": _softcap(50.0, _SLOPES),
    "window 1,024 with 4 kept rows, 4 query rows": _window,
    "tree of 8 query rows": _tree,
    f"{_ROWS // 64} of {_ROWS // 16} pages": _pages,
    "lut4, e4m3 scales": _codebook,
    "latent, 576 and 512, bf16": _latent(PRESETS["bf16"].k),
    "latent, 576 and 512, mxfp8": _latent(PRESETS["mxfp8"].k),
    **{name: _preset(name) for name in PRESETS if name != "bf16"},
}
"""What is measured, by its name on the page: bf16 and all rows unless it says something else."""
ADDING = [name for name in VARIANTS if "softcap" in name or "ALiBi" in name]
"""Variants that change scores and so may add an error of their own."""
MAY_ADD = 2e-5
"""What they may add."""


def measure(begin: Callable[[str], None]) -> dict[str, list[float]]:
    """The error of every variant at every spread; `begin` hears of each."""
    found = {}
    for name, variant in VARIANTS.items():
        begin(name)
        with threads_for(0, torch.device("cpu")):
            found[name] = [variant(spread).error() for spread in SPREADS]
    return found


def added(errors: Mapping[str, Sequence[float]]) -> float:
    """The most that softcap and ALiBi add to the error of plain attention with the same rows."""
    return max(
        error - plain for name in ADDING for error, plain in zip(errors[name], errors["plain"], strict=True)
    )


def block(errors: Mapping[str, Sequence[float]]) -> str:
    """The page's block: the table, and what softcap and ALiBi add."""
    columns = {"variant": "variant"} | {str(i): f"{spread:g}" for i, spread in enumerate(SPREADS)}
    rows = [
        {"variant": name} | {str(i): f"{error:.1e}" for i, error in enumerate(found)}
        for name, found in errors.items()
    ]
    title = (
        f"{_ROWS:,} rows of {_KV_HEADS} KV heads, {_Q_HEADS} query heads, head_dim {_HEAD_DIM} "
        f"(latent: {_LATENT_ROWS:,} rows of one head, 8 query heads)"
    )
    table = Table(name="errors", title=title, columns=columns, rows=rows).markdown()
    return (
        f"{table}\n\nSoftcap and ALiBi add {added(errors):.1e} at most, of the {MAY_ADD:.0e} that they may."
    )


def write(folder: Path, errors: Mapping[str, Sequence[float]]) -> list[Path]:
    """Write the page's block; the files written."""
    blocks.check(folder, PAGE, figures=False)
    page = folder / PAGE
    page.write_text(blocks.filled(page.read_text(), {"errors": block(errors)}, COMMAND, where=page))
    return [page]
