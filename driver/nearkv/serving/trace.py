"""Request traces: the two public formats, read and checked.

- *Mooncake* (github.com/kvcache-ai/Mooncake, FAST25-release): a JSON object per line with `timestamp` in
  milliseconds, `input_length`, `output_length`, and `hash_ids`, one for every 512 tokens of the prompt, and
  for the fewer ones at its end. Two prompts with the same first ids have the same first tokens.
- *Azure* (github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md): CSV with the columns
  `TIMESTAMP` (a date and time), `ContextTokens`, `GeneratedTokens`. It says nothing of shared prefixes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nearkv.arguments import one_of, whole_number
from nearkv.errors import ArgumentError

MAX_TOKENS = 1 << 30
BLOCK_TOKENS = 512
"""Tokens of a block of the Mooncake traces."""
_LONGEST_S = 1e12
"""Beyond it (30,000 years) a float tells no tenth of a millisecond."""
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
_ENCODING = "utf-8-sig"  # with or without the mark that spreadsheets put first
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request.

    Parameters
    ----------
    arrival_s : seconds since the first request.
    prompt : tokens of its prompt.
    output : tokens that it is answered with.
    blocks : names of the prompt's whole blocks; equal first names are equal first tokens.
    """

    arrival_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival.

    Parameters
    ----------
    name : for people.
    requests : at least one.
    block_tokens : tokens of a block.
    unused : fields of the file that mean nothing here.

    Raises
    ------
    ArgumentError : a request that is not allowed, and why.
    """

    name: str
    requests: Sequence[Request]
    block_tokens: int = BLOCK_TOKENS
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_number("block_tokens", self.block_tokens, 1, MAX_TOKENS)
        if not self.requests:
            raise ArgumentError(f"{self.name}: no requests; a trace has at least one")
        before = 0.0
        for number, request in enumerate(self.requests):
            where = f"{self.name}, request {number}"
            _tokens(f"{where}: prompt", request.prompt)
            _tokens(f"{where}: output", request.output)
            if not 0 <= request.arrival_s < _LONGEST_S:
                raise ArgumentError(
                    f"{where}: arrival_s={request.arrival_s!r}: must be seconds of at least 0 and below "
                    f"{_LONGEST_S:g}"
                )
            if request.arrival_s < before:
                raise ArgumentError(
                    f"{where}: arrival_s={request.arrival_s!r} is before {before:g}, when the one before "
                    "arrives; sort requests by arrival"
                )
            if len(request.blocks) > request.prompt // self.block_tokens:
                raise ArgumentError(
                    f"{where}: {len(request.blocks)} blocks of {self.block_tokens} tokens are more than its "
                    f"prompt of {request.prompt} has whole ones"
                )
            before = request.arrival_s

    def scaled(self, *, speedup: float = 1.0, limit: int | None = None) -> Trace:
        """The same, its requests coming `speedup` times as fast, or its first `limit` requests alone.

        Raises
        ------
        ArgumentError : a speed-up that is not above 0, or a limit below 1.
        """
        if not 0 < speedup < float("inf"):
            raise ArgumentError(f"speedup={speedup!r}: must be above 0; 2 makes requests come twice as fast")
        if limit is not None:
            whole_number("limit", limit, 1, MAX_TOKENS)
        requests = self.requests[:limit]
        if speedup != 1:
            requests = [replace(one, arrival_s=one.arrival_s / speedup) for one in requests]
        return replace(self, requests=requests)


def read(
    path: Path, *, kind: str | None = None, block_tokens: int = BLOCK_TOKENS, sort: bool = False
) -> Trace:
    """A trace from a file.

    Parameters
    ----------
    path : of the file.
    kind : "mooncake" or "azure"; by the file's ending, .jsonl or .csv, if not given.
    block_tokens : tokens that a hash stands for (Mooncake).
    sort : whether requests that are not in the order of their arrival are put in order.

    Raises
    ------
    ArgumentError : the line that cannot be used, what it has, and what it may have.
    OSError : the file cannot be read.
    """
    whole_number("block_tokens", block_tokens, 1, MAX_TOKENS)
    if kind is None:
        kind = {".jsonl": "mooncake", ".csv": "azure"}.get(path.suffix)
        if kind is None:
            raise ArgumentError(
                f"{path}: its ending is neither .jsonl (Mooncake) nor .csv (Azure); say which format it has"
            )
    reader = one_of("format", kind, _READERS)
    try:
        rows, unused = reader(path, block_tokens)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{path}: is no text as a trace is ({error}); it must be UTF-8") from error
    if not rows:
        raise ArgumentError(f"{path}: no requests; a trace has at least one")
    if sort:
        rows.sort(key=lambda row: row[1].arrival_s)
    first, before = rows[0][1].arrival_s, rows[0]
    for row in rows:
        if row[1].arrival_s < before[1].arrival_s:
            raise ArgumentError(
                f"{path}, line {row[0]}: arrives before line {before[0]}, by "
                f"{before[1].arrival_s - row[1].arrival_s:g} s; sort the file, or have it sorted (--sort)"
            )
        before = row
    requests = [replace(request, arrival_s=request.arrival_s - first) for _, request in rows]
    return Trace(name=path.name, requests=requests, block_tokens=block_tokens, unused=unused)


Rows = list[tuple[int, Request]]
"""Requests with the numbers of their lines."""


def _mooncake(path: Path, block_tokens: int) -> tuple[Rows, tuple[str, ...]]:
    rows: Rows = []
    unused: dict[str, None] = {}
    with path.open(encoding=_ENCODING) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise ArgumentError(
                    f"{where}: is no JSON ({error}); every line is an object with {_MOONCAKE}"
                ) from error
            if not isinstance(fields, dict):
                raise ArgumentError(f"{where}: is no object; every line is one with {', '.join(_MOONCAKE)}")
            _present(where, fields, _MOONCAKE, "field")
            rows.append((number, _of_mooncake(where, fields, block_tokens)))
            unused |= dict.fromkeys(name for name in fields if name not in _MOONCAKE)
    return rows, tuple(unused)


def _of_mooncake(where: str, fields: dict[str, Any], block_tokens: int) -> Request:
    at, names = fields["timestamp"], fields["hash_ids"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e3 * _LONGEST_S:
        raise ArgumentError(
            f"{where}: timestamp={at!r}: must be milliseconds of at least 0 and below {1e3 * _LONGEST_S:g}"
        )
    prompt = _tokens(f"{where}: input_length", fields["input_length"])
    output = _tokens(f"{where}: output_length", fields["output_length"])
    if not isinstance(names, list) or not all(type(name) is int for name in names):
        raise ArgumentError(f"{where}: hash_ids={names!r}: must be a list of whole numbers")
    wanted = -(-prompt // block_tokens)
    if len(names) not in (0, wanted):
        raise ArgumentError(
            f"{where}: {len(names)} hash_ids; {prompt} tokens have {wanted} blocks of {block_tokens}, or [] "
            "where nothing is shared; another size of a block is --block-tokens"
        )
    return Request(
        arrival_s=at / 1e3, prompt=prompt, output=output, blocks=tuple(names[: prompt // block_tokens])
    )


def _azure(path: Path, block_tokens: int) -> tuple[Rows, tuple[str, ...]]:
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.DictReader(file)
        columns = [name for name in reader.fieldnames or () if name]
        _present(str(path), columns, _AZURE, "column")
        rows = [(number, _of_azure(f"{path}, line {number}", row)) for number, row in _numbered(reader)]
    return rows, tuple(name for name in columns if name not in _AZURE)


def _numbered(reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, str]]]:
    for row in reader:
        yield reader.line_num, row


def _of_azure(where: str, row: dict[str, str]) -> Request:
    if None in row:  # where the reader puts what is left over
        raise ArgumentError(f"{where}: has more cells than there are columns")
    try:
        at = datetime.fromisoformat(row["TIMESTAMP"])
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{where}: TIMESTAMP={row['TIMESTAMP']!r}: must be a date and time such as "
            "2023-11-16 18:15:46.6805900"
        ) from error
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    prompt, output = (_tokens(f"{where}: {name}", _whole(row[name])) for name in _AZURE[1:])
    return Request(arrival_s=at.timestamp(), prompt=prompt, output=output)


_READERS: dict[str, Callable[[Path, int], tuple[Rows, tuple[str, ...]]]] = {
    "mooncake": _mooncake,
    "azure": _azure,
}


def _present(where: str, given: Iterable[str], wanted: Sequence[str], what: str) -> None:
    given = list(given)
    missing = [name for name in wanted if name not in given]
    if missing:
        raise ArgumentError(
            f"{where}: no {what} {', '.join(missing)}; it has {', '.join(given) or 'none'}, and needs "
            f"{', '.join(wanted)}"
        )


def _tokens(what: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ArgumentError(f"{what}={value!r}: must be a whole number of tokens from 1 to {MAX_TOKENS}")
    return value


def _whole(text: str | None) -> int | str | None:
    """The number that a cell says, or what it says instead."""
    try:
        return int(text or "")
    except ValueError:
        return text
