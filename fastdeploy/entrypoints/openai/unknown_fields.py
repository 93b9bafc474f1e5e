# SPDX-License-Identifier: Apache-2.0
"""Fields of requests that the server does not know: refused, unless `--ignore-unknown-fields` accepts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from typing import Any

MAX_LOGGED_NAMES = 100
MAX_NAME_LENGTH = 64

logger = logging.getLogger("fastdeploy.server")


class IgnoredFieldLog:
    """Logs each name of an ignored field once, and at most MAX_LOGGED_NAMES names, which clients choose."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._lock = threading.Lock()  # bodies are parsed in several threads

    def record(self, name: str) -> None:
        """Log that the field is ignored, unless its name has been logged before."""
        shown = ascii(name[:MAX_NAME_LENGTH])
        with self._lock:
            if shown in self._names or len(self._names) >= MAX_LOGGED_NAMES:
                return
            self._names.add(shown)
            num_names = len(self._names)
        logger.info("the unknown field %s is ignored (--ignore-unknown-fields)", shown)
        if num_names == MAX_LOGGED_NAMES:
            logger.info("further names of ignored fields are not logged")


IGNORED_FIELDS = IgnoredFieldLog()
"""The log of this process."""


def clean_object(path: str, given: Mapping[str, Any], known: Collection[str], ignores_unknown: bool) -> dict[str, Any]:
    """Return an object of a request without fields that are null, which count as absent.

    Args:
        path: of the object in the body, for the log.
        known: names of its fields.
        ignores_unknown: leave unknown fields out, too; otherwise they stay, for the check that refuses them.
    """
    kept = {}
    for name, value in given.items():
        if value is None:
            continue
        if ignores_unknown and name not in known:
            IGNORED_FIELDS.record(f"{path}.{name}")
        else:
            kept[name] = value
    return kept
