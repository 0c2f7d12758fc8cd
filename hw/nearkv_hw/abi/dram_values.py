"""Timing values of the DRAM parts, with unit, source and how sure each is.

"published" values stand in a source that cites the standard or a data sheet, "derived" ones follow from
published ones by the formula given, "assumed" ones have no public source that we trust. Vendors' real values
are under non-disclosure; whoever has them puts them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class Dram(IntEnum):
    """What stands behind a memory channel."""

    FIXED = 0
    """A line per cycle after a fixed latency; no DRAM rules."""
    DDR5_6400 = 1
    DDR5_4800 = 2
    LPDDR5X_8533 = 3
    HBM3_6400 = 4


class Refresh(IntEnum):
    """How rows are refreshed."""

    ALL_BANK = 0
    """Every bank at once, one command per tREFI."""
    PER_BANK = 1
    """One set of banks after the other: a bank of every group (DDR5), a pair (LPDDR5X), one bank (HBM3)."""


@dataclass(frozen=True)
class Value:
    """A parameter of a part.

    Parameters
    ----------
    value : the number.
    unit : "nCK" (cycles of the command clock), "ns", or nothing for counts.
    source : where it comes from.
    sure : "published", "derived" or "assumed".
    """

    value: float
    unit: str
    source: str
    sure: str = "published"


@dataclass(frozen=True)
class Density:
    """What depends on the density of a part.

    Parameters
    ----------
    rows : rows of a bank.
    rfc : an all-bank refresh takes so long (tRFCab, DDR5 tRFC1).
    rfc_set : a refresh of one set of banks takes so long (tRFCpb, DDR5 tRFCsb).
    """

    rows: Value
    rfc: Value
    rfc_set: Value


MEANINGS: dict[str, str] = {
    "RCD": "activate to a read (and to a write, where RCD_WR is not given)",
    "RCD_WR": "activate to a write",
    "RP": "precharge to activate or refresh of the bank",
    "RP_AB": "precharge of all banks to activate or refresh",
    "RAS": "activate to precharge",
    "RC": "activate to activate or refresh of the same bank",
    "RTP": "read to precharge",
    "WR": "end of write data to precharge",
    "CL": "read to its data",
    "CWL": "write to its data",
    "BL": "a burst on the data bus; a line is one burst (DDR5) or two",
    "CCD_S": "column command to column command, other bank group",
    "CCD_L": "column command to column command, same bank group",
    "CCD_L_WR": "write to write, same bank group",
    "RRD_S": "activate to activate, other bank group",
    "RRD_L": "activate to activate, same bank group",
    "FAW": "window in which at most four activates fall",
    "WTR_S": "end of write data to read, other bank group",
    "WTR_L": "end of write data to read, same bank group",
    "RTW": "read to write",
    "PPD": "precharge to precharge",
    "REFI": "average interval of all-bank refreshes",
    "REFI_SET": "average interval of the refreshes of sets of banks",
    "REF_ACT": "refresh of a set to activate in another set",
    "REF_REF": "refresh of a set to refresh of another one; where not given the one must have ended",
    "POSTPONED": "refreshes that may be owed",
}
"""What each timing value is, in the order of the tables."""

_RAMULATOR = "ramulator2 {} preset {}"
_DDR5 = _RAMULATOR.format("ddr5.py", "{}")


def _values(source: str, sure: str, unit: str, **values: float) -> dict[str, Value]:
    return {name: Value(value, unit, source, sure) for name, value in values.items()}


def _ddr5(preset: str, reads_to_writes: str) -> dict[str, Value]:
    """What both DDR5 speeds share."""
    return {
        **_values(_DDR5.format(preset), "published", "nCK", BL=8, CCD_S=8, PPD=2),
        **_values("ramulator2 ddr5.py, 1 KB page (x8): 20 ns, at least 32 nCK", "published", "ns", FAW=20),
        **_values("JESD79-5: 8 nCK with a 1 KB page", "published", "nCK", RRD_S=8),
        **_values("JESD79-5: 5 ns, at least 8 nCK", "published", "ns", RRD_L=5),
        **_values(reads_to_writes, "derived", "nCK", RTW=14),
        **_values("JESD79-5, normal temperature", "published", "ns", REFI=3900),
        **_values(
            "JESD79-5: same-bank refresh runs at tREFI2 = 1,950 ns over 4 sets",
            "derived",
            "ns",
            REFI_SET=487.5,
        ),
        **_values("JESD79-5 table 284 tREFSBRD", "published", "ns", REF_ACT=30),
        **_values("JESD79-5: at most 4 refreshes postponed", "published", "", POSTPONED=4),
    }


_WHOLE_BURSTS = (
    "tCCD_L_WR2, 10 ns: dies of 8 bits that are written whole bursts merge nothing; "
    "ramulator2 ddr5.py has 20 ns, the value for writes that are merged"
)
_RTW_DDR5 = "CL + BL + 2 - CWL + 2 (postamble, preamble), ramulator2 ddr5.py"

TIMINGS: dict[Dram, Mapping[str, Value]] = {
    Dram.DDR5_6400: {
        **_ddr5("DDR5_6400AN", _RTW_DDR5),
        **_values(
            _DDR5.format("DDR5_6400AN"),
            "published",
            "nCK",
            **{"RCD": 46, "RP": 46, "RAS": 103, "RC": 149, "RTP": 24, "WR": 96, "CL": 46, "CWL": 44},
            **{"CCD_L": 16, "WTR_S": 5, "WTR_L": 32},
        ),
        **_values(_WHOLE_BURSTS, "assumed", "nCK", CCD_L_WR=32),
        **_values("the same as RP for DDR5", "published", "nCK", RP_AB=46),
    },
    Dram.DDR5_4800: {
        **_ddr5("DDR5_4800AN", _RTW_DDR5),
        **_values(
            _DDR5.format("DDR5_4800AN"),
            "published",
            "nCK",
            **{"RCD": 34, "RP": 34, "RAS": 77, "RC": 111, "RTP": 18, "WR": 72, "CL": 34, "CWL": 32},
            **{"CCD_L": 12, "WTR_S": 6, "WTR_L": 24},
        ),
        **_values(_WHOLE_BURSTS, "assumed", "nCK", CCD_L_WR=24),
        **_values("the same as RP for DDR5", "published", "nCK", RP_AB=34),
    },
    Dram.LPDDR5X_8533: {
        **_values(
            'Proteus lpddr5x-8533.yaml ("JEDEC-class")',
            "published",
            "ns",
            **{"RCD": 18, "RP": 21, "RAS": 42, "RC": 63, "RTP": 7.5, "WR": 34},
            **{"RRD_S": 3.75, "RRD_L": 7.5, "FAW": 20},
        ),
        **_values("JESD209-5B tRPab; Proteus has it for one bank, too", "published", "ns", RP_AB=21),
        **_values(
            "Proteus lpddr5x-8533.yaml; JESD209-5 BL/n in bank group mode",
            "published",
            "nCK",
            CCD_S=2,
            CCD_L=4,
        ),
        **_values("as CCD_L: ramulator2 lpddr5.py has one value for both", "derived", "nCK", CCD_L_WR=4),
        **_values(
            "ramulator2 lpddr5.py preset LPDDR5_8533 (scaled from LPDDR5-6400 by the clock)",
            "derived",
            "nCK",
            **{"CL": 23, "CWL": 12, "WTR_S": 7, "WTR_L": 14},
        ),
        **_values(_RAMULATOR.format("lpddr5.py", "LPDDR5_8533"), "published", "nCK", BL=2, PPD=2),
        **_values("CL + BL + 2 - CWL, ramulator2 lpddr5.py", "derived", "nCK", RTW=15),
        **_values("JESD209-5: 32 ms over 8,192 refreshes", "published", "ns", REFI=3906),
        **_values("JESD209-5B table 235 tREFIpb", "published", "ns", REFI_SET=488),
        **_values("JESD209-5B table 235 tpbR2act", "published", "ns", REF_ACT=7.5),
        **_values("JESD209-5B table 235 tpbR2pbR", "published", "ns", REF_REF=90),
        **_values("JESD209-5: at most 8 refreshes postponed", "published", "", POSTPONED=8),
    },
    Dram.HBM3_6400: {
        **_values(
            _RAMULATOR.format("hbm3.py", "HBM3_6400Mbps"),
            "published",
            "nCK",
            **{
                "RCD": 31,
                "RCD_WR": 15,
                "RP": 26,
                "RAS": 45,
                "RC": 72,
                "RTP": 9,
                "WR": 33,
                "CL": 20,
                "CWL": 10,
            },
            **{"BL": 2, "CCD_S": 2, "CCD_L": 4, "RRD_S": 4, "RRD_L": 5, "FAW": 24, "WTR_S": 7, "WTR_L": 10},
            **{"RTW": 20, "PPD": 2},
        ),
        **_values("the same as RP: hbm3.py has one value for both", "published", "nCK", RP_AB=26),
        **_values("as CCD_L: hbm3.py has one value for both", "published", "nCK", CCD_L_WR=4),
        **_values("JESD238", "published", "ns", REFI=3900),
        **_values("tREFI / 16 banks", "derived", "ns", REFI_SET=243.75),
        **_values("JESD238 tRREFD: 8 ns, at least 3 nCK", "published", "ns", REF_ACT=8, REF_REF=8),
        **_values("as LPDDR5", "assumed", "", POSTPONED=8),
    },
}
"""Per part: values by the names of `MEANINGS`."""


def _densities(
    rows: tuple[str, str], rfc: str, rfc_set: str, of: Mapping[int, tuple[int, float, float]]
) -> dict[int, Density]:
    """By Gbit: rows, tRFC and that of a set, from those sources; of the rows also how sure they are."""
    return {
        gbit: Density(Value(count, "", *rows), Value(all_banks, "ns", rfc), Value(a_set, "ns", rfc_set))
        for gbit, (count, all_banks, a_set) in of.items()
    }


_DDR5_DENSITIES = _densities(
    ("ramulator2 ddr5.py, x8", "published"),
    "JESD79-5 tRFC1",
    "JESD79-5 table 282 tRFCsb",
    {16: (1 << 16, 295, 130)},
) | {
    32: Density(
        Value(1 << 17, "", "ramulator2 ddr5.py, x8"),
        Value(410, "ns", "ramulator2 ddr5.py tRFC1"),
        Value(190, "ns", "JESD79-5 leaves it open; as tRFC1 grows", "assumed"),
    )
}

DENSITIES: dict[Dram, Mapping[int, Density]] = {
    Dram.DDR5_6400: _DDR5_DENSITIES,
    Dram.DDR5_4800: _DDR5_DENSITIES,
    Dram.LPDDR5X_8533: _densities(
        ("ramulator2 lpddr5.py, x16", "published"),
        "JESD209-5B tRFCab",
        "JESD209-5B tRFCpb",
        {8: (1 << 15, 210, 120), 16: (1 << 16, 280, 140), 32: (1 << 17, 380, 190)},
    ),
    Dram.HBM3_6400: _densities(
        ("JESD238, the stack levels of a channel as one", "derived"),
        "JESD238 table 84 tRFCab",
        "ramulator2 hbm3.py: 320 nCK for every density",
        {
            4: (1 << 14, 260, 200),
            8: (1 << 15, 350, 200),
            16: (1 << 16, 450, 200),
            32: (1 << 17, 550, 200),
        },
    ),
}
"""Per part and Gbit of a die (HBM3: of a channel)."""
