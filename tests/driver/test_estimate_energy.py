"""Energy: worked cases, bands, and that every figure has a source."""

import pytest
from nearkv.errors import ArgumentError
from nearkv.estimate import Band, Events
from nearkv.estimate import energy as module
from nearkv.estimate.energy import DRAMS, FORM_FACTORS, LINK_BIT, energy, throttle
from nearkv.estimate.value import Value
from nearkv_hw.abi import configure
from nearkv_hw.abi.dram import PARTS

LPDDR = configure("card", dram="lpddr5x_8533")
DDR = configure("card")


def test_bands():
    assert Band(1, 2, 3) + Band(0, 1, 5) == Band(1, 3, 8)
    assert 2 * Band(1, 2, 3) == Band(2, 4, 6)
    assert Value(3, "pJ", "here").band == Band(3, 3, 3)
    with pytest.raises(ValueError, match="a band goes from low over mid to high"):
        Band(2, 1, 3)


def test_a_context_of_llama_70b():
    # 40 GiB are 3.44e11 bits: at 4.5 pJ/bit 1.55 J (LPDDR5X), at 11.8 4.1 J (DDR5); the link 1.4 to 6.4 J
    lines = 40 * 2**30 / 64
    found = energy(LPDDR, Events(line_reads=lines), seconds=0).parts["dram"]
    opened = lines * 8 / 256  # a pair of rows in each of four sub-channels, 256 lines
    assert found.mid == pytest.approx(lines * 2300e-12 + opened * 900e-12)
    assert found.mid == pytest.approx(1.55, rel=0.02)
    assert energy(DDR, Events(line_reads=lines), seconds=0).parts["dram"].high == pytest.approx(
        4.05, rel=0.01
    )
    link = energy(DDR, Events(link_bytes=40 * 2**30), seconds=0).parts["link"]
    assert link.low == pytest.approx(1.37, rel=0.01)
    assert link.high == pytest.approx(6.44, rel=0.01)


def test_refresh_and_background():
    # a second of 4 channels of 4 sub-channels: 256,016 refreshes each
    found = energy(LPDDR, Events(), seconds=1.0).parts
    assert found["dram"].mid == pytest.approx(16 / 3906e-9 * 28e-9)
    assert found["static"].mid == pytest.approx(16 * 0.02 + 20 + 4 * 0.1)


def test_more_events_take_more():
    base = energy(DDR, Events(line_reads=10), seconds=1e-6).total
    for more in (
        Events(line_reads=11),
        Events(line_reads=10, link_bytes=1),
        Events(line_reads=10, multiplies=1),
        Events(line_reads=10, crossbar_bytes=1),
        Events(line_reads=10, line_writes=1),
    ):
        found = energy(DDR, more, seconds=1e-6).total
        assert found.low > base.low
        assert found.mid > base.mid
        assert found.high > base.high
    assert energy(DDR, Events(link_bytes=8), seconds=0, switch=True).total.mid == pytest.approx(
        2 * 64 * LINK_BIT.value * 1e-12
    )


def test_units_in_the_buffer_may_save_pins():
    rank = configure("card", placement="rank", ranks=2)
    near, far = (energy(c, Events(line_reads=1e6), seconds=0).parts["dram"] for c in (rank, DDR))
    assert near.low < far.low
    assert (near.mid, near.high) == (far.mid, far.high)


def test_a_card_that_may_not():
    assert throttle(Band(10, 20, 30), FORM_FACTORS["e3s"]) == Band(1, 1, 30 / 25)


def test_every_part_has_figures_and_sources():
    assert set(DRAMS) == set(PARTS)
    figures = [v for d in DRAMS.values() for v in vars(d).values()]
    figures += [v for v in vars(module).values() if isinstance(v, Value)] + list(FORM_FACTORS.values())
    for figure in figures:
        assert figure.source
        assert figure.unit
        assert figure.sure in ("published", "derived", "assumed")
        assert figure.band.low <= figure.value <= figure.band.high


def test_no_figures():
    with pytest.raises(ArgumentError, match="dram=fixed has no energy; take a DRAM part"):
        energy(configure(dram="fixed"), Events(), seconds=1)
