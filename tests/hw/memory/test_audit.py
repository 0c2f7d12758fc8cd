"""Reports of refused accesses: which are sent, which only repeat, how those of all channels come."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi import configure
from nearkv_hw.abi.owner import RECORDS
from nearkv_hw.memory.audit import Reporter, Reports
from nearkv_hw.memory.scrub import EXTENT_LINES_LOG2


def seeded():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def simulate(block, bench):
    simulator = Simulator(block)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("config", [None, "small"])
def test_reports_checks_its_config(config):
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not"):
        Reports(config=config, each=1)


@pytest.mark.parametrize("each", [0, 3, None])
def test_reports_checks_each(each):
    with pytest.raises(ValueError, match="each must be 1 or 2, not"):
        Reports(config=configure("small"), each=each)


@pytest.mark.parametrize(("busy", "backpressure"), [(0.1, 0.0), (0.5, 0.5), (1.0, 0.9)])
def test_a_reporter_keeps_back_what_repeats_the_last_report(busy, backpressure):
    """Every refusal is sent, repeats the last that was taken, or is counted as missed; nothing else comes."""
    chance = seeded()
    block = Reporter()
    sent, missed = [], []

    async def bench(ctx):
        expected, lost, waiting = [], 0, 0
        last, told = None, None
        for _ in range(2000):
            # what was put in a cycle ago meets the buffer now
            if told is not None:
                key = told[0] >> EXTENT_LINES_LOG2, *told[1:]
                if key != last:
                    if waiting < RECORDS:
                        expected.append(told)
                        last = key
                        waiting += 1
                    else:
                        lost += 1
            valid = chance.random() < busy
            refusal = chance.randrange(3) << EXTENT_LINES_LOG2 | chance.randrange(9), chance.randrange(2), 0
            ctx.set(block.i.valid, valid)
            for name, value in zip(("line", "tenant", "kind"), refusal, strict=True):
                ctx.set(block.i.refusal[name], value)
            ready, forget = chance.random() >= backpressure, chance.random() < 0.02
            ctx.set(block.o.ready, ready)
            ctx.set(block.forget, forget)
            missed.append(ctx.get(block.missed))
            if ctx.get(block.o.valid) and ready:
                item = ctx.get(block.o.payload)
                sent.append((item.line, item.tenant, int(item.kind)))
                waiting -= 1
            last = None if forget else last
            told = refusal if valid else None
            await ctx.tick()
        assert sent == expected[: len(sent)]
        assert len(sent) >= len(expected) - RECORDS
        assert abs(sum(missed) - lost) <= 1
        assert len(sent) > 100

    simulate(block, bench)


@pytest.mark.parametrize(("channels", "each"), [(2, 1), (2, 2), (4, 1)])
def test_reports_of_all_channels_come_in_turn(channels, each):
    """Each once, with its line of the device; nobody waits for more than all others."""
    chance = seeded()
    block = Reports(config=configure("small", channels=channels), each=each)
    count = channels * each

    async def bench(ctx):
        queues = [
            [(extent << EXTENT_LINES_LOG2 | n, n % 8, n % 3) for extent in range(30)] for n in range(count)
        ]
        got = []
        for _ in range(4000):
            for n, queue in enumerate(queues):
                ctx.set(block.i[n].valid, bool(queue))
                if queue:
                    for name, value in zip(("line", "tenant", "kind"), queue[0], strict=True):
                        ctx.set(block.i[n].payload[name], value)
            ready = chance.random() < 0.6
            ctx.set(block.o.ready, ready)
            bits = chance.getrandbits(count)
            ctx.set(block.missed, bits)
            assert ctx.get(block.lost) == bits.bit_count()
            if ctx.get(block.o.valid) and ready:
                item = ctx.get(block.o.payload)
                got.append((item.line, item.tenant, int(item.kind)))
            for n, queue in enumerate(queues):
                if queue and ctx.get(block.i[n].ready):
                    queue.pop(0)
            await ctx.tick()
        extent = dict.fromkeys(range(count), 0)
        for line, tenant, kind in got:
            n = line & (1 << EXTENT_LINES_LOG2) - 1
            assert line >> EXTENT_LINES_LOG2 == extent[n] * channels + n // each
            assert (tenant, kind) == (n % 8, n % 3)
            extent[n] += 1
            assert max(extent.values()) - min(extent.values()) <= 1
        assert len(got) == 30 * count

    simulate(block, bench)
