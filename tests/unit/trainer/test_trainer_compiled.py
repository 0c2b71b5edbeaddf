"""torch_compile=True: the run of the model that is not compiled, with no trace of the compiler in names and checkpoints."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from halfstep import Accelerator, Trainer, TrainerCallback, TrainingArguments
from halfstep.amp import pins
from halfstep.errors import ConfigError, DivergedError

# torch warns about itself when it compiles
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("fresh_compiler")]
PRECISIONS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean", "bf16-true", "fp16-true"]
QUICK = ("fp16-mixed",)


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.drop, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Dropout(p), nn.Linear(32, 16)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.drop(F.gelu(self.up(self.norm(h)))))


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks, self.head = nn.Embedding(31, 16), nn.ModuleList(Block(p) for _ in range(2)), nn.Linear(16, 31)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.table(input_ids)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), "logits": logits}


def rows(count: int = 16) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 31, (count, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": r, "labels": r.roll(-1)} for r in ids]


def trained(place: Path, model: nn.Module, resume: Path | None = None, **settings: Any) -> tuple[Trainer, list[Any]]:
    defaults: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "logging_steps": 1, "max_steps": 4}
    defaults |= {"save_steps": 2, "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    args = TrainingArguments(output_dir=str(place), **{**defaults, **settings})
    trainer = Trainer(model, args, None, rows(), rows(8))
    trainer.train(str(resume) if resume is not None else None)
    return trainer, [[r[key] for r in trainer.state.log_history if key in r] for key in ("loss", "eval_loss")]


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize("precision", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PRECISIONS])
def test_a_compiled_run_is_the_run_with_no_break_in_its_graphs(tmp_path: Path, precision: str) -> None:
    p = 0.1 if precision == "fp32" else 0.0  # dropout of 16-bit values is rounded elsewhere in a graph; of the same random numbers
    eager, compiled = Net(p), Net(p)
    _, expected = trained(tmp_path / "a", eager, precision=precision)
    trainer, found = trained(tmp_path / "b", compiled, precision=precision, torch_compile=True, torch_compile_backend="aot_eager")
    assert found[0] == expected[0]
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found[1], expected[1], strict=True))  # a graph without gradients is decomposed
    assert same(eager, compiled)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # in training and in evaluation
    assert compiled._compiled_call_impl is None
    assert trainer.model is compiled
    trainer.save_model(str(tmp_path / "model"))
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(Net().state_dict())


class Broken(Net):
    """A model that torch.compile cannot put into one graph. Its loss is divided by the number of items, as those of transformers are."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        h = self.table(input_ids)
        for block in self.blocks:
            torch._dynamo.graph_break()
            h = block(h)
        return {"loss": self.loss(self.head(h).float(), labels, num_items_in_batch)}

    def loss(self, logits: Tensor, labels: Tensor, items: Tensor | None) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (labels.numel() if items is None else items)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it by replacing showwarning, which an error does not ask
@pytest.mark.parametrize("products", ["native", "emulated"])
def test_a_model_that_breaks_into_several_graphs_is_the_one_that_is_not_compiled(tmp_path: Path, products: str) -> None:
    settings: dict[str, Any] = {"precision": f"bf16-mixed,products={products}", "eval_strategy": "no", "eval_steps": None, "max_steps": 2}
    eager, compiled = Broken(), Broken()
    _, expected = trained(tmp_path / "a", eager, **settings)
    _, found = trained(tmp_path / "b", compiled, **settings, torch_compile=True, torch_compile_backend="aot_eager")
    assert found == expected
    assert same(eager, compiled)
    assert torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-lean"])
