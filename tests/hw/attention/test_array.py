# amaranth: UnusedElaboratable=no
"""The array: query, K and V lines and reads in any order give exact dot products, sums and lane flags."""

from dataclasses import replace
from itertools import product

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
from nearkv_hw.attention.shape import BANKS, PASSES, LineParts, UnitShape
from nearkv_hw.interfaces import LanePartial
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import random, start, value
from unit_cases import codes


@pytest.mark.rtl
@pytest.mark.parametrize(
    "shape",
    [
        {"lanes": 4, "line_lanes": 4, "queries": 2, "finish_lanes": 2, "max_dim": 128},
        {"lanes": 8, "line_lanes": 8, "queries": 1, "finish_lanes": 4, "max_dim": 128},
        {"lanes": 32, "line_lanes": 8, "queries": 1, "finish_lanes": 2, "max_dim": 128},
    ],
    ids=lambda shape: f"{shape['lanes']}x{shape['queries']}",
)
def test_array(shape):
    array = Array(shape=UnitShape(**shape))
    run(array, module=__file__, parameters={**shape, "row_cycles": array.row_cycles})


ROW_LINES = 3
"""Steps of every row of this test, K and V."""


class Model:
    """What the array holds, and what each operation must give."""

    def __init__(self, shape):
        self.shape, self.queries = shape, range(shape.queries)
        self.kept = {}  # elements of queries, by the lane
        self.sums = {}
        self.flags = {}
        self.dots = None

    def load(self, operation, elements):
        place = operation["query"], operation["number"] % BANKS, operation["line"]
        row_lanes = self.shape.lanes >> operation["abreast"]
        for first in range(operation["block"] * self.shape.line_lanes, self.shape.lanes, row_lanes):
            for lane, element in enumerate(elements[: self.shape.line_lanes], start=first):
                self.kept[*place, lane] = element

    def score(self, operation, elements):
        """Dot products of each row abreast, or of a row or a pair of rows after its last line, else None."""
        if operation["line"] == 0 and not operation["goes_on"]:
            rows = range(1 << operation["abreast"])
            self.dots = [[dot_product([], []) for _ in self.queries] for _ in rows]
        row_lanes = self.shape.lanes >> operation["abreast"]
        for lane, element in enumerate(elements):
            for query, dot in enumerate(self.dots[lane // row_lanes] if element else ()):
                of_query = self.kept[query, operation["number"] % BANKS, operation["line"], lane]
                if not operation["drop"] >> of_query.sign & 1:
                    dot.add(of_query, element)
        return self.dots if operation["last"] else None

    def value(self, operation, elements, weights):
        row_lanes = self.shape.lanes >> operation["abreast"]
        for query, lane in product(self.queries, range(self.shape.lanes)):
            weight = weights[lane // row_lanes][query]
            place = query, operation["number"] % BANKS, operation["line"], lane
            if operation["first"]:
                self.sums[place], self.flags[place] = None, 0
            if weight["significand"] == 0 or elements[lane] is None:
                continue
            element = elements[lane]
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
        place = operation["read_query"], operation["read_bank"], operation["read_line"]
        line = []
        for lane in range((operation["read_groups"] + 1) * self.shape.finish_lanes):
            state, flags = None, 0
            for own in range(lane, self.shape.lanes, self.shape.lanes >> operation["read_abreast"]):
                if (*place, own) not in self.sums:
                    break
                state = merge(state, self.sums[*place, own])
                flags |= self.flags[*place, own]
            else:
                line.append((state, flags))
                continue
            line.append(None)
        return [line[n:][: self.shape.finish_lanes] for n in range(0, len(line), self.shape.finish_lanes)]


@cocotb.test()
@cocotb.parametrize(kind=["plain", "special"])
async def equals_the_contract(dut, kind):
    await start(dut)
    rng = random("operations", kind)
    shape = UnitShape(**{name: value for name, value in parameters().items() if name != "row_cycles"})
    lanes, queries, finish_lanes = shape.lanes, shape.queries, shape.finish_lanes
    most, read_cycles = shape.rows_abreast, Array(shape=shape).read_cycles
    model = Model(shape)
    layout = array_operation(shape)

    def line(operation, form):
        """A line's word, scales, and the elements of the operation's part, as many as count."""
        word = codes(rng, form, 16 // form.bits * shape.line_lanes, kind)
        count = len(word) >> operation["parts"].value
        part = word[operation["part"] * count :][:count]
        abreast = 0 if operation.get("load") else operation["abreast"]
        count, row_lanes = min(len(part), lanes) >> abreast, lanes >> abreast
        operation["count"] = count if operation.get("load") else rng.choice([count, rng.randint(0, count)])
        own = [None] * lanes
        last = operation["place"] + operation["rows"]
        for row in range(operation["place"], last + 1):
            stored = part[row * len(part) >> abreast :][: operation["count"]]
            own[row * row_lanes : row * row_lanes + len(stored)] = stored
        elements = [None if code is None else form.decode(code) for code in own]
        of = BF16 if form.bits == 16 else rng.choice([SCALE_FORMATS[n] for n in ("bf16", "fp16", "e4m3")])
        scales = [
            0x3F80 if form.bits == 16 else codes(rng, of, 1, kind)[0] for _ in range(shape.scale_groups)
        ]
        decoded = decode_all(scales, of)
        elements = [x and scaled(x, decoded[n // shape.scale_lanes]) for n, x in enumerate(elements)]
        if operation.get("load"):  # a NaN has a sign bit, too
            elements = [x and replace(x, sign=code >> 15) for x, code in zip(elements, own, strict=True)]
        return pack_codes(word, form), (scales, of), elements

    def pack_codes(word, form):
        return sum(code << form.bits * n for n, code in enumerate(word))

    items = []
    reads = {}  # beats, by the cycle in which they are there

    def add(operation, weights=None):
        form = rng.choice([BF16, FP16] if operation.get("load") else list(ELEMENT_FORMATS.values()))
        width = {16: CodeWidth.WHOLE, 8: CodeWidth.BYTE, 4: CodeWidth.NIBBLE}[form.bits]
        operation = {
            "abreast": 0,
            "place": 0,
            "rows": 0,
            **operation,
            "kind": {"fp16" if form is FP8_E5M2 else form.name: 1},
            "width": width,
            "parts": LineParts.ONE
            if operation.get("load") or operation.get("abreast")
            else rng.choice(list(LineParts)),
        }
        operation["part"] = rng.randrange(1 << operation["parts"].value)
        at = len(items) + read_cycles
        free = not {at, at - 1} & set(reads)
        if not operation.get("value") and free and rng.random() < 0.7:
            operation |= {
                "read": 1,
                "read_bank": rng.randrange(BANKS),
                "read_query": rng.randrange(queries),
                "read_line": rng.randrange(ROW_LINES),
                "read_groups": rng.randrange(shape.groups),
                "read_abreast": rng.randrange(3) if most > 1 else 0,
            }
            operation["read_groups"] %= shape.groups >> operation["read_abreast"]
        word, scales, elements = line(operation, form)
        dots = None
        if operation.get("load"):
            model.load(operation, elements)
        elif operation.get("score"):
            dots = model.score(operation, elements)
        elif operation.get("value"):
            model.value(operation, elements, weights)
        if operation.get("read"):
            reads.update({at + n: beat for n, beat in enumerate(model.read(operation))})
        items.append((operation, word, weights, dots, scales))

    def rows_abreast():
        """Some rows abreast, or none."""
        if most == 1 or rng.random() < 0.5:
            return {}
        abreast = rng.choice([1, 2])
        place = rng.randrange(1 << abreast)
        return {"abreast": abreast, "place": place, "rows": rng.randrange((1 << abreast) - place)}

    begun = set()
    for number in range(BANKS):
        for query in range(queries):
            for line_number, block in product(range(ROW_LINES), range(shape.wide)):
                add({"load": 1, "number": number, "query": query, "line": line_number, "block": block})
    add({})
    for _ in range(400):
        number = rng.randrange(PASSES)
        what = rng.choice(["score", "score", "value", "value", "value", "load", "idle", "end"])
        if what == "load":
            place = {
                "query": rng.randrange(queries),
                "line": rng.randrange(ROW_LINES),
                "block": rng.randrange(shape.wide),
            }
            if most > 1 and rng.random() < 0.4:
                abreast = rng.choice([1, 2])
                place |= {"abreast": abreast, "line": 0, "block": rng.randrange(shape.wide >> abreast)}
            add({"load": 1, "number": number, **place})
            add({})  # a K line leaves a cycle
        elif what == "idle":
            add({})
        elif what == "end":
            add({"end": 1, "number": number})
        elif what == "score" and (rows := rows_abreast()):
            add({"score": 1, "number": number, "line": 0, "last": 1, "goes_on": 0, "drop": 0, **rows})
        elif what == "score":
            pair = rng.random() < 0.5
            drops = rng.choice([(1, 2), (2, 1), (0, 3)]) if pair else (0,)
            for second, drop in enumerate(drops):
                for n in range(ROW_LINES):
                    last = int(n == ROW_LINES - 1 and second == pair)
                    row = {"last": last, "goes_on": second, "drop": drop}
                    add({"score": 1, "number": number, "line": n, **row})
        else:
            first = int(number % BANKS not in begun or rng.random() < 0.1)
            of_row = rows_abreast() if number % BANKS in begun else {}  # they have but the first line's sums
            begun.add(number % BANKS)
            weights = [
                [
                    {
                        "significand": rng.choice([0, *[rng.randrange(1 << 17, 1 << 18) for _ in range(5)]]),
                        "exponent": rng.choice([rng.randrange(-3, 4), rng.randrange(-70, 70)]),
                    }
                    for _ in range(queries)
                ]
                for _ in range(1 << of_row.get("abreast", 0))
            ]
            if of_row:
                add({"value": 1, "number": number, "line": 0, "first": first, **of_row}, weights)
                continue
            for n in range(ROW_LINES):
                add({"value": 1, "number": number, "line": n, "first": first}, weights)

    row_cycles = parameters()["row_cycles"]
    edge = RisingEdge(dut.clk)
    rows = ends = lanes_read = 0
    for cycle in range(len(items) + max(row_cycles, read_cycles + lanes // finish_lanes)):
        if cycle < len(items):
            operation, word, *_ = items[cycle]
            dut.operation.value = pack(layout, operation)
            dut.line.value = word
        else:
            dut.operation.value = 0
        if Array.scale_cycles <= cycle < len(items) + Array.scale_cycles:
            scales, of = items[cycle - Array.scale_cycles][4]
            dut.scales.value = sum(code << 16 * n for n, code in enumerate(scales))
            dut.scale_kind.value = pack(CodeKind, {of.name: 1})
        at_weight = cycle - Array.weight_cycles
        weights = items[at_weight][2] if 0 <= at_weight < len(items) else None
        if weights:
            of_blocks = [weights[n * len(weights) // most] for n in range(most)]
            dut.weights.value = pack(data.ArrayLayout(data.ArrayLayout(Weight, queries), most), of_blocks)
        await edge
        done = cycle - row_cycles
        operation, *_, dots, _ = items[done] if 0 <= done < len(items) else ({}, None, None)
        assert value(dut.row_valid) == (dots is not None or operation.get("end", 0))
        if value(dut.row_valid):
            row = unpack(row_dots(queries, most), value(dut.row))
            assert (row["number"], row["end"]) == (operation["number"], operation.get("end", 0))
            if most > 1:
                assert (row["place"], row["rows"]) == (operation["place"], operation["rows"])
            ends += row["end"]
        if dots is not None:
            there = range(operation["place"], operation["place"] + operation["rows"] + 1)
            for got, dot in (pair for n in there for pair in zip(row["dots"][n], dots[n], strict=True)):
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
