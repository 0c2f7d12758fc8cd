# amaranth: UnusedElaboratable=no
"""A memory channel: order, owner check, byte enables, poison, scrub, latency, rate, shares, counters.

The random run compares every answer of the fabric with a dictionary, in the order of its requests; a unit's
read may see any write of the fabric that was under way meanwhile, and no other. Claims run meanwhile.
"""

import cocotb
import pytest
from amaranth.sim import Simulator
from memory_model import ALL, EXTENT_LINES, MemoryModel, random_enable
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import SCRUB_INTERVAL_CYCLES, SCRUB_PATIENCE_CYCLES
from nearkv_hw.abi.dram import Dram
from nearkv_hw.abi.owner import Violation
from nearkv_hw.interfaces import (
    FabricRequest,
    FabricResponse,
    Fault,
    OwnerRequest,
    OwnerResponse,
    ReadRequest,
    ReadResponse,
    Refusal,
)
from nearkv_hw.memory.channel import OUTSTANDING, MemoryChannel
from nearkv_hw.memory.store import Store
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycle, cycles, random, start, value

EXTENTS = 4
ORDER_TESTS = "agrees_with_a_dictionary|refused_accesses|poison_stays|what_is_given_back"
"""What holds whatever memory there is; rates and latencies of DRAM have tests of their own."""


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("placement", "memory"),
    [
        ("controller", {"dram": "fixed", "memory_latency_cycles": 2}),
        ("controller", {"dram": "fixed", "memory_latency_cycles": 40}),
        ("phy", {"dram": "fixed", "memory_latency_cycles": 40}),
        ("controller", {"dram": "ddr5_6400"}),
        ("phy", {"dram": "ddr5_4800", "refresh": "per_bank"}),
        pytest.param("controller", {"dram": "lpddr5x_8533"}, marks=pytest.mark.slow),
        ("controller", {"dram": "hbm3_6400", "fabric_share": 3}),
    ],
)
def test_channel(placement, memory):
    config = configure("small", capacity_bytes=2 * EXTENTS << 20, apertures=8, placement=placement, **memory)
    channel = MemoryChannel(channel=1, config=config)
    fixed = config.dram is Dram.FIXED
    run(
        channel,
        module=__file__,
        parameters={"latency_cycles": channel.latency_cycles} if fixed else {},
        tests=None if fixed else ORDER_TESTS,
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
        self.unit_answers = StreamSink(dut, "unit_response", shape=ReadResponse, backpressure=backpressure)
        self.fabric = StreamSource(dut, "fabric_request", shape=FabricRequest, idle=idle)
        self.fabric_answers = StreamSink(
            dut, "fabric_response", shape=FabricResponse, backpressure=backpressure
        )
        self.owner = StreamSource(dut, "owner_request", shape=OwnerRequest, idle=idle)
        self.owner_answers = StreamSink(dut, "owner_response", shape=OwnerResponse, backpressure=backpressure)

        ports = [n for n in range(2) if hasattr(dut, f"refused_{n}_valid")]
        self.reports = [StreamSink(dut, f"refused_{n}", shape=Refusal) for n in ports]

    async def told(self):
        """What was reported: tenant, extent and kind."""
        await cycles(self.dut, 50)
        reports = [report for sink in self.reports for report in await sink.receive(len(sink))]
        return {(r["tenant"], r["line"] // EXTENT_LINES, Violation(r["kind"])) for r in reports}

    async def claim(self, extent, tenant):
        self.owner.send([{"extent": extent, "tenant": tenant, "claim": 1}])
        (answer,) = await self.owner_answers.receive()
        return answer

    async def release(self, extent, tenant):
        self.owner.send([{"extent": extent, "tenant": tenant, "release": 1}])
        (answer,) = await self.owner_answers.receive()
        return answer

    async def scrubbed(self):
        """Wait until all that was given back is free."""
        while value(self.dut.scrubbing):
            await cycles(self.dut, 20)

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
    model = MemoryModel(EXTENTS * EXTENT_LINES)
    for line in hot:
        extent = line // EXTENT_LINES
        if extent not in model.owners:
            await bench.claim(extent, rng.randrange(8))
            model.claim(extent, (await bench.claim(extent, 0))["tenant"])

    def line():
        return rng.choice(hot) if rng.random() < 0.95 else rng.choice(beyond)

    def tenant(line):
        return model.owners.get(line // EXTENT_LINES, 0) if rng.random() < 0.8 else rng.randrange(8)

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
    before = bench.counters()
    bench.unit.cycles.clear(), bench.fabric.cycles.clear()
    bench.unit.send(reads)
    bench.fabric.send(accesses)
    unit_answers = await bench.unit_answers.receive(len(reads))
    fabric_answers = await bench.fabric_answers.receive(len(accesses))

    # what each line holds after every write, with the cycles in which the write came and was answered
    states = {at: [(0, 0, (Fault.NONE, 0))] for at in hot}
    for taken, told, access, answer in zip(
        bench.fabric.cycles, bench.fabric_answers.cycles, accesses, fabric_answers, strict=True
    ):
        request = {k: v for k, v in access.items() if k != "id"}
        assert (Fault(answer["fault"]), answer["data"]) == model.access(**request), access
        assert (answer["id"], answer["write"]) == (access["id"], access["write"])
        if access["write"] and Fault(answer["fault"]) == Fault.NONE:
            poisoned = Fault.POISON if access["line"] in model.poisoned else Fault.NONE
            states[access["line"]].append((taken, told, (poisoned, model.data[access["line"]])))
    refused = violations = 0
    for taken, told, read, answer in zip(
        bench.unit.cycles, bench.unit_answers.cycles, reads, unit_answers, strict=True
    ):
        seen = Fault(answer["fault"]), answer["data"]
        if read["line"] >= model.lines:
            assert seen == (Fault.OUTSIDE, 0)
        elif model.owners[read["line"] // EXTENT_LINES] != read["tenant"]:
            assert seen == (Fault.DENIED, 0)
            violations += 1
        else:
            history = states[read["line"]]
            certain = max(n for n, (_, done, _) in enumerate(history) if done <= taken)
            possible = [state for came, _, state in history[certain:] if came <= told]
            assert seen in possible, (read, taken, told)
            continue
        refused += 1
    done = {name: count - before[name] for name, count in bench.counters().items()}
    assert done["violations"] == model.violations + violations > 20
    assert (done["fabric_reads"], done["fabric_writes"]) == (model.reads, model.writes)
    assert min(model.reads, model.writes, len(reads) - refused) > 40


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
    reported = {(tenant, 1, kind) for tenant in (0, 1, 2, 3, 5, 6, 7) for kind in Violation}
    assert await bench.told() == reported | {(4, 0, Violation.READ), (4, 0, Violation.UNIT_READ)}
    assert value(dut.missed) == 0
    assert (bench.counters()["fabric_reads"], bench.counters()["fabric_writes"]) == (3, 1)


@cocotb.test()
async def what_is_given_back_is_zero_before_anybody_has_it(dut):
    """Poison and writes that stand before the release are scrubbed, too; nobody has it meanwhile.

    Both clients keep on asking, so that the scrub has few turns but those that it insists on, then leave it
    alone, so that it goes at its rate.
    """
    rng = random("scrub")
    await start(dut)
    bench = Bench(dut)
    await bench.claim(0, 0)
    await bench.claim(2, 1)
    first, before = 2 * EXTENT_LINES, value(dut.scrub_lines)
    written = {
        first,
        first + 1,
        first + EXTENT_LINES - 1,
        *(first + rng.randrange(EXTENT_LINES) for _ in range(40)),
    }
    other = EXTENT_LINES // 4
    assert await bench.write(other, 7) == Fault.NONE
    for line in written:
        poison, enable = int(rng.random() < 0.2), random_enable(rng)
        data = rng.getrandbits(512)
        bench.fabric.send(
            [{"line": line, "tenant": 1, "write": 1, "enable": enable, "poison": poison, "data": data}]
        )
    await bench.fabric.drained()
    assert (await bench.release(2, 0))["tenant"] == 1  # not its own: nothing happens
    assert value(dut.scrubbing) == 0
    assert (await bench.release(2, 1))["owned"] == 1
    await bench.fabric_answers.receive(len(written))
    assert value(dut.scrubbing) == 1
    for tenant in range(3):
        for line in (first, first + EXTENT_LINES - 1):
            assert await bench.read(line, tenant) == (Fault.DENIED, 0)
            assert await bench.write(line, 1, tenant) == Fault.DENIED
        assert (await bench.claim(2, tenant))["scrubbing"] == 1

    begun = cycle()
    done = value(dut.scrub_lines)
    while cycle() - begun < 20 * SCRUB_PATIENCE_CYCLES:
        bench.unit.send([{"line": other}] * 8)
        bench.fabric.send([{"line": other}] * 8)
        await bench.unit_answers.receive(8)
        await bench.fabric_answers.receive(8)
    assert value(dut.scrub_lines) - done >= 10
    assert value(dut.scrubbing) == 1

    begun, done = cycle(), value(dut.scrub_lines)
    await bench.scrubbed()
    lines, took = value(dut.scrub_lines) - done, cycle() - begun
    assert value(dut.scrub_lines) - before == EXTENT_LINES
    assert SCRUB_INTERVAL_CYCLES * (lines - 1) <= took <= 1.1 * SCRUB_INTERVAL_CYCLES * lines + 400, (
        lines,
        took,
    )
    assert (await bench.claim(2, 5))["owned"] == 0
    for line in sorted(written):
        assert await bench.read(line, 5) == (Fault.NONE, 0)
    assert await bench.read(other) == (Fault.NONE, 7)
    bench.fabric.send([{"line": first + n, "tenant": 5} for n in range(EXTENT_LINES)])
    for answer in await bench.fabric_answers.receive(EXTENT_LINES):
        assert (answer["fault"], answer["data"]) == (0, 0)
    await bench.release(2, 5)
    await bench.scrubbed()  # as the other tests expect it


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
    assert latency == {parameters()["latency_cycles"]}
    assert bench.unit_answers.cycles[-1] - bench.unit_answers.cycles[0] == count - 1
    bench.fabric.send([{"line": i, "write": i & 1, "enable": ALL, "data": i} for i in range(count)])
    await bench.fabric_answers.receive(count)
    latency = {b - a for a, b in zip(bench.fabric.cycles, bench.fabric_answers.cycles, strict=True)}
    assert latency == {parameters()["latency_cycles"]}
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
    for source in (bench.unit_answers, bench.fabric_answers):
        steps = [b - a for a, b in zip(source.cycles, source.cycles[1:], strict=False)]
        assert all(step == 2 for step in steps[4:-4])
    assert bench.counters()["conflicts"] - before >= 2 * count - 10


@cocotb.test()
async def answers_left_lying_stop_only_whoever_leaves_them(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim(0, 0)
    count = OUTSTANDING + 40
    lines = range(1000, 1000 + count)  # not written by the other tests
    bench.fabric_answers.backpressure = 1.0
    bench.fabric.send([{"line": i, "id": i, "write": 1, "enable": ALL, "data": i} for i in lines])
    await cycles(dut, 4 * OUTSTANDING + 2 * parameters()["latency_cycles"])
    held = len(bench.fabric.cycles)
    assert held == OUTSTANDING
    bench.unit.send([{"line": i} for i in lines])
    answers = await bench.unit_answers.receive(count)
    assert [a["data"] for a in answers] == [*lines[:held], *[0] * (count - held)]
    assert bench.unit_answers.cycles[-1] - bench.unit_answers.cycles[0] == count - 1
    bench.fabric_answers.backpressure = 0.5
    answers = await bench.fabric_answers.receive(count)
    assert [a["id"] for a in answers] == list(lines)
    assert [a["data"] for a in answers] == [0] * count
    bench.unit_answers.backpressure = 1.0
    bench.unit.send([{"line": i} for i in lines])
    bench.fabric.send([{"line": i} for i in lines])
    assert [a["data"] for a in await bench.fabric_answers.receive(count)] == list(lines)
    assert len(bench.unit_answers.cycles) == count
    bench.unit_answers.backpressure = 0.0
    assert [a["data"] for a in await bench.unit_answers.receive(count)] == list(lines)
