"""bench.py - how fast, on this machine.

    python bench.py                                          every part, about two minutes of one CPU thread
    python bench.py --part layer --minutes 5 --plot          one part, with time for its longest sequences
    python bench.py --device cuda --minutes 20 --json results/bench-h200.json

    layer    one layer, projections included: tokens/s and memory over length, chunk, window, degree, muon_every, momentum
    rule     omega() alone: FLOP/s, over those of a matrix product that takes turns with it
    step     a whole training step of train.py, of models with equally many parameters
    decode   ms a token and bytes of state, far into a stream
    peers    the same work done by other people's code, where it is installed

The contestants of a table take turns, round after round, so that a busy moment of the machine hits all of them. Each
has run before its clock starts; that first call, in which torch.compile compiles, is reported apart (first_s).
Times are medians, +- half the distance of the quartiles; on one CPU thread they are seconds of the processor, so that
other programs do not count. Memory is the peak of what torch's allocator has handed out during a forward and backward,
beyond what there was before: weights and inputs do not count. The last line is JSON.
"""
import argparse
import gc
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")   # or torch's profiler talks on stderr
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import machine
import memory
import models
import muon
import omega
import train
from machine import Parser, UserError, at_least, say
from poly import Features

HEAD, SMALL_HEAD = 64, 16                       # polynomials want small heads: 64 numbers have 2145 of degree 2
# what one setting at a time is varied from, and what the peers can do, too: Titans' memory (and a window)
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
    save: Callable = lambda: None               # writes the records, for what comes next may be cut short

    def pick(self, quick, cpu, cuda=None):
        """cuda None: as on a CPU."""
        if self.quick:
            return quick
        return cpu if cuda is None or self.device.type != "cuda" else cuda

    def keep(self, part, name, times, tokens, **more):
        """Remember a result -> '12.3K +-2%' tokens a second."""
        speed = tokens / times["median_s"]
        self.records.append(dict(part=part, name=name, **times, tokens_per_s=speed, **more))
        self.save()
        return f"{short(speed)} +-{100 * times['spread_s'] / times['median_s']:.0f}%"


def in_order(names):
    """The transformer, the default model, then the others: those that come last may find no time."""
    return sorted(names, key=lambda name: (name != "transformer", name != train.TrainConfig.model))


# ---- clocks, memory, tables

def clock_name(device):
    """Seconds of the processor on one CPU thread; of several they would add up, and a GPU's do not show."""
    coarse = sys.platform == "win32"            # its clock of the processor ticks every 16 ms
    return "process_time" if device.type == "cpu" and torch.get_num_threads() == 1 and not coarse else "perf_counter"


def now(device):
    return getattr(time, clock_name(device))()


