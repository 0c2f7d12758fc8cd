"""A model device with its CXL.io side, and time that passes when a test says so."""

import pytest
from nearkv_hw.abi import pci
from nearkv_hw.abi.mailbox import EVENT_RECORD, EVENT_RECORDS, EventLog, Opcode, ReturnCode
from nearkv_sim import open_port
from nearkv_sim.cxl_io import CxlDevice


class Setup:
    """A device, what runs it, and its clock."""

    def __init__(self, *, dynamic_bytes=0, **overrides):
        self.now_s = 100.0
        self.port = open_port("model", **overrides)
        self.device = CxlDevice(
            self.port.config, self.port.maintenance, dynamic_bytes=dynamic_bytes, clock=lambda: self.now_s
        )
        msi = pci.MSI["control"]
        self.device.write_config(pci.MSI_AT + msi.at, msi.pack(enable=1, enabled=3), 2)

    def run(self, opcode, payload=b""):
        """A command: its return code and its output."""
        return self.device.mailbox.execute(opcode, payload)

    def code(self, opcode, payload=b""):
        return self.run(opcode, payload)[0]

    def output(self, opcode, payload=b""):
        code, output = self.run(opcode, payload)
        assert code <= ReturnCode.BACKGROUND_STARTED, code
        return output

    def records(self, log=EventLog.INFORMATION):
        """The head and the records of Get Event Records."""
        told = self.output(Opcode.GET_EVENT_RECORDS, bytes([log]))
        head = EVENT_RECORDS.unpack(told[:32])
        assert len(told) == 32 + 128 * head["count"]
        return head, [EVENT_RECORD.unpack(told[at : at + 128]) for at in range(32, len(told), 128)]


@pytest.fixture
def setup():
    return Setup()


@pytest.fixture
def setup_of():
    return Setup
