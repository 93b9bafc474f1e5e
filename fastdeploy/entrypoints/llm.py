# SPDX-License-Identifier: Apache-2.0
"""The offline API: `LLM` runs the engine in the calling process, without server or sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from tqdm import tqdm

from fastdeploy.config.args import engine_config_from_kwargs
from fastdeploy.config.env import read_env
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import InvalidRequestError, device_errors
from fastdeploy.core.faults import arm
from fastdeploy.core.json_types import shorten, to_integer
from fastdeploy.core.outputs import RequestOutput, TokenDelta
from fastdeploy.core.reasoning import REASONING_FORMATS
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import PRIORITIES, SamplingParams
from fastdeploy.core.tool_formats import AUTO
from fastdeploy.detokenize.chat_template import Conversation
from fastdeploy.detokenize.message_shapes import CONTENT_FORMATS
from fastdeploy.detokenize.messages import check_messages, check_tools
from fastdeploy.detokenize.preprocess import RequestLimits, build_request, check_num_alternatives, check_num_logprobs
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.entrypoints.offline_results import RequestState
from fastdeploy.entrypoints.offline_tokenizer import OfflineTokenizer
from fastdeploy.entrypoints.openai.tool_parser_choice import choose_tool_parser
from fastdeploy.entrypoints.openai.tools_as_text import tools_as_text
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.metrics.offline_metrics import OfflineMetrics
from fastdeploy.metrics.reader import Metric
from fastdeploy.ops.startup import prepare

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "add_special_tokens", "cache_salt")
ShowProgress = bool | Callable[..., "tqdm[Any]"]
"""Whether to show a progress bar, or the function that makes it, with the parameters of `tqdm`."""
logger = logging.getLogger(__name__)


class LLM:
    """A loaded model.

    Args:
        model: local folder, name on a hub, or `demo`.
        chat_template: template for `chat`; by default, the tokenizer's.
        kwargs: engine flags with underscores, such as `speculative_config={...}`, `max_model_len=...` or `seed=...`.

    Raises:
        ConfigError: an argument is unknown or its value is invalid; the field names it.
        DeviceFailedError: the device cannot be used.
    """

    def __init__(self, model: str, chat_template: str | None = None, **kwargs: Any) -> None:
        config, notes = engine_config_from_kwargs({"model": model, **kwargs})
        if faults := read_env().faults:
            arm(faults)
        for note in notes:
            logger.warning("%s", note)
        folder = resolve_model_path(config.model, config.revision)
        tokenizer_folder = resolve_model_path(config.tokenizer, field="tokenizer") if config.tokenizer else folder
        self.tokenizer = Tokenizer.from_pretrained(tokenizer_folder)
        with device_errors():
            prepare(config.device)
            self.engine = Engine.from_config(config)
        for note in self.engine.describe()["notes"]:
            logger.warning("%s", note)
        self._limits = RequestLimits(self.engine.max_model_len, self.engine.vocab_size, config.max_logprob_entries)
        self._max_logprobs = config.max_logprobs
        self._defaults = _generation_defaults(folder, config.generation_config)
        self._chat_template = chat_template
        self._reasoning = REASONING_FORMATS.get(config.reasoning_parser)
        self._ids = count()
        self._metrics = OfflineMetrics(self.engine.stats, self.engine.describe, config.model)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json, which `generate` and `chat` use by default."""
        return SamplingParams(**self._defaults)

    def get_tokenizer(self) -> OfflineTokenizer:
        """Return the tokenizer, with `encode`, `decode`, `apply_chat_template` and others as transformers has them."""
        return OfflineTokenizer(self.tokenizer)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics (docs/guide/observability.md) so far; `fastdeploy.metrics.reader` has their types."""
        return self._metrics.read()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ShowProgress = True,
        stream: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate outputs for one prompt or a list of prompts.

        Args:
            prompts: a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}, or a list of these.
                A mapping may have `cache_salt`: prefixes are shared only between prompts of the same salt. With both
                keys, the token ids are the prompt.
            sampling_params: one object for all prompts, or one per prompt.
            use_tqdm: show a progress bar with tokens per second, or the function that makes it, such as `tqdm.tqdm`.
            stream: return a generator that yields the result of a prompt, so far, whenever it has new tokens; no bar.
            priority: one number per prompt; prompts with lower numbers start before others (default: 0 for all).

        Raises:
            InvalidRequestError: a prompt or parameter is invalid; no request has been started.
        """
        prompt_list = _as_prompt_list(prompts)
        params = self._expand_params(prompt_list, sampling_params)
        requests = [self._make_request(prompt, p) for prompt, p in zip(prompt_list, params)]
        _set_priorities(requests, priority)
        return self._generate(requests, [_prompt_text(prompt) for prompt in prompt_list], use_tqdm, stream)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ShowProgress = True,
        stream: bool = False,
        add_generation_prompt: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        priority: Sequence[int] | None = None,
        chat_template_content_format: str = "auto",
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate the next message of one conversation or of a list of conversations, with a chat template.

        Args:
            messages: mappings with `role` and `content`, or a list of conversations of these.
            sampling_params, use_tqdm, stream, priority: as in `generate`; `priority` has one number per conversation.
            add_generation_prompt: end the prompt with the start of the assistant's message; by default, unless
                `continue_final_message` is set.
            chat_template_kwargs: further variables of the template.
            chat_template: a template, or the name of one of the tokenizer's.
            tools: function definitions in OpenAI's format, for the template, or for the system message if the template
                shows none; calls remain text in the result.
            continue_final_message: continue the last message instead of starting a new one.
            chat_template_content_format: give the template the content of messages as a text (`string`), as a list of
                parts (`openai`), or as it reads it (`auto`).

        Raises:
            InvalidRequestError: a message, tool or template is invalid; no request has been started.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        if chat_template_content_format not in CONTENT_FORMATS:
            expected = f"expected one of {', '.join(CONTENT_FORMATS)}, got {shorten(chat_template_content_format)}"
            raise InvalidRequestError("chat_template_content_format", expected)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        render = partial(
            self._render,
            tools=check_tools(tools) if tools else [],
            chat_template=self._chat_template if chat_template is None else chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs or {},
            content_format=chat_template_content_format,
        )
        prompts = [render(check_messages(conversation)) for conversation in conversations]
        params = self._expand_params(prompts, sampling_params)
        requests = [
            self._make_request({"prompt": prompt, "add_special_tokens": False}, p) for prompt, p in zip(prompts, params)
        ]
        for request, prompt in zip(requests, prompts):
            if self._reasoning is not None:
                marks = self._reasoning if tools else self._reasoning.for_tools(())
                request.reasoning = marks.state_after(prompt, continue_final_message)
                request.may_call_tools = marks.tool_call_start != ""
        _set_priorities(requests, priority)
        return self._generate(requests, prompts, use_tqdm, stream)

    def _generate(
        self, requests: Sequence[GenerationRequest], texts: Sequence[str | None], use_tqdm: ShowProgress, stream: bool
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        states = self._add_requests(requests, texts)
        updates = self._run_steps(states, False if stream else use_tqdm)
        if stream:
            return updates
        for _ in updates:
            pass
        return [state.output for state in states.values()]

    def _expand_params(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError("sampling_params", f"expected one object or {len(prompts)}, got {len(params)}")
        return list(params)

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]],
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        content_format: str,
    ) -> str:
        """Return the text of the prompt of a conversation, whose messages and tools have been checked."""
        templates = self.tokenizer.chat_templates
        template = templates.select(chat_template, bool(tools))
        choice = choose_tool_parser(AUTO, templates.traits(template))
        conversation = Conversation(
            messages,
            add_generation_prompt,
            continue_final_message,
            (tools or None) if choice.shows_tools else None,
            variables,
            tools_as_text(choice, tools),
            content_format,
        )
        return templates.render(conversation, template)

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        fields = _prompt_fields(prompt)
        for name in ("logprobs", "prompt_logprobs"):
            check_num_alternatives(name, getattr(params, name), self._max_logprobs)
        request = build_request(
            self.tokenizer,
            self._limits,
            f"offline-{next(self._ids)}",
            fields["content"],
            params,
            bool(fields.get("add_special_tokens", True)),
        )
        request.cache_salt = fields.get("cache_salt", "")
        check_num_logprobs(self._limits, [request], "prompt_logprobs", "logprobs", 1)
        return request

    def _add_requests(
        self, requests: Sequence[GenerationRequest], texts: Sequence[str | None]
    ) -> dict[str, RequestState]:
        """Add all requests; if one is rejected, abort those before it."""
        states: dict[str, RequestState] = {}
        try:
            for request, text in zip(requests, texts):
                self.engine.add_request(request)
                self._metrics.started(request)
                states[request.request_id] = RequestState(self.tokenizer, request, text)
        except Exception:
            for request_id in states:
                self.engine.abort(request_id)
            raise
        return states

    def _run_steps(self, states: dict[str, RequestState], use_tqdm: ShowProgress) -> Iterator[RequestOutput]:
        """Run steps until all requests finish, yielding updated results; closing the generator aborts the rest."""
        unfinished = set(states)
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        bar = make_bar(total=len(states), desc="Processed prompts", unit="prompt")
        num_tokens = 0
        try:
            while unfinished:
                updated: dict[str, None] = {}  # an ordered set
                with device_errors():
                    deltas = self.engine.step()
                for delta in deltas:
                    if (state := states.get(delta.request_id)) is not None:
                        state.apply(delta)
                        if delta.finish_reason is not None:
                            self._record(state.output, delta)
                        num_tokens += len(delta.token_ids)
                        updated[delta.request_id] = None
                for request_id in updated:
                    if states[request_id].output.finished:
                        unfinished.discard(request_id)
                        _advance(bar, num_tokens)
                    yield states[request_id].output
        finally:
            bar.close()
            for request_id in unfinished:
                self.engine.abort(request_id)

    def _record(self, output: RequestOutput, delta: TokenDelta) -> None:
        num_tokens = len(output.outputs[delta.index].token_ids)
        self._metrics.finished(len(output.prompt_token_ids), num_tokens, delta)


