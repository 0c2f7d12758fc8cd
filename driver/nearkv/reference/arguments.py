"""The arguments of `decode_attention`, checked and brought to one form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nearkv_hw.abi.formats import QUERY_FORMATS, Format
from nearkv_hw.abi.numerics import MAX_ROWS
from torch import Tensor

from nearkv.reference.alibi import alibi_bits
from nearkv.reference.elements import VALUE_FORMATS
from nearkv.reference.rows import Blocks, Names, Rows, checked_rows, pair
from nearkv.reference.score import score_factor
from nearkv.reference.softcap import softcap_bits
from nearkv.reference.visibility import Asked, Visibility, checked_visibility


@dataclass(frozen=True)
class Attention:
    """One checked call: B sequences, T query rows, Hq query heads over Hkv KV heads.

    Parameters
    ----------
    q : codes [B, T, Hq, head_dim] of `q_format`.
    k : the K rows.
    v : the V rows, or None: the first `value_dim` elements of each K row.
    value_dim : elements of a V row and of a result.
    factors : int32 [Hkv], float32 codes of the score's factor c.
    sinks : float32 [Hq], or None.
    softcap : float32 bits of C2, or None.
    slopes : int32 [Hq], float32 codes of the ALiBi slopes in base 2, or None.
    visibility : which rows a query row sees, and positions.
    """

    q: Tensor
    q_format: Format
    k: Rows
    v: Rows | None
    value_dim: int
    factors: Tensor
    sinks: Tensor | None
    softcap: int | None
    slopes: Tensor | None
    visibility: Visibility

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
    v: Tensor | None,
    *,
    scale: float,
    value_dim: int | None,
    sinks: Tensor | None,
    k_format: str,
    v_format: str | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    k_lut: Tensor | None,
    v_lut: Tensor | None,
    scale_block: Blocks,
    scale_format: Names,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    asked: Asked,
) -> Attention:
    """The call in one form; ValueError or TypeError that says what was given and what is allowed."""
    _check_devices(
        q=q,
        k=k,
        v=v,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        k_lut=k_lut,
        v_lut=v_lut,
        v_scale=v_scale,
        **{name: given for name, given in vars(asked).items() if isinstance(given, Tensor)},
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
    blocks, scale_formats = pair("scale_block", scale_block), pair("scale_format", scale_format)
    k_rows = checked_rows(
        "k", k, k_format, scales=k_scales, block=blocks[0], scale_format=scale_formats[0], lut=k_lut
    )
    if v is None:
        v_rows = None
        for name, given in (("v_format", v_format), ("v_scales", v_scales), ("v_lut", v_lut)):
            if given is not None:
                raise ValueError(f"{name} belongs to v; without v, V is part of the K row, with its format")
    else:
        element = v_format or VALUE_FORMATS.get(v.dtype, k_rows.element.name)
        v_rows = checked_rows(
            "v", v, element, scales=v_scales, block=blocks[1], scale_format=scale_formats[1], lut=v_lut
        )
    rows = q if q.dim() == 4 else q.unsqueeze(1)
    _check_shapes(rows, k, v)
    lanes = _checked_value_dim(value_dim, k, v)
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None:
            _check_per_head(name, factor, k.shape[2], "kv_heads")
    cap = None if softcap is None else softcap_bits(softcap)
    return Attention(
        q=rows.detach().view(torch.int16),
        q_format=QUERY_FORMATS[VALUE_FORMATS[q.dtype]],
        k=k_rows,
        v=v_rows,
        value_dim=lanes,
        factors=score_factors(scale, k_scale, softcap, k.shape[2]).to(q.device),
        sinks=None if sinks is None else _checked_sinks(sinks, rows.shape[2]),
        softcap=cap,
        slopes=None if alibi_slopes is None else _slopes(alibi_slopes, rows.shape[2]).to(q.device),
        visibility=checked_visibility(q, k.shape[1], k.shape[2], asked),
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


def _check_shapes(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Whether q [B, T, Hq, D], k and v fit each other."""
    if v is not None and v.shape[:3] != k.shape[:3]:
        shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(f"k and v must have the same batch, rows and kv_heads, got {shapes}")
    batch, rows, kv_heads, head_dim = k.shape
    if q.shape[0] != batch:
        raise ValueError(f"q has batch {q.shape[0]}, k has {batch}")
    if q.shape[3] != head_dim:
        raise ValueError(f"q has head_dim {q.shape[3]}, k has {head_dim}")
    if head_dim == 0 or (v is not None and v.shape[3] == 0) or kv_heads == 0 or q.shape[2] == 0:
        raise ValueError(f"heads and dims must be at least 1, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if q.shape[2] % kv_heads:
        raise ValueError(f"{q.shape[2]} query heads cannot be divided over {kv_heads} KV heads")
    if rows > MAX_ROWS:
        raise ValueError(f"a context holds at most {MAX_ROWS} rows, got {rows}")


def _checked_value_dim(value_dim: int | None, k: Tensor, v: Tensor | None) -> int:
    """Elements of a V row."""
    if v is None:
        if value_dim is None or not 1 <= value_dim <= k.shape[3]:
            raise ValueError(
                f"without v, value_dim must say how many elements of a K row are V, 1 to {k.shape[3]}, "
                f"got {value_dim}"
            )
        return value_dim
    if value_dim is not None and value_dim != v.shape[3]:
        raise ValueError(f"value_dim is {value_dim}, v has rows of {v.shape[3]}")
    return v.shape[3]


def score_factors(scale: float, k_scale: Tensor | None, softcap: float | None, kv_heads: int) -> Tensor:
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


def _checked_sinks(sinks: Tensor, q_heads: int) -> Tensor:
    """`sinks` as float32."""
    if sinks.dtype not in (torch.float32, *VALUE_FORMATS):
        raise TypeError(f"sinks must be float32 (or bfloat16, float16), got {sinks.dtype}")
    if tuple(sinks.shape) != (q_heads,):
        raise ValueError(f"sinks must be [q_heads] = ({q_heads},), got {tuple(sinks.shape)}")
    return sinks.detach().to(torch.float32)
