# SPDX-License-Identifier: Apache-2.0
"""Opens the files of a checkpoint's weights, whatever their format."""

from __future__ import annotations

from pathlib import Path

from fastdeploy.config.run_dtype import DType
from fastdeploy.config.torch_files import find_torch_files
from fastdeploy.config.weight_files import has_safetensors
from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.folder import find_gguf
from fastdeploy.models.coded_source import open_safetensors
from fastdeploy.models.gguf_source import GGUFSource
from fastdeploy.models.torch_source import TorchSource
from fastdeploy.models.weight_source import HEAD_DTYPES, CheckpointFiles, HeadFiles, SafetensorsSource


def open_files(folder: Path, dtype: DType = "float32") -> CheckpointFiles:
    """Return the tensors of a folder: those of its GGUF file, if `gguf_folder` made it, else of its safetensors files.

    Args:
        dtype: to which codes are widened.

    Raises:
        ConfigError: there are no weights, or a file is not valid.
    """
    gguf = find_gguf(folder)
    return open_safetensors(folder, dtype) if gguf is None else GGUFSource(folder, gguf, dtype)


def open_head_files(folder: Path) -> HeadFiles:
    """Return the tensors of a draft head: those of its safetensors files if there are any, else of its PyTorch files.

    Raises:
        ConfigError: there are no weights, they are stored as codes, or a file is not valid.
    """
    if has_safetensors(folder):
        return SafetensorsSource(folder, more_dtypes=HEAD_DTYPES)
    if not find_torch_files(folder):
        raise ConfigError("model", f"{folder} contains no *.safetensors, *.bin or *.pt")
    return TorchSource(folder)
