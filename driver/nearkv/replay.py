"""Attention calls as files: everything that a result depends on, to run it again and see where bits part.

A replay file is a NumPy archive (.npz) of bit patterns and one JSON text; reading it executes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
from nearkv_hw.abi import PRESETS, DeviceConfig
from nearkv_hw.abi.numerics import BIN_BITS, TOP_NONE, WEIGHT_BITS, WEIGHT_FRACTION_BITS

from .cache import KVCache
from .codec import DTYPES, FORMATS
from .device import Device, open
from .errors import ArgumentError
from .host_attention import HostRows
from .quantise.formats import CacheFormat, RowFormat, Rule
from .reference import Partial, State, decode_attention, finish
from .rows import Context
from .sequences import Sequence

FILE_VERSION = 2
_HEADS = ("k_scale", "v_scale", "k_lut", "v_lut")
_EXTRAS = ("k_scales", "v_scales", *_HEADS)
_OUT_DTYPES = {"fp32": torch.float32, **DTYPES}


@dataclass(frozen=True)
class Case:
    """One attention call: queries, the host's own copy of the rows, and what is seen of them.

    Parameters
    ----------
    q : [batch, q_heads, head_dim].
    k, v : [batch, rows, kv_heads, dim], as many rows as the longest context has: values, or codes of `form`.
    lengths : rows of each context; what stands behind them does not matter.
    ranges : (begin, end) of the rows that are seen, per sequence.
    scale : multiplies q·k.
    sinks : float32 [q_heads], or None.
    out_dtype : of the result.
    page_rows : rows of a page.
    device : kind of device that the case was seen on: "model", "rtl", ...
    config : what that device was made of.
    form : how the cache stores its rows; None where K and V are values of 16 bits.
    extras : what else codes need to be numbers, by name: k_scales and v_scales [batch, rows, kv_heads,
        blocks], k_scale, v_scale [kv_heads], k_lut, v_lut [kv_heads, 16].
    softcap : of the scores, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    scale: float
    sinks: torch.Tensor | None
    out_dtype: torch.dtype
    page_rows: int
    device: str
    config: DeviceConfig
    form: CacheFormat | None = None
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    softcap: float | None = None

    def reference(self, *, partial: bool = False) -> torch.Tensor | Partial:
        """What the contract says."""
        index = torch.arange(self.k.shape[1])
        ranges = torch.tensor(self.ranges, dtype=torch.int64).reshape(-1, 2, 1)
        visible = (index >= ranges[:, 0]) & (index < ranges[:, 1])
        given: dict[str, Any] = {"k": self.k, "v": self.v}
        if self.form is not None:
            heads = HostRows(self.form, *(self.extras.get(name) for name in _HEADS))
            scales = (self.extras.get(name) for name in ("k_scales", "v_scales"))
            given = heads.arguments(Context(self.k, self.v, *scales))
        k, v = given.pop("k"), given.pop("v")
        given |= {"visible": visible, "sinks": self.sinks, "softcap": self.softcap}
        result = decode_attention(self.q, k, v, scale=self.scale, partial=True, **given)
        if partial:
            return result
        return finish(result, self.out_dtype, self.extras.get("v_scale"))

    def narrowed(self, sequence: int, begin: int, end: int) -> Case:
        """One sequence of the case, with only these rows seen, and no sinks."""
        part = slice(sequence, sequence + 1)
        return replace(
            self,
            q=self.q[part],
            k=self.k[part],
            v=self.v[part],
            lengths=self.lengths[part],
            extras={
                name: tensor[part] if name in ("k_scales", "v_scales") else tensor
                for name, tensor in self.extras.items()
            },
            ranges=((begin, end),),
            sinks=None,
        )

    @contextmanager
    def on(self, device: Device) -> Iterator[_Placed]:
        """The case's rows in a cache of their own on a device."""
        form = self.form
        with device.kv_cache(
            layers=1,
            kv_heads=self.k.shape[2],
            head_dim=self.k.shape[3],
            value_dim=self.v.shape[3],
            dtype=self.k.dtype if form is None else form.k,
            value_dtype=None if form is None else form.v,
            page_rows=self.page_rows,
            k_scale=self.extras.get("k_scale"),
            v_scale=self.extras.get("v_scale"),
            k_lut=self.extras.get("k_lut"),
            v_lut=self.extras.get("v_lut"),
        ) as cache:
            sequences = []
            for index, length in enumerate(self.lengths):
                sequence = cache.sequence()
                scales = {
                    name: self.extras[name][index, :length]
                    for name in ("k_scales", "v_scales")
                    if name in self.extras
                }
                cache.append(sequence, layer=0, k=self.k[index, :length], v=self.v[index, :length], **scales)
                sequences.append(sequence)
            yield _Placed(cache, sequences)


