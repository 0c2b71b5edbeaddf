"""What of the data a model is given: columns, labels by their names, tables of `datasets`, padding."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining, BertForQuestionAnswering, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from halfstep.errors import ConfigError, DataError
from halfstep.trainer.collators import DecoderInputs, PaddingCollator, collator_for, padded_labels
from halfstep.trainer.columns import is_table, label_names_of, lengths_of, taken_columns, without_unused
from halfstep.trainer.data import default_data_collator

datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
TINY = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0))


class Plain(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class Anything(nn.Module):
    def forward(self, **columns: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (gpt2, ("labels",)),
        (t5, ("labels",)),
        (lambda: BertForPreTraining(TINY), ("labels", "next_sentence_label")),
        (lambda: BertForQuestionAnswering(TINY), ("start_positions", "end_positions")),
        (Plain, ("labels",)),
        (Anything, ("labels",)),
    ],
)
def test_labels_are_known_by_the_models_forward(make: Any, names: tuple[str, ...]) -> None:
    assert label_names_of(make()) == names


def test_a_transformers_model_takes_what_it_names_although_it_hands_on_keywords() -> None:
    taken = taken_columns(gpt2(), ("labels",))
    assert taken is not None
    assert {"input_ids", "attention_mask", "labels", "label"} < taken
    assert not {"idx", "text"} & taken
    assert taken_columns(Anything(), ("labels",)) is None
    assert taken_columns(Plain(), ("y",)) == {"x", "mask", "y", "labels", "label", "label_ids"}


def table(**more: Any) -> Any:
    return datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1], "text": ["a", "b"], "idx": [7, 8], **more})


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_unused_columns_of_a_table_are_not_read_and_its_format_stays(form: str | None) -> None:
    data = without_unused(table().with_format(form), taken_columns(Plain(), ("labels",)))
    assert sorted(data.column_names) == ["label", "x"]
    assert data.format["type"] == form
    batch = default_data_collator([data[i] for i in range(2)])
    assert {k: v.tolist() for k, v in batch.items()} == {"x": [[1.0, 2.0], [3.0, 4.0]], "labels": [0, 1]}
    assert batch["x"].dtype == torch.float32


def test_tables_that_a_transform_reads_and_other_data_are_left_whole() -> None:
    taken = taken_columns(Plain(), ("labels",))
    made = table().with_transform(lambda rows: {"x": [np.float32(i) for i in rows["idx"]]})
    assert without_unused(made, taken) is made
    rows = [{"x": 1, "idx": 2}]
    assert without_unused(rows, taken) is rows
    foreign = datasets.Dataset.from_dict({"y": [1]})
    assert without_unused(foreign, taken).column_names == ["y"]  # the collator names what it found
    assert without_unused(table(), None).column_names == ["x", "label", "text", "idx"]
    assert not is_table(table().to_iterable_dataset())


@pytest.mark.parametrize("form", [None, "torch"])
def test_lengths_of_a_table_come_from_a_column_or_its_inputs(form: str | None) -> None:
    data = table(input_ids=[[1, 2, 3], [4]], length=[5, 6]).with_format(form)
    assert lengths_of(data, "length") == [5, 6]
    assert lengths_of(data, "none") == [3, 1]
    with pytest.raises(DataError, match=r"it has x, label, text, idx"):
        lengths_of(table(), "length")


class Tokenizer:
    """The part of a tokenizer that padding asks."""

    model_input_names = ("input_ids", "attention_mask")
    pad_token: str | None = "[PAD]"
    padding_side = "right"

    def pad(self, rows: list[dict[str, list[int]]], return_tensors: str) -> dict[str, Tensor]:
        longest = max(len(r["input_ids"]) for r in rows)
        fill = {"input_ids": 9, "attention_mask": 0}
        grown = {k: [self._fill(list(r[k]), [fill[k]] * (longest - len(r[k]))) for r in rows] for k in rows[0]}
        return {k: torch.tensor(v) for k, v in grown.items()}

    def _fill(self, row: list[int], more: list[int]) -> list[int]:
        return more + row if self.padding_side == "left" else row + more


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    base = {"input_ids": [[1, 2, 3], [4]], "attention_mask": [[1, 1, 1], [1]], "text": ["a", "b"], **columns}
    return [dict(zip(base, values, strict=True)) for values in zip(*base.values(), strict=True)]


@pytest.mark.parametrize("side", ["right", "left"])
def test_samples_are_padded_and_so_are_sequences_of_labels(side: str) -> None:
    tool = Tokenizer()
    tool.padding_side = side
    batch = collator_for(tool)(rows(label=[[5, 6, 7], [8]], weight=[0.5, 0.25]))
    right = side == "right"
    assert {k: v.tolist() for k, v in batch.items()} == {
        "input_ids": [[1, 2, 3], [4, 9, 9] if right else [9, 9, 4]],
        "attention_mask": [[1, 1, 1], [1, 0, 0] if right else [0, 0, 1]],
        "labels": [[5, 6, 7], [8, -100, -100] if right else [-100, -100, 8]],
        "weight": [0.5, 0.25],
    }
    classes = PaddingCollator(tool)(rows(label=[1, 0]))
    assert classes["labels"].tolist() == [1, 0]


def test_a_tokenizer_without_a_padding_token_serves_samples_of_one_length() -> None:
    tool = Tokenizer()
    tool.pad_token = None
    same = [{"input_ids": [1, 2], "labels": 0}, {"input_ids": [3, 4], "labels": 1}]
    assert PaddingCollator(tool)(same)["input_ids"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ConfigError, match=r"differ in length, and this Tokenizer has no padding token. Set one"):
        PaddingCollator(tool)(rows())
    assert collator_for(object()) is default_data_collator


def test_other_columns_of_differing_lengths_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"the column 'spans' cannot be stacked"):
        PaddingCollator(Tokenizer())(rows(spans=[[1], [1, 2]]))
    with pytest.raises(DataError, match=r"labels of a batch have shapes \(2, 2\), \(1, 3\)"):
        padded_labels([torch.zeros(2, 2), torch.zeros(1, 3)])


def test_a_decoder_gets_its_inputs_when_its_loss_is_another() -> None:
    collate = DecoderInputs(default_data_collator, t5())
    features = [{"input_ids": [3, 4], "labels": [5, 6]}]
    assert collate(features)["decoder_input_ids"].tolist() == [[0, 5]]
    given = collate([{**features[0], "decoder_input_ids": [7, 7]}])
    assert given["decoder_input_ids"].tolist() == [[7, 7]]
    assert "decoder_input_ids" not in DecoderInputs(default_data_collator, gpt2())(features)
