# SPDX-License-Identifier: Apache-2.0
"""What every API process does: build the server's state, run uvicorn, drain, and end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

import uvicorn
from starlette.routing import Route
from starlette.types import ASGIApp

from fastdeploy.config.args import ServeArgs
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.env import Env
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.resolve_flags import errors_name_the_origin
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import ConfigError, ErrorCollector, ShuttingDownError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.app import make_app
from fastdeploy.entrypoints.openai.connection_gate import ConnectionGate, RequestGuard
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.middleware import (
    OTHER,
    MetricsMiddleware,
    RequestIdMiddleware,
    RootPathMiddleware,
)
from fastdeploy.entrypoints.openai.own_templates import own_traits, read_chat_template
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.tool_parser_choice import choose_tool_parser
from fastdeploy.entrypoints.openai.web_server import make_web_server
from fastdeploy.hub.model_path import local_folder, resolve_model_path
from fastdeploy.ipc.connection import EngineConnection
from fastdeploy.scheduler.base import RequestScheduler

DRAIN_POLL_S = 0.05
LEAST_OPEN_FILES = 128  # a server has about 30 open before its first connection, and more while it starts
FINAL_RESPONSES_S = 1.0  # time to send the errors of a dead engine to the clients


def find_model(args: ServeArgs) -> ServeArgs:
    """Find the model, or download it, for all processes of the server; return the arguments with its folder.

    Raises:
        ConfigError: a flag or file cannot be used; names it.
    """
    problems, engine = ErrorCollector(), args.engine
    with errors_name_the_origin(args.provenance):
        with problems.collecting():
            _check_certificate(args.server)
        with problems.collecting():
            read_chat_template(args.server.chat_template)
        with problems.collecting():
            folder = _find_folder(engine, may_download=not problems.errors)
            if folder is not None:
                engine.check_model(folder)  # what the model does not support is refused before it is loaded
        problems.raise_all()
    assert folder is not None
    return replace(args, engine=replace(engine, model_folder=folder))


def _find_folder(engine: EngineConfig, may_download: bool) -> str | None:
    """Return the model's folder; None if there is none and it may not be downloaded, since the start has failed."""
    if may_download:
        return resolve_model_path(engine.model, engine.revision, gguf_file=engine.gguf_file)
    return local_folder(engine.model, engine.gguf_file)


def _read_config(args: ServeArgs) -> ModelConfig:
    return args.engine.read_model(args.engine.model_folder, reads_weights=False)


def make_server(args: ServeArgs, env: Env, scheduler: RequestScheduler, metrics_folder: str = "") -> ApiServer:
    """Read tokenizer and template, and return the state of an API process.

    Args:
        args: from `find_model`.
        metrics_folder: where several API processes store their metrics; empty for one process.

    Raises:
        ConfigError: a flag or file cannot be used; names it.
    """
    logging.getLogger("fastdeploy.request").disabled = args.server.disable_log_requests
    engine = args.engine
    tokenizer_folder = (
        resolve_model_path(engine.tokenizer, field="tokenizer") if engine.tokenizer else engine.model_folder
    )
    tokenizer = Tokenizer.from_pretrained(tokenizer_folder)
    chat_template = read_chat_template(args.server.chat_template)
    traits = own_traits(tokenizer.chat_templates, chat_template)
    return ApiServer(
        config=args.server,
        engine_config=engine,
        scheduler=scheduler,
        tokenizer=tokenizer,
        defaults=_read_config(args).generation,
        cluster=args.cluster,
        chat_template=chat_template,
        tool_parser=choose_tool_parser(args.server.tool_call_parser, traits),
        json_log=env.log_format == "json",
        provenance=args.provenance,
        metrics_folder=metrics_folder,
    )


@contextlib.asynccontextmanager
async def joined_cluster(
    server: ApiServer, args: ServeArgs, connection: EngineConnection, worker: int
) -> AsyncIterator[None]:
    """Let the requests of an API process run on all nodes until the block ends, if its configuration says so.

    Args:
        connection: to this node's engine.
        worker: number of the API process.
    """
    if not args.cluster.is_clustered:
        yield
        return
    from fastdeploy.scheduler.owner import ClusterScheduler  # it needs a client of Redis

    scheduler = ClusterScheduler(args.cluster, connection, worker, args.engine.seed, server.metrics.cluster)
    server.scheduler = scheduler
    try:
        yield
    finally:
        await scheduler.close()


