"""The order of lines: which K and V rows are read when.

Rows come in blocks of at most BLOCK_ROWS of one page. K blocks run ahead of V blocks as far as the weight
store has slots for their rows, so that weights are there when V comes. Once it is full, V goes on until
V_TURN_ROWS of its slots are free: every change between K and V may be one of rows in a bank of the memory.
Blocks follow each other across pages and passes. A line of scales comes before the first of the rows that it
is for; a block that goes on in the middle of one finds it still there. K of a pass whose queries are still
being loaded stands back while there is V. A pass of bounds has no V and takes no slots.
"""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from ..common.buffer import Buffer
from ..common.queue import Queue
from ..interfaces import (
    LINE_ADDRESS_BITS,
    PAGE_BITS,
    SCALE_ROW_BITS,
    TENANT_BITS,
    PageItem,
    ReadRequest,
)
from .scoring import WEIGHT_SLOTS
from .shape import BLOCK_ROWS, PASSES, RowBlock, chosen

VALUE_BLOCKS = 16
"""V blocks that wait for their turn."""
V_TURN_ROWS = WEIGHT_SLOTS // 2
"""Slots that V frees before K goes on; with the other half the weight pipes have work meanwhile."""


class LineKind(enum.Enum, shape=3):
    """What comes next in the order of lines."""

    K = 0
    V = 1
    K_END = 2  # no line: the pass has no more K
    V_END = 3  # no line: the pass has no more V
    K_SCALES = 4  # scales of the K rows that come next
    V_SCALES = 5


def line_tag(shape):
    """What is known of a line before it comes."""
    return data.StructLayout(
        {
            "kind": LineKind,
            "place": 2,  # of rows that share the line, the first one that counts
            "rows": 2,  # how many of them count, less one
            "row": SCALE_ROW_BITS,  # of scales: which of the line's rows comes next
            "second": 1,  # or that it is the second line of a row's own
            "page": PAGE_BITS,
        }
    )


def geometry(shape):
    """What the order of a pass's lines depends on."""
    return data.StructLayout(
        {
            "tenant": TENANT_BITS,
            "latent": 1,  # V lies in the K rows: its lines are not asked for
            "bounds": 1,  # there is no V, and every page is one pair of rows
            "abreast": min(shape.rows_abreast - 1, 1),  # rows of a line are taken at once and share a slot
            "k": row_lines(shape),
            "v": row_lines(shape),
        }
    )


def row_lines(shape):
    """How K or V rows lie in lines."""
    return data.StructLayout(
        {
            "last": range(shape.row_lines),  # last line of a row
            "pitch": 2,  # log2 of the rows that share a line
            "scaled": 1,
            "scale_shift": 3,  # log2 of the bytes of a row's scales, at most two lines
        }
    )


class _Block(data.Struct):
    """Rows that are streamed in one go; without rows, the end of a pass."""

    end: 1
    line: LINE_ADDRESS_BITS
    rows: range(BLOCK_ROWS + 1)
    slots: range(BLOCK_ROWS + 1)  # of the weight store
    page: PAGE_BITS
    scales: LINE_ADDRESS_BITS  # the line of scales that is asked for next
    row: SCALE_ROW_BITS  # of the next row, among those whose scales share a line
    due: 1  # scales are asked for before the next row


