"""Lines of page tables that are kept on chip."""

from operator import or_

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..abi.lines import LINE_BITS
from ..common.trees import reduce_tree
from ..interfaces import LINE_ADDRESS_BITS, TENANT_BITS, Snoop


class LineCache(wiring.Component):
    """Lines that were read lately, each for the tenant that was allowed to read it.

    A line has one place (direct-mapped). A place that is reserved for a line under way takes no other until
    that line has come: it is empty, filling, filling in vain (the line was written meanwhile), or valid.

    Parameters
    ----------
    lines : places, a power of two from 2 to 512.
    snoops : writes that may happen in a cycle, at least 1.

    Members
    -------
    look : In(1), line, tenant : In : look a line up, as of this cycle.
    step : In(1) : compare what was looked up last, at the earliest in the next cycle; before the next look
        or together with it.
    hit, data : Out : whether the line is here for this tenant, and what it holds; from the cycle after the
        step on until the next.
    place, free : Out : where it belongs, and whether no other line is under way to there.
    reserve : In(1) : the line compared last is now being read from memory for this place, which is `free`.
    fill : In({valid, keep, place, data}) : the line for a reserved place has come, to be kept or not.
    snoops : In(Snoop).array(snoops) : lines that were written. Whose they are does not matter.
    flush : In(1) : nothing that is here or under way is true any longer.

    Coherence. A write is snooped when the fabric lines it up before its channel, and takes effect here
    `snoop_cycles` later. A read lined up behind the write returns what was written. For one lined up before
    it, the place has been reserved since then, so the snoop finds the tag, and the answer is not kept or no
    longer. In the few cycles between, a look may still hit: nobody has been told of the write yet, since its
    completion takes longer than that from the channel to its master; a doorbell that follows the completion
    finds the line gone.

    Latency is 2 cycles, throughput a look, a fill and `snoops` writes per cycle.
    """

    latency_cycles = 2
    snoop_cycles = 3

    def __init__(self, *, lines, snoops):
        check_size(lines, snoops)
        self.lines = lines
        self.place_bits = bits = ceil_log2(lines)
        super().__init__(
            {
                "look": In(1),
                "line": In(LINE_ADDRESS_BITS),
                "tenant": In(TENANT_BITS),
                "step": In(1),
                "hit": Out(1),
                "data": Out(LINE_BITS),
                "place": Out(bits),
                "free": Out(1),
                "reserve": In(1),
                "fill": In(data.StructLayout({"valid": 1, "keep": 1, "place": bits, "data": LINE_BITS})),
                "snoops": In(Snoop).array(snoops),
                "flush": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = self.place_bits
        tag_shape = data.StructLayout({"line": LINE_ADDRESS_BITS - bits, "tenant": TENANT_BITS})
        # In distributed memory: a block RAM's output comes too late for a comparison in the same cycle.
        distributed = {"ram_style": "distributed"}
        m.submodules.tags = tags = memory.Memory(
            shape=tag_shape, depth=self.lines, init=[], attrs=distributed
        )
        m.submodules.contents = contents = memory.Memory(shape=LINE_BITS, depth=self.lines, init=[])
        valid, filling = Signal(self.lines), Signal(self.lines)  # both: the line is under way, to be kept

        # Look: tag and state are of one cycle. Until the step nobody reserves the place but the line ahead,
        # in the cycle of the step itself, so the contents stay.
        place, looked = _place(self.line, bits), Signal(bits, reset_less=True)
        tag_read, tag_write = tags.read_port(domain="comb"), tags.write_port()
        asked, found = Signal(tag_shape, reset_less=True), Signal(tag_shape, reset_less=True)
        here = Signal()
        m.d.comb += tag_read.addr.eq(place)
        with m.If(self.look):
            m.d.sync += [
                looked.eq(place),
                asked.line.eq(self.line >> bits),
                asked.tenant.eq(self.tenant),
                found.eq(tag_read.data),
                here.eq((valid & ~filling).bit_select(place, 1) & ~(self.reserve & (self.place == place))),
            ]

        # Step: compare, and see whether the place can be reserved.
        read, write = contents.read_port(), contents.write_port()
        compared = Signal(tag_shape, reset_less=True)
        busy = Signal()
        m.d.comb += [
            read.addr.eq(looked),
            read.en.eq(self.step),
            self.data.eq(read.data),
            self.free.eq(~busy),
        ]
        with m.If(self.step):
            m.d.sync += [
                self.place.eq(looked),
                compared.eq(asked),
                self.hit.eq(here & (asked == found)),
                busy.eq(filling.bit_select(looked, 1) | (self.reserve & (self.place == looked))),
            ]

        # Reserve and fill.
        m.d.comb += [
            tag_write.addr.eq(self.place),
            tag_write.data.eq(compared),
            tag_write.en.eq(self.reserve),
            write.addr.eq(self.fill.place),
            write.data.eq(self.fill.data),
            write.en.eq(self.fill.valid & self.fill.keep),
        ]

        # Snoop: read the tag, compare, forget.
        written = []
        for n, snoop in enumerate(self.snoops):
            port = tags.read_port(domain="comb")
            line, asks = Signal(LINE_ADDRESS_BITS, name=f"line{n}", reset_less=True), Signal(name=f"asks{n}")
            tag = Signal(LINE_ADDRESS_BITS - bits, name=f"tag{n}", reset_less=True)
            match, at = Signal(name=f"match{n}"), Signal(bits, name=f"at{n}", reset_less=True)
            m.d.comb += port.addr.eq(_place(snoop.line, bits))
            m.d.sync += [
                line.eq(snoop.line),
                asks.eq(snoop.valid),
                tag.eq(port.data.line),
                match.eq(asks & (tag == line[bits:])),
                at.eq(_place(line, bits)),
            ]
            written.append(Mux(match, 1 << at, 0))
        forgotten, reserved, filled, lost = (
            Signal(self.lines, name=name) for name in ("forgotten", "reserved", "filled", "lost")
        )
        m.d.comb += [
            forgotten.eq(reduce_tree(written, or_) | self.flush.replicate(self.lines)),
            reserved.eq(Mux(self.reserve, 1 << self.place, 0)),
            filled.eq(Mux(self.fill.valid, 1 << self.fill.place, 0)),
            lost.eq(Mux(self.fill.keep, 0, filled)),
        ]
        m.d.sync += [
            valid.eq((valid | reserved) & ~forgotten & ~lost),
            filling.eq((filling | reserved) & ~filled),
        ]
        return m


def check_size(lines, snoops):
    """ValueError when a cache cannot have so many places, or so many writes in a cycle."""
    if not isinstance(lines, int) or not 2 <= lines <= 512 or lines & (lines - 1):
        raise ValueError(f"lines must be a power of two from 2 to 512, not {lines!r}")
    if not isinstance(snoops, int) or snoops < 1:
        raise ValueError(f"snoops must be a positive integer, not {snoops!r}")


def _place(line, bits):
    """A line's place: tables that lie at multiples of the cache's size shall not meet in one."""
    return line[:bits] ^ line[bits : 2 * bits]
