# amaranth: UnusedElaboratable=no
"""A port of the endpoint between a host and a memory that answers in any order.

The random run sends messages of every opcode to every kind of address and checks the accesses that come out,
in order, and every answer, while the link opens and closes; then directed: latency, shares, outstanding
messages, hosts that take nothing, load, counters.
"""

from collections import Counter

import cocotb
import pytest
from host_model import (
    ALL,
    Host,
    Responder,
    answer,
    kind,
    place,
    req,
    request_of,
    rwd,
    seen,
    unsupported,
    valid,
)
from nearkv_hw.abi import configure, cxl
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.owner import OWNER_BYTES
from nearkv_hw.abi.window import WINDOW_BYTES
from nearkv_hw.endpoint.answers import Answers
from nearkv_hw.endpoint.arrivals import Arrivals
from nearkv_hw.endpoint.decode import Decoder
from nearkv_hw.endpoint.port import EVENTS, Port
from nearkv_hw.interfaces import FabricRequest, FabricResponse
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start, value

APERTURES = 3
"""With several logical devices 4."""
CAPACITY_LINES = (4 << 20) // LINE_BYTES
WINDOW_LINES = WINDOW_BYTES // LINE_BYTES
END_LINE = WINDOW_LINES + OWNER_BYTES // LINE_BYTES


OUTSTANDING = 78


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("apertures", "logical_devices", "tests"), [(APERTURES, 1, ".*"), (4, 2, "every_.*"), (4, 4, "every_.*")]
)
def test_port(apertures, logical_devices, tests):
    config = configure(
        "small",
        capacity_bytes=CAPACITY_LINES * LINE_BYTES,
        channels=1,
        apertures=apertures,
        logical_devices=logical_devices,
    )
    port = Port(config=config, outstanding=OUTSTANDING)
    run(
        port,
        module=__file__,
        parameters={
            "request_cycles": port.request_cycles,
            "answer_cycles": port.answer_cycles,
            "apertures": apertures,
            "logical_devices": logical_devices,
        },
        tests=tests,
    )


def test_parameters_are_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        Port(config="small", outstanding=OUTSTANDING)
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        Decoder(config="small")
    for component in (Answers, lambda outstanding: Port(config=configure(), outstanding=outstanding)):
        with pytest.raises(ValueError, match="outstanding must be an integer of at least 8, not 7"):
            component(outstanding=7)
    with pytest.raises(ValueError, match="content_depth must be an integer of at least 2, not 1"):
        Arrivals(content_depth=1)


async def begin(dut):
    """Start the port with its link open."""
    await start(dut)
    dut.m2s_open.value = dut.s2m_open.value = 1


class Link:
    """Opens and closes both directions at random, and counts the port's events."""

    def __init__(self, dut, rng, closed=0.0):
        self.counted = Counter()
        self._dut, self._rng, self._closed = dut, rng, closed
        cocotb.start_soon(self._run())

    async def _run(self):
        dut = self._dut
        while True:
            dut.m2s_open.value = self._rng.random() >= self._closed
            dut.s2m_open.value = self._rng.random() >= self._closed
            await cycles(dut, 1)
            self.counted.update(name for name in EVENTS if value(getattr(dut, name)))


