"""eval.py - what a model can recall: of a text, of a stream without end, of pairs that it saw once.

    python eval.py --ckpt out                      validation loss, memory reset and carried, and by position; then
                                                   50,000 tokens in one stream: exit code 1 on NaN or growing memory
    python eval.py --ckpt out --stream 1000000     the same with a stream of a million tokens
    python eval.py --ckpt out --no-write           the same with all inner steps 0: what does the memory bring?
    python eval.py --task mqar --model titans      train a small model to recall pairs that it saw once
    python eval.py --task mqar --window 4 --pairs 2 4                              fields of models.Config are flags
    python eval.py --task online                   what window, momentum and Newton-Schulz bring, untrained
    python eval.py --task online --memory mlp --features monomial --chunk 8        the same with another memory

Loss by position shows whether more context helps. Attention sees its windows, one a layer; a memory what it still
holds. Multi-query associative recall (data.mqar draws it) asks for the values of keys that were shown once.
"""
import itertools
import math
import os
import sys
import time
from dataclasses import fields

import torch
import torch.nn.functional as F

import data
import memory
import models
import muon
import omega
import train
from data import UserError
from train import Halt, at_least, say


def configure(preset, **overrides):
    """models.configure, whose complaints are the user's mistakes here."""
    try:
        return models.configure(preset, **overrides)
    except ValueError as fault:
        raise UserError(str(fault)) from None


# ---- a checkpoint and its text

def load(path, device, no_write=False):
    """A checkpoint -> its dict, the model in eval mode, its tokenizer. no_write: the memory stays at M0."""
    ckpt = train.load_checkpoint(path)
    model, tokenizer = train.rebuild(ckpt)
    if no_write:
        if not model.config.mixer == "memory":
            raise UserError(f"--no-write: {ckpt['path']} has no memory that writes ({ckpt['preset']}); drop the flag")
        model.config.max_step = 0.0             # the bound of all inner steps
    return ckpt, model.to(device).eval(), tokenizer


