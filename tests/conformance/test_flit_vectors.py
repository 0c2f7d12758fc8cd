"""The published vectors of 68-byte flits: as the golden model makes them and as both ends' RTL reads them."""

import cocotb
import pytest
from flit_golden import Reader, crc16, on_wire
from flit_vectors import load, untold, vectors
from link_golden import M2S, S2M, GoldenLink, kinds_of
from nearkv_hw.abi import flits
from nearkv_hw.abi.flits import Side
from nearkv_hw.link.layer import LinkLayer
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, cycles, start

VECTORS = load()
SEQUENCES = [*VECTORS["formats"], *VECTORS["rollover"]]
RECEIVER = {"host": S2M, "device": M2S}


def wire(text):
    """A stored flit as an integer."""
    return int.from_bytes(bytes.fromhex(text), "little")


def flits_of(case):
    """The flits of a sequence."""
    return [wire(flit["flit"] if isinstance(flit, dict) else flit) for flit in case["flits"]]


def messages_of(case, direction):
    """Messages of a case by kind."""
    return {
        kind: [untold(told) for told in case["messages"] if told["kind"] == kind]
        for kind in kinds_of(direction)
    }


def test_the_file_is_what_the_golden_model_makes():
    assert vectors() == VECTORS


@pytest.mark.parametrize("case", VECTORS["crc"], ids=lambda case: case["name"])
def test_crc(case):
    flit = wire(case["flit"])
    assert f"{flits.crc(flit):04x}" == f"{crc16(flit):04x}" == case["crc"]


@pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case["name"])
def test_slots_and_rollover(case):
    reader = Reader(case["direction"])
    for flit in flits_of(case):
        assert on_wire(flit & (1 << 512) - 1) == flit
        reader.read(flit & (1 << 512) - 1)
    assert reader.pending == 0
    expected = messages_of(case, case["direction"])
    assert {kind: reader.messages[kind] for kind in expected} == expected
    for said, flit in zip(reader.flits, case["flits"], strict=True):
        assert not isinstance(flit, dict) or flit["slots"] == said


def test_every_format_is_there():
    """And every rollover: 1, 2, 3 and more chunks."""
    for sender, direction in ((Side.HOST, M2S), (Side.DEVICE, S2M)):
        names = {f"{direction} {f.name}" for table in flits.formats(sender) for f in table}
        assert names <= {case["name"].partition(" with")[0] for case in VECTORS["formats"]}
        owed = set()
        for case in VECTORS["rollover"]:
            if case["direction"] == direction:
                reader = Reader(direction)
                for flit in flits_of(case):
                    reader.read(flit & (1 << 512) - 1)
                    owed.add(reader.pending)
        assert {1, 2, 3} <= owed
        assert max(owed) > 4


@pytest.mark.parametrize("receiver", RECEIVER)
@pytest.mark.parametrize("case", VECTORS["retry"], ids=lambda case: case["name"])
def test_retry_with_the_golden_model(case, receiver):
    """Flits as they arrive, damage included; the requests for retry are those of the file."""
    end = GoldenLink(M2S if receiver == "host" else S2M, None, entries=case["wraps"][receiver])
    asked = 0
    for flit in case["flits"]:
        if flit["from"] == receiver:
            if is_request(wire(flit["flit"])):
                end._request()
                asked += 1
            end._write += 1  # whatever the other end acknowledges was sent
            continue
        end.receive(damaged(flit))
    expected = messages_of(case, RECEIVER[receiver])
    assert {kind: end.received[kind] for kind in expected} == expected
    assert asked == end.retries


def is_request(flit):
    """Whether it is a RETRY.Req."""
    return flit & 1 and flit >> 32 & 0xFF == flits.Control.RETRY_REQ


def damaged(flit):
    """A flit as it arrives."""
    bits = wire(flit["flit"])
    for bit in flit["wrong_bits"]:
        bits ^= 1 << bit
    return bits


@pytest.mark.rtl
@pytest.mark.parametrize("side", Side)
def test_vectors_with_the_rtl(side):
    run(LinkLayer(side=side), module=__file__, parameters={"side": side.name.lower()})


class Bench:
    """The design, whose flits nobody reads."""

    def __init__(self, dut):
        self.dut = dut
        side = parameters()["side"]
        self.direction = RECEIVER[side]
        prefix = self.direction.lower()
        self.sinks = {kind: StreamSink(dut, f"{prefix}_{kind}") for kind in kinds_of(self.direction)}
        dut.phy_up.value = 1
        dut.tx_ready.value = 1

    async def arrive(self, flit):
        self.dut.rx_payload.value = flit
        self.dut.rx_valid.value = 1
        await cycles(self.dut, 1)
        self.dut.rx_valid.value = 0

    async def received(self, expected):
        """Compare what came out with messages by kind, each in its order."""
        await cycles(self.dut, 30)
        for kind, messages in expected.items():
            assert len(self.sinks[kind]) == len(messages), kind
            assert await self.sinks[kind].receive(len(messages)) == messages
        assert not self.dut.malformed.value
        assert not self.dut.unexpected.value


@cocotb.test()
async def reads_every_format(dut):
    await start(dut)
    bench = Bench(dut)
    init = next(case for case in VECTORS["control"] if case["name"].startswith("INIT"))
    await bench.arrive(wire(init["flit"]))
    for case in SEQUENCES:
        if case["direction"] == bench.direction:
            for flit in flits_of(case):
                await bench.arrive(flit)
            await bench.received(messages_of(case, bench.direction))


@cocotb.test()
@cocotb.parametrize(which=range(len(VECTORS["retry"])))
async def takes_part_in_retries(dut, which):
    await start(dut)
    bench, case = Bench(dut), VECTORS["retry"][which]
    for flit in case["flits"]:
        if flit["from"] == parameters()["side"]:
            if is_request(wire(flit["flit"])):
                await cycles(dut, 30)  # the design has asked, too
            continue
        await bench.arrive(damaged(flit))
    await bench.received(messages_of(case, bench.direction))
