"""Register stages that stand still while there is nothing new."""

from amaranth.hdl import Signal, Value


def stage(m, enable, values, name):
    """(enable, values) a cycle later; the values stay while there is nothing new."""
    later = Signal(name=f"{name}_taken")
    m.d.sync += later.eq(enable)
    registers = {
        key: Signal.like(Value.cast(value), name=f"{name}_{key}", reset_less=True)
        for key, value in values.items()
    }
    with m.If(enable):
        m.d.sync += [registers[key].eq(value) for key, value in values.items()]
    return later, registers
