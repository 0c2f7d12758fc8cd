"""The link capability: what the running link layer is at."""

from __future__ import annotations

from collections.abc import Callable

from nearkv_hw.abi.cxl_registers import LINK

from .registers import RegisterFile

_DONE = 3
_SAID = (
    "version_received",
    "wrap",
    "wrap_received",
    "retries_received",
    "reinits_received",
    "write_pointer_received",
    "sequence_received",
    "free_received",
)
"""Fields of the capability register that have the same name in the state."""
_CREDITS = {"rx_credit_control": "rx", "rx_credit_status": "owed", "tx_credit_status": "tx"}


class LinkRegisters:
    """The registers; where no link layer runs they stay as after reset.

    Parameters
    ----------
    state : the fields of `abi.window.LINK_STATE`, or None.

    Members
    -------
    registers : the capability's.
    """

    def __init__(self, state: Callable[[], dict[str, int] | None]) -> None:
        self._state = state
        self.registers = RegisterFile(LINK)

    def follow(self) -> None:
        """Bring them up to date."""
        state = self._state()
        if state is None:
            return
        registers = self.registers
        registers.set("capability", **{field: state[field] for field in _SAID})
        registers.set("control", init_state=_DONE * state["opened"], buffer_consumed=min(state["kept"], 0xFF))
        for register, name in _CREDITS.items():
            registers.set(register, mem_message=state[f"{name}_message"], mem_data=state[f"{name}_data"])
