# amaranth: UnusedElaboratable=no
"""The list of selected pages: whole lines in order, refusals told; and the port that its writer shares."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.command.selected import ListWriter, SharedPort
from nearkv_hw.interfaces import Fault


def simulate(block, *benches):
    simulator = Simulator(block)
    simulator.add_clock(1e-6)
    for bench, background in benches:
        simulator.add_testbench(bench, background=background)
    simulator.run()


async def offer(ctx, stream, payload):
    """Offer an item until it is taken; cycles that it waited."""
    ctx.set(stream.payload, payload)
    ctx.set(stream.valid, 1)
    waited = 0
    while not ctx.get(stream.ready):
        await ctx.tick()
        waited += 1
    await ctx.tick()
    ctx.set(stream.valid, 0)
    return waited


@pytest.mark.parametrize("ready", [0.3, 1.0])
def test_lists_become_lines(ready):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    writer = ListWriter()
    written, faults = [], []  # requests, and the faults of those that have no answer

    async def fabric(ctx):
        while True:
            taking = rng.random() < ready
            ctx.set(writer.requests.ready, taking)
            request = writer.requests.payload
            if taking and ctx.get(writer.requests.valid):
                assert ctx.get(request.write)
                assert ctx.get(request.enable) == (1 << 64) - 1
                assert not ctx.get(request.poison)
                written.append(tuple(ctx.get(request[name]) for name in ("line", "tenant", "data")))
                faults.append(rng.choice([Fault.NONE] * 5 + [Fault.DENIED, Fault.OUTSIDE]))
                told.append(faults[-1])
            answers = bool(faults) and rng.random() < 0.3
            ctx.set(writer.answers.valid, answers)
            if answers:
                ctx.set(writer.answers.payload, {"write": 1, "fault": faults.pop(0)})
            await ctx.tick()

    told = []

    async def bench(ctx):
        for _ in range(40):
            written.clear()
            told.clear()
            words = [rng.getrandbits(21) for _ in range(rng.choice([1, 15, 16, 17, 32, rng.randint(1, 60)]))]
            line, tenant = rng.getrandbits(30), rng.randrange(8)
            waited = 0
            for n, word in enumerate(words):
                place = {"line": line, "tenant": tenant} if n == 0 else {"line": rng.getrandbits(30)}
                waited += await offer(ctx, writer.feed.words, {"word": word, **place})
            assert ready < 1 or waited <= len(words) // 16  # a cycle after each whole line
            await offer(ctx, writer.feed.words, {"end": 1, "word": rng.getrandbits(21)})
            while not ctx.get(writer.feed.idle):
                await ctx.tick()
            lines = [words[n : n + 16] for n in range(0, len(words), 16)]
            assert written == [
                (line + n, tenant, sum(word << 32 * i for i, word in enumerate(own)))
                for n, own in enumerate(lines)
            ]
            assert len(told) == len(lines)
            assert not faults
            assert ctx.get(writer.feed.refused) == any(fault is not Fault.NONE for fault in told)

    simulate(writer, (bench, False), (fabric, True))


def test_a_port_keeps_what_it_offers():
    """The reader goes first, but not before a write that waits; answers go to who asked."""
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    port = SharedPort()
    taken = {"read": [], "write": []}
    sent = {"read": list(range(300)), "write": list(range(1000, 1300))}

    sources = {"read": port.reader.request, "write": port.requests}

    async def bench(ctx):
        held = None
        offered = dict.fromkeys(sources, False)
        while any(sent[kind] != taken[kind] for kind in sources):
            for kind, source in sources.items():
                left = sent[kind][len(taken[kind]) :]
                offered[kind] = bool(left) and (offered[kind] or rng.random() < 0.6)
                ctx.set(source.valid, offered[kind])
                if left:
                    ctx.set(source.payload, {"line": left[0], "write": kind == "write"})
            taking, write = rng.random() < 0.5, rng.getrandbits(1)
            ctx.set(port.fabric.request.ready, taking)
            ctx.set(port.fabric.response.valid, 1)
            ctx.set(port.fabric.response.payload, {"write": write, "id": 7})
            assert ctx.get(port.answers.valid) == write
            assert ctx.get(port.reader.response.valid) == 1 - write
            request, valid = port.fabric.request.payload, ctx.get(port.fabric.request.valid)
            assert valid == any(offered.values())
            now = (ctx.get(request.line), ctx.get(request.write)) if valid else None
            assert held is None or now == held
            held = None if taking else now
            kind = now and ("write" if now[1] else "read")
            for own, source in sources.items():
                assert (ctx.get(source.ready) and offered[own]) == (taking and own == kind)
            if taking and valid:
                taken[kind].append(now[0])
                offered[kind] = False
            await ctx.tick()

    simulate(port, (bench, False))
