# SPDX-License-Identifier: Apache-2.0
"""Merges command line, YAML file and defaults into the configuration, and records where each value came from."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NoReturn

from fastdeploy.config.api_keys import ApiKey, add_plain_keys, file_notes, read_api_key_file
from fastdeploy.config.cluster_args import build_cluster_config, cluster_notes, engine_notes, keep_chunked_prefill
from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.dotted_flags import join_dotted
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.env import API_KEY_VARIABLE, VARIABLES, VLLM_API_KEY_VARIABLE, Env
from fastdeploy.config.exact_parser import ExactParser
from fastdeploy.config.flag import CLUSTER, REFUSED, SERVE_ONLY, SERVER, FlagClass
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS
from fastdeploy.config.gpu_config import GpuConfig
from fastdeploy.config.machine import resolve_device
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.config.resolve_flags import (
    COMMAND_LINE,
    LLM_ARGUMENT,
    display_name,
    errors_name_the_origin,
    resolve_flags,
)
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.config.speculative_config import FIELD
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.config.yaml_file import read_yaml_mapping
from fastdeploy.core.errors import ConfigError, ErrorCollector, did_you_mean
from fastdeploy.core.json_types import to_python

REPLACED_BY = {"uds": ("host", "port"), "shutdown_timeout": ("timeout_graceful_shutdown",)}
"""Flag -> others that have no effect beside it, and must not be given."""
FindFolder = Callable[[str, str], str | None]
"""Returns the folder of a local model by name and GGUF file; None if there is none. ConfigError if it is wrong."""
CLIENT_SHARE_OF_KEYS = 0.875  # default of max_client_share with several keys; the rest is room for the others


@dataclass(frozen=True)
class ServeArgs:
    """Configuration of a server.

    Attributes:
        engine, server, cluster: the configuration.
        provenance: where each value that is not a default came from: the command line, the path of the YAML file, or an
            environment variable.
        notes: lines to show at start-up about flags, keys and variables without effect.
    """

    engine: EngineConfig
    server: ServerConfig
    provenance: Mapping[str, str]
    notes: tuple[str, ...]
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


class _Parser(ExactParser):
    def error(self, message: str) -> NoReturn:
        found = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
        if found:
            raise ConfigError(found.group(1).split("/")[0], found.group(2))
        raise ConfigError("command line", message)


def parse_serve_args(argv: Sequence[str], env: Env | None = None, find_folder: FindFolder | None = None) -> ServeArgs:
    """Parse the flags of `fastdeploy serve`: command line, then the YAML file of `--config`, then defaults.

    Args:
        find_folder: finds a local model, whose config.json is read to name all errors at once if there are any.

    Raises:
        ConfigError: an unknown, refused or wrong flag or key; names it, its origin and the nearest known one.
    """
    problems = ErrorCollector()
    given, provenance = _read_sources(argv, problems)
    env = env or Env()
    if env.api_keys and "api_key" not in given:
        given["api_key"], provenance["api_key"] = env.api_keys, API_KEY_VARIABLE
    values, notes = resolve_flags(given, provenance, problems)
    try:
        problems.raise_all()
        with errors_name_the_origin(provenance):
            server = _server(values)
            if len(server.keys) > 1:
                values.setdefault("max_client_share", CLIENT_SHARE_OF_KEYS)
            cluster, more_notes = _cluster(values, env, provenance)
            engine = build_engine_config(values)
    except ConfigError:
        _raise_with_all_others(problems, values, env, provenance, find_folder)
        raise
    engine = replace(engine, is_clustered=cluster.is_clustered, hands_over=cluster.is_split)
    server = replace(server, served_model_name=server.served_model_name or (engine.model,))
    unknown = [
        f"{name} has no effect: unknown variable{did_you_mean(name, VARIABLES, cutoff=0.8)}" for name in env.unknown
    ]
    if env.has_vllm_api_key:
        unknown.append(f"{VLLM_API_KEY_VARIABLE} is not read: give keys with --api-key, --api-key-file or FD_API_KEY")
    key_notes = file_notes(server.api_key_file) if server.api_key_file else ()
    gpu_notes = engine.gpu.notes(
        engine.device, {name: display_name(name, provenance) for name in provenance if name in FLAG_BY_NAME}
    )
    shown = display_name(FIELD, provenance) if FIELD in provenance else FIELD
    draft_notes = [note.replace(FIELD, shown, 1) for note in engine.speculative.notes]
    notes = (*notes, *gpu_notes, *more_notes, *draft_notes, *key_notes, *unknown)
    return ServeArgs(engine, server, provenance, notes, cluster)


def _raise_with_all_others(
    problems: ErrorCollector,
    values: Mapping[str, Any],
    env: Env,
    provenance: Mapping[str, str],
    find_folder: FindFolder | None,
) -> None:
    """Raise the errors found so far together with those of every part of the configuration."""
    values, origins = dict(values), dict(provenance)
    parts: tuple[Callable[[], object], ...] = (
        lambda: _server(values),
        lambda: _cluster(values, env, origins),
        lambda: _check_engine(values, find_folder, problems.errors),
    )
    for build in parts:
        with problems.collecting(), errors_name_the_origin(provenance):
            build()
    problems.raise_all()


def _check_engine(values: Mapping[str, Any], find_folder: FindFolder | None, known: Sequence[ConfigError] = ()) -> None:
    """Raise all errors of the engine's flags, with those of the right ones that a local config.json does not allow.

    Flags with an error are left out of the next try, which finds what contradicts the others. Its errors about a flag
    that was left out, as about those of the errors that are known, speak of a default that nobody wants.
    """
    problems, wrong, right = ErrorCollector(), {_flag_of(error) for error in known}, dict(values)
    while True:
        found = ErrorCollector()
        with found.collecting():
            config = build_engine_config(right)
            if find_folder and (folder := find_folder(config.model, config.gguf_file)):
                config.check_model(folder)
        problems.errors += [error for error in found.errors if _flag_of(error) not in wrong]
        fields = {_flag_of(error) for error in found.errors}
        if not fields & right.keys():
            break
        wrong |= fields
        right = {name: value for name, value in right.items() if name not in fields}
    problems.raise_all()


def _flag_of(error: ConfigError) -> str:
    """Return the name of the flag that an error is about, however its message spells it."""
    return re.split(r"[. ]", error.field)[0].removeprefix("--").replace("-", "_")


def _server(values: Mapping[str, Any]) -> ServerConfig:
    """Build the server's configuration, with all API keys."""
    problems, keys = ErrorCollector(), tuple[ApiKey, ...]()
    for name, others in REPLACED_BY.items():
        given = [FLAG_BY_NAME[other].option for other in others if other in values]
        if values.get(name, "") != "" and given:
            problems.add(name, f"cannot be combined with {' and '.join(given)}, which it replaces")
    with problems.collecting():
        server = ServerConfig(**_section(SERVER, values))
    with problems.collecting():
        keys = read_api_key_file(file) if (file := values.get("api_key_file")) else ()
    problems.raise_all()
    return replace(server, keys=add_plain_keys(keys, server.api_keys))


