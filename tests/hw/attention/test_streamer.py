# amaranth: UnusedElaboratable=no
"""The order of lines: every row once, V behind its K, K as far ahead as there are slots, no cycle lost."""

import cocotb
import pytest
from amaranth.lib import data
from cocotb.triggers import RisingEdge
from nearkv_hw.attention.scoring import WEIGHT_SLOTS
from nearkv_hw.attention.shape import PASSES, RowBlock, UnitShape
from nearkv_hw.attention.streamer import LineKind, Streamer, geometry, line_tag
from nearkv_hw.interfaces import PageItem, ReadRequest
from nearkv_sim.cocotb.payload import pack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start

SCALES = {LineKind.K_SCALES: LineKind.K, LineKind.V_SCALES: LineKind.V}


@pytest.mark.rtl
@pytest.mark.parametrize("shape", [{}, {"lanes": 128}], ids=["one row", "rows abreast"])
def test_streamer(shape):
    run(Streamer(shape=UnitShape(**shape), outstanding=16), module=__file__, parameters=shape)


class Bench:
    """Sends passes, starts them in turn, and follows the tags."""

    def __init__(self, dut, name, *, idle=0.0, backpressure=0.0):
        self.dut = dut
        self.rng = random(name)
        self.shape = UnitShape(**parameters())
        self.pages = StreamSource(dut, "pages", idle=idle, shape=PageItem)
        self.requests = StreamSink(dut, "requests", backpressure=backpressure, shape=ReadRequest)
        self.tags = StreamSink(dut, "tags", backpressure=backpressure, shape=line_tag(self.shape))
        self.blocks = StreamSink(dut, "rows", shape=RowBlock)
        self.geometry = [{}] * PASSES
        dut.loaded.value = (1 << PASSES) - 1

    def set_geometry(self, number, k_lines, v_lines, k_scales=None, v_scales=None, pitches=(0, 0), bounds=0):
        """Lines of rows, log2 of the bytes of a row's scales, if there are any, and of the rows of a line."""
        rows = [
            {
                "last": lines - 1,
                "pitch": pitch,
                "scaled": int(scales is not None),
                "scale_shift": scales or 0,
            }
            for lines, scales, pitch in ((k_lines, k_scales, pitches[0]), (v_lines, v_scales, pitches[1]))
        ]
        self.geometry[number] = {"tenant": number + 1, "bounds": bounds, "k": rows[0], "v": rows[1]}
        if self.shape.rows_abreast > 1:
            self.geometry[number]["abreast"] = int(pitches[0] == pitches[1] != 0)
        self.dut.geometry.value = pack(data.ArrayLayout(geometry(self.shape), PASSES), self.geometry)

    async def start(self, number):
        self.dut.start.value = 1 << number
        await RisingEdge(self.dut.clk)
        self.dut.start.value = 0

    def send(self, number, pages):
        """Send a pass; returns its lines of K and V: (line, page), of scales with the row that comes next, of
        rows with the place of the first and how many more of them count."""
        items, lines = [], {"k": [], "v": []}
        for page, rows in enumerate(pages):
            item = {"last": 0, "page": page, "rows": rows, "row": self.rng.randrange(64)}
            for kind, of in lines.items():
                stored = self.geometry[number][kind]
                first, scales = (self.rng.getrandbits(30) for _ in range(2))
                item |= {f"{kind}_line": first, f"{kind}_scales": scales}
                shared = 1 << stored["pitch"]
                row = 0
                while row < rows:
                    there = item["row"] + row
                    shared_scales = max(64 >> stored["scale_shift"], 1)
                    if stored["scaled"] and (row == 0 or there % shared_scales == 0):
                        for second in range(1 + (stored["scale_shift"] > 6)):
                            of.append((scales, page, (there % 64, second), None, None))
                            scales += 1
                    place = there % shared
                    taken = min(shared - place, rows - row)
                    last = stored["last"]
                    of += [(first + n, page, None, place, taken - 1) for n in range(last + 1)]
                    first += last + 1
                    row += taken
            items.append(item)
        self.pages.send([*items, {"last": 1}])
        return lines["k"], lines["v"]


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.5])
async def streams_every_row_once_and_v_behind_k(dut, idle, backpressure):
    await start(dut)
    bench = Bench(dut, f"rows {idle} {backpressure}", idle=idle, backpressure=backpressure)
    plans = [
        (1, 1),
        (4, 2, 1, 1),
        (2, 8, 7, None),
        (1, 3, None, 0),
        (8, 8, 5, 7),
        (1, 1, 4, 0),
        (2, 1, 2, 4),
        (1, 1, None, None, (1, 2)),
        (1, 1, 0, 2, (2, 2)),
        (1, 4, 1, None, (1, 0)),
        (3, 1, None, 0, (0, 2)),
    ]
    for number in range(PASSES):
        bench.set_geometry(number, *plans[number])
    for number in range(PASSES):
        await bench.start(number)
    for turn, plan in enumerate(plans):
        number = turn % PASSES
        bench.dut.loaded.value = bench.rng.getrandbits(PASSES)
        if turn >= PASSES:  # as the loader does: the earlier pass of the number is over
            bench.set_geometry(number, *plan)
            await bench.start(number)
        pages = [bench.rng.choice([1, 3, 4, 16, 17, 40]) for _ in range(bench.rng.choice([0, 1, 6]))]
        lines = dict(zip((LineKind.K, LineKind.V), bench.send(number, pages), strict=True))
        at = dict.fromkeys(lines, 0)
        rows = dict.fromkeys(lines, 0)
        line_of_row = 0
        ends = []
        while LineKind.V_END not in ends:
            (tag,) = await bench.tags.receive()
            kind = LineKind(tag["kind"])
            if kind in (LineKind.K_END, LineKind.V_END):
                ends.append(kind)
                continue
            (request,) = await bench.requests.receive()
            scales = kind in SCALES
            kind = SCALES.get(kind, kind)
            told = (tag["row"], tag["second"])
            known = (told, None, None) if scales else (None, tag["place"], tag["rows"])
            assert (request["line"], tag["page"], *known) == lines[kind][at[kind]]
            assert request["tenant"] == number + 1
            at[kind] += 1
            line_of_row = 0 if scales else line_of_row + 1
            if line_of_row == bench.geometry[number]["kv"[kind is LineKind.V]]["last"] + 1:
                rows[kind] += 1 if bench.geometry[number].get("abreast") else tag["rows"] + 1
                line_of_row = 0
            ahead = rows[LineKind.K] - rows[LineKind.V]
            assert 0 <= ahead <= WEIGHT_SLOTS
        assert ends == [LineKind.K_END, LineKind.V_END]
        assert at == {kind: len(expected) for kind, expected in lines.items()}
    await cycles(dut, 20)
    assert len(bench.tags) == len(bench.requests) == 0


