# SPDX-License-Identifier: Apache-2.0
"""Opens the files of a checkpoint's weights, whatever their format."""

from __future__ import annotations

from pathlib import Path

from fastdeploy.config.model_config import DType
from fastdeploy.gguf.folder import find_gguf
from fastdeploy.models.coded_source import open_safetensors
from fastdeploy.models.gguf_source import GGUFSource
from fastdeploy.models.weight_source import CheckpointFiles, HeadFiles, SafetensorsSource


def open_files(folder: Path, dtype: DType = "float32") -> CheckpointFiles:
    """Return the tensors of a folder: those of its GGUF file, if `gguf_folder` made it, else of its safetensors files.

    Args:
        dtype: to which codes are widened.

    Raises:
        ConfigError: there are no weights, or a file is not valid.
    """
    gguf = find_gguf(folder)
    return open_safetensors(folder, dtype) if gguf is None else GGUFSource(folder, gguf, dtype)


def open_head_files(folder: Path, dtype: DType = "float32") -> HeadFiles:
    """Return the tensors of a draft head."""
    return SafetensorsSource(folder, has_id_tables=True)
