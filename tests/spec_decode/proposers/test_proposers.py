# SPDX-License-Identifier: Apache-2.0
"""Every registered proposer fulfils the contract of its interface; what each method drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from fastdeploy.config.speculative_config import METHODS, MTPConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ops.suffix_cache import SuffixConfig
from fastdeploy.ops.text_batch import TextBatch
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.hybrid import HybridProposer
from fastdeploy.spec_decode.proposers.match_proposer import MatchProposer
from fastdeploy.spec_decode.proposers.ngram import NgramProposer
from fastdeploy.spec_decode.proposers.registry import PROPOSERS, make_proposer
from fastdeploy.spec_decode.proposers.suffix import SuffixProposer
from tests.doubles import OracleProposer

PERIOD = [5, 6, 7, 8]
Factory = Callable[[], Proposer]


class CountingRunner:
    """A drafting model whose drafts continue to count from the last token."""

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [[int(r.token_ids[-1]) + i for i in range(1, count + 1)] for r, count in zip(requests, counts)]


def registered(method: str) -> Factory:
    model = "any" if method in ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator") else None
    config = parse_speculative_config({"method": method, "num_speculative_tokens": 4, "model": model})
    return lambda: make_proposer(config, CountingRunner())


def hybrid(strategy: str) -> Factory:
    config = parse_speculative_config(
        {"method": "mtp", "num_speculative_tokens": 4, "num_model_steps": 2, "mtp_strategy": strategy}
    )
    return lambda: make_proposer(config, CountingRunner())


def oracle() -> Proposer:
    return OracleProposer({("a", i): (PERIOD * 20) for i in range(100)}, corruption=0.5)


ALL: dict[str, Factory] = {
    **{method: registered(method) for method in PROPOSERS},
    **{strategy: hybrid(strategy) for strategy in ("with_ngram", "with_suffix")},
    "oracle": oracle,
}


def request(index: int = 0, repeats: int = 3) -> Request:
    source = GenerationRequest("a", PERIOD * repeats, SamplingParams())
    return Request(source, index, seed=0, max_total_tokens=200, max_drafts=16)


def quotas(*max_drafts: int) -> list[DraftQuota]:
    return [DraftQuota(count, count) for count in max_drafts]


def emit(requests: list[Request], tokens: list[list[int]]) -> None:
    for r, emitted in zip(requests, tokens):
        r.append(emitted)


def test_every_configurable_method_has_a_proposer() -> None:
    assert set(PROPOSERS) == set(METHODS)


@pytest.mark.parametrize("name", ALL)
def test_drafts_do_not_exceed_their_quotas(name: str) -> None:
    proposer = ALL[name]()
    requests = [request(i) for i in range(5)]
    for r in requests:
        proposer.start(r)
    emit(requests, [[5, 6]] * 5)
    max_drafts = [1, 2, 3, 7, 16]
    drafts = proposer.propose(requests, quotas(*max_drafts))
    assert len(drafts) == 5
    for draft, count in zip(drafts, max_drafts):
        assert len(draft) <= count
        assert len(draft.source_of_each()) == len(draft)
        assert len(draft) == 0 or draft.source in (proposer.name, "ngram", "suffix")


@pytest.mark.parametrize("name", ALL)
def test_proposing_twice_gives_the_same_draft_and_leaves_the_request_unchanged(name: str) -> None:
    proposer = ALL[name]()
    r = request()
    proposer.start(r)
    emit([r], [[5, 6]])
    before = r.token_ids.tolist()
    first = proposer.propose([r], quotas(4))[0]
    second = proposer.propose([r], quotas(4))[0]
    assert r.token_ids.tolist() == before
    if name != "oracle":  # its random numbers go on
        assert first.token_ids == second.token_ids


@pytest.mark.parametrize("name", ALL)
def test_drafts_do_not_depend_on_other_requests(name: str) -> None:
    if name == "oracle":
        pytest.skip("its random numbers depend on the order")
    alone, together = ALL[name](), ALL[name]()
    r = request()
    alone.start(r)
    others = [request(i, repeats=1 + i) for i in range(1, 4)]
    for each in [*others, r]:
        together.start(each)
    emit([r, *others], [[5], [9, 9], [1], [5, 6, 7]])
    expected = alone.propose([r], quotas(6))[0].token_ids
    assert together.propose([*others, r], quotas(6, 6, 6, 6))[3].token_ids == expected


@pytest.mark.parametrize("name", ALL)
def test_finished_requests_leave_no_state(name: str) -> None:
    proposer = ALL[name]()
    for round_ in range(20):
        requests = [request(i) for i in range(1 + round_ % 4)]
        for r in requests:
            proposer.start(r)
        proposer.check_integrity(requests)
        emit(requests, [[5, 6]] * len(requests))
        proposer.propose(requests, quotas(*[4] * len(requests)))
        for r in requests[::-1]:
            proposer.finish(r)
        proposer.check_integrity([])


def request_of(tokens: list[int], index: int = 0) -> Request:
    return Request(GenerationRequest("a", tokens, SamplingParams()), index, 0, max_total_tokens=200, max_drafts=16)


def test_a_match_extends_the_drafts_of_the_layer() -> None:
    proposer, r = ALL["with_ngram"](), request_of([7, 8, 9, 1, 2, 3, 7])
    proposer.start(r)
    draft = proposer.propose([r], quotas(4))[0]  # the layer drafts 8 9, which 1 2 followed before
    assert draft.token_ids == [8, 9, 1, 2]
    assert draft.source_of_each() == ["mtp", "mtp", "ngram", "ngram"]
    assert draft.cut(3).source_of_each() == ["mtp", "mtp", "ngram"]
    assert proposer.propose([r], quotas(2))[0].source_of_each() == ["mtp", "mtp"]


def test_a_long_match_replaces_the_drafts_of_the_layer() -> None:
    long, short = request_of([1, 2, 3, 4, 5] * 3, 0), request_of([1, 2, 9, 1, 2], 1)
    for strategy in ("with_ngram", "with_suffix"):
        proposer = ALL[strategy]()
        for r in (long, short):
            proposer.start(r)
        drafts = proposer.propose([long, short], quotas(4, 4))
        assert [draft.source for draft in drafts] == [strategy.removeprefix("with_"), "mtp"]
        assert drafts[0].token_ids == [1, 2, 3, 4]


def test_the_quota_sets_the_length_of_a_match_that_replaces_the_drafts_of_the_layer() -> None:
    proposer, r = ALL["with_ngram"](), request_of([1, 2, 3, 1, 2])
    proposer.start(r)
    sources = [proposer.propose([r], [DraftQuota(4, 2, min_match_len)])[0].source for min_match_len in (2, 3)]
    assert sources == ["ngram", "mtp"]


def test_without_draft_passes_a_match_is_drafted_even_if_it_does_not_fill_the_quota() -> None:
    proposer, r = ALL["with_suffix"](), request_of([*range(20, 40), 1, *range(20, 40)])
    proposer.start(r)
    assert proposer.propose([r], [DraftQuota(4, 0, 16)])[0].token_ids[0] == 1
    r.append([77])
    assert len(proposer.propose([r], [DraftQuota(4, 0, 16)])[0]) == 0


@pytest.mark.parametrize("max_ngram_size", [2, 5, 16])
def test_an_ngram_match_length_is_counted_up_to_sixteen_tokens_for_any_ngram_size(max_ngram_size: int) -> None:
    for num_equal, match_len in ((1, 0), (2, 2), (9, 9), (16, 16), (30, 16)):
        proposer, r = NgramProposer(max_ngram_size, 2), request_of([50, *range(num_equal), 60, 51, *range(num_equal)])
        proposer.start(r)
        draft = proposer.propose([r], quotas(3))[0]
        assert draft.match_len == match_len
        longer = proposer.propose([r], [DraftQuota(3, 0, match_len + 1)])[0]
        assert len(longer) == 0 or match_len == 16


def test_ngram_drafts_from_the_most_recent_occurrence_in_prompt_and_output() -> None:
    proposer = NgramProposer(3, 2)
    source = GenerationRequest("a", [1, 2, 3, 4, 1, 2], SamplingParams())
    r = Request(source, 0, seed=0, max_total_tokens=100, max_drafts=8)
    proposer.start(r)
    emit([r], [[9, 8]])  # now 1 2 is followed by 9 8 most recently
    assert len(proposer.propose([r], quotas(4))[0]) == 0
    emit([r], [[1, 2]])
    assert proposer.propose([r], quotas(4))[0].token_ids == [9, 8, 1, 2]
    emit([r], [[3]])  # 1 2 3 is longer than any suffix that ends in 9
    assert proposer.propose([r], quotas(3))[0].token_ids == [4, 1, 2]


def salted(index: int, salt: str, prompt: list[int]) -> Request:
    source = GenerationRequest("a", prompt, SamplingParams(), cache_salt=salt)
    return Request(source, index, seed=0, max_total_tokens=100, max_drafts=8)


def test_suffix_drafts_from_cached_outputs_of_the_same_salt_only() -> None:
    proposer = SuffixProposer(SuffixConfig())
    first = salted(0, "mine", [50])
    proposer.start(first)
    emit([first], [[1, 2, 3, 4]])
    first.append([5, 6])
    proposer.finish(first)
    drafts = {}
    for index, salt in enumerate(["mine", "theirs"]):
        later = salted(index, salt, [7, 1, 2, 3])
        proposer.start(later)
        drafts[salt] = proposer.propose([later], quotas(8))[0].token_ids
    assert drafts == {"mine": [4, 5, 6], "theirs": []}


def test_suffix_does_not_draft_from_prompts_of_other_requests() -> None:
    proposer = SuffixProposer(SuffixConfig())
    first = salted(0, "mine", [1, 2, 3, 4, 5, 6])
    proposer.start(first)
    emit([first], [[9]])
    proposer.finish(first)
    later = salted(1, "mine", [7, 1, 2, 3])
    proposer.start(later)
    assert len(proposer.propose([later], quotas(8))[0]) == 0


def test_mtp_drafts_one_token_per_draft_pass() -> None:
    config = MTPConfig(num_speculative_tokens=5, num_model_steps=2)
    proposer = make_proposer(config, CountingRunner())
    drafts = proposer.propose([request(), request(1)], quotas(5, 1))
    assert [draft.token_ids for draft in drafts] == [[9, 10], [9]]
    assert {draft.source for draft in drafts} == {"mtp"}


def test_a_draft_model_drafts_up_to_its_quota() -> None:
    config = parse_speculative_config({"model": "demo/draft", "num_speculative_tokens": 3})
    proposer = make_proposer(config, CountingRunner())
    drafts = proposer.propose([request(), request(1)], quotas(3, 1))
    assert [draft.token_ids for draft in drafts] == [[9, 10, 11], [9]]
    assert {draft.source for draft in drafts} == {"draft_model"}


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_a_method_with_a_drafting_model_requires_a_runner(method: str) -> None:
    config = parse_speculative_config({"method": method, "model": "demo/draft"})
    with pytest.raises(ValueError, match=f"method {method} requires a runner"):
        make_proposer(config)


@pytest.mark.parametrize("name", ["ngram", "suffix", "with_ngram", "with_suffix"])
def test_a_request_that_was_restarted_after_a_fault_gets_the_same_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer, other = ALL[name](), ALL[name]()
    requests, others = [request(0), request(1)], [request(0), request(1)]
    for r, o in zip(requests, others):
        proposer.start(r)
        other.start(o)
        r.append([5, 9, 5])
        o.append([5, 9, 5])
    matcher = proposer._matcher if isinstance(proposer, HybridProposer) else proposer
    assert isinstance(matcher, MatchProposer)
    draft_batch = matcher._match_index.draft_batch

    def take_tokens_and_raise(batch: TextBatch) -> None:
        draft_batch(batch)
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(matcher._match_index, "draft_batch", take_tokens_and_raise)
        proposer.propose(requests, quotas(4, 4))
    for r in requests:
        proposer.restart(r)
    for tokens in ([6], [7, 8]):
        emit([*requests, *others], [tokens] * 4)
        drafts = [draft.token_ids for draft in proposer.propose(requests, quotas(4, 4))]
        assert drafts == [draft.token_ids for draft in other.propose(others, quotas(4, 4))]
        assert all(drafts)
    proposer.check_integrity(requests)
    for r in requests:
        proposer.finish(r)
    proposer.check_integrity([])
