"""Instants that lie a number of milliseconds ahead. Pure, and total: no number in a record can make it raise."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

LONGEST_MS = 315_360_000_000
"""Ten years. A longer duration is refused where it enters; one that stands in a log already counts as this."""

END_OF_TIME = datetime.max.replace(tzinfo=UTC)


def after(instant: datetime, ms: int) -> datetime:
    """`ms` milliseconds after `instant`: at most ten years, and no later than the calendar goes."""
    ahead = timedelta(milliseconds=min(max(ms, 0), LONGEST_MS))
    return END_OF_TIME if instant > END_OF_TIME - ahead else instant + ahead
