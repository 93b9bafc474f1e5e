# SPDX-License-Identifier: Apache-2.0
"""Flags, YAML and keyword arguments."""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path

import pytest

from fastdeploy.config.args import engine_config_from_kwargs, parse_serve_args
from fastdeploy.config.env import Env, child_environment, read_env
from fastdeploy.core.errors import ConfigError, ConfigErrors


def test_defaults() -> None:
    args = parse_serve_args(["demo"])
    assert (args.engine.model, args.engine.max_model_len, args.engine.device) == ("demo", "auto", "cpu")
    assert (args.engine.scheduler.max_num_seqs, args.engine.cache.block_size) == (64, 64)
    assert args.engine.cache.enable_prefix_caching and args.engine.scheduler.enable_chunked_prefill
    assert (args.server.host, args.server.port, args.server.max_concurrency) == ("0.0.0.0", 8000, 512)
    assert args.server.served_model_name == ("demo",)
    assert args.engine.speculative.method == "naive"
    assert args.notes == ()


@pytest.mark.parametrize("flag", ["--max-model-len 99", "--max_model_len 99", "--max_model_len=99"])
def test_hyphens_and_underscores_are_the_same(flag: str) -> None:
    assert parse_serve_args(["demo", *flag.split()]).engine.max_model_len == 99


def test_underscores_in_values_are_kept() -> None:
    args = parse_serve_args(["--model", "my_model", "--served_model_name=a_b", "--seed", "-3"])
    assert (args.engine.model, args.server.served_model_name, args.engine.seed) == ("my_model", ("a_b",), -3)


def test_switches_have_a_no_form() -> None:
    args = parse_serve_args(["demo", "--no-enable-prefix-caching", "--no_enable_chunked_prefill"])
    assert not args.engine.cache.enable_prefix_caching
    assert not args.engine.scheduler.enable_chunked_prefill


def test_switches_take_true_and_false_too() -> None:
    flags = ["--enable-chunked-prefill", "False", "--enable_prefix_caching=false", "--enforce-eager=True", "demo"]
    args = parse_serve_args(flags)
    assert args.engine.model == "demo"
    assert not args.engine.cache.enable_prefix_caching and not args.engine.scheduler.enable_chunked_prefill
    assert args.notes[0].startswith("--enforce-eager True has no effect")


