# SPDX-License-Identifier: Apache-2.0
"""Packs a model's weights once and writes them, so that engines map them instead of packing them at each start."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import DATA_FILE, HEADER_FILE, PackedHeader
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import open_source
from fastdeploy.models.mtp import collect_mtp_weights, forms_without_copies, needs_head, num_mtp_layers
from fastdeploy.models.mtp_source import MTPSource
from fastdeploy.models.packed_store import PackedWriter, Progress
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.repeated_tables import digest_of
from fastdeploy.models.weight_loader import WeightLoader
from fastdeploy.models.weight_source import digest_weight_files
from fastdeploy.models.weights import load_weights
from fastdeploy.ops.registry import selected_backend

_WEIGHTS = re.compile(r".*\.(safetensors|safetensors\.index\.json|bin|pt|pth|ckpt|gguf|onnx|h5|msgpack|pdparams)")


def pack_checkpoint(
    config: ModelConfig, folder: Path, quantization: QuantizationConfig, on_progress: Progress | None = None
) -> PackedHeader:
    """Write a folder with the packed weights of a checkpoint and copies of its other files.

    The folder appears when it is complete. Layers for multi-token prediction in the checkpoint are packed too.

    Args:
        config: of the checkpoint, whose files are in its `path`.
        folder: does not exist, or is empty.
        quantization: weight formats; those of config.json if none are given.
        on_progress: called with (name of the phase, fraction done).

    Raises:
        ConfigError: the folder is not empty or cannot be written, or the checkpoint cannot be loaded or is packed.
    """
    if config.packed is not None:
        raise ConfigError("model", f"{config.name} is packed already")
    formats = config.weight_formats(quantization)
    with _writing(folder) as unfinished:
        _copy_other_files(Path(config.path), unfinished)
        with (unfinished / DATA_FILE).open("wb") as file:
            header = _pack(config, formats, file, unfinished / DATA_FILE, on_progress)
            os.fsync(file.fileno())
        (unfinished / HEADER_FILE).write_text(header.to_json())
    return header


def _pack(
    config: ModelConfig, formats: QuantizationConfig, file: BinaryIO, path: Path, on_progress: Progress | None
) -> PackedHeader:
    """Write all packed weights to a file; return its header."""
    writer, architecture = PackedWriter(file, path), find_architecture(config)
    mtp_tensors: tuple[str, ...] = ()
    mtp_formats = formats.for_mtp_layers(config.dtype)
    with selected_backend().on_host():
        source, layout = open_source(config, architecture, "default_v1", seed=0)
        name = architecture.names.embedding
        embedding = "" if source.form(name) is not None else digest_of(source.read(name), config.dtype)
        weights = load_weights(config, architecture, source, on_progress, layout, formats, writer)
        decoder_bytes = sum(tensor.num_bytes for entry in writer.entries.values() for tensor in entry.tensors.values())
        if num_mtp_layers(config.path):
            layers = MTPSource(Path(config.path), config, architecture)
            loader = WeightLoader(config.dtype, layers, layers.shapes, None, mtp_formats, writer)
            forms = forms_without_copies(layers, config, architecture)
            copies_head = needs_head(config, "default_v1", mtp_formats.head, weights.head)
            collect_mtp_weights(loader, config, forms, copies_head, "default_v1")
            mtp_tensors = tuple(name for form in forms for name in form.shapes(config))
    return PackedHeader(
        layout=selected_backend().weight_layout,
        dtype=config.dtype,
        quantization=formats,
        source=digest_weight_files(Path(config.path)),
        num_bytes=writer.num_bytes,
        decoder_bytes=decoder_bytes,
        mtp_tensors=mtp_tensors,
        mtp_quantization=mtp_formats,
        entries=writer.entries,
        embedding=embedding,
    )


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Give a folder beside `folder` to write to, which becomes it if the block ends without an error.

    Raises:
        ConfigError: `folder` is not empty, or something cannot be written.
    """
    field = "OUT"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(field, f"{folder} exists and is not an empty folder")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(folder)
    except OSError as error:
        raise ConfigError(field, f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_other_files(source: Path, folder: Path) -> None:
    """Copy the files of a checkpoint that are not weights: configuration, tokenizer, license."""
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(".") and not _WEIGHTS.fullmatch(file.name):
            shutil.copyfile(file, folder / file.name)
