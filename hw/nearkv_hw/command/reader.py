"""Reads of device lines that come back in order."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..interfaces import LINE_ADDRESS_BITS, TENANT_BITS, FabricPort, ReadRequest, ReadResponse
from .records import Run


class LineReader(wiring.Component):
    """Shares a fabric port between clients and gives each its lines in the order in which it asked.

    Parameters
    ----------
    depths : for each client the lines that it may have under way or waiting, powers of two; a client with a
        lower index goes first.

    Members
    -------
    request : In(stream(ReadRequest)).array : lines of the whole device.
    response : Out(stream(ReadResponse)).array : the answers, in order.
    fabric : Out(FabricPort) : answers are always taken.

    One request and one answer per cycle. A client that does not take its answers stops only itself: a line is
    asked for when there is a slot for its answer.
    """

    def __init__(self, *, depths):
        if not depths or any(d < 2 or d & (d - 1) or d > 256 for d in depths):
            raise ValueError(f"depths must be powers of two from 2 to 256, not {depths!r}")
        self.depths = tuple(depths)
        super().__init__(
            {
                "request": In(stream.Signature(ReadRequest)).array(len(depths)),
                "response": Out(stream.Signature(ReadResponse)).array(len(depths)),
                "fabric": Out(FabricPort()),
            }
        )

    def elaborate(self, platform):
        m = Module()
        fabric = self.fabric
        slot_bits = ceil_log2(max(self.depths))
        client_bits = max(1, ceil_log2(len(self.depths)))

        line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        tenant = Signal(TENANT_BITS, reset_less=True)
        slot = Signal(slot_bits, reset_less=True)
        client = Signal(client_bits, reset_less=True)
        valid = Signal()
        free = Signal()
        m.d.comb += [
            free.eq(~valid | fabric.request.ready),
            fabric.request.valid.eq(valid),
            fabric.request.payload.line.eq(line),
            fabric.request.payload.tenant.eq(tenant),
            fabric.request.payload.id.eq(Cat(slot, client)),
            fabric.response.ready.eq(1),
        ]
        with m.If(free):
            m.d.sync += valid.eq(0)

        before = Const(0, 1)  # whether a client of lower index asks
        for n, depth in enumerate(self.depths):
            request = self.request[n]
            buffer = m.submodules[f"buffer{n}"] = _Reorder(depth=depth)
            asks = request.valid & buffer.room
            taken = Signal(name=f"taken{n}")
            m.d.comb += [
                request.ready.eq(free & buffer.room & ~before),
                taken.eq(free & asks & ~before),
                buffer.take.eq(taken),
                buffer.arrive.eq(
                    fabric.response.valid & (fabric.response.payload.id[slot_bits:][:client_bits] == n)
                ),
                buffer.arrive_slot.eq(fabric.response.payload.id),
                buffer.arrived.data.eq(fabric.response.payload.data),
                buffer.arrived.fault.eq(fabric.response.payload.fault),
            ]
            wiring.connect(m, buffer.o, wiring.flipped(self.response[n]))
            with m.If(taken):
                m.d.sync += [
                    valid.eq(1),
                    line.eq(request.payload.line),
                    tenant.eq(request.payload.tenant),
                    slot.eq(buffer.slot),
                    client.eq(n),
                ]
            before = before | asks
        return m


class _Reorder(wiring.Component):
    """Slots for answers, given out and emptied in order, filled in any order."""

    def __init__(self, *, depth):
        self.depth = depth
        bits = ceil_log2(depth)
        super().__init__(
            {
                "room": Out(1),
                "slot": Out(bits),
                "take": In(1),
                "arrive": In(1),
                "arrive_slot": In(bits),
                "arrived": In(ReadResponse),
                "o": Out(stream.Signature(ReadResponse)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = ceil_log2(self.depth)
        m.submodules.store = store = memory.Memory(shape=ReadResponse, depth=self.depth, init=[])
        write, read = store.write_port(), store.read_port()
        head, tail = Signal(bits + 1), Signal(bits + 1)
        filled = Signal(self.depth)
        valid, pop = Signal(), Signal()
        m.d.comb += [
            self.room.eq((tail - head)[: bits + 1] != self.depth),
            self.slot.eq(tail),
            write.en.eq(self.arrive),
            write.addr.eq(self.arrive_slot),
            write.data.eq(self.arrived),
            pop.eq(filled.bit_select(head[:bits], 1) & (~valid | self.o.ready)),
            read.en.eq(pop),
            read.addr.eq(head),
            self.o.valid.eq(valid),
            self.o.payload.eq(read.data),
        ]
        set_mask = Mux(self.arrive, 1 << self.arrive_slot, 0)
        clear_mask = Mux(pop, 1 << head[:bits], 0)
        m.d.sync += filled.eq((filled | set_mask) & ~clear_mask)
        with m.If(self.take):
            m.d.sync += tail.eq(tail + 1)
        with m.If(pop):
            m.d.sync += [head.eq(head + 1), valid.eq(1)]
        with m.Elif(self.o.ready):
            m.d.sync += valid.eq(0)
        return m


class RunIssue(wiring.Component):
    """Turns runs of lines into requests, one per cycle.

    Members
    -------
    i : In(stream(Run)) : the runs; an empty one asks for nothing.
    o : Out(stream(ReadRequest)).

    A run takes one cycle more than it has lines, so that the next one's first line is asked for right behind.
    """

    i: In(stream.Signature(Run))
    o: Out(stream.Signature(ReadRequest))

    def elaborate(self, platform):
        m = Module()
        run = Signal(Run, reset_less=True)
        active = Signal()
        more = Signal()
        m.d.comb += [
            more.eq(run.count != 0),
            self.o.valid.eq(active & (more | run.extra)),
            self.o.payload.line.eq(Mux(more, run.line, run.extra_line)),
            self.o.payload.tenant.eq(run.tenant),
            self.i.ready.eq(~active),
        ]
        with m.If(~active):
            m.d.sync += [active.eq(self.i.valid), run.eq(self.i.payload)]
        with m.Elif(self.o.ready | ~self.o.valid):
            with m.If(more):
                m.d.sync += [run.line.eq(run.line + 1), run.count.eq(run.count - 1)]
                m.d.sync += active.eq((run.count != 1) | run.extra)
            with m.Else():
                m.d.sync += active.eq(0)
        return m
