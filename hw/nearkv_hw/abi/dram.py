"""DRAM parts: what stands behind a device channel, its rules, and what follows for a controller.

A device channel delivers one line per device cycle. It is made of `subchannels` DRAM channels that take
turns: each delivers one line per *frame* of `subchannels` device cycles. Rules are in cycles of the part's
command clock (tCK); a device cycle has `tck_per_cycle` of them. `dram_values` has the values and where they
come from.

A frame has one place on the command bus for each kind of command (`Slots`). A command acts on the part in its
last tCK on the bus, and every rule is counted from there to there. Where a line is two bursts, the next
line's first burst falls between them; so places of odd frames differ from those of even ones, and
`FrameTimings` holds for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from .dram_frames import FrameTimings, LateTimings, Slot, Slots
from .dram_values import DENSITIES, MEANINGS, TIMINGS, Density, Dram, Refresh, Value

__all__ = [
    "MEANINGS",
    "PARTS",
    "Density",
    "Dram",
    "DramPart",
    "FrameTimings",
    "LateTimings",
    "Place",
    "Refresh",
    "Slot",
    "Slots",
    "Value",
    "address",
    "ceiling",
    "line_of",
    "random_fraction",
    "turnaround_share",
    "unloaded_read_ns",
    "unloaded_read_tck",
    "write_fraction",
]


@dataclass(frozen=True, kw_only=True)
class DramPart:
    """A DRAM part as it stands behind a device channel.

    Parameters
    ----------
    dram : which part.
    mega_transfers : transfers per second and pin, in millions.
    transfers_per_tck : transfers per pin and tCK.
    subchannels : DRAM channels of a device channel; a power of two.
    tck_per_cycle : tCK of a device cycle.
    bank_groups, banks_per_group : of a sub-channel.
    row_lines : lines of a row.
    bursts : when the bursts of a line are, in tCK from the first.
    burst_commands : commands on the bus per line: one per burst, or one for all.
    separate_buses : whether row and column commands have a bus each.
    default_density : Gbit, one of `densities`.
    slots : places of the commands in a frame.
    """

    dram: Dram
    mega_transfers: Fraction
    transfers_per_tck: int
    subchannels: int
    tck_per_cycle: int
    bank_groups: int
    banks_per_group: int
    row_lines: int
    bursts: tuple[int, ...]
    burst_commands: int
    separate_buses: bool
    default_density: int
    slots: Slots

    @property
    def values(self) -> Mapping[str, Value]:
        """Timing values by the names of `MEANINGS`."""
        return TIMINGS[self.dram]

    @property
    def densities(self) -> Mapping[int, Density]:
        """What depends on the density, by Gbit."""
        return DENSITIES[self.dram]

    @property
    def tck_ns(self) -> Fraction:
        """A cycle of the command clock."""
        return 1000 * self.transfers_per_tck / self.mega_transfers

    @property
    def tck_ps(self) -> float:
        """A cycle of the command clock."""
        return float(self.tck_ns * 1000)

    @property
    def cycle_ns(self) -> Fraction:
        """A device cycle."""
        return self.tck_ns * self.tck_per_cycle

    @property
    def clock_mhz(self) -> int:
        """The device clock, rounded."""
        return round(1000 / self.cycle_ns)

    @property
    def frame_tck(self) -> int:
        """tCK of a frame: as many as a line takes on the data bus."""
        return self.subchannels * self.tck_per_cycle

    @property
    def banks(self) -> int:
        """Banks of a sub-channel."""
        return self.bank_groups * self.banks_per_group

    @property
    def bursts_per_line(self) -> int:
        """Bursts of a line."""
        return len(self.bursts)

    @property
    def rows(self) -> int:
        """Rows of a bank at the default density."""
        return self.rows_of(self.default_density)

    def rows_of(self, density_gbit: int) -> int:
        """Rows of a bank."""
        return int(self._density(density_gbit).rows.value)

    def channel_lines(self, density_gbit: int) -> int:
        """Lines that a device channel holds."""
        return self.subchannels * self.banks * self.rows_of(density_gbit) * self.row_lines

    def ns(self, name: str) -> Fraction:
        """A timing value as time."""
        value = self.values[name]
        return Fraction(value.value) * (self.tck_ns if value.unit == "nCK" else 1)

    def n(self, name: str) -> int:
        """A timing value in tCK, rounded up (an interval between refreshes: down); a count as it is."""
        value = self.values[name]
        if value.unit != "ns":
            return int(value.value)
        whole = math.floor if name in ("REFI", "REFI_SET") else math.ceil
        least = _LEAST_TCK.get((self.dram, name), 0)
        return max(whole(Fraction(value.value) / self.tck_ns), least)

    def rfc(self, density_gbit: int, refresh: Refresh) -> int:
        """How long a refresh takes, in tCK."""
        density = self._density(density_gbit)
        value = density.rfc if refresh is Refresh.ALL_BANK else density.rfc_set
        return math.ceil(Fraction(value.value) / self.tck_ns)

    def refresh_sets(self, refresh: Refresh) -> int:
        """Sets of banks that are refreshed one after the other."""
        if refresh is Refresh.ALL_BANK:
            return 1
        return {Dram.LPDDR5X_8533: 8, Dram.HBM3_6400: 16}.get(self.dram, self.banks_per_group)

    def bank_set(self, bank: int) -> int:
        """The set that a bank is refreshed with: the high bits of its number (DDR5), or the low ones."""
        if self.dram in (Dram.LPDDR5X_8533, Dram.HBM3_6400):
            return bank % self.refresh_sets(Refresh.PER_BANK)
        return bank // self.bank_groups

    def frames(self, density_gbit: int, refresh: Refresh) -> FrameTimings:
        """The part's rules in frames.

        Raises
        ------
        ValueError : the part has no such density.
        """
        return _frames(self, density_gbit, refresh)

    def rules(self, density_gbit: int, refresh: Refresh) -> dict[str, int]:
        """Everything that a model of the part needs, in tCK and counts, by name."""
        per_bank = refresh is Refresh.PER_BANK
        slots = {
            f"{kind}_{parity}": getattr(slot, parity)
            for kind in ("column", "precharge", "activate")
            for slot in (getattr(self.slots, kind),)
            for parity in ("even", "odd")
        }
        rfc_set = self.rfc(density_gbit, Refresh.PER_BANK)
        return {
            "RCD_WR": self.n("RCD"),
            "REF_REF": rfc_set,
            **{name: self.n(name) for name in MEANINGS if name in self.values},
            "RFC": self.rfc(density_gbit, Refresh.ALL_BANK),
            "RFC_SET": rfc_set,
            **slots,
            "column_takes": self.slots.column.takes[-1] + 1,
            "activate_second": self.slots.activate.takes[-1],
            "activate_late": self.slots.late_tck,
            "second_burst": self.bursts[-1],
            "burst_commands": self.burst_commands,
            "separate_buses": int(self.separate_buses),
            "tck_per_cycle": self.tck_per_cycle,
            "bank_groups": self.bank_groups,
            "banks": self.banks,
            "rows": self.rows_of(density_gbit),
            "row_lines": self.row_lines,
            "sets": self.refresh_sets(Refresh.PER_BANK),
            "set_high": int(self.bank_set(1) == 0),
            "per_bank": int(per_bank),
        }

    def _density(self, density_gbit: int) -> Density:
        if density_gbit not in self.densities:
            raise ValueError(
                f"{self.dram.name} has no density of {density_gbit!r} Gbit; "
                f"there are {', '.join(map(str, self.densities))}"
            )
        return self.densities[density_gbit]


_LEAST_TCK = {
    (Dram.DDR5_6400, "FAW"): 32,
    (Dram.DDR5_4800, "FAW"): 32,
    (Dram.DDR5_6400, "RRD_L"): 8,
    (Dram.DDR5_4800, "RRD_L"): 8,
    (Dram.HBM3_6400, "REF_ACT"): 3,
    (Dram.HBM3_6400, "REF_REF"): 3,
}
"""Values in ns that have a floor in tCK, too."""


@cache
def _frames(part: DramPart, density_gbit: int, refresh: Refresh) -> FrameTimings:
    """Rules in tCK as distances in frames that hold from even and from odd frames."""
    frame, n, bursts = part.frame_tck, part.n, part.bursts
    rules = part.rules(density_gbit, refresh)
    row = part.slots.activate.cycle * part.tck_per_cycle
    column = tuple(part.slots.column.acts(odd) for odd in (0, 1))
    activate = tuple(row + part.slots.activate.acts(odd) for odd in (0, 1))
    late = tuple(at + part.slots.late_tck for at in activate)
    precharge = tuple(row + part.slots.precharge.acts(odd) for odd in (0, 1))
    last_burst = tuple(at + bursts[-1] for at in column)

    def apart(earlier: tuple[int, ...], later: tuple[int, ...], tck: int) -> int:
        """Fewest frames that bring `later` at least so many tCK behind `earlier`.

        Places of one kind differ by less than a frame, so a larger distance is never too small.
        """
        distance = 1
        while any(frame * distance + later[p ^ distance & 1] - earlier[p] < tck for p in (0, 1)):
            distance += 1
        return distance

    def columns(same_group: int) -> int:
        """Fewest frames between lines that go the same way: their bursts may lie between each other."""

        def fit(distance: int) -> bool:
            gaps = (
                abs(frame * distance + column[p ^ distance & 1] + b - column[p] - a)
                for p in (0, 1)
                for a in bursts
                for b in bursts
            )
            return min(gaps) >= max(same_group, n("BL"))

        distance = 1
        while not fit(distance):
            distance += 1
        return distance

    write_end = n("CWL") + n("BL")
    rcd = max(rules["RCD"], rules["RCD_WR"])
    rfc = part.rfc(density_gbit, refresh)
    if refresh is Refresh.ALL_BANK:
        interval, to_other, to_refresh = n("REFI"), apart(precharge, activate, rfc), rfc
    else:
        interval, to_refresh = n("REFI_SET"), rules["REF_REF"]
        to_other = max(apart(precharge, activate, n("REF_ACT")), apart(late, precharge, n("REF_ACT")))
    return FrameTimings(
        activate_to_column=apart(activate, column, rcd),
        column_to_precharge_read=apart(last_burst, precharge, n("RTP")),
        column_to_precharge_write=apart(last_burst, precharge, write_end + n("WR")),
        activate_to_precharge=apart(activate, precharge, n("RAS")),
        activate_to_activate=apart(activate, activate, n("RC")),
        precharge_to_activate=apart(precharge, activate, n("RP")),
        activate_other_group=apart(activate, activate, n("RRD_S")),
        activate_same_group=apart(activate, activate, n("RRD_L")),
        four_activates=apart(late, activate, n("FAW")),
        column_other_group=columns(n("CCD_S")),
        column_same_group=columns(n("CCD_L")),
        column_same_group_write=columns(n("CCD_L_WR")),
        read_to_write=apart(last_burst, column, n("RTW")),
        write_to_read_other_group=apart(last_burst, column, write_end + n("WTR_S")),
        write_to_read_same_group=apart(last_burst, column, write_end + n("WTR_L")),
        refresh_interval=interval // frame,
        refresh=apart(precharge, activate, rfc),
        refresh_to_other=to_other,
        refresh_to_refresh=apart(precharge, precharge, to_refresh),
        precharge_to_refresh=apart(precharge, precharge, max(n("RP_AB"), n("RP"))),
        refresh_sets=part.refresh_sets(refresh),
        postponed=n("POSTPONED"),
        read_cycles=-(-(max(last_burst) + n("CL") + n("BL")) // part.tck_per_cycle),
        late=LateTimings(
            activate_to_column=apart(late, column, rcd),
            activate_to_precharge=apart(late, precharge, n("RAS")),
            activate_to_activate=apart(late, activate, n("RC")),
            activate_other_group=apart(late, activate, n("RRD_S")),
            activate_same_group=apart(late, activate, n("RRD_L")),
            four_activates=apart(activate, late, n("FAW")),
        )
        if part.slots.late_tck
        else None,
    )


@cache
def ceiling(part: DramPart, density_gbit: int, refresh: Refresh) -> float:
    """Share of the time in which data can flow, as refresh leaves it.

    A refresh of all banks closes them before and opens them after it: 1 - (tRFC + tRP + tRCD) / tREFI.
    Refreshes of sets leave the other banks alone, so 1.
    """
    if refresh is Refresh.PER_BANK:
        return 1.0
    lost = Fraction(part.densities[density_gbit].rfc.value) + part.ns("RP_AB") + part.ns("RCD")
    return float(1 - lost / part.ns("REFI"))


def unloaded_read_tck(part: DramPart) -> int:
    """A read of a closed bank, from activate to the end of its line: RCD + CL + the line's bursts."""
    return part.n("RCD") + part.n("CL") + part.bursts[-1] + part.n("BL")


