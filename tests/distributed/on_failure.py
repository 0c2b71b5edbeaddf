"""The backward pass of rank 1 fails, with gradients released or not: rank 0 must get an error at once, and not wait for the timeout."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep.distributed import DataParallel

folder, released = Path(sys.argv[1]), sys.argv[2] == "released"
accelerator = halfstep.Accelerator(cpu=True, data_parallel=DataParallel(bucket_cap_mb=1e-4, timeout=600))
torch.manual_seed(0)
model, optimizer = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), None
model, optimizer = accelerator.prepare(model, halfstep.optim.AdamW(model.parameters()))
if released:
    accelerator.release(optimizer)


def fail(gradient: torch.Tensor) -> None:
    raise ValueError("rank 1 has had enough")


for step in range(3):
    if step == 1 and accelerator.process_index == 1:
        model[1].weight.register_hook(fail)
    began = time.perf_counter()
    try:
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
    except RuntimeError as error:
        (folder / "seen").write_text(f"{step} {time.perf_counter() - began:.1f} {type(error).__name__}")
        break
    except ValueError:
        dist.destroy_process_group()  # as the end of the process does it; torchrun would end the others before they see
        time.sleep(3)
        raise
    optimizer.step()
    optimizer.zero_grad()
