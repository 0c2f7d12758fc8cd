"""What a device would do for a model: time, capacity, traffic and energy of a decode step."""

from __future__ import annotations

from .energy import Energy, Events
from .formats import FORMATS, KVFormat, kv_format
from .gpus import GPUS, Gpu, gpu
from .huggingface import from_config
from .models import AttentionLayers, Model
from .setup import Setup, device
from .systems import Answer, Split, estimate, of
from .table import CONFIGS, model
from .value import Band, Value

__all__ = [
    "CONFIGS",
    "FORMATS",
    "GPUS",
    "Answer",
    "AttentionLayers",
    "Band",
    "Energy",
    "Events",
    "Gpu",
    "KVFormat",
    "Model",
    "Setup",
    "Split",
    "Value",
    "device",
    "estimate",
    "from_config",
    "gpu",
    "kv_format",
    "model",
    "of",
]
