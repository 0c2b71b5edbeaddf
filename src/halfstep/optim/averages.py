"""An exponential moving average of weights, in fp32 whatever the weights are stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim.masters import full_values, keep, master_of


class EMA:
    """fp32 averages of the floating weights of `model`: average = decay * average + (1 - decay) * weight, at each `update()`.

    Of a 16-bit weight the fp32 master is averaged: an average in 16 bits would stop moving at decay 0.999. Call `update` after each step that was
    applied, as by `accelerator.on_applied(optimizer, average.update)` or `scaler.on_applied`. The first update takes the weights as they are.
    Buffers are not averaged. Memory: 4 bytes per parameter. Source: Polyak and Juditsky, 1992.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"decay={decay} is out of range", "Use a number from 0 to below 1, for example 0.999.")
        self.model, self.decay, self.updates = model, decay, 0
        self.averages: dict[str, Tensor] = {}

    def update(self) -> None:
        """Take the weights as they are now into the averages."""
        with torch.inference_mode(False), torch.no_grad():
            for name, p in self._weights():
                values = full_values(p)
                known = self.averages.get(name)
                self.averages[name] = values if known is None else known.to(p.device).lerp_(values, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """A block in which the model has the averages for its weights; after it weights and masters are what they were, bit for bit.

        Memory: a copy of the weights. Raises ConfigError before the first update.
        """
        if not self.averages:
            raise ConfigError("there is no average yet", "Call update() after a step.")
        with ExitStack() as stack, torch.no_grad():
            for name, p in self._weights():
                if name not in self.averages:  # added since the last update
                    continue
                stack.callback(keep(p))
                master = master_of(p)
                if master is not None:
                    master.write(self.averages[name])
                else:
                    p.copy_(self.averages[name])
            with torch.enable_grad():
                yield self.model

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, the decay and the number of updates."""
        return {"decay": self.decay, "updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises CheckpointError, and changes nothing, when it is of another model."""
        named, averages = dict(self._weights()), state_dict.get("averages")
        if averages is None or not {"decay", "updates"} <= state_dict.keys():
            raise CheckpointError("the state holds no averages", "Load what state_dict() of an average gave.")
        again = "Build the model as the run that saved them did."
        for name in {*averages} ^ {*named} if averages else ():
            raise CheckpointError(f"the averages are of another model: {name} is in only one of them", again)
        for name, values in averages.items():
            if values.shape != named[name].shape:
                raise CheckpointError(f"the saved average of {name} is {tuple(values.shape)} and the weight {tuple(named[name].shape)}", again)
        self.decay, self.updates = float(state_dict["decay"]), int(state_dict["updates"])
        self.averages = {name: values.to(named[name].device).clone() for name, values in averages.items()}

    def _weights(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.is_floating_point()]


def ema(model: nn.Module, decay: float = 0.999) -> EMA:
    """An `EMA` of the weights of `model`."""
    return EMA(model, decay)
