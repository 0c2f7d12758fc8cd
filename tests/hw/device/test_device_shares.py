"""Tenants share the attention units by the lines of their jobs, as the owner's weights say."""

import numpy as np
import pytest
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.owner import WEIGHT_LINES_LOG2, WEIGHTS, WEIGHTS_LINE, owner_address
from nearkv_hw.abi.window import RING, RING_LINE, completion_address, completion_phase, register_address
from nearkv_sim.port import Fence, Poll, Read, Write
from raw_device import Aperture, Space, ok, random_context

pytestmark = pytest.mark.rtl
UNDER_WAY = 12
"""Jobs that may stand between rings and completion records."""


@pytest.fixture
def apertures(open_port):
    """Both apertures of `small` in RTL, each with half of the extents."""
    if open_port.kind != "rtl":
        pytest.skip("the model's jobs are done at once")
    port = open_port()
    both = [Aperture(port, number) for number in range(2)]
    half = port.config.extents // 2
    for number, aperture in enumerate(both):
        ok([aperture.claim(number * half, half)])
    return both


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 7)])
def test_lines_are_as_the_weights(apertures, rng, weights):
    """Short jobs beside long ones: not their number counts, but their lines."""
    port, half = apertures[0].port, apertures[0].config.extents // 2
    line = np.frombuffer(WEIGHTS.pack_bytes(tenant0=weights[0], tenant1=weights[1]), np.uint8)
    port.run([Write(np.array([owner_address(port.config, WEIGHTS_LINE)], np.uint64), line.reshape(1, -1))])
    counts, programs, contexts = (200, 200), [], []
    for number, (aperture, rows) in enumerate(zip(apertures, (64, 128), strict=True)):
        context = random_context(rng, rows=rows, head_dim=128)
        first = number * half
        context.place(aperture, Space(rng, [first + 8, first + 9]))
        programs += aperture.writes([context.descriptor()] * counts[number])
        contexts.append(context)
    lines = [context.rows * context.layout.row_bytes // LINE_BYTES for context in contexts]
    port.run([*programs, Fence()])

    # Until one of them has a fifth of its jobs done, both have jobs that wait.
    first = min(range(2), key=lambda n: counts[n] * lines[n] / weights[n])
    done = Poll(
        completion_address(port.config, first, counts[first] * 4 // 5),
        1,
        completion_phase(port.config, counts[first] * 4 // 5),
        2_000_000,
    )
    rings = np.array([register_address(port.config, n, RING_LINE) for n in range(2)], np.uint64)
    (shown,) = port.run([done, Read(rings)])
    completed = [RING.unpack(data.tobytes())["completed"] - 1 for data in shown.data]  # without the claim
    taken = [count * each for count, each in zip(completed, lines, strict=True)]
    slack = (max(weights) << WEIGHT_LINES_LOG2) + UNDER_WAY * max(lines)
    print(f"{completed} jobs, {taken} lines")
    assert all(count < most for count, most in zip(completed, counts, strict=True))
    assert abs(taken[0] - sum(taken) * weights[0] / sum(weights)) <= slack
    assert sum(taken) > 4 * slack
    for aperture, count, context in zip(apertures, counts, contexts, strict=True):
        ok(aperture.collect(count))
        context.check(aperture)
