# SPDX-License-Identifier: Apache-2.0
"""GGUF files that are damaged, by accident or on purpose: they are loaded, or refused with one error."""

from __future__ import annotations

import random
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.ggml_types import GGML_TYPES
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.gguf.header import read_header
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import num_mtp_layers
from tests.gguf.gguf_files import gguf_path
from tests.models.gguf_damage import Parts, write_damaged

MAX_S = 60.0  # far above what any of them takes on a loaded machine
MAX_MORE_BYTES = 2**30  # of address space that a file of a few hundred kilobytes may take


def read_everything(path: Path, dtype: str = "auto") -> None:
    """Read a file as a server does."""
    folder = gguf_folder(path)
    config = ModelConfig.from_pretrained(folder, dtype=dtype)
    SamplingParams(**config.generation.sampling_values())
    if (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_pretrained(folder)
        tokenizer.decode(tokenizer.encode("a text"))
    num_mtp_layers(str(folder))
    formats = config.weight_formats(UNQUANTIZED)
    load_model(config, max_rows=16, max_model_len=min(64, config.max_context_len), quantization=formats)


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Let the process take only this much more address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check_damaged_files(folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Read damaged files; return how many were loaded and how many refused."""
    chance, num_loaded, num_refused = random.Random(seed), 0, 0
    for index in range(count):
        shutil.rmtree(folder / "files", ignore_errors=True)
        (place := folder / "files").mkdir()
        (path, damaged), begin = write_damaged(chance, place / "m.gguf"), time.monotonic()
        case = f"seed {seed}, number {index}: {damaged}"
        try:
            with bounded_memory(MAX_MORE_BYTES):
                read_everything(path)
            num_loaded += 1
        except ConfigError as error:
            message = str(error)
            assert len(message) < 4000 and "\n" not in message and f"{place}/" in message, f"{case}: {message:.300}"
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"{case} raised {error!r:.200}") from error
        assert time.monotonic() - begin < MAX_S, case
        for made in (folder / "fastdeploy" / "gguf").glob("*"):
            ModelConfig.from_pretrained(made)  # what is there is complete
            assert not made.name.startswith("."), f"{case}: {made} is left"
            shutil.rmtree(made)
    return num_loaded, num_refused


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def changed(path: Path, name: str, source: str, **changes: Any) -> Path:
    """Write a file in which a tensor has other attributes."""
    parts = Parts(gguf_path(source))
    tensor = next(tensor for tensor in parts.tensors if tensor.name == name)
    for attribute, value_ in changes.items():
        setattr(tensor, attribute, value_)
    tensor.fill()
    parts.write(path)
    return path


LARGE_SCALE, LARGE_BLOCK = np.float16(600.0).tobytes(), np.float16(65000.0).tobytes()


@pytest.mark.parametrize(
    ("source", "name", "kind", "data", "word"),
    [
        ("qwen2_q8_0", "blk.0.ffn_up.weight", "Q8_0", LARGE_SCALE + b"\x01" * 32, "scale over 511.75"),
        ("qwen2_k", "blk.0.attn_k.weight", "Q6_K", b"\x7f" * 208 + LARGE_BLOCK, "scale over 511.75"),
        ("qwen2_k", "blk.0.attn_k.weight", "Q4_K", b"\0\0" + LARGE_BLOCK + b"\x3f" * 140, "minimum that is too large"),
        ("llama_f32", "blk.0.ffn_up.weight", "F32", b"\xff\xff\x7f\x7f", "too large for bfloat16"),
        ("llama_f32", "output_norm.weight", "F64", struct.pack("<d", 3.4e38), "too large for bfloat16"),
        ("llama_f32", "output_norm.weight", "F64", struct.pack("<d", 1e300), "row 0 that is not finite"),
    ],
)
def test_numbers_that_are_too_large_to_compute_with_are_refused_by_their_tensor(
    tmp_path: Path, source: str, name: str, kind: str, data: bytes, word: str
) -> None:
    path = changed(tmp_path / "m.gguf", name, source, type_id=GGML_TYPES[kind].type_id, data=data)
    with pytest.raises(ConfigError) as error:
        read_everything(path, "bfloat16")
    assert f"{path}: tensor {name} " in str(error.value) and word in str(error.value)


def test_experts_with_a_leading_dimension_of_one_are_read(tmp_path: Path) -> None:
    name = "blk.1.ffn_up_exps.weight"
    shape = read_header(gguf_path("qwen3moe_groups")).tensors[name].shape
    read_everything(changed(tmp_path / "m.gguf", name, "qwen3moe_groups", shape=(1, *shape)))


def test_damaged_files_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    num_loaded, num_refused = check_damaged_files(tmp_path, 100, seed=1)
    assert num_loaded > 10 and num_refused > 50, "both happen often"


@pytest.mark.nightly
def test_a_thousand_damaged_files_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    check_damaged_files(tmp_path, 1000, seed=2)
