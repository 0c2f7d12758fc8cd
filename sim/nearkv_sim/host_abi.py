"""What Python and the C++ host share of a program. `messages.cpp_header` makes the C++ side of it."""

from __future__ import annotations

from ctypes import Structure, c_uint32, c_uint64, c_void_p
from enum import IntEnum


class Kind(IntEnum):
    """What an operation of a program does."""

    WRITE = 0
    READ = 1
    FENCE = 2
    POLL = 3


class Status(IntEnum):
    """How far a program is."""

    DONE = 0
    RUNNING = 1
    TIMEOUT = 2
    """A poll ended in vain."""
    BROKEN = 3
    """The device broke the protocol, or answers no more."""


OPERATION = (
    ("kind", c_uint32, "Kind", "what to do"),
    ("poison", c_uint32, "std::uint32_t", "of a write, 1 where its data is bad"),
    ("count", c_uint64, "std::uint64_t", "lines of a read or write"),
    ("addresses", c_void_p, "const std::uint64_t*", "host byte addresses"),
    ("data", c_void_p, "std::uint8_t*", "lines: what to write, or where reads go"),
    ("enables", c_void_p, "const std::uint64_t*", "of a write, a bit per byte; null for whole lines"),
    ("ld_ids", c_void_p, "const std::uint8_t*", "of its messages; null where all are 0"),
    ("access", c_void_p, "Access*", "of a read, how each line was answered"),
    ("address", c_uint64, "std::uint64_t", "of a poll"),
    ("mask", c_uint64, "std::uint64_t", "of a poll"),
    ("value", c_uint64, "std::uint64_t", "of a poll"),
    ("timeout_cycles", c_uint64, "std::uint64_t", "of a poll"),
    ("ld_id", c_uint64, "std::uint64_t", "of a poll"),
)
"""Members of an operation: name, types here and in C++, meaning."""


class NativeOperation(Structure):
    """`nearkv::Operation` of the C++ host."""

    _fields_ = tuple((name, kind) for name, kind, _, _ in OPERATION)
