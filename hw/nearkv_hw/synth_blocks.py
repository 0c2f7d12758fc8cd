"""The blocks that `nearkv_hw.synth` synthesises, each in a small configuration."""

from collections.abc import Callable
from dataclasses import dataclass

from amaranth.lib import wiring

from .abi import configure
from .common.queue import Queue
from .interfaces import PageItem
from .memory.channel import MemoryChannel

LANES = 8
QUERIES = 1
CONFIG = configure("small", queries=QUERIES, capacity_bytes=256 << 20, ring_slots=16)


@dataclass(frozen=True)
class Block:
    """A block to synthesise.

    Parameters
    ----------
    name : what the table calls it.
    make : makes the component.
    lanes : lanes that it has, by which figures per lane divide; 0 where it has none.
    """

    name: str
    make: Callable[[], wiring.Component]
    lanes: int = 0


BLOCKS = (
    Block("queue", lambda: Queue(shape=PageItem, depth=8)),
    Block("memory-channel", lambda: MemoryChannel(channel=0, config=CONFIG)),
)
