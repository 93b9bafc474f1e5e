# SPDX-License-Identifier: Apache-2.0
"""Speculation with a draft model: a smaller checkpoint with the same vocabulary."""

from __future__ import annotations

from fastdeploy.spec_decode.proposers.model_proposer import ModelProposer


class DraftModelProposer(ModelProposer):
    """Drafts with one draft pass of the draft model per token."""

    name = "draft_model"
