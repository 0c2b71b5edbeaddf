"""Losses and predictions are found in whatever a model returns; batches are joined; labels are checked."""

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep import EvalPrediction
from halfstep.errors import ConfigError, DataError
from halfstep.trainer.outputs import check_labels, join, loss_of, predictions_of, to_numpy

LOSS, LOGITS = torch.tensor(2.5), torch.ones(3, 2)
Pair = namedtuple("Pair", "loss logits")


@pytest.mark.parametrize(
    "outputs",
    [
        LOSS,
        {"loss": LOSS, "logits": LOGITS},
        {"loss": LOSS.reshape(1)},
        OrderedDict(logits=LOGITS, loss=LOSS),
        SimpleNamespace(loss=LOSS, logits=LOGITS),
        Pair(LOSS, LOGITS),
        (LOSS, LOGITS),
        [LOSS],
    ],
)
def test_the_loss_is_found(outputs: object) -> None:
    assert loss_of(outputs).shape == ()
    assert float(loss_of(outputs)) == 2.5


@pytest.mark.parametrize(
    ("outputs", "what"),
    [
        (LOGITS, "a tensor of shape (3, 2)"),
        ({"logits": LOGITS, "state": None}, "a mapping of logits, state"),
        ({}, "a mapping of "),
        ((LOGITS, LOSS), "a tuple"),
        (None, "a NoneType"),
        (3.0, "a float"),
        ({"loss": None}, "a mapping of loss"),
    ],
)
def test_outputs_without_a_loss_are_described_with_what_to_do(outputs: object, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loss_of(outputs)
    assert caught.value.cause == f"the model returned {what}, with no loss in it"
    assert "'labels' column" in caught.value.remedy
    assert "compute_loss_func=f" in caught.value.remedy


def test_a_loss_that_is_not_reduced_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model's loss has shape \(3,\). Return its mean, a scalar"):
        loss_of({"loss": torch.ones(3)})


@pytest.mark.parametrize(
    "outputs",
    [LOGITS, {"loss": LOSS, "logits": LOGITS, "cache": (1, 2)}, (LOSS, LOGITS), Pair(LOSS, LOGITS), SimpleNamespace(loss=LOSS, logits=LOGITS)],
)
def test_predictions_are_what_is_not_the_loss(outputs: object) -> None:
    found = predictions_of(outputs, ())
    assert found is LOGITS


def test_several_predictions_are_a_tuple_and_ignored_ones_are_left_out() -> None:
    outputs = {"loss": LOSS, "start": LOGITS, "end": LOGITS + 1, "hidden": LOGITS}
    assert len(predictions_of(outputs, ("hidden",))) == 2
    assert predictions_of(outputs, ("hidden", "end")) is LOGITS
    assert predictions_of({"loss": LOSS}, ()) is None
    assert predictions_of(LOSS, ()) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_batches_join_to_what_they_were_cut_from(lengths: list[int], width: int) -> None:
    whole = torch.randn(sum(lengths), width)
    parts = [to_numpy(p) for p in whole.split(lengths)]
    assert np.array_equal(join(parts), whole.numpy())
    pairs = [(p, p + 1) for p in parts]
    assert [np.array_equal(a, b) for a, b in zip(join(pairs), (whole.numpy(), whole.numpy() + 1), strict=True)] == [True, True]


def test_batches_of_other_widths_are_padded_with_what_metrics_leave_out() -> None:
    joined = join([np.ones((1, 2), dtype=np.int64), np.ones((2, 3), dtype=np.int64)])
    assert joined.tolist() == [[1, 1, -100], [1, 1, 1], [1, 1, 1]]
    assert join([]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_predictions_become_fp32_without_a_change_of_value(dtype: torch.dtype) -> None:
    values = torch.randn(5).to(dtype).requires_grad_()
    assert to_numpy(values).dtype == np.float32
    assert to_numpy(values).tolist() == values.tolist()


def test_a_prediction_unpacks() -> None:
    pair = EvalPrediction(np.zeros(1), np.ones(2))
    predictions, labels = pair
    assert predictions is pair.predictions is pair[0]
    assert labels is pair.label_ids is pair[1]


def classifier(classes: int) -> nn.Module:
    net = nn.Linear(1, 1)
    net.config = SimpleNamespace(num_labels=classes)
    return net


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(-3, 7) | st.just(-100), min_size=1, max_size=4))
def test_labels_are_refused_exactly_when_one_is_no_class(classes: int, labels: list[int]) -> None:
    used = [v for v in labels if v != -100]
    if all(0 <= v < classes for v in used):
        check_labels(classifier(classes), torch.tensor(labels))
        return
    with pytest.raises(DataError) as caught:
        check_labels(classifier(classes), torch.tensor(labels))
    assert caught.value.cause == (
        f"the labels of this batch run from {min(used)} to {max(used)}, and the model has {classes} classes, 0 to {classes - 1}"
    )
    assert "Number the classes from 0" in caught.value.remedy
    assert "num_labels" in caught.value.remedy


@pytest.mark.parametrize("labels", [None, torch.tensor([9.5]), torch.tensor([[9, 9]]), "text"])
def test_other_tasks_are_left_to_the_loss(labels: object) -> None:
    check_labels(classifier(2), labels)
    check_labels(classifier(1), torch.tensor([9]))
    check_labels(nn.Linear(1, 1), torch.tensor([9]))
