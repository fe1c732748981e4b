"""bench.py - how fast, on this machine.

    python bench.py                                      every part, a few minutes of one CPU thread
    python bench.py --part layer --minutes 9 --plot      one part, with time for its longest sequences, and a picture
    python bench.py --device cuda --minutes 20 --json results/bench-h200.json

    layer    one layer with its projections, forward + backward: tokens/s and memory over length
    rule     omega() alone: the same over window, chunk and muon_every
    step     a training step of train.py
    decode   ms a token and bytes of state, early and late in a stream
    peers    the same work done by attention and by titans-pytorch, where that is installed

Contestants of a table take turns, round after round, so a busy moment of the machine hits all of them. Their first
call, in which torch.compile compiles, does not count. Times are medians, `spread` is half the distance of the
quartiles over the median; on one CPU thread they are seconds of the processor, so other programs do not count. `MiB`
is the peak of what torch's allocator hands out during forward and backward, beyond what there was before.
"""
import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")               # or torch's profiler talks on stderr
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import memory
import models
import omega
import shards
import train
from common import (Parser, UserError, add_device, at_least, autocast, exit_code, need, pick_dtype, picture, say, setup)
from poly import Features
from wiring import Attention

HEAD, SMALL_HEAD = 64, 16                       # monomials need small heads: 64 numbers have 2,145 of degree up to 2


# ---- clocks, memory, tables

def clock(device, run):
    """Return the seconds that run() takes; on one CPU thread those of the processor (of several they would add up)."""
    timer = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronize = getattr(torch, device.type).synchronize
    synchronize()
    began = timer()
    run()
    synchronize()
    return timer() - began


def race(device, runs, seconds):
    """Let the contestants (name -> function) take turns, three rounds or more, until the seconds are over -> times.

    One that fails (out of memory) is left out with a line.
    """
    began, times = time.perf_counter(), {}
    for name, run in runs.items():
        try:
            clock(device, run)
            times[name] = []
        except Exception as fault:
            say(f"{name} left out: {type(fault).__name__}: {str(fault).partition(chr(10))[0]}")
    while times and (any(len(t) < 3 for t in times.values()) or time.perf_counter() - began < seconds):
        for name in times:
            times[name].append(clock(device, runs[name]))
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4, method="inclusive")
        times[name] = dict(median_s=median, spread=(high - low) / 2 / median, runs=len(t))
    return times


