"""Packed layouts: round trip, reserved bits, and refusals that name what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearkv_hw.abi import cxl, descriptor, memory, window
from nearkv_hw.abi.bits import Field, Layout

LAYOUTS = [
    value
    for module in (cxl, descriptor, memory, window)
    for value in vars(module).values()
    if isinstance(value, Layout)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@given(data=st.data())
def test_pack_then_unpack_gives_the_values_back(layout, data):
    values = {
        f.name: data.draw(
            st.integers(-(1 << f.width - 1), (1 << f.width - 1) - 1)
            if f.signed
            else st.integers(0, (1 << f.width) - 1)
        )
        for f in layout
    }
    record = layout.pack(values)
    assert layout.unpack(record) == values
    assert 0 <= record < 1 << layout.width
    if layout.width % 8 == 0:
        assert layout.unpack(layout.pack_bytes(values)) == values


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_fields_fill_the_record(layout):
    assert sum(f.width for f in layout) == layout.width
    assert (
        layout.pack({f.name: -1 if f.signed else (1 << f.width) - 1 for f in layout})
        == (1 << layout.width) - 1
    )


def test_reserved_mask_covers_what_no_field_claims():
    layout = Layout("x", 16, Field("a", 4), Field("reserved_low", 4), Field("b", 2))
    assert layout.reserved_mask() == 0b1111_1100_1111_0000


def test_messages_have_the_specified_widths():
    """CXL 3.1 specification, tables of section 3.3 in 68-byte mode."""
    widths = {layout.name: layout.width for layout in LAYOUTS if layout.name.startswith(("M2S", "S2M"))}
    assert widths == {"M2S Req": 87, "M2S RwD header": 87, "S2M NDR": 30, "S2M DRS header": 40}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Field("not a name", 1), "must be an identifier"),
        (lambda: Field("a", 0), "positive width"),
        (lambda: Layout("x", 4, Field("a", 5)), "has 4 bits, its fields take 5"),
        (lambda: Layout("x", 4, Field("a", 1), Field("a", 1)), "two fields named a"),
        (lambda: Layout("x", 4, Field("a", 2)).pack(a=4), "field a holds 0 to 3, not 4"),
        (lambda: Layout("x", 4, Field("a", 2, signed=True)).pack(a=2), "field a holds -2 to 1, not 2"),
        (lambda: Layout("x", 4, Field("a", 2)).pack(b=0), "no field 'b'"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
