"""nearkv: attention where the KV cache lives. Open a device, make a cache, append rows, attend.

Names are loaded when they are first used, so that `import nearkv` is cheap and `nearkv.reference` needs
numpy and torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import KVCache as KVCache
    from .device import Device as Device
    from .device import open as open
    from .errors import NearkvError as NearkvError
    from .reference import Partial as Partial
    from .reference import finish as finish
    from .reference import log_sum_exp as log_sum_exp
    from .reference import merge as merge
    from .sequences import Sequence as Sequence
    from .stats import Stats as Stats

__version__ = "0.1.0"

_HOMES = {
    "Device": "device",
    "KVCache": "cache",
    "NearkvError": "errors",
    "Partial": "reference",
    "Sequence": "sequences",
    "Stats": "stats",
    "finish": "reference",
    "log_sum_exp": "reference",
    "merge": "reference",
    "open": "device",
}
_MODULES = ("check", "errors", "estimate", "faults", "ops", "quantise", "reference", "replay")

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _MODULES:
        value = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module 'nearkv' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
