"""What `prepare` takes, gives back and refuses, and which settings an `Accelerator` has."""

import copy
import itertools
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader

from halfstep import Accelerator, Policy
from halfstep.accelerator import PreparedLoader, PreparedOptimizer, PreparedScheduler
from halfstep.errors import ConfigError, PolicyError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def objects() -> tuple[nn.Module, torch.optim.Optimizer, object, DataLoader]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    return net, optimizer, StepLR(optimizer, 1), DataLoader(torch.randn(6, 4), batch_size=2)


KINDS = (nn.Module, PreparedOptimizer, PreparedScheduler, PreparedLoader)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_goes_in_and_the_same_order_comes_out(order: tuple[int, ...]) -> None:
    given = objects()
    ready = Accelerator(cpu=True).prepare(*(given[i] for i in order))
    assert [isinstance(item, KINDS[i]) for item, i in zip(ready, order, strict=True)] == [True] * 4
    assert ready[order.index(0)] is given[0]
    assert ready[order.index(1)].optimizer is given[1]
    assert ready[order.index(2)].optimizer is ready[order.index(1)]
    assert ready[order.index(3)].loader is given[3]


def test_one_object_comes_back_as_itself_and_not_as_a_tuple() -> None:
    accelerator, (net, optimizer, scheduler, loader) = Accelerator(cpu=True), objects()
    assert accelerator.prepare(net) is net
    assert isinstance(accelerator.prepare(optimizer), PreparedOptimizer)
    assert isinstance(accelerator.prepare(scheduler), PreparedScheduler)
    assert isinstance(accelerator.prepare(loader), PreparedLoader)
    assert accelerator.prepare() == ()


def test_preparing_twice_gives_the_same_objects() -> None:
    accelerator, given = Accelerator("bf16", cpu=True), objects()
    first = accelerator.prepare(*given)
    again = accelerator.prepare(*first)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert accelerator.prepare(given[1]) is first[1]
    assert accelerator.prepare(given[0]) is given[0]


def test_two_of_a_kind_are_told_apart() -> None:
    accelerator = Accelerator(cpu=True)
    (one, first, a, _), (two, second, b, _) = objects(), objects()
    ready = accelerator.prepare(b, second, two, a, one, first)
    assert ready[2] is two
    assert ready[4] is one
    assert ready[0].optimizer is ready[1]
    assert ready[3].optimizer is ready[5]
    assert ready[1].optimizer is second


@pytest.mark.parametrize("thing", [3, "model", [model()], object(), torch.zeros(2), lambda: 0])
def test_other_kinds_are_refused_by_name(thing: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True).prepare(thing)
    assert caught.value.cause == f"prepare() was given a {type(thing).__name__}"
    assert "modules, torch optimizers, DataLoaders and learning rate schedulers" in caught.value.remedy


def test_a_class_is_told_from_an_object_of_it_and_none_stays_none() -> None:
    with pytest.raises(ConfigError, match="the class Linear, not an object of it"):
        Accelerator(cpu=True).prepare(nn.Linear)
    net = model()
    assert Accelerator(cpu=True).prepare(net, None) == (net, None)


def test_a_scheduler_without_its_optimizer_is_refused() -> None:
    net, optimizer, scheduler, _ = objects()
    other = torch.optim.SGD(net.parameters(), 0.1)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"scheduler's optimizer is not prepared.*Prepare the optimizer first or together"):
        accelerator.prepare(net, other, scheduler)
    assert accelerator.prepare(optimizer, scheduler)[1].optimizer.optimizer is optimizer


# --- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "near"), [("mixed_precison", "mixed_precision"), ("gradient_accumulation_step", "gradient_accumulation_steps")])
def test_an_unknown_argument_is_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"Accelerator has no argument '{word}'. Did you mean '{near}'"):
        Accelerator(**{word: 1})


def test_an_argument_like_none_gets_the_list() -> None:
    with pytest.raises(ConfigError, match="Known: agree, cpu, data_parallel, dataloader_config, device_placement, dynamo_backend, dynamo_plugin"):
        Accelerator(zzz=1)


@pytest.mark.parametrize(("word", "near"), [("bf17", "bf16"), ("fp8", "fp16"), ("No", "no")])
def test_an_unknown_mixed_precision_is_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown mixed_precision '{word}'. (Did you mean '{near}'|Known: .*{near})"):
        Accelerator(word, cpu=True)


def test_two_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision='fp16-mixed' and mixed_precision='bf16' were both given. Leave one of them out"):
        Accelerator("bf16", precision="fp16-mixed", cpu=True)


@pytest.mark.parametrize("steps", [0, -4])
def test_no_accumulation_at_all_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=f"gradient_accumulation_steps={steps}. Use a whole number of 1 or more"):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)


