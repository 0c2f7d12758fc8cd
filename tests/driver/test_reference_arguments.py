"""What the reference refuses, and how it says so; and the forms in which it takes its arguments."""

import numpy as np
import pytest
import torch
from nearkv.reference import Partial, State, decode_attention, finish, log_sum_exp, merge, score_factor
from nearkv_hw.abi.memory import LANE_NAN
from nearkv_hw.abi.numerics import MAX_ROWS, TOP_NONE


def call(**changes):
    """A small legal call with some arguments changed."""
    arguments = {
        "q": torch.ones(2, 4, 8, dtype=torch.bfloat16),
        "k": torch.ones(2, 5, 2, 8, dtype=torch.bfloat16),
        "v": torch.ones(2, 5, 2, 3, dtype=torch.bfloat16),
        "scale": 0.5,
    }
    return decode_attention(**arguments | changes)


bf16, byte = torch.bfloat16, torch.uint8
REFUSED = [
    (
        {"q": torch.ones(4, 8, dtype=bf16)},
        ValueError,
        r"q must be \[batch, q_heads, head_dim\] or .*\(4, 8\)",
    ),
    ({"q": torch.ones(2, 4, 8)}, TypeError, r"q must be bfloat16 or float16, not torch.float32; convert it"),
    ({"q": [1.0]}, TypeError, "q must be a torch tensor, not list"),
    ({"q": torch.ones(1, 4, 8, dtype=bf16)}, ValueError, "q has batch 1, k has 2"),
    ({"q": torch.ones(2, 4, 9, dtype=bf16)}, ValueError, "q has head_dim 9, k has 8"),
    ({"q": torch.ones(2, 3, 8, dtype=bf16)}, ValueError, "3 query heads cannot be divided over 2 KV heads"),
    ({"q": torch.ones(2, 0, 8, dtype=bf16)}, ValueError, "heads and dims must be at least 1"),
    ({"k": torch.ones(2, 5, 8, dtype=bf16)}, ValueError, r"k must be \[batch, rows, kv_heads, dim\], got"),
    (
        {"v": torch.ones(2, 4, 2, 3, dtype=bf16)},
        ValueError,
        "the same batch, rows and kv_heads, got .* and .*",
    ),
    ({"v": torch.ones(2, 5, 2, 0, dtype=bf16)}, ValueError, "heads and dims must be at least 1"),
    (
        {"k": torch.ones(2, 5, 2, 8)},
        TypeError,
        "k of format bf16 must be torch.int16 codes or torch.bfloat16",
    ),
    ({"k_format": "fp9"}, ValueError, "k_format must be one of bf16, fp16, .*, not 'fp9'"),
    ({"k_format": "int8"}, ValueError, "k holds torch.bfloat16 values, which are bf16; k_format says int8"),
    ({"v_format": "int4"}, ValueError, "v holds torch.bfloat16 values"),
    ({"k": torch.ones(2, 5, 2, 8, dtype=byte)}, TypeError, "k of format bf16 must be torch.int16 codes"),
    (
        {"k": torch.ones(2, 5, 2, 8, dtype=torch.int8), "k_format": "int8"},
        TypeError,
        "k of format int8 must be torch.uint8 codes, got torch.int8",
    ),
    (
        {"k": torch.full((2, 5, 2, 8), 16, dtype=byte), "k_format": "fp4_e2m1"},
        ValueError,
        "k: a code of fp4_e2m1 is below 16, got 16",
    ),
    ({"scale": float("nan")}, ValueError, "must be finite in float32"),
    ({"scale": float("inf")}, ValueError, "must be finite in float32"),
    ({"scale": 3e38}, ValueError, "must be finite in float32"),
    ({"k_scale": torch.tensor([1.0, torch.inf])}, ValueError, "K's scale inf give the score factor"),
    ({"k_scale": torch.ones(3)}, ValueError, r"k_scale must be \[kv_heads\] = \(2,\), got \(3,\)"),
    ({"k_scale": torch.ones(2).double()}, TypeError, "k_scale must be a float32 tensor"),
    ({"v_scale": 1.0}, TypeError, "v_scale must be a torch tensor, not float"),
    ({"v_scale": torch.ones(1)}, ValueError, r"v_scale must be \[kv_heads\] = \(2,\), got \(1,\)"),
    ({"visible": torch.ones(2, 5)}, TypeError, r"visible must be bool \(True = attend\), got torch.float32"),
    (
        {"visible": torch.ones(2, 6).bool()},
        ValueError,
        r"visible must be .* \(2, 5\) or \(2, 1, 5\), got \(2, 6\)",
    ),
    ({"sinks": torch.ones(2)}, ValueError, r"sinks must be \[q_heads\] = \(4,\), got \(2,\)"),
    ({"sinks": torch.ones(4).double()}, TypeError, "sinks must be float32"),
    (
        {"out_dtype": torch.float64},
        TypeError,
        "out_dtype must be one of torch.float32, .*, not torch.float64",
    ),
    (
        {"k_scales": torch.ones(2, 5, 2, 1, dtype=bf16)},
        ValueError,
        "only formats of 8 bits or fewer carry scales",
    ),
    ({"scale_block": 16}, ValueError, "scale_block and scale_format need k_scales or v_scales"),
    ({"k_lut": torch.ones(2, 16).half()}, ValueError, "k_lut belongs to lut4; k is bf16"),
    (
        {"k": torch.ones(2, 5, 2, 8, dtype=byte), "k_format": "lut4"},
        ValueError,
        r"k of format lut4 needs k_lut \[kv_heads, 16\]",
    ),
    (
        {"k": torch.ones(2, 5, 2, 8, dtype=byte), "k_format": "lut4", "k_lut": torch.ones(1, 16).half()},
        ValueError,
        r"k_lut must have shape \(2, 16\), got \(1, 16\)",
    ),
    (
        {"v": torch.ones(2, 5, 2, 3, dtype=byte), "v_format": "lut4", "v_lut": torch.ones(2, 16)},
        TypeError,
        "v_lut of format fp16 must be torch.int16 codes or torch.float16 values, got torch.float32",
    ),
    (
        {
            "k": torch.full((2, 5, 2, 8), 16, dtype=byte),
            "k_format": "lut4",
            "k_lut": torch.ones(2, 16).half(),
        },
        ValueError,
        "k: a code of lut4 is below 16, got 16",
    ),
    ({"v": None}, ValueError, "without v, value_dim must say .*, 1 to 8, got None"),
    ({"v": None, "value_dim": 9}, ValueError, "without v, value_dim must say .*, 1 to 8, got 9"),
    ({"v": None, "value_dim": 4, "v_format": "fp16"}, ValueError, "v_format belongs to v"),
    ({"value_dim": 4}, ValueError, "value_dim is 4, v has rows of 3"),
    ({"partial": True, "return_lse": True}, ValueError, "belong to a finished result"),
    *(
        (
            {"softcap": cap},
            ValueError,
            f"softcap must be above 0 and at most 709.78 .*, got {cap}".replace("+", "."),
        )
        for cap in (0, 0.0, -1.0, 1e-46, 709.79, 1e300, float("inf"), float("nan"))
    ),
    ({"softcap": 1e-40}, ValueError, "softcap 1e-40, give the score factor .* must be finite in float32"),
    ({"alibi_slopes": torch.ones(2)}, ValueError, r"alibi_slopes must be \[q_heads\] = \(4,\), got \(2,\)"),
    ({"alibi_slopes": torch.ones(4).double()}, TypeError, "alibi_slopes must be a float32 tensor"),
    ({"alibi_slopes": torch.tensor([1.0, 0.0, 3e38, 0.0])}, ValueError, "got the slope 3"),
    ({"alibi_slopes": torch.tensor([1.0, 0.0, torch.nan, 0.0])}, ValueError, "got the slope nan"),
    (
        {"query_positions": torch.ones(2)},
        TypeError,
        "query_positions must be int64 or int32, got torch.float32",
    ),
    (
        {"query_positions": torch.ones(3).int()},
        ValueError,
        r"query_positions must have shape \(2,\), got \(3,\)",
    ),
    (
        {"query_positions": torch.tensor([0, 1 << 23])},
        ValueError,
        "must be from 0 to 8388607, got 0 to 8388608",
    ),
    ({"query_positions": torch.tensor([0, -1])}, ValueError, "must be from 0 to 8388607, got -1 to 0"),
    ({"row_positions": torch.arange(5)}, ValueError, "row_positions need query_positions"),
    (
        {"query_positions": torch.ones(2).int(), "row_positions": torch.arange(4)},
        ValueError,
        r"row_positions must have shape \(5,\) or \(2, 5\), got \(4,\)",
    ),
    ({"partial": True, "v_scale": torch.ones(2)}, ValueError, "belong to a finished result"),
    ({"q": torch.ones(2, 4, 8, dtype=bf16, device="meta")}, ValueError, "k is on cpu and q on meta"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


SCALED = {
    "k": torch.ones(2, 5, 2, 8, dtype=byte),
    "k_format": "int8",
    "k_scales": torch.ones(2, 5, 2, 1, dtype=bf16),
    "scale_block": 16,
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"scale_block": 8},
            ValueError,
            "scale_block must be 16, 32, 64, 128 or None for the whole row, not 8",
        ),
        (
            {"k_scales": torch.ones(2, 5, 2, 2, dtype=bf16)},
            ValueError,
            r"k_scales must have shape \(2, 5, 2, 1\)",
        ),
        (
            {"scale_format": "fp32"},
            ValueError,
            "scale_format must be one of bf16, fp16, e4m3, e8m0, not 'fp32'",
        ),
        (
            {
                "k_format": "lut4",
                "k_lut": torch.ones(2, 16).half(),
                "k_scales": torch.ones(2, 5, 2, 1).half(),
            },
            ValueError,
            "scales of lut4 must be e4m3, e8m0, not fp16",
        ),
        (
            {
                "k": torch.ones(2, 5, 2, 8, dtype=torch.uint8),
                "k_format": "lut4",
                "k_lut": torch.ones(2, 16).half(),
                "k_scales": torch.ones(2, 5, 2, 1, dtype=bf16),
            },
            ValueError,
            "scales of lut4 must be e4m3, e8m0, not bf16",
        ),
        (
            {"scale_block": (16,)},
            ValueError,
            r"scale_block must be one value or a pair, K's and V's, got \(16,\)",
        ),
        ({"scale_block": (8, 16)}, ValueError, "scale_block must be 16, .*, not 8"),
        (
            {"scale_format": "e8m0"},
            ValueError,
            "k_scales holds torch.bfloat16 values; scale_format says e8m0",
        ),
        (
            {"k_scales": torch.ones(2, 5, 2, 1, dtype=byte)},
            ValueError,
            "scale_format must be one of bf16, fp16, e4m3, e8m0, not None",
        ),
        (
            {"k_scales": torch.ones(2, 5, 2, 1, dtype=byte), "scale_format": "fp16"},
            TypeError,
            "k_scales of format fp16 must be torch.int16 codes or torch.float16 values, got torch.uint8",
        ),
    ],
)
def test_refused_scales(changes, error, message):
    call(**SCALED)
    with pytest.raises(error, match=message):
        call(**SCALED | changes)


