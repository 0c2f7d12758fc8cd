"""Rows, pages, results and tables in memory."""

import pytest
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.memory import ResultLayout, RowLayout, table_bytes


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
