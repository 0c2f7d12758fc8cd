"""Passphrases, and the erasure of everything.

Passphrases lock persistent memory, of which the device has none: what they lock here is Sanitize and Secure
Erase, as the specification has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nearkv_hw.abi.mailbox import (
    PASSPHRASE,
    PASSPHRASE_ATTEMPTS,
    PASSPHRASE_BYTES,
    SET_PASSPHRASE,
    Effect,
    Opcode,
    ReturnCode,
    SecurityFlag,
)

from .command import Command, Commands, Failed

_MASTER, _USER = 0, 1


@dataclass
class _Secret:
    """A passphrase, and how often it was guessed wrongly since reset."""

    is_set: SecurityFlag
    at_limit: SecurityFlag
    passphrase: int | None = None
    wrong: int = 0

    @property
    def flags(self) -> SecurityFlag:
        limit = self.at_limit if self.wrong >= PASSPHRASE_ATTEMPTS else SecurityFlag(0)
        return limit | (self.is_set if self.passphrase is not None else SecurityFlag(0))

    def check(self, given: int) -> None:
        """Hear a passphrase; without one any is right."""
        if self.wrong >= PASSPHRASE_ATTEMPTS:
            raise Failed(ReturnCode.SECURITY_STATE)
        if self.passphrase is not None and given != self.passphrase:
            self.wrong += 1
            raise Failed(ReturnCode.PASSPHRASE)
        self.wrong = 0


class Security:
    """The security state.

    Parameters
    ----------
    erase : begins a background operation that erases everything, for a command.
    """

    def __init__(self, erase: Callable[[Opcode], None]) -> None:
        self._erase = erase
        self._secrets = {
            _MASTER: _Secret(SecurityFlag.MASTER_PASSPHRASE, SecurityFlag.MASTER_ATTEMPTS),
            _USER: _Secret(SecurityFlag.USER_PASSPHRASE, SecurityFlag.USER_ATTEMPTS),
        }
        self._locked = False
        self._frozen = False

    def reset(self) -> None:
        """Locked where there is a user's passphrase; no longer frozen; attempts count anew."""
        self._frozen = False
        self._locked = self._secrets[_USER].passphrase is not None
        for secret in self._secrets.values():
            secret.wrong = 0

    @property
    def state(self) -> SecurityFlag:
        """The flags of Get Security State."""
        state = self._secrets[_MASTER].flags | self._secrets[_USER].flags
        state |= SecurityFlag.LOCKED if self._locked else SecurityFlag(0)
        return state | (SecurityFlag.FROZEN if self._frozen else SecurityFlag(0))

    def commands(self) -> Commands:
        """The mailbox's commands."""
        wipe = Effect.IMMEDIATE_DATA | Effect.SECURITY | Effect.BACKGROUND
        one = PASSPHRASE.size
        return {
            Opcode.SANITIZE: Command(self._sanitize, effects=wipe, media=True),
            Opcode.SECURE_ERASE: Command(self._secure_erase, effects=wipe, media=True),
            Opcode.GET_SECURITY: Command(lambda _: self.state.to_bytes(4, "little")),
            Opcode.SET_PASSPHRASE: Command(self._set, length=SET_PASSPHRASE.size, effects=Effect.SECURITY),
            Opcode.DISABLE_PASSPHRASE: Command(self._disable, length=one, effects=Effect.SECURITY),
            Opcode.UNLOCK: Command(self._unlock, length=PASSPHRASE_BYTES, effects=Effect.SECURITY),
            Opcode.FREEZE: Command(self._freeze, effects=Effect.SECURITY),
            Opcode.PASSPHRASE_ERASE: Command(self._passphrase_erase, length=one, effects=wipe, media=True),
        }

    def _sanitize(self, _: bytes) -> bytes:
        self._refuse(self._secrets[_USER].passphrase is not None)
        self._erase(Opcode.SANITIZE)
        return b""

    def _secure_erase(self, _: bytes) -> bytes:
        self._refuse(self._locked)
        self._erase(Opcode.SECURE_ERASE)
        return b""

    def _set(self, payload: bytes) -> bytes:
        given = SET_PASSPHRASE.unpack(payload)
        secret = self._secret(given["kind"])
        # the master's can only be set while there is no user's
        self._refuse(given["kind"] == _MASTER and self._secrets[_USER].passphrase is not None)
        self._refuse(self._locked)
        secret.check(given["current"])
        secret.passphrase = given["new"]
        return b""

    def _disable(self, payload: bytes) -> bytes:
        given = PASSPHRASE.unpack(payload)
        secret = self._secret(given["kind"])
        self._refuse(secret.passphrase is None or self._locked)
        secret.check(given["current"])
        secret.passphrase = None
        return b""

    def _unlock(self, payload: bytes) -> bytes:
        self._refuse(self._frozen or not self._locked)
        self._secrets[_USER].check(int.from_bytes(payload, "little"))
        self._locked = False
        return b""

    def _freeze(self, _: bytes) -> bytes:
        self._frozen = True
        return b""

    def _passphrase_erase(self, payload: bytes) -> bytes:
        given = PASSPHRASE.unpack(payload)
        secret = self._secret(given["kind"])
        self._refuse(secret.passphrase is None and given["kind"] == _MASTER)
        secret.check(given["current"])
        self._erase(Opcode.PASSPHRASE_ERASE)
        self._secrets[_USER].passphrase = None
        self._locked = False
        return b""

    def _secret(self, kind: int) -> _Secret:
        """The passphrase of a command that a frozen device refuses."""
        self._refuse(self._frozen)
        if kind not in self._secrets:
            raise Failed(ReturnCode.INVALID_INPUT)
        return self._secrets[kind]

    @staticmethod
    def _refuse(condition: bool) -> None:
        if condition:
            raise Failed(ReturnCode.SECURITY_STATE)
