"""Rank 0 saves a checkpoint alone: it must say who is missing instead of waiting for good."""

import sys
import time
from pathlib import Path

import torch

import halfstep
from halfstep.distributed import ranks
from halfstep.errors import ConfigError

ranks.MEETING = 1.0
accelerator = halfstep.Accelerator(cpu=True)
torch.manual_seed(0)
accelerator.prepare(torch.nn.Linear(2, 2))
if accelerator.is_main_process:
    try:
        accelerator.save_state(Path(sys.argv[1]) / "state")
    except ConfigError as error:
        print(f"refused: {error}", flush=True)
else:
    time.sleep(2.5)
