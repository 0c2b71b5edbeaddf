"""The optimizer that the arguments describe: its class, its settings, and which parameters decay."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.amp import bound_policy
from halfstep.errors import ConfigError, refuse_unknown, suggest
from halfstep.optim import HALF, SGD, AdamW, FusedAdamW, Lion
from halfstep.trainer.arguments import TAKES, TrainingArguments

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)
NORM_CLASS = re.compile(r"norm(\dd)?$")  # LlamaRMSNorm, T5LayerNorm, FrozenBatchNorm2d
NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)")  # in a parameter's name


def make_optimizer(model: nn.Module, args: TrainingArguments) -> Optimizer:
    """The optimizer of `args.optim` over the trainable parameters; weight decay on those that `decays` names.

    Raises ConfigError when the model has no trainable parameter, and when the optimizer does not take what the arguments give it.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        frozen = sum(1 for _ in model.parameters())
        if not frozen:
            raise ConfigError("the model has no parameters, so there is nothing to train", "Register them: nn.Parameter and modules as attributes.")
        raise ConfigError(f"the model has no trainable parameter: all {frozen} are frozen", "Set requires_grad=True on those to train.")
    kind = _class(args, model, list(trainable.values()))
    return _construct(kind, _groups(kind, model, trainable, args), args)


def decays(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay acts on: all but biases and the weights of norms, known by their module's type or their name.

    For the models of transformers these are the ones that its Trainer chooses.
    """
    inside = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, NORMS) or NORM_CLASS.search(type(module).__name__.lower())
        for name, _ in module.named_parameters(recurse=False)
    }
    return [name for name, _ in model.named_parameters() if name not in inside and not NOT_DECAYED.search(name.lower())]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: those that weight decay acts on, and the others with none."""
    decayed, trainable = set(decays(model)), {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = ((weight_decay, [p for n, p in trainable.items() if n in decayed]), (0.0, [p for n, p in trainable.items() if n not in decayed]))
    return [{"params": part, "weight_decay": decay} for decay, part in parts if part]


def _groups(kind: Callable[..., Optimizer], model: nn.Module, trainable: dict[str, nn.Parameter], args: TrainingArguments) -> list[dict[str, Any]]:
    if not _accepts(kind, "weight_decay"):
        if args.weight_decay:
            raise ConfigError(f"weight_decay={args.weight_decay} has no effect with optim={args.optim!r}, which takes none", "Leave it out.")
        return [{"params": list(trainable.values())}]
    return parameter_groups(model, args.weight_decay)


def _class(args: TrainingArguments, model: nn.Module, trainable: list[nn.Parameter]) -> Callable[..., Optimizer]:
    """What makes the optimizer of `args.optim` from groups of parameters."""
    if args.optim not in TAKES:
        return _named(args.optim)
    policy = bound_policy(model) or args.policy  # what "auto" became
    stored = policy.weights != "fp32" or policy.states != "fp32" or any(p.dtype in HALF for p in trainable)
    plain: dict[str, Callable[..., Optimizer]] = {
        "lion": functools.partial(Lion, seed=args.seed),
        "sgd": functools.partial(SGD, seed=args.seed) if stored and not _for_torchs(args) else torch.optim.SGD,
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "adamw_torch": functools.partial(torch.optim.AdamW, fused=False),
    }
    if args.optim in plain:
        return plain[args.optim]
    if args.optim == "adafactor":
        return _adafactor()
    if args.optim == "adamw_halfstep" or (args.optim == "auto" and stored):
        return functools.partial(AdamW, seed=args.seed)
    if all(p.device.type == "cpu" for p in trainable) and not args.optim_args:
        return FusedAdamW
    return functools.partial(torch.optim.AdamW, fused=True)


def _adafactor() -> Callable[..., Optimizer]:
    """The rule that scripts for transformers mean by that name: its own class, whose step is the learning rate. torch's class has another rule."""
    try:
        from transformers.optimization import Adafactor
    except ModuleNotFoundError as error:
        raise ConfigError(
            "optim='adafactor' is the Adafactor of transformers, which is not installed",
            "pip install 'halfstep[hf]'; torch's, a step of which is another, is optim='torch.optim.Adafactor'.",
        ) from error
    return functools.partial(Adafactor, scale_parameter=False, relative_step=False)


def _construct(kind: Callable[..., Optimizer], groups: list[dict[str, Any]], args: TrainingArguments) -> Optimizer:
    settings: dict[str, Any] = {"lr": args.learning_rate}
    taken = TAKES.get(args.optim, ())
    if taken:
        settings["betas"] = (args.adam_beta1, args.adam_beta2)
    if "adam_epsilon" in taken:
        settings["eps"] = args.adam_epsilon
    extra = dict(args.optim_args) if isinstance(args.optim_args, dict) else {}
    if not _accepts(kind, "lr"):
        raise ConfigError(f"optim={args.optim!r} takes no lr, so no schedule could guide it", "Give the Trainer optimizers=(optimizer, scheduler).")
    unknown = [name for name in extra if not _accepts(kind, name)]
    refuse_unknown(f"optim={args.optim!r} (through optim_args)", unknown, _parameters(kind))
    try:
        return kind(groups, **settings, **extra)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"optim={args.optim!r} refuses lr={args.learning_rate} and optim_args={extra}: {error}", "Change optim_args.") from error


def _for_torchs(args: TrainingArguments) -> bool:
    """Whether `optim_args` say how torch's own optimizer is to go about its step, which ours takes and does not follow."""
    return any(name in ("foreach", "fused", "differentiable") for name in args.optim_args or {})


def _parameters(kind: Callable[..., Any]) -> list[str]:
    return [n for n, p in inspect.signature(kind).parameters.items() if n != "params" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _accepts(kind: Callable[..., Any], name: str) -> bool:
    """Whether a constructor takes an argument, by its name or among any others."""
    parameters = inspect.signature(kind).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _named(target: str) -> Callable[..., Optimizer]:
    """The class of optimizers that "package.module.Class" names. Raises ConfigError when there is none."""
    module, found = _module_of(target)
    for part in target[len(module.__name__) + 1 :].split("."):
        if not hasattr(found, part):
            raise ConfigError(f"optim={target!r}: {module.__name__} has no {part!r}", suggest(part, _optimizers_in(module)))
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"optim={target!r} is no class of torch optimizers", "Name a subclass of torch.optim.Optimizer.")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"optim={target!r} evaluates the loss itself, and the Trainer does that",
            "Use halfstep.Accelerator in a loop of your own, or another one.",
        )
    return found


def _module_of(target: str) -> tuple[Any, Any]:
    """The longest part of a dotted name that is a module, twice: to name and to look into."""
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise ConfigError(f"optim={target!r}: {name} needs {error.name}, which is not installed", f"Install {error.name}.") from error
        return module, module
    raise ConfigError(f"optim={target!r}: there is no module {parts[0]!r}", "Install it, or write the name as it is imported.")


def _optimizers_in(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Optimizer)] or ["no optimizer"]
