"""What quantising costs a real model: the page and its figure are what the command measures."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from nearkv import hf
from nearkv.cli import app
from nearkv.errors import ArgumentError
from nearkv.hf.record import LayerRows, record
from nearkv.quantise import PRESETS, attention_arguments, quantise
from nearkv.reference import decode_attention
from nearkv.study import blocks
from nearkv.study import quantisation as study
from typer.testing import CliRunner

DOCS = Path(__file__).parents[2] / "docs"


def block_of(text):
    """The page's block, as it was written."""
    return re.search(r"<!-- errors: .* -->\n\n(.*)\n\n<!-- end of errors -->", text, re.DOTALL)[1]


def cells_of(block):
    """{preset: cells}, without the units."""
    rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): [float(cell.removesuffix(" %")) for cell in row[1:]] for row in rows}


@pytest.fixture(scope="module")
def small():
    """Two layers of random rows."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((80, 4, 64), (80, 2, 64), (80, 2, 64))
    return [LayerRows(*(torch.randn(s, generator=generator) for s in shapes), 0.125) for _ in range(2)]


def test_the_figure_shows_what_the_page_says():
    image = pytest.importorskip("PIL.Image")
    block = block_of((DOCS / study.PAGE).read_text())
    with image.open(DOCS / study.FIGURE) as found:
        assert found.text["Description"] == blocks.digest(block)
    cells = cells_of(block)
    assert list(cells) == list(PRESETS)
    for name, preset in PRESETS.items():
        assert cells[name][:2] == [preset.k.bits_per_element(64), preset.row_bytes(64, 64)]


def test_the_reference_answers_as_measured(small):
    """A preset's output over its codes is the output that the study takes for it."""
    layer, form = small[0], PRESETS["mxfp8"]
    k, v = quantise(layer.k, form.k), quantise(layer.v, form.v)
    wanted = study.output(study.weights(layer, k.values()), v.values())
    rows = torch.arange(32, 80, 8)
    arguments = attention_arguments(*(quantise(x.unsqueeze(0), form.k) for x in (layer.k, layer.v)))
    visible = torch.arange(80) <= rows.unsqueeze(1)
    found = decode_attention(
        layer.q[rows].to(torch.float16).unsqueeze(0),
        scale=layer.scale,
        visible=visible.unsqueeze(0),
        **arguments,
    )
    assert float((found[0].double() - wanted).abs().max() / wanted.abs().max()) < 5e-6


def test_errors_by_hand(small):
    begun = []
    found = {one.preset: one for one in study.measure(small, begun.append)}
    assert begun == list(PRESETS)
    layer, int8 = small[1], found["int8"]
    exact = study.output(study.weights(layer, layer.k.double()), layer.v.double())
    v = quantise(layer.v, PRESETS["int8"].v).values()
    by_v = study.output(study.weights(layer, layer.k.double()), v)
    relative = (by_v - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert torch.allclose(int8.errors["V"][1].relative, relative)
    cosine = torch.nn.functional.cosine_similarity(by_v, exact, dim=-1)
    assert torch.allclose(int8.errors["V"][1].cosine, cosine)
    means = {name: float(one.relative().mean()) for name, one in found.items()}
    assert means["fp16"] < means["bf16"] < means["q8_0"] < means["fp8"] < means["nvfp4"] < means["mxfp4"]
    assert all(float(one.relative("V").mean()) < means[name] for name, one in found.items())


def test_the_command(small, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(hf, "load", lambda folder: None)
    monkeypatch.setattr("nearkv.hf.record.record", lambda loaded, text: small)
    (tmp_path / "figures").mkdir()
    shutil.copy(DOCS / study.PAGE, tmp_path)
    done = CliRunner().invoke(app, ["study", "quantisation", "--write", str(tmp_path)])
    assert done.exit_code == 0, done.output
    block = block_of((tmp_path / study.PAGE).read_text())
    assert block in done.output
    assert block.startswith(
        "Outputs of 2 layers, 4 query heads and 6 query rows, over up to 80 rows of 2 KV heads:"
    )
    assert (tmp_path / study.FIGURE).is_file()
    missing = CliRunner().invoke(app, ["study", "quantisation", "--write", str(tmp_path / "figures")])
    assert isinstance(missing.exception, ArgumentError)


@pytest.mark.slow
def test_the_page_is_what_the_command_measures():
    """Cell by cell: float32 arithmetic of other processors may move the last digit."""
    loaded = hf.load()
    layers = record(loaded, study.TEXT)
    assert loaded.model.config._attn_implementation != "nearkv_record"
    assert len(layers) == 30
    measured = study.table(study.measure(layers, lambda preset: None), layers).markdown()
    page = block_of((DOCS / study.PAGE).read_text())
    assert page.splitlines()[:4] == measured.splitlines()[:4]
    for shown, found in zip(cells_of(page).values(), cells_of(measured).values(), strict=True):
        assert shown[:3] == pytest.approx(found[:3], rel=0.05)
        assert [1 - x for x in shown[3:5]] == pytest.approx([1 - x for x in found[3:5]], rel=0.15)
        assert shown[5:] == pytest.approx(found[5:], rel=0.06)
