"""The policy of a bound model, seen from everywhere: other threads, recomputed activations, `generate`, and submodules called alone."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.amp.mode import inside
from halfstep.errors import ConfigError
from halfstep.policy import parse

CPU = torch.device("cpu")
POLICIES = ["bf16-mixed", "fp16-mixed", "bf16-mixed,output=compute", "bf16-mixed,fp32=head", "bf16-mixed,fp32_ops=gelu", "bf16-mixed,ops=device"]


class Block(nn.Module):
    """Products, an op of the fp32 list, one that follows its operand, and an island of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((torch.is_autocast_enabled("cpu"), inside.policy))
        h = self.norm(F.gelu(self.up(x)))
        with amp.autocast("cpu", enabled=False):
            h = self.down(h * h)
        assert h.dtype == torch.float32
        return x + F.softmax(self.up(h), -1)[..., :8]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.recompute: bool | None = None  # the value of use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        output: Tensor = self.head(x)
        return output


def bound(text: str) -> Model:
    torch.manual_seed(0)
    model = Model()
    amp.bind(model, parse(text), CPU)
    return model


def inputs() -> Tensor:
    return torch.linspace(-2, 2, 24).reshape(3, 8).requires_grad_()


def gradients(model: nn.Module, output: Tensor, x: Tensor) -> list[Tensor]:
    scaler = amp.GradScaler("cpu", init_scale=8.0, strategy="stock")
    model.zero_grad()
    scaler.scale(output.float().square().mean()).backward()
    return [g.clone() for g in (x.grad, *(p.grad for p in model.parameters())) if g is not None]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("text", POLICIES)
