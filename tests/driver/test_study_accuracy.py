"""The contract's measured errors: the page is what the command writes, and it measures what it says."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from nearkv.cli import app
from nearkv.errors import ArgumentError
from nearkv.study import accuracy as study
from nearkv.study import blocks
from typer.testing import CliRunner

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def errors():
    begun = []
    found = study.measure(begun.append)
    assert begun == list(study.VARIANTS)
    return found


def test_the_page_is_what_the_command_writes(errors):
    text = (DOCS / study.PAGE).read_text()
    assert (
        blocks.filled(text, {"errors": study.block(errors)}, study.COMMAND, where=DOCS / study.PAGE) == text
    )


def test_every_variant_keeps_to_the_contracts_error(errors):
    assert all(0 < error < 6e-6 for found in errors.values() for error in found)
    assert study.added(errors) < study.MAY_ADD
    by_hand = {"plain": [1e-6, 3e-6], "softcap 5": [4e-6, 2e-6], "ALiBi": [1e-6, 5e-6]}
    rest = {name: [0.0, 0.0] for name in study.ADDING}
    assert study.added({**rest, **by_hand}) == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("variant", "spread", "changes"),
    [
        ("softcap 5", 3.0, {"softcap": None}),
        ("softcap 100", 20.0, {"softcap": 101.0}),
        ("ALiBi", 3.0, {"slopes": None}),
        ("tree of 8 query rows", 0.3, {"options": {"causal": True}}),
        ("window 1,024 with 4 kept rows, 4 query rows", 0.3, {"options": {"window": 1023, "kept_rows": 4}}),
        ("64 of 256 pages", 0.3, {"options": {}}),
    ],
)
def test_another_answer_would_show(variant, spread, changes):
    """What the reference is not told of is an error that no rounding makes."""
    case = study.VARIANTS[variant](spread)
    wrong = dataclasses.replace(case, **changes).found()
    exact = case.exact()
    assert float((wrong - exact).abs().max() / exact.abs().max()) > 1e-4


def test_the_exact_answer_by_hand():
    """Two rows of scores 0 and 1, values 0 and 1."""
    q = torch.ones(1, 1, 1, 1).to(torch.bfloat16)
    k, v = torch.tensor([0.0, 1.0]).double().view(2, 1, 1), torch.tensor([0.0, 1.0]).double().view(2, 1, 1)
    plain = study.Case(q, {}, k, v, 1.0)
    assert plain.exact().item() == pytest.approx(1 / (1 + math.exp(-1)))
    capped = study.Case(q, {}, k, v, 1.0, softcap=0.5)
    assert capped.exact().item() == pytest.approx(1 / (1 + math.exp(-0.5 * math.tanh(2))))
    biased = study.Case(q, {}, k, v, 1.0, slopes=torch.tensor([0.25]))
    assert biased.exact().item() == pytest.approx(1 / (1 + math.exp(-1.25)))
    hidden = study.Case(q, {}, k, v, 1.0, visible=torch.tensor([[[True, False]]]))
    assert hidden.exact().item() == 0


def test_numbers_are_normal_and_the_same_everywhere():
    found = study.normal(1000, 20, seed=1)
    assert abs(float(found.mean())) < 0.02
    assert float(found.std()) == pytest.approx(1, rel=0.02)
    assert float(found[0, 0] * 2**21) % 1 == 0


def test_the_command(errors, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "measure", lambda begin: errors)
    shutil.copy(DOCS / study.PAGE, tmp_path)
    done = CliRunner().invoke(app, ["study", "accuracy", "--write", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / study.PAGE).read_text() == (DOCS / study.PAGE).read_text()
    assert study.block(errors) in done.output
    shown = json.loads(CliRunner().invoke(app, ["study", "accuracy", "--json"]).stdout)
    assert shown["errors"] == errors
    assert shown["added"] == study.added(errors)
    missing = CliRunner().invoke(app, ["study", "accuracy", "--write", str(tmp_path / "nowhere")])
    assert isinstance(missing.exception, ArgumentError)
