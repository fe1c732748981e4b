"""step.py - time whole training steps of the models, from the repository's root:

    PYTHONPATH=. python results/step.py DEVICE FILE SIZE ..        as gpu.sh calls it

Each model takes nine steps on one random batch, with torch.compile on CUDA, and then once more as
two CUDA graphs. FILE gets the median time, the memory, and how far the gradients are from those of
a float32 CPU without torch.compile.
"""
import json
import statistics
import sys
import time

import torch

import models
import train

MODELS = ["transformer", "titans", "omeganet", "atlas", "atlas-delta"]


def gradients(model, loss):
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten().float().cpu() for g in grads])


def gradient_error(model, task, batch):
    """Return |g - g_CPU| / |g_CPU|."""
    g = gradients(model, task.loss(model, 0))
    with torch.compiler.set_stance("force_eager"):
        exact = gradients(model, model.cpu().loss(*batch))
    model.to(task.device)
    return ((g - exact).norm() / exact.norm()).item()


def as_graphs(model, task, batch):
    """Return model.loss as two CUDA graphs, forward and backward."""
    whole = torch.nn.Module()
    whole.model, whole.forward = model, model.loss
    inputs = tuple(a.to(task.device) for a in batch)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        return torch.cuda.make_graphed_callables(whole, inputs, allow_unused_input=True)


def measure(name, size, device, graphs):
    """Return one row of FILE."""
    on_gpu = device.type == "cuda"
    flags = dict(model=name, size=size, grad_accum=1, dropout=0.0, device=device.type)
    tc, config = train.settings(flags)
    config.vocab_size = 50304 if size == "170m" else 65
    model = models.LM(config).to(device)
    task = train.Task(tc, device, torch.bfloat16)
    batch = torch.randint(65, (2, tc.batch_size, tc.seq_len))
    task.draw = lambda number, period: batch
    row = dict(size=size, name=name, graphs=graphs)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        model.compile_memory()
    if size != "170m" and not graphs:                         # too slow on the CPU
        row["gradient_error"] = gradient_error(model, task, batch)
    optimizers = task.optimizers(model)
    if graphs:
        model.loss = as_graphs(model, task, batch)

    times = []
    for _ in range(9):
        began = time.perf_counter()
        loss, _ = train.train_step(model, optimizers, task, tc.steps)         # at a rate of 0
        loss.item()                                           # waits for the GPU
        times.append(time.perf_counter() - began)
    row["ms"] = 1e3 * statistics.median(times[3:])
    if on_gpu:
        row["gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def main(device, file, *sizes):
    device = train.setup(device, 0)
    rows = []
    for size in sizes:
        for name in MODELS:
            for graphs in [False, True] if device.type == "cuda" else [False]:
                try:
                    rows.append(measure(name, size, device, graphs))
                except Exception as fault:                    # out of memory, a failed capture ..
                    print(f"{size} {name} graphs {graphs}: {fault!r:.300}", flush=True)
                    continue
                print(rows[-1], flush=True)
                with open(file, "w") as out:
                    json.dump(dict(torch=torch.__version__, rows=rows), out, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
