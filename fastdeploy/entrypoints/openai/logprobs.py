# SPDX-License-Identifier: Apache-2.0
"""What answers report per token: log-probabilities in the formats of both endpoints, and where a token came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.detokenize.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; bytes that are no text show as `bytes:\\xe2\\x98`, as OpenAI writes them."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": token_name(tokenizer, token_id), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    content = [
        {**item(entry.token_id, entry.logprob), "top_logprobs": [item(*pair) for pair in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Makes the `logprobs` objects of one completion choice; remembers where its text has got to."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        """Report `num_top` alternatives per token."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def make(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the object for these tokens; the first token of a prompt has no entry."""
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            name = token_name(self._tokenizer, token_id)
            made["tokens"].append(name)
            made["text_offset"].append(self._offset)
            made["token_logprobs"].append(None if entry is None else max(entry.logprob, LEAST))
            made["top_logprobs"].append(None if entry is None else self._top(entry))
            self._offset += len(self._tokenizer.token_text(token_id))
        return made

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]
        return {token_name(self._tokenizer, token_id): max(logprob, LEAST) for token_id, logprob in reversed(pairs)}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], has_texts: bool = True
) -> list[dict[str, dict[str, Any]] | None]:
    """Return one mapping per prompt token, token id -> logprob, rank, decoded_token; None for the first.

    Args:
        has_texts: False leaves `decoded_token` null.
    """

    def item(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = token_name(tokenizer, token_id) if has_texts else None
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": text}

    made: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            made.append(None)
            continue
        tokens = {str(t): item(t, logprob, rank) for rank, (t, logprob) in enumerate(entry.top, start=1)}
        tokens[str(entry.token_id)] = item(entry.token_id, entry.logprob, entry.rank)
        made.append(tokens)
    return made


def describe_tokens(tokenizer: Tokenizer, delta: TokenDelta) -> list[dict[str, Any]]:
    """Return each token's id, its text (`bytes:...` for an incomplete character), and where it came from.

    `origin` is draft or target, `source` the proposer of a draft.
    """
    return [
        {"id": token_id, "text": token_name(tokenizer, token_id), **_origin(source)}
        for token_id, source in zip(delta.token_ids, delta.sources(), strict=True)
    ]


def _origin(source: str | None) -> dict[str, str]:
    return {"origin": "target"} if source is None else {"origin": "draft", "source": source}
