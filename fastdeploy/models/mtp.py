# SPDX-License-Identifier: Apache-2.0
"""A layer for multi-token prediction beside its target; its forms are described in models.mtp_forms.

Position 0 has no state before it and is seen by nobody.
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
from fastdeploy.models.decoder import CausalLM, DecoderLayer, StepBuffers, full_step
from fastdeploy.models.mtp_forms import ERNIE_MARK, FIELD, MTPForm, ernie_form, find_form
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
from fastdeploy.ops.attention import KVCache, RowIndex
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.linear import PackedLinear, WeightPiece, pack_linear
from fastdeploy.ops.norm import NormRule
from fastdeploy.ops.recording import Recording, can_record


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


class MTPLayer:
    """The layer, bound to the parts that it shares with its target and to buffers of its own.

    Attributes:
        source: [max_rows, hidden_size], the state that each row reads; written by the caller of `forward`.
        output: [max_rows, hidden_size], what `forward` returns.
        max_rows: most rows of a call.
    """

    def __init__(self, config: ModelConfig, weights: MTPWeights, target: CausalLM, recycles_normed: bool) -> None:
        """Allocate buffers for as many rows as the target takes.

        Args:
            recycles_normed: `forward` returns outputs after the final norm.
        """
        shared, eps = target.shared, config.rms_norm_eps
        self.max_rows = target.max_rows
        self._buffers = StepBuffers(config, target.max_rows)
        self.source: Tensor = paddle.zeros([target.max_rows, config.hidden_size], config.dtype)
        self._embedding = shared.embedding if weights.embedding is None else Embedding(weights.embedding)
        self._final_norm = shared.final_norm if weights.final_norm is None else RMSNorm(weights.final_norm, eps)
        self._head = shared.head if weights.head is None else LogitsHead(weights.head)
        self._recycles_normed = recycles_normed
        self.output: Tensor = self._buffers.normed if recycles_normed else self._buffers.hidden
        self._emb_projection = Linear(weights.emb_projection, NormRule(weights.emb_norm, eps))
        self._hidden_projection = Linear(weights.hidden_projection, NormRule(weights.hidden_norm, eps))
        self._block = DecoderLayer(
            config, shared.traits, weights.block, shared.heads, shared.cos_sin, self._buffers, hides_first=True
        )
        self._recording: Recording | None = None

    def forward(self, token_ids: Tensor, batch: BatchIndex, cache: KVCache) -> Tensor:
        """Write keys and values of the batch's rows and return what stands for the next positions' states.

        The launches are recorded at the first call: every call passes the same objects.

        Args:
            token_ids: [max_rows] int32, the token at each row's position; `source` holds the state before it.
            batch: the rows, at most max_rows.
            cache: of this layer.

        Returns:
            `output`; the first batch.num_rows rows are valid until the next call.
        """
        if not can_record():
            self._call_operators(token_ids, batch, cache, batch.num_rows)
            return self.output
        if self._recording is None:
            full = full_step(batch, self.max_rows)
            self._recording = Recording(lambda: self._call_operators(token_ids, full, cache, self.max_rows))
        self._recording.replay(self.output, batch.num_rows, batch.num_seqs)
        return self.output

    def compute_logits(self, states: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of the first num_rows rows of what `forward` returned into out [capacity, vocab] float32."""
        if not self._recycles_normed:
            self._final_norm(states, self._buffers.normed, num_rows)
            states = self._buffers.normed
        self._head(states, out, num_rows)

    def _call_operators(self, token_ids: Tensor, batch: RowIndex, cache: KVCache, num_rows: int) -> None:
        hidden, normed = self._buffers.hidden, self._buffers.normed
        self._embedding(token_ids, normed, num_rows)
        self._emb_projection(normed, hidden, num_rows)
        self._hidden_projection(self.source, hidden, num_rows, hidden)
        self._block(batch, cache, num_rows)
        if self._recycles_normed:
            self._final_norm(hidden, normed, num_rows)


