"""Measured rates: what is decided from them, how they are remembered, and that measuring leaves nothing behind."""

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfstep.hardware import FAMILIES, Rate, Rates, emulated_families, measured_rates
from halfstep.hardware import rates as module
from halfstep.hardware.race import Race, Work, _race, _rounds, products
from halfstep.hardware.rates import CLEARLY, Book
from halfstep.hardware.remembered import Memory, cache_folder


class Measured:
    """A stand-in for measuring, that counts. rates: (fp32, native, emulated) of each family, or of all."""

    def __init__(self, **rates: tuple[float, float, float]) -> None:
        self.rates, self.asked = rates, list[str]()

    def __call__(self, form: str) -> dict[str, Race]:
        self.asked.append(form)
        return {family: Race(self.rates.get(family, self.rates.get("every", (2.0, 1.0, 2.0)))) for family in FAMILIES}


@pytest.mark.parametrize(
    ("native", "emulated", "emulate"),
    [(1.0, 1.0, True), (1.09, 1.0, True), (1.11, 1.0, False), (0.9, 1.0, True), (3.0, 1.0, False), (0.0, 1.0, True), (1.0, 0.0, False)],
)
def test_a_product_is_emulated_unless_the_native_one_is_clearly_faster(native: float, emulated: float, emulate: bool) -> None:
    rate = Rate("matmul", "bf16", 2.0, native, emulated)
    assert rate.emulate == emulate
    assert rate.taken == (emulated if emulate else native)
    assert rate.gain == rate.taken / 2.0


def test_each_family_is_decided_for_itself() -> None:
    rows = (Rate("matmul", "bf16", 1, 2, 1), Rate("convolution", "bf16", 1, 0.01, 0.8), Rate("attention", "bf16", 1, 0.4, 0.9))
    found = Rates("cpu", (*rows, Rate("matmul", "fp16", 1, 1, 1)))
    assert found.emulated("bf16") == ("convolution", "attention")
    assert found.emulated("fp16") == ("matmul",)
    assert found.gain("bf16") == 1 / (0.9 / 0.8 + 0.1 / 0.9), "the slower of matmul and convolution, and attention for a tenth"
    assert found.gain("bf16", ("matmul",)) == 2
    assert found.gain("bf16", ("attention",)) == 0.9
    assert found.gain("bf16", ("matmul", "attention")) == 1 / (0.9 / 2 + 0.1 / 0.9)
    assert found.gain("fp16", ("attention",)) == 1, "of a family that was not measured the others tell"
    assert found.gain("fp8") == 0


@pytest.mark.parametrize(
    ("bf16", "fp16", "best"),
    [(1.0, 1.0, "fp32"), (1.09, 0.1, "fp32"), (1.1, 1.1, "bf16"), (2.0, 2.1, "bf16"), (2.0, 2.3, "fp16"), (0.1, 1.2, "fp16")],
)
def test_the_fastest_format_is_16_bits_only_where_it_is_clearly_faster(bf16: float, fp16: float, best: str) -> None:
    found = Rates("cpu", (Rate("matmul", "bf16", 1, bf16, 0.01), Rate("matmul", "fp16", 1, fp16, 0.01)))
    form, why = found.fastest()
    assert form == best
    assert f"{bf16:.2f} in bf16" in why if best == "fp32" else best in why


def test_a_format_is_measured_when_it_is_asked_for_and_once(tmp_path: Path) -> None:
    measure = Measured(matmul=(1.0, 5.0, 1.0))
    book = Book(tmp_path, measure)
    assert measure.asked == []
    assert book.emulated("bf16") == book.emulated("bf16") == ("convolution", "attention")
    assert measure.asked == ["bf16"]
    book.emulated("fp16")
    assert measure.asked == ["bf16", "fp16"]


def test_another_process_reads_what_was_measured_and_decides_the_same(tmp_path: Path) -> None:
    first, second = Measured(matmul=(1.0, 5.0, 1.0)), Measured(matmul=(1.0, 0.1, 1.0))
    expected = Book(tmp_path, first).rows("bf16")
    other = Book(tmp_path, second)
    assert other.rows("bf16") == expected
    assert second.asked == []
    other.rows("fp16")
    assert second.asked == ["fp16"], "what is in the file is kept beside it"
    assert Book(tmp_path, Measured()).rows("bf16") == expected
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("rates-")] == []


def test_of_processes_that_measure_at_once_all_take_what_the_first_kept(tmp_path: Path) -> None:
    first = Measured(every=(1.0, 5.0, 1.0))

    def slower(form: str) -> dict[str, Race]:
        assert Book(tmp_path, first).emulated(form) == ()
        return Measured(every=(1.0, 0.1, 1.0))(form)

    assert Book(tmp_path, slower).emulated("bf16") == ()
    assert first.asked == ["bf16"]


def _change(change: Callable[[dict[str, list[object]]], object]) -> Callable[[Path], object]:
    """A way to spoil the file: its data changed."""

    def spoil(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data["rates"])
        path.write_text(json.dumps(data))

    return spoil


