"""The arguments of `decode_attention`, checked and brought to one form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from nearkv_hw.abi.formats import ELEMENT_FORMATS, QUERY_FORMATS, SCALE_BLOCKS, SCALE_FORMATS, Format
from nearkv_hw.abi.numerics import MAX_ROWS
from torch import Tensor

from nearkv.reference.alibi import alibi_bits
from nearkv.reference.elements import VALUE_FORMATS, Elements, decode, scaled
from nearkv.reference.positions import Positions, checked_positions
from nearkv.reference.score import score_factor
from nearkv.reference.softcap import softcap_bits

SCALED_BITS = 8
"""Formats of at most this many bits may carry scales."""

Value = TypeVar("Value", int, str)
Blocks = int | tuple[int | None, int | None] | None
Names = str | tuple[str | None, str | None] | None
"""What K and V have alike, or a pair: K's and V's."""


@dataclass(frozen=True)
class Rows:
    """K or V: codes [batch, rows, kv_heads, dim] of a format, and the codes of their scales.

    Parameters
    ----------
    codes : uint8 or int16.
    element : format of the codes.
    scales : codes [batch, rows, kv_heads, blocks], or None.
    scale : format of the scales, or None.
    block : elements that share a scale.
    """

    codes: Tensor
    element: Format
    scales: Tensor | None = None
    scale: Format | None = None
    block: int = 0

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.codes.shape[3]

    def decode(self, begin: int, end: int) -> Elements:
        """Rows `begin` to `end` (excluded) as elements [batch, kv_heads, rows, dim], scales multiplied in."""
        elements = decode(self.codes[:, begin:end].transpose(1, 2), self.element)
        if self.scales is None or self.scale is None:
            return elements
        return scaled(elements, decode(self.scales[:, begin:end].transpose(1, 2), self.scale), self.block)


@dataclass(frozen=True)
class Attention:
    """One checked call: B sequences, T query rows, Hq query heads over Hkv KV heads.

    Parameters
    ----------
    q : codes [B, T, Hq, head_dim] of `q_format`.
    k, v : the rows.
    factors : int32 [Hkv], float32 codes of the score's factor c.
    visible : bool [B, 1 or T, rows], or None.
    sinks : float32 [Hq], or None.
    softcap : float32 bits of C2, or None.
    slopes : int32 [Hq], float32 codes of the ALiBi slopes in base 2, or None.
    positions : of query rows and rows.
    """

    q: Tensor
    q_format: Format
    k: Rows
    v: Rows
    factors: Tensor
    visible: Tensor | None
    sinks: Tensor | None
    softcap: int | None
    slopes: Tensor | None
    positions: Positions

    @property
    def rows(self) -> int:
        """Rows of K and V."""
        return self.k.codes.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.k.codes.shape[2]


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None,
    sinks: Tensor | None,
    k_format: str,
    v_format: str | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    scale_block: Blocks,
    scale_format: Names,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    query_positions: Tensor | None,
    row_positions: Tensor | None,
) -> Attention:
    """The call in one form; ValueError or TypeError that says what was given and what is allowed."""
    _check_devices(
        q=q,
        k=k,
        v=v,
        visible=visible,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        v_scale=v_scale,
        query_positions=query_positions,
        row_positions=row_positions,
    )
    if q.dim() not in (3, 4):
        raise ValueError(
            "q must be [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim], "
            f"got shape {tuple(q.shape)}"
        )
    if q.dtype not in VALUE_FORMATS:
        raise TypeError(f"q must be bfloat16 or float16, not {q.dtype}; convert it: q.to(torch.float16)")
    if k_scales is None and v_scales is None and (scale_block is not None or scale_format is not None):
        raise ValueError("scale_block and scale_format need k_scales or v_scales")
    blocks, scale_formats = _pair("scale_block", scale_block), _pair("scale_format", scale_format)
    k_rows = _rows("k", k, k_format, k_scales, blocks[0], scale_formats[0])
    v_rows = _rows("v", v, v_format or _inherited(v, k_rows), v_scales, blocks[1], scale_formats[1])
    rows = q if q.dim() == 4 else q.unsqueeze(1)
    _check_shapes(rows, k, v)
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None:
            _check_per_head(name, factor, k.shape[2], "kv_heads")
    cap = None if softcap is None else softcap_bits(softcap)
    return Attention(
        q=rows.detach().view(torch.int16),
        q_format=QUERY_FORMATS[VALUE_FORMATS[q.dtype]],
        k=k_rows,
        v=v_rows,
        factors=_factors(scale, k_scale, softcap, k.shape[2]).to(q.device),
        visible=None if visible is None else _checked_visible(visible, rows, k),
        sinks=None if sinks is None else _checked_sinks(sinks, rows.shape[2]),
        softcap=cap,
        slopes=None if alibi_slopes is None else _slopes(alibi_slopes, rows.shape[2]).to(q.device),
        positions=checked_positions(q, k.shape[1], query_positions, row_positions),
    )


def _check_devices(**tensors: Tensor | None) -> None:
    """Whether all that is given is a tensor, and all on one device."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and q on {device}; all must be on one device")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Whether q [B, T, Hq, D], k and v fit each other."""
    if v.shape[:3] != k.shape[:3]:
        shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(f"k and v must have the same batch, rows and kv_heads, got {shapes}")
    batch, rows, kv_heads, head_dim = k.shape
    if q.shape[0] != batch:
        raise ValueError(f"q has batch {q.shape[0]}, k has {batch}")
    if q.shape[3] != head_dim:
        raise ValueError(f"q has head_dim {q.shape[3]}, k has {head_dim}")
    if head_dim == 0 or v.shape[3] == 0 or kv_heads == 0 or q.shape[2] == 0:
        raise ValueError(f"heads and dims must be at least 1, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if q.shape[2] % kv_heads:
        raise ValueError(f"{q.shape[2]} query heads cannot be divided over {kv_heads} KV heads")
    if rows > MAX_ROWS:
        raise ValueError(f"a context holds at most {MAX_ROWS} rows, got {rows}")


def _pair(
    name: str, value: Value | tuple[Value | None, Value | None] | None
) -> tuple[Value | None, Value | None]:
    """K's and V's of what was given for both or as a pair."""
    if not isinstance(value, tuple):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} must be one value or a pair, K's and V's, got {value!r}")
    return value


def _inherited(v: Tensor, k_rows: Rows) -> str:
    """V's format where none is given: its own for values, K's for codes."""
    return VALUE_FORMATS.get(v.dtype, k_rows.element.name)


def _rows(
    name: str,
    tensor: Tensor,
    element: str,
    scales: Tensor | None,
    block: int | None,
    scale_format: str | None,
) -> Rows:
    """K or V with its scales, checked in themselves."""
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be [batch, rows, kv_heads, dim], got shape {tuple(tensor.shape)}")
    if element not in ELEMENT_FORMATS:
        raise ValueError(f"{name}_format must be one of {', '.join(ELEMENT_FORMATS)}, not {element!r}")
    own = VALUE_FORMATS.get(tensor.dtype)
    # The default "bf16" stands for "none given" where the tensor says itself that it is fp16.
    if own is not None and element not in (own, "bf16"):
        raise ValueError(f"{name} holds {tensor.dtype} values, which are {own}; {name}_format says {element}")
    form = ELEMENT_FORMATS[own or element]
    codes = _codes(name, tensor, form)
    if scales is None:
        return Rows(codes, form)
    if form.bits > SCALED_BITS:
        raise ValueError(f"{name} is {form.name}; only formats of {SCALED_BITS} bits or fewer carry scales")
    dim = tensor.shape[3]
    if block is not None and block not in SCALE_BLOCKS:
        allowed = ", ".join(str(size) for size in SCALE_BLOCKS)
        raise ValueError(f"scale_block must be {allowed} or None for the whole row, not {block!r}")
    size = block or max(dim, 1)
    wanted = (*tensor.shape[:3], -(-dim // size))
    if tuple(scales.shape) != wanted:
        given = tuple(scales.shape)
        raise ValueError(f"{name}_scales must have shape {wanted} for blocks of {size}, got {given}")
    scale_name = scale_format or VALUE_FORMATS.get(scales.dtype)
    if scale_name not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {', '.join(SCALE_FORMATS)}, not {scale_name!r}")
    if scales.dtype in VALUE_FORMATS and VALUE_FORMATS[scales.dtype] != scale_name:
        raise ValueError(f"{name}_scales holds {scales.dtype} values; scale_format says {scale_name}")
    scale = SCALE_FORMATS[scale_name]
    return Rows(codes, form, _codes(f"{name}_scales", scales, scale), scale, size)


def _codes(name: str, tensor: Tensor, form: Format) -> Tensor:
    """A tensor's codes, of the type that the format is stored in."""
    if VALUE_FORMATS.get(tensor.dtype) == form.name:
        return tensor.detach().view(torch.int16)
    storage = torch.int16 if form.bits == 16 else torch.uint8
    if tensor.dtype != storage:
        values = next((f" or {dtype} values" for dtype, own in VALUE_FORMATS.items() if own == form.name), "")
        raise TypeError(f"{name} of format {form.name} must be {storage} codes{values}, got {tensor.dtype}")
    if form.bits < 8 and tensor.numel() and int(tensor.amax()) >> form.bits:
        raise ValueError(f"{name}: a code of {form.name} is below {1 << form.bits}, got {int(tensor.amax())}")
    return tensor


