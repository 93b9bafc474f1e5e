# SPDX-License-Identifier: Apache-2.0
"""What the model is worth: bits per byte, continuations that parse, and drafts that are accepted."""

from __future__ import annotations

import ast
import io
import json
import math
import random
import tokenize
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.data import EOS_ID, PackedTokens, SourceFile, read_corpus
from demo_model.experts import SparseMLP
from demo_model.export import read_checkpoint
from demo_model.generate import greedy_continuations
from demo_model.model import Decoder, MTPLayer
from demo_model.mtp import NUM_STEPS, rollout

NUM_HEADS = 100
MAX_PROMPT_TOKENS = 384
NUM_NEW_TOKENS = 128
MAX_HEADS_PER_FILE = 5
NUM_EARLY_TOKENS = 32  # of a continuation, before it begins to repeat itself


@dataclass(frozen=True)
class FunctionHead:
    """A prompt that ends with a function's head and docstring, and the file's own text after it."""

    path: str
    line: int
    prompt: str
    rest: str


@dataclass(frozen=True)
class ExpertFigures:
    """How the experts of a model share the held-out text.

    Attributes:
        smallest_load, largest_load: tokens of an expert over the mean of its layer, over all experts and layers.
        smallest_bias, largest_bias: of the routers' corrections.
        changed_by_bias: share of choices that would be different without the bias.
    """

    smallest_load: float
    largest_load: float
    smallest_bias: float
    largest_bias: float
    changed_by_bias: float


@dataclass(frozen=True)
class Figures:
    """Results of one evaluation; counts are out of `num_heads`; logical: cut after the last whole logical line.

    Attributes:
        draft_acceptance, draft_mean_accepted: None where the folder has no draft model.
        experts: None where the model has no experts.
    """

    held_out_bits_per_byte: float
    held_out_nats_per_token: float
    num_heads: int
    num_new_tokens: int
    parsed: int
    parsed_logical: int
    parsed_real_text: int
    parsed_real_text_logical: int
    repeated_share: float
    mtp_acceptance: tuple[float, ...]
    mtp_mean_accepted: float
    mtp_acceptance_early: tuple[float, ...]
    draft_acceptance: tuple[float, ...] | None = None
    draft_mean_accepted: float | None = None
    experts: ExpertFigures | None = None


def functions_of(statement: ast.stmt) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns a top-level function, or the methods of a top-level class."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(statement, functions):
        return [statement]
    if isinstance(statement, ast.ClassDef):
        return [node for node in statement.body if isinstance(node, functions)]
    return []


def heads_of_file(file: SourceFile) -> list[FunctionHead]:
    """Finds every head of a file; a prompt starts at the top-level statement around the head, decorators included."""
    lines = file.text.split("\n")
    heads = []
    for statement in ast.parse(file.text).body:
        for function in functions_of(statement):
            first_line = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))])
            has_docstring = ast.get_docstring(function, clean=False) is not None
            body_from = 1 if has_docstring else 0
            if len(function.body) <= body_from:
                continue
            body_node = function.body[body_from]
            body_line = min([body_node.lineno, *(node.lineno for node in getattr(body_node, "decorator_list", []))])
            end_line = function.body[0].end_lineno if has_docstring else body_line - 1
            if end_line is None or not first_line <= end_line < body_line:
                continue
            while not has_docstring and not lines[end_line - 1].split("#")[0].rstrip().endswith(":"):
                end_line -= 1  # comments between the head and the body
            prompt = "\n".join(lines[first_line - 1 : end_line])
            heads.append(FunctionHead(file.path, function.lineno, prompt, "\n" + "\n".join(lines[end_line:])))
    return heads


def choose_heads(tokenizer: Tokenizer) -> list[FunctionHead]:
    """Draws the evaluation's heads from the held-out files, the same ones each time."""
    generator = random.Random(0)
    candidates = []
    for file in read_corpus():
        if not file.held_out:
            continue
        try:
            heads = heads_of_file(file)
        except SyntaxError:
            continue
        fitting = [head for head in heads if len(tokenizer.encode(head.prompt).ids) <= MAX_PROMPT_TOKENS]
        generator.shuffle(fitting)
        candidates += fitting[:MAX_HEADS_PER_FILE]
    generator.shuffle(candidates)
    return candidates[:NUM_HEADS]


def whole_lines(continuation: str) -> str:
    """Cuts after the last line break."""
    return continuation[: continuation.rfind("\n") + 1]


def whole_logical_lines(prompt: str, continuation: str) -> str:
    """Cuts after the last line break at which neither a bracket nor a string is open."""
    text = prompt + whole_lines(continuation)
    end_row = prompt.count("\n")
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                end_row = token.end[0]
    except (tokenize.TokenError, SyntaxError):
        pass
    return "".join(text.splitlines(keepends=True)[:end_row])[len(prompt) :]


