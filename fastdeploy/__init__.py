# SPDX-License-Identifier: Apache-2.0
"""Deployment of large language models on PaddlePaddle with exact speculative decoding.

The names in `__all__` are imported on first use. Paddle is imported when an `LLM` is created.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastdeploy.version import __version__

if TYPE_CHECKING:
    from fastdeploy.core.errors import (
        ConfigError,
        ContextLengthError,
        FastDeployError,
        InvalidRequestError,
        QueueFullError,
    )
    from fastdeploy.core.guided_decoding import GuidedDecodingParams, StructuredOutputsParams
    from fastdeploy.core.outputs import (
        CompletionOutput,
        ErrorInfo,
        Logprob,
        RequestMetrics,
        RequestOutput,
        SpeculateMetrics,
    )
    from fastdeploy.core.prompts import TextPrompt, TokensPrompt
    from fastdeploy.core.sampling_params import SamplingParams
    from fastdeploy.entrypoints.llm import LLM

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "ErrorInfo",
    "FastDeployError",
    "GuidedDecodingParams",
    "InvalidRequestError",
    "Logprob",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculateMetrics",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_MODULES = {
    "fastdeploy.core.errors": (
        "ConfigError",
        "ContextLengthError",
        "FastDeployError",
        "InvalidRequestError",
        "QueueFullError",
    ),
    "fastdeploy.core.guided_decoding": ("GuidedDecodingParams", "StructuredOutputsParams"),
    "fastdeploy.core.outputs": (
        "CompletionOutput",
        "ErrorInfo",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
        "SpeculateMetrics",
    ),
    "fastdeploy.core.prompts": ("TextPrompt", "TokensPrompt"),
    "fastdeploy.core.sampling_params": ("SamplingParams",),
    "fastdeploy.entrypoints.llm": ("LLM",),
}
_MODULE_OF_NAME = {name: module for module, names in _MODULES.items() for name in names}

warnings.filterwarnings("ignore", message="No ccache found")  # a warning of Paddle's import; nothing is compiled


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'fastdeploy' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return __all__
