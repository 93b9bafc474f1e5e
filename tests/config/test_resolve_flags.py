# SPDX-License-Identifier: Apache-2.0
"""How the command line shows errors about flags: in the spelling in which they are typed, wherever that is known."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fastdeploy.config.args import engine_config_from_kwargs, parse_engine_args, parse_serve_args
from fastdeploy.config.resolve_flags import errors_name_the_origin
from fastdeploy.core.errors import ConfigError, ConfigErrors, error_lines


def lines_of(*flags: str) -> list[str]:
    """Return what the command line prints for wrong flags, without its beginning."""
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", *flags])
    return [line.removeprefix("fastdeploy: error: ") for line in error_lines(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--max_num_seqs 0", "--max-num-seqs: expected an integer in [1, 65536], got 0"),
        ("--dtype x", "--dtype: expected one of auto, bfloat16, float32, got 'x'"),
        ("--ssl-keyfile a", "--ssl-certfile: --ssl-keyfile and --ssl-certfile must be given together"),
        ("--splitwise-role prefill", "--splitwise-role: 'prefill' needs --scheduler-name splitwise"),
        (
            "--num-speculative-tokens 5 --spec-method ngram --max-num-batched-tokens 4",
            "--max-num-batched-tokens: expected more than --num-speculative-tokens 5, got 4",
        ),
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens 0",
            "--speculative-config.num_speculative_tokens: expected an integer in [1, 16], got 0",
        ),
    ],
)
def test_flags_of_the_command_line_have_one_spelling(flags: str, line: str) -> None:
    assert lines_of(*flags.split()) == [line]


def test_notes_about_keys_of_a_mapping_have_the_spelling_of_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative_config: {method: ngram, verify_window: 2}\n")
    mapping = '{"method": "ngram", "verify_window": 2}'
    for flags, shown in (
        (("--speculative_config", mapping), "--speculative-config"),
        (("--config", str(file)), "speculative_config"),
    ):
        [note] = parse_serve_args(["demo", *flags]).notes
        assert note == f"{shown}.verify_window 2 has no effect: the whole allowed set is verified"


def test_values_paths_and_names_of_files_are_no_flags() -> None:
    message = (
        "expected max_num_seqs, got 'max_num_seqs', /max_num_seqs/x, max_num_seqs.json, a.max_num_seqs, rope_theta"
    )
    with pytest.raises(ConfigError) as caught, errors_name_the_origin({}):
        raise ConfigError("rope_scaling", message)
    assert caught.value.typed == f"rope_scaling: {message.replace('max_num_seqs', '--max-num-seqs', 1)}"
    with pytest.raises(ConfigError) as caught, errors_name_the_origin({"tokenizer": "command line"}):
        raise ConfigErrors([ConfigError("model", "no weights"), ConfigError("tokenizer", "is broken")])
    assert error_lines(caught.value).splitlines() == [
        "fastdeploy: error: model: no weights",  # which may be about a draft model
        "fastdeploy: error: --tokenizer: is broken",
    ]


def test_keys_of_a_file_keep_their_spelling(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max_num_seqs: 0\nmax_model_len: 900\n")
    flags = ("--config", str(file), "--no-enable-chunked-prefill", "--max-num-batched-tokens", "100")
    assert lines_of(*flags) == [
        f"max_num_seqs: expected an integer in [1, 65536], got 0 ({file})",
        "--max-num-batched-tokens: expected at least max_model_len 900 without chunked prefill, got 100",
    ]


def test_fields_are_python_names_wherever_an_error_comes_from() -> None:
    for parse in (parse_serve_args, parse_engine_args):
        with pytest.raises(ConfigError) as caught:
            parse(["demo", "--max-num-seqs", "0"])
        assert (caught.value.field, str(caught.value).split(":")[0]) == ("max_num_seqs", "max_num_seqs")
        assert error_lines(caught.value).startswith("fastdeploy: error: --max-num-seqs: ")
        copied = pickle.loads(pickle.dumps(caught.value))
        assert error_lines(copied) == error_lines(caught.value)


def test_arguments_of_llm_keep_their_python_names() -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config_from_kwargs({"model": "demo", "max_num_seqs": 0})
    assert error_lines(caught.value) == "fastdeploy: error: max_num_seqs: expected an integer in [1, 65536], got 0"


def test_the_place_of_an_error_is_kept_when_its_origin_is_added() -> None:
    with pytest.raises(ConfigError) as caught, errors_name_the_origin({}):
        int_of_x()
    assert caught.traceback[-1].name == "int_of_x"


def int_of_x() -> None:
    raise ConfigError("seed", "expected an integer")
