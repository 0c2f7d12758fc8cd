"""The fabric: a crossbar between those who want device memory and the channels."""

from functools import reduce

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..common.arbiter import RoundRobin
from ..common.buffer import Buffer
from ..interfaces import REQUEST_ID_BITS, FabricPort, FabricRequest, FabricResponse, Fault, Snoop
from .channel import EXTENT_LINES_LOG2, OUTSTANDING

_OUTSIDE_DEPTH = 4


class _OutsideAnswer(data.Struct):
    id: REQUEST_ID_BITS
    write: 1


class Fabric(wiring.Component):
    """Crossbar from masters to memory channels.

    Where units stand at ranks, every rank is a channel of its own here. A device line lies in channel
    (line's extent) mod channels; consecutive extents lie in consecutive channels. A line beyond the memory is
    answered `Fault.OUTSIDE` here and reaches no channel. Of one master, the requests to one channel keep
    their order, and so do the answers from it; between channels there is no order. Masters that want the same
    channel are served in turn, and so are channels that have answers for the same master.

    A master must take its answers in bounded time whatever becomes of its requests: an answer that is left
    lying holds up the answers of its channel to all masters.

    Parameters
    ----------
    masters : how many, at least 1.
    config : the device's configuration.

    Members
    -------
    masters : In(FabricPort) x masters : requests with lines of the device.
    channels : Out(FabricPort) x channels : the same requests with lines of the channel.
    written : Out(Snoop) x channels : the write that set out to the channel a cycle ago, for those who keep
        lines on chip.

    A request passes in `request_cycles`, an answer in `answer_cycles`. Throughput is one request and one
    answer per cycle and channel as long as the masters want different channels; a master that alternates
    between channels has one per cycle.
    """

    request_cycles = Buffer.latency_cycles
    answer_cycles = Buffer.latency_cycles

    def __init__(self, *, masters, config):
        if not isinstance(masters, int) or masters < 1:
            raise ValueError(f"masters must be a positive integer, not {masters!r}")
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "masters": In(FabricPort()).array(masters),
                "channels": Out(FabricPort()).array(config.slices),
                "written": Out(Snoop).array(config.slices),
            }
        )

    def elaborate(self, platform):
        m = Module()
        masters, channels = len(self.masters), len(self.channels)
        # wanted[i][c]: master i's request goes to channel c; taken[c][i]: channel c takes it in this cycle
        wanted = [self._route(m, i, port.request) for i, port in enumerate(self.masters)]
        sources = [self._requests(m, c, [wanted[i][c] for i in range(masters)]) for c in range(channels)]
        outside = [self._outside(m, i, wanted[i][channels]) for i in range(masters)]
        for i, port in enumerate(self.masters):
            m.d.comb += port.request.ready.eq(
                Cat(*(taken[i] for _, taken in sources), outside[i].i.ready & wanted[i][channels]).any()
            )
        given = [
            self._answers(m, i, [source[i] for source, _ in sources], outside[i].o) for i in range(masters)
        ]
        for c, port in enumerate(self.channels):
            m.d.comb += port.response.ready.eq(Cat(given[i][c] for i in range(masters)).any())
        return m

    def _route(self, m, i, request):
        """Bits that say where master i's request goes: to a channel, or (the last one) outside."""
        line, channels = request.payload.line, len(self.channels)
        within = line < channels * self.config.slice_lines
        number = (line >> EXTENT_LINES_LOG2)[: (channels - 1).bit_length()]
        wanted = Signal(channels + 1, name=f"wanted_{i}")
        m.d.comb += [
            *(wanted[c].eq(request.valid & within & (number == c)) for c in range(channels)),
            wanted[channels].eq(request.valid & ~within),
        ]
        return wanted

    def _requests(self, m, c, wanted):
        """Requests to channel c. Returns per master: the channel has an answer for it; takes its request."""
        masters = len(self.masters)
        port, shift = self.channels[c], (len(self.channels) - 1).bit_length()
        m.submodules[f"arbiter_{c}"] = arbiter = RoundRobin(count=masters)
        m.submodules[f"requests_{c}"] = requests = Buffer(shape=FabricRequest)
        m.submodules[f"order_{c}"] = order = Buffer(shape=masters, depth=self._under_way)
        open_ = requests.i.ready & order.i.ready
        chosen = Signal(FabricRequest, name=f"chosen_{c}")
        payloads = [master.request.payload.as_value() for master in self.masters]
        m.d.comb += chosen.as_value().eq(
            reduce(lambda rest, i: Mux(arbiter.grant[i], payloads[i], rest), range(1, masters), payloads[0])
        )
        line = chosen.line
        taken = Signal(masters, name=f"taken_{c}")
        m.d.comb += [
            arbiter.requests.eq(Cat(wanted)),
            arbiter.accept.eq(open_ & arbiter.grant.any()),
            taken.eq(arbiter.grant & open_.replicate(masters)),
            requests.i.payload.eq(chosen),
            requests.i.payload.line.eq(Cat(line[:EXTENT_LINES_LOG2], line[EXTENT_LINES_LOG2 + shift :])),
            requests.i.valid.eq(arbiter.accept),
            order.i.payload.eq(arbiter.grant),
            order.i.valid.eq(arbiter.accept),
            order.o.ready.eq(port.response.valid & port.response.ready),
        ]
        wiring.connect(m, requests.o, wiring.flipped(port.request))
        m.d.sync += [
            self.written[c].valid.eq(arbiter.accept & chosen.write),
            self.written[c].line.eq(line),
        ]
        return order.o.payload & port.response.valid.replicate(masters), taken

    @property
    def _under_way(self):
        """Requests per channel that may be under way: as many as it takes, and those before and after."""
        return OUTSTANDING + 12

    def _outside(self, m, i, wanted):
        """Answers to master i's requests beyond the memory."""
        m.submodules[f"outside_{i}"] = outside = Buffer(shape=_OutsideAnswer, depth=_OUTSIDE_DEPTH)
        request = self.masters[i].request.payload
        m.d.comb += [
            outside.i.valid.eq(wanted),
            outside.i.payload.id.eq(request.id),
            outside.i.payload.write.eq(request.write),
        ]
        return outside

    def _answers(self, m, i, has_answer, outside):
        """Answers to master i. Returns, per channel, whether its answer is taken in this cycle."""
        channels = len(self.channels)
        m.submodules[f"sources_{i}"] = arbiter = RoundRobin(count=channels + 1)
        m.submodules[f"answers_{i}"] = answers = Buffer(shape=FabricResponse)
        wiring.connect(m, answers.o, wiring.flipped(self.masters[i].response))
        chosen = answers.i.payload
        for c, port in enumerate(self.channels):
            with m.If(arbiter.grant[c]) if c == 0 else m.Elif(arbiter.grant[c]):
                m.d.comb += chosen.eq(port.response.payload)
        with m.Else():
            m.d.comb += [
                chosen.id.eq(outside.payload.id),
                chosen.write.eq(outside.payload.write),
                chosen.fault.eq(Fault.OUTSIDE),
            ]
        given = Signal(channels + 1, name=f"given_{i}")
        m.d.comb += [
            arbiter.requests.eq(Cat(*has_answer, outside.valid)),
            arbiter.accept.eq(answers.i.ready & arbiter.grant.any()),
            answers.i.valid.eq(arbiter.grant.any()),
            given.eq(arbiter.grant & answers.i.ready.replicate(channels + 1)),
            outside.ready.eq(given[channels]),
        ]
        return given[:channels]
