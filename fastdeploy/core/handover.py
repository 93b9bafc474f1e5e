# SPDX-License-Identifier: Apache-2.0
"""What one engine leaves for another one that continues a request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class KVImage:
    """The keys and values of a text's first tokens, in slots of an arena.

    Attributes:
        arena: name under which the engine that imports knows the arena.
        slots: one per block of the text, the first block first.
        generations: of these slots when they were reserved; a slot with another generation holds something else.
        num_tokens: number of tokens whose keys and values the slots hold; the last slot may be partly filled.
        num_filled: per slot and stage of the drafting model, the number of leading positions that it has computed;
            empty without a drafting model.
    """

    arena: str
    slots: list[int]
    generations: list[int]
    num_tokens: int
    num_filled: list[list[int]] = field(default_factory=list)


@dataclass
class Handover:
    """A request that an engine has given up, to be continued elsewhere.

    Attributes:
        resumed: as in `GenerationRequest`, with all tokens that the choices have emitted.
        image: of the first open choice; None if nothing was exported.
        num_cached_tokens: of that choice, as in `RequestMetrics`.
    """

    request_id: str
    resumed: list[list[int] | None]
    image: KVImage | None = None
    num_cached_tokens: int = 0
