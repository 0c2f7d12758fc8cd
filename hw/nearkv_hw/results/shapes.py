"""The structs that travel between the blocks of the results side."""

from amaranth.hdl import unsigned
from amaranth.lib import data

from ..abi.config import CHANNEL_CHOICES, FINISH_LANE_CHOICES
from ..abi.formats import OutputForm
from ..interfaces import PAGE_BITS, LanePartial, State


def check_units(units):
    """ValueError unless `units` is a number of attention units whose partials can be merged."""
    if units not in CHANNEL_CHOICES:
        raise ValueError(f"units must be one of {CHANNEL_CHOICES}, not {units!r}")


def check_finish_lanes(finish_lanes):
    """ValueError unless `finish_lanes` is a number of lanes that a device may finish per cycle."""
    if finish_lanes not in FINISH_LANE_CHOICES:
        raise ValueError(f"finish_lanes must be one of {FINISH_LANE_CHOICES}, not {finish_lanes!r}")


class Denominator(data.Struct):
    """The merged denominator of one query."""

    state: State
    nan: 1  # the query's NaN flag


class PassEnd(data.Struct):
    """What all units together say of a pass when it ends."""

    status: unsigned(8)
    page: PAGE_BITS
    lines: 32


def finish_beat(finish_lanes):
    """A beat on its way into `Finish`: a denominator (lane 0's state, flags bit 0 the NaN flag) or lanes."""
    return data.StructLayout(
        {
            "denominator": unsigned(1),
            "first": unsigned(1),  # the first lanes of a query
            "form": OutputForm,
            "output_scale": unsigned(32),  # float32 bits, zero for none; the same for all of a pass
            "lanes": data.ArrayLayout(LanePartial, finish_lanes),
        }
    )
