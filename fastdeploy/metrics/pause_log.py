# SPDX-License-Identifier: Apache-2.0
"""Log lines about pauses of drafting."""

from __future__ import annotations

import logging

from fastdeploy.core.stats import DraftLengthStats

MIN_PAUSE_S = 10.0

logger = logging.getLogger("fastdeploy.spec_decode")


class PauseLog:
    """Logs once per range of batch sizes that drafting pauses there; short pauses are not logged.

    The ranges are those that adaptive length measures separately: the sizes with the same number of bits. Pauses end
    for trials and come back, so the present state is left to the metrics.
    """

    def __init__(self) -> None:
        self._logged = {0}  # numbers of bits; nothing is said of steps without requests

    def update(self, stats: DraftLengthStats) -> None:
        """Take in the current state."""
        num_bits = stats.num_requests.bit_length()
        if not stats.is_paused or stats.paused_s < MIN_PAUSE_S or num_bits in self._logged:
            return
        self._logged.add(num_bits)
        logger.info(
            "drafting pauses in steps of %s, where drafts cost more time than they save; it is tried again now and "
            "then (said once; spec_decode_adaptive_paused in /metrics is the present state)",
            _requests(num_bits),
        )


def _requests(num_bits: int) -> str:
    """Return the range of batch sizes whose numbers have so many bits."""
    return "1 request" if num_bits == 1 else f"{2 ** (num_bits - 1)} to {2**num_bits - 1} requests"
