"""Copies of an optimizer that work on stand-ins of its parameters, with the hyper-parameters of the original.

An optimizer is copied without its states and hooks, and with a stand-in wherever it refers to a parameter. Numbers and tensors in its groups, and
plain attributes of its own, are handed to the copies before a step and taken back after it when a copy changed them: a scheduler acts on the
original and every copy sees it; a counter that the optimizer keeps in its group goes on in the original.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.optim import quiet

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
OWN = frozenset(
    ("state", "param_groups", "step", "zero_grad", "state_dict", "load_state_dict", "halfstep_wrapped", "halfstep_release", *HOOKS)
)  # a copy has its own, or none
MEMBERS = ("params", "param_names")
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, deque)
HOOKED = Optimizer.profile_hook_step(lambda: None).__code__


def bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The step function of the optimizer's class, without torch's hooks around it and without what a scheduler put on the instance."""
    step: Any = type(optimizer).step
    while getattr(step, "__code__", None) in (HOOKED, quiet.HOOKED):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def copied(optimizer: Optimizer, stand_ins: Mapping[int, Tensor], chosen: Collection[int], isolated: bool = False) -> Optimizer:
    """A copy without states and hooks that holds those parameters whose id is `chosen`; groups that then are empty are left out.

    stand_ins: what takes the place of each parameter, by its id, wherever the optimizer refers to one. Modules and other optimizers that it
    refers to are shared, and so are random generators unless `isolated`.
    """
    memo: dict[int, Any] = dict(stand_ins)
    twin: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for value in vars(optimizer).values():
        if isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state() if isolated else value
        elif isinstance(value, (nn.Module, Optimizer)):
            memo[id(value)] = value
    own = {name: _rekeyed(copy.deepcopy(value, memo), stand_ins) for name, value in vars(optimizer).items() if name not in OWN}
    vars(twin).update(own, **{name: OrderedDict() for name in HOOKS}, state=defaultdict(dict), param_groups=[])
    for group in optimizer.param_groups:
        places = [i for i, p in enumerate(group["params"]) if id(p) in chosen]
        if places:
            rest = {key: copy.deepcopy(value, memo) for key, value in group.items() if key not in MEMBERS}
            named = {"param_names": [group["param_names"][i] for i in places]} if "param_names" in group else {}
            twin.param_groups.append({"params": [stand_ins[id(group["params"][i])] for i in places]} | named | rest)
    return twin


def _rekeyed(value: Any, stand_ins: Mapping[int, Tensor]) -> Any:
    """A table by the id of a parameter becomes one by the id of its stand-in."""
    if type(value) is dict and any(key in stand_ins for key in value if isinstance(key, int)):
        return {id(stand_ins[key]) if isinstance(key, int) and key in stand_ins else key: v for key, v in value.items()}
    return value


class Link:
    """One dictionary of an optimizer (a group, or its attributes) and the same one of a copy."""

    def __init__(self, twin: MutableMapping[str, Any], leave: Collection[str], tensors: bool) -> None:
        self.twin, self._leave, self._tensors = twin, leave, tensors
        self._sent: dict[str, tuple[Any, int]] = {}

    def push(self, source: Mapping[str, Any], memo: dict[int, Any], tensors: dict[int, Tensor]) -> None:
        """Hand the values of the original to the copy: tensors as copies, so that what is done to them in place is done once.

        tensors: those copied for this copy of the optimizer so far, by id: groups may share one.
        """
        self._sent.clear()
        for key in [k for k in self.twin if k not in source and k not in self._leave and self._takes(self.twin[k])]:
            del self.twin[key]
        for key, value in source.items():
            if key in self._leave or not self._takes(value):
                continue
            if isinstance(value, Tensor):
                if id(value) not in tensors:
                    tensors[id(value)] = value.detach().clone()
                sent = tensors[id(value)]
            else:
                sent = value if plain(value) else copy.deepcopy(value, dict(memo))
            self.twin[key] = sent
            self._sent[key] = (sent, sent._version if isinstance(sent, Tensor) else 0)

    def changes(self, source: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
        """What the copy has changed since, by key, with the parameters of the original in it."""
        found = {}
        for key, value in self.twin.items():
            if key in self._leave or not self._takes(value):
                continue
            sent, version = self._sent.get(key, (MISSING, 0))
            if value is sent and (plain(value) or (isinstance(value, Tensor) and value._version == version)):
                continue
            back = value if plain(value) or isinstance(value, Tensor) else copy.deepcopy(value, dict(memo))
            if not same(back, source.get(key, MISSING)):
                found[key] = back
        return found

    def _takes(self, value: Any) -> bool:
        return plain(value) or (self._tensors and isinstance(value, (Tensor, *CONTAINERS)))


MISSING = object()


def plain(value: Any) -> bool:
    """Whether a value cannot change and refers to nothing that can."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(plain(v) for v in value))


def assign(target: MutableMapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Write changed values; a tensor is written into the one that stands there, which the user may hold."""
    for key, value in changes.items():
        present = target.get(key)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and present.shape == value.shape and present.dtype == value.dtype:
            with torch.no_grad():
                present.copy_(value)
        else:
            target[key] = value


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors bit for bit (NaN equals NaN), objects of unknown classes by their type alone."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _same_tensors(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, *PLAIN)):
        return bool(a == b) or (a != a and b != b)  # NaN is NaN
    return True


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return bool(torch.equal(a.to_dense(), b.to_dense()))
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN
