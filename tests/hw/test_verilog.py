# amaranth: UnusedElaboratable=no
"""Verilog from components: names, ports, one module for equal instances, the same text every time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cocotb
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from cocotb.triggers import Timer
from nearkv_hw.common.queue import Queue
from nearkv_hw.verilog import VerilogPort, to_verilog
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, start, value

PAYLOAD = data.StructLayout({"a": 4, "b": 8})


class Chain(wiring.Component):
    """Queues one behind the other, of depths `depths`."""

    def __init__(self, depths=(5, 5, 5)):
        self.depths = depths
        super().__init__({"i": In(stream.Signature(PAYLOAD)), "o": Out(stream.Signature(PAYLOAD))})

    def elaborate(self, platform):
        m = Module()
        before = wiring.flipped(self.i)
        for depth in self.depths:
            queue = Queue(shape=PAYLOAD, depth=depth)
            m.submodules += queue
            wiring.connect(m, before, queue.i)
            before = queue.o
        wiring.connect(m, before, wiring.flipped(self.o))
        return m


def modules(text):
    return re.findall(r"^module (\S+) ?\(", text, re.MULTILINE)


def test_ports_have_single_underscores():
    design = to_verilog(Chain(), "chain")
    assert design.name == "chain"
    assert design.clocked
    assert design.ports == (
        VerilogPort("clk", "in", 1),
        VerilogPort("rst", "in", 1),
        VerilogPort("i_payload", "in", 12),
        VerilogPort("i_valid", "in", 1),
        VerilogPort("i_ready", "out", 1),
        VerilogPort("o_payload", "out", 12),
        VerilogPort("o_valid", "out", 1),
        VerilogPort("o_ready", "in", 1),
    )
    header = re.search(r"^module chain \((.*?)\);", design.text, re.MULTILINE).group(1)
    assert sorted(header.split(", ")) == sorted(port.name for port in design.ports)


def test_arrays_of_streams_are_numbered_and_signs_kept():
    class Sums(wiring.Component):
        i: In(stream.Signature(data.StructLayout({"x": 3}))).array(2)
        total: Out(data.ArrayLayout(2, 2))
        wide: Out(wiring.Signature({"signed": Out(5)}))

        def elaborate(self, platform):
            return Module()

    names = [port.name for port in to_verilog(Sums()).ports]
    assert "i_1_payload" in names
    assert "wide_signed" in names


def test_combinational_design_has_no_clock():
    class Wire(wiring.Component):
        i: In(3)
        o: Out(3)

        def elaborate(self, platform):
            m = Module()
            m.d.comb += self.o.eq(self.i)
            return m

    design = to_verilog(Wire())
    assert not design.clocked
    assert [port.name for port in design.ports] == ["i", "o"]


def test_ready_of_an_always_ready_stream_is_no_port():
    class Latch(wiring.Component):
        i: In(stream.Signature(4, always_ready=True))
        o: Out(4)

        def elaborate(self, platform):
            m = Module()
            with m.If(self.i.valid):
                m.d.sync += self.o.eq(self.i.payload)
            return m

    assert [port.name for port in to_verilog(Latch()).ports] == ["clk", "rst", "i_payload", "i_valid", "o"]


def test_equal_instances_share_a_module():
    equal = modules(to_verilog(Chain((5, 5, 5, 5))).text)
    assert len(equal) == 3  # chain, queue, fifo
    mixed = modules(to_verilog(Chain((5, 3, 5, 3, 4))).text)
    assert len(mixed) == 1 + 2 * 3


class Constants(wiring.Component):
    """Constant fields beside one that is chosen, of one struct."""

    choose: In(1)
    o: Out(data.StructLayout({"low": 4, "chosen": 4, "high": 80}))

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [self.o.low.eq(5), self.o.high.eq(HIGH)]
        with m.If(self.choose):
            m.d.comb += self.o.chosen.eq(9)
        return m


HIGH = 0xA5A5_0000_FFFF_1234_5678


@pytest.mark.rtl
def test_constant_bits_of_variables_are_driven():
    assert "always @*\n    o" not in to_verilog(Constants()).text
    run(Constants(), module=__file__, tests=r"\.constants_are_there")


@cocotb.test()
async def constants_are_there(dut):
    for choose, chosen in ((0, 0), (1, 9)):
        dut.choose.value = choose
        await Timer(1, "ns")
        assert value(dut.o) == HIGH << 8 | chosen << 4 | 5


@pytest.mark.rtl
def test_merged_modules_behave_as_before():
    run(Chain((5, 1, 5, 3, 5)), module=__file__, tests=r"\.chain_keeps_order")


@cocotb.test()
async def chain_keeps_order(dut):
    await start(dut)
    source = StreamSource(dut, "i", idle=0.3)
    sink = StreamSink(dut, "o", backpressure=0.3)
    source.send(range(200))
    assert await sink.receive(200) == list(range(200))


def test_text_does_not_depend_on_hashes():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_verilog import Chain; from nearkv_hw.verilog import to_verilog\n"
        "sys.stdout.write(to_verilog(Chain((2, 5, 3, 5))).text)\n"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code, Path(__file__).parent],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert texts[0] == texts[1] == to_verilog(Chain((2, 5, 3, 5))).text


def test_black_boxes_are_found():
    assert not to_verilog(Chain()).instantiates("nearkv_store")
    from nearkv_hw.memory.store import Store

    assert to_verilog(Store(channel=0)).instantiates("nearkv_store")


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"must be an amaranth.lib.wiring.Component, not <"):
        to_verilog(Module())
    with pytest.raises(ValueError, match="must be a Verilog identifier, not 'a b'"):
        to_verilog(Chain(), "a b")

    class Clash(wiring.Component):
        a_b: In(1)
        a: In(wiring.Signature({"b": In(1)}))

        def elaborate(self, platform):
            m = Module()
            m.d.sync += Signal().eq(self.a_b)
            return m

    with pytest.raises(ValueError, match="two ports of Clash would be named 'a_b'"):
        to_verilog(Clash())
