"""Rows in tiers of memory: near a GPU, on the host, on the device, in a file. Their place changes no bit."""

from .cache import TieredCache, TieredSequence
from .device import DeviceTier
from .policy import HighestMass, Move, NewestRows, Policy, RowView
from .pool import PoolTier
from .telemetry import TierStats, prometheus
from .tier import FileTier, TensorTier, Tier

__all__ = [
    "DeviceTier",
    "FileTier",
    "HighestMass",
    "Move",
    "NewestRows",
    "Policy",
    "PoolTier",
    "RowView",
    "TensorTier",
    "Tier",
    "TierStats",
    "TieredCache",
    "TieredSequence",
    "prometheus",
]
