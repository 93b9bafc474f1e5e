# SPDX-License-Identifier: Apache-2.0
"""/docs and /redoc in a browser: every operation is sent as the page offers it, and nothing comes from other hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.entrypoints.openai.examples import BODIES, PATH_PARAMETERS
from tests.entrypoints.browser import CHROMIUM, Browser, running_browser
from tests.entrypoints.openapi_fields import make_document
from tests.entrypoints.response_check import check_response
from tests.entrypoints.server_process import ServerProcess, mock_server

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

MAX_PART_BYTES, MAX_PART_BYTES_WITH_SCHEMA = 100_000, 150_000
REQUEST = "Network.requestWillBeSent"
ADMIN_ONLY = {"post_v1_role": 403}  # a browser may not change the role without an administrator's key


@cache
def operations() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return all operations with the path that the page sends them to, by their id."""
    return {
        operation["operationId"]: (path.format_map(PATH_PARAMETERS), operation)
        for path, methods in make_document()["paths"].items()
        for operation in methods.values()
    }


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with running_browser(tmp_path) as running:
        yield running


def open_docs(browser: Browser, url: str) -> None:
    """Open /docs and wait for its operations."""
    browser.open(f"{url}/docs")
    browser.wait(f"document.querySelectorAll('.opblock').length === {len(operations())}")


class OperationPart:
    """The part of /docs about one operation."""

    def __init__(self, browser: Browser, name: str) -> None:
        (tag,) = operations()[name][1]["tags"]
        self._browser = browser
        self._part = f"document.getElementById('operations-{tag}-{name}')"

    def open(self) -> None:
        """Open it, and wait for what it says of responses."""
        self.click(".opblock-summary-control")
        self._browser.wait(f"!!{self._part}.querySelector('.responses-wrapper .response')")

    def close(self) -> None:
        """Close it, and with it the answer."""
        self.click(".opblock-summary-control")

    def click(self, selector: str) -> None:
        """Click on its first element of this kind, once there is one."""
        self._browser.wait(f"!!{self._part}.querySelector('{selector}')")
        self._browser.run(f"{self._part}.querySelector('{selector}').click()")

    def send(self) -> tuple[int, str]:
        """Press "Try it out" and "Execute"; return the status and the body of the answer that the page shows."""
        self.click(".try-out__btn")
        self.click(".execute")
        answer = ".live-responses-table tbody .response-col_"
        status = self._browser.wait(f"{self._part}.querySelector('{answer}status')?.innerText")
        body = self._browser.run(f"{self._part}.querySelector('{answer}description pre.microlight').textContent")
        return int(status), body

    def num_bytes(self) -> int:
        """Return the length of its HTML."""
        return int(self._browser.run(f"{self._part}.outerHTML.length"))


def authorize(browser: Browser, key: str) -> None:
    """Give an API key in the dialog of /docs."""
    browser.wait("!!document.querySelector('.btn.authorize')")
    browser.run("document.querySelector('.btn.authorize').click()")
    browser.wait("!!document.querySelector('.auth-container input')")
    browser.run("document.querySelector('.auth-container input').focus()")
    browser.call("Input.insertText", text=key)
    browser.run("document.querySelector('.auth-btn-wrapper .authorize').click()")
    browser.run("document.querySelector('.close-modal').click()")


def check_hosts(browser: Browser, url: str) -> None:
    """Check that the browser has asked this server only, and that the policy has refused nothing."""
    sent = [event["params"]["request"]["url"] for event in browser.events if event["method"] == REQUEST]
    assert len(sent) >= 3
    assert [address for address in sent if not address.startswith((f"{url}/", "data:", f"blob:{url}/"))] == []
    entries = [event["params"]["entry"] for event in browser.events if event["method"] == "Log.entryAdded"]
    assert [entry for entry in entries if entry["source"] == "security"] == []
    assert [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"] == []


def test_every_operation_is_sent_from_the_page_and_answered(browser: Browser, drafting_server: ServerProcess) -> None:
    open_docs(browser, drafting_server.url)
    for name, (path, operation) in operations().items():
        part = OperationPart(browser, name)
        part.open()
        status, body = part.send()
        assert status == ADMIN_ONLY.get(name, 200), (name, body)
        (media_type, *_) = operation["responses"][str(status)]["content"]
        check_response(path, status, media_type, body)
        assert part.num_bytes() < MAX_PART_BYTES, name
        part.close()
    check_hosts(browser, drafting_server.url)


def test_an_operation_stays_small_with_the_schema_of_its_body(browser: Browser, server: ServerProcess) -> None:
    open_docs(browser, server.url)
    for name, (_, operation) in operations().items():
        part = OperationPart(browser, name)
        part.open()
        opened = part.num_bytes()
        assert opened < MAX_PART_BYTES, name
        if "requestBody" in operation:
            part.click(".opblock-section-request-body [data-name=model]")
            assert opened < part.num_bytes() < MAX_PART_BYTES_WITH_SCHEMA, name
        part.close()


def test_a_key_given_on_the_page_is_sent_under_the_path_of_a_proxy(browser: Browser, tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "alpha", "--root-path", "/api") as running:
        open_docs(browser, running.url)
        authorize(browser, "alpha")
        part = OperationPart(browser, "post_v1_completions")
        part.open()
        status, body = part.send()
        assert (status, json.loads(body)["object"]) == (200, "text_completion")
        check_hosts(browser, running.url.removesuffix("/api"))


@pytest.mark.parametrize(("link", "part"), [("docs", ".opblock"), ("redoc", "[data-item-id]")])
def test_links_of_the_page_open(browser: Browser, server: ServerProcess, link: str, part: str) -> None:
    browser.open(server.url)
    browser.wait(f"!!document.querySelector('a[href={link}]')")
    browser.run(f"setTimeout(() => document.querySelector('a[href={link}]').click())")
    browser.wait(f"!!document.querySelector('{part}')")
    assert browser.run("location.pathname") == f"/{link}"
    check_hosts(browser, server.url)


def test_redoc_names_every_route_and_shows_the_examples(browser: Browser, server: ServerProcess) -> None:
    browser.open(f"{server.url}/redoc")
    browser.wait("document.querySelectorAll('[data-item-id*=operation]').length === " + str(len(operations())))
    shown = browser.run("[...document.querySelectorAll('[data-item-id*=operation]')].map(e => e.innerText)")
    paths = [path for path, methods in make_document()["paths"].items() for _ in methods]
    assert sorted(text.split("\n")[-1] for text in shown) == sorted(paths), "hidden text has no lines"
    assert BODIES["/tokenize"]["prompt"] in browser.run("document.body.innerText")
    check_hosts(browser, server.url)
