"""The walker: from posted descriptors to what every attention unit has to do."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..abi.lines import LINE_BYTES
from ..common.fork import Fork
from ..common.queue import Queue
from ..interfaces import FabricPort, OwnerPort, PageItem, QueryLine, ResultJob, UnitJob
from .admit import Admit
from .check import Check
from .claim import Claimer
from .pages import PageFeed
from .passes import PASS, Passes
from .queries import QueryFeed
from .reader import LineReader, RunIssue
from .records import Outcome, Posted, Ticket

HEADERS, ENTRIES, QUERIES = range(3)
"""Clients of the walker's reader; the first goes first."""
READER_DEPTHS = (4, 8, 16)
"""Lines that each may have under way: headers of the next jobs, 64 pages, the queries of a pass."""
DESCRIPTORS_AHEAD = 4
"""Descriptors that are checked while the first one waits for its header."""
PASSES_AHEAD = 4
"""Passes that may stand between the walker and a unit."""
PAGES_AHEAD = 8
"""Pages that may stand between the walker and a unit."""
IN_FLIGHT_BITS = 8


class Walker(wiring.Component):
    """Checks descriptors, reads what they name, and hands attention units and results side their passes.

    Parameters
    ----------
    config : what the device is made of.

    Members
    -------
    descriptors : In(stream(Posted)) : descriptors, of all tenants.
    fabric : Out(FabricPort) : reads of headers, page tables, queries and sinks.
    owners : Out(OwnerPort).array(channels) : the channels' owner tables, for claims.
    jobs, queries, pages : Out(stream(UnitJob | QueryLine | PageItem)).array(channels) : for each unit.
    results : Out(stream(ResultJob)) : for the results side.
    tickets : Out(stream(Ticket)), query_outcomes, page_outcomes : Out(stream(Outcome)) : for the completer, a
        ticket per descriptor, outcomes per pass.
    retired : In(1) : a completion record was written.

    Everything comes in the order of the descriptors. The walker runs ahead of the units until their streams
    hold it up. Whatever a descriptor holds, each of its passes is sent whole: a job, its query lines, `last`
    to every unit.
    """

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        channels = config.channels
        super().__init__(
            {
                "descriptors": In(stream.Signature(Posted)),
                "fabric": Out(FabricPort()),
                "owners": Out(OwnerPort()).array(channels),
                "jobs": Out(stream.Signature(UnitJob)).array(channels),
                "queries": Out(stream.Signature(QueryLine)).array(channels),
                "pages": Out(stream.Signature(PageItem)).array(channels),
                "results": Out(stream.Signature(ResultJob)),
                "tickets": Out(stream.Signature(Ticket)),
                "query_outcomes": Out(stream.Signature(Outcome)),
                "page_outcomes": Out(stream.Signature(Outcome)),
                "retired": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        capacity_lines = config.capacity_bytes // LINE_BYTES
        m.submodules.check = check = Check(capacity_lines=capacity_lines)
        m.submodules.admit = admit = Admit(queries=config.queries)
        m.submodules.claimer = claimer = Claimer(channels=config.channels, extents=config.extents)
        m.submodules.passes = passes = Passes(queries=config.queries)
        m.submodules.reader = reader = LineReader(depths=READER_DEPTHS)
        m.submodules.query_feed = query_feed = QueryFeed(units=config.channels, queries=config.queries)
        m.submodules.page_feed = page_feed = PageFeed(channels=config.channels, capacity_lines=capacity_lines)

        wiring.connect(m, wiring.flipped(self.descriptors), check.i)
        wiring.connect(m, check.tables, reader.request[HEADERS])
        self._queued(m, check.o, admit.i, DESCRIPTORS_AHEAD)
        wiring.connect(m, reader.response[HEADERS], admit.tables)
        wiring.connect(m, admit.claims, claimer.i)
        wiring.connect(m, claimer.o, admit.claimed)
        wiring.connect(m, admit.jobs, passes.i)
        self._queued(m, admit.tickets, wiring.flipped(self.tickets), 2 * PASSES_AHEAD)
        wiring.connect(m, reader.fabric, wiring.flipped(self.fabric))
        for owner, out in zip(claimer.owners, self.owners, strict=True):
            wiring.connect(m, owner, wiring.flipped(out))

        self._hand_out(m, passes.o, reader, query_feed, page_feed)
        wiring.connect(m, reader.response[QUERIES], query_feed.lines)
        wiring.connect(m, reader.response[ENTRIES], page_feed.lines)
        for n in range(config.channels):
            wiring.connect(m, query_feed.o[n], wiring.flipped(self.queries[n]))
            self._queued(m, page_feed.o[n], wiring.flipped(self.pages[n]), PAGES_AHEAD)
        self._queued(m, query_feed.outcomes, wiring.flipped(self.query_outcomes), 2 * PASSES_AHEAD)
        self._queued(m, page_feed.outcomes, wiring.flipped(self.page_outcomes), 2 * PASSES_AHEAD)

        in_flight = Signal(IN_FLIGHT_BITS)
        m.d.comb += check.idle.eq(in_flight == 0)
        m.d.sync += in_flight.eq(in_flight + (check.o.valid & check.o.ready) - self.retired)
        return m

    def _hand_out(self, m, passes, reader, query_feed, page_feed):
        """Every pass goes to all that have a part in it, each with a queue of its own."""
        channels = self.config.channels
        parts = [
            *[("unit", self.jobs[n]) for n in range(channels)],
            ("result", self.results),
            ("query_run", None),
            ("query_work", query_feed.i),
            ("entry_run", None),
            ("page_work", page_feed.i),
        ]
        m.submodules.fork = fork = Fork(shape=PASS, outputs=len(parts))
        m.d.comb += [
            fork.i.valid.eq(passes.valid),
            fork.i.payload.payload.eq(passes.payload),
            fork.i.payload.to.eq((1 << len(parts)) - 1),
            passes.ready.eq(fork.i.ready),
        ]
        issues = {"query_run": QUERIES, "entry_run": ENTRIES}
        for n, ((name, target), out) in enumerate(zip(parts, fork.o, strict=True)):
            queue = m.submodules[f"{name}_queue{n}"] = Queue(shape=PASS.members[name], depth=PASSES_AHEAD)
            m.d.comb += [
                queue.i.valid.eq(out.valid),
                queue.i.payload.eq(out.payload[name]),
                out.ready.eq(queue.i.ready),
            ]
            if name in issues:
                issue = m.submodules[f"{name}_issue"] = RunIssue()
                wiring.connect(m, queue.o, issue.i)
                wiring.connect(m, issue.o, reader.request[issues[name]])
            elif name == "unit":
                # Only the first unit adds the sinks.
                m.d.comb += [
                    target.valid.eq(queue.o.valid),
                    target.payload.eq(queue.o.payload),
                    queue.o.ready.eq(target.ready),
                ]
                if n > 0:
                    m.d.comb += target.payload.sinks.eq(0)
            else:
                is_inner = target is not self.results
                wiring.connect(m, queue.o, target if is_inner else wiring.flipped(target))

    def _queued(self, m, source, target, depth):
        queue = Queue(shape=source.payload.shape(), depth=depth)
        m.submodules += queue
        wiring.connect(m, source, queue.i)
        wiring.connect(m, queue.o, target)