@dataclass(frozen=True)
class _Placed:
    """A case's rows on a device."""

    cache: KVCache
    sequences: list[Sequence]

    def result(self, case: Case) -> torch.Tensor:
        """The device's result of the case."""
        return self.cache.attend(
            self.sequences,
            layer=0,
            q=case.q,
            scale=case.scale,
            rows=case.ranges,
            sinks=case.sinks,
            softcap=case.softcap,
            out_dtype=case.out_dtype,
        )

    def partial(self, case: Case, sequence: int | None = None) -> Partial:
        """The device's partial of the case, or of a case that `narrowed` it to one sequence."""
        return self.cache.attend(
            self.sequences if sequence is None else [self.sequences[sequence]],
            layer=0,
            q=case.q,
            scale=case.scale,
            rows=case.ranges,
            sinks=case.sinks,
            softcap=case.softcap,
            partial=True,
        )


@dataclass(frozen=True)
class Weight:
    """The weight of one row, significand * 2^(exponent - 17), and the base-2 score that it stands for."""

    significand: int
    exponent: int

    @property
    def score(self) -> float:
        """Base-2 score, to the weight's precision; -Inf for a row without weight."""
        return (
            self.exponent + math.log2(self.significand) - WEIGHT_FRACTION_BITS
            if self.significand
            else -math.inf
        )


@dataclass(frozen=True)
class Stage:
    """One stage of a query in which device and contract differ, both as text."""

    sequence: int
    q_head: int
    stage: str
    device: str
    reference: str


@dataclass
class Outcome:
    """What a replay came to.

    Members
    -------
    equal : whether the device's result has the contract's bits now.
    recorded_equal : whether the result in the file has them.
    lanes, unequal : lanes of the result, and how many of them differ.
    stages : what differs on the way, of the first query that does.
    """

    equal: bool
    recorded_equal: bool
    lanes: int
    unequal: int
    stages: list[Stage] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**vars(self), "stages": [vars(stage) for stage in self.stages]}


def bits_of(result: torch.Tensor) -> torch.Tensor:
    """A result's bit patterns, so that NaN equals itself and -0 is not 0."""
    return result.contiguous().view(torch.int32 if result.dtype == torch.float32 else torch.int16)


def save(
    path: Path, case: Case, *, device: torch.Tensor, reference: torch.Tensor, partial: Partial | None
) -> None:
    """Write a replay file.

    Parameters
    ----------
    path : where; its directory is made if need be.
    case : the call.
    device, reference : both results.
    partial : the device's partial of the same call, where it was to be had.
    """
    own = case.reference(partial=True)
    assert isinstance(own, Partial)
    arrays = {
        "q": case.q.view(torch.int16),
        "k": _codes(case.k),
        "v": _codes(case.v),
        **{name: _codes(tensor) for name, tensor in case.extras.items()},
        "device": bits_of(device),
        "reference": bits_of(reference),
        **_planes("reference", own),
    }
    if case.sinks is not None:
        arrays["sinks"] = case.sinks.view(torch.int32)
    if partial is not None:
        arrays |= _planes("device", partial)
    about = {
        "version": FILE_VERSION,
        "dtype": FORMATS[case.q.dtype].name,
        "form": None if case.form is None else _described(case.form),
        "out_dtype": next(name for name, dtype in _OUT_DTYPES.items() if dtype == case.out_dtype),
        "lengths": case.lengths,
        "ranges": case.ranges,
        "scale": case.scale.hex(),
        "softcap": None if case.softcap is None else float(case.softcap).hex(),
        "page_rows": case.page_rows,
        "device": case.device,
        "config": case.config.to_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Any] = {name: np.asarray(tensor.cpu().numpy()) for name, tensor in arrays.items()}
    np.savez_compressed(path, about=np.array(json.dumps(about)), **contents)


