# SPDX-License-Identifier: Apache-2.0
"""A mock engine for tests of the code around the engine; its tokens are a function of the context.

Options come from `mock.json` in the model's folder: `step_s` seconds per step, `tokens_per_step`, `die_at_token`
(the process kills itself when a request's prompt holds that id), `fail_at_token` (such a request fails at admission),
`hang_at_token` (at such a request, the process stays in a native call that keeps Python's global lock),
`config_error`, `start_error` (name and message of an exception), `load_s`, `script` (the output is what the prompt
holds between the last `[[` and `]]`, then the end token), `hold` (while the file `hold` is in the folder, no
output grows past its first tokens), `prefill_s_per_token` (of prompts and resumed tokens that are not imported, up to
`max_num_batched_tokens` tokens per step), `num_blocks`, `num_slots`, `caches_prefixes`, `export_s`, `import_s`. While
the file `compiling` is there, no grammar is compiled. With `EngineConfig.hands_over` it has an arena, mock_transfer.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core import errors
from fastdeploy.core.errors import ConfigError, InvalidRequestError, RequestFailedError
from fastdeploy.core.handover import Handover
from fastdeploy.core.outputs import ErrorInfo, RequestMetrics, SpeculateMetrics, TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.seeds import choice_seed, request_seed
from fastdeploy.core.stats import ClientLoad, EngineStats
from fastdeploy.detokenize.stop_strings import StopStringScanner
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.mock_transfer import BLOCK_SIZE, LAYOUT, MockTransfer

ERRORS = {**vars(builtins), **vars(errors)}
FACTORY = "tests.mock_engine:make_engine"
SLOT_BYTES = 2**16  # that the mock engine says a slot of its arena has
BLOCKS = 100
SLOTS = 64


def next_token(context: list[int], seed: int, vocab_size: int) -> int:
    """Return a token that depends on the last four of the context and on the seed; never a special token."""
    text = ",".join(map(str, [*context[-4:], seed % 5]))
    return 4 + zlib.crc32(text.encode()) % (vocab_size - 4)


class MockEngine:
    """Advances all requests together, by `tokens_per_step` tokens per step."""

    def __init__(self, config: EngineConfig, options: dict[str, Any]) -> None:
        self._model = config.model
        self._tokenizer = Tokenizer.from_pretrained(config.model)
        self._options = options
        self._seed = config.seed
        self._num_arrivals = 0
        self._hold = Path(config.model) / "hold" if options.get("hold") else None
        self._live: dict[str, list[_Choice]] = {}
        self._handovers: list[Handover] = []  # without a transfer
        self._num_blocks = options.get("num_blocks", BLOCKS)
        self._step_tokens = config.scheduler.max_num_batched_tokens
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._stats = EngineStats(num_blocks=self._num_blocks, num_free_blocks=self._num_blocks)
        self.transfer: MockTransfer | None = None
        if config.hands_over:
            times = {name: options.get(name, 0.0) for name in ("export_s", "import_s")}
            self.transfer = MockTransfer(options.get("num_slots", SLOTS), **times)
        self.max_model_len = config.max_model_len if isinstance(config.max_model_len, int) else 2048
        self.vocab_size = self._tokenizer.vocab_size
        self.eos_token_ids = [1]

    def prepare(self, request: GenerationRequest) -> Future[Any] | None:
        imported = None if self.transfer is None else self.transfer.begin_import(request)
        if request.params.guided_decoding is None:
            return imported
        return _Compiling(Path(self._model) / "compiling", imported)

    def cancel(self, request_id: str) -> None:
        if self.transfer is not None:
            self.transfer.cancel(request_id)

    def add_request(self, request: GenerationRequest) -> list[TokenDelta]:
        if request.request_id in self._live:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in flight already")
        if self._options.get("die_at_token") in request.prompt_token_ids:
            print("the mock engine dies at this token", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.get("fail_at_token") in request.prompt_token_ids:
            raise RequestFailedError("internal error")
        if self._options.get("hang_at_token") in request.prompt_token_ids:
            _hang(Path(self._model) / "hangs")
        seed = request.params.seed
        if seed is None:
            seed = request_seed(self._seed, self._num_arrivals)
        self._num_arrivals += 1
        choices = [_Choice(request, i, choice_seed(seed, i), self, resumed) for i, resumed in request.open_choices]
        ended = [(choice, delta) for choice in choices if (delta := choice.resume()) is not None]
        if self.transfer is not None:
            choices[0].num_computed = choices[0].num_transferred = self.transfer.adopt(request.request_id)
            self.transfer.begin_export(request.request_id, request.export_slots)
        self._live[request.request_id] = choices
        self._stats.num_prompt_tokens += len(request.prompt_token_ids)
        if not self._options.get("prefill_s_per_token"):
            self._prefill(choices)
        return [self._end(choice, delta, delta.finish_reason or "") for choice, delta in ended]

    def hand_over(self, request_id: str, export_slots: Sequence[int] = ()) -> bool:
        choices = self._choices(request_id)
        if not choices:
            return False
        if self.transfer is not None:
            self.transfer.begin_export(request_id, export_slots)
        del self._live[request_id]
        handover = Handover(request_id, [None] * choices[0].request.params.n)
        for choice in choices:
            handover.resumed[choice.index] = choice.output
        if self.transfer is None:
            self._handovers.append(handover)
        else:
            self.transfer.hand_over(handover, choices[0].computed)
        return True

    def pop_handovers(self) -> list[Handover]:
        for request_id in [key for key, choices in self._live.items() if choices[0].has_left]:
            self.hand_over(request_id)
        handovers, self._handovers = self._handovers, []
        return handovers if self.transfer is None else self.transfer.pop_handovers()

    @property
    def is_moving(self) -> bool:
        is_leaving = any(choices[0].has_left for choices in self._live.values())
        return is_leaving or bool(self._handovers) or (self.transfer is not None and self.transfer.is_moving)

    def abort(self, request_id: str) -> list[TokenDelta]:
        return [
            self._end(choice, TokenDelta(request_id, choice.index, first_index=len(choice.output)), "abort")
            for choice in self._choices(request_id)
        ]

    def step(self) -> list[TokenDelta]:
        time.sleep(self._options.get("step_s", 0.0))
        self._stats.num_steps += 1
        if self._stats.num_steps == 5 and (error := self._options.get("step_error")):
            raise ERRORS[error[0]](error[1])
        choices = [choice for request_id in list(self._live) for choice in self._choices(request_id)]
        if self._hold is not None and self._hold.exists():
            choices = [choice for choice in choices if not choice.has_begun]
        self._prefill(choices)
        return [self._advance(choice) for choice in choices if not choice.num_missing]

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def stats(self) -> EngineStats:
        choices = [choice for choices in self._live.values() for choice in choices]
        self._stats.num_waiting = sum(choice.num_missing > 0 for choice in choices)
        self._stats.num_running = len(choices) - self._stats.num_waiting
        self._stats.num_waiting_tokens = sum(choice.num_missing for choice in choices)
        self._stats.num_free_blocks = self._num_blocks - sum(choice.num_blocks for choice in choices)
        owners = [(choice.request.client_name, choice.num_missing > 0) for choice in choices]
        self._stats.clients = {n: ClientLoad(owners.count((n, False)), owners.count((n, True))) for n, _ in owners}
        if self.transfer is not None:
            self._stats.num_imported_tokens = self.transfer.num_imported_tokens
        return self._stats

    def describe(self) -> dict[str, Any]:
        return {
            "model": "mock",
            "architecture": "Mock",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self._max_num_seqs,
            "kv_cache": {
                "num_blocks": self._num_blocks,
                "block_size": BLOCK_SIZE,
                "num_tokens": BLOCK_SIZE * self._num_blocks,
                "bytes": 0,
            },
            "cluster": {
                "group": self._options.get("group", "mock"),
                "parts": {"model": self._options.get("group", "mock")},
                "layouts": LAYOUT if self.transfer else {},
                "num_slots": self.transfer.arena.num_slots if self.transfer else 0,
                "bytes": self.transfer.arena.num_slots * SLOT_BYTES if self.transfer else 0,
                "block_size": BLOCK_SIZE,
                "caches_prefixes": self._options.get("caches_prefixes", True),
            },
            "speculation": {"method": "naive", "num_speculative_tokens": 0, "lossy": False},
            "fingerprint": {"dtype": "float32", "isa": "mock", "exact": True},
        }

    def _choices(self, request_id: str) -> list[_Choice]:
        return list(self._live.get(request_id, ()))

    def _prefill(self, choices: list[_Choice]) -> None:
        """Compute prompts and resumed tokens: those of a step, or all at once if that takes no time."""
        s_per_token, room = self._options.get("prefill_s_per_token", 0.0), self._step_tokens
        for choice in choices:
            count = min(room, choice.num_missing) if s_per_token else choice.num_missing
            choice.num_computed += count
            room -= count
        if s_per_token:
            time.sleep((self._step_tokens - room) * s_per_token)

    def _advance(self, choice: _Choice) -> TokenDelta:
        delta = choice.emit(self._options.get("tokens_per_step", 1))
        self._stats.num_generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._end(choice, delta, delta.finish_reason)
        return delta

    def _end(self, choice: _Choice, delta: TokenDelta, reason: str) -> TokenDelta:
        delta.finish_reason = reason
        delta.seed = choice.seed
        delta.metrics = RequestMetrics(queue_s=0.001, first_token_s=0.002, finish_s=0.01)
        delta.metrics.num_transferred_tokens = choice.num_transferred
        delta.speculate_metrics = SpeculateMetrics(accepted_tokens=3, drafted_tokens=4, accept_ratio=0.75, num_steps=2)
        delta.speculate_metrics.acceptance_histogram = [0, 1, 1]
        self._stats.drafted_per_position, self._stats.accepted_per_position = [2, 2], [2, 1]
        if reason == "error":
            delta.error = ErrorInfo("numerics", "the mock says NaN")
        choices = self._live[choice.request.request_id]
        choices.remove(choice)
        if not choices:
            del self._live[choice.request.request_id]
            if self.transfer is not None:
                self.transfer.finish(choice.request.request_id)
        self._stats.num_finished[reason] = self._stats.num_finished.get(reason, 0) + 1
        return delta


class _Compiling(Future[None]):
    def __init__(self, file: Path, imported: Future[Any] | None) -> None:
        super().__init__()
        self._file, self._imported = file, imported

    def done(self) -> bool:
        return not self._file.exists() and (self._imported is None or self._imported.done())


class _Choice:
    """One choice.

    Attributes:
        num_computed: tokens whose blocks are computed, the last one of the text is not among them while it decodes.
        num_transferred: of these, those that came from another engine.
    """

    def __init__(
        self, request: GenerationRequest, index: int, seed: int, engine: MockEngine, resumed: list[int]
    ) -> None:
        self.request, self.index, self.seed = request, index, seed
        self.num_computed = self.num_transferred = 0
        self._engine = engine
        self._tokens = list(request.prompt_token_ids)
        self._num_emitted = 0
        self._resumed = resumed
        room = engine.max_model_len - len(self._tokens)
        max_tokens = request.params.max_tokens
        self._budget = room if max_tokens is None else min(max_tokens, room)
        self._script = self._read_script() if engine._options.get("script") else None
        self._scanner = StopStringScanner(engine._tokenizer, self._tokens, request.params)

    @property
    def has_begun(self) -> bool:
        return self._num_emitted > 0

    @property
    def has_left(self) -> bool:
        """Whether it is to be handed over after its first tokens, which it has emitted."""
        return self.request.hands_over and self._num_emitted > len(self._resumed)

    @property
    def num_missing(self) -> int:
        """Number of tokens to compute before the next one can be emitted."""
        return 0 if self._num_emitted > len(self._resumed) else len(self._tokens) - self.num_computed

    @property
    def num_blocks(self) -> int:
        return -(-len(self._tokens) // BLOCK_SIZE)

    @property
    def output(self) -> list[int]:
        return self._tokens[len(self.request.prompt_token_ids) :]

    @property
    def computed(self) -> list[int]:
        has_emitted = self._num_emitted > len(self._resumed)
        return self._tokens[:-1] if has_emitted else self._tokens[: self.num_computed]

    def resume(self) -> TokenDelta | None:
        """Append the resumed tokens; return the last delta if they end the text."""
        delta = TokenDelta(self.request.request_id, self.index, seed=self.seed)
        for token_id in self._resumed:
            if delta.finish_reason is not None:
                raise InvalidRequestError("resumed", "expected no tokens behind the end")
            self._append(token_id, delta)
        delta.first_index, delta.token_ids = self._num_emitted, []
        return None if delta.finish_reason is None else delta

    def _read_script(self) -> list[int]:
        tokenizer = self._engine._tokenizer
        prompt = tokenizer.decode(self._tokens, skip_special_tokens=False)
        text = prompt.rpartition("[[")[2].partition("]]")[0]
        return [*tokenizer.encode(text, add_special_tokens=False), self._engine.eos_token_ids[0]]

    def _next_token(self) -> int:
        if self._script is not None:
            return self._script[self._num_emitted]
        seed = 0 if self.request.params.is_greedy else self.seed
        return next_token(self._tokens, seed, self._engine.vocab_size)

    def emit(self, count: int) -> TokenDelta:
        params = self.request.params
        delta = TokenDelta(self.request.request_id, self.index, seed=self.seed, first_index=self._num_emitted)
        if params.logprobs is not None:
            delta.logprobs = []
        if params.prompt_logprobs is not None and not self.has_begun and self.index == 0:
            delta.prompt_logprobs = [None, *map(_logprobs, self.request.prompt_token_ids[1:])]
        if self._budget == 0:
            delta.finish_reason = "length"
        while delta.finish_reason is None and len(delta.token_ids) < count:
            token_id = self._next_token()
            if token_id in params.logit_bias and params.logit_bias[token_id] == -100:
                delta.finish_reason = "error"
                break
            self._append(token_id, delta)
        return delta

    def _append(self, token_id: int, delta: TokenDelta) -> None:
        """Append a token to the text and to a delta, and find the end."""
        self._tokens.append(token_id)
        self._num_emitted += 1
        delta.token_ids.append(token_id)
        if delta.logprobs is not None:
            delta.logprobs.append(_logprobs(token_id, self.request.params.logprob_token_ids))
        stop = self._scanner.push(token_id)
        if self._script is not None and token_id in self._engine.eos_token_ids:
            delta.finish_reason = "stop"
        elif token_id in self.request.params.stop_token_ids:
            delta.finish_reason, delta.stop_reason = "stop", token_id
        elif stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        elif self._num_emitted == self._budget:
            delta.finish_reason = "length"


def _hang(marker: Path) -> None:
    sleep_with_global_lock = ctypes.PyDLL(None).sleep
    marker.touch()
    while True:
        sleep_with_global_lock(600)  # a signal ends it


def _logprobs(token_id: int, requested: Sequence[int] = ()) -> TokenLogprobs:
    others = [(other, -0.5 if other == token_id else -3.5, 1 if other == token_id else 9) for other in requested]
    return TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5), (4, -1.5), (5, -2.5)], others)


def make_engine(config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> MockEngine:
    """Build a mock engine from the options in the model's folder."""
    file = Path(config.model) / "mock.json"
    options = json.loads(file.read_text()) if file.is_file() else {}
    for percent in (0, 50, 100):
        if on_progress is not None:
            on_progress("weights", percent / 100)
        time.sleep(options.get("load_s", 0.0) / 3)
    if "config_error" in options:
        raise ConfigError("model", options["config_error"])
    if "start_error" in options:
        name, message = options["start_error"]
        raise ERRORS[name](message)
    if options.get("die_at_start"):
        print("the mock engine cannot start", file=sys.stderr, flush=True)
        os._exit(3)
    return MockEngine(config, options)


def save_mock_model(folder: Path, special_tokens: Sequence[str] = (), adds_bos: bool = False, **options: Any) -> Path:
    """Write the files of a model that the mock engine serves: tokenizer, config.json, options."""
    from tests.detokenize.tokenizers_for_tests import save_tokenizer

    save_tokenizer(folder, special_tokens=special_tokens, adds_bos=adds_bos)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 512,
        "max_position_embeddings": 2**21,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mock.json").write_text(json.dumps(options))
    return folder
