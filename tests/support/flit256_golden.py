"""Golden model of 256-byte flits, standard layout: what slots hold, and every rule of packing; independent of
the RTL.

Bits of the flit are counted from byte 0 bit 0; positions and limits are those of CXL 3.1 section 4.3. A
message is an integer: the header of 256-byte mode, and behind it what belongs to it (RwD: byte enables, data;
DRS: data). What is the physical layer's (header, CRC, FEC) is zero.
"""

from collections import deque

M2S, S2M = "M2S", "S2M"
KINDS = {M2S: ("req", "rwd"), S2M: ("ndr", "drs")}
WIDTH = {"req": 100, "rwd": 104, "ndr": 40, "drs": 40}
FORMAT = {"req": 4, "ndr": 7, "rwd": 14, "drs": 15}
IN_H = {"req": 1, "rwd": 1, "ndr": 2, "drs": 2}
IN_G = {"req": 1, "rwd": 1, "ndr": 3, "drs": 3}
IN_GROUP = {"req": 4, "rwd": 2, "ndr": 6, "drs": 3}
GROUPS = (range(8), range(4, 12), range(8, 15), (12, 13, 14, 15, 16, 17, 18))
"""Slots whose messages are counted together; those from 15 on are slots 0 to 3 of the next flit."""
DATA = {M2S: "rwd", S2M: "drs"}
TRAILER = {"rwd": 75, "drs": 31}
CREDITS = {"req": (0, 0x14), "rwd": (5, 0x14), "ndr": (10, 0x19), "drs": (5, 0x19)}
"""Where a kind's credits lie behind the slots, and the first of its five codes."""
STEPS = (1, 4, 8, 12, 16)
SLOTS = 15
ALL = (1 << 64) - 1
FLIT_BYTES = 256


class RuleBroken(AssertionError):
    """A flit breaks a rule."""


def place(slot):
    """(first bit, bits) of a slot."""
    return (16, 112) if slot == 0 else (128 * slot, 128)


def message(kind, header, line=0, enable=ALL):
    """Header and data as one integer; the header says whether there are byte enables."""
    if kind == "rwd":
        header = header & ~(1 << TRAILER["rwd"]) | (enable != ALL) << TRAILER["rwd"]
        return header | enable << 104 | line << 168
    return header & ~(1 << TRAILER["drs"]) | line << 40 if kind == "drs" else header


def random_message(rng, kind):
    """A valid message with random fields and data."""
    enable = rng.choice([ALL, rng.getrandbits(64)])
    return message(kind, rng.getrandbits(WIDTH[kind]) | 1, rng.getrandbits(512), enable)


def chunks_of(kind, whole):
    """The slots of data that follow a message's header."""
    enable, line = (whole >> 104 & ALL, whole >> 168) if kind == "rwd" else (ALL, whole >> 40)
    chunks = [line >> 128 * n & (1 << 128) - 1 for n in range(4)]
    return chunks + ([enable] if enable != ALL else [])


def credit_field(kind, count):
    """The field that returns as much of `count` messages as it can, where it lies in a flit."""
    at, first = CREDITS[kind]
    codes = [first + n for n, step in enumerate(STEPS) if step <= count]
    return codes[-1] << 1920 + at if codes else 0


def credits_of(flit):
    """What a flit returns of each kind."""
    found = {}
    for kind, (at, first) in CREDITS.items():
        code = flit >> 1920 + at & 31
        found[kind] = STEPS[code - first] if first <= code < first + len(STEPS) else 0
    return found


class Counted:
    """Messages of each kind in slots, and whether there may be more."""

    def __init__(self):
        self._slots = [dict.fromkeys(WIDTH, 0) for _ in range(SLOTS)]  # of this flit and the last one
        self._before = [dict.fromkeys(WIDTH, 0) for _ in range(SLOTS)]

    def begin(self):
        """A flit begins."""
        self._before, self._slots = self._slots, [dict.fromkeys(WIDTH, 0) for _ in range(SLOTS)]

    def add(self, slot, kind, count):
        self._slots[slot][kind] += count

    def most(self, slot, kind):
        """Messages of a kind that a slot may still have."""
        counts = [self._slots[n][kind] for n in range(SLOTS)]
        sums = [sum(counts[n] for n in group) for group in GROUPS[:3] if slot in group]
        if slot < 4:
            sums.append(sum(self._before[n][kind] for n in (12, 13, 14)) + sum(counts[:4]))
        if slot > 11:
            sums.append(sum(counts[12:]))
        return IN_GROUP[kind] - max(sums)


