# amaranth: UnusedElaboratable=no
"""Each side's link layer with the golden model at the other end: every message once and in order, whatever
the wire does, and every flit by the rules."""

from collections import deque

import cocotb
import pytest
from flit_golden import ACK, FRAME, INIT, LLCRD, REQUEST, Writer, control, on_wire
from link_golden import M2S, S2M, GoldenLink, kinds_of, random_message
from nearkv_hw.abi.flits import MAX_REINITS, MAX_RETRIES, Retry, Side
from nearkv_hw.link.layer import LinkLayer
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import RisingEdge, StreamSink, StreamSource, cycles, random, start, value

WIRE_CYCLES = 3
ENTRIES = 40
PLACES = {"req": 8, "rwd": 8, "ndr": 8, "drs": 16}
TIMEOUT_FLITS = 300


@pytest.mark.rtl
@pytest.mark.parametrize("multi_data", [True, False])
@pytest.mark.parametrize("side", Side)
def test_link_layer(side, multi_data):
    layer = LinkLayer(
        side=side, multi_data=multi_data, entries=ENTRIES, timeout_flits=TIMEOUT_FLITS, places=PLACES
    )
    run(layer, module=__file__, parameters={"side": side.name, "multi_data": multi_data})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"side": 0}, "side must be a Side, not 0"),
        ({"entries": 21}, "entries must be an integer from 22 to 255, not 21"),
        ({"entries": 256}, "entries must be an integer from 22 to 255, not 256"),
        ({"timeout_flits": 0}, "timeout_flits must be a positive integer, not 0"),
        ({"places": {"req": 6}}, "places must be powers of two of at least 4 .*, not req=6"),
        ({"places": {"cache": 8}}, "places must be powers of two of at least 4 .*, not cache=8"),
    ],
)
def test_parameters_are_checked(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LinkLayer(**{"side": Side.HOST, **wrong})


class Bench:
    """The design, a wire each way, and the golden model."""

    def __init__(self, dut, rng, idle=0.0, backpressure=0.0, errors=0.0, pace=1.0):
        self.dut, self.rng, self.errors, self.pace = dut, rng, errors, pace
        host = parameters()["side"] == "HOST"
        sends, receives = (M2S, S2M) if host else (S2M, M2S)
        self.golden = GoldenLink(
            receives, rng, entries=48, places=16, multi_data=parameters()["multi_data"], timeout=200
        )
        prefix = {"req": "m2s", "rwd": "m2s", "ndr": "s2m", "drs": "s2m"}
        self.sources = {k: StreamSource(dut, f"{prefix[k]}_{k}", idle=idle) for k in kinds_of(sends)}
        self.sinks = {
            k: StreamSink(dut, f"{prefix[k]}_{k}", backpressure=backpressure) for k in kinds_of(receives)
        }
        self.sent = {k: [] for k in (*self.sources, *self.sinks)}
        self.to_golden, self.to_design = deque([None] * WIRE_CYCLES), deque([None] * WIRE_CYCLES)
        self.flips = 0
        self.down = False
        cocotb.start_soon(self._run())

    def send(self, count):
        """As many random messages of each kind, both ways."""
        for kind in self.sent:
            messages = [random_message(self.rng, kind) for _ in range(count)]
            self.sent[kind] += messages
            if kind in self.sources:
                self.sources[kind].send(messages)
            else:
                self.golden.queues[kind].extend(messages)

    async def arrived(self, limit):
        """Wait until every message is at its end, and compare."""
        for _ in range(limit):
            if all(len(self._got(kind)) >= len(self.sent[kind]) for kind in self.sent):
                break
            await cycles(self.dut, 1)
        await cycles(self.dut, 60)
        told = f"{self.golden.log[-12:]}, {Retry(int(self.dut.state.value))!r}"
        for kind, messages in self.sent.items():
            got = self._got(kind)
            assert len(got) == len(messages), f"{kind}: {len(got)} of {len(messages)}; {told}"
            assert list(got) == messages, kind

    def _got(self, kind):
        return self.sinks[kind]._items if kind in self.sinks else self.golden.received[kind]

    async def retrain(self, cycle_count=20):
        """The wire is down for a while, and what was on it is lost."""
        self.dut.phy_up.value = self.dut.rx_valid.value = 0
        self.dut.tx_ready.value = 1
        await cycles(self.dut, cycle_count)
        for wire in (self.to_design, self.to_golden):
            wire.extend([None] * WIRE_CYCLES)
            for _ in range(len(wire) - WIRE_CYCLES):
                wire.popleft()
        self.golden.retrained()
        self.dut.phy_up.value = 1

    def _damaged(self, wire):
        if wire is not None and self.rng.random() < self.errors:
            self.flips += 1
            return wire ^ 1 << self.rng.randrange(528)
        return wire

    async def _run(self):
        dut, edge = self.dut, RisingEdge(self.dut.clk)
        dut.phy_up.value = 1
        while True:
            if dut.retrain.value or self.down:
                await self.retrain()
            ready = self.rng.random() < self.pace
            dut.tx_ready.value = int(ready)
            wire = self.to_design.popleft()
            dut.rx_valid.value = int(wire is not None)
            dut.rx_payload.value = self.rng.getrandbits(528) if wire is None else wire
            await edge
            sent = value(dut.tx_payload) if ready and dut.tx_valid.value else None
            self.to_golden.append(self._damaged(sent))
            came = self.to_golden.popleft()
            if came is not None:
                self.golden.receive(came)
            self.to_design.append(
                self._damaged(self.golden.transmit()) if self.rng.random() < self.pace else None
            )


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.6], backpressure=[0.0, 0.6], pace=[1.0, 0.6])
async def carries_every_message(dut, idle, backpressure, pace):
    await start(dut)
    bench = Bench(dut, random("messages", idle, backpressure, pace), idle, backpressure, pace=pace)
    bench.send(150)
    await bench.arrived(20_000)
    assert (bench.golden.crc_errors, bench.golden.retries) == (0, 0)
    assert dut.state.value == Retry.NORMAL.value
    assert not dut.malformed.value
    assert not dut.unexpected.value
    assert not dut.overflow.value


