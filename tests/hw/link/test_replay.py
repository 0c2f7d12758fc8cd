# amaranth: UnusedElaboratable=no
"""The physical layer's retry with a plain model at the other end: every flit once and in order."""

from collections import deque

import cocotb
import pytest
from nearkv_hw.link.replay import ACK_CYCLES, MAX_REPLAYS, Replay
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import RisingEdge, StreamSource, cycles, random, start, value

ENTRIES, TIMEOUT_CYCLES = 8, 400
BEATS, BEAT_BITS, HEADER_BITS = 4, 512, 16
NUMBERS = 1 << 10
OWN, ACK, NAK = 0, 1, 2
DAMAGED = 1 << BEAT_BITS
WIRE_CYCLES = 5


@pytest.mark.rtl
def test_replay():
    run(Replay(entries=ENTRIES, timeout_cycles=TIMEOUT_CYCLES), module=__file__)


def header(number, command=OWN, payload=1):
    return number % NUMBERS | command << 10 | payload << 15


def parts(head):
    """(number, command, payload) of a header."""
    return head & NUMBERS - 1, head >> 10 & 3, head >> 15 & 1


class Peer:
    """The other end, a flit at a time; numbers count on without wrapping."""

    def __init__(self, rng):
        self.rng = rng
        self.to_send, self.received = deque(), []
        self._kept = []  # every flit that was sent, by its number
        self._read = self._base = 0
        self._expected, self._waiting, self._silent = 0, False, 0
        self._nak = self._ack = self._assure = False
        self.naks = 0

    @property
    def idle(self):
        return not self.to_send and self._base == len(self._kept) and not self._waiting

    def receive(self, flit, damaged):
        number, command, payload = parts(flit & 0xFFFF)
        if damaged:
            self._missing()
            return
        if command != OWN:
            following = self._base + (number + 1 - self._base) % NUMBERS
            if following <= len(self._kept):
                self._base = following
                if command == NAK:
                    self._read, self._assure = following, following == len(self._kept)
        elif (number + 1 - payload - self._expected) % NUMBERS == 0:
            self._waiting = False
        elif (number + 1 - payload - self._expected) % NUMBERS < NUMBERS // 2:
            self._missing()
            return
        else:
            self._ack = True
            return
        if payload and not self._waiting:
            assert command != OWN or number == self._expected % NUMBERS
            self.received.append(flit >> HEADER_BITS)
            self._expected += 1
            self._ack = True

    def _missing(self):
        if not self._waiting:
            self._waiting, self._nak, self._silent = True, True, 0

    def transmit(self):
        """The next flit, if there is one."""
        self._silent += 1
        if self._waiting and self._silent > TIMEOUT_CYCLES // BEATS:
            self._nak, self._silent = True, 0
        if self._nak:
            self._nak, self.naks = False, self.naks + 1
            return header(self._expected - 1, NAK, 0)
        if self._read < len(self._kept):
            self._read += 1
            return self._kept[self._read - 1] << HEADER_BITS | header(self._read - 1)
        if self._assure:
            self._assure = False
            return header(len(self._kept) - 1, OWN, 0)
        if self.to_send and len(self._kept) - self._base < 6:
            self._kept.append(self.to_send.popleft())
            self._read += 1
            head = header(self._read - 1)
            if self._ack and self.rng.random() < 0.7:
                self._ack, head = False, header(self._expected - 1, ACK)
            return self._kept[-1] << HEADER_BITS | head
        if self._ack and self.rng.random() < 0.3:
            self._ack = False
            return header(self._expected - 1, ACK, 0)
        if self._base < len(self._kept) and self.rng.random() < 0.02:
            self._read = self._base  # nobody acknowledges: all of it again
        return None


