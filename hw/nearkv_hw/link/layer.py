"""The link layer of one end: messages of the transaction layer to flits of the physical layer, and back."""

from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import TIMEOUT_FLITS, Retry, Side
from ..abi.window import LINK_STATE
from ..structs import layout_of
from .credits import CreditReturn
from .packer import CREDIT_OF, SENT, Packer
from .receiver import WIRE_BITS, Receiver
from .transmitter import Transmitter, check_buffer
from .unpacker import Unpacker, all_places

EVENTS = ("sent", "replayed", "accepted", "crc_error")


def message_ports(side):
    """Members of a side's link layer: streams of the messages that it sends and delivers, by their names."""
    down, up = (In, Out) if side is Side.HOST else (Out, In)
    return {
        **{f"m2s_{name}": down(stream.Signature(shape)) for name, shape in SENT[Side.HOST].items()},
        **{f"s2m_{name}": up(stream.Signature(shape)) for name, shape in SENT[Side.DEVICE].items()},
    }


def tell_credits(m, status, packer, places, sent, returns):
    """The credits of a link layer: those left of the kinds that it sends, and those that it owes by kind."""
    for field, name in zip(("tx_message", "tx_data"), sent, strict=True):
        m.d.comb += status[field].eq(getattr(packer, f"{name}_left"))
    for field, (name, back) in zip(("message", "data"), returns.items(), strict=True):
        m.d.comb += [status[f"rx_{field}"].eq(places[name]), status[f"owed_{field}"].eq(back.owed)]


