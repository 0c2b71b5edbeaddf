"""The settings of what is seen of a run: evaluation and logging. Only fields; checks.py checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["no", "steps", "epoch"]


@dataclass(frozen=True)
class EvaluationFields:
    """Evaluation: when, how, and which one is the best.

    Args:
        eval_strategy: evaluate never (no), every eval_steps (steps) or after each epoch.
        eval_steps: applied steps between evaluations; below 1, a share of all steps; logging_steps when not given.
        eval_delay: epochs, or steps where eval_strategy=steps, before the first evaluation.
        eval_on_start: evaluate before the first step too.
        eval_accumulation_steps: move predictions to the CPU every so many batches; each batch when not given.
        eval_do_concat_batches: one array of the predictions of all batches; otherwise a list of the batches'.
        prediction_loss_only: evaluations give the loss and no predictions.
        batch_eval_metrics: call compute_metrics after each batch, with compute_result=True at the last one.
        include_for_metrics: what compute_metrics is given besides predictions and labels: inputs, loss (for each sample that of its batch).
        metric_for_best_model: the metric that tells which evaluation is the best; "loss" when not given.
        greater_is_better: whether the best is the largest; when not given, for metrics whose name does not end in loss.
        bf16_full_eval: evaluate in bf16; the weights and the training are not changed.
        fp16_full_eval: evaluate in fp16, the same way.
    """

    eval_strategy: Strategy = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    eval_accumulation_steps: int | None = None
    eval_do_concat_batches: bool = True
    prediction_loss_only: bool = False
    batch_eval_metrics: bool = False
    include_for_metrics: list[str] | None = None
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False

    @property
    def best_metric(self) -> str:
        """The metric that tells which evaluation is the best, without a prefix that was not given: metric_for_best_model, or "loss"."""
        return self.metric_for_best_model if self.metric_for_best_model is not None else "loss"

    @property
    def best_is_greatest(self) -> bool:
        """Whether the best metric is the largest: greater_is_better, or all but losses when that is not given."""
        return self.greater_is_better if self.greater_is_better is not None else not self.best_metric.endswith("loss")


@dataclass(frozen=True)
class LoggingFields:
    """Logging: what is written down, and where.

    Args:
        logging_strategy: log never, every logging_steps or after each epoch.
        logging_steps: applied steps between log lines; below 1, a share of all steps.
        logging_first_step: log the first step too.
        logging_nan_inf_filter: only False: a loss that is not finite is shown.
        logging_dir: the folder of TensorBoard's files; one in output_dir when not given.
        log_stalled: at each log line, measure and log the share of updates that rounded away (a copy of the weights during that step).
        record_every: sample gradients, outputs and weights of each layer in the first step and every so many (layers.jsonl); 0: never.
        audit: after the first step tell op by op why 16 bits are or are not faster here (audit.json, halfstep.audit); takes some 50 steps' time.
        report: when the run ends, in whatever way, write report.html into its folder (needs pip install 'halfstep[report]').
        include_num_input_tokens_seen: count the tokens that were read: no; all; or non_padding. True is all.
        report_to: loggers beside metrics.jsonl: none, all that are installed, tensorboard, wandb, mlflow, or a list of them.
        run_name: the name of the run in these loggers; output_dir when not given.
    """

    logging_strategy: Strategy = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_nan_inf_filter: bool = False
    logging_dir: str | None = None
    log_stalled: bool = False
    record_every: int = 100
    audit: bool = False
    report: bool = False
    include_num_input_tokens_seen: Literal["no", "all", "non_padding"] = "no"
    report_to: None | str | list[str] = "none"  # noqa: RUF036 # the order that transformers' HfArgumentParser can read
    run_name: str | None = None
