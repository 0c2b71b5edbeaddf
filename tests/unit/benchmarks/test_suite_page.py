"""The page of benchmarks is its numbers and nothing else."""

import json
from pathlib import Path

import pytest
from benchmarks.suite import result
from benchmarks.suite.__main__ import PAGE, RESULTS
from benchmarks.suite.method import Claim, Excluded, Taken
from benchmarks.suite.page import in_terminal, render, standing, table, with_floors
from benchmarks.suite.result import files, merged, place, read, row_of, write
from benchmarks.suite.rows import ROWS

ROOT = Path(__file__).parents[3]


def record(name="one", day="2026-01-01", ours=(0.1, 0.1, 0.1)):
    taken = [
        Taken("ours", "ours", 0.05, list(ours), [3.0, 2.0]),
        Taken("again", "twin", 0.05, [0.1, 0.1, 0.1], [3.0, 2.0]),
        Taken("slow", "peer", 0.05, [1.5, None, None], [3.0, 2.9], first_only=True),
    ]
    found = row_of(taken, [Excluded("theirs", "is not fp16")], [Claim("ours", "slow", 0.5, 0.25)])
    machine = {"name": "CPU", "level": "AVX2", "memory_gib": 8.0, "threads": 2, "native": [], "versions": {"torch": "2.13"}}
    about = {
        "name": name,
        "title": f"Row {name}, bf16",
        "says": "a small net",
        "unit": "s",
        "day": day,
        "rounds": 3,
        "machine": machine,
        "load": 0.1,
        "took_s": 1.0,
    }
    return about | {"rates": {"bandwidth": 2e10, "products": 1e11}} | found


def test_the_page_in_the_documents_is_made_from_the_numbers():
    assert PAGE.read_text() == render(*map(read, files(RESULTS)))


def test_the_kept_numbers_are_of_rows_that_exist():
    for file in files(RESULTS):
        rows = read(file)["rows"]
        assert list(rows) == [row.name for row in ROWS if row.name in rows]
        assert {place(RESULTS, row) for row in rows.values()} == {file}


def test_a_page_has_the_ratio_the_verdict_the_excluded_and_the_machine():
    page = render({"rows": {"one": record()}})
    assert "| [Row one, bf16](#row-one-bf16-on-a-cpu-with-no-16-bit-format-in-hardware) | ours / slow | **0.067** |" in page
    assert " | **0.067** | 0.50 | 0.25 | 1.000 | reached, stretch too (1 round) |" in page
    assert "theirs (is not fp16)" in page
    assert "| slow | 1,500 |  | 0.067 | (1) | 50 | 3.000, 2.900 |" in page
    assert "CPU (AVX2; no 16-bit format in hardware), 2 threads" in page
    assert "0.067, first" in page


def test_floors_are_of_the_best_rates_that_the_machine_showed():
    disturbed, quiet, another = record(), record("two"), record("three")
    for row, factor in ((disturbed, 0.5), (quiet, 1), (another, 4)):
        row["rates"] = {"bandwidth": 2e10 * factor, "products": 1e11 * factor}
    another["machine"] = another["machine"] | {"name": "another CPU"}
    disturbed["work"] = {"operations": 2e9}  # 40 of its 50 ms; 20 ms when nobody disturbs, and 5 ms for the bytes
    found = [row["contenders"][0]["floor"] for row in with_floors([disturbed, quiet, another])]
    assert found == pytest.approx([0.025, 0.05, 0.05])


def test_a_floor_that_fp32_gets_below_is_none():
    for file in files(RESULTS):
        for row in with_floors(list(read(file)["rows"].values())):
            fp32 = [c for c in row["contenders"] if c["floor"] and ("bf16" not in row["machine"]["native"] or "fp32" in c["name"])]
            assert all(c["median"] > c["floor"] for c in fp32), row["name"]


def test_rows_of_several_days_are_named():
    page = render({"rows": {"one": record(), "two": record("two", "2026-01-02")}})
    assert "- one: CPU" in page
    assert "- two: CPU" in page


def test_each_kind_of_cpu_has_a_table_of_its_own():
    other = record()
    other["machine"] = other["machine"] | {"level": "AVX512", "native": ["bf16"]}
    page = render({"rows": {"one": record()}}, {"rows": {"one": other}})
    assert "## Where halfstep stands, on a CPU with no 16-bit format in hardware" in page
    assert "## Where halfstep stands, on a CPU with bf16 in hardware" in page
    assert "[Row one, bf16](#row-one-bf16-on-a-cpu-with-bf16-in-hardware)" in page


def test_the_terminal_says_the_same():
    text = in_terminal(record())
    assert "ours / slow = 0.067" in text
    assert "theirs" in text
    assert "A/A 1.000: counts" in text


@pytest.mark.parametrize(
    ("ratio", "met", "counts", "words"),
    [
        (None, None, True, "not measured"),
        (0.1, True, False, "noise"),
        (0.9, False, True, "missed"),
        (0.45, True, True, "reached"),
        (0.1, True, True, "stretch too"),
    ],
)
def test_a_claim_that_is_noise_does_not_count(ratio, met, counts, words):
    assert standing({"ratio": ratio, "met": met, "stretch": 0.4, "rounds": 5}, counts).endswith(words)


def test_columns_without_content_are_left_out():
    assert table(("", "a", "b"), [("x", "", "1"), ("y", "", "")]) == "|  | b |\n| --- | --- |\n| x | 1 |\n| y |  |"


def test_a_row_measured_again_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "cpu.json"
    write(path, merged(read(path), {"b": record("b"), "a": record("a")}, ["a", "b"]))
    first = read(path)
    write(path, merged(first, {"b": record("b", ours=(0.2, 0.2, 0.2))}, ["a", "b"]))
    assert list(read(path)["rows"]) == ["a", "b"]
    assert read(path)["rows"]["a"] == first["rows"]["a"]
    assert read(path)["rows"]["b"]["contenders"][0]["median"] == 0.2


def test_numbers_of_another_format_are_refused(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"format": result.FORMAT + 1, "rows": {}}))
    with pytest.raises(ValueError, match="measure again"):
        read(path)


def test_every_row_has_a_claim_against_something_it_measures():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.claims
        assert all(claim.stretch is None or claim.stretch < claim.reach for claim in row.claims)


def test_the_makefile_runs_it():
    assert "-m benchmarks.suite --write" in (ROOT / "Makefile").read_text()
