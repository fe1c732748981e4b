#!/usr/bin/env bash
# What a GPU is asked first, from the repository's root: bash results/gpu.sh. It takes at most ten
# minutes, and writes to $OUT, or results/: gpu.log, gpu.json (speeds of layers) and curves.png.
# An hour gives better losses: LIMIT=600 STEPS=2000 bash results/gpu.sh
#
# LIMIT  seconds for each of five trainings, of STEPS steps, of the size SIZE, on DATA
# On a CPU: DEVICE=cpu SIZE=tiny STEPS=4 MINUTES=0.2 WIDTH=64 bash results/gpu.sh
set -uo pipefail
out=${OUT:-results}
device=${DEVICE:-cuda}
limit=${LIMIT:-60}
steps=${STEPS:-200}
size=${SIZE:-baby}
data=${DATA:-shakespeare}
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
mkdir -p "$out" && : > "$out/gpu.log" || exit
export PYTHONUNBUFFERED=1

# part NAME SECONDS COMMAND: at the limit it gets Ctrl-C, which saves. Whatever became of it, the
# next part begins.
part() {
    echo "== $1: ${*:3}" | tee -a "$out/gpu.log"
    timeout -s INT -k 10 "$2" "${@:3}" 2>&1 | tee -a "$out/gpu.log" | tail -n 20
    echo "exit code ${PIPESTATUS[0]}" | tee -a "$out/gpu.log"
}

part tests 45 python3 -m pytest -q -x test_all.py -k gpu
part layers 150 python3 bench.py layer --device "$device" --width "${WIDTH:-768}" --batch-size 8 \
    --minutes "${MINUTES:-1}" --json "$out/gpu.json"
for model in atlas transformer atlas-delta titans omeganet; do
    part "train $model" "$limit" python3 train.py --device "$device" --model $model --data "$data" \
        --size "$size" --steps "$steps" --eval-every $((steps / 2)) --out "$runs/$model"
done
part table 45 python3 eval.py --device "$device" --stream 0 --ckpt "$runs"/*
part sample 20 python3 sample.py --device "$device" --ckpt "$runs/atlas" --prompt "ROMEO:" --seed 1
part curve 20 python3 train.py --plot "$runs"/*
mv "$runs"/*/curves.png "$out"
