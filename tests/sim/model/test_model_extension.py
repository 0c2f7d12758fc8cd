"""How extended descriptors end that cannot be done: fields, features, lists in memory, and selected pages."""

import numpy as np
import pytest
from nearkv_hw.abi import Feature, Status
from nearkv_hw.abi import descriptor as abi
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.formats import FP8_E4M3, INT8, LUT4
from nearkv_hw.abi.lines import LINE_BYTES
from rawhost import RawHost, factor_bits

CAPACITY = 256 << 20
LINES = CAPACITY // LINE_BYTES


class Setup:
    """A tenant with a good job of three query rows over 20 rows, with every list that there is."""

    def __init__(self, port):
        self.host = RawHost(port, 0)
        other = RawHost(port, 1, first_extent=100)
        self.theirs = other.allocate(EXTENT_BYTES) // LINE_BYTES
        rng = np.random.default_rng(5)
        k, v = (rng.integers(0x3F00, 0x3FFF, (1, 20, 40), dtype=np.uint16) for _ in range(2))
        q = rng.integers(0x3F00, 0x3FFF, (6, 40), dtype=np.uint16)
        table = self.host.table(list(k), list(v), page_rows=4)
        self.fields = dict(self.host.job(table, q, factor=factor_bits(0.1), sinks=[0] * 6).fields)
        self.fields |= {"query_rows": 3, "group": 2}
        self.fields["flags"] |= abi.FLAG_EXTENDED
        self.ranges = self.place([(2, 5), (9, 20)])
        self.slopes = self.place([0x3F000000, 0xBF000000])
        self.tree = self.place([0, 1, 1], words=24 + 16)
        self.extension = {
            "options": abi.OPTION_CAUSAL | abi.OPTION_RANGES | abi.OPTION_ALIBI,
            "softcap": 0x42000000, "first_position": 17, "window": 9, "kept": 4,
            "range_count": 2, "ranges": self.ranges, "slopes": self.slopes,
        }  # fmt: skip

    def place(self, values, words=0) -> int:
        """Put a list of 32-bit words into memory: its line."""
        data = np.array(values, "<u4").reshape(-1)
        return self.host.place(np.pad(data, (0, max(0, words - len(data)))).tobytes()) // LINE_BYTES

    def end(self, extension=None, **fields):
        """How the job ends with some fields of the descriptor or of the extension changed."""
        more = {**self.extension, **(extension or {})}
        line = abi.ATTEND.pack_bytes({**self.fields, **fields})
        record = self.host.post_extended(line, abi.EXTENSION.pack_bytes(more))
        return Status(record["status"])


@pytest.fixture
def setup(open_port):
    return Setup(open_port(capacity_bytes=CAPACITY))


TREE = {"options": abi.OPTION_TREE, "ranges": 0, "range_count": 0, "slopes": 0, "first_position": 0}
SELECT = abi.OPTION_SUMMARIES | abi.OPTION_SELECT
SELECTING = {
    "options": SELECT,
    "window": 0,
    "kept": 0,
    "first_position": 0,
    "ranges": 0,
    "range_count": 0,
    "slopes": 0,
}


def test_the_job_is_good(setup):
    assert setup.end() is Status.OK
    tree = {**TREE, "tree": setup.tree, "window": 0, "kept": 0}
    assert setup.end(tree) is Status.OK


@pytest.mark.parametrize(
    ("status", "extension"),
    [
        (Status.BAD_FLAGS, {"options": 1 << 8}),
        (Status.BAD_FLAGS, {"options": 1 << 15}),
        (Status.BAD_FLAGS, {"options": abi.OPTION_CAUSAL | abi.OPTION_ALIBI}),  # ranges without the option
        (Status.BAD_FLAGS, {"options": abi.OPTION_CAUSAL | abi.OPTION_RANGES}),  # slopes likewise
        (Status.BAD_FLAGS, {"tree": 1}),
        (Status.BAD_FLAGS, {"codebooks": 1}),
        (Status.BAD_FLAGS, {"selected": 1}),
        (Status.BAD_FLAGS, {"select_pages": 1}),
        (Status.BAD_FLAGS, {"window": 0}),  # kept rows of no window
        (Status.BAD_FLAGS, {"options": abi.OPTION_SELECT | abi.OPTION_CAUSAL}),  # without summaries
        (Status.BAD_FLAGS, {**TREE, "tree": 1, "first_position": 1}),
        *((Status.BAD_FLAGS, {f.name: 1}) for f in abi.EXTENSION if f.reserved),
        (Status.BAD_GEOMETRY, {**SELECTING, "select_pages": 0, "selected": 1}),
        (Status.BAD_FORMAT, {"k_scale": 2}),  # bf16 has no scales
        (Status.BAD_FORMAT, {"k_scale": 5}),
        (Status.BAD_FORMAT, {"v_block": 1}),  # a block of no scale
        (Status.BAD_FORMAT, {"k_block": 5}),
        (Status.BAD_FORMAT, {"k_pitch": 1}),  # rows of 80 bytes
        (Status.BAD_FORMAT, {"k_pitch": 3}),
        (Status.BAD_FORMAT, {"options": abi.OPTION_CAUSAL | abi.OPTION_RANGES | abi.OPTION_ALIBI
                             | abi.OPTION_CODEBOOK}),  # of no lut4
        (Status.BAD_FACTOR, {"softcap": 0x44800001}),
        (Status.BAD_FACTOR, {"softcap": 0xBF800000}),
        (Status.BAD_FACTOR, {"softcap": 0x7FC00000}),
        (Status.BAD_ADDRESS, {"ranges": LINES}),
        (Status.BAD_ADDRESS, {"slopes": LINES}),
        (Status.BAD_ADDRESS, {**TREE, "tree": LINES}),
        (Status.BAD_ADDRESS, {**SELECTING, "select_pages": 1, "selected": LINES}),
    ],
    ids=str,
)  # fmt: skip
def test_field_at_fault(setup, status, extension):
    assert setup.end(extension) is status


