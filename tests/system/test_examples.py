"""The example programs do what they say: each runs as it is, and is looked at."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def test_three_tiers():
    import three_tiers

    in_tiers, whole = three_tiers.attend()
    assert torch.equal(in_tiers, whole)


def test_needle_in_rows():
    import needle

    found = needle.rows_found()
    assert list(found) == list(needle.DEPTHS)
    assert min(found.values()) > 0.99


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("transformers")
    from nearkv import hf

    return hf.load()


class TestWithTheModel:
    @pytest.fixture(autouse=True)
    def loaded_once(self, loaded, monkeypatch):
        monkeypatch.setattr("nearkv.hf.load", lambda: loaded)

    def test_needle_in_text(self):
        import needle

        answer, tokens = needle.text_found()
        assert "71432" in answer
        assert tokens > 400

    def test_chat(self):
        """The second turn reads in its question, and not what was said before."""
        import chat

        (first, read_first), (second, read_second) = chat.chat(
            iter(["Name three colours.", "Name one more."]), max_new_tokens=12
        )
        assert first
        assert second
        assert read_second < read_first

    def test_shared_prompt(self):
        import shared_prompt

        answers, system, read = shared_prompt.serve()
        assert len(answers) == 8
        assert "Paris" in answers[0]
        assert system > 20
        assert read < 8 * system

    def test_speculative(self):
        import speculative

        plain, tokens, plain_steps, steps = speculative.compare()
        assert tokens == plain
        assert plain_steps == len(plain)
        assert steps < 0.7 * plain_steps
