"""The demo GPT: shapes, loss, tied weights, causality, generation and the configurations it refuses."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.demo import GPT, GPTConfig
from halfstep.errors import ConfigError


def gpt(**shape) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{"block_size": 16, "layers": 1, "heads": 2, "width": 16, **shape}))


def ids(batch: int, positions: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, positions), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 16), st.integers(1, 2), st.sampled_from([(1, 8), (2, 8), (4, 16)]))
def test_shapes(batch: int, positions: int, layers: int, heads_width: tuple[int, int]) -> None:
    model = gpt(layers=layers, heads=heads_width[0], width=heads_width[1])
    assert model(ids(batch, positions))["logits"].shape == (batch, positions, 256)
    assert set(model(ids(batch, positions))) == {"logits"}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.lists(st.integers(1, 9), max_size=5))
def test_the_loss_is_the_cross_entropy_of_each_byte_given_those_before(seed: int, left_out: list[int]) -> None:
    model, x = gpt(), ids(3, 10, seed)
    labels = x.clone()
    labels[1, left_out] = -100
    outputs = model(x, labels)
    logs = outputs["logits"].double().log_softmax(-1)
    terms = [-logs[b, t, x[b, t + 1]] for b in range(3) for t in range(9) if labels[b, t + 1] != -100]
    assert outputs["loss"].item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-6)


def test_a_new_model_knows_nothing() -> None:
    model = gpt(layers=2, width=64, heads=4)
    assert model(ids(4, 16), ids(4, 16))["loss"].item() == pytest.approx(math.log(256), rel=0.01)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 15), st.integers(0, 99))
def test_a_later_byte_changes_no_earlier_prediction(place: int, seed: int) -> None:
    model = gpt(layers=2).eval()
    x = ids(2, 16, seed)
    other = x.clone()
    other[:, place:] = (other[:, place:] + 1 + seed) % 256
    before, after = model(x)["logits"], model(other)["logits"]
    assert torch.allclose(before[:, :place], after[:, :place], atol=1e-6)
    assert not torch.allclose(before[:, place:], after[:, place:], atol=1e-3), "and later ones do change"


def test_every_byte_can_look_back_to_the_first() -> None:
    model = gpt().eval()
    x = ids(1, 16)
    other = x.clone()
    other[0, 0] = (other[0, 0] + 1) % 256
    assert not torch.equal(model(x)["logits"][0, -1], model(other)["logits"][0, -1])


def test_input_and_output_embeddings_are_one_tensor_also_after_a_copy_and_in_the_gradient() -> None:
    model = gpt()
    twin = copy.deepcopy(model)
    for m in (model, twin):
        assert m.head.weight is m.bytes.weight
    model(ids(2, 8), ids(2, 8))["loss"].backward()
    assert model.head.weight.grad is model.bytes.weight.grad
    unused = sorted(set(range(256)) - set(ids(2, 8).flatten().tolist()))
    assert model.bytes.weight.grad[unused].any(), "the output side reaches every byte"


@pytest.mark.parametrize("shape", [{}, {"layers": 2}, {"width": 32}, {"block_size": 8}])
def test_the_count_of_parameters_is_that_of_the_formula(shape: dict) -> None:
    model = gpt(**shape)
    c = model.shape
    block = 12 * c.width**2 + 13 * c.width
    assert model.parameters_count == 256 * c.width + c.block_size * c.width + c.layers * block + 2 * c.width


def test_dropout_acts_in_training_only() -> None:
    model, x = gpt(dropout=0.5), ids(2, 8)
    assert not torch.equal(model(x)["logits"], model(x)["logits"])
    model.eval()
    assert torch.equal(model(x)["logits"], model(x)["logits"])


# --- generation -----------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.binary(min_size=1, max_size=20), st.integers(0, 6), st.integers(0, 9))
def test_generation_continues_the_prompt_and_is_a_function_of_the_seed(prompt: bytes, length: int, seed: int) -> None:
    model = gpt()
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    text = model.generate(prompt, length, seed=seed)
    assert torch.equal(torch.get_rng_state(), before), "it draws from a generator of its own"
    assert text.startswith(prompt)
    assert len(text) == len(prompt) + length
    assert model.generate(prompt, length, seed=seed) == text


def test_other_seeds_give_other_texts_and_the_mode_is_put_back() -> None:
    model = gpt(dropout=0.5)
    assert model.generate(b"a", 20, seed=1) != model.generate(b"a", 20, seed=2)
    for mode in (True, False):
        model.train(mode)
        model.generate(b"a", 1)
        assert model.training is mode
    assert all(p.grad is None for p in model.parameters())


def test_a_low_temperature_takes_the_likeliest_byte() -> None:
    model = gpt()
    text = model.generate(b"abc", 5, temperature=1e-4)
    model.eval()
    for i in range(3, 8):
        assert text[i] == int(model(torch.tensor([list(text[:i])]))["logits"][0, -1].argmax())


def test_an_empty_prompt_is_begun_from_nothing_or_refused() -> None:
    try:
        text = gpt().generate(b"", 3)
    except ConfigError as error:
        assert "prompt" in error.cause  # noqa: PT017  one of two right answers
    else:
        assert len(text) == 3


# --- configurations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["block_size", "layers", "heads", "width"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value}\. Use 1 or more"):
        GPTConfig(**{name: value})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8))
def test_a_width_is_taken_exactly_when_the_heads_can_share_it(width: int, heads: int) -> None:
    if width % heads == 0:
        assert GPTConfig(width=width, heads=heads).width == width
        return
    with pytest.raises(ConfigError, match=rf"width={width} cannot be shared by heads={heads}. Use a width that is a multiple of the heads"):
        GPTConfig(width=width, heads=heads)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 2.0, math.nan])
def test_a_dropout_that_is_no_share_is_refused(dropout: float) -> None:
    with pytest.raises(ConfigError, match=r"dropout=.*Use a share of 0 or more and below 1"):
        GPTConfig(dropout=dropout)


def test_a_block_of_one_byte_has_nothing_to_predict_and_is_refused() -> None:
    """Its loss would be the mean of nothing, which is NaN."""
    with pytest.raises(ConfigError, match="block_size=1"):
        GPTConfig(block_size=1)


def test_the_loss_is_fp32_under_autocast() -> None:
    model = gpt()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(ids(2, 8), ids(2, 8))
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["loss"].dtype == torch.float32
    expected = F.cross_entropy(outputs["logits"][:, :-1].float().reshape(-1, 256), ids(2, 8)[:, 1:].reshape(-1))
    assert torch.allclose(outputs["loss"], expected)


def test_generation_reads_only_positions_that_were_trained_to_predict() -> None:
    """Labels are shifted inside a block, so its last position never learns to predict; a window must not end there."""
    model, lengths = gpt(), list[int]()
    handle = model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    model.generate(b"ab", 3 * model.shape.block_size)
    handle.remove()
    assert max(lengths) == model.shape.block_size - 1
