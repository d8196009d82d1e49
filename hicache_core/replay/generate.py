"""A generator of traces that behave like a conversation service, in the Mooncake record schema.

The model is a population of conversations. Every tick brings a number of requests; those that are next
turns of earlier conversations have the first claim, new conversations fill the rest. A next turn extends the
earlier prompt (answer and new message), repeats it, or rewrites it from some block on. All constants below
are fitted to summary statistics of a public conversation trace; no record of it is used.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import attrs

from hicache_core.errors import SpecError, TraceError

BLOCK_TOKENS: Final = 512


@attrs.frozen(kw_only=True)
class Quantiles:
    """A distribution given by some of its quantiles, with straight lines (or exponentials) between them.

    Args:
        levels: probabilities, strictly rising from 0 to 1.
        values: the quantile at each level, in the unit of what is drawn.
        geometric: interpolate the logarithm; for heavy tails, where a straight line would overstate the mean.
    """

    levels: tuple[float, ...]
    values: tuple[float, ...]
    geometric: bool = False

    def at(self, probability: float) -> float:
        """The quantile at ``probability`` in [0, 1)."""
        upper = bisect_right(self.levels, probability)
        low, high = self.values[upper - 1], self.values[upper]
        part = (probability - self.levels[upper - 1]) / (self.levels[upper] - self.levels[upper - 1])
        if self.geometric:
            return low * math.exp(part * math.log(high / low))
        return low + part * (high - low)


# Arrivals come in ticks: the source stamps requests every 3 s, a millisecond early or late as often as not
# at all, and the number in a tick has the spread of a Poisson draw (mean 10.2, deviation 3.3).
TICK_MS: Final = 3000
TICK_JITTER_MS: Final = Quantiles(levels=(0.0, 0.22, 0.78, 1.0), values=(-1.0, 0.0, 0.0, 2.0))
REQUESTS_PER_TICK: Final = 10.2

# A trace is cut out of a running service: conversations that began before it show up as new, long ones.
# 400 ticks (20 min) hold 19 of 20 gaps between turns, so the population is settled when recording starts.
WARM_UP_TICKS: Final = 400

# Prompt of a first turn, tokens. The step near 900 is traffic that sends little more than the system
# prompt; the tail ends at the longest context served.
FIRST_INPUT_TOKENS: Final = Quantiles(
    levels=(0.0, 0.05, 0.15, 0.20, 0.25, 0.30, 0.40, 0.50, 0.60, 0.80, 0.90, 0.95, 0.98, 0.99, 1.0),
    values=(891, 897, 935, 1050, 1270, 1580, 3500, 4900, 6700, 14000, 22500, 34500, 62000, 84000, 126000),
    geometric=True,
)
CONTEXT_LIMIT_TOKENS: Final = 247 * BLOCK_TOKENS

# Answers barely depend on the prompt or the turn, so one distribution serves all (mean about 343 tokens).
OUTPUT_TOKENS: Final = Quantiles(
    levels=(0.0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0),
    values=(1, 10, 24, 156, 350, 472, 597, 698, 1118, 2000),
)

# Chance that a turn has a successor, by turn number (the last holds for all later turns): those who have
# asked often ask again. It hardly depends on length, except that near-empty prompts are probes.
CONTINUES: Final = (0.39, 0.44, 0.56, 0.64, 0.68, 0.71, 0.75)
PROBE_BLOCKS: Final = 2
PROBE_CONTINUES: Final = 0.012

# Seconds from a turn to the next one; a human reads and types. The long tail is what a larger tier catches.
GAP_S: Final = Quantiles(
    levels=(0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.98, 1.0),
    values=(6, 15, 33, 45, 72, 138, 318, 561, 807, 1484, 3030),
    geometric=True,
)

# How the next prompt relates to the last one. Long prompts are rewritten more often: clients drop or
# replace retrieved passages, and every block from the change on gets a new hash.
REPEATS: Final = 0.025
REWRITE_FROM_BLOCKS: Final = 14
REWRITES: Final = 0.29
REWRITES_WHEN_SHORT: Final = 0.02
REWRITE_KEPT_PART: Final = Quantiles(
    levels=(0.0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 1.0),
    values=(0.02, 0.053, 0.068, 0.11, 0.21, 0.45, 0.83, 0.95),
)
REWRITE_LENGTH_RATIO: Final = Quantiles(
    levels=(0.0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 1.0),
    values=(0.3, 0.51, 0.62, 0.79, 1.0, 1.11, 1.37, 1.63, 2.7),
)

# What an extending turn adds beyond the previous answer, tokens: mostly a short message, sometimes a
# document, and documents arrive early (by number of the turn that follows; the last holds for later ones).
# Messages may be negative, because reasoning is stripped from the history.
DOCUMENTS: Final = (0.287, 0.185, 0.12)
DOCUMENT_TOKENS: Final = Quantiles(
    levels=(0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0),
    values=(600, 950, 2200, 4100, 6800, 11400, 16600, 33600, 91000),
    geometric=True,
)
MESSAGE_TOKENS: Final = Quantiles(
    levels=(0.0, 0.05, 0.25, 0.50, 0.75, 0.90, 1.0),
    values=(-70, -12, 8, 17, 52, 219, 600),
)


@attrs.define(kw_only=True, eq=False)
class _Conversation:
    """One conversation as its last turn left it; ``block_ids`` are those already recorded."""

    input_tokens: int
    output_tokens: int
    turn: int
    block_ids: list[int]


class _Service:
    """The population of conversations and the ids given so far."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._due: list[tuple[int, int, _Conversation]] = []
        self._scheduled = 0
        # Block 0, the system prompt, is the first block of every conversation.
        self._next_id = 1

    def tick(self, number: int) -> list[_Conversation]:
        """The turns of one tick in order; each has been given its next turn already, if it has one."""
        slots = self._poisson(REQUESTS_PER_TICK)
        due: list[_Conversation] = []
        while self._due and self._due[0][0] <= number and len(due) < slots:
            due.append(heapq.heappop(self._due)[2])
        turns = []
        for left in range(slots, 0, -1):
            # Next turns are spread evenly over the tick.
            is_next = self._random.random() * left < len(due)
            turns.append(due.pop() if is_next else self._first_turn())
        return turns

    def record(self, turn: _Conversation, timestamp_ms: int) -> dict[str, Any]:
        """The record of a turn; blocks not recorded before get the next ids."""
        missing = math.ceil(turn.input_tokens / BLOCK_TOKENS) - len(turn.block_ids)
        turn.block_ids.extend(range(self._next_id, self._next_id + missing))
        self._next_id += missing
        return {
            "timestamp": timestamp_ms,
            "input_length": turn.input_tokens,
            "output_length": turn.output_tokens,
            "hash_ids": list(turn.block_ids),
        }

    def schedule(self, last: _Conversation, number: int) -> None:
        """Decides whether the conversation goes on after its turn in tick ``number``, when, and how."""
        blocks = math.ceil(last.input_tokens / BLOCK_TOKENS)
        chance = CONTINUES[min(last.turn, len(CONTINUES)) - 1]
        if last.turn == 1 and blocks <= PROBE_BLOCKS:
            chance = PROBE_CONTINUES
        if self._random.random() >= chance:
            return
        following = self._next_turn(last, blocks)
        if following.input_tokens <= CONTEXT_LIMIT_TOKENS:
            gap_ticks = max(1, round(self._draw(GAP_S) * 1000 / TICK_MS))
            heapq.heappush(self._due, (number + gap_ticks, self._scheduled, following))
            self._scheduled += 1

    def jitter_ms(self) -> int:
        """The deviation of a tick from its even spacing, ms."""
        return round(self._draw(TICK_JITTER_MS))

    def _first_turn(self) -> _Conversation:
        return _Conversation(
            input_tokens=int(self._draw(FIRST_INPUT_TOKENS)),
            output_tokens=int(self._draw(OUTPUT_TOKENS)),
            turn=1,
            block_ids=[0],
        )

    def _next_turn(self, last: _Conversation, blocks: int) -> _Conversation:
        kind = self._random.random()
        rewrites = REWRITES if blocks >= REWRITE_FROM_BLOCKS else REWRITES_WHEN_SHORT
        if kind < REPEATS:
            tokens, kept = last.input_tokens, blocks
        elif kind < REPEATS + rewrites:
            kept = max(1, int(blocks * self._draw(REWRITE_KEPT_PART)))
            tokens = int(last.input_tokens * self._draw(REWRITE_LENGTH_RATIO))
            tokens = max(tokens, (kept + 1) * BLOCK_TOKENS)
        else:
            # The last partial block gets a new hash as soon as tokens are added to it.
            kept = last.input_tokens // BLOCK_TOKENS
            tokens = last.input_tokens + max(1, last.output_tokens + self._added_tokens(last.turn))
        return _Conversation(
            input_tokens=tokens,
            output_tokens=int(self._draw(OUTPUT_TOKENS)),
            turn=last.turn + 1,
            block_ids=last.block_ids[:kept],
        )

    def _added_tokens(self, turn: int) -> int:
        has_document = self._random.random() < DOCUMENTS[min(turn, len(DOCUMENTS)) - 1]
        return round(self._draw(DOCUMENT_TOKENS if has_document else MESSAGE_TOKENS))

    def _draw(self, distribution: Quantiles) -> float:
        return distribution.at(self._random.random())

    def _poisson(self, mean: float) -> int:
        # Only Random.random() is promised to give the same numbers in every Python version.
        count, product, floor = 0, self._random.random(), math.exp(-mean)
        while product > floor:
            count += 1
            product *= self._random.random()
        return count


