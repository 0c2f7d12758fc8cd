"""Which pages a job attends to: its candidates' bounds, and the best of them (docs/numerics.md, 13)."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import MAX_CANDIDATES
from ..common.arbiter import RoundRobin
from ..common.best import Best
from ..common.trees import one_hot_select
from ..interfaces import CANDIDATE_BITS, Bound

SELECT_PAGES_BITS = 24
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
    start : In(1), select_pages : In : a job begins, that selects so many pages, at least 1; while `idle`.
    asked : In(1) : a page was sent to a unit in a pass of bounds: a bound will come.
    bounds : In(stream(Bound)).array(units)
    idle : Out(1) : all bounds that were asked for are in their places.
    selected : Out : how many candidates are selected; while `idle`.
    serve : In(1) : a pass wants verdicts, from candidate 0 on; clear between passes.
    verdicts : Out(stream(1)) : of the candidates in turn, once `idle`.

    Throughput is a bound per cycle, unless its page comes among the best, and a verdict per cycle, the first
    `verdict_cycles` after `serve`.
    """

    verdict_cycles = 2

    def __init__(self, *, units, candidates=MAX_CANDIDATES):
        if not isinstance(units, int) or units < 1:
            raise ValueError(f"units must be a positive integer, not {units!r}")
        check_candidates(candidates)
        self.units = units
        self.candidates = candidates
        super().__init__(
            {
                "start": In(1),
                "select_pages": In(SELECT_PAGES_BITS),
                "asked": In(1),
                "bounds": In(stream.Signature(Bound)).array(units),
                "idle": Out(1),
                "selected": Out(range(candidates + 1)),
                "serve": In(1),
                "verdicts": Out(stream.Signature(1)),
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
        taken, item, item_valid, key = self._take(m, read, write, best)
        highest, some = Signal(_KEY_BITS, reset_less=True), Signal()  # the last candidate so far
        offered, offered_valid = Signal(_KEY_BITS, reset_less=True), Signal()
        room, done = Signal(), Signal()
        m.d.comb += [
            room.eq(~offered_valid | best.i.ready),
            done.eq(item_valid & (~item.last | room)),
            write.en.eq(done),
            best.i.valid.eq(offered_valid),
            best.i.payload.eq(offered),
            best.clear.eq(self.start),
            best.capacity.eq(others),
            self.idle.eq((under_way == 0) & ~item_valid & ~offered_valid & best.idle),
            self.selected.eq(Mux(some, best.size + 1, 0)),
        ]
        m.d.sync += under_way.eq(under_way + self.asked - taken)
        with m.If(room):
            m.d.sync += offered_valid.eq(0)
        with m.If(done):
            m.d.sync += item_valid.eq(taken)
            with m.If(item.last):
                rises = ~some | (_candidate(key) > _candidate(highest))
                m.d.sync += [
                    some.eq(1),
                    offered_valid.eq(some),
                    offered.eq(Mux(rises, highest, key)),
                    highest.eq(Mux(rises, key, highest)),
                ]
        with m.Elif(taken):
            m.d.sync += item_valid.eq(1)
        with m.If(self.start):
            most = self.candidates - 1
            m.d.sync += [
                some.eq(0),
                others.eq(Mux(self.select_pages > most, most, self.select_pages - 1)),
            ]
        self._serve(m, read, highest, some, best, others)
        return m

    def _take(self, m, read, write, best):
        """Bounds come one after the other, and each meets what is known of its candidate."""
        item, item_valid, item_free = Signal(Bound, reset_less=True), Signal(), Signal()
        m.submodules.arbiter = arbiter = RoundRobin(count=self.units)
        given, taken = Signal(Bound), Signal()
        m.d.comb += [
            arbiter.requests.eq(Cat(bound.valid for bound in self.bounds)),
            arbiter.accept.eq(taken),
            given.eq(one_hot_select(arbiter.grant, [bound.payload.as_value() for bound in self.bounds])),
            # what is being written is not read in the same cycle
            item_free.eq(~item_valid | (write.en & (item.candidate != given.candidate))),
            taken.eq(arbiter.grant.any() & item_free),
            *(
                bound.ready.eq(granted & item_free)
                for bound, granted in zip(self.bounds, arbiter.grant, strict=True)
            ),
        ]
        with m.If(taken):
            m.d.comb += [read.addr.eq(given.candidate), read.en.eq(1)]
            m.d.sync += item.eq(given)
        value = Mux(item.first | (item.value > read.data), item.value, read.data)
        key = Signal(_KEY_BITS)
        m.d.comb += [
            key.eq(_key(value, item.candidate)),
            write.addr.eq(item.candidate),
            write.data.eq(value),
        ]
        return taken, item, item_valid, key

    def _serve(self, m, read, highest, some, best, others):
        """Reads the bounds again, in their order."""
        at, all_read = Signal(range(self.candidates), reset_less=True), Signal()
        number = Signal(CANDIDATE_BITS, reset_less=True)  # of the bound that was read
        here, here_free = Signal(), Signal()
        told, verdict, told_free = Signal(), Signal(reset_less=True), Signal()
        last = _candidate(highest)
        m.d.comb += [
            told_free.eq(~told | self.verdicts.ready),
            here_free.eq(~here | told_free),
            self.verdicts.valid.eq(told),
            self.verdicts.payload.eq(verdict),
        ]
        with m.If(~self.serve | ~self.idle):
            m.d.sync += [at.eq(0), all_read.eq(0), here.eq(0), told.eq(0)]
        with m.Else():
            with m.If(here_free):
                m.d.comb += [read.addr.eq(at), read.en.eq(1)]
                m.d.sync += [
                    here.eq(some & ~all_read),
                    number.eq(at),
                    at.eq(at + 1),
                    all_read.eq(all_read | (at == last)),
                ]
            with m.If(told_free):
                key = _key(read.data, number)
                m.d.sync += [
                    told.eq(here),
                    verdict.eq(
                        (number == last) | (best.size != others) | ((others != 0) & (key >= best.least))
                    ),
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
