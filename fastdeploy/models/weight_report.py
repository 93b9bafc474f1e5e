# SPDX-License-Identifier: Apache-2.0
"""What becomes of each weight that a checkpoint stores as codes: kept, rounded, converted, widened, quantized anew."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.experts_part import ExpertsPart, weight_names
from fastdeploy.models.loader import open_checkpoint
from fastdeploy.models.own_codes import Form, keeps_codes, packed_form, table_format
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_source import StoredTensors
from fastdeploy.models.weights import check_shapes, expected_shapes
from fastdeploy.ops.quantized_form import NO_QUANTIZATION, PANEL, QuantizedForm
from fastdeploy.ops.registry import selected_backend

Split = tuple[tuple[int, int], ...]  # as LinearSpec has it
_VALUE_BYTES = {"bfloat16": 2, "float32": 4}
_MEANINGS = {
    "kept": "kept",
    "rounded": "kept, scales rounded to fp16",
    "converted": "converted to eight bits",
    "widened": "widened",
    "quantized": "quantized anew",
    "plain": "plain",
}


@dataclass(frozen=True)
class WeightFate:
    """What becomes of one weight.

    Attributes:
        name: in the layout of Hugging Face.
        kind: type in the file.
        what: a key of _MEANINGS.
        form: in which its layer is packed; None if it is not quantized.
        num_bytes: in memory, without padding.
    """

    name: str
    kind: str
    what: str
    form: Form
    num_bytes: int


def weight_fates(config: ModelConfig, formats: QuantizationConfig) -> list[WeightFate]:
    """Return what becomes of each matrix of a checkpoint's decoder, from the headers of its files alone.

    A head that is tied to the embedding is there if it does not share its memory.

    Args:
        formats: from `ModelConfig.weight_formats`.
    """
    architecture = find_architecture(config)
    with selected_backend().on_host():
        source, layout = open_checkpoint(config, architecture)
        check_shapes(source.shapes, expected_shapes(config, architecture), config, architecture, layout)

    def fates(names: list[str], wanted: str, called: str = "", split: Split = ()) -> Iterator[WeightFate]:
        stored = [None if split else source.form(name) for name in names]
        form, keeps = packed_form(stored, wanted), keeps_codes(stored, wanted)
        for name in names:
            matrices, what = split or (source.shapes[name],), _what(source, name, form, keeps)
            size = sum(_num_bytes(shape, form, config.dtype) for shape in matrices)
            yield WeightFate(called or name, source.kind(name), what, form, size)

    embedding, head = architecture.names.embedding, f"{architecture.names.head}.weight"
    stored = source.form(embedding)
    found = list(fates([embedding], table_format(stored, formats.head)))
    if not config.tie_word_embeddings:
        found += fates([head], formats.head)
    elif found[0].form != packed_form([stored], formats.head):
        found += fates([embedding], formats.head, head)
    for names, wanted, split in _layers(config, architecture, formats):
        found += fates(names, wanted, split=split)
    return found


def _layers(
    config: ModelConfig, architecture: Architecture, formats: QuantizationConfig
) -> Iterator[tuple[list[str], str, Split]]:
    """Yield the weights of each packed layer of the blocks, its format, and the matrices into which it is split."""
    for index in range(config.num_layers):
        layer = architecture.layer(config, index)
        for spec in layer.attention.linears:
            yield spec.weight_names, formats.attention, spec.split
        if isinstance(layer.mlp, ExpertsPart):
            for specs in (layer.mlp.gate_up, layer.mlp.down):
                yield weight_names(specs), formats.experts or NO_QUANTIZATION, ()
        for spec in layer.mlp.shared if isinstance(layer.mlp, ExpertsPart) else layer.mlp.linears:
            yield spec.weight_names, formats.mlp, ()


def _what(source: StoredTensors, name: str, form: Form, keeps: bool) -> str:
    fidelity = source.fidelity(name)
    if keeps:
        return fidelity
    if form is not None:
        return "quantized"
    return "plain" if fidelity == "plain" else "widened"


def _num_bytes(shape: tuple[int, ...], form: QuantizedForm | None, dtype: str) -> int:
    if form is None:
        return prod(shape) * _VALUE_BYTES[dtype]
    return -(-shape[0] * form.panel_bytes(shape[1]) // PANEL)


def summarize(fates: Iterable[WeightFate]) -> str:
    """Return how many bytes of the weights are kept, rounded, converted, widened or quantized anew, and their types."""
    groups: dict[str, list[WeightFate]] = {}
    for fate in fates:
        groups.setdefault(fate.what, []).append(fate)
    return "; ".join(
        f"{_MEANINGS[what]}: {', '.join(dict.fromkeys(fate.kind for fate in groups[what]))} "
        f"({sum(fate.num_bytes for fate in groups[what]) / 2**20:.1f} MiB)"
        for what in _MEANINGS
        if what in groups
    )


def tabulate(fates: Iterable[WeightFate]) -> list[str]:
    """Return a line for each kind of weight in the layers, its types, and what becomes of them."""
    lines: dict[tuple[str, str, str, str], list[WeightFate]] = {}
    for fate in fates:
        name = re.sub(r"\.\d+\.", ".*.", fate.name)
        lines.setdefault((name, fate.kind, fate.what, _describe(fate.form)), []).append(fate)
    return [
        f"{name}: {len(found)} x {kind}, {_MEANINGS[what]}, {form}" for (name, kind, what, form), found in lines.items()
    ]


def _describe(form: Form) -> str:
    if form is None:
        return "floating-point numbers"
    group = f"{form.group_size} inputs" if form.group_size else "output"
    minimum = " and a minimum" if form.has_minimum else ""
    return f"{form.weight_bits} bits with a scale{minimum} per {group}, inputs of {form.row_bits} bits"


def bytes_by_name(fates: Iterable[WeightFate]) -> Mapping[str, int]:
    """Return the bytes of each weight."""
    return {fate.name: fate.num_bytes for fate in fates}
