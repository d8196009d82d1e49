"""Invariants I8 and I10 with two real processes: the same capacity, or an error on both."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.core import rank_programs
from tests.core.rank_processes import report, run, tcp

PAGE_TOKENS = 64
DEADLINE_S = 10.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Outcomes of all scenarios, by rank, over a store in a file."""
    folder = tmp_path_factory.mktemp("ranks")
    codes = run(rank_programs.run_scenarios, f"file://{folder}/store", folder)
    assert codes == [0, 0]
    return [report(folder, rank) for rank in range(2)]


def test_unequal_ranks_have_the_same_capacity(outcomes: list[Any]) -> None:
    """I10: the minimum of what fits each rank, in tokens, and pages only then.

    100 GB (1e9) hold 8,023,106 rows of 12,464 bytes and 7,621,951 of 13,120. The second is the minimum. The
    pages of 64 that hold it are 119,093, or 7,621,952 tokens, on both. (One token more than fits rank 1:
    they exceed its 100 GB by 10,240 bytes. Rounded down it is a page less, and again the same everywhere.)
    """
    assert [outcome["unequal"]["result"]["own"] for outcome in outcomes] == [8_023_106, 7_621_951]
    agreed = [outcome["unequal"]["result"]["agreed"] for outcome in outcomes]
    assert agreed == [{"kv": 7_621_951, "state": 77}] * 2
    assert [-(-figures["kv"] // PAGE_TOKENS) * PAGE_TOKENS for figures in agreed] == [7_621_952] * 2


def test_rank_that_runs_out_fails_both(outcomes: list[Any]) -> None:
    """I8: rank 0 had its memory and does not keep it; both name rank 1 and its reason."""
    for rank, cause in enumerate(["NoneType", "CapacityError"]):
        outcome = outcomes[rank]["exhausted"]
        assert (outcome["ranks"], outcome["cause"], outcome["kept"]) == ([1], cause, [])
        assert outcome["reason"].startswith("CapacityError: kv: got 100 tokens")
        assert outcome["seconds"] < rank_programs.TIMEOUT_S


def test_rank_that_fails_before_the_first_exchange_fails_both(outcomes: list[Any]) -> None:
    """I8: rank 1 does not wait for the end of its time."""
    for rank, cause in enumerate(["ValueError", "NoneType"]):
        outcome = outcomes[rank]["early"]
        assert (outcome["ranks"], outcome["cause"], outcome["kept"]) == ([0], cause, [])
        assert outcome["reason"] == "ValueError: no model"
        assert outcome["seconds"] < rank_programs.TIMEOUT_S


def test_interrupted_rank_fails_the_other(outcomes: list[Any]) -> None:
    """I8: it is told at once; the interrupt itself stays what it is."""
    assert outcomes[1]["interrupted"]["result"] == "interrupted"
    other = outcomes[0]["interrupted"]
    assert (other["ranks"], other["kept"]) == ([1], [])
    assert other["seconds"] < rank_programs.TIMEOUT_S


def test_rank_that_forgets_to_commit_fails_both(outcomes: list[Any]) -> None:
    """I8: rank 0 does not commit alone."""
    assert [outcome["uncommitted"]["ranks"] for outcome in outcomes] == [[1], [1]]
    assert outcomes[0]["uncommitted"]["kept"] == []


def test_failed_agreement_inside_fails_the_outer_one(outcomes: list[Any]) -> None:
    """I8: rank 0 hears of it from rank 1, which raises what it has."""
    assert [outcome["nested"]["ranks"] for outcome in outcomes] == [[1], [7]]
    assert "inner reason" in outcomes[0]["nested"]["reason"]


def test_group_decides_who_is_asked(outcomes: list[Any]) -> None:
    """A rank that is not in it is refused, and one that is alone in it has its own figure."""
    assert [outcome["groups"]["result"] for outcome in outcomes] == [
        [{"pages": 10}],
        [{"pages": 10}, {"pages": 11}],
    ]
    assert outcomes[0]["groups"]["kept"] == ["refusal"]


def test_ranks_agree_again_after_failures(outcomes: list[Any]) -> None:
    """I8: what failed leaves nothing behind that the next try trips over."""
    assert [outcome["one figure"]["result"] for outcome in outcomes] == [{"pages": 10}] * 2


@pytest.mark.parametrize(
    ("victim", "known"), [pytest.param(1, [1], id="a rank"), pytest.param(0, [], id="the host of the store")]
)
def test_rank_that_is_killed_fails_the_other(tmp_path: Path, victim: int, known: list[int]) -> None:
    """I8: within ten seconds; who is missing is known as long as the store is there."""
    codes = run(rank_programs.run_and_die, tcp(), tmp_path, victim)
    survivor = 1 - victim
    assert (codes[victim], codes[survivor]) == (-signal.SIGKILL, 0)
    outcome = report(tmp_path, survivor)
    assert (outcome["ranks"], outcome["kept"]) == (known, [])
    assert outcome["seconds"] < DEADLINE_S
