"""KV formats: what a row of elements takes in memory, with its scales."""

from __future__ import annotations

from dataclasses import dataclass

from nearkv_hw.abi.formats import ELEMENT_FORMATS, Format

from nearkv.arguments import one_of
from nearkv.quantise.formats import PRESETS, RowFormat


@dataclass(frozen=True)
class KVFormat:
    """How K and V elements are stored.

    Parameters
    ----------
    name : as users write it.
    rows : of K and of V.
    """

    name: str
    rows: RowFormat

    @property
    def element(self) -> Format:
        """The format of every element."""
        return self.rows.form

    @property
    def bits(self) -> float:
        """Bits of an element, its share of the scale included."""
        scale = self.rows.scale_form
        return self.element.bits + (scale.bits / self.rows.block if scale and self.rows.block else 0)

    def row_bytes(self, elements: int) -> float:
        """Bytes of a row without padding."""
        return elements * self.bits / 8

    def pitch_bytes(self, elements: int) -> float:
        """Bytes of a row on the device: codes at a pitch of 16, 32 or whole lines; scales lie apart."""
        return self.rows.row_bytes(elements)


FORMATS: dict[str, KVFormat] = {
    **{
        name: KVFormat(name, RowFormat(name))
        for name, element in ELEMENT_FORMATS.items()
        if element.bits >= 8
    },
    **{name: KVFormat(name, PRESETS[name].k) for name in ("mxfp4", "nvfp4", "int4")},
}
"""By name. One scale for a whole tensor or head takes no bytes of a row."""


def kv_format(name: str) -> KVFormat:
    """A KV format by its name.

    Raises
    ------
    ArgumentError : there is none of that name.
    """
    return one_of("kv_format", name, FORMATS)
