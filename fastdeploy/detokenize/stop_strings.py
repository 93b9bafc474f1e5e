# SPDX-License-Identifier: Apache-2.0
"""Finds the stop string that ends a text, across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer


class StopMatcher:
    """Looks for stop strings in a text that arrives in pieces.

    The match that ends first counts; of those that end there, the longest. Token boundaries make no difference.

    Attributes:
        stops: the strings looked for.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._longest = max((len(stop) for stop in self.stops), default=0)
        self._tail = ""

    def find(self, text: str) -> tuple[str, int, int] | None:
        """Append `text`; return (stop string, where it begins, where it ends) relative to `text`, or None.

        The beginning is negative when the match began in earlier text.
        """
        window = self._tail + text
        offset = len(self._tail)
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            at = window.find(stop, max(0, offset - len(stop) + 1))  # only ends inside `text` are new
            if at >= 0:
                candidate = (at + len(stop), at, stop)
                best = candidate if best is None else min(best, candidate)
        self._tail = window[max(0, len(window) - self._longest + 1) :] if self._longest > 1 else ""
        return None if best is None else (best[2], best[1] - offset, best[0] - offset)

    def num_held(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class StopStringScanner:
    """Watches one choice's tokens for its stop strings; the engine makes one for requests that have some."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Start after `prompt_token_ids`: stop strings are looked for in generated text only."""
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens, params.visible_token_ids
        )
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> str | None:
        """Append one token; return the stop string that it completes, or None; none within `min_tokens`."""
        self._num_tokens += 1
        found = self._matcher.find(self._detokenizer.push([token_id]))
        return found[0] if found is not None and self._num_tokens > self._min_tokens else None