def test_command_line_precedes_yaml_and_yaml_precedes_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max_model_len: 512\nmax_num_seqs: 3\nspeculative_config:\n  method: ngram\n  max_ngram_size: 4\n")
    args = parse_serve_args(["demo", "--config", str(file), "--max-model-len", "100"])
    assert (args.engine.max_model_len, args.engine.scheduler.max_num_seqs) == (100, 3)
    assert (args.engine.speculative.method, args.engine.speculative.max_ngram_size) == ("ngram", 4)
    assert args.provenance == {
        "model": "command line",
        "max_model_len": "command line",
        "max_num_seqs": str(file),
        "speculative_config": str(file),
    }


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("wint8", ("wint8", "wint8", "wint8")),
        ("wint4", ("wint4", "wint4", "wint8")),
        ("w4a8", ("w4a8", "w4a8", "w8a8")),
        ('{"mlp": "wint4", "head": "w8a8"}', ("none", "wint4", "w8a8")),
    ],
)
def test_quantization_is_a_name_or_a_mapping_of_parts(text: str, formats: tuple[str, str, str], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"quantization: {text}\n")
    for args in (["demo", "--quantization", text], ["demo", "--config", str(file)]):
        found = parse_serve_args(args).engine.quantization
        assert (found.attention, found.mlp, found.head) == formats
    offline, _ = engine_config_from_kwargs({"model": "demo", "quantization": text})
    assert (offline.quantization.attention, offline.quantization.mlp, offline.quantization.head) == formats


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        ("max_modle_len: 5", "max_modle_len", r"unknown key of .*serve.yaml; did you mean 'max_model_len'"),
        ("max_model_len: long", "max_model_len", r"or 8K \(8,192\), got 'long' \(.*serve.yaml\)"),
        ("port: 1\nseed: 2\nport: 3", "port", r"is repeated in line 3 of .*serve.yaml"),
        ("speculative_config: {method: ngram, method: naive}", "method", "is repeated"),
        ("max-model-len: 5\nmax_model_len: 6", "max_model_len", "with hyphens and with underscores"),
        (
            'speculative_config: \'{"method": "ngram", "method": "naive"}\'',
            "speculative_config",
            "'method' is repeated",
        ),
        ("port: 70000", "port", r"\[0, 65535\], got 70000 \(.*serve.yaml\)"),
        ("speculative_config: {method: ngram, max_ngram_size: 0}", "speculative_config.max_ngram_size", "serve.yaml"),
        ("speculative_config: ngram", "speculative_config", "expected a JSON mapping"),
        ("tensor_parallel_size: 0", "tensor_parallel_size", r"at least 1, got 0 \(.*serve.yaml\)"),
        ("api_key: {a: sesame}", "api_key", "expected strings"),
        ("max_model_len: [1]", "max_model_len", "expected auto, or a number of tokens"),
        ("enable_prefix_caching: 7", "enable_prefix_caching", "expected true or false, got 7"),
        ("- a", "--config", "is not a mapping"),
        ("a: [", "--config", "is not YAML"),
        ("speculative_config: {method: ngram, numm: 4}", "speculative_config.numm", "unknown key"),
        (
            "quantization: wint5",
            "quantization",
            r"none, wint8, .* got 'wint5'; did you mean 'wint8'\? \(.*serve.yaml\)",
        ),
        ("quantization: {dense: wint8}", "quantization.dense", "unknown part, expected attention, mlp, experts, head"),
    ],
)
def test_yaml_mistakes_name_key_and_file(tmp_path: Path, content: str, field: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_serve_args(["demo", "--config", str(file)])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("flags", "field", "message"),
    [
        ("", "model", "is missing; give a directory"),
        ("demo --max-modle-len 5", "--max-modle-len", "did you mean '--max-model-len'"),
        ("demo --port", "--port", "expected one argument"),
        ("demo --port eighty", "--port", "expected an integer, got 'eighty'"),
        ("demo --port 70000", "port", r"\[0, 65535\], got 70000"),
        ("demo --workers 0", "workers", "expected"),
        ("demo other", "command line", "unexpected argument 'other'"),
        ("demo --model other", "--model", "given twice"),
        ("demo --config a.yaml --config b.yaml", "--config", "given twice: 'a.yaml' and 'b.yaml'"),
        ("demo --config /no/such.yaml", "--config", "cannot read '/no/such.yaml'"),
        ("demo --quantization q4", "quantization", "expected one of none, wint8, wint4, .* got 'q4'"),
        ("demo --quantization {", "--quantization", "expected a name or a JSON mapping"),
        ("demo --router a:1", "--router a:1", "nodes find each other through Redis"),
        ("demo --data-parallel-size 2", "--data-parallel-size 2", "data parallelism is not"),
        ("demo --device xpu", "device", "expected auto, cpu, gpu, or gpu:1 for the second GPU, got 'xpu'"),
        ("demo --gpu-memory-utilization 1.5", "gpu_memory_utilization", r"a number in \[0.0, 1.0\], got 1.5"),
        ("demo --swap-space -1", "--swap-space", "at least 0.0"),
        ("demo --uvicorn-log-level loud", "uvicorn_log_level", "expected one of critical"),
        (
            "demo -pp 2",
            "--pipeline-parallel-size 2",
            "2: is refused, leave it out: pipeline parallelism is not supported$",
        ),
        *(
            (f"demo --kv-cache-dtype {name}", "kv_cache_dtype", f"expected one of auto, int8, got '{name}'")
            for name in ("fp8", "int8_zp", "block_wise_fp8", "float32")
        ),
        ("demo --quantization kvcache", "quantization", "use --kv-cache-dtype int8"),
        (
            'demo --quantization \'{"kv_cache_quant_type": "int8"}\'',
            "quantization.kv_cache_quant_type",
            "not a part of the weights: use --kv-cache-dtype int8",
        ),
        ("demo --allowed-origins '[1, {}]'", "--allowed-origins", "expected strings"),
        ("demo --dtype int3", "dtype", "expected one of"),
        ("demo --kv-cache-memory 5x", "--kv-cache-memory", "number of bytes"),
        ("demo --speculative-config '{'", "--speculative-config", "expected a JSON mapping"),
        ("demo --speculative-config 3", "--speculative-config", "expected a JSON mapping"),
        ('demo --speculative-config \'{"method": "hydra"}\'', "speculative_config.method", "not available yet"),
        ("demo --num-speculative-tokens 3", "speculative_model", "is missing"),
        ("demo --api-key=", "api_key", "not empty"),
        ("demo --uds /tmp/s --port 1", "uds", "cannot be combined with --port, which it replaces"),
        ("demo --uds /tmp/s --port 1 --host a", "uds", "cannot be combined with --host and --port, which it replaces"),
        (
            "demo --shutdown-timeout 0 --timeout-graceful-shutdown 0",
            "shutdown_timeout",
            "cannot be combined with --timeout-graceful-shutdown, which it replaces",
        ),
        ("demo --root-path api", "root_path", "begins with /, got 'api'"),
        ("demo --ssl-keyfile k", "ssl_certfile", "must be given together"),
    ],
)
def test_command_line_mistakes_are_one_line_that_names_the_flag(flags: str, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_serve_args(shlex.split(flags))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_all_errors_of_a_command_are_raised_at_once_one_per_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enable_sleep_mode: true\nblock_size: 17\nworkres: 2\n")
    flags = "demo --enable-lora --router a:1 -dp 2 --no-such --port 70000 --max-num-seqs x --dtype half --workers 0"
    with pytest.raises(ConfigErrors) as caught:
        parse_serve_args([*flags.split(), "--config", str(file)])
    assert str(caught.value).split("\n") == [
        "--no-such: unknown flag",
        f"workres: unknown key of {file}; did you mean 'workers'?",
        "--enable-lora: is refused, leave it out: LoRA adapters are not supported",
        "--router a:1: is refused, leave it out: nodes find each other through Redis; see --scheduler-name",
        "--data-parallel-size 2: is refused, leave it out: data parallelism is not available yet",
        "--max-num-seqs: expected an integer, got 'x'",
        "--dtype half: is refused: take bfloat16 or float32",
        f"enable_sleep_mode: is refused, leave it out: sleep mode is not available yet ({file})",
        "port: expected an integer in [0, 65535], got 70000",
        "workers: expected an integer in [1, 256], got 0",
        f"block_size: expected a multiple of 16, got 17 ({file})",
    ]
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)


