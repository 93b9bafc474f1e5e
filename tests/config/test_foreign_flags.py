# SPDX-License-Identifier: Apache-2.0
"""Every flag of FastDeploy 2.6 and vLLM is honoured, stands for another, has no effect or is refused: each is tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.args import engine_config_from_kwargs, parse_serve_args
from fastdeploy.config.flag import SERVE_ONLY
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS, Flag, FlagClass
from fastdeploy.core.errors import ConfigError
from tests.config.foreign_names import ALL

SAMPLES = {
    "str": "x",
    "int": "7",
    "float": "0.5",
    "bytes": "512Mi",
    "json": '{"a": 1}',
    "list": "a",
    "ports": "2334",
    "tokens": "8k",
}
VALUES = {"bool": True, "int": 7, "float": 0.5, "json": {"a": 1}, "list": ("a",), "tokens": 8000}


def by_name(flag: Flag) -> str:
    return flag.name


def of_class(flag_class: FlagClass) -> list[Flag]:
    return [flag for flag in FLAGS if flag.flag_class is flag_class]


def words(flag: Flag) -> list[str]:
    return [flag.option] if flag.kind == "bool" else [flag.option, SAMPLES[flag.kind]]


def as_word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "{}" if value == {} else str(value)


def test_every_flag_of_the_other_servers_is_in_the_table_once() -> None:
    known = {flag.option.removeprefix("--") for flag in FLAGS}
    assert known >= ALL, sorted(ALL - known)
    assert len(known) == len(FLAGS)
    for flag in FLAGS:
        assert (flag.flag_class is FlagClass.HONOURED) == (not flag.reason)
        assert (flag.flag_class is FlagClass.MAPPED) == bool(flag.target or flag.keys)


@pytest.mark.parametrize("flag", of_class(FlagClass.NO_EFFECT), ids=by_name)
def test_flag_without_effect_is_accepted_with_one_line(flag: Flag) -> None:
    args = parse_serve_args(["demo", *words(flag)])
    value = VALUES.get(flag.kind, SAMPLES.get(flag.kind))
    assert args.notes == (f"{flag.option} {value} has no effect: {flag.reason}",)
    plain = parse_serve_args(["demo"])
    assert (args.engine, args.server, args.cluster) == (plain.engine, plain.server, plain.cluster)


@pytest.mark.parametrize("flag", of_class(FlagClass.REFUSED), ids=by_name)
def test_refused_flag_says_why_in_one_line(flag: Flag) -> None:
    is_on = flag.kind == "bool" and True in flag.neutral
    given = ["demo", *([f"--no-{flag.option.removeprefix('--')}"] if is_on else words(flag))]
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(given)
    assert str(caught.value).startswith(flag.option)
    assert str(caught.value).endswith(f": is refused, leave it out: {flag.reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.neutral], ids=by_name)
def test_neutral_value_is_accepted_without_a_word(flag: Flag) -> None:
    for value in flag.neutral:
        args = parse_serve_args(["demo", f"{flag.option}={as_word(value)}"])
        plain = parse_serve_args(["demo"])
        assert (args.engine, args.server, args.notes) == (plain.engine, plain.server, ())


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.section not in SERVE_ONLY], ids=by_name)
def test_llm_knows_the_flag_as_an_argument(flag: Flag) -> None:
    try:
        _, notes = engine_config_from_kwargs({"model": "demo", flag.name: flag.neutral[0] if flag.neutral else "x"})
    except ConfigError as error:
        assert error.field.startswith(flag.field or flag.name) or flag.flag_class is FlagClass.HONOURED
        assert "unknown" not in error.message or "." in error.field
    else:
        assert flag.flag_class is not FlagClass.REFUSED or flag.neutral
        assert not notes or flag.name in notes[0] or flag.section == "speculative"


@pytest.mark.parametrize(
    ("flags", "target", "value"),
    [
        ("--api-server-count 3", "workers", 3),
        ("-asc 3", "workers", 3),
        ("--kv-cache-memory-bytes 2G", "kv_cache_memory", 2 * 2**30),
        ("--load-format dummy", "load_choices", "dummy"),
        ("--load-format safetensors", "load_choices", "default_v1"),
        ("--load-format hf", "load_choices", "default_v1"),
        ("--load-format auto", "load_choices", "default_v1"),
        ("--load-choices default", "load_choices", "default_v1"),
        ("--guided-decoding-backend guidance", "guided_decoding_backend", "llguidance"),
        ('--structured-outputs-config {"backend":"guidance"}', "guided_decoding_backend", "llguidance"),
        ('--structured-outputs-config {"reasoning_parser":"qwen3"}', "reasoning_parser", "qwen3"),
        ("--generation-config vllm", "generation_config", "none"),
        ("--dtype float", "dtype", "float32"),
    ],
)
def test_flag_with_a_counterpart_sets_it(flags: str, target: str, value: object) -> None:
    args = parse_serve_args(["demo", *flags.split()])
    field = FLAG_BY_NAME[target].field or target
    part = next(part for part in (args.engine, args.engine.cache, args.server) if hasattr(part, field))
    assert getattr(part, field) == value
    assert args.notes == ()
    if value != "default_v1":
        assert args.provenance[target] == "command line"


def test_newest_names_of_speculation_build_the_same_configuration() -> None:
    flags = "--spec-method ngram --spec-tokens 3"
    named = parse_serve_args(["demo", *flags.split()]).engine.speculative
    assert (named.method, named.num_speculative_tokens) == ("ngram", 3)
    model = parse_serve_args(["demo", "--spec-model", "demo/draft", "--spec-tokens", "3"]).engine.speculative
    assert (model.method, model.num_speculative_tokens) == ("draft_model", 3)


def test_the_short_names_of_vllm_are_known() -> None:
    flags = '-q wint8 -tp 1 -pp 1 -dp 1 -n 1 -r 0 -dcp 1 -O 3 -cc {"mode":3} -ac {}'
    args = parse_serve_args(["demo", *flags.split()])
    assert str(args.engine.quantization) == "wint8"
    assert [note.split()[0] for note in args.notes] == [
        "--optimization-level",
        "--attention-config",
        "--compilation-config",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--workers 2 --api-server-count 3", "--api-server-count 3: contradicts --workers 2"),
        ("--load-choices dummy --load-format hf", "--load-format hf: contradicts --load-choices dummy"),
        (
            '--guided-decoding-backend off --structured-outputs-config {"backend":"guidance"}',
            "--structured-outputs-config: contradicts --guided-decoding-backend off",
        ),
        (
            "--spec-method ngram --spec-tokens 2 --num-speculative-tokens 3",
            "--num-speculative-tokens 3: contradicts --spec-tokens 2",
        ),
        ("--load-format gguf", "--load-format gguf: is refused: give the GGUF file as the model; take auto"),
        ("--dtype half", "--dtype half: is refused: take bfloat16 or float32"),
        ("--dtype float16", "--dtype float16: is refused: take bfloat16 or float32"),
        (
            "--tokenizer-mode slow",
            "--tokenizer-mode slow: is refused, leave it out: there is one kind of tokenizer; take auto",
        ),
        (
            "--tokenizer-mode mistral",
            "--tokenizer-mode mistral: is refused, leave it out: there is one kind of tokenizer; take auto",
        ),
        (
            "--guided-decoding-backend off --structured-outputs-config.backend xgrammar",
            "--structured-outputs-config: contradicts --guided-decoding-backend off",
        ),
        (
            "--structured-outputs-config.backend []",
            "--structured-outputs-config.backend: expected a string, got []",
        ),
        (
            '--structured-outputs-config {"disable_any_whitespace":true}',
            "--structured-outputs-config.disable_any_whitespace: is refused, leave it out; available keys: backend, "
            "reasoning_parser",
        ),
    ],
)
def test_contradictions_and_values_that_are_not_available_are_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", *flags.split()])
    assert str(caught.value) == message


@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("--guided-decoding-backend {}", "--guided-decoding-backend"),
        ("--structured-outputs-config.backend {}", "--structured-outputs-config.backend"),
        ('--structured-outputs-config {{"backend":"{}"}}', "--structured-outputs-config.backend"),
    ],
)
def test_other_backends_stand_for_llguidance_with_one_line(flags: str, shown: str, backend: str) -> None:
    args = parse_serve_args(["demo", *flags.format(backend).split()])
    assert args.engine.guided_decoding_backend == "llguidance"
    assert args.notes == (f"{shown} {backend} has no effect: forms are compiled by llguidance",)


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, "structured_outputs_config.backend"),
    ],
)
def test_llm_takes_other_backends_with_one_line(kwargs: dict[str, Any], shown: str) -> None:
    config, notes = engine_config_from_kwargs({"model": "demo", **kwargs})
    assert config.guided_decoding_backend == "llguidance"
    assert notes == (f"{shown} xgrammar has no effect: forms are compiled by llguidance",)


@pytest.mark.parametrize(
    "flags",
    [
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
        "--speculative_config.method=ngram --speculative-config.num_speculative_tokens=3",
        "-sc.method ngram -sc.num_speculative_tokens=3",
    ],
)
def test_keys_of_a_mapping_may_be_flags_of_their_own(flags: str) -> None:
    speculative = parse_serve_args(["demo", *flags.split()]).engine.speculative
    assert (speculative.method, speculative.num_speculative_tokens) == ("ngram", 3)


def test_keys_of_a_mapping_may_be_mappings_and_stay_of_their_type() -> None:
    flags = "-cc.pass_config.enable=true -cc.sizes [1,2] -cc.mode none --structured-outputs-config.backend guidance"
    args = parse_serve_args(["demo", *flags.split()])
    assert args.engine.guided_decoding_backend == "llguidance"
    assert args.notes[0].startswith(
        "--compilation-config {'pass_config': {'enable': True}, 'sizes': [1, 2], 'mode': 'none'} has no effect"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-cc.mode", "-cc.mode: expected one argument"),
        ("-cc.mode 1 -cc.mode=2", "-cc.mode=2: is given twice"),
        ("-cc.mode 1 -cc.mode.a 2", "-cc.mode.a: is given twice"),
        ("-cc {} -cc.mode 1", "--compilation-config: is given as a whole and by its keys"),
        ("--port.a 1", "--port.a: unknown flag; did you mean '--port'?"),
    ],
)
def test_wrong_keys_of_a_mapping_are_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", *flags.split()])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            '--quantization {"quantizaton":"wint8","mpl":"wint4"}',
            [
                "quantization.quantizaton: unknown part, expected attention, mlp, experts, head; "
                "did you mean 'quantization'?",
                "quantization.mpl: unknown part, expected attention, mlp, experts, head; did you mean 'mlp'?",
            ],
        ),
        (
            '--structured-outputs-config {"bakend":"auto","x":1}',
            [
                "--structured-outputs-config.bakend: is refused, leave it out; available keys: backend, "
                "reasoning_parser; did you mean 'backend'?",
                "--structured-outputs-config.x: is refused, leave it out; available keys: backend, reasoning_parser",
            ],
        ),
    ],
)
def test_all_unknown_keys_of_a_mapping_are_named_at_once(flags: str, lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", *flags.split()])
    assert str(caught.value).split("\n") == lines


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ("--port ${PORT}", "got '${PORT}'; a shell variable was not set: no shell has replaced ${PORT}, as in single "),
        ("--max-model-len $len", "got '$len'; a shell variable was not set: no shell has replaced $len, as in single "),
    ],
)
def test_a_shell_variable_that_was_not_replaced_is_named(flags: str, end: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(end)):
        parse_serve_args(["demo", *flags.split()])


@pytest.mark.parametrize("flags", ["--port $5", "--port 5$", "--scheduler-port {}"])
def test_other_wrong_values_name_no_shell_variable(flags: str) -> None:
    with pytest.raises(ConfigError, match="expected an integer") as caught:
        parse_serve_args(["demo", *flags.split()])
    assert "shell" not in str(caught.value)


def test_equal_values_of_a_flag_and_its_counterpart_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api_server_count: 2\n")
    assert parse_serve_args(["demo", "--workers", "2", "--config", str(file)]).server.workers == 2
    file.write_text("api_server_count: 3\n")
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", "--workers", "2", "--config", str(file)])
    assert str(caught.value) == f"api_server_count 3: contradicts --workers 2 ({file})"


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--dtype flaot32", "got 'flaot32'; did you mean 'float32'?"),
        ("--reasoning-parser qwen", "got 'qwen'; did you mean 'qwen3'?"),
        ("--tool-call-parser hermess", "got 'hermess'; did you mean 'hermes'?"),
        ("--quantization wint-4", "got 'wint-4'; did you mean 'wint4'?"),
        ('--speculative-config {"method":"ngrm"}', "did you mean 'ngram'?"),
    ],
)
def test_wrong_value_of_a_list_has_the_nearest_one(flags: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", *flags.split()])
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize("name", ["WINT4", "Wint4", "wint4"])
def test_quantization_is_known_in_any_case(name: str) -> None:
    assert str(parse_serve_args(["demo", "--quantization", name]).engine.quantization) == "wint4"
    mapping = engine_config_from_kwargs({"model": "demo", "quantization": {"mlp": name}})[0]
    assert mapping.quantization.mlp == "wint4"
