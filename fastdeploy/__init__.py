# SPDX-License-Identifier: Apache-2.0
"""Deployment of large language models on PaddlePaddle with exact speculative decoding.

The names below are loaded on first use, so that importing the package costs nothing and never imports Paddle.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastdeploy.version import __version__

if TYPE_CHECKING:
    from fastdeploy.core.guided_decoding import GuidedDecodingParams
    from fastdeploy.core.sampling_params import SamplingParams
    from fastdeploy.entrypoints.llm import LLM

__all__ = ["LLM", "GuidedDecodingParams", "SamplingParams", "__version__"]

warnings.filterwarnings("ignore", message="No ccache found")  # importing Paddle says so; nothing here compiles with it

_HOMES = {
    "GuidedDecodingParams": "fastdeploy.core.guided_decoding",
    "LLM": "fastdeploy.entrypoints.llm",
    "SamplingParams": "fastdeploy.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastdeploy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
