"""The walker against plain Python: random jobs, good and bad, with random idle, latency and backpressure."""

import copy
from collections import deque

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from nearkv_hw.abi import Opcode, configure
from nearkv_hw.abi.descriptor import (
    ATTEND,
    CLAIM,
    DESCRIPTOR_VERSION,
    EXTENSION,
    FLAG_EXTENDED,
    FLAG_SINKS,
    OPTION_ALIBI,
    OPTION_CAUSAL,
    OPTION_CODEBOOK,
    OPTION_LATENT,
    OPTION_RANGES,
    OPTION_SELECT,
    OPTION_SUMMARIES,
    OPTION_TREE,
    RANGE,
)
from nearkv_hw.abi.memory import ENTRY, LAYOUT_VERSION, TABLE, TABLE_MAGIC, RowLayout, table_entry_lines
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_hw.abi.rows import Stored
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
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start
from walker_reference import EXTENT_LINES, POISON, Memory, Reference, bound_of

CAPACITY_BYTES = 64 << 20
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
            answers.send([{"owned": owner is not None, "tenant": owner or 0}])
            if request["claim"] and owner is None:
                self.memory.owners[extent] = request["tenant"]

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
        return sent


def random_memory(config, rng):
    """A memory in which tenant 0 owns most extents, tenant 1 and nobody the rest."""
    owners = rng.choices([0, 1, None], [6, 2, 1], k=config.extents)
    owners[:2] = 0, 1
    return Memory(config, owners={n: owner for n, owner in enumerate(owners) if owner is not None})


def owned_line(memory, tenant, rng, lines=1):
    """The first of some lines within an extent of the tenant, often the extent's last ones."""
    extent = rng.choice([n for n, owner in memory.owners.items() if owner == tenant])
    last = EXTENT_LINES - lines
    return extent * EXTENT_LINES + rng.choice([rng.randint(0, last), rng.randint(0, last), last])


