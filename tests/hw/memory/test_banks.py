# amaranth: UnusedElaboratable=no
"""Banks and the aftermath of a frame against the part's distances: neither more nor less is allowed."""

import random
from dataclasses import replace

import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator
from nearkv_hw.abi.dram import PARTS, Dram, Refresh
from nearkv_hw.memory.dram.aftermath import Aftermath
from nearkv_hw.memory.dram.banks import Banks, decides_ahead

FRAMES = 2_000
KINDS = ("reads", "writes", "activates", "precharges")


@pytest.mark.parametrize("dram", list(PARTS), ids=lambda dram: dram.name.lower())
def test_the_rules_allow_what_the_distances_do(dram):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    part = PARTS[dram]
    size = {"part": part, "density_gbit": part.default_density, "refresh": Refresh.ALL_BANK}
    m = Module()
    m.submodules.banks = banks = Banks(**size)
    aftermaths = []
    for write in (False, True):
        aftermath = Aftermath(**size, banks=part.banks, write=write)
        m.submodules[f"aftermath_{write}"] = aftermath
        m.d.comb += [
            *(
                getattr(aftermath.commands, name).eq(getattr(banks.commands, name))
                for name in banks.commands.signature.members
            ),
            aftermath.crowded.eq(banks.crowded),
            *(bank.eq(n) for n, bank in enumerate(aftermath.bank)),
        ]
        aftermaths.append(aftermath)
    simulator = Simulator(m)
    simulator.add_clock(1e-9)
    simulator.add_testbench(Frames(part, banks, aftermaths, random.Random(seed)).run)
    simulator.run()


def test_late_activates_need_a_frame_that_is_long_enough():
    part = PARTS[Dram.DDR5_6400]
    part = replace(part, slots=replace(part.slots, late_tck=4))
    message = "part must have at least 3 sub-channels for late activates, DDR5_6400 has 2; set late_tck to 0"
    with pytest.raises(ValueError, match=message):
        Banks(part=part, density_gbit=16, refresh=Refresh.ALL_BANK)


class Frames:
    """Random legal commands, frame by frame, and what must be allowed in each."""

    def __init__(self, part, banks, aftermaths, rng):
        self.part, self.banks, self.aftermaths, self.rng = part, banks, aftermaths, rng
        self.rules = Rules(part)

    async def run(self, ctx):
        ahead = decides_ahead(self.part)
        given, found = {}, dict.fromkeys(KINDS, 0)
        for frame in range(FRAMES):
            # the first cycle: the frame before is known, and its commands take effect
            await self.tell(ctx, given)
            if ahead:
                read, write = self.aftermaths
                stops = (read.stops_column, write.stops_column, read.stops_activate, read.stops_precharge)
                allowed = {k: found[k] & ~ctx.get(stop) for k, stop in zip(KINDS, stops, strict=True)}
            await ctx.tick()
            ctx.set(self.banks.follow, 0)
            found = {kind: ctx.get(getattr(self.banks, kind)) for kind in KINDS}
            if not ahead:
                allowed = found
            assert ctx.get(self.banks.open) == self.rules.open
            if given.get("refresh"):  # the refresher still holds the banks back
                allowed = allowed | {"activates": 0}
            expected = {kind: self.rules.allowed(kind, frame) for kind in KINDS}
            assert not frame or allowed == expected, (frame, given)
            assert ctx.get(self.banks.closable) == expected["precharges"]
            assert not expected["activates"] or ctx.get(self.banks.late) == self.rules.must_be_late(frame)
            given = self.rules.choose(expected, frame, self.rng)

    async def tell(self, ctx, given):
        """Gives the commands of the frame before to the banks, and looks a row up."""
        commands, banks, rules = self.banks.commands, self.banks, self.rules
        bank = self.rng.choice([given.get("activate_bank", 0), self.rng.randrange(self.part.banks)])
        row = rules.rows.get(bank, self.rng.getrandbits(8)) ^ (self.rng.random() < 0.3)
        place, other = ({"bank": b, "row": r, "column": 0} for b, r in ((bank, row), (bank ^ 1, row ^ 2)))
        second = self.rng.randrange(2)
        ctx.set(banks.asked[second], place)
        ctx.set(banks.asked[1 - second], other)
        ctx.set(banks.second, second)
        ctx.set(banks.tick, 1)
        await ctx.tick()
        ctx.set(banks.tick, 0)
        ctx.set(banks.look, place)
        for name in commands.signature.members:
            ctx.set(getattr(commands, name), given.get(name, self.rng.getrandbits(4) if "_" in name else 0))
        ctx.set(banks.follow, 1)
        await ctx.delay(1e-10)
        is_open = bool(self.rules.open >> bank & 1)
        assert ctx.get(self.banks.look_closed) == (not is_open)
        assert ctx.get(self.banks.look_hit) == (is_open and self.rules.rows[bank] == row)