def _cluster(values: dict[str, Any], env: Env, provenance: dict[str, str]) -> tuple[ClusterConfig, list[str]]:
    """Return how this node works with others, and notes; change the engine's values and the provenance to match."""
    given, shown = _section(CLUSTER, values), {name: display_name(name, provenance) for name in provenance}
    config, origin = build_cluster_config(given, env.scheduler_password)
    if origin:
        provenance["scheduler_password"] = origin
    notes = list(cluster_notes(config, given, shown))
    if config.is_clustered:
        notes += keep_chunked_prefill(values, shown)
    return config, notes


def parse_engine_args(argv: Sequence[str], find_folder: FindFolder | None = None) -> dict[str, Any]:
    """Parse the engine's flags for a command that runs the engine itself; return keyword arguments for `LLM`.

    Args:
        find_folder: as in `parse_serve_args`.

    Raises:
        ConfigError: as `parse_serve_args`, and for a flag that only a server has.
    """
    problems = ErrorCollector()
    given, provenance = _read_sources(argv, problems)
    _refuse_server_flags(
        given, provenance, f"{REFUSED}: it is a flag of the server, and this command runs none", problems
    )
    values, _ = resolve_flags(given, provenance, problems)
    with problems.collecting(), errors_name_the_origin(provenance):
        _check_engine(values, find_folder)
    problems.raise_all()
    return given


