# amaranth: UnusedElaboratable=no
"""Endpoint, fabric and channels together against one dictionary, with units and another master running.

Random host traffic of two apertures over owned, foreign and missing memory and the windows, with byte enables
and poison, at two ports of the endpoint, each with lines of its own: every answer equals the dictionary's, in
the order in which the port accepted the messages. Then directed: a write is seen after its completion, also
at the other port, the latency of an idle device, a line per cycle from one channel and from two.
"""

import cocotb
import pytest
from host_model import ALL, Host, answer, place, req, rwd, seen
from memory_system import EXTENT_LINES, MemorySystem, claim
from nearkv_hw.abi import configure, cxl
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.interfaces import (
    FabricRequest,
    FabricResponse,
    Fault,
    ReadRequest,
    ReadResponse,
)
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start, value

EXTENTS = 8
LINES = EXTENTS * EXTENT_LINES
CHANNELS = 2
PORTS = 2
OWNERS = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 6: 1}
"""Extent to tenant; 5 and 7 are nobody's."""


@pytest.mark.rtl
def test_memory_system():
    system = MemorySystem(
        config=configure("small", dram="fixed", channels=CHANNELS, capacity_bytes=EXTENTS << 20, link="x8_64")
    )
    assert system.endpoint.ports == PORTS
    run(
        system,
        module=__file__,
        parameters={"read_cycles": system.read_cycles, "outstanding": system.endpoint.outstanding},
    )


class Bench:
    """The system with its extents claimed as `OWNERS` says, and windows that keep what is written to them."""

    def __init__(self, dut, idle=0.0, backpressure=0.0):
        self.dut = dut
        self.hosts = [Host(dut, idle, backpressure, port) for port in range(PORTS)]
        self.host = self.hosts[0]
        self.other = StreamSource(dut, "other_request", shape=FabricRequest, idle=idle)
        self.other_answers = StreamSink(
            dut, "other_response", shape=FabricResponse, backpressure=backpressure
        )
        self.units = [
            StreamSource(dut, f"units_{c}_request", shape=ReadRequest, idle=idle) for c in range(CHANNELS)
        ]
        self.unit_answers = [
            StreamSink(dut, f"units_{c}_response", shape=ReadResponse) for c in range(CHANNELS)
        ]
        self._window = StreamSink(dut, "window_request", shape=FabricRequest, backpressure=backpressure)
        self._window_answers = StreamSource(dut, "window_response", shape=FabricResponse, idle=idle)
        cocotb.start_soon(self._answer_windows())

    async def claim(self):
        await claim(self.dut, channels=CHANNELS, owners=OWNERS)

    async def _answer_windows(self):
        lines = {}
        while True:
            (request,) = await self._window.receive()
            where = request["tenant"], request["line"]
            data = 0
            if request["write"]:
                lines[where] = merged(lines.get(where, 0), request["data"], request["enable"])
            else:
                data = lines.get(where, 0)
            self._window_answers.send([{"id": request["id"], "write": request["write"], "data": data}])


def merged(old, new, enable):
    """`old` with the enabled bytes of `new`."""
    mask = sum(0xFF << 8 * i for i in range(LINE_BYTES) if enable >> i & 1)
    return old & ~mask | new & mask


