"""What the two sides of the link agree on: each shared fact once, in pure Python.

The RTL, the software model and the driver read their constants here. A field's width or an opcode that is
written twice is a defect.
"""

from . import bits, config, cxl, descriptor, formats, lines, memory, numerics, rows, window
from .config import ABI_VERSION, PRESETS, DeviceConfig, Feature, configure
from .descriptor import Opcode, Status
from .formats import ELEMENT_FORMATS, OutputForm
from .lines import LINE_BYTES

__all__ = [
    "ABI_VERSION",
    "ELEMENT_FORMATS",
    "LINE_BYTES",
    "PRESETS",
    "DeviceConfig",
    "Feature",
    "Opcode",
    "OutputForm",
    "Status",
    "bits",
    "config",
    "configure",
    "cxl",
    "descriptor",
    "formats",
    "lines",
    "memory",
    "numerics",
    "rows",
    "window",
]
