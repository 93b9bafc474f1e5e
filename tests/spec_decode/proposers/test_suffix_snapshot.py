# SPDX-License-Identifier: Apache-2.0
"""The file that carries suffix decoding's finished outputs to the next run."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixRules
from fastdeploy.spec_decode.proposers.suffix import SuffixProposer
from fastdeploy.spec_decode.proposers.suffix_snapshot import write_snapshot

VOCAB_SIZE = 100


def proposer(path: Path, vocabulary: str = "v", max_cache_bytes: int = 1 << 20) -> SuffixProposer:
    """Return a proposer that has read `path`."""
    made = SuffixProposer(SuffixRules(max_cache_bytes=max_cache_bytes), str(path))
    made.open(VOCAB_SIZE, lambda: vocabulary)
    return made


def say(one: SuffixProposer, index: int, salt: str, output: list[int]) -> None:
    request = Request(GenerationRequest("a", [90], SamplingParams(), cache_salt=salt), index, 0, 100, 8)
    one.start(request)
    request.append(output)
    one.finish(request)


def draft(one: SuffixProposer, salt: str, prompt: list[int]) -> list[int]:
    request = Request(GenerationRequest("b", prompt, SamplingParams(), cache_salt=salt), 0, 0, 100, 8)
    one.start(request)
    drafted = one.propose([request], [8])[0].token_ids
    one.finish(request)
    return [int(token) for token in drafted]


def num_outputs(one: SuffixProposer) -> int:
    return one.suffix_cache_stats().num_outputs


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A snapshot of two outputs of two owners."""
    path = tmp_path / "outputs"
    one = proposer(path)
    say(one, 0, "key of alice", [1, 2, 3, 4, 5, 6])
    say(one, 1, "key of bob", [1, 2, 3, 7, 8, 9])
    one.close()
    return path


def test_next_run_drafts_from_the_outputs_of_the_last_for_the_same_salts_only(saved: Path) -> None:
    later = proposer(saved)
    assert num_outputs(later) == 2
    assert draft(later, "key of alice", [50, 1, 2, 3]) == [4, 5, 6]
    assert draft(later, "key of bob", [50, 1, 2, 3]) == [7, 8, 9]
    assert draft(later, "", [50, 1, 2, 3]) == []
    later.check_integrity([])


def test_third_run_has_what_both_before_it_said(saved: Path) -> None:
    second = proposer(saved)
    say(second, 0, "key of alice", [11, 12, 13, 14])
    second.close()
    third = proposer(saved)
    assert num_outputs(third) == 3
    assert draft(third, "key of alice", [50, 11, 12]) == [13, 14]
    assert draft(third, "key of bob", [50, 1, 2, 3]) == [7, 8, 9]


def test_file_holds_no_salt_and_is_the_users_own(saved: Path) -> None:
    content = saved.read_bytes()
    assert b"alice" not in content and b"bob" not in content
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert [file.name for file in saved.parent.iterdir()] == ["outputs"], "nothing is left beside it"


def change_header(path: Path, **values: object) -> None:
    line, payload = path.read_bytes().split(b"\n", 1)
    path.write_bytes(json.dumps({**json.loads(line), **values}).encode() + b"\n" + payload)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(bytes(content))


def write_token_100(path: Path) -> None:
    write_snapshot(
        path, "v", bytes(16), [("ab" * 16, np.array([1, 2], np.int32)), ("ab" * 16, np.array([100], np.int32))]
    )


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one token differs": (flip_last_byte, "it is damaged"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it is damaged"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "it is damaged"),
    "counts are no numbers": (lambda path: change_header(path, num_outputs="2"), "it is damaged"),
    "counts disagree": (lambda path: change_header(path, num_outputs=1), "it is damaged"),
    "key is gone": (lambda path: change_header(path, salt_key=None), "it is damaged"),
    "version": (lambda path: change_header(path, version=2), "its version is 2, not 1"),
    "vocabulary": (lambda path: change_header(path, vocabulary="w"), "it was made with another vocabulary"),
    "says it is huge": (
        lambda path: change_header(path, num_tokens=1 << 40),
        "its 4398046511144 bytes are more than the 1048576 of the cache",
    ),
    "a token that does not exist": (write_token_100, "it is damaged"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_used_is_said_in_one_line_and_none_of_it_is_taken(
    name: str, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = UNUSABLE[name]
    damage(saved)
    with caplog.at_level(logging.WARNING, logger="fastdeploy.engine"):
        later = proposer(saved)
    assert [record.getMessage() for record in caplog.records] == [
        f"the outputs of an earlier run in {saved} are not used: {reason}"
    ]
    assert num_outputs(later) == 0
    say(later, 0, "s", [1, 2])
    later.close()
    assert num_outputs(proposer(saved)) == 1, "the next clean end replaces it"


@pytest.mark.parametrize("content", [b"", b"my diary\n", b'{"format": "other"}\n', b"\xff" * 9000])
def test_file_of_another_kind_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "diary"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"suffix_decoding_snapshot_path: .*diary cannot be used: it holds something"):
        proposer(path)
    assert path.read_bytes() == content


def test_path_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder that can be written to"):
        proposer(tmp_path / "missing" / "outputs")
    with pytest.raises(ConfigError, match="cannot be used"):
        proposer(tmp_path)


def test_outputs_on_their_way_out_are_not_kept() -> None:
    cache = SuffixCache(SuffixRules(max_cached_requests=1, max_cache_bytes=1 << 20))
    for output in ([1] * 1000, [5, 6, 7]):
        cache.start(0, "s", [1])
        cache.finish(0, output)
    assert cache.usage().num_outputs == 2, "the long one leaves in pieces"
    assert [(salt, tokens.tolist()) for salt, tokens in cache.outputs()] == [("s", [5, 6, 7])]


def test_stats_tell_own_text_from_shared_outputs(tmp_path: Path) -> None:
    one = proposer(tmp_path / "outputs")
    say(one, 0, "s", [1, 2, 3, 4, 5, 6])
    draft(one, "s", [50, 1, 2, 3])
    draft(one, "s", [7, 8, 9, 7, 8])
    draft(one, "s", [60, 61])
    stats = one.suffix_cache_stats()
    assert (stats.num_own_drafts, stats.num_shared_drafts, stats.num_evicted_outputs) == (1, 1, 0)
    assert (stats.num_outputs, stats.num_tokens, stats.live_bytes < stats.shared_bytes) == (1, 6, True)
