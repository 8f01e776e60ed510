"""A client of the search service, for programs and for people: `python -m serve.client "what is lift"`.

Connection errors and 503 answers are tried again, after what the service asks for with Retry-After or else after
growing pauses. Searching changes nothing, so trying again is always safe.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "ALMANAC_URL"
LONGEST_PAUSE = 30.0
"""Seconds. When the service asks for a longer pause, the caller is told at once instead."""


class SearchError(Exception):
    """The service answered with an error, or did not answer: then `status` is None."""

    def __init__(
        self, message: str, status: int | None = None, code: str = "unreachable", request_id: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.request_id = status, code, request_id


@dataclass(frozen=True)
class _Policy:
    """What to do after an attempt; shared by the two clients, which only send and sleep."""

    url: str
    retries: int
    backoff: float

    def judge(self, attempt: int, outcome: httpx.Response | httpx.TransportError) -> dict[str, Any] | float:
        """The answer's JSON object, or the seconds to wait before the next attempt. SearchError if none is left."""
        if isinstance(outcome, httpx.Response):
            if outcome.status_code != 503:
                return _read(outcome)
            asked = outcome.headers.get("retry-after", "")
            pause = float(asked) if asked.isdigit() else self._growing(attempt)
            return _read(outcome) if attempt >= self.retries or pause > LONGEST_PAUSE else pause
        if isinstance(outcome, httpx.TimeoutException) and not isinstance(outcome, httpx.ConnectTimeout):
            raise SearchError(f"{self.url}: no answer in time ({type(outcome).__name__})", code="timeout") from outcome
        if attempt < self.retries and not isinstance(outcome, httpx.UnsupportedProtocol):
            return self._growing(attempt)
        if isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout):
            raise SearchError(
                f"nothing answers at {self.url}. Start the service in the repository with `serve run serve.app:app` "
                f"(after `make demo`), or name another address with --url or {URL_VARIABLE}."
            ) from outcome
        raise SearchError(f"{self.url}: {type(outcome).__name__}: {outcome}") from outcome

    def _growing(self, attempt: int) -> float:
        return min(self.backoff * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def _policy(url: str | None, retries: int, backoff: float) -> _Policy:
    return _Policy((url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/"), retries, backoff)


def _read(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of a good answer; SearchError with the service's own words otherwise."""
    request_id = response.headers.get("x-request-id", "")
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.is_success and isinstance(body, dict):
        return body
    problem = body.get("error") if isinstance(body, dict) else None
    if isinstance(problem, dict):
        raise SearchError(str(problem.get("message")), response.status_code, str(problem.get("code")), request_id)
    words = response.text.strip()[:200] or response.reason_phrase
    raise SearchError(
        f"{response.url} answered {response.status_code}: {words}", response.status_code, "http", request_id
    )


def _body(queries: str | Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in options.items() if value is not None}
    return {"query": queries} | chosen if isinstance(queries, str) else {"queries": list(queries)} | chosen


class Client:
    """Searches over HTTP. Keeps its connections: make one and use it for all queries, from several threads too."""

    def __init__(
        self, url: str | None = None, *, timeout: float = 30.0, retries: int = 4, backoff: float = 0.1,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._policy = _policy(url, retries, backoff)
        self._http = httpx.Client(base_url=self._policy.url, timeout=timeout, transport=transport)

    def search(self, queries: str | Sequence[str], **options: Any) -> dict[str, Any]:
        """The answer to one query or several; options are the fields of the request (`k`, `mode`, `fusion`, `explain`
        …).

        Raises SearchError when the service refuses the request, takes too long, or stays away after all attempts.
        """
        return self._request("POST", "/search", json=_body(queries, options))

    def info(self) -> dict[str, Any]:
        """What is being served: index version, counts, model, limits."""
        return self._request("GET", "/info")

    def _request(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        for attempt in itertools.count():
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                outcome = error
            verdict = self._policy.judge(attempt, outcome)
            if isinstance(verdict, dict):
                return verdict
            time.sleep(verdict)
        raise AssertionError("the loop only ends by an answer or an error")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: the same methods, awaited."""

    def __init__(
        self, url: str | None = None, *, timeout: float = 30.0, retries: int = 4, backoff: float = 0.1,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._policy = _policy(url, retries, backoff)
        self._http = httpx.AsyncClient(base_url=self._policy.url, timeout=timeout, transport=transport)

    async def search(self, queries: str | Sequence[str], **options: Any) -> dict[str, Any]:
        """See `Client.search`."""
        return await self._request("POST", "/search", json=_body(queries, options))

    async def info(self) -> dict[str, Any]:
        """See `Client.info`."""
        return await self._request("GET", "/info")

    async def _request(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        for attempt in itertools.count():
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                outcome = error
            verdict = self._policy.judge(attempt, outcome)
            if isinstance(verdict, dict):
                return verdict
            await asyncio.sleep(verdict)
        raise AssertionError("the loop only ends by an answer or an error")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _printable(text: str) -> str:
    """Text with the control characters out, so that a document cannot steer the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _show(answer: dict[str, Any], width: int) -> str:
    """A readable list of an answer's results."""
    lines = []
    for result in answer["results"]:
        lines.append(_printable(result["query"] or ""))
        if result["error"] or result["note"]:
            lines.append("  " + (result["error"]["message"] if result["error"] else result["note"]))
        for hit in result["hits"]:
            lines += ["", *_show_hit(hit, width)]
        lines.append("")
    took, index = answer["took_ms"], answer["index"]
    lines.append(f"{answer['mode']} search of {index['documents']:,} documents, index {index['version']}")
    lines.append(f"encode {took['encode']:.2f} ms, search {took['search']:.2f} ms, in all {took['total']:.2f} ms")
    return "\n".join(lines)


def _show_hit(hit: dict[str, Any], width: int) -> list[str]:
    indent = " " * 5
    title = textwrap.shorten(_printable(hit["title"] or hit["docid"]), width - len(indent), placeholder=" …")
    scores = f"dense {_number(hit['dense'])}   sparse {_number(hit['sparse'])}"
    snippet = textwrap.wrap(_printable(hit["snippet"]), width - len(indent), max_lines=3, placeholder=" …")
    return [
        f"{hit['rank']:>3}. {title}",
        f"{indent}{hit['score']:.4f}   {scores}   {_printable(hit['docid'])}",
        *(indent + line for line in snippet),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Search from the command line; exit status 0, or 1 with a message when the service does not answer well."""
    parser = argparse.ArgumentParser(prog="python -m serve.client", description="Search a running Almanac service.")
    parser.add_argument("query", nargs="+", help="what to search for")
    parser.add_argument("--url", help=f"where the service is (default: {URL_VARIABLE} or {DEFAULT_URL})")
    parser.add_argument("-k", type=int, help="hits for each query")
    parser.add_argument("--mode", choices=["hybrid", "dense", "sparse"])
    parser.add_argument("--instruction", help="which instruction of the table the queries are read under")
    parser.add_argument("--json", action="store_true", help="print the service's JSON answer")
    options = parser.parse_args(arguments)
    try:
        with Client(options.url, retries=2) as client:
            answer = client.search(
                " ".join(options.query), k=options.k, mode=options.mode, instruction=options.instruction
            )
    except SearchError as error:
        print(f"serve.client: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        print(_show(answer, min(shutil.get_terminal_size().columns, 110)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
