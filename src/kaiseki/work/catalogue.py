"""Generated workloads by name, for whoever has no trace at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kaiseki.work import fits
from kaiseki.work.arrivals import Gamma, Profile, poisson
from kaiseki.work.batches import Batch
from kaiseki.work.lengths import LogNormal
from kaiseki.work.oneshot import OneShot
from kaiseki.work.prefixes import PrefixTree, SystemPrompts
from kaiseki.work.sessions import Delay, Sessions


class Workload(Protocol):
    """A generator of requests."""

    def stream(self, seed: int) -> Iterator[Batch]:
        """Requests without end, the same ones for the same seed."""
        ...


def azure_conversation(mean_rps: float = fits.AZURE_RPS) -> OneShot:
    """Like the Azure conversation trace of 2023: lengths, and the rate minute by minute."""
    rates = tuple(count / 60 for count in fits.AZURE_REQUESTS_PER_MINUTE)
    return OneShot(Profile(rates, 60.0).scaled_to(mean_rps), fits.AZURE_PROMPT, fits.AZURE_OUTPUT)


def mooncake_conversation(mean_rps: float = fits.MOONCAKE_RPS) -> OneShot:
    """Like the Mooncake conversation trace: lengths, clumped arrivals, and which blocks are shared."""
    tree = PrefixTree(
        SystemPrompts(1, fits.MOONCAKE_SYSTEM_BLOCKS),
        fits.MOONCAKE_BRANCH_SHARE,
        fits.MOONCAKE_LAG,
        fits.MOONCAKE_DEPTH,
    )
    arrivals = Gamma(mean_rps, fits.MOONCAKE_GAP_CV)
    return OneShot(arrivals, fits.MOONCAKE_PROMPT, fits.MOONCAKE_OUTPUT, tree)


def chat_sessions(mean_rps: float = fits.MOONCAKE_RPS) -> Sessions:
    """Chats whose turns wait for each other, with the figures of the Mooncake conversation trace."""
    mean_turns = 1 / (1 - fits.MOONCAKE_FOLLOW_UPS)
    return Sessions(
        poisson(mean_rps / mean_turns),
        mean_turns,
        fits.MOONCAKE_FIRST,
        fits.MOONCAKE_MORE,
        fits.MOONCAKE_OUTPUT,
        Delay(fits.MOONCAKE_TURN_MEDIAN_S, fits.MOONCAKE_TURN_SIGMA, most_s=3600.0),
        SystemPrompts(1, fits.MOONCAKE_SYSTEM_BLOCKS),
    )


def agent_programs(mean_rps: float = 2.0) -> Sessions:
    """Programs of 8 calls on average, with tools in between. The figures are assumed, not measured."""
    mean_turns = 8.0
    return Sessions(
        poisson(mean_rps / mean_turns),
        mean_turns,
        LogNormal(1_500, 0.8, 50, 30_000),
        LogNormal(600, 1.0, 10, 20_000),
        LogNormal(150, 0.9, 5, 4_000),
        Delay(1.5, 1.0, most_s=120.0),
        SystemPrompts(20, 6),
    )


CATALOGUE: dict[str, Callable[..., Workload]] = {
    "azure-conversation": azure_conversation,
    "mooncake-conversation": mooncake_conversation,
    "chat-sessions": chat_sessions,
    "agent-programs": agent_programs,
}
"""By name: makes the workload at a mean rate in requests per second, or at its own without one."""
