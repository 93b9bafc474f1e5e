# SPDX-License-Identifier: Apache-2.0
"""Converts the token deltas of one choice into text deltas."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.stop_strings import StopMatcher
from fastdeploy.detokenize.tokenizer import Tokenizer


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalDetokenizer:
    """Return the detokenizer of one choice."""
    return IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens, params.visible_token_ids)


class TextAssembler:
    """Detokenizes one choice, holds back text that may be the start of a stop string, and truncates at a stop string.

    The engine finds the token that completes a stop string; this class finds the character by the same rule.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = make_detokenizer(tokenizer, prompt_token_ids, params)
        self._matcher = StopMatcher(params.stop)
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._done = False

    def push(self, delta: TokenDelta) -> str:
        """Append a delta; return the new text. A delta with a finish_reason is the last one."""
        if self._done:
            return ""
        token_ids = delta.token_ids
        ended_by_token = (
            delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str) and not delta.is_complete
        )
        if ended_by_token and not self._keep_stop:
            token_ids = token_ids[:-1]  # an EOS token or stop token id is not part of the text
        if self._matcher.stops:
            text = "".join([self._push_token(token_id) for token_id in token_ids])
        else:
            text = self._detokenizer.push(token_ids)
        if delta.finish_reason is not None and not self._done:
            text += self._finish()
        return text

    def _push_token(self, token_id: int) -> str:
        if self._done:
            return ""
        self._num_tokens += 1
        text = self._detokenizer.push([token_id])
        match = self._matcher.push(text)
        if match is not None and self._num_tokens > self._min_tokens:
            return self._truncate_at_stop(text, match[1], match[2])
        text = self._held + text
        num_held = self._matcher.num_held
        self._held = text[len(text) - num_held :] if num_held else ""
        return text[: len(text) - num_held]

    def _truncate_at_stop(self, text: str, begin: int, end: int) -> str:
        """Return the remaining text up to the stop string at [begin, end) relative to `text`, or including it."""
        self._done = True
        held, self._held = self._held, ""
        return (held + text)[: len(held) + (end if self._keep_stop else begin)]

    def _finish(self) -> str:
        self._done = True
        held, self._held = self._held, ""
        return held + self._detokenizer.flush()