def _refuse_server_flags(
    given: Mapping[str, Any], provenance: Mapping[str, str], message: str, problems: ErrorCollector
) -> None:
    for name in given:
        if FLAG_BY_NAME[name].section in SERVE_ONLY:
            with problems.collecting():
                raise ConfigError(display_name(name, provenance), message)


def engine_config_from_kwargs(kwargs: Mapping[str, Any]) -> tuple[EngineConfig, tuple[str, ...]]:
    """Build the engine's configuration from the keyword arguments of `LLM`; return it and the start-up notes.

    Raises:
        ConfigError: an unknown, refused or wrong argument, or one that only a server has.
    """
    problems = ErrorCollector()
    given = {name: to_python(value) for name, value in kwargs.items() if value is not None and name in FLAG_BY_NAME}
    for name in (name for name in kwargs if name not in FLAG_BY_NAME):
        with problems.collecting():
            raise ConfigError(name, f"unknown {LLM_ARGUMENT}{did_you_mean(name, FLAG_BY_NAME)}")
    provenance = dict.fromkeys(given, LLM_ARGUMENT)
    _refuse_server_flags(given, provenance, f"{REFUSED}: it is a flag of the server, not an argument of LLM", problems)
    values, notes = resolve_flags(given, provenance, problems)
    problems.raise_all()
    engine = build_engine_config(values)
    gpu_notes = engine.gpu.notes(engine.device, {name: name for name in given})
    return engine, (*notes, *gpu_notes, *engine_notes(values), *engine.speculative.notes)


def build_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build the engine's configuration from converted values by flag name; flags of the server are ignored."""
    problems, parts = ErrorCollector(), dict[str, Any]()
    engine = {"model": "", **_section("engine", values)}
    if not engine["model"]:
        with problems.collecting():
            raise ConfigError("model", "is missing; give a directory, a GGUF file, `smollm2` or `demo`")
    if "device" in engine:
        engine["device"] = resolve_device(engine["device"])
    builders: dict[str, Callable[[], object]] = {
        "quantization": lambda: QuantizationConfig.from_value(engine.pop("quantization", UNQUANTIZED)),
        "gpu": lambda: GpuConfig(**_section("gpu", values)),
        "cache": lambda: CacheConfig(**_section("cache", values)),
        "scheduler": lambda: SchedulerConfig(**_section("scheduler", values)),
        "speculative": lambda: parse_speculative_config(_speculative_mapping(values)),
    }
    for name, build in builders.items():
        with problems.collecting():
            parts[name] = build()
    with problems.collecting():
        config = EngineConfig(**engine, **parts)
    problems.raise_all()
    return config


@cache
def make_parser() -> ExactParser:
    """Return the parser of `fastdeploy serve`; every value is a string, and what was not given is absent."""
    parser = _Parser(
        prog="fastdeploy serve",
        argument_default=argparse.SUPPRESS,
        description="Serve a model over the OpenAI API. Underscores in flags may stand for hyphens.",
        epilog="docs/guide/flags.md also lists the flags that have no effect or are refused, and why.",
    )
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="YAML file whose keys are the flags in snake_case"
    )
    for flag in FLAGS:
        text = argparse.SUPPRESS if flag.flag_class is not FlagClass.HONOURED else flag.help.replace("%", "%%")
        if flag.kind == "bool":
            parser.add_argument(*flag.spellings, dest=flag.name, action=argparse.BooleanOptionalAction, help=text)
        elif flag.kind == "list":
            is_single = flag.flag_class is FlagClass.HONOURED and not flag.takes_several
            action, count = ("append", None) if is_single else ("extend", "+")
            parser.add_argument(
                *flag.spellings, dest=flag.name, action=action, nargs=count, metavar=flag.name.upper(), help=text
            )
        else:
            parser.add_argument(*flag.spellings, dest=flag.name, metavar=flag.kind.upper(), help=text)
    return parser


