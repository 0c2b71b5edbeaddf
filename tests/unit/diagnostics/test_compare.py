"""Two runs side by side: each planted fault is found in one run with its module first, each healthy twin is alike."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from compare_models import Convolutions, Net, Recurrent, images, texts
from torch import nn

import halfstep
from halfstep.amp import bind
from halfstep.diagnostics.boundaries import Replay
from halfstep.diagnostics.compare import _Ledger, compare
from halfstep.diagnostics.comparison import Comparison, judged
from halfstep.errors import ConfigError, PolicyError
from halfstep.policy import PRESETS, parse

# fault: precision that it is looked for under, the divergence's fault, module and direction
PLANTED = {
    "residual": ("bf16-mixed", "cast", "blocks.1", "forward"),
    "softmax": ("fp16-mixed", "cast", "blocks.1.attention", "forward"),
    "mask": ("fp16-mixed", "nonfinite", "blocks.1.attention", "forward"),
    "norm": ("fp16-true", "nonfinite", "blocks.1.before", "forward"),
    "overflow": ("fp16-mixed", "nonfinite", "blocks.1.up", "forward"),
    "backward": ("fp16-mixed", "cast", "blocks.1", "backward"),
    "autocast": ("bf16-mixed", "cast", "blocks.1", "forward"),
    "positions": ("bf16-mixed", "cast", "positions", "forward"),
    "rotary": ("bf16-mixed", "error", "positions", "forward"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_in_one_run_and_its_module_named_first(fault):
    precision, kind, module, direction = PLANTED[fault]
    found = compare(Net(fault), texts(1), precision, steps=1, seeds=1)
    assert (found.first.fault, found.first.module, found.first.direction, found.first.step) == (kind, module, direction, 0)
    assert found.status == 1
    assert str(found).startswith(f"diverged: {module} (")
    if kind == "cast":
        assert found.first.source.startswith("compare_models.py:")


@pytest.mark.parametrize("precision", [*PRESETS, "simulate:e5m10"])
def test_its_healthy_twin_is_alike_in_every_precision(precision):
    if precision == "tf32":
        with pytest.raises(PolicyError):
            compare(Net(), texts(1), precision)
        return
    found = compare(Net(), texts(), precision, steps=2, seeds=1)
    assert found.alike, found
    assert str(found).startswith("alike")
    assert f": {precision} against fp32, 2 steps" in str(found)
    assert all(d.times <= 2.5 for d in found.damage)  # half of what is tolerated


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-true", pytest.param("bf16-lean,activations=int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "batches"), [(Convolutions, images), (Recurrent, texts)], ids=["convolutions", "recurrent"])
def test_other_healthy_models_are_alike(kind, batches, precision):
    found = compare(kind(), batches(1), precision, steps=1, seeds=1)
    assert found.alike, found


def loss_in_fp16(logits, batch):
    return F.cross_entropy(logits.half().flatten(0, 1), batch["ids"].flatten()).float()


def loss_in_fp32(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten())


@pytest.mark.parametrize(("loss", "alike"), [(loss_in_fp16, False), (loss_in_fp32, True)])
def test_a_loss_in_16_bits_is_named(loss, alike):
    found = compare(Net(), [{"ids": texts(1)[0]["ids"]}], "bf16-mixed", steps=1, seeds=1, loss=loss)
    assert found.alike is alike
    if not alike:
        assert (found.first.fault, found.first.named) == ("cast", "the loss")
        assert "test_compare.py:" in found.first.source


def test_weights_that_do_not_move_are_named():
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1e-5)

    model = Net().to(torch.bfloat16)
    found = compare(model, texts(1), "bf16-mixed,weights=plain", steps=1, seeds=1, optimizer=sgd)
    assert found.first.fault == "update"
    assert found.moved < 0.5
    assert compare(model, texts(1), "bf16-mixed", steps=1, seeds=1, optimizer=sgd).moved == pytest.approx(1, abs=0.05)


def test_the_error_of_a_module_is_not_that_of_what_it_was_given():
    """What comes after the fault is wrong in both runs' difference, and right by itself."""
    found = compare(Net("rotary"), texts(1), "bf16-mixed", steps=1, seeds=1)
    by_name = {d.module: d for d in found.damage}
    assert found.damage[0].module == "positions"
    assert by_name["blocks.0.before"].times < 2.5
    assert by_name["blocks.0.before"].between > 0.1