def random_line(rng):
    """A line address: in each aperture's memory and window and at their edges, and outside."""
    apertures = parameters()["apertures"]
    base = rng.randrange(apertures) * 2 * CAPACITY_LINES
    return rng.choice(
        [
            base + rng.randrange(CAPACITY_LINES),
            base + rng.choice([0, CAPACITY_LINES - 1, CAPACITY_LINES // 2 - 1, CAPACITY_LINES // 2]),
            base + CAPACITY_LINES + rng.randrange(WINDOW_LINES),
            base + CAPACITY_LINES + rng.choice([0, WINDOW_LINES - 1]),
            base + CAPACITY_LINES + rng.choice([WINDOW_LINES, END_LINE - 1, END_LINE, CAPACITY_LINES - 1]),
            rng.randrange(2 * CAPACITY_LINES * apertures, 1 << 46),
            base + rng.randrange(64) | 1 << rng.randrange(34, 46),
        ]
    )


def random_messages(rng, count):
    """Req and RwD messages of every opcode; few tags, so that the same is often twice under way."""
    tags = [rng.getrandbits(16) for _ in range(5)] + [0, 0xFFFF]
    apertures, several = parameters()["apertures"], parameters()["logical_devices"]

    def with_own_ld_id(message):
        """Of several logical devices most messages have the LD-ID of their aperture."""
        header = message.get("header", message)
        if several > 1 and rng.random() < 0.8:
            header["ld_id"] = header["address"] // (2 * CAPACITY_LINES) * several // apertures % 16
        return message

    def fields():
        return {
            "valid": int(rng.random() < 0.95),
            "tag": rng.choice(tags),
            "ld_id": rng.randrange(16),
            "snoop": rng.randrange(4),
            "meta_field": rng.randrange(4),
            "meta_value": rng.randrange(4),
            "traffic_class": rng.randrange(4),
            "reserved": rng.randrange(64),
        }

    def opcode(usual):
        return rng.choice(usual) if rng.random() < 0.6 else rng.randrange(16)

    reqs = [
        with_own_ld_id(req(opcode([1, 2]), random_line(rng), **{**fields(), "address_5": rng.randrange(2)}))
        for _ in range(count)
    ]
    rwds = [
        with_own_ld_id(
            rwd(
                opcode([1, 2]),
                random_line(rng),
                rng.getrandbits(512),
                enable=rng.choice([ALL, 0, rng.getrandbits(64)]),
                **{**fields(), "poison": rng.randrange(2)},
            )
        )
        for _ in range(count)
    ]
    return reqs, rwds


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.7])
async def every_message_has_its_answer(dut, idle, backpressure):
    rng = random("messages", idle, backpressure)
    await begin(dut)
    host = Host(dut, idle, backpressure)
    link = Link(dut, random("link"), closed=idle)
    ports = {name: Responder(dut, name, random(name), idle, backpressure) for name in ("memory", "window")}
    apertures, several = parameters()["apertures"], parameters()["logical_devices"]
    reqs, rwds = random_messages(rng, 400 if several == 1 else 1500)
    host.req.send(reqs)
    host.rwd.send(rwds)
    messages = [m for m in reqs + rwds if valid(m)]
    ndr_count = sum(kind(m) in ("write", "complete") for m in messages)
    drs_count = sum(kind(m) in ("read", "refuse") for m in messages)
    ndrs, drss = await host.ndr.receive(ndr_count), await host.drs.receive(drs_count)
    await host.req.drained()
    await host.rwd.drained()
    await cycles(dut, 50)
    assert len(host.ndr) == len(host.drs) == 0, "more answers than messages"

    expected, requests = Counter(), {"memory": [], "window": []}
    counted = Counter()
    for message in host.arrived(reqs, rwds):
        where, tenant, line = place(message, CAPACITY_LINES, apertures, several)
        fault, data = 3, 0
        if kind(message) in ("read", "write"):
            if where != "outside":
                fault, data = ports[where].answers[len(requests[where])]
                requests[where].append(request_of(message, tenant, line))
            counted[f"{'link' if where != 'outside' else 'outside'}_{kind(message)}s"] += 1
        counted["unsupported"] += unsupported(message)
        expected[answer(message, fault, data)] += 1
    del expected[None]
    for name, port in ports.items():
        asked = [
            {k: v for k, v in request.items() if request["write"] or k not in ("poison", "enable", "data")}
            for request in port.requests
        ]
        assert asked == requests[name]
        assert len(asked) > 50
    assert Counter(seen(ndrs, drss)) == expected
    assert link.counted["link_reads"] == counted["link_reads"] + counted["outside_reads"]
    assert link.counted["link_writes"] == sum(valid(m) for m in rwds)
    for name in ("outside_reads", "outside_writes", "unsupported"):
        assert link.counted[name] == counted[name] > 20


@cocotb.test()
async def has_stated_latency_and_rate(dut):
    await begin(dut)
    host = Host(dut)
    asked = StreamSink(dut, "memory_request", shape=FabricRequest)
    answers = StreamSource(dut, "memory_response", shape=FabricResponse)
    count = OUTSTANDING
    host.req.send([req(cxl.M2SReqOp.MEM_RD, i, tag=i) for i in range(count)])
    await asked.receive(count)
    assert {b - a for a, b in zip(host.req.cycles, asked.cycles, strict=True)} == {
        parameters()["request_cycles"]
    }
    assert asked.cycles[-1] - asked.cycles[0] == count - 1
    answers.send([{"id": i} for i in range(count)])
    assert [drs["header"]["tag"] for drs in await host.drs.receive(count)] == list(range(count))
    assert {b - a for a, b in zip(answers.cycles, host.drs.cycles, strict=True)} == {
        parameters()["answer_cycles"]
    }
    host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, i, i, tag=i) for i in range(count)])
    requests = await asked.receive(count)
    assert [r["data"] for r in requests] == list(range(count))
    assert asked.cycles[-1] - asked.cycles[-count] == count - 1


@cocotb.test()
async def both_streams_have_half_each(dut):
    await begin(dut)
    host = Host(dut)
    asked = StreamSink(dut, "memory_request", shape=FabricRequest)
    count = 30
    host.req.send([req(cxl.M2SReqOp.MEM_RD, i) for i in range(count)])
    host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, i, 0) for i in range(count)])
    writes = [request["write"] for request in await asked.receive(2 * count)]
    assert asked.cycles[-1] - asked.cycles[0] == 2 * count - 1
    # In every window of twelve accesses each stream has half, give or take the tie.
    assert all(4 <= sum(writes[i : i + 12]) <= 8 for i in range(2 * count - 12))


