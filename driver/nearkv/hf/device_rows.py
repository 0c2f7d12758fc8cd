"""Rows on the device, and attention there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from nearkv import reference
from nearkv.arguments import whole_number
from nearkv.errors import AccessError, ArgumentError, DeviceError

from .rows import JointRows, RowShape, RowStore, Scoring, causal, row_ranges

if TYPE_CHECKING:
    from nearkv.cache import KVCache
    from nearkv.device import Device
    from nearkv.sequences import Sequence


CROP_ROWS = 32
"""Rows that a crop may take back of a layer with a window, unless a store is told otherwise: more than
transformers' drafts usually are."""


class DeviceRows(RowStore):
    """Rows on the device, and attention over them there: of a token, of a draft, of a piece of a prompt.

    Parameters
    ----------
    device : an open device.
    shape : of the model's rows.
    dtype, kv_format : as `RowStore` has them.
    page_rows : rows of a page.
    tenant : the device's aperture to use.
    prompts_on_host : work out the first rows of a sequence on the host, where they are at hand, rather than
        on the device. If not given: where the device is simulated cycle by cycle.
    crop_rows : rows that `crop` may take back, whatever windows have left; pages behind a window and so many
        rows are given back as it moves on.

    Members
    -------
    cache : the KV cache, common to all stores that are made of this one.
    sequences : of the batch.
    device_calls : attention calls on the device.
    kv_bytes : K and V bytes, in whole lines, that those of one query row had to look at.
    """

    def __init__(
        self,
        device: Device,
        shape: RowShape,
        dtype: str,
        *,
        kv_format: str | None = None,
        page_rows: int = 16,
        tenant: int = 0,
        prompts_on_host: bool | None = None,
        crop_rows: int = CROP_ROWS,
    ) -> None:
        super().__init__(dtype, kv_format)
        whole_number("crop_rows", crop_rows, 0, 1 << 32)
        cache = device.kv_cache(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            dtype=kv_format or dtype,
            latent=shape.latent,
            page_rows=page_rows,
            tenant=tenant,
        )
        on_host = cache.device_kind != "model" if prompts_on_host is None else prompts_on_host
        self._start(shape, cache, on_host, [], {}, crop_rows)

    def _start(
        self,
        shape: RowShape,
        cache: KVCache,
        prompts_on_host: bool,
        retired: list[Sequence],
        windows: dict[int, int],
        crop_rows: int,
    ) -> None:
        self.shape = shape
        self._crop_rows = crop_rows
        self._windows = windows
        """Of layers that have been asked with one; a model's, so common to all stores made of this one."""
        self.cache = cache
        self.device_calls = 0
        self.kv_bytes = 0
        self._row_bytes = shape.kv_heads * cache.row_bytes
        self._prompts_on_host = prompts_on_host and not self.narrow
        self._prompt: dict[int, tuple[Tensor, Tensor | None]] = {}
        # New rows wait for the attention that follows them: both are one program. With them goes how many
        # rows each sequence has then.
        self._waiting: dict[int, tuple[Tensor, Tensor | None, list[int]]] = {}
        self.sequences: list[Sequence] = []
        # Sequences of stores that nobody has any more. A collection may come in the middle of a call on the
        # device, so they are only noted, and freed with the next rows.
        self._retired = retired
        weakref.finalize(self, _retire, self.sequences, retired)

    def _append(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        while self._retired:
            self.cache.free(self._retired.pop())
        if not self.sequences:
            self.sequences.extend(self.cache.sequence() for _ in range(k.shape[0]))
        if len(self.sequences) != k.shape[0]:
            raise ValueError(f"the cache holds {len(self.sequences)} sequences, got rows of {k.shape[0]}")
        self._prompt.pop(layer, None)
        if layer in self._waiting:
            self._flush(layer)
        if self._prompts_on_host and k.shape[1] > 1 and self.rows(layer) == 0:
            self._prompt[layer] = (k, v)
            self.cache.append(self.sequences, layer=layer, k=k, v=v)
        else:
            more = k.shape[1]
            self._waiting[layer] = (k, v, [length + more for length in self._lengths(layer)])

    def _flush(self, layer: int | None = None) -> None:
        """Append what waits for its attention, of a layer or of all."""
        for one in [layer] if layer is not None else list(self._waiting):
            if one in self._waiting:
                k, v, _ = self._waiting.pop(one)
                self.cache.append(self.sequences, layer=one, k=k, v=v)

    def _attend(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
        if scoring.window is not None:
            self._windows[layer] = scoring.window
        if layer in self._prompt:
            out = self._on_host(layer, q, visible, scoring)
            self._slide(layer)
            return out
        options: dict[str, Any] = {
            "scale": scoring.scale,
            "sinks": scoring.sinks,
            "softcap": scoring.softcap,
        }
        if scoring.window is not None:
            options["window"] = scoring.window
        if visible is not None:
            options |= self._sight(layer, q, visible, scoring.window)
        self.device_calls += 1
        if q.shape[1] == 1:
            seen = options.get("rows")
            rows = sum(self._lengths(layer)) if seen is None else sum(end - begin for begin, end in seen)
            self.kv_bytes += rows * self._row_bytes
        found = self._appended(layer, q, options) if layer in self._waiting else None
        if found is None:
            found = self.cache.attend(self.sequences, layer=layer, q=q, **options)
        self._slide(layer)
        return found

    def _slide(self, layer: int) -> None:
        """Give back what the layer's window has left, unless all stays until the next crop."""
        if layer in self._windows and not self.recording:
            self._give_back(layer)

    def _give_back(self, layer: int) -> None:
        """The pages that the layer's window has left, but for what `crop` may bring back."""
        for sequence in self.sequences:
            self.cache.slide(sequence, self._windows[layer] + self._crop_rows, layer=layer)

    def _appended(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor | None:
        """Rows and their attention in one program; None where the device cannot, and rows alone are in."""
        k, v, _ = self._waiting[layer]
        try:
            out: Tensor = self.cache.append_attend(self.sequences, layer=layer, k=k, v=v, q=q, **options)
        except ArgumentError:  # with nothing done: what the host has to work out is one
            self._flush(layer)
            return None
        except (DeviceError, AccessError):  # with the rows there
            del self._waiting[layer]
            raise
        del self._waiting[layer]
        return out

    def _sight(self, layer: int, q: Tensor, visible: Tensor, window: int | None) -> dict[str, Any]:
        """What `KVCache.attend` is told of `visible`: as little as says it."""
        if q.shape[1] == 1:
            ranges = row_ranges(visible[:, 0])
            return {"visible": visible[:, 0]} if ranges is None else {"rows": ranges}
        seen = visible.any(1)
        whole = causal(q.shape[0], q.shape[1], self.rows(layer), q.device, window)
        if not torch.equal(visible, seen[:, None] & whole):
            return {"visible": visible}  # each query row its own
        ranges = row_ranges(seen)
        if ranges is None:
            return {"visible": seen}
        return {} if ranges == [(0, self.rows(layer))] * len(ranges) else {"rows": ranges}

    def _on_host(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
        k, v = self._prompt.pop(layer)
        whole = causal(q.shape[0], q.shape[1], k.shape[1], q.device, scoring.window)
        out: Tensor = reference.decode_attention(
            q,
            k,
            v,
            scale=scoring.scale,
            visible=whole if visible is None else whole & visible,
            sinks=scoring.sinks,
            softcap=scoring.softcap,
            k_format=self.dtype,
            value_dim=scoring.value_dim,
        )
        return out

    def read(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """See `RowStore.read`."""
        self._flush(layer)
        parts = [self._read(sequence, layer) for sequence in self.sequences]
        k, v = (torch.stack(part) for part in zip(*parts, strict=True))
        return k, None if self.shape.latent else v

    def _read(self, sequence: Sequence, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence, zeros where rows were released: nobody sees these."""
        begin, end = self.cache.released(sequence, layer)
        k, v = self.cache.read(sequence, layer=layer)
        if begin == end:
            return k, v
        k, v = (torch.cat([x[:begin], x.new_zeros(end - begin, *x.shape[1:]), x[begin:]]) for x in (k, v))
        return k, v

    def works_on_host(self, layer: int) -> bool:
        """Whether the layer's next attention is a prompt's, on the host."""
        return layer in self._prompt

    def rows(self, layer: int) -> int:
        """See `RowStore.rows`."""
        return max(self._lengths(layer), default=0)

    def _lengths(self, layer: int) -> list[int]:
        """Rows of each sequence, those included that wait."""
        if layer in self._waiting:
            return self._waiting[layer][2]
        return [self.cache.length(sequence, layer) for sequence in self.sequences]

    @property
    def batch(self) -> int:
        """See `RowStore.batch`."""
        return len(self.sequences)

    def crop(self, rows: int) -> None:
        """See `RowStore.crop`."""
        self._flush()
        for layer, window in self._windows.items():
            for sequence in self.sequences:
                _, end = self.cache.released(sequence, layer)
                first = rows - window + 1
                if rows > 0 and first < end:
                    raise ArgumentError(
                        f"crop to {rows} rows: layer {layer} has a window of {window}, so its next query "
                        f"sees row {max(first, 0)}, and rows before {end} were given back; larger crop_rows "
                        "keep more of them, and after activate_past_recording() all stay until a crop"
                    )
        for sequence in self.sequences:
            if rows < max(self.cache.length(sequence, layer) for layer in range(self.shape.layers)):
                self.cache.crop(sequence, rows)
        for layer in self._windows:
            self._give_back(layer)

    def select(self, indices: Many[int]) -> None:
        """See `RowStore.select`."""
        self._flush()
        if self.sequences:
            self.sequences[:] = self.cache.select(self.sequences, indices)

    def reset(self) -> None:
        """See `RowStore.reset`."""
        for sequence in self.sequences:
            self.cache.free(sequence)
        self.sequences.clear()
        self._prompt.clear()
        self._waiting.clear()

    def fresh(self) -> Self:
        """See `RowStore.fresh`."""
        made = type(self).__new__(type(self))
        RowStore.__init__(made, self.dtype, self.form.name if self.narrow else None)
        made._start(
            self.shape, self.cache, self._prompts_on_host, self._retired, self._windows, self._crop_rows
        )
        return made

    def fork(self) -> Self:
        """See `RowStore.fork`."""
        self._flush()
        made = self.fresh()
        made.sequences.extend(self.cache.fork(sequence) for sequence in self.sequences)
        made.recording = self.recording
        return made

    @classmethod
    def together(cls, stores: Many[RowStore]) -> RowStore:
        """See `RowStore.together`; stores in one cache are asked with one doorbell."""
        own = [store for store in stores if isinstance(store, DeviceRows)]
        if len(own) < len(stores) or any(store.cache is not own[0].cache for store in own):
            return JointRows(stores)
        joint = own[0].fresh()
        joint.ragged = True
        joint.recording = any(store.recording for store in own)
        joint.sequences = [sequence for store in own for sequence in store.sequences]  # not its to retire
        return joint


def _retire(sequences: list[Sequence], retired: list[Sequence]) -> None:
    retired.extend(sequences)