def test_casts_in_the_code_may_be_part_of_the_reference():
    assert compare(Net("residual"), texts(1), "bf16-mixed", steps=1, seeds=1, as_written=True).alike


def test_casts_that_lose_nothing_are_not_told():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x):
            keep = (torch.arange(4) % 2 == 0).half()
            return (self.net(x) * keep.float()).square().mean()

    assert compare(Masked(), [torch.randn(3, 4)], "bf16-mixed", steps=1, seeds=1).alike


def test_a_model_that_goes_another_way_is_named():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = x @ torch.eye(4)
            return (self.second(x) if y.dtype == torch.bfloat16 else self.first(x)).square().mean()

    found = compare(Chooses(), [torch.randn(3, 4)], "bf16-mixed,products=native", steps=1, seeds=1)
    assert (found.first.fault, found.first.named) == ("path", "the model (Chooses)")


def test_a_simulated_format_that_does_not_hold_the_numbers_is_named():
    found = compare(Net("overflow"), texts(1), "simulate:fp16", steps=1, seeds=1)
    assert (found.first.fault, found.first.module) == ("nonfinite", "blocks.1.up")


def test_two_precisions_and_a_reference_of_16_bits():
    found = compare(Net(), texts(1), "bf16-lean", reference="bf16-mixed", steps=1, seeds=1)
    assert found.alike
    assert all(d.forward == 0 for d in found.damage)  # lean weights give the same forward pass


def test_buffers_that_the_model_computes_with_are_those_of_the_tested_run():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)
            self.register_buffer("count", torch.ones(()))

        def forward(self, x):
            self.count += 1
            return (self.net(x) * self.count).square().mean()

    found = compare(Counts(), [torch.randn(3, 4)], "bf16-mixed", steps=2, seeds=1)
    assert found.alike
    assert all(d.forward < 0.01 for d in found.damage)


def test_noise_moves_numbers_by_one_rounding_at_most_and_choices_not_at_all():
    replay = Replay(nn.Identity(), {}, [], 1.0, noise=2.0**-8)
    exact = torch.tensor([0.0, 1.0, -1.0, 1.5, 2.0, -3.0, 2.0**20])
    assert torch.equal(replay.moved(exact), exact)
    x = torch.randn(1000)
    by = (replay.moved(x) - x).abs() / x.abs()
    assert 0.8 * 2.0**-8 < float(by.max()) <= 1.001 * 2.0**-8
    assert torch.equal(replay.moved(torch.arange(5)), torch.arange(5))


def test_the_model_the_batches_and_the_random_states_are_left_alone():
    model, batches = Convolutions(), images(1)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    inputs = {name: t.clone() for name, t in batches[0].items()}
    random = torch.get_rng_state()
    compare(model, batches, "fp16-lean", steps=2, seeds=2)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(t, inputs[name]) for name, t in batches[0].items())
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight"]
    assert all(not part._forward_hooks and not part._forward_pre_hooks and "forward" not in vars(part) for part in model.modules())


def test_a_factory_gives_weights_by_seed_and_losses_are_judged_by_their_spread():
    asked = []

    def made(seed):
        asked.append(seed)
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    x = torch.randn(16, 4)
    found = compare(made, [(x,)], "bf16-mixed", steps=2, seeds=3, loss=lambda y: (y - x[:, :1]).square().mean())
    assert asked == [0, 1, 2]
    assert found.final.verdict == "not told apart"
    assert len(set(found.final.reference)) == 3
    assert found.final.spread > 0
    assert abs(found.final.errors) < 1
    assert len(found.losses) == 2


