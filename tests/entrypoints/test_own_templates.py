# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's own chat template cannot keep a server from starting or answering."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.mock_engine import save_mock_model

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ON_REQUEST = (
    "{% for m in messages %}{% if m.content == 'loop' %}" + LOOPS + "{% endif %}"
    "{% if m.content == 'grow' %}{% set x = 'a' * 10**9 %}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("template", [LOOPS, "{% set x = 'a' * 10**9 %}{{ x }}"], ids=["loops", "a large text"])
def test_server_whose_template_exceeds_a_limit_ends_with_one_line(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    server = ServerProcess([str(save_mock_model(tmp_path))])
    try:
        assert server.wait_end(60) == 2
        (line,) = server.stderr.splitlines()
        assert line.startswith("fastdeploy: error: chat_template: 'default' cannot be used: ") and "more than" in line
    finally:
        server.close()


def test_server_answers_others_while_its_template_loops_and_refuses_the_request(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(ON_REQUEST)
    with mock_server(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        messages = [{"role": "user", "content": "loop"}]
        begin_s = time.monotonic()
        refused = pool.submit(server.post, "/tokenize", {"messages": messages})
        num_answers = 0
        while not refused.done():
            assert server.get("/health").status_code == 200
            num_answers += 1
        error = refused.result().json()["error"]
        assert (refused.result().status_code, error["param"]) == (400, "messages")
        assert "takes more than 2 s of processor time" in error["message"]
        assert time.monotonic() - begin_s > 1.9 and num_answers > 3
        large = server.post("/tokenize", {"messages": [{"role": "user", "content": "grow"}]})
        assert large.status_code == 400 and "a value of more than 16777216 characters" in large.text
        assert server.post("/tokenize", {"messages": [{"role": "user", "content": "fine"}]}).status_code == 200
        server.terminate()
        assert server.wait_end() == 0
