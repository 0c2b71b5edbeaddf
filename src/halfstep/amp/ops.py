"""The op policy as data: which functions of torch run in which format under autocast, by name.

The lists are those of torch's CUDA autocast (torch 2.11 to 2.13: fp32, widest input, 16 bits), and the composite functions that end in one of
them. CUDA decomposes those inside its dispatcher; a function mode sees only what is called from Python, so they are named here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import ConfigError, suggest

HALF = (torch.float16, torch.bfloat16)


def names(text: str) -> tuple[str, ...]:
    """Names with spaces between them."""
    return tuple(text.split())


POINTWISE_FP32 = names("""acos arccos asin arcsin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow square softplus""")
REDUCTIONS_FP32 = names("""softmax log_softmax softmin gumbel_softmax sum sum_to_size prod cumsum cumprod logsumexp norm vector_norm matrix_norm
    frobenius_norm nuclear_norm norm_except_dim dist cdist pdist pairwise_distance cosine_similarity renorm normalize layer_norm
    native_layer_norm group_norm rms_norm local_response_norm trapz trapezoid cumulative_trapezoid lp_pool1d lp_pool2d lp_pool3d""")
LOSSES_FP32 = names("""cross_entropy nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss
    gaussian_nll_loss ctc_loss binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multilabel_margin_loss
    multilabel_soft_margin_loss soft_margin_loss multi_margin_loss triplet_margin_loss triplet_margin_with_distance_loss""")
RESAMPLING_FP32 = names("""upsample upsample_nearest upsample_bilinear upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa""")
FP32 = (*POINTWISE_FP32, *REDUCTIONS_FP32, *LOSSES_FP32, *RESAMPLING_FP32)

LEAVES = (
    *POINTWISE_FP32,
    *names("softmax log_softmax sum prod cumsum cumprod logsumexp layer_norm group_norm rms_norm cross_entropy nll_loss mse_loss"),
)

WIDEST = names("addcdiv addcmul atan2 arctan2 cross bilinear dot vdot inner grid_sample grid_sampler index_put tensordot scatter_add")
# of WIDEST: sums, which are rounded once where all inputs are 16-bit
SUMS_OF_PRODUCTS = names("bilinear dot vdot inner grid_sample grid_sampler tensordot index_put scatter_add")
SUMS_BY_INDEX = ("index_add",)  # in no list of CUDA's; its 16-bit sums are rounded once here, and operands of two formats left to torch

LOW = names(
    """linear matmul mm bmm mv addmm addmv addr addbmm baddbmm einsum chain_matmul multi_dot vecdot prelu conv_tbc conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell"""
)
LOW_ON_CUDA_ONLY = names("mv addmv addr einsum chain_matmul multi_dot prelu gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
# torch's CPU list casts these up, and CUDA leaves them in the format of their input. Decompositions and transforms of torch.linalg and torch.fft are
# also among what only the CPU list casts up: those stay in fp32, since CUDA refuses most of them in 16 bits.
FP32_ON_CPU_ONLY = names(
    """avg_pool3d adaptive_avg_pool3d max_pool3d adaptive_max_pool3d max_pool3d_with_indices adaptive_max_pool3d_with_indices fractional_max_pool2d
    fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d pad
    trace"""
)
UNSAFE = ("binary_cross_entropy",)

INEXACT = names(  # what an fp32 island computes in fp32, besides the lists above: whatever rounds or can overflow
    """add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder lerp outer ger kron mean nanmean nansum
    std var std_mean var_mean diff gradient cov corrcoef trace det logdet slogdet inverse pinverse cholesky svd qr quantile nanquantile stft istft
    exp2 sqrt sin cos tanh sigmoid atan arctan asinh arcsinh acosh arccosh atanh arctanh sinc erf erfc lgamma digamma polygamma mvlgamma
    logaddexp logaddexp2 logcumsumexp xlogy hypot float_power ldexp i0 logit deg2rad rad2deg index_add scatter_reduce index_reduce
    matrix_power matrix_exp gelu silu mish elu selu celu glu leaky_relu rrelu hardswish hardsigmoid logsigmoid softsign tanhshrink softshrink
    interpolate dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout batch_norm instance_norm
    multi_head_attention_forward avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"""
)

WITH_STATE = ("batch_norm", "instance_norm")  # these write to their running_mean and running_var, which must not be a cast copy

_OPERATORS = {  # how an op is spelled with operators
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rtruediv__", "__rdiv__"),  # 1 / x
    "matmul": ("__matmul__", "__rmatmul__"),
    "add": ("__add__", "__radd__"),
    "sub": ("__sub__", "__rsub__"),
    "mul": ("__mul__", "__rmul__"),
    "div": ("__truediv__", "__rtruediv__", "__div__", "__rdiv__"),
    "floor_divide": ("__floordiv__", "__rfloordiv__"),
    "remainder": ("__mod__", "__rmod__"),
}
_SPACES: tuple[Any, ...] = (torch, F, Tensor, torch.special, torch.linalg, torch._C._nn)
_ROUTINES = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


@functools.cache
def forms(name: str) -> tuple[Callable[..., Any], ...]:
    """Every way in which users call the op `name`: torch.softmax, F.softmax, x.softmax, torch.special.softmax, and operators (x ** 2)."""
    found = [getattr(space, name, None) for space in _SPACES]
    found += [getattr(Tensor, operator, None) for operator in _OPERATORS.get(name, ())]
    return tuple(dict.fromkeys(f for f in found if isinstance(f, _ROUTINES)))


def every_form(listed: Iterable[str]) -> tuple[Callable[..., Any], ...]:
    """The forms of several ops."""
    return tuple(dict.fromkeys(form for name in listed for form in forms(name)))


@functools.cache
def inexact() -> tuple[Callable[..., Any], ...]:
    """The functions that an fp32 island computes in fp32: the lists above, INEXACT, and all of torch.special, torch.linalg and torch.fft."""
    whole = [getattr(space, name) for space in (torch.special, torch.linalg, torch.fft) for name in sorted(vars(space)) if name[0] != "_"]
    listed = every_form((*FP32, *WIDEST, *LOW, *UNSAFE, *INEXACT))
    return tuple(dict.fromkeys((*listed, *(f for f in whole if isinstance(f, _ROUTINES)))))


@functools.cache
def known() -> frozenset[str]:
    """The names that user lists may hold: ops of torch, torch.nn.functional, Tensor, torch.special and torch.linalg that a mode can see."""
    seen = set(inexact())
    for functions in torch.overrides.get_overridable_functions().values():
        seen.update(functions)
    public = {name for space in _SPACES[:5] for name in dir(space) if name[0] != "_" and name[-1] != "_"}
    return frozenset(name for name in public if any(form in seen for form in forms(name)))


@functools.cache
def check_lists(fp32_ops: tuple[str, ...], half_ops: tuple[str, ...]) -> None:
    """Refuse user lists that name no op, or one op twice. Raises ConfigError with the nearest name."""
    for key, given in (("fp32_ops", fp32_ops), ("half_ops", half_ops)):
        for name in given:
            if name not in known():
                close = suggest(name, known())
                raise ConfigError(
                    f"{key} has {name!r}, which is no op of torch, torch.nn.functional or Tensor",
                    close if close.startswith("Did") else "Write the name as in torch.softmax or x.softmax, without torch. and without x.",
                )
    both = sorted(set(fp32_ops) & set(half_ops))
    if both:
        raise ConfigError(f"{both[0]!r} stands in fp32_ops and in half_ops, and an op runs in one format", "Leave it out of one of them.")