def unloaded_read_ns(part: DramPart) -> float:
    """`unloaded_read_tck` as time."""
    return float(unloaded_read_tck(part) * part.tck_ns)


def random_fraction(part: DramPart) -> float:
    """Share of the peak that reads of one line per row can have: data bus, FAW, RRD, or RC over all banks."""
    per_tck = min(
        Fraction(1, part.frame_tck),
        Fraction(4, part.n("FAW")),
        Fraction(1, part.n("RRD_S")),
        Fraction(part.banks, part.n("RC")),
    )
    return float(per_tck * part.frame_tck)


def write_fraction(part: DramPart, groups: int) -> float:
    """Share of the peak that writes spread over so many bank groups can have: data bus or CCD_L_WR."""
    apart = max(part.n("CCD_L_WR") * part.bursts_per_line, part.n("CCD_L") * part.bursts_per_line)
    return float(min(Fraction(1), Fraction(groups * part.frame_tck, apart)))


def turnaround_share(part: DramPart, reads: int, writes: int) -> float:
    """Share of the time lost when so many reads and so many writes of lines take turns, as row hits.

    Lost is what read to write, and write to read of another bank group, take beyond a line's own time.
    """
    n, frame, second = part.n, part.frame_tck, part.bursts[-1]
    to_write = second + n("RTW") - frame
    to_read = second + n("CWL") + n("BL") + n("WTR_S") - frame
    lost = to_write + to_read
    return lost / (lost + (reads + writes) * frame)


