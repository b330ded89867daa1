"""From operations and bytes to time: the roofline of a kernel, as planes."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.cost.cards import Card, Efficiency
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.kernels import Kernel, form

N_PLANES = 3
"""Bound by compute, by memory (or link), by the host's launches."""

IDEAL = Efficiency(
    gemm_compute=1, gemm_memory=1, attention_compute=1, attention_memory=1, elementwise_memory=1,
    link=1, serial=0, kernel_us=0,
)  # fmt: skip
"""The datasheet's own figures, reached in full."""


def kernel_planes(kernel: Kernel, deployment: Deployment, efficiency: Efficiency) -> F64:
    """float64[N_PLANES, N_FORM]: the time of a kernel is the largest of the planes, ns.

    With c the time at the compute rate the kernel reaches and m that at its bandwidth, it takes
    `max(c, m) + serial * min(c, m)` after a fixed start: the roofline (S. Williams et al., 2009) with
    the part that does not overlap. For serial <= 1 that is the larger of `c + serial*m` and
    `m + serial*c`. Where the host launches each kernel, it takes at least `launch_us`.
    """
    if kernel.family in ("all_reduce", "send"):
        return _link_planes(kernel, deployment, efficiency)
    compute, memory = _rates(kernel, deployment.card, efficiency)
    c, m = kernel.flops / compute, kernel.traffic / memory
    start = form(slot=kernel.launches * efficiency.kernel_us * 1e3)
    floor = form(slot=kernel.launches * deployment.launch_us * 1e3)
    return np.stack([start + c + efficiency.serial * m, start + m + efficiency.serial * c, floor])


def _rates(kernel: Kernel, card: Card, efficiency: Efficiency) -> tuple[float, float]:
    """Operations and bytes per nanosecond that the kernel reaches."""
    flops, bandwidth = card.flops(kernel.precision) * 1e-9, card.memory_gb_s
    if kernel.family == "gemm":
        return flops * efficiency.gemm_compute, bandwidth * efficiency.gemm_memory
    if kernel.family == "attention":
        return flops * efficiency.attention_compute, bandwidth * efficiency.attention_memory
    return flops, bandwidth * efficiency.elementwise_memory


def _link_planes(kernel: Kernel, deployment: Deployment, efficiency: Efficiency) -> F64:
    """A ring all-reduce of n bytes over p cards: 2(p-1) hops, 2(p-1)/p * n bytes out of each card.

    (P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms, 2009.) A send is one hop.
    """
    link = deployment.card.peers
    hops = 2 * (deployment.tp - 1) if kernel.family == "all_reduce" else 1
    fixed_us = efficiency.kernel_us + hops * link.latency_us
    time = form(slot=fixed_us * 1e3) + kernel.traffic / (link.gb_s * efficiency.link)
    return np.stack([time, time, form(slot=deployment.launch_us * 1e3)])
