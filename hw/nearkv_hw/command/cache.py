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
    look : In(1), line, tenant, at : In : look a line up, whose place is `at`; see `place_of`.
    hit, data : Out : whether the line is here for this tenant, and what it holds, both as of the look; from
        the next cycle on until the next look.
    place, free : Out : where it belongs, and whether no other line is under way to there.
    reserve : In(1) : the line looked up is now being read from memory for this place, which is `free`.
    fill : In({valid, keep, place, data}) : the line for a reserved place has come, to be kept or not.
    snoops : In(Snoop).array(snoops) : lines that were written. Whose they are does not matter.
    flush : In(1) : nothing that is here or under way is true any longer.

    Coherence. A write is snooped when the fabric lines it up before its channel, and takes effect here
    `snoop_cycles` later. A read lined up behind the write returns what was written. For one lined up before
    it, the place has been reserved since then, so the snoop finds the tag, and the answer is not kept or no
    longer. In the few cycles between, a look may still hit: nobody has been told of the write yet, since its
    completion takes longer than that from the channel to its master; a doorbell that follows the completion
    finds the line gone.

    Latency is 1 cycle, throughput a look, a fill and `snoops` writes per cycle.
    """

    latency_cycles = 1
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
                "at": In(bits),
                "hit": Out(1),
                "data": Out(LINE_BITS),
                "place": Out(bits),
                "free": Out(1),
                "reserve": In(1),
                "fill": In(data.StructLayout({"data": LINE_BITS, "valid": 1, "keep": 1, "place": bits})),
                "snoops": In(Snoop).array(snoops),
                "flush": In(1),
            }
        )

    def place_of(self, line):
        """A line's place: tables that lie at multiples of the cache's size shall not meet in one."""
        return line[: self.place_bits] ^ line[self.place_bits : 2 * self.place_bits]

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

        # Look: tag, state and contents are of one cycle. A place that is reserved in this cycle still holds
        # what it held; what comes for it comes later.
        tag_read, tag_write = tags.read_port(domain="comb"), tags.write_port()
        read, write = contents.read_port(), contents.write_port()
        asked, looked = Signal(tag_shape), Signal(tag_shape, reset_less=True)
        busy = Signal()
        m.d.comb += [
            asked.line.eq(self.line >> bits),
            asked.tenant.eq(self.tenant),
            tag_read.addr.eq(self.at),
            read.addr.eq(self.at),
            read.en.eq(self.look),
            self.data.eq(read.data),
            self.free.eq(~busy),
        ]
        with m.If(self.look):
            m.d.sync += [
                self.place.eq(self.at),
                looked.eq(asked),
                self.hit.eq((valid & ~filling).bit_select(self.at, 1) & (asked == tag_read.data)),
                busy.eq(filling.bit_select(self.at, 1) | (self.reserve & (self.place == self.at))),
            ]

        # Reserve and fill.
        m.d.comb += [
            tag_write.addr.eq(self.place),
            tag_write.data.eq(looked),
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
            m.d.comb += port.addr.eq(self.place_of(snoop.line))
            m.d.sync += [
                line.eq(snoop.line),
                asks.eq(snoop.valid),
                tag.eq(port.data.line),
                match.eq(asks & (tag == line[bits:])),
                at.eq(self.place_of(line)),
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
