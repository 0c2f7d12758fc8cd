"""The closed forms: seconds of one step of every system, from the times of its parts.

A step is `layers` times a layer's work on the GPUs, G (weights, arithmetic, reductions among GPUs), and its
attention. With the time A of attention on a GPU, F of fetching rows over the link, D of attention on the
devices with its queries and results over the link, R of a round trip, and m micro-batches:

- GPU only: G + A.
- Memory without compute: max(G + A, F), for rows of the next layer are fetched while this one works.
- Devices: G + R + D for one micro-batch; else the largest of m G, m D and G + R + D, each for a batch m times
  smaller: the GPUs work on one micro-batch while the devices work on another.
- Three tiers: G + max(A, R + D, F) where GPU, devices and further memory hold a share of the rows each, and
  partial results merge exactly.

Tokens of prompts that share the step add to G, and their attention P is the GPUs': it adds to A, and where
devices work it goes on beside them, max(P, R + D). Rows that it needs and that lie on devices are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

from .layers import OnDevices, fetch_rate, gpu_seconds, on_devices
from .models import AttentionLayers
from .setup import Setup

_REDUCE_S = 5e-6
"""A reduction among GPUs apart from its bytes (NCCL, small messages over NVLink); two in a layer. Assumed."""
_MATRIX_EFFICIENCY = 0.7
"""Share of the bf16 rate that matrix products reach, and attention over prompts. Assumed; FlashAttention-3
reports 740 of an H100's 989 TFLOPS (arXiv 2407.08608)."""
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Rows:
    """Rows that one layer of a kind attends to, of all sequences together, by where they lie."""

    gpu: float = 0.0
    device: float = 0.0
    host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens of prompts that share a step with sequences that decode.

    Parameters
    ----------
    tokens : how many.
    attention_s : what their attention takes on the GPUs, all layers.
    fetched : bytes of rows that it needs and that lie on the devices.
    """

    tokens: int = 0
    attention_s: float = 0.0
    fetched: float = 0.0


NO_PROMPT = Prompt()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step works on.

    Parameters
    ----------
    batch : sequences that decode.
    rows : what they attend to, for each kind of `Model.attention` in its order.
    near : of the sequences, those that have rows on the devices.
    prompt : tokens of prompts in the same step.
    """

    batch: int
    rows: Sequence[Rows]
    near: int
    prompt: Prompt = NO_PROMPT


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step takes.

    Parameters
    ----------
    seconds : from its start to its tokens.
    parts : seconds by what they go to; they overlap where the system overlaps them.
    gpu_busy : seconds that the GPUs work.
    fetched : bytes of rows that come from the devices' memory.
    host_fetched : bytes of rows that come from the host's memory.
    calls : attention on the devices, and how often.
    """

    seconds: float
    parts: dict[str, float]
    gpu_busy: float
    fetched: float = 0.0
    host_fetched: float = 0.0
    calls: Sequence[tuple[int, OnDevices]] = field(default_factory=list)

    @property
    def out_bytes(self) -> float:
        """Queries and descriptors to the devices."""
        return sum(count * call.out_bytes for count, call in self.calls)

    @property
    def in_bytes(self) -> float:
        """Results and records from the devices."""
        return sum(count * call.in_bytes for count, call in self.calls)


Form = Callable[[Setup, Work], Step]
"""A system's closed form."""


def matrices(setup: Setup, batch: int) -> dict[str, float]:
    """Seconds of a step outside attention, by part, on all GPUs, for so many tokens."""
    model, gpu, gpus = setup.model, setup.gpu, setup.gpus
    reads = model.weights_read_bytes(batch) / (gpus * gpu.bandwidth.value * gpu.attention_efficiency.value)
    work = batch * model.matrix_flops() / (gpus * gpu.flops.value * _MATRIX_EFFICIENCY)
    parts = {"weights" if reads >= work else "gpu arithmetic": max(reads, work)}
    if gpus > 1:
        moved = 2 * (gpus - 1) / gpus * batch * model.hidden * _ELEMENT_BYTES / gpu.peer_link.value
        parts["gpu interconnect"] = 2 * model.layers * (_REDUCE_S + moved)
    return parts


def prompt_attention(setup: Setup, chunks: Sequence[tuple[int, int]]) -> float:
    """Seconds of attention of all layers over prompts, on the GPUs.

    Parameters
    ----------
    setup : whose GPUs and model.
    chunks : of each prompt the tokens before those of this step, and the tokens of this step.
    """
    gpu, gpus = setup.gpu, setup.gpus
    flops = gpus * gpu.flops.value * _MATRIX_EFFICIENCY
    rate = gpus * gpu.bandwidth.value * gpu.attention_efficiency.value
    seconds = 0.0
    for kind in setup.model.attention:
        pairs = rows = 0
        for before, tokens in chunks:
            pairs += seen(before, tokens, kind.window)
            rows += tokens + (before if kind.window is None else min(before, kind.window - 1))
        work = 2 * pairs * kind.q_heads * (kind.head_dim + kind.value_dim) / flops
        read = rows * kind.row_bytes(setup.kv_format) / rate
        seconds += kind.count * (gpu.attention_launch_s.value + max(work, read))
    return seconds


def seen(before: int, tokens: int, window: int | None = None) -> int:
    """Rows that so many tokens see together, each its own and those before it, as far as a window reaches.

    Examples
    --------
    >>> seen(0, 4), seen(10, 2), seen(0, 4, window=2)
    (10, 23, 7)
    """
    if window is None:
        return tokens * before + tokens * (tokens + 1) // 2
    short = min(tokens, max(0, window - before))  # tokens that see less than a whole window
    return short * before + short * (short + 1) // 2 + (tokens - short) * window


