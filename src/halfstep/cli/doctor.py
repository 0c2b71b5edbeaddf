"""`halfstep doctor`: what this device can do, and what each preset takes in memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from halfstep.hardware import doctor
from halfstep.policy import PRESETS, bytes_per_parameter


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis for people, or as JSON."""
    parser = argparse.ArgumentParser(
        "halfstep doctor",
        description="Say what this device can do, natively or emulated, how fast, and which precision suits it. The first call measures it.",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: the one that would be trained on")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(argv)
    diagnosis = doctor(options.device)
    footprints = {name: bytes_per_parameter(policy) for name, policy in PRESETS.items()}
    if options.json:
        memory = {name: {"castable": f.castable.total, "other": f.other.total} for name, f in footprints.items()}
        print(json.dumps(diagnosis.as_dict() | {"bytes_per_parameter": memory}, indent=1))
        return 0
    print(diagnosis)
    print("\nmemory that AdamW trains in, without activations (castable: of products and convolutions only)")
    for name, footprint in footprints.items():
        print(f"  {name}: {footprint.text}")
    return 0