@cocotb.test()
@cocotb.parametrize(errors=[0.01, 0.05], backpressure=[0.0, 0.6])
async def carries_every_message_over_a_bad_wire(dut, errors, backpressure):
    await start(dut)
    bench = Bench(dut, random("errors", errors, backpressure), 0.2, backpressure, errors)
    for _ in range(3):
        bench.send(60)
        await bench.arrived(60_000)
    assert bench.golden.retries > 0
    assert bench.flips > bench.golden.crc_errors > 0


@cocotb.test()
async def asks_again_after_the_wire_was_down(dut):
    rng = random("down")
    await start(dut)
    bench = Bench(dut, rng)
    bench.send(100)
    await cycles(dut, 70)
    bench.down = True
    await cycles(dut, 5)
    assert dut.state.value == Retry.REINIT.value
    bench.down = False
    await bench.arrived(20_000)
    assert bench.golden.retries > 0


@cocotb.test()
async def tells_of_viral(dut):
    await start(dut)
    bench = Bench(dut, random("viral"))
    bench.send(20)
    await bench.arrived(5_000)
    assert bench.golden.remote_viral is None
    dut.viral_ld.value = 0x8421
    dut.viral.value = 1
    await cycles(dut, 200)
    assert bench.golden.crc_errors == 1
    assert bench.golden.remote_viral == 0x8421
    bench.golden.viral = True
    bench.errors = 1.0
    while not bench.flips:
        bench.send(1)
        await cycles(dut, 2)
    bench.errors = 0.0
    await bench.arrived(5_000)
    await cycles(dut, 100)
    assert dut.remote_viral.value == 1


OPENING = control(INIT, 2 | 48 << 24)


class Script:
    """The design, and flits one by one at its receiver."""

    def __init__(self, dut, rng):
        self.dut = dut
        self.direction = S2M if parameters()["side"] == "HOST" else M2S
        self.writer = Writer(self.direction, rng)
        dut.phy_up.value = 1
        dut.tx_ready.value = 1
        for kind in kinds_of(self.direction):
            getattr(dut, f"{self.direction.lower()}_{kind}_ready").value = 1

    async def arrive(self, *flits):
        for flit in flits:
            self.dut.rx_payload.value = on_wire(flit)
            self.dut.rx_valid.value = 1
            await cycles(self.dut, 1)
        self.dut.rx_valid.value = 0
        await cycles(self.dut, 8)

    def with_data(self, rng):
        """A flit with a header whose data all comes later, or in it."""
        kind = "drs" if self.direction == S2M else "rwd"
        self.writer.queues[kind].append(random_message(rng, kind) | (((1 << 64) - 1) << 87))
        while True:
            flit = self.writer.write()
            if flit >> 4 & 1:
                return flit


