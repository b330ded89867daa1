"""One life out of several: a request whose replica failed goes on at another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from kaiseki.core.endings import Ending
from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.core.requests import Begun, Request
from kaiseki.core.table import Record


class Left(NamedTuple):
    """How far a request was that its replica lost; times in ns, counts in tokens.

    `recomputed` includes what was computed and is lost with the replica.
    """

    request_id: str
    admitted_ns: int
    first_token_ns: int
    last_token_ns: int
    outputs: int
    late_gaps: int
    demoted: bool
    cached: int
    preemptions: int
    recomputed: int
    service_ns: float

    @staticmethod
    def of_row(request_id: str, row: Record) -> Left:
        """From its record in a request table."""
        lost = int(row["recomputed"]) + max(int(row["confirmed"]) - int(row["cached"]), 0)
        return Left(
            request_id, int(row["admitted_ns"]), int(row["first_token_ns"]), int(row["last_token_ns"]),
            int(row["outputs"]), int(row["late_gaps"]), bool(row["demoted"]), int(row["cached"]),
            int(row["preemptions"]), lost, float(row["service_ns"]),
        )  # fmt: skip

    @staticmethod
    def of_part(ending: Ending, lost: bool) -> Left:
        """From the end of a part of its life; its KV is lost, or somebody has it."""
        return Left(
            ending.request_id, ending.admitted_ns, ending.first_token_ns, ending.ended_ns, ending.outputs,
            ending.late_gaps, ending.demoted, ending.cached, ending.preemptions,
            ending.recomputed + (ending.prompt - ending.cached if lost else 0), ending.service_ns,
        )  # fmt: skip

    def going_on(self, request: Request) -> Request:
        """The same request, with the tokens it has; their KV has to be computed anew."""
        if not self.outputs:
            return request
        begun = Begun(
            self.first_token_ns, self.demoted, self.outputs, self.last_token_ns, self.late_gaps, sent=False
        )
        return replace(request, begun=begun)


def never_served(request: Request, now: int) -> Ending:
    """How a request ends whose replicas are all gone."""
    begun = request.begun
    return Ending(
        request.id, row=-1, seq=-1, tenant=-1, cls=-1, outcome=Outcome.FAILED, finish=Finish.NONE,
        reason=Reason.ENGINE_ERROR, attained=False, demoted=False, arrival_ns=request.arrival_ns,
        admitted_ns=-1, first_token_ns=-1 if begun is None else begun.first_token_ns, ended_ns=now,
        prompt=request.prompt_tokens, outputs=0 if begun is None else begun.outputs, cached=0,
        preemptions=0, recomputed=0, late_gaps=0, service_ns=0.0,
    )  # fmt: skip


@dataclass(slots=True)
class Past:
    """What a request's earlier lives add to its last one."""

    admitted_ns: int = -1
    cached: int = 0
    preemptions: int = 0
    recomputed: int = 0
    service_ns: float = 0.0

    def add(self, left: Left) -> None:
        """One more life is over."""
        if self.admitted_ns < 0:
            self.admitted_ns, self.cached = left.admitted_ns, left.cached
        self.preemptions += left.preemptions
        self.recomputed += left.recomputed
        self.service_ns += left.service_ns

    def whole(self, ending: Ending) -> Ending:
        """The ending of all lives from that of the last one."""
        first = self.admitted_ns >= 0
        return ending._replace(
            admitted_ns=self.admitted_ns if first else ending.admitted_ns,
            cached=self.cached if first else ending.cached,
            preemptions=self.preemptions + ending.preemptions,
            recomputed=self.recomputed + ending.recomputed,
            service_ns=self.service_ns + ending.service_ns,
        )