@pytest.mark.parametrize(
    ("status", "fields", "extension"),
    [
        (Status.BAD_GEOMETRY, {"query_rows": 0}, {}),
        (Status.BAD_GEOMETRY, {"head_dim": 1024 - 1, "value_dim": 0}, {}),
        (Status.BAD_FORMAT, {"k_format": LUT4.code}, {}),
        (Status.BAD_FORMAT, {"k_format": 8}, {}),
        (Status.BAD_FORMAT, {"k_format": INT8.code, "head_dim": 40}, {"k_pitch": 2}),
        (Status.BAD_FORMAT, {"query_format": FP8_E4M3.code}, {}),
        (Status.BAD_FLAGS, {"v_format": 1}, {"options": abi.OPTION_LATENT | abi.OPTION_CAUSAL
                                             | abi.OPTION_RANGES | abi.OPTION_ALIBI}),
        (Status.BAD_GEOMETRY, {"value_dim": 41}, {"options": abi.OPTION_LATENT | abi.OPTION_CAUSAL
                                                  | abi.OPTION_RANGES | abi.OPTION_ALIBI}),
        (Status.BAD_GEOMETRY, {"row_begin": 0, "row_end": (abi.MAX_CANDIDATES << 4) + 1, "page_rows_log2": 4},
         {**SELECTING, "select_pages": 1, "selected": 1}),
        (Status.BAD_RANGE, {"row_begin": 1, "row_end": abi.MAX_CANDIDATES << 4, "page_rows_log2": 4},
         {**SELECTING, "select_pages": 1, "selected": 1}),
        (Status.BAD_RANGE, {"row_begin": 0, "row_end": 2}, {**TREE, "window": 0, "kept": 0, "tree": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_do_not_go_together(setup, status, fields, extension):
    assert setup.end(extension, **fields) is status


@pytest.mark.parametrize("ranges", [
    [(5, 2), (9, 20)], [(2, 2), (9, 20)], [(9, 20), (2, 5)], [(2, 5), (4, 20)], [(2, 5), (9, 21)],
    [(0, 5), (9, 20)],
], ids=str)  # fmt: skip
def test_ranges_that_are_none(setup, ranges):
    begin = 1 if ranges[0][0] == 0 else 0
    assert setup.end({"ranges": setup.place(ranges)}, row_begin=begin) is Status.BAD_LIST


def test_lists_that_hold_what_they_may_not(setup):
    for bits in (0x7F800000, 0xFF800000, 0x7FC00000):
        assert setup.end({"slopes": setup.place([0x3F000000, bits])}) is Status.BAD_LIST
    tree = {**TREE, "window": 0, "kept": 0}
    assert setup.end({**tree, "tree": setup.place([0, 1 << 23, 1], 40)}) is Status.BAD_LIST
    assert setup.end({"ranges": setup.place([(2, 5), (5, 20)])}) is Status.OK, "ranges may touch"
    assert setup.end({"range_count": 0}) is Status.OK, "no row is seen"


def test_lists_of_another_tenant(setup):
    assert setup.end({"ranges": setup.theirs}) is Status.DENIED
    assert setup.end({"slopes": setup.theirs}) is Status.DENIED
    assert setup.end({**TREE, "window": 0, "kept": 0, "tree": setup.theirs}) is Status.DENIED


def test_a_list_that_is_lost(setup):
    setup.host.port.inject(setup.slopes * LINE_BYTES, [0, 1])
    assert setup.end() is Status.POISON


@pytest.mark.parametrize(
    ("feature", "extension", "fields"),
    [
        (Feature.SOFTCAP, {}, {}),
        (Feature.ALIBI, {}, {}),
        (Feature.QUERY_ROWS, {}, {}),
        (Feature.RANGES, {}, {}),
        (Feature.TREE, {**TREE, "window": 0, "kept": 0, "tree": 1}, {}),
        (Feature.SELECTION, {**SELECTING, "select_pages": 1, "selected": 1}, {}),
        (
            Feature.TREE_SELECTION,
            {**SELECTING, "options": SELECT | abi.OPTION_TREE, "tree": 1, "select_pages": 1, "selected": 1},
            {},
        ),
        (Feature.OUTPUT_SCALE, {}, {"output_scale": 0x3F800000}),
    ],
    ids=str,
)
def test_what_a_device_has_not(open_port, feature, extension, fields):
    setup = Setup(open_port(Feature.all() & ~feature, capacity_bytes=CAPACITY))
    assert setup.end(extension, **fields) is Status.BAD_FLAGS


@pytest.mark.parametrize(
    ("feature", "status", "fields", "extension"),
    [
        (Feature.NARROW, Status.BAD_FORMAT, {"k_format": INT8.code}, {}),
        (Feature.SCALES, Status.BAD_FORMAT, {"k_format": INT8.code}, {"k_scale": 2}),
        (Feature.SHORT_ROWS, Status.BAD_FORMAT, {"head_dim": 16}, {"k_pitch": 1}),
        (Feature.LARGE_ROWS, Status.BAD_GEOMETRY, {"head_dim": 257}, {}),
    ],
    ids=str,
)
def test_rows_that_a_device_has_not(open_port, feature, status, fields, extension):
    setup = Setup(open_port(Feature.all() & ~feature, capacity_bytes=CAPACITY))
    assert setup.end(extension, **fields) is status
