"""Quantising rows for a cache: from numbers to element codes and scales, with documented rounding.

    rows = nearkv.quantise.quantise(k, nearkv.quantise.PRESETS["q8_0"].k)
    rows.codes, rows.scales, rows.saturated

It needs torch alone, and gives the same codes on every device.
"""

from .codebooks import find_codebook
from .formats import PRESETS, CacheFormat, RowFormat, Rule, cache_format
from .rounding import decode, encode
from .rows import Quantised, attention_arguments, quantise

__all__ = [
    "PRESETS",
    "CacheFormat",
    "Quantised",
    "RowFormat",
    "Rule",
    "attention_arguments",
    "cache_format",
    "decode",
    "encode",
    "find_codebook",
    "quantise",
]
