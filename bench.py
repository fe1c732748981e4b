"""bench.py - how fast, on this machine.

    python bench.py                                      every part, a few minutes of one CPU thread
    python bench.py --part layer --minutes 8 --plot      one part, with time for its longest sequences, and a picture
    python bench.py --device cuda --minutes 20 --json results/bench-h200.json

    layer    one layer with its projections, forward + backward: tokens/s and memory over length
    rule     omega() alone: the same over window, chunk and muon_every; FLOP/s beside those of one large product
    step     a training step of train.py
    decode   ms a token and bytes of state, early and late in a stream
    peers    the same work done by attention and by other people's code, where it is installed

Contestants of a table take turns, round after round, so a busy moment of the machine hits all of them. Their first
call, in which torch.compile compiles, does not count. Times are medians, `spread` is half the distance of the
quartiles over the median; on one CPU thread they are seconds of the processor, so other programs do not count. `MiB`
is the peak of what torch's allocator hands out during forward and backward, beyond what there was before.
"""
import argparse
import gc
import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")               # or torch's profiler talks on stderr
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import memory
import models
import muon
import omega
import train
from data import UserError
from poly import Features
from train import at_least, say

HEAD, SMALL_HEAD = 64, 16                       # polynomials want small heads: 64 numbers have 2,145 of degree up to 2
# Titans' rule, which titans-pytorch has, too: forgetting to zero, no phi. Ours also has a window and a convolution.
WORK = dict(memory="mlp", loss="l2", window=8, chunk=64, momentum=True, muon=False, features="none", expansion=2,
            forget="zero")


@dataclass
class Bench:
    """What every part needs to know, and the records that all of them leave."""
    device: torch.device
    dtype: torch.dtype
    compile: bool
    quick: bool
    models: list
    seconds: float = 0.0                        # of the part at hand
    records: list = field(default_factory=list)

    def pick(self, quick, cpu, cuda):
        return quick if self.quick else cuda if self.device.type == "cuda" else cpu

    def eager(self, wanted=True):
        return torch.compiler.set_stance("force_eager") if wanted and self.compile else nullcontext()

    def keep(self, part, times, tokens, run=None, **more):
        """Remember a result -> its record; of a `run` the peak of memory, too."""
        record = dict(part=part, **more, tokens_per_s=tokens / times["median_s"], **times)
        if run:
            record["MiB"] = peak_bytes(self.device, run) / 2**20
        self.records.append(record)
        return record


# ---- clocks, memory, tables

def clock(device, run):
    """Seconds that run() takes: of the processor on one CPU thread (those of several would add up)."""
    timer = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronize = getattr(torch, device.type).synchronize
    synchronize()
    began = timer()
    run()
    synchronize()
    return timer() - began


def race(bench, runs, seconds, fewest=math.inf):
    """The contestants (name -> function) take turns, three rounds or more, until the seconds are over -> name -> times.

    One that fails (out of memory) is left out with a line, and after `fewest` those for whose rounds there is no time.
    """
    began, times, late = time.perf_counter(), {}, []
    for name, run in runs.items():              # a round takes as long as these first calls, or less after compiling
        if len(times) >= fewest and time.perf_counter() - began > seconds / (1 if bench.compile else 4):
            late.append(name)
            continue
        try:
            clock(bench.device, run)
            times[name] = []
        except Exception as fault:
            say(f"{name} left out: {type(fault).__name__}: {str(fault).partition(chr(10))[0]}")
    say(f"\nno time for {', '.join(late)}; more --minutes") if late else None
    gc.collect()                                # not within a round: the profiler of peak_bytes leaves much
    while times and (any(len(t) < 3 for t in times.values()) or time.perf_counter() - began < seconds):
        for name in times:
            times[name].append(clock(bench.device, runs[name]))
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4, method="inclusive")
        times[name] = dict(median_s=median, spread=(high - low) / 2 / median, runs=len(t))
    return times


