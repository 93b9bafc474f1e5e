# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction beside their target; their forms are described in models.mtp_forms.

The first layer's row at position t reads the target's state at t - 1, a further one's the state of the layer before it:
position 0, and one position more for each further layer, has no state before it and is seen by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import paddle
from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.layers.embedding import Embedding
from fastdeploy.layers.linear import Linear
from fastdeploy.layers.logits import LogitsHead
from fastdeploy.layers.norm import RMSNorm
from fastdeploy.models.architecture import Architecture, nextn_layers
from fastdeploy.models.decoder import CausalLM, DecoderLayer, StepBuffers
from fastdeploy.models.loader import load_head
from fastdeploy.models.mtp_forms import ERNIE_MARK, FIELD, MTPForm, ernie_form, ernie_layers, find_forms
from fastdeploy.models.paddle_layout import StoredSource, name_prefix, stored_fused, stored_whole
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_source import DummySource, SafetensorsSource, WeightSource
from fastdeploy.models.weights import (
    LayerWeights,
    LinearPart,
    Shapes,
    WeightLoader,
    check_quantization,
    check_shapes,
    expected_shapes,
)
from fastdeploy.ops.attention import AttentionMetadata, KVCache
from fastdeploy.ops.linear import PackedLinear, first_outputs, linear, pack_linear
from fastdeploy.ops.norm import NormParams


@dataclass(frozen=True)
class MTPWeights:
    """The layer's own weights; the projection is split into the halves that read the embedding and the state.

    What is None is the target's.
    """

    emb_norm: Tensor
    hidden_norm: Tensor
    emb_projection: PackedLinear
    hidden_projection: PackedLinear
    block: LayerWeights
    embedding: Tensor | None
    final_norm: Tensor | None
    head: PackedLinear | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the embedding and of the packed layers, without the head, which layers may share."""
        block = self.block
        linears = (self.emb_projection, self.hidden_projection, block.qkv, block.output, block.gate_up, block.down)
        embedding = 0 if self.embedding is None else int(self.embedding.size) * int(self.embedding.element_size())
        return embedding + sum(linear.num_bytes for linear in linears)


class MTPBuffers:
    """Buffers of all layers of a target, of which one runs at a time."""

    def __init__(self, target: CausalLM) -> None:
        """Allocate as many rows as the target takes."""
        self.step = StepBuffers(target.config, target.max_rows)
        self.source: Tensor = paddle.zeros([target.max_rows, target.config.hidden_size], target.config.dtype)


class MTPLayer:
    """A layer, bound to the parts that it shares with its target and to the layers' buffers.

    Attributes:
        source: [max_rows, hidden_size], the state that each row reads; written by the caller.
        output: [max_rows, hidden_size], what stands for the states of the next positions.
        head: what drafts are chosen with.
        own_head: its weight if it is not the target's; layers may share it.
        num_weight_bytes: of all that is not the target's, without the head.
        max_rows: most rows of a call.
    """

    def __init__(
        self,
        weights: MTPWeights,
        target: CausalLM,
        recycles_normed: bool,
        index: int,
        buffers: MTPBuffers,
    ) -> None:
        """Bind the weights.

        Args:
            recycles_normed: `output` is what the final norm leaves.
            index: 0 for the layer that reads the target's states.
        """
        config = target.config
        shared, eps = target.shared, config.rms_norm_eps
        self.max_rows = target.max_rows
        self.source, self._buffers = buffers.source, buffers.step
        self._embedding = shared.embedding if weights.embedding is None else Embedding(weights.embedding)
        self._final_norm = shared.final_norm if weights.final_norm is None else RMSNorm(weights.final_norm, eps)
        self.own_head, self.num_weight_bytes = weights.head, weights.num_bytes
        self.head = shared.head if weights.head is None else LogitsHead(weights.head)
        self._recycles_normed = recycles_normed
        self.output: Tensor = self._buffers.normed if recycles_normed else self._buffers.hidden
        self._emb_projection = Linear(weights.emb_projection, NormParams(weights.emb_norm, eps))
        self._hidden_projection = Linear(weights.hidden_projection, NormParams(weights.hidden_norm, eps))
        self._block = DecoderLayer(
            config,
            shared.traits,
            weights.block,
            shared.heads,
            shared.cos_sin,
            self._buffers,
            num_masked_prefix=index + 1,
        )

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, cache: KVCache) -> None:
        """Compute the layer: write keys and values, and to `output` what takes the place of the target's states.

        Args:
            token_ids: [max_rows] int32, the token at each row's position; `source` holds the state before it.
            metadata: the rows, at most max_rows.
            cache: of this layer.
        """
        hidden, normed, num_rows = self._buffers.hidden, self._buffers.normed, metadata.num_rows
        self._embedding(token_ids, normed, num_rows)
        self._emb_projection(normed, hidden, num_rows)
        self._hidden_projection(self.source, hidden, num_rows, hidden)
        self._block(metadata, cache)
        if self._recycles_normed:
            self._final_norm(hidden, normed, num_rows)

    def compute_logits(self, states: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of the first num_rows rows, rows of `output`, into out [capacity, vocab] float32.

        A narrower `out` takes those of the first ids, a multiple of 64.
        """
        if not self._recycles_normed:
            self._final_norm(states, self._buffers.normed, num_rows)
            states = self._buffers.normed
        weight, num_ids = self.head.weight, out.shape[1]
        linear(states, weight if num_ids == weight.out_features else first_outputs(weight, num_ids), out, num_rows)


