"""A tensor with a shape and no numbers: what a model is given for rows that are on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from .cache import NearKVLayer

_make = torch.Tensor._make_wrapper_subclass


class Placeholder(Tensor):
    """Rows of a `NearKVLayer`, without memory.

    What a model does to it between cache and attention (reshaping, expanding latents, concatenating) is
    done to shapes alone, and what comes out stands for the same layer.

    Parameters
    ----------
    size : its shape.
    dtype, device : what the model believes it to be of.
    layer : whose rows it stands for.
    strides : of its elements, as in memory that it does not have; contiguous if not given.

    Raises
    ------
    RuntimeError : when numbers are asked for.
    """

    layer: NearKVLayer

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        layer: NearKVLayer,
        strides: tuple[int, ...] | None = None,
    ) -> Placeholder:
        made: Placeholder = _make(cls, size, strides, dtype=dtype, device=device)
        made.layer = layer
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<rows on the device, {list(self.shape)} {self.dtype}, layer {self.layer.index}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found: list[Placeholder] = []

        def shape_of(value: Any) -> Any:
            if isinstance(value, Placeholder):
                found.append(value)
            if isinstance(value, Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return value

        shapes, options = tree_map(shape_of, args), tree_map(shape_of, kwargs or {})
        device = options.pop("device", None) or found[0].device
        layer = found[0].layer
        try:
            result = func(*shapes, **options)
        except (NotImplementedError, RuntimeError) as error:
            raise RuntimeError(
                f"{func} wants the numbers of rows that are on the device; only the attention implementation "
                "'nearkv' can take them: leave the model's attn_implementation as nearkv.hf.attach set it"
            ) from error
        if func._schema.is_mutable:
            return args[0]

        def stands_for(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return cls(value.shape, value.dtype, device, layer, value.stride())

        return tree_map(stands_for, result)
