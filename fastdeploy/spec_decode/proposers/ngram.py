# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the continuation of the most recent earlier occurrence of the text's last few tokens."""

from __future__ import annotations

from fastdeploy.core.request import Request
from fastdeploy.ops.host import MAX_MATCH_LEN, NgramIndex
from fastdeploy.spec_decode.proposers.text_proposer import TextProposer


class NgramProposer(TextProposer):
    """Looks up the longest suffix of `max_ngram_size` .. `min_ngram_size` tokens in prompt and output together."""

    name = "ngram"

    def __init__(self, max_ngram_size: int, min_ngram_size: int) -> None:
        self._index = NgramIndex(min_ngram_size, max_ngram_size)
        super().__init__(self._index, MAX_MATCH_LEN)

    def _begin(self, slot: int, request: Request) -> None:
        self._index.start(slot, request.token_ids)

    def _end(self, slot: int, request: Request) -> None:
        self._index.finish(slot)
