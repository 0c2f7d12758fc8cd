"""What stands behind the owner check of a memory channel: the ports that every kind of memory has."""

from amaranth.hdl import unsigned
from amaranth.lib import data, stream
from amaranth.lib.wiring import In, Out, Signature

from ..abi.lines import LINE_BITS, LINE_BYTES
from ..interfaces import LINE_ADDRESS_BITS


def unit_access(slot_bits):
    """A unit's read of a line of the channel. `slot` comes back with the answer."""
    return data.StructLayout({"line": LINE_ADDRESS_BITS, "slot": slot_bits})


def fabric_access(slot_bits):
    """A read or write of a line of the channel; `slot` comes back when it is done.

    A write with `partial` set leaves the bytes that are not in `enable`; without it `enable` has no meaning.
    """
    return data.StructLayout(
        {
            "data": unsigned(LINE_BITS),
            "enable": unsigned(LINE_BYTES),
            "line": LINE_ADDRESS_BITS,
            "slot": slot_bits,
            "write": unsigned(1),
            "partial": unsigned(1),
            "poison": unsigned(1),
        }
    )


def read_answer(slot_bits):
    """A line that was read."""
    return data.StructLayout({"data": unsigned(LINE_BITS), "slot": slot_bits, "poison": unsigned(1)})


def write_answer(slot_bits):
    """A write, where `valid`, has its place in the order: every read accepted later sees it."""
    return data.StructLayout({"valid": unsigned(1), "slot": slot_bits})


class Backend(Signature):
    """The memory's ports, seen from the channel.

    Parameters
    ----------
    unit_bits, fabric_bits : widths of the slots of the unit's and the fabric's accesses.
    writers : ports at which writes are acknowledged.

    Members
    -------
    unit, fabric : Out(stream) : accesses that passed the check. Accesses of the fabric to one line are
        carried out in their order; otherwise answers come in any order.
    unit_read, fabric_read : In(stream(read_answer), always_ready) : what was read.
    written : In(write_answer x writers) : writes that are done for whoever asked.
    """

    def __init__(self, *, unit_bits, fabric_bits, writers):
        def answers(shape):
            return In(stream.Signature(shape, always_ready=True))

        super().__init__(
            {
                "unit": Out(stream.Signature(unit_access(unit_bits))),
                "fabric": Out(stream.Signature(fabric_access(fabric_bits))),
                "unit_read": answers(read_answer(unit_bits)),
                "fabric_read": answers(read_answer(fabric_bits)),
                "written": In(data.ArrayLayout(write_answer(fabric_bits), writers)),
            }
        )
