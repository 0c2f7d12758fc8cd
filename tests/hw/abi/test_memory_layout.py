"""Rows, pages, results and tables in memory."""

import pytest
from nearkv_hw.abi.config import EXTENT_BYTES, Feature
from nearkv_hw.abi.descriptor import EXTENSION
from nearkv_hw.abi.formats import E8M0, FP4_E2M1, ROW_FORMATS, SCALE_BLOCKS, SCALE_FORMATS, OutputForm
from nearkv_hw.abi.memory import ENTRY, ResultLayout, RowLayout, table_bytes
from nearkv_hw.abi.rows import Stored
from nearkv_hw.abi.window import IDENTITY


@pytest.mark.parametrize("head_dim", [1, 31, 32, 33, 64, 128, 255, 256])
@pytest.mark.parametrize("value_dim", [1, 32, 100, 256])
@pytest.mark.parametrize("page_rows", [4, 16, 64])
def test_rows_of_a_page_do_not_overlap(head_dim, value_dim, page_rows):
    layout = RowLayout(head_dim, value_dim, page_rows)
    spans = [(layout.k_offset(r), head_dim * 2) for r in range(page_rows)]
    spans += [(layout.v_offset(r), value_dim * 2) for r in range(page_rows)]
    spans.sort()
    for (start, size), (following, _) in zip(spans, [*spans[1:], (layout.page_bytes, 0)], strict=True):
        assert start % 64 == 0
        assert start + size <= following


def test_a_page_must_fit_an_extent():
    assert RowLayout(256, 256, 1024).page_bytes == EXTENT_BYTES
    with pytest.raises(ValueError, match="use at most 1024 rows"):
        RowLayout(256, 256, 2048)


@pytest.mark.parametrize("page_rows", [0, 2, 12, 16384])
def test_page_rows_is_a_power_of_two(page_rows):
    with pytest.raises(ValueError, match="power of two from 4 to 8192"):
        RowLayout(64, 64, page_rows)


def test_result_planes():
    assert ResultLayout(64, OutputForm.FP32).planes == (4,)
    assert ResultLayout(65, OutputForm.BF16).planes == (3,)
    assert ResultLayout(64, OutputForm.PARTIAL).planes == (4, 8, 8, 1)
    assert ResultLayout(1, OutputForm.FP16).lines == 2


def test_table_sizes():
    assert table_bytes(3, 9) == 64 * (1 + 3 * 2)


FORMATS = [*ROW_FORMATS.values()]
SCALES = [None, *SCALE_FORMATS.values()]


@pytest.mark.parametrize("element", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("scale", SCALES, ids=lambda form: getattr(form, "name", "none"))
@pytest.mark.parametrize("block", [None, *SCALE_BLOCKS])
@pytest.mark.parametrize("short", [False, True])
def test_areas_hold_their_rows_and_follow_each_other(element, scale, block, short):
    """Codes and scales of all rows lie in their area, no row crosses a line but such as begin one."""
    stored = Stored(element, scale, block, short)
    for head_dim, value_dim, page_rows in ((1, 16, 4), (32, 64, 16), (128, 48, 32), (576, 512, 16)):
        for latent in (False, True):
            layout = RowLayout(head_dim, value_dim, page_rows, stored, latent=latent, summaries=True)
            sizes = [stored.code_bytes(head_dim), stored.scale_bytes(head_dim)]
            sizes += [0, 0] if latent else [stored.code_bytes(value_dim), stored.scale_bytes(value_dim)]
            ends = [*layout.areas[1:], layout.summary_offset]
            for size, pitch, area, end in zip(sizes, layout.pitches, layout.areas, ends, strict=True):
                assert area % 64 == 0
                assert pitch >= size
                assert (pitch == 0) == (size == 0)
                assert area + page_rows * pitch <= end < area + page_rows * pitch + 64
                assert pitch % 64 == 0 or 64 % pitch == 0
            assert layout.page_bytes == layout.summary_offset + 2 * 64 * -(-head_dim // 32)


def test_lines_of_rows_that_share_them():
    stored = Stored(FP4_E2M1, E8M0, 32, short=True)
    layout = RowLayout(64, 32, 64, stored)
    assert layout.pitches == (32, 2, 16, 1)
    assert layout.areas == (0, 64 * 32, 64 * 34, 64 * 50)
    assert layout.lines(0, 64) == 32 + 2 + 16 + 1
    assert layout.lines(1, 2) == 4
    assert layout.lines(31, 33) == 2 + 2 + 2 + 1
    assert layout.lines(5, 5) == 0


@pytest.mark.parametrize("element", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("scale", SCALES, ids=lambda form: getattr(form, "name", "none"))
@pytest.mark.parametrize("block", [None, *SCALE_BLOCKS])
def test_codes_of_descriptors_say_how_rows_are_stored(element, scale, block):
    for dim in (8, 30, 64, 200):
        stored = Stored(element, scale, block, short=True)
        codes = {"element": element.code, "scale": stored.scale_code, "block": stored.block_code}
        found = Stored.of(**codes, pitch=stored.pitch_code(dim))
        assert (found.element, found.scale, found.block) == (element, scale, block)
        assert found.pitch_bytes(dim) == stored.pitch_bytes(dim)


def test_the_extension_is_a_line_whose_addresses_have_words_of_their_own():
    for name in ("ranges", "tree", "slopes", "codebooks", "selected"):
        assert EXTENSION.offset(name) % 64 == 0
        assert EXTENSION[name].width == ENTRY["line"].width
    assert EXTENSION.unpack(EXTENSION.pack(first_position=-1, window=1 << 23))["first_position"] == -1


def test_features_have_room():
    assert Feature.all() < 1 << IDENTITY["features"].width
    assert all(flag in Feature.all() for flag in Feature)
