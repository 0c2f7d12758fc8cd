"""Lines to the chunks that fill slots, and chunks back to lines."""

from amaranth.hdl import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import LINE_CHUNKS, SLOT_BITS, SLOTS
from ..abi.lines import LINE_BITS, LINE_BYTES
from .lanes import LaneQueue
from .slots import rotated

LINE = data.StructLayout({"data": LINE_BITS, "enable": LINE_BYTES})
CHUNKS = data.ArrayLayout(SLOT_BITS, SLOTS)
JOINED = data.StructLayout(
    {
        "chunks": CHUNKS,  # data and byte enables in their order
        "position": 2,  # of the first chunk of data in its line
        "count": range(SLOTS + 1),  # chunks of data; byte enables apart
        "ends": 1,  # a line is whole
        "whole": 1,  # its data was whole before, and its byte enables come now
        "enables": 1,  # one of the chunks, the one `enables_at`, is the byte enables
        "enables_at": 2,
    }
)
"""Up to four chunks that come in a cycle, and where they belong."""


class Chunks(wiring.Component):
    """Takes lines apart: each is four chunks of data, and one of byte enables unless all bytes are enabled.

    Parameters
    ----------
    enables : lines may have byte enables; without them every line is four chunks.
    depth : lines held; a power of two of at least 2.

    Members
    -------
    line : In(LINE), push : In(1) : a line comes. Whoever pushes sees to it that it fits.
    level : Out(range(depth + 1)) : lines held, the one begun included. From a register.
    chunks : Out(CHUNKS) : the next ones.
    count : In(range(5)) : how many of them are taken.

    Latency is `latency_cycles` from a push to `chunks`. Throughput is four chunks per cycle.
    """

    latency_cycles = LaneQueue.latency_cycles

    def __init__(self, *, enables, depth=8):
        self.enables = enables
        self.depth = depth
        super().__init__(
            {
                "line": In(LINE),
                "push": In(1),
                "level": Out(range(depth + 1)),
                "chunks": Out(CHUNKS),
                "count": In(range(SLOTS + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.lines = lines = LaneQueue(shape=LINE, depth=self.depth, window=2)
        front, behind = (Value.cast(lines.o[n]) for n in range(2))
        at = Signal(range(LINE_CHUNKS + 1))  # chunks of the line in front that are gone
        partial = Signal()
        total = Signal(range(2 * LINE_CHUNKS + 1))
        whole = LINE_CHUNKS + partial
        m.d.comb += [
            Value.cast(lines.i[0]).eq(Value.cast(self.line)),
            lines.push.eq(self.push),
            self.level.eq(lines.level),
            partial.eq(~front[LINE_BITS:].all() if self.enables else 0),
            total.eq(at + self.count),
            lines.pop.eq((self.count != 0) & (total >= whole)),
        ]
        with m.If(self.count != 0):
            m.d.sync += at.eq(Mux(total >= whole, total - whole, total))
        lanes = []
        for lane in range(LINE_CHUNKS):
            chunk = Signal(SLOT_BITS, name=f"lane{lane}")
            part = slice(lane * SLOT_BITS, (lane + 1) * SLOT_BITS)
            m.d.comb += chunk.eq(Mux(at > lane, behind[part], front[part]))
            lanes.append(chunk)
        chunks = rotated(m, lanes, at[:2], "lanes")
        if self.enables:
            enables_at = Signal(range(LINE_CHUNKS + 1))  # beyond the four if they are not due
            m.d.comb += enables_at.eq(Mux(partial, LINE_CHUNKS - at, LINE_CHUNKS))
            chunks = [
                Mux(
                    enables_at == n,
                    front[LINE_BITS:],
                    Mux(enables_at < n, chunks[max(n - 1, 0)], chunks[n]),
                )
                for n in range(LINE_CHUNKS)
            ]
        m.d.comb += [self.chunks[n].eq(chunk) for n, chunk in enumerate(chunks)]
        return m


class Lines(wiring.Component):
    """Puts lines together.

    Parameters
    ----------
    enables : lines may have byte enables.

    Members
    -------
    i : In(stream(JOINED), always_ready) : chunks.
    o : Out(stream(LINE), always_ready) : whole lines.

    Latency is 1 cycle (`latency_cycles`). Throughput is four chunks per cycle.
    """

    latency_cycles = 1

    def __init__(self, *, enables):
        self.enables = enables
        super().__init__(
            {
                "i": In(stream.Signature(JOINED, always_ready=True)),
                "o": Out(stream.Signature(LINE, always_ready=True)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        joined, there = self.i.payload, self.i.valid
        chunks = [joined.chunks[n] for n in range(SLOTS)]
        enable = Signal(LINE_BYTES)
        with m.Switch(joined.enables_at):
            for n, chunk in enumerate(chunks):
                with m.Case(n):
                    m.d.comb += enable.eq(chunk[:LINE_BYTES])
        if self.enables:
            chunks = [
                Mux(joined.enables & (joined.enables_at <= n), chunks[min(n + 1, SLOTS - 1)], chunks[n])
                for n in range(SLOTS)
            ]
        line = Signal(LINE, reset_less=True)
        m.d.sync += self.o.valid.eq(there & joined.ends)
        m.d.comb += self.o.payload.eq(line)
        with m.If(there & joined.ends):
            m.d.sync += line.enable.eq(Mux(joined.enables, enable, ~0))
        turn = Signal(2)  # from chunks to lanes
        m.d.comb += turn.eq(-joined.position)
        for lane, comes in enumerate(rotated(m, chunks, turn, "chunks")):
            part = slice(lane * SLOT_BITS, (lane + 1) * SLOT_BITS)
            index = Signal(2, name=f"chunk_of_lane{lane}")
            held = Signal(SLOT_BITS, name=f"lane{lane}_held", reset_less=True)
            m.d.comb += index.eq(lane - joined.position)
            with m.If(there & (index < joined.count)):
                m.d.sync += held.eq(comes)
            with m.If(there & joined.ends):
                m.d.sync += line.data[part].eq(Mux(joined.whole | (joined.position > lane), held, comes))
        return m


assert LINE_BITS == LINE_CHUNKS * SLOT_BITS
