"""How many figures are summed up in a few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def percentiles(values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """`{"p50", "p90", "p99", "mean", "max"}`, in the unit of the values; there is at least one."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "mean": float(np.mean(values)), "max": float(max(values))}
