"""The service on a real Ray Serve, and the files that deploy it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

import serve as package
from serve.app import app
from serve.client import Client
from serve.settings import ServeSettings, settings_from


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def address(ray_cluster: None, run_folder: Path) -> Iterator[str]:
    """The application under Ray Serve on a free loopback port."""
    from ray import serve

    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"run_folder": str(run_folder), "max_body_bytes": 20_000}), name="test", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def test_the_whole_service_answers_over_ray_serve(address: str) -> None:
    with Client(address) as client:
        answer = client.search(["lift of a wing", "", 5], k=2, explain=True)  # type: ignore[list-item]
        assert client.info()["index"]["documents"] == 8
    found, empty, wrong = answer["results"]
    assert found["hits"][0]["docid"] == "d01"
    assert (empty["note"], wrong["error"]["code"]) == ("the query is empty", "not_a_string")

    health = httpx.get(f"{address}/healthz", headers={"x-request-id": "mine"})
    assert health.json()["status"] == "ok"
    assert health.headers.get_list("x-request-id") == ["mine"]
    assert httpx.get(f"{address}/readyz").json()["status"] == "ok"
    assert "<title>Almanac</title>" in httpx.get(f"{address}/").text
    assert httpx.get(f"{address}/static/page.js").status_code == 200
    assert httpx.get(f"{address}/docs").status_code == 200
    assert httpx.post(f"{address}/search", json={"queries": ["a"], "k": 0}).status_code == 422
    assert httpx.post(f"{address}/search", content=b"x" * 30_000).status_code == 413
    assert httpx.get(f"{address}/", headers={"host": "evil.example"}).status_code == 400


def test_a_missing_run_is_told_before_ray_is_asked_for_anything(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make demo"):
        app({"run_folder": str(tmp_path)})


def test_serve_yaml_is_valid_and_its_arguments_are_settings() -> None:
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load((Path(package.__file__).parent / "serve.yaml").read_text())
    schema = ServeDeploySchema.model_validate(content)
    assert schema.http_options.host == "127.0.0.1"
    (application,) = schema.applications
    assert application.import_path == "serve.app:app"
    settings = settings_from(application.args)
    assert settings.request_timeout_seconds < schema.http_options.request_timeout_s


def test_settings_come_from_arguments_over_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_SERVE_MAX_K", "50")
    monkeypatch.setenv("ALMANAC_SERVE_MAX_BATCH", "7")
    monkeypatch.setenv("ALMANAC_SERVE_ALLOWED_HOSTS", "search.example, localhost")
    settings = settings_from({"max_k": "60"})
    assert (settings.max_k, settings.max_batch, settings.default_k) == (60, 7, 10)
    assert settings.allowed_hosts == ("search.example", "localhost")
    with pytest.raises(ValueError, match="typo"):
        settings_from({"typo": 1})
    with pytest.raises(ValueError, match="default_k is 100"):
        ServeSettings(default_k=100)
