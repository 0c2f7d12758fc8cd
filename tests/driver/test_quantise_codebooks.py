"""Codebooks of lut4: found from rows, and rows as the nearest of their numbers."""

import pytest
import torch
from nearkv.errors import ArgumentError, DtypeError, ShapeError
from nearkv.quantise import RowFormat, attention_arguments, decode, find_codebook, quantise
from nearkv.reference import decode_attention
from nearkv_hw.abi.formats import E8M0

PLAIN = RowFormat("lut4")


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_sixteen_values_are_found_exactly():
    """Rows of 16 values that fp16 has: the codebook is these, and nothing is lost."""
    numbers = torch.tensor([n * 0.75 - 5 for n in range(16)])
    rows = numbers[torch.randint(0, 16, (40, 2, 24), generator=torch.Generator().manual_seed(1))]
    book = find_codebook(rows, PLAIN)
    assert torch.equal(book.float(), numbers.expand(2, 16))
    assert torch.equal(quantise(rows, PLAIN).values().float(), rows)


def test_heads_have_books_of_their_own():
    rows = torch.cat([normal(60, 1, 16), 100 + normal(60, 1, 16, seed=2)], dim=1)
    found = quantise(rows, PLAIN)
    assert found.codebook[0].max() < 10 < 90 < found.codebook[1].min()
    assert ((found.codebook[:, 1:] >= found.codebook[:, :-1]).all(-1)).all(), "rising"


@pytest.mark.parametrize("scale", [None, "e4m3", "e8m0"])
def test_an_element_s_code_is_the_nearest_number_s(scale):
    form = RowFormat("lut4", scale, None if scale is None else 16)
    rows = normal(30, 2, 40)
    found = quantise(rows, form)
    factor = torch.ones(30, 2, 40, dtype=torch.float64)
    if scale is not None:
        factor = decode(found.scales, form.scale_form).repeat_interleave(16, -1)[..., :40]
    book = found.codebook.double()[:, None] * factor.unsqueeze(-1)
    least = (rows.double().unsqueeze(-1) - book).abs().amin(-1)
    assert torch.equal((rows.double() - found.values()).abs(), least)


def test_scales_follow_the_largest_number():
    book = torch.linspace(-3.5, 3.5, 16).half().expand(1, 16)
    rows = torch.tensor([7.0, 0.1, -0.2, 3.0]).expand(1, 1, 4)
    found = quantise(rows, RowFormat("lut4", "e8m0"), codebook=book)
    assert decode(found.scales, E8M0).item() == 2.0, "7 / 3.5, as a power of two"
    assert found.values()[0, 0, 0].item() == 7.0
    zero = quantise(torch.zeros(1, 1, 4), RowFormat("lut4", "e4m3"), codebook=book)
    assert not zero.values().any()


def test_specials():
    book = torch.linspace(-3.5, 3.5, 16).half().expand(1, 16)
    rows = torch.tensor([torch.inf, -torch.inf, 0.3, 1.0]).expand(1, 1, 4)
    assert quantise(rows, PLAIN, codebook=book).codes.flatten().tolist() == [15, 0, 8, 10]
    hidden = quantise(rows, RowFormat("lut4", "e8m0"), codebook=book)
    assert hidden.values().isnan().all(), "a block with an infinity has a NaN for its scale"
    with pytest.raises(ArgumentError, match="lut4 without scales has no NaN, and some"):
        quantise(rows * 0, PLAIN, codebook=book)


def test_the_reference_takes_them():
    k, v, q = normal(1, 30, 2, 16), normal(1, 30, 2, 8, seed=2), normal(1, 4, 16, seed=3).bfloat16()
    rows = quantise(k, PLAIN), quantise(v, RowFormat("lut4", "e4m3", 16))
    given = attention_arguments(*rows)
    out = decode_attention(q, given.pop("k"), given.pop("v"), scale=0.3, **given)
    scores = 0.3 * torch.einsum("hd,rhd->hr", q[0].double(), rows[0].values()[0].repeat_interleave(2, 1))
    wanted = torch.einsum("hr,rhd->hd", scores.softmax(-1), rows[1].values()[0].repeat_interleave(2, 1))
    assert torch.allclose(out[0].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (DtypeError, "a codebook must be float16", {"codebook": torch.zeros(1, 16)}),
        (ShapeError, r"a codebook has shape \[2, 16\], must have \[1, 16\]",
         {"codebook": torch.zeros(2, 16).half()}),
        (ArgumentError, "lut4 has no scale per head", {"head_scale": torch.ones(1)}),
        (ArgumentError, "a codebook belongs to lut4, not to int8",
         {"form": RowFormat("int8", "fp16"), "codebook": torch.zeros(1, 16).half()}),
    ],
)  # fmt: skip
def test_refused(error, message, options):
    form = options.pop("form", PLAIN)
    with pytest.raises(error, match=message):
        quantise(torch.zeros(3, 1, 4), form, **options)


def test_rows_that_tell_no_codebook():
    for rows in (torch.full((1, 1, 4), torch.inf), torch.zeros(0, 1, 4)):
        with pytest.raises(
            ArgumentError, match="rows tell a codebook where there are some and all are finite"
        ):
            find_codebook(rows, PLAIN)
