"""How OpenMP's threads wait for their next piece of work. To be called before Torch is loaded."""

from __future__ import annotations

import os

SPINS = 100_000
"""Turns of the waiting loop of GNU's runtime before a thread sleeps: about a millisecond."""


def spin_briefly() -> None:
    """Let threads that wait spin for about a millisecond, then sleep, unless the environment says otherwise.

    A forward of a small model has hundreds of parallel regions, tens of microseconds apart. Threads that
    sleep in between are woken by the kernel each time, which can take longer than the work itself and
    varies; threads that spin for ever take the processor from everybody else while nothing runs.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
