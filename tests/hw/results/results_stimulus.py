"""Random states, beats and passes for the results side's benches, and a fabric that answers writes."""

from dataclasses import dataclass, field

import cocotb
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.descriptor import Status
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.memory import ResultLayout
from nearkv_hw.interfaces import BeatKind, FabricRequest, FabricResponse, Fault
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.streams import cycle, random, value
from results_golden import merge_states, query_lines

FINISHED = (OutputForm.FP32, OutputForm.BF16, OutputForm.FP16)


def state_fields(state, rng):
    """A state as the struct's fields; what an empty one leaves open is noise."""
    if state is None:
        limb = rng.randrange(-(1 << 55), 1 << 55)
        return {"some": 0, "top": rng.randrange(-(1 << 19), 1 << 19), "high": limb, "low": -limb - 1}
    return {"some": 1, "top": state[0], "high": state[1], "low": state[2]}


def lane_fields(state, flags, rng):
    return {"state": state_fields(state, rng), "flags": flags}


def random_limb(rng, bits=50):
    """A signed number whose length is random, so that short and long ones, zero and ±1 all occur."""
    return rng.choice((1, -1)) * rng.getrandbits(rng.randrange(bits + 1) or 1)


def random_state(rng, around=0, bits=50):
    """A numerator's state, its top near `around`, sometimes far away, sometimes empty."""
    kind = rng.random()
    if kind < 0.08:
        return None
    top = around + rng.choice((-5, -2, -1, -1, 0, 0, 0, 0, 1, 2, 4))
    if kind < 0.14:
        top = rng.choice((-(1 << 19), (1 << 19) - 1, around + rng.randrange(-40, 41)))
    top = max(-(1 << 19), min((1 << 19) - 1, top))
    return top, random_limb(rng, bits), random_limb(rng, bits)


def random_scale(rng):
    """float32 bits of an output scale: any number, most of them near 1, and all specials."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(
            (0x80000000, 1, 0x80000003, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF, 0x3F800000)
        )
    field = rng.randrange(256) if kind < 0.4 else rng.randrange(117, 138)
    return rng.getrandbits(1) << 31 | field << 23 | rng.getrandbits(23) or 1


def random_denominator(rng, around=0):
    """A denominator's state as weights make it: positive, at least one in the high limb; sometimes empty."""
    if rng.random() < 0.1:
        return None
    return (
        around + rng.choice((-2, -1, 0, 0, 0)),
        1 + rng.getrandbits(rng.randrange(1, 50)),
        rng.getrandbits(rng.randrange(1, 50)),
    )


@dataclass
class Pass:
    """One pass: what each channel sends, the job, and what must come of it.

    `denominators[c][q]` is (state, nan); `lanes[c][q][j]` is (state, flags); `ends[c]` is (status, page,
    lines).
    """

    job: dict
    denominators: list
    lanes: list
    ends: list
    denied: bool = False
    writes: dict = field(default_factory=dict)  # line address: 64 bytes
    done: dict = field(default_factory=dict)

    def expect(self):
        """Fill `writes` and `done` from the golden model."""
        form = OutputForm(self.job["form"])
        merged_lines = ResultLayout(self.job["value_dim"], form).lines
        for q in range(self.job["queries"]):
            denominator, nan = None, 0
            for channel in self.denominators:
                denominator = merge_states(denominator, channel[q][0])
                nan |= channel[q][1]
            lanes = []
            for j in range(self.job["value_dim"]):
                state, flags = None, 0
                for channel in self.lanes:
                    state = merge_states(state, channel[q][j][0])
                    flags |= channel[q][j][1]
                lanes.append((state, flags))
            first = self.job["line"] + q * merged_lines
            lines = query_lines(lanes, denominator, nan, form, self.job["output_scale"])
            for k, line in enumerate(lines):
                self.writes[first + k] = line
        if self.job["fault"]:
            self.writes = {}
        failed = [(s, p) for s, p, _ in self.ends if s != Status.OK]
        status, page = min(failed, key=lambda end: end[1], default=(Status.OK, 0))
        if status == Status.OK and self.denied and self.writes:
            status = Status.RESULT_DENIED
        lines = sum(count for _, _, count in self.ends) % (1 << 32)
        self.done = {"status": int(status), "page": page, "lines": lines}
        return self

    def beats(self, channel, finish_lanes, rng):
        """The beats of one channel as struct fields; lanes beyond value_dim are noise."""
        beats = []
        for state, nan in self.denominators[channel]:
            noise = [lane_fields(random_state(rng), rng.randrange(8), rng) for _ in range(finish_lanes - 1)]
            first = lane_fields(state, nan | rng.choice((0, 6)), rng)
            beats.append({"kind": BeatKind.DENOMINATOR.value, "lanes": [first, *noise]})
        for lanes in self.lanes[channel]:
            for at in range(0, len(lanes), finish_lanes):
                beat = [lane_fields(*lane, rng) for lane in lanes[at : at + finish_lanes]]
                while len(beat) < finish_lanes:
                    beat.append(lane_fields(random_state(rng), rng.randrange(8), rng))
                beats.append({"kind": BeatKind.LANES.value, "lanes": beat})
        status, page, lines = self.ends[channel]
        beats.append({"kind": BeatKind.END.value, "status": int(status), "page": page, "lines": lines})
        return beats


