"""The store: its C++ under the sanitizers, its SystemVerilog without warnings and cycle by cycle."""

from pathlib import Path

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from native_checks import is_free_of_warnings, passes_with_a_random_seed, sanitized_program
from nearkv_hw.memory.store import Store
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start, value

CHECK = Path(__file__).with_name("store_check.cpp")


@pytest.mark.rtl
def test_store_equals_a_map_under_sanitizers(tmp_path):
    passes_with_a_random_seed(sanitized_program(tmp_path, CHECK, ["store.cpp"]))


@pytest.mark.rtl
def test_systemverilog_is_free_of_warnings():
    is_free_of_warnings("nearkv_store.sv")


@pytest.mark.rtl
def test_store_in_verilog():
    run(Store(channel=3), module=__file__)


@cocotb.test()
async def reads_see_earlier_writes_only(dut):
    await start(dut)
    rng = random("accesses")
    data, poison = {}, {}
    expected = (0, 0)
    edge = RisingEdge(dut.clk)
    for _ in range(2000):
        line = (rng.randrange(4) << 32) + rng.randrange(3)
        written = line if rng.random() < 0.5 else (rng.randrange(4) << 32) + rng.randrange(3)
        reads, writes = rng.random() < 0.7, rng.random() < 0.7
        new = rng.getrandbits(512)
        mask = rng.choice([(1 << 64) - 1, rng.getrandbits(64), 0])
        poisons = rng.random() < 0.1
        dut.read_enable.value, dut.read_line.value = reads, line
        dut.write_enable.value, dut.write_line.value = writes, written
        dut.write_data.value, dut.write_mask.value, dut.write_poison.value = new, mask, poisons
        await edge
        assert (value(dut.read_data), value(dut.read_poison)) == expected
        if reads:
            expected = (data.get(line, 0), poison.get(line, 0))
        if writes:
            bits = sum(0xFF << 8 * i for i in range(64) if mask >> i & 1)
            data[written] = (data.get(written, 0) & ~bits) | (new & bits)
            poison[written] = int(poisons or (poison.get(written, 0) and mask != (1 << 64) - 1))