def parses(prompt: str, whole: str) -> bool:
    """Tells whether prompt and cut continuation are Python; one without a line that holds something is not."""
    if not whole.strip():
        return False
    try:
        ast.parse(prompt + whole)
    except (SyntaxError, ValueError):
        return False
    return True


def parse_counts(prompt: str, continuation: str, ended: bool) -> np.ndarray:
    """Returns 0 or 1 for each of the two cuts: after the last whole line, after the last whole logical line."""
    if ended:
        return np.full(2, parses(prompt, continuation), dtype=int)
    cuts = whole_lines(continuation), whole_logical_lines(prompt, continuation)
    return np.array([parses(prompt, cut) for cut in cuts], dtype=int)


def continue_head(decoder: Decoder, tokenizer: Tokenizer, head: FunctionHead) -> tuple[list[int], list[int]]:
    """Returns prompt tokens and the greedy continuation, cut before `</s>`."""
    prompt = tokenizer.encode(head.prompt).ids
    new = greedy_continuations(decoder, torch.tensor([prompt]), NUM_NEW_TOKENS, torch.float32)[0].tolist()
    return prompt, new[: new.index(EOS_ID)] if EOS_ID in new else new


def repeated_share(tokens: list[int], size: int = 8) -> float:
    """Share of the `size`-grams of a continuation that occurred in it before."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.inference_mode()
def mtp_drafts(decoder: Decoder, mtp: MTPLayer, tokens: list[int]) -> np.ndarray:
    """Returns what step k would draft for each next token along `tokens`: `[NUM_STEPS, L]`, -1 where undefined."""
    row = torch.tensor([tokens])
    hidden, _ = decoder.extend(row, None)
    drafts = np.full((NUM_STEPS, len(tokens)), -1)
    for step, state in enumerate(rollout(mtp, decoder, row, hidden)):
        drafts[step, 1 + step :] = decoder.logits(state[0, step:]).argmax(-1).numpy()
    return drafts


@torch.inference_mode()
def draft_model_drafts(draft: Decoder, tokens: list[int]) -> np.ndarray:
    """Like `mtp_drafts`, for the draft model, whose guesses do not depend on the step while all before are right."""
    hidden, _ = draft.extend(torch.tensor([tokens]), None)
    return np.repeat(draft.logits(hidden[0]).argmax(-1).numpy()[None], NUM_STEPS, axis=0)


def count_accepted(drafts: np.ndarray, tokens: list[int], num_prompt: int) -> tuple[int, np.ndarray]:
    """Replays speculative decoding along a greedy continuation.

    Drafting step k of an attempt that starts at slot n is right if `drafts[k - 1, n + k - 1]` is the token at n + k.

    Returns:
        The number of attempts and, per step, how many of them had that draft and all before it accepted.
    """
    accepted, attempts, slot = np.zeros(NUM_STEPS, dtype=int), 0, num_prompt
    while slot + NUM_STEPS < len(tokens):
        attempts += 1
        num_right = 0
        while num_right < NUM_STEPS and drafts[num_right, slot + num_right] == tokens[slot + num_right + 1]:
            accepted[num_right] += 1
            num_right += 1
        slot += num_right + 1
    return attempts, accepted


@torch.inference_mode()
def held_out_nats(decoder: Decoder, work_dir: Path, row_length: int = 1023) -> tuple[float, int]:
    """Returns summed loss and number of tokens over all held-out rows."""
    rows = PackedTokens(work_dir / "held_out.npz", seed=0).epoch(0, row_length)
    total, count = 0.0, 0
    for part in torch.from_numpy(rows.astype("int64")).split(2):
        logits = decoder.logits(decoder.hidden(part[:, :-1], torch.bfloat16)).float()
        targets = part[:, 1:]
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    return total, count


def tokens_per_byte(tokenizer: Tokenizer) -> float:
    """Tokens, ends of files included, per byte of held-out text."""
    texts = [file.text for file in read_corpus() if file.held_out]
    num_tokens = sum(len(encoding.ids) + 1 for encoding in tokenizer.encode_batch(texts))
    return num_tokens / sum(len(text.encode()) for text in texts)


class LoadCounter:
    """Counts the tokens of each expert of a sparse block, and the choices that its bias changed, as a forward hook."""

    def __init__(self, block: SparseMLP) -> None:
        self.block = block
        self.tokens = torch.zeros(len(block.gate), dtype=torch.int64)
        self.num_changed = 0
        block.register_forward_pre_hook(self.count)

    def count(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Routes the block's input and counts."""
        scores = self.block.scores(inputs[0].flatten(0, -2))
        ids = self.block.choose(scores)
        unbiased = scores.topk(ids.shape[1]).indices
        self.tokens += torch.bincount(ids.flatten(), minlength=len(self.tokens))
        self.num_changed += int((ids[:, :, None] != unbiased[:, None]).all(2).sum())


