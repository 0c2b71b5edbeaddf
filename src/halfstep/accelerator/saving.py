"""Checkpoints of a run, and models for use elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep import checkpoint
from halfstep.accelerator.decided import go_on_with
from halfstep.accelerator.folders import count_on, folder_to_load, folder_to_save, keep_newest, write_object
from halfstep.accelerator.prepared import SkippingLoader, skip_first_batches, take_places
from halfstep.accelerator.preparing import Preparing
from halfstep.accelerator.saved import adopt_all, facts_to_export, kinds_of, masters_beside, pin_as_saved, refuse_state
from halfstep.amp import bound_policy, convert, layout, model_state
from halfstep.distributed import on_main
from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import EMA

logger = logging.getLogger("halfstep")


class Saving(Preparing):
    """What an accelerator writes and reads."""

    def register_for_checkpointing(self, *objects: Any) -> tuple[str, ...]:
        """Keep objects with `state_dict` and `load_state_dict` in the checkpoints too. Returns the names of their parts there."""
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ConfigError(f"a {type(item).__name__} has no state_dict and load_state_dict", "Give it both.")
        first = len(self._registered)
        self._registered.extend(objects)
        return tuple(_numbered("custom", i) for i in range(first, len(self._registered)))

    def _parts(self) -> dict[str, Any]:
        """Everything with a state, by the name of its part in a checkpoint."""
        kinds = (
            ("model", [self.unwrap_model(m) for m in self._models]),
            ("optimizer", self._optimizers),
            ("scheduler", self._schedulers),
            ("custom", self._registered),
        )
        return {_numbered(name, i): item for name, items in kinds for i, item in enumerate(items)}

    def register_save_state_pre_hook(self, hook: Callable[[list[nn.Module], list[dict[str, Tensor]], str], object]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` at each `save_state`, to write files of your own into the folder.

        It is called when the checkpoint is whole. models: the prepared ones; weights: a state dict of each (`get_state_dict`). What a hook removes
        from these lists stays in the checkpoint. The handle's `remove()` ends it.
        """
        return _add(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[[list[nn.Module], str], object]) -> RemovableHandle:
        """Call `hook(models, input_dir)` at each `load_state`, before anything is put back. The handle's `remove()` ends it."""
        return _add(self._load_hooks, hook)

    @property
    def project_dir(self) -> str | Path | None:
        """The folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """The folder of trackers that write files."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    def save_state(self, output_dir: str | Path | None = None, about: Mapping[str, Any] | None = None, *, safe_serialization: bool = True) -> Path:
        """Write models, optimizers, schedulers, loss scale, random states and registered objects; atomic. Returns the folder.

        output_dir: its folder; left out with automatic_checkpoint_naming (`ProjectConfiguration`), which numbers folders and keeps total_limit of
        them. about: plain values of your own for the checkpoint's manifest.json. All ranks call it, and rank 0 writes.
        """
        _refuse_pickle(safe_serialization)
        folder = folder_to_save(self.project_configuration, output_dir)
        if self._micro_batches:
            done = f"after {self._micro_batches} of {self.gradient_accumulation_steps} micro-batches"
            raise StepOrderError(
                f"save_state() was called inside an accumulation window, {done}, and gradients are not part of a checkpoint",
                "Call it after the window's optimizer.step(): when accelerator.sync_gradients is true.",
            )
        self.ranks.meet("save_state()")
        self.scaler.get_scale()  # learns the verdicts that are still on the device: states follow them
        items = self._parts()
        parts = {name: item.state_dict() for name, item in items.items()} | {
            "scaler": {"bad_steps": self.scaler.bad_steps, "steps": self.scaler.steps} | self.scaler.state_dict(),
            "watch": self.scaler.watch_state([o.optimizer for o in self._optimizers]),
            "random": {"ranks": self.ranks.gather_object(checkpoint.capture())},
        }
        if self._loaders:
            parts["loaders"] = {"ranks": self.ranks.gather_object([loader.state_dict() for loader in self._loaders])}
        own = {"policy": str(self.policy), "kinds": kinds_of(items), "versions": dict(self.resolution.device.versions)}
        own |= {"device": self.device.type, "products": self._products.settled(self.policy, self.device)}
        models = {name: item for name, item in items.items() if isinstance(item, nn.Module)}
        masters = masters_beside(models, self._optimizers)
        own["models"] = {name: facts_to_export(name, item, self._optimizers, masters) for name, item in models.items()}
        parts |= {"masters": masters} if masters else {}
        folder = self._write(folder, parts, dict(about or {}) | own)
        self.scaler.note_checkpoint(str(folder))
        for hook in self._save_hooks.values():
            hook(list(self._models), [self.get_state_dict(model) for model in self._models], str(folder))
        self.project_configuration.iteration += 1
        if self.ranks.is_main:
            keep_newest(self.project_configuration)
        return folder

    def _write(self, output_dir: str | Path, parts: dict[str, Any], about: dict[str, Any]) -> Path:
        """Rank 0 writes and the others wait for it. Where it cannot, all raise the same."""
        return on_main(self.ranks, lambda: checkpoint.save(output_dir, parts, about))

    def get_state_dict(self, model: nn.Module, *, average: EMA | None = None) -> dict[str, Tensor]:
        """The weights of a prepared model for use elsewhere: each in the dtype that it was loaded in, rounded from its fp32 master.

        average: an average of its weights (`halfstep.ema`), taken instead of them.
        """
        state: dict[str, Tensor] = model_state(self.unwrap_model(model), average.values() if average is not None else {})
        return state

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object in the main process, by `torch.save`; safe_serialization: a mapping of tensors as safetensors. Whole or not at all."""
        if self.ranks.is_main:
            write_object(obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        average: EMA | None = None,
    ) -> None:
        """Write a prepared model alone into a folder, weights as in `get_state_dict`, those of an `average` if one is given.

        By its own `save_pretrained` where it has one, else as model.safetensors. max_shard_size: bytes, or text such as "5GB", of the largest file.
        """
        _refuse_pickle(safe_serialization)
        model = self.unwrap_model(model)
        if self.ranks.is_main:  # without a word to the others: scripts call it under is_main_process too
            checkpoint.write_model(model, Path(save_directory), self.get_state_dict(model, average=average), max_shard_size)

    def load_state(self, input_dir: str | Path | None = None) -> None:
        """Put everything back as it was saved. Checked first: a checkpoint that does not fit changes nothing.

        input_dir: left out with automatic_checkpoint_naming, the newest of the project.
        Raises CheckpointError when it is truncated, made under another policy, or for other models.
        """
        input_dir = folder_to_load(self.project_configuration, input_dir)
        loaded = checkpoint.load(input_dir)
        parts = self._parts()
        refuse_state(loaded, parts, self.policy)
        for hook in self._load_hooks.values():
            hook(list(self._models), str(input_dir))
        go_on_with(loaded, self.policy, self.device, self._products, self._models)
        for name, item in parts.items():
            if isinstance(item, nn.Module):
                self._load_model(item, name, loaded)
            else:
                item.load_state_dict(loaded.parts[name])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(loaded.parts["scaler"])
        self.scaler.bad_steps, self.scaler.steps = (int(loaded.parts["scaler"].get(name, 0)) for name in ("bad_steps", "steps"))
        if "watch" in loaded.parts:
            self.scaler.load_watch_state(loaded.parts["watch"], [o.optimizer for o in self._optimizers])
        self._micro_batches = 0
        self._go_on_in_place(loaded.parts["random"]["ranks"], loaded.parts.get("loaders", {}).get("ranks", []))
        self.scaler.note_checkpoint(str(input_dir))
        count_on(self.project_configuration, input_dir)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippingLoader:
        """`dataloader` without its first `num_batches`, for the pass in which a run goes on: in the order that the saved run had.

        For exact resume call it after `load_state`, with the number of batches that had been used of that pass.
        """
        return skip_first_batches(dataloader, num_batches)

    def _go_on_in_place(self, random: Sequence[Any], loaders: Sequence[Any]) -> None:
        """The random states and the places in loaders of this rank. Of those of a run on another number of ranks, rank 0 takes the random states."""
        if len(random) == self.ranks.world:
            checkpoint.restore(random[self.ranks.rank])
            if loaders:
                take_places(self._loaders, loaders[self.ranks.rank])
        elif self.ranks.is_main:
            checkpoint.restore(random[0])
            logger.warning(
                "the checkpoint was saved on %d ranks and is loaded on %d: weights, states and scale are the same, random states and batches are not",
                len(random),
                self.ranks.world,
            )

    def load_model_state(self, input_dir: str | Path, model: nn.Module) -> None:
        """Put the weights of one prepared model back as a checkpoint has them, masters too, and nothing else.

        Raises CheckpointError when it is truncated, made under another policy, or for other models; nothing is changed then.
        """
        loaded = checkpoint.load(input_dir)
        inner = self.unwrap_model(model)
        models = {name: item for name, item in self._parts().items() if isinstance(item, nn.Module)}
        refuse_state(loaded, self._parts(), self.policy)
        for name, item in models.items():
            if item is inner:
                self._load_model(item, name, loaded)

    def _load_model(self, model: nn.Module, name: str, loaded: checkpoint.Loaded) -> None:
        about = loaded.about.get("models", {}).get(name, {})
        self._lay_out(model, about.get("layout"))
        pin_as_saved(model, about.get("pins", []))
        model.load_state_dict(loaded.parts[name])
        adopt_all(model, loaded.parts.get("masters", {}).get(name, {}))

    def _lay_out(self, model: nn.Module, saved: Mapping[str, Any] | None) -> None:
        """Before a state is loaded: the weights that were 16-bit in the run that saved it are so here too, whatever the first batch would show."""
        if saved is not None and bound_policy(model) is not None and layout(model)["16bit"] != saved["16bit"]:
            convert(model, self.policy, saved["16bit"])


def _numbered(name: str, i: int) -> str:
    return name if i == 0 else f"{name}_{i}"


def _add(hooks: dict[int, Any], hook: Any) -> RemovableHandle:
    if not callable(hook):
        raise ConfigError(f"a {type(hook).__name__} was given as a hook", "Give it a function.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse_pickle(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ConfigError("safe_serialization=False would write weights as pickles, which run code when they are read", "Leave it out.")