def test_no_patience_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"patience=0\. Use a whole number of 1 or more"):
        Accelerator(cpu=True, patience=0)


def test_mixed_precision_says_what_is_in_force() -> None:
    assert [Accelerator(p, cpu=True).mixed_precision for p in (None, "no", "bf16", "fp16")] == ["no", "no", "bf16", "fp16"]
    assert Accelerator(precision="fp16-mixed,scale=static:1024", cpu=True).mixed_precision == "fp16"
    policy = Policy("bf16-mixed", autocast="bf16")
    assert Accelerator(precision=policy, cpu=True).policy == policy


def test_tf32_on_a_cpu_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"tf32 was asked for, and cpu .* has no tf32. .*leave tf32 out"):
        Accelerator(precision="tf32", cpu=True)


def test_several_processes_that_cannot_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE are set and RANK, MASTER_ADDR, MASTER_PORT are not.* Start it with torchrun"):
        Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Accelerator(cpu=True).num_processes == 1


# --- models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype", "said", "remedy"),
    [
        ("fp32", torch.float16, "are 16-bit, so there is no fp32 master", "dtype=torch.float32, or call model.float()"),
        ("fp32", torch.bfloat16, "are 16-bit, so there is no fp32 master", "dtype=torch.float32, or call model.float()"),
        ("fp16-mixed,weights=plain", torch.bfloat16, "were loaded in bf16, and weights=plain under fp16-mixed", "Use bf16-mixed,weights=plain"),
        *((p, torch.float64, "are neither fp32 nor 16-bit", "Call model.float()") for p in ("fp32", "bf16-mixed", "fp16-lean", "bf16-true")),
    ],
)
def test_a_model_with_other_weights_is_refused_and_left_as_it_was(precision: str, dtype: torch.dtype, said: str, remedy: str) -> None:
    net = model().to(dtype)
    with pytest.raises(PolicyError) as caught:
        Accelerator(precision=precision, cpu=True).prepare(net)
    assert said in caught.value.cause
    assert "4 (the first is '0.weight') of the 4 trainable parameters" in caught.value.cause
    assert remedy in caught.value.remedy
    assert "forward" not in vars(net)
    assert {p.dtype for p in net.parameters()} == {dtype}
    Accelerator(precision=precision.removesuffix(",weights=plain"), cpu=True).prepare(net.float())  # the remedy works


def test_one_16_bit_layer_is_enough_for_a_refusal_in_fp32() -> None:
    net = model()
    net[2].bfloat16()
    with pytest.raises(PolicyError, match=r"2 .the first is '2.weight'. of the 4 trainable.* use bf16-mixed, which gives it masters, or bf16-lean"):
        Accelerator(cpu=True).prepare(net)
    Accelerator("bf16", cpu=True).prepare(net)  # the remedy works


def test_plain_weights_of_a_model_that_has_no_16_bit_ones_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"weights=plain has no effect under bf16-mixed with this model: none of its 4 parameters is 16-bit"):
        Accelerator(precision="bf16-mixed,weights=plain", cpu=True).prepare(model())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frozen_16_bit_weights_are_fine(dtype: torch.dtype) -> None:
    net = model()
    net[0].to(dtype).requires_grad_(False)
    accelerator = Accelerator(precision="bf16-mixed" if dtype == torch.bfloat16 else "fp16-mixed,scale=static:1024", cpu=True)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    before = net[2].weight.detach().clone()
    accelerator.backward(net(torch.randn(4, 4)).square().mean())
    assert optimizer.step()
    assert net[0].weight.dtype == dtype
    assert not torch.equal(net[2].weight, before)


def test_a_model_under_one_policy_is_not_prepared_under_another() -> None:
    net = Accelerator("bf16", cpu=True).prepare(model())
    with pytest.raises(ConfigError, match=r"already prepared under bf16-mixed, and the accelerator has fp16-mixed. Call unwrap_model"):
        Accelerator("fp16", cpu=True).prepare(net)
    Accelerator("bf16", cpu=True).prepare(net)  # the same policy is no contradiction


