"""Reading a recording, also while it is being written and after its process was killed.

The whole file is copied first. Frames are then found by their magic number wherever they may begin, and
count only if their checksum is right: one that was torn, or overwritten during the copy, is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kaiseki.observe.recorder.layout import (
    ALIGN_BYTES,
    COMMIT,
    FILE_HEAD,
    FILE_MAGIC,
    FRAME_HEAD,
    FRAME_MAGIC,
    HEAD_BYTES,
    PAGE_BYTES,
    SECTIONS,
    VERSION,
    Kind,
)
from kaiseki.observe.recorder.ring import PREVIOUS, SUFFIX

_OFFSET = FRAME_HEAD.fields["offset"][1] if FRAME_HEAD.fields else 0


class UnreadableRecording(ValueError):
    """There is no recording, or not one that this version can read; the message says which."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame.

    Attributes:
        kind, slot, t_ns: as in `Ring.append`.
        offset: in the stream of all frames; where one is missing before this, `gap` is true.
        body: uint8, lengths and sections.
    """

    kind: Kind
    slot: int
    t_ns: int
    offset: int
    gap: bool
    body: npt.NDArray[np.uint8]

    def sections(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays in it, by name; views of the copy that was read."""
        spec = SECTIONS[self.kind]
        at, found = 4 * len(spec), {}
        for (name, dtype), length in zip(spec, self.body[:at].view("<u4").tolist(), strict=True):
            found[name] = self.body[at : at + length].view(dtype)
            at += length
        return found


class Recording:
    """The frames of one file, oldest first.

    Args:
        data: uint8, a copy of the file.
        name: of the replica or rank.

    Raises:
        UnreadableRecording: it is no recording, or of another version.
    """

    def __init__(self, data: npt.NDArray[np.uint8], name: str = "") -> None:
        self.name = name
        if data.size < PAGE_BYTES or bytes(data[: len(FILE_MAGIC)]) != FILE_MAGIC:
            raise UnreadableRecording(f"{name}: not a recording")
        head = data[: FILE_HEAD.itemsize].view(FILE_HEAD)[0]
        if head["version"] != VERSION:
            raise UnreadableRecording(
                f"{name}: written in version {head['version']} of the format; this reads version {VERSION}"
            )
        size = int(head["ring_bytes"])
        if data.size < PAGE_BYTES + size:
            raise UnreadableRecording(f"{name}: cut short, {data.size} bytes of {PAGE_BYTES + size}")
        self.opened_ns, self.opened_unix_ns = int(head["opened_ns"]), int(head["opened_unix_ns"])
        self._ring = data[PAGE_BYTES : PAGE_BYTES + size]

    @cached_property
    def frames(self) -> list[Frame]:
        """All that are whole."""
        found = [frame for at in self._candidates().tolist() if (frame := self._frame(at)) is not None]
        found.sort(key=lambda frame: frame[0])
        frames, expected, size = [], None, self._ring.size
        oldest = found[-1][0] + found[-1][1] - size if found else 0
        for offset, length, kind, slot, t_ns, body in found:
            if offset < oldest:
                continue  # from a lap before, at the end of the ring where the last one did not fit
            if expected is not None and expected % size + length > size:
                expected = -(-expected // size) * size  # it did not fit at the end
            frames.append(Frame(Kind(kind), slot, t_ns, offset, expected not in (None, offset), body))
            expected = offset + -(-length // ALIGN_BYTES) * ALIGN_BYTES
        return frames

    def of_kind(self, *kinds: Kind) -> Iterator[Frame]:
        """Only frames of these kinds."""
        return (frame for frame in self.frames if frame.kind in kinds)

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the newest keyframe says of the recording: version, settings, limits."""
        newest = next((f for f in reversed(self.frames) if f.kind == Kind.KEYFRAME), None)
        found: dict[str, Any] = {} if newest is None else json.loads(newest.sections()["about"].tobytes())
        return found

    @property
    def first_ns(self) -> int:
        """When the oldest frame was written, by the recording's clock."""
        return self.frames[0].t_ns if self.frames else self.opened_ns

    @property
    def last_ns(self) -> int:
        """When the newest frame was written, by the recording's clock."""
        return max((frame.t_ns for frame in self.frames), default=self.opened_ns)

    def _candidates(self) -> npt.NDArray[np.int64]:
        """Places in the ring at which a frame may begin."""
        step = self._ring.size // ALIGN_BYTES
        words = self._ring[: step * ALIGN_BYTES].reshape(step, ALIGN_BYTES)
        magic = np.ascontiguousarray(words[:, :4]).view("<u4")[:, 0] == FRAME_MAGIC
        places = np.flatnonzero(magic) * ALIGN_BYTES
        offsets = np.ascontiguousarray(words[magic, _OFFSET : _OFFSET + 8]).view("<u8")[:, 0]
        found: npt.NDArray[np.int64] = places[offsets % self._ring.size == places]
        return found

    def _frame(self, at: int) -> tuple[int, int, int, int, int, npt.NDArray[np.uint8]] | None:
        if at + HEAD_BYTES > self._ring.size:
            return None
        head = self._ring[at : at + HEAD_BYTES].view(FRAME_HEAD)[0]
        _, crc, offset, length, kind, _, slot, t_ns = head.item()
        if length < HEAD_BYTES or at + length > self._ring.size:
            return None
        if crc32(self._ring[at + COMMIT.size : at + length].data) != crc:
            return None
        return offset, length, kind, slot, t_ns, self._ring[at + HEAD_BYTES : at + length]


def read(path: Path) -> list[Recording]:
    """The recordings in a folder, one per replica or rank, newest runs first; or that in a file.

    Raises:
        UnreadableRecording: there is none, or one can't be read.
        OSError: a file can't be opened.
    """
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"), key=lambda file: (file.name.endswith(PREVIOUS), file.name))
    else:
        files = [path]
    if not files:
        raise UnreadableRecording(f"{path}: no recording ({SUFFIX} files) in this folder")
    return [Recording(np.fromfile(file, np.uint8), file.name.removesuffix(SUFFIX)) for file in files]
