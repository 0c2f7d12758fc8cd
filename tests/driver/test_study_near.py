"""Where is near: winners and borders worked by hand, and the page held to the command."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from nearkv.cli import app
from nearkv.errors import ArgumentError, NearkvError
from nearkv.estimate import estimate, model, of
from nearkv.estimate.systems import at_placement, with_spill
from nearkv.study import answers, blocks, maps, near, page
from nearkv.study.near import ELEMENTS, EQUAL, LINE
from nearkv_hw.abi.config import Placement
from typer.testing import CliRunner

DOCS = Path(__file__).parents[2] / "docs"
RANK, CONTROLLER, HOST = Placement.RANK, Placement.CONTROLLER, Placement.HOST


@pytest.fixture(scope="module")
def study():
    begun = []
    found = answers.ask(begun.append)
    assert len(begun) == answers.STEPS
    return found


# worked by hand


def test_the_setup_by_hand():
    # 141 GB of weights and 90 % of 80 GB: two GPUs; 811 GB: twelve, so sixteen
    assert [near.setup_of(model(f"llama-3.1-{size}"), context=1).gpus for size in ("70b", "405b")] == [2, 16]
    setup = near.reference()
    assert (setup.devices, setup.config.channels, setup.config.queries) == (2, 4, 8)
    assert near.with_group(8).attention == model(near.BASE).attention
    groups = [model(name).attention[0].group for name in near.MODELS]
    assert groups == [1, 2, 4, 7, 8, 8, 16, 16]


def test_steps_by_hand():
    # 42.9 GB a token at two ports of 63 GB/s; at two cards of 204.8 GB/s, of which about nine tenths come
    steps = near.times(near.reference())
    assert steps[HOST] == pytest.approx(40 * 2**30 / 126e9)
    units = {placement: steps[placement] - 25.7e-3 for placement in (CONTROLLER, RANK)}
    assert units[CONTROLLER] == pytest.approx(40 * 2**30 / (2 * 204.8e9 * 0.91), rel=0.01)
    assert units[RANK] == pytest.approx(units[CONTROLLER] / 2, rel=0.01)


def test_a_border_by_hand():
    # 327,680 bytes of bf16 a token: fetched, or read by units after 25.7 ms of GPUs and round trips
    slope = 327680 / 126e9 - 327680 / (2 * 204.8e9 * 0.91)
    found = near.context_from(near.reference(), near.beats(CONTROLLER, near.host))
    assert found == pytest.approx(25.7e-3 / slope, rel=0.01)


@pytest.mark.parametrize("placement", [CONTROLLER, RANK])
@pytest.mark.parametrize("other", [near.host, with_spill])
def test_a_border_is_the_only_one(placement, other):
    setup = near.reference()
    quicker = near.beats(placement, other)
    border = near.context_from(setup, quicker)
    assert quicker(replace(setup, context=border))
    assert not quicker(replace(setup, context=border - 1))
    for context in near.CONTEXTS:
        assert quicker(replace(setup, context=context)) == (context >= border)


@pytest.mark.parametrize("placement", [CONTROLLER, RANK])
def test_a_batch_is_the_only_one(placement):
    setup = near.reference("mxfp4", context=4096)
    quicker = near.beats(placement, near.host)
    border = near.batch_from(setup, quicker)
    for batch in (*range(1, 33), 64, 256, 1024):
        assert quicker(replace(setup, batch=batch)) == (batch >= border)


def test_bisection():
    asked = []
    assert near.first(lambda n: asked.append(n) or n >= 777, 1, 1 << 20) == 777
    assert len(asked) <= 21
    assert near.first(lambda n: True, 5, 9) == 5
    assert near.first(lambda n: False, 5, 9) is None
    assert near.edge(lambda x: x >= 0.25, 1e-3, 1e3) == pytest.approx(0.25, rel=1e-6)
    assert near.edge(lambda x: True, 1e-3, 1e3) == 1e-3
    assert near.edge(lambda x: False, 1e-3, 1e3) is None


def test_units():
    setup = near.reference()
    assert {p: EQUAL.place(setup, p).config.queries for p in Placement} == {
        p: 4 if p is RANK else 8 for p in Placement
    }
    four = replace(setup, config=replace(setup.config, placement=RANK, ranks=4))
    assert EQUAL.place(four, RANK).config.queries == 2
    rates = [ELEMENTS.place(near.reference(form), CONTROLLER).unit_rate for form in near.FORMATS]
    assert rates == [1, 0.5, 0.25]
    assert LINE.place(setup, CONTROLLER) == setup.at(CONTROLLER)


@pytest.mark.parametrize("group", near.GROUPS)
def test_equal_multipliers_trade_ranks_for_passes(group):
    setup = near.reference(group=group)
    rank, channel = (near.attention(EQUAL.place(setup, p)).seconds for p in (RANK, CONTROLLER))
    passes = -(-group // 4) / -(-group // 8)
    assert rank / channel == pytest.approx(passes / 2, rel=0.01)


def test_energy_of_equal_modules():
    setup = near.reference()
    for placement in Placement:
        placed = setup.at(placement)
        answer = at_placement(placed)
        more = near.energy(placed, answer).mid - answer.energy_per_token.mid
        # 0.64 W for each of two sub-channels of four channels of two cards
        assert more == pytest.approx(0 if placement is RANK else 0.64 * 16 * answer.step_s)


def test_ties_and_names():
    seconds = dict.fromkeys(Placement, 1.0)
    assert maps.label(near.winners(seconds)) == "any"
    assert maps.label(near.winners(seconds | {RANK: 0.98})) == "rank"
    assert maps.label(near.winners(seconds | {RANK: 0.995})) == "any"
    assert maps.label(near.winners(seconds | {RANK: 2.0})) == "channel = host"
    assert maps.label([Placement.FABRIC, HOST]) == "fabric = host"
    assert near.gain(seconds | {HOST: 3.0}) == 3
    cell = maps.Cell(label="host", gain=0.5, spread=0)
    assert cell.text == "host 2.0"


# what the page says in words


def test_answers_follow(study):
    def labels(units):
        return {
            at.label for (name, _), cells in study.maps.items() if name == units.name for at in cells.values()
        }

    assert labels(LINE) == {"host", "rank"}
    assert labels(EQUAL) == {"host", "rank", "rank = channel"}
    rows = study.tables["contexts"].rows
    assert all(row["elements"] is None for row in rows if row["format"] == "mxfp4")
    assert all(row["rank"] < row["controller"] for row in rows)
    assert all(row["channel"] == 0 for row in study.tables["changes"].rows)
    text = " ".join(study.answers())
    assert "of the map's 288 places where units win, `rank` wins 288 alone" in text
    assert "quicker than `host` at no context for 8 of 8 models" in text


def test_while_the_rows_fit_the_gpu_is_quicker(study):
    for row in study.tables["contexts"].rows:
        setup = near.setup_of(
            model(row["model"].strip("`")), context=row["room"] - 1, kv_format=row["format"]
        )
        found = estimate(setup)
        assert of(found, "gpu").fits
        assert not of(estimate(replace(setup, context=row["room"])), "gpu").fits
        assert min(near.times(setup).values()) >= of(found, "gpu").step_s


def test_a_short_context_is_fetched_for_nothing():
    setup = replace(near.reference(), context=4096)
    found = estimate(setup)
    assert of(found, "gpu+host").step_s == of(found, "gpu").step_s


def test_a_row_takes_the_same_energy_everywhere(study):
    rows = study.tables["energies"].rows
    assert all(row["dram"] == pytest.approx(rows[0]["dram"], rel=0.001) for row in rows)
    crossing = {row["placement"] for row in rows if row["on_chip"] > 0.01}
    assert crossing == {"`fabric`", "`host`"}


def test_round_trips_of_windows_move_the_border():
    gemma = near.setup_of(model("gemma-3-27b"), context=1)
    borders = [
        near.context_from(replace(gemma, launch_s=launch), near.beats(RANK, near.host))
        for launch in (0, 5e-6)
    ]
    assert borders[0] < borders[1]


# the page and the command


def test_the_page_is_what_the_command_writes(study):
    text = (DOCS / page.PAGE).read_text()
    assert blocks.filled(text, study.blocks(), page.COMMAND, where=DOCS / page.PAGE) == text


@pytest.mark.parametrize("figure", [page.MAP, page.STEP])
def test_figures_show_what_the_page_says(study, figure):
    image = pytest.importorskip("PIL.Image")
    shown = page.map_data(study) if figure == page.MAP else page.steps_data()
    with image.open(DOCS / figure) as found:
        assert found.text["Description"] == blocks.digest(shown)


def test_the_command(study, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(answers, "ask", lambda begin: study)
    (tmp_path / "figures").mkdir()
    shutil.copy(DOCS / page.PAGE, tmp_path)
    done = CliRunner().invoke(app, ["study", "where-is-near", "--write", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / page.PAGE).read_text() == (DOCS / page.PAGE).read_text()
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        Path(page.MAP).name, Path(page.STEP).name,
    }  # fmt: skip
    assert all(block in done.output for block in study.blocks().values())

    shown = json.loads(CliRunner().invoke(app, ["study", "where-is-near", "--json"]).stdout)
    assert shown == json.loads(json.dumps(study.to_dict()))
    assert len(shown["maps"]) == 3 * 3 * 16 * 9


def test_refusals(study, tmp_path):
    def write(folder):
        return CliRunner().invoke(app, ["study", "where-is-near", "--write", str(folder)]).exception

    assert isinstance(write(tmp_path), ArgumentError)
    assert "takes the folder of the documentation" in str(write(tmp_path))
    (tmp_path / page.PAGE).write_text("nothing")
    assert "no folder" in str(write(tmp_path))
    with pytest.raises(NearkvError, match="lacks the line <!-- answers"):
        blocks.filled("nothing", study.blocks(), page.COMMAND, where=tmp_path / page.PAGE)


def test_maps_are_the_same_again(study):
    for units in near.UNITS:
        assert maps.grid("mxfp4", units) == study.maps[units.name, "mxfp4"]