def load_mtp_layer(
    config: ModelConfig, target: CausalLM, path: str | None, load_choices: str, quantization: QuantizationConfig
) -> MTPLayer:
    """Read the layer that belongs to `target`.

    Args:
        config: of the target.
        path: folder of the layer's tensors; None where they lie in the target's checkpoint.
        load_choices: `default_v1` reads the files, `dummy` draws weights of the same shapes.
        quantization: the format of the layer's attention and feed-forward weights, and of a head of its own; the
            projection keeps its type.

    Raises:
        ConfigError: no such layer, several of them, tensors that do not match, or quantization of another dtype than
            bfloat16.
    """
    check_quantization(config, quantization)
    architecture = find_architecture(config)
    source: WeightSource
    if load_choices == "dummy":
        form = ernie_form(config)
        source = DummySource(form.shapes(config, architecture.traits(config)), seed=0)
    else:
        files = MTPSource(Path(path or config.path), config, architecture)
        form, source = files.form, files
    loader = WeightLoader(config, architecture, source, dict(source.shapes), None, quantization)
    return MTPLayer(config, _load(loader, config, form), target, form.recycles_normed)


def holds_mtp_layer(folder: str) -> bool:
    """Return whether the checkpoint in `folder` has tensors of such a layer, readable or not."""
    names = SafetensorsSource(Path(folder)).shapes
    return any(ERNIE_MARK in name for name in names) or bool(nextn_layers(names))


def _load(loader: WeightLoader, config: ModelConfig, form: MTPForm) -> MTPWeights:
    hidden = config.hidden_size
    projection = loader.owned(f"{form.projection}.weight")
    bias = loader.owned(f"{form.projection}.bias") if form.has_bias else None
    head = (LinearPart(form.head, config.vocab_size),)
    return MTPWeights(
        emb_norm=loader.owned(form.emb_norm),
        hidden_norm=loader.owned(form.hidden_norm),
        emb_projection=pack_linear(projection[:, :hidden].contiguous(), bias),
        hidden_projection=pack_linear(projection[:, hidden:].contiguous()),
        block=loader.layer(form.block),
        embedding=loader.owned(form.embedding) if form.embedding else None,
        final_norm=loader.owned(form.final_norm) if form.final_norm else None,
        head=loader.linear(head, hidden, False, loader.head_format) if form.head else None,
    )


class MTPSource:
    """The layer's tensors under the names and in the shapes of torch layout, wherever and however the files hold them.

    The projection is not square: its shape says whether linear layers are stored [out, in] or, as Paddle does,
    [in, out].
    """

    def __init__(self, folder: Path, config: ModelConfig, architecture: Architecture) -> None:
        """Open the files and compare names and shapes.

        Raises:
            ConfigError: no layer there, several, or tensors that are missing, surplus or misshapen, by name.
        """
        self._files = SafetensorsSource(folder)
        prefix = architecture.paddle_prefix
        self._names = {
            f"model{name.removeprefix(prefix)}" if name.startswith(f"{prefix}.") else name: name
            for name in self._files.shapes
        }
        form = find_form(self._names, config)
        if form is None:
            raise ConfigError(FIELD, f"{folder} holds no layer for multi-token prediction (*{ERNIE_MARK}*, *.eh_proj)")
        self.form = form
        self._shapes = shapes = form.shapes(config, architecture.traits(config))
        found = self._found(expected_shapes(config, architecture))
        hidden = config.hidden_size
        self._is_transposed = found.get(f"{form.projection}.weight") == (2 * hidden, hidden)
        layout = "Paddle layout" if self._is_transposed else "torch layout"
        expected = {name: shape[::-1] for name, shape in shapes.items()} if self._is_transposed else shapes
        strict = replace(architecture, ignorable=("rotary_emb.inv_freq",))
        check_shapes(found, expected, replace(config, path=str(folder)), strict, layout)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that the layer expects."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU in the type it is stored in."""
        tensor = self._files.read(self._names[name])
        return tensor.t().contiguous() if self._is_transposed and len(self._shapes[name]) == 2 else tensor

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Return a linear layer's weight in this type: the whole of what is stored."""
        matrix = self._files.read(self._names[name]).astype(dtype)
        return [WeightPiece(matrix, 0, self._shapes[name][0], self._is_transposed)]

    def _found(self, of_target: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the files' tensors without the target's own, which lie beside the layer's."""
        shapes = self._files.shapes
        return {
            name: shapes[stored]
            for name, stored in self._names.items()
            if re.search(self.form.marks, name) or (name not in of_target and not _is_of_decoder(name))
        }


def _is_of_decoder(name: str) -> bool:
    """Return whether the target's loader answers for the tensor, fused layers among them."""
    return name.startswith(("model.layers.", "lm_head."))
