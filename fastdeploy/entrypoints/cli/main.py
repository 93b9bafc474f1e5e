# SPDX-License-Identifier: Apache-2.0
"""The `fastdeploy` command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from fastdeploy.config.env import Env, read_env
from fastdeploy.config.resolve_flags import errors_name_the_origin
from fastdeploy.core.errors import DeviceFailedError, FastDeployError, error_lines
from fastdeploy.core.standard_streams import open_standard_streams
from fastdeploy.entrypoints.cli.parser import run_subcommand
from fastdeploy.metrics.logs import set_up_script_logging
from fastdeploy.version import __version__

USAGE = """usage: fastdeploy COMMAND [flags]

  serve MODEL     serve a model with an OpenAI-compatible API
  chat            chat with a running server
  complete        complete prompts on a running server
  run-batch       answer a file of requests in OpenAI's batch format
  bench           run a benchmark: bench serve, bench latency or bench throughput
  config          print the configuration that flags and a YAML file result in, and where each value comes from
  quantize        write a model's weights quantized and packed, which servers then map
  tokenizer       encode or decode text, or export the vocabulary
  check-device    compare the operators of a GPU with their references
  collect-env     print versions, hardware and limits for a bug report
  --version       print the versions of the package and of its operator library

fastdeploy COMMAND --help lists the flags of a command.
"""
COMMANDS = {
    "serve": "fastdeploy.entrypoints.openai.api_server:main",
    "chat": "fastdeploy.entrypoints.cli.openai:chat",
    "complete": "fastdeploy.entrypoints.cli.openai:complete",
    "run-batch": "fastdeploy.entrypoints.cli.run_batch:main",
    "bench": "fastdeploy.entrypoints.cli.bench:main",
    "config": "fastdeploy.entrypoints.cli.show_config:main",
    "quantize": "fastdeploy.entrypoints.cli.quantize:main",
    "tokenizer": "fastdeploy.entrypoints.cli.tokenizer:main",
    "check-device": "fastdeploy.entrypoints.cli.check_device:main",
    "collect-env": "fastdeploy.entrypoints.cli.collect_env:main",
}
"""Command -> module:function. The module is imported when the command runs."""
DEVICE_STATUS = 1
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141  # as of programs that SIGPIPE ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 2 for wrong flags and files, 1 for a device that cannot be used."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] in ("-v", "--version"):
        print(version_line())
        return 0
    env = Env()
    try:
        env = read_env()
        set_up_script_logging(env)
        with errors_name_the_origin({}):
            status = run_subcommand("", COMMANDS, arguments)
        sys.stdout.flush()
        return status
    except FastDeployError as error:
        if env.debug:
            raise
        print(error_lines(error), file=sys.stderr)
        return DEVICE_STATUS if isinstance(error, DeviceFailedError) else USAGE_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except BrokenPipeError:  # whoever reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter still writes
        return BROKEN_PIPE_STATUS


def version_line() -> str:
    """Return the version of the package, and version and hash of the operator library or why it cannot be loaded."""
    logging.getLogger("fastdeploy").setLevel(logging.WARNING)
    try:
        from fastdeploy.ops.registry import select_backend

        library = select_backend("cpu").describe()["operator_library"]
    except Exception as error:
        library = f"not available: {error}"
    return f"fastdeploy {__version__}, operator library {library}"


if __name__ == "__main__":
    sys.exit(main())
