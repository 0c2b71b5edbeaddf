"""Training in several processes: who they are, and what they tell each other."""

from halfstep.distributed.launch import launch as launch
from halfstep.distributed.ranks import Ranks as Ranks
from halfstep.distributed.ranks import Solo as Solo

__all__ = ["Ranks", "Solo", "launch"]
