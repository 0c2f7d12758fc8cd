"""Where is near? Every placement over models, contexts and formats, from the closed forms of estimates.

Nothing here says how long a step takes: `nearkv.estimate` does. This module asks it, says who wins, and
bisects for where the winner changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.dram import PARTS
from nearkv_hw.abi.lines import LINE_BITS

from nearkv.estimate import Answer, Band, Model, Setup, model
from nearkv.estimate import kv_format as format_of
from nearkv.estimate.energy import DRAMS
from nearkv.estimate.layers import OnDevices, on_devices
from nearkv.estimate.systems import at_placement, weight_gpus

CONTEXTS = tuple(4096 << n for n in range(9))
GROUPS = tuple(range(1, 17))
FORMATS = ("bf16", "fp8_e4m3", "mxfp4")
BASE = "llama-3.1-70b"
"""Whose shape the models with any g have."""
REFERENCE_CONTEXT = 131072
MODELS = (
    "llama-2-7b",
    "gemma-3-27b",
    "llama-3.1-8b",
    "qwen2.5-7b",
    "llama-3.1-70b",
    "qwen3-32b",
    "qwen3-235b-a22b",
    "llama-3.1-405b",
)
"""Models of the table, by g: 1, 2, 4, 7, 8, 8, 16 and 16."""
TIE = 0.01
"""Times that differ by less are taken to be the same."""
SLOWED = 0.10
"""Units bound where attention takes longer by more than this share than `slowed` compares it with."""
CAPACITY_BYTES = 1 << 40
"""Memory of a device, so that room decides nothing."""
LONGEST, LARGEST = 1 << 24, 1 << 12
"""The context and the batch up to which a change is looked for."""
ON_CHANNEL = (Placement.PHY, Placement.CONTROLLER, Placement.FABRIC)
"""One unit for a channel."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """What the units are made of, as far as no device configuration says it.

    Parameters
    ----------
    name : for people.
    elements : elements that a unit takes per cycle; None for a line of any format.
    equal_multipliers : whether a channel has as many multipliers at every placement: units at ranks then
        keep fewer queries each.
    """

    name: str
    elements: int | None = None
    equal_multipliers: bool = False

    def place(self, setup: Setup, placement: Placement) -> Setup:
        """A setup with such units at a placement."""
        placed = setup.at(placement)
        if self.elements is not None:
            bits = setup.kv_format.element.bits
            placed = replace(placed, unit_rate=placed.unit_rate * self.elements * bits / LINE_BITS)
        if self.equal_multipliers:
            queries = max(1, placed.config.queries // placed.config.ranks)
            placed = replace(placed, config=replace(placed.config, queries=queries))
        return placed


LINE = Units(name="a line per cycle")
EQUAL = Units(name="a line per cycle, equal multipliers", equal_multipliers=True)
ELEMENTS = Units(name="32 elements per cycle", elements=32)
UNITS = (LINE, EQUAL, ELEMENTS)


def with_group(group: int, asked: Model | None = None) -> Model:
    """A model (`BASE` if none is given) with so many query heads per KV head; its rows and weights stay."""
    asked = asked or model(BASE)
    kinds = tuple(replace(kind, q_heads=kind.kv_heads * group) for kind in asked.attention)
    return replace(asked, name=f"{asked.name}, g = {group}", attention=kinds)


def setup_of(asked: Model, *, context: int, kv_format: str = "bf16") -> Setup:
    """One sequence, as many H100 as the weights take, rounded up to a power of two, and a card for each.

    Parameters
    ----------
    asked : the model.
    context : tokens of the sequence.
    kv_format : name of the rows' format.
    """
    setup = Setup(model=asked, context=context, kv_format=format_of(kv_format), capacity_bytes=CAPACITY_BYTES)
    gpus = 1 << (weight_gpus(setup) - 1).bit_length()
    return replace(setup, gpus=gpus, devices=gpus)


def reference(kv_format: str = "bf16", *, context: int = REFERENCE_CONTEXT, group: int = 8) -> Setup:
    """The setup that tables refer to where they do not vary it."""
    return setup_of(with_group(group), context=context, kv_format=kv_format)


def answers(setup: Setup, units: Units = LINE) -> dict[Placement, Answer]:
    """A decode step with the units at every placement."""
    return {placement: at_placement(units.place(setup, placement)) for placement in Placement}


def times(setup: Setup, units: Units = LINE) -> dict[Placement, float]:
    """Seconds of a step by placement."""
    return {placement: answer.step_s for placement, answer in answers(setup, units).items()}


def winners(seconds: Mapping[Placement, float]) -> tuple[Placement, ...]:
    """The quickest placement, and those that are not slower by more than `TIE`.

    Examples
    --------
    >>> [p.name for p in winners({Placement.RANK: 1.0, Placement.HOST: 1.005, Placement.PHY: 2.0})]
    ['RANK', 'HOST']
    """
    best = min(seconds.values())
    return tuple(placement for placement, taken in seconds.items() if taken <= best * (1 + TIE))


def gain(seconds: Mapping[Placement, float]) -> float:
    """How many times longer the host takes than the quickest placement with units; below 1 it is quicker."""
    return seconds[Placement.HOST] / min(s for p, s in seconds.items() if p is not Placement.HOST)


def energy(placed: Setup, answer: Answer) -> Band:
    """Joules of a token with the same modules at every placement: as many ranks as units at ranks have.

    Estimates give the ranks to the placement alone whose units tell them apart; elsewhere the other ranks
    give room, no bandwidth, and draw their background power.
    """
    config = placed.config
    more = 0 if config.placement is Placement.RANK else placed.at(Placement.RANK).config.ranks - 1
    subchannels = placed.devices * config.channels * PARTS[config.dram].subchannels * more
    background = DRAMS[config.dram].background_w.band * (subchannels * answer.step_s)
    return answer.energy_per_token + background * (1 / placed.batch)


def attention(placed: Setup) -> OnDevices:
    """One layer's attention on the devices."""
    kind = placed.model.attention[0]
    return on_devices(placed, kind, kind.rows(placed.context), placed.batch, partial=False)


