"""The loaders of a trainer, and how a batch of theirs becomes the inputs of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import is_
from typing import Any

from torch.utils.data import DataLoader, Sampler, SequentialSampler

from halfstep.accelerator import to_device
from halfstep.errors import ConfigError, suggest
from halfstep.trainer.columns import lengths_of, without_unused
from halfstep.trainer.data import Collator, EpochBatches, EpochOrder, has_places, make_loader
from halfstep.trainer.given import called
from halfstep.trainer.loop import TrainingLoop
from halfstep.trainer.outputs import check_batch


class Feeding(TrainingLoop):
    """Data of a trainer."""

    train_dataset: Any
    eval_dataset: Any
    data_collator: Collator
    _taken: set[str] | None  # the columns that the model takes
    _prepared: Any = None  # the last inputs that were made of a batch, and their values: as they are they need not be made again

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data. One of your own works; resuming then reads past the batches that were used."""
        if self.train_dataset is None:
            raise ConfigError("train() needs training data", "Pass train_dataset= to the Trainer.")
        own = self._sampler_of(Feeding._get_train_sampler, self.train_dataset)
        if own is not None:
            return self._load(self.train_dataset, self._batch.size, seed=self.args.order_seed, drop_last=self.args.dataloader_drop_last, order=own)
        return self._load(self.train_dataset, self._batch.size, **self._order_of(self.train_dataset))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of map-style training data, which a subclass may replace: a sampler, or None for the order that the settings say.

        With a sampler of your own resuming reads past the batches that were used. Data without a length or without numbered samples has no sampler.
        """
        data = self.train_dataset if train_dataset is None else train_dataset
        how = self._order_of(data)
        del how["drop_last"]
        return EpochOrder(EpochBatches(len(data), self._batch.size, drop_last=False, **how)) if has_places(data) else None

    def _order_of(self, data: Any) -> dict[str, Any]:
        """The order that the settings say, as `EpochBatches` takes it."""
        a = self.args
        lengths = lengths_of(data, a.length_column_name) if a.group_by_length else None
        order: dict[str, Any] = {"shuffle": a.train_sampling_strategy != "sequential", "seed": a.order_seed, "drop_last": a.dataloader_drop_last}
        return order | {"lengths": lengths, "grouped": self._batch.size * a.gradient_accumulation_steps}

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """The order of evaluation data, which a subclass may replace: a sampler, or None for that of the data."""
        return SequentialSampler(eval_dataset) if has_places(eval_dataset) else None

    def _sampler_of(self, ours: Any, data: Any) -> Sampler[int] | None:
        """What a subclass's `_get_train_sampler` or `_get_eval_sampler` gives; None where it does not have one, or none for this data."""
        method = getattr(self, ours.__name__)
        if getattr(method, "__func__", None) is ours or not has_places(data):
            return None
        sampler = method(data) if inspect.signature(method).parameters else method()  # transformers 4 gave no dataset
        if sampler is not None and (isinstance(sampler, type) or not hasattr(sampler, "__iter__")):
            raise ConfigError(
                f"{ours.__name__} gives {called(sampler)}, and no sampler", "Return a torch.utils.data.Sampler of sample numbers, or None."
            )
        found: Sampler[int] | None = sampler
        return found

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The loader of evaluation data, in order. eval_dataset: a dataset, or the name of one of those given to the constructor as a dict."""
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(data, str):
            if not isinstance(self.eval_dataset, Mapping) or data not in self.eval_dataset:
                names = list(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else []
                raise ConfigError(f"there is no evaluation dataset {data!r}", suggest(data, names) if names else "Pass eval_dataset={NAME: dataset}.")
            data = self.eval_dataset[data]
        if data is None:
            raise ConfigError("evaluation needs data", "Pass eval_dataset= to the Trainer, or eval_strategy='no'.")
        own = self._sampler_of(Feeding._get_eval_sampler, data)
        order: dict[str, Any] = {"shuffle": False} if own is None else {"order": own}
        return self._load(data, self.args.per_device_eval_batch_size, seed=self.args.seed, drop_last=False, padded=False, **order)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The loader of data to predict on, in order."""
        return self.get_eval_dataloader(test_dataset)

    def _check_evaluation_data(self) -> None:
        """Raise for missing or empty evaluation data now, and not after the first steps."""
        if isinstance(self.eval_dataset, Mapping):
            for name in self.eval_dataset:
                self.get_eval_dataloader(name)
        else:
            self.get_eval_dataloader()

    def num_examples(self, dataloader: Any) -> int:
        """The number of samples behind a loader; batches times their size where its dataset has no length. Raises TypeError where neither has one."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def _load(self, data: Any, batch_size: int, **order: Any) -> DataLoader[Any]:
        a = self.args
        workers: dict[str, Any] = {
            "workers": a.dataloader_num_workers,
            "prefetch": a.dataloader_prefetch_factor,
            "persistent": a.dataloader_persistent_workers,
        }
        workers |= {"pin": a.dataloader_pin_memory and self.accelerator.device.type == "cuda", "started": a.dataloader_multiprocessing_context}
        workers["ranks"] = self.accelerator.ranks
        return make_loader(without_unused(data, self._taken), self.data_collator, batch_size=batch_size, **{"shuffle": True, **workers, **order})

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """A batch as named tensors on the device."""
        return dict(to_device(inputs, self.accelerator.device))

    def _inputs(self, batch: Any) -> dict[str, Any]:
        """A batch of a loader, checked, as named tensors on the device."""
        check_batch(self.model, batch, self.label_names)
        inputs = self._prepare_inputs(batch)
        self._prepared = (inputs, list(inputs.values())) if isinstance(inputs, dict) else None
        return inputs

    def _as_prepared(self, inputs: Any) -> bool:
        """Whether these inputs are the last that were made of a batch, with nothing put into them since. Asked once."""
        known, self._prepared = self._prepared, None
        return known is not None and inputs is known[0] and len(inputs) == len(known[1]) and all(map(is_, inputs.values(), known[1]))
