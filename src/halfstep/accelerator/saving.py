"""Checkpoints of a run, and models for use elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep import checkpoint
from halfstep.accelerator.decided import go_on_with
from halfstep.accelerator.preparing import Preparing
from halfstep.accelerator.saved import adopt_all, facts_to_export, kinds_of, masters_beside, pin_as_saved, refuse_state
from halfstep.amp import bound_policy, convert, layout, model_state
from halfstep.errors import ConfigError, StepOrderError


class Saving(Preparing):
    """What an accelerator writes and reads."""

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep objects with `state_dict` and `load_state_dict` in the checkpoints too."""
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ConfigError(f"a {type(item).__name__} has no state_dict and load_state_dict", "Give it both.")
            self._registered.append(item)

    def _parts(self) -> dict[str, Any]:
        """Everything with a state, by the name of its part in a checkpoint."""
        kinds = (
            ("model", [self.unwrap_model(m) for m in self._models]),
            ("optimizer", self._optimizers),
            ("scheduler", self._schedulers),
            ("custom", self._registered),
        )
        return {name if i == 0 else f"{name}_{i}": item for name, items in kinds for i, item in enumerate(items)}

    def save_state(self, output_dir: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write models, optimizers, schedulers, loss scale, random states and registered objects; atomic. Returns the folder.

        about: plain values of your own for the checkpoint's manifest.json.
        """
        if self._micro_batches:
            done = f"after {self._micro_batches} of {self.gradient_accumulation_steps} micro-batches"
            raise StepOrderError(
                f"save_state() was called inside an accumulation window, {done}, and gradients are not part of a checkpoint",
                "Call it after the window's optimizer.step(): when accelerator.sync_gradients is true.",
            )
        self.scaler.get_scale()  # learns the verdicts that are still on the device: states follow them
        items = self._parts()
        parts = {name: item.state_dict() for name, item in items.items()} | {
            "scaler": {"bad_steps": self.scaler.bad_steps, "steps": self.scaler.steps} | self.scaler.state_dict(),
            "watch": self.scaler.watch_state([o.optimizer for o in self._optimizers]),
            "random": {"ranks": [checkpoint.capture()]},
        }
        own = {"policy": str(self.policy), "kinds": kinds_of(items), "versions": dict(self.resolution.device.versions)}
        own["products"] = self._products.settled(self.policy, self.device)
        models = {name: item for name, item in items.items() if isinstance(item, nn.Module)}
        masters = masters_beside(models, self._optimizers)
        own["models"] = {name: facts_to_export(name, item, self._optimizers, masters) for name, item in models.items()}
        parts |= {"masters": masters} if masters else {}
        folder = checkpoint.save(output_dir, parts, dict(about or {}) | own)
        self.scaler.note_checkpoint(str(folder))
        return folder

    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights of a prepared model for use elsewhere: each in the dtype that it was loaded in, rounded from its fp32 master."""
        state: dict[str, Tensor] = model_state(self.unwrap_model(model))
        return state

    def save_model(self, model: nn.Module, save_directory: str | Path) -> None:
        """Write a prepared model alone into a folder, weights as in `get_state_dict`.

        By its own `save_pretrained` where it has one, else as model.safetensors.
        """
        checkpoint.write_model(self.unwrap_model(model), Path(save_directory), self.get_state_dict(model))

    def load_state(self, input_dir: str | Path) -> None:
        """Put everything back as it was saved. Checked first: a checkpoint that does not fit changes nothing.

        Raises CheckpointError when it is truncated, made under another policy, or for other models.
        """
        loaded = checkpoint.load(input_dir)
        parts = self._parts()
        refuse_state(loaded, parts, self.policy)
        go_on_with(loaded, self.policy, self.device, self._products, self._models)
        for name, item in parts.items():
            if isinstance(item, nn.Module):
                about = loaded.about.get("models", {}).get(name, {})
                self._lay_out(item, about.get("layout"))
                pin_as_saved(item, about.get("pins", []))
            item.load_state_dict(loaded.parts[name])
            if isinstance(item, nn.Module):
                adopt_all(item, loaded.parts.get("masters", {}).get(name, {}))
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(loaded.parts["scaler"])
        self.scaler.bad_steps, self.scaler.steps = (int(loaded.parts["scaler"].get(name, 0)) for name in ("bad_steps", "steps"))
        if "watch" in loaded.parts:
            self.scaler.load_watch_state(loaded.parts["watch"], [o.optimizer for o in self._optimizers])
        self._micro_batches = 0
        checkpoint.restore(loaded.parts["random"]["ranks"][0])
        self.scaler.note_checkpoint(str(input_dir))

    def _lay_out(self, model: nn.Module, saved: Mapping[str, Any] | None) -> None:
        """Before a state is loaded: the weights that were 16-bit in the run that saved it are so here too, whatever the first batch would show."""
        if saved is not None and bound_policy(model) is not None and layout(model)["16bit"] != saved["16bit"]:
            convert(model, self.policy, saved["16bit"])
