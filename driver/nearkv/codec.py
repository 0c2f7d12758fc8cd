"""Tensors and packed records as arrays of lines, and back: the driver never builds a line byte by byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import LINE_BYTES, formats
from nearkv_hw.abi.bits import Layout
from nearkv_sim.port import Addresses, Lines

from .errors import DtypeError

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Element formats that this driver stores, by the names that users write."""
FORMATS: dict[torch.dtype, formats.Format] = {
    dtype: formats.ELEMENT_FORMATS[n] for n, dtype in DTYPES.items()
}


def element_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch type of an element format's name, or of itself; DtypeError when it is not stored."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in FORMATS:
        names = ", ".join(repr(name) for name in DTYPES)
        raise DtypeError(f"dtype={dtype!r}: a cache holds {names} (or the torch types of these)")
    return found


def codes_of(rows: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits as their codes, on the CPU."""
    if rows.requires_grad:
        rows = rows.detach()
    return (rows if rows.is_cpu else rows.cpu()).view(torch.int16)


def rows_to_lines(rows: torch.Tensor, lines: int) -> npt.NDArray[np.uint8]:
    """Rows [..., elements] of 16-bit elements as lines [..., lines, 64], the last one padded with zeros."""
    codes = codes_of(rows).contiguous().numpy()
    per_row = lines * LINE_BYTES // 2
    if codes.shape[-1] != per_row:
        padded = np.zeros((*codes.shape[:-1], per_row), np.int16)
        padded[..., : codes.shape[-1]] = codes
        codes = padded
    return codes.view(np.uint8).reshape(*codes.shape[:-1], lines, LINE_BYTES)


def codes_to_bytes(codes: torch.Tensor, form: formats.Format, pitch: int) -> npt.NDArray[np.uint8]:
    """Rows of codes [..., elements], as they are kept in tensors, as bytes [..., pitch], padded with zeros.

    Codes of 4 bits lie two to a byte, the first in the low bits.
    """
    kept = codes.detach().cpu().contiguous().numpy()
    if form.bits == 4:
        if kept.shape[-1] % 2:
            kept = np.concatenate([kept, np.zeros((*kept.shape[:-1], 1), kept.dtype)], axis=-1)
        kept = kept[..., 0::2] | kept[..., 1::2] << 4
    raw = np.ascontiguousarray(kept).view(np.uint8)
    if raw.shape[-1] == pitch:
        return raw
    padded = np.zeros((*raw.shape[:-1], pitch), np.uint8)
    padded[..., : raw.shape[-1]] = raw
    return padded


def bytes_to_codes(data: npt.NDArray[np.uint8], form: formats.Format, elements: int) -> torch.Tensor:
    """Bytes [..., pitch] as codes [..., elements]: int16 for formats of 16 bits, else uint8."""
    if form.bits == 16:
        return torch.from_numpy(np.ascontiguousarray(data).view(np.int16)[..., :elements].copy())
    if form.bits == 4:
        data = np.stack([data & 0xF, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])
    return torch.from_numpy(data[..., :elements].copy())


def record_line(layout: Layout, **values: int) -> Lines:
    """One packed record as lines [1, 64]."""
    return np.frombuffer(layout.pack_bytes(values), np.uint8).reshape(1, LINE_BYTES).copy()


def span(address: int, lines: int) -> Addresses:
    """The addresses of consecutive lines."""
    return np.arange(address, address + lines * LINE_BYTES, LINE_BYTES, dtype=np.uint64)


def one(address: int) -> Addresses:
    """One address as an array."""
    return np.array([address], dtype=np.uint64)
