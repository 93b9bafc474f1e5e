#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows two nodes at work: bash scripts/start_pd.sh
# A prefill node and a decode node with the demonstration model answer one request together. The same request is sent
# again, and the decode node is killed in the middle of the answer. A third time, the remaining node answers alone.
# All three texts are the same. Everything is ended and removed at the end.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

TOKENS=1200
KILL_AFTER=150 # events of the stream
folder=""
pids=()

end_all() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    while [ ${#pids[@]} -gt 0 ] && kill -0 "${pids[@]}" 2>/dev/null; do sleep 0.1; done
    [ -z "$folder" ] || rm -rf "$folder"
}

fail() {
    echo "start_pd: $1" >&2
    [ -z "${2:-}" ] || tail -n 20 "$2" >&2
    exit 1
}

started() { # started PID: to be killed at the end, of which the shell says nothing
    pids+=("$1")
    disown "$1"
}

free_ports() { # print as many free ports as asked for
    "$VENV/bin/python" -c 'import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in sockets))' "$1"
}

start_redis() {
    redis-server --bind 127.0.0.1 --port "$redis_port" --save '' --appendonly no --dir "$folder" >"$folder/redis.log" &
    started $!
}

start_node() { # start_node ROLE PORT
    "$VENV/bin/fastdeploy" serve --config "$ROOT/benchmarks/yaml/demo-mtp-$1.yaml" --host 127.0.0.1 \
        --port "$2" --metrics-port "$2" --scheduler-port "$redis_port" >"$folder/$1.log" 2>&1 &
    started $!
}

wait_for() { # wait_for WHAT LOG COMMAND...: try the command for two minutes
    local what="$1" log="$2" tries
    shift 2
    for ((tries = 0; tries < 1200; tries++)); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    fail "$what" "$log"
}

sees_both_nodes() { # sees_both_nodes PORT
    curl -sf "http://127.0.0.1:$1/health" | grep -q '"cluster": *"ok"'
}

PROMPT='class Stack:
    """A stack of items: the last one that was pushed is the first one that is popped."""

    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)


class Queue:
'
ask() { # ask FILE: stream one answer of the prefill node into a file
    "$VENV/bin/python" -c 'import json, sys
print(json.dumps({"model": "default", "prompt": sys.argv[1], "max_tokens": int(sys.argv[2]), "stream": True,
                  "ignore_eos": True, "seed": 2, "temperature": 0.8}))' "$PROMPT" "$TOKENS" |
        curl -sSN "http://127.0.0.1:$prefill_port/v1/completions" -H 'Content-Type: application/json' -d @- >"$1"
}

num_events() {
    grep -cs '^data: ' "$1" || true
}

text_of() { # print the text of a streamed answer; fail if it is not whole
    "$VENV/bin/python" -c 'import json, sys
events = [line[6:] for line in open(sys.argv[1], encoding="utf-8") if line.startswith("data: ")]
assert events and events[-1].strip() == "[DONE]", "the stream has no end: " + "".join(events[-1:])
print("".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]))' "$1"
}

moved_bytes() { # bytes of KV cache that the decode node has taken over
    curl -sf "http://127.0.0.1:$decode_port/metrics" |
        awk '/^fastdeploy:kv_transfer_bytes_total\{.*direction="in"/ {sum += $2} END {printf "%d", sum}'
}

has_moved_bytes() {
    [ "$(moved_bytes)" -gt 0 ]
}

answer_and_kill() { # answer_and_kill FILE: ask, and kill the decode node in the middle
    touch "$1"
    ask "$1" &
    local client=$!
    while [ "$(num_events "$1")" -lt $KILL_AFTER ]; do
        kill -0 "$client" 2>/dev/null || fail "the answer ended before the decode node was killed" "$1"
    done
    kill -9 "$decode_pid"
    echo "   killed the decode node after $(num_events "$1") events; the stream goes on"
    wait "$client" || fail "the client's connection broke" "$1"
}

export FD_BUILD_PATHS="${FD_BUILD_PATHS:-native}"
command -v redis-server >/dev/null || missing "redis-server 7.0 or later (Debian, Ubuntu: apt-get install redis-server)"
command -v curl >/dev/null || missing "curl (Debian, Ubuntu: apt-get install curl)"
ensure_environment ""
folder="$(mktemp -d)"
trap end_all EXIT
read -r redis_port prefill_port decode_port < <(free_ports 3)

echo "1. Start Redis on port $redis_port, a prefill node on $prefill_port and a decode node on $decode_port."
start_redis
start_node prefill "$prefill_port"
start_node decode "$decode_port"
decode_pid="${pids[-1]}"
wait_for "the prefill node does not start" "$folder/prefill.log" sees_both_nodes "$prefill_port"
wait_for "the decode node does not start" "$folder/decode.log" sees_both_nodes "$decode_port"

echo "2. Ask the prefill node for $TOKENS tokens. It computes the prompt, the decode node goes on."
ask "$folder/first"
wait_for "no KV cache has moved" "$folder/decode.log" has_moved_bytes # metrics are a little late
echo "   $(num_events "$folder/first") events; $(moved_bytes) bytes of KV cache moved to the decode node"

echo "3. Ask again, and kill the decode node in the middle (kill -9)."
answer_and_kill "$folder/second"
echo "   $(num_events "$folder/second") events"

echo "4. Ask a third time. The prefill node is alone now."
ask "$folder/alone"

for name in first second alone; do
    text_of "$folder/$name" >"$folder/$name.txt" || fail "the answer '$name' is not whole" "$folder/$name"
done
echo "5. The beginning of the text:"
head -n 12 "$folder/first.txt" | sed 's/^/   | /'
cmp "$folder/first.txt" "$folder/alone.txt" || fail "two nodes and one gave different texts"
cmp "$folder/second.txt" "$folder/alone.txt" || fail "the text changed when the decode node was killed"
echo "All three texts are the same, $(wc -c <"$folder/alone.txt") bytes."
