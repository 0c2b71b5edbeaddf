"""Pure functions of tensors: no module, no optimizer, no device query."""

from halfstep.numerics.gradients import clip_factor as clip_factor
from halfstep.numerics.gradients import largest as largest
from halfstep.numerics.gradients import multiply_ as multiply_
from halfstep.numerics.gradients import norm as norm
from halfstep.numerics.gradients import norms as norms
from halfstep.numerics.gradients import stored as stored
from halfstep.numerics.gradients import subnormal_share as subnormal_share
from halfstep.numerics.gradients import wide_norm as wide_norm
