"""Names and meanings of accelerate's Accelerator, in one process: what moved scripts call beside prepare, backward and step."""

import logging
from collections import namedtuple
from contextlib import ExitStack
from datetime import timedelta

import accelerate.utils as theirs
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Accelerator
from halfstep import accelerator as ours
from halfstep.accelerator.facts import refuse_elsewhere
from halfstep.errors import ConfigError, DataError

Pair = namedtuple("Pair", "a b")


def accelerator(*args, **kwargs) -> Accelerator:
    return Accelerator(*args, cpu=True, **kwargs)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def test_one_process_is_first_last_and_all() -> None:
    a = accelerator("bf16")
    assert (a.num_processes, a.process_index, a.local_process_index) == (1, 0, 0)
    assert a.is_main_process
    assert a.is_local_main_process
    assert a.is_last_process
    assert not a.use_distributed
    assert a.distributed_type == ours.DistributedType.NO == theirs.DistributedType.NO
    state = a.state
    assert (state.device, state.num_processes, state.mixed_precision) == (torch.device("cpu"), 1, "bf16")


def test_decorators_and_blocks_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    a = accelerator()
    calls = [
        a.on_main_process(lambda x: x + 1),
        a.on_local_main_process(lambda x: x + 1),
        a.on_last_process(lambda x: x + 1),
        a.on_process(process_index=0)(lambda x: x + 1),
        a.on_local_process(lambda x: x + 1, local_process_index=0),
    ]
    assert [call(1) for call in calls] == [2] * 5
    assert a.on_process(process_index=1)(lambda x: x)(1) is None
    with ExitStack() as blocks:
        for block in (a.main_process_first(), a.local_main_process_first(), a.no_sync(net())):
            blocks.enter_context(block)
    a.wait_for_everyone()
    a.print("said", end="")
    assert capsys.readouterr().out == "said"
    assert not a.check_trigger()
    a.set_trigger()
    assert [a.check_trigger(), a.check_trigger()] == [True, False]


