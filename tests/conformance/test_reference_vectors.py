"""The contract's 60 vectors against the reference: states and finished results, bit for bit."""

import pytest
import torch
from contract_cases import OUTPUTS, code_tensor, result_codes, vectors
from nearkv.reference import finish
from nearkv_hw.abi.numerics import EXP2_TABLE, TOP_NONE
from oracle import TABLE

VECTORS = vectors()


def states(state):
    planes = (state.top.flatten().tolist(), state.high.flatten().tolist(), state.low.flatten().tolist())
    return [[None if t == TOP_NONE else t, h, x] for t, h, x in zip(*planes, strict=True)]


def test_there_are_sixty_vectors():
    assert len(VECTORS) == 60


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.case.name)
def test_vector_states(vector):
    partial = vector.case.partial()
    assert partial.query_nan.tolist() == [[vector.query_nan]]
    if vector.query_nan:
        return
    assert states(partial.denominator) == [vector.denominator]
    if vector.numerators:  # a vector without rows has no lanes
        assert states(partial.numerators) == vector.numerators


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.case.name)
def test_vector_outputs(vector, output):
    result = finish(vector.case.partial(), OUTPUTS[output], vector.case.v_scale)
    assert result.dtype == OUTPUTS[output]
    if vector.numerators:
        assert result_codes(result) == vector.outputs[output]
    else:
        assert result_codes(result) == [0]


def test_tables_of_reference_and_oracle_agree():
    assert list(EXP2_TABLE) == TABLE


def test_codes_survive_their_tensors():
    from nearkv_hw.abi.formats import BF16, INT8

    assert result_codes(code_tensor([0, 0x7FFF, 0x8000, 0xFFFF], BF16).view(torch.bfloat16)) == [
        0,
        0x7FFF,
        0x8000,
        0xFFFF,
    ]
    assert code_tensor([0, 127, 128, 255], INT8).tolist() == [0, 127, 128, 255]
