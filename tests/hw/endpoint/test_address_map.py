# amaranth: UnusedElaboratable=no
"""HDM decoders between messages and memory: the endpoint equals decoders, and the aperture map behind them.

Decoders are programmed at random through the register port while nothing is under way; messages go to what
they decode, beside it, and to where the device was before. Then directed: after reset, locked decoders, the
DVSEC's ranges, latency and rate.
"""

from collections import Counter

import cocotb
import pytest
from host_model import Host, Responder, answer, kind, place, req, request_of, rwd, seen
from nearkv_hw.abi import configure, cxl, hdm
from nearkv_hw.abi.hdm import CONTROL, DECODER, DECODER_STRIDE, FIRST_DECODER, GLOBAL_CONTROL, WAYS
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.window import WINDOW_BYTES
from nearkv_hw.endpoint.endpoint import Endpoint
from nearkv_hw.endpoint.hdm.address_map import AddressMap
from nearkv_hw.endpoint.hdm.decoders import Decoders, RegisterWrite
from nearkv_hw.endpoint.port import request_cycles
from nearkv_hw.endpoint.translation import Translation
from nearkv_hw.interfaces import FabricRequest
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start, value
from nearkv_sim.cxl_io.hdm import HdmDecoders

UNIT = 256 << 20
APERTURES = 3
CAPACITY = 2 * UNIT
COUNT = 4
LOST = (1 << 46) - 1


def configuration(link):
    return configure("small", capacity_bytes=CAPACITY, apertures=APERTURES, hdm_decoders=COUNT, link=link)


def test_parameters_are_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        AddressMap(config="small", lookups=1)
    with pytest.raises(ValueError, match="lookups must be a positive integer, not 0"):
        Decoders(decoders=COUNT, capacity=1, lookups=0)


def test_a_device_without_decoders_has_none():
    without, with_them = configure("small"), configuration("x8_32")
    assert not hasattr(Endpoint(config=without), "decoder_write")
    assert request_cycles(with_them) == request_cycles(without) + Translation.latency_cycles


@pytest.mark.rtl
@pytest.mark.parametrize(("link", "tests"), [("x8_32", "one_.*"), ("x8_64", "two_.*")])
def test_address_map(link, tests):
    endpoint = Endpoint(config=configuration(link))
    run(
        endpoint,
        module=__file__,
        parameters={"request_cycles": endpoint.request_cycles, "ports": endpoint.ports},
        tests=tests,
    )


