# amaranth: UnusedElaboratable=no
"""The array: query, K and V lines and reads in any order give exact dot products, sums and lane flags."""

import cocotb
import pytest
from amaranth.lib import data
from attention_golden import decode_all, dot_product, merge, scaled, term
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.formats import BF16, ELEMENT_FORMATS, FP8_E5M2, FP16, SCALE_FORMATS, Special
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from nearkv_hw.arithmetic.binned import empty_top
from nearkv_hw.arithmetic.decode import CodeKind, CodeWidth
from nearkv_hw.arithmetic.score import DOT_TOP_BITS
from nearkv_hw.arithmetic.weight import Weight
from nearkv_hw.attention.array import Array, array_operation, row_dots
from nearkv_hw.attention.shape import BANKS, PASSES, UnitShape
from nearkv_hw.interfaces import LanePartial
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import random, start, value
from unit_cases import codes


@pytest.mark.rtl
@pytest.mark.parametrize(
    "shape",
    [{"lanes": 4, "queries": 2, "finish_lanes": 2}, {"lanes": 8, "queries": 1, "finish_lanes": 4}],
    ids=lambda shape: f"{shape['lanes']}x{shape['queries']}",
)
def test_array(shape):
    array = Array(shape=UnitShape(**shape))
    run(array, module=__file__, parameters={**shape, "row_cycles": array.row_cycles})


ROW_LINES = 3
"""Lines of every row of this test, K and V."""


class Model:
    """What the array holds, and what each operation must give."""

    def __init__(self, lanes, queries, finish_lanes):
        self.lanes, self.queries, self.finish_lanes = lanes, queries, finish_lanes
        self.kept = {}
        self.sums = {}
        self.flags = {}
        self.dots = None

    def load(self, operation, elements):
        self.kept[operation["query"], operation["number"] % BANKS, operation["line"]] = elements

    def score(self, operation, elements):
        """The row's dot products after its last line, else None."""
        if operation["line"] == 0:
            self.dots = [dot_product([], []) for _ in range(self.queries)]
        for query, dot in enumerate(self.dots):
            kept = self.kept[query, operation["number"] % BANKS, operation["line"]]
            for a, b in zip(kept, elements, strict=True):
                dot.add(a, b)
        return self.dots if operation["last"] else None

    def value(self, operation, elements, weights):
        for query, weight in enumerate(weights):
            for lane, element in enumerate(elements):
                place = query, operation["number"] % BANKS, operation["line"], lane
                if operation["first"]:
                    self.sums[place], self.flags[place] = None, 0
                if weight["significand"] == 0:
                    continue
                if element.special is Special.NAN:
                    self.flags[place] |= LANE_NAN
                elif element.special:
                    self.flags[place] |= LANE_NEGATIVE_INFINITY if element.sign else LANE_POSITIVE_INFINITY
                else:
                    self.sums[place] = merge(
                        self.sums[place],
                        term(
                            element.sign,
                            weight["significand"] * element.significand,
                            weight["exponent"] - 17 + element.exponent,
                        ),
                    )

    def read(self, operation):
        """State and flags of the line that is read, None where nothing was ever added; in groups of lanes."""
        places = [
            (operation["read_query"], operation["read_bank"], operation["read_line"], lane)
            for lane in range(self.lanes)
        ]
        line = [(self.sums[p], self.flags[p]) if p in self.sums else None for p in places]
        return [line[n : n + self.finish_lanes] for n in range(0, self.lanes, self.finish_lanes)]


