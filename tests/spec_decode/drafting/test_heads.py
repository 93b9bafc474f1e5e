# SPDX-License-Identifier: Apache-2.0
"""Trained heads of every form draft what their definition says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fastdeploy.config.head_config import HEAD_METHODS
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import NO_DRAFT, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.load_eagle import find_head, load_eagle_head
from fastdeploy.models.heads.load_row_head import find_row_head, load_row_head
from fastdeploy.models.loader import load_model
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.ops.caches import LayerCache, allocate_cache
from fastdeploy.spec_decode.drafting import medusa_runner
from fastdeploy.spec_decode.drafting.base import Drafter
from fastdeploy.spec_decode.drafting.eagle_runner import EagleRunner
from fastdeploy.spec_decode.drafting.loaded_models import LoadedRowHead
from fastdeploy.spec_decode.drafting.medusa_runner import MedusaRunner
from fastdeploy.spec_decode.drafting.row_runner import RowRunner
from fastdeploy.worker.full_step import make_request
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig
from tests.drafting_models import HEADS as DEMO_HEADS
from tests.exactness.engines import build, config
from tests.exactness.requests import run_all
from tests.models.model_driver import Driver
from tests.spec_decode.drafting import head_folders as folders
from tests.spec_decode.drafting.engines import last_logits, record_drafts
from tests.spec_decode.drafting.recorded_states import RecordedStates
from tests.spec_decode.heads_definition import HEADS, Drafts, TargetView, log_softmax, read_tensors

DEMO = Path(folders.__file__).resolve().parents[3] / "fastdeploy" / "assets" / "demo_model"
TOKENS = [int(i) for i in np.random.default_rng(5).integers(3, 4096, 24)]
MAX_LEN, BLOCK, NUM_BLOCKS, MAX_SEQS, MAX_DRAFTS = 64, 16, 8, 2, 4
HEADINGS = ("class Stack:", "class Queue(Base):", "# The items of a list\nclass List:")
NUM_TOKENS = 20
INPUTS, OUTPUTS = [2, 7, 11], [1, 6, 10]  # the same states, by the two ways of numbering them

Form = Callable[[Path], Path]
FORMS: dict[str, tuple[str, Form]] = {
    "eagle": ("eagle", folders.eagle),
    "eagle-without-bias": ("eagle", partial(folders.eagle, fc_bias=False, prefix="model.")),
    "eagle-own-embedding": ("eagle", partial(folders.eagle, embedding=True)),
    "eagle-two-layers": ("eagle", partial(folders.eagle, num_layers=2)),
    "eagle3": ("eagle3", folders.eagle3),
    "eagle3-inputs": ("eagle3", partial(folders.eagle3, eagle_aux_hidden_state_layer_ids=[11, 3, 0])),
    "eagle3-outputs": (
        "eagle3",
        partial(folders.eagle3, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 6, 13]}),
    ),
    "eagle3-five-taps": ("eagle3", partial(folders.eagle3, taps=5, eagle_aux_hidden_state_layer_ids=[1, 4, 7, 10, 13])),
    "eagle3-whole-vocabulary": ("eagle3", partial(folders.eagle3, reduced=False)),
    "eagle3-own-embedding": ("eagle3", partial(folders.eagle3, embedding=True, layer_name="layers.0")),
    "eagle3-norm-before-residual": ("eagle3", partial(folders.eagle3, norm_before_residual=True)),
    "eagle3-speculators": (
        "eagle3",
        partial(folders.eagle3, speculators_model_type="eagle3", transformer_layer_config=folders.LAYER),
    ),
    "eagle3-recycles-normed": ("eagle3", partial(folders.eagle3, norm_output=True, fc_norm=True)),
    "eagle3-last-state": ("eagle3", partial(folders.eagle3, taps=0, eagle_config={"use_aux_hidden_state": False})),
    "eagle3-two-layers": ("eagle3", partial(folders.eagle3, num_layers=2, qk_norm=True, qkv_bias=True)),
    "mlp": ("mlp_speculator", folders.mlp_speculator),
    "mlp-untied": ("mlp_speculator", partial(folders.mlp_speculator, tied=False, scale_input=False)),
    "medusa": ("medusa", folders.medusa),
    "medusa-two-blocks": ("medusa", partial(folders.medusa, num_blocks=2, prefix="medusa_head.")),
    "medusa-converted": ("medusa", partial(folders.medusa, converted=True, own_heads=False)),
    "medusa-token-map": ("medusa", partial(folders.medusa, converted=True, reduced=True, has_bias=False)),
}


@cache
def target(dtype: str = "float32") -> CausalLM:
    config = ModelConfig.from_pretrained(DEMO, dtype=dtype)
    return load_model(config, max_rows=64, max_model_len=MAX_LEN)


@cache
def view(tokens: tuple[int, ...] = tuple(TOKENS), dtype: str = "float32") -> TargetView:
    """Return what the target computes for all tokens but the last."""
    model = target(dtype)
    driver = Driver(model, captures=False)
    recorded = RecordedStates({}, model.output)
    model.store_hidden_states(model.output[:0], taps=recorded)  # type: ignore[arg-type]
    model._states = None
    sequence = driver.start()
    driver.step([(sequence, tokens[:-1])])
    model._taps = None
    embedding = read_tensors(DEMO / "model.safetensors")["model.embed_tokens.weight"]
    states = model.output[: len(tokens) - 1].astype("float32").numpy()
    return TargetView(states, np.stack([recorded.inputs[i] for i in range(15)]), embedding, embedding)


def caches(count: int, model: ModelConfig, num_blocks: int) -> list[LayerCache]:
    return [allocate_cache(num_blocks, BLOCK, model.cache_spec) for _ in range(count)]


def runner_of(folder: Path, method: str) -> Drafter:
    """Return a runner whose target has computed all tokens but the last of a request in its step."""
    model = target()
    config = RunnerConfig(64, MAX_SEQS, MAX_LEN, BLOCK, MAX_DRAFTS, 256, 4096, 4096, (), "float32")
    drafter: Drafter
    if method in HEAD_METHODS:
        found = find_head(str(folder), method, model.config)
        head = load_eagle_head(found, model, UNQUANTIZED, "default_v1")
        own = caches(found.model.num_layers, found.model, NUM_BLOCKS + MAX_SEQS)
        drafter = EagleRunner(head, model, own, NUM_BLOCKS, config)
    else:
        found_row = find_row_head(str(folder), method, model.config)
        loaded = LoadedRowHead(load_row_head(found_row, model, UNQUANTIZED, "default_v1", MAX_SEQS))
        drafter = loaded.make_runner(model, [], NUM_BLOCKS, config)
    runner = ModelRunner(model, caches(14, model.config, NUM_BLOCKS), config, observer=drafter)
    request = prompt()
    runner.run(StepPlan([ScheduledRequest(request, len(TOKENS) - 1, 0, NO_DRAFT, 0)]))
    return drafter


def prompt() -> Request:
    return make_request(len(TOKENS), MAX_DRAFTS, [5, 2], TOKENS)


def draft(drafter: Drafter, count: int, temperature: float = 0.0) -> tuple[list[int], NDArray[np.float32]]:
    """Return drafts, and the log-probabilities of the last one."""
    request = prompt()
    request.params.temperature = temperature
    if isinstance(drafter, RowRunner):
        drafter._first_rows[request] = 0, range(len(TOKENS) - 1)
    ids = drafter.draft([request], [count])[0]
    return ids, log_softmax(last_logits(drafter, count).astype(np.float64))


def expected(folder: Path, method: str) -> Drafts:
    return HEADS[method](folder, "float64").drafts(TOKENS, view(), MAX_DRAFTS)


@pytest.mark.parametrize("form", FORMS)
def test_a_head_drafts_what_its_definition_says(form: str, tmp_path: Path) -> None:
    method, write = FORMS[form]
    folder = write(tmp_path / "head")
    want, drafter = expected(folder, method), runner_of(folder, method)
    for count in range(1, MAX_DRAFTS + 1):
        ids, log_probs = draft(drafter, count)
        assert ids == want.ids[:count]
        wanted = want.log_probs[count - 1]
        if len(log_probs) < len(wanted):  # of the head's own ids
            wanted = wanted[np.isfinite(wanted)]
        np.testing.assert_allclose(log_probs, wanted, atol=1e-4)


@pytest.mark.parametrize("capacity", [64, 5])
@pytest.mark.parametrize("form", ["medusa", "medusa-converted", "medusa-token-map"])
def test_medusa_reads_each_matrix_of_logits_once_per_batch(
    form: str, capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of requests with different counts are those of each request alone, however many logits fit at once."""
    method, write = FORMS[form]
    folder, counts, temperatures = write(tmp_path / "head"), [4, 2], (0.0, 1.0)
    alone = runner_of(folder, method)
    wanted = [[draft(alone, count, temperature)[0] for count in counts] for temperature in temperatures]
    monkeypatch.setattr(medusa_runner, "LOGITS_BYTES", capacity * 4 * 4096)
    drafter = runner_of(folder, method)
    assert isinstance(drafter, MedusaRunner)
    batches = Mock(wraps=drafter._sample_batch)
    monkeypatch.setattr(drafter, "_sample_batch", batches)
    for temperature, tokens in zip(temperatures, wanted, strict=True):
        requests = [prompt() for _ in counts]
        for request in requests:
            request.params.temperature = temperature
            drafter._first_rows[request] = 0, range(len(TOKENS) - 1)
        assert drafter.draft(requests[::-1], counts[::-1]) == tokens[::-1]
    once = [2, 2, 1, 1] if drafter.num_matrices > 1 else [6] if capacity > 6 else [5, 1]
    assert [len(places) for (_, _, places), _ in batches.call_args_list] == once * len(temperatures)


