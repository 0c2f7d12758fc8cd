"""One port of the endpoint: messages of the link in, accesses to memory and command windows out, and back."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..abi.lines import LINE_BYTES
from ..common.buffer import Buffer
from ..interfaces import DevLoad, FabricPort
from .answers import MIN_OUTSTANDING, Answers, OwnAnswer
from .arrivals import Arrivals, Content
from .decode import Access, Decoder
from .hdm.translate import LINE_BITS, Translated
from .messages import DRS, NDR, REQ, RWD
from .translation import Translation

EVENTS = ("link_reads", "link_writes", "outside_reads", "outside_writes", "unsupported")
"""What a port tells of messages, each as the counter of this name in `abi.window` counts."""
_CONTENTS = 4
"""What messages with data bring, between their arrival and their access."""


def request_cycles(config):
    """From a message to its request."""
    translation = Translation.latency_cycles if config.hdm_decoders else 0
    return Arrivals.latency_cycles + translation + Buffer.latency_cycles


class Port(wiring.Component):
    """Transaction layer of a Type 3 device with host-only coherent memory (HDM-H), messages of 68-byte mode.

    - MemRd and MemRdData are answered MemData. MemWr and MemWrPtl are answered Cmp when the write is done.
    - An address of no memory and no window, and memory that the aperture's tenant does not own: reads are
      answered MemData-NXM with zeros, writes are dropped and answered Cmp.
    - MemInv, MemInvNT and MemClnEvct are answered Cmp and do nothing; MemSpecRd is dropped and has no answer.
    - Opcodes that the device does not have are counted. Those that the host waits for are answered, so that
      no tag stays in use: MemRdTEE and MemRdDataTEE MemData-NXM, all others Cmp (with data: nothing is
      written). MemRdFwd, MemWrFwd and MemSpecRdTEE have no answer.
    - A message whose valid bit is clear is none.

    Messages are carried out in the order in which they are accepted, whichever stream they come in; of both
    streams the first is served first. Tags and LD-IDs come back as they were, whatever they are, twice under
    way or not.

    A message is accepted only when there is a place for its answer. A host that takes no completions stops
    its RwD messages, one that takes no data its Req messages; nothing is lost, and the others go on.

    Parameters
    ----------
    config : the device's configuration.
    outstanding : Req messages, and as many RwD, under way at most; at least 8.

    Members
    -------
    m2s_req : In(stream(REQ)), m2s_rwd : In(stream(RWD)) : requests from the host.
    s2m_ndr : Out(stream(NDR)), s2m_drs : Out(stream(DRS)) : answers to the host.
    m2s_open, s2m_open : In(1) : the link has room for messages of this direction. From registers.
    memory : Out(FabricPort()) : accesses to lines of the device; tenant is the aperture, id is tag and LD-ID.
    window : Out(FabricPort()) : accesses to lines of an aperture's command window, counted from its start.
        Answers of both ports are taken in bounded time.
    load : In(DevLoad) : of the memory; answers say it, or the port's own if that is larger (`Answers`).
    link_reads, link_writes, outside_reads, outside_writes, unsupported : Out(1) : a message passes that the
        counter of this name counts.
    asked, found : with `config.hdm_decoders`, to the decoders and back, as of `Translation`: what messages
        name are host addresses then, and what no decoder has is no memory and no window.

    Latency is `request_cycles` from a message to its request and `answer_cycles` from an answer to its
    message. Throughput is one message per cycle in all.
    """

    answer_cycles = Answers.latency_cycles

    def __init__(self, *, config, outstanding):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if not isinstance(outstanding, int) or outstanding < MIN_OUTSTANDING:
            raise ValueError(
                f"outstanding must be an integer of at least {MIN_OUTSTANDING}, not {outstanding!r}"
            )
        self.config = config
        self.outstanding = outstanding
        self.request_cycles = request_cycles(config)
        lookup = {
            "asked": Out(stream.Signature(LINE_BITS, always_ready=True)),
            "found": In(stream.Signature(Translated, always_ready=True)),
        }
        super().__init__(
            {
                "m2s_req": In(stream.Signature(REQ)),
                "m2s_rwd": In(stream.Signature(RWD)),
                "s2m_ndr": Out(stream.Signature(NDR)),
                "s2m_drs": Out(stream.Signature(DRS)),
                "m2s_open": In(1),
                "s2m_open": In(1),
                "memory": Out(FabricPort()),
                "window": Out(FabricPort()),
                "load": In(DevLoad),
                **dict.fromkeys(EVENTS, Out(1)),
                **(lookup if config.hdm_decoders else {}),
            }
        )

    def elaborate(self, platform):
        m = Module()
        translated = bool(self.config.hdm_decoders)
        depth = _CONTENTS + (Translation.depth if translated else 0)
        m.submodules.arrivals = arrivals = Arrivals(content_depth=depth)
        m.submodules.decoder = decoder = Decoder(config=self.config)
        m.submodules.accesses = accesses = Buffer(shape=Access)
        m.submodules.own = own = Buffer(shape=OwnAnswer)
        m.submodules.answers = answers = Answers(outstanding=self.outstanding)
        for outer, inner in (
            (self.m2s_req, arrivals.m2s_req),
            (self.m2s_rwd, arrivals.m2s_rwd),
            (self.s2m_ndr, answers.s2m_ndr),
            (self.s2m_drs, answers.s2m_drs),
            (self.memory.response, answers.memory),
            (self.window.response, answers.window),
        ):
            wiring.connect(m, wiring.flipped(outer), inner)
        if translated:
            m.submodules.translation = translation = Translation()
            wiring.connect(m, arrivals.messages, translation.i)
            wiring.connect(m, translation.asked, wiring.flipped(self.asked))
            wiring.connect(m, wiring.flipped(self.found), translation.found)
            wiring.connect(m, translation.o, decoder.i)
        else:
            wiring.connect(m, arrivals.messages, decoder.i)
        wiring.connect(m, decoder.o, accesses.i)
        wiring.connect(m, own.o, answers.own)
        m.d.comb += [
            arrivals.req_room.eq(answers.req_room & self.m2s_open),
            arrivals.rwd_room.eq(answers.rwd_room & self.m2s_open),
            answers.open.eq(self.s2m_open),
            answers.load.eq(self.load),
            answers.req_accepted.eq(arrivals.req_accepted),
            answers.rwd_accepted.eq(arrivals.rwd_accepted),
            answers.req_dropped.eq(decoder.dropped),
        ]
        self._issue(m, accesses.o, arrivals.contents, own.i)
        m.d.comb += [
            self.link_reads.eq(decoder.link_read),
            self.link_writes.eq(decoder.link_write),
            self.outside_reads.eq(decoder.outside_read),
            self.outside_writes.eq(decoder.outside_write),
            self.unsupported.eq(decoder.unsupported),
        ]
        return m

    def _issue(self, m, accesses, contents, own):
        """Each access to memory, to a window, or straight to the answers."""
        access, by_itself, content = accesses.payload, Signal(), Signal(Content)
        with m.If(access.with_data):  # a read's request must not change when content arrives
            m.d.comb += content.eq(contents.payload)
        m.d.comb += [
            by_itself.eq(~access.memory & ~access.window),
            accesses.ready.eq(
                (access.memory & self.memory.request.ready)
                | (access.window & self.window.request.ready)
                | (by_itself & own.ready)
            ),
            contents.ready.eq(accesses.valid & accesses.ready & access.with_data),
            own.valid.eq(accesses.valid & by_itself),
            *(own.payload[name].eq(access[name]) for name in ("id", "drs", "with_data")),
        ]
        for port, wanted in ((self.memory, access.memory), (self.window, access.window)):
            request = port.request.payload
            m.d.comb += [
                port.request.valid.eq(accesses.valid & wanted),
                *(request[name].eq(access[name]) for name in ("line", "tenant", "id", "poison")),
                request.write.eq(access.with_data),
                request.enable.eq(content.enable | (~access.partial).replicate(LINE_BYTES)),
                request.data.eq(content.data),
            ]
