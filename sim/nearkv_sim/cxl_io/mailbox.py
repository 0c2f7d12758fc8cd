"""The primary mailbox: a command in its registers, the doorbell, and the answer."""

from __future__ import annotations

from collections.abc import Callable

from nearkv_hw.abi.cxl_registers import MAILBOX, PAYLOAD_BYTES, PAYLOAD_OFFSET
from nearkv_hw.abi.mailbox import Effect, Opcode, ReturnCode

from .background import Background
from .command import Command, Commands, Failed
from .registers import RegisterFile


class Mailbox:
    """Runs commands when the doorbell is written; a command is done before that write is.

    Parameters
    ----------
    commands : what there is.
    background : the device's background operations.
    poll : brings the device's state up to date.
    media_disabled : whether commands that need the memory fail.
    interrupt : sends a message signalled interrupt.

    Members
    -------
    registers : the mailbox's.
    """

    def __init__(
        self,
        commands: Commands,
        background: Background,
        *,
        poll: Callable[[], None],
        media_disabled: Callable[[], bool],
        interrupt: Callable[[int], None],
    ) -> None:
        self.commands = commands
        self._background = background
        self._poll = poll
        self._media_disabled = media_disabled
        self._interrupt = interrupt
        self.registers = RegisterFile(MAILBOX)
        self.registers.on_write("control", self._control_written)
        self.registers.on_read("status", self._status)
        self.registers.on_read("background", self._background_status)
        self._return_code = ReturnCode.SUCCESS
        self._background_code = ReturnCode.SUCCESS

    def reset(self) -> None:
        """The registers as they were at first; a background operation goes on."""
        self.registers.reset()
        self._return_code = ReturnCode.SUCCESS

    def background_ended(self) -> None:
        """Tell of the end of a background operation."""
        if self.registers.field("control", "background_interrupt"):
            self._interrupt(self.registers.field("capabilities", "message"))

    def execute(self, opcode: int, payload: bytes) -> tuple[ReturnCode, bytes]:
        """Carry out a command: its return code, and its output where that is success."""
        self._poll()
        command = self.commands.get(Opcode(opcode)) if opcode in list(Opcode) else None
        if command is None:
            return ReturnCode.UNSUPPORTED, b""
        try:
            self._admit(command, payload)
            output = command.run(payload)
        except Failed as failure:
            return failure.code, b""
        began = Effect.BACKGROUND in command.effects
        return ReturnCode.BACKGROUND_STARTED if began else ReturnCode.SUCCESS, output

    def _admit(self, command: Command, payload: bytes) -> None:
        if not command.fits(len(payload)):
            raise Failed(ReturnCode.PAYLOAD_LENGTH)
        if Effect.BACKGROUND in command.effects and self._background.running:
            raise Failed(ReturnCode.BUSY)
        if command.media and self._media_disabled():
            raise Failed(ReturnCode.MEDIA_DISABLED)

    def _control_written(self, _: int, control: int) -> None:
        if not MAILBOX["control"].unpack(control)["doorbell"]:
            return
        registers = self.registers
        asked = MAILBOX["command"].unpack(registers["command"])
        if asked["length"] > PAYLOAD_BYTES:
            self._return_code, output = ReturnCode.PAYLOAD_LENGTH, b""
        else:
            payload = registers.image()[PAYLOAD_OFFSET : PAYLOAD_OFFSET + asked["length"]]
            self._return_code, output = self.execute(asked["opcode"], payload)
        for at in range(0, len(output), 8):
            registers[f"payload_{at // 8}"] = int.from_bytes(output[at : at + 8], "little")
        registers.set("command", length=len(output))
        registers.set("control", doorbell=0)
        if registers.field("control", "interrupt"):
            self._interrupt(registers.field("capabilities", "message"))

    def _status(self) -> int:
        self._poll()
        return MAILBOX["status"].pack(background=self._background.running, return_code=self._return_code)

    def _background_status(self) -> int:
        self._poll()
        return MAILBOX["background"].pack(
            opcode=self._background.opcode, percentage=self._background.percentage
        )
