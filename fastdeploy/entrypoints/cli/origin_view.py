# SPDX-License-Identifier: Apache-2.0
"""What `--verbose` shows of an answer: every token in the colour of what proposed it, and figures of the whole."""

from __future__ import annotations

import codecs
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.config.env import read_env

TARGET = "target"
PLAIN = "\033[0m"
COLOURS = {"ngram": 42, "suffix": 46, "mtp": 45, "draft_model": 44, "grammar": 43}  # ANSI backgrounds
OTHER_COLOUR = 47
HALF_CHARACTER = "bytes:\\x"  # how a server writes a token that is no text by itself
ASKED = {"return_token_ids": True, "collect_metrics": True}  # what a request must ask for to be shown


class OriginView:
    """Writes tokens as they come: the target's own plain, accepted drafts on the colour of their proposer.

    Where the output is no terminal, or NO_COLOR is set, the text is plain and the last line says it all.
    """

    def __init__(self) -> None:
        self._has_colours = sys.stdout.isatty() and not read_env().no_color
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._counts: Counter[str] = Counter()
        self._begin_s = time.monotonic()
        self._first_s: float | None = None

    def write(self, tokens: Sequence[Mapping[str, Any]]) -> None:
        """Write the `tokens` of a chunk."""
        if tokens and self._first_s is None:
            self._first_s = time.monotonic()
        for token in tokens:
            source = str(token.get("source", TARGET))
            self._counts[source] += 1
            print(self._painted(self._text(str(token["text"])), source), end="")
        sys.stdout.flush()

    def end(self, metrics: Mapping[str, Any] | None) -> None:
        """Write what is left of a character, a legend with counts, and figures from `speculate_metrics`."""
        print(self._decoder.decode(b"", final=True))
        if self._first_s is None:
            return
        total = self._counts.total()
        shares = [f"{self._painted(name, name)} {count}" for name, count in sorted(self._counts.items())]
        seconds = time.monotonic() - self._first_s
        parts = [f"{total} tokens: {', '.join(shares)}"]
        if metrics:
            parts.append(f"{metrics['average_accept_length']:.2f} tokens per step")
            parts.append(f"accepted {metrics['accepted_tokens']} of {metrics['drafted_tokens']} drafted")
        if total > 1 and seconds > 0:
            parts.append(f"{(total - 1) / seconds:.1f} tokens/s")
        parts.append(f"first after {1000 * (self._first_s - self._begin_s):.0f} ms")
        print(f"({'; '.join(parts)})")

    def _text(self, text: str) -> str:
        if not text.startswith(HALF_CHARACTER):
            return self._decoder.decode(text.encode())
        return self._decoder.decode(bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")))

    def _painted(self, text: str, source: str) -> str:
        if not self._has_colours or source == TARGET or not text:
            return text
        begin = f"\033[30;{COLOURS.get(source, OTHER_COLOUR)}m"
        return "\n".join(f"{begin}{line}{PLAIN}" if line else "" for line in text.split("\n"))
