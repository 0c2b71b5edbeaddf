"""Steps: closures, kinds of optimizer, kinds of gradient (kind E)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam

from conformance.adapter import Library, Record, collector
from conformance.tools import copies, finite, near, overflowing, pair, read, same, weight

RECORDS: list[Record] = []
record = collector(RECORDS, "E")


def _lbfgs(library: Library, keyword: bool, scale: float = 1024.0, bad_from: int = 10**9) -> dict[str, Any]:
    w = weight(1.0, 1)
    optimizer, scaler, calls = LBFGS([w], lr=1.0, max_iter=1), library.scaler(scale), []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = 0.05 * (w**2).sum()
        scaler.scale(overflowing(loss) if len(calls) > bad_from else loss).backward()
        return loss

    closure()
    answer = scaler.step(optimizer, closure=closure) if keyword else scaler.step(optimizer, closure)
    return {"weight": read(w)[0], "said": library.told(answer)}


@record(
    "lbfgs-positional-closure",
    "scaler.step(lbfgs, closure)",
    today="accepted; the search uses scaled gradients: 0 instead of 0.9",
    right="the weight of an unscaled run, 0.9, or a refusal",
    check=lambda v: near(v["weight"], 0.9),
    refused=("closure",),
    refs=("case 27",),
)
def lbfgs_positional(library: Library) -> Any:
    return _lbfgs(library, keyword=False)


@record(
    "lbfgs-keyword-closure",
    "scaler.step(lbfgs, closure=closure)",
    today="RuntimeError: closure use is not currently supported",
    right="the weight of an unscaled run, 0.9, or a refusal with a remedy",
    check=lambda v: near(v["weight"], 0.9),
    refused=("closure",),
    refs=("case 27",),
)
def lbfgs_keyword(library: Library) -> Any:
    return _lbfgs(library, keyword=True)


@record(
    "lbfgs-overflow-in-the-closure",
    "the closure's gradient overflows at every scale",
    today="inf goes into the direction of the search: the weight is NaN or unmoved by luck, nobody is told",
    right="not applied, told so, weight as before; or a refusal",
    check=lambda v: v["weight"] == 1.0 and v["said"] is False,
    refused=("closure",),
    refs=("case 27",),
)
def lbfgs_overflow(library: Library) -> Any:
    return _lbfgs(library, keyword=False, bad_from=1)


@record(
    "lbfgs-nan-in-the-closure",
    "the closure's loss is NaN in the second evaluation",
    today="NaN goes into the direction of the search, or nothing is said",
    right="not applied, told so, the weight as before; or a refusal",
    check=lambda v: v["weight"] == 1.0 and v["said"] is False,
    refused=("closure",),
    refs=("case 27",),
)
def lbfgs_nan(library: Library) -> Any:
    w = weight(1.0, 1)
    optimizer, scaler, calls = LBFGS([w], lr=1.0, max_iter=4), library.scaler(1024.0), []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = 0.05 * (w**2).sum() * (float("nan") if len(calls) > 1 else 1.0)
        scaler.scale(loss).backward()
        return loss

    return {"said": library.told(scaler.step(optimizer, closure)), "weight": read(w)[0]}


class Sam(Optimizer):
    """Sharpness-aware minimisation: climb by rho along the gradient, evaluate again, step from where it began."""

    def __init__(self, params: Any, lr: float, rho: float) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            climbs = [p.grad / norm * group["rho"] for p in group["params"]]
            for p, climb in zip(group["params"], climbs, strict=True):
                p.add_(climb)
            with torch.enable_grad():
                loss = closure()
            for p, climb in zip(group["params"], climbs, strict=True):
                p.sub_(climb)
                p.sub_(p.grad, alpha=group["lr"])
        return loss


@record(
    "sam-closure",
    "an optimizer that evaluates its closure again after it has climbed (SAM)",
    today="the second gradient is scaled: an update 1024 times too large",
    right="the weight of an unscaled run: 1 - 0.1 x (1 + 0.25), or a refusal",
    check=lambda v: near(v, 0.875),
    refused=("closure",),
    refs=("case 27",),
)
def sam_closure(library: Library) -> Any:
    w = weight()
    optimizer, scaler = Sam([w], lr=0.1, rho=0.5), library.scaler(1024.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (w**2).sum()
        scaler.scale(loss).backward()
        return loss

    closure()
    scaler.step(optimizer, closure)
    return read(w)[0]


@record(
    "no-parameter-got-a-gradient",
    "the loss does not reach the optimizer's parameters",
    today="AssertionError: No inf checks were recorded for this optimizer",
    right="a no-op that is told as one",
    check=lambda v: v["said"] is False and v["weight"] == 1.0,
    refused=("gradient",),
    refs=("F18", "case 22"),
)
def no_gradient(library: Library) -> Any:
    (w, optimizer), (other, _), scaler = pair(), pair(), library.scaler()
    scaler.scale(other.sum()).backward()
    said = library.told(scaler.step(optimizer))
    return {"said": said, "weight": read(w)[0]}


def _overflow_then_good(library: Library, make: Callable[[Any], Optimizer]) -> dict[str, Any]:
    w, scaler = weight(), library.scaler(1024.0)
    optimizer, said, seen = make([w]), [], []
    for bad in (False, True, False):
        optimizer.zero_grad()
        before = copies([w, *_states(optimizer)])
        loss = w.sum()
        scaler.scale(overflowing(loss) if bad else loss).backward()
        said.append(library.told(scaler.step(optimizer)))
        scaler.update()
        if bad:
            seen.append(same(before, [w, *_states(optimizer)]))
    return {"said": said, "untouched": seen[0], "finite": finite([w, *_states(optimizer)]), "weight": read(w)[0]}


def _states(optimizer: Optimizer) -> list[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def _kinds(into: Callable[..., Any]) -> None:
    """An overflow under each kind of optimizer: weights and states hold still and the caller is told."""
    makers: dict[str, Callable[[Any], Optimizer]] = {
        "sgd": lambda ps: SGD(ps, lr=0.5, momentum=0.9, foreach=False),
        "sgd-foreach": lambda ps: SGD(ps, lr=0.5, momentum=0.9, foreach=True),
        "sgd-fused": lambda ps: SGD(ps, lr=0.5, momentum=0.9, fused=True),
        "adamw-fused": lambda ps: AdamW(ps, lr=0.5, fused=True),
        "adam-fused-amsgrad": lambda ps: Adam(ps, lr=0.5, amsgrad=True, fused=True),
        "adamw-capturable-tensor-lr": lambda ps: AdamW(ps, lr=torch.tensor(0.5), foreach=False),
        "adagrad-fused": lambda ps: torch.optim.Adagrad(ps, lr=0.5, fused=True),
        "rmsprop-centered": lambda ps: torch.optim.RMSprop(ps, lr=0.5, centered=True),
        "custom": lambda ps: Signed(ps, lr=0.5),
    }
    for name, make in makers.items():
        into(
            f"overflow-under-{name}",
            f"a good step, an overflow, a good step with {name}",
            today="the step is skipped and the caller is not told (fused: step() was even called)",
            right="told [True, False, True]; weights and states of the bad step are untouched",
            check=lambda v: v["said"] == [True, False, True] and v["untouched"] and v["finite"],
            refs=("F5",),
        )(lambda library, make=make: _overflow_then_good(library, make))


class Signed(Optimizer):
    """A user's own optimizer: steps by the sign of the gradient, counts its steps, returns a number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("count", torch.zeros(())).add_(1)
                    p.sub_(p.grad.sign(), alpha=group["lr"])
        return 7.0


