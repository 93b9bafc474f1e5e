# SPDX-License-Identifier: Apache-2.0
"""Fields of request bodies that are accepted without effect, or refused by name (docs/guide/request-fields.md)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import BACKEND_NOTE, BACKENDS
from fastdeploy.core.json_types import json_type, shorten
from fastdeploy.core.notes import note_once

_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class FieldRules:
    """What happens to fields of a body that the server does not use.

    Attributes:
        without_effect: field -> why it is accepted without effect.
        refused: field -> why it is refused, and the values that are accepted because they request nothing.
        noted: fields without effect that ask for something, so that the log says once that they have none -> the
            values that they may have; none if any value is accepted.
        object_fields: those of `noted` that are objects, of which an empty one asks for nothing.
    """

    without_effect: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    noted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, kw_only=True)
    object_fields: Collection[str] = field(default=(), kw_only=True)

    def note(self, name: str, key: str, value: Any) -> None:
        """Check the value of a field without effect, and log the field if it asks for something.

        Args:
            name: the field's path, such as `text.verbosity`, whose last part is `key`.

        Raises:
            InvalidRequestError: the field may not have this value.
        """
        if key not in self.noted:
            return
        if key in self.object_fields:
            if not isinstance(value, Mapping):
                raise InvalidRequestError(name, f"expected an object, got {json_type(value)}")
            if not value:
                return
        values = self.noted[key]
        if values and value not in values:
            raise InvalidRequestError(name, f"expected one of {', '.join(values)}, got {shorten(value)}")
        note_once(f"the field {without_indices(name)} has no effect: {self.without_effect[key]}")


NO_RULES = FieldRules()


def without_indices(name: str) -> str:
    """Return a path without its indices, such as `tools.name` of `tools[3].name`, for the log."""
    return _INDEX.sub("", name)


def rules_of(model: type) -> FieldRules:
    """Return the rules of a body's struct, which are its class attribute `rules` if it has any."""
    rules: FieldRules = getattr(model, "rules", NO_RULES)
    return rules


def objects_of(model: type) -> Mapping[str, Collection[str]]:
    """Return the objects in a body whose fields are checked: the body's class attribute `objects` if it has any.

    Each is named by its path (`response_format`, `response_format.json_schema`), an outer one before its inner ones.
    """
    objects: Mapping[str, Collection[str]] = getattr(model, "objects", {})
    return objects


_SERVICE = "identifies or stores the request in a hosted service"
LENGTH_BY_PROMPT = "the length of the answer is described in the prompt"
VERBOSITIES = ("low", "medium", "high")
_RENDERED = "belongs to vLLM's routes that only render a prompt"
EXTENSIONS: dict[str, str] = {
    "kv_transfer_params": "nodes move keys and values by themselves; what is not moved is computed again",
    "vllm_xargs": "there are no plug-ins that read it",
}
"""Objects that clients and proxies of vLLM send in every protocol -> why they are accepted without effect."""
NOTED_EXTENSIONS: dict[str, tuple[Any, ...]] = dict.fromkeys(EXTENSIONS, ())
WITHOUT_EFFECT: dict[str, str] = {
    "user": _SERVICE,
    "metadata": f"{_SERVICE}; its values are texts",
    "store": _SERVICE,
    "safety_identifier": _SERVICE,
    "prompt_cache_key": "equal prefixes are found without it; `cache_salt` separates them",
    "prompt_cache_retention": "cached prefixes stay as long as there is room",
    "trace_context": "this server sends no traces",
    "service_tier": "all requests are served alike; see `priority`",
    "session_id": "equal prefixes are found without it",
    "return_token_offsets": _RENDERED,
    "return_mm_kwargs": _RENDERED,
    "verbosity": LENGTH_BY_PROMPT,
    "guided_decoding_backend": BACKEND_NOTE,
    **EXTENSIONS,
}
"""Field -> why it is accepted without effect."""
NOTED: dict[str, tuple[Any, ...]] = {
    "verbosity": VERBOSITIES,
    "guided_decoding_backend": BACKENDS,
    **NOTED_EXTENSIONS,
}
"""Fields of `WITHOUT_EFFECT` that ask for something -> the values that they may have."""

_OFF: tuple[Any, ...] = (False, [], {}, "", 0)
_TEXT_ONLY = "this server reads and writes text only"
_NO_BEAM_SEARCH = "beam search is not supported"
_BY_SERVER = "the server has one kind of log-probabilities; see --logprobs-mode"
_DISAGGREGATED = "internal to prefill/decode separation; clients do not send it"
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "functions": ("is OpenAI's older spelling; use tools", ([],)),
    "function_call": ("is OpenAI's older spelling; use tool_choice", ("none", "auto")),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "mm_hashes": (_TEXT_ONLY, _OFF),
    "mm_processor_kwargs": (_TEXT_ONLY, _OFF),
    "media_io_kwargs": (_TEXT_ONLY, ({},)),
    "prompt_embeds": ("prompts are text or token ids", ([],)),
    "prediction": ("speculation finds repeated text without it", ()),
    "web_search_options": ("web search is not supported", ()),
    "use_beam_search": (_NO_BEAM_SEARCH, (False,)),
    "length_penalty": (_NO_BEAM_SEARCH, (1, 1.0)),
    "early_stopping": (_NO_BEAM_SEARCH, (False,)),
    "include_draft_logprobs": ("tokens are sampled from the target; drafts have no probabilities", (False,)),
    "temp_scaled_logprobs": (_BY_SERVER, (False,)),
    "top_p_normalized_logprobs": (_BY_SERVER, (False,)),
    "completion_token_ids": ("append the tokens to continue from to prompt_token_ids", ([],)),
    "disaggregate_info": (_DISAGGREGATED, ({},)),
    "ec_transfer_params": (_DISAGGREGATED, ({},)),
    "guided_whitespace_pattern": ("use structured_outputs, which has whitespace_pattern", ()),
    "spaces_between_special_tokens": ("texts are decoded as the tokenizer writes them", (True,)),
    "logits_processors": ("see logits_processors_args", ([],)),
    "repetition_detection": ("use repetition_penalty or frequency_penalty", ()),
    "stream_interval": ("use max_streaming_response_tokens", (1,)),
    "return_prompt_text": ("use return_token_ids, which adds the prompt's text as prompt_tokens", (False,)),
    "routed_experts_prompt_start": ("the experts of a token are not reported", (0,)),
    "watermarking": ("texts have no watermark", (False,)),
    "documents": ("put them into chat_template_kwargs", ([],)),
    "enable_thinking": ("put it into chat_template_kwargs", ()),
}
"""Field -> (why it is refused, values that are accepted because they request nothing)."""
