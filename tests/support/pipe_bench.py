"""Drive a block without backpressure, cycle by cycle, and see what comes out so many cycles later."""

from cocotb.triggers import RisingEdge
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.streams import value


async def through(dut, inputs, outputs, items, latency_cycles):
    """Feed one item per cycle; yield (item, outputs) when the item's outputs are due.

    Parameters
    ----------
    inputs, outputs : name of each port, and its shape.
    items : dict of input values per cycle.
    """
    edge = RisingEdge(dut.clk)
    items = list(items)
    for cycle in range(len(items) + latency_cycles):
        for name, shape in inputs.items():
            if cycle < len(items):
                getattr(dut, name).value = pack(shape, items[cycle][name])
        await edge
        if cycle >= latency_cycles:
            yield (
                items[cycle - latency_cycles],
                {name: unpack(shape, value(getattr(dut, name))) for name, shape in outputs.items()},
            )