def _advance(bar: tqdm[Any], num_tokens: int) -> None:
    """Count a finished prompt, and show the output tokens per second of all prompts since the start."""
    if elapsed_s := bar.format_dict["elapsed"]:
        bar.set_postfix_str(f"{num_tokens / elapsed_s:.1f} output tokens/s", refresh=False)
    bar.update()


def _set_priorities(requests: Sequence[GenerationRequest], priority: Sequence[int] | None) -> None:
    """Set the priorities of requests.

    Raises:
        InvalidRequestError: there is not one integer per request.
    """
    if priority is None:
        return
    if not isinstance(priority, Sequence) or len(priority) != len(requests):
        raise InvalidRequestError("priority", f"expected a list with one integer per prompt ({len(requests)})")
    for i, (request, value) in enumerate(zip(requests, priority)):
        request.priority = PRIORITIES.read(f"priority[{i}]", value)


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(to_integer(item), int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the keys of a prompt that are not None, and its text or token ids as `content`."""
    if not isinstance(prompt, Mapping):
        return {"content": prompt}
    fields = {key: value for key, value in prompt.items() if value is not None}
    if unknown := sorted(set(fields).difference(PROMPT_KEYS)):
        raise InvalidRequestError("prompts", f"unknown key {unknown[0]!r}; expected {', '.join(PROMPT_KEYS)}")
    if not isinstance(fields.get("cache_salt", ""), str):
        raise InvalidRequestError("prompts", f"expected a text as cache_salt, got {shorten(fields['cache_salt'])}")
    content = fields.get("prompt_token_ids", fields.get("prompt"))
    if content is None:
        raise InvalidRequestError("prompts", f'expected "prompt" or "prompt_token_ids", got {sorted(fields)}')
    return {**fields, "content": content}


def _prompt_text(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", "") or None  # type: ignore[assignment]
    return prompt if isinstance(prompt, str) else None


def _generation_defaults(path: str, generation_config: str) -> dict[str, Any]:
    """Return the sampling parameters of generation_config.json."""
    if generation_config == "none":
        return {}
    return ModelConfig.from_pretrained(path, reads_weights=False).generation.sampling_values()