def test_values_of_one_process_are_those_of_all() -> None:
    a = accelerator()
    tree = {"x": torch.arange(3.0), "y": [torch.tensor(2.0)], "z": Pair(torch.ones(1), torch.zeros(1))}
    gathered = a.gather(tree)
    assert torch.equal(gathered["x"], tree["x"])
    assert gathered["y"][0].shape == (1,)
    assert isinstance(gathered["z"], Pair)
    assert torch.equal(a.gather_for_metrics((tree["x"], tree["x"]))[1], tree["x"])
    assert a.gather_for_metrics(["a", "b"]) == ["a", "b"]
    assert a.gather_for_metrics("text") == "text"
    for how in ("sum", "mean", "max", "none"):
        assert torch.equal(a.reduce(tree, how)["x"], tree["x"])
    assert torch.equal(a.reduce(tree["x"], "sum", scale=0.5), tree["x"] / 2)
    assert torch.equal(a.pad_across_processes(tree, dim=1, pad_index=-1)["x"], tree["x"])
    with a.split_between_processes([1, 2, 3], apply_padding=True) as part:
        assert part == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda a: a.gather(3.0), DataError, "a float"),
        (lambda a: a.gather({"x": [None]}), DataError, "a NoneType"),
        (lambda a: a.reduce("x"), DataError, "a str"),
        (lambda a: a.reduce(torch.ones(1), "summ"), ConfigError, "Did you mean 'sum'"),
        (lambda a: a.pad_across_processes([1]), DataError, "a int"),
        (lambda a: a.split_between_processes(3).__enter__(), DataError, "a int"),
        (lambda a: a.on_process(lambda: 0), ConfigError, "process_index=N"),
        (lambda a: a.on_main_process(3), ConfigError, "decorator"),
        (lambda a: a.no_sync(3), ConfigError, "Give it the prepared model"),
        (lambda a: a.prepare(net(), device_placement=[True, False]), ConfigError, "2 entries for 1"),
        (lambda a: a.prepare_model(3), ConfigError, "prepare_model"),
        (lambda a: a.prepare_optimizer(net()), ConfigError, "prepare_optimizer"),
        (lambda a: a.prepare_scheduler(net()), ConfigError, "prepare_scheduler"),
        (lambda a: a.prepare_data_loader([1]), ConfigError, "prepare_data_loader"),
        (lambda a: setattr(a, "gradient_accumulation_steps", 0), ConfigError, "gradient_accumulation_steps=0"),
        (lambda a: a.profile(), AttributeError, "torch.profiler"),
        (lambda a: a.gahter(1), AttributeError, "Did you mean 'gather'"),
    ],
)
def test_calls_that_cannot_work_say_why(call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(accelerator())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fsdp_plugin": object()}, "fsdp_plugin.*torchrun"),
        ({"deepspeed_plugin": object()}, "torchrun"),
        ({"dispatch_batches": True}, "its own share"),
        ({"rng_types": ["torch"]}, r"rng_types=\['torch'\]"),
        ({"kwargs_handlers": [theirs.ProfileKwargs()]}, "torch.profiler"),
        ({"kwargs_handlers": [3]}, "a int"),
        ({"kwargs_handlers": [ours.GradScalerKwargs(), theirs.GradScalerKwargs()]}, "two of GradScalerKwargs"),
        ({"kwargs_handlers": [ours.GradScalerKwargs(growth_interval=5)]}, r"growth_interval=5\) has no effect under fp32"),
        ({"kwargs_handlers": [theirs.AutocastKwargs(enabled=False)]}, "mixed_precision='no'"),
        ({"kwargs_handlers": [theirs.AutocastKwargs(cache_enabled=True)]}, "cache_enabled=True"),
        ({"kwargs_handlers": [theirs.DistributedDataParallelKwargs(check_reduction=True)]}, "check_reduction=True"),
        ({"kwargs_handlers": [theirs.DistributedDataParallelKwargs(static_graph=True)]}, "static_graph=True"),
        ({"dynamo_backend": "inductr"}, "Did you mean 'inductor'"),
        ({"dynamo_backend": "eager", "dynamo_plugin": ours.TorchDynamoPlugin()}, "both given"),
        ({"dataloader_config": theirs.DataLoaderConfiguration(dispatch_batches=True)}, "dispatch_batches=True"),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": ours.GradientAccumulationPlugin(2)}, "both given"),
        ({"gradient_accumulation_plugin": theirs.GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)}, "adjust_scheduler=False"),
        ({"gradient_accumulation_plugin": ours.GradientAccumulationPlugin(0)}, "num_steps=0"),
        ({"project_config": ours.GradScalerKwargs()}, "GradScalerKwargs was given for a ProjectConfiguration"),
        ({"project_dir": "a", "project_config": ours.ProjectConfiguration("b")}, "project_dir='a'"),
        ({"log_with": "tensorbord"}, "Did you mean 'tensorboard'"),
    ],
)
def test_settings_without_effect_are_refused(given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        accelerator(**given)


def test_a_plugin_that_says_nothing_is_let_through() -> None:
    accelerator(fsdp_plugin=None, deepspeed_plugin=None, dispatch_batches=None, rng_types=["generator"], kwargs_handlers=[theirs.GradScalerKwargs()])


@pytest.mark.parametrize("library", [ours, theirs])
def test_handlers_reach_what_they_are_for(library) -> None:
    a = accelerator(
        "fp16",
        kwargs_handlers=[
            library.GradScalerKwargs(init_scale=256.0, growth_interval=7, growth_factor=4.0, backoff_factor=0.25),
            library.DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=3),
            library.InitProcessGroupKwargs(timeout=timedelta(seconds=30)),
        ],
        gradient_accumulation_plugin=library.GradientAccumulationPlugin(num_steps=3),
        dataloader_config=library.DataLoaderConfiguration(split_batches=True),
    )
    scaler = a.scaler
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (256.0, 7, 4.0, 0.25)
    assert (a._handlers.ddp.find_unused_parameters, a._handlers.ddp.bucket_cap_mb) == (True, 3)
    assert (a._handlers.group.timeout, a._handlers.group.backend) == (timedelta(seconds=30), None)
    assert a.gradient_accumulation_steps == 3
    assert (a.split_batches, a.even_batches, a.non_blocking) == (True, True, False)
    assert not accelerator("fp16", kwargs_handlers=[library.GradScalerKwargs(enabled=False)]).scaler.is_enabled()


def test_the_comm_hook_of_accelerate_becomes_a_format() -> None:
    handler = theirs.DistributedDataParallelKwargs(comm_hook=theirs.DDPCommunicationHookType.BF16)
    assert accelerator(kwargs_handlers=[handler])._handlers.ddp.comm_hook == "bf16"


def test_what_the_launcher_left_in_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    a = accelerator()
    assert (a.mixed_precision, a.gradient_accumulation_steps) == ("bf16", 4)
    assert accelerator("fp16").mixed_precision == "fp16"
    assert accelerator(precision="fp32").mixed_precision == "no"
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 and the launcher"):
        accelerator(gradient_accumulation_steps=2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="FSDP is not supported"):
        accelerator()


def test_a_block_in_fp32() -> None:
    a = accelerator("bf16")
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with a.autocast():
        assert layer(x).dtype == torch.bfloat16
        with a.autocast(autocast_handler=theirs.AutocastKwargs(enabled=False)):
            assert layer(x).dtype == torch.float32


def test_models_are_compiled_in_place_where_that_is_asked_for() -> None:
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, name="counting")
    model = net()
    expected = model(torch.ones(1, 2))
    prepared = accelerator(dynamo_backend="counting").prepare(model)
    assert prepared is model
    assert torch.equal(prepared(torch.ones(1, 2)), expected)
    assert len(seen) == 1


def test_free_memory_lets_go_of_everything() -> None:
    a = accelerator("fp16", gradient_accumulation_steps=2)
    model = net()
    model, optimizer, _loader = a.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.ones(4, 2)))
    a.backward(model(torch.ones(1, 2)).sum())
    scale = a.scaler
    model, optimizer = a.free_memory(model, optimizer)
    assert (model, optimizer, a._models, a._optimizers, a._loaders) == (None, None, [], [], [])
    assert a.scaler is not scale
    again = net()
    again, optimizer = a.prepare(again, torch.optim.SGD(again.parameters(), 0.1))
    a.backward(again(torch.ones(1, 2)).sum())
    assert optimizer.step()
    assert a.clear(again) == [None]


