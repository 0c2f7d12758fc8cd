"""Golden model of 68-byte flits: what slots hold, how data rolls over, and the CRC; independent of the RTL.

Positions are those of the figures of CXL 3.1 section 4.2.3, bits of the flit counted from byte 0 bit 0. A
message is an integer: the header, and behind it what belongs to it (RwD: byte enables, data; DRS: data).
"""

from collections import deque

M2S, S2M = "M2S", "S2M"
WIDTH = {"req": 87, "rwd": 87, "ndr": 30, "drs": 40}
MOST = {"req": 2, "rwd": 1, "ndr": 2, "drs": 3}
DATA = {M2S: "rwd", S2M: "drs"}
LINE = (1 << 512) - 1
ALL = (1 << 64) - 1


def span(first, width):
    """Bit positions one after the other."""
    return list(range(first, first + width))


def pair(at):
    """Two NDR from bit `at` on: 28 bits of the first, 30 of the second, then the first one's DevLoad."""
    return [("ndr", span(at, 28) + span(at + 58, 2)), ("ndr", span(at + 28, 30))]


PLACES = {
    (M2S, 0, 4): [("rwd", span(32, 87))],
    (M2S, 0, 5): [("req", span(32, 87))],
    (M2S, 1, 4): [("req", span(0, 87))],
    (M2S, 1, 5): [("rwd", span(0, 87))],
    (S2M, 0, 0): [("ndr", span(32 + 57, 30))],
    (S2M, 0, 3): [("drs", span(32, 40)), ("ndr", span(72, 30))],
    (S2M, 0, 4): pair(32),
    (S2M, 0, 5): [("drs", span(32, 40)), ("drs", span(72, 40))],
    (S2M, 1, 4): [("drs", span(0, 40)), *pair(40)],
    (S2M, 1, 5): pair(0),
    (S2M, 1, 6): [("drs", span(0, 40)), ("drs", span(40, 40)), ("drs", span(80, 40))],
}
"""(direction, 0 for slot 0 and 1 for the others, format) to the messages in it."""
SLOT_AT = (7 - 2, 8, 11, 14)
"""Where the header says what each slot holds."""
LLCRD, IDLE, REQUEST, ACK, FRAME, INIT = (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (12, 8)
"""(LLCTRL, sub type) of control flits."""


class RuleBroken(AssertionError):
    """A flit breaks a rule."""


def crc16(flit):
    """The CRC by long division of the flit and sixteen zeros, highest bit first."""
    remainder = 0
    for bit in reversed(range(528)):
        remainder = remainder << 1 | ((flit << 16) >> bit & 1)
        if remainder >> 16:
            remainder ^= 0x1F053
    return remainder


def on_wire(flit):
    """The flit with its CRC."""
    return flit | crc16(flit) << 512


def control(kind, payload=0, ak=0, credits=(0, 0, 0)):
    """A control flit; credits are fields of rsp, req, data."""
    rsp, req, data = credits
    head = 1 | ak << 2 | rsp << 20 | req << 24 | data << 28
    return head | kind[0] << 32 | kind[1] << 36 | payload << 64


def gather(bits, places):
    """The bits at the places, the first lowest."""
    return sum((bits >> at & 1) << n for n, at in enumerate(places))


def scatter(value, places):
    """Bits of a value put at places."""
    return sum((value >> n & 1) << at for n, at in enumerate(places))


def credits_of(flit):
    """What a flit with a header returns of CXL.mem: (rsp, req, data) messages."""

    def count(field):
        return (0, 1, 2, 4, 8, 16, 32, 64)[field & 7] if field & 8 else 0

    return tuple(count(flit >> at & 15) for at in (20, 24, 28))


def message(kind, header, line=0, enable=ALL):
    """Header and data as one integer."""
    if kind == "rwd":
        return header | enable << 87 | line << 151
    return header | line << 40 if kind == "drs" else header


class Reader:
    """Takes protocol and all-data flits apart, in their order, and checks every rule that a flit can break.

    Members
    -------
    messages : of each kind those that arrived whole.
    flits : for each flit what it was: "all-data", or its formats by slot.
    """

    def __init__(self, direction, multi_data=True):
        self.direction = direction
        self.multi_data = multi_data
        self.messages = {kind: [] for kind in WIDTH}
        self.flits = []
        self._headers = deque()  # data headers without all of their data: [header, enables follow, chunks]

    @property
    def pending(self):
        """Chunks owed."""
        return sum(4 + enables - len(chunks) for _, enables, chunks in self._headers)

    @property
    def rolls(self):
        """Whether an all-data flit comes next."""
        return self.pending > 3

    def read(self, flit):
        """Take a flit, without its CRC."""
        slots = [flit >> 128 * n & (1 << 128) - 1 for n in range(4)]
        if self.rolls:
            self.flits.append("all-data")
            for chunk in slots:
                self._chunk(chunk)
            return
        if flit & 1:
            raise RuleBroken("a control flit is no protocol flit")
        codes = [flit >> at & 7 for at in SLOT_AT]
        be, sz = flit >> 3 & 1, flit >> 4 & 1
        self.flits.append(" ".join(f"{'G' if n else 'H'}{code}" for n, code in enumerate(codes)))
        counts, owed, headers_in = dict.fromkeys(WIDTH, 0), self.pending, None
        for n, code in enumerate(codes):
            data_due = n and (n <= owed or headers_in is not None)
            if bool(data_due) != bool(n and code == 0):
                raise RuleBroken(f"slot {n} holds {'messages' if data_due else 'data'}: {self.flits[-1]}")
            if data_due:
                self._chunk(slots[n])
                continue
            places = PLACES.get((self.direction, min(n, 1), code))
            if places is None:
                if slots[n] >> (0 if n else 32):
                    raise RuleBroken(f"slot {n} has format {code}, which holds no message of CXL.mem")
                continue
            missing = set()
            several = sum(kind == DATA[self.direction] for kind, _ in places) > 1
            found = 0
            for kind, at in places:
                header = gather(slots[n], at)
                if not header & 1:
                    missing.add(kind)
                    continue
                if kind in missing:
                    raise RuleBroken(f"slot {n} is not packed from its first place on")
                counts[kind] += 1
                if kind == DATA[self.direction]:
                    found += 1
                    if headers_in not in (None, n):
                        raise RuleBroken("two slots have data headers")
                    headers_in = n
                    if not sz:
                        raise RuleBroken("a data header without sz")
                    self._headers.append((header, be, []))
                else:
                    self.messages[kind].append(header)
            if several and found == 1:
                raise RuleBroken("a slot for several data headers has one")
            if several and found and (be or not self.multi_data):
                raise RuleBroken("several data headers with byte enables, or where they are off")
        if be and (headers_in is None or self.direction == S2M):
            raise RuleBroken("be without data that may have byte enables")
        for kind, count in counts.items():
            if count > MOST[kind]:
                raise RuleBroken(f"{count} messages of kind {kind} in a flit")

    def _chunk(self, chunk):
        header, enables, chunks = self._headers[0]
        chunks.append(chunk)
        if len(chunks) < 4 + enables:
            return
        self._headers.popleft()
        line = sum(part << 128 * n for n, part in enumerate(chunks[:4]))
        kind = DATA[self.direction]
        self.messages[kind].append(message(kind, header, line, chunks[4] & ALL if enables else ALL))


class Writer:
    """Packs messages into flits by the rules, choosing among formats at random.

    Parameters
    ----------
    direction : M2S or S2M.
    rng : of the choices.
    multi_data : slots with several data headers may be used.

    Members
    -------
    queues : of each kind the messages that wait.
    """

    def __init__(self, direction, rng, multi_data=True):
        self.direction = direction
        self.queues = {kind: deque() for kind, *_ in (("req",), ("rwd",), ("ndr",), ("drs",))}
        self._rng = rng
        self._multi_data = multi_data
        self._chunks = deque()

    @property
    def rolls(self):
        """Whether an all-data flit comes next."""
        return len(self._chunks) > 3

    @property
    def empty(self):
        """Whether there is nothing to send."""
        return not self._chunks and not any(self.queues.values())

    def write(self, ak=0, credits=(0, 0, 0), limits=None):
        """The next flit, without its CRC; `limits` are the credits, counted down as messages are sent."""
        if self.rolls:
            return sum(self._chunks.popleft() << 128 * n for n in range(4))
        limits = dict.fromkeys(WIDTH, 1 << 30) if limits is None else limits
        rsp, req, data = credits
        flit = ak << 2 | rsp << 20 | req << 24 | data << 28
        left, owed, data_begun = dict(MOST), len(self._chunks), False
        for n in range(4):
            if n and (n <= owed or data_begun):
                flit |= self._chunks.popleft() << 128 * n
                continue
            code = self._choose(n, left, limits)
            flit |= code << SLOT_AT[n]
            for kind, at in PLACES[self.direction, min(n, 1), code]:
                if not self._ready(kind, left, limits):
                    continue
                whole = self.queues[kind].popleft()
                left[kind] -= 1
                limits[kind] -= 1
                header = whole & (1 << WIDTH[kind]) - 1
                flit |= scatter(header, at) << 128 * n
                if kind == DATA[self.direction]:
                    data_begun = True
                    flit |= 1 << 4
                    enable = whole >> 87 & ALL if kind == "rwd" else ALL
                    flit |= (enable != ALL) << 3
                    line = whole >> (151 if kind == "rwd" else 40)
                    self._chunks.extend(line >> 128 * c & (1 << 128) - 1 for c in range(4))
                    if enable != ALL:
                        self._chunks.append(enable)
        return flit

    def _ready(self, kind, left, limits):
        return bool(self.queues[kind]) and left[kind] > 0 and limits[kind] > 0

    def _choose(self, n, left, limits):
        """A format that holds something, or any without data headers if there is nothing."""
        data = DATA[self.direction]
        formats, empty = [], []
        for (direction, where, code), places in PLACES.items():
            if direction != self.direction or where != min(n, 1):
                continue
            kinds = [kind for kind, _ in places]
            several = kinds.count(data) > 1
            there = min(len(self.queues[data]), left[data], limits[data])
            if several and (there < 2 or not self._multi_data):
                if there == 0:
                    empty.append(code)
                continue
            if any(self._ready(kind, left, limits) for kind in kinds):
                formats.append(code)
            else:
                empty.append(code)
        if formats and self._rng.random() < 0.9:
            return self._rng.choice(formats)
        idle = [code for code in empty if code in (4, 5) or self.direction == S2M]
        return self._rng.choice(idle or formats)