def test_k_and_v_have_their_own_scales():
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (2, 5, 2, 40), generator=generator).to(byte)
    k_scales = torch.randint(100, 140, (2, 5, 2, 3), generator=generator).to(byte)
    v_scales = torch.rand(2, 5, 2, 1, generator=generator).to(torch.float16)
    q = torch.randn(2, 4, 40, generator=generator).to(bf16)
    both = {"q": q, "k": codes, "v": codes, "k_format": "int4", "k_scales": k_scales, "v_scales": v_scales}
    found = call(**both, scale_block=(16, None), scale_format=("e8m0", "fp16"))
    spread = v_scales.double() * ((codes.double() + 8) % 16 - 8)  # what V's elements stand for
    plain = call(
        **both | {"v": spread.to(torch.float16), "v_scales": None}, scale_block=16, scale_format="e8m0"
    )
    assert torch.allclose(found, plain, rtol=2e-3, atol=1e-3)


def test_a_codebook_of_an_integer_formats_numbers_is_that_format():
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 16, (2, 5, 2, 8), generator=generator).to(byte)
    scales = torch.randint(100, 140, (2, 5, 2, 1), generator=generator).to(byte)
    table = ((torch.arange(16) + 8) % 16 - 8).half().expand(2, 16)
    both = {"k": codes, "v": codes, "k_scales": scales, "v_scales": scales, "scale_format": "e8m0"}
    expected = call(**both, k_format="int4")
    assert torch.equal(call(**both, k_format="lut4", k_lut=table, v_lut=table), expected)
    bits = table.contiguous().view(torch.int16)
    assert torch.equal(call(**both, k_format="lut4", k_lut=bits, v_lut=bits), expected)


