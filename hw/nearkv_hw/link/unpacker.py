"""Slots of received flits to messages and their data, in queues that credits protect."""

from operator import or_

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import (
    DATA_CODE,
    FLIT_HEADER,
    MAX_MESSAGES,
    SLOT_BITS,
    SLOTS,
    Side,
    formats,
)
from ..common.buffer import Buffer
from ..common.queue import Queue
from ..common.trees import one_hot_select, reduce_tree
from ..structs import layout_of
from .lanes import LaneQueue
from .lines import LINE, Lines
from .packer import DATA_KIND, HEADER_WIDTH, SENT
from .receiver import PLAN, TAKEN
from .slots import chunk_of, slot_of, take

PLACES = {"req": 64, "rwd": 32, "ndr": 64, "drs": 64}
"""Messages of a kind that a receiver holds, as many as it gives credits for."""


def all_places(places=None, least=4):
    """The messages of each kind that a receiver holds; ValueError for what cannot be."""
    chosen = {**PLACES, **(places or {})}
    for name, count in chosen.items():
        if name not in PLACES or not isinstance(count, int) or count < least or count & (count - 1):
            raise ValueError(
                f"places must be powers of two of at least {least} for {', '.join(PLACES)}, "
                f"not {name}={count!r}"
            )
    return chosen


def deliver(m, unpacker, queues, whole):
    """Joins headers with their lines, offers messages, and tells of places that are free again.

    Parameters
    ----------
    unpacker : the component, with members as `Unpacker` has them.
    queues : of each kind the `LaneQueue` of its headers, in the order of the abi.
    whole : stream of lines, each behind its header or with it.
    """
    overflows = []
    for name, queue in queues.items():
        overflows.append(queue.level + queue.push > unpacker.places[name])
        out = m.submodules[f"{name}_out"] = Buffer(shape=SENT[unpacker.sender][name])
        wiring.connect(m, out.o, wiring.flipped(getattr(unpacker, name)))
        there = queue.level != 0
        if name == DATA_KIND[unpacker.sender]:
            m.submodules.lines = lines = Queue(shape=LINE, depth=unpacker.places[name])
            m.d.comb += [
                lines.i.valid.eq(whole.valid),
                Value.cast(lines.i.payload).eq(Value.cast(whole.payload)),
            ]
            overflows.append(whole.valid & ~lines.i.ready)
            there = there & lines.o.valid
            m.d.comb += [
                Value.cast(out.i.payload.header).eq(queue.o[0]),
                out.i.payload.data.eq(lines.o.payload.data),
                lines.o.ready.eq(out.i.valid & out.i.ready),
            ]
            if name == "rwd":
                m.d.comb += out.i.payload.enable.eq(lines.o.payload.enable)
        else:
            m.d.comb += Value.cast(out.i.payload).eq(queue.o[0])
        m.d.comb += [
            out.i.valid.eq(there),
            queue.pop.eq(out.i.valid & out.i.ready),
            getattr(unpacker, f"{name}_freed").eq(queue.pop),
        ]
    m.d.sync += unpacker.overflow.eq(unpacker.overflow | reduce_tree(overflows, or_))


