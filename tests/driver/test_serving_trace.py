"""Traces: both public formats, made-up ones, and everything that a file can have wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from nearkv.errors import ArgumentError
from nearkv.serving import Request, Synthetic, Trace, read

DATA = Path(__file__).parent / "data"
MOONCAKE, AZURE = DATA / "requests_mooncake.jsonl", DATA / "requests_azure.csv"


def line(**changed):
    fields = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]} | changed
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def written(tmp_path, name, *lines):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_both_formats_say_the_same():
    mooncake, azure = read(MOONCAKE), read(AZURE)
    assert [one.arrival_s for one in mooncake.requests] == [0, 0.25, 0.25, 1.9, 4]
    for ours, theirs in zip(mooncake.requests, azure.requests, strict=True):
        assert ours.arrival_s == pytest.approx(theirs.arrival_s, abs=1e-6)
        assert (ours.prompt, ours.output) == (theirs.prompt, theirs.output)
    # names of whole blocks alone: 1,300 tokens have two and a part
    assert [one.blocks for one in mooncake.requests] == [(0, 1), (0,), (4, 5, 6, 7), (0, 1, 9), ()]
    assert {one.blocks for one in azure.requests} == {()}


def test_time_begins_with_the_first_request(tmp_path):
    path = written(tmp_path, "x.jsonl", line(timestamp=5000), "", line(timestamp=5500.5))
    assert [one.arrival_s for one in read(path).requests] == [0, pytest.approx(0.5005)]


def test_times_with_a_zone(tmp_path):
    path = written(
        tmp_path,
        "x.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 00:00:01,10,5",
    )
    assert read(path).requests[1].arrival_s == pytest.approx(0.99007)


def test_fields_without_a_meaning_are_told(tmp_path):
    path = written(tmp_path, "x.jsonl", line(session=1), line())
    assert read(path).unused == ("session",)
    path = written(
        tmp_path, "x.csv", "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00,1,2,3"
    )
    assert read(path).unused == ("NumImages",)


def test_order(tmp_path):
    path = written(tmp_path, "x.jsonl", line(timestamp=2000), line(timestamp=1000))
    with pytest.raises(
        ArgumentError, match=r"line 2: arrives before line 1, by 1 s; sort the file, .*--sort"
    ):
        read(path)
    assert [one.arrival_s for one in read(path, sort=True).requests] == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: is no JSON"),
        ("[1]", "line 1: is no object; every line is one with timestamp, input_length"),
        (line(hash_ids=None), "no field hash_ids; it has timestamp, input_length, output_length, and needs"),
        (line(timestamp=-1), "timestamp=-1: must be milliseconds of at least 0"),
        (line(timestamp=10**400), "must be milliseconds of at least 0 and below 1e\\+15"),
        (line(timestamp="now"), "timestamp='now': must be milliseconds"),
        (line(input_length=0), "input_length=0: must be a whole number of tokens from 1"),
        (line(output_length=-4), "line 1: output_length=-4: must be a whole number of tokens from 1"),
        (line(output_length=1.5), r"output_length=1\.5: must be a whole number"),
        (line(hash_ids=[1]), r"1 hash_ids; 600 tokens have 2 blocks of 512, or \[\] where nothing is shared"),
        (line(hash_ids="ab"), "hash_ids='ab': must be a list of whole numbers"),
        ("", "no requests; a trace has at least one"),
    ],
)
def test_bad_mooncake(tmp_path, text, message):
    with pytest.raises(ArgumentError, match=message):
        read(written(tmp_path, "x.jsonl", text))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["TIMESTAMP,ContextTokens"],
            "no column GeneratedTokens; it has TIMESTAMP, ContextTokens, and needs",
        ),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "no requests; a trace has at least one"),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"],
            "line 2: TIMESTAMP='yesterday': must be a date and time such as 2023-11-16",
        ),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1,-2"],
            "line 2: GeneratedTokens=-2: must be a whole number of tokens",
        ),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,many,2"],
            "ContextTokens='many': must be a whole number of tokens",
        ),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1"], "GeneratedTokens=None: must"),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1,2,3"],
            "line 2: has more cells than there are columns",
        ),
    ],
)
def test_bad_azure(tmp_path, lines, message):
    with pytest.raises(ArgumentError, match=message):
        read(written(tmp_path, "x.csv", *lines))


def test_encoding(tmp_path):
    path = tmp_path / "x.csv"
    plain = AZURE.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + plain)
    assert read(path).requests == read(AZURE).requests
    path.write_bytes(plain + b"\xff")
    with pytest.raises(ArgumentError, match=r"x\.csv: is no text as a trace is .*must be UTF-8"):
        read(path)


def test_formats_are_named(tmp_path):
    path = written(tmp_path, "x.log", line())
    with pytest.raises(ArgumentError, match=r"neither \.jsonl \(Mooncake\) nor \.csv \(Azure\)"):
        read(path)
    assert len(read(path, kind="mooncake").requests) == 1
    with pytest.raises(ArgumentError, match="format='x': there are mooncake, azure"):
        read(path, kind="x")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.csv")


def test_blocks_of_another_size(tmp_path):
    path = written(tmp_path, "x.jsonl", line(hash_ids=[*range(38)]))
    assert len(read(path, block_tokens=16).requests[0].blocks) == 37
    with pytest.raises(ArgumentError, match="another size of a block is --block-tokens"):
        read(path)


def test_scaled():
    trace = read(MOONCAKE)
    assert [one.arrival_s for one in trace.scaled(speedup=2, limit=4).requests] == [0, 0.125, 0.125, 0.95]
    with pytest.raises(
        ArgumentError, match=r"speedup=0: must be above 0; 2 makes requests come twice as fast"
    ):
        trace.scaled(speedup=0)
    with pytest.raises(ArgumentError, match="limit"):
        trace.scaled(limit=0)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "x: no requests; a trace has at least one"),
        ([Request(arrival_s=0, prompt=0, output=1)], "x, request 0: prompt=0: must be a whole number"),
        ([Request(arrival_s=0, prompt=1, output=0)], "x, request 0: output=0: must be a whole number"),
        (
            [Request(arrival_s=1, prompt=1, output=1), Request(arrival_s=0, prompt=1, output=1)],
            "sort requests",
        ),
        ([Request(arrival_s=float("inf"), prompt=1, output=1)], "arrival_s=inf: must be seconds of at"),
        ([Request(arrival_s=0, prompt=511, output=1, blocks=(1,))], "1 blocks of 512 tokens are more than"),
    ],
)
def test_bad_requests(requests, message):
    with pytest.raises(ArgumentError, match=message):
        Trace(name="x", requests=requests)


def test_synthetic():
    asked = Synthetic(requests=4000, rate=5, prompt=1000, output=100, prefixes=3, prefix=1500, seed=7)
    trace = asked.trace()
    assert trace == asked.trace()
    assert trace != Synthetic(requests=4000, seed=8).trace()
    assert "seed 7" in trace.name
    arrivals = np.array([one.arrival_s for one in trace.requests])
    assert np.diff(arrivals).mean() == pytest.approx(1 / 5, rel=0.05)
    assert np.diff(arrivals).std() == pytest.approx(1 / 5, rel=0.1)
    assert np.mean([one.prompt for one in trace.requests]) == pytest.approx(2500, rel=0.05)
    assert np.mean([one.output for one in trace.requests]) == pytest.approx(100, rel=0.05)
    # a prefix of 1,500 tokens has two whole blocks, and everything behind is each request's own
    assert {one.blocks[:2] for one in trace.requests} == {(0, 1), (2, 3), (4, 5)}
    own = [name for one in trace.requests for name in one.blocks[2:]]
    assert len(set(own)) == len(own)
    assert min(own) == 6


def test_synthetic_without_spread_or_prefixes():
    trace = Synthetic(requests=10, prompt=1024, output=7, spread=0, prefixes=0).trace()
    assert {(one.prompt, one.output, len(one.blocks)) for one in trace.requests} == {(1024, 7, 2)}
    assert len({name for one in trace.requests for name in one.blocks}) == 20


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"requests": 0}, "requests=0"),
        ({"rate": 0}, "rate=0: must be above 0 requests per second"),
        ({"spread": 1.5}, r"spread=1\.5: must be 0"),
        ({"prefix": -1}, "prefix=-1"),
    ],
)
def test_bad_synthetic(given, message):
    with pytest.raises(ArgumentError, match=message):
        Synthetic(**given)