def test_all_wrong_arguments_of_llm_are_raised_at_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        engine_config_from_kwargs({"model": "demo", "max_modle_len": 4, "port": 1, "enable_lora": True})
    assert str(caught.value).split("\n") == [
        "max_modle_len: unknown LLM argument; did you mean 'max_model_len'?",
        "port: is refused, leave it out: it is a flag of the server, not an argument of LLM",
        "enable_lora: is refused, leave it out: LoRA adapters are not supported",
    ]


def test_refused_flags_accept_neutral_values() -> None:
    flags = "demo --data-parallel-size 1 --splitwise-role mixed --scheduler-name local --revision master"
    assert parse_serve_args(flags.split()).notes == ()


def test_flags_without_effect_are_noted_with_their_reason() -> None:
    args = parse_serve_args(["demo", "-tp", "4", "--enable-logprob", "--gpu_memory_utilization", "0.8"])
    assert args.notes == (
        "--tensor-parallel-size 4 has no effect: on the CPU one rank uses all cores",
        "--enable-logprob True has no effect: log-probabilities are always available",
        "--gpu-memory-utilization 0.8 has no effect: the CPU has no device memory; use --kv-cache-memory",
    )


def test_keys_come_from_the_flags_and_else_from_the_environment() -> None:
    env = Env(api_keys=("from-env",))
    assert parse_serve_args(["demo"], env).server.api_keys == ("from-env",)
    args = parse_serve_args(["demo", "--api-key", "a", "--api-key", "b"], env)
    assert args.server.api_keys == ("a", "b")
    assert "a" not in repr(args.server.api_keys[1:]) and "api_keys" not in repr(args.server)


@pytest.mark.parametrize(
    "flags", ["--api-key [sesame", "--hf-token sesame", "--scheduler-url sesame", "--ssl-keyfile-password sesame"]
)
def test_secrets_are_in_no_message(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", *flags.split(maxsplit=1)])
    assert "sesame" not in str(caught.value)


def test_commands_of_vllm_users_run_with_a_note_per_flag_without_effect() -> None:
    flags = """demo --served-model-name m --max-num-seqs 4 --swap-space 16 --enforce-eager --disable-log-requests
        --uvicorn-log-level info --max-seq-len-to-capture 8192 --distributed-executor-backend mp --kv-cache-dtype auto
        --cpu-offload-gb 0 --pipeline-parallel-size 1 --enable-auto-tool-choice --tool-call-parser hermes
        --allowed-origins ["http://a","http://b"] --allowed-origins http://c --load-format auto
        --no-enable-prefix-caching --disable-log-stats --trust-remote-code --guided-decoding-backend auto"""
    args = parse_serve_args(flags.split())
    assert args.server.allowed_origins == ("http://a", "http://b", "http://c")
    assert args.server.disable_log_requests and args.server.uvicorn_log_level == "info"
    assert args.engine.disable_log_stats and not parse_serve_args(["demo"]).engine.disable_log_stats
    assert [note.split()[0] for note in args.notes] == [
        "--swap-space",
        "--max-seq-len-to-capture",
        "--distributed-executor-backend",
        "--cpu-offload-gb",
        "--enable-auto-tool-choice",
        "--trust-remote-code",
        "--enforce-eager",
    ]


def test_a_key_of_vllms_variable_is_not_read_which_a_start_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    args = parse_serve_args(["demo"], read_env())
    assert args.server.keys == ()
    assert args.notes == ("VLLM_API_KEY is not read: give keys with --api-key, --api-key-file or FD_API_KEY",)
    assert "VLLM_API_KEY" not in child_environment()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", 30.0),
        ("--timeout-graceful-shutdown 5", 5.0),
        ("--timeout-graceful-shutdown 0", None),
        ("--shutdown-timeout 5", 5.0),
        ("--shutdown-timeout 0", 0.0),
    ],
)
def test_time_of_a_drain_may_be_limited_not_limited_or_none_at_all(flags: str, expected: float | None) -> None:
    assert parse_serve_args(["demo", *flags.split()]).server.drain_timeout_s == expected


