"""Bytes: what a weight, what lies beside it, its gradient and its optimizer states take under a policy. The one source of these numbers.

    bytes of one weight     weight  residual  gradient
    fp32                      4        0         4
    split, kahan              2        2         2
    split24                   2        1         2
    stochastic, plain         2        0         2

A 16-bit weight's gradient takes 4 bytes while micro-batches are added up, and always for an embedding table, whose rows are summed in fp32. With
gradient release none lasts unless they are added up, and what is there for a moment is not counted. A moment takes 4 bytes in fp32, 2 in bf16, and 1
in int8 plus one fp32 scale per block of 128 values of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Generic, Literal, TypeVar

from halfstep.errors import ConfigError, suggest
from halfstep.numerics import BLOCK
from halfstep.policy.parse import parse
from halfstep.policy.policy import TABLES, Castable, Policy

Role = Literal["first", "second"] | None
RESIDUALS = {"fp32": 0, "split": 2, "split24": 1, "kahan": 2, "stochastic": 0, "plain": 0}
MOMENTS = {"fp32": 4, "bf16": 2, "int8": 1}

# What each optimizer keeps with one value per element of a weight, and what that is: a mean of gradients ("first"), a mean of their squares or
# magnitudes ("second"), or something that must stay fp32 (None): sums, maxima that never fall, step sizes, and what is subtracted from another state.
ROLES: dict[str, dict[str, Role]] = {
    "Adam": {"exp_avg": "first", "exp_avg_sq": "second", "max_exp_avg_sq": None},
    "AdamW": {"exp_avg": "first", "exp_avg_sq": "second", "max_exp_avg_sq": None},
    "NAdam": {"exp_avg": "first", "exp_avg_sq": "second"},
    "RAdam": {"exp_avg": "first", "exp_avg_sq": "second"},
    "Adamax": {"exp_avg": "first", "exp_inf": "second"},
    "SGD": {"momentum_buffer": "first"},
    "Lion": {"exp_avg": "first"},
    "Muon": {"momentum_buffer": "first"},
    "RMSprop": {"square_avg": "second", "momentum_buffer": "first", "grad_avg": None},
    "Adagrad": {"sum": None},
    "Adadelta": {"square_avg": None, "acc_delta": None},
    "Rprop": {"prev": None, "step_size": None},
    "ASGD": {"ax": None},
    "SparseAdam": {"exp_avg": None, "exp_avg_sq": None},
    "Adafactor": {"row_var": None, "col_var": None, "variance": None},
    "LBFGS": {"d": None, "prev_flat_grad": None},
}
# fp32 scalars that torch keeps for each tensor; one counter of steps where an optimizer is not named
STEP = ("step",)
COUNTERS: dict[str, tuple[str, ...]] = {
    "ASGD": ("step", "eta", "mu"),
    "NAdam": ("step", "mu_product"),
    **dict.fromkeys(("SGD", "Lion", "Muon", "SparseAdam", "LBFGS"), ()),
}
# (optimizer, state) that exist only under these settings of its parameter group
ONLY_WITH = {
    ("SGD", "momentum_buffer"): "momentum",
    ("RMSprop", "momentum_buffer"): "momentum",
    ("RMSprop", "grad_avg"): "centered",
    ("Adam", "max_exp_avg_sq"): "amsgrad",
    ("AdamW", "max_exp_avg_sq"): "amsgrad",
}

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Bytes(Generic[N]):
    """Bytes of weights, of what lies beside them, of gradients and of optimizer states: exact for tensors (int), or per weight (float)."""

    weight: N
    residual: N
    gradient: N
    states: N

    @property
    def total(self) -> N:
        """All of them together."""
        return self.weight + self.residual + self.gradient + self.states

    def __add__(self, other: Bytes[N]) -> Bytes[N]:
        return Bytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Footprint:
    """Bytes per weight of large tensors under a policy with an optimizer.

    castable: of a weight that the policy holds in 16 bits: with autocast one whose every use is a cast (of products and convolutions, with their
    biases), under `*-true` each outside the modules that `fp32=` names. table: of an embedding table that it holds in 16 bits and makes fp32 rows of.
    other: of a weight that stays fp32. All are the same where all weights are.
    """

    policy: Policy
    optimizer: str
    castable: Bytes[float]
    table: Bytes[float]
    other: Bytes[float]
    released: bool = False

    @property
    def text(self) -> str:
        """The bytes and what they are of, in one line."""
        if self.castable == self.other:
            return f"{_number(self.castable.total)} bytes per parameter ({_shares(self.castable)})"
        pairs = {"16-bit" if self.policy.whole else "castable": self.castable, "fp32" if self.policy.whole else "other": self.other}
        if self.table.total not in (self.castable.total, self.other.total):
            pairs["embedding table's"] = self.table
        return " and ".join(f"{_number(b.total)} bytes per {kind} parameter ({_shares(b)})" for kind, b in pairs.items())

    def __str__(self) -> str:
        return f"{self.policy} with {self.optimizer}{' and gradient release' if self.released else ''}: {self.text}"


def roles_of(optimizer: Any, group: Mapping[str, Any] | None = None) -> dict[str, Role]:
    """The states that `optimizer` keeps with one value per element of a weight, and the role of each; {} for one that is not in `ROLES`.

    optimizer: a name, a class or an instance (also one that halfstep wrapped). group: a parameter group, or those of its settings that
    decide: momentum, centered, amsgrad. Without it the groups of an instance decide, and a name or a class means torch's defaults.
    Raises ConfigError when the groups of an instance keep different states.
    """
    name = name_of(optimizer)
    if name is None:
        return {}
    groups = [group] if group is not None else getattr(_inner(optimizer), "param_groups", None) or [{}]
    found = [_roles(name, g) for g in groups]
    if any(f != found[0] for f in found):
        raise ConfigError(f"the parameter groups of this {name} keep different states", "Ask for one group: group=optimizer.param_groups[0].")
    return found[0]


def name_of(optimizer: Any) -> str | None:
    """The row of `ROLES` for an optimizer: its class or the nearest parent that is one of torch's, halfstep's or a Lion; None when there is none.

    The name alone does not do: other libraries have optimizers called AdamW and Adafactor that keep other states.
    """
    if isinstance(optimizer, str):
        return optimizer if optimizer in ROLES else None
    cls = optimizer if isinstance(optimizer, type) else type(_inner(optimizer))
    return next((c.__name__ for c in cls.__mro__ if c.__name__ in ROLES and (c.__name__ == "Lion" or _is_ours(c))), None)


def tensor_bytes(
    policy: Policy | str,
    optimizer: Any,
    numel: int | Sequence[int],
    *,
    castable: Castable = True,
    accumulating: bool = False,
    released: bool = False,
    group: Mapping[str, Any] | None = None,
) -> Bytes[int]:
    """Bytes of one trained tensor of `numel` elements (or of a shape, which Adafactor's states depend on), in a training step.

    castable: whether the policy may hold it in 16 bits: every use is a cast, or under `*-true` no `fp32=` pattern names its module. It makes no
    difference under a policy whose weights are all fp32 or all 16-bit. "table" is for an embedding table that it holds in 16 bits, with an fp32
    gradient (`*-lean` with split, where a product has the table for its weight too, and with split24). accumulating: micro-batches are added up, in
    fp32. released: gradients are freed one by one inside the backward pass, and none lasts unless micro-batches are added up.
    Activations and the temporary buffers of a step are not counted. Raises ConfigError for an optimizer whose states are not known.
    """
    policy = parse(policy)
    shape = (numel,) if isinstance(numel, int) else tuple(numel)
    count = prod(shape)
    states = _states(policy, optimizer, shape, group)
    table = castable == "table" and not policy.whole
    narrow = policy.weights != "fp32" and (castable or (policy.whole and not policy.fp32))
    lasts = accumulating or not released
    if not narrow or (table and policy.weights not in TABLES):
        return Bytes(4 * count, 0, 4 * count * lasts, states)
    return Bytes(2 * count, RESIDUALS[policy.weights] * count, (4 if accumulating or table else 2) * count * lasts, states)


def model_bytes(
    sizes: Iterable[tuple[int | Sequence[int], Castable]],
    policy: Policy | str,
    optimizer: Any = "AdamW",
    *,
    accumulating: bool = False,
    released: bool = False,
    group: Mapping[str, Any] | None = None,
) -> Bytes[int]:
    """Bytes of a model's trained tensors, given as (number of elements or shape, castable), each shared tensor once."""
    total = Bytes(0, 0, 0, 0)
    for size, castable in sizes:
        total += tensor_bytes(policy, optimizer, size, castable=castable, accumulating=accumulating, released=released, group=group)
    return total


def bytes_per_parameter(
    policy: Policy | str,
    optimizer: Any = "AdamW",
    *,
    accumulating: bool = False,
    released: bool = False,
    group: Mapping[str, Any] | None = None,
) -> Footprint:
    """Bytes per weight in the limit of large tensors, where counters and a last block that is not full do not count. released: see `tensor_bytes`."""
    policy = parse(policy)
    side = BLOCK * 2**20  # a matrix this large: what remains of counters, rows and columns is below any digit that is shown
    count = side * side

    def each(castable: Castable) -> Bytes[float]:
        whole = tensor_bytes(policy, optimizer, (side, side), castable=castable, accumulating=accumulating, released=released, group=group)
        return Bytes(*(round(getattr(whole, f.name) / count, 6) for f in fields(whole)))

    name = name_of(optimizer)
    return Footprint(policy, str(name), each(True), each("table"), each(False), released)


def table(optimizers: Iterable[Any], policies: Iterable[Policy | str]) -> str:
    """Bytes per weight as a Markdown table, a row per policy and a column per optimizer: of a castable weight and, where they differ, of others.

    An optimizer is a name, a class, an instance, or a pair of one of these and the settings of its group: ("SGD", {"momentum": 0.9}).
    """
    chosen = [o if isinstance(o, tuple) else (o, None) for o in optimizers]
    heads = [f"{name_of(o)}{'' if not g else ' (' + ', '.join(f'{k}={v}' for k, v in g.items()) + ')'}" for o, g in chosen]
    rows = [f"| precision | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for policy in policies:
        cells = [cell(bytes_per_parameter(policy, o, group=g)) for o, g in chosen]
        rows.append(f"| `{parse(policy)}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def cell(footprint: Footprint) -> str:
    """A footprint as short as a table needs it: `8.06 / 10.06`, castable and other weights, or one number where all weights are alike.

    In `7.06 / 9.06 / 10.06` the one between is of embedding tables.
    """
    return " / ".join(dict.fromkeys(_number(b.total) for b in (footprint.castable, footprint.table, footprint.other)))


def _states(policy: Policy, optimizer: Any, shape: tuple[int, ...], group: Mapping[str, Any] | None) -> int:
    """Bytes of the states of one tensor."""
    name = name_of(optimizer)
    if name is None:
        shown = optimizer if isinstance(optimizer, str) else (optimizer if isinstance(optimizer, type) else type(_inner(optimizer))).__qualname__
        raise ConfigError(f"the states of the optimizer {shown} are not known, so its bytes cannot be counted", suggest(shown, ROLES))
    if name == "LBFGS":
        raise ConfigError(
            "LBFGS keeps a history for all weights together, so it has no bytes per tensor",
            "Count up to 2 * history_size + 3 fp32 numbers per weight.",
        )
    total = 4 * len(COUNTERS.get(name, STEP))
    for key, role in roles_of(optimizer, group).items():
        count = _FACTORED[key](shape) if key in _FACTORED else prod(shape)
        total += _encoded(policy.states, count) if role else 4 * count
    return total


def _encoded(states: str, count: int) -> int:
    """Bytes of `count` values of a moment."""
    return MOMENTS[states] * count + (4 * -(-count // BLOCK) if states == "int8" else 0)


# Adafactor keeps one value per row and one per column of a matrix, and one per element of a vector
_FACTORED: dict[str, Callable[[tuple[int, ...]], int]] = {
    "row_var": lambda shape: prod(shape[:-1]) if len(shape) > 1 else 0,
    "col_var": lambda shape: prod(shape[:-2]) * shape[-1] if len(shape) > 1 else 0,
    "variance": lambda shape: prod(shape) if len(shape) <= 1 else 0,
}


def _roles(name: str, group: Mapping[str, Any]) -> dict[str, Role]:
    kept = {key: role for key, role in ROLES[name].items() if (name, key) not in ONLY_WITH or group.get(ONLY_WITH[name, key])}
    if "grad_avg" in kept:  # the variance is square_avg - grad_avg^2: rounding either makes it negative
        kept["square_avg"] = None
    return kept


def _inner(optimizer: Any) -> Any:
    """The optimizer that halfstep wrapped or prepared. What another library puts around one (Lookahead) has states of its own."""
    while not isinstance(optimizer, type) and type(optimizer).__module__.partition(".")[0] == "halfstep" and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[:2] == ["torch", "optim"] or cls.__module__.partition(".")[0] == "halfstep"


def _shares(b: Bytes[float]) -> str:
    return ", ".join(f"{f.name} {_number(getattr(b, f.name))}" for f in fields(b) if getattr(b, f.name))


def _number(value: float) -> str:
    """At most two decimals, none that is 0."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
