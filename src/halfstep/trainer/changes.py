"""What the arguments do to the model: some of it whenever the trainer uses the model, some only while it trains. Nothing stays afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from halfstep.amp.recompute import recompute_blocks
from halfstep.hardware import give_back_unused_memory
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.neftune import add_noise, input_embeddings
from halfstep.trainer.releasing import end_release

logger = logging.getLogger("halfstep")


class Changes:
    """The changes to a model that a run's arguments ask for, each made when its block is entered and undone when it is left.

    Raises ConfigError, when it is made, for a change that the model cannot have.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments) -> None:
        self.model, self.args = model, args
        self.settings: dict[str, Any] = dict(args.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type]  # text was read already
        self._always: list[AbstractContextManager[Any]] = []
        if args.full_determinism:
            from halfstep.trainer.determinism import Deterministic

            self._always.append(Deterministic())
        if args.torch_compile:
            from halfstep.trainer.compiled import compiled  # torch's compiler takes a second and more to import

            self._always.append(compiled(model, args.torch_compile_backend, args.torch_compile_mode))
        if args.gradient_checkpointing:
            recompute_blocks(model, self.settings).remove()
        if args.neftune_noise_alpha is not None:
            input_embeddings(model)

    def in_use(self) -> AbstractContextManager[Any]:
        """The block in which the model is called, to train or to evaluate it."""
        if not self._always:
            return nullcontext()
        stack = ExitStack()
        for block in self._always:
            stack.enter_context(block)
        return stack

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """The block in which it is trained."""
        with ExitStack() as stack:
            stack.callback(give_back_unused_memory)  # kept from step to step until here
            if self.args.gradient_checkpointing:
                made = recompute_blocks(self.model, self.settings)
                stack.callback(made.remove)
                logger.info("gradient checkpointing: %d blocks are computed again in the backward pass", len(made.blocks))
            if self.args.neftune_noise_alpha is not None:
                stack.callback(add_noise(self.model, self.args.neftune_noise_alpha).remove)
            if self.args.gradient_release != "no":
                stack.callback(end_release, self.model)
            stack.enter_context(self.in_use())
            yield
