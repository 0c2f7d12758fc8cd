"""The contract's vectors through the model device: raw descriptors in, states and codes out."""

import json
from pathlib import Path

import numpy as np
import pytest
from nearkv_hw.abi import OutputForm
from rawhost import RawHost, factor_bits, float_bits

DATA = Path(__file__).parents[2] / "conformance" / "data" / "contract.json"
DEVICE_FORMATS = ("bf16", "fp16")
VECTORS = [
    vector
    for vector in json.loads(DATA.read_text())
    if vector["k_format"] in DEVICE_FORMATS and vector["v_format"] in DEVICE_FORMATS
]


def state(vector_state):
    return tuple(vector_state)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vector(open_port, vector):
    host = RawHost(open_port(capacity_bytes=64 << 20))
    value_dim = len(vector["out"]["fp32"]) or 1  # a vector without rows has no lanes; a job has
    k = np.array(vector["k"], dtype=np.uint16).reshape(-1, len(vector["q"]))
    v = np.array(vector["v"], dtype=np.uint16).reshape(-1, value_dim)
    visible = np.array(vector["visible"] or [True] * len(k), dtype=bool)
    shown = np.flatnonzero(visible)
    # A device sees a range of rows; of a mask that is none, it gets the visible rows alone.
    begin, end = (shown[0], shown[-1] + 1) if len(shown) else (0, 0)
    if not visible[begin:end].all():
        k, v, begin, end = k[visible], v[visible], 0, len(shown)
    table = host.table([k], [v], page_rows=4, formats=(vector["k_format"], vector["v_format"]))
    sinks = None if vector["sink"] is None else [float_bits(float(vector["sink"]))]

    def run(form):
        job = host.job(
            table,
            np.array([vector["q"]], dtype=np.uint16),
            factor=factor_bits(vector["scale"]),
            form=form,
            begin=int(begin),
            end=int(end),
            sinks=sinks,
            query_format=vector["q_format"],
        )
        return host.attend(job)[0]

    partial = run(OutputForm.PARTIAL)
    assert partial.query_nan == vector["query_nan"]
    if not vector["query_nan"]:
        assert partial.denominator == state(vector["denominator"])
        if vector["numerators"]:
            assert partial.numerators == [state(lane) for lane in vector["numerators"]]
    for form, name in ((OutputForm.FP32, "fp32"), (OutputForm.BF16, "bf16"), (OutputForm.FP16, "fp16")):
        finished = run(form)
        assert finished.codes == (vector["out"][name] or [0])
        assert finished.query_nan == partial.query_nan
        if not vector["query_nan"]:
            assert finished.denominator == partial.denominator


def test_every_vector_of_the_formats_is_here():
    assert len(VECTORS) == 44
