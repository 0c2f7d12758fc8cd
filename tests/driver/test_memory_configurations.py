"""The same bits from every memory: parts, channels, placements, with traffic of the host, with flipped bits.

Every device is built for its test, so all but `small` itself are slow.
"""

import random

import nearkv
import numpy as np
import pytest
from driver_cases import context, expected, filled, same_bits, values
from nearkv.bench.beside import beside
from nearkv.errors import DeviceError
from nearkv_hw.abi.config import Link, LinkLayer, Placement
from nearkv_hw.abi.dram import PARTS, Dram, Refresh
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_sim.port import Read, Write

SCALE = 0.125
UNITS = {"queries": 1}
"""Units that keep one query take a quarter of the time to build, and the memory around them is the same."""
TRAFFIC = 600
"""Lines that the host reads and writes while attention runs."""

slow = pytest.mark.slow
CONFIGURATIONS = [
    pytest.param({}, id="small"),
    *(
        pytest.param({"dram": part, "refresh": refresh}, marks=slow, id=f"{part.name}-{refresh.name}".lower())
        for part in PARTS
        for refresh in Refresh
        if (part, refresh) != (Dram.DDR5_6400, Refresh.ALL_BANK)
    ),
    pytest.param({"dram": Dram.FIXED}, marks=slow, id="fixed"),
    *(pytest.param({"channels": n}, marks=slow, id=f"{n}-channels") for n in (1, 4, 8)),
    *(
        pytest.param({"placement": placement}, marks=slow, id=placement.name.lower())
        for placement in (Placement.PHY, Placement.FABRIC, Placement.HOST)
    ),
    pytest.param({"link": Link.X8_32, "link_layer": LinkLayer.FLITS_68}, marks=slow, id="flits-68"),
    pytest.param({"link": Link.X8_32, "link_layer": LinkLayer.FLITS_256}, marks=slow, id="flits-256"),
    *(pytest.param({"placement": Placement.RANK, "ranks": n}, marks=slow, id=f"{n}-ranks") for n in (2, 4)),
]


@pytest.mark.rtl
@pytest.mark.parametrize("overrides", CONFIGURATIONS)
def test_bits_and_host_traffic(overrides):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    contexts = [context(rows, 3, 64, 48, seed=rng.randrange(1 << 20)) for rows in (1, 70, 333)]
    q = values(3, 21, 64, seed=rng.randrange(1 << 20))
    wanted = expected(q, contexts, scale=SCALE)
    with nearkv.open("rtl", **(UNITS | overrides if overrides else {})) as device:
        with device.kv_cache(layers=1, kv_heads=3, head_dim=64, value_dim=48, dtype="fp16") as kv:
            handles = filled(kv, contexts)
            assert same_bits(kv.attend(handles, layer=0, q=q, scale=SCALE), wanted)
            traffic = Traffic(kv, rng)
            with beside(traffic.port, traffic.operations) as results:
                assert same_bits(kv.attend(handles, layer=0, q=q, scale=SCALE), wanted)
            traffic.check(results)
            before = device.stats()
            assert same_bits(kv.attend(handles, layer=0, q=q, scale=SCALE), wanted)
            check_lines(device.stats() - before)


def check_lines(spent):
    """What the controllers moved are the lines that are said to have been moved, but for writes that wait."""
    columns = sum(memory.row_hits + memory.row_misses + memory.row_conflicts for memory in spent.memories)
    if columns:  # without DRAM there are no rows
        assert columns == pytest.approx(spent.dram_bytes / LINE_BYTES, rel=0.05)


class Traffic:
    """Random reads and writes of memory of the tenant's own."""

    def __init__(self, kv, rng):
        tenant = kv._tenant
        places = tenant.hosts(tenant.scattered("traffic", 64, 16 * LINE_BYTES))
        lines = (places[:, None] + np.arange(16, dtype=np.uint64) * np.uint64(LINE_BYTES)).reshape(-1)
        self._content = {int(line): rng.randbytes(LINE_BYTES) for line in lines}
        self.port = tenant._port
        self.port.run([self._write(list(self._content))])
        chosen = rng.sample(sorted(self._content), TRAFFIC)
        read, written = chosen[: TRAFFIC * 2 // 3], chosen[TRAFFIC * 2 // 3 :]
        self._wanted = [self._content[line] for line in read]
        for line in written:
            self._content[line] = rng.randbytes(LINE_BYTES)
        self.operations = [Read(np.array(read, np.uint64)), self._write(written)]

    def _write(self, lines):
        data = np.frombuffer(b"".join(self._content[line] for line in lines), np.uint8)
        return Write(np.array(lines, np.uint64), data.reshape(-1, LINE_BYTES))

    def check(self, results):
        """What was read was there, and what was written has arrived."""
        (read,) = results
        assert [line.tobytes() for line in read.data] == self._wanted
        lines = list(self._content)
        (result,) = self.port.run([Read(np.array(lines, np.uint64))])
        assert [line.tobytes() for line in result.data] == [self._content[line] for line in lines]


@pytest.fixture
def two_jobs():
    """A device with two sequences of 40 rows in pages of 16; the first one's pages; queries; the answer."""
    contexts = [context(40, 1, 128, 128, seed=seed) for seed in (1, 2)]
    q = values(2, 4, 128, seed=3)
    with (
        nearkv.open("rtl") as device,
        device.kv_cache(layers=1, kv_heads=1, head_dim=128, dtype="fp16", page_rows=16) as kv,
    ):
        handles = filled(kv, contexts)
        table = kv._sequences.table(handles[0], 0)
        pages = [int(page) for page in table.page_addresses(0, table.pages)[0]]
        yield device, kv, handles, pages, q, expected(q, contexts, scale=SCALE)


@pytest.mark.rtl
def test_one_flipped_bit_is_corrected_and_counted(two_jobs):
    device, kv, handles, pages, q, wanted = two_jobs
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    lines = rng.sample(range(2 * 16 * 4), 5)
    for line in lines:
        device._port.inject(pages[1] + line * LINE_BYTES, [rng.randrange(576)])
    before = device.stats()
    assert same_bits(kv.attend(handles, layer=0, q=q, scale=SCALE), wanted)
    spent = device.stats() - before
    assert sum(memory.corrected for memory in spent.memories) == len(lines)
    assert sum(memory.uncorrectable for memory in spent.memories) == 0


@pytest.mark.rtl
def test_two_flipped_bits_end_their_job_alone_and_name_the_page(two_jobs):
    device, kv, handles, pages, q, wanted = two_jobs
    device._port.inject(pages[2] + 5 * LINE_BYTES, [64, 127])
    with pytest.raises(DeviceError, match="page 2"):
        kv.attend(handles, layer=0, q=q, scale=SCALE)
    assert sum(memory.uncorrectable for memory in device.stats().memories) == 1
    assert same_bits(kv.attend(handles[1:], layer=0, q=q[1:], scale=SCALE), wanted[1:])
    assert same_bits(
        kv.attend(handles[:1], layer=0, q=q[:1], scale=SCALE, rows=[(0, 32)]),
        expected(q[:1], [tuple(part[:32] for part in context(40, 1, 128, 128, seed=1))], scale=SCALE),
    )
