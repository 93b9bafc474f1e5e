# SPDX-License-Identifier: Apache-2.0
"""Messages are decoded as they were encoded, and unread deltas are merged."""

from __future__ import annotations

from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
from fastdeploy.ipc import messages
from fastdeploy.ipc.merge import merge_deltas


def test_every_field_of_a_message_is_encoded() -> None:
    params = SamplingParams(
        n=2, seed=2**64 - 1, stop=["a"], logit_bias={5: -1.5}, bad_words_token_ids=[[1, 2]], logprobs=3,
        speculative=SpeculativeParams("off"),
    )  # fmt: skip
    request = GenerationRequest("id", [1, 2], params, cache_salt="s", timeout_s=1.5)
    decoded = messages.decode_to_engine(messages.encode(messages.AddRequest(request)))
    assert decoded == messages.AddRequest(request)
    delta = TokenDelta("id", 1, [3], logprobs=[TokenLogprobs(3, -0.1, 1, [(3, -0.1)])], stop_reason="x")
    assert messages.decode_to_client(messages.encode(messages.Deltas([], [delta]))) == messages.Deltas([], [delta])


def test_unread_deltas_of_one_choice_are_merged() -> None:
    first = TokenDelta("r", 0, [1], logprobs=[TokenLogprobs(1, -1.0, 1)], prompt_logprobs=[None])
    second = TokenDelta("r", 0, [2, 3], draft_sources=["mtp"], logprobs=[TokenLogprobs(2, -1.0, 1)] * 2)
    last = TokenDelta("r", 0, [4], logprobs=[TokenLogprobs(4, -1.0, 1)], finish_reason="stop", stop_reason=4, seed=9)
    last.is_complete = True
    unread: list[TokenDelta] = []
    for delta in (first, TokenDelta("r", 1, [7]), second, last):
        merge_deltas(unread, delta)
    assert [delta.index for delta in unread] == [0, 1]
    merged = unread[0]
    assert (merged.token_ids, merged.draft_sources, merged.finish_reason) == ([1, 2, 3, 4], ["mtp"], "stop")
    assert (merged.stop_reason, merged.is_complete, merged.seed, merged.prompt_logprobs) == (4, True, 9, [None])
    assert merged.logprobs is not None and [entry.token_id for entry in merged.logprobs] == [1, 2, 2, 4]
    assert merged.sources() == [None, "mtp", None, None], "the first tokens of each step are its accepted drafts"
