# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - the documents' own lines
"""Commands and snippets of other projects' documents, verbatim, and the outcome of each here.

`${...}` are the documents' own placeholders. An outcome is empty where the command runs, else the beginning of the line
on stderr, which docs/guide/serving.md promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A shell command and its outcome; with a role it needs Redis and a node of the other role."""

    name: str
    text: str
    outcome: str = ""
    role: str = ""


@dataclass(frozen=True)
class Snippet:
    """The arguments of `LLM` in a Python snippet, and the drafting model here that stands for its own."""

    name: str
    arguments: dict[str, Any]
    drafting_model: str = "demo/draft"


COMMANDS = (
    Command(
        "draft model",
        """
python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 --model facebook/opt-6.7b \\
    --seed 42 -tp 1 --gpu_memory_utilization 0.8 \\
    --speculative_config '{"model": "facebook/opt-125m", "num_speculative_tokens": 5}'
""",
    ),
    Command(
        "draft model in separate arguments",
        """
python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 \\
       --model facebook/opt-6.7b \\
       --seed 42 -tp 1 \\
       --speculative_model facebook/opt-125m \\
       --use-v2-block-manager \\
       --num_speculative_tokens 5 \\
       --gpu_memory_utilization 0.8
""",
    ),
    Command(
        "MTP on Ascend",
        """
vllm serve /deepseek-ai/DeepSeek-V3.2-Exp-W8A8 \\
    --port 20004 \\
    --data-parallel-size 1 \\
    --tensor-parallel-size 16 \\
    --enable-expert-parallel \\
    --seed 1024 \\
    --served-model-name dsv3 \\
    --max-model-len 36768 \\
    --max-num-batched-tokens 5000 \\
    --max-num-seqs 10 \\
    --quantization ascend \\
    --trust-remote-code \\
    --gpu-memory-utilization 0.9 \\
    --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' \\
    --speculative-config '{"num_speculative_tokens": 2, "method":"deepseek_mtp", "disable_padded_drafter_batch": "False"}'
""",
        "--enable-expert-parallel: is refused, leave it out: expert parallelism is not available yet",
    ),
    Command(
        "MTP, tensor parallel",
        """
python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --tensor-parallel-size 4 \\
    --config ${path_to_FastDeploy}benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml \\
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'
""",
    ),
    Command(
        "MTP, prefill node",
        """
python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --port 8180 \\
    --metrics-port 8181 \\
    --engine-worker-queue-port 8182 \\
    --cache-queue-port 8183 \\
    --workers 2 \\
    --tensor-parallel-size 4 \\
    --quantization wint4 \\
    --splitwise-role "prefill" \\
    --scheduler-name "splitwise" \\
    --scheduler-host "127.0.0.1" \\
    --scheduler-port 6379 \\
    --scheduler-ttl 9000 \\
    --scheduler-topic mtp \\
    --config ${path_to_FastDeploy}/benchmarks/yaml/eb45t-32k-wint4-mtp-tp4-prefill.yaml \\
    --scheduler-password "scheduler_mtp" \\
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'
""",
        role="prefill",
    ),
    Command(
        "MTP, decode node",
        """
python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --port 8190 \\
    --metrics-port 8191 \\
    --engine-worker-queue-port 8192 \\
    --cache-queue-port 8193 \\
    --workers 2 \\
    --tensor-parallel-size 4 \\
    --quantization wint4 \\
    --splitwise-role "decode" \\
    --scheduler-name "splitwise" \\
    --scheduler-host "127.0.0.1" \\
    --scheduler-port 6379 \\
    --scheduler-ttl 9000 \\
    --scheduler-topic mtp \\
    --config ${path_to_FastDeploy}/benchmarks/yaml/eb45t-32k-wint4-mtp-tp4-decode.yaml \\
    --scheduler-password "scheduler_mtp" \\
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'
""",
        role="decode",
    ),
    Command(
        "n-gram, tensor parallel, in 4 bits",
        """
python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --tensor-parallel-size 4 \\
    --config ${path_to_FastDeploy}benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml \\
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 1}'
""",
    ),
    Command(
        "suffix",
        """
python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --tensor-parallel-size 4 \\
    --config ${path_to_FastDeploy}benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml \\
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64, "suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1}'
""",
    ),
    Command(
        "naive",
        """
python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${path_to_main_model} \\
    --tensor-parallel-size 4 \\
    --speculative-config '{"method": "naive", "num_speculative_tokens": 1}'
""",
    ),
)

SPECULATIVE_OPTIONS = (
    (
        '{"method": "mtp", "verify_strategy": "greedy", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}',
        "",
    ),
    ('{"method": "mtp", "accept_policy": "accept_all", "num_speculative_tokens": 1}', ""),
    (
        '{"method": "mtp", "num_model_steps": 2, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5, '
        '"model": "${path_to_main_model}/mtp"}',
        "",
    ),
    ('{"method": "ngram", "num_speculative_tokens": 1}', ""),
)
"""Options that the documents give on their own, for any command that starts a server."""

SNIPPETS = (
    Snippet(
        "n-gram",
        {
            "model": "facebook/opt-6.7b",
            "tensor_parallel_size": 1,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        },
    ),
    Snippet(
        "n-gram in separate arguments",
        {
            "model": "facebook/opt-6.7b",
            "tensor_parallel_size": 1,
            "speculative_model": "[ngram]",
            "num_speculative_tokens": 5,
            "ngram_prompt_lookup_max": 4,
        },
    ),
    Snippet(
        "draft model",
        {
            "model": "facebook/opt-6.7b",
            "tensor_parallel_size": 1,
            "speculative_config": {"model": "facebook/opt-125m", "num_speculative_tokens": 5},
        },
    ),
    Snippet(
        "draft model in separate arguments",
        {
            "model": "facebook/opt-6.7b",
            "tensor_parallel_size": 1,
            "speculative_model": "facebook/opt-125m",
            "num_speculative_tokens": 5,
        },
    ),
    Snippet(
        "MLP speculator",
        {
            "model": "meta-llama/Meta-Llama-3.1-70B-Instruct",
            "tensor_parallel_size": 4,
            "speculative_config": {"model": "ibm-ai-platform/llama3-70b-accelerator", "draft_tensor_parallel_size": 1},
        },
        "demo/mlp",
    ),
    Snippet(
        "MLP speculator in separate arguments",
        {
            "model": "meta-llama/Meta-Llama-3.1-70B-Instruct",
            "tensor_parallel_size": 4,
            "speculative_model": "ibm-fms/llama3-70b-accelerator",
            "speculative_draft_tensor_parallel_size": 1,
        },
        "demo/mlp",
    ),
    Snippet(
        "EAGLE without its name",
        {
            "model": "meta-llama/Meta-Llama-3-8B-Instruct",
            "tensor_parallel_size": 4,
            "speculative_config": {"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "draft_tensor_parallel_size": 1},
        },
        "demo/eagle",
    ),
    Snippet(
        "EAGLE",
        {
            "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "tensor_parallel_size": 4,
            "distributed_executor_backend": "mp",
            "enforce_eager": True,
            "async_scheduling": True,
            "speculative_config": {
                "method": "eagle",
                "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
                "draft_tensor_parallel_size": 1,
                "num_speculative_tokens": 2,
            },
        },
        "demo/eagle",
    ),
    Snippet(
        "suffix",
        {
            "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "tensor_parallel_size": 1,
            "enforce_eager": True,
            "speculative_config": {"method": "suffix", "num_speculative_tokens": 15},
        },
    ),
)
