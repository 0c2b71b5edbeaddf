"""Which of the tensors that a forward pass saves for its backward pass are kept in 8 bits: a function mode with a list of functions.

Saved tensors are packed by `torch.autograd.graph.saved_tensors_hooks`, whose hooks are told nothing but the tensor. A mode knows the function that
saves it, and only those of `TREATED` are given hooks: products, convolutions, attention, norms, pointwise activations, multiplication,
dropout and pooling. Their derivatives are linear in what is saved, or bend so slowly that unbiased rounding leaves them unbiased for all practical
purposes. Whatever else a model computes (divisions, roots, exponentials, losses, recurrent networks, autograd functions of others) saves what it
always did, exactly.

Of those functions these stay exact too: parameters, buffers and inputs, which are alive anyway (and 16-bit copies of parameters are made again
instead of kept); integers (places of maxima in fewer bytes) and booleans; statistics of norms, the logsumexp of attention, operands that are
broadcast, and whatever is small.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from halfstep.amp.mode import inside, opened
from halfstep.amp.ops import every_form, forms, names
from halfstep.amp.rounding import transformed
from halfstep.amp.saved import FLOATS, Cast, Kept, Packed, Places, View, in_memory_order, unpack
from halfstep.amp.scratch import straight
from halfstep.errors import ConfigError
from halfstep.numerics.standins import is_shape
from halfstep.policy import Policy

Treatment = Literal["operands", "layer", "made"]
LEAST = 1024  # elements: below that the objects around the codes cost more than the codes save
STATISTIC = 8  # a tensor this much smaller than the largest operand is a statistic of it, or is broadcast against it

LAYERS = names("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")  # (input, weight, ...)
OPERANDS = names(
    """matmul mm bmm addmm baddbmm addbmm einsum mul multiply square pow relu relu_ gelu silu mish leaky_relu elu celu selu tanh sigmoid softplus
    hardswish logsigmoid glu dropout dropout1d dropout2d dropout3d
    scaled_dot_product_attention max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"""
)
MADE = names("layer_norm rms_norm group_norm batch_norm instance_norm")  # what needs no gradient stays exact
TREATED: dict[Any, Treatment] = {
    **dict.fromkeys(every_form(LAYERS), "layer"),
    **dict.fromkeys(every_form(OPERANDS), "operands"),
    **dict.fromkeys(every_form(MADE), "made"),
}
PLANES = {form: dims for name, dims in (("max_pool1d", 2), ("max_pool2d", 2), ("max_pool3d", 3)) for form in forms(name)}  # what their places count
OPENED = frozenset((F.multi_head_attention_forward,))
CASTS = frozenset(("ToCopyBackward0", "TBackward0", "TransposeBackward0"))

logger = logging.getLogger("halfstep")


class Saving(TorchFunctionMode):
    """The block of one forward pass of a bound module in which listed functions keep what they save in 8 bits."""

    def __init__(self, policy: Policy, module: nn.Module, given: Any) -> None:
        super().__init__()
        self.policy, self.kind = policy, policy.activations
        self._module, self._given = module, given
        self._owned: frozenset[int] | None = None
        self._known: dict[Any, tuple[StorageWeakRef, Packed]] = {}  # what this pass has packed already, while its memory lives
        self._func: Any = None
        self._call: tuple[Treatment, Any, Any] = ("operands", (), {})

    def forget(self) -> None:
        """Let everything go: hooks of the graph may hold this mode."""
        self._known.clear()
        self._call, self._given, self._owned = ("operands", (), {}), (), frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        treatment = TREATED.get(func)
        if treatment is None:
            if func in OPENED:
                with self:
                    return opened(func)(*args, **(kwargs or {}))
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if not self._acts() or not _is_smooth(func, args):
            return func(*args, **kwargs)
        self._func, self._call = func, (treatment, args, kwargs)
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, unpack)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _acts(self) -> bool:
        """Whether what is saved now is for a later backward pass, and nobody else has hooks on it."""
        if not torch.is_grad_enabled() or inside.policy is not self.policy or torch._C._current_graph_task_id() != -1:
            return False
        if transformed() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # torch.func
            return False
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and hooks[1] is not unpack and getattr(hooks[1], "__module__", None) != "torch.utils.checkpoint":
            _say_foreign()
        return hooks is None

    def _pack(self, x: Tensor) -> Kept | Cast | View | Places:
        """The hook of the forward pass."""
        if x.dtype == torch.int64 and x.numel() >= LEAST and (dims := PLANES.get(self._func, 0)):
            image = next(iter(_tensors(self._call[1:])))
            return Places(x, image.numel() // max(x.shape[:-dims].numel(), 1))
        if x.dtype not in FLOATS or not straight(x) or x.layout != torch.strided or x.numel() < LEAST or x.is_neg():
            return Kept(x)
        treatment = self._call[0]
        constant = x.grad_fn is None and not x.requires_grad
        if (x.is_leaf and x.requires_grad) or (constant and (treatment == "made" or x.untyped_storage()._cdata in self._alive())):
            return Kept(x)
        base = x._base
        if base is not None and base.is_leaf and base.requires_grad:
            return Kept(x)
        return _cast_of(x) or self._of_weight(x, constant) or (Kept(x) if self._is_statistic(x) else self._packed(x))

    def _of_weight(self, x: Tensor, constant: bool) -> Kept | Cast | None:
        """A weight that the function was given, or a copy of it, is never packed: exact, or made again where it is found to be the plain cast."""
        treatment, args, kwargs = self._call
        weights = [t for t in _tensors((args, kwargs)) if t.is_leaf and (t.requires_grad or t.untyped_storage()._cdata in self._alive())]
        if treatment == "layer":
            weights.append(kwargs["weight"] if "weight" in kwargs else args[1])
        for w in weights:
            if w.untyped_storage()._cdata == x.untyped_storage()._cdata:
                return Kept(x)
            turned = w.dim() == 2 and x.shape == w.mT.shape and (x.shape != w.shape or x.stride() != w.stride())
            if not turned and x.shape != w.shape:
                continue
            if constant and w.is_leaf and x.is_cpu and _same((w.mT if turned else w).detach().to(x.dtype), x):
                return Cast(w, x.dtype, turned)
            if constant or not w.is_leaf:  # a weight that was computed, or the cast of one
                return Kept(x)
        return None

    def _is_statistic(self, x: Tensor) -> bool:
        sizes = [t.numel() for t in _tensors(self._call[1:]) if t.is_floating_point() and not (t.is_leaf and t.requires_grad)]
        return STATISTIC * x.numel() < max(sizes, default=0)

    def _packed(self, x: Tensor) -> Kept | View:
        storage = x.untyped_storage()
        if x.numel() * x.itemsize > storage.nbytes():  # expanded: its codes would take more than it does
            return Kept(x)
        flat = in_memory_order(x)
        about: tuple[Any, ...] = (x.numel(),) if flat is not None else (x.shape, x.stride())
        key = (storage._cdata, x.storage_offset(), x.dtype, x._version, *about)
        known = self._known.get(key)
        if flat is None:
            flat = x.contiguous().view(-1)
            stride = torch.empty(x.shape, device="meta").stride()
        else:
            stride = x.stride()
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            return View(known[1], x.shape, stride)
        packed = Packed(flat, self.kind)
        self._known[key] = StorageWeakRef(storage), packed  # type: ignore[no-untyped-call]
        return View(packed, x.shape, stride)

    def _alive(self) -> frozenset[int]:
        """The memory of parameters, buffers and inputs."""
        if self._owned is None:
            held = [*self._module.parameters(), *self._module.buffers(), *_tensors(self._given)]
            self._owned = frozenset(t.untyped_storage()._cdata for t in held if t.layout == torch.strided)
        return self._owned


def _same(cast: Tensor, x: Tensor) -> bool:
    """Whether a copy of a weight is its plain cast; without numbers it is taken for one."""
    return is_shape(x) or torch.equal(cast, x)


def _cast_of(x: Tensor) -> Cast | Kept | None:
    """A 16-bit copy of a parameter, or its transpose, told by the graph behind it; as it is where more than one cast has made it."""
    node, casts = x.grad_fn, 0
    while node is not None and node.name() in CASTS:
        casts += node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return None
    if casts != 1:
        return Kept(x)
    like = torch.empty_like(leaf, dtype=x.dtype, device="meta")
    for turned in (False, True) if leaf.dim() == 2 else (False,):
        made = like.mT if turned else like
        if made.shape == x.shape and made.stride() == x.stride():
            return Cast(leaf, x.dtype, turned)
    return Kept(x)


def _is_smooth(func: Any, args: Any) -> bool:
    """Whether a power is one whose derivative does not divide by its operand."""
    if getattr(func, "__name__", "") not in ("pow", "__pow__", "__rpow__"):
        return True
    return func is not Tensor.__rpow__ and len(args) == 2 and type(args[1]) in (int, float) and args[1] >= 1


def _tensors(value: Any, depth: int = 4) -> Iterable[Tensor]:
    """The tensors in arguments, those in containers too."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)


@functools.cache
def _say_foreign() -> None:
    logger.warning(
        "activations are kept in 8 bits by hooks on saved tensors, and other hooks (saved_tensors_hooks, save_on_cpu) are open around this "
        "model: those hold, and nothing is compressed inside them"
    )


def compressed(forward: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A forward method that keeps its activations as the policy says. Raises ConfigError where torch.compile traces it."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise ConfigError(
                f"activations={policy.activations} acts while a model runs, and torch.compile decides by itself what its graphs save",
                f"Leave out torch.compile, or activations={policy.activations}.",
            )
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return forward(self, *args, **kwargs)
        saving = Saving(policy, self, (args, kwargs))
        try:
            with saving:
                return forward(self, *args, **kwargs)
        finally:
            saving.forget()

    return run
