# SPDX-License-Identifier: Apache-2.0
"""Detects stop strings in streamed text, across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer


class StopMatcher:
    """Searches a text that arrives in pieces for stop strings.

    The match that ends first is used; if several end there, the longest. The result does not depend on the pieces.

    Attributes:
        stops: the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._longest = max((len(stop) for stop in self.stops), default=0)
        self._tail = ""

    def find(self, text: str) -> tuple[str, int, int] | None:
        """Append `text`; return (stop string, start, end) of a match relative to `text`, or None.

        The start is negative if the match starts in earlier text.
        """
        window = self._tail + text
        offset = len(self._tail)
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = window.find(stop, max(0, offset - len(stop) + 1))  # a new match ends within `text`
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        self._tail = window[max(0, len(window) - self._longest + 1) :] if self._longest > 1 else ""
        return None if best is None else (best[2], best[1] - offset, best[0] - offset)

    def num_held(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class StopStringScanner:
    """Detects the stop strings of one choice in the engine, token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Create a scanner for the output after `prompt_token_ids`; the prompt is not searched."""
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens, params.visible_token_ids
        )
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> str | None:
        """Append a token; return the stop string that it completes, or None. The first `min_tokens` complete none."""
        self._num_tokens += 1
        match = self._matcher.find(self._detokenizer.push([token_id]))
        return match[0] if match is not None and self._num_tokens > self._min_tokens else None