class Bench:
    """Registers of the decoders and their model, and a host and a memory for each port."""

    def __init__(self, dut, idle=0.0, backpressure=0.0):
        self.dut = dut
        self.model = HdmDecoders(COUNT, APERTURES * 2 * CAPACITY, dvsec=[(0, APERTURES * 2 * CAPACITY)])
        self.writes = StreamSource(dut, "decoder_write", shape=RegisterWrite)
        count = parameters()["ports"]
        self.hosts = [Host(dut, idle, backpressure, port=port) for port in range(count)]
        self.memories = [
            Responder(dut, f"memory_{port}", random("memory", port), idle, backpressure)
            for port in range(count)
        ]

    async def write(self, offset, data):
        self.model.write(offset, data)
        await self.put(offset // 4, data)

    async def put(self, word, data):
        """Write a register of any kind, and wait for what comes of it."""
        self.writes.send([{"word": word, "data": data}])
        await self.writes.drained()
        await cycles(self.dut, 1)
        while not value(self.dut.decoder_write_ready):
            await cycles(self.dut, 1)
        await cycles(self.dut, 2)

    async def decoder(self, n, *, base, size, skip=0, **control):
        at = FIRST_DECODER + n * DECODER_STRIDE
        for name, data in (("base", base), ("size", size), ("skip", skip)):
            await self.write(at + DECODER[f"{name}_low"].at, data & 0xFFFFFFFF)
            await self.write(at + DECODER[f"{name}_high"].at, data >> 32)
        await self.write(at + CONTROL.at, CONTROL.pack(control))

    async def ranges(self, *ranges):
        self.model.dvsec = ranges
        for n, (base, size) in enumerate(ranges):
            await self.put(hdm.RANGE_WORD + 2 * n, base // UNIT)
            await self.put(hdm.RANGE_WORD + 2 * n + 1, size // UNIT)

    async def same_registers(self):
        for offset in range(0, FIRST_DECODER + COUNT * DECODER_STRIDE, 4):
            self.dut.decoder_read_word.value = offset // 4
            await cycles(self.dut, 2)
            assert value(self.dut.decoder_read_data) == self.model.read(offset), hex(offset)

    def translated(self, message):
        """The message with the device's address."""
        header = message.get("header", message)
        found = self.model.translate(header["address"] * LINE_BYTES)
        header = {**header, "address": LOST if found is None else found // LINE_BYTES}
        return {**message, "header": header} if "header" in message else header

    async def check(self, port, reqs, rwds, where=("memory",)):
        """Send messages at a port: every access and every answer is what the model says; how many were of
        each place.

        `where` names the places to which this port's accesses are the only ones.
        """
        host, made = self.hosts[port], {"memory": self.memories[port]}
        if "window" in where:
            made["window"] = self.window
        before = {name: len(memory.requests) for name, memory in made.items()}
        sent = len(host.req.cycles), len(host.rwd.cycles)
        assert sent == (0, 0), "arrived() knows of one round"
        host.req.send(reqs)
        host.rwd.send(rwds)
        messages = reqs + rwds
        ndrs = await host.ndr.receive(sum(kind(m) in ("write", "complete") for m in messages))
        drss = await host.drs.receive(sum(kind(m) in ("read", "refuse") for m in messages))
        expected, requests, met = Counter(), {name: [] for name in made}, Counter()
        for message in map(self.translated, host.arrived(reqs, rwds)):
            at, tenant, line = place(message, CAPACITY // LINE_BYTES, APERTURES)
            met[at] += 1
            fault, data = 3, 0
            if at != "outside":
                fault, data = made[at].answers[before[at] + len(requests[at])]
                requests[at].append(request_of(message, tenant, line))
            expected[answer(message, fault, data)] += 1
        for name, memory in made.items():
            asked = [
                {
                    k: v
                    for k, v in request.items()
                    if request["write"] or k not in ("poison", "enable", "data")
                }
                for request in memory.requests[before[name] :]
            ]
            assert asked == requests[name]
        assert Counter(seen(ndrs, drss)) == expected
        host.req.cycles.clear()
        host.rwd.cycles.clear()
        return met


async def begin(dut, *shaking):
    await start(dut)
    dut.decoder_read_word.value = 0
    return Bench(dut, *shaking)


def messages_to(rng, addresses):
    """A MemRd or a MemWr to each host address; Req and RwD apart."""
    reqs, rwds = [], []
    for address in addresses:
        line, fields = address // LINE_BYTES, {"tag": rng.getrandbits(16), "ld_id": rng.randrange(16)}
        if rng.random() < 0.5:
            reqs.append(req(cxl.M2SReqOp.MEM_RD, line, **fields))
        else:
            rwds.append(rwd(cxl.M2SRwDOp.MEM_WR, line, rng.getrandbits(512), poison=0, **fields))
    return reqs, rwds


async def program(bench, rng):
    """Some decoders over parts of the device; addresses in them, at their ends and elsewhere."""
    host, addresses = rng.randrange(1 << 20), []
    for n in range(rng.randrange(1, COUNT + 1)):
        ways = rng.choice(list(WAYS))
        host += rng.choice([0, rng.randrange(50)])
        size = WAYS[ways] * rng.choice([1, 2])
        await bench.decoder(
            n, base=host * UNIT, size=size * UNIT, skip=rng.choice([0, 0, 1]) * UNIT, ways=ways,
            granularity=rng.randrange(7), commit=1,
        )  # fmt: skip
        base, end = host * UNIT, (host + size) * UNIT
        addresses += [base - LINE_BYTES, base, end - LINE_BYTES, end]
        addresses += [rng.randrange(base, end) & -LINE_BYTES for _ in range(40)]
        host += size
    for aperture in range(APERTURES):
        window = (2 * aperture + 1) * CAPACITY
        found = [bench.model.host_address(window + rng.randrange(WINDOW_BYTES)) for _ in range(10)]
        addresses += [address & -LINE_BYTES for address in found if address is not None]
    addresses += [rng.randrange(APERTURES * 2 * CAPACITY) & -LINE_BYTES for _ in range(10)]
    addresses += [rng.getrandbits(52) & -LINE_BYTES for _ in range(5)]
    rng.shuffle(addresses)
    return addresses


async def take_back(bench):
    for n in reversed(range(COUNT)):
        await bench.write(FIRST_DECODER + n * DECODER_STRIDE + CONTROL.at, 0)


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.7])
async def one_port_goes_where_the_decoders_say(dut, idle, backpressure):
    rng = random("decoders", idle, backpressure)
    bench = await begin(dut, idle, backpressure)
    bench.window = Responder(dut, "window", random("window"), idle, backpressure)
    met = Counter()
    places = ("memory", "window", "outside")
    for turn in range(60):
        if turn > 6 and all(met[where] > 15 for where in places):
            break
        enabled = int(turn % 6 > 0)
        await bench.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=enabled))
        addresses = await program(bench, rng)
        await bench.same_registers()
        met += await bench.check(0, *messages_to(rng, addresses), where=("memory", "window"))
        await take_back(bench)
    assert all(met[where] > 15 for where in places), met


@cocotb.test()
async def two_ports_have_the_same_decoders(dut):
    rng = random("two")
    bench = await begin(dut, 0.3, 0.3)
    await bench.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=1))
    for n, (base, size) in enumerate(((1000, 1), (2000, 1))):
        await bench.decoder(n, base=base * UNIT, size=size * UNIT, commit=1)
    addresses = [base * UNIT + offset * LINE_BYTES for base in (1000, 2000, 2001, 0) for offset in range(60)]
    checks = []
    for port in range(2):
        rng.shuffle(addresses)
        checks.append(cocotb.start_soon(bench.check(port, *messages_to(rng, addresses))))
    for check in checks:
        assert await check == Counter(memory=120, outside=120)