class Unpacker(wiring.Component):
    """Takes messages out of slots, puts lines together from chunks, and joins headers with their lines.

    Parameters
    ----------
    side : whose receiver.
    places : messages of each kind that it holds; powers of two of at least 4.

    Members
    -------
    i : In(stream(TAKEN), always_ready) : protocol and all-data flits in sequence.
    ndr, drs (host) or req, rwd (device) : Out(stream) : messages, in the order of their kind.
    {kind}_freed : Out(1) : a place of that kind is free again.
    overflow : Out(1) : a message came for which there was no place.

    Latency is `latency_cycles` from a flit to its messages, `data_latency_cycles` to those whose line ends in
    it. Throughput is a flit per cycle, and a message of each kind per cycle.
    """

    latency_cycles = 3
    data_latency_cycles = 5

    def __init__(self, *, side, places=None):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        self.side = side
        self.sender = Side.HOST if side is Side.DEVICE else Side.DEVICE
        self.places = all_places(places)
        super().__init__(
            {
                "i": In(stream.Signature(TAKEN, always_ready=True)),
                **{name: Out(stream.Signature(shape)) for name, shape in SENT[self.sender].items()},
                **{f"{name}_freed": Out(1) for name in SENT[self.sender]},
                "overflow": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        queues = {name: self._messages(m, name) for name in SENT[self.sender]}
        deliver(m, self, queues, self._lines(m))
        return m

    def _messages(self, m, name):
        """The queue of one kind of messages, filled from a flit in two steps."""
        flit = self.i.payload.flit
        header = Signal(layout_of(FLIT_HEADER), name=f"{name}_flit_header")
        m.d.comb += header.as_value().eq(flit[: FLIT_HEADER.width])
        most, width = MAX_MESSAGES[name], HEADER_WIDTH[name]
        found = []  # (it is there, message) in their order
        for n in range(SLOTS):
            of_slot = {}
            for slot_format in formats(self.sender)[min(n, 1)]:
                chosen = Signal(name=f"{name}_slot{n}_{slot_format.name}")
                m.d.comb += chosen.eq(header[f"slot{n}"] == slot_format.code)
                places = [place for place in slot_format.places if place.kind == name]
                for index, place in enumerate(places):
                    of_slot.setdefault(index, []).append((chosen, take(slot_of(flit, n), place)))
            for index, choices in sorted(of_slot.items()):
                message = Signal(width, name=f"{name}_slot{n}_{index}")
                m.d.comb += message.eq(one_hot_select(*zip(*choices, strict=True)))
                found.append((message[0], message))
        valid = self.i.valid & ~self.i.payload.all_data
        queue = m.submodules[f"{name}_queue"] = LaneQueue(shape=width, depth=self.places[name], pushes=most)
        count = Signal(range(most + 1), name=f"{name}_count")
        m.d.sync += count.eq(0)
        messages = [Signal(width, name=f"{name}_new{n}", reset_less=True) for n in range(most)]
        left = [there for there, _ in found]
        firsts = []
        for n in range(most):
            first = Signal(len(found), name=f"{name}_first{n}")
            taken, chosen = left[0], [left[0]]
            for bit in left[1:]:
                chosen.append(bit & ~taken)
                taken = taken | bit
            m.d.comb += first.eq(Cat(chosen))
            left = [bit & ~one for bit, one in zip(left, first, strict=True)]
            firsts.append(first)
        with m.If(valid):
            m.d.sync += [
                count.eq(reduce_tree([first.any() for first in firsts], lambda a, b: a + b)),
                *(
                    message.eq(one_hot_select(list(first), [bits for _, bits in found]))
                    for message, first in zip(messages, firsts, strict=True)
                ),
            ]
        m.d.comb += [
            queue.push.eq(count),
            *(Value.cast(queue.i[n]).eq(message) for n, message in enumerate(messages)),
        ]
        return queue

    def _lines(self, m):
        """The stream of lines, two steps behind the flit."""
        m.submodules.joiner = lines = Lines(enables=self.side is Side.DEVICE)
        joined = lines.i.payload
        plan = self.i.payload
        header = Signal(layout_of(FLIT_HEADER), name="data_flit_header")
        m.d.comb += header.as_value().eq(plan.flit[: FLIT_HEADER.width])
        slots = [chunk_of(plan.flit, n) for n in range(SLOTS)]
        holds = [header[f"slot{n}"] == DATA_CODE for n in range(1, SLOTS)]
        # Chunks of a flit with a header: those of slots 1 to 3 that hold data, in their order.
        first = Mux(holds[0], slots[1], Mux(holds[1], slots[2], slots[3]))
        second = Mux(holds[0] & holds[1], slots[2], slots[3])
        chunks = [Signal(SLOT_BITS, name=f"chunk{n}", reset_less=True) for n in range(SLOTS)]
        kept = Signal(
            data.StructLayout({name: TAKEN[name].shape for name in PLAN}),
            reset_less=True,
        )
        there = Signal()
        m.d.sync += there.eq(self.i.valid)
        with m.If(self.i.valid):
            m.d.sync += [
                *(kept[name].eq(plan[name]) for name, _ in kept.shape()),
                chunks[0].eq(Mux(plan.all_data, slots[0], first)),
                chunks[1].eq(Mux(plan.all_data, slots[1], second)),
                chunks[2].eq(Mux(plan.all_data, slots[2], slots[3])),
                chunks[3].eq(slots[3]),
            ]
        m.d.comb += [
            *(joined[name].eq(kept[name]) for name, _ in kept.shape()),
            *(joined.chunks[n].eq(chunk) for n, chunk in enumerate(chunks)),
            lines.i.valid.eq(there),
        ]
        return lines.o