class Bench:
    """The design, a wire each way that damages flits, and the peer."""

    def __init__(self, dut, rng, errors=0.0, idle=0.0, pace=1.0):
        self.dut, self.rng, self.errors, self.pace = dut, rng, errors, pace
        self.peer = Peer(rng)
        self.source = StreamSource(dut, "i", idle=idle)
        self.sent, self.got = [], []
        self.headers = []
        self.deaf = False  # flits of the design are lost
        cocotb.start_soon(self._out())
        cocotb.start_soon(self._from_design())
        cocotb.start_soon(self._to_design())

    def send(self, count):
        """As many random flits each way."""
        for _ in range(count):
            flit = self.rng.getrandbits(BEATS * BEAT_BITS - HEADER_BITS) << HEADER_BITS
            self.sent.append(flit >> HEADER_BITS)
            self.source.send([flit >> BEAT_BITS * n & DAMAGED - 1 for n in range(BEATS)])
            self.peer.to_send.append(self.rng.getrandbits(BEATS * BEAT_BITS - HEADER_BITS))

    async def _out(self):
        """What was accepted, a flit of four beats in order."""
        index, flit = 0, 0
        while True:
            await RisingEdge(self.dut.clk)
            if self.dut.o_valid.value:
                bits = value(self.dut.o_payload)
                assert bits >> BEAT_BITS == index
                flit |= (bits & DAMAGED - 1) << BEAT_BITS * index
                index = (index + 1) % BEATS
                if index == 0:
                    self.got.append(flit >> HEADER_BITS)
                    flit = 0

    async def _from_design(self):
        beats = []
        while True:
            self.dut.tx_ready.value = int(self.rng.random() < self.pace)
            await RisingEdge(self.dut.clk)
            if self.dut.tx_valid.value and self.dut.tx_ready.value:
                beat = value(self.dut.tx_payload)
                assert beat < DAMAGED, "the mark is the wire's"
                beats.append(beat)
            if len(beats) == BEATS:
                flit, beats = sum(beat << BEAT_BITS * n for n, beat in enumerate(beats)), []
                self.headers.append(parts(flit & 0xFFFF))
                if not self.deaf:
                    self.peer.receive(flit, self.rng.random() < self.errors)

    async def _to_design(self):
        while True:
            flit = self.peer.transmit()
            damaged = self.rng.random() < self.errors
            at = self.rng.randrange(BEATS)
            for beat in range(BEATS):
                if flit is not None:
                    bits = flit >> BEAT_BITS * beat & DAMAGED - 1
                    if damaged and beat == at:
                        bits ^= DAMAGED | 1 << self.rng.randrange(BEAT_BITS)
                    self.dut.rx_payload.value = bits
                self.dut.rx_valid.value = int(flit is not None)
                await cycles(self.dut, 1)
                self.dut.rx_valid.value = 0

    async def arrived(self, limit=40_000):
        """Every flit came once and in order, each way, and was acknowledged."""
        for _ in range(limit // 20):
            await cycles(self.dut, 20)
            if len(self.got) == len(self.peer.received) == len(self.sent) and self.peer.idle:
                break
        await cycles(self.dut, 100)
        assert self.peer.received == self.sent
        assert self.got == self.peer._kept
        assert not self.dut.unexpected.value


@cocotb.test()
@cocotb.parametrize(errors=[0.0, 0.03, 0.3], idle=[0.0, 0.5], pace=[1.0, 0.6])
async def every_flit_arrives_once(dut, errors, idle, pace):
    await start(dut)
    dut.phy_up.value = 1
    bench = Bench(dut, random("replay", errors, idle, pace), errors, idle, pace)
    bench.send(60)
    await bench.arrived()
    if errors == 0:
        numbers = [number for number, command, payload in bench.headers if command == OWN and payload]
        assert numbers == sorted(set(numbers)), "nothing is sent twice"
        assert bench.peer.naks == 0


@cocotb.test()
async def numbers_wrap(dut):
    """More flits than there are numbers."""
    await start(dut)
    dut.phy_up.value = 1
    bench = Bench(dut, random("wraps"), 0.01)
    bench.send(NUMBERS + 40)
    await bench.arrived()


@cocotb.test()
async def sends_again_what_nobody_acknowledges(dut):
    """After the time-out all of it with its numbers; at last the link retrains, and then it is sent again."""
    await start(dut)
    dut.phy_up.value = 1
    bench = Bench(dut, random("deaf"))
    bench.deaf = True
    bench.send(3)
    await cycles(dut, TIMEOUT_CYCLES + 100)
    own = [number for number, command, payload in bench.headers if payload and command == OWN]
    assert own[-3:] == [0, 1, 2]
    assert not dut.retrain.value
    await cycles(dut, MAX_REPLAYS * (TIMEOUT_CYCLES + 60))
    assert dut.retrain.value
    dut.phy_up.value = 0
    await cycles(dut, 20)
    assert not dut.retrain.value
    bench.deaf = False
    dut.phy_up.value = 1
    await bench.arrived()


@cocotb.test()
async def takes_as_long_as_stated(dut):
    """From a beat to the wire, and from a flit's last beat to its first."""
    await start(dut)
    dut.phy_up.value = dut.tx_ready.value = 1
    dut.i_valid.value = 1
    await cycles(dut, 1)
    assert await until(dut, dut.tx_valid) == Replay.latency_cycles
    await cycles(dut, BEATS - 1 - Replay.latency_cycles)
    dut.i_valid.value = 0
    for beat in range(BEATS):
        dut.rx_payload.value = header(0) if beat == 0 else 0
        dut.rx_valid.value = 1
        await cycles(dut, 1)
    dut.rx_valid.value = 0
    assert await until(dut, dut.o_valid) == Replay.receive_cycles
    # An acknowledgement goes by itself when nothing else does.
    dut.tx_ready.value = 1
    commands = []
    for _ in range(ACK_CYCLES + 20):
        await cycles(dut, 1)
        if dut.tx_valid.value:
            commands.append(parts(value(dut.tx_payload) & 0xFFFF)[1])
    assert ACK in commands


async def until(dut, handle):
    """Cycles from the one that has just ended to one in which the handle is set."""
    count = 0
    while not handle.value:
        await cycles(dut, 1)
        count += 1
    return count
