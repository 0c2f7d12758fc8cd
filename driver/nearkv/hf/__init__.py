"""Hugging Face transformers on the device.

    import nearkv.hf

    with nearkv.open("model") as device:
        nearkv.hf.attach(model, device)
        model.generate(input_ids)

`attach` changes no weights and no code of the model: it selects the attention implementation "nearkv" and
has `generate` make its caches on the device. It returns such a cache, for callers that keep one over several
calls; transformers calls that argument `cache` from 5.24 on and `past_key_values` before.
"""

from nearkv.check import CheckTally

from .attach import attach, attach_store, cache_argument, detach
from .attention import NAME, nearkv_attention, register
from .batching import Batcher
from .cache import NearKVCache
from .checked_rows import CheckedRows
from .device_rows import DeviceRows
from .models import LoadedModel, ModelNotFound, load, prompt_ids, row_shape
from .reference_rows import ReferenceRows
from .rows import RowShape, RowStore

__all__ = [
    "NAME",
    "Batcher",
    "CheckTally",
    "CheckedRows",
    "DeviceRows",
    "LoadedModel",
    "ModelNotFound",
    "NearKVCache",
    "ReferenceRows",
    "RowShape",
    "RowStore",
    "attach",
    "attach_store",
    "cache_argument",
    "detach",
    "load",
    "nearkv_attention",
    "prompt_ids",
    "register",
    "row_shape",
]
