# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy config`: the configuration from flags, YAML file and environment, and where each value comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import yaml

from fastdeploy.config.args import REPLACED_BY, ServeArgs, parse_serve_args
from fastdeploy.config.cluster_args import PASSWORD_FILE_FLAG
from fastdeploy.config.env import API_KEY_VARIABLE, SCHEDULER_PASSWORD_VARIABLE, read_env
from fastdeploy.config.flag import CLUSTER
from fastdeploy.config.flags import HONOURED_FLAGS, Flag
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.redis_url import MASK
from fastdeploy.config.resolve_flags import COMMAND_LINE, errors_name_the_origin
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.operators import describe_device, device_line
from fastdeploy.entrypoints.cli.parser import SERVE_FLAGS, CommandParser
from fastdeploy.hub.model_path import find_local_model, folder_of, local_folder

SEPARATE_SPECULATION_FLAGS = (
    "speculative_model",
    "spec_method",
    "num_speculative_tokens",
    "ngram_prompt_lookup_max",
    "ngram_prompt_lookup_min",
)
_COMPLETE_ORIGINS = (COMMAND_LINE, API_KEY_VARIABLE, SCHEDULER_PASSWORD_VARIABLE, PASSWORD_FILE_FLAG)


def main(arguments: list[str]) -> int:
    """Print the configuration as YAML that --config accepts, or as JSON, without starting a server."""
    parser = CommandParser(
        "config",
        "Print the configuration of a server and where each value comes from, without starting it.",
        SERVE_FLAGS,
    )
    parser.add_argument("--output-format", choices=("yaml", "json"), default="yaml", help="format of the output")
    own_args, flags = parser.parse_with_engine_flags(arguments)
    args = with_known_model(parse_serve_args(flags, read_env(), local_folder))
    values = resolved_values(args)
    device = describe_device(args.engine.device)
    print((_as_json if own_args.output_format == "json" else _as_yaml)(values, args.notes, device))
    return 0


def with_known_model(args: ServeArgs) -> ServeArgs:
    """Return the configuration with the weight formats of a local model, and a note with the context that `auto` is.

    If the model cannot be read, a note says that they are not known.

    Raises:
        ConfigError: `max_model_len` is more than the model's limit, or there is a format for experts that it lacks.
    """
    engine = args.engine
    try:
        path = find_local_model(engine.model, gguf_file=engine.gguf_file)
        if path is None:
            raise ConfigError("model", f"{engine.model} is not downloaded here")
        model = engine.read_model(str(folder_of(path)))
    except ConfigError as error:
        note = f"max_model_len was not compared with the model's limit: {error.message}"
        return replace(args, notes=(*args.notes, note))
    with errors_name_the_origin(args.provenance):
        context = engine.choose_context(model)
        model.weight_formats(engine.quantization)
    formats = engine.quantization if engine.quantization.is_given else model.quantization
    notes = (*args.notes, *model.notes, *_describe_codes(model, engine.quantization))
    if engine.max_model_len == "auto":
        most = f"context {context.num_tokens} of the model's {model.max_context_len}"
        notes = (*notes, f"{most}, unless the KV cache or a draft model holds less")
    return replace(args, engine=replace(engine, quantization=formats), notes=notes)


def _describe_codes(model: ModelConfig, quantization: QuantizationConfig) -> list[str]:
    """Return a line for each kind of weight of a checkpoint with codes, its types, and what becomes of them."""
    if not model.has_codes:
        return []
    from fastdeploy.models.weight_report import summarize, tabulate, weight_fates  # imports Paddle

    fates = weight_fates(model, model.weight_formats(quantization))
    return [f"{model.name}: {summarize(fates)}", *tabulate(fates)]


def resolved_values(args: ServeArgs) -> dict[str, tuple[Any, str]]:
    """Return flag -> (value, where it comes from), with masked secrets and without replaced flags."""
    flags = [flag for flag in HONOURED_FLAGS if flag.section != "speculative" or flag.name == "speculative_config"]
    values = {flag.name: (_value(flag, args), _origin(flag, args)) for flag in flags}
    replaced = {other for name, others in REPLACED_BY.items() if values[name][0] not in ("", None) for other in others}
    return {name: entry for name, entry in values.items() if name not in replaced}


def _value(flag: Flag, args: ServeArgs) -> Any:
    parts = {
        "engine": args.engine,
        "gpu": args.engine.gpu,
        "cache": args.engine.cache,
        "scheduler": args.engine.scheduler,
        "server": args.server,
    }
    if flag.name == "speculative_config":
        return args.engine.speculative.to_mapping()
    if flag.name == "quantization":
        return args.engine.quantization.to_value()
    if flag.section == CLUSTER:
        return args.cluster.shown()[flag.field]
    value = getattr(parts[flag.section], flag.field or flag.name)
    value = list(value) if isinstance(value, tuple) else value
    return [MASK] * len(value) if flag.is_secret else value


def _origin(flag: Flag, args: ServeArgs) -> str:
    names = [flag.name, *(SEPARATE_SPECULATION_FLAGS if flag.name == "speculative_config" else ())]
    for name in names:
        origin = args.provenance.get(name)
        if origin in _COMPLETE_ORIGINS:
            return str(origin)
        if origin is not None:
            return f"{origin}:{name}"
    return "default"


def _as_json(values: dict[str, tuple[Any, str]], notes: tuple[str, ...], device: dict[str, Any]) -> str:
    shown = {name: {"value": value, "from": origin} for name, (value, origin) in values.items()}
    return json.dumps({"values": shown, "notes": list(notes), "device": device}, indent=2)


def _as_yaml(values: dict[str, tuple[Any, str]], notes: tuple[str, ...], device: dict[str, Any]) -> str:
    """Return one line per value; masked values are comments, so that --config does not read the mask as a key."""
    lines = []
    for name, (value, origin) in values.items():
        flow = yaml.safe_dump({name: value}, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
        is_masked = isinstance(value, (list, str)) and MASK in value
        lines.append(f"{'# ' if is_masked else ''}{flow.strip()[1:-1]}  # {origin}")
    return "\n".join([*lines, *(f"# note: {note}" for note in notes), f"# device: {device_line(device)}"])
