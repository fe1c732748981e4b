"""eval.py - what a model can recall: of a text, of a stream without end, of pairs that it saw once.

    python eval.py --ckpt out                       loss of the validation split: whole, streamed, and by position; and
                                                    50,000 tokens in one stream: no NaN, and memory flat where the
                                                    state does not hold every token, or exit code 1
    python eval.py --ckpt out --stream 1000000      the same with a stream of a million tokens
    python eval.py --ckpt out --no-write            the same where the memory stays as it begins (with --forget zero it
                                                    fades): what is it worth?
    python eval.py --task mqar --model atlas        train a small model to recall four pairs that it saw once
    python eval.py --task mqar --model titans --window 4 --pairs 2 4     any preset, nearly any field of models.Config
    python eval.py --task online                    what a window, momentum and Newton-Schulz do for pairs that are read once: the
                                                    rule by itself, nothing is trained
    python eval.py --task online --memory mlp --features monomial --chunk 8     of another memory

Loss by position tells whether more context helps: attention gets nothing from beyond its windows, one a layer, a memory
only what it still holds. Multi-query associative recall (data.mqar draws it) asks for the values of keys that were
shown once.
"""
import argparse
import itertools
import math
import os
import sys
import time

import torch
import torch.nn.functional as F

import data
import machine
import memory
import models
import omega
import train
from machine import UserError, at_least, say

# the network of --task mqar, where no flag says otherwise: what was written is asked for some tokens later, so chunks are short
SMALL = dict(n_layer=2, n_head=2, n_embd=64, chunk=8, muon_every=1)


# ---- a checkpoint and its text

