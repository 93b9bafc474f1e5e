# SPDX-License-Identifier: Apache-2.0
"""Modules get the schemes that the package compressed-tensors gives them."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.config.coded.compressed_tensors_config import CompressedTensorsConfig, parse_compressed_tensors
from fastdeploy.core.errors import ConfigError

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.down_proj"


def parse(groups: dict[int, list[str]], **keys: Any) -> CompressedTensorsConfig:
    """Return a configuration whose schemes have groups of these sizes."""
    schemes = {
        f"group_{size}": {"targets": targets, "weights": {"num_bits": 4, "group_size": size}}
        for size, targets in groups.items()
    }
    return parse_compressed_tensors({"config_groups": schemes, **keys}, "config.json: ")


@pytest.mark.parametrize(
    ("groups", "module", "size"),
    [
        ({32: ["Linear"]}, Q, 32),
        ({32: ["Linear"]}, "model.embed_tokens", None),
        ({32: ["Embedding"]}, "model.embed_tokens", 32),
        ({32: ["Linear"], 64: [Q]}, Q, 64),
        ({64: [Q], 32: ["re:.*q_proj"]}, Q, 64),
        ({32: ["re:.*q_proj"], 64: [Q]}, Q, 64),
        ({32: ["Linear"], 64: ["re:.*q_proj"]}, Q, 64),
        ({32: ["re:.*z"], 64: ["re:.*q_proj"], 128: ["re:.*_proj"]}, Q, 128),  # in alphabetical order
        ({32: ["re:.*q_proj"], 64: ["re:.*q_proj"]}, Q, 64),  # the last one with a target
        ({32: ["re:q_proj"]}, Q, None),  # an expression fits from the start
        ({32: ["re:model\\.layers\\.1\\."]}, DOWN, None),
        ({32: ["re:model\\.layers\\.1"]}, DOWN, 32),  # and need not fit to the end
        ({32: ["q_proj"]}, Q, None),
        ({32: ["layers.0.self_attn.q_proj"]}, Q, 32),  # as a bare decoder's file names it
        ({32: ["re:layers\\.0"]}, Q, 32),
        ({32: []}, Q, None),
    ],
)
def test_a_module_has_the_scheme_of_its_name_then_of_an_expression_then_of_its_class(
    groups: dict[int, list[str]], module: str, size: int | None
) -> None:
    scheme = parse(groups).scheme_of(module)
    assert (scheme and scheme.group_size) == size


@pytest.mark.parametrize(
    ("ignore", "module", "expected"),
    [
        (["lm_head"], "lm_head", True),
        (["lm_head"], Q, False),
        (["re:.*lm_head"], "lm_head", True),
        (["re:.*mlp.*"], DOWN, True),
        (["Linear"], DOWN, True),
        ([Q], Q, True),
        (None, Q, False),
    ],
)
def test_modules_are_ignored_by_the_same_rules(ignore: list[str] | None, module: str, expected: bool) -> None:
    assert parse({32: ["Linear"]}, ignore=ignore).ignores(module) == expected


@pytest.mark.parametrize(
    ("weights", "strategy", "size"),
    [
        ({"num_bits": 8}, "tensor", 0),
        ({"num_bits": 8, "group_size": -1}, "channel", 0),
        ({"num_bits": 8, "group_size": 64}, "group", 64),
        ({"num_bits": 8, "group_size": 64, "strategy": "channel"}, "channel", 0),
        ({}, "tensor", 0),
    ],
)
def test_the_strategy_follows_from_the_size_of_groups(weights: dict[str, Any], strategy: str, size: int) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    (scheme,) = parse_compressed_tensors({"config_groups": groups}, "").schemes
    assert (scheme.num_bits, scheme.strategy, scheme.group_size) == (8, strategy, size)


@pytest.mark.parametrize(
    ("inputs", "row_bits"),
    [(None, 16), ({}, 8), ({"num_bits": 4}, 8), ({"num_bits": 8, "type": "float"}, 8), ({"num_bits": 16}, 16)],
)
def test_inputs_have_eight_bits_if_the_checkpoint_quantizes_them(inputs: dict[str, Any] | None, row_bits: int) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": inputs}
    (scheme,) = parse_compressed_tensors({"config_groups": {"group_0": group}}, "").schemes
    assert scheme.row_bits == row_bits


def test_what_has_no_effect_is_noted_and_null_means_nothing() -> None:
    config = parse({32: ["Linear"]}, kv_cache_scheme={"num_bits": 8}, ignore=None, sparsity_config={}, format=None)
    assert config.notes == (
        "config.json: quantization_config.kv_cache_scheme has no effect: --kv-cache-dtype says how keys and values are "
        "stored",
    )
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "output_activations": {"num_bits": 8}},
        "group_1": {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": {"num_bits": 8}},
    }
    found = parse_compressed_tensors({"config_groups": groups, "kv_cache_scheme": None}, "f: ")
    assert len(found.schemes) == 1 and len(found.notes) == 2
    assert "group_0: output_activations has no effect" in found.notes[0]
    assert "group_1 has no effect: it quantizes no weights" in found.notes[1]


def test_only_integers_have_codes_that_are_kept() -> None:
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": fp8}}
    assert not parse_compressed_tensors({"config_groups": groups}, "").has_integers
    groups["group_1"] = {"targets": [Q], "weights": {"num_bits": 4}}
    assert parse_compressed_tensors({"config_groups": groups}, "").has_integers


def test_an_error_names_the_file_and_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^quantization_config\.config_groups\.group_0: .*") as caught:
        parse_compressed_tensors({"config_groups": {"group_0": {"targets": 1}}}, "config.json: ")
    assert "config.json: expected a list of strings" in str(caught.value)
