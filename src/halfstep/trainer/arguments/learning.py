"""The settings of what is learnt and how: optimizer, schedule, the loss and the model. Only fields; checks.py checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class OptimizerFields:
    """Optimizer: the rule of the updates.

    Args:
        optim: auto, adamw_torch_fused, adamw_torch, adamw_halfstep (halfstep.optim.AdamW), sgd, lion, adafactor, rmsprop, adagrad, or any class of
            optimizers: the class or its name such as torch.optim.NAdam. auto is adamw_torch_fused for fp32 weights and states, adamw_halfstep for
            16-bit weights or other states, and so is sgd torch's or halfstep.optim.SGD. A torch optimizer is wrapped where weights or states need it.
        optim_args: further arguments of the optimizer: a dict, or text such as "momentum=0.9,nesterov=True".
        learning_rate: at its highest, after warm-up.
        weight_decay: not on biases and norms. Decoupled in AdamW, Lion and Adafactor; part of the gradient in SGD, RMSprop and Adagrad.
        adam_beta1: decay of the first moment of AdamW and Lion.
        adam_beta2: decay of AdamW's second moment; of Lion's moment.
        adam_epsilon: AdamW's epsilon.
        max_grad_norm: clip unscaled gradients to this norm; 0 for no clipping.
    """

    optim: str = "auto"
    optim_args: dict[str, Any] | str | None = None
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class ScheduleFields:
    """Schedule: the learning rate over the run. It advances with applied steps.

    Args:
        lr_scheduler_type: the course of the learning rate after warm-up.
        lr_scheduler_kwargs: further arguments of the schedule, such as {"num_cycles": 2}: a dict, or text such as "num_cycles=2".
        warmup_steps: steps over which the learning rate rises from 0; below 1, a share of all steps.
        warmup_ratio: the same as a share of all steps.
    """

    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = "linear"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0


@dataclass(frozen=True)
class AverageFields:
    """Average: an exponential moving average of the weights, in fp32 (halfstep.ema).

    Args:
        ema_decay: how much of the average stays at each applied step, such as 0.999; none when not given. 4 bytes per trained weight.
        ema_warmup: a lower decay at first: ratio, at most (1 + n) / (10 + n) after n steps; power, at most 1 - (1 + n)^(-2/3); or none.
        ema_in_evaluation: evaluate, predict and save_model take the average, it decides on the best model, and it is what the model has
            after train(); otherwise all of these take the trained weights, and trainer.average has it.
    """

    ema_decay: float | None = None
    ema_warmup: Literal["none", "ratio", "power"] = "none"
    ema_in_evaluation: bool = True


@dataclass(frozen=True)
class LossFields:
    """Loss and regularisation.

    Args:
        label_smoothing_factor: share of each label that is spread over all classes.
        neftune_noise_alpha: size of the noise on embeddings during training (NEFTune, arXiv:2310.05914); none when not given.
        chunked_loss: the loss of a causal language model without all its logits in memory: off; on; or auto, where the model is known.
    """

    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None
    chunked_loss: Literal["off", "auto", "on"] = "off"
