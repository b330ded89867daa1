"""Who is calling: the API key names the tenant, and a trusted caller may name another.

Without any key in the settings everyone is the tenant `default`. If the server listens on a loopback
address only, that is the one local user, who is also trusted and an operator; otherwise anyone on the
network may generate, but the routes under `/kaiseki/v1/` need keys to be set up first.

A gateway that serves many users says whose request it passes on in `x-llm-d-inference-fairness-id` (or
`x-gateway-inference-fairness-id`). That header is believed from a trusted caller and ignored from any
other: a tenant that splits itself into twenty ids must not get twenty shares.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from kaiseki.config import Settings, Tenant, key_digest
from kaiseki.server.errors import ApiError, invalid

DEFAULT_TENANT = "default"
FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        tenant: whom the key belongs to.
        charged: who pays for the request and whose share and class apply; the tenant itself, unless a
            trusted caller named another.
        trusted: may name tenants, tighten targets and go before other classes.
        operator: sees everybody's requests.
    """

    tenant: str
    charged: str
    trusted: bool = False
    operator: bool = False


class Directory:
    """Tenants and their keys."""

    def __init__(self, settings: Settings, host: str) -> None:
        self._tenants = settings.tenants
        self._digests = [(d, name) for name, t in settings.tenants.items() for d in t.api_key_sha256]
        self._local = _is_loopback(host)

    def tenant(self, name: str) -> Tenant:
        """What the settings say of a tenant; one they don't mention has the defaults."""
        return self._tenants.get(name) or Tenant()

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request.

        Raises:
            ApiError: 401 for a missing or wrong key, 400 for a malformed fairness id.
        """
        if not self._digests:
            name, trusted, operator = DEFAULT_TENANT, self._local, self._local
        else:
            name = self._owner(headers.get("authorization", ""))
            trusted, operator = self._tenants[name].trusted, self._tenants[name].operator
        charged = (_fairness_id(headers) if trusted else None) or name
        return Caller(name, charged, trusted, operator)

    def admin(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a route under `/kaiseki/v1/`.

        Raises:
            ApiError: as `caller`; also 401 when there are no keys and strangers could call.
        """
        if not self._digests and not self._local:
            message = "This route needs an API key, and the settings have none (tenants.NAME.api_key_sha256)."
            raise ApiError(401, message, code="no_api_keys")
        return self.caller(headers)

    def _owner(self, authorization: str) -> str:
        key = _key_of(authorization)
        if not key:
            message = "An API key is required: send 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="missing_api_key")
        given = key_digest(key)
        owner = None
        for digest, name in self._digests:  # all of them, so that the time says nothing about the match
            if hmac.compare_digest(digest, given):
                owner = name
        if owner is None:
            raise ApiError(401, "The API key is not valid.", code="invalid_api_key")
        return owner


def _key_of(authorization: str) -> str:
    """The key in an Authorization header; a browser sends it as the password, whatever the user's name."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2].strip()
        except ValueError:
            return ""
    return ""


def _fairness_id(headers: Mapping[str, str]) -> str | None:
    for header in FAIRNESS_HEADERS:
        value = headers.get(header)
        if value is not None:
            value = value.strip()
            if len(value) > 128 or not value.isprintable():
                raise invalid(header, "at most 128 printable characters", value)
            if value:
                return value
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
