# SPDX-License-Identifier: Apache-2.0
"""Detects stop strings in streamed text, across token boundaries, in time linear in the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer


class KmpMatcher:
    """Searches a text that arrives in pieces for one string, with the algorithm of Knuth, Morris and Pratt.

    Its state is one number. Over any text, a character costs at most two comparisons on average.

    Attributes:
        pattern: the string, not empty.
        num_matched: length of the longest proper prefix of `pattern` with which the text so far ends.
    """

    __slots__ = ("_borders", "num_matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._borders = _border_lengths(pattern)

    def push(self, text: str) -> int | None:
        """Append `text`; return the end of the first match that ends in it, relative to it, or None."""
        pattern, borders, num_matched = self.pattern, self._borders, self.num_matched
        if num_matched == 0 and pattern[0] not in text:
            return None  # most texts; this search is native code
        first_end: int | None = None
        for end, char in enumerate(text, 1):
            while pattern[num_matched] != char:
                if num_matched == 0:
                    break
                num_matched = borders[num_matched]
            else:
                num_matched += 1
                if num_matched == len(pattern):
                    num_matched = borders[num_matched]
                    first_end = end if first_end is None else first_end
        self.num_matched = num_matched
        return first_end


@lru_cache(maxsize=256)  # the choices of a request have the same stop strings
def _border_lengths(pattern: str) -> array[int]:
    """Compute the prefix function of a string.

    Returns:
        For m in [1, len(pattern)], the length of the longest proper prefix of `pattern[:m]` that is also its suffix.
        The value at 0 is not used.
    """
    borders = array("I", [0]) * (len(pattern) + 1)
    length = 0
    for end, char in enumerate(pattern[1:], 2):
        while pattern[length] != char:
            if length == 0:
                break
            length = borders[length]
        else:
            length += 1
        borders[end] = length
    return borders


class StopMatcher:
    """Searches a text that arrives in pieces for stop strings.

    The match that ends first is used; if several end there, the longest. The result does not depend on the pieces.

    Attributes:
        stops: the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._matchers = [KmpMatcher(stop) for stop in self.stops]

    def push(self, text: str) -> tuple[str, int, int] | None:
        """Append `text`; return (stop string, start, end) of a match relative to `text`, or None.

        The start is negative if the match starts in earlier text.
        """
        best: tuple[int, int, str] | None = None
        for matcher in self._matchers:
            end = matcher.push(text)
            if end is not None:
                candidate = (end, end - len(matcher.pattern), matcher.pattern)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[2], best[1], best[0])

    @property
    def num_held(self) -> int:
        """Length of the longest suffix of the text so far that is a proper prefix of a stop string."""
        return max([matcher.num_matched for matcher in self._matchers], default=0)


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
        match = self._matcher.push(self._detokenizer.push([token_id]))
        return match[0] if match is not None and self._num_tokens > self._min_tokens else None
