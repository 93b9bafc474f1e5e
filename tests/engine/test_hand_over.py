# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process: one computes prompts or begins texts, the other continues them, and nothing changes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from fastdeploy.core.handover import Handover
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine, make_kv_transfer
from fastdeploy.engine.kv_transfer import KVTransfer
from fastdeploy.hub.model_path import resolve_model_path
from tests.exactness.engines import METHODS, Texts, build, config, configured, exists, proposer_of
from tests.exactness.requests import join, make_requests, run_alone
from tests.pairwise import pairwise

NUM_SLOTS = 400
DIGESTS = {"target": "demo", "drafting": "demo draft", "states": "demo"}


def can_run(prefill: str, decode: str, chunk: int, num_drafts: int, caches_prefixes: bool) -> bool:
    return all(method == "naive" or exists(method, chunk, num_drafts) for method in (prefill, decode))


ALL_METHODS = (*METHODS, "naive")
CASES = pairwise(ALL_METHODS, ALL_METHODS, (7, 2048), (1, 3), (False, True), allowed=can_run)
Deltas = dict[tuple[str, int], list[TokenDelta]]


@dataclass
class Pair:
    """Two engines and the arena between them.

    Attributes:
        free_slots: slots of the first engine's arena that hold nothing.
        deltas: what the choices of each request have emitted.
    """

    first: Engine
    second: Engine
    free_slots: list[int] = field(default_factory=lambda: list(range(NUM_SLOTS)))
    deltas: Deltas = field(default_factory=dict)
    handovers: list[Handover] = field(default_factory=list)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    waiting: list[GenerationRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        for engine in (self.first, self.second):
            engine.transfer = make_kv_transfer(engine, NUM_SLOTS, DIGESTS)
        self.importing.attach("first", self.exporting.arena)

    @property
    def exporting(self) -> KVTransfer:
        assert self.first.transfer is not None
        return self.first.transfer

    @property
    def importing(self) -> KVTransfer:
        assert self.second.transfer is not None
        return self.second.transfer

    def add(self, request: GenerationRequest, hands_over: bool = True) -> None:
        """Add a request to the first engine: its first choice alone, if it is to be handed over with the prompt."""
        self.requests[request.request_id] = request
        num_blocks = -(-(len(request.prompt_token_ids) + 64) // self.exporting.block_size)
        slots = [self.free_slots.pop() for _ in range(min(num_blocks, len(self.free_slots)))]
        for slot in slots:
            self.exporting.arena.generations[slot] += 1
        others = [None] * (request.params.n - 1) if hands_over else [[]] * (request.params.n - 1)
        ticket = replace(request, resumed=[[], *others], hands_over=hands_over, export_slots=slots)
        self.collect(self.first.add_request(ticket))

    def step(self) -> None:
        """Step both engines, pass on what is handed over, and check their integrity."""
        self.collect(self.first.step())
        for handover in self.first.pop_handovers():
            self.handovers.append(handover)
            self.pass_on(handover)
        for ticket in self.waiting:
            self.collect(self.second.add_request(ticket))
        self.waiting.clear()
        self.collect(self.second.step())
        self.first.check_integrity()
        self.second.check_integrity()

    def pass_on(self, handover: Handover) -> None:
        request = self.requests[handover.request_id]
        ended = [self.has_ended(request.request_id, index) for index in range(request.params.n)]
        resumed = [
            None if has_ended else tokens or [] for has_ended, tokens in zip(ended, handover.resumed, strict=True)
        ]
        image = handover.image and replace(handover.image, arena="first")
        params = replace(request.params, prompt_logprobs=None) if any(handover.resumed) else request.params
        ticket = replace(request, params=params, resumed=resumed, image=image)
        prepared = self.second.prepare(ticket)
        if prepared is not None:
            prepared.result()
        self.waiting.append(ticket)

    def has_ended(self, request_id: str, index: int) -> bool:
        deltas = self.deltas.get((request_id, index))
        return bool(deltas) and deltas[-1].finish_reason is not None

    def collect(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            known = self.deltas.setdefault((delta.request_id, delta.index), [])
            assert delta.first_index == sum(len(earlier.token_ids) for earlier in known), "no token twice or missing"
            known.append(delta)

    def is_busy(self) -> bool:
        transfers = self.exporting.is_moving or self.importing.is_moving
        return self.first.has_unfinished() or self.second.has_unfinished() or transfers or bool(self.waiting)

    def texts(self) -> Texts:
        """Run to the end; return all texts."""
        while self.is_busy():
            self.step()
        for engine in (self.first, self.second):
            stats = engine.stats()
            assert stats.num_free_blocks == stats.num_blocks
        return {key: join(deltas) for key, deltas in self.deltas.items()}


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    return make_requests(tokenizer, make_engine(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(make_engine(config()), requests)


def make_pair(
    plain: Texts, prefill: str, decode: str, chunk: int = 2048, num_drafts: int = 3, caches_prefixes: bool = True
) -> Pair:
    def engine(method: str) -> Engine:
        cfg = config(configured(method), num_drafts if method != "naive" else 0, chunk, prefix_caching=caches_prefixes)
        return build(cfg, proposer_of(method, plain, num_drafts))

    return Pair(engine(prefill), engine(decode))


@pytest.mark.parametrize(("prefill", "decode", "chunk", "num_drafts", "caches_prefixes"), CASES)
def test_a_prompt_computed_elsewhere_gives_the_same_text(
    requests: list[GenerationRequest],
    plain: Texts,
    prefill: str,
    decode: str,
    chunk: int,
    num_drafts: int,
    caches_prefixes: bool,
) -> None:
    pair = make_pair(plain, prefill, decode, chunk, num_drafts, caches_prefixes)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert len(pair.handovers) == len(requests)
    assert pair.importing.num_imported_blocks > 0


def run_moving(pair: Pair, requests: Sequence[GenerationRequest], seed: int) -> Texts:
    """Run requests of which each is handed over after a random number of steps."""
    generator = random.Random(seed)
    moments = {request.request_id: generator.randrange(1, 30) for request in requests}
    for request in requests:
        pair.add(request, hands_over=False)
    for step in range(1, 31):
        for request_id, moment in moments.items():
            if moment == step:
                pair.first.hand_over(request_id)
        pair.step()
    return pair.texts()


@pytest.mark.parametrize("seed", range(6))
def test_a_text_is_handed_over_at_any_step(requests: list[GenerationRequest], plain: Texts, seed: int) -> None:
    prefill, decode = random.Random(seed).choices(["naive", "ngram", "suffix", "mtp", "draft_model"], k=2)
    pair = make_pair(plain, prefill, decode, chunk=64, caches_prefixes=seed % 2 == 0)
    assert run_moving(pair, requests, seed) == plain
    assert pair.importing.num_imported_blocks > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6, 106))
def test_texts_are_handed_over_at_any_step(requests: list[GenerationRequest], plain: Texts, seed: int) -> None:
    test_a_text_is_handed_over_at_any_step(requests, plain, seed)


def test_blocks_that_do_not_arrive_are_computed(requests: list[GenerationRequest], plain: Texts) -> None:
    pair = make_pair(plain, "naive", "naive", caches_prefixes=False)
    spoil = iter([2, 0, 1] * len(requests))
    pass_on = pair.pass_on

    def spoil_and_pass_on(handover: Handover) -> None:
        assert handover.image is not None
        index = next(spoil)
        if index < len(handover.image.slots):
            pair.exporting.arena.generations[handover.image.slots[index]] += 1
        pass_on(handover)

    pair.pass_on = spoil_and_pass_on  # type: ignore[method-assign]
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    num_sent = sum(len(h.image.slots) for h in pair.handovers if h.image)
    assert 0 < pair.importing.num_imported_blocks < num_sent / 2


def test_another_layout_is_not_imported(requests: list[GenerationRequest], plain: Texts) -> None:
    pair = make_pair(plain, "mtp", "mtp", num_drafts=1)
    pair.second.transfer = make_kv_transfer(pair.second, 1, {**DIGESTS, "target": "another"})
    pair.importing.attach("first", pair.exporting.arena)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert pair.importing.num_imported_blocks == 0


def test_a_request_drafts_with_mtp_only_if_the_states_arrive(requests: list[GenerationRequest], plain: Texts) -> None:
    accepted = {}
    for name, digests in {"equal": DIGESTS, "another": {**DIGESTS, "states": "another"}}.items():
        pair = make_pair(plain, "mtp", "mtp", caches_prefixes=False)
        pair.second.transfer = make_kv_transfer(pair.second, 1, digests)
        pair.importing.attach("first", pair.exporting.arena)
        for request in requests:
            pair.add(request)
        assert pair.texts() == plain
        assert pair.importing.num_imported_blocks > 0
        accepted[name] = pair.second.stats().num_accepted_tokens
    assert accepted["equal"] > 0 == accepted["another"]


def test_mtp_drafts_after_a_hand_over_as_on_one_engine(requests: list[GenerationRequest], plain: Texts) -> None:
    alone = build(config("mtp", 3))
    assert run_alone(alone, requests) == plain
    pair = make_pair(plain, "mtp", "mtp")
    for request in requests:
        pair.add(request)
        assert pair.texts().items() >= {k: v for k, v in plain.items() if k[0] == request.request_id}.items()
    ours, expected = pair.second.stats(), alone.stats()
    assert (ours.num_draft_tokens, ours.num_accepted_tokens) == (
        expected.num_draft_tokens,
        expected.num_accepted_tokens,
    )


def test_with_too_few_slots_only_the_first_blocks_are_handed_over(
    requests: list[GenerationRequest], plain: Texts
) -> None:
    pair = make_pair(plain, "ngram", "ngram", caches_prefixes=False)
    del pair.free_slots[1:]
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    sizes = [len(handover.image.slots) for handover in pair.handovers if handover.image]
    assert sum(sizes) == pair.importing.num_imported_blocks == 1


def test_a_text_that_ends_with_its_first_token_is_not_handed_over(requests: list[GenerationRequest]) -> None:
    pair = Pair(build(config()), build(config()))
    request = replace(requests[0], params=replace(requests[0].params, max_tokens=1))
    pair.add(request)
    [text] = pair.texts().values()
    assert (len(text.token_ids), text.finish_reason, pair.handovers) == (1, "length", [])


def test_an_abort_frees_blocks_that_are_exported_or_imported(requests: list[GenerationRequest]) -> None:
    pair = Pair(build(config(chunk=7)), build(config()))
    for request in requests:
        pair.add(request)
    for _ in range(8):
        pair.step()
    for request in requests:
        pair.collect(pair.first.abort(request.request_id))
        pair.collect(pair.second.abort(request.request_id))
    image = pair.handovers[0].image
    assert image is not None
    unwanted = replace(requests[0], request_id="unwanted", image=replace(image, arena="first"))
    assert pair.second.prepare(unwanted) is not None
    pair.second.cancel("unwanted")
    pair.texts()
    pair.first.check_integrity()
    pair.second.check_integrity()


def test_waiting_requests_with_imported_blocks_do_not_stop_the_others(
    requests: list[GenerationRequest], plain: Texts
) -> None:
    few = config("naive", num_blocks=20)
    pair = Pair(build(config()), build(replace(few, scheduler=replace(few.scheduler, max_num_seqs=2))))
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
