# SPDX-License-Identifier: Apache-2.0
"""The engine process: it waits for the process that started it, builds the engine and serves it."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import signal
import sys
from collections.abc import Callable

import msgspec
import zmq

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.env import read_env
from fastdeploy.core.errors import ConfigError, DeviceError
from fastdeploy.core.faults import arm
from fastdeploy.core.process import die_with_parent, is_out_of_memory, write_stacks_on_signal
from fastdeploy.engine.engine_server import EngineLike, EngineServer
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import OWNER
from fastdeploy.ipc.heartbeat import start_heartbeat
from fastdeploy.kv_cache.arena_socket import arena_file, serve_arena
from fastdeploy.metrics.logs import set_up_engine_logging
from fastdeploy.metrics.stats_log import StatsLog
from fastdeploy.ops.startup import prepare

logger = logging.getLogger("fastdeploy.engine")


def main() -> int:
    """Run the process; return its exit status: 0 after a shutdown, 1 for a failed device, 2 for a configuration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--factory", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    write_stacks_on_signal()
    start_heartbeat(args.address)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server finishes its requests, then sends `Shutdown`
    env = read_env()
    set_up_engine_logging(env)
    arm(env.faults)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set_hwm(0)  # no limit, since a ROUTER drops messages if a queue is full
        socket.bind(args.address)
        clients = _wait_for_owner(socket)
        stats_log = None if config.disable_log_stats else StatsLog(env.log_format == "json")
        return _serve(config, args, socket, clients, stats_log)


def _serve(
    config: EngineConfig,
    args: argparse.Namespace,
    socket: zmq.Socket[bytes],
    clients: set[bytes],
    stats_log: StatsLog | None,
) -> int:
    def on_progress(what: str, fraction: float) -> None:
        socket.send_multipart([OWNER, messages.encode(messages.Progress(what, fraction))])

    try:
        prepare(config.device)
        engine = _import_factory(args.factory)(config, on_progress)
    except ConfigError as error:
        socket.send_multipart([OWNER, messages.encode(messages.StartupFailed(error.field, error.message))])
        return 2
    except DeviceError as error:
        message = messages.StartupFailed("device", str(error), is_configuration=False)
        socket.send_multipart([OWNER, messages.encode(message)])
        return 1
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.info("the engine cannot start", exc_info=error)
        reason = str(error).strip().splitlines()[0][:300] if str(error) else "no reason is given"
        text = f"not enough for the model and this configuration: {reason}"
        on_host = config.device == "cpu"
        failed = messages.StartupFailed("memory" if on_host else "device memory", text, is_configuration=on_host)
        socket.send_multipart([OWNER, messages.encode(failed)])
        return 2 if on_host else 1
    if engine.transfer is not None:
        serve_arena(engine.transfer.arena, arena_file(args.address))
    freeze_gc()
    try:
        EngineServer(engine, socket, clients, stats_log).run()
    except DeviceError as error:
        logger.error("the device failed: %s", error)
        return 1
    return 0


def freeze_gc() -> None:
    """Exclude all objects made so far from garbage collection, whose full passes would stall all streams."""
    gc.collect()
    gc.freeze()


def _wait_for_owner(socket: zmq.Socket[bytes]) -> set[bytes]:
    """Wait until the process that started this one has sent `Hello`; return all clients that have."""
    clients: set[bytes] = set()
    while OWNER not in clients:
        client, payload = socket.recv_multipart()
        if isinstance(messages.decode_to_engine(payload), messages.Hello):
            clients.add(bytes(client))
    return clients


def _import_factory(path: str) -> Callable[..., EngineLike]:
    """Return the function `module:name` that builds an engine."""
    module, _, name = path.partition(":")
    factory: Callable[..., EngineLike] = getattr(importlib.import_module(module), name)
    return factory


if __name__ == "__main__":
    sys.exit(main())