def load_mtp_layers(
    target: CausalLM, path: str | None, load_choices: str, quantization: QuantizationConfig, most: int = 1
) -> list[MTPLayer]:
    """Read the layers that belong to `target`.

    Args:
        path: folder of the layers' tensors; None where they lie in the target's checkpoint.
        load_choices: `default_v1` reads the files, `dummy` draws weights of the same shapes, for one layer.
        quantization: the format of the layers' weights (the projection's is that of attention) and of the head that
            they draft with: the target's own where it has this format, else another copy.
        most: layers wanted; the files may hold more.

    Raises:
        ConfigError: no such layer, tensors that do not match, or quantization of another dtype than bfloat16.
    """
    config = target.config
    check_quantization(config, quantization)
    architecture = find_architecture(config)
    source: WeightSource
    if load_choices == "dummy":
        forms = [ernie_form(config, 0)]
        source = DummySource(forms[0].shapes(config, architecture.traits(config)), seed=0)
    else:
        files = MTPSource(Path(path or config.path), config, architecture)
        forms, source = files.forms, files
    loader = WeightLoader(config, architecture, source, dict(source.shapes), None, quantization)
    forms, head = forms[:most], None
    if quantization.head != target.shared.head.weight.quantization and not all(form.head for form in forms):
        head = load_head(config, load_choices, quantization.head)
    buffers = MTPBuffers(target)
    return [
        MTPLayer(_load(loader, config, form, quantization.attention, head), target, form.recycles_normed, i, buffers)
        for i, form in enumerate(forms)
    ]


def num_mtp_layers(folder: str) -> int:
    """Return of how many such layers the checkpoint in `folder` has tensors, readable or not."""
    names = SafetensorsSource(Path(folder)).shapes
    return max(1, len(ernie_layers(names))) if any(ERNIE_MARK in name for name in names) else len(nextn_layers(names))


def _load(
    loader: WeightLoader, config: ModelConfig, form: MTPForm, quantization: str, shared_head: PackedLinear | None
) -> MTPWeights:
    """Read one layer; `quantization` is the projection's format."""
    hidden = config.hidden_size
    projection = loader.owned(f"{form.projection}.weight")
    bias = loader.owned(f"{form.projection}.bias") if form.has_bias else None
    head = (LinearPart(form.head, config.vocab_size),)
    return MTPWeights(
        emb_norm=loader.owned(form.emb_norm),
        hidden_norm=loader.owned(form.hidden_norm),
        emb_projection=pack_linear(projection[:, :hidden].contiguous(), bias, quantization),
        hidden_projection=pack_linear(projection[:, hidden:].contiguous(), None, quantization),
        block=loader.layer(form.block),
        embedding=loader.owned(form.embedding) if form.embedding else None,
        final_norm=loader.owned(form.final_norm) if form.final_norm else None,
        head=loader.linear(head, hidden, False, loader.head_format) if form.head else shared_head,
    )


class MTPSource(StoredSource):
    """The layers' tensors under the names and in the shapes of torch layout, wherever and however the files hold them.

    The projection is not square: its shape says whether linear layers are stored [out, in] or, as Paddle does,
    [in, out]; then some may be fused.
    """

    def __init__(self, folder: Path, config: ModelConfig, architecture: Architecture) -> None:
        """Open the files and compare names and shapes.

        Raises:
            ConfigError: no layer there, or tensors that are missing, surplus or misshapen, by name.
        """
        files = SafetensorsSource(folder)
        prefix = name_prefix(files, architecture)
        names = {re.sub(f"^{prefix}\\.", "model.", name): name for name in files.shapes}
        self.forms = find_forms(names, config)
        if not self.forms:
            raise ConfigError(FIELD, f"{folder} holds no layer for multi-token prediction (*{ERNIE_MARK}*, *.eh_proj)")
        shapes = Shapes()
        for form in self.forms:
            shapes.update(form.shapes(config, architecture.traits(config)))
        projection = names.get(f"{self.forms[0].projection}.weight", "")
        is_paddle = files.shapes.get(projection) == (2 * config.hidden_size, config.hidden_size)
        whole = {form.embedding for form in self.forms} if is_paddle else shapes
        stored = dict(stored_whole(shapes, prefix, whole))
        if is_paddle:
            blocks = [form.block for form in self.forms]
            stored.update(stored_fused(files, config, architecture, prefix, blocks))
        super().__init__(files, shapes, stored)
        strict = replace(architecture, ignorable=("rotary_emb.inv_freq",))
        found = self._of_layers(names, expected_shapes(config, architecture), files.shapes)
        layout = "Paddle layout" if is_paddle else "torch layout"
        check_shapes(found, self.stored_shapes, replace(config, path=str(folder)), strict, layout)

    def _of_layers(self, names: Mapping[str, str], of_target: Shapes, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
        """Return the files' tensors without the target's own, which lie beside the layers'."""
        marks = "|".join(form.marks for form in self.forms)
        return {
            stored: shapes[stored]
            for name, stored in names.items()
            if re.search(marks, name) or (name not in of_target and not _is_of_decoder(name))
        }


def _is_of_decoder(name: str) -> bool:
    """Return whether the target's loader answers for the tensor, fused layers among them."""
    return name.startswith(("model.layers.", "lm_head."))
