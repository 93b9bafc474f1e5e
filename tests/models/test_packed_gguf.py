# SPDX-License-Identifier: Apache-2.0
"""A folder packed from a GGUF file gives the bits of the file itself, or is refused if it was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import PackedHeader
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.engine.description import make_fingerprint
from fastdeploy.engine.weight_memory import weight_bytes
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.packing import pack_checkpoint
from tests.gguf.gguf_files import gguf_path
from tests.models.gguf_weights import Formats, config_of, formats
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS, Driver
from tests.models.test_row_independence import assert_same_bits, tokens_of

CASES: list[tuple[str, Formats, str]] = [
    ("ernie4_5_q4_1", "", "bfloat16"),
    ("qwen2_q8_0", "w8a8", "bfloat16"),
    ("qwen2_q8_0", {"head": "wint4", "mlp": "w4a8"}, "bfloat16"),
    ("qwen2_k", "w4a8", "bfloat16"),
    ("llama_k", "", "bfloat16"),
    ("llama_k", "", "float32"),
    ("llama_k", "none", "bfloat16"),
    ("llama_groups", "", "bfloat16"),
    ("llama_groups", "wint4", "bfloat16"),
    ("llama_groups", {"attention": "gguf", "head": "w8a8"}, "bfloat16"),
    ("llama_f32", "", "float32"),
    ("llama_f32", "wint8", "bfloat16"),
    ("qwen3moe_groups", "", "bfloat16"),
    ("qwen3moe_k", "w8a8", "bfloat16"),
    ("ernie4_5_moe_groups", {"experts": "w4a8"}, "bfloat16"),
    ("ernie4_5_moe_k", "", "bfloat16"),
    ("glm4moe_groups", "wint4", "bfloat16"),
    ("glm4moe_groups", "", "bfloat16"),
    ("glm4moe_mtp", "w8a8", "bfloat16"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def load(config: ModelConfig, wanted: Formats = "") -> CausalLM:
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats(wanted))


def pack(path: Path, folder: Path, wanted: Formats = "", dtype: str = "bfloat16") -> PackedHeader:
    return pack_checkpoint(config_of(path, dtype=dtype), folder, formats(wanted))


def fingerprint(model: CausalLM, wanted: Formats = "") -> dict[str, Any]:
    config = EngineConfig(model="gguf", quantization=formats(wanted))
    return make_fingerprint(config, model.config, model.key_balance, model.forms)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("name", "wanted", "dtype"), CASES)
def test_a_packed_file_has_the_bits_and_the_fingerprint_of_the_file(
    name: str, wanted: Formats, dtype: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    if dtype == "float32" and kv_cache_dtype == "int8":
        return
    pack(gguf_path(name), tmp_path / "packed", wanted, dtype)
    packed = load(ModelConfig.from_pretrained(tmp_path / "packed", kv_cache_dtype=kv_cache_dtype))
    plain = load(config_of(gguf_path(name), dtype=dtype, kv_cache_dtype=kv_cache_dtype), wanted)
    assert_same_bits(Driver(packed).run_alone(tokens_of(3)), Driver(plain).run_alone(tokens_of(3)))
    assert packed.num_weight_bytes == plain.num_weight_bytes
    assert (packed.shared.embedding.table is packed.shared.head.weight) == (
        plain.shared.embedding.table is plain.shared.head.weight
    )
    assert fingerprint(packed) == fingerprint(plain, wanted)
    assert sum(weight_bytes(packed.config, UNQUANTIZED).values()) >= 0.85 * packed.num_weight_bytes
    assert not [file for file in (tmp_path / "packed").iterdir() if file.suffix == ".gguf" or file.is_symlink()]