def peak_mib(device, run):
    """Return the most MiB that torch's allocator has handed out at one time during run(), beyond those before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as prof:
        run()
    events = (e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate(events, initial=0)) / 2**20


def row(times, tokens, **more):
    """Return a row of a table, and of the JSON."""
    return dict(more, tokens_per_s=tokens / times["median_s"], **times)


def table(title, rows):
    """Print the rows without what only the JSON has."""
    def cell(x):
        if isinstance(x, float):
            return f"{x:,.0f}" if x > 100 else f"{x:.3g}"
        return "-" if x is None else f"{x:,}" if type(x) is int else str(x)

    names = [name for name in (rows or [{}])[0] if name not in ("median_s", "runs")]
    columns = [[name, *(cell(row[name]) for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    say("\n" + title)
    for cells in zip(*columns):
        say("  " + "  ".join([cells[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(cells[1:], widths[1:])]))


# ---- the parts: each yields title and rows of its tables

def pick(args, quick, cpu, cuda):
    return quick if args.quick else cuda if args.device.type == "cuda" else cpu


def layer(args, width, head=HEAD, **differences):
    """Return the layer of a one-block LM, so that its weights start as they do in training."""
    shape = dict(vocab_size=2, n_layer=1, n_embd=width, n_head=width // head, head_dim=head)
    model = models.LM(models.Config(**{**differences, **shape})).to(args.device)
    made = model.blocks[0].layer
    if args.compile:
        model.compile_memory()
        if isinstance(made, Attention):                       # which is compiled with its block otherwise
            made.compile()
    return made


def both(args, layer, x):
    """Run a layer x (B, T, width) -> (y, ..) forward, and backward to x and all parameters."""
    with autocast(args.device, args.dtype):
        y = layer(x)[0]
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y), allow_unused=True)  # a peer may have idle ones


def part_layer(args, seconds):
    """Time one layer with its projections over length."""
    batch, width = pick(args, (1, 64), (1, 256), (4, 1024))
    lengths = pick(args, [32, 64], [256, 1024, 4096, 16384], [1024, 4096, 16384, 65536])
    layers, end, times = {}, time.perf_counter() + seconds, {}
    for name in args.model:
        layers[name] = layer(args, width, SMALL_HEAD, **models.PRESETS[name], expansion=2)
    for i, T in enumerate(lengths):
        left = end - time.perf_counter()
        if not args.quick and 20 * sum(t["median_s"] for t in times.values()) > left:        # five calls of fourfold T
            say(f"\nno time for T {T:,}; more --minutes")
            break
        x = torch.randn(batch, T, width, device=args.device, requires_grad=True)
        runs = {name: partial(both, args, made, x) for name, made in layers.items()}
        times = race(args.device, runs, left / (len(lengths) - i))
        yield (f"forward + backward, batch {batch}, width {width}, heads of {SMALL_HEAD}",
               [row(t, batch * T, name=name, T=T, MiB=peak_mib(args.device, runs[name])) for name, t in times.items()])


def rule_run(device, rule, batch, H, T, shard):
    """Return a function that runs omega() forward and backward, or shards() with shards of so many tokens.

    HEAD numbers a head, 2 HEAD hidden, gates that keep the memory bounded.
    """
    def rand(*shape):
        return torch.rand(batch, H, T, *shape, device=device)
    q, k, v = (F.normalize(rand(HEAD) - 0.5, dim=-1) for _ in range(3))
    gates = [1 - 0.001 * rand(), rand() / rule.chunk, rand(), rand(rule.window) / rule.window]
    shapes = memory.shapes(rule.memory, HEAD, 2 * HEAD, HEAD)
    M0 = [torch.randn(H, a, b, device=device) / a**0.5 for a, b in shapes]
    leaves, phi = [a.requires_grad_() for a in (q, k, v, *gates, *M0)], Features("none", HEAD)

    def run():
        fn, state = omega.omega, omega.start(rule, phi, M0, batch)
        if shard:
            kk = q.new_zeros(batch, H, HEAD, HEAD)
            fn, state = partial(shards.shards, shard), shards.Shards(M0, state, None, kk, 0)
        y, _ = fn(rule, phi, q, k, v, omega.Gates(*gates), state)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    return run


def part_rule(args, seconds):
    """Time the rule without a network over its settings."""
    (batch, H, length), runs = pick(args, (1, 2, 128), (1, 4, 2048), (4, 16, 4096)), {}
    if args.compile:
        omega.compile_chunks()
    for w, c, m, shard in ((8, 64, 0, 0), (1, 64, 0, 0), (64, 64, 0, 0), (8, 16, 0, 0), (8, 16, 0, 256), (8, 256, 0, 0),
                           (8, 64, 64, 0), (8, 64, 16, 0), (8, 64, 16, 256), (8, 64, 1, 0)):
        T = length // 8 if m == 1 else length
        rule = omega.Rule(window=w, chunk=c, muon_every=m)
        runs[w, c, m, shard, T] = rule_run(args.device, rule, batch, H, T, shard)
    yield (f"omega() alone, forward + backward, batch {batch}, {H} heads of {HEAD}, MLP memory of {2 * HEAD}", [
        row(t, batch * key[4], **dict(zip(("window", "chunk", "muon_every", "shard", "T"), key)),
            MiB=peak_mib(args.device, runs[key])) for key, t in race(args.device, runs, seconds).items()])


class Noise(train.Text):
    """Training on random tokens."""

    def __init__(self, *how):
        train.Task.__init__(self, *how)
        self.splits = [torch.randint(models.Config.vocab_size, (100_000,)).numpy()]


def part_step(args, seconds):
    """Time a training step of train.py."""
    size, runs = pick(args, "tiny", "tiny", "baby"), {}
    for name in args.model:
        tc, config = train.settings(dict(model=name, size=size))
        tc = replace(tc, warmup=0, lr=0.01 * tc.lr, outer_muon_lr=0.01 * tc.outer_muon_lr)      # so that nothing diverges
        task = Noise(replace(tc, batch_size=1, seq_len=64) if args.quick else tc, args.device, args.dtype)
        model = models.LM(config).to(args.device).train()
        if args.compile:
            model.compile_memory()
        runs[name, model.num_params()] = partial(train.train_step, model, task.optimizers(model), task, 0)
    times = race(args.device, runs, seconds)
    base = next((t["median_s"] for (name, _), t in times.items() if name == "transformer"), None)
    tc = task.tc
    yield f"size {size}, batch {tc.batch_size} x {tc.seq_len}; of_transformer: time over the transformer's", [
        row(t, tc.batch_size * tc.seq_len, name=name, parameters=n, ms=1e3 * t["median_s"],
            of_transformer=base and t["median_s"] / base) for (name, n), t in times.items()]


def decode(model, state, n):
    """Read n tokens, one by one. The state that goes in never changes, so each round starts from the same one."""
    one = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    for _ in range(n):
        _, state = model(one, state)


@torch.inference_mode()                         # as models.LM.generate
def part_decode(args, seconds):
    """Time single tokens, in one block: blocks are alike, and their times and bytes add up."""
    (early, late), runs = pick(args, (128, 256), (1024, 16384), (4096, 65536)), {}               # ends of chunks
    for name in args.model:
        model, state = models.build(name, n_layer=1).to(args.device).eval(), None
        n = 8 if model.config.attention or args.quick else model.config.chunk    # the end of a chunk counts once
        text = torch.randint(model.config.vocab_size, (1, late), device=args.device)
        for t, piece in enumerate(text.split(early, 1), 1):
            _, state = model(piece, state)
            if t * early in (early, late):
                runs[name, t * early, n, models.state_bytes(state)] = partial(decode, model, state, n)
    yield "one block, batch 1", [
        row(t, n, name=name, position=position, ms_per_token=1e3 * t["median_s"] / n, state_bytes=size)
        for (name, position, n, size), t in race(args.device, runs, seconds).items()]


def peer(args, name, width, chunk, muon):
    """Return a layer by its name. Ours follows Titans' rule, too, but it also has a window and a convolution."""
    if name == "attention":
        return layer(args, width, attention=True, attn_window=0)
    if name == "ours":
        return layer(args, width, memory="mlp", loss="l2", window=8, chunk=chunk, momentum=True, muon=muon,
                     muon_every=chunk, features="none", expansion=2, forget="zero")
    from titans_pytorch import MemoryMLP, NeuralMemory
    how = dict(chunk_size=chunk, batch_size=chunk, momentum=True, spectral_norm_surprises=muon)
    mlp = MemoryMLP(HEAD, depth=2, expansion_factor=2.0)      # gradients move on every batch_size, as ours every chunk
    return NeuralMemory(dim=width, heads=width // HEAD, dim_head=HEAD, model=mlp, **how).to(args.device)


def part_peers(args, seconds):
    """Time the same work done by attention, by our layer and by titans-pytorch."""
    batch, T, width = pick(args, (1, 64, 64), (1, 2048, 256), (4, 4096, 1024))
    titans = "".join(f"{d.name} {d.version}" for d in metadata.distributions(name="titans-pytorch"))    # "": not there
    cases = [(name, c, muon) for c in (64, 16) for muon in (False, True) for name in ("ours", titans) if name]
    x, runs = torch.randn(batch, T, width, device=args.device, requires_grad=True), {}
    for case in [("attention", None, None), *cases]:
        runs[case] = partial(both, args, peer(args, case[0], width, *case[1:]), x)
    times, rows = race(args.device, runs, seconds), []
    for (name, chunk, muon), t in times.items():
        rival, peak = times.get((titans, chunk, muon)), peak_mib(args.device, runs[name, chunk, muon])
        rows.append(row(t, batch * T, name=name, chunk=chunk, newton_schulz=muon, MiB=peak,
                        times_titans=rival and rival["median_s"] / t["median_s"]))
    yield (f"a layer, forward + backward, batch {batch}, T {T}, width {width}, heads of {HEAD}, MLP memory of "
           f"{2 * HEAD},\nmomentum; times_titans: speed over that of {titans or 'titans-pytorch, not installed'}", rows)


# ---- all of it

PARTS = dict(layer=(part_layer, 8), rule=(part_rule, 2), step=(part_step, 4), decode=(part_decode, 3),
             peers=(part_peers, 3))             # and their shares of the time


def machine(args):
    """Return what makes the figures worth keeping."""
    chip, info = platform.machine(), Path("/proc/cpuinfo")
    if args.device.type == "cuda":
        chip = torch.cuda.get_device_name()
    elif info.exists():
        chip = next((s.split(":")[1].strip() for s in info.read_text().splitlines() if "model name" in s), chip)
    return dict(device=chip, threads=torch.get_num_threads(), dtype=str(args.dtype)[6:], compile=args.compile,
                matmul=torch.get_float32_matmul_precision(), torch=str(torch.__version__),
                commit=subprocess.getoutput(f"git -C '{Path(__file__).parent}' describe --always --dirty 2>&-"))


def parse(argv=None):
    """Return the flags."""
    parser = Parser(prog="bench.py", description=__doc__)
    add = parser.add_argument
    add("--part", action="append", choices=tuple(PARTS), help="what to measure; may be given several times [all]")
    add("--model", action="append", choices=tuple(models.PRESETS), help="of layer, step and decode, likewise [all]")
    add("--minutes", type=at_least(float, 0), default=2.0, metavar="X", help="about so long; more reaches further [2]")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of autocast [auto: on a CPU float32]")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile layers and steps [on CUDA]")
    add_device(parser, threads=1)
    add("--json", metavar="FILE", help="write all records there")
    add("--plot", nargs="?", const="results/bench.png", metavar="FILE", help="draw layer [results/bench.png]")
    add("--quick", action="store_true", help="tiny shapes: does it run at all?")
    return parser.parse_args(argv)


