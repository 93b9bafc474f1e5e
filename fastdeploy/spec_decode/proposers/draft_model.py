# SPDX-License-Identifier: Apache-2.0
"""A draft model: another checkpoint of the same vocabulary drafts from the tokens alone."""

from __future__ import annotations

from fastdeploy.spec_decode.proposers.model_proposer import ModelProposer


class DraftModelProposer(ModelProposer):
    """Runs the draft model once per draft."""

    name = "draft_model"
