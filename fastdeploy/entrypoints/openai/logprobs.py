# SPDX-License-Identifier: Apache-2.0
"""What responses report per token: log-probabilities in the formats of both endpoints, and where a token came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import UNSET

from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    OutputToken,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot represent


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; bytes that are not valid UTF-8 become `bytes:\\xe2\\x98`, as OpenAI writes them."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _alternatives(entry: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    """Return the first `num_top` of the most probable tokens, -1: all, then the requested ones that are not among them.

    The token at the position itself is left out unless it is one of them.
    """
    top = entry.top if num_top < 0 else entry.top[:num_top]
    if not entry.requested:
        return top
    known = {token_id for token_id, _ in top}
    return [*top, *((token_id, logprob) for token_id, logprob, _ in entry.requested if token_id not in known)]


def token_namer(tokenizer: Tokenizer, as_token_ids: bool) -> Callable[[int], str]:
    """Return how log-probabilities name tokens: by their text, or as `token_id:17`."""
    return "token_id:{}".format if as_token_ids else partial(token_name, tokenizer)


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int, as_token_ids: bool = False
) -> ChatLogprobs:
    """Return the log-probabilities of a chat choice; `bytes` are those of the token's text however it is named.

    Args:
        num_top: alternatives per token; -1: all that are known.
    """
    name = token_namer(tokenizer, as_token_ids)

    def top_logprob(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TopLogprob(token=name(token_id), logprob=max(logprob, MIN_LOGPROB), bytes=list(raw))

    def token_logprob(entry: TokenLogprobs) -> TokenLogprob:
        own = top_logprob(entry.token_id, entry.logprob)
        top = [top_logprob(*pair) for pair in _alternatives(entry, num_top)]
        return TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)

    return ChatLogprobs(content=[token_logprob(entry) for entry in entries])


class CompletionLogprobsBuilder:
    """Builds the log-probabilities of completions."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, as_token_ids: bool = False) -> None:
        """Report `num_top` alternatives per token; -1: all that are known."""
        self._name = token_namer(tokenizer, as_token_ids)
        self._num_top = num_top

    def build(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        """Return the log-probabilities of tokens that begin at these offsets; the first of a prompt has no entry."""
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets))
        for token_id, entry in zip(token_ids, entries, strict=True):
            logprobs.tokens.append(self._name(token_id))
            logprobs.token_logprobs.append(None if entry is None else max(entry.logprob, MIN_LOGPROB))
            logprobs.top_logprobs.append(None if entry is None else self._top(entry))
        return logprobs

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = [*_alternatives(entry, self._num_top), (entry.token_id, entry.logprob)]
        return {self._name(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in reversed(pairs)}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], has_texts: bool = True
) -> list[dict[str, PromptLogprob] | None]:
    """Return for each prompt token a mapping of token ids to log-probabilities; None for the first token.

    Args:
        has_texts: False leaves `decoded_token` null.
    """

    def prompt_logprob(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = token_name(tokenizer, token_id) if has_texts else None
        return PromptLogprob(logprob=max(logprob, MIN_LOGPROB), rank=rank, decoded_token=text)

    positions: list[dict[str, PromptLogprob] | None] = []
    for entry in entries:
        if entry is None:
            positions.append(None)
            continue
        tokens = {str(t): prompt_logprob(t, logprob, rank) for rank, (t, logprob) in enumerate(entry.top, start=1)}
        tokens[str(entry.token_id)] = prompt_logprob(entry.token_id, entry.logprob, entry.rank)
        positions.append(tokens)
    return positions


def output_tokens(tokenizer: Tokenizer, delta: TokenDelta) -> list[OutputToken]:
    """Return the tokens of `delta` with their texts and where they came from."""
    return [
        OutputToken(
            id=token_id,
            text=token_name(tokenizer, token_id),
            origin="target" if source is None else "draft",
            source=UNSET if source is None else source,
        )
        for token_id, source in zip(delta.token_ids, delta.sources(), strict=True)
    ]
