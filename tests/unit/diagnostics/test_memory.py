"""`memory`: what a step takes is told from shapes, and is what a real step is seen to take."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.amp import bind, chunk_loss
from halfstep.amp.recompute import recompute_blocks
from halfstep.demo import GPT, GPTConfig
from halfstep.diagnostics import MemoryPlan, measure
from halfstep.diagnostics.blocks import Block, Timeline
from halfstep.diagnostics.memory import memory, plan_of
from halfstep.diagnostics.memory_plan import KINDS
from halfstep.diagnostics.walking import Walked
from halfstep.errors import ConfigError
from halfstep.policy import model_bytes, parse

CPU = torch.device("cpu")
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-lean")


def gpt() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, layers=2, heads=2, width=32))
    ids = torch.randint(0, 64, (4, 32))
    return model, {"input_ids": ids, "labels": ids}


def convolutions() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 256, 1)]
    return nn.Sequential(*parts), torch.randn(16, 3, 16, 16)


class Net(nn.Module):
    """Two layers, and a decision by numbers when asked for."""

    def __init__(self, decides: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.decides = nn.Linear(64, 256), nn.Linear(256, 64), decides
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.relu(self.first(x))
        if self.decides and float(x.detach().sum()) > 0:
            x = x * 2
        return self.last(x).square().mean()


class Around(nn.Module):
    """A module around another."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def net() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Net(), torch.randn(256, 64)


class Branches(nn.Module):
    """Three ways from one tensor, whose gradients are added up: in place, where autograd can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1024)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h * 2).sum() + (h * 3).sum() + (h * 5).sum()


def branches() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Branches(), torch.randn(256, 16)


SUBJECTS = {"branches": branches, "gpt": gpt, "convolutions": convolutions, "net": net}


def mean(outputs: Any) -> Tensor:
    return outputs["loss"] if isinstance(outputs, dict) else outputs.float().mean()


def agree(predicted: MemoryPlan, found: MemoryPlan, within: float = 0.05) -> None:
    """The peak and every kind of 1 % of it and more within a share; `temporary` as a share of the peak."""
    both = f"{predicted.as_dict()}\n{found.as_dict()}"
    assert predicted.peak == pytest.approx(found.peak, rel=within), both
    lasting = [sum(n for kind, n in plan.at_peak.items() if kind != "temporary") for plan in (predicted, found)]
    same_moment = abs(lasting[0] - lasting[1]) <= within * found.peak  # else there are two peaks of one height
    for kind in KINDS if same_moment else KINDS[:-1]:
        mine, theirs = getattr(predicted, kind), getattr(found, kind)
        bound = found.peak * within if kind == "temporary" else max(theirs * within, 0.01 * found.peak)
        assert abs(mine - theirs) <= bound, f"{kind}\n{both}"


QUICK = {("gpt", "bf16-lean"), ("convolutions", "fp16-mixed"), ("net", "fp32"), ("branches", "fp32")}
CASES = [pytest.param(n, p, marks=() if (n, p) in QUICK else pytest.mark.slow) for n in SUBJECTS for p in PRECISIONS]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_step_takes_what_was_told_before(name: str, precision: str) -> None:
    model, batch = SUBJECTS[name]()
    predicted = memory(model, batch, precision=precision, loss=mean, savings=False)
    agree(predicted, measure(model, batch, precision=precision, loss=mean))
    assert sum(predicted.at_peak.values()) == predicted.peak


WAYS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 3},
    "released": {"released": True},
    "a torch optimizer": {"optimizer": torch.optim.RMSprop},
    "a function": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
    "Lion": {"optimizer": "Lion"},
}


SHORT = {("accumulated", "bf16-lean"), ("released", "bf16-lean"), ("a torch optimizer", "fp32")}
MORE = [pytest.param(w, p, marks=() if (w, p) in SHORT else pytest.mark.slow) for w in WAYS for p in ("fp32", "bf16-lean")]


@pytest.mark.parametrize(("way", "precision"), MORE)
def test_so_it_does_with_other_optimizers_and_windows(way: str, precision: str) -> None:
    model, batch = net()
    predicted = memory(model, batch, precision=precision, savings=False, **WAYS[way])
    agree(predicted, measure(model, batch, precision=precision, **WAYS[way]))


def test_blocks_that_are_computed_again_are_followed() -> None:
    model, batch = gpt()
    batch = {name: t.repeat(4, 1) for name, t in batch.items()}
    plain = memory(model, batch, precision="bf16-mixed", savings=False)
    assert any(name.startswith("blocks.") for name, _ in plain.modules), plain.modules
    recompute_blocks(model)
    predicted = memory(model, batch, precision="bf16-mixed", savings=False)
    agree(predicted, measure(model, batch, precision="bf16-mixed"))
    assert predicted.activations < 0.8 * plain.activations


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["recomputed", "int8", "chunked"])
def test_what_is_set_on_a_model_of_transformers_is_followed(setting: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 4000, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**size))
    ids = torch.randint(0, 4000, (4, 64))
    batch, precision = {"input_ids": ids, "labels": ids}, "bf16-mixed"
    plain = memory(model, batch, precision=precision, savings=False)
    if setting == "recomputed":
        recompute_blocks(model)
    elif setting == "chunked":
        chunk_loss(model)
    else:
        precision += ",activations=int8"
    predicted = memory(model, batch, precision=precision, savings=False)
    agree(predicted, measure(model, batch, precision=precision))
    assert predicted.activations < 0.9 * plain.activations


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a look must leave as it was."""
    hooks = {name: {k: len(v) for k, v in vars(m).items() if k.endswith("_hooks") and v} for name, m in model.named_modules()}
    keys = {name: sorted(vars(m)) for name, m in model.named_modules()}
    memory_at = {name: (t.data_ptr(), t.dtype, t.grad) for name, t in (*model.named_parameters(), *model.named_buffers())}
    values = {name: t.clone() for name, t in model.state_dict().items()}
    return {"hooks": hooks, "keys": keys, "memory": memory_at, "values": values, "training": [m.training for m in model.modules()]}


