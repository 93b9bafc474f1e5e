# SPDX-License-Identifier: Apache-2.0
"""Packed weights whose header was rewritten, with a right digest, load the same bits or are refused in one line."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import DATA_FILE, HEADER_FILE, _digest, read_packed_header
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import load_model
from fastdeploy.models.packing import pack_checkpoint
from tests.models.model_driver import GOLDEN, Driver

MODELS = {"glm4_moe": "wint8", "llama_untied_bias": "none", "ernie4_5": "w4a8", "latent/glm4_moe_lite_bias": "wint4"}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 16, 4096, 2**31, 2**64, 0.0, 256.0, 1e300, "", "x", [], {}, [1], {"x": 1}),
    *("bfloat16", "float32", "uint8", "int8", "none", "wint8", "wint4"),
    *("Tensor", "PackedLinear", "PackedExperts", "PackedHeads"),
)
TOKENS = [1, 2, 3, 4]


def write_header(folder: Path, content: Any) -> None:
    header = json.loads((folder / HEADER_FILE).read_text())
    digest = _digest(content)
    (folder / HEADER_FILE).write_text(json.dumps({**header, "content": content, "digest": digest}))


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value."""
    for key in range(len(tree)) if isinstance(tree, list) else tree:
        yield (*path, key)
        if isinstance(tree[key], (dict, list)):
            yield from leaves(tree[key], (*path, key))


def mutate(chance: random.Random, content: Any) -> tuple[Any, ...]:
    """Change one value, most often of an entry; return its path."""
    paths = list(leaves(content["entries"], ("entries",))) if chance.random() < 0.9 else list(leaves(content))
    *parents, key = path = chance.choice(paths)
    parent = content
    for step in parents:
        parent = parent[step]
    kind, value = chance.random(), parent[key]
    if kind < 0.1:
        del parent[key]
    elif kind < 0.2 and isinstance(parent, dict):
        parent["bias" if chance.random() < 0.5 else "unknown"] = deepcopy(chance.choice([value, *VALUES]))
    elif kind < 0.4 and type(value) is int:
        parent[key] = chance.choice([value + 1, value - 1, 2 * value, -value, float(value), str(value), value // 2])
    elif kind < 0.5 and isinstance(value, list) and value:
        parent[key] = chance.choice([value[::-1], [*value, 1], [1, *value], value[1:], [int(np.prod(value))]])
    elif kind < 0.7:
        other = content
        for step in chance.choice(paths):
            other = other[step] if step in other or isinstance(other, list) else other
        parent[key] = deepcopy(other)
    else:
        parent[key] = deepcopy(chance.choice(VALUES))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_rewritten_headers_load_the_same_bits_or_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    formats = QuantizationConfig.from_value(MODELS[name])
    folder = tmp_path / "packed"
    pack_checkpoint(ModelConfig.from_pretrained(GOLDEN / name, dtype="bfloat16"), folder, formats)
    content = json.loads((folder / HEADER_FILE).read_text())["content"]
    expected = logits(folder)
    num_same, num_refused, chance = 0, 0, random.Random(name)
    for index in range(170):
        mutated = deepcopy(content)
        path = mutate(chance, mutated)
        if mutated == content and str(mutated) == str(content):
            continue
        write_header(folder, mutated)
        try:
            found = logits(folder)
        except ConfigError as error:
            message, names = str(error), {*content["entries"], "unknown", "bias"}
            assert "\n" not in message and (DATA_FILE in message or str(folder) in message), (index, path)
            if path[0] == "entries" and len(path) > 1:
                assert any(entry in message for entry in names), (index, path, message)
            num_refused += 1
        else:
            np.testing.assert_array_equal(found, expected, err_msg=f"{index} {path}")
            num_same += 1
    assert num_refused > 100 and num_same < 40


def logits(folder: Path) -> Any:
    model = load_model(ModelConfig.from_pretrained(folder), max_rows=16, max_model_len=32)
    return Driver(model, num_blocks=4).run_alone(TOKENS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("shape", [8, 4], "model.norm.weight has data bfloat16[8, 4], config.json implies bfloat16[32]"),
        ("shape", [32.0], "model.norm.weight, tensor data, shape: expected an integer, got 32.0"),
        ("shape", [-32], "model.norm.weight, tensor data, shape: expected at least 1, got -32"),
        ("dtype", "float64", "model.norm.weight, tensor data: expected a dtype of uint8, int8, bfloat16, float32"),
        ("offset", 8, "model.norm.weight, tensor data: expected an offset that is a multiple of 4096, got 8"),
        ("note", 8, "model.norm.weight, tensor data: unknown key 'note'"),
    ],
)
def test_the_file_and_the_entry_are_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    folder = tmp_path / "packed"
    pack_checkpoint(ModelConfig.from_pretrained(GOLDEN / "ernie4_5"), folder, QuantizationConfig.from_value("wint8"))
    assert read_packed_header(folder) is not None
    content = json.loads((folder / HEADER_FILE).read_text())["content"]
    content["entries"]["model.norm.weight"]["tensors"]["data"][key] = value
    write_header(folder, content)
    with pytest.raises(ConfigError) as caught:
        logits(folder)
    assert message in str(caught.value) and str(folder) in str(caught.value)


def test_a_field_of_another_type_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    pack_checkpoint(ModelConfig.from_pretrained(GOLDEN / "ernie4_5"), folder, QuantizationConfig.from_value("wint8"))
    content = json.loads((folder / HEADER_FILE).read_text())["content"]
    entry = next(name for name in content["entries"] if name.endswith("q_proj+k_proj+v_proj"))
    for field, value, problem in (
        ("in_features", 32.0, "has in_features 32.0, config.json implies 32"),
        ("bias", 0, "has bias 0, config.json implies None"),
        ("stride", 0, "has an unknown field stride"),
    ):
        mutated = deepcopy(content)
        mutated["entries"][entry]["fields"][field] = value
        write_header(folder, mutated)
        with pytest.raises(ConfigError) as caught:
            logits(folder)
        assert f"{folder}/{DATA_FILE}: {entry} {problem}" in str(caught.value)
