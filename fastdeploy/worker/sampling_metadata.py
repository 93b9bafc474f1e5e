# SPDX-License-Identifier: Apache-2.0
"""The sampling metadata of each row with logits: the sampling parameters of its request, at its position.

Verification row i of a request is processed as if drafts 1 to i had been emitted: its position, its history, its
min_tokens mask, its bad words and the mask of its constraint count them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

from fastdeploy.core.bad_words import ROOT
from fastdeploy.core.constraint import TokenConstraint
from fastdeploy.core.faults import fault_point
from fastdeploy.core.request import Draft, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ops.sampling import NO_MASK, FloatColumn, IntColumn, SamplingBatch

NO_DRAFT_ID = -1
_POSITION, _DRAFT_ID = int(IntColumn.POSITION), int(IntColumn.DRAFT_ID)  # looking up enumeration members is slow


@dataclass(frozen=True)
class _RequestParams:
    """The part of a request's rows that does not depend on the position."""

    floats: npt.NDArray[np.float32]  # [num float columns]
    ints: npt.NDArray[np.int64]  # [num int columns]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    end_ids: npt.NDArray[np.int32]  # banned until the request has its min_tokens
    needs_lists: bool  # the rows refer to a history, biases or banned ids


class SamplingMetadata:
    """Writes the parameter rows of a step into a `SamplingBatch`.

    A decoding request usually has the same rows in every step. They are then not written again, except for positions
    and drafts.

    Attributes:
        has_lists: whether the rows written since `begin_batch` refer to lists of the `SamplingBatch`.
    """

    def __init__(self, batch: SamplingBatch, eos_token_ids: Sequence[int], vocab_limit: int) -> None:
        """Bind to the buffers.

        Args:
            eos_token_ids: end tokens, banned until a request has its min_tokens, like its own stop ids.
            vocab_limit: ids from this one on are never sampled.
        """
        self.batch = batch
        self._eos_token_ids = list(eos_token_ids)
        self._vocab_limit = vocab_limit
        self._num_mask_words = (vocab_limit + 31) // 32
        self._request_params: WeakKeyDictionary[Request, _RequestParams] = WeakKeyDictionary()
        self.has_lists = False
        # Of each row: the request whose parameters it holds, if they are valid in the next step, too.
        self._row_requests: list[ReferenceType[Request] | None] = [None] * len(batch.int_params.array)

    def begin_batch(self) -> None:
        """Start the rows of a logits batch."""
        if self.has_lists:
            self.batch.clear()
        self.has_lists = False

    def write_unused(self, first_row: int, num_rows: int) -> None:
        """Write rows whose sampled tokens are not used; greedy sampling without processing is the cheapest."""
        rows = slice(first_row, first_row + num_rows)
        self._row_requests[rows] = [None] * num_rows
        self.batch.float_params.array[rows] = _float_row(SamplingParams(temperature=0.0))
        self.batch.int_params.array[rows] = _int_row(0, SamplingParams(), self._vocab_limit)

    def write_draft(self, request: Request, row: int) -> None:
        """Write a row that samples drafts with the request's filters and noise; the caller sets the position.

        The noise is that of the target's row at the same position, so that both sample the same token as often as
        possible. Penalties and bans are left out. Nothing is written to a row that has been written for the request.
        """
        if self._row_requests[row] != ref(request):
            self._write_params(request, row, 1)

    def write(self, request: Request, draft: Draft, first_row: int) -> None:
        """Write the verification rows of a request: row first_row + i samples the token at position num_tokens + i."""
        num_rows = 1 + len(draft)
        fault_point("sampling_metadata", request.request_id)
        if self._row_requests[first_row : first_row + num_rows].count(ref(request)) < num_rows:
            self._write_params(request, first_row, num_rows)
            self._write_lists_and_masks(request, draft, first_row)
        memory, position = self.batch.int_params.memory, request.num_tokens
        for row, draft_id in enumerate((*draft.token_ids, NO_DRAFT_ID), first_row):
            memory[row, _POSITION] = position
            memory[row, _DRAFT_ID] = draft_id
            position += 1

    def _write_params(self, request: Request, first_row: int, num_rows: int) -> None:
        """Write what does not depend on the position."""
        params, rows = self._params_of(request), slice(first_row, first_row + num_rows)
        self.batch.float_params.array[rows] = params.floats
        self.batch.int_params.array[rows] = params.ints
        self._row_requests[rows] = [ref(request)] * num_rows

    def _write_lists_and_masks(self, request: Request, draft: Draft, first_row: int) -> None:
        """Write what has to be written again in every step."""
        params, num_rows = self._params_of(request), 1 + len(draft)
        if not params.needs_lists and request.constraint is None:
            return
        rows = slice(first_row, first_row + num_rows)
        self.has_lists = True
        self._row_requests[rows] = [None] * num_rows
        ints = self.batch.int_params.array[rows]
        if params.needs_lists:
            self._write_lists(request, draft, params, ints)
        if request.constraint is not None:
            fault_point("constraint_mask", request.request_id)
            self._write_masks(request.constraint, draft.token_ids, ints)

    def _params_of(self, request: Request) -> _RequestParams:
        params = self._request_params.get(request)
        if params is None:
            params = self._request_params[request] = self._make_params(request)
        return params

    def _make_params(self, request: Request) -> _RequestParams:
        params, end_ids = request.params, list[int]()
        if params.min_tokens:
            end_ids = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos_token_ids)]
        return _RequestParams(
            floats=_float_row(params),
            ints=_int_row(request.seed, params, self._vocab_limit),
            bias_ids=np.array(list(params.logit_bias), np.int32),
            bias_values=np.array(list(params.logit_bias.values()), np.float32),
            end_ids=np.unique(np.array(end_ids, np.int32)),
            needs_lists=bool(params.needs_history or params.logit_bias or end_ids or params.bad_words_token_ids),
        )

    def _write_lists(self, request: Request, draft: Draft, params: _RequestParams, ints: npt.NDArray[np.int64]) -> None:
        batch, num_rows, num_tokens = self.batch, len(ints), request.num_tokens
        if request.params.needs_history:
            begin = batch.append_history(request.tokens_with_draft(draft))
            ints[:, IntColumn.HISTORY_BEGIN] = begin
            ints[:, IntColumn.OUTPUT_BEGIN] = begin + request.num_prompt_tokens
            ints[:, IntColumn.HISTORY_END] = begin + num_tokens + np.arange(num_rows)
        if request.params.logit_bias:
            begin = batch.append_bias(params.bias_ids, params.bias_values)
            ints[:, IntColumn.BIAS_BEGIN] = begin
            ints[:, IntColumn.BIAS_END] = begin + len(params.bias_ids)
        if len(params.end_ids) or request.bad_words is not None:
            self._write_banned(request, draft, params, ints)

    def _write_banned(
        self, request: Request, draft: Draft, params: _RequestParams, ints: npt.NDArray[np.int64]
    ) -> None:
        """Write the ids that must not follow a row: end tokens before min_tokens, last ids of bad words."""
        spans: dict[tuple[bool, int], tuple[int, int]] = {}  # rows with the same banned ids share them
        num_output_tokens = request.num_output_tokens
        for i, state in enumerate(_bad_words_states(request, draft)):
            bans_end = num_output_tokens + i < request.params.min_tokens
            span = spans.get((bans_end, state))
            if span is None:
                span = spans[bans_end, state] = self._append_banned(request, params, bans_end, state)
            ints[i, IntColumn.BANNED_BEGIN], ints[i, IntColumn.BANNED_END] = span

    def _append_banned(self, request: Request, params: _RequestParams, bans_end: bool, state: int) -> tuple[int, int]:
        """Append the banned ids of rows in this state of the bad words; return where they begin and end."""
        end_ids = params.end_ids if bans_end else params.end_ids[:0]
        last_ids = request.bad_words.banned_ids(state) if request.bad_words is not None else ()
        begin = self.batch.append_banned(end_ids)
        self.batch.append_banned(last_ids)
        return begin, begin + len(end_ids) + len(last_ids)

    def _write_masks(self, constraint: TokenConstraint, draft: Sequence[int], ints: npt.NDArray[np.int64]) -> None:
        masks = np.empty((len(ints), self._num_mask_words), np.int32)
        constrained = constraint.fill_bitmasks(draft, masks)
        begins = self.batch.append_mask(masks) + np.arange(len(ints)) * self._num_mask_words
        ints[:, IntColumn.MASK_BEGIN] = np.where(constrained, begins, NO_MASK)


