"""The trainer with 16-bit weights: fused clipping, the stalled share, evaluation that changes nothing, refused steps, and what is saved."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halfstep
from halfstep import Trainer, TrainerCallback, TrainingArguments
from halfstep.errors import CheckpointError, ConfigError, PolicyError
from halfstep.optim import full_values, master_of

PRESETS = ["bf16-lean", "fp16-lean", "bf16-true", "fp16-true"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None, boost: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return {"loss": loss if boost is None else loss * boost.max(), "logits": logits}


def rows(count: int = 16, boosts: dict[int, float] | None = None) -> list[dict]:
    xs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    made = [{"x": x, "labels": int(x[:3].argmax())} for x in xs]
    return made if boosts is None else [row | {"boost": boosts.get(i, 1.0)} for i, row in enumerate(made)]


def trainer(
    place: Path, precision: str, *callbacks: TrainerCallback, loaded: torch.dtype = torch.float32, optimizers=(None, None), **settings
) -> Trainer:
    data = settings.pop("data", None) or rows()
    torch.manual_seed(0)
    model = Classifier().to(loaded)
    base = {"output_dir": str(place), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 6, "learning_rate": 1e-2}
    args = TrainingArguments(**{**base, "logging_steps": 1, "per_device_train_batch_size": 4, "precision": precision, **settings})
    given = optimizers(model) if callable(optimizers) else optimizers
    return Trainer(model, args, train_dataset=data, eval_dataset=rows(7), callbacks=callbacks, optimizers=given)


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Weights, residuals and buffers as copies."""
    kept = {name: t.detach().clone() for name, t in model.state_dict().items()}
    for name, p in model.named_parameters():
        master = master_of(p)
        if master is not None and master.residual is not None:
            kept[f"residual {name}"] = master.residual.clone()
    return kept


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_values(p) for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class At(TrainerCallback):
    """Calls functions at events."""

    def __init__(self, **functions) -> None:
        self.functions = functions

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.functions.get("train_begin", lambda s, k: None)(state, kwargs)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.functions.get("step_begin", lambda s, k: None)(state, kwargs)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.functions.get("optimizer_step", lambda s, k: None)(state, kwargs)

    def on_step_skipped(self, args, state, control, **kwargs) -> None:
        self.functions.get("step_skipped", lambda s, k: None)(state, kwargs)


