"""What decode attention needs to know of a model: its layers, its KV rows, and the weights of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .formats import KVFormat


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """Layers with the same attention.

    Parameters
    ----------
    count : layers.
    q_heads, kv_heads : of each.
    head_dim, value_dim : elements of a K row and of a V row, as the cache stores them.
    window : rows that a query sees, its own included; None for all.
    shared_row : whether V is the front part of the K row, which is then stored and read once (latent
        attention).
    """

    count: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    shared_row: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    def rows(self, context: int) -> int:
        """Rows of a sequence of `context` tokens that a layer keeps and a query sees."""
        return context if self.window is None else min(context, self.window)

    def row_bytes(self, kv_format: KVFormat) -> float:
        """K and V bytes of a token in one layer, without padding."""
        value = 0.0 if self.shared_row else kv_format.row_bytes(self.value_dim)
        return self.kv_heads * (kv_format.row_bytes(self.head_dim) + value)

    def pitch_bytes(self, kv_format: KVFormat) -> float:
        """The same as it lies on the device."""
        value = 0.0 if self.shared_row else kv_format.pitch_bytes(self.value_dim)
        return self.kv_heads * (kv_format.pitch_bytes(self.head_dim) + value)

    def flops(self, context: int) -> int:
        """Operations of one layer for one query token: scores and values, two per multiply and add."""
        return 2 * self.q_heads * (self.head_dim + self.value_dim) * self.rows(context)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder model.

    Parameters
    ----------
    name : for people.
    source : where its figures come from.
    hidden : elements of a token between layers.
    attention : layers with attention, grouped by kind.
    other_layers : layers without attention rows (recurrent, convolution, MLP alone). Their state does not
        grow with the context and is not counted.
    embedding : parameters of the input embedding.
    tied : whether it is the output projection, too.
    expert : parameters of one routed expert in one layer.
    expert_layers : layers with routed experts.
    experts, experts_per_token : routed experts of such a layer, and how many of them a token takes.
    dense : parameters of everything else.
    weight_bits, expert_bits : bits of a weight as stored, and of a routed expert's.
    max_context : tokens that the model was made for, 0 when unknown.
    """

    name: str
    source: str
    hidden: int
    attention: tuple[AttentionLayers, ...]
    other_layers: int = 0
    embedding: int
    tied: bool
    expert: int = 0
    expert_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    dense: int
    weight_bits: float = 16.0
    expert_bits: float = 16.0
    max_context: int = 0

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(kind.count for kind in self.attention) + self.other_layers

    @property
    def attention_layers(self) -> int:
        """Layers with attention rows: each of them asks the device once per token."""
        return sum(kind.count for kind in self.attention)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.dense + self.embedding + self.expert * self.expert_layers * self.experts

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, the embedding included as is usual."""
        return self.dense + self.embedding + self.expert * self.expert_layers * self.experts_per_token

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights as stored."""
        experts = self.expert * self.expert_layers * self.experts
        return ((self.dense + self.embedding) * self.weight_bits + experts * self.expert_bits) / 8

    def weights_read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a step over so many tokens reads.

        Every weight once, but for the input embedding (a row per token, unless it is the output projection)
        and the experts, of which random routing meets 1 - (1 - k/n)^tokens.
        """
        met = 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        experts = met * self.experts * self.expert * self.expert_layers
        dense = self.dense + (self.embedding if self.tied else 0)
        return (dense * self.weight_bits + experts * self.expert_bits) / 8

    def matrix_flops(self) -> int:
        """Operations per token outside attention: two per weight that the token meets."""
        embedding = self.embedding if self.tied else 0
        active = self.dense + embedding + self.expert * self.expert_layers * self.experts_per_token
        return 2 * active

    def attention_flops(self, context: int) -> int:
        """Operations of attention per token."""
        return sum(kind.count * kind.flops(context) for kind in self.attention)

    def kv_bytes_per_token(self, kv_format: KVFormat) -> float:
        """Bytes that one more token adds while no window is full."""
        return sum(kind.count * kind.row_bytes(kv_format) for kind in self.attention)

    def kv_bytes(self, context: int, kv_format: KVFormat, *, padded: bool = False) -> float:
        """Bytes of a sequence's KV rows: those that its windows keep.

        Parameters
        ----------
        context : tokens.
        kv_format : of the rows.
        padded : as they lie on the device.
        """
        return sum(
            kind.count
            * kind.rows(context)
            * (kind.pitch_bytes(kv_format) if padded else kind.row_bytes(kv_format))
            for kind in self.attention
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields and totals as plain values."""
        return {
            **asdict(self),
            "layers": self.layers,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "weight_bytes": self.weight_bytes,
        }


def grouped(layers: Iterable[AttentionLayers]) -> tuple[AttentionLayers, ...]:
    """Layers of the same kind as one, in the order of their first."""
    counts: dict[tuple[int | bool | None, ...], AttentionLayers] = {}
    for layer in layers:
        key = (
            layer.q_heads,
            layer.kv_heads,
            layer.head_dim,
            layer.value_dim,
            layer.window,
            layer.shared_row,
        )
        before = counts[key].count if key in counts else 0
        counts[key] = AttentionLayers(**{**asdict(layer), "count": before + layer.count})
    return tuple(counts.values())
