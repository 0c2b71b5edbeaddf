#!/usr/bin/env bash
# Measures halfstep on a GPU beside its peers, in under 8 minutes: benchmarks/gpu.sh [--out FILE] [--minutes 8] [--parts NAME ...] [--device cpu --small]
# Needs torch, numpy, safetensors, rich, pyyaml, transformers and accelerate; --install fetches what is missing, peers' optimizers too.
# PYTHON names the interpreter. Prints one line a part; the numbers are in FILE (benchmarks/results/gpu.json), which is whole after every part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
