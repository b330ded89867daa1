"""What a vLLM request asks of the scheduler, as the core's `Request`.

It comes in `vllm_xargs`, under the names of `names`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kaiseki.config import Settings
from kaiseki.core.requests import Request, ServiceClass
from kaiseki.engines.vllm import adapter
from kaiseki.engines.vllm.names import CLASS, DEFAULT_TENANT, KEY, PRIORITY, TBT_MS, TENANT, TTFT_MS

_log = logging.getLogger(__name__)


class Asked:
    """Turns vLLM requests into the core's.

    Args:
        settings: with the classes and tenants there are; may be replaced by `reload`.
        max_model_len: longest prompt and output together, tokens.
    """

    def __init__(self, settings: Settings, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Use other classes and tenants for requests from now on."""
        self._settings = settings
        self._classes = settings.service_classes()

    def request(self, request: Any, now: int) -> Request:
        """The core's request for one of vLLM's that arrives `now`, ns."""
        args = adapter.extra_args(request)
        tenant = str(args.get(TENANT) or DEFAULT_TENANT)
        prompt = int(request.num_tokens)  # of a session that goes on, with what it has said already
        output = min(int(request.max_tokens), self._max_model_len - prompt)
        lora = request.lora_request
        return Request(
            id=request.request_id,
            prompt_tokens=prompt,
            max_tokens=max(1, output),
            tenant=tenant,
            cls=self._service_class(tenant, args),
            arrival_ns=now,
            min_tokens=max(1, min(adapter.least_tokens(request), output)),
            priority=int(_number(args.get(PRIORITY), request.priority)),
            block_hashes=tuple(request.block_hashes),
            adapter=lora.lora_name if lora is not None else None,
        )

    def _service_class(self, tenant: str, args: Mapping[str, Any]) -> ServiceClass:
        known = self._settings.tenants.get(tenant)
        name = args.get(CLASS) or (known.cls if known else None) or self._settings.server.default_class
        cls = self._classes.get(str(name))
        if cls is None:
            _log.warning("no class %r in the settings; %s runs without targets", name, tenant)
            cls = self._classes["default"]
        ttft, tbt = _number(args.get(TTFT_MS), 0.0), _number(args.get(TBT_MS), 0.0)
        if ttft > 0.0:
            cls = replace(cls, ttft_ns=round(ttft * 1e6))
        if tbt > 0.0:
            cls = replace(cls, tbt_ns=round(tbt * 1e6))
        return cls


def key_of(request: Any) -> int:
    """The number under which the middleware waits for news of a request; 0 for none."""
    return int(_number(adapter.extra_args(request).get(KEY), 0))


def _number(value: Any, otherwise: float) -> float:
    """A finite number, or something else where the client sent none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return otherwise
    return number if math.isfinite(number) else otherwise
