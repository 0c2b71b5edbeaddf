"""`plan`: the modules that 16 bits do not hold are named before anything overflows, with the scale that the run finds; the model stays as it was."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from plan_models import (
    FAR,
    NEAR,
    Apply,
    Everything,
    Scores,
    Sum,
    amplified,
    batches,
    cancelled,
    divided,
    large_fp32,
    masked,
    masked_as_transformers,
    net,
    snapshot,
)
from torch import nn
from torch.utils.data import DataLoader

import halfstep
from halfstep import Accelerator, Plan
from halfstep.amp import bind
from halfstep.errors import ConfigError
from halfstep.policy import parse
from overflowing import BEYOND, t5_like

CPU = torch.device("cpu")


def planned(model: nn.Module, precision: Any = "fp16-mixed", data: Any = None, **settings: Any) -> Plan:
    return halfstep.plan(model, batches() if data is None else data, precision=precision, **{"rounds": 0, **settings})


RANGES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "beyond": (lambda: t5_like(FAR, BEYOND), "fp16-mixed", ("blocks.1.wo",)),
    "lean": (lambda: t5_like(FAR, BEYOND), "fp16-lean", ("blocks.1.wo",)),
    "within a factor of 4": (lambda: t5_like(NEAR, FAR), "fp16-mixed", ("blocks.0.wo",)),
    "well inside": (lambda: t5_like(1.0, FAR), "fp16-mixed", ()),
    "bf16 has the range": (lambda: t5_like(BEYOND, BEYOND), "bf16-mixed", ()),
    "two, one behind the other": (lambda: t5_like(BEYOND, BEYOND), "fp16-mixed", ("blocks.0.wo", "blocks.1.wo")),
    "hidden by code that mends it": (lambda: t5_like(BEYOND, 1.0, hide=True), "fp16-mixed", ("blocks.0.wo",)),
    "all is fp16: the norms read it": (lambda: t5_like(NEAR, 1.0), "fp16-true", ("blocks.0.wo", "blocks.1.norm", "norm")),
    "scores of a product by hand": (lambda: net(Scores()), "fp16-mixed", ("between.0",)),
    "read from fp32": (lambda: net(large_fp32()), "fp16-mixed", ("between.0.2",)),
    "the mask of transformers is none": (lambda: net(Apply(masked_as_transformers)), "fp16-mixed", ()),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "lean")) for name in RANGES])
def test_modules_beyond_the_range_are_named_before_anything_overflows(name: str) -> None:
    made, precision, expected = RANGES[name]
    found = planned(made(), precision)
    assert set(found.modules) == set(expected), str(found)
    assert all(h.cause == "range" for h in found.held)
    assert not found.notes
    model = made()
    binding = bind(model, found.policy, CPU)
    outputs: list[torch.Tensor] = []
    for part in model.modules():
        part.register_forward_hook(lambda part, given, made: outputs.extend([made] if isinstance(made, torch.Tensor) else made.values()))
    for batch in batches():
        model(**batch)
    assert all(bool(t.isfinite().all()) for t in outputs)
    binding.remove()


def test_the_whole_fp16_stream_names_who_makes_and_who_reads() -> None:
    found = planned(t5_like(1.0, 1.5e5), "fp16-true")
    assert found.modules == ("blocks.1.wo", "norm"), str(found)
    assert "ends at 65,504" in str(found).splitlines()[1]


def test_an_attention_that_reads_its_weights_is_held_itself_and_norms_read_what_it_gives() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model.self_attn.out_proj.weight.data *= 1e6
    data = [torch.randn(2, 5, 16)]
    assert planned(model, "fp16-mixed", data).modules == ("self_attn",)
    found = planned(model, "fp16-true", data)
    assert found.modules == ("self_attn", "norm1", "norm2")
    assert found.held[1].why.startswith("it reads values up to")


def test_a_model_and_a_batch_that_are_fp16_have_fp32_to_compare_with() -> None:
    found = planned(t5_like(1.0).half(), None, [{name: t.half() for name, t in batch.items()} for batch in batches()])
    assert not found.candidate("fp32").usable
    assert "16-bit" in found.candidate("fp32").problem
    assert found.candidate("fp16-mixed").usable
    assert 0 < (found.candidate("fp16-mixed").gradient_error or 0.0) < 0.01


def test_a_sum_of_a_modules_own_code_holds_the_part_that_makes_it_fp32() -> None:
    found = planned(net(Sum()))
    (held,) = found.held
    assert held.module.startswith("between.0.parts."), str(found)
    assert "between.0 (add" in held.why
    assert found.tried[-1].loss_error is not None
    assert found.tried[-1].loss_error < 0.02


class Root(nn.Module):
    """Makes values beyond fp16's range in the code of the model itself."""

    def __init__(self, later: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.later = nn.Linear(8, 8), nn.LayerNorm(8), later

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        made = self.layer(x) * (300.0 if self.later else 9e4)
        made = made * 300.0 if self.later else made  # of what is no part's output any more
        return self.norm(made).square().mean()


def root(later: bool) -> Root:
    torch.manual_seed(0)
    return Root(later)


def test_code_of_the_model_itself_is_mended_by_the_part_that_makes_it_fp32_or_told_with_its_line() -> None:
    (held,) = planned(root(later=False)).held
    assert held.module == "layer"
    assert re.match(r"the model \(mul, test_plan.py:\d+\) makes 1\.\d+e\+05 of its outputs, fp16 ends at 65,504", held.why)
    found = planned(root(later=True), ["fp32", "fp16-mixed"])
    assert found.precision == "fp32"
    tried = found.candidate("fp16-mixed")
    told, *_ = tried.unheld
    assert re.match(r"test_plan.py:\d+: code of the model itself \(Root\) makes fp16 values by itself: .* Compute this line in fp32", told), told
    assert tried.problem.startswith("the loss is not finite; test_plan.py:"), tried.problem


def test_constants_hold_every_module_that_has_them() -> None:
    found = planned(net(Apply(masked), nn.Linear(16, 16), Apply(masked)))
    assert [(h.module, h.cause) for h in found.held] == [("between.0", "constant"), ("between.2", "constant")]
    assert all(h.why.startswith("mask: ") for h in found.held)
    assert planned(net(Apply(masked)), "bf16-mixed").modules == ()
    assert planned(net(Apply(divided), nn.Linear(16, 16), Apply(divided))).modules == ("between.0", "between.2")


def test_an_error_out_of_proportion_is_held_where_fp32_helps() -> None:
    found = planned(net(Apply(cancelled)), "bf16-mixed")
    (held,) = found.held
    assert (held.module, held.cause) == ("between.0", "error")
    assert held.reach is not None
    assert held.reach > 0.05
    (tried,) = [t for t in planned(net(Apply(amplified)), ["fp32", "bf16-mixed"]).tried if t.precision == "bf16-mixed"]
    assert next(o.outputs for o in tried.off if o.module == "between.0") > 0.05
    assert tried.held == ()  # its inputs are off already, so that fp32 does not help


def test_the_scale_is_that_of_the_run() -> None:
    for make, precision in ((lambda: t5_like(1.0, BEYOND), "fp16-mixed"), (lambda: net(nn.Linear(16, 16)), "fp16-true")):
        found = planned(make(), precision, batches(1))
        model, batch = make(), batches(1)[0]
        accelerator = Accelerator(precision=found.policy, cpu=True)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(0)
        accelerator.backward(prepared(**batch)["loss"])
        optimizer.step()
        assert accelerator.last_step.applied
        assert accelerator.last_step.scale == found.scale


SLOW = pytest.param("bf16-lean", torch.float32, marks=pytest.mark.slow)
BITS = [("fp16-mixed", torch.float32), SLOW, ("fp16-lean", torch.bfloat16), ("bf16-true", torch.bfloat16)]


@pytest.mark.parametrize(("precision", "dtype"), BITS)
def test_the_model_is_what_it_was_to_the_bit(precision: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Everything().to(dtype)
    model.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    ids = [torch.randint(0, 16, (2, 6)) for _ in range(2)]
    before, others = snapshot(model), (random.getstate(), np.random.get_state()[1].tolist())
    found = halfstep.plan(model, ids, precision=[precision], rounds=1)
    assert snapshot(model) == before
    assert not nn.modules.module._has_any_global_hook(), "torch.compile warns where there are any"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == others
    assert found.precision == precision
    assert found.tried[-1].gradient_error is not None
    assert found.tried[-1].gradient_error < 0.2
    again = halfstep.plan(model, ids, precision=[precision], rounds=0)  # the same batches, the same random states: the same numbers
    assert [(t.loss, t.gradient_error, t.scale) for t in again.tried] == [(t.loss, t.gradient_error, t.scale) for t in found.tried]


def test_without_a_loss_forward_passes_alone_are_looked_at() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[0].weight.data *= 1e6
    found = planned(model, data=[torch.randn(4, 8)])
    assert (found.modules, found.scale, found.backward) == (("0",), None, False)
    assert any("there is no loss" in note for note in found.notes)
    assert found.policy.scale == parse("fp16-mixed").scale
    frozen = t5_like(1.0).requires_grad_(False)
    assert any("no graph" in note for note in planned(frozen).notes)
    given = planned(model, data=[torch.randn(4, 8)], loss=lambda outputs: outputs.square().mean())
    assert given.backward
    assert given.scale is not None


def test_batches_may_come_as_a_loader_an_iterator_and_tuples() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(0))
    rows = torch.randn(12, 8)
    spent = iter([(rows[:2],), (rows[2:4],), (rows[4:6],)])
    assert planned(model, data=spent, count=2).batches == 2
    assert len(list(spent)) == 1
    assert planned(model, data=DataLoader(rows, batch_size=3)).batches == 4


def test_a_plan_is_written_and_read_as_it_was(tmp_path: Any) -> None:
    found = planned(t5_like(1.0, BEYOND), None)
    path = found.save(tmp_path / "sub" / "plan.yaml")
    again = Plan.load(path)
    assert (again.policy, again.held, again.scale, again.reasons, str(again)) == (found.policy, found.held, found.scale, found.reasons, str(found))
    assert [t.precision for t in again.tried] == ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean"]
    assert again.candidate("fp16-lean").policy == found.candidate("fp16-lean").policy
    assert {r.module for r in again.ranges} == {name for name, part in t5_like(1.0, BEYOND).named_modules() if not isinstance(part, nn.ModuleList)}
    assert Plan.from_dict(found.as_dict()).as_dict() == found.as_dict()
    rules = yaml.safe_load(path.read_text())["fp32"]
    assert all(set(rule) >= {"module", "step", "why"} for rule in rules)
    broken = {
        "": "no precision",
        "precision: fp16-mixed": "version",
        "plan: 1\nprecision: fp61": "fp61",
        "plan: 1\nprecision: fp32\ntried: [3]": "no whole plan",
        "plan: 1\nprecision: bf16-mixed\nscale: 1024.0": "has scale=1024, and bf16-mixed has no dynamic loss scale",
        "plan: 1\nprecision: fp16-mixed\nscal: 5": "has scal, which a plan has not.*scale",
    }
    for text, word in broken.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=word):
            Plan.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"precision": "fp61"}, "fp61"),
        ({"precision": []}, "nothing to plan for"),
        ({"precision": "auto"}, "auto"),
        ({"precision": "bf16-mixed,fp32=nope"}, "^fp32=nope matches no module of this model. Known: "),
        ({"target": "beauty"}, "beauty"),
        ({"rounds": -1}, "rounds"),
        ({"count": 0}, "count"),
        ({"data": {"x": 1}}, "several batches"),
        ({"data": []}, "holds none"),
        ({"optimizer": "Adamw"}, "Adamw"),
    ],
)
def test_wrong_arguments_are_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        planned(t5_like(1.0), **settings)


