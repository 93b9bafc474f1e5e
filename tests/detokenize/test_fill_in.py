# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle prompts."""

from __future__ import annotations

import pytest
import tokenizers

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.fill_in import MARKERS, fill_in_prompt
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.detokenize.tokenizers_for_tests import byte_level_backend, make_tokenizer


def with_markers(markers: tuple[str, ...]) -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens(list(markers))
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend)


@pytest.mark.parametrize("markers", MARKERS)
def test_prompt_has_prefix_and_suffix_between_the_markers_of_the_model(markers: tuple[str, ...]) -> None:
    tokenizer = with_markers(markers)
    token_ids = fill_in_prompt(tokenizer, "the quick", "the end")
    before_prefix, before_suffix, before_output = markers
    assert (
        tokenizer.decode(token_ids, skip_special_tokens=False)
        == f"<s>{before_prefix}the quick{before_suffix}the end{before_output}"
    )
    assert fill_in_prompt(tokenizer, "the quick", "the end", add_special_tokens=False) == token_ids[1:]


def test_model_without_markers_is_refused_and_the_error_names_the_field() -> None:
    with pytest.raises(InvalidRequestError, match="suffix: this model has no tokens for fill-in-the-middle"):
        fill_in_prompt(make_tokenizer("byte_level"), "<fim_prefix>", "<fim_suffix>")
