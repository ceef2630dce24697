#!/bin/sh
# Tests and benchmarks that need a CUDA device, from a plain checkout: nothing is installed, nothing is downloaded.
# Needs Python with torch, CuPy, numpy, pytest and hypothesis. PYTHON names another interpreter; results go to $OUT.
# Where there is no device, and with --dry-run, the same parts run on the CPU with small arrays: that they run is all
# that this shows. PARTS names some of "tests sanitizer kernels training" (default: all, in this order, at most
# seventeen minutes; training alone eight).
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-out/gpu}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
# What is compiled on the spot goes where the next part finds it, and not among the results.
: "${PS_KERNELS_CACHE:=$scratch/kernels}" "${CUPY_CACHE_DIR:=$scratch/cupy}"
PYTHONPATH=$(for each in packages/*/src; do printf '%s/%s:' "$PWD" "$each"; done)
export PYTHONPATH PS_KERNELS_CACHE CUPY_CACHE_DIR PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
status=0
parts=""
wanted=" ${PARTS:-tests sanitizer kernels training} "

# part NAME SECONDS COMMAND...: run under a limit, keep what it says, go on if it fails.
part() {
    name=$1 limit=$2
    shift 2
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    tail -n 12 "$out/$name.log"
    [ "$code" -eq 124 ] && echo "$name: stopped after $limit s"
    [ "$code" -ne 0 ] && echo "$name: exit status $code" && status=1
    parts="$parts${parts:+, }\"$name\": $code"
    printf '{"device": %s, "exit_status": {%s}}\n' "$device" "$parts" >"$out/summary.json"
    return 0
}

device=true
dry=""
echo "== device"
if ! timeout -k 5 60 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >"$out/device.log" 2>&1; then
    tail -n 1 "$out/device.log"
    echo "NO GPU: torch finds no CUDA device here, so nothing is tested or measured on one."
    device=false
fi
if [ "$device" = false ] || [ "${1:-}" = --dry-run ]; then
    echo "DRY RUN: every part on the CPU, with small arrays; the figures mean nothing."
    dry=--dry-run
fi
is_wanted() { case $wanted in *" $1 "*) return 0 ;; esac && return 1; }
pytest="$python -m pytest -q -p no:cacheprovider -p no:randomly"
if is_wanted tests; then
    part tests 420 $pytest tests/gpu --ignore tests/gpu/test_sanitizer.py
    # On a device that the CPU plays: a few of the engine's, which take a while there.
    few="figures or fp16-1-True or one-bf16"
    [ -n "$dry" ] && part played 240 env PS_FAKE_CUDA=1 $pytest tests/gpu/test_engine.py tests/gpu/test_ranks.py -k "$few"
fi
is_wanted sanitizer && part sanitizer 130 env PS_SANITIZER_SECONDS=60 $pytest tests/gpu/test_sanitizer.py
[ -n "$dry" ] && part exercise 60 "$python" benchmarks/gpu/exercise.py --dry-run
is_wanted kernels && part kernels 200 "$python" benchmarks/gpu/kernels.py $dry --json "$out/kernels.json"
is_wanted training && part training 450 "$python" benchmarks/gpu/engine.py $dry --json "$out/training.json"
echo "== table"
for each in kernels training; do
    [ -f "$out/$each.log" ] && is_wanted "$each" && sed -n '/^TABLE/,$p' "$out/$each.log"
done
echo "== exit statuses: {$parts}"
exit "$status"