def test_another_thread_computes_the_same_bits(text: str) -> None:
    model, found = bound(text), list[Any]()

    def run() -> None:
        x = inputs()
        output = model(x)
        found.append([output.detach(), *gradients(model, output, x)])

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 2
    assert same(*found)


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_computed_again_outside_give_the_same_bits(text: str, reentrant: bool) -> None:
    """`scaler.scale(loss).backward()` stands outside any block, and the blocks run again inside it."""
    found = []
    for recompute in (None, reentrant):
        model, x = bound(text), inputs()
        model.recompute = recompute
        output = model(x)
        found.append([output.detach(), *gradients(model, output, x)])
        assert inside.policy is None
        assert (len(model.blocks[0].seen) > 1) == (recompute is not None)
        assert len(set(map(repr, model.blocks[0].seen))) == 1, "each time under the same policy"
    assert same(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_model_computed_again_gives_the_same_bits(reentrant: bool) -> None:
    found = []
    for recompute in (False, True):
        model, x = bound("bf16-mixed"), inputs()
        output = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
        found.append([output.detach(), *gradients(model, output, x)])
    assert same(*found)


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("name", ["blocks.0", "blocks.1.norm", "blocks.0.up", "head", "head.0", "head.2"])
def test_a_submodule_called_alone_computes_what_it_does_in_the_model(text: str, name: str) -> None:
    model, kept = bound(text), list[Any]()
    part = model.get_submodule(name)
    hook = part.register_forward_hook(lambda _module, args, output: kept.append((args[0].detach(), output.detach())))
    model(inputs())
    hook.remove()
    given, expected = kept[0]
    got = part(given)
    assert got.dtype == (expected.dtype if "compute" in text else torch.float32)
    assert torch.equal(got.float(), expected.float())
    assert torch.equal(part.forward(given).float(), expected.float())
    assert inside.policy is None
    assert not torch.is_autocast_enabled("cpu")


def test_a_loop_over_the_parts_is_the_model() -> None:
    model, x = bound("bf16-mixed"), inputs()
    expected = model(x)
    h = x
    for block in model.blocks:
        h = block(h)
    assert torch.equal(model.head(h), expected)


def test_a_block_of_the_users_own_inside_the_forward_pass_is_obeyed() -> None:
    class Careful(Model):
        def forward(self, x: Tensor) -> Tensor:
            with amp.autocast("cpu", enabled=False):
                output: Tensor = self.head(x)
            return output

    model = Careful()
    plain = copy.deepcopy(model)
    amp.bind(model, parse("bf16-mixed"), CPU)
    assert torch.equal(model(inputs()), plain.head(inputs()))
    assert not torch.equal(model.head(inputs()), plain.head(inputs())), "called alone it is under the policy"


@pytest.mark.parametrize("of", [nn.Linear(8, 8), Block()], ids=lambda m: type(m).__name__)
def test_a_checkpoint_inside_an_island_stays_on_it(of: nn.Module) -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = of
            self.recompute = False

        def forward(self, x: Tensor) -> Tensor:
            with amp.autocast("cpu", enabled=False):
                y: Tensor = checkpoint(self.part, x, use_reentrant=False) if self.recompute else self.part(x)
            return y

    found = []
    for recompute in (False, True):
        model, x = copy.deepcopy(Careful()), inputs()
        amp.bind(model, parse("bf16-mixed"), CPU)
        model.recompute = recompute
        output = model(x)
        found.append([output.detach(), *gradients(model, output, x)])
    assert same(*found)


def test_two_models_with_two_policies_in_each_other() -> None:
    outer, inner = bound("bf16-mixed,output=compute"), bound("fp16-mixed,output=compute")
    seen: list[torch.dtype] = []
    outer.head = nn.Identity()

    def forward(x: Tensor) -> Tensor:
        seen.append(outer.blocks[0].up(x).dtype)
        with amp.autocast("cpu", torch.bfloat16):
            seen.append(inner.head(x).dtype)
        seen.append(outer.blocks[0].up(x).dtype)
        return inner(x)

    assert forward(inputs()).dtype == torch.float16
    assert seen == [torch.bfloat16, torch.float16, torch.bfloat16]


def test_a_part_bound_to_a_policy_of_its_own_keeps_it() -> None:
    model = Model()
    binding = amp.bind(model.head, parse("fp16-mixed,output=compute"), CPU)
    amp.bind(model, parse("bf16-mixed,output=compute"), CPU)
    assert model.head(inputs()).dtype == torch.float16
    assert model(inputs()).dtype == torch.float16
    assert model.blocks[0].up(inputs()).dtype == torch.bfloat16
    binding.remove()
    assert model(inputs()).dtype == torch.bfloat16


@pytest.mark.parametrize("pattern", ["head", "head.0"])
def test_a_part_bound_to_a_policy_of_its_own_cannot_be_held_in_fp32(pattern: str) -> None:
    model = Model()
    amp.bind(model.head, parse("fp16-mixed"), CPU)
    with pytest.raises(ConfigError, match="policy of its own, fp16-mixed"):
        amp.bind(model, parse(f"bf16-mixed,fp32={pattern}"), CPU)
    assert amp.bound_policy(model) is None


def test_a_part_bound_after_the_whole_has_the_later_policy_until_it_is_removed() -> None:
    model = bound("bf16-mixed,output=compute")
    binding = amp.bind(model.head, parse("fp16-mixed,output=compute"), CPU)
    assert model.head(inputs()).dtype == model(inputs()).dtype == torch.float16
    assert model.head[0](inputs()).dtype == torch.float16
    assert model.blocks[0].up(inputs()).dtype == torch.bfloat16
    binding.remove()
    assert model.head(inputs()).dtype == model(inputs()).dtype == torch.bfloat16


def test_copies_names_states_and_removal() -> None:
    plain, model = Model(), Model()
    before = {name: set(m.__dict__) for name, m in model.named_modules()}
    binding = amp.bind(model, parse("bf16-mixed,fp32=head"), CPU)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    twin = copy.deepcopy(model)
    for part in (twin.blocks[0], twin.head, twin.head[0]):
        assert part.forward.__self__ is part
        assert torch.equal(part(inputs()), model.get_submodule(next(n for n, m in twin.named_modules() if m is part))(inputs()))
    with torch.no_grad():
        twin.head[2].weight.zero_()
        twin.head[2].bias.zero_()
    assert not twin.head(inputs()).any(), "a copy uses its own weights"
    assert model.head(inputs()).any()
    back = pickle.loads(pickle.dumps(model))  # noqa: S301  made on this line
    assert amp.bound_policy(back) is None
    assert torch.equal(back.head(inputs()), model.head(inputs())), "held in fp32, and without a policy also fp32"
    binding.remove()
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == before
    assert torch.equal(model.head[0](inputs()), F.linear(inputs(), model.head[0].weight, model.head[0].bias))


def test_an_exception_leaves_nothing_open() -> None:
    model = bound("bf16-mixed")
    for part in (model, model.blocks[0], model.head[0]):
        with pytest.raises(RuntimeError, match="shape"):
            part(torch.ones(2, 3))
        assert inside.policy is None
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_generate_checkpointing_and_parts(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 17, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
        kind: Callable[..., Any] = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **sizes)
        kind = transformers.LlamaForCausalLM
    torch.manual_seed(0)
    model = kind(config)
    plain = copy.deepcopy(model)
    amp.bind(model, parse("bf16-mixed"), CPU)
    ids = torch.arange(12).reshape(2, 6)

    with amp.autocast("cpu", torch.bfloat16):
        expected = plain.eval().generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    got = model.eval().generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(a, b.float()) for a, b in zip(got.logits, expected.logits, strict=True))

    layers = model.transformer.h if name == "gpt2" else model.model.layers
    kept: list[Any] = []
    hook = layers[0].register_forward_hook(lambda _m, args, kwargs, output: kept.append((args, kwargs, output)), with_kwargs=True)
    model(input_ids=ids, use_cache=False)
    hook.remove()
    args, kwargs, output = kept[0]
    again = layers[0](*args, **kwargs)
    again, output = (v[0] if isinstance(v, tuple) else v for v in (again, output))
    assert torch.equal(again, output.float())

    found = []
    for recompute in (None, False, True):
        model.train()
        model.activation_checkpointing_disable()
        if recompute is not None:
            model.activation_checkpointing_enable({"use_reentrant": recompute})
            model.enable_input_require_grads()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        found.append([loss.detach(), *gradients(model, loss, ids)])
    assert same(found[1], found[0])
    assert same(found[2], found[0])
