"""One source: the same arguments from Python, a dict, YAML, JSON and text; other libraries' names read or refused."""

import dataclasses
import enum
import json
from pathlib import Path

import pytest
import torch
import yaml

from halfstep import TrainingArguments
from halfstep.errors import ConfigError
from halfstep.trainer.arguments import NOT_CARRIED, OTHER_NAMES, read
from halfstep.trainer.arguments.values import arguments_in

SOME = {
    "output_dir": "there",
    "learning_rate": 2e-3,
    "max_steps": 7,
    "fp16": True,
    "label_names": ["a", "b"],
    "optim": "sgd",
    "optim_args": {"momentum": 0.9, "nesterov": True},
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"power": 2.0},
    "eval_strategy": "steps",
    "eval_steps": 0.25,
    "report_to": ["tensorboard"],
    "save_total_limit": 3,
    "scale_floor": 2.0,
}


def test_every_form_gives_the_same_arguments(tmp_path: Path) -> None:
    args = TrainingArguments(**SOME)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(args.to_dict()))
    (tmp_path / "a.json").write_text(args.to_json_string())
    assert TrainingArguments.from_dict(SOME) == args
    assert TrainingArguments.from_dict(args.to_dict()) == args
    assert TrainingArguments.from_file(tmp_path / "a.yaml") == args
    assert TrainingArguments.from_file(str(tmp_path / "a.json")) == args
    assert TrainingArguments(**yaml.safe_load((tmp_path / "a.yaml").read_text())) == args
    assert TrainingArguments(**json.loads(args.to_json_string())) == args


def test_texts_are_read_by_the_types_of_their_fields(tmp_path: Path) -> None:
    """YAML takes 2e-3 for a text, and everything on a command line is one."""
    (tmp_path / "a.yaml").write_text(
        "learning_rate: 2e-3\nmax_steps: '7'\nfp16: 'yes'\noptim: sgd\noptim_args: momentum=0.9,nesterov=true\neval_strategy: 'no'\n"
    )
    args = TrainingArguments.from_file(tmp_path / "a.yaml")
    assert (args.learning_rate, args.max_steps, args.fp16, args.eval_strategy) == (0.002, 7, True, "no")
    assert args.optim_args == {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "3", 3),
        (int, "-1", -1),
        (float, "1e-3", 1e-3),
        (float, "inf", float("inf")),
        (int, "many", "many"),
        (bool, "Yes", True),
        (bool, "maybe", "maybe"),
        (str, "null", "null"),
        (str | None, "null", None),
        (int | None, "null", None),
        (list[str] | None, "a, b", ["a", "b"]),
        (list[str] | None, '["a", "b"]', ["a", "b"]),
        (str | list[str] | None, "a", "a"),
        (str | list[str] | None, "a,b", ["a", "b"]),
        (str | list[str] | None, "[a", "[a"),
    ],
)
def test_a_text_is_a_value_of_its_type_or_stays_one(hint: object, text: str, value: object) -> None:
    found = read(hint, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("a=1,b=1e-3", {"a": 1, "b": 1e-3}),
        ("a=(0.9, 0.99), b=name,c=None", {"a": [0.9, 0.99], "b": "name", "c": None}),
        ("a=[1,2],b=False", {"a": [1, 2], "b": False}),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
    ],
)
def test_arguments_in_a_text(text: str, found: dict) -> None:
    assert arguments_in("optim_args", text) == found


