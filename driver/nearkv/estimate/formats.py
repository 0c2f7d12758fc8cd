"""KV formats: what a row of elements takes in memory, with its scales."""

from __future__ import annotations

from dataclasses import dataclass

from nearkv_hw.abi.formats import E8M0, ELEMENT_FORMATS, FP4_E2M1, FP8_E4M3, FP16, Format
from nearkv_hw.abi.lines import row_pitch

from nearkv.arguments import one_of


@dataclass(frozen=True)
class KVFormat:
    """How K and V elements are stored.

    Parameters
    ----------
    name : as users write it.
    element : of every element.
    scale : of the scales, or None.
    block : elements that share a scale.
    """

    name: str
    element: Format
    scale: Format | None = None
    block: int = 0

    @property
    def bits(self) -> float:
        """Bits of an element, its share of the scale included."""
        return self.element.bits + (self.scale.bits / self.block if self.scale else 0)

    def row_bytes(self, elements: int) -> float:
        """Bytes of a row without padding."""
        return elements * self.bits / 8

    def pitch_bytes(self, elements: int) -> float:
        """Bytes of a row on the device: codes at a pitch of 16, 32 or whole lines; scales lie apart."""
        codes = -(-elements * self.element.bits // 8)
        return row_pitch(codes) + (-(-elements // self.block) * self.scale.bits / 8 if self.scale else 0)


FORMATS: dict[str, KVFormat] = {
    **{name: KVFormat(name, element) for name, element in ELEMENT_FORMATS.items() if element.bits >= 8},
    "mxfp4": KVFormat("mxfp4", FP4_E2M1, E8M0, 32),
    "nvfp4": KVFormat("nvfp4", FP4_E2M1, FP8_E4M3, 16),
    "int4": KVFormat("int4", ELEMENT_FORMATS["int4"], FP16, 32),
}
"""By name. One scale for a whole tensor (8-bit formats) takes no bytes of a row."""


def kv_format(name: str) -> KVFormat:
    """A KV format by its name.

    Raises
    ------
    ArgumentError : there is none of that name.
    """
    return one_of("kv_format", name, FORMATS)
