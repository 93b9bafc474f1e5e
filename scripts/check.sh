#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the tools that check sources and documents, runs every check and names those that failed: bash scripts/check.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

failed=()
check() { # check NAME COMMAND...: run a check and record whether it failed
    echo "== $1"
    "${@:2}" || failed+=("$1")
}

export FD_BUILD_PATHS=all # as for the tests, so that both use one library
ensure_environment "dev"
cd "$ROOT"
PATH="$VENV/bin:$PATH"
mapfile -t native_sources < <(find custom_ops tests -name '*.cc' -o -name '*.cu' -o -name '*.h' | sort)
check "ruff" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "clang-format" clang-format --dry-run --Werror "${native_sources[@]}"
[ "$(uname -m)" != x86_64 ] || check "hadolint" hadolint scripts/deploy/Dockerfile # has no package for others
check "import rules" python -m pytest -q tests/test_import_rules.py
check "sizes, vocabulary, documents" python scripts/check_rules.py
if [ ${#failed[@]} -gt 0 ]; then
    printf 'fastdeploy: check failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "fastdeploy: all checks passed"
