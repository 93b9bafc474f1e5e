# SPDX-License-Identifier: Apache-2.0
"""The tensors of MLP speculators and of Medusa's heads: their names, and which of them a configuration implies.

Medusa's original files name block j of head i `i.j.linear`, and its matrix of logits `i.{number of blocks}`. vLLM
converted them to `blocks.i.layers.j` and `lm_heads.i`.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastdeploy.config.row_head_config import MedusaSizes, RowHeadSizes
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.files import open_head_files
from fastdeploy.models.weight_loader import Shapes
from fastdeploy.models.weight_source import HeadFiles, listed

TOKEN_MAP = "token_map"
_PREFIXES = ("medusa_head.", "speculator.")
_CONVERTED_BLOCK = re.compile(r"blocks\.(\d{1,2})\.layers\.(\d{1,2})\.(weight|bias)")
_CONVERTED_HEAD = re.compile(r"lm_heads\.(\d{1,2})\.weight")


def open_row_head(folder: Path) -> HeadFiles:
    """Return the tensors of a head by their original names without a prefix.

    Raises:
        ConfigError: there are no weights, or a file is not valid.
    """
    files = open_head_files(folder)
    names = list(files.shapes)
    blocks = [match for match in map(_CONVERTED_BLOCK.fullmatch, names) if match]
    num_blocks = 1 + max((int(match[2]) for match in blocks), default=0)
    for name in names:
        if (usual := _usual(name, num_blocks)) != name:
            files.rename(name, usual)
    return files


def _usual(name: str, num_blocks: int) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if match := _CONVERTED_BLOCK.fullmatch(name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := _CONVERTED_HEAD.fullmatch(name):
        return f"{match[1]}.{num_blocks}.weight"
    return name


def expected_shapes(config: RowHeadSizes) -> Shapes:
    """Return the name and shape of every tensor that a head of this configuration has."""
    shapes = Shapes()
    if isinstance(config, MedusaSizes):
        hidden = config.hidden_size
        for head in range(config.num_drafts):
            for block in range(config.num_blocks):
                shapes[f"{head}.{block}.linear.weight"] = (hidden, hidden)
                if config.has_bias:
                    shapes[f"{head}.{block}.linear.bias"] = (hidden,)
            if config.has_own_heads:
                shapes[f"{head}.{config.num_blocks}.weight"] = (config.num_ids, hidden)
        if config.has_shared_head:
            shapes["lm_head.weight"] = (config.num_ids, hidden)
        if config.has_reduced_vocabulary:
            shapes[TOKEN_MAP] = (config.num_ids,)
        return shapes
    inner, is_tied = config.inner_size, config.is_tied
    for index in range(1 if is_tied else config.num_drafts):
        shapes[f"emb.{index}.weight"] = shapes[f"head.{index}.weight"] = (config.vocab_size, inner)
        shapes[f"ln.{index}.weight"] = shapes[f"ln.{index}.bias"] = (inner,)
    for index in range(min(2, config.num_drafts) if is_tied else config.num_drafts):
        shapes[f"proj.{index}.weight"] = (inner, inner if index else config.hidden_size)
    return shapes


def check_row_head_tensors(files: HeadFiles, config: RowHeadSizes) -> None:
    """Compare the tensors of a head with those that its configuration implies.

    Raises:
        ConfigError: tensors are missing, unexpected or of a wrong shape; names them.
    """
    compare_shapes(expected_shapes(config), dict(files.shapes), config.path)


def compare_shapes(expected: Shapes, found: Shapes, path: str) -> None:
    """Compare shapes by names.

    Raises:
        ConfigError: tensors are missing, unexpected or of a wrong shape; names them.
    """
    wrong = [f"{n} is {list(found[n])}, expected {list(s)}" for n, s in expected.items() if found.get(n, s) != s]
    problems = (
        ("missing", [name for name in expected if name not in found]),
        ("unexpected", sorted(name for name in found if name not in expected)),
        ("of wrong shape", wrong),
    )
    if texts := [f"{len(names)} {kind} ({listed(names)})" for kind, names in problems if names]:
        raise ConfigError("model", f"{path}: tensors do not match config.json: {'; '.join(texts)}")
