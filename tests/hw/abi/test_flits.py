"""68-byte flits: tables of the abi against the golden model's figures, and what the CRC catches."""

from itertools import combinations

import flit_golden as golden
import numpy as np
import pytest
from nearkv_hw.abi import flits
from nearkv_hw.abi.flits import FLIT_BITS, FLIT_HEADER, Control, Side

VECTORS = {
    "zeros": (0, 0x0000),
    "bit 0": (1, 0xF053),
    "bit 511": (1 << 511, 0xC47D),
    "ones": ((1 << 512) - 1, 0x7856),
    "bytes that count": (int.from_bytes(bytes(range(64)), "little"), 0xABF7),
}
"""Flits and their CRC, worked out from the specification's table of masks (section 4.2.8.7)."""
WIRE_BITS = 528


@pytest.mark.parametrize("name", VECTORS)
def test_crc_vectors(name):
    flit, expected = VECTORS[name]
    assert flits.crc(flit) == golden.crc16(flit) == expected


def columns():
    """What each wrong bit of flit and CRC adds to the difference of CRCs."""
    return [golden.crc16(1 << bit) for bit in range(FLIT_BITS)] + [1 << bit for bit in range(16)]


def test_masks_are_the_columns():
    for bit, column in enumerate(columns()[:FLIT_BITS]):
        assert flits.crc_column(bit) == column
        assert sum((mask >> bit & 1) << k for k, mask in enumerate(flits.crc_masks())) == column


def test_one_two_and_three_wrong_bits_are_always_found():
    """CRCs are linear: bits go unnoticed only if their columns cancel, whatever the flit."""
    one = columns()
    assert 0 not in one
    assert len(set(one)) == WIRE_BITS
    two = {a ^ b for a, b in combinations(one, 2)}
    assert not two & set(one)


@pytest.mark.parametrize("name", ["zeros", "bytes that count", "ones"])
def test_every_pair_of_wrong_bits_changes_a_flit(name):
    """No linearity assumed: the masks are applied to each of the 139,656 damaged flits."""
    flit, _ = VECTORS[name]
    wire = flit | flits.crc(flit) << FLIT_BITS
    places = [(bit,) for bit in range(WIRE_BITS)] + list(combinations(range(WIRE_BITS), 2))
    words = np.array([wire >> 64 * n & (1 << 64) - 1 for n in range(9)], dtype=np.uint64)
    damaged = np.tile(words, (len(places), 1))
    for order in range(2):
        rows = [row for row, bits in enumerate(places) if len(bits) > order]
        at = np.array([places[row][order] for row in rows])
        damaged[rows, at // 64] ^= np.uint64(1) << (at % 64).astype(np.uint64)
    sent = damaged[:, 8].astype(np.uint64)
    found = np.zeros(len(places), dtype=np.uint64)
    for k, mask in enumerate(flits.crc_masks()):
        parts = np.array([mask >> 64 * n & (1 << 64) - 1 for n in range(8)], dtype=np.uint64)
        parity = np.bitwise_count(damaged[:, :8] & parts).sum(axis=1) & 1
        found |= parity.astype(np.uint64) << np.uint64(k)
    assert len(places) == 528 + 139_128
    assert (found != sent).all()


@pytest.mark.parametrize("sender", Side)
def test_slot_formats(sender):
    """Kinds and bit positions of every slot format that holds messages of CXL.mem."""
    direction = golden.M2S if sender is Side.HOST else golden.S2M
    ours = {}
    for where, table in enumerate(flits.formats(sender)):
        for slot_format in table:
            places = []
            for place in slot_format.places:
                bits = {}
                for low, at, width in place.pieces:
                    bits.update({low + n: at + n + (0 if where else 32) for n in range(width)})
                places.append((place.kind, [bits[n] for n in range(len(bits))]))
            assert slot_format.name == f"{'HG'[where]}{slot_format.code}"
            ours[direction, where, slot_format.code] = places
    assert ours == {key: places for key, places in golden.PLACES.items() if key[0] == direction}


def test_header():
    assert {field.name: (FLIT_HEADER.offset(field.name), field.width) for field in FLIT_HEADER} == {
        "type": (0, 1),
        "reserved": (1, 1),
        "ak": (2, 1),
        "be": (3, 1),
        "sz": (4, 1),
        "slot0": (5, 3),
        "slot1": (8, 3),
        "slot2": (11, 3),
        "slot3": (14, 3),
        "reserved_mid": (17, 3),
        "rsp_credit": (20, 4),
        "req_credit": (24, 4),
        "data_credit": (28, 4),
    }


def test_control_flits():
    kinds = {
        Control.LLCRD_ACK: golden.LLCRD,
        Control.RETRY_IDLE: golden.IDLE,
        Control.RETRY_REQ: golden.REQUEST,
        Control.RETRY_ACK: golden.ACK,
        Control.RETRY_FRAME: golden.FRAME,
        Control.INIT_PARAM: golden.INIT,
    }
    for control, (llctrl, sub_type) in kinds.items():
        assert (control & 15, control >> 4) == (llctrl, sub_type)
    assert (flits.CONTROL_AT, flits.PAYLOAD_AT, flits.PAYLOAD_BITS) == (32, 64, 64)
    positions = {
        flits.RETRY_REQ_PAYLOAD: {"sequence": (0, 8), "retries": (16, 5), "reinits": (21, 5)},
        flits.RETRY_ACK_PAYLOAD: {
            "empty": (0, 1),
            "viral": (1, 1),
            "retries": (3, 5),
            "write": (8, 8),
            "sequence": (16, 8),
            "free": (24, 8),
            "viral_ld": (32, 16),
        },
        flits.LLCRD_PAYLOAD: {"acks_low": (0, 3), "acks_high": (4, 4)},
        flits.INIT_PAYLOAD: {"version": (0, 4), "wrap": (24, 8)},
    }
    for layout, fields in positions.items():
        assert layout.width == 64
        assert {f.name: (layout.offset(f.name), f.width) for f in layout if not f.reserved} == fields


@pytest.mark.parametrize(
    ("count", "returned"), [(0, 0), (1, 1), (3, 2), (7, 4), (63, 32), (64, 64), (500, 64)]
)
def test_credits_are_returned_in_powers_of_two(count, returned):
    code = flits.credit_code(count)
    assert code & flits.CREDIT_MEM
    assert flits.CREDIT_STEPS[code & 7] == returned
