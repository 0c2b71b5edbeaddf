"""The only code that asks torch, the operating system or the launcher about devices."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from halfstep.errors import ConfigError
from halfstep.hardware.capabilities import Capabilities

PACKAGES = ("halfstep", "torch", "numpy", "safetensors", "transformers", "accelerate", "triton")


def default_device(cpu: bool = False) -> torch.device:
    """The device to train on: the current CUDA device when there is one and `cpu` is false, else the CPU."""
    if not cpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def processes() -> int:
    """How many processes the launcher started (torchrun's WORLD_SIZE); 1 when there was no launcher."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


def probe(device: str | torch.device | None = None) -> Capabilities:
    """Facts about `device` (default: the one that would be trained on). Asked once per device, then remembered."""
    chosen = default_device() if device is None else parse_device(device)
    if str(chosen) == "cuda" and torch.cuda.is_available():
        chosen = torch.device("cuda", torch.cuda.current_device())
    return _probe(str(chosen))


def parse_device(device: str | torch.device) -> torch.device:
    """A torch device from its name. Raises ConfigError for a name that torch does not know."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"there is no device {device!r}", "Use 'cpu' or 'cuda'.") from error


@functools.cache
def _probe(device: str) -> Capabilities:
    kind = torch.device(device).type
    if kind == "cpu":
        return _cpu()
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device {device!r} was asked for, and this torch ({torch.__version__}) finds no CUDA device",
                "Use the CPU (cpu=True, --use_cpu true, device_type='cpu'), or install a CUDA build of torch on a machine with a GPU.",
            )
        count, index = torch.cuda.device_count(), torch.device(device).index or 0
        if index >= count:
            raise ConfigError(f"device {device!r} was asked for, and there are {count} CUDA devices", f"Use cuda:0 to cuda:{count - 1}.")
        return _cuda(torch.device(device))
    raise ConfigError(f"device {device!r} is not supported", "Use 'cpu' or 'cuda'.")


def _ask(question: Callable[[], bool]) -> bool:
    """A fact for which torch has only private names: absent in some version means no, and no is always safe (emulation)."""
    try:
        return bool(question())
    except (AttributeError, RuntimeError):
        return False


def _cpu() -> Capabilities:
    amx = _ask(lambda: torch.cpu._is_amx_tile_supported())
    instructions_bf16 = amx or _ask(lambda: torch.cpu._is_avx512_bf16_supported())
    native = {
        "fp32": True,
        # oneDNN "supports" bf16 on any AVX512 machine, by converting; native means instructions of its own
        "bf16": instructions_bf16 and _ask(lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "fp16": _ask(lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    }
    level = torch.backends.cpu.get_cpu_capability() + ("+AMX" if amx else "+AVX512_BF16" if instructions_bf16 else "")
    return Capabilities(
        device="cpu",
        kind="cpu",
        name=_cpu_name(),
        level=level,
        native=tuple(f for f, has in native.items() if has),
        emulated=tuple(f for f, has in native.items() if not has),
        cores=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        compiler=shutil.which("g++") or shutil.which("clang++") or "",
        versions=_versions(),
    )


def _cuda(device: torch.device) -> Capabilities:
    facts = torch.cuda.get_device_properties(device)
    major, minor = facts.major, facts.minor
    hip = torch.version.hip is not None
    native = {
        "fp32": True,
        "tf32": not hip and major >= 8,
        "bf16": hip or major >= 8,
        "fp16": hip or major >= 7 or (major, minor) == (6, 0),
    }
    return Capabilities(
        device=str(device),
        kind="cuda",
        name=facts.name,
        level=f"{major}.{minor}",
        native=tuple(f for f, has in native.items() if has),
        emulated=tuple(f for f, has in native.items() if not has and f != "tf32"),
        cores=facts.multi_processor_count,
        memory_bytes=facts.total_memory,
        compiler=shutil.which("g++") or shutil.which("clang++") or "",
        versions=_versions(),
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now: allocated on a GPU, resident in this process on a CPU (0 where the system does not tell)."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
