"""Faults for the DRAM model: bits of stored lines that change by themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_uint32, c_uint64, c_void_p

from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.dram import PARTS, Place
from nearkv_hw.abi.dram import address as place_of
from nearkv_hw.abi.lines import LINE_BYTES

from .programs import check_injection


def inject(
    library: ctypes.CDLL, device: int | None, config: DeviceConfig, address: int, bits: Sequence[int]
) -> None:
    """Invert bits of the line at a device address; `Port.inject` says which there are.

    Parameters
    ----------
    library, device : as in `flip_bits`.
    config : of the device.

    Raises
    ------
    ValueError : no line of the device, or no such bit.
    RuntimeError : there is no DRAM behind the device's memory.
    """
    check_injection(config, address, bits)
    extent, within = divmod(address, EXTENT_BYTES)
    line = (extent // config.slices * EXTENT_BYTES + within) // LINE_BYTES
    flip_bits(library, device, config.slice_of(address), place_of(PARTS[config.dram], line), bits)


def flip_bits(
    library: ctypes.CDLL, device: int | None, channel: int, place: Place, bits: Sequence[int]
) -> None:
    """Invert bits of a stored line.

    Parameters
    ----------
    library : where the model is: a device's library, or under cocotb the process (`ctypes.CDLL(None)`).
    device : the device's recorder of events (`nearkv_events`), which tells devices of one library apart; None
        under cocotb.
    channel : the channel, or the slice of memory, whose DRAM it is.
    place : where the line lies, from `address`.
    bits : 0 to 511 of its data, 512 to 575 of its check bits.

    Raises
    ------
    ValueError : there is no such place or bit; those before it are inverted.
    """
    flip = library.nearkv_dram_flip
    flip.argtypes = (c_void_p, *[c_uint32] * 5, POINTER(c_uint32), c_uint64)
    flip.restype = c_uint64
    at = (channel, place.subchannel, place.bank, place.row, place.column)
    done = flip(device, *at, (c_uint32 * len(bits))(*bits), len(bits))
    if done != len(bits):
        raise ValueError(f"there is no bit {bits[done]} at {place} of channel {channel}")
