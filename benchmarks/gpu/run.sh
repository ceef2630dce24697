#!/bin/sh
# Tests and benchmarks that need a CUDA device, from a plain checkout: nothing is installed, nothing is downloaded.
# Needs Python with torch, CuPy, numpy, pytest and hypothesis. PYTHON names another interpreter; results go to $OUT.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-out/gpu}
mkdir -p "$out" || exit 1
PYTHONPATH=$(for each in packages/*/src; do printf '%s/%s:' "$PWD" "$each"; done)
export PYTHONPATH PYTHONDONTWRITEBYTECODE=1
status=0

# part NAME SECONDS COMMAND...: run under a limit, keep what it says, go on if it fails.
part() {
    name=$1 limit=$2
    shift 2
    echo "== $name (at most $limit s)"
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    tail -n 25 "$out/$name.log"
    [ "$code" -eq 124 ] && echo "$name: stopped after $limit s"
    [ "$code" -ne 0 ] && echo "$name: exit status $code" && status=1
    return 0
}

if ! timeout -k 10 120 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >"$out/device.log" 2>&1; then
    tail -n 1 "$out/device.log"
    echo "NO GPU: torch finds no CUDA device here, so nothing was tested or measured on one."
    exit 0
fi
part tests 150 "$python" -m pytest -q -p no:cacheprovider tests/gpu
if command -v compute-sanitizer >/dev/null 2>&1; then
    part sanitizer 120 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" benchmarks/gpu/exercise.py
    part races 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 9 "$python" benchmarks/gpu/exercise.py
else
    echo "compute-sanitizer is not here: memory accesses and races were not checked"
fi
part kernels 180 "$python" benchmarks/gpu/kernels.py --json "$out/kernels.json"
exit "$status"
