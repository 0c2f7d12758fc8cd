# amaranth: UnusedElaboratable=no
"""Counters and state of both link layers equal what was seen at the link, over a good wire and a bad one."""

from collections import Counter, deque

import cocotb
import pytest
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from cocotb.triggers import Event
from link_golden import M2S, S2M, kinds_of, random_message
from nearkv_hw.abi.flits import VERSION, Retry
from nearkv_hw.abi.window import LINK_LAYER_COUNTERS, LINK_STATE
from nearkv_hw.link.counters import SIDES, LinkCounters
from nearkv_hw.link.layer import EVENTS
from nearkv_hw.link.link import Link
from nearkv_hw.link.wire import NOISE
from nearkv_hw.structs import layout_of
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import RisingEdge, StreamSink, StreamSource, cycles, random, start, value

PLACES = {"req": 8, "rwd": 16, "ndr": 32, "drs": 64}
ENTRIES = {68: 40, 256: 8}
NAMES = {"crc_error": "crc_errors", "stalled": "stalled_cycles"}


class CountedLink(wiring.Component):
    """A link, what it tells, and its counters."""

    def __init__(self, *, flit_bytes):
        self.link = Link(flit_bytes=flit_bytes, places=PLACES, entries=ENTRIES[flit_bytes])
        super().__init__(
            {
                **{
                    name: member
                    for name, member in self.link.signature.members.items()
                    if "viral" not in name
                },
                "counters": Out(layout_of(LINK_LAYER_COUNTERS)).array(2),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.link, m.submodules.counted = link, counted = self.link, LinkCounters()
        for name, member in self.signature.members.items():
            if name == "counters":
                for outer, inner in zip(self.counters, counted.counters, strict=True):
                    m.d.comb += outer.eq(inner)
            elif member.is_signature:
                wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(link, name))
            elif name == "noise":
                m.d.comb += [inner.eq(outer) for inner, outer in zip(link.noise, self.noise, strict=True)]
            else:
                m.d.comb += getattr(self, name).eq(getattr(link, name))
        for name, member in counted.signature.members.items():
            if member.flow is In:
                m.d.comb += getattr(counted, name).eq(getattr(link, name))
        return m


@pytest.mark.rtl
@pytest.mark.parametrize("flit_bytes", [68, 256])
def test_link_counters(flit_bytes):
    run(CountedLink(flit_bytes=flit_bytes), module=__file__, parameters={"flit_bytes": flit_bytes})


class Watch:
    """What the link tells in every cycle from reset on, and what its counters show of that."""

    def __init__(self, dut):
        self.dut = dut
        self.seen = {side: Counter() for side in SIDES}
        self._told = None
        self._asked = Event()
        self._answered = Event()
        cocotb.start_soon(self._run())

    async def told(self):
        """The counters of both ends, which must equal what was seen `LinkCounters.latency_cycles` before."""
        self._answered.clear()
        self._asked.set()
        await self._answered.wait()
        expected, found = self._told
        for side, counters in found.items():
            assert counters == {name: expected[side][name] for name in counters}, side
        return found

    async def _run(self):
        dut, edge = self.dut, RisingEdge(self.dut.clk)
        normal, was_up = dict.fromkeys(SIDES, True), True
        history = deque(maxlen=LinkCounters.latency_cycles)
        while True:
            await edge
            if dut.rst.value:
                continue
            if self._asked.is_set():
                self._asked.clear()
                self._told = history[0], self._counters()
                self._answered.set()
            up = bool(dut.up.value)
            for side, counted in self.seen.items():
                name = side.name.lower()
                for event in (*EVENTS, "stalled"):
                    counted[NAMES.get(event, event)] += value(getattr(dut, f"{name}_{event}"))
                now = value(getattr(dut, f"{name}_state")) == Retry.NORMAL.value
                counted["retries"] += normal[side] and not now
                counted["retrainings"] += was_up and not up
                normal[side] = now
            was_up = up
            history.append({side: Counter(counted) for side, counted in self.seen.items()})

    def _counters(self):
        return {
            side: {
                name: count
                for name, count in LINK_LAYER_COUNTERS.unpack(
                    value(getattr(self.dut, f"counters_{n}"))
                ).items()
                if not name.startswith("reserved")
            }
            for n, side in enumerate(SIDES)
        }


class Bench:
    """Messages both ways, and noise on both wires."""

    def __init__(self, dut, watch, rng, *, flip=0.0, drop=0.0, backpressure=0.0):
        self.dut, self.watch, self.rng, self.flip, self.drop = dut, watch, rng, flip, drop
        ends = {"host": (M2S, S2M), "device": (S2M, M2S)}
        prefix = {"req": "m2s", "rwd": "m2s", "ndr": "s2m", "drs": "s2m"}
        self.sources, self.sinks = {}, {}
        for end, (sends, receives) in ends.items():
            for kind in kinds_of(sends):
                self.sources[kind] = StreamSource(dut, f"{end}_{prefix[kind]}_{kind}", idle=0.2)
            for kind in kinds_of(receives):
                self.sinks[kind] = StreamSink(dut, f"{end}_{prefix[kind]}_{kind}", backpressure=backpressure)
        cocotb.start_soon(self._noise())

    async def carry(self, count):
        """As many messages of each kind, to their ends."""
        for kind, source in self.sources.items():
            source.send([random_message(self.rng, kind) for _ in range(count)])
        for sink in self.sinks.values():
            await sink.receive(count)
        await cycles(self.dut, 300)  # the last acknowledgements and credits

    def state(self):
        return unpack(LINK_STATE, value(self.dut.device_status))

    async def _noise(self):
        edge = RisingEdge(self.dut.clk)
        while True:
            for wire in (self.dut.noise_0, self.dut.noise_1):
                flips, drops = self.rng.random() < self.flip, self.rng.random() < self.drop
                wire.value = pack(
                    NOISE, {"flip": int(flips), "flip_at": self.rng.randrange(512), "drop": int(drops)}
                )
            await edge


async def begin(dut, name, **shaking):
    watch = Watch(dut)
    await start(dut)
    return Bench(dut, watch, random(name), **shaking)


@cocotb.test()
async def a_good_link_counts_flits_and_returns_credits(dut):
    bench = await begin(dut, "good")
    await bench.carry(100)
    counters, state = await bench.watch.told(), bench.state()
    for end in counters.values():
        assert end["replayed"] == end["crc_errors"] == end["retries"] == end["retrainings"] == 0
        assert end["sent"] > 100 // 4
    host, device = counters[SIDES[1]], counters[SIDES[0]]
    assert abs(host["sent"] - device["accepted"]) < 40, "flits of the retry protocol have no place in it"
    assert (state["opened"], state["kept"] < 4) == (1, True)
    assert (state["rx_message"], state["rx_data"]) == (PLACES["req"], PLACES["rwd"])
    assert (state["tx_message"], state["tx_data"]) == (PLACES["ndr"], PLACES["drs"]), "all were given back"
    assert (state["owed_message"], state["owed_data"]) == (0, 0)
    if parameters()["flit_bytes"] == 68:
        told = state["version_received"], state["wrap"], state["wrap_received"]
        assert told == (VERSION, ENTRIES[68], ENTRIES[68])
        assert state["free_received"] == 0, "no RETRY.Ack came"


@cocotb.test()
async def a_bad_link_counts_what_went_wrong(dut):
    bench = await begin(dut, "bad", flip=0.02, drop=0.002, backpressure=0.3)
    for _ in range(4):
        await bench.carry(60)
    bench.flip = bench.drop = 0.0
    await bench.carry(20)
    counters, state = await bench.watch.told(), bench.state()
    for end in counters.values():
        assert all(end[name] > 0 for name in ("sent", "replayed", "accepted", "crc_errors", "retries"))
        assert end["retrainings"] > 0
    if parameters()["flit_bytes"] == 68:
        # The device had the host send again, and was told where it was.
        assert 0 < state["free_received"] <= ENTRIES[68]
        assert state["write_pointer_received"] < ENTRIES[68]
        assert state["sequence_received"] < ENTRIES[68]


@cocotb.test()
async def who_has_no_credits_is_stalled(dut):
    bench = await begin(dut, "stalled")
    bench.sinks["req"].backpressure = 1.0
    bench.sources["req"].send([random_message(bench.rng, "req") for _ in range(4 * PLACES["req"])])
    await cycles(dut, 500)
    counters, state = await bench.watch.told(), bench.state()
    assert counters[SIDES[1]]["stalled_cycles"] > 200
    assert counters[SIDES[0]]["stalled_cycles"] < 100, "the device has credits, once they have come"
    assert state["owed_message"] == 0
