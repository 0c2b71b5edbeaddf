"""What happened in a step, told for people: one sentence, what it means, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfstep.diagnostics.records import LayerNumbers, LayerSample, RunEvent
from halfstep.numerics import FORMATS
from halfstep.step import StepResult

STALLED = 0.5  # share of updates rounded away from which on it is an event
CLOSE, AGAIN = 1, 2  # powers of two below the limit: what is above the first is close, and must fall below the second to be told again
NAMED = 3  # culprits in a sentence

WHY = {
    "overflow": "A gradient was inf, NaN or above 2^60. Nothing was changed: neither weights nor states nor running statistics. Single steps of this "
    "kind come with a rising loss scale and cost one batch each; many in a row with the same culprit mean that its gradients grow: lower the "
    "learning rate, clip (max_grad_norm), or hold that module in fp32 (fp32=MODULE in the precision).",
    "forward-overflow": "The outputs of this module do not fit 16 bits, and would fit fp32; the loss scale has no part in it. Hold the module in "
    "fp32 (fp32=MODULE in the precision, or heal='pin'), or use bf16, which has fp32's range.",
    "nonfinite-loss": "The loss itself was inf or NaN, so its gradients mean nothing and the step was refused. Look at the batch (inputs and labels "
    "that are not finite, empty targets) and at logarithms, divisions and roots in the model; halfstep.trace(model, batch) names the op.",
    "unguarded": "The loss itself was inf or NaN, and this loop has nothing that refuses such a step: weights may be NaN from here on. "
    "Look at the batch, and at logarithms, divisions and roots in the model; halfstep.trace(model, batch) names the op. "
    "halfstep's scaler refuses such a step.",
    "untold": "A scale that falls tells that a step was skipped, and the first one has none to fall from. Give the recorder the scaler: "
    "source=scaler.",
    "partly": "Gradients are released one by one: those that were found bad kept their parameters as they were, others had been updated before. "
    "Lower the learning rate or the loss scale if it comes again.",
    "replayed": "Its gradients did not fit at the higher loss scale, and the same batch was computed again at a lower one: no step is lost, only the "
    "time of the repeated passes. More than one in a hundred steps points to spikes: clip (max_grad_norm) or lower the learning rate.",
    "pinned": "The values of this module did not fit 16 bits, so it is held in fp32 from now on (slower, right). rules.yaml in the run folder has it "
    "for the next run.",
    "raised": "Gradients have stayed far from fp16's limit, so they are scaled up, which saves small ones from underflow. Nothing to do.",
    "lowered": "Scaled gradients came close to fp16's largest number or beyond it. A scale that falls all the time means gradients that grow.",
    "calibrated": "The first backward pass was probed, and the scale chosen so that its gradients fit fp16 with head room. Nothing to do.",
    "close": "Where these numbers double they overflow. Hold the module in fp32 (fp32=MODULE in the precision), or use bf16, which has fp32's range.",
    "stalled": "That share of the updates was smaller than half of the spacing of the stored weights and was lost. Store weights with what they lose "
    "(weights=split or kahan in the precision), raise the learning rate, or keep fp32 weights.",
    "diverged": "Too many steps in a row could not be applied. None of them has changed the weights. The message of the error has the culprit and "
    "three remedies in order.",
    "checkpoint": "The run can go on from here, to the same bits.",
    "resumed": "Lines after the checkpoint, of steps that were given up, were dropped.",
    "interrupted": "Ctrl-C: the step at hand was finished. trainer.train(resume_from_checkpoint=True) or halfstep train --resume goes on.",
    "unpredicted": "The step is walked through on shapes alone, which this model does not allow; memory.json has what was measured.",
    "thinned": "layers.jsonl is kept small: every second sample was removed, and samples are taken half as often from now on.",
    "released": "Gradients are used up one by one inside the backward pass (gradient release) and are gone when the step is judged.",
}


def of_step(result: StepResult, number: int, scale: float | None, initial: float | None) -> list[RunEvent]:
    """The events of one step.

    number: of the step among the applied ones. scale: the loss scale after the step before it, None for the first. initial: the one that the run was
    begun with; None where losses are not scaled.
    """
    found = []
    if result.replays:
        times = f"{result.replays} more time{'s' if result.replays > 1 else ''}"
        ended = f"and passed at a loss scale of {result.scale:g}" if result else f"down to a loss scale of {result.scale:g}, and did not pass"
        found.append(RunEvent(number, "replayed", f"step {number} was computed {times}, {ended}", WHY["replayed"]))
    if result.pinned:
        found.append(RunEvent(number, "pinned", f"{_some(result.pinned)} held in fp32 from step {number} on", WHY["pinned"], result.pinned))
    if result.reason in ("overflow", "forward-overflow", "nonfinite-loss", "partly"):
        found.append(_refused(result, number))
    if initial is None:
        return found
    before = result.scale if scale is None else scale
    if scale is None and initial != before:
        found.append(RunEvent(number, "calibrated", f"the loss scale was calibrated from {initial:g} to {before:g}", WHY["calibrated"]))
    if result.next_scale != before:
        up = result.next_scale > before
        text = f"the loss scale {'rose' if up else 'fell'} from {before:g} to {result.next_scale:g}"
        found.append(RunEvent(number, "scale", text, WHY["raised" if up else "lowered"]))
    return found


def _refused(result: StepResult, number: int) -> RunEvent:
    names = tuple(c.name for c in result.culprits)
    blamed = _some([str(c) for c in result.culprits]) or "it was not told which"
    said = f"; {result.detail}" if result.detail else ""
    if result.reason == "nonfinite-loss":
        return RunEvent(number, "nonfinite-loss", f"step {number} was skipped: its loss is not finite: {blamed}{said}", WHY["nonfinite-loss"], names)
    what = {"overflow": "gradients not fit to be used", "forward-overflow": "outputs beyond 16 bits", "partly": "some gradients not fit to be used"}
    how = "was applied in part" if result.reason == "partly" else "was skipped"
    return RunEvent(number, "skipped", f"step {number} {how}: {what[result.reason]}: {blamed}{said}", WHY[result.reason], names)


class Alarms:
    """What was close to a limit at the last sample, so that it is told once and not at every sample."""

    def __init__(self) -> None:
        self._close: dict[str, set[str]] = {}
        self._stalled = False

    def close(self, samples: Sequence[LayerSample]) -> list[RunEvent]:
        """Events of tensors that have come within a factor of 2 of the limit of their format. Not of scaled gradients, which the scale follows."""
        found = []
        samples = [s for s in samples if s.scale == 1.0]
        for kind in dict.fromkeys(s.kind for s in samples):
            known = self._close.get(kind, set())
            seen = {name: (n, s.format) for s in samples if s.kind == kind for name, n in s.layers.items() if _is_within(n, s.format, AGAIN)}
            fresh = {name: value for name, value in seen.items() if name not in known and _is_within(*value, CLOSE)}
            self._close[kind] = {name for name in seen if name in known or name in fresh}
            if fresh:
                worst = sorted(fresh, key=lambda name: -fresh[name][0].log2max)
                told = [f"{name or 'the model'} at 2^{fresh[name][0].log2max:.1f} of {fresh[name][1]}'s {_limit(fresh[name][1]):g}" for name in worst]
                found.append(RunEvent(samples[0].step, "close", f"{kind} close to the limit: {_some(told)}", WHY["close"], tuple(worst)))
        return found

    def state_dict(self) -> dict[str, Any]:
        """What was close, and whether updates stalled, as plain values."""
        return {"close": {kind: sorted(names) for kind, names in self._close.items()}, "stalled": self._stalled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._close, self._stalled = {kind: set(names) for kind, names in state["close"].items()}, bool(state["stalled"])

    def stalled(self, step: int, share: float) -> list[RunEvent]:
        """An event when half of the updates or more have begun to round away."""
        begun, self._stalled = share >= STALLED and not self._stalled, share >= STALLED
        return [RunEvent(step, "stalled", f"{share:.0%} of the updates of step {step} were rounded away", WHY["stalled"])] if begun else []


def _is_within(numbers: LayerNumbers, form: str, powers: int) -> bool:
    return numbers.log2max >= math.log2(_limit(form)) - powers and not math.isnan(numbers.log2max)


def _limit(form: str) -> float:
    return FORMATS[form].largest


def _some(names: Iterable[str]) -> str:
    """The first three, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:NAMED]) + (f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "")
