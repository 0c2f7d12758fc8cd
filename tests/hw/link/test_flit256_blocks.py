# amaranth: UnusedElaboratable=no
"""Packer and unpacker of 256-byte flits with the golden model at the other end of the flits."""

import cocotb
import pytest
from flit256_golden import (
    FORMAT,
    KINDS,
    M2S,
    S2M,
    STEPS,
    WIDTH,
    Reader,
    Writer,
    credit_field,
    place,
    random_message,
)
from messages256 import as_device
from nearkv_hw.abi.flits import Side
from nearkv_hw.abi.flits256 import BEAT_BITS, BEATS, CREDIT_CODES, CREDIT_NAMES
from nearkv_hw.link.packer256 import Packer256
from nearkv_hw.link.replay import Replay
from nearkv_hw.link.unpacker256 import Unpacker256
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import RisingEdge, StreamSink, StreamSource, cycles, random, start, value

SENDS = {"HOST": M2S, "DEVICE": S2M}
OTHER = {"HOST": "DEVICE", "DEVICE": "HOST"}
PLACES = {"req": 16, "rwd": 8, "ndr": 16, "drs": 16}
FLITS = 400


@pytest.mark.rtl
@pytest.mark.parametrize("side", Side)
def test_unpacker(side):
    run(Unpacker256(side=side, places=PLACES), module=__file__, parameters={"side": side.name}, tests=READS)


@pytest.mark.rtl
@pytest.mark.parametrize("side", Side)
def test_packer(side):
    run(Packer256(side=side), module=__file__, parameters={"side": side.name}, tests=FILLS)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Packer256(side="host"), "side must be a Side, not 'host'"),
        (lambda: Packer256(side=Side.HOST, depth=6), "depth must be a power of two of at least 8, not 6"),
        (lambda: Unpacker256(side="host"), "side must be a Side, not 'host'"),
        (lambda: Unpacker256(side=Side.HOST, places={"drs": 4}), "powers of two of at least 8 .*, not drs=4"),
        (lambda: Replay(entries=3), "entries must be a power of two from 2 to 256, not 3"),
        (lambda: Replay(entries=512), "entries must be a power of two from 2 to 256, not 512"),
        (lambda: Replay(timeout_cycles=0), "timeout_cycles must be a positive integer, not 0"),
    ],
)
def test_parameters_are_checked(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        make()


class Reads:
    """An unpacker, flits that the golden model writes, and sinks."""

    def __init__(self, dut, rng, backpressure):
        self.dut, self.rng = dut, rng
        self.direction = SENDS[OTHER[parameters()["side"]]]
        self.kinds = KINDS[self.direction]
        self.writer = Writer(self.direction, rng)
        self.sinks = {kind: StreamSink(dut, kind, backpressure=backpressure) for kind in self.kinds}
        self.sent = {kind: [] for kind in self.kinds}
        self.returned = []
        cocotb.start_soon(self._watch())

    async def _watch(self):
        while True:
            await RisingEdge(self.dut.clk)
            seen = value(self.dut.credits)
            if seen:
                self.returned.append(seen)

    def queue(self, kind):
        """A new message, as soon as there is a place for it."""
        if len(self.sent[kind]) - len(self.sinks[kind]) < PLACES[kind]:
            self.sent[kind].append(random_message(self.rng, kind))
            self.writer.queues[kind].append(self.sent[kind][-1])

    async def flit(self, flit, idle=0.0):
        for beat in range(BEATS):
            while self.rng.random() < idle:
                await cycles(self.dut, 1)
            self.dut.i_payload.value = flit >> BEAT_BITS * beat & (1 << BEAT_BITS) - 1 | beat << BEAT_BITS
            self.dut.i_valid.value = 1
            await cycles(self.dut, 1)
            self.dut.i_valid.value = 0

    async def arrived(self):
        """Every message came, each kind in its order, and no rule was broken."""
        await cycles(self.dut, 300)
        for kind, sent in self.sent.items():
            got = await self.sinks[kind].receive(len(self.sinks[kind]))
            assert got == [as_device(kind, whole) for whole in sent], kind
        assert not self.dut.malformed.value
        assert not self.dut.overflow.value


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.4], backpressure=[0.0, 0.6])
async def takes_every_flit_apart(dut, idle, backpressure):
    rng = random("unpacker", idle, backpressure)
    await start(dut)
    bench = Reads(dut, rng, backpressure)
    back = []
    for n in range(FLITS):
        for kind in bench.kinds:
            for _ in range(rng.choice([0, 1, 4])):
                if n < FLITS - 40:
                    bench.queue(kind)
        fields = 0
        for kind in KINDS[SENDS[parameters()["side"]]]:
            fields |= credit_field(kind, rng.choice([0, *STEPS]))
        if fields:
            back.append(fields >> 1920)
        await bench.flit(bench.writer.write(fields), idle)
    assert bench.writer.empty
    await bench.arrived()
    assert bench.returned == back


def slot(n, kind, headers):
    """A slot, in its place in a flit."""
    bits = FORMAT[kind]
    for index, header in enumerate(headers):
        bits |= header << 4 + WIDTH[kind] * index
    return bits << place(n)[0]


