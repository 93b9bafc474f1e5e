# SPDX-License-Identifier: Apache-2.0
"""Flags that FastDeploy 2.x and vLLM have and this version does not need, or does not have: each with its reason."""

from __future__ import annotations

from typing import Any

from fastdeploy.config.flag import SERVER, Flag, FlagClass

NOT_YET = "is not available yet"
_SPLITWISE = "belongs to prefill/decode separation, which is not available yet"
_SCHEDULER = "belongs to the Redis schedulers, which are not available yet"
_EXPERTS = "belongs to expert parallelism, which is not available yet"
_LORA = "LoRA adapters are not supported"
_TEXT_ONLY = "this server reads and writes text only"
_NO_CODE = "no code is loaded from files"
_CHECKPOINT = "set it in the checkpoint's config.json"
_PORTS = "the parts of this server talk over local sockets"
_ONE_RANK = "on the CPU one rank uses all cores"
_GRAPHS = "the CPU runs no captured graphs"
_IN_MEMORY = "on the CPU it lies in main memory already"
_ALWAYS_LOGGED = "requests are logged unless --disable-log-requests"


def _no_effect(name: str, kind: str, reason: str, short: str = "", **rest: Any) -> Flag:
    return Flag(name, kind, flag_class=FlagClass.NO_EFFECT, reason=reason, short=short, **rest)


def _refused(name: str, kind: str = "str", reason: str = NOT_YET, neutral: tuple[Any, ...] = (), **rest: Any) -> Flag:
    return Flag(name, kind, flag_class=FlagClass.REFUSED, reason=reason, neutral=neutral, **rest)


def _off(name: str, reason: str = NOT_YET, **rest: Any) -> Flag:
    """A refused switch; leaving it off is fine."""
    return _refused(name, "bool", reason, (False,), **rest)


NO_EFFECT_FLAGS: tuple[Flag, ...] = (
    _no_effect("tensor_parallel_size", "int", _ONE_RANK, short="-tp", low=1),
    _no_effect(
        "gpu_memory_utilization", "float", "speaks of device memory; on the CPU use kv_cache_memory", low=0.0, high=1.0
    ),
    _no_effect("kv_cache_ratio", "float", "KV blocks are not divided between prefill and decode", low=0.0, high=1.0),
    _no_effect("prealloc_dec_block_slot_num_threshold", "int", "requests get KV blocks when they need them"),
    _no_effect("static_decode_blocks", "int", "requests get KV blocks when they need them"),
    _no_effect("swap_space", "float", f"the KV cache is swapped nowhere: {_IN_MEMORY}", low=0.0),
    _no_effect("cpu_offload_gb", "float", f"no weights are moved: {_IN_MEMORY}", low=0.0),
    _no_effect("enable_logprob", "bool", "log-probabilities are always there"),
    _no_effect("lm_head_fp32", "bool", "logits are always summed and kept in float32"),
    _no_effect("trust_remote_code", "bool", "no code is loaded from checkpoints"),
    _no_effect("use_v2_block_manager", "bool", "there is one block manager"),
    _no_effect("disable_hybrid_kv_cache_manager", "bool", "there is one block manager"),
    _no_effect("engine_worker_queue_port", "str", _PORTS),
    _no_effect("cache_queue_port", "str", _PORTS),
    _no_effect("pd_comm_port", "str", _PORTS),
    _no_effect("compilation_config", "json", "there is no graph compiler to configure"),
    _no_effect("graph_optimization_config", "json", _GRAPHS),
    _no_effect("enforce_eager", "bool", _GRAPHS),
    _no_effect("max_seq_len_to_capture", "int", _GRAPHS),
    _no_effect("use_warmup", "int", "kernels are compiled before they are installed"),
    _no_effect("async_scheduling", "bool", "the step loop decides this itself"),
    _no_effect("enable_overlap_schedule", "bool", "the step loop decides this itself"),
    _no_effect("num_scheduler_steps", "int", "the step loop decides this itself"),
    _no_effect("scheduling_policy", "str", "requests start in the order of their priority, then of arrival"),
    _no_effect("distributed_executor_backend", "str", "one process computes the model"),
    _no_effect("max_parallel_loading_workers", "int", "one process computes the model"),
    _no_effect("disable_custom_all_reduce", "bool", _ONE_RANK),
    _no_effect("enable_flashinfer_allreduce_fusion", "bool", _ONE_RANK),
    _no_effect("disable_sequence_parallel_moe", "bool", _ONE_RANK),
    _no_effect("shutdown_comm_group_if_worker_idle", "bool", _ONE_RANK),
    _no_effect("disable_padded_drafter_batch", "bool", "batches are never padded"),
    _no_effect("disable_chunked_mm_input", "bool", _TEXT_ONLY),
    _no_effect("disable_mm_preprocessor_cache", "bool", _TEXT_ONLY),
    _no_effect("disable_log_stats", "bool", "no statistics are logged; they are at /metrics"),
    _no_effect("use_tqdm_on_load", "bool", "progress is always shown on stderr"),
    _no_effect("enable_log_requests", "bool", _ALWAYS_LOGGED, section=SERVER),
    _no_effect("max_log_len", "int", "texts of requests are never logged", section=SERVER),
    _no_effect("enable_auto_tool_choice", "bool", "a --tool-call-parser is enough", section=SERVER),
    _no_effect("trust_request_chat_template", "bool", "requests may bring a template", section=SERVER),
    _no_effect("enable_reasoning", "bool", "a --reasoning-parser is enough"),
    _no_effect("enable_request_id_headers", "bool", "answers always carry X-Request-Id", section=SERVER),
    _no_effect("enable_prompt_tokens_details", "bool", "usage always carries cached_tokens", section=SERVER),
    _no_effect("enable_server_load_tracking", "bool", "/load is always there", section=SERVER),
    _no_effect("disable_frontend_multiprocessing", "bool", "the engine is a process of its own", section=SERVER),
    _no_effect("disable_fastapi_docs", "bool", "there are no generated pages", section=SERVER),
    _no_effect("timeout", "float", "API processes are watched, not timed", section=SERVER),
)