class Reader:
    """Takes flits apart, in their order, and checks every rule that a flit can break.

    Members
    -------
    messages : of each kind those that arrived whole.
    slots : for each flit what it held: "data", or a kind and how many, for each slot.
    pending : slots of data owed.
    """

    def __init__(self, direction):
        self.direction = direction
        self.messages = {kind: [] for kind in KINDS[direction]}
        self.slots = []
        self.pending = 0
        self._headers = deque()
        self._counted = Counted()

    def read(self, flit):
        self._counted.begin()
        held = []
        for slot in range(SLOTS):
            at, bits = place(slot)
            content = flit >> at & (1 << bits) - 1
            if slot and self.pending:
                held.append("data")
                self._chunk(content)
            else:
                held.append(self._messages(slot, content))
        self.slots.append(" ".join(held))

    def _messages(self, slot, content):
        kind = {code: kind for kind, code in FORMAT.items()}.get(content & 15)
        if kind not in KINDS[self.direction]:
            if content:
                raise RuleBroken(f"slot {slot} has format {content & 15}, which holds no message of CXL.mem")
            return "-"
        width, most = WIDTH[kind], (IN_G if slot else IN_H)[kind]
        found = [content >> 4 + width * n & (1 << width) - 1 for n in range(most)]
        there = [header & 1 for header in found]
        if sorted(there, reverse=True) != there:
            raise RuleBroken(f"slot {slot} is not packed from its first place on")
        count = sum(there)
        if count > self._counted.most(slot, kind):
            raise RuleBroken(f"slot {slot} has {count} messages of kind {kind}, more than its group may have")
        self._counted.add(slot, kind, count)
        if kind == DATA[self.direction] and count:
            if slot == 0 and self.pending > 16:
                raise RuleBroken(f"a data header in slot 0 with {self.pending} slots of data owed")
            for header in found[:count]:
                trailer = header >> TRAILER[kind] & 1
                if trailer and kind == "drs":
                    raise RuleBroken("extended metadata")
                self._headers.append((header, 4 + trailer, []))
                self.pending += 4 + trailer
            if self.pending > 36:
                raise RuleBroken(f"{self.pending} slots of data owed")
        else:
            self.messages[kind] += found[:count]
        return f"{kind}*{count}" if count else "-"

    def _chunk(self, chunk):
        header, count, chunks = self._headers[0]
        chunks.append(chunk)
        self.pending -= 1
        if len(chunks) < count:
            return
        self._headers.popleft()
        kind = DATA[self.direction]
        line = sum(part << 128 * n for n, part in enumerate(chunks[:4]))
        self.messages[kind].append(message(kind, header, line, chunks[4] & ALL if count > 4 else ALL))


class Writer:
    """Packs messages into flits by the rules, choosing at random which slot holds what.

    Parameters
    ----------
    direction : M2S or S2M.
    rng : of the choices.

    Members
    -------
    queues : of each kind the messages that wait.
    """

    def __init__(self, direction, rng):
        self.direction = direction
        self.queues = {kind: deque() for kind in KINDS[direction]}
        self._rng = rng
        self._chunks = deque()
        self._counted = Counted()

    @property
    def empty(self):
        """Whether there is nothing to send."""
        return not self._chunks and not any(self.queues.values())

    def write(self, credits=0):
        """The next flit; `credits` are its fields, in place."""
        self._counted.begin()
        flit = credits
        for slot in range(SLOTS):
            at, _ = place(slot)
            if slot and self._chunks:
                flit |= self._chunks.popleft() << at
            else:
                flit |= self._fill(slot) << at
        return flit

    def _fill(self, slot):
        choices = self._choices(slot)
        if not choices:
            return self._rng.choice([0, FORMAT[KINDS[self.direction][0]]])  # both are without a message
        kind, most = self._rng.choice(choices)
        count = self._rng.choice([most, self._rng.randint(1, most)])
        bits = FORMAT[kind]
        for n in range(count):
            whole = self.queues[kind].popleft()
            bits |= (whole & (1 << WIDTH[kind]) - 1) << 4 + WIDTH[kind] * n
            if kind == DATA[self.direction]:
                self._chunks.extend(chunks_of(kind, whole))
        self._counted.add(slot, kind, count)
        return bits

    def _choices(self, slot):
        """Kinds that a slot may have, and how many of each; none at random."""
        if self._rng.random() < 0.1:
            return []
        choices = []
        for kind, queue in self.queues.items():
            most = min(len(queue), (IN_G if slot else IN_H)[kind], self._counted.most(slot, kind))
            if slot == 0 and kind == DATA[self.direction] and len(self._chunks) > 16:
                continue
            if most > 0:
                choices.append((kind, most))
        return choices
