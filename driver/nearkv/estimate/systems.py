"""The closed forms: a decode step of every system, from the times of its parts.

A step is `layers` times a layer's work on the GPUs, G (weights, arithmetic, reductions among GPUs), and its
attention. With the time A of attention on a GPU, F of fetching rows over the link, D of attention on the
devices with its queries and results over the link, R of a round trip, and m micro-batches:

- GPU only: G + A.
- Memory without compute: max(G + A, F), for rows of the next layer are fetched while this one works.
- Devices: G + R + D for one micro-batch; else the largest of m G, m D and G + R + D, each for a batch m times
  smaller: the GPUs work on one micro-batch while the devices work on another.
- Three tiers: G + max(A, R + D, F) where GPU, devices and further memory hold a share of the rows each, and
  partial results merge exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from nearkv_hw.abi.config import Placement

from nearkv.errors import ArgumentError

from .energy import FORM_FACTORS, Energy, Events, energy, gpu_energy, throttle
from .layers import OnDevices, fetch_rate, gpu_seconds, has_units, on_devices
from .models import AttentionLayers
from .setup import GPU_RESERVE, Setup
from .value import NOTHING, Band

GPU_ONLY = "gpu"
MEMORY = "gpu+memory"
TIERS = "three tiers"
_REDUCE_S = 5e-6
"""A reduction among GPUs apart from its bytes (NCCL, small messages over NVLink); two in a layer. Assumed."""
_MATRIX_EFFICIENCY = 0.7
"""Share of the bf16 rate that matrix products of a decode batch reach. Assumed."""
_ELEMENT_BYTES = 2
_GPU_SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Shares of the rows that GPUs have room for, of which three tiers take the best."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where the KV rows lie, as shares of every sequence.

    Parameters
    ----------
    gpu, device, host : shares; they add up to 1 where everything fits.
    gpu_bytes, device_bytes, host_bytes : what these take.
    """

    gpu: float
    device: float
    host: float
    gpu_bytes: float
    device_bytes: float
    host_bytes: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a system does.

    Parameters
    ----------
    system : its name: "gpu", "gpu+memory", "gpu+controller" and so on, "three tiers".
    fits : whether weights and KV rows have room; where not, the times are those that it would have with room.
    why_not : what has no room.
    step_s : one decode step of the whole batch.
    parts : seconds of a step by what they go to; they overlap where the system overlaps them.
    bound : the part that limits.
    split : where the rows lie.
    max_batch : sequences of this context that have room.
    link_bytes : over the links in a step, both directions.
    energy : joules of a step, by GPUs and by the devices' parts.
    device_power_w : of a device while it works.
    throttled : factor by which a card's form would slow the step down.
    """

    system: str
    fits: bool
    why_not: str
    step_s: float
    batch: int
    parts: dict[str, float]
    bound: str
    split: Split
    max_batch: int
    link_bytes: float
    energy: dict[str, Band] = field(default_factory=dict)
    device_power_w: Band = NOTHING
    throttled: Band = NOTHING

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all sequences per second."""
        return self.batch / self.step_s

    @property
    def energy_per_token(self) -> Band:
        """Joules of all parts for one token."""
        return sum(self.energy.values(), NOTHING) * (1 / self.batch)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "system": self.system,
            "fits": self.fits,
            "why_not": self.why_not,
            "time_per_output_token_ms": self.step_s * 1e3,
            "tokens_per_s": self.tokens_per_s,
            "bound": self.bound,
            "parts_ms": {name: seconds * 1e3 for name, seconds in self.parts.items()},
            "kv_share": {"gpu": self.split.gpu, "device": self.split.device, "host": self.split.host},
            "kv_bytes": {
                "gpu": self.split.gpu_bytes,
                "device": self.split.device_bytes,
                "host": self.split.host_bytes,
            },
            "max_batch": self.max_batch,
            "link_bytes_per_token": self.link_bytes / self.batch,
            "energy_per_token_j": self.energy_per_token.to_dict(),
            "energy_parts_j": {name: band.to_dict() for name, band in self.energy.items()},
            "device_power_w": self.device_power_w.to_dict(),
            "thermal_slowdown": self.throttled.to_dict(),
        }


