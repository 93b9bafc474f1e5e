#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels that a release publishes: bash scripts/build_wheel.sh [FOLDER]
# One for each Python (3.11, 3.12) of this machine, or for $PYTHON only, with all paths for processors and without a
# library for GPUs. They are written to FOLDER (dist), with the platform tag that auditwheel finds. libpaddle.so is not
# part of them: it comes with paddlepaddle, which they require.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
shopt -s inherit_errexit # the functions below run in command substitutions

WHEELS="$(realpath -m "${1:-$ROOT/dist}")"
export FD_BUILD_PATHS=all FD_BUILD_GPU=0

list_pythons() { # print $PYTHON, or every supported Python
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12}; do
        ! is_supported_python "$candidate" || echo "$candidate"
    done
}

print_requirements() { # print_requirements PYTHON: what a build needs besides a compiler, one a line
    "$1" - "$ROOT/pyproject.toml" <<'EOF'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    settings = tomllib.load(file)
print(*settings["build-system"]["requires"], *settings["project"]["optional-dependencies"]["wheel"], sep="\n")
EOF
}

has_requirements() { # has_requirements PYTHON: its environment has all of them
    print_requirements "$1" | "$1" -c 'import importlib.metadata, re, sys
for line in sys.stdin.read().split():
    name, relation, version = re.fullmatch(r"([\w-]+)(\W*)(.*)", line).groups()
    if importlib.metadata.version(name) != version and relation == "==":
        sys.exit(1)' 2>/dev/null
}

find_builder() { # find_builder PYTHON: print a Python of this version whose environment has the requirements
    local environment
    if has_requirements "$1"; then
        echo "$1"
        return
    fi
    environment="$ROOT/build/wheel-$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    [ -x "$environment/bin/python" ] || "$1" -m venv "$environment"
    echo "fastdeploy: installing what the build needs into $environment" >&2
    print_requirements "$1" >"$environment/requirements.txt"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -r "$environment/requirements.txt" >&2
    echo "$environment/bin/python"
}

build_wheel() { # build_wheel PYTHON: build a wheel, give it its platform tag, and print the file
    local python="$1" wheel
    folder="$(mktemp -d)" # not local: it is removed when the function has ended
    trap 'rm -r "$folder"' EXIT
    rm -rf "$ROOT"/build/lib.* "$ROOT"/build/bdist.* # what earlier builds left would become a part of the wheel
    (cd "$ROOT" && "$python" setup.py --quiet build_ext >&2) # first, because pip hides the progress
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$folder" "$ROOT" >&2
    PATH="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH" \
        "$python" -m auditwheel repair --exclude libpaddle.so --wheel-dir "$folder/repaired" "$folder"/fastdeploy-*.whl >&2
    mkdir -p "$WHEELS"
    for wheel in "$folder"/repaired/*.whl; do
        mv "$wheel" "$WHEELS"
        echo "$WHEELS/$(basename "$wheel")"
    done
}

pythons="$(list_pythons)"
[ -n "$pythons" ] || missing "Python 3.11 or 3.12 (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"
for python in $pythons; do
    check_prerequisites "$python"
    builder="$(find_builder "$python")"
    wheel="$(build_wheel "$builder")"
    tag="${wheel##*-}"
    echo "$wheel: platform tag ${tag%.whl}"
done
