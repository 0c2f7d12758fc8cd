"""Golden model of one end of a link: initialisation, credits, acknowledgements, retry.

A flit goes in or out at each call; there is no clock. What it does follows tables 4-9 to 4-13 of CXL 3.1.
"""

from flit_golden import (
    ACK,
    DATA,
    FRAME,
    IDLE,
    INIT,
    LLCRD,
    M2S,
    REQUEST,
    S2M,
    Reader,
    Writer,
    control,
    credits_of,
    on_wire,
)

NORMAL, ASK, WAIT = "normal", "ask", "wait"
STEPS = (64, 32, 16, 8, 4, 2, 1)
FIELD = {"rsp": 0, "req": 1, "data": 2}
SPENDS = {"req": "req", "rwd": "data", "ndr": "rsp", "drs": "data"}


class GoldenLink:
    """One end of a link.

    Parameters
    ----------
    sends : M2S for the host, S2M for the device.
    rng : of formats, and of what goes first.
    entries : flits of the retry buffer.
    places : messages of each kind that it takes before credits come back; they are taken away at once.
    flush : transmissions that credits wait for company.

    Members
    -------
    queues : of each kind the messages to send.
    received : of each kind those that arrived.
    state, crc_errors, retries : of the local retry; errors seen, and requests sent.
    log : what was sent and received, as words.
    """

    def __init__(self, sends, rng, entries=64, places=32, multi_data=True, flush=4, timeout=300):
        self.sends = sends
        self.state = NORMAL
        self.crc_errors = self.retries = 0
        self.log = []
        self.viral = False
        self.remote_viral = None
        self._rng = rng
        self._writer = Writer(sends, rng, multi_data)
        self._reader = Reader(S2M if sends == M2S else M2S, multi_data)
        self.queues = self._writer.queues
        self.received = self._reader.messages
        kinds = ("req", "rwd") if sends == S2M else ("ndr", "drs")
        self._owed = dict.fromkeys(FIELD, 0)
        for kind in kinds:
            self._owed[SPENDS[kind]] += places
        self._kinds = kinds
        self._counted = dict.fromkeys(kinds, 0)
        self._credits = {"req": 0, "rwd": 0, "ndr": 0, "drs": 0}
        self._entries, self._flush, self._timeout = entries, flush, timeout
        self._kept = {}  # number to (flit, an all-data flit follows)
        self._write = self._acked = self._read = 0  # counted without wrapping
        self._expected, self._wrap = 0, 9
        self._acks = 0
        self._frames = 0
        self._asked = None  # the other end's request: (number, retries)
        self._tried = self._said = 0
        self._sequence = []  # control flits that must go together
        self._waited = self._silent = 0
        self._alive = self._opened = self.open = False

    @property
    def idle(self):
        """Whether everything was sent and acknowledged or is about to be, and nothing is asked for."""
        return (
            self._writer.empty and self.state == NORMAL and self._read == self._write and not self._sequence
        )

    # Receiving.

    def receive(self, wire):
        """A flit arrives, with its CRC."""
        flit = wire & (1 << 512) - 1
        if on_wire(flit) != wire:
            self.crc_errors += 1
            self._frames = 0
            self.log.append("in: wrong CRC")
            if self.state == NORMAL:
                self.state = ASK
            return
        self._alive = True
        is_data = self.state == NORMAL and self._reader.rolls
        kind = (flit >> 32 & 15, flit >> 36 & 15) if flit & 1 and not is_data else None
        payload = flit >> 64 & (1 << 64) - 1
        if kind and kind[0] == 1:
            self._retry_flit(kind, payload)
            return
        self._frames = 0
        if self.state != NORMAL:
            return
        assert kind == INIT or self.open, "a flit before INIT.Param"
        self._expected = (self._expected + 1) % self._wrap
        self._acks += 1
        self._tried = 0
        if kind == INIT:
            assert not self.open, "a second INIT.Param"
            assert payload & 15 == 2
            self.open, self._wrap = True, payload >> 24 & 255
            return
        if kind is None:
            self._reader.read(flit)
            self.log.append(f"in: {self._reader.flits[-1]}")
            if is_data:
                return self._taken()
            self._acked += 8 * (flit >> 2 & 1)
        else:
            assert kind == LLCRD, f"control flit {kind}"
            self._acked += payload & 7 | (flit >> 2 & 1) << 3 | payload & 0xF0
        assert self._acked <= self._write, "more is acknowledged than was sent"
        for kind_, returned in zip(
            ("ndr", "req", "rwd" if self.sends == M2S else "drs"), credits_of(flit), strict=True
        ):
            self._credits[kind_] += returned
        self._taken()

    def _taken(self):
        """Give back the credits of messages that arrived."""
        for kind in self._kinds:
            new = len(self.received[kind]) - self._counted[kind]
            self._counted[kind] += new
            self._owed[SPENDS[kind]] += new

    def _retry_flit(self, kind, payload):
        framed, self._frames = self._frames >= 5, self._frames + 1 if kind == FRAME else 0
        self.log.append(f"in: RETRY {kind[1]}")
        if kind == REQUEST and framed:
            self._asked = (payload & 255, payload >> 16 & 31)
        elif kind == ACK and framed:
            assert self.state != NORMAL, "a RETRY.Ack that was not asked for"
            if self.state == WAIT and payload >> 3 & 31 == self._said:
                self.state = NORMAL
                self.remote_viral = payload >> 32 & 0xFFFF if payload >> 1 & 1 else None
                if payload & 1:
                    self._tried = 0

    def retrained(self):
        """The physical layer carries flits again; what was on the wire is lost."""
        self.state, self._asked, self._sequence, self._frames = ASK, None, [], 0

    # Sending.

    def transmit(self):
        """The next flit with its CRC, or None."""
        flit = self._next()
        if flit is None:
            return None
        if self.state == WAIT:
            self._silent += 1
            if self._silent > self._timeout:
                self.state = ASK
        return on_wire(flit)

    def _next(self):
        if self._sequence:
            flit = self._sequence.pop(0)
            return flit() if callable(flit) else flit
        rolls = self._kept[self._read - 1][1] if 0 < self._read < self._write else self._writer.rolls
        if self._asked:
            self._sequence = [*[control(FRAME)] * 4, self._answer]
            return control(FRAME)
        if self.state == ASK and not rolls:
            self._sequence = [*[control(FRAME)] * 4, self._request]
            return control(FRAME)
        if self._read < self._write:
            self._read += 1
            return self._kept[self._read - 1][0]
        if not self._opened:
            if not self._alive:
                return control(IDLE)
            self._opened = True
            return self._keep(control(INIT, 2 | self._entries << 24))
        free = self._entries - (self._write - self._acked)
        if self._writer.rolls:
            return self._keep(self._writer.write())
        if self.open and not self._writer.empty and free >= 8 and (self._rng.random() < 0.9):
            ak = self._acks >= 8
            self._acks -= 8 * ak
            return self._keep(self._writer.write(int(ak), self._give(), self._credits))
        if self.open and free >= 2 and (self._acks > 1 or any(self._owed.values())):
            self._waited += 1
            if self._waited > self._flush or self._acks >= 16:
                self._waited = 0
                acks, self._acks = self._acks, 0
                return self._keep(control(LLCRD, acks & 0xF7, acks >> 3 & 1, self._give()))
        return control(IDLE) if self.state == WAIT else None

    def _keep(self, flit):
        self._kept[self._write] = flit, self._writer.rolls
        self._write += 1
        self._read = self._write
        return flit

    def _give(self):
        fields = [0, 0, 0]
        for name, place in FIELD.items():
            step = next((step for step in STEPS if step <= self._owed[name]), 0)
            self._owed[name] -= step
            fields[place] = 8 | step.bit_length() if step else 8 if self._gives(name) else 0
        return tuple(fields)

    def _gives(self, name):
        return name in {SPENDS[kind] for kind in self._kinds}

    def _answer(self):
        number, retries = self._asked
        self._asked = None
        back = (self._write - number) % self._entries
        assert back <= self._write - self._acked, "a flit that was acknowledged is asked for"
        self._read = self._write - back
        free = self._entries - (self._write - self._acked)
        self.log.append(f"out: RETRY.Ack, {back} flits again")
        return control(
            ACK,
            (back == 0)
            | self.viral << 1
            | retries << 3
            | self._write % self._entries << 8
            | number << 16
            | free << 24,
        )

    def _request(self):
        self.state, self._said, self._silent = WAIT, self._tried, 0
        self._tried += 1
        self.retries += 1
        self.log.append(f"out: RETRY.Req {self._expected}")
        return control(REQUEST, self._expected | self._said << 16)


def random_message(rng, kind):
    """A valid message with random fields and data."""
    from flit_golden import ALL, WIDTH, message

    enable = rng.choice([ALL, rng.getrandbits(64)])
    return message(kind, rng.getrandbits(WIDTH[kind]) | 1, rng.getrandbits(512), enable)


def kinds_of(sends):
    """Kinds of messages that travel in a direction."""
    return ("req", "rwd") if sends == M2S else ("ndr", "drs")


assert set(DATA.values()) == {"rwd", "drs"}