def hyphenate(token: str) -> str:
    """Write a long flag with hyphens, whatever its value contains."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    option, dot, key = name.partition(".")
    return option.replace("_", "-") + dot + key + equals + value


def _plain_switches(tokens: Sequence[str]) -> list[str]:
    """Write `--switch=false` and `--switch false` as `--no-switch`, and with true as `--switch`."""
    switches = {name: flag.option for flag in FLAGS if flag.kind == "bool" for name in flag.spellings}
    plain: list[str] = []
    for token in tokens:
        name, equals, value = token.partition("=")
        if not equals and plain and plain[-1] in switches and token.lower() in ("true", "false"):
            name, equals, value = plain.pop(), "=", token
        if equals and name in switches and value.lower() in ("true", "false"):
            option = switches[name]
            plain.append(option if value.lower() == "true" else f"--no-{option.removeprefix('--')}")
        else:
            plain.append(token)
    return plain


def _read_sources(argv: Sequence[str], problems: ErrorCollector) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the command line and the YAML file give, unconverted, and where each value came from.

    Unknown flags and keys are left out; `problems` gets their errors.
    """
    given = _read_command_line(argv, problems)
    files = given.pop("config", [])
    provenance = dict.fromkeys(given, COMMAND_LINE)
    if len(files) > 1:
        raise ConfigError("--config", f"given twice: {files[0]!r} and {files[1]!r}")
    for file in files:
        for name, value in _read_file(file, problems).items():
            if name not in given:
                given[name], provenance[name] = value, file
    return given, provenance


def _read_file(file: str, problems: ErrorCollector) -> dict[str, Any]:
    """Return the values of a YAML file by flag name; its keys may have hyphens, as vLLM's files have."""
    values: dict[str, Any] = {}
    for key, value in read_yaml_mapping(file).items():
        name = key.replace("-", "_")
        with problems.collecting():
            if name not in FLAG_BY_NAME:
                raise ConfigError(key, f"unknown key of {file}{did_you_mean(name, FLAG_BY_NAME)}")
            if name in values:
                raise ConfigError(key, f"given twice in {file}, with hyphens and with underscores")
            values[name] = value
    return values


def _read_command_line(argv: Sequence[str], problems: ErrorCollector) -> dict[str, Any]:
    namespace, unknown = make_parser().parse_exactly(
        _plain_switches(join_dotted([hyphenate(token) for token in argv], FLAGS))
    )
    given = vars(namespace)
    positional = given.pop("model_positional", None)
    flags = dict.fromkeys(token.split("=")[0] for token in unknown if token.startswith("-"))
    for name in flags:
        with problems.collecting():
            raise ConfigError(name, f"unknown flag{did_you_mean(name, [flag.option for flag in FLAGS])}")
    model = given if positional is None else {"model": positional, **given}
    if flags:  # what is left, and the model, may be their values
        return model
    if unknown:
        raise ConfigError(
            "command line", f"unexpected argument {unknown[0]!r}; only the model may be given without a flag"
        )
    if positional is not None and model["model"] != positional:
        raise ConfigError("--model", f"given twice: {positional!r} and {model['model']!r}")
    return model


def _section(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of one configuration."""
    flags = (FLAG_BY_NAME[name] for name in values)
    return {flag.field: values[flag.name] for flag in flags if flag.section == section}


def _speculative_mapping(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the speculative configuration as given, or as the separate flags of the older spelling describe it."""
    older = _section("speculative", values)
    config = older.pop("", None)
    if not older:
        return config
    given = ", ".join(
        name for name in values if FLAG_BY_NAME[name].section == "speculative" and FLAG_BY_NAME[name].field
    )
    if config is not None:
        raise ConfigError("speculative_config", f"cannot be combined with its older spelling: {given}")
    if "method" in older:
        return older
    if "model" not in older:
        raise ConfigError("speculative_model", f"is missing, but required by {given}")
    return {"method": older.pop("model"), **older} if older["model"].startswith("[") else older
