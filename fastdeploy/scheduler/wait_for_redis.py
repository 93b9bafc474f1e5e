# SPDX-License-Identifier: Apache-2.0
"""Waits for Redis at the start of a process, and checks that it can be used."""

from __future__ import annotations

import asyncio

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.store import Store, StoreError

START_S = 30.0
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 2.0


async def wait_for_redis(config: ClusterConfig) -> StoreError | None:
    """Wait until Redis answers; return why it does not, if it has not for 30 seconds.

    Raises:
        ConfigError: it can never be used with this configuration; see `Store.check_server`.
    """
    store = Store(config, Keys(config.scheduler_topic, ""))
    loop = asyncio.get_running_loop()
    give_up_at, back_off_s = loop.time() + START_S, FIRST_BACK_OFF_S
    try:
        while True:
            try:
                await store.check_server()
                return None
            except StoreError as error:
                if loop.time() + back_off_s > give_up_at:
                    return error
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)
    finally:
        await store.close()
