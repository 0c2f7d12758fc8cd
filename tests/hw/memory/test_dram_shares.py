"""Shares of a DRAM controller when both clients want it, one of them in the worst way; nobody starves."""

import cocotb
import pytest
from dram_bench import ControllerBench, Traffic, place_line
from nearkv_hw.abi.dram import PARTS, Dram, Refresh
from nearkv_hw.memory.dram.drain import STALE_FRAMES
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, start, value

PARTS_AND_SHARES = [
    pytest.param(dram, share, marks=() if often else pytest.mark.slow, id=f"{dram.name}-{share}".lower())
    for dram, share, often in (
        *((dram, 8, dram in (Dram.DDR5_6400, Dram.HBM3_6400)) for dram in PARTS),
        *((Dram.DDR5_6400, share, share == 2) for share in (0, 2, 14, 16)),
    )
]
TURNS_FRAMES = 256


@pytest.mark.rtl
@pytest.mark.parametrize(("dram", "share"), PARTS_AND_SHARES)
def test_shares(dram, share):
    run(
        ControllerBench(dram=dram, fabric_share=share),
        module=__file__,
        parameters={"dram": dram, "share": share},
    )


def hits(bench):
    """One row in each of two banks."""
    for i in range(2 * bench.long_frames):
        yield {"line": place_line(bench.part, i % 2, 0, i // 2 % bench.part.row_lines)}


def other_hits(bench):
    """Other rows of the same banks."""
    for i in range(2 * bench.long_frames):
        yield {"line": place_line(bench.part, i % 2, 1, i // 2 % bench.part.row_lines)}


def hammer(bench, write=0):
    """Another row of the same two banks each time."""
    for i in range(bench.long_frames):
        yield {"line": place_line(bench.part, i % 2, 5 + i % 1000, 0), "write": write}


def hammer_writes(bench):
    return hammer(bench, write=1)


def stream(bench):
    """Lines in order."""
    for i in range(2 * bench.long_frames):
        yield {"line": i}


def stream_far(bench):
    for i in range(2 * bench.long_frames):
        yield {"line": bench.lines // 4 + i}


def stream_writes(bench):
    for i in range(2 * bench.long_frames):
        yield {"line": bench.lines // 2 + i, "write": 1}


def reads(items):
    """What the unit can ask."""
    return ({"line": item["line"]} for item in items)


async def shares(dut, unit, fabric):
    """Lines of the unit, lines read by the fabric, and lines written, each per frame that refresh leaves."""
    await start(dut)
    bench = Traffic(dut, parameters()["dram"], Refresh.ALL_BANK)
    bench.unit.send(reads(unit(bench)))
    bench.fabric.send(fabric(bench))
    frames = bench.long_frames // 2
    counts = await bench.count(frames)
    names = ("unit_lines", "fabric_lines", "written_lines")
    result = [counts[name] / frames / bench.ceiling for name in names]
    dut._log.info(f"unit {result[0]:.3f}, fabric reads {result[1]:.3f}, writes {result[2]:.3f}")
    return result


@cocotb.test()
@cocotb.parametrize(fabric=[other_hits, hammer, hammer_writes, stream_far, stream_writes])
async def the_unit_has_its_share(dut, fabric):
    least = 1 - parameters()["share"] / 16
    unit, *_ = await shares(dut, hits if fabric in (other_hits, hammer, hammer_writes) else stream, fabric)
    assert unit >= (0.95 if fabric is stream_writes else 0.97) * least
    assert unit > 0.0005


@cocotb.test()
@cocotb.parametrize(unit=[other_hits, hammer, stream_far])
async def the_fabric_has_its_share(dut, unit):
    least = parameters()["share"] / 16
    _, fabric, _ = await shares(dut, unit, stream if unit is stream_far else hits)
    # In the same banks each turn closes and opens rows, in the time of the fabric.
    lost = 0.06 if unit is stream_far else 0.36
    assert fabric >= (1 - lost) * least or least < 0.2
    assert fabric > 0.0005


@cocotb.test()
@cocotb.parametrize(unit=[hammer, stream])
async def the_fabrics_writes_have_its_share(dut, unit):
    least = parameters()["share"] / 16
    timings = Traffic(dut, parameters()["dram"], Refresh.ALL_BANK).frames
    *_, written = await shares(dut, unit, stream_writes)
    frames = written * max(1, timings.column_same_group_write / 2)
    assert frames >= 0.8 * least or least < 0.2
    assert written > 0.0005


@cocotb.test()
@cocotb.parametrize(of_unit=[True, False], other=[True, False])
async def hits_never_starve_a_miss_of_their_bank(dut, of_unit, other):
    """A client streams hits; the same one, or the other, now and then reads another row of the bank."""
    await start(dut)
    bench = Traffic(dut, parameters()["dram"], Refresh.ALL_BANK)
    answers = StreamSink(dut, "answers")
    busy, rare = (bench.unit, bench.fabric) if of_unit else (bench.fabric, bench.unit)
    if not other:
        rare = busy
    row, each = bench.part.row_lines, 700

    def item(n):
        return {"line": place_line(bench.part, n % 2, 0, n // 2 % row)}

    def miss(n):
        return {"line": place_line(bench.part, n % 2, 1 + n, 3), "tag": 1}

    frames = 8 * each
    if other:
        busy.send(item(n) for n in range(2 * frames))
        for n in range(8):
            rare.send([miss(n)])
            await bench.pass_frames(each)
        await bench.pass_frames(frames)
    else:
        busy.send(miss(n // each) if n % each == each - 1 else item(n) for n in range(frames))
        await bench.pass_frames(2 * frames)
    taken = [
        at
        for source in {busy, rare}
        for n, at in enumerate(source.cycles)
        if (source is rare if other else n % each == each - 1)
    ]
    tag_at = 1  # above the bit that says whose answer it is
    got = await answers.receive(len(answers))
    came = [at for at, answer in zip(answers.cycles, got, strict=True) if answer >> tag_at & 0xFFFF == 1]
    assert len(came) == len(taken) == 8
    t = bench.frames
    refresh = t.refresh + t.precharge_to_refresh + t.activate_to_precharge
    # Of each turn of the unit up to 60 frames are taken off the fabric's, which with no share has 4.
    turns = 1 if other is False or parameters()["share"] > 2 else 16
    most = turns * TURNS_FRAMES + refresh + 100
    assert all((b - a) // bench.part.subchannels <= most for a, b in zip(taken, came, strict=True))


@cocotb.test()
async def few_writes_go_although_reads_never_end(dut):
    await start(dut)
    bench = Traffic(dut, parameters()["dram"], Refresh.ALL_BANK)
    bench.unit.send(reads(stream(bench)))
    bench.fabric.send([{"line": bench.lines // 2, "write": 1, "data": 1}])
    await bench.pass_frames(STALE_FRAMES + TURNS_FRAMES + 2 * bench.frames.refresh + 100)
    assert value(dut.written_lines) == 1
