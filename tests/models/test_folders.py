# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in many forms give the log-probabilities that transformers computed for them, or one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from tests.models.model_driver import GOLDEN, Driver, log_softmax
from tests.models.seeded_folders import FOLDERS, ROWS, TOKENS, Folder

RUN_AS = {"float16": "bfloat16", "float64": "float32"}
TOLERANCE = 1e-5
REFERENCE = dict(np.load(GOLDEN / "folders.npz"))


def load(path: Path, dtype: str = "float32") -> CausalLM:
    return load_model(ModelConfig.from_pretrained(path, dtype=dtype), max_rows=16, max_model_len=32)


def test_the_reference_has_every_folder() -> None:
    assert len(FOLDERS) >= 40 and len({folder.name for folder in FOLDERS}) == len(FOLDERS)
    assert {name.split("/")[0] for name in REFERENCE} == {folder.name for folder in FOLDERS if not folder.refused}


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if not folder.refused], ids=lambda folder: folder.name)
def test_a_folder_gives_the_log_probabilities_of_transformers(tmp_path: Path, folder: Folder) -> None:
    folder.make(tmp_path / "model")
    found = log_softmax(Driver(load(tmp_path / "model")).run_alone(TOKENS))[list(ROWS)]
    assert np.abs(found - REFERENCE[f"{folder.name}/logprobs"]).max() <= TOLERANCE
    dtype = str(REFERENCE[f"{folder.name}/dtype"])
    assert ModelConfig.from_pretrained(tmp_path / "model").dtype == RUN_AS.get(dtype, dtype)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.refused], ids=lambda folder: folder.name)
def test_a_folder_that_is_not_read_is_refused_in_one_line_that_names_it(tmp_path: Path, folder: Folder) -> None:
    folder.make(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "model")
    message = str(caught.value)
    assert folder.refused in message and "\n" not in message
    assert str(tmp_path / "model") in message
