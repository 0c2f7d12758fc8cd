"""Every block of the command path takes the cycles that it says, and as many per item as it says."""

from amaranth.hdl import Value
from amaranth.sim import Simulator
from nearkv_hw.abi import Opcode, Status, configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND, CLAIM, DESCRIPTOR_VERSION, NOP
from nearkv_hw.abi.memory import ENTRY, LAYOUT_VERSION, TABLE, TABLE_MAGIC
from nearkv_hw.abi.window import IDENTITY_LINE, MAGIC
from nearkv_hw.command.admit import Admit
from nearkv_hw.command.check import Check
from nearkv_hw.command.pages import PageFeed
from nearkv_hw.command.passes import Passes
from nearkv_hw.command.plan import Planner
from nearkv_hw.command.queries import QueryFeed
from nearkv_hw.command.ranges import Ranges
from nearkv_hw.command.reader import RunIssue
from nearkv_hw.command.records import (
    Checked,
    PageWork,
    Plan,
    Planned,
    Posted,
    QueryWork,
    RangeWork,
    Run,
    WalkLine,
)
from nearkv_hw.command.registers import Registers
from nearkv_sim.cocotb.payload import pack

EXTENT_LINES = EXTENT_BYTES // 64
JOB = ATTEND.pack(
    version=DESCRIPTOR_VERSION,
    opcode=Opcode.ATTEND,
    row_end=8,
    head_dim=32,
    value_dim=32,
    group=4,
    query_rows=1,
    page_rows_log2=2,
)
HEADER = TABLE.pack(magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=1, entries=8, committed_rows=8)


def transfers(block, sources, sinks, *, inputs=(), cycles=40):
    """Offer items from the first cycle on and take everything; for each stream the cycles of its transfers.

    `sources` maps streams to the items that are offered, `sinks` are streams; each is named by its member.
    """
    ports = {name: _member(block, name) for name in (*sources, *sinks)}
    seen = {name: [] for name in ports}

    async def bench(ctx):
        for signal, value in inputs:
            ctx.set(signal, value)
        for name in sinks:
            ctx.set(ports[name].ready, 1)
        for now in range(cycles):
            for name, items in sources.items():
                offered = len(seen[name]) < len(items)
                ctx.set(ports[name].valid, offered)
                if offered:
                    ctx.set(Value.cast(ports[name].payload), items[len(seen[name])])
            for name, port in ports.items():
                if ctx.get(port.valid) and ctx.get(port.ready):
                    seen[name].append(now)
            await ctx.tick()

    simulator = Simulator(block)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return seen


def _member(block, name):
    name, *index = name.split("/")
    member = getattr(block, name)
    return member[int(index[0])] if index else member


def test_check():
    """A job is judged in a cycle; jobs follow each other at `interval_cycles`, NOP and claim in one more."""
    block = Check(capacity_lines=1 << 20, units=2)
    nop = NOP.pack(version=DESCRIPTOR_VERSION)
    claim = CLAIM.pack(version=DESCRIPTOR_VERSION, opcode=Opcode.CLAIM_EXTENTS, extent_count=1)
    posted = [pack(Posted, {"line": line}) for line in (JOB, JOB, 0, JOB, nop, claim, JOB)]
    seen = transfers(block, {"i": posted}, ["o", "tables"], inputs=[(block.idle, 1)])
    gaps = [later - earlier for earlier, later in zip(seen["o"], seen["o"][1:], strict=False)]
    assert seen["o"][0] == Check.latency_cycles
    assert gaps == [Check.interval_cycles] * 4 + [Check.interval_cycles + 1] * 2
    assert seen["tables"] == [seen["o"][n] for n in (0, 1, 3, 6)]


def test_planner():
    seen = transfers(Planner(), {"i": [pack(Checked, {"attends": 1})] * 10}, ["o"])
    assert seen["i"] == list(range(10))
    assert seen["o"] == [cycle + Planner.latency_cycles for cycle in range(10)]


def test_planner_holds_six():
    seen = transfers(Planner(), {"i": [pack(Checked, {"attends": 1})] * 10}, [])
    assert len(seen["i"]) == 6