def random_pass(
    rng, channels, *, form=None, queries=None, value_dim=None, line=0, fault=None, errors=0.1, scale=None
):
    """A pass with everything left open chosen at random."""
    form = rng.choice(list(OutputForm)) if form is None else form
    queries = rng.choice((1, 2, 3, 4, 8)) if queries is None else queries
    value_dim = rng.choice((1, 2, 3, 5, 16, 31, 64, 65)) if value_dim is None else value_dim
    bits = 54 - (channels.bit_length() - 1)
    denominators = [[None] * queries for _ in range(channels)]
    lanes = [[[None] * value_dim for _ in range(queries)] for _ in range(channels)]
    for q in range(queries):
        around = rng.choice((0, 0, 1, -3, 500, -262144))
        cancel = channels > 1 and rng.random() < 0.3
        nan = rng.random() < 0.08
        empty = rng.random() < 0.1
        for c in range(channels):
            state = None if empty else random_denominator(rng, around)
            denominators[c][q] = (state, int(nan and rng.random() < 0.5))
        for j in range(value_dim):
            for c in range(channels):
                flags = rng.choice((1, 2, 4, 2, 4)) if rng.random() < 0.06 else 0
                lanes[c][q][j] = (random_state(rng, around, bits), flags)
            if cancel and lanes[0][q][j][0] is not None:
                # The first two channels cancel, wholly or to within one unit of the lowest limb.
                top, high, low = lanes[0][q][j][0]
                lanes[1][q][j] = ((top, -high, -low + rng.choice((0, 0, 1, -1))), 0)
                for c in range(2, channels):
                    lanes[c][q][j] = (None, 0)
    ends = []
    for _ in range(channels):
        status = rng.choice((Status.PAGE_DENIED, Status.POISON)) if rng.random() < errors else Status.OK
        ends.append((status, rng.getrandbits(21), rng.getrandbits(31)))
    job = {
        "tenant": rng.randrange(8),
        "queries": queries,
        "value_dim": value_dim,
        "form": int(form),
        "output_scale": rng.choice((0, 0, random_scale(rng))) if scale is None else scale,
        "line": line,
        "fault": int(rng.random() < 0.1) if fault is None else int(fault),
    }
    return Pass(job, denominators, lanes, ends)


class WriteFabric:
    """The fabric behind a `FabricPort`: takes writes and answers them later, in order, channel by channel.

    Parameters
    ----------
    prefix : the port's name.
    backpressure : probability of a cycle without ready.
    latency : (least, most) cycles from a write to its answer.

    Members
    -------
    memory : {line address: (tenant, 64 bytes)}, what was written.
    writes : list of (cycle, line address).
    denied : set of line addresses; writes there are answered with `fault`.
    answered : cycles of the answers. most_open : most writes without an answer at one time.
    """

    def __init__(self, dut, prefix="fabric", *, backpressure=0.0, latency=(5, 5), channels=2):
        self.backpressure = backpressure
        self.latency = latency
        self.memory = {}
        self.writes = []
        self.denied = {}
        self.answered = []
        self.most_open = 0
        self._channels = channels
        self._rng = random("fabric", prefix)
        self._dut = dut
        self._prefix = prefix
        cocotb.start_soon(self._run())

    async def _run(self):
        rng = self._rng
        port = {
            name: getattr(self._dut, f"{self._prefix}_{name}")
            for side in ("request", "response")
            for name in (f"{side}_valid", f"{side}_ready", f"{side}_payload")
        }
        waiting = [[] for _ in range(self._channels)]  # (due cycle, id, fault), oldest first
        edge = RisingEdge(self._dut.clk)
        ready = False
        held = None
        while True:
            now = cycle()
            wanted = not self.backpressure or rng.random() >= self.backpressure
            if wanted != ready:
                port["request_ready"].value = int(wanted)
            ready = wanted
            order = [queue for queue in waiting if queue and queue[0][0] <= now]
            if order:
                _, tag, fault = rng.choice(order).pop(0)
                answer = {"id": tag, "write": 1, "fault": fault.value}
                port["response_payload"].value = pack(FabricResponse, answer)
                self.answered.append(now)
            port["response_valid"].value = int(bool(order))
            await edge
            if order:
                assert port["response_ready"].value, "an answer was not taken"
            if not port["request_valid"].value:
                assert held is None, "a request was withdrawn"
                continue
            bits = value(port["request_payload"])
            assert held in (None, bits), "a request changed before it was taken"
            held = None if ready else bits
            if ready:
                self._take(unpack(FabricRequest, bits), cycle() - 1, waiting)

    def _take(self, request, now, waiting):
        line = request["line"]
        assert request["write"] == 1
        assert request["poison"] == 0
        assert request["enable"] == (1 << 64) - 1
        fault = self.denied.get(line, Fault.NONE)
        self.writes.append((now, line))
        if fault == Fault.NONE:
            assert line not in self.memory, f"line {line:#x} was written twice"
            self.memory[line] = (request["tenant"], request["data"].to_bytes(64, "little"))
        queue = waiting[line % self._channels]
        queue.append((now + self._rng.randint(*self.latency), request["id"], fault))
        self.most_open = max(self.most_open, sum(map(len, waiting)))
