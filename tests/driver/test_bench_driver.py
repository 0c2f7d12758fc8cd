"""`nearkv bench driver`: its names and units, and bounds that a broken driver would pass."""

import json

from nearkv.cli import app
from typer.testing import CliRunner

UNITS = {
    "driver.appends_per_s": "rows/s",
    "driver.async_appends_per_s": "rows/s",
    "driver.append_overhead_us": "us",
    "driver.attend_overhead_us": "us",
    "driver.async_attend_overhead_us": "us",
    "driver.prefix_hit_us": "us",
    "driver.prefix_miss_us": "us",
    "driver.fork_us": "us",
    "driver.pages_per_s": "pages/s",
    "driver.host_bytes_per_row": "bytes/row",
    "driver.host_bytes_per_million_rows": "bytes",
    "driver.fragmentation": "ratio",
}


def test_every_name_with_its_unit():
    done = CliRunner().invoke(app, ["bench", "driver", "--device", "model", "--repeats", "3", "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert {r["name"]: r["unit"] for r in results} == UNITS
    values = {r["name"]: r["value"] for r in results}
    assert all(value >= 0 for value in values.values())
    assert values["driver.host_bytes_per_row"] < 2, "a row of 512 bytes is not kept on the host"
    assert values["driver.host_bytes_per_million_rows"] == values["driver.host_bytes_per_row"] * 1e6
    assert values["driver.fragmentation"] < 0.1
