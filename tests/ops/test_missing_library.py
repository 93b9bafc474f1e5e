# SPDX-License-Identifier: Apache-2.0
"""The error about a missing native library says what to do in the situation that the user is in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fastdeploy.ops.missing_library import missing_library

NAME = "_cpu.so"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_package(tmp_path / "my checkout", has_library=False)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which Python looks for installations."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def make_package(folder: Path, has_library: bool) -> Path:
    (folder / "fastdeploy" / "ops").mkdir(parents=True)
    (folder / "setup.py").touch()
    if has_library:
        library_of(folder).touch()
    return folder


def library_of(folder: Path) -> Path:
    return folder / "fastdeploy" / "ops" / NAME


def install(site: Path, origin: dict[str, object] | None = None) -> None:
    """Write what pip writes about an installation."""
    (info := site / "fastdeploy-0.1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastdeploy\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


def test_a_checkout_that_hides_an_installed_package_says_where_that_is(checkout: Path, site: Path) -> None:
    install(site, {"url": checkout.as_uri(), "dir_info": {}})  # of `pip install .`
    (site / "fastdeploy" / "ops").mkdir(parents=True)
    library_of(site).touch()
    assert missing_library(library_of(checkout)) == (
        f"expected {NAME} in {checkout}/fastdeploy/ops, got none; this is the checkout, the installed package is at "
        f"{site}/fastdeploy: change the folder, or install the checkout with `pip install -e '{checkout}'`"
    )


def test_an_editable_installation_of_another_checkout_is_found(checkout: Path, site: Path, tmp_path: Path) -> None:
    other = make_package(tmp_path / "other checkout", has_library=True)
    install(site, {"url": other.as_uri(), "dir_info": {"editable": True}})
    assert f"the installed package is at {other}/fastdeploy:" in missing_library(library_of(checkout))


def test_an_installation_without_the_library_is_not_offered(checkout: Path, site: Path) -> None:
    install(site, {"url": checkout.as_uri(), "dir_info": {"editable": True}})
    assert missing_library(library_of(checkout)).endswith(
        f"got none; build it with `pip install -e .` in the checkout {checkout} (needs g++ and Python.h)"
    )


def test_a_checkout_without_any_installation_says_how_to_build(checkout: Path, site: Path) -> None:
    assert "; build it with `pip install -e .` in the checkout" in missing_library(library_of(checkout))


def test_an_installed_package_without_its_library_is_to_be_reinstalled(site: Path) -> None:
    install(site)
    assert "; reinstall the package, or build it with" in missing_library(library_of(site))
