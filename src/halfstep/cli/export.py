"""`halfstep export CHECKPOINT --dtype bf16 --output FOLDER`: the model of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halfstep.checkpoint import export
from halfstep.policy import DTYPES


def main(argv: Sequence[str]) -> int:
    """Write the folder and say where."""
    parser = argparse.ArgumentParser(
        "halfstep export",
        description="Write the model of a checkpoint as model.safetensors (and config.json for a transformers model), "
        "each weight rounded once from its fp32 master.",
    )
    parser.add_argument("checkpoint", help="a checkpoint-STEP folder of a run, or one that Accelerator.save_state wrote")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="format of the weights written (default: fp32)")
    parser.add_argument("--weights", choices=("trained", "average"), default="trained", help="the weights, or their average (ema_decay)")
    parser.add_argument("--max_shard_size", default="10GB", help="largest file, such as 5GB; more become several with an index (default: 10GB)")
    parser.add_argument("--output", required=True, help="a new folder")
    options = parser.parse_args(argv)
    written = export(options.checkpoint, options.output, options.dtype, options.max_shard_size, options.weights)
    print(f"wrote {written} in {options.dtype}")
    return 0
