"""Messages of 256-byte mode as the device's streams have them."""

from flit256_golden import ALL, WIDTH
from nearkv_hw.abi.flits256 import MESSAGES


def as_device(kind, whole):
    """A golden message as a payload of the streams: what 256-byte messages do not have is zero."""
    here, there = MESSAGES[kind]
    fields = there.unpack(whole & (1 << there.width) - 1)
    names = {field.name for field in here if not field.reserved}
    header = here.pack({name: value for name, value in fields.items() if name in names})
    if kind == "rwd":
        enable = whole >> WIDTH[kind] & ALL
        return header | enable << here.width | whole >> WIDTH[kind] + 64 << here.width + 64
    return header | whole >> WIDTH[kind] << here.width if kind == "drs" else header
