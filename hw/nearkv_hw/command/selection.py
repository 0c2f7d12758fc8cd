"""Which pages a job attends to: its candidates' bounds, and the best of them (docs/numerics.md, 13)."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In

from ..abi.descriptor import MAX_CANDIDATES
from ..common.arbiter import RoundRobin
from ..common.best import Best
from ..common.queue import Queue
from ..common.trees import one_hot_select
from ..interfaces import CANDIDATE_BITS, Bound
from .records import SelectorPort

_VALUE_BITS = Bound.as_shape()["value"].width
_KEY_BITS = _VALUE_BITS + CANDIDATE_BITS


class Selector(wiring.Component):
    """Takes the bounds of one job after the other, and tells which of its candidates are selected.

    A candidate is one of the pages that a job selects from, by its place among them, from 0. Units send a
    bound of each in every pass of bounds; the largest counts. The last candidate is always selected. Of the
    others the best are, in the total order of larger bound and smaller candidate: those of the last pass go
    into a heap as they come, and its least one is then the threshold.

    Parameters
    ----------
    units : attention units, at least 1.
    candidates : candidates that a job may have; a power of two from 2 to `MAX_CANDIDATES`.

    Members
    -------
    bounds : In(stream(Bound)).array(units)
    feed : In(SelectorPort) : the page feed, with

        start, select_pages : a job begins, that selects so many pages, at least 1; while `idle`.
        asked : a page was sent to a unit in a pass of bounds: a bound will come.
        idle : all bounds that were asked for are in their places.
        selected : how many candidates are selected; while `idle`.
        serve : a pass wants verdicts, from candidate 0 on; clear between passes.
        verdicts : a bit for each of the candidates in turn, once `idle`.

    Throughput is a bound per cycle, unless its page comes among the best, and a verdict per cycle, the first
    `verdict_cycles` after `serve`.
    """

    verdict_cycles = 3

    def __init__(self, *, units, candidates=MAX_CANDIDATES):
        if not isinstance(units, int) or units < 1:
            raise ValueError(f"units must be a positive integer, not {units!r}")
        check_candidates(candidates)
        self.units = units
        self.candidates = candidates
        super().__init__(
            {
                "bounds": In(stream.Signature(Bound)).array(units),
                "feed": In(SelectorPort()),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.best = best = Best(key_bits=_KEY_BITS, depth=self.candidates - 1)
        m.submodules.kept = kept = memory.Memory(
            shape=Bound.as_shape()["value"].shape, depth=self.candidates, init=[]
        )
        read, write = kept.read_port(), kept.write_port()
        under_way = Signal(range(self.candidates * 256))  # bounds asked for and not here
        others = Signal(range(self.candidates), reset_less=True)  # of the selected, but for the last one
        m.d.comb += read.en.eq(0)
        taken, item, item_valid, key, moves = self._take(m, read, write)
        highest, some = Signal(_KEY_BITS, reset_less=True), Signal()  # the last candidate so far
        offered, offered_valid = Signal(_KEY_BITS, reset_less=True), Signal()
        room = Signal()
        m.d.comb += [
            room.eq(~offered_valid | best.i.ready),
            moves.eq(~item_valid[-1] | ~item.last | room),
            best.i.valid.eq(offered_valid),
            best.i.payload.eq(offered),
            best.clear.eq(self.feed.start),
            best.capacity.eq(others),
            self.feed.idle.eq((under_way == 0) & ~item_valid.any() & ~offered_valid & best.idle),
            self.feed.selected.eq(Mux(some, best.size + 1, 0)),
        ]
        came = Signal()  # a cycle late: the choice of what is taken is long
        m.d.sync += [came.eq(taken), under_way.eq(under_way + self.feed.asked - came)]
        with m.If(room):
            m.d.sync += offered_valid.eq(0)
        with m.If(moves & item_valid[-1] & item.last):
            rises = ~some | (item.candidate > _candidate(highest))
            m.d.sync += [
                some.eq(1),
                offered_valid.eq(some),
                offered.eq(Mux(rises, highest, key)),
                highest.eq(Mux(rises, key, highest)),
            ]
        with m.If(self.feed.start):
            most = self.candidates - 1
            m.d.sync += [
                some.eq(0),
                others.eq(Mux(self.feed.select_pages > most, most, self.feed.select_pages - 1)),
            ]
        self._serve(m, read, highest, some, best, others)
        return m

    def _take(self, m, read, write):
        """Bounds come one after the other, and each meets what is known of its candidate.

        They move together: what was kept is read, comes into a register, and is written again.
        """
        items = [Signal(Bound, reset_less=True, name=f"item_{n}") for n in range(3)]
        valid, moves = Signal(len(items)), Signal()
        m.submodules.arbiter = arbiter = RoundRobin(count=self.units)
        m.submodules.come = come = Queue(shape=Bound, depth=2)
        given, taken, waits = come.o.payload, Signal(), Signal()
        m.d.comb += [
            arbiter.requests.eq(Cat(bound.valid for bound in self.bounds)),
            arbiter.accept.eq(come.i.ready),
            come.i.valid.eq(arbiter.grant.any()),
            come.i.payload.eq(
                one_hot_select(arbiter.grant, [bound.payload.as_value() for bound in self.bounds])
            ),
            # what is still to be written is not read
            waits.eq(
                Cat(
                    here & (item.candidate == given.candidate)
                    for here, item in zip(valid, items, strict=True)
                ).any()
            ),
            taken.eq(come.o.valid & moves & ~waits),
            come.o.ready.eq(taken),
            *(
                bound.ready.eq(granted & come.i.ready)
                for bound, granted in zip(self.bounds, arbiter.grant, strict=True)
            ),
        ]
        with m.If(taken):
            m.d.comb += [read.addr.eq(given.candidate), read.en.eq(1)]
        first, second, third = items
        before = Signal.like(read.data, reset_less=True)
        largest = Mux(second.first | (second.value > before), second.value, before)
        with m.If(moves):
            m.d.sync += [
                valid.eq(Cat(taken, valid)),
                first.eq(given),
                second.eq(first),
                before.eq(read.data),
                third.eq(second),
                third.value.eq(largest),
            ]
        m.d.comb += [
            write.addr.eq(third.candidate),
            write.data.eq(third.value),
            write.en.eq(valid[-1]),
        ]
        return taken, third, valid, _key(third.value, third.candidate), moves

    def _serve(self, m, read, highest, some, best, others):
        """Reads the bounds again, in their order: they are read, come into a register, and are compared."""
        all_selected = Signal(reset_less=True)
        m.d.sync += all_selected.eq(best.size != others)
        at, all_read = Signal(range(self.candidates), reset_less=True), Signal()
        numbers = [Signal(CANDIDATE_BITS, reset_less=True, name=f"number_{n}") for n in range(2)]
        here, told, moves = Signal(2), Signal(), Signal()
        value, verdict = Signal.like(read.data, reset_less=True), Signal(reset_less=True)
        last = _candidate(highest)
        m.d.comb += [
            moves.eq(~told | self.feed.verdicts.ready),
            self.feed.verdicts.valid.eq(told),
            self.feed.verdicts.payload.eq(verdict),
        ]
        with m.If(~self.feed.serve | ~self.feed.idle):
            m.d.sync += [at.eq(0), all_read.eq(0), here.eq(0), told.eq(0)]
        with m.Elif(moves):
            m.d.comb += [read.addr.eq(at), read.en.eq(1)]
            key = _key(value, numbers[1])
            m.d.sync += [
                here.eq(Cat(some & ~all_read, here)),
                numbers[0].eq(at),
                at.eq(at + 1),
                all_read.eq(all_read | (at == last)),
                value.eq(read.data),
                numbers[1].eq(numbers[0]),
                told.eq(here[1]),
                verdict.eq((numbers[1] == last) | all_selected | ((others != 0) & (key >= best.least))),
            ]


def check_candidates(candidates):
    """ValueError unless a selector may be made for so many candidates."""
    if (
        not isinstance(candidates, int)
        or not 2 <= candidates <= MAX_CANDIDATES
        or candidates & candidates - 1
    ):
        raise ValueError(f"candidates must be a power of two from 2 to {MAX_CANDIDATES}, not {candidates!r}")


def _key(value, candidate):
    """The larger the better."""
    return Cat(~candidate, value[:-1], ~value[-1])


def _candidate(key):
    return ~key[:CANDIDATE_BITS]
