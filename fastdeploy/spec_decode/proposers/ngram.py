# SPDX-License-Identifier: Apache-2.0
"""N-gram speculation (prompt lookup): the draft is what followed the last tokens of the context before."""

from __future__ import annotations

from fastdeploy.core.request import Request
from fastdeploy.ops.host import MAX_MATCH_LEN, NgramIndex
from fastdeploy.spec_decode.proposers.match_proposer import MatchProposer


class NgramProposer(MatchProposer):
    """Looks up the longest of the context's suffixes of `min_ngram_size` to `max_ngram_size` tokens in the context.

    The most recent occurrence is used. The context includes the prompt.
    """

    name = "ngram"

    def __init__(self, max_ngram_size: int, min_ngram_size: int) -> None:
        self._index = NgramIndex(min_ngram_size, max_ngram_size)
        super().__init__(self._index, MAX_MATCH_LEN)

    def _add_sequence(self, sequence_id: int, request: Request) -> None:
        self._index.start(sequence_id, request.prompt_token_ids)

    def _remove_sequence(self, sequence_id: int, request: Request) -> None:
        self._index.finish(sequence_id)
