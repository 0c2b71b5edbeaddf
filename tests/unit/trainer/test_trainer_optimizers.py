"""The optimizer that the arguments describe: its class, its settings, and which parameters decay."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

import halfstep
from halfstep import TrainingArguments
from halfstep.errors import ConfigError
from halfstep.trainer.optimizers import decays, make_optimizer


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


@pytest.mark.parametrize(
    ("optim", "kind", "fused"), [("adamw_torch_fused", "FusedAdamW", True), ("adamw_torch", "AdamW", False), ("sgd", "SGD", None)]
)
def test_every_choice_of_optimizer(optim: str, kind: str, fused: bool | None) -> None:
    betas = {} if optim == "sgd" else {"adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 1e-3}
    optimizer = make_optimizer(model(), TrainingArguments(optim=optim, learning_rate=0.5, **betas))
    assert type(optimizer).__name__ == kind
    assert {g["lr"] for g in optimizer.param_groups} == {0.5}
    if kind == "AdamW":
        assert {(g["betas"], g["eps"], g["fused"]) for g in optimizer.param_groups} == {((0.8, 0.7), 1e-3, fused)}


@pytest.mark.parametrize(
    ("precision", "loaded", "kind"),
    [
        *((p, torch.float32, "torch") for p in ("fp32", "bf16-mixed", "fp16-mixed")),
        *((p, torch.bfloat16, "halfstep") for p in ("bf16-mixed", "fp16-mixed")),
        *((p, torch.float32, "halfstep") for p in ("bf16-lean", "fp16-lean", "bf16-true", "fp16-true", "bf16-mixed,states=int8", "fp32,states=bf16")),
    ],
)
def test_the_optimizer_that_is_chosen_is_torchs_for_fp32_weights_and_states_only(precision: str, loaded: torch.dtype, kind: str) -> None:
    args = TrainingArguments(precision=precision, learning_rate=0.5, adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-3, weight_decay=0.1, seed=7)
    optimizer = make_optimizer(model().to(loaded), args)
    assert type(optimizer) is (halfstep.optim.FusedAdamW if kind == "torch" else halfstep.optim.AdamW)
    assert kind != "torch" or isinstance(optimizer, torch.optim.AdamW)
    assert {(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups} == {(0.5, (0.8, 0.7), 1e-3)}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert kind == "torch" or optimizer.seed == 7


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_halfsteps_adamw_may_be_named(precision: str) -> None:
    assert type(make_optimizer(model(), TrainingArguments(optim="adamw_halfstep", precision=precision))) is halfstep.optim.AdamW


@pytest.mark.parametrize(
    ("precision", "loaded", "optim_args", "kind"),
    [
        ("bf16-mixed", torch.float32, "momentum=0.9", torch.optim.SGD),
        ("bf16-mixed", torch.bfloat16, "momentum=0.9", halfstep.optim.SGD),
        ("fp16-lean", torch.float32, None, halfstep.optim.SGD),
        ("bf16-mixed,states=int8", torch.float32, "momentum=0.9,nesterov=true", halfstep.optim.SGD),
        ("bf16-lean", torch.float32, "momentum=0.9,foreach=true", torch.optim.SGD),  # to be wrapped: ours does not follow it
    ],
)
def test_sgd_is_ours_for_16_bit_weights_and_other_states(precision: str, loaded: torch.dtype, optim_args: str | None, kind: type) -> None:
    args = TrainingArguments(optim="sgd", optim_args=optim_args, precision=precision, learning_rate=0.5, weight_decay=0.1, seed=7)
    optimizer = make_optimizer(model().to(loaded), args)
    assert type(optimizer) is kind
    assert {g["momentum"] for g in optimizer.param_groups} == {0.9 if optim_args else 0.0}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert kind is torch.optim.SGD or optimizer.seed == 7


def test_weight_decay_is_for_matrices_only_and_frozen_parameters_are_left_out() -> None:
    net = model()
    net[2].weight.requires_grad_(False)
    optimizer = make_optimizer(net, TrainingArguments(weight_decay=0.1))
    decayed = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decayed == {id(net[0].weight): 0.1, id(net[0].bias): 0.0, id(net[1].weight): 0.0, id(net[1].bias): 0.0}


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model has no trainable parameter: all \d+ are frozen. Set requires_grad=True on those to train"):
        make_optimizer(model().requires_grad_(False), TrainingArguments())


@pytest.mark.parametrize(
    ("optim", "optim_args", "kind", "found"),
    [
        ("sgd", "momentum=0.9,nesterov=True", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("adafactor", {"clip_threshold": 2.0}, Adafactor, {"clip_threshold": 2.0, "scale_parameter": False, "relative_step": False}),
        ("rmsprop", "momentum=0.5,centered=true", torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        ("adagrad", "lr_decay=0.25", torch.optim.Adagrad, {"lr_decay": 0.25}),
        ("lion", None, halfstep.optim.Lion, {"betas": (0.9, 0.999)}),
        ("adamw_torch", "amsgrad=True", torch.optim.AdamW, {"amsgrad": True}),
        ("torch.optim.NAdam", "betas=(0.5, 0.75),momentum_decay=1e-3", torch.optim.NAdam, {"betas": [0.5, 0.75], "momentum_decay": 1e-3}),
        ("torch.optim.adamax.Adamax", '{"eps": 1e-5}', torch.optim.Adamax, {"eps": 1e-5}),
        (torch.optim.RAdam, {"eps": 1e-6}, torch.optim.RAdam, {"eps": 1e-6}),
        (halfstep.optim.Lion, "betas=[0.5, 0.75]", halfstep.optim.Lion, {"betas": (0.5, 0.75)}),
    ],
)
def test_any_optimizer_by_name_or_class_with_its_arguments(optim: object, optim_args: object, kind: type, found: dict) -> None:
    args = TrainingArguments(optim=optim, optim_args=optim_args, learning_rate=0.5, weight_decay=0.125)
    optimizer = make_optimizer(model(), args)
    assert type(optimizer) is kind
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.125, 0.0]
    for group in optimizer.param_groups:
        assert {name: group[name] for name in found} | {"lr": group["lr"]} == found | {"lr": 0.5}
    assert TrainingArguments(**args.to_dict()) == args


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, r"optim='sgd' \(through optim_args\) has no argument 'momentun'. Did you mean 'momentum'"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, r"optim='sgd' refuses lr=.* and optim_args=.'momentum': -1.: Invalid momentum value"),
        ({"optim": "torch.optim.Adan"}, r"optim='torch.optim.Adan': torch.optim has no 'Adan'. Did you mean 'Adam'"),
        ({"optim": "no_such_package.Adan"}, r"there is no module 'no_such_package'"),
        ({"optim": "torch.nn.Linear"}, r"optim='torch.nn.Linear' is no class of torch optimizers"),
        ({"optim": "torch.optim.LBFGS"}, r"optim='torch.optim.LBFGS' evaluates the loss itself, and the Trainer does that"),
        ({"optim": "torch.optim.Rprop", "weight_decay": 0.1}, r"weight_decay=0.1 has no effect with optim='torch.optim.Rprop', which takes none"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(settings_: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_optimizer(model(), TrainingArguments(**settings_))


def test_a_class_that_cannot_be_found_again_is_refused() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(ConfigError, match=r"Mine is a class that cannot be found by its name .* optimizers=\(optimizer, None\)"):
        TrainingArguments(optim=Mine)


def transformers_models() -> dict[str, nn.Module]:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config
    from transformers import T5ForConditionalGeneration as T5Model

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 16}
    return {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)),
        "bert": BertForSequenceClassification(BertConfig(**small)),
        "llama": LlamaForCausalLM(LlamaConfig(**small)),
        "t5": T5Model(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)),
    }


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_weight_decay_is_on_the_parameters_that_transformers_chooses(name: str) -> None:
    import transformers

    net = transformers_models()[name]
    theirs = transformers.Trainer.get_decay_parameter_names(None, net)
    named = dict(net.named_parameters())
    assert set(decays(net)) == set(theirs) & set(named)
    assert 0 < len(decays(net)) < len(named)


def test_norms_are_known_by_type_and_other_vectors_decay() -> None:
    net = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.GroupNorm(1, 2), "c": nn.RMSNorm(2), "d": nn.PReLU(2), "e": nn.Embedding(3, 2)})
    net.scale = nn.Parameter(torch.ones(2))
    assert decays(net) == ["scale", "d.weight", "e.weight"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.body(x)[:, 0] - labels).square().mean()}


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean", "fp16-mixed"])
@pytest.mark.parametrize("optim", ["sgd", "lion", "adafactor", "rmsprop", "adagrad", "adamw_torch", "torch.optim.NAdam"])
def test_every_optimizer_trains_under_every_kind_of_precision(optim: str, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    data = [{"x": x, "labels": x.sum()} for x in torch.randn(16, 4, generator=draws)]
    args = TrainingArguments(
        str(tmp_path),
        optim=optim,
        optim_args="momentum=0.5" if optim == "sgd" else None,
        precision=precision,
        max_steps=30,
        logging_steps=1,
        learning_rate=0.03,
        weight_decay=0.01,
        per_device_train_batch_size=16,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = halfstep.Trainer(Small(), args, train_dataset=data)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.state.global_step == 30
