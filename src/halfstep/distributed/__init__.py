"""Training in several processes: who they are, and what they tell each other."""

from halfstep.distributed.launch import launch as launch
from halfstep.distributed.logs import OnceLogger as OnceLogger
from halfstep.distributed.logs import get_logger as get_logger
from halfstep.distributed.logs import rank_here as rank_here
from halfstep.distributed.ranks import Ranks as Ranks
from halfstep.distributed.ranks import Solo as Solo

__all__ = ["OnceLogger", "Ranks", "Solo", "get_logger", "launch", "rank_here"]