@pytest.mark.parametrize(
    ("reference", "tested", "verdict"),
    [
        ((1.0, 1.1, 0.9), (1.01, 1.12, 0.9), "not told apart"),
        ((1.0, 1.1, 0.9), (3.0, 3.1, 2.9), "higher"),
        ((1.0, 1.1, 0.9), (0.1, 0.2, 0.3), "lower"),
        ((1.0, 1.001, 0.999), (1.01, 1.011, 1.009), "not told apart"),  # less than the format resolves
        ((1.0, 1.1, 0.9), (1.0, math.nan, 0.9), "nonfinite"),
        ((1.0,), (1.1,), "not judged"),
        ((1.0,), (1.0,), "not told apart"),
        ((1.0, 1.1, 0.9), (1.1, 1.2, 1.0), "not told apart"),  # more than the format resolves, less than 3 standard errors
        ((1.0, 1.0), (1.4, 1.4), "not judged"),
        ((1.0, 1.0), (3.2, 3.2), "higher"),
        ((1.0,), (3.2,), "higher"),
        ((-1.0,), (-3.2,), "lower"),
        ((math.nan, 1.0), (math.nan, 1.0), "not judged"),
    ],
)
def test_final_losses_are_judged_against_the_noise_of_seeds(reference, tested, verdict):
    found = judged(reference, tested, 0.02, 2.0)
    assert found.verdict == verdict
    assert verdict in str(found) or verdict == "nonfinite"


@pytest.mark.parametrize(("tested", "first", "alike"), [(1.4, "alike, final loss not judged: a against b", True), (3.2, "diverged: the loss", False)])
def test_a_loss_that_seeds_do_not_judge_is_not_called_alike_in_silence(tested, first, alike):
    final = judged([1.0], [tested], 0.02, 2.0)
    ledger = _Ledger(5.0)
    found = Comparison("a", "b", 3, 5.0, ledger.all(3, final.verdict), (), (), final, 1.0, 0)
    assert str(found).startswith(first)
    assert (found.alike, found.status) == (alike, 0 if alike else 1)


def test_it_is_plain_values_for_a_machine():
    found = compare(Net("mask"), texts(1), "fp16-mixed", steps=1, seeds=1)
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["alike"] is False
    assert plain["first"]["module"] == "blocks.1.attention"
    assert plain["first"]["error"] == "inf"


def small(dtype=torch.float32, rows=4):
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).to(dtype)
    return net, [torch.randn(rows, 8).to(dtype)]


def squared(outputs):
    return outputs.square().mean()


def nan_weights():
    net, batches = small()
    net[0].weight.data[0, 0] = math.nan
    return compare(net, batches, "bf16-mixed", steps=1, seeds=1, loss=squared)


def run_small(precision="bf16-mixed", dtype=torch.float32, factor=1.0, **settings):
    net, batches = small(dtype)
    return compare(net, [batch * factor for batch in batches], precision, **{"steps": 1, "seeds": 1, "loss": squared} | settings)


def frozen():
    net, batches = small()
    return compare(net.requires_grad_(False), batches, steps=1, seeds=1, loss=squared)


def bent(outputs):
    return (outputs - outputs.detach()).abs().sum().sqrt()  # a finite loss whose gradients are NaN


def test_a_model_and_batches_in_bf16_are_compared_in_fp32():
    for precision in ("bf16-mixed", "bf16-true"):
        found = run_small(precision, torch.bfloat16)
        assert found.alike, found
        assert found.moved == pytest.approx(1, abs=0.1)


def test_a_cast_to_8_bits_is_named():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.two(self.one(x).to(torch.float8_e4m3fn).float()).square().mean()

    found = compare(Narrow(), small()[1], "bf16-mixed", steps=1, seeds=1)
    assert (found.first.fault, found.first.named) == ("cast", "the model (Narrow)")
    assert "fp8" in found.first.what


@pytest.mark.parametrize("asked", ["AdamW", torch.optim.SGD])
def test_an_optimizer_may_be_a_name_or_a_class(asked):
    assert run_small(optimizer=asked).alike


