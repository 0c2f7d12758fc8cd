# amaranth: UnusedElaboratable=no
"""A memory channel: order, owner check, byte enables, poison, latency, rate, shares, counters.

The random run compares every answer with a dictionary, applying the accesses in the order in which the
channel accepted them; claims of extents run meanwhile.
"""

import cocotb
import pytest
from amaranth.sim import Simulator
from memory_model import ALL, EXTENT_LINES, MemoryModel, random_enable
from nearkv_hw.abi import configure
from nearkv_hw.interfaces import (
    FabricRequest,
    FabricResponse,
    Fault,
    OwnerRequest,
    OwnerResponse,
    ReadRequest,
    ReadResponse,
)
from nearkv_hw.memory.channel import MemoryChannel
from nearkv_hw.memory.store import Store
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start, value

EXTENTS = 4


@pytest.mark.rtl
@pytest.mark.parametrize("latency_cycles", [2, 40])
def test_channel(latency_cycles):
    config = configure(
        "small", capacity_bytes=2 * EXTENTS << 20, memory_latency_cycles=latency_cycles, apertures=8
    )
    channel = MemoryChannel(channel=1, config=config)
    run(
        channel,
        module=__file__,
        parameters={
            "latency_cycles": latency_cycles,
            "unit_latency_cycles": channel.unit_latency_cycles,
            "fabric_latency_cycles": channel.fabric_latency_cycles,
            "fabric_outstanding": channel.fabric_outstanding,
        },
    )


@pytest.mark.parametrize("channel", [-1, 2, 1.0, None])
def test_channel_number_is_checked(channel):
    with pytest.raises(ValueError, match="channel must be from 0 to 1, not"):
        MemoryChannel(channel=channel, config=configure("small"))


def test_config_is_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not None"):
        MemoryChannel(channel=0, config=None)


def test_amaranths_simulator_is_refused():
    with pytest.raises(
        NotImplementedError, match="black box that Amaranth's simulator would silently leave out"
    ):
        Simulator(Store(channel=0))


