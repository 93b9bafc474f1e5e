# SPDX-License-Identifier: Apache-2.0
"""From a configuration to its proposer."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.spec_decode.base import Proposer


def _naive(config: SpeculativeConfig) -> Proposer:
    from fastdeploy.spec_decode.naive import NaiveProposer

    return NaiveProposer()


def _ngram(config: SpeculativeConfig) -> Proposer:
    from fastdeploy.spec_decode.ngram import NgramProposer

    return NgramProposer(config.max_ngram_size, config.min_ngram_size)


PROPOSERS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {"naive": _naive, "ngram": _ngram}


def make_proposer(config: SpeculativeConfig) -> Proposer:
    """Return the proposer that `config.method` names."""
    return PROPOSERS[config.method](config)
