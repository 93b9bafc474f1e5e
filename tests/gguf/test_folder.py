# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes a folder, which also has what is known of the model beside the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy.gguf.folder import gguf_folder
from tests.gguf.gguf_files import gguf_path


def sampling_of(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "generation_config.json").read_text())
    return {name: value for name, value in found.items() if name in ("temperature", "top_p", "top_k")}


def test_sampling_parameters_are_those_of_the_file_else_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = gguf_path("llama_groups")
    own = sampling_of(gguf_folder(path))
    assert own.keys() == set()
    both = gguf_folder(path, {"temperature": 0.25, "top_p": 0.5})
    assert sampling_of(both) == {"temperature": 0.25, "top_p": 0.5}
    assert sampling_of(gguf_folder(path)) == own, "the two folders are kept apart"
    said = sampling_of(gguf_folder(gguf_path("qwen2_q8_0"), {"temperature": 0.25}))
    assert said == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
