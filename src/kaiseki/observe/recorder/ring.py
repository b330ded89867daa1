"""Writing frames into a ring, in a file mapped into memory or in memory alone.

One thread writes, and never waits for a reader. What was written before the process dies is in the file,
however it dies, as the pages belong to the operating system; a frame that was being written has no valid
checksum. The file is allocated when it is opened: a full disk shows then, and not as a bus error later.
"""

from __future__ import annotations

import fcntl
import os
import time
from io import FileIO
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kaiseki.observe.recorder.layout import (
    ALIGN_BYTES,
    COMMIT,
    FILE_HEAD,
    FILE_MAGIC,
    FRAME_MAGIC,
    HEAD,
    HEAD_BYTES,
    LENGTHS,
    PAGE_BYTES,
    VERSION,
    Kind,
)

LEAST_MB = 1
SUFFIX = ".ring"
PREVIOUS = ".previous" + SUFFIX


class Ring:
    """The newest frames, as many as fit.

    Args:
        buffer: uint8[PAGE_BYTES + ring], zeros, with a multiple of ALIGN_BYTES for the ring.
        now_ns: the recording's clock.
    """

    def __init__(self, buffer: npt.NDArray[np.uint8], now_ns: int) -> None:
        size = buffer.size - PAGE_BYTES
        head = np.zeros(1, FILE_HEAD)
        head[0] = (FILE_MAGIC, VERSION, os.getpid(), size, now_ns, time.time_ns())
        self._buffer = buffer
        self._bytes = memoryview(buffer)  # type: ignore[arg-type]
        self._bytes[: FILE_HEAD.itemsize] = head.tobytes()
        self._size = size
        self.largest_bytes = size // 4
        """The longest frame there may be, so that there are always several."""
        self._file: FileIO | None = None
        self.offset = 0
        """Where the next frame begins, counted from the first one ever."""

    @classmethod
    def in_file(cls, path: Path, size_mb: float, now_ns: int) -> Ring:
        """A ring in a file. One that is there already, of a process that has ended, is kept beside it.

        Raises:
            OSError: no such folder, no room, no right to, or another process is recording there.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _put_aside(path)
        file = path.open("x+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            total = PAGE_BYTES + _aligned(size_mb)
            os.posix_fallocate(file.fileno(), 0, total)
            ring = cls(np.memmap(file, np.uint8, "r+", shape=(total,)), now_ns)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)  # half a ring is of no use, and may be what fills the disk
            raise
        ring._file = file
        return ring

    @classmethod
    def in_memory(cls, size_mb: float, now_ns: int) -> Ring:
        """A ring that ends with the process."""
        return cls(np.zeros(PAGE_BYTES + _aligned(size_mb), np.uint8), now_ns)

    def append(self, kind: Kind, slot: int, t_ns: int, *sections: npt.NDArray[np.generic] | bytes) -> bool:
        """Write one frame.

        Args:
            kind: of the frame.
            slot: to which it belongs.
            t_ns: when it happened.
            sections: in the order of `SECTIONS`, contiguous, of those types.

        Returns:
            False when it is longer than `largest_bytes`, and was left out.
        """
        sizes = [len(s) if type(s) is bytes else s.nbytes for s in sections]  # type: ignore[union-attr]
        lengths = LENGTHS[kind].pack(*sizes)
        length = HEAD_BYTES + len(lengths) + sum(sizes)
        if length > self.largest_bytes:
            return False
        at = self.offset % self._size
        if at + length > self._size:  # frames are in one piece; what is left at the end stays as it is
            self.offset += self._size - at
            at = 0
        head = HEAD.pack(self.offset, length, kind, len(sizes), slot, t_ns)
        tail = b"".join((head, lengths, *sections))  # type: ignore[arg-type]
        at += PAGE_BYTES
        self._bytes[at + COMMIT.size : at + length] = tail
        COMMIT.pack_into(self._bytes, at, FRAME_MAGIC, crc32(tail))
        self.offset += (length + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES
        return True

    def copy(self) -> npt.NDArray[np.uint8]:
        """A copy of the whole file, for a reader in this process."""
        return np.array(self._buffer)

    def close(self) -> None:
        """Write everything to the disk and give the file up; nothing may be written afterwards."""
        if isinstance(self._buffer, np.memmap):
            self._buffer.flush()
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping has a descriptor of its own, and may live on
            self._file.close()


def _aligned(size_mb: float) -> int:
    return int(size_mb * (1 << 20)) // ALIGN_BYTES * ALIGN_BYTES


def _put_aside(path: Path) -> None:
    """Make way for a new file."""
    try:
        with path.open("r+b") as old:
            fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.replace(path.with_name(path.name.removesuffix(SUFFIX) + PREVIOUS))
    except FileNotFoundError:
        return
    except BlockingIOError:
        raise BlockingIOError(f"{path} is being written by another process") from None
