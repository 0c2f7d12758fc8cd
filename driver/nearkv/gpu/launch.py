"""One launch of the kernel for a checked call: its tables, its slabs, and their merge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from nearkv_hw.abi.formats import LUT_ENTRIES, LUT_FORMAT
from nearkv_hw.abi.numerics import EXP2_TABLE, TANH_TABLE
from torch import Tensor

from nearkv.reference.arguments import Attention
from nearkv.reference.binned import State
from nearkv.reference.elements import decoding_table
from nearkv.reference.rows import Rows

from .kernel import partials

INTERPRETED = not isinstance(partials, triton.JITFunction)
"""Whether Triton interprets its kernels on the CPU."""
_BLOCK_ELEMENTS = 1 << 16 if INTERPRETED else 1 << 11
"""Elements of a block of rows: on a GPU what a program's registers hold, elsewhere what is worth a step."""
_PROGRAMS = 1024
"""Programs that a launch is cut into where it has the rows: several for each multiprocessor of any GPU."""


def planes(call: Attention) -> tuple[State, Tensor, State, Tensor]:
    """Denominator, query NaN, numerators and lane flags, queries [batch, kv_heads, query_rows * group].

    Raises
    ------
    RuntimeError : for tensors on a CPU, unless Triton interprets.
    """
    device = call.q.device
    if device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            "nearkv.gpu: q is on the CPU; move all tensors to a GPU, or set TRITON_INTERPRET=1 before "
            "anything imports Triton"
        )
    batch, query_rows, q_heads, dim = call.q.shape
    heads, group = call.kv_heads, q_heads // call.kv_heads
    queries = query_rows * group
    count = batch * heads * queries
    k_dim, v_dim = triton.next_power_of_2(dim), triton.next_power_of_2(call.value_dim)
    block = max(min(_BLOCK_ELEMENTS // max(k_dim, v_dim), triton.next_power_of_2(max(call.rows, 1))), 1)
    slabs = max(min(-(-_PROGRAMS // max(count, 1)), -(-call.rows // block)), 1)
    slab = -(-call.rows // slabs)
    states, lanes = (
        [torch.empty(slabs, count, *last, dtype=torch.int64, device=device) for _ in range(4)]
        for last in ((), (call.value_dim,))
    )
    folded = call.q.view(batch, query_rows, heads, group, dim).transpose(1, 2).contiguous()
    k = _Form.of(call.k)
    v = k if call.v is None else _Form.of(call.v)
    visible, strides = _visible(call)
    positions, held = (place.contiguous() for place in (call.visibility.query, call.visibility.rows))
    if count:
        partials[(count, slabs)](
            folded,
            decoding_table(call.q_format, device),
            *k.tensors,
            *v.tensors,
            _exp2(device),
            call.factors,
            _tanh(device),
            torch.tensor([call.softcap or 0], dtype=torch.int64, device=device),
            call.factors if call.slopes is None else call.slopes,
            positions,
            held,
            visible,
            *states,
            *lanes,
            call.rows,
            slab,
            heads,
            queries,
            *strides,
            0 if positions.shape[0] == 1 else positions.shape[1],
            0 if held.shape[0] == 1 else held.shape[1],
            group,
            DIM=dim,
            K_DIM=k_dim,
            V_DIM=v_dim,
            V_PITCH=v.dim,
            VALUE_DIM=call.value_dim,
            BLOCK_ROWS=block,
            SOFTCAP=call.softcap is not None,
            ALIBI=call.slopes is not None,
            Q_WIDTH=call.q_format.significand_bits,
            **k.constants("K"),
            **v.constants("V"),
        )
    shape = (batch, heads, queries)
    denominator = _together([plane.view(slabs, *shape) for plane in states[:3]])
    numerators = _together([plane.view(slabs, *shape, call.value_dim) for plane in lanes[:3]])
    flags = _any_bits(lanes[3]).view(*shape, call.value_dim)
    return denominator, states[3].amax(0).view(shape) != 0, numerators, flags


@dataclass(frozen=True)
class _Form:
    """K or V as the kernel takes it.

    Members
    -------
    tensors : codes, their table, scales, their table and codebook; others stand in for what there is not.
    dim : codes of a row.
    fields : by name what the kernel is compiled for.
    """

    tensors: tuple[Tensor, ...]
    dim: int
    fields: dict[str, int]

    @classmethod
    def of(cls, rows: Rows) -> _Form:
        element = rows.element if rows.lut is None else LUT_FORMAT
        table = decoding_table(element, rows.codes.device)
        codes = rows.codes.contiguous()
        scales = codes if rows.scales is None else rows.scales.contiguous()
        scaled = rows.scales is not None and rows.scale is not None
        fields = {
            "CODE_BITS": element.bits,
            "WIDTH": element.significand_bits,
            "SCALE_BITS": rows.scale.bits if scaled and rows.scale else 0,
            "SCALE_WIDTH": rows.scale.significand_bits if scaled and rows.scale else 0,
            "BLOCK": rows.block or 1,
            "BLOCKS": scales.shape[3],
            "LUT": 0 if rows.lut is None else LUT_ENTRIES,
        }
        scale_table = decoding_table(rows.scale, codes.device) if rows.scale else table
        lut = codes if rows.lut is None else rows.lut.contiguous()
        return cls((codes, table, scales, scale_table, lut), rows.dim, fields)

    def constants(self, part: str) -> dict[str, int]:
        """The fields by the kernel's names for K or V."""
        return {f"{part}_{name}": value for name, value in self.fields.items()}


def _visible(call: Attention) -> tuple[Tensor, tuple[int, int, int]]:
    """Who sees which row, uint8, and its strides by batch, KV head and query row."""
    seen = call.visibility.of(0, call.rows)
    if seen is None:
        return torch.ones(max(call.rows, 1), dtype=torch.uint8, device=call.q.device), (0, 0, 0)
    seen = seen.to(torch.uint8).contiguous()
    batch, head, query = (0 if seen.shape[dim] == 1 else seen.stride(dim) for dim in range(3))
    return seen, (batch, head, query)


def _together(planes: list[Tensor]) -> State:
    """The merge of states [slabs, ...], all at once."""
    tops, highs, lows = planes
    top = tops.amax(0)
    same, lower = tops == top, tops == top - 1
    return State(top, (highs * same).sum(0), (lows * same + highs * lower).sum(0))


def _any_bits(flags: Tensor) -> Tensor:
    """The bits that any of flags [slabs, ...] has."""
    found = flags[0]
    for one in flags[1:]:
        found = found | one
    return found.to(torch.uint8)


@lru_cache(maxsize=16)
def _tanh(device: torch.device) -> Tensor:
    return torch.tensor(TANH_TABLE, dtype=torch.int64, device=device)


@lru_cache(maxsize=16)
def _exp2(device: torch.device) -> Tensor:
    return torch.tensor(EXP2_TABLE, dtype=torch.int64, device=device)
