# SPDX-License-Identifier: Apache-2.0
"""The server: `python -m fastdeploy.entrypoints.openai.api_server [flags]` or `fastdeploy serve [flags]`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import prometheus_client
import uvloop
from prometheus_client import CollectorRegistry

from fastdeploy.config.args import ServeArgs, parse_serve_args
from fastdeploy.config.env import Env, read_env
from fastdeploy.config.resolve_flags import errors_name_the_origin
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import ConfigError, DeviceFailedError, EngineDeadError, error_lines
from fastdeploy.core.faults import arm
from fastdeploy.core.process import write_stacks_on_signal
from fastdeploy.core.standard_streams import open_standard_streams
from fastdeploy.entrypoints.openai.lifecycle import (
    announce_drain,
    drain,
    find_model,
    finish_streams,
    freeze_gc,
    joined_cluster,
    make_server,
    raise_file_limit,
    serving,
    stop_signal,
)
from fastdeploy.entrypoints.openai.listener import listening, url
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.startup_summary import (
    ProgressBar,
    print_first_line,
    server_rows,
    summary_lines,
)
from fastdeploy.entrypoints.openai.supervisor import Supervisor
from fastdeploy.hub.model_path import local_folder
from fastdeploy.ipc.child import DEFAULT_FACTORY
from fastdeploy.ipc.client import EngineClient
from fastdeploy.metrics.logs import AGENT_LOG, ENGINE_LOG, log_folder, set_up_logging
from fastdeploy.scheduler.agent_child import AgentChild
from fastdeploy.scheduler.agent_config import AgentConfig
from fastdeploy.scheduler.base import RequestScheduler


def main(argv: Sequence[str] | None = None, factory: str = DEFAULT_FACTORY) -> int:
    """Serve until SIGTERM; return the exit status.

    0: drained; 1: the engine died, or the device cannot be used; 2: the configuration cannot be used.
    """
    open_standard_streams()
    env = Env()
    write_stacks_on_signal()
    try:
        env = read_env()
        args = parse_serve_args(sys.argv[1:] if argv is None else argv, env, local_folder)
        args = replace(args, cluster=args.cluster.with_node_id())
        set_up_logging(env)
        arm(env.faults)
        raise_file_limit()
        print_first_line(args.engine.model)  # before the engine's process imports Paddle
        with errors_name_the_origin(args.provenance):
            return uvloop.run(_serve(args, env, factory))
    except (ConfigError, DeviceFailedError) as error:
        if env.debug:
            raise
        print(error_lines(error), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


async def _serve(args: ServeArgs, env: Env, factory: str) -> int:
    args = find_model(args)
    log_file = log_folder(env) / ENGINE_LOG if env.log_dir else None
    client = EngineClient(args.engine, log_file, factory, json_log=env.log_format == "json")
    agent = _make_agent(args, env, client)
    try:
        with listening(args.server) as listener:  # before the model loads: a port in use is reported at once
            stop = stop_signal()
            await client.launch()  # which reads the tokenizer, too, at the same time
            server = await _unless(stop, asyncio.to_thread(make_server, args, env, client))
            if server is None:
                return 0
            if args.server.workers > 1:
                return await _run_with_workers(server, client, agent, args, listener, stop)
            serve_metrics(args.server, server.registry)
            async with joined_cluster(server, args, client, worker=0), serving(server, listener):
                return await _run(server, client, agent, args, url(args.server, listener), stop)
    finally:
        if agent is not None:
            await agent.stop()
        await client.close()


async def _unless(stop: asyncio.Task[bool], making: Coroutine[Any, Any, ApiServer]) -> ApiServer | None:
    """Return what a coroutine returns; None if a signal ends the wait for it."""
    task = asyncio.create_task(making)
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    return await task if task.done() else None


def _make_agent(args: ServeArgs, env: Env, client: EngineClient) -> AgentChild | None:
    """Return the agent of a server that works with others."""
    if not args.cluster.is_clustered:
        return None
    steps = args.engine.scheduler
    graceful_s = args.server.drain_timeout_s
    config = AgentConfig(args.cluster, steps.max_num_seqs, steps.max_num_batched_tokens, graceful_s)
    log_file = log_folder(env) / AGENT_LOG if env.log_dir else None
    return AgentChild(config, client, log_file, json_log=env.log_format == "json")


async def _run(
    server: ApiServer,
    client: EngineClient,
    agent: AgentChild | None,
    args: ServeArgs,
    address: str,
    stop: asyncio.Task[bool],
) -> int:
    """Load the model and serve until a signal or the engine's end; return the exit status."""
    engine_dead = asyncio.create_task(client.wait_until_dead())
    try:
        if not await _load(server.scheduler, agent, stop):
            return 0
    except EngineDeadError:
        return print_engine_death(client)
    freeze_gc()
    announce(server, args, address, _processes(client, agent))
    await _wait_first({stop, engine_dead}, agent)
    if not engine_dead.done():
        announce_drain(server.limiter.num_inside, args.server.drain_timeout_s)
        await _drain_node(agent, drain(server, engine_dead))
    if engine_dead.done():
        await finish_streams(server, stop)
        return print_engine_death(client)
    return 0


