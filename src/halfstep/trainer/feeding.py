"""The loaders of a trainer, and how a batch of theirs becomes the inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from halfstep.accelerator import to_device
from halfstep.errors import ConfigError, suggest
from halfstep.trainer.columns import lengths_of, without_unused
from halfstep.trainer.data import Collator, make_loader
from halfstep.trainer.loop import TrainingLoop
from halfstep.trainer.outputs import check_batch


class Feeding(TrainingLoop):
    """Data of a trainer."""

    train_dataset: Any
    eval_dataset: Any
    data_collator: Collator
    _taken: set[str] | None  # the columns that the model takes

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training data. One of your own works; resuming then reads past the batches that were used."""
        if self.train_dataset is None:
            raise ConfigError("train() needs training data", "Pass train_dataset= to the Trainer.")
        a = self.args
        size, lengths = self._batch.size, lengths_of(self.train_dataset, a.length_column_name) if a.group_by_length else None
        order: dict[str, Any] = {"shuffle": a.train_sampling_strategy != "sequential", "seed": a.order_seed, "drop_last": a.dataloader_drop_last}
        return self._load(self.train_dataset, size, **order, lengths=lengths, grouped=size * a.gradient_accumulation_steps)

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
        return self._load(data, self.args.per_device_eval_batch_size, shuffle=False, seed=self.args.seed, drop_last=False, padded=False)

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
        return make_loader(without_unused(data, self._taken), self.data_collator, batch_size=batch_size, **workers, **order)

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """A batch as named tensors on the device."""
        return dict(to_device(inputs, self.accelerator.device))

    def _inputs(self, batch: Any) -> dict[str, Any]:
        """A batch of a loader, checked, as named tensors on the device."""
        check_batch(self.model, batch, self.label_names)
        return self._prepare_inputs(batch)
