"""What the owner of a device sees and says: how much each tenant may have and use, and who tried what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
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
    owner_address,
)
from nearkv_sim.port import Fence, Port, Read, Write

from .arguments import whole_number
from .codec import one
from .errors import ArgumentError, UnknownHandleError
from .queued_port import QueuedPort

_WORD_BYTES = 4


@dataclass(frozen=True)
class AuditRecord:
    """Something that a tenant tried with an extent that is not its own.

    Members
    -------
    sequence : records before it since reset.
    cycle : device cycle.
    tenant : who.
    address : device address of the first line of the extent that was tried.
    kind : what.
    """

    sequence: int
    cycle: int
    tenant: int
    address: int
    kind: Violation


class Owner:
    """The owner's page of a device.

    Parameters
    ----------
    port, config : the device.

    Raises
    ------
    TenantTakenError : from every method, for a host of a served device: that is not its owner.
    """

    def __init__(self, port: Port, config: DeviceConfig) -> None:
        self._port = QueuedPort(port)
        self._config = config

    def quotas(self) -> list[int]:
        """Bytes that each tenant may own; at first the whole device."""
        values = QUOTAS.unpack(self._read(QUOTAS_LINE)[0])
        return [
            min(values[f"tenant{n}"], self._config.extents) * EXTENT_BYTES
            for n in range(self._config.apertures)
        ]

    def holdings(self) -> list[int]:
        """Bytes that each tenant owns."""
        values = HOLDINGS.unpack(self._read(HOLDINGS_LINE)[0])
        return [values[f"tenant{n}"] * EXTENT_BYTES for n in range(self._config.apertures)]

    def set_quota(self, tenant: int, size_bytes: int) -> None:
        """Let a tenant own so much at most. What it owns already it keeps.

        Parameters
        ----------
        size_bytes : a multiple of 1 MiB, the size of an extent.

        Raises
        ------
        UnknownHandleError : for a tenant that the device has not.
        ArgumentError : for a size that is none.

        Examples
        --------
        >>> import nearkv, torch
        >>> dev = nearkv.open("model")
        >>> dev.owner.set_quota(1, 2 << 20)
        >>> dev.owner.quotas()
        [2147483648, 2097152]
        >>> kv = dev.kv_cache(layers=1, kv_heads=8, head_dim=128, tenant=1)
        >>> rows = torch.zeros(4096, 8, 128).bfloat16()
        >>> try:
        ...     kv.append(kv.sequence(), layer=0, k=rows, v=rows)
        ... except nearkv.errors.QuotaError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        the device has no room for ...; tenant 1 may own 2 extents of 1 MiB and owns 2: ...
        >>> dev.close()
        """
        self._check_tenant(tenant)
        whole_number("size_bytes", size_bytes, 0, self._config.capacity_bytes)
        if size_bytes % EXTENT_BYTES:
            raise ArgumentError(f"size_bytes={size_bytes}: must be a multiple of {EXTENT_BYTES}, an extent")
        self._write(QUOTAS_LINE, QUOTAS.pack_bytes({f"tenant{tenant}": size_bytes // EXTENT_BYTES}), tenant)

    def weights(self) -> list[int]:
        """Share of each tenant in the attention units, beside the others'; at first 1 of all."""
        values = WEIGHTS.unpack(self._read(WEIGHTS_LINE)[0])
        return [values[f"tenant{n}"] for n in range(self._config.apertures)]

    def set_weight(self, tenant: int, weight: int) -> None:
        """Let a tenant's jobs have so many lines for each that one of weight 1 has.

        That is so while jobs of both wait, but for a few jobs that are under way; nobody waits for one that
        has no jobs.

        Parameters
        ----------
        weight : from 1 to 255.

        Raises
        ------
        UnknownHandleError : for a tenant that the device has not.
        ArgumentError : for a weight that is none.

        Examples
        --------
        >>> import nearkv
        >>> dev = nearkv.open("model")
        >>> dev.owner.set_weight(1, 3)
        >>> dev.owner.weights()
        [1, 3]
        >>> dev.close()
        """
        self._check_tenant(tenant)
        whole_number("weight", weight, 1, (1 << WEIGHT_BITS) - 1)
        self._write(WEIGHTS_LINE, WEIGHTS.pack_bytes({f"tenant{tenant}": weight}), tenant)

    def audit(self) -> list[AuditRecord]:
        """What tenants tried since the last call, the first first; `lost` tells how much more there was.

        Of one tenant, extent and kind of access there is one record in a call. A violation is in the log some
        600 device cycles later at most.
        """
        state = AUDIT.unpack(self._read(AUDIT_LINE)[0])
        numbers = range(state["read"], state["recorded"])
        if not numbers:
            return []
        lines = self._read(*(RECORDS_LINE + number % RECORDS for number in numbers))
        word = AUDIT.offset("read") // 8 // _WORD_BYTES
        self._write(AUDIT_LINE, AUDIT.pack_bytes(read=state["recorded"]), word)
        return [_record(RECORD.unpack(line)) for line in lines]

    @property
    def lost(self) -> int:
        """Violations since reset for which the log, of 16 records, had no room."""
        return AUDIT.unpack(self._read(AUDIT_LINE)[0])["lost"]

    def _check_tenant(self, tenant: int) -> None:
        apertures = self._config.apertures
        if isinstance(tenant, bool) or not isinstance(tenant, int) or not 0 <= tenant < apertures:
            raise UnknownHandleError(f"tenant={tenant!r}: the device has tenants 0 to {apertures - 1}")

    def _read(self, *lines: int) -> list[bytes]:
        addresses = np.array([owner_address(self._config, line) for line in lines], np.uint64)
        (result,) = self._port.run([Read(addresses)])
        return [line.tobytes() for line in result.data]

    def _write(self, line: int, data: bytes, word: int) -> None:
        """Write a word of 32 bits of a line."""
        enables = np.array([((1 << _WORD_BYTES) - 1) << word * _WORD_BYTES], np.uint64)
        values = np.frombuffer(data, np.uint8).reshape(1, LINE_BYTES)
        self._port.run([Write(one(owner_address(self._config, line)), values, enables), Fence()])


def _record(values: dict[str, int]) -> AuditRecord:
    numbers = {name: values[name] for name in ("sequence", "cycle", "tenant", "address")}
    return AuditRecord(kind=Violation(values["kind"]), **numbers)
