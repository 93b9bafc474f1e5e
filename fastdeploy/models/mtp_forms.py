# SPDX-License-Identifier: Apache-2.0
"""The forms in which checkpoints store layers for multi-token prediction, as data.

At position t + 1 the layer reads proj([emb_norm(embed(x_{t+1})) ; hidden_norm(h_t)]), where h_t is the target's hidden
state. One decoder layer follows, then a norm and a head that predict x_{t+2}. For later drafts, the layer's own state
replaces h_t. If there are several layers, the k-th one computes draft k: it reads the output of
the previous layer in place of h_t, and the token one position further on (DeepSeek-V3 report, section 2.2). The last
layer computes all later drafts.

- ERNIE 4.5 (`model.mtp_emb_norm.0`, ...): norm, head and embedding are the target's, unless a folder of its own has
  others. h_t and what replaces it are
  states after that norm (`normed`) or before it (`raw`), as the layer was trained; the files do not say.
- DeepSeek-V3 and GLM-4.5 (`model.layers.{number of layers}.enorm`, ...): the layer has its own norm and, if the files
  contain them, its own head and embedding. h_t is the target's state after its final norm; the output after the layer's
  own norm replaces it (docs/decisions/0016-state-of-the-next-draft.md).

The embedding comes first in the projection, as in the released checkpoints, although the DeepSeek-V3 report puts the
state first. tests/models/test_mtp_training.py shows that a trained layer drafts well only in this order.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from fastdeploy.config.drafting_checkpoint import ERNIE_MARK
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture, nextn_layers
from fastdeploy.models.layer_parts import LayerParts
from fastdeploy.models.weight_loader import Shapes

FIELD = "speculative_config.model"


@dataclass(frozen=True)
class MTPForm:
    """Names of one layer's tensors, and its variant of the computation.

    Attributes:
        emb_norm, hidden_norm, final_norm, embedding: tensor names; "" if the target's tensor is used.
        projection, head: names of linear layers without .weight or .bias; a head of "" is the target's.
        block: the decoder layer.
        has_bias: whether the projection has a bias.
        reads_normed: whether the layer reads states after the final norm (the target's, and in later draft passes its
            own) instead of before it.
        name_pattern: regular expression that matches the names of this layer's tensors only.
    """

    emb_norm: str
    hidden_norm: str
    projection: str
    block: LayerParts
    has_bias: bool
    reads_normed: bool
    name_pattern: str
    embedding: str = ""
    final_norm: str = ""
    head: str = ""

    def shapes(self, config: ModelConfig) -> Shapes:
        """Return the name and shape of every tensor of the layer."""
        hidden, vocab = config.hidden_size, config.vocab_size
        shapes: Shapes = {name: (hidden,) for name in (self.emb_norm, self.hidden_norm, self.final_norm) if name}
        shapes[f"{self.projection}.weight"] = (hidden, 2 * hidden)
        if self.has_bias:
            shapes[f"{self.projection}.bias"] = (hidden,)
        if self.embedding:
            shapes[self.embedding] = (vocab, hidden)
        if self.head:
            shapes[f"{self.head}.weight"] = (vocab, hidden)
        return shapes | self.block.shapes


def with_tensors_beside(form: MTPForm, architecture: Architecture, found: Collection[str]) -> MTPForm:
    """Return the form of a layer in a folder of its own, which may have an embedding, a norm and a head for it.

    Args:
        found: tensor names of the folder.
    """
    names = architecture.names
    return replace(
        form,
        embedding=form.embedding or (names.embedding if names.embedding in found else ""),
        final_norm=form.final_norm or (names.final_norm if names.final_norm in found else ""),
        head=form.head or (names.head if f"{names.head}.weight" in found else ""),
    )


def ernie_form(config: ModelConfig, architecture: Architecture, index: int, hidden_state: str) -> MTPForm:
    """Return the form of ERNIE 4.5 for the layer of this index; `hidden_state` is `normed` or `raw`."""
    return MTPForm(
        emb_norm=f"model.mtp_emb_norm.{index}.weight",
        hidden_norm=f"model.mtp_hidden_norm.{index}.weight",
        projection=f"model.mtp_linear_proj.{index}",
        block=architecture.block(config, f"model.mtp_block.{index}."),
        has_bias=config.use_bias,
        reads_normed=hidden_state == "normed",
        name_pattern=re.escape(ERNIE_MARK),
    )


def deepseek_form(config: ModelConfig, architecture: Architecture, index: int, names: Collection[str]) -> MTPForm:
    """Return the form of DeepSeek-V3 and GLM-4.5 for the layer of this index.

    Args:
        names: tensor names of the files; if embedding or head are missing, the target's are used.
    """
    prefix = f"model.layers.{index}."
    embedding, head = f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head"
    return MTPForm(
        emb_norm=f"{prefix}enorm.weight",
        hidden_norm=f"{prefix}hnorm.weight",
        projection=f"{prefix}eh_proj",
        block=architecture.block(config, prefix, is_sparse=config.experts is not None),
        has_bias=False,
        reads_normed=True,
        name_pattern=re.escape(prefix),
        embedding=embedding if embedding in names else "",
        final_norm=f"{prefix}shared_head.norm.weight",
        head=head if f"{head}.weight" in names else "",
    )


def usual_form(config: ModelConfig, architecture: Architecture, hidden_state: str) -> MTPForm:
    """Return the form of the first layer that releases of this architecture have, for weights without files.

    Raises:
        ConfigError: the layer does not read `hidden_state`.
    """
    if not architecture.has_nextn_layers:
        return ernie_form(config, architecture, 0, hidden_state)
    prefix = f"model.layers.{config.num_layers}."
    names = [f"{prefix}{name}.weight" for name in ("eh_proj", "embed_tokens", "shared_head.head")]
    return find_forms(names, config, architecture, hidden_state)[0]


def find_forms(
    names: Collection[str], config: ModelConfig, architecture: Architecture, hidden_state: str
) -> list[MTPForm]:
    """Return the form of each MTP layer among these tensors, in order.

    Args:
        hidden_state: `normed` or `raw`, which layers in ERNIE's form only can read.

    Raises:
        ConfigError: the layers are in another form and would not read `raw` states.
    """
    check_hidden_state(names, hidden_state)
    if any(ERNIE_MARK in name for name in names):
        return [
            ernie_form(config, architecture, index, hidden_state) for index in range(max(1, len(ernie_layers(names))))
        ]
    indices = (index for index in nextn_layers(names) if index >= config.num_layers)
    return [deepseek_form(config, architecture, index, names) for index in indices]


def check_hidden_state(names: Collection[str], hidden_state: str) -> None:
    """Raise ConfigError if the layers among these tensors are in another form than ERNIE's and would read `raw`."""
    if hidden_state != "normed" and nextn_layers(names) and not any(ERNIE_MARK in name for name in names):
        raise ConfigError(
            "speculative_config.mtp_hidden_state",
            f"expected normed, got {hidden_state}: only layers in ERNIE's form (*{ERNIE_MARK}*) exist in both variants",
        )


def ernie_layers(names: Collection[str]) -> set[str]:
    """Return the indices of the layers in ERNIE's form among these tensors."""
    return {match[1] for name in names if (match := re.search(r"\.mtp_block\.(\d+)\.", name))}