def test_provenance_of_an_api_key_of_the_environment_is_its_variable() -> None:
    assert parse_serve_args(["demo"], Env(api_keys=("k",))).provenance["api_key"] == "FD_API_KEY"


def test_keys_of_a_file_may_have_hyphens(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\nmax-model-len: 99\n")
    args = parse_serve_args(["--config", str(file)])
    assert (args.engine.max_model_len, args.provenance["max_model_len"]) == (99, str(file))


def test_type_of_the_cache_comes_from_flag_file_or_argument(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\nkv_cache_dtype: int8\n")
    assert parse_serve_args(["--config", str(file)]).engine.cache.dtype == "int8"
    assert parse_serve_args(["demo", "--kv-cache-dtype", "int8"]).engine.cache.dtype == "int8"
    assert engine_config_from_kwargs({"model": "demo", "kv_cache_dtype": "int8"})[0].cache.dtype == "int8"
    assert parse_serve_args(["demo"]).engine.cache.dtype == "auto"


def test_a_mapping_on_the_command_line_replaces_that_of_the_file_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text('speculative_config: \'{"method": "ngram", "max_ngram_size": 4}\'\n')
    assert parse_serve_args(["demo", "--config", str(file)]).engine.speculative.max_ngram_size == 4
    flags = ["demo", "--config", str(file), "--speculative-config", '{"method": "ngram"}']
    assert parse_serve_args(flags).engine.speculative.max_ngram_size == 5


@pytest.mark.parametrize(("text", "expected"), [("5", 5), ("2k", 2000), ("3Mi", 3 * 2**20), ("1GiB", 2**30)])
def test_bytes_may_carry_a_unit(text: str, expected: int) -> None:
    assert parse_serve_args(["demo", "--kv-cache-memory", text]).engine.cache.kv_cache_memory == expected


def test_older_spelling_of_separate_arguments_builds_the_same_configuration() -> None:
    new, _ = engine_config_from_kwargs(
        {
            "model": "demo",
            "tensor_parallel_size": 1,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        }
    )
    old, notes = engine_config_from_kwargs(
        {
            "model": "demo",
            "tensor_parallel_size": 1,
            "speculative_model": "[ngram]",
            "num_speculative_tokens": 5,
            "ngram_prompt_lookup_max": 4,
        }
    )
    assert new == old
    assert notes == ()
    assert new.speculative.max_ngram_size == 4


def test_a_draft_model_in_separate_arguments_builds_the_same_configuration() -> None:
    mapping = {"model": "facebook/opt-125m", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}
    new, _ = engine_config_from_kwargs({"model": "demo", "speculative_config": mapping})
    old, notes = engine_config_from_kwargs(
        {
            "model": "demo",
            "speculative_model": "facebook/opt-125m",
            "num_speculative_tokens": 5,
            "speculative_draft_tensor_parallel_size": 1,
        }
    )
    assert (old.speculative.to_mapping(), old.speculative.method) == (mapping, "by_files")
    assert old == new
    assert notes[-1].startswith("speculative_config.draft_tensor_parallel_size 1 has no effect")


@pytest.mark.parametrize(
    ("kwargs", "field", "message"),
    [
        ({"modle": "demo"}, "modle", "unknown LLM argument; did you mean 'model'"),
        ({"model": "demo", "port": 1}, "port", "flag of the server"),
        ({"model": "demo", "disable_log_requests": True}, "disable_log_requests", "flag of the server"),
        ({"model": "demo", "quantization": "q4"}, "quantization", "got 'q4'$"),
        ({"model": "demo", "max_num_seqs": "many"}, "max_num_seqs", "expected an integer, got 'many'$"),
    ],
)
def test_llm_argument_mistakes_name_the_argument(kwargs: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        engine_config_from_kwargs(kwargs)
    assert caught.value.field == field


def test_llm_arguments_of_other_engines_without_effect_are_noted() -> None:
    config, notes = engine_config_from_kwargs(
        {
            "model": "demo",
            "enable_logprob": True,
            "swap_space": 4,
            "max_seq_len_to_capture": 8192,
            "graph_optimization_config": {"use_cudagraph": True},
            "quantization": None,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
        }
    )
    assert config.model == "demo"
    assert [note.split()[0] for note in notes] == [
        "enable_logprob",
        "swap_space",
        "max_seq_len_to_capture",
        "graph_optimization_config",
    ]
