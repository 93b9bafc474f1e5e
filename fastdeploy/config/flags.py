# SPDX-License-Identifier: Apache-2.0
"""Every flag, in one table: honoured, refused by name, or accepted without effect.

The same names in snake_case are the keys of a YAML file and the keyword arguments of `LLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

NOT_YET = "is not available yet"


class FlagClass(Enum):
    """What becomes of a flag."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "accepted without effect"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: snake_case; on the command line `--name-with-hyphens`.
        kind: type of its value: str, int, float, bool, json, list, or bytes (an integer with k, M, G or Ki, Mi, Gi).
        help: what it does.
        flag_class: what becomes of it.
        reason: why it is refused or has no effect.
        neutral: values that ask for nothing and so are accepted from a refused flag.
        is_server: of the HTTP server; otherwise of the engine, and so of `LLM` too.
        short: further spelling on the command line.
    """

    name: str
    kind: str = "str"
    help: str = ""
    flag_class: FlagClass = FlagClass.HONOURED
    reason: str = ""
    neutral: tuple[Any, ...] = ()
    is_server: bool = False
    short: str = ""

    @property
    def option(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")


def _server(name: str, kind: str, help: str) -> Flag:
    return Flag(name, kind, help, is_server=True)


def _refused(name: str, kind: str = "str", reason: str = NOT_YET, neutral: tuple[Any, ...] = ()) -> Flag:
    return Flag(name, kind, flag_class=FlagClass.REFUSED, reason=reason, neutral=neutral)


def _no_effect(name: str, kind: str, reason: str, short: str = "") -> Flag:
    return Flag(name, kind, flag_class=FlagClass.NO_EFFECT, reason=reason, short=short)


_SPLITWISE = "belongs to prefill/decode separation, which is not available yet"
_SCHEDULER = "belongs to the Redis schedulers, which are not available yet"
_PORTS = "the parts of this server talk over local sockets"

FLAGS: tuple[Flag, ...] = (
    # engine
    Flag("model", "str", "local directory, hub name, or `demo` for the demonstration model"),
    Flag("tokenizer", "str", "directory of the tokenizer (default: the model's)"),
    Flag("dtype", "str", "auto, bfloat16 or float32 (default: auto)"),
    Flag("device", "str", "cpu or auto (default: auto)"),
    Flag("load_choices", "str", "default_v1, or dummy for random weights (default: default_v1)"),
    Flag("max_model_len", "int", "most tokens of prompt and output together (default: 2048, capped by the model)"),
    Flag("max_num_seqs", "int", "most requests in one step (default: 64)"),
    Flag("max_num_batched_tokens", "int", "most rows in one step (default: 2048)"),
    Flag("long_prefill_token_threshold", "int", "most prompt rows of one request in a step; 0: no limit (default: 0)"),
    Flag("block_size", "int", "tokens per KV block, a multiple of 16 (default: 64)"),
    Flag("num_gpu_blocks_override", "int", "number of KV blocks (default: from kv_cache_memory)"),
    Flag("kv_cache_memory", "bytes", "bytes of the KV cache, such as 512Mi (default: from the machine's memory)"),
    Flag("enable_prefix_caching", "bool", "share KV blocks of equal prefixes (default: on)"),
    Flag("enable_chunked_prefill", "bool", "spread long prompts over steps (default: on)"),
    Flag("seed", "int", "seed from which requests without one draw theirs (default: random)"),
    Flag("speculative_config", "json", 'speculation, such as \'{"method": "ngram", "num_speculative_tokens": 5}\''),
    Flag("logprobs_mode", "str", "raw_logprobs or processed_logprobs (default: raw_logprobs)"),
    Flag(
        "reasoning_parser", "str", "format of the model's reasoning: qwen3, deepseek_r1, ernie-x1, ... (default: none)"
    ),
    Flag(
        "guided_decoding_backend", "str", "auto or llguidance allow structured output, off refuses it (default: auto)"
    ),
    Flag("generation_config", "str", "auto reads generation_config.json, none ignores it (default: auto)"),
    # speculation in the older spelling of separate arguments
    Flag("speculative_model", "str", "older spelling: [ngram] is method ngram"),
    Flag("num_speculative_tokens", "int", "older spelling of the key of speculative_config"),
    Flag("ngram_prompt_lookup_max", "int", "older spelling of prompt_lookup_max"),
    Flag("ngram_prompt_lookup_min", "int", "older spelling of prompt_lookup_min"),
    Flag("speculative_draft_tensor_parallel_size", "int", "older spelling of draft_tensor_parallel_size"),
    # server
    _server("served_model_name", "str", "name by which clients ask for the model (default: the model as given)"),
    _server("host", "str", "address to listen on (default: 0.0.0.0)"),
    _server("port", "int", "port to listen on (default: 8000)"),
    _server("metrics_port", "int", "a further port for /metrics (default: none)"),
    _server("workers", "int", "API processes (default: 1)"),
    _server("api_key", "list", "a key that clients must send; may be given several times"),
    _server("max_concurrency", "int", "requests in the server at once (default: 512)"),
    _server("max_waiting_time", "float", "seconds to wait for a turn before 429; -1 for no limit (default: 0)"),
    _server(
        "timeout_graceful_shutdown", "float", "seconds for running requests after SIGTERM; 0: no limit (default: 0)"
    ),
    _server("max_logprobs", "int", "most alternatives a request may ask for (default: 20)"),
    _server("chat_template", "str", "a template, or its file, that replaces the tokenizer's"),
    _server("tool_call_parser", "str", "format of the model's tool calls: hermes, llama3_json, ... (default: none)"),
    _server("root_path", "str", "path under which a proxy serves this server"),
    _server("ssl_keyfile", "str", "private key for TLS"),
    _server("ssl_certfile", "str", "certificate for TLS"),
    # accepted without effect
    _no_effect("tensor_parallel_size", "int", "on the CPU one rank uses all cores", short="-tp"),
    _no_effect("gpu_memory_utilization", "float", "speaks of device memory; on the CPU use kv_cache_memory"),
    _no_effect("kv_cache_ratio", "float", "KV blocks are not divided between prefill and decode"),
    _no_effect("enable_logprob", "bool", "log-probabilities are always there"),
    _no_effect("trust_remote_code", "bool", "no code is loaded from checkpoints"),
    _no_effect("use_v2_block_manager", "bool", "there is one block manager"),
    _no_effect("engine_worker_queue_port", "str", _PORTS),
    _no_effect("cache_queue_port", "str", _PORTS),
    _no_effect("pd_comm_port", "str", _PORTS),
    _no_effect("compilation_config", "json", "there is no graph compiler to configure"),
    _no_effect("async_scheduling", "bool", "the step loop decides this itself"),
    _no_effect("distributed_executor_backend", "str", "one process computes the model"),
    _no_effect("enforce_eager", "bool", "the CPU runs no captured graphs"),
    _no_effect("disable_padded_drafter_batch", "bool", "batches are never padded"),
    # refused by name
    _refused("revision", neutral=("master", "main", "default")),
    _refused("data_parallel_size", "int", neutral=(1,)),
    _refused("enable_expert_parallel", "bool", neutral=(False,)),
    _refused("quantization"),
    _refused("swap_space", "float", neutral=(0.0,)),
    _refused("graph_optimization_config", "json"),
    _refused("splitwise_role", reason=_SPLITWISE, neutral=("mixed",)),
    _refused("rdma_comm_ports", reason=_SPLITWISE),
    _refused("cache_transfer_protocol", reason=_SPLITWISE),
    _refused("scheduler_name", reason=_SCHEDULER, neutral=("local",)),
    _refused("scheduler_host", reason=_SCHEDULER),
    _refused("scheduler_port", "int", _SCHEDULER),
    _refused("scheduler_db", "int", _SCHEDULER),
    _refused("scheduler_password", reason=_SCHEDULER),
    _refused("scheduler_topic", reason=_SCHEDULER),
    _refused("scheduler_ttl", "int", _SCHEDULER),
    _refused("scheduler_max_size", "int", _SCHEDULER, neutral=(-1,)),
    _refused("scheduler_min_load_score", "float", _SCHEDULER),
    _refused("scheduler_load_shards_num", "int", _SCHEDULER),
    _refused("scheduler_sync_period", "int", _SCHEDULER),
    _refused("scheduler_expire_period", "int", _SCHEDULER),
    _refused("scheduler_release_load_expire_period", "int", _SCHEDULER),
    _refused("scheduler_reader_parallel", "int", _SCHEDULER),
    _refused("scheduler_writer_parallel", "int", _SCHEDULER),
    _refused("scheduler_reader_batch_size", "int", _SCHEDULER),
)
FLAG_BY_NAME = {flag.name: flag for flag in FLAGS}
