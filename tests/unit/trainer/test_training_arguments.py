"""`TrainingArguments`: a frozen value that refuses what is unknown, wrong, contradictory or without effect."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep import Policy, TrainingArguments
from halfstep.errors import ConfigError
from halfstep.trainer.arguments import IN_THE_POLICY, NOT_CARRIED, OLD_NAMES, OTHER_NAMES

FIELDS = {f.name: f for f in dataclasses.fields(TrainingArguments)}
OLD_VALUES = {  # old name: (what is given, what is read)
    "evaluation_strategy": ("epoch", "epoch"),
    "no_cuda": (True, True),
    "per_gpu_train_batch_size": (3, 3),
    "per_gpu_eval_batch_size": (5, 5),
    "group_by_length": (True, "group_by_length"),
    "adafactor": (True, "adafactor"),
    "evaluate_during_training": (True, "steps"),
    "include_tokens_per_second": (True, "all"),
    "xpu_backend": ("gloo", "gloo"),
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_work_with_one_note_that_points_at_the_caller(old: str) -> None:
    with pytest.warns(DeprecationWarning, match="is now called") as notes:
        args = TrainingArguments(**{old: OLD_VALUES[old][0]})
    assert getattr(args, OLD_NAMES[old]) == OLD_VALUES[old][1]
    assert [str(n.message) for n in notes] == [f"{old} is now called {OLD_NAMES[old]}; it is read as that"]
    assert notes[0].filename == __file__


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no_cuda is the old name of use_cpu, and both were given. Leave no_cuda out"):
        TrainingArguments(no_cuda=True, use_cpu=False)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("learning_rat", "learning_rate"),
        ("per_device_batch_size", "per_device_eval_batch_size"),
        ("eval_stategy", "eval_strategy"),
        ("max_step", "max_steps"),
        ("warmup_step", "warmup_steps"),
        ("fp61", "fp16"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**{word: 1})
    assert caught.value.cause == f"TrainingArguments has no field {word!r}"
    assert caught.value.remedy == f"Did you mean {near!r}?"


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"Known: .*learning_rate"):
        TrainingArguments(xyzzy=1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_value_of_the_wrong_type_is_refused_by_name(data: st.DataObject) -> None:
    kinds = {"int": ["3", 2.5, True, None, [1]], "float": ["3", True, None, [1]], "bool": [1, 0, "true", None], "int | None": ["3", 2.5, True]}
    name = data.draw(st.sampled_from([n for n, f in FIELDS.items() if f.type in kinds]))
    value = data.draw(st.sampled_from(kinds[FIELDS[name].type]))
    with pytest.raises(ConfigError, match=rf"^{name}=.* is a {type(value).__name__}\. Give it an? (int|float|bool)\."):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("label_names", "labels"), ("label_names", [1]), ("output_dir", 3), ("output_dir", None), ("precision", 16), ("resume_from_checkpoint", 5)],
)
def test_text_and_lists_are_checked_too(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        TrainingArguments(**{name: value})


def test_a_policy_is_taken_as_its_text_or_refused() -> None:
    policy = Policy("bf16-mixed", autocast="bf16")
    try:
        args = TrainingArguments(precision=policy)
    except ConfigError:
        return
    assert args.to_dict()["precision"] == "bf16-mixed"


def test_a_path_is_a_place_too(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=tmp_path / "run")
    assert yaml.safe_load(yaml.safe_dump(args.to_dict()))["output_dir"] == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("optim", "adamw_tourch", "adamw_torch"),
        ("lr_scheduler_type", "cosin", "cosine"),
        ("eval_strategy", "step", "steps"),
        ("save_strategy", "epochs", "epoch"),
        ("logging_strategy", "non", "no"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_nearest(name: str, value: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='{value}' is not known. Did you mean '{near}'"):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("per_device_train_batch_size", 0, "1"),
        ("gradient_accumulation_steps", -1, "1"),
        ("logging_steps", 0, "1"),
        ("save_total_limit", 0, "1"),
        ("max_bad_steps", 0, "1"),
        ("learning_rate", -1e-9, "0"),
        ("learning_rate", float("nan"), "0"),
        ("weight_decay", -0.1, "0"),
        ("max_grad_norm", -1.0, "0"),
        ("warmup_steps", -1, "0"),
        ("dataloader_num_workers", -1, "0"),
    ],
)
def test_numbers_that_are_too_small_are_refused(name: str, value: float, least: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.* is too small. Use {least} or more"):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"fp16": True, "bf16": True}, r"fp16=True and bf16=True were both given.* Leave one of them out"),
        ({"fp16": True, "precision": "bf16-mixed"}, r"precision='bf16-mixed' and fp16=True were both given"),
        ({"tf32": True, "precision": "fp32"}, r"tf32 off and tf32=True. Write precision='tf32'"),
        ({"precision": "bf17-mixed"}, r"unknown precision 'bf17-mixed'. Did you mean 'bf16-mixed'"),
        ({"precision": "fp32,scale=dynamic"}, r"has no use under fp32"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, r"warmup_steps and warmup_ratio were both given"),
        ({"warmup_ratio": 1.5}, r"more than the whole run. Use a share between 0 and 1"),
        ({"eval_steps": 3}, r"eval_steps=3 has no effect with eval_strategy='no'. Use eval_strategy='steps'"),
        ({"report_to": "wandbb"}, r"report_to='wandbb' is not supported. Did you mean 'wandb'.*metrics.jsonl"),
        ({"max_steps": 0}, r"max_steps=0. Use 1 or more, or -1"),
        ({"max_steps": -2}, r"max_steps=-2. Use 1 or more, or -1"),
        ({"num_train_epochs": 0}, r"num_train_epochs=0 trains nothing"),
        ({"num_train_epochs": -1.0}, r"num_train_epochs=-1.0 trains nothing"),
    ],
)
def test_contradictions_are_refused(settings_: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**settings_)


def test_it_is_frozen_and_replace_makes_another_one() -> None:
    args = TrainingArguments(output_dir="a", max_steps=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.max_steps = 6
    other = dataclasses.replace(args, max_steps=7)
    assert (args.max_steps, other.max_steps, other.output_dir) == (5, 7, "a")
    with pytest.raises(ConfigError, match="bf16=True were both given"):
        dataclasses.replace(args, fp16=True, bf16=True)
    with pytest.raises(ConfigError, match="Did you mean 'max_steps'"):
        dataclasses.replace(args, max_step=3)


@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_steps": st.integers(1, 9),
            "learning_rate": st.floats(0, 1),
            "precision": st.sampled_from(["fp32", "fp16-mixed,scale=static:8", None]),
            "label_names": st.none() | st.lists(st.text("ab", min_size=1)),
            "save_total_limit": st.none() | st.integers(1, 3),
            "seed": st.integers(0, 99),
        },
    )
)
def test_all_fields_as_plain_values_make_the_same_arguments_again(given_settings: dict) -> None:
    args = TrainingArguments(**given_settings)
    plain = args.to_dict()
    assert set(plain) == set(FIELDS)
    assert {k: plain[k] for k in given_settings} == given_settings
    assert TrainingArguments(**json.loads(json.dumps(plain))) == args
    assert TrainingArguments(**yaml.safe_load(yaml.safe_dump(plain))) == args


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({}, "fp32"),
        ({"fp16": True}, "fp16-mixed"),
        ({"bf16": True}, "bf16-mixed"),
        ({"tf32": True}, "tf32"),
        ({"bf16": True, "tf32": True}, "bf16-mixed,tf32=on"),
    ],
)
def test_flags_give_the_policy(settings_: dict, text: str) -> None:
    assert str(TrainingArguments(**settings_).policy) == text


def test_the_docstring_tells_every_field() -> None:
    told = {line.partition(":")[0].strip() for line in (TrainingArguments.__doc__ or "").splitlines()}
    assert set(FIELDS) <= told


def test_evaluations_follow_the_logging_steps_when_not_told_otherwise() -> None:
    assert TrainingArguments(eval_strategy="steps", logging_steps=7).steps_between_evaluations == 7
    assert TrainingArguments(eval_strategy="steps", logging_steps=7, eval_steps=3).steps_between_evaluations == 3


def test_every_field_that_transformers_has_too_has_its_name_and_default_there() -> None:
    from transformers import TrainingArguments as Theirs

    theirs = {f.name: f for f in dataclasses.fields(Theirs)}
    own = {"precision", "max_bad_steps", "on_overflow", "log_stalled", "heal", "rules", "plan", "chunked_loss", "reduce_dtype", *IN_THE_POLICY}
    own |= {"gradient_release", "ema_decay", "ema_warmup", "ema_in_evaluation", "record_every", "audit", "report"}
    older = {"overwrite_output_dir", "warmup_ratio", "logging_dir"}  # of transformers 4
    different = {"output_dir", "disable_tqdm", "optim", "logging_nan_inf_filter", "gradient_checkpointing", "include_for_metrics"}
    assert set(FIELDS) - own - older <= set(theirs)
    assert set(theirs) - set(FIELDS) == set(theirs) & (set(NOT_CARRIED) | set(OTHER_NAMES))
    same = {n for n in FIELDS if n in theirs and n not in different}
    wrong = {n: (FIELDS[n].default, theirs[n].default) for n in same if getattr(theirs[n].default, "value", theirs[n].default) != FIELDS[n].default}
    assert wrong == {}
