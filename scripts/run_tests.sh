#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the tests need and runs them: bash scripts/run_tests.sh [pytest arguments]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_redis() { # for the tests of the Redis schedulers
    command -v redis-server >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        (apt-get update -qq && apt-get install -y -qq redis-server) >/dev/null 2>&1 || true
    fi
    command -v redis-server >/dev/null ||
        echo "fastdeploy: missing: redis-server (Debian, Ubuntu: apt-get install redis-server)" >&2
}

ensure_redis
export FD_BUILD_PATHS=all
ensure_environment "dev"
cd "$ROOT"
exec "$VENV/bin/python" -m pytest -q -n 2 --dist loadfile --max-worker-restart 0 "$@"
