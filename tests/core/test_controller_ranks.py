"""Invariants I8 and I10 of controllers: two processes end up equal, or both fail and keep nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core import controller_ranks
from tests.core.rank_processes import report, run

pytestmark = pytest.mark.slow
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What came of each scenario, by rank."""
    folder = tmp_path_factory.mktemp("controllers")
    assert run(controller_ranks.run_scenarios, f"file://{folder}/store", folder) == [0, 0]
    return [report(folder, rank) for rank in range(2)]


def _results(outcomes: list[Any], name: str) -> list[Any]:
    return [outcome[name]["result"] for outcome in outcomes]


def test_ranks_with_unequal_memory_get_the_same_pages(outcomes: list[Any]) -> None:
    """The least of 16 and 12 pages; the rank that could hold more says so."""
    first, second = _results(outcomes, "unequal pages")
    assert (first["pages"], second["pages"]) == (12, 12)
    assert "agreed-on-fewer-pages" in first["decisions"]
    assert "agreed-on-fewer-pages" not in second["decisions"]


def test_ranks_with_unequal_layers_get_the_same_pages(outcomes: list[Any]) -> None:
    """I10: 40,000 bytes hold 69 pages of 3 layers (576 bytes), and 52 of 4 (768): 52 on both."""
    assert [result["pages"] for result in _results(outcomes, "unequal layers")] == [52, 52]


def test_a_rank_that_runs_out_makes_both_fail_and_keep_nothing(outcomes: list[Any]) -> None:
    """Within ten seconds, neither hangs, nothing stays registered or booked."""
    results = _results(outcomes, "runs out")
    assert [result["error"] for result in results] == ["rank", "rank"]
    assert [result["left"] for result in results] == [[0, 0], [0, 0]]
    assert all("rank 1" in result["reason"] for result in results)
    assert all(outcome["runs out"]["seconds"] < DEADLINE_S for outcome in outcomes)


def test_a_rank_without_books_makes_both_fail_at_once(outcomes: list[Any]) -> None:
    """The other does not wait out its timeout of eight seconds, and is told why."""
    results = _results(outcomes, "no books")
    assert [(result["error"], result["left"]) for result in results] == [("rank", 0), ("rank", 0)]
    assert all("LOCAL_WORLD_SIZE" in result["reason"] for result in results)
    assert all(outcome["no books"]["seconds"] < 6 for outcome in outcomes)


def test_controllers_of_different_names_do_not_meet(outcomes: list[Any]) -> None:
    """Whatever the order in which each rank makes them."""
    assert _results(outcomes, "draft and target") == [{"draft": 8, "target": 15}] * 2


def test_a_sidecar_joins_on_all_ranks_or_on_none(outcomes: list[Any]) -> None:
    """The rank whose own sidecar is fine lets go of it too; both serve on, and the next one joins."""
    first, second = _results(outcomes, "sidecar")
    assert (first["step"], second["step"]) == ("agree", "probe")
    assert first["same"]
    assert second["same"]
    assert first["last"]["pools"] == second["last"]["pools"] == ["kv", "good"]