@pytest.mark.parametrize("look", [memory, measure])
def test_the_model_and_random_states_are_left_as_they_were(look: Any) -> None:
    model, batch = net()
    (model(batch) * 1).backward()
    model.last.eval()
    before, states = state_of(model), (torch.get_rng_state(), random.getstate(), batch.clone())
    for precision in ("bf16-lean", "bf16-true"):
        look(model, batch, precision=precision)
    after = state_of(model)
    assert all(torch.equal(a, b) for a, b in zip(before.pop("values").values(), after.pop("values").values(), strict=True))
    assert before == after
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert torch.equal(states[2], batch)
    assert torch.equal(model(batch), copy.deepcopy(model)(batch)), "it still runs"
    look(lambda: Net(), batch)
    assert torch.equal(states[0], torch.get_rng_state()), "that it was made here makes no difference"


def test_shapes_alone_will_do() -> None:
    model, batch = gpt()
    expected = memory(model, batch, precision="bf16-lean", savings=False).as_dict()
    with torch.device("meta"):
        empty, nothing = gpt()
    assert memory(empty, batch, precision="bf16-lean", savings=False).as_dict() == expected
    assert memory(lambda: gpt()[0], nothing, precision="bf16-lean", savings=False).as_dict() == expected
    with pytest.raises(ConfigError, match="meta device"):
        measure(empty, batch)


def test_a_configuration_of_transformers_will_do() -> None:
    from transformers import BertConfig, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=32, vocab_size=64, bos_token_id=0, eos_token_id=0)
    ids = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "labels": torch.zeros(1, 8, dtype=torch.int64)}
    assert memory(config, ids, savings=False).as_dict() == memory(GPT2LMHeadModel(config), ids, savings=False).as_dict()
    named = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, architectures=["BertForMaskedLM"])
    assert memory(named, ids, savings=False).peak > 0


def test_a_model_that_is_prepared_is_told_as_it_is() -> None:
    model, batch = gpt()
    expected = memory(model, batch, precision="bf16-lean", savings=False)
    bind(model, parse("bf16-lean"), CPU)
    assert memory(model, batch, savings=False).as_dict() == expected.as_dict()
    model(**batch)
    assert memory(model, batch, savings=False).as_dict() == expected.as_dict(), "settled"
    with pytest.raises(ConfigError, match="bound to bf16-lean"):
        memory(model, batch, precision="fp32")


def test_a_model_that_decides_by_numbers_is_refused_with_the_remedy() -> None:
    x = torch.randn(8, 64)
    with pytest.raises(ConfigError, match=r"the model decides by numbers.*measured=True"):
        memory(Net(decides=True), x)
    with pytest.raises(ConfigError, match=r"1\.part decides by numbers"):
        memory(nn.Sequential(nn.ReLU(), Around(Net(decides=True))), x)
    plan = memory(Net(decides=True), x, measured=True)
    assert plan.measured
    assert plan.activations > memory(Net(), x, savings=False).activations


def test_what_shapes_cannot_do_is_refused_with_the_remedy() -> None:
    class Outside(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.from_numpy(x.detach().numpy()))

    x = torch.randn(8, 64)
    with pytest.raises(ConfigError, match=r"this Outside cannot be walked through on shapes: .*numpy.*measured=True"):
        memory(Outside(), x)
    assert memory(Outside(), x, measured=True).peak > 0