@pytest.mark.parametrize(
    ("content", "said"), [("- 1", "holds no settings"), ("a: [", "is not YAML"), ("learning_rat: 1", "Did you mean 'learning_rate'")]
)
def test_a_file_that_holds_no_arguments_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ConfigError, match=said):
        TrainingArguments.from_file(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory. Name a YAML file"):
        TrainingArguments.from_file(tmp_path / "b.yaml")


def test_loggers_get_numbers_truth_values_and_texts() -> None:
    plain = TrainingArguments(**SOME).to_sanitized_dict()
    assert {type(v) for v in plain.values()} <= {int, float, bool, str}
    assert (plain["label_names"], plain["data_seed"], plain["train_batch_size"], plain["fp16"]) == ("['a', 'b']", "None", 8, True)


class Kind(enum.Enum):
    COSINE = "cosine"


def test_other_forms_become_plain_values(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=tmp_path,
        lr_scheduler_type=Kind.COSINE,
        label_names=("a",),
        optim=torch.optim.NAdam,
        include_num_input_tokens_seen=True,
        logging_steps=3.0,
    )
    assert (args.output_dir, args.lr_scheduler_type, args.label_names, args.optim) == (str(tmp_path), "cosine", ["a"], "torch.optim.nadam.NAdam")
    assert (args.include_num_input_tokens_seen, args.logging_steps) == ("all", 3)
    assert TrainingArguments.from_dict(yaml.safe_load(yaml.safe_dump(args.to_dict()))) == args


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_what_is_not_carried_is_refused_with_a_remedy_and_harmless_values_are_taken(name: str) -> None:
    harmless, remedy = NOT_CARRIED[name]
    assert len(remedy) > 20
    for value in harmless:
        assert TrainingArguments(**{name: value}) == TrainingArguments()
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**{name: "something"})
    assert (caught.value.cause, caught.value.remedy) == (f"{name}='something' is not carried by halfstep", remedy)
    with pytest.raises(AttributeError, match=rf"^TrainingArguments has no '{name}'. halfstep does not carry it\. "):
        getattr(TrainingArguments(), name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_of_today_are_read_without_a_note(name: str) -> None:
    value: object = {"use_reentrant": False} if name.endswith("kwargs") else True
    more = {"gradient_checkpointing": True} if name.endswith("kwargs") else {}
    assert getattr(TrainingArguments(**{name: value}, **more), OTHER_NAMES[name]) == value
    with pytest.raises(ConfigError, match=rf"{name} is another name of {OTHER_NAMES[name]}, and both were given"):
        TrainingArguments(**{name: value, OTHER_NAMES[name]: value})


def test_a_switch_that_became_a_choice_is_read_when_it_is_off_too() -> None:
    with pytest.warns(DeprecationWarning, match="group_by_length is now called train_sampling_strategy"):
        assert TrainingArguments(group_by_length=False).train_sampling_strategy == "random"
    with pytest.raises(ConfigError, match=r"adafactor='yes' is a str. Use optim='adafactor'"):
        TrainingArguments(adafactor="yes")


def test_setting_a_value_says_how_it_is_done() -> None:
    args = TrainingArguments()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"max_steps cannot be set: .* Use dataclasses.replace\(args, max_steps=...\)"):
        args.max_steps = 3
    with pytest.raises(AttributeError, match=r"^TrainingArguments has no 'max_step'\.$"):
        _ = args.max_step


@pytest.mark.parametrize(("settings", "steps"), [({"warmup_steps": 7}, 7), ({"warmup_steps": 0.11}, 11), ({"warmup_ratio": 0.101}, 11), ({}, 0)])
def test_steps_of_warm_up(settings: dict, steps: int) -> None:
    assert TrainingArguments(**settings).get_warmup_steps(100) == steps


@dataclasses.dataclass
class Model:
    name: str = "x"


@dataclasses.dataclass(frozen=True)
class Extended(TrainingArguments):
    beta: float = 0.5
    kind: str | None = None


def test_the_parser_of_transformers_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import HfArgumentParser

    for field in dataclasses.fields(TrainingArguments):  # it changes the types of fields
        monkeypatch.setattr(field, "type", field.type)
    line = "--name y --output_dir o --max_steps 3 --learning_rate 1e-3 --fp16 --eval_strategy steps --eval_steps 2 --report_to wandb --optim sgd "
    line += "--optim_args momentum=0.9 --lr_scheduler_type cosine --label_names a b --include_num_input_tokens_seen all --no_remove_unused_columns"
    model, args = HfArgumentParser((Model, TrainingArguments)).parse_args_into_dataclasses(line.split())
    assert model == Model("y")
    assert args == TrainingArguments(
        "o",
        max_steps=3,
        learning_rate=1e-3,
        fp16=True,
        eval_strategy="steps",
        eval_steps=2,
        report_to="wandb",
        optim="sgd",
        optim_args="momentum=0.9",
        lr_scheduler_type="cosine",
        label_names=["a", "b"],
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
    )


def test_a_frozen_subclass_adds_fields_which_are_checked_too() -> None:
    args = Extended.from_dict({"beta": "0.25", "max_steps": "3", "kind": "null"})
    assert (args.beta, args.max_steps, args.kind) == (0.25, 3, None)
    with pytest.raises(ConfigError, match=r"beta='x' is a str. Give it a float"):
        Extended(beta="x")


def test_scripts_may_ask_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    args = TrainingArguments(use_cpu=True, per_device_eval_batch_size=5)
    alone = (args.device, args.n_gpu, args.world_size, args.process_index, args.local_process_index, args.should_save, args.should_log)
    assert alone == (torch.device("cpu"), 0, 1, 0, 0, True, True)
    assert (args.train_batch_size, args.eval_batch_size) == (8, 5)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert (args.world_size, args.process_index, args.local_process_index, args.should_save, args.should_log) == (4, 3, 1, False, False)
