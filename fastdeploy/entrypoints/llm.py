# SPDX-License-Identifier: Apache-2.0
"""The offline API: `LLM` runs the engine in the calling process, without server or sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from tqdm import tqdm

from fastdeploy.config.args import engine_config_from_kwargs
from fastdeploy.config.env import Env, read_env
from fastdeploy.core.errors import ConfigError, InvalidRequestError, device_errors
from fastdeploy.core.faults import arm
from fastdeploy.core.json_types import shorten, to_list
from fastdeploy.core.outputs import RequestOutput
from fastdeploy.core.reasoning import REASONING_FORMATS
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.tool_formats import AUTO
from fastdeploy.detokenize.chat_template import Conversation
from fastdeploy.detokenize.message_shapes import CONTENT_FORMATS
from fastdeploy.detokenize.messages import check_messages, check_tools
from fastdeploy.detokenize.preprocess import RequestLimits, build_request, check_num_alternatives, check_num_logprobs
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.entrypoints.offline_engine import OfflineEngine
from fastdeploy.entrypoints.offline_prompts import (
    Prompt,
    as_conversations,
    as_prompt_list,
    prompt_fields,
    prompt_text,
    set_priorities,
)
from fastdeploy.entrypoints.offline_results import CallResults
from fastdeploy.entrypoints.offline_tokenizer import OfflineTokenizer
from fastdeploy.entrypoints.openai.tool_parser_choice import choose_tool_parser
from fastdeploy.entrypoints.openai.tools_as_text import tools_as_text
from fastdeploy.entrypoints.shared_engine import SharedEngine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.metrics.logs import set_up_script_logging
from fastdeploy.metrics.offline_metrics import OfflineMetrics
from fastdeploy.metrics.reader import Metric
from fastdeploy.ops.startup import paddle_thread, prepare

Messages = Sequence[Mapping[str, Any]]
ShowProgress = bool | Callable[..., "tqdm[Any]"]
"""Whether to show a progress bar, or the function that makes it, with the parameters of `tqdm`."""
logger = logging.getLogger(__name__)


class LLM:
    """A loaded model. Several calls may run at once, in one thread (streams) or in several.

    Args:
        model: local folder, GGUF file, name on a hub, `smollm2` or `demo`.
        chat_template: template for `chat`; by default, the tokenizer's.
        kwargs: engine flags with underscores, such as `speculative_config={...}`, `max_model_len=...` or `seed=...`.

    Raises:
        ConfigError: an argument is unknown or its value is invalid; the field names it.
        DeviceFailedError: the device cannot be used.
    """

    def __init__(self, model: str, chat_template: str | None = None, **kwargs: Any) -> None:
        env = Env()
        try:
            env = read_env()
            set_up_script_logging(env)
            self._start(env, chat_template, {"model": model, **kwargs})
        except ConfigError as error:
            if env.debug:
                raise
            raise error.with_traceback(None) from None  # without the frames that found it

    def _start(self, env: Env, chat_template: str | None, kwargs: Mapping[str, Any]) -> None:
        """Load the model; the arguments are those of the class."""
        config, notes = engine_config_from_kwargs(kwargs)
        if env.faults:
            arm(env.faults)
        for note in notes:
            logger.warning("%s", note)
        folder = resolve_model_path(config.model, config.revision, gguf_file=config.gguf_file)
        config = replace(config, model_folder=folder)
        tokenizer_folder = resolve_model_path(config.tokenizer, field="tokenizer") if config.tokenizer else folder
        self.tokenizer = Tokenizer.from_pretrained(tokenizer_folder)
        with device_errors():
            prepare(config.device)
            with paddle_thread():
                self.engine = Engine.from_config(config)
        for note in self.engine.describe()["notes"]:
            logger.warning("%s", note)
        max_model_len, model_context = self.engine.max_model_len, self.engine.describe()["model_context"]
        self._limits = RequestLimits(max_model_len, self.engine.vocab_size, config.max_logprob_entries, model_context)
        self._max_logprobs = config.max_logprobs
        self._defaults = config.read_model(folder, reads_weights=False).generation.sampling_values()
        self._chat_template = chat_template
        self._reasoning = REASONING_FORMATS.get(config.reasoning_parser)
        self._ids = count()
        metrics = OfflineMetrics(self.engine.stats, self.engine.describe, config.model)
        self._shared = SharedEngine(self.engine, metrics)
        self.llm_engine = OfflineEngine(self._shared)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json, which `generate` and `chat` use by default."""
        return SamplingParams(**self._defaults)

    def get_tokenizer(self) -> OfflineTokenizer:
        """Return the tokenizer, with `encode`, `decode`, `apply_chat_template` and others as transformers has them."""
        return OfflineTokenizer(self.tokenizer)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics (docs/guide/observability.md) so far; `fastdeploy.metrics.reader` has their types."""
        return self._shared.read_metrics()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ShowProgress = True,
        stream: bool = False,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate outputs for one prompt or a list of prompts.

        Args:
            prompts: a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}, or a list of these.
                A mapping may have `cache_salt`: prefixes are shared only between prompts of the same salt. With both
                keys, the token ids are the prompt.
            sampling_params: one object for all prompts, or one per prompt.
            use_tqdm: show a progress bar with tokens per second, or the function that makes it, such as `tqdm.tqdm`.
            stream: return a generator that yields the result of a prompt, so far, whenever it has new tokens; no bar.
                The prompts are begun when its first result is asked for, and given up when it is closed.
            priority: one integer per prompt, or one for all; prompts with lower ones start before others (default: 0).

        Raises:
            InvalidRequestError: a prompt or parameter is invalid; no request has been started.
            DeviceFailedError: the device has failed; also when it was the step of another call.
            EngineDeadError: a step has failed, and the LLM cannot be used any more.
            RequestFailedError: an internal error, such as an interrupted step of another call.
        """
        prompt_list = as_prompt_list(prompts)
        params = self._expand_params(prompt_list, sampling_params)
        requests = [self._make_request(prompt, p) for prompt, p in zip(prompt_list, params)]
        set_priorities(requests, priority)
        return self._generate(requests, [prompt_text(prompt) for prompt in prompt_list], use_tqdm, stream)

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
        priority: int | Sequence[int] | None = None,
        chat_template_content_format: str = "auto",
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate the next message of one conversation or of a list of conversations, with a chat template.

        Args:
            messages: mappings with `role` and `content`, or a list of conversations of these.
            sampling_params, use_tqdm, stream, priority: as in `generate`; `priority` has one integer per conversation.
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
            DeviceFailedError, EngineDeadError, RequestFailedError: as `generate`.
        """
        conversations = as_conversations(messages)
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
        set_priorities(requests, priority)
        return self._generate(requests, prompts, use_tqdm, stream)

    def _generate(
        self, requests: Sequence[GenerationRequest], texts: Sequence[str | None], use_tqdm: ShowProgress, stream: bool
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        self._shared.check(requests)
        results = CallResults(self.tokenizer, requests, texts)
        if stream:
            return self._stream(requests, results)
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        bar = make_bar(total=len(requests), desc="Processed prompts", unit="prompt")
        with closing(bar), self._shared.call(requests) as call:
            for deltas in call:
                for output in results.apply(deltas):
                    if output.finished:
                        _advance(bar, results.num_tokens)
        return results.outputs()

    def _stream(self, requests: Sequence[GenerationRequest], results: CallResults) -> Iterator[RequestOutput]:
        """Add requests and yield updated results until all have ended; closing the generator aborts the rest."""
        with self._shared.call(requests) as call:
            for deltas in call:
                yield from results.apply(deltas)

    def _expand_params(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        expected = f"expected SamplingParams, or a list of {len(prompts)} of them"
        items = to_list("sampling_params", params, expected)
        for i, item in enumerate(items):
            if not isinstance(item, SamplingParams):
                raise InvalidRequestError(f"sampling_params[{i}]", f"expected SamplingParams, got {shorten(item)}")
        if len(items) != len(prompts):
            raise InvalidRequestError("sampling_params", f"{expected}, got {len(items)}")
        return items

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
        fields = prompt_fields(prompt)
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


def _advance(bar: tqdm[Any], num_tokens: int) -> None:
    """Count a finished prompt, and show the output tokens per second of all prompts since the start."""
    if elapsed_s := bar.format_dict["elapsed"]:
        bar.set_postfix_str(f"{num_tokens / elapsed_s:.1f} output tokens/s", refresh=False)
    bar.update()
