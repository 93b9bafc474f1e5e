# SPDX-License-Identifier: Apache-2.0
"""A text that an abort or a deadline cuts is a beginning of plain decoding's text; the other texts are whole.

Deadlines are counted in steps: the engine's clock advances by one second per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fastdeploy.core.outputs import ErrorInfo, TokenDelta
from tests.exactness.disturbed import WAYS, engine_of, is_beginning, pool, run_disturbed
from tests.exactness.engines import Texts
from tests.exactness.requests import Text

ABORTED = ("abort", None)
EXPIRED = ("error", ErrorInfo("timeout", "the request's time is over"))
MAX_STEPS = 24


@dataclass
class Member:
    """A batch of requests, some of which are aborted before a step or have a deadline.

    Attributes:
        aborts: the step of each request that is aborted.
        deadlines: the step of each request that runs out of time.
    """

    names: list[str]
    aborts: dict[str, int] = field(default_factory=dict)
    deadlines: dict[str, int] = field(default_factory=dict)

    @classmethod
    def random(cls, seed: int) -> Member:
        """Return the member of a seed."""
        random = np.random.default_rng(seed)
        names = [request.request_id for request in pool()[0]]
        member = cls(random.permutation(names)[: random.integers(2, 17)].tolist())
        for name in member.names:
            cuts = (None, member.aborts, member.deadlines)[random.integers(3)]
            if cuts is not None:
                cuts[name] = int(
                    random.integers(1 + random.integers(MAX_STEPS))
                )  # rather early, since drafts end texts soon
        return member


def run(member: Member, method: str) -> Texts:
    """Run a member on the engine of a method."""
    engine, clock = engine_of(method)
    by_name = {request.request_id: request for request in pool()[0]}
    requests = [replace(by_name[name], timeout_s=member.deadlines.get(name)) for name in member.names]
    start_s = clock.now

    def before_step(step: int) -> Sequence[TokenDelta]:
        clock.now = start_s + step
        return [delta for name, at in member.aborts.items() if at == step for delta in engine.abort(name)]

    return run_disturbed(engine, requests, before_step)


def check(member: Member, method: str) -> list[Text]:
    """Assert that every text is whole or cut as it should be; return the cut ones."""
    plain, texts = pool()[1], run(member, method)
    assert texts.keys() == {key for key in plain if key[0] in member.names}
    cut = {key: text for key, text in texts.items() if text != plain[key]}
    for (name, index), text in cut.items():
        assert name in member.aborts or name in member.deadlines, (name, text)
        assert (text.finish_reason, text.error) == (ABORTED if name in member.aborts else EXPIRED)
        assert text.stop_reason is None
        assert is_beginning(text, plain[name, index]), (name, text, plain[name, index])
    return list(cut.values())


@pytest.mark.parametrize("method", WAYS)
def test_cut_texts_are_beginnings(method: str) -> None:
    cut = [text for seed in range(10) for text in check(Member.random(seed), method)]
    for reason, error in (ABORTED, EXPIRED):
        lengths = {len(text.token_ids) for text in cut if (text.finish_reason, text.error) == (reason, error)}
        assert len(lengths) > 3 and 0 in lengths


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_cut_texts_are_beginnings_for_a_thousand_members() -> None:
    for seed in range(1000):
        check(Member.random(1000 + seed), list(WAYS)[seed % len(WAYS)])
