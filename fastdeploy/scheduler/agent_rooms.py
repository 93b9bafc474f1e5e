# SPDX-License-Identifier: Apache-2.0
"""Whether the engine has room for another ticket."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.core.stats import EngineStats

NUM_STEPS = 2  # whose budgets of prompt tokens may wait: the next step is never short of work
BLOCK_RESERVE = 0.08  # of all blocks, so that sequences that grow seldom preempt others


@dataclass(frozen=True)
class Load:
    """What a ticket adds to the engine: prompt tokens to compute, sequences and blocks."""

    num_tokens: int = 0
    num_seqs: int = 0
    num_blocks: int = 0

    def __add__(self, other: Load) -> Load:
        """Return the load of both."""
        return Load(
            self.num_tokens + other.num_tokens, self.num_seqs + other.num_seqs, self.num_blocks + other.num_blocks
        )


@dataclass(frozen=True)
class Rooms:
    """The limits up to which a node claims tickets.

    Attributes:
        max_num_seqs, max_num_batched_tokens: limits of a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    def has_room(self, stats: EngineStats, started: Load) -> bool:
        """Return whether another ticket may be claimed.

        Args:
            stats: the engine's last counters.
            started: what was claimed or started since and is not in them.
        """
        num_seqs = stats.num_running + stats.num_waiting + started.num_seqs
        num_tokens = stats.num_waiting_tokens + started.num_tokens
        num_free = stats.num_free_blocks - started.num_blocks
        return (
            num_seqs < self.max_num_seqs
            and num_tokens < NUM_STEPS * self.max_num_batched_tokens
            and num_free > BLOCK_RESERVE * stats.num_blocks
        )
