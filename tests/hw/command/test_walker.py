"""The walker against plain Python: random jobs, good and bad, with random idle, latency and backpressure."""

import copy
from collections import deque

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from nearkv_hw.abi import Opcode, Status, configure
from nearkv_hw.abi.descriptor import (
    CLAIM,
    DESCRIPTOR_VERSION,
)
from nearkv_hw.abi.memory import ENTRY, LAYOUT_VERSION, TABLE, TABLE_MAGIC
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_hw.command.cache import LineCache
from nearkv_hw.command.check import Check
from nearkv_hw.command.records import Outcome, Posted, Ticket
from nearkv_hw.command.walker import ENTRIES, READER_DEPTHS, Walker
from nearkv_hw.interfaces import (
    Bound,
    FabricRequest,
    FabricResponse,
    OwnerRequest,
    OwnerResponse,
    PageItem,
    QueryLine,
    ResultJob,
    Snoop,
    UnitJob,
)
from nearkv_sim.cocotb.payload import pack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start, value
from walker_jobs import (
    CAPACITY_BYTES,
    lines_of,
    put_entry,
    random_descriptors,
    random_job,
    random_memory,
)
from walker_reference import EXTENT_LINES, POISON, SCRUBBING, Memory, Reference, bound_of

CANDIDATES = 16


@pytest.mark.rtl
@pytest.mark.parametrize(
    "chosen",
    [
        {"channels": 2, "queries": 4},
        {"channels": 1, "queries": 1},
        {"channels": 2, "queries": 8, "placement": "rank", "ranks": 2},
    ],
    ids=str,
)
def test_walker(chosen):
    chosen = {"capacity_bytes": CAPACITY_BYTES, **chosen}
    run(
        Walker(config=configure("small", **chosen), candidates=CANDIDATES), module=__file__, parameters=chosen
    )


@pytest.mark.rtl
def test_walker_without_units():
    chosen = {"capacity_bytes": CAPACITY_BYTES, "placement": "host"}
    walker = Walker(config=configure("small", **chosen), candidates=CANDIDATES)
    run(walker, module=__file__, parameters=chosen, tests="sends_what_the_layouts_say")


def config_of_run():
    return configure("small", **parameters())


class Tap:
    """A sink that shows what it takes to another, too."""

    def __init__(self, dut, prefix, *, told, **sink):
        self._items, self._told = deque(), told
        self._sink = StreamSink(dut, prefix, deliver=self._take, **sink)
        self._edge = RisingEdge(dut.clk)

    def _take(self, item):
        self._items.append(item)
        self._told(item)

    @property
    def cycles(self):
        """When items were taken."""
        return self._sink.cycles

    def __len__(self):
        return len(self._items)

    async def receive(self, count):
        """The next items, in order."""
        while len(self._items) < count:
            await self._edge
        return [self._items.popleft() for _ in range(count)]


class BoundsOfUnit:
    """A unit's part in passes of bounds: each page of one has a bound."""

    def __init__(self, source):
        self.source, self.jobs, self.pages, self.number = source, deque(), deque(), 0

    def job(self, job):
        """A pass came."""
        self.jobs.append(job)
        self._answer()

    def page(self, page):
        """A page came, or the end of a pass."""
        self.pages.append(page)
        self._answer()

    def _answer(self):
        while self.jobs and self.pages:
            job, page = self.jobs[0], self.pages.popleft()
            if page["last"]:
                self.jobs.popleft()
                self.number = 0 if job["last"] else self.number + 1
            elif job["bounds"]:
                value = bound_of(page["k_line"], self.number)
                told = {name: job[name] for name in ("first", "last")}
                self.source.send([{"value": value, "candidate": page["index"], **told}])


