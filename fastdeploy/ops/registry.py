# SPDX-License-Identifier: Apache-2.0
"""Which implementation an operator runs: the native library on the CPU, the Paddle reference where nothing else exists.

Each family registers its operators here with a reference, the backends that implement them natively, a tolerance and
example inputs. Tests iterate the registry: an operator that is registered is tested.
"""

import ctypes
import logging
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import paddle

from fastdeploy.version import __version__

logger = logging.getLogger(__name__)

# Calls a registered custom operator: run_native("fd_linear", *tensors, *attributes).
run_native: Callable[..., Any] = paddle._C_ops._run_custom_op

# Looks an operator up by name in one backend, so that an example can also call the operators that prepare its inputs.
Lookup = Callable[[str], Callable[..., Any]]
# Builds its inputs (always the same), runs the operator through `lookup` and returns the tensors to compare.
Example = Callable[[Lookup], Sequence[paddle.Tensor]]


class OperatorLibraryError(RuntimeError):
    """The native operator library is missing, does not match the package, or cannot run as the environment asks."""


@dataclass
class OpEntry:
    """One operator of the registry.

    `reference` is written in Paddle operators and runs on any device. `backends` maps a device ("cpu", "gpu", ...) to
    the native implementation; both take the arguments of the typed wrapper. `tolerance` bounds
    |native - reference| <= tolerance * (1 + |reference|), by dtype name. `run` is the implementation in use.
    """

    name: str
    reference: Callable[..., Any]
    backends: dict[str, Callable[..., Any]]
    tolerance: dict[str, float] = field(default_factory=dict)
    examples: Sequence[Example] = ()
    run: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        def select_and_run(*args: Any, **kwargs: Any) -> Any:
            select_backend("cpu")
            return self.run(*args, **kwargs)

        self.run = select_and_run


_entries: dict[str, OpEntry] = {}
_selected: str | None = None
_reference_names: set[str] = set()


def register(entry: OpEntry) -> OpEntry:
    """Add an operator. Raises ValueError when the name is taken."""
    if entry.name in _entries:
        raise ValueError(f"registry: name: expected a new operator name, got {entry.name!r} twice")
    _entries[entry.name] = entry
    if _selected is not None:
        _select(entry, _selected)
    return entry


def entries() -> dict[str, OpEntry]:
    """Return all registered operators by name."""
    return dict(_entries)


def lookup(backend: str) -> Lookup:
    """Return the lookup of one backend, "reference" included; the choice of select_backend does not change."""
    if backend == "cpu":
        load_library()
    return lambda name: _entries[name].reference if backend == "reference" else _entries[name].backends[backend]


def select_backend(device: str) -> str:
    """Choose the implementations for `device` ("cpu", "gpu", "xpu", "npu") once at start-up; return the backend's name.

    On an accelerator an operator without a native kernel runs its reference, with one warning that names it.

    Raises:
        OperatorLibraryError: on the CPU, when the library is missing, of another version, or misconfigured.
    """
    global _selected
    _selected = device
    if device == "cpu":
        load_library()
    _reference_names.clear()
    for entry in _entries.values():
        _select(entry, device)
    logger.info("operators: backend %s, %s", device, isa() if device == "cpu" else "native where available")
    return device


def selected_backend() -> str:
    """Return the device of select_backend, "cpu" unless one has been chosen."""
    return _selected or select_backend("cpu")


def _select(entry: OpEntry, device: str) -> None:
    if device in entry.backends:
        entry.run = entry.backends[device]
        return
    if device == "cpu":
        raise OperatorLibraryError(f"registry: {entry.name}: expected a CPU kernel, got none")
    if entry.name not in _reference_names:
        logger.warning("operator %s has no %s kernel and runs its Paddle reference: exact: false", entry.name, device)
    _reference_names.add(entry.name)
    entry.run = entry.reference


def is_exact() -> bool:
    """Return whether every operator runs a row-independent native kernel."""
    return not _reference_names


def library_path() -> Path:
    """Return where the build puts the Paddle operator library of this Python."""
    return Path(__file__).parent / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Load the native library and register its operators with Paddle; later calls return the same handle.

    Raises:
        OperatorLibraryError: the file is missing, carries another version, or FD_CPU_ISA / FD_NUM_THREADS is wrong.
    """
    path = library_path()
    if not path.exists():
        raise OperatorLibraryError(
            f"operator library: expected {path.name} in {path.parent}, got none; build it with `pip install -e .` "
            "in a checkout (needs g++ and Python.h) or reinstall the package"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OperatorLibraryError(f"operator library: cannot load {path}: {error}; rebuild it") from error
    check_version(library, path)
    library.fd_configuration_error.restype = ctypes.c_char_p
    library.fd_isa_name.restype = ctypes.c_char_p
    if (reason := library.fd_configuration_error()) is not None:
        raise OperatorLibraryError(reason.decode())
    paddle.base.core.load_op_meta_info_and_register_op(str(path))
    return library


def check_version(library: ctypes.CDLL, path: Path) -> str:
    """Return the library's source hash; raise OperatorLibraryError when it was built for another package version."""
    library.fd_library_version.restype = ctypes.c_char_p
    library.fd_library_hash.restype = ctypes.c_char_p
    version = library.fd_library_version().decode()
    if version != __version__:
        raise OperatorLibraryError(
            f"operator library: {path.name}: expected version {__version__}, got {version}; rebuild it with "
            "`pip install -e .` or reinstall the package"
        )
    return str(library.fd_library_hash().decode())


def isa() -> str:
    """Return the instruction-set path of this process: "avx512_bf16", "avx512", "avx2" or "portable"."""
    return str(load_library().fd_isa_name().decode())


def num_threads() -> int:
    """Return how many threads the operators use, the caller's included."""
    return int(load_library().fd_num_threads())


def library_version() -> str:
    """Return the version that the loaded library was built for."""
    return str(load_library().fd_library_version().decode())


def library_hash() -> str:
    """Return 16 hexadecimal digits over the sources that the loaded library was built from."""
    return check_version(load_library(), library_path())
