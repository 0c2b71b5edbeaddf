"""Each number out of its range, and each pair of settings that contradict each other, is refused with the remedy; what is in range is taken."""

from typing import Any

import pytest

from halfstep import TrainingArguments
from halfstep.errors import ConfigError
from halfstep.trainer.arguments.checks import AT_LEAST, BELOW
from halfstep.trainer.arguments.optimizers import INSTEAD

NEEDS: dict[str, dict[str, Any]] = {  # what else must be said for a field to have an effect
    "eval_steps": {"eval_strategy": "steps"},
    "eval_delay": {"eval_strategy": "epoch"},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "scale_window": {"fp16": True},
}


@pytest.mark.parametrize("name", AT_LEAST)
def test_the_least_is_taken_and_less_is_refused(name: str) -> None:
    least, more = AT_LEAST[name], NEEDS.get(name, {})
    whole = "int" in TrainingArguments.__dataclass_fields__[name].type or least == 1
    with pytest.raises(ConfigError, match=rf"^{name}=.* is too small\. Use {least} or more\."):
        TrainingArguments(**{name: least - (1 if whole else 1e-9)}, **more)
    if name != "neftune_noise_alpha":  # 0 is too small as well: no noise is no setting
        assert getattr(TrainingArguments(**{name: least}, **more), name) == least


@pytest.mark.parametrize("name", BELOW)
def test_more_than_the_most_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.* is too large\. Use less than {BELOW[name]}\."):
        TrainingArguments(**{name: BELOW[name]})


@pytest.mark.parametrize("name", [n for n in AT_LEAST if isinstance(TrainingArguments.__dataclass_fields__[n].default, float)])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")])
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.* is (too small|no finite number)\."):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("name", "more"), [("logging_steps", {}), ("save_steps", {}), ("eval_steps", {"eval_strategy": "steps"}), ("warmup_steps", {})]
)
def test_steps_are_whole_or_a_share_of_all(name: str, more: dict) -> None:
    assert getattr(TrainingArguments(**{name: 0.25}, **more), name) == 0.25
    whole = getattr(TrainingArguments(**{name: 4.0}, **more), name)
    assert (whole, type(whole)) == (4, int)
    with pytest.raises(ConfigError, match=rf"{name}=2.5 is no whole number of steps. Use a whole number, or less than 1 for a share of all steps"):
        TrainingArguments(**{name: 2.5}, **more)
    if name != "warmup_steps":
        with pytest.raises(ConfigError, match=rf"{name}=0 is too small. Use 1 or more, or a share"):
            TrainingArguments(**{name: 0}, **more)


