"""Reads of device lines that come back in order."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..interfaces import LINE_ADDRESS_BITS, TENANT_BITS, FabricPort, Fault, Snoop
from .cache import LineCache, check_size
from .records import Run, WalkLine, WalkRead


class LineReader(wiring.Component):
    """Shares a fabric port between clients and gives each its lines in the order in which it asked.

    Parameters
    ----------
    depths : for each client the lines that it may have under way or waiting, powers of two; a client with a
        lower index goes first.
    cached : how many clients, from the first on, have their lines kept on chip.
    lines : lines kept on chip, a power of two from 2 to 512.
    snoops : writes of memory that may happen in a cycle, at least 1.

    Members
    -------
    request : In(stream(WalkRead)).array : lines of the whole device.
    response : Out(stream(WalkLine)).array : the answers, in order.
    fabric : Out(FabricPort) : answers are always taken.
    snoops : In(Snoop).array(snoops), flush : In(1) : what is on chip and no longer true, see `LineCache`.
    table_hits, table_misses : Out(64) : lines of the cached clients, found on chip and read from memory.

    A line on chip is there `hit_latency_cycles` after its request; any other is asked for `request_cycles`
    after the request and there `answer_cycles` after the fabric's answer. One request and one answer per
    cycle; a hit waits while memory answers a cached client. A client that does not take its answers stops
    only itself: a line is asked for when there is a slot for its answer.
    """

    hit_latency_cycles = 3
    request_cycles = 2
    answer_cycles = 1

    def __init__(self, *, depths, cached, lines, snoops):
        if not depths or any(d < 2 or d & (d - 1) or d > 256 for d in depths):
            raise ValueError(f"depths must be powers of two from 2 to 256, not {depths!r}")
        if not isinstance(cached, int) or not 1 <= cached <= len(depths):
            raise ValueError(f"cached must be from 1 to the {len(depths)} clients, not {cached!r}")
        check_size(lines, snoops)
        self.depths = tuple(depths)
        self.cached = cached
        self.lines = lines
        super().__init__(
            {
                "request": In(stream.Signature(WalkRead)).array(len(depths)),
                "response": Out(stream.Signature(WalkLine)).array(len(depths)),
                "fabric": Out(FabricPort()),
                "snoops": In(Snoop).array(snoops),
                "flush": In(1),
                "table_hits": Out(64),
                "table_misses": Out(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.cache = cache = LineCache(lines=self.lines, snoops=len(self.snoops))
        slot_bits = ceil_log2(max(self.depths))
        client_bits = max(1, ceil_log2(len(self.depths)))
        m.d.comb += [cache.flush.eq(self.flush)]
        m.d.comb += [own.eq(given) for own, given in zip(cache.snoops, self.snoops, strict=True)]

        # A request is looked up, and asked for when it is not on chip.
        tag_shape = data.StructLayout(
            {
                "line": LINE_ADDRESS_BITS,
                "tenant": TENANT_BITS,
                "slot": slot_bits,
                "client": client_bits,
                "cached": 1,
            }
        )
        first, second = Signal(tag_shape, reset_less=True), Signal(tag_shape, reset_less=True)
        first_valid, second_valid = Signal(), Signal()
        first_free, second_free = Signal(), Signal()
        hit, hit_taken, reads = Signal(), Signal(), Signal()
        request, response = self.fabric.request, self.fabric.response
        keep = second.cached & cache.free
        m.d.comb += [
            hit.eq(second_valid & second.cached & cache.hit),
            reads.eq(request.valid & request.ready),
            second_free.eq(~second_valid | hit_taken | reads),
            first_free.eq(~first_valid | second_free),
            cache.step.eq(first_valid & second_free),
            cache.reserve.eq(reads & keep),
            request.valid.eq(second_valid & ~hit),
            request.payload.line.eq(second.line),
            request.payload.tenant.eq(second.tenant),
            request.payload.id.eq(Cat(second.slot, second.client, keep, cache.place)),
            response.ready.eq(1),
        ]
        with m.If(second_free):
            m.d.sync += [second_valid.eq(first_valid), second.eq(first)]
        with m.If(first_free):
            m.d.sync += first_valid.eq(0)
        with m.If(reads & second.cached):
            m.d.sync += self.table_misses.eq(self.table_misses + 1)
        with m.If(hit_taken):
            m.d.sync += self.table_hits.eq(self.table_hits + 1)

        # What arrives: from memory, or else from the chip.
        answered = response.payload
        answer_slot, answer_client = answered.id[:slot_bits], answered.id[slot_bits:][:client_bits]
        arrived = Signal(WalkLine)
        m.d.comb += [
            hit_taken.eq(hit & ~(response.valid & (answer_client < self.cached))),
            arrived.data.eq(Mux(hit_taken, cache.data, answered.data)),
            arrived.fault.eq(Mux(hit_taken, Fault.NONE, answered.fault)),
            cache.fill.valid.eq(response.valid & answered.id[slot_bits + client_bits]),
            cache.fill.keep.eq(answered.fault == Fault.NONE),
            cache.fill.place.eq(answered.id[slot_bits + client_bits + 1 :]),
            cache.fill.data.eq(answered.data),
        ]

        before = Const(0, 1)  # whether a client of lower index asks
        for n, depth in enumerate(self.depths):
            wanted = self.request[n]
            buffer = m.submodules[f"buffer{n}"] = _Reorder(depth=depth)
            asks = wanted.valid & buffer.room
            taken = Signal(name=f"taken{n}")
            answers = response.valid & (answer_client == n)
            m.d.comb += [
                wanted.ready.eq(first_free & buffer.room & ~before),
                taken.eq(first_free & asks & ~before),
                buffer.take.eq(taken),
                buffer.last.eq(wanted.payload.last),
            ]
            if n < self.cached:
                hits = hit_taken & (second.client == n)
                m.d.comb += [
                    buffer.arrive.eq(answers | hits),
                    buffer.arrive_slot.eq(Mux(hits, second.slot, answer_slot)),
                    buffer.arrived.eq(arrived),
                ]
            else:
                m.d.comb += [
                    buffer.arrive.eq(answers),
                    buffer.arrive_slot.eq(answer_slot),
                    buffer.arrived.data.eq(answered.data),
                    buffer.arrived.fault.eq(answered.fault),
                ]
            wiring.connect(m, buffer.o, wiring.flipped(self.response[n]))
            with m.If(asks & ~before):
                m.d.comb += [
                    cache.line.eq(wanted.payload.line),
                    cache.tenant.eq(wanted.payload.tenant),
                    cache.look.eq(first_free),
                ]
            with m.If(taken):
                m.d.sync += [
                    first_valid.eq(1),
                    first.line.eq(wanted.payload.line),
                    first.tenant.eq(wanted.payload.tenant),
                    first.slot.eq(buffer.slot),
                    first.client.eq(n),
                    first.cached.eq(int(n < self.cached)),
                ]
            before = before | asks
        return m


class _Reorder(wiring.Component):
    """Slots for answers, given out and emptied in order, filled in any order; offered the cycle after."""

    def __init__(self, *, depth):
        self.depth = depth
        bits = ceil_log2(depth)
        super().__init__(
            {
                "room": Out(1),
                "slot": Out(bits),
                "take": In(1),
                "last": In(1),
                "arrive": In(1),
                "arrive_slot": In(bits),
                "arrived": In(WalkLine),
                "o": Out(stream.Signature(WalkLine)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = ceil_log2(self.depth)
        m.submodules.store = store = memory.Memory(shape=WalkLine, depth=self.depth, init=[])
        write, read = store.write_port(), store.read_port(domain="comb")
        head, tail = Signal(bits), Signal(bits)
        used, room = Signal(bits + 1), Signal(init=1)
        filled, lasts = Signal(self.depth), Signal(self.depth)
        taken, pop = Signal(self.depth), Signal()
        m.d.comb += [
            self.room.eq(room),
            self.slot.eq(tail),
            taken.eq(Mux(self.take, 1 << tail, 0)),
            write.en.eq(self.arrive),
            write.addr.eq(self.arrive_slot),
            write.data.eq(self.arrived),
            read.addr.eq(head),
            self.o.valid.eq(filled.bit_select(head, 1)),
            self.o.payload.eq(read.data),
            self.o.payload.last.eq(lasts.bit_select(head, 1)),
            pop.eq(self.o.valid & self.o.ready),
        ]
        set_mask = Mux(self.arrive, 1 << self.arrive_slot, 0)
        clear_mask = Mux(pop, 1 << head, 0)
        m.d.sync += [
            filled.eq((filled | set_mask) & ~clear_mask),
            lasts.eq(Mux(self.last, lasts | taken, lasts & ~taken)),
        ]
        with m.If(self.take):
            m.d.sync += tail.eq(tail + 1)
        with m.If(pop):
            m.d.sync += head.eq(head + 1)
        with m.If(self.take & ~pop):
            m.d.sync += [used.eq(used + 1), room.eq(used != self.depth - 1)]
        with m.Elif(pop & ~self.take):
            m.d.sync += [used.eq(used - 1), room.eq(1)]
        return m


class RunIssue(wiring.Component):
    """Turns runs of lines into requests, one per cycle.

    Members
    -------
    i : In(stream(Run)) : the runs; an empty one asks for nothing.
    o : Out(stream(WalkRead)) : `last` with the last line of each run.
    stop : In(1) : the run under way ends with the line after the one that is offered now.

    Latency is 1 cycle. Throughput is one line per cycle, across runs as well.
    """

    latency_cycles = 1

    i: In(stream.Signature(Run))
    o: Out(stream.Signature(WalkRead))
    stop: In(1)

    def elaborate(self, platform):
        m = Module()
        run = Signal(Run, reset_less=True)
        active, last, extra_next = Signal(), Signal(), Signal()
        taken = Signal()
        given = self.i.payload
        m.d.comb += [
            self.o.valid.eq(active),
            self.o.payload.line.eq(run.line),
            self.o.payload.tenant.eq(run.tenant),
            self.o.payload.last.eq(last),
            taken.eq(active & self.o.ready),
            self.i.ready.eq(~active | (taken & last)),
            extra_next.eq(run.extra & (run.count == 1)),
        ]
        with m.If(self.i.ready):
            empty = given.count == 0
            m.d.sync += [
                active.eq(self.i.valid & (~empty | given.extra)),
                run.eq(given),
                last.eq(Mux(given.extra, empty, given.count == 1)),
            ]
            with m.If(empty):
                m.d.sync += run.line.eq(given.extra_line)
        with m.Elif(taken):
            m.d.sync += [
                run.line.eq(Mux(extra_next, run.extra_line, run.line + 1)),
                run.count.eq(run.count - 1),
                last.eq(Mux(run.extra, run.count == 1, run.count == 2)),
            ]
            with m.If(self.stop & ~extra_next):
                m.d.sync += [run.count.eq(1), run.extra.eq(0), last.eq(1)]
        return m