def clock(run, device, timer=None):
    timer = timer or getattr(time, clock_name(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = timer()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return timer() - began


def race(runs, seconds, device, must=math.inf):
    """The contestants (name -> function) take turns, three rounds at least, until the seconds are over -> name -> times.

    One whose memory runs out, or that cannot be compiled, is left out, and after the first `must` those for which there is no time: a first call
    may have to compile, so what a round takes is seen at a second one.
    """
    began, first, rounds, a_round = now(device), {}, 3, 0.0
    for i, (name, run) in enumerate(runs.items()):
        if len(first) >= must and now(device) - began + rounds * a_round > seconds:
            say(f"no time for {', '.join(' '.join(n) if isinstance(n, tuple) else str(n) for n in list(runs)[i:])}")
            break
        try:
            first[name] = clock(run, device, time.perf_counter)        # compilers are other processes
            a_round += clock(run, device) if must < math.inf else 0.0
        except Exception as fault:
            if machine.out_of_memory(fault):
                say(f"{name}: out of memory")
            elif machine.of_compiler(fault):
                say(f"{name}: not compiled, {type(fault).__name__}: {machine.first_line(fault)}")
            else:
                raise
    gc.collect()                                # else within a round: what the profiler of peak_bytes leaves takes half a second
    times = {name: [] for name in first}
    while len(times) and (any(len(t) < rounds for t in times.values()) or now(device) - began < seconds):
        for name in times:
            times[name].append(clock(runs[name], device))
    return {name: summary(t, first[name]) for name, t in times.items()}


def summary(times, first):
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return dict(median_s=statistics.median(times), spread_s=(high - low) / 2, runs=len(times), first_s=first)


def peak_bytes(run, device):
    """The most bytes that torch's allocator has handed out at one time during run(), beyond those before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    # resident memory would not tell: freed blocks are kept (machine.tune_cpu) and its maximum never falls
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as prof:
        run()
    events = (e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate(events, initial=0))


def table(title, head, rows):
    say(f"\n{title}")
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        say("  " + "  ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:])]))


def short(x):
    """Three digits: 12345 -> '12.3K'."""
    power = 0
    while abs(x) >= 999.5 and power < 4:
        x, power = x / 1000, power + 1
    return f"{x:.3g}" + ("", "K", "M", "G", "T")[power]


def MiB(n):
    return f"{n / 2**20:,.0f}"


# ---- layer

def heads(width, head=HEAD):
    return dict(n_embd=width, n_head=width // head, head_dim=head)


def compiled(bench, model):
    if bench.compile:
        model.compile_memory()
    return model


def layer(bench, **differences):
    """The mixer of a one-block LM, so that its weights start as they do in training."""
    model = models.LM(models.Config(vocab_size=2, n_layer=1, **differences)).to(bench.device)
    mixer = compiled(bench, model).blocks[0].mixer
    if bench.compile and isinstance(mixer, models.Attention):                   # elsewhere it is compiled with its block
        mixer.compile(**omega.compiler(bench.device.type, {}))
    return mixer


def layer_runs(bench, layer, batch, T, width, name=""):
    """-> (name, "forward"), (name, "both") -> function; of a layer with x (B, T, width) -> (y, ..) or y."""
    x, up = (torch.randn(batch, T, width, device=bench.device) for _ in range(2))
    inputs = [x.requires_grad_(), *layer.parameters()]

    def forward():
        with machine.autocast(bench.device, bench.dtype):
            y = layer(x)
        return y[0] if isinstance(y, tuple) else y

    def both():
        y = forward()
        torch.autograd.grad(y, inputs, up.to(y.dtype), allow_unused=True)       # a peer may have idle weights

    return {(name, "forward"): torch.no_grad()(forward), (name, "both"): both}


def slow(run, rule):
    """The same run with `rule` in the place of omega.omega: the token-by-token definition, or the formulas of the chunk form."""
    return patch.object(omega, "omega", rule)(run)


def contestants(bench, width):
    """name -> Config differences of every preset as one layer, the transformer first; and WORK, as the peers meet it."""
    cases = {}
    for name in sorted(bench.models, key=lambda name: name != "transformer"):
        config = models.Config(**models.PRESETS[name])
        small = config.mixer == "memory" and config.features not in ("none", "exp")
        shape = heads(width, SMALL_HEAD if small else HEAD)
        cases[name] = {**models.PRESETS[name], **shape, "expansion": WORK["expansion"]}
    return {**cases, "WORK": {**WORK, **heads(width)}}


def part_layer(bench):
    batch, width = bench.pick((1, 64), (1, 256), (4, 1024))
    lengths = bench.pick([32, 64], [256, 1024, 4096, 16384], [1024, 4096, 16384, 65536])
    cases, over = contestants(bench, width), now(bench.device) + 0.7 * bench.seconds
    cells, cost, first, before, main = {}, {name: 0.0 for name in cases}, {}, lengths[0], train.TrainConfig.model
    for i, T in enumerate(lengths):
        left, runs = (over - now(bench.device)) / (len(lengths) - i), {}
        room = math.inf if bench.quick else left
        for name in cost:                       # seconds to expect: a warm-up, three rounds, the measurement of memory
            square = name == "transformer" or cases[name].get("features") == "exp"
            cost[name] = 6 * cost[name] * (T / before) ** (2 if square else 1) + first.get(name, 0.0)
        for name in sorted(cost, key=lambda name: (name != "transformer", name != main, cost[name])):
            if cost[name] <= room:
                room -= cost[name]
                runs.update(layer_runs(bench, layer(bench, **cases[name]), batch, T, width, name))
        must = 8 if bench.compile and not i else math.inf    # forward and both of four; all take long to compile
        times, cost, before = race(runs, left / 3, bench.device, must), {}, T
        for name in [name for name, what in times if what == "both"]:
            peak = peak_bytes(runs[name, "both"], bench.device)
            for what, more in (("forward", {}), ("both", dict(bytes=peak))):
                cells[name, what, T] = bench.keep("layer", name, times[name, what], batch * T, what=what, T=T, **more)
            cells[name, "memory", T] = MiB(peak)
            cost[name] = times[name, "forward"]["median_s"] + times[name, "both"]["median_s"]
            if bench.compile:                   # each length is another shape to compile
                first[name] = times[name, "forward"]["first_s"] + times[name, "both"]["first_s"]
    say(f"\nlayer: batch {batch}, width {width}, heads of {HEAD}, of {SMALL_HEAD} with polynomial features; "
        "- took too long, see --minutes")
    for what, title in (("both", "forward + backward, tokens/s"), ("forward", "forward, tokens/s"),
                        ("memory", "extra memory, MiB")):
        rows = [[name, *(cells.get((name, what, T), "-") for T in lengths)] for name in cases]
        table(f"layer: {title}", ["", *(f"T {T}" for T in lengths)], rows)
    definition(bench, width)
    for knob, *what in sweeps(bench, width):
        if bench.compile and not bench.quick and now(bench.device) > over + 0.3 * bench.seconds:
            say(f"\nlayer: no time for {knob}")
        else:
            sweep(bench, batch, width, knob, *what, 0.07 * bench.seconds)


def definition(bench, width):
    """What reads as the paper against what is fast: the definition, on a short sequence, and the formulas of the chunk form."""
    rows, run = [], layer(bench, **heads(width), **WORK)
    for name, rule, T in (("omega_ref, token by token", omega.omega_ref, bench.pick(8, 64)),
                          ("omega_chunk, formulas", omega.omega_chunk, bench.pick(64, 1024))):
        fast = layer_runs(bench, run, 1, T, width)["", "both"]
        runs = {name: slow(fast, rule), f"omega, T {T}": fast}                   # a name each: it is no line of the picture
        times = race(runs, 0, bench.device)
        for name, t in times.items():
            peak = peak_bytes(runs[name], bench.device)
            rows.append([name, T, bench.keep("layer", name, t, T, T=T, what="both", bytes=peak), MiB(peak)])
    table(f"layer: what reads as the paper, and omega; forward + backward (batch 1, width {width})",
          ["", "T", "tokens/s", "extra memory, MiB"], rows)


def sweeps(bench, width):
    """One setting at a time, all else as in WORK: (name, length, other differences, values)."""
    long, brief = bench.pick((64, 64), (1024, 256), (4096, 1024))
    few = slice(2) if bench.quick else slice(None)
    polynomial = dict(**heads(width, SMALL_HEAD), features="monomial")
    yield "chunk", long, {}, [16, 32, 64, 128, 256][few]
    yield "window", long, {}, [1, 4, 16, 64][few]
    yield "degree", long, polynomial, [1, 2, 3][few]
    yield "muon_every", brief, dict(muon=True), [64, 16, 4, 1][few]
    yield "momentum", brief, dict(muon=True, muon_every=1), [True, False]


def sweep(bench, batch, width, knob, T, differences, values, seconds):
    """A table of one of the sweeps: the setting `knob` at each of its values."""
    runs, rows = {}, []
    for value in values:
        case = {**WORK, **heads(width), **differences, knob: value}
        runs[value] = layer_runs(bench, layer(bench, **case), batch, T, width)["", "both"]
    for value, t in race(runs, seconds, bench.device, must=2 if bench.compile else math.inf).items():
        peak = peak_bytes(runs[value], bench.device)
        cell = bench.keep("layer", f"{knob} {value}", t, batch * T, T=T, what="both", bytes=peak)
        rows.append([value, cell, MiB(peak)])
    also = "".join(f"{name} {value}, " for name, value in differences.items())
    table(f"layer: {knob} (forward + backward, T {T}, {also}all else as in WORK)", [knob, "tokens/s", "extra MiB"], rows)


# ---- rule

def ns_flops(m, n, steps, on_gram):
    """Of Newton-Schulz on an m x n matrix, as muon.py does it."""
    m, n = min(m, n), max(m, n)
    if n < 2 * m or not on_gram:
        return steps * (4 * m * m * n + 2 * m**3)
    runs = len(muon.runs(steps))                # on Gram matrices
    return runs * 4 * m * m * n + steps * 2 * m**3 + (steps - runs) * 6 * m**3


def rule_flops(rule, D, E, hidden, T, momentum=True):
    """FLOPs of omega() for one head and T tokens, forward; backward takes twice that. A product and a sum are two.

    Matrix products only, and dense: the upper triangle of P counts in full, as it is computed; phi and the recurrence for P do not.
    c tokens a chunk, n = c + window - 1 pairs; terms in the order of omega_chunk.
    """
    c, sizes = min(rule.chunk, T), memory.shapes(rule.memory, E, hidden, D)
    n, weights, deep = c + rule.window - 1, sum(a * b for a, b in sizes), rule.memory != "linear"
    flops = 2 * n * weights + deep * 2 * n * hidden * D                          # errors: through the memory and back
    spared, w = 0, rule.window
    if rule.muon_every == 1 and not momentum and rule.ns_gram and 2 * w * w <= min(min(s) for s in sizes) ** 2:   # omega.pairs_chunk
        flops += c * w * sum(4 * w * b + (5 * rule.ns_steps - 3) * 2 * w * w + 2 * c * b for _, b in sizes)      # D D^T, K D; K; reads of K D
        flops += sum(2 * n * n * a + 2 * c * n * a + 2 * (c + n) * a * b for a, b in sizes)                      # X X^T; R X^T; reads of W; X^T K D
    elif rule.muon_every:
        blocks = -(-c // rule.muon_every)
        flops += 2 * (blocks + momentum) * n * weights                           # the sum of S of each block, and the last S
        ns = sum(ns_flops(a, b, rule.ns_steps, rule.ns_gram) for a, b in sizes)
        flops, spared = flops + blocks * ns, ns * (rule.muon_every > 1)          # by the first block of a text
        flops += 2 * (blocks > 1) * blocks**2 * weights + 4 * c * weights        # W of each block; reads of W and NS(S)
    else:
        flops += 2 * c * n * D + deep * 2 * c * n * hidden                       # R X^T of the first and the last layer
        flops += sum(2 * c * n * b for _, b in sizes)                            # (P o R X^T) D
        flops += (1 + momentum) * (2 * c * weights + 2 * n * weights)            # reads of W and S; the last W and S
    return flops * T / c - spared


def rule_run(bench, rule, batch, H, T):
    """-> a function that does omega() forward and backward on random tokens; a head has HEAD numbers, 2 HEAD hidden.

    The gates are such that the memory neither fades nor grows: with numbers that are all 0 or infinite it would be another race.
    """
    def rand(*shape):
        return torch.rand(batch, H, T, *shape, device=bench.device)
    q, k, v = (F.normalize(rand(HEAD) - 0.5, dim=-1) for _ in range(3))
    shapes = memory.shapes(rule.memory, HEAD, 2 * HEAD, HEAD)
    M0 = [torch.randn(H, a, b, device=bench.device) / a**0.5 for a, b in shapes]
    leaves = [q, k, v, 1 - 0.001 * rand(), rand() / rule.chunk, rand(), rand(rule.window) / rule.window, *M0]
    leaves, phi, up = [a.requires_grad_() for a in leaves], Features("none", HEAD), rand(HEAD)

    def run():
        q, k, v, *gates = leaves[:7]
        state = omega.start(rule, phi, leaves[7:], batch)
        torch.autograd.grad(omega.omega(rule, phi, q, k, v, omega.Gates(*gates), state)[0], leaves, up)
    return run


def product(bench, dtype):
    """-> a run that multiplies two square matrices, and its FLOPs: what the machine can do."""
    n = bench.pick(256, 1024, 8192)
    a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b), 2 * n**3


def part_rule(bench):
    batch, H, T = bench.pick((1, 2, 128), (1, 4, 2048), (4, 16, 4096))
    cases = bench.pick([(64, 0), (64, 64)], [(16, 0), (64, 0), (128, 0), (256, 0), (64, 64), (64, 16)])
    gram = muon.exact_products(bench.device)
    rules = {f"chunk {c}, muon_every {m}" if m else f"chunk {c}": omega.Rule(window=8, chunk=c, muon_every=m, ns_gram=gram)
             for c, m in cases}
    mm, mm_flops = product(bench, torch.float32)
    if bench.compile:
        omega.compile_chunks(bench.device.type)
    runs = {"product": mm, **{name: rule_run(bench, rule, batch, H, T) for name, rule in rules.items()}}
    times = race(runs, bench.seconds, bench.device, must=4 if bench.compile else math.inf)
    rules = {name: rule for name, rule in rules.items() if name in times}
    peak, rows = mm_flops / times["product"]["median_s"], []
    for name, rule in rules.items():
        flops = 3 * batch * H * rule_flops(rule, HEAD, HEAD, 2 * HEAD, T)
        rate = flops / times[name]["median_s"]
        cell = bench.keep("rule", name, times[name], batch * T, T=T, flops=flops, flops_per_s=rate,
                          product_flops_per_s=peak)
        rows.append([name, cell, short(flops), short(rate), f"{100 * rate / peak:.0f}%"])
    say(f"\nrule: float32, matmul {torch.get_float32_matmul_precision()}, batch {batch}, {H} heads of {HEAD}, T {T}, MLP memory of {2 * HEAD}, window 8; "
        f"a large matrix product makes {short(peak)}FLOP/s")
    table("rule: omega() alone, forward + backward", ["", "tokens/s", "FLOP", "FLOP/s", "of product"], rows)


# ---- step

def count(config):
    with torch.device("meta"):
        return models.LM(config).num_params()


def widen(config, target):
    """The same network, its SwiGLU as wide as it takes to have `target` parameters: 3 x width for each hidden unit."""
    base = count(replace(config, mlp_hidden=1))
    return replace(config, mlp_hidden=1 + round((target - base) / (3 * config.n_embd * config.n_layer)))


def step_flops(config, T, device):
    """Of forward and backward of one sequence, counted by torch; attention counts as T x T, as is the custom.

    Each block has as many as the next: two tell them all, and need not the memory of all. The recurrence of P does not count, as in rule_flops,
    though on a GPU it is run by products.
    """
    def counted(n_layer):
        model, tokens = models.LM(replace(config, n_layer=n_layer)).to(device), torch.zeros(1, T, dtype=torch.long, device=device)
        with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
            with sdpa_kernel(SDPBackend.MATH):  # neither compiled nor fused kernels are counted
                model.loss(tokens, tokens).backward()
        return counter.get_total_flops()
    with patch.object(omega, "recur", omega.Recurrence.apply):
        one = counted(1)
        return one + (config.n_layer - 1) * (counted(2) - one) if config.n_layer > 1 else one


def step_run(bench, config, tc, ids):
    model = compiled(bench, models.LM(config).to(bench.device).train())
    model.remat = tc.remat and config.mixer == "memory"
    optimizers, step = train.make_optimizers(model, tc), itertools.count()
    scale = 0.01                                # of the learning rates: random tokens, without a warm-up, might end in NaN
    return lambda: train.train_step(model, optimizers, tc, ids, next(step), scale, bench.device, bench.dtype)


def part_step(bench):
    sizes = bench.pick(["tiny"], ["tiny"], ["baby", "170m", "340m"])
    for size in sizes:
        step_size(bench, size, bench.seconds / len(sizes))


def step_size(bench, size, seconds):
    """One table: the transformer, the default model, and the other presets as time allows."""
    names, tc = in_order(bench.models), train.settings(dict(size=size))[0]
    tc = replace(tc, grad_accum=1, remat=size not in ("tiny", "baby"), **bench.pick(dict(batch_size=1, seq_len=64), {}))
    configs = {name: train.settings(dict(model=name, size=size))[1] for name in names}
    target = max(count(config) for config in configs.values())
    configs = {name: widen(config, target) for name, config in configs.items()}
    ids, tokens = torch.randint(models.Config.vocab_size, (100_000,)).numpy(), tc.batch_size * tc.seq_len
    mm, mm_flops = product(bench, bench.dtype)
    runs = {"product": mm, **{name: step_run(bench, config, tc, ids) for name, config in configs.items()}}
    times = race(runs, seconds, bench.device, must=math.inf if bench.quick else 3)
    peak, rows = mm_flops / times.pop("product")["median_s"], []
    for name, t in times.items():
        flops = tc.batch_size * step_flops(configs[name], tc.seq_len, bench.device)
        n, rate = count(configs[name]), flops / t["median_s"]
        ratio = t["median_s"] / times["transformer"]["median_s"] if "transformer" in times else math.nan
        cell = bench.keep("step", name, t, tokens, size=size, params=n, T=tc.seq_len, flops_per_s=rate,
                          product_flops_per_s=peak)
        rows.append([name, short(n), f"{1e3 * t['median_s']:.0f}", cell, f"{ratio:.2f}", f"{100 * rate / peak:.0f}%",
                     f"{t['first_s']:.1f}"])
    again = ", memories with --remat" if tc.remat else ""
    table(f"step: size {size}, batch {tc.batch_size} x {tc.seq_len}{again}; a large matrix product makes {short(peak)}FLOP/s",
          ["", "parameters", "ms", "tokens/s", "/ transformer's ms", "of product", "first call, s"], rows)


# ---- decode

def filled(state, n):
    """The state of a one-block transformer after n tokens: what the keys and values are does not change the cost."""
    k, v = (torch.randn(*a.shape[:2], n, a.shape[3], device=a.device) for a in (state[0].k, state[0].v))
    return (state[0]._replace(k=k, v=v, pos=n),)


def reach(bench, model, positions, seconds):
    """Stream random tokens in long pieces -> position -> state, for the positions that are reached in time."""
    began, state, at, states = now(bench.device), None, 0, {}
    for position in positions:
        while at < position:
            if at and now(bench.device) - began > seconds:
                return states
            n = min(4096, position - at)
            _, state = model(torch.randint(model.config.vocab_size, (1, n), device=bench.device), state)
            at += n
        states[position] = state
    return states


def decode_run(model, state, n):
    one = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)

    @torch.inference_mode()                     # as models.LM.generate
    def run():
        after = state                           # never written in place: every round starts from the same one
        for _ in range(n):
            _, after = model(one, after)
    return run


@torch.inference_mode()
def part_decode(bench):
    """One block is enough: blocks are alike, their times and bytes add up."""
    positions = bench.pick([128, 256], [1024 * 10**i for i in range(4)])       # ends of chunks, all of them
    over, rows, done = now(bench.device) + bench.seconds, {}, []
    for name in in_order(bench.models):
        left = over - now(bench.device)
        if len(done) >= 2 and left < 0.05 * bench.seconds and not bench.quick:
            break
        model = models.build(name, n_layer=1).to(bench.device).eval()
        if name == "transformer":               # a cache of more than 256 MiB tells nothing new
            begun = model(torch.zeros(1, 1, dtype=torch.long, device=bench.device))[1]
            states = {n: filled(begun, n) for n in positions if 8 * n * model.config.n_embd <= 2**28}
        else:
            states = reach(bench, model, positions, math.inf if bench.quick else 0.4 * left)
        n = 8 if name == "transformer" or bench.quick else model.config.chunk    # a whole chunk: each run meets its end once
        runs = {position: decode_run(model, state, n) for position, state in states.items()}
        for position, t in race(runs, 0.1 * left, bench.device).items():
            ms, size = 1e3 * t["median_s"] / n, models.state_bytes(states[position])
            bench.keep("decode", name, t, n, position=position, ms=ms, bytes=size)
            rows[name, position, "ms"], rows[name, position, "bytes"] = f"{ms:.3g}", f"{size:,}"
        done.append(name)
    head = [(p, what) for what in ("ms", "bytes") for p in positions]
    table("decode: one block, batch 1; ms a token and bytes of state at a position; - was not reached, see --minutes",
          ["", *(f"{p:,}: {what}" for p, what in head)],
          [[name, *(rows.get((name, *h), "-") for h in head)] for name in done])


# ---- peers

def titans_pytorch(bench, width, chunk, muon):
    """The same memory network, and gradients that move on with every chunk (batch_size), as ours do."""
    from titans_pytorch import MemoryMLP, NeuralMemory
    mlp = MemoryMLP(HEAD, depth=2, expansion_factor=2.0)
    return NeuralMemory(dim=width, heads=width // HEAD, dim_head=HEAD, model=mlp, chunk_size=chunk, batch_size=chunk,
                        momentum=True, spectral_norm_surprises=muon).to(bench.device)


def fla_gated_delta_rule(bench, width, chunk, muon):
    """Triton kernels; a linear memory, no window, no momentum."""
    from fla.layers import GatedDeltaNet
    return GatedDeltaNet(hidden_size=width, expand_v=1, head_dim=HEAD, num_heads=width // HEAD).to(bench.device)


def fla_delta_rule(bench, width, chunk, muon):
    """The same without forgetting: the gradient of the gated one is refused on an H200 with some versions of Triton."""
    from fla.layers import DeltaNet
    return DeltaNet(hidden_size=width, num_heads=width // HEAD).to(bench.device)


def ours(bench, width, chunk, muon):
    """WORK, which is as near to Titans' memory as ATLAS comes: no phi, and M0 is forgotten, too."""
    return layer(bench, **{**WORK, **heads(width), "chunk": chunk, "muon": muon, "muon_every": chunk})


def attention(bench, width, chunk, muon):
    return layer(bench, mixer="attention", attn_window=0, **heads(width))


FLA = "flash-linear-attention"
PEERS = {titans_pytorch: "titans-pytorch", fla_gated_delta_rule: FLA, fla_delta_rule: FLA}         # their names on PyPI


def part_peers(bench):
    batch, T, width = bench.pick((1, 128, 64), (1, 2048, 256), (4, 4096, 1024))
    settings = [(64, False), (64, True), (16, False), (16, True)][:2 if bench.quick else 4]
    cases = [(attention, 0, False)] + [(make, *s) for s in settings for make in (ours, titans_pytorch)]
    if bench.device.type == "cuda":
        cases += [(fla_gated_delta_rule, 64, False), (fla_delta_rule, 64, False)]
    runs, absent = {}, {}
    for make, chunk, muon in cases:
        try:
            made = make(bench, width, chunk, muon)
            if make in PEERS:
                layer_runs(bench, made, batch, 128, width)["", "both"]()
            runs[make, chunk, muon] = layer_runs(bench, made, batch, T, width)["", "both"]
        except Exception as fault:              # other people's code must not end our run
            if make not in PEERS:
                raise
            absent[make] = f"not installed; pip install {PEERS[make]}" if isinstance(fault, ImportError) else \
                f"it failed, {type(fault).__name__}: {machine.first_line(fault)}"
    for make, why in absent.items():
        say(f"\npeers: {make.__name__} of {PEERS[make]} skipped: {why}")
    times, rows = race(runs, bench.seconds, bench.device, must=5), []
    versions = {d.name: d.version for d in metadata.distributions() if d.name in PEERS.values()}
    for (make, chunk, muon), t in times.items():
        peak, rival = peak_bytes(runs[make, chunk, muon], bench.device), times.get((titans_pytorch, chunk, muon))
        ratio = rival["median_s"] / t["median_s"] if rival else None
        cell = bench.keep("peers", make.__name__, t, batch * T, T=T, chunk=chunk, muon=muon, bytes=peak,
                          over_titans_pytorch=ratio, version=versions.get(PEERS.get(make)))
        setting = chunk or "-", "yes" if muon else "no"
        rows.append([make.__name__, *setting, cell, f"{ratio:.2f}" if rival else "-", MiB(peak)])
    say(f"\npeers: batch {batch}, T {T}, width {width}, heads of {HEAD}, MLP memory of {2 * HEAD}, momentum; "
        "our window 8; Newton-Schulz once a chunk" + "".join(f"; {name} {version}" for name, version in versions.items()))
    table("peers: one layer, forward + backward",
          ["", "chunk", "Muon", "tokens/s", "x titans_pytorch", "extra MiB"], rows)


# ---- pictures, and all of it

PARTS = dict(layer=(part_layer, 8), rule=(part_rule, 2), step=(part_step, 4), decode=(part_decode, 3),
             peers=(part_peers, 3))             # and their shares of the time
PLOTS = dict(layer=("T", "tokens_per_s", "sequence length", "one layer, forward + backward: tokens/s"),
             decode=("position", "ms", "position in the stream", "one block: ms a token"))


def plot(records, folder):
    import matplotlib                           # optional: only this needs it
    matplotlib.use("Agg")
    from matplotlib import pyplot
    for part, (x, y, label, title) in PLOTS.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        rows = [r for r in records if r["part"] == part and r.get("what") != "forward"]
        for name in dict.fromkeys(r["name"] for r in rows):
            points = [(r[x], r[y]) for r in rows if r["name"] == name]
            if len(points) > 1:
                axes.loglog(*zip(*points), base=2, marker="o", label=name)
        if axes.lines:
            axes.set(xlabel=label, title=title)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,.7g}")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
            folder.mkdir(exist_ok=True)
            figure.savefig(folder / f"bench-{part}.png", dpi=150, bbox_inches="tight")
            say(f"wrote {folder / f'bench-{part}.png'}")
        pyplot.close(figure)


def describe(device):
    """What makes the figures worth keeping."""
    chip, info = platform.machine(), Path("/proc/cpuinfo")
    if device.type == "cuda":
        chip = f"{torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}"       # which may be what computes SDPA
    elif info.exists():
        chip = next((s.split(":")[1].strip() for s in info.read_text().splitlines() if "model name" in s), chip)
    try:
        git = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return dict(device=chip, cpus=os.cpu_count(), threads=torch.get_num_threads(), load=load, commit=commit or None,
                system=platform.platform(), python=platform.python_version(), torch=str(torch.__version__),
                time=time.strftime("%Y-%m-%d %H:%M:%S%z"))


def parse(argv):
    parser = Parser(prog="bench.py", description=__doc__)
    add = parser.add_argument
    add("--part", action="append", choices=tuple(PARTS), help="what to measure; may be given several times [all]")
    add("--model", action="append", choices=tuple(models.PRESETS), help="of layer, step and decode, likewise [all]")
    add("--minutes", type=at_least(float, 1e-9), default=2.0, metavar="X", help="about how long in all; more reaches further [2]")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="[auto: cuda if there is one]")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
        help="of autocast; auto: on a CPU float32, on a GPU as train.py [auto]")
    add("--matmul", default="auto", choices=machine.MATMUL, help="as in train.py [auto]")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile layers and steps [on CUDA]")
    add("--threads", type=at_least(int, 1), default=1, metavar="N", help="CPU threads; figures of one compare best between machines [1]")
    add("--json", metavar="FILE", help="write the JSON there, too")
    add("--plot", action="store_true", help="draw results/bench-*.png (needs matplotlib)")
    add("--quick", action="store_true", help="tiny shapes: does it run at all?")
    args = parser.parse_args(argv)
    if args.model and args.part and not {"layer", "step", "decode"}.intersection(args.part):
        parser.error("--model is for the parts layer, step and decode; drop it, or name one of them with --part")
    return args


