"""What the core says about its own decisions: one record per touched request, one per changed cutoff.

A record for every waiting request in every slot would cost more than the slot. A queue whose cutoff
changed leaves one; why an untouched request waited follows from its key against the cutoff in force.
The buffer is drained by whoever keeps history (`observe`), once per slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kaiseki.core.decision import F64, I64
from kaiseki.core.jit import kernel
from kaiseki.core.reasons import Event, Reason

RECORD = np.dtype(
    [
        ("slot", np.int64),
        ("t_ns", np.int64),
        ("seq", np.int64),  # arrival sequence of the request
        ("event", np.int8),
        ("reason", np.int8),
        ("other", np.int64),  # arrival sequence of the request it yielded to, -1 for none
        ("amount", np.float64),  # the figure behind the reason, in the reason's own unit
    ]
)

CUTOFF = np.dtype(
    [
        ("slot", np.int64),  # in which it came into force, decided at `t_ns`
        ("t_ns", np.int64),
        ("tenant", np.int64),  # whose queue it is of
        ("key", np.float64),  # of the last admitted request (smaller ones are sooner); -inf if none was
        ("seq", np.int64),  # arrival sequence of that request, for ties
        ("reason", np.int8),  # the constraint that bound
        ("short_by", np.float64),  # by how much, in the reason's own unit
    ]
)
"""Where selection stopped: enough to tell any waiting request of a tenant why it waited."""

CUT = np.dtype(
    [
        ("key", np.float64),  # as in `CUTOFF`
        ("seq", np.int64),
        ("reason", np.int32),
        ("size", np.int64),  # requests that wait
        ("new_key", np.float64),  # of the slot that is being recorded
        ("new_seq", np.int64),
        ("new_reason", np.int32),
        ("short", np.float64),
        ("turned", np.bool_),  # a candidate of this tenant was turned away
    ],
    align=True,
)


@kernel
def write_notes(
    out: npt.NDArray[np.void],
    slot: int,
    now: int,
    seqs: I64,
    event: int,
    reason: int,
    amounts: F64,
    other: int,
) -> None:
    """Write one record per request; the last of `amounts` holds for all that follow."""
    for i in range(seqs.size):
        record = out[i]
        record["slot"] = slot
        record["t_ns"] = now
        record["seq"] = seqs[i]
        record["event"] = event
        record["reason"] = reason
        record["other"] = other
        record["amount"] = amounts[min(i, amounts.size - 1)]


class Log:
    """Records as they are written, handed out piece by piece without a copy: none is written twice."""

    def __init__(self, dtype: np.dtype[np.void], chunk: int) -> None:
        self._records: npt.NDArray[np.void] = np.empty(chunk, dtype)
        self._chunk = chunk
        self._from = self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        """Only what is to be handed out: what else is in memory there is nobody's business."""
        pending = self._records[self._from : self._count].copy()
        return self.__dict__ | {"_records": pending, "_from": 0, "_count": pending.size}

    def room(self, n: int) -> npt.NDArray[np.void]:
        """`n` records behind the newest one, to be written and then counted by `wrote`."""
        if self._count + n > self._records.size:
            pending = self._records[self._from : self._count]
            self._records = np.empty(2 * (pending.size + n) + self._chunk, self._records.dtype)
            self._records[: pending.size] = pending
            self._from, self._count = 0, pending.size
        return self._records[self._count : self._count + n]

    def wrote(self, n: int) -> None:
        """The first `n` of the records that `room` gave are valid."""
        self._count += n

    def drain(self) -> npt.NDArray[np.void]:
        """Everything since the last call."""
        start, self._from = self._from, self._count
        return self._records[start : self._count]


class Trace:
    """Records since the last drain, and the cutoffs in force.

    Attributes:
        records: RECORD, of touched requests.
        cutoffs: CUTOFF, those that came into force.
    """

    def __init__(self, chunk: int = 4096) -> None:
        self.records = Log(RECORD, chunk)
        self.cutoffs = Log(CUTOFF, chunk)
        self._cuts = np.zeros(0, CUT)

    def note(
        self,
        slot: int,
        now: int,
        seqs: I64,
        event: Event,
        reason: Reason,
        amount: float | F64 = 0.0,
        other: int = -1,
    ) -> None:
        """Add one record per request in `seqs`; `amount` may differ from one to the next."""
        n = seqs.size
        if n == 0:
            return
        amounts = amount if isinstance(amount, np.ndarray) else np.array([amount], np.float64)
        write_notes(self.records.room(n), slot, now, seqs, int(event), int(reason), amounts, other)
        self.records.wrote(n)

    def cuts(self, tenants: int) -> npt.NDArray[np.void]:
        """CUT[tenants]: the cutoffs in force, by tenant."""
        missing = tenants - self._cuts.size
        if missing > 0:
            fresh = np.zeros(missing, CUT)
            fresh["reason"] = -1  # like no cutoff at all
            self._cuts = np.concatenate([self._cuts, fresh])
        return self._cuts[:tenants]

    def drain(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Everything since the last call: RECORD[n], and CUTOFF[k] that came into force."""
        return self.records.drain(), self.cutoffs.drain()
