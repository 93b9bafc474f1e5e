# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with damaged files, by accident or on purpose: they are loaded, or refused with one error."""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.checkpoint_json import GENERATION_KEYS, MODEL_KEYS, ROPE_KEYS, TOKENIZER_KEYS
from fastdeploy.config.drafting_checkpoint import infer_method_of
from fastdeploy.config.experts_config import EXPERTS_KEYS
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import num_mtp_layers
from tests.detokenize.tokenizers_for_tests import BACKENDS, save_tokenizer
from tests.models.model_driver import GOLDEN

MODELS = (
    *("qwen2", "qwen3", "ernie4_5", "llama_rope_dynamic", "llama_rope_llama3", "llama_rope_yarn", "paddlenlp_llama"),
    *("ernie4_5_moe", "ernie4_5_moe_paddle", "glm4_moe", "qwen3_moe"),
)
MAX_S = 60.0  # far above what any of them takes on a loaded machine
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 10**9, 2**31, 2**63, 2**64, 10**30, -(2**63)),
    *(0.0, 0.5, 1.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "\ud800", "linear", "yarn", "llama3", "dynamic", [], {}, [[]], [0], [-1], ["x"], [{}], {"x": 1}),
    *("x" * 5000, [1] * 1000, {"rope_type": "yarn", "factor": 0}, {"content": 5}, {"1": {"content": "x"}}),
)
ADDED_KEYS = {
    "config.json": [
        *MODEL_KEYS,
        *EXPERTS_KEYS,
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
        "architectures",
        "dtype",
    ],
    "generation_config.json": [*GENERATION_KEYS, "temperature", "top_p", "top_k", "min_p", "max_new_tokens"],
    "tokenizer_config.json": [*TOKENIZER_KEYS],
    "tokenizer.json": ["model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"],
    "added_tokens.json": ["x", "<s>"],
    "vocab.json": ["x", "a"],
    "special_tokens_map.json": ["bos_token", "additional_special_tokens"],
    "model.safetensors.index.json": ["weight_map"],
}
DEEP = (b"[" * 100_000, b'{"x":' * 100_000, b"[" * 990 + b"]" * 990, b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}")


