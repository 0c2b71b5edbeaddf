"""`halfstep doctor`: what this device can do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from halfstep.hardware import doctor


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis for people, or as JSON."""
    parser = argparse.ArgumentParser(
        "halfstep doctor", description="Say what this device can do, natively or emulated, and which precision suits it."
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: the one that would be trained on")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(argv)
    diagnosis = doctor(options.device)
    print(json.dumps(diagnosis.as_dict(), indent=1) if options.json else diagnosis)
    return 0