@cocotb.test()
@cocotb.parametrize(
    page_rows=[4, 16, 64],
    row_lines=[(1, 1), (4, 4), (2, 1), (2, 2, 1, 3), (1, 1, None, None, (1, 1)), (1, 1, 2, 2, (2, 2))],
)
async def loses_no_cycle(dut, page_rows, row_lines):
    """Once V has begun, every cycle has a request until the passes end, over pages and a change of passes."""
    await start(dut)
    bench = Bench(dut, "rate")
    count = 0
    for number in range(2):
        bench.set_geometry(number, *row_lines)
    for number in range(2):
        await bench.start(number)
        k, v = bench.send(number, [page_rows] * (512 // page_rows))
        count += len(k) + len(v)
    await bench.requests.receive(count)
    when = bench.requests.cycles
    first_v = min(WEIGHT_SLOTS * row_lines[0], count // 4)
    last_k = max(count - (WEIGHT_SLOTS + 16) * row_lines[1], 3 * count // 4)
    # two ends of K or V stand between, each for one cycle
    assert when[last_k] - when[first_v] - (last_k - first_v) <= 4
    assert when[-1] - when[0] <= count + 64


@cocotb.test()
@cocotb.parametrize(loaded=[0, 1])
async def k_that_would_wait_for_its_queries_stands_back(dut, loaded):
    await start(dut)
    bench = Bench(dut, "queries")
    bench.dut.loaded.value = 1 | loaded << 1
    for number in range(2):
        bench.set_geometry(number, 2, 2)
    for number in range(2):
        await bench.start(number)
        bench.send(number, [16, 16])
    tags = await bench.tags.receive(2 * 128 + 4)
    kinds = [LineKind(tag["kind"]) for tag in tags]
    kinds = kinds[: kinds.index(LineKind.V_END)]
    # lines of the first pass, and K of the second among them if its queries are there
    assert kinds.count(LineKind.V) == 64
    assert kinds.count(LineKind.K) == (128 if loaded else 64)


@cocotb.test()
async def a_pass_of_bounds_has_no_v(dut):
    """More pages than there are slots, between two other passes, whose order stays as it is."""
    await start(dut)
    bench = Bench(dut, "bounds")
    blocks = bench.blocks
    lines = []
    for number, bounds in enumerate((0, 1, 0)):
        bench.set_geometry(number, 2, 1, bounds=bounds)
    for number, pages in enumerate(([16], [2] * 3 * WEIGHT_SLOTS, [16])):
        await bench.start(number)
        lines.append(bench.send(number, pages))
    taken = {LineKind.K: [], LineKind.V: []}
    ends = []
    while len(ends) < 6:
        (tag,) = await bench.tags.receive()
        kind = LineKind(tag["kind"])
        if kind in taken:
            taken[kind].append((await bench.requests.receive())[0]["line"])
        else:
            ends.append(kind)
    assert taken[LineKind.K] == [line for k, _ in lines for line, *_ in k]
    assert taken[LineKind.V] == [line for _, v in (lines[0], lines[2]) for line, *_ in v]
    rows = [block["rows"] for block in await blocks.receive(len(blocks))]
    assert rows == [16, *[1] * 3 * WEIGHT_SLOTS, 16]


@cocotb.test()
async def answers_in_the_stated_time(dut):
    await start(dut)
    bench = Bench(dut, "latency")
    bench.set_geometry(0, 1, 1)
    await bench.start(0)
    bench.send(0, [1])
    await bench.requests.receive()
    assert bench.requests.cycles[0] - bench.pages.cycles[0] == Streamer.request_cycles
