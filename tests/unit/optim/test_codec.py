"""Formats of optimizer states: what each keeps, and how it lies in an optimizer's state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.numerics import BLOCK, Noise
from halfstep.optim import CODECS, AdamW
from halfstep.optim.codec import SCALE, Role, codec_of, noise_of, parts_of, put

ROLES: tuple[Role, ...] = ("first", "second")


def moments(role: Role, shape: tuple[int, ...] = (7, 100)) -> Tensor:
    """Numbers over six decades within each block, of either sign or none negative."""
    values = torch.randn(shape) * torch.logspace(0, -6, shape[-1])
    return values if role == "first" else values.square()


def noise(values: Tensor, role: Role, step: int = 1) -> Tensor:
    return noise_of(Noise(0, 0, step).bits(values.numel()).view(values.shape), role)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CODECS)
def test_states_come_back_in_their_shape_from_what_was_put_into_a_state(name: str, role: Role) -> None:
    codec, values = CODECS[name], moments(role)
    state: dict[str, Any] = {"step": torch.ones(())}
    put(state, "moment", codec.encode(values, role, noise(values, role)))
    found = codec_of(state, "moment")
    assert found is codec
    decoded = codec.decode(parts_of(state, "moment"), role, values.shape)
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    largest = values.abs().amax()
    # one bf16 ulp of each; int8: two levels of the block's root or fourth root lie at most 2/127 and 4/255 of the largest apart
    bound = {"fp32": torch.zeros(()), "bf16": values.abs() * 2.0**-7, "int8": largest * (2 / 127)}[name]
    assert bool(((decoded - values).abs() <= bound).all())
    decoded.zero_()
    assert bool(codec.decode(parts_of(state, "moment"), role, values.shape).any())  # it was a copy


@pytest.mark.parametrize("role", ROLES)
def test_other_formats_leave_nothing_of_the_last_one_behind(role: Role) -> None:
    values, state = moments(role), dict[str, Any]()
    for name in ("int8", "bf16", "int8", "fp32", "int8"):
        put(state, "moment", CODECS[name].encode(values, role, None))
        assert (("moment" + SCALE) in state) == (name == "int8")
        assert codec_of(state, "moment") is CODECS[name]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (BLOCK,), (BLOCK + 1,), (3, 5, 2)])
@pytest.mark.parametrize("role", ROLES)
def test_bytes_are_one_per_value_and_four_per_block(role: Role, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).abs()
    parts = CODECS["int8"].encode(values, role, None)
    assert parts[""].nbytes == values.numel()
    assert parts[SCALE].nbytes == 4 * -(-values.numel() // BLOCK)
    assert CODECS["int8"].decode(parts, role, values.shape).shape == values.shape
    assert CODECS["bf16"].encode(values, role, None)[""].nbytes == 2 * values.numel()


@pytest.mark.parametrize("role", ROLES)
def test_bf16_states_have_the_right_mean_over_all_noise(role: Role) -> None:
    for value in (1e-3, 0.777, 3e-12):
        values = torch.full((2**16,), value)
        decoded = CODECS["bf16"].decode(CODECS["bf16"].encode(values, role, torch.arange(2**16, dtype=torch.int32)), role, values.shape)
        assert float(decoded.double().mean()) == pytest.approx(float(values[0]), rel=1e-12)
        assert len(decoded.unique()) == 2


@pytest.mark.parametrize("role", ROLES)
def test_int8_states_have_the_right_mean_over_all_noise(role: Role) -> None:
    for value in (1e-3, 0.777, 0.2):
        values = torch.full((2**16, BLOCK), value)[:, :2].contiguous()
        values = torch.nn.functional.pad(values, (0, BLOCK - 2))
        values[:, 1] = 1.0  # the scale of each block
        bits = torch.arange(2**16, dtype=torch.int32)[:, None].expand(-1, BLOCK).contiguous()
        decoded = CODECS["int8"].decode(CODECS["int8"].encode(values, role, bits), role, values.shape)
        assert float(decoded[:, 0].double().mean()) == pytest.approx(value, rel=1e-4)
        assert bool((decoded[:, 1] == 1.0).all())


def test_a_second_moment_never_decodes_to_zero_unless_it_is() -> None:
    values = torch.logspace(-30, 0, BLOCK)
    values[5] = 0.0
    for bits in (None, torch.zeros(BLOCK, dtype=torch.int32), torch.full((BLOCK,), 0xFFFF, dtype=torch.int32)):
        decoded = CODECS["int8"].decode(CODECS["int8"].encode(values, "second", bits), "second", values.shape)
        assert bool((decoded > 0).sum() == BLOCK - 1)
        assert decoded[5] == 0


def test_each_role_has_noise_of_its_own_of_16_bits() -> None:
    bits = Noise(5, 6, 7).bits(50_000)
    first, second = noise_of(bits, "first"), noise_of(bits, "second")
    low = bits & 0xFFFF  # what the weight takes
    for drawn in (first, second):
        assert int(drawn.min()) >= 0
        assert int(drawn.max()) <= 0xFFFF
        assert abs(float(drawn.double().mean()) / 0x7FFF - 1) < 0.02
    for a, b in ((first, second), (first, low), (second, low)):
        assert abs(float(torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1])) < 0.02


@pytest.mark.parametrize("name", CODECS)
def test_an_optimizer_holds_states_under_torchs_names(name: str) -> None:
    p = nn.Parameter(torch.randn(3, 50))
    optimizer = AdamW([p], states=name)
    p.grad = torch.randn_like(p)
    optimizer.step()
    state = optimizer.state[p]
    expected = {"step", "exp_avg", "exp_avg_sq"} | ({"exp_avg_scale", "exp_avg_sq_scale"} if name == "int8" else set())
    assert set(state) == expected
    kinds = {"fp32": (torch.float32,) * 2, "bf16": (torch.bfloat16,) * 2, "int8": (torch.int8, torch.uint8)}[name]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == kinds
    sign = torch.sign(p.grad).reshape(-1)
    assert bool((torch.sign(state["exp_avg"].float()).reshape(-1) * sign >= 0).all())
