"""A prepared step does what an append and an attention do: the same bits, from the same lines."""

from __future__ import annotations

import random
from typing import Any

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import same_bits
from nearkv import errors
from nearkv.faults import Faults
from nearkv.step import Step
from nearkv_sim.port import Fence, Operation, Write

HEADS, GROUP, DIM, PAGE_ROWS = 2, 2, 32, 16
SEED = 5


class Recorder:
    """A port that keeps what it is asked to write: of each part between fences, lines by address."""

    def __init__(self, port: Any) -> None:
        self._port = port
        self.parts: list[dict[int, bytes]] = [{}]

    def run(self, program: list[Operation]) -> Any:
        for operation in program:
            if isinstance(operation, Fence):
                self.parts.append({})
            elif isinstance(operation, Write):
                lines = zip(operation.addresses.tolist(), operation.data, strict=True)
                self.parts[-1].update({address: line.tobytes() for address, line in lines})
        return self._port.run(program)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


class Pair:
    """Two devices that are told the same; the second one's cache prepares no steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **geometry: Any) -> None:
        self.devices = [nearkv.open("model") for _ in range(2)]
        self.recorders: list[Recorder] = []
        for device in self.devices:
            device.wrap_port(self._recorded)
        geometry = {"layers": 2, "kv_heads": HEADS, "head_dim": DIM, "dtype": "bf16", **geometry}
        self.caches = [device.kv_cache(page_rows=PAGE_ROWS, **geometry) for device in self.devices]
        monkeypatch.setattr(self.caches[1]._steps, "_never", True)
        self.steps = 0
        run = Step.run

        def counted(step: Step, *args: Any) -> Any:
            self.steps += 1
            return run(step, *args)

        monkeypatch.setattr(Step, "run", counted)

    def _recorded(self, port: Any) -> Recorder:
        self.recorders.append(Recorder(port))
        return self.recorders[-1]

    def both(self, call: Any) -> list[Any]:
        """What a call returns of each cache."""
        return [call(cache) for cache in self.caches]

    def close(self) -> None:
        for device in self.devices:
            device.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Pair(monkeypatch)
    yield made
    made.close()


def token(batch: int, dim: int = DIM, dtype: torch.dtype = torch.bfloat16, rows: int = 1) -> dict[str, Any]:
    k, v = (torch.randn(batch, rows, HEADS, dim).to(dtype) for _ in range(2))
    return {"k": k, "v": v, "q": torch.randn(batch, HEADS * GROUP, dim).to(dtype)}


def decode(pair: Pair, sequences: list[list[Any]], given: dict[str, Any], **options: Any) -> None:
    """A token on both devices: equal results, and equal lines in equal parts of what is posted."""
    for recorder in pair.recorders:
        recorder.parts = [{}]
    first, second = (
        cache.append_attend(own, layer=1, **given, **options)
        for cache, own in zip(pair.caches, sequences, strict=True)
    )
    assert same_bits(first, second)
    assert pair.recorders[0].parts == pair.recorders[1].parts
    for one, other in zip(*sequences, strict=True):
        assert pair.caches[0].length(one, 1) == pair.caches[1].length(other, 1)


def test_steps_post_the_same_lines_over_pages_and_tables(pair: Pair) -> None:
    """From the first row on, past the ends of pages and past a table that has to move."""
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    sequences = pair.both(lambda kv: [kv.sequence() for _ in range(3)])
    tokens = 9 * PAGE_ROWS
    for _ in range(tokens):
        decode(pair, sequences, token(3))
    new_pages, noted, moved = tokens // PAGE_ROWS, 1, 2
    assert pair.steps == tokens - new_pages - noted - moved


def test_what_happens_between_steps_counts(pair: Pair) -> None:
    """Crops, forks, frees, other appends and other calls come between them in any order."""
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    choose = random.Random(SEED)
    sequences = pair.both(lambda kv: [kv.sequence() for _ in range(2)])
    kinds: list[dict[str, Any]] = [{}, {}, {}, {"window": 7}, {"softcap": 30.0}, {"out_dtype": torch.float16}]
    forks: list[list[Any]] = []
    for index in range(200):
        decode(pair, sequences, token(2), **choose.choice(kinds))
        lengths = [pair.caches[0].length(one, 1) for one in sequences[0]]
        action = choose.randrange(12)
        if action == 0:
            rows = choose.randint(0, lengths[1])
            for kv, own in zip(pair.caches, sequences, strict=True):
                kv.crop(own[1], rows)
        elif action == 1:
            forks.append([kv.fork(own[1]) for kv, own in zip(pair.caches, sequences, strict=True)])
        elif action == 2 and forks:
            for kv, fork in zip(pair.caches, forks.pop(), strict=True):
                kv.free(fork)
        elif action == 3:
            more = {name: x for name, x in token(2, rows=choose.randint(0, 20)).items() if name != "q"}
            for kv, own in zip(pair.caches, sequences, strict=True):
                kv.append(own, layer=1, **more)
        elif index > 150 and lengths[0] > 3 * PAGE_ROWS:
            for kv, own in zip(pair.caches, sequences, strict=True):
                kv.release(own[0], 2 * PAGE_ROWS, layer=1)
    assert pair.steps > 30


@pytest.mark.parametrize(
    "geometry",
    [
        {"head_dim": 40, "dtype": "fp16"},
        {"latent": True, "value_dim": 16},
        {"head_dim": 64, "value_dim": 32},
        {"dtype": "int8"},
        {"summaries": True},
    ],
    ids=str,
)
def test_every_geometry(monkeypatch: pytest.MonkeyPatch, geometry: dict[str, Any]) -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    pair = Pair(monkeypatch, **geometry)
    dim = geometry.get("head_dim", DIM)
    dtype = torch.float16 if geometry.get("dtype") == "fp16" else torch.bfloat16
    sequences = pair.both(lambda kv: [kv.sequence()])
    for _ in range(2 * PAGE_ROWS):
        given = token(1, dim, dtype)
        if geometry.get("latent"):
            given["k"] = given["k"][:, :, :HEADS]
            del given["v"]
        elif "value_dim" in geometry:
            given["v"] = given["v"][..., : geometry["value_dim"]]
        decode(pair, sequences, given)
    pair.close()


def test_tensors_of_every_mode_and_kind(pair: Pair) -> None:
    """A step that was prepared in inference mode takes tensors of others, also those that want gradients; and
    codes, which have the type of none that were numbers."""
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    sequences = pair.both(lambda kv: [kv.sequence() for _ in range(2)])
    for index in range(24):
        with torch.inference_mode(index < 6 or index % 5 == 0):
            given = token(2)
            if index % 4 == 1:
                given = {name: x.clone().requires_grad_(not x.is_inference()) for name, x in given.items()}
            if index % 4 == 2:
                given |= {name: given[name].view(torch.int16) for name in ("k", "v")}
            if index % 4 == 3:
                given["q"] = given["q"][:, None]
            decode(pair, sequences, given)
    assert pair.steps > 12
    for step in pair.caches[0]._steps._kept.values():
        assert step is None or not any(into is not None and into.requires_grad for into in step._into)


def test_options_that_python_calls_equal_are_not(pair: Pair) -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    sequences = pair.both(lambda kv: [kv.sequence()])
    for index in range(48):
        decode(pair, sequences, token(1), scale=(0.0, -0.0, 1.0, 1, True, None)[index % 6])
    kept = [key for key, step in pair.caches[0]._steps._kept.items() if step is not None]
    assert len(kept) == 6
    assert pair.steps


def test_what_was_posted_never_changes(pair: Pair) -> None:
    """A port may keep a program: the next token has lines of its own."""
    torch.manual_seed(SEED)
    (sequences, _) = pair.both(lambda kv: [kv.sequence()])
    kept: list[tuple[Write, bytes, bytes]] = []
    recorder = pair.recorders[0]
    run = recorder.run

    def keeping(program: list[Operation]) -> Any:
        kept.extend((w, w.addresses.tobytes(), w.data.tobytes()) for w in program if isinstance(w, Write))
        return run(program)

    recorder.run = keeping  # type: ignore[method-assign]
    for _ in range(6):
        pair.caches[0].append_attend(sequences, layer=1, **token(1))
    assert pair.steps
    assert all(np.array_equal(w.data.tobytes(), d) and w.addresses.tobytes() == a for w, a, d in kept)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(1, 1, HEADS, DIM + 1).bfloat16()}, errors.ShapeError, "k has shape"),
        ({"v": torch.zeros(1, 1, HEADS, DIM).half()}, errors.DtypeError, "v is torch.float16"),
        ({"v": torch.zeros(1, 2, HEADS, DIM).bfloat16()}, errors.ShapeError, "k has 1 rows and v has 2"),
        ({"q": torch.zeros(1, 3, DIM).bfloat16()}, errors.ShapeError, "q has 3 heads"),
        ({"q": torch.zeros(1, 4, DIM)}, errors.DtypeError, "q is torch.float32"),
        ({"q": torch.zeros(1, 4, DIM, dtype=torch.bfloat16, device="meta")}, errors.DtypeError, "meta"),
        ({"scale": float("nan")}, errors.ArgumentError, "must be finite"),
        ({"window": True}, errors.ArgumentError, "window=True"),
        ({"window": 1.0}, errors.ArgumentError, r"window=1\.0"),
    ],
)
def test_bad_input_is_refused_after_steps_too(
    pair: Pair, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Also what equals, as Python has it, an option that a step was prepared with."""
    torch.manual_seed(SEED)
    (sequences, _) = pair.both(lambda kv: [kv.sequence()])
    kv = pair.caches[0]
    for _ in range(4):
        kv.append_attend(sequences, layer=1, window=1, **token(1))
    assert pair.steps
    rows, posted = kv.length(sequences[0], 1), len(pair.recorders[0].parts)
    with pytest.raises(error, match=message):
        kv.append_attend(sequences, layer=1, **{"window": 1, **token(1), **change})
    assert kv.length(sequences[0], 1) == rows
    assert len(pair.recorders[0].parts) == posted


