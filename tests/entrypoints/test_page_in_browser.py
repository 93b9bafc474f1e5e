# SPDX-License-Identifier: Apache-2.0
"""The page at `/` in a browser: what it says about the model, conversations, and answers that are not of the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import fastdeploy
from tests.entrypoints.browser import CHROMIUM, Browser, running_browser
from tests.entrypoints.chat_server import chat_server
from tests.entrypoints.server_process import ServerProcess, mock_server, templateless_server

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

PAGE = Path(fastdeploy.__file__).parent / "assets" / "page.html"
CHAT = "/v1/chat/completions"
HTML, JSON, EVENTS = "text/html", "application/json; charset=utf-8", "text/event-stream"
GATEWAY = """<html><head><title>502 Bad Gateway</title><style>h1 { color: red }</style></head>
<body><center><h1>502 Bad Gateway</h1></center><script>document.title = "ran"</script>
<hr><b>&lt;proxy&gt;</b></body></html>"""
NO_API = "The answer has status {} and is not one of this server's API:\n"
# status, type and body of an answer; the text of the page
ANSWERS = [
    (502, HTML, GATEWAY, NO_API.format(502) + "502 Bad Gateway\n<proxy>"),
    (504, HTML, "", NO_API.format(504) + "(empty)"),
    (200, HTML, "<title>Sign in</title>", NO_API.format(200) + "Sign in"),
    (503, "text/plain", "no <b>upstream</b>", NO_API.format(503) + "no <b>upstream</b>"),
    (429, JSON, '{"detail": "slow down"}', NO_API.format(429) + '{"detail": "slow down"}'),
    (413, JSON, "too large", NO_API.format(413) + "too large"),
    (400, JSON, '{"error": {"message": "seed: is wrong"}}', "seed: is wrong"),
    (200, EVENTS, 'data: {"error": {"message": "it broke"}}\n\ndata: [DONE]\n\n', "it broke"),
    (200, EVENTS, 'data: {"choices": []}\n\n', "The connection ended before the answer did."),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser, in which each test opens its pages."""
    with running_browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@contextmanager
