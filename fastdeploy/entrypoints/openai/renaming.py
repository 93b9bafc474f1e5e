# SPDX-License-Identifier: Apache-2.0
"""Errors of a chat in the names of another protocol, whose body was translated into the chat's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from fastdeploy.core.errors import InvalidRequestError


@contextlib.contextmanager
def renamed_errors(rename: Callable[[str], str]) -> Iterator[None]:
    """Raise errors of the request with the field's name in the client's body.

    Args:
        rename: returns the client's name of a field of the chat.

    Raises:
        InvalidRequestError: of the same class, with the client's name of the field.
    """
    try:
        yield
    except InvalidRequestError as error:
        raise type(error)(rename(error.field), error.message) from None
