"""ASGI middleware for vLLM's `--middleware kaiseki.engines.vllm.middleware.KaisekiMiddleware`.

On the way in, headers and API keys become what the scheduler reads (see `names`), and what the queue has no
room for is refused. On the way out, an answer begins only with its first token: a request that was refused or
expired in the queue gets its own status, 400, 429 or 503, with the reason and when to try again, whether it
streams or not. vLLM alone would answer 500, or 200 with an error inside.

| route | |
|---|---|
| `GET /kaiseki/v1/state` | figures of each rank in this machine |
| `POST /kaiseki/v1/mode` | `{"mode": "kaiseki" | "shadow" | "vllm"}`: who decides from the next step on |
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kaiseki.config import Settings
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.engines.updates import Update
from kaiseki.engines.vllm.board import STATE, Board, Ended, Mode, folder
from kaiseki.engines.vllm.configured import Configured
from kaiseki.engines.vllm.names import CLASS, KEY, PREFIX, PRIORITY, TBT_MS, TENANT, TTFT_MS
from kaiseki.server.errors import ApiError, ended_badly, invalid
from kaiseki.server.identity import Caller, Directory
from kaiseki.server.slo import SLO_HEADER, Targets, describe, offset

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

GENERATES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
PRIORITY_HEADER = "x-vllm-priority"
ID_HEADER = "x-kaiseki-request-id"
_KEY_BITS = 53
"""So that JSON keeps every key exactly."""


class KaisekiMiddleware:
    """See the module."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._rules: Rules | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        ours = path.startswith("/kaiseki/v1/")
        if scope["type"] != "http" or not (ours or (path in GENERATES and scope["method"] == "POST")):
            await self._app(scope, receive, send)
            return
        if self._rules is None:
            self._rules = Rules(scope["app"].state)
        try:
            if ours:
                await _answer(send, 200, self._rules.admin(scope, await _body(receive)), {})
            else:
                await self._generate(self._rules, scope, receive, send)
        except ApiError as error:
            await _answer(send, error.status, error.body, error.headers)

    async def _generate(
        self, rules: Rules, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        raw = await _body(receive)
        headers = _headers(scope)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        key, said = 0, {ID_HEADER: request_id}
        if isinstance(body, dict):  # what is no object vLLM refuses in its own words
            key = secrets.randbits(_KEY_BITS) or 1
            said[SLO_HEADER] = rules.ask(body, headers, key)
            raw = json.dumps(body).encode()
        kept = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"x-request-id")]
        kept += [(b"content-length", str(len(raw)).encode()), (b"x-request-id", request_id.encode())]
        held = Held(send, lambda: rules.ended(key), said)
        await self._app({**scope, "headers": kept}, _again(raw, receive), held.send)


