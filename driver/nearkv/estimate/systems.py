"""The answers: a decode step of every system, with its capacity, traffic and energy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.lines import LINE_BYTES

from nearkv.errors import ArgumentError

from .energy import FORM_FACTORS, Energy, Events, energy, gpu_energy, throttle
from .layers import has_units
from .setup import GPU_RESERVE, Setup
from .steps import Rows, Step, Work, on_gpus, with_devices, with_memory, with_tiers
from .value import NOTHING, Band

GPU_ONLY = "gpu"
MEMORY = "gpu+memory"
TIERS = "three tiers"
NO_LIMIT = 1 << 20
"""Sequences that have room where the host's memory takes what is left."""
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
    max_batch : sequences of this context that have room; `NO_LIMIT` for three tiers.
    link_bytes : over the links in a step, both directions.
    events : on all devices in a step.
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
    events: Events
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
    answers = [_gpu_only(setup), with_spill(setup)]
    for placement in Placement:
        try:
            placed = setup.at(placement)
        except ValueError:
            continue
        answers.append(at_placement(placed))
    if has_units(setup):
        answers.append(_three_tiers(setup))
    return answers


def gpu_room(setup: Setup) -> float:
    """Bytes that the GPUs have for KV rows beside the weights; less than 0 where even these have no room."""
    return setup.gpus * setup.gpu.memory_bytes.value * (1 - GPU_RESERVE) - setup.model.weight_bytes


def weight_gpus(setup: Setup) -> int:
    """GPUs that the weights take."""
    return ceil(setup.model.weight_bytes / (setup.gpu.memory_bytes.value * (1 - GPU_RESERVE)))


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
        return False, f"weights: they take {weight_gpus(setup)} GPUs"
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
    return NO_LIMIT if host else int(found)


def _work(setup: Setup, split: Split) -> Work:
    """The step of a full batch whose rows lie so."""
    rows = []
    for kind in setup.model.attention:
        whole = setup.batch * kind.rows(setup.context)
        rows.append(Rows(gpu=split.gpu * whole, device=split.device * whole, host=split.host * whole))
    return Work(batch=setup.batch, rows=rows, near=setup.batch)


def _gpu_only(setup: Setup) -> Answer:
    split = _split(setup, gpu=1.0, device=False, host=False)
    step = on_gpus(setup, _work(setup, _with_room(split, gpu=True)))
    return _answer(setup, GPU_ONLY, step, split, gpu=True)


def with_spill(setup: Setup) -> Answer:
    """What has no room on the GPUs lies in CXL memory, and is fetched."""
    split = _split(setup, gpu=1.0, device=True, host=False)
    step = with_memory(setup, _work(setup, _with_room(split)))
    return _answer(setup, MEMORY, step, split, gpu=True, device=True)


def at_placement(setup: Setup) -> Answer:
    """All rows on the devices, at the setup's own placement; where these have no units, the host side reads
    every one."""
    split = _split(setup, gpu=0.0, device=True, host=False)
    form = with_devices if has_units(setup) else with_memory
    step = form(setup, _work(setup, _with_room(split)))
    return _answer(setup, f"gpu+{setup.config.placement.name.lower()}", step, split, device=True)


def _three_tiers(setup: Setup) -> Answer:
    """Rows on GPUs, devices and in the host's memory, all at once: the quickest of some splits."""
    return min((_with_tiers(setup, share) for share in _GPU_SHARES), key=lambda answer: answer.step_s)


def _with_tiers(setup: Setup, gpu_share: float) -> Answer:
    split = _split(setup, gpu=gpu_share, device=True, host=True)
    return _answer(
        setup, TIERS, with_tiers(setup, _work(setup, split)), split, gpu=True, device=True, host=True
    )


def _with_room(split: Split, *, gpu: bool = False) -> Split:
    """As it would be with room for all rows: what has none is on the devices, or on the GPUs."""
    if gpu:
        return replace(split, gpu=1.0)
    return replace(split, device=1.0 - split.gpu)


def _answer(
    setup: Setup,
    system: str,
    step: Step,
    split: Split,
    *,
    gpu: bool = False,
    device: bool = False,
    host: bool = False,
) -> Answer:
    """Traffic, energy and capacity of a step whose times are known."""
    seconds, events = step.seconds, _events(setup, step)
    spent = Energy()
    if device:
        spent = energy(setup.config, events, seconds=seconds, devices=setup.devices, switch=setup.switch)
    whole = {
        "gpus": gpu_energy(setup.gpu, count=setup.gpus, busy_s=min(step.gpu_busy, seconds), total_s=seconds)
    }
    power = spent.total * (1 / seconds / setup.devices)
    fits, why_not = _fits(setup, split)
    return Answer(
        system=system,
        fits=fits,
        why_not=why_not,
        step_s=seconds,
        batch=setup.batch,
        parts=step.parts,
        bound=max(step.parts, key=lambda name: step.parts[name]),
        split=split,
        max_batch=_max_batch(setup, gpu=gpu, device=device, host=host),
        link_bytes=events.link_bytes + step.host_fetched,
        events=events,
        energy=whole | spent.parts,
        device_power_w=power,
        throttled=throttle(power, FORM_FACTORS[setup.form]),
    )


def _events(setup: Setup, step: Step) -> Events:
    """What happens on the devices in a step.

    Every line of DRAM is read or written over the crossbar, but for K and V lines of units that stand
    before it.
    """

    def total(name: str) -> float:
        return float(sum(count * getattr(call, name) for count, call in step.calls))

    lines, queries = total("lines"), total("queries")
    reads = lines + queries + total("answers") + step.fetched / LINE_BYTES
    writes = queries + total("results")
    own = 0.0 if setup.config.placement is Placement.FABRIC else lines
    return Events(
        line_reads=reads,
        line_writes=writes,
        link_bytes=step.fetched + step.out_bytes + step.in_bytes,
        multiplies=total("multiplies"),
        sum_bits=total("sum_bits"),
        crossbar_bytes=LINE_BYTES * (reads + writes - own),
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
