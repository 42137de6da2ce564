#!/usr/bin/env bash
# The GPU check: on a bare CUDA machine it installs nothing, and each part ends within nine minutes.
#
#   bash benchmarks/gpu_check.sh [PART] [OUT_DIR] [flags of python -m benchmarks.PART]
#
# Without a PART: server, answers, load, training and kernels, one after the other; those behind a failed one run too.
#   server     `ragjax.serve` on the GPU answers a chat, twice, the second time from its cache
#   answers    the engine answers as on the CPU, every strategy (tests/engine/test_gpu.py; needs the extra dev)
#   load       tokens a second of 16 requests at once (benchmarks.load --part batch)
#   training   some steps of train.depft on the demo's graph (needs the extra train)
#   kernels    correctness of every kernel, then their speed: flags --quick, --platform cpu, --seconds N
#   e2e, peers, mesh   the same flags; whole models, other attention kernels, all GPUs beside one
# server, load and training take the packaged model, which is downloaded once. The reports of the others go to
# OUT_DIR/<date>-<device>-<part>.json (benchmarks/results, if not given), rewritten after every row; a part that is
# stopped, or had no time for all rows, goes on when it is started again. PYTHON names the interpreter.
# Exit code: 0 all right, 1 something is wrong or failed, 2 wrong usage, 124 or 137 ended after nine minutes.
set -euo pipefail
usage() {
    echo "usage: bash benchmarks/gpu_check.sh [server|answers|load|training|kernels|e2e|peers|mesh] [OUT_DIR] [flags]" >&2
    exit 2
}
part=all
if [ $# -ge 1 ]; then
    part=$1
    shift
fi
case $part in all | server | answers | load | training | kernels | e2e | peers | mesh) ;; *) usage ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "$part" = all ]; then
    failed=
    for one in server answers load training kernels; do
        echo "== $one"
        bash "${BASH_SOURCE[0]}" "$one" || failed="$failed $one"
    done
    echo "${failed:+failed:$failed}"
    [ -z "$failed" ]
    exit
fi
out=$root/benchmarks/results
if [ $# -ge 1 ] && [ "${1#-}" = "$1" ]; then
    mkdir -p "$1"
    out=$(cd "$1" && pwd)
    shift
fi
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=$(command -v python3 || command -v python) || { echo "no python3 on the PATH; name one: PYTHON=…" >&2; exit 2; }
fi
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
limit=()
command -v timeout >/dev/null && limit=(timeout --signal=INT --kill-after=10 525)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
run() { ${limit[@]+"${limit[@]}"} "$python" "$@"; }
case $part in
server)
    port=$((20000 + RANDOM % 20000))
    "$python" -m ragjax.serve --port "$port" "$@" &
    server=$!
    trap 'kill $server 2>/dev/null; rm -rf "$scratch"' EXIT
    run - "$port" "$server" <<'ASK'
import json, os, sys, time, urllib.request

url = f"http://127.0.0.1:{sys.argv[1]}"
body = {"messages": [{"role": "user", "content": "Who keeps the lighthouse?"}], "max_tokens": 16}
while True:  # until it serves; `os.kill` raises when the server has ended
    os.kill(int(sys.argv[2]), 0)
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5)
        break
    except OSError:
        time.sleep(1)
body["model"] = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
for _ in range(2):
    ask = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(ask))
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    print(f"{cached} of {answer['usage']['prompt_tokens']} tokens cached: {answer['choices'][0]['message']['content']!r}")
sys.exit(not cached)
ASK
    ;;
answers) RAGJAX_TEST_GPU=1 run -m pytest -q -m gpu tests/engine/test_gpu.py ;;
load) run -m benchmarks.load --part batch --quick "$@" ;;
training)
    run -m train.data graph ragjax/demo/facts.tsv --count 200 --out "$scratch/samples.jsonl"
    run -m train.depft --model smollm2-135m-instruct --preset small --data "$scratch/samples.jsonl" --out "$scratch/tuned" \
        --epochs 1 --stop-after 10 --no-progress "$@"
    ;;
*) run -m "benchmarks.$part" --out "$out" "$@" ;;
esac
