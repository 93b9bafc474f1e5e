# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction in files of compressed-tensors, in other forms than those of their target."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.config.speculative_config import NaiveConfig
from fastdeploy.models import mtp
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import load_mtp_layers
from fastdeploy.ops.quantized_form import QuantizedForm, form_of
from tests.exactness.requests import run_all
from tests.models.compressed_tensors_files import (
    config_of,
    define,
    quantized,
    read_tensors,
    write_tensors,
)
from tests.models.test_mtp_experts import GLM, GLM_LAYER, engine_of, requests_of
from tests.models.test_mtp_experts import mtp as drafting
from tests.ops.quantized import stored_codes

LAYER, PROJECTION = "model.layers.3.", "model.layers.3.eh_proj"
LINEAR = re.compile(r"(.*_proj)\.weight")


def write(folder: Path, layer_bits: int, layer_size: int) -> Path:
    """Write the model with eight bits per output, and its layer for multi-token prediction in another form."""
    shutil.copytree(GLM, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {}
    for name, tensor in (read_tensors(GLM) | read_tensors(GLM_LAYER)).items():
        form = (layer_bits, layer_size) if name.startswith(LAYER) else (8, 0)
        match = LINEAR.fullmatch(name)
        if match and tensor.values.shape[1] % (form[1] or 1) == 0:  # the others stay plain
            tensors |= {f"{match[1]}.{part}": stored for part, stored in quantized(tensor, *form).items()}
        else:
            tensors[name] = tensor
    write_tensors(folder, tensors)
    of_layer = {"num_bits": layer_bits, "group_size": layer_size or -1}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "group_1": {"targets": [f"re:{LAYER}.*".replace(".", "\\.", 2)], "weights": of_layer},
    }
    config = json.loads((GLM / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("bits", "size", "expected"),
    [
        (4, 32, QuantizedForm("wint4", 32)),
        (8, 0, QuantizedForm("wint8", 0)),
        (4, 0, QuantizedForm("wint4", 0)),
        (4, 16, QuantizedForm("wint8", 32)),
    ],
)
def test_both_halves_of_the_projection_keep_its_codes(
    bits: int, size: int, expected: QuantizedForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves, load = [], mtp._load
    monkeypatch.setattr(mtp, "_load", lambda *args: halves.append(load(*args)) or halves[-1])
    folder = write(tmp_path / "model", bits, size)
    config = config_of(folder)
    target = load_model(config, max_rows=64, max_model_len=64)
    load_mtp_layers(target, None, "default_v1", config.weight_formats(UNQUANTIZED).for_mtp_layers(config.dtype))
    found = [halves[0].emb_projection, halves[0].hidden_projection]
    assert [form_of(half) for half in found] == [expected] * 2
    if size != 16:
        codes = define(read_tensors(folder), PROJECTION, bits).codes
        np.testing.assert_array_equal(np.concatenate([stored_codes(half) for half in found], axis=1), codes)


def test_drafts_of_a_layer_in_another_form_are_accepted_and_change_no_text(tmp_path: Path) -> None:
    folder, requests = write(tmp_path / "model", 4, 32), requests_of(112)
    plain = run_all(engine_of(folder, NaiveConfig()), requests)
    engine = engine_of(folder, drafting())
    assert run_all(engine, requests) == plain
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
