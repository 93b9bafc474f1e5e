# SPDX-License-Identifier: Apache-2.0
"""What a start says of a GGUF file's weights, and the bytes that it counts, are what is loaded."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import GGUF, UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import make_fingerprint, weight_notes
from fastdeploy.engine.weight_memory import check_weights_fit, weight_bytes
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_report import WeightFate, summarize, tabulate, weight_fates
from fastdeploy.models.weights import expected_shapes
from fastdeploy.ops.backends.cpu.backend import BACKEND
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import form_of
from tests.gguf.gguf_files import gguf_path
from tests.gguf.rewritten import rewrite
from tests.models.gguf_weights import Formats, config_of, formats, packed_layers, weights_of
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS

REQUESTED: list[Formats] = ["", "none", "wint8", "w8a8", "w4a8", "wint4_min", {"attention": "wint4", "head": "wint4"}]
FILES = (
    *("llama_f32", "llama_groups", "llama_k", "qwen2_q8_0", "qwen2_k", "qwen3_q5_0", "ernie4_5_q4_1"),
    *("ernie4_5_moe_groups", "qwen3moe_groups", "glm4moe_k"),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def load(config: ModelConfig, wanted: Formats = "") -> CausalLM:
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats(wanted))


def fates_of(config: ModelConfig, wanted: Formats = "") -> list[WeightFate]:
    return weight_fates(config, config.weight_formats(formats(wanted)))


@pytest.mark.parametrize("wanted", REQUESTED, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_each_weight_has_the_form_that_is_told(name: str, wanted: Formats) -> None:
    config = config_of(gguf_path(name))
    weights, fates = weights_of(config, wanted), {fate.name: fate.form for fate in fates_of(config, wanted)}
    expected = {stored: form_of(packed) for names, packed in packed_layers(weights, config) for stored in names}
    is_packed = isinstance(weights.embedding, PackedLinear) and weights.embedding.quantization != "none"
    expected["model.embed_tokens.weight"] = form_of(weights.embedding) if is_packed else None
    if weights.embedding is not weights.head:
        expected["lm_head.weight"] = form_of(weights.head)
    assert fates == expected


@pytest.mark.parametrize(("dtype", "wanted"), [*(("bfloat16", wanted) for wanted in REQUESTED), ("float32", "")])
@pytest.mark.parametrize("name", FILES)
def test_bytes_are_those_of_the_loaded_weights_without_padding(name: str, dtype: str, wanted: Formats) -> None:
    config = config_of(gguf_path(name), dtype=dtype)
    model = load(config, wanted)
    sizes, others = weight_bytes(config, formats(wanted)), other_bytes(config)
    loaded, counted = model.num_weight_bytes - others.loaded, sum(sizes.values()) - others.counted
    assert 0 <= loaded - counted <= 0.08 * counted  # panels of 16 outputs are filled up
    assert all(sizes.values())


@dataclass
class OtherBytes:
    """Bytes of norms, which `num_weight_bytes` leaves out, and of routers, of which padding is the largest part."""

    loaded: int = 0
    counted: int = 0


def other_bytes(config: ModelConfig) -> OtherBytes:
    found, item = OtherBytes(), 2 if config.dtype == "bfloat16" else 4
    for name, shape in expected_shapes(config, find_architecture(config)).items():
        is_router = name.endswith(".mlp.gate.weight")
        found.loaded += 4 * prod(BACKEND.packed_gate_shape(*shape)) if is_router else 0
        if is_router or not name.endswith(("_proj.weight", "_proj.bias", "head.weight", "tokens.weight")):
            found.counted += item * prod(shape)
    return found


def test_a_summary_says_what_becomes_of_which_types() -> None:
    llama = config_of(gguf_path("llama_k"))
    assert summarize(fates_of(llama)) == (
        "kept: Q5_1, Q5_0 (0.0 MiB); kept, scales rounded to fp16: Q5_K, Q4_K (0.0 MiB); "
        "converted to eight bits: Q6_K, Q3_K, Q2_K (0.1 MiB)"
    )
    assert summarize(fates_of(llama, "w4a8")) == (
        "converted to eight bits: Q6_K (0.1 MiB); quantized anew: Q5_K, Q3_K, Q2_K, Q5_1, Q4_K, Q6_K, Q5_0 (0.1 MiB)"
    )
    assert summarize(fates_of(llama, "none")) == "widened: Q6_K, Q5_K, Q3_K, Q2_K, Q5_1, Q4_K, Q5_0 (0.3 MiB)"
    assert summarize(fates_of(config_of(gguf_path("llama_groups")))) == (
        "kept: Q8_0, Q4_0, Q5_0, Q5_1, Q4_1 (0.0 MiB); widened: Q8_0, Q4_0 (0.0 MiB); plain: BF16, F16 (0.0 MiB)"
    )


def test_a_table_has_a_line_for_each_kind_of_weight() -> None:
    lines = tabulate(fates_of(config_of(gguf_path("ernie4_5_moe_groups")), {"experts": "w4a8", "head": "wint4"}))
    anew = "quantized anew, 4 bits with a scale per 32 inputs, inputs of 8 bits"
    assert lines[:3] == [
        "model.embed_tokens.weight: 1 x Q5_1, kept, 8 bits with a scale and a minimum per 32 inputs, inputs of 16 bits",
        "lm_head.weight: 1 x Q5_1, quantized anew, 4 bits with a scale per 32 inputs, inputs of 16 bits",
        "model.layers.*.self_attn.q_proj.weight: 1 x F16, plain, floating-point numbers",
    ]
    assert [line for line in lines if ".experts." in line] == [
        f"model.layers.*.mlp.experts.*.gate_proj.weight: 4 x Q4_1, {anew}",
        f"model.layers.*.mlp.experts.*.up_proj.weight: 4 x Q5_0, {anew}",
        "model.layers.*.mlp.experts.*.down_proj.weight: 4 x Q4_0, kept, 4 bits with a scale per 32 inputs, "
        "inputs of 8 bits",
    ]
    assert lines[-1] == "model.layers.*.mlp.shared_experts.down_proj.weight: 1 x Q5_1, widened, floating-point numbers"
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("wanted", "dtype", "said"),
    [("wint4", "bfloat16", "quantized anew: "), ("", "bfloat16", "converted to "), ("", "float32", "widened: ")],
)
def test_a_start_says_what_becomes_of_the_weights_in_one_line(wanted: str, dtype: str, said: str) -> None:
    requested = QuantizationConfig.from_value(wanted) if wanted else UNQUANTIZED
    config = EngineConfig(model=str(gguf_path("llama_k")), quantization=requested)
    (note,) = weight_notes(config, config_of(gguf_path("llama_k"), dtype=dtype))
    assert note.startswith("weights of llama_k.gguf: ") and said in note and "\n" not in note
    assert weight_notes(replace(config, load_choices="dummy"), config_of(gguf_path("llama_k"))) == []


@pytest.mark.parametrize(("dtype", "called"), [("bfloat16", "gguf"), ("float32", "float32")])
def test_a_refusal_for_lack_of_memory_counts_the_files_own_forms(
    dtype: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(gguf_path("llama_k"), dtype=dtype)
    num_bytes = sum(weight_bytes(config, UNQUANTIZED).values())
    monkeypatch.setattr(type(BACKEND), "free_memory_bytes", lambda self: num_bytes)
    check_weights_fit(config, UNQUANTIZED)
    monkeypatch.setattr(type(BACKEND), "free_memory_bytes", lambda self: num_bytes - 1)
    with pytest.raises(ConfigError, match=rf"{gguf_path('llama_k')}: the weights take .*\({called}: 0.00 GiB"):
        check_weights_fit(config, UNQUANTIZED)


def fingerprint(path: Path, wanted: Formats = "", **options: str) -> dict[str, Any]:
    config = config_of(path, **options)
    model = load(config, wanted)
    return make_fingerprint(
        EngineConfig(model="gguf", quantization=formats(wanted)), config, model.key_balance, model.forms
    )


def test_fingerprints_tell_forms_apart(tmp_path: Path) -> None:
    paths = [
        rewrite(gguf_path("llama_f32"), tmp_path / f"{kind}.gguf", lambda name, kind=kind: kind)
        for kind in ("Q4_0", "Q4_1", "Q8_0")
    ]
    cases: list[Formats] = ["", "w8a8", "none", {"attention": GGUF, "mlp": GGUF, "head": "w8a8"}]
    found = [fingerprint(path, wanted) for path in paths for wanted in cases]
    assert len({repr(one) for one in found}) == len(found)
    assert len({one["forms"] for one in found}) == 10  # "none" is one form for all files
    assert fingerprint(paths[0], GGUF) == found[0]
    moved = Path(shutil.copy(paths[0], tmp_path / "moved.gguf"))
    assert fingerprint(moved) == found[0]
