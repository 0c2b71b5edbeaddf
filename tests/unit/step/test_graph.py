"""What is read from a graph: leaves, and running statistics that its forward pass has moved. Nothing is run."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.step.backward import BackwardWatch
from halfstep.step.graph import walk


def test_leaves_are_those_that_a_backward_pass_gives_gradients_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    frozen, unused = nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1)
    x = torch.randn(4, 3, requires_grad=True)
    model[0].bias.requires_grad_(False)
    loss = frozen(model(x)).sum()
    leaves = walk(loss).leaves
    loss.backward()
    everything = [x, *model.parameters(), *frozen.parameters(), *unused.parameters()]
    assert {id(p) for p in leaves} == {id(p) for p in everything if p.grad is not None}


def test_shared_weights_are_found_and_detached_ones_are_not() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    found = walk((p * p + p * q.detach()).sum()).leaves
    assert {id(x) for x in found} == {id(p)}


def test_a_loss_that_is_itself_a_leaf_reaches_itself() -> None:
    p = nn.Parameter(torch.tensor(1.0))
    assert [id(x) for x in walk(p).leaves] == [id(p)]


class Twice(torch.autograd.Function):
    """Somebody's own Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_functions_that_may_run_a_backward_pass_of_their_own_are_told() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    whole = walk(checkpoint(layer, x, use_reentrant=False).sum())
    assert (len(whole.leaves), whole.partial) == (3, False)
    hides = walk(checkpoint(layer, x, use_reentrant=True).sum())
    assert (len(hides.leaves), hides.partial) == (1, True)
    assert walk(Twice.apply(x).sum()).partial


def test_statistics_are_those_of_norms_in_training_mode_only() -> None:
    training, evaluating, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False)
    found = walk(plain(evaluating(training(torch.randn(4, 3)))).sum()).statistics
    assert {t.data_ptr() for t in found} == {training.running_mean.data_ptr(), training.running_var.data_ptr()}


def test_a_graph_of_a_thousand_nodes_is_no_recursion() -> None:
    p = nn.Parameter(torch.ones(1))
    y = p
    for _ in range(20_000):
        y = y + 1
    assert len(walk(y.sum()).leaves) == 1
    del y


def test_walking_leaves_the_graph_whole() -> None:
    p = nn.Parameter(torch.ones(2))
    loss = (p.exp() * 2).sum()
    walk(loss)
    loss.backward()
    assert p.grad is not None


def test_a_parameter_that_joins_late_is_a_leaf_too() -> None:
    watch = BackwardWatch()
    others = [nn.Parameter(torch.ones(1)) for _ in range(40)]
    for o in others:
        watch.look(o.sum())
    assert {id(p) for p in watch.leaves()} == {id(p) for p in others}


def test_parameters_that_are_gone_are_no_longer_leaves() -> None:
    watch = BackwardWatch()
    keep, drop = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    watch.look((keep + drop).sum())
    del drop
    assert [id(p) for p in watch.leaves()] == [id(keep)]
