"""The link layer of one end in 256-byte mode, and the retry below it, which is the physical layer's."""

from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import Retry, Side
from ..abi.flits256 import BEATS, CREDIT_CODES, kinds
from ..abi.window import LINK_STATE
from ..structs import layout_of
from .credits import CreditReturn
from .layer import EVENTS, message_ports, tell_credits
from .packer import CREDIT_OF
from .packer256 import Packer256
from .replay import BEAT_WIRE_BITS, TIMEOUT_CYCLES, Replay, check_retry
from .unpacker import all_places
from .unpacker256 import PLACES_256, Unpacker256


class LinkLayer256(wiring.Component):
    """CXL.mem link layer with 256-byte flits, standard layout (CXL 3.1 section 4.3), on a physical layer that
    numbers flits and sends them again.

    Messages cross the link once and in the order of their kind. Between kinds there is no order. Of M2S Req
    the address's bit 5 does not cross, nor do reserved fields: they are not in 256-byte messages.

    Parameters
    ----------
    side : which end of the link it is.
    entries, timeout_cycles : of the retry, as in `Replay`.
    places : messages of each kind that may wait behind the link, as in `Unpacker256`.

    Members
    -------
    m2s_req, m2s_rwd : In(stream) for the host, Out(stream) for the device : messages to the device.
    s2m_ndr, s2m_drs : Out(stream) for the host, In(stream) for the device : messages to the host.
    tx : Out(stream(513)), rx : In(stream(513), always_ready) : beats on the wire, as in `Replay`.
    phy_up, retrain, state : as in `Replay`.
    sent, replayed, accepted, crc_error : Out(1) : as in `Replay`.
    malformed, unexpected, overflow : Out(1) : set where the other end broke a rule, until reset.
    stalled, status : as in `LinkLayer`; of status what INIT.Param and RETRY flits say is zero.

    Latency is `latency_cycles` from a message without data at one end to the same at the other, with a wire
    between them that takes no time and a flit that begins with it; `data_latency_cycles` with data, if all of
    it goes in the first two beats. Throughput is a beat per cycle each way.
    """

    latency_cycles = (
        Packer256.latency_cycles
        + Replay.latency_cycles
        + BEATS
        - 1
        + Replay.receive_cycles
        + Unpacker256.latency_cycles
    )
    data_latency_cycles = latency_cycles + 1 + Unpacker256.data_latency_cycles - Unpacker256.latency_cycles

    def __init__(self, *, side, entries=32, timeout_cycles=TIMEOUT_CYCLES, places=None):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        self.side = side
        self._retry = {"entries": entries, "timeout_cycles": timeout_cycles}
        check_retry(entries, timeout_cycles)
        self.places = all_places({**PLACES_256, **(places or {})}, least=8)
        super().__init__(
            {
                **message_ports(side),
                "tx": Out(stream.Signature(BEAT_WIRE_BITS)),
                "rx": In(stream.Signature(BEAT_WIRE_BITS, always_ready=True)),
                "phy_up": In(1),
                "retrain": Out(1),
                "state": Out(Retry),
                **dict.fromkeys(EVENTS, Out(1)),
                **dict.fromkeys(("malformed", "unexpected", "overflow"), Out(1)),
                "stalled": Out(1),
                "status": Out(layout_of(LINK_STATE)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.packer = packer = Packer256(side=self.side)
        m.submodules.unpacker = unpacker = Unpacker256(side=self.side, places=self.places)
        m.submodules.replay = replay = Replay(**self._retry)
        for block in (packer, unpacker):
            sender = self.side if block is packer else unpacker.sender
            prefix = "m2s" if sender is Side.HOST else "s2m"
            for name in kinds(sender):
                wiring.connect(m, wiring.flipped(getattr(self, f"{prefix}_{name}")), getattr(block, name))
        wiring.connect(m, packer.o, replay.i)
        wiring.connect(m, replay.o, unpacker.i)
        wiring.connect(m, wiring.flipped(self.tx), replay.tx)
        wiring.connect(m, wiring.flipped(self.rx), replay.rx)
        owed, returns = [], {}
        for name in kinds(unpacker.sender):
            back = m.submodules[f"{name}_returns"] = CreditReturn(
                places=unpacker.places[name], codes=CREDIT_CODES[name], idle=0
            )
            m.d.comb += [
                back.freed.eq(getattr(unpacker, f"{name}_freed")),
                back.take.eq(packer.credits_taken),
                packer.owed[CREDIT_OF[name]].eq(back.code),
            ]
            owed.append(back.some)
            returns[name] = back
        m.d.comb += [
            packer.some_owed.eq(owed[0] | owed[1]),
            packer.credits.eq(unpacker.credits),
            replay.phy_up.eq(self.phy_up),
            self.malformed.eq(unpacker.malformed),
            self.overflow.eq(unpacker.overflow),
            *(getattr(self, name).eq(getattr(replay, name)) for name in ("retrain", "state", *EVENTS)),
        ]
        m.d.comb += [
            self.stalled.eq(packer.stalled),
            self.status.opened.eq(1),
            self.status.kept.eq(replay.kept),
        ]
        tell_credits(m, self.status, packer, unpacker.places, kinds(self.side), returns)
        with m.If(replay.unexpected):
            m.d.sync += self.unexpected.eq(1)
        return m
