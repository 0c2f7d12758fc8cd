"""What every port checks of what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.cxl import M2S_REQ
from nearkv_hw.abi.dram import Dram
from nearkv_hw.abi.lines import LINE_BITS, LINE_BYTES, LINE_SHIFT

from .port import Addresses, Fence, Operation, Poll, Program, Read, Write

_ADDRESS_BITS = M2S_REQ["address"].width + LINE_SHIFT
"""What a message carries; a longer address would reach another line."""
_LD_ID_BITS = M2S_REQ["ld_id"].width
_NO_ADDRESS_BITS = np.uint64((1 << 64) - (1 << _ADDRESS_BITS) + LINE_BYTES - 1)


def checked(program: Program) -> list[Operation]:
    """The program with contiguous arrays of the declared types.

    Raises
    ------
    ValueError : an address misaligned or beyond CXL's 52 bits, or arrays that do not fit each other.
    TypeError : something that is no operation.
    """
    return [_checked(operation) for operation in program]


def ld_ids_of(config: DeviceConfig, addresses: Addresses) -> npt.NDArray[np.uint8]:
    """The LD-IDs of messages to host addresses, [n]: of the logical devices whose apertures these are."""
    logical = addresses // np.uint64(config.logical_apertures * config.aperture_bytes)
    return (logical & np.uint64((1 << _LD_ID_BITS) - 1)).astype(np.uint8)


def ld_id_of(config: DeviceConfig, address: int) -> int:
    """That of a message to one host address; 0 with one logical device."""
    if config.logical_devices == 1:
        return 0
    return int(ld_ids_of(config, np.array([address], np.uint64))[0])


def with_ld_ids(config: DeviceConfig, operation: Operation) -> Operation:
    """A checked operation with the LD-IDs that nobody gave; None, which is 0, with one logical device."""
    if config.logical_devices > 1 and isinstance(operation, Read | Write) and operation.ld_ids is None:
        return replace(operation, ld_ids=ld_ids_of(config, operation.addresses))
    return operation


def check_shaking(*, idle: float, backpressure: float) -> None:
    """Refuse what is no probability with which a device can still answer: ValueError."""
    for name, value in (("idle", idle), ("backpressure", backpressure)):
        if not 0 <= value <= 0.99:
            raise ValueError(f"{name} is a probability from 0 to 0.99, not {value!r}")


NO_DECODERS = "the device has no HDM decoders between link and memory; open it with hdm_decoders=4"
"""Of one whose registers nobody can write."""
STORED_BITS = LINE_BITS + LINE_BYTES
"""Bits of a line in the DRAM: its data, and eight check bits for each word of 64."""


def check_injection(config: DeviceConfig, address: int, bits: Sequence[int]) -> None:
    """Refuse bits that no line of the device has (ValueError), or that no memory keeps (RuntimeError)."""
    if not 0 <= address < config.capacity_bytes or address % LINE_BYTES:
        raise ValueError(
            f"address must be a multiple of {LINE_BYTES} below {config.capacity_bytes:#x}, not {address:#x}"
        )
    for bit in bits:
        if not 0 <= bit < STORED_BITS:
            raise ValueError(f"bits must be from 0 to {STORED_BITS - 1}, not {bit!r}")
    if config.dram is Dram.FIXED:
        raise RuntimeError("a device with dram=fixed keeps no check bits; choose a DRAM part")


def _checked(operation: Operation) -> Operation:
    match operation:
        case Write():
            addresses = _addresses(operation.addresses)
            data = np.ascontiguousarray(operation.data, dtype=np.uint8)
            if data.shape != (len(addresses), LINE_BYTES):
                raise ValueError(f"data must be [{len(addresses)}, {LINE_BYTES}], not {list(data.shape)}")
            ld_ids = _ld_ids(operation.ld_ids, addresses)
            if operation.enables is None:
                return Write(addresses, data, None, operation.poison, ld_ids)
            enables = np.ascontiguousarray(operation.enables, dtype=np.uint64)
            if enables.shape != addresses.shape:
                raise ValueError(f"enables must be [{len(addresses)}], not {list(enables.shape)}")
            return Write(addresses, data, enables, operation.poison, ld_ids)
        case Read():
            addresses = _addresses(operation.addresses)
            return Read(addresses, _ld_ids(operation.ld_ids, addresses))
        case Poll():
            if operation.address % LINE_BYTES:
                raise ValueError(
                    f"a poll's address must be a multiple of {LINE_BYTES}, not {operation.address:#x}"
                )
            if operation.address >> _ADDRESS_BITS:
                raise ValueError(
                    f"a poll's address must have at most {_ADDRESS_BITS} bits, not be {operation.address:#x}"
                )
            return operation
        case Fence():
            return operation
    raise TypeError(f"a program consists of Write, Read, Fence and Poll, not {operation!r}")


def _ld_ids(given: npt.ArrayLike | None, addresses: Addresses) -> npt.NDArray[np.uint8] | None:
    if given is None:
        return None
    ld_ids = np.ascontiguousarray(given, dtype=np.uint8)
    if ld_ids.shape != addresses.shape:
        raise ValueError(f"ld_ids must be [{len(addresses)}], not {list(ld_ids.shape)}")
    if (ld_ids >> _LD_ID_BITS).any():
        raise ValueError(f"ld_ids must be below {1 << _LD_ID_BITS}, not {int(ld_ids.max())}")
    return ld_ids


def _addresses(addresses: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    array = np.ascontiguousarray(addresses, dtype=np.uint64)
    if array.ndim != 1:
        raise ValueError(f"addresses must have one dimension, not {array.ndim}")
    if not (array & _NO_ADDRESS_BITS).any():
        return array
    misaligned = array % LINE_BYTES != 0
    if misaligned.any():
        raise ValueError(f"addresses must be multiples of {LINE_BYTES}, not {int(array[misaligned][0]):#x}")
    beyond = array >> np.uint64(_ADDRESS_BITS) != 0
    raise ValueError(f"addresses must have at most {_ADDRESS_BITS} bits, not be {int(array[beyond][0]):#x}")
