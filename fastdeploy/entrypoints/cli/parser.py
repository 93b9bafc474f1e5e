# SPDX-License-Identifier: Apache-2.0
"""Parsing of the flags of every command but `serve`: one line per mistake, with the nearest flag."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from typing import NoReturn

from fastdeploy.config.args import hyphenate
from fastdeploy.core.errors import ConfigError

ENGINE_FLAGS = (
    "Beside these, the flags of the engine (docs/guide/flags.md): --model, --max-model-len, --speculative-config, ..."
)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigError; underscores in flags may stand for hyphens."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"fastdeploy {command}",
            usage=f"fastdeploy {command} [flags]",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_Formatter,
        )
        self._command = command

    def parse_own(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse flags that are all this command's.

        Raises:
            ConfigError: an unknown flag, with the nearest one, or a wrong value.
        """
        args, unknown = self.parse_known_args([hyphenate(token) for token in arguments])
        if unknown:
            name = unknown[0].split("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"see fastdeploy {self._command} --help"
            raise ConfigError(name, f"unknown flag; {hint}")
        return args

    def parse_with_engine_flags(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse this command's flags; return them, and the rest, which are the engine's."""
        return self.parse_known_args([hyphenate(token) for token in arguments])

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of leaving the process."""
        if not message.startswith("argument "):
            raise ConfigError(f"fastdeploy {self._command}", message)
        field, _, rest = message.removeprefix("argument ").partition(": ")
        raise ConfigError(field.split("/")[-1], rest)


def positive_int(text: str) -> int:
    """Return an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def json_mapping(text: str) -> dict[str, object]:
    """Return the mapping that a JSON text holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON mapping: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON mapping, got {text!r}")
    return value