def test_a_step_that_was_refused_is_told_and_one_after_it_is_not() -> None:
    model, batch = net()
    assert memory(model, batch, precision="fp16-mixed", measured=True).notes == ()
    assert any("refused" in note for note in memory(model, batch * float("inf"), precision="fp16-mixed", measured=True).notes)
    calls = iter(range(10))
    once = memory(model, batch, loss=lambda loss: loss * (float("inf") if next(calls) == 0 else 1.0), measured=True)
    assert once.notes == (), "the first step settles things, and is not what is counted"


def test_a_peak_of_an_unknown_moment_names_none() -> None:
    line = Timeline([Block(2**10, 1, kind="weights")])
    known = plan_of(Walked(line, 1, ((2, 3),), 4, 5, "AdamW"), "about")
    assert str(known).startswith("a step takes 1.00 KiB at its peak, in the backward pass: weights")
    assert str(plan_of(Walked(line, 1, ((2, 3),), 4, 5, "AdamW", phased=False), "about")).startswith("a step takes 1.00 KiB at its peak: weights")


def test_a_model_in_evaluation_mode_is_planned_for_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    x = torch.randn(64, 64)
    whole = memory(model, x, loss=lambda y: y.square().mean(), savings=False)
    model[3].eval()
    part = memory(model, x, loss=lambda y: y.square().mean(), savings=False)
    assert part.activations < whole.activations
    agree(part, measure(model, x, loss=lambda y: y.square().mean()))
    assert memory(model.eval(), x, loss=lambda y: y.square().mean(), savings=False).activations == whole.activations
    assert not model.training


def test_whole_numbers_are_looked_at() -> None:
    class Masked(Net):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            if not bool(mask.all()):
                h = h * mask[:, None]
            return self.last(h).square().mean()

    x, mask = torch.randn(512, 64), torch.ones(512, dtype=torch.bool)
    whole = memory(Masked(), (x, mask), savings=False)
    mask[3] = False
    part = memory(Masked(), (x, mask), savings=False)
    assert part.activations > whole.activations
    agree(part, measure(Masked(), (x, mask)))


@pytest.mark.parametrize("precision", ["bf16-lean,weights=split24", "fp16-true"])
def test_what_is_always_there_is_what_the_policy_counts(precision: str) -> None:
    from halfstep.diagnostics.stepping import sizes_of

    model, batch = gpt()
    plan = memory(model, batch, precision=precision, savings=False)
    bind(model, parse(precision), CPU)
    model(**batch)
    counted = model_bytes(sizes_of(model.parameters(), parse(precision)), precision, "AdamW")
    assert (plan.weights, plan.residuals, plan.gradients, plan.states) == (counted.weight, counted.residual, counted.gradient, counted.states)


def test_the_text_begins_with_the_answer_and_savings_are_computed() -> None:
    model, batch = net()
    plan = halfstep.memory(model, batch, precision="bf16-mixed")
    lines = str(plan).splitlines()
    assert lines[0].startswith(f"a step takes {plan.peak / 2**10:.2f} KiB at its peak, in the ")
    assert "Net under bf16-mixed with FusedAdamW, batch [256, 64]; predicted" in lines[1]
    lean = next(s for s in plan.savings if s.setting == "precision=bf16-lean")
    assert lean.peak == memory(model, batch, precision="bf16-lean", savings=False).peak < plan.peak
    assert f"precision=bf16-lean  {lean.peak / 2**10:.2f} KiB" in str(plan)
    assert plan.casts == 2 * sum(p.numel() for p in (model.first.weight, model.last.weight))
    assert plan.as_dict() == {**{kind: getattr(plan, kind) for kind in KINDS}, "peak": plan.peak}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"optimizer": "Adamw"}, "Did you mean"),
        ({"optimizer": 3}, "optimizer=3"),
        ({"precision": "auto"}, "auto"),
        ({"loss": lambda outputs: outputs.expand(2)}, "needs one number"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], match: str) -> None:
    model, batch = net()
    with pytest.raises(ConfigError, match=match):
        memory(model, batch, **given)


def test_a_model_without_a_loss_or_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="no loss in it"):
        memory(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ConfigError, match="in the place of the model"):
        memory(3, torch.ones(1, 2))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        memory(frozen, torch.ones(1, 2, requires_grad=True), loss=lambda y: F.relu(y).sum())


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_that_of_looking_at_every_moment(seed: int) -> None:
    chance = random.Random(seed)
    ticks = iter(chance.sample(range(200), 200))
    blocks = []
    for _ in range(40):
        born, died = sorted((next(ticks), next(ticks)))
        blocks.append(Block(chance.randint(1, 100), born, died if chance.random() < 0.8 else None, chance.choice(KINDS)))
    line, begin, end = Timeline(blocks), 40, 150
    peak = line.peak(begin, end)
    every = [sum(b.bytes for b in line.alive(t)) for t in range(begin, end + 1)]
    assert peak.bytes == max(every) == sum(peak.kinds.values()) == sum(b.bytes for b in line.alive(peak.at))
