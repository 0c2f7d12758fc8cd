"""The door of a controller: one access a frame, each client in order, none past a queued one of its line."""

import itertools
import random
from collections import deque
from dataclasses import dataclass

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi.dram import PARTS, Dram
from nearkv_hw.memory.dram.door import Door

FRAMES = 400
LINES = 6
"""Few, so that accesses meet."""


@dataclass(frozen=True)
class Access:
    unit: bool
    line: int
    write: int
    tag: int
    contents: int = 0

    def meets(self, other):
        """Whether one of the two must not overtake the other: a read and a write of a line."""
        return self.line == other.line and self.write != other.write


def line_at(place):
    """The line of a place in the first row of the first two banks."""
    assert place["row"] == 0
    return place["bank"] + 2 * place["column"]


@pytest.mark.parametrize("dram", [Dram.DDR5_6400, Dram.LPDDR5X_8533])
@pytest.mark.parametrize("room", [1.0, 0.6])
def test_order_hazards_turns_and_rate(dram, room):
    """Every frame the oldest access of a client that nothing holds back enters; with two, in turn."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    part = PARTS[dram]
    dut = Door(part=part, density_gbit=part.default_density, tag=12, unit_waiting=4)
    waiting = {True: deque(), False: deque()}  # accesses of the unit, of the fabric, that are in the door
    queued, contents, entered = [], deque(), []
    held = {True: 0, False: 0}  # frames in which a queued access kept one of the client's outside

    async def bench(ctx):
        ports, offered = {True: dut.unit, False: dut.fabric}, {True: None, False: None}
        tags = itertools.count()
        chosen = both = None
        for _ in range(FRAMES):
            for step in range(part.subchannels):
                first, check, choose = (step == at for at in (0, part.subchannels - 2, part.subchannels - 1))
                for unit, port in ports.items():
                    if offered[unit] is None and rng.random() < 0.6:
                        write = 0 if unit else rng.randrange(2)
                        data = rng.getrandbits(512) if write else 0
                        access = Access(unit, rng.randrange(LINES), write, next(tags) % 4096, data)
                        offered[unit] = access
                        payload = {"line": access.line, "tag": access.tag}
                        ctx.set(port.payload, payload if unit else {**payload, "write": write, "data": data})
                    ctx.set(port.valid, offered[unit] is not None)
                ctx.set(dut.check, check)
                ctx.set(dut.choose, choose)

                if first:
                    assert ctx.get(dut.enters) == (chosen is not None)
                    if chosen is not None:
                        assert ctx.get(dut.from_unit) == chosen.unit
                        assert ctx.get(dut.write) == chosen.write
                        assert ctx.get(dut.tag) == chosen.tag
                        assert line_at(ctx.get(dut.place)) == chosen.line
                        assert not any(chosen.meets(other) for other in queued)
                        if chosen.write:
                            assert ctx.get(dut.contents) == contents.popleft()
                ctx.set(dut.leave, first and chosen is not None and chosen.write)

                oldest = {unit: waiting[unit][0] for unit in ports if ctx.get(waits(dut, unit))}
                for unit, access in oldest.items():
                    assert line_at(ctx.get(dut.unit_place if unit else dut.fabric_place)) == access.line
                lines = {write: {a.line for a in queued if a.write == write} for write in (0, 1)}
                unit_line, fabric_line = (line_at(ctx.get(p)) for p in (dut.unit_place, dut.fabric_place))
                ctx.set(dut.unit_met, unit_line in lines[1])
                ctx.set(dut.fabric_met_write, fabric_line in lines[1])
                ctx.set(dut.fabric_met_read, fabric_line in lines[0])
                if check:
                    entering = [chosen] if first and chosen is not None else []
                    free = {
                        unit
                        for unit, access in oldest.items()
                        if not any(access.meets(other) for other in queued + entering)
                    }
                    for unit in oldest.keys() - free:
                        held[unit] += 1
                if first and chosen is not None:
                    queued.append(chosen)
                if choose:
                    rooms = {name: rng.random() < room for name in ("unit", "fabric", "write")}
                    for name, value in rooms.items():
                        ctx.set(getattr(dut, f"{name}_room"), value)
                    may = {
                        unit
                        for unit in free
                        if rooms["unit" if unit else "write" if oldest[unit].write else "fabric"]
                    }
                    before, chosen = chosen, None
                    takes = ctx.get(dut.takes_unit), ctx.get(dut.takes_fabric)
                    assert sum(takes) == bool(may)
                    if may:
                        chosen = waiting[bool(takes[0])].popleft()
                        assert chosen.unit in may
                        if len(may) == 2 and both and before is not None:
                            assert chosen.unit != before.unit, "with two they take turns"
                        entered.append(chosen)
                    both = len(may) == 2
                for unit, port in ports.items():
                    if offered[unit] is not None and ctx.get(port.ready):
                        waiting[unit].append(offered[unit])
                        if offered[unit].write:
                            contents.append(offered[unit].contents)
                        offered[unit] = None
                await ctx.tick()
            while len(queued) > 4 or (queued and rng.random() < 0.4):
                queued.pop(rng.randrange(len(queued)))

    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    assert min(held.values()) > FRAMES / 40
    assert len(entered) > FRAMES / 2
    assert {(access.unit, access.write) for access in entered} == {(True, 0), (False, 0), (False, 1)}


def waits(dut, unit):
    return dut.unit_waits if unit else dut.fabric_waits