def slowed(placed: Setup) -> float:
    """By which share attention takes longer than one query head's with units of any speed.

    That is what the units cost: passes over the rows, the pace of the array, sums and results.
    """
    free = replace(placed, model=with_group(1, placed.model), unit_rate=1e6)
    return attention(placed).seconds / attention(free).seconds - 1


def first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest whole number from `low` to `high` from which something holds; None if it never does.

    Bisection: what holds at one number must hold at all larger ones.

    Examples
    --------
    >>> first(lambda n: n * n >= 50, 1, 100), first(lambda n: n > 100, 1, 100)
    (8, None)
    """
    if not holds(high):
        return None
    return low + bisect_left(range(low, high), True, key=holds)


def edge(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """The factor between `low` and `high` from which something holds, to a millionth; None if it never does.

    Examples
    --------
    >>> round(edge(lambda x: x * x >= 2, 0.1, 10), 5)
    1.41421
    """
    if not holds(high):
        return None
    if holds(low):
        return low
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def beats(
    placement: Placement,
    other: Callable[[Setup], Answer],
    units: Units = LINE,
) -> Callable[[Setup], bool]:
    """Whether a step with units at a placement is quicker than another system's."""

    def holds(setup: Setup) -> bool:
        return at_placement(units.place(setup, placement)).step_s < other(setup).step_s

    return holds


def host(setup: Setup) -> Answer:
    """Devices without units."""
    return at_placement(setup.at(Placement.HOST))


def context_from(setup: Setup, holds: Callable[[Setup], bool]) -> int | None:
    """The context from which something holds."""
    return first(lambda context: holds(replace(setup, context=context)), 1, LONGEST)


def batch_from(setup: Setup, holds: Callable[[Setup], bool]) -> int | None:
    """The batch from which something holds."""
    return first(lambda batch: holds(replace(setup, batch=batch)), 1, LARGEST)


def short(tokens: int) -> str:
    """A context as people write it.

    Examples
    --------
    >>> short(4096), short(1 << 20)
    ('4K', '1M')
    """
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K"
