"""The array: decoders for a line's lanes, a cell per lane and query, dot products, lane flags, the way out.

Stages, in cycles after an operation came:

| stage | score mode (K) | value mode (V) |
|---|---|---|
| 1 | operation and lanes' codes in registers | the same |
| 2 | scales in registers; codes that a codebook has are looked up | the same |
| 3, 4 | codes and scales decoded | the same |
| 5, 6 | codes times scales; factors read (5) | the same; the row's weights come in at 5 |
| 7, 8 | product; normalised | the same |
| 9 | the line's top bin | every lane's top bin updated |
| 10 | limbs under the line's top | limbs under the lane's top |
| 11 on | trees over the lanes, then the sum over the row's lines | 11: added to every lane's limbs |

Every operation takes every stage, so none waits for another. A query line takes the decoders' way into the
cells, and a read of sums takes the value mode's way with nothing to add: what enters behind a line sees its
effect. Only a K line must leave a cycle between itself and its query line.
"""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.formats import LUT4, LUT_ENTRIES
from ..abi.numerics import LIMB_BITS
from ..arithmetic.binned import HELD_TOP_BITS
from ..arithmetic.decode import CODE_BITS, CodeKind, CodeWidth, ElementDecoder
from ..arithmetic.scale import SCALE_KINDS, Decoded, Scaler
from ..arithmetic.score import DotProduct
from ..arithmetic.weight import Weight
from ..interfaces import LanePartial
from .cell import SUM_BIN_BIAS, Cell
from .codes import Scales
from .dot import DotProducts
from .lane_flags import LANE_FLAGS, LaneFlags
from .shape import BANKS, PASSES, SCALE_LANES, LineParts


def array_operation(shape):
    """What the array is to do; at most one of `score`, `value` and `load`, and `read` never with `value`."""
    return data.StructLayout(
        {
            "score": 1,  # the line is of K: multiply by the queries
            "value": 1,  # the line is of V: multiply by the weights
            "load": 1,  # the line is of a query: keep it
            "kind": CodeKind,  # what the line's codes are
            "width": CodeWidth,
            "codebook": 1,  # codes choose numbers of the pass's codebook
            "book": 1,  # V's, else K's
            "parts": LineParts,
            "part": 2,  # which of them
            "count": range(shape.lanes + 1),  # the first so many lanes have an element
            "block": range(shape.wide),  # load: the lanes that the line is for
            "end": 1,  # the pass has no more K; with neither score, value nor load
            "number": range(PASSES),  # pass of the line
            "line": range(shape.row_lines),  # position in the row, in steps of the lanes
            "last": 1,  # last step of its row, or pair of rows
            "goes_on": 1,  # score: its row is the second of a pair, whose dot product is one
            "drop": 2,  # score: positive (bit 0), or negative (bit 1) elements of queries do not count
            "first": 1,  # value: of the first row of its pass
            "query": range(shape.queries),  # load: which query
            "read": 1,  # read the sums of a line
            "read_bank": range(BANKS),
            "read_query": range(shape.queries),
            "read_line": range(shape.row_lines),
            "read_groups": range(shape.groups),  # beats that are read of it, less one
        }
    )


def row_dots(queries):
    """One row's dot products with every query, or the end of a pass's rows."""
    return data.StructLayout(
        {
            "dots": data.ArrayLayout(DotProduct, queries),
            "end": 1,  # no row: the pass has no more
            "number": range(PASSES),
        }
    )


BOOK_ENTRIES = 2 * LUT_ENTRIES
"""Numbers of a pass's codebook: K's, then V's."""


class BookEntry(data.Struct):
    """A number of a codebook on its way to the lanes."""

    valid: 1
    address: exact_log2(PASSES * BOOK_ENTRIES)  # of the pass, of V or K, and which
    data: CODE_BITS


