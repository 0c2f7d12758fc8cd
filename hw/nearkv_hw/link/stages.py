"""Register stages that stand still while there is nothing new, and what may be in them."""

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


def finds_room(m, port, *, depth, goes):
    """Whether an item that is decided on now finds a place in the buffer of `depth` items before the output
    `port`, beside those that are on their way there; `goes` is set when one is decided on."""
    under_way = Signal(range(depth + 1))
    m.d.sync += under_way.eq(under_way + goes - (port.valid & port.ready))
    return under_way < depth
