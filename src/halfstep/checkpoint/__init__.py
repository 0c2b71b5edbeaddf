"""Checkpoints: safetensors and JSON, atomic, verified, without pickle."""

from halfstep.checkpoint.export import export as export
from halfstep.checkpoint.export import write_model as write_model
from halfstep.checkpoint.files import discard as discard
from halfstep.checkpoint.files import replace as replace
from halfstep.checkpoint.files import write_error as write_error
from halfstep.checkpoint.held import Held as Held
from halfstep.checkpoint.held import hold as hold
from halfstep.checkpoint.randomness import capture as capture
from halfstep.checkpoint.randomness import restore as restore
from halfstep.checkpoint.randomness import seed_everything as seed_everything
from halfstep.checkpoint.schema import MANIFEST as MANIFEST
from halfstep.checkpoint.schema import Manifest as Manifest
from halfstep.checkpoint.store import Loaded as Loaded
from halfstep.checkpoint.store import checkpoints as checkpoints
from halfstep.checkpoint.store import is_whole as is_whole
from halfstep.checkpoint.store import latest as latest
from halfstep.checkpoint.store import load as load
from halfstep.checkpoint.store import read_manifest as read_manifest
from halfstep.checkpoint.store import remove as remove
from halfstep.checkpoint.store import save as save
from halfstep.checkpoint.store import tidy as tidy
