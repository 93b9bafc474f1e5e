# SPDX-License-Identifier: Apache-2.0
"""The `fastdeploy` command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fastdeploy.version import __version__

USAGE = """usage: fastdeploy COMMAND [flags]

  serve MODEL     serve a model over the OpenAI API (fastdeploy serve --help)
  chat            talk to a running server
  complete        let a running server continue a text
  --version       versions of the package and of its operator library
"""
NOT_YET = ("bench", "run-batch", "collect-env", "config", "tokenizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command in ("-v", "--version"):
        print(version_line())
        return 0
    if command in _COMMANDS:
        return _COMMANDS[command](arguments)
    reason = "is not available yet" if command in NOT_YET else "is no command; see fastdeploy --help"
    print(f"fastdeploy: error: {command} {reason}", file=sys.stderr)
    return 2


def version_line() -> str:
    """Return the package's version and the operator library's version and hash, or why there is none."""
    try:
        from fastdeploy import ops

        library = f"{ops.library_version()} ({ops.library_hash()})"
    except Exception as error:
        library = f"not usable: {error}"
    return f"fastdeploy {__version__}, operator library {library}"


def _serve(arguments: list[str]) -> int:
    from fastdeploy.entrypoints.openai.api_server import main as serve

    return serve(arguments)


def _chat(arguments: list[str]) -> int:
    from fastdeploy.entrypoints.cli.client import chat

    return chat(arguments)


def _complete(arguments: list[str]) -> int:
    from fastdeploy.entrypoints.cli.client import complete

    return complete(arguments)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {"serve": _serve, "chat": _chat, "complete": _complete}

if __name__ == "__main__":
    sys.exit(main())
