"""The device probe on this machine, and the advice drawn from hand-made records of other ones."""

import dataclasses
import json
from importlib.metadata import version

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep.hardware import Capabilities, Rate, Rates, default_device, diagnose, doctor, measured_rates, memory_in_use, probe, processes

CPU = Capabilities("cpu", "cpu", "AMD EPYC", "AVX2", ("fp32",), ("bf16", "fp16"), 2, 2**34, "", (("torch", "2.13.0"),))
CPU_FP16 = dataclasses.replace(CPU, native=("fp32", "fp16"), emulated=("bf16",))
A100 = Capabilities("cuda:0", "cuda", "NVIDIA A100", "8.0", ("fp32", "tf32", "bf16", "fp16"), (), 108, 40 * 2**30, "", ())
T4 = dataclasses.replace(A100, name="Tesla T4", level="7.5", native=("fp32", "fp16"), emulated=("bf16",))
V100 = dataclasses.replace(T4, name="Tesla V100", level="7.0")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")


def test_the_cpu_is_described_by_what_torch_and_the_system_say() -> None:
    found = probe("cpu")
    assert (found.device, found.kind) == ("cpu", "cpu")
    assert "fp32" in found.native
    assert set(found.native) | set(found.emulated) == {"fp32", "bf16", "fp16"}
    assert not set(found.native) & set(found.emulated)
    assert found.cores == torch.get_num_threads()
    assert found.memory_bytes > 2**28
    assert found.level.startswith(torch.backends.cpu.get_cpu_capability())
    versions = dict(found.versions)
    assert versions["torch"] == version("torch")
    assert versions["halfstep"] == version("halfstep")
    assert not found.is_native("tf32")


def test_a_device_is_asked_once() -> None:
    assert probe("cpu") is probe(torch.device("cpu"))