@cocotb.test()
async def many_reads_and_as_many_writes_are_under_way(dut):
    await begin(dut)
    host = Host(dut)
    asked = StreamSink(dut, "memory_request", shape=FabricRequest)
    host.req.send([req(cxl.M2SReqOp.MEM_RD, i) for i in range(2 * OUTSTANDING)])
    host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, i, 0) for i in range(2 * OUTSTANDING)])
    await cycles(dut, 4 * OUTSTANDING)
    assert len(host.req.cycles) == len(host.rwd.cycles) == OUTSTANDING
    assert len(asked) == 2 * OUTSTANDING


@cocotb.test()
@cocotb.parametrize(stopped=["ndr", "drs"])
async def a_host_that_takes_no_answers_of_one_kind_loses_nothing(dut, stopped):
    await begin(dut)
    host = Host(dut)
    Responder(dut, "memory", random("memory"))
    going = "drs" if stopped == "ndr" else "ndr"
    getattr(host, stopped).backpressure = 1.0
    count = 4 * OUTSTANDING
    host.req.send([req(cxl.M2SReqOp.MEM_RD, i, tag=i) for i in range(count)])
    host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, i, i, tag=i) for i in range(count)])

    def tags(items):
        return sorted(item.get("header", item)["tag"] for item in items)

    assert tags(await getattr(host, going).receive(count)) == list(range(count))
    assert len(getattr(host, stopped)) == 0
    getattr(host, stopped).backpressure = 0.3
    assert tags(await getattr(host, stopped).receive(count)) == list(range(count))


@cocotb.test()
async def load_follows_what_has_no_answer_yet(dut):
    """The first answer tells how many were in the device, the last one that it is empty, taken or not."""
    await begin(dut)
    host = Host(dut)
    memory = Responder(dut, "memory", random("memory"))
    load = cxl.DevLoad
    for owed, expected in (
        (OUTSTANDING // 4 - 1, load.LIGHT),
        (OUTSTANDING * 2 // 8, load.OPTIMAL),
        (OUTSTANDING * 6 // 8 - 1, load.OPTIMAL),
        (OUTSTANDING * 6 // 8, load.MODERATE_OVERLOAD),
        (OUTSTANDING * 7 // 8 - 1, load.MODERATE_OVERLOAD),
        (OUTSTANDING * 7 // 8, load.SEVERE_OVERLOAD),
        (OUTSTANDING, load.SEVERE_OVERLOAD),
    ):
        for stream, message in (
            (host.req, req(cxl.M2SReqOp.MEM_RD, 1)),
            (host.rwd, rwd(cxl.M2SRwDOp.MEM_WR, 1, 0)),
        ):
            memory.holding = True
            host.ndr.backpressure = host.drs.backpressure = 1.0
            await cycles(dut, 2)
            stream.send([message] * owed)
            await stream.drained()
            await cycles(dut, 8)
            memory.holding = False
            await cycles(dut, 6 * OUTSTANDING)
            host.ndr.backpressure = host.drs.backpressure = 0.0
            answers = await (host.drs if stream is host.req else host.ndr).receive(owed)
            loads = [a.get("header", a)["dev_load"] for a in answers]
            assert loads == sorted(loads, reverse=True)
            assert (loads[0], loads[-1]) == (int(expected), int(load.LIGHT)), (owed, expected)


@cocotb.test()
async def load_is_no_less_than_the_memorys(dut):
    await begin(dut)
    host = Host(dut)
    memory = Responder(dut, "memory", random("memory"))
    memory.holding = True
    count = OUTSTANDING * 6 // 8
    for behind in cxl.DevLoad:
        dut.load.value = int(behind)
        await cycles(dut, 4)
        host.req.send([req(cxl.M2SReqOp.MEM_RD, 1)] * count)
        await host.req.drained()
        await cycles(dut, 8)
        memory.holding = False
        loads = [drs["header"]["dev_load"] for drs in await host.drs.receive(count)]
        memory.holding = True
        assert loads[0] == max(behind, cxl.DevLoad.MODERATE_OVERLOAD)
        assert loads[-1] == behind


@cocotb.test()
async def a_closed_link_takes_and_offers_nothing(dut):
    await begin(dut)
    host = Host(dut)
    Responder(dut, "memory", random("memory"))
    dut.m2s_open.value = 0
    host.req.send([req(cxl.M2SReqOp.MEM_RD, 1)])
    host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, 1, 0)])
    await cycles(dut, 50)
    assert not host.req.cycles + host.rwd.cycles
    dut.m2s_open.value, dut.s2m_open.value = 1, 0
    await host.req.drained()
    await host.rwd.drained()
    await cycles(dut, 100)
    assert not host.ndr.cycles + host.drs.cycles
    # What was offered while the link was open stays (the sinks check it), and nothing else begins.
    host.ndr.backpressure = host.drs.backpressure = 1.0
    await cycles(dut, 2)
    dut.s2m_open.value = 1
    await cycles(dut, 1)
    dut.s2m_open.value = 0
    await cycles(dut, 20)
    host.req.send([req(cxl.M2SReqOp.MEM_RD, 1)])
    host.ndr.backpressure = host.drs.backpressure = 0.0
    await cycles(dut, 100)
    assert len(host.ndr.cycles) == len(host.drs.cycles) == 1
