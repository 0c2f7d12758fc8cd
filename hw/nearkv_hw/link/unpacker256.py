"""Beats of received 256-byte flits to messages and their data, in queues that credits protect."""

from itertools import pairwise
from operator import add, or_

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import LINE_CHUNKS, SLOT_BITS, SLOTS, Side
from ..abi.flits256 import (
    BEAT_BITS,
    BEATS,
    CREDIT_BITS,
    CREDIT_NAMES,
    DRS_256,
    FORMAT,
    FORMAT_BITS,
    G_MESSAGES,
    GROUP_MESSAGES,
    H_MESSAGES,
    LAST_SLOT,
    MAX_BACKLOG,
    MAX_H_BACKLOG,
    MESSAGES,
    PHY_BITS,
    RWD_256,
    kinds,
)
from ..common.trees import one_hot_select, reduce_tree
from .lanes import LaneQueue
from .lines import Lines
from .packer import SENT
from .packer256 import CREDITS_256
from .slots import converted
from .stages import stage
from .unpacker import PLACES, all_places, deliver

BEAT = data.StructLayout({"slots": BEAT_BITS, "index": range(BEATS)})
"""A quarter of a flit that was accepted."""
PLACES_256 = {**PLACES, "rwd": 64}
"""Messages of a kind that a receiver holds, if not told otherwise: what keeps the link full of each."""
_SLOTS = 1 + SLOTS
"""Places for headers in a beat: slot 0 of a flit, and the others."""
_LINES = 16
"""Lines whose chunks are owed; more than `MAX_BACKLOG` chunks can be."""


