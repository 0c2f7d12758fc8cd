"""Golden vectors of 256-byte flits: `python tests/conformance/flit256_vectors.py` writes data/flits256.json.

docs/link.md says what the file holds. Everything in it comes from the golden model (`flit256_golden`); only
the names of message fields come from the abi.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import flit_vectors
from flit256_golden import (
    CREDITS,
    DATA,
    FLIT_BYTES,
    FORMAT,
    IN_G,
    IN_H,
    KINDS,
    M2S,
    S2M,
    STEPS,
    WIDTH,
    Reader,
    Writer,
    credit_field,
    message,
    random_message,
)
from nearkv_hw.abi.flits256 import MESSAGES

LAYOUTS = {kind: layout for kind, (_, layout) in MESSAGES.items()}
PATH = Path(__file__).parent / "data" / "flits256.json"


def vectors():
    """The whole file as a dictionary."""
    places = [(d, slot, kind) for d in (M2S, S2M) for slot in (0, 1) for kind in KINDS[d]]
    return {
        "about": "256-byte flits of CXL.mem, standard layout; docs/link.md of nearkv describes this file",
        "formats": [case for place in places for case in format_cases(*place)],
        "credits": [credit_case(kind, step) for kind in CREDITS for step in STEPS],
        "rollover": [rollover_case(direction) for direction in (M2S, S2M)],
    }


def hexed(flit):
    """A flit as it is stored: byte 0 first."""
    return flit.to_bytes(FLIT_BYTES, "little").hex()


def told(kind, whole):
    """A message by its fields; data and byte enables as bytes, byte 0 first."""
    return flit_vectors.told(kind, whole, LAYOUTS)


def untold(told_message):
    """The integer of a message."""
    return flit_vectors.untold(told_message, LAYOUTS, message)


class Chosen(Writer):
    """A writer that puts what it has into one slot and leaves the others without messages."""

    def __init__(self, direction, rng, slot):
        super().__init__(direction, rng)
        self._slot = slot

    def _choices(self, slot):
        kinds = [(kind, len(queue)) for kind, queue in self.queues.items() if queue]
        return kinds if slot == self._slot else []


class Exactly(random.Random):
    """Chooses as many messages as there are."""

    def choice(self, items):
        return items[0]


def format_cases(direction, slot, kind):
    """A format full, and with one message; with all of its data."""
    for count in sorted({1, (IN_G if slot else IN_H)[kind]}):
        rng = random.Random(f"{direction}/{slot}/{kind}/{count}")
        writer = Chosen(direction, Exactly(0), slot)
        messages = [random_message(rng, kind) for _ in range(count)]
        writer.queues[kind].extend(messages)
        flits = []
        while not writer.empty:
            flits.append(writer.write())
        yield {
            "name": f"{direction} {'G' if slot else 'H'}{FORMAT[kind]} with {count}",
            "direction": direction,
            "flits": [hexed(flit) for flit in flits],
            "messages": [told(kind, whole) for whole in messages],
        }


def credit_case(kind, step):
    """A flit without messages that returns credits of one kind; it travels the other way."""
    other = M2S if kind in KINDS[S2M] else S2M
    writer = Writer(other, Exactly(0))
    return {
        "name": f"{step} of {kind}",
        "direction": other,
        "kind": kind,
        "credits": step,
        "flit": hexed(writer.write(credit_field(kind, step))),
    }


def rollover_case(direction):
    """Messages of both kinds, packed at random until every slot has held data and headers."""
    rng = random.Random(f"rollover {direction}")
    writer, reader = Writer(direction, rng), Reader(direction)
    messages = []
    for n in range(60):
        kind = DATA[direction] if n % 3 else KINDS[direction][0]
        whole = random_message(rng, kind)
        messages.append((kind, whole))
        writer.queues[kind].append(whole)
    flits = []
    while not writer.empty:
        flit = writer.write()
        reader.read(flit)
        flits.append({"flit": hexed(flit), "slots": reader.slots[-1]})
    return {
        "name": f"{direction} rollover",
        "direction": direction,
        "flits": flits,
        "messages": [told(kind, whole) for of in WIDTH for kind, whole in messages if kind == of],
    }


def load():
    """What the file holds."""
    return json.loads(PATH.read_text())


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