def load(path: Path) -> tuple[Case, torch.Tensor]:
    """Read a replay file: the case, and the result that the device gave then.

    Raises
    ------
    ArgumentError : when the file is none, or of another version.
    """
    try:
        if path.is_file() and not is_zipfile(path):
            raise ValueError("it is no archive of arrays, as a check writes them")
        with np.load(path, allow_pickle=False) as archive:
            about = json.loads(str(archive["about"]))
            arrays = {
                name: torch.from_numpy(archive[name].copy()) for name in archive.files if name != "about"
            }
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ArgumentError(f"{path} is no replay file: {error}") from error
    if about.get("version") != FILE_VERSION:
        raise ArgumentError(f"{path} has version {about.get('version')}, this release reads {FILE_VERSION}")
    dtype, out_dtype = DTYPES[about["dtype"]], _OUT_DTYPES[about["out_dtype"]]
    form = None if about["form"] is None else _form_of(about["form"])
    case = Case(
        q=arrays["q"].view(dtype),
        k=arrays["k"] if form else arrays["k"].view(dtype),
        v=arrays["v"] if form else arrays["v"].view(dtype),
        lengths=tuple(about["lengths"]),
        ranges=tuple((begin, end) for begin, end in about["ranges"]),
        scale=float.fromhex(about["scale"]),
        sinks=arrays["sinks"].view(torch.float32) if "sinks" in arrays else None,
        out_dtype=out_dtype,
        page_rows=about["page_rows"],
        device=about["device"],
        config=DeviceConfig(**about["config"]),
        form=form,
        softcap=None if about["softcap"] is None else float.fromhex(about["softcap"]),
        extras={name: _typed(name, arrays[name]) for name in _EXTRAS if name in arrays},
    )
    return case, arrays["device"].view(out_dtype)


def open_for(case: Case, device: str | None = None, *, trace: bool = False) -> Device:
    """A device like the one that the case was seen on.

    Parameters
    ----------
    case : from `load`.
    device : another kind of device; with a preset it is that one, and not as the case has it.
    trace : whether waves can be recorded.
    """
    spec = case.device if device is None else device
    if ":" in spec:
        return open(spec, trace=trace)
    preset = case.config.name if case.config.name in PRESETS else "small"
    wanted, default = case.config.to_dict(), PRESETS[preset].to_dict()
    changed = {name: wanted[name] for name in wanted if wanted[name] != default[name]}
    return open(f"{spec}:{preset}", trace=trace, **changed)


def replay(case: Case, recorded: torch.Tensor, device: Device) -> Outcome:
    """Run a case again, hold it against the contract, and find out where bits part if they do.

    Parameters
    ----------
    case, recorded : what `load` returned.
    device : where to run it.
    """
    expected = case.reference()
    assert isinstance(expected, torch.Tensor)
    with case.on(device) as placed:
        result = placed.result(case)
        unequal = bits_of(result) != bits_of(expected)
        outcome = Outcome(
            equal=not bool(unequal.any()),
            recorded_equal=torch.equal(bits_of(recorded), bits_of(expected)),
            lanes=unequal.numel(),
            unequal=int(unequal.sum()),
        )
        if not outcome.equal:
            outcome.stages = _stages(case, placed, unequal)
    return outcome


def _stages(case: Case, placed: _Placed, unequal: torch.Tensor) -> list[Stage]:
    """What differs in the first unequal query, from the result back to the first row at fault."""
    sequence, head = (int(i) for i in unequal.any(-1).nonzero()[0])
    device, own = placed.partial(case), case.reference(partial=True)
    assert isinstance(own, Partial)
    stages = _differing(sequence, head, "all rows", device, own, (sequence, head))
    if not stages:
        return [Stage(sequence, head, "finish", "equal partials", "unequal results")]
    begin, end = case.ranges[sequence]
    while end - begin > 1:
        middle = (begin + end) // 2
        for part in ((begin, middle), (middle, end)):
            narrowed = case.narrowed(sequence, *part)
            device, own = placed.partial(narrowed, sequence), narrowed.reference(partial=True)
            assert isinstance(own, Partial)
            if device.differing(own)[0, head]:
                begin, end = part
                break
        else:
            return [*stages, Stage(sequence, head, f"rows {begin} to {end}", "unequal", "both halves equal")]
    if begin < end:
        narrowed = case.narrowed(sequence, begin, end)
        device, own = placed.partial(narrowed, sequence), narrowed.reference(partial=True)
        assert isinstance(own, Partial)
        name = f"row {begin}"
        weights = [_weight(partial.denominator, head) for partial in (device, own)]
        texts = [
            f"{w.significand} * 2^{w.exponent - WEIGHT_FRACTION_BITS}, score {w.score:.5f}" for w in weights
        ]
        stages.append(Stage(sequence, head, f"{name} weight", texts[0], texts[1]))
        stages += _differing(sequence, head, name, device, own, (0, head))
    return stages


