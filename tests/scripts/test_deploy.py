# SPDX-License-Identifier: Apache-2.0
"""The service file of systemd and the compose file start a server that exists, with flags that it takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.server_config import ServerConfig

DEPLOY = Path(__file__).resolve().parents[2] / "scripts" / "deploy"
UNIT = DEPLOY / "fastdeploy.service"
DRAIN_S = ServerConfig().drain_timeout_s or 0.0


@pytest.fixture
def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.read(UNIT)
    return parser


@pytest.fixture
def service() -> dict[str, Any]:
    """The only service of the compose file, with the defaults of its variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    (only,) = yaml.safe_load(text)["services"].values()
    return only


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/fastdeploy/bin/fastdeploy", "/bin/true"))  # verify looks for it
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr


def test_the_unit_serves_the_model_of_its_file(unit: ConfigParser, tmp_path: Path) -> None:
    (model,) = re.findall(r"echo '(.*)' > /etc/fastdeploy/server.yaml", UNIT.read_text())
    (tmp_path / "server.yaml").write_text(model)
    program, subcommand, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert (program, subcommand) == ("/opt/fastdeploy/bin/fastdeploy", "serve")
    flags = [flag.replace("/etc/fastdeploy", str(tmp_path)) for flag in flags]
    assert parse_serve_args(flags).engine.model == "demo"


def test_the_unit_leaves_time_to_drain_and_does_not_repeat_a_wrong_start(unit: ConfigParser) -> None:
    assert int(unit["Service"]["TimeoutStopSec"]) > DRAIN_S
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


def test_the_compose_file_builds_and_serves_what_is_in_the_checkout(service: dict[str, Any]) -> None:
    context = DEPLOY / service["build"]["context"]
    assert (context / service["build"]["dockerfile"]).is_file() and (context / "pyproject.toml").is_file()
    source, target, mode = service["volumes"][0].split(":")
    assert (DEPLOY / source / "config.json").is_file() and mode == "ro"
    args = parse_serve_args(service["command"])
    assert (args.engine.model, args.server.served_model_name) == (target, ("demo",))
    assert service["ports"] == [f"8000:{args.server.port}"]


def test_the_compose_file_leaves_time_to_drain(service: dict[str, Any]) -> None:
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_S
