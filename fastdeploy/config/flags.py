# SPDX-License-Identifier: Apache-2.0
"""Every flag, in one table: honoured here; refused by name, or accepted without effect, in `flags_elsewhere`.

The same names in snake_case are the keys of a YAML file and the keyword arguments of `LLM`.
"""

from __future__ import annotations

from fastdeploy.config.flag import SERVER, Flag, FlagClass
from fastdeploy.config.flags_elsewhere import NO_EFFECT_FLAGS, REFUSED_FLAGS

__all__ = ["FLAGS", "FLAG_BY_NAME", "Flag", "FlagClass"]


def _engine(name: str, kind: str, help: str) -> Flag:
    return Flag(name, kind, help)


def _cache(name: str, kind: str, help: str, field: str = "") -> Flag:
    return Flag(name, kind, help, section="cache", field=field)


def _scheduler(name: str, kind: str, help: str) -> Flag:
    return Flag(name, kind, help, section="scheduler")


def _speculative(name: str, kind: str, help: str) -> Flag:
    return Flag(name, kind, help, section="speculative")


def _server(name: str, kind: str, help: str, field: str = "", is_secret: bool = False) -> Flag:
    return Flag(name, kind, help, section=SERVER, field=field, is_secret=is_secret)


HONOURED_FLAGS: tuple[Flag, ...] = (
    _engine("model", "str", "local directory, hub name, or `demo` for the demonstration model"),
    _engine("tokenizer", "str", "directory of the tokenizer (default: the model's)"),
    _engine("revision", "str", "branch, tag or commit of a model on a hub (default: the hub's main branch)"),
    _engine("dtype", "str", "auto, bfloat16 or float32 (default: auto)"),
    _engine("device", "str", "cpu or auto (default: auto)"),
    _engine("load_choices", "str", "default_v1, or dummy for random weights (default: default_v1)"),
    _engine("max_model_len", "int", "most tokens of prompt and output together (default: 2048, capped by the model)"),
    _scheduler("max_num_seqs", "int", "most requests in one step (default: 64)"),
    _scheduler("max_num_batched_tokens", "int", "most rows in one step (default: 2048)"),
    _scheduler(
        "long_prefill_token_threshold", "int", "most prompt rows of one request in a step; 0: no limit (default: 0)"
    ),
    _scheduler("enable_chunked_prefill", "bool", "spread long prompts over steps (default: on)"),
    _cache("block_size", "int", "tokens per KV block, a multiple of 16 (default: 64)"),
    _cache("num_gpu_blocks_override", "int", "number of KV blocks (default: from kv_cache_memory)", "num_blocks"),
    _cache("kv_cache_memory", "bytes", "bytes of the KV cache, such as 512Mi (default: from the machine's memory)"),
    _cache(
        "kv_cache_dtype", "str", "auto (that of the rows), or int8, a scale per token and head (default: auto)", "dtype"
    ),
    _cache("enable_prefix_caching", "bool", "share KV blocks of equal prefixes (default: on)"),
    _engine("seed", "int", "seed from which requests without one draw theirs (default: random)"),
    _speculative("speculative_config", "json", 'such as \'{"method": "ngram", "num_speculative_tokens": 5}\''),
    _engine("logprobs_mode", "str", "raw_logprobs or processed_logprobs (default: raw_logprobs)"),
    _engine(
        "reasoning_parser", "str", "format of the model's reasoning: qwen3, deepseek_r1, ernie-x1, ... (default: none)"
    ),
    _engine(
        "guided_decoding_backend", "str", "auto or llguidance allow structured output, off refuses it (default: auto)"
    ),
    _engine(
        "quantization",
        "str_or_json",
        "none, wint8, wint4 (integer weights), w8a8 or w4a8 (integer inputs as well), made at load; or one per part, "
        'such as \'{"attention": "wint8", "mlp": "wint4", "head": "none"}\' (default: none)',
    ),
    _engine("generation_config", "str", "auto reads generation_config.json, none ignores it (default: auto)"),
    # speculation in the older spelling of separate arguments
    _speculative("speculative_model", "str", "older spelling: [ngram] is method ngram"),
    _speculative("num_speculative_tokens", "int", "older spelling of the key of speculative_config"),
    _speculative("ngram_prompt_lookup_max", "int", "older spelling of prompt_lookup_max"),
    _speculative("ngram_prompt_lookup_min", "int", "older spelling of prompt_lookup_min"),
    _speculative("speculative_draft_tensor_parallel_size", "int", "older spelling of draft_tensor_parallel_size"),
    # server
    _server("served_model_name", "str", "name by which clients ask for the model (default: the model as given)"),
    _server("host", "str", "address to listen on (default: 0.0.0.0)"),
    _server("port", "int", "port to listen on; 0 takes a free one (default: 8000)"),
    _server("metrics_port", "int", "a further port for /metrics (default: none)"),
    _server("workers", "int", "API processes (default: 1)"),
    _server("api_key", "list", "a key that clients must send; may be given several times", "api_keys", is_secret=True),
    _server("max_concurrency", "int", "requests in the server at once (default: 512)"),
    _server("max_waiting_time", "float", "seconds to wait for a turn before 429; -1 for no limit (default: 0)"),
    _server(
        "timeout_graceful_shutdown", "float", "seconds for running requests after SIGTERM; 0: no limit (default: 0)"
    ),
    _server("max_logprobs", "int", "most alternatives a request may ask for (default: 20)"),
    _server("chat_template", "str", "a template, or its file, that replaces the tokenizer's"),
    _server("tool_call_parser", "str", "format of the model's tool calls: hermes, llama3_json, ... (default: none)"),
    _server("disable_log_requests", "bool", "write no log line when a request ends (default: off)"),
    _server("uvicorn_log_level", "str", "critical, error, warning, info, debug or trace (default: warning)"),
    _server("allowed_origins", "list", "CORS: origins that browsers may call from, or * (default: none)"),
    _server("allowed_methods", "list", "CORS: methods they may use (default: *)"),
    _server("allowed_headers", "list", "CORS: headers they may send (default: *)"),
    _server("allow_credentials", "bool", "CORS: they may send cookies (default: off)"),
    _server("root_path", "str", "path under which a proxy serves this server"),
    _server("ssl_keyfile", "str", "private key for TLS"),
    _server("ssl_certfile", "str", "certificate for TLS"),
)
FLAGS = (*HONOURED_FLAGS, *NO_EFFECT_FLAGS, *REFUSED_FLAGS)
FLAG_BY_NAME = {flag.name: flag for flag in FLAGS}
