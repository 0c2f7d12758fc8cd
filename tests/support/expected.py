"""What the contract's oracle expects of a job, in the form in which `rawhost` reads results."""

import numpy as np
import oracle
from nearkv_hw.abi import OutputForm
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from rawhost import HeadResult

FLAGS = {"nan": LANE_NAN, "+inf": LANE_POSITIVE_INFINITY, "-inf": LANE_NEGATIVE_INFINITY}
FORMS = {OutputForm.FP32: "fp32", OutputForm.BF16: "bf16", OutputForm.FP16: "fp16"}


def partial(q, k, v, *, formats, factor, sink=None, query_format=None):
    """The oracle's partial of one query over rows of codes; `factor` and `sink` are float32 bits."""

    def rows(name, codes):
        return [oracle.decode_row(name, row) for row in np.asarray(codes).tolist()]

    return oracle.attend(
        oracle.decode_row(query_format or formats[0], np.asarray(q).tolist()),
        rows(formats[0], k),
        rows(formats[1], v),
        oracle.decode("fp32", factor),
        sink=None if sink is None else float(np.uint32(sink).view(np.float32)),
        value_dim=np.shape(v)[1],
    )


def head_result(state, form):
    """A partial as `rawhost.RawHost.results` gives it, in an output form."""
    if form is not OutputForm.PARTIAL:
        return HeadResult(state.query_nan, state.denominator, codes=oracle.finish(state, FORMS[form]))
    lanes = [sum(FLAGS[flag] for flag in lane) for lane in state.lanes]
    return HeadResult(state.query_nan, state.denominator, numerators=list(state.numerators), lane_flags=lanes)


def assert_equal(got, state, form):
    """A query head's result equals the oracle's; where the query is NaN, sums and flags have no meaning."""
    want = head_result(state, form)
    assert got.query_nan == want.query_nan
    assert got.codes == want.codes
    if not want.query_nan:
        assert got == want
