"""Formats by name, and rounding into any of them: every number of a format, every midpoint and what stands beside it."""

import itertools
from fractions import Fraction

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.numerics import FORMATS, Format, format_named, nearest


@pytest.mark.parametrize(
    ("text", "bits", "largest", "infinite"),
    [
        ("fp16", (5, 10), 65504.0, True),
        ("E5M10", (5, 10), 65504.0, True),
        (" bf16 ", (8, 7), 3.3895313892515355e38, True),
        ("e8m7", (8, 7), 3.3895313892515355e38, True),
        ("e4m3", (4, 3), 448.0, False),
        ("E4M3FN", (4, 3), 448.0, False),
        ("e5m2", (5, 2), 57344.0, True),
        ("e5m2fn", (5, 2), 98304.0, False),
        ("tf32", (8, 10), 3.4011621342146535e38, True),
        ("e6m9", (6, 9), 4290772992.0, True),
        ("e8m23", (8, 23), torch.finfo(torch.float32).max, True),
    ],
)
def test_a_text_names_a_format(text, bits, largest, infinite):
    fmt = format_named(text)
    assert ((fmt.exponent_bits, fmt.mantissa_bits), fmt.largest, fmt.infinite) == (bits, largest, infinite)


@pytest.mark.parametrize("text", ["", "int8", "e5", "m10", "e9m3", "e1m3", "e4m0", "e5m24", "e8m7fn", "e-5m10", "fp16x"])
def test_a_text_that_names_none_is_refused(text):
    with pytest.raises(ConfigError):
        format_named(text)


def numbers(fmt: Format) -> list[Fraction]:
    """All of a format from 0 to its largest, by its bits."""
    least = 2 - 2 ** (fmt.exponent_bits - 1)
    count = 2**fmt.mantissa_bits
    found = [Fraction(m) * Fraction(2) ** (least - fmt.mantissa_bits) for m in range(count)]
    for exponent in range(least, 2 ** (fmt.exponent_bits - 1) + 1):
        found += [Fraction(count + m) * Fraction(2) ** (exponent - fmt.mantissa_bits) for m in range(count)]
    return [x for x in found if x <= Fraction(fmt.largest)]


@pytest.mark.parametrize("text", ["e4m3", "e5m2", "e2m1", "e3m2", "e3m4", "e4m3fn", "e5m2fn", "e6m5", "e2m8"])
def test_every_number_and_every_midpoint_of_a_small_format(text):
    fmt = format_named(text)
    known = numbers(fmt)
    exact = torch.tensor([float(x) for x in known])
    assert torch.equal(nearest(exact, fmt), exact)
    assert torch.equal(nearest(-exact, fmt), -exact)
    middle = torch.tensor([float((a + b) / 2) for a, b in itertools.pairwise(known)])
    even = torch.where(torch.arange(len(middle)) % 2 == 0, exact[:-1], exact[1:])  # numbers of even last bit stand at even places
    assert torch.equal(nearest(middle, fmt), even)
    assert torch.equal(nearest(torch.nextafter(middle, torch.tensor(torch.inf)), fmt), exact[1:])
    assert torch.equal(nearest(torch.nextafter(middle, torch.tensor(0.0)), fmt), exact[:-1])
    beyond = torch.tensor([fmt.largest * 1.5, 3e38])
    assert torch.equal(nearest(beyond, fmt), torch.full((2,), torch.inf if fmt.infinite else fmt.largest))


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.dtype not in (None, torch.float32)], ids=lambda f: f.name)
def test_every_code_of_torchs_formats_and_every_midpoint_rounds_as_torch_casts(fmt):
    kind = torch.uint8 if fmt.dtype.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * fmt.dtype.itemsize)).to(kind).view(fmt.dtype).float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:].double() + finite[:-1].double()).div(2).float()
    beside = [torch.nextafter(middle, torch.full_like(middle, way)) for way in (torch.inf, -torch.inf)]
    for x in (finite, middle, *beside):
        assert torch.equal(nearest(x, fmt), x.to(fmt.dtype).float())


def test_a_format_of_all_bits_changes_none():
    x = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32).view(torch.float32)
    assert torch.equal(nearest(x, format_named("e8m23")).view(torch.int32)[~x.isnan()], x.view(torch.int32)[~x.isnan()])
