"""What other threads want of the driver, kept until its own thread has time for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Post:
    """Something to do on the driver's thread.

    Attributes:
        action: called with the time.
        requests, tokens: requests that it brings, and their prompt tokens.
    """

    action: Callable[[int], None]
    requests: int = 0
    tokens: int = 0


class Inbox:
    """Posts in order, and how much work they bring.

    While a slot runs, new requests are here and nowhere else. Who asks how much waits must hear of
    them, or a burst during a long slot would pass every limit.

    `changed` is notified of every post; the driver waits on it too.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._posts: deque[Post] = deque()
        self._requests = 0
        self._tokens = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._posts)

    def put(self, post: Post) -> bool:
        """Add a post. False when the inbox is closed, and nobody will ever look into it."""
        with self.changed:
            if self._closed:
                return False
            self._posts.append(post)
            self._requests += post.requests
            self._tokens += post.tokens
            self.changed.notify_all()
            return True

    def empty(self, now: int) -> None:
        """Do what was posted. A request counts until it has been dealt with: rather twice than never."""
        while self._posts:
            post = self._posts.popleft()
            try:
                post.action(now)
            finally:
                with self.changed:
                    self._requests -= post.requests
                    self._tokens -= post.tokens

    def close(self) -> None:
        """Take no more posts."""
        with self.changed:
            self._closed = True

    def backlog(self) -> tuple[int, int]:
        """Requests not dealt with yet, and their prompt tokens."""
        with self.changed:
            return self._requests, self._tokens
