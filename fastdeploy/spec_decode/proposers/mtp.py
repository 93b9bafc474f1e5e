# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: a layer beside the target drafts from the target's hidden states."""

from __future__ import annotations

from fastdeploy.spec_decode.proposers.model_proposer import ModelProposer


class MTPProposer(ModelProposer):
    """Runs the layer once per draft, on its own output from the second on."""

    name = "mtp"
    needs_hidden_states = True
