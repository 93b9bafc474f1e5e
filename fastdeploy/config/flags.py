# SPDX-License-Identifier: Apache-2.0
"""All flags. The same names in snake_case are the keys of a YAML file and the keyword arguments of `LLM`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.flag import CLUSTER, SERVER, Flag, FlagClass, flags_of
from fastdeploy.config.foreign_flags import read_foreign_flags
from fastdeploy.config.gpu_config import GpuConfig
from fastdeploy.config.server_config import ServerConfig

__all__ = ["FLAGS", "FLAG_BY_NAME", "Flag", "FlagClass"]

_QUANTIZATION_HELP = (
    "none, wint8, wint4, wint4_min (integer weights), w8a8, w4a8 or w4a8_min (integer activations as well), quantized "
    'at load; or a format per part (attention, mlp, experts, head), such as \'{"attention": "wint8", "mlp": "wint4"}\''
    "; or the name of the checkpoint's own codes: gguf, awq, gptq, compressed-tensors or fp8 "
    "(default: the codes that the checkpoint has, or what config.json asks for, else none)"
)
_SPECULATIVE_HELP = 'such as \'{"method": "ngram", "num_speculative_tokens": 5}\' (default: no speculation)'
_GRAPHS_HELP = (
    'CUDA graphs, such as \'{{"use_cudagraph": true, "cudagraph_capture_sizes": [1, 8, 64]}}\'; {}other keys of '
    "{} have no effect, as all of them on the CPU"
)
_OLDER_SPELLINGS = {  # flag -> kind, key of speculative_config
    "speculative_model": ("str", "model"),
    "spec_method": ("str", "method"),
    "num_speculative_tokens": ("int", "num_speculative_tokens"),
    "ngram_prompt_lookup_max": ("int", "prompt_lookup_max"),
    "ngram_prompt_lookup_min": ("int", "prompt_lookup_min"),
    "speculative_draft_tensor_parallel_size": ("int", "draft_tensor_parallel_size"),
}


def _flags_of(config: type, section: str) -> Iterator[Flag]:
    """Yield the flags that set a configuration's fields."""
    parameters = inspect.signature(config).parameters
    for field, flag in flags_of(config).items():
        if flag.help:
            help = f"{flag.help}{default_text(parameters[field].default)}"
            yield replace(flag, name=flag.name or field, help=help, section=section, field=field)


def default_text(default: Any) -> str:
    """Return the end of a field's help that shows its default; None, which the help itself explains, is not shown."""
    if default is None or default is inspect.Parameter.empty or default == "":
        return ""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    if isinstance(default, bool):
        shown = "on" if default else "off"
    elif isinstance(default, tuple):
        shown = ", ".join(default) or "none"
    return f" (default: {shown})"


def _older_spelling(name: str, kind: str, key: str) -> Flag:
    help = f"older spelling of the key {key} of speculative_config"
    return Flag(kind, name=name, help=help, section="speculative", field=key)


HONOURED_FLAGS: tuple[Flag, ...] = (
    *_flags_of(EngineConfig, "engine"),
    Flag("str_or_json", name="quantization", short="-q", help=_QUANTIZATION_HELP, field="quantization"),
    *_flags_of(GpuConfig, "gpu"),
    Flag(
        "json",
        name="graph_optimization_config",
        help=_GRAPHS_HELP.format("", "FastDeploy"),
        section="gpu",
        field="graph_optimization_config",
    ),
    Flag(
        "json",
        name="compilation_config",
        short="-cc",
        help=_GRAPHS_HELP.format("`cudagraph_mode` NONE captures none; ", "vLLM"),
        section="gpu",
        field="compilation_config",
    ),
    *_flags_of(SchedulerConfig, "scheduler"),
    *_flags_of(CacheConfig, "cache"),
    Flag("json", name="speculative_config", short="-sc", help=_SPECULATIVE_HELP, section="speculative"),
    *(_older_spelling(name, kind, key) for name, (kind, key) in _OLDER_SPELLINGS.items()),
    *_flags_of(ServerConfig, SERVER),
    *_flags_of(ClusterConfig, CLUSTER),
)
FLAGS = (*HONOURED_FLAGS, *read_foreign_flags())
FLAG_BY_NAME = {flag.name: flag for flag in FLAGS}
