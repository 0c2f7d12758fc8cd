"""A queue that takes and gives several items in a cycle."""

from amaranth.hdl import Cat, Module, Shape, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from .slots import rotated


class LaneQueue(wiring.Component):
    """First-in first-out queue in banks that are used in turn, so that neighbours lie in different banks.

    Parameters
    ----------
    shape : an item's shape.
    depth : items it holds; a power of two, at least `pushes` and `window`.
    pushes : items that a cycle may bring.
    window : items at the front that can be seen, and taken, in a cycle.

    Members
    -------
    i : In(pushes items) : new items, the first ones of them valid.
    push : In(range(pushes + 1)) : how many. Whoever pushes sees to it that they fit.
    o : Out(window items) : items at the front; beyond `level` they have no meaning.
    pop : In(range(window + 1)) : how many leave; at most `level`.
    level : Out(range(depth + 1)) : items held. From a register.

    Latency is 1 cycle (`latency_cycles`) from a push to `o` and `level`.
    """

    latency_cycles = 1

    def __init__(self, *, shape, depth, pushes=1, window=1):
        for name, value in (("pushes", pushes), ("window", window)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        self.banks = 1 << ceil_log2(max(pushes, window))
        if not isinstance(depth, int) or depth < self.banks or depth & (depth - 1):
            raise ValueError(f"depth must be a power of two of at least {self.banks}, not {depth!r}")
        self.shape = shape
        self.depth = depth
        self.pushes = pushes
        self.window = window
        super().__init__(
            {
                "i": In(data.ArrayLayout(shape, pushes)),
                "push": In(range(pushes + 1)),
                "o": Out(data.ArrayLayout(shape, window)),
                "pop": In(range(window + 1)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        banks, rows = self.banks, self.depth // self.banks
        width = Shape.cast(self.shape).width
        place_bits, row_bits = ceil_log2(banks), ceil_log2(rows)
        first, end = Signal(range(self.depth)), Signal(range(self.depth))
        m.d.sync += [
            end.eq(end + self.push),
            first.eq(first + self.pop),
            self.level.eq(self.level + self.push - self.pop),
        ]
        new = self.i.as_value()
        news = [new[n * width : (n + 1) * width] for n in range(self.pushes)]
        back = Signal(place_bits)
        m.d.comb += back.eq(-end[:place_bits])
        spare = [news[-1]] * (banks - self.pushes)
        placed = news * banks if self.pushes == 1 else rotated(m, news + spare, back, "news")
        read = []
        for b in range(banks):
            bank = m.submodules[f"bank{b}"] = Memory(shape=width, depth=rows, init=[])
            write_port, read_port = bank.write_port(), bank.read_port(domain="comb")
            which = Signal(max(place_bits, 1), name=f"item_of_bank{b}")  # of the new items, the bank's
            m.d.comb += [
                which.eq(b - end[:place_bits] if place_bits else 0),
                write_port.en.eq(which < self.push),
                write_port.data.eq(placed[b]),
            ]
            if row_bits:
                m.d.comb += [
                    write_port.addr.eq(end[place_bits:] + (end[:place_bits] > b)),
                    read_port.addr.eq(first[place_bits:] + (first[:place_bits] > b)),
                ]
            read.append(read_port.data)
        front = rotated(m, read, first[:place_bits], "banks")
        m.d.comb += self.o.as_value().eq(Cat(front[: self.window]))
        return m
