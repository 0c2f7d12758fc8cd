"""Putting a model on a device, and taking it off again."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any
from warnings import warn

from .attention import NAME, register
from .cache import NearKVCache
from .device_rows import CROP_ROWS, DeviceRows
from .models import row_shape
from .rows import RowStore

if TYPE_CHECKING:
    from nearkv.device import Device

_PREPARE = "_prepare_cache_for_generation"


def attach(
    model: Any,
    device: Device,
    *,
    dtype: str = "fp16",
    kv_format: str | None = None,
    page_rows: int = 16,
    tenant: int = 0,
    crop_rows: int = CROP_ROWS,
) -> NearKVCache:
    """Put a transformers model's KV cache and attention on a device.

    From here on `generate` keeps its rows there, in a new cache for each call that names none. The model
    also runs without a cache, and with another that a call names (`cache_implementation`, with a warning);
    attention is then on the host.

    Parameters
    ----------
    model : a causal language model whose layers go through transformers' attention interface.
    device : an open device.
    dtype : format of rows and queries on the device, "fp16" or "bf16".
    kv_format : a preset of `nearkv.quantise` in which rows are stored instead: "fp8", "q8_0", ...
    page_rows : rows of a page.
    tenant : the device's aperture to use.
    crop_rows : rows that `crop` may take back at any time from layers with a window, whose other rows are
        given back once the window has left them.

    Returns
    -------
    An empty cache, for calls that go on where others ended; `reset` makes it empty again, `fresh` and `fork`
    make others of it.
    """
    store = DeviceRows(
        device,
        row_shape(model.config),
        dtype,
        kv_format=kv_format,
        page_rows=page_rows,
        tenant=tenant,
        crop_rows=crop_rows,
    )
    return attach_store(model, store)


def attach_store(model: Any, store: RowStore) -> NearKVCache:
    """Like `attach`, over any `RowStore`."""
    register()
    if _before(model) is None:
        model._before_nearkv = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    cache = NearKVCache(store, row_shape(model.config))
    model._nearkv_cache = cache
    setattr(model, _PREPARE, MethodType(_prepare, model))
    return cache


def detach(model: Any) -> None:
    """Give the model its own attention and caches back; does nothing where it was not attached."""
    before = _before(model)
    if before is None:
        return
    for name in (_PREPARE, "_nearkv_cache", "_before_nearkv"):
        delattr(model, name)
    model.set_attn_implementation(before)


def cache_argument() -> str:
    """What transformers calls the cache argument: `cache` from 5.24 on."""
    from transformers import __version__

    newer = tuple(int(part) for part in __version__.split(".")[:2]) >= (5, 24)
    return "cache" if newer else "past_key_values"


def _before(model: Any) -> str | None:
    found: str | None = model.__dict__.get("_before_nearkv")
    return found


def _prepare(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **more: Any
) -> Any:
    """`generate` asks for a cache: a new one on the device where its caller has named none.

    A call that names another kind of cache runs with it, on the host, with the model's own attention.
    """
    name = cache_argument()
    given, kind = model_kwargs.get(name), generation_config.cache_implementation
    ours = isinstance(given, NearKVCache)
    fresh = given is None and kind is None and generation_config.use_cache is not False
    if fresh:
        model_kwargs[name] = model._nearkv_cache.fresh()
        if getattr(generation_config, "is_assistant", False):  # transformers asks it of caches that it makes
            model_kwargs[name].activate_past_recording()
    elif kind is not None:
        warn(f"cache_implementation={kind!r} is the host's: this call does not use the device", stacklevel=2)
    wanted = model._before_nearkv if kind is not None and not ours else NAME
    if model.config._attn_implementation != wanted:
        model.set_attn_implementation(wanted)
    done = getattr(type(model), _PREPARE)(model, generation_config, model_kwargs, *rest, **more)
    if fresh:
        model_kwargs[name]._is_user_defined = False
    return done
