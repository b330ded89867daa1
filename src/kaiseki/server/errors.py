"""Errors as OpenAI clients expect them: status, type, code and the field that is wrong."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from kaiseki.core.reasons import Outcome, Reason
from kaiseki.engines.updates import Update

REASON_HEADER = "x-kaiseki-reason"
_TYPES = {429: "rate_limit_error", 403: "permission_error", 500: "server_error", 503: "service_unavailable"}

_STATUS = {
    Reason.NEVER_FITS: 400,
    Reason.TOO_LONG: 400,
    Reason.OVER_STEP: 400,
    Reason.NO_ADAPTERS: 400,
    Reason.DRAINING: 503,
    Reason.ENGINE_FAILING: 503,
    Reason.HOPELESS: 503,
}
"""Status of a refusal by its reason; any other means that capacity is contended right now (429)."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what is wrong, for people.
        param: the field of the request that is wrong.
        code: machine-readable reason; also sent as `x-kaiseki-reason`.
        retry_after_s: when trying again makes sense.
        retry: False tells clients that trying again is useless, whatever the status says.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.retry = retry

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the usual ones."""
        headers = {}
        if self.code is not None:
            headers[REASON_HEADER] = self.code
        if self.retry_after_s is not None:
            headers |= retry_after(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if not self.retry:
            headers["x-should-retry"] = "false"  # what OpenAI's own clients look at
        return headers


def retry_after(seconds: float) -> dict[str, str]:
    """The header that says when trying again makes sense, in whole seconds."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def ended_badly(update: Update) -> ApiError:
    """The error for a request that ended in any other way than completed."""
    reason, outcome = update.reason, update.outcome
    if outcome is Outcome.FAILED and reason is Reason.NONE:
        return internal_error()
    if outcome is Outcome.REFUSED:
        status = _STATUS.get(reason, 429)
    elif outcome is Outcome.FAILED:
        status = 500
    else:
        status = 503
    code = outcome.label if outcome is Outcome.EXPIRED else reason.label
    numbers = ", ".join(f"{name} = {_number(value)}" for name, value in update.numbers.items())
    message = f"Request {outcome.label}: {reason.sentence}{f' ({numbers})' if numbers else ''}."
    hopeless = reason is Reason.HOPELESS and outcome is Outcome.REFUSED
    return ApiError(status, message, code=code, retry_after_s=update.retry_after_s, retry=not hopeless)


def _number(value: float) -> str:
    """Whole numbers in full, others to three digits or so."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:g}"


def internal_error() -> ApiError:
    """A bug of ours; the client learns no more than that."""
    return ApiError(500, "The server made an error; its log has the details.", code="internal_error")


_UNSAID = object()


def invalid(param: str, message: str, value: Any = _UNSAID) -> ApiError:
    """A 400 that names the field, what is allowed, and the value found."""
    got = "" if value is _UNSAID else f"; got {_short(value)}"
    return ApiError(400, f"Invalid {param!r}: {message}{got}.", param=param, code="invalid_value")


def unsupported(param: str, what: str) -> ApiError:
    """A 400 for what would change the answer and can't be done."""
    return ApiError(400, f"{what} is not supported ({param!r}).", param=param, code="unsupported_parameter")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body; the others follow once it is corrected."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    param = "".join(parts).lstrip(".")
    if first["type"] == "missing":
        return ApiError(400, f"{param!r} is required.", param=param, code="missing_parameter")
    if not param:
        return ApiError(400, "The body must be a JSON object.", code="invalid_json")
    message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return invalid(param, message, first["input"])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
