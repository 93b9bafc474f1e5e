# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (MTP): layers that were trained with the target draft from its hidden states."""

from __future__ import annotations

from fastdeploy.spec_decode.proposers.model_proposer import ModelProposer


class MTPProposer(ModelProposer):
    """Drafts with one draft pass per token; from the second pass on, the input is the layer's own output."""

    name = "mtp"
