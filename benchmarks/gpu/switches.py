"""fp32 products with tf32 on and off: how exact, how fast, and whether torch's switches are where they were afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.gpu import models
from benchmarks.gpu.contenders import fused, prepared
from benchmarks.gpu.measure import compared, in_turns
from benchmarks.gpu.setting import Setting, error_text
from halfstep import Accelerator
from halfstep.errors import HalfstepError


def state() -> dict[str, Any]:
    """Where the switches stand."""
    backends: Any = torch.backends
    parts = {"matmul": backends.cuda.matmul, "conv": backends.cudnn.conv, "rnn": backends.cudnn.rnn, "mkldnn": backends.mkldnn.matmul}
    return {"precision": torch.get_float32_matmul_precision(), "cudnn": backends.cudnn.allow_tf32} | {k: p.fp32_precision for k, p in parts.items()}


class _Look:
    """Notes the switches as they are inside the forward pass of a model, until it leaves."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.leave = lambda: None

    def at(self, net: nn.Module) -> Any:
        """Look at this model from now on. Returns its optimizer."""
        part = net.get_submodule("transformer.h.0.mlp.c_fc")
        self.leave = part.register_forward_pre_hook(self).remove
        return fused(net)

    def __call__(self, *_: Any) -> None:
        self.seen = state()


def run(setting: Setting) -> None:
    """The part `tf32`."""
    runners: dict[str, Any] = {}
    for precision in ("fp32", "tf32"):
        before, look = state(), _Look()
        try:
            accelerator = Accelerator(precision=precision, cpu=not setting.is_cuda)
            made = prepared(accelerator, "gpt2-124m", setting, look.at)
        except HalfstepError as refusal:
            setting.add("refused", precision, error_text(refusal))
            continue
        made.run(2)
        look.leave()
        setting.add("switches", precision, {"inside": look.seen, "put_back": state() == before, "error": _error(accelerator, setting)})
        runners[precision] = made
    if len(runners) == 2:
        taken = in_turns(runners, dict.fromkeys(runners, 2 if setting.small else 4), setting.rounds)
        tokens = models.size_of("gpt2-124m", setting.small)
        setting.tell(tokens_per_step=tokens["batch"] * tokens["length"], **compared(taken, None, ("fp32",), ("tf32",)))
    for made in runners.values():
        made.close()


def _error(accelerator: Accelerator, setting: Setting) -> float:
    """The largest relative error of a product in the accelerator's block: about 1e-7 exact, 1e-4 to 1e-3 in tf32."""
    size = 64 if setting.small else 1024
    a, b = (torch.randn(size, size, device=setting.device) for _ in range(2))
    with accelerator.autocast():
        found = a @ b
    exact = a.double() @ b.double()
    return float((found - exact).abs().max() / exact.abs().max())
