#!/usr/bin/env bash
# The GPU check: on a bare CUDA machine it fetches nothing, and each part ends within its time.
#
#   bash benchmarks/gpu_check.sh [PART] [OUT_DIR] [--platform cpu] [--quick] [flags of python -m benchmarks.PART]
#
# A machine without a network, with Python 3.12, JAX and PyTorch, for half an hour: in this order.
#   1. pack       here: wheels and models in pieces, build/gpu/1-of-9 and so on (python -m benchmarks.pack --help)
#   2. carry the pieces into the same folders there; the first part that needs them puts them together (unpack)
#   3. server     5 min: `ragjax.serve` over HTTP, the packaged model and Llama-3-8B's shapes with random weights: start,
#                 memory, first tokens beside the bare runner's, attentions that fell back (benchmarks.served)
#   4. answers    5 min: every strategy as on the CPU (tests/engine/test_gpu.py; needs the extra dev)
#   5. load       9 min: requests a second of full, prefix, naive and the five papers' settings at 4K to 32K tokens
#   6. training   3 min: train.depft on the demo's graph: tokens a second and the share of the peak (extra train)
#   7. kernels    9 min: correctness of every kernel, then their speed
# Without a PART: 3 to 7, one after the other; those behind a failed one run too. Besides: e2e, mesh (whole models, all
# GPUs beside one).
# A rehearsal on any machine: `--platform cpu --quick`. Reports go to OUT_DIR/<date>-<device>-<part>.json
# (benchmarks/results, if not given), rewritten after every row. A part that is stopped, or had no time for all rows, goes
# on when it is started again. PYTHON names the interpreter. On an installed machine, 1 and 2 are left out.
# Exit code: 0 all right, 1 something is wrong or failed, 2 wrong usage, 124 or 137 ended after its time.
set -euo pipefail
usage() {
    echo "usage: bash benchmarks/gpu_check.sh [pack|unpack|server|answers|load|training|kernels|e2e|mesh] [OUT_DIR]" \
        "[flags]" >&2
    exit 2
}
part=all
if [ $# -ge 1 ] && [ "$1" != --platform ]; then
    part=$1
    shift
fi
case $part in
all | pack | unpack | answers | kernels | e2e | mesh) seconds=525 ;;
server) seconds=300 ;;
load) seconds=540 ;;
training) seconds=180 ;;
*) usage ;;
esac
[ "$part" = answers ] && seconds=300
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "$part" = all ]; then
    failed=
    for one in server answers load training kernels; do
        echo "== $one"
        bash "${BASH_SOURCE[0]}" "$one" "$@" || failed="$failed $one"
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
home=$root/build/gpu
unpack() {
    local pieces count
    pieces=$(ls -d "$home"/*-of-*/piece 2>/dev/null | sort -V || true)
    [ -n "$pieces" ] || return 0
    count=$(basename "$(dirname "${pieces%%$'\n'*}")")
    count=${count#*-of-}
    if [ "$(wc -l <<<"$pieces")" -ne "$count" ]; then
        echo "of $count pieces these are here: ${pieces//$'\n'/ }" >&2
        return 2
    fi
    echo "unpacking $count pieces" >&2
    rm -rf "$home/fresh" && mkdir -p "$home/fresh"
    cat $pieces | tar -x -C "$home/fresh" -f -
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$home/fresh/site" "$home"/fresh/wheels/*.whl
    rm -rf "$home/here" && mv "$home/fresh" "$home/here"
}
case $part in
pack) exec "$python" -m benchmarks.pack ${1+"$@"} ;;
unpack) unpack; exit ;;
esac
if ! "$python" -c 'import faiss, fastapi, pydantic, pyoxigraph' 2>/dev/null; then # else all is installed
    [ -d "$home/here" ] || unpack
    export PYTHONPATH=$root:$home/here/site:$PYTHONPATH RAGJAX_CACHE=$home/here/cache
fi
platform=cuda quick= rest=()
flags=("$@")
while [ $# -ge 1 ]; do
    case $1 in
    --platform) platform=${2:-}; shift ;;
    --quick) quick=--quick ;;
    *) rest+=("$1") ;;
    esac
    shift
done
case $part:$platform in
load:cuda | training:cuda) export JAX_PLATFORMS=cuda,cpu JAX_COMPILATION_CACHE_DIR=$home/programs ;;
server:cuda) export JAX_COMPILATION_CACHE_DIR=$home/programs ;;
server:cpu | load:cpu | training:cpu) export JAX_PLATFORMS=cpu ;;
esac
[ "$platform" = cuda ] || seconds=525
end=$((SECONDS + seconds))
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
run() { # in what is left of the part's time
    local limit=()
    if command -v timeout >/dev/null; then limit=(timeout --signal=INT --kill-after=10 $((end > SECONDS ? end - SECONDS : 1))); fi
    ${limit[@]+"${limit[@]}"} "$python" "$@"
}
case $part in
server) run -m benchmarks.served --seconds $((seconds - 60)) --out "$out" ${flags[@]+"${flags[@]}"} ;;
answers)
    found=0
    for dtype in float32 bfloat16; do
        [ -z "$quick" ] || [ "$dtype" = float32 ] || continue
        RAGJAX_TEST_GPU=$platform run -m pytest -q -p no:cacheprovider -m gpu tests/engine/test_gpu.py -k "$dtype" \
            ${rest[@]+"${rest[@]}"} || found=$?
    done
    exit "$found"
    ;;
load)
    shape=llama-3-8b cache=20 requests=16 contexts="4096 32768 8192 16384"
    [ -z "$quick" ] || { shape=tiny cache=0.1 requests=4 contexts=896; }
    run -m benchmarks.latency.checkpoint "$shape" "$home/$shape"
    systems=full,prefix-lru,naive,ragcache,cachecraft,fusionrag,depcache,graphkv
    device=$("$python" -c 'import jax; print("-".join(jax.devices()[0].device_kind.lower().split()))')
    for context in $contexts; do # seven passages of an eighth of it; a word has about seven bytes, which are tokens
        run -m benchmarks.load --model "$home/$shape" --systems "$systems" --workload zipf --together 7 --pool 48 \
            --words $((context / 56)) --context $((context + context / 8)) --engine compile=false --requests "$requests" \
            --warm "$requests" --device-cache-gb "$cache" --json "$out/$(date +%F)-$device-load-$context.json" $quick \
            ${rest[@]+"${rest[@]}"}
    done
    ;;
training)
    steps=10
    [ -z "$quick" ] || { steps=2; rest=(--batch 2 --row-tokens 512 ${rest[@]+"${rest[@]}"}); }
    run -m train.data graph ragjax/demo/facts.tsv --count 200 --out "$scratch/samples.jsonl"
    run -m train.depft --model smollm2-135m-instruct --preset small --data "$scratch/samples.jsonl" --out "$scratch/tuned" \
        --epochs 1 --stop-after "$steps" --no-progress ${rest[@]+"${rest[@]}"}
    tail -n 2 "$scratch/tuned/log.jsonl"
    ;;
*) run -m "benchmarks.$part" --out "$out" ${flags[@]+"${flags[@]}"} ;;
esac