def _differing(
    sequence: int, head: int, name: str, device: Partial, own: Partial, at: tuple[int, int]
) -> list[Stage]:
    """The states and flags of one query that differ between two partials."""
    stages = []
    texts = [str(_triple(partial.denominator, at)) for partial in (device, own)]
    if texts[0] != texts[1]:
        stages.append(Stage(sequence, head, f"{name} denominator", texts[0], texts[1]))
    flags = [f"NaN {bool(partial.query_nan[at])}" for partial in (device, own)]
    if flags[0] != flags[1]:
        stages.append(Stage(sequence, head, f"{name} query flag", flags[0], flags[1]))
    differing = device.lane_flags[at] != own.lane_flags[at]
    for plane in ("top", "high", "low"):
        differing = differing | (getattr(device.numerators, plane)[at] != getattr(own.numerators, plane)[at])
    lanes = differing.nonzero().flatten().tolist()
    if lanes:
        first = (*at, lanes[0])
        texts = [
            f"{_triple(partial.numerators, first)} flags {int(partial.lane_flags[first])}"
            for partial in (device, own)
        ]
        stages.append(
            Stage(
                sequence, head, f"{name} numerators: {len(lanes)} lanes, first {lanes[0]}", texts[0], texts[1]
            )
        )
    return stages


def _triple(state: State, at: tuple[int, ...]) -> list[int | None]:
    top = int(state.top[at])
    return [None if top == TOP_NONE else top, int(state.high[at]), int(state.low[at])]


def _weight(state: State, head: int) -> Weight:
    """The one weight that a denominator of one row holds."""
    top, high, low = (int(plane[0, head]) for plane in (state.top, state.high, state.low))
    value = (high << BIN_BITS) + low
    if top == TOP_NONE or value <= 0:
        return Weight(0, 0)
    shift = value.bit_length() - WEIGHT_BITS
    significand = value >> shift if shift >= 0 else value << -shift
    return Weight(significand, BIN_BITS * (top - 1) + shift + WEIGHT_FRACTION_BITS)


def _planes(owner: str, partial: Partial) -> dict[str, torch.Tensor]:
    """A partial as the arrays of a replay file."""
    planes = {}
    for name, state in (("denominator", partial.denominator), ("numerators", partial.numerators)):
        for plane in ("top", "high", "low"):
            planes[f"{owner}_{name}_{plane}"] = getattr(state, plane)
    planes[f"{owner}_query_nan"] = partial.query_nan
    planes[f"{owner}_lane_flags"] = partial.lane_flags
    return planes


def _codes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers of its width, as a file holds it."""
    tensor = tensor.contiguous()
    kinds = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
    return tensor.view(kinds[tensor.dtype]) if tensor.dtype in kinds else tensor


def _typed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What `_codes` made an integer, as it was."""
    if name in ("k_scale", "v_scale"):
        return tensor.view(torch.float32)
    return tensor.view(torch.float16) if name in ("k_lut", "v_lut") else tensor


def _described(form: CacheFormat) -> dict[str, Any]:
    rows = {name: row for name, row in (("k", form.k), ("v", form.v)) if row is not None}
    described = {name: {**vars(row), "rule": row.rule.value} for name, row in rows.items()}
    return {"name": form.name, **described}


def _form_of(about: dict[str, Any]) -> CacheFormat:
    rows = [
        RowFormat(**{**about[name], "rule": Rule(about[name]["rule"])}) if name in about else None
        for name in ("k", "v")
    ]
    assert rows[0] is not None
    return CacheFormat(about["name"], rows[0], rows[1])
