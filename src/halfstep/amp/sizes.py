"""Facts about the weights of a model that choices are made by: formats, sizes, which of them could be 16-bit, and the products that they are for."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from halfstep import policy as policies  # what counts bytes is imported when it is first used
from halfstep.amp.discovery import KINDS, owned, tables
from halfstep.amp.lean import layout
from halfstep.hardware import FAMILIES
from halfstep.policy import PRESETS, ModelFacts
from halfstep.policy.policy import Castable

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def model_facts(model: nn.Module) -> ModelFacts:
    """The trainable parameters of `model` with the formats that they were loaded in."""
    loaded = {name: getattr(torch, dtype) for name, dtype in layout(model)["loaded"].items()}  # of a model that was prepared before
    return ModelFacts(tuple((name, FORMATS.get(loaded.get(name, p.dtype), "other")) for name, p in model.named_parameters() if p.requires_grad))


def model_size(model: nn.Module, device: torch.device) -> policies.ModelSize:
    """What is to be known of a model to choose a precision for it: its tensors, the format that it was loaded in, and the products in it."""
    loaded = Counter(form for _, form in model_facts(model).trainable if form in ("bf16", "fp16"))
    form = loaded.most_common(1)[0][0] if loaded else ""
    parameters = [p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)]
    castable = {id(p) for p in owned(model, PRESETS[f"{form or 'bf16'}-lean"], device).values()}
    looked_up = castable & tables(model).keys()
    kinds: list[Castable] = ["table" if id(p) in looked_up else id(p) in castable for p in parameters if p.requires_grad]
    trained = tuple(zip([tuple(p.shape) for p in parameters if p.requires_grad], kinds, strict=True))
    frozen = sum(t.nbytes for t in (*(p for p in parameters if not p.requires_grad), *model.buffers()))
    return policies.ModelSize(trained, frozen, form, families_in(model))


def families_in(model: nn.Module) -> tuple[str, ...]:
    """The families of products in a model, by the kinds of its modules; all of them when no module tells."""
    found = set()
    for part in model.modules():
        name = type(part).__name__
        found |= {"attention"} if "attention" in name.lower() else set()
        if "conv" in name.lower() and any(p is not None and p.dim() > 2 for p in part._parameters.values()):
            found.add("convolution")
        elif isinstance(part, tuple(kind.type for kind in KINDS)) or any(p is not None and p.dim() == 2 for p in part._parameters.values()):
            found.add("matmul")
    return tuple(family for family in FAMILIES if family in found) or FAMILIES
