# amaranth: UnusedElaboratable=no
"""What every opcode of a Type 3 device answers and does, in every order with the others on the same line.

`RULES` is the golden model: a row for each opcode of CXL 3.1 sections 3.3.5 (M2S Req) and 3.3.6 (M2S RwD)
that a device with host-only coherent memory (HDM-H) gets from a host without TEE. Such a device keeps no meta
state, so what a message says of SnpType, MetaField and MetaValue changes nothing, and every answer has
MetaField No-Op.

The bench is endpoint, fabric and channels, over the fixed memory and over DRAM, whose controllers change the
order of accesses.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product

import cocotb
import memory_system
import pytest
from host_model import ALL, Host, req, rwd
from memory_system import MemorySystem, claim
from nearkv_hw.abi import configure, cxl
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import cycles, random, start

CHANNELS = 2


@dataclass(frozen=True)
class Rule:
    """What an opcode does to its line, and the one message that answers it."""

    stream: str  # req or rwd
    opcode: int
    answer: str | None  # ndr: Cmp (0); drs: MemData (0)
    writes: str = ""  # "line", or "bytes": those that are enabled


RULES = {
    "MemInv": Rule("req", 0, "ndr"),
    "MemRd": Rule("req", 1, "drs"),
    "MemRdData": Rule("req", 2, "drs"),
    "MemSpecRd": Rule("req", 8, None),
    "MemInvNT": Rule("req", 9, "ndr"),
    "MemClnEvct": Rule("req", 10, "ndr"),
    "MemWr": Rule("rwd", 1, "ndr", "line"),
    "MemWrPtl": Rule("rwd", 2, "ndr", "bytes"),
}
NO_OP = 3
"""MetaField of an answer without meta state."""


class Golden:
    """The memory after each message, one message after the other."""

    def __init__(self):
        self.data, self.poison = {}, {}

    def apply(self, name, message):
        """The fields of the answer, or None."""
        rule, header = RULES[name], message.get("header", message)
        line = header["address"]
        old, poisoned = self.data.get(line, 0), self.poison.get(line, 0)
        if rule.writes:
            enable = message["enable"] if rule.writes == "bytes" else ALL
            mask = sum(0xFF << 8 * i for i in range(LINE_BYTES) if enable >> i & 1)
            self.data[line] = old & ~mask | message["data"] & mask
            # Poison stays until the whole line is written: what else it held is lost.
            self.poison[line] = header["poison"] or (poisoned and enable != ALL)
        if rule.answer is None:
            return None
        answer = {
            "valid": 1,
            "opcode": 0,
            "meta_field": NO_OP,
            "meta_value": 0,
            "tag": header["tag"],
            "ld_id": header["ld_id"],
        }
        if rule.answer == "ndr":
            return answer
        return {**answer, "poison": int(poisoned), "reserved": 0, "data": old}


def test_the_rules_are_the_devices_opcodes():
    """The table names every opcode that the device has, and agrees with the abi's."""
    reqs = {rule.opcode: rule for rule in RULES.values() if rule.stream == "req"}
    assert set(reqs) == {int(opcode) for opcode in cxl.READS | cxl.NO_OPERATIONS}
    for opcode, rule in reqs.items():
        assert cxl.req_answer(opcode).name == (rule.answer or "none").upper()
    assert {rule.opcode for rule in RULES.values() if rule.stream == "rwd"} == set(map(int, cxl.WRITES))


@pytest.mark.rtl
@pytest.mark.parametrize("dram", ["fixed", "ddr5_6400"])
def test_opcodes(dram):
    config = configure("small", dram=dram, channels=CHANNELS, capacity_bytes=CHANNELS * EXTENT_BYTES)
    system = MemorySystem(config=config)
    run(
        system,
        module=__file__,
        parameters={"outstanding": system.endpoint.outstanding, "queues": dram != "fixed"},
    )


class Bench:
    """A host at the first port of a device whose memory is all its own, and what it should see."""

    def __init__(self, dut, rng, idle=0.0, backpressure=0.0):
        self.host = Host(dut, idle, backpressure, port=0)
        self.golden = Golden()
        self._dut, self._rng = dut, rng
        self._tag = 0

    async def send(self, messages):
        """Send (name, message)s of one stream; all are taken then."""
        source = getattr(self.host, RULES[messages[0][0]].stream)
        source.send([message for _, message in messages])
        await source.drained()

    def message(self, name, line, **more):
        """A message of this name, of a tag of its own; fields that must not matter are random."""
        rng, rule = self._rng, RULES[name]
        self._tag += 1
        fields = {
            "tag": self._tag,
            "ld_id": rng.randrange(16),
            "snoop": rng.randrange(4),
            "meta_field": rng.choice([0, 1, 3]),
            "meta_value": rng.randrange(4),
            "traffic_class": rng.randrange(4),
        }
        if rule.stream == "req":
            return req(rule.opcode, line, **fields, address_5=rng.randrange(2))
        fields |= {"poison": int(rng.random() < 0.15), **more}
        enable = rng.choice([ALL, 0, rng.getrandbits(64)]) if rule.writes == "bytes" else rng.getrandbits(64)
        return rwd(rule.opcode, line, rng.getrandbits(512), enable=enable, **fields)

    async def check(self, messages):
        """Every answer to (name, message)s, in the order in which they were accepted, and no other.

        Returns the tags of both kinds of answers as they came.
        """
        expected = {"ndr": {}, "drs": {}}
        for name, message in messages:
            answer = self.golden.apply(name, message)
            if answer is not None:
                expected[RULES[name].answer][answer["tag"]] = answer
        ndrs = await self.host.ndr.receive(len(expected["ndr"]))
        drss = await self.host.drs.receive(len(expected["drs"]))
        got = {
            "ndr": {ndr["tag"]: ndr for ndr in ndrs},
            "drs": {drs["header"]["tag"]: {**drs["header"], "data": drs["data"]} for drs in drss},
        }
        for kind, answers in got.items():
            for answer in answers.values():
                del answer["dev_load"]  # test_dev_load has it
            assert answers == expected[kind]
        await cycles(self._dut, 100)
        assert len(self.host.ndr) == len(self.host.drs) == 0, "more answers than messages"
        return {kind: list(answers) for kind, answers in got.items()}


