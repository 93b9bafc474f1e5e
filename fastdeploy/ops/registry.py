# SPDX-License-Identifier: Apache-2.0
"""All operators, and which implementation of each one runs: the backend's kernel or the Paddle reference.

Each operator family registers its operators here with a reference, a tolerance and example inputs. Tests iterate over
the registry: an operator that is registered is tested.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import paddle

from fastdeploy.config.env import read_env
from fastdeploy.ops.backend import Backend, DeviceOptions

logger = logging.getLogger(__name__)

DEFAULT_DEVICE = "cpu"

# Finds an operator by name in one implementation, so that an example can also call the operators that prepare inputs.
Lookup = Callable[[str], Callable[..., Any]]
# Builds its inputs (always the same), runs the operator through a lookup and returns the tensors to compare.
Example = Callable[[Lookup], Sequence[paddle.Tensor]]


ALL_BACKENDS = ("cpu", "gpu")
_backends_of: dict[int, tuple[str, ...]] = {}  # by id of the example, which the registry keeps


def cpu_only(example: Example) -> Example:
    """Mark an example whose inputs only the CPU takes; other backends must refuse them with a ValueError."""
    _backends_of[id(example)] = ("cpu",)
    return example


def backends_of(example: Example) -> tuple[str, ...]:
    """Return the backends that take the inputs of an example."""
    return _backends_of.get(id(example), ALL_BACKENDS)


class OperatorLibraryError(RuntimeError):
    """The native operator library is missing, does not match the package, or cannot run as configured."""


@dataclass
class OpEntry:
    """One operator of the registry.

    Attributes:
        name: key of `Backend.kernels`.
        reference: implementation in Paddle operators or NumPy, which runs on any device.
        tolerance: dtype name -> t, where |native - reference| <= t * (1 + |reference|) must hold; 0 for other dtypes.
        examples: inputs on which tests compare kernel and reference.
        has_fallback: whether the reference may take the place of a missing kernel. If not, a model that needs the
            operator is refused, see `missing_kernels`.
        run: the implementation in use; it takes the arguments of `reference`.
    """

    name: str
    reference: Callable[..., Any]
    tolerance: dict[str, float] = field(default_factory=dict)
    examples: Sequence[Example] = ()
    has_fallback: bool = True
    run: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        def select_and_run(*args: Any, **kwargs: Any) -> Any:
            select_backend(DEFAULT_DEVICE)
            return self.run(*args, **kwargs)

        self.run = select_and_run


_entries: dict[str, OpEntry] = {}
_selected: Backend | None = None
_reference_names: set[str] = set()


def register(entry: OpEntry) -> OpEntry:
    """Add an operator. Raises ValueError if the name is taken."""
    if entry.name in _entries:
        raise ValueError(f"registry: name: expected a new operator name, got {entry.name!r} twice")
    _entries[entry.name] = entry
    if _selected is not None:
        _select(entry, _selected)
    return entry


def entries() -> dict[str, OpEntry]:
    """Return all registered operators by name."""
    return dict(_entries)


def lookup(implementation: str) -> Lookup:
    """Return how to find the operators of one implementation; the selected backend does not change.

    Args:
        implementation: "reference", or the device of a backend for its kernels.
    """
    if implementation == "reference":
        return lambda name: _entries[name].reference
    backend = find_backend(implementation)
    backend.load()
    return backend.kernels.__getitem__


def find_backend(device: str) -> Backend:
    """Return the backend of a device, such as "cpu" or "gpu:1"; with FD_GPU_EMULATED=1 the one that emulates a GPU.

    Raises:
        OperatorLibraryError: there is no backend for this device.
    """
    kind = device.partition(":")[0]
    if kind == "gpu" and read_env().gpu_emulated:
        kind = "gpu_emulated"
    name = f"fastdeploy.ops.backends.{kind}"
    try:
        module = import_module(f"{name}.backend")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise OperatorLibraryError(f"device: no backend for {device!r}") from None
    backend: Backend = module.BACKEND
    return backend


def select_backend(device: str, captured_rows: tuple[int, ...] | None = None, failing: Collection[str] = ()) -> Backend:
    """Find the backend of a device, such as "cpu" or "gpu:1", and use it from now on; called once, at start-up.

    Args:
        captured_rows: as in `DeviceOptions`.
        failing: operators whose kernels are not used, because they failed the check of this device.

    Raises:
        OperatorLibraryError: there is no such backend, or its library cannot be used.
    """
    backend = find_backend(device)
    backend.configure(DeviceOptions(int(device.partition(":")[2] or 0), captured_rows))
    use_backend(backend, failing)
    return backend


def use_backend(backend: Backend, failing: Collection[str] = ()) -> None:
    """Run this backend's kernels from now on, and make its device Paddle's default for new tensors.

    An operator without a kernel runs its reference, with one warning that names it.
    """
    global _selected
    backend.load()
    backend.activate()
    _selected = backend
    _reference_names.clear()
    for entry in _entries.values():
        _select(entry, backend, failing)
    logger.info("operators: device %s, %s", backend.device, backend.describe())


def selected_backend() -> Backend:
    """Return the backend in use, that of the CPU unless another one was selected."""
    return _selected or select_backend(DEFAULT_DEVICE)


def activate_device() -> None:
    """Make the device of the backend in use the one of the calling thread; before one is selected, do nothing."""
    if _selected is not None:
        _selected.activate()


def _select(entry: OpEntry, backend: Backend, failing: Collection[str] = ()) -> None:
    kernel = None if entry.name in failing else backend.kernels.get(entry.name)
    if kernel is None and entry.has_fallback:
        why = "does not use its" if entry.name in failing else "has no"
        logger.warning(
            "operator %s %s %s kernel and runs its Paddle reference: exact: false", entry.name, why, backend.device
        )
        _reference_names.add(entry.name)
    entry.run = kernel or backend.adapt_reference(entry.reference)


def reference_names() -> list[str]:
    """Return the operators that run their reference, because the selected backend has no kernel for them."""
    return sorted(_reference_names)


def missing_kernels(names: Iterable[str]) -> list[str]:
    """Return those of these operators for which the selected backend has no kernel."""
    kernels = selected_backend().kernels
    return [name for name in names if name not in kernels]


def is_exact() -> bool:
    """Return whether every operator runs a native kernel, whose rows do not depend on each other."""
    return not _reference_names
