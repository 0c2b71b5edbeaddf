"""The truthful step: verdict, result, loss scale, engine."""

from halfstep.step.clipping import clip as clip
from halfstep.step.engine import StepEngine as StepEngine
from halfstep.step.following import Follower as Follower
from halfstep.step.marks import maker_of as maker_of
from halfstep.step.refusal import Explained as Explained
from halfstep.step.refusal import Heal as Heal
from halfstep.step.result import Culprit as Culprit
from halfstep.step.result import Reason as Reason
from halfstep.step.result import StepResult as StepResult
from halfstep.step.scaling import DynamicScaling as DynamicScaling
from halfstep.step.scaling import FollowingScaling as FollowingScaling
from halfstep.step.scaling import NoScaling as NoScaling
from halfstep.step.scaling import Scaling as Scaling
from halfstep.step.scaling import StaticScaling as StaticScaling
from halfstep.step.scaling import scaling_for as scaling_for
from halfstep.step.state import OnOverflow as OnOverflow
from halfstep.step.state import StepState as StepState
from halfstep.step.verdict import Agree as Agree
from halfstep.step.verdict import Verdict as Verdict
from halfstep.step.watching import Watch as Watch
