"""bench.py - how fast, on this machine: tokens/s, forward and backward.

    python bench.py                                      short for bench.py layer
    python bench.py layer --plot                         one layer with its projections, of several models, over length
    python bench.py rule                                 the rule alone, over window, chunk, muon_every and shard
    python bench.py peers --minutes 3                    the same work by attention and, if installed, titans-pytorch

Contestants take turns, three times, so a busy moment of the machine hits all of them. Speeds are medians, and +-
is the distance of the quartiles over the median. On CUDA layers are compiled, in bfloat16 where that is native.
"""
import itertools
import platform
import sys
import time
from functools import partial
from importlib.util import find_spec

import torch
from torch.utils.benchmark import Measurement, Timer

import models
from common import Parser, add_number, add_tasks, autocast, pick_dtype, picture, run_task, say, with_task

HEAD, SMALL_HEAD = 64, 16             # small heads in `layer`: 64 numbers have 2,145 monomials of degree 0 to 2
MLP = dict(memory="mlp", expansion=2, features="none", forget="zero")           # the memory of `rule` and `peers`


def race(device, contestants, minutes):
    """Time contestants (columns, tokens, call) in turns, for about so long -> a row each: columns, speed, spread."""
    threads, a_turn, rows = torch.get_num_threads(), 60 * minutes / 3 / len(contestants), []
    # one CPU thread counts its own time, so that other programs take none of it; the times of several would add up
    clock = dict(timer=time.process_time) if device.type == "cpu" and threads == 1 else {}
    timers = [Timer("call()", globals=dict(call=call), num_threads=threads, **clock) for *_, call in contestants]
    turns = [[timer.blocked_autorange(min_run_time=a_turn) for timer in timers] for _ in range(3)]
    for (columns, tokens, _), parts in zip(contestants, zip(*turns)):
        [found] = Measurement.merge(parts)
        speed, spread = tokens / found.median, found.iqr / found.median
        rows.append(columns | dict(tokens_per_s=speed, spread=spread))
        say("  ".join(f"{name} {a!s:14}" for name, a in columns.items()) + f"{speed:12,.0f} tokens/s +- {spread:.1%}")
    return rows


