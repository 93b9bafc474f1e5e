#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves the demonstration model with speculation on: bash scripts/quickstart.sh [flags of fastdeploy serve]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

show_how_to_ask() { # pass the server's output on; after its ready line, say what to paste
    local line url
    trap '' INT TERM # Ctrl-C is for the server; this ends when the server's output does
    while IFS= read -r line; do
        echo "$line"
        if [[ "$line" == "Ready: "* ]]; then
            url="${line#Ready: }"
            url="${url%% *}"
            cat <<EOF

Try it:
  curl -s $url/completions -H 'Content-Type: application/json' \\
    -d '{"model": "default", "max_tokens": 64, "temperature": 0.6, "seed": 2,
         "prompt": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"}'

EOF
        fi
    done
}

ensure_environment ""
exec "$VENV/bin/fastdeploy" serve --model demo \
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}' "$@" > >(show_how_to_ask)
