"""Golden vectors of 68-byte flits: `python tests/conformance/flit_vectors.py` writes data/flits68.json.

docs/link.md says what the file holds. Everything in it comes from the golden model (`flit_golden`,
`link_golden`); only the names of message fields come from the abi.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from flit_golden import (
    ACK,
    ALL,
    DATA,
    FRAME,
    IDLE,
    INIT,
    LLCRD,
    M2S,
    PLACES,
    REQUEST,
    S2M,
    WIDTH,
    Reader,
    Writer,
    control,
    crc16,
    message,
    on_wire,
)
from link_golden import GoldenLink, kinds_of, random_message
from nearkv_hw.abi.cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR

PATH = Path(__file__).parent / "data" / "flits68.json"
WIRE_BYTES = 66
LAYOUTS = {"req": M2S_REQ, "rwd": M2S_RWD, "ndr": S2M_NDR, "drs": S2M_DRS}
DELAY = 5
"""Flits under way on the wire of the retry sequences."""


def vectors():
    """The whole file as a dictionary."""
    return {
        "about": "68-byte flits of CXL.mem; docs/link.md of nearkv describes this file",
        "crc": [crc_case(name, flit) for name, flit in crc_flits()],
        "formats": [
            case for (direction, where, code) in PLACES for case in format_cases(direction, where, code)
        ],
        "control": control_cases(),
        "rollover": [rollover_case(*which) for which in ((M2S, False), (S2M, False), (S2M, True))],
        "retry": [retry_case(name, damaged) for name, damaged in RETRIES.items()],
    }


def hexed(wire):
    """A flit with its CRC as it is stored: byte 0 first."""
    return wire.to_bytes(WIRE_BYTES, "little").hex()


def told(kind, whole, layouts=LAYOUTS):
    """A message by its fields; data and byte enables as bytes, byte 0 first."""
    layout = layouts[kind]
    fields = dict(layout.unpack(whole & (1 << layout.width) - 1).items())
    behind = whole >> layout.width
    if kind == "rwd":
        enable, line = behind & ALL, behind >> 64
        return {"kind": kind, **fields, "enable": f"{enable:016x}", "data": line.to_bytes(64, "little").hex()}
    if kind == "drs":
        return {"kind": kind, **fields, "data": behind.to_bytes(64, "little").hex()}
    return {"kind": kind, **fields}


def untold(told_message, layouts=LAYOUTS, message=message):
    """The integer of a message."""
    kind = told_message["kind"]
    header = layouts[kind].pack(
        {k: v for k, v in told_message.items() if k not in ("kind", "enable", "data")}
    )
    line = int.from_bytes(bytes.fromhex(told_message.get("data", "")), "little")
    return message(kind, header, line, int(told_message.get("enable", f"{ALL:x}"), 16))


def crc_flits():
    return [
        ("zeros", 0),
        ("bit 0", 1),
        ("bit 511", 1 << 511),
        ("ones", (1 << 512) - 1),
        ("bytes that count", int.from_bytes(bytes(range(64)), "little")),
    ]


def crc_case(name, flit):
    return {"name": name, "flit": flit.to_bytes(64, "little").hex(), "crc": f"{crc16(flit):04x}"}


class Chosen(Writer):
    """A writer that puts what it has into one slot, 0 or 1, of a given format and leaves the others empty."""

    def __init__(self, direction, rng, where, code):
        super().__init__(direction, rng)
        self._where, self._code, self._slot = where, code, 0

    def _choose(self, n, left, limits):
        self._slot = n
        if n == self._where:
            return self._code
        return {(M2S, 0): 5, (M2S, 1): 4, (S2M, 0): 4, (S2M, 1): 5}[self.direction, min(n, 1)]

    def _ready(self, kind, left, limits):
        return self._slot == self._where and super()._ready(kind, left, limits)


def format_cases(direction, where, code):
    """A format full, and with as many messages as are enough; with the all-data flits that follow."""
    kinds = [kind for kind, _ in PLACES[direction, where, code]]
    fewest = 2 if kinds.count(DATA[direction]) > 1 else 1
    for count in sorted({len(kinds), fewest}):
        rng = random.Random(f"{direction}/{where}/{code}/{count}")
        writer = Chosen(direction, rng, where, code)
        messages = []
        for kind in kinds[:count]:
            whole = random_message(rng, kind)
            if kind == "rwd" and where == 0:
                whole |= ALL << 87  # all bytes enabled: without byte enables
            messages.append((kind, whole))
            writer.queues[kind].append(whole)
        flits = []
        while not writer.empty:
            flits.append(writer.write())
        yield {
            "name": f"{direction} {'G' if where else 'H'}{code} with {count} of {len(kinds)} messages",
            "direction": direction,
            "flits": [hexed(on_wire(flit)) for flit in flits],
            "messages": [told(kind, whole) for kind, whole in in_order(messages)],
        }


def in_order(messages):
    """Messages by kind, those of a kind in their order."""
    return [pair for kind in WIDTH for pair in messages if pair[0] == kind]


def control_cases():
    cases = {
        "LLCRD, 16 flits acknowledged, 64 requests, 8 data": control(LLCRD, 1 << 4, 0, (8, 15, 12)),
        "LLCRD, 11 flits acknowledged, 1 response": control(LLCRD, 3, 1, (9, 0, 0)),
        "RETRY.Idle": control(IDLE),
        "RETRY.Frame": control(FRAME),
        "RETRY.Req of flit 5, 2 retries, 1 retraining": control(REQUEST, 5 | 2 << 16 | 1 << 21),
        "RETRY.Ack of flit 5, 2 retries, viral for LD-IDs 0 and 3": control(
            ACK, 1 << 1 | 2 << 3 | 9 << 8 | 5 << 16 | 60 << 24 | 0b1001 << 32
        ),
        "RETRY.Ack, nothing to repeat": control(ACK, 1 | 9 << 8 | 9 << 16 | 64 << 24),
        "INIT.Param, CXL 2.0, 64 numbers": control(INIT, 2 | 64 << 24),
    }
    return [{"name": name, "flit": hexed(on_wire(flit))} for name, flit in cases.items()]


def rollover_case(direction, multi):
    """Eight data messages and some without data, packed at random: rollover of 1, 2, 3 and more chunks."""
    rng = random.Random(f"rollover {direction} {multi}")
    writer, reader = Writer(direction, rng, multi), Reader(direction, multi)
    messages = []
    for n in range(14):
        kind = DATA[direction] if n < 9 else kinds_of(direction)[0]
        whole = random_message(rng, kind)
        messages.append((kind, whole))
        writer.queues[kind].append(whole)
    flits = []
    while not writer.empty:
        flit = writer.write()
        reader.read(flit)
        flits.append({"flit": hexed(on_wire(flit)), "slots": reader.flits[-1]})
    return {
        "name": f"{direction} {'with' if multi else 'without'} multi-data headers",
        "direction": direction,
        "multi_data": multi,
        "flits": flits,
        "messages": [told(kind, whole) for kind, whole in in_order(messages)],
    }


RETRIES = {
    "a request's flit is damaged": {("host", 9): [200]},
    "a data flit and the request for retry are damaged": {("device", 10): [3, 4], ("host", 15): [511]},
}
"""Which flits, counted from 0 for each sender, arrive with which bits wrong."""


def retry_case(name, damaged):
    """Two ends from reset on: every flit that either sends, in order, and what it was in case of damage."""
    rng = random.Random(name)
    ends = {
        "host": GoldenLink(M2S, rng, entries=32, timeout=40),
        "device": GoldenLink(S2M, rng, entries=48, timeout=40),
    }
    sent = {}
    for end in ends.values():
        for kind in kinds_of(end.sends):
            sent[kind] = [random_message(rng, kind) for _ in range(4)]
            end.queues[kind].extend(sent[kind])
    wires = {"host": [None] * DELAY, "device": [None] * DELAY}
    counts = dict.fromkeys(ends, 0)
    flits = []
    for _ in range(300):
        for sender, other in (("host", "device"), ("device", "host")):
            flit = ends[sender].transmit()
            if flit is not None:
                bits = damaged.get((sender, counts[sender]), [])
                counts[sender] += 1
                flits.append({"from": sender, "flit": hexed(flit), "wrong_bits": bits})
                for bit in bits:
                    flit ^= 1 << bit
            wires[sender].append(flit)
            arrived = wires[sender].pop(0)
            if arrived is not None:
                ends[other].receive(arrived)
    for end, kinds in ((ends["device"], kinds_of(M2S)), (ends["host"], kinds_of(S2M))):
        assert all(end.received[kind] == sent[kind] for kind in kinds)
        assert end.idle
    assert sum(end.crc_errors for end in ends.values()) == len(damaged), "each damaged flit was seen"
    return {
        "name": name,
        "wraps": {"host": 32, "device": 48},
        "flits": flits,
        "messages": [told(kind, whole) for kind in WIDTH for whole in sent[kind]],
    }


def load():
    """What the file holds."""
    return json.loads(PATH.read_text())


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
