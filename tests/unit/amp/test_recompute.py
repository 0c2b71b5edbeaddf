"""Gradient checkpointing changes memory and time, and no number."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from halfstep import Accelerator
from halfstep.amp.recompute import recompute_blocks, repeated_blocks
from halfstep.errors import ConfigError

PRECISIONS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean", "bf16-true", "fp16-true"]
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class Block(nn.Module):
    """Dropout and running statistics: what a second forward pass must not repeat."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.drop(torch.relu(self.norm(self.inner(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(8, 16), nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = torch.nn.functional.one_hot(input_ids % 8, 8).float().mean(1)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return {"loss": nn.functional.mse_loss(self.head(x).squeeze(-1), labels.float())}


def stack() -> nn.Module:
    return Stack()


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=16))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=16))


def batch(model: nn.Module, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(2, 32, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids if "LM" in type(model).__name__ else ids[:, 0] % 2}


def trained(make: object, precision: str, settings: dict | None, steps: int = 3) -> tuple[list[Tensor], nn.Module]:
    """Losses, gradients of each step, and the state and the random state at the end."""
    torch.manual_seed(0)
    model = make().train()  # type: ignore[operator]
    if hasattr(model, "config"):
        model.config.use_cache = False  # keys and values of a cache lie otherwise in memory, and products round otherwise
    accelerator = Accelerator(precision=precision, cpu=True)
    handle = recompute_blocks(model, settings) if settings is not None and settings.pop("first", False) else None
    accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if settings is not None and handle is None:
        handle = recompute_blocks(model, settings)
    found = []
    for step in range(steps):
        loss = model(**batch(model, step))["loss"]
        accelerator.backward(loss)
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        assert optimizer.step().applied
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return [*found, *model.state_dict().values(), torch.get_rng_state()], model


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [stack, bert, gpt2, llama])
def test_losses_gradients_buffers_and_random_states_are_those_without(make: object, precision: str) -> None:
    plain, _ = trained(make, precision, None)
    again, model = trained(make, precision, {})
    assert same(plain, again)
    assert not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-lean"])
def test_a_model_may_be_wrapped_before_it_is_bound(precision: str) -> None:
    assert same(trained(stack, precision, None)[0], trained(stack, precision, {"first": True})[0])


CONTEXTS = {"context_fn": lambda: (nullcontext(), nullcontext())}


@pytest.mark.parametrize("settings", [{}, {"use_reentrant": True}, CONTEXTS], ids=["default", "reentrant", "contexts"])
def test_statistics_move_once_in_a_step_also_of_norms_that_train_later(settings: dict) -> None:
    def statistics(again: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        if again:
            recompute_blocks(model, settings)
        for training in (False, True, True, False):
            for block in model:
                block.norm.train(training)
            model(torch.randn(4, 16, requires_grad=True)).square().mean().backward()
        return list(model.buffers())

    plain = statistics(again=False)
    assert plain[2] == 2
    assert same(plain, statistics(again=True))


def test_blocks_run_twice_in_training_and_once_in_evaluation() -> None:
    torch.manual_seed(0)
    model = Stack()
    handle = recompute_blocks(model)
    assert handle.blocks == ("blocks.0", "blocks.1", "blocks.2")
    model(**batch(model, 0))["loss"].backward()
    assert [b.calls for b in model.blocks] == [2, 2, 2]
    model.eval()
    model(**batch(model, 0))["loss"].backward()
    assert [b.calls for b in model.blocks] == [3, 3, 3]
    with torch.no_grad():
        model.train()(**batch(model, 0))
    assert [b.calls for b in model.blocks] == [4, 4, 4]
    handle.remove()
    assert all("forward" not in vars(b) for b in model.blocks)
    model(**batch(model, 0))["loss"].backward()
    assert [b.calls for b in model.blocks] == [5, 5, 5]


def test_the_outermost_repeated_blocks_are_found() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    assert list(repeated_blocks(encoder)) == ["layers.0", "layers.1"]
    nested = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Linear(16, 1))
    assert list(repeated_blocks(nested)) == ["0", "1"]
    shared = Block()
    assert list(repeated_blocks(nn.ModuleList([shared, shared, Block()]))) == ["0", "2"]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ModuleList([Block()])])
def test_a_model_without_repeated_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"has nothing to act on: this \w+ has no ModuleList or Sequential with two or more blocks"):
        recompute_blocks(model)


def test_settings_that_torch_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'use_reentrent', which torch.utils.checkpoint does not know. Did you mean 'use_reentrant'"):
        recompute_blocks(Stack(), {"use_reentrent": False})


def test_a_transformers_model_keeps_no_cache_while_it_trains_and_its_configuration_stays() -> None:
    model = llama().train()
    handle = recompute_blocks(model)
    assert handle.blocks
    assert model(**batch(model, 0)).past_key_values is None
    assert model.config.use_cache is True
    assert model.eval()(**batch(model, 0)).past_key_values is not None
    handle.remove()
    assert model.train()(**batch(model, 0)).past_key_values is not None
    assert not model._forward_pre_hooks


def test_memory_for_activations_shrinks() -> None:
    def kept(settings: dict | None) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        if settings is not None:
            recompute_blocks(model, settings)
        held: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            held[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(torch.randn(256, 64)).sum()
        return sum(held.values())

    assert kept({}) < 0.3 * kept(None)