def _bad_words_states(request: Request, draft: Draft) -> Iterable[int]:
    """Return the state of the bad words in each row of a request."""
    if request.bad_words is None:
        return [ROOT] * (1 + len(draft))
    return request.bad_words.states(request.bad_words_state, draft.token_ids)


def _float_row(params: SamplingParams) -> npt.NDArray[np.float32]:
    row = np.zeros(len(FloatColumn), np.float32)
    row[FloatColumn.TEMPERATURE] = params.temperature
    row[FloatColumn.TOP_P] = params.top_p
    row[FloatColumn.MIN_P] = params.min_p
    row[FloatColumn.REPETITION] = params.repetition_penalty
    row[FloatColumn.PRESENCE] = params.presence_penalty
    row[FloatColumn.FREQUENCY] = params.frequency_penalty
    return row


def _int_row(seed: int, params: SamplingParams, vocab_limit: int) -> npt.NDArray[np.int64]:
    row = np.zeros(len(IntColumn), np.int64)
    row[IntColumn.SEED] = np.uint64(seed).astype(np.int64)
    row[IntColumn.TOP_K] = params.top_k
    row[IntColumn.DRAFT_ID] = NO_DRAFT_ID
    row[IntColumn.VOCAB_LIMIT] = vocab_limit
    row[IntColumn.MASK_BEGIN] = NO_MASK
    return row