def test_models_that_no_plan_can_be_made_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="place of the model"):
        halfstep.plan("model", batches())  # type: ignore[arg-type]
    bound = t5_like(1.0)
    bind(bound, parse("bf16-mixed"), CPU)
    with pytest.raises(ConfigError, match="prepared under bf16-mixed"):
        planned(bound)
    bad = t5_like(1.0)
    bad.embed.weight.data[0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"not finite in fp32 either; the first module .* embed"):
        planned(bad)
    rooted = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: (x * 0).square().sqrt()))  # a loss of 0, and 0 / 0 on the way back
    with pytest.raises(ConfigError, match="gradients are not finite in fp32 either"):
        planned(rooted, ["fp32", "bf16-mixed"], [torch.randn(4, 8)], loss=lambda outputs: outputs.sum())


def test_outputs_that_are_not_finite_without_a_loss_are_told() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert not any("not finite" in note for note in planned(model, data=[torch.randn(4, 8)]).notes)
    model[0].weight.data[0, 0] = float("nan")
    assert any("not finite in fp32 either, first those of 0:" in note for note in planned(model, data=[torch.randn(4, 8)]).notes)


def test_a_peak_that_cannot_be_predicted_is_told() -> None:
    decides = net(Apply(lambda x: x * 2 if float(x.detach().sum()) > 0 else x))
    (note,) = [note for note in planned(decides).notes if "could not be predicted" in note]
    assert "for fp32, fp16-mixed: halfstep.memory" in note


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_a_precision_that_breaks_is_told_and_the_others_stay(kind: type[Exception]) -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float16:
                raise kind("expected bf16")
            return x.float()

    model = net(nn.Linear(16, 16), Half())
    found = planned(model, ["fp16-mixed", "bf16-mixed"])
    assert found.precision == "bf16-mixed"
    assert f"{kind.__name__}: expected bf16" in found.candidate("fp16-mixed").problem
    with pytest.raises(ConfigError, match="expected bf16"):
        planned(model, "fp16-mixed")
