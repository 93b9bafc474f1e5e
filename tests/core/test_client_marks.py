# SPDX-License-Identifier: Apache-2.0
"""Ids of requests are separate for each client, whatever id a client chooses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import (
    CLIENT_MARK,
    PROMPT_MARK,
    add_client_mark,
    add_prompt_number,
    is_requested,
    without_marks,
    without_prompt_number,
)
from fastdeploy.entrypoints.openai.serving_base import make_request_id

ids = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128)
clients = st.text("0123456789abcdef", min_size=12, max_size=12)


@given(st.tuples(clients, ids), st.tuples(clients, ids))
def test_marked_ids_are_equal_only_for_the_same_client_and_id(first: tuple[str, str], second: tuple[str, str]) -> None:
    marked = [add_client_mark(make_request_id(chosen), client) for client, chosen in (first, second)]
    assert (marked[0] == marked[1]) == (first == second)
    assert [without_marks(one) for one in marked] == [first[1], second[1]]
    assert without_marks(first[1]) == first[1], "an id without a mark is as its client knows it"


@given(clients, ids, st.integers(0, 1023))
def test_the_number_of_a_prompt_is_no_part_of_its_request_s_id(client: str, chosen: str, number: int) -> None:
    for own in (add_prompt_number(chosen, number), add_client_mark(add_prompt_number(chosen, number), client)):
        assert without_marks(own) == chosen and is_requested(own, {chosen})
        assert not is_requested(own, {f"{chosen}-{number}"}) and not is_requested(f"{chosen}-{number}", {chosen})
        assert without_prompt_number(own) == own.replace(f"{number}{PROMPT_MARK}", "")


@pytest.mark.parametrize("mark", [CLIENT_MARK, PROMPT_MARK])
def test_a_client_cannot_write_a_mark(mark: str) -> None:
    with pytest.raises(InvalidRequestError, match="printable ASCII"):
        make_request_id(f"0123456789ab{mark}mine")