def measure(args):
    """Run the parts, print their tables, keep and draw the results."""
    for path in filter(None, (args.json, args.plot)):         # fail now, not after all the work
        if not Path(path).parent.is_dir():
            raise UserError(f"no folder {Path(path).parent} for {path}; make it first")
    parts = {name: PARTS[name] for name in args.part or PARTS}
    if args.plot:
        if "layer" not in parts:
            raise UserError("--plot draws --part layer")
        need("matplotlib")
    args.device, args.model = setup(args.device, args.threads), args.model or list(models.PRESETS)
    cpu = args.device.type == "cpu"
    args.compile = not cpu if args.compile is None else args.compile
    args.dtype = pick_dtype("float32" if cpu and args.dtype == "auto" else args.dtype, args.device)
    about, records = machine(args), []
    say("  ".join(f"{name} {value}" for name, value in about.items()))
    torch.manual_seed(0)
    try:
        for name, (part, share) in parts.items():
            seconds = 0 if args.quick else 60 * args.minutes * share / sum(s for _, s in parts.values())
            with torch.compiler.set_stance("force_eager" if name == "decode" else "default"):     # eager as sample.py
                for title, rows in part(args, seconds):
                    table(f"{name}: {title}", rows)
                    records += [dict(part=name, **row) for row in rows]
    finally:                                                  # Ctrl-C loses no table that was finished
        if args.json:
            Path(args.json).write_text(json.dumps(dict(argv=sys.argv[1:], machine=about, records=records)) + "\n")
    if args.plot:
        lines = {models.title(name): [[row[x] for row in records if row["part"] == "layer" and row["name"] == name]
                                      for x in ("T", "tokens_per_s")] for name in args.model}
        axes = "sequence length [tokens]", "forward + backward of one layer [tokens/s]"
        picture(args.plot, lines, *axes, log="xy")


def main(argv=None):
    return exit_code(partial(measure, parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
