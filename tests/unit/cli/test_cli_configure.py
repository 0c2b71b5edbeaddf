"""The command line of `halfstep train`: which value wins, which words are known, and what the others are told."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from halfstep.cli.main import main
from halfstep.cli.options import GROUPS, HINTS, on_the_line
from halfstep.cli.train import DEFAULTS, configure
from halfstep.errors import ConfigError
from halfstep.trainer import TrainingArguments
from halfstep.trainer.arguments import choices_of, options_of

FIELDS = [f.name for f in fields(TrainingArguments)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text("plan: 1\nprecision: bf16-mixed\n")


def arguments(*argv: str) -> TrainingArguments:
    """The settings of a command line as the trainer gets them."""
    settings, _ = configure(list(argv))
    return TrainingArguments(**{f.name: settings[f.name] for f in fields(TrainingArguments)})


def write(name: str, **settings: object) -> str:
    Path(name).write_text(yaml.safe_dump(settings))
    return name


def test_without_anything_the_defaults_are_those_of_the_demo() -> None:
    settings, resume = configure([])
    assert {k: settings[k] for k in DEFAULTS if k != "output_dir"} == {k: v for k, v in DEFAULTS.items() if k != "output_dir"}
    assert settings["precision"] == "bf16-mixed"
    assert settings["output_dir"] == "runs/001-bf16-mixed"
    assert not resume
    assert set(settings) == {f.name for group in GROUPS for f in fields(group)}


def test_a_configuration_wins_over_defaults_and_the_command_line_over_both() -> None:
    config = write("c.yaml", max_steps=7, learning_rate=0.5, layers=2)
    settings, _ = configure([config])
    assert (settings["max_steps"], settings["learning_rate"], settings["layers"], settings["save_steps"]) == (7, 0.5, 2, DEFAULTS["save_steps"])
    for argv in ([config, "--max_steps", "9"], ["--max_steps=9", config], ["--max-steps", "9", config]):
        settings, _ = configure(argv)
        assert (settings["max_steps"], settings["learning_rate"]) == (9, 0.5)


def test_a_run_to_resume_wins_over_defaults_only() -> None:
    Path("runs/a/checkpoint-5").mkdir(parents=True)
    write("runs/a/config.yaml", max_steps=7, layers=3, seed=1, output_dir="elsewhere")
    config = write("c.yaml", seed=2)
    settings, resume = configure(["--resume", "--output_dir", "runs/a", config, "--layers", "4"])
    assert resume
    assert (settings["max_steps"], settings["seed"], settings["layers"], settings["output_dir"]) == (7, 2, 4, "runs/a")


def test_every_value_survives_a_file() -> None:
    """What a run notes in config.yaml gives the same settings when it is read again."""
    first, _ = configure(
        ["--text", "a: b", "--prompt", "null", "--seed", "3", "--dropout", "0.25", "--label_names", '["a","b"]', "--save_total_limit", "null"]
    )
    again, _ = configure([write("c.yaml", **first)])
    assert again == first
    assert again["text"] == "a: b"
    assert again["prompt"] == "null"
    assert again["label_names"] == ["a", "b"]
    assert again["save_total_limit"] is None


@pytest.mark.parametrize("text", ["2e-3", "0.002", ".002"])
def test_numbers_may_be_written_as_people_write_them(text: str) -> None:
    Path("c.yaml").write_text(f"learning_rate: {text}\n")
    assert arguments("c.yaml").learning_rate == arguments("--learning_rate", text).learning_rate == 0.002


@pytest.mark.parametrize("argv", [["--fp16"], ["--fp16", "true"], ["--fp16=true"], ["--fp16", "--max_steps", "3"]])
def test_switches_may_be_bare(argv: list[str]) -> None:
    assert str(arguments(*argv).policy) == "fp16-mixed"


@pytest.mark.parametrize(
    ("argv", "policy"),
    [
        ([], "bf16-mixed"),
        (["--bf16"], "bf16-mixed"),
        (["--precision", "fp32"], "fp32"),
        (["--precision", "fp16-mixed,scale=static:64"], "fp16-mixed,scale=static:64"),
    ],
)
def test_the_precision_and_the_name_of_the_run(argv: list[str], policy: str) -> None:
    args = arguments(*argv)
    assert str(args.policy) == policy
    assert args.output_dir == f"runs/001-{args.policy.preset}"


def test_new_runs_are_numbered_beyond_all_that_are_there() -> None:
    for name in ("002-fp32", "010-bf16-mixed", "notes"):
        Path("runs", name).mkdir(parents=True)
    assert arguments("--precision", "fp32").output_dir == "runs/011-fp32"


def test_old_names_work_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments("--evaluation_strategy", "steps", "--no_cuda").use_cpu
    assert "halfstep: no_cuda is now called use_cpu; it is read as that\n" in capsys.readouterr().err
    Path("c.yaml").write_text("no_cuda: true\ngroup_by_length: true\nactivation_checkpointing: yes\n")
    args = arguments("c.yaml", "--evaluation-strategy=epoch", "--push_to_hub", "false")
    assert (args.use_cpu, args.train_sampling_strategy, args.gradient_checkpointing, args.eval_strategy) == (True, "group_by_length", True, "epoch")


SET: dict[str, tuple[str, object, list[str]]] = {  # option: (text, value, what else must be said)
    "text": ("a b", "a b", []),
    "eval_delay": ("2", 2, []),
    "greater_is_better": ("true", True, []),
    "bf16": ("true", True, []),
    "tf32": ("false", False, []),
    "precision": ("fp16-mixed", "fp16-mixed", []),
    "plan": ("plan.yaml", "plan.yaml", []),
    "weights": ("kahan", "kahan", ["--precision=bf16-lean"]),
    "states": ("bf16", "bf16", ["--precision=bf16-lean"]),
    "activations": ("int8", "int8", []),
    "fp32_modules": ("lm_head,*.norm*", ["lm_head", "*.norm*"], ["--bf16"]),
    "loss_scale": ("static:64", "static:64", ["--fp16"]),
    "scale_strategy": ("stock", "stock", ["--fp16"]),
    "scale_window": ("7", 7, ["--fp16"]),
    "scale_floor": ("2", 2.0, ["--fp16"]),
    "scale_ceiling": ("65536", 65536.0, ["--fp16"]),
    "optim_args": ("momentum=0.9,nesterov=true", "momentum=0.9,nesterov=true", ["--optim=sgd"]),
    "optim": ("torch.optim.NAdam", "torch.optim.NAdam", []),
    "lr_scheduler_kwargs": ('{"num_cycles": 2}', '{"num_cycles": 2}', []),
    "logging_nan_inf_filter": ("false", False, []),
    "logging_dir": ("there", "there", ["--report_to=tensorboard"]),
    "run_name": ("mine", "mine", ["--report_to=wandb,mlflow"]),
    "report_to": ("[tensorboard, mlflow]", ["tensorboard", "mlflow"], []),
    "label_names": ("[start, end]", ["start", "end"], []),
    "warmup_ratio": (".25", 0.25, []),
    "warmup_steps": ("0.1", 0.1, []),
    "adam_beta1": ("0.5", 0.5, []),
    "label_smoothing_factor": ("0.1", 0.1, []),
    "save_steps": ("0.5", 0.5, []),
    "gradient_checkpointing_kwargs": ("use_reentrant=false", "use_reentrant=false", ["--gradient_checkpointing"]),
    "torch_compile_backend": ("eager", "eager", ["--torch_compile"]),
    "torch_compile_mode": ("default", "default", ["--torch_compile"]),
    "save_strategy": ("best", "best", []),
    "save_total_limit": ("2", 2, []),
    "load_best_model_at_end": ("true", True, []),
    "dataloader_prefetch_factor": ("3", 3, ["--dataloader_num_workers=1"]),
    "dataloader_persistent_workers": ("true", True, ["--dataloader_num_workers=1"]),
    "dataloader_multiprocessing_context": ("spawn", "spawn", ["--dataloader_num_workers=1"]),
    "include_num_input_tokens_seen": ("true", "true", []),
    "lr_scheduler_type": ("cosine", "cosine", []),
    "include_for_metrics": ("[inputs]", ["inputs"], []),
    "ema_warmup": ("ratio", "ratio", ["--ema_decay=0.9"]),
    "ema_in_evaluation": ("false", False, ["--ema_decay=0.9"]),
    "gradient_release": ("last", "last", ["--on_overflow=skip"]),
    "width": ("8", 8, []),
    "heads": ("2", 2, []),
    "num_train_epochs": ("0.5", 0.5, []),
}


@pytest.mark.parametrize("name", [f.name for kind in GROUPS for f in fields(kind)])
def test_every_field_can_be_set_from_the_command_line_and_a_file(name: str) -> None:
    hint = HINTS[name]
    other = [c for c in choices_of(hint) if c != DEFAULTS.get(name)]
    if name in SET:
        text, value, more = SET[name]
    elif other:
        text, value, more = other[-1], other[-1], []
    else:
        kinds = {bool: ("true", True), int: ("3", 3), float: ("0.25", 0.25), str: ("some", "some")}
        text, value, more = *next(v for k, v in kinds.items() if k in options_of(hint)), []
    settings, _ = configure([f"--{name}", text, *more])
    assert settings[name] == value
    assert isinstance(settings[name], bool) == isinstance(value, bool)
    if name in FIELDS:
        TrainingArguments(**{k: settings[k] for k in FIELDS})
    assert configure([write("c.yaml", **on_the_line(more, {}).settings, **{name: value})])[0][name] == value


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--eval_strategy", "no"], "eval_strategy", "no"),
        (["--eval_strategy", "epoch"], "eval_strategy", "epoch"),
        (["--lr_scheduler_type", "constant"], "lr_scheduler_type", "constant"),
        (["--warmup_ratio", "0.1"], "warmup_ratio", 0.1),
    ],
)
def test_a_default_of_the_demo_does_not_contradict_what_is_asked_for(argv: list[str], name: str, value: object) -> None:
    from halfstep.demo import GPT, GPTConfig
    from halfstep.trainer.optimizers import make_optimizer
    from halfstep.trainer.schedules import make_scheduler

    args = arguments(*argv)
    assert getattr(args, name) == value
    make_scheduler(make_optimizer(GPT(GPTConfig(layers=1, width=4, heads=1)), args), args, 10)


@pytest.mark.parametrize(
    ("config", "argv", "policy"), [({"precision": "bf16-mixed"}, ["--fp16"], "fp16-mixed"), ({"bf16": True}, ["--precision", "fp32"], "fp32")]
)
def test_a_precision_on_the_command_line_wins_however_it_is_spelled(config: dict, argv: list[str], policy: str) -> None:
    assert str(arguments(write("c.yaml", **config), *argv).policy) == policy


@pytest.mark.parametrize("argv", [["--eval_strategy", "no"], ["--lr_scheduler_type", "constant"], ["--warmup_ratio", "0.1"]])
def test_the_command_line_wins_over_the_noted_settings_of_a_run_whole(argv: list[str]) -> None:
    """A run's config.yaml has every setting in it, those too that what is asked for now makes void."""
    from halfstep.trainer.optimizers import make_optimizer
    from halfstep.trainer.schedules import make_scheduler

    noted = write("c.yaml", **configure([])[0] | {"output_dir": ""})
    args = arguments(noted, *argv)
    model = torch.nn.Linear(2, 2)
    make_scheduler(make_optimizer(model, args), args, 10)
    assert str(getattr(args, argv[0][2:])) == argv[1]