def test_handles_are_checked_after_steps_too(pair: Pair) -> None:
    torch.manual_seed(SEED)
    (sequences, others) = pair.both(lambda kv: [kv.sequence()])
    kv = pair.caches[0]
    for _ in range(4):
        kv.append_attend(sequences, layer=1, **token(1))
    with pytest.raises(errors.UnknownHandleError, match="another cache"):
        kv.append_attend(others, layer=1, **token(1))
    kv.free(sequences[0])
    with pytest.raises(errors.ClosedError, match="was freed"):
        kv.append_attend(sequences, layer=1, **token(1))


def test_poison_that_a_step_meets_is_told_and_forgotten(pair: Pair) -> None:
    """The rows are there then, and no sequence begins with the page that is lost."""
    torch.manual_seed(SEED)
    (sequences, _) = pair.both(lambda kv: [kv.sequence()])
    kv = pair.caches[0]
    for _ in range(PAGE_ROWS + 4):
        kv.append_attend(sequences, layer=1, **token(1))
        kv.append(sequences, layer=0, **{name: x for name, x in token(1).items() if name != "q"})
    tokens = list(range(PAGE_ROWS))
    kv.publish(sequences[0], tokens)
    rows, steps = kv.length(sequences[0], 1), pair.steps
    Faults(pair.devices[0]).poison(kv, sequences[0], layer=1, row=3)
    with pytest.raises(errors.DeviceError, match="POISON"):
        kv.append_attend(sequences, layer=1, **token(1))
    assert pair.steps == steps + 1
    assert kv.length(sequences[0], 1) == rows + 1
    assert kv.find_prefix(tokens) == (None, 0)
