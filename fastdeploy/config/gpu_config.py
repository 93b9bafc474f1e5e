# SPDX-License-Identifier: Apache-2.0
"""How a GPU is used: its memory and its graphs. On the CPU none of it has an effect, which is said once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastdeploy.config.flag import check_fields, number, switch
from fastdeploy.core.errors import ConfigError, ErrorCollector, did_you_mean

MAX_CAPTURED_ROWS = 512
CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
HONOURED_KEYS = ("use_cudagraph", "cudagraph_capture_sizes", "cudagraph_mode")
KEYS_WITHOUT_EFFECT = {  # of the other servers
    "graph_optimization_config": (
        *("graph_opt_level", "sot_warmup_sizes", "cudagraph_num_of_warmups", "cudagraph_copy_inputs"),
        *("cudagraph_splitting_ops", "cudagraph_only_prefill", "cudagraph_capture_sizes_prefill", "full_cuda_graph"),
        *("max_capture_size", "max_capture_size_prefill", "max_capture_shape_prefill", "real_shape_to_captured_size"),
        *("real_bsz_to_captured_size", "use_unique_memory_pool", "draft_model_use_cudagraph"),
    ),
    "compilation_config": (
        *("level", "mode", "debug_dump_path", "cache_dir", "local_cache_dir", "compile_cache_save_format", "backend"),
        *("custom_ops", "splitting_ops", "compile_mm_encoder", "use_inductor", "use_inductor_graph_partition"),
        *("compile_sizes", "compile_ranges_split_points", "compile_ranges_endpoints", "inductor_compile_config"),
        *("inductor_passes", "pass_config", "dynamic_shapes_config", "max_cudagraph_capture_size"),
        *("max_capture_size", "cudagraph_num_of_warmups", "cudagraph_copy_inputs", "cudagraph_specialize_lora"),
        *("full_cuda_graph", "cudagraph_mm_encoder", "fast_moe_cold_start", "ir_enable_torch_wrap"),
    ),
}
_NO_GRAPHS = "there are no CUDA graphs and no graph compiler on the CPU"
_REASONS_ON_CPU = {
    "gpu_memory_utilization": "the CPU has no device memory; use --kv-cache-memory",
    "enforce_eager": _NO_GRAPHS,
    "graph_optimization_config": _NO_GRAPHS,
    "compilation_config": _NO_GRAPHS,
}


@dataclass(frozen=True)
class GpuConfig:
    """Memory and graphs of a GPU.

    Attributes:
        graph_optimization_config, compilation_config: FastDeploy's and vLLM's names for the same; HONOURED_KEYS count.
    """

    gpu_memory_utilization: Annotated[
        float, number(0.0, 1.0, help="share of a GPU's memory that weights, KV cache and steps may take; no CPU's")
    ] = 0.9
    enforce_eager: Annotated[bool, switch(help="capture no CUDA graphs; there are none on the CPU")] = False
    graph_optimization_config: Mapping[str, Any] = field(default_factory=dict)
    compilation_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    def check_graphs(self) -> None:
        """Check the keys of both mappings, for a GPU.

        Raises:
            ConfigError: a key is unknown, its value is not valid, or both mappings have different sizes.
        """
        problems = ErrorCollector()
        for name, mapping in self._mappings().items():
            for key, value in mapping.items():
                with problems.collecting():
                    _check_key(name, key, value)
        problems.raise_all()
        sizes = [mapping["cudagraph_capture_sizes"] for mapping in self._mappings().values() if _has_sizes(mapping)]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            raise ConfigError("compilation_config.cudagraph_capture_sizes", "contradicts graph_optimization_config")

    @property
    def captured_rows(self) -> tuple[int, ...] | None:
        """Return for which numbers of rows graphs are captured, ascending: none for (), the default for None."""
        mappings = self._mappings().values()
        is_off = any(
            mapping.get("use_cudagraph") is False or str(mapping.get("cudagraph_mode", "")).upper() == "NONE"
            for mapping in mappings
        )
        if self.enforce_eager or is_off:
            return ()
        for mapping in mappings:
            if _has_sizes(mapping):
                return tuple(sorted({size for size in mapping["cudagraph_capture_sizes"] if size <= MAX_CAPTURED_ROWS}))
        return None

    def notes(self, device: str, shown: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for each flag without effect, or with keys or sizes without effect.

        Args:
            shown: the flags of this configuration that were given -> how they were typed.
        """
        if device == "cpu":
            for name, reason in _REASONS_ON_CPU.items():
                value = getattr(self, name)
                if name in shown and value != getattr(_DEFAULT, name):
                    yield f"{shown[name]} {value} has no effect: {reason}"
            return
        for name, mapping in self._mappings().items():
            others = [key for key in mapping if key not in HONOURED_KEYS]
            if others:
                yield (
                    f"{shown.get(name, name)}: {', '.join(others)} {'has' if len(others) == 1 else 'have'} no effect: "
                    "operators are compiled at installation, and graphs are captured when they are first used"
                )
            large = [size for size in mapping.get("cudagraph_capture_sizes") or () if size > MAX_CAPTURED_ROWS]
            if large:
                yield f"{shown.get(name, name)}: steps of more than {MAX_CAPTURED_ROWS} rows are not captured"

    def _mappings(self) -> dict[str, Mapping[str, Any]]:
        return {name: getattr(self, name) for name in KEYS_WITHOUT_EFFECT}


_DEFAULT = GpuConfig()


def _has_sizes(mapping: Mapping[str, Any]) -> bool:
    return mapping.get("cudagraph_capture_sizes") is not None


def _check_key(name: str, key: str, value: Any) -> None:
    where, known = f"{name}.{key}", (*HONOURED_KEYS, *KEYS_WITHOUT_EFFECT[name])
    if key not in known:
        raise ConfigError(where, f"unknown key{did_you_mean(key, known)}")
    if key == "use_cudagraph" and not isinstance(value, bool):
        raise ConfigError(where, f"expected true or false, got {value!r}")
    if key == "cudagraph_mode" and value is not None and str(value).upper() not in CUDAGRAPH_MODES:
        raise ConfigError(where, f"expected one of {', '.join(CUDAGRAPH_MODES)}, got {value!r}")
    if key == "cudagraph_capture_sizes" and value is not None:
        is_list = isinstance(value, (list, tuple))
        if not is_list or not all(type(size) is int and size >= 1 for size in value):
            raise ConfigError(where, f"expected a list of positive integers, got {value!r}")
