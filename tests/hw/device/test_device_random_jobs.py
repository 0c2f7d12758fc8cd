"""Random jobs of any shape, paging, range, sinks and output form, a batch at a time, against the reference.

The two jobs of every fourth batch are one that was split: their partials merge to the whole, in every bit.
The generator is that of `tests/sim/model/test_model_kernels.py`, which checks the model's kernels on 5,000.
"""

import numpy as np
import pytest
from contract_cases import seed_of_run
from kernel_cases import batch, check_against_reference, new_memory
from nearkv_hw.abi import LINE_BYTES, Opcode
from nearkv_hw.abi.descriptor import ATTEND, DESCRIPTOR_VERSION, FLAG_SINKS
from nearkv_hw.abi.memory import ENTRY, LAYOUT_VERSION, TABLE, TABLE_MAGIC, table_entry_lines
from nearkv_sim.model.walker import list_lines
from raw_device import Aperture, Space, ok

CASES = 60
JOBS = 2
ROWS = 100


@pytest.fixture(scope="module")
def memory():
    return new_memory()


@pytest.mark.parametrize("part", range(4))
def test_random_jobs(open_port, rng, memory, part):
    seed = seed_of_run()
    aperture = Aperture(open_port())
    ok([aperture.claim()])
    for index in range(part, CASES, 4):
        given = batch(memory, f"{seed}/{index}", JOBS, most_rows=ROWS, split=index // 4 % 4 == 0)
        space = Space(rng, rng.sample(range(aperture.config.extents), 8))
        fields, results = place(aperture, space, given)
        ok(aperture.run([ATTEND.pack(one) for one in fields]))
        shape = given.work[0][0].shape
        size = shape.group * shape.result.lines * LINE_BYTES
        lines = [np.frombuffer(aperture.read(at, size), np.uint8).reshape(-1, LINE_BYTES) for at in results]
        check_against_reference(lines, given)


def place(aperture, space, given):
    """Put what a batch reads into the tenant's memory, pages in any order; descriptors' fields, results."""
    image, shape = given.memory.lines, given.work[0][0].shape

    def copy(line, lines):
        address = space.take(lines * LINE_BYTES)
        aperture.write(address, image[line : line + lines].tobytes())
        return address

    pages = {job.first_page + n: line for job, lines in given.work for n, line in enumerate(lines.tolist())}
    log2, entries = given.work[0][0].page_rows_log2, max(pages, default=0) + 1
    words = bytearray(table_entry_lines(entries) * LINE_BYTES)
    for page, line in pages.items():
        address = copy(line, given.work[0][0].layout.page_lines)
        words[8 * page : 8 * page + 8] = ENTRY.pack_bytes(valid=1, line=address // LINE_BYTES)
    committed = max(job.row_end for job, _ in given.work)
    header = TABLE.pack_bytes(
        magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=1, entries=max(entries, -(-committed >> log2)),
        committed_rows=committed,
    )  # fmt: skip
    table = space.take(LINE_BYTES + len(words))
    aperture.write(table, header + bytes(words))

    fields, results = [], []
    for job, _ in given.work:
        results.append(space.take(shape.group * shape.result.lines * LINE_BYTES))
        fields.append(
            {
                "version": DESCRIPTOR_VERSION,
                "opcode": Opcode.ATTEND,
                "flags": FLAG_SINKS if job.sink_line is not None else 0,
                "table": table,
                "queries": copy(job.query_line, shape.group * shape.k_lines),
                "result": results[-1],
                "sinks": copy(job.sink_line, list_lines(shape.group)) if job.sink_line is not None else 0,
                "row_begin": job.row_begin,
                "row_end": job.row_end,
                "score_factor": job.factor,
                "head_dim": shape.head_dim,
                "value_dim": shape.value_dim,
                "group": shape.group,
                "query_rows": 1,
                "page_rows_log2": log2,
                "k_format": shape.k_format,
                "v_format": shape.v_format,
                "query_format": shape.query_format,
                "output_form": shape.form,
            }
        )
    return fields, results
