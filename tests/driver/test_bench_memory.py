"""What `nearkv bench memory` plans, and the tables that it makes of its results."""

import json

import pytest
from nearkv.bench import memory
from nearkv.bench.report import markdown, read_results, write_into
from nearkv.cli import app
from nearkv.errors import ArgumentError, NearkvError
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.dram import PARTS, Dram
from typer.testing import CliRunner


def test_every_device_of_the_plan_can_be_configured():
    options = memory.Options(placements=tuple(Placement))
    steps = memory.plan(options)
    configs = [configure("small", **step.overrides) for step in steps]
    assert {config.dram for config in configs} == set(PARTS)
    assert {config.placement for config in configs} == set(Placement)
    batches = [c for c, s in zip(configs, steps, strict=True) if memory.batch in s.measurements]
    jobs = [c for c, s in zip(configs, steps, strict=True) if memory.single_jobs in s.measurements]
    assert all(config.queries == 8 for config in batches)
    assert all(config.queries == 4 and config.channels == 2 for config in jobs)
    assert len(batches) == len(jobs) == len(PARTS) * (len(Placement) - 1)


def test_cases_and_parts_choose():
    options = memory.Options(parts=(Dram.HBM3_6400,), cases=("attacc",))
    (step,) = memory.plan(options)
    assert step.measurements == [memory.attacc]
    assert not memory.plan(memory.Options(parts=(Dram.DDR5_6400,), cases=("attacc",)))
    assert not memory.plan(memory.Options(cases=("traffic",)))


def result(name, value, **config):
    return {"name": f"memory.{name}", "value": value, "unit": "", "config": config}


RESULTS = [
    result("batch.fraction_of_peak", 0.91, part="ddr5_6400", placement="controller"),
    result("batch.fraction_of_ceiling", 0.9923, part="ddr5_6400", placement="controller"),
    result("heads.fraction_of_ceiling", 0.97, part="ddr5_6400", placement="controller", kv_heads=1),
    result("heads.fraction_of_ceiling", 0.98, part="ddr5_6400", placement="controller", kv_heads=130),
    result("first_read_cycles", 31, part="ddr5_6400", placement="controller"),
    result("completion_cycles", 107, part="ddr5_6400", placement="controller", queries_in_job=1),
    result("completion_cycles", 300, part="ddr5_6400", placement="controller", queries_in_job=4),
    result("controller.streaming.fraction_of_peak", 0.9, part="hbm3_6400"),
    result("controller.streaming.fraction_of_limit", 0.99, part="hbm3_6400"),
    result("controller.unloaded.latency_ns", 42.5, part="hbm3_6400", part_ns=31.25),
    *(
        result(
            f"shares.{client}",
            rate,
            part="ddr5_6400",
            placement="controller",
            fabric_share=2,
            host_alone=0.5,
            guaranteed=guaranteed,
        )
        for client, rate, guaranteed in (("host", 0.13, 0.115), ("attention", 0.79, 0.8))
    ),
    result("attacc188.fraction_of_peak", 0.88, heads=188, published_fraction_of_peak=0.877),
    result("placement.cycles", 5000, placement="controller"),
    result("placement.link_bytes", 6400, placement="controller"),
    result("placement.cycles", 20000, placement="host"),
    result("placement.link_bytes", 1_000_000, placement="host"),
]


@pytest.mark.parametrize(
    "line",
    [
        "| `ddr5_6400` | `controller` | 91.0% (99.2%) |  |  |  |",
        "| part | placement | 1 head | 130 heads |",
        "| `ddr5_6400` | `controller` | 97.0% | 98.0% |",
        "| `ddr5_6400` | `controller` | 31 | 107 | 300 |",
        "| `hbm3_6400` | one line after the other | 90.0% | 90.9% | 99.0% |",
        "| `hbm3_6400` | one read of a closed bank | 42.5 ns | 31.2 ns |  |",
        "| `ddr5_6400` | `controller` | 2/16 | 50.0% | 13.0% | 11.5% | 79.0% | 80.0% |",
        "| 188 | 88.0% | 87.7% |",
        "| `controller` | 5,000 | 1.00 | 6,400 |",
        "| `host` | 20,000 | 4.00 | 1,000,000 |",
    ],
)
def test_tables(line):
    assert line in markdown(RESULTS).splitlines()


def test_a_page_keeps_what_is_around_its_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- figures: nearkv bench memory --write docs/memory.md -->\nold\n"
        "<!-- end of figures -->\nafter\n"
    )
    write_into(page, RESULTS)
    once = page.read_text()
    write_into(page, RESULTS)
    assert page.read_text() == once
    assert once.startswith("before\n")
    assert once.endswith("<!-- end of figures -->\nafter\n")
    assert "old" not in once
    assert markdown(RESULTS) in once
    page.write_text("nothing")
    with pytest.raises(NearkvError, match="lacks the line"):
        write_into(page, RESULTS)


def test_pages_can_be_measured_in_pieces(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: nearkv bench memory --write docs/memory.md -->\n<!-- end of figures -->\n")
    pieces = []
    for n, some in enumerate((RESULTS[:5], RESULTS[5:])):
        pieces.append(tmp_path / f"{n}.json")
        pieces[-1].write_text(json.dumps({"results": some}))
    done = CliRunner().invoke(app, ["bench", "tables", *map(str, pieces), "--write", str(page), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)["results"] == RESULTS
    assert markdown(RESULTS) in page.read_text()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"results": [1]}', '{"results": [{"name": "sim.open_s"}]}', '{"other": []}']
)
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match="must be what nearkv bench memory --json printed"):
        read_results(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "everything"], "no case 'everything'"),
        (["--part", "ddr6"], "--part 'ddr6': there are fixed, ddr5_6400"),
        (["--placement", "moon"], "--placement 'moon'"),
    ],
)
def test_what_is_not_there_is_named(arguments, message):
    done = CliRunner().invoke(app, ["bench", "memory", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_help_names_every_case():
    shown = CliRunner().invoke(app, ["bench", "memory", "--help"], env={"COLUMNS": "200"}).output
    assert all(case in shown for case in (*memory.CASES, "traffic"))
