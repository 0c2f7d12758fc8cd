"""The endpoint's way back: answers of memory and windows become messages to the host."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import cxl
from ..abi.lines import LINE_BITS
from ..common.arbiter import RoundRobin
from ..common.queue import Queue
from ..interfaces import REQUEST_ID_BITS, DevLoad, FabricResponse, Fault
from .messages import DRS, NDR

MIN_OUTSTANDING = 8
"""So that the device's load can be told in eighths."""


class OwnAnswer(data.Struct):
    """An answer that needs neither memory nor window: MemData-NXM, or a completion."""

    id: REQUEST_ID_BITS
    drs: 1
    with_data: 1  # the answer to an RwD


class _Completion(data.Struct):
    id: REQUEST_ID_BITS
    with_data: 1
    dev_load: DevLoad


class _ReadData(data.Struct):
    data: LINE_BITS
    id: REQUEST_ID_BITS
    dev_load: DevLoad
    nxm: 1
    poison: 1


class Answers(wiring.Component):
    """Collects answers, keeps them until the host takes them, and says how many more messages may be
    accepted.

    Every message accepted has a place for its answer here, of whichever kind that will be, until the host
    took it (or until it is known that there is none). So answers are taken in bounded time, whatever the host
    does. Sources that have answers of the same kind take turns.

    Parameters
    ----------
    outstanding : M2S Req messages, and as many RwD, whose answers the host may owe to take; at least 8.

    Members
    -------
    memory, window : In(stream(FabricResponse)) : a read's answer makes a DRS message, a write's an NDR
        message.
    own : In(stream(OwnAnswer)) : the endpoint's own answers; RwD messages have completions only.
    s2m_ndr : Out(stream(NDR)), s2m_drs : Out(stream(DRS)) : messages to the host.
    open : In(1) : a message may be offered to the host. One that was offered stays.
    req_room, rwd_room : Out(1) : one more message may be accepted.
    req_accepted, rwd_accepted : In(1) : one is.
    req_dropped : In(1) : a Req turns out to have no answer.
    load : In(DevLoad) : of what stands behind the endpoint, from a register.

    The DevLoad of an answer is the larger of `load` and what follows from the messages that have no answer
    yet as a part of `outstanding`, of Req or RwD, whichever are more: light below a quarter, optimal below
    three quarters, moderate overload below seven eighths, severe overload from there. Answers that wait for
    the link are no load of the device.

    Latency is 2 cycles (`latency_cycles`), throughput one answer of each kind per cycle.
    """

    latency_cycles = 2

    def __init__(self, *, outstanding):
        if not isinstance(outstanding, int) or outstanding < MIN_OUTSTANDING:
            raise ValueError(
                f"outstanding must be an integer of at least {MIN_OUTSTANDING}, not {outstanding!r}"
            )
        self.outstanding = outstanding
        super().__init__(
            {
                "memory": In(stream.Signature(FabricResponse)),
                "window": In(stream.Signature(FabricResponse)),
                "own": In(stream.Signature(OwnAnswer)),
                "s2m_ndr": Out(stream.Signature(NDR)),
                "s2m_drs": Out(stream.Signature(DRS)),
                "open": In(1),
                "req_room": Out(1),
                "rwd_room": Out(1),
                "req_accepted": In(1),
                "rwd_accepted": In(1),
                "req_dropped": In(1),
                "load": In(DevLoad),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.completions = completions = Queue(shape=_Completion, depth=2 * self.outstanding)
        m.submodules.lines = lines = Queue(shape=_ReadData, depth=self.outstanding)
        dev_load = self._count(m, completions, lines)
        memory, window, own = self.memory.payload, self.window.payload, self.own.payload

        m.submodules.ndr_turn = ndr_turn = RoundRobin(count=3)
        completion = completions.i.payload
        m.d.comb += [
            ndr_turn.requests.eq(
                Cat(
                    self.memory.valid & memory.write,
                    self.window.valid & window.write,
                    self.own.valid & ~own.drs,
                )
            ),
            ndr_turn.accept.eq(completions.i.valid & completions.i.ready),
            completions.i.valid.eq(ndr_turn.grant.any()),
            completion.id.eq(Mux(ndr_turn.grant[0], memory.id, Mux(ndr_turn.grant[1], window.id, own.id))),
            completion.with_data.eq(~ndr_turn.grant[2] | own.with_data),
            completion.dev_load.eq(dev_load),
        ]

        m.submodules.drs_turn = drs_turn = RoundRobin(count=3)
        line = lines.i.payload
        m.d.comb += [
            drs_turn.requests.eq(
                Cat(
                    self.memory.valid & ~memory.write,
                    self.window.valid & ~window.write,
                    self.own.valid & own.drs,
                )
            ),
            drs_turn.accept.eq(lines.i.valid & lines.i.ready),
            lines.i.valid.eq(drs_turn.grant.any()),
            line.dev_load.eq(dev_load),
        ]
        with m.If(drs_turn.grant[2]):
            m.d.comb += [line.id.eq(own.id), line.nxm.eq(1)]
        with m.Else():
            fault = Mux(drs_turn.grant[0], memory.fault, window.fault)
            m.d.comb += [
                line.id.eq(Mux(drs_turn.grant[0], memory.id, window.id)),
                line.data.eq(Mux(drs_turn.grant[0], memory.data, window.data)),
                line.poison.eq(fault == Fault.POISON),
                line.nxm.eq((fault == Fault.DENIED) | (fault == Fault.OUTSIDE)),
            ]
        for i, source in enumerate((self.memory, self.window, self.own)):
            m.d.comb += source.ready.eq(
                (ndr_turn.grant[i] & completions.i.ready) | (drs_turn.grant[i] & lines.i.ready)
            )
        self._send(m, completions.o, lines.o)
        return m

    def _count(self, m, completions, lines):
        """Count messages until their answers are there, and until the host has these. Returns the DevLoad."""

        accepted = Cat(self.req_accepted, self.rwd_accepted, self.req_dropped)

        def events(done, line):
            """What changes the counts, where completions pass at `done` and lines at `line`."""
            completed, for_rwd = done.valid & done.ready, done.payload.with_data
            return Cat(accepted, line.valid & line.ready, completed & ~for_rwd, completed & for_rwd)

        def counted(name, events):
            """Req and RwD messages under way, by these events."""
            req_accepted, rwd_accepted, req_dropped, returned, req_completed, rwd_completed = events
            req, rwd = (Signal(range(self.outstanding + 1), name=f"{of}_{name}") for of in ("req", "rwd"))
            m.d.sync += [
                req.eq(req + req_accepted - returned - req_completed - req_dropped),
                rwd.eq(rwd + rwd_accepted - rwd_completed),
            ]
            return req, rwd

        req_owed, rwd_owed = counted("owed", events(completions.o, lines.o))
        answered = events(completions.i, lines.i)
        happened = Signal(len(answered))  # a register, as grants are late
        m.d.sync += happened.eq(answered)
        req_inside, rwd_inside = counted("inside", happened)
        m.d.comb += [
            self.req_room.eq(req_owed != self.outstanding),
            self.rwd_room.eq(rwd_owed != self.outstanding),
        ]
        own_load, dev_load = Signal(DevLoad), Signal(DevLoad)
        own, behind = own_load.as_value(), self.load.as_value()
        m.d.sync += [own_load.eq(DevLoad.LIGHT), dev_load.as_value().eq(Mux(own > behind, own, behind))]
        for load, eighths in (
            (DevLoad.OPTIMAL, 2),
            (DevLoad.MODERATE_OVERLOAD, 6),
            (DevLoad.SEVERE_OVERLOAD, 7),
        ):
            threshold = self.outstanding * eighths // 8
            with m.If((req_inside >= threshold) | (rwd_inside >= threshold)):
                m.d.sync += own_load.eq(load)
        return dev_load

    def _send(self, m, completions, lines):
        """Write the messages out; a host-only memory keeps no meta state."""
        ndr, drs = self.s2m_ndr.payload, self.s2m_drs.payload
        m.d.comb += [
            ndr.opcode.eq(int(cxl.S2MNdrOp.CMP)),
            drs.header.opcode.eq(
                Mux(lines.payload.nxm, int(cxl.S2MDrsOp.MEM_DATA_NXM), int(cxl.S2MDrsOp.MEM_DATA))
            ),
            drs.header.poison.eq(lines.payload.poison),
            drs.data.eq(lines.payload.data),
        ]
        for name, queue, port, header in (
            ("ndr", completions, self.s2m_ndr, ndr),
            ("drs", lines, self.s2m_drs, drs.header),
        ):
            offered = Signal(name=f"{name}_offered")
            m.d.sync += offered.eq(port.valid & ~port.ready)
            m.d.comb += [
                port.valid.eq(queue.valid & (self.open | offered)),
                queue.ready.eq(port.valid & port.ready),
                header.valid.eq(1),
                header.meta_field.eq(int(cxl.MetaField.NO_OP)),
                Cat(header.tag, header.ld_id).eq(queue.payload.id),
                header.dev_load.eq(queue.payload.dev_load.as_value()),
            ]
