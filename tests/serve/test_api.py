"""The HTTP side: what is answered, what is refused and how, and that nothing a client sends breaks it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from serve.app import create_app
from serve.search import SearchService
from serve.settings import ServeSettings
from serve.worker import Worker

JSON = {"content-type": "application/json"}


def strict(text: str) -> Any:
    """JSON without the NaN and Infinity that Python's reader lets pass."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} in an answer")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def small(service: SearchService, settings: ServeSettings) -> Iterator[tuple[TestClient, threading.Event]]:
    """A service of one thread, two places and a timeout of 0.3 s, whose searches wait for an event."""
    event = threading.Event()
    held = SearchService(service.encoder, service.index, settings)
    search, probe = held.search, held.probe
    held.search = lambda *a, **k: (event.wait(5), search(*a, **k))[1]  # type: ignore[method-assign]
    held.probe = lambda: (event.wait(5), probe())[1]  # type: ignore[method-assign]
    quick = settings.model_copy(
        update={
            "request_timeout_seconds": 0.3,
            "health_timeout_seconds": 0.3,
            "max_ongoing": 2,
            "retry_after_seconds": 3,
        }
    )
    with TestClient(create_app(held, Worker(1, 2), quick), base_url="http://127.0.0.1") as client:
        yield client, event
        event.set()


def test_search_answers_in_the_order_of_the_queries(api: TestClient) -> None:
    response = api.post(
        "/search", json={"queries": ["lift of a wing", "", 5, "heat transfer"], "k": 2, "explain": True}
    )
    assert response.status_code == 200
    answer = strict(response.text)
    first, empty, wrong, last = answer["results"]
    assert (first["hits"][0]["docid"], last["hits"][0]["docid"]) == ("d01", "d02")
    assert (empty["hits"], empty["note"], empty["error"]) == ([], "the query is empty", None)
    assert (wrong["hits"], wrong["error"]["code"], wrong["query"]) == ([], "not_a_string", None)
    assert set(answer["took_ms"]) == {"encode", "search", "documents", "total"}
    assert answer["request_id"] == response.headers["x-request-id"]
    assert answer["index"]["documents"] == 8
    one = strict(api.post("/search", json={"query": "lift of a wing", "k": 2}).text)
    assert [hit["docid"] for hit in one["results"][0]["hits"]] == [hit["docid"] for hit in first["hits"]]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"queries": ["a"], "k": 0}, 422, "k: "),
        ({"queries": ["a"], "k": 3.5}, 422, "k: "),
        ({"queries": ["a"], "k": "3"}, 422, "k: "),
        ({"queries": ["a"], "k": 21}, 422, "at most 20"),
        ({"queries": ["a"], "k": 10**400}, 422, ""),
        ({"queries": ["a"] * 9}, 413, "at most 8"),
        ({"queries": ["a"], "mode": "fuzzy"}, 422, "mode: "),
        ({"queries": ["a"], "typo": 1}, 422, "typo"),
        ({"queries": ["a"], "fusion": {"typo": 1}}, 422, "fusion.typo"),
        ({"queries": ["a"], "fusion": {"dense_weight": -1}}, 422, "fusion.dense_weight"),
        ({"queries": ["a"], "mode": "dense", "fusion": {"dense_weight": 1}}, 422, "dense"),
        ({"queries": ["a"], "explain": "yes"}, 422, "explain"),
        ({"queries": "a"}, 422, "queries"),
        ({"query": 5}, 422, "query"),
        ({"query": "a", "queries": ["a"]}, 422, "either"),
        ({}, 422, "either"),
        ([], 422, ""),
        ({"queries": ["a"], "\ud800": 1}, 422, ""),
    ],
)
def test_refusals_name_the_field(api: TestClient, body: Any, status: int, words: str) -> None:
    response = api.post("/search", content=json.dumps(body), headers=JSON)
    answer = strict(response.text)
    assert response.status_code == status
    assert words in answer["error"]["message"]
    assert answer["request_id"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "nonsense", '{"queries": ["a"], "fusion": {"dense_weight": NaN}}',
     '{"queries": ["a"], "fusion": {"dense_weight": 1e999}}', "[" * 5000, b"\xff\xfe",
     '{"queries": ["a"], "k": ' + "9" * 5000 + "}"],
)  # fmt: skip
def test_what_is_not_json_or_not_finite_is_refused(api: TestClient, content: str | bytes) -> None:
    response = api.post("/search", content=content, headers=JSON)
    assert response.status_code in (400, 422)
    assert strict(response.text)["error"]["message"]


def test_long_bodies_are_refused_before_they_are_parsed(api: TestClient) -> None:
    long = json.dumps({"queries": ["x" * 20_000]})
    announced = api.post("/search", content=long, headers=JSON)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(long), 1000):
            yield long[start : start + 1000].encode()

    streamed = api.post("/search", content=pieces(), headers=JSON)
    for response in (announced, streamed):
        assert response.status_code == 413
        assert strict(response.text)["error"]["code"] == "body_too_large"
    short = api.post("/search", content=iter([b'{"query": ', b'"lift of a wing"}']), headers=JSON)
    assert short.status_code == 200


