# SPDX-License-Identifier: Apache-2.0
"""The only reader of environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated

from fastdeploy.config.flag import check_fields, choice, integer
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.faults import VARIABLE, Fault, parse_faults

API_KEY_VARIABLE = "FD_API_KEY"
SCHEDULER_PASSWORD_VARIABLE = "FD_SCHEDULER_PASSWORD"
EMULATED_VARIABLE = "FD_GPU_EMULATED"
VLLM_API_KEY_VARIABLE = "VLLM_API_KEY"
VARIABLES = {
    "FD_API_KEY": "keys that clients must send, separated by commas; `--api-key` replaces them",
    "FD_BUILD_PATHS": "paths that setup.py compiles: all, or native for the best and the portable one (default: all)",
    "FD_CPU_ISA": "path of the operators: avx512_bf16, avx512, avx2 or portable (default: the best one)",
    "FD_BUILD_GPU": "what setup.py compiles for GPUs: 0, native (the GPU of this machine) or all (default: 0)",
    "FD_DEBUG": "1 shows tracebacks instead of one-line errors",
    "FD_EMULATION_CHECKS": "1 compares every access of an emulated kernel with those before it (default: 0)",
    "FD_EMULATION_SEED": "order in which the emulated GPU runs blocks and threads, 0 to 2^63 - 1 (default: 0)",
    "FD_FAULT": "point:action injects a fault at a fault point; for tests, with FD_DEBUG=1",
    "FD_FOR_TORCH_MODEL_FORMAT": "1 reads every checkpoint in torch layout",
    "FD_GPU_EMULATED": "1 executes the GPU's kernels on the CPU with `--device gpu`; needs a checkout (default: 0)",
    "FD_LOG_DIR": "folder for log files (default: logs go to stderr only)",
    "FD_LOG_FORMAT": "text or json (default: text)",
    "FD_LOG_LEVEL": "DEBUG, INFO, WARNING or ERROR (default: INFO)",
    "FD_LOG_REQUESTS": "0 logs no line per request (default: 1)",
    "FD_MODEL_SOURCE": "hub for models that are not local: HUGGINGFACE, AISTUDIO or MODELSCOPE (default: HUGGINGFACE)",
    "FD_NUM_THREADS": "number of threads of the operators (default: the cores that the process may use)",
    "FD_PADDLENLP_PYTHON": "Python interpreter with PaddleNLP, for tokenizers that only PaddleNLP reads",
    "FD_SCHEDULER_PASSWORD": "password of Redis; `--scheduler-password` and its file replace it",
    "FD_VERIFY_WEIGHTS": "0 maps packed weights without comparing them with their checksums (default: 1)",
}
"""What this module, the operators and setup.py read; other variables that begin with FD_ are named at start-up."""
_SERVER_SECRETS = (API_KEY_VARIABLE, SCHEDULER_PASSWORD_VARIABLE, VLLM_API_KEY_VARIABLE, "OPENAI_API_KEY")
SECRET_WORDS = ("KEY", "PASSWORD", "SECRET", "TOKEN")


@dataclass(frozen=True)
class Env:
    """The environment: variables of VARIABLES, and some that other programs read, too.

    Attributes:
        cache_dir: fastdeploy in XDG_CACHE_HOME (default: ~/.cache), for files that are made once.
        openai_api_key: OPENAI_API_KEY, the key that this package's own clients send.
        has_vllm_api_key: VLLM_API_KEY is set, which protects nothing here.
        no_color: NO_COLOR is set and not empty, so that no command writes in colour.
        unknown: names of FD_* variables that are set but not in VARIABLES.
    """

    debug: bool = False
    faults: tuple[Fault, ...] = ()
    log_dir: str = ""
    log_format: Annotated[str, choice("text", "json", name="FD_LOG_FORMAT")] = "text"
    log_level: Annotated[str, choice("DEBUG", "INFO", "WARNING", "ERROR", name="FD_LOG_LEVEL")] = "INFO"
    log_requests: bool = True
    model_source: str = "HUGGINGFACE"
    is_torch_forced: bool = False
    verifies_weights: bool = True
    gpu_emulated: bool = False
    emulation_checks: bool = False
    emulation_seed: Annotated[int, integer(0, 2**63 - 1, name="FD_EMULATION_SEED")] = 0
    paddlenlp_python: str = ""
    cache_dir: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    openai_api_key: str = field(default="", repr=False)
    scheduler_password: str = field(default="", repr=False)
    has_vllm_api_key: bool = False
    no_color: bool = False
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.faults and not self.debug:
            raise ConfigError("FD_FAULT", "is for tests and needs FD_DEBUG=1")


def read_env() -> Env:
    """Read the environment once; raise ConfigError for a value outside its range."""
    keys = tuple(key for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key)
    return Env(
        debug=os.environ.get("FD_DEBUG", "") == "1",
        faults=parse_faults(os.environ.get("FD_FAULT", "")),
        log_dir=os.environ.get("FD_LOG_DIR", ""),
        log_format=os.environ.get("FD_LOG_FORMAT", "text").lower(),
        log_level=os.environ.get("FD_LOG_LEVEL", "INFO").upper(),
        log_requests=os.environ.get("FD_LOG_REQUESTS", "1") != "0",
        model_source=os.environ.get("FD_MODEL_SOURCE", "HUGGINGFACE").upper(),
        is_torch_forced=os.environ.get("FD_FOR_TORCH_MODEL_FORMAT", "") == "1",
        verifies_weights=os.environ.get("FD_VERIFY_WEIGHTS", "1") != "0",
        gpu_emulated=os.environ.get("FD_GPU_EMULATED", "0") == "1",
        emulation_checks=os.environ.get("FD_EMULATION_CHECKS", "0") == "1",
        emulation_seed=_number("FD_EMULATION_SEED", os.environ.get("FD_EMULATION_SEED", "0")),
        paddlenlp_python=os.environ.get("FD_PADDLENLP_PYTHON", ""),
        cache_dir=os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fastdeploy"),
        api_keys=keys,
        scheduler_password=os.environ.get("FD_SCHEDULER_PASSWORD", ""),
        openai_api_key=os.environ.get("OPENAI_API_KEY", ""),
        has_vllm_api_key=bool(os.environ.get(VLLM_API_KEY_VARIABLE)),
        no_color=bool(os.environ.get("NO_COLOR")),
        unknown=tuple(sorted(name for name in os.environ if name.startswith("FD_") and name not in VARIABLES)),
    )


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigError(name, f"expected an integer, got {value!r}")
    return int(value)


def child_environment(is_replacement: bool = False, **added: str) -> dict[str, str]:
    """Return this process's environment without keys and passwords, for child processes, and with more.

    A process that replaces one that has ended gets no faults, because those of the first one would fire again.
    """
    hidden = (*_SERVER_SECRETS, VARIABLE) if is_replacement else _SERVER_SECRETS
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, **added}


def shown_variables() -> dict[str, str]:
    """Return the FD_* variables that are set, with masked values for possible secrets."""
    return {
        name: "***" if any(word in name for word in SECRET_WORDS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith("FD_")
    }
