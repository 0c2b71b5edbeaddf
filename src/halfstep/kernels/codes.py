"""The numbers by which kernels know formats, storages and codecs; free of any compiler, so that those of all devices share them."""

from __future__ import annotations

import torch

from halfstep.numerics import BLOCK as BLOCK

FP32, BF16, FP16 = 0, 1, 2  # formats of weights and gradients
EXACT, SPLIT, SPLIT24, KAHAN, STOCHASTIC = 0, 1, 2, 3, 4  # storages; EXACT: fp32 as it is, or 16 bits with nothing beside them
STATE_FP32, STATE_BF16, STATE_INT8, STATE_NONE = 0, 1, 2, 3  # codecs; STATE_NONE: there is no such state

FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
STORAGES = {"fp32": EXACT, "plain": EXACT, "split": SPLIT, "split24": SPLIT24, "kahan": KAHAN, "stochastic": STOCHASTIC}
RESIDUALS = {"split": torch.int16, "split24": torch.int8}
ADAMW, SGD, LION = 0, 1, 2  # update rules
RULES = {"adamw": ADAMW, "sgd": SGD, "lion": LION}
