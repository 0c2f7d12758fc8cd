"""What a running device lets itself be done to below its tenants: poison, erasure, memory taken out of use.

CXL.io commands (`nearkv_sim.cxl_io`) act through it, so what they do is what CXL.mem reads and attention jobs
find. How much of it there is depends on how the device runs.
"""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING, Protocol

from nearkv_hw.abi.mailbox import PoisonSource

if TYPE_CHECKING:
    from .cxl_io.hdm import HdmDecoders


class Ability(IntFlag):
    """What can be done to a device."""

    POISON = 1 << 0
    """Lines can be poisoned; a host's write of a whole one ends it."""
    REPAIR = 1 << 1
    """Poisoned lines can be given new data."""
    ERASE = 1 << 2
    """Memory, ownership and command state can be erased."""
    WITHHOLD = 1 << 3
    """Memory can be kept from all tenants, and given to them."""


class Maintenance(Protocol):
    """What can be done to a device, by device addresses; RuntimeError for what it lacks the ability to.

    Members
    -------
    abilities : what of it there is.
    """

    abilities: Ability

    @property
    def decoders(self) -> HdmDecoders | None:
        """The HDM decoders between its link and its memory; None where it has none there."""

    def poison(self, address: int) -> None:
        """Poison the line at an address, as `Port.inject` of two bits of a word does."""

    def repair(self, address: int, data: bytes) -> None:
        """Write 64 bytes over a line, whoever owns it; it is no longer poisoned."""

    def poisoned(self) -> dict[int, PoisonSource]:
        """Addresses of poisoned lines that are known, and where their poison comes from."""

    def corrected(self) -> int:
        """Lines read with a wrong bit that was put right, since reset."""

    def traffic(self) -> tuple[int, int, int]:
        """Cycles since reset, and messages from the host that read and that write."""

    def link_state(self) -> dict[str, int] | None:
        """The fields of `abi.window.LINK_STATE`; None where no link layer runs."""

    def erase(self) -> None:
        """Erase all memory: nobody owns any, no line is poisoned, command windows are as after reset."""

    def withhold(self, address: int, size: int) -> None:
        """Erase whole extents, and keep them from all tenants."""

    def give(self, address: int, size: int) -> None:
        """Let tenants claim extents that were withheld."""