def peak_bytes(device, run):
    """The most bytes that torch's allocator has handed out at one time during run(), beyond those before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as prof:
        run()
    events = (e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate(events, initial=0))


def table(title, records):
    """Prints the fields of the records, but for those that only the JSON has."""
    def cell(x):
        if isinstance(x, float):
            return f"{x:,.0f}" if x > 100 else f"{x:.3g}"
        return "-" if x is None else f"{x:,}" if type(x) is int else str(x)

    names = [name for name in records[0] if name not in ("part", "median_s", "runs")]
    rows = [names, *([cell(record[name]) for name in names] for record in records)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    say("\n" + title)
    for row in rows:
        say("  " + "  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]))


# ---- the parts

def layer(bench, width, head=HEAD, **differences):
    """The mixer of a one-block LM, so that its weights start as they do in training."""
    shape = dict(vocab_size=2, n_layer=1, n_embd=width, n_head=width // head, head_dim=head)
    model = models.LM(models.Config(**{**differences, **shape})).to(bench.device)
    mixer = model.blocks[0].mixer
    if bench.compile:
        model.compile_memory()
        if isinstance(mixer, models.Attention):               # which is compiled with its block otherwise
            mixer.compile()
    return mixer


def both(bench, layer, x):
    """Forward and backward of a layer x (B, T, width) -> (y, ..) or y, to x and all parameters."""
    with train.autocast(bench.device, bench.dtype):
        y = layer(x)
    y, inputs = y[0] if isinstance(y, tuple) else y, [x, *layer.parameters()]
    torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)        # a peer may have idle weights


def part_layer(bench):
    batch, width = bench.pick((1, 64), (1, 256), (4, 1024))
    lengths = bench.pick([32, 64], [256, 1024, 4096, 16384], [1024, 4096, 16384, 65536])
    left, over = {"WORK": layer(bench, width, **WORK)}, time.perf_counter() + bench.seconds
    for name in bench.models:
        config = models.Config(**models.PRESETS[name])
        small = config.mixer == "memory" and config.features not in ("none", "exp")
        left[name] = layer(bench, width, SMALL_HEAD if small else HEAD, **models.PRESETS[name], expansion=2)
    for i, T in enumerate(lengths):
        x = torch.randn(batch, T, width, device=bench.device, requires_grad=True)
        runs = {name: partial(both, bench, made, x) for name, made in left.items()}
        left_s = (over - time.perf_counter()) / (len(lengths) - i)
        times = race(bench, runs, left_s, fewest=math.inf if bench.quick else 2)
        table(f"layer: forward + backward, batch {batch}, width {width}, heads of {HEAD} ({SMALL_HEAD} with monomials)",
              [bench.keep("layer", t, batch * T, runs[name], name=name, T=T) for name, t in times.items()])
        left = {name: left[name] for name in times}


def rule_run(device, rule, batch, H, T):
    """-> omega() forward and backward, HEAD numbers a head, 2 HEAD hidden, tokens that keep the memory bounded."""
    def rand(*shape):
        return torch.rand(batch, H, T, *shape, device=device)
    q, k, v = (F.normalize(rand(HEAD) - 0.5, dim=-1) for _ in range(3))
    gates = [1 - 0.001 * rand(), rand() / rule.chunk, rand(), rand(rule.window) / rule.window]
    shapes = memory.shapes(rule.memory, HEAD, 2 * HEAD, HEAD)
    M0 = [torch.randn(H, a, b, device=device) / a**0.5 for a, b in shapes]
    leaves, phi = [a.requires_grad_() for a in (q, k, v, *gates, *M0)], Features("none", HEAD)

    def run():
        y, _ = omega.omega(rule, phi, q, k, v, omega.Gates(*gates), omega.start(rule, phi, M0, batch))
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    return run


def part_rule(bench):
    (batch, H, length), n = bench.pick((1, 2, 64), (1, 4, 2048), (4, 16, 4096)), bench.pick(256, 1024, 8192)
    a, rows = torch.randn(n, n, device=bench.device), []
    runs = {"product": partial(torch.mm, a, a)}
    if bench.compile:
        omega.compile_chunks()
    for w, c, m in (8, 64, 0), (1, 64, 0), (64, 64, 0), (8, 16, 0), (8, 256, 0), (8, 64, 64), (8, 64, 16), (8, 64, 1):
        T = length // 8 if m == 1 else length
        runs[w, c, m, T] = rule_run(bench.device, omega.Rule(window=w, chunk=c, muon_every=m), batch, H, T)
    times = race(bench, runs, bench.seconds)
    best = 2 * n**3 / times.pop("product")["median_s"]
    for key, t in times.items():
        with bench.eager(), FlopCounterMode(display=False) as counter:
            runs[key]()
        rate, (w, c, m, T) = counter.get_total_flops() / t["median_s"], key
        rows.append(bench.keep("rule", t, batch * T, runs[key], window=w, chunk=c, muon_every=m, T=T,
                               gflops=rate / 1e9, of_product=rate / best))
    table(f"rule: omega() alone, forward + backward, batch {batch}, {H} heads of {HEAD}, MLP memory of {2 * HEAD};\n"
          f"gflops of its matrix products, a second; a product of {n} x {n} makes {best / 1e9:,.1f}", rows)


def part_step(bench):
    size, runs = bench.pick("tiny", "tiny", "baby"), {}
    ids = torch.randint(models.Config.vocab_size, (100_000,)).numpy()
    for name in bench.models:
        tc, config = train.settings(dict(model=name, size=size))
        tc = replace(tc, batch_size=1, seq_len=64) if bench.quick else tc
        model = models.LM(config).to(bench.device).train()
        if bench.compile:
            model.compile_memory()
        scale = 0.01                            # of the learning rates: there is no warm-up
        how = muon.make_optimizers(model, tc), tc, ids, 0, scale, bench.device, bench.dtype
        runs[name, model.num_params()] = partial(train.train_step, model, *how)
    times = race(bench, runs, bench.seconds)
    base = next((t["median_s"] for (name, _), t in times.items() if name == "transformer"), None)
    table(f"step: size {size}, batch {tc.batch_size} x {tc.seq_len}; of_transformer: time over the transformer's", [
        bench.keep("step", t, tc.batch_size * tc.seq_len, name=name, parameters=n, ms=1e3 * t["median_s"],
                   of_transformer=base and t["median_s"] / base) for (name, n), t in times.items()])


@torch.inference_mode()                         # as models.LM.generate
def decode(model, state, n):
    """n tokens, one by one. The state that goes in is never changed, so each round starts from the same one."""
    one = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    for _ in range(n):
        _, state = model(one, state)


@torch.inference_mode()
def part_decode(bench):
    """One block is enough: blocks are alike, their times and bytes add up."""
    (early, late), runs = bench.pick((128, 256), (1024, 16384), (4096, 65536)), {}               # ends of chunks
    for name in bench.models:
        model, state = models.build(name, n_layer=1).to(bench.device).eval(), None
        n = model.config.chunk if model.config.mixer == "memory" and not bench.quick else 8     # its end counts once
        text = torch.randint(model.config.vocab_size, (1, late), device=bench.device)
        for t, piece in enumerate(text.split(early, 1), 1):
            _, state = model(piece, state)
            if t * early in (early, late):
                runs[name, t * early, n, models.state_bytes(state)] = partial(decode, model, state, n)
    table("decode: one block, batch 1", [
        bench.keep("decode", t, n, name=name, position=position, ms_per_token=1e3 * t["median_s"] / n, state_bytes=size)
        for (name, position, n, size), t in race(bench, runs, bench.seconds).items()])


def peer(bench, name, width, chunk, muon):
    """A layer by its name; other people's are called as on PyPI."""
    if name == "attention":
        return layer(bench, width, mixer="attention", attn_window=0)
    if name == "ours":                          # as near to Titans' memory as ATLAS comes
        return layer(bench, width, **{**WORK, "chunk": chunk, "muon": muon, "muon_every": chunk})
    if name == "titans-pytorch":                # gradients move on with every chunk (batch_size), as ours do
        from titans_pytorch import MemoryMLP, NeuralMemory
        mlp = MemoryMLP(HEAD, depth=2, expansion_factor=2.0)
        how = dict(chunk_size=chunk, batch_size=chunk, momentum=True, spectral_norm_surprises=muon)
        return NeuralMemory(dim=width, heads=width // HEAD, dim_head=HEAD, model=mlp, **how).to(bench.device)
    from fla.layers import DeltaNet             # Triton; a linear memory, no window, no momentum, no forgetting
    return DeltaNet(hidden_size=width, num_heads=width // HEAD).to(bench.device)


def part_peers(bench):
    batch, T, width = bench.pick((1, 64, 64), (1, 2048, 256), (4, 4096, 1024))
    cases = [("attention", None, None)] + [("flash-linear-attention", 64, None)] * (bench.device.type == "cuda")
    cases += [(name, *how) for how in itertools.product((64, 16), (False, True)) for name in ("ours", "titans-pytorch")]
    x, runs, rows = torch.randn(batch, T, width, device=bench.device, requires_grad=True), {}, []
    for name, *how in cases:
        try:
            runs[name, *how] = partial(both, bench, peer(bench, name, width, *how), x)
        except ImportError as fault:
            say(f"{name} left out: {fault}; pip install {name}")
    times = race(bench, runs, bench.seconds)
    for (name, chunk, muon), t in times.items():
        rival, version = times.get(("titans-pytorch", chunk, muon)), metadata.version(name) if "-" in name else None
        rows.append(bench.keep("peers", t, batch * T, runs[name, chunk, muon], name=name, version=version, chunk=chunk,
                               newton_schulz=muon, times_titans=rival and rival["median_s"] / t["median_s"]))
    table(f"peers: a layer, forward + backward, batch {batch}, T {T}, width {width}, heads of {HEAD}, MLP memory of "
          f"{2 * HEAD}, momentum;\ntimes_titans is speed over that of titans-pytorch", rows)


# ---- picture, and all of it

PARTS = dict(layer=(part_layer, 8), rule=(part_rule, 2), step=(part_step, 4), decode=(part_decode, 3),
             peers=(part_peers, 3))             # and their shares of the time
COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"              # Okabe and Ito's


def plot(records, path):
    """Speed of layers over length. matplotlib is optional: only this needs it."""
    from matplotlib.figure import Figure
    figure, rows = Figure(figsize=(7, 4.5), layout="constrained"), [r for r in records if r["part"] == "layer"]
    ax, styles = figure.subplots(), zip(itertools.cycle(COLOURS), itertools.cycle("os^vDPX<>*"))
    for name, (colour, marker) in zip(dict.fromkeys(r["name"] for r in rows), styles):
        points = [(r["T"], r["tokens_per_s"]) for r in rows if r["name"] == name]
        ax.loglog(*zip(*points), base=2, color=colour, marker=marker, label=name)
    ax.set(xlabel="sequence length [tokens]", ylabel="forward + backward of one layer [tokens/s]")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    ax.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=100)
    say(f"wrote {path}")


def describe(bench):
    """What makes the figures worth keeping."""
    chip, info = platform.machine(), Path("/proc/cpuinfo")
    if bench.device.type == "cuda":
        chip = torch.cuda.get_device_name()
    elif info.exists():
        chip = next((s.split(":")[1].strip() for s in info.read_text().splitlines() if "model name" in s), chip)
    how = dict(cwd=Path(__file__).parent, shell=True, capture_output=True, text=True)
    return dict(device=chip, threads=torch.get_num_threads(), dtype=str(bench.dtype)[6:], compile=bench.compile,
                matmul=torch.get_float32_matmul_precision(), torch=str(torch.__version__),
                commit=subprocess.run("git describe --always --dirty", **how).stdout.strip())


def parse(argv=None):
    parser = train.Parser(prog="bench.py", description=__doc__)
    add = parser.add_argument
    add("--part", action="append", choices=tuple(PARTS), help="what to measure; may be given several times [all]")
    add("--model", action="append", choices=tuple(models.PRESETS), help="of layer, step and decode, likewise [all]")
    add("--minutes", type=at_least(float, 0), default=2.0, metavar="X", help="about so long; more reaches further [2]")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="[auto: cuda if there is one]")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of autocast [auto: on a CPU float32]")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile layers and steps [on CUDA]")
    add("--threads", type=at_least(int, 1), default=1, metavar="N", help="CPU threads [1]")
    add("--json", metavar="FILE", help="write all records there")
    add("--plot", nargs="?", const="results/bench.png", metavar="FILE", help="draw layer [results/bench.png]")
    add("--quick", action="store_true", help="tiny shapes: does it run at all?")
    return parser.parse_args(argv)