class Stubborn(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("not of this one")


def bound():
    model = Net()
    bind(model, parse("bf16-mixed"), torch.device("cpu"))
    return model


REFUSED = {
    "no model": (lambda: compare(3, texts(1)), "in the place of the model"),
    "one batch": (lambda: compare(Net(), texts(1)[0]), r"\[batch\] for one"),
    "no batches": (lambda: compare(Net(), []), "gave none"),
    "no loss": (lambda: compare(nn.Linear(2, 2), [torch.ones(1, 2)], steps=1, seeds=1), "loss="),
    "steps": (lambda: compare(Net(), texts(1), steps=0), "steps=0"),
    "seeds": (lambda: compare(Net(), texts(1), seeds=0), "seeds=0"),
    "tolerance": (lambda: compare(Net(), texts(1), tolerance=0), "tolerance=0"),
    "a text as tolerance": (lambda: compare(Net(), texts(1), tolerance="5"), "tolerance='5'"),
    "no function": (lambda: compare(Net(), texts(1), loss=3), "loss=3"),
    "steps before batches": (lambda: compare(Net(), [], steps=0), "steps=0"),
    "a copy": (lambda: compare(Stubborn(2, 2), [torch.ones(1, 2)]), r"f\(seed\)"),
    "a bound model": (lambda: compare(bound(), texts(1)), "bound to bf16-mixed"),
    "a narrow reference": (lambda: compare(Net(), texts(1), reference="bf16-true"), "swap"),
    "itself": (lambda: compare(Net(), texts(1), "bf16-mixed", reference="bf16-mixed"), "with itself"),
    "auto": (lambda: compare(Net(), texts(1), "auto"), "auto"),
    "a factory": (lambda: compare(lambda seed: None, texts(1)), "nn.Module"),
    "a format": (lambda: compare(Net(), texts(1), "simulate:int4"), "int4"),
    "nothing finite": (lambda: run_small(factor=math.nan), "at step 0 the loss is not finite under fp32 either"),
    "weights that are NaN": (nan_weights, "not finite under fp32 either"),
    "a loss that is lost": (lambda: run_small(steps=3, seeds=2, optimizer=lambda p: torch.optim.SGD(p, lr=1e30)), "^at step [12] the loss is not"),
    "nothing applied": (lambda: run_small(loss=bent), "no step was applied under fp32"),
    "fp64": (lambda: run_small(dtype=torch.float64), "in fp64, which bf16-mixed leaves"),
    "an unknown name": (lambda: run_small(optimizer="AdamWW"), "Did you mean 'AdamW'"),
    "no optimizer": (lambda: run_small(optimizer=lambda p: None), "NoneType"),
    "LBFGS": (lambda: run_small(optimizer=torch.optim.LBFGS), "LBFGS"),
    "frozen": (frozen, "no parameter that is trained"),
    "True steps": (lambda: run_small(steps=True), "steps=True"),
    "compiled simulation": (lambda: compare(Net(), texts(1), "simulate:e4m3", compile=True), "cannot be compiled"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_with_a_remedy(case):
    call, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said) as refused:
        call()
    assert refused.value.remedy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns about itself when it compiles
@pytest.mark.usefixtures("fresh_compiler")
def test_eager_against_compiled():
    model = Net()
    model.drop.p = 0.0
    found = halfstep.compare(model, texts(), "bf16-mixed", compile=True, steps=2, seeds=1)
    assert found.alike, found
    assert found.reference == "bf16-mixed"
    assert found.tested == "bf16-mixed, compiled"
    assert "differences of the whole model" in str(found)


FAMILIES = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "gpt2-eager": ("GPT2", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "attn_implementation": "eager"}),
    "llama": ("Llama", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "bert": ("Bert", "BertForMaskedLM", {}),
    "t5": ("T5", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {"num_key_value_heads": 1, "num_local_experts": 4}),
}
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-lean", "bf16-true", "fp16-true"])
@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_models_of_transformers_are_alike(family, precision):
    transformers = pytest.importorskip("transformers")
    name, kind, shape = FAMILIES[family]
    own = shape if name in ("GPT2", "T5") else SHAPE | shape
    config = getattr(transformers, f"{name}Config")(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, **own)
    ids = torch.randint(3, 50, (2, 12))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.tensor([[1] * 12, [1] * 9 + [0] * 3])}
    found = compare(getattr(transformers, kind)(config), [batch], precision, steps=2, seeds=1)
    assert found.alike, found
    assert all(d.times <= 2.5 for d in found.damage)