def test_the_record_is_frozen_and_plain() -> None:
    found = probe("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.native = ()  # type: ignore[misc]
    back = json.loads(json.dumps(found.as_dict()))
    assert back["versions"]["torch"] == version("torch")
    assert back["native"] == list(found.native)


@no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_cuda_without_cuda_is_refused(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        probe(device)
    assert repr(device) in caught.value.cause
    assert torch.__version__ in caught.value.cause
    assert "no CUDA device" in caught.value.cause
    assert "Use the CPU" in caught.value.remedy


@pytest.mark.parametrize("device", ["mps", "meta"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="not supported") as caught:
        probe(device)
    assert "'cpu' or 'cuda'" in caught.value.remedy


def test_a_name_that_is_no_device_is_refused_by_the_doctor() -> None:
    with pytest.raises(ConfigError, match="banana"):
        doctor("banana")


@no_gpu
def test_the_default_device_is_the_cpu_without_a_gpu() -> None:
    assert default_device() == torch.device("cpu")
    assert probe() == probe("cpu")


def test_the_cpu_can_be_asked_for() -> None:
    assert default_device(cpu=True) == torch.device("cpu")


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("4", 4), ("x", 1), ("", 1)])
def test_processes_are_read_from_the_launcher(monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    assert processes() == count


def test_one_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert processes() == 1


def test_memory_in_use_grows_with_what_is_held() -> None:
    before = memory_in_use(torch.device("cpu"))
    held = torch.ones(2**24)  # 64 MiB
    after = memory_in_use(torch.device("cpu"))
    assert before > 2**20
    assert after - before > held.nbytes / 2


@pytest.mark.parametrize(
    ("device", "advice"), [(CPU, "fp32"), (CPU_FP16, "fp16-mixed"), (A100, "bf16-mixed"), (T4, "fp16-mixed"), (V100, "fp16-mixed")], ids=str
)
def test_advice_follows_the_native_formats(device: Capabilities, advice: str) -> None:
    found = diagnose(device)
    assert found.advice == advice
    assert found.reason
    text = str(found)
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert device.name in rows["device"]
    assert device.level in rows["device"]
    for form in ("fp32", "bf16", "fp16"):
        assert rows[form].endswith("native" if form in device.native else "emulated")
    assert rows["tf32"].endswith("native" if "tf32" in device.native else "not on this device")
    assert f"{advice}: {found.reason}" in rows["advice"]
    assert json.loads(json.dumps(found.as_dict()))["advice"] == advice


def test_a_cpu_without_compiler_is_told_how_to_get_one() -> None:
    assert "apt-get install g++" in str(diagnose(CPU))
    assert "/usr/bin/g++" in str(diagnose(dataclasses.replace(CPU, compiler="/usr/bin/g++")))
    assert "available" in str(diagnose(A100))


def test_the_doctor_looks_at_the_device_asked_for_and_measures_it() -> None:
    found = doctor("cpu")
    assert found == diagnose(probe("cpu"), measured_rates("cpu"))
    assert found.capabilities == probe("cpu")
    assert found.rates is not None
    assert {row.format for row in found.rates.rows} == {"bf16", "fp16"}


SLOW = {"matmul": (4e10, 2e9, 3.2e10), "convolution": (2e10, 2e9, 1.6e10), "attention": (2e10, 5e9, 1.7e10)}
FAST = {"matmul": (4e10, 8e10, 3.2e10), "convolution": (2e10, 5e10, 1.6e10), "attention": (2e10, 1e10, 3e10)}


def rates_of(**formats: dict[str, tuple[float, float, float]]) -> Rates:
    return Rates("cpu", tuple(Rate(family, form, *numbers) for form, table in formats.items() for family, numbers in table.items()), 2e10)


def rows_of(text: str) -> dict[str, str]:
    return {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in text.splitlines()}


def test_rates_are_shown_as_shares_of_fp32s_with_the_way_that_is_taken_first() -> None:
    rows = rows_of(str(diagnose(CPU, rates_of(bf16=FAST, fp16=SLOW))))
    assert rows["matmul"] == "fp32 40 GFLOP/s a thread; bf16 2.00 native, 0.80 emulated; fp16 0.80 emulated, 0.05 native"
    assert rows["attention"] == "fp32 20 GFLOP/s a thread; bf16 1.50 emulated, 0.50 native; fp16 0.85 emulated, 0.25 native"
    assert rows["products"] == "bf16: attention emulated; fp16: all emulated"
    assert rows["copies"] == "20 GB/s read and written by 2 threads"
    assert rows["rates"] == "measured before and kept"
    fresh = dataclasses.replace(rates_of(bf16=FAST, fp16=FAST), fresh=True)
    assert rows_of(str(diagnose(CPU, fresh)))["rates"] == "measured now"


def test_a_gpus_rates_are_shown_without_a_choice() -> None:
    found = tuple(Rate("matmul", form, 5e13, rate) for form, rate in (("fp32", 5e13), ("tf32", 4e14), ("bf16", 8e14), ("fp16", 8e14)))
    rows = rows_of(str(diagnose(A100, Rates("cuda:0", found, 4e12, True))))
    assert rows["matmul"] == "fp32 50 TFLOP/s; tf32 8.00 native; bf16 16.00 native; fp16 16.00 native"
    assert rows["copies"] == "4 TB/s read and written on the device"
    assert "products" not in rows
    assert rows["advice"].startswith("bf16-mixed: ")


@pytest.mark.parametrize(("bf16", "fp16", "advice"), [(SLOW, SLOW, "fp32"), (FAST, SLOW, "bf16-mixed"), (SLOW, FAST, "fp16-mixed")])
def test_measured_rates_advise_before_instructions_do(bf16: dict, fp16: dict, advice: str) -> None:
    for device in (CPU, CPU_FP16):
        assert diagnose(device, rates_of(bf16=bf16, fp16=fp16)).advice == advice


def test_nets_of_convolutions_have_advice_of_their_own_where_it_differs() -> None:
    mixed = FAST | {"convolution": (2e10, 1e10, 1.6e10)}
    found = diagnose(CPU, rates_of(bf16=mixed, fp16=SLOW))
    assert found.advice == "bf16-mixed"
    assert found.reason.endswith("; a net of convolutions: fp32")
    assert "convolutions" not in diagnose(CPU, rates_of(bf16=FAST, fp16=SLOW)).reason
