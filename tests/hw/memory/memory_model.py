"""Golden model of device memory: a dictionary of lines, a set of poisoned ones, an owner per extent."""

from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.interfaces import Fault

EXTENT_LINES = EXTENT_BYTES // LINE_BYTES
ALL = (1 << LINE_BYTES) - 1


class MemoryModel:
    """Memory of `lines` lines; accesses are carried out in the order of the calls.

    `lines_touched` counts reads and writes that were let through, `violations` those refused to their tenant.
    """

    def __init__(self, lines):
        self.lines = lines
        self.data = {}
        self.poisoned = set()
        self.owners = {}
        self.reads = self.writes = self.violations = 0

    def claim(self, extent, tenant, claim=True):
        """The owner before (None for none); takes the extent if it is free and `claim` is set."""
        owner = self.owners.get(extent)
        if claim and owner is None:
            self.owners[extent] = tenant
        return owner

    def access(self, line, tenant, write=False, data=0, enable=ALL, poison=False):
        """(fault, data) as the memory answers."""
        if line >= self.lines:
            return Fault.OUTSIDE, 0
        if self.owners.get(line // EXTENT_LINES) != tenant:
            self.violations += 1
            return Fault.DENIED, 0
        if not write:
            self.reads += 1
            return Fault.POISON if line in self.poisoned else Fault.NONE, self.data.get(line, 0)
        self.writes += 1
        mask = byte_mask(enable)
        self.data[line] = self.data.get(line, 0) & ~mask | data & mask
        if poison:
            self.poisoned.add(line)
        elif enable == ALL:
            self.poisoned.discard(line)
        return Fault.NONE, 0


def byte_mask(enable):
    """The bits of the bytes that `enable` names."""
    return sum(0xFF << 8 * i for i in range(LINE_BYTES) if enable >> i & 1)


def random_enable(rng):
    """Byte enables of all kinds: all, none, one byte, a run, any."""
    start = rng.randrange(LINE_BYTES)
    return rng.choice([ALL, ALL, 0, 1 << start, (1 << rng.randrange(LINE_BYTES + 1)) - 1 << start & ALL])