def broken_flits(direction):
    """Flits that each break one rule, and what it is."""
    if direction == M2S:
        yield "five requests in a group", sum(slot(n, "req", [1]) for n in (3, 4, 5, 6, 7))
        yield "a format of the other direction", slot(2, "ndr", [1])
        yield "a format of CXL.cache", 1 << place(2)[0]
        return
    yield "seven responses in a group", sum(slot(n, "ndr", [1, 1]) for n in (8, 9, 10)) | slot(11, "ndr", [1])
    yield "four lines in slots 12 to 14 and 0 to 3", slot(0, "drs", [1]) | slot(14, "drs", [1, 1, 1])
    yield "a gap between messages", slot(4, "ndr", [1, 0, 1])
    yield "extended metadata", slot(4, "drs", [1 | 1 << 31])


@cocotb.test()
async def tells_of_broken_rules(dut):
    """Each of the flits is refused, and the golden model refuses it as well."""
    await start(dut)
    bench = Reads(dut, random("broken"), 0.0)
    for name, flit in broken_flits(bench.direction):
        dut.rst.value = 1
        await cycles(dut, 2)
        dut.rst.value = 0
        reader, refused = Reader(bench.direction), False
        for _ in range(2):
            try:
                reader.read(flit)
            except AssertionError:
                refused = True
            await bench.flit(flit)
        await cycles(dut, 10)
        assert refused, name
        assert dut.malformed.value, name


@cocotb.test()
async def messages_take_as_long_as_stated(dut):
    await start(dut)
    bench = Reads(dut, random("latency"), 0.0)
    plain, kind = bench.kinds
    for name, expected in ((plain, Unpacker256.latency_cycles), (kind, Unpacker256.data_latency_cycles)):
        bench.writer.queues[name].clear()
        flit = slot(0, name, [random_message(bench.rng, name) & (1 << WIDTH[name]) - 1 & ~(1 << 75) | 1])
        if name == "drs":
            flit &= ~(1 << place(0)[0] + 4 + 31)
        handle = getattr(dut, f"{name}_valid")
        taken = {}

        async def watch(handle=handle, taken=taken):
            n = 0
            while not handle.value:
                await cycles(dut, 1)
                n += 1
            taken["cycles"] = n

        # The line of a header in slot 0 ends in the second beat.
        for beat in range(BEATS):
            dut.i_payload.value = flit >> BEAT_BITS * beat & (1 << BEAT_BITS) - 1 | beat << BEAT_BITS
            dut.i_valid.value = 1
            await cycles(dut, 1)
            if beat == (1 if name == kind else 0):
                cocotb.start_soon(watch())
        dut.i_valid.value = 0
        await cycles(dut, 20)
        assert taken["cycles"] == expected, name


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.6], credits=[64, 3])
async def fills_flits_by_the_rules(dut, idle, backpressure, credits):
    """The golden model reads what comes; credits are given as messages arrive there."""
    rng = random("packer", idle, backpressure, credits)
    await start(dut)
    direction = SENDS[parameters()["side"]]
    kinds, reader = KINDS[direction], Reader(direction)
    sources = {kind: StreamSource(dut, kind, idle=idle) for kind in kinds}
    sink = StreamSink(dut, "o", backpressure=backpressure)
    sent = {kind: [as_device(kind, random_message(rng, kind)) for _ in range(500)] for kind in kinds}
    for kind in kinds:
        sources[kind].send(sent[kind])
    given = dict.fromkeys(kinds, 0)
    names = dict(zip(kinds, ("req", "data") if direction == M2S else ("rsp", "data"), strict=True))
    owed, taken = {}, []
    for _ in range(20_000):
        fields = 0
        for kind in kinds:
            codes = {step: code for code, step in CREDIT_CODES[kind].items()}
            due = credits - (given[kind] - len(reader.messages[kind]))
            step = max((s for s in STEPS if s <= due), default=0)
            if step and rng.random() < 0.2:
                given[kind] += step
                fields |= codes[step] << 5 * CREDIT_NAMES.index(names[kind])
        dut.credits.value = fields
        if not owed and rng.random() < 0.05:
            owed = {"fields": rng.getrandbits(15)}
            dut.owed.value, dut.some_owed.value = owed["fields"], 1
        await cycles(dut, 1)
        if dut.credits_taken.value:
            taken.append(owed.get("fields", 0))
            owed = {}
            dut.owed.value = dut.some_owed.value = 0
        while len(sink) >= BEATS:
            beats = await sink.receive(BEATS)
            flit = sum(beat << BEAT_BITS * n for n, beat in enumerate(beats))
            assert flit >> 1920 == taken.pop(0), "credits, and nothing of the physical layer"
            reader.read(flit)
        if all(len(reader.messages[kind]) == len(sent[kind]) for kind in kinds):
            break
    arrived = {kind: [as_device(kind, whole) for whole in reader.messages[kind]] for kind in kinds}
    assert arrived == sent


READS = "takes_every|tells_of|messages_take"
FILLS = "fills_flits"
"""Tests of the unpacker and of the packer."""
