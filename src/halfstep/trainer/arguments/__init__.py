"""`TrainingArguments`: the settings of a run, in groups of one topic each, with their spellings, checks and text forms."""

from halfstep.trainer.arguments.checks import check_types as check_types
from halfstep.trainer.arguments.checks import clip_of as clip_of
from halfstep.trainer.arguments.checks import hints_of as hints_of
from halfstep.trainer.arguments.names import MEANT as MEANT
from halfstep.trainer.arguments.names import NOT_CARRIED as NOT_CARRIED
from halfstep.trainer.arguments.names import OLD_NAMES as OLD_NAMES
from halfstep.trainer.arguments.names import OTHER_NAMES as OTHER_NAMES
from halfstep.trainer.arguments.names import translate as translate
from halfstep.trainer.arguments.optimizers import TAKES as TAKES
from halfstep.trainer.arguments.texts import choices_of as choices_of
from halfstep.trainer.arguments.texts import options_of as options_of
from halfstep.trainer.arguments.texts import read as read
from halfstep.trainer.arguments.texts import read_file as read_file
from halfstep.trainer.arguments.texts import told as told
from halfstep.trainer.arguments.values import spaced as spaced
from halfstep.trainer.arguments.whole import GROUPS as GROUPS
from halfstep.trainer.arguments.whole import IN_THE_POLICY as IN_THE_POLICY
from halfstep.trainer.arguments.whole import TrainingArguments as TrainingArguments
