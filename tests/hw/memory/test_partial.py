"""Writes of some bytes: read, merge, write; everything else passes as it is, in order."""

import random

from amaranth.sim import Simulator
from memory_model import ALL, MemoryModel, random_enable
from nearkv_hw.memory.dram.partial import PartialWrites


def test_agrees_with_a_dictionary():
    """A memory of whole lines behind the block, one that answers reads at any time, has what it should."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = PartialWrites(slot_bits=6)
    model, lines = MemoryModel(1 << 14), {}
    model.claim(0, 0)
    accesses = [
        {
            "line": rng.randrange(4),
            "write": rng.randrange(2),
            "poison": int(rng.random() < 0.2),
            "enable": random_enable(rng),
            "data": rng.getrandbits(512),
        }
        for _ in range(300)
    ]
    read = []

    async def bench(ctx):
        waiting = None
        held = None
        sent = list(accesses)
        while sent or waiting:
            offers = bool(sent) and (held is not None or rng.random() < 0.8)
            ctx.set(dut.i.valid, offers)
            if offers:
                held = sent[0]
                partial = held["enable"] != ALL
                ctx.set(dut.i.payload, {**held, "partial": partial, "slot": len(sent) % 64})
            ready = rng.random() < 0.7
            ctx.set(dut.o.ready, ready)
            answers = waiting is not None and rng.random() < 0.3
            ctx.set(dut.read, answers)
            if answers:
                data, poison = lines.get(waiting, (0, 0))
                ctx.set(dut.read_data, data)
                ctx.set(dut.read_poison, poison)
                waiting = None
            if ctx.get(dut.o.valid) and ready:
                out = ctx.get(dut.o.payload)
                assert out["slot"] == len(sent) % 64
                if out["write"]:
                    lines[out["line"]] = (out["data"], out["poison"])
                elif out["merge"]:
                    waiting = out["line"]
                else:
                    read.append(lines.get(out["line"], (0, 0)))
            if offers and ctx.get(dut.i.ready):
                held = None
                sent.pop(0)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    expected = []
    for access in accesses:
        fault, data = model.access(tenant=0, **access)
        if not access["write"]:
            expected.append((data, int(fault.value == 2)))
    assert read == expected
    assert {line: data for line, (data, _) in lines.items()} == model.data
    assert {line for line, (_, poison) in lines.items() if poison} == model.poisoned
    assert sum(a["write"] and a["enable"] != ALL for a in accesses) > 50
