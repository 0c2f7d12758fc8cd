"""Many questions at once: every combination of the axes, on local cores or on a Dask cluster."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from typing import Any

from nearkv_hw.abi import DeviceConfig

from nearkv.errors import ArgumentError

from .quantities import quantity
from .setup import Setup, device
from .systems import estimate

Axes = dict[str, list[Any]]
"""Values of each axis, in the order given."""
Report = Callable[[int, int], None]
"""Told how many questions are answered, and of how many."""

_COUNTS = ("context", "batch", "gpus", "devices", "capacity_bytes", "micro_batches", "hosts", "page_rows")
_NAMES = ("model", "kv_format", "gpu", "form")
_RATES = ("host_share", "unit_rate", "link_factor")
_OF_SETUP = (*_COUNTS, *_NAMES, *_RATES)
_PARALLEL = 200
"""Fewer questions are answered in this process: another one takes seconds to start."""
_CHUNK = 50
"""Questions that a process gets at a time."""


def parse(texts: Sequence[str]) -> Axes:
    """Axes as people write them: `context=4k..1m` doubles, `gpu=h100,h200` lists.

    Raises
    ------
    ArgumentError : an axis that cannot be read, that does not exist, or is given twice.

    Examples
    --------
    >>> parse(["context=4k..16k", "gpu=h100,h200"])
    {'context': [4096, 8192, 16384], 'gpu': ['h100', 'h200']}
    """
    of_device = [f.name for f in fields(DeviceConfig) if f.name not in ("name", *_OF_SETUP)]
    axes: Axes = {}
    for text in itertools.chain.from_iterable(t.split() for t in texts):
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ArgumentError(f"{text!r} is no axis; write context=4k..1m or gpu=h100,h200")
        if name not in (*_OF_SETUP, *of_device):
            raise ArgumentError(f"no axis {name!r}; there are {', '.join((*_OF_SETUP, *of_device))}")
        if name in axes:
            raise ArgumentError(f"axis {name} is given twice; write its values as {name}=a,b")
        axes[name] = list(_values(name, values))
    if not axes:
        raise ArgumentError("a sweep has at least one axis, such as context=4k..1m")
    return axes


def _values(name: str, text: str) -> Iterator[Any]:
    first, dots, last = text.partition("..")
    if dots:
        low, high = _number(name, first), _number(name, last)
        least = 1e-6 if name in _RATES else 1
        if not least <= low <= high < math.inf:
            raise ArgumentError(f"{name}={text}: goes from {least:g} or more to no less, doubling")
        while low <= high:
            yield low
            low *= 2
        return
    for value in text.split(","):
        is_name = name in _NAMES or (name not in _RATES and not value[:1].isdigit())
        yield value if is_name else _number(name, value)


def _number(name: str, text: str) -> int | float:
    if name not in _RATES:
        return quantity(text, name)
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentError(f"{name}={text!r}: write a number, such as 0.5") from error


def question(setup: Setup, point: Mapping[str, Any]) -> Setup:
    """A setup with the values of a point; a change of the device makes a configuration of its preset anew.

    Raises
    ------
    ArgumentError, ValueError : a value is not allowed.
    """
    own = {name: value for name, value in point.items() if name in _OF_SETUP}
    changed = {name: value for name, value in point.items() if name not in own}
    if changed:
        given = {k: v for k, v in setup.config.to_dict().items() if k not in ("name", "capacity_bytes")}
        if "dram" in changed:  # what another part lays down is its own
            for name in ("clock_mhz", "density_gbit"):
                given.pop(name)
        own["config"] = device(setup.config.name, **given | changed)
    return replace(setup, **own)


def answer(setup: Setup, point: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a point: a flat one for every system."""
    asked = question(setup, point)
    return [{**point, **flatten(found.to_dict())} for found in estimate(asked)]


def run(
    setup: Setup, axes: Axes, *, dask: str | None = None, report: Report = lambda done, total: None
) -> list[dict[str, Any]]:
    """Answers of all points, in the order of the axes.

    Parameters
    ----------
    setup : what the axes leave open.
    axes : as `parse` gives them.
    dask : address of a Dask scheduler, whose workers have nearkv installed; local cores if not given.
    report : told of progress.

    Raises
    ------
    ArgumentError : a value is not allowed, or Dask is wanted and not installed.
    """
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for point in points:
        question(setup, point)  # refuses before anything is started
    chunks = [points[at : at + _CHUNK] for at in range(0, len(points), _CHUNK)]
    rows: list[dict[str, Any]] = []
    done = 0
    for chunk, found in zip(chunks, _answers(setup, chunks, dask), strict=True):
        rows += found
        done += len(chunk)
        report(done, len(points))
    return rows


def _answers(
    setup: Setup, chunks: list[list[dict[str, Any]]], dask: str | None
) -> Iterator[list[dict[str, Any]]]:
    if dask is not None:
        yield from _on_dask(setup, chunks, dask)
        return
    workers = min(os.cpu_count() or 1, len(chunks))
    if workers < 2 or sum(map(len, chunks)) < _PARALLEL:
        yield from (_chunk(setup, chunk) for chunk in chunks)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_chunk, itertools.repeat(setup), chunks)


def _chunk(setup: Setup, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for point in points for row in answer(setup, point)]


def _on_dask(
    setup: Setup, chunks: list[list[dict[str, Any]]], address: str
) -> Iterator[list[dict[str, Any]]]:
    try:
        from distributed import Client
    except ImportError as error:
        raise ArgumentError(
            "Dask is not installed; pip install 'nearkv[sweep]', or leave --dask out"
        ) from error
    try:
        client = Client(address)
    except OSError as error:
        raise ArgumentError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler`, and workers "
            "with `dask worker`, or leave --dask out"
        ) from error
    with client:
        for future in client.map(_chunk, [setup] * len(chunks), chunks, pure=False):
            yield future.result()


def flatten(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested dicts as one, names joined by dots; parts that depend on the system are left out."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if name in ("parts_ms", "energy_parts_j"):
            continue
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat
