"""How the benchmark suite compares: turns, ratios, who sits out, what is left out."""

import itertools
import math

import pytest
from benchmarks.suite import method
from benchmarks.suite.method import Claim, Contender, Excluded, OursFailedError, Taken, Turn, places, ratios, repeats, spread, take_turns
from benchmarks.suite.result import row_of


def taken(name, role, values):
    return Taken(name, role, None, list(values))


@pytest.fixture
def single_steps(monkeypatch):
    """Turns of one step, whatever it lasts; two steps to warm up."""
    monkeypatch.setattr(method, "repeats", lambda _: 1)
    monkeypatch.setattr(method, "WARM_STEPS", 2)


def noting(name, seen, role="peer", **more):
    return Contender(name, lambda: Turn(lambda: seen.append(name), **more), role)


@pytest.mark.usefixtures("single_steps")
def test_contenders_take_turns_and_the_order_flips():
    seen = []
    found, excluded = take_turns([noting("a", seen, "ours"), noting("b", seen), noting("c", seen)], 4, 60.0)
    assert seen == [*"aabbcc", *"abc", *"cba", *"abc", *"cba"]
    assert [len(t.known) for t in found] == [4, 4, 4]
    assert excluded == []


@pytest.mark.usefixtures("single_steps")
def test_what_prepares_a_step_runs_before_each_and_the_end_is_told():
    seen = []
    entry = noting("step", seen, "ours", prepare=lambda: seen.append("prepare"), close=lambda: seen.append("close"))
    take_turns([entry], 3, 60.0)
    assert seen == ["prepare", "step"] * 5 + ["close"]


@pytest.mark.usefixtures("single_steps")
def test_first_and_last_loss_are_kept():
    losses = iter([3.0, 2.0])
    (found,), _ = take_turns([Contender("a", lambda: Turn(lambda: None, loss=lambda: next(losses)), "ours")], 3, 60.0)
    assert found.losses == [3.0, 2.0]


@pytest.mark.usefixtures("single_steps")
def test_a_peer_that_fails_is_left_out_with_its_reason():
    def fails():
        raise ValueError("no such precision\nand more")

    seen = []
    entries = [noting("ours", seen, "ours"), Contender("broken", fails), Contender("breaks", lambda: Turn(lambda: 1 / 0)), noting("peer", seen)]
    found, excluded = take_turns(entries, 2, 60.0)
    assert [t.name for t in found] == ["ours", "peer"]
    assert excluded == [Excluded("broken", "ValueError: no such precision"), Excluded("breaks", "ZeroDivisionError: division by zero")]


def test_ours_failing_ends_the_row():
    with pytest.raises(OursFailedError, match=r"ours: ZeroDivisionError"):
        take_turns([Contender("ours", lambda: Turn(lambda: 1 / 0), "ours")], 2, 60.0)


@pytest.mark.usefixtures("single_steps")
def test_a_slow_peer_is_known_by_its_first_step_and_ours_never_is():
    seen = []
    found, _ = take_turns([noting("ours", seen, "ours"), noting("slow", seen), noting("twin", seen, "twin")], 3, 60.0, slow=0.0)
    assert seen.count("slow") == 1
    assert [(t.name, t.first_only, len(t.known), len(t.values)) for t in found] == [
        ("ours", False, 3, 3),
        ("slow", True, 1, 3),
        ("twin", False, 3, 3),
    ]


@pytest.mark.usefixtures("single_steps")
def test_without_time_left_peers_are_named_and_not_run():
    seen = []
    found, excluded = take_turns(
        [noting("ours", seen, "ours"), noting("peer", seen), noting("rival", seen)], 2, 60.0, patience=-1.0, needed=["rival"]
    )
    assert [t.name for t in found] == ["ours", "rival"]
    assert excluded[0].name == "peer"
    assert "no time left" in excluded[0].reason


@pytest.mark.usefixtures("single_steps")
def test_a_peer_beyond_its_share_sits_rounds_out_and_ours_none():
    seen = []
    found, _ = take_turns([noting("ours", seen, "ours"), noting("peer", seen)], 8, 8.0 * method.SHORTEST)
    assert len(found[0].known) == 8
    assert [v is not None for v in found[1].values] == places(8, 4.0)


@pytest.mark.parametrize(("rounds", "affordable", "count"), [(10, 3.0, 3), (10, 0.2, 1), (10, 99.0, 10), (5, 5.0, 5), (7, 1.99, 1), (4, math.inf, 4)])
def test_rounds_are_spread_evenly(rounds, affordable, count):
    found = places(rounds, min(affordable, 1e9))
    assert len(found) == rounds
    assert sum(found) == count
    at = [i for i, here in enumerate(found) if here]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(("step", "count"), [(1.0, 1), (0.03, 1), (0.01, 3), (1e-6, 50)])
def test_short_steps_are_repeated_within_a_turn(step, count):
    assert repeats(step) == count


def test_ratios_are_of_the_same_round():
    one, other = taken("a", "ours", [1.0, 2.0, 4.0]), taken("b", "peer", [2.0, None, 16.0])
    assert ratios(one, other) == [0.5, 0.25]


def test_without_a_common_round_the_ratio_is_of_the_medians():
    assert ratios(taken("a", "ours", [1.0, 3.0, None]), taken("b", "peer", [None, None, 4.0])) == [0.5]


def test_a_first_step_alone_is_held_against_the_median():
    slow = Taken("b", "peer", None, [4.0, None, None], first_only=True)
    assert ratios(taken("a", "ours", [3.0, 1.0, 1.0]), slow) == [0.25]


def test_quartiles_of_one_and_of_many():
    assert spread([2.0]) == (2.0, 2.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_a_row_has_the_claims_the_best_peer_and_whether_it_counts():
    every = [
        taken("ours", "ours", [1.0, 1.0, 1.0]),
        taken("ours again", "twin", [1.04, 1.04, 0.9]),
        taken("slow", "peer", [4.0, 4.0, 4.0]),
        taken("quick", "peer", [2.0, 2.0, 8.0]),
        taken("other precision", "reference", [0.1, 0.1, 0.1]),
    ]
    claims = [Claim("ours", "best peer", 0.6, 0.4), Claim("ours", "slow", 0.2), Claim("ours", "absent", 1.0)]
    row = row_of(every, [Excluded("gone", "why")], claims)
    assert row["best"]["to"] == "quick"
    assert [(c["ratio"], c["met"]) for c in row["claims"]] == [(0.5, True), (0.25, False), (None, None)]
    assert row["again"]["ratio"] == pytest.approx(1.04)
    assert row["counts"]
    assert row["not_run"] == [{"name": "gone", "reason": "why"}]
    negative = row_of([taken("ours", "ours", [-1.0]), taken("quick", "peer", [2.0])], [], [Claim("ours", "quick", 1.0)])
    assert not negative["claims"][0]["met"]
    noisy = row_of([every[0], taken("ours again", "twin", [1.06, 1.06, 1.06]), every[2]], [], [])
    assert not noisy["counts"]