class Array(wiring.Component):
    """Takes one line per cycle, K, V or query; never waits.

    Parameters
    ----------
    shape : UnitShape.

    Members
    -------
    operation, line : In : what to do (`array_operation`), and the line.
    book : In(BookEntry) : keep a number of a codebook, from the next cycle on.
    scales, scale_kind : In : scales of every `SCALE_LANES` lanes, `scale_cycles` after the operation.
    weights : In : the row's weights of every query, `weight_cycles` after a value operation.
    row_valid, row : Out : dot products of a row (`row_dots`), `row_cycles` after its last line; ends of
        passes in their place among the rows.
    read_valid, lanes_read : Out : sums and flags of the line that was read, `finish_lanes` lanes in a cycle:
        the first `read_cycles` after the read, the others in the cycles after it. Reads come at least two
        cycles apart, and as many as beats are read.
    """

    scale_cycles = Scales.latency_cycles
    element_cycles = scale_cycles + ElementDecoder.latency_cycles + Scaler.latency_cycles
    weight_cycles = element_cycles - 1
    top_cycles = element_cycles + Cell.top_cycles
    limb_cycles = element_cycles + Cell.limb_cycles
    read_cycles = limb_cycles + 2

    def __init__(self, *, shape):
        self.shape = shape
        super().__init__(
            {
                "operation": In(array_operation(shape)),
                "line": In(CODE_BITS * shape.line_lanes),
                "book": In(BookEntry),
                "scales": In(data.ArrayLayout(CODE_BITS, shape.scale_groups)),
                "scale_kind": In(CodeKind),
                "weights": In(data.ArrayLayout(Weight, shape.queries)),
                "row_valid": Out(1),
                "row": Out(row_dots(shape.queries)),
                "read_valid": Out(1),
                "lanes_read": Out(data.ArrayLayout(LanePartial, shape.finish_lanes)),
            }
        )

    @property
    def row_cycles(self):
        """Cycles from a row's last line to its dot products."""
        return self.limb_cycles + DotProducts.tree_cycles_of(self.shape.lanes) + DotProducts.row_cycles

    def elaborate(self, platform):
        m = Module()
        shape = self.shape
        lanes, queries, blocks = range(shape.lanes), range(shape.queries), range(shape.wide)
        tree_cycles = DotProducts.tree_cycles_of(self.shape.lanes)

        codes = Signal(data.ArrayLayout(CODE_BITS, self.shape.lanes), reset_less=True)
        m.d.sync += self._codes(m, codes)
        delays = _Delays(m, self.operation)
        at_line = delays.at(1)
        at_code = delays.at(self.scale_cycles)
        present = delays.of(Cat(lane < self.operation.count for lane in lanes), self.scale_cycles)
        at_weight = delays.at(self.weight_cycles)
        at_element = delays.at(self.element_cycles)
        at_top = delays.at(self.top_cycles)
        at_select = delays.at(self.top_cycles + 1)
        at_limb = delays.at(self.limb_cycles)
        at_row = delays.at(self.limb_cycles + tree_cycles)
        at_dot = delays.at(self.row_cycles)
        # registers of their own: an address goes to every lane's memories
        top_address, limb_address = (
            [delays.of(self._state_address(delays.at(cycles - 1), block), 1) for block in blocks]
            for cycles in (self.top_cycles, self.limb_cycles)
        )

        # decode
        scale_decoders = []
        for group in range(self.shape.scale_groups):
            m.submodules[f"scale_{group}"] = decoder = ElementDecoder(SCALE_KINDS)
            m.d.comb += [
                decoder.code.eq(self.scales[group]),
                decoder.kind.eq(self.scale_kind),
                decoder.present.eq(1),
            ]
            scale_decoders.append(decoder)
        elements = []
        for lane in lanes:
            m.submodules[f"decoder_{lane}"] = decoder = ElementDecoder()
            m.submodules[f"scaler_{lane}"] = scaler = Scaler()
            scale = scale_decoders[lane // SCALE_LANES]
            m.submodules[f"book_{lane}"] = book = memory.Memory(
                shape=CODE_BITS, depth=PASSES * BOOK_ENTRIES, init=[]
            )
            book_read, book_write = book.read_port(domain="comb"), book.write_port()
            code = Mux(at_line.codebook, book_read.data, codes[lane])
            m.d.comb += [
                book_read.addr.eq(Cat(codes[lane][: LUT4.bits], at_line.book, at_line.number)),
                book_write.addr.eq(self.book.address),
                book_write.data.eq(self.book.data),
                book_write.en.eq(self.book.valid),
                decoder.code.eq(delays.of(code, self.scale_cycles - 1)),
                decoder.kind.eq(at_code.kind),
                decoder.present.eq(present[lane]),
            ]
            for name, _ in data.Layout.cast(Decoded):
                m.d.comb += [
                    scaler.code[name].eq(getattr(decoder, name)),
                    scaler.scale[name].eq(getattr(scale, name)),
                ]
            elements.append(scaler)
        element = _Specials(self.shape.lanes)
        element_now = Signal(element)
        m.d.comb += [
            element_now.negative.eq(Cat(e.negative for e in elements)),
            element_now.nan.eq(Cat(e.nan for e in elements)),
            element_now.infinite.eq(Cat(e.infinite for e in elements)),
            element_now.zero.eq(Cat(~e.element.significand[-1] & ~e.infinite for e in elements)),
        ]
        counts = delays.of(present, self.element_cycles - self.scale_cycles)

        # signs, and what elements are that are no numbers: vectors over the lanes, for each query
        value_nan = delays.of(element_now.nan, self.top_cycles - self.element_cycles)
        value_positive = delays.of(
            element_now.infinite & ~element_now.negative, self.top_cycles - self.element_cycles
        )
        value_negative = delays.of(
            element_now.infinite & element_now.negative, self.top_cycles - self.element_cycles
        )
        query_address, query_read = (
            [self._address(at.line, _bank(at), block) for block in blocks] for at in (at_element, at_weight)
        )
        read_tops, read_highs, read_lows, read_flags = [], [], [], []
        for index in queries:
            loads = Signal(shape.wide, name=f"load_{index}")
            own = at_element.load & (at_element.query == index)
            m.d.comb += loads.eq(Cat(own & (at_element.block == block) for block in blocks))
            kept_blocks = []
            for block in blocks:
                m.submodules[f"specials_{index}_{block}"] = kept = memory.Memory(
                    shape=_Specials(shape.line_lanes), depth=shape.states(block), init=[]
                )
                kept_read, kept_write = kept.read_port(domain="comb"), kept.write_port()
                m.d.comb += [
                    kept_read.addr.eq(query_address[block]),
                    kept_write.addr.eq(query_address[block]),
                    kept_write.en.eq(loads[block]),
                ]
                for name, _ in kept.shape:
                    m.d.comb += kept_write.data[name].eq(element_now[name][: shape.line_lanes])
                kept_blocks.append(kept_read.data)
            query_now = Signal(element, name=f"query_specials_{index}")
            for name, _ in element:
                m.d.comb += query_now[name].eq(Cat(kept[name] for kept in kept_blocks))
            infinite = element_now.infinite | query_now.infinite
            opposite = element_now.negative ^ query_now.negative
            flags = Signal(3, reset_less=True, name=f"line_flags_{index}")
            undefined = (
                element_now.nan
                | query_now.nan
                | (element_now.infinite & query_now.zero)
                | (element_now.zero & query_now.infinite)
            )
            # lanes that the row has nothing for may keep another query's elements
            drop_positive, drop_negative = (bit.replicate(shape.lanes) for bit in at_element.drop)
            counted = Signal(shape.lanes, name=f"counted_{index}")
            m.d.comb += counted.eq(
                counts & ~(query_now.negative & drop_negative) & ~(~query_now.negative & drop_positive)
            )
            m.d.sync += flags.eq(
                Cat(
                    (undefined & counted).any(),
                    (infinite & ~opposite & counted).any(),
                    (infinite & opposite & counted).any(),
                )
            )
            negative = delays.of(
                Mux(at_element.value, element_now.negative, opposite), self.limb_cycles - self.element_cycles
            )
            live = delays.of(self.weights[index].significand[-1], self.top_cycles - self.weight_cycles)

            # dot products
            m.submodules[f"dot_{index}"] = dot = DotProducts(lanes=self.shape.lanes)
            m.d.comb += [
                dot.valid.eq(at_top.score),
                dot.limb_valid.eq(at_limb.score),
                dot.negative.eq(negative),
                dot.row_valid.eq(at_row.score),
                dot.row_first.eq((at_row.line == 0) & ~at_row.goes_on),
                dot.flags.eq(delays.of(flags, self.limb_cycles + tree_cycles - self.element_cycles - 1)),
                self.row.dots[index].eq(dot.dot),
            ]

            # the lanes
            flags_blocks = []
            for block in blocks:
                m.submodules[f"flags_{index}_{block}"] = lane_flags = LaneFlags(
                    lanes=shape.line_lanes, states=shape.states(block)
                )
                own_lanes = slice(block * shape.line_lanes, (block + 1) * shape.line_lanes)
                m.d.comb += [
                    lane_flags.add.eq(at_top.value),
                    lane_flags.first.eq(at_top.first),
                    lane_flags.live.eq(live),
                    lane_flags.address.eq(top_address[block]),
                    lane_flags.nan.eq(value_nan[own_lanes]),
                    lane_flags.positive.eq(value_positive[own_lanes]),
                    lane_flags.negative.eq(value_negative[own_lanes]),
                ]
                flags_blocks.append(lane_flags)
            for lane in lanes:
                block, place = divmod(lane, shape.line_lanes)
                states = shape.states(block)
                m.submodules[f"cell_{index}_{lane}"] = cell = Cell(query_states=states, states=states)
                m.d.comb += [
                    cell.value.eq(at_weight.value),
                    cell.weight.eq(self.weights[index]),
                    cell.query_read.eq(query_read[block]),
                    cell.drop.eq(at_weight.drop),
                    cell.element.eq(elements[lane].element),
                    cell.query.eq(elements[place].element),
                    cell.query_negative.eq(elements[place].negative),
                    cell.query_address.eq(query_address[block]),
                    cell.query_write.eq(loads[block]),
                    cell.add.eq(at_top.value),
                    cell.first.eq(at_top.first),
                    cell.address.eq(top_address[block]),
                    dot.bins[lane].eq(cell.bins),
                    cell.select_value.eq(at_select.value),
                    cell.line_top.eq(dot.line_top),
                    dot.high[lane].eq(cell.high),
                    dot.low[lane].eq(cell.low),
                    cell.limb_add.eq(at_limb.value),
                    cell.limb_address.eq(limb_address[block]),
                    cell.negative.eq(negative[lane]),
                ]
                read_tops.append(cell.held_top)
                read_highs.append(cell.held_high)
                read_lows.append(cell.held_low)
                lane_flags = flags_blocks[block]
                read_flags.append(Cat(getattr(lane_flags, f"held_{name}")[place] for name in LANE_FLAGS))
        m.d.comb += [
            self.row_valid.eq((at_dot.score & at_dot.last) | at_dot.end),
            self.row.end.eq(at_dot.end),
            self.row.number.eq(at_dot.number),
        ]
        self._way_out(m, at_top, at_limb, read_tops, read_flags, read_highs, read_lows)
        return m

    def _codes(self, m, codes):
        """Statements that give every lane its code of the line."""
        operation, bits = self.operation, len(self.line)
        part = Signal(bits)
        m.d.comb += part.eq(self.line)
        for parts, count in ((LineParts.TWO, 2), (LineParts.FOUR, 4)):
            with m.If(operation.parts == parts):
                m.d.comb += part.eq(self.line.word_select(operation.part[: exact_log2(count)], bits // count))
        for lane in range(self.shape.lanes):
            code = Signal(CODE_BITS, name=f"code_{lane}")
            with m.Switch(operation.width):
                for width, size in ((CodeWidth.WHOLE, 16), (CodeWidth.BYTE, 8), (CodeWidth.NIBBLE, 4)):
                    if size * (lane + 1) <= bits:
                        own = part[size * lane :][:size]
                        own = Mux(operation.kind.fp16, own << 8, own) if size == 8 else own
                        with m.Case(width):
                            m.d.comb += code.eq(own)
            yield codes[lane].eq(code)

    def _address(self, line, bank, block):
        """The address of a step in the memories of a block's lanes."""
        return Cat(line[: exact_log2(self.shape.block_steps(block))], bank)

    def _state_address(self, at, block):
        """The address of sums: the step's, or in a read the one to read."""
        own = self._address(at.line, _bank(at), block)
        return Mux(at.value, own, self._address(at.read_line, at.read_bank, block))

    def _way_out(self, m, at_top, at_limb, tops, flags, highs, lows):
        """A line's sums are taken from all lanes of a query at once, and leave in groups of lanes."""
        lanes, groups = self.shape.lanes, self.shape.groups

        def taken(at, values, shape):
            registers = [Signal(shape, reset_less=True) for _ in range(lanes)]
            with m.If(at.read), m.Switch(at.read_query):
                for query in range(self.shape.queries):
                    with m.Case(query):
                        m.d.sync += [
                            register.eq(values[query * lanes + lane])
                            for lane, register in enumerate(registers)
                        ]
            return registers

        def held(values):
            """The tops stay while the next line's tops come, which they do ahead of its limbs."""
            registers = [Signal.like(value, reset_less=True) for value in values]
            with m.If(at_limb.read):
                m.d.sync += [register.eq(value) for register, value in zip(registers, values, strict=True)]
            return registers

        tops = held(taken(at_top, tops, HELD_TOP_BITS))
        flags = held(taken(at_top, flags, 3))
        highs = taken(at_limb, highs, signed(LIMB_BITS))
        lows = taken(at_limb, lows, signed(LIMB_BITS))

        group, leaves = Signal(range(groups)), Signal()
        last = Signal.like(group)
        with m.If(at_limb.read):
            m.d.sync += [group.eq(0), leaves.eq(1), last.eq(at_limb.read_groups)]
        with m.Elif(group == last):
            m.d.sync += leaves.eq(0)
        with m.Else():
            m.d.sync += group.eq(group + leaves)
        m.d.sync += self.read_valid.eq(leaves)
        for index in range(self.shape.finish_lanes):

            def selected(values, index=index):
                register = Signal.like(values[0], reset_less=True)
                with m.If(leaves), m.Switch(group):
                    for number, value in enumerate(values[index :: self.shape.finish_lanes]):
                        with m.Case(number):
                            m.d.sync += register.eq(value)
                return register

            top = selected(tops)
            partial = self.lanes_read[index]
            m.d.comb += [
                partial.state.some.eq(top.any()),
                partial.state.top.eq(top - SUM_BIN_BIAS),
                partial.state.high.eq(selected(highs)),
                partial.state.low.eq(selected(lows)),
                partial.flags.eq(selected(flags)),
            ]


class _Specials(data.StructLayout):
    """Vectors over the lanes of a line."""

    def __init__(self, lanes):
        super().__init__({"negative": lanes, "nan": lanes, "infinite": lanes, "zero": lanes})


class _Delays:
    """An operation as it was some cycles ago, and other signals delayed likewise."""

    def __init__(self, m, operation):
        self._m = m
        self._at = [operation]

    def at(self, cycles):
        while len(self._at) <= cycles:
            number = len(self._at)
            delayed = Signal(self._at[0].shape(), name=f"operation_{number}")
            self._m.d.sync += delayed.eq(self._at[-1])
            self._at.append(delayed)
        return self._at[cycles]

    def of(self, value, cycles):
        for _ in range(cycles):
            delayed = Signal(value.shape(), reset_less=True)
            self._m.d.sync += delayed.eq(value)
            value = delayed
        return value


def _bank(at):
    """The bank of queries or sums that the operation's pass has."""
    return at.number[: exact_log2(BANKS)]
