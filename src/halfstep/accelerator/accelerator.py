"""The second door: keep your loop, hand over device, precision and accumulation."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from halfstep import checkpoint
from halfstep.accelerator import replay
from halfstep.accelerator.decided import UNDECIDED, adopt_products, decide, go_on_with, products_for, refuse_other_policy, resolved
from halfstep.accelerator.facts import Signature, model_facts, refuse_changed, refuse_orphans
from halfstep.accelerator.prepared import PreparedLoader, PreparedOptimizer
from halfstep.accelerator.saved import adopt_all, facts_to_export, kinds_of, masters_beside, pin_as_saved, refuse_state
from halfstep.amp import Binding, GradScaler, backward_context, bind, bound_policy, convert, forward_context, layout, model_state
from halfstep.errors import ConfigError, StepOrderError, refuse_unknown
from halfstep.hardware import default_device, processes
from halfstep.optim import with_masters
from halfstep.policy import Policy, Resolution, chosen, from_flags
from halfstep.step import Agree, Follower, Heal, OnOverflow, StepResult

logger = logging.getLogger("halfstep")


class Accelerator:
    """Device, precision, loss scaling, accumulation and checkpoints for a loop of your own.

    mixed_precision: "no", "fp16" or "bf16"; fp16 on a CPU is fp16.
    precision: halfstep's own text (`fp16-mixed,scale=static:1024,fp32=lm_head`) or a `Policy`, instead of mixed_precision. "auto": chosen when the
        first model is prepared, by the device's measured rates and its memory, and said with the reason.
    cpu: train on the CPU although there is a GPU.
    gradient_accumulation_steps: micro-batches per optimizer step, for `accumulate` and for the division in `backward`.
    on_overflow: "skip" a step whose gradients overflow; "replay" its backward passes at lower loss scales (the activations of a step
        are kept until it is taken); "raise" StepRefusedError.
    heal: what becomes of a module whose outputs do not fit 16 bits (the step is refused and the result names it): "skip" goes on; "pin" holds it in
        fp32 from the next forward pass on (`halfstep.amp.pins(model)` tells which; checkpoints keep it); "raise" StepRefusedError.
    patience: bad steps of an optimizer in a row before `DivergedError`.
    agree: gets a small fp32 tensor and returns its maximum over all ranks.

    16-bit weights always have masters unless the precision says weights=plain: prepared optimizers are wrapped where that is needed
    (`halfstep.optim.wrap`). With AdamW weights, gradient and states take 16 bytes per parameter under fp32 and *-mixed, about 8 under *-lean:
    `halfstep.policy.bytes_per_parameter` counts them.
    Raises ConfigError for settings that contradict each other, PolicyError (here or in `prepare`) for a precision that
    cannot work with the device or the model.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        *,
        precision: str | Policy | None = None,
        cpu: bool = False,
        gradient_accumulation_steps: int = 1,
        on_overflow: OnOverflow = "skip",
        heal: Heal = "skip",
        patience: int = 50,
        agree: Agree | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("Accelerator", unknown, inspect.signature(Accelerator.__init__).parameters)
        if processes() > 1:
            raise ConfigError(
                f"the launcher started {processes()} processes, and this version of halfstep trains in one: each would train alone",
                "Start one process.",
            )
        for name, count in (("gradient_accumulation_steps", gradient_accumulation_steps), ("patience", patience)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"{name}={count!r}", "Use a whole number of 1 or more.")
        self.device = default_device(cpu)
        self.gradient_accumulation_steps = self._window = gradient_accumulation_steps
        self._scaler_for = functools.partial(GradScaler.from_policy, patience=patience, on_overflow=on_overflow, heal=heal, agree=agree)
        self._run_under(from_flags(precision=precision, mixed_precision=mixed_precision))
        self.sync_gradients = True
        self.last_step: StepResult | None = None
        self._held = False  # gradients of the window at hand were made and not stepped with
        self._opening = False  # inside `accumulate`, before its backward pass
        self._micro_batches = 0  # since the end of the last window
        self._short: int | None = None  # micro-batches of a window that ends early, until its last backward pass
        self._models: list[nn.Module] = []
        self._bindings: dict[int, Binding] = {}
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[Follower] = []
        self._signatures: dict[int, Signature] = {}
        self._loaders: list[PreparedLoader] = []
        self._registered: list[Any] = []

    def _run_under(self, policy: Policy, why: str = "") -> None:
        self.policy, self._why, self._products = policy, why, products_for(policy)
        self.resolution: Resolution = resolved(policy, self.device, why=why)
        self.scaler = cast(GradScaler, UNDECIDED) if policy.is_auto else self._scaler_for(policy.scale)
        if not policy.is_auto:
            self.scaler.run_backward_inside(functools.partial(backward_context, policy, self.device, self._products))

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16"."""
        return self.policy.autocast if self.policy.is_mixed else "no"

    is_main_process = True
    is_local_main_process = True
    num_processes = 1
    process_index = 0

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last optimizer step was refused."""
        return self.last_step is not None and self.last_step.reason not in ("applied", "accumulating", "no-gradients")

    def prepare(self, *objects: Any) -> Any:
        """Ready models, optimizers, data loaders and schedulers, in any order; returns them in the same order.

        A model moves to the device and its forward pass runs under the policy from now on, wherever it is called. An
        optimizer and a scheduler follow the truth of each step. Raises PolicyError when the model cannot be trained
        under the policy, ConfigError for an object of another kind.
        """
        ready: dict[int, Any] = {}
        kinds: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
            (nn.Module, self._prepare_model),
            (Optimizer, self._prepare_optimizer),
            (DataLoader, self._prepare_loader),
            (LRScheduler, self._prepare_scheduler),
        )
        for kind, make in kinds:
            for item in objects:
                if isinstance(item, kind) and id(item) not in ready:
                    ready[id(item)] = make(item)
        for item in objects:
            if isinstance(item, PreparedLoader | Follower):
                ready[id(item)] = item
            if id(item) not in ready:
                raise ConfigError(
                    f"prepare() was given a {type(item).__name__}", "Give it modules, torch optimizers, DataLoaders and learning rate schedulers."
                )
        result = tuple(ready[id(item)] for item in objects)
        return result[0] if len(result) == 1 else result

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        already = bound_policy(model)
        if self.policy.is_auto:
            self._run_under(*decide(model, self.device))
        refuse_other_policy(already, self.policy)
        self.resolution = resolved(self.policy, self.device, model_facts(model), self._why)
        model.to(self.device)
        if already is None:
            self._bindings[id(model)] = bind(model, self.policy, self.device, self._products)
            logger.info("%s", self.resolution)
        else:
            adopt_products(self._products, model)
        self.scaler.watch(model)
        self._signatures[id(model)] = Signature(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer.stepper is not self:
                raise ConfigError(
                    "this optimizer was prepared by another accelerator, which would step with gradients it knows nothing of",
                    "Give each accelerator optimizers of its own.",
                )
            return optimizer
        for known in self._optimizers:
            if optimizer in (known.optimizer, getattr(known.optimizer, "optimizer", None)):
                return known
        refuse_orphans(optimizer, self._models)
        mastered = with_masters(optimizer, chosen(self.policy))
        self.scaler.watch(mastered)
        self._optimizers.append(PreparedOptimizer(mastered, self))
        return self._optimizers[-1]

    def _prepare_scheduler(self, scheduler: LRScheduler) -> Follower:
        for optimizer in self._optimizers:
            if scheduler.optimizer in (optimizer, optimizer.optimizer, getattr(optimizer.optimizer, "optimizer", None)):
                follower = self.scaler.follow(scheduler, optimizer.optimizer)
                follower.optimizer = optimizer
                self._schedulers.append(follower)
                return self._schedulers[-1]
        raise ConfigError(
            "this scheduler's optimizer is not prepared, so nobody could tell it about skipped steps", "Prepare the optimizer first or together."
        )

    def _prepare_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        self._loaders.append(PreparedLoader(loader, self.device))
        return self._loaders[-1]

    def autocast(self) -> AbstractContextManager[Any]:
        """The block in which prepared models run; for a loss that should run in 16 bits too."""
        return forward_context(self.policy, self.device, self._products)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide `loss` by the micro-batches of its window, scale it as the policy says, and run the backward pass.

        A window has gradient_accumulation_steps of them; the last one before a loader ends may have fewer, and its
        gradients are then the mean over those.
        """
        window, self._held, self._opening = self._window, True, False
        if self._short is not None:  # the loader ended inside a window: what was divided by the full length is a mean over fewer
            self.scaler.rescale_(self.gradient_accumulation_steps / window)
            self._short = None
        part = loss / window if window > 1 else loss
        scaled = self.scaler.scale(part)
        with backward_context(self.policy, self.device, self._products):
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch of a window: `optimizer.step()` and `zero_grad()` act only in the last one.

        The last of a window is every gradient_accumulation_steps-th, and the last batch of a prepared loader.
        """
        self._micro_batches += 1
        full = self._micro_batches >= self.gradient_accumulation_steps
        self.sync_gradients = full or any(loader.at_end for loader in self._loaders)
        self._window = self.gradient_accumulation_steps
        if self.sync_gradients and not full:
            self._window = self._short = self._micro_batches
        if self.sync_gradients:
            self._micro_batches = 0
        self._opening = True
        try:
            yield
        finally:
            self._window, self._opening = self.gradient_accumulation_steps, False

    def may_clear(self) -> bool:
        """Whether `zero_grad` may clear gradients now: not those of a window that is going on, also not at the start of its last micro-batch."""
        return not self._held or (self.sync_gradients and not self._opening)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip unscaled gradients to `max_norm` and return their norm before that; None, and nothing, inside a window."""
        return self.scaler.clip_grad_norm_(parameters, max_norm, norm_type) if self.sync_gradients else None

    def on_applied(self, optimizer: PreparedOptimizer, function: Callable[[], object]) -> None:
        """Call `function()` after each step of a prepared optimizer that was applied: an EMA of the weights, a counter."""
        self.scaler.on_applied(optimizer.optimizer, function)

    def applied_steps(self, optimizer: Optimizer) -> int:
        """How many steps of `optimizer` (one that was prepared) have moved the weights."""
        return self.scaler.applied_steps(optimizer)

    def run_step(
        self,
        optimizer: PreparedOptimizer,
        compute: Callable[[], object],
        *,
        max_norm: float | None = None,
        stalled: bool = False,
        on_overflow: bool = True,
    ) -> StepResult:
        """Call `compute()`, which makes the gradients of one step, then `optimizer.step()`; after an overflow run both again at a lower loss scale.

        With heal="pin" also after a forward pass that overflowed, with the modules to blame held in fp32.

        compute: the forward and backward passes (`backward`) of all micro-batches, and clipping. Before it runs again, random states and the
        buffers of prepared models are put back and gradients cleared, so that the step is the one that the lower scale would have given.
        Nothing is kept in memory for this but the random states. The result's `replays` counts. max_norm, stalled: as in `optimizer.step`.
        on_overflow: False runs them again for pinned modules only.
        """
        step = functools.partial(optimizer.step, max_norm=max_norm, stalled=stalled)
        self.last_step = replay.run(compute, step, optimizer.zero_grad, self.scaler, on_overflow, self.policy.is_mixed or self.policy.whole)
        return self.last_step

    def take_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, stalled: bool = False
    ) -> StepResult:
        """Step `optimizer` (one that was prepared) or not, and let the loss scale follow. `PreparedOptimizer.step` calls it."""
        if not self.sync_gradients:
            scale = self.scaler.get_scale()
            self.last_step = StepResult(False, "accumulating", scale=scale, next_scale=scale)
            return self.last_step
        self._held = False
        for model in self._models:
            if refuse_changed(model, self._signatures[id(model)], self._optimizers):
                self.scaler.watch(model)  # parts that are new
        try:
            self.last_step = self.scaler.step(optimizer, closure, max_norm=max_norm, stalled=stalled)
        finally:
            self.scaler.update()
        return self.last_step

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The user's own module: what a compiled one was made from, else the module itself.

        keep_fp32_wrapper: False also gives it the forward method back that it had before `prepare`.
        """
        inner = getattr(model, "_orig_mod", model)
        inner = inner if isinstance(inner, nn.Module) else model
        if not keep_fp32_wrapper and id(inner) in self._bindings:
            self._bindings.pop(id(inner)).remove()
        return inner

    def gather_for_metrics(self, values: Any) -> Any:
        """`values` as they are: there is one process, and prepared loaders pad nothing."""
        return values

    def wait_for_everyone(self) -> None:
        """Return at once: there is one process."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once and not once per process."""
        print(*args, **kwargs)

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
            "random": checkpoint.capture(),
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
        checkpoint.restore(loaded.parts["random"])
        self.scaler.note_checkpoint(str(input_dir))

    def _lay_out(self, model: nn.Module, saved: Mapping[str, Any] | None) -> None:
        """Before a state is loaded: the weights that were 16-bit in the run that saved it are so here too, whatever the first batch would show."""
        if saved is not None and bound_policy(model) is not None and layout(model)["16bit"] != saved["16bit"]:
            convert(model, self.policy, saved["16bit"])
