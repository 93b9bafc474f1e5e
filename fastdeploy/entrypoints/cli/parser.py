# SPDX-License-Identifier: Apache-2.0
"""Command-line parsing shared by all commands but `serve`: errors in one line, with the nearest flag or command."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn
from urllib.parse import urlsplit

from fastdeploy.config.args import hyphenate
from fastdeploy.config.env import read_env
from fastdeploy.config.exact_parser import ExactParser
from fastdeploy.core.errors import ConfigError, ErrorCollector, FastDeployError, did_you_mean

ENGINE_FLAGS = (
    "The engine flags of fastdeploy serve are accepted as well: --model, --max-model-len, --speculative-config, ... "
    "(docs/guide/flags.md)"
)
SERVE_FLAGS = (
    "The flags of fastdeploy serve are accepted as well: --model, --max-model-len, --speculative-config, ... "
    "(docs/guide/flags.md)"
)


def run_subcommand(prefix: str, commands: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Import and run the command that `arguments` begin with; return its exit status.

    Args:
        prefix: what precedes the command on the command line, such as "bench ".
        commands: command -> module:function.

    Raises:
        FastDeployError: the command does not exist.
    """
    name, *rest = arguments
    if name not in commands:
        hint = did_you_mean(name, commands) or f"; see fastdeploy {prefix}--help"
        raise FastDeployError(f"unknown command '{prefix}{name}'{hint}")
    module, _, function = commands[name].partition(":")
    return int(getattr(importlib.import_module(module), function)(rest))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that are empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class CommandParser(ExactParser):
    """A parser that raises ConfigError for wrong flags and accepts underscores for hyphens in their names."""

    def __init__(self, command: str, description: str, epilog: str = "", positional: str = "") -> None:
        super().__init__(
            prog=f"fastdeploy {command}",
            usage=" ".join(filter(None, ["fastdeploy", command, positional, "[flags]"])),
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
        )
        self._command = command

    def parse_own(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the flags of a command that takes no engine flags.

        Raises:
            ConfigError: flags are unknown, of which it names all, or a value is wrong.
        """
        args, unknown = self.parse_exactly([hyphenate(token) for token in arguments])
        problems = ErrorCollector()
        flags = [token for token in unknown if token.startswith("-")]
        for name in dict.fromkeys(token.split("=")[0] for token in flags or unknown):
            hint = did_you_mean(name, self._option_string_actions) or f"; see fastdeploy {self._command} --help"
            with problems.collecting():
                raise ConfigError(name, f"unknown {'flag' if flags else 'argument'}{hint}")
        problems.raise_all()
        return args

    def parse_with_engine_flags(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the command's own flags; return them and the other arguments, which are for the engine."""
        return self.parse_exactly([hyphenate(token) for token in arguments])

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of exiting."""
        if not message.startswith("argument "):
            raise ConfigError(f"fastdeploy {self._command}", message)
        field, _, rest = message.removeprefix("argument ").partition(": ")
        raise ConfigError(field.split("/")[-1], rest)


def server_url(text: str) -> str:
    """Return the address of a server without /v1 at its end; it may be given with or without that and its scheme."""
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"expected an address such as http://localhost:8000, got {text!r}")
    return url


def add_api_key_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the API key of a server."""
    parser.add_argument("--api-key", help="API key of the server; default: OPENAI_API_KEY of the environment")


def get_api_key(args: argparse.Namespace) -> str:
    """Return the API key to send."""
    return str(args.api_key or read_env().openai_api_key or "EMPTY")


def positive_int(text: str) -> int:
    """Return an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def non_negative_int(text: str) -> int:
    """Return an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {value}")
    return value


def ratio(text: str) -> float:
    """Return a number in [0, 1)."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number in [0, 1), got {text}")
    return value


def json_mapping(text: str) -> dict[str, object]:
    """Return the mapping of a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value
