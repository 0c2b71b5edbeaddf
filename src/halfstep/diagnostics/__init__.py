"""Questions that can be asked of a model: what is wrong with this batch, what may go wrong with this model."""

from halfstep.diagnostics.audit import audit as audit
from halfstep.diagnostics.audit_record import Audit as Audit
from halfstep.diagnostics.memory import measure as measure
from halfstep.diagnostics.memory import memory as memory
from halfstep.diagnostics.memory_plan import MemoryPlan as MemoryPlan
from halfstep.diagnostics.plan import plan as plan
from halfstep.diagnostics.planned import Plan as Plan
from halfstep.diagnostics.reading import read_run as read_run
from halfstep.diagnostics.recorder import Recorder as Recorder
from halfstep.diagnostics.records import RunRecords as RunRecords
from halfstep.diagnostics.scan import scan as scan
from halfstep.diagnostics.trace import trace as trace