def test_admit():
    planned = {"attends": 1, "row_end": 8, "last_page": 1, "plan": {"group": 4, "queries": 4}}
    descriptors = [pack(Planned, planned), pack(Planned, {"ticket": {"status": Status.BAD_FLAGS.value}})] * 3
    headers = [pack(WalkLine, {"data": HEADER})] * 3
    seen = transfers(Admit(queries=4), {"i": descriptors, "tables": headers}, ["jobs", "tickets"])
    first, interval = Admit.latency_cycles, Admit.interval_cycles
    assert seen["tickets"] == [first + n * interval for n in range(6)]
    assert seen["jobs"] == seen["tickets"][::2]


def test_passes():
    plans = [pack(Plan, {"group": 12, "queries": 12, "query_lines": 1, "result_lines": 2})] * 2
    seen = transfers(Passes(queries=4), {"i": plans}, ["o"])
    assert seen["o"][:3] == [Passes.latency_cycles + n * Passes.interval_cycles for n in range(3)]
    assert seen["o"][3] - seen["i"][0] == 1 + Passes.latency_cycles


def test_ranges():
    """A piece in two cycles, without a list `latency_cycles` after its pass."""
    passes = [pack(RangeWork, {"end": 8, "tail_end": 8, "pages": {"page_rows_log2": 2}})] * 4
    seen = transfers(Ranges(), {"i": passes}, ["o", "runs", "reads"])
    assert seen["o"] == seen["runs"] == [Ranges.latency_cycles + 2 * n for n in range(4)]
    assert not seen["reads"]


def test_query_feed():
    work = [pack(QueryWork, {"lines": 4}), pack(QueryWork, {"lines": 4})]
    lines = [pack(WalkLine, {"data": n}) for n in range(8)]
    block = QueryFeed(units=2)
    seen = transfers(block, {"i": work, "lines": lines}, ["o/0", "o/1", "outcomes"])
    assert seen["o/0"] == seen["o/1"] == [cycle + QueryFeed.latency_cycles for cycle in seen["lines"]]
    assert seen["lines"][3] - seen["lines"][0] == 3
    assert seen["lines"][4] - seen["lines"][3] == 3  # two cycles between passes


def test_page_feed():
    """One entry per cycle, `latency_cycles` from the line to its first page."""
    work = {"last": 1, "last_page": 15, "last_end": 4, "page_rows": 4, "page_lines": 8}
    entries = sum(ENTRY.pack(valid=1, line=n * EXTENT_LINES) << 64 * n for n in range(8))
    lines = [pack(WalkLine, {"data": entries, "last": n % 2}) for n in range(4)]
    runs = [pack(Run, {"count": 2})] * 2
    block = PageFeed(units=2, capacity_lines=1 << 20, pages_ahead=4, lines_ahead=16)
    sinks = ["o/0", "o/1", "reads", "outcomes"]
    seen = transfers(block, {"i": [pack(PageWork, work)] * 2, "runs": runs, "lines": lines}, sinks, cycles=60)
    pages = sorted(seen["o/0"] + seen["o/1"])
    # A line is taken with the last of its eight entries.
    assert pages[0] - (seen["lines"][0] - 7) == PageFeed.latency_cycles
    assert pages[15] - pages[0] == 15
    assert [seen["o/0"].count(cycle) for cycle in (pages[16], pages[17])] == [1, 1]  # the end, to both
    assert len(pages) == 2 * (16 + 2)
    assert seen["lines"][2] - 7 - seen["lines"][1] == 3  # two cycles between passes


def test_run_issue():
    """A line per cycle, and one cycle more for each run."""
    runs = [{"count": 3}, {"count": 2}, {"count": 1}, {}, {"count": 2}]
    seen = transfers(RunIssue(), {"i": [pack(Run, run) for run in runs]}, ["o"])
    assert seen["o"] == [RunIssue.latency_cycles + n for n in (0, 1, 2, 4, 5, 7, 10, 11)]


def test_registers():
    block = Registers(config=configure("small"))

    async def bench(ctx):
        ctx.set(block.read, 1)
        ctx.set(block.line, IDENTITY_LINE)
        for _ in range(Registers.latency_cycles):
            assert ctx.get(block.data) & ((1 << 64) - 1) != MAGIC
            await ctx.tick()
        assert ctx.get(block.data) & ((1 << 64) - 1) == MAGIC

    simulator = Simulator(block)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
