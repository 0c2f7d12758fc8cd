"""The sending end of the wire: what goes next, sequence numbers, the retry buffer, the CRC."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ..abi import flits
from ..abi.flits import (
    ACK_FLITS,
    ACK_FORCE_FLITS,
    CONTROL_AT,
    CRC_BITS,
    FLIT_BITS,
    FLIT_HEADER,
    FRAMES,
    MAX_RETRY_ENTRIES,
    MIN_RETRY_ENTRIES,
    PAYLOAD_AT,
    SLOT_BITS,
    TIMEOUT_FLITS,
    VERSION,
    Control,
    FlitType,
    Retry,
)
from ..common.buffer import Buffer
from ..structs import layout_of
from .crc import FOLDED_BITS, crc_of, folded
from .packer import CREDIT_NAMES, CREDITS, Packer
from .receiver import OPENING, REQUEST, WIRE_BITS
from .stages import finds_room

FLUSH_CYCLES = 24
"""Cycles that credits and acknowledgements wait for a flit to go with, until an LLCRD is sent for them."""
DATA_RESERVE = 8
"""Free entries without which no data header is sent: those of its flit, of at most four all-data flits behind
it, and of two LLCRD, so that an acknowledgement can always be sent."""


def check_buffer(entries, timeout_flits):
    """ValueError for a retry buffer that cannot be."""
    if not isinstance(entries, int) or not MIN_RETRY_ENTRIES <= entries <= MAX_RETRY_ENTRIES:
        raise ValueError(
            f"entries must be an integer from {MIN_RETRY_ENTRIES} to {MAX_RETRY_ENTRIES}, not {entries!r}"
        )
    if not isinstance(timeout_flits, int) or timeout_flits < 1:
        raise ValueError(f"timeout_flits must be a positive integer, not {timeout_flits!r}")


class Transmitter(wiring.Component):
    """Chooses a flit in every cycle and keeps it until the other end has acknowledged it.

    In this order: a RETRY sequence under way; the RETRY.Ack that the other end waits for, with the flits
    from the one asked for; a RETRY.Req of its own, but never before an all-data flit; INIT.Param, once the
    other end is alive; messages; an LLCRD for credits and acknowledgements that waited; and while a RETRY.Ack
    is awaited RETRY.Idle, whose number is the time.

    Parameters
    ----------
    packer : what fills protocol flits.
    entries : flits that the retry buffer holds, 22 to 255. One place always stays free.
    timeout_flits : flits sent until a RETRY.Ack is asked for again.

    Members
    -------
    tx : Out(stream(528)) : flits with their CRC.
    phy_up : In(1) : the physical layer carries flits; without it nothing begins.
    alive, open, state, asks : In : as the receiver tells them.
    request : In(stream(REQUEST), always_ready) : the other end asks for flits.
    acks : In(8) : flits that the other end acknowledged in this cycle.
    accepted : In(1) : a flit came that is to be acknowledged.
    owed : In(CREDITS) : the credit fields that return the most. some_owed : In(1) : there are credits.
    credits_taken : Out(1) : they are sent.
    request_sent, timed_out : Out(1) : for the receiver.
    viral : In(1), viral_ld : In(16) : this end is viral. The next flit goes with a wrong CRC, since the
        RETRY.Ack that follows is what tells of it.
    wants, rolls, rolls_after, take, data_allowed, flit, all_data : the packer's.
    sent : Out(1) : a flit is chosen.  replayed : Out(1) : one from the retry buffer.
    kept : Out(8) : flits in the retry buffer.

    Latency is `latency_cycles` from the choice to `tx`. Throughput is a flit per cycle.
    """

    latency_cycles = Packer.latency_cycles + 4

    def __init__(self, *, entries=128, timeout_flits=TIMEOUT_FLITS):
        check_buffer(entries, timeout_flits)
        self.entries = entries
        self.timeout_flits = timeout_flits
        super().__init__(
            {
                "tx": Out(stream.Signature(WIRE_BITS)),
                "phy_up": In(1),
                "alive": In(1),
                "open": In(1),
                "state": In(Retry),
                "asks": In(OPENING),
                "request": In(stream.Signature(REQUEST, always_ready=True)),
                "acks": In(8),
                "accepted": In(1),
                "owed": In(CREDITS),
                "some_owed": In(1),
                "credits_taken": Out(1),
                "request_sent": Out(1),
                "timed_out": Out(1),
                "viral": In(1),
                "viral_ld": In(16),
                "wants": In(1),
                "rolls": In(1),
                "rolls_after": In(1),
                "take": Out(1),
                "data_allowed": Out(1),
                "flit": In(FLIT_BITS),
                "all_data": In(1),
                "sent": Out(1),
                "replayed": Out(1),
                "kept": Out(8),
            }
        )

    def elaborate(self, platform):
        m = Module()
        chosen = self._choose(m)
        self._send(m, chosen)
        return m

    def _choose(self, m):
        entries = self.entries
        write, read = Signal(8), Signal(8)  # numbers of the next new flit, and of the next to repeat
        free = Signal(8, init=entries)
        acks_due = Signal(8)
        room = self._room(m)
        go = Signal()
        m.d.comb += go.eq(room & self.phy_up)

        # Which kind of flit it is.
        framing, left, answering = Signal(), Signal(range(FRAMES + 1)), Signal()
        asked, ask = Signal(), Signal(REQUEST)
        replaying, replay_rolls = Signal(), Signal()
        opened, corrupt = Signal(), Signal()  # INIT.Param is sent; the next flit's CRC shall be wrong
        frame, final, replay, new, control, kept = (
            Signal(name=n) for n in ("frame", "final", "replay", "new", "control", "kept")
        )
        kind = Signal(Control)
        blocked = Mux(replaying, replay_rolls, self.rolls)
        ak = acks_due >= ACK_FLITS
        m.submodules.rolls_of = rolls_of = Memory(shape=1, depth=entries, init=[])
        rolls_write, rolls_read = rolls_of.write_port(), rolls_of.read_port(domain="comb")
        room_new, room_ack = free >= 3, free >= 2  # the last entry stays free, the one before is for an LLCRD
        m.d.sync += self.data_allowed.eq(free > DATA_RESERVE)
        forced = self._force(m, acks_due)
        with m.If(go):
            with m.If(framing & (left != 0)):
                m.d.comb += frame.eq(1)
            with m.Elif(framing):
                m.d.comb += final.eq(1)
            with m.Elif(asked | ((self.state == Retry.REQUEST) & ~blocked)):
                m.d.comb += frame.eq(1)
            with m.Elif(replaying):
                m.d.comb += replay.eq(1)
            with m.Elif(~opened):
                m.d.comb += [
                    control.eq(1),
                    kind.eq(Mux(self.alive, Control.INIT_PARAM, Control.RETRY_IDLE)),
                    kept.eq(self.alive),
                ]
            with m.Elif(self.open & self.wants & (room_new | self.rolls)):
                m.d.comb += [new.eq(1), kept.eq(1)]
            with m.Elif(self.open & room_ack & ((forced & (room_new | (acks_due != 0))) | corrupt)):
                m.d.comb += [control.eq(1), kind.eq(Control.LLCRD_ACK), kept.eq(1)]
            with m.Elif(self.state == Retry.WAIT):
                m.d.comb += [control.eq(1), kind.eq(Control.RETRY_IDLE)]
        any_sent = Cat(frame, final, replay, new, control).any()
        with m.If(framing):
            m.d.comb += kind.eq(
                Mux(frame, Control.RETRY_FRAME, Mux(answering, Control.RETRY_ACK, Control.RETRY_REQ))
            )
        with m.Elif(frame):
            m.d.comb += kind.eq(Control.RETRY_FRAME)

        # RETRY sequences: five frames, then the flit.
        with m.If(frame):
            m.d.sync += left.eq(Mux(framing, left, FRAMES) - 1)
            with m.If(~framing):
                m.d.sync += [framing.eq(1), answering.eq(asked)]
        empty = ask.sequence == write
        with m.If(final):
            m.d.sync += framing.eq(0)
            with m.If(answering):
                m.d.sync += [
                    asked.eq(0),
                    read.eq(ask.sequence),
                    replaying.eq(~empty),
                    replay_rolls.eq(1),  # whatever was asked for comes next
                ]
        m.d.comb += self.request_sent.eq(final & ~answering)
        following = Mux(read == entries - 1, 0, read + 1)
        m.d.comb += rolls_read.addr.eq(read)
        with m.If(replay):
            m.d.sync += [
                read.eq(following),
                replay_rolls.eq(rolls_read.data),
                replaying.eq(following != write),
            ]
        with m.If(self.request.valid):
            m.d.sync += [asked.eq(1), ask.eq(self.request.payload)]
        with m.If(~self.phy_up):
            m.d.sync += [framing.eq(0), asked.eq(0), replaying.eq(0)]

        # Numbers, and the free entries.
        m.d.comb += [
            rolls_write.addr.eq(write),
            rolls_write.en.eq(kept),
            rolls_write.data.eq(new & self.rolls_after),
        ]
        with m.If(kept):
            m.d.sync += write.eq(Mux(write == entries - 1, 0, write + 1))
        m.d.sync += free.eq(free + self.acks - kept)
        with m.If(control & (kind == Control.INIT_PARAM)):
            m.d.sync += opened.eq(1)

        # What goes with it.
        llcrd = control & (kind == Control.LLCRD_ACK)
        with_header = new & ~self.rolls
        acks_sent = Mux(llcrd, acks_due, Mux(with_header & ak, ACK_FLITS, 0))
        m.d.comb += self.credits_taken.eq(llcrd | with_header)
        m.d.sync += acks_due.eq(acks_due + self.accepted - acks_sent)
        was_viral = Signal()
        m.d.sync += was_viral.eq(self.viral)
        with m.If(kept):
            m.d.sync += corrupt.eq(0)
        with m.If(self.viral & ~was_viral):
            m.d.sync += corrupt.eq(1)

        timer = Signal(range(self.timeout_flits + 1))
        with m.If(self.state != Retry.WAIT):
            m.d.sync += timer.eq(0)
        with m.Elif(any_sent & (timer != self.timeout_flits)):
            m.d.sync += timer.eq(timer + 1)
        m.d.comb += [
            self.timed_out.eq(timer == self.timeout_flits),
            self.take.eq(new),
            self.sent.eq(any_sent),
            self.replayed.eq(replay),
            self.kept.eq(entries - free),
        ]
        return {
            "sent": any_sent,
            "control": control | frame | final,
            "replay": replay,
            "kept": kept,
            "number": Mux(replay, read, write),
            "corrupt": corrupt & kept,
            "ak": Mux(llcrd, acks_due[3], with_header & ak),
            "credits": Mux(llcrd | with_header, self.owed, 0),
            "kind": kind,
            "acks": acks_due,
            "asks": self.asks,
            "ask": ask,
            "empty": empty,
            "write": write,
            "free": free,
        }

    def _force(self, m, acks_due):
        """Whether credits or acknowledgements have waited for long enough."""
        waited = Signal(range(FLUSH_CYCLES + 1))
        with m.If(self.credits_taken):
            m.d.sync += waited.eq(0)
        with m.Elif((self.some_owed | (acks_due > 1)) & (waited != FLUSH_CYCLES)):
            m.d.sync += waited.eq(waited + 1)
        return (waited == FLUSH_CYCLES) | (acks_due >= ACK_FORCE_FLITS)

    def _payload(self, m, chosen):
        """The 64 bits of a control flit, from what was chosen a cycle ago."""
        payload, acks = Signal(flits.PAYLOAD_BITS), chosen["acks"]
        ask, asks = data.View(REQUEST, chosen["ask"]), data.View(OPENING, chosen["asks"])

        def filled(layout, **values):
            record = Signal(layout_of(layout))
            m.d.comb += [record[name].eq(value) for name, value in values.items()]
            return record

        with m.Switch(chosen["kind"]):
            with m.Case(Control.LLCRD_ACK):
                m.d.comb += payload.eq(filled(flits.LLCRD_PAYLOAD, acks_low=acks[:3], acks_high=acks[4:]))
            with m.Case(Control.RETRY_REQ):
                m.d.comb += payload.eq(
                    filled(
                        flits.RETRY_REQ_PAYLOAD,
                        sequence=asks.sequence,
                        retries=asks.retries,
                        reinits=asks.reinits,
                    )
                )
            with m.Case(Control.RETRY_ACK):
                m.d.comb += payload.eq(
                    filled(
                        flits.RETRY_ACK_PAYLOAD,
                        empty=chosen["empty"],
                        viral=self.viral,
                        viral_ld=Mux(self.viral, self.viral_ld, 0),
                        retries=ask.retries,
                        write=chosen["write"],
                        sequence=ask.sequence,
                        free=chosen["free"],
                    )
                )
            with m.Case(Control.INIT_PARAM):
                m.d.comb += payload.eq(filled(flits.INIT_PAYLOAD, version=VERSION, wrap=self.entries))
        return payload

    def _room(self, m):
        """Whether a flit that is chosen now finds a place at the output."""
        depth = self.latency_cycles + 3
        self._depth = depth
        return finds_room(m, self.tx, depth=depth, goes=self.sent)

    def _send(self, m, chosen):
        """The flit in step with the packer: its bits, then its CRC and its place in the retry buffer."""
        m.submodules.buffer = buffer = Memory(shape=FLIT_BITS, depth=self.entries, init=[])
        store, load = buffer.write_port(), buffer.read_port()
        first = _later(m, chosen, ("sent", "kept"), chosen["sent"])
        m.d.comb += [load.addr.eq(first["number"]), load.en.eq(first["sent"] & first["replay"])]
        names = ("sent", "control", "replay", "kept", "number", "corrupt", "ak", "credits", "kind")
        second = _later(
            m,
            {**{name: first[name] for name in names}, "payload": self._payload(m, first)},
            ("sent", "kept"),
            first["sent"],
        )
        header, protocol = Signal(layout_of(FLIT_HEADER)), Signal(layout_of(FLIT_HEADER))
        credits = data.View(CREDITS, second["credits"])
        m.d.comb += [
            protocol.as_value().eq(self.flit[: FLIT_HEADER.width]),
            header.as_value().eq(Mux(second["control"], FlitType.CONTROL, protocol.as_value())),
            header.ak.eq(second["ak"]),
            *(header[f"{name}_credit"].eq(credits[name]) for name in CREDIT_NAMES),
        ]
        with_header = Cat(header.as_value(), self.flit[FLIT_HEADER.width :])
        control = Cat(
            header.as_value(),
            second["kind"],
            Const(0, PAYLOAD_AT - CONTROL_AT - 8),
            second["payload"],
            Const(0, FLIT_BITS - SLOT_BITS),
        )
        flit = Signal(FLIT_BITS, reset_less=True)
        third = _later(
            m,
            {name: second[name] for name in ("sent", "kept", "number", "corrupt")},
            ("sent", "kept"),
            second["sent"],
        )
        with m.If(second["sent"]):
            m.d.sync += flit.eq(
                Mux(
                    second["replay"],
                    load.data,
                    Mux(second["control"], control, Mux(self.all_data, self.flit, with_header)),
                )
            )
        m.d.comb += [store.addr.eq(third["number"]), store.data.eq(flit), store.en.eq(third["kept"])]
        half, flit_half = Signal(FOLDED_BITS, reset_less=True), Signal(FLIT_BITS, reset_less=True)
        fourth = _later(m, {name: third[name] for name in ("sent", "corrupt")}, ("sent",), third["sent"])
        with m.If(third["sent"]):
            m.d.sync += [half.eq(folded(m, flit)), flit_half.eq(flit)]
        out_valid, out = Signal(), Signal(WIRE_BITS, reset_less=True)
        m.d.sync += out_valid.eq(fourth["sent"])
        with m.If(fourth["sent"]):
            m.d.sync += out.eq(Cat(flit_half, crc_of(half) ^ fourth["corrupt"].replicate(CRC_BITS)))
        m.submodules.out = queue = Buffer(shape=WIRE_BITS, depth=self._depth)
        m.d.comb += [queue.i.valid.eq(out_valid), queue.i.payload.eq(out)]
        wiring.connect(m, queue.o, wiring.flipped(self.tx))


def _later(m, values, resets, enable):
    """Values a cycle later; those of `resets` every cycle, the others while `enable`."""
    registers = {
        name: Signal.like(Value.cast(value), name=f"{name}_later", reset_less=name not in resets)
        for name, value in values.items()
    }
    m.d.sync += [registers[name].eq(values[name]) for name in resets]
    with m.If(enable):
        m.d.sync += [register.eq(values[name]) for name, register in registers.items() if name not in resets]
    return registers
