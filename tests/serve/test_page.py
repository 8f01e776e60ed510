"""The page in a real browser: search, keyboard, phone width, and markup in documents that must stay text."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from serve.app import create_app
from serve.search import SearchService
from serve.settings import ServeSettings
from serve.worker import Worker

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")


def _is_trouble(message: Any) -> bool:
    """Whether a console message tells of a fault of the page; that an answer was 503 is no fault of it."""
    return message.type == "error" and "status of 503" not in message.text


@pytest.fixture(scope="module")
def address(service: SearchService, settings: ServeSettings) -> Iterator[str]:
    """The service on a free loopback port."""
    app = create_app(service, Worker(2, 32), settings)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh page at the address; whatever the console or another host would be asked for fails the test."""
    size, trouble = getattr(request, "param", (1200, 900)), []
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if _is_trouble(message) else None)
    page.on("dialog", lambda dialog: (trouble.append("dialog"), dialog.dismiss()))
    page.on("request", lambda made: None if made.url.startswith((address, "data:")) else trouble.append(made.url))
    page.goto(address)
    yield page
    page.close()
    assert trouble == []


@pytest.mark.parametrize("page", [(1200, 900), (360, 740)], indirect=True)
def test_search_shows_hits_marks_scores_and_terms_at_any_width(page: Any) -> None:
    page.fill("#query", "lift of a wing")
    page.keyboard.press("Enter")
    page.wait_for_selector("#hits > li")
    first = page.locator("#hits > li").first
    assert first.locator(".title").inner_text() == "lift of a wing"
    assert "wing" in first.locator(".snippet mark").all_inner_texts()
    assert first.locator(".track i.dense").bounding_box()["width"] > 0
    assert first.locator(".track i.sparse").bounding_box()["width"] > 0
    assert {"lift", "wing"} <= {text.split("\n")[0].split()[0] for text in first.locator(".term").all_inner_texts()}
    assert "documents searched in" in page.inner_text("#status")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.title() == "lift of a wing – Almanac"


def test_terms_that_the_model_added_look_different(page: Any) -> None:
    page.goto(page.url + "?q=lift&mode=sparse")
    page.wait_for_selector("#hits > li")
    expanded = page.locator("#hits > li", has_text="heat transfer").locator(".term.expanded")
    assert expanded.count() == 1
    assert page.locator("#hits > li").first.locator(".term.matched").count() == 1


def test_it_works_from_the_keyboard_and_the_back_button(page: Any) -> None:
    page.locator("footer a").first.focus()
    page.keyboard.press("/")
    page.keyboard.type("heat transfer")
    page.keyboard.press("Enter")
    page.wait_for_selector("#hits > li")
    page.locator("#hybrid").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("location.search.includes('mode=dense')")
    page.wait_for_selector("#hits > li")
    page.go_back()
    page.wait_for_function("document.querySelector('#hybrid').checked")
    assert page.input_value("#query") == "heat transfer"


def test_markup_in_documents_and_queries_stays_text(page: Any) -> None:
    page.fill("#query", "<img src=x onerror=alert(1)> lift of a flat plate markup")
    page.keyboard.press("Enter")
    page.wait_for_selector("#hits > li")
    hit = page.locator("#hits > li", has_text="<b>markup</b> & co")
    assert hit.locator("b:not(.numbers b)").count() == 0
    assert "<script>alert('x')</script>" in hit.locator(".snippet").inner_text()


@pytest.mark.parametrize(("query", "title", "words"), [
    ("   ", "Nothing to look for", "Type a few words"),
    ("\u200b", "Nothing found", "invisible characters"),
    ("x" * 501, "This query cannot be answered", "at most 500"),
])  # fmt: skip
def test_every_empty_state_says_what_it_is(page: Any, query: str, title: str, words: str) -> None:
    assert page.is_visible("#intro")
    page.fill("#query", query)
    page.keyboard.press("Enter")
    page.wait_for_selector("#message")
    assert page.inner_text("#message h2") == title
    assert words in page.inner_text("#message p")
    assert page.locator("#hits > li").count() == 0


def test_a_lost_service_is_said_and_can_be_tried_again(page: Any) -> None:
    page.route("**/search", lambda route: route.fulfill(status=503, body="busy"))
    page.fill("#query", "lift of a wing")
    page.keyboard.press("Enter")
    page.wait_for_selector("#message.error")
    page.unroute("**/search")
    page.click("#message button")
    page.wait_for_selector("#hits > li")
    assert not page.is_visible("#message")