def estimate(setup: Setup) -> list[Answer]:
    """Every system's answer: GPU only, with memory, with devices at each placement, three tiers.

    A placement that the channels leave no room for (ranks of 16 channels) is left out.

    Examples
    --------
    >>> from nearkv.estimate import Setup, estimate
    >>> answers = estimate(Setup(model="llama-3.1-8b", context=131072, gpu="h100"))
    >>> [answer.system for answer in answers][:2]
    ['gpu', 'gpu+memory']
    """
    answers = [_gpu_only(setup), _with_memory(setup)]
    for placement in Placement:
        try:
            placed = setup.at(placement)
        except ValueError:
            continue
        answers.append(_with_devices(placed) if has_units(placed) else _with_rows_fetched(placed))
    if has_units(setup):
        answers.append(_three_tiers(setup))
    return answers


def gpu_room(setup: Setup) -> float:
    """Bytes that the GPUs have for KV rows beside the weights; less than 0 where even these have no room."""
    return setup.gpus * setup.gpu.memory_bytes.value * (1 - GPU_RESERVE) - setup.model.weight_bytes


def matrices(setup: Setup, batch: int) -> dict[str, float]:
    """Seconds of a step outside attention, by part, on all GPUs."""
    model, gpu, gpus = setup.model, setup.gpu, setup.gpus
    reads = model.weights_read_bytes(batch) / (gpus * gpu.bandwidth.value * gpu.attention_efficiency.value)
    work = batch * model.matrix_flops() / (gpus * gpu.flops.value * _MATRIX_EFFICIENCY)
    parts = {"weights" if reads >= work else "gpu arithmetic": max(reads, work)}
    if gpus > 1:
        moved = 2 * (gpus - 1) / gpus * batch * model.hidden * _ELEMENT_BYTES / gpu.peer_link.value
        parts["gpu interconnect"] = 2 * model.layers * (_REDUCE_S + moved)
    return parts


def _split(setup: Setup, *, gpu: float, device: bool, host: bool) -> Split:
    """Rows go to the GPUs first, as far as that share of their room goes, then to the devices, then to the
    host's memory, if they may."""
    whole = setup.batch * setup.model.kv_bytes(setup.context, setup.kv_format)
    padded = setup.batch * setup.model.kv_bytes(setup.context, setup.kv_format, padded=True)
    on_gpu = gpu * min(1.0, max(0.0, gpu_room(setup)) / whole)
    room = setup.devices * setup.device_bytes / setup.hosts
    on_device = min(1.0 - on_gpu, room / padded) if device else 0.0
    on_host = 1.0 - on_gpu - on_device if host else 0.0
    return Split(
        gpu=on_gpu,
        device=on_device,
        host=on_host,
        gpu_bytes=on_gpu * whole,
        device_bytes=on_device * padded,
        host_bytes=on_host * whole,
    )


def _fits(setup: Setup, split: Split) -> tuple[bool, str]:
    if gpu_room(setup) < 0:
        need = ceil(setup.model.weight_bytes / (setup.gpu.memory_bytes.value * (1 - GPU_RESERVE)))
        return False, f"weights: they take {need} GPUs"
    missing = 1.0 - split.gpu - split.device - split.host
    if missing > 1e-9:
        return False, f"KV rows: {100 * missing:.0f} % have no room"
    return True, ""


def _max_batch(setup: Setup, *, gpu: bool, device: bool, host: bool) -> int:
    """Sequences that have room; 0 where the weights have none."""
    room = gpu_room(setup)
    if room < 0:
        return 0
    model, form = setup.model, setup.kv_format
    whole = model.kv_bytes(setup.context, form)
    padded = model.kv_bytes(setup.context, form, padded=True)
    found = room / whole if gpu else 0.0
    if device:
        found += setup.devices * setup.device_bytes / setup.hosts / padded
    return 1 << 20 if host else int(found)


