"""Agreement over ranks: all of them go on with the same figures, or all of them give up.

Ranks meet in phases. In each, every rank posts a report to the store that torch.distributed was started
with; the verdict is one key of that store, written by whoever has something to say first::

    all reports are in       the last rank to report writes the minimum of every figure
    a rank failed            it writes its reason at once; nobody waits for the others
    a rank does not answer   whoever waited long enough writes who is missing

Writing is an atomic compare-and-set, so there is one verdict and every rank reads it, one that comes late
included. A store, unlike a collective, is left intact by a rank that died or gave up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from hicache_core.errors import RankError, SpecError

MOST_TIMEOUT_S = 1e8
"""About three years; a store takes no number of milliseconds that is much larger."""
_REASON_CHARACTERS = 2000
_RESTART = "Read the log of that rank; nothing was kept here. Start all ranks again once its cause is gone."


class KeyStore(Protocol):
    """What is used of a store of torch.distributed; an operation that fails raises RuntimeError."""

    def set(self, key: str, value: str, /) -> None:
        """Give a key its value."""

    def get(self, key: str, /) -> bytes:
        """Value of a key."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at zero; its new value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have a value."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys have a value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Give a key its value where it has the expected one (empty: none); the value that it has then."""


class Ranks:
    """Ranks that do one thing together; see :func:`together`, which makes them.

    Args:
        store: where they meet, None for a rank that is alone.
        rank: number of this rank.
        members: numbers of all of them, in the same order everywhere.
        timeout_s: seconds that each phase waits for the slowest rank.
        who: what they do, for errors.

    Attributes:
        settled: whether the outcome is known here: committed, or given up for a reason that all ranks read.
    """

    def __init__(
        self, store: KeyStore | None, *, rank: int, members: Sequence[int], timeout_s: float, who: str
    ) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.settled = False
        self._timeout_s = timeout_s
        self._who = who
        self._store = store
        self._phase = 0
        self._place = f"hicache/{who}/{'-'.join(map(str, self.members))}"
        if store is not None:
            # Counted in the store: ranks that came here equally often meet, whatever became of earlier tries.
            self._place += f"/{self._ask(store.add, f'{self._place}/entered/{rank}', 1)}"

    def minimum(self, figures: Mapping[str, int]) -> dict[str, int]:
        """The least value of each name over the ranks that have it: the same on every rank.

        Ranks need not have the same names (uneven placement); the answer has the names of all. Counts of
        tokens are given as they are, before they are rounded to pages.

        Raises:
            RankError: a rank failed, does not answer, or does something else.
        """
        whole = {str(key): int(value) for key, value in figures.items()}
        return self._meet("minimum", whole)

    def commit(self) -> None:
        """All ranks keep what they did since the last exchange, or none does.

        Raises:
            RankError: a rank failed, does not answer, or does something else; undo what was done here.
        """
        self._meet("commit", {})
        self.settled = True

    def fail(self, reason: str) -> None:
        """Tell the others that this rank gives up, without waiting for them; for a rank alone nothing."""
        if self._store is not None:
            verdict = {"failed": [self.rank], "reason": reason[:_REASON_CHARACTERS]}
            self._decide(self._store, self._next_phase(), verdict)

    def _next_phase(self) -> str:
        self._phase += 1
        return f"{self._place}/{self._phase}"

    def _meet(self, step: str, figures: dict[str, int]) -> dict[str, int]:
        store = self._store
        if store is None:
            return figures
        phase = self._next_phase()
        self._ask(store.set, f"{phase}/report/{self.rank}", json.dumps({"step": step, "figures": figures}))
        if self._ask(store.add, f"{phase}/reports", 1) == len(self.members):
            verdict = self._decide(store, phase, self._conclusion(store, phase))
        else:
            verdict = self._await(store, phase)
        if "failed" in verdict:
            self._give_up(verdict["failed"], verdict["reason"])
        agreed: dict[str, int] = verdict["figures"]
        return agreed

    def _await(self, store: KeyStore, phase: str) -> dict[str, Any]:
        """The verdict of this phase, which this rank writes itself once it has waited long enough."""
        try:
            store.wait([f"{phase}/verdict"], timedelta(seconds=self._timeout_s))
        except RuntimeError:
            # Late, or the store is gone: that shows below.
            missing = [r for r in self.members if not self._ask(store.check, [f"{phase}/report/{r}"])]
            late = {"failed": missing, "reason": f"no answer within {self._timeout_s:g} s"}
            return self._decide(store, phase, late if missing else self._conclusion(store, phase))
        verdict: dict[str, Any] = json.loads(self._ask(store.get, f"{phase}/verdict"))
        return verdict

    def _conclusion(self, store: KeyStore, phase: str) -> dict[str, Any]:
        """What follows from the reports of all ranks."""
        reports = [json.loads(self._ask(store.get, f"{phase}/report/{rank}")) for rank in self.members]
        steps = [report["step"] for report in reports]
        if len(set(steps)) > 1:
            taken = ", ".join(f"{rank} {step}" for rank, step in zip(self.members, steps, strict=True))
            return {"failed": list(self.members), "reason": f"ranks take different steps: {taken}"}
        figures: dict[str, int] = {}
        for report in reports:
            for key, value in report["figures"].items():
                figures[key] = min(value, figures.get(key, value))
        return {"figures": figures}

    def _decide(self, store: KeyStore, phase: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """Write a verdict unless there is one; the one that holds."""
        held = self._ask(store.compare_set, f"{phase}/verdict", "", json.dumps(verdict))
        decided: dict[str, Any] = json.loads(held)
        return decided

    def _ask(self, operation: Any, *args: Any) -> Any:
        try:
            return operation(*args)
        except RuntimeError as error:
            self.settled = True
            reason = f"the store of the ranks does not answer: {str(error).splitlines()[0]}"
            raise RankError(who=self._who, ranks=(), reason=reason, remedy=_RESTART) from error

    def _give_up(self, ranks: Sequence[int], reason: str) -> NoReturn:
        self.settled = True
        raise RankError(who=self._who, ranks=ranks, reason=reason, remedy=_RESTART)


@contextmanager
def together(
    group: dist.ProcessGroup | None = None, *, timeout_s: float, who: str = "ranks"
) -> Iterator[Ranks]:
    """Do something on all ranks of a group, or on none::

        with together(group, timeout_s=300, who="host pools") as ranks:
            tokens = ranks.minimum({"kv": tokens_that_fit})["kv"]
            memory = allocate(tokens)
            ranks.commit()

    An exception that leaves the block before the commit is told to the other ranks at once, and they raise at
    their next exchange. So does every other rank where one does not answer. What a rank did inside the block
    it has to undo itself, when the block or the commit raises. Where torch.distributed is not initialised, or
    the group has one rank, the figures come back as they are and errors pass through.

    Args:
        group: ranks that take part; None for all. Its backend does not matter: no collective is called.
        timeout_s: seconds that an exchange waits for the slowest rank: what lies between two exchanges,
            pinning of the whole memory perhaps, has to fit in.
        who: what is done, for errors; groups of the same ranks that act at the same time need different ones.

    Raises:
        RankError: a rank failed (this one: with the exception as its cause), does not answer, takes other
            steps, or leaves without a commit; or the store is gone.
        SpecError: this rank is none of the group's, or the time to wait is none.
    """
    ranks = _ranks(group, timeout_s, who)
    try:
        yield ranks
        if not ranks.settled:
            raise RankError(
                who=who, ranks=[ranks.rank], reason="left without a commit", remedy="Call commit()."
            )
    except BaseException as error:
        if ranks.settled:
            raise
        reason = f"{type(error).__name__}: {error}"
        with suppress(RankError):
            ranks.fail(reason)
        if len(ranks.members) == 1 or isinstance(error, RankError) or not isinstance(error, Exception):
            raise
        raise RankError(who=who, ranks=[ranks.rank], reason=reason, remedy=_RESTART) from error


def agree(
    figures: Mapping[str, int],
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float,
    who: str = "figures",
) -> dict[str, int]:
    """The least value of each name over the ranks; arguments and errors of :func:`together`.

    The figures themselves where torch.distributed is not initialised.
    """
    return _ranks(group, timeout_s, who).minimum(figures)


def _ranks(group: dist.ProcessGroup | None, timeout_s: float, who: str) -> Ranks:
    if not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise SpecError(
            who=who,
            got=f"{timeout_s} s to wait",
            expected=f"more than 0, at most {MOST_TIMEOUT_S:g}",
            remedy="Correct timeout_s.",
        )
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, rank=0, members=(0,), timeout_s=timeout_s, who=who)
    rank = dist.get_rank()
    if dist.get_rank(group) < 0:
        raise SpecError(
            who=who,
            got=f"a group without rank {rank}",
            expected="a group that this rank is in",
            remedy="Ask on the ranks of the group only.",
        )
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    store = dist.distributed_c10d._get_default_store() if len(members) > 1 else None
    return Ranks(store, rank=rank, members=members, timeout_s=timeout_s, who=who)
