"""The published vectors of 256-byte flits: as the golden model makes them and as the RTL reads them."""

import cocotb
import pytest
from flit256_golden import FORMAT, IN_G, IN_H, KINDS, M2S, S2M, WIDTH, Reader, credits_of
from flit256_vectors import load, untold, vectors
from messages256 import as_device
from nearkv_hw.abi import flits256
from nearkv_hw.abi.flits import Side
from nearkv_hw.abi.flits256 import BEAT_BITS, BEATS, CREDIT_BITS, CREDIT_CODES, CREDIT_NAMES, MESSAGES
from nearkv_hw.link.unpacker256 import Unpacker256
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, cycles, start, value

VECTORS = load()
SEQUENCES = [*VECTORS["formats"], *VECTORS["rollover"]]
READS = {"HOST": S2M, "DEVICE": M2S}
FIELD = {"req": "req", "rwd": "data", "ndr": "rsp", "drs": "data"}


def number(text):
    """A stored flit as an integer."""
    return int.from_bytes(bytes.fromhex(text), "little")


def flits_of(case):
    """The flits of a sequence."""
    return [number(flit["flit"] if isinstance(flit, dict) else flit) for flit in case["flits"]]


def messages_of(case):
    """Messages of a case by kind."""
    return {
        kind: [untold(told) for told in case["messages"] if told["kind"] == kind]
        for kind in KINDS[case["direction"]]
    }


def test_the_file_is_what_the_golden_model_makes():
    assert vectors() == VECTORS


def test_the_abi_has_the_figures():
    """Widths, formats, limits and credits that the golden model has by itself."""
    assert {kind: there.width for kind, (_, there) in MESSAGES.items()} == WIDTH
    assert (flits256.FORMAT, flits256.H_MESSAGES, flits256.G_MESSAGES) == (FORMAT, IN_H, IN_G)
    fields = {kind: [f.name for f in there if not f.reserved] for kind, (_, there) in MESSAGES.items()}
    assert fields["req"][-2:] == fields["rwd"][-2:] == ["ld_id", "traffic_class"]
    assert fields["ndr"][-2:] == ["ld_id", "dev_load"]
    assert fields["drs"][-4:] == ["poison", "dev_load", "ld_id", "trailer"]


@pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case["name"])
def test_slots_and_rollover(case):
    reader = Reader(case["direction"])
    for flit in flits_of(case):
        reader.read(flit)
    assert reader.pending == 0
    assert reader.messages == messages_of(case)
    for said, flit in zip(reader.slots, case["flits"], strict=True):
        assert not isinstance(flit, dict) or flit["slots"] == said


@pytest.mark.parametrize("case", VECTORS["credits"], ids=lambda case: case["name"])
def test_credits(case):
    flit = number(case["flit"])
    returned = credits_of(flit)
    assert returned[case["kind"]] == case["credits"]
    code = flit >> 1920 + CREDIT_BITS * CREDIT_NAMES.index(FIELD[case["kind"]]) & (1 << CREDIT_BITS) - 1
    assert CREDIT_CODES[case["kind"]][code] == case["credits"]


def test_every_format_is_there():
    """In slot 0 and behind it, full and with one message; data in every slot that may have it."""
    names = {case["name"] for case in VECTORS["formats"]}
    for direction, kinds in KINDS.items():
        for kind in kinds:
            for where, most in (("H", IN_H[kind]), ("G", IN_G[kind])):
                assert {f"{direction} {where}{FORMAT[kind]} with {n}" for n in (1, most)} <= names
    for case in VECTORS["rollover"]:
        held = [flit["slots"].split() for flit in case["flits"]]
        assert all(any(slots[n] == "data" for slots in held) for n in range(1, 15))


@pytest.mark.rtl
@pytest.mark.parametrize("side", Side)
def test_vectors_with_the_rtl(side):
    run(Unpacker256(side=side), module=__file__, parameters={"side": side.name})


@cocotb.test()
async def reads_every_vector(dut):
    await start(dut)
    direction = READS[parameters()["side"]]
    sinks = {kind: StreamSink(dut, kind) for kind in KINDS[direction]}

    async def arrive(flit):
        for beat in range(BEATS):
            dut.i_payload.value = flit >> BEAT_BITS * beat & (1 << BEAT_BITS) - 1 | beat << BEAT_BITS
            dut.i_valid.value = 1
            await cycles(dut, 1)
        dut.i_valid.value = 0

    for case in SEQUENCES:
        if case["direction"] != direction:
            continue
        for flit in flits_of(case):
            await arrive(flit)
        await cycles(dut, 20)
        for kind, messages in messages_of(case).items():
            assert len(sinks[kind]) == len(messages), f"{case['name']}, {kind}"
            got = await sinks[kind].receive(len(messages))
            assert got == [as_device(kind, whole) for whole in messages], f"{case['name']}, {kind}"
    for case in VECTORS["credits"]:
        if case["direction"] == direction:
            await arrive(number(case["flit"]))
            for _ in range(3):
                await cycles(dut, 1)
                seen = value(dut.credits)
                if seen:
                    break
            at = CREDIT_BITS * CREDIT_NAMES.index(FIELD[case["kind"]])
            assert CREDIT_CODES[case["kind"]][seen >> at] == case["credits"], case["name"]
    assert not dut.malformed.value
