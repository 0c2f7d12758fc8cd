"""RTL and model under the same descriptors, good, spoilt and random: the same records, the same results."""

import numpy as np
import pytest
from kernel_cases import meaning_of_results
from nearkv_hw.abi import Opcode, OutputForm, Status, configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import ENTRIES_PER_LINE, ENTRY, ENTRY_BYTES, ResultLayout
from nearkv_hw.features import FEATURES
from nearkv_sim.port import Read
from raw_device import Aperture, Space, claim_descriptor, random_context

pytestmark = pytest.mark.rtl

BATCH = 8
EXTENTS = 16
"""Extents of each tenant: half of them for what jobs read, one for each job's result of any size."""


class Twins:
    """A port that carries out every program on the RTL and on the model; what is read must be equal."""

    def __init__(self):
        from nearkv_sim.model import ModelPort
        from nearkv_sim.rtl import RtlPort

        self.config = configure("small")
        self.ports = RtlPort(self.config), ModelPort(self.config, features=FEATURES)
        self.compares = True

    def run(self, program):
        rtl, model = (port.run(program) for port in self.ports)
        for got, expected, read in zip(rtl, model, (o for o in program if isinstance(o, Read)), strict=True):
            where = [hex(address) for address in read.addresses]
            if self.compares:
                np.testing.assert_array_equal(got.access, expected.access, f"{where}")
                np.testing.assert_array_equal(got.data, expected.data, f"{where}")
        return rtl

    def close(self):
        for port in self.ports:
            port.close()


@pytest.fixture
def twins():
    port = Twins()
    yield port
    port.close()


def records(aperture, descriptors):
    """The records of both devices, without the cycles that only one of them knows."""
    aperture.port.compares = False
    aperture.run(descriptors)
    aperture.port.compares = True
    both = []
    for port in aperture.port.ports:
        one = Aperture(port, aperture.number)
        one.posted = aperture.posted
        both.append([{**record, "cycles": 0} for record in one.collect(len(descriptors))])
    return both


def random_one(aperture, space, rng):
    group = rng.choice([1, 2, 3, 4, 5, 8, 9, 16])
    formats = {name: rng.choice(["bf16", "fp16"]) for name in ("q_format", "k_format", "v_format")}
    context = random_context(
        rng,
        group=group,
        head_dim=rng.choice([1, 8, 32, 33, 64, 100, 128, 256]),
        value_dim=rng.choice([1, 16, 32, 64, 65, 256]),
        rows=rng.randint(0, 70),
        page_rows=rng.choice([4, 8, 16]),
        form=rng.choice(list(OutputForm)),
        sinks=rng.choice([None, [rng.uniform(-9, 9) for _ in range(group)]]),
        **formats,
    )
    context.place(aperture, space)
    return context


def spoil_entry(aperture, context, rng):
    """Put another entry, good or bad, in the place of one of the context's."""
    page = rng.randrange(len(context.placed["pages"]))
    entry = ENTRY.pack(valid=1, line=rng.randrange(1 << 26)) | rng.choice([0, 1 << rng.randrange(64)])
    address = context.placed["entries"] + page // ENTRIES_PER_LINE * LINE_BYTES
    line = bytearray(aperture.read(address, LINE_BYTES))
    within = page % ENTRIES_PER_LINE * ENTRY_BYTES
    line[within : within + ENTRY_BYTES] = rng.choice([0, entry]).to_bytes(ENTRY_BYTES, "little")
    aperture.write(address, bytes(line))


def random_descriptor(context, rng):
    """A range of rows, often with bits flipped or a field of noise; now and then a claim."""
    end = rng.randint(0, context.rows)
    fields = context.fields(rng.choice([0, rng.randint(0, end)]), end)
    line = ATTEND.pack(fields)
    kind = rng.random()
    if kind < 0.35:
        for _ in range(rng.randint(1, 2)):
            line ^= 1 << rng.randrange(512)
    elif kind < 0.5:
        name = rng.choice(list(fields))
        line = ATTEND.pack({**fields, name: rng.getrandbits(ATTEND[name].width)})
    elif kind < 0.6:
        line = claim_descriptor(rng.randrange(2 * EXTENTS), rng.randrange(4))
    offset = ATTEND.offset("result")
    return line & ~((1 << 64) - 1 << offset) | context.placed["result"] << offset


def assert_same_results(aperture, fields):
    """Both devices wrote the same as a job's result, but for sums of a NaN query, which have no meaning."""
    form, group = OutputForm(fields["output_form"]), fields["group"]
    layout = ResultLayout(fields["value_dim"], form)
    rtl, model = (
        np.frombuffer(one.read(fields["result"], group * layout.lines * LINE_BYTES), np.uint8)
        for one in (Aperture(port, aperture.number) for port in aperture.port.ports)
    )
    rtl, model = (meaning_of_results(data.reshape(group, -1), form) for data in (rtl, model))
    np.testing.assert_array_equal(rtl, model, f"{fields}")


def test_same_records_and_results(twins, rng):
    apertures = [Aperture(twins, n) for n in range(2)]
    seen = set()
    for n, aperture in enumerate(apertures):
        got, expected = records(aperture, [claim_descriptor(EXTENTS * n, EXTENTS)])
        assert got == expected
    for _ in range(16):
        aperture = rng.choice(apertures)
        first = EXTENTS * aperture.number
        space = Space(rng, range(first, first + EXTENTS - BATCH))
        contexts = [random_one(aperture, space, rng) for _ in range(BATCH)]
        for n, context in enumerate(contexts):
            context.placed["result"] = (first + EXTENTS - BATCH + n) * EXTENT_BYTES
            if rng.random() < 0.3 and context.placed["pages"]:
                spoil_entry(aperture, context, rng)
        descriptors = [random_descriptor(context, rng) for context in contexts]
        got, expected = records(aperture, descriptors)
        for line, mine, theirs in zip(descriptors, got, expected, strict=True):
            fields = ATTEND.unpack(line)
            if mine["status"] != Status.OK:  # how much was streamed before the fault is each device's own
                mine, theirs = {**mine, "lines": 0}, {**theirs, "lines": 0}
            assert mine == theirs, fields
            seen.add(Status(mine["status"]))
            if mine["status"] == Status.OK and fields["opcode"] == Opcode.ATTEND:
                assert_same_results(aperture, fields)
    assert {Status.OK, Status.BAD_FLAGS, Status.BAD_PAGE} <= seen
