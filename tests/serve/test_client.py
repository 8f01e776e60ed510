"""The client: what it tries again, what it gives up on, what people see."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import httpx
import pytest

from serve import client as module
from serve.client import AsyncClient, Client, SearchError, main

ANSWER = {
    "results": [
        {
            "query": "lift", "note": None, "error": None,
            "hits": [
                {"rank": 1, "docid": "d01", "score": 0.5, "dense": 0.25, "sparse": None, "title": "a wing",
                 "snippet": "…\x1b[2J"},
            ],
        },
        {"query": "", "note": "the query is empty", "error": None, "hits": []},
    ],
    "mode": "hybrid", "k": 10, "index": {"version": "v1", "documents": 1400},
    "took_ms": {"encode": 0.01, "search": 0.5, "documents": 0.1, "total": 0.7},
}  # fmt: skip
Script = Callable[[int], httpx.Response]


class Scripted:
    """A transport that answers the n-th request with `script(n)`, in both worlds."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.script(len(self.requests))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(module.time, "sleep", found.append)
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    return found


def busy(seconds: str) -> httpx.Response:
    return httpx.Response(
        503, headers={"retry-after": seconds}, json={"error": {"code": "busy", "message": "all taken"}}
    )


def searching(script: Script, **options: object) -> tuple[dict, Scripted]:
    scripted = Scripted(script)
    with Client("http://x", transport=httpx.MockTransport(scripted)) as client:
        return client.search("lift", **options), scripted


def test_request_holds_what_was_chosen_and_nothing_else() -> None:
    answer, scripted = searching(lambda _: httpx.Response(200, json=ANSWER), k=3, mode=None)
    assert answer == ANSWER
    assert json.loads(scripted.requests[0].content) == {"query": "lift", "k": 3}


def test_several_queries_are_sent_as_a_list() -> None:
    scripted = Scripted(lambda _: httpx.Response(200, json=ANSWER))
    with Client("http://x", transport=httpx.MockTransport(scripted)) as client:
        client.search(["a", "b"])
    assert json.loads(scripted.requests[0].content) == {"queries": ["a", "b"]}


def test_retry_after_is_honoured(pauses: list[float]) -> None:
    answer, scripted = searching(lambda n: busy("7") if n < 3 else httpx.Response(200, json=ANSWER))
    assert (answer, len(scripted.requests), pauses) == (ANSWER, 3, [7.0, 7.0])


def test_lost_connections_are_tried_again_with_growing_pauses(pauses: list[float]) -> None:
    def script(n: int) -> httpx.Response:
        if n < 4:
            raise httpx.ReadError("gone")
        return httpx.Response(200, json=ANSWER)

    answer, _ = searching(script)
    assert answer == ANSWER
    assert 0.05 <= pauses[0] <= 0.1 < pauses[2] <= 0.4


def test_it_gives_up_with_the_words_of_the_service(pauses: list[float]) -> None:
    with pytest.raises(SearchError, match="all taken") as caught:
        searching(lambda _: busy("1"))
    assert (caught.value.status, caught.value.code, len(pauses)) == (503, "busy", 4)


def test_a_long_retry_after_is_left_to_the_caller(pauses: list[float]) -> None:
    with pytest.raises(SearchError):
        searching(lambda _: busy("3600"))
    assert pauses == []


@pytest.mark.parametrize("status", [400, 413, 422, 500, 504])
def test_other_errors_are_not_tried_again(status: int, pauses: list[float]) -> None:
    scripted = Scripted(lambda _: httpx.Response(status, text="no JSON at all"))
    with Client("http://x", transport=httpx.MockTransport(scripted)) as client, pytest.raises(SearchError) as caught:
        client.search("lift")
    assert (caught.value.status, len(scripted.requests), pauses) == (status, 1, [])


def test_a_slow_answer_is_not_asked_for_twice(pauses: list[float]) -> None:
    def slow(_: int) -> httpx.Response:
        raise httpx.ReadTimeout("slow")

    with pytest.raises(SearchError) as caught:
        searching(slow)
    assert (caught.value.code, pauses) == ("timeout", [])


@pytest.mark.anyio
async def test_async_client_does_the_same(pauses: list[float]) -> None:
    scripted = Scripted(lambda n: busy("2") if n < 2 else httpx.Response(200, json=ANSWER))
    async with AsyncClient("http://x", transport=httpx.MockTransport(scripted)) as client:
        assert await client.search(["lift"]) == ANSWER
        assert await client.info() == ANSWER
    assert pauses == [2.0]
    with pytest.raises(SearchError):
        async with AsyncClient("http://x", transport=httpx.MockTransport(lambda _: httpx.Response(422))) as client:
            await client.search("lift")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_command_line_tells_how_to_start_the_service(capsys: pytest.CaptureFixture[str], pauses: list[float]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert main(["what", "is", "lift", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "serve run serve.app:app" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_command_line_prints_a_list_or_json(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "search", lambda *_, **__: ANSWER)
    assert main(["lift", *options]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    if options:
        assert json.loads(printed) == ANSWER
    else:
        assert "1. a wing" in printed
        assert "the query is empty" in printed
        assert "1,400 documents" in printed
