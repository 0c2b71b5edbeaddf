"""One number at a time, for the compiled loops: fp32 from and to 16 bits, and noise. Twins of `halfstep.numerics.rounding`, `residual` and `noise`.

Rules as in `halfstep.kernels.loops`: 32-bit operations only, each of them named, none fused.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from halfstep.kernels.compile import part
from halfstep.numerics import noise as words
from halfstep.numerics.noise import FIRST, SECOND, STATES

PARTS = (__file__, words.__file__)
i32, u32, f32 = np.int32, np.uint32, np.float32


@part
def bf16_value(h):
    """The fp32 value of the bf16 code `h`."""
    return i32(i32(h) << i32(16)).view(f32)


@part
def fp16_value(h):
    """The fp32 value of the fp16 code `h`."""
    bits = i32(i32(h & i32(0x7FFF)) << i32(13))
    value = i32(bits + i32(0x38000000)).view(f32)  # the exponent's bias goes from 15 to 127
    if bits < i32(0x00800000):  # subnormal: a count of 2^-24
        value = f32(i32(h & i32(0x7FFF))) * f32(5.9604644775390625e-08)
    if bits >= i32(0x0F800000):  # inf or NaN
        value = i32(bits | i32(0x7F800000)).view(f32)
    return i32(f32(value).view(i32) | i32(i32(h & i32(0x8000)) << i32(16))).view(f32)


@part
def bf16_nearest(x):
    """The bf16 code of fp32 `x`, rounded to nearest even."""
    b = f32(x).view(i32)
    h = i32(i32(b + i32(i32(0x7FFF) + i32(i32(b >> i32(16)) & i32(1)))) >> i32(16))
    if i32(b & i32(0x7FFFFFFF)) > i32(0x7F800000):
        h = i32(0x7FC0)
    return h


@part
def fp16_nearest(x):
    """The fp16 code of fp32 `x`, rounded to nearest even."""
    b = f32(x).view(i32)
    a = i32(b & i32(0x7FFFFFFF))
    h = i32(i32(i32(a + i32(0xFFF)) + i32(i32(a >> i32(13)) & i32(1))) - i32(0x38000000)) >> i32(13)
    if a < i32(0x38800000):  # below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        h = i32(f32(a.view(f32) + f32(0.5)).view(i32) - i32(0x3F000000))
    if a >= i32(0x477FF000):  # 65520 and above
        h = i32(0x7C00)
    if a > i32(0x7F800000):
        h = i32(0x7E00)
    return i32(h | i32(i32(b >> i32(16)) & i32(0x8000)))


@part
def bf16_stochastic(x, noise):
    """The bf16 code of fp32 `x`, rounded by 16 bits of noise."""
    b = f32(x).view(i32)
    a = i32(b & i32(0x7FFFFFFF))
    h = min(i32(i32(a + noise) >> i32(16)), i32(0x7F7F))  # a finite number stays finite
    if a >= i32(0x7F800000):
        h = i32(a >> i32(16))
    if a > i32(0x7F800000):
        h = i32(0x7FC0)
    return i32(h | i32(i32(b >> i32(16)) & i32(0x8000)))


@part
def fp16_stochastic(x, noise):
    """The fp16 code of fp32 `x`, rounded by 16 bits of noise."""
    b = f32(x).view(i32)
    a = i32(b & i32(0x7FFFFFFF))
    h = i32(i32(i32(a + i32(noise >> i32(3))) - i32(0x38000000)) >> i32(13))  # 13 bits are dropped
    if a < i32(0x38800000):  # below 2^-14: parts of 2^-16 of a subnormal's distance
        h = i32(i32(i32(min(f32(a.view(f32) * f32(1099511627776.0)), f32(134217728.0))) + noise) >> i32(16))
    h = min(h, i32(0x7BFF))
    if a == i32(0x7F800000):
        h = i32(0x7C00)
    if a > i32(0x7F800000):
        h = i32(0x7E00)
    return i32(h | i32(i32(b >> i32(16)) & i32(0x8000)))


@part
def bf16_rest(x, h):
    """What the code `h` misses of `x`, as a difference of bits."""
    return min(max(i32(f32(x).view(i32) - i32(h << i32(16))), i32(-0x8000)), i32(0x8000))


@part
def fp16_ulp_exponent(h):
    """Exponent field (of fp32) of the distance of fp16 numbers at the code `h`."""
    return i32(max(i32(i32(h >> i32(10)) & i32(31)), i32(1)) + i32(102))


@part
def fp16_saturated(x):
    """Rounded to nearest even, stopping at 65504."""
    h = fp16_nearest(x)
    if i32(h & i32(0x7FFF)) == i32(0x7C00) and f32(abs(x)) < f32(np.inf):
        h = i32(h - i32(1))
    return h


@part
def random_word(key1, key2, place):
    """The 32 random bits of the element at `place`."""
    x = u32(place ^ key1)
    x = u32(x ^ u32(x >> u32(16)))
    x = u32(u32(x * u32(FIRST)) ^ key2)
    x = u32(x ^ u32(x >> u32(15)))
    x = u32(x * u32(SECOND))
    return u32(x ^ u32(x >> u32(16)))


@part
def state_noise(bits):
    """Other bits of the same element: the lower 16 for its first moment, the upper 16 for the second."""
    y = u32(bits * u32(STATES))
    return u32(y ^ u32(y >> u32(15)))


@part
def fp16_rest(x, h):
    """What the code `h` misses of `x`, in 2^-16 of the distance of fp16 numbers there."""
    count = i32(i32(i32(270) - fp16_ulp_exponent(h)) << i32(23)).view(f32)  # 2^16 over that distance
    rest = f32(np.floor(f32(f32(x - fp16_value(h)) * count)))
    rest = min(max(rest, f32(-32768)), f32(32768)) if rest == rest else f32(0)
    return i32(rest)