REFUSED_FLAGS: tuple[Flag, ...] = (
    # model
    _refused("tokenizer_revision", neutral=("master", "main", "default")),
    _refused("code_revision", reason=_NO_CODE, neutral=("main",)),
    _refused("load_format", reason="use --load-choices", neutral=("auto", "safetensors")),
    _refused("load_strategy", neutral=("normal",)),
    _off("dynamic_load_weight"),
    _refused("rsync_config", "json"),
    _refused("download_dir", reason="HF_HOME names the folder of the hub's client"),
    _refused("hf_token", reason="the hub's client reads it from HF_TOKEN", is_secret=True),
    _refused("hf_overrides", "json", _CHECKPOINT),
    _refused("rope_scaling", "json", _CHECKPOINT),
    _refused("rope_theta", "float", _CHECKPOINT),
    _refused("model_config_name", reason="the file is config.json", neutral=("config.json",)),
    _refused("model_impl", reason="models are this package's own", neutral=("auto", "fastdeploy")),
    _refused("task", reason="this server generates text", neutral=("auto", "generate")),
    _refused("runner", reason="this server generates text", neutral=("auto", "generate")),
    _refused("convert", reason="this server generates text", neutral=("auto", "none")),
    _refused("override_pooler_config", "json", "this server generates text"),
    _refused("tokenizer_mode", reason="there is one tokenizer", neutral=("auto", "fast")),
    _refused("tokenizer_base_url", reason="the server tokenises itself"),
    _off("skip_tokenizer_init", "the server tokenises itself"),
    _refused("override_generation_config", "json", "send the values with the request"),
    # parallel
    _refused("data_parallel_size", "int", neutral=(1,), short="-dp"),
    _refused("local_data_parallel_id", "int", neutral=(0,)),
    _refused("pipeline_parallel_size", "int", "pipeline parallelism is not supported", (1,), short="-pp"),
    _refused("ips", reason="one deployment runs on one machine"),
    _off("enable_expert_parallel"),
    _off("enable_eplb", _EXPERTS),
    _refused("eplb_config", "json", _EXPERTS),
    _refused("routing_replay_config", "json", _EXPERTS),
    _off("use_internode_ll_two_stage", _EXPERTS),
    _off("enable_chunked_moe", _EXPERTS),
    _refused("chunked_moe_size", "int", _EXPERTS),
    # cache and scheduling
    _refused("enable_output_caching", "bool", "outputs are in the prefix cache, --no-enable-prefix-caching", (True,)),
    _refused("kvcache_storage_backend"),
    _refused("write_policy", neutral=("write_through",)),
    _refused("max_num_partial_prefills", "int", "prompts share a step in order of arrival", (1,)),
    _refused("max_long_partial_prefills", "int", "prompts share a step in order of arrival", (1,)),
    _refused("preemption_mode", reason="what is preempted is computed again", neutral=("recompute",)),
    _refused("plas_attention_config", "json", "attention is always exact"),
    _off("enable_early_stop"),
    _refused("early_stop_config", "json"),
    _off("enable_sleep_mode"),
    # output
    _off("guided_decoding_disable_any_whitespace"),
    _refused("logits_processors", "list", _NO_CODE),
    _off("enable_keep_sampling_mask"),
    _off("enable_entropy"),
    # older spelling of speculation
    _refused("speculative_disable_by_batch_size", "int", "send `speculative` with the request"),
    _refused("spec_decoding_acceptance_method", reason="see verify_strategy", neutral=("rejection_sampler",)),
    # adapters, media
    _off("enable_lora", _LORA),
    _refused("lora_modules", "list", _LORA),
    _off("enable_mm", _TEXT_ONLY),
    _off("enable_mm_output", _TEXT_ONLY, section=SERVER),
    _refused("limit_mm_per_prompt", "json", _TEXT_ONLY),
    _refused("mm_processor_kwargs", "json", _TEXT_ONLY),
    _refused("max_encoder_cache", "int", _TEXT_ONLY, (-1, 0)),
    _refused("max_processor_cache", "float", _TEXT_ONLY, (-1.0, 0.0)),
    _refused("allowed_local_media_path", reason=_TEXT_ONLY, neutral=("",)),
    # server
    _refused("controller_port", "int", "there is no control server", (-1,), section=SERVER),
    _refused("api_server_count", "int", "use --workers", (1,), section=SERVER),
    _refused("tool_parser_plugin", reason=_NO_CODE, section=SERVER),
    _refused("middleware", "list", _NO_CODE, section=SERVER),
    _refused("response_role", neutral=("assistant",), section=SERVER),
    _refused("chat_template_content_format", neutral=("auto", "string"), section=SERVER),
    _off("return_tokens_as_token_ids", "send return_token_ids with the request", section=SERVER),
    _off("enable_force_include_usage", "send stream_options with the request", section=SERVER),
    _refused("log_config_file", reason="use FD_LOG_DIR and FD_LOG_FORMAT", section=SERVER),
    _refused("otlp_traces_endpoint", reason="traces are not available; see /metrics"),
    _refused("ssl_ca_certs", reason="client certificates are not checked", section=SERVER),
    _refused("ssl_keyfile_password", reason="use a key without password", section=SERVER, is_secret=True),
    # prefill/decode separation
    _refused("splitwise_role", reason=_SPLITWISE, neutral=("mixed",)),
    _refused("rdma_comm_ports", reason=_SPLITWISE),
    _refused("cache_transfer_protocol", reason=_SPLITWISE),
    _refused("router", reason=_SPLITWISE),
    _refused("kv_transfer_config", "json", _SPLITWISE),
    # Redis schedulers
    _refused("scheduler_name", reason=_SCHEDULER, neutral=("local",)),
    _refused("scheduler_host", reason=_SCHEDULER),
    _refused("scheduler_port", "int", _SCHEDULER),
    _refused("scheduler_db", "int", _SCHEDULER),
    _refused("scheduler_password", reason=_SCHEDULER, is_secret=True),
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
    _refused("scheduler_writer_batch_size", "int", _SCHEDULER),
)
