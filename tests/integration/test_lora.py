"""Adapters of the `peft` package: they are trained through masters or in fp32, and the frozen base under them costs what it was loaded in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halfstep
from halfstep import amp
from halfstep.optim import AdamW, full_values, master_of
from halfstep.policy import parse

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="adapters are tested with the peft package: pip install peft")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning", "ignore:Could not find a config file:UserWarning"
)
IDS = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(3))
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gpt2(loaded: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0.1)).to(FORMATS[loaded])


def llama(loaded: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0)).to(FORMATS[loaded])


LAYERS = {gpt2: ["c_attn", "c_proj"], llama: ["q_proj", "v_proj", "down_proj"]}


def adapted(base: Callable[[str], nn.Module], loaded: str, wide: bool = True, **more: Any) -> nn.Module:
    """A model with adapters on some layers. wide: in fp32 whatever the base is, as peft makes them if it is not told otherwise."""
    model = base(loaded)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=LAYERS[base], fan_in_fan_out=base is gpt2, lora_dropout=0.1, task_type="CAUSAL_LM", **more)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=wide)


def parts(model: nn.Module, trained: bool) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad == trained}


def by_loop(model: nn.Module, precision: str, steps: int) -> Any:
    amp.bind(model, policy := parse(precision), torch.device("cpu"))
    scaler = amp.GradScaler.from_policy(policy.scale)
    optimizer = AdamW(model.parameters(), lr=1e-2, weights=None if policy.weights == "fp32" else policy.weights, states=policy.states)
    for _ in range(steps):
        scaler.scale(model(input_ids=IDS, labels=IDS).loss).backward()
        assert scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer


def by_accelerator(model: nn.Module, precision: str, steps: int) -> Any:
    accelerator = halfstep.Accelerator(cpu=True, precision=precision)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(steps):
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
        assert optimizer.step()
        optimizer.zero_grad()
    return optimizer.optimizer


def trainer(model: nn.Module, place: Path, precision: str, steps: int, **settings: Any) -> halfstep.Trainer:
    args = halfstep.TrainingArguments(
        str(place), **{"precision": precision, "max_steps": steps, "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2} | settings
    )
    return halfstep.Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in IDS.repeat(2, 1)])


@pytest.fixture
def by_trainer(tmp_path: Path) -> Callable[..., Any]:
    def train(model: nn.Module, precision: str, steps: int) -> Any:
        run = trainer(model, tmp_path, precision, steps, save_strategy="no", overwrite_output_dir=True)
        run.train()
        return run.optimizer_in_use.optimizer

    return train


CASES = [("bf16-mixed", "bf16"), ("fp16-mixed", "fp16"), ("bf16-lean", "bf16"), ("bf16-true", "bf16"), ("bf16-mixed", "fp32"), ("fp16-lean", "fp16")]


QUICK = {("bf16-mixed", "trainer"), ("bf16-lean", "trainer"), ("fp16-mixed", "loop"), ("bf16-lean", "loop")}
DOORS = [
    pytest.param(door, *case, marks=() if door == "accelerator" or ((case[0], door) in QUICK and case[1] != "fp32") else pytest.mark.slow)
    for door in ("loop", "accelerator", "trainer")
    for case in CASES
]


@pytest.mark.parametrize(("door", "precision", "loaded"), DOORS)
def test_adapters_are_trained_and_the_base_costs_what_it_was_loaded_in(
    precision: str, loaded: str, door: str, by_trainer: Callable[..., Any]
) -> None:
    for wide in (True, False):
        model = adapted(gpt2 if wide else llama, loaded, wide)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        train = {"loop": by_loop, "accelerator": by_accelerator, "trainer": by_trainer}[door]
        optimizer = train(model, precision, 3)
        adapters, base = parts(model, True), parts(model, False)
        for name, p in adapters.items():
            master = master_of(p)
            assert p.dtype == torch.float32 or (master is not None and master.storage.name != "plain"), name
            assert not torch.equal(full_values(p), before[name].float()), name
        for name, p in base.items():
            master = master_of(p)
            assert master is None or master.nbytes() == 0, name
            assert torch.equal(p.detach().float(), before[name].float()), name
            assert p.grad is None
        kept = sum(p.numel() for p in base.values() if p.dtype == FORMATS[loaded])
        castable = sum(p.numel() for n, p in base.items() if p.dim() == 2 and not any(part in n for part in ("wte", "wpe", "embed", "lm_head")))
        assert kept >= castable
        stated = {id(p) for p in optimizer.state}
        assert stated <= {id(p) for p in adapters.values()}
        size = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values() if t.dim())
        assert size <= 8.5 * sum(p.numel() for p in adapters.values())


def test_an_average_of_a_model_with_adapters_holds_these_alone() -> None:
    model = adapted(gpt2, "bf16", wide=False)
    average = halfstep.ema(model, 0.9)
    average.update()
    assert average.nbytes() == 4 * sum(p.numel() for p in parts(model, True).values())


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-mixed"])
def test_a_run_resumes_bit_for_bit_and_saves_adapters_as_peft_does(precision: str, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    whole = trainer(adapted(llama, "bf16", wide=False, modules_to_save=["lm_head"]), tmp_path / "a", precision, 4, **settings)
    whole.train()
    again = trainer(adapted(llama, "bf16", wide=False, modules_to_save=["lm_head"]), tmp_path / "b", precision, 4, **settings)
    again.train(resume_from_checkpoint=tmp_path / "a" / "checkpoint-2")
    assert all(torch.equal(full_values(p), full_values(q)) for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    whole.save_model(tmp_path / "saved")
    assert {f.name for f in (tmp_path / "saved").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    named = {n.replace(".default", "").replace(".modules_to_save", ""): p for n, p in parts(whole.model, True).items()}
    assert saved.keys() == named.keys()
    assert all(torch.equal(saved[n], full_values(p).to(saved[n].dtype)) for n, p in named.items())
    loaded = peft.PeftModel.from_pretrained(llama("bf16"), tmp_path / "saved").eval()
    with torch.no_grad():
        ours, theirs = whole.model.eval()(input_ids=IDS).logits, loaded(input_ids=IDS).logits.float()
        merged = loaded.float().merge_and_unload()(input_ids=IDS).logits
    assert float((ours - theirs).abs().max()) < 0.05 * float(ours.abs().max())
    assert float((ours - merged).abs().max()) < 0.05 * float(ours.abs().max())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_gradients_of_the_run_without_it(reentrant: bool) -> None:
    found: list[dict[str, Tensor]] = []
    for checkpointed in (False, True):
        model = adapted(gpt2, "bf16")
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        accelerator = halfstep.Accelerator(cpu=True, precision="bf16-mixed")
        model = accelerator.prepare(model.train())
        torch.manual_seed(5)
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
        found.append({n: p.grad.clone() for n, p in parts(model, True).items() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) >= 8
    assert any(bool(g.any()) for g in found[0].values())
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_the_trainer_checkpoints_activations_of_a_model_with_adapters(tmp_path: Path) -> None:
    losses = []
    for name, wanted in (("a", False), ("b", True)):
        run = trainer(adapted(gpt2, "bf16"), tmp_path / name, "bf16-mixed", 3, gradient_checkpointing=wanted, logging_steps=1, save_strategy="no")
        run.train()
        losses.append([r["loss"] for r in run.state.log_history if "loss" in r])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]
