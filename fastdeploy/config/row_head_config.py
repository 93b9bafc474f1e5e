# SPDX-License-Identifier: Apache-2.0
"""Description of heads that draft from one state of their target, without attention: MLP speculators and Medusa.

Sources: IBM's and the foundation-model stack's MLP speculators, FasterDecoding/Medusa, and the form into which vLLM
converted Medusa.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdeploy.config.checkpoint_json import read_json_object
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError

MLP_SPECULATOR, MEDUSA = "mlp_speculator", "medusa"
ROW_HEAD_METHODS = (MLP_SPECULATOR, MEDUSA)
MAX_HEADS = 16
_MEDUSA_BLOCK = re.compile(r"(\d{1,2})\.(\d{1,2})\.linear\.weight")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class MLPSpeculatorSizes:
    """An MLP speculator.

    Attributes:
        path: its folder.
        hidden_size: width of the target's states.
        inner_size: width of its own.
        vocab_size: of the target.
        num_drafts: number of drafts that it makes.
        is_tied: whether all drafts have the same weights; only the first projection is another one.
        scales_input: whether the target's state is normalised first.
    """

    path: str
    hidden_size: int
    inner_size: int
    vocab_size: int
    num_drafts: int
    is_tied: bool
    scales_input: bool
    method: str = MLP_SPECULATOR

    @property
    def identity(self) -> str:
        """Return all of it but its folder."""
        return repr(replace(self, path=""))


@dataclass(frozen=True)
class MedusaSizes:
    """Medusa's heads.

    Attributes:
        path: their folder.
        hidden_size: width of the target's states.
        vocab_size: of the target.
        num_drafts: number of heads, each of which makes one draft.
        num_blocks: residual blocks per head.
        has_bias: whether their linear layers have a bias.
        num_ids: number of ids that the heads draft; fewer than the target's if there is a table of them.
        has_own_heads: whether each head has a matrix of logits of its own; else the target's is used, or the one that
            all share.
        has_shared_head: whether the files hold a matrix of logits that all heads share.
    """

    path: str
    hidden_size: int
    vocab_size: int
    num_drafts: int
    num_blocks: int
    has_bias: bool
    num_ids: int
    has_own_heads: bool
    has_shared_head: bool
    method: str = MEDUSA

    @property
    def identity(self) -> str:
        """Return all of it but its folder."""
        return repr(replace(self, path=""))

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Return whether drafts are some of the target's ids only."""
        return self.num_ids < self.vocab_size


RowHeadSizes = MLPSpeculatorSizes | MedusaSizes


def read_row_head_config(folder: Path, method: str, target: ModelConfig, shapes: Shapes) -> RowHeadSizes:
    """Read config.json of a head, and compare it with its target.

    Args:
        method: one of ROW_HEAD_METHODS.
        shapes: of the head's tensors, by the names of `models.heads.row_tensors`.

    Raises:
        ConfigError: a key is missing or not valid, or the head was made for another target.
    """
    raw = read_json_object(folder / "config.json", "model") or {}
    where = f"{folder}/config.json: "
    if method == MEDUSA:
        return _read_medusa(raw, folder, target, shapes, where)
    for key, expected in (("emb_dim", target.hidden_size), ("vocab_size", target.vocab_size)):
        _check_equal(raw, key, expected, where)
    inner = raw.get("inner_dim") or target.hidden_size
    return MLPSpeculatorSizes(
        str(folder),
        target.hidden_size,
        _positive(inner, "inner_dim", 2**20, where),
        target.vocab_size,
        _positive(raw.get("n_predict"), "n_predict", MAX_HEADS, where),
        _switch(raw, "tie_weights", where),
        _switch(raw, "scale_input", where),
    )


def _read_medusa(raw: Mapping[str, Any], folder: Path, target: ModelConfig, shapes: Shapes, where: str) -> MedusaSizes:
    """Return what the tensors say; published files name other numbers of heads than they hold."""
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if raw.get(key) is not None:
            _check_equal(raw, key, expected, where)
    blocks = [(int(match[1]), int(match[2])) for match in map(_MEDUSA_BLOCK.fullmatch, shapes) if match]
    if not blocks:
        raise ConfigError("model", f"{folder} has no tensors of Medusa's heads (*.linear.weight)")
    num_drafts, num_blocks = 1 + max(head for head, _ in blocks), 1 + max(block for _, block in blocks)
    if num_drafts > MAX_HEADS:
        raise ConfigError("model", f"{folder} has {num_drafts} heads, expected at most {MAX_HEADS}")
    own, shared = shapes.get(f"0.{num_blocks}.weight"), shapes.get("lm_head.weight")
    logits = own or shared or (target.vocab_size,)
    return MedusaSizes(
        str(folder),
        target.hidden_size,
        target.vocab_size,
        num_drafts,
        num_blocks,
        "0.0.linear.bias" in shapes,
        min(logits[0], target.vocab_size),
        own is not None,
        own is None and shared is not None,
    )


def _check_equal(raw: Mapping[str, Any], key: str, expected: int, where: str) -> None:
    if raw.get(key) != expected:
        raise ConfigError("model", f"{where}{key} is {raw.get(key)!r:.100}, but the target has {expected}")


def _positive(value: Any, key: str, limit: int, where: str) -> int:
    if type(value) is not int or not 1 <= value <= limit:
        raise ConfigError("model", f"{where}{key}: expected an integer in [1, {limit}], got {value!r:.100}")
    return value


def _switch(raw: Mapping[str, Any], key: str, where: str) -> bool:
    value = raw.get(key, False)
    if type(value) is not bool:
        raise ConfigError("model", f"{where}{key}: expected true or false, got {value!r:.100}")
    return value