@pytest.mark.parametrize("form", ["eagle3", "medusa-token-map"])
def test_random_sampling_takes_logits_at_the_places_of_the_target_s_ids(form: str, tmp_path: Path) -> None:
    method, write = FORMS[form]
    folder = write(tmp_path / "head")
    want = expected(folder, method).log_probs[0]
    ids, log_probs = draft(runner_of(folder, method), 1, temperature=1.0)
    assert len(log_probs) == len(want)
    assert np.isfinite(want[ids[0]])
    drawn = np.isfinite(want)
    np.testing.assert_allclose(log_probs[drawn], want[drawn], atol=1e-4)
    assert np.isneginf(log_probs[~drawn]).all()


@pytest.mark.parametrize(
    ("write", "changed"),
    [
        (folders.eagle3, {"norm_before_residual": True}),
        (folders.eagle3, {"norm_output": True}),
        (folders.eagle3, {"eagle_aux_hidden_state_layer_ids": OUTPUTS}),
        (folders.eagle3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": INPUTS}}),
        (folders.eagle3, {"rope_theta": 10000.0}),
        (folders.eagle3, {"rms_norm_eps": 1e-2}),
        (folders.eagle3, {"speculators_model_type": "eagle3"}),
        (folders.eagle, {"num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 2}),
        (folders.mlp_speculator, {"scale_input": False}),
        (folders.mlp_speculator, {"n_predict": 3}),
    ],
)
def test_every_key_counts(write: Form, changed: dict[str, Any], tmp_path: Path) -> None:
    folder, method = write(tmp_path / "head"), write.__name__
    _, plain = draft(runner_of(folder, method), 3)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    _, other = draft(runner_of(folder, method), 3)
    assert np.abs(plain - other).max() > 1e-3


def test_both_numberings_name_the_same_states(tmp_path: Path) -> None:
    inputs = folders.eagle3(tmp_path / "inputs", eagle_aux_hidden_state_layer_ids=INPUTS)
    outputs = folders.eagle3(tmp_path / "outputs", eagle_config={"eagle_aux_hidden_state_layer_ids": OUTPUTS})
    default = folders.eagle3(tmp_path / "default")
    drafts = [draft(runner_of(folder, "eagle3"), 2) for folder in (inputs, outputs, default)]
    assert drafts[0][0] == drafts[1][0] == drafts[2][0]
    assert np.array_equal(drafts[0][1], drafts[1][1]) and np.array_equal(drafts[0][1], drafts[2][1])


@pytest.mark.parametrize(
    ("write", "method", "changed", "message"),
    [
        (folders.eagle, "eagle", {"hidden_size": 128}, "hidden_size is 128, but the target has 256"),
        (folders.eagle, "eagle", {"vocab_size": 5000}, "vocab_size is 5000, but the target has 4096"),
        (folders.eagle, "eagle", {"num_hidden_layers": 2}, "9 missing .layers.1"),
        (folders.eagle, "eagle", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        (folders.eagle, "eagle", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq|codes"),
        (folders.eagle3, "eagle3", {"target_hidden_size": 512}, "target_hidden_size is 512, but the target has 256"),
        (folders.eagle3, "eagle3", {"draft_vocab_size": 100}, "3 of wrong shape|2 of wrong shape"),
        (folders.eagle3, "eagle3", {"draft_vocab_size": 5000}, "draft_vocab_size 5000 is more than vocab_size 4096"),
        (folders.eagle3, "eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "is 2, but fc.weight joins 3"),
        (folders.eagle3, "eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 15]}, "expected layers of the target"),
        (folders.eagle3, "eagle3", {"eagle_aux_hidden_state_layer_ids": "2"}, "expected layers of the target"),
        (folders.eagle3, "eagle3", {"num_aux_hidden_states": 5}, "num_aux_hidden_states is 5, but fc.weight reads 3"),
        (folders.eagle3, "eagle3", {"norm_before_fc": True}, "norm_before_fc: .* not supported"),
        (folders.eagle3, "eagle3", {"parallel_drafting": True}, "draft in one pass are not supported"),
        (folders.eagle3, "eagle3", {"fc_norm": True}, "3 missing .fc_norm.0.weight"),
        (folders.eagle3, "eagle3", {"norm_output": "yes"}, "norm_output: expected true or false, got 'yes'"),
        (folders.mlp_speculator, "mlp_speculator", {"emb_dim": 128}, "emb_dim is 128, but the target has 256"),
        (folders.mlp_speculator, "mlp_speculator", {"n_predict": 0}, r"n_predict: expected an integer in \[1, 16\]"),
        (folders.mlp_speculator, "mlp_speculator", {"tie_weights": False}, "missing .*emb.1.weight"),
        (folders.mlp_speculator, "mlp_speculator", {"inner_dim": 64}, "of wrong shape"),
        (partial(folders.medusa, converted=True), "medusa", {"hidden_size": 128}, "hidden_size is 128"),
    ],
)
def test_a_head_for_another_target_is_refused_before_weights_are_read(
    write: Form, method: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "head")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    find = find_head if method in HEAD_METHODS else find_row_head
    with pytest.raises(ConfigError, match=message):
        find(str(folder), method, ModelConfig.from_pretrained(DEMO))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [(0, -1, r"d2t: expected ids in \[0, 4096\), got -1"), (3, 4096, "d2t: .* got 4099"), (1, None, "twice")],
)
def test_wrong_ids_of_a_reduced_vocabulary_are_refused(
    index: int, value: int | None, message: str, tmp_path: Path
) -> None:
    folder = folders.eagle3(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][index] = tensors["d2t"][0] - index if value is None else value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        find_head(str(folder), "eagle3", ModelConfig.from_pretrained(DEMO))


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_embedding_that_repeats_the_target_s_is_not_loaded(is_packed: bool, tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(DEMO)
    if is_packed:
        pack_checkpoint(config, tmp_path / "packed", QuantizationConfig.from_value("w8a8"))
        config = ModelConfig.from_pretrained(tmp_path / "packed")
    model = load_model(config, max_rows=16, max_model_len=MAX_LEN)
    folder = folders.eagle(tmp_path / "head", embedding=True)
    tensors = load_file(folder / "model.safetensors")

    def has_own_embedding() -> bool:
        head = load_eagle_head(find_head(str(folder), "eagle", config), model, UNQUANTIZED, "default_v1")
        assert (head._embedding is not model.shared.embedding) == (head.num_weight_bytes > 4096 * 256 * 2)
        return head._embedding is not model.shared.embedding

    assert has_own_embedding()
    tensors["embed_tokens.weight"] = read_tensors(DEMO / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert not has_own_embedding()


def demo_prompts(headings: Sequence[str], body: str) -> list[list[int]]:
    tokenizer = Tokenizer.from_pretrained(DEMO)
    prompts = [tokenizer.encode(f"{heading}\n{body}") for heading in headings]
    assert min(map(len, prompts)) > 16 and max(map(len, prompts)) < MAX_LEN - NUM_TOKENS
    return prompts


def drafts_of_text(engine: Engine, prompts: Sequence[list[int]]) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Return, for each draft of the greedy continuations, the whole text, the length of its context and the draft."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [GenerationRequest(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    drafts = record_drafts(engine)
    texts = run_all(engine, requests)
    wholes = [(*r.prompt_token_ids, *texts[r.request_id, 0].token_ids) for r in requests]
    found = [(context, draft) for (context, _), draft in drafts.items() if draft]
    return [
        (next(whole for whole in wholes if whole[: len(context)] == context), len(context), draft)
        for context, draft in found
    ]


@pytest.mark.parametrize(
    ("chunk", "num_blocks", "pauses"),
    [(2048, None, False), (5, None, False), (2048, 5, False), (2048, None, True)],
)
@pytest.mark.parametrize("method", DEMO_HEADS)
def test_every_draft_of_an_engine_is_that_of_the_definition(
    method: str, chunk: int, num_blocks: int | None, pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After chunks, prefix hits, preemptions and pauses, too, so that as many drafts are accepted."""
    prompts = demo_prompts(HEADINGS, "    def push(self, item):\n        self.items.append(item)\n")
    engine = build(config(method, 3, chunk, num_blocks, prefix_caching=True, dtype="float32"))
    if pauses:

        def draft_quotas(plan: StepPlan, ready: list[Request]) -> list[DraftQuota]:
            return [DraftQuota(r.draft_room, r.draft_room) for r in ready if r.num_output_tokens % 8 > 5]

        monkeypatch.setattr(engine.length_policy, "draft_quotas", draft_quotas)
    definition = HEADS[method](Path(resolve_model_path(DEMO_HEADS[method])), "float64")
    for _ in range(2):
        found = drafts_of_text(engine, prompts)
        assert len(found) > (5 if pauses else 20)
        for whole, length, draft in found:
            assert list(draft) == definition.drafts(list(whole[:length]), view(whole), len(draft)).ids
    assert engine.stats().num_prefix_hit_tokens > 0
    assert (engine.stats().num_preemptions > 0) == (num_blocks is not None)


@pytest.mark.parametrize(("num_prompts", "tolerance"), [(24, 0.03), pytest.param(200, 0.01, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("method", DEMO_HEADS)
def test_in_bfloat16_as_many_drafts_are_accepted_as_of_the_definition(
    method: str, num_prompts: int, tolerance: float
) -> None:
    """The smaller sample allows for the chance that its few differences fall on one side."""
    engine = build(config(method, 3, dtype="bfloat16"))
    definition = HEADS[method](Path(resolve_model_path(DEMO_HEADS[method])), "float64")
    sampled = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    start = Tokenizer.from_pretrained(DEMO).encode("class Stack:\n    def ")
    requests = [GenerationRequest(f"r{i}", start, replace(sampled, seed=i)) for i in range(num_prompts)]
    found = drafts_of_text(engine, [[*start, *text.token_ids] for text in run_all(engine, requests).values()])
    num_drafted = num_accepted = num_expected = 0
    for whole, length, draft in found:
        following = whole[length:][: len(draft)]
        expected = definition.drafts(list(whole[:length]), view(whole, "bfloat16"), len(draft)).ids
        num_drafted += len(draft)
        num_accepted += num_equal(draft, following)
        num_expected += num_equal(expected, following)
    assert num_drafted > 400
    assert abs(num_accepted - num_expected) <= tolerance * num_drafted


def num_equal(draft: Sequence[int], following: Sequence[int]) -> int:
    """Return how many drafts are accepted before `following`."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, following)))
