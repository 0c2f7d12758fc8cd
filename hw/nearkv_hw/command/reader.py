"""Reads of device lines that come back in order."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..abi.lines import LINE_BITS
from ..common.queue import Queue
from ..common.reorder import SmallReorder
from ..interfaces import LINE_ADDRESS_BITS, TENANT_BITS, FabricPort, Fault, Snoop
from .cache import LineCache, check_size
from .records import Run, WalkLine, WalkRead

_ANSWER = data.StructLayout({"data": LINE_BITS, "fault": Fault})
"""What a slot holds of a `WalkLine`; whether it is the last of its run is known before."""


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

    request_cycles = 1 + LineCache.latency_cycles
    answer_cycles = SmallReorder.latency_cycles
    hit_latency_cycles = request_cycles + answer_cycles

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
                "place": cache.place_bits,
                "tenant": TENANT_BITS,
                "slot": slot_bits,
                "client": client_bits,
                "cached": 1,
            }
        )
        # Two places, so that clients need not know in the same cycle whether the line ahead has left.
        m.submodules.asked = asked = Queue(shape=tag_shape, depth=2)
        first, second = asked.o.payload, Signal(tag_shape, reset_less=True)
        second_valid, second_free = Signal(), Signal()
        hit, hit_taken, reads = Signal(), Signal(), Signal()
        request, response = self.fabric.request, self.fabric.response
        keep = second.cached & cache.free
        m.d.comb += [
            hit.eq(second_valid & second.cached & cache.hit),
            reads.eq(request.valid & request.ready),
            second_free.eq(~second_valid | hit_taken | reads),
            asked.o.ready.eq(second_free),
            cache.look.eq(asked.o.valid & second_free),
            cache.line.eq(first.line),
            cache.tenant.eq(first.tenant),
            cache.at.eq(first.place),
            cache.reserve.eq(reads & keep),
            request.valid.eq(second_valid & ~hit),
            request.payload.line.eq(second.line),
            request.payload.tenant.eq(second.tenant),
            request.payload.id.eq(Cat(second.slot, second.client, keep, cache.place)),
            response.ready.eq(1),
        ]
        with m.If(second_free):
            m.d.sync += [second_valid.eq(asked.o.valid), second.eq(first)]
        with m.If(reads & second.cached):
            m.d.sync += self.table_misses.eq(self.table_misses + 1)
        with m.If(hit_taken):
            m.d.sync += self.table_hits.eq(self.table_hits + 1)

        # What arrives: from memory, or else from the chip.
        answered = response.payload
        answer_slot, answer_client = answered.id[:slot_bits], answered.id[slot_bits:][:client_bits]
        arrived = Signal(_ANSWER)
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
            buffer = m.submodules[f"buffer{n}"] = SmallReorder(shape=_ANSWER, depth=depth)
            asks = wanted.valid & buffer.room
            answers = response.valid & (answer_client == n)
            m.d.comb += [
                wanted.ready.eq(asked.i.ready & buffer.room & ~before),
                buffer.take.eq(wanted.valid & wanted.ready),
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
            self._offer(m, buffer, wanted.payload.last, self.response[n])
            with m.If(asks & ~before):
                m.d.comb += [
                    asked.i.valid.eq(1),
                    asked.i.payload.line.eq(wanted.payload.line),
                    asked.i.payload.place.eq(cache.place_of(wanted.payload.line)),
                    asked.i.payload.tenant.eq(wanted.payload.tenant),
                    asked.i.payload.slot.eq(buffer.slot),
                    asked.i.payload.client.eq(n),
                    asked.i.payload.cached.eq(int(n < self.cached)),
                ]
            before = before | asks
        return m

    def _offer(self, m, buffer, last, response):
        """Offers the answers in `buffer`, each with the `last` that its slot was taken with."""
        lasts = Signal(buffer.depth)
        taken = 1 << buffer.slot
        with m.If(buffer.take):
            m.d.sync += lasts.eq(Mux(last, lasts | taken, lasts & ~taken))
        m.d.comb += [
            response.valid.eq(buffer.o.valid),
            buffer.o.ready.eq(response.ready),
            response.payload.data.eq(buffer.o.payload.data.data),
            response.payload.fault.eq(buffer.o.payload.data.fault),
            response.payload.last.eq(lasts.bit_select(buffer.o.payload.slot, 1)),
        ]


class RunIssue(wiring.Component):
    """Turns runs of lines into requests, one per cycle.

    Members
    -------
    i : In(stream(Run)) : the runs; an empty one asks for nothing.
    o : Out(stream(WalkRead)) : `last` with the last line of each run.
    stop : In(1) : the run under way ends with the line after the one that is offered now.

    Latency is 1 cycle. A run takes one cycle more than it has lines.
    """

    latency_cycles = 1

    i: In(stream.Signature(Run))
    o: Out(stream.Signature(WalkRead))
    stop: In(1)

    def elaborate(self, platform):
        m = Module()
        run = Signal(Run, reset_less=True)
        active, last, taken = Signal(), Signal(), Signal()
        given = self.i.payload
        m.d.comb += [
            self.o.valid.eq(active),
            self.o.payload.line.eq(run.line),
            self.o.payload.tenant.eq(run.tenant),
            self.o.payload.last.eq(last),
            taken.eq(active & self.o.ready),
            self.i.ready.eq(~active),
        ]
        with m.If(~active):
            m.d.sync += [
                active.eq(self.i.valid & (given.count != 0)),
                run.eq(given),
                last.eq(given.count == 1),
            ]
        with m.Elif(taken):
            m.d.sync += [
                active.eq(~last),
                run.line.eq(run.line + 1),
                run.count.eq(run.count - 1),
                last.eq(run.count == 2),
            ]
            with m.If(self.stop):
                m.d.sync += [run.count.eq(1), last.eq(1)]
        return m
