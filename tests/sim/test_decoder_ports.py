"""Registers of HDM decoders through both hosts of the RTL: the device's, and what software knows of them."""

import random

import numpy as np
import pytest
from nearkv_hw.abi import configure
from nearkv_hw.abi.hdm import CONTROL, DECODER_STRIDE, FIRST_DECODER, GLOBAL_CONTROL, Word
from nearkv_hw.verilog import to_verilog
from nearkv_sim.build import device_library
from nearkv_sim.cocotb.port import CocotbPort
from nearkv_sim.cxl_io.hdm import HdmDecoders
from nearkv_sim.port import Access, Read, Write
from nearkv_sim.rtl import RtlPort
from toy_device import ToyDevice

pytestmark = pytest.mark.rtl

UNIT = 256 << 20
CONFIG = configure("small", capacity_bytes=2 * UNIT, hdm_decoders=2)
LAST = FIRST_DECODER + 2 * DECODER_STRIDE - 4


@pytest.fixture(scope="module")
def design():
    return to_verilog(ToyDevice(capacity_bytes=2 * UNIT, decoders=CONFIG))


@pytest.fixture(params=["rtl", "cocotb"])
def port(request, design):
    if request.param == "cocotb":
        device = CocotbPort(CONFIG, design=design)
    else:
        device = RtlPort(CONFIG, library=device_library(design, name="toy-decoders"))
    with device:
        yield device


def registers(decoders):
    return [decoders.read(at) for at in range(0, LAST + 4, 4)]


def test_registers_are_the_devices(port):
    seed = random.SystemRandom().getrandbits(31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    decoders = port.maintenance.decoders
    model = HdmDecoders(2, CONFIG.address_bytes)
    assert registers(decoders) == registers(model)
    for written in (decoders, model):
        written.write(FIRST_DECODER + 4 * Word.SIZE_LOW, UNIT)
        written.write(FIRST_DECODER + 4 * Word.CONTROL, CONTROL.pack(commit=1))
    assert CONTROL.unpack(decoders.read(FIRST_DECODER + 4 * Word.CONTROL))["committed"]
    outcomes = set()
    for _ in range(150):
        at = rng.choice([GLOBAL_CONTROL.at, *range(0, LAST + 4, 4), *[FIRST_DECODER + 4 * Word.CONTROL] * 9])
        value = rng.choice([0, UNIT, 2 * UNIT, CONTROL.pack(commit=1), CONTROL.pack(commit=1, ways=1)])
        decoders.write(at, value)
        model.write(at, value)
        assert decoders.read(at & ~7, 8) == model.read(at & ~7, 8)
        told = CONTROL.unpack(decoders.read(FIRST_DECODER + 4 * Word.CONTROL))
        outcomes.add((told["committed"], told["error"]))
        assert decoders.committed == model.committed
    assert outcomes >= {(0, 0), (0, 1)}
    assert registers(decoders) == registers(model)
    with pytest.raises(ValueError, match="written 4 bytes at a time, not 8"):
        decoders.write(0, 0, 8)
    decoders.reset()
    assert registers(decoders) == registers(HdmDecoders(2, CONFIG.address_bytes))


def test_messages_and_registers_take_turns(port):
    """Programs run as before between accesses to registers."""
    address = np.array([640], np.uint64)
    for n in range(5):
        port.run([Write(address, np.full((1, 64), n, np.uint8))])
        port.maintenance.decoders.write(FIRST_DECODER, n * UNIT)
        (result,) = port.run([Read(address)])
        assert (result.data == n).all()
        assert port.maintenance.decoders.read(FIRST_DECODER) == n * UNIT


def test_a_device_that_is_erased_is_programmed_as_it_was(port):
    if port.kind == "cocotb":
        pytest.skip("it cannot be erased while it runs")
    decoders = port.maintenance.decoders
    decoders.write(FIRST_DECODER + 4 * Word.SIZE_LOW, UNIT)
    decoders.write(FIRST_DECODER + 4 * Word.CONTROL, CONTROL.pack(commit=1, lock_on_commit=1))
    before = registers(decoders)
    port.maintenance.erase()
    assert registers(decoders) == before
    assert CONTROL.unpack(decoders.read(FIRST_DECODER + 4 * Word.CONTROL))["committed"]


def test_counters_stay_where_no_decoder_leads_to_them(port):
    """The toy has no window: what is not there reads as zero, and is not asked for."""
    decoders = port.maintenance.decoders
    decoders.dvsec = ()
    before = port.link_bytes
    assert port.maintenance.corrected() == 0
    assert port.link_bytes == before, "no message was sent"
    decoders.dvsec = ((0, CONFIG.address_bytes),)
    port.maintenance.corrected()
    assert port.link_bytes > before


def test_a_device_without_decoders_says_so():
    plain = to_verilog(ToyDevice(capacity_bytes=2 * UNIT))
    with RtlPort(configure(), library=device_library(plain, name="toy-plain")) as port:
        assert port.maintenance.decoders is None
        with pytest.raises(RuntimeError, match="has no HDM decoders between link and memory"):
            port.write_decoder(0, 0)
        with pytest.raises(RuntimeError, match="open it with hdm_decoders=4"):
            port.read_decoder(0)
        (result,) = port.run([Read(np.array([0], np.uint64))])
        assert result.access.tolist() == [Access.DATA]
