# SPDX-License-Identifier: Apache-2.0
"""Loading of models: from a checkpoint's configuration to a model that can run steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastdeploy.config.env import read_env
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.config.run_dtype import DType
from fastdeploy.config.weight_files import unused_tensors
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.files import open_files
from fastdeploy.models.fused_experts import FusedExpertsSource, has_fused_experts
from fastdeploy.models.mtp_source import mtp_tensor_names
from fastdeploy.models.own_codes import packed_form
from fastdeploy.models.packed_store import NoTensors, PackedReader, Progress
from fastdeploy.models.paddle_layout import Layout, PaddleSource, find_layout, name_prefix, renamed
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_loader import Shapes, WeightLoader
from fastdeploy.models.weight_source import DummySource, StoredTensors, WeightSource
from fastdeploy.models.weights import (
    DecoderWeights,
    check_quantization,
    check_shapes,
    collect_weights,
    expected_shapes,
    load_weights,
)
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import FORMS, QuantizedForm
from fastdeploy.ops.registry import selected_backend


def load_model(
    config: ModelConfig,
    *,
    max_rows: int,
    max_model_len: int,
    load_choices: str = "default_v1",
    dtype: DType | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
    quantization: QuantizationConfig = UNQUANTIZED,
) -> CausalLM:
    """Load the model of a checkpoint.

    Args:
        config: the checkpoint's configuration; the weights are in its `path`.
        max_rows: maximum number of rows in a step.
        max_model_len: maximum context length in tokens.
        load_choices: `default_v1` reads the files, `dummy` generates random weights of the same shapes from `seed`.
        dtype: overrides config.dtype.
        seed: of the dummy weights.
        on_progress: called with (name of the phase, fraction done).
        quantization: weight formats; those of config.json if none are given.

    Raises:
        ConfigError: the architecture, context length, load choice or file is not supported, or tensors do not match.
    """
    if dtype is not None:
        config = replace(config, dtype=dtype)
    architecture = find_architecture(config)
    config.check_max_model_len(max_model_len)
    quantization = config.weight_formats(quantization)
    with selected_backend().on_host():
        if config.packed is not None and load_choices == "default_v1":
            weights = _map_weights(config, architecture, quantization, on_progress)
        else:
            source, layout = open_source(config, architecture, load_choices, seed)
            weights = load_weights(config, architecture, source, on_progress, layout, quantization)
    return CausalLM(config, architecture.traits(config), weights, max_rows=max_rows, max_model_len=max_model_len)


def check_tensors(config: ModelConfig, load_choices: str) -> None:
    """Compare names and shapes of a checkpoint's tensors with its configuration, without reading any tensor.

    Raises:
        ConfigError: a file cannot be read, or tensors are missing, unexpected or of a wrong shape.
    """
    if config.packed is None and load_choices == "default_v1":
        architecture = find_architecture(config)
        with selected_backend().on_host():
            source, layout = open_source(config, architecture, load_choices, seed=0)
            check_shapes(source.shapes, expected_shapes(config, architecture), config, architecture, layout)


def load_head(config: ModelConfig, load_choices: str, quantization: str) -> PackedLinear:
    """Load only the language-model head of a checkpoint, which may be tied to the embedding, in the given format."""
    if config.packed is not None and load_choices == "default_v1":
        head = config.packed.quantization.head
        raise ConfigError(
            "speculative_config.quantization",
            f"{config.name} is packed, and layers from another folder use its head: expected head {head}, "
            f"got {quantization}",
        )
    loader, name = _head_loader(config, load_choices)
    with selected_backend().on_host():
        return loader.pack_table(name, quantization)


def head_form(config: ModelConfig, load_choices: str, quantization: str) -> QuantizedForm | None:
    """Return the form in which `load_head` packs a head."""
    if not config.own_codes or config.packed is not None:
        return FORMS.get(quantization)
    loader, name = _head_loader(config, load_choices)
    return packed_form([loader.source.form(name)], quantization)


def _head_loader(config: ModelConfig, load_choices: str) -> tuple[WeightLoader, str]:
    """Return a loader of a checkpoint, and the name of the weight of its head, which may be the embedding."""
    architecture = find_architecture(config)
    names = architecture.names
    name = names.embedding if config.tie_word_embeddings else f"{names.head}.weight"
    with selected_backend().on_host():
        source, _ = open_source(config, architecture, load_choices, seed=0)
    return WeightLoader(config.dtype, source, {}, None, UNQUANTIZED), name


def _map_weights(
    config: ModelConfig, architecture: Architecture, quantization: QuantizationConfig, on_progress: Progress | None
) -> DecoderWeights:
    """Return the weights that `fastdeploy quantize` has packed."""
    check_quantization(config, quantization)
    loader = packed_loader(config, expected_shapes(config, architecture), quantization, on_progress)
    return collect_weights(loader, config, architecture)


def packed_loader(
    config: ModelConfig, shapes: Shapes, quantization: QuantizationConfig, on_progress: Progress | None = None
) -> WeightLoader:
    """Return a loader that takes all weights from those that `fastdeploy quantize` has packed.

    Args:
        shapes: of the tensors from which they were made.
        on_progress: called with (name of the phase, fraction done).
    """
    assert config.packed is not None, "the checkpoint is packed"
    reader = PackedReader(config.packed, Path(config.path), on_progress, bool(config.own_codes))
    return WeightLoader(config.dtype, NoTensors(), shapes, None, quantization, reader)


def open_source(
    config: ModelConfig, architecture: Architecture, load_choices: str, seed: int
) -> tuple[WeightSource, str]:
    """Return the tensors in torch layout, and how the layout of the files was determined."""
    if load_choices == "dummy":
        return DummySource(expected_shapes(config, architecture), seed), ""
    if load_choices != "default_v1":
        raise ConfigError("load_choices", f"expected default_v1 or dummy, got '{load_choices}'")
    return open_checkpoint(config, architecture)


def open_checkpoint(config: ModelConfig, architecture: Architecture) -> tuple[StoredTensors, str]:
    """Return the checkpoint's tensors in torch layout, and how the layout of the files was determined."""
    source = open_files(Path(config.path), config.dtype)
    source.leave_out(unused_tensors(source.shapes, config.num_layers))
    source.leave_out(mtp_tensor_names(source, config, architecture))
    embedding = architecture.names.embedding
    embeddings = {embedding, renamed(embedding, name_prefix(source, architecture))}
    if config.tie_word_embeddings and embeddings.isdisjoint(source.shapes):
        source.rename(f"{architecture.names.head}.weight", embedding)
    layout: Layout
    if read_env().is_torch_forced:
        layout, reason = "torch", "FD_FOR_TORCH_MODEL_FORMAT=1"
    else:
        layout, reason = find_layout(source, config, architecture)
    if layout == "paddle":
        hint = f"{reason}; FD_FOR_TORCH_MODEL_FORMAT=1 selects torch layout"
        return PaddleSource(source, config, architecture, hint), reason
    if has_fused_experts(source):
        return FusedExpertsSource(source, config, architecture, reason), reason
    return source, reason
