"""The third door: `Trainer`, its arguments, callbacks and state."""

from halfstep.trainer.arguments import TrainingArguments as TrainingArguments
from halfstep.trainer.callbacks import TrainerCallback as TrainerCallback
from halfstep.trainer.data import default_data_collator as default_data_collator
from halfstep.trainer.evaluation import EvalLoopOutput as EvalLoopOutput
from halfstep.trainer.flow import DefaultFlowCallback as DefaultFlowCallback
from halfstep.trainer.flow import EarlyStoppingCallback as EarlyStoppingCallback
from halfstep.trainer.flow import PrinterCallback as PrinterCallback
from halfstep.trainer.interrupt import TrainingInterrupted as TrainingInterrupted
from halfstep.trainer.outputs import EvalPrediction as EvalPrediction
from halfstep.trainer.outputs import PredictionOutput as PredictionOutput
from halfstep.trainer.outputs import TrainOutput as TrainOutput
from halfstep.trainer.progress import ProgressCallback as ProgressCallback
from halfstep.trainer.state import TrainerControl as TrainerControl
from halfstep.trainer.state import TrainerState as TrainerState
from halfstep.trainer.trainer import Trainer as Trainer
