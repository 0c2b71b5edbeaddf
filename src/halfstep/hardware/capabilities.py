"""What a device can do, as a frozen record. Made by `probe`, read by everything else."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Capabilities:
    """Facts about one device.

    `native` are the formats whose matrix product the device has instructions for, `emulated` those it can only
    imitate: on a CPU halfstep then rounds the operands to 16 bits, multiplies in fp32 and rounds the result; a GPU's
    driver does something of the kind by itself, slower than fp32.
    """

    device: str  # as torch names it: "cpu", "cuda:0"
    kind: str  # "cpu" or "cuda"
    name: str  # the maker's name
    level: str  # instruction set of a CPU, compute capability of a GPU
    native: tuple[str, ...]  # subset of fp32, tf32, bf16, fp16
    emulated: tuple[str, ...]  # 16-bit formats that run, without instructions of their own
    cores: int  # CPU threads that torch uses, or a GPU's multiprocessors
    memory_bytes: int  # all of it, not what is free
    compiler: str  # path of the C++ compiler that torch.compile needs on a CPU, "" when there is none
    versions: tuple[tuple[str, str], ...]  # (package, version)

    def is_native(self, name: str) -> bool:
        """Whether the device multiplies matrices of format `name` with instructions made for it."""
        return name in self.native

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self) | {"versions": dict(self.versions)}