class Dictionary:
    """What memory, owners and windows make of the host's messages."""

    def __init__(self):
        self.lines, self.poisoned = {}, set()
        self.violations = self.outside = 0

    def apply(self, message):
        """The host's answer."""
        where, tenant, line = place(message, LINES, 2)
        write = "header" in message
        if where == "outside":
            self.outside += 1
            return answer(message, fault=Fault.OUTSIDE.value)
        if where == "memory" and OWNERS.get(line // EXTENT_LINES) != tenant:
            self.violations += 1
            return answer(message, fault=Fault.DENIED.value)
        # A device line is the same from every aperture, a window's is not.
        where = (where, line, tenant if where == "window" else None)
        if not write:
            fault = Fault.POISON if where in self.poisoned else Fault.NONE
            return answer(message, fault=fault.value, data=self.lines.get(where, 0))
        whole = message["header"]["opcode"] == cxl.M2SRwDOp.MEM_WR
        enable = ALL if whole else message["enable"]
        self.lines[where] = merged(self.lines.get(where, 0), message["data"], enable)
        if where[0] == "memory":
            if message["header"]["poison"]:
                self.poisoned.add(where)
            elif enable == ALL:
                self.poisoned.discard(where)
        return answer(message)


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.6], backpressure=[0.0, 0.6])
async def agrees_with_a_dictionary(dut, idle, backpressure):
    rng = random("traffic", idle, backpressure)
    await start(dut)
    bench = Bench(dut, idle, backpressure)
    await bench.claim()
    # The first half of each extent is the host's, the second the other master's and the units'. The store
    # outlives a reset: every run has a part of the first half to itself.
    run_lines = EXTENT_LINES // 8
    first = (2 * bool(idle) + bool(backpressure)) * run_lines
    count = 300
    messages = []
    for port in range(PORTS):

        def own(line, port=port):
            """The line of the pair that is this port's."""
            return line & ~1 | port

        hot = [
            own(e * EXTENT_LINES + first + rng.randrange(run_lines)) for e in range(EXTENTS) for _ in range(2)
        ]
        places = [2 * LINES * aperture + line for aperture in (0, 1) for line in hot]
        places += [2 * LINES * aperture + LINES + own(line) for aperture in (0, 1) for line in (0, 64, 1023)]
        places += [2 * LINES - 1, 4 * LINES, 1 << 45]
        tags = rng.sample(range(1 << 16), 2 * count)
        reqs = [
            req(rng.choice([1, 2]), rng.choice(places), tag, ld_id=rng.randrange(16)) for tag in tags[:count]
        ]
        rwds = [
            rwd(
                rng.choice([1, 2]),
                rng.choice(places),
                rng.getrandbits(512),
                tag,
                rng.choice([ALL, 0, rng.getrandbits(64)]),
                poison=int(rng.random() < 0.1),
            )
            for tag in tags[count:]
        ]
        messages.append((reqs, rwds))
    # The other master writes lines; then it and the units read them and what they may not see.
    theirs = {
        extent * EXTENT_LINES + EXTENT_LINES // 2 + n: rng.getrandbits(512)
        for extent in OWNERS
        for n in range(8)
    }
    writes = [
        {"line": line, "tenant": OWNERS[line // EXTENT_LINES], "write": 1, "enable": ALL, "data": data}
        for line, data in theirs.items()
    ]
    reads = [{"line": line, "tenant": OWNERS[line // EXTENT_LINES]} for line in theirs]
    refused = [{"line": line, "tenant": 1 - OWNERS[line // EXTENT_LINES]} for line in list(theirs)[::4]]
    bench.other.send(number(writes))
    assert {a["fault"] for a in await bench.other_answers.receive(len(writes))} == {Fault.NONE.value}
    for host, (reqs, rwds) in zip(bench.hosts, messages, strict=True):
        host.req.send(reqs)
        host.rwd.send(rwds)
    asked = number(reads + refused + [{"line": LINES}])
    bench.other.send(asked)
    by_unit = [
        [r for r in reads + refused if r["line"] // EXTENT_LINES % CHANNELS == c] for c in range(CHANNELS)
    ]
    for unit, requests in zip(bench.units, by_unit, strict=True):
        unit.send([{**r, "line": channel_line(r["line"])} for r in requests])

    def expected_of(request):
        if request["line"] >= LINES:
            return Fault.OUTSIDE.value, 0
        allowed = OWNERS[request["line"] // EXTENT_LINES] == request["tenant"]
        return (Fault.NONE.value, theirs[request["line"]]) if allowed else (Fault.DENIED.value, 0)

    answers = {a["id"]: (a["fault"], a["data"]) for a in await bench.other_answers.receive(len(asked))}
    assert answers == {r["id"]: expected_of(r) for r in asked}
    for sink, requests in zip(bench.unit_answers, by_unit, strict=True):
        got = [(a["fault"], a["data"]) for a in await sink.receive(len(requests))]
        assert got == [expected_of(r) for r in requests]

    models = []
    for host, (reqs, rwds) in zip(bench.hosts, messages, strict=True):
        ndrs, drss = await host.ndr.receive(count), await host.drs.receive(count)
        models.append(Dictionary())
        expected = {}
        for message in host.arrived(reqs, rwds):
            a = models[-1].apply(message)
            expected[a[1]] = a
        assert {a[1]: a for a in seen(ndrs, drss)} == expected
        assert min(models[-1].violations, models[-1].outside) > 10
        assert len(models[-1].lines) > 12
    violations = sum(value(getattr(dut, f"violations_{c}")) for c in range(CHANNELS))
    assert violations == sum(model.violations for model in models) + 2 * len(refused)
    outside = value(dut.outside_reads) + value(dut.outside_writes)
    assert outside == sum(model.outside for model in models)


def number(requests):
    """The requests with ids from 0."""
    return [{**request, "id": i} for i, request in enumerate(requests)]


def channel_line(line):
    """The channel line of a device line."""
    extent, offset = divmod(line, EXTENT_LINES)
    return extent // CHANNELS * EXTENT_LINES + offset


@cocotb.test()
async def a_completed_write_is_seen(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim()
    rng = random("values")
    for n in range(20):
        line = rng.choice([0, 5, EXTENT_LINES, LINES + 3])
        data = rng.getrandbits(512)
        done = await bench.host.write(line, data, tag=n)
        assert (done["tag"], done["opcode"]) == (n, cxl.S2MNdrOp.CMP)
        got = await bench.hosts[n % PORTS].read(line, tag=n)
        assert (got["header"]["tag"], got["header"]["opcode"], got["data"]) == (n, 0, data)
        (unit,) = bench.units[:1]
        if line < EXTENT_LINES:
            unit.send([{"line": line, "tenant": 0}])
            assert (await bench.unit_answers[0].receive())[0]["data"] == data


@cocotb.test()
async def reads_take_as_long_as_stated(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim()
    for _ in range(3):
        await bench.host.read(7)
        assert bench.host.drs.cycles[-1] - bench.host.req.cycles[-1] == parameters()["read_cycles"]


@cocotb.test()
@cocotb.parametrize(lines=["one_channel", "two_channels", "reads_and_writes"])
async def a_line_per_cycle(dut, lines):
    await start(dut)
    bench = Bench(dut)
    await bench.claim()
    host = bench.host
    count = 300
    stride = EXTENT_LINES if lines == "two_channels" else 0
    host.req.send([req(cxl.M2SReqOp.MEM_RD, i % 2 * stride + i % EXTENT_LINES, i) for i in range(count)])
    both = lines == "reads_and_writes"
    if both:
        host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, EXTENT_LINES + i, i, i) for i in range(count)])
        await host.ndr.receive(count)
    loads = {drs["header"]["dev_load"] for drs in await host.drs.receive(count)}
    assert cxl.DevLoad.SEVERE_OVERLOAD not in loads
    took = max(host.drs.cycles + host.ndr.cycles) - min(host.req.cycles + host.rwd.cycles)
    assert took <= (2 * count if both else count) + parameters()["read_cycles"] + 1


@cocotb.test()
async def a_host_that_takes_nothing_stops_nobody_else(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.claim()
    host = bench.host
    host.ndr.backpressure = host.drs.backpressure = 1.0
    count = 2 * parameters()["outstanding"]
    host.req.send([req(cxl.M2SReqOp.MEM_RD, i, i) for i in range(count)])
    host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, EXTENT_LINES + i, i, i) for i in range(count)])
    await cycles(dut, 10 * count)
    bench.other.send([{"line": i, "id": i} for i in range(100)])
    bench.units[0].send([{"line": i} for i in range(100)])
    await bench.other_answers.receive(100)
    await bench.unit_answers[0].receive(100)
    assert bench.unit_answers[0].cycles[-1] - bench.unit_answers[0].cycles[0] < 2 * 100
    host.ndr.backpressure = host.drs.backpressure = 0.0
    assert {n["tag"] for n in await host.ndr.receive(count)} == set(range(count))
    assert {d["header"]["tag"] for d in await host.drs.receive(count)} == set(range(count))
