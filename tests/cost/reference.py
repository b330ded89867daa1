"""Measured iteration times that the roofline is held against; all of Llama-2-70B unless said otherwise.

Kernels: sums over the 80 layers of measured kernels, without embedding, output head and host. GEMM,
element-wise kernels and all-reduce from the profiles of Vidur (A. Agrawal et al., MLSys 2024), attention
from the tables of NVIDIA's aiconfigurator. Sources disagree on attention of a 4,096-token prompt on A100:
2.32 against 0.91 ms per layer.

System: means of the whole engine of 2023 with its host time, measured for Splitwise (P. Patel et al., ISCA
2024).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kaiseki.core.costs import add_decode, add_prefill
from kaiseki.core.decision import F64
from kaiseki.core.protocols import N_FEATURES


class Point(NamedTuple):
    """One measured iteration."""

    card: str
    tp: int
    decodes: int
    context: int
    prefill: int
    measured_ms: float

    @property
    def features(self) -> F64:
        """float64[N_FEATURES]."""
        made = np.zeros(N_FEATURES)
        for _ in range(self.decodes):
            add_decode(made, float(self.context))
        if self.prefill:
            add_prefill(made, 0.0, float(self.prefill))
        return made

    @property
    def label(self) -> str:
        what = f"prefill {self.prefill}" if self.prefill else f"decode {self.decodes} x {self.context}"
        return f"{self.card} TP{self.tp} {what}"


DEPLOYMENTS = (("a100-80", 8), ("h100", 8), ("a100-80", 2), ("h100", 2))
_KERNELS = {
    (1, 2048, 0): (23.2, 17.0, 57.3, 31.5),
    (32, 2048, 0): (26.2, 18.9, 69.3, 40.0),
    (128, 1024, 0): (38.2, 22.4, 89.4, 46.0),
    (0, 0, 512): (81.6, 34.2, 192.0, 69.0),
    (0, 0, 4096): (474.8, 182.6, 1392.8, 500.6),
}
_SYSTEM_DEPLOYMENTS = (("a100-80", 2), ("a100-80", 8), ("h100", 2), ("h100", 8))
_SYSTEM = {
    (0, 0, 512): (196.7, 95.7, 83.9, 56.7),
    (0, 0, 2048): (687.0, 274.0, 308.0, 137.0),
    (0, 0, 4096): (1481.0, 651.0, 642.0, 379.0),
    (1, 512, 0): (54.8, 44.9, 37.0, 29.7),
    (32, 512, 0): (72.2, 53.2, 52.3, 38.9),
}
KERNELS = [Point(*d, *p, ms[i]) for i, d in enumerate(DEPLOYMENTS) for p, ms in _KERNELS.items()]
"""Deployment by deployment, in the order of the table."""
DISPUTED = [p for p in KERNELS if p.card == "a100-80" and p.prefill == 4096]
"""Points on which the sources disagree; nothing is fitted to them."""
SYSTEM = [Point(*d, *p, ms[i]) for i, d in enumerate(_SYSTEM_DEPLOYMENTS) for p, ms in _SYSTEM.items()]
"""Deployment by deployment; five points each, so every second one alternates along both axes of the table."""
SMALL = [Point("a100-80", 1, n, 0, 0, ms) for n, ms in ((1, 9.7), (32, 10.9))] + [
    Point("a100-80", 1, 0, 0, n, ms) for n, ms in ((512, 34.6), (4096, 273.0))
]
"""Llama-3-8B: all but attention, from Vidur's profiles."""
