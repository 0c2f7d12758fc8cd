# amaranth: UnusedElaboratable=no
"""HDM decoders: RTL equals the closed form over all ways and granularities, and keeps the commit rules."""

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from hdm_vectors import MODULO, XOR
from nearkv_hw.abi import hdm
from nearkv_hw.abi.hdm import CONTROL, DECODER, DECODER_STRIDE, FIRST_DECODER, GLOBAL_CONTROL, WAYS
from nearkv_hw.endpoint.hdm.commit import Check
from nearkv_hw.endpoint.hdm.decoders import Decoders, DvsecRange, RegisterWrite
from nearkv_hw.endpoint.hdm.third import Third
from nearkv_hw.endpoint.hdm.translate import Translate, Translated
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import random, start, value
from nearkv_sim.cxl_io.hdm import HdmDecoders
from pipe_bench import through

UNIT = 256 << 20
COUNT = 10
CAPACITY = 5000
CASES = 100_000


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="width must be an integer from 2 on, not 1"):
        Third(width=1)
    with pytest.raises(ValueError, match="ranges must be a positive integer, not 0"):
        Translate(ranges=0)
    with pytest.raises(ValueError, match=r"capacity must be 1 to 16777215 units, not 0"):
        Check(capacity=0)
    with pytest.raises(ValueError, match="decoders must be one of"):
        Decoders(decoders=3, capacity=1)


@pytest.mark.rtl
@pytest.mark.parametrize("width", [2, 5, 24, 44])
def test_third(width):
    run(Third(width=width), module=__file__, parameters={"width": width}, tests="divides_by_three")


