"""What a device would do for a model: time, capacity, traffic and energy of a decode step."""

from __future__ import annotations

from .formats import FORMATS, KVFormat, kv_format
from .huggingface import from_config
from .models import AttentionLayers, Model
from .table import CONFIGS, model

__all__ = ["CONFIGS", "FORMATS", "AttentionLayers", "KVFormat", "Model", "from_config", "kv_format", "model"]
