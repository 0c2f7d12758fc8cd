# amaranth: UnusedElaboratable=no
"""A DRAM controller against the closed forms of its part: streams, pages, random reads, mixes, latency.

The part checks every rule meanwhile. Rates are held against the ceiling that all-bank refresh leaves.
"""

import cocotb
import pytest
from dram_bench import PARTS_AND_MODES, ControllerBench, Traffic, place_line
from nearkv_hw.abi.dram import PARTS, Dram, Refresh, random_fraction
from nearkv_hw.memory.dram.controller import IDLE_FRAMES, DramController
from nearkv_hw.memory.dram.refresh import RefreshTimer
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, cycles, random, start

PAGE_LINES = 128
STREAM_PER_BANK = {
    Dram.DDR5_6400: 0.97,
    Dram.DDR5_4800: 0.95,
    Dram.LPDDR5X_8533: 0.96,
    Dram.HBM3_6400: 0.92,
}
"""Share of the peak that a stream has at least when sets of banks are refreshed one after the other."""
PAGES = {Dram.DDR5_6400: 0.98, Dram.DDR5_4800: 0.98, Dram.LPDDR5X_8533: 0.97, Dram.HBM3_6400: 0.95}
"""Share of the ceiling that pages at random places have at least. What is lost are pages whose banks the page
before them holds: one in 16 (DDR5) or 8."""
RANDOM = {Dram.DDR5_6400: 0.97, Dram.DDR5_4800: 0.97, Dram.LPDDR5X_8533: 0.955, Dram.HBM3_6400: 0.95}
"""Share of the closed form that random reads have at least."""


@pytest.mark.rtl
@pytest.mark.parametrize(("dram", "refresh"), PARTS_AND_MODES)
def test_rates(dram, refresh):
    bench = ControllerBench(dram=dram, refresh=refresh)
    run(
        bench,
        module=__file__,
        parameters={
            "dram": dram,
            "refresh": refresh,
            "unloaded_cycles": bench.controller.unloaded_cycles,
            "read_entries": bench.controller.read_entries,
        },
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"part": Dram.FIXED}, "part must be one of DDR5_6400, .*, not <Dram.FIXED"),
        ({"part": "ddr5"}, "part must be one of DDR5_6400, .*, not 'ddr5'"),
        ({"density_gbit": 5}, "DDR5_6400 has no density of 5 Gbit; there are 16, 32"),
        ({"refresh": 7}, "7 is not a valid Refresh"),
        ({"fabric_share": 17}, "fabric_share must be 0 to 16 sixteenths, not 17"),
        ({"fabric_share": 0.5}, "fabric_share must be 0 to 16 sixteenths, not 0.5"),
        ({"read_entries": 7}, "read_entries must be an integer of at least 8, not 7"),
        ({"write_entries": 8.0}, "write_entries must be an integer of at least 8, not 8.0"),
    ],
)
def test_parameters_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        DramController(**{"part": Dram.DDR5_6400, "tag": 8, **given})


def test_refresh_timer_follows_the_part():
    for dram, part in PARTS.items():
        for refresh in Refresh:
            timer = RefreshTimer(part=dram, refresh=refresh)
            ns = part.ns("REFI" if refresh is Refresh.ALL_BANK else "REFI_SET")
            assert 0 <= ns / part.cycle_ns - timer.interval_cycles < part.subchannels


def traffic(dut):
    return Traffic(dut, parameters()["dram"], parameters()["refresh"])


@cocotb.test()
async def streams_reach_the_ceiling(dut):
    await start(dut)
    bench = traffic(dut)
    frames = bench.long_frames
    bench.unit.send({"line": line} for line in range(frames + 1000))
    counts = await bench.count(frames)
    share = counts["unit_lines"] / frames
    dut._log.info(f"share of the peak {share:.4f}, of the ceiling {share / bench.ceiling:.4f}")
    if bench.refresh is Refresh.ALL_BANK:
        assert share >= 0.993 * bench.ceiling
    else:
        assert share >= STREAM_PER_BANK[bench.part.dram]


