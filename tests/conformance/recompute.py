"""Forward passes that are run again, compiled or taken in parts (kind M), and parts for which nothing was applied (kind N)."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.tools import BF16, F16, F32, copies, near, read, same

RECORDS: list[Record] = []
record = collector(RECORDS, "M")
asked = collector(RECORDS, "N")


class _Parts(nn.Module):
    """Two layers, and what the first one gave each time it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: list[Tensor] = []
        self.one.register_forward_hook(lambda module, inputs, out: self.seen.append(out.detach().float()))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        """A method beside forward, as encoders, heads and `generate` have them."""
        return self.one(x).relu()  # type: ignore[no-any-return]


# --- forward passes that are run again ------------------------------------------------------------------------------


def _part_again(reentrant: bool) -> None:
    @record(
        f"part-of-a-prepared-model-recomputed-{'reentrant' if reentrant else 'saved-hooks'}",
        f"checkpoint(model.one, x, use_reentrant={reentrant}) of a prepared bf16 model, outside its forward",
        today="fp32: only the whole model's forward is wrapped",
        right="the numbers that the layer has inside the model, also when it is computed again (torch stops as soon as it has what it needs)",
        check=lambda v: 1 <= len(v) <= 2 and all(v),
        refs=("case 57",),
        doors=("accelerator",),
    )
    def part_again(library: Library) -> Any:
        net, inputs = _Parts(), torch.randn(3, 8, requires_grad=True)
        accelerator = library.accelerator("bf16")
        model = accelerator.prepare(net)
        model(inputs)
        inside = net.seen.pop()
        accelerator.backward(checkpoint(model.one, inputs, use_reentrant=reentrant).float().sum())
        return [torch.equal(out, inside) for out in net.seen]


for _reentrant in (False, True):
    _part_again(_reentrant)


@record(
    "part-held-in-fp32-is-recomputed",
    "a model in bf16 with one layer held in fp32, under activation checkpointing: is the layer in fp32 the second time?",
    today="there is no such setting; the layer runs in bf16",
    right="the layer gives the same fp32 numbers twice, and its weights the gradients of a run without checkpointing",
    check=lambda v: v == {"wide": [True, True], "gradients": True},
    refs=("case 57", "case 54"),
)
def held_again(library: Library) -> Any:
    net, inputs = _Parts(), torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        wanted = F.linear(inputs, net.one.weight, net.one.bias)
    try:
        model: Callable[[Tensor], Tensor] = library.hold(net, BF16, "one")
    except NotOffered:
        model = library.autocast(BF16)(net.forward)
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        net.zero_grad()
        net.seen.clear()
        run(inputs).float().square().sum().backward()
        gradients.append(copies(p.grad for p in net.parameters() if p.grad is not None))
    return {"wide": [torch.equal(out, wanted) for out in net.seen], "gradients": len(gradients[0]) == 4 and same(*gradients)}