def on_gpus(setup: Setup, work: Work) -> Step:
    """All rows in GPU memory."""
    parts = _gpu_parts(setup, work)
    step = sum(parts.values())
    return Step(seconds=step, parts=parts, gpu_busy=step)


def with_memory(setup: Setup, work: Work) -> Step:
    """Attention on the GPUs, which fetch what lies on the devices."""
    parts = _gpu_parts(setup, work)
    fetched = work.prompt.fetched + sum(
        kind.count * rows.device * kind.pitch_bytes(setup.kv_format)
        for kind, rows in zip(setup.model.attention, work.rows, strict=True)
    )
    busy = sum(parts.values())
    parts["link"] = fetched / fetch_rate(setup)
    return Step(seconds=max(busy, parts["link"]), parts=parts, gpu_busy=busy, fetched=fetched)


def with_devices(setup: Setup, work: Work) -> Step:
    """All rows on the devices, which work attention out."""
    turns, prompt = min(setup.micro_batches, max(1, work.batch)), work.prompt
    batch = ceil(work.batch / turns)
    matrix = matrices(setup, batch + ceil(prompt.tokens / turns))
    calls = [
        (kind, on_devices(setup, kind, rows.device / work.batch, batch, partial=False))
        for kind, rows in zip(setup.model.attention, work.rows, strict=True)
        if work.batch
    ]
    device = sum(kind.count * call.seconds for kind, call in calls)
    link = sum(kind.count * (call.out_s + call.in_s) for kind, call in calls)
    trips = setup.model.attention_layers * setup.round_trip_s if calls else 0.0
    on_gpu = sum(matrix.values())
    chain = on_gpu + max(trips + device + link, prompt.attention_s / turns)
    step = chain if turns == 1 else max(turns * on_gpu + prompt.attention_s, turns * (device + link), chain)
    parts = {name: turns * seconds for name, seconds in matrix.items()}
    parts |= {f"device {_bound(calls)}": turns * device} if calls else {}
    parts |= {"link": turns * link + prompt.fetched / fetch_rate(setup), "round trips": trips}
    parts |= {"prompt attention": prompt.attention_s} if prompt.tokens else {}
    step = max(step, prompt.fetched / fetch_rate(setup))
    return Step(
        seconds=step,
        parts=parts,
        gpu_busy=min(step, turns * on_gpu + prompt.attention_s),
        fetched=prompt.fetched,
        calls=[(turns * kind.count, call) for kind, call in calls],
    )


def _bound(calls: Sequence[tuple[AttentionLayers, OnDevices]]) -> str:
    """What sets the pace of the layers that take longest."""
    return max(calls, key=lambda item: item[0].count * item[1].seconds)[1].bound


def with_tiers(setup: Setup, work: Work) -> Step:
    """Rows on GPUs, devices and in the host's memory, all at once."""
    prompt = work.prompt
    matrix = matrices(setup, work.batch + prompt.tokens)
    host_rate = setup.link_factor * setup.gpus * setup.gpu.host_link.value
    attention = hot_s = near_s = link_s = trips = fetched = 0.0
    calls = []
    for kind, rows in zip(setup.model.attention, work.rows, strict=True):
        hot = gpu_seconds(setup, kind, rows.gpu + rows.host, 1)
        cold = rows.host * kind.row_bytes(setup.kv_format)
        near = 0.0
        if rows.device > 0:
            elsewhere = rows.gpu + rows.host > 0
            call = on_devices(setup, kind, rows.device / work.near, work.near, partial=elsewhere)
            calls.append((kind, call))
            near = setup.round_trip_s + call.seconds + call.out_s + call.in_s
            near_s += kind.count * call.seconds
            trips += kind.count * setup.round_trip_s
            link_s += kind.count * (call.out_s + call.in_s)
        attention += kind.count * max(hot, cold / host_rate, near)
        hot_s += kind.count * hot
        link_s += kind.count * cold / host_rate
        fetched += kind.count * cold
    # prompts' attention goes on while the GPUs would wait for the devices
    attention = max(attention, hot_s + prompt.attention_s)
    prompt_s = prompt.fetched / fetch_rate(setup)
    parts = {"gpu attention": hot_s + prompt.attention_s, "link": link_s + prompt_s}
    parts |= {f"device {_bound(calls) if calls else 'memory'}": near_s, "round trips": trips, **matrix}
    on_gpu = sum(matrix.values())
    return Step(
        seconds=max(on_gpu + attention, prompt_s),
        parts=parts,
        gpu_busy=on_gpu + parts["gpu attention"],
        fetched=prompt.fetched,
        host_fetched=fetched,
        calls=[(kind.count, call) for kind, call in calls],
    )


def _gpu_parts(setup: Setup, work: Work) -> dict[str, float]:
    """A step whose attention the GPUs work out, wherever rows lie."""
    attention = sum(
        kind.count * gpu_seconds(setup, kind, rows.gpu + rows.device + rows.host, 1)
        for kind, rows in zip(setup.model.attention, work.rows, strict=True)
    )
    parts = {**matrices(setup, work.batch + work.prompt.tokens), "gpu attention": attention}
    return parts | ({"prompt attention": work.prompt.attention_s} if work.prompt.tokens else {})
