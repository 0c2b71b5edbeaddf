"""Lion against its definition, written out in fp64, and what it refuses."""

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.optim import Lion, full_values


def defined(p: Tensor, m: Tensor, g: Tensor, lr: float, betas: tuple[float, float], decay: float) -> tuple[Tensor, Tensor]:
    """One step by the paper's algorithm 2."""
    c = betas[0] * m + (1 - betas[0]) * g
    return p - lr * (c.sign() + decay * p), betas[1] * m + (1 - betas[1]) * g


@pytest.mark.parametrize(("betas", "decay"), [((0.9, 0.99), 0.0), ((0.5, 0.75), 0.25), ((0.0, 0.0), 0.1)])
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_are_those_of_the_paper(betas: tuple[float, float], decay: float, maximize: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    held = [nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64)) for shape in ((3, 4), (5,), ())]
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in held]
    optimizer = Lion(held, lr=0.01, betas=betas, weight_decay=decay, maximize=maximize)
    for _ in range(20):
        for i, p in enumerate(held):
            p.grad = torch.randn(p.shape, generator=draws, dtype=torch.float64)
            expected[i] = defined(*expected[i], -p.grad if maximize else p.grad, 0.01, betas, decay)
        optimizer.step()
    for p, (weight, average) in zip(held, expected, strict=True):
        torch.testing.assert_close(p.detach(), weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], average, rtol=1e-12, atol=1e-12)


def test_parameters_without_a_gradient_stay_and_gradients_are_left_alone() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Lion([one, other], lr=0.5, weight_decay=0.5)
    one.grad = torch.tensor([2.0, 0.0])
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0
    assert one.tolist() == [0.25, 0.75]  # decayed to 0.75; a gradient of 0 has no sign
    assert other.tolist() == [1.0, 1.0]
    assert one.grad.tolist() == [2.0, 0.0]
    assert other not in optimizer.state


@pytest.mark.parametrize("weights", ["split", "split24", "kahan", "stochastic"])
def test_small_steps_on_16_bit_weights_add_up_under_every_storage(weights: str) -> None:
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = Lion([p], lr=2.0**-12, weights=weights, states="int8")
    for _ in range(256):  # each a 16th of an ulp of the weight below 1
        p.grad = torch.ones_like(p)
        optimizer.step()
    error = 2.0**-8 * (256 / 16 * 15 / 16 / 4096) ** 0.5 if weights == "stochastic" else 2e-5  # of the mean of 4096 random walks: 2.4e-4
    assert float(full_values(p).double().mean()) == pytest.approx(1 - 256 * 2.0**-12, abs=5 * error)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0}, r"lr=-1.0 is out of range"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) is out"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Lion([nn.Parameter(torch.ones(1))], **settings)


def test_sparse_and_complex_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"parameter 0 of shape \(4, 2\) has a sparse gradient, and Lion updates every element"):
        Lion(table.parameters()).step()
    number = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    with pytest.raises(ConfigError, match=r"parameter 0 of shape \(1,\) is complex, and Lion steps by signs"):
        Lion([number]).step()
