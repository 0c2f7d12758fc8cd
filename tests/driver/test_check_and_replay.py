"""Checks that find a wrong bit, and replay files that show where it came from."""

import json

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import TamperingPort, context, filled, same_bits, values
from nearkv import check, replay
from nearkv.cli import app
from nearkv.device import Device
from nearkv.errors import ArgumentError, MismatchError
from nearkv.quantise import PRESETS, quantise
from nearkv_sim.port import Poll, Write
from typer.testing import CliRunner

SCALE = 0.4


def call(device: Device, directory, *, dtype=torch.float16, out_dtype=torch.float32, sinks=None):
    """Two sequences of different lengths, attended and checked."""
    contexts = [context(n, 2, 16, 24, seed=n, dtype=dtype) for n in (20, 9)]
    q = values(2, 4, 16, seed=3, dtype=dtype)
    ranges = [(2, 20), (0, 9)]
    kv = device.kv_cache(layers=1, kv_heads=2, head_dim=16, value_dim=24, dtype=dtype, page_rows=8)
    handles = filled(kv, contexts)
    out = kv.attend(handles, layer=0, q=q, scale=SCALE, rows=ranges, sinks=sinks, out_dtype=out_dtype)
    case = check.case_of(
        kv, q=q, contexts=contexts, scale=SCALE, ranges=ranges, sinks=sinks, out_dtype=out_dtype
    )
    return case, out, check.attention(kv, handles, layer=0, case=case, result=out, directory=directory)


def flip_a_result(program, results):
    """One bit of the first lane that an attention call's last read brings."""
    if any(isinstance(operation, Poll) for operation in program) and len(results) > 3:
        results[-1].data[0, 0] ^= 1
    return results