@dataclass(frozen=True)
class Place:
    """Where a line of a channel lies.

    Parameters
    ----------
    subchannel, row, column : column in lines.
    bank : bank group in the low bits, bank of the group in the high ones.
    """

    subchannel: int
    bank: int
    row: int
    column: int


def address(part: DramPart, line: int) -> Place:
    """The place of a line of a channel.

    Neighbouring lines take turns over the sub-channels, and in a sub-channel over two bank groups, so that a
    run of lines streams as row hits at full rate. The other bits of the bank are mixed with the
    row's Gray code: runs a power of two apart meet in different banks, and a run never goes from one row of a
    bank straight to its next.
    """
    within, subchannel = divmod(line, part.subchannels)
    pair, low = divmod(within, 2 * part.row_lines)
    row, mixed = divmod(pair, part.banks // 2)
    bank = mixed ^ _scatter(part, row)
    return Place(subchannel, low % 2 + 2 * bank, row, low // 2)


def line_of(part: DramPart, place: Place) -> int:
    """The line of a channel that lies at a place."""
    mixed = place.bank // 2 ^ _scatter(part, place.row)
    pair = place.row * (part.banks // 2) + mixed
    within = pair * 2 * part.row_lines + 2 * place.column + place.bank % 2
    return within * part.subchannels + place.subchannel


def _scatter(part: DramPart, row: int) -> int:
    """What a row adds to its bank, group of the lowest bit apart."""
    return (row ^ row >> 1) % (part.banks // 2)


_DDR5_SLOTS = Slots(
    column=Slot(0, 2, 2, takes=(0, 1)), precharge=Slot(1, 3, 3), activate=Slot(1, 0, 0, takes=(0, 1))
)

PARTS: dict[Dram, DramPart] = {
    part.dram: part
    for part in (
        *(
            DramPart(
                dram=dram,
                mega_transfers=Fraction(mega_transfers),
                transfers_per_tck=2,
                subchannels=2,
                tck_per_cycle=4,
                bank_groups=8,
                banks_per_group=4,
                row_lines=64,
                bursts=(0,),
                burst_commands=1,
                separate_buses=False,
                default_density=16,
                slots=_DDR5_SLOTS,
            )
            for dram, mega_transfers in ((Dram.DDR5_6400, 6400), (Dram.DDR5_4800, 4800))
        ),
        DramPart(
            dram=Dram.LPDDR5X_8533,
            mega_transfers=Fraction(25600, 3),
            transfers_per_tck=8,
            subchannels=4,
            tck_per_cycle=1,
            bank_groups=4,
            banks_per_group=4,
            row_lines=32,
            bursts=(0, 4),
            burst_commands=1,  # BL32: one command, two halves of 16 with a gap that another bank group fills
            separate_buses=False,
            default_density=32,
            # The two halves of an activate take the odd tCK of a frame, or, where it is late, the second one
            # and the next frame's first; the even ones that the column commands leave are the precharges'.
            slots=Slots(
                column=Slot(0, 4, 6),
                precharge=Slot(1, 5, 3),
                activate=Slot(1, 0, 0, takes=(0, 2)),
                late_tck=2,
            ),
        ),
        DramPart(
            dram=Dram.HBM3_6400,
            mega_transfers=Fraction(6400),
            transfers_per_tck=4,
            subchannels=2,
            tck_per_cycle=2,
            bank_groups=4,
            banks_per_group=4,
            row_lines=16,
            bursts=(0, 4),
            burst_commands=2,
            separate_buses=True,
            default_density=8,
            # An activate takes 1.5 tCK on the row bus, a precharge half a one: two and one are set aside.
            slots=Slots(column=Slot(0, 2, 4), precharge=Slot(1, 3, 3), activate=Slot(1, 0, 0, takes=(0, 1))),
        ),
    )
}
"""Every part but `Dram.FIXED`."""
