"""What a message asks for: where its address leads, what is to be done there, and what the host waits for."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi import DeviceConfig, cxl, window
from ..abi.config import EXTENT_BYTES
from ..abi.lines import LINE_BYTES, LINE_SHIFT
from ..abi.owner import OWNER_BYTES, OWNER_OFFSET
from ..interfaces import LINE_ADDRESS_BITS, REQUEST_ID_BITS, TENANT_BITS

_OPCODE_BITS = cxl.M2S_REQ["opcode"].width
_ADDRESS_BITS = cxl.M2S_REQ["address"].width
_WINDOW_LINES = window.WINDOW_BYTES // LINE_BYTES
_PAGE_SHIFT = exact_log2(OWNER_BYTES // LINE_BYTES)
_END_LINE = (OWNER_OFFSET + OWNER_BYTES) // LINE_BYTES
"""The owner's page follows the window of aperture 0."""
assert OWNER_OFFSET == window.WINDOW_BYTES


class Message(data.Struct):
    """The fields of M2S Req and RwD headers that matter here."""

    with_data: 1  # RwD
    opcode: _OPCODE_BITS
    address: _ADDRESS_BITS
    poison: 1
    id: REQUEST_ID_BITS  # tag, then LD-ID


class Access(data.Struct):
    """A message that was understood. At most one of `memory` and `window`; with neither the endpoint answers
    itself.

    `line` is of the device, or of the window and the owner's page behind it. `drs`: the host waits for data,
    else for a completion.
    """

    memory: 1
    window: 1
    drs: 1
    with_data: 1
    partial: 1  # write with byte enables
    poison: 1
    tenant: TENANT_BITS
    line: LINE_ADDRESS_BITS
    id: REQUEST_ID_BITS


def message_of(header):
    """The `Message` fields of a header of M2S Req or RwD, as a dict of values."""
    return {
        "opcode": header.opcode,
        "address": header.address,
        "id": Cat(header.tag, header.ld_id),
        **({"poison": header.poison, "with_data": 1} if "poison" in header.shape().members else {}),
    }


class Decoder(wiring.Component):
    """Decodes messages; `abi.window` has the address map, `abi.cxl` what each opcode waits for.

    Messages that nobody waits for (MemSpecRd and its like) are taken and dropped. What the device does not do
    is answered so that the host does not wait for ever: a request that reads with MemData-NXM, any other with
    Cmp.

    With several logical devices a message must have its aperture's LD-ID, and an address in memory must be in
    that logical device's part; else it leads nowhere.

    Parameters
    ----------
    config : the device's configuration.

    Members
    -------
    i : In(stream(Message)) : messages.
    o : Out(stream(Access)) : accesses, in order.
    dropped : Out(1) : a message passes that makes no access.
    link_read, link_write, outside_read, outside_write, unsupported : Out(1) : a message passes that the
        counter of this name (in `abi.window`, in the plural) counts.

    Latency is 0 cycles (`latency_cycles`), throughput one message per cycle.
    """

    latency_cycles = 0

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(Message)),
                "o": Out(stream.Signature(Access)),
                "dropped": Out(1),
                "link_read": Out(1),
                "link_write": Out(1),
                "outside_read": Out(1),
                "outside_write": Out(1),
                "unsupported": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        message, access = self.i.payload, self.o.payload
        bits = (self.config.capacity_bytes - 1).bit_length() - LINE_SHIFT
        offset, upper, aperture = message.address[:bits], message.address[bits], message.address[bits + 1 :]
        exists, in_memory, in_window, of_page = Signal(), Signal(), Signal(), Signal()
        there, of_memory = aperture < self.config.apertures, ~upper
        if self.config.logical_devices > 1:
            ours, of_part = self._of_logical_device(message, aperture, offset)
            there, of_memory = there & ours, of_memory & of_part
        m.d.comb += [
            exists.eq(there),
            in_memory.eq(exists & of_memory),
            of_page.eq((offset[_PAGE_SHIFT:] == _WINDOW_LINES >> _PAGE_SHIFT) & ~aperture.any()),
            in_window.eq(exists & upper & ((offset < _WINDOW_LINES) | of_page)),
        ]

        def req_is(opcodes):
            return ~message.with_data & message.opcode.matches(*map(int, opcodes))

        def req_waits_for(answer):
            return req_is(o for o in range(1 << len(message.opcode)) if cxl.req_answer(o) is answer)

        reads, writes, drops, passes = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            reads.eq(req_is(cxl.READS)),
            writes.eq(message.with_data & message.opcode.matches(*map(int, cxl.WRITES))),
            drops.eq(req_waits_for(cxl.Answer.NONE)),
            access.memory.eq((reads | writes) & in_memory),
            access.window.eq((reads | writes) & in_window),
            access.drs.eq(req_waits_for(cxl.Answer.DRS)),
            access.with_data.eq(message.with_data),
            access.partial.eq(message.opcode == cxl.M2SRwDOp.MEM_WR_PTL),
            access.poison.eq(message.poison),
            access.tenant.eq(aperture),
            access.line.eq(Mux(upper, offset[: (_END_LINE - 1).bit_length()], offset)),
            access.id.eq(message.id),
            self.o.valid.eq(self.i.valid & ~drops),
            self.i.ready.eq(self.o.ready | drops),
            passes.eq(self.i.valid & self.i.ready),
            self.dropped.eq(passes & drops),
            self.link_read.eq(passes & reads),
            self.link_write.eq(passes & message.with_data),
            self.outside_read.eq(passes & reads & ~in_memory & ~in_window),
            self.outside_write.eq(passes & writes & ~in_memory & ~in_window),
            self.unsupported.eq(passes & ~reads & ~writes & ~req_is(cxl.NO_OPERATIONS)),
        ]
        return m

    def _of_logical_device(self, message, aperture, offset):
        """Whether a message has its aperture's LD-ID, and whether the offset is in that one's memory."""
        ld_id = message.id[cxl.TAG_BITS :]
        part = exact_log2(self.config.logical_extents * EXTENT_BYTES // LINE_BYTES)
        return ld_id == aperture >> exact_log2(self.config.logical_apertures), offset[part:] == ld_id