SPOILS: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_text(path.read_text()[:-40]),
    "empty": lambda path: path.write_text(""),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda path: path.write_text("[]"),
    "another machine's": lambda path: path.write_text(path.read_text().replace('"torch"', '"tensor"')),
    "nan": _change(lambda rates: rates["matmul bf16"].__setitem__(0, float("nan"))),
    "negative": _change(lambda rates: rates["attention bf16"].__setitem__(2, -1.0)),
    "no fp32": _change(lambda rates: rates["attention bf16"].__setitem__(0, 0.0)),
    "too few": _change(lambda rates: rates["matmul bf16"].pop()),
    "text": _change(lambda rates: rates["matmul bf16"].__setitem__(1, "fast")),
    "a family missing": _change(lambda rates: rates.pop("convolution bf16")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("spoil", list(SPOILS))
def test_a_file_with_anything_wrong_is_measured_again(tmp_path: Path, spoil: str) -> None:
    Book(tmp_path, Measured()).rows("bf16")
    (path,) = tmp_path.iterdir()
    SPOILS[spoil](path)
    again = Measured(every=(1.0, 5.0, 1.0))
    assert Book(tmp_path, again).emulated("bf16") == ()
    assert again.asked == ["bf16"]
    if spoil != "a folder":
        third = Measured()
        assert Book(tmp_path, third).emulated("bf16") == (), "and the file is whole again"
        assert third.asked == []
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing is left lying about"


def test_where_nothing_can_be_written_it_is_measured_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        measure = Measured()
        book = Book(tmp_path / "file", measure)  # no folder can be made there
        assert book.emulated("fp16") == book.emulated("fp16") == FAMILIES
        assert measure.asked == ["fp16"]


def test_rates_of_another_torch_or_cpu_are_not_taken(tmp_path: Path) -> None:
    one, other = Memory({"cpu": "A", "torch": "1"}, tmp_path), Memory({"cpu": "A", "torch": "2"}, tmp_path)
    one.add({"x": [1.0]})
    assert one.read() == {"x": [1.0]}
    assert other.read() == {}
    other.add({"x": [2.0]})
    assert (one.read(), other.read()) == ({"x": [1.0]}, {"x": [2.0]})


def test_the_cache_is_where_the_standard_puts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "halfstep"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / "home" / ".cache" / "halfstep"


def test_threads_that_ask_at_once_measure_once(tmp_path: Path) -> None:
    measure, found = Measured(), list[tuple[str, ...]]()
    book = Book(tmp_path, measure)
    threads = [threading.Thread(target=lambda: found.append(book.emulated("bf16"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [FAMILIES] * 8
    assert measure.asked == ["bf16"]


def test_this_machine_is_measured() -> None:
    found = products("bf16")
    assert list(found) == list(FAMILIES)
    for race in found.values():
        fp32, native, emulated = race.rates
        assert min(fp32, emulated) > 1e6
        assert native >= 0


def test_measuring_leaves_the_callers_state_alone_and_is_not_touched_by_it() -> None:
    torch.manual_seed(3)
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    seen = list[torch.Tensor]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)  # type: ignore[func-returns-value]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu"), hooks, torch.device("meta"):
            found = products("fp16")
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(race.rates[0] > 1e6 for race in found.values())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not seen


def test_a_way_without_a_kernel_has_rate_0() -> None:
    def only_wide(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("not implemented for 'Half'")
        return x * 2

    work = Work(only_wide, (torch.ones(64),), (), 1e3)
    fp32, native, emulated = _race(torch.float16, work, work).rates
    assert native == 0
    assert min(fp32, emulated) > 0
    assert Rate("matmul", "fp16", fp32, native, emulated).emulate


def test_one_that_is_far_slower_is_not_run_in_every_round() -> None:
    runs = dict.fromkeys(("fast", "slow"), 0)

    def run(way: str) -> None:
        runs[way] += 1
        sum(range(200_000 if way == "slow" else 2_000))

    least = _rounds(("fast", "slow"), run, 4)
    assert runs == {"fast": 4, "slow": 2}
    assert least["fast"] < least["slow"]


def test_the_rates_of_the_cpu_decide_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_book", Book(tmp_path, Measured(matmul=(1.0, CLEARLY * 2, 1.0))))
    assert emulated_families("bf16") == ("convolution", "attention")
    found = measured_rates("cpu", ("bf16",))
    assert found.emulated("bf16") == ("convolution", "attention")
    assert [row.format for row in found.rows] == ["bf16"] * 3
    assert found.fresh
    assert found.bandwidth > 1e7
    monkeypatch.setattr(module, "_book", Book(tmp_path, Measured()))
    assert measured_rates("cpu", ("bf16",)) == dataclasses.replace(found, fresh=False)


def test_rates_are_plain_values_for_machines() -> None:
    data = json.loads(json.dumps(Rates("cpu", (Rate("matmul", "bf16", 2.0, 1.0, 4.0),), 8.0).as_dict()))
    row = {"family": "matmul", "format": "bf16", "fp32": 2.0, "native": 1.0, "emulated": 4.0, "emulate": True, "gain": 2.0}
    assert data == {"rates": [row], "bandwidth": 8.0, "measured_now": False}
