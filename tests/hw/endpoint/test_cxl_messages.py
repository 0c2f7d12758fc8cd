"""CXL.mem messages in 68-byte mode: widths, positions and opcodes as in the specification's tables.

Positions: CXL 3.1 section 4.2 (slot formats H4, H5, G4, G5) and 3.3.5 to 3.3.9 (fields); (lowest bit, width)
each.
"""

import pytest
from amaranth.hdl import Shape
from nearkv_hw.abi import cxl
from nearkv_hw.endpoint.messages import DRS, NDR, REQ, RWD

REQ_FIELDS = {
    "valid": (0, 1),
    "opcode": (1, 4),
    "snoop": (5, 3),
    "meta_field": (8, 2),
    "meta_value": (10, 2),
    "tag": (12, 16),
    "address_5": (28, 1),
    "address": (29, 46),
    "traffic_class": (75, 2),
    "ld_id": (77, 4),
    "reserved": (81, 6),
}
RWD_FIELDS = {
    "valid": (0, 1),
    "opcode": (1, 4),
    "snoop": (5, 3),
    "meta_field": (8, 2),
    "meta_value": (10, 2),
    "tag": (12, 16),
    "address": (28, 46),
    "poison": (74, 1),
    "traffic_class": (75, 2),
    "ld_id": (77, 4),
    "reserved": (81, 6),
}
NDR_FIELDS = {
    "valid": (0, 1),
    "opcode": (1, 3),
    "meta_field": (4, 2),
    "meta_value": (6, 2),
    "tag": (8, 16),
    "ld_id": (24, 4),
    "dev_load": (28, 2),
}
DRS_FIELDS = {
    "valid": (0, 1),
    "opcode": (1, 3),
    "meta_field": (4, 2),
    "meta_value": (6, 2),
    "tag": (8, 16),
    "poison": (24, 1),
    "ld_id": (25, 4),
    "dev_load": (29, 2),
    "reserved": (31, 9),
}


@pytest.mark.parametrize(
    ("layout", "struct", "width", "fields"),
    [
        (cxl.M2S_REQ, REQ, 87, REQ_FIELDS),
        (cxl.M2S_RWD, RWD["header"].shape, 87, RWD_FIELDS),
        (cxl.S2M_NDR, NDR, 30, NDR_FIELDS),
        (cxl.S2M_DRS, DRS["header"].shape, 40, DRS_FIELDS),
    ],
    ids=["req", "rwd", "ndr", "drs"],
)
def test_fields(layout, struct, width, fields):
    assert layout.width == width == Shape.cast(struct).width
    assert {field.name: (layout.offset(field.name), field.width) for field in layout} == fields
    assert {name: (field.offset, field.width) for name, field in struct} == fields


def test_data_stands_above_its_header():
    assert [(name, field.offset, field.width) for name, field in RWD] == [
        ("header", 0, 87),
        ("enable", 87, 64),
        ("data", 151, 512),
    ]
    assert [(name, field.offset, field.width) for name, field in DRS] == [
        ("header", 0, 40),
        ("data", 40, 512),
    ]
    assert (Shape.cast(RWD).width, Shape.cast(DRS).width) == (663, 552)


def test_opcodes():
    assert {op.name: op.value for op in cxl.M2SReqOp} == {
        "MEM_INV": 0,
        "MEM_RD": 1,
        "MEM_RD_DATA": 2,
        "MEM_RD_FWD": 3,
        "MEM_WR_FWD": 4,
        "MEM_RD_TEE": 5,
        "MEM_RD_DATA_TEE": 6,
        "MEM_SPEC_RD": 8,
        "MEM_INV_NT": 9,
        "MEM_CLN_EVCT": 10,
        "MEM_SPEC_RD_TEE": 12,
    }
    assert {op.name: op.value for op in cxl.M2SRwDOp} == {
        "MEM_WR": 1,
        "MEM_WR_PTL": 2,
        "BI_CONFLICT": 4,
        "MEM_RD_FILL": 5,
        "MEM_WR_TEE": 9,
        "MEM_WR_PTL_TEE": 10,
        "MEM_RD_FILL_TEE": 13,
    }
    assert [op.value for op in cxl.S2MNdrOp] == [0, 1, 2, 3, 4, 5]
    assert [op.value for op in cxl.S2MDrsOp] == [0, 1, 2]
    assert [load.value for load in cxl.DevLoad] == [0, 1, 2, 3]
    assert (cxl.MetaField.META0_STATE, cxl.MetaField.NO_OP) == (0, 3)


def test_what_a_request_waits_for():
    answers = {opcode: cxl.req_answer(opcode).name for opcode in range(16)}
    assert {o for o, a in answers.items() if a == "DRS"} == {1, 2, 5, 6}
    assert {o for o, a in answers.items() if a == "NONE"} == {3, 4, 8, 12}
    assert all(cxl.req_answer(op) is cxl.Answer.DRS for op in cxl.READS)