@record(
    "batchnorm-under-checkpointing",
    "a block with a BatchNorm is checkpointed, three good batches",
    today="num_batches_tracked is 6: the recompute updates the statistics again",
    right="3, and a running mean of three batches",
    check=lambda v: v["count"] == 3 and near(v["mean"], v["wanted"], 0.02),
    refs=("case 29", "case 57"),
    doors=("loop", "accelerator"),
)
def batchnorm_again(library: Library) -> Any:
    norm = nn.BatchNorm1d(4)
    block = nn.Sequential(norm, nn.Linear(4, 4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]

    net, inputs = Net(), torch.randn(6, 4)
    run = library.run(net, [SGD(net.parameters(), lr=0.01)], dtype=BF16)
    for _ in range(3):
        run.backward(run.forward(inputs).float().square().mean())
        run.step()
    assert norm.num_batches_tracked is not None
    assert norm.running_mean is not None
    return {"count": int(norm.num_batches_tracked), "mean": read(norm.running_mean)[0], "wanted": float(inputs[:, 0].mean()) * (1 - 0.9**3)}


@record(
    "first-steps-under-checkpointing",
    "fp16 with dropout under activation checkpointing, whose gradients overflow at the usual first scale: ten steps",
    today="the first ten steps are lost",
    right="none is lost, and the first update is that of a run without checkpointing and the same dropout",
    check=lambda v: v == {"lost": 0, "same": True},
    refs=("case 57", "case 32"),
    calibrated=True,
)
def first_steps(library: Library) -> Any:
    class Net(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.first, self.last, self.again = nn.Linear(8, 8), nn.Linear(8, 1), again
            nn.init.constant_(self.last.weight, 60.0)

        def block(self, x: Tensor) -> Tensor:
            return F.dropout(self.first(x), 0.5) * 1e-3

        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
            return self.last(inner)  # type: ignore[no-any-return]

    inputs, lost, ends = torch.randn(4, 8), 0, []
    for again in (False, True):
        torch.manual_seed(1)
        net = Net(again)
        scaler, optimizer = library.scaler(), SGD(net.parameters(), lr=1e-6)
        library.watch(scaler, net, optimizer)
        for _ in range(10):
            optimizer.zero_grad()
            before = copies(net.parameters())
            with library.autocast(F16):
                loss = F.mse_loss(net(inputs), inputs.sum(1, keepdim=True) * 50)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            lost += same(before, net.parameters())
        ends.append(copies(net.parameters()))
    return {"lost": lost, "same": same(*ends)}


@record(
    "compiled-block",
    "exp of an fp16 result of 12 in a block inside a function given to torch.compile",
    today="inf, compiled or not: exp stays fp16 on a CPU",
    right="exp(12) in fp32, and the same numbers as without compiling",
    check=lambda v: v["same"] and near(v["value"], 162755.0, 0.01),
    refs=("case 68",),
)
def compiled_block(library: Library) -> Any:
    inputs = torch.full((2,), 12.0, dtype=F16)

    def function(x: Tensor) -> Tensor:
        with library.autocast(F16):
            return x.exp()

    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch about itself, when it compiles
        plain, compiled = function(inputs), torch.compile(function, backend="eager")(inputs)
    return {"same": torch.equal(plain, compiled), "value": read(compiled)[0]}


# --- asked for, and not applied -------------------------------------------------------------------------------------


@asked(
    "a-method-beside-forward",
    "a prepared bf16 model is called by a method of its own, model.encode(x)",
    today="fp32: only forward is wrapped",
    right="the numbers that the same layer has inside forward",
    check=lambda v: v,
    refs=("case 66",),
    doors=("accelerator",),
)
def method_beside_forward(library: Library) -> Any:
    net, inputs = _Parts(), torch.randn(3, 8)
    model = library.accelerator("bf16").prepare(net)
    model(inputs)
    model.encode(inputs)
    plain = F.linear(inputs, net.one.weight, net.one.bias)
    return torch.equal(net.seen[0], net.seen[1]) and not torch.equal(net.seen[1], plain)


@asked(
    "prepared-under-another-precision-before",
    "a model that a first accelerator prepared under bf16 is given to a second one with mixed_precision='no'",
    today="it goes on in bf16, and nothing is said",
    right="fp32, or a refusal that names both precisions",
    check=lambda v: v,
    refused=("bf16", "fp32"),
    refs=("case 66",),
    doors=("accelerator",),
)
def prepared_before(library: Library) -> Any:
    layer, inputs = nn.Linear(4, 4), torch.randn(3, 4)
    library.accelerator("bf16").prepare(layer)
    model = library.accelerator("no").prepare(layer)
    return torch.equal(model(inputs), F.linear(inputs, layer.weight, layer.bias))


@asked(
    "evaluation-of-an-fp16-trainer-on-a-cpu",
    "Trainer.evaluate() with fp16=True on a CPU, without training before",
    today="fp32",
    right="fp16 in the layer, or a refusal",
    check=lambda v: v == {F16},
    refused=("fp16",),
    refs=("F12", "case 66"),
    doors=("trainer",),
)
def evaluation(library: Library) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.dtypes: set[torch.dtype] = set()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.layer(x)
            self.dtypes.add(out.dtype)
            return {"loss": (out.float().squeeze(-1) - labels).square().mean()}

    net, rows = Net(), [{"x": torch.ones(2), "labels": float(i)} for i in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        library.trainer(net, rows, folder, per_device_eval_batch_size=2, fp16=True).evaluate()
    return net.dtypes


@asked(
    "a-traced-model-is-prepared",
    "a model from torch.jit.trace is prepared under bf16",
    today="right: autocast acts below what was traced",
    right="bf16 products, or a refusal that says what kind of model it is",
    stock="right",
    check=lambda v: v,
    refused=("script",),
    refs=("case 66",),
    doors=("accelerator",),
)
def traced_model(library: Library) -> Any:
    layer, inputs = nn.Linear(4, 4), torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch: old, and still what many exports are
        traced = torch.jit.trace(layer, inputs)  # type: ignore[no-untyped-call]
    model = library.accelerator("bf16").prepare(traced)
    narrow = F.linear(inputs.to(BF16), layer.weight.to(BF16), layer.bias.to(BF16)).to(F32)
    return torch.allclose(model(inputs), narrow, atol=1e-6)