def results(device, rows):
    """Return what --json keeps: the machine and the rows."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return dict(machine=dict(device=name, threads=torch.get_num_threads(), torch=torch.__version__), records=rows)


def layer(device, width, head_dim=HEAD, **differences):
    config = models.Config(n_embd=width, n_head=width // head_dim, head_dim=head_dim, **differences)
    made = models.Block(config).layer.to(device)
    if device.type == "cuda":
        models.compile_chunks()
        if isinstance(made, models.Attention):                # in a model its whole block is compiled
            made.compile()
    return made


def both(layer, x):
    """Run a layer x (B, T, width) -> (y, ..) forward, and backward to x and all parameters."""
    with autocast(x.device, pick_dtype("auto" if x.is_cuda else "float32", x.device)):
        y = layer(x)[0]
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y), allow_unused=True)  # a peer may have idle ones


def layer_task(args, device):
    """Time one layer with its projections, of several models, over length."""
    how, rows = dict(head_dim=SMALL_HEAD, expansion=2), []
    layers = {name: layer(device, args.width, **models.sized(name, "tiny") | how) for name in args.model}
    for T in args.lengths:
        x = torch.randn(args.batch_size, T, args.width, device=device, requires_grad=True)
        rows += race(device, [(dict(name=name, T=T), args.batch_size * T, partial(both, made, x))
                              for name, made in layers.items()], args.minutes / len(args.lengths))
    lines = {name: [[row[key] for row in rows if row["name"] == name] for key in ("T", "tokens_per_s")]
             for name in layers}
    picture(args.plot, lines, "sequence length [tokens]", "forward + backward of one layer [tokens/s]", log="xy")
    return results(device, rows)


def rule_call(args, device, T, shard, muon_every, **how):
    """Return a function that runs the rule over T tokens, forward and backward."""
    how |= dict(shard=shard, muon=muon_every > 0, muon_every=max(1, muon_every))
    made = layer(device, args.width, **MLP, max_norm=0.0, **how)
    x = torch.randn(args.batch_size, T, args.width, device=device)
    state = made.start(x)
    with torch.no_grad():
        *qkv, gates, _ = made.project(x, state)
    leaves = [a.requires_grad_() for a in (*qkv, *gates[:4])]
    leaves += [p for name, p in made.named_parameters() if "M0" in name]

    def call():
        y, _ = made.learn(*qkv, gates, state.fast)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    return call


def rule_task(args, device):
    """Time the rule alone, without projections, over its settings."""
    contestants = []
    for w, c, m, shard in ((8, 64, 0, 0), (1, 64, 0, 0), (64, 64, 0, 0), (8, 16, 0, 0), (8, 16, 0, 256), (8, 256, 0, 0),
                           (8, 64, 64, 0), (8, 64, 16, 0), (8, 64, 16, 256), (8, 64, 1, 0)):
        T = args.length // 8 if m == 1 else args.length       # Newton-Schulz after each token takes long
        columns = dict(window=w, chunk=c, muon_every=m, shard=shard, T=T)
        contestants.append((columns, args.batch_size * T, rule_call(args, device, **columns)))
    return results(device, race(device, contestants, args.minutes))


def peers_task(args, device):
    """Time attention, our layer with Titans' rule (which adds a window and a convolution), and titans-pytorch."""
    titans = find_spec("titans_pytorch")
    layers = [("attention", None, None, layer(device, args.width, attention=True, attn_window=0))]
    for c, ns in itertools.product((64, 16), (False, True)):  # chunk, newton_schulz
        layers.append(("ours", c, ns, layer(device, args.width, **MLP, chunk=c, muon=ns, muon_every=c)))
        if titans:
            from titans_pytorch import MemoryMLP, NeuralMemory
            mlp = MemoryMLP(HEAD, depth=2, expansion_factor=2.0)      # as ours: its gradients move on every batch_size
            made = NeuralMemory(dim=args.width, heads=args.width // HEAD, dim_head=HEAD, model=mlp, chunk_size=c,
                                batch_size=c, momentum=True, spectral_norm_surprises=ns)
            layers.append(("titans-pytorch", c, ns, made.to(device)))
    x = torch.randn(args.batch_size, args.length, args.width, device=device, requires_grad=True)
    contestants = [(dict(name=name, chunk=c, newton_schulz=ns), args.batch_size * args.length, partial(both, made, x))
                   for name, c, ns, made in layers]
    return results(device, race(device, contestants, args.minutes))


TASKS = dict(layer=layer_task, rule=rule_task, peers=peers_task)


def parse(argv=None):
    parser = Parser(prog="bench.py", description=__doc__, usage="python %(prog)s [TASK] [flags]")
    layer, rule, peers = parsers = add_tasks(parser, TASKS, plot=["layer"], threads=1)
    for task in parsers:
        add_number(task, "--minutes", 0.0, 2.0, "about so long")
        add_number(task, "--batch-size", 1, 1, "texts at a time")
        add_number(task, "--width", HEAD, 256, f"width of the layer, a multiple of {HEAD}")
    usual = ["transformer", "titans", "omeganet", "atlas", "atlas-delta"]
    layer.add_argument("--model", nargs="+", choices=tuple(models.PRESETS), default=usual, help=" ".join(usual))
    add_number(layer, "--lengths", 1, [256, 1024, 4096], "tokens of a text")
    for task in rule, peers:
        add_number(task, "--length", 8, 2048, "tokens of a text")
    return parser.parse_args(with_task(argv, "layer"))


def main(argv=None):
    return run_task(parse, argv)


if __name__ == "__main__":
    sys.exit(main())