@cocotb.test()
async def pages_at_random_places_stream(dut):
    await start(dut)
    bench = traffic(dut)
    rng = random("pages")
    frames, page = bench.long_frames, PAGE_LINES // bench.part.subchannels
    starts = [page * rng.randrange(bench.lines // page) for _ in range(frames // page + 20)]
    bench.unit.send({"line": first + i} for first in starts for i in range(page))
    share = (await bench.count(frames))["unit_lines"] / frames
    dut._log.info(f"share of the peak {share:.4f}, of the ceiling {share / bench.ceiling:.4f}")
    assert share >= PAGES[bench.part.dram] * bench.ceiling


@cocotb.test()
async def random_reads_reach_their_limit(dut):
    await start(dut)
    bench = traffic(dut)
    rng = random("reads")
    frames, t = bench.long_frames, bench.frames
    bench.unit.send({"line": rng.randrange(bench.lines)} for _ in range(frames))
    share = (await bench.count(frames))["unit_lines"] / frames
    banks = bench.part.banks / t.activate_to_activate
    # where activates may be late, windows of both lengths take turns
    window = (t.four_activates + (t.late or t).four_activates) / 2
    in_frames = min(4 / window, 1 / t.activate_other_group, banks)
    closed = random_fraction(bench.part)
    of_closed, of_frames = (share / limit / bench.ceiling for limit in (closed, in_frames))
    dut._log.info(f"share of the closed form {of_closed:.4f}, in frames {of_frames:.4f}")
    if bench.refresh is Refresh.ALL_BANK:
        assert of_closed >= RANDOM[bench.part.dram]
        assert of_frames >= 0.95
    else:
        assert of_frames >= 0.92


@cocotb.test()
async def mixed_streams_lose_what_turning_costs(dut):
    """Two reads to a write, each a stream through banks of its own."""
    await start(dut)
    bench = traffic(dut)
    part, t, frames = bench.part, bench.frames, bench.long_frames
    pairs = part.banks // 4

    def line(n, half):
        run_of, at = divmod(n, 2 * part.row_lines)
        row, pair = divmod(run_of, pairs)
        return place_line(part, at % 2 + 2 * (pair + half * pairs), row, at // 2)

    accesses = (
        access
        for i in range(frames // 3)
        for access in (
            {"line": line(2 * i, 0)},
            {"line": line(2 * i + 1, 0)},
            {"line": line(i, 1), "write": 1},
        )
    )
    bench.fabric.send(accesses)
    counts = await bench.count(frames)
    reads, writes, turns = (counts[name] for name in ("fabric_lines", "written_lines", "drains"))
    # A read takes a frame, a write one or what its bank group needs, a turn there and back what it adds.
    needed = reads + writes * max(1, t.column_same_group_write / 2)
    needed += turns * (t.read_to_write - 1 + t.write_to_read_other_group - 1)
    dut._log.info(
        f"lines per frame {(reads + writes) / frames:.4f}, {writes / turns:.1f} writes a turn, "
        f"{needed / frames / bench.ceiling:.4f} of the closed form"
    )
    assert abs(reads - 2 * writes) < 100
    assert writes >= 15 * turns
    # a set that is refreshed holds up the stream that is in it
    least = 0.95 if bench.refresh is Refresh.ALL_BANK else 0.93
    assert needed >= least * bench.ceiling * frames


@cocotb.test()
async def an_unloaded_read_has_the_stated_latency(dut):
    await start(dut)
    bench = traffic(dut)
    if bench.refresh is Refresh.PER_BANK:
        return  # a refresh is never far
    answers = StreamSink(dut, "answers")
    part, rng = bench.part, random("reads")
    sources = (bench.unit, bench.fabric)
    waits = [[], []]
    for bank in range(part.banks):  # each of them closed; and no refresh yet
        await cycles(dut, 40 + bank % part.subchannels)
        client = bank // part.subchannels % 2
        sources[client].send([{"line": place_line(part, bank, rng.randrange(part.rows), 0)}])
        await answers.receive()
        waits[client].append(answers.cycles[-1] - sources[client].cycles[-1])
    unloaded = parameters()["unloaded_cycles"]
    assert set(waits[0]) == set(waits[1]) == set(range(unloaded - part.subchannels + 1, unloaded + 1))


@cocotb.test()
async def every_column_command_is_counted_once(dut):
    await start(dut)
    bench = traffic(dut)
    rng = random("accesses")
    part = bench.part
    hits, rows = 20, 12
    place = [(rng.randrange(part.banks), rng.randrange(part.rows)) for _ in range(rows)]
    for bank, row in place:
        bench.fabric.send({"line": place_line(part, bank, row, c % part.row_lines)} for c in range(hits))
        await bench.pass_frames(120)
    counts = bench.counts()
    assert counts["hits"] + counts["misses"] + counts["conflicts"] == counts["fabric_lines"] == hits * rows
    # A row is opened once; what else opens it is a refresh that came between.
    opened = counts["misses"] + counts["conflicts"]
    refreshes = 1 + rows * 120 // bench.frames.refresh_interval
    assert rows - 1 <= opened <= rows + refreshes
    assert bool(counts["busy_cycles"]) == (rows * 120 >= bench.frames.refresh_interval)


@cocotb.test()
async def rows_that_nobody_wants_for_long_are_closed(dut):
    """So that an access after a pause need not close another row first; one before still finds its row."""
    await start(dut)
    bench = traffic(dut)
    if bench.refresh is Refresh.PER_BANK:
        return  # a refresh is never far
    answers = StreamSink(dut, "answers")
    part = bench.part
    unloaded = parameters()["unloaded_cycles"]
    waits = []
    for row, frames in ((1, 0), (1, IDLE_FRAMES // 2), (2, 0), (3, 2 * IDLE_FRAMES)):
        await bench.pass_frames(frames)
        bench.fabric.send([{"line": place_line(part, 3, row, 0)}])
        await answers.receive()
        waits.append(answers.cycles[-1] - bench.fabric.cycles[-1])
    opened, hit, conflict, after_a_pause = waits
    dut._log.info(
        f"cycles: opened {opened}, hit {hit}, another row {conflict}, after a pause {after_a_pause}"
    )
    assert hit < opened <= unloaded < conflict
    assert after_a_pause <= unloaded
    counts = bench.counts()
    assert (counts["hits"], counts["misses"], counts["conflicts"]) == (1, 2, 1)
