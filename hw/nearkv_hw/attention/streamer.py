"""The order of lines: which K and V rows are read when.

Rows come in blocks of at most BLOCK_ROWS of one page. K blocks run ahead of V blocks as far as the weight
store has slots for their rows, so that weights are there when V comes. Once it is full, V goes on until
V_TURN_ROWS of its slots are free: every change between K and V may be one of rows in a bank of the memory.
Blocks follow each other across pages and passes. K of a pass whose queries are still being loaded stands back
while there is V.
"""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from ..common.buffer import Buffer
from ..common.queue import Queue
from ..interfaces import LINE_ADDRESS_BITS, PAGE_BITS, TENANT_BITS, PageItem, ReadRequest
from .scoring import WEIGHT_SLOTS
from .shape import PASSES, chosen

BLOCK_ROWS = 16
VALUE_BLOCKS = 16
"""V blocks that wait for their turn."""
V_TURN_ROWS = WEIGHT_SLOTS // 2
"""Slots that V frees before K goes on; with the other half the weight pipes have work meanwhile."""


class LineKind(enum.Enum, shape=2):
    """What comes next in the order of lines."""

    K = 0
    V = 1
    K_END = 2  # no line: the pass has no more K
    V_END = 3  # no line: the pass has no more V


def line_tag(shape):
    """What is known of a line before it comes."""
    return data.StructLayout(
        {
            "kind": LineKind,
            "line": range(shape.row_lines),  # position in the row
            "last": 1,  # last line of the row
            "page": PAGE_BITS,
        }
    )


def geometry(shape):
    """What the order of a pass's lines depends on."""
    return data.StructLayout(
        {
            "tenant": TENANT_BITS,
            "k_last": range(shape.row_lines),  # last line of a K row
            "v_last": range(shape.row_lines),
        }
    )


