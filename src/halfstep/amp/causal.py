"""`chunk_loss`: causal language models of transformers compute their loss without a tensor of all logits.

The head is told to give `Logits`, which stand for its output and have not been computed, and the loss function of the model takes them apart. What
the model does with its logits in between (a scale, a softcap, a cast) is noted. So nothing has to be known about the code of a model, and what it
does otherwise is seen when the handle is made, on a batch of eight tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.amp.autocast import autocast
from halfstep.amp.casting import bound_policy
from halfstep.amp.linear_loss import linear_cross_entropy
from halfstep.amp.ops import HALF
from halfstep.amp.rehearsal import Rehearsal
from halfstep.errors import ConfigError, HalfstepError

MARK = "halfstep_chunked_loss"  # the attribute of a model that has a chunked loss: whether in evaluation too
_LOSS = "ForCausalLMLoss"  # the name of the loss function that is known
_REMEDY = "Train it with its own loss, and leave chunk_loss (chunked_loss of the Trainer) out."


class _Deferring(threading.local):
    """Where this thread is. on: in a forward pass whose logits are left out. whole: in a block that wants them; checked: in one that wants none."""

    def __init__(self) -> None:
        self.on = False
        self.whole = False
        self.checked = False


_deferring = _Deferring()


class Logits:
    """Stands for softcap * tanh(scale * head(hidden) / softcap), or scale * head(hidden), and has not been computed.

    A model may multiply and divide it by numbers, give it to tanh once and cast it; ConfigError for anything else.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, island: bool, inner: float = 1.0, outer: float | None = None) -> None:
        self.hidden, self.weight, self.bias, self.island = hidden, weight, bias, island
        self.inner, self.outer = inner, outer  # outer * tanh(inner * head(hidden)); without a tanh there is no outer

    @property
    def device(self) -> torch.device:
        """That of the hidden states."""
        return self.hidden.device

    def __mul__(self, factor: Any) -> Logits:
        if not isinstance(factor, int | float):
            raise _unknown(f"multiplies them by a {type(factor).__name__}")
        inner, outer = (self.inner * factor, None) if self.outer is None else (self.inner, self.outer * factor)
        return Logits(self.hidden, self.weight, self.bias, self.island, inner, outer)

    __rmul__ = __mul__

    def __truediv__(self, factor: Any) -> Logits:
        if not isinstance(factor, int | float):
            raise _unknown(f"divides them by a {type(factor).__name__}")
        return self * (1 / factor)

    def tanh(self) -> Logits:
        """The beginning of a softcap."""
        if self.outer is not None:
            raise _unknown("gives them to tanh twice")
        return Logits(self.hidden, self.weight, self.bias, self.island, self.inner, 1.0)

    def float(self) -> Logits:
        """They are in fp32 anyway."""
        return self

    def to(self, *_: Any, **__: Any) -> Logits:
        """They are in fp32, and where the hidden states are."""
        return self

    def contiguous(self) -> Logits:
        """As they are."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "tanh" and isinstance(args[0], Logits):
            return args[0].tanh()
        raise _unknown(f"gives them to {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"logits that chunk_loss leaves out have no {name!r}")

    def loss(self, labels: Tensor, **options: Any) -> Tensor:
        """Cross entropy, by `linear_cross_entropy`."""
        if self.outer is not None:
            options |= {"softcap": self.outer, "scale": self.inner * self.outer}
        elif self.inner != 1:
            options["scale"] = self.inner
        if self.island:  # the head is held in fp32
            with autocast(self.hidden.device.type, enabled=False):
                return linear_cross_entropy(self.hidden, self.weight, labels, self.bias, **options)
        return linear_cross_entropy(self.hidden, self.weight, labels, self.bias, **options)


def _unknown(what: str) -> ConfigError:
    return ConfigError(f"the model has logits that are not computed, and {what}", _REMEDY)


@dataclass(frozen=True)
class ChunkedLoss:
    """What `chunk_loss` did. `head` names the module whose output is left out; `remove()` undoes it."""

    model: nn.Module
    head: str

    def remove(self) -> None:
        """Give the model its own loss back. Raises ConfigError while it is bound to a policy."""
        if MARK not in self.model.__dict__:
            return
        if bound_policy(self.model) is not None:
            raise ConfigError(
                f"this {type(self.model).__name__} was bound to {bound_policy(self.model)} later", "Call remove() on that binding first."
            )
        _put_back(self.model, self.model.get_submodule(self.head))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which models of this thread compute all logits, and return them."""
        with _wanting(whole=True):
            yield