def test_models_and_batches_may_stay_where_they_are() -> None:
    a = accelerator(device_placement=False)
    _model, loader = a.prepare(net(), DataLoader(torch.ones(2, 2)))
    assert loader.device is None
    assert next(iter(loader)).shape == (1, 2)
    with pytest.raises(ConfigError, match=r"weight is on cpu, the accelerator trains on cuda:0.*model\.to\(accelerator\.device\)"):
        refuse_elsewhere(net(), torch.device("cuda", 0))
    assert accelerator().prepare(DataLoader(torch.ones(2, 2)), device_placement=[False]).device is None


def test_a_scheduler_without_a_link_moves_whenever_it_is_called() -> None:
    a = accelerator(step_scheduler_with_optimizer=False)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    schedule = StepLR(optimizer, 1, 0.5)
    model, optimizer, prepared = a.prepare(model, optimizer, schedule)
    assert prepared is schedule
    assert a.prepare(schedule) is schedule
    a.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    prepared.step()
    prepared.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(("split", "expected"), [(False, 3), (True, 1)])
def test_a_schedule_moves_once_per_process(split: bool, expected: int) -> None:
    a = accelerator(split_batches=split)
    a.ranks = type("Three", (), {"world": 3, "rank": 0, "local_rank": 0, "is_main": True, "is_local_main": True})()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = Accelerator.prepare_scheduler
    prepared = a.prepare_optimizer(optimizer)
    schedule = scheduler(a, StepLR(optimizer, 1, 0.5))
    short = scheduler(a, OneCycleLR(optimizer, 1.0, total_steps=4))
    for _ in range(2):
        a.backward(model(torch.ones(1, 2)).sum())
        prepared.step()
        schedule.step()
        short.step()
        prepared.zero_grad()
    assert schedule.last_epoch == 2 * expected
    assert short.last_epoch == min(2 * expected, 4)


def test_windows_end_with_their_loader_unless_told_otherwise() -> None:
    def windows(**plugin) -> list[bool]:
        a = accelerator(gradient_accumulation_plugin=theirs.GradientAccumulationPlugin(num_steps=2, **plugin))
        loader, seen = a.prepare(DataLoader(TensorDataset(torch.ones(3, 2)))), []
        for _ in range(2):
            for _ in loader:
                with a.accumulate():
                    seen.append(a.sync_gradients)
        return seen

    assert windows() == [False, True, True] * 2
    assert windows(sync_with_dataloader=False) == [False, True, False, True, False, True]


def test_loggers_speak_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ours.get_logger("halfstep.test", log_level="INFO")
    with caplog.at_level(logging.INFO, "halfstep.test"):
        log.info("here %d", 1)
        monkeypatch.setenv("RANK", "1")
        log.info("not here")
        log.info("everywhere", main_process_only=False)
        log.warning_once("once")
        monkeypatch.setenv("RANK", "0")
        log.warning_once("twice")
        log.warning_once("twice")
    assert [r.message for r in caplog.records] == ["here 1", "everywhere", "twice"]
    assert {r.filename for r in caplog.records} == {"test_accelerate_names.py"}


def test_seeds_are_equal_or_differ_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(**kwargs) -> float:
        ours.set_seed(3, **kwargs)
        return float(torch.rand(()))

    base = drawn()
    assert drawn(device_specific=True) == base
    monkeypatch.setenv("RANK", "2")
    assert drawn() == base
    assert drawn(device_specific=True) != base
    with pytest.raises(ConfigError, match="seed=-1"):
        ours.set_seed(-1)


class Empty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_loss_that_trains_nothing_names_the_models_to_blame(precision: str) -> None:
    a = accelerator(precision)
    frozen, empty = a.prepare(net().requires_grad_(False), Empty())
    with pytest.raises(ConfigError, match=r"all 2 parameters of Linear are frozen \(requires_grad=False\); Empty has no parameters"):
        a.backward(frozen(torch.ones(1, 2)).sum() + empty(torch.ones(2)))
    good = a.prepare(nn.Bilinear(2, 2, 1))
    with pytest.raises(ConfigError, match="parameters of Linear are frozen"):
        a.backward(frozen(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigError, match=r"shape \(3, 1\).*loss\.mean\(\)"):
        a.backward(good(torch.ones(3, 2), torch.ones(3, 2)))
    with pytest.raises(ConfigError, match="given a float"):
        a.backward(3.0)
    a.backward(good(torch.ones(3, 2), torch.ones(3, 2)), gradient=torch.ones(3, 1))
    assert good.bias.grad is not None


def test_models_that_cannot_be_trained_here_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight is on the meta device.*Load the weights"):
        accelerator().prepare(nn.Linear(2, 1, device="meta"))
    with pytest.raises(ConfigError, match=r"a DataParallel.*the module inside"):
        accelerator().prepare(nn.DataParallel(net()))