BEST = {"load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (BEST, r"load_best_model_at_end=True needs evaluations, and eval_strategy='no' makes none. Use eval_strategy="),
        ({"save_strategy": "best"}, r"save_strategy='best' needs evaluations"),
        ({**BEST, "eval_strategy": "epoch"}, r"eval_strategy='epoch' is not save_strategy='steps'. Use save_strategy='epoch' or 'best'"),
        ({**BEST, "eval_strategy": "epoch", "save_strategy": "no"}, r"is not save_strategy='no'"),
        (
            {**BEST, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4},
            r"save_steps=4, evaluations every 3 steps. Make save_steps a multiple of eval_steps",
        ),
        ({**BEST, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 0.5}, r"save_steps=0.5, evaluations every 3 steps"),
        ({"metric_for_best_model": "f1"}, r"metric_for_best_model='f1' has no effect with eval_strategy='no'"),
        ({"greater_is_better": False}, r"greater_is_better=False has no effect with eval_strategy='no'"),
        ({"eval_delay": 1}, r"eval_delay=1 has no effect with eval_strategy='no'"),
        ({"batch_eval_metrics": True, "prediction_loss_only": True}, r"prediction_loss_only=True gives none"),
        ({"bf16_full_eval": True, "fp16_full_eval": True}, r"bf16_full_eval=True and fp16_full_eval=True were both given"),
        ({"save_strategy": "no", "save_total_limit": 2}, r"save_total_limit=2 has no effect with save_strategy='no'"),
        ({"logging_strategy": "no", "logging_first_step": True}, r"logging_first_step=True has no effect with logging_strategy='no'"),
        ({"logging_nan_inf_filter": True}, r"would hide losses that are not finite. Leave it out"),
        ({"report_to": ["none", "wandb"]}, r"says two things. Leave 'none' and 'all' out of a list"),
        ({"logging_dir": "x"}, r"logging_dir='x' has no effect without TensorBoard. Use report_to='tensorboard'"),
        ({"run_name": "x"}, r"run_name='x' has no effect with report_to='none'"),
        ({"gradient_checkpointing_kwargs": "use_reentrant=True"}, r"has no effect without gradient_checkpointing. Use gradient_checkpointing=True"),
        ({"torch_compile_mode": "default"}, r"torch_compile_mode='default' has no effect without torch_compile. Use torch_compile=True"),
        ({"dataloader_persistent_workers": True}, r"has no effect without worker processes. Use dataloader_num_workers=1 or more"),
        ({"optim": "sgd", "adam_beta1": 0.5}, r"adam_beta1=0.5 has no effect with optim='sgd'. If it takes betas, give optim_args=.'betas'"),
        ({"optim": "lion", "adam_epsilon": 1e-3}, r"adam_epsilon=0.001 has no effect with optim='lion'"),
        ({"optim_args": "betas=(0.1,0.2)"}, r"optim_args names 'betas', which adam_beta1 gives"),
        ({"optim": "sgd", "optim_args": {"lr": 1}}, r"optim_args names 'lr', which learning_rate gives"),
        ({"optim_args": "momentum"}, r"'momentum' in optim_args='momentum' is no name=value. Write name=value,name=value"),
        ({"optim_args": "a=1,a=2"}, r"'a=2' in optim_args='a=1,a=2' stands twice"),
        ({"optim_args": "{1}"}, r"optim_args='\{1\}' is not JSON"),
        ({"optim_args": 3}, r"optim_args=3 is a int. Give it a dict or a str"),
        ({"weights": "split"}, r"weights=split has no effect under fp32"),
        ({"precision": "bf16-lean,weights=kahan", "weights": "split24"}, r"precision='bf16-lean,weights=kahan' and weights=split24 were both given"),
        ({"precision": "auto", "states": "int8"}, r"precision='auto' and states=int8 were both given"),
        ({"activations": "int8", "torch_compile": True}, r"activations=int8 has no effect with torch_compile=True, whose graphs decide"),
        ({"precision": "bf16-mixed,activations=fp8", "activations": "int8"}, r"activations=fp8' and activations=int8 were both given"),
        ({"bf16": True, "loss_scale": "dynamic"}, r"scale=dynamic.* has no use under bf16-mixed"),
        ({"fp16": True, "scale_floor": 3.0}, r"scale_floor=3 is not a power of two"),
        ({"fp16": True, "loss_scale": "static:64", "scale_window": 3}, r"scale_window and scale_strategy have no effect with scale=static:64"),
        ({"fp32_modules": ["head"]}, r"fp32=head has no effect under fp32"),
        ({"fp32_modules": "head"}, r"fp32_modules='head' is not a list of text. Write for example fp32_modules=\['lm_head'\]"),
        ({"dataloader_multiprocessing_context": "thread"}, r"dataloader_multiprocessing_context='thread' is not known"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {**BEST, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 6},
        {**BEST, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
        {**BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "f1"},
        {**BEST, "eval_strategy": "steps", "save_strategy": "best", "save_total_limit": 1},
        {"report_to": ["tensorboard", "wandb"], "run_name": "x", "logging_dir": "y"},
        {"report_to": None},
        {"report_to": []},
        {"optim": "lion", "adam_beta1": 0.5},
    ],
)
def test_what_goes_together_is_taken(settings: dict) -> None:
    args = TrainingArguments(**settings)
    assert {name: getattr(args, name) for name in settings} == settings


@pytest.mark.parametrize("name", INSTEAD)
def test_optimizers_that_are_not_carried_name_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim='{name}' is not carried by halfstep\. .*(optim=|precision=)"):
        TrainingArguments(optim=name)


def test_transformers_has_no_optimizer_that_is_neither_carried_nor_refused_by_name() -> None:
    from transformers.training_args import OptimizerNames

    from halfstep.trainer.arguments import TAKES

    assert {o.value for o in OptimizerNames} <= {*TAKES, *INSTEAD}


def test_the_fields_of_precision_come_together_in_the_policy() -> None:
    args = TrainingArguments(fp16=True, weights="split", states="int8", fp32_modules=["a", "*.b"], loss_scale="dynamic:64", scale_ceiling=128.0)
    assert str(args.policy) == "fp16-mixed,weights=split,states=int8,scale=dynamic:64,scale_ceiling=128,fp32=a|*.b"