class Rules:
    """What the settings make of headers, and the boards of the ranks.

    Args:
        state: of vLLM's application, with its configuration and arguments.

    Raises:
        ConfigError: the settings have problems.
    """

    def __init__(self, state: Any) -> None:
        self._configured = Configured(state.vllm_config.additional_config)
        self._host = str(getattr(state.args, "host", None) or "0.0.0.0")
        self._folder = folder(state.vllm_config.instance_id)
        self._boards: list[Board] = []
        self._use(self._configured.settings)

    def _use(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = Directory(settings, "localhost" if settings.vllm.trust_headers else self._host)
        self._targets = Targets(settings, self._directory)

    def _boards_now(self) -> list[Board]:
        """Those of ranks that have started by now."""
        if not self._boards:
            self._boards = [Board(path) for path in sorted(self._folder.glob("rank-*"))]
        return self._boards

    def ask(self, body: dict[str, Any], headers: dict[str, str], key: int) -> str:
        """Write into a request's body what the scheduler reads. Returns the targets that apply, in words.

        Raises:
            ApiError: the headers are wrong, the key is, or the queue is full.
        """
        settings = self._configured.changed()
        if settings is not None:
            self._use(settings)
        caller = self._directory.caller(headers)
        cls = self._targets.service_class(caller, headers)
        self._refuse_if_full()
        given = body.get("vllm_xargs")
        kept = given if isinstance(given, dict) else {}
        asked = {k: v for k, v in kept.items() if not k.startswith(PREFIX)}
        asked |= {
            TENANT: caller.charged,
            CLASS: cls.name,
            KEY: key,
            PRIORITY: _priority(body, headers, caller),
        }
        if cls.ttft_ns is not None:
            asked[TTFT_MS] = cls.ttft_ns / 1e6
        if cls.tbt_ns is not None:
            asked[TBT_MS] = cls.tbt_ns / 1e6
        body["vllm_xargs"] = asked
        return describe(cls)

    def _refuse_if_full(self) -> None:
        """Refuse before vLLM reads the prompt, if no rank's queue has room."""
        boards = self._boards_now()
        if boards and all(_full(board) for board in boards):
            best = min(boards, key=lambda board: float(board.state["drain_s"][0]))
            numbers = {name: board_sum(boards, name) for name in ("waiting", "waiting_tokens")}
            retry_after = float(best.state["drain_s"][0])
            raise ended_badly(_update(Ended(Outcome.REFUSED, Reason.QUEUE_FULL, numbers, retry_after)))

    def ended(self, key: int) -> ApiError | None:
        """The error of a request that did not end with its output, if a board tells of it."""
        for board in self._boards_now() if key else ():
            found = board.find(key)
            if found is not None:
                return ended_badly(_update(found))
        return None

    def admin(self, scope: MutableMapping[str, Any], raw: bytes) -> dict[str, Any]:
        """Answer a route of ours.

        Raises:
            ApiError: no such route, it is not the caller's, or the body is wrong.
        """
        caller = self._directory.admin(_headers(scope))
        if not caller.operator:
            raise ApiError(403, "Only an operator may use this route.", code="not_an_operator")
        route = (scope["method"], scope["path"].removeprefix("/kaiseki/v1/"))
        boards = self._boards_now()
        if route == ("GET", "state"):
            return {"ranks": [_state(board) for board in boards]}
        if route == ("POST", "mode"):
            mode = _mode(raw)
            for board in boards:
                board.write(wanted=int(mode))
            return {"mode": mode.name.lower(), "ranks": len(boards)}
        raise ApiError(404, f"There is no {route[0]} {scope['path']}.", code="not_found")


class Held:
    """Sends an answer on once it is known how it begins.

    Args:
        send: the server's.
        error: asks whether the request ended badly.
        said: headers to add.
    """

    def __init__(self, send: Send, error: Callable[[], ApiError | None], said: dict[str, str]) -> None:
        self._send, self._error, self._said = send, error, said
        self._start: Message | None = None
        self._replaced = False

    async def send(self, message: Message) -> None:
        """Take one message of the answer."""
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            extra = [(k.encode(), v.encode()) for k, v in self._said.items()]
            self._start = {**message, "headers": [*message.get("headers", ()), *extra]}
            return
        if self._start is not None:
            body = message.get("body", b"")
            if not body and message.get("more_body"):
                return
            bad = self._start["status"] >= 400 or body.startswith(b'data: {"error"')
            error = self._error() if bad else None
            if error is not None:
                self._replaced = True
                await _answer(self._send, error.status, error.body, error.headers | self._said)
                return
            start, self._start = self._start, None
            await self._send(start)
        await self._send(message)


def _full(board: Board) -> bool:
    most, tokens = board.read("max_waiting"), board.read("max_waiting_tokens")
    over = tokens and board.read("waiting_tokens") >= tokens
    return board.read("mode") == Mode.KAISEKI and bool(over or (most and board.read("waiting") >= most))


def board_sum(boards: list[Board], name: str) -> float:
    """Sum of a figure over ranks."""
    return float(sum(board.read(name) for board in boards))


def _state(board: Board) -> dict[str, Any]:
    figures = {
        name: board.state[name][0].item() for name in STATE.names or () if name not in ("format", "wanted")
    }
    return figures | {"rank": board.path.name, "mode": Mode(board.read("mode")).name.lower()}


def _update(ended: Ended) -> Update:
    return Update(
        "",
        0,
        outcome=ended.outcome,
        reason=ended.reason,
        numbers=ended.numbers,
        retry_after_s=ended.retry_after_s,
    )


def _mode(raw: bytes) -> Mode:
    try:
        return Mode[json.loads(raw)["mode"].upper()]
    except (ValueError, KeyError, TypeError, AttributeError):
        allowed = ", ".join(mode.name.lower() for mode in Mode)
        raise invalid("mode", f'the body must be {{"mode": …}} with one of {allowed}') from None


def _priority(body: dict[str, Any], headers: dict[str, str], caller: Caller) -> int:
    """Place within the class; see `kaiseki.server.slo`."""
    given = body.get("priority", headers.get(PRIORITY_HEADER))
    hints = body.get("nvext")
    hint = hints.get("agent_hints") if isinstance(hints, dict) else None
    wanted = hint.get("priority") if isinstance(hint, dict) else None
    return offset(_whole("priority", given), _whole("nvext.agent_hints.priority", wanted), caller.trusted)


def _whole(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise invalid(name, "must be a whole number", value) from None


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return b"".join(parts)


def _again(raw: bytes, receive: Receive) -> Receive:
    """Gives a body that was read once more, then whatever else comes."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return next_message


async def _answer(send: Send, status: int, document: dict[str, Any], headers: dict[str, str]) -> None:
    raw = json.dumps(document).encode()
    sent = {"content-type": "application/json", "content-length": str(len(raw))} | headers
    pairs = [(k.encode(), v.encode()) for k, v in sent.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": raw})
