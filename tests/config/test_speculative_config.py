# SPDX-License-Identifier: Apache-2.0
"""What a speculative configuration accepts, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.config.speculative_config import METHODS, MTPConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError, ConfigErrors


def test_naive_forces_zero_drafts() -> None:
    assert parse_speculative_config({"method": "naive", "num_speculative_tokens": 1}).num_speculative_tokens == 0


@pytest.mark.parametrize("method", ["ngram", "ngram_match", "[ngram]", "NGRAM"])
def test_ngram_has_its_aliases(method: str) -> None:
    config = parse_speculative_config({"method": method, "num_speculative_tokens": 5, "prompt_lookup_max": 4})
    assert (config.method, config.num_speculative_tokens) == ("ngram", 5)
    assert (config.max_ngram_size, config.min_ngram_size) == (4, 2)


def test_min_ngram_follows_a_small_max() -> None:
    assert parse_speculative_config({"method": "ngram", "max_ngram_size": 1}).min_ngram_size == 1


def test_suffix_takes_the_documented_keys() -> None:
    config = parse_speculative_config(
        {
            "method": "suffix",
            "num_speculative_tokens": 4,
            "suffix_decoding_max_tree_depth": 32,
            "suffix_decoding_max_cached_requests": 10000,
            "suffix_decoding_max_spec_factor": 2,
            "suffix_decoding_min_token_prob": 0.2,
            "suffix_decoding_max_cache_bytes": 1 << 24,
        }
    )
    assert (config.method, config.num_speculative_tokens) == ("suffix", 4)
    assert (config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests) == (32, 10000)
    assert (config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob) == (2, 0.2)
    assert config.suffix_decoding_max_cache_bytes == 1 << 24


@pytest.mark.parametrize("method", METHODS)
def test_a_mapping_made_of_a_configuration_makes_it_again(method: str) -> None:
    config = parse_speculative_config(
        {"method": method, **({} if method in ("naive", "ngram", "suffix", "mtp") else {"model": "demo"})}
    )
    assert parse_speculative_config(config.to_mapping()) == config


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "ernie_mtp", "MTP"])
def test_mtp_makes_one_draft_pass_per_draft_by_default(method: str) -> None:
    config = parse_speculative_config({"method": method, "num_speculative_tokens": 3})
    assert (config.method, config.num_speculative_tokens, config.num_model_steps) == ("mtp", 3, 3)
    config = parse_speculative_config({"method": method, "num_speculative_tokens": 5, "num_model_steps": 2})
    assert (config.num_speculative_tokens, config.num_model_steps) == (5, 2)
    assert (config.model, config.quantization, config.extension) == (None, None, None)


def test_an_mtp_layer_reads_normed_states_by_default() -> None:
    default, raw = (parse_speculative_config({"method": "mtp", **key}) for key in ({}, {"mtp_hidden_state": "raw"}))
    assert isinstance(default, MTPConfig) and isinstance(raw, MTPConfig)
    assert (default.mtp_hidden_state, raw.mtp_hidden_state) == ("normed", "raw")
    assert parse_speculative_config(raw.to_mapping()) == raw


@pytest.mark.parametrize(("strategy", "extension"), [("with_ngram", "ngram"), ("with_suffix", "suffix")])
def test_a_hybrid_has_the_keys_of_both_methods_and_one_draft_pass(strategy: str, extension: str) -> None:
    key = {"ngram": "max_ngram_size", "suffix": "suffix_decoding_max_tree_depth"}[extension]
    given = {"method": "mtp", "mtp_strategy": strategy, "num_speculative_tokens": 5, key: 7}
    config = parse_speculative_config(given)
    assert isinstance(config, MTPConfig) and config.extension is not None
    assert (config.extension.method, config.num_model_steps, getattr(config.extension, key)) == (extension, 1, 7)
    assert config.extension.num_speculative_tokens == 5
    assert parse_speculative_config(config.to_mapping()) == config


def test_suffix_keys_under_mtp_mean_a_hybrid_that_needs_no_layer() -> None:
    given = {"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 32}
    config = parse_speculative_config(given)
    assert isinstance(config, MTPConfig) and not config.needs_layer
    assert parse_speculative_config(config.to_mapping()) == config
    alone = given | {"method": "suffix"}
    assert config.extension == parse_speculative_config(alone)


def test_mtp_has_a_model_and_a_format_of_its_own() -> None:
    given = {"method": "mtp", "model": "demo", "quantization": "wint4", "mtp_strategy": "default"}
    config = parse_speculative_config(given)
    assert (config.model, config.quantization, config.num_model_steps) == ("demo", "wint4", 1)


def test_a_name_on_a_hub_leaves_the_method_to_the_files() -> None:
    given = {"model": "facebook/opt-125m", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 4}
    config = parse_speculative_config({**given, "revision": "v1", "gguf_file": "a.gguf", "quantization": "wint8"})
    assert (config.method, config.num_speculative_tokens, config.model) == ("by_files", 5, "facebook/opt-125m")
    assert (config.revision, config.gguf_file, config.quantization) == ("v1", "a.gguf", "wint8")
    ranks = "speculative_config.draft_tensor_parallel_size 4 has no effect: on the CPU one rank uses all cores"
    assert config.notes == (ranks,)
    assert parse_speculative_config(config.to_mapping()) == config


def test_methods_that_match_text_have_the_largest_default_of_drafts() -> None:
    methods = ("ngram", "suffix", "mtp")
    assert [parse_speculative_config({"method": m}).num_speculative_tokens for m in methods] == [16, 16, 1]


def test_suffix_alone_uses_the_documented_defaults() -> None:
    config = parse_speculative_config({"method": "suffix"})
    assert config.num_speculative_tokens == 16
    assert (config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests) == (64, -1)
    assert (config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob) == (1.0, 0.1)


@pytest.mark.parametrize(
    ("mapping", "field", "text"),
    [
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "max_tree_depth", r"\[2, 255\]"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -2}, "max_cached_requests", r"\[-1, "),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, "max_spec_factor", r"\[0, 64\]"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("nan")}, "max_spec_factor", "number"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob", r"\[0, 1\]"),
        ({"method": "suffix", "suffix_decoding_max_cache_bytes": 1}, "max_cache_bytes", "1048576"),
        ({"method": "suffix", "suffix_decoding_snapshot_path": "a"}, "snapshot_path", "is refused, leave it out"),
        ({"method": "suffix", "suffix_decoding_min_prob": 0.1}, "suffix_decoding_min_prob", "min_token_prob"),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.1}, "min_token_prob", "belongs to method 'suffix'"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "max_ngram_size", "belongs to method 'ngram'"),
        ({"method": "mtp", "mtp_strategy": "default", "suffix_decoding_max_tree_depth": 64}, "depth", "'suffix'"),
        ({"method": "mtp", "mtp_strategy": "with_ngram", "suffix_decoding_min_token_prob": 0}, "prob", "'suffix'"),
        ({"method": "mtp", "mtp_strategy": "with_suffix", "max_ngram_size": 3}, "max_ngram_size", "'ngram'"),
        ({"method": "ngram", "max_ngram_size": 17}, "max_ngram_size", r"\[1, 16\], got 17"),
        ({"method": "mtp", "num_speculative_tokens": 17}, "num_speculative_tokens", r"\[1, 16\], got 17"),
        ({"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 0}, "num_model_steps", r"\[1, 16\]"),
        ({"method": "mtp", "num_model_steps": 2}, "num_model_steps", "at most num_speculative_tokens 1, got 2"),
        (
            {"method": "mtp", "mtp_strategy": "hybrid"},
            "mtp_strategy",
            "expected one of default, with_ngram, with_suffix",
        ),
        (
            {"method": "mtp", "mtp_hidden_state": "before"},
            "mtp_hidden_state",
            "expected one of normed, raw, got 'before'",
        ),
        ({"method": "ngram", "mtp_hidden_state": "raw"}, "mtp_hidden_state", "belongs to method 'mtp'"),
        ({"method": "mtp", "model": 3}, "model", "expected a directory or a name on a hub"),
        ({"method": "mtp", "quantization": "int3"}, "speculative_config.quantization", "expected one of none, wint8"),
        ({"method": "mtp", "prompt_lookup_max": 4}, "max_ngram_size", "belongs to method 'ngram'"),
        ({"method": "ngram", "num_model_steps": 1}, "num_model_steps", "belongs to method 'mtp' or 'draft_model' or"),
        ({"model": "owner/name", "mtp_hidden_state": "raw"}, "mtp_hidden_state", "'mtp', name the method, too"),
        ({"model": "owner/name", "num_speculative_tokens": 0}, "num_speculative_tokens", r"\[1, 16\]"),
        ({"method": "mtp", "revision": 3}, "revision", "expected a branch, tag or commit"),
        ({"method": "draft_model"}, "model", "is missing; method 'draft_model' needs a draft model"),
        ({"method": "draft_model", "model": ""}, "model", "is missing"),
        ({"model": "demo", "mtp_hidden_state": "raw"}, "mtp_hidden_state", "method 'mtp', the method is 'draft_model'"),
        ({"model": "demo", "quantization": "int3"}, "speculative_config.quantization", "expected one of none, wint8"),
        ({"model": "demo", "draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size", "at least 1, got 0"),
        ({"method": "ngram", "model": "demo"}, "model", "belongs to method 'mtp' or 'draft_model'"),
        ({"method": "ngram", "num_speculative_token": 1}, "num_speculative_token", "did you mean"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "num_speculative_tokens", r"\[1, 16\]"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens", "integer"),
        ({"method": "ngram", "verify_strategy": "best"}, "verify_strategy", "topp_relaxed"),
        ({"method": "ngram", "accept_policy": 3}, "accept_policy", "reject_all"),
        (
            {"method": "ngram", "max_ngram_size": 3, "min_ngram_size": 4},
            "min_ngram_size",
            "at most max_ngram_size 3, got 4",
        ),
        ({"method": "ngram", "max_ngram_size": 3, "prompt_lookup_max": 4}, "prompt_lookup_max", "twice"),
        ({"method": "ngram", "adaptive": 1}, "adaptive", "true or false"),
        ({"method": "naive", "adaptive": True}, "adaptive", "a method that drafts"),
        ({"method": "ngram", "adaptive": True, "accept_policy": "reject_all"}, "adaptive", "accept_policy normal"),
        ({"method": "ngram", "adaptive": True, "verify_strategy": "topp_relaxed"}, "adaptive", "topp_relaxed"),
        ({"method": "hydra"}, "method", "not available yet"),
        ({"method": "eagle3"}, "model", "is missing; method 'eagle3' needs a trained head"),
        ({"method": "unknown"}, "method", "naive, ngram"),
        ({}, "method", "is missing; expected one of naive, ngram"),
        ({"methd": "ngram"}, "methd", "unknown key; did you mean 'method'"),
        ({"method": "draft_model", "modle": "demo"}, "modle", "unknown key; did you mean 'model'"),
        ({"model": None, "methode": "mtp"}, "methode", "unknown key; did you mean 'method'"),
    ],
)
def test_errors_name_the_key_and_the_valid_values(mapping: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parse_speculative_config(mapping)
    assert caught.value.field.endswith(field)


@pytest.mark.parametrize(
    ("mapping", "fields"),
    [
        ({"method": "ngrm", "numm": 1, "max_ngram_siz": 2}, ["numm", "max_ngram_siz", "method"]),
        ({"numm": 1, "max_ngram_siz": 2}, ["numm", "max_ngram_siz"]),
        ({"method": "ngram", "num_model_steps": 1, "revision": "a"}, ["num_model_steps", "revision"]),
    ],
)
def test_all_wrong_keys_are_named_at_once(mapping: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse_speculative_config(mapping)
    assert [error.field for error in caught.value.errors] == [f"speculative_config.{field}" for field in fields]


@pytest.mark.parametrize(
    ("mapping", "adaptive"),
    [
        ({"method": "ngram"}, True),
        ({"method": "suffix", "adaptive": True}, True),
        ({"method": "suffix", "adaptive": False}, False),
        ({"method": "mtp"}, True),
        ({"method": "mtp", "mtp_strategy": "with_suffix"}, True),
        ({"model": "demo/draft"}, True),
        ({"method": "naive"}, False),
        ({"method": "ngram", "accept_policy": "accept_all"}, False),
        ({"method": "ngram", "verify_strategy": "topp_relaxed"}, False),
    ],
)
def test_methods_are_adaptive_by_default_where_this_is_lossless(mapping: dict[str, Any], adaptive: bool) -> None:
    config = parse_speculative_config(mapping)
    assert config.adaptive is adaptive
    assert parse_speculative_config(config.to_mapping()) == config


def test_keys_without_effect_are_noted() -> None:
    config = parse_speculative_config({"method": "ngram", "disable_padded_drafter_batch": "False"})
    assert config.notes == (
        "speculative_config.disable_padded_drafter_batch False has no effect: batches are never padded",
    )
