"""The walker: from posted descriptors to what every attention unit has to do."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..abi.descriptor import MAX_CANDIDATES
from ..abi.lines import LINE_BYTES
from ..common.buffer import Buffer
from ..common.fork import Fork
from ..interfaces import (
    EXTENTS_BITS,
    Bound,
    FabricPort,
    OwnerPort,
    PageItem,
    QueryLine,
    ResultJob,
    Snoop,
    UnitJob,
)
from .admit import Admit
from .check import Check
from .claim import Claimer
from .pages import PageFeed
from .passes import PASS, Passes
from .plan import Planner
from .queries import QueryFeed, QueryRuns
from .ranges import Ranges
from .reader import LineReader, RunIssue
from .records import Outcome, Posted, Ticket
from .selected import ListWriter, SharedPort
from .selection import Selector, check_candidates

ENTRIES, HEADERS, RANGES, QUERIES = range(4)
"""Clients of the walker's reader; the first goes first."""
READER_DEPTHS = (16, 4, 4, 16)
"""Lines that each may have under way: of 128 pages, headers of the next jobs, 32 ranges, the queries of a
pass."""
TABLE_LINES = 128
"""Lines of page tables on chip: all of a small model's decode step; of long contexts, what came last."""
PASSES_AHEAD = 4
"""Passes that may stand between the walker and a unit."""
PAGES_AHEAD = 8
"""Pages that may stand between the walker and a unit."""
IN_FLIGHT_BITS = 8