@contextlib.asynccontextmanager
async def serving(server: ApiServer, listener: socket.socket) -> AsyncIterator[None]:
    """Serve requests on `listener` until the block ends."""
    web_server = _web_server(server, server.config)
    task = asyncio.create_task(web_server.serve(sockets=[listener]))
    try:
        yield
    finally:
        web_server.should_exit = True
        await task


def raise_file_limit() -> None:
    """Raise the limit on open connections to the maximum that the system allows this process.

    Raises:
        ConfigError: a server would fail below this maximum, wherever it opens the first file too many.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN_FILES:
        raise ConfigError("ulimit -n", f"expected a limit of at least {LEAST_OPEN_FILES} open files, got {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def freeze_gc() -> None:
    """Exclude the objects of start-up from garbage collection, whose full passes stall every stream."""
    gc.collect()
    gc.freeze()


async def drain(server: ApiServer, engine_dead: asyncio.Task[None]) -> None:
    """Accept no new requests; wait for the running ones up to the graceful timeout.

    Those that remain then end with ShuttingDownError: an event of a stream, or status 503.
    """
    server.is_draining = True
    emptied = asyncio.create_task(wait_empty(server, server.config.drain_timeout_s))
    await asyncio.wait({emptied, engine_dead}, return_when=asyncio.FIRST_COMPLETED)
    emptied.cancel()
    if server.limiter.num_inside and not engine_dead.done():
        name = "--timeout-graceful-shutdown" if server.config.shutdown_timeout is None else "--shutdown-timeout"
        error = f"the server shut down before the request was finished ({name} {server.config.drain_timeout_s:g})"
        server.scheduler.end_requests(ShuttingDownError(error))
        await wait_empty(server, FINAL_RESPONSES_S)


async def finish_streams(server: ApiServer, stop: asyncio.Task[bool]) -> None:
    """Wait until all clients have their responses, because the engine has died.

    With a cluster, streams that run on other nodes have the graceful timeout to end, or until a signal asks to stop.
    """
    scheduler = server.scheduler
    if server.cluster.is_clustered and scheduler.dead_error is not None:
        emptied = asyncio.create_task(wait_empty(server, server.config.drain_timeout_s))
        await asyncio.wait({emptied, stop}, return_when=asyncio.FIRST_COMPLETED)
        emptied.cancel()
        scheduler.end_requests(scheduler.dead_error)
    await wait_empty(server, FINAL_RESPONSES_S)


async def wait_empty(server: ApiServer, timeout_s: float | None) -> None:
    """Return when no request is running, or after `timeout_s` seconds."""

    async def poll() -> None:
        while server.limiter.num_inside:
            await asyncio.sleep(DRAIN_POLL_S)

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(poll(), timeout_s)


def announce_drain(num_requests: int, timeout_s: float | None) -> None:
    """Print what the server waits for after the first signal, and what the second does."""
    text = "Shutting down"
    if num_requests:
        limit = "" if timeout_s is None else f"up to {timeout_s:g} s "
        requests = "1 request" if num_requests == 1 else f"{num_requests} requests"
        text += f": waiting {limit}for {requests}; press Ctrl-C again to end at once"
        if timeout_s == 0:
            text = f"Shutting down: ending {requests}"
    print(text, flush=True)


def stop_signal() -> asyncio.Task[bool]:
    """Return a task that ends at the first SIGTERM or SIGINT; the second signal ends the process immediately."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return asyncio.create_task(stop.wait())


def _web_server(server: ApiServer, config: ServerConfig) -> uvicorn.Server:
    app = make_app(server)
    paths = [route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path]
    http_metrics = server.metrics.http

    def on_refused(error: ApiError, address: str) -> None:
        http_metrics.observe(OTHER, OTHER, error.status, 0.0)
        assert error.reason is not None
        server.metrics.refusals.record(error.reason, f"{error.status} {error.code} from {address or 'unknown address'}")

    gate = ConnectionGate(config, on_refused)
    outer: ASGIApp = MetricsMiddleware(RequestGuard(app, gate), http_metrics, paths)
    if config.enable_request_id_headers:
        outer = RequestIdMiddleware(outer)
    if config.root_path:
        outer = RootPathMiddleware(outer, config.root_path)
    return make_web_server(outer, gate)


def _check_certificate(config: ServerConfig) -> None:
    """Check that uvicorn can read the certificate and its key; a key with a password is refused."""
    if not config.ssl_certfile:
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except OSError as error:
        raise ConfigError(
            "--ssl-certfile", f"cannot use {config.ssl_certfile!r} with the key {config.ssl_keyfile!r}: {error}"
        ) from None
