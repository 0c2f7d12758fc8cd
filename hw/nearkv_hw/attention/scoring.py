"""From dot products to weights: queue of rows, score and weight pipes, weight store, denominators."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.descriptor import MAX_QUERY_ROWS
from ..arithmetic.bias import DISTANCE_BITS, Bias
from ..arithmetic.score import FLOAT_BITS, DotProduct, Factor, ScorePipe
from ..arithmetic.softcap import Softcap
from ..arithmetic.states import merge_tree
from ..arithmetic.weight import Weight, WeightPipe
from ..common.buffer import Buffer
from ..common.pipeline import later
from ..common.queue import Queue
from ..interfaces import POSITION_BITS, ROW_BITS, Bound, State
from .abreast import of_blocks
from .array import row_dots
from .bounds import Bounds
from .shape import PASSES, RowBlock, chosen
from .weight_sums import WeightSums

WEIGHT_SLOTS = 64
"""Rows whose K may come ahead of their V: enough to hide the way from the last K line to the weight."""
SCORE_QUEUE_ROWS = 32
"""Rows whose dot products wait for a score pipe, and those on their way there."""


OWN_BITS = MAX_QUERY_ROWS.bit_length()
"""Bits of a query row's number in its job."""
MASK_SHIFT = 5
"""log2 of the bits of a word of a tree's masks."""


def opening(queries):
    """What starts a pass: it empties the denominators and adds the sinks, if there are any."""
    return data.StructLayout(
        {
            "number": range(PASSES),
            "sinks": 1,
            "values": data.ArrayLayout(FLOAT_BITS, queries),  # float32
        }
    )


class Sight(data.Struct):
    """Which rows a query sees, by their positions and its own."""

    causal: 1  # none after its own
    window: 24  # none so many before its own, zero for no such limit
    kept: 24  # but the first so many of the context
    tree: 1  # the rows from `own_row` on have positions of their own, and masks say who sees them
    own_row: ROW_BITS


class BoundsPass(data.Struct):
    """Whether a pass is one of bounds, and whether it is the first and the last one of its job."""

    some: 1
    first: 1
    last: 1


def query_parameters(queries):
    """What is told of a query while its pass is loaded."""
    return data.StructLayout(
        {
            "valid": 1,
            "number": range(PASSES),
            "query": range(queries),
            "position": signed(POSITION_BITS),  # of its row
            "slot": range(queries),  # its row's number in the pass
            "slope": Factor,
        }
    )


def tree_word(queries):
    """A word of a tree: the position of a query row of the job, or 32 bits of the mask of one of the pass."""
    return data.StructLayout(
        {
            "number": range(PASSES),
            "is_position": 1,
            "index": OWN_BITS,  # of the job's query row
            "is_mask": 1,
            "slot": range(queries),  # of the pass's query row
            "word": OWN_BITS - MASK_SHIFT,
            "data": 1 << MASK_SHIFT,
        }
    )


def denominator_read(queries):
    """Which denominator to read."""
    return data.StructLayout({"number": range(PASSES), "query": range(queries)})


