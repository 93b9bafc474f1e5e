# SPDX-License-Identifier: Apache-2.0
"""A draft model is checked before it is loaded; the memory plan and the description include it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.paddle import load_file, save_file

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine import engine_factory
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.entrypoints.openai.startup_summary import summary_lines
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.packing import pack_checkpoint
from tests.config.published_heads import HEADS, write_head
from tests.exactness.requests import run_all

DRAFT = Path(resolve_model_path("demo/draft"))
DRAFT_BLOCK = 4 * 2 * 1 * 64 * 2 * 16  # layers, keys and values, heads, width, bytes, tokens
TARGET_BLOCK = 14 * 2 * 2 * 64 * 2 * 16


def engine(speculative: Mapping[str, Any], load_choices: str = "default_v1", max_model_len: int = 64) -> Engine:
    return make_engine(
        EngineConfig(
            model="demo",
            max_model_len=max_model_len,
            load_choices=load_choices,
            cache=CacheConfig(block_size=16, kv_cache_memory=1 << 22),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            speculative=parse_speculative_config({"num_speculative_tokens": 3, **speculative}),
        )
    )


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the weights of the target are read."""

    def load(*_arguments: object, **_options: object) -> CausalLM:
        raise AssertionError("weights are read")

    monkeypatch.setattr(engine_factory, "load_model", load)