@cocotb.test()
@cocotb.parametrize(kind=["plain", "special"])
async def equals_the_contract(dut, kind):
    await start(dut)
    rng = random("operations", kind)
    lanes, queries, finish_lanes = (parameters()[name] for name in ("lanes", "queries", "finish_lanes"))
    model = Model(lanes, queries, finish_lanes)
    layout = array_operation(UnitShape(lanes=lanes, queries=queries, finish_lanes=finish_lanes))

    def line(operation, form):
        """A line's word, which lanes count, scales, and the elements of the operation's part."""
        parts = 16 // form.bits
        word = codes(rng, form, parts * lanes, kind)
        present = rng.choice([(1 << lanes) - 1, rng.getrandbits(lanes)])
        present = (1 << lanes) - 1 if operation.get("value") else present  # all lanes of V count
        own = word[operation["part"] * lanes :][:lanes]
        elements = decode_all([code if present >> n & 1 else 0 for n, code in enumerate(own)], form)
        of = BF16 if form.bits == 16 else rng.choice([SCALE_FORMATS[n] for n in ("bf16", "fp16", "e4m3")])
        scales = [0x3F80 if form.bits == 16 else codes(rng, of, 1, kind)[0] for _ in range(-(-lanes // 16))]
        decoded = decode_all(scales, of)
        elements = [
            scaled(element, decoded[n // 16]) if present >> n & 1 else element
            for n, element in enumerate(elements)
        ]
        return pack_codes(word, form), present, (scales, of), elements

    def pack_codes(word, form):
        return sum(code << form.bits * n for n, code in enumerate(word))

    items = []
    reads = {}  # beats, by the cycle in which they are there

    def add(operation, weights=None):
        form = rng.choice([BF16, FP16] if operation.get("load") else list(ELEMENT_FORMATS.values()))
        width = {16: CodeWidth.WHOLE, 8: CodeWidth.BYTE, 4: CodeWidth.NIBBLE}[form.bits]
        operation = {
            **operation,
            "kind": {"fp16" if form is FP8_E5M2 else form.name: 1},
            "width": width,
            "part": rng.randrange(16 // form.bits),
        }
        at = len(items) + Array.read_cycles
        if not operation.get("value") and at not in reads and rng.random() < 0.7:
            operation |= {
                "read": 1,
                "read_bank": rng.randrange(BANKS),
                "read_query": rng.randrange(queries),
                "read_line": rng.randrange(ROW_LINES),
            }
        word, present, scales, elements = line(operation, form)
        dots = None
        if operation.get("load"):
            model.load(operation, elements)
        elif operation.get("score"):
            dots = model.score(operation, elements)
        elif operation.get("value"):
            model.value(operation, elements, weights)
        if operation.get("read"):
            reads.update({at + n: beat for n, beat in enumerate(model.read(operation))})
        items.append((operation, word, present, weights, dots, scales))

    begun = set()
    for number in range(BANKS):
        for query in range(queries):
            for line_number in range(ROW_LINES):
                add({"load": 1, "number": number, "query": query, "line": line_number})
    add({})
    for _ in range(400):
        number = rng.randrange(PASSES)
        what = rng.choice(["score", "score", "value", "value", "value", "load", "idle", "end"])
        if what == "load":
            place = {"query": rng.randrange(queries), "line": rng.randrange(ROW_LINES)}
            add({"load": 1, "number": number, **place})
            add({})  # a K line leaves a cycle
        elif what == "idle":
            add({})
        elif what == "end":
            add({"end": 1, "number": number})
        elif what == "score":
            for n in range(ROW_LINES):
                add({"score": 1, "number": number, "line": n, "last": int(n == ROW_LINES - 1)})
        else:
            first = int(number % BANKS not in begun or rng.random() < 0.1)
            begun.add(number % BANKS)
            weights = [
                {
                    "significand": rng.choice([0, *[rng.randrange(1 << 17, 1 << 18) for _ in range(5)]]),
                    "exponent": rng.choice([rng.randrange(-3, 4), rng.randrange(-70, 70)]),
                }
                for _ in range(queries)
            ]
            for n in range(ROW_LINES):
                add({"value": 1, "number": number, "line": n, "first": first}, weights)

    row_cycles = parameters()["row_cycles"]
    edge = RisingEdge(dut.clk)
    rows = ends = lanes_read = 0
    for cycle in range(len(items) + max(row_cycles, Array.read_cycles + lanes // finish_lanes)):
        if cycle < len(items):
            operation, word, present, *_ = items[cycle]
            dut.operation.value = pack(layout, operation)
            dut.line.value = word
            dut.present.value = present
        else:
            dut.operation.value = 0
        if Array.scale_cycles <= cycle < len(items) + Array.scale_cycles:
            scales, of = items[cycle - Array.scale_cycles][5]
            dut.scales.value = sum(code << 16 * n for n, code in enumerate(scales))
            dut.scale_kind.value = pack(CodeKind, {of.name: 1})
        at_weight = cycle - Array.weight_cycles
        weights = items[at_weight][3] if 0 <= at_weight < len(items) else None
        if weights:
            dut.weights.value = pack(data.ArrayLayout(Weight, queries), weights)
        await edge
        done = cycle - row_cycles
        operation, *_, dots, _ = items[done] if 0 <= done < len(items) else ({}, None, None)
        assert value(dut.row_valid) == (dots is not None or operation.get("end", 0))
        if value(dut.row_valid):
            row = unpack(row_dots(queries), value(dut.row))
            assert (row["number"], row["end"]) == (operation["number"], operation.get("end", 0))
            ends += row["end"]
        if dots is not None:
            for got, dot in zip(row["dots"], dots, strict=True):
                rows += 1
                assert got["nan"] == dot.nan
                if not dot.nan:
                    assert (got["positive"], got["negative"]) == (dot.positive, dot.negative)
                some = got["top"] != empty_top(DOT_TOP_BITS)
                assert ((got["top"], got["high"], got["low"]) if some else None) == dot.state
        assert value(dut.read_valid) == (cycle in reads)
        if cycle in reads:
            got = unpack(data.ArrayLayout(LanePartial, finish_lanes), value(dut.lanes_read))
            for lane, expected in zip(got, reads[cycle], strict=True):
                if expected is not None:
                    lanes_read += 1
                    held = lane["state"]
                    assert ((held["top"], held["high"], held["low"]) if held["some"] else None) == expected[0]
                    assert lane["flags"] == expected[1]
    assert rows > 50
    assert ends > 10
    assert lanes_read > 100
