"""What every request passes before anything is parsed: a request id, the host check, the body limit, the access log.

Plain ASGI, because it costs microseconds where Starlette's BaseHTTPMiddleware costs a task and two queues a request.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.schemas import ErrorResponse, Problem

logger = logging.getLogger(__name__)
access_log = logging.getLogger("serve.access")
REQUEST_ID = "x-request-id"
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def error_response(
    status: int, code: str, message: str, request_id: str, *, field: str | None = None, details: Sequence[Problem] = (),
    headers: dict[str, str] | None = None,
) -> Response:  # fmt: skip
    """The JSON answer of a request that failed as a whole."""
    body = ErrorResponse(
        error=Problem(code=code, message=message, field=field), details=list(details), request_id=request_id
    )
    return Response(body.model_dump_json(), status, headers, media_type="application/json")


class Gate:
    """ASGI middleware. `scope["state"]` gets `request_id`, and `log`: a dictionary that goes into the access log."""

    def __init__(
        self, app: ASGIApp, *, allowed_hosts: Sequence[str], max_body_bytes: int, add_request_id: bool
    ) -> None:
        self.app = app
        self.allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self.max_body_bytes = max_body_bytes
        self.add_request_id = add_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with 400 or 413; errors that the app did not expect become 500."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        log: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log=log)
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.add_request_id:
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            refusal = self._refuse_host(headers, request_id)
            if refusal is None and scope["method"] not in ("GET", "HEAD"):
                receive, refusal = await self._limit_body(headers, receive, request_id)
            await (refusal or self.app)(scope, receive, watched)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status:
                raise
            message = "something went wrong here; it was logged under the request id"
            await error_response(500, "internal", message, request_id)(scope, receive, watched)
        finally:
            line = {
                "request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status,
                "ms": round((time.perf_counter() - started) * 1000, 3),
            }  # fmt: skip
            access_log.info("%s", json.dumps(line | log))

    def _refuse_host(self, headers: Headers, request_id: str) -> Response | None:
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if "*" in self.allowed_hosts or host in self.allowed_hosts:
            return None
        message = (
            f"this service does not answer to the host name {host[:100]!r}: use one of {sorted(self.allowed_hosts)}, "
            "or set ALMANAC_SERVE_ALLOWED_HOSTS"
        )
        return error_response(400, "host_refused", message, request_id)

    async def _limit_body(self, headers: Headers, receive: Receive, request_id: str) -> tuple[Receive, Response | None]:
        """How to read the body, and the refusal if it is too long. One of unknown length is read here."""
        length = headers.get("content-length", "")
        if length.isdigit():
            return receive, self._too_large(request_id) if int(length) > self.max_body_bytes else None
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                return receive, self._too_large(request_id)
            if not message.get("more_body", False):
                break
        replay: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return replay.pop() if replay else await receive()

        return replayed, None

    def _too_large(self, request_id: str) -> Response:
        message = f"the request body is longer than {self.max_body_bytes:,} bytes: send fewer queries at a time"
        return error_response(413, "body_too_large", message, request_id, headers={"connection": "close"})