def write_tensors(folder: Path, *names: str) -> None:
    """Write a folder of empty tensors."""
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def changed_draft(folder: Path, values: Mapping[str, Any]) -> Path:
    """Copy the draft model without its tokenizer, with other values in its config.json."""
    shutil.copy(DRAFT / "model.safetensors", folder)
    config = json.loads((DRAFT / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 4000}, "has a vocabulary of 4000 tokens, the target 4096$"),
        ({"max_position_embeddings": 32}, "has a context of 32 tokens; lower --max-model-len 64$"),
        ({"architectures": ["OPTForCausalLM"]}, r"config.json: 'OPTForCausalLM' is not supported \(supported: Llama"),
        ({"num_hidden_layers": 5}, "model.layers.4"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_model_that_cannot_draft_is_refused_before_weights_are_read(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        engine({"model": str(changed_draft(tmp_path, values))})
    assert caught.value.field == "speculative_config.model"
    assert "\n" not in str(caught.value)


def test_the_own_head_of_a_draft_model_counts_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed_draft(tmp_path, {})
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    with caplog.at_level("WARNING", "fastdeploy.engine"):
        tied, own = (
            engine({"model": model}).describe()["speculation"]["draft_model"]["weights_bytes"]
            for model in ("demo/draft", str(folder))
        )
    config = ModelConfig.from_pretrained(DRAFT)
    assert own - tied == 2 * config.vocab_size * config.hidden_size
    [line] = [record.getMessage() for record in caplog.records if "lm_head.weight" in record.getMessage()]
    assert line.startswith(f"{folder}/model.safetensors: lm_head.weight is used, since it differs")


def test_tokenizer_with_other_ids_is_refused(tmp_path: Path) -> None:
    folder = changed_draft(tmp_path, {})
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {token_id: token for token, token_id in vocabulary.items()}
    vocabulary.update({names[300]: 301, names[301]: 300})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(DRAFT / "tokenizer_config.json", folder)
    with pytest.raises(ConfigError, match=r"has another vocabulary: .* is 30[01] in the target's tokenizer, 30[01] in"):
        engine({"model": str(folder)})


@pytest.mark.parametrize(
    ("speculative", "error"),
    [
        ({"model": "/nowhere"}, "speculative_config.model: /nowhere is neither a directory nor a GGUF file"),
        ({"model": "demo", "revision": "v9"}, "speculative_config.revision: 'v9' needs the name of a hub's model"),
        (
            {"method": "draft_model", "model": "layer"},
            "speculative_config.method: 'draft_model' was given, but the files of layer are for 'mtp'",
        ),
        (
            {"method": "mtp", "model": "deepseek", "mtp_hidden_state": "raw"},
            "speculative_config.mtp_hidden_state: expected normed, got raw: only layers in ERNIE's form",
        ),
        ({"model": "eagle"}, "speculative_config.model: eagle/config.json: hidden_size is 128, but the target has 256"),
        (
            {"method": "draft_model", "model": "eagle"},
            "speculative_config.method: 'draft_model' was given, but the files of eagle are for 'eagle'",
        ),
        (
            {"method": "mtp", "model": "eagle"},
            "speculative_config.model: eagle contains no layer for multi-token prediction",
        ),
        (
            {"method": "mtp", "model": "layer"},
            "speculative_config.model: layer: tensors do not match config.json: 11 missing (model.mtp_hidden_norm",
        ),
        (
            {"method": "mtp", "model": "deepseek"},
            "speculative_config.model: deepseek: tensors do not match config.json: 12 missing (model.layers.14.",
        ),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_model_of_another_method_or_without_files_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculative: dict[str, Any], error: str
) -> None:
    write_tensors(tmp_path / "layer", "model.mtp_emb_norm.0.weight")
    write_tensors(tmp_path / "deepseek", "model.layers.14.eh_proj.weight")
    (tmp_path / "eagle").mkdir()
    write_head(tmp_path / "eagle", HEADS["yuhuili/EAGLE-LLaMA3-Instruct-8B"])
    (tmp_path / "eagle" / "config.json").write_text((DRAFT / "config.json").read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        engine(speculative)
    assert str(caught.value).startswith(error)


def test_memory_plan_and_description_include_the_draft_model() -> None:
    plain, drafting = (engine(spec).describe() for spec in ({"method": "naive"}, {"model": "demo/draft"}))
    assert plain["fingerprint"] == drafting["fingerprint"]
    assert plain["kv_cache"]["num_blocks"] == (1 << 22) // TARGET_BLOCK
    num_blocks = drafting["kv_cache"]["num_blocks"]
    assert num_blocks == ((1 << 22) - 4 * DRAFT_BLOCK) // (TARGET_BLOCK + DRAFT_BLOCK)
    assert drafting["kv_cache"]["bytes"] <= 1 << 22
    described = drafting["speculation"]["draft_model"]
    assert described["kv_cache_bytes"] == (num_blocks + 4) * DRAFT_BLOCK
    assert 2_600_000 < described["weights_bytes"] < 3_800_000
    assert "draft_model" not in plain["speculation"]
    assert any("draft_model demo/draft (" in line for line in summary_lines(drafting, ()))


def test_quantization_of_the_draft_model_makes_it_smaller_than_the_default() -> None:
    plain, small = (engine({"model": "demo/draft", **q}).describe() for q in ({}, {"quantization": "wint4"}))
    sizes = [d["speculation"]["draft_model"]["weights_bytes"] for d in (plain, small)]
    assert sizes[1] < sizes[0]
    assert plain["weights_bytes"] == small["weights_bytes"]


def test_a_packed_draft_model_has_its_own_formats(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    pack_checkpoint(ModelConfig.from_pretrained(DRAFT), folder, QuantizationConfig.from_value("wint4"))
    small, packed = (
        engine({"model": model, **formats}).describe()["speculation"]["draft_model"]
        for model, formats in (("demo/draft", {"quantization": "wint4"}), (str(folder), {}))
    )
    assert packed["weights_bytes"] == small["weights_bytes"]
    with pytest.raises(ConfigError, match=r"speculative_config.quantization: .*packed is packed to .*, got wint8"):
        engine({"model": str(folder), "quantization": "wint8"})
    with pytest.raises(ConfigError, match=r"speculative_config.quantization.experts: the model has no experts"):
        engine({"model": "demo/draft", "quantization": {"experts": "wint8"}})


def test_draft_model_with_dummy_weights_drafts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((DRAFT / "config.json").read_text())
    running = engine({"model": str(tmp_path)}, load_choices="dummy")
    run_all(running, [GenerationRequest("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=9))])
    assert running.stats().num_draft_tokens > 0
