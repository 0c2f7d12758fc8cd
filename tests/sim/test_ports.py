"""Both hosts of the RTL on a device of memory alone: the same programs, the same answers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nearkv_hw.abi import configure
from nearkv_hw.abi.mailbox import PoisonSource
from nearkv_hw.verilog import to_verilog
from nearkv_sim.build import device_library
from nearkv_sim.cocotb.port import CocotbPort
from nearkv_sim.port import Access, DeviceTimeout, Fence, Poll, Read, Write
from nearkv_sim.rtl import RtlPort
from toy_device import ToyDevice

pytestmark = pytest.mark.rtl

CAPACITY = 1 << 30
CLOCK = CAPACITY
OUTSIDE = CAPACITY + 64


@pytest.fixture(scope="module")
def design():
    return to_verilog(ToyDevice(capacity_bytes=CAPACITY, ports=2))


@pytest.fixture(params=["rtl", "rtl-shaken", "cocotb"])
def port(request, design):
    seed = np.random.SeedSequence().entropy & 0x7FFFFFFF
    print(f"seed {seed}")
    if request.param == "cocotb":
        device = CocotbPort(configure(), design=design, seed=seed)
    else:
        shake = 0.4 if request.param == "rtl-shaken" else 0.0
        library = device_library(design, name="toy")
        device = RtlPort(configure(), library=library, idle=shake, backpressure=shake, seed=seed)
    with device:
        yield device


def lines(*addresses):
    return np.array(addresses, np.uint64)


def test_reads_bring_what_was_written(port):
    rng = np.random.default_rng(7)
    addresses = rng.choice(CAPACITY // 64, 500, replace=False).astype(np.uint64) * 64
    data = rng.integers(0, 256, (500, 64), np.uint8)
    before, after = port.run(
        [
            Read(addresses),
            Fence(),
            Write(addresses[:250], data[:250]),
            Write(addresses[250:], data[250:]),
            Fence(),
            Read(addresses[::-1]),
        ]
    )
    assert not before.data.any()
    np.testing.assert_array_equal(after.data, data[::-1])
    assert (after.access == Access.DATA).all()
    assert port.link_bytes == 64 * 1500


@pytest.mark.parametrize("ports", [1, 2, 3])
def test_all_ports_are_used(ports):
    """A port of the toy takes a read in every `ports`-th cycle, so all it has make one per cycle."""
    wide = to_verilog(ToyDevice(capacity_bytes=CAPACITY, ports=ports))
    with RtlPort(configure(), library=device_library(wide, name=f"toy{ports}")) as port:
        began = port.cycles
        port.run([Read(np.arange(2000, dtype=np.uint64) * 64)])
        assert 2000 <= port.cycles - began <= 2060


def test_enables_choose_bytes(port):
    addresses = lines(0, 64, 128)
    old = np.full((3, 64), 0x11, np.uint8)
    new = np.arange(192, dtype=np.uint8).reshape(3, 64)
    enables = np.array([0, 0xF0F0_0000_0000_0001, 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
    (result,) = port.run(
        [Write(addresses, old), Fence(), Write(addresses, new, enables), Fence(), Read(addresses)]
    )
    chosen = (enables[:, None] >> np.arange(64, dtype=np.uint64)) & 1 == 1
    np.testing.assert_array_equal(result.data, np.where(chosen, new, old))


def test_bad_data_stays_bad(port):
    """What a host writes with poison is read so, and known, until all of it is written without."""
    old, new = np.full((2, 64), 0x11, np.uint8), np.full((2, 64), 0x22, np.uint8)
    some = np.array([1, 1 << 63], np.uint64)
    both, result = lines(0, 64), lines(0, 64, 128)
    first, second, third = port.run(
        [
            *(Write(both, old, poison=True), Fence(), Read(result), Fence()),
            *(Write(both, new, some), Fence(), Read(result), Fence()),
            *(Write(both[:1], new[:1]), Fence(), Read(result)),
        ]
    )
    assert first.access.tolist() == second.access.tolist() == [Access.POISON, Access.POISON, Access.DATA]
    assert third.access.tolist() == [Access.DATA, Access.POISON, Access.DATA]
    assert port.maintenance.poisoned() == {64: PoisonSource.EXTERNAL}


def test_what_can_be_erased_is(port):
    port.run([Write(lines(0), np.ones((1, 64), np.uint8), poison=True)])
    if port.kind == "cocotb":
        with pytest.raises(RuntimeError, match="the cocotb device cannot be erased while it runs"):
            port.maintenance.erase()
        return
    port.maintenance.erase()
    assert port.maintenance.poisoned() == {}
    (result,) = port.run([Read(lines(0))])
    assert result.access.tolist() == [Access.DATA]
    assert not result.data.any()
    for wish in (lambda: port.maintenance.withhold(0, 1), lambda: port.maintenance.repair(0, bytes(64))):
        with pytest.raises(RuntimeError, match=r"the rtl device (cannot keep memory|lets nobody)"):
            wish()


def test_outside_reads_bring_nothing(port):
    (result,) = port.run([Write(lines(0), np.ones((1, 64), np.uint8)), Fence(), Read(lines(OUTSIDE, 0))])
    assert result.access.tolist() == [Access.OUTSIDE, Access.DATA]
    assert not result.data[0].any()
    assert result.data[1].all()


def test_poll_waits_for_its_value(port):
    (result,) = port.run([Poll(CLOCK, 0x800, 0x800), Read(lines(CLOCK))])
    (again,) = port.run([Poll(CLOCK, 0x800, 0), Read(lines(CLOCK))])
    clocks = [int.from_bytes(r.data[0].tobytes(), "little") for r in (result, again)]
    assert 0x800 <= clocks[0] < 0x1000 <= clocks[1] < 0x1800


def test_poll_gives_up(port):
    with pytest.raises(DeviceTimeout, match=r"0x40 did not change within \d+ cycles"):
        port.run([Poll(64, 1, 1, timeout_cycles=300)])
    with pytest.raises(DeviceTimeout, match="memory"):
        port.run([Poll(OUTSIDE, 1, 1)])
    (result,) = port.run([Read(lines(64))])  # it goes on afterwards
    assert result.access.tolist() == [Access.DATA]


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Read(lines(1)), "multiples of 64, not 0x1"),
        (Write(lines(0, 64), np.zeros((1, 64), np.uint8)), r"data must be \[2, 64\], not \[1, 64\]"),
        (Write(lines(0), np.zeros((1, 64), np.uint8), np.zeros(2, np.uint64)), r"enables must be \[1\]"),
        (Read(lines(0).reshape(1, 1)), "one dimension"),
        (Poll(8, 1, 1), "multiple of 64, not 0x8"),
        (Read(lines(1 << 52)), "at most 52 bits, not be 0x10000000000000"),
        (Write(lines(0, 1 << 63), np.zeros((2, 64), np.uint8)), "at most 52 bits"),
        (Poll(1 << 52, 1, 1), "at most 52 bits"),
    ],
)
def test_programs_are_checked_first(port, operation, message):
    with pytest.raises(ValueError, match=message):
        port.run([Write(lines(0), np.ones((1, 64), np.uint8)), Fence(), operation])
    (result,) = port.run([Read(lines(0))])
    assert not result.data.any()
    with pytest.raises(TypeError, match="consists of Write, Read"):
        port.run(["read"])


def test_closed_port_says_so(port):
    port.close()
    port.close()
    with pytest.raises(RuntimeError, match="is closed"):
        port.run([])


def test_devices_share_nothing(port, design):
    other = RtlPort(configure(), library=device_library(design, name="toy"))
    port.run([Write(lines(0), np.ones((1, 64), np.uint8))])
    with other:
        (result,) = other.run([Read(lines(0))])
    assert not result.data.any()


@pytest.mark.parametrize("kind", ["rtl", pytest.param("cocotb", marks=pytest.mark.slow)])
def test_waves_are_recorded(design, tmp_path, kind):
    wave = tmp_path / "toy.fst"
    if kind == "rtl":
        device = RtlPort(configure(), library=device_library(design, name="toy", trace=True))
    else:
        device = CocotbPort(configure(), design=design, trace=True)
    with device:
        device.start_wave(wave)
        device.run([Read(lines(0, 64))])
    assert wave.stat().st_size > 500


def test_waves_need_a_build_with_them(port, tmp_path):
    with pytest.raises(RuntimeError, match="trace=True"):
        port.start_wave(tmp_path / "toy.fst")


def test_dead_simulator_is_reported(design):
    with CocotbPort(configure(), design=design, seed=5) as port:
        port._process.kill()
        with pytest.raises(RuntimeError, match=r"status -9, seed 5\); the end of .*simulation.log"):
            port.run([Read(lines(0))])


def test_misbehaving_device_is_reported():
    """A device that answers a tag that nobody used: both hosts say so instead of taking the data."""
    wrong = to_verilog(ToyDevice(capacity_bytes=CAPACITY, flip_tags=True))
    with RtlPort(configure(), library=device_library(wrong, name="toy-wrong")) as port:
        with pytest.raises(RuntimeError, match="which no read awaits"):
            port.run([Read(lines(0))])
        with pytest.raises(RuntimeError):
            port.run([Read(lines(0))])
    with CocotbPort(configure(), design=wrong) as port, pytest.raises(RuntimeError, match="no access awaits"):
        port.run([Read(lines(0))])


def test_messages_have_their_ld_id(port):
    """Given or not; the toy sends it back, and hosts look."""
    addresses = lines(0, 64, 128)
    data = np.arange(192, dtype=np.uint8).reshape(3, 64)
    ld_ids = np.array([15, 0, 6], np.uint8)
    (result,) = port.run([Write(addresses, data, ld_ids=ld_ids), Fence(), Read(addresses, ld_ids[::-1])])
    np.testing.assert_array_equal(result.data, data)
    with pytest.raises(ValueError, match=r"ld_ids must be \[3\], not \[2\]"):
        port.run([Read(addresses, ld_ids[:2])])
    with pytest.raises(ValueError, match=r"ld_ids must be below 16, not 16"):
        port.run([Read(lines(0), np.array([16], np.uint8))])


def test_a_wrong_ld_id_is_reported():
    """Of three logical bits the toy inverts one, in answers of both kinds."""
    wrong = to_verilog(ToyDevice(capacity_bytes=CAPACITY, flip_ld_ids=4))
    for operation in (Read(lines(0)), Write(lines(0), np.zeros((1, 64), np.uint8))):
        with (
            RtlPort(configure(), library=device_library(wrong, name="toy-ld-id")) as port,
            pytest.raises(RuntimeError, match="has LD-ID 4, not its message's"),
        ):
            port.run([operation])
    with (
        CocotbPort(configure(), design=wrong) as port,
        pytest.raises(RuntimeError, match="LD-ID 4 answers 0"),
    ):
        port.run([Read(lines(0))])


def test_two_processes_build_once(design, tmp_path, monkeypatch):
    """Two processes that need the same library at once build it once, and both get it."""
    monkeypatch.setenv("NEARKV_CACHE", str(tmp_path))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from toy_device import ToyDevice\n"
        "from nearkv_hw.verilog import to_verilog\n"
        "from nearkv_sim.build import device_library\n"
        "built = []\n"
        "device_library(to_verilog(ToyDevice()), name='toy', report=built.append)\n"
        "print(len(built))\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    steps = [int(process.communicate()[0]) for process in started]
    assert all(process.returncode == 0 for process in started)
    assert sorted(steps) == [0, 2]