def _factors(scale: float, k_scale: Tensor | None, softcap: float | None, kv_heads: int) -> Tensor:
    """The score's factor per KV head, int32 codes on the CPU."""
    if k_scale is None:
        codes = [score_factor(scale, softcap=softcap)] * kv_heads
    else:
        codes = [score_factor(scale, factor, softcap=softcap) for factor in k_scale.tolist()]
    return _int32(codes)


def _slopes(slopes: Tensor, q_heads: int) -> Tensor:
    """ALiBi slopes in base 2 per query head, int32 codes on the CPU."""
    _check_per_head("alibi_slopes", slopes, q_heads, "q_heads")
    return _int32([alibi_bits(slope) for slope in slopes.tolist()])


def _int32(codes: list[int]) -> Tensor:
    """Unsigned codes of 32 bits as int32."""
    return torch.tensor(codes, dtype=torch.int64).to(torch.int32)


def _check_per_head(name: str, factor: Tensor, heads: int, kind: str) -> None:
    if not isinstance(factor, Tensor) or factor.dtype != torch.float32:
        given = factor.dtype if isinstance(factor, Tensor) else type(factor).__name__
        raise TypeError(f"{name} must be a float32 tensor [{kind}], not {given}")
    if tuple(factor.shape) != (heads,):
        raise ValueError(f"{name} must be [{kind}] = ({heads},), got {tuple(factor.shape)}")


def _checked_visible(visible: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`visible` as [B, 1 or T, rows]."""
    batch, query_rows, rows = q.shape[0], q.shape[1], k.shape[1]
    if visible.dtype != torch.bool:
        raise TypeError(f"visible must be bool (True = attend), got {visible.dtype}")
    shape = tuple(visible.shape)
    if shape == (batch, rows):
        return visible.unsqueeze(1)
    if shape == (batch, query_rows, rows):
        return visible
    allowed = f"{(batch, rows)} or {(batch, query_rows, rows)}"
    raise ValueError(f"visible must be [batch, rows] or [batch, query_rows, rows], {allowed}, got {shape}")


def _checked_sinks(sinks: Tensor, q_heads: int) -> Tensor:
    """`sinks` as float32."""
    if sinks.dtype not in (torch.float32, *VALUE_FORMATS):
        raise TypeError(f"sinks must be float32 (or bfloat16, float16), got {sinks.dtype}")
    if tuple(sinks.shape) != (q_heads,):
        raise ValueError(f"sinks must be [q_heads] = ({q_heads},), got {tuple(sinks.shape)}")
    return sinks.detach().to(torch.float32)