class Bench:
    """The channel's three ports, and counters."""

    def __init__(self, dut, idle=0.0, backpressure=0.0):
        self.dut = dut
        self.unit = StreamSource(dut, "unit_request", shape=ReadRequest, idle=idle)
        self.unit_answers = StreamSink(dut, "unit_response", shape=ReadResponse)
        self.fabric = StreamSource(dut, "fabric_request", shape=FabricRequest, idle=idle)
        self.fabric_answers = StreamSink(
            dut, "fabric_response", shape=FabricResponse, backpressure=backpressure
        )
        self.owner = StreamSource(dut, "owner_request", shape=OwnerRequest, idle=idle)
        self.owner_answers = StreamSink(dut, "owner_response", shape=OwnerResponse, backpressure=backpressure)

    async def claim(self, extent, tenant):
        self.owner.send([{"extent": extent, "tenant": tenant, "claim": 1}])
        (answer,) = await self.owner_answers.receive()
        return answer

    async def write(self, line, data, tenant=0, enable=ALL, poison=0):
        request = {
            "line": line,
            "tenant": tenant,
            "write": 1,
            "poison": poison,
            "enable": enable,
            "data": data,
        }
        self.fabric.send([request])
        (answer,) = await self.fabric_answers.receive()
        return Fault(answer["fault"])

    async def read(self, line, tenant=0):
        """(fault, data), the same at both ports."""
        self.fabric.send([{"line": line, "tenant": tenant}])
        self.unit.send([{"line": line, "tenant": tenant}])
        (a,), (b,) = await self.fabric_answers.receive(), await self.unit_answers.receive()
        assert (a["fault"], a["data"]) == (b["fault"], b["data"])
        return Fault(a["fault"]), a["data"]

    def counters(self):
        names = ("fabric_reads", "fabric_writes", "violations", "conflicts")
        return {name: value(getattr(self.dut, name)) for name in names}


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.7])
async def agrees_with_a_dictionary(dut, idle, backpressure):
    rng = random("accesses", idle, backpressure)
    await start(dut)
    bench = Bench(dut, idle, backpressure)
    # The store outlives a reset: every run has lines of its own, all others use the lower half of an extent.
    run_lines = EXTENT_LINES // 8
    first = EXTENT_LINES // 2 + (2 * bool(idle) + bool(backpressure)) * run_lines
    hot = [rng.randrange(EXTENTS) * EXTENT_LINES + first + rng.randrange(run_lines) for _ in range(6)]
    beyond = [EXTENTS * EXTENT_LINES, (EXTENTS + 3) * EXTENT_LINES + 5, (1 << 34) - 1]

    def line():
        return rng.choice(hot) if rng.random() < 0.95 else rng.choice(beyond)

    owners = {line // EXTENT_LINES: rng.randrange(8) for line in hot}

    def tenant(line):
        return owners.get(line // EXTENT_LINES, 0) if rng.random() < 0.8 else rng.randrange(8)

    reads = [{"line": at, "tenant": tenant(at)} for at in (line() for _ in range(400))]
    accesses = [
        {
            "line": at,
            "tenant": tenant(at),
            "id": rng.getrandbits(16),
            "write": rng.randrange(2),
            "poison": int(rng.random() < 0.1),
            "enable": random_enable(rng),
            "data": rng.getrandbits(512),
        }
        for at in (line() for _ in range(400))
    ]
    claims = [{"extent": e, "tenant": t, "claim": 1} for e, t in owners.items()]
    bench.unit.send(reads)
    bench.fabric.send(accesses)
    # Claims come one by one while accesses run: the first ones meet memory that nobody owns.
    for claim in claims:
        await cycles(dut, rng.randrange(20, 60))
        bench.owner.send([claim])
    unit_answers = await bench.unit_answers.receive(len(reads))
    fabric_answers = await bench.fabric_answers.receive(len(accesses))
    await bench.owner_answers.receive(len(claims))

    model = MemoryModel(EXTENTS * EXTENT_LINES)
    events = [
        *(
            (cycle, 1, read, answer)
            for cycle, read, answer in zip(bench.unit.cycles, reads, unit_answers, strict=True)
        ),
        *(
            (cycle, 1, access, answer)
            for cycle, access, answer in zip(bench.fabric.cycles, accesses, fabric_answers, strict=True)
        ),
        # An access that is accepted in the cycles of a claim may meet either owner.
        *((cycle, 0, claim, None) for cycle, claim in zip(bench.owner_answers.cycles, claims, strict=True)),
    ]
    pending = dict(zip(bench.owner.cycles, claims, strict=True))
    answered = dict(zip(bench.owner.cycles, bench.owner_answers.cycles, strict=True))
    unsure = 0
    for cycle, _, item, answer in sorted(events, key=lambda event: event[:2]):
        if "claim" in item:
            model.claim(item["extent"], item["tenant"])
            continue
        request = {k: v for k, v in item.items() if k != "id"}
        under_way = [
            claim
            for taken, claim in pending.items()
            if taken < cycle <= answered[taken] and claim["extent"] == item["line"] // EXTENT_LINES
        ]
        if under_way and Fault(answer["fault"]) != Fault.DENIED:
            model.claim(under_way[0]["extent"], under_way[0]["tenant"])
            unsure += 1
        assert (Fault(answer["fault"]), answer["data"]) == model.access(**request), (cycle, item)
        if "id" in item:
            assert (answer["id"], answer["write"]) == (item["id"], item["write"])
    assert len({event[0] for event in events if event[1]}) == len(reads) + len(accesses), "two in one cycle"
    assert unsure < 80
    seen = bench.counters()
    assert seen["violations"] == model.violations > 20
    unit_reads = sum(Fault(a["fault"]) in (Fault.NONE, Fault.POISON) for a in unit_answers)
    assert (seen["fabric_reads"] + unit_reads, seen["fabric_writes"]) == (model.reads, model.writes)
    assert min(model.reads, model.writes) > 40


@cocotb.test()
async def refused_accesses_return_and_change_nothing(dut):
    await start(dut)
    bench = Bench(dut)
    secret = random("secret").getrandbits(512) | 1
    line = EXTENT_LINES + 7
    assert await bench.write(line, secret) == Fault.DENIED  # nobody's yet
    assert (await bench.claim(1, 4))["owned"] == 0
    assert await bench.read(line, 4) == (Fault.NONE, 0)
    assert await bench.write(line, secret, 4) == Fault.NONE
    for tenant in (0, 1, 2, 3, 5, 6, 7):
        assert await bench.read(line, tenant) == (Fault.DENIED, 0)
        assert await bench.write(line, 0, tenant) == Fault.DENIED
        assert await bench.write(line, 0, tenant, poison=1) == Fault.DENIED
    answer = await bench.claim(1, 2)
    assert (answer["owned"], answer["tenant"]) == (1, 4)
    assert await bench.read(line, 4) == (Fault.NONE, secret)
    assert await bench.read(line - EXTENT_LINES, 4) == (Fault.DENIED, 0)
    for beyond in (line + EXTENTS * EXTENT_LINES, line | 1 << 33):  # the same line but for high bits
        assert await bench.read(beyond, 4) == (Fault.OUTSIDE, 0)
        assert await bench.write(beyond, 0, 4) == Fault.OUTSIDE
    assert await bench.read(line, 4) == (Fault.NONE, secret)
    assert bench.counters()["violations"] == 1 + 7 * 4 + 2
    assert (bench.counters()["fabric_reads"], bench.counters()["fabric_writes"]) == (3, 1)


@cocotb.test()
async def poison_stays_until_a_whole_line_is_written(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim(0, 0)
    ones = (1 << 512) - 1
    assert await bench.write(9, ones) == Fault.NONE
    assert await bench.write(9, 0, enable=1, poison=1) == Fault.NONE
    assert await bench.read(9) == (Fault.POISON, ones ^ 0xFF)
    assert await bench.write(9, 0, enable=ALL ^ 1 << 63) == Fault.NONE
    assert await bench.read(9) == (Fault.POISON, 0xFF << 504)
    assert await bench.read(8) == (Fault.NONE, 0)
    assert await bench.write(9, 5) == Fault.NONE
    assert await bench.read(9) == (Fault.NONE, 5)


@cocotb.test()
async def has_stated_latency_and_rate(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim(0, 0)
    count = 200
    bench.unit.send([{"line": i} for i in range(count)])
    await bench.unit_answers.receive(count)
    latency = {b - a for a, b in zip(bench.unit.cycles, bench.unit_answers.cycles, strict=True)}
    assert latency == {parameters()["unit_latency_cycles"]} == {parameters()["latency_cycles"]}
    assert bench.unit_answers.cycles[-1] - bench.unit_answers.cycles[0] == count - 1
    bench.fabric.send([{"line": i, "write": i & 1, "enable": ALL, "data": i} for i in range(count)])
    await bench.fabric_answers.receive(count)
    latency = {b - a for a, b in zip(bench.fabric.cycles, bench.fabric_answers.cycles, strict=True)}
    assert latency == {parameters()["fabric_latency_cycles"]}
    assert bench.fabric_answers.cycles[-1] - bench.fabric_answers.cycles[0] == count - 1


@cocotb.test()
async def unit_and_fabric_have_half_each(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim(0, 0)
    count = 200
    before = bench.counters()["conflicts"]
    bench.unit.send([{"line": i} for i in range(count)])
    bench.fabric.send([{"line": i} for i in range(count)])
    await bench.unit_answers.receive(count)
    await bench.fabric_answers.receive(count)
    assert all(b - a == 2 for a, b in zip(bench.unit.cycles, bench.unit.cycles[1:], strict=False))
    assert all(b - a == 2 for a, b in zip(bench.fabric.cycles, bench.fabric.cycles[1:], strict=False))
    assert bench.counters()["conflicts"] - before == 2 * count - 1


@cocotb.test()
async def answers_left_lying_stop_the_fabric_and_not_the_unit(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim(0, 0)
    bench.fabric_answers.backpressure = 1.0
    outstanding, count = parameters()["fabric_outstanding"], 100
    lines = range(1000, 1000 + count)  # not written by the other tests
    bench.fabric.send([{"line": i, "id": i, "write": 1, "enable": ALL, "data": i} for i in lines])
    await cycles(dut, 3 * outstanding)
    assert len(bench.fabric.cycles) == outstanding
    bench.unit.send([{"line": i} for i in lines])
    answers = await bench.unit_answers.receive(count)
    assert [a["data"] for a in answers] == [*lines[:outstanding], *[0] * (count - outstanding)]
    assert bench.unit_answers.cycles[-1] - bench.unit_answers.cycles[0] == count - 1
    bench.fabric_answers.backpressure = 0.5
    answers = await bench.fabric_answers.receive(count)
    assert [a["id"] for a in answers] == list(lines)
