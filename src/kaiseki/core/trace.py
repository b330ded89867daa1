"""What the core says about its own decisions: one record per touched request, one per changed cutoff.

A record for every waiting request in every slot would cost more than the slot. A queue whose cutoff
changed leaves one; why an untouched request waited follows from its key against the cutoff in force.
The buffer is drained by whoever keeps history (`observe`), once per slot.
"""

from __future__ import annotations

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


class Trace:
    """Records since the last drain. Grows when a slot touches more than there is room for."""

    def __init__(self, capacity: int = 4096) -> None:
        self._records: npt.NDArray[np.void] = np.zeros(capacity, RECORD)
        self._count = 0
        self._cutoffs: npt.NDArray[np.void] = np.zeros(64, CUTOFF)
        self._cutoff_count = 0
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
        write_notes(self.room(n), slot, now, seqs, int(event), int(reason), amounts, other)
        self._count += n

    def room(self, n: int) -> npt.NDArray[np.void]:
        """RECORD[n] behind the newest record, to be written and then counted by `wrote`."""
        self._records = _roomy(self._records, self._count + n)
        return self._records[self._count : self._count + n]

    def wrote(self, n: int) -> None:
        """The first `n` of the records that `room` gave are valid."""
        self._count += n

    def cuts(self, tenants: int) -> npt.NDArray[np.void]:
        """CUT[tenants]: the cutoffs in force, by tenant."""
        missing = tenants - self._cuts.size
        if missing > 0:
            fresh = np.zeros(missing, CUT)
            fresh["reason"] = -1  # like no cutoff at all
            self._cuts = np.concatenate([self._cuts, fresh])
        return self._cuts[:tenants]

    def cutoff_room(self, n: int) -> npt.NDArray[np.void]:
        """CUTOFF[n] behind the newest, to be written and then counted by `cut`."""
        self._cutoffs = _roomy(self._cutoffs, self._cutoff_count + n)
        return self._cutoffs[self._cutoff_count : self._cutoff_count + n]

    def cut(self, n: int) -> None:
        """The first `n` of the cutoffs that `cutoff_room` gave are valid."""
        self._cutoff_count += n

    def drain(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Everything since the last call: RECORD[n], and CUTOFF[k] that came into force."""
        records, self._count = self._records[: self._count].copy(), 0
        cutoffs, self._cutoff_count = self._cutoffs[: self._cutoff_count].copy(), 0
        return records, cutoffs


def _roomy(array: npt.NDArray[np.void], size: int) -> npt.NDArray[np.void]:
    """The array, doubled until it has room for so many."""
    while array.size < size:
        array = np.concatenate([array, np.zeros_like(array)])
    return array