@contextmanager
def _wanting(whole: bool) -> Iterator[None]:
    before = _deferring.whole, _deferring.checked
    _deferring.whole, _deferring.checked = whole, not whole
    try:
        yield
    finally:
        _deferring.whole, _deferring.checked = before


def chunk_loss(model: nn.Module, *, evaluation: bool = False, label_smoothing: float = 0.0) -> ChunkedLoss:
    """Let a causal language model of transformers compute its loss by `halfstep.amp.linear_cross_entropy`, without its logits.

    While the model trains (`model.train()`), a call with labels= returns its loss and logits=None; `with handle.whole():` asks for the logits. Calls
    without labels, and in evaluation unless evaluation=True, are as before. label_smoothing: for the loss of calls without logits.
    Call it before the model is bound to a policy (`Accelerator.prepare`, `halfstep.amp.bind`) or compiled. The model goes on to run under the policy,
    its head included: in fp32 where fp32= or a pin holds it. Scales and softcaps of logits (Cohere, Granite, Gemma) are kept.

    Checked on a batch of eight tokens, in evaluation and without gradients: the loss without logits is that with them. Raises ConfigError with the
    reason for a model whose head is no plain linear layer, whose loss is another one, which uses its logits otherwise or which needs other inputs
    than token ids; for one that is bound or has a chunked loss already.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"chunk_loss was given a {type(model).__name__}", "Give it a causal language model of transformers.")
    if MARK in model.__dict__:
        raise ConfigError(f"this {type(model).__name__} has a chunked loss already", "Call remove() on its handle first.")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing={label_smoothing!r} is not between 0 and 1", "Use 0.1, or leave it out.")
    bound = next((name for name, part in model.named_modules() if bound_policy(part) is not None), None)
    if bound is not None:
        raise ConfigError(f"{bound or 'the model'} is bound to a policy already", "Call chunk_loss before prepare or bind.")
    name, head = _head_of(model)
    own: Any = model.loss_function
    model.__dict__[MARK] = evaluation
    model.__dict__["_loss_function"] = functools.partial(_loss, own, 0.0)
    # bound methods, which follow their module through deepcopy
    model.forward = MethodType(_without_logits(type(model).forward), model)
    head.forward = MethodType(_deferred(type(head).forward), head)
    try:
        _check(model)
    except BaseException:
        _put_back(model, head)
        raise
    model.__dict__["_loss_function"] = functools.partial(_loss, own, float(label_smoothing))
    return ChunkedLoss(model, name)


def _head_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The head and its name; ConfigError with the reason where this is no model that is known."""
    kind = type(model).__name__
    ask, loss = getattr(model, "get_output_embeddings", None), getattr(model, "loss_function", None)
    if ask is None or loss is None:
        raise ConfigError(f"{kind} does not tell its head and its loss (get_output_embeddings, loss_function), as models of transformers do", _REMEDY)
    if "labels" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"the forward method of {kind} takes no labels, so it computes no loss", _REMEDY)
    if getattr(loss, "__name__", "") != _LOSS:
        raise ConfigError(f"the loss of {kind} is {getattr(loss, '__name__', type(loss).__name__)} and not {_LOSS}", _REMEDY)
    if "_loss_function" in model.__dict__ or "forward" in model.__dict__:
        what = "forward method" if "forward" in model.__dict__ else "loss function"
        raise ConfigError(f"the {what} of this {kind} was replaced", "Call chunk_loss before that, or leave it out.")
    head = ask()
    if head is None:
        raise ConfigError(f"{kind} has no head (get_output_embeddings() is None)", _REMEDY)
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        changed = " whose forward method was replaced" if type(head) is nn.Linear else f" ({type(head).__module__})"
        raise ConfigError(f"the head of {kind} is a {type(head).__name__}{changed}, and only a plain nn.Linear is known", _REMEDY)
    if head._forward_hooks or head._forward_pre_hooks:
        raise ConfigError(
            f"the head of {kind} has hooks on its forward pass, which would see no logits", "Remove them first, or leave chunk_loss out."
        )
    if head.weight.device.type == "meta":
        raise ConfigError(f"the head of {kind} is on the meta device", "Load its weights first.")
    name = next((name for name, part in model.named_modules() if part is head), None)
    if name is None:
        raise ConfigError(f"the head of {kind} is no part of it", _REMEDY)
    return name, head