def test_foreign_host_names_are_refused(api: TestClient) -> None:
    assert api.get("/", headers={"host": "localhost:8000"}).status_code == 200
    assert api.get("/", headers={"host": "[::1]:8000"}).status_code == 200
    refused = api.post("/search", json={"query": "a"}, headers={"host": "evil.example"})
    assert (refused.status_code, strict(refused.text)["error"]["code"]) == (400, "host_refused")


def test_no_other_origin_may_read_answers(api: TestClient) -> None:
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert api.options("/search", headers=asked).status_code == 405
    response = api.post("/search", json={"query": "a"}, headers={"origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_request_ids_are_kept_if_harmless(api: TestClient) -> None:
    assert api.get("/readyz", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert api.get("/readyz", headers={"x-request-id": 'a"b c'}).headers["x-request-id"] != 'a"b c'


def test_log_lines_are_json_without_the_query(api: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="serve.access"):
        api.post("/search", json={"query": "a private matter"}, headers={"x-request-id": "r1"})
    line = strict(caplog.messages[-1])
    assert (line["request_id"], line["path"], line["status"], line["queries"]) == ("r1", "/search", 200, 1)
    assert "private" not in caplog.text


def test_health_ready_and_info(api: TestClient) -> None:
    assert strict(api.get("/healthz").text)["probe_ms"] > 0
    assert strict(api.get("/readyz").text)["status"] == "ok"
    assert strict(api.get("/info").text)["limits"]["max_batch"] == 8
    assert "/search" in strict(api.get("/openapi.json").text)["paths"]
    assert api.get("/docs").status_code == 200
    assert strict(api.get("/nowhere").text)["error"]["message"] == "Not Found"
    assert api.get("/static/../app.py").status_code == 404


def test_slow_search_is_504_and_a_hanging_replica_is_ill(small: tuple[TestClient, threading.Event]) -> None:
    """Case T-128: a replica whose threads hang is not healthy, and is again when they come back."""
    client, event = small
    late = client.post("/search", json={"query": "a"})
    assert (late.status_code, strict(late.text)["error"]["code"]) == (504, "timeout")
    ill = client.get("/healthz")
    assert (ill.status_code, strict(ill.text)["error"]["code"]) == (503, "http")
    event.set()
    assert client.get("/healthz").status_code == 200
    assert client.post("/search", json={"query": "a"}).status_code == 200


def test_a_full_service_is_503_with_retry_after(small: tuple[TestClient, threading.Event]) -> None:
    client, event = small
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(client.post("/search", json={"query": "a"}).status_code))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    full = client.post("/search", json={"query": "a"})
    assert (full.status_code, full.headers["retry-after"]) == (503, "3")
    assert strict(full.text)["error"]["code"] == "busy"
    event.set()
    for thread in threads:
        thread.join()
    assert statuses == [200, 200]


def test_an_unforeseen_error_is_500_without_its_words(service: SearchService, settings: ServeSettings) -> None:
    broken = SearchService(service.encoder, service.index, settings)
    broken.search = lambda *a, **k: 1 // 0  # type: ignore[method-assign]
    with TestClient(create_app(broken, Worker(1, 2), settings), base_url="http://127.0.0.1") as client:
        response = client.post("/search", json={"query": "a"})
    assert (response.status_code, strict(response.text)["error"]["code"]) == (500, "internal")
    assert "division" not in response.text


def test_page_is_self_contained(api: TestClient) -> None:
    page = api.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/static/page.css", "/static/page.js"):
        asset = api.get(path)
        assert asset.status_code == 200
        for text in (page.text, asset.text):
            assert "https://" not in text
            assert text.replace("http://www.w3.org/2000/svg", "").count("http://") == 0


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
FIELDS = ["query", "queries", "k", "mode", "fusion", "with_text", "with_snippet", "explain", "instruction", "other"]
REQUESTS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | st.fixed_dictionaries(
    {"queries": st.lists(st.text(st.characters(exclude_categories=[]), max_size=40) | VALUES, max_size=9)},
    optional={
        "k": st.integers(-1, 25), "mode": st.sampled_from(["hybrid", "dense", "sparse"]), "explain": st.booleans(),
        "with_text": st.booleans(), "fusion": st.dictionaries(
            st.sampled_from(["method", "dense_weight", "sparse_weight", "candidates", "rrf_k"]), SCALARS, max_size=3
        ),
    },
)  # fmt: skip


@hypothesis_settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(body=REQUESTS | VALUES)
def test_no_request_breaks_it(api: TestClient, body: Any) -> None:
    response = api.post("/search", content=json.dumps(body), headers=JSON)
    assert response.status_code in (200, 400, 413, 422), response.text
    answer = strict(response.text)
    if response.status_code == 200:
        for result in answer["results"]:
            assert result["hits"] or result["note"] or result["error"]