class SpoiledRow(TamperingPort):
    """A device whose memory keeps one bit of a K row wrong: where a line with this content is written."""

    def __init__(self, content: bytes) -> None:
        super().__init__(lambda program, results: results)
        self._content = content

    def run(self, program):
        changed = []
        for operation in program:
            if isinstance(operation, Write):
                data = operation.data.copy()
                for line in data:
                    at = line.tobytes().find(self._content)
                    if at >= 0:
                        line[at + 1] ^= 0x10
                operation = Write(operation.addresses, data, operation.enables)
            changed.append(operation)
        return super().run(changed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_equal_bits_leave_no_file(model, tmp_path, dtype, out_dtype):
    _, _, verdict = call(
        model, tmp_path, dtype=dtype, out_dtype=out_dtype, sinks=torch.tensor([0.5, 1, -1, 2])
    )
    assert verdict == check.Verdict(True, 0, 2 * 4 * 24)
    verdict.require()
    assert list(tmp_path.iterdir()) == []


def test_one_wrong_bit_is_found_and_written(tmp_path):
    case, out, verdict = call(Device(TamperingPort(flip_a_result)), tmp_path / "deep" / "folder")
    assert (verdict.equal, verdict.unequal, verdict.lanes) == (False, 1, 192)
    assert verdict.replay == tmp_path / "deep" / "folder" / "unequal-1.npz"
    with pytest.raises(MismatchError, match=r"1 of 192 lanes differ.*nearkv replay .*unequal-1.npz"):
        verdict.require()
    read, recorded = replay.load(verdict.replay)
    assert same_bits(recorded, out)
    for name in ("q", "k", "v"):
        assert same_bits(getattr(read, name), getattr(case, name))
    for name in ("lengths", "ranges", "scale", "sinks", "out_dtype", "page_rows", "device", "config"):
        assert getattr(read, name) == getattr(case, name)
    with np.load(verdict.replay) as archive:
        for owner in ("device", "reference"):
            assert archive[f"{owner}_numerators_high"].shape == (2, 4, 24)
            assert archive[f"{owner}_denominator_top"].shape == (2, 4)
    assert (
        call(Device(TamperingPort(flip_a_result)), tmp_path / "deep" / "folder")[2].replay.name
        == "unequal-2.npz"
    )


def test_replaying_on_a_sound_device_says_equal(tmp_path):
    _, _, verdict = call(Device(TamperingPort(flip_a_result)), tmp_path, sinks=torch.zeros(4))
    result = CliRunner().invoke(app, ["replay", str(verdict.replay), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {
        "file": str(verdict.replay), "device": "model", "equal": True, "recorded_equal": False,
        "lanes": 192, "unequal": 0, "stages": [],
    }  # fmt: skip
    shown = CliRunner().invoke(app, ["replay", str(verdict.replay), "--device", "model:card"])
    assert shown.exit_code == 0
    assert "differs from the reference" in shown.output
    assert "equal: all 192 lanes" in shown.output


def test_replaying_on_the_faulty_device_names_the_stage(tmp_path):
    """Here the partial is spoiled like the result is: by one bit of a numerator's top bin."""
    port = TamperingPort(flip_a_result)
    _, _, verdict = call(Device(port), tmp_path)
    outcome = replay.replay(*replay.load(verdict.replay), Device(port))
    assert (outcome.equal, outcome.recorded_equal, outcome.unequal) == (False, False, 1)
    assert outcome.stages[0].stage == "all rows numerators: 1 lanes, first 0"
    assert outcome.stages[-1].stage == "row 2 numerators: 1 lanes, first 0"
    assert outcome.stages[-2].stage == "row 2 weight"
    assert outcome.stages[-2].device == outcome.stages[-2].reference


def test_replaying_finds_the_row_whose_k_is_wrong(tmp_path):
    k, _ = context(20, 2, 16, 24, seed=20)
    port = SpoiledRow(k[13, 1].view(torch.int16).numpy().tobytes())
    _, _, verdict = call(Device(port), tmp_path)
    assert verdict.unequal
    outcome = replay.replay(*replay.load(verdict.replay), Device(port))
    stages = {stage.stage: stage for stage in outcome.stages}
    assert (stages["row 13 weight"].sequence, stages["row 13 weight"].q_head) == (0, 2)
    assert stages["row 13 weight"].device != stages["row 13 weight"].reference
    assert "row 13 denominator" in stages
    assert "all rows denominator" in stages


def test_weights_read_from_a_partial():
    """A row of score 0 weighs 2^17 * 2^-17; one of weight 2^-40 lies in another bin."""
    with (
        nearkv.open("model") as device,
        device.kv_cache(layers=1, kv_heads=1, head_dim=1, dtype="fp16") as kv,
    ):
        (handle,) = filled(kv, [(torch.ones(1, 1, 1).half(), torch.ones(1, 1, 1).half())])
        for score in (0, -40, 200):
            q = torch.tensor([[[float(score)]]]).half()
            partial = kv.attend([handle], layer=0, q=q, scale=float(np.log(2)), partial=True)
            weight = replay._weight(partial.denominator, 0)
            assert weight.score == pytest.approx(score, abs=1e-4)
            assert weight.significand.bit_length() == 18


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file.npz"
    if content is None:
        np.savez(path, about=np.array(json.dumps({"version": 99})))
    else:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match="is no replay file" if content is not None else "version 99"):
        replay.load(path)


def test_contexts_must_fit_the_queries(model):
    kv = model.kv_cache(layers=1, kv_heads=1, head_dim=8)
    with pytest.raises(ArgumentError, match="q is of 2 sequences, contexts are 1"):
        check.case_of(kv, q=values(2, 1, 8, seed=1), contexts=[context(1, 1, 8, 8, seed=1)], scale=1.0)


@pytest.mark.parametrize("name", ["fp8", "q8_0", "nvfp4"])
def test_calls_over_quantised_rows_are_replayed(tmp_path, name):
    """A replay file holds codes, scales, the format and the scales of heads."""
    device = Device(TamperingPort(flip_a_result))
    k, v, q = values(20, 2, 32, seed=1), values(20, 2, 24, seed=2), values(1, 4, 32, seed=3)
    kv = device.kv_cache(layers=1, kv_heads=2, head_dim=32, value_dim=24, dtype=name, page_rows=8)
    (handle,) = filled(kv, [(k, v)])
    rows = quantise(k, PRESETS[name].k), quantise(v, PRESETS[name].k)
    heads = {f"{part}_scale": own.head_scale for part, own in zip("kv", rows, strict=True)}
    out = kv.attend([handle], layer=0, q=q, scale=SCALE)
    case = check.case_of(
        kv, q=q, contexts=[tuple(own.codes for own in rows)], scale=SCALE,
        scales=[tuple(own.scales for own in rows)],
        heads={part: scale for part, scale in heads.items() if scale is not None},
    )  # fmt: skip
    verdict = check.attention(kv, [handle], layer=0, case=case, result=out, directory=tmp_path)
    assert verdict.unequal == 1
    read, _ = replay.load(verdict.replay)
    assert read.form == PRESETS[name]
    assert same_bits(read.reference(), case.reference())
    with nearkv.open("model") as sound:
        outcome = replay.replay(*replay.load(verdict.replay), sound)
    assert (outcome.equal, outcome.recorded_equal) == (True, False)
    port = TamperingPort(flip_a_result)
    assert replay.replay(*replay.load(verdict.replay), Device(port)).stages
