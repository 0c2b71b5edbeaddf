"""Two processes that share verdicts through torch.distributed: they step together or not at all, and keep one scale."""

import json
import os
import socket
import subprocess
import sys

import pytest

WORKER = """
import json, sys
import torch
import torch.distributed as dist
import torch.distributed.nn  # keeps the group that there is at its import, and gloo's threads with it: before there is one
from halfstep.amp import GradScaler

rank, port, strategy = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def largest(tensor):
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


shard = torch.nn.Parameter(torch.ones(2))  # each rank owns one
optimizer = torch.optim.SGD([shard], lr=0.1)
scaler = GradScaler(init_scale=2.0**20, strategy=strategy, agree=largest)
told = []
for step in range(6):
    fp16_like = shard * (1.0 if rank == 0 else 3.0)
    loss = (fp16_like.half() * (30000.0 if rank == 0 and step == 3 else 1.0)).float().sum()
    if step == 4 and rank == 1:
        loss = loss * float("nan")
    scaler.scale(loss).backward()
    result = scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    told.append([result.applied, result.reason, result.scale, [c.name for c in result.culprits]])
print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("strategy", ["follow", pytest.param("stock", marks=pytest.mark.slow)])
def test_two_ranks_step_together_and_keep_one_scale(strategy: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), port, strategy], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    one, other = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert [step[:3] for step in one] == [step[:3] for step in other]
    assert [step[0] for step in one][:3] == [True, True, True] if strategy == "follow" else not one[0][0]
    assert [step[1] for step in one][4] == "nonfinite-loss"
    assert "loss" in other[4][3]
    if strategy == "follow":  # the scale fits, so this rank's own gradients are good
        assert one[4][3] == ["another rank"]
