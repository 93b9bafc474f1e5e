# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction (MTP) of a target model; their forms are described in models.mtp_forms.

A row of the first layer at position t reads the target's hidden state at t - 1; a row of a later layer reads the output
of the previous layer at t - 1. Position 0, and one more position for each later layer, therefore has no input and is
masked for all other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import paddle
from paddle import Tensor

from fastdeploy.config.drafting_checkpoint import ERNIE_MARK
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import read_packed_header
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.layers.embedding import Embedding, Table, num_table_bytes
from fastdeploy.layers.linear import Linear
from fastdeploy.layers.logits import LogitsHead
from fastdeploy.layers.norm import RMSNorm
from fastdeploy.models.architecture import Architecture, nextn_layers
from fastdeploy.models.balanced_keys import digest_exponents
from fastdeploy.models.decoder import CausalLM, DecoderLayer
from fastdeploy.models.expected_weights import ExpectedLinear
from fastdeploy.models.files import open_files
from fastdeploy.models.layer_parts import LayerWeights
from fastdeploy.models.loader import head_form, load_head, open_source, packed_loader
from fastdeploy.models.mtp_forms import FIELD, MTPForm, ernie_layers, find_forms, usual_form
from fastdeploy.models.mtp_source import MTPSource
from fastdeploy.models.own_codes import keeps_codes, packed_form, packing_format
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.repeated_tables import are_equal
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.models.weight_loader import LinearSpec, Shapes, StoredLinear, WeightLoader
from fastdeploy.models.weight_source import DummySource, WeightSource
from fastdeploy.models.weights import check_quantization
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.linear import PackedLinear, first_outputs, linear, pack_linear
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import form_of
from fastdeploy.ops.registry import selected_backend

HEAD_FOR_DRAFTS = "head for drafts"


