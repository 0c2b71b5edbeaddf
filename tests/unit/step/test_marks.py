"""Marks on gradients: a change is seen, a copy is told apart, and nothing that torch does with gradients is disturbed."""

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from halfstep.amp import GradScaler
from halfstep.step.marks import Ledger, Sign, maker_of, marks, unchanged


def parameter(value: float = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), value)
    return p


CHANGES: dict[str, Callable[[nn.Parameter], None]] = {
    "in place": lambda p: p.grad.mul_(0.5),
    "an element": lambda p: p.grad.__setitem__(0, 7.0),
    "replaced": lambda p: setattr(p, "grad", p.grad.clone()),
    "cleared": lambda p: p.grad.zero_(),
    "added to": lambda p: (p * 2).sum().backward(),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_visible_change_unmarks(change: str) -> None:
    p = parameter()
    known = marks([p.grad])
    assert unchanged(known, [p.grad])
    CHANGES[change](p)
    assert not unchanged(known, [p.grad])


def test_marks_hold_nothing_and_a_new_tensor_in_an_old_ones_place_is_another() -> None:
    p = parameter()
    known = marks([p.grad])
    p.grad = None
    assert known[0][0]() is None
    p.grad = torch.full((3,), 1.0)
    assert not unchanged(known, [p.grad])
    assert not unchanged(known, [])


class Maker:
    """Something that makes gradients."""


def note(ledger: Ledger, owners: list[nn.Parameter], maker: Maker) -> None:
    """As a backward pass does that has reached these parameters."""
    ledger.look(owners)
    for p in owners:
        ledger.heard(p)
    ledger.note(Sign(maker), 1, None)


def noted(*values: float) -> tuple[Ledger, list[nn.Parameter], Maker]:
    ledger, owners, maker = Ledger(), [parameter(v) for v in values], Maker()
    note(ledger, owners, maker)
    return ledger, owners, maker


@pytest.mark.parametrize("change", ["in place", "an element", "replaced"])
def test_a_ledger_names_what_was_edited_since_the_backward_pass(change: str) -> None:
    ledger, owners, _ = noted(1.0, 2.0)
    assert ledger.edited(owners) == []
    CHANGES[change](owners[1])
    assert [id(p) for p in ledger.edited(owners)] == [id(owners[1])]
    ledger.again()
    assert ledger.edited(owners) == []


def test_cleared_gradients_are_not_edited_ones() -> None:
    ledger, owners, _ = noted(1.0, 2.0)
    owners[0].grad = None
    owners[1].grad.zero_()
    assert ledger.edited(owners) == []


def test_what_was_used_is_no_longer_held() -> None:
    ledger, owners, _ = noted(1.0, 2.0)
    assert all(ledger.holds(p) for p in owners)
    ledger.use(owners[:1])
    assert [ledger.holds(p) for p in owners] == [False, True]
    owners[1].grad = None
    assert not ledger.holds(owners[1])


def test_a_maker_is_asked_as_long_as_it_lives() -> None:
    _, (p,), maker = noted(1.0)
    assert maker_of(p.grad) is maker
    del maker
    assert maker_of(p.grad) is None
    assert maker_of(torch.ones(1)) is None


def through_pickle(value: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(value))  # noqa: S301  our own bytes


def through_torch(value: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"gradient": value}, file)
    file.seek(0)
    return torch.load(file)["gradient"]  # weights_only, torch's default


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, through_pickle, through_torch, torch.clone, Tensor.detach])
def test_a_copy_of_a_gradient_is_its_equal_and_was_made_by_nobody(through: Callable[[Tensor], Tensor]) -> None:
    _, (p,), maker = noted(1.0)
    twin = through(p.grad)
    assert torch.equal(twin, p.grad)
    assert maker_of(p.grad) is maker
    if through is not copy.copy:  # which shares everything
        assert maker_of(twin) is None


def test_a_parameter_with_a_signed_gradient_copies_and_saves() -> None:
    _, (p,), maker = noted(1.0)
    for through in (copy.deepcopy, through_pickle, through_torch):
        assert torch.equal(through(p), p)
    assert maker_of(p.grad) is maker


@pytest.mark.parametrize("kind", ["sparse", "complex", "half", "meta"])
def test_odd_gradients_are_noted_too(kind: str) -> None:
    p = {
        "sparse": lambda: nn.Embedding(4, 2, sparse=True).weight,
        "complex": lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        "half": lambda: nn.Parameter(torch.ones(2, dtype=torch.float16)),
        "meta": lambda: nn.Parameter(torch.ones(2, device="meta")),
    }[kind]()
    loss = nn.functional.embedding(torch.tensor([1]), p, sparse=True).sum() if kind == "sparse" else (p * p.conj()).real.sum()
    loss.backward()
    ledger, maker = Ledger(), Maker()
    note(ledger, [p], maker)
    assert maker_of(p.grad) is maker
    assert ledger.holds(p)
    assert ledger.edited([p]) == []
    ledger.use([p])
    assert not ledger.holds(p)


def test_threads_with_loops_of_their_own_do_not_meet() -> None:
    weights: dict[int, list[Tensor]] = {}
    errors: list[BaseException] = []

    def work(number: int, scaled: bool) -> None:
        try:
            p = nn.Parameter(torch.full((3,), float(number)))
            optimizer, scaler = Adam([p], lr=0.01), GradScaler(enabled=scaled)
            for _ in range(30):
                optimizer.zero_grad()
                scaler.scale((p * p).sum()).backward()
                assert scaler.step(optimizer)
                scaler.update()
            weights.setdefault(number, []).append(p.detach())
        except BaseException as error:  # noqa: BLE001  shown by the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n % 3 + 1, n < 3)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert all(torch.equal(one, two) for one, two in weights.values())
