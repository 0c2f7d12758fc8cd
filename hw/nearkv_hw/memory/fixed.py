"""The simplest memory behind a channel: every access after the same number of cycles, one per cycle."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi.lines import LINE_BITS, LINE_BYTES
from ..common.arbiter import RoundRobin
from ..common.delay import Delay
from ..interfaces import LINE_ADDRESS_BITS
from .backend import Backend
from .store import Store


class FixedMemory(wiring.Component):
    """Memory with a fixed latency and no DRAM rules.

    Accesses wait as addresses (and write data); the store is accessed when their time has come. They are
    carried out in their order, so a read sees every earlier write of its line and no later one.

    Parameters
    ----------
    channel : which channel's memory this is.
    latency_cycles : from an access to its answer, at least 2.
    slot_bits : width of the accesses' slots.

    Members
    -------
    port : In(Backend) : unit and fabric take turns when both want.
    waiting : Out(1) : an access waited a cycle ago, as both clients had one; nothing else queues here.
    refused : Out(1) : it was the fabric's.

    Latency is exactly `latency_cycles`, throughput one access per cycle.
    """

    writers = 1
    places = 1

    def __init__(self, *, channel, latency_cycles, slot_bits):
        if not isinstance(latency_cycles, int) or latency_cycles < 2:
            raise ValueError(f"latency_cycles must be an integer of at least 2, not {latency_cycles!r}")
        self.channel = channel
        self.latency_cycles = latency_cycles
        self.slot_bits = slot_bits
        super().__init__(
            {
                "port": In(Backend(unit_bits=slot_bits, fabric_bits=slot_bits, writers=self.writers)),
                "waiting": Out(1),
                "refused": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        port = self.port
        m.submodules.store = store = Store(channel=self.channel)
        m.submodules.arbiter = arbiter = RoundRobin(count=2)
        wait = self.latency_cycles - store.latency_cycles
        operation = data.StructLayout(
            {"unit": 1, "slot": self.slot_bits, "line": LINE_ADDRESS_BITS, "write": 1, "poison": 1}
        )
        content = data.StructLayout({"data": LINE_BITS, "enable": LINE_BYTES})
        m.submodules.operations = operations = Delay(shape=operation, cycles=wait)
        m.submodules.contents = contents = Delay(shape=content, cycles=wait)
        now, op = operations.i.payload, operations.o.payload
        unit, fabric = port.unit.payload, port.fabric.payload
        m.d.comb += [
            arbiter.requests[0].eq(port.unit.valid),
            arbiter.requests[1].eq(port.fabric.valid),
            arbiter.accept.eq(1),
            port.unit.ready.eq(arbiter.grant[0]),
            port.fabric.ready.eq(arbiter.grant[1]),
            operations.i.valid.eq(arbiter.grant.any()),
            now.unit.eq(arbiter.grant[0]),
            contents.i.valid.eq(arbiter.grant[1] & fabric.write),
            contents.i.payload.data.eq(fabric.data),
            contents.i.payload.enable.eq(fabric.enable | (~fabric.partial).replicate(LINE_BYTES)),
        ]
        m.d.sync += [
            self.waiting.eq(port.unit.valid & port.fabric.valid),
            self.refused.eq(port.fabric.valid & ~port.fabric.ready),
        ]
        with m.If(arbiter.grant[0]):
            m.d.comb += [now.slot.eq(unit.slot), now.line.eq(unit.line)]
        with m.Else():
            m.d.comb += [now[name].eq(fabric[name]) for name in ("slot", "line", "write", "poison")]
        m.d.comb += [
            store.read_enable.eq(operations.o.valid & ~op.write),
            store.read_line.eq(op.line),
            store.write_enable.eq(operations.o.valid & op.write),
            store.write_line.eq(op.line),
            store.write_data.eq(contents.o.payload.data),
            store.write_mask.eq(contents.o.payload.enable),
            store.write_poison.eq(op.poison),
        ]
        done = Signal(operation, reset_less=True)
        valid = Signal()
        m.d.sync += [valid.eq(operations.o.valid), done.eq(op)]
        for answer, mine in (
            (port.unit_read, done.unit),
            (port.fabric_read, ~done.unit & ~done.write),
        ):
            m.d.comb += [
                answer.valid.eq(valid & mine),
                answer.payload.slot.eq(done.slot),
                answer.payload.data.eq(store.read_data),
                answer.payload.poison.eq(store.read_poison),
            ]
        m.d.comb += [
            port.written[0].valid.eq(valid & done.write),
            port.written[0].slot.eq(done.slot),
        ]
        return m
