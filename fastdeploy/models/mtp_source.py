# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of MTP layers in files, wherever these store them and whatever else they contain."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from fastdeploy.config.drafting_checkpoint import ERNIE_MARK
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.files import open_files
from fastdeploy.models.fused_experts import stored_experts
from fastdeploy.models.mtp_forms import FIELD, MTPForm, find_forms, with_tensors_beside
from fastdeploy.models.paddle_layout import Stored, StoredSource, name_prefix, stored_fused, stored_whole
from fastdeploy.models.weight_loader import Shapes
from fastdeploy.models.weight_source import CheckpointFiles, WeightSource
from fastdeploy.models.weights import check_shapes, expected_shapes


@dataclass(frozen=True)
class StoredLayers:
    """MTP layers in files.

    Attributes:
        forms: of the layers; none if the files contain no layer.
        names: the names of all tensors in the files, by their names in torch layout.
        shapes: shapes of the layers' tensors in torch layout.
        stored: name in torch layout -> where the layer's tensor is stored.
        is_paddle: whether linear layers are stored as [in, out] and may be fused.
    """

    forms: list[MTPForm]
    names: dict[str, str]
    shapes: Shapes
    stored: dict[str, Stored]
    is_paddle: bool

    @classmethod
    def find(
        cls,
        source: WeightSource,
        config: ModelConfig,
        architecture: Architecture,
        hidden_state: str = "normed",
        is_apart: bool = False,
    ) -> StoredLayers:
        """Find the layers by the names of the files' tensors.

        If the files are not the target's (`is_apart`), an embedding, a norm and a head in them belong to the layers.

        Shapes that are not square show how linear layers are stored. The projection is looked at by itself, since
        files of ERNIE-4.5-300B-A47B have it as [in, out] beside linear layers that are [out, in].

        Raises:
            ConfigError: the layers do not read `hidden_state`.
        """
        prefix = name_prefix(source, architecture)
        names = {re.sub(f"^{prefix}\\.", "model.", name): name for name in source.shapes}
        forms = find_forms(names, config, architecture, hidden_state)
        if is_apart:
            forms = [with_tensors_beside(form, architecture, names) for form in forms]
        shapes = Shapes()
        for form in forms:
            shapes.update(form.shapes(config))
        found = {name: source.shapes[stored] for name, stored in names.items()}
        is_paddle = any(_is_transposed(found, form.block.shapes | form.shapes(config)) for form in forms[:1])
        whole = {form.embedding for form in forms} if is_paddle else shapes
        stored = dict(stored_whole(source, shapes, prefix, whole))
        blocks = [form.block for form in forms]
        stored.update(
            stored_fused(source, config, architecture, prefix, blocks) if is_paddle else stored_experts(source, blocks)
        )
        for name in (f"{form.projection}.weight" for form in forms):
            is_linear = _is_transposed(found, {name: shapes[name]})
            stored[name] = Stored(stored[name].name, shapes[name][:: -1 if is_linear else 1], is_linear)
        return cls(forms, names, shapes, stored, is_paddle)


def _is_transposed(found: Shapes, expected: Shapes) -> bool:
    """Return whether the first matrix that is not square is stored as [in, out]."""
    for name, shape in expected.items():
        if len(shape) == 2 and shape[0] != shape[1] and found.get(name) in (shape, shape[::-1]):
            return found[name] != shape
    return False


def mtp_tensor_names(source: WeightSource, config: ModelConfig, architecture: Architecture) -> frozenset[str]:
    """Return the names that MTP layers in these files have there; they are not of the decoder."""
    return frozenset(place.name for place in StoredLayers.find(source, config, architecture).stored.values())


class MTPSource(StoredSource):
    """Tensors of MTP layers by their names and shapes in torch layout."""

    def __init__(
        self, folder: Path, config: ModelConfig, architecture: Architecture, hidden_state: str = "normed"
    ) -> None:
        """Open the files and compare names and shapes.

        Raises:
            ConfigError: there is no layer, tensors are missing, unexpected or of a wrong shape, or the layers do not
                read `hidden_state`.
        """
        files = open_files(folder, config.dtype)
        is_apart = folder.resolve() != Path(config.path).resolve()
        layers = StoredLayers.find(files, config, architecture, hidden_state, is_apart)
        self.forms = layers.forms
        if not self.forms:
            raise ConfigError(
                FIELD, f"{folder} contains no layer for multi-token prediction (*{ERNIE_MARK}*, *.eh_proj)"
            )
        super().__init__(files, layers.shapes, layers.stored)
        found = self._without_target(layers, expected_shapes(config, architecture), files)
        layout = "Paddle layout" if layers.is_paddle else "torch layout"
        check_shapes(found, self.stored_shapes, replace(config, path=str(folder)), architecture, layout)

    def _without_target(self, layers: StoredLayers, of_target: Shapes, files: CheckpointFiles) -> Shapes:
        """Return the files' tensors without those of the target."""
        pattern = "|".join(form.name_pattern for form in layers.forms)
        return {
            stored: files.shapes[stored]
            for name, stored in layers.names.items()
            if re.search(pattern, name)
            or stored in self.stored_shapes
            or not (name in of_target or _is_of_decoder(name))
        }


def _is_of_decoder(name: str) -> bool:
    """Return whether the tensor belongs to the decoder, fused or not, and is checked when the target is loaded."""
    return name.startswith(("model.layers.", "lm_head."))
