"""What stands in for an engine's device, and beside it: the reference, and the check of every call."""

import random
from pathlib import Path

import nearkv
import pytest
import torch
from driver_cases import TamperingPort, same_bits, values
from nearkv import replay
from nearkv.blocks import BlockCache
from nearkv.check import CheckTally
from nearkv.device import Device
from nearkv.errors import MismatchError
from nearkv.vllm import Settings, register
from nearkv.vllm.host_blocks import CheckedBlocks, ReferenceBlocks
from nearkv_hw.abi import Feature
from nearkv_sim.port import Read, ReadResult

SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 64, "value_dim": 32, "blocks": 12, "block_rows": 32}
Q_HEADS = 6


def checked(device, folder, dtype="fp16"):
    tally = CheckTally()
    blocks = BlockCache(device, **SHAPE, dtype=dtype)
    return CheckedBlocks(blocks, ReferenceBlocks(**SHAPE, dtype=dtype), tally, folder), tally


def fill(store, tables, lengths, layer, seed, dtype=torch.float16):
    slots = [
        table[row // 32] * 32 + row % 32 for table, n in zip(tables, lengths, strict=True) for row in range(n)
    ]
    slots = torch.tensor([*dict.fromkeys(slots), -1])
    k = values(len(slots), 2, 64, seed=seed, dtype=dtype)
    v = values(len(slots), 2, 32, seed=seed + 1, dtype=dtype)
    store.write(slots, layer=layer, k=k, v=v)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 20},
        {"softcap": 30.0, "sinks": torch.tensor([0.5, 1, -1, 2, 0, 3])},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1, 0.3, 0.7]), "window": 40},
        {"scale": 0.25},
    ],
)
def test_device_and_reference_agree_and_are_counted(device, tmp_path, options, dtype):
    """Shared blocks, three lengths, one and several query rows."""
    for name, feature in (("softcap", Feature.SOFTCAP), ("alibi_slopes", Feature.ALIBI)):
        if name in options and feature not in device.features:
            pytest.skip(f"this device has no {name}")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kind = nearkv.codec.element_dtype(dtype)
    store, tally = checked(device, tmp_path, dtype)
    tables, lengths = [[3, 1, 9], [3, 7, 0], [3, 0, 0]], [70, 50, 32]
    for layer in range(2):
        fill(store, tables, lengths, layer, seed + 10 * layer, kind)
        for query_rows in (1, 5):
            q = values(3, query_rows, Q_HEADS, 64, seed=seed + query_rows, dtype=kind)
            given = torch.tensor(tables, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
            out = store.attend(*given, layer=layer, q=q, places=[4, 2, 0], **{"scale": 0.125} | options)
            assert out.shape == (3, query_rows, Q_HEADS, 32)
    assert (tally.calls, tally.equal) == (4, 4)
    store.close()


def test_a_result_of_other_bits_raises_and_can_be_replayed(tmp_path):
    """One bit of a result on its way to the host."""
    armed = []

    def change(program, results):
        reads = [operation for operation in program if isinstance(operation, Read)]
        if armed and results and len(results[-1].data) >= Q_HEADS:
            data = results[-1].data.copy()
            data[0, 0] ^= 1
            results[-1] = ReadResult(data, results[-1].access)
            armed.append(len(reads))
        return results

    with Device(TamperingPort(change)) as device:
        store, tally = checked(device, tmp_path)
        fill(store, [[3, 1]], [40], 0, seed=1)
        call = torch.tensor([[3, 1]]), torch.tensor([40])
        q = values(1, 2, Q_HEADS, 64, seed=2)
        good = store.attend(*call, layer=0, q=q, scale=0.125, window=9)
        armed.append(0)
        with pytest.raises(MismatchError, match="nearkv replay"):
            store.attend(*call, layer=0, q=q, scale=0.125, window=9)
    assert len(armed) > 1
    assert (tally.calls, tally.equal) == (2, 1)
    case, recorded = replay.load(Path(tally.commands[0].split()[-1]))
    with replay.open_for(case) as device:
        outcome = replay.replay(case, recorded, device)
    assert outcome.equal
    assert not outcome.recorded_equal
    assert case.ranges == ((30, 39),)
    assert same_bits(case.reference(), good[:, 0])


def test_settings_come_from_the_environment():
    assert Settings.from_environment({}) is None
    assert Settings.from_environment({"NEARKV_VLLM": "off", "NEARKV_VLLM_CHECK": "1"}) is None
    given = {"NEARKV_VLLM": "rtl:card", "NEARKV_VLLM_CHECK": "1", "NEARKV_VLLM_DTYPE": "bf16"}
    assert Settings.from_environment(given) == Settings("rtl:card", True, "bf16", Path("replays"))
    for wrong, message in (
        ({"NEARKV_VLLM": "model", "NEARKV_VLLM_CHECK": "yes"}, "NEARKV_VLLM_CHECK='yes': must be 0 or 1"),
        ({"NEARKV_VLLM": "model", "NEARKV_VLLM_DTYPE": "fp8"}, "NEARKV_VLLM_DTYPE='fp8': must be one of"),
        ({"NEARKV_VLLM": "reference", "NEARKV_VLLM_CHECK": "1"}, "needs a device"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings.from_environment(wrong)


def test_without_the_variable_the_plugin_does_nothing(monkeypatch):
    """Whether vLLM is installed or not."""
    monkeypatch.delenv("NEARKV_VLLM", raising=False)
    register()
