# SPDX-License-Identifier: Apache-2.0
"""Merges command line, YAML file and defaults into the configuration, and remembers where each value came from."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.env import Env
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS, Flag, FlagClass
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.errors import ConfigError

COMMAND_LINE = "command line"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class ServeArgs:
    """Configuration of a server.

    Attributes:
        engine, server: the configuration.
        provenance: name of each value that is not a default -> where it came from.
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
    given = _read_command_line(argv)
    provenance = dict.fromkeys(given, COMMAND_LINE)
    config_file = given.pop("config", None)
    provenance.pop("config", None)
    if config_file is not None:
        for name, value in _read_yaml(config_file).items():
            if name not in given:
                given[name], provenance[name] = value, config_file
    values, notes = _judge(given, provenance)
    server = _server_config(values, env or Env())
    engine = build_engine_config({name: value for name, value in values.items() if not FLAG_BY_NAME[name].is_server})
    return ServeArgs(engine, server, provenance, (*notes, *engine.speculative.notes))


def engine_config_from_kwargs(kwargs: Mapping[str, Any]) -> tuple[EngineConfig, tuple[str, ...]]:
    """Build the engine's configuration from the keyword arguments of `LLM`; return it and the start-up notes.

    Raises:
        ConfigError: an unknown, refused or wrong argument, or one that only a server has.
    """
    for name in kwargs:
        _check_known(name, "LLM argument", name)
        if FLAG_BY_NAME[name].is_server:
            raise ConfigError(name, "is a flag of the server, not an argument of LLM")
    given = {name: value for name, value in kwargs.items() if value is not None}
    values, notes = _judge(given, dict.fromkeys(given, "LLM argument"))
    engine = build_engine_config(values)
    return engine, (*notes, *engine.speculative.notes)


def build_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build the engine's configuration from converted values by flag name; what is missing takes its default."""
    if not values.get("model"):
        raise ConfigError("model", "no model given; name a directory, or `demo` for the demonstration model")
    plain = (
        "model",
        "tokenizer",
        "dtype",
        "load_choices",
        "max_model_len",
        "seed",
        "logprobs_mode",
        "generation_config",
        "reasoning_parser",
        "guided_decoding_backend",
    )
    cache = _pick(values, "block_size", "kv_cache_memory", "enable_prefix_caching")
    if "num_gpu_blocks_override" in values:
        cache["num_blocks"] = values["num_gpu_blocks_override"]
    device = values.get("device", "auto")
    return EngineConfig(
        **_pick(values, *plain),
        device="cpu" if device == "auto" else device,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(
            **_pick(
                values,
                "max_num_seqs",
                "max_num_batched_tokens",
                "enable_chunked_prefill",
                "long_prefill_token_threshold",
            )
        ),
        speculative=SpeculativeConfig.from_mapping(_speculative_mapping(values)),
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `fastdeploy serve`; every value is a string, and what was not given is absent."""
    parser = _Parser(
        prog="fastdeploy serve",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Serve a model over the OpenAI API. Underscores in flags may stand for hyphens.",
    )
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file whose keys are the flags in snake_case")
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


def _read_command_line(argv: Sequence[str]) -> dict[str, Any]:
    namespace, unknown = make_parser().parse_known_args([_hyphenate(token) for token in argv])
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


def _hyphenate(token: str) -> str:
    """Write a long flag with hyphens, whatever its value contains."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return name.replace("_", "-") + equals + value


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", f"cannot read {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path!r} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path!r} holds no mapping of flags")
    for name in content:
        _check_known(str(name), f"key of {path}", str(name))
    return {str(name): value for name, value in content.items() if value is not None}


def _check_known(name: str, what: str, shown: str) -> None:
    if name not in FLAG_BY_NAME:
        raise ConfigError(shown, f"unknown {what}{_nearest(name)}")


def _nearest(name: str, option: bool = False) -> str:
    known = difflib.get_close_matches(name, FLAG_BY_NAME, n=1)
    if not known:
        return ""
    return f"; did you mean {FLAG_BY_NAME[known[0]].option if option else known[0]!r}?"


def _judge(given: Mapping[str, Any], provenance: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Convert the values; refuse what is refused; return what is honoured, and a note for what has no effect."""
    values: dict[str, Any] = {}
    notes = []
    for name, raw in given.items():
        flag = FLAG_BY_NAME[name]
        shown = flag.option if provenance[name] == COMMAND_LINE else name
        value = _convert(flag, raw, shown, provenance[name])
        if flag.flag_class is FlagClass.HONOURED:
            values[name] = value
        elif flag.flag_class is FlagClass.NO_EFFECT:
            notes.append(f"{shown} {value} has no effect: {flag.reason}")
        elif value not in flag.neutral:
            raise ConfigError(shown, f"{value!r} {flag.reason}" if flag.neutral else flag.reason)
    return values, tuple(notes)


def _convert(flag: Flag, raw: Any, shown: str, origin: str) -> Any:
    """Return the value in the flag's type; YAML and LLM bring typed values, the command line brings strings."""
    try:
        return _CONVERTERS[flag.kind](raw)
    except (ValueError, TypeError) as error:
        where = "" if origin == COMMAND_LINE else f" ({origin})"
        detail = f": {error}" if flag.kind == "json" else ""
        raise ConfigError(shown, f"expected {_EXPECTED[flag.kind]}, got {raw!r}{detail}{where}") from None


def _to_int(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise TypeError
    return int(raw)


def _to_float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise TypeError
    value = float(raw)
    if value != value:
        raise ValueError
    return value


def _to_bool(raw: Any) -> bool:
    text = str(raw).lower()
    if isinstance(raw, (bool, str)) and text in _TRUE + _FALSE:
        return text in _TRUE
    raise ValueError


def _to_str(raw: Any) -> str:
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float, Path)):
        raise TypeError
    return str(raw)


def _to_bytes(raw: Any) -> int:
    found = re.fullmatch(r"(\d+)([kmg]?i?)b?", str(raw).strip().lower())
    if isinstance(raw, (bool, float)) or not found or found.group(2) not in _UNITS:
        raise ValueError
    return int(found.group(1)) * _UNITS[found.group(2)]


def _to_json(raw: Any) -> Any:
    value = json.loads(raw) if isinstance(raw, str) else raw
    if not isinstance(value, Mapping):
        raise TypeError(f"a JSON {type(value).__name__} is no mapping")
    return value


def _to_list(raw: Any) -> list[str]:
    return [_to_str(item) for item in (raw if isinstance(raw, (list, tuple)) else [raw])]


_CONVERTERS: dict[str, Any] = {
    "str": _to_str,
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "bytes": _to_bytes,
    "json": _to_json,
    "list": _to_list,
}
_EXPECTED = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "bytes": "a number of bytes such as 536870912 or 512Mi",
    "json": "a JSON mapping",
    "list": "strings",
}


def _pick(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


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
        older.update({"method": model} if model.startswith("[") else {"method": "draft_model", "model": model})
    if not older:
        return config
    if config is not None:
        raise ConfigError(
            "speculative_config", f"also given as separate arguments: {', '.join(older)}; use one of both"
        )
    if model is None:
        raise ConfigError("speculative_model", f"is missing beside {', '.join(older)}")
    return older


def _server_config(values: Mapping[str, Any], env: Env) -> ServerConfig:
    given = {name: value for name, value in values.items() if FLAG_BY_NAME[name].is_server}
    api_keys = tuple(given.pop("api_key", ())) or env.api_keys
    config = ServerConfig(**given, api_keys=api_keys)
    return config if config.served_model_name else replace(config, served_model_name=str(values.get("model", "")))
