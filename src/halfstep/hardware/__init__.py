"""Facts about devices: a frozen record, the one probe that makes it, and the advice drawn from it."""

from halfstep.hardware.capabilities import Capabilities as Capabilities
from halfstep.hardware.doctor import Diagnosis as Diagnosis
from halfstep.hardware.doctor import diagnose as diagnose
from halfstep.hardware.doctor import doctor as doctor
from halfstep.hardware.heap import give_back_unused_memory as give_back_unused_memory
from halfstep.hardware.heap import keep_memory as keep_memory
from halfstep.hardware.probe import default_device as default_device
from halfstep.hardware.probe import memory_in_use as memory_in_use
from halfstep.hardware.probe import parse_device as parse_device
from halfstep.hardware.probe import probe as probe
from halfstep.hardware.probe import processes as processes
from halfstep.hardware.rates import FAMILIES as FAMILIES
from halfstep.hardware.rates import Rate as Rate
from halfstep.hardware.rates import Rates as Rates
from halfstep.hardware.rates import emulated_families as emulated_families
from halfstep.hardware.rates import measured_rates as measured_rates