def _put_back(model: nn.Module, head: nn.Module) -> None:
    del model.forward, head.forward, model.__dict__["_loss_function"], model.__dict__[MARK]


def _without_logits(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward method of a model: without logits where a loss is wanted."""
    place = list(inspect.signature(inner).parameters).index("labels")

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels") if len(args) < place else args[place - 1]
        asked = self.training or self.__dict__[MARK] or _deferring.checked
        before, _deferring.on = _deferring.on, labels is not None and asked and not _deferring.whole
        try:
            outputs = inner(self, *args, **kwargs)
            return _left_out(outputs) if _deferring.on else outputs
        finally:
            _deferring.on = before

    return forward


def _deferred(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward method of a head: what stands for its output where a loss is wanted."""

    @functools.wraps(inner)
    def forward(self: nn.Linear, input: Tensor) -> Any:
        if not _deferring.on:
            return inner(self, input)
        return Logits(input, self.weight, self.bias, not torch.is_autocast_enabled(input.device.type))

    forward.halfstep_stands_for = inner  # type: ignore[attr-defined]  # read by discovery.forward_of: it only casts its weights
    return forward


def _left_out(outputs: Any) -> Any:
    """The outputs with None in the place of logits."""
    if isinstance(outputs, Mapping):
        return type(outputs)(**{key: None if isinstance(value, Logits) else value for key, value in outputs.items()})
    if isinstance(outputs, tuple):
        return tuple(None if isinstance(value, Logits) else value for value in outputs)
    return outputs


def _loss(
    own: Callable[..., Tensor],
    smoothing: float,
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss function of the model. vocab_size is known from the weight."""
    if not isinstance(logits, Logits):
        return own(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    targets = shift_labels if shift_labels is not None else F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    options: dict[str, Any] = {"ignore_index": ignore_index, "num_items_in_batch": num_items_in_batch}
    return logits.loss(targets.to(logits.device).reshape(logits.hidden.shape[:-1]), label_smoothing=smoothing, **options)


def _check(model: nn.Module) -> None:
    """The loss of eight tokens without logits is that with them, but for roundings."""
    kind, vocabulary = type(model).__name__, model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(8, device=table.weight.device).remainder(vocabulary).view(2, 4)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][0, 1] = -100
    training, losses = [part for part in model.modules() if part.training], []
    for part in training:
        part.training = False
    try:
        for whole in (True, False):
            with torch.no_grad(), Rehearsal([model], ((), batch)), _wanting(whole):
                outputs = model(**batch)
            losses.append(float(outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]))
    except HalfstepError:
        raise
    except Exception as error:  # whatever a model's forward pass raises
        what = "without logits" if losses else "from token ids alone"
        raise ConfigError(f"{kind} could not compute the loss of eight tokens {what}: {type(error).__name__}: {error}", _REMEDY) from error
    finally:
        for part in training:
            part.training = True
    bound = 2**-6 if any(p.dtype in HALF for p in model.parameters()) else 1e-4
    if not math.isclose(*losses, rel_tol=bound, abs_tol=bound):
        raise ConfigError(
            f"the loss of {kind} is {losses[0]:.6g} with its logits and {losses[1]:.6g} without: it is not the one that is known", _REMEDY
        )
