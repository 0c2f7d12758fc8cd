"""The receiving end of the wire: CRC, sequence numbers, rollover, control flits, the local retry state."""

from operator import or_

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import flits
from ..abi.flits import (
    CONTROL_AT,
    CONTROL_BITS,
    CRC_BITS,
    DATA_CODE,
    DEFAULT_WRAP,
    FLIT_BITS,
    FLIT_HEADER,
    FRAMES,
    LINE_CHUNKS,
    MAX_MESSAGES,
    MAX_REINITS,
    MAX_RETRIES,
    MAX_ROLLOVER,
    PAYLOAD_AT,
    PAYLOAD_BITS,
    RETRY_LLCTRL,
    SLOTS,
    Control,
    Retry,
    Side,
    formats,
)
from ..common.trees import reduce_tree
from ..structs import layout_of
from .crc import crc_of, folded
from .lines import JOINED
from .packer import CREDITS, DATA_KIND, MAX_PENDING
from .slots import slot_of, take

WIRE_BITS = FLIT_BITS + CRC_BITS
PLAN = ("position", "count", "ends", "whole", "enables", "enables_at")
TAKEN = data.StructLayout({"flit": FLIT_BITS, "all_data": 1, **{name: JOINED[name].shape for name in PLAN}})
"""A protocol or all-data flit that was accepted."""
REQUEST = data.StructLayout({"sequence": 8, "retries": 5})
HEARD = data.StructLayout(
    {"version": 4, "wrap": 8, "retries": 5, "reinits": 5, "write": 8, "sequence": 8, "free": 8}
)
"""Version and wrap of INIT.Param, retries and reinits of the last RETRY.Req, the rest of the last
RETRY.Ack."""
OPENING = data.StructLayout({"sequence": 8, "retries": 5, "reinits": 5})


