# SPDX-License-Identifier: Apache-2.0
"""Token embedding."""

from __future__ import annotations

from typing import TypeAlias

from paddle import Tensor

from fastdeploy.ops.embedding import embedding, packed_embedding
from fastdeploy.ops.linear import PackedLinear

Table: TypeAlias = Tensor | PackedLinear
"""[vocab_size, hidden_size], plain or packed in any form."""


def num_table_bytes(table: Table) -> int:
    """Return the bytes of a table."""
    return table.num_bytes if isinstance(table, PackedLinear) else int(table.size) * int(table.element_size())


class Embedding:
    """Looks up rows of a table, which may be the packed weight of the head that is tied to it."""

    __slots__ = ("table",)

    def __init__(self, table: Table) -> None:
        self.table = table

    def __call__(self, token_ids: Tensor, out: Tensor, num_rows: int) -> None:
        """Write the embeddings of token_ids [capacity] int32 to out [capacity, hidden_size]."""
        if isinstance(self.table, PackedLinear):
            packed_embedding(token_ids, self.table, out, num_rows)
        else:
            embedding(token_ids, self.table, out, num_rows)