def test_a_pattern_that_matches_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp32=lm_head matches no module"):
        Accelerator(precision="bf16-mixed,fp32=lm_head", cpu=True).prepare(model())


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_outputs_are_fp32_and_products_are_not(precision: str) -> None:
    seen: list[torch.dtype] = []
    net = model()
    net[0].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    net = Accelerator(precision, cpu=True).prepare(net)
    assert net(torch.randn(2, 4)).dtype == torch.float32
    assert seen == [{"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]]


def test_a_deep_copy_of_a_prepared_model_runs_under_the_policy_with_its_own_weights() -> None:
    net, x = Accelerator("bf16", cpu=True).prepare(model()), torch.randn(2, 4)
    expected = net(x)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert torch.equal(twin(x), expected)
    assert not net(x).any()
    assert twin(x).dtype == torch.float32
    assert torch.equal(twin(x), expected.bfloat16().float()), "it was computed in bf16"


def test_unwrap_gives_the_users_own_module() -> None:
    accelerator, net = Accelerator("bf16", cpu=True), model()
    assert accelerator.unwrap_model(accelerator.prepare(net)) is net


def test_only_things_with_a_state_can_be_registered() -> None:
    with pytest.raises(ConfigError, match=r"a dict has no state_dict and load_state_dict. Give it both"):
        Accelerator(cpu=True).register_for_checkpointing({})


def test_a_prepared_optimizer_is_a_torch_optimizer_with_the_inner_ones_groups_and_state() -> None:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.5)
    optimizer = Accelerator(cpu=True).prepare(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra], "lr": 2.0})
    assert inner.param_groups[1]["params"] == [extra]
    assert "AdamW" in repr(optimizer)
    with pytest.raises(AttributeError):
        _ = optimizer.nothing_of_this_name


def test_hooks_of_a_prepared_optimizer_run_at_steps_that_are_taken() -> None:
    net = model()
    accelerator = Accelerator(precision="fp16-mixed,scale=static:1024", cpu=True)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    accelerator.backward(net(torch.randn(2, 4)).sum() * float("inf"))
    assert not optimizer.step()
    assert calls == []
    optimizer.zero_grad()
    accelerator.backward(net(torch.randn(2, 4)).mean())
    assert optimizer.step()
    assert calls == ["before", "after"]


def test_a_closure_calls_the_accelerators_backward() -> None:
    accelerator, net = Accelerator("fp16", cpu=True), model()
    net, optimizer = accelerator.prepare(net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3))
    x, y, losses = torch.randn(8, 4), torch.randn(8, 1), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses.append((net(x) - y).square().mean())
        accelerator.backward(losses[-1])
        return losses[-1]

    assert optimizer.step(closure)
    assert len(losses) >= 3
    assert losses[-1] < losses[0]


def test_schedulers_built_on_the_inner_or_the_prepared_optimizer_are_both_taken() -> None:
    for build_first in (True, False):
        net = model()
        accelerator, inner = Accelerator(cpu=True), torch.optim.SGD(net.parameters(), 1.0)
        scheduler = LambdaLR(inner, lambda n: 0.5**n) if build_first else None
        net, optimizer = accelerator.prepare(net, inner)
        scheduler = accelerator.prepare(scheduler or LambdaLR(optimizer, lambda n: 0.5**n))
        rates = []
        for _ in range(3):
            accelerator.backward(net(torch.randn(2, 4)).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
        assert rates == [0.5, 0.25, 0.125]
        assert inner.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_fp16_on_the_wire_needs_a_loss_scale(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"reduce_dtype='fp16' under {precision}, which has no loss scale.* Use reduce_dtype='bf16'"):
        Accelerator(precision=precision, cpu=True, reduce_dtype="fp16")
    with pytest.raises(ConfigError, match=r"reduce_dtype='fp8' is not known.* Use one of fp32, bf16, fp16"):
        Accelerator(precision=precision, cpu=True, reduce_dtype="fp8")


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float64])
def test_a_model_to_be_evaluated_runs_in_the_format_it_was_loaded_in_until_it_is_trained(form: torch.dtype) -> None:
    accelerator, model, x = Accelerator(cpu=True), nn.Linear(3, 2).to(form), torch.randn(4, 3, dtype=form)
    expected = model(x)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert torch.equal(model(x).to(form), expected)
    with pytest.raises(PolicyError, match="of the 2 trainable parameters are"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(PolicyError, match="of the 2 trainable parameters are"):
        accelerator.prepare(model)


@pytest.mark.parametrize(
    ("precision", "way", "said"),
    [
        ("fp16-mixed", "alone", 1),
        ("bf16-lean", "alone", 1),
        ("fp32", "alone", 0),
        ("fp16-mixed", "prepared", 0),
        ("fp16-mixed", "autocast", 0),
    ],
)
def test_a_precision_that_reaches_no_model_is_said_once(precision: str, way: str, said: int, caplog: pytest.LogCaptureFixture) -> None:
    model, accelerator = nn.Linear(4, 1), Accelerator(precision=precision, cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer) if way == "prepared" else (model, accelerator.prepare(optimizer))
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(2):
            with accelerator.autocast() if way == "autocast" else nullcontext():
                loss = model(torch.ones(2, 4)).float().square().mean()
            accelerator.backward(loss)
            assert optimizer.step()
            optimizer.zero_grad()
    assert sum("no model was prepared" in record.message for record in caplog.records) == said
