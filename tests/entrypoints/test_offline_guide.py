# SPDX-License-Identifier: Apache-2.0
"""The code of docs/guide/offline.md runs as it stands, and a script for vLLM with other import lines and names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fastdeploy

GUIDE = Path(fastdeploy.__file__).parents[1] / "docs" / "guide" / "offline.md"
SCRIPT = """
from fastdeploy import LLM, RequestOutput, SamplingParams, TokensPrompt
from fastdeploy.metrics.reader import Counter, Histogram, Vector

llm = LLM(
    model="demo", trust_remote_code=True, tensor_parallel_size=1, enforce_eager=True, gpu_memory_utilization=0.8,
    disable_log_stats=False, max_model_len=1024, max_num_seqs=4, enable_prefix_caching=True, seed=0,
    speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
)
tokenizer = llm.get_tokenizer()
conversation = [{"role": "user", "content": "x = 1\\nx = 1\\nx = 1\\n"}]
text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
ids = tokenizer.encode(text, add_special_tokens=False)
params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
outputs = llm.generate([TokensPrompt(prompt_token_ids=ids)] * 2, sampling_params=params, priority=[1, 0])
chosen = outputs[0].outputs[0]
assert isinstance(outputs[0], RequestOutput) and outputs[0].finished and chosen.finished()
assert tokenizer.decode(chosen.token_ids, skip_special_tokens=True) == chosen.text
assert chosen.cumulative_logprob == sum(entry[i].logprob for i, entry in zip(chosen.token_ids, chosen.logprobs))
counts = {"drafts": 0, "accepted": 0, "decode_s": 0.0, "per_position": []}
for metric in llm.get_metrics():
    if metric.name == "fastdeploy:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        counts["drafts"] += metric.value
    elif metric.name == "fastdeploy:spec_decode_num_accepted_tokens":
        counts["accepted"] += metric.value
    elif metric.name == "fastdeploy:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        counts["per_position"] = metric.values
    elif metric.name == "fastdeploy:request_decode_time_seconds":
        assert isinstance(metric, Histogram)
        counts["decode_s"] += metric.sum
assert counts["drafts"] > 0 and counts["decode_s"] > 0 and sum(counts["per_position"]) == counts["accepted"]
"""


def test_every_block_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    exec(compile("\n".join(blocks), str(GUIDE), "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"^'.*' -\d+\.\d+ \d+$", printed, re.MULTILINE), "a token with its log-probability and rank"
    assert "\nfastdeploy:request_success {" in printed


def test_a_script_for_vllm_runs_with_its_import_lines_changed() -> None:
    exec(compile(SCRIPT, "script", "exec"), {})
