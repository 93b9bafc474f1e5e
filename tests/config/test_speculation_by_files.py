# SPDX-License-Identifier: Apache-2.0
"""What the files of a drafting model say of the method and of the number of drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.drafting_checkpoint import PLANNED_METHODS
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculation_by_files import complete_by_files
from fastdeploy.config.speculative_config import ModelBasedConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.model_path import resolve_model_path
from tests.config.published_heads import HEADS, write_head
from tests.drafting_models import HEADS as HEADS_OF_DEMO
from tests.spec_decode.drafting import head_folders


def completed(folder: Path, **keys: Any) -> ModelBasedConfig:
    """Return what follows from keys for a name on a hub, whose files are in a folder."""
    return complete_by_files(parse_speculative_config({"model": "owner/name", **keys}), folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [head_folders.eagle, head_folders.eagle3, head_folders.medusa])
def test_the_files_of_a_name_on_a_hub_decide_the_method(write: Any, tmp_path: Path) -> None:
    config = completed(write(tmp_path), num_speculative_tokens=2, verify_strategy="target_match")
    assert (config.method, config.num_speculative_tokens, config.num_model_steps) == (write.__name__, 2, 2)
    assert (config.model, config.verify_strategy) == ("owner/name", "target_match")


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.method in PLANNED_METHODS])
def test_files_of_a_method_that_is_not_available_are_refused_by_its_name(name: str, tmp_path: Path) -> None:
    write_head(tmp_path, HEADS[name])
    with pytest.raises(ConfigError, match=f"{HEADS[name].method!r} is not available yet"):
        completed(tmp_path)


def test_a_layer_for_multi_token_prediction_on_a_hub_is_one(tmp_path: Path) -> None:
    weights = head_folders.Weights(0, 8)
    weights.linear("model.layers.14.eh_proj", 8, 16)
    head_folders.write(tmp_path, {"architectures": ["Glm4MoeForCausalLM"]}, weights.tensors)
    assert completed(tmp_path, num_speculative_tokens=3).method == "mtp"


def test_files_say_the_number_of_drafts_unless_it_is_given_and_a_head_makes_no_more(tmp_path: Path) -> None:
    mlp, medusa = head_folders.mlp_speculator(tmp_path / "mlp"), head_folders.medusa(tmp_path / "medusa", num_heads=3)
    counts = [completed(folder).num_speculative_tokens for folder in (mlp, medusa, head_folders.eagle(tmp_path / "e"))]
    assert counts == [4, 3, 1]
    assert completed(mlp, num_speculative_tokens=2).num_speculative_tokens == 2
    cut = completed(mlp, num_speculative_tokens=8)
    assert (cut.num_speculative_tokens, cut.num_model_steps) == (4, 4)
    longer = completed(mlp, num_speculative_tokens=8, num_model_steps=6, mtp_strategy="with_ngram")
    assert (longer.num_speculative_tokens, longer.num_model_steps) == (8, 4)
    assert longer.extension is not None and longer.extension.num_speculative_tokens == 8


def test_a_method_that_contradicts_the_files_is_refused_with_both_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'eagle3' was given, but the files of owner/name are for 'eagle'"):
        completed(head_folders.eagle(tmp_path), method="eagle3")


@pytest.mark.parametrize("method", HEADS_OF_DEMO)
def test_a_head_in_place_of_the_model_is_refused_with_how_to_use_it(method: str) -> None:
    folder = resolve_model_path(HEADS_OF_DEMO[method])
    with pytest.raises(
        ConfigError, match=f"is a trained head for method {method!r}, not a model; serve its target with"
    ):
        EngineConfig(model=folder).read_model(folder)


def test_the_target_of_a_head_is_named_if_its_files_do(tmp_path: Path) -> None:
    named = {"speculators_config": {"verifier": {"name_or_path": "owner/target"}}}
    folder = head_folders.eagle3(tmp_path, speculators_model_type="eagle3", **named)
    with pytest.raises(ConfigError, match="serve its target, owner/target, with --speculative-config"):
        EngineConfig(model=str(folder)).read_model(str(folder))
