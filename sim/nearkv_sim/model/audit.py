"""The owner's page: quotas, weights, and the log of what tenants tried with extents that they do not own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import EXTENT_SHIFT
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.owner import (
    AUDIT,
    AUDIT_LINE,
    HOLDINGS,
    HOLDINGS_LINE,
    QUOTAS,
    QUOTAS_LINE,
    RECORD,
    RECORDS,
    RECORDS_LINE,
    WEIGHT_BITS,
    WEIGHTS,
    WEIGHTS_LINE,
    Violation,
)

from .counters import Counters

_WORD_BITS = 32
_COUNT_MASK = (1 << AUDIT["read"].width) - 1
_MOST = (1 << 21) - 1
"""More extents than any device has."""


class OwnerPage:
    """Quotas and weights of tenants as their owner sets them, and a log of the violations of all of them.

    Parameters
    ----------
    config, counters : the device's.

    Members
    -------
    quotas : extents that each tenant may own.
    """

    def __init__(self, config: DeviceConfig, counters: Counters) -> None:
        self.quotas = [config.extents] * config.apertures
        self._weights = [1] * config.apertures
        self._counters = counters
        self._records: list[dict[str, int]] = []
        """Those that the log holds, the last one last."""
        self._recorded = self._read = self._lost = 0
        self._unread: set[tuple[int, int, int]] = set()

    def report(self, lines: npt.NDArray[np.int64], tenant: int, kind: Violation) -> None:
        """Log violations, in lines of the device."""
        extents = lines >> EXTENT_SHIFT - LINE_SHIFT
        _, first = np.unique(extents, return_index=True)
        for index in np.sort(first).tolist():
            key = int(extents[index]), tenant, int(kind)
            if key in self._unread:
                continue
            if self._recorded - self._read == RECORDS:
                self._lost += 1
                continue
            self._unread.add(key)
            record = {
                "address": int(lines[index]) << LINE_SHIFT,
                "cycle": self._counters.device["cycles"],
                "sequence": self._recorded,
                "tenant": tenant,
                "kind": int(kind),
            }
            self._records = [*self._records, record][-RECORDS:]
            self._recorded += 1

    def line(self, line: int, owners: npt.NDArray[np.int8]) -> bytes:
        """A line of the page; `owners` are those of all extents."""
        if line == QUOTAS_LINE:
            return QUOTAS.pack_bytes({f"tenant{n}": quota for n, quota in enumerate(self.quotas)})
        if line == HOLDINGS_LINE:
            return HOLDINGS.pack_bytes(
                {f"tenant{n}": int(np.count_nonzero(owners == n)) for n in range(len(self.quotas))}
            )
        if line == WEIGHTS_LINE:
            return WEIGHTS.pack_bytes({f"tenant{n}": weight for n, weight in enumerate(self._weights)})
        if line == AUDIT_LINE:
            return AUDIT.pack_bytes(recorded=self._recorded, read=self._read, lost=self._lost)
        for record in self._records:
            if line == RECORDS_LINE + record["sequence"] % RECORDS:
                return RECORD.pack_bytes(record)
        return bytes(LINE_BYTES)

    def write(self, line: int, data: npt.NDArray[np.uint8], enabled: npt.NDArray[np.bool_]) -> bool:
        """Write the words of 32 bits of a line whose bytes are all enabled; False when that is refused."""
        words = np.frombuffer(data.tobytes(), "<u4").tolist()
        whole: list[bool] = np.logical_and.reduce(enabled.reshape(len(words), -1), axis=1).tolist()
        if line == QUOTAS_LINE:
            for tenant in range(len(self.quotas)):
                if whole[tenant]:
                    self.quotas[tenant] = min(words[tenant], _MOST)
        if line == WEIGHTS_LINE:
            given = {n: words[n] for n in range(len(self._weights)) if whole[n]}
            good = {n: weight for n, weight in given.items() if 0 < weight < 1 << WEIGHT_BITS}
            for tenant, weight in good.items():
                self._weights[tenant] = weight
            return good == given
        place = AUDIT.offset("read") // _WORD_BITS
        if line == AUDIT_LINE and whole[place]:
            if words[place] - self._read & _COUNT_MASK > self._recorded - self._read:
                return False
            self._read = words[place]
            self._unread.clear()
            self._unread.update(
                (record["address"] >> EXTENT_SHIFT, record["tenant"], record["kind"])
                for record in self._records
                if record["sequence"] >= self._read
            )
        return True
