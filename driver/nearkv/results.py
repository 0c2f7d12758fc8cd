"""What jobs of a call came to: result lines, and the tensors that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import OutputForm
from nearkv_hw.abi.memory import DENOMINATOR, QUERY_NAN, ResultLayout
from nearkv_sim.columns import column

from .reference import Partial, log_sum_exp
from .ring import Completions

FORMS: dict[torch.dtype, OutputForm] = {
    torch.float32: OutputForm.FP32,
    torch.bfloat16: OutputForm.BF16,
    torch.float16: OutputForm.FP16,
}


@dataclass(frozen=True)
class Finished:
    """What jobs came to.

    Members
    -------
    lines : results [queries..., q_heads, lines, 64], the last one the denominator's if wanted.
    completions : how the jobs ended.
    selected : numbers of the selected pages of each sequence and KV head, where there was a selection.
    """

    lines: npt.NDArray[np.uint8]
    completions: Completions
    selected: list[list[list[int]]] | None = None


def values_of(finished: Finished, heads: tuple[int, ...], value_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Results [*heads, value_dim] of a finished form, for all query heads that there are."""
    kind = np.float32 if dtype == torch.float32 else np.int16
    lanes = finished.lines.reshape(*heads, -1).view(kind)[..., :value_dim]  # the first plane
    found = torch.from_numpy(lanes.copy())
    return found if found.dtype == dtype else found.view(dtype)


def log_sum_exp_of(finished: Finished) -> torch.Tensor:
    """Natural-base log-sum-exp, float32 [batch, q_heads], from the denominator lines."""
    denominator, query_nan = _denominators(finished)
    none = np.zeros((*query_nan.shape, 0), np.int64)
    return log_sum_exp(Partial.from_planes(denominator, (none, none, none), query_nan))


def partial_of(finished: Finished, value_dim: int) -> Partial:
    """Partials of queries [batch, q_heads] from result planes."""
    planes = []
    begin = 0
    for lines, kind in zip(
        ResultLayout(value_dim, OutputForm.PARTIAL).planes, ("<i4", "<i8", "<i8", "u1"), strict=True
    ):
        plane = np.ascontiguousarray(finished.lines[:, :, begin : begin + lines])
        planes.append(plane.reshape(*plane.shape[:2], -1).view(kind)[..., :value_dim].copy())
        begin += lines
    denominator, query_nan = _denominators(finished)
    return Partial.from_planes(denominator, (planes[0], planes[1], planes[2]), query_nan, planes[3])


def _denominators(
    finished: Finished,
) -> tuple[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]]:
    lines = np.ascontiguousarray(finished.lines[:, :, -1])
    top, high, low = (column(DENOMINATOR, name, lines).copy() for name in ("top", "high", "low"))
    return (top, high, low), column(DENOMINATOR, "flags", lines) & QUERY_NAN != 0