def breaches(script, rng):
    """Name and flits, the first of them mostly INIT.Param, the last against a rule."""
    header_code = {S2M: 3, M2S: 4}[script.direction]
    empty = {S2M: 4 << 5 | 5 << 8 | 5 << 11 | 5 << 14, M2S: 5 << 5 | 4 << 8 | 4 << 11 | 4 << 14}[
        script.direction
    ]
    good = script.with_data(rng)
    return {
        "a message before INIT.Param": [empty],
        "INIT.Param twice": [OPENING, OPENING],
        "a data header without sz": [OPENING, good & ~(1 << 4)],
        "data that nobody announced": [OPENING, empty & ~(7 << 8)],
        "a slot of CXL.cache": [OPENING, (empty & ~(7 << 8)) | 2 << 8 | 1 << 128],
        "messages where data is due": [OPENING, header_code << 5 | 1 << 4 | 1 << 32 | (empty & ~(7 << 5))],
    }


@cocotb.test()
async def halts_where_a_rule_is_broken(dut):
    rng = random("breaches")
    await start(dut)
    script = Script(dut, rng)
    for name, flits in breaches(script, rng).items():
        dut.rst.value = 1
        await cycles(dut, 2)
        dut.rst.value = 0
        await cycles(dut, 1)
        await script.arrive(*flits[:-1])
        assert dut.state.value == Retry.NORMAL.value, name
        assert not dut.malformed.value, name
        await script.arrive(flits[-1])
        assert dut.state.value == Retry.ABORT.value, name
        assert dut.malformed.value, name


@cocotb.test()
async def retry_flits_count_only_in_their_frames(dut):
    await start(dut)
    script = Script(dut, random("frames"))
    await script.arrive(OPENING)
    frames = [control(FRAME)] * 5
    await cycles(dut, 60)
    for flits in (
        [control(REQUEST)],
        [*frames[:4], control(REQUEST)],
        [*frames, control(LLCRD), control(REQUEST)],
        [control(ACK)],
        [*frames[:4], control(ACK)],
    ):
        await script.arrive(*flits)
        for _ in range(20):
            assert not dut.replayed.value
            await cycles(dut, 1)
        assert not dut.unexpected.value
    await script.arrive(*frames, control(REQUEST))
    replayed = 0
    for _ in range(40):
        replayed += int(dut.replayed.value)
        await cycles(dut, 1)
    assert replayed >= 1
    await script.arrive(*frames, control(REQUEST))  # a repeated frame is none too many
    assert not dut.unexpected.value
    await script.arrive(*frames, control(ACK))
    assert dut.unexpected.value
    assert dut.state.value == Retry.NORMAL.value


@cocotb.test()
async def retrains_and_gives_up_when_nobody_answers(dut):
    await start(dut)
    script = Script(dut, random("silence"))
    await script.arrive(OPENING)
    dut.rx_payload.value = on_wire(control(LLCRD)) ^ 1
    dut.rx_valid.value = 1
    await cycles(dut, 1)
    dut.rx_valid.value = 0
    for retraining in range(MAX_REINITS + 1):
        waits = 0
        for _ in range(2 * MAX_RETRIES * TIMEOUT_FLITS):
            before = dut.state.value
            await cycles(dut, 1)
            waits += before == Retry.REQUEST.value and dut.state.value == Retry.WAIT.value
            if dut.state.value in (Retry.REINIT.value, Retry.ABORT.value):
                break
        assert waits == MAX_RETRIES
        assert dut.state.value == (Retry.REINIT if retraining < MAX_REINITS else Retry.ABORT).value
        if retraining < MAX_REINITS:
            await cycles(dut, 5)
            assert dut.retrain.value
            dut.phy_up.value = 0
            await cycles(dut, 20)
            assert not dut.retrain.value
            dut.phy_up.value = 1
            await cycles(dut, 2)
