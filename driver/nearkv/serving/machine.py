"""What each system is to a serving engine: where rows may lie, and what moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from nearkv_hw.abi.config import Placement

from nearkv.arguments import one_of, whole_number
from nearkv.errors import ArgumentError
from nearkv.estimate import Setup, Value
from nearkv.estimate.layers import fetch_rate, has_units
from nearkv.estimate.steps import Form, on_gpus, with_devices, with_memory, with_tiers
from nearkv.estimate.systems import GPU_ONLY, MEMORY, TIERS, gpu_room, weight_gpus

SSD_BANDWIDTH = Value(
    7e9, "bytes/s", "an NVMe drive with four PCIe 4.0 lanes, sequential reads", "assumed", 3.5e9, 14e9
)
_MOST_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How an engine serves.

    Parameters
    ----------
    step_tokens : of one step, decoding sequences and prompts together.
    prefix_cache : whether rows of prompts are kept for later requests.
    spill : whether in "gpu+memory" requests run with rows in CXL memory, too, fetched for every token,
        rather than wait for room in GPU memory.
    host_bytes, ssd_bytes : memory of the host and drives that keep prefixes; 0 for none.
    ssd_bandwidth : of the drives, bytes/s.

    Raises
    ------
    ArgumentError : what was given and what is allowed.
    """

    step_tokens: int = 8192
    prefix_cache: bool = True
    spill: bool = False
    host_bytes: int = 0
    ssd_bytes: int = 0
    ssd_bandwidth: float = SSD_BANDWIDTH.value

    def __post_init__(self) -> None:
        whole_number("step_tokens", self.step_tokens, 1, 1 << 24)
        whole_number("host_bytes", self.host_bytes, 0, _MOST_BYTES)
        whole_number("ssd_bytes", self.ssd_bytes, 0, _MOST_BYTES)
        if not 0 < self.ssd_bandwidth < float("inf"):
            raise ArgumentError(f"ssd_bandwidth={self.ssd_bandwidth!r}: must be above 0 bytes/s")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A kind of memory for KV rows.

    Parameters
    ----------
    name : "gpu", "device", "host" or "ssd".
    size : bytes of it.
    rows : that have room.
    row_bytes : of a token's rows in all layers.
    rate : bytes/s at which rows come from it to the GPUs; 0 for the GPUs' own memory.
    """

    name: str
    size: float
    rows: int
    row_bytes: float
    rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A system.

    Parameters
    ----------
    system : its name, as `nearkv.estimate` has it.
    setup : with the units where the system has them.
    form : what a step takes.
    homes : where rows of running requests lie, the first one first.
    below : where prefixes go that have no room there.
    staging_rows : rows of prompts that GPU memory holds beside their homes while they are worked on.
    fetches : whether prefixes in the second home are brought to the first when they are used again.
    """

    system: str
    setup: Setup
    form: Form
    homes: Sequence[Place]
    below: Sequence[Place]
    staging_rows: int = 0
    fetches: bool = False

    @cached_property
    def places(self) -> Sequence[Place]:
        """All of them, from the first home down."""
        return [*self.homes, *self.below]

    @cached_property
    def device(self) -> int | None:
        """The number of the home on the devices, if there is one."""
        return next((at for at, home in enumerate(self.homes) if home.name == "device"), None)

    @cached_property
    def linked(self) -> int | None:
        """The number of the place on the devices, if there is one."""
        return next((at for at, place in enumerate(self.places) if place.name == "device"), None)

    @cached_property
    def home_rows(self) -> int:
        """Rows of running requests that have room."""
        return sum(home.rows for home in self.homes)

    def extra_rows(self, tokens: int) -> int:
        """Room that the windowed layers of a sequence take, in rows of the others."""
        kinds = [kind for kind in self.setup.model.attention if kind.window is not None]
        if not kinds or len(kinds) == len(self.setup.model.attention):
            return 0
        taken = sum(kind.count * kind.rows(tokens) * kind.row_bytes(self.setup.kv_format) for kind in kinds)
        return ceil(taken / _row_bytes(self.setup, kept=True))


def systems(setup: Setup) -> list[str]:
    """Names of the systems that a setup allows: those of `nearkv.estimate`."""
    names = [GPU_ONLY, MEMORY]
    for placement in Placement:
        try:
            setup.at(placement)
        except ValueError:  # no ranks on that many channels
            continue
        names.append(f"gpu+{placement.name.lower()}")
    return [*names, TIERS] if has_units(setup) else names


def machine(setup: Setup, system: str, serving: Serving) -> Machine:
    """A system by its name.

    Parameters
    ----------
    setup : `batch` is how many sequences run together at most, `context` the longest that is accepted.
    system : one of `systems(setup)`.
    serving : of the engine.

    Raises
    ------
    ArgumentError : there is no such system, or the weights have no room.
    """
    one_of("system", system, dict.fromkeys(systems(setup)))
    if serving.step_tokens <= setup.batch:
        raise ArgumentError(
            f"step_tokens={serving.step_tokens}: must be more than batch={setup.batch}, or prompts "
            "never get a turn (--step-tokens, --max-batch)"
        )
    room = gpu_room(setup)
    if room < 0:
        raise ArgumentError(
            f"{setup.gpus} x {setup.gpu.name}: the weights of {setup.model.name} have no room; they take "
            f"{weight_gpus(setup)} GPUs (--gpus)"
        )
    if system.startswith("gpu+") and system != MEMORY:
        setup = setup.at(Placement[system.removeprefix("gpu+").upper()])
    gpu = _place(setup, "gpu", room)
    whole = setup.devices * setup.device_bytes / setup.hosts
    device = _place(setup, "device", whole, padded=True, rate=fetch_rate(setup))
    near = with_devices if has_units(setup) else with_memory
    forms: dict[str, tuple[Form, list[Place], list[Place]]] = {
        GPU_ONLY: (on_gpus, [gpu], []),
        MEMORY: (with_memory, [gpu, device], []) if serving.spill else (on_gpus, [gpu], [device]),
        TIERS: (with_tiers, [gpu, device], []),
    }
    form, homes, below = forms.get(system, (near, [device], []))
    to_host = setup.link_factor * setup.gpus * setup.gpu.host_link.value
    below += [
        _place(setup, "host", serving.host_bytes, rate=to_host),
        _place(setup, "ssd", serving.ssd_bytes, rate=min(to_host, serving.ssd_bandwidth)),
    ]
    return Machine(
        system=system,
        setup=setup,
        form=form,
        homes=homes,
        below=[place for place in below if place.rows],
        staging_rows=gpu.rows if homes == [device] else 0,
        fetches=system == MEMORY,
    )


def _place(setup: Setup, name: str, size: float, *, padded: bool = False, rate: float = 0.0) -> Place:
    return Place(
        name=name,
        size=size,
        rows=int(size / _row_bytes(setup, kept=True, padded=padded)),
        row_bytes=_row_bytes(setup, padded=padded),
        rate=rate,
    )


def _row_bytes(setup: Setup, *, kept: bool = False, padded: bool = False) -> float:
    """Bytes of a token's rows in all layers, or in those that keep the whole context.

    Where every layer has a window, all are taken to keep the whole context.
    """
    kinds = setup.model.attention
    if kept:
        kinds = tuple(kind for kind in kinds if kind.window is None) or kinds
    form = setup.kv_format
    return sum(kind.count * (kind.pitch_bytes(form) if padded else kind.row_bytes(form)) for kind in kinds)
