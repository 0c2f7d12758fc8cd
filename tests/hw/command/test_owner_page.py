"""The owner's page: quotas, holdings and the log, against the software model's page alike."""

import random

import numpy as np
import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi import LINE_BYTES, configure
from nearkv_hw.abi.config import EXTENT_SHIFT
from nearkv_hw.abi.lines import LINE_SHIFT
from nearkv_hw.abi.owner import (
    AUDIT,
    AUDIT_LINE,
    HOLDINGS_LINE,
    QUOTAS_LINE,
    RECORD,
    RECORDS,
    RECORDS_LINE,
    WEIGHTS,
    WEIGHTS_LINE,
    Violation,
)
from nearkv_hw.command.owner import OWNER_LINES, OwnerPage
from nearkv_sim.model.audit import OwnerPage as Model
from nearkv_sim.model.counters import Counters

CONFIG = configure("small", apertures=3, capacity_bytes=32 << 20)
ALL = (1 << LINE_BYTES) - 1


def test_config_is_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        OwnerPage(config="small")


def simulate(bench):
    page = OwnerPage(config=CONFIG)
    simulator = Simulator(page)
    simulator.add_clock(1e-6)

    async def run(ctx):
        await bench(ctx, page)

    simulator.add_testbench(run)
    simulator.run()


async def access(ctx, page, line, given=None, enable=ALL):
    """Read or write a line; what it held before, and whether the write was refused."""
    ctx.set(page.access, 1)
    ctx.set(page.line, line)
    ctx.set(page.write, given is not None)
    ctx.set(page.given, given or 0)
    ctx.set(page.enable, enable)
    refused = ctx.get(page.refused)
    await ctx.tick()
    ctx.set(page.access, 0)
    return ctx.get(page.data), refused


async def report(ctx, page, line, tenant, kind):
    """Report a violation, and wait until the log is done with it; how long that took."""
    ctx.set(page.reports.payload.line, line)
    ctx.set(page.reports.payload.tenant, tenant)
    ctx.set(page.reports.payload.kind, kind)
    ctx.set(page.reports.valid, 1)
    await ctx.tick()
    ctx.set(page.reports.valid, 0)
    took = 1
    while not ctx.get(page.reports.ready):
        await ctx.tick()
        took += 1
    assert took <= page.report_cycles
    return took


def test_same_as_the_model():
    """Random reports, reads and writes of everything: every line of the page is the model's."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    counters = Counters(CONFIG)
    model = Model(CONFIG, counters)
    owners = np.array([chance.randrange(-3, 3) for _ in range(CONFIG.extents)], np.int8)

    def expected(line):
        held = int.from_bytes(model.line(line, owners), "little")
        if RECORDS_LINE <= line < RECORDS_LINE + RECORDS:
            held = RECORD.pack({**RECORD.unpack(held), "cycle": 0}) if held else 0
        return held

    async def bench(ctx, page):
        for tenant in range(CONFIG.apertures):
            ctx.set(page.holdings[tenant], int(np.count_nonzero(owners == tenant)))
        for step in range(400):
            ctx.set(page.cycles, step)
            counters.device["cycles"] = step
            kind = chance.randrange(8)
            if kind < 5:
                what = chance.randrange(1 << 19 - 2), chance.randrange(3), chance.choice(list(Violation))
                model.report(np.array([what[0]]), *what[1:])
                await report(ctx, page, *what)
            else:
                state = AUDIT.unpack((await access(ctx, page, AUDIT_LINE))[0])
                line = chance.choice(
                    [*2 * [AUDIT_LINE], *2 * [WEIGHTS_LINE], QUOTAS_LINE, HOLDINGS_LINE, RECORDS_LINE, 60]
                )
                given = chance.getrandbits(512)
                if line == AUDIT_LINE:
                    given = AUDIT.pack(read=chance.randint(max(state["read"] - 1, 0), state["recorded"] + 1))
                elif line == WEIGHTS_LINE:
                    weights = [chance.choice([0, 1, 7, 255, 256, 1 << 31]) for _ in range(16)]
                    given = sum(weight << 32 * n for n, weight in enumerate(weights))
                elif chance.random() < 0.5:
                    given &= sum(0x3F << 32 * n for n in range(16))
                enable = chance.choice([ALL, ALL, chance.getrandbits(64)])
                _, refused = await access(ctx, page, line, given, enable)
                bits = np.array([enable >> n & 1 for n in range(LINE_BYTES)], np.bool_)
                done = model.write(line, np.frombuffer(given.to_bytes(64, "little"), np.uint8), bits)
                assert refused == (not done)
            for line in (
                AUDIT_LINE,
                QUOTAS_LINE,
                WEIGHTS_LINE,
                HOLDINGS_LINE,
                RECORDS_LINE + chance.randrange(RECORDS),
            ):
                held, _ = await access(ctx, page, line)
                if RECORDS_LINE <= line < RECORDS_LINE + RECORDS and held:
                    assert RECORD.unpack(held)["cycle"] <= step
                    held = RECORD.pack({**RECORD.unpack(held), "cycle": 0})
                assert held == expected(line), (seed, step, line)
            assert [ctx.get(quota) for quota in page.quotas] == model.quotas
            weights = WEIGHTS.unpack((await access(ctx, page, WEIGHTS_LINE))[0])
            assert [ctx.get(weight) for weight in page.weights] == list(weights.values())[: CONFIG.apertures]
        assert AUDIT.unpack((await access(ctx, page, AUDIT_LINE))[0])["recorded"] > RECORDS

    simulate(bench)


def test_every_line_reads_as_the_model_at_reset():
    model = Model(CONFIG, Counters(CONFIG))
    owners = np.full(CONFIG.extents, -1, np.int8)

    async def bench(ctx, page):
        for line in range(OWNER_LINES):
            held, _ = await access(ctx, page, line)
            assert held == int.from_bytes(model.line(line, owners), "little"), line

    simulate(bench)


def test_a_full_log_counts_what_it_loses():
    """The first violations stay; what is like one of them is nothing new; what was read is recorded anew."""

    async def bench(ctx, page):
        for n in range(RECORDS + 3):
            await report(ctx, page, n << EXTENT_SHIFT - LINE_SHIFT, 1, Violation.READ)
        await report(ctx, page, 5, 1, Violation.READ)
        ctx.set(page.lost, 2)
        await ctx.tick()
        ctx.set(page.lost, 0)
        held, _ = await access(ctx, page, AUDIT_LINE)
        assert AUDIT.unpack(held) == {"recorded": RECORDS, "read": 0, "lost": 5} | AUDIT.unpack(0) | {
            "recorded": RECORDS,
            "lost": 5,
        }
        ctx.set(page.access, 1)
        ctx.set(page.line, AUDIT_LINE)
        ctx.set(page.write, 1)
        ctx.set(page.enable, ALL)
        ctx.set(page.given, AUDIT.pack(read=1))
        assert ctx.get(page.forget)
        await ctx.tick()
        ctx.set(page.access, 0)
        await report(ctx, page, 5, 1, Violation.READ)
        held, _ = await access(ctx, page, RECORDS_LINE)
        assert (RECORD.unpack(held)["sequence"], RECORD.unpack(held)["address"]) == (RECORDS, 5 << LINE_SHIFT)

    simulate(bench)