def test_every_head_has_its_own_codebook():
    v = torch.full((1, 1, 2, 1), 3, dtype=byte)
    tables = torch.arange(32).view(2, 16).half()
    result = decode_attention(
        torch.ones(1, 4, 1, dtype=bf16), torch.ones(1, 1, 2, 1, dtype=bf16), v, scale=1.0, v_format="lut4",
        v_lut=tables,
    )  # fmt: skip
    assert result.flatten().tolist() == [3, 3, 19, 19]


@pytest.mark.parametrize("form", ["bf16", "fp8_e4m3"])
def test_latent_rows_are_k_rows_cut_short(form):
    """head_dim 576 and value_dim 512, with a scale per head that only scores have unless V is given it."""
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(1, 16, 576, generator=generator).to(bf16)
    if form == "bf16":
        k, options = torch.randn(1, 30, 1, 576, generator=generator).to(bf16), {}
    else:
        k = torch.randint(0, 0x50, (1, 30, 1, 576), generator=generator).to(byte)
        scales = torch.randint(120, 130, (1, 30, 1, 18), generator=generator).to(byte)
        options = {"k_format": form, "k_scales": scales, "scale_block": 32, "scale_format": "e8m0"}
    options |= {"scale": 0.04, "k_scale": torch.tensor([0.5])}
    latent = decode_attention(q, k, None, value_dim=512, **options)
    if form != "bf16":
        options["v_scales"] = options["k_scales"][..., :16]
    assert torch.equal(latent, decode_attention(q, k, k[..., :512], **options))
    assert latent.shape == (1, 16, 512)


