# SPDX-License-Identifier: Apache-2.0
"""GET /tokenizer_info says what tokenizer_config.json says, and exists only with its flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.routes_tokenizer_info import describe_tokenizer
from tests.detokenize.tokenizers_for_tests import CHAT_TEMPLATE, save_tokenizer
from tests.entrypoints.server_process import ServerProcess, mock_server

FLAG = "--enable-tokenizer-info-endpoint"


def info_of(folder: Path, chat_template: str | None = None, **config: Any) -> dict[str, Any]:
    """Return what is said of a tokenizer whose tokenizer_config.json has these keys, too."""
    file = save_tokenizer(folder, special_tokens=["<tool>"]) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    info: dict[str, Any] = to_builtins(describe_tokenizer(Tokenizer.from_pretrained(folder), chat_template))
    return info


def test_settings_are_those_of_the_file_and_tokens_are_texts(tmp_path: Path) -> None:
    given = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 4096,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": True,
        "errors": "replace",
    }
    info = info_of(tmp_path, **given, pad_token={"content": "<pad>"}, additional_special_tokens=["<tool>"])
    assert info | given == info
    assert (info["eos_token"], info["pad_token"]) == ("</s>", "<pad>")
    assert info["additional_special_tokens"] == ["<tool>"]
    assert info["chat_template"] == CHAT_TEMPLATE
    assert "add_eos_token" not in info and "mask_token" not in info


def test_added_tokens_have_their_ids_and_flags(tmp_path: Path) -> None:
    info = info_of(tmp_path)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    tokens = {token["content"]: int(token_id) for token_id, token in info["added_tokens_decoder"].items()}
    assert tokens["<tool>"] == tokenizer.find_token("<tool>")
    assert info["added_tokens_decoder"][str(tokens["<tool>"])] == {
        "content": "<tool>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": None},
        {"tokenizer_class": ""},
        {"model_max_length": 10**30},
        {"model_max_length": 1e30},
        {"model_max_length": True},
        {"errors": None},
        {"add_prefix_space": None},
    ],
)
def test_values_of_other_types_are_left_out(tmp_path: Path, config: dict[str, Any]) -> None:
    info = info_of(tmp_path, **config)
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info.keys().isdisjoint({"model_max_length", "errors", "add_prefix_space"})


def test_template_of_the_flag_is_the_one_that_is_used(tmp_path: Path) -> None:
    assert info_of(tmp_path, "{{ messages }}")["chat_template"] == "{{ messages }}"


def test_route_needs_a_key_as_others_do_and_is_in_the_document(tmp_path: Path) -> None:
    with mock_server(tmp_path, FLAG, "--api-key", "sesame") as server:
        headers = {"Authorization": "Bearer sesame"}
        assert server.get("/tokenizer_info").status_code == 401
        info = server.get("/tokenizer_info", headers=headers).json()
        assert (info["tokenizer_class"], info["chat_template"]) == ("PreTrainedTokenizerFast", CHAT_TEMPLATE)
        assert server.post("/tokenizer_info", {}, headers=headers).status_code == 405
        assert "/tokenizer_info" in server.get("/openapi.json").json()["paths"]


def test_route_does_not_exist_without_its_flag(server: ServerProcess) -> None:
    refused = server.get("/tokenizer_info")
    assert refused.status_code == 404
    assert f"start the server with {FLAG}" in refused.json()["error"]["message"]
    assert "/tokenizer_info" not in server.get("/openapi.json").json()["paths"]
