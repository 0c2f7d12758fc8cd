"""A compiled pair of link layers under traffic: every message arrives once and in order; what flits carry."""

import os
import secrets
from fractions import Fraction

import pytest
from nearkv_hw.abi.flits256 import READ_LINES, WRITE_LINES
from nearkv_hw.link.layer import LinkLayer
from nearkv_hw.link.layer256 import LinkLayer256
from nearkv_sim.link import KINDS, CompiledLink, LinkFailed, LinkSetup, Traffic

SHAKEN = {"idle": (0.3, 0.4, 0.2, 0.5), "backpressure": (0.3, 0.5, 0.2, 0.4)}
SOAK_MESSAGES = 1_000_000
RECOVERY_CYCLES = 60
"""From the discovery of an error to the next flit accepted, where the answer to the request is not lost."""
LAYERS = {68: LinkLayer, 256: LinkLayer256}
SHORT = {
    68: {"entries": 22, "places": dict.fromkeys(KINDS, 4), "timeout_flits": 300},
    256: {"entries": 4, "places": dict.fromkeys(KINDS, 8), "timeout_cycles": 300},
}


@pytest.fixture(scope="module", params=LAYERS)
def link(request):
    return CompiledLink(LinkSetup(flit_bytes=request.param))


@pytest.fixture
def seed():
    """A new one for each test, printed with a failure."""
    return int(os.environ.get("NEARKV_SEED", "0")) or secrets.randbits(32)


def carries(link, traffic):
    """Runs traffic, in which every message is checked; each that was sent was received."""
    passed = link.run(traffic)
    assert passed.sent == passed.received
    assert sum(passed.received) == traffic.messages * (2 if traffic.answers else 1)
    return passed


@pytest.mark.rtl
def test_soak(link, seed):
    """A million messages, wrong bits in a flit of 10,000, idle cycles and back-pressure everywhere."""
    passed = carries(link, Traffic(messages=SOAK_MESSAGES, seed=seed, flip=1e-4, **SHAKEN))
    least = 20 if link.setup.flit_bytes == 68 else 4  # of larger flits there are fewer
    assert passed.flipped > least
    assert sum(passed.crc_errors) > least
    assert passed.recoveries > least
    assert passed.recovery_cycles / passed.recoveries < RECOVERY_CYCLES


@pytest.mark.rtl
@pytest.mark.parametrize(
    "errors",
    [
        {"flip": 1e-2},
        {"flip": 5e-2},
        {"drop": 1e-3},
        {"repeat": 1e-3},
        {"flip": 3e-3, "drop": 1e-3, "repeat": 1e-3},
    ],
    ids=lambda errors: " ".join(f"{name}={rate}" for name, rate in errors.items()),
)
@pytest.mark.parametrize("shaken", [{}, SHAKEN], ids=["full", "shaken"])
def test_errors(link, seed, errors, shaken):
    messages = 20_000 if link.setup.flit_bytes == 68 else 100_000
    passed = carries(link, Traffic(messages=messages, seed=seed, **errors, **shaken))
    assert ("flip" in errors) == (sum(passed.crc_errors) > 0)
    assert sum(passed.replayed) > 0
    if "drop" in errors or "repeat" in errors:
        assert passed.retrainings >= max(passed.dropped > 0, passed.repeated > 0)
    else:
        assert passed.dropped == passed.repeated == 0


@pytest.mark.rtl
def test_without_errors_nothing_is_sent_twice(link, seed):
    passed = carries(link, Traffic(messages=50_000, seed=seed, **SHAKEN))
    assert passed.replayed == passed.crc_errors == (0, 0)
    assert passed.recoveries == passed.retrainings == 0


@pytest.mark.rtl
@pytest.mark.parametrize("kind", KINDS)
def test_latency_is_as_stated(link, kind):
    """Of a message on a link that is idle, mostly: the quickest is as the blocks say, and the wire."""
    data = kind in ("rwd", "drs")
    layer = LAYERS[link.setup.flit_bytes]
    layers = layer.data_latency_cycles if data else layer.latency_cycles
    idle = tuple(0.98 if other == kind else 1 for other in KINDS)
    passed = carries(link, Traffic(messages=100, idle=idle, full=1))
    assert passed.shortest[KINDS.index(kind)] == layers + link.setup.latency_cycles


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("setup", "lines"),
    [
        (LinkSetup(), Fraction(8, 9)),
        (LinkSetup(layer={"multi_data": False}), Fraction(4, 5)),
        (LinkSetup(flit_bytes=256), Fraction(*READ_LINES)),
    ],
    ids=["68", "68 without multi-data headers", "256"],
)
def test_lines_of_reads_per_flit(setup, lines):
    passed = carries(CompiledLink(setup), Traffic(messages=100_000, idle=(0, 1, 0, 0), answers=True))
    found = passed.received[KINDS.index("drs")] / passed.flits[1]
    assert float(lines) * 0.99 <= found <= float(lines)


@pytest.mark.rtl
def test_lines_of_writes_per_flit(link):
    passed = carries(link, Traffic(messages=100_000, idle=(1, 0, 0, 0), answers=True, full=1))
    lines = 0.8 if link.setup.flit_bytes == 68 else WRITE_LINES[0] / WRITE_LINES[1]
    assert lines * 0.99 <= passed.received[KINDS.index("rwd")] / passed.flits[0] <= lines


@pytest.mark.rtl
@pytest.mark.parametrize("flit_bytes", LAYERS)
def test_smallest_buffers_do_not_lock_up(seed, flit_bytes):
    """Where credits and the retry buffer, not the wire, are what is short."""
    link = CompiledLink(LinkSetup(flit_bytes=flit_bytes, layer=SHORT[flit_bytes]))
    for flip in (0.0, 1e-2):
        for shaken in ({}, SHAKEN):
            carries(link, Traffic(messages=30_000, seed=seed, flip=flip, **shaken))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"messages": 0}, "messages must be at least 1, not 0"),
        ({"idle": (0, 0)}, "idle must have a probability for each of req, rwd, ndr, drs"),
        ({"flip": 1.5}, "flip must be probabilities from 0 to 1, not 1.5"),
        ({"backpressure": (1, 0, 0, 0)}, "backpressure must be below 1"),
        ({"idle": (1, 1, 0, 0), "answers": True}, "idle must be below 1 for a kind"),
    ],
)
def test_traffic_is_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Traffic(**{"messages": 10, **wrong})


@pytest.mark.rtl
def test_a_link_that_gives_up_is_told_of(link):
    """With a wrong bit in every flit nothing can arrive."""
    with pytest.raises(LinkFailed, match=r"nothing moved|gave up"):
        link.run(Traffic(messages=10, flip=1.0))
