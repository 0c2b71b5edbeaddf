"""What optimizers with masters share: who has one, what is refused, and a state that resumes bit for bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError, suggest
from halfstep.hardware import give_back_unused_memory
from halfstep.kernels import weight_kernels
from halfstep.numerics import Noise
from halfstep.numerics.noise import GOLDEN, WORD, mix
from halfstep.optim.codec import CODECS, SCALE, Codec, Role, codec_of, noise_of, parts_of, put
from halfstep.optim.foreign import refuse_incomplete, refuse_other_sizes
from halfstep.optim.hooked import AFTER, BEFORE, loaded, to_load, without_hooks
from halfstep.optim.loading import adopt, check_master, converted, saved_master, widened
from halfstep.optim.masters import HALF, Master, attach, dtype_name, master_of, refuse_large, storage_named
from halfstep.optim.quiet import QuickToClear
from halfstep.optim.rule import as_number, out_of_range
from halfstep.policy import Policy, parse

logger = logging.getLogger("halfstep")


OWN = ("weights", "codec", "seed", "steps", "asked", "named", "_pending", "_taken", "_compiled")  # what a copy has too
LARGE = 1 << 24  # parameters from which on it is worth some milliseconds


class MasteredOptimizer(QuickToClear):
    """An optimizer that updates fp32 masters of 16-bit weights and keeps its states in one format.

    A 16-bit weight that has no master gets one before the first step. States under a codec are encoded in place: `state[p]["exp_avg"]` then
    holds the codes, `state[p]["exp_avg_scale"]` their scales.
    """

    knows_masters = True  # and its gradients are measured by the kernels of their device
    takes_factor = True  # step(factor=) multiplies gradients on the way in, so that unscaling and clipping cost no pass of their own

    weights: str | None  # storage asked for; None: that of masters there are, else split
    codec: Codec
    asked: tuple[str | None, str | None]  # weights and states as they were asked for, by name or by a policy
    named: str | None = None  # weights as they were asked for by name, which must have an effect: a policy is for all weights of a model
    seed: int  # of the noise
    draws_apart = True  # from other optimizers of the run
    _tidy = False  # the memory that the first step has left was given back
    steps: int  # taken so far: part of the noise
    roles: Mapping[str, Role]  # which states may be encoded
    needed: tuple[str, ...] = ()  # states that each parameter has, or none of them
    first_number = 0  # of its first parameter; a twin that steps one parameter of another optimizer has that one's (optim/single.py)

    def set_formats(self, policy: str | Policy | None, weights: str | None, states: str | None, seed: int) -> None:
        """Take over what was asked for. Raises ConfigError for names that are not known, or that contradict the policy."""
        self.named = weights
        if policy is not None:
            known = parse(policy)
            for name, given, theirs in (("weights", weights, known.weights), ("states", states, known.states)):
                if given is not None and given != theirs:
                    raise ConfigError(f"{name}={given} and a policy with {name}={theirs} were both given", "Leave one of them out.")
            weights, states = known.weights if known.weights != "fp32" else None, known.states
        self.asked = (weights, states)
        states = states or "fp32"
        if states not in CODECS:
            raise ConfigError(f"states={states!r} is not known", suggest(str(states), CODECS))
        if weights is not None:
            storage_named(weights)
        if not hasattr(seed, "__index__"):
            raise ConfigError(f"seed={seed!r} is not a whole number", "Use seed=0, or another one for other noise.")
        self.weights, self.codec, self.seed, self.steps = weights, CODECS[states], int(seed), 0
        self._pending: dict[int, Mapping[str, Any]] = {}  # masters of a loaded state, by number of their parameter, until the next step
        self._taken: set[int] = set()  # those of them that were found to belong to the weights at hand

    def follow(self, policy: Policy) -> None:
        """Take the formats of a policy where none were asked for. Raises ConfigError where others were."""
        wanted = (policy.weights if policy.weights != "fp32" else None, policy.states)
        for name, asked, theirs in zip(("weights", "states"), self.asked, wanted, strict=True):
            if asked is not None and theirs is not None and asked != theirs:
                raise ConfigError(
                    f"this {type(self).__name__} was made with {name}={asked}, and the precision {policy} has {name}={theirs}",
                    "Leave one of them out.",
                )
        self.weights = self.weights if self.asked[0] is not None else wanted[0]
        if self.asked[1] is None and self.codec.name != policy.states:
            if self.steps:
                raise ConfigError(
                    f"this {type(self).__name__} has states in {self.codec.name} already, and the precision {policy} has states={policy.states}",
                    "Prepare the optimizer before its first step.",
                )
            self.codec = CODECS[policy.states]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. After the first step of a large model the memory goes back to the system that making masters and states has left unused."""
        super().zero_grad(set_to_none)
        if self.steps and not self._tidy:
            self._tidy = True
            if sum(p.numel() for p in self.everybody()) >= LARGE:
                give_back_unused_memory()

    def everybody(self) -> list[Tensor]:
        """All parameters in order. The place of one is its number."""
        return [p for group in self.param_groups for p in group["params"]]

    def noise(self, number: int) -> Noise:
        """The noise of this step for a parameter."""
        return Noise(self.seed, number, self.steps)

    def draw_apart(self, others: Iterable[MasteredOptimizer]) -> None:
        """Take another seed, derived from this one, if one of `others` has it: parameters of the same number would round by the same chances.

        A step engine asks it of each optimizer that it meets, with those that it met before. One that has taken steps, in the run that it goes on
        from too, stays as it is. The seed is part of the saved state.
        """
        taken = {other.seed & WORD for other in others if other is not self}
        while self.draws_apart and not self.steps and self.seed & WORD in taken:
            self.seed = mix(self.seed ^ GOLDEN)

    def settle_masters(self, ahead: bool = False) -> None:
        """Before a step: every 16-bit weight with a gradient has a master, that of a loaded state where there is one.

        ahead: those that may get a gradient too; those of a loaded state are left to `settle_one`.
        """
        held = self.everybody()
        if not ahead:
            self._take_pending(held)
        fresh, narrow, storage = list[Tensor](), 0, self.weights or "split"
        for p in held:  # nothing is changed before all of them have been looked at
            if p.dtype not in HALF:
                continue
            narrow += 1
            if p.grad is None and not (ahead and p.requires_grad):
                continue
            master = master_of(p)
            if master is None:
                if self.weights == "fp32":
                    raise ConfigError(
                        f"weights=fp32 was asked for, and a parameter of shape {tuple(p.shape)} is {dtype_name(p.dtype)}",
                        "Use weights=split, or model.float().",
                    )
                refuse_large(p, p.dtype)
                fresh.append(p)
            elif self.weights is not None and master.storage.name != self.weights:
                raise ConfigError(
                    f"weights={self.weights} was asked for, and a parameter of shape {tuple(p.shape)} has a {master.storage.name} master already",
                    f"Use weights={master.storage.name}, as the policy of its model says.",
                )
        if self.named not in (None, "fp32") and not narrow:
            raise ConfigError(
                f"weights={self.weights} has no effect: all {len(held)} parameters of this {type(self).__name__} are fp32",
                "Leave it out, or bind the model to a *-lean or *-true policy (halfstep.amp.bind).",
            )
        for p in fresh:
            attach(p, storage)
        if fresh:
            logger.info("%d 16-bit parameters had no master weights and get %s", len(fresh), _described(storage))

    def settle_one(self, number: int, p: Tensor) -> None:
        """Before a parameter is stepped by itself: its master of a loaded state. Not earlier, since a backward pass may have uses of it before it."""
        saved = self._pending.pop(number, None)
        if saved is not None and not adopt(p, saved, self.weights) and number not in self._taken:
            self._say_strangers([number])

    def _take_pending(self, held: list[Tensor]) -> None:
        pending, self._pending = self._pending, {}
        strangers = [n for n, saved in pending.items() if not adopt(held[n], saved, self.weights) and n not in self._taken]
        self._taken = set()
        if strangers:
            self._say_strangers(strangers)

    def _say_strangers(self, numbers: list[int]) -> None:
        logger.warning(
            "the optimizer state holds masters of %d parameters (the first is number %d) whose weights are others now: their masters begin "
            "at the weights as they are. Load the model's and the optimizer's state of the same step",
            len(numbers),
            numbers[0],
        )

    def decoded(self, state: Mapping[str, Any], key: str, p: Tensor) -> Tensor:
        """A state in fp32, new unless it is kept in fp32 already."""
        if state[key].dtype == torch.float32 and key + SCALE not in state:
            return state[key]  # type: ignore[no-any-return]
        known, kernels = codec_of(state, key), weight_kernels(p)
        assert known is not None
        scales = state.get(key + SCALE)
        if kernels is not None and known.name != "fp32" and kernels.takes(state[key], scales):
            return kernels.decode_state(state[key], scales, self.roles[key], p.shape)  # type: ignore[no-any-return]
        return known.decode(parts_of(state, key), self.roles[key], p.shape)

    def encode(self, state: dict[str, Any], key: str, values: Tensor, number: int) -> None:
        """Put fp32 `values` back as the state `key` of parameter `number`."""
        if self.codec.name == "fp32":
            return None if state[key] is values else put(state, key, {"": values})
        role, kernels = self.roles[key], weight_kernels(values)
        if kernels is not None and kernels.takes(values):
            codes, scales = kernels.encode_state(values, role, self.codec.name, self.noise(number).keys)
            return put(state, key, {"": codes} if scales is None else {"": codes, SCALE: scales})
        bits = noise_of(self.noise(number).bits(values.numel(), values.device).view(values.shape), role)
        return put(state, key, self.codec.encode(values, role, bits))

    def state_dict(self) -> dict[str, Any]:
        """torch's form, with `masters` (storage, residual and a digest of the weight each belongs to, by number) and `format` beside it."""
        held = self.everybody()
        self._take_pending(held)
        masters = {number: saved for number, p in enumerate(held) if (saved := saved_master(p)) is not None}
        about = {"weights": self.weights, "states": self.codec.name, "seed": self.seed, "steps": self.steps}
        with without_hooks(self, "_optimizer_state_dict_post_hooks"):
            state = super().state_dict() | {"masters": masters, "format": about}
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state from `state_dict()`, or from the stock optimizer of the same name. Nothing is changed when it does not fit.

        States in another format, and masters in another storage, are converted where that is exact. Masters whose weights are loaded later are kept
        until then. Raises CheckpointError for another number of parameters, other shapes, and a conversion that would round.
        """
        state_dict = to_load(self, state_dict)
        held = self.everybody()
        refuse_other_sizes(state_dict, self.param_groups)
        saved_groups = self.groups_to_load(state_dict)
        order = [n for group in saved_groups for n in group["params"]]
        place = {n: i for i, n in enumerate(order)}
        kept = {place[n]: s for n, s in state_dict["state"].items() if n in place}
        if "format" not in state_dict:
            kept = {n: widened(s, held[n]) for n, s in kept.items()}
        states = {n: self._converted(s, held[n], n) for n, s in kept.items()}
        masters = {int(n): m for n, m in (state_dict.get("masters") or {}).items()}
        for n, entry in masters.items():
            check_master(n, held[n] if n < len(held) else None, entry, self.weights)
        with without_hooks(self, BEFORE, AFTER):
            super().load_state_dict({"state": {}, "param_groups": saved_groups})
        for number, values in states.items():
            self.state[held[number]] = values
        about = state_dict.get("format") or {}
        self.seed, self.steps = int(about.get("seed", self.seed)), int(about.get("steps", self.steps))
        self._pending = masters
        self._taken = {n for n, saved in masters.items() if adopt(held[n], saved, self.weights)}  # others wait for their weights
        loaded(self)

    def groups_to_load(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The groups of a saved state, as they are to be loaded. Raises CheckpointError for states and settings of another optimizer."""
        return list(state_dict["param_groups"])

    def _converted(self, saved: Mapping[str, Any], p: Tensor, number: int) -> dict[str, Any]:
        """The saved state of one parameter, as it is to be kept. Nothing is changed yet."""
        refuse_incomplete(saved, self.needed, number)
        return converted(saved, p, number, self.roles, self.codec)

    def __getstate__(self) -> dict[str, Any]:
        masters = [(number, m) for number, p in enumerate(self.everybody()) if (m := master_of(p)) is not None]
        own = {k: self.__dict__[k] for k in OWN if k in self.__dict__}
        return super().__getstate__() | own | {"carried": masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        masters: Iterable[tuple[int, Master]] = state.pop("carried", ())
        super().__setstate__(state)
        held = self.everybody()
        for number, master in masters:
            p = held[number]
            if master_of(p) is None and p.dtype in HALF:
                master.bind(p)
                p.halfstep_master = master  # type: ignore[attr-defined]


def refuse_factor(factor: float | Tensor) -> None:
    """Raise ConfigError for a factor that would make every weight NaN. A tensor is taken as it is: to look at it would wait for its device."""
    if not isinstance(factor, Tensor) and not math.isfinite(as_number(factor)):
        raise out_of_range("factor", factor, "Gradients are multiplied by a finite number. Leave such a step out.")


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, evaluated with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _described(storage: str) -> str:
    notes = {"plain": "none: updates below half an ulp round away", "stochastic": "stochastic rounding (nothing beside them)"}
    return notes.get(storage, f"{storage} ones")
