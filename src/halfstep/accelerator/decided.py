"""What is decided once for a run: its precision when that is left to halfstep, and how products run on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from halfstep import policy as policies  # what counts bytes is imported when it is first used
from halfstep.amp import Products, bound_policy, products_of
from halfstep.amp.sizes import model_size as model_size
from halfstep.checkpoint import Loaded
from halfstep.errors import CheckpointError, ConfigError
from halfstep.hardware import emulated_families, measured_rates, probe
from halfstep.policy import ModelFacts, Policy, Resolution, families_of, resolve

logger = logging.getLogger("halfstep")


def resolved(policy: Policy, device: torch.device, model: ModelFacts | None = None, why: str = "") -> Resolution:
    """`policy` checked against a device and a model, with how its products run there. why: a note, said before the others.

    Asks for what was measured only where it decides something: on a CPU, under a policy with 16-bit products that leaves it open.
    """
    facts = probe(device)
    open_ = facts.kind == "cpu" and policy.autocast != "fp32" and policy.products == "auto"
    found = resolve(policy, facts, model, emulated=emulated_families(policy.autocast) if open_ else None)
    return replace(found, notes=(why, *found.notes)) if why else found


def decide(model: nn.Module, device: torch.device) -> tuple[Policy, str]:
    """The policy for `precision="auto"` and why. A model that is prepared already keeps the one that it has."""
    already = bound_policy(model)
    choice = policies.recommend(probe(device), measured_rates(device), model_size(model, device))
    if already is not None and already != choice.policy:
        return already, "precision auto: the model was prepared under it before"
    return choice.policy, f"precision auto: {choice.reason}"


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

    Nothing is done on a GPU, under a policy without 16-bit products, and for a checkpoint that does not say. One of a `*-true` run that does not name
    its device either was made when such runs knew torch's own kernels only, which then go on. Raises CheckpointError for text that is none.
    """
    saved = loaded.about.get("products", "") or ("native" if policy.whole and "device" not in loaded.about else "")
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