def test_more_rows_than_a_context_holds_are_refused():
    k = torch.ones(1, 1, 1, 1, dtype=bf16).expand(1, MAX_ROWS + 1, 1, 1)
    with pytest.raises(ValueError, match=f"a context holds at most {MAX_ROWS} rows, got {MAX_ROWS + 1}"):
        decode_attention(torch.ones(1, 1, 1, dtype=bf16), k, k, scale=1.0)


def test_values_and_their_codes_are_the_same():
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 6, 2, 8, generator=generator) for _ in range(3))
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        values = [x.to(dtype) for x in (q, k, v)]
        codes = [x.view(torch.int16) for x in values]
        expected = decode_attention(*values, scale=0.3)
        assert torch.equal(decode_attention(values[0], *codes[1:], scale=0.3, k_format=name), expected)
        assert torch.equal(decode_attention(values[0], *values[1:], scale=0.3, k_format=name), expected)


def test_v_takes_its_own_format():
    v = torch.ones(2, 5, 2, 3, dtype=torch.float16)
    k = torch.ones(2, 5, 2, 8, dtype=byte)
    assert bool((call(k=k, k_format="int8", v=v) == 1).all())
    codes = torch.full((2, 5, 2, 3), 7, dtype=byte)
    assert bool((call(v=codes, v_format="int4") == 7).all())


def test_shapes_and_types_of_results():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert call(out_dtype=dtype).dtype == dtype
    assert call().shape == (2, 4, 3)
    out, lse = call(q=torch.ones(2, 7, 4, 8, dtype=bf16), return_lse=True)
    assert out.shape == (2, 7, 4, 3)
    assert lse.shape == (2, 7, 4)
    partial = call(partial=True)
    assert partial.numerators.top.shape == (2, 4, 3)
    assert {x.dtype for x in vars(partial.numerators).values()} == {torch.int64}
    assert call(q=torch.ones(0, 4, 8, dtype=bf16), k=torch.ones(0, 5, 2, 8, dtype=bf16),
                v=torch.ones(0, 5, 2, 3, dtype=bf16)).shape == (0, 4, 3)  # fmt: skip
    assert call(q=torch.ones(2, 0, 4, 8, dtype=bf16)).shape == (2, 0, 4, 3)


def test_gradients_are_neither_needed_nor_made():
    q = torch.ones(2, 4, 8, dtype=bf16, requires_grad=True)
    assert not call(q=q).requires_grad


def test_one_mask_serves_all_query_rows():
    q = torch.randn(2, 3, 4, 8).to(bf16)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]]).bool()
    same = mask[:, None, :].expand(2, 3, 5)
    k, v = torch.randn(2, 5, 2, 8).to(bf16), torch.randn(2, 5, 2, 3).to(bf16)
    assert torch.equal(call(q=q, k=k, v=v, visible=mask), call(q=q, k=k, v=v, visible=same))


