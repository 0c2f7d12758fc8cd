"""The tool that runs transformers' generation tests on a device: what it selects, patches and concludes."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import transformers_tests as tool

MIXIN = """
import torch


class GenerationTesterMixin:
    def test_tokens(self):
        assert self.run().shape == (1, 5)

    def test_class_of_cache(self):
        from transformers import DynamicCache

        assert isinstance(self.run(return_dict_in_generate=True).past_key_values, DynamicCache)

    def test_fails_anyway(self):
        assert False, "as it is"

    def run(self, **options):
        ids = torch.tensor([[1, 2, 3]])
        mask = torch.ones_like(ids)
        return self.model().generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, **options)
"""
MODEL = """
import transformers
from tests.generation.test_utils import GenerationTesterMixin


class TestTiny(GenerationTesterMixin):
    def model(self):
        sizes = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        heads = dict(num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
        config = transformers.LlamaConfig(**sizes, **heads)
        return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")

    def test_of_no_mixin(self):
        assert False
"""


def test_a_checkout(tmp_path, capfd):
    for name, text in (
        ("tests/__init__.py", ""),
        ("tests/generation/__init__.py", ""),
        ("tests/generation/test_utils.py", MIXIN),
        ("tests/models/__init__.py", ""),
        ("tests/models/tiny/__init__.py", ""),
        ("tests/models/tiny/test_modeling_tiny.py", MODEL),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert tool.main([str(tmp_path), "tiny"]) == 1
    said = capfd.readouterr().out
    assert "1 of 2 tests that pass with eager attention pass on the device (50.0%)" in said
    assert "test_class_of_cache: failed: " in said
    assert "of_no_mixin" not in said


def test_what_is_enough():
    eager = {str(number): ("passed", "") for number in range(10)} | {
        "x": ("failed", ""),
        "y": ("skipped", ""),
    }
    assert tool.compared(eager, {**eager, "3": ("failed", "why")}) == (
        ["9 of 10 tests that pass with eager attention pass on the device (90.0%)", "  3: failed: why"],
        True,
    )
    assert not tool.compared(eager, {str(number): ("passed", "") for number in range(8)})[1]
    assert not tool.compared({"x": ("failed", "")}, {})[1]


def test_what_is_no_checkout(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path), "llama"])
    assert "has no tests/models/llama/test_modeling_llama.py" in capsys.readouterr().err
