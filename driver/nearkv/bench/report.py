"""Results of `nearkv bench memory` as the tables of docs/memory.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearkv.errors import ArgumentError
from nearkv.pages import replace_block

Results = Sequence[Mapping[str, Any]]
_COMMAND = "nearkv bench memory --write docs/memory.md"
_MEMBERS = {"name", "value", "unit", "config"}
_RATES = {
    "memory.batch": "32 jobs of 4,096 rows, 8 queries",
    "memory.batch256": "256 jobs of 256 rows, 8 queries",
    "memory.job4096": "one job of 4,096 rows, 4 queries, two channels",
    "memory.job256": "one job of 256 rows, 4 queries, two channels",
}
_TRAFFIC = {
    "streaming": "one line after the other",
    "random": "lines anywhere",
    "mixed": "two reads for every write, each one after the other",
}


def read_results(path: Path) -> list[dict[str, Any]]:
    """What a run printed with `--json`; ArgumentError where that is not what the file holds."""
    try:
        results = json.loads(path.read_text())["results"]
        ours = all(r.keys() == _MEMBERS and r["name"].startswith("memory.") for r in results)
    except (ValueError, TypeError, LookupError, AttributeError):
        ours = False
    if not ours:
        raise ArgumentError(
            f"{path} does not hold results; it must be what nearkv bench memory --json printed"
        )
    return list(results)


def write_into(page: Path, results: Results) -> None:
    """Replace the tables of a page; NearkvError where it has no place for them."""
    page.write_text(replace_block(page.read_text(), "figures", _COMMAND, markdown(results), where=page))


def markdown(results: Results) -> str:
    """Tables of whatever the results hold."""
    tables = (_rates, _heads, _latencies, _traffic, _shares, _attacc, _placements)
    return "\n\n".join(filter(None, (table(results) for table in tables)))


def _rates(results: Results) -> str:
    def row(part: str, placement: str) -> list[str]:
        cells = []
        for name in _RATES:
            of_it = {"part": part, "placement": placement}
            peak, best = (
                _value(results, f"{name}.fraction_of_{what}", **of_it) for what in ("peak", "ceiling")
            )
            cells.append("" if peak is None or best is None else f"{peak:.1%} ({best:.1%})")
        return cells

    devices = dict.fromkeys(
        (r["config"]["part"], r["config"]["placement"])
        for r in results
        if r["name"].startswith(tuple(_RATES))
    )
    rows = [[f"`{part}`", f"`{placement}`", *row(part, placement)] for part, placement in devices]
    return _table(
        "Share of the peak, and in brackets of the refresh ceiling",
        ["part", "placement", *_RATES.values()],
        rows,
    )


def _heads(results: Results) -> str:
    of_it = [r for r in results if r["name"] == "memory.heads.fraction_of_ceiling"]
    counts = list(dict.fromkeys(r["config"]["kv_heads"] for r in of_it))
    devices = dict.fromkeys((r["config"]["part"], r["config"]["placement"]) for r in of_it)
    rows = [
        [
            f"`{part}`",
            f"`{placement}`",
            *(
                _percent(
                    _value(
                        results,
                        "memory.heads.fraction_of_ceiling",
                        part=part,
                        placement=placement,
                        kv_heads=n,
                    )
                )
                for n in counts
            ),
        ]
        for part, placement in devices
    ]
    return _table(
        "Share of the ceiling by the number of heads",
        ["part", "placement", *(f"{n} heads" if n > 1 else "1 head" for n in counts)],
        rows,
    )


def _latencies(results: Results) -> str:
    names = ("memory.first_read_cycles", "memory.completion_cycles")
    devices = dict.fromkeys(
        (r["config"]["part"], r["config"]["placement"]) for r in results if r["name"] in names
    )
    rows = []
    for part, placement in devices:
        of_it = {"part": part, "placement": placement}
        figures = (
            _value(results, names[0], **of_it),
            *(_value(results, names[1], **of_it, queries_in_job=queries) for queries in (1, 4)),
        )
        rows.append([f"`{part}`", f"`{placement}`", *("" if f is None else f"{f:,.0f}" for f in figures)])
    return _table(
        "Ways in and out, in device cycles",
        ["part", "placement", "doorbell to first K read", "last line to record, 1 query", "4 queries"],
        rows,
    )


def _traffic(results: Results) -> str:
    parts = dict.fromkeys(r["config"]["part"] for r in results if r["name"].startswith("memory.controller."))
    rows = []
    for part in parts:
        for name, meaning in _TRAFFIC.items():
            share = _value(results, f"memory.controller.{name}.fraction_of_peak", part=part)
            of_limit = _value(results, f"memory.controller.{name}.fraction_of_limit", part=part)
            if share is not None and of_limit is not None:
                limit = f"{share / of_limit:.1%}"
                rows.append([f"`{part}`", meaning, f"{share:.1%}", limit, f"{of_limit:.1%}"])
        taken = _value(results, "memory.controller.unloaded.latency_ns", part=part)
        own = next(
            (
                r["config"]["part_ns"]
                for r in results
                if "part_ns" in r["config"] and r["config"]["part"] == part
            ),
            None,
        )
        if taken is not None and own is not None:
            rows.append([f"`{part}`", "one read of a closed bank", f"{taken:.1f} ns", f"{own:.1f} ns", ""])
    return _table(
        "A channel's memory alone, beside what its part allows",
        ["part", "traffic", "measured", "the part's limit", "share of it"],
        rows,
    )


def _shares(results: Results) -> str:
    def cells(part: str, placement: str, share: int) -> Iterable[str]:
        of_it = {"part": part, "placement": placement, "fabric_share": share}
        (alone,) = {r["config"]["host_alone"] for r in results if _is(r, "memory.shares.host", of_it)}
        yield f"{alone:.1%}"
        for client in ("host", "attention"):
            (found,) = (r for r in results if _is(r, f"memory.shares.{client}", of_it))
            yield f"{found['value']:.1%}"
            yield f"{found['config']['guaranteed']:.1%}"

    devices = dict.fromkeys(
        (r["config"]["part"], r["config"]["placement"], r["config"]["fabric_share"])
        for r in results
        if r["name"].startswith("memory.shares.")
    )
    return _table(
        "Random reads of the host beside attention, of the channels' peak",
        ["part", "placement", "host's share", "host alone", "host", "its own", "attention", "its own"],
        [
            [f"`{part}`", f"`{placement}`", f"{share}/16", *cells(part, placement, share)]
            for part, placement, share in devices
        ],
    )


def _attacc(results: Results) -> str:
    rows = [
        [
            str(r["config"]["heads"]),
            f"{r['value']:.1%}",
            f"{r['config']['published_fraction_of_peak']:.1%}",
        ]
        for r in results
        if r["name"].startswith("memory.attacc") and r["name"].endswith("fraction_of_peak")
    ]
    return _table(
        "An HBM3 stack, 4,096 rows of 128 fp16 elements, one query per head: share of the peak",
        ["heads", "this device", "AttAcc, buffer die"],
        rows,
    )


def _placements(results: Results) -> str:
    of_it = [r for r in results if r["name"] == "memory.placement.cycles"]
    base = next((r["value"] for r in of_it if r["config"]["placement"] == "controller"), None)
    rows = []
    for r in of_it:
        config = r["config"]
        crossed = _value(results, "memory.placement.link_bytes", placement=config["placement"])
        relative = "" if base is None else f"{r['value'] / base:.2f}"
        rows.append([f"`{config['placement']}`", f"{r['value']:,.0f}", relative, f"{crossed:,.0f}"])
    return _table(
        "The same step with the units in every place, and without any",
        ["placement", "cycles", "of `controller`", "bytes over the link"],
        rows,
    )


def _value(results: Results, name: str, **config: Any) -> float | None:
    """The value of the first result of a name whose config has these entries."""
    return next((float(result["value"]) for result in results if _is(result, name, config)), None)


def _is(result: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> bool:
    """Whether a result has this name, and these entries in its config."""
    return result["name"] == name and all(result["config"].get(key) == value for key, value in config.items())


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title, the first column left and the others right; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    rule = f"|---|{'---:|' * (len(columns) - 1)}"
    return "\n".join([f"{title}:", "", f"| {' | '.join(columns)} |", rule, *lines])
