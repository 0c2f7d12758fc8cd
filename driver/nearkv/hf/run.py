"""Greedy decoding of one prompt with the device underneath: every attention call checked, and a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import nearkv
from nearkv.check import CheckTally

from .attach import attach_store, cache_argument, detach
from .checked_rows import CheckedRows
from .device_rows import DeviceRows
from .models import LoadedModel, prompt_ids
from .reference_rows import ReferenceRows
from .rows import RowStore
from .tiered import TieredRows

REFERENCE = "reference"
"""In place of a device: rows in host memory, attention by `nearkv.reference`."""


@dataclass
class Report:
    """What a run did. Device figures cover the decode steps, not the prompt; times are wall-clock seconds.
    Calls are all attention calls on the device: of the prompt too, where its rows are narrow.

    `kv_bytes` is what a device without compute would have sent for the same calls: every row's K and V in
    whole lines. `link_bytes` is what this one moved, both directions, new rows and polling included.
    `energy_j` is `Stats.energy`, in joules: low, mid and high of each part and in total; empty where a device
    has none. `channels` and `memories` are those of `Stats`, the counters of every slice of the memory;
    `tiers` are `nearkv.tiers.TierStats` of each tier.
    """

    model: str
    device: str
    prompt: str
    kv_format: str = "fp16"
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    calls: int = 0
    calls_checked: int = 0
    calls_equal: int = 0
    device_cycles: int = 0
    lines: int = 0
    utilisation: float = 0.0
    link_bytes: int = 0
    kv_bytes: int = 0
    energy_j: dict[str, dict[str, float]] = field(default_factory=dict)
    channels: list[dict[str, int]] = field(default_factory=list)
    memories: list[dict[str, int]] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    check_s: float = 0.0
    tokens_per_s: float = 0.0
    tokens_per_s_checked: float = 0.0
    replay_commands: list[str] = field(default_factory=list)
    tiers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether no checked call differed in any bit."""
        return self.calls_equal == self.calls_checked

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values."""
        return asdict(self)


def run(
    loaded: LoadedModel,
    prompt: str,
    *,
    device: nearkv.Device | None,
    max_new_tokens: int = 16,
    dtype: str = "fp16",
    kv_format: str | None = None,
    tiers: str | None = None,
    check: bool = True,
    replay_folder: Path = Path("replays"),
    on_token: Callable[[str, int], None] = lambda text, count: None,
) -> Report:
    """Answer `prompt` greedily with every decode attention on `device`, or by the reference where it is None.

    Parameters
    ----------
    loaded : model, tokenizer and row shape, from `nearkv.hf.load`.
    max_new_tokens : tokens at most; an end-of-text token ends the run before.
    dtype : format of rows and queries, "fp16" or "bf16".
    kv_format : a preset of `nearkv.quantise` in which rows are stored instead.
    tiers : where rows live, as `nearkv.hf.tiered.tiers_of` has it; on the device alone if not given.
    check : hold every device call against the reference, computed from the host's own copy of the rows.
    replay_folder : where inputs and results of an unequal call are written.
    on_token : called with the text so far and the number of tokens.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    ids = prompt_ids(loaded, prompt)
    report = Report(
        loaded.name,
        device.kind if device else REFERENCE,
        prompt,
        kv_format=kv_format or dtype,
        prompt_tokens=ids.shape[1],
    )
    with ExitStack() as stack:
        store: RowStore = ReferenceRows(dtype, kv_format)
        rows, tally = None, CheckTally()
        tiered = None
        if tiers is not None:
            store = tiered = TieredRows(tiers, device, loaded.rows, dtype, kv_format, check=check)
            tally = tiered.tally
            stack.callback(tiered.cache.close)
        elif device is not None:
            store = rows = DeviceRows(device, loaded.rows, dtype, kv_format=kv_format, prompts_on_host=True)
            stack.callback(rows.cache.close)
            if check:
                checked = CheckedRows(rows, replay_folder)
                store, tally = checked, checked.tally
        meter = _Meter(device, rows, tally)

        def step(token: int) -> None:
            report.tokens.append(token)
            if len(report.tokens) == 1:
                meter.start()
            on_token(loaded.tokenizer.decode(report.tokens, skip_special_tokens=True), len(report.tokens))

        stack.callback(detach, loaded.model)
        _generate(loaded.model, attach_store(loaded.model, store), ids, max_new_tokens, step)
        meter.stop(report)
        if tiered is not None:
            report.calls = tiered.calls
            report.tiers = [tier.to_dict() for tier in tiered.cache.stats()]
    report.text = loaded.tokenizer.decode(report.tokens, skip_special_tokens=True)
    return report


def _generate(
    model: Any, cache: Any, ids: torch.Tensor, max_new_tokens: int, step: Callable[[int], None]
) -> None:
    options: dict[str, Any] = {cache_argument(): cache}
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            streamer=_Steps(step),
            **options,
        )


class _Steps(BaseStreamer):  # type: ignore[misc]
    """Hears of `generate`'s progress: the prompt's ids first, then each token as it is chosen."""

    def __init__(self, step: Callable[[int], None]) -> None:
        self._step = step
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._step(int(value.flatten()[-1]))
        self._prompt_seen = True

    def end(self) -> None:
        pass


class _Meter:
    """Time, device counters and checks from the first token, which ends the prompt, to the last."""

    def __init__(self, device: nearkv.Device | None, rows: DeviceRows | None, tally: CheckTally) -> None:
        self._device = device
        self._rows = rows
        self._tally = tally
        self._begin = time.perf_counter()
        self._first = self._begin

    def start(self) -> None:
        """The first token is there."""
        self._stats = self._device.stats() if self._device else None
        self._kv_bytes = self._rows.kv_bytes if self._rows else 0
        self._checking = self._tally.seconds
        self._first = time.perf_counter()

    def stop(self, report: Report) -> None:
        """The last token is there: fill in the report's figures."""
        elapsed = time.perf_counter() - self._first
        report.prefill_s = self._first - self._begin
        report.check_s = self._tally.seconds - self._checking
        report.decode_s = elapsed
        steps = len(report.tokens) - 1
        if steps:
            report.tokens_per_s = steps / (elapsed - report.check_s)
            report.tokens_per_s_checked = steps / elapsed
        report.calls_checked, report.calls_equal = self._tally.calls, self._tally.equal
        report.replay_commands = self._tally.commands
        if self._device and self._rows and self._stats:
            done = self._device.stats() - self._stats
            report.calls = self._rows.device_calls
            report.kv_bytes = self._rows.kv_bytes - self._kv_bytes
            report.device_cycles, report.lines = done.cycles, done.lines
            report.utilisation, report.link_bytes = done.utilisation, done.link_bytes
            energy = done.energy
            report.energy_j = energy.to_dict() if energy else {}
            report.channels = [asdict(channel) for channel in done.channels]
            report.memories = [asdict(memory) for memory in done.memories]
