"""Faster twins of the plain definitions in `halfstep.numerics`, with the same bits."""

from halfstep.kernels.registry import activation_kernels as activation_kernels
from halfstep.kernels.registry import averaging_kernels as averaging_kernels
from halfstep.kernels.registry import bernoulli_kernels as bernoulli_kernels
from halfstep.kernels.registry import cpu_kernels as cpu_kernels
from halfstep.kernels.registry import cuda_kernels as cuda_kernels
from halfstep.kernels.registry import gelu_kernels as gelu_kernels
from halfstep.kernels.registry import kernels_for as kernels_for
from halfstep.kernels.registry import loss_kernels as loss_kernels
from halfstep.kernels.registry import weight_kernels as weight_kernels
