# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of compressed-tensors that are damaged, by accident or on purpose: loaded, or refused with one error."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import load_model
from tests.models.compressed_tensors_files import (
    FOLDER,
    NAMES,
    StoredTensor,
    Tensors,
    coded_modules,
    config_of,
    read_tensors,
    write_tensors,
)
from tests.models.test_checkpoint_fuzz import VALUES, damage_bytes, replace_value
from tests.models.test_gguf_fuzz import bounded_memory

MAX_S, MAX_MORE_BYTES = 60.0, 2**30
PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_x")
KEYS = [
    *("format", "ignore", "config_groups", "targets", "weights", "num_bits", "group_size", "strategy", "symmetric"),
    *("type", "input_activations", "output_activations", "kv_cache_scheme", "sparsity_config", "transform_config"),
]
KINDS = {"I8": "i1", "I32": "i4", "I64": "i8", "F16": "f2", "BF16": "u2", "F32": "f4", "U8": "u1", "F8_E4M3": "u1"}


def damage_tensor(chance: random.Random, tensors: Tensors) -> str:
    """Change the name, type, shape or values of a tensor of a module, leave it out or add one."""
    module = chance.choice(coded_modules(tensors))
    part = chance.choice([part for part in PARTS if f"{module}.{part}" in tensors])
    name = f"{module}.{part}"
    tensor = tensors[name]
    match chance.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[f"{module}.{chance.choice(PARTS)}"] = tensors.pop(name)
        case 2:
            rows, columns = (*tensor.values.shape, 1)[:2]
            shape = chance.choice(
                ((rows, columns + 1), (rows + 1, columns), (columns, rows), (rows,), (), (0, columns))
            )
            tensor.values = np.resize(tensor.values, shape)
        case 3:
            tensor.kind = chance.choice(list(KINDS))
            with np.errstate(all="ignore"):
                tensor.values = tensor.values.astype(KINDS[tensor.kind])
        case 4 | 5:
            flat, extreme = tensor.values.reshape(-1), np.frombuffer(chance.choice((b"\xff", b"\x7f", b"\0")) * 8, "u1")
            begin = chance.randrange(flat.size)
            flat[begin : begin + chance.choice((1, 8, flat.size))] = extreme.view(flat.dtype)[0]
        case _:
            inputs = chance.choice((128, 64, 32, 576))
            order = [chance.randrange(chance.choice((1, 4, 40))) for _ in range(inputs)]
            name = f"{module}.weight_g_idx"
            tensors[name] = StoredTensor("I32", np.array(order, np.int32))
    return name


def damage_config(chance: random.Random, config: dict[str, Any]) -> str:
    tree = config["quantization_config"]
    group = chance.choice(list(tree["config_groups"].values()))
    of_weights = {
        **{"num_bits": (2, 3, 4, 6, 8, 16), "group_size": (-1, 0, 1, 16, 32, 64, 96, 128, 2**40)},
        **{"strategy": ("tensor", "channel", "group", "block", "token"), "symmetric": (True, False)},
        **{"type": ("int", "float"), "block_structure": ([128, 128], [0, 1], "x")},
    }
    if chance.random() < 0.5:
        key = chance.choice(list(of_weights))
        group["weights"][key] = chance.choice((*of_weights[key], chance.choice(VALUES)))
        return key
    if chance.random() < 0.3:
        group["targets"] = chance.choice((["Linear"], ["re:.*"], ["re:.*mlp.*"], ["re:["], [], ["Embedding"]))
        return "targets"
    replace_value(chance, tree, KEYS)
    return "config.json"


def has_groups(config: dict[str, Any]) -> bool:
    """Return whether there is something to damage."""
    groups = config.get("config_groups")
    return (
        isinstance(groups, dict)
        and all(isinstance(group, dict) and isinstance(group.get("weights"), dict) for group in groups.values())
        and bool(groups)
    )


def write_damaged(chance: random.Random, folder: Path) -> str:
    """Write a checkpoint with a few mistakes; return what they are in."""
    name = chance.choice(NAMES)
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    if chance.random() < 0.1:
        file = folder / "model.safetensors"
        file.write_bytes(damage_bytes(chance, file.read_bytes()))
        return f"{name}: bytes"
    tensors, config = read_tensors(folder), json.loads((folder / "config.json").read_text())
    damages = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        is_tensor = chance.random() < 0.7
        damages.append(damage_tensor(chance, tensors) if is_tensor else damage_config(chance, config))
        if (
            not isinstance(config.get("quantization_config"), dict)
            or "config_groups" not in config["quantization_config"]
        ):
            break
        if not isinstance(config["quantization_config"]["config_groups"], dict):
            break
    write_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return f"{name}: {', '.join(damages)}"


def check_damaged_checkpoints(folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Read damaged checkpoints; return how many were loaded and how many refused."""
    chance, num_loaded, num_refused = random.Random(seed), 0, 0
    for index in range(count):
        place = folder / str(index)
        damaged, begin = write_damaged(chance, place), time.monotonic()
        case = f"seed {seed}, number {index}: {damaged}"
        try:
            with bounded_memory(MAX_MORE_BYTES):
                config = config_of(place, dtype=chance.choice(("auto", "bfloat16", "float32")))
                load_model(config, max_rows=16, max_model_len=64, quantization=config.weight_formats(UNQUANTIZED))
            num_loaded += 1
        except ConfigError as error:
            message = str(error)
            assert len(message) < 4000 and "\n" not in message and str(place) in message, f"{case}: {message[:300]}"
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"{case} raised {error!r:.200}") from error
        assert time.monotonic() - begin < MAX_S, case
        shutil.rmtree(place)
    return num_loaded, num_refused


def test_damaged_checkpoints_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    num_loaded, num_refused = check_damaged_checkpoints(tmp_path, 100, seed=1)
    assert num_loaded > 5 and num_refused > 50, "both happen often"


@pytest.mark.nightly
def test_a_thousand_damaged_checkpoints_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    check_damaged_checkpoints(tmp_path, 1000, seed=2)
