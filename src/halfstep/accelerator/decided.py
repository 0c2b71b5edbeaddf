"""What is decided once for a run: its precision when that is left to halfstep, and how products run on a CPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from halfstep import policy as policies  # what counts bytes is imported when it is first used
from halfstep.accelerator.facts import model_facts
from halfstep.amp import Products, bound_policy, products_of
from halfstep.amp.discovery import KINDS, owned, tables
from halfstep.checkpoint import Loaded
from halfstep.errors import CheckpointError, ConfigError
from halfstep.hardware import FAMILIES, emulated_families, measured_rates, probe
from halfstep.policy import PRESETS, ModelFacts, Policy, Resolution, families_of, resolve
from halfstep.policy.policy import Castable

logger = logging.getLogger("halfstep")


def resolved(policy: Policy, device: torch.device, model: ModelFacts | None = None, why: str = "") -> Resolution:
    """`policy` checked against a device and a model, with how its products run there. why: a note, said before the others.

    Asks for what was measured only where it decides something: on a CPU, under a policy with autocast that leaves it open.
    """
    facts = probe(device)
    open_ = facts.kind == "cpu" and policy.is_mixed and policy.products == "auto"
    found = resolve(policy, facts, model, emulated=emulated_families(policy.autocast) if open_ else None)
    return replace(found, notes=(why, *found.notes)) if why else found


def decide(model: nn.Module, device: torch.device) -> tuple[Policy, str]:
    """The policy for `precision="auto"` and why. A model that is prepared already keeps the one that it has."""
    already = bound_policy(model)
    choice = policies.recommend(probe(device), measured_rates(device), model_size(model, device))
    if already is not None and already != choice.policy:
        return already, "precision auto: the model was prepared under it before"
    return choice.policy, f"precision auto: {choice.reason}"


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
    return policies.ModelSize(trained, frozen, form, _families(model))


def _families(model: nn.Module) -> tuple[str, ...]:
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


def refuse_other_policy(already: Policy | None, policy: Policy) -> None:
    """Raise ConfigError for a model that is prepared under another policy than the accelerator's."""
    if already is not None and already != policy:
        raise ConfigError(
            f"this model is already prepared under {already}, and the accelerator has {policy}",
            "Call unwrap_model(model, keep_fp32_wrapper=False) on the accelerator that prepared it, or load the model anew.",
        )


class _Undecided:
    """In the place of a scaler while nobody knows which precision it would serve: what was told to it would be lost."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            "precision='auto' is decided when the first model is prepared, and none was",
            "Call prepare(model, optimizer) first.",
        )


UNDECIDED = _Undecided()


def products_for(policy: Policy) -> Products:
    """How the products of a new run under `policy` are run."""
    return Products(policy.products)


def adopt_products(products: Products, model: nn.Module) -> None:
    """Let the products of a run be run as those of a model that an earlier run has prepared."""
    theirs = products_of(model)
    products.text = theirs.text if theirs is not None else products.text


def go_on_with(loaded: Loaded, policy: Policy, device: torch.device, products: Products, models: Sequence[nn.Module]) -> None:
    """Let products run as in the run that saved the checkpoint, which is then gone on with to the bit. One line says so where it makes a difference.

    Nothing is done on a GPU, under a policy without autocast, and for a checkpoint that does not say. Raises CheckpointError for text that is none.
    """
    saved = loaded.about.get("products", "")
    mine = Products(policy.products).settled(policy, device)
    if not saved or not mine:
        return
    try:
        families_of(saved)
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {loaded.folder} says products={saved!r}, which is not known", "Use the halfstep that wrote it.") from error
    products.text = saved
    for bound in filter(None, map(products_of, models)):
        bound.text = saved
    if saved != mine:
        logger.warning("products run %s as in the run of checkpoint %s; measured to be faster on this machine is: %s", saved, loaded.folder, mine)
