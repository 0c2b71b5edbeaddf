"""The settings of how a run uses the machine: number formats, memory and speed, several ranks. Only fields; checks.py checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class PrecisionFields:
    """Precision: number formats, and what becomes of steps that they do not hold.

    Args:
        fp16: the same as precision=fp16-mixed.
        bf16: the same as precision=bf16-mixed.
        tf32: fp32 products on the GPU in tf32; refused where the device has none.
        precision: a policy such as bf16-mixed or "fp16-mixed,scale=static:1024,fp32=lm_head".
        weights: how 16-bit weights are stored: split, split24, kahan, stochastic or plain; the precision's own way when not given.
        states: format of the optimizer's moments: fp32, bf16 or int8; the precision's own when not given.
        activations: what is kept for the backward pass: full, or in 8 bits (int8, fp8) with half of the memory and gradients that are off by about
            1 or 4 percent at random; the precision's own when not given.
        fp32_modules: names or patterns (*.norm*) of modules that are held in fp32.
        loss_scale: fp16's loss scale: dynamic, dynamic:START, static:SCALE or none; dynamic when not given.
        scale_strategy: how a dynamic scale moves: follow the gradients, or torch's stock rule.
        scale_window: good steps before a dynamic scale grows.
        scale_floor: the lowest loss scale, a power of two.
        scale_ceiling: the highest loss scale, a power of two.
        on_overflow: what follows when fp16 gradients overflow: "replay" the step's micro-batches at a lower loss scale, "skip" the
            step, or "raise" StepRefusedError.
        heal: what follows when a module's outputs do not fit 16 bits: "pin" holds it in fp32 from then on, runs the step again, and writes the
            module to rules.yaml; "skip" the step, naming the module; or "raise" StepRefusedError.
        rules: a rules.yaml of an earlier run: its modules are held in fp32 from the start. Not given: with
            heal="pin" that of output_dir, if there is one (overwrite_output_dir leaves it there; remove it to begin without).
        plan: a plan.yaml that halfstep plan wrote (or a halfstep.Plan): its precision, the modules that it holds in fp32, and its loss scale.
        max_bad_steps: so many steps in a row that could not be applied end the run with DivergedError.
    """

    fp16: bool = False
    bf16: bool = False
    tf32: bool | None = None
    precision: str | None = None
    weights: Literal["fp32", "split", "split24", "kahan", "stochastic", "plain"] | None = None
    states: Literal["fp32", "bf16", "int8"] | None = None
    activations: Literal["full", "int8", "fp8"] | None = None
    fp32_modules: list[str] | None = None
    loss_scale: str | None = None
    scale_strategy: Literal["follow", "stock"] | None = None
    scale_window: int | None = None
    scale_floor: float | None = None
    scale_ceiling: float | None = None
    on_overflow: Literal["replay", "skip", "raise"] = "replay"
    heal: Literal["pin", "skip", "raise"] = "pin"
    rules: str | None = None
    plan: dict[str, Any] | str | None = None
    max_bad_steps: int = 50


@dataclass(frozen=True)
class PerformanceFields:
    """Performance: less memory or less time for the same numbers.

    Args:
        gradient_checkpointing: keep fewer activations and compute them again in the backward pass.
        gradient_checkpointing_kwargs: further arguments of it, such as {"use_reentrant": False}.
        torch_compile: compile the model.
        torch_compile_backend: torch.compile's backend; inductor when not given.
        torch_compile_mode: torch.compile's mode: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs.
        use_liger_kernel: the fused kernels of liger-kernel, on GPUs.
        gradient_release: update each weight inside the backward pass, as soon as its gradient is there, and free the gradient: less memory. How it
            clips to max_grad_norm, since the norm over all gradients comes too late: last multiplies by what the norm of the last good step needed;
            per_parameter clips each gradient by itself. True is last; with max_grad_norm=0 nothing is clipped.
    """

    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    gradient_release: Literal["no", "last", "per_parameter"] = "no"


@dataclass(frozen=True)
class DistributedFields:
    """Distributed: several ranks under torchrun.

    Args:
        reduce_dtype: the format in which gradients travel between ranks; that of the gradients when not given.
        ddp_backend: what carries tensors between ranks; nccl on GPUs and gloo on CPUs when not given.
        ddp_timeout: seconds before a rank that does not answer ends the run.
        ddp_find_unused_parameters: look in every step for parameters that the loss does not depend on; when not given, not.
        ddp_bucket_cap_mb: gradients travel in parcels of so many MiB; 25 when not given.
        ddp_broadcast_buffers: send the first rank's buffers to all before each forward pass; when not given, as torch does.
        ddp_static_graph: promise that every step uses the same parameters in the same order.
    """

    reduce_dtype: Format | None = None
    ddp_backend: Literal["nccl", "gloo", "mpi"] | None = None
    ddp_timeout: int = 1800
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