async def _run_with_workers(
    server: ApiServer,
    client: EngineClient,
    agent: AgentChild | None,
    args: ServeArgs,
    listener: socket.socket,
    stop: asyncio.Task[bool],
) -> int:
    """Do the same as `_run` with separate API processes, which this process supervises."""
    engine_dead = asyncio.create_task(client.wait_until_dead())
    async with Supervisor(args, client, listener) as supervisor:
        serve_metrics(args.server, supervisor.registry)
        try:
            if not await _load(client, agent, stop):
                return 0
        except EngineDeadError as error:
            await supervisor.report_engine_death(str(error))
            return print_engine_death(client)
        worker_failed = asyncio.create_task(supervisor.wait_failed())
        workers_ready = asyncio.create_task(supervisor.wait_ready())
        events = {stop, engine_dead, worker_failed}
        await _wait_first({workers_ready, *events}, agent)
        if workers_ready.done():
            processes = _processes(client, agent, supervisor.process_ids)
            announce(server, args, url(args.server, listener), processes)
        await _wait_first(events, agent)
        if stop.done() and not engine_dead.done() and not worker_failed.done():
            announce_drain(supervisor.num_inside(), args.server.drain_timeout_s)
            await _drain_node(agent, supervisor.drain(engine_dead))
        if engine_dead.done():
            await supervisor.report_engine_death(str(client.dead_error))
            return print_engine_death(client)
        return 1 if worker_failed.done() else 0


async def _load(scheduler: RequestScheduler, agent: AgentChild | None, stop: asyncio.Task[bool]) -> bool:
    """Wait until the model is loaded and Redis is there, if it is used; return False if a signal ended the wait.

    Raises:
        ConfigError, DeviceFailedError, EngineDeadError: as `RequestScheduler.start`; ConfigError also if Redis cannot
            be used.
    """
    starting = asyncio.create_task(_start(scheduler, agent))
    try:
        await _wait_first({starting, stop}, agent)
    finally:
        if not starting.done():
            starting.cancel()
    if stop.done():
        return False
    await starting
    return True


async def _start(scheduler: RequestScheduler, agent: AgentChild | None) -> None:
    if agent is not None:
        await agent.start()
    await asyncio.gather(scheduler.start(ProgressBar().show), *(() if agent is None else (agent.wait_for_redis(),)))


async def _wait_first(events: set[asyncio.Task[Any]], agent: AgentChild | None) -> None:
    """Wait for one of several events; raise ConfigError if the agent refuses its configuration."""
    refused = set() if agent is None else {agent.refused}
    await asyncio.wait({*events, *refused}, return_when=asyncio.FIRST_COMPLETED)
    if agent is not None and agent.refused.done():
        raise agent.refused.result()


async def _drain_node(agent: AgentChild | None, own_clients: Coroutine[Any, Any, None]) -> None:
    """Hand over what belongs to other nodes, while this node's own clients are served."""
    handing_over = () if agent is None else (agent.drain(),)
    await asyncio.gather(*handing_over, own_clients)


def _processes(client: EngineClient, agent: AgentChild | None, workers: Sequence[int] = ()) -> dict[str, list[int]]:
    """Return the ids of all processes of this server by what they do."""
    children = {"API": list(workers), "engine": [client.process_id], "agent": [agent.process_id] if agent else []}
    return {"server": [os.getpid()], **{name: ids for name, ids in children.items() if ids}}


def announce(server: ApiServer, args: ServeArgs, address: str, processes: Mapping[str, Sequence[int]]) -> None:
    """Print the summary of the configuration, and the ready line with the server's address."""
    description = server.description()
    notes = [*args.notes, *description.get("notes", ()), *_sampling_note(server)]
    tool_calls = server.tool_parser.description
    rows = server_rows(args.server.keys, processes)
    print("\n".join(summary_lines(description, notes, args.cluster, tool_calls, rows)), flush=True)
    place = f" on {args.server.uds}" if args.server.uds else ""
    names = args.server.served_model_name
    models = f"model{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
    has_docs = not args.server.uds and not args.server.disable_fastapi_docs  # no browser opens a Unix socket
    docs = f"; documentation: {address}/docs, {address}/redoc" if has_docs else ""
    print(f"Ready: {address}/v1{place} ({models}){docs}", flush=True)


def print_engine_death(client: EngineClient) -> int:
    """Print the reason for the engine's end to stderr; return the exit status."""
    print(f"fastdeploy: error: {client.dead_error}; the last lines of its log:", file=sys.stderr)
    for line in client.log_tail():
        print(f"  | {line}", file=sys.stderr)
    sys.stderr.flush()
    return 1


def _sampling_note(server: ApiServer) -> list[str]:
    """Return a note about the sampling parameters whose defaults come from generation_config.json, or replace these."""
    values = ", ".join(f"{name} {value}" for name, value in server.defaults.sampling_values().items())
    config = server.engine_config
    sources = [
        *(["generation_config.json"] if config.generation_config == "auto" else []),
        *(["--override-generation-config"] if config.override_generation_config else []),
    ]
    hint = "" if config.generation_config == "none" else " (--generation-config none ignores the file)"
    return [f"defaults of requests, by {' and '.join(sources)}: {values}{hint}"] if values else []


def serve_metrics(config: ServerConfig, registry: CollectorRegistry) -> None:
    """Serve /metrics on an additional port, if one is configured.

    Raises:
        ConfigError: the port is in use.
    """
    port = config.metrics_port
    if port is None or port == config.port:
        return
    try:
        prometheus_client.start_http_server(port, config.host, registry)
    except OSError as error:
        raise ConfigError("--metrics-port", f"cannot listen on port {port}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