@torch.inference_mode()
def expert_figures(decoder: Decoder, work_dir: Path, num_rows: int = 64, row_length: int = 1023) -> ExpertFigures:
    """Measures how the experts share held-out text."""
    blocks = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, SparseMLP)]
    counters = [LoadCounter(block) for block in blocks]
    rows = PackedTokens(work_dir / "held_out.npz", seed=0).epoch(0, row_length)[:num_rows]
    for part in torch.from_numpy(rows.astype("int64")).split(2):
        decoder.extend(part, None)
    loads = torch.stack([counter.tokens / counter.tokens.float().mean() for counter in counters])
    biases = torch.stack([block.correction_bias for block in blocks])
    num_changed = sum(counter.num_changed for counter in counters)
    return ExpertFigures(
        smallest_load=round(float(loads.min()), 4),
        largest_load=round(float(loads.max()), 4),
        smallest_bias=round(float(biases.min()), 4),
        largest_bias=round(float(biases.max()), 4),
        changed_by_bias=round(num_changed / sum(int(counter.tokens.sum()) for counter in counters), 4),
    )


class HeadResults:
    """Sums the results of continued heads."""

    def __init__(self) -> None:
        self.attempts: dict[str, int] = defaultdict(int)
        self.accepted: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(NUM_STEPS, dtype=int))
        self.parsed, self.parsed_real = np.zeros(2, dtype=int), np.zeros(2, dtype=int)
        self.repeats: list[float] = []
        self.samples: list[str] = []

    def add_text(self, tokenizer: Tokenizer, head: FunctionHead, new: list[int]) -> None:
        """Adds what a continuation and the file's own text are worth."""
        text = tokenizer.decode(new)
        good = parse_counts(head.prompt, text, len(new) < NUM_NEW_TOKENS)
        real = tokenizer.decode(tokenizer.encode(head.rest, add_special_tokens=False).ids[:NUM_NEW_TOKENS])
        self.parsed += good
        self.parsed_real += parse_counts(head.prompt, real, False)
        self.repeats.append(repeated_share(new))
        self.samples.append(f"==== {head.path}:{head.line} parses={good.tolist()}\n{head.prompt}<<<>>>{text}\n")

    def add_drafts(self, name: str, drafts: np.ndarray, row: list[int], num_prompt: int) -> None:
        """Adds a replay of one source of drafts."""
        attempts, accepted = count_accepted(drafts, row, num_prompt)
        self.attempts[name] += attempts
        self.accepted[name] += accepted

    def acceptance(self, name: str) -> tuple[float, ...]:
        """Returns the share of accepted drafts per step."""
        return tuple(round(float(share), 4) for share in self.accepted[name] / max(1, self.attempts[name]))


def evaluate(model_dir: Path, work_dir: Path) -> Figures:
    """Measures an exported model folder; writes figures and continuations to the work folder."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    decoder, mtp = read_checkpoint(model_dir)
    assert mtp is not None, "the checkpoint has no MTP layer"
    draft = read_checkpoint(model_dir / "draft")[0] if (model_dir / "draft").is_dir() else None
    results, heads = HeadResults(), choose_heads(tokenizer)
    for head in heads:
        prompt, new = continue_head(decoder, tokenizer, head)
        results.add_text(tokenizer, head, new)
        row = prompt + new
        drafts = mtp_drafts(decoder, mtp, row)
        results.add_drafts("mtp", drafts, row, len(prompt))
        results.add_drafts("mtp_early", drafts, row[: len(prompt) + NUM_EARLY_TOKENS], len(prompt))
        if draft is not None:
            results.add_drafts("draft", draft_model_drafts(draft, row), row, len(prompt))
    prefix = "moe_" if decoder.shape.num_experts else ""
    (work_dir / f"{prefix}continuations.txt").write_text("\n".join(results.samples))
    total, count = held_out_nats(decoder, work_dir)
    figures = Figures(
        held_out_bits_per_byte=round(total / count * tokens_per_byte(tokenizer) / math.log(2), 4),
        held_out_nats_per_token=round(total / count, 4),
        num_heads=len(heads),
        num_new_tokens=NUM_NEW_TOKENS,
        parsed=int(results.parsed[0]),
        parsed_logical=int(results.parsed[1]),
        parsed_real_text=int(results.parsed_real[0]),
        parsed_real_text_logical=int(results.parsed_real[1]),
        repeated_share=round(float(np.mean(results.repeats)), 4),
        mtp_acceptance=results.acceptance("mtp"),
        mtp_mean_accepted=round(sum(results.acceptance("mtp")), 4),
        mtp_acceptance_early=results.acceptance("mtp_early"),
        draft_acceptance=results.acceptance("draft") if draft else None,
        draft_mean_accepted=round(sum(results.acceptance("draft")), 4) if draft else None,
        experts=expert_figures(decoder, work_dir) if decoder.shape.num_experts else None,
    )
    (work_dir / f"{prefix}figures.json").write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return figures