_kinds(record)


@record(
    "sparse-embedding-gradients",
    "nn.Embedding(sparse=True) with SparseAdam: an overflow in a row that was looked up twice, then a good step",
    today="right in value; nobody is told",
    right="told [False, True]; after it, the rows looked up moved and no other did",
    check=lambda v: v["said"] == [False, True] and v["rows"] == [True, False, True],
)
def sparse_embedding(library: Library) -> Any:
    table = nn.Embedding(3, 2, sparse=True)
    optimizer, scaler, said = SparseAdam(table.parameters(), lr=0.1), library.scaler(1024.0), []
    start, ids = table.weight.detach().clone(), torch.tensor([0, 2, 2])
    for bad in (True, False):
        optimizer.zero_grad()
        out = table(ids)
        scaler.scale(overflowing(out[2]).sum() + out[:2].sum() if bad else out.sum()).backward()
        said.append(library.told(scaler.step(optimizer)))
        scaler.update()
        if bad:
            assert library.name == "careless" or torch.equal(start, table.weight)
    return {"said": said, "rows": [bool((a != b).any()) for a, b in zip(start, table.weight, strict=True)]}


@record(
    "sparse-gradient-update",
    "sparse gradients under SGD, a row looked up twice",
    today="right",
    right="rows move by 0.5, 0 and 1",
    check=lambda v: near(v, [0.5, 0.0, 1.0]),
    stock="right",
)
def sparse_update(library: Library) -> Any:
    table = nn.Embedding(3, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer, scaler = SGD(table.parameters(), lr=0.5), library.scaler(1024.0)
    scaler.scale(table(torch.tensor([0, 2, 2])).sum()).backward()
    scaler.step(optimizer)
    return [-value + 0.0 for value in read(*table.weight)]


@record(
    "sparse-gradients-clipped",
    "sparse gradients, unscale_ and clipping by the library",
    today="torch's clip_grad_norm_ raises on a sparse gradient that was looked up twice, or clips parts of a row",
    right="norm sqrt(2 + 8) = 3.162 reported; an update of norm 1",
    check=lambda v: near(v, [10.0**0.5, 1.0], 1e-4),
    refused=("sparse",),
)
def sparse_clipped(library: Library) -> Any:
    table = nn.Embedding(3, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer, scaler = SGD(table.parameters(), lr=1.0), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    scaler.scale(table(torch.tensor([0, 2, 2])).sum()).backward()
    norm = library.clip(scaler, optimizer, table.parameters(), 1.0)
    scaler.step(optimizer)
    return norm, float(table.weight.detach().norm())


@record(
    "complex-parameters",
    "a complex64 parameter",
    today="NotImplementedError or a wrong check, by version",
    right="an update of 0.5 x 2, or a refusal that says complex",
    check=lambda v: abs(v) < 1e-6,
    refused=("complex",),
)
def complex_parameters(library: Library) -> Any:
    w, scaler = nn.Parameter(torch.ones(4, dtype=torch.complex64)), library.scaler(1024.0)
    optimizer = SGD([w], lr=0.5)
    scaler.scale((w * w.conj()).real.sum()).backward()
    scaler.step(optimizer)
    return float(w.detach().abs()[0])


@record(
    "fp64-parameters",
    "a float64 parameter beside float32 ones",
    today="right",
    right="both move by 0.5",
    check=lambda v: near(v, [0.5, 0.5], 1e-12),
    stock="right",
)
def fp64_parameters(library: Library) -> Any:
    a, b = weight(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer, scaler = SGD([a, b], lr=0.5), library.scaler()
    scaler.scale(a.sum() + b.sum()).backward()
    scaler.step(optimizer)
    return read(a, b)


@record(
    "frozen-parameters",
    "half of the optimizer's parameters are frozen",
    today="right",
    right="the others move by 0.5, the frozen ones not at all",
    check=lambda v: near(v, [1.0, 0.5]),
    stock="right",
)
def frozen_parameters(library: Library) -> Any:
    frozen, free = weight(), weight()
    frozen.requires_grad_(False)
    optimizer, scaler = SGD([frozen, free], lr=0.5), library.scaler()
    scaler.scale((frozen + free).sum()).backward()
    scaler.step(optimizer)
    return read(frozen, free)


@record(
    "unfrozen-in-mid-run",
    "a parameter is unfrozen after the first step",
    today="right",
    right="1 - 0.5 and 1 - 2 x 0.5",
    check=lambda v: near(v[0], 0.5) and abs(v[1]) < 1e-6,
    stock="right",
)
def unfrozen(library: Library) -> Any:
    late, free = weight(), weight()
    late.requires_grad_(False)
    optimizer, scaler = SGD([late, free], lr=0.5), library.scaler()
    library.watch(scaler, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((late + free).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        late.requires_grad_(True)
    return read(late, free)


@record(
    "add-param-group",
    "add_param_group after the first step",
    today="right",
    right="the new weight moves by 0.5, the old one twice",
    check=lambda v: near(v[0], 0.5) and abs(v[1]) < 1e-6,
    stock="right",
)
def add_param_group(library: Library) -> Any:
    (w, optimizer), new, scaler = pair(), weight(), library.scaler()
    library.watch(scaler, optimizer)
    for i in range(2):
        optimizer.zero_grad()
        scaler.scale((w + new).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if i == 0:
            new.grad = None
            optimizer.add_param_group({"params": [new]})
    return read(new, w)
