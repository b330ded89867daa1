"""A waiting queue of vLLM's that offers what our core has chosen, and nothing else."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from kaiseki.engines.vllm.adapter import RequestQueue


class Offer(RequestQueue):  # type: ignore[misc]
    """Holds requests by arrival; vLLM's scan sees only those on offer, in the order of the offer.

    The order of all that wait is the core's: it keeps its own heaps, so this needs no order to search in,
    and adding or removing one costs the same however many there are. Empty, to whoever asks, means that
    nothing is on offer; `len` and iteration tell of all.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Any] = OrderedDict()
        self._offered: deque[Any] = deque()

    def offer(self, requests: Iterable[Any]) -> None:
        """Put these on offer, all of which wait here, in place of what was."""
        self._offered = deque(requests)

    def add_request(self, request: Any) -> None:
        """Let a request wait."""
        self._requests[request.request_id] = request

    def pop_request(self) -> Any:
        """Take the next one on offer out."""
        request = self._offered.popleft()
        del self._requests[request.request_id]
        return request

    def peek_request(self) -> Any:
        """The next one on offer.

        Raises:
            IndexError: there is none.
        """
        return self._offered[0]

    def prepend_request(self, request: Any) -> None:
        """Let a request wait before the others."""
        self.add_request(request)
        self._requests.move_to_end(request.request_id, last=False)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Let requests wait before the others, the last of them first."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        """Take one out that leaves."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take those out that are here."""
        for request in requests:
            self._requests.pop(request.request_id, None)

    def __bool__(self) -> bool:
        return bool(self._offered)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._requests.values()))