class Bench:
    """The walker with its neighbours: a fabric over `memory`, owner tables, and sinks for what it sends."""

    def __init__(self, dut, config, memory, *, idle, backpressure, latency_cycles):
        self.dut, self.memory, self.config = dut, memory, config
        self.latency_cycles = latency_cycles
        self.rng = random("bench")
        self.owners_asked = 0
        self.descriptors = StreamSource(dut, "descriptors", idle=idle, shape=Posted)
        units = range(config.units)
        sink = {"backpressure": backpressure}
        bounds = [
            BoundsOfUnit(StreamSource(dut, f"bounds_{n}", idle=max(idle, 0.5), shape=Bound)) for n in units
        ]
        self.jobs = [Tap(dut, f"jobs_{n}", shape=UnitJob, told=bounds[n].job, **sink) for n in units]
        self.queries = [StreamSink(dut, f"queries_{n}", shape=QueryLine, **sink) for n in units]
        self.pages = [Tap(dut, f"pages_{n}", shape=PageItem, told=bounds[n].page, **sink) for n in units]
        self.written = []
        self.results = StreamSink(dut, "results", shape=ResultJob, **sink)
        self.tickets = StreamSink(dut, "tickets", shape=Ticket, **sink)
        self.query_outcomes = StreamSink(dut, "query_outcomes", shape=Outcome, **sink)
        self.page_outcomes = StreamSink(dut, "page_outcomes", shape=Outcome, **sink)
        self.requests = StreamSink(dut, "fabric_request", shape=FabricRequest, **sink)
        self.responses = StreamSource(dut, "fabric_response", shape=FabricResponse)
        for n in range(config.slices):
            getattr(dut, f"snoops_{n}").value = 0
        dut.flush.value = 0
        for n in range(config.apertures):
            getattr(dut, f"quotas_{n}").value = memory.quotas[n]
        cocotb.start_soon(self.serve_fabric())
        for n in range(config.slices):
            asked = StreamSink(dut, f"owners_{n}_request", shape=OwnerRequest, **sink)
            answers = StreamSource(dut, f"owners_{n}_response", idle=idle, shape=OwnerResponse)
            cocotb.start_soon(self.serve_owner(n, asked, answers))

    async def serve_fabric(self):
        """Answers keep their order within a slice and none between slices."""
        waiting = [deque() for _ in range(self.config.slices)]
        edge = RisingEdge(self.dut.clk)
        now = 0
        while True:
            await edge
            now += 1
            for request in await self.requests.receive(len(self.requests)):
                slice_number = request["line"] // EXTENT_LINES % self.config.slices
                due = now + self.rng.randint(*self.latency_cycles)
                waiting[slice_number].append((due, request))
            for queue in self.rng.sample(waiting, len(waiting)):
                if queue and queue[0][0] <= now:
                    request = queue.popleft()[1]
                    data, fault = self.memory.read(request["line"], request["tenant"])
                    answer = {"id": request["id"], "data": data, "fault": fault}
                    if request["write"]:
                        assert request["enable"] == (1 << 64) - 1
                        assert not request["poison"]
                        self.written.append((request["line"], request["tenant"], request["data"]))
                        answer |= {"write": 1, "data": 0, "fault": 0 if fault == POISON else fault}
                    self.responses.send([answer])

    async def serve_owner(self, slice_number, asked, answers):
        while True:
            (request,) = await asked.receive()
            self.owners_asked += 1
            extent = request["extent"] * self.config.slices + slice_number
            owner = self.memory.owners.get(extent)
            busy = owner == SCRUBBING
            told = {"owned": owner is not None and not busy, "tenant": (owner or 0) & 7, "scrubbing": busy}
            answers.send([told])
            assert not (request["claim"] and request["release"])
            if request["claim"] and owner is None:
                self.memory.owners[extent] = request["tenant"]
            if request["release"] and owner == request["tenant"]:
                self.memory.owners[extent] = SCRUBBING

    async def retire(self, tickets):
        """Acknowledge tickets as the completer would: when the outcomes of their passes are there."""
        for expected in tickets:
            (ticket,) = await self.tickets.receive()
            assert ticket == expected, f"{ticket} instead of {expected}"
            for _ in range(ticket["passes"] << ticket["bounds"]):
                self.seen_queries.append((await self.query_outcomes.receive())[0])
                self.seen_pages.append((await self.page_outcomes.receive())[0])
            await cycles(self.dut, self.rng.randrange(5))
            self.dut.retired.value = 1
            await cycles(self.dut, 1)
            self.dut.retired.value = 0

    async def check(self, posted):
        """Post descriptors and compare everything that leaves the walker."""
        self.memory.holdings.update(enumerate(self.holdings()))
        reference = Reference(self.config, copy.deepcopy(self.memory), CANDIDATES)
        for item in posted:
            reference.take(item)
        sent = reference.sent
        self.seen_queries, self.seen_pages = [], []
        self.descriptors.send(posted)
        await self.retire(sent.tickets)
        assert self.seen_queries == sent.query_outcomes
        assert self.seen_pages == sent.page_outcomes
        for n in range(self.config.units):
            assert await self.jobs[n].receive(len(sent.jobs[n])) == sent.jobs[n]
            assert await self.queries[n].receive(len(sent.queries[n])) == sent.queries[n]
            for item, expected in zip(
                await self.pages[n].receive(len(sent.pages[n])), sent.pages[n], strict=True
            ):
                assert {name: item[name] for name in expected} == expected
        assert await self.results.receive(len(sent.results)) == sent.results
        await cycles(self.dut, 50)
        assert sorted(self.written) == sorted(sent.written)
        self.written.clear()
        left = [*self.jobs, *self.queries, *self.pages, self.results, self.query_outcomes, self.page_outcomes]
        assert not any(len(sink) for sink in left)
        assert self.memory.owners == reference.memory.owners
        assert self.holdings() == [reference.memory.holdings[n] for n in range(self.config.apertures)]
        return sent

    def holdings(self):
        """Extents that each tenant has claimed."""
        return [value(getattr(self.dut, f"holdings_{n}")) for n in range(self.config.apertures)]


