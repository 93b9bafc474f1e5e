# SPDX-License-Identifier: Apache-2.0
"""Configuration of the engine's parts."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field

from fastdeploy.config.fields import check_fields, choice, integer, switch, text
from fastdeploy.config.model_config import KV_CACHE_DTYPES
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.reasoning import REASONING_FORMATS

BLOCK_SIZE_MULTIPLE = 16


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache. Without `num_blocks`, `kv_cache_memory` gives its size; without both, the machine's memory does."""

    block_size: int = integer(64, BLOCK_SIZE_MULTIPLE, help="tokens per KV block, a multiple of 16")
    num_blocks: int | None = integer(
        None, 1, name="num_gpu_blocks_override", help="number of KV blocks (default: from kv_cache_memory)"
    )
    kv_cache_memory: int | None = integer(
        None, 1, kind="bytes", help="bytes of the KV cache, such as 512Mi (default: from the machine's memory)"
    )
    dtype: str = choice(
        "auto",
        KV_CACHE_DTYPES,
        name="kv_cache_dtype",
        help="auto (the model's dtype), or int8 with a scale per token and head",
    )
    enable_prefix_caching: bool = switch(True, help="share KV blocks of equal prefixes")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block_size % BLOCK_SIZE_MULTIPLE:
            raise ConfigError("block_size", f"expected a multiple of {BLOCK_SIZE_MULTIPLE}, got {self.block_size}")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of the queue; `max_waiting_requests` None is no limit."""

    max_num_seqs: int = integer(64, 1, help="maximum number of requests in a step")
    max_num_batched_tokens: int = integer(2048, 1, help="maximum number of tokens in a step")
    long_prefill_token_threshold: int = integer(
        0, 0, help="maximum number of prompt tokens of one request in a step; 0: no limit"
    )
    enable_chunked_prefill: bool = switch(True, help="prefill long prompts in chunks over several steps")
    max_waiting_requests: int | None = integer(None, 1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is built from."""

    model: str = text(MISSING, help="local directory, hub name, or `demo` for the demonstration model")
    tokenizer: str = text(help="directory of the tokenizer (default: the model's)")
    revision: str = text(help="branch, tag or commit of a model on a hub (default: the hub's main branch)")
    dtype: str = choice("auto", ("auto", "bfloat16", "float32"), help="auto, bfloat16 or float32")
    device: str = text("cpu", help="cpu or auto")
    load_choices: str = choice("default_v1", ("default_v1", "dummy"), help="default_v1, or dummy for random weights")
    max_model_len: int = integer(
        2048, 1, help="maximum number of tokens of prompt and output together, capped by the model"
    )
    seed: int | None = integer(None, help="seed of requests that bring none (default: random)")
    logprobs_mode: str = choice(
        "raw_logprobs", ("raw_logprobs", "processed_logprobs"), help="raw_logprobs or processed_logprobs"
    )
    reasoning_parser: str = choice(
        "", REASONING_FORMATS, help="format of the model's reasoning: qwen3, deepseek_r1, ernie-x1, ... (default: none)"
    )
    guided_decoding_backend: str = choice(
        "auto", ("auto", "llguidance", "off"), help="auto or llguidance for structured output, off to refuse it"
    )
    generation_config: str = choice("auto", ("auto", "none"), help="auto reads generation_config.json, none ignores it")
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.device != "cpu":
            raise ConfigError("device", f"{self.device!r} is not available yet; expected cpu or auto")
        num_tokens, num_drafts = self.scheduler.max_num_batched_tokens, self.speculative.num_speculative_tokens
        if not self.scheduler.enable_chunked_prefill and num_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"expected at least max_model_len {self.max_model_len} without chunked prefill, got {num_tokens}",
            )
        if num_tokens <= num_drafts:
            raise ConfigError(
                "max_num_batched_tokens", f"expected more than num_speculative_tokens {num_drafts}, got {num_tokens}"
            )