def generate_conversation(requests: int, seed: int) -> Iterator[dict[str, Any]]:
    """Generates a conversation trace: always the same records for the same ``requests`` and ``seed``.

    A longer trace begins with the records of a shorter one of the same seed. Records follow the Mooncake
    schema (``timestamp`` ms, ``input_length`` and ``output_length`` tokens, ``hash_ids`` one per 512-token
    block, the last partial). Ids are dense in order of first use and each always follows the same
    predecessor; block 0 is in every request. Memory grows with open conversations, not with the trace.

    Args:
        requests: number of records, at least 1.
        seed: any integer that is not negative.

    Returns:
        An iterator; records belong to the caller.

    Raises:
        SpecError: a count below 1 or a negative seed, at the call.
    """
    if type(requests) is not int or requests < 1:
        raise SpecError(
            who="generate_conversation",
            got=f"requests={requests!r}",
            expected="an integer of at least 1",
            remedy="Ask for one request or more; a trace without a request cannot be read back.",
        )
    if type(seed) is not int or seed < 0:
        raise SpecError(
            who="generate_conversation",
            got=f"seed={seed!r}",
            expected="an integer of at least 0",
            remedy="Choose a seed of 0 or more.",
        )
    return _generate(requests, seed)


def _generate(requests: int, seed: int) -> Iterator[dict[str, Any]]:
    service = _Service(seed)
    number, left = -WARM_UP_TICKS, requests
    while left > 0:
        timestamp_ms = number * TICK_MS + service.jitter_ms() if number > 0 else 0
        for turn in service.tick(number):
            if number >= 0 and left > 0:
                yield service.record(turn, timestamp_ms)
                left -= 1
            service.schedule(turn, number)
        number += 1


def write_trace(path: str | Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Writes records as JSON lines, one a line; an existing file is replaced.

    The lines go to ``<path>.partial`` first, so a failure leaves what was there before. A path that is
    not a regular file (a pipe, a terminal) is written directly.

    Args:
        path: the file to write.
        records: what ``generate_conversation`` yields, or any JSON objects.

    Returns:
        The number of records written.

    Raises:
        TraceError: the file cannot be written.
    """
    target = Path(path)
    written = 0
    try:
        is_special = target.exists() and not target.is_file()
        partial = target if is_special else target.with_name(target.name + ".partial")
        try:
            with partial.open("w", encoding="utf-8", newline="\n") as file:
                for record in records:
                    file.write(json.dumps(record) + "\n")
                    written += 1
            if not is_special:
                partial.replace(target)
        finally:
            if not is_special:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(
            path=str(path),
            line=None,
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected="a file that can be written",
            remedy="Choose a path in a folder that exists and is writable, with space left.",
        ) from error
    return written