@cocotb.test()
async def sends_what_the_layouts_say(dut):
    config, rng = config_of_run(), random("scenario")
    memory = random_memory(config, rng)
    memory.quotas[1] = 4
    dut.retired.value = 0
    await start(dut)
    bench = Bench(dut, config, memory, idle=0.3, backpressure=0.4, latency_cycles=(2, 60))
    await bench.check(random_descriptors(memory, config, rng, 150))


@cocotb.test()
async def sends_one_page_per_cycle(dut):
    """A long table of small pages, nothing in the way: a page per cycle, all units together."""
    config, rng = config_of_run(), random("pages")
    memory = Memory(config, owners=dict.fromkeys(range(config.extents), 0))
    await start(dut)
    bench = Bench(dut, config, memory, idle=0, backpressure=0, latency_cycles=(40, 40))
    job = random_job(memory, config, rng, 0)
    entries = 256
    table = job["table"] // 64
    job.update(row_begin=0, row_end=4 * entries, page_rows_log2=2, kv_head=0, group=1)
    job.update(head_dim=32, value_dim=32, k_format=0, v_format=0, flags=0, query_rows=1)
    memory.lines[table] = TABLE.pack(
        magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=1, entries=entries, committed_rows=4 * entries
    )
    for n in range(entries):
        put_entry(memory, table + 1, n, ENTRY.pack(valid=1, line=n * EXTENT_LINES % (CAPACITY_BYTES // 64)))
    await bench.check([{"tenant": 0, "index": 0, "fetched": 0, **lines_of(job, rng)}])
    taken = sorted(cycle for sink in bench.pages for cycle in sink.cycles)
    assert taken[-1] - taken[0] <= entries + 2, taken


def small_job(memory, config, rng, *, entries, committed_rows):
    """A good job of pages of 4 rows, one line of K and one of V each; its table starts in line 0."""
    job = random_job(memory, config, rng, 0)
    job.update(page_rows_log2=2, kv_head=0, group=1)
    job.update(head_dim=32, value_dim=32, k_format=0, v_format=0, query_rows=1)
    job.update(row_begin=0, row_end=committed_rows, table=0, queries=EXTENT_LINES * 64, flags=0)
    memory.lines.clear()
    memory.lines[0] = TABLE.pack(
        magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=1, entries=entries, committed_rows=committed_rows
    )
    return job


async def quiet_bench(dut, latency_cycles):
    """Memory that is all tenant 0's, with a fixed latency, and nothing in the way."""
    config = config_of_run()
    memory = Memory(config, owners=dict.fromkeys(range(config.extents), 0))
    await start(dut)
    spread = (latency_cycles, latency_cycles)
    return Bench(dut, config, memory, idle=0, backpressure=0, latency_cycles=spread), memory


async def flush(dut):
    dut.flush.value = 1
    await cycles(dut, 1)
    dut.flush.value = 0


def first_page(bench):
    """Cycles from the offer of the last descriptor to the first of its pages that any unit was offered."""
    posted = bench.descriptors.cycles[-1] - (
        Check.interval_cycles - 1
    )  # it is taken when its check has ended
    return min(cycle for sink in bench.pages for cycle in sink.cycles if cycle > posted) - posted


@cocotb.test()
async def first_page_comes_soon(dut):
    """With the table on chip the walker's own cycles; without it two reads of memory come on top."""
    latency = 40
    bench, memory = await quiet_bench(dut, latency)
    rng = random("first page")
    job = small_job(memory, bench.config, rng, entries=4, committed_rows=16)
    for n in range(4):
        put_entry(memory, 1, n, ENTRY.pack(valid=1, line=n * EXTENT_LINES))
    posted = {"tenant": 0, "index": 0, "fetched": 0, **lines_of(job, rng)}
    await bench.check([posted])
    asked, answered = bench.requests.cycles, bench.responses.cycles
    served = answered[0] - asked[0] + answered[1] - asked[1]
    assert 2 * latency <= served <= 2 * latency + 6
    assert first_page(bench) == Walker.first_page_cycles + served + 2 * Walker.miss_cycles
    assert (int(dut.table_hits.value), int(dut.table_misses.value)) == (0, 2)
    await bench.check([posted])
    assert first_page(bench) == Walker.first_page_cycles <= 18
    assert (int(dut.table_hits.value), int(dut.table_misses.value)) == (2, 2)
    await flush(dut)
    await bench.check([posted])
    assert (int(dut.table_hits.value), int(dut.table_misses.value)) == (2, 4)


@cocotb.test()
async def a_release_takes_tables_off_the_chip(dut):
    """A table that was kept on chip is refused to who has given its extent back."""
    bench, memory = await quiet_bench(dut, 10)
    rng = random("released")
    job = small_job(memory, bench.config, rng, entries=4, committed_rows=16)
    for n in range(4):
        put_entry(memory, 1, n, ENTRY.pack(valid=1, line=n * EXTENT_LINES))
    posted = {"tenant": 0, "index": 0, "fetched": 0, **lines_of(job, rng)}
    release = CLAIM.pack(version=DESCRIPTOR_VERSION, opcode=Opcode.RELEASE_EXTENTS, extent_count=1)
    await bench.check([posted])
    await bench.check([posted])
    assert int(dut.table_hits.value) == 2
    sent = await bench.check([{**posted, "line": release}, posted])
    assert [ticket["status"] for ticket in sent.tickets] == [Status.OK, Status.DENIED]
    assert int(dut.table_hits.value) == 2


@cocotb.test()
async def sees_what_was_written(dut):
    """After a write of the header or of an entry, and nothing but its snoop, the new table is walked."""
    bench, memory = await quiet_bench(dut, 10)
    rng = random("written")
    job = small_job(memory, bench.config, rng, entries=8, committed_rows=32)
    posted = {"tenant": 0, "index": 0, "fetched": 0, **lines_of(job, rng)}
    for turn in range(40):
        line = rng.choice([0, 1])
        if line:
            put_entry(memory, 1, rng.randrange(8), ENTRY.pack(valid=1, line=rng.randrange(1 << 14)))
        else:
            rows = rng.choice([31, 32, 40])
            memory.lines[0] = TABLE.pack(
                magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=1, entries=8, committed_rows=rows
            )
        for n in range(bench.config.slices):
            other = rng.randrange(1 << 14, 1 << 20)
            seen = n == turn % bench.config.slices
            getattr(dut, f"snoops_{n}").value = pack(Snoop, {"valid": 1, "line": line if seen else other})
        await cycles(dut, 1)
        for n in range(bench.config.slices):
            getattr(dut, f"snoops_{n}").value = 0
        await cycles(dut, LineCache.snoop_cycles)
        await bench.check([posted])
    hits, misses = int(dut.table_hits.value), int(dut.table_misses.value)
    assert hits > 20, (hits, misses)
    assert misses < 60, (hits, misses)


@cocotb.test()
async def a_lying_table_ends_at_once(dut):
    """Two million entries, of which one is at fault: the walk ends there, and reads little more."""
    bench, memory = await quiet_bench(dut, 40)
    rng = random("lies")
    for bad_page in (0, 1, 7, 8, 40, 100):
        job = small_job(memory, bench.config, rng, entries=1 << 21, committed_rows=MAX_ROWS)
        job.update(group=3 * bench.config.queries)
        for n in range(bad_page):
            put_entry(memory, 1, n, ENTRY.pack(valid=1, line=n * 8))
        posted = {"tenant": 0, "index": 0, "fetched": 0, **lines_of(job, rng)}
        await flush(dut)
        asked = len(bench.requests.cycles)
        sent = await bench.check([posted, posted])
        took = max(bench.page_outcomes.cycles) - bench.descriptors.cycles[-2]
        print(f"fault in page {bad_page}: {took} cycles, {len(bench.requests.cycles) - asked} lines read")
        assert {outcome["page"] for outcome in sent.page_outcomes} == {bad_page}
        assert took < 400 + 6 * bad_page
        # Headers, queries, and for each pass the lines up to the fault, those under way, and one more.
        of_pass = bad_page // 8 + 1 + READER_DEPTHS[ENTRIES] + 1
        assert len(bench.requests.cycles) - asked <= 2 * (1 + job["group"]) + 6 * of_pass


@cocotb.test()
async def claims_wait_for_what_is_before(dut):
    """A claim waits for the job ahead of it, and what follows waits for the claim."""
    config, rng = config_of_run(), random("fence")
    memory = Memory(config, owners=dict.fromkeys(range(config.extents - 1), 0))
    await start(dut)
    bench = Bench(dut, config, memory, idle=0, backpressure=0, latency_cycles=(5, 5))
    job = lines_of(random_job(memory, config, rng, 0), rng)
    claim = CLAIM.pack(
        version=DESCRIPTOR_VERSION,
        opcode=Opcode.CLAIM_EXTENTS,
        first_extent=config.extents - 1,
        extent_count=1,
    )
    posted = {"tenant": 0, "index": 0, "fetched": 0}
    bench.descriptors.send([{**posted, **lines} for lines in (job, {"line": claim, "extension": 0}, job)])
    for tickets, asked in ((1, 0), (2, 2), (3, 2)):
        await cycles(dut, 1000)
        assert (len(bench.tickets.cycles), bench.owners_asked) == (tickets, asked)
        dut.retired.value = 1
        await cycles(dut, 1)
        dut.retired.value = 0
