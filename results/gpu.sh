#!/usr/bin/env bash
# On a GPU, from the repository's root: bash results/gpu.sh. It takes at most ten minutes, and writes gpu.log and
# gpu.json to $OUT, or results/. Each part has a limit of its own, and the next one begins whatever became of it.
set -uo pipefail
out=${OUT:-results} device=${DEVICE:-cuda} steps=${STEPS:-300} sizes=${SIZES:-baby 170m}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
mkdir -p "$out" && : > "$out/gpu.log" || exit
export PYTHONUNBUFFERED=1 PYTHONPATH=.
part() {                                # part <name> <seconds> <command>: Ctrl-C at the limit, so results are kept
    echo "== $1" | tee -a "$out/gpu.log"
    timeout -s INT -k 10 "$2" "${@:3}" 2>&1 | tee -a "$out/gpu.log" | tail -n 20
    echo "exit code ${PIPESTATUS[0]}" | tee -a "$out/gpu.log"
}
cat > "$work/step.py" <<'END'
import json, sys, time, torch, models, train                 # steps, and gradients beside a float32 CPU's
def graphed(model, task):                                    # model.loss as two CUDA graphs, forward and backward
    whole = torch.nn.Module()
    whole.model, whole.forward = model, model.loss
    inputs = tuple(a.to(task.device) for a in task.draw(0, 1))
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        return torch.cuda.make_graphed_callables(whole, inputs, allow_unused_input=True)
device, file, *sizes = train.setup(sys.argv[1], 0), *sys.argv[2:]
gpu, rows, names = device.type == "cuda", [], ("transformer", "titans", "omeganet", "atlas", "atlas-delta")
for size, name, graph in [(s, n, g) for s in sizes for n in names for g in (False, True)]:
    tc, config = train.settings(dict(model=name, size=size, grad_accum=1, dropout=0.0, device=device.type))
    config.vocab_size = 50304 if size == "170m" else 65
    model, task, off, times = models.LM(config).to(device), train.Task(tc, device, torch.bfloat16), 0.0, [0]
    ids = torch.randint(65, (2, tc.batch_size, tc.seq_len))
    task.draw, optimizers = lambda *_: ids, task.optimizers(model)
    try:
        gpu and (torch.cuda.reset_peak_memory_stats(), model.compile_memory())
        if size != "170m" and not graph:
            grads = [torch.autograd.grad(task.loss(model, 0), [*model.parameters()])]
            with torch.compiler.set_stance("force_eager"):
                grads.append(torch.autograd.grad(model.cpu().loss(*ids), [*model.parameters()]))
            mine, theirs = (torch.cat([g.flatten().cpu() for g in these]) for these in grads)
            off = ((mine - theirs).norm() / theirs.norm() / (model.to(device) is model)).item()
        model.loss = graphed(model, task) if graph else model.loss
        for _ in range(9):
            begun = time.perf_counter()
            train.train_step(model, optimizers, task, tc.steps)[0].item()                # at a rate of 0
            times.append(1e3 * (time.perf_counter() - begun))
    except Exception as fault:          # out of memory, or whatever a capture forbids
        print(size, name, f"{fault!r:.300}")
    rows.append(dict(size=size, name=name, graph=graph, ms=sorted(times[4:] or [0])[len(times[4:]) // 2],
        gradient_off=off, gib=gpu and torch.cuda.max_memory_allocated() / 2**30))
    print("  ".join(f"{key} {value if isinstance(value, str) else round(value, 4)}" for key, value in rows[-1].items()))
    open(file, "w").write(json.dumps(dict(torch=torch.__version__, rows=rows), indent=1))
END
part tests 60 python3 -m pytest -q -x test_all.py -k gpu
part step 330 python3 "$work/step.py" "$device" "$out/gpu.json" $sizes
for model in atlas transformer; do
    part "train-$model" 90 python3 train.py --device "$device" --model $model --steps "$steps" --out "$work/$model"
done
