"""Any optimizer on fp32 masters of 16-bit weights: the weights are read as fp32, the optimizer steps, and they are written back."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import policy as policies
from halfstep.errors import CheckpointError, ConfigError, suggest
from halfstep.optim.base import MasteredOptimizer, evaluated, refuse_factor
from halfstep.optim.buckets import Buckets, cost, signature
from halfstep.optim.codec import SCALE, Role
from halfstep.optim.copies import HOOKS, bare_step
from halfstep.optim.foreign import RULES, check_stock, check_stock_state, count_of, counters, groups_of
from halfstep.optim.masters import HALF
from halfstep.optim.trial import Trial, tried
from halfstep.optim.wrappable import STAY, closure_error, needs_closure, refuse
from halfstep.policy import Policy

logger = logging.getLogger("halfstep")
BUCKET_BYTES = 64 * 2**20
PASSING = frozenset(("step", "zero_grad", "_buckets", "halfstep_release", *HOOKS))  # not carried into copies, as torch does not


def wrap(
    optimizer: Optimizer,
    policy: str | Policy | None = None,
    *,
    weights: str | None = None,
    states: str | None = None,
    roles: Mapping[str, Role] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    seed: int = 0,
) -> Wrapped:
    """Let `optimizer`, of any class, train 16-bit weights on their fp32 masters and keep its states in a smaller format.

    weights, states, policy, seed: as in `halfstep.optim.AdamW`. roles: which states of a class that halfstep does not know may be encoded, as
    {"exp_avg": "first", "exp_avg_sq": "second"} (a mean of gradients, a mean of squares); everything else stays fp32, and one log line says what.
    bucket_bytes: the optimizer steps on fp32 copies of some tensors at a time, which take about this many bytes together (64 MiB). Whether that
    gives the bits of a step over all at once is tried here on small tensors; if not, or if it cannot be tried, all are copied at once, and a log
    line says how many bytes that takes.

    The result shares `param_groups`, `state` and `defaults` with `optimizer`, whose own `step` now leads here. With fp32 weights, fp32 states and
    factor 1 a step is the optimizer's own, closure included.
    Raises ConfigError for optimizers that differentiate through their step, step in two phases, or (with 16-bit weights or encoded states)
    evaluate a closure themselves or hold a model or another optimizer; and for one that has masters already.
    """
    refuse(optimizer)
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes={bucket_bytes} holds nothing", f"Leave it out for {BUCKET_BYTES} bytes.")
    wrapped = Wrapped(optimizer)
    wrapped.set_formats(policy, weights, states, seed)
    wrapped.set_up(roles, bucket_bytes)
    return wrapped


def wrap_under(optimizer: Optimizer, policy: Policy) -> Wrapped:
    """`optimizer` wrapped for the weights of a model under `policy`, of which nobody has asked anything: it may follow another one."""
    refuse(optimizer)
    wrapped = Wrapped(optimizer)
    wrapped.set_formats(None, None, None, 0)
    MasteredOptimizer.follow(wrapped, policy)
    wrapped.set_up(None, BUCKET_BYTES)
    return wrapped


class Wrapped(MasteredOptimizer):
    """An optimizer around another one, made by `wrap`. optimizer: the one inside."""

    optimizer: Optimizer
    bucket_bytes: int
    temporary_bytes: int  # fp32 copies of weights, gradients and states that were alive together in the last step

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()
        self.roles = {}
        self.bucket_bytes, self.temporary_bytes = BUCKET_BYTES, 0
        self._buckets: Buckets | None = None
        self._trial: Trial | None = None
        self._whole = self._told = False  # one bucket whatever the trial said; a log line about it is out

    def set_up(self, roles: Mapping[str, Role] | None, bucket_bytes: int) -> None:
        """Find out what can be encoded and whether buckets will do, say so, and lead the inner optimizer's calls here."""
        inner = self.optimizer
        self.bucket_bytes = bucket_bytes
        self._set_roles(roles)
        _widen(inner)
        self._refuse_unmet(roles)
        if self.weights not in (None, "fp32") or self.codec.name != "fp32" or self._narrow():
            self._check_copies()
            if self.codec.name != "fp32":
                self._say_states()
            if self._narrow():
                self._made()
        _lead_here(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The states of the optimizer inside, encoded; a step decodes them."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default settings of the optimizer inside."""
        return self.optimizer.defaults

    @property
    def buckets(self) -> int:
        """Into how many buckets the parameters are laid; 0 while steps are the optimizer's own."""
        return len(self._buckets.buckets) if self._buckets is not None else 0

    def step(self, closure: Callable[[], Any] | None = None, *, factor: float | Tensor = 1.0) -> Any:
        """Step. Gradients are multiplied by `factor` on the way in and stay as they are. Returns the loss of the closure, evaluated once before."""
        inner = self.optimizer
        refuse_factor(factor)
        args: tuple[Any, ...] = (inner,) if closure is None else (inner, closure)
        kwargs: dict[str, Any] = {}
        for before in list(inner._optimizer_step_pre_hooks.values()):
            changed: Any = before(inner, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        loss = self._stepped(args[1] if len(args) > 1 else kwargs.get("closure"), factor)
        for flagged in (inner, self):
            flagged._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        for after in list(inner._optimizer_step_post_hooks.values()):
            after(inner, args, kwargs)
        return loss

    def _stepped(self, closure: Callable[[], Any] | None, factor: float | Tensor) -> Any:
        inner = self.optimizer
        if self._narrow() or self.codec.name != "fp32" or isinstance(factor, Tensor) or factor != 1.0:
            self._check_copies()
            loss = evaluated(closure)
            self.settle_masters()
            self.steps += 1
            self._run(lambda twin: bare_step(twin)(twin), factor)
            return loss
        self.settle_masters()
        self.steps += 1
        return bare_step(inner)(inner) if closure is None else bare_step(inner)(inner, closure)

    def _run(self, call: Callable[[Optimizer], Any], factor: float | Tensor = 1.0, always: bool = False) -> None:
        buckets = self._made()
        at_odds = buckets.step(self.optimizer, call, factor, always)
        self.temporary_bytes = buckets.bytes
        if at_odds:
            self._whole, self._buckets = True, None
            logger.warning(
                "%s set %s otherwise in each bucket of its parameters, which the trial did not show: from now on it steps over all of them at once",
                type(self.optimizer).__name__,
                ", ".join(sorted(set(at_odds))),
            )

    def _made(self) -> Buckets:
        """The buckets for the parameters as they are now."""
        trial = self._check_copies()
        if self._buckets is None or self._buckets.signature != signature(self.optimizer):
            limit = self.bucket_bytes if trial.splits and not self._whole else None
            move_states(self.optimizer)
            encoded = len(self.roles) if self.codec.name != "fp32" else 0
            costs = {id(p): cost(p, encoded) for p in self.everybody()}
            self._buckets = Buckets(self.optimizer, self, costs, limit)
            total = sum(costs.values())
            if limit is None and not self._told and total > self.bucket_bytes:
                self._told = True
                logger.info(
                    "%s steps over all its parameters at once, with %.1f MiB of temporary fp32 copies: %s",
                    type(self.optimizer).__name__,
                    total / 2**20,
                    trial.reason,
                )
        return self._buckets

    def _check_copies(self) -> Trial:
        """The trial, and ConfigError for an optimizer that cannot be stepped through copies of it."""
        name, about = type(self.optimizer).__name__, "16-bit weights, encoded states and factors need copies of an optimizer"
        held = [value for value in vars(self.optimizer).values() if value is not self and isinstance(value, (nn.Module, Optimizer))]
        if held:
            what = type(held[0]).__name__
            raise ConfigError(f"{name} holds a {what}, and {about}", f"Keep weights and states in fp32 with {name}, or use {what} alone.")
        if needs_closure(self.optimizer):
            raise closure_error(name, about)
        if self._trial is None:
            self._trial = tried(self.optimizer)
        if self._trial.closure:
            raise closure_error(name, about)
        if not self._trial.copies:
            raise ConfigError(f"{about}, and on small tensors one of {name} did not do what it does itself: {self._trial.reason}", STAY)
        return self._trial

    def _narrow(self) -> bool:
        return any(p.dtype in HALF for p in self.everybody())

    def _set_roles(self, roles: Mapping[str, Role] | None) -> None:
        if roles is not None and self.codec.name == "fp32":
            raise ConfigError("roles= has no effect with states=fp32: nothing is encoded", "Give states='bf16' or 'int8', or leave roles out.")
        if roles is None:
            known = [policies.roles_of(self.optimizer, group) for group in self.param_groups]
            keys = dict.fromkeys(key for found in known for key in found)
            roles = {}
            for key in keys:
                given = {found[key] for found in known if key in found}
                role = given.pop() if len(given) == 1 else None  # groups at odds: it stays fp32
                if role is not None:
                    roles[key] = role
        wrong = {key: role for key, role in roles.items() if role not in ("first", "second")}
        if wrong:
            raise ConfigError(f"roles={wrong} is not known", "A role is 'first' (a mean of gradients) or 'second' (a mean of their squares).")
        self.roles = dict(roles)

    def _refuse_unmet(self, roles: Mapping[str, Role] | None) -> None:
        """Refuse a role of a state that is not kept."""
        keys = self._check_copies().keys if roles else ()
        if unmet := [key for key in roles or () if keys and key not in keys]:
            raise ConfigError(f"roles= names {unmet[0]!r}, and a {type(self.optimizer).__name__} keeps no such state", suggest(unmet[0], keys))

    def _say_states(self) -> None:
        """One log line: what is encoded and what is not."""
        trial, name = self._check_copies(), type(self.optimizer).__name__
        encoded = [k for k in trial.keys if k in self.roles] if trial.keys else list(self.roles)
        left = [k for k in (*trial.keys, *trial.others) if k not in encoded]
        stay = f"{', '.join(left)} as they are" if left else "no other"
        if encoded:
            logger.info("states of %s: %s in %s, %s", name, ", ".join(encoded), self.codec.name, stay)
        else:
            known = policies.name_of(self.optimizer) is not None
            why = "None of them can be rounded without harm" if known else UNKNOWN
            logger.info("states of %s: none in %s, %s. %s", name, self.codec.name, stay, why)

    def follow(self, policy: Policy) -> None:
        """Take the formats of a policy where none were asked for, and say which states that encodes."""
        before = self.codec
        super().follow(policy)
        if self.codec is not before:
            self._buckets = None
            if self.codec.name != "fp32":
                self._say_states()

    def train(self) -> None:
        """What the optimizer's own `train` does (schedule-free optimizers), on the masters."""
        self._switch("train")

    def eval(self) -> None:
        """What the optimizer's own `eval` does (schedule-free optimizers), on the masters."""
        self._switch("eval")

    def _switch(self, name: str) -> None:
        if not hasattr(self.optimizer, name):
            raise AttributeError(f"{type(self.optimizer).__name__} has no {name}()")
        if self._narrow() or self.codec.name != "fp32":
            self.settle_masters()
            self._run(lambda twin: getattr(twin, name)(), always=True)
        else:
            getattr(self.optimizer, name)()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside."""
        type(self.optimizer).add_param_group(self.optimizer, param_group)

    def groups_to_load(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `MasteredOptimizer`. Raises CheckpointError too for encoded states whose role is not known here.

        Of a class of torch's its states and the ranges of its settings are known; any other one may have states of its own.
        """
        inner, name = self.optimizer, type(self.optimizer).__name__
        if (state_dict.get("format") or {}).get("states", "fp32") != "fp32":
            for state in state_dict["state"].values():
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, Tensor) and key not in self.roles and (key + SCALE in state or value.dtype == torch.bfloat16):
                        raise CheckpointError(
                            f"the saved {key} is encoded, and what it means to a {name} is not known here",
                            "Give wrap() the roles= of the run that saved it.",
                        )
        needed = RULES & self.defaults.keys()
        groups = groups_of(state_dict["param_groups"], self.param_groups, needed, name, functools.partial(check_stock, inner))
        everybody = ((n, group) for group in groups for n in group["params"])
        for number, ((n, group), p) in enumerate(zip(everybody, self.everybody(), strict=True)):
            check_stock_state(inner, group, state_dict["state"].get(n, {}), p, number, self.roles)
        return groups

    def _converted(self, saved: Mapping[str, Any], p: Tensor, number: int) -> dict[str, Any]:
        """See `MasteredOptimizer`. Older optimizers of torch's counted in Python numbers."""
        state = super()._converted(saved, p, number)
        return state | {k: count_of(state[k], number) for k in counters(self.optimizer) if k in state and not isinstance(state[k], Tensor)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the optimizer inside does."""
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("optimizer")
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(inner, name)
        if callable(value):
            raise AttributeError(  # noqa: TRY004  as for any attribute that is not there
                f"{name} of {type(inner).__name__} acts on 16-bit weights and encoded states as they are: if that is meant, .optimizer.{name}"
            )
        return value

    def __repr__(self) -> str:
        return f"Wrapped ({self.optimizer!r}, weights={self.weights or 'as they are'}, states={self.codec.name}, seed={self.seed})"

    def __getstate__(self) -> dict[str, Any]:
        return {"carried": super().__getstate__()["carried"]} | {k: v for k, v in vars(self).items() if k not in PASSING}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizer" not in state:  # the middle of load_state_dict
            self.optimizer.__setstate__(state)
            return
        self.optimizer, self._buckets = state["optimizer"], None
        super().__setstate__(state)
        _lead_here(self)


UNKNOWN = "What they mean is not known here: roles={'NAME': 'first' or 'second'} says it"


def _widen(optimizer: Optimizer) -> None:
    """States that were made in 16 bits, beside weights without masters, go on in fp32."""
    count = 0
    for p, state in optimizer.state.items():
        if not isinstance(p, Tensor) or p.dtype not in HALF:
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF:
                state[key] = value.float()
                count += 1
    if count:
        logger.info("%d states of 16-bit parameters were 16-bit themselves, made without master weights: they go on in fp32", count)


def move_states(optimizer: Optimizer) -> None:
    """States follow parameters that were moved to another device."""
    for p, state in optimizer.state.items():
        if isinstance(p, Tensor):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device != p.device and (value.shape == p.shape or key.endswith(SCALE) or key + SCALE in state):
                    state[key] = value.to(p.device)


def _lead_here(wrapped: Wrapped) -> None:
    """Calls of the inner optimizer lead to the wrapped one: by itself it would step 16-bit weights and encoded states."""
    inner = wrapped.optimizer
    step = _step_under_scheduler if hasattr(inner.step, "_wrapped_by_lr_sched") else _step
    vars(inner)["halfstep_wrapped"] = wrapped
    for hooks in HOOKS[2:]:  # those of states: there is one state
        vars(wrapped)[hooks] = vars(inner)[hooks]
    for name, function in (("step", step), ("state_dict", _state_dict), ("load_state_dict", _load_state_dict)):
        vars(inner)[name] = MethodType(function, inner)


def _step(inner: Any, *args: Any, **kwargs: Any) -> Any:
    return inner.halfstep_wrapped.step(*args, **kwargs)


def _step_under_scheduler(inner: Any, *args: Any, **kwargs: Any) -> Any:
    return inner.halfstep_wrapped.step(*args, **kwargs)


_step_under_scheduler._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # made on the inner optimizer before it was wrapped


def _state_dict(inner: Any) -> Any:
    return inner.halfstep_wrapped.state_dict()


@torch.no_grad()
def _load_state_dict(inner: Any, state_dict: Mapping[str, Any]) -> None:
    inner.halfstep_wrapped.load_state_dict(state_dict)
