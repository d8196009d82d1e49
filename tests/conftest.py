"""What the suites counted, at the end of the output."""

from __future__ import annotations

import pytest

ROUND_TRIPS = "round_trips"
"""Property of a test: (name of what it moved, round trips that it made of it)."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add up what passing tests recorded; workers of xdist send it with their reports."""
    counted: list[tuple[str, int]] = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == ROUND_TRIPS
    ]
    if counted:
        total, variants = sum(count for _, count in counted), len({variant for variant, _ in counted})
        terminalreporter.write_line(f"cross-plugin round trips: {total} combinations of {variants} variants")
