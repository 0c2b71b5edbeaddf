"""`halfstep`, `halfstep doctor` and the help of every command."""

import json
from dataclasses import fields

import pytest

from halfstep import __version__, doctor
from halfstep.cli.main import COMMANDS, main
from halfstep.cli.options import GROUPS
from halfstep.hardware import FAMILIES
from halfstep.policy import PRESETS, bytes_per_parameter


@pytest.mark.parametrize("argv", [["--help"], ["-h"], []])
def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == (0 if argv else 2)
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and what in out for name, what in COMMANDS.items())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"halfstep {__version__}\n"


def test_the_help_of_train_tells_every_option_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    names = [f.name for group in GROUPS for f in fields(group)]
    assert [n for n in names if f"--{n}" not in out] == []
    assert "--resume" in out
    assert "--overwrite" in out
    assert "micro-batches per optimizer step" in out, "the docstrings are the help"
    assert "positions the model can look back on" in out


def test_the_help_of_train_is_grouped_by_topic_and_tells_types_choices_and_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # the width of the terminal changes nothing
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: halfstep train [CONFIG.yaml] [--name value ...]\n")
    topics = [line[:-1] for line in out.splitlines() if line and not line.startswith(" ") and line.endswith(":")]
    assert topics[2:6] == ["Text", "Model", "Run", "Batches"]
    assert topics[-3:] == ["Precision", "Performance", "Distributed"]
    assert len(topics) == len(GROUPS) + 2
    assert max(map(len, out.splitlines())) <= 110
    flat = " ".join(out.split())
    for told in (
        "--max_steps INT optimizer steps to apply; -1 means as many as the epochs have (default: 1000)",
        "--fp16 {true,false} the same as precision=fp16-mixed (default: false)",
        "--heal {pin,skip,raise} what follows",
        "--learning_rate NUMBER at its highest, after warm-up (default: 0.003)",
        "one of linear, cosine, cosine_with_restarts,",
        "--label_names NAME,NAME the columns that are labels",
    ):
        assert told in flat


def test_the_help_of_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--help"])
    assert stop.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_doctor_says_what_the_device_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line)
    facts = doctor("cpu").capabilities
    for name in ("fp32", "bf16", "fp16"):
        assert rows[name] == ("native" if name in facts.native else "emulated")
    assert rows["tf32"] == "not on this device"
    for family in ("matmul", "convolution", "attention"):
        assert "GFLOP/s a thread; bf16 " in rows[family]
    assert rows["products"].startswith("bf16: ")
    assert rows["rates"].startswith("measured ")
    assert rows["advice"].startswith(("fp32: ", "bf16-mixed: ", "fp16-mixed: "))
    assert "torch" in rows["versions"]
    for name, policy in PRESETS.items():
        assert rows[f"{name}:"] == bytes_per_parameter(policy).text


def test_doctor_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    facts = json.loads(capsys.readouterr().out)
    memory = facts.pop("bytes_per_parameter")
    assert facts == json.loads(json.dumps(doctor("cpu").as_dict()))
    assert [(row["family"], row["format"]) for row in facts["rates"]] == [(f, form) for form in ("bf16", "fp16") for f in FAMILIES]
    assert list(memory) == list(PRESETS)
    assert memory["bf16-mixed"] == {"castable": 16, "other": 16}
    assert memory["bf16-lean"] == {"castable": 8.0625, "other": 10.0625}
    assert facts["device"] == "cpu"
    assert set(facts["native"]) | set(facts["emulated"]) == {"fp32", "bf16", "fp16"}


@pytest.mark.parametrize("device", ["cuda", "tpu", "nonsense"])
def test_a_device_that_is_not_there_is_explained(capsys: pytest.CaptureFixture[str], device: str) -> None:
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    assert main(["doctor", "--device", device]) == 2
    err = capsys.readouterr().err
    assert err.startswith("halfstep: ConfigError: ")
    assert device in err
    assert "Use " in err


def test_ctrl_c_outside_a_run_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import halfstep.cli.doctor

    def stopped(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(halfstep.cli.doctor, "main", stopped)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "halfstep: stopped\n"
