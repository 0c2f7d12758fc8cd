# amaranth: UnusedElaboratable=no
"""Reads through the lines on chip: never stale once a write was told, never another tenant's, and fast."""

from collections import defaultdict, deque

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from nearkv_hw.command.cache import LineCache
from nearkv_hw.command.reader import LineReader
from nearkv_hw.command.records import WalkLine, WalkRead
from nearkv_hw.interfaces import FabricRequest, FabricResponse, Fault, Snoop
from nearkv_sim.cocotb.payload import pack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycle, cycles, random, start

DEPTHS = (4, 8, 16)
CACHED = 2
TENANTS = 3


@pytest.mark.rtl
@pytest.mark.parametrize(("lines", "snoops"), [(8, 1), (4, 3)])
def test_reader(lines, snoops):
    reader = LineReader(depths=DEPTHS, cached=CACHED, lines=lines, snoops=snoops)
    run(reader, module=__file__, parameters={"lines": lines, "snoops": snoops})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (4, 3)}, r"depths must be powers of two from 2 to 256, not \(4, 3\)"),
        ({"cached": 0}, "cached must be from 1 to the 3 clients, not 0"),
        ({"cached": 4}, "cached must be from 1 to the 3 clients, not 4"),
        ({"lines": 12}, "lines must be a power of two from 2 to 512, not 12"),
        ({"lines": 1024}, "lines must be a power of two from 2 to 512, not 1024"),
        ({"snoops": 0}, "snoops must be a positive integer, not 0"),
    ],
)
def test_reader_parameters(changes, message):
    with pytest.raises(ValueError, match=message):
        LineReader(**{"depths": DEPTHS, "cached": CACHED, "lines": 8, "snoops": 1, **changes})


class Bench:
    """Channels behind the reader, as many as it has snoops: requests of one keep their order, and a channel
    takes a write in the same order. Owners never change."""

    def __init__(self, dut, *, latency, idle=0.0, backpressure=0.0):
        self.dut, self.rng, self.latency = dut, random("bench"), latency
        self.snoops = parameters()["snoops"]
        self.history = defaultdict(lambda: [(0, 0)])  # line -> (cycle in which it was written, data)
        self.poisoned = set()
        self.writes = deque()
        self.requests = StreamSink(dut, "fabric_request", shape=FabricRequest, backpressure=backpressure)
        self.responses = StreamSource(dut, "fabric_response", shape=FabricResponse)
        self.clients = [StreamSource(dut, f"request_{n}", shape=WalkRead, idle=idle) for n in range(3)]
        self.answers = [
            StreamSink(dut, f"response_{n}", shape=WalkLine, backpressure=backpressure) for n in range(3)
        ]
        dut.flush.value = 0
        for n in range(self.snoops):
            getattr(dut, f"snoops_{n}").value = 0
        cocotb.start_soon(self.serve())

    @staticmethod
    def owner(line):
        return line // 8 % TENANTS

    async def serve(self):
        """A channel takes what stands at it: a read sees every write taken before; each write is snooped."""
        edge = RisingEdge(self.dut.clk)
        waiting = [deque() for _ in range(self.snoops)]
        while True:
            await edge
            now = cycle()
            for request in await self.requests.receive(len(self.requests)):
                line, tenant = request["line"], request["tenant"]
                data, fault = self.history[line][-1][1], Fault.NONE
                if self.owner(line) != tenant:
                    data, fault = 0, Fault.DENIED
                elif line in self.poisoned:
                    fault = Fault.POISON
                due = now + self.rng.randint(*self.latency)
                waiting[line % self.snoops].append((due, request["id"], data, fault))
            snooped = {}
            while self.writes and self.writes[0][0] % self.snoops not in snooped:
                line, data = self.writes.popleft()
                self.history[line].append((now, data))
                snooped[line % self.snoops] = line
            for n in range(self.snoops):
                known = {"valid": 1, "line": snooped[n]} if n in snooped else {"valid": 0, "line": 0}
                getattr(self.dut, f"snoops_{n}").value = pack(Snoop, known)
            for queue in self.rng.sample(waiting, len(waiting)):
                if queue and queue[0][0] <= now:
                    _, request_id, data, fault = queue.popleft()
                    self.responses.send([{"id": request_id, "data": data, "fault": fault.value}])

    def current(self, line, begin, end):
        """What the line held at some time from `begin` to `end`."""
        history = self.history[line]
        ends = [*(when for when, _ in history[1:]), end + 1]
        return {
            data for (when, data), until in zip(history, ends, strict=True) if when <= end and until > begin
        }

    def counters(self):
        return int(self.dut.table_hits.value), int(self.dut.table_misses.value)