class Receiver(wiring.Component):
    """Accepts flits in sequence, and asks for those that came damaged.

    A flit with a wrong CRC, or a control flit that is none, starts a retry: what follows is dropped until the
    RETRY.Ack, which the other end sends before it repeats everything from the flit asked for. Flits of RETRY
    count only after five RETRY.Frame, since nobody knows where all-data flits lie behind a damaged one.

    A flit that breaks the packing rules, a flit before INIT.Param and a second INIT.Param are errors from
    which there is no way back (ABORT), as is a retry that failed `MAX_RETRIES` times after each of
    `MAX_REINITS` retrainings.

    Parameters
    ----------
    side : whose receiver.
    multi_data : slots with several data headers are taken.

    Members
    -------
    rx : In(stream(528), always_ready) : flits with their CRC.
    phy_up : In(1) : the physical layer carries flits. After a time without it flits are asked for again.
    request_sent : In(1) : a RETRY.Req is on its way.
    timed_out : In(1) : no answer came.
    flit : Out(stream(TAKEN), always_ready) : what was accepted of messages and data.
    credits : Out(CREDITS), acks : Out(8) : what an accepted flit returns, zero without one.
    accepted : Out(1) : a flit was accepted that has to be acknowledged.
    request : Out(stream(REQUEST), always_ready) : the other end asks for flits again.
    state : Out(Retry) : of the local retry. asks : Out(OPENING) : what a RETRY.Req says.
    alive : Out(1) : a good flit was seen. open : Out(1) : INIT.Param was.
    retrain : Out(1) : the physical layer shall retrain; until it does.
    heard : Out(HEARD) : what the other end's control flits said.
    viral : Out(1), viral_ld : Out(16) : the other end is viral.
    crc_error, malformed, unexpected : Out(1) : a flit with a wrong CRC, one against the rules, a RETRY.Ack
        that nobody waits for.

    Latency is `latency_cycles` from a flit to `flit`. Throughput is a flit per cycle.
    """

    latency_cycles = 4

    def __init__(self, *, side, multi_data=True):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        self.side = side
        self.sender = Side.HOST if side is Side.DEVICE else Side.DEVICE
        self.multi_data = multi_data
        super().__init__(
            {
                "rx": In(stream.Signature(WIRE_BITS, always_ready=True)),
                "phy_up": In(1),
                "request_sent": In(1),
                "timed_out": In(1),
                "flit": Out(stream.Signature(TAKEN, always_ready=True)),
                "credits": Out(CREDITS),
                "acks": Out(8),
                "accepted": Out(1),
                "request": Out(stream.Signature(REQUEST, always_ready=True)),
                "state": Out(Retry),
                "asks": Out(OPENING),
                "alive": Out(1),
                "open": Out(1),
                "retrain": Out(1),
                "heard": Out(HEARD),
                "viral": Out(1),
                "viral_ld": Out(16),
                "crc_error": Out(1),
                "malformed": Out(1),
                "unexpected": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        arrived, wire = Signal(), Signal(WIRE_BITS, reset_less=True)
        m.d.sync += arrived.eq(self.rx.valid & self.phy_up)
        with m.If(self.rx.valid):
            m.d.sync += wire.eq(self.rx.payload)
        flit = wire[:FLIT_BITS]
        there, looked = self._step(
            m, arrived, {"wire": wire, "folded": folded(m, flit), **self._slots(m, flit)}, "looked"
        )
        flit = looked["wire"][:FLIT_BITS]
        checked = {
            "flit": flit,
            "bad": (crc_of(looked["folded"]) ^ looked["wire"][FLIT_BITS:]).any(),
            **self._header(m, flit, looked),
            **self._control(m, flit),
        }
        self._accept(m, *self._step(m, there, checked, "seen"))
        return m

    def _step(self, m, there, values, name):
        """(whether there is a flit, what is known of it) a cycle later."""
        later, registers = Signal(name=f"{name}_there"), {}
        m.d.sync += later.eq(there & self.phy_up)
        for key, value in values.items():
            registers[key] = Signal.like(Value.cast(value), name=f"{name}_{key}", reset_less=True)
        with m.If(there):
            m.d.sync += [registers[key].eq(value) for key, value in values.items()]
        return later, registers

    def _slots(self, m, flit):
        """What each slot of a protocol flit has: valid messages of each kind, and data headers."""
        header = Signal(layout_of(FLIT_HEADER))
        m.d.comb += header.as_value().eq(flit[: FLIT_HEADER.width])
        kind = DATA_KIND[self.sender]
        valids = {name: [] for name in MAX_MESSAGES}
        with_data, several, lone, unknown = [], [], [], []
        for n in range(SLOTS):
            code, slot = header[f"slot{n}"], slot_of(flit, n)
            known, headers_here = [], []
            for slot_format in formats(self.sender)[min(n, 1)]:
                chosen = Signal(name=f"slot{n}_{slot_format.name}")
                m.d.comb += chosen.eq(code == slot_format.code)
                known.append(chosen)
                there = [chosen & take(slot, place)[0] for place in slot_format.places]
                for place, one in zip(slot_format.places, there, strict=True):
                    valids[place.kind].append(one)
                headers = [
                    one for place, one in zip(slot_format.places, there, strict=True) if place.kind == kind
                ]
                headers_here += headers
                if slot_format.multi_data:
                    several.append(headers[1])
                    lone.append(Cat(headers).any() & ~headers[1])
            if n:
                known.append(code == DATA_CODE)
            unknown.append(~Cat(known).any() & slot.any())
            with_data.append(Cat(headers_here).any())
        return {
            **{name: Cat(bits) for name, bits in valids.items() if bits},
            "with_data": Cat(with_data),
            "several": Cat(several).any() if several else Const(0),
            "lone": Cat(lone).any() if lone else Const(0),
            "unknown": Cat(unknown),
        }

    def _header(self, m, flit, slots):
        """What a flit has if it is a protocol flit: chunks that its headers add, where data lies."""
        header = Signal(layout_of(FLIT_HEADER), name="looked_header")
        m.d.comb += header.as_value().eq(flit[: FLIT_HEADER.width])
        with_data = slots["with_data"]
        any_data = with_data.any()
        counts = {name: _count(slots[name]) for name in MAX_MESSAGES if name in slots}
        wrong = [
            slots["unknown"].any(),
            any_data & ~header.sz,
            _count(with_data) > 1,
            *(count > MAX_MESSAGES[name] for name, count in counts.items()),
        ]
        if self.side is Side.HOST:
            wrong += [header.be & any_data, slots["lone"]]
            if not self.multi_data:
                wrong.append(slots["several"])
        partial = header.be & any_data if self.side is Side.DEVICE else 0
        return {
            "control": header.type,
            "ak": header.ak,
            "credits": Cat(header.req_credit, header.data_credit, header.rsp_credit),
            "added": (counts[DATA_KIND[self.sender]] << 2) + partial,
            "partial": partial,
            "any_data": any_data,
            "holds": Cat(header[f"slot{n}"] == DATA_CODE for n in range(1, SLOTS)),
            "behind": Cat(with_data[:n].any() for n in range(1, SLOTS)),
            "wrong": reduce_tree(wrong, or_),
        }

    @staticmethod
    def _control(m, flit):
        """What a flit is if it is a control flit."""
        which = flit[CONTROL_AT : CONTROL_AT + CONTROL_BITS]
        static = ~flit[CONTROL_AT + CONTROL_BITS : PAYLOAD_AT].any()
        formatted = flit[FLIT_HEADER.offset("slot0") :][:3]
        plain = {
            name: (which == control) & static & (formatted == 0)
            for name, control in (
                ("llcrd", Control.LLCRD_ACK),
                ("idle", Control.RETRY_IDLE),
                ("frame", Control.RETRY_FRAME),
                ("ask", Control.RETRY_REQ),
                ("answer", Control.RETRY_ACK),
                ("init", Control.INIT_PARAM),
            )
        }
        ide = (which[:4] == Control.IDE_IDLE & 0xF) & static & (formatted == 1)
        return {
            **plain,
            "retry": which[:4] == RETRY_LLCTRL,
            "known": Cat(*plain.values(), ide).any(),
            "payload": flit[PAYLOAD_AT : PAYLOAD_AT + PAYLOAD_BITS],
        }

    def _accept(self, m, there, seen):
        """What becomes of a flit, by the state."""
        state, pending = self.state, Signal(range(MAX_PENDING + 1))
        partial = Signal()  # the line whose chunks are owed has byte enables
        sequence, wrap = Signal(8), Signal(8, init=DEFAULT_WRAP)
        frames, retries, reinits = Signal(range(FRAMES + 1)), Signal(5), Signal(5)
        normal, all_data, good, control, accept, protocol = (
            Signal(name=n) for n in ("normal", "all_data", "good", "control", "accept", "protocol")
        )
        awake = (state != Retry.ABORT) & (state != Retry.REINIT) & self.phy_up
        control_wrong = control & ~seen["known"]
        m.d.comb += [
            normal.eq(state == Retry.NORMAL),
            all_data.eq(normal & (pending > MAX_ROLLOVER)),
            good.eq(there & ~seen["bad"] & awake),
            control.eq(~all_data & seen["control"]),
            protocol.eq(good & normal & ~control),
            accept.eq(good & normal & ~(control & (seen["retry"] | control_wrong))),
            self.asks.sequence.eq(sequence),
            self.asks.retries.eq(retries),
            self.asks.reinits.eq(reinits),
        ]
        with m.If(good):
            m.d.sync += self.alive.eq(1)
        retry = good & control & seen["retry"] & seen["known"]
        with m.If(there):
            m.d.sync += frames.eq(0)
            with m.If(retry & seen["frame"]):
                m.d.sync += frames.eq(Mux(frames == FRAMES, FRAMES, frames + 1))
        framed = retry & (frames == FRAMES)
        payload = seen["payload"]
        ask, answer = self._retry_payloads(m, payload)
        m.d.sync += [
            self.request.valid.eq(framed & seen["ask"]),
            self.request.payload.sequence.eq(ask.sequence),
            self.request.payload.retries.eq(ask.retries),
            self.accepted.eq(accept),
            self.crc_error.eq(there & awake & seen["bad"]),
        ]

        # The sequence, and what was returned.
        llcrd = accept & control & seen["llcrd"]
        told = (protocol & ~all_data) | llcrd
        acks_low = flits.LLCRD_PAYLOAD.offset("acks_low")
        acks_high = flits.LLCRD_PAYLOAD.offset("acks_high")
        full = Cat(payload[acks_low : acks_low + 3], seen["ak"], payload[acks_high : acks_high + 4])
        m.d.sync += [
            self.acks.eq(Mux(llcrd, full, Mux(told & seen["ak"], flits.ACK_FLITS, 0))),
            self.credits.eq(Mux(told, seen["credits"], 0)),
        ]
        first = accept & control & seen["init"]
        param = Signal(layout_of(flits.INIT_PAYLOAD))
        m.d.comb += param.as_value().eq(payload)
        with m.If(accept):
            m.d.sync += [
                sequence.eq(Mux(sequence == wrap - 1, 0, sequence + 1)),
                retries.eq(0),
                reinits.eq(0),
            ]
        heard = self.heard
        with m.If(first):
            m.d.sync += [wrap.eq(param.wrap), self.open.eq(1)]
            m.d.sync += [heard.version.eq(param.version), heard.wrap.eq(param.wrap)]
        with m.If(framed & seen["ask"]):
            m.d.sync += [heard.retries.eq(ask.retries), heard.reinits.eq(ask.reinits)]
        with m.If(framed & seen["answer"]):
            m.d.sync += [getattr(heard, name).eq(answer[name]) for name in ("write", "sequence", "free")]

        # Data: what is owed, and where the chunks of this flit belong.
        rollover = Cat(pending > n for n in range(SLOTS - 1))
        mismatch = protocol & ~all_data & (seen["holds"] != (rollover | seen["behind"]))
        count = Signal(range(SLOTS + 1))
        m.d.comb += count.eq(Mux(all_data, SLOTS, _count(seen["holds"])))
        after = Mux(all_data, pending - SLOTS, pending + seen["added"] - count)
        due = partial & (pending != 0) & (pending <= SLOTS)
        left = pending - (partial & (pending != 0)) if self.side is Side.DEVICE else pending
        position = Signal(2)
        m.d.comb += position.eq(-left)
        if self.side is Side.DEVICE:
            ends = (pending != 0) & (pending <= SLOTS)
        else:
            ends = position + count >= LINE_CHUNKS
        out = self.flit.payload
        m.d.sync += self.flit.valid.eq(protocol)
        with m.If(protocol):
            m.d.sync += [
                pending.eq(after),
                out.flit.eq(seen["flit"]),
                out.all_data.eq(all_data),
                out.position.eq(position),
                out.count.eq(count - due),
                out.ends.eq(ends),
                out.whole.eq(due & (pending == 1)),
                out.enables.eq(due),
                out.enables_at.eq(pending - 1),
            ]
            with m.If(~all_data & seen["any_data"]):
                m.d.sync += partial.eq(seen["partial"])

        early = accept & ~self.open & ~(control & seen["init"])
        again = first & self.open
        broken = early | again | mismatch | (protocol & ~all_data & seen["wrong"])
        m.d.sync += [
            self.malformed.eq(broken),
            self.unexpected.eq(framed & seen["answer"] & normal),
        ]
        asked = Signal(5)  # what the last request said of retries
        answered = framed & seen["answer"] & (answer.retries == asked)
        with m.Switch(state):
            with m.Case(Retry.NORMAL):
                with m.If(there & (seen["bad"] | control_wrong)):
                    m.d.sync += state.eq(Retry.REQUEST)
                with m.If(broken):
                    m.d.sync += state.eq(Retry.ABORT)
            with m.Case(Retry.REQUEST):
                with m.If(self.request_sent):
                    m.d.sync += [state.eq(Retry.WAIT), retries.eq(retries + 1), asked.eq(retries)]
                with m.Elif((retries == MAX_RETRIES) & (reinits == MAX_REINITS)):
                    m.d.sync += state.eq(Retry.ABORT)
                with m.Elif(retries == MAX_RETRIES):
                    m.d.sync += [state.eq(Retry.REINIT), reinits.eq(reinits + 1), self.retrain.eq(1)]
            with m.Case(Retry.WAIT):
                with m.If(self.timed_out):
                    m.d.sync += state.eq(Retry.REQUEST)
                with m.Elif(answered):
                    m.d.sync += [
                        state.eq(Retry.NORMAL),
                        self.viral.eq(answer.viral),
                        self.viral_ld.eq(answer.viral_ld),
                    ]
                    with m.If(answer.empty):
                        m.d.sync += [retries.eq(0), reinits.eq(0)]
            with m.Case(Retry.REINIT):
                with m.If(self.phy_up & ~self.retrain):
                    m.d.sync += [state.eq(Retry.REQUEST), retries.eq(0)]
        trained = Signal()  # before that nothing can have been lost
        m.d.sync += trained.eq(trained | self.phy_up)
        with m.If(~self.phy_up & trained & (state != Retry.ABORT)):
            m.d.sync += [state.eq(Retry.REINIT), frames.eq(0)]
        with m.If(~self.phy_up):
            m.d.sync += self.retrain.eq(0)
        return m

    @staticmethod
    def _retry_payloads(m, payload):
        ask, answer = Signal(layout_of(flits.RETRY_REQ_PAYLOAD)), Signal(layout_of(flits.RETRY_ACK_PAYLOAD))
        m.d.comb += [ask.as_value().eq(payload), answer.as_value().eq(payload)]
        return ask, answer


def _count(bits):
    return reduce_tree(list(bits), lambda a, b: a + b)
