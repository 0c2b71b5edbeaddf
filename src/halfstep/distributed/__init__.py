"""Training in several processes: who they are, what they tell each other, and how data and gradients are divided among them.

`Ranks` is the seam everything else is built on, `Reducer` that of how gradients come together (sharded models will have one of their own).
"""

from halfstep.distributed.alike import refuse_unlike as refuse_unlike
from halfstep.distributed.buckets import Users as Users
from halfstep.distributed.gradients import BUCKET_MB as BUCKET_MB
from halfstep.distributed.gradients import NOBODY as NOBODY
from halfstep.distributed.gradients import DataParallel as DataParallel
from halfstep.distributed.gradients import MeanOverRanks as MeanOverRanks
from halfstep.distributed.gradients import NoReducer as NoReducer
from halfstep.distributed.gradients import Reducer as Reducer
from halfstep.distributed.launch import launch as launch
from halfstep.distributed.launch import leave as leave
from halfstep.distributed.logs import OnceLogger as OnceLogger
from halfstep.distributed.logs import get_logger as get_logger
from halfstep.distributed.logs import rank_here as rank_here
from halfstep.distributed.once import on_main as on_main
from halfstep.distributed.ranks import Ranks as Ranks
from halfstep.distributed.ranks import Solo as Solo
from halfstep.distributed.ranks import over as over
from halfstep.distributed.sharding import BatchShard as BatchShard
from halfstep.distributed.sharding import IterableShard as IterableShard
from halfstep.distributed.sharding import refuse_unlike_data as refuse_unlike_data
from halfstep.distributed.sharding import samples_of_last_round as samples_of_last_round
from halfstep.distributed.sharding import shard as shard
