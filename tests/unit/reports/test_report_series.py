"""What is drawn of a long series: every peak, every value that is not finite, and few points."""

import math

import numpy as np
import pytest

from halfstep.reports.numbers import number, scale, share, size, spark
from halfstep.reports.series import Series, columns, marks, rounded, rows_of, thinned, trend


def series(values, steps=None):
    values = np.asarray(values, float)
    return Series("s", np.arange(len(values), dtype=float) if steps is None else np.asarray(steps, float), values)


def planted(n, seed=0, bad=()):
    values = np.random.default_rng(seed).normal(size=n).cumsum()
    for where, value in bad:
        values[where] = value
    return series(values)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 17, 302, 303, 1000, 100_000])
def test_a_thinned_series_is_short_and_in_order(n):
    found = thinned(planted(n), 150)
    assert len(found) <= min(n, 302)
    assert (np.diff(found.steps) > 0).all()
    if n <= 302:
        assert found.values.tolist() == planted(n).values.tolist()


@pytest.mark.parametrize("n", [303, 1000, 12_345])
def test_the_ends_and_the_extremes_of_every_part_are_kept(n):
    whole, parts = planted(n), 150
    kept = dict(zip(*(lambda s: (s.steps.tolist(), s.values.tolist()))(thinned(whole, parts)), strict=True))
    assert {0.0, float(n - 1)} <= set(kept)
    for i in range(parts):
        a, b = i * n // parts, (i + 1) * n // parts
        inside = [v for step, v in kept.items() if a <= step < b]
        assert (min(inside), max(inside)) == (whole.values[a:b].min(), whole.values[a:b].max())


def test_one_peak_among_100_000_is_drawn():
    values = np.zeros(100_000)
    values[54_321] = 7.0
    found = thinned(series(values), 100)
    assert found.values[found.steps == 54_321].tolist() == [7.0]


BAD = {
    "none": {},
    "one": {5: math.nan},
    "neighbours": {5: math.nan, 6: math.nan, 7: math.nan},
    "kinds side by side": {5: math.nan, 6: math.inf, 7: -math.inf},
    "ends": {0: math.inf, 999: math.nan},
    "scattered": dict.fromkeys(range(0, 1000, 7), math.nan),
    "all": dict.fromkeys(range(1000), math.nan),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("most", [3, 2000])
def test_every_value_that_is_not_finite_is_in_one_mark(bad, most):
    whole = planted(1000, bad=bad.items())
    found = marks(whole, most)
    assert len(found) <= most
    assert sum(m.count for m in found) == whole.bad == len(bad)
    for where, value in bad.items():
        holding = [m for m in found if m.first <= where <= m.last]
        assert len(holding) == 1
        if most > 1000:
            assert holding[0].kind == str(value)
            assert holding[0].count == holding[0].last - holding[0].first + 1, "a mark holds nothing that is finite"
    assert len(thinned(whole, 2000)) == 1000 - len(bad), "and none of it is drawn as a number"


def test_a_trend_is_the_median_of_its_part_and_short_series_have_none():
    assert len(trend(planted(479))) == 0
    values = np.repeat([1.0, 9.0], 600)
    values[3] = np.nan
    found = trend(series(values))
    assert (len(found), set(found.values.tolist())) == (120, {1.0, 9.0})


def test_columns_take_numbers_and_their_names_as_text_and_nothing_else():
    found = columns([{"step": 3, "a": 1, "b": "nan", "c": "text", "d": None, "e": True}, {"a": math.inf, "b": 2.5}, {"step": "x", "a": 4}])
    assert set(found) == {"step", "a", "b"}
    assert (found["a"].steps.tolist(), found["a"].values.tolist()) == ([1, 2, 3], [math.inf, 4, 1])
    assert math.isnan(found["b"].values[1])
    assert (found["a"].bad, found["b"].bad) == (1, 1)


def test_a_table_has_the_extremes_and_what_is_not_finite():
    told = {remark: (step, value) for step, value, remark in rows_of(planted(5000, bad=[(77, math.nan), (4000, math.inf)])) if remark}
    assert told["first that is not finite"][0] == 77
    assert told["last that is not finite"] == (4000, math.inf)
    whole = planted(5000, bad=[(77, math.nan), (4000, math.inf)]).finite.values
    assert (told["lowest"][1], told["highest"][1]) == (whole.min(), whole.max())


def test_numbers_for_json_hide_no_nan():
    assert rounded(np.asarray([1.0, 2.3456789, math.nan, -math.inf, 65536.0])) == [1, 2.3457, None, None, 65536]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (number(2.31449), "2.314"), (number(12400.0), "12,400"), (number(math.nan), "NaN"), (number(-math.inf), "-inf"), (number(None), "–"),
        (number(1.25e-7), "1.25e-07"), (number(True), "yes"), (share(0.0), "0 %"), (share(0.00001), "under 0.01 %"), (share(0.0321), "3.2 %"),
        (share(1.0), "100 %"), (share(math.nan), "NaN"), (size(512), "512 B"), (size(1_535_000_000), "1.43 GiB"), (size(1000 * 1024), "1000 KiB"),
        (scale(65536.0), "65,536 (2^16)"), (scale(1.0), "1"), (scale(math.inf), "inf"),
    ],
)  # fmt: skip
def test_numbers_for_people(made, text):
    assert made == text


def test_a_spark_shows_the_way_and_what_is_not_finite():
    assert spark([]) == ""
    assert spark([1.0, 1.0]) == "▁▁"
    assert spark([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    line = spark([float(i) if i != 500 else math.nan for i in range(1000)])
    assert (len(line), line.count("✕"), line[0], line[-1]) == (48, 1, "▁", "█")