# --- what is refused ------------------------------------------------------------------------------------------------------


def failure(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    """The one sentence that a wrong command line is answered with."""
    assert main(list(argv)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("halfstep: ")
    assert "Traceback" not in err
    assert list(Path().glob("runs/*")) == [], "nothing was begun"
    return err


@pytest.mark.parametrize(("word", "near"), [("trian", "train"), ("docter", "doctor")])
def test_unknown_commands_get_the_nearest(capsys: pytest.CaptureFixture[str], word: str, near: str) -> None:
    assert failure(capsys, word) == f"halfstep: ConfigError: halfstep has no command {word!r}. Did you mean {near!r}?\n"


@pytest.mark.parametrize(
    ("word", "near"),
    [("--learning_rat", "learning_rate"), ("--max-step=3", "max_steps"), ("--blocksize", "block_size"), ("--resum", "resume"), ("--lr", "seed")],
)
def test_unknown_options_get_the_nearest(capsys: pytest.CaptureFixture[str], word: str, near: str) -> None:
    err = failure(capsys, "train", word)
    assert f"halfstep train has no option --{word[2:].split('=')[0].replace('-', '_')}" in err
    assert f"Did you mean '{near}'?" in err or f"{near}" in err.partition("Known: ")[2]


def test_unknown_names_in_a_configuration_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'learning_rate'" in failure(capsys, "train", write("c.yaml", learning_rat=1))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--precision", "bf17-mixed"], "unknown precision 'bf17-mixed'. Did you mean 'bf16-mixed'?"),
        (["--precision", "fp16-mixed,scal=static:8"], "unknown key 'scal' in precision 'fp16-mixed,scal=static:8'. Did you mean 'scale'?"),
        (["--fp16", "--bf16"], "fp16=True and bf16=True were both given"),
        (["--max_steps", "many"], "max_steps"),
        (["--max_steps", "0"], "max_steps=0. Use 1 or more"),
        (["--optim", "adam"], "optim"),
        (["--width", "10", "--heads", "4"], "width=10 cannot be shared by heads=4"),
        (["--dropout", "1.5"], "dropout=1.5"),
        (["--report_to", "wandbb"], "report_to='wandbb' is not supported. Did you mean 'wandb'?"),
        (["--tf32"], "tf32 was asked for"),
        (["--resume", "--overwrite", "--output_dir", "x"], "--resume and --overwrite were both given"),
        (["nowhere.yaml"], "the configuration nowhere.yaml cannot be read: No such file or directory. Name a YAML file"),
        (["a.yaml", "b.yaml"], "b.yaml"),
    ],
)
def test_wrong_values_are_refused_with_a_remedy(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    for name in ("a.yaml", "b.yaml"):
        write(name, max_steps=1)
    assert said in failure(capsys, "train", *argv, *(["--use_cpu"] if "--tf32" in argv else []))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no settings. Write one `name: value` per line"),
        ("- 1\n- 2\n", "holds no settings"),
        ("a: [", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("max_steps: many", "max_steps"),
    ],
)
def test_a_configuration_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], content: str | bytes, said: str) -> None:
    Path("c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in failure(capsys, "train", "c.yaml")


def test_nothing_to_resume_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    err = failure(capsys, "train", "--resume", status=1)
    assert "there is no checkpoint to resume from under runs/. Name the run with --output_dir, or start without --resume" in err
    assert "holds no checkpoint to resume from" in failure(capsys, "train", "--resume", "--output_dir", "x", status=1)
    assert not Path("x").exists()


def test_the_newest_run_is_the_one_whose_checkpoint_is_the_youngest() -> None:
    import os

    for i, (run, step) in enumerate([("001-a", 90), ("002-b", 10), ("003-c", 50)]):
        folder = Path("runs", run, f"checkpoint-{step}")
        folder.mkdir(parents=True)
        os.utime(folder, (1000 + 10 * (i % 2), 1000 + 10 * (i % 2)))
    assert configure(["--resume"])[0]["output_dir"] == "runs/002-b"


def test_errors_inside_configure_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="halfstep train --help lists the options"):
        configure(["a.yaml", "b.yaml"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max_steps", "many"], "max_steps='many' is a str. Give it an int."),
        (["--max_steps", "2.5"], "max_steps=2.5 is a float. Give it an int."),
        (["--adam_beta2", "1"], "adam_beta2=1 is too large. Use less than 1."),
        (["--fp16", "maybe"], "the configuration maybe cannot be read"),
        (["--fp16=maybe"], "fp16='maybe' is a str. Give it a bool."),
        (["--heal", "pinn"], "heal='pinn' is not known. Did you mean 'pin'?"),
        (["--width", "wide"], "width='wide' is a str. Give it an int."),
        (["--text"], "--text has no value. Write --text=VALUE."),
        (["--lr_scheduler_kwargs", "num_cycles=2,"], "num_cycles"),
        (
            ["--optim", "adamw_bnb_8bit"],
            "optim='adamw_bnb_8bit' is not carried by halfstep. For moments in 8 bits use optim='adamw_halfstep' and states='int8'",
        ),
        (["--push_to_hub"], "push_to_hub=True is not carried by halfstep. Save with trainer.save_model(folder)"),
        (["--deepspeed", "ds.json"], "deepspeed='ds.json' is not carried by halfstep. For less memory use precision='bf16-lean'"),
        (["--no_cuda", "--use_cpu"], "no_cuda is the old name of use_cpu, and both were given"),
    ],
)
def test_wrong_values_get_the_text_that_the_arguments_give(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in failure(capsys, "train", *argv)
