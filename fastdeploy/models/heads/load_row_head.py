# SPDX-License-Identifier: Apache-2.0
"""Loads MLP speculators and Medusa's heads."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.row_head_config import MedusaSizes, MLPSpeculatorSizes, RowHeadSizes, read_row_head_config
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.load_eagle import head_for_drafts
from fastdeploy.models.heads.medusa import MedusaHeads
from fastdeploy.models.heads.mlp_speculator import MLPSpeculator, SpeculatorStep, embedding_factor
from fastdeploy.models.heads.row_tensors import TOKEN_MAP, check_row_head_tensors, expected_shapes, open_row_head
from fastdeploy.models.heads.tensors import checked_ids
from fastdeploy.models.weight_loader import LinearSpec, StoredLinear, WeightLoader
from fastdeploy.models.weight_source import DummySource, HeadFiles, WeightSource
from fastdeploy.models.weights import check_quantization
from fastdeploy.ops.linear import PackedLinear, pack_linear
from fastdeploy.ops.registry import selected_backend


def find_row_head(folder: str, method: str, target: ModelConfig) -> RowHeadSizes:
    """Read the configuration of a head, and compare it with the target and with its tensors, of which ids are read.

    Raises:
        ConfigError: the head was made for another target, or a key, a tensor or an id is not valid, or the device
            does not take its width.
    """
    with selected_backend().on_host():
        files = open_row_head(Path(folder))
        config = read_row_head_config(Path(folder), method, target, files.shapes)
        check_row_head_tensors(files, config)
        if isinstance(config, MLPSpeculatorSizes):
            selected_backend().check_width("inner_dim", config.inner_size)
        _target_ids(files, config)
    return config


def load_row_head(
    config: RowHeadSizes, target: CausalLM, quantization: QuantizationConfig, load_choices: str, max_seqs: int
) -> MLPSpeculator | MedusaHeads:
    """Load a head that `find_row_head` has checked.

    Args:
        quantization: weight formats; projections have that of MLPs.
        load_choices: `default_v1` reads the files, `dummy` generates random weights.
        max_seqs: maximum number of sequences of a step.

    Raises:
        ConfigError: a dtype other than bfloat16 is quantized, or a file has changed.
    """
    check_quantization(target.config, quantization)
    with selected_backend().on_host():
        files, shapes = open_row_head(Path(config.path)), expected_shapes(config)
        source: WeightSource = DummySource(shapes, seed=0) if load_choices == "dummy" else files
        loader = WeightLoader(target.config.dtype, source, shapes, None, quantization)
        if isinstance(config, MedusaSizes):
            return _load_medusa(loader, config, target, load_choices, max_seqs, _target_ids(files, config))
        return _load_speculator(loader, config, max_seqs)


def _load_speculator(loader: WeightLoader, config: MLPSpeculatorSizes, max_seqs: int) -> MLPSpeculator:
    factor, inner = embedding_factor(config.num_drafts, config.inner_size), config.inner_size

    @cache
    def table(index: int) -> Tensor:
        wide = loader.read(f"emb.{index}.weight", "float32") * factor
        return selected_backend().place(wide.astype(loader.dtype))

    @cache
    def projection(index: int) -> PackedLinear:
        stored = (StoredLinear(f"proj.{index}", inner),)
        spec = LinearSpec("down", stored, inner if index else config.hidden_size)
        return loader.linear(spec, loader.quantization.mlp)

    @cache
    def head(index: int) -> PackedLinear:
        spec = LinearSpec("head", (StoredLinear(f"head.{index}", config.vocab_size),), inner)
        return loader.linear(spec, loader.quantization.head)

    @cache
    def norm(index: int) -> tuple[Tensor, Tensor]:
        return loader.copy(f"ln.{index}.weight"), loader.copy(f"ln.{index}.bias")

    def step(index: int) -> SpeculatorStep:
        own, of_projection = (0, min(index, 1)) if config.is_tied else (index, index)
        return SpeculatorStep(table(own), projection(of_projection), *norm(own), head(own))

    steps = [step(index) for index in range(config.num_drafts)]
    return MLPSpeculator(steps, config.hidden_size, config.scales_input, max_seqs)


def _load_medusa(
    loader: WeightLoader,
    config: MedusaSizes,
    target: CausalLM,
    load_choices: str,
    max_seqs: int,
    ids: NDArray[np.int32] | None,
) -> MedusaHeads:
    hidden, quantization = config.hidden_size, loader.quantization

    def matrix(name: str) -> PackedLinear:
        return loader.linear(LinearSpec("head", (StoredLinear(name, config.num_ids),), hidden), quantization.head)

    heads = range(config.num_drafts)
    blocks = [[_block(loader, f"{i}.{j}.linear", config) for j in range(config.num_blocks)] for i in heads]
    if config.has_own_heads:
        matrices = [matrix(f"{i}.{config.num_blocks}") for i in heads]
    elif config.has_shared_head:
        matrices = [matrix("lm_head")]
    elif converted := head_for_drafts(target, load_choices, quantization):
        matrices = [converted]
    else:
        return MedusaHeads(blocks, [target.shared.head.weight], 0, max_seqs, ids)
    return MedusaHeads(blocks, matrices, sum(m.num_bytes for m in matrices), max_seqs, ids)


def _block(loader: WeightLoader, name: str, config: MedusaSizes) -> PackedLinear:
    """Return x -> SiLU(W x + b) as a gated layer whose other half is 1 for every input."""
    size = config.hidden_size
    weight = loader.read(f"{name}.weight")
    bias = loader.read(f"{name}.bias") if config.has_bias else paddle.zeros([size], loader.dtype)
    gated = paddle.concat([weight, paddle.zeros([size, size], loader.dtype)])
    return pack_linear(gated, paddle.concat([bias, paddle.ones([size], loader.dtype)]), is_gated=True)


def _target_ids(files: HeadFiles, config: RowHeadSizes) -> NDArray[np.int32] | None:
    """Return the target's ids of those that a head drafts; None if they are the same.

    Raises:
        ConfigError: ids are out of range or occur twice.
    """
    if not isinstance(config, MedusaSizes) or not config.has_reduced_vocabulary:
        return None
    ids = files.stored(TOKEN_MAP).numpy().astype(np.int64)
    return checked_ids(ids, config.vocab_size, f"{config.path}: {TOKEN_MAP}")
