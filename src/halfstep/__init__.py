"""halfstep: mixed-precision training for PyTorch with a step that tells the truth."""

__version__ = "0.1.0"
