# SPDX-License-Identifier: Apache-2.0
"""Sets the drafts of the next step: what the proposer drafts, cut to what constraints allow.

`propose_drafts` and `constrain_drafts` return the requests whose handling raised an exception, with the exception.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from fastdeploy.core.constraint import TokenConstraint
from fastdeploy.core.faults import fault_point
from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request, RequestStatus
from fastdeploy.engine.stats_collector import StatsCollector
from fastdeploy.spec_decode.proposers.base import Proposer

FORCED_SOURCE = "grammar"  # of draft tokens that a constraint forces

Failures = list[tuple[Request, Exception]]
QuotaFunction = Callable[[Sequence[Request]], list[DraftQuota]]

logger = logging.getLogger("fastdeploy.engine")


def propose_drafts(proposer: Proposer, requests: Sequence[Request], make_quotas: QuotaFunction) -> Failures:
    """Draft for requests; after an exception of the proposer, none gets a draft and its state of them is made anew."""
    try:
        if quotas := make_quotas(requests):
            fault_point("propose")
            for request, draft in zip(requests, proposer.propose(requests, quotas)):
                if len(draft):
                    request.set_draft(draft)
    except Exception as exception:
        logger.error("the proposer failed; this step has no drafts", exc_info=exception)
        return _restart(proposer, requests)
    return []


def constrain_drafts(requests: Sequence[Request], stats: StatsCollector) -> Failures:
    """Cut the drafts of constrained requests to what is allowed."""
    failures: Failures = []
    for request in requests:
        if request.constraint is not None:
            try:
                draft = _constrain(request, request.constraint, stats)
            except Exception as exception:
                failures.append((request, exception))
            else:
                request.set_draft(draft if len(draft) else NO_DRAFT)
    return failures


def _restart(proposer: Proposer, requests: Sequence[Request]) -> Failures:
    failures: Failures = []
    for request in requests:
        request.draft = NO_DRAFT
        try:
            proposer.restart(request)
        except Exception as exception:
            failures.append((request, exception))
    return failures


def _constrain(request: Request, constraint: TokenConstraint, stats: StatsCollector) -> Draft:
    """Return the allowed beginning of a request's draft; if it is empty, the tokens that the constraint forces."""
    fault_point("constraint_draft", request.request_id)
    draft = request.draft
    allowed = draft.cut(constraint.num_valid_tokens(draft.token_ids))
    stats.count_forbidden(len(draft) - len(allowed))
    return allowed if len(allowed) else Draft(constraint.forced_tokens(request.draft_room), FORCED_SOURCE)


def may_draft(request: Request) -> bool:
    """Return whether a request decodes in the next step and has room for drafts."""
    decodes = request.num_pending == 1 and request.num_computed > 0 and not request.hands_over
    return decodes and request.draft_room > 0 and request.status is not RequestStatus.FINISHED
