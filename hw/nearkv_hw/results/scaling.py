"""An output scale on finished lanes (docs/numerics.md section 6)."""

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import OutputForm
from ..arithmetic.float32 import Convert, Float32, Multiply, Unpack


class ScaleLane(wiring.Component):
    """Multiplies a lane's fp32 code by the output scale and converts the product to the output format.

    Members
    -------
    step : In(12) : bit k loads the registers of stage k.
    code : In(32) : the lane in fp32, taken with step[0].
    scale : In(Float32) : taken with step[2].
    early_form, late_form : In(OutputForm) : the lane's form, valid with step[9] and with step[11].
    scaled : Out(32) : the code, low bits first; bits beyond the format are zero.

    Latency is 12 cycles (`latency_cycles`), throughput one lane per cycle.
    """

    convert_stage = Unpack.latency_cycles + Multiply.latency_cycles
    latency_cycles = convert_stage + Convert.latency_cycles

    def __init__(self):
        super().__init__(
            {
                "step": In(self.latency_cycles),
                "code": In(32),
                "scale": In(Float32),
                "early_form": In(OutputForm),
                "late_form": In(OutputForm),
                "scaled": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unpack = unpack = Unpack()
        m.submodules.multiply = multiply = Multiply()
        m.submodules.convert = convert = Convert()
        m.d.comb += [
            unpack.step.eq(self.step[: Unpack.latency_cycles]),
            unpack.code.eq(self.code),
            multiply.step.eq(self.step[Unpack.latency_cycles : self.convert_stage]),
            multiply.a.eq(unpack.o),
            multiply.b.eq(self.scale),
            convert.step.eq(self.step[self.convert_stage :]),
            convert.code.eq(multiply.code),
            convert.early_form.eq(self.early_form),
            convert.late_form.eq(self.late_form),
            self.scaled.eq(convert.o),
        ]
        return m
