# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: finds the prerequisites that pip cannot bring, makes .venv, installs into it.
# A stamp in .venv names the sources of the installation, so that a second start installs nothing.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

missing() { # one line that names what is missing and how to get it
    echo "fastdeploy: missing: $1" >&2
    exit 1
}

is_supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() { # print the first Python that is supported; $PYTHON is asked first
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11 python3.10; do
        if [ -n "$candidate" ] && is_supported_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    missing "Python 3.10, 3.11 or 3.12 (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"
}

check_prerequisites() { # check_prerequisites PYTHON
    "$1" -c 'import venv, ensurepip' 2>/dev/null ||
        missing "the venv module of $1 (Debian, Ubuntu: apt-get install python3-venv)"
    "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        missing "Python.h for $1 (Debian, Ubuntu: apt-get install python3-dev)"
    command -v "${CXX:-g++}" >/dev/null || missing "a C++17 compiler (Debian, Ubuntu: apt-get install g++)"
}

sources_digest() { # digest of everything that an installation depends on
    (
        cd "$ROOT"
        {
            echo "$1"
            cat requirements.txt pyproject.toml setup.py fastdeploy/version.py
            find custom_ops -type f -print0 | sort -z | xargs -0 cat
        } | sha256sum | cut -d' ' -f1
    )
}

ensure_environment() { # ensure_environment EXTRAS: .venv holds the package, editable, with these extras
    local extras="$1" python digest stamp
    stamp="$VENV/.installed-${extras:-base}"
    digest="$(sources_digest "$extras")"
    if [ -x "$VENV/bin/python" ] && is_supported_python "$VENV/bin/python" && [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then
        return
    fi
    python="$(find_python)"
    check_prerequisites "$python"
    if ! is_supported_python "$VENV/bin/python"; then
        echo "fastdeploy: making $VENV with $("$python" --version)" >&2
        "$python" -m venv --clear "$VENV"
    fi
    echo "fastdeploy: installing (a first time takes minutes)" >&2
    install_package "$extras"
    echo "$digest" >"$stamp"
}

install_package() { # without build isolation: it would fetch Paddle a second time
    local pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" 'setuptools>=77' wheel -r "$ROOT/requirements.txt"
    "${pip[@]}" --no-build-isolation -e "$ROOT${1:+[$1]}"
}
