# SPDX-License-Identifier: Apache-2.0
"""The tensors of a head of EAGLE's kinds: their names, and which of them its configuration implies.

Files name them with or without `model.`, and the first layer of EAGLE 3 `midlayer` or `layers.0`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastdeploy.config.head_config import HeadConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.files import open_head_files
from fastdeploy.models.heads.row_tensors import compare_shapes
from fastdeploy.models.weight_loader import Shapes
from fastdeploy.models.weight_source import HeadFiles

D2T = "d2t"
_NOT_READ = ("t2d",)  # the inverse of d2t


def open_head(folder: Path) -> HeadFiles:
    """Return the tensors of a head, by names without `model.` in which the first layer is `layers.0`.

    Raises:
        ConfigError: there are no weights, or a file is not valid.
    """
    files = open_head_files(folder)
    files.leave_out([name for name in files.shapes if _usual(name) in _NOT_READ])
    for name in list(files.shapes):
        if _usual(name) != name:
            files.rename(name, _usual(name))
    return files


def _usual(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def expected_shapes(config: HeadConfig) -> Shapes:
    """Return the name and shape of every tensor that a head of this configuration has."""
    model, is_eagle3 = config.model, config.is_eagle3
    hidden, vocab, heads = model.hidden_size, model.vocab_size, model.num_heads * model.head_dim
    shapes = Shapes()
    if not is_eagle3:
        _add_linear(shapes, "fc", hidden, 2 * hidden, config.has_fc_bias)
    elif config.taps:
        _add_linear(shapes, "fc", hidden, len(config.taps) * config.target_width, config.has_fc_bias)
    if config.has_fc_norms:
        shapes.update({f"fc_norm.{i}.weight": (config.target_width,) for i in range(len(config.taps))})
    for index in range(model.num_layers):
        prefix, is_first = f"layers.{index}.", index == 0
        key_value, inputs = model.num_kv_heads * model.head_dim, 2 * hidden if is_first and is_eagle3 else hidden
        for name, outputs in (("q", heads), ("k", key_value), ("v", key_value)):
            _add_linear(shapes, f"{prefix}self_attn.{name}_proj", outputs, inputs, config.has_qkv_bias)
        _add_linear(shapes, f"{prefix}self_attn.o_proj", hidden, heads, config.has_output_bias)
        for name in ("gate", "up"):
            _add_linear(shapes, f"{prefix}mlp.{name}_proj", model.intermediate_size, hidden, config.has_mlp_bias)
        _add_linear(shapes, f"{prefix}mlp.down_proj", hidden, model.intermediate_size, config.has_mlp_bias)
        if is_eagle3 or not is_first:
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        if is_eagle3 and is_first:
            shapes[f"{prefix}hidden_norm.weight"] = (hidden,)
        if config.has_qk_norm:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (model.head_dim,) for name in "qk"}
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    if is_eagle3:
        shapes["norm.weight"] = (hidden,)
    if config.has_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if config.has_head or config.has_reduced_vocabulary:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.has_reduced_vocabulary:
        shapes[D2T] = (config.draft_vocab_size,)
    return shapes


def _add_linear(shapes: Shapes, name: str, outputs: int, inputs: int, has_bias: bool) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs)
    if has_bias:
        shapes[f"{name}.bias"] = (outputs,)


def check_head_tensors(files: HeadFiles, config: HeadConfig) -> None:
    """Compare the tensors of a head with those that its configuration implies; a whole vocabulary needs no `d2t`.

    Raises:
        ConfigError: tensors are missing, unexpected or of a wrong shape; names them.
    """
    found = dict(files.shapes)
    if not config.has_reduced_vocabulary:
        found.pop(D2T, None)
    compare_shapes(expected_shapes(config), found, config.model.name)


def target_ids(files: HeadFiles, config: HeadConfig) -> NDArray[np.int32] | None:
    """Return the target's id of each id that a head drafts; None if they are the same.

    `d2t` holds differences: the target's id minus the head's.

    Raises:
        ConfigError: ids are out of range or occur twice.
    """
    if not config.has_reduced_vocabulary:
        return None
    offsets = files.stored(D2T).numpy().astype(np.int64)
    return checked_ids(offsets + np.arange(len(offsets)), config.model.vocab_size, f"{config.model.name}: {D2T}")


def checked_ids(ids: NDArray[np.int64], vocab_size: int, where: str) -> NDArray[np.int32]:
    """Return the target's ids of those that a head drafts.

    Raises:
        ConfigError: ids are out of range or occur twice; the message begins with `where`.
    """
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ConfigError("model", f"{where}: expected ids in [0, {vocab_size}), got {outside[0]}")
    values, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        raise ConfigError("model", f"{where}: expected distinct ids, got {values[counts > 1][0]} twice")
    return ids.astype(np.int32)
