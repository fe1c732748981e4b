#!/usr/bin/env bash
# Everything that needs a GPU, from the project's root: bash results/gpu.sh [-o folder for the logs] [part ...]
# Parts: tests bench exact 64 128 256 every long; each takes some minutes. All of them by default.
# DEVICE=cpu SIZE=tiny STEPS=2 LONG=512 bash results/gpu.sh -o /tmp/logs exact 64 every long     tries the script where there is no GPU
set -uo pipefail
out=results
if [ "${1:-}" = -o ]; then out=$2; shift 2; fi
device=${DEVICE:-cuda} size=${SIZE:-340m} steps=${STEPS:-20} long=${LONG:-16384}
export PYTHONUNBUFFERED=1

speed() {                                                     # speed <name of the log> <flags>: tokens/s in its last progress line
    python3 train.py --size "$size" --device "$device" --data pydoc --tokenizer byte --grad-accum 1 --steps "$steps" --minutes 0 --warmup 1 \
        --eval-every "$steps" --eval-windows 1 --log-every $((steps > 5 ? 5 : 1)) --sample-tokens 0 --out "$out/gpu-run" "${@:2}" \
        > "$out/gpu-$1.log" 2>&1
    echo "$1: $(grep -E 'compiled in|[Ee]rror' "$out/gpu-$1.log" | tail -1) $(grep -E '^ *step' "$out/gpu-$1.log" | tail -1)"
    rm -rf "$out/gpu-run"
}

for part in "${@:-tests bench exact 64 128 256 every long}"; do
    for part in $part; do
        case $part in
        tests) python3 -m pytest -q test_all.py 2>&1 | tee "$out/gpu-tests.log" | tail -3 ;;
        bench) python3 bench.py --device "$device" --minutes 8 --json "$out/bench-$device.json" 2>&1 | tee "$out/gpu-bench.log" | grep -v '^{' ;;
        exact)                                                # bfloat16, TF32 and compiled (the default there) against float32 and eager
            for model in transformer omeganet atlas; do
                for how in "" "--matmul highest" "--dtype float32 --no-compile"; do
                    echo "$model $how: $(python3 train.py --model $model --device "$device" --data pydoc --steps $((5 * steps)) --warmup 1 $how \
                        --out "$out/gpu-run" 2>&1 | tee "$out/gpu-exact-$model-${how//[ -]/}.log" | grep -E '^done|[Ee]rror' | tail -1)"
                    rm -rf "$out/gpu-run"
                done
            done ;;
        64 | 128 | 256)                                       # tokens that share a gradient point, and one Newton-Schulz
            [ "$part" = 64 ] && speed "$size-transformer" --model transformer --batch-size 4
            for model in omeganet atlas titans linear; do
                speed "$size-$model-$part" --model $model --batch-size 4 --chunk "$part" --muon-every "$part"
            done ;;
        every)                                                # Newton-Schulz for every token of the paper, and for every 16th
            for m in 1 16; do speed "$size-atlas-64-every-$m" --model atlas --batch-size 1 --chunk 64 --muon-every $m --remat; done ;;
        long)
            speed "$size-transformer-$long" --model transformer --batch-size 1 --seq-len "$long"
            for model in omeganet atlas titans; do
                speed "$size-$model-$long" --model $model --batch-size 1 --seq-len "$long" --chunk 256 --muon-every 256 --remat
            done ;;
        *) echo "no part $part" >&2; exit 2 ;;
        esac
    done
done