class Unpacker256(wiring.Component):
    """Takes messages out of slots, puts lines together from chunks, and joins headers with their lines.

    Parameters
    ----------
    side : whose receiver.
    places : messages of each kind that it holds; powers of two of at least 8.

    Members
    -------
    i : In(stream(BEAT), always_ready) : beats of flits in sequence, all four of each.
    ndr, drs (host) or req, rwd (device) : Out(stream) : messages, in the order of their kind.
    {kind}_freed : Out(1) : a place of that kind is free again.
    credits : Out(CREDITS_256) : what the flit returns, with its last beat, zero else.
    malformed : Out(1) : a beat against the rules: a format that is not the sender's, a slot that is not
        packed from its first place on, more messages or slots of data owed than may be, extended metadata.
    overflow : Out(1) : a message came for which there was no place.

    Latency is `latency_cycles` from a beat to its messages, `data_latency_cycles` to those whose line ends in
    it. Throughput is a beat per cycle, and a message of each kind per cycle.
    """

    latency_cycles = 4
    data_latency_cycles = 6

    def __init__(self, *, side, places=None):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        self.side = side
        self.sender = Side.HOST if side is Side.DEVICE else Side.DEVICE
        self.places = all_places({**PLACES_256, **(places or {})}, least=8)
        super().__init__(
            {
                "i": In(stream.Signature(BEAT, always_ready=True)),
                **{name: Out(stream.Signature(shape)) for name, shape in SENT[self.sender].items()},
                **{f"{name}_freed": Out(1) for name in SENT[self.sender]},
                "credits": Out(CREDITS_256),
                "malformed": Out(1),
                "overflow": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        there, looked = stage(m, self.i.valid, self._look(m), "looked")
        m.d.sync += self.credits.eq(0)
        with m.If(there & looked["ends"]):
            fields = looked[f"body{SLOTS}"]
            m.d.sync += [
                self.credits[name].eq(fields[n * CREDIT_BITS : (n + 1) * CREDIT_BITS])
                for n, name in enumerate(CREDIT_NAMES)
            ]
        there, taken = stage(m, there, self._accept(m, there, looked), "taken")
        queues = {name: self._messages(m, there, taken, name) for name in kinds(self.sender)}
        deliver(m, self, queues, self._lines(m, there, taken))
        return m

    def _look(self, m):
        """Slots as if each were by itself: what it would hold if it is no data.

        Place 0 is slot 0 of a flit; the others follow it, so that they are slots 1 to 3 of a flit's first
        beat and slots 0 to 3 of the others. Beyond the last slot they have no meaning.
        """
        begins, ends = self.i.payload.index == 0, self.i.payload.index == BEATS - 1
        slots = [self.i.payload.slots[n * SLOT_BITS : (n + 1) * SLOT_BITS] for n in range(SLOTS)]
        bodies = [slots[0][PHY_BITS:]]
        bodies += [Mux(begins, slots[min(n + 1, SLOTS - 1)], slots[n]) for n in range(SLOTS)]
        values = {"begins": begins, "ends": ends}
        wrong, exists = [], [begins, *(Cat(n < SLOTS - begins - ends) for n in range(SLOTS))]
        for n, bits in enumerate(bodies):
            body = Signal(SLOT_BITS, name=f"body_{n}")
            m.d.comb += body.eq(bits)
            values[f"body{n}"] = body
            known = []
            for kind in kinds(self.sender):
                chosen = Signal(name=f"{kind}_{n}")
                most = (G_MESSAGES if n else H_MESSAGES)[kind]
                valids = [_message(body, kind, place)[0] for place in range(most)]
                m.d.comb += chosen.eq((body[:FORMAT_BITS] == FORMAT[kind]) & exists[n])
                known.append(chosen)
                values[f"{kind}{n}"] = Cat(valids) & chosen.replicate(most)
                values[f"{kind}_count{n}"] = Mux(chosen, _count(valids), 0)
                holes = Cat(~before & after for before, after in pairwise(valids))
                wrong.append((n, chosen & holes.any()))
                if kind == "drs":
                    at = DRS_256.offset("trailer")
                    metadata = Cat(_message(body, kind, place)[at] for place in range(most))
                    wrong.append((n, (metadata & values[f"{kind}{n}"]).any()))
            wrong.append((n, exists[n] & ~Cat(known).any() & body.any()))
        for n in range(_SLOTS):
            values[f"wrong{n}"] = reduce_tree([bit for at, bit in wrong if at == n], or_)
        return values

    def _accept(self, m, there, seen):
        """What is data, by the chunks owed; what the other slots have."""
        plain, kind = kinds(self.sender)
        pending = Signal(range(2 * MAX_BACKLOG))
        headers = [seen[f"{kind}{n}"] for n in range(_SLOTS)]
        owed = [pending > n for n in range(SLOTS)]
        # Behind a data header everything is data.
        behind = [headers[0].any()]
        for n in range(SLOTS):
            behind.append(behind[n] | (headers[n + 1].any() & ~owed[n]))
        holds = [owed[n] | behind[n] for n in range(SLOTS)]
        free = [Const(1), *(~hold for hold in holds)]
        counts = {
            name: [
                seen[f"{name}_count{n}"] & free[n].replicate(len(seen[f"{name}_count{n}"]))
                for n in range(_SLOTS)
            ]
            for name in (plain, kind)
        }
        slots = Signal(range(SLOTS + 1))
        m.d.comb += slots.eq(SLOTS - seen["begins"] - seen["ends"])
        data_slots = [holds[n] & (n < slots) for n in range(SLOTS)]
        first, count = Signal(range(SLOTS + 1)), Signal(range(SLOTS + 1))
        gap = Signal(range(SLOTS + 1))  # slots with headers between the data of before and the new data
        m.d.comb += [
            first.eq(Mux(pending < slots, pending, slots)),
            count.eq(_count(Cat(data_slots))),
            gap.eq(slots - count),
        ]
        # One slot has data headers: behind it all is data.
        lines, partial = Signal(range(GROUP_MESSAGES["drs"] + 1)), Signal()
        m.d.comb += lines.eq(reduce_tree(counts[kind], or_))
        if kind == "rwd":
            at = RWD_256.offset("trailer")
            trailers = [_message(seen[f"body{n}"], kind, 0)[at] for n in range(_SLOTS)]
            m.d.comb += partial.eq(one_hot_select([count.any() for count in counts[kind]], trailers).any())
        with m.If(there):
            m.d.sync += pending.eq(pending + (lines << 2) + partial - count)

        broken = [
            headers[0].any() & (pending > MAX_H_BACKLOG),
            *(seen[f"wrong{n}"] & free[n] for n in range(_SLOTS)),
        ]
        with m.If((there & reduce_tree(broken, or_)) | (pending > MAX_BACKLOG)):
            m.d.sync += self.malformed.eq(1)

        values = {"first": first, "count": count, "gap": gap}
        self._partial = there & (lines != 0), partial
        values |= {f"body{n}": seen[f"body{n}"] for n in range(_SLOTS)}
        for name, slots_of in counts.items():
            values |= {f"{name}_count{n}": slots_of[n] for n in range(_SLOTS)}
        return values

    def _messages(self, m, there, taken, name):
        """The queue of one kind of messages."""
        here, inside = MESSAGES[name]
        most = 1 if name == "rwd" else GROUP_MESSAGES[name]  # behind a data header is its data
        queue = LaneQueue(shape=here.width, depth=self.places[name], pushes=most)
        m.submodules[f"{name}_queue"] = queue
        before = [Const(0)]  # messages in the slots before
        for n in range(_SLOTS):
            total = Signal(range(GROUP_MESSAGES[name] + 1), name=f"{name}_before{n + 1}")
            m.d.comb += total.eq(reduce_tree([taken[f"{name}_count{i}"] for i in range(n + 1)], add))
            before.append(total)
        m.d.comb += queue.push.eq(Mux(there, before[-1], 0))
        of_last = Signal.like(before[-1], name=f"{name}_of_last")  # beat
        with m.If(there):
            m.d.sync += of_last.eq(before[-1])
            with m.If(before[-1] + of_last > GROUP_MESSAGES[name]):
                m.d.sync += self.malformed.eq(1)
        for j in range(most):
            chosen, bits = [], []
            for n in range(_SLOTS):
                for place in range((G_MESSAGES if n else H_MESSAGES)[name]):
                    if place <= j and (n or place == j):
                        chosen.append((taken[f"{name}_count{n}"] > place) & (before[n] == j - place))
                        bits.append(_message(taken[f"body{n}"], name, place))
            message = Signal(inside.width, name=f"{name}_new{j}")
            m.d.comb += [
                message.eq(one_hot_select(chosen, bits)),
                Value.cast(queue.i[j]).eq(converted(message, inside, here)),
            ]
        return queue

    def _lines(self, m, there, taken):
        """The stream of lines."""
        enables = self.side is Side.DEVICE
        m.submodules.joiner = lines = Lines(enables=enables)
        joined = lines.i.payload
        at, partial = Signal(range(LINE_CHUNKS + 1)), Signal()  # of the line whose chunks come next
        if enables:
            m.submodules.partials = partials = LaneQueue(shape=1, depth=_LINES)
            m.d.comb += [
                partials.push.eq(self._partial[0]),
                partials.i[0].eq(self._partial[1]),
                partials.pop.eq(lines.i.valid & joined.ends),
                partial.eq(partials.o[0]),
            ]
        bodies = [taken[f"body{n}"] for n in range(1, _SLOTS)]
        for n in range(SLOTS):
            chunk = Signal(SLOT_BITS, name=f"chunk{n}")
            m.d.comb += chunk.eq(bodies[n])
            for gap in range(1, SLOTS - n):
                with m.If((taken["first"] <= n) & (taken["gap"] == gap)):
                    m.d.comb += chunk.eq(bodies[n + gap])
            m.d.comb += joined.chunks[n].eq(chunk)
        count = taken["count"]
        total, whole = Signal(range(2 * LINE_CHUNKS + 1)), Signal(range(LINE_CHUNKS + 2))
        ends = total >= whole
        m.d.comb += [
            total.eq(at + count),
            whole.eq(LINE_CHUNKS + partial),
            lines.i.valid.eq(there & (count != 0)),
            joined.position.eq(at),
            joined.count.eq(count - joined.enables),
            joined.ends.eq(ends),
            joined.whole.eq(at == LINE_CHUNKS),
            joined.enables.eq(partial & (total > LINE_CHUNKS)),
            joined.enables_at.eq(LINE_CHUNKS - at),
        ]
        with m.If(lines.i.valid):
            m.d.sync += at.eq(Mux(ends, total - whole, total))
        return lines.o


def _message(body, kind, place):
    """The message at a place of a slot."""
    width = MESSAGES[kind][1].width
    return body[FORMAT_BITS + place * width : FORMAT_BITS + (place + 1) * width]


def _count(bits):
    return reduce_tree(list(bits), add)


assert LAST_SLOT == SLOTS - 1
