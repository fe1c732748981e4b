"""bench.py - how fast, on this machine.

    python bench.py                                      every part, a few minutes of one CPU thread
    python bench.py --part layer --minutes 9 --plot      one part, with time for its longest sequences, and a picture

    layer    one layer with its projections, forward + backward: tokens/s and memory over length
    rule     the rule alone: the same over window, chunk and muon_every
    step     a training step of train.py
    decode   ms a token and bytes of state, early and late in a stream
    peers    the same work done by attention and by titans-pytorch, where that is installed

Contestants take turns, so a busy moment of the machine hits all of them. Times are medians without the first call,
which may compile; `spread` is half the distance of the quartiles over the median. `MiB` is the peak of torch's memory.
"""
import argparse
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")               # or torch's profiler talks on stderr
import torch
from torch.profiler import ProfilerActivity, profile

import chunks
import models
import train
from common import (Parser, add_device, at_least, autocast, check_files, exit_code, pick_dtype, picture, refuse_unused,
                    say, setup, title)
from layer import state_bytes

HEAD, SMALL_HEAD = 64, 16             # small heads in part layer: 64 numbers have 2,145 monomials of degree 0 to 2
MLP = dict(memory="mlp", expansion=2, features="none", forget="zero")           # the memory of the parts rule and peers


# ---- clocks, memory, tables
def clock(device, call):
    """Return the seconds that call() takes; on one CPU thread of the processor, which several threads would add up."""
    timer = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronize = getattr(torch, device.type).synchronize
    synchronize()
    began = timer()
    call()
    synchronize()
    return timer() - began


def race(device, contestants, seconds, memory=False):
    """Let contestants (columns, tokens, call) take turns, three rounds or more, until the seconds are over -> rows.
    `memory` adds the peak MiB to the rows. A contestant that fails, as for want of memory, is left out with a line."""
    began, racing = time.perf_counter(), []
    for columns, tokens, call in contestants:
        try:
            clock(device, call)
            racing.append((columns, tokens, call, []))
        except Exception as fault:
            say(f"{' '.join(map(str, columns.values()))} left out: {fault!r:.200}")
    while racing and (len(racing[-1][-1]) < 3 or time.perf_counter() - began < seconds):
        for _, _, call, times in racing:
            times.append(clock(device, call))
    for columns, tokens, call, times in racing:
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        columns.update(dict(MiB=peak_mib(device, call)) if memory else {}, tokens_per_s=tokens / median,
                       spread=(high - low) / 2 / median, median_s=median, runs=len(times))
    return [columns for columns, *_ in racing]


