# SPDX-License-Identifier: Apache-2.0
"""The examples of the registry on a device: against the reference, with known digests, and with poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from inspect import signature
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops import registry
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import NO_QUANTIZATION
from fastdeploy.ops.registry import Example, Lookup

OUTPUT = "out"  # the name of the parameter of what an operator only writes


def dtype_of(tensor: Tensor) -> str:
    """Return "bfloat16", "int32", ..."""
    return str(tensor.dtype).removeprefix("paddle.")


def wide(tensor: Tensor) -> NDArray:
    """Return the values on the host; bfloat16 as float32."""
    on_host = tensor.cpu()
    return np.array(on_host.astype("float32").numpy() if dtype_of(tensor) == "bfloat16" else on_host.numpy())


def taken_by(backend: str, name: str) -> list[int]:
    """Return the numbers of the examples of an operator that a backend takes."""
    examples = registry.entries()[name].examples
    return [index for index, example in enumerate(examples) if backend in registry.backends_of(example)]


def compute(example: Example, lookup: Lookup) -> list[tuple[str, NDArray]]:
    """Run an example; return dtype and values of its results."""
    return [(dtype_of(result), wide(result)) for result in example(lookup)]


def compare(name: str, results: Sequence[tuple[str, NDArray]], expected: Sequence[tuple[str, NDArray]]) -> str:
    """Return how results differ from those of the reference by more than the tolerance, or an empty text."""
    tolerance = registry.entries()[name].tolerance
    for number, ((dtype, got), (_, want)) in enumerate(zip(results, expected, strict=True)):
        with np.errstate(invalid="ignore"):
            error = np.abs(got.astype(np.float64) - want) / (1 + np.abs(want.astype(np.float64)))
        error = np.where(np.isnan(got) & np.isnan(want), 0.0, error)
        allowed = tolerance.get(dtype, 0.0)
        if not (error <= allowed).all():
            return f"result {number} differs by {np.nanmax(error):.3g} (1 + |reference|), {allowed:.3g} are allowed"
    return ""


def digest(results: Sequence[tuple[str, NDArray]]) -> str:
    """Return 16 digits that name the bits of results; all NaNs are equal."""
    state = blake2b(digest_size=8)
    for _, values in results:
        canonical = np.where(np.isnan(values), np.float32(np.nan), values) if values.dtype.kind == "f" else values
        state.update(np.ascontiguousarray(canonical, dtype=values.dtype).tobytes())
    return state.hexdigest()


@dataclass
class Products:
    """A lookup that notes whether an example multiplies bfloat16 matrices, whose sums differ between architectures."""

    lookup: Lookup
    are_used: bool = False

    def __call__(self, name: str) -> Callable[..., Any]:
        """Return an operator that notes what it does."""
        operator = self.lookup(name)

        def run(*args: Any, **kwargs: Any) -> Any:
            layers = [argument for argument in args if isinstance(argument, PackedLinear)]
            is_plain = any(layer.quantization == NO_QUANTIZATION for layer in layers)
            self.are_used |= name == "append_attention" or (name == "linear" and is_plain)
            return operator(*args, **kwargs)

        return run


@dataclass
class Poisoner:
    """A lookup of which one operator finds NaN, or an unlikely integer, in what it is to write.

    Attributes:
        poisoned: name of this operator.
        before: the outputs and what they held before.
    """

    lookup: Lookup
    poisoned: str
    before: list[tuple[Tensor, NDArray]] = field(default_factory=list)

    def __call__(self, name: str) -> Callable[..., Any]:
        """Return an operator; if it is the one, its output is poisoned before it runs."""
        if name != self.poisoned:
            return self.lookup(name)
        operator, parameters = self.lookup(name), list(signature(registry.entries()[name].reference).parameters)
        position = parameters.index(OUTPUT) if OUTPUT in parameters else None

        def run(*args: Any, **kwargs: Any) -> Any:
            if position is not None and isinstance(args[position], Tensor):
                self._poison(args[position])
            return operator(*args, **kwargs)

        return run

    def _poison(self, out: Tensor) -> None:
        self.before.append((out, wide(out)))
        out.copy_(paddle.full(out.shape, poison_of(dtype_of(out)), out.dtype), True)

    def find_error(self, example: Example, expected: Sequence[tuple[str, NDArray]]) -> str:
        """Run an example; return how its results differ from those without poison, or an empty text."""
        results = example(self)
        for number, (result, (dtype, want)) in enumerate(zip(results, expected, strict=True)):
            got, untouched = wide(result), np.zeros(want.shape, bool)
            for out, before in self.before:
                if out is result:
                    is_poison = np.isnan(got) if got.dtype.kind == "f" else got == poison_of(dtype)
                    untouched = is_poison & (before == want)
            if not np.array_equal(got[~untouched], want[~untouched], equal_nan=got.dtype.kind == "f"):
                return f"result {number} depends on what its memory held before"
        return ""


def poison_of(dtype: str) -> float:
    """Return a value that no kernel should read."""
    return float("nan") if "float" in dtype else 77