@cocotb.test()
async def one_reset_decodes_every_address_of_the_device(dut):
    rng = random("reset")
    bench = await begin(dut)
    everywhere = [a * 2 * CAPACITY + rng.randrange(CAPACITY) & -LINE_BYTES for a in range(APERTURES + 1)] * 9
    assert (await bench.check(0, *messages_to(rng, everywhere))) == Counter(memory=27, outside=9)
    await bench.decoder(0, base=UNIT, size=UNIT, commit=1, lock_on_commit=1)
    await bench.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=1))
    await bench.write(FIRST_DECODER + CONTROL.at, 0)
    await bench.same_registers()
    assert (await bench.check(0, *messages_to(rng, [UNIT] * 9))) == Counter(memory=9), "it is locked"
    bench.model.reset()
    await bench.put(hdm.RESET_WORD, 0)
    await bench.same_registers()
    assert (await bench.check(0, *messages_to(rng, everywhere))) == Counter(memory=27, outside=9)
    await bench.ranges((7 * UNIT, UNIT), (20 * UNIT, UNIT))
    await bench.same_registers()
    addresses = [n * UNIT + rng.randrange(UNIT) & -LINE_BYTES for n in (0, 6, 7, 8, 20, 21) for _ in range(9)]
    assert (await bench.check(0, *messages_to(rng, addresses))) == Counter(memory=18, outside=36)
    await bench.ranges((0, 0), (0, 0))
    assert (await bench.check(0, *messages_to(rng, addresses))) == Counter(outside=54)


@cocotb.test()
async def one_message_takes_as_long_as_is_stated(dut):
    await start(dut)
    dut.decoder_write_valid.value = 0
    host = Host(dut, port=0)
    asked = StreamSink(dut, "memory_0_request", shape=FabricRequest)
    await cycles(dut, 4)
    host.req.send([req(cxl.M2SReqOp.MEM_RD, 1)])
    await asked.receive(1)
    assert asked.cycles[0] - host.req.cycles[0] == parameters()["request_cycles"]
    count = 30
    host.req.send([req(cxl.M2SReqOp.MEM_RD, i) for i in range(count)])
    await asked.receive(count)
    # A link of x8 at 32 GT/s brings 0.65 reads' slots and more in a cycle; none waits for the decoders.
    assert {b - a for a, b in zip(host.req.cycles, asked.cycles, strict=True)} == {
        parameters()["request_cycles"]
    }
