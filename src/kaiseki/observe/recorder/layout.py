"""The format of a recording; told for other readers in `docs/recorder.md`.

A file is a page with a header, then a ring of frames. A frame has a head, the lengths of its sections in
bytes, and the sections one after the other: arrays of fixed-width records, whose types follow from its kind.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

import numpy as np

from kaiseki.core.trace import CUTOFF, RECORD

VERSION = 1
FILE_MAGIC = b"KAISEKIR"
FRAME_MAGIC = 0x4B_52_45_43  # "CERK" in the file
PAGE_BYTES = 4096
"""The file's header; the ring begins behind it."""
ALIGN_BYTES = 64
"""Frames begin at multiples of it."""

FILE_HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("pid", "<u4"),
        ("ring_bytes", "<u8"),
        ("opened_ns", "<i8"),  # clock of the recording when it was opened
        ("opened_unix_ns", "<i8"),  # the same moment in Unix time
    ]
)
FRAME_HEAD = np.dtype(
    [
        ("magic", "<u4"),
        ("crc", "<u4"),  # CRC-32 of what follows in the frame
        ("offset", "<u8"),  # of the frame in the stream of all frames since the file was made
        ("bytes", "<u4"),  # length of the frame, without padding
        ("kind", "<u2"),
        ("sections", "<u2"),
        ("slot", "<i8"),
        ("t_ns", "<i8"),
    ]
)
COMMIT = Struct("<II")
"""Magic and checksum, which are written last."""
HEAD = Struct("<QIHHqq")
"""The rest of a frame's head."""
HEAD_BYTES = FRAME_HEAD.itemsize


class Kind(IntEnum):
    """What a frame tells."""

    KEYFRAME = 1
    OPENED = 2
    REFUSED = 3
    DECIDED = 4
    APPLIED = 5
    NOTED = 6
    ENDED = 7
    CALLED = 8


class Call(IntEnum):
    """Other calls that change the scheduler, needed for replay."""

    CANCEL = 1
    FAIL = 2
    BACK_OFF = 3
    COME_BACK = 4
    LANDED = 5
    HANDED_OVER = 6
    SET_WEIGHT = 7


REQUEST = np.dtype(
    [
        ("seq", "<i8"),  # arrival sequence, -1 when it was refused
        ("row", "<i4"),
        ("tenant", "<i4"),  # index, as in cutoffs; -1 when it was refused
        ("prompt", "<i4"),
        ("max_tokens", "<i4"),
        ("min_tokens", "<i4"),
        ("priority", "<i4"),
        ("arrival_ns", "<i8"),
        ("ttft_ns", "<i8"),  # own target; -1 for its class's
        ("reason", "<i4"),  # of a refusal
        ("hands_over", "?"),
        ("text_bytes", "<u4"),  # its part of the JSON section
    ]
)
"""A request as submitted. Beside it, as JSON: id, tenant, class, and where they apply fork_of, adapter, how
many `pages` have digests, what it has `begun` on another replica, and the `numbers` of a refusal."""

DECISION = np.dtype(
    [
        ("work_limit", "<i8"),  # -1 for none
        ("spent_ns", "<i8"),  # measured time to decide; -1 when it was not measured
        ("predicted_ns", "<i8"),
        ("bound_ns", "<i8"),
        ("quantum_tokens", "<i4"),
        ("running", "<i4"),
        ("waiting", "<i4"),
        ("free_blocks", "<i4"),
        ("live_blocks", "<i4"),
        ("total_blocks", "<i4"),
    ]
)
"""A decision, and how things stood after it."""

STEP = np.dtype([("started_ns", "<i8"), ("ended_ns", "<i8"), ("spent_ns", "<i8")])
"""Measured: when the engine computed, and what deciding and applying took."""

ENDING = np.dtype(
    [
        ("row", "<i4"),
        ("seq", "<i8"),
        ("tenant", "<i4"),
        ("cls", "<i4"),
        ("outcome", "i1"),
        ("finish", "i1"),
        ("reason", "i1"),
        ("attained", "?"),
        ("demoted", "?"),
        ("arrival_ns", "<i8"),
        ("admitted_ns", "<i8"),
        ("first_token_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("prompt", "<i4"),
        ("outputs", "<i4"),
        ("cached", "<i4"),
        ("preemptions", "<i4"),
        ("recomputed", "<i8"),
        ("late_gaps", "<i4"),
        ("service_ns", "<f8"),
    ]
)
"""How a request ended: the fields of `kaiseki.core.endings.Ending` in their order, but for the id."""

_I32, _F64, _BYTE, _BOOL = np.dtype("<i4"), np.dtype("<f8"), np.dtype("u1"), np.dtype("?")

SECTIONS: dict[Kind, tuple[tuple[str, np.dtype[np.generic]], ...]] = {
    Kind.KEYFRAME: (
        ("about", _BYTE),  # JSON
        ("requests", REQUEST),  # that are open
        ("texts", _BYTE),
        ("cutoffs", CUTOFF),  # in force
        ("state", _BYTE),  # of the scheduler, for replay; may be empty
    ),
    Kind.OPENED: (("requests", REQUEST), ("texts", _BYTE), ("digests", _BYTE)),
    Kind.REFUSED: (("requests", REQUEST), ("texts", _BYTE)),
    Kind.DECIDED: (
        ("decision", DECISION),
        ("rows", _I32),
        ("tokens", _I32),
        ("starts", _I32),
        ("samples", _BOOL),
        ("preempted", _I32),
        ("records", RECORD),
        ("cutoffs", CUTOFF),
    ),
    Kind.APPLIED: (
        ("step", STEP),
        ("new_tokens", _I32),  # of the decision's rows, in its order, as the next three
        ("finish", np.dtype("i1")),
        ("failed", _BOOL),
        ("retryable", _BOOL),
    ),
    Kind.NOTED: (("records", RECORD),),
    Kind.ENDED: (("endings", ENDING),),
    Kind.CALLED: (("call", _I32), ("rows", _I32), ("values", _F64), ("text", _BYTE)),
}
"""Names and types of the sections of each kind of frame."""

LENGTHS = {kind: Struct(f"<{len(sections)}I") for kind, sections in SECTIONS.items()}


def packer(dtype: np.dtype[np.void]) -> Struct:
    """Packs one record of a packed type, several times as fast as an array of one takes it."""
    assert dtype.names is not None and dtype.fields is not None
    codes = {"i1": "b", "i4": "i", "i8": "q", "u4": "I", "u8": "Q", "f8": "d", "b1": "?"}
    made = Struct("<" + "".join(codes[dtype.fields[name][0].str[1:]] for name in dtype.names))
    assert made.size == dtype.itemsize
    return made


PACK_REQUEST, PACK_DECISION, PACK_STEP = packer(REQUEST), packer(DECISION), packer(STEP)
PACK_ENDING = packer(ENDING)