class LinkLayer(wiring.Component):
    """CXL.mem link layer in 68-byte mode (CXL 3.1 section 4.2).

    Messages cross the link once and in the order of their kind, whatever the wire does to flits, as long as
    the CRC or the physical layer notices. Between kinds there is no order.

    Parameters
    ----------
    side : which end of the link it is.
    multi_data : slots with several data headers are sent and taken.
    entries : flits that the retry buffer holds, 22 to 255.
    timeout_flits : flits sent until an answer to a request for retry is asked for again.
    places : messages of each kind that may wait behind the link, as in `Unpacker`.

    Members
    -------
    m2s_req, m2s_rwd : In(stream) for the host, Out(stream) for the device : messages to the device.
    s2m_ndr, s2m_drs : Out(stream) for the host, In(stream) for the device : messages to the host.
    tx : Out(stream(528)) : flits to the wire, CRC in the highest 16 bits.
    rx : In(stream(528), always_ready) : flits from the wire.
    phy_up : In(1) : the physical layer carries flits. When it does not, flits on the wire are lost; when it
        does again, they are sent again.
    retrain : Out(1) : the physical layer shall retrain.
    viral : In(1), viral_ld : In(16) : this end is viral, and for which LD-IDs.
    remote_viral : Out(1), remote_viral_ld : Out(16) : the other end is.
    state : Out(Retry) : of the local retry; ABORT is the end.
    open : Out(1) : the other end's INIT.Param was received.
    sent, replayed, accepted, crc_error : Out(1) : a flit was chosen to be sent, one out of the retry buffer,
        a flit was accepted in sequence, a flit had a wrong CRC.
    malformed, unexpected, overflow : Out(1) : set where the other end broke a rule, until reset.
    stalled : Out(1) : a message waits, and there is no credit of its kind.
    status : Out(LINK_STATE) : as in `abi.window`, of this end.

    Latency is `latency_cycles` from a message without data at one end to the same at the other, with a wire
    between them that takes no time; `data_latency_cycles` with data, if all of it goes in two flits.
    Throughput is a flit per cycle each way.
    """

    latency_cycles = 1 + Transmitter.latency_cycles + Receiver.latency_cycles + Unpacker.latency_cycles
    data_latency_cycles = latency_cycles + 1 + Unpacker.data_latency_cycles - Unpacker.latency_cycles

    def __init__(self, *, side, multi_data=True, entries=128, timeout_flits=TIMEOUT_FLITS, places=None):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        check_buffer(entries, timeout_flits)
        self.side = side
        self.multi_data = multi_data
        self.entries = entries
        self.timeout_flits = timeout_flits
        self.places = all_places(places)
        super().__init__(
            {
                **message_ports(side),
                "tx": Out(stream.Signature(WIRE_BITS)),
                "rx": In(stream.Signature(WIRE_BITS, always_ready=True)),
                "phy_up": In(1),
                "retrain": Out(1),
                "viral": In(1),
                "viral_ld": In(16),
                "remote_viral": Out(1),
                "remote_viral_ld": Out(16),
                "state": Out(Retry),
                "open": Out(1),
                **dict.fromkeys(EVENTS, Out(1)),
                **dict.fromkeys(("malformed", "unexpected", "overflow"), Out(1)),
                "stalled": Out(1),
                "status": Out(layout_of(LINK_STATE)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.packer = packer = Packer(side=self.side, multi_data=self.multi_data)
        m.submodules.unpacker = unpacker = Unpacker(side=self.side, places=self.places)
        m.submodules.receiver = receiver = Receiver(side=self.side, multi_data=self.multi_data)
        m.submodules.transmitter = transmitter = Transmitter(
            entries=self.entries, timeout_flits=self.timeout_flits
        )
        sent, received = SENT[self.side], SENT[unpacker.sender]
        for prefix, kinds, block in (
            ("m2s" if self.side is Side.HOST else "s2m", sent, packer),
            ("s2m" if self.side is Side.HOST else "m2s", received, unpacker),
        ):
            for name in kinds:
                wiring.connect(m, wiring.flipped(getattr(self, f"{prefix}_{name}")), getattr(block, name))
        wiring.connect(m, wiring.flipped(self.tx), transmitter.tx)
        wiring.connect(m, wiring.flipped(self.rx), receiver.rx)
        wiring.connect(m, receiver.flit, unpacker.i)
        wiring.connect(m, receiver.request, transmitter.request)
        owed, returns = [], {}
        for name in received:
            back = m.submodules[f"{name}_returns"] = CreditReturn(places=unpacker.places[name])
            m.d.comb += [
                back.freed.eq(getattr(unpacker, f"{name}_freed")),
                back.take.eq(transmitter.credits_taken),
                transmitter.owed[CREDIT_OF[name]].eq(back.code),
            ]
            owed.append(back.some)
            returns[name] = back
        m.d.comb += [
            transmitter.some_owed.eq(owed[0] | owed[1]),
            packer.credits.eq(receiver.credits),
            *(
                getattr(transmitter, name).eq(getattr(receiver, name))
                for name in ("alive", "open", "state", "asks", "acks", "accepted")
            ),
            *(
                getattr(receiver, name).eq(getattr(transmitter, name))
                for name in ("request_sent", "timed_out")
            ),
            *(
                getattr(transmitter, name).eq(getattr(packer, name))
                for name in ("wants", "rolls", "rolls_after", "flit", "all_data")
            ),
            packer.take.eq(transmitter.take),
            packer.data_allowed.eq(transmitter.data_allowed),
            *(block.phy_up.eq(self.phy_up) for block in (receiver, transmitter)),
            transmitter.viral.eq(self.viral),
            transmitter.viral_ld.eq(self.viral_ld),
            self.retrain.eq(receiver.retrain),
            self.remote_viral.eq(receiver.viral),
            self.remote_viral_ld.eq(receiver.viral_ld),
            self.state.eq(receiver.state),
            self.open.eq(receiver.open),
            self.sent.eq(transmitter.sent),
            self.replayed.eq(transmitter.replayed),
            self.accepted.eq(receiver.accepted),
            self.crc_error.eq(receiver.crc_error),
            self.overflow.eq(unpacker.overflow),
        ]
        heard = receiver.heard
        m.d.comb += [
            self.stalled.eq(packer.stalled),
            self.status.opened.eq(receiver.open),
            self.status.wrap.eq(self.entries),
            self.status.kept.eq(transmitter.kept),
            self.status.write_pointer_received.eq(heard.write),
            *(
                self.status[f"{name}_received"].eq(heard[name])
                for name in ("version", "wrap", "retries", "reinits", "sequence", "free")
            ),
        ]
        tell_credits(m, self.status, packer, unpacker.places, sent, returns)
        for name in ("malformed", "unexpected"):
            with m.If(getattr(receiver, name)):
                m.d.sync += getattr(self, name).eq(1)
        return m
