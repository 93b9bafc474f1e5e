# SPDX-License-Identifier: Apache-2.0
"""Merges command line, YAML file and defaults into the configuration, and remembers where each value came from."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from fastdeploy.config.convert import convert
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.env import API_KEY_VARIABLE, VARIABLES, Env
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS, Flag, FlagClass
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.config.yaml_file import read_yaml_mapping
from fastdeploy.core.errors import ConfigError

COMMAND_LINE = "command line"
LLM_ARGUMENT = "LLM argument"


@dataclass(frozen=True)
class ServeArgs:
    """Configuration of a server.

    Attributes:
        engine, server: the configuration.
        provenance: name of each value that is not a default -> where it came from: the command line, the path of the
            YAML file, or a variable of the environment.
        notes: lines to show at start-up about what was accepted without effect.
    """

    engine: EngineConfig
    server: ServerConfig
    provenance: Mapping[str, str]
    notes: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        found = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
        if found:
            raise ConfigError(found.group(1).split("/")[0], found.group(2))
        raise ConfigError("command line", message)


def parse_serve_args(argv: Sequence[str], env: Env | None = None) -> ServeArgs:
    """Parse the flags of `fastdeploy serve`: command line, then the YAML file of `--config`, then defaults.

    Raises:
        ConfigError: an unknown, refused or wrong flag or key; names it, its origin and the nearest known one.
    """
    given, provenance = _read_sources(argv)
    env = env or Env()
    if env.api_keys and "api_key" not in given:
        given["api_key"], provenance["api_key"] = env.api_keys, API_KEY_VARIABLE
    values, notes = _judge(given, provenance)
    try:
        engine = build_engine_config(
            {name: value for name, value in values.items() if not FLAG_BY_NAME[name].is_server}
        )
        server = _server_config(values)
    except ConfigError as error:
        raise _with_origin(error, provenance) from None
    unread = [f"{name} has no effect: nothing reads this variable{_nearest_variable(name)}" for name in env.unread]
    return ServeArgs(engine, server, provenance, (*notes, *engine.speculative.notes, *unread))


def parse_engine_args(argv: Sequence[str]) -> dict[str, Any]:
    """Parse the engine's flags for a command that runs the engine itself; return keyword arguments for `LLM`.

    Raises:
        ConfigError: as `parse_serve_args`, and for a flag that only a server has.
    """
    given, provenance = _read_sources(argv)
    for name in given:
        if FLAG_BY_NAME[name].is_server:
            raise ConfigError(_shown(name, provenance), "is a flag of the server; this command runs none")
    values, _ = _judge(given, provenance)
    try:
        build_engine_config(values)
    except ConfigError as error:
        raise _with_origin(error, provenance) from None
    return given


def engine_config_from_kwargs(kwargs: Mapping[str, Any]) -> tuple[EngineConfig, tuple[str, ...]]:
    """Build the engine's configuration from the keyword arguments of `LLM`; return it and the start-up notes.

    Raises:
        ConfigError: an unknown, refused or wrong argument, or one that only a server has.
    """
    for name in kwargs:
        if name not in FLAG_BY_NAME:
            raise ConfigError(name, f"unknown {LLM_ARGUMENT}{_nearest(name)}")
        if FLAG_BY_NAME[name].is_server:
            raise ConfigError(name, "is a flag of the server, not an argument of LLM")
    given = {name: value for name, value in kwargs.items() if value is not None}
    values, notes = _judge(given, dict.fromkeys(given, LLM_ARGUMENT))
    engine = build_engine_config(values)
    return engine, (*notes, *engine.speculative.notes)


def build_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build the engine's configuration from converted values by flag name; what is missing takes its default."""
    if not values.get("model"):
        raise ConfigError("model", "no model given; name a directory, or `demo` for the demonstration model")
    engine = _section("engine", values)
    if engine.get("device") == "auto":
        engine["device"] = "cpu"
    if "quantization" in engine:
        engine["quantization"] = QuantizationConfig.from_value(engine["quantization"])
    return EngineConfig(
        **engine,
        cache=CacheConfig(**_section("cache", values)),
        scheduler=SchedulerConfig(**_section("scheduler", values)),
        speculative=SpeculativeConfig.from_mapping(_speculative_mapping(values)),
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `fastdeploy serve`; every value is a string, and what was not given is absent."""
    parser = _Parser(
        prog="fastdeploy serve",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Serve a model over the OpenAI API. Underscores in flags may stand for hyphens.",
        epilog="docs/guide/flags.md lists, too, what is accepted without effect or refused, and why.",
    )
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="YAML file whose keys are the flags in snake_case"
    )
    for flag in FLAGS:
        names = [flag.option, flag.short] if flag.short else [flag.option]
        text = argparse.SUPPRESS if flag.flag_class is not FlagClass.HONOURED else flag.help.replace("%", "%%")
        if flag.kind == "bool":
            parser.add_argument(*names, dest=flag.name, action=argparse.BooleanOptionalAction, help=text)
        elif flag.kind == "list":
            parser.add_argument(*names, dest=flag.name, action="append", metavar=flag.name.upper(), help=text)
        else:
            parser.add_argument(*names, dest=flag.name, metavar=flag.kind.upper(), help=text)
    return parser


def hyphenate(token: str) -> str:
    """Write a long flag with hyphens, whatever its value contains."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return name.replace("_", "-") + equals + value


def _plain_switches(tokens: Sequence[str]) -> list[str]:
    """Write `--switch=false` and `--switch false` as `--no-switch`, and with true as `--switch`."""
    switches = {flag.option for flag in FLAGS if flag.kind == "bool"}
    plain: list[str] = []
    for token in tokens:
        name, equals, value = token.partition("=")
        if not equals and plain and plain[-1] in switches and token.lower() in ("true", "false"):
            name, equals, value = plain.pop(), "=", token
        if equals and name in switches and value.lower() in ("true", "false"):
            plain.append(name if value.lower() == "true" else f"--no-{name.removeprefix('--')}")
        else:
            plain.append(token)
    return plain


def _read_sources(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the command line and the YAML file give, unconverted, and where each value came from."""
    given = _read_command_line(argv)
    files = given.pop("config", [])
    provenance = dict.fromkeys(given, COMMAND_LINE)
    if len(files) > 1:
        raise ConfigError("--config", f"given twice: {files[0]!r} and {files[1]!r}")
    for file in files:
        content = _known_keys(file)
        for name in [name for name in content if name not in given]:
            given[name], provenance[name] = content[name], file
    return given, provenance


def _known_keys(file: str) -> dict[str, Any]:
    """Return the values of a YAML file by flag name; its keys may have hyphens, as other engines' files have."""
    values: dict[str, Any] = {}
    for key, value in read_yaml_mapping(file).items():
        name = key.replace("-", "_")
        if name not in FLAG_BY_NAME:
            raise ConfigError(key, f"unknown key of {file}{_nearest(name)}")
        if name in values:
            raise ConfigError(key, f"stands twice in {file}, with hyphens and with underscores")
        values[name] = value
    return values


def _read_command_line(argv: Sequence[str]) -> dict[str, Any]:
    namespace, unknown = make_parser().parse_known_args(_plain_switches([hyphenate(token) for token in argv]))
    given = vars(namespace)
    for token in unknown:
        name = token.split("=")[0]
        if name.startswith("-"):
            raise ConfigError(name, f"unknown flag{_nearest(name.lstrip('-').replace('-', '_'), option=True)}")
        raise ConfigError("command line", f"what is {token!r}? Only the model may stand without a flag")
    positional = given.pop("model_positional", None)
    if positional is not None:
        if given.get("model", positional) != positional:
            raise ConfigError("--model", f"given twice: {positional!r} and {given['model']!r}")
        given["model"] = positional
    return given


def _nearest(name: str, option: bool = False) -> str:
    known = difflib.get_close_matches(name, FLAG_BY_NAME, n=1)
    if not known:
        return ""
    return f"; did you mean {FLAG_BY_NAME[known[0]].option if option else known[0]!r}?"


def _nearest_variable(name: str) -> str:
    known = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
    return f"; did you mean {known[0]}?" if known else ""


def _judge(given: Mapping[str, Any], provenance: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Convert the values; refuse what is refused; return what is honoured, and a note for what has no effect."""
    values: dict[str, Any] = {}
    notes, refused = [], []
    for name, raw in given.items():
        flag = FLAG_BY_NAME[name]
        shown = _shown(name, provenance)
        value = _convert(flag, raw, shown, provenance[name])
        if flag.flag_class is FlagClass.HONOURED:
            values[name] = value
        elif flag.flag_class is FlagClass.NO_EFFECT:
            notes.append(f"{shown} {value} has no effect: {flag.reason}")
        elif value not in flag.neutral:
            reason = f"{value!r} {flag.reason}" if _says_value(flag) else flag.reason
            refused.append(_with_origin(ConfigError(shown, reason), provenance))
    if refused:
        raise _as_one(refused)
    return values, tuple(notes)


def _says_value(flag: Flag) -> bool:
    return bool(flag.neutral) and flag.kind != "bool" and not flag.is_secret


def _as_one(refused: Sequence[ConfigError]) -> ConfigError:
    """Return the first refusal, and the names of the others, so that one start shows them all."""
    first, others = refused[0], ", ".join(error.field for error in refused[1:])
    return ConfigError(first.field, f"{first.message} (refused as well: {others})") if others else first


def _convert(flag: Flag, raw: Any, shown: str, origin: str) -> Any:
    try:
        return convert(flag, raw)
    except ValueError as error:
        where = "" if origin == COMMAND_LINE else f" ({origin})"
        raise ConfigError(shown, f"{error}{where}") from None


def _shown(name: str, provenance: Mapping[str, str]) -> str:
    """Return a flag's name as its user typed it."""
    return FLAG_BY_NAME[name].option if provenance[name] == COMMAND_LINE else name


def _with_origin(error: ConfigError, provenance: Mapping[str, str]) -> ConfigError:
    """Name the file or variable that a wrong value came from."""
    origin = provenance.get(error.field.split(".")[0], COMMAND_LINE)
    return error if origin in (COMMAND_LINE, LLM_ARGUMENT) else ConfigError(error.field, f"{error.message} ({origin})")


def _section(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one part of the configuration that are given."""
    flags: Iterable[Flag] = (FLAG_BY_NAME[name] for name in values)
    return {flag.field or flag.name: values[flag.name] for flag in flags if flag.section == section}


def _speculative_mapping(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the user's speculative configuration; separate arguments in the older spelling build the same mapping."""
    config = values.get("speculative_config")
    older = {
        "num_speculative_tokens": values.get("num_speculative_tokens"),
        "prompt_lookup_max": values.get("ngram_prompt_lookup_max"),
        "prompt_lookup_min": values.get("ngram_prompt_lookup_min"),
        "draft_tensor_parallel_size": values.get("speculative_draft_tensor_parallel_size"),
    }
    older = {key: value for key, value in older.items() if value is not None}
    model = values.get("speculative_model")
    if model is not None:
        older.update({"method": model} if model.startswith("[") else {"model": model})
    if not older:
        return config
    if config is not None:
        raise ConfigError(
            "speculative_config", f"also given as separate arguments: {', '.join(older)}; use one of both"
        )
    if model is None:
        raise ConfigError("speculative_model", f"is missing beside {', '.join(older)}")
    return older


def _server_config(values: Mapping[str, Any]) -> ServerConfig:
    given = _section("server", values)
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    config = ServerConfig(**given)
    return config if config.served_model_name else replace(config, served_model_name=str(values.get("model", "")))