@dataclass(frozen=True)
class MTPWeights:
    """Weights of one layer; the projection is split into the halves that read the embedding and the hidden state.

    A part that is None is shared with the target.
    """

    emb_norm: Tensor
    hidden_norm: Tensor
    emb_projection: PackedLinear
    hidden_projection: PackedLinear
    block: LayerWeights
    embedding: Table | None
    final_norm: Tensor | None
    head: PackedLinear | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the embedding and of the packed layers, without the head, which several layers may share."""
        embedding = 0 if self.embedding is None else num_table_bytes(self.embedding)
        projection = self.emb_projection.num_bytes + self.hidden_projection.num_bytes
        return embedding + projection + self.block.num_bytes


class MTPBuffers:
    """Buffers that all MTP layers of a target share; one layer runs at a time."""

    def __init__(self, target: CausalLM) -> None:
        """Allocate as many rows as the target has."""
        config = target.config
        self.step = StepBuffers(config.hidden_size, target.max_rows, config.dtype)
        self.input_states: Tensor = paddle.zeros([target.max_rows, config.hidden_size], config.dtype)


class MTPLayer:
    """One layer with the parts that it shares with its target.

    Attributes:
        input_states: [max_rows, hidden_size], the hidden state that each row reads; written by the caller.
        output: [max_rows, hidden_size], the hidden states that the next layer or pass reads.
        head: the head that computes the logits of drafts.
        reads_normed: whether `input_states` and `output` are states after the final norm instead of before it.
        own_head: its weight if it is not the target's; several layers may share it.
        num_weight_bytes: bytes of the weights that are not the target's, without the head.
        key_balance: digest of what the layer's keys are divided by; empty if they are not balanced.
        max_rows: maximum number of rows in a pass.
    """

    def __init__(
        self,
        weights: MTPWeights,
        target: CausalLM,
        reads_normed: bool,
        index: int,
        buffers: MTPBuffers,
    ) -> None:
        """Build the layer.

        Args:
            reads_normed: as the attribute.
            index: 0 for the layer that reads the target's hidden states.
        """
        shared, eps = target.shared, target.config.rms_norm_eps
        self.max_rows = target.max_rows
        self.input_states, self._buffers = buffers.input_states, buffers.step
        self._embedding = shared.embedding if weights.embedding is None else Embedding(weights.embedding)
        self._final_norm = shared.final_norm if weights.final_norm is None else RMSNorm(weights.final_norm, eps)
        self.own_head, self.num_weight_bytes = weights.head, weights.num_bytes
        self.key_balance = digest_exponents([weights.block.attention.key_exponents])
        self.head = shared.head if weights.head is None else LogitsHead(weights.head)
        self.reads_normed = reads_normed
        self.output: Tensor = self._buffers.normed if reads_normed else self._buffers.hidden
        self._emb_projection = Linear(weights.emb_projection, NormParams(weights.emb_norm, eps))
        self._hidden_projection = Linear(weights.hidden_projection, NormParams(weights.hidden_norm, eps))
        self._block = DecoderLayer(weights.block, shared.attention, self._buffers, num_masked_prefix=index + 1)

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Compute the layer: write the keys and values of the rows, and their hidden states to `output`.

        Args:
            token_ids: [max_rows] int32, the token of each row; `input_states` has the hidden states before them.
            metadata: the rows, at most max_rows.
            cache: of this layer.
        """
        hidden, normed, num_rows = self._buffers.hidden, self._buffers.normed, metadata.num_rows
        self._embedding(token_ids, normed, num_rows)
        self._emb_projection(normed, hidden, num_rows)
        self._hidden_projection(self.input_states, hidden, num_rows, hidden)
        self._block(metadata, cache)
        if self.reads_normed:
            self._final_norm(hidden, normed, num_rows)

    def compute_logits(self, states: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of the first num_rows rows of `states` to out [capacity, vocab] float32.

        Args:
            states: rows of `output`.
            out: may have fewer columns, a multiple of 64, for the logits of the first ids only.
        """
        if not self.reads_normed:
            self._final_norm(states, self._buffers.normed, num_rows)
            states = self._buffers.normed
        weight, num_ids = self.head.weight, out.shape[1]
        linear(states, weight if num_ids == weight.out_features else first_outputs(weight, num_ids), out, num_rows)


def load_mtp_layers(
    target: CausalLM,
    path: str | None,
    load_choices: str,
    quantization: QuantizationConfig,
    max_layers: int = 1,
    hidden_state: str = "normed",
) -> list[MTPLayer]:
    """Load the MTP layers of `target`.

    Args:
        path: folder of the layers' tensors; None if they are in the target's checkpoint.
        load_choices: `default_v1` reads the files, `dummy` generates random weights for one layer.
        quantization: weight format of the layers (the projection has that of attention) and of their head. If the
            target's head has another format, a copy of the head is loaded.
        max_layers: load at most this many layers.
        hidden_state: `normed` or `raw`; which states of the target layers in ERNIE's form read.

    Raises:
        ConfigError: there is no such layer, tensors do not match, other layers than ERNIE's would read `raw` states, or
            a dtype other than bfloat16 is quantized.
    """
    config = target.config
    check_quantization(config, quantization)
    architecture = find_architecture(config)
    with selected_backend().on_host():
        copies_head = needs_head(config, load_choices, quantization.head, target.shared.head.weight)
        if load_choices == "dummy":
            forms = [usual_form(config, architecture, hidden_state)]
            source = DummySource(forms[0].shapes(config), seed=0)
            loader = _loader(source, config, quantization)
        elif config.packed is not None and path in (None, config.path):
            forms = _packed_forms(config, architecture, hidden_state)
            loader, copies_head = _packed_loader(config, forms, quantization), HEAD_FOR_DRAFTS in config.packed.entries
        else:
            files = MTPSource(Path(path or config.path), config, architecture, hidden_state)
            forms = forms_without_copies(files, config, architecture)
            loader = _loader(files, config, quantization)
        forms = forms[:max_layers]
        weights = collect_mtp_weights(loader, config, forms, copies_head, load_choices)
    buffers = MTPBuffers(target)
    return [
        MTPLayer(layer, target, form.reads_normed, i, buffers) for i, (layer, form) in enumerate(zip(weights, forms))
    ]


def _loader(source: WeightSource, config: ModelConfig, quantization: QuantizationConfig) -> WeightLoader:
    """Return a loader that packs the layers' tensors."""
    has_int8_cache = config.has_int8_cache
    return WeightLoader(config.dtype, source, source.shapes, None, quantization, has_int8_cache=has_int8_cache)


def forms_without_copies(files: MTPSource, config: ModelConfig, architecture: Architecture) -> list[MTPForm]:
    """Return the layers' forms, which use the target's embedding, norm and head where the files only repeat these.

    They are compared in the model's dtype. Releases of GLM-4.5 repeat both, which would take two gigabytes for Air.
    """
    if config.packed is not None or not any(form.embedding or form.final_norm or form.head for form in files.forms):
        return files.forms
    target, _ = open_source(config, architecture, "default_v1", seed=0)
    names = architecture.names
    target_head = names.embedding if config.tie_word_embeddings else f"{names.head}.weight"

    @cache
    def repeats(name: str, of_target: str) -> bool:
        is_equal = are_equal(files.read(name), target.read(of_target), config.dtype)
        if is_equal:
            files.release(name)
        return is_equal

    def has_norm(form: MTPForm) -> bool:
        return form.final_norm == names.final_norm  # a norm of the layer's own is small

    def shared(form: MTPForm) -> MTPForm:
        return replace(
            form,
            embedding="" if form.embedding and repeats(form.embedding, names.embedding) else form.embedding,
            final_norm="" if has_norm(form) and repeats(form.final_norm, names.final_norm) else form.final_norm,
            head="" if form.head and repeats(f"{form.head}.weight", target_head) else form.head,
        )

    return [shared(form) for form in files.forms]


def _packed_forms(config: ModelConfig, architecture: Architecture, hidden_state: str) -> list[MTPForm]:
    """Return the forms of the layers that `fastdeploy quantize` has packed beside their target.

    Raises:
        ConfigError: there are none.
    """
    assert config.packed is not None, "the checkpoint is packed"
    forms = find_forms(config.packed.mtp_tensors, config, architecture, hidden_state)
    if not forms:
        raise ConfigError(FIELD, f"{config.name} was packed from a model without a layer for multi-token prediction")
    return forms


def _packed_loader(config: ModelConfig, forms: list[MTPForm], quantization: QuantizationConfig) -> WeightLoader:
    """Return a loader of layers that `fastdeploy quantize` has packed beside their target.

    Raises:
        ConfigError: they have other formats.
    """
    assert config.packed is not None, "the checkpoint is packed"
    if quantization != config.packed.mtp_quantization:
        expected = config.packed.mtp_quantization
        raise ConfigError(
            "speculative_config.quantization", f"{config.name} has layers packed to {expected}, got {quantization}"
        )
    shapes = Shapes()
    for form in forms:
        shapes.update(form.shapes(config))
    return packed_loader(config, shapes, quantization)


def needs_head(config: ModelConfig, load_choices: str, quantization: str, of_target: PackedLinear) -> bool:
    """Return whether layers without a head of their own need a copy of the target's, because its form is another one.

    Args:
        quantization: format of the layers' head.
    """
    if config.packed is not None and load_choices == "default_v1":
        return quantization != config.packed.quantization.head
    return head_form(config, load_choices, quantization) != form_of(of_target)


def collect_mtp_weights(
    loader: WeightLoader, config: ModelConfig, forms: Sequence[MTPForm], copies_head: bool, load_choices: str
) -> list[MTPWeights]:
    """Return the weights of MTP layers, of which a loader makes those that its store does not have.

    Args:
        copies_head: whether layers without a head have a copy of the target's in their own format, or share it.
        load_choices: how the copy is loaded.
    """
    head, head_format = None, loader.quantization.head
    if copies_head and not all(form.head for form in forms):
        head = loader.store.keep(
            HEAD_FOR_DRAFTS,
            lambda: load_head(config, load_choices, head_format),
            ExpectedLinear(
                config.hidden_size,
                config.vocab_size,
                loader.dtype,
                loader.store.form(HEAD_FOR_DRAFTS, lambda: head_form(config, load_choices, head_format)),
            ),
        )

    # Layers may share an embedding, a norm and a head that are not the target's.
    @cache
    def copy(name: str) -> Tensor | None:
        return loader.copy(name) if name else None

    @cache
    def load_table(name: str) -> Table | None:
        return loader.table(name, loader.quantization.attention) if name else None

    @cache
    def load_own_head(name: str) -> PackedLinear | None:
        spec = LinearSpec("head", (StoredLinear(name, config.vocab_size),), config.hidden_size)
        return loader.linear(spec, head_format) if name else head

    return [_load(loader, config, form, copy, load_table, load_own_head) for form in forms]


def check_mtp_layers(path: str | None, config: ModelConfig, hidden_state: str) -> int:
    """Return how many MTP layers a target can use, after comparing names and shapes of their tensors with the target.

    Args:
        path: folder of the layers; None if the target's checkpoint contains them.
        hidden_state: `normed` or `raw`; which states of the target layers in ERNIE's form read.

    Raises:
        ConfigError: there is no such layer, tensors do not match, or the layers do not read `hidden_state`.
    """
    architecture = find_architecture(config)
    if config.packed is not None and path in (None, config.path):
        return len(_packed_forms(config, architecture, hidden_state))
    with selected_backend().on_host():
        return len(MTPSource(Path(path or config.path), config, architecture, hidden_state).forms)


def num_mtp_layers(folder: str) -> int:
    """Return how many MTP layers the tensor names in the checkpoint in `folder` imply, without checking the tensors."""
    packed = read_packed_header(Path(folder))
    names: Collection[str]
    with selected_backend().on_host():
        names = open_files(Path(folder)).shapes if packed is None else packed.mtp_tensors
    return max(1, len(ernie_layers(names))) if any(ERNIE_MARK in name for name in names) else len(nextn_layers(names))


def _load(
    loader: WeightLoader,
    config: ModelConfig,
    form: MTPForm,
    copy: Callable[[str], Tensor | None],
    load_table: Callable[[str], Table | None],
    load_own_head: Callable[[str], PackedLinear | None],
) -> MTPWeights:
    """Load one layer; its projection has the weight format of attention.

    Args:
        copy, load_table, load_own_head: return the tensor, the embedding or the head of a name, also if another layer
            has it too.
    """
    quantization = loader.quantization.attention
    hidden = config.hidden_size
    projection = f"{form.projection}.weight"
    stored = [loader.source.form(projection)]
    if stored[0] is not None and stored[0].group_size and hidden % stored[0].group_size:
        stored = [None]  # the halves would begin within a group

    def half(of: str, begin: int, bias: str = "") -> PackedLinear:
        def pack() -> PackedLinear:
            added, format = loader.read(bias) if bias else None, packing_format(stored, quantization)
            if keeps_codes(stored, quantization):
                coded = loader.source.coded(projection).inputs(begin, begin + hidden)
                return pack_linear([coded], added, format)
            matrix = loader.source.read(projection).astype(loader.dtype)[:, begin : begin + hidden].contiguous()
            return pack_linear(matrix, added, format)

        name = f"{form.projection}.{of}"
        packed_as = loader.store.form(name, lambda: packed_form(stored, quantization))
        expected = ExpectedLinear(hidden, hidden, loader.dtype, packed_as, has_bias=bool(bias))
        return loader.store.keep(name, pack, expected)

    return MTPWeights(
        emb_norm=loader.copy(form.emb_norm),
        hidden_norm=loader.copy(form.hidden_norm),
        emb_projection=half("embedding", 0, f"{form.projection}.bias" if form.has_bias else ""),
        hidden_projection=half("hidden", hidden),
        block=form.block.load(loader),
        embedding=load_table(form.embedding),
        final_norm=copy(form.final_norm),
        head=load_own_head(form.head),
    )