def random_job(memory, config, rng, tenant):
    """A good attention job: its descriptor's fields, and its table, queries and sinks in memory."""
    head_dim, value_dim = (rng.choice([1, 8, 16, 31, 32, 33, 64, 128, 129, 256, 576, 1023]) for _ in range(2))
    log2 = rng.choice([2, 2, 3, 4, 6])
    entries = rng.choice([1, 3, 8, 9, 30])
    rows = rng.randint(0, entries << log2)
    end = rng.randint(0, rows)
    begin = rng.choice([0, rng.randint(0, end), end])
    heads = rng.randint(1, 3)
    kv_head = rng.randrange(heads)
    group = rng.choice([1, 2, 3, 4, 5, 8, 16, 17])
    entry_lines = table_entry_lines(entries)
    table = owned_line(memory, tenant, rng, 1 + heads * entry_lines)
    query_rows = rng.choice([1, 1, 2, 5])
    queries = owned_line(memory, tenant, rng, group * query_rows * 32)
    sinks, slopes, books, ranges, tree, selected = (owned_line(memory, tenant, rng, 8) for _ in range(6))
    options = rng.choice([0, OPTION_CAUSAL]) | rng.choice([0, OPTION_ALIBI]) | rng.choice([0, OPTION_RANGES])
    options |= rng.choice([0, OPTION_TREE]) if query_rows <= end else 0
    options |= rng.choice([0, 0, OPTION_SUMMARIES, OPTION_SUMMARIES | OPTION_SELECT])
    options &= ~OPTION_TREE if options & OPTION_SELECT else -1
    window = rng.choice([0, rng.randint(1, (1 << 24) - 1), rng.randint(1, 30), rng.randint(1, 4)])
    positioned = (options & (OPTION_CAUSAL | OPTION_ALIBI) or window) and not options & OPTION_TREE
    edges = sorted(rng.sample(range(begin, end + 1), rng.randrange(min(end - begin + 1, 40)) // 2 * 2))
    pairs = list(zip(edges[::2], edges[1::2], strict=True)) if options & OPTION_RANGES else []
    sight = {
        "options": options,
        "window": window,
        "kept": rng.choice([rng.randrange(1 << 24), rng.randrange(9), rng.randrange(rows + 1)])
        if window
        else 0,
        "first_position": rng.choice(
            [rng.randrange(-(1 << 23), 1 << 23), rng.randrange(-9, rows + 9), end - query_rows]
        )
        if positioned
        else 0,
        "slopes": slopes if options & OPTION_ALIBI else 0,
        "ranges": ranges if options & OPTION_RANGES else 0,
        "range_count": len(pairs),
        "tree": tree if options & OPTION_TREE else 0,
        "select_pages": rng.choice([1, 2, 5, 1 << 20]) if options & OPTION_SELECT else 0,
        "selected": selected if options & OPTION_SELECT else 0,
    }
    memory.lines[table] = TABLE.pack(
        magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=heads, entries=entries, committed_rows=rows
    )
    how = {
        rows: {"element": rng.choice([0, 1, *range(8)]), "scale": 0, "block": 0, "pitch": 0} for rows in "kv"
    }
    for own, dim in zip(how.values(), (head_dim, value_dim), strict=True):
        if own["element"] > 1 and rng.random() < 0.7:
            own |= {"scale": rng.randint(3 if own["element"] == 7 else 1, 4), "block": rng.randrange(5)}
        if rng.random() < 0.7:
            own["pitch"] = Stored.of(**{**own, "pitch": 1}).pitch_code(dim)
    latent = value_dim <= head_dim and rng.random() < 0.3
    if latent:
        how["v"] = {"element": 0, "scale": 0, "block": 0, "pitch": 0}
    layout = RowLayout(
        head_dim,
        value_dim,
        1 << log2,
        *(Stored.of(**own) for own in how.values()),
        latent=latent,
        summaries=True,
    )
    if rng.random() < 0.5:
        sight, query_rows = dict.fromkeys(sight, 0), 1
    sight["options"] |= OPTION_LATENT if latent else 0
    sight["codebooks"] = 0
    if any(own["element"] == 7 for own in how.values()):
        sight["options"] |= OPTION_CODEBOOK
        sight["codebooks"] = books
        memory.lines[books] = rng.getrandbits(512)
    extended = (
        any(sight.values())
        or query_rows > 1
        or any(own["scale"] or own["pitch"] for own in how.values())
        or rng.random() < 0.2
    )
    for n in range(entry_lines * 8):
        line = owned_line(memory, tenant, rng, layout.page_lines)
        put_entry(memory, table + 1 + kv_head * entry_lines, n, ENTRY.pack(valid=1, line=line))
    for n, (first, behind) in enumerate(pairs):
        put_entry(memory, ranges, n, RANGE.pack(begin=first, end=behind))
    for n in range(16):
        # most slopes are numbers, most positions within what is allowed
        slope = rng.getrandbits(32) & ~(1 << 30 if rng.random() < 0.99 else 0)
        position = rng.getrandbits(23 if rng.random() < 0.98 else 32)
        for first, bits in ((slopes, slope), (tree, position)):
            line = memory.lines.get(first, 0)
            memory.lines[first] = line & ~(0xFFFFFFFF << 32 * n) | bits << 32 * n
    lists = (*range(sinks, sinks + 8), *range(slopes + 1, slopes + 8), *range(tree + 1, tree + 8))
    for line in (*range(queries, queries + group * query_rows * 32), *lists):
        memory.lines[line] = rng.getrandbits(512)
    return {
        "version": DESCRIPTOR_VERSION,
        "opcode": int(Opcode.ATTEND),
        "flags": rng.choice([0, FLAG_SINKS]) | (FLAG_EXTENDED if extended else 0),
        "tag": rng.getrandbits(32),
        "table": table * 64,
        "queries": queries * 64,
        "result": rng.randrange(config.capacity_bytes // 64) * 64,
        "sinks": sinks * 64,
        "row_begin": begin,
        "row_end": end,
        "score_factor": rng.getrandbits(32) & ~(1 << 30),
        "output_scale": rng.choice([0, rng.getrandbits(32)]),
        "head_dim": head_dim,
        "value_dim": value_dim,
        "group": group,
        "query_rows": query_rows,
        "page_rows_log2": log2,
        "k_format": how["k"]["element"],
        "v_format": how["v"]["element"],
        "query_format": rng.randrange(2),
        "output_form": rng.randrange(4),
        "kv_head": kv_head,
        "extension": {
            f"{rows}_{what}": own[what] for rows, own in how.items() for what in ("scale", "block", "pitch")
        }
        | sight
        | {"softcap": rng.choice([0, rng.randint(1, 0x44800000)])},
    }


def put_entry(memory, first_line, n, bits):
    line = first_line + n // 8
    shift = n % 8 * 64
    memory.lines[line] = memory.lines.get(line, 0) & ~((1 << 64) - 1 << shift) | bits << shift


def spoil(job, memory, rng, tenant):
    """Make one thing of a good job bad, somewhere."""
    table = job["table"] // 64
    first = table + 1 + job["kv_head"] * table_entry_lines(TABLE.unpack(memory.lines[table])["entries"])
    page = rng.randrange(
        job["row_begin"] >> job["page_rows_log2"], (job["row_end"] >> job["page_rows_log2"]) + 1
    )
    foreign = owned_line(memory, 1 - tenant, rng, 16)
    edge = owned_line(memory, tenant, rng) // EXTENT_LINES * EXTENT_LINES + EXTENT_LINES - 1
    header = TABLE.unpack(memory.lines[table])

    def change_header(**fields):
        memory.lines[table] = TABLE.pack({**header, **fields})

    choices = [
        lambda: job.update(version=1),
        lambda: job.update(opcode=rng.randint(3, 255)),
        lambda: job.update(flags=1 << rng.choice([2, 15])),
        lambda: extend(job, options=1 << rng.choice([3, 4, *range(8, 16)])),
        lambda: extend(job, **{rng.choice(["ranges", "range_count", "tree"]): rng.randint(1, 99)}),
        lambda: extend(job, options=OPTION_RANGES, range_count=20, ranges=rng.choice([1 << 45, foreign])),
        lambda: extend(job, options=OPTION_RANGES, range_count=rng.choice([1, 9, 100])),
        lambda: extend(job, options=OPTION_TREE, tree=rng.choice([1 << 45, foreign])),
        lambda: extend(job, options=OPTION_TREE) or job.update(query_rows=job["row_end"] % 255 + 1),
        lambda: spoil_range(job, memory, rng),
        lambda: memory.poisoned.add(job["extension"][rng.choice(["ranges", "tree", "slopes"])]),
        lambda: extend(job, options=OPTION_LATENT, v_block=1),
        lambda: extend(job, options=OPTION_LATENT) or job.update(head_dim=31, value_dim=33, v_format=0),
        lambda: extend(job, options=0, codebooks=1),
        lambda: extend(job, options=OPTION_CODEBOOK) or job.update(k_format=0, v_format=0),
        lambda: extend(job, options=0, codebooks=0, slopes=0) or job.update(k_format=7),
        lambda: (
            extend(job, options=OPTION_CODEBOOK, codebooks=CAPACITY_BYTES // 64) or job.update(k_format=7)
        ),
        lambda: extend(job, options=OPTION_CODEBOOK, codebooks=foreign) or job.update(k_format=7),
        lambda: extend(job, **{rng.choice(["select_pages", "selected", "reserved_tree"]): 1}),
        lambda: extend(job, options=rng.choice([OPTION_SELECT, OPTION_SELECT | OPTION_SUMMARIES])),
        lambda: extend(job, options=OPTION_SELECT | OPTION_SUMMARIES | OPTION_TREE, select_pages=1),
        lambda: select(job, select_pages=0),
        lambda: select(job, selected=foreign),
        lambda: select(job, selected=CAPACITY_BYTES // 64),
        lambda: select(job, selected=CAPACITY_BYTES // 64 - 1),
        lambda: extend(job, kept=1, window=0),
        lambda: extend(job, options=0, window=0, kept=0, slopes=0, first_position=rng.choice([1, -1])),
        lambda: extend(job, options=OPTION_CAUSAL, slopes=1),
        lambda: extend(job, options=OPTION_ALIBI, slopes=rng.choice([CAPACITY_BYTES // 64, foreign])),
        lambda: extend(job, softcap=rng.randint(0x44800001, (1 << 32) - 1)),
        lambda: extend(job, **{rng.choice(["k_scale", "v_scale"]): rng.randint(5, 7)}),
        lambda: extend(job, **{rng.choice(["k_block", "v_block"]): rng.randint(5, 7)}),
        lambda: extend(job, **{rng.choice(["k_pitch", "v_pitch"]): rng.randint(1, 3)}),
        lambda: extend(job, k_scale=1, k_block=0) or job.update(k_format=rng.randrange(2)),
        lambda: extend(job, v_scale=0, v_block=1),
        lambda: job.update({rng.choice(["head_dim", "value_dim"]): 0}),
        lambda: job.update(group=rng.choice([0, 129, 255])),
        lambda: job.update(query_rows=0),
        lambda: job.update(query_rows=2, flags=job["flags"] & ~FLAG_EXTENDED),
        lambda: job.update(page_rows_log2=rng.choice([0, 1, 14, 15])),
        lambda: job.update({rng.choice(["k_format", "v_format"]): rng.randint(8, 15)}),
        lambda: job.update({rng.choice(["query_format"]): rng.randint(2, 3)}),
        lambda: job.update(output_form=rng.randint(4, 7)),
        lambda: job.update(score_factor=0x7F800000 | rng.getrandbits(23) | rng.getrandbits(1) << 31),
        lambda: job.update(
            {rng.choice(["table", "queries", "result"]): rng.choice([1, 32, CAPACITY_BYTES, 1 << 63])}
        ),
        lambda: job.update(flags=FLAG_SINKS, sinks=CAPACITY_BYTES + 64),
        lambda: job.update({rng.choice(["table", "queries"]): foreign * 64}),
        lambda: job.update(flags=FLAG_SINKS, sinks=foreign * 64),
        lambda: change_header(magic=header["magic"] ^ 1 << rng.randrange(32)),
        lambda: change_header(version=1),
        lambda: job.update(kv_head=min(header["heads"], 2047)),  # another job may have written the header
        lambda: change_header(heads=2047, entries=(1 << 32) - 1) or job.update(kv_head=2046),
        lambda: job.update(row_begin=job["row_end"] + 1),
        lambda: change_header(committed_rows=max(job["row_end"] - 1, 0)),
        lambda: change_header(committed_rows=(1 << 32) - 1) or job.update(row_end=(1 << 32) - 1),
        lambda: change_header(committed_rows=1 << 31, entries=1 << 31) or job.update(row_end=1 << 23),
        lambda: put_entry(memory, first, page, ENTRY.pack(line=foreign)),
        lambda: put_entry(memory, first, page, 1 | 1 << rng.choice([1, 5, 52, 63])),
        lambda: put_entry(memory, first, page, ENTRY.pack(valid=1, line=edge)),
        lambda: put_entry(memory, first, page, ENTRY.pack(valid=1, line=CAPACITY_BYTES // 64)),
        lambda: put_entry(memory, first, page, ENTRY.pack(valid=1, line=1 << 45)),
        lambda: memory.poisoned.add(rng.choice([table, first + page // 8])),
        lambda: memory.poisoned.add(job["queries"] // 64 + rng.randrange(8)),
        lambda: memory.poisoned.add(job["sinks"] // 64),
    ]
    rng.choice(choices)()


def spoil_range(job, memory, rng):
    """Ranges that are empty, out of order, or beyond the job's rows."""
    count = job["extension"]["range_count"]
    if count:
        n = rng.randrange(count)
        begin = rng.choice([0, job["row_end"], rng.getrandbits(32)])
        bits = RANGE.pack(begin=begin, end=rng.choice([begin, job["row_end"] + 1, rng.getrandbits(32)]))
        put_entry(memory, job["extension"]["ranges"], n, bits)


def select(job, **fields):
    """Make it a job that selects pages, if it is not."""
    options = (job["extension"]["options"] & ~OPTION_TREE) | OPTION_SELECT | OPTION_SUMMARIES
    extend(job, tree=0, options=options, **({"select_pages": 3} | fields))


def extend(job, **fields):
    job["flags"] |= FLAG_EXTENDED
    job["extension"].update(fields)


def random_descriptors(memory, config, rng, count):
    """Posted descriptors of two tenants: good jobs, spoilt jobs, claims, fences and noise."""
    posted = []
    for index in range(count):
        tenant = rng.choices([0, 1], [3, 1])[0]
        kind = rng.choices(["job", "spoilt", "claim", "nop", "noise"], [10, 10, 2, 1, 2])[0]
        if kind in ("job", "spoilt"):
            job = random_job(memory, config, rng, tenant)
            if kind == "spoilt":
                spoil(job, memory, rng, tenant)
            lines = lines_of(job, rng)
        elif kind == "claim":
            line = CLAIM.pack(
                version=DESCRIPTOR_VERSION,
                opcode=Opcode.CLAIM_EXTENTS,
                tag=index,
                flags=rng.choices([0, 2], [5, 1])[0],
                first_extent=rng.choice([rng.randrange(config.extents), (1 << 32) - 1]),
                extent_count=rng.choice([0, 1, 2, 3, config.extents]),
            )
        elif kind == "nop":
            line = 1 | rng.choice([0, 0, 1 << 300]) | index << 32
        else:
            line = rng.getrandbits(512) & ~0xFFFF | 1 | rng.randrange(3) << 8
        if kind not in ("job", "spoilt"):
            lines = {"line": line, "extension": rng.getrandbits(512)}
        posted.append({"tenant": tenant, "index": index, "fetched": rng.getrandbits(32), **lines})
    return posted


def lines_of(job, rng):
    """A job's two lines; the second is anything where the first does not say that it is there."""
    line = ATTEND.pack({name: value for name, value in job.items() if name != "extension"})
    extended = job["flags"] & FLAG_EXTENDED
    return {
        "line": line,
        "extension": EXTENSION.pack(job["extension"]) if extended else rng.getrandbits(512),
    }


@cocotb.test()
async def sends_what_the_layouts_say(dut):
    config, rng = config_of_run(), random("scenario")
    memory = random_memory(config, rng)
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
