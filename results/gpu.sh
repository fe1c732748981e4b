#!/usr/bin/env bash
# On a GPU, from the repository's root: bash results/gpu.sh. It takes at most ten minutes, and writes gpu.log
# and bench-gpu.json to $OUT, or results/.
# Each part has a limit of its own, and the next one begins whatever became of it.
set -uo pipefail
out=${OUT:-results} device=${DEVICE:-cuda} steps=${STEPS:-100}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
mkdir -p "$out" && : > "$out/gpu.log" || exit
export PYTHONUNBUFFERED=1

part() {                                # part <name> <seconds> <command>: Ctrl-C at the limit, so results are kept
    echo "== $1" | tee -a "$out/gpu.log"
    timeout -s INT -k 10 "$2" "${@:3}" 2>&1 | grep --line-buffered -v '^{' | tee -a "$out/gpu.log" | tail -n 14
    echo "exit code ${PIPESTATUS[0]}" | tee -a "$out/gpu.log"
}

cat > "$work/check.py" <<'END'
import sys, torch, models               # loss and gradients of each model, there and on the CPU
sys.stdout.reconfigure(line_buffering=True)
for name in models.PRESETS:
    torch.manual_seed(0)
    model, x = models.build(name, n_layer=1), torch.randint(65, (2, 301))
    grads = []
    for device in ("cpu", sys.argv[1]):
        model.to(device).zero_grad()
        model.loss(x[:, :-1].to(device), x[:, 1:].to(device)).backward()
        grads.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]))
    error = ((grads[1] - grads[0]).norm() / grads[0].norm()).item()
    print(f"{name:16} gradient off by {error:.1e}{'' if error < 1e-2 else '   FAIL'}")
END

part check 50 env PYTHONPATH=. python3 "$work/check.py" "$device"
if python3 -c 'import pytest' 2>/dev/null; then part tests 80 python3 -m pytest -q -x test_all.py -k gpu; fi
for model in atlas omeganet transformer; do
    part "train-$model" 90 python3 train.py --device "$device" --model $model --steps "$steps" --out "$work/$model"
done
part bench 170 python3 bench.py --device "$device" --minutes 1.5 --part layer --part step --part decode \
    --model transformer --model titans --model omeganet --model atlas --json "$out/bench-gpu.json"