def peak_mib(device, call):
    """Return the most MiB that torch's allocator has handed out at one time during call(), beyond those before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as prof:
        call()
    events = (e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate(events, initial=0)) / 2**20


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
    for first, *others in zip(*columns):
        say("  " + "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))


# ---- the parts: each yields title and rows of its tables
def layer(args, width, head_dim=HEAD, **differences):
    config = models.Config(n_embd=width, n_head=width // head_dim, head_dim=head_dim, **differences)
    made = models.Block(config).layer.to(args.device)
    if args.compile and isinstance(made, models.Attention):   # in a model its whole block is compiled
        made.compile()
    return made


def both(args, layer, x):
    """Run a layer x (B, T, width) -> (y, ..) forward, and backward to x and all parameters."""
    with autocast(args.device, args.dtype):
        y = layer(x)[0]
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y), allow_unused=True)  # a peer may have idle ones


def part_layer(args, seconds):
    """Time one layer with its projections over length."""
    batch, width = ((1, 64), (1, 256), (4, 1024))[args.scale]
    lengths = ((32, 64), (256, 1024, 4096, 16384), (1024, 4096, 16384, 65536))[args.scale]
    how = dict(head_dim=SMALL_HEAD, expansion=2)
    layers = {name: layer(args, width, **models.PRESETS[name] | how) for name in args.model}
    end, rows = time.perf_counter() + seconds, []
    for i, T in enumerate(lengths):
        left = end - time.perf_counter()
        if not args.quick and 20 * sum(row["median_s"] for row in rows) > left:      # five calls of fourfold T
            say(f"\nno time for T {T:,}; more --minutes")
            break
        x = torch.randn(batch, T, width, device=args.device, requires_grad=True)
        contestants = [(dict(name=name, T=T), batch * T, partial(both, args, made, x)) for name, made in layers.items()]
        rows = race(args.device, contestants, left / (len(lengths) - i), memory=True)
        yield f"forward + backward, batch {batch}, width {width}, heads of {SMALL_HEAD}", rows


def rule_call(args, batch, H, T, shard, muon_every, **how):
    """Return a function that runs the rule, with shards of `shard` tokens if that is not 0, forward and backward."""
    how |= dict(shard=shard, muon=muon_every > 0, muon_every=max(1, muon_every))
    made = layer(args, H * HEAD, **MLP, max_norm=0.0, **how)
    x = torch.randn(batch, T, H * HEAD, device=args.device)
    state = made.start(x)
    with torch.no_grad():
        *qkv, gates, _ = made.project(x, state)
    leaves = [a.requires_grad_() for a in (*qkv, *gates[:4])]
    leaves += [p for name, p in made.named_parameters() if "M0" in name]

    def call():
        y, _ = made.learn(*qkv, gates, state.fast)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    return call


def part_rule(args, seconds):
    """Time the rule without a network over its settings."""
    (batch, H, length), contestants = ((1, 2, 128), (1, 4, 2048), (4, 16, 4096))[args.scale], []
    for w, c, m, shard in ((8, 64, 0, 0), (1, 64, 0, 0), (64, 64, 0, 0), (8, 16, 0, 0), (8, 16, 0, 256), (8, 256, 0, 0),
                           (8, 64, 64, 0), (8, 64, 16, 0), (8, 64, 16, 256), (8, 64, 1, 0)):
        T = length // 8 if m == 1 else length                 # Newton-Schulz after each token takes long
        columns = dict(window=w, chunk=c, muon_every=m, shard=shard, T=T)
        contestants.append((columns, batch * T, rule_call(args, batch, H, **columns)))
    yield (f"the rule alone, forward + backward, batch {batch}, {H} heads of {HEAD}, MLP memory of {2 * HEAD}",
           race(args.device, contestants, seconds, memory=True))


def part_step(args, seconds):
    """Time a training step of train.py."""
    how = (dict(size="tiny", batch_size=1, seq_len=64), dict(size="tiny"), dict(size="baby"))[args.scale]
    contestants = []
    for name in args.model:
        tc, config = train.settings(dict(how, model=name))
        task, model = train.Task(tc, args.device, args.dtype), models.LM(config).to(args.device).train()
        task.draw = lambda number, _: torch.randint(models.Config.vocab_size, (2, tc.batch_size, tc.seq_len))
        if args.compile:
            model.compile_memory()
        call = partial(train.train_step, model, task.optimizers(model), task, tc.steps)      # whose rate is 0
        contestants.append((dict(name=name, parameters=model.num_params()), tc.batch_size * tc.seq_len, call))
    rows = race(args.device, contestants, seconds)
    yield f"size {tc.size}, batch {tc.batch_size} x {tc.seq_len}", [dict(row, ms=1e3 * row["median_s"]) for row in rows]


def decode(model, tokens, state):
    """Read tokens (1, n) one by one. The state that goes in never changes, so each round starts from the same one."""
    for token in tokens.split(1, 1):
        _, state = model(token, state)


@torch.inference_mode()                         # as models.LM.generate
def part_decode(args, seconds):
    """Time single tokens, in one block: blocks are alike, and their times and bytes add up."""
    (early, late), contestants = ((128, 256), (1024, 16384), (4096, 65536))[args.scale], []  # ends of chunks
    for name in args.model:
        model, state = models.build(name, n_layer=1).to(args.device).eval(), None
        n = model.config.chunk                                # the end of a chunk counts once
        for position in range(early, late + 1, early):
            tokens = torch.randint(model.config.vocab_size, (1, early), device=args.device)
            _, state = model(tokens, state)
            if position in (early, late):
                columns = dict(name=name, position=position, state_bytes=state_bytes(state))
                contestants.append((columns, n, partial(decode, model, tokens[:, :n], state)))
    rows = race(args.device, contestants, seconds)
    yield "one block, batch 1", [dict(row, ms_per_token=1e3 / row["tokens_per_s"]) for row in rows]


def part_peers(args, seconds):
    """Time attention, our layer with Titans' rule, to which it adds a window and a convolution, and titans-pytorch."""
    batch, T, width = ((1, 64, 64), (1, 2048, 256), (4, 4096, 1024))[args.scale]
    titans = "".join(f"{d.name} {d.version}" for d in metadata.distributions(name="titans-pytorch"))    # "": not there
    layers = [("attention", None, None, layer(args, width, attention=True, attn_window=0))]
    for c, ns in itertools.product((64, 16), (False, True)):  # chunk, newton_schulz
        layers.append(("ours", c, ns, layer(args, width, **MLP, chunk=c, muon=ns, muon_every=c)))
        if titans:
            from titans_pytorch import MemoryMLP, NeuralMemory
            mlp = MemoryMLP(HEAD, depth=2, expansion_factor=2.0)      # as ours: its gradients move on every batch_size
            made = NeuralMemory(dim=width, heads=width // HEAD, dim_head=HEAD, model=mlp, chunk_size=c, batch_size=c,
                                momentum=True, spectral_norm_surprises=ns)
            layers.append((titans, c, ns, made.to(args.device)))
    x = torch.randn(batch, T, width, device=args.device, requires_grad=True)
    rows = race(args.device, [(dict(name=name, chunk=c, newton_schulz=ns), batch * T, partial(both, args, made, x))
                              for name, c, ns, made in layers], seconds, memory=True)
    rivals = {(row["chunk"], row["newton_schulz"]): row["tokens_per_s"] for row in rows if row["name"] == titans}
    for row in rows:
        rival = rivals.get((row["chunk"], row["newton_schulz"]))
        row["times_titans"] = rival and row["tokens_per_s"] / rival
    yield (f"a layer, forward + backward, batch {batch}, T {T}, width {width}, heads of {HEAD}, MLP memory of "
           f"{2 * HEAD},\nmomentum; times_titans: speed over {titans or 'titans-pytorch, not installed'}", rows)


