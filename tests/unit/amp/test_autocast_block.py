"""`halfstep.amp.autocast` as a block and as a decorator."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp.emulation import is_active
from halfstep.errors import ConfigError
from halfstep.hardware import emulated_families
from halfstep.policy import PRESETS, parse

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = list(NAMES)
CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")


def product() -> Tensor:
    return torch.full((2, 3), 1.001) @ torch.ones(3, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_inside_are_16_bit_and_outside_fp32(dtype: torch.dtype) -> None:
    with amp.autocast("cpu", dtype) as block:
        assert (block.device_type, block.dtype, block.enabled) == ("cpu", dtype, True)
        assert product().dtype == dtype
        assert torch.get_autocast_dtype("cpu") == dtype
        assert (torch.ones(2) + 1).dtype == torch.float32
    assert product().dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_emulates_exactly_what_was_measured_to_be_faster_so(dtype: torch.dtype) -> None:
    with amp.autocast("cpu", dtype):
        assert is_active() == bool(emulated_families(NAMES[dtype]))
    assert not is_active()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("products", ["emulated", "native", "emulated:convolution", "auto"])
def test_the_numbers_do_not_depend_on_emulation(dtype: torch.dtype, products: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    inputs = torch.randn(5, 8)
    with amp.autocast("cpu", dtype, products=products):
        got = model(inputs)
    with torch.autocast("cpu", dtype):
        expected = model(inputs)
    assert got.dtype == expected.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@no_gpu
def test_the_default_is_the_device_that_would_be_trained_on() -> None:
    with amp.autocast():
        assert product().dtype == torch.bfloat16


@pytest.mark.parametrize("cache", [None, False])
@pytest.mark.parametrize("products", ["emulated", "native"])
def test_a_weight_changed_inside_gives_fresh_output(cache: bool | None, products: str) -> None:
    """torch's cache of cast weights would give 2 again."""
    layer = nn.Linear(1, 1, bias=False)
    with amp.autocast("cpu", torch.bfloat16, cache_enabled=cache, products=products):
        outputs = []
        for value in (1.0, 5.0):
            with torch.no_grad():
                layer.weight.fill_(value)
            outputs.append(layer(torch.tensor([[2.0]])).item())
    assert outputs == [2.0, 10.0]


def test_the_cache_can_be_asked_for() -> None:
    with amp.autocast("cpu", cache_enabled=True):
        assert torch.is_autocast_cache_enabled()
    with amp.autocast("cpu"):
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("inner", [amp.autocast, torch.autocast])
def test_switching_off_inside_is_obeyed(inner: Any) -> None:
    with amp.autocast("cpu", torch.bfloat16):
        with inner("cpu", enabled=False):
            assert product().dtype == torch.float32
            assert torch.equal(product(), torch.full((2, 3), 1.001).matmul(torch.ones(3, 2)))
            with amp.autocast("cpu", torch.float16):
                assert product().dtype == torch.float16
            assert product().dtype == torch.float32
        assert product().dtype == torch.bfloat16


def test_blocks_nest_in_themselves() -> None:
    block = amp.autocast("cpu", torch.bfloat16)
    expected = []
    with block:
        expected.append(product())
        with block, amp.autocast("cpu", torch.float16):
            assert product().dtype == torch.float16
        assert product().dtype == torch.bfloat16
        with amp.autocast("cpu", torch.bfloat16):
            expected.append(product())
    assert torch.equal(*expected)
    assert product().dtype == torch.float32
    assert not is_active()
    with block:
        assert product().dtype == torch.bfloat16


def test_switched_off_it_leaves_everything() -> None:
    for dtype in (torch.bfloat16, torch.float32, None):
        with amp.autocast("cpu", dtype, enabled=False):
            assert product().dtype == torch.float32
            assert not is_active()


def test_another_thread_does_not_see_it() -> None:
    seen: list[torch.dtype] = []
    with amp.autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.append(product().dtype))
        thread.start()
        thread.join()
    assert seen == [torch.float32]


def test_threads_may_share_a_decorated_function() -> None:
    seen: list[torch.dtype] = []

    @amp.autocast("cpu", torch.float16)
    def run() -> None:
        for _ in range(20):
            seen.append(product().dtype)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [torch.float16] * 60
    assert product().dtype == torch.float32


def test_an_exception_restores_the_state() -> None:
    with pytest.raises(KeyError), amp.autocast("cpu"), amp.autocast("cpu", torch.float16):
        raise KeyError("x")
    assert product().dtype == torch.float32
    assert not is_active()

    @amp.autocast("cpu")
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_decorated_function_runs_inside_each_time(enabled: bool) -> None:
    @amp.autocast("cpu", torch.float16, enabled=enabled)
    def twice(x: Tensor, *, times: int = 1) -> Tensor:
        """Said."""
        return x @ x if times == 1 else twice(x, times=times - 1)

    assert twice.__name__ == "twice"
    assert twice.__doc__ == "Said."
    for times in (1, 3):
        assert twice(torch.ones(2, 2), times=times).dtype == (torch.float16 if enabled else torch.float32)
    assert product().dtype == torch.float32


def test_a_method_can_be_decorated() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        @amp.autocast("cpu", torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)
            return output

    assert Model()(torch.ones(1, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_a_format_that_autocast_would_ignore_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError) as caught:
        amp.autocast("cpu", dtype)
    assert str(dtype) in caught.value.cause
    assert "torch.bfloat16" in caught.value.cause
    assert "enabled=False" in caught.value.remedy


@no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_cuda_without_cuda_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="no CUDA device") as caught:
        amp.autocast(device)
    assert "cpu" in caught.value.remedy
    with amp.autocast(device, enabled=False):
        assert product().dtype == torch.float32


@pytest.mark.parametrize("device", ["mps", "banana"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=device) as caught:
        amp.autocast(device)
    assert "'cuda'" in caught.value.remedy


def test_losses_stay_in_fp32_as_under_torchs_autocast() -> None:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 0])
    for loss in (lambda: F.cross_entropy(inputs, targets), lambda: F.mse_loss(inputs.bfloat16(), inputs)):
        with torch.autocast("cpu"):
            expected = loss()
        with amp.autocast("cpu"):
            got = loss()
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("text", "dtype"), [("fp32", torch.float32), ("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
def test_a_policys_forward_context_is_its_autocast(text: str, dtype: torch.dtype) -> None:
    with amp.forward_context(parse(text), CPU):
        assert product().dtype == dtype
    with amp.backward_context(PRESETS[text], CPU):
        assert product().dtype == torch.float32
    assert product().dtype == torch.float32
