"""Steps that repeat the one before: the same bits as steps that look at everything, and whatever is different in between is noticed."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba", reason="steps are repeated by the compiled kernels: pip install 'halfstep[cpu]'")
from halfstep.errors import ConfigError
from halfstep.optim import AdamW, attach, full_values, master_of, refresh

SHAPES = ((4, 40), (130,), (3, 5, 7), ())
KINDS = {"fp32": (None, "fp32"), "split, fp32": ("split", "fp32"), "split, int8": ("split", "int8"), "split24, bf16": ("split24", "bf16")}
State = dict[str, Tensor]


def made(kind: str) -> tuple[list[nn.Parameter], AdamW]:
    """Weights in two groups and their optimizer."""
    storage, states = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for p in params[: 3 if storage else 0]:  # the last one stays fp32
        attach(p, storage, torch.bfloat16)
    groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 3e-3, "weight_decay": 0.1}]
    return params, AdamW(groups, states=states, seed=5)


def give(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def look(params: list[nn.Parameter], optimizer: AdamW) -> list[Tensor]:
    """All bits: weights, masters, states."""
    states = [value for p in params for value in optimizer.state[p].values()]
    return [t.detach().clone() for p in params for t in (p, full_values(p))] + [s.clone() for s in states]


def alike(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(these, those, strict=True))


def run(kind: str, change: Callable[[list[nn.Parameter], AdamW], object] | None, repeats: bool) -> tuple[list[Tensor], list[bool]]:
    """Seven steps with a change before the fifth, and for each step whether it was a repeated one."""
    params, optimizer = made(kind)
    repeated = []
    for step in range(7):
        give(params, step)
        if change is not None and step == 4:
            with torch.no_grad():
                change(params, optimizer)
        if not repeats:
            optimizer._compiled._repeat = None
        before = optimizer._compiled._repeat
        optimizer.step(factor=0.5)
        repeated.append(before is not None and optimizer._compiled._repeat is before)
        assert optimizer.steps == step + 1
    return look(params, optimizer), repeated


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_third_step_on_they_are_repeated_with_the_same_bits(kind: str) -> None:
    fast, repeated = run(kind, None, True)
    slow, never = run(kind, None, False)
    assert repeated == [False, False, True, True, True, True, True]
    assert not any(never)
    assert alike(fast, slow)
    assert [int(t) for t in fast if t.dim() == 0 and t.dtype == torch.float32 and float(t) == 7.0], "steps are counted in the states"


def swap_state(params: list[nn.Parameter], optimizer: AdamW) -> None:
    optimizer.state[params[1]]["exp_avg"] = torch.zeros_like(optimizer.state[params[1]]["exp_avg"])


def drop_state(params: list[nn.Parameter], optimizer: AdamW) -> None:
    del optimizer.state[params[0]]


def load(params: list[nn.Parameter], optimizer: AdamW) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_memory(params: list[nn.Parameter], optimizer: AdamW) -> None:
    params[1].data = params[1].data.clone().mul_(2)


def state_moved(params: list[nn.Parameter], optimizer: AdamW) -> None:
    moment = optimizer.state[params[0]]["exp_avg_sq"]
    moment.data = moment.data.clone()


def transposed(params: list[nn.Parameter], optimizer: AdamW) -> None:
    params[0].data = params[0].data.clone().t().contiguous().t()


def wider(params: list[nn.Parameter], optimizer: AdamW) -> None:
    params[1].data = params[1].data.float()  # its master is joined with it, if it has one


def other_master(params: list[nn.Parameter], optimizer: AdamW) -> None:
    master = master_of(params[1])
    if master is not None and master.residual is not None:
        master.put(torch.zeros_like(master.residual))


def other_group(params: list[nn.Parameter], optimizer: AdamW) -> None:
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())  # the order of all stays


# what is different, and whether the next step has to be taken the long way
CHANGES: dict[str, tuple[Callable[[list[nn.Parameter], AdamW], object], bool]] = {
    "another learning rate": (lambda p, o: o.param_groups[0].update(lr=0.5), False),
    "other betas, eps, decay": (lambda p, o: o.param_groups[1].update(betas=(0.5, 0.6), eps=0.1, weight_decay=0.5), False),
    "the other way": (lambda p, o: o.param_groups[1].update(maximize=True), False),
    "fewer steps counted": (lambda p, o: o.state[p[1]]["step"].fill_(1), False),
    "a moment cleared in place": (lambda p, o: o.state[p[1]]["exp_avg"].zero_(), False),
    "a moment swapped": (swap_state, True),
    "a state dropped": (drop_state, True),
    "all states dropped": (lambda p, o: o.state.clear(), True),
    "a state loaded": (load, True),
    "a moment moved": (state_moved, True),
    "other memory": (other_memory, True),
    "no gradient": (lambda p, o: setattr(p[1], "grad", None), True),
    "a gradient that lies otherwise": (lambda p, o: setattr(p[0], "grad", p[0].grad.t().contiguous().t()), False),
    "a weight that lies otherwise": (transposed, True),
    "another seed": (lambda p, o: setattr(o, "seed", 9), True),
    "another group": (other_group, True),
    "a group more": (lambda p, o: o.add_param_group({"params": [nn.Parameter(torch.ones(3))]}), True),
    "a weight less": (lambda p, o: o.param_groups[0]["params"].pop(), True),
}
MASTERS: dict[str, tuple[Callable[[list[nn.Parameter], AdamW], object], bool]] = {
    "written from outside": (lambda p, o: p[1].mul_(0.5), True),
    "a row written": (lambda p, o: p[0][1].fill_(2.0), True),
    "refreshed": (lambda p, o: refresh(p), False),
    "another residual": (other_master, True),
    "cast to fp32": (wider, True),
}


@pytest.mark.parametrize("kind", ["fp32", "split, int8"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_different_is_noticed(what: str, kind: str) -> None:
    change, long = CHANGES[what]
    fast, repeated = run(kind, change, True)
    slow, _ = run(kind, change, False)
    assert alike(fast, slow)
    assert repeated[4] != long


@pytest.mark.parametrize("kind", ["split, fp32", "split, int8", "split24, bf16"])
@pytest.mark.parametrize("what", MASTERS)
def test_what_is_done_to_masters_is_noticed(what: str, kind: str) -> None:
    change, long = MASTERS[what]
    fast, repeated = run(kind, change, True)
    slow, _ = run(kind, change, False)
    assert alike(fast, slow)
    assert repeated[4] != long


def test_gradients_of_another_format_are_taken() -> None:
    params, optimizer = made("split, int8")
    others, twin = made("split, int8")
    for step in range(5):
        for some in (params, others):
            give(some, step)
            for p in some:
                p.grad_dtype = None
                p.grad = p.grad.float() if step == 4 else p.grad
        twin._compiled._repeat = None
        optimizer.step()
        twin.step()
    assert optimizer._compiled._repeat is not None
    assert alike(look(params, optimizer), look(others, twin))


def test_a_sparse_gradient_is_refused_with_nothing_done() -> None:
    params, optimizer = made("fp32")
    for step in range(4):
        give(params, step)
        optimizer.step()
    before = look(params, optimizer)
    params[0].grad = torch.ones(SHAPES[0]).to_sparse()
    with pytest.raises(ConfigError, match="sparse gradient"):
        optimizer.step()
    assert alike(before, look(params, optimizer))


def test_switching_the_kernels_off_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = made("split, int8")
    others, twin = made("split, int8")
    for step in range(5):
        if step == 4:
            monkeypatch.setenv("HALFSTEP_KERNELS", "off")
        for some, one in ((params, optimizer), (others, twin)):
            give(some, step)
            one.step()
    assert optimizer._compiled._repeat is None
    assert alike(look(params, optimizer), look(others, twin))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_with_the_same_bits(kind: str) -> None:
    params, optimizer = made(kind)
    for step in range(4):
        give(params, step)
        optimizer.step()
    held = nn.ParameterList(params)
    twins, twin = copy.deepcopy((held, optimizer))
    for step in range(4, 7):
        give(params, step)
        give(list(twins), step)
        optimizer.step()
        twin.step()
    assert alike(look(params, optimizer), look(list(twins), twin))


def test_a_copy_of_a_parameter_that_takes_its_master_is_noticed() -> None:
    """A pickled parameter brings its master; one master that serves two parameters belongs to the last that was asked for it."""
    params, optimizer = made("split, fp32")
    for step in range(4):
        give(params, step)
        optimizer.step()
    other = nn.Parameter(params[0].detach().clone())
    other.halfstep_master = params[0].halfstep_master  # type: ignore[attr-defined]
    assert master_of(other) is params[0].halfstep_master  # type: ignore[attr-defined]
    give(params, 4)
    optimizer.step()
    assert master_of(params[0]) is params[0].halfstep_master  # type: ignore[attr-defined]
    assert torch.equal(full_values(params[0]).bfloat16(), params[0].detach())


@pytest.mark.parametrize("kind", list(KINDS))
def test_weights_of_one_group_that_have_taken_unlike_many_steps_are_each_corrected_by_their_own(kind: str) -> None:
    def steps(repeats: bool) -> tuple[list[Tensor], bool]:
        params, optimizer = made(kind)
        for step in range(7):
            give(params, step)
            if step == 1:
                params[1].grad = None
            if not repeats:
                optimizer._compiled._repeat = None
            before = optimizer._compiled._repeat
            optimizer.step(factor=0.5)
        assert len({float(optimizer.state[p]["step"]) for p in params[:2]}) == 2
        return look(params, optimizer), before is not None and optimizer._compiled._repeat is before

    found, repeated = steps(True)
    expected, _ = steps(False)
    assert repeated
    assert alike(found, expected)
