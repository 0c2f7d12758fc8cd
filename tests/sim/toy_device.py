"""A device of memory and a clock line alone, with the message streams of the real one, to test hosts with."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from nearkv_hw.abi.cxl import M2SReqOp, M2SRwDOp, S2MDrsOp
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.common.queue import Queue
from nearkv_hw.endpoint.endpoint import decoder_registers
from nearkv_hw.endpoint.hdm.address_map import AddressMap
from nearkv_hw.endpoint.messages import DRS, NDR, REQ, RWD
from nearkv_hw.memory.store import Store


class ToyDevice(wiring.Component):
    """Memory from host address 0; the line behind it counts cycles in its lowest 8 bytes; beyond is nothing.

    Parameters
    ----------
    capacity_bytes : memory; a power of two.
    flip_tags : answer every read with a wrong tag.
    flip_ld_ids : invert these bits of every answer's LD-ID.
    ports : ports of the endpoint, which use the one memory in turn, a cycle each.
    decoders : a configuration whose HDM decoders it has the registers of; they translate nothing.
    """

    def __init__(self, *, capacity_bytes=1 << 30, flip_tags=False, flip_ld_ids=0, ports=1, decoders=None):
        self.lines = capacity_bytes // LINE_BYTES
        self.flip_tags = flip_tags
        self.flip_ld_ids = flip_ld_ids
        self.ports = ports
        self.decoders = decoders
        super().__init__(
            {
                "m2s_req": In(stream.Signature(REQ)).array(ports),
                "m2s_rwd": In(stream.Signature(RWD)).array(ports),
                "s2m_ndr": Out(stream.Signature(NDR)).array(ports),
                "s2m_drs": Out(stream.Signature(DRS)).array(ports),
                **(decoder_registers(decoders) if decoders else {}),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.store = store = Store(channel=0)
        if self.decoders:
            m.submodules.map = addresses = AddressMap(config=self.decoders, lookups=1)
            wiring.connect(m, wiring.flipped(self.decoder_write), addresses.write)
            m.d.comb += [
                addresses.read_word.eq(self.decoder_read_word),
                self.decoder_read_data.eq(addresses.read_data),
            ]
        now, turn = Signal(64), Signal(range(self.ports + 1))
        m.d.sync += [now.eq(now + 1), turn.eq(Mux(turn == self.ports - 1, 0, turn + 1))]
        for port in range(self.ports):
            m.submodules[f"requests{port}"] = requests = Queue(shape=REQ, depth=4)
            m.submodules[f"writes{port}"] = writes = Queue(shape=RWD, depth=4)
            m.submodules[f"done{port}"] = done = Queue(shape=NDR, depth=4)
            m.submodules[f"data{port}"] = data = Queue(shape=DRS, depth=4)
            wiring.connect(m, wiring.flipped(self.m2s_req[port]), requests.i)
            wiring.connect(m, wiring.flipped(self.m2s_rwd[port]), writes.i)
            wiring.connect(m, done.o, wiring.flipped(self.s2m_ndr[port]))
            wiring.connect(m, data.o, wiring.flipped(self.s2m_drs[port]))
            self._writes(m, store, turn == port, writes.o, done.i)
            self._reads(m, store, turn == port, requests.o, data, now)
        return m

    def _writes(self, m, store, mine, write, done):
        header = write.payload.header
        line = header.address
        partial = header.opcode == M2SRwDOp.MEM_WR_PTL
        m.d.comb += [
            done.valid.eq(write.valid & mine),
            write.ready.eq(done.ready & mine),
            done.payload.valid.eq(1),
            done.payload.tag.eq(header.tag),
            done.payload.ld_id.eq(header.ld_id ^ self.flip_ld_ids),
        ]
        with m.If(mine):
            m.d.comb += [
                store.write_enable.eq(write.valid & done.ready & header.valid & (line < self.lines)),
                store.write_line.eq(line),
                store.write_data.eq(write.payload.data),
                store.write_mask.eq(Mux(partial, write.payload.enable, ~0)),
                store.write_poison.eq(header.poison),
            ]

    def _reads(self, m, store, mine, request, data, now):
        header = request.payload
        expected = header.opcode.matches(M2SReqOp.MEM_RD, M2SReqOp.MEM_RD_DATA) & header.valid
        reading, tag, ld_id, clock, outside = Signal(), Signal(16), Signal(4), Signal(), Signal()
        answer = data.i.payload
        m.d.comb += [
            request.ready.eq(mine & (data.level + reading < data.depth)),
            data.i.valid.eq(reading),
            answer.header.valid.eq(1),
            answer.header.tag.eq(~tag if self.flip_tags else tag),
            answer.header.ld_id.eq(ld_id),
            answer.header.opcode.eq(Mux(outside, S2MDrsOp.MEM_DATA_NXM, S2MDrsOp.MEM_DATA)),
            answer.header.poison.eq(store.read_poison & ~outside & ~clock),
            answer.data.eq(Mux(clock, now, store.read_data)),
        ]
        with m.If(mine):
            m.d.comb += [
                store.read_enable.eq(request.valid & request.ready),
                store.read_line.eq(header.address),
            ]
        m.d.sync += [
            reading.eq(request.valid & request.ready & expected),
            tag.eq(header.tag),
            ld_id.eq(header.ld_id ^ self.flip_ld_ids),
            clock.eq(header.address == self.lines),
            outside.eq(header.address > self.lines),
        ]
