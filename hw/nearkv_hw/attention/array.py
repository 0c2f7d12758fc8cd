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

from operator import or_

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.formats import LUT4, LUT_ENTRIES
from ..arithmetic.decode import CODE_BITS, CodeKind, CodeWidth, ElementDecoder
from ..arithmetic.scale import SCALE_KINDS, Decoded, Scaler
from ..arithmetic.score import DotProduct
from ..arithmetic.weight import Weight
from ..interfaces import LanePartial
from .abreast import has_block, of_blocks, of_rows
from .cell import Cell
from .codes import Scales
from .dot import DotProducts
from .lane_flags import LANE_FLAGS, LaneFlags
from .shape import BANKS, PASSES, LineParts, abreast_bits
from .way_out import WayOut


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
            "count": range(shape.lanes + 1),  # the first so many lanes, of every row, have an element
            "abreast": abreast_bits(shape),  # log2 of the rows that the line has
            "place": abreast_bits(shape),  # the first of them that counts
            "rows": abreast_bits(shape),  # how many count, less one
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
            "read_abreast": abreast_bits(shape),  # log2 of the rows that its sums are of
        }
    )


def row_dots(queries, rows=1):
    """Dot products of a row, or of rows abreast, with every query, or the end of a pass's rows."""
    return data.StructLayout(
        {
            "dots": data.ArrayLayout(data.ArrayLayout(DotProduct, queries), rows),
            "place": exact_log2(rows),  # the first of the rows that counts
            "rows": exact_log2(rows),  # how many count, less one
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
    scales, scale_kind : In : scales of every `shape.scale_lanes` lanes, `scale_cycles` after the operation.
    weights : In : weights of every query, `weight_cycles` after a value operation: of every block of lanes
        its row's, or with one row at a time that row's.
    row_valid, row : Out : dot products of a row, or of rows abreast (`row_dots`), `row_cycles` after its last
        line; ends of passes in their place among the rows.
    read_valid, lanes_read : Out : sums and flags of the line that was read, `finish_lanes` lanes in a cycle:
        the first `read_cycles` after the read, the others in the cycles after it. Reads come at least two
        cycles apart, and as many as beats are read.
    """

    scale_cycles = Scales.latency_cycles
    element_cycles = scale_cycles + ElementDecoder.latency_cycles + Scaler.latency_cycles
    weight_cycles = element_cycles - 1
    top_cycles = element_cycles + Cell.top_cycles
    limb_cycles = element_cycles + Cell.limb_cycles

    def __init__(self, *, shape):
        self.shape = shape
        super().__init__(
            {
                "operation": In(array_operation(shape)),
                "line": In(CODE_BITS * shape.line_lanes),
                "book": In(BookEntry),
                "scales": In(data.ArrayLayout(CODE_BITS, shape.scale_groups)),
                "scale_kind": In(CodeKind),
                "weights": In(data.ArrayLayout(data.ArrayLayout(Weight, shape.queries), shape.rows_abreast)),
                "row_valid": Out(1),
                "row": Out(row_dots(shape.queries, shape.rows_abreast)),
                "read_valid": Out(1),
                "lanes_read": Out(data.ArrayLayout(LanePartial, shape.finish_lanes)),
            }
        )

    @property
    def row_cycles(self):
        """Cycles from a row's last line to its dot products."""
        return self.limb_cycles + DotProducts.tree_cycles_of(self.shape.lanes) + DotProducts.row_cycles

    @property
    def read_cycles(self):
        """Cycles from a read to its first beat."""
        return self.limb_cycles + WayOut.latency_cycles_of(self.shape)

    def elaborate(self, platform):
        m = Module()
        shape = self.shape
        lanes, queries, blocks = range(shape.lanes), range(shape.queries), range(shape.wide)
        rows, row_lanes = shape.rows_abreast, shape.lanes // shape.rows_abreast
        row_firsts = range(0, shape.lanes, row_lanes)
        tree_cycles = DotProducts.tree_cycles_of(self.shape.lanes)

        codes = Signal(data.ArrayLayout(CODE_BITS, self.shape.lanes), reset_less=True)
        m.d.sync += self._codes(m, codes)
        delays = _Delays(m, self.operation)
        at_line = delays.at(1)
        at_code = delays.at(self.scale_cycles)
        present = delays.of(self._present(m), self.scale_cycles)
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
            scale = scale_decoders[lane // shape.scale_lanes]
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
            m.d.comb += loads.eq(
                Cat(own & has_block(at_element.abreast, at_element.block, block) for block in blocks)
            )
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
            flags = Signal(3 * rows, reset_less=True, name=f"line_flags_{index}")
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
            met = [vector & counted for vector in (undefined, infinite & ~opposite, infinite & opposite)]
            of_rows_flags = of_rows(
                at_element.abreast,
                [Cat(vector[first : first + row_lanes].any() for vector in met) for first in row_firsts],
                or_,
            )
            m.d.sync += flags.eq(Cat(of_rows_flags))
            negative = delays.of(
                Mux(at_element.value, element_now.negative, opposite), self.limb_cycles - self.element_cycles
            )
            weights = [of_block[index] for of_block in self.weights]
            lives = [delays.of(w.significand[-1], self.top_cycles - self.weight_cycles) for w in weights]

            # dot products
            m.submodules[f"dot_{index}"] = dot = DotProducts(lanes=self.shape.lanes, rows=rows)
            m.d.comb += [
                dot.valid.eq(at_top.score),
                dot.abreast.eq(at_top.abreast),
                dot.limb_valid.eq(at_limb.score),
                dot.negative.eq(negative),
                dot.row_valid.eq(at_row.score),
                dot.row_first.eq((at_row.line == 0) & ~at_row.goes_on),
                dot.flags.eq(delays.of(flags, self.limb_cycles + tree_cycles - self.element_cycles - 1)),
                *(of_row[index].eq(own) for of_row, own in zip(self.row.dots, dot.dots, strict=True)),
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
                    lane_flags.live.eq(lives[block % rows]),
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
                    cell.weight.eq(weights[block % rows]),
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
                    cell.line_top.eq(dot.line_tops[block % rows]),
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
            self.row.place.eq(at_dot.place),
            self.row.rows.eq(at_dot.rows),
        ]
        m.submodules.way_out = way_out = WayOut(shape=shape)
        m.d.comb += [
            way_out.top_read.eq(at_top.read),
            way_out.top_query.eq(at_top.read_query),
            way_out.limb_read.eq(at_limb.read),
            way_out.limb_query.eq(at_limb.read_query),
            way_out.beats.eq(at_limb.read_groups),
            way_out.abreast.eq(at_limb.read_abreast),
            way_out.tops.eq(Cat(read_tops)),
            way_out.flags.eq(Cat(read_flags)),
            way_out.highs.eq(Cat(read_highs)),
            way_out.lows.eq(Cat(read_lows)),
            self.read_valid.eq(way_out.valid),
            self.lanes_read.eq(way_out.lanes),
        ]
        return m

    def _codes(self, m, codes):
        """Statements that give every lane its code of the line."""
        operation, bits = self.operation, len(self.line)
        part = Signal(bits)
        m.d.comb += part.eq(self.line)
        for parts, count in ((LineParts.TWO, 2), (LineParts.FOUR, 4)):
            with m.If(operation.parts == parts):
                m.d.comb += part.eq(self.line.word_select(operation.part[: exact_log2(count)], bits // count))
        sizes = ((CodeWidth.WHOLE, 16), (CodeWidth.BYTE, 8), (CodeWidth.NIBBLE, 4))

        def wide(code):
            return Mux(operation.kind.fp16, code << 8, code) if len(code) == 8 else code

        for lane in range(self.shape.lanes):
            code = Signal(CODE_BITS, name=f"code_{lane}")
            with m.Switch(operation.width):
                for width, size in sizes:
                    if size * (lane + 1) <= bits:
                        own = part[size * lane :][:size]
                        with m.Case(width):
                            m.d.comb += code.eq(wide(own))
            for abreast in range(1, abreast_bits(self.shape) + 1):
                with m.If(operation.abreast == abreast), m.Switch(operation.width):
                    for width, size in sizes:
                        own = self._code_of_row(lane, abreast, size)
                        if len(own) == size:
                            with m.Case(width):
                                m.d.comb += code.eq(wide(own))
            yield codes[lane].eq(code)

    def _code_of_row(self, lane, abreast, bits):
        """What a lane has of a line whose rows are abreast, if its row has so many codes."""
        row_bits, row_lanes = len(self.line) >> abreast, self.shape.lanes >> abreast
        row, place = divmod(lane, row_lanes)
        return self.line[row * row_bits :][:row_bits][place * bits :][:bits]

    def _present(self, m):
        """Which lanes have an element."""
        operation, lanes = self.operation, self.shape.lanes
        below = Signal(lanes)
        m.d.comb += below.eq(Cat(lane < operation.count for lane in range(lanes)))
        if self.shape.rows_abreast == 1:
            return below
        in_rows = Signal(lanes)
        with m.Switch(operation.abreast):
            for abreast in range(abreast_bits(self.shape) + 1):
                with m.Case(abreast):
                    m.d.comb += in_rows.eq(below[: lanes >> abreast].replicate(1 << abreast))
        last = operation.place + operation.rows
        rows = [(operation.place <= row) & (row <= last) for row in range(self.shape.rows_abreast)]
        return in_rows & Cat(
            here.replicate(self.shape.line_lanes) for here in of_blocks(operation.abreast, rows)
        )

    def _address(self, line, bank, block):
        """The address of a step in the memories of a block's lanes."""
        return Cat(line[: exact_log2(self.shape.block_steps(block))], bank)

    def _state_address(self, at, block):
        """The address of sums: the step's, or in a read the one to read."""
        own = self._address(at.line, _bank(at), block)
        return Mux(at.value, own, self._address(at.read_line, at.read_bank, block))


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