def copy_model(name: str, folder: Path, has_vocab_files: bool) -> None:
    """Write a small checkpoint with every file that is read, with tokenizer.json or with vocab.json and merges.txt."""
    shutil.copytree(GOLDEN / name, folder)
    save_tokenizer(folder)
    if has_vocab_files:
        (folder / "tokenizer.json").unlink()
        backend = BACKENDS["byte_level"]()
        backend.model.save(str(folder))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        added = {str(backend.get_vocab_size()): {"content": "<added>", "special": True}}
        config |= {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    defaults = {"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": [2, 3]}
    for file, content in {"generation_config.json": defaults, "special_tokens_map.json": {}}.items():
        if not (folder / file).exists():
            (folder / file).write_text(json.dumps(content))


def read_everything(folder: Path) -> None:
    """Read the files of a checkpoint as a server does."""
    config = ModelConfig.from_pretrained(folder)
    SamplingParams(**config.generation.sampling_values())
    tokenizer = Tokenizer.from_pretrained(folder)
    tokenizer.decode(tokenizer.encode("a text"))
    infer_method_of(folder)
    num_mtp_layers(str(folder))
    load_model(config, max_rows=16, max_model_len=min(64, config.max_context_len))


def replace_value(chance: random.Random, tree: Any, added_keys: list[str]) -> None:
    """Replace, remove or add one value somewhere in a JSON tree, also in the object for rotary embeddings."""
    for section in ("rope_scaling", "rope_parameters"):
        if isinstance(tree, dict) and isinstance(tree.get(section), dict) and chance.random() < 0.3:
            return replace_value(chance, tree[section], [*ROPE_KEYS])
    while True:
        is_mapping = isinstance(tree, dict)
        keys = list(tree) if is_mapping else list(range(len(tree)))
        key = chance.choice(keys) if keys else None
        if key is not None and isinstance(tree[key], (dict, list)) and tree[key] and chance.random() < 0.7:
            tree = tree[key]
            added_keys = []
            continue
        if is_mapping and (key is None or (added_keys and chance.random() < 0.5)):
            key = chance.choice(added_keys or ["x"])
        if key is None:
            tree.append(deepcopy(chance.choice(VALUES)))
        elif chance.random() < 0.15:
            tree.pop(key, None) if is_mapping else tree.pop(key)
        else:
            tree[key] = deepcopy(chance.choice(VALUES))
        return


def damage_bytes(chance: random.Random, content: bytes) -> bytes:
    """Truncate, overwrite or replace the content of a file."""
    position = chance.randrange(len(content) + 1)
    return chance.choice(
        (
            lambda: content[:position],
            lambda: b"",
            lambda: content[:position] + bytes(chance.randrange(256) for _ in range(4)) + content[position + 4 :],
            lambda: content[:position] + b"9" * 5000 + content[position:],
            lambda: chance.choice(DEEP),
            lambda: b"\xef\xbb\xbf" + content,
            lambda: b"null",
        )
    )()


def damage_json(chance: random.Random, file: Path) -> None:
    content = file.read_bytes() if file.exists() else b"{}"
    if chance.random() < 0.8:
        tree = json.loads(content)
        for _ in range(chance.choice((1, 1, 2, 4))):
            replace_value(chance, tree, ADDED_KEYS[file.name])
        file.write_text(json.dumps(tree))
    else:
        file.write_bytes(damage_bytes(chance, content))


def damage_safetensors(chance: random.Random, file: Path) -> None:
    content = file.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = chance.random()
    if kind < 0.6:
        tree = json.loads(header)
        name = chance.choice([name for name in tree if name != "__metadata__"])
        entry = tree[name]
        key = chance.choice(list(entry))
        offsets = [0, 1, -1, len(data), len(data) + 1, 2**40, 2**63, 2**64, entry["data_offsets"][0]]
        new: Callable[[], Any] = {
            "dtype": lambda: chance.choice(["F64", "I8", "F16", "F8_E4M3", "BOOL", "x", 5, None]),
            "shape": lambda: [chance.choice([0, 1, -1, 7, 2**32, 2**63, "x"]) for _ in range(chance.randrange(4))],
            "data_offsets": lambda: [chance.choice(offsets) for _ in range(chance.choice([0, 1, 2, 2, 2, 3]))],
        }[key]
        entry[key] = deepcopy(chance.choice(VALUES)) if chance.random() < 0.3 else new()
        header = json.dumps(tree).encode()
    elif kind < 0.8:
        header = damage_bytes(chance, header)
    else:
        length = chance.choice([0, 1, len(header) - 1, len(header) + 1, 2**31, 2**62, 2**64 - 1])
        file.write_bytes(struct.pack("<Q", length) + header + damage_bytes(chance, data[:1000]))
        return
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def damage(chance: random.Random, folder: Path) -> str:
    """Damage one file of a checkpoint; return its name."""
    weights = sorted(folder.glob("*.safetensors"))
    often = ("config.json", "config.json", "tokenizer_config.json")
    name = chance.choice([*ADDED_KEYS, *often, *(file.name for file in weights)])
    if name.endswith(".safetensors"):
        damage_safetensors(chance, folder / name)
    else:
        damage_json(chance, folder / name)
    return name


def check_damaged_checkpoints(folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Read damaged checkpoints; return how many were loaded and how many refused."""
    chance, num_loaded, num_refused = random.Random(seed), 0, 0
    for index in range(count):
        model = folder / f"model-{index}"
        copy_model(chance.choice(MODELS), model, has_vocab_files=chance.random() < 0.5)
        damaged, begin = damage(chance, model), time.monotonic()
        try:
            read_everything(model)
            num_loaded += 1
        except ConfigError as error:
            assert len(str(error)) < 4000 and "\n" not in str(error)[:-1], f"{index}, {damaged}: {str(error)[:200]}"
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, number {index}: {damaged} raised {error!r:.200}") from error
        assert time.monotonic() - begin < MAX_S, f"seed {seed}, number {index}: {damaged}"
        shutil.rmtree(model)
    return num_loaded, num_refused


def test_damaged_checkpoints_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    num_loaded, num_refused = check_damaged_checkpoints(tmp_path, 250, seed=1)
    assert num_loaded > 20 and num_refused > 100, "both happen often"


@pytest.mark.nightly
def test_a_thousand_damaged_checkpoints_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    check_damaged_checkpoints(tmp_path, 1000, seed=2)