def _attention(setup: Setup, of: Callable[[AttentionLayers], float]) -> float:
    """Sum over all attention layers."""
    return sum(kind.count * of(kind) for kind in setup.model.attention)


def _on_gpus(setup: Setup) -> dict[str, float]:
    """A step whose attention the GPUs work out, over all rows."""
    attention = _attention(
        setup, lambda kind: gpu_seconds(setup, kind, kind.rows(setup.context), setup.batch)
    )
    return {**matrices(setup, setup.batch), "gpu attention": attention}


def _gpu_only(setup: Setup) -> Answer:
    split = _split(setup, gpu=1.0, device=False, host=False)
    parts = _on_gpus(setup)
    step = sum(parts.values())
    return _answer(setup, GPU_ONLY, parts, step, step, split, gpu=True)


def _with_memory(setup: Setup) -> Answer:
    """What has no room on the GPUs lies in CXL memory, and is fetched."""
    split = _split(setup, gpu=1.0, device=True, host=False)
    parts = _on_gpus(setup)
    # rows without room anywhere are fetched, too: what it would take with room
    fetched = (
        (1 - split.gpu) * setup.batch * setup.model.kv_bytes(setup.context, setup.kv_format, padded=True)
    )
    busy = sum(parts.values())
    parts["link"] = fetched / fetch_rate(setup)
    return _answer(
        setup, MEMORY, parts, max(busy, parts["link"]), busy, split, gpu=True, device=True, fetched=fetched
    )


def _with_rows_fetched(setup: Setup) -> Answer:
    """All rows on devices that have no units: the host side reads every one."""
    split = _split(setup, gpu=0.0, device=True, host=False)
    parts = _on_gpus(setup)
    busy = sum(parts.values())
    fetched = setup.batch * setup.model.kv_bytes(setup.context, setup.kv_format, padded=True)
    parts["link"] = fetched / fetch_rate(setup)
    step = max(busy, parts["link"])
    name = f"gpu+{setup.config.placement.name.lower()}"
    return _answer(setup, name, parts, step, busy, split, device=True, fetched=fetched)


def _with_devices(setup: Setup) -> Answer:
    """All rows on the devices, which work attention out."""
    split = _split(setup, gpu=0.0, device=True, host=False)
    turns = setup.micro_batches
    batch = ceil(setup.batch / turns)
    matrix = matrices(setup, batch)
    calls = [
        (kind, on_devices(setup, kind, kind.rows(setup.context), batch, partial=False))
        for kind in setup.model.attention
    ]
    device = sum(kind.count * call.seconds for kind, call in calls)
    link = sum(kind.count * (call.out_s + call.in_s) for kind, call in calls)
    trips = setup.model.attention_layers * setup.round_trip_s
    on_gpu = sum(matrix.values())
    chain = on_gpu + trips + device + link
    step = chain if turns == 1 else max(turns * on_gpu, turns * (device + link), chain)
    _, slowest = max(calls, key=lambda item: item[0].count * item[1].seconds)
    parts = {name: turns * seconds for name, seconds in matrix.items()}
    parts |= {f"device {slowest.bound}": turns * device, "link": turns * link, "round trips": trips}
    return _answer(
        setup,
        f"gpu+{setup.config.placement.name.lower()}",
        parts,
        step,
        min(step, turns * on_gpu),
        split,
        device=True,
        calls=[(turns * kind.count, call) for kind, call in calls],
    )


def _three_tiers(setup: Setup) -> Answer:
    """Rows on GPUs, devices and in the host's memory, all at once: the quickest of some splits."""
    return min((_with_tiers(setup, share) for share in _GPU_SHARES), key=lambda answer: answer.step_s)


