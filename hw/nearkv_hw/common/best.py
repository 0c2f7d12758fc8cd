"""The largest of many keys: a binary heap whose root is the least of those that are kept."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out


class Best(wiring.Component):
    """Keeps the `capacity` largest of the keys that come.

    Node n of the heap has nodes 2n and 2n + 1 below it, which lie in word n of its memory, so that one read
    shows both; the root has a register of its own.

    Parameters
    ----------
    key_bits : bits of a key, unsigned; the larger one is the better.
    depth : keys that are kept at most, at least 1.

    Members
    -------
    clear : In(1) : forget all; while `idle`.
    capacity : In : keys to keep, at most `depth`; from `clear` on the same.
    i : In(stream) : the keys.
    size : Out : keys that are kept.
    least : Out : the least of them; without meaning when there are none.
    idle : Out(1) : no key is on its way to its place.

    A key that is not kept takes a cycle (`drop_cycles`). One that is takes as many more as it has levels to
    look at, times `level_cycles`.
    """

    drop_cycles = 1
    level_cycles = 3

    def __init__(self, *, key_bits, depth):
        for name, value in (("key_bits", key_bits), ("depth", depth)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        self.key_bits = key_bits
        self.depth = depth
        super().__init__(
            {
                "clear": In(1),
                "capacity": In(range(depth + 1)),
                "i": In(stream.Signature(key_bits)),
                "size": Out(range(depth + 1)),
                "least": Out(key_bits),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.nodes = nodes = memory.Memory(
            shape=data.ArrayLayout(self.key_bits, 2), depth=self.depth // 2 + 1, init=[]
        )
        read, write = nodes.read_port(), nodes.write_port(granularity=1)
        key, least = Signal(self.key_bits, reset_less=True), Signal(self.key_bits, reset_less=True)
        node, size = Signal(range(2 * self.depth + 2), reset_less=True), Signal(range(self.depth + 1))
        lower, right = (Signal(self.key_bits, reset_less=True, name=name) for name in ("lower", "right"))
        some, two = Signal(reset_less=True), Signal(reset_less=True)  # nodes below, and both of them
        placed, placing = Signal(self.key_bits), Signal()  # at `node`
        m.d.comb += [
            self.size.eq(size),
            self.least.eq(least),
            read.addr.eq(node),
            read.en.eq(0),
            write.addr.eq(node >> 1),
            write.data[0].eq(placed),
            write.data[1].eq(placed),
            write.en.eq(Mux(placing, Mux(node[0], 0b10, 0b01), 0)),
        ]
        with m.If(placing & (node == 1)):
            m.d.sync += least.eq(placed)

        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [self.i.ready.eq(1), self.idle.eq(~self.i.valid)]
                m.d.sync += key.eq(self.i.payload)
                with m.If(self.i.valid):
                    with m.If(size != self.capacity):
                        m.d.sync += [size.eq(size + 1), node.eq(size + 1)]
                        m.next = "PARENT"
                    with m.Elif((size != 0) & (self.i.payload > least)):
                        m.d.sync += node.eq(1)
                        m.next = "CHILDREN"
            with m.State("PARENT"):
                m.d.comb += [read.addr.eq(node >> 2), read.en.eq(1)]
                m.next = "PARENT_HERE"
            with m.State("PARENT_HERE"):
                m.d.sync += lower.eq(Mux(node[1:] == 1, least, Mux(node[1], read.data[1], read.data[0])))
                m.next = "UP"
            with m.State("UP"):
                goes_up = (node != 1) & (key < lower)
                m.d.comb += [placing.eq(1), placed.eq(Mux(goes_up, lower, key))]
                m.next = "IDLE"
                with m.If(goes_up):
                    m.d.sync += node.eq(node >> 1)
                    m.next = "PARENT"
            with m.State("CHILDREN"):
                m.d.comb += read.en.eq(1)
                m.d.sync += [some.eq(node << 1 <= size), two.eq(node << 1 < size)]
                m.next = "CHILDREN_HERE"
            with m.State("CHILDREN_HERE"):
                m.d.sync += [lower.eq(read.data[0]), right.eq(read.data[1])]
                m.next = "DOWN"
            with m.State("DOWN"):
                is_right = two & (right < lower)
                goes_down = some & ((lower < key) | (two & (right < key)))
                m.d.comb += [
                    placing.eq(1),
                    placed.eq(Mux(goes_down, Mux(is_right, right, lower), key)),
                ]
                m.next = "IDLE"
                with m.If(goes_down):
                    m.d.sync += node.eq((node << 1) + is_right)
                    m.next = "CHILDREN"
        with m.If(self.clear):
            m.d.sync += size.eq(0)
        return m
