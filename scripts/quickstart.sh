#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves the demonstration model with speculation on: bash scripts/quickstart.sh [flags of fastdeploy serve]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

print_first_request() { # pass the server's output on; after its ready line, print a request to paste
    local line url
    trap '' INT TERM # Ctrl-C stops the server; this loop ends when its output does
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

export FD_BUILD_PATHS="${FD_BUILD_PATHS:-native}"
ensure_environment ""
exec "$VENV/bin/fastdeploy" serve --model demo \
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}' "$@" > >(print_first_request)
