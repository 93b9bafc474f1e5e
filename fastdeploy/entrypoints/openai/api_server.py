# SPDX-License-Identifier: Apache-2.0
"""The server's process: `python -m fastdeploy.entrypoints.openai.api_server [flags]` and `fastdeploy serve [flags]`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import prometheus_client
import uvicorn
import uvloop

from fastdeploy.config.args import ServeArgs, parse_serve_args
from fastdeploy.config.env import Env, read_env
from fastdeploy.config.model_config import ModelConfig, resolve_model_path
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import ConfigError, EngineDeadError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.app import make_app
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.summary import ProgressBar, summary_lines
from fastdeploy.ipc.child import DEFAULT_FACTORY
from fastdeploy.ipc.client import EngineClient
from fastdeploy.metrics.logs import ENGINE_LOG, log_folder, set_up_logging

BACKLOG = 2048
DRAIN_POLL_S = 0.05
LAST_ANSWERS_S = 1.0  # for the errors of a dead engine to reach their clients


def main(argv: Sequence[str] | None = None, factory: str = DEFAULT_FACTORY) -> int:
    """Serve until SIGTERM; return the exit status: 0 drained, 1 the engine died, 2 something given cannot be used."""
    env = Env()
    try:
        env = read_env()
        args = parse_serve_args(sys.argv[1:] if argv is None else argv, env)
        set_up_logging(env)
        return uvloop.run(_serve(args, env, factory))
    except ConfigError as error:
        if env.debug:
            raise
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        return 2


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signal handlers: this module decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(args: ServeArgs, env: Env, factory: str) -> int:
    server = _make_server(args, env, factory)
    listener = bind(args.server)  # before the model loads: a port that is taken is known at once
    _serve_metrics(server)
    web = _make_web(server, args.server)
    web_task = asyncio.create_task(web.serve(sockets=[listener]))
    try:
        return await _live(server, args, url(args.server, listener))
    finally:
        web.should_exit = True
        await web_task
        await server.client.close()


async def _live(server: ApiServer, args: ServeArgs, address: str) -> int:
    """Load, serve, and return the exit status when it is time to end."""
    stopping, dying = _stop_signal(), asyncio.create_task(server.client.wait_dead())
    starting = asyncio.create_task(server.client.start(ProgressBar().show))
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        starting.cancel()
        return 0
    try:
        await starting
    except EngineDeadError:
        return _report_death(server.client)
    print("\n".join(summary_lines(server.description(), [*args.notes, *_sampling_note(server)])), flush=True)
    print(f"Ready: {address}/v1 (model {server.model_name!r})", flush=True)
    await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    if not dying.done():
        await _drain(server, dying)
    if dying.done():
        await _wait_empty(server, LAST_ANSWERS_S)
        return _report_death(server.client)
    return 0


async def _drain(server: ApiServer, dying: asyncio.Task[None]) -> None:
    """Take no new requests; wait for the running ones, at most for the graceful time, then abort what is left."""
    server.is_draining = True
    print(f"Shutting down: {server.gate.num_inside} requests are running", flush=True)
    emptied = asyncio.create_task(_wait_empty(server, server.config.timeout_graceful_shutdown or None))
    await asyncio.wait({emptied, dying}, return_when=asyncio.FIRST_COMPLETED)
    emptied.cancel()
    if server.gate.num_inside and not dying.done():
        server.client.abort_all()
        await _wait_empty(server, LAST_ANSWERS_S)


async def _wait_empty(server: ApiServer, timeout_s: float | None) -> None:
    async def poll() -> None:
        while server.gate.num_inside:
            await asyncio.sleep(DRAIN_POLL_S)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(poll(), timeout_s)


def _stop_signal() -> asyncio.Task[bool]:
    """Return a task that ends at the first SIGTERM or SIGINT; a second one ends the process at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return asyncio.create_task(stop.wait())


def _report_death(client: EngineClient) -> int:
    print(f"fastdeploy: error: {client.death}; the last lines of its log:", file=sys.stderr)
    for line in client.log_tail():
        print(f"  | {line}", file=sys.stderr)
    sys.stderr.flush()
    return 1


def _make_server(args: ServeArgs, env: Env, factory: str) -> ApiServer:
    engine = args.engine
    folder = resolve_model_path(engine.model)
    generation_config = "none" if engine.generation_config == "none" else "auto"
    model_config = ModelConfig.from_pretrained(folder, dtype=engine.dtype, generation_config=generation_config)
    tokenizer = Tokenizer.from_pretrained(resolve_model_path(engine.tokenizer) if engine.tokenizer else folder)
    log_file = log_folder(env) / ENGINE_LOG if env.log_dir else None
    return ApiServer(
        config=args.server,
        engine_config=engine,
        client=EngineClient(engine, log_file, factory),
        tokenizer=tokenizer,
        defaults=model_config.generation,
        chat_template=_chat_template(args.server.chat_template),
        json_log=env.log_format == "json",
    )


def _chat_template(given: str) -> str | None:
    """Return the template's source: given itself, or in a file."""
    if not given:
        return None
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("--chat-template", f"cannot read {given!r}: {error.strerror}") from None


def _sampling_note(server: ApiServer) -> list[str]:
    """Say which sampling values come from the model's folder where a request is silent."""
    values = ", ".join(f"{name} {value}" for name, value in server.defaults.sampling_values().items())
    return [f"generation_config.json proposes {values} (--generation-config none ignores it)"] if values else []


def _make_web(server: ApiServer, config: ServerConfig) -> uvicorn.Server:
    return _Uvicorn(
        uvicorn.Config(
            make_app(server),
            lifespan="off",
            log_level="warning",
            access_log=False,
            root_path=config.root_path,
            ssl_keyfile=config.ssl_keyfile or None,
            ssl_certfile=config.ssl_certfile or None,
            timeout_graceful_shutdown=2,
        )
    )


def _serve_metrics(server: ApiServer) -> None:
    port = server.config.metrics_port
    if port is None or port == server.config.port:
        return
    try:
        prometheus_client.start_http_server(port, server.config.host, server.registry)
    except OSError as error:
        raise ConfigError("--metrics-port", f"cannot listen on port {port}: {error.strerror}") from None


def bind(config: ServerConfig) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError("--port", f"cannot listen on port {config.port} of {config.host}: {reason}") from None
    listener.setblocking(False)
    return listener


def url(config: ServerConfig, listener: socket.socket) -> str:
    """Return the address under which this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"


if __name__ == "__main__":
    sys.exit(main())