class Rules:
    """When each command last was, and what a part's distances in frames allow after that."""

    def __init__(self, part):
        self.part = part
        self.t = part.frames(part.default_density, Refresh.ALL_BANK)
        self.open = 0
        self.rows = {}
        self.last = {}
        self.activates = {}  # frames, and whether they were late

    def after(self, frame, *rules):
        """Whether `frame` is far enough from the last of each (what, where)."""
        return all(frame - self.last.get(key, -(10**6)) >= distance for key, distance in rules)

    def allowed(self, kind, frame):
        t, vector = self.t, 0
        room = self.has_room(frame, late=False) or self.has_room(frame, late=True)
        for bank in range(self.part.banks):
            group = bank % self.part.bank_groups
            is_open = self.open >> bank & 1
            if kind == "reads":
                may = is_open and self.after(
                    frame,
                    *self.of_activates(lambda of: of.activate_to_column, bank),
                    (("read", "group", group), t.column_same_group),
                    (("read",), t.column_other_group),
                    (("write", "group", group), t.write_to_read_same_group),
                    (("write",), t.write_to_read_other_group),
                )
            elif kind == "writes":
                may = is_open and self.after(
                    frame,
                    *self.of_activates(lambda of: of.activate_to_column, bank),
                    (("write", "group", group), t.column_same_group_write),
                    (("write",), t.column_other_group),
                    (("read",), t.read_to_write),
                )
            elif kind == "activates":
                may = (
                    not is_open
                    and room
                    and self.after(
                        frame,
                        (("precharge", bank), t.precharge_to_activate),
                        (("refresh",), t.refresh),
                        *self.of_activates(lambda of: of.activate_same_group, "group", group),
                    )
                )
            else:
                may = is_open and self.after(
                    frame,
                    *self.of_activates(lambda of: of.activate_to_precharge, bank),
                    *self.of_activates(lambda of: of.activate_to_activate - t.precharge_to_activate, bank),
                    (("read", bank), t.column_to_precharge_read),
                    (("write", bank), t.column_to_precharge_write),
                )
            vector |= bool(may) << bank
        return vector

    def of_activates(self, distance, *where):
        """The distance to the last activate there, and to the last late one."""
        kinds = {"activate": self.t} | ({"late": self.t.late} if self.t.late else {})
        return [((kind, *where), distance(timings)) for kind, timings in kinds.items()]

    def has_room(self, frame, late):
        """Whether an activate, late or not, is far enough from those of all banks."""
        t = self.t
        if late and not t.late:
            return False
        after_late = t.late.activate_other_group if t.late and not late else t.activate_other_group
        window = {True: t.four_activates, False: t.late.four_activates if late else t.four_activates}
        return (
            self.after(frame, (("activate",), t.activate_other_group), (("late",), after_late))
            and sum(frame - f < window[was_late] for f, was_late in self.activates.items()) < 4
        )

    def must_be_late(self, frame):
        """Whether an activate is too early unless it is late."""
        return not self.has_room(frame, late=False)

    def choose(self, allowed, frame, rng):
        """Commands of the frame; they take effect here."""
        given, busy = {}, frame // 40 % 4  # phases that open, use and close banks
        pick = {kind: [b for b in range(self.part.banks) if allowed[kind] >> b & 1] for kind in KINDS}
        column = rng.choice(("reads", "writes"))
        if pick[column] and rng.random() < 0.7:
            bank = rng.choice(pick[column])
            given |= {"column": 1, "column_write": int(column == "writes"), "column_bank": bank}
            what = "write" if given["column_write"] else "read"
            self.note(frame, what, bank)
        if pick["activates"] and busy < 3 and rng.random() < 0.8:
            bank, row = rng.choice(pick["activates"]), rng.getrandbits(8)
            late = bool(self.t.late) and (self.must_be_late(frame) or rng.random() < 0.2)
            given |= {"activate": 1, "activate_late": late, "activate_bank": bank, "activate_row": row}
            self.note(frame, "activate", bank)
            if late:
                self.note(frame, "late", bank)
            self.activates[frame] = late
            self.rows[bank] = row
            self.open |= 1 << bank
        closes = [b for b in pick["precharges"] if b != given.get("column_bank")]
        if allowed["precharges"] == self.open != 0 and not given and busy == 3 and rng.random() < 0.3:
            given |= {"precharge": 1, "precharge_all": 1}
            for bank in range(self.part.banks):
                self.note(frame, "precharge", bank)
            self.open = 0
        elif closes and (busy == 3 or rng.random() < 0.2):
            bank = rng.choice(closes)
            given |= {"precharge": 1, "precharge_all": 0, "precharge_bank": bank}
            self.note(frame, "precharge", bank)
            self.open &= ~(1 << bank)
        settled = self.after(frame, (("precharge",), self.t.precharge_to_refresh))
        if not self.open and settled and not given and busy == 3 and rng.random() < 0.5:
            given |= {"refresh": 1, "refresh_banks": (1 << self.part.banks) - 1}
            self.note(frame, "refresh", 0)
        return given

    def note(self, frame, what, bank):
        for key in ((what,), (what, bank), (what, "group", bank % self.part.bank_groups)):
            self.last[key] = frame
