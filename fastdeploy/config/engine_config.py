# SPDX-License-Identifier: Apache-2.0
"""Configuration of the engine's parts, checked once and frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdeploy.config.model_config import KV_CACHE_DTYPES
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.reasoning import REASONING_FORMATS

DTYPES = ("auto", "bfloat16", "float32")
LOAD_CHOICES = ("default_v1", "dummy")
GUIDED_DECODING_BACKENDS = ("auto", "llguidance", "off")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
BLOCK_SIZE_MULTIPLE = 16


@dataclass(frozen=True)
class CacheConfig:
    """KV blocks of `block_size` tokens; their number is given, or follows from `kv_cache_memory` or the machine.

    Keys and values have the type of the rows (dtype `auto`), or are `int8` with a scale per token and head.
    """

    block_size: int = 64
    dtype: str = "auto"
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < BLOCK_SIZE_MULTIPLE or self.block_size % BLOCK_SIZE_MULTIPLE:
            raise ConfigError("block_size", f"expected a multiple of {BLOCK_SIZE_MULTIPLE}, got {self.block_size}")
        _check_choice("kv_cache_dtype", self.dtype, KV_CACHE_DTYPES)
        _check_positive("num_gpu_blocks_override", self.num_blocks)
        _check_positive("kv_cache_memory", self.kv_cache_memory)


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step may hold, and how many requests may wait.

    Attributes:
        max_num_seqs: most requests that run at a time.
        max_num_batched_tokens: most rows of a step.
        enable_chunked_prefill: cut prompts that do not fit the step; else they wait for one that holds them whole.
        long_prefill_token_threshold: most prompt rows of one request in a step; 0 sets no such limit.
        max_waiting_requests: requests beyond this are turned away; None keeps all.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_waiting_requests: int | None = None

    def __post_init__(self) -> None:
        _check_positive("max_num_seqs", self.max_num_seqs)
        _check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_positive("max_waiting_requests", self.max_waiting_requests)
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                "long_prefill_token_threshold", f"expected at least 0, got {self.long_prefill_token_threshold}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from.

    Attributes:
        model: local directory, `demo`, or a hub name.
        tokenizer: directory of the tokenizer; empty takes the model's.
        revision: branch, tag or commit of a model on a hub; empty for the hub's default branch.
        max_model_len: most tokens of prompt and output together, capped by the model.
        seed: the server's seed, from which requests without one draw theirs; None draws at random.
        logprobs_mode: raw_logprobs (before any processing) or processed_logprobs.
        reasoning_parser: name of the model's reasoning format (core.reasoning); empty: the model does not reason.
        guided_decoding_backend: auto and llguidance serve structured output, off refuses it.
        generation_config: auto reads end tokens and sampling defaults from generation_config.json; none ignores it.
    """

    model: str
    tokenizer: str = ""
    revision: str = ""
    dtype: str = "auto"
    device: str = "cpu"
    load_choices: str = "default_v1"
    max_model_len: int = 2048
    seed: int | None = None
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    reasoning_parser: str = ""
    guided_decoding_backend: str = "auto"
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        if self.device != "cpu":
            raise ConfigError("device", f"{self.device!r} is not available yet; expected cpu or auto")
        _check_choice("load_choices", self.load_choices, LOAD_CHOICES)
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _check_choice("generation_config", self.generation_config, ("auto", "none"))
        _check_choice("guided_decoding_backend", self.guided_decoding_backend, GUIDED_DECODING_BACKENDS)
        if self.reasoning_parser:
            _check_choice("reasoning_parser", self.reasoning_parser, tuple(REASONING_FORMATS))
        _check_positive("max_model_len", self.max_model_len)
        if not self.scheduler.enable_chunked_prefill and self.scheduler.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"without chunked prefill it must reach max_model_len {self.max_model_len}, "
                f"got {self.scheduler.max_num_batched_tokens}",
            )
        if self.scheduler.max_num_batched_tokens <= self.speculative.num_speculative_tokens:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must exceed num_speculative_tokens {self.speculative.num_speculative_tokens}, "
                f"got {self.scheduler.max_num_batched_tokens}",
            )


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(name, f"expected an integer of at least 1, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(name, f"expected one of {', '.join(choices)}, got {value!r}")
