#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the tools that check sources and documents, and runs all of them: bash scripts/check.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

status=0
check() { # check NAME COMMAND...: run a check; go on with the next one if it fails
    echo "== $1"
    "${@:2}" || status=1
}

export FD_BUILD_PATHS=all
ensure_environment "dev"
cd "$ROOT"
PATH="$VENV/bin:$PATH"
mapfile -t native_sources < <(find custom_ops tests -name '*.cc' -o -name '*.h' | sort)
check "ruff" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "clang-format" clang-format --dry-run --Werror "${native_sources[@]}"
check "import rules" python -m pytest -q tests/test_import_rules.py
check "sizes, vocabulary, documents" python scripts/check_rules.py
exit "$status"