def test_score_factor_is_multiplied_in_double():
    assert score_factor(1.0) == 0x3FB8AA3B
    assert score_factor(0.125) == 0x3E38AA3B
    assert score_factor(-0.0) == 0x80000000
    assert score_factor(1e-45) == 1
    # In float32, 1/3 * log2(e) and 0.1 would each be rounded on the way.
    exact = np.float32(1 / 3 * 1.4426950408889634 * float(np.float32(0.1)))
    assert score_factor(1 / 3, float(np.float32(0.1))) == int(exact.view(np.uint32))


# --- Partials


def planes():
    """A partial of one query and two lanes, as int32 and int64 arrays."""
    denominator = (np.array([0], np.int32), np.array([4], np.int64), np.array([0], np.int64))
    numerators = (
        np.array([[0, TOP_NONE]], np.int32),
        np.array([[2, 0]], np.int64),
        np.array([[0, 0]], np.int64),
    )
    return denominator, numerators


def test_partial_from_planes_of_a_device():
    partial = Partial.from_planes(*planes())
    assert finish(partial).tolist() == [[0.5, 0.0]]
    assert log_sum_exp(partial).tolist() == [np.float32(np.log(4)).item()]
    flagged = Partial.from_planes(*planes(), lane_flags=np.array([[0, LANE_NAN]], np.uint8))
    assert finish(flagged)[0, 0] == 0.5
    assert finish(flagged)[0, 1].isnan()
    assert finish(Partial.from_planes(*planes(), query_nan=[True])).isnan().all()


def test_partials_are_compared_where_they_have_a_meaning():
    partial = Partial.from_planes(*planes())
    other_planes = planes()
    other_planes[1][1][0, 0] = 3
    other = Partial.from_planes(*other_planes)
    assert partial.equal(Partial.from_planes(*planes()))
    assert not partial.equal(other)
    assert partial.differing(other).tolist() == [True]
    nan = Partial.from_planes(*planes(), query_nan=[1])
    assert nan.equal(Partial.from_planes(*other_planes, query_nan=[1]))
    assert not nan.equal(partial)


def test_partial_refuses_what_does_not_fit():
    denominator, numerators = planes()
    with pytest.raises(
        ValueError, match=r"the planes of a state must have one shape, got \(1,\), \(2,\), \(1,\)"
    ):
        State.from_planes([0], [0, 1], [0])
    with pytest.raises(ValueError, match="lane flags have the bits 0b111, got 0b1000"):
        Partial.from_planes(denominator, numerators, lane_flags=[[8, 0]])
    with pytest.raises(ValueError, match="cannot have lane flags of shape"):
        Partial.from_planes(denominator, numerators, lane_flags=[0, 0])
    with pytest.raises(ValueError, match="the denominator of a partial has shape"):
        Partial.from_planes(numerators, numerators, query_nan=[0])
    with pytest.raises(ValueError, match="not of the same queries and lanes"):
        merge(Partial.empty((1,), 2), Partial.empty((1,), 3))
    with pytest.raises(ValueError, match=r"partials lie on cpu and meta; move one with .to\(device\)"):
        merge(Partial.empty((1,), 2), Partial.empty((1,), 2, "meta"))
    with pytest.raises(ValueError, match="v_scale has 2 KV heads, which do not divide 1 query heads"):
        finish(Partial.from_planes(denominator, numerators), v_scale=torch.ones(2))
    with pytest.raises(TypeError, match="v_scale must be float32"):
        finish(Partial.from_planes(denominator, numerators), v_scale=torch.ones(1).double())
    with pytest.raises(TypeError, match="out_dtype must be one of"):
        finish(Partial.from_planes(denominator, numerators), torch.int32)


def test_flushing_of_subnormals_by_the_float_unit_changes_nothing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        tiny = torch.tensor([[[[1, 0x8003]]]]).to(torch.int16)  # the smallest bf16 there are
        result = decode_attention(
            torch.ones(1, 1, 2, dtype=bf16), tiny, tiny, scale=1e-42, v_scale=torch.ones(1), out_dtype=bf16
        )
    finally:
        torch.set_flush_denormal(False)
    assert (result.view(torch.int16).to(torch.int64) & 0xFFFF).flatten().tolist() == [1, 0x8003]