def run(args):
    try:                                                      # now, not after all the work
        if args.json is not None:
            open(args.json, "a").close()
        if args.plot:
            import matplotlib                                 # noqa: F401
    except OSError as fault:
        raise UserError(f"cannot write --json {args.json} ({fault.strerror}); name another file") from None
    except ImportError:
        raise UserError("--plot needs matplotlib; pip install matplotlib") from None
    device = machine.pick_device(args.device)
    machine.set_threads(args.threads)
    torch.manual_seed(0)
    compile = device.type == "cuda" if args.compile is None else args.compile
    dtype = torch.float32 if args.dtype == "auto" and device.type == "cpu" else machine.pick_dtype(args.dtype, device)
    matmul = machine.set_matmul(args.matmul, device, dtype)
    names = args.model or list(models.PRESETS)
    bench = Bench(device, dtype, compile, args.quick, names)
    alone = "highest" if args.matmul == "auto" else matmul     # single tokens, which sample.py computes like this
    about = dict(describe(device), dtype=str(dtype)[6:], matmul=matmul, decode=alone, compiled=compile, clock=clock_name(device))
    say("  ".join(f"{name} {value}" for name, value in about.items()))
    parts = {name: PARTS[name] for name in args.part or PARTS}
    result = lambda: json.dumps(dict(bench="atlas", argv=sys.argv[1:], machine=about, records=bench.records))
    def save():
        try:
            Path(args.json).write_text(result() + "\n")
        except OSError as fault:
            raise machine.Halt(f"cannot write --json {args.json} ({fault.strerror}); the JSON of what was measured stands on stdout") from None

    if args.json is not None:
        bench.save = save
    try:
        for name, (part, share) in parts.items():
            bench.seconds = 0 if args.quick else 60 * args.minutes * share / sum(s for _, s in parts.values())
            torch.set_float32_matmul_precision(alone if name == "decode" else matmul)
            with torch.compiler.set_stance("force_eager" if name == "decode" else "default"):   # as train.finish
                part(bench)
            bench.save()
        if args.plot:
            plot(bench.records, Path(__file__).parent / "results")
    finally:                                                  # a file may find no place, or Ctrl-C come: what was measured is said
        say(f"\n{result()}")


def main(argv=None):
    args = parse(argv)
    machine.tune_cpu()
    return machine.exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
