"""The DRAM model: every rule that is broken by one tCK is named, and distances in frames break none."""

import subprocess
from operator import attrgetter
from pathlib import Path

import pytest
from native_checks import is_free_of_warnings, sanitized_program
from nearkv_hw.abi.dram import PARTS, Dram, Refresh

CHECK = Path(__file__).with_name("dram_check.cpp")
PLACES = [f"{kind}_{parity}" for kind in ("column", "precharge", "activate") for parity in ("even", "odd")]
START = 40


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """dram_check.cpp, which carries out cases."""
    sources = ["dram.cpp", "store.cpp", "events.cpp"]
    return sanitized_program(tmp_path_factory.mktemp("dram"), CHECK, sources)


@pytest.fixture(scope="module")
def violations(program):
    """Takes cases, returns for each what its commands broke."""

    def run(cases):
        done = subprocess.run(
            [program], input="\n".join(cases) + "\n", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answers = done.stdout.splitlines()
        assert len(answers) == len(cases)
        return answers

    return run


class Script:
    """Commands at times in tCK: every place on the bus is at the start of a device cycle of one tCK."""

    def __init__(self, dram, refresh=Refresh.ALL_BANK, **changed):
        self.part = PARTS[dram]
        self.rules = self.part.rules(self.part.default_density, refresh)
        self.rules |= dict.fromkeys(PLACES, 0) | {"tck_per_cycle": 1} | changed
        self.commands = []
        self.second = self.rules["second_burst"]

    def __getattr__(self, name):
        return self.rules[name]

    def _tell(self, command, acts, takes, first, second=0):
        self.commands.append(f"{command} {acts - takes + 1} 0 {first} {second}")
        return self

    def act(self, tck, bank, row=0):
        return self._tell("ACT", tck, self.rules["activate_second"] + 1, bank, row)

    def read(self, tck, bank, column=0):
        return self._tell("RD", tck, self.rules["column_takes"], bank, column)

    def write(self, tck, bank, column=0):
        return self._tell("WR", tck, self.rules["column_takes"], bank, column)

    def pre(self, tck, bank=-1):
        return self._tell("PRE", tck, 1, bank)

    def ref(self, tck, subset=-1):
        return self._tell("REF", tck, 1, subset)

    def __str__(self):
        rules = " ".join(f"{name}={value}" for name, value in self.rules.items())
        return ";".join([rules, *self.commands])


def opened(dram, *banks, **changed):
    """Some rows open for a long time, and the time."""
    script = Script(dram, **changed)
    for i, bank in enumerate(banks):
        script.act(START + i * (script.FAW + script.RRD_L), bank)
    return script, START + len(banks) * (script.FAW + script.RRD_L) + script.RC


def rcd(d):
    s = Script(d).act(START, 0)
    return s, s.RCD, lambda n: s.read(START + n, 0)


def rcd_wr(d):
    s = Script(d).act(START, 0)
    return s, s.RCD_WR, lambda n: s.write(START + n, 0)


def rp(d):
    s, t = opened(d, 0)
    s.pre(t, 0)
    return s, s.RP, lambda n: s.act(t + n, 0)


def rp_ab(d):
    s, t = opened(d, 0)
    s.pre(t)
    return s, s.RP_AB, lambda n: s.act(t + n, 3)


def rp_ab_before_refresh(d):
    s, t = opened(d, 0)
    s.pre(t)
    return s, s.RP_AB, lambda n: s.ref(t + n)


def ras(d):
    s = Script(d).act(START, 0)
    return s, s.RAS, lambda n: s.pre(START + n, 0)


def ras_before_precharge_of_all(d):
    s = Script(d).act(START, 5)
    return s, s.RAS, lambda n: s.pre(START + n)


def rc(d):
    s = Script(d, RP=1).act(START, 0)
    s.pre(START + s.RAS, 0)
    return s, s.RC, lambda n: s.act(START + n, 0)


def rc_before_refresh(d):
    s = Script(d, RP_AB=1).act(START, 0)
    s.pre(START + s.RAS)
    return s, s.RC, lambda n: s.ref(START + n)


def rtp(d):
    s, t = opened(d, 0)
    s.read(t, 0)
    return s, s.second + s.RTP, lambda n: s.pre(t + n, 0)


def wr(d):
    s, t = opened(d, 0)
    s.write(t, 0)
    return s, s.second + s.CWL + s.BL + s.WR, lambda n: s.pre(t + n, 0)


def ccd_l(d):
    s, t = opened(d, 0)
    s.read(t, 0)
    return s, s.second + s.CCD_L, lambda n: s.read(t + n, 0, 1)


def ccd_l_of_two_banks(d):
    bank = PARTS[d].bank_groups
    s, t = opened(d, 0, bank)
    s.read(t, 0)
    return s, s.second + s.CCD_L, lambda n: s.read(t + n, bank)


def ccd_s(d):
    s, t = opened(d, 0, 1)
    s.read(t, 0)
    return s, s.second + s.CCD_S, lambda n: s.read(t + n, 1)


def ccd_s_between_bursts(d):
    s, t = opened(d, 0, 1)
    s.write(t, 0)
    return s, s.CCD_S, lambda n: s.write(t + n, 1)


def ccd_l_wr(d):
    s, t = opened(d, 0)
    s.write(t, 0)
    return s, s.second + s.CCD_L_WR, lambda n: s.write(t + n, 0, 1)


def rrd_s(d):
    s = Script(d).act(START, 0)
    return s, s.RRD_S, lambda n: s.act(START + n, 1)


def rrd_l(d):
    s = Script(d).act(START, 0)
    return s, s.RRD_L, lambda n: s.act(START + n, PARTS[d].bank_groups)


def faw(d):
    s = Script(d)
    for i in range(4):
        s.act(START + i * s.RRD_S, i)
    return s, s.FAW, lambda n: s.act(START + n, PARTS[d].bank_groups)


def wtr_s(d):
    s, t = opened(d, 0, 1)
    s.write(t, 0)
    return s, s.second + s.CWL + s.BL + s.WTR_S, lambda n: s.read(t + n, 1)


def wtr_l(d):
    bank = PARTS[d].bank_groups
    s, t = opened(d, 0, bank)
    s.write(t, 0)
    return s, s.second + s.CWL + s.BL + s.WTR_L, lambda n: s.read(t + n, bank)


def rtw(d):
    s, t = opened(d, 0, 1)
    s.read(t, 0)
    return s, s.second + s.RTW, lambda n: s.write(t + n, 1)


def data_bus(d):
    s, t = opened(d, 0, 1, RTW=-1000)
    s.read(t, 0)
    return s, s.second + s.CL + s.BL - s.CWL, lambda n: s.write(t + n, 1)


def command_bus(d):
    s = Script(d).act(START, 0)
    return s, 1, lambda n: s.pre(START + n, 3)


def ppd(d):
    s = Script(d).pre(START, 0)
    return s, s.PPD, lambda n: s.pre(START + n, 1)


def rfc(d):
    s = Script(d).ref(START)
    return s, s.RFC, lambda n: s.act(START + n, 0)


def rfc_before_refresh(d):
    s = Script(d).ref(START)
    return s, s.RFC, lambda n: s.ref(START + n)


def rfc_before_precharge(d):
    s = Script(d).ref(START)
    return s, s.RFC, lambda n: s.pre(START + n)


def rfc_set(d):
    s = Script(d, Refresh.PER_BANK).ref(START, 1)
    bank = next(b for b in range(s.banks) if s.part.bank_set(b) == 1)
    return s, s.RFC_SET, lambda n: s.act(START + n, bank)


def ref_act(d):
    s = Script(d, Refresh.PER_BANK).ref(START, 1)
    return s, s.REF_ACT, lambda n: s.act(START + n, 0)


def ref_ref(d):
    s = Script(d, Refresh.PER_BANK).ref(START, 1)
    return s, s.REF_REF, lambda n: s.ref(START + n, 0)


def rrd_l_before_refresh(d):
    s = Script(d, Refresh.PER_BANK).act(START, 0)
    return s, s.RRD_L, lambda n: s.ref(START + n, 1)


NAMED = {
    "RCD": rcd,
    "RCD_WR": rcd_wr,
    "RP": rp,
    "RAS": [ras, ras_before_precharge_of_all],
    "RP_AB": [rp_ab, rp_ab_before_refresh],
    "RC": [rc, rc_before_refresh],
    "RTP": rtp,
    "WR": wr,
    "CCD_L": [ccd_l, ccd_l_of_two_banks],
    "CCD_S": [ccd_s, ccd_s_between_bursts],
    "CCD_L_WR": ccd_l_wr,
    "RRD_S": rrd_s,
    "RRD_L": [rrd_l, rrd_l_before_refresh],
    "FAW": faw,
    "WTR_S": wtr_s,
    "WTR_L": wtr_l,
    "RTW": rtw,
    "data bus": data_bus,
    "command bus": command_bus,
    "PPD": ppd,
    "RFC": [rfc, rfc_before_refresh, rfc_before_precharge, rfc_set],
    "REF_ACT": ref_act,
    "REF_REF": ref_ref,
}
CASES = [
    pytest.param(rule, case, id=case.__name__)
    for rule, cases in NAMED.items()
    for case in (cases if isinstance(cases, list) else [cases])
]


@pytest.mark.rtl
@pytest.mark.parametrize("dram", PARTS, ids=lambda dram: dram.name)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_a_tck_too_early_is_named(violations, dram, rule, case):
    texts = []
    for off in (1, 0):
        script, least, tell = case(dram)
        tell(least - off)
        texts.append(str(script))
    broken, kept = violations(texts)
    assert broken.startswith(f"DRAM rule broken: {rule} of PART, channel 7, sub-channel 1: ")
    assert kept == ""


@pytest.mark.rtl
@pytest.mark.parametrize("dram", PARTS, ids=lambda dram: dram.name)
def test_states_and_ranges(violations, dram):
    part = PARTS[dram]
    per_bank = Script(dram, Refresh.PER_BANK).rules
    row, column, set_count = part.rows - 1, part.row_lines - 1, per_bank["sets"]

    def column_after(command):
        s, t = opened(dram, 0)
        s.pre(t, 0)
        return getattr(s, command)(t + s.RP, 0)

    cases = {
        str(opened(dram, 2)[0].act(START + 2000, 2)): "ACT of an open bank",
        str(opened(dram, 2)[0].ref(START + 2000)): "REF with an open bank",
        str(Script(dram).read(START, 0)): "column command to a closed bank",
        str(column_after("read")): "column command to a closed bank",
        str(column_after("write")): "column command to a closed bank",
        str(Script(dram).act(START, 0, row + 1)): "row",
        str(Script(dram).act(START, 0, row)): "",
        str(opened(dram, 0)[0].read(START + 2000, 0, column + 1)): "column",
        str(opened(dram, 0)[0].write(START + 2000, 0, column)): "",
        str(Script(dram, Refresh.PER_BANK).ref(START, set_count)): "set",
        str(Script(dram, Refresh.PER_BANK).ref(START, set_count - 1)): "",
        str(Script(dram, Refresh.ALL_BANK).ref(START, 0)): "refresh mode",
    }
    for rule, found in zip(cases.values(), violations(list(cases)), strict=True):
        assert bool(found) == bool(rule)
        assert found.startswith(f"DRAM rule broken: {rule} of PART, channel 7, " if rule else "")


@pytest.mark.rtl
@pytest.mark.parametrize("dram", PARTS, ids=lambda dram: dram.name)
def test_rows_and_columns_share_a_bus_or_not(violations, dram):
    s, t = opened(dram, 0)
    s.pre(t, 3).read(t, 0)
    (found,) = violations([str(s)])
    assert ("command bus" in found) == (dram is not Dram.HBM3_6400)
    assert bool(found) == ("command bus" in found)


@pytest.mark.rtl
@pytest.mark.parametrize("dram", PARTS, ids=lambda dram: dram.name)
@pytest.mark.parametrize("done", [0, 1, 5, 30])
def test_refreshes_may_be_owed_but_not_more(violations, dram, done):
    """As many early refreshes as may be owed count, and no more."""
    texts = []
    for late in (0, 1):
        s = Script(dram)
        counted = 0
        for i in range(done):
            s.ref(1 + i * s.RFC)
            counted = min(counted + 1, (1 + i * s.RFC) // s.REFI + s.POSTPONED)
        texts.append(str(s.pre((counted + s.POSTPONED + 1) * s.REFI + late)))
    kept, broken = violations(texts)
    assert kept == ""
    assert broken.startswith("DRAM rule broken: REFI of PART, ")


@pytest.mark.rtl
@pytest.mark.parametrize("dram", PARTS, ids=lambda dram: dram.name)
def test_every_set_must_be_refreshed(violations, dram):
    texts = []
    for left_out in (None, 2):
        s = Script(dram, Refresh.PER_BANK)
        for i in range(s.sets * (s.POSTPONED + 3)):
            if i % s.sets != left_out:
                s.ref((i + 1) * s.REFI_SET, i % s.sets)
        texts.append(str(s))
    kept, broken = violations(texts)
    assert kept == ""
    assert broken.startswith("DRAM rule broken: REFI of PART, ")


@pytest.mark.rtl
def test_a_message_names_rule_part_place_and_both_times(violations):
    part = PARTS[Dram.DDR5_6400]
    rules = " ".join(f"{k}={v}" for k, v in part.rules(16, Refresh.ALL_BANK).items())
    assert violations([f"{rules};ACT 101 0 5 7;RD 111 0 5 1"]) == [
        "DRAM rule broken: RCD of PART, channel 7, sub-channel 1: RD (bank 5) at tCK 447 (cycle 111): "
        "42 tCK after ACT (bank 5) at tCK 405 (cycle 101), must be at least 46"
    ]


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("", "missing {} in the rules of the part"),
        ("RCD=1 RCD=1", "unknown or repeated RCD in the rules of the part"),
        ("MOON=1", "unknown or repeated MOON in the rules of the part"),
        ("RCD=1x", "no number for RCD in the rules of the part"),
        ("RCD", "no number for RCD in the rules of the part"),
    ],
)
def test_rules_that_do_not_fit_end_the_process(program, rules, message):
    done = subprocess.run([program], input=f"{rules}\n", capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message.format("BL") in done.stderr


@pytest.mark.rtl
def test_systemverilog_is_free_of_warnings():
    is_free_of_warnings("nearkv_dram.sv")


class Frames:
    """Commands in frames, in the part's places."""

    def __init__(self, part, refresh, first):
        self.part, self.first = part, first
        rules = part.rules(part.default_density, refresh)
        self.lines = [" ".join(f"{name}={value}" for name, value in rules.items())]

    def tell(self, frame, command, first, second=0):
        frame += self.first
        slot = self.part.slots.column if command in ("RD", "WR") else self.part.slots.activate
        cycle = frame * self.part.subchannels + slot.cycle
        self.lines.append(f"{command} {cycle} {frame % 2} {first} {second}")
        return self

    def __str__(self):
        return ";".join(self.lines)


def frame_cases(part, refresh):
    """By name: commands at frame 0 with what must precede them, and the command that keeps its distance."""
    same = part.bank_groups  # another bank of bank 0's group
    per_bank = refresh is Refresh.PER_BANK
    subset = 1 if per_bank else -1
    refreshed = next(bank for bank in range(part.banks) if part.bank_set(bank) == 1)
    four = [(i, "ACT", i, 0) for i in range(4)]
    open_two = [(-60, "ACT", 0, 0), (-50, "ACT", 1, 0), (-40, "ACT", same, 0)]
    closed_one = [(-60, "ACT", 0, 0), (-40, "ACT", refreshed, 0)]
    cases = {
        "activate_to_column": [([(0, "ACT", 0, 0)], ("RD", 0)), ([(0, "ACT", 0, 0)], ("WR", 0))],
        "column_to_precharge_read": [([*open_two, (0, "RD", 0, 0)], ("PRE", 0))],
        "column_to_precharge_write": [([*open_two, (0, "WR", 0, 0)], ("PRE", 0))],
        "activate_to_precharge": [([(0, "ACT", 0, 0)], ("PRE", 0))],
        "precharge_to_activate": [([(-60, "ACT", 0, 0), (0, "PRE", 0, 0)], ("ACT", 0))],
        "activate_other_group": [([(0, "ACT", 0, 0)], ("ACT", 1))],
        "activate_same_group": [([(0, "ACT", 0, 0)], ("ACT", same))],
        "four_activates": [(four, ("ACT", same))],
        "column_other_group": [([*open_two, (0, c, 0, 0)], (c, 1)) for c in ("RD", "WR")],
        "column_same_group": [([*open_two, (0, "RD", 0, 0)], ("RD", b)) for b in (0, same)],
        "column_same_group_write": [([*open_two, (0, "WR", 0, 0)], ("WR", b)) for b in (0, same)],
        "read_to_write": [([*open_two, (0, "RD", 0, 0)], ("WR", b)) for b in (0, 1)],
        "write_to_read_other_group": [([*open_two, (0, "WR", 0, 0)], ("RD", 1))],
        "write_to_read_same_group": [([*open_two, (0, "WR", 0, 0)], ("RD", b)) for b in (0, same)],
        "refresh": [([(0, "REF", subset, 0)], ("ACT", refreshed))],
        "refresh_to_other": [([(0, "REF", subset, 0)], ("ACT", 0))],
        "refresh_to_refresh": [([(0, "REF", subset, 0)], ("REF", 0 if per_bank else -1))],
        "precharge_to_refresh": [([*closed_one, (0, "PRE", -1, 0)], ("REF", subset))],
    }
    if per_bank:
        cases["precharge_to_refresh"].append(([*closed_one, (0, "PRE", refreshed, 0)], ("REF", subset)))
    if part.slots.late_tck:
        late, four_late = [(0, "ACT_LATE", 0, 0)], [(i, "ACT_LATE", i, 0) for i in range(4)]
        if per_bank:
            cases["refresh_to_other"].append((late, ("REF", subset)))
        cases["four_activates"] += [(four_late, ("ACT", same)), (four_late, ("ACT_LATE", same))]
        cases["activate_other_group"].append((late, ("ACT_LATE", 1)))
        cases |= {
            "late.activate_to_column": [(late, ("RD", 0)), (late, ("WR", 0))],
            "late.activate_to_precharge": [(late, ("PRE", 0))],
            "late.activate_other_group": [(late, ("ACT", 1))],
            "late.activate_same_group": [(late, ("ACT", same))],
            "late.four_activates": [(four, ("ACT_LATE", same))],
        }
    return cases


@pytest.mark.rtl
@pytest.mark.parametrize("refresh", Refresh, ids=lambda refresh: refresh.name)
@pytest.mark.parametrize("dram", PARTS, ids=lambda dram: dram.name)
def test_frames_keep_every_rule_and_waste_none(violations, dram, refresh):
    """At the distance that `frames` gives, and beyond, the model is silent from even and from odd frames; one
    frame less breaks a rule from one of them at least."""
    part = PARTS[dram]
    timings = part.frames(part.default_density, refresh)
    least = {name: attrgetter(name)(timings) for name in frame_cases(part, refresh)}
    texts, meant = [], []
    for name, cases in frame_cases(part, refresh).items():
        for n, (before, (command, bank)) in enumerate(cases):
            for distance in range(-1, 6):
                for parity in (0, 1):
                    frames = Frames(part, refresh, 100 + parity)
                    for earlier in before:
                        frames.tell(*earlier)
                    at = least[name] + distance
                    texts.append(str(frames.tell(at, command, bank, 1 if command in ("RD", "WR") else 0)))
                    meant.append((name, n, distance, parity))
    found = dict(zip(meant, violations(texts), strict=True))
    assert {key: text for key, text in found.items() if key[2] >= 0 and text} == {}
    early = {key[:2] for key, text in found.items() if key[2] < 0 and text}
    at_least_one = {"activate_other_group", "column_other_group"}  # a frame is as little as there is
    tight = {key[:2] for key in found if least[key[0]] > 1 or key[0] not in at_least_one}
    tight -= {("activate_to_column", 1)} if dram is Dram.HBM3_6400 else set()  # a write may come sooner there
    assert tight - early == set()
