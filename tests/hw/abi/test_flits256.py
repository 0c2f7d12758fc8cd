"""256-byte flits: what a flit of reads can carry at most, over all ways to fill it; layouts of messages."""

import pytest
from nearkv_hw.abi.flits import SLOTS, Side
from nearkv_hw.abi.flits256 import (
    BEATS,
    CREDIT_CODES,
    FLIT_BYTES,
    G_MESSAGES,
    GROUP_MESSAGES,
    H_MESSAGES,
    MAX_H_BACKLOG,
    MESSAGES,
    READ_LINES,
    SEQUENCE_BITS,
    Command,
    kinds,
    message_slots,
)

FLITS = 240


def fillings(owed, before):
    """What may follow a flit: {(slots of data owed, DRS of its last beat): most lines begun in it}.

    A header may lie in any slot, and slots may stay empty; limits are of two beats that follow each other.
    """
    states = {(owed, before): 0}
    for beat in range(BEATS):
        slots, following = message_slots(beat), {}
        for (owed, before), lines in states.items():
            allowed = GROUP_MESSAGES["drs"] - before
            in_h = min(H_MESSAGES["drs"], allowed) if beat == 0 and owed <= MAX_H_BACKLOG else 0
            for h in range(in_h + 1):
                total = owed + 4 * h
                ends = [(max(total - slots, 0), h)]
                for at in range(total, slots):  # where a header lies; behind it all is data
                    most = min(G_MESSAGES["drs"], allowed - h)
                    ends += [(4 * g - (slots - at - 1), h + g) for g in range(1, most + 1)]
                for left, begun in ends:
                    state = (left, begun)
                    following[state] = max(following.get(state, 0), lines + begun)
        states = following
    return states


def test_no_packer_carries_more_lines_of_reads():
    """In the long run eight flits bring 27 lines at most, wherever they begin."""
    ways, found = {}, [(0, 0)]
    while found:
        state = found.pop()
        if state not in ways:
            ways[state] = fillings(*state)
            found += ways[state]
    best = [dict.fromkeys(ways, 0)]
    for _ in range(FLITS):
        best.append({s: max(lines + best[-1][after] for after, lines in ways[s].items()) for s in ways})
    lines, flits = READ_LINES
    assert all(best[FLITS][state] - best[FLITS - flits][state] == lines for state in ways)


def test_a_flit_is_four_beats():
    assert sum(message_slots(beat) for beat in range(BEATS)) == 14
    assert BEATS * SLOTS * 16 == FLIT_BYTES


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_keep_their_fields(kind):
    """All fields but address bit 5 are in both modes, as wide in one as in the other."""
    here, there = MESSAGES[kind]
    names = {field.name for field in here if not field.reserved}
    others = {field.name for field in there if not field.reserved}
    assert names - others == ({"address_5"} if kind == "req" else set())
    assert others - names == ({"trailer"} if kind in ("rwd", "drs") else set())
    assert all(here[name].width == there[name].width for name in names & others)


def test_kinds_and_codes():
    assert [kinds(side) for side in Side] == [("req", "rwd"), ("ndr", "drs")]
    assert all(sorted(codes.values()) == [1, 4, 8, 12, 16] for codes in CREDIT_CODES.values())
    assert max(Command) < 4
    assert SEQUENCE_BITS == 10
