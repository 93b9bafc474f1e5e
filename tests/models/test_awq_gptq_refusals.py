# SPDX-License-Identifier: Apache-2.0
"""AWQ and GPTQ checkpoints whose tensors are not valid, or contradict config.json, are refused with one line."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import load_model
from fastdeploy.models.weight_report import weight_fates
from tests.models.awq_gptq_files import NAMES, copy_of, packed
from tests.models.compressed_tensors_files import StoredTensor, Tensors, config_of
from tests.models.test_gguf_fuzz import MAX_MORE_BYTES, MAX_S, bounded_memory

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
Change = Callable[[Tensors, dict[str, Any]], None]
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    8,
    16,
    31,
    32,
    33,
    64,
    96,
    128,
    2**31,
    -(2**40),
    1.5,
    "4",
    "",
    [],
    {},
    [[]],
)
KEYS = (
    *("bits", "group_size", "sym", "desc_act", "zero_point", "version", "checkpoint_format", "format", "w_bit"),
    *("modules_to_not_convert", "dynamic", "pack_dtype", "backend", "lm_head", "quant_method", "is_marlin_format"),
)
WORDS = ("gemm", "gptq_v2", "gptq", "awq", "marlin", ["down_proj"], {"-:.*down": {}}, {".*": {"bits": 8}}, {"(": {}})


def read_everything(folder: Path) -> None:
    """Read a checkpoint as a server does."""
    config = config_of(folder)
    formats = config.weight_formats(UNQUANTIZED)
    weight_fates(config, formats)
    load_model(config, max_rows=16, max_model_len=32, quantization=formats)


def put(name: str, values: Any, kind: str = "") -> Change:
    """Return a change that replaces a tensor's values, and its type if one is given."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        old = tensors.get(name, StoredTensor(kind, np.zeros(0)))
        tensors[name] = StoredTensor(kind or old.kind, np.asarray(values(old.values) if callable(values) else values))

    return change


def at(index: Any, value: Any) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        values[index] = value
        return values

    return change


def without(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name) and None


def renamed(name: str, new_name: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[new_name] = tensors.pop(name)

    return change


def keys(**values: Any) -> Change:
    return lambda tensors, config: config["quantization_config"].update(values)


GPTQ, AWQ = "gptq_128_short_group", "awq_64"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (GPTQ, without(f"{Q}.scales"), f"tensor {Q}.qweight belongs to codes without {Q}.scales"),
        (GPTQ, without(f"{Q}.qweight"), f"tensor {Q}.qzeros belongs to codes without {Q}.qweight"),
        (AWQ, without(f"{Q}.qzeros"), f"tensor {Q}.qweight belongs to codes without {Q}.qzeros"),
        ("gptq_reordered", without(f"{Q}.g_idx"), f"tensor {Q}.qweight belongs to codes without {Q}.g_idx"),
        (AWQ, put(f"{Q}.g_idx", np.zeros(64, np.int32), "I32"), f"tensor {Q}.g_idx has no meaning with AWQ"),
        (AWQ, put(f"{Q}.weight", np.zeros((64, 64), np.float32), "F32"), f"tensor {Q}.weight is there beside"),
        (
            AWQ,
            put("model.norm.weight", np.ones(64, np.int8), "I8"),
            "model.norm.weight is stored as I8, but belongs to no",
        ),
        (AWQ, put(f"{Q}.other", np.zeros(4, np.float32), "F32"), f"{Q}.other"),
        (GPTQ, put(f"{Q}.qzeros", lambda old: old[:, :-1]), f"tensor {Q}.qzeros has the shape [1, 7], expected [1, 8]"),
        (GPTQ, put(f"{DOWN}.scales", lambda old: old[:-1]), "has the shape [4, 64], expected [5, 64] for 5 groups of"),
        (GPTQ, put(f"{Q}.g_idx", lambda old: old[1:]), f"tensor {Q}.g_idx has the shape [63], expected [64]"),
        (GPTQ, put(f"{Q}.qweight", lambda old: old.reshape(-1)), f"tensor {Q}.qweight has the shape [512], expected"),
        (
            GPTQ,
            put(f"{Q}.qweight", lambda old: old[:0]),
            "has the shape [0, 64], expected a matrix",
        ),
        (AWQ, put(f"{Q}.qweight", lambda old: old[:32]), "shape"),
        (AWQ, keys(group_size=128), f"tensor {DOWN}.qweight has 576 inputs, expected whole groups of 128"),
        (AWQ, keys(group_size=32), "expected [18, 8] for 18 groups of 32 inputs"),
        (GPTQ, keys(bits=8), f"tensor {DOWN}.qzeros has the shape [5, 8], expected [3, 16]"),
        (AWQ, put(f"{Q}.qweight", lambda old: old, "F32"), f"tensor {Q}.qweight is stored as F32, expected I32"),
        (AWQ, put(f"{Q}.scales", lambda old: old.view(np.int16), "I16"), "is stored as I16, expected BF16, F16, F32"),
        *(
            (AWQ, put(f"{Q}.scales", at((0, 5), value)), f"tensor {Q}.scales has a scale that is not above 0")
            for value in (0.0, -1.0, np.nan, np.inf)
        ),
        (GPTQ, put(f"{DOWN}.g_idx", at(7, 5)), f"tensor {DOWN}.g_idx has groups out of range, expected 0..4"),
        (GPTQ, put(f"{DOWN}.g_idx", at(7, -1)), f"tensor {DOWN}.g_idx has groups out of range, expected 0..4"),
        (GPTQ, put(f"{DOWN}.g_idx", at(7, 1)), f"tensor {DOWN}.g_idx has groups of unequal sizes"),
        (
            GPTQ,
            put(f"{DOWN}.qzeros", at((1, 0), 0x77777717)),
            "has the zero 2 for output 1 and group 1, but",
        ),
        ("awq_128_symmetric", put(f"{DOWN}.qzeros", at((0, 0), 0)), "has the zero 0 for output 0 and group 0"),
        (AWQ, keys(modules_to_not_convert=["down_proj"]), "modules_to_not_convert of config.json says"),
        (GPTQ, keys(dynamic={"-:.*q_proj": {}}), f"tensor {Q}.qweight has codes, but dynamic of config.json says"),
        (AWQ, renamed(f"{Q}.qweight", "lm_heads.qweight"), "belongs to codes without"),
    ],
)
def test_tensors_that_are_not_valid_are_refused(name: str, change: Change, message: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path / "m", change)
    with pytest.raises(ConfigError) as raised:
        read_everything(folder)
    text = str(raised.value)
    assert message in text and "\n" not in text and ("model.safetensors" in text or "tensors" in text), text


