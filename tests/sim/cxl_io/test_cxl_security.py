"""Sanitize, Secure Erase and passphrases: what is erased is gone, and each state admits what it should."""

import numpy as np
import pytest
from nearkv_hw.abi.mailbox import (
    PASSPHRASE,
    PASSPHRASE_ATTEMPTS,
    SET_PASSPHRASE,
    Opcode,
    ReturnCode,
    SecurityFlag,
)
from nearkv_hw.abi.window import RING, RING_LINE
from nearkv_sim.port import Access
from rawhost import RawHost

MASTER, USER = 0, 1
ERASES = (Opcode.SANITIZE, Opcode.SECURE_ERASE)


def state(setup):
    return SecurityFlag(int.from_bytes(setup.output(Opcode.GET_SECURITY), "little"))


def set_passphrase(setup, new, current=0, kind=USER):
    return setup.code(Opcode.SET_PASSPHRASE, SET_PASSPHRASE.pack_bytes(kind=kind, current=current, new=new))


def with_one(setup, opcode, current=0, kind=USER):
    return setup.code(opcode, PASSPHRASE.pack_bytes(kind=kind, current=current))


def unlock(setup, passphrase):
    return setup.code(Opcode.UNLOCK, passphrase.to_bytes(32, "little"))


@pytest.mark.parametrize("opcode", ERASES)
def test_an_erased_device_is_as_after_reset(setup, opcode):
    """No data, no owners, no poison, no command state; a new host finds nothing of the old one."""
    host = RawHost(setup.port)
    assert host.claim(0, 4)["status"] == 0
    secret = bytes(range(64)) * 32
    address = host.place(secret)
    assert host.read(address, len(secret)) == secret
    setup.output(Opcode.INJECT_POISON, (1 << 20).to_bytes(8, "little"))
    assert setup.code(opcode) == ReturnCode.BACKGROUND_STARTED
    assert (host.access(address).access == Access.OUTSIDE).all(), "nobody owns it"
    assert setup.port.maintenance.poisoned() == {}
    setup.now_s += 1
    assert setup.code(opcode) == ReturnCode.BACKGROUND_STARTED, "the first has ended"
    ring = RawHost(setup.port, aperture=1).register(RING_LINE, RING)
    assert ring == dict.fromkeys(ring, 0)
    new = RawHost(setup.port, aperture=1)
    assert new.claim(0, 4)["status"] == 0
    answer = new.access(0, 4 << 14)
    assert (answer.access == Access.DATA).all()
    found = np.concatenate([answer.data])
    assert not (found == np.frombuffer(secret[:64], np.uint8)).all(axis=1).any()


def test_sanitize_wants_no_passphrase_and_erase_no_lock(setup):
    assert set_passphrase(setup, 77) == ReturnCode.SUCCESS
    assert state(setup) == SecurityFlag.USER_PASSPHRASE
    assert setup.code(Opcode.SANITIZE) == ReturnCode.SECURITY_STATE
    assert setup.code(Opcode.SECURE_ERASE) == ReturnCode.BACKGROUND_STARTED
    setup.now_s += 1
    setup.device.reset()
    assert state(setup) == SecurityFlag.USER_PASSPHRASE | SecurityFlag.LOCKED
    assert setup.code(Opcode.SECURE_ERASE) == ReturnCode.SECURITY_STATE
    assert unlock(setup, 78) == ReturnCode.PASSPHRASE
    assert unlock(setup, 77) == ReturnCode.SUCCESS
    assert unlock(setup, 77) == ReturnCode.SECURITY_STATE, "it is open"
    assert setup.code(Opcode.SECURE_ERASE) == ReturnCode.BACKGROUND_STARTED


def test_a_passphrase_is_changed_by_who_knows_it(setup):
    assert with_one(setup, Opcode.DISABLE_PASSPHRASE) == ReturnCode.SECURITY_STATE
    assert set_passphrase(setup, 1) == ReturnCode.SUCCESS
    assert set_passphrase(setup, 2, current=9) == ReturnCode.PASSPHRASE
    assert set_passphrase(setup, 2, current=1) == ReturnCode.SUCCESS
    assert with_one(setup, Opcode.DISABLE_PASSPHRASE, 1) == ReturnCode.PASSPHRASE
    assert with_one(setup, Opcode.DISABLE_PASSPHRASE, 2) == ReturnCode.SUCCESS
    assert state(setup) == SecurityFlag(0)
    assert set_passphrase(setup, 1, kind=2) == ReturnCode.INVALID_INPUT


def test_too_many_wrong_ones_end_it_until_reset(setup):
    set_passphrase(setup, 5)
    for _ in range(PASSPHRASE_ATTEMPTS):
        assert with_one(setup, Opcode.DISABLE_PASSPHRASE, 6) == ReturnCode.PASSPHRASE
    assert with_one(setup, Opcode.DISABLE_PASSPHRASE, 5) == ReturnCode.SECURITY_STATE
    assert state(setup) == SecurityFlag.USER_PASSPHRASE | SecurityFlag.USER_ATTEMPTS
    setup.device.reset()
    assert unlock(setup, 5) == ReturnCode.SUCCESS
    assert with_one(setup, Opcode.DISABLE_PASSPHRASE, 5) == ReturnCode.SUCCESS


def test_a_frozen_state_stays_until_reset(setup):
    set_passphrase(setup, 5)
    assert setup.code(Opcode.FREEZE) == ReturnCode.SUCCESS
    assert SecurityFlag.FROZEN in state(setup)
    assert set_passphrase(setup, 6, current=5) == ReturnCode.SECURITY_STATE
    for opcode in (Opcode.DISABLE_PASSPHRASE, Opcode.PASSPHRASE_ERASE):
        assert with_one(setup, opcode, 5) == ReturnCode.SECURITY_STATE
    setup.device.reset()
    assert state(setup) == SecurityFlag.USER_PASSPHRASE | SecurityFlag.LOCKED


def test_the_master_erases_what_the_user_locked(setup):
    assert with_one(setup, Opcode.PASSPHRASE_ERASE, kind=MASTER) == ReturnCode.SECURITY_STATE
    assert set_passphrase(setup, 11, kind=MASTER) == ReturnCode.SUCCESS
    assert set_passphrase(setup, 22) == ReturnCode.SUCCESS
    assert set_passphrase(setup, 12, current=11, kind=MASTER) == ReturnCode.SECURITY_STATE
    setup.device.reset()
    host = RawHost(setup.port)
    host.claim(0, 1)
    assert with_one(setup, Opcode.PASSPHRASE_ERASE, 22, kind=MASTER) == ReturnCode.PASSPHRASE
    assert with_one(setup, Opcode.PASSPHRASE_ERASE, 11, kind=MASTER) == ReturnCode.BACKGROUND_STARTED
    assert state(setup) == SecurityFlag.MASTER_PASSPHRASE
    assert host.access(0).access[0] == Access.OUTSIDE