def _with_tiers(setup: Setup, gpu_share: float) -> Answer:
    split = _split(setup, gpu=gpu_share, device=True, host=True)
    matrix = matrices(setup, setup.batch)
    per_layer, calls = 0.0, []
    parts = {"gpu attention": 0.0, "link": 0.0}
    device = trips = 0.0
    fetched = 0.0
    bound = "memory"
    for kind in setup.model.attention:
        rows = kind.rows(setup.context)
        hot = gpu_seconds(setup, kind, (split.gpu + split.host) * rows, setup.batch)
        cold = setup.batch * split.host * rows * kind.row_bytes(setup.kv_format)
        fetch = cold / (setup.gpus * setup.gpu.host_link.value)
        near = 0.0
        if split.device > 0:
            call = on_devices(
                setup, kind, split.device * rows, setup.batch, partial=split.gpu + split.host > 0
            )
            calls.append((kind.count, call))
            near = setup.round_trip_s + call.seconds + call.out_s + call.in_s
            device, bound = device + kind.count * call.seconds, call.bound
            trips += kind.count * setup.round_trip_s
            parts["link"] += kind.count * (call.out_s + call.in_s)
        per_layer += kind.count * max(hot, fetch, near)
        parts["gpu attention"] += kind.count * hot
        parts["link"] += kind.count * fetch
        fetched += kind.count * cold
    parts |= {f"device {bound}": device, "round trips": trips, **matrix}
    on_gpu = sum(matrix.values())
    return _answer(
        setup,
        TIERS,
        parts,
        on_gpu + per_layer,
        on_gpu + parts["gpu attention"],
        split,
        gpu=True,
        device=True,
        host=True,
        calls=calls,
        host_fetched=fetched,
    )


def _answer(
    setup: Setup,
    system: str,
    parts: dict[str, float],
    step: float,
    gpu_busy: float,
    split: Split,
    *,
    gpu: bool = False,
    device: bool = False,
    host: bool = False,
    fetched: float = 0.0,
    host_fetched: float = 0.0,
    calls: Iterable[tuple[int, OnDevices]] = (),
) -> Answer:
    """Traffic, energy and capacity of a step whose times are known."""
    moved = sum(count * (call.out_bytes + call.in_bytes) for count, call in calls)
    near = sum(count * call.lines for count, call in calls)
    writes = sum(count * (call.writes + call.out_bytes / 64) for count, call in calls)
    crossbar = setup.config.placement is Placement.FABRIC
    events = Events(
        line_reads=near + (fetched + moved / 2) / 64,
        line_writes=writes,
        link_bytes=fetched + moved,
        multiplies=sum(count * call.multiplies for count, call in calls),
        sum_bits=sum(count * call.sum_bits for count, call in calls),
        crossbar_bytes=fetched + moved + (64 * near if crossbar else 0.0),
    )
    spent = Energy()
    if device:
        spent = energy(setup.config, events, seconds=step, devices=setup.devices, switch=setup.switch)
    whole = {"gpus": gpu_energy(setup.gpu, count=setup.gpus, busy_s=min(gpu_busy, step), total_s=step)}
    power = spent.total * (1 / step / setup.devices)
    fits, why_not = _fits(setup, split)
    return Answer(
        system=system,
        fits=fits,
        why_not=why_not,
        step_s=step,
        batch=setup.batch,
        parts=parts,
        bound=max(parts, key=lambda name: parts[name]),
        split=split,
        max_batch=_max_batch(setup, gpu=gpu, device=device, host=host),
        link_bytes=moved + fetched + host_fetched,
        energy=whole | spent.parts,
        device_power_w=power,
        throttled=throttle(power, FORM_FACTORS[setup.form]),
    )


def of(answers: list[Answer], system: str) -> Answer:
    """The answer of a system by its name.

    Raises
    ------
    ArgumentError : there is none of that name among them.
    """
    for answer in answers:
        if answer.system == system:
            return answer
    raise ArgumentError(f"no system {system!r}; there are {', '.join(a.system for a in answers)}")
