# SPDX-License-Identifier: Apache-2.0
"""Renders the templates of requests in a child process with limits of time and memory.

Jinja's sandbox restricts what a template can access, but nested loops could run for days, and `'x' * 10**10` could
take all memory. The process reads one line of JSON per command and answers with one line.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from fastdeploy.core.child_command import child_command, child_environment
from fastdeploy.core.errors import InvalidRequestError, TemplateLimitError
from fastdeploy.core.json_types import check_json, check_unicode
from fastdeploy.detokenize.template_probes import TemplateTraits
from fastdeploy.detokenize.template_renderer import (
    MAX_CPU_S,
    MAX_OUTPUT_LENGTH,
    Messages,
    render_template,
    template_traits,
)

MAX_MEMORY_BYTES = 512 * 2**20
KILL_DELAY_S = 0.5  # processor time after MAX_CPU_S, so that a template that can end itself does, with its own error
MAX_INPUT_LENGTH = 2**22  # characters of JSON
MAX_TEMPLATE_LENGTH = 2**20
SURROGATES = "surrogatepass"  # the caller checks the text


class TemplateProcess:
    """The child process. It starts with the first template, and again after a template exceeded its limits.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, template: str, messages: Messages, variables: Mapping[str, Any], max_length: int = MAX_OUTPUT_LENGTH
    ) -> str:
        """Render a template as `render_template` does, within the limits.

        Raises:
            InvalidRequestError: as `render_template`, or a limit was exceeded.
        """
        check_json("messages", [messages, variables], MAX_INPUT_LENGTH)
        return str(self._answer("render", template, messages, variables, max_length))

    def probe(self, template: str, special_tokens: Mapping[str, str]) -> TemplateTraits:
        """Return what a template prints, within the limits.

        Raises:
            InvalidRequestError: as `template_traits`, or a limit was exceeded.
        """
        return TemplateTraits.from_dict(self._answer("probe", template, special_tokens))

    def _answer(self, command: str, template: str, *arguments: Any) -> Any:
        if len(template) > MAX_TEMPLATE_LENGTH:
            raise InvalidRequestError("chat_template", f"expected at most {MAX_TEMPLATE_LENGTH} characters")
        check_unicode("chat_template", template)
        answer = self._exchange(json.dumps([command, template, *arguments]).encode() + b"\n")
        if "result" in answer:
            return answer["result"]
        error = TemplateLimitError if answer["is_limit"] else InvalidRequestError
        raise error(answer["field"], answer["message"])

    def close(self) -> None:
        """Kill the process if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _exchange(self, line: bytes) -> dict[str, Any]:
        if self._process is None:
            self._process = _start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer:
            return dict(json.loads(answer.decode(errors=SURROGATES)))
        self.close()
        return {
            "field": "chat_template",
            "message": f"rendering takes more than {MAX_CPU_S:g} s of processor time or {MAX_MEMORY_BYTES >> 20} MiB",
            "is_limit": True,
        }


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        child_command("fastdeploy.detokenize.template_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,  # so that Ctrl-C interrupts the server only
    )


def main() -> None:
    """Answer the lines of standard input until it is closed.

    The timer kills the process even within a C function. A MemoryError ends the process as well, which frees the
    compiled templates.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin.buffer:
        answer = json.dumps(_answer(line), ensure_ascii=False).encode(errors=SURROGATES)
        signal.setitimer(signal.ITIMER_PROF, 0)  # waiting for the next line does not count
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes) -> dict[str, Any]:
    command, template, *arguments = json.loads(line)
    max_cpu_s = MAX_CPU_S if command == "probe" else MAX_CPU_S + KILL_DELAY_S  # probes share their time
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        if command == "probe":
            return {"result": template_traits(template, *arguments).to_dict()}
        return {"result": render_template(template, *arguments)}
    except InvalidRequestError as error:
        return {"field": error.field, "message": error.message, "is_limit": isinstance(error, TemplateLimitError)}


if __name__ == "__main__":
    main()
