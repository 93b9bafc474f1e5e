# SPDX-License-Identifier: Apache-2.0
"""A future for several others."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from typing import Any

from fastdeploy.engine.futures import all_done


def test_it_is_done_when_the_last_one_is() -> None:
    futures: list[Future[Any]] = [Future(), Future()]
    done = all_done(futures)
    assert done is not None
    futures[1].set_result(1)
    assert not done.done()
    futures[0].set_exception(ValueError("no"))
    assert done.done() and done.exception() is None
    assert all_done([]) is None and all_done(futures[:1]) is futures[0]


def test_futures_live_as_long_as_the_one_that_waits_for_them() -> None:
    futures: list[Future[Any]] = [Future(), Future()]
    references = [weakref.ref(future) for future in futures]
    done = all_done(futures)
    del futures
    gc.collect()
    assert all(reference() is not None for reference in references)
    del done
    gc.collect()
    assert not any(reference() for reference in references)