class Walker(wiring.Component):
    """Checks descriptors, reads what they name, and hands attention units and results side their passes.

    Parameters
    ----------
    config : what the device is made of. Without units there are no ports for them, and no job is taken.
    candidates : pages that a job may select from, as of `Selector`.

    Members
    -------
    descriptors : In(stream(Posted)) : descriptors, of all tenants.
    fabric : Out(FabricPort) : reads of headers, page tables, queries and lists; writes of the lists of
        selected pages.
    owners : Out(OwnerPort).array(slices) : the slices' owner tables, for claims and releases.
    quotas, holdings : In, Out(EXTENTS_BITS) x apertures : extents that each tenant may own, and does own.
    jobs, queries, pages : Out(stream(UnitJob | QueryLine | PageItem)).array(units) : for each unit.
    bounds : In(stream(Bound)).array(units) : from each unit, in passes of bounds.
    results : Out(stream(ResultJob)) : for the results side.
    tickets : Out(stream(Ticket)), query_outcomes, page_outcomes : Out(stream(Outcome)) : for the completer, a
        ticket per descriptor, outcomes per pass.
    retired : In(1) : a completion record was written.
    judged : Out(1) : a descriptor, and its table's header where it has one, was checked.
    snoops : In(Snoop).array(slices) : the writes of each slice as the fabric lines them up, so that the lines
        of page tables that are kept on chip are the memory's, see `LineCache`.
    flush : In(1) : forget all of them, as a release does.
    table_hits, table_misses : Out(64) : lines of page tables found on chip, and read from memory.

    Everything comes in the order of the descriptors. The walker runs ahead of the units until their streams
    hold it up. Whatever a descriptor holds, each of its passes is sent whole: a job, its query lines, `last`
    to every unit.

    From a descriptor to its first page are `first_page_cycles` when header and entries are on chip; each that
    is not adds the fabric's time and `miss_cycles`.
    """

    first_page_cycles = (
        Check.latency_cycles
        + max(LineReader.hit_latency_cycles, Planner.latency_cycles)
        + Admit.latency_cycles
        + Passes.latency_cycles
        + Fork.latency_cycles
        + Buffer.latency_cycles
        + Ranges.latency_cycles
        + RunIssue.latency_cycles
        + LineReader.hit_latency_cycles
        + PageFeed.latency_cycles
    )
    miss_cycles = LineReader.request_cycles + LineReader.answer_cycles - LineReader.hit_latency_cycles

    def __init__(self, *, config, candidates=MAX_CANDIDATES):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        check_candidates(candidates)
        self.config = config
        self.candidates = candidates
        units, slices = config.units, config.slices
        super().__init__(
            {
                "descriptors": In(stream.Signature(Posted)),
                "fabric": Out(FabricPort()),
                "owners": Out(OwnerPort()).array(slices),
                "quotas": In(EXTENTS_BITS).array(config.apertures),
                "holdings": Out(EXTENTS_BITS).array(config.apertures),
                "jobs": Out(stream.Signature(UnitJob)).array(units),
                "queries": Out(stream.Signature(QueryLine)).array(units),
                "pages": Out(stream.Signature(PageItem)).array(units),
                "bounds": In(stream.Signature(Bound)).array(units),
                "results": Out(stream.Signature(ResultJob)),
                "tickets": Out(stream.Signature(Ticket)),
                "query_outcomes": Out(stream.Signature(Outcome)),
                "page_outcomes": Out(stream.Signature(Outcome)),
                "retired": In(1),
                "judged": Out(1),
                "snoops": In(Snoop).array(slices),
                "flush": In(1),
                "table_hits": Out(64),
                "table_misses": Out(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        capacity_lines = config.capacity_bytes // LINE_BYTES
        m.submodules.check = check = Check(capacity_lines=capacity_lines, units=config.units)
        m.submodules.planner = planner = Planner(candidates=self.candidates)
        m.submodules.admit = admit = Admit(queries=config.queries)
        m.submodules.claimer = claimer = Claimer(
            slices=config.slices,
            extents=config.extents,
            apertures=config.apertures,
            logical_devices=config.logical_devices,
        )
        for n in range(config.apertures):
            m.d.comb += [
                claimer.quotas[n].eq(self.quotas[n]),
                self.holdings[n].eq(claimer.holdings[n]),
            ]

        wiring.connect(m, wiring.flipped(self.descriptors), check.i)
        wiring.connect(m, check.o, planner.i)
        wiring.connect(m, planner.o, admit.i)
        wiring.connect(m, admit.claims, claimer.i)
        wiring.connect(m, claimer.o, admit.claimed)
        self._queued(m, admit.tickets, wiring.flipped(self.tickets))
        m.d.comb += self.judged.eq(admit.tickets.valid & admit.tickets.ready)
        for owner, out in zip(claimer.owners, self.owners, strict=True):
            wiring.connect(m, owner, wiring.flipped(out))
        if config.units:
            self._attend(m, check, admit, claimer, capacity_lines)

        in_flight = Signal(IN_FLIGHT_BITS)
        m.d.comb += check.idle.eq(in_flight == 0)
        m.d.sync += in_flight.eq(in_flight + (check.o.valid & check.o.ready) - self.retired)
        return m

    def _attend(self, m, check, admit, claimer, capacity_lines):
        """What good attention jobs need."""
        config = self.config
        m.submodules.passes = passes = Passes(queries=config.queries)
        m.submodules.reader = reader = LineReader(
            depths=READER_DEPTHS, cached=RANGES, lines=TABLE_LINES, snoops=config.slices
        )
        m.submodules.query_feed = query_feed = QueryFeed(units=config.units)
        m.submodules.page_feed = page_feed = PageFeed(
            units=config.units,
            capacity_lines=capacity_lines,
            pages_ahead=PAGES_AHEAD,
            lines_ahead=READER_DEPTHS[ENTRIES],
        )
        m.submodules.query_runs = query_runs = QueryRuns()
        m.submodules.query_issue = query_issue = RunIssue()
        m.submodules.ranges = ranges = Ranges()
        wiring.connect(m, query_runs.o, query_issue.i)
        wiring.connect(m, ranges.reads, reader.request[RANGES])
        wiring.connect(m, reader.response[RANGES], ranges.lines)
        wiring.connect(m, ranges.runs, page_feed.runs)
        wiring.connect(m, ranges.o, page_feed.i)
        wiring.connect(m, check.tables, reader.request[HEADERS])
        wiring.connect(m, reader.response[HEADERS], admit.tables)
        wiring.connect(m, admit.jobs, passes.i)
        m.submodules.port = port = SharedPort()
        m.submodules.selector = selector = Selector(units=config.units, candidates=self.candidates)
        m.submodules.list_writer = list_writer = ListWriter()
        wiring.connect(m, reader.fabric, port.reader)
        wiring.connect(m, list_writer.requests, port.requests)
        wiring.connect(m, port.answers, list_writer.answers)
        wiring.connect(m, port.fabric, wiring.flipped(self.fabric))
        wiring.connect(m, page_feed.selector, selector.feed)
        wiring.connect(m, page_feed.list, list_writer.feed)
        wiring.connect(m, query_issue.o, reader.request[QUERIES])
        wiring.connect(m, reader.response[QUERIES], query_feed.lines)
        wiring.connect(m, page_feed.reads, reader.request[ENTRIES])
        wiring.connect(m, reader.response[ENTRIES], page_feed.lines)
        m.d.comb += [
            *(own.eq(given) for own, given in zip(reader.snoops, self.snoops, strict=True)),
            reader.flush.eq(self.flush | claimer.released),
            self.table_hits.eq(reader.table_hits),
            self.table_misses.eq(reader.table_misses),
        ]
        self._hand_out(m, passes.o, query_runs, query_feed, ranges)
        for n in range(config.units):
            wiring.connect(m, wiring.flipped(self.bounds[n]), selector.bounds[n])
            wiring.connect(m, query_feed.o[n], wiring.flipped(self.queries[n]))
            wiring.connect(m, page_feed.o[n], wiring.flipped(self.pages[n]))
        self._queued(m, query_feed.outcomes, wiring.flipped(self.query_outcomes))
        self._queued(m, page_feed.outcomes, wiring.flipped(self.page_outcomes))

    def _hand_out(self, m, passes, query_runs, query_feed, ranges):
        """Every pass goes to all that have a part in it, each with a queue of its own."""
        parts = [
            *(("unit", wiring.flipped(jobs)) for jobs in self.jobs),
            ("result", wiring.flipped(self.results)),
            ("query_work", query_runs.i),
            ("query_work", query_feed.i),
            ("range_work", ranges.i),
        ]
        m.submodules.fork = fork = Fork(
            shape=PASS, outputs=len(parts), interval_cycles=Passes.interval_cycles
        )
        m.d.comb += [
            fork.i.valid.eq(passes.valid),
            fork.i.payload.payload.eq(passes.payload),
            fork.i.payload.to.eq((1 << len(parts)) - 1),
            passes.ready.eq(fork.i.ready),
        ]
        for n, ((name, target), out) in enumerate(zip(parts, fork.o, strict=True)):
            queue = m.submodules[f"{name}_queue{n}"] = Buffer(shape=PASS.members[name], depth=PASSES_AHEAD)
            m.d.comb += [
                queue.i.valid.eq(out.valid),
                queue.i.payload.eq(out.payload[name]),
                out.ready.eq(queue.i.ready),
            ]
            if name == "unit" and n > 0:  # only the first unit adds the sinks
                m.d.comb += queue.i.payload.sinks.eq(0)
            wiring.connect(m, queue.o, target)

    def _queued(self, m, source, target):
        queue = Buffer(shape=source.payload.shape(), depth=2 * PASSES_AHEAD)
        m.submodules += queue
        wiring.connect(m, source, queue.i)
        wiring.connect(m, queue.o, target)
