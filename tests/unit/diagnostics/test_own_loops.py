"""Loops of torch's own as a recorder sees them: what is told of steps and losses, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import StepResult
from halfstep.diagnostics import Recorder, read_run
from halfstep.errors import ConfigError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 1))


def test_a_loop_of_torchs_own_is_recorded_too(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scales = [8.0, 8.0, 4.0, 4.0]  # as torch's scaler tells them after each update
    with Recorder(tmp_path, model, every=2, log_every=2, optimizer=optimizer) as recorder:
        for scale in scales:
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss, scale=scale)
            optimizer.zero_grad()
    run = read_run(tmp_path)
    assert [(e.step, e.kind) for e in run.events] == [(1, "note"), (3, "skipped"), (3, "scale")]
    assert "whether step 1 was applied is not known" in run.events[0].text
    assert [(s.step, s.kind) for s in run.layers] == [(k, kind) for k in (1, 2) for kind in ("gradients", "outputs", "weights")]
    assert run.series("scale") == ((2,), (8.0,))
    assert run.metrics[0]["loss"] > 0


@pytest.mark.parametrize(("start", "events"), [(2.0**127, [(1, "skipped"), (1, "scale")]), (1.0, [])])
def test_a_scaler_of_torchs_tells_of_the_first_step_too(start: float, events: list[tuple[int, str]], tmp_path: Path) -> None:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=start)
    with Recorder(tmp_path, model, scaler, every=0, log_every=1) as recorder:
        scaler.scale(model(torch.randn(6, 4)).square().mean() * 1e6).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.step(loss=0.5)
    run = read_run(tmp_path)
    assert [(e.step, e.kind) for e in run.events] == events
    assert [m["applied"] for m in run.metrics] == ([] if events else [1])


def test_a_line_has_the_mean_loss_of_its_own_steps(tmp_path: Path) -> None:
    with Recorder(tmp_path, net(), every=0, log_every=2) as recorder:
        for loss in (1.0, 3.0, 5.0, torch.tensor(9.0)):
            recorder.step(loss=loss)
    assert read_run(tmp_path).series("loss") == ((2, 4), (2.0, 7.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_once_in_a_loop_that_nothing_guards(bad: float, tmp_path: Path) -> None:
    with Recorder(tmp_path, net(), every=0, log_every=2) as recorder:
        for loss in (1.0, torch.tensor(bad), bad, 1.0, bad):
            recorder.step(loss=loss)
    assert [(e.step, e.kind) for e in read_run(tmp_path).events] == [(2, "nonfinite-loss"), (5, "nonfinite-loss")]


def test_a_loss_that_is_given_counts_beside_a_result(tmp_path: Path) -> None:
    with Recorder(tmp_path, net(), every=0, log_every=1) as recorder:
        recorder.step(StepResult(True, "applied", scale=1.0, next_scale=1.0), loss=3.0)
    assert read_run(tmp_path).series("loss") == ((1,), (3.0,))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a loss as the result": (lambda f: Recorder(f, net()).step(torch.tensor(1.0)), "a Tensor in the place of a StepResult"),
    "what torch's step gives": (lambda f: Recorder(f, net()).step(1.0), "a float in the place"),
    "several losses": (lambda f: Recorder(f, net()).step(loss=torch.ones(4)), "4 numbers"),
    "a text": (lambda f: Recorder(f, net()).step(loss="1"), "loss= was given a str"),  # type: ignore[arg-type]
    "half a step": (lambda f: Recorder(f, net(), every=1.5), "every=1.5"),  # type: ignore[arg-type]
    "a text of steps": (lambda f: Recorder(f, net(), every="2"), "every='2'"),  # type: ignore[arg-type]
    "no source": (lambda f: Recorder(f, net(), source=net()), "source= was given a Sequential"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_recorded_is_refused_at_once(case: str, tmp_path: Path) -> None:
    call, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        call(tmp_path)


def test_lines_of_another_run_are_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 900, "loss": 1}\n')
    with pytest.raises(ConfigError, match=r"already has metrics\.jsonl"):
        Recorder(tmp_path, net())
    Recorder(tmp_path, net(), log_every=0).close()