class _Block(data.Struct):
    """Rows that are streamed in one go; without rows, the end of a pass."""

    end: 1
    line: LINE_ADDRESS_BITS
    rows: range(BLOCK_ROWS + 1)
    page: PAGE_BITS


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
    start : In : there is a pass of that number, whose pages may be streamed.
    loaded : In : the pass's K will be taken; until then V goes first.
    geometry : In : of the passes, from the cycle of `start` until its last line was taken.
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
        item, item_valid = Signal(PageItem), Signal()
        startable = Signal(PASSES)
        m.d.sync += startable.eq(startable | self.start)
        m.d.comb += self.pages.ready.eq(~item_valid)
        with m.If(self.pages.valid & self.pages.ready):
            m.d.sync += [item.eq(self.pages.payload), item_valid.eq(1)]

        # one block of each kind under way, one of them at a time
        numbers = {kind: Signal(range(PASSES), name=f"{kind}_number") for kind in ("k", "v")}
        blocks = {kind: Signal(_Block, name=f"{kind}_block") for kind in ("k", "v")}
        line = Signal(range(self.shape.row_lines))
        now = Signal(geometry(self.shape))  # of the block under way
        active, is_v = Signal(), Signal()
        block, bank_last = Signal(_Block), Signal.like(line)
        m.d.comb += [
            block.eq(Mux(is_v, blocks["v"], blocks["k"])),
            bank_last.eq(Mux(is_v, now.v_last, now.k_last)),
        ]
        row_end, block_end, step = Signal(), Signal(), Signal()
        m.d.comb += [
            row_end.eq(line == bank_last),
            block_end.eq(block.end | (row_end & (block.rows == 1))),
            step.eq(active & requests.i.ready & tags.i.ready),
            requests.i.valid.eq(step & ~block.end),
            requests.i.payload.line.eq(block.line),
            requests.i.payload.tenant.eq(now.tenant),
            tags.i.valid.eq(step),
            tags.i.payload.kind.eq(
                Mux(
                    block.end,
                    Mux(is_v, LineKind.V_END, LineKind.K_END),
                    Mux(is_v, LineKind.V, LineKind.K),
                )
            ),
            tags.i.payload.line.eq(line),
            tags.i.payload.last.eq(row_end),
            tags.i.payload.page.eq(block.page),
        ]
        pass_first = Signal(init=1)
        with m.If(step & ~is_v):
            m.d.sync += pass_first.eq(block.end)
        m.d.comb += self.starts.eq(step & ~is_v & ~block.end & pass_first)
        with m.If(step):
            m.d.sync += line.eq(Mux(block_end | row_end, 0, line + 1))
            for kind, here in (("k", ~is_v), ("v", is_v)):
                with m.If(here):
                    m.d.sync += [
                        blocks[kind].line.eq(blocks[kind].line + 1),
                        blocks[kind].rows.eq(blocks[kind].rows - row_end),
                        numbers[kind].eq(numbers[kind] + block.end),
                    ]

        # what comes next
        slots = Signal(range(WEIGHT_SLOTS + 1), init=WEIGHT_SLOTS)
        next_rows = Signal(range(BLOCK_ROWS + 1))
        k_number, v_number = Signal(range(PASSES)), Signal(range(PASSES))
        k_ready, v_ready, choose = Signal(), Signal(), Signal()
        k_first, k_chosen, v_turn = Signal(), Signal(), Signal()
        k_geometry = Signal(geometry(self.shape))
        m.d.comb += [
            next_rows.eq(Mux(item.last, 0, Mux(item.rows < BLOCK_ROWS, item.rows, BLOCK_ROWS))),
            # the end of a pass may be under way
            k_number.eq(numbers["k"] + (active & ~is_v & block.end)),
            v_number.eq(numbers["v"] + (active & is_v & block.end)),
            k_geometry.eq(chosen(self.geometry, k_number)),
            k_ready.eq(
                item_valid & startable.bit_select(k_number, 1) & values.i.ready & (next_rows <= slots)
            ),
            v_ready.eq(values.o.valid),
            k_first.eq(self.loaded.bit_select(k_number, 1)),
            k_chosen.eq(k_ready & ((k_first & ~(v_turn & (slots < V_TURN_ROWS))) | ~v_ready)),
            choose.eq(~active | (step & block_end)),
            values.i.payload.end.eq(item.last),
            values.i.payload.line.eq(item.v_line),
            values.i.payload.rows.eq(next_rows),
            values.i.payload.page.eq(item.page),
        ]
        with m.If(choose):
            m.d.sync += [active.eq(k_ready | v_ready), v_turn.eq(~k_chosen)]
            with m.If(k_chosen):
                m.d.comb += values.i.valid.eq(1)
                with m.If(item.last):
                    for number in range(PASSES):
                        with m.If(k_number == number):
                            m.d.sync += startable[number].eq(0)
                m.d.sync += [
                    is_v.eq(0),
                    now.eq(k_geometry),
                    blocks["k"].end.eq(item.last),
                    blocks["k"].line.eq(item.k_line),
                    blocks["k"].rows.eq(next_rows),
                    blocks["k"].page.eq(item.page),
                    slots.eq(slots - next_rows),
                    item.rows.eq(item.rows - BLOCK_ROWS),
                    item.k_line.eq(item.k_line + ((k_geometry.k_last + 1) << _BLOCK_SHIFT)),
                    item.v_line.eq(item.v_line + ((k_geometry.v_last + 1) << _BLOCK_SHIFT)),
                    item_valid.eq(~item.last & (item.rows > BLOCK_ROWS)),
                ]
            with m.Elif(v_ready):
                m.d.comb += values.o.ready.eq(1)
                m.d.sync += [
                    is_v.eq(1),
                    now.eq(chosen(self.geometry, v_number)),
                    blocks["v"].eq(values.o.payload),
                    slots.eq(slots + values.o.payload.rows),
                ]
        m.d.comb += self.busy.eq(item_valid | active | values.o.valid | self.requests.valid)
        return m


_BLOCK_SHIFT = BLOCK_ROWS.bit_length() - 1
