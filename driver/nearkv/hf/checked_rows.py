"""Rows on the device and a copy on the host: each of the device's results is held against the reference."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Self

from torch import Tensor

from nearkv import check
from nearkv.check import CheckTally
from nearkv.quantise import Quantised
from nearkv.replay import bits_of

from .device_rows import DeviceRows
from .reference_rows import ReferenceRows
from .rows import JointRows, RowStore, Scoring, causal, row_ranges


class CheckedRows(RowStore):
    """Rows on the device and, separately, the host's own copy: each device result is held against the
    reference.

    Parameters
    ----------
    device_rows : where results come from.
    replay_folder : where an unequal call is written.
    """

    def __init__(self, device_rows: DeviceRows, replay_folder: Path) -> None:
        kv_format = device_rows.form.name if device_rows.narrow else None
        super().__init__(device_rows.dtype, kv_format)
        self.device_rows = device_rows
        self.own = ReferenceRows(device_rows.dtype, kv_format)
        self.tally = CheckTally()
        self._replay_folder = replay_folder

    def _append(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        self.device_rows._append(layer, k, v)
        with self.tally.timed():
            self.own._append(layer, k, v)

    def _attend(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
        on_host = self.device_rows.works_on_host(layer)
        out = self.device_rows._attend(layer, q, visible, scoring)
        if not on_host:
            with self.tally.timed():
                self._check(layer, q, out, visible, scoring)
        return out

    def _check(self, layer: int, q: Tensor, result: Tensor, visible: Tensor | None, scoring: Scoring) -> None:
        expected = self.own._attend(layer, q, visible, scoring)
        unequal = (bits_of(result.cpu()) != bits_of(expected.cpu())).flatten(2).any(-1).any(0)
        self.tally.calls += 1
        self.tally.equal += not unequal.any()
        if unequal.any():
            self._record(layer, q, result, visible, scoring, row=int(unequal.nonzero()[0]))

    def _record(
        self,
        layer: int,
        q: Tensor,
        result: Tensor,
        visible: Tensor | None,
        scoring: Scoring,
        *,
        row: int,
    ) -> None:
        """Write one query row of an unequal call to a file, with the command that replays it."""
        seen = causal(q.shape[0], q.shape[1], self.own.rows(layer), q.device, scoring.window)
        seen = seen if visible is None else seen & visible
        ranges = row_ranges(seen[:, row])
        k, v = self.own.quantised(layer)
        if ranges is None or (v is None and self.narrow):
            return
        parts = [k, v or Quantised(k.format, k.codes[..., : scoring.value_dim], None, None, 0)]
        held = [part.codes if self.narrow else part.codes.view(self.torch_dtype) for part in parts]
        scales = [
            tuple(None if part.scales is None else part.scales[index] for part in parts)
            for index in range(self.batch)
        ]
        heads = {"k_scale": parts[0].head_scale, "v_scale": parts[1].head_scale}
        case = check.case_of(
            self.device_rows.cache,
            q=q[:, row],
            contexts=list(zip(*held, strict=True)),
            scale=scoring.scale,
            ranges=ranges,
            sinks=scoring.sinks,
            softcap=scoring.softcap,
            scales=[(of_k, of_v) for of_k, of_v in scales],
            heads={name: tensor for name, tensor in heads.items() if tensor is not None},
        )
        verdict = check.attention(
            self.device_rows.cache,
            self.device_rows.sequences,
            layer=layer,
            case=case,
            result=result[:, row],
            directory=self._replay_folder,
        )
        if verdict.command is not None:
            self.tally.commands.append(verdict.command)

    def read(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """See `RowStore.read`: those of the device."""
        return self.device_rows.read(layer)

    def rows(self, layer: int) -> int:
        """See `RowStore.rows`."""
        return self.device_rows.rows(layer)

    @property
    def batch(self) -> int:
        """See `RowStore.batch`."""
        return self.device_rows.batch

    def crop(self, rows: int) -> None:
        """See `RowStore.crop`."""
        self.device_rows.crop(rows)
        self.own.crop(rows)

    def record_past(self) -> None:
        """See `RowStore.record_past`."""
        self.device_rows.record_past()

    def select(self, indices: Many[int]) -> None:
        """See `RowStore.select`."""
        self.device_rows.select(indices)
        self.own.select(indices)

    def reset(self) -> None:
        """See `RowStore.reset`."""
        self.device_rows.reset()
        self.own.reset()

    def fresh(self) -> Self:
        """See `RowStore.fresh`; the tally is common to both."""
        return self._with(self.device_rows.fresh(), self.own.fresh())

    def fork(self) -> Self:
        """See `RowStore.fork`; the tally is common to both."""
        return self._with(self.device_rows.fork(), self.own.fork())

    def _with(self, device_rows: DeviceRows, own: ReferenceRows) -> Self:
        made = type(self)(device_rows, self._replay_folder)
        made.own, made.tally = own, self.tally
        return made

    @classmethod
    def together(cls, stores: Many[RowStore]) -> RowStore:
        """See `RowStore.together`: the device is asked with one doorbell, the reference store by store."""
        own = [store for store in stores if isinstance(store, CheckedRows)]
        joint = DeviceRows.together([store.device_rows for store in own])
        if len(own) < len(stores) or not isinstance(joint, DeviceRows):
            return JointRows(stores)
        return JointChecked(joint, own)


class JointChecked(JointRows):
    """Checked rows of several stores in one cache: one call on the device, held against each store's own."""

    def __init__(self, device_rows: DeviceRows, stores: Many[CheckedRows]) -> None:
        super().__init__(stores)
        self._device_rows = device_rows
        self._checked = list(stores)

    def _append(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        self._device_rows._append(layer, k, v)
        for index, store in enumerate(self._checked):
            own = slice(index, index + 1)
            store.own._append(layer, k[own], None if v is None else v[own])

    def _attend(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
        out = self._device_rows._attend(layer, q, visible, scoring)
        for index, store in enumerate(self._checked):
            own = slice(index, index + 1)
            store._check(layer, q[own], out[own], None, scoring)
        return out
