# SPDX-License-Identifier: Apache-2.0
"""What the sampling rule needs to know of each row: the parameters of its request, at its position.

Row i of a request's verification is processed as if drafts 1..i had been emitted: its position, its history, its
min_tokens mask, its bad-word mask and the mask of its constraint all count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

from fastdeploy.core.constraint import TokenConstraint
from fastdeploy.core.request import Draft, Request, TokenArray
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ops.sampling import NO_MASK, FloatColumn, IntColumn, SamplingBatch

NO_DRAFT_ID = -1
_POSITION, _DRAFT_ID = int(IntColumn.POSITION), int(IntColumn.DRAFT_ID)  # an enumeration's members take longer to find


@dataclass(frozen=True)
class _Template:
    """The part of a request's rows that no position changes."""

    floats: npt.NDArray[np.float32]  # [num float columns]
    ints: npt.NDArray[np.int64]  # [num int columns]
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    end_ids: npt.NDArray[np.int32]  # masked before min_tokens
    needs_lists: bool  # history, bias or masks have to be written


class RowRules:
    """Writes the parameter rows of a step into a `SamplingBatch`.

    Attributes:
        has_lists: the rows written since `begin` refer to lists of the batch.
    """

    def __init__(self, batch: SamplingBatch, eos_token_ids: Sequence[int], vocab_limit: int) -> None:
        """Bind to the buffers.

        Args:
            eos_token_ids: end tokens, masked before min_tokens (with the request's own stop ids).
            vocab_limit: ids from here on never survive.
        """
        self.batch = batch
        self._eos = list(eos_token_ids)
        self._vocab_limit = vocab_limit
        self._num_mask_words = (vocab_limit + 31) // 32
        self._templates: WeakKeyDictionary[Request, _Template] = WeakKeyDictionary()
        self.has_lists = False
        self._shown: list[ReferenceType[Request] | None] = [None] * len(batch.int_params.array)

    def begin(self) -> None:
        """Start a new set of rows."""
        if self.has_lists:
            self.batch.clear()
        self.has_lists = False

    def write_plain(self, first: int, count: int) -> None:
        """Make rows [first, first + count) greedy and unprocessed: their draw is not used."""
        floats, ints = self.batch.float_params.array, self.batch.int_params.array
        self._shown[first : first + count] = [None] * count
        floats[first : first + count] = _float_row(SamplingParams(temperature=0.0))
        ints[first : first + count] = _int_row(0, SamplingParams(), self._vocab_limit)

    def write_draft(self, request: Request, row: int) -> None:
        """Make a row draw drafts by the request's filters and noise, without its history; the position is left open.

        The noise is that of the target's row at the same position, so that both agree as often as they can.
        """
        self._write_template(request, row, 1)

    def write(self, request: Request, draft: Draft, first: int) -> None:
        """Write the 1 + len(draft) verification rows of a request at `first`; row i draws the token at num_tokens + i.

        Rows that show the request's template since an earlier step need their positions and drafts only.
        """
        count = 1 + len(draft)
        if self._shown[first : first + count].count(ref(request)) < count:
            self._write_template(request, first, count)
            self._write_additions(request, draft, first)
        memory, position = self.batch.int_params.memory, request.num_tokens
        for row, draft_id in enumerate((*draft.token_ids, NO_DRAFT_ID), first):
            memory[row, _POSITION] = position
            memory[row, _DRAFT_ID] = draft_id
            position += 1

    def _write_template(self, request: Request, first: int, count: int) -> None:
        """Write what no position changes, and remember whose rows these are."""
        template, rows = self._template(request), slice(first, first + count)
        self.batch.float_params.array[rows] = template.floats
        self.batch.int_params.array[rows] = template.ints
        self._shown[rows] = [ref(request)] * count

    def _write_additions(self, request: Request, draft: Draft, first: int) -> None:
        """Write what such a request's rows need in every step anew."""
        template, count = self._template(request), 1 + len(draft)
        rows = slice(first, first + count)
        if not template.needs_lists and request.constraint is None:
            return
        self.has_lists = True
        self._shown[rows] = [None] * count
        ints = self.batch.int_params.array[rows]
        if template.needs_lists:
            self._write_lists(request, draft, template, ints)
        if request.constraint is not None:
            self._write_masks(request.constraint, draft.token_ids, ints)

    def _template(self, request: Request) -> _Template:
        template = self._templates.get(request)
        if template is None:
            template = self._templates[request] = self._make_template(request)
        return template

    def _make_template(self, request: Request) -> _Template:
        params = request.params
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)] if params.min_tokens else []
        return _Template(
            floats=_float_row(params),
            ints=_int_row(request.seed, params, self._vocab_limit),
            bias_ids=np.array(list(params.logit_bias), np.int32),
            bias_values=np.array(list(params.logit_bias.values()), np.float32),
            end_ids=np.unique(np.array(ends, np.int32)),
            needs_lists=bool(params.needs_history or params.logit_bias or ends or params.bad_words_token_ids),
        )

    def _write_lists(self, request: Request, draft: Draft, template: _Template, ints: npt.NDArray[np.int64]) -> None:
        batch, params, count = self.batch, request.params, len(ints)
        tokens = request.tokens_with_draft(draft)
        if params.needs_history:
            begin = batch.append_history(tokens)
            ints[:, IntColumn.HISTORY_BEGIN] = begin
            ints[:, IntColumn.OUTPUT_BEGIN] = begin + request.num_prompt_tokens
            ints[:, IntColumn.HISTORY_END] = begin + request.num_tokens + np.arange(count)
        if params.logit_bias:
            begin = batch.append_bias(template.bias_ids, template.bias_values)
            ints[:, IntColumn.BIAS_BEGIN] = begin
            ints[:, IntColumn.BIAS_END] = begin + len(template.bias_ids)
        for i in range(count if len(template.end_ids) or params.bad_words_token_ids else 0):
            banned = self._banned(request, template, tokens[: request.num_tokens + i], request.num_output_tokens + i)
            begin = batch.append_banned(banned)
            ints[i, IntColumn.BANNED_BEGIN] = begin
            ints[i, IntColumn.BANNED_END] = begin + len(banned)

    def _write_masks(self, constraint: TokenConstraint, draft: Sequence[int], ints: npt.NDArray[np.int64]) -> None:
        masks = np.empty((len(ints), self._num_mask_words), np.int32)
        constrained = constraint.fill_bitmasks(draft, masks)
        begins = self.batch.append_mask(masks) + np.arange(len(ints)) * self._num_mask_words
        ints[:, IntColumn.MASK_BEGIN] = np.where(constrained, begins, NO_MASK)

    def _banned(
        self, request: Request, template: _Template, context: TokenArray, num_output: int
    ) -> npt.NDArray[np.int32]:
        """Return the ids that may not follow `context`: end tokens before min_tokens, and last tokens of bad words."""
        words = [ids[-1] for ids in request.params.bad_words_token_ids if _ends_with(context, ids[:-1])]
        ends = template.end_ids if num_output < request.params.min_tokens else template.end_ids[:0]
        return np.concatenate([ends, np.array(words, np.int32)])


def _ends_with(context: TokenArray, head: list[int]) -> bool:
    return not head or (len(context) >= len(head) and context[-len(head) :].tolist() == head)


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
