"""Watch what runs, op by op, and say which fault it has."""

from halfstep.tracing.findings import SEVERITY as SEVERITY
from halfstep.tracing.findings import Fault as Fault
from halfstep.tracing.findings import Finding as Finding
from halfstep.tracing.findings import Place as Place
from halfstep.tracing.findings import Range as Range
from halfstep.tracing.findings import Trace as Trace
from halfstep.tracing.findings import ordered as ordered
from halfstep.tracing.findings import range_of as range_of
from halfstep.tracing.observe import Detector as Detector
from halfstep.tracing.observe import Event as Event
from halfstep.tracing.observe import Observation as Observation
