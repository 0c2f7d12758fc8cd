"""The physical layer's retry of 256-byte flits: sequence numbers, acknowledgements, the replay buffer."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.flits import Retry
from ..abi.flits256 import BEAT_BITS, BEATS, MAX_REPLAY_ENTRIES, PHY_BITS, PHY_HEADER, SEQUENCE_BITS, Command
from ..common.buffer import Buffer
from ..structs import layout_of
from .stages import finds_room
from .unpacker256 import BEAT

BEAT_WIRE_BITS = BEAT_BITS + 1
"""A beat, and whether the CRC found its flit damaged."""
ACK_FLITS = 8
"""Flits owed an acknowledgement from which on one is sent by itself."""
ACK_CYCLES = 24
"""Cycles that an acknowledgement waits for a flit to go with, until one is sent by itself."""
TIMEOUT_CYCLES = 1024
"""Without an acknowledgement in so many cycles everything is sent again; and as long does a receiver wait for
what it asked for before it asks again."""
MAX_REPLAYS = 4
"""Time-outs behind each other until the physical layer retrains."""


def check_retry(entries, timeout_cycles):
    """ValueError for a replay buffer or a time-out that cannot be."""
    most = MAX_REPLAY_ENTRIES
    if not isinstance(entries, int) or not 2 <= entries <= most or entries & (entries - 1):
        raise ValueError(f"entries must be a power of two from 2 to {most}, not {entries!r}")
    if not isinstance(timeout_cycles, int) or timeout_cycles < 1:
        raise ValueError(f"timeout_cycles must be a positive integer, not {timeout_cycles!r}")


class Replay(wiring.Component):
    """Sends flits until the other end has acknowledged them, and accepts the other end's in sequence.

    Every flit has a sequence number. Its header says that number, or in its place the last number received
    (`abi.flits256.Command`); then the flit's own is the one that follows. A damaged flit, or a number that
    comes too early, makes the receiver ask for everything from the one that it expects (a standard Nak); what
    comes meanwhile is dropped, and what is sent again says its numbers. A flit without payload, for an
    acknowledgement that waited, a Nak, or to say that nothing is missing, has no number and is not kept.

    Parameters
    ----------
    entries : flits that the buffer holds; a power of two up to 256.
    timeout_cycles : until what was sent, or asked for, is sent, or asked for, again.

    Members
    -------
    i : In(stream(512)) : beats to send, four for a flit.
    o : Out(stream(BEAT), always_ready) : beats of the flits that were accepted.
    tx : Out(stream(513)), rx : In(stream(513), always_ready) : beats on the wire; the highest bit says that
        the CRC, which is in a flit's last bytes, found it damaged.
    phy_up : In(1) : the physical layer carries flits; after a time without it they are sent again.
    retrain : Out(1) : it shall retrain; until it does.
    state : Out(Retry) : NORMAL, or WAIT for what was asked for.
    sent, replayed, accepted, crc_error : Out(1) : a flit is sent, one out of the buffer, one was accepted in
        sequence, one was damaged.
    unexpected : Out(1) : a flit was acknowledged that was not sent.
    kept : Out : flits in the buffer.

    Latency is `latency_cycles` from a beat to the wire, and `receive_cycles` from a flit's last beat to its
    first at `o`. Throughput is a beat per cycle.
    """

    latency_cycles = 2
    receive_cycles = 2

    def __init__(self, *, entries=32, timeout_cycles=TIMEOUT_CYCLES):
        check_retry(entries, timeout_cycles)
        self.entries = entries
        self.timeout_cycles = timeout_cycles
        super().__init__(
            {
                "i": In(stream.Signature(BEAT_BITS)),
                "o": Out(stream.Signature(BEAT, always_ready=True)),
                "tx": Out(stream.Signature(BEAT_WIRE_BITS)),
                "rx": In(stream.Signature(BEAT_WIRE_BITS, always_ready=True)),
                "phy_up": In(1),
                "retrain": Out(1),
                "state": Out(Retry),
                **dict.fromkeys(("sent", "replayed", "accepted", "crc_error", "unexpected"), Out(1)),
                "kept": Out(SEQUENCE_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        told = self._receive(m)
        self._send(m, told)
        return m

    def _receive(self, m):
        """Takes flits; returns what the sender has to know."""
        m.submodules.arrived = arrived = Memory(shape=BEAT_BITS, depth=2 * BEATS, init=[])
        store, load = arrived.write_port(), arrived.read_port()
        beat, half = Signal(range(BEATS)), Signal()
        header = Signal(layout_of(PHY_HEADER))
        damaged, whole = Signal(), Signal()
        m.d.comb += [
            store.en.eq(self.rx.valid & self.phy_up),
            store.addr.eq(Cat(beat, half)),
            store.data.eq(self.rx.payload[:BEAT_BITS]),
        ]
        m.d.sync += whole.eq(store.en & (beat == BEATS - 1))
        with m.If(store.en):
            m.d.sync += [
                beat.eq(beat + 1),
                damaged.eq(Mux(beat == 0, 0, damaged) | self.rx.payload[-1]),
            ]
            with m.If(beat == 0):
                m.d.sync += header.as_value().eq(self.rx.payload[:PHY_BITS])
            with m.If(beat == BEATS - 1):
                m.d.sync += half.eq(~half)
        with m.If(~self.phy_up):
            m.d.sync += [beat.eq(0), whole.eq(0)]

        expected, waiting = Signal(SEQUENCE_BITS), Signal()
        own, ahead = Signal(), Signal(SEQUENCE_BITS)  # how far beyond what is expected
        good, accept, again, gone, settled = (
            Signal(name=name) for name in ("good", "accept", "again", "gone", "settled")
        )
        m.d.comb += [
            self.crc_error.eq(whole & damaged),
            good.eq(whole & ~damaged),
            own.eq(header.command == Command.OWN),
            ahead.eq(header.sequence + ~header.payload - expected),
            accept.eq(good & header.payload & Mux(own, ahead == 0, ~waiting)),
            settled.eq(good & own & (ahead == 0)),
            again.eq(good & own & header.payload & ahead[-1]),
            gone.eq(self.crc_error | (good & own & (ahead != 0) & ~ahead[-1])),
            self.accepted.eq(accept),
            self.state.eq(Mux(waiting, Retry.WAIT, Retry.NORMAL)),
        ]
        patience = Signal(range(self.timeout_cycles + 1))
        nak_due, nak_sent = Signal(), Signal()
        with m.If(nak_sent):
            m.d.sync += nak_due.eq(0)
        m.d.sync += patience.eq(Mux(waiting, patience + 1, 0))
        with m.If(gone & ~waiting):
            m.d.sync += [waiting.eq(1), nak_due.eq(1)]
        with m.Elif(settled):
            m.d.sync += [waiting.eq(0), nak_due.eq(0)]
        with m.Elif(patience == self.timeout_cycles):
            m.d.sync += [patience.eq(0), nak_due.eq(1)]
        with m.If(accept):
            m.d.sync += expected.eq(expected + 1)

        # The flit, from where it was stored.
        left = Signal(range(BEATS))  # beats to come
        index, which = Signal(range(BEATS)), Signal()
        m.d.comb += [load.en.eq(accept | (left != 0)), load.addr.eq(Cat(index, which))]
        with m.If(accept):
            m.d.comb += load.addr.eq(Cat(Const(0, index.shape()), ~half))
            m.d.sync += [left.eq(BEATS - 1), which.eq(~half), index.eq(1)]
        with m.Elif(left != 0):
            m.d.sync += [left.eq(left - 1), index.eq(index + 1)]
        m.d.sync += self.o.valid.eq(load.en)
        with m.If(load.en):
            m.d.sync += self.o.payload.index.eq(load.addr[: len(index)])
        m.d.comb += self.o.payload.slots.eq(load.data)

        # What has to be acknowledged.
        acks, waited, ack_sent = Signal(range(ACK_FLITS + 1)), Signal(range(ACK_CYCLES + 1)), Signal()
        with m.If(ack_sent):
            m.d.sync += [acks.eq(accept), waited.eq(0)]
        with m.Elif(again):
            m.d.sync += acks.eq(ACK_FLITS)
        with m.Elif(accept & (acks != ACK_FLITS)):
            m.d.sync += acks.eq(acks + 1)
        with m.If(~ack_sent & (acks != 0) & (waited != ACK_CYCLES)):
            m.d.sync += waited.eq(waited + 1)
        return {
            "last": expected - 1,
            "nak_due": nak_due,
            "nak_sent": nak_sent,
            "ack_due": acks != 0,
            "ack_forced": (acks == ACK_FLITS) | (waited == ACK_CYCLES),
            "ack_sent": ack_sent,
            "told": good & ~own,
            "again": header.command == Command.NAK,
            "following": (header.sequence + 1)[:SEQUENCE_BITS],
        }

    def _send(self, m, told):
        entry_bits = exact_log2(self.entries)
        write, base, read = (Signal(SEQUENCE_BITS, name=name) for name in ("write", "base", "read"))
        replaying, assure = Signal(), Signal()  # to say that nothing is missing
        beat = Signal(range(BEATS))
        step = Signal()
        room = self._room(m, step)

        # The flit that begins.
        nak, replay, empty, new, ack = (Signal(name=n) for n in ("nak", "replay", "empty", "new", "ack"))
        kept = Signal(SEQUENCE_BITS)
        m.d.comb += [kept.eq(write - base), self.kept.eq(kept)]
        with m.If(told["nak_due"]):
            m.d.comb += nak.eq(1)
        with m.Elif(replaying & (read != write)):
            m.d.comb += replay.eq(1)
        with m.Elif(assure):
            m.d.comb += empty.eq(1)
        with m.Elif(self.i.valid & (kept < self.entries)):
            m.d.comb += [new.eq(1), ack.eq(told["ack_due"])]
        with m.Elif(told["ack_forced"]):
            m.d.comb += ack.eq(1)
        starts = Signal()
        held = Signal(2)
        kinds = Cat(new, replay)
        kind = Mux(beat == 0, kinds, held)
        m.d.comb += [
            starts.eq((beat == 0) & room & self.phy_up & (nak | replay | empty | new | ack)),
            step.eq(starts | ((beat != 0) & room & (~held[0] | self.i.valid))),
            self.i.ready.eq(step & kind[0]),
            told["nak_sent"].eq(starts & nak),
            told["ack_sent"].eq(starts & (nak | ack)),
            self.sent.eq(starts),
            self.replayed.eq(starts & replay),
        ]
        with m.If(step):
            m.d.sync += beat.eq(beat + 1)
        number, held_number = Signal(SEQUENCE_BITS), Signal(SEQUENCE_BITS)
        m.d.comb += number.eq(Mux(beat == 0, Mux(replay, read, write), held_number))
        with m.If(starts):
            m.d.sync += [held.eq(kinds), held_number.eq(number)]
        with m.If(starts & new):
            m.d.sync += write.eq(write + 1)
        with m.If(starts & replay):
            m.d.sync += read.eq(read + 1)
        with m.If(starts & empty):
            m.d.sync += assure.eq(0)
        with m.If(read == write):
            m.d.sync += replaying.eq(0)

        # Acknowledgements.
        freed = Signal(SEQUENCE_BITS)
        moves, known = Signal(), Signal()
        m.d.comb += [
            freed.eq(told["following"] - base),
            known.eq(freed <= kept),
            moves.eq(told["told"] & known & (freed != 0)),
        ]
        m.d.sync += self.unexpected.eq(told["told"] & ~known & ~freed[-1])
        timer, tries = Signal(range(self.timeout_cycles + 1)), Signal(range(MAX_REPLAYS + 1))
        with m.If(moves):
            m.d.sync += [base.eq(told["following"]), tries.eq(0)]
        with m.If(moves | (kept == 0) | (replaying & (read != write))):
            m.d.sync += timer.eq(0)
        with m.Else():
            m.d.sync += timer.eq(timer + 1)
        with m.If(told["told"] & known & told["again"]):
            with m.If(told["following"] == write):
                m.d.sync += assure.eq(1)
            with m.Else():
                m.d.sync += [replaying.eq(1), read.eq(told["following"])]
        with m.Elif(timer == self.timeout_cycles):
            m.d.sync += [timer.eq(0), replaying.eq(1), read.eq(base), tries.eq(tries + 1)]
            with m.If(tries == MAX_REPLAYS - 1):
                m.d.sync += [tries.eq(0), self.retrain.eq(1)]
        with m.If(~self.phy_up):
            m.d.sync += [replaying.eq(1), read.eq(base), self.retrain.eq(0), timer.eq(0)]

        # The beat, its header, and its place in the buffer.
        m.submodules.buffer = buffer = Memory(shape=BEAT_BITS, depth=self.entries * BEATS, init=[])
        store, load = buffer.write_port(), buffer.read_port()
        header = Signal(layout_of(PHY_HEADER))
        m.d.comb += [
            header.sequence.eq(Mux(nak | ack, told["last"], Mux(replay | new, number, write - 1))),
            header.command.eq(Mux(nak, Command.NAK, Mux(ack, Command.ACK, Command.OWN))),
            header.payload.eq(replay | new),
            load.addr.eq(Cat(beat, number[:entry_bits])),
            load.en.eq(step & kind[1]),
            store.addr.eq(Cat(beat, number[:entry_bits])),
            store.data.eq(self.i.payload),
            store.en.eq(self.i.valid & self.i.ready),
        ]
        there, first, fresh, source = Signal(), Signal(), Signal(BEAT_BITS, reset_less=True), Signal(2)
        later = Signal(PHY_BITS)
        m.d.sync += there.eq(step)
        with m.If(step):
            m.d.sync += [first.eq(beat == 0), source.eq(kind), later.eq(header.as_value())]
        with m.If(step & kind[0]):
            m.d.sync += fresh.eq(self.i.payload)
        body = Signal(BEAT_BITS)
        m.d.comb += [
            body.eq(Mux(source[0], fresh, Mux(source[1], load.data, 0))),
            self._out.i.valid.eq(there),
            self._out.i.payload.eq(Cat(Mux(first, later, body[:PHY_BITS]), body[PHY_BITS:], Const(0, 1))),
        ]

    def _room(self, m, step):
        """Whether a beat that is chosen now (`step`) finds a place at the output."""
        depth = self.latency_cycles + 2
        m.submodules.out = self._out = out = Buffer(shape=BEAT_WIRE_BITS, depth=depth)
        wiring.connect(m, out.o, wiring.flipped(self.tx))
        return finds_room(m, self.tx, depth=depth, goes=step)
