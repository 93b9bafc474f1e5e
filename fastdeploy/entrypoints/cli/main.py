# SPDX-License-Identifier: Apache-2.0
"""The `fastdeploy` command."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from fastdeploy.config.env import Env, read_env
from fastdeploy.core.errors import ConfigError, FastDeployError
from fastdeploy.version import __version__

USAGE = """usage: fastdeploy COMMAND [flags]

  serve MODEL     serve a model over the OpenAI API
  chat            talk to a running server
  complete        let a running server continue texts
  run-batch       answer a file of requests (OpenAI batch JSONL)
  bench           measure: bench serve, bench latency, bench throughput
  config          print the configuration that flags and a YAML file make, and where each value comes from
  tokenizer       encode, decode, export the vocabulary
  collect-env     print what a bug report needs: versions, machine, limits
  --version       versions of the package and of its operator library

fastdeploy COMMAND --help lists the flags of a command.
"""
COMMANDS = {
    "serve": "fastdeploy.entrypoints.openai.api_server:main",
    "chat": "fastdeploy.entrypoints.cli.client:chat",
    "complete": "fastdeploy.entrypoints.cli.client:complete",
    "run-batch": "fastdeploy.entrypoints.cli.run_batch:main",
    "bench": "fastdeploy.entrypoints.cli.bench.command:main",
    "config": "fastdeploy.entrypoints.cli.show_config:main",
    "tokenizer": "fastdeploy.entrypoints.cli.tokenizer:main",
    "collect-env": "fastdeploy.entrypoints.cli.collect_env:main",
}
"""Command -> module:function; a command imports what it needs only when it runs."""
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 2 for what cannot be used as given."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command in ("-v", "--version"):
        print(version_line())
        return 0
    env = Env()
    try:
        env = read_env()
        return _run(command, arguments)
    except FastDeployError as error:
        if env.debug:
            raise
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def version_line() -> str:
    """Return the package's version and the operator library's version and hash, or why there is none."""
    try:
        from fastdeploy.ops.registry import select_backend

        library = select_backend("cpu").describe()["operator_library"]
    except Exception as error:
        library = f"not usable: {error}"
    return f"fastdeploy {__version__}, operator library {library}"


def _run(command: str, arguments: list[str]) -> int:
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see fastdeploy --help"
        raise ConfigError(command, f"is no command; {hint}")
    module, _, function = COMMANDS[command].partition(":")
    return int(getattr(importlib.import_module(module), function)(arguments))


if __name__ == "__main__":
    sys.exit(main())
