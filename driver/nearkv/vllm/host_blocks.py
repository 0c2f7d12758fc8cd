"""An engine's blocks without a device, and with one that is held against it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, Protocol, Unpack

import numpy as np
import torch

from nearkv import check, reference
from nearkv.attention import Options
from nearkv.blocks import BlockCache
from nearkv.check import CheckTally, Verdict
from nearkv.codec import element_dtype
from nearkv.host_attention import seen
from nearkv.replay import bits_of


class Blocks(Protocol):
    """What the backend asks of the place where rows live; `BlockCache` says what each call means."""

    def write(self, slots: torch.Tensor, *, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put rows into slots; see `BlockCache.write`."""

    def attend(
        self,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        *,
        layer: int,
        q: torch.Tensor,
        places: Many[int] | None = None,
        **options: Unpack[Options],
    ) -> torch.Tensor:
        """Attention of a batch; see `BlockCache.attend`."""

    def close(self) -> None:
        """Forget all rows."""


class ReferenceBlocks:
    """Rows in host memory, attention by `nearkv.reference`.

    Parameters
    ----------
    layers, kv_heads, head_dim, value_dim, dtype, blocks, block_rows : as `BlockCache` has them.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: str,
        blocks: int,
        block_rows: int,
    ) -> None:
        self._block_rows = block_rows
        rows = layers, blocks * block_rows, kv_heads
        # of these zeros the host has pages only where rows were written
        self._k = torch.zeros(*rows, head_dim, dtype=element_dtype(dtype))
        self._v = torch.zeros(*rows, value_dim, dtype=element_dtype(dtype))

    def write(self, slots: torch.Tensor, *, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `BlockCache.write`."""
        kept = slots >= 0
        self._k[layer, slots[kept]] = k[kept]
        self._v[layer, slots[kept]] = v[kept]

    def rows(
        self, block_tables: torch.Tensor, lengths: torch.Tensor, *, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of each sequence, [batch, rows, kv_heads, dim]: as many rows as the longest one has, of
        whatever block behind a shorter one's."""
        longest = int(lengths.max())
        index = torch.arange(longest)
        block = block_tables[:, index // self._block_rows].to(torch.int64)
        slots = block * self._block_rows + index % self._block_rows
        slots[index >= lengths[:, None]] = 0
        return self._k[layer, slots], self._v[layer, slots]

    def attend(
        self,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        *,
        layer: int,
        q: torch.Tensor,
        places: Many[int] | None = None,
        **options: Unpack[Options],
    ) -> torch.Tensor:
        """See `BlockCache.attend`; q is [batch, query_rows, q_heads, head_dim]."""
        k, v = self.rows(block_tables, lengths, layer=layer)
        given: dict[str, Any] = dict(options)
        last = lengths.to(torch.int64)[:, None] - 1
        given["query_positions"] = last + torch.arange(1 - q.shape[1], 1)
        visible = self.visible(lengths, q.shape[1], given.pop("window", None))
        out: torch.Tensor = reference.decode_attention(q, k, v, visible=visible, **given)
        return out

    @staticmethod
    def visible(lengths: torch.Tensor, query_rows: int, window: int | None) -> torch.Tensor:
        """The rows that each query row sees, bool [batch, query_rows, rows]."""
        ends = lengths.numpy().astype(np.int64)
        return torch.from_numpy(seen(ends, query_rows, window=window, rows=None, visible=None))

    def close(self) -> None:
        """See `Blocks.close`."""
        self._k, self._v = (rows.new_empty(0) for rows in (self._k, self._v))


class CheckedBlocks:
    """Rows on the device and, separately, the host's own copy: each device result is held against the
    reference, and one that differs raises.

    Parameters
    ----------
    device_blocks : where results come from.
    own : empty, of the same shape.
    tally : what is counted.
    replay_folder : where an unequal call is written.
    """

    def __init__(
        self, device_blocks: BlockCache, own: ReferenceBlocks, tally: CheckTally, replay_folder: Path
    ) -> None:
        self.device_blocks = device_blocks
        self._own = own
        self._tally = tally
        self._replay_folder = replay_folder

    def write(self, slots: torch.Tensor, *, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `BlockCache.write`."""
        self.device_blocks.write(slots, layer=layer, k=k, v=v)
        with self._tally.timed():
            self._own.write(slots, layer=layer, k=k, v=v)

    def attend(
        self,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        *,
        layer: int,
        q: torch.Tensor,
        places: Many[int] | None = None,
        **options: Unpack[Options],
    ) -> torch.Tensor:
        """See `BlockCache.attend`; q is [batch, query_rows, q_heads, head_dim].

        Raises
        ------
        MismatchError : when bits are not the reference's; it names the command that replays the call.
        """
        out = self.device_blocks.attend(block_tables, lengths, layer=layer, q=q, places=places, **options)
        with self._tally.timed():
            expected = self._own.attend(block_tables, lengths, layer=layer, q=q, **options)
            unequal = bits_of(out) != bits_of(expected)
        self._tally.calls += 1
        if not unequal.any():
            self._tally.equal += 1
            return out
        row = int(unequal.any(-1).any(-1).any(0).nonzero()[0])
        replay = self._replay_file(row, block_tables, lengths, layer, q, out, expected, options)
        verdict = Verdict(False, int(unequal.sum()), unequal.numel(), replay)
        if verdict.command is not None:
            self._tally.commands.append(verdict.command)
        verdict.require()
        return out

    def _replay_file(
        self,
        row: int,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        result: torch.Tensor,
        expected: torch.Tensor,
        options: Options,
    ) -> Path | None:
        """One query row of an unequal call as a file; None with a bias, which files do not have."""
        if options.get("alibi_slopes") is not None:
            return None
        k, v = self._own.rows(block_tables, lengths, layer=layer)
        shown = self._own.visible(lengths, q.shape[1], options.get("window"))[:, row]
        begin = shown.to(torch.int8).argmax(-1)
        scale = options.get("scale")
        case = check.case_of(
            self.device_blocks.cache,
            q=q[:, row],
            contexts=[(k[i, :n], v[i, :n]) for i, n in enumerate(lengths.tolist())],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            ranges=list(zip(begin.tolist(), (begin + shown.sum(-1)).tolist(), strict=True)),
            sinks=options.get("sinks"),
            softcap=options.get("softcap"),
        )
        return check.record(case, result[:, row], expected[:, row], None, self._replay_folder)

    def close(self) -> None:
        """See `Blocks.close`."""
        self.device_blocks.close()
        self._own.close()
