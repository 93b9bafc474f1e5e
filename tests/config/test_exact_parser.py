# SPDX-License-Identifier: Apache-2.0
"""Flags with one hyphen are known by their whole name or not at all."""

from __future__ import annotations

from itertools import product
from string import ascii_letters, ascii_lowercase

import pytest

from fastdeploy.config.args import engine_config_from_kwargs, make_parser, parse_serve_args
from fastdeploy.config.exact_parser import ExactParser
from fastdeploy.config.flags import FLAGS
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.parser import CommandParser

SHORT = {flag.short: flag for flag in FLAGS if flag.short}
NAMES = [
    "-" + "".join(letters)
    for length, alphabet in ((1, ascii_letters), (2, ascii_letters), (3, ascii_lowercase))
    for letters in product(alphabet, repeat=length)
]

BATCH = 200  # argparse takes time that grows with the square of their number


def command_parser() -> CommandParser:
    parser = CommandParser("tokenizer", "")
    parser.add_argument("-i", "--info", action="store_true")
    parser.add_argument("-vs", "--vocab-size", action="store_true")
    parser.add_argument("-e", "--encode")
    return parser


@pytest.mark.parametrize("parser", [make_parser(), command_parser()], ids=["serve", "command"])
@pytest.mark.parametrize("value", ["", "=4"])
def test_no_other_name_of_one_to_three_letters_sets_a_flag(parser: ExactParser, value: str) -> None:
    known = {name for action in parser._actions for name in action.option_strings}
    others = [name + value for name in NAMES if name not in known]
    nothing = parser.parse_args([])
    for begin in range(0, len(others), BATCH):
        batch = others[begin : begin + BATCH]
        assert parser.parse_exactly(batch) == (nothing, batch)


@pytest.mark.parametrize("name", SHORT)
def test_each_short_name_is_its_flag_and_no_other_one(name: str) -> None:
    is_switch = SHORT[name].kind == "bool"
    namespace, unknown = make_parser().parse_exactly([name] if is_switch else [name, "4"])
    assert (vars(namespace), unknown) == ({SHORT[name].name: True if is_switch else "4"}, [])


@pytest.mark.parametrize("word", ["-e", "-s", "-tp2", "-n1", "-qwint8", "-ngl4", "-dpx=3"])
def test_a_name_that_is_not_known_is_an_error_that_names_it(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", word, "4"])
    assert str(caught.value).startswith(f"{word.split('=')[0]}: unknown flag")


@pytest.mark.parametrize("word", ["-i=e", "-vs=e"])
def test_letters_after_an_equals_sign_are_no_flags(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_parser().parse_own([word])
    assert str(caught.value) == f"{word[:-2]}: takes no value, got 'e'"
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["demo", "-ep=tx"])
    assert str(caught.value) == "-ep: takes no value, got 'tx'"


@pytest.mark.parametrize("words", ["-tp 2", "-tp=2"])
def test_a_value_is_a_word_of_its_own_or_follows_an_equals_sign(words: str) -> None:
    notes = parse_serve_args(["demo", *words.split()]).notes
    assert notes == ("--tensor-parallel-size 2 has no effect: on the CPU one rank uses all cores",)


def test_short_switches_take_true_and_false_too() -> None:
    for words in ("-ep=false", "-ep False"):
        assert parse_serve_args(["demo", *words.split()]).notes == ()
    with pytest.raises(ConfigError, match="--enable-expert-parallel"):
        parse_serve_args(["demo", "-ep=true"])


@pytest.mark.parametrize("words", ["-O3", "-O=3", "-O 3"])
def test_the_optimization_level_may_follow_its_letter(words: str) -> None:
    notes = parse_serve_args(["demo", *words.split()]).notes
    assert notes == ("--optimization-level 3 has no effect: there is no graph compiler",)


def test_a_command_of_llama_cpp_sets_the_flags_that_its_own_stand_for() -> None:
    args = parse_serve_args(["-m", "demo", "-c", "8k", "-np", "4", "-ngl", "99", "--port", "8080"])
    assert (args.engine.model, args.engine.max_model_len, args.engine.scheduler.max_num_seqs) == ("demo", 8000, 4)
    assert args.server.port == 8080
    assert args.notes == (
        "--n-gpu-layers 99 has no effect: --device gpu places all layers on the GPU, --device cpu none",
    )
    assert args.provenance["max_model_len"] == args.provenance["max_num_seqs"] == "command line"


@pytest.mark.parametrize("words", ["-c 0 -np -1 -t -1", "--ctx-size 0 --parallel -1 --threads -1"])
def test_the_defaults_of_llama_cpp_are_ours(words: str) -> None:
    args = parse_serve_args(["demo", *words.split()])
    assert (args.engine, args.notes) == (parse_serve_args(["demo"]).engine, ())


@pytest.mark.parametrize("words", ["-t 4", "--threads 4", "-t=4", "-tb 4"])
def test_a_number_of_threads_is_refused_with_what_to_use(words: str) -> None:
    with pytest.raises(ConfigError, match=r"^--threads.* 4: is refused, leave it out: choose cores with `taskset"):
        parse_serve_args(["demo", *words.split()])


def test_llm_knows_the_long_names_of_llama_cpp() -> None:
    config, _ = engine_config_from_kwargs({"model": "demo", "ctx_size": 512, "parallel": 4})
    assert (config.max_model_len, config.scheduler.max_num_seqs) == (512, 4)
    with pytest.raises(ConfigError, match=r"^parallel: expected an integer, got 'x'$"):
        engine_config_from_kwargs({"model": "demo", "parallel": "x"})
