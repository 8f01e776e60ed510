"""The service on Ray Serve: `serve run serve.app:app`; settings follow as `run_folder=runs/other replicas=2`.

Co-located: every replica holds the lookup table and all shards and answers a query in one process, because encoding a
query costs 10 µs and a hop between deployments 3 ms.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.schema import LoggingConfig
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serve.middleware import Gate, access_log, error_response
from serve.schemas import ErrorResponse, HealthResponse, InfoResponse, Problem, SearchRequest, SearchResponse
from serve.search import RequestRefused, SearchService
from serve.settings import ServeSettings, settings_from
from serve.worker import Busy, Worker

logger = logging.getLogger(__name__)

ASSETS = {"/": "index.html", "/static/page.css": "page.css", "/static/page.js": "page.js"}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": meaning}
    for status, meaning in {
        400: "The host name is not one of this service's",
        413: "Body or batch too large",
        422: "The request is not valid",
        503: "Full: try again after Retry-After seconds",
        504: "Not answered in time",
    }.items()
}


def create_app(
    service: SearchService, worker: Worker, settings: ServeSettings, *, behind_proxy: bool = False
) -> FastAPI:
    """The HTTP side around a loaded service. `behind_proxy`: Ray Serve's proxy puts the request id on answers."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()

    app = FastAPI(title="Almanac", description="Search by looking things up.", lifespan=lifespan)
    app.add_middleware(
        Gate,
        allowed_hosts=settings.allowed_hosts,
        max_body_bytes=settings.max_body_bytes,
        add_request_id=not behind_proxy,
    )
    _add_error_handlers(app, settings)

    @app.post("/search", response_model=SearchResponse, responses=REFUSALS)
    async def search(body: SearchRequest, request: Request) -> Response:
        """Answer one query or several; one that cannot be answered gets its own error and harms no other."""
        deadline = time.monotonic() + settings.request_timeout_seconds
        work = partial(service.search, body, deadline=deadline, request_id=request.state.request_id)
        log = request.state.log
        log.update(queries=len(body.items()), mode=body.mode)
        if settings.log_queries:
            log["texts"] = [str(item)[:200] for item in body.items()]
        answer = await worker.run(work, settings.request_timeout_seconds)
        log.update(k=answer.k, took_ms=answer.took_ms.model_dump())
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.get("/info", response_model=InfoResponse)
    async def info() -> InfoResponse:
        """What is being served: index version, counts, model, limits."""
        return service.info()

    @app.get("/readyz", response_model=HealthResponse)
    async def readyz() -> HealthResponse:
        """Ready: table and index are loaded."""
        return HealthResponse(status="ok", index=service.index_state)

    @app.get("/healthz", response_model=HealthResponse, responses={503: {"model": ErrorResponse}})
    async def healthz() -> HealthResponse:
        """Alive: a real search with one vector has just worked, in time."""
        started = time.perf_counter()
        try:
            await worker.run(service.probe, settings.health_timeout_seconds, admit=False)
        except Exception as error:
            logger.exception("the health check failed")
            raise HTTPException(503, f"a search did not work: {type(error).__name__}") from error
        return HealthResponse(status="ok", index=service.index_state, probe_ms=(time.perf_counter() - started) * 1000)

    _add_page(app)
    return app


def _add_page(app: FastAPI) -> None:
    """Serve the page and its two assets from memory: only these names exist, so no path can lead elsewhere."""

    def route(path: str, name: str) -> None:
        file = Path(__file__).parent / "static" / name
        content, media_type = file.read_bytes(), MEDIA_TYPES[file.suffix]

        @app.get(path, include_in_schema=False)
        async def asset() -> Response:
            return Response(content, headers=PAGE_HEADERS, media_type=media_type)

    for path, name in ASSETS.items():
        route(path, name)


def _add_error_handlers(app: FastAPI, settings: ServeSettings) -> None:
    """Every failure is answered with the same JSON body."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        details = [_problem(item) for item in error.errors()[:20]]
        first = details[0]
        where = f"{first.field}: " if first.field else ""
        return error_response(422, "invalid_request", where + first.message, request.state.request_id, details=details)

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> Response:
        return error_response(error.status, error.code, str(error), request.state.request_id, field=error.field)

    @app.exception_handler(Busy)
    async def busy(request: Request, _: Busy) -> Response:
        seconds = settings.retry_after_seconds
        message = f"all {settings.max_ongoing} places are taken: try again in {seconds} s"
        headers = {"retry-after": str(seconds)}
        return error_response(503, "busy", message, request.state.request_id, headers=headers)

    @app.exception_handler(TimeoutError)
    async def late(request: Request, _: TimeoutError) -> Response:
        message = (
            f"not answered within {settings.request_timeout_seconds:g} s: send fewer queries at a time, or a smaller k"
        )
        return error_response(504, "timeout", message, request.state.request_id)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        return error_response(error.status_code, "http", str(error.detail), request.state.request_id, headers=headers)


def _problem(error: dict[str, Any]) -> Problem:
    """A validation error in words, without the value: it may be huge, secret, or impossible to write as JSON."""
    field = ".".join(str(part) for part in error["loc"][1:])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        field, message = "", f"the body is not valid JSON: {error.get('ctx', {}).get('error', message)}"
    return Problem(code=error["type"], message=_clean(message), field=_clean(field) or None)


def _clean(text: str) -> str:
    """Text that can be written as UTF-8: lone surrogates, which JSON can smuggle in, become question marks."""
    return text[:200].encode("utf-8", "replace").decode()


class SearchReplica:
    """One replica: loads the run, answers HTTP, and proves its health to Ray Serve by a real search."""

    def __init__(self, settings: ServeSettings) -> None:
        _log_to_stdout()
        self.settings = settings
        self.service = SearchService.load(settings)
        self.worker = Worker(settings.search_threads, settings.max_ongoing)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.service, self.worker, self.settings, behind_proxy=True)

    async def check_health(self) -> None:
        """Raises when a one-vector search fails or is late: also when all threads hang (T-128)."""
        await self.worker.run(self.service.probe, self.settings.health_timeout_seconds, admit=False)


def _log_to_stdout() -> None:
    """Access log lines as bare JSON; a replica's stdout is collected by Ray."""
    if not access_log.handlers:
        access_log.addHandler(logging.StreamHandler(sys.stdout))
        access_log.setLevel(logging.INFO)
        access_log.propagate = False


def app(arguments: dict[str, Any]) -> serve.Application:
    """The Ray Serve application; `arguments` are settings, given to `serve run` as key=value or in serve.yaml."""
    settings = settings_from(arguments).located()
    deploy = serve.deployment(
        name="search",
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": settings.cpus_per_replica},
        max_ongoing_requests=settings.max_ongoing,
        max_queued_requests=settings.max_queued,
        backpressure_config=BackpressureConfig(retry_after_s=settings.retry_after_seconds),
        health_check_period_s=10,
        health_check_timeout_s=settings.health_timeout_seconds + 5,
        graceful_shutdown_timeout_s=settings.request_timeout_seconds + 5,
        max_constructor_retry_count=3,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    return deploy(serve.ingress()(SearchReplica)).bind(settings)
