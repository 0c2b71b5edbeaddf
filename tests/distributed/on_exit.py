"""A run that ends while a sum over ranks is still on its way, and whose thread then waits for the interpreter as it shuts down."""

from __future__ import annotations

import atexit
import ctypes
import os
import time

rank = int(os.environ["RANK"])
if rank == 0:  # the last of what runs at exit keeps the interpreter to itself until the sum is there
    atexit.register(ctypes.PyDLL(None).usleep, 1_500_000)

import torch  # noqa: E402

import halfstep  # noqa: E402


class Slow:
    """What a module ends with: the interpreter is free meanwhile."""

    def __del__(self, wait=time.sleep) -> None:  # type: ignore[no-untyped-def]
        wait(0.5)


slow = Slow()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
accelerator = halfstep.Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()  # imports the compiler, which imports whatever keeps groups
total = torch.ones(4)
accelerator.wait_for_everyone()
if rank == 0:
    torch.distributed.all_reduce(total, async_op=True)
    del total
else:
    time.sleep(1.0)
    torch.distributed.all_reduce(total)
    time.sleep(2.0)