class Scoring(wiring.Component):
    """One score and weight per pipe and cycle, in the order of rows.

    Parameters
    ----------
    queries : query heads kept.
    pipes : score and weight pipes; each serves queries / pipes query heads, one per cycle.
    rows : rows that come abreast, at most, 1 or 4; each place among them has pipes of its own.

    Members
    -------
    row_valid, row : In : dot products and ends of passes; the owner sends no more than SCORE_QUEUE_ROWS
        before `row_taken`. Rows abreast come, go and are counted as one here.
    row_taken : Out : a row, or an end, has left the queue.
    row_ended : Out : what a read of the pass's denominators meets now is the whole sum.
    row_weighed : Out : a row's weights are in the store, in the order of rows.
    openings : In(stream) : start of a pass; taken before the pass's first row comes.
    reads : In(stream) : denominators to read; a read sees what came before it.
    factors, capped, caps : In : score factors of the passes; whether they have softcaps, and these.
    sights, biased : In : which rows their queries see; whether scores have a bias.
    bounded : In : which of them are passes of bounds (`BoundsPass`): their rows have no weights.
    bounds : Out(stream(Bound)) : in these the largest score of every row; rows wait while it does.
    parameters, tree : In : parameters of a query, a word of a tree, kept from the next cycle on.
    blocks : In(stream) : rows that come, in their order; taken while the last of them is.
    counts : In : query heads of the passes.
    slot, abreast : In : which row's weights to show, rows take slots in turn; log2 of the rows abreast there.
    weights : Out : that row's weights, one cycle later; with `rows` of four those of every block's row.
    denominator_valid, denominator, query_nan : Out : a denominator, and whether the query's result is NaN;
        `read_cycles` after the read was taken.
    """

    biased_cycles = 1 + ScorePipe.latency_cycles + Softcap.latency_cycles + 1
    weigh_cycles = biased_cycles + WeightPipe.latency_cycles
    limb_cycles = weigh_cycles + WeightSums.limb_cycles

    def __init__(self, *, queries, pipes, rows=1):
        if not isinstance(pipes, int) or pipes < 1 or queries % pipes:
            raise ValueError(f"pipes must divide queries={queries}, not {pipes!r}")
        if rows not in (1, 4):
            raise ValueError(f"rows must be 1 or 4, not {rows!r}")
        self.queries = queries
        self.pipes = pipes
        self.rows = rows
        super().__init__(
            {
                "row_valid": In(1),
                "row": In(row_dots(queries, rows)),
                "row_taken": Out(1),
                "row_ended": Out(PASSES),
                "row_weighed": Out(1),
                "openings": In(stream.Signature(opening(queries))),
                "reads": In(stream.Signature(denominator_read(queries))),
                "factors": In(data.ArrayLayout(Factor, PASSES)),
                "capped": In(PASSES),
                "caps": In(data.ArrayLayout(Factor, PASSES)),
                "sights": In(data.ArrayLayout(Sight, PASSES)),
                "biased": In(PASSES),
                "bounded": In(data.ArrayLayout(BoundsPass, PASSES)),
                "bounds": Out(stream.Signature(Bound)),
                "parameters": In(query_parameters(queries)),
                "tree": In(tree_word(queries)),
                "blocks": In(stream.Signature(RowBlock)),
                "counts": In(data.ArrayLayout(queries.bit_length(), PASSES)),
                "slot": In(range(WEIGHT_SLOTS)),
                "abreast": In(exact_log2(rows)),
                "weights": Out(data.ArrayLayout(data.ArrayLayout(Weight, queries), rows)),
                "denominator_valid": Out(1),
                "denominator": Out(State),
                "query_nan": Out(1),
            }
        )

    @property
    def queries_per_pipe(self):
        """Cycles that a row of all query heads takes."""
        return self.queries // self.pipes

    @property
    def read_cycles(self):
        """Cycles from a read to its denominator."""
        return self.limb_cycles + 1 + exact_log2(self.rows)

    def elaborate(self, platform):
        m = Module()
        per_pipe = self.queries_per_pipe
        m.submodules.queue = queue = Queue(shape=row_dots(self.queries, self.rows), depth=SCORE_QUEUE_ROWS)
        m.d.comb += [queue.i.valid.eq(self.row_valid), queue.i.payload.eq(self.row)]
        row = queue.o.payload

        # what enters the pipes: a read, else a query of an opening, else a query of a row
        index_shape = range(per_pipe)
        operation_layout = data.StructLayout(
            {
                "row": 1,
                "bound": 1,  # a row of a pass of bounds
                "open": 1,
                "read": 1,
                "last": 1,
                "number": range(PASSES),
                "index": index_shape,
                "pipe": range(self.pipes),
                "positions": data.ArrayLayout(ROW_BITS, self.rows),
                "counts": self.rows,  # which of the rows abreast there are
            }
        )
        operation = Signal(operation_layout)
        open_index = Signal(index_shape)
        row_index = Signal(index_shape)
        counts_per_pipe = [
            Mux(self.counts[number] < per_pipe, self.counts[number], per_pipe) for number in range(PASSES)
        ]

        def last(index, number):
            return index + 1 == chosen(counts_per_pipe, number)

        m.submodules.bounds = bounds = Bounds(pipes=self.pipes)
        wiring.connect(m, bounds.o, wiring.flipped(self.bounds))
        bounded = Signal(BoundsPass)
        m.d.comb += bounded.eq(chosen(self.bounded, row.number))
        m.d.comb += self.reads.ready.eq(1)
        with m.If(self.reads.valid):
            m.d.comb += [
                operation.read.eq(1),
                operation.number.eq(self.reads.payload.number),
                Cat(operation.index, operation.pipe).eq(self.reads.payload.query),
            ]
        with m.Elif(self.openings.valid):
            m.d.comb += [
                operation.open.eq(1),
                operation.number.eq(self.openings.payload.number),
                operation.index.eq(open_index),
                self.openings.ready.eq(last(open_index, self.openings.payload.number)),
            ]
            m.d.sync += open_index.eq(Mux(self.openings.ready, 0, open_index + 1))
        with m.Elif(queue.o.valid & row.end):
            m.d.comb += queue.o.ready.eq(1)
            for number in range(PASSES):
                m.d.comb += self.row_ended[number].eq(row.number == number)
        with m.Elif(queue.o.valid & (bounds.room | ~bounded.some)):
            m.d.comb += [
                operation.row.eq(~bounded.some),
                operation.bound.eq(bounded.some),
                operation.number.eq(row.number),
                operation.index.eq(row_index),
                operation.last.eq(last(row_index, row.number)),
                queue.o.ready.eq(operation.last),
            ]
            m.d.sync += row_index.eq(Mux(operation.last, 0, row_index + 1))
        m.d.comb += self.row_taken.eq(queue.o.ready & queue.o.valid)
        # which row of the context it is
        m.submodules.blocks = blocks = Queue(shape=RowBlock, depth=WEIGHT_SLOTS)
        m.submodules.block = block = Buffer(shape=RowBlock)
        wiring.connect(m, wiring.flipped(self.blocks), blocks.i)
        wiring.connect(m, blocks.o, block.i)
        done = Signal(block.o.payload.rows.shape())
        taken = Signal(done.shape())
        last_row = taken == block.o.payload.rows
        first = block.o.payload.index + done - row.place
        m.d.comb += [
            taken.eq(done + row.rows + 1),
            *(position.eq(first + n) for n, position in enumerate(operation.positions)),
            operation.counts.eq(
                Cat((n >= row.place) & (n <= row.place + row.rows) for n in range(self.rows))
            ),
            block.o.ready.eq((operation.row | operation.bound) & operation.last & last_row),
            bounds.promised.eq(operation.bound & operation.last),
        ]
        with m.If((operation.row | operation.bound) & operation.last):
            m.d.sync += done.eq(Mux(last_row, 0, taken))

        at = [operation]
        for cycle in range(1, self.read_cycles + 1):
            delayed = Signal(operation_layout, name=f"operation_{cycle}")
            m.d.sync += delayed.eq(at[-1])
            at.append(delayed)
        at_score, at_biased, at_weight = at[1], at[self.biased_cycles], at[self.weigh_cycles]
        bounded_pass = Signal(BoundsPass)
        m.d.comb += [
            bounded_pass.eq(chosen(self.bounded, at_biased.number)),
            bounds.valid.eq(at_biased.bound),
            bounds.begins.eq(at_biased.index == 0),
            bounds.ends.eq(at_biased.last),
            bounds.bound.candidate.eq(at_biased.positions[0]),
            bounds.bound.first.eq(bounded_pass.first),
            bounds.bound.last.eq(bounded_pass.last),
        ]
        at_limb, at_read = at[self.limb_cycles], at[self.read_cycles]

        weights = [[] for _ in range(self.queries)]
        # a distance goes into the bias so early that the score meets it
        distance_cycles = self.biased_cycles - Bias.latency_cycles
        at_distance = at[distance_cycles]
        of_queries = [self._parameters(m, pipe, at[distance_cycles - 1]) for pipe in range(self.pipes)]
        biased, sight = Signal(), Signal(Sight)
        m.d.comb += [
            biased.eq(self.biased.bit_select(at_distance.number, 1)),
            sight.eq(chosen(self.sights, at_distance.number)),
        ]
        at_cap = at[1 + ScorePipe.latency_cycles]
        factor, cap = Signal(Factor), Signal(Factor)
        capped = Signal()
        capped_at_cap = Signal()
        m.d.comb += [
            factor.eq(chosen(self.factors, at_score.number)),
            capped.eq(self.capped.bit_select(at_score.number, 1)),
            # a cap is wanted some cycles after its score, but all scores under way are of one pass or two
            cap.eq(chosen(self.caps, at[1 + ScorePipe.latency_cycles + Softcap.cap_cycles].number)),
            capped_at_cap.eq(at_cap.row & self.capped.bit_select(at_cap.number, 1)),
        ]
        write_slot = Signal(range(WEIGHT_SLOTS))
        with m.If(at_weight.row & at_weight.last):
            m.d.sync += write_slot.eq(write_slot + 1)
        m.d.comb += self.row_weighed.eq(at_weight.row & at_weight.last)

        states, nans = [], []
        for place in range(self.rows):  # of the row among those abreast
            is_own, own_index, held = self._own_row(m, place, at, distance_cycles)
            m.submodules[f"sums_{place}"] = sums = WeightSums(pipes=self.pipes, states=PASSES * per_pipe)
            first_place = place == 0
            m.d.comb += [
                sums.add.eq((at_weight.row & at_weight.counts[place]) | at_weight.open),
                sums.first.eq(at_weight.open),
                sums.address.eq(Cat(at_weight.number, at_weight.index)),
                sums.pipe.eq(at_weight.pipe),
                sums.limb_add.eq((at_limb.row & at_limb.counts[place]) | at_limb.open),
                sums.limb_address.eq(Cat(at_limb.number, at_limb.index)),
                sums.limb_pipe.eq(at_limb.pipe),
            ]
            states.append(sums.state)
            nans.append(sums.query_nan)
            for pipe in range(self.pipes):
                name = f"{place}_{pipe}"
                own = range(pipe * per_pipe, (pipe + 1) * per_pipe)
                dot = Signal(DotProduct, reset_less=True, name=f"dot_{name}")
                with m.Switch(operation.index):
                    for index, query in enumerate(own):
                        with m.Case(index):
                            m.d.sync += dot.eq(row.dots[place][query])
                # a sink counts once
                sink = self._sink(m, pipe, operation) if first_place else _NO_SINK
                m.submodules[f"score_{name}"] = score = ScorePipe()
                m.submodules[f"softcap_{name}"] = softcap = Softcap()
                m.submodules[f"weight_{name}"] = pipeline = WeightPipe()
                m.submodules[f"bias_{name}"] = bias = Bias()

                # who sees the row, from where
                parameters = of_queries[pipe]
                distance = Signal(signed(DISTANCE_BITS), name=f"distance_{name}")
                m.d.comb += distance.eq(held - parameters.position)
                unmasked = self._unmasked(m, name, at_distance.number, parameters.slot, own_index)
                kept = at_distance.positions[place] < sight.kept
                hidden = _hidden(m, distance, at_distance, kept, sight, is_own & ~unmasked)
                m.d.comb += [
                    score.dot.eq(dot),
                    score.factor.eq(factor),
                    score.is_sink.eq(at_score.open),
                    score.sink.eq(sink),
                    score.capped.eq(capped),
                    softcap.score.eq(score.score),
                    softcap.capped.eq(capped_at_cap),
                    softcap.cap.eq(cap),
                    bias.distance.eq(distance),
                    bias.slope.eq(Mux(at_distance.row & biased, parameters.slope, 0)),
                    bias.score.eq(softcap.capped_score),
                    pipeline.score.eq(bias.biased),
                    pipeline.dropped.eq(later(m, score.dropped, Softcap.latency_cycles + 1) | hidden),
                    sums.weights[pipe].eq(pipeline.weight),
                ]
                nan_score = later(m, score.nan, Softcap.latency_cycles + 1) & ~hidden
                m.d.comb += sums.nan[pipe].eq(later(m, nan_score, WeightPipe.latency_cycles))
                if first_place:  # rows of passes of bounds never come abreast
                    m.d.comb += [
                        bounds.scores[pipe].eq(bias.biased),
                        bounds.dropped[pipe].eq(pipeline.dropped),
                        bounds.nan[pipe].eq(nan_score),
                        bounds.absent[pipe].eq(
                            at_biased.index + own.start >= chosen(self.counts, at_biased.number)
                        ),
                    ]

                for index, query in enumerate(own):
                    m.submodules[f"weights_{place}_{query}"] = store = memory.Memory(
                        shape=Weight, depth=WEIGHT_SLOTS, init=[]
                    )
                    read, write = store.read_port(domain="comb"), store.write_port()
                    m.d.comb += [
                        read.addr.eq(self.slot),
                        write.addr.eq(write_slot),
                        write.data.eq(pipeline.weight),
                        write.en.eq(at_weight.row & (at_weight.index == index)),
                    ]
                    weights[query].append(read.data)

        for query, of_query in enumerate(weights):
            for block, weight in enumerate(of_blocks(self.abreast, of_query)):
                shown = Signal(Weight, reset_less=True, name=f"weight_{block}_{query}")
                m.d.sync += shown.eq(weight)
                m.d.comb += self.weights[block][query].eq(shown)
        denominator, query_nan = merge_tree(m, states, nans)
        m.d.comb += [
            self.denominator_valid.eq(at_read.read),
            self.denominator.eq(denominator),
            self.query_nan.eq(query_nan),
        ]
        return m

    def _sink(self, m, pipe, operation):
        """The sink of the query that a pipe has of an opening, a cycle later."""
        sink, none = Signal(FLOAT_BITS, reset_less=True, name=f"sink_{pipe}"), Signal(reset_less=True)
        begin = pipe * self.queries_per_pipe
        with m.Switch(operation.index):
            for index in range(self.queries_per_pipe):
                with m.Case(index):
                    m.d.sync += sink.eq(self.openings.payload.values[begin + index])
        m.d.sync += none.eq(operation.open & ~self.openings.payload.sinks)
        return Mux(none, _NO_SINK, sink)

    def _parameters(self, m, pipe, at):
        """What is kept of the query that a pipe has, a cycle after `at`: position, slope, row's number."""
        shape = data.StructLayout(
            {"position": signed(POSITION_BITS), "slot": range(self.queries), "slope": Factor}
        )
        own = range(pipe * self.queries_per_pipe, (pipe + 1) * self.queries_per_pipe)
        m.submodules[f"parameters_{pipe}"] = stored = memory.Memory(
            shape=shape, depth=PASSES * len(own), init=[]
        )
        read, write = stored.read_port(domain="comb"), stored.write_port()
        told = self.parameters
        found = Signal(shape, reset_less=True, name=f"parameters_{pipe}")
        m.d.comb += [
            write.addr.eq(Cat(told.number, (told.query - own.start)[: len(at.index)])),
            *(write.data[name].eq(told[name]) for name in ("position", "slope", "slot")),
            write.en.eq(told.valid & (told.query >= own.start) & (told.query < own.stop)),
            read.addr.eq(Cat(at.number, at.index)),
        ]
        m.d.sync += found.eq(read.data)
        return found

    def _own_row(self, m, place, at, cycles):
        """Of a row of `cycles` ago: whether it is a query row's own in a tree, whose, and its position."""
        m.submodules[f"positions_{place}"] = stored = memory.Memory(
            shape=ROW_BITS, depth=PASSES << OWN_BITS, init=[]
        )
        read, write = stored.read_port(domain="comb"), stored.write_port()
        at_first, at_second = at[cycles - 2], at[cycles - 1]
        sight, index = Signal(Sight), Signal(signed(ROW_BITS + 1))
        own, own_index = Signal(reset_less=True), Signal(OWN_BITS, reset_less=True)
        is_own, number, held = Signal(), Signal(OWN_BITS), Signal(ROW_BITS)
        m.d.comb += [
            sight.eq(chosen(self.sights, at_first.number)),
            index.eq(at_first.positions[place] - sight.own_row),
            write.addr.eq(Cat(self.tree.index, self.tree.number)),
            write.data.eq(self.tree.data),
            write.en.eq(self.tree.is_position),
            read.addr.eq(Cat(own_index, at_second.number)),
        ]
        m.d.sync += [
            own.eq(sight.tree & (index >= 0)),
            own_index.eq(index),
            is_own.eq(own),
            number.eq(own_index),
            held.eq(Mux(own, read.data, at_second.positions[place])),
        ]
        return is_own, number, held

    def _unmasked(self, m, pipe, number, slot, own_index):
        """Whether the mask of a query row of the pass shows a query row's own row."""
        m.submodules[f"masks_{pipe}"] = stored = memory.Memory(
            shape=1 << MASK_SHIFT, depth=(PASSES * self.queries) << (OWN_BITS - MASK_SHIFT), init=[]
        )
        read, write = stored.read_port(domain="comb"), stored.write_port()
        m.d.comb += [
            write.addr.eq(Cat(self.tree.word, self.tree.slot, self.tree.number)),
            write.data.eq(self.tree.data),
            write.en.eq(self.tree.is_mask),
            read.addr.eq(Cat(own_index[MASK_SHIFT:], slot, number)),
        ]
        return read.data.bit_select(own_index[:MASK_SHIFT], 1)


def _hidden(m, distance, operation, kept_row, sight, masked):
    """Whether a row is not seen, `Bias.latency_cycles` after its distance."""
    after = Signal(reset_less=True)
    before = Signal(signed(DISTANCE_BITS), reset_less=True)
    kept, causal, windowed, apart = (Signal(reset_less=True) for _ in range(4))
    m.d.sync += [
        after.eq(distance > 0),
        before.eq(distance + sight.window),
        kept.eq(kept_row),
        causal.eq(operation.row & sight.causal),
        windowed.eq(operation.row & sight.window.any()),
        apart.eq(operation.row & masked),
    ]
    hidden = Signal(reset_less=True)
    m.d.sync += hidden.eq(apart | (causal & after) | (windowed & (before <= 0) & ~kept))
    return later(m, hidden, Bias.latency_cycles - 2)


_NO_SINK = 0xFF800000
"""-Inf adds nothing."""