# ---- all of it
PARTS = dict(layer=(part_layer, 8), rule=(part_rule, 2), step=(part_step, 4), decode=(part_decode, 3),
             peers=(part_peers, 3))             # and their shares of the time
USES = dict(layer="model plot dtype compile", rule="compile", step="model dtype compile", decode="model",
            peers="dtype compile")


def measure(args):
    """Run the parts, print their tables, keep and draw the results."""
    parts = {name: PARTS[name] for name in args.part or PARTS}
    refuse_unused([name for name, a in vars(args).items() if a and a != "auto"], parts, USES)
    check_files(args.plot, args.json)
    args.device, args.model = setup(args.device, args.threads), args.model or list(models.PRESETS)
    cpu = args.device.type == "cpu"
    args.scale = 0 if args.quick else 2 if args.device.type == "cuda" else 1
    args.dtype = pick_dtype("float32" if cpu and args.dtype == "auto" else args.dtype, args.device)
    args.compile = not cpu if args.compile is None else args.compile
    if args.compile:
        chunks.compile_chunks()
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
    chip = torch.cuda.get_device_name() if args.device.type == "cuda" else [*names, platform.machine()][0]
    machine = dict(device=chip, threads=torch.get_num_threads(), dtype=str(args.dtype)[6:], compile=args.compile,
                   matmul=torch.get_float32_matmul_precision(), torch=str(torch.__version__),
                   commit=subprocess.getoutput(f"git -C '{Path(__file__).parent}' describe --always --dirty 2>&-"))
    result = dict(argv=sys.argv[1:], machine=machine, records=[])
    say("  ".join(f"{name} {value}" for name, value in machine.items()))
    torch.manual_seed(0)
    for name, (part, share) in parts.items():
        seconds = 0 if args.quick else 60 * args.minutes * share / sum(s for _, s in parts.values())
        with torch.compiler.set_stance("force_eager" if name == "decode" else "default"):         # eager as sample.py
            for heading, rows in part(args, seconds):
                table(f"{name}: {heading}", rows)
                result["records"] += [dict(part=name, **row) for row in rows]
                if args.json:                                 # at once, so that Ctrl-C loses nothing
                    Path(args.json).write_text(json.dumps(result) + "\n")
    lines = {title(name): [[r[x] for r in result["records"] if r["part"] == "layer" and r["name"] == name]
                           for x in ("T", "tokens_per_s")] for name in args.model}
    picture(args.plot, lines, "sequence length [tokens]", "forward + backward of one layer [tokens/s]", log="xy")


def main(argv=None):
    parser = Parser(prog="bench.py", description=__doc__)
    add = parser.add_argument
    add("--part", action="append", choices=tuple(PARTS), help="what to measure; may be given several times [all]")
    add("--model", action="append", choices=tuple(models.PRESETS), help="of layer, step and decode, likewise [all]")
    add("--minutes", type=at_least(float, 0), default=2.0, metavar="X", help="about so long; more reaches further [2]")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of autocast [auto: on a CPU float32]")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile layers and steps [on CUDA]")
    add_device(parser, "bench.png", threads=1)
    add("--quick", action="store_true", help="tiny shapes: does it run at all?")
    return exit_code(partial(measure, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
