# SPDX-License-Identifier: Apache-2.0
"""Plants one fault in the engine, in a process of its own: python -m pytest -p tests.exactness.mutants ...

The environment variable PLANTED_FAULT names a mutant of this table. As a pytest plugin, this module then replaces a
passage of that mutant's source when it is imported; no file changes. test_mutants.py runs the tests with each of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "PLANTED_FAULT"


@dataclass(frozen=True)
class Mutant:
    """A module, a passage that occurs once in its source, and the faulty passage in its place."""

    module: str
    passage: str
    fault: str

    def source(self) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: the passage does not occur exactly once, for example after a change of the module.
        """
        text = (ROOT / f"{self.module.replace('.', '/')}.py").read_text()
        if text.count(self.passage) != 1:
            raise ValueError(
                f"{self.module}: expected {self.passage!r} once, found it {text.count(self.passage)} times"
            )
        return text.replace(self.passage, self.fault)


SCHEDULER, METADATA = "fastdeploy.engine.batch_scheduler", "fastdeploy.worker.sampling_metadata"
HASHES = "fastdeploy.kv_cache.hashes"
CACHE, RUNNER = "fastdeploy.kv_cache.manager", "fastdeploy.worker.model_runner"
REQUEST, OUTPUTS = "fastdeploy.core.request", "fastdeploy.engine.output_processor"
BAD_WORDS, SUFFIX = "fastdeploy.core.bad_words", "fastdeploy.spec_decode.proposers.suffix"
CONSTRAINT = "fastdeploy.structured_output.constraint"
FAIR_SHARE = "fastdeploy.engine.fair_share"

MUTANTS = {
    # the ledger: num_computed
    "a token between two prefill chunks is skipped": Mutant(
        SCHEDULER,
        "+ scheduled.num_scheduled_tokens - num_rejected",
        "+ scheduled.num_scheduled_tokens - num_rejected + (not scheduled.num_verify_rows)",
    ),
    "preemption leaves num_computed as it is": Mutant(
        REQUEST,
        "self.num_computed = 0\n        self.draft = NO_DRAFT\n        self.block",
        "self.draft = NO_DRAFT\n        self.block",
    ),
    "a block is published before its last token is computed": Mutant(
        CACHE, "num_full = request.num_computed // self", "num_full = (request.num_computed + 1) // self"
    ),
    # positions
    "rows with drafts are computed one position later": Mutant(
        RUNNER,
        "[s.num_computed_tokens for s in plan.requests]",
        "[s.num_computed_tokens + (s.num_verify_rows > 1) for s in plan.requests]",
    ),
    "drafts are sampled with the noise of the first position": Mutant(METADATA, "            position += 1\n", ""),
    "penalties of a draft's row leave out the drafts before it": Mutant(
        METADATA, "begin + num_tokens + np.arange(num_rows)", "begin + num_tokens"
    ),
    # salts, and what else keys the prefix cache
    "prefixes are shared between salts": Mutant(HASHES, r' + b"\0" + cache_salt.encode()', ""),
    "cached outputs are shared between salts": Mutant(SUFFIX, "request.cache_salt", '""'),
    "prefixes are shared between fingerprints": Mutant(CACHE, "= fingerprint", '= ""'),
    "the hash of a block leaves out the blocks before it": Mutant(HASHES, "blake2b(previous + block", "blake2b(block"),
    # masks
    "all rows of a request have the grammar mask of the first": Mutant(
        METADATA, " + np.arange(len(ints)) * self._num_mask_words", " + np.zeros(len(ints), int)"
    ),
    "unconstrained rows have a mask": Mutant(METADATA, "np.where(constrained, begins, NO_MASK)", "begins"),
    "a form allows ids that the request does not": Mutant(CONSTRAINT, "return bitmask & allowed", "return bitmask"),
    "allowed ids do not constrain": Mutant(
        CONSTRAINT, "return allowed if bitmask is None else bitmask", "return bitmask"
    ),
    # the end of the output
    "a request without output emits a token": Mutant(
        "fastdeploy.engine.engine", "if request.is_prefill_only and scheduled.num_verify_rows:", "if False:"
    ),
    # min_tokens
    "end tokens are banned for one token too many": Mutant(
        METADATA, "num_output_tokens + i < request", "num_output_tokens + i <= request"
    ),
    "min_tokens does not count the drafts before a row": Mutant(
        METADATA, "num_output_tokens + i < request", "num_output_tokens < request"
    ),
    # bad words
    "bad words do not see the drafts before a row": Mutant(
        METADATA,
        "request.bad_words.states(request.bad_words_state, draft.token_ids)",
        "[request.bad_words_state] * (1 + len(draft))",
    ),
    "bad words of one token are not banned": Mutant(
        BAD_WORDS, "while state != _NONE:\n            banned", "while state > ROOT:\n            banned"
    ),
    "bad words do not see the emitted tokens": Mutant(
        METADATA, "states(request.bad_words_state, draft", "states(ROOT, draft"
    ),
    "bad words are not banned": Mutant(METADATA, "begin + len(end_ids) + len(last_ids)", "begin + len(end_ids)"),
    # log-probabilities of prompts
    "prompt rows without a log-probability are found in the prefix cache": Mutant(
        CACHE, "max_hit = len(logprobs.entries)", "pass"
    ),
    "two choices compute the log-probabilities of a prompt at once": Mutant(
        SCHEDULER, "if not request.prompt_logprobs.num_missing:\n            kv_cache", "if True:\n            kv_cache"
    ),
    # clients
    "rows are counted without the weight": Mutant(FAIR_SHARE, "num_rows / client.weight", "num_rows"),
    "a client saves up the rows that it does not ask for": Mutant(
        FAIR_SHARE, "client.served = max(client.served, smallest)", "pass"
    ),
    "the client that needs blocks gives them up": Mutant(FAIR_SHARE, "if not self.has_several:", "if True:"),
    "shared blocks of a client count once per request": Mutant(
        CACHE, "return len(self._held.get(client_id, ()))", "return self._held.get(client_id, Counter()).total()"
    ),
    "a request that waits for blocks is passed for ever": Mutant(
        SCHEDULER, "request.num_pending / client.weight if may_run else inf", "inf"
    ),
}


class MutantLoader(SourceFileLoader):
    """Loads the module of a mutant with its fault, past the cache of compiled files."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """Compile the faulty source."""
        return compile(self._mutant.source(), self.path, "exec", dont_inherit=True)


class MutantFinder(MetaPathFinder):
    """Finds the module of a mutant before the usual finders do."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec with MutantLoader for the mutant's module, None for others."""
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = MutantLoader(self._mutant, spec.origin)
        return spec


if VARIABLE in os.environ:
    sys.meta_path.insert(0, MutantFinder(MUTANTS[os.environ[VARIABLE]]))
