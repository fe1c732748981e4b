#!/usr/bin/env bash
# What a GPU is asked first, from the repository's root: bash results/gpu.sh. It takes at most ten
# minutes, and writes to $OUT, or results/: gpu.log, gpu.json (speeds of layers) and curves.png.
# An hour gives better losses: SECONDS_IN_ALL=3600 STEPS=1000 bash results/gpu.sh
#
# Five models of the size SIZE train on DATA for STEPS steps, each without and with --graph.
# On a CPU, where --graph is refused: DEVICE=cpu SIZE=tiny STEPS=4 MINUTES=0.2 bash results/gpu.sh
set -uo pipefail
out=${OUT:-results}
device=${DEVICE:-cuda}
steps=${STEPS:-60}
size=${SIZE:-baby}
end=${SECONDS_IN_ALL:-580}
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
mkdir -p "$out" && : > "$out/gpu.log" || exit
export PYTHONUNBUFFERED=1

# part NAME RESERVE COMMAND: RESERVE seconds must be left at the end for what follows. At this limit
# COMMAND gets Ctrl-C, which saves. Whatever became of it, the next part begins.
part() {
    local limit=$((end - SECONDS - $2))
    echo "== $1, at second $SECONDS: ${*:3}" | tee -a "$out/gpu.log"
    if [ "$limit" -lt 5 ]; then echo "no time is left" | tee -a "$out/gpu.log"; return; fi
    timeout -s INT -k 5 "$limit" "${@:3}" 2>&1 | tee -a "$out/gpu.log" | tail -n 20
    echo "exit code ${PIPESTATUS[0]}" | tee -a "$out/gpu.log"
}

reserve=500                           # seconds for what comes after the first model
for model in atlas transformer atlas-delta titans omeganet; do
    for graph in "" --graph; do
        part "train $model" $((reserve -= 40)) python3 train.py --device "$device" --data \
            "${DATA:-shakespeare}" --size "$size" --model $model $graph --steps "$steps" \
            --eval-every "$steps" --out "$runs/$model$graph"
    done
done
part table 70 python3 eval.py --device "$device" --stream 0 --ckpt "$runs"/*
part sample 60 python3 sample.py --device "$device" --ckpt "$runs/atlas" --prompt "ROMEO:" --seed 1
part curve 50 python3 train.py --plot "$runs"/*
mv "$runs"/*/curves.png "$out"
part tests 30 python3 -m pytest -q -x test_all.py -k gpu
part layers 5 python3 bench.py layer --device "$device" --size "${LAYERS:-170m}" --batch-size 8 \
    --lengths 4096 --minutes "${MINUTES:-0.3}" --json "$out/gpu.json"

# what was expected, by counting kernels on paper, and what came
python3 - "$runs" "$out/gpu.log" <<'P' | tee -a "$out/gpu.log"
import csv, statistics, sys
from pathlib import Path
runs, log = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
speed, loss = {}, {}
for path in runs.glob("*/log.csv"):
    rows = list(csv.DictReader(path.open()))
    speed[path.parent.name] = statistics.median(float(row["tokens_per_s"]) for row in rows)
    loss[path.parent.name] = float(rows[-1]["loss"])
    print(f"{path.parent.name:20} {speed[path.parent.name]:12,.0f} tokens/s   last loss "
          f"{loss[path.parent.name]:.4f}")
def expect(what, test):
    try:
        print(f"expected: {what}:", "yes" if test() else "NO")
    except KeyError as missing:
        print(f"expected: {what}: not known, for lack of the run {missing}")
expect("no warning of --graph or of torch.compile", lambda: "failed, going on" not in log)
for name in "atlas", "transformer", "atlas-delta", "titans", "omeganet":
    expect(f"--graph changes the last loss of {name} by less than 0.02",
           lambda: abs(loss[name] - loss[f"{name}--graph"]) < 0.02)
expect("--graph makes atlas 1.3 times as fast",
       lambda: speed["atlas--graph"] > 1.3 * speed["atlas"])
expect("with --graph, atlas takes at most 20 times the transformer's time",
       lambda: 20 * speed["atlas--graph"] > speed["transformer--graph"])
expect("the last loss of atlas is within 0.1 of the transformer's, or better",
       lambda: loss["atlas"] < loss["transformer"] + 0.1)
P
