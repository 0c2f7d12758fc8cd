"""A source of traffic for a channel's memory, to measure what that does where no link is the limit."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import enum, memory, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2, exact_log2

from ..abi import DeviceConfig
from ..abi.dram import PARTS, Dram
from ..abi.lines import LINE_BYTES
from .dram.memory import DramMemory
from .fixed import FixedMemory

SLOT_BITS = 10
"""Reads under way, log2: twice what any memory here holds, so that none is kept from its bank by order: slots
are used in turn, and the oldest read may be much older than the others."""
WRITES_AHEAD = 8
"""Writes that may be due and not yet taken before reads wait for them, so that both go on to the end."""
COUNT_BITS = 32
_SUM_BITS = 48
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407  # Knuth's, of 64 bits


class Order(enum.Enum, shape=1):
    """Which lines are read."""

    STREAM = 0  # one after the other
    RANDOM = 1  # anywhere


class Traffic(wiring.Component):
    """Reads lines through the unit's port as fast as they come, writes some through the fabric's, and counts.

    Reads alone are of half the memory. With writes among them, both have banks of their own, so that the bus
    has to turn and no row is closed for the other; writes go over all bank groups in turn.

    Parameters
    ----------
    config : a device, of whose first slice this is the memory; a latency counts from this memory's port.

    Members
    -------
    go : In(1) : rises when a measurement begins, falls before the next one.
    order : In(Order) : which lines are read.
    reads : In(32) : how many.
    reads_per_write : In(4) : reads for every write; 0 for no writes.
    alone : In(1) : a read waits for the answer of the one before.
    done : Out(1) : everything has been answered.
    cycles, latency_sum, latency_min, latency_max : Out : cycles of the measurement and of its reads.
    """

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "go": In(1),
                "order": In(Order),
                "reads": In(COUNT_BITS),
                "reads_per_write": In(4),
                "alone": In(1),
                "done": Out(1),
                "cycles": Out(COUNT_BITS),
                "latency_sum": Out(_SUM_BITS),
                "latency_min": Out(COUNT_BITS),
                "latency_max": Out(COUNT_BITS),
            }
        )

    @property
    def half_bits(self):
        """Bits of a line's number in a half of the memory."""
        return ceil_log2(self.config.slice_lines) - 1

    def elaborate(self, platform):
        m = Module()
        config = self.config
        if config.dram is Dram.FIXED:
            latency = config.memory_latency_cycles
            backend = FixedMemory(channel=0, latency_cycles=latency, slot_bits=SLOT_BITS)
        else:
            backend = DramMemory(channel=0, config=config, slot_bits=SLOT_BITS)
        m.submodules.memory = backend
        asked, answered = Signal(COUNT_BITS), Signal(COUNT_BITS)
        due, written, stored = Signal(COUNT_BITS), Signal(COUNT_BITS), Signal(COUNT_BITS)
        running = Signal()
        m.d.comb += [
            running.eq(self.go & ~self.done),
            self.done.eq(self.go & (answered == self.reads) & (written == due) & (stored == due)),
        ]
        with m.If(~self.go):
            counts = (asked, answered, due, written, stored, self.cycles, self.latency_sum, self.latency_max)
            m.d.sync += [*(count.eq(0) for count in counts), self.latency_min.eq(~0)]
        with m.If(running):
            m.d.sync += self.cycles.eq(self.cycles + 1)
            self._read(m, backend.port, asked, answered, due, written)
            self._write(m, backend.port, due, written, stored)
        return m

    def _read(self, m, port, asked, answered, due, written):
        """Asks for lines, and measures how long their answers take."""
        random, slot, now = Signal(64), Signal(SLOT_BITS), Signal(COUNT_BITS)
        busy = Signal(1 << SLOT_BITS)
        since = Signal(4)  # reads since the last write fell due
        m.submodules.begun = begun = memory.Memory(shape=COUNT_BITS, depth=1 << SLOT_BITS, init=[])
        began, ended = begun.write_port(), begun.read_port(domain="comb")
        ask, answer, latency = Signal(), Signal(), Signal(COUNT_BITS)
        request, reply = port.unit, port.unit_read
        may_ask = ~busy.bit_select(slot, 1) & (due - written < WRITES_AHEAD)
        anywhere = random[64 - self.half_bits :]
        in_order = Mux(self.reads_per_write == 0, asked, self._of_banks(asked, 0))
        m.d.comb += [
            request.valid.eq((asked != self.reads) & may_ask & (~self.alone | (asked == answered))),
            request.payload.line.eq(Mux(self.order == Order.RANDOM, anywhere, in_order)),
            request.payload.slot.eq(slot),
            ask.eq(request.valid & request.ready),
            answer.eq(reply.valid),
            began.addr.eq(slot),
            began.data.eq(now),
            began.en.eq(ask),
            ended.addr.eq(reply.payload.slot),
            latency.eq(now - ended.data),
        ]
        m.d.sync += [
            now.eq(now + 1),
            busy.eq((busy | (ask << slot)) & ~(answer << reply.payload.slot)),
        ]
        with m.If(ask):
            m.d.sync += [
                asked.eq(asked + 1),
                slot.eq(slot + 1),
                random.eq(random * _MULTIPLIER + _INCREMENT),
                since.eq(since + 1),
            ]
            with m.If((self.reads_per_write != 0) & (since + 1 == self.reads_per_write)):
                m.d.sync += [since.eq(0), due.eq(due + 1)]
        with m.If(answer):
            m.d.sync += [answered.eq(answered + 1), self.latency_sum.eq(self.latency_sum + latency)]
            with m.If(latency < self.latency_min):
                m.d.sync += self.latency_min.eq(latency)
            with m.If(latency > self.latency_max):
                m.d.sync += self.latency_max.eq(latency)

    def _write(self, m, port, due, written, stored):
        """Writes as many lines as are due."""
        request = port.fabric
        write = Signal()
        m.d.comb += [
            request.valid.eq(written != due),
            request.payload.line.eq(self._of_banks(self._spread(written), 1)),
            request.payload.slot.eq(written),
            request.payload.write.eq(1),
            request.payload.enable.eq((1 << LINE_BYTES) - 1),
            request.payload.data.eq(written.replicate(16)),
            write.eq(request.valid & request.ready),
        ]
        m.d.sync += stored.eq(stored + sum(answer.valid for answer in port.written))
        with m.If(write):
            m.d.sync += written.eq(written + 1)

    def _spread(self, count):
        """The lines of the upper half, ordered so that neighbours lie in as many bank groups as there are.

        Lines that follow each other lie in two bank groups; what chooses another two stands above the column.
        """
        if self.config.dram is Dram.FIXED:
            return count
        part = PARTS[self.config.dram]
        low = exact_log2(part.subchannels) + 1
        groups, columns = exact_log2(part.bank_groups) - 1, exact_log2(part.row_lines)
        return Cat(
            count[:low],
            count[low + groups :][:columns],
            count[low:][:groups],
            count[low + groups + columns :],
        )

    def _of_banks(self, count, half):
        """The lines of the lower or the upper half of all banks, those of a run one after the other."""
        if self.config.dram is Dram.FIXED:
            return Cat(count[: self.half_bits], half)
        part = PARTS[self.config.dram]
        pairs = exact_log2(part.banks) - 1
        below = exact_log2(part.subchannels) + 1 + exact_log2(part.row_lines) + pairs - 1
        row = count[below : self.half_bits]
        gray = row[pairs - 1] ^ row[pairs]  # the highest bit of a pair's number is exclusive-or'ed with it
        return Cat(count[:below], gray ^ half, row)
