"""Hugging Face transformers on the device.

    import nearkv.hf

    with nearkv.open("model") as device:
        cache = nearkv.hf.attach(model, device)
        model.generate(input_ids, cache=cache)

`attach` changes no weights and no code of the model: it selects the attention implementation "nearkv"
and makes the cache that goes with it. transformers calls the cache argument `cache` from 5.24 on and
`past_key_values` before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attention import NAME, nearkv_attention, register
from .cache import NearKVCache
from .models import LoadedModel, ModelNotFound, load, prompt_ids, row_shape
from .rows import CheckedRows, CheckTally, DeviceRows, ReferenceRows, RowShape, RowStore

if TYPE_CHECKING:
    from nearkv.device import Device

__all__ = [
    "NAME",
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
    "load",
    "nearkv_attention",
    "prompt_ids",
    "register",
    "row_shape",
]


def attach(
    model: Any,
    device: Device,
    *,
    dtype: str = "fp16",
    kv_format: str | None = None,
    page_rows: int = 16,
    tenant: int = 0,
) -> NearKVCache:
    """Put a transformers model's KV cache and decode attention on a device.

    Parameters
    ----------
    model : a causal language model whose layers go through transformers' attention interface.
    device : an open device.
    dtype : format of rows and queries on the device, "fp16" or "bf16".
    kv_format : a preset of `nearkv.quantise` in which rows are stored instead: "fp8", "q8_0", ...
    page_rows : rows of a page.
    tenant : the device's aperture to use.

    Returns
    -------
    An empty cache for one generation; `reset` makes it empty again.
    """
    store = DeviceRows(
        device, row_shape(model.config), dtype, kv_format=kv_format, page_rows=page_rows, tenant=tenant
    )
    return attach_store(model, store)


def attach_store(model: Any, store: RowStore) -> NearKVCache:
    """Like `attach`, over any `RowStore`."""
    register()
    model.set_attn_implementation(NAME)
    return NearKVCache(store, row_shape(model.config).layers)
