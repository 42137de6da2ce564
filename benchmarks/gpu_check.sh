#!/usr/bin/env bash
# The GPU check, one part at a time, each under nine minutes on a bare CUDA machine: nothing is installed or downloaded.
#
#   bash benchmarks/gpu_check.sh kernels|e2e|peers|mesh [OUT_DIR] [--quick] [--platform cpu] [--seconds N]
#
# `mesh` is tensor parallel over all GPUs beside one; where there is one it says that it was skipped.
# The report goes to OUT_DIR/<date>-<device>-<part>.json (benchmarks/results, if not given), rewritten after every row. A
# part that is stopped, or had no time for all rows, goes on when it is started again. PYTHON names the interpreter.
# Exit code: 0 all right, 1 something is wrong or failed, 2 wrong usage, 124 or 137 ended after nine minutes.
set -euo pipefail
usage() {
    echo "usage: bash benchmarks/gpu_check.sh kernels|e2e|peers|mesh [OUT_DIR] [flags of python -m benchmarks.PART]" >&2
    exit 2
}
[ $# -ge 1 ] || usage
part=$1
shift
case $part in kernels | e2e | peers | mesh) ;; *) usage ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
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
exec ${limit[@]+"${limit[@]}"} "$python" -m "benchmarks.$part" --out "$out" "$@"
