#!/usr/bin/env bash
# Everything that needs a GPU, from the project's root: bash results/gpu.sh [-o folder for the logs] [part ...]
# Parts: tests exact 256 long 64 bench every, all of them by default, in this order; and 128. Each takes some minutes and leaves one log.
# DEVICE=cpu SIZE=tiny STEPS=2 LONG=512 bash results/gpu.sh -o /tmp/logs exact 64 long every     tries the script where there is no GPU
set -uo pipefail
out=results
if [ "${1:-}" = -o ]; then out=$2; shift 2; fi
device=${DEVICE:-cuda} size=${SIZE:-340m} steps=${STEPS:-20} long=${LONG:-16384}
export PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

speed() {                                                     # speed <name> <flags>: tokens/s of the last steps; stopped before any validation
    echo "== $*"
    python3 train.py --size "$size" --device "$device" --data pydoc --tokenizer byte --grad-accum 1 --minutes 0 --warmup 1 \
        --steps $((steps + 1)) --eval-every $((steps + 1)) --stop-after "$steps" --log-every $((steps > 5 ? 5 : 1)) --out "$out/gpu-run" "${@:2}" 2>&1
    rm -rf "$out/gpu-run"
}

exact() {                                                     # bfloat16, TF32 and compiled (the default there), each by itself, against float32 and eager
    for model in transformer omeganet atlas; do
        for how in "" "--matmul highest" "--dtype float32" "--dtype float32 --no-compile"; do
            echo "== $model $how"
            python3 train.py --model $model --device "$device" --data pydoc --warmup 1 $how --out "$out/gpu-run" \
                --steps $((5 * steps + 1)) --eval-every $((5 * steps)) --stop-after $((5 * steps)) 2>&1
            rm -rf "$out/gpu-run"
        done
    done
}

run() {
    case $1 in
    tests) python3 -m pytest -q test_all.py 2>&1 ;;
    exact) exact ;;
    256)                                                      # tokens that share a gradient point, and one Newton-Schulz
        for model in transformer linear titans; do speed "$size $model" --model $model --batch-size 4 --chunk 256; done
        speed "$size omeganet" --model omeganet --batch-size 2 --chunk 256
        for model in omeganet atlas; do speed "$size $model" --model $model --batch-size 8 --chunk 256 --muon-every 256 --remat; done
        speed "$size atlas, Newton-Schulz in bfloat16" --model atlas --batch-size 8 --chunk 256 --muon-every 256 --remat --ns-dtype bfloat16 ;;
    long)
        speed "$size transformer $long" --model transformer --batch-size 2 --seq-len "$long"
        for model in linear titans omeganet atlas; do
            speed "$size $model $long" --model $model --batch-size 4 --seq-len "$long" --chunk 256 --muon-every 256 --remat
        done ;;
    64 | 128)
        for model in linear titans omeganet atlas; do
            speed "$size $model $1" --model $model --batch-size 4 --chunk "$1" --muon-every "$1" --remat
        done ;;
    every)                                                    # Newton-Schulz for every 16th token, and for every one, as the paper
        speed "$size atlas every 16" --model atlas --batch-size 1 --chunk 64 --muon-every 16 --remat --steps 6 --stop-after 5
        speed "$size atlas every 1" --model atlas --batch-size 1 --chunk 64 --muon-every 1 --remat --seq-len 256 --steps 4 --stop-after 3 ;;
    bench) python3 bench.py --device "$device" --minutes 8 --json "$out/bench-$device.json" 2>&1 | grep -v '^{' ;;
    *) echo "error: no part $1" ;;
    esac
}

for part in "${@:-tests exact 256 long 64 bench every}"; do
    for part in $part; do
        run "$part" | tee "$out/gpu-$part.log" | grep -E '^==|compiled in|^ *step|^done|[Ee]rror|passed|failed'
    done
done
