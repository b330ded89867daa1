"""HTTP/1.1 as uvicorn speaks it, with a limit on the size of a request's head."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b"
)
MESSAGE = b"The request line and headers are larger than %d bytes.\n" % MAX_HEAD_BYTES


class LimitedHead(HttpToolsProtocol):
    """Hangs up on a client whose headers never end.

    The parser keeps them in memory until they are complete, and no limit of its own stops that: the limit
    on bodies comes later.
    """

    _in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        """Also see uvicorn's class."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Also see uvicorn's class."""
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Also see uvicorn's class. What comes in one read is never more than a few hundred kilobytes."""
        super().data_received(data)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LARGE % (len(MESSAGE), MESSAGE))
            self.transport.close()