@torch.no_grad()
def position_loss(model, ids, length, batch_size, n_windows):
    """Mean nats at each position, over about n_windows evenly spaced windows -> (length,), number of windows."""
    device, whole = next(model.parameters()).device, (len(ids) - 1) // length
    total, n = torch.zeros(length, dtype=torch.float64), 0
    every = max(1, whole // n_windows)
    if every == 1:                              # what is left over is no whole window
        ids = ids[: whole * length + 1]
    for x, y in data.windows(ids, length, batch_size, every):
        total += F.cross_entropy(model(x.to(device))[0].mT.float(), y.to(device), reduction="none").sum(0).cpu()
        n += len(x)
    return total / n, n


def buckets(length):
    """[0, 16), [16, 32), [32, 64), ... up to length."""
    edges = [0, *(16 * 2**i for i in range(60) if 16 * 2**i < length), length]
    return list(zip(edges, edges[1:]))


def text_task(args, device):
    """Says everything there is to know about a checkpoint. Raises Halt where a loss is not finite."""
    ckpt = train.load_checkpoint(args.ckpt)
    model, tokenizer = train.rebuild(ckpt)
    model.to(device).eval()
    if args.no_write:
        if "max_step" in models.idle(model.config):
            raise UserError(f"--no-write: {ckpt['path']} has no memory that writes ({ckpt['preset']})")
        model.config.max_step = 0.0             # of all inner steps
    corpus, T = train.read_for(ckpt, ckpt["train"]["data"] if args.data is None else args.data), ckpt["train"]["seq_len"]
    _, val = corpus.splits(tokenizer, 1)                      # the last window of each kind may be short
    say(f"{ckpt['path']}: {ckpt['preset']}, {model.num_params():,} parameters, step {ckpt['step']}, trained on "
        f"{ckpt['data']['used']} in windows of {T}")
    part = "the validation files" if corpus.tokens else "the last tenth"
    same = "" if corpus.sha256 == ckpt["data"]["sha256"] else "; it is not the text of the training"
    say(f"{part} of {corpus.used}, {len(val):,} tokens{same}" + "; the memory writes nothing" * args.no_write)
    loss = train.report(model, tokenizer, val, T, args.batch_size)
    length = min(args.length or 4 * T, len(val) - 1)
    at, n = position_loss(model, val, length, args.batch_size, args.windows)
    say(f"\nby position, mean of {n} windows of {length}; it was trained on {T}\n  tokens before   nats/token")
    for a, b in buckets(length):
        say(f"  {a + 1:6d} - {b:6d}   {at[a:b].mean().item():.4f}" + ("   longer than in training" if b > T else ""))
    if not (math.isfinite(loss) and at.isfinite().all()):
        raise machine.Halt(f"{ckpt['path']}: a loss is not finite; its weights have diverged")
    if args.stream:
        stream(model, val, args.stream)


# ---- a stream without end

LONGEST_PIECE = 2**16                           # tokens


def resident():
    """Bytes of memory that this process occupies now; where the system does not tell, the most that it ever has; on Windows nan."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return machine.most_resident()


def pieces(ids, n, length=1024):
    """At least n tokens and the one after each, over and over the same ids, in pieces x, y (1, length).

    All pieces are equally long, for the size of a state depends on how far into a chunk it is.
    """
    ids = torch.as_tensor(ids[: n + 1]).long()
    for t in range(0, n, length):
        at = torch.arange(t, t + length) % (len(ids) - 1)
        yield ids[at][None], ids[at + 1][None]


@torch.inference_mode()
def stream(model, ids, n):
    """n tokens through one state. Raises Halt if a number is not finite, or if memory grows, in a model whose state has a size of its own."""
    device, state, seen, total, marks, base = next(model.parameters()).device, None, 0, 0.0, 0, None
    c = model.config                            # a state's size depends on the place in a chunk, and in a segment of mac
    period = math.lcm(1 if "chunk" in models.idle(c) else c.chunk, c.attn_window if c.wiring == "mac" else 1)
    if period > LONGEST_PIECE:
        return say(f"\nno stream: it is read in pieces of whole chunks and segments, here of {period:,} tokens")
    say(f"\na stream of {n:,} tokens\n     tokens  nats/token  tokens/s  resident MiB  state bytes")
    began = time.perf_counter()
    for x, y in pieces(ids, n, -(-1024 // period) * period):
        logits, state = model(x.to(device), state)
        loss = F.cross_entropy(logits[0].float(), y[0].to(device), reduction="sum").item()
        total, seen = total + loss, seen + y.numel()
        if not math.isfinite(loss):
            raise machine.Halt(f"the loss is {loss} after {seen:,} tokens of the stream")
        if 10 * seen >= (marks + 1) * n:        # another tenth
            marks, now = 10 * seen // n, (resident(), models.state_bytes(state))
            base = base or now                  # by the first tenth all buffers are there
            speed = seen / (time.perf_counter() - began)
            say(f"  {seen:9,}  {total / seen:10.4f}  {speed:8,.0f}  {now[0] / 2**20:12,.1f}  {now[1]:11,}")
    growth = [(after - before) / max(before, 1) for before, after in zip(base, now)]     # of attention to one token no state is left
    say(f"since the first tenth: resident memory {growth[0]:+.1%}, state {growth[1]:+.1%}")
    if train.holds_all(model.config):
        say("the state of this model holds every token, so it grows with the stream")
    elif any(by > 0.05 for by in growth):       # of resident memory nan where it is not known
        raise machine.Halt("memory grows with the stream")


# ---- recall

def mqar_batch(args, n_pairs, step, batch_size, device, test=False):
    """A function of its arguments; no generator of training is ever one of the test."""
    generator = torch.Generator().manual_seed(2 * (1_000_003 * args.seed + step) + test)
    x, y = data.mqar(batch_size, n_pairs, n_pairs, args.vocab, args.seq_len, generator)
    return x.to(device), y.to(device)


@torch.no_grad()
def accuracy(model, args, n_pairs, device):
    """The share of right answers, on eight batches that were not trained on."""
    right = asked = 0
    for i in range(8):
        x, y = mqar_batch(args, n_pairs, i, args.batch_size, device, test=True)
        right += (model(x)[0].argmax(-1) == y).sum().item()   # -100, where nothing is asked, is never right
        asked += (y >= 0).sum().item()
    return right / asked


def mqar_task(args, device):
    """Trains on all numbers of pairs in turn, says the accuracy for each. Raises Halt if the loss or its gradient is not finite."""
    torch.manual_seed(args.seed)
    for n in args.pairs:
        if args.vocab < 2 * n + 2 or args.seq_len < 4 * n:
            raise UserError(f"--pairs {n} needs a --vocab of at least {2 * n + 2} and a --seq-len of at least {4 * n}, not {args.vocab} and "
                            f"{args.seq_len}")
    try:
        model = models.build(args.model, **{**SMALL, **args.config, "vocab_size": args.vocab}).to(device)
        tc = train.TrainConfig(steps=args.steps, warmup=args.steps // 10, lr=args.lr, optimizer=args.optimizer)
    except ValueError as fault:
        raise UserError(str(fault)) from None
    say("network  " + "  ".join(f"{name} {value}" for name, value in train.effective(model.config).items()))
    train.warn(args.config, model.config, args.seq_len)
    say(f"{args.model}: {model.num_params():,} parameters, {args.steps} steps of {args.batch_size} x {args.seq_len}")
    optimizers, began = train.make_optimizers(model, tc), time.perf_counter()
    for step in range(args.steps):
        x, y = mqar_batch(args, args.pairs[step % len(args.pairs)], step, args.batch_size, device)
        loss = model.loss(x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), tc.grad_clip)
        if not (loss.isfinite() and norm.isfinite()):
            raise machine.Halt(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm:.4f}: not finite; lower {'--lr' if step else '--max-step'}")
        train.update(optimizers, tc, train.lr_scale(step, tc))
        if (step + 1) % max(1, args.steps // 10) == 0:
            say(f"step {step + 1:5d}/{args.steps}  loss {loss:.4f}  {time.perf_counter() - began:.0f} s")
    model.eval()
    say("\npairs  accuracy  by guessing")
    scores = [accuracy(model, args, n, device) for n in args.pairs]
    for n, score in zip(args.pairs, scores):
        say(f"{n:5d}  {score:8.3f}  {1 / n:11.3f}")
    mean = sum(scores) / len(scores)
    say(f"done: {args.model}, mean accuracy {mean:.3f} after {args.steps} steps, {time.perf_counter() - began:.0f} s")


# ---- the rule by itself

# the memory of --task online where no flag says otherwise, and the flags that it takes: there is no network around it
PLAIN = dict(n_head=1, head_dim=32, memory="linear", features="none", chunk=1, muon_every=1, max_norm=0.0)
OF_RULE = {"head_dim", "memory", "expansion", "memory_norm", "chunk", "muon_every", "ns_steps", "ns_coefficients", "features", "degree", "sketch_dim"}
STEPS = torch.logspace(-3, 1.5, 25)             # constant inner steps that are tried
MOMENTUM = 0.9


def unit_keys(kind, batch, n, dim, generator):
    """n keys of unit length, (batch, 1, n, dim): `independent`, or `correlated`, with a coordinate i that is 1 / i as large before."""
    x = torch.randn(batch, 1, n, dim, generator=generator)
    return F.normalize(x / torch.arange(1, dim + 1) if kind == "correlated" else x, dim=-1)


@torch.no_grad()
def one_pass(layer, rule, momentum, k, v):
    """Pairs k, v (B, 1, T, D) are read once by the rule (Eq 9, 33, 32), which forgets nothing and weighs all tokens of a window alike

    -> for each of STEPS, as the step of all tokens, the mean over all pairs of |M(k) - v|^2 / |v|^2, with the memory M after the last one.
    """
    B, (k, v) = len(k), (a.repeat(len(STEPS), 1, 1, 1) for a in (k, v))
    one = torch.ones(k.shape[:3], device=k.device)
    step = STEPS.to(one).repeat_interleave(B)[:, None, None] * one
    gate = (one / rule.window)[..., None].expand(*one.shape, rule.window)
    gates = omega.Gates(one, step, MOMENTUM * one if momentum else None, gate)
    state = omega.start(rule, layer.phi, list(layer.M0), len(k), momentum)
    _, state = omega.omega(rule, layer.phi, k, k, v, gates, state)
    y = memory.apply(rule.memory, omega.total(state), layer.phi(k), k, rule.norm)
    return ((y - v).square().sum(-1) / v.square().sum(-1)).view(len(STEPS), -1).mean(1)


def online_task(args, device):
    """Says the error of one pass with the best of STEPS, for independent and correlated keys, and each of args.pairs."""
    torch.manual_seed(args.seed)
    try:
        layer = models.Memory(models.configure("atlas", **{**PLAIN, **args.config})).to(device)
    except ValueError as fault:
        raise UserError(str(fault)) from None
    config, rule = layer.config, layer.config.rule()
    train.warn(args.config, config, min(args.pairs), of="--pairs")
    say(f"memory {config.memory}, heads of {config.head_dim}, features {config.features}, chunk {config.chunk}: mean |M(k) - v|^2 / |v|^2 of "
        f"{args.batch_size} x N pairs\nthat were read once, with the best of {len(STEPS)} inner steps")
    kinds, cells = ("independent", "correlated"), []
    for kind in kinds:
        for n in args.pairs:
            draws = torch.Generator().manual_seed(args.seed)
            k = unit_keys(kind, args.batch_size, n, config.head_dim, draws)
            v = F.normalize(torch.randn(k.shape, generator=draws), dim=-1)
            cells.append((k.to(device), v.to(device)))
    say("\n" + " " * 38 + "".join(f"{kind + ' keys, N':>{7 * len(args.pairs)}}" for kind in kinds))
    say(f"{'window  momentum  Newton-Schulz':38}" + "".join(f"{n:7d}" for n in args.pairs) * len(kinds))
    for muon, momentum, window in itertools.product((False, True), (False, True), (1, 8, 16)):
        one = rule._replace(window=window, muon_every=rule.muon_every if muon else 0)
        best = [one_pass(layer, one, momentum, k, v).nan_to_num(math.inf).min().item() for k, v in cells]
        say(f"{window:6d}  {MOMENTUM if momentum else '-':>8}  {'yes' if muon else '-':>13}" + " " * 7 + "".join(f"{e:7.2f}" for e in best))


# ---- main

FLAGS = dict(
    text={"ckpt", "data", "length", "windows", "stream", "no_write"},
    mqar={"model", "pairs", "vocab", "seq_len", "steps", "lr", "optimizer", "seed"},
    online={"pairs", "seed"})


def parse(argv=None):
    parser = machine.Parser(prog="eval.py", description=__doc__)
    add = parser.add_argument
    add("--task", default="text", choices=tuple(FLAGS), help="text: losses of a checkpoint; mqar: train a small model to recall pairs; online: the "
        "rule by itself [text]")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="[auto]")
    add("--threads", type=at_least(int, 0), default=0, metavar="N", help="CPU threads; 0: torch decides [0]")
    add("--batch-size", type=at_least(int, 1), metavar="N", help="sequences at a time, of online draws of pairs [8; of mqar and online 32]")
    add = parser.add_argument_group("--task text").add_argument
    add("--ckpt", default="out", help="checkpoint file, or folder with best.pt or ckpt.pt [out]")
    add("--data", help="another text than the one it was trained on; its last tenth counts")
    add("--length", type=at_least(int, 0), default=0, metavar="N", help="longest window of the loss by position [4 x training's]")
    add("--windows", type=at_least(int, 1), default=32, metavar="N", help="windows of the loss by position [32]")
    add("--stream", type=at_least(int, 0), default=50_000, metavar="N", help="tokens of the endless stream; 0: none [50000]")
    add("--no-write", action="store_true", default=False, help="all inner steps 0: what does the memory bring?")
    add = parser.add_argument_group("--task mqar").add_argument
    add("--model", default="atlas", choices=tuple(models.PRESETS), help="[atlas]")
    add("--pairs", type=at_least(int, 1), nargs="+", metavar="N", help="numbers of pairs; also of online [4; of online 8 16 32]")
    add("--vocab", type=at_least(int, 4), default=16, metavar="N", help="tokens: one that fills, vocab / 2 - 1 keys, vocab / 2 values [16]")
    add("--seq-len", type=int, default=24, metavar="N", help="tokens a sequence [24]")
    add("--steps", type=at_least(int, 1), default=300, metavar="N", help="training steps [300]")
    add("--lr", type=float, default=1e-2, metavar="X", help="peak learning rate of AdamW [0.01]")
    add("--optimizer", default="muon", choices=("adamw", "muon"), help="outer, as in train.py [muon]")
    add("--seed", type=at_least(int, 0), default=1337, metavar="N", help="of weights and sequences; also of online [1337]")
    defaults = vars(parser.parse_args([]))
    network = parser.add_argument_group("--task mqar: the network", "In [] is what atlas has here. --task online takes those of the memory, its "
                                        "features, its chunks and Newton-Schulz.")
    train.add_flags(network, models.Config, {**models.PRESETS["atlas"], **SMALL}, skip=train.NO_FLAG)
    given = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults))))         # None: not given
    given = {name: value for name, value in given.items() if value is not None}
    args = argparse.Namespace(**{**defaults, **given}, config={name: value for name, value in given.items() if name not in defaults})
    for name in given:
        if name not in FLAGS[args.task] and name in set().union(*FLAGS.values()):
            parser.error(f"{train.flag(name)} is not for --task {args.task}")
    args.batch_size = args.batch_size or (8 if args.task == "text" else 32)
    args.pairs = args.pairs or ([8, 16, 32] if args.task == "online" else [4])
    for name, value in args.config.items():
        word = train.flag("no_" * (value is False) + name)
        if args.task == "text":
            parser.error(f"{word} is for --task mqar; a checkpoint brings its own network")
        if args.task == "online" and name not in OF_RULE:
            parser.error(f"{word} is not for --task online, which has no network, and goes through windows, momentum and Newton-Schulz by itself")
        if args.task == "online" and value == "exp":
            parser.error("--features exp is not for --task online: it has no finite weights for Newton-Schulz")
    return args


def main(argv=None):
    args = parse(argv)
    machine.tune_cpu()
    less = dict(text="--length, or take --stream 0", mqar="--vocab, --seq-len or the size of the network", online="--pairs")[args.task]
    return machine.exit_code(lambda: run(args), more_memory=f"lower --batch-size or {less}")


def run(args):
    machine.set_threads(args.threads)
    device = machine.pick_device(args.device)
    machine.set_matmul("auto", device, torch.float32)
    dict(text=text_task, mqar=mqar_task, online=online_task)[args.task](args, device)


if __name__ == "__main__":
    sys.exit(main())
