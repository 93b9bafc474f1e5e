# SPDX-License-Identifier: Apache-2.0
"""Configuration of the engine's parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastdeploy.config.context_limit import ContextLength, ContextLimit
from fastdeploy.config.drafting_checkpoint import refuse_head_as_model
from fastdeploy.config.flag import check_fields, choice, integer, integer_or_auto, mapping, number, switch, text
from fastdeploy.config.gpu_config import GpuConfig
from fastdeploy.config.model_config import KV_CACHE_DTYPES, ModelConfig
from fastdeploy.config.overrides import CheckpointOverrides
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import AnySpeculativeConfig, NaiveConfig
from fastdeploy.core.errors import ConfigError, ErrorCollector
from fastdeploy.core.guided_decoding import BACKEND_NOTE, OTHER_BACKENDS
from fastdeploy.core.reasoning import REASONING_FORMATS
from fastdeploy.core.sampling_params import MAX_LOGPROB_ENTRIES, MAX_LOGPROBS

BLOCK_SIZE_MULTIPLE = 16
MAX_COUNT = 2**31 - 1
_DTYPE_HELP = "auto, bfloat16 or float32"
_KV_CACHE_MEMORY_HELP = (
    "memory for KV blocks, such as 512Mi, taken at the start (default on the CPU: what --max-num-seqs full contexts "
    "need, at most half of what is free, taken as it is used; on a GPU: --gpu-memory-utilization)"
)
_HALF = dict.fromkeys(("half", "float16"), "take bfloat16 or float32")
_HF_OVERRIDES = mapping(
    help="values instead of those of config.json, for RoPE and max_position_embeddings only, such as "
    '\'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}\'',
)
_GENERATION_OVERRIDES = mapping(
    help="defaults of sampling parameters instead of those of generation_config.json, whether that is read or not, "
    'such as \'{"temperature": 0.6, "max_new_tokens": 2048}\'; what a request gives comes first',
)
_SEEDS = (-(2**63), 2**64 - 1)


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache. Its size is `num_blocks`, else `kv_cache_memory`, else what the machine's memory allows."""

    block_size: Annotated[int, integer(BLOCK_SIZE_MULTIPLE, 2**16, help="tokens per KV block, a multiple of 16")] = 64
    num_blocks: Annotated[
        int | None,
        integer(1, MAX_COUNT, name="num_gpu_blocks_override", help="number of KV blocks (default: by their memory)"),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        integer(1, 2**60, kind="bytes", help=_KV_CACHE_MEMORY_HELP),
    ] = None
    dtype: Annotated[
        str, choice(*KV_CACHE_DTYPES, name="kv_cache_dtype", help="auto, or int8 with a scale per token and head")
    ] = "auto"
    enable_prefix_caching: Annotated[bool, switch(help="share KV blocks of equal prefixes")] = True
    kv_transfer_memory: Annotated[
        int | None,
        integer(
            1,
            2**60,
            kind="bytes",
            help="shared memory for KV blocks that other nodes fetch, with splitwise (default: a quarter of the KV "
            "cache, at least two full contexts, at most half of what the cache leaves)",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block_size % BLOCK_SIZE_MULTIPLE:
            raise ConfigError("block_size", f"expected a multiple of {BLOCK_SIZE_MULTIPLE}, got {self.block_size}")

    @property
    def has_given_size(self) -> bool:
        """Whether a flag says how large the cache is."""
        return self.num_blocks is not None or self.kv_cache_memory is not None


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step, of the queue and of one client; None is no limit."""

    max_num_seqs: Annotated[int, integer(1, 2**16, help="maximum number of requests in a step")] = 64
    max_num_batched_tokens: Annotated[
        int, integer(1, 2**20, kind="tokens", help="maximum number of tokens in a step")
    ] = 2048
    long_prefill_token_threshold: Annotated[
        int, integer(0, MAX_COUNT, help="maximum size of a prefill chunk; 0: no limit")
    ] = 0
    enable_chunked_prefill: Annotated[bool, switch(help="prefill long prompts in chunks over several steps")] = True
    max_waiting_requests: Annotated[
        int | None,
        integer(1, MAX_COUNT, help="maximum number of waiting requests; more are refused with 429 (default: no limit)"),
    ] = None
    max_client_share: Annotated[
        float | None,
        number(
            0.01,
            1,
            help="largest share of one client in requests and KV blocks (default: 0.875 with several API keys, else 1)",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is built from.

    Attributes:
        is_clustered: whether the engine's node works with others; follows from `--scheduler-name`.
        hands_over: whether it also exchanges KV blocks with them.
        model_folder: the folder of the model, if the process that starts the engine has found it.
    """

    model: Annotated[
        str, text(short="-m", help="local directory, GGUF file, hub name, `smollm2` (downloaded once) or `demo`")
    ]
    tokenizer: Annotated[str, text(help="directory of the tokenizer (default: the model's)")] = ""
    revision: Annotated[str, text(help="branch, tag or commit of a hub's model (default: the hub's main branch)")] = ""
    gguf_file: Annotated[
        str, text(help="GGUF file of a directory or of a hub's model (default: the only one of a directory)")
    ] = ""
    dtype: Annotated[
        str, choice("auto", "bfloat16", "float32", aliases={"float": "float32"}, refused_values=_HALF, help=_DTYPE_HELP)
    ] = "auto"
    device: Annotated[
        str,
        text(
            aliases={"cuda": "gpu"},
            help="cpu, gpu, gpu:1 for the second GPU, or auto: a GPU if there is one with its operators",
        ),
    ] = "cpu"
    load_choices: Annotated[
        str, choice("default_v1", "dummy", aliases={"default": "default_v1"}, help="dummy loads random weights")
    ] = "default_v1"
    max_model_len: Annotated[
        ContextLength,
        integer_or_auto(
            1,
            MAX_COUNT,
            kind="tokens_or_auto",
            help="maximum tokens of prompt and output, such as 4096, 8k (8,000) or 8K (8,192); auto: the model's "
            "limit, or what the KV cache, a draft model or, without chunked prefill, a step holds",
        ),
    ] = "auto"
    seed: Annotated[int | None, integer(*_SEEDS, help="seed of requests that bring none (default: random)")] = None
    logprobs_mode: Annotated[
        str, choice("raw_logprobs", "processed_logprobs", help="raw_logprobs or processed_logprobs")
    ] = "raw_logprobs"
    max_logprobs: Annotated[
        int, integer(-1, MAX_COUNT, help="maximum number of alternatives per token; -1: the whole vocabulary")
    ] = MAX_LOGPROBS
    max_logprob_entries: Annotated[
        int, integer(1, 2**23, help="maximum number of log-probabilities in one answer: tokens times alternatives")
    ] = MAX_LOGPROB_ENTRIES
    reasoning_parser: Annotated[
        str,
        choice("", *REASONING_FORMATS, help="format of reasoning: qwen3, deepseek_r1, ... (default: none)"),
    ] = ""
    guided_decoding_backend: Annotated[
        str,
        choice(
            "auto",
            "llguidance",
            "off",
            aliases={"guidance": "llguidance", **dict.fromkeys(OTHER_BACKENDS, "llguidance")},
            noted_values=dict.fromkeys(OTHER_BACKENDS, BACKEND_NOTE),
            help="auto or llguidance for structured output, which vLLM's other backends stand for; off to refuse it",
        ),
    ] = "auto"
    generation_config: Annotated[
        str, choice("auto", "none", aliases={"vllm": "none"}, help="none ignores generation_config.json")
    ] = "auto"
    override_generation_config: Annotated[Mapping[str, Any] | None, _GENERATION_OVERRIDES] = None
    hf_overrides: Annotated[Mapping[str, Any] | None, _HF_OVERRIDES] = None
    disable_log_stats: Annotated[
        bool, switch(help="log no line of throughput, requests and caches every 10 s while requests run")
    ] = False
    is_clustered: bool = False
    hands_over: bool = False
    model_folder: str = ""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: AnySpeculativeConfig = field(default_factory=NaiveConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        problems = ErrorCollector()
        with problems.collecting():
            _ = self.overrides  # checks them
        if not re.fullmatch(r"cpu|gpu(:\d+)?", self.device):
            problems.add("device", f"expected auto, cpu, gpu, or gpu:1 for the second GPU, got {self.device!r}")
        elif self.device != "cpu":
            with problems.collecting():
                self.gpu.check_graphs()
        num_tokens, num_drafts = self.scheduler.max_num_batched_tokens, self.speculative.num_speculative_tokens
        least = self.max_model_len if isinstance(self.max_model_len, int) else 0
        if num_tokens <= num_drafts:
            text = f"expected more than num_speculative_tokens {num_drafts}, got {num_tokens}"
            problems.add("max_num_batched_tokens", text)
        elif not self.scheduler.enable_chunked_prefill and num_tokens < least:  # a step holds the whole context
            text = f"expected at least max_model_len {least} without chunked prefill, got {num_tokens}"
            problems.add("max_num_batched_tokens", text)
        problems.raise_all()

    def read_model(self, folder: str, *, reads_weights: bool = True) -> ModelConfig:
        """Read the checkpoint's JSON files as the flags say; see `ModelConfig.from_pretrained`.

        Raises:
            ConfigError: it is a trained head, or `from_pretrained` refuses it.
        """
        refuse_head_as_model(Path(folder))
        return ModelConfig.from_pretrained(
            folder,
            dtype=self.dtype,
            generation_config=self.generation_config,
            kv_cache_dtype=self.cache.dtype if reads_weights else "auto",  # only then the dtype is known
            reads_weights=reads_weights,
            overrides=self.overrides,
        )

    def check_model(self, folder: str | Path) -> None:
        """Compare the flags with the JSON files of the checkpoint in `folder`.

        Raises:
            ConfigError: the model is not supported, or it does not allow flags, each of which is named.
        """
        problems, model = ErrorCollector(), self.read_model(str(folder), reads_weights=False)
        with problems.collecting():
            self.choose_context(model)
        with problems.collecting():
            model.weight_formats(self.quantization)
        problems.raise_all()

    @property
    def overrides(self) -> CheckpointOverrides:
        """Return the values that replace those of the checkpoint's files."""
        return CheckpointOverrides(self.hf_overrides or {}, self.override_generation_config or {})

    def choose_context(self, model: ModelConfig) -> ContextLimit:
        """Return the context, before what a draft model and the KV cache hold.

        Raises:
            ConfigError: `max_model_len` is more than the model supports; names both numbers.
        """
        if self.max_model_len != "auto":
            return ContextLimit(model.choose_max_model_len(self.max_model_len), "--max-model-len")
        context, num_tokens = model.default_context, self.scheduler.max_num_batched_tokens
        if self.scheduler.enable_chunked_prefill or context.num_tokens <= num_tokens:
            return context
        return ContextLimit(num_tokens, "--max-num-batched-tokens, without chunked prefill")