@cocotb.test()
async def divides_by_three(dut):
    width = parameters()["width"]
    await start(dut)
    rng = random("dividends")
    top = (1 << width) - 1
    numbers = [*range(min(top, 700) + 1), *range(max(0, top - 700), top + 1)]
    numbers += [rng.getrandbits(width) >> rng.randrange(width) for _ in range(5000)]
    items = [{"dividend": number} for number in numbers]
    async for given, out in through(
        dut, {"dividend": width}, {"quotient": width, "divides": 1}, items, Third.latency_cycles
    ):
        number = given["dividend"]
        assert (out["quotient"], out["divides"]) == (number // 3, number % 3 == 0), number


@pytest.mark.rtl
def test_decoders():
    run(Decoders(decoders=COUNT, capacity=CAPACITY), module=__file__, tests="decoders_.*")


class Bench:
    """The block and its model, written and asked alike."""

    def __init__(self, dut):
        self.dut = dut
        self.model = HdmDecoders(COUNT, CAPACITY * UNIT)
        self.edge = RisingEdge(dut.clk)

    async def write(self, offset, data):
        self.dut.write_payload.value = pack(RegisterWrite, {"word": offset // 4, "data": data})
        self.dut.write_valid.value = 1
        await self.edge
        while not value(self.dut.write_ready):
            await self.edge
        self.dut.write_valid.value = 0
        self.model.write(offset, data)

    async def same_registers(self):
        """Every register, once no commit is under way."""
        for _ in range(Check.latency_cycles + 3):
            await self.edge
        offsets = range(0, FIRST_DECODER + COUNT * DECODER_STRIDE, 4)
        items = [{"read_word": offset // 4} for offset in offsets]
        async for given, out in through(self.dut, {"read_word": 9}, {"read_data": 32}, items, 1):
            offset = given["read_word"] * 4
            assert out["read_data"] == self.model.read(offset), hex(offset)

    async def same_translations(self, addresses):
        """Each host address, one per cycle; returns how many were some range's."""
        dut, hits = self.dut, 0
        latency = Translate.latency_cycles
        addresses = list(addresses)
        for cycle in range(len(addresses) + latency):
            if cycle < len(addresses):
                dut.i_0_payload.value = addresses[cycle] >> 6
            dut.i_0_valid.value = cycle < len(addresses)
            await self.edge
            assert value(dut.o_0_valid) == (cycle >= latency)
            if cycle >= latency:
                address = addresses[cycle - latency]
                out = unpack(Translated, value(dut.o_0_payload))
                expected = self.model.translate(address)
                assert out["hit"] == (expected is not None), hex(address)
                assert expected is None or out["line"] == expected >> 6, hex(address)
                hits += out["hit"]
        dut.i_0_valid.value = 0
        return hits

    async def decoder(self, n, *, base, size, skip, **control):
        at = FIRST_DECODER + n * DECODER_STRIDE
        for name, data in (("base", base), ("size", size), ("skip", skip)):
            await self.write(at + DECODER[f"{name}_low"].at, data & 0xFFFFFFFF)
            await self.write(at + DECODER[f"{name}_high"].at, data >> 32)
        await self.write(at + CONTROL.at, CONTROL.pack(control))

    async def take_back(self):
        for n in reversed(range(COUNT)):
            await self.write(FIRST_DECODER + n * DECODER_STRIDE + CONTROL.at, 0)


async def bench_of(dut):
    for name in ("write_valid", "read_word", "clear", "i_0_valid", "dvsec_0", "dvsec_1"):
        getattr(dut, name).value = 0
    await start(dut)
    return Bench(dut)


@cocotb.test()
async def decoders_equal_the_closed_form(dut):
    """Random decoders, one behind the other, of all ways and granularities; addresses in, between and at the
    ends of their ranges."""
    bench = await bench_of(dut)
    rng = random("decoders")
    await bench.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=1))
    combinations = [(ways, granularity) for ways in WAYS for granularity in range(hdm.MAX_GRANULARITY + 1)]
    left, met, hits = CASES, set(), 0
    while left > 0:
        rng.shuffle(combinations)
        host = rng.randrange(4) if rng.random() < 0.8 else rng.randrange(1 << 23)
        addresses = []
        for n, (ways, granularity) in enumerate(combinations[:COUNT]):
            size = WAYS[ways] * rng.choice([1, 2, 3, rng.randrange(1, 40)])
            host += rng.choice([0, 0, rng.randrange(100)])
            skip = rng.choice([0, 0, rng.randrange(3)])
            await bench.decoder(
                n, base=host * UNIT, size=size * UNIT, skip=skip * UNIT, ways=ways,
                granularity=granularity, commit=1, position=rng.randrange(16),
            )  # fmt: skip
            met.add((ways, granularity))
            base, end = host * UNIT, (host + size) * UNIT
            addresses += [max(0, base - 64), base, end - 64, end]
            addresses += [rng.randrange(base, end) & ~63 for _ in range(75)]
            addresses += [
                min(base + (rng.getrandbits(40) >> rng.randrange(34)), end) & ~63 for _ in range(15)
            ]
            host += size
        addresses += [rng.getrandbits(52) & ~63 for _ in range(10)]
        rng.shuffle(addresses)
        await bench.same_registers()
        assert all(bench.model.committed)
        hits += await bench.same_translations(addresses)
        left -= len(addresses)
        await bench.take_back()
    assert met == set(combinations)
    assert hits > 0.85 * CASES


@cocotb.test()
async def decoders_keep_their_rules(dut):
    """Random writes, sensible and senseless, in any order: registers and translations stay the same."""
    bench = await bench_of(dut)
    rng = random("rules")
    outcomes = set()
    locked = 0
    for _ in range(300):
        n = rng.choice([0, 0, 1, 2, rng.randrange(COUNT)])
        lock = int(rng.random() < 0.02 and locked < 3)
        locked += lock
        await bench.decoder(
            n,
            base=rng.choice([n * 20, rng.randrange(200), (1 << 24) - rng.randrange(1, 20)]) * UNIT,
            size=rng.choice([0, 1, 2, 12, 12, rng.randrange(20), CAPACITY + rng.randrange(-1, 2)]) * UNIT,
            skip=rng.choice([0, 0, 0, rng.randrange(CAPACITY)]) * UNIT,
            ways=rng.choice([0, 0, 1, 2, 8, 9, 10, rng.randrange(16)]),
            granularity=rng.choice([0, 6, rng.randrange(16)]),
            lock_on_commit=lock, commit=rng.choice([1, 1, 1, 0]), position=3,
        )  # fmt: skip
        await bench.same_registers()
        control = CONTROL.unpack(bench.model.read(FIRST_DECODER + n * DECODER_STRIDE + CONTROL.at))
        outcomes.add((control["committed"], control["error"]))
        if rng.random() < 0.2:
            await bench.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=rng.randrange(2)))
        if control["error"] or rng.random() < 0.3:
            await bench.write(FIRST_DECODER + n * DECODER_STRIDE + CONTROL.at, 0)
        for _ in range(2):
            await bench.edge
        await bench.same_translations(
            [rng.randrange(250) * UNIT + rng.randrange(UNIT) & ~63 for _ in range(20)]
        )
    assert outcomes >= {(1, 0), (0, 1), (0, 0)}
    assert locked


@cocotb.test()
async def decoders_give_the_published_translations(dut):
    bench = await bench_of(dut)
    await bench.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=1))
    published = {code: list(pairs) for code, pairs in XOR.items()}
    for offset, code, distances in MODULO:
        published[code] += [(offset, distance) for distance in distances]
    base = 3 * UNIT
    for code, pairs in published.items():
        size = -(-max(distance for _, distance in pairs) // (WAYS[code] * UNIT)) * WAYS[code] * UNIT
        await bench.decoder(0, base=base, size=size, skip=0, ways=code, granularity=0, commit=1)
        await bench.same_registers()
        for offset, distance in pairs:
            assert bench.model.translate(base + distance) == offset
        assert await bench.same_translations([base + (distance & ~63) for _, distance in pairs]) == len(pairs)
        await bench.take_back()


@cocotb.test()
async def decoders_leave_it_to_the_dvsec_until_they_are_enabled(dut):
    bench = await bench_of(dut)
    rng = random("ranges")
    bench.model.dvsec = [(5 * UNIT, 3 * UNIT), (100 * UNIT, 9 * UNIT)]
    for name, (base, size) in zip(("dvsec_0", "dvsec_1"), bench.model.dvsec, strict=True):
        ranged = {"active": 1, "base": base // UNIT, "size": size // UNIT}
        getattr(dut, name).value = pack(DvsecRange, ranged)
    addresses = [rng.randrange(120) * UNIT + rng.choice([0, UNIT - 64, rng.randrange(UNIT) & ~63])
                 for _ in range(500)]  # fmt: skip
    for _ in range(2):
        await bench.edge
    assert await bench.same_translations(addresses)
    await bench.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=1))
    for _ in range(2):
        await bench.edge
    assert await bench.same_translations(addresses) == 0
