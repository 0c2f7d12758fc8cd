"""The list of a job's selected pages, on its way to memory."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import WORD_BYTES
from ..abi.lines import LINE_BITS, LINE_BYTES
from ..interfaces import LINE_ADDRESS_BITS, TENANT_BITS, FabricPort, FabricRequest, FabricResponse, Fault
from .records import ListPort

_WORD_BITS = 8 * WORD_BYTES
_COUNT_BITS = 16


class ListWriter(wiring.Component):
    """Puts words together to whole lines, the last one filled up with zeros, and writes them.

    Members
    -------
    feed : In(ListPort) : words; of the first of a list counts where the list lies and whose it is. `idle`
        when all that came is in memory, `refused` when something of the list could not be written.
    requests : Out(stream(FabricRequest)) : the lines.
    answers : In(stream(FabricResponse)) : always taken.

    A line is offered the cycle after its last word; while it waits no word is taken.
    """

    feed: In(ListPort())
    requests: Out(stream.Signature(FabricRequest))
    answers: In(stream.Signature(FabricResponse))

    def elaborate(self, platform):
        m = Module()
        words = self.feed.words
        given = words.payload
        data = Signal(LINE_BITS)
        place = Signal(range(LINE_BITS // _WORD_BITS))
        fresh, full = Signal(init=1), Signal()  # a list begins; a line waits
        line, tenant = Signal(LINE_ADDRESS_BITS, reset_less=True), Signal(TENANT_BITS, reset_less=True)
        unanswered = Signal(_COUNT_BITS)
        refused = Signal()
        taken, sent = words.valid & words.ready, self.requests.valid & self.requests.ready
        m.d.comb += [
            words.ready.eq(~full),
            self.requests.valid.eq(full),
            self.requests.payload.data.eq(data),
            self.requests.payload.enable.eq((1 << LINE_BYTES) - 1),
            self.requests.payload.line.eq(line),
            self.requests.payload.tenant.eq(tenant),
            self.requests.payload.write.eq(1),
            self.answers.ready.eq(1),
            self.feed.idle.eq(~full & (unanswered == 0)),
            self.feed.refused.eq(refused),
        ]
        m.d.sync += unanswered.eq(unanswered + sent - self.answers.valid)
        with m.If(self.answers.valid & (self.answers.payload.fault != Fault.NONE)):
            m.d.sync += refused.eq(1)
        with m.If(sent):
            m.d.sync += [full.eq(0), data.eq(0), line.eq(line + 1)]
        with m.If(taken & given.end):
            m.d.sync += [fresh.eq(1), place.eq(0), full.eq(place != 0)]
        with m.Elif(taken):
            m.d.sync += [
                data.word_select(place, _WORD_BITS).eq(given.word),
                place.eq(place + 1),
                full.eq(place.all()),
                fresh.eq(0),
            ]
            with m.If(fresh):
                m.d.sync += [line.eq(given.line), tenant.eq(given.tenant), refused.eq(0)]
        return m


class SharedPort(wiring.Component):
    """A fabric port for one who reads and one who writes; the reader goes first.

    Members
    -------
    fabric : Out(FabricPort)
    reader : In(FabricPort) : reads.
    requests : In(stream(FabricRequest)), answers : Out(stream(FabricResponse)) : writes.

    Latency is 0 cycles. Both take their answers always.
    """

    fabric: Out(FabricPort())
    reader: In(FabricPort())
    requests: In(stream.Signature(FabricRequest))
    answers: Out(stream.Signature(FabricResponse))

    def elaborate(self, platform):
        m = Module()
        out, back = self.fabric.request, self.fabric.response
        reads, writes = self.reader.request, self.requests
        writing, waited = Signal(), Signal()  # a write that is offered stays
        m.d.comb += [
            writing.eq(writes.valid & (waited | ~reads.valid)),
            out.valid.eq(reads.valid | writes.valid),
            out.payload.eq(Mux(writing, writes.payload, reads.payload)),
            reads.ready.eq(out.ready & ~writing),
            writes.ready.eq(out.ready & writing),
            back.ready.eq(1),
            self.reader.response.payload.eq(back.payload),
            self.reader.response.valid.eq(back.valid & ~back.payload.write),
            self.answers.payload.eq(back.payload),
            self.answers.valid.eq(back.valid & back.payload.write),
        ]
        m.d.sync += waited.eq(writing & ~out.ready)
        return m
