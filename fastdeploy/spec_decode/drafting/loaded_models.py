# SPDX-License-Identifier: Apache-2.0
"""What the engine needs of a drafting model that is loaded, of whatever kind it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.eagle import EagleHead
from fastdeploy.models.heads.medusa import MedusaHeads
from fastdeploy.models.heads.mlp_speculator import MLPSpeculator
from fastdeploy.models.mtp import MTPLayer
from fastdeploy.ops.caches import LayerCache
from fastdeploy.spec_decode.drafting.base import Drafter
from fastdeploy.spec_decode.drafting.draft_model_runner import DraftModelRunner
from fastdeploy.spec_decode.drafting.eagle_runner import EagleRunner
from fastdeploy.spec_decode.drafting.medusa_runner import MedusaRunner
from fastdeploy.spec_decode.drafting.mtp_runner import MTPRunner
from fastdeploy.spec_decode.drafting.speculator_runner import SpeculatorRunner
from fastdeploy.worker.model_runner import RunnerConfig


class DraftingModel(Protocol):
    """A loaded drafting model."""

    @property
    def key_balance(self) -> str:
        """Return a digest of what its keys are divided by; empty if they are not balanced."""

    def make_runner(
        self, target: CausalLM, caches: Sequence[LayerCache], num_blocks: int, config: RunnerConfig
    ) -> Drafter:
        """Return what drafts with it.

        Args:
            caches: one per layer, of `num_blocks` blocks and one scratch block per sequence.
            num_blocks: of the target's cache, whose block ids the model shares.
            config: sizes of the target.
        """


@dataclass(frozen=True)
class LoadedMTPLayers:
    """Layers for multi-token prediction of the target."""

    layers: Sequence[MTPLayer]

    @property
    def key_balance(self) -> str:
        """Return the digests of all layers."""
        return " ".join(layer.key_balance for layer in self.layers).strip()

    def make_runner(
        self, target: CausalLM, caches: Sequence[LayerCache], num_blocks: int, config: RunnerConfig
    ) -> Drafter:
        """Return a runner that reads the target's states."""
        return MTPRunner(self.layers, target, caches, num_blocks, config)


@dataclass(frozen=True)
class LoadedDraftModel:
    """A smaller model with the same vocabulary."""

    model: CausalLM

    @property
    def key_balance(self) -> str:
        """Return the digest of the model."""
        return self.model.key_balance

    def make_runner(
        self, target: CausalLM, caches: Sequence[LayerCache], num_blocks: int, config: RunnerConfig
    ) -> Drafter:
        """Return a runner that reads token ids only."""
        own = self.model.config
        sizes = replace(config, hidden_size=own.hidden_size, vocab_size=own.vocab_size, dtype=own.dtype)
        return DraftModelRunner(self.model, caches, num_blocks, sizes)


@dataclass(frozen=True)
class LoadedRowHead:
    """A trained head without attention."""

    head: MLPSpeculator | MedusaHeads

    @property
    def key_balance(self) -> str:
        """Return that there are no keys."""
        return ""

    def make_runner(
        self, target: CausalLM, caches: Sequence[LayerCache], num_blocks: int, config: RunnerConfig
    ) -> Drafter:
        """Return a runner that reads the output of the target's last step."""
        if isinstance(self.head, MedusaHeads):
            return MedusaRunner(self.head, target, config)
        return SpeculatorRunner(self.head, target, config)


@dataclass(frozen=True)
class LoadedEagleHead:
    """A trained head with decoder layers of its own."""

    head: EagleHead

    @property
    def key_balance(self) -> str:
        """Return that keys are not balanced."""
        return ""

    def make_runner(
        self, target: CausalLM, caches: Sequence[LayerCache], num_blocks: int, config: RunnerConfig
    ) -> Drafter:
        """Return a runner that reads states which the target's steps make."""
        sizes = replace(config, hidden_size=self.head.config.model.hidden_size)
        return EagleRunner(self.head, target, caches, num_blocks, sizes)


def key_balances(target: CausalLM, drafting: DraftingModel | None) -> tuple[str, str]:
    """Return digests of what the keys of the target and of the drafting model are divided by; empty for none."""
    return target.key_balance, "" if drafting is None else drafting.key_balance