@torch.no_grad()
def position_loss(model, ids, length, batch_size, n_windows):
    """Mean nats at each position, over about n_windows evenly spaced windows -> (length,), number of windows."""
    device, whole = next(model.parameters()).device, (len(ids) - 1) // length
    total, n = torch.zeros(length, dtype=torch.float64), 0
    every = max(1, whole // n_windows)
    if every == 1:                                            # whole windows only; with more the last one is whole
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
    """Prints all losses of a checkpoint. Halt where one is not finite."""
    ckpt, model, tokenizer = load(args.ckpt, device, args.no_write)
    corpus, T = data.read(args.data or ckpt["train"]["data"]), ckpt["train"]["seq_len"]
    _, val = corpus.splits(tokenizer, 1)
    say(f"{ckpt['path']}: {ckpt['preset']}, {model.num_params():,} parameters, step {ckpt['step']}, trained on "
        f"{ckpt['data']['used']} in windows of {T}")
    part = "the validation files" if corpus.tokens else "the last tenth"
    other = "" if corpus.sha256 == ckpt["data"]["sha256"] else "; not the text of the training"
    say(f"{part} of {corpus.used}, {len(val):,} tokens{other}" + "; the memory writes nothing" * args.no_write)
    loss = train.report(model, tokenizer, val, T, args.batch_size)
    length = min(args.length or 4 * T, len(val) - 1)
    at, n = position_loss(model, val, length, args.batch_size, args.windows)
    say(f"\nby position, mean of {n} windows of {length}; trained on {T}\n  tokens before   nats/token")
    for a, b in buckets(length):
        say(f"  {a + 1:6d} - {b:6d}   {at[a:b].mean().item():.4f}" + ("   longer than in training" if b > T else ""))
    if not (math.isfinite(loss) and at.isfinite().all()):
        raise Halt(f"{ckpt['path']}: a loss is not finite; its weights have diverged")
    if args.stream:
        stream(model, val, args.stream)


# ---- a stream without end

def resident(device):
    """Bytes of memory in use now: of this process, or of the GPU; nan where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.nan


def pieces(ids, n, length):
    """At least n tokens and the one after each, over and over the same ids, in pieces x, y (1, length)."""
    ids = torch.as_tensor(ids[: n + 1]).long()
    for t in range(0, n, length):
        at = torch.arange(t, t + length) % (len(ids) - 1)
        yield ids[at][None], ids[at + 1][None]


@torch.inference_mode()
def stream(model, ids, n):
    """n tokens through one state. Halt if a loss is not finite, or if memory grows though the state may not."""
    c, device, state, seen, total, marks = model.config, next(model.parameters()).device, None, 0, 0.0, []
    # a state's size depends on the place in a chunk, and in a segment of mac: look at it at the end of both
    period = math.lcm(c.chunk if c.mixer == "memory" else 1, c.attn_window if c.wiring == "mac" else 1)
    say(f"\na stream of {n:,} tokens\n     tokens  nats/token  tokens/s  resident MiB  state bytes")
    began = time.perf_counter()
    for x, y in pieces(ids, n, -(-1024 // period) * period):
        logits, state = model(x.to(device), state)
        loss = F.cross_entropy(logits[0].float(), y[0].to(device), reduction="sum").item()
        total, seen = total + loss, seen + y.numel()
        if not math.isfinite(loss):
            raise Halt(f"the loss is {loss} after {seen:,} tokens of the stream")
        if 10 * seen >= (len(marks) + 1) * n:                 # another tenth; by the first one all buffers are there
            marks.append((resident(device), models.state_bytes(state)))
            say(f"  {seen:9,}  {total / seen:10.4f}  {seen / (time.perf_counter() - began):8,.0f}  "
                f"{marks[-1][0] / 2**20:12,.1f}  {marks[-1][1]:11,}")
    growth = [after / max(before, 1) - 1 if after else 0.0 for before, after in zip(marks[0], marks[-1])]
    say(f"since the first tenth: resident memory {growth[0]:+.1%}, state {growth[1]:+.1%}")
    if models.holds_all(c):
        say("the state of this model holds every token, so it grows with the stream")
    elif any(by > 0.05 for by in growth):                     # never true of nan
        raise Halt("memory grows with the stream")


# ---- recall

# the network of --task mqar where no flag says otherwise. Chunks are short: what was written is asked for soon after
SMALL = dict(n_layer=2, n_head=2, n_embd=64, chunk=8, muon_every=1)


def mqar_batch(args, n_pairs, step, device, test=False):
    """Tokens and targets, a function of the arguments; no generator of training is ever one of the test."""
    generator = torch.Generator().manual_seed(2 * (1_000_003 * args.seed + step) + test)
    x, y = data.mqar(args.batch_size, n_pairs, n_pairs, args.vocab, args.seq_len, generator)
    return x.to(device), y.to(device)


@torch.no_grad()
def accuracy(model, batches):
    """The share of right answers; targets of -100 are not asked for."""
    right = asked = 0
    for x, y in batches:
        right += (model(x)[0].argmax(-1) == y).sum().item()
        asked += (y >= 0).sum().item()
    return right / asked


def learn(model, draw, args):
    """Trains on the batches draw(step) -> x, y. Halt where the loss or its gradient is not finite."""
    tc = train.TrainConfig(steps=args.steps, warmup=args.steps // 10, lr=args.lr, optimizer=args.optimizer)
    optimizers, began = muon.make_optimizers(model.train(), tc), time.perf_counter()
    for step in range(args.steps):
        loss = model.loss(*draw(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), tc.grad_clip)
        if not (loss.isfinite() and norm.isfinite()):
            raise Halt(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm:.4f}: not finite; "
                       f"lower {'--lr' if step else '--max-step'}")
        train.update(optimizers, tc, train.lr_scale(step, tc))
        if (step + 1) % max(1, args.steps // 10) == 0:
            say(f"step {step + 1:5d}/{args.steps}  loss {loss:.4f}  {time.perf_counter() - began:.0f} s")
    model.eval()


def mqar_task(args, device):
    """Trains on all numbers of pairs in turn, prints the accuracy for each."""
    for n in args.pairs:                                      # fail now, where one does not fit
        mqar_batch(args, n, 0, device)
    torch.manual_seed(args.seed)
    model = models.LM(configure(args.model, **{**SMALL, **args.config, "vocab_size": args.vocab})).to(device)
    say(f"{args.model}: {model.num_params():,} parameters, {args.steps} steps of {args.batch_size} x {args.seq_len}")
    began = time.perf_counter()
    learn(model, lambda step: mqar_batch(args, args.pairs[step % len(args.pairs)], step, device), args)
    say("\npairs  accuracy  by guessing")
    scores = []
    for n in args.pairs:
        scores.append(accuracy(model, (mqar_batch(args, n, i, device, test=True) for i in range(8))))
        say(f"{n:5d}  {scores[-1]:8.3f}  {1 / n:11.3f}")
    say(f"done: {args.model}, mean accuracy {sum(scores) / len(scores):.3f} after {args.steps} steps, "
        f"{time.perf_counter() - began:.0f} s")


# ---- the rule by itself

# the memory of --task online where no flag says otherwise; there is no network around it
PLAIN = dict(n_head=1, head_dim=32, memory="linear", features="none", chunk=1, muon_every=1, max_norm=0.0)
STEPS = torch.logspace(-3, 1.5, 25)             # constant inner steps that are tried
MOMENTUM = 0.9


def unit_keys(kind, batch, n, dim, generator):
    """n keys of unit length (batch, 1, n, dim). The coordinate i of `correlated` ones is divided by i before."""
    x = torch.randn(batch, 1, n, dim, generator=generator)
    return F.normalize(x / torch.arange(1, dim + 1) if kind == "correlated" else x, dim=-1)


@torch.no_grad()
def one_pass(layer, rule, momentum, k, v):
    """The rule (Eq 9, 33, 32) reads pairs k, v (B, 1, T, D) once, without forgetting, with equal weights in a window.

    -> for each of STEPS, as the step of all tokens, the mean over all pairs of |M(k) - v|^2 / |v|^2 with the last M
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
    """Prints the error of one pass with the best of STEPS, for both kinds of keys and each of args.pairs."""
    torch.manual_seed(args.seed)
    layer = models.Memory(configure("atlas", **{**PLAIN, **args.config})).to(device)
    config, rule, kinds = layer.config, layer.config.rule(), ("independent", "correlated")
    if config.features == "exp":
        raise UserError("--features exp has no weights to read back; take none, monomial, elementwise or sketch")
    say(f"memory {config.memory}, heads of {config.head_dim}, features {config.features}, chunk {config.chunk}:\nmean "
        f"|M(k) - v|^2 / |v|^2 of {args.batch_size} x N pairs read once, two kinds of keys, best of {len(STEPS)} steps")
    cells = []
    for kind, n in itertools.product(kinds, args.pairs):
        draws = torch.Generator().manual_seed(args.seed)
        k = unit_keys(kind, args.batch_size, n, config.head_dim, draws)
        v = F.normalize(torch.randn(k.shape, generator=draws), dim=-1)
        cells.append((k.to(device), v.to(device)))
    say("\n" + " " * 38 + "".join(f"{kind + ', N':>{max(7 * len(args.pairs), 16)}}" for kind in kinds))
    say(f"{'window  momentum  Newton-Schulz':38}" + "".join(f"{n:7d}" for n in args.pairs) * len(kinds))
    for every, momentum, window in itertools.product((0, rule.muon_every), (False, True), (1, 8, 16)):
        one = rule._replace(window=window, muon_every=every)
        best = [one_pass(layer, one, momentum, k, v).nan_to_num(math.inf).min().item() for k, v in cells]
        say(f"{window:6d}  {MOMENTUM if momentum else '-':>8}  {'yes' if every else '-':>13}" + " " * 7
            + "".join(f"{e:7.2f}" for e in best))


# ---- main

TASKS = dict(text=text_task, mqar=mqar_task, online=online_task)


def parse(argv=None):
    parser = train.Parser(prog="eval.py", description=__doc__)
    add = parser.add_argument
    add("--task", default="text", choices=tuple(TASKS), help="text: losses of a checkpoint; mqar: train a small model "
        "to recall pairs; online: the rule by itself [text]")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="[auto]")
    add("--threads", type=at_least(int, 0), default=0, metavar="N", help="CPU threads; 0: torch decides [0]")
    add("--batch-size", type=at_least(int, 1), metavar="N", help="sequences at a time [8; of mqar and online 32]")
    add = parser.add_argument_group("--task text").add_argument
    add("--ckpt", default="out", help="checkpoint file, or folder with best.pt or ckpt.pt [out]")
    add("--data", help="another text than that of the training; its last tenth counts")
    add("--length", type=at_least(int, 0), default=0, metavar="N",
        help="longest window of the loss by position [4 x training's]")
    add("--windows", type=at_least(int, 1), default=32, metavar="N", help="windows of the loss by position [32]")
    add("--stream", type=at_least(int, 0), default=50_000, metavar="N",
        help="tokens of the endless stream; 0: none [50000]")
    add("--no-write", action="store_true", help="all inner steps 0: what does the memory bring?")
    add = parser.add_argument_group("--task mqar, --task online").add_argument
    add("--model", default="atlas", choices=tuple(models.PRESETS), help="of mqar [atlas]")
    add("--pairs", type=at_least(int, 1), nargs="+", metavar="N", help="numbers of pairs [4; of online 8 16 32]")
    add("--vocab", type=at_least(int, 4), default=16, metavar="N",
        help="tokens of mqar: one that fills, vocab / 2 - 1 keys, vocab / 2 values [16]")
    add("--seq-len", type=at_least(int, 1), default=24, metavar="N", help="tokens a sequence of mqar [24]")
    add("--steps", type=at_least(int, 1), default=300, metavar="N", help="training steps of mqar [300]")
    add("--lr", type=at_least(float, 0), default=1e-2, metavar="X", help="peak learning rate of AdamW [0.01]")
    add("--optimizer", default="muon", choices=("adamw", "muon"), help="outer optimizer, as in train.py [muon]")
    add("--seed", type=at_least(int, 0), default=1337, metavar="N", help="of weights and sequences [1337]")
    network = parser.add_argument_group("--task mqar: the network", "In [] is what atlas has here. --task online takes "
                                        "the flags of the memory, its features, its chunk and Newton-Schulz.")
    train.add_flags(network, models.Config, {**models.PRESETS["atlas"], **SMALL}, skip=train.NO_FLAG)
    args = parser.parse_args(argv)
    args.config = {f.name: getattr(args, f.name) for f in fields(models.Config) if hasattr(args, f.name)}
    args.batch_size = args.batch_size or (8 if args.task == "text" else 32)
    args.pairs = args.pairs or ([8, 16, 32] if args.task == "online" else [4])
    return args


def main(argv=None):
    args = parse(argv)
    return train.exit_code(lambda: TASKS[args.task](args, train.setup(args.device, args.threads)))


if __name__ == "__main__":
    sys.exit(main())