def test_it_goes_on_from_checkpoints_compiled_and_not(tmp_path: Path, precision: str) -> None:
    how = {"precision": precision, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    whole, resumed, eager = Net(), Net(), Net()
    trained(tmp_path / "a", whole, **how)
    trained(tmp_path / "b", resumed, tmp_path / "a" / "checkpoint-2", **how)
    trained(tmp_path / "c", eager, tmp_path / "a" / "checkpoint-2", precision=precision)
    assert same(whole, resumed)
    assert same(whole, eager)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as above
def test_with_gradient_checkpointing_and_accumulation(tmp_path: Path) -> None:
    eager, compiled = Net(), Net()
    trained(tmp_path / "a", eager, precision="bf16-mixed", gradient_accumulation_steps=2)
    how = {"torch_compile": True, "torch_compile_backend": "aot_eager", "gradient_checkpointing": True}
    trained(tmp_path / "b", compiled, precision="bf16-mixed", gradient_accumulation_steps=2, **how)
    assert same(eager, compiled)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor compiles C++, and there is no g++ on this machine")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_inductor_stays_within_the_stated_bound(tmp_path: Path, precision: str) -> None:
    bound = 1e-5 if precision == "fp32" else 2e-2 if precision.startswith("bf16") else 2e-3
    _, expected = trained(tmp_path / "a", Net(), precision=precision)
    _, found = trained(tmp_path / "b", Net(), precision=precision, torch_compile=True)
    assert all(math.isclose(a, b, rel_tol=bound) for a, b in zip([*expected[0], *expected[1]], [*found[0], *found[1]], strict=True))


def test_names_that_torch_does_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch_compile_backend='inducter' is not known. Did you mean 'inductor'"):
        trained(tmp_path, Net(), torch_compile=True, torch_compile_backend="inducter")
    with pytest.raises(ConfigError, match=r"torch_compile_mode='max' is not known"):
        trained(tmp_path, Net(), torch_compile=True, torch_compile_mode="max")
    with pytest.raises(ConfigError, match=r"has no effect with torch_compile_backend='aot_eager'"):
        trained(tmp_path, Net(), torch_compile=True, torch_compile_mode="max-autotune", torch_compile_backend="aot_eager")


class Overflowing(nn.Module):
    """Its second layer leaves fp16's range and fp32's not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.big, self.down = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        nn.init.constant_(self.big.weight, 1e4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.big(self.up(x).abs() + 3) * 1e-5
        return {"loss": F.cross_entropy(self.down(h).float(), labels)}


class Seen(TrainerCallback):
    """The results of all steps."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, step_result: Any = None, **kwargs: Any) -> None:
        self.results.append(step_result)

    on_step_skipped = on_step_end


def healed(place: Path, **settings: Any) -> tuple[nn.Module, list[Any]]:
    made = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, generator=made), "labels": i % 2} for i in range(16)]
    model, seen = Overflowing(), Seen()
    how: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no"}
    Trainer(model, TrainingArguments(str(place), **how, **settings), None, data, callbacks=[seen]).train()
    return model, seen.results


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-lean"])
def test_a_module_that_overflows_is_held_in_fp32_and_the_run_is_the_one_that_is_not_compiled(
    precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eager, expected = healed(tmp_path / "a", precision=precision)
    model, found = healed(tmp_path / "b", precision=precision, torch_compile=True, torch_compile_backend="aot_eager")
    assert [p.module for p in pins(model)] == ["big"]
    assert [r.loss for r in found] == [r.loss for r in expected]
    assert found[0].pinned == ("big",)
    assert all(r.applied for r in found)
    theirs = dict(eager.named_parameters())
    assert all(torch.allclose(p, theirs[n], rtol=1e-6, atol=1e-7) for n, p in model.named_parameters())  # a graph sums in another order
    assert not torch._dynamo.utils.counters["graph_break"]
    assert ("runs as it is written. fp32=big in the precision" in caplog.text) == (precision == "fp16-lean")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if precision == "fp16-lean" else 2)


def test_without_pins_the_module_is_named_with_the_pattern_that_holds_it(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"big \(Linear\) gives inf or NaN in fp16 from inputs up to .*fp32=big in the precision") as caught:
        healed(tmp_path, precision="fp16-mixed", torch_compile=True, torch_compile_backend="aot_eager", heal="skip", max_bad_steps=2)
    assert caught.value.result.culprits[0].name == "big"


def test_the_last_model_of_a_sweep_is_compiled_as_the_first(tmp_path: Path) -> None:
    graphs = []
    with torch._dynamo.config.patch(recompile_limit=2):  # torch's own is 8: the ninth model of a process
        for number in range(1, 5):
            torch._dynamo.utils.counters.clear()
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(number)))
            bound = Accelerator("bf16", cpu=True, dynamo_backend="eager").prepare(model)
            bound(torch.randn(2, 3)).sum().backward()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1] * 4