class Streamer(wiring.Component):
    """Asks for one line per cycle, `request_cycles` after a page came; waits for memory and for a place.

    A line takes one of `outstanding` places until it is taken from `tags`.

    Parameters
    ----------
    shape : UnitShape.
    outstanding : lines asked for and not yet taken, at most.

    Members
    -------
    pages : In(stream) : pages to stream, and ends of passes.
    start : In : there is a pass of that number, whose pages may be streamed two cycles later.
    loaded : In : the pass's K will be taken; until then V goes first.
    geometry : In : of the passes, from the cycle after `start` until its last line was taken.
    rows : Out(stream) : blocks of K rows (`RowBlock`), in their order; a pair for a bound is one.
    requests : Out(stream) : reads of lines.
    tags : Out(stream) : what the lines are, in the order of the requests; ends of passes stand between.
    busy : Out : there is something to stream.
    starts : Out : the first K line of a pass is asked for in this cycle, as soon as requests before it are.
    """

    request_cycles = 3

    def __init__(self, *, shape, outstanding):
        self.shape = shape
        self.outstanding = outstanding
        super().__init__(
            {
                "pages": In(stream.Signature(PageItem)),
                "start": In(PASSES),
                "loaded": In(PASSES),
                "geometry": In(data.ArrayLayout(geometry(shape), PASSES)),
                "rows": Out(stream.Signature(RowBlock)),
                "requests": Out(stream.Signature(ReadRequest)),
                "tags": Out(stream.Signature(line_tag(shape))),
                "busy": Out(1),
                "starts": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.values = values = Queue(shape=_Block, depth=VALUE_BLOCKS)
        m.submodules.requests = requests = Queue(shape=ReadRequest, depth=2)
        m.submodules.next_tag = next_tag = Buffer(shape=line_tag(self.shape))
        m.submodules.tags = tags = Queue(shape=line_tag(self.shape), depth=self.outstanding - next_tag.depth)
        wiring.connect(m, requests.o, wiring.flipped(self.requests))
        wiring.connect(m, tags.o, next_tag.i)
        wiring.connect(m, next_tag.o, wiring.flipped(self.tags))

        # the page whose blocks come next
        item, item_valid, fresh = Signal(PageItem), Signal(), Signal()
        # what depends on the geometry is worked out between the two
        started, startable = Signal(PASSES), Signal(PASSES)
        m.d.sync += [started.eq(self.start), startable.eq(startable | started)]
        m.d.comb += self.pages.ready.eq(~item_valid)
        with m.If(self.pages.valid & self.pages.ready):
            m.d.sync += [item.eq(self.pages.payload), item_valid.eq(1), fresh.eq(1)]

        # one block of each kind under way, one of them at a time
        blocks = {kind: Signal(_Block, name=f"{kind}_block") for kind in ("k", "v")}
        line = Signal(range(self.shape.row_lines))
        second, again = Signal(), Signal()  # a row's scales may take two lines
        now, tenant = Signal(row_lines(self.shape)), Signal(TENANT_BITS)  # of the block under way
        latent = Signal()
        active, is_v = Signal(), Signal()
        block = Signal(_Block)
        m.d.comb += block.eq(Mux(is_v, blocks["v"], blocks["k"]))
        row_end, block_end, step = Signal(), Signal(), Signal()
        place, room, rows = (
            Signal(2),
            Signal(3),
            Signal(3),
        )  # of the line's rows: first, to its end, in the block
        m.d.comb += [
            row_end.eq((line == now.last) & ~block.due),
            place.eq(_place_in_line(block.row, now)),
            room.eq((1 << now.pitch) - place),
            rows.eq(Mux(block.rows < room, block.rows, room)),
            block_end.eq(block.end | (row_end & (block.rows == rows))),
            step.eq(active & requests.i.ready & tags.i.ready),
            requests.i.valid.eq(step & ~block.end & ~(is_v & latent)),
            requests.i.payload.line.eq(Mux(block.due, block.scales, block.line)),
            requests.i.payload.tenant.eq(tenant),
            tags.i.valid.eq(step),
            tags.i.payload.kind.eq(
                Mux(
                    block.end,
                    Mux(is_v, LineKind.V_END, LineKind.K_END),
                    Mux(
                        block.due,
                        Mux(is_v, LineKind.V_SCALES, LineKind.K_SCALES),
                        Mux(is_v, LineKind.V, LineKind.K),
                    ),
                )
            ),
            tags.i.payload.place.eq(place),
            tags.i.payload.rows.eq(rows - 1),
            tags.i.payload.row.eq(block.row),
            tags.i.payload.second.eq(second),
            tags.i.payload.page.eq(block.page),
        ]
        pass_first = Signal(init=1)
        with m.If(step & ~is_v & ~block.due):
            m.d.sync += pass_first.eq(block.end)
        m.d.comb += self.starts.eq(step & ~is_v & ~block.due & ~block.end & pass_first)
        m.d.comb += again.eq(block.due & (now.scale_shift > SCALE_ROW_BITS) & ~second)
        with m.If(step):
            m.d.sync += second.eq(again)
        next_row = Signal(SCALE_ROW_BITS)
        m.d.comb += next_row.eq(block.row + Mux(row_end, rows, 0))
        with m.If(step):
            m.d.sync += line.eq(Mux(block_end | row_end | block.due, 0, line + 1))
            for kind, here in (("k", ~is_v), ("v", is_v)):
                with m.If(here):
                    m.d.sync += [
                        blocks[kind].line.eq(block.line + ~block.due),
                        blocks[kind].scales.eq(block.scales + block.due),
                        blocks[kind].rows.eq(block.rows - Mux(row_end, rows, 0)),
                        blocks[kind].row.eq(next_row),
                        blocks[kind].due.eq(again | (row_end & now.scaled & _starts_line(next_row, now))),
                    ]

        # what comes next
        slots = Signal(range(WEIGHT_SLOTS + 1), init=WEIGHT_SLOTS)
        next_rows, most = Signal(range(BLOCK_ROWS + 1)), Signal(range(BLOCK_ROWS + 1))
        next_slots, slots_left = Signal(range(BLOCK_ROWS + 1)), Signal()
        k_number, v_number = Signal(range(PASSES)), Signal(range(PASSES))  # of the blocks that come next
        k_ready, v_ready, choose = Signal(), Signal(), Signal()
        k_first, k_chosen, v_turn = Signal(), Signal(), Signal()
        k_geometry, v_geometry = Signal(geometry(self.shape)), Signal(geometry(self.shape))
        row = Mux(item_valid, item.row, self.pages.payload.row)  # a cycle before `most` counts
        m.d.sync += [
            # a block ends with a line, so that the next one begins with one
            most.eq(
                BLOCK_ROWS
                - Mux(
                    k_geometry.k.pitch > k_geometry.v.pitch,
                    _place_in_line(row, k_geometry.k),
                    _place_in_line(row, k_geometry.v),
                )
            ),
        ]
        m.d.comb += [
            next_rows.eq(Mux(item.last, 0, Mux(item.rows < most, item.rows, most))),
            next_slots.eq(next_rows),
            slots_left.eq(item.last | (item.rows <= slots) | (most <= slots)),
            k_geometry.eq(chosen(self.geometry, k_number)),
            v_geometry.eq(chosen(self.geometry, v_number)),
            k_ready.eq(
                item_valid
                & startable.bit_select(k_number, 1)
                & values.i.ready
                & self.rows.ready
                & (k_geometry.bounds | slots_left)
            ),
            self.rows.payload.index.eq(item.index),
            self.rows.payload.rows.eq(Mux(k_geometry.bounds, 1, next_rows)),
            v_ready.eq(values.o.valid),
            k_first.eq(self.loaded.bit_select(k_number, 1)),
            k_chosen.eq(k_ready & ((k_first & ~(v_turn & (slots < V_TURN_ROWS))) | ~v_ready)),
            choose.eq(~active | (step & block_end)),
        ]
        if self.shape.rows_abreast > 1:
            with m.If(k_geometry.abreast):
                place = _place_in_line(item.row, k_geometry.k)
                m.d.comb += [
                    next_slots.eq(_lines_of(place + next_rows, k_geometry.k)),
                    slots_left.eq(next_slots <= slots),
                ]
        # the block that comes next, of both kinds
        most_lines = {kind: Signal(range(BLOCK_ROWS + 1), name=f"{kind}_most_lines") for kind in ("k", "v")}
        # A block of an item that goes on takes four cycles or more: meanwhile the item moves by it. The lines
        # that it moves by are worked out in the cycle after the choice and added in the one after that.
        moves, moved = Signal(), Signal()
        m.d.sync += [moves.eq(choose & k_chosen), moved.eq(moves & item_valid)]
        with m.If(moved):
            m.d.sync += [
                item.rows.eq(item.rows - most),
                item.row.eq(item.row + most),
                item.index.eq(item.index + most),
            ]
        coming = {kind: Signal(_Block, name=f"{kind}_coming") for kind in ("k", "v")}
        for kind, following in coming.items():
            own = k_geometry[kind]
            goes_on = ~fresh & ~_starts_line(item.row, own)
            m.d.comb += [
                following.end.eq(item.last),
                following.line.eq(item[f"{kind}_line"]),
                following.rows.eq(next_rows),
                following.slots.eq(next_slots),
                following.page.eq(item.page),
                following.scales.eq(item[f"{kind}_scales"] + goes_on),
                following.row.eq(item.row),
                following.due.eq(own.scaled & ~item.last & ~goes_on),
                most_lines[kind].eq((_place_in_line(item.row, own) + most) >> own.pitch),
            ]
            lines_moved = Signal(range(self.shape.row_lines * BLOCK_ROWS + 1), name=f"{kind}_lines_moved")
            scales_moved = Signal(range(2 * BLOCK_ROWS + 1), name=f"{kind}_scales_moved")
            m.d.sync += [
                lines_moved.eq(Mux(own.pitch.any(), most_lines[kind], (own.last + 1) * most)),
                scales_moved.eq(_lines_passed(item.row, most, own)),
            ]
            with m.If(moved):
                m.d.sync += [
                    item[f"{kind}_line"].eq(item[f"{kind}_line"] + lines_moved),
                    item[f"{kind}_scales"].eq(item[f"{kind}_scales"] + scales_moved),
                ]
        m.d.comb += values.i.payload.eq(coming["v"])
        with m.If(choose):
            m.d.sync += [active.eq(k_ready | v_ready), v_turn.eq(~k_chosen)]
            with m.If(k_chosen):
                m.d.comb += [
                    values.i.valid.eq(item.last | ~k_geometry.bounds),
                    self.rows.valid.eq(~item.last),
                ]
                with m.If(item.last):
                    for number in range(PASSES):
                        with m.If(k_number == number):
                            m.d.sync += startable[number].eq(0)
                m.d.sync += [
                    is_v.eq(0),
                    now.eq(k_geometry.k),
                    tenant.eq(k_geometry.tenant),
                    blocks["k"].eq(coming["k"]),
                    slots.eq(slots - Mux(k_geometry.bounds, 0, next_slots)),
                    fresh.eq(0),
                    item_valid.eq(~item.last & (item.rows > most)),
                    k_number.eq(k_number + item.last),
                ]
            with m.Elif(v_ready):
                m.d.comb += values.o.ready.eq(1)
                m.d.sync += [
                    is_v.eq(1),
                    now.eq(v_geometry.v),
                    tenant.eq(v_geometry.tenant),
                    latent.eq(v_geometry.latent),
                    blocks["v"].eq(values.o.payload),
                    slots.eq(slots + values.o.payload.slots),
                    v_number.eq(v_number + values.o.payload.end),
                ]
        m.d.comb += self.busy.eq(item_valid | active | values.o.valid | self.requests.valid)
        return m


def _place_in_line(row, rows):
    """A row's place among those whose codes share a line."""
    return row & ((1 << rows.pitch) - 1)[:2]


def _lines_of(count, rows):
    """Lines that so many rows take of those that share lines."""
    return (count + ((1 << rows.pitch) - 1)[:2]) >> rows.pitch


def _place_of_scales(row, rows):
    """A row's place among those whose scales share a line."""
    in_line = Cat(n + rows.scale_shift < SCALE_ROW_BITS for n in range(SCALE_ROW_BITS))
    return row & in_line


def _starts_line(row, rows):
    """Whether a row's scales are the first of their line."""
    return _place_of_scales(row, rows) == 0


def _lines_passed(row, count, rows):
    """Lines of scales from the one that has a row's to the one that has those of `count` rows later."""
    return ((_place_of_scales(row, rows) + count) << rows.scale_shift) >> SCALE_ROW_BITS
