"""The presets as a table, from the values themselves."""

from __future__ import annotations

from halfstep.policy.memory import bytes_per_parameter, cell
from halfstep.policy.policy import PRESETS, SUMMARY

FLAGS = {"tf32": "`tf32=True`", "bf16-mixed": "`bf16=True`", "fp16-mixed": "`fp16=True`"}


def preset_table() -> str:
    """A Markdown table of the presets, with the bytes that AdamW takes: of castable / other weights where these differ."""
    rows = ["| preset | flag | products | weights | states | bytes per weight, AdamW | tf32 | loss scale | in words |", "|---" * 9 + "|"]
    for name, p in PRESETS.items():
        scale = "none" if p.scale.kind == "none" else f"{p.scale.kind}, from {p.scale.init:.0f}"
        cells = [f"`{name}`", FLAGS.get(name, ""), p.autocast, p.weights, p.states, cell(bytes_per_parameter(p)), "on" if p.tf32 else "off", scale]
        rows.append(f"| {' | '.join([*cells, SUMMARY[name]])} |")
    return "\n".join(rows)
