"""What scripts ask the arguments about the process they run in: its device, its number among the ranks."""

from __future__ import annotations

import os

import torch

from halfstep.hardware import default_device, processes


class Here:
    """The process at hand, under the names of transformers' arguments; read from the machine and torchrun's environment when asked."""

    use_cpu: bool

    @property
    def device(self) -> torch.device:
        """The device to train on: the CPU with use_cpu or without a GPU; under torchrun the GPU of this rank."""
        device = default_device(self.use_cpu)
        return torch.device("cuda", self.local_process_index) if device.type == "cuda" and processes() > 1 else device

    @property
    def n_gpu(self) -> int:
        """GPUs that this process trains on: 0 or 1."""
        return int(self.device.type == "cuda")

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return processes()

    @property
    def process_index(self) -> int:
        """The number of this process among them."""
        return _number("RANK")

    @property
    def local_process_index(self) -> int:
        """The number of this process on its machine."""
        return _number("LOCAL_RANK")

    @property
    def should_save(self) -> bool:
        """Whether this process writes checkpoints."""
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        """Whether this process writes logs."""
        return self.process_index == 0


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isdigit() else 0
