# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction together with a method that matches text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.mtp import MTPProposer
from fastdeploy.spec_decode.proposers.suffix import SuffixProposer
from fastdeploy.spec_decode.proposers.text_proposer import TextProposer

GAIN_RATE = 1 / 8  # weight of the last step in what a request's drafts are known to bring


Weigh = Callable[[Sequence[Request], Sequence[Draft], Sequence[int]], list[int]]


class HybridProposer(Proposer):
    """Lets the layer draft, and the matcher go on behind its drafts.

    A match that is worth more takes their place: it costs no pass through the layer. A suffix match is where it is
    expected to have more tokens right than the layer's drafts lately had. What another one promises is not known here.

    Attributes:
        weigh: decides it for those: given requests, their matches and how many passes through the layer each may take,
            returns how many it is to take beside its match. A request whose drafts may not go on behind the layer's is
            not matched then. By default the layer goes first.
    """

    name = "mtp"
    is_model = True
    needs_hidden_states = True

    def __init__(self, layer: MTPProposer, matcher: TextProposer, num_model_steps: int) -> None:
        self._layer = layer
        self._matcher = matcher
        self._expected = float(num_model_steps)  # tokens that the layer's drafts have right, over all requests
        self._gains: dict[tuple[str, int], float] = {}  # the same of each request, once it has drafted
        self._is_layers: dict[tuple[str, int], bool] = {}  # whether the layer made the last draft
        self.weigh: Weigh | None = None

    def start(self, request: Request) -> None:
        """Show the matcher the prompt."""
        self._matcher.start(request)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Note what the layer's drafts brought; show the matcher the tokens."""
        for request, tokens in zip(requests, emitted) if self._is_layers else ():
            if self._is_layers.pop(request.key, False):
                self._learn(request.key, len(tokens) - 1)
        self._matcher.observe(requests, emitted)

    def propose(
        self, requests: Sequence[Request], caps: Sequence[int], steps: Sequence[int] | None = None
    ) -> list[Draft]:
        """Take the matches that are worth it, let the layer draft for the other requests, extend what it drafts."""
        steps = steps or caps
        if self.weigh is not None:
            drafts, steps = self._weighed_matches(self.weigh, requests, caps, steps)
            rest = [i for i, count in enumerate(steps) if count]
        else:
            drafts = self._sure_matches(requests, caps)
            rest = [i for i, draft in enumerate(drafts) if not len(draft)]
        if rest:
            extended = self._extended([requests[i] for i in rest], [caps[i] for i in rest], [steps[i] for i in rest])
            for i, draft in zip(rest, extended):
                drafts[i] = draft
                self._is_layers[requests[i].key] = len(draft) > 0 and steps[i] > 0
        return drafts

    def finish(self, request: Request) -> None:
        """Forget the request."""
        self._matcher.finish(request)
        self._gains.pop(request.key, None)
        self._is_layers.pop(request.key, None)

    def suffix_cache_stats(self) -> SuffixCacheStats | None:
        """Return what the matcher keeps."""
        return self._matcher.suffix_cache_stats()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check the matcher's state, and that no other requests are remembered."""
        self._matcher.check_integrity(requests)
        assert self._gains.keys() | self._is_layers.keys() <= {request.key for request in requests}

    def _learn(self, key: tuple[str, int], num_right: int) -> None:
        self._expected += GAIN_RATE * (num_right - self._expected)
        before = self._gains.get(key, self._expected)
        self._gains[key] = before + GAIN_RATE * (num_right - before)

    def _weighed_matches(
        self, weigh: Weigh, requests: Sequence[Request], caps: Sequence[int], steps: Sequence[int]
    ) -> tuple[list[Draft], Sequence[int]]:
        """Return the matches of requests that may be matched, and how many passes each takes beside its match."""
        drafts = [NO_DRAFT] * len(requests)
        matched = [i for i, (cap, count) in enumerate(zip(caps, steps)) if cap > count]
        if not matched:
            return drafts, steps
        found = self._matcher.propose([requests[i] for i in matched], [caps[i] for i in matched])
        for i, draft in zip(matched, found):
            drafts[i] = draft
        return drafts, weigh(requests, drafts, steps) if any(steps) else steps

    def _sure_matches(self, requests: Sequence[Request], caps: Sequence[int]) -> list[Draft]:
        """Return the matches that promise more than the layer, NO_DRAFT for requests without one."""
        if not isinstance(self._matcher, SuffixProposer):
            return [NO_DRAFT] * len(requests)
        bars = [self._gains.get(request.key, self._expected) for request in requests]
        found = self._matcher.propose_scored(requests, caps)
        return [draft if score > bar else NO_DRAFT for (draft, score), bar in zip(found, bars)]

    def _extended(self, requests: Sequence[Request], caps: Sequence[int], steps: Sequence[int]) -> list[Draft]:
        firsts = self._layer.propose(requests, caps, steps)
        room = [cap - len(first) for first, cap in zip(firsts, caps)]
        if not any(room):
            return firsts
        extensions = self._matcher.extend(requests, room, [first.token_ids for first in firsts])
        return [_join(first, extension) for first, extension in zip(firsts, extensions)]


def _join(first: Draft, extension: Draft) -> Draft:
    if not len(first) or not len(extension):
        return first if len(first) else extension
    sources = (*first.source_of_each(), *extension.source_of_each())
    return Draft(first.token_ids + extension.token_ids, first.source, sources)
