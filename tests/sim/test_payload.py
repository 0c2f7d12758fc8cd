"""Payloads as Python values and back."""

import pytest
from amaranth.hdl import signed
from amaranth.lib import data, enum
from nearkv_hw.abi.cxl import M2S_REQ
from nearkv_hw.interfaces import LanePartial, partial_beat
from nearkv_sim.cocotb.payload import pack, unpack


class Colour(enum.Enum, shape=2):
    RED = 1
    BLUE = 2


SHAPE = data.StructLayout(
    {
        "colour": Colour,
        "deltas": data.ArrayLayout(signed(5), 3),
        "inner": data.StructLayout({"flag": 1, "count": 6}),
    }
)


def test_structs_arrays_and_enumerations():
    value = {"colour": Colour.BLUE, "deltas": [-1, 15, -16], "inner": {"count": 33}}
    bits = pack(SHAPE, value)
    assert bits == 0b100001_0_10000_01111_11111_10
    assert unpack(SHAPE, bits) == {"colour": 2, "deltas": [-1, 15, -16], "inner": {"flag": 0, "count": 33}}


def test_interfaces_go_there_and_back():
    lane = {"state": {"some": 1, "top": -3, "high": -5, "low": 7}, "flags": 4}
    shape = partial_beat(2)
    beat = {"kind": 1, "lanes": [lane, unpack(LanePartial, 0)], "status": 0, "page": 9, "lines": 1 << 31}
    assert unpack(shape, pack(shape, beat)) == beat


def test_abi_layouts_and_plain_integers():
    assert unpack(M2S_REQ, pack(M2S_REQ, {"tag": 7}))["tag"] == 7
    assert pack(8, 255) == 255
    assert pack(signed(8), -1) == 255
    assert unpack(signed(8), 255) == -1


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        (8, 256, r"256 does not fit .*, which holds 0 to 255"),
        (signed(4), 8, "holds -8 to 7"),
        (SHAPE, {"color": 1}, "no field 'color'; there are colour, deltas, inner"),
        (SHAPE, {"deltas": [0, 0, 0, 0]}, "no field 3; there are 0, 1, 2"),
    ],
)
def test_what_does_not_fit_is_refused(shape, value, message):
    with pytest.raises(ValueError, match=message):
        pack(shape, value)