line_of = partial(memory_system.line_of, channels=CHANNELS)


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.4], backpressure=[0.0, 0.6])
async def every_three_in_every_order(dut, idle, backpressure):
    """All 512 sequences of three opcodes, each on a line of its own.

    A message follows as soon as the one before is taken, long before that is done.
    """
    rng = random("triples", idle, backpressure)
    await start(dut)
    bench = Bench(dut, rng, idle, backpressure)
    await claim(dut, channels=CHANNELS)
    sent = []
    sequences = list(product(RULES, repeat=3))
    rng.shuffle(sequences)
    for n, names in enumerate(sequences):
        line = line_of(n)
        # A known line, often a poisoned one.
        messages = [("MemWr", bench.message("MemWr", line, poison=rng.randrange(2)))]
        messages += [(name, bench.message(name, line)) for name in names]
        for message in messages:
            await bench.send([message])
        sent += messages
    tags = await bench.check(sent)
    assert tags["ndr"] != sorted(tags["ndr"]), "completions that need no memory overtake writes"


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.7])
async def both_streams_on_few_lines(dut, idle, backpressure):
    """Req and RwD side by side, at once as often as not, on lines that many messages under way are for."""
    rng = random("few lines", idle, backpressure)
    await start(dut)
    bench = Bench(dut, rng, idle, backpressure)
    await claim(dut, channels=CHANNELS)
    lines = [line_of(n) for n in range(6)]
    known = [("MemWr", bench.message("MemWr", line, poison=0)) for line in lines]
    await bench.send(known)
    names = {stream: [n for n, rule in RULES.items() if rule.stream == stream] for stream in ("req", "rwd")}
    messages = {
        stream: [(name, bench.message(name, rng.choice(lines))) for name in rng.choices(of_stream, k=500)]
        for stream, of_stream in names.items()
    }
    for stream, named in messages.items():
        getattr(bench.host, stream).send([message for _, message in named])
    await bench.host.req.drained()
    await bench.host.rwd.drained()
    by_tag = {
        message.get("header", message)["tag"]: name
        for name, message in known + messages["req"] + messages["rwd"]
    }
    order = bench.host.arrived(
        [message for _, message in messages["req"]], [message for _, message in known + messages["rwd"]]
    )
    await bench.check([(by_tag[message.get("header", message)["tag"]], message) for message in order])


@cocotb.test()
async def reads_complete_out_of_order(dut):
    """A read of an idle channel is answered before older reads that wait for a busy one."""
    rng = random("order")
    await start(dut)
    bench = Bench(dut, rng)
    await claim(dut, channels=CHANNELS)
    # Every other line of a channel lies in the same sub-channel, which needs two cycles for each.
    places = [*(line_of(4 * n) for n in range(16)), line_of(1)]
    writes = [("MemWr", bench.message("MemWr", line, poison=0)) for line in places]
    await bench.send(writes)
    await bench.check(writes)
    reads = [("MemRd", bench.message("MemRd", line)) for line in places]
    await bench.send(reads)
    tags = (await bench.check(reads))["drs"]
    of_idle = reads[-1][1]["tag"]
    # The fixed memory takes a line per cycle, so nothing waits there.
    assert (tags[-1] == of_idle) == (not parameters()["queues"])
    assert [tag for tag in tags if tag != of_idle] == [message["tag"] for _, message in reads[:-1]]


@cocotb.test()
async def a_speculative_read_holds_no_place(dut):
    """Many times as many as may be under way, and then as many reads: none is in the way of another."""
    rng = random("speculative")
    await start(dut)
    bench = Bench(dut, rng)
    await claim(dut, channels=CHANNELS)
    count = parameters()["outstanding"]
    spec = [("MemSpecRd", bench.message("MemSpecRd", line_of(n))) for n in range(3 * count)]
    line = [("MemWr", bench.message("MemWr", line_of(0), poison=0))]
    reads = [("MemRd", bench.message("MemRd", line_of(0))) for _ in range(count)]
    for named in (line, spec, reads):
        await bench.send(named)
    await bench.check(line + spec + reads)
