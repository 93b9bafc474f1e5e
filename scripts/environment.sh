# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: finds the prerequisites that pip cannot bring, makes .venv, installs into it.
# Stamps in .venv name the sources of the installation, so that a second start installs nothing. FD_BUILD_PATHS and
# FD_BUILD_GPU (see setup.py) are part of the library's stamp: tests never run on a library that holds one path only.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

missing() { # one line that names what is missing and how to get it
    echo "fastdeploy: missing: $1" >&2
    exit 1
}

is_supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() { # print the first supported Python; $PYTHON has precedence
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11; do
        if [ -n "$candidate" ] && is_supported_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    missing "Python 3.11 or 3.12 (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"
}

check_prerequisites() { # check_prerequisites PYTHON
    "$1" -c 'import venv, ensurepip' 2>/dev/null ||
        missing "the venv module of $1 (Debian, Ubuntu: apt-get install python3-venv)"
    "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        missing "Python.h for $1 (Debian, Ubuntu: apt-get install python3-dev)"
    command -v "${CXX:-g++}" >/dev/null || missing "a C++17 compiler (Debian, Ubuntu: apt-get install g++)"
}

digest_of() { # digest_of FILE...: digest of the files' contents
    (cd "$ROOT" && cat "$@" | sha256sum | cut -d' ' -f1)
}

native_digest() { # digest of everything that the native libraries depend on, the paths to build excepted
    (cd "$ROOT" && { cat setup.py fastdeploy/version.py && find custom_ops -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 cat; }) |
        sha256sum | cut -d' ' -f1
}

is_stamped() { # is_stamped STAMP TEXT...: the stamp holds one of the texts
    local stamp="$VENV/$1" text
    shift
    for text in "$@"; do
        [ "$(cat "$stamp" 2>/dev/null)" = "$text" ] && return
    done
    return 1
}

ensure_venv() { # .venv exists, with a supported Python
    local python
    if is_supported_python "$VENV/bin/python"; then
        return
    fi
    python="$(find_python)"
    check_prerequisites "$python"
    echo "fastdeploy: making $VENV with $("$python" --version)" >&2
    "$python" -m venv --clear "$VENV"
}

ensure_environment() { # ensure_environment EXTRAS: .venv holds the package, editable, with these extras
    local extras="$1" package library python gpu="${FD_BUILD_GPU:-0}"
    export FD_BUILD_PATHS="${FD_BUILD_PATHS:-all}"
    package="$(digest_of requirements.txt pyproject.toml setup.py fastdeploy/version.py)"
    library="$(native_digest)"
    if is_supported_python "$VENV/bin/python" && is_stamped ".installed-${extras:-base}" "$package" &&
        is_stamped .library "$library all $gpu" "$library $FD_BUILD_PATHS $gpu"; then
        return
    fi
    python="$(find_python)"
    check_prerequisites "$python"
    ensure_venv
    rm -f "$VENV/.library"
    install_package "$extras"
    echo "$package" >"$VENV/.installed-${extras:-base}"
    echo "$library $FD_BUILD_PATHS $gpu" >"$VENV/.library"
}

install_package() { # without build isolation: it would fetch Paddle a second time
    local pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
    echo "fastdeploy: installing dependencies (the first time takes minutes)" >&2
    "${pip[@]}" 'setuptools>=77' wheel -r "$ROOT/requirements.txt"
    echo "fastdeploy: compiling the operators for the paths '$FD_BUILD_PATHS' (only what has changed)" >&2
    (cd "$ROOT" && "$VENV/bin/python" setup.py --quiet build_ext) # first, because pip hides the progress
    "${pip[@]}" --no-build-isolation -e "$ROOT${1:+[$1]}"
}