@cocotb.test()
async def never_shows_old_lines(dut):
    """Random reads by three clients and tenants, random writes; memory could give every answer."""
    await start(dut)
    bench = Bench(dut, latency=(1, 30), idle=0.4, backpressure=0.2)
    rng = random("reads")
    dut_lines = [rng.randrange(1 << 34) & ~63 | n for n in range(48)] + list(range(24))
    bench.poisoned = set(rng.sample(dut_lines, 6))
    asked = [[], [], []]
    for turn in range(60):
        hot = rng.sample(dut_lines, 6)
        for n, client in enumerate(bench.clients):
            reads = []
            for _ in range(20):
                line = rng.choice(hot if rng.random() < 0.8 else dut_lines)
                tenant = bench.owner(line) if rng.random() < 0.9 else rng.randrange(TENANTS)
                reads.append({"line": line, "tenant": tenant, "last": rng.getrandbits(1)})
            client.send(reads)
            asked[n] += reads
        for _ in range(40):
            line = rng.choice([*hot, *hot, rng.choice(dut_lines)])
            if rng.random() < 0.3:
                bench.writes.append((line, rng.getrandbits(512)))
            await cycles(dut, rng.randrange(4))
        if turn % 10 == 9:
            dut.flush.value = 1
            await cycles(dut, 1)
            dut.flush.value = 0
    for n, answers in enumerate(bench.answers):
        got = await answers.receive(len(asked[n]))
        for k, (read, answer) in enumerate(zip(asked[n], got, strict=True)):
            assert answer["last"] == read["last"]
            line = read["line"]
            fault = (
                Fault.DENIED
                if bench.owner(line) != read["tenant"]
                else Fault.POISON
                if line in bench.poisoned
                else Fault.NONE
            )
            assert answer["fault"] == fault.value
            # The bench snoops a write in the cycle after it took it.
            begin = bench.clients[n].cycles[k] - LineCache.snoop_cycles - 1
            possible = {0} if fault is Fault.DENIED else bench.current(line, begin, answers.cycles[k])
            assert answer["data"] in possible, (n, k, hex(line))
    hits, misses = bench.counters()
    print(f"{hits} hits, {misses} misses")
    assert hits + misses == len(asked[0]) + len(asked[1])
    assert min(hits, misses) > 100


@cocotb.test()
async def a_hit_is_fast(dut):
    await start(dut)
    bench = Bench(dut, latency=(5, 5))
    for n in range(CACHED):
        read = {"line": 3, "tenant": 0}
        for _ in range(2):
            bench.clients[n].send([read])
            await bench.answers[n].receive()
            await cycles(dut, 3)
        latencies = [
            there - asked
            for asked, there in zip(bench.clients[n].cycles, bench.answers[n].cycles, strict=True)
        ]
        assert latencies[-1] == LineReader.hit_latency_cycles
        bench.clients[n].send([read] * 30)
        await bench.answers[n].receive(30)
        taken = bench.answers[n].cycles[-30:]
        assert taken[-1] - taken[0] == 29
    assert bench.counters() == (63, 1)


@cocotb.test()
async def a_miss_costs_little(dut):
    """`request_cycles` to the fabric, `answer_cycles` back, one line per cycle."""
    await start(dut)
    bench = Bench(dut, latency=(9, 9))
    bench.clients[2].send([{"line": n, "tenant": bench.owner(n)} for n in range(16)])
    await bench.answers[2].receive(16)
    asked, requests = bench.clients[2].cycles, bench.requests.cycles
    sent, answers = bench.responses.cycles, bench.answers[2].cycles
    assert [there - here for here, there in zip(asked, requests, strict=True)] == [
        LineReader.request_cycles
    ] * 16
    assert [there - here for here, there in zip(sent, answers, strict=True)] == [
        LineReader.answer_cycles
    ] * 16
    assert answers[-1] - answers[0] == 15


@cocotb.test()
async def another_tenant_meets_the_check(dut):
    """What one tenant may read is on chip, and another is refused all the same."""
    await start(dut)
    bench = Bench(dut, latency=(5, 5))
    bench.writes.append((3, 77))
    await cycles(dut, 10)
    for tenant, data, fault in ((0, 77, Fault.NONE), (0, 77, Fault.NONE), (1, 0, Fault.DENIED)):
        bench.clients[0].send([{"line": 3, "tenant": tenant}])
        (answer,) = await bench.answers[0].receive()
        assert (answer["data"], answer["fault"]) == (data, fault.value)
    assert bench.counters() == (1, 2)


@cocotb.test()
async def a_written_line_is_gone_in_time(dut):
    """A read `snoop_cycles` after the snoop of a write never finds the old line, whatever was under way."""
    await start(dut)
    bench = Bench(dut, latency=(12, 12))
    for delay in range(30):
        bench.clients[0].send([{"line": 3, "tenant": 0}])
        await cycles(dut, delay)
        bench.writes.append((3, delay + 1))
        await cycles(dut, 2 + LineCache.snoop_cycles)
        bench.clients[1].send([{"line": 3, "tenant": 0}])
        (answer,) = await bench.answers[1].receive()
        assert answer["data"] == delay + 1
        await bench.answers[0].receive()
