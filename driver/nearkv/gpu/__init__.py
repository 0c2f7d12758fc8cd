"""The numerics contract on a GPU, in Triton: the bits of `nearkv.reference` without its temporaries.

For rows that a GPU holds itself (the hot tier, partials that meet a device's) and as the reference where the
one in torch is too slow. `pip install 'nearkv[gpu]'` brings Triton. Without a GPU its interpreter runs the
same kernel on the CPU, slowly: set TRITON_INTERPRET=1 before anything imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearkv.reference import Partial, finish, log_sum_exp
from nearkv.reference.arguments import Attention, check
from nearkv.reference.attention import with_sinks
from nearkv.reference.binned import State
from nearkv.reference.finish import output_target
from nearkv.reference.visibility import Asked

try:
    from .launch import planes
except ModuleNotFoundError as missing:
    if missing.name != "triton":
        raise
    raise ModuleNotFoundError(
        "nearkv.gpu needs Triton: pip install 'nearkv[gpu]'", name="triton"
    ) from missing

_OF_VISIBILITY = tuple(Asked.__dataclass_fields__)
_DEFAULTS: dict[str, Any] = {
    "value_dim": None,
    "sinks": None,
    "k_format": "bf16",
    "v_format": None,
    "k_scales": None,
    "v_scales": None,
    "k_lut": None,
    "v_lut": None,
    "scale_block": None,
    "scale_format": None,
    "k_scale": None,
    "softcap": None,
    "alibi_slopes": None,
}


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    scale: float,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    partial: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | Partial | tuple[Tensor, Tensor]:
    """`nearkv.reference.decode_attention` by a Triton kernel: the same arguments, the same bits.

    Parameters
    ----------
    q, k, v, scale, v_scale, out_dtype, partial, return_lse, options : as the reference has them.

    Returns
    -------
    What the reference returns, on the same device.

    Raises
    ------
    ValueError, TypeError : what the reference raises.
    RuntimeError : for tensors on a CPU, unless Triton interprets.
    """
    output_target(out_dtype)
    if partial and (v_scale is not None or return_lse):
        raise ValueError("v_scale and return_lse belong to a finished result: use finish() and log_sum_exp()")
    asked = Asked(**{name: options.pop(name) for name in _OF_VISIBILITY if name in options})
    unknown = options.keys() - _DEFAULTS.keys()
    if unknown:
        known = ", ".join([*_DEFAULTS, *_OF_VISIBILITY])
        raise TypeError(f"decode_attention() has no option {min(unknown)!r}; there are {known}")
    call = check(
        q,
        k,
        v,
        scale=scale,
        v_scale=v_scale,
        asked=asked,
        **{**_DEFAULTS, **options},
    )
    result = _attend(call)
    result = result.reshaped(tuple(q.shape[:-2]))
    if partial:
        return result
    output = finish(result, out_dtype, v_scale)
    return (output, log_sum_exp(result)) if return_lse else output


def _attend(call: Attention) -> Partial:
    """The partial of a call, queries [batch, query_rows, q_heads]."""
    batch, query_rows, q_heads = call.q.shape[:3]
    heads, group = call.kv_heads, q_heads // call.kv_heads
    denominator, query_nan, numerators, flags = planes(call)
    result = Partial(denominator, numerators, query_nan, flags)
    if call.sinks is not None:
        sinks = call.sinks.view(heads, 1, group).expand(heads, query_rows, group)
        result = with_sinks(result, sinks)

    def unfolded(plane: Tensor) -> Tensor:
        lanes = plane.shape[3:]
        plane = plane.view(batch, heads, query_rows, group, *lanes).transpose(1, 2)
        return plane.reshape(batch, query_rows, q_heads, *lanes)

    def states(state: State) -> State:
        return State(unfolded(state.top), unfolded(state.high), unfolded(state.low))

    return Partial(
        states(result.denominator),
        states(result.numerators),
        unfolded(result.query_nan),
        unfolded(result.lane_flags),
    )
