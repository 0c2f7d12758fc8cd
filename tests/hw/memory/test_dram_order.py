"""A DRAM controller against a dictionary: every access is answered once, in an order to rely on.

The fabric's accesses to a line take effect in their order. A unit's read sees every write that was told to be
written before the read was accepted, and none that came after it was answered. The part checks every rule.
"""

from collections import defaultdict

import cocotb
import pytest
from amaranth.lib import data
from dram_bench import PARTS_AND_MODES, TAG_BITS, ControllerBench, place_line
from nearkv_hw.abi.dram import PARTS, Dram
from nearkv_hw.abi.lines import LINE_BITS
from nearkv_hw.memory.dram.controller import DramController, fabric_layout, unit_layout
from nearkv_hw.memory.dram.pins import CHECK_BITS
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start

ACCESSES = 500
ANSWER = data.StructLayout({"unit": 1, "tag": TAG_BITS, "data": LINE_BITS, "check": CHECK_BITS, "poison": 1})


@pytest.mark.rtl
@pytest.mark.parametrize(("dram", "refresh"), PARTS_AND_MODES)
def test_order(dram, refresh):
    run(
        ControllerBench(dram=dram, refresh=refresh),
        module=__file__,
        parameters={"dram": dram.value},
    )


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5, 0.97], lines=[2, 40])
async def agrees_with_a_dictionary(dut, idle, lines):
    rng = random("accesses", idle, lines)
    await start(dut)
    part = PARTS[Dram(parameters()["dram"])]
    line_bits = DramController(part=part, tag=TAG_BITS).line_bits
    banks = [rng.randrange(part.banks) for _ in range(3)]
    hot = list(
        {
            place_line(part, rng.choice(banks), rng.randrange(3), rng.randrange(part.row_lines))
            for _ in range(lines)
        }
    )
    unit = StreamSource(dut, "unit", idle=idle, shape=unit_layout(line_bits, TAG_BITS))
    fabric = StreamSource(dut, "fabric", idle=idle, shape=fabric_layout(line_bits, TAG_BITS))
    answers = StreamSink(dut, "answers", shape=ANSWER)
    written = StreamSink(dut, "written")
    # the first writes set every line to something known: what an earlier run left would be there else
    accesses = [{"line": line, "write": 1} for line in hot]
    accesses += [
        {"line": rng.choice(hot), "write": int(rng.random() < 0.4)} for _ in range(ACCESSES - len(hot))
    ]
    for n, access in enumerate(accesses):
        access |= {"tag": n, "data": rng.getrandbits(LINE_BITS), "check": n, "poison": rng.randrange(2)}
    fabric.send(accesses[: len(hot)])
    await written.receive(len(hot))
    reads = [{"line": rng.choice(hot), "tag": n} for n in range(ACCESSES)]
    fabric.send(accesses[len(hot) :])
    unit.send(reads)
    writes = [access for access in accesses if access["write"]]
    got = await answers.receive(2 * ACCESSES - len(writes))
    told = await written.receive(len(writes) - len(hot))
    answered = list(answers.cycles)
    await cycles(dut, 2000)
    assert len(answers.cycles) == len(answered), "an access was answered twice"
    assert len(written.cycles) == len(writes), "a write was told twice"
    assert told == [access["tag"] for access in writes[len(hot) :]]

    kept = defaultdict(list)  # per line: when each write was taken, when told, and what it left
    left = {}  # what a read of the fabric finds: by its tag
    told_at = iter(written.cycles)
    for access, taken in zip(accesses, fabric.cycles, strict=True):
        content = (access["data"], access["check"], access["poison"])
        if access["write"]:
            kept[access["line"]].append((taken, next(told_at), content))
        else:
            left[access["tag"]] = kept[access["line"]][-1][2]
    of_unit = {}
    for answer, at in zip(got, answered, strict=True):
        content = (answer["data"], answer["check"], answer["poison"])
        if answer["unit"]:
            assert answer["tag"] not in of_unit, "a read was answered twice"
            of_unit[answer["tag"]] = (content, at)
        else:
            assert content == left.pop(answer["tag"])
    assert not left
    for read, taken in zip(reads, unit.cycles, strict=True):
        content, at = of_unit[read["tag"]]
        history = kept[read["line"]]
        certain = max(n for n, (_, done, _) in enumerate(history) if done <= taken)
        assert content in [state for came, _, state in history[certain:] if came <= at], read
