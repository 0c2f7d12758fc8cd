"""Ranges: pieces of plain passes, windows and lists against plain Python, with idle and backpressure."""

import random

import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator
from nearkv_hw.abi.descriptor import RANGE, Status
from nearkv_hw.command.ranges import Ranges
from nearkv_hw.command.records import PageWork, RangeWork, Run, WalkLine, WalkRead
from nearkv_hw.interfaces import Fault
from nearkv_sim.cocotb.payload import pack, unpack

ROWS = 1 << 12


class Memory:
    """Lines of lists, some of which cannot be read."""

    def __init__(self, rng):
        self.rng, self.lines, self.faults = rng, {}, {}

    def place(self, ranges):
        """A list in whole lines; the first one's number."""
        first = 16 * len(self.lines)
        for n in range(0, len(ranges), 8):
            pairs = ranges[n : n + 8]
            self.lines[first + n // 8] = sum(
                RANGE.pack(begin=b, end=e) << 64 * i for i, (b, e) in enumerate(pairs)
            )
            if self.rng.random() < 0.05:
                self.faults[first + n // 8] = self.rng.choice([Fault.DENIED, Fault.POISON])
        return first


def random_work(rng, memory):
    """A pass, and the runs of rows and the status that are expected of it."""
    begin, end = sorted(rng.sample(range(ROWS), 2)) if rng.random() < 0.9 else (7, 7)
    work = {"begin": begin, "end": end, "kept_end": 0, "tail_begin": 0, "tail_end": end}
    work |= {"pages": {"page_rows_log2": rng.randint(2, 6)}, "entry_line": rng.randrange(1 << 20)}
    if rng.random() < 0.6:
        least = rng.choice([0, begin])
        work["tail_end"] = rng.choice([end, rng.randint(least, end)])
        work["kept_end"], work["tail_begin"] = sorted(rng.randint(least, end) for _ in range(2))
        work["kept_end"] = min(work["kept_end"], work["tail_end"])
    given, status = [(begin, end)], Status.OK
    if rng.random() < 0.7:
        count = rng.choice([0, 1, 2, rng.randrange(30)])
        edges = sorted(rng.sample(range(begin, end + 1), min(2 * count, (end - begin) // 2 * 2)))
        given = list(zip(edges[::2], edges[1::2], strict=True))
        if given and rng.random() < 0.2:
            n = rng.randrange(len(given))
            given[n] = rng.choice([(given[n][0],) * 2, given[n][::-1], (0, end + 1), (1 << 31, 1 << 31 | 9)])
        work |= {"listed": 1, "count": len(given), "list_line": memory.place(given) if given else 0}
        given, status = good_part(given, work, memory)
    parts = []
    for b, e in given:
        cut = [(b, min(e, work["kept_end"])), (max(b, work["tail_begin"]), min(e, work["tail_end"]))]
        parts += [(b, e) for b, e in cut if b < e]
    return work, parts, status


def good_part(given, work, memory):
    """The ranges before the first fault, and that fault."""
    risen = work["begin"]
    for n, (b, e) in enumerate(given):
        fault = memory.faults.get(work["list_line"] + n // 8, Fault.NONE)
        if fault is not Fault.NONE:
            return given[:n], Status.POISON if fault is Fault.POISON else Status.DENIED
        if not risen <= b < e <= work["end"]:
            return given[:n], Status.BAD_LIST
        risen = e
    return given, Status.OK


@pytest.mark.parametrize("seed", range(4))
def test_pieces(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    memory = Memory(rng)
    passes = [random_work(rng, memory) for _ in range(60)]
    block = Ranges()
    pieces, runs, reads = [], [], []

    async def feed(ctx):
        for work, _, _ in passes:
            while rng.random() < 0.3:
                await ctx.tick()
            ctx.set(Value.cast(block.i.payload), pack(RangeWork, work))
            ctx.set(block.i.valid, 1)
            while not ctx.get(block.i.ready):
                await ctx.tick()
            await ctx.tick()
            ctx.set(block.i.valid, 0)

    async def answer(ctx):
        ctx.set(block.reads.ready, 1)
        while True:
            offered = bool(reads) and rng.random() < 0.5
            if offered:
                line = reads[0]["line"]
                fault = memory.faults.get(line, Fault.NONE)
                data = memory.lines[line] if fault is Fault.NONE else rng.getrandbits(512)
                answered = {"data": data, "fault": fault.value, "last": reads[0]["last"]}
                ctx.set(Value.cast(block.lines.payload), pack(WalkLine, answered))
            ctx.set(block.lines.valid, offered)
            while True:
                taken = offered and ctx.get(block.lines.ready)
                if ctx.get(block.reads.valid):
                    reads.append(unpack(WalkRead, ctx.get(Value.cast(block.reads.payload))))
                await ctx.tick()
                if taken or not offered:
                    break
            if taken:
                reads.pop(0)

    def taker(port, shape, found):
        async def take(ctx):
            while True:
                ctx.set(port.ready, rng.random() < 0.6)
                if ctx.get(port.valid) and ctx.get(port.ready):
                    found.append(unpack(shape, ctx.get(Value.cast(port.payload))))
                await ctx.tick()

        return take

    async def watch(ctx):
        for _ in range(60_000):
            await ctx.tick()
            if sum(piece["last"] for piece in pieces) == len(passes) and len(runs) == len(pieces):
                return
        raise AssertionError(f"{len(pieces)} pieces, {len(runs)} runs")

    simulator = Simulator(block)
    simulator.add_clock(1e-6)
    simulator.add_testbench(watch)
    for process in (feed, answer, taker(block.o, PageWork, pieces), taker(block.runs, Run, runs)):
        simulator.add_testbench(process, background=True)
    simulator.run()

    at = iter(zip(pieces, runs, strict=True))
    for number, (work, parts, status) in enumerate(passes):
        found = []
        while True:
            piece, run = next(at)
            log2 = work["pages"]["page_rows_log2"]
            if not piece["empty"]:
                first, last = piece["first_page"], piece["last_page"]
                rows = (first << log2) + piece["first_begin"], (last << log2) + piece["last_end"]
                assert piece["first_index"] == first << log2
                lines = last // 8 - first // 8 + 1
                assert (run["line"], run["count"]) == (work["entry_line"] + first // 8, lines)
                found.append(rows)
            else:
                assert run["count"] == 0
            if piece["last"]:
                break
        assert found == parts, f"seed {seed}, pass {number}: {work}"
        assert piece["status"] == status.value
