"""Embedding tables: fp32 rows of those kept in 16 bits with a master, and gradients: those of 16-bit ones summed in fp32, those of large ones
without a pass over the rows that no token has.

A row of the table gets the sum of the gradients of all its places in the batch: thousands for a frequent token. Summed in 16 bits, all but the first
few hundred of them round away. fp32 tables, as under `*-mixed`, and those that `*-lean` keeps in 16 bits have no such sums.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from halfstep.amp import recycled
from halfstep.amp.mode import Route, Tables, inside, numbered
from halfstep.amp.ops import HALF
from halfstep.amp.rounding import applied, transformed, unseen
from halfstep.errors import ConfigError
from halfstep.optim import dtype_name, master_of
from halfstep.optim.storage import Storage


class _Embedding(torch.autograd.Function):
    """Rows of a 16-bit table; the gradient of the table is summed in fp32 and rounded once, or stays fp32 where the table takes fp32 gradients.

    Memory in the backward pass: 4 bytes per element of the table, freed at its end when the gradient is 16-bit.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, indices: Tensor, padding: int, by_frequency: bool) -> Tensor:
        return torch.embedding(weight, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, indices, ctx.padding, ctx.by_frequency = inputs
        ctx.shape = weight.shape
        ctx.save_for_backward(indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        rows, places = grad.reshape(-1, grad.shape[-1]), indices.reshape(-1)
        with torch.autocast(grad.device.type, enabled=False):
            total = torch.ops.aten.embedding_dense_backward(rows.float(), places, ctx.shape[0], ctx.padding, ctx.by_frequency)
        return total, None, None, None  # in fp32: autograd casts it to what the table takes, which torch.compile cannot ask for


class _Rows(torch.autograd.Function):
    """fp32 rows of a table that is a leaf, in fp32 or 16 bits, and to the bit the gradient that torch gives an fp32 table.

    large: on a CPU, where the backward pass has begun that gradient already, as it has for a table that is the last layer's weight too, the rows of
    the batch are added to it; else it is made in the memory of the step before.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, padding: int, by_frequency: bool, large: bool) -> Tensor:
        ctx.weight, ctx.padding, ctx.by_frequency, ctx.large = weight, padding, by_frequency, large  # a leaf, which the graph does not hold together
        ctx.save_for_backward(indices)
        return gathered(weight, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (indices,) = ctx.saved_tensors
        if ctx.large and not torch.is_grad_enabled():
            return unseen(_rows_gradient, grad, indices, ctx.weight, ctx.padding), None, None, None, None
        # it will be differentiated in its turn, or is small
        found = torch.ops.aten.embedding_dense_backward(grad, indices, ctx.weight.shape[0], ctx.padding, ctx.by_frequency)
        return found, None, None, None, None


class _Traced(torch.autograd.Function):
    """Those of a kept table for torch.compile, which knows no gradient in another format than that of its parameter: it rounds the fp32 sum."""

    @staticmethod
    def forward(weight: Tensor, residual: Tensor | None, indices: Tensor, padding: int, by_frequency: bool, storage: Storage) -> Tensor:
        low = torch.embedding(weight, indices)
        return low.float() if residual is None else storage.read(low, torch.embedding(residual, indices))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, _, indices, ctx.padding, ctx.by_frequency, _ = inputs
        ctx.rows = weight.shape[0]
        ctx.save_for_backward(indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (indices,) = ctx.saved_tensors
        found = torch.ops.aten.embedding_dense_backward(grad, indices, ctx.rows, ctx.padding, ctx.by_frequency)
        return found, None, None, None, None, None


def gathered(weight: Tensor, indices: Tensor) -> Tensor:
    """fp32 rows of a table, of shape [*indices, width]: those of its master where it is 16-bit and has one, so that nothing else is joined.

    Memory besides: 2 bytes per element of the result, and those of its residual.
    """
    master = master_of(weight) if weight.dtype in HALF else None
    if master is None or master.residual is None:
        return torch.embedding(weight, indices).float()
    master.follow()
    return master.storage.read(torch.embedding(weight.detach(), indices), torch.embedding(master.residual, indices))


def _rows_gradient(grad: Tensor, indices: Tensor, weight: Tensor, padding: int) -> Tensor | None:
    """The gradient of a table, or None where it was added to what there is."""
    places, rows = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if padding >= 0:
        used = places != padding
        places, rows = places[used], rows[used]
    held, slots = torch.unique(places, return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(rows, slots, len(held), -1, False)
    total = recycled.so_far(weight)
    if total is not None:
        total.index_add_(0, held, sums)
        return None
    total = recycled.gradient(weight, torch.float32).zero_().index_add_(0, held, sums)
    recycled.begin(weight, total)
    return total


def _large(weight: Tensor) -> bool:
    """Whether the gradient of this table is made in memory that is used again."""
    return weight.numel() >= recycled.LEAST and weight.device.type == "cpu" and weight.is_leaf and not transformed()


def rows(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding of a table that a policy keeps in 16 bits: what it would give for the fp32 master, and that one's gradient, in fp32.

    input: indices; weight: a 16-bit parameter [v, h]. Tables with max_norm or sparse gradients stay fp32, and these are not looked at here.
    """
    padding = _padding(weight, padding_idx)
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return gathered(weight, input)
    large = _large(weight) and not scale_grad_by_freq and recycled.takes(weight) == torch.float32
    return applied(_Rows, weight, input, padding, scale_grad_by_freq, large)  # type: ignore[no-any-return]


def _rows_of(weight: Tensor, *given: Any) -> Tensor:
    """The same for a 16-bit table of which nobody knows whether it is a kept one."""
    if master_of(weight) is None and not isinstance(weight, nn.Parameter):
        raise ConfigError(
            f"an embedding looks rows up in a {dtype_name(weight.dtype)} tensor of shape {tuple(weight.shape)} that stands in the place of its "
            "weight (torch.func), and the rest of that weight's fp32 master is not there",
            "Give fp32 values (halfstep.optim.full_values of the parameter), or hold the embedding in fp32 (fp32=PATTERN in the precision).",
        )
    return rows(given[0], weight, *given[1:])


def _padding(weight: Tensor, index: int | None) -> int:
    """The row that gets no gradient, counted from the beginning; -1 for none."""
    if index is None:
        return -1
    assert -weight.shape[0] <= index < weight.shape[0], "Padding_idx must be within num_embeddings"  # as torch says it
    return index % weight.shape[0]


def embedding(
    dtype: torch.dtype,
    func: Route,
    /,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """F.embedding; padding_idx and scale_grad_by_freq as in torch. The gradient of a 16-bit table has fp32 sums, that of a large fp32 one is cheap.

    max_norm is applied by torch before the rows are read. Left to torch: tables in another format, those without a gradient, forward-mode
    derivatives, and sparse=True, whose gradient is a list of rows and is summed by the optimizer that takes it. F.embedding_bag is left to torch as
    well: its sums over a bag and its gradient are one kernel, whose modes (mean, max, weights per sample) would have to be written anew.
    """
    if weight.dtype in HALF and inside.joins is not None:  # in a model whose tables are fp32, or kept in 16 bits
        if torch.compiler.is_compiling():
            padding = _padding(weight, padding_idx)
            return _Traced.apply(weight, weight.halfstep_master.residual, input, padding, scale_grad_by_freq, weight.halfstep_master.storage)  # type: ignore
        return _rows_of(weight, input, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    large = weight.dtype == torch.float32 and _large(weight) and not scale_grad_by_freq
    ours = (weight.dtype in HALF or large) and weight.requires_grad and torch.is_grad_enabled() and not sparse
    if not ours or forward_ad._current_level >= 0 or not (padding_idx is None or -weight.shape[0] <= padding_idx < weight.shape[0]):
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if max_norm is not None:
        with torch.no_grad():
            func(input, weight, None, max_norm, norm_type)  # renormalizes the rows of the table
    padding = _padding(weight, padding_idx)
    if large:
        return _Rows.apply(weight, input, padding, False, True)  # type: ignore[no-untyped-call]
    return _Embedding.apply(weight, input, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]


ROUTE: dict[Any, Route] = {F.embedding: embedding}


def with_embedding(tables: Tables) -> Tables:
    """The same tables, in which embeddings have fp32 gradient sums, whether autocast is on or off."""
    return _with_embedding(tables.number)


@functools.cache
def _made(number: int) -> Tables:
    tables = numbered(number)
    island = tables.island and with_embedding(tables.island)
    return Tables(on={**tables.on, **ROUTE}, off={**tables.off, **ROUTE}, emulated=tables.emulated, island=island, low=tables.low)


def _with_embedding(number: int) -> Tables:
    return _made(number)


# as in autocast: torch.compile takes the result for a constant. It would look into a cached function, and takes no tables as an argument
_with_embedding._dynamo_marked_constant = True  # type: ignore[attr-defined]