def test_weights_that_are_too_large_for_new_codes_are_refused(tmp_path: Path) -> None:
    folder = copy_of("gptq_reordered", tmp_path / "m", put(f"{DOWN}.scales", at((0, 0), 60000.0)))
    with pytest.raises(ConfigError, match="belongs to weights that are too large for new codes"):
        read_everything(folder)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    folder = copy_of(AWQ, tmp_path / "m", lambda tensors, config: None)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        read_everything(folder)


def damage_tensor(chance: random.Random, tensors: Tensors) -> str:
    """Remove, rename, repeat or reshape a tensor, or change its type or values."""
    name = chance.choice([name for name in tensors if name.rpartition(".")[2] != "weight" or chance.random() < 0.2])
    tensor = tensors[name]
    match chance.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[chance.choice(("x", f"{name}.x", "lm_head.qweight", f"{Q}.weight", f"{Q}.g_idx"))] = tensors.pop(
                name
            )
        case 2:
            tensors[f"{name.rpartition('.')[0]}.{chance.choice(('weight', 'g_idx', 'qzeros', 'bias'))}"] = tensor
        case 3:
            cuts = (
                tensor.values[:-1],
                tensor.values[:0],
                tensor.values.T,
                tensor.values.reshape(-1),
                tensor.values[None],
            )
            tensors[name] = StoredTensor(tensor.kind, np.ascontiguousarray(chance.choice(cuts)))
        case 4:
            kind = chance.choice([kind for kind in ("F32", "I32", "F16", "I16", "BF16", "I8", "U8", "F8_E4M3")])
            size = {"F32": 4, "I32": 4, "F16": 2, "I16": 2, "BF16": 2}.get(kind, 1)
            values = tensor.values if tensor.values.itemsize == size else np.zeros(tensor.values.shape, f"i{size}")
            tensors[name] = StoredTensor(kind, values)
        case _:
            data = tensor.values.reshape(-1).view(np.uint8)
            begin, pattern = (
                chance.randrange(len(data)),
                chance.choice((0, 0xFF, 0x7C, 0x80, 0x7F, chance.randrange(256))),
            )
            data[begin : begin + chance.choice((1, 2, 4, 64, len(data)))] = pattern
    return name


def damage_config(chance: random.Random, config: dict[str, Any]) -> str:
    """Replace, add or remove a key of the quantization_config."""
    key, found = chance.choice(KEYS), config["quantization_config"]
    if chance.random() < 0.2:
        found.pop(key, None)
    else:
        found[key] = chance.choice((*VALUES, *WORDS))
    return f"{key} = {found.get(key)!r:.60}"


def check_damaged_folders(folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Read damaged checkpoints; return how many were loaded and how many refused."""
    chance, num_loaded, num_refused = random.Random(seed), 0, 0
    for index in range(count):
        name, damaged = chance.choice(NAMES), list[str]()

        def change(tensors: Tensors, config: dict[str, Any], damaged: list[str] = damaged) -> None:
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                is_tensor = chance.random() < 0.7
                damaged.append(damage_tensor(chance, tensors) if is_tensor else damage_config(chance, config))

        path, begin = copy_of(name, folder / str(index), change), time.monotonic()
        case = f"seed {seed}, number {index}: {name}: {', '.join(damaged)}"
        try:
            with bounded_memory(MAX_MORE_BYTES):
                read_everything(path)
            num_loaded += 1
        except ConfigError as error:
            assert len(str(error)) < 4000 and "\n" not in str(error), f"{case}: {error!s:.300}"
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"{case} raised {error!r:.200}") from error
        assert time.monotonic() - begin < MAX_S, case
    return num_loaded, num_refused


def test_damaged_checkpoints_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    num_loaded, num_refused = check_damaged_folders(tmp_path, 100, seed=1)
    assert num_loaded > 10 and num_refused > 30, "both happen often"


@pytest.mark.nightly
def test_a_thousand_damaged_checkpoints_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    check_damaged_folders(tmp_path, 1000, seed=2)


def test_packing_as_the_tests_do_gives_back_the_files(tmp_path: Path) -> None:
    assert packed(np.arange(8), 4).view(np.uint32) == 0x76543210
