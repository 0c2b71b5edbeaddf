"""Steps: what people write, is right, and must go on working (kind E)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from conformance.adapter import Library, Record, collector
from conformance.tools import F16, near, pair, read, weight

RECORDS: list[Record] = []
record = collector(RECORDS, "E")


def _one_step(library: Library, backward: Any) -> float:
    """A weight of 1 after one step with lr 0.5, its gradients made by `backward(scaler, w)`."""
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    backward(scaler, w)
    scaler.step(optimizer)
    scaler.update()
    return read(w)[0]


def _ways() -> dict[str, tuple[str, Any]]:
    """Spellings of a backward pass whose gradient is 1 in every weight."""

    def manual(scaler: Any, w: Tensor) -> None:
        (w.grad,) = torch.autograd.grad(scaler.scale((w * 1).sum()), [w])

    def quarters(scaler: Any, w: Tensor) -> None:
        for _ in range(4):
            (scaler.scale(w.sum()) / 4).backward()

    def logged(scaler: Any, w: Tensor) -> None:
        scaled = scaler.scale(w.sum())
        assert scaled.item() > 0
        scaled.backward()

    def both(scaler: Any, w: Tensor) -> None:
        torch.autograd.backward([scaler.scale(w.sum() / 2), scaler.scale(w.sum() / 2)])

    def hooked(scaler: Any, w: Tensor) -> None:
        w.register_hook(lambda g: g * 0.5)  # type: ignore[no-untyped-call]
        scaler.scale((w * 2).sum()).backward()

    def in_place_hook(scaler: Any, w: Tensor) -> None:
        def halve(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.mul_(0.5)

        w.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        scaler.scale((w * 2).sum()).backward()

    return {
        "divided-after-scaling": (
            "(scaler.scale(loss) / 4).backward(), four times",
            lambda s, w: [(s.scale(w.sum()) / 4).backward() for _ in range(4)],
        ),
        "sum-of-scaled-losses": (
            "(scaler.scale(a) + scaler.scale(b)).backward()",
            lambda s, w: (s.scale(w.sum() * 0.25) + s.scale(w.sum() * 0.75)).backward(),
        ),
        "scaled-sum-of-losses": ("scaler.scale(a + b).backward()", lambda s, w: s.scale(w.sum() * 0.25 + w.sum() * 0.75).backward()),
        "mean-of-a-scaled-vector": ("scaler.scale(losses).mean().backward(), as after DataParallel", lambda s, w: s.scale(w * 4).mean().backward()),
        "gradient-argument": ("scaler.scale(losses).backward(gradient=...)", lambda s, w: s.scale(w).backward(gradient=torch.ones(4))),
        "inputs-argument": ("scaler.scale(loss).backward(inputs=[w])", lambda s, w: s.scale(w.sum()).backward(inputs=[w])),
        "autograd-backward-of-two": ("torch.autograd.backward([scaled, scaled])", both),
        "autograd-grad-by-hand": ("p.grad = torch.autograd.grad(scaler.scale(loss), p)", manual),
        "tensor-hook": ("a hook on the parameter halves its gradient", hooked),
        "post-accumulate-hook": ("a post-accumulate hook halves p.grad in place", in_place_hook),
        "read-before-backward": (
            "the scaled loss is printed and logged first",
            lambda s, w: [(x := s.scale(w.sum())), float(x.detach()), x.backward()],
        ),
    }


def _way(name: str, how: str, backward: Any) -> None:
    @record(
        f"backward-spelled-{name}",
        how,
        today="right",
        right="an update of 0.5" + (", or a refusal with the remedy" if "hand" in name or "post" in name else ""),
        check=lambda v: near(v, 0.5),
        refused=("unscale",) if "hand" in name or "post" in name else None,
        stock="right",
    )
    def spelled(library: Library) -> Any:
        return _one_step(library, backward)


for _name, (_how, _backward) in _ways().items():
    _way(_name, _how, _backward)


@record(
    "gradient-of-the-input",
    "an adversarial example: x.grad of a scaled loss, divided by get_scale()",
    today="right",
    right="x.grad / scale is 1, and the step takes 0.5 off the weight",
    check=lambda v: near(v, [1.0, 0.5]),
    stock="right",
)
def gradient_of_input(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler()
    x = torch.ones(4, requires_grad=True)
    scaler.scale((w * x).sum()).backward()
    assert x.grad is not None
    found = float(x.grad[0]) / scaler.get_scale()
    scaler.step(optimizer)
    return found, read(w)[0]


def _recomputed(reentrant: bool) -> None:
    @record(
        f"scaled-loss-through-a-{'reentrant' if reentrant else 'saved-hooks'}-checkpoint",
        f"activation checkpointing (use_reentrant={reentrant}) with dropout in fp16, scaled loss",
        today="right",
        right="three steps are taken; each batch's gradient is that of the dropout mask of its forward pass",
        check=lambda v: v == [True, True, True],
        stock="right",
    )
    def recomputed(library: Library) -> Any:
        layer, drop = nn.Linear(16, 16, bias=False), nn.Dropout(0.5)
        optimizer, scaler = SGD(layer.parameters(), lr=1e-3), library.scaler(64.0)
        library.watch(scaler, layer, optimizer)
        inputs, seen = torch.ones(1, 16, requires_grad=True), []
        for _ in range(3):
            optimizer.zero_grad()
            with library.autocast(F16):
                out = checkpoint(lambda x: drop(layer(x)), inputs, use_reentrant=reentrant)
            scaler.scale(out.float().sum()).backward()
            scaler.unscale_(optimizer)
            assert layer.weight.grad is not None
            kept = (out.detach() != 0).float().flatten() * 2
            seen.append(bool(torch.allclose(layer.weight.grad[:, 0], kept)))
            scaler.step(optimizer)
            scaler.update()
        return seen


for _reentrant in (False, True):
    _recomputed(_reentrant)


@record(
    "some-gradients-dropped",
    "p.grad = None for one of two parameters between backward and step (layers frozen at random)",
    today="right",
    right="the other moves by 0.5, this one not",
    check=lambda v: near(v, [1.0, 0.5]),
    stock="right",
)
def gradients_dropped(library: Library) -> Any:
    a, b, scaler = weight(), weight(), library.scaler(1024.0)
    optimizer = SGD([a, b], lr=0.5)
    library.watch(scaler, optimizer)
    scaler.scale(a.sum() + b.sum()).backward()
    a.grad = None
    scaler.step(optimizer)
    return read(a, b)


@record(
    "validation-between-backward-and-step",
    "a loss under no_grad is computed between backward and step, without scale()",
    today="right",
    right="an update of 0.5",
    check=lambda v: near(v, 0.5),
    stock="right",
)
def validation_between(library: Library) -> Any:
    def backward(scaler: Any, w: Tensor) -> None:
        scaler.scale(w.sum()).backward()
        with torch.no_grad(), library.autocast(F16):
            float(w @ w)

    return _one_step(library, backward)


@record(
    "backward-without-a-step",
    "gradients are made to be looked at, cleared, and training goes on (a learning-rate finder, a saliency map)",
    today="right",
    right="one update of 0.5",
    check=lambda v: near(v, 0.5),
    stock="right",
)
def backward_without_step(library: Library) -> Any:
    (w, optimizer), scaler = pair(), library.scaler(1024.0)
    library.watch(scaler, optimizer)
    for step in (False, False, True):
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        if step:
            scaler.step(optimizer)
            scaler.update()
    return read(w)[0]


@record(
    "loss-of-a-part",
    "alternate batches train alternate halves of one optimizer's parameters (the others have no gradient)",
    today="right",
    right="two updates of 0.5 in each",
    check=lambda v: abs(v[0]) < 1e-6 and abs(v[1]) < 1e-6,
    stock="right",
)
def loss_of_a_part(library: Library) -> Any:
    a, b, scaler = weight(), weight(), library.scaler(1024.0)
    optimizer = SGD([a, b], lr=0.5)
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale((a if i % 2 else b).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return read(a, b)
