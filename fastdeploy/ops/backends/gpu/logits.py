# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.logits`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch

_OPERATOR = "scatter_logits"


def scatter_logits(x: Tensor, ids: Tensor, out: Tensor, num_rows: int) -> None:
    """Write logits to their places; an id outside them is left out."""
    num_ids, vocab_size = x.shape[-1], out.shape[-1]
    require_dtype(_OPERATOR, "float32", x=x, out=out)
    require_dtype(_OPERATOR, "int32", ids=ids)
    require_length(_OPERATOR, num_ids, ids=ids)
    require_rows(_OPERATOR, num_rows, num_ids, x=x)
    require_rows(_OPERATOR, num_rows, vocab_size, out=out)
    launch("fd_scatter_logits", x, ids, out, *active().row_count(num_rows), num_ids, vocab_size)


KERNELS: dict[str, Callable[..., Any]] = {_OPERATOR: scatter_logits}
