#!/bin/sh
# Tests and benchmarks that need a CUDA device, from a plain checkout: nothing is installed, nothing is downloaded.
# Needs Python with torch, CuPy, numpy, pytest and hypothesis. PYTHON names another interpreter; results go to $OUT:
# log.txt, summary.json, kernels.json, training.json and others, machine.txt, and report.md, which says it all. They are
# there whenever this ends: a part's output goes to log.txt at once, and report.md is written anew after each part.
# Where there is no device, and with --dry-run, the same parts run on the CPU with small arrays: that they run is all
# that this shows.
# PARTS names some of "ladder calibration sizes training compared tests kernels engine ranks sanitizer largest" (default:
# all, in this order). All together take at most LIMIT seconds (default: 570); parts for which no time is left are named
# at the end, for another call. The ladder is rows of short checks; where one fails, only kernels and tests come after it,
# which may say more. Three calls of ten minutes: PARTS="ladder calibration sizes tests", "training compared kernels",
# "engine ranks sanitizer largest".
# Of sizes, timelines.zip has *.json, which open in Perfetto, with what was measured and what was planned, and *.svg,
# which show one step.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
out=${OUT:-out/gpu}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
scratch=$(mktemp -d) || exit 1
child=""
# Told to end, it interrupts the part that runs, and leaves the others out; what is known by then is reported.
interrupt() {
    trap '' INT TERM HUP
    end=0
    status=1
    [ -n "$child" ] && kill -INT "$child" 2>/dev/null && wait "$child"
}
trap interrupt INT TERM HUP
trap 'rm -rf "$scratch"' EXIT
# What is compiled on the spot goes where the next part finds it, and not among the results.
: "${PS_KERNELS_CACHE:=$scratch/kernels}" "${CUPY_CACHE_DIR:=$scratch/cupy}"
PYTHONPATH=$(for each in packages/*/src; do printf '%s/%s:' "$PWD" "$each"; done)
export PYTHONPATH PS_KERNELS_CACHE CUPY_CACHE_DIR PYTHONPYCACHEPREFIX="$scratch/pycache" PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE # or each process would compile PyTorch's modules anew
# All processes are on this computer, whose name may lead nowhere.
if [ -e /sys/class/net/lo ]; then
    : "${GLOO_SOCKET_IFNAME:=lo}" "${NCCL_SOCKET_IFNAME:=lo}"
    export GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME
fi
PATH=$PATH:/usr/local/cuda/bin # where CUDA's tools are, if they are not on the path
# Only the plugins that are asked for, and warnings of other releases are no errors here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
pytest="$python -m pytest -q -p no:cacheprovider -W default -o faulthandler_timeout=100"
status=0
parts=""
late=""
wanted=" ${PARTS:-ladder calibration sizes training compared tests kernels engine ranks sanitizer largest} "
end=$(($(date +%s) + ${LIMIT:-570}))
: >"$out/log.txt"

# part NAME SECONDS COMMAND...: run under a limit, keep what it says, go on if it fails. SECONDS becomes what is left
# where that is less; @LEFT in the command becomes it, less what ending takes. The groups in engine.py have limits of
# their own. For training and compared these add up to at most @LEFT, if the part gets all of SECONDS.
part() {
    name=$1 limit=$2
    shift 2
    left=$((end - $(date +%s)))
    if [ "$left" -lt 25 ]; then
        late="$late $name"
        return 0
    fi
    [ -n "$dry" ] && limit=900 # however busy the processor is
    [ "$left" -lt "$limit" ] && limit=$left
    count=$#
    while [ "$count" -gt 0 ]; do
        case $1 in @LEFT) set -- "$@" "$((limit - 15))" ;; *) set -- "$@" "$1" ;; esac
        shift
        count=$((count - 1))
    done
    echo "== $name (at most $limit s)"
    began=$(date +%s)
    echo "== $name" >>"$out/log.txt"
    before=$(wc -l <"$out/log.txt")
    # Interrupted, not ended: then pytest still says what has failed.
    timeout -s INT -k 10 "$limit" "$@" >>"$out/log.txt" 2>&1 &
    child=$!
    wait "$child"
    code=$?
    child=""
    tail -n "+$((before + 1))" "$out/log.txt" >"$scratch/$name.log"
    if [ "$code" -eq 0 ]; then lines=12; else lines=60; fi
    tail -n "$lines" "$scratch/$name.log" | cut -c 1-400
    [ "$code" -eq 124 ] || [ "$code" -eq 137 ] && echo "$name: stopped after $limit s"
    [ "$code" -ne 0 ] && echo "$name: exit status $code" && status=1
    parts="$parts${parts:+, }\"$name\": $code"
    echo "$name took $(($(date +%s) - began)) s"
    printf '{"device": %s, "exit_status": {%s}}\n' "$device" "$parts" >"$out/summary.json"
    report
    return 0
}

report() {
    timeout 20 "$python" benchmarks/gpu/report.py "$out" >"$scratch/report.md" && mv "$scratch/report.md" "$out" ||
        echo "no report.md"
}

device=true
dry=""
few=""
beside=""
echo "== device"
timeout -k 5 180 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >"$out/log.txt" 2>&1
code=$?
if [ "$code" -eq 124 ]; then
    echo "torch did not say within 180 s whether there is a device: going on as if there is one"
elif [ "$code" -ne 0 ]; then
    tail -n 1 "$out/log.txt"
    echo "NO GPU: torch finds no CUDA device here, so nothing is tested or measured on one."
    device=false
fi
if [ "$device" = false ] || [ "${1:-}" = --dry-run ]; then
    echo "DRY RUN: every part on the CPU, with small arrays; the figures mean nothing."
    dry=--dry-run
    # On a device that the CPU plays: a few of the engine's, which take a while there.
    few="figures or fp16-1-True or one-bf16 or meta_alone or undone"
else
    facts=name,driver_version,memory.total,clocks.sm,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max,mig.mode.current
    # Tests of the engine take little of the card, and much of the host: several at the same time.
    "$python" -c 'import xdist' 2>/dev/null && beside="-p xdist.plugin -n 8"
    timeout 20 nvidia-smi --query-gpu=$facts --format=csv 2>&1 || echo "nvidia-smi says nothing"
fi >"$out/machine.txt"
{
    grep -E 'MemTotal|MemAvailable' /proc/meminfo
    echo "processors: $(getconf _NPROCESSORS_ONLN)"
    uname -sr
    date -u '+%Y-%m-%d %H:%M UTC'
    echo "commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo "command: ${PARTS:+PARTS=\"$PARTS\" }LIMIT=${LIMIT:-570} sh benchmarks/gpu/run.sh $*"
} >>"$out/machine.txt"
cat "$out/machine.txt"
is_wanted() { case $wanted in *" $1 "*) return 0 ;; esac && return 1; }
own="tests/gpu/test_cuda.py tests/gpu/test_kernels.py tests/gpu/test_properties.py"
played="env PS_FAKE_CUDA=${dry:+1}"
engine="$python benchmarks/gpu/engine.py $dry --seconds @LEFT"
report
is_wanted ladder && part ladder 240 "$python" benchmarks/gpu/ladder.py $dry
if [ "$status" -ne 0 ]; then
    echo "the ladder does not hold: of the rest, kernels and tests alone are run"
    wanted=$([ "$end" -eq 0 ] || for each in kernels tests; do is_wanted "$each" && printf ' %s ' "$each"; done)
fi
is_wanted calibration &&
    part calibration 150 "$python" -m ps_core.cli doctor --calibrate --out "$out/machine.toml"
if is_wanted sizes; then
    part sizes 240 $engine --sizes --json "$out/sizes.json" --timelines "$scratch/timelines"
    [ -d "$scratch/timelines" ] && "$python" -m zipfile -c "$out/timelines.zip" "$scratch/timelines/"*
fi
is_wanted training && part training 505 $engine --json "$out/training.json"
is_wanted compared && part compared 535 $engine --compared --json "$out/compared.json"
is_wanted tests && part tests 150 $pytest $beside $own
[ -n "$dry" ] && is_wanted tests && part exercise 200 "$python" benchmarks/gpu/exercise.py --dry-run
is_wanted kernels && part kernels 150 "$python" benchmarks/gpu/kernels.py $dry --json "$out/kernels.json"
is_wanted engine && part engine 210 $played $pytest $beside tests/gpu/test_engine.py -k "$few"
is_wanted ranks && part ranks 180 $played $pytest tests/gpu/test_ranks.py -k "$few"
is_wanted sanitizer && part sanitizer 230 env PS_SANITIZER_SECONDS=105 $pytest tests/gpu/test_sanitizer.py
[ -z "$dry" ] && is_wanted largest && part largest 500 $engine --largest --json "$out/largest.json"
echo "== table"
for each in kernels sizes training compared largest; do
    log=$scratch/$each.log
    [ -f "$log" ] || continue
    # Without a table it was stopped: then what it had said by then.
    if grep -q '^TABLE' "$log"; then sed -n '/^TABLE/,$p' "$log"; else tail -n 40 "$log"; fi
done
echo "== exit statuses: {$parts}"
[ -n "$late" ] && echo "== no time was left for:$late; in another call: PARTS=\"${late# }\""
exit "$status"