def run(args):
    for path in filter(None, (args.json, args.plot)):         # fail now, not after all the work
        if not Path(path).parent.is_dir():
            raise UserError(f"no folder {Path(path).parent} for {path}; make it first")
    if args.plot and ("layer" not in (args.part or PARTS) or not importlib.util.find_spec("matplotlib")):
        raise UserError("--plot draws --part layer, and needs matplotlib (pip install matplotlib)")
    device, parts = train.setup(args.device, args.threads), {name: PARTS[name] for name in args.part or PARTS}
    torch.manual_seed(0)
    compile = device.type == "cuda" if args.compile is None else args.compile
    dtype = torch.float32 if args.dtype == "auto" and device.type == "cpu" else train.pick_dtype(args.dtype, device)
    # in part layer those that come last may find no time
    names = sorted(args.model or models.PRESETS, key=lambda name: name not in ("transformer", train.TrainConfig.model))
    bench = Bench(device, dtype, compile, args.quick, names)
    about = describe(bench)
    say("  ".join(f"{name} {value}" for name, value in about.items()))
    try:
        for name, (part, share) in parts.items():
            bench.seconds = 0 if args.quick else 60 * args.minutes * share / sum(s for _, s in parts.values())
            with bench.eager(name == "decode"):               # as sample.py
                part(bench)
    finally:                                                  # Ctrl-C loses nothing that was measured
        if args.json:
            result = dict(argv=sys.argv[1:], machine=about, records=bench.records)
            Path(args.json).write_text(json.dumps(result) + "\n")
    if args.plot:
        plot(bench.records, args.plot)


def main(argv=None):
    return train.exit_code(partial(run, parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
