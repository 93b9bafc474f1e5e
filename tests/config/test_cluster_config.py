# SPDX-License-Identifier: Apache-2.0
"""Flags of nodes that work together over Redis."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from fastdeploy.config.args import ServeArgs, engine_config_from_kwargs, parse_engine_args, parse_serve_args
from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.env import Env, child_environment, read_env, shown_variables
from fastdeploy.config.redis_url import masked
from fastdeploy.core.errors import ConfigError

SPLIT = "demo --scheduler-name splitwise "


def parse(flags: str, env: Env | None = None) -> ServeArgs:
    return parse_serve_args(shlex.split(flags), env)


def test_a_server_works_alone_by_default() -> None:
    args = parse("demo")
    assert args.cluster == ClusterConfig()
    assert not args.cluster.is_clustered and not args.engine.hands_over
    assert args.cluster.with_node_id().node_id == ""
    assert (args.cluster.scheduler_host, args.cluster.scheduler_port, args.cluster.scheduler_db) == (
        "127.0.0.1",
        6379,
        0,
    )


def test_defaults_of_a_node() -> None:
    cluster = parse(SPLIT).cluster
    assert cluster.is_clustered and cluster.is_split
    assert (cluster.splitwise_role, cluster.scheduler_topic, cluster.address) == (
        "mixed",
        "default",
        "redis://127.0.0.1:6379/0",
    )
    assert (cluster.scheduler_sync_period, cluster.scheduler_expire_period) == (500, 3000)
    assert (cluster.scheduler_ttl, cluster.scheduler_release_load_expire_period) == (900, 600)
    assert (cluster.scheduler_max_size, cluster.scheduler_max_waiting_time) == (-1, -1)
    assert (cluster.scheduler_max_attempts, cluster.scheduler_patience) == (3, 30)
    assert (cluster.splitwise_min_prompt, cluster.connectors) == (None, ("ipc",))


def test_only_nodes_of_splitwise_hand_requests_over() -> None:
    assert parse(SPLIT + "--splitwise-role decode").engine.hands_over
    assert not parse("demo --scheduler-name global").engine.hands_over
    assert parse("demo --scheduler-name global").cluster.is_clustered


def test_every_flag_reaches_its_field() -> None:
    flags = """--splitwise-role prefill --scheduler-host ::1 --scheduler-port 7000 --scheduler-db 2
        --scheduler-username me --scheduler-password sesame --scheduler-topic a.B_1- --scheduler-ttl 9000
        --scheduler-max-size 40
        --scheduler-max-waiting-time 2.5 --scheduler-sync-period 200 --scheduler-expire-period 600
        --scheduler-release-load-expire-period 60 --scheduler-max-attempts 5 --scheduler-patience -1
        --splitwise-min-prompt 0 --node-id n-1_a --cache-transfer-protocol ipc --kv-transfer-memory 64Mi"""
    args = parse(SPLIT + flags)
    assert args.notes == ()
    assert args.cluster == ClusterConfig(
        scheduler_name="splitwise",
        splitwise_role="prefill",
        scheduler_host="::1",
        scheduler_port=7000,
        scheduler_db=2,
        scheduler_username="me",
        scheduler_password="sesame",
        scheduler_topic="a.B_1-",
        scheduler_ttl=9000,
        scheduler_max_size=40,
        scheduler_max_waiting_time=2.5,
        scheduler_sync_period=200,
        scheduler_expire_period=600,
        scheduler_release_load_expire_period=60,
        scheduler_max_attempts=5,
        scheduler_patience=-1,
        splitwise_min_prompt=0,
        node_id="n-1_a",
        cache_transfer_protocol="ipc",
    )
    assert args.cluster.address == "redis://[::1]:7000/2"
    assert args.engine.cache.kv_transfer_memory == 64 * 2**20
    assert args.cluster.with_node_id() is args.cluster


def test_a_node_without_a_name_draws_one() -> None:
    first, second = (parse(SPLIT).cluster.with_node_id().node_id for _ in range(2))
    assert len(first) == 8 and int(first, 16) >= 0 and first != second


def test_the_configuration_reaches_child_processes_unchanged() -> None:
    args = parse(SPLIT + "--scheduler-password sesame --splitwise-min-prompt 3")
    assert msgspec.json.decode(msgspec.json.encode(args), type=ServeArgs) == args


@pytest.mark.parametrize(
    ("flags", "field", "message"),
    [
        ("--splitwise-role decode", "splitwise_role", "'decode' needs --scheduler-name splitwise"),
        ("--scheduler-name global --splitwise-role prefill", "splitwise_role", "needs --scheduler-name splitwise"),
        ("--scheduler-name dp", "scheduler_name", "expected one of local, global, splitwise, got 'dp'"),
        (SPLIT + "--splitwise-role draining", "splitwise_role", "prefill, decode, mixed, got 'draining'"),
        (SPLIT + "--scheduler-port 0", "scheduler_port", r"an integer in \[1, 65535\], got 0"),
        (SPLIT + "--scheduler-db -1", "scheduler_db", "got -1"),
        (SPLIT + "--scheduler-topic a{b}", "scheduler_topic", "1 to 64 letters, digits, dots, hyphens or underscores"),
        (SPLIT + "--scheduler-topic=", "scheduler_topic", "got ''"),
        (SPLIT + "--node-id a.b", "node_id", "1 to 64 letters, digits, hyphens or underscores, got 'a.b'"),
        (SPLIT + f"--node-id {'a' * 65}", "node_id", "1 to 64"),
        (SPLIT + "--scheduler-max-size 0", "scheduler_max_size", r"an integer in \[1, \d+\], or -1, got 0"),
        (SPLIT + "--scheduler-max-waiting-time 0", "scheduler_max_waiting_time", "or -1, got 0.0"),
        (SPLIT + "--scheduler-max-waiting-time inf", "scheduler_max_waiting_time", "or -1, got inf"),
        (SPLIT + "--scheduler-patience -2", "scheduler_patience", "or -1, got -2.0"),
        (SPLIT + "--scheduler-max-attempts 0", "scheduler_max_attempts", "got 0"),
        (SPLIT + "--scheduler-sync-period 0", "scheduler_sync_period", "got 0"),
        (SPLIT + "--scheduler-ttl soon", "--scheduler-ttl", "expected an integer, got 'soon'"),
        (SPLIT + "--splitwise-min-prompt -1", "splitwise_min_prompt", "got -1"),
        (
            SPLIT + "--scheduler-expire-period 1400",
            "scheduler_expire_period",
            "at least 3 times scheduler_sync_period 500, got 1400",
        ),
        (
            SPLIT + "--scheduler-ttl 2",
            "scheduler_ttl",
            "at least scheduler_expire_period 3000 milliseconds, got 2 seconds",
        ),
        (SPLIT + "--cache-transfer-protocol rdma", "cache_transfer_protocol", "rdma is not available yet"),
        (SPLIT + "--cache-transfer-protocol rdma,tcp", "cache_transfer_protocol", "rdma and tcp are not available yet"),
        (SPLIT + "--cache-transfer-protocol nccl,ipc", "cache_transfer_protocol", "list of ipc, rdma, tcp, got 'nccl'"),
        (SPLIT + "--pd-comm-port 70000", "--pd-comm-port", r"ports in \[1, 65535\], separated by commas, got '70000'"),
        (SPLIT + "--rdma-comm-ports 1,,2", "--rdma-comm-ports", "separated by commas"),
        (SPLIT + "--router a:1", "--router a:1", "nodes find each other through Redis"),
        ("--kv-transfer-config {}", "--kv-transfer-config", "use --scheduler-name splitwise"),
        (
            SPLIT + "--scheduler-url redis://h --scheduler-host h",
            "scheduler_host",
            "cannot be combined with --scheduler-url, which replaces it",
        ),
        (
            SPLIT + "--scheduler-url redis://h --scheduler-port 6379",
            "scheduler_port",
            "cannot be combined with --scheduler-url",
        ),
        (SPLIT + "--scheduler-url http://h", "scheduler_url", "redis://, rediss://, unix://, sentinel://, cluster://"),
        (SPLIT + "--scheduler-url redis://", "scheduler_url", "expected a URL"),
        (SPLIT + "--scheduler-url redis://h:99999", "--scheduler-url", r"with a port in \[1, 65535\]$"),
        (SPLIT + "--scheduler-url redis://u:sesame", "--scheduler-url", r"expected HOST or HOST:PORT, with a port in"),
        (SPLIT + "--scheduler-url rediss://h?ca=/no/such", "--scheduler-url", "there is no file '/no/such'"),
        (SPLIT + "--scheduler-url redis://a,b", "--scheduler-url", "has several hosts"),
        (SPLIT + "--scheduler-password-file /no/such", "--scheduler-password-file", "cannot read '/no/such': No such"),
    ],
)
def test_mistakes_are_one_line_that_names_the_flag(flags: str, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(flags if flags.startswith("demo") else "demo " + flags)
    assert caught.value.field == field
    assert "\n" not in str(caught.value) and "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "notes"),
    [
        ("--scheduler-name local --splitwise-role mixed", []),
        ("--scheduler-host h", ["--scheduler-host has no effect: it needs --scheduler-name global or splitwise"]),
        (
            "--scheduler-ttl 5 --node-id a",
            ["--scheduler-ttl, --node-id have no effect: they need --scheduler-name global or splitwise"],
        ),
        (
            "--scheduler-name global --kv-transfer-memory 1Gi --splitwise-min-prompt 7 --scheduler-ttl 50",
            ["--splitwise-min-prompt, --kv-transfer-memory have no effect: they need --scheduler-name splitwise"],
        ),
        (
            SPLIT + "--scheduler-sync-period 5",
            ["--scheduler-sync-period: less than 100 milliseconds counts as 100"],
        ),
        (
            SPLIT + "--cache-transfer-protocol rdma,ipc,tcp",
            ["--cache-transfer-protocol: rdma and tcp are not available yet, so KV blocks are transferred by ipc"],
        ),
        (
            SPLIT + "--pd-comm-port 2334 --rdma-comm-ports 7671,7672",
            [
                "--pd-comm-port 2334 has no effect: KV blocks cannot be transferred between hosts yet",
                "--rdma-comm-ports 7671,7672 has no effect: KV blocks cannot be transferred between hosts yet",
            ],
        ),
        (
            SPLIT + "--scheduler-reader-parallel 4 --scheduler-writer-batch-size 200",
            [
                "--scheduler-reader-parallel 4 has no effect: nodes take as many requests as they have room for",
                "--scheduler-writer-batch-size 200 has no effect: nodes take as many requests as they have room for",
            ],
        ),
    ],
)
def test_what_has_no_effect_is_said_once(flags: str, notes: list[str]) -> None:
    assert parse(flags if flags.startswith("demo") else "demo " + flags).notes == tuple(notes)


def test_short_periods_count_as_100_milliseconds() -> None:
    cluster = parse(SPLIT + "--scheduler-sync-period 5 --scheduler-expire-period 300").cluster
    assert (cluster.scheduler_sync_period, cluster.scheduler_expire_period) == (100, 300)
    with pytest.raises(ConfigError, match="at least 3 times scheduler_sync_period 100, got 100"):
        parse(SPLIT + "--scheduler-sync-period 5 --scheduler-expire-period 99")


def test_periods_of_a_server_alone_are_not_compared() -> None:
    assert parse("demo --scheduler-expire-period 200").notes[0].startswith("--scheduler-expire-period has no effect")


def test_connectors_that_are_not_available_are_left_out() -> None:
    cluster = parse(SPLIT + "--cache-transfer-protocol 'tcp, ipc'").cluster
    assert (cluster.requested_connectors, cluster.connectors) == (("tcp", "ipc"), ("ipc",))


def test_ports_of_a_file_may_be_numbers_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\npd_comm_port: 2334\nrdma_comm_ports: [7671, '7672,7673']\n")
    assert [note.partition(" has")[0] for note in parse(f"--config {file}").notes] == [
        "pd_comm_port 2334",
        "rdma_comm_ports 7671,7672,7673",
    ]


def test_a_node_keeps_chunked_prefill_where_a_context_exceeds_a_step() -> None:
    flags = "--no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len "
    args = parse(SPLIT + flags + "4096")
    assert args.engine.scheduler.enable_chunked_prefill
    assert args.notes == (
        "--enable-chunked-prefill false has no effect: a node of a cluster computes contexts of 4096 tokens in "
        "steps of 2048",
    )
    fits = parse(SPLIT + flags + "2048")
    assert not fits.engine.scheduler.enable_chunked_prefill and fits.notes == ()
    with pytest.raises(ConfigError, match="at least max_model_len 4096"):
        parse("demo " + flags + "4096")


@pytest.mark.parametrize("name", ["scheduler_host", "splitwise_role", "node_id"])
def test_only_servers_have_these_flags(name: str) -> None:
    with pytest.raises(
        ConfigError, match="is refused, leave it out: it is a flag of the server, not an argument of LLM"
    ):
        engine_config_from_kwargs({"model": "demo", name: "mixed"})
    with pytest.raises(
        ConfigError, match="is refused, leave it out: it is a flag of the server, and this command runs none"
    ):
        parse_engine_args(["demo", f"--{name.replace('_', '-')}", "mixed"])


def test_an_engine_without_a_cluster_says_that_it_transfers_no_blocks() -> None:
    config, notes = engine_config_from_kwargs({"model": "demo", "kv_transfer_memory": "64Mi"})
    assert not config.hands_over
    assert notes == ("kv_transfer_memory has no effect: it needs --scheduler-name splitwise",)


# Secrets.


def test_the_password_comes_from_its_flag_else_its_file_else_the_environment(tmp_path: Path) -> None:
    file, env = tmp_path / "password", Env(scheduler_password="from-env")
    file.write_text("from-file\nnot this\n")
    file.chmod(0o600)
    args = parse(SPLIT, env)
    assert (args.cluster.scheduler_password, args.provenance["scheduler_password"]) == (
        "from-env",
        "FD_SCHEDULER_PASSWORD",
    )
    args = parse(SPLIT + f"--scheduler-password-file {file}", env)
    assert (args.cluster.scheduler_password, args.notes) == ("from-file", ())
    assert args.provenance["scheduler_password"] == "--scheduler-password-file"
    args = parse(SPLIT + "--scheduler-password given", env)
    assert (args.cluster.scheduler_password, args.provenance["scheduler_password"]) == ("given", "command line")
    assert parse(SPLIT + "--scheduler-url redis://a:b@h", env).cluster.scheduler_password == ""
    assert parse(SPLIT + "--scheduler-url redis://a@h", env).cluster.scheduler_password == "from-env"
    assert parse(SPLIT + "--scheduler-url redis://:b@h --scheduler-username a").cluster.scheduler_username == "a"
    alone = parse("demo", env)
    assert (alone.cluster, alone.notes) == (ClusterConfig(), ())


def test_a_password_file_that_others_may_read_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("sesame")
    file.chmod(0o644)
    assert parse(SPLIT + f"--scheduler-password-file {file}").notes == (
        f"--scheduler-password-file {file} is accessible to other users (mode 0644); `chmod 600` keeps the password "
        "secret",
    )


@pytest.mark.parametrize("content", [b"", b"\nsesame", b"\xff\xfe"])
def test_a_password_file_without_a_password_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is empty|is not in UTF-8") as caught:
        parse(SPLIT + f"--scheduler-password-file {file}")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--scheduler-password sesame --scheduler-password-file /no/such",
        "--scheduler-password sesame --scheduler-url redis://u:p@h",
        "--scheduler-username u --scheduler-url redis://v:sesame@h",
        "--scheduler-password-file /no/such --scheduler-url redis://:sesame@h",
    ],
)
def test_two_passwords_are_refused_and_not_shown(flags: str) -> None:
    with pytest.raises(ConfigError, match="cannot be combined") as caught:
        parse(SPLIT + flags)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/2", "redis://host:6379/2"),
        ("redis://user:sesame@host", "redis://***@host"),
        ("rediss://:sesame@host:1?tls=1&ca=/etc/ca.pem", "rediss://***@host:1?tls=1&ca=/etc/ca.pem"),
        ("sentinel://u:se@me@a:1,b:2/main/0", "sentinel://***@a:1,b:2/main/0"),
        ("redis://u:sesame?x/y@host", "redis://***@host"),
        ("redis://host?password=sesame", "redis://host?password=***"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("", ""),
    ],
)
def test_urls_are_shown_without_credentials(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_secrets_are_in_no_representation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_SCHEDULER_PASSWORD", "sesame")
    assert "FD_SCHEDULER_PASSWORD" not in child_environment()
    assert shown_variables()["FD_SCHEDULER_PASSWORD"] == "***"
    assert read_env().scheduler_password == "sesame" and "sesame" not in repr(read_env())
    from_env, from_url = parse(SPLIT, read_env()), parse(SPLIT + "--scheduler-url redis://u:sesame@h/3")
    for args in (from_env, from_url):
        assert "sesame" not in repr(args) + str(args.cluster.shown()) + args.cluster.address
    assert from_env.cluster.shown()["scheduler_password"] == "***"
    assert from_url.cluster.shown()["scheduler_url"] == "redis://***@h/3"
    assert from_url.cluster.address == "redis://***@h/3"
