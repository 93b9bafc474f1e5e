# SPDX-License-Identifier: Apache-2.0
"""The engine offline: `LLM` runs it in the calling process, without server or sockets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tqdm import tqdm

from fastdeploy.config.args import engine_config_from_kwargs
from fastdeploy.config.model_config import ModelConfig, resolve_model_path
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.outputs import CompletionOutput, RequestOutput, TokenDelta
from fastdeploy.core.reasoning import REASONING_FORMATS
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.messages import check_messages, check_tools
from fastdeploy.detokenize.preprocess import RequestLimits, build_request
from fastdeploy.detokenize.text_output import TextAssembler
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    """One prompt in flight: its result so far, and one text assembler per choice."""

    output: RequestOutput
    assemblers: list[TextAssembler]
    num_running: int = field(default=0)


class LLM:
    """A model, ready to generate.

    Args:
        model: local directory, `demo`, or a hub name.
        chat_template: a template that `chat` uses instead of the tokenizer's.
        kwargs: the server's engine flags with underscores: `speculative_config={...}`, `max_model_len=...`, `seed=...`.

    Raises:
        ConfigError: an unknown argument or a value outside its range, by name.
    """

    def __init__(self, model: str, chat_template: str | None = None, **kwargs: Any) -> None:
        config, notes = engine_config_from_kwargs({"model": model, **kwargs})
        for note in notes:
            logger.warning("%s", note)
        folder = resolve_model_path(config.model, config.revision)
        tokenizer_folder = resolve_model_path(config.tokenizer, field="tokenizer") if config.tokenizer else folder
        self.tokenizer = Tokenizer.from_pretrained(tokenizer_folder)
        self.engine = Engine.from_config(config)
        self._limits = RequestLimits(self.engine.max_model_len, self.engine.vocab_size)
        self._defaults = _generation_defaults(folder, config.generation_config)
        self._chat_template = chat_template
        self._reasoning = REASONING_FORMATS.get(config.reasoning_parser)
        self._ids = count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that generation_config.json proposes; they apply where `generate` is given none."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        stream: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate for one prompt or a list of them.

        Args:
            prompts: a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: one object for all prompts, or one per prompt.
            use_tqdm: show a progress bar.
            stream: return a generator that yields a prompt's result so far whenever it grew, instead of the list.

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be served; no prompt has been started then.
        """
        prompt_list = _as_prompt_list(prompts)
        params = self._params_for(prompt_list, sampling_params)
        requests = [self._request(prompt, p) for prompt, p in zip(prompt_list, params)]
        return self._answer(requests, [_prompt_text(prompt) for prompt in prompt_list], use_tqdm, stream)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        stream: bool = False,
        add_generation_prompt: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate the next message of one conversation or of a list of them, with the model's chat template.

        Args:
            add_generation_prompt: end prompts with the opening of the assistant's turn; None: unless one is continued.
            chat_template_kwargs: further names that the template reads.
            chat_template: a template, or the name of one of the tokenizer's, for this call.
            tools: functions in OpenAI's shape that the template tells the model of; calls stay text in the result.
            continue_final_message: the output goes on with the last message.

        Raises:
            InvalidRequestError: a message, tool or template that cannot be used; no prompt has been started then.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        prompts = [
            self.tokenizer.apply_chat_template(
                check_messages(conversation),
                add_generation_prompt=opens,
                chat_template=self._chat_template if chat_template is None else chat_template,
                tools=check_tools(tools) if tools else None,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        params = self._params_for(prompts, sampling_params)
        requests = [
            self._request({"prompt": prompt, "add_special_tokens": False}, p) for prompt, p in zip(prompts, params)
        ]
        for request, prompt in zip(requests, prompts):
            if self._reasoning is not None:
                request.reasoning = self._reasoning.state_after(prompt, continue_final_message)
        return self._answer(requests, prompts, use_tqdm, stream)

    def _answer(
        self, requests: Sequence[GenerationRequest], texts: Sequence[str | None], use_tqdm: bool, stream: bool
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        pending = self._start(requests, texts)
        updates = self._run(pending, use_tqdm and not stream)
        if stream:
            return updates
        for _ in updates:
            pass
        return [entry.output for entry in pending.values()]

    def _params_for(
        self, prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise InvalidRequestError("sampling_params", f"expected one or {len(prompts)}, got {len(given)}")
        return list(given)

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        add_special_tokens = True
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "add_special_tokens"}
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise InvalidRequestError(
                    "prompts", f'expected "prompt" or "prompt_token_ids", got keys {sorted(prompt)}'
                )
            add_special_tokens = bool(prompt.get("add_special_tokens", True))
            content: str | Sequence[int] = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        else:
            content = prompt
        request_id = f"offline-{next(self._ids)}"
        return build_request(self.tokenizer, self._limits, request_id, content, params, add_special_tokens)

    def _start(self, requests: Sequence[GenerationRequest], texts: Sequence[str | None]) -> dict[str, _Pending]:
        """Add all requests; if one is refused, take back those before it."""
        pending: dict[str, _Pending] = {}
        try:
            for request, text in zip(requests, texts):
                self.engine.add_request(request)
                pending[request.request_id] = self._pending(request, text)
        except Exception:
            for request_id in pending:
                self.engine.abort(request_id)
            raise
        return pending

    def _pending(self, request: GenerationRequest, text: str | None) -> _Pending:
        params, ids = request.params, request.prompt_token_ids
        choices = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        assemblers = [TextAssembler(self.tokenizer, ids, params) for _ in range(params.n)]
        if text is None:
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return _Pending(RequestOutput(request.request_id, text, ids, choices), assemblers, params.n)

    def _run(self, pending: dict[str, _Pending], show_progress: bool) -> Iterator[RequestOutput]:
        """Step until all are done, yielding what grew; leaving early (a closed generator) aborts the rest."""
        unfinished = set(pending)
        bar = tqdm(total=len(pending), desc="Processed prompts", disable=not show_progress)
        try:
            while unfinished:
                grown: dict[str, None] = {}
                for delta in self.engine.step():
                    if (entry := pending.get(delta.request_id)) is not None:
                        _apply(entry, delta)
                        grown[delta.request_id] = None
                for request_id in grown:
                    if pending[request_id].output.finished:
                        unfinished.discard(request_id)
                        bar.update()
                    yield pending[request_id].output
        finally:
            bar.close()
            for request_id in unfinished:
                self.engine.abort(request_id)


def _apply(entry: _Pending, delta: TokenDelta) -> None:
    """Enter one delta into a prompt's result."""
    output, choice = entry.output, entry.output.outputs[delta.index]
    choice.token_ids.extend(delta.token_ids)
    choice.text += entry.assemblers[delta.index].push(delta)
    choice.seed = delta.seed
    if choice.logprobs is not None:
        choice.logprobs.extend(delta.logprobs or ())
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    if delta.finish_reason is None:
        return
    choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    choice.speculate_metrics = delta.speculate_metrics
    choice.error = delta.error
    output.metrics = delta.metrics
    entry.num_running -= 1
    output.finished = entry.num_running == 0


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _prompt_text(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", "") or None  # type: ignore[assignment]
    return prompt if isinstance(prompt, str) else None


def _generation_defaults(path: str, generation_config: str) -> dict[str, Any]:
    """Return the sampling values of generation_config.json that are parameters here."""
    if generation_config == "none":
        return {}
    return ModelConfig.from_pretrained(path).generation.sampling_values()