def proxy_without_a_server(answers: list[tuple[int, str, str]]) -> Iterator[str]:
    """Run what serves the page, answers each POST with the next of `answers`, and any other request with 502."""
    left = iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(*((200, HTML, PAGE.read_text()) if self.path == "/" else (502, HTML, GATEWAY)))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*next(left))

        def answer(self, status: int, media_type: str, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def show(browser: Browser, url: str) -> None:
    """Open the page and wait until it has asked the server about the model."""
    browser.open(url)
    browser.wait("document.readyState == 'complete' && document.getElementById('traits') != null")
    browser.wait("!document.getElementById('send').disabled")


def text_of(browser: Browser, selector: str) -> list[str]:
    """Return the texts of elements."""
    texts: list[str] = browser.run(f"[...document.querySelectorAll({selector!r})].map(found => found.innerText)")
    return texts


def send(browser: Browser, prompt: str) -> None:
    """Send a prompt and wait for the end of its answer."""
    browser.run(f"$('prompt').value = {json.dumps(prompt)}; $('send').click()")
    browser.wait("!$('send').disabled")


def sent(browser: Browser, path: str) -> list[dict[str, Any]]:
    """Return the bodies of the requests for a path since the page was opened."""
    found = [event["params"]["request"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    return [json.loads(request["postData"]) for request in found if request["url"].endswith(path)]


def test_page_names_the_model_and_the_method(browser: Browser, drafting_server: ServerProcess) -> None:
    show(browser, drafting_server.url + "/")
    assert text_of(browser, "#server b") == ["demo", "ngram"]
    assert text_of(browser, "#traits") == ["(Ernie4_5ForCausalLM, bfloat16, context of 512 tokens)"]
    assert "continues Python source" in text_of(browser, "#about")[0]
    assert browser.run("$('endpoint').value") == "/v1/completions"
    send(browser, "def fibonacci(n):")
    assert "Return" in text_of(browser, ".answer")[0] and text_of(browser, ".question") == []


def test_conversations_are_sent_whole_until_a_new_one_begins(browser: Browser, parsing_server: ServerProcess) -> None:
    show(browser, parsing_server.url + "/")
    assert "with the conversation so far" in text_of(browser, "#about")[0]
    for prompt in ("[[one]]", "[[<think>Let me see.</think>two]]"):
        send(browser, prompt)
    browser.run("$('max_tokens').value = '99999999999'")
    send(browser, "[[refused]]")
    assert text_of(browser, ".error")[0].startswith("max_tokens: expected an integer")
    assert browser.run("$('prompt').value") == "[[refused]]", "it can be sent again"
    browser.run("$('max_tokens').value = '50'")
    send(browser, "[[three]]")
    conversation = [("user", "[[one]]"), ("assistant", "one"), ("user", "[[<think>Let me see.</think>two]]")]
    conversation += [("assistant", "two"), ("user", "[[three]]")]
    messages = [body["messages"] for body in sent(browser, CHAT)]
    assert [(message["role"], message["content"]) for message in messages[-1]] == conversation
    assert [len(each) for each in messages] == [1, 3, 5, 5]
    assert len(text_of(browser, ".turn")) == 4
    browser.run("$('new').click()")
    assert text_of(browser, ".turn") == []
    send(browser, "[[four]]")
    assert [message["content"] for message in sent(browser, CHAT)[-1]["messages"]] == ["[[four]]"]


def test_a_stopped_answer_is_part_of_the_conversation(browser: Browser, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(200))
    with chat_server(tmp_path / "model", step_s=0.05) as running:
        show(browser, running.url + "/")
        browser.run(f"$('max_tokens').value = '1500'; $('prompt').value = '[[{words}]]'; $('send').click()")
        browser.wait("document.querySelectorAll('.answer span').length > 3")
        browser.run("$('stop').click()")
        browser.wait("!$('send').disabled")
        assert text_of(browser, ".note") == ["Stopped."]
        send(browser, "[[one]]")
        messages = [(message["role"], message["content"]) for message in sent(browser, CHAT)[-1]["messages"]]
    shown = text_of(browser, ".answer")[0]
    assert messages == [("user", f"[[{words}]]"), ("assistant", shown), ("user", "[[one]]")]
    assert words.startswith(shown) and shown not in ("", words)


def test_models_without_a_template_are_not_asked_for_chats(browser: Browser, tmp_path: Path) -> None:
    with templateless_server(tmp_path) as running:
        show(browser, running.url + "/")
        assert "no chat template" in text_of(browser, "#about")[0]
        assert browser.run("[$('endpoint').value, $('chat').disabled]") == ["/v1/completions", True]
        send(browser, "the")
    assert text_of(browser, ".answer") != [] and text_of(browser, ".error") == []


def test_page_says_more_about_the_model_with_a_key(browser: Browser, tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "alpha", "--served-model-name", "mine") as running:
        show(browser, running.url + "/")
        assert text_of(browser, "#model") == ["mine"] and text_of(browser, "#traits") == [""]
        assert text_of(browser, "#about") == ["With an API key, the server says more about the model."]
        browser.run("$('key').value = 'alpha'; $('key').dispatchEvent(new Event('change'))")
        browser.wait("$('traits').innerText.includes('Mock')")


def test_page_works_under_the_root_path_of_a_proxy(browser: Browser, tmp_path: Path) -> None:
    with mock_server(tmp_path, "--root-path", "/outer/llm") as running:
        show(browser, running.url)
        assert browser.run("location.href") == running.url + "/"
        send(browser, "the")
        assert text_of(browser, ".error") == [] and text_of(browser, ".answer") != [""]
        assert sent(browser, "/outer/llm" + CHAT) != []


def test_answers_that_are_not_of_the_api_are_shown_as_text(browser: Browser) -> None:
    with proxy_without_a_server([answer[:3] for answer in ANSWERS]) as url:
        show(browser, url)
        assert text_of(browser, "#version")[0].startswith("no FastDeploy server answers at 127.0.0.1:") and text_of(
            browser, "#about"
        ) == [""]
        for _, _, _, shown in ANSWERS:
            send(browser, "the")
            assert text_of(browser, ".turn:last-child .error") == [shown]
            browser.run("clear()")
        assert browser.run("[document.title, conversation.length]") == ["FastDeploy: try a prompt", 0]
    send(browser, "the")
    assert "does not answer: " in text_of(browser, ".error")[0], "the proxy has ended"


def test_nothing_of_the_page_breaks_its_policy(browser: Browser, parsing_server: ServerProcess) -> None:
    show(browser, parsing_server.url + "/")
    send(browser, "[[one]]")
    assert refusals(browser) == []
    browser.run("document.body.setAttribute('style', 'color: red')")
    assert len(refusals(browser)) == 1, "refusals are seen"


def refusals(browser: Browser) -> list[str]:
    """Return what the content security policy has forbidden since the page was opened."""
    texts = [event["params"]["entry"]["text"] for event in browser.events if event["method"] == "Log.entryAdded"]
    return [text for text in texts if "Content Security Policy" in text]
