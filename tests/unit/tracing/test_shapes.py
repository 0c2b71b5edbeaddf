"""Layers whose sizes miss the fast path."""

from __future__ import annotations

import torch
from torch import nn

from halfstep.amp import bind
from halfstep.policy import parse
from halfstep.tracing import Finding, Observation
from halfstep.tracing.shapes import Shapes


def found(model: nn.Module, sixteen: bool = True) -> list[Finding]:
    detector = Shapes(sixteen)
    with Observation(model, [detector]):
        pass
    return detector.findings()


def test_odd_sizes_are_named_with_what_to_pad_to() -> None:
    model = nn.Sequential(nn.Linear(96, 100), nn.Linear(100, 64), nn.Linear(64, 64))
    first, second = found(model)
    assert (first.fault, first.place.module, first.place.kind) == ("shape", "0", "Linear")
    assert "out_features 100 is no multiple of 8" in first.what
    assert "Pad to 104" in first.remedy
    assert (second.place.module, "in_features 100" in second.what) == ("1", True)
    assert found(nn.Sequential(nn.Linear(96, 104), nn.Linear(104, 64))) == []


def test_a_vocabulary_is_padded_to_64() -> None:
    (finding,) = found(nn.Linear(8, 5003, bias=False))
    assert "out_features 5003" in finding.what
    assert "Pad to 5056 (a multiple of 64)" in finding.remedy


def test_layers_of_one_size_are_one_finding_and_a_tied_one_is_counted_once() -> None:
    (finding,) = found(nn.Sequential(*(nn.Linear(100, 100) for _ in range(3))))
    assert "(and in 2 other layers of this size)" in finding.what
    head, table = nn.Linear(64, 101, bias=False), nn.Embedding(101, 64)
    head.weight = table.weight
    (tied,) = found(nn.ModuleDict({"table": table, "head": head}))
    assert tied.place.module == "head"


def test_convolutions_and_what_is_too_small_or_has_no_choice() -> None:
    assert len(found(nn.Conv2d(30, 64, 3))) == 1
    assert found(nn.Conv2d(3, 64, 7)) == []  # images have three channels
    assert found(nn.Conv2d(100, 100, 9, groups=100)) == []
    assert found(nn.Linear(64, 10)) == []
    assert found(nn.Embedding(5001, 100)) == []
    assert found(nn.LazyLinear(100)) == []


def test_where_nothing_is_16_bit_nothing_is_said() -> None:
    model = nn.Linear(100, 100)
    detector = Shapes()
    with Observation(model, [detector]):
        model(torch.ones(2, 100))
    assert detector.findings() == []
    bind(model, parse("bf16-mixed"), torch.device("cpu"))
    detector = Shapes()
    with Observation(model, [detector]):
        model(torch.ones(2, 100))
    assert len(detector.findings()) == 1
    assert len(found(nn.Linear(100, 100).half(), sixteen=False)) == 1
