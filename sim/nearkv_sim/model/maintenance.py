"""What can be done to the model device below its tenants."""

from __future__ import annotations

from collections.abc import Callable

from nearkv_hw.abi.config import EXTENT_SHIFT
from nearkv_hw.abi.dram import Dram
from nearkv_hw.abi.lines import LINE_SHIFT
from nearkv_hw.abi.mailbox import PoisonSource

from ..cxl_io.hdm import HdmDecoders
from ..maintenance import Ability
from .counters import Counters
from .memory import Memory


class ModelMaintenance:
    """`Maintenance` of the model; everything that there is, but poison where the memory keeps no check bits.

    Parameters
    ----------
    dram : what stands behind the device's channels.
    memory : finds the device's memory as it is now.
    counters : the device's.
    restart : gives the device a new memory and new command windows.
    decoders : its HDM decoders, if it has any.
    """

    def __init__(
        self,
        dram: Dram,
        memory: Callable[[], Memory],
        counters: Counters,
        restart: Callable[[], None],
        decoders: HdmDecoders | None,
    ) -> None:
        self.decoders = decoders
        self.abilities = Ability.ERASE | Ability.WITHHOLD
        if dram is not Dram.FIXED:
            self.abilities |= Ability.POISON | Ability.REPAIR
        self._memory = memory
        self._counters = counters
        self._restart = restart

    def poison(self, address: int) -> None:
        """See `Maintenance.poison`."""
        self._need(Ability.POISON)
        self._memory().spoil(address >> LINE_SHIFT)

    def repair(self, address: int, data: bytes) -> None:
        """See `Maintenance.repair`."""
        self._need(Ability.REPAIR)
        self._memory().repair(address >> LINE_SHIFT, data)

    def poisoned(self) -> dict[int, PoisonSource]:
        """See `Maintenance.poisoned`."""
        return {line << LINE_SHIFT: source for line, source in self._memory().lost().items()}

    def corrected(self) -> int:
        """See `Maintenance.corrected`."""
        return int(self._counters.memory["corrected"].sum())

    def traffic(self) -> tuple[int, int, int]:
        """See `Maintenance.traffic`."""
        device = self._counters.device
        return int(device["cycles"]), int(device["link_reads"]), int(device["link_writes"])

    def link_state(self) -> None:
        """See `Maintenance.link_state`: its cycles are those of messages."""

    def erase(self) -> None:
        """See `Maintenance.erase`."""
        before = self._memory()
        self._restart()
        self._memory().withheld = before.withheld
        self._memory().page = before.page  # the owner's, whatever tenants have

    def withhold(self, address: int, size: int) -> None:
        """See `Maintenance.withhold`."""
        self._memory().withhold(address >> EXTENT_SHIFT, size >> EXTENT_SHIFT)

    def give(self, address: int, size: int) -> None:
        """See `Maintenance.give`."""
        self._memory().give(address >> EXTENT_SHIFT, size >> EXTENT_SHIFT)

    def _need(self, ability: Ability) -> None:
        if ability not in self.abilities:
            raise RuntimeError("a device with dram=fixed keeps no check bits; choose a DRAM part")
