"""Where the numbers of a run go: JSON lines always, TensorBoard, W&B and MLflow through their packages. For both doors."""

from halfstep.tracking.choose import LoggerType as LoggerType
from halfstep.tracking.choose import chosen_trackers as chosen_trackers
from halfstep.tracking.choose import is_installed as is_installed
from halfstep.tracking.choose import make_tracker as make_tracker
from halfstep.tracking.tracker import GeneralTracker as GeneralTracker
from halfstep.tracking.tracker import plain as plain
from halfstep.tracking.trackers import JSONLinesTracker as JSONLinesTracker
from halfstep.tracking.trackers import MLflowTracker as MLflowTracker
from halfstep.tracking.trackers import TensorBoardTracker as TensorBoardTracker
from halfstep.tracking.trackers import WandBTracker as WandBTracker
