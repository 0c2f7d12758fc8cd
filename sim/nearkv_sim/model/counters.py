"""What a device counts, for its register lines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.window import CHANNEL_COUNTERS, DEVICE_COUNTERS, MEMORY_COUNTERS


class Counters:
    """The counters of a device; names are those of abi.window's layouts.

    A counter of waits that the model does not know (unit_no_data, unit_wait, conflicts) stays zero.

    Members
    -------
    device : the fields of DEVICE_COUNTERS.
    extents : those of EXTENT_COUNTERS that are of all tenants, as of the last `Memory.settle`.
    channels : those of CHANNEL_COUNTERS, int64 [slices] each.
    memory : those of MEMORY_COUNTERS, int64 [slices] each; all but lines corrected and lost stay zero.
    """

    def __init__(self, config: DeviceConfig) -> None:
        self.device = {field.name: 0 for field in DEVICE_COUNTERS if not field.reserved}
        self.extents = dict.fromkeys(("scrubbing", "free", "scrub_lines"), 0)
        self.channels: dict[str, npt.NDArray[np.int64]] = {
            field.name: np.zeros(config.slices, dtype=np.int64) for field in CHANNEL_COUNTERS
        }
        self.memory: dict[str, npt.NDArray[np.int64]] = {
            field.name: np.zeros(config.slices, dtype=np.int64) for field in MEMORY_COUNTERS
        }
        self._behind_crossbar = config.placement is Placement.FABRIC

    def clear(self) -> None:
        """All count from zero again."""
        self.device.update(dict.fromkeys(self.device, 0))
        self.extents.update(dict.fromkeys(self.extents, 0))
        for counted in (*self.channels.values(), *self.memory.values()):
            counted[:] = 0

    def stream(self, lines: npt.NDArray[np.int64]) -> None:
        """Count lines that the units took, [slices]; behind the crossbar the fabric reads them, too."""
        self.channels["unit_lines"] += lines
        self.channels["unit_busy"] += lines
        if self._behind_crossbar:
            self.channels["fabric_reads"] += lines
