"""What is looked at now and then during a run, as nothing that happens tells of it."""

from __future__ import annotations

from collections.abc import Sequence

from kaiseki.sim.replica import SimReplica


class Fragmentation:
    """KV in use that holds no token, as arriving requests find it.

    Blocks are taken as chunks are computed, so it is the empty ends of last blocks.
    """

    replicas: Sequence[SimReplica] = ()

    def __init__(self) -> None:
        self._wasted = 0
        self._held = 0

    def look(self) -> None:
        """Take a sample of the whole fleet."""
        for replica in self.replicas:
            kv, table = replica.kv, replica.scheduler.table
            computed = table.computed[table.running_rows()]
            self._wasted += int((-computed % kv.block_tokens).sum())
            self._held += kv.live_blocks() * kv.block_tokens

    @property
    def share(self) -> float | None:
        """Wasted part of what is held; None while nothing was ever held."""
        return self._wasted / self._held if self._held else None