class Before(At):
    """The same, and it looks at gradients before the step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.functions.get("pre_optimizer_step", lambda s, k: None)(state, kwargs)


def gradient_norm(model: nn.Module) -> float:
    return math.hypot(*(float(p.grad.double().norm()) for p in model.parameters() if p.grad is not None))


# --- clipping in the optimizer's own pass -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["auto", "sgd", "adamw_torch_fused"])
@pytest.mark.parametrize("precision", PRESETS)
def test_clipping_is_fused_into_the_step_and_gradients_stay_as_they_were_made(tmp_path: Path, precision: str, optim: str) -> None:
    seen: list[tuple[float, bool]] = []

    def look(state, kwargs) -> None:
        seen.append((gradient_norm(kwargs["model"]) / kwargs["step_result"].scale, kwargs["step_result"].clipped))

    made = trainer(tmp_path, precision, At(optimizer_step=look), optim=optim, max_grad_norm=1e-3)
    made.train()
    assert len(seen) == 6
    norms = [r["grad_norm"] for r in made.state.log_history if "grad_norm" in r]
    for (norm, clipped), logged in zip(seen, norms, strict=True):
        assert clipped
        assert logged > 0.01
        assert norm == pytest.approx(logged, rel=1e-2), "not clipped in place"


@pytest.mark.parametrize("precision", [*PRESETS, "fp16-mixed", "bf16-mixed"])
def test_a_callback_that_looks_before_the_step_sees_true_clipped_gradients(tmp_path: Path, precision: str) -> None:
    seen: list[float] = []
    made = trainer(tmp_path, precision, Before(pre_optimizer_step=lambda s, k: seen.append(gradient_norm(k["model"]))), max_grad_norm=1e-3)
    made.train()
    assert seen == pytest.approx([1e-3] * 6, rel=1e-2)
    assert all(r["grad_norm"] > 0.01 for r in made.state.log_history if "grad_norm" in r)


@pytest.mark.parametrize("precision", [*PRESETS, "bf16-mixed,states=int8"])
def test_sgd_moves_by_no_more_than_the_limit_either_way(tmp_path: Path, precision: str) -> None:
    sizes = []
    for place, listener in (("a", At()), ("b", Before())):
        made = trainer(
            tmp_path / place, precision, listener, optim="sgd", max_grad_norm=0.25, max_steps=1, learning_rate=1.0, lr_scheduler_type="constant"
        )
        made.evaluate()  # the weights are where they will be
        first = masters(made.model)
        made.train()
        sizes.append(math.hypot(*(float((now - first[name]).double().norm()) for name, now in masters(made.model).items())))
    assert sizes == pytest.approx([0.25, 0.25], rel=1e-2)


def test_no_limit_clips_nothing(tmp_path: Path) -> None:
    seen: list[bool] = []
    trainer(tmp_path, "bf16-lean", At(optimizer_step=lambda s, k: seen.append(k["step_result"].clipped)), max_grad_norm=0.0).train()
    assert seen == [False] * 6


# --- the share of updates that round away ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "loaded", "low", "high"),
    [
        ("bf16-lean", torch.float32, 0.0, 0.02),
        ("bf16-mixed", torch.float32, 0.0, 0.02),
        ("bf16-mixed", torch.bfloat16, 0.0, 0.02),
        ("bf16-true", torch.float32, 0.0, 0.05),
        ("bf16-mixed,weights=plain", torch.bfloat16, 0.8, 1.0),
    ],
)
def test_the_stalled_share_is_logged_where_it_was_asked_for(tmp_path: Path, precision: str, loaded: torch.dtype, low: float, high: float) -> None:
    settings = {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_steps": 2, "max_steps": 5}
    made = trainer(tmp_path, precision, loaded=loaded, log_stalled=True, **settings)
    made.train()
    logged = {r["step"]: r.get("stalled") for r in made.state.log_history if "loss" in r}
    assert list(logged) == [2, 4, 5]
    assert all(low <= logged[step] <= high for step in (2, 4))
    silent = trainer(tmp_path / "silent", precision, loaded=loaded, **settings)
    silent.train()
    assert all("stalled" not in r for r in silent.state.log_history)
    assert same(everything(silent.model), everything(made.model)), "measuring changes nothing"


def test_the_stalled_share_without_log_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_stalled=True measures every logging_steps-th step. Use logging_strategy='steps'"):
        trainer(tmp_path, "bf16-lean", log_stalled=True, logging_strategy="epoch")


# --- evaluation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", [*PRESETS, "bf16-mixed"])
def test_evaluation_and_prediction_leave_weights_masters_and_formats_alone(tmp_path: Path, precision: str, loaded: torch.dtype) -> None:
    plain = trainer(tmp_path / "plain", precision, loaded=loaded)
    first = masters(plain.model)
    plain.train()
    made = trainer(tmp_path / "run", precision, loaded=loaded, eval_strategy="steps", eval_steps=2)
    for _ in range(2):
        made.evaluate()
        assert made.predict(rows(3)).predictions.dtype.name == "float32"
        assert same(masters(made.model), first)
    kept = everything(made.model)
    made.predict(rows(3))
    assert same(everything(made.model), kept)
    made.train()
    assert same(everything(made.model), everything(plain.model)), "a run does not depend on how often it was evaluated"
    kept = everything(made.model)
    again = made.evaluate()["eval_loss"]
    assert made.evaluate()["eval_loss"] == again
    assert same(everything(made.model), kept)
    assert made.model.training == plain.model.training


def test_lean_evaluates_to_what_mixed_does(tmp_path: Path) -> None:
    for form in ("bf16", "fp16"):
        lean, mixed = (trainer(tmp_path / form, f"{form}-{kind}").evaluate()["eval_loss"] for kind in ("lean", "mixed"))
        assert lean == mixed


# --- steps that are refused or replayed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [*PRESETS, "bf16-mixed,states=int8", "fp16-mixed"])
def test_a_step_that_is_refused_changes_no_weight_residual_or_state(tmp_path: Path, precision: str) -> None:
    kept: list[tuple] = []
    changed: list[bool] = []

    def states(kwargs) -> dict[str, Tensor]:
        found = {f"{i} {key}": v for i, s in enumerate(kwargs["optimizer"].state.values()) for key, v in s.items() if torch.is_tensor(v)}
        return {k: v.clone() for k, v in found.items()} | everything(kwargs["model"])

    made = trainer(
        tmp_path,
        precision,
        At(step_begin=lambda s, k: kept.append(states(k)), step_skipped=lambda s, k: changed.append(not same(kept[-1], states(k)))),
        data=rows(16, {5: math.inf, 9: math.nan}),
        num_train_epochs=2,
        max_steps=-1,
        on_overflow="skip",
    )
    made.train()
    assert changed
    assert not any(changed)
    assert len(changed) == made.state.skipped_steps < made.state.attempted
    assert all(bool(v.isfinite().all()) for v in masters(made.model).values())


@pytest.mark.parametrize("precision", ["fp16-lean", "fp16-true", "fp16-mixed"])
def test_an_overflow_is_replayed_and_no_step_is_lost(tmp_path: Path, precision: str) -> None:
    made = trainer(tmp_path, precision, data=rows(16, {13: 2.0**12}), max_steps=8)
    made.train()
    assert (made.state.global_step, made.state.skipped_steps) == (8, 0)
    assert made.state.replayed_steps >= 1
    assert all(bool(v.isfinite().all()) for v in masters(made.model).values())


# --- optimizers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.Adam(p, 1e-2), lambda p: halfstep.optim.AdamW(p, 1e-2)])
def test_a_given_optimizer_gets_masters(tmp_path: Path, make) -> None:
    made = trainer(tmp_path, "bf16-lean", optimizers=lambda m: (make(m.parameters()), None))
    made.train()
    losses = [r["loss"] for r in made.state.log_history if "loss" in r]
    assert losses[-1] < losses[0]
    assert made.model.body[0].weight.dtype == torch.bfloat16
    assert not torch.equal(full_values(made.model.body[0].weight), made.model.body[0].weight.float())


def test_an_optimizer_made_for_other_formats_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", "bf16-mixed", optimizers=lambda m: (halfstep.optim.AdamW(m.parameters(), states="int8"), None))
    before = everything(made.model)
    with pytest.raises(ConfigError, match=r"made with states=int8, and the precision bf16-mixed has states=fp32. Leave one of them out"):
        made.train()
    assert same(everything(made.model), before)
    assert not (tmp_path / "run").exists()


def test_training_a_second_time_goes_on_from_the_masters(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", "bf16-lean", overwrite_output_dir=True)
    made.train()
    first: list[dict[str, Tensor]] = []
    made.add_callback(At(train_begin=lambda s, k: first.append(masters(k["model"]))))
    before = masters(made.model)
    made.train()
    assert same(first[0], before)
    assert not same(masters(made.model), before)


# --- what is saved -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-mixed", "fp16-true"])
def test_the_model_is_saved_in_the_format_it_was_loaded_in(tmp_path: Path, precision: str, loaded: torch.dtype) -> None:
    made = trainer(tmp_path / "run", precision, loaded=loaded)
    made.train()
    made.save_model(tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    expected = masters(made.model)
    assert sorted(written) == sorted(expected)
    assert all(written[name].dtype == loaded and torch.equal(written[name], value.to(loaded)) for name, value in expected.items())


def test_a_checkpoint_of_another_precision_is_refused_and_the_run_folder_left_alone(tmp_path: Path) -> None:
    trainer(tmp_path / "run", "bf16-lean", save_strategy="steps", save_steps=2, max_steps=2).train()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    for other in ("bf16-mixed", "bf16-lean,weights=kahan", "bf16-lean,states=bf16", "fp16-lean"):
        made = trainer(tmp_path / "run", other, save_strategy="steps", save_steps=2, max_steps=4)
        kept = everything(made.model)
        with pytest.raises(CheckpointError, match=f"was made under precision bf16-lean, and this run has {other}. Resume with the same precision"):
            made.train(resume_from_checkpoint=True)
        assert same(everything(made.model), kept)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_that_was_loaded_in_another_format_is_evaluated_in_it_and_not_trained_in_fp32(form: torch.dtype, tmp_path: Path) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(5, 8), nn.Linear(8, 3)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = self.line(self.table(input_ids))
            return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"input_ids": torch.tensor(i % 5), "labels": torch.tensor(i % 3)} for i in range(8)]
    model = Tokens().to(form)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    expected = model(torch.arange(8) % 5)["logits"].detach()
    made = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True), train_dataset=rows, eval_dataset=rows)
    assert made.evaluate()["eval_loss"] == pytest.approx(float(nn.functional.cross_entropy(expected, torch.arange(8) % 3)), rel=1e-6)
    wide = expected if form == torch.float64 else expected.float()
    assert torch.equal(torch.from_numpy(made.predict(rows).predictions), wide)
    with pytest.raises(PolicyError, match=r"of the 3 trainable parameters are (16-bit|neither fp32 nor 16-bit)"):
        made.train()
    assert made.evaluate()["eval_loss"] > 0, "and evaluated again"
    assert all(t.dtype == form and torch.equal(t, before[name]) for name, t in model.state_dict().items())
