"""What a token costs beside the device: the figures are there, add up, and leave the model as it was."""

import pytest
from nearkv.cli import app
from typer.testing import CliRunner

pytest.importorskip("transformers")

from nearkv import hf
from nearkv.bench.hf import measure
from tiny_models import make_model


def test_figures():
    model = make_model("llama")
    loaded = hf.LoadedModel("tiny", model, None, hf.row_shape(model.config))
    found = {one["name"]: one["value"] for one in measure(loaded, rows=8, steps=3)}
    names = ("plain_ms", "step_ms", "device_ms", "driver_ms", "integration_ms", "integration", "beside")
    assert list(found) == [f"hf.{name}" for name in names]
    plain, step, device, driver, integration, ratio, beside = found.values()
    assert min(found.values()) > 0
    assert device + driver + integration < step
    assert ratio == pytest.approx(integration / plain)
    assert beside == pytest.approx((integration + driver) / plain)
    assert model.config._attn_implementation == "eager"


def test_the_command(monkeypatch):
    model = make_model("gemma2")
    loaded = hf.LoadedModel("tiny", model, None, hf.row_shape(model.config))
    monkeypatch.setattr(hf, "load", lambda folder: loaded)
    done = CliRunner().invoke(app, ["bench", "hf", "--rows", "4", "--steps", "2"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "hf.integration" in done.output


def test_no_steps():
    with pytest.raises(ValueError, match="at least 1, not 4 and 0"):
        next(measure(None, rows=4, steps=0))


@pytest.mark.slow
def test_integration_is_a_small_part_of_a_step():
    found = {one["name"]: one["value"] for one in measure(hf.load())}
    assert found["hf.integration"] < 0.2
