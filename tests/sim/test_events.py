"""The recorder of events: its C++ under the sanitizers, its SystemVerilog, recordings of devices."""

from pathlib import Path

import numpy as np
import pytest
from native_checks import is_free_of_warnings, passes_with_a_random_seed, sanitized_program
from nearkv_hw.abi import configure
from nearkv_hw.common.event import Event
from nearkv_hw.verilog import to_verilog
from nearkv_sim import open_port
from nearkv_sim.build import device_library
from nearkv_sim.events import EVENT, EventKind
from nearkv_sim.port import Fence, Read, Write
from nearkv_sim.rtl import RtlPort
from toy_device import ToyDevice

CHECK = Path(__file__).with_name("events_check.cpp")


class TappedDevice(ToyDevice):
    """Tells of every read that it takes, by two taps that differ in their index."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        request = self.m2s_req[0]
        for index in range(2):
            m.submodules[f"event{index}"] = event = Event(name="toy.read", index=index)
            m.d.comb += [
                event.valid.eq(request.valid & request.ready),
                event.a.eq(request.payload.address),
                event.b.eq(index),
            ]
        return m


@pytest.mark.rtl
def test_recorder_under_sanitizers(tmp_path):
    passes_with_a_random_seed(sanitized_program(tmp_path, CHECK, ["events.cpp"]))


@pytest.mark.rtl
def test_systemverilog_is_free_of_warnings():
    is_free_of_warnings("nearkv_event.sv")


@pytest.fixture(scope="module")
def library():
    return device_library(to_verilog(TappedDevice()), name="tapped-toy")


def reads(*lines):
    return Read(64 * np.array(lines, np.uint64))


@pytest.mark.rtl
def test_a_recording_has_what_happened_while_it_went_on(library):
    with RtlPort(configure(), library=library) as port:
        port.run([reads(1, 2)])
        port.record()
        port.run([reads(3), Fence(), reads(4, 5)])
        first = port.recorded()
        port.run([reads(6)])
        port.record()
        port.run([reads(7), Write(np.array([0], np.uint64), np.zeros((1, 64), np.uint8))])
        second = port.recorded()
        third = port.recorded()
    assert set(first.names) >= {"toy.read.0", "toy.read.1"}
    assert first.indices("toy.read") == ["0", "1"]
    for index in range(2):
        events = first.of(f"toy.read.{index}")
        assert events["a"].tolist() == [3, 4, 5]
        assert set(events["b"]) == {index}
        assert set(events["kind"]) == {EventKind.STAGE}
        assert (np.diff(events["cycle"].astype(np.int64)) > 0).all()
    assert first.began <= first.events["cycle"].min() <= first.events["cycle"].max() < first.ended
    assert second.of("toy.read.0")["a"].tolist() == [7]
    assert second.began >= first.ended
    assert not len(third.events)
    assert not len(first.of("nothing"))
    assert first.lost == second.lost == 0


@pytest.mark.rtl
def test_devices_of_one_process_have_recordings_of_their_own(library):
    with RtlPort(configure(), library=library) as one, RtlPort(configure(), library=library) as other:
        one.record()
        other.record()
        one.run([reads(1)])
        other.run([reads(2, 3)])
        one.run([reads(4)])
        assert one.recorded().of("toy.read.0")["a"].tolist() == [1, 4]
        assert other.recorded().of("toy.read.0")["a"].tolist() == [2, 3]


@pytest.mark.rtl
def test_what_finds_no_room_is_counted(library):
    with RtlPort(configure(), library=library) as port:
        port.record(capacity=3, kinds=[EventKind.STAGE])
        port.run([reads(*range(5))])
        recording = port.recorded()
        port.record(kinds=[EventKind.ACTIVATE])
        port.run([reads(1)])
        assert not len(port.recorded().events)
        with pytest.raises(ValueError, match="capacity must be at least 1 event, not 0"):
            port.record(capacity=0)
    assert len(recording.events) == 3
    assert recording.lost == 2 * 5 - 3


def test_the_struct_has_the_size_that_cpp_gives_it():
    assert EVENT.itemsize == 32


def test_the_model_has_no_events():
    port = open_port("model")
    with pytest.raises(RuntimeError, match="record an rtl device"):
        port.record()
    with pytest.raises(RuntimeError, match="nothing is recorded"):
        port.recorded()


@pytest.mark.rtl
def test_messages_of_the_link(library):
    """Every message of the four streams, with the address of the access that it belongs to."""
    with RtlPort(configure(), library=library) as port:
        port.record(kinds=[EventKind.LINK])
        lines = np.array([64 * n for n in (3, 1, 2)], np.uint64)
        port.run([Write(lines[:2], np.zeros((2, 64), np.uint8)), Fence(), Read(lines)])
        recording = port.recorded()
    times = {}
    for stream, wanted in (
        ("m2s_req", lines), ("m2s_rwd", lines[:2]), ("s2m_ndr", lines[:2]), ("s2m_drs", lines),
    ):  # fmt: skip
        events = recording.of(f"link.{stream}.0")
        assert sorted(events["a"].tolist()) == sorted(wanted.tolist())
        assert len(set(events["b"].tolist())) == len(wanted)
        times[stream] = dict(zip(events["b"].tolist(), events["cycle"].tolist(), strict=True))
    for asked, answered in (("m2s_req", "s2m_drs"), ("m2s_rwd", "s2m_ndr")):
        assert all(times[asked][tag] < cycle for tag, cycle in times[answered].items())
