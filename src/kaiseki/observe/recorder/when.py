"""Moments as people say them: a time of day, or a date and time."""

from __future__ import annotations

from datetime import datetime, time, timedelta

from kaiseki.observe.recorder.reading import Recording

ALLOWED = "a time of day such as 02:10 or 02:10:30, or a date and time such as 2026-03-01T02:10"


def moment_ns(text: str, recording: Recording) -> int:
    """A moment by the recording's clock; a time of day is the last one before the recording's end.

    Without an offset it is local time.

    Raises:
        ValueError: it is neither a time of day nor a date and time.
    """
    last = datetime.fromtimestamp(_unix_ns(recording, recording.last_ns) / 1e9).astimezone()
    try:
        when = datetime.combine(last.date(), time.fromisoformat(text)).astimezone()
        if when > last:
            when -= timedelta(days=1)
    except ValueError:
        try:
            when = datetime.fromisoformat(text).astimezone()
        except ValueError:
            raise ValueError(f"{text!r}: must be {ALLOWED}") from None
    return round(when.timestamp() * 1e9) - recording.opened_unix_ns + recording.opened_ns


def clock_of(recording: Recording, t_ns: int) -> str:
    """Local date and time of a moment of the recording."""
    return (
        datetime.fromtimestamp(_unix_ns(recording, t_ns) / 1e9)
        .astimezone()
        .isoformat(timespec="milliseconds")
    )


def _unix_ns(recording: Recording, t_ns: int) -> int:
    return recording.opened_unix_ns + t_ns - recording.opened_ns
