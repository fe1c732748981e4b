"""eval.py - what a model can recall: of a text, of a stream without end, of pairs that it saw once.

    python eval.py --ckpt out                      validation loss, memory reset and carried, and by position; then
                                                   50,000 tokens in one stream: exit code 1 on NaN or growing memory
    python eval.py --ckpt out omega --plot         loss by position of several, with and without writes, drawn
    python eval.py --task probe --ckpt out --plot  gates, writes and surprise of each layer over a text
    python eval.py --ckpt out --no-write           the same with all inner steps 0: what does the memory bring?
    python eval.py --task needle --model transformer deltanet atlas,step_start=-3 --seeds 1 2 3 --plot
    python eval.py --task mqar --pairs 2 4 8       small models, trained to recall pairs that they saw once
    python eval.py --task mad                      the six synthetic tasks of MAD: the paper's Table 4, small
    python eval.py --task ablation                 the paper's Table 6, small
    python eval.py --task online                   what window, momentum and Newton-Schulz bring, untrained
    python eval.py --task capacity --plot          how many pairs features can hold, and how many one pass stores

A model is a preset, and may be changed: atlas,memory=mlp,steps=900 (fields of models.Config; steps and lr). With
--json FILE a campaign keeps each result as it comes; started again it does what is missing. --plot needs matplotlib.
"""
import itertools
import json
import math
import os
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
import torch.nn.functional as F

import data
import memory
import models
import muon
import omega
import train
from data import UserError
from train import Halt, at_least, picture, say


# ---- a checkpoint and its text

def load(path, device, no_write=False):
    """A checkpoint -> its dict, the model in eval mode, its tokenizer. no_write: the memory stays at M0."""
    ckpt = train.load_checkpoint(path)
    model, tokenizer = train.rebuild(ckpt)
    if no_write:
        if not model.config.mixer == "memory":
            raise UserError(f"--no-write: {ckpt['path']} has no memory that writes ({ckpt['preset']}); drop the flag")
        model.config.max_step, model.config.keep = 0.0, False    # the bound of all inner steps; M0 is not forgotten
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


COLLAPSED = 0.02                                # share of an idle memory, or spread of a mixing gate that stands still


def buckets(length):
    """[0, 16), [16, 32), [32, 64), ... up to length."""
    edges = [0, *(16 * 2**i for i in range(60) if 16 * 2**i < length), length]
    return list(zip(edges, edges[1:]))


def text_task(args, device):
    """Prints all losses of each checkpoint. Halt where one is not finite."""
    lines = {}
    for path in args.ckpt:
        ckpt, model, at, n = text_losses(path, args, device)
        lines[f"{ckpt['path']}, no write" if args.no_write else ckpt["path"]] = at
        if args.plot and not args.no_write and model.config.mixer == "memory":
            lines[f"{ckpt['path']}, no write"] = text_losses(path, args, device, silent=True)[2]
    if args.plot:
        mean = lambda at: zip(*(((a + b) / 2, at[a:b].mean().item()) for a, b in buckets(len(at))))
        picture(args.plot, {name: mean(at) for name, at in lines.items()}, "tokens before",
                f"loss [nats/token], mean of {n} windows", log="x")


def text_losses(path, args, device, silent=False):
    """The same of one checkpoint -> it, the model, its loss by position, of how many windows. silent: no writes."""
    ckpt, model, tokenizer = load(path, device, args.no_write or silent)
    corpus, T = data.read(args.data or ckpt["train"]["data"]), ckpt["train"]["seq_len"]
    _, val = corpus.splits(tokenizer, 1)
    length = min(args.length or 4 * T, len(val) - 1)
    at, n = position_loss(model, val, length, args.batch_size, args.windows)
    if silent:
        return ckpt, model, at, n
    say(f"{ckpt['path']}: {ckpt['preset']}, {model.num_params():,} parameters, step {ckpt['step']}, trained on "
        f"{ckpt['data']['used']} in windows of {T}")
    part = "the validation files" if corpus.tokens else "the last tenth"
    other = "" if corpus.sha256 == ckpt["data"]["sha256"] else "; not the text of the training"
    say(f"{part} of {corpus.used}, {len(val):,} tokens{other}" + "; the memory writes nothing" * args.no_write)
    loss = train.report(model, tokenizer, val, T, args.batch_size)
    say(f"\nby position, mean of {n} windows of {length}; trained on {T}\n  tokens before   nats/token")
    for a, b in buckets(length):
        say(f"  {a + 1:6d} - {b:6d}   {at[a:b].mean().item():.4f}" + ("   longer than in training" if b > T else ""))
    if not (math.isfinite(loss) and at.isfinite().all()):
        raise Halt(f"{ckpt['path']}: a loss is not finite; its weights have diverged")
    if args.stream:
        stream(model, val, args.stream)
    return ckpt, model, at, n


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
    period = math.lcm((c.shard or c.chunk) if c.mixer == "memory" else 1, c.attn_window if c.wiring == "mac" else 1)
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


# ---- watching a memory at work

def probe_task(args, device):
    """Prints, keeps and draws what models.probe sees in each layer of a checkpoint over a text."""
    ckpt, model, tokenizer = load(args.ckpt[0], device)
    if model.config.mixer != "memory" or model.config.shard:
        raise UserError(f"--task probe: {ckpt['path']} has no memory, or one in shards ({ckpt['preset']})")
    if args.prompt:
        ids = train.encode_prompt(tokenizer, args.prompt)
    else:
        ids = data.read(args.data or ckpt["train"]["data"]).splits(tokenizer, 1)[1]
    ids = torch.as_tensor(ids[: args.length or ckpt["train"]["seq_len"]]).long()
    found, lines, kept = models.probe(model, ids[None].to(device)), {}, []
    say(f"{ckpt['path']}: {ckpt['preset']}, step {ckpt['step']}, over {len(ids)} tokens: mean +- standard deviation\n"
        f"\n{'layer':>14}" + "".join(f"{i + 1:>18}" for i in range(len(found))))
    for name in found[0]:
        cells = [(at[name].mean().item(), at[name].std(correction=0).item()) for at in found]
        say(f"{name:>14}" + "".join(f"{mean:>10.4f} +-{spread:6.3f}" for mean, spread in cells))
    for i, at in enumerate(found):
        kept.append({name: a.mean((0, 1)).tolist() if a.dim() == 3 and name != "mixing" else a.mean().item()
                     for name, a in at.items()})
        mean = lambda name: at[name].mean((0, 1)).unfold(0, min(16, len(ids)), 1).mean(-1)
        for name, seen in (("inner loss, of that without writes", mean("surprise") / mean("untaught")),
                           ("step, of its bound", mean("step") * model.config.chunk / model.config.max_step)):
            lines[f"layer {i + 1}: {name}"] = range(len(ids) - len(seen), len(ids)), seen.tolist()
        if "mixing" in at and len(ids) > 1 and min(gate := at["mixing"].std(1).mean(), at["share"]) < COLLAPSED:
            say(f"warning: layer {i + 1}: its memory is idle: writes move its output by {at['share']:.3f}, the gate "
                f"moves by {gate:.3f}; train with a narrower --attn-window, --gate-floor or --polarise")
    if args.json:
        Path(args.json).write_text(json.dumps(kept) + "\n")
    if args.plot:
        picture(args.plot, lines, "tokens before", "mean of all heads and 16 tokens")


# ---- small models, trained on a task

# their network where neither flag nor --model says otherwise. Chunks are short: what was written is asked for soon
SMALL = dict(n_layer=2, n_head=4, n_embd=64, head_dim=8, chunk=16, muon_every=8)
LENGTHS = (32, 64, 128)                         # of the needle in training, in turn


def variant(name, args, **more):
    """A model as --model takes it, as atlas,memory=mlp,steps=900 -> models.Config, its training steps, its lr."""
    preset, *changes = name.split(",")
    kinds = {**{f.name: f.type for f in fields(models.Config)}, "steps": int, "lr": float}
    given = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in kinds or kinds[key] is bool and value not in ("True", "False"):
            raise UserError(f"--model {name}: cannot read {change!r}; give field=value, as memory=mlp or muon=False")
        try:
            given[key] = value == "True" if kinds[key] is bool else kinds[key](value)
        except ValueError:
            raise UserError(f"--model {name}: {value!r} is no {kinds[key].__name__}") from None
    steps, lr = given.pop("steps", args.steps), given.pop("lr", args.lr)
    return models.configure(preset, **{**SMALL, **args.config, **more, **given}), steps, lr


@torch.no_grad()
def accuracy(model, batches):
    """The share of right answers; targets of -100 are not asked for."""
    right = asked = 0
    for x, y in batches:
        right += (model(x)[0].argmax(-1) == y).sum().item()
        asked += (y >= 0).sum().item()
    return right / asked


def asked(model, draw, columns, seed, device):
    """The accuracy on draw(column, generator) for each of the columns, on sequences that are not of the training."""
    return [accuracy(model, map(sequences(lambda step, g: draw(n, g), seed, device, True), range(4))) for n in columns]


def sequences(draw, seed, device, test=False):
    """draw(step, generator) -> draw(step), a function of seed and step; no generator of training is one of the test."""
    def drawn(step):
        return [a.to(device) for a in draw(step, torch.Generator().manual_seed(2 * (1_000_003 * seed + step) + test))]
    return drawn


def trained(name, seed, args, device, vocab, draw):
    """A model of this name, trained on the batches draw(step, generator) -> x, y."""
    config, steps, lr = variant(name, args, vocab_size=vocab)
    torch.manual_seed(seed)
    model, batch = models.LM(config).to(device), sequences(draw, seed, device)
    say(f"\n{name}: {model.num_params():,} parameters, seed {seed}, {steps} steps")
    tc = train.TrainConfig(optimizer="muon", steps=steps, warmup=steps // 10, lr=lr)
    optimizers, began = muon.make_optimizers(model, tc), time.perf_counter()
    for step in range(steps):
        (loss := model.loss(*batch(step))).backward()
        train.update(model, optimizers, tc, step, train.lr_scale(step, tc), loss.detach())
        if (step + 1) % max(1, steps // 5) == 0:
            say(f"  step {step + 1:5d}/{steps}  loss {loss:.4f}  {time.perf_counter() - began:.0f} s")
    return model.eval()


def campaign(args, trial, columns, chance="", names=None):
    """trial(name, seed) -> a score for each of the columns, for all names (else those of --model) and --seeds.

    Prints the table -> {name: {column: [a score a seed]}}. The file of --json keeps results; what it has is not redone.
    """
    file, names = Path(args.json) if args.json else None, names or args.model
    settings = {key: getattr(args, key) for key in SETTINGS}
    settings = {name: dict(settings, config=asdict(variant(name, args)[0])) for name in names}
    try:
        records = json.loads(file.read_text())["records"] if file and file.exists() else []
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--json {file} holds no results of such a task; give another file") from None
    full = lambda how: dict(how, config={**asdict(models.Config()), **how["config"]})    # newer fields were off
    done = {(r["model"], r["seed"]): r for r in records if full(r["settings"]) == settings.get(r["model"])}
    for seed, name in itertools.product(args.seeds, names):
        if (name, seed) not in done:
            began = time.perf_counter()
            scores = trial(name, seed)
            record = dict(model=name, seed=seed, settings=settings[name], scores=dict(zip(map(str, columns), scores)),
                          seconds=round(time.perf_counter() - began))
            done[name, seed] = record
            records.append(record)
            if file:
                with data.replacing(file) as temporary:
                    temporary.write_text(json.dumps(dict(records=records), indent=1))
    found = {name: {c: [done[name, seed]["scores"][str(c)] for seed in args.seeds] for c in columns} for name in names}
    width = max(map(len, names)) + 2
    say(f"\n{'':{width}}" + "".join(f"{c!s:>18}" for c in columns) + "   seconds" + chance)
    for name, (_, means, spreads) in curves(found).items():
        cells = [f"{a:.3f}" + f" +- {b:.3f}" * (len(args.seeds) > 1) for a, b in zip(means, spreads)]
        seconds = sum(done[name, seed]["seconds"] for seed in args.seeds)
        say(f"{name:{width}}" + "".join(f"{cell:>18}" for cell in cells) + f"{seconds:10d}")
    return found


def curves(found):
    """What `campaign` returns, as `train.picture` takes it: mean and standard deviation over the columns."""
    lines = {}
    for name, scores in found.items():
        a = torch.tensor(list(scores.values()), dtype=torch.float64)             # (columns, seeds)
        lines[name] = list(scores), a.mean(1).tolist(), (a.std(1) if a.shape[1] > 1 else 0 * a[:, 0]).tolist()
    return lines


def needle_task(args, device):
    """Trains on short sequences in turn, and asks in longer ones."""
    def draw(length, g):
        return data.needle(args.batch_size, 4, length, g)

    def trial(name, seed):
        model = trained(name, seed, args, device, 49, lambda step, g: draw(LENGTHS[step % 3], g))
        return asked(model, draw, args.lengths, seed, device)
    found = campaign(args, trial, args.lengths, "    (by guessing 0.062)")
    if args.plot:
        picture(args.plot, curves(found), "length of the text [tokens]", "right answers", log="x", level=1 / 16)


def mqar_task(args, device):
    """Trains on all numbers of pairs in turn, and asks for each."""
    def draw(n, g):
        return data.mqar(args.batch_size, n, n, args.vocab, args.seq_len, g)
    for n in args.pairs:                                      # fail now, where one does not fit
        draw(n, torch.Generator())

    def trial(name, seed):
        turns = lambda step, g: draw(args.pairs[step % len(args.pairs)], g)
        model = trained(name, seed, args, device, args.vocab, turns)
        return asked(model, draw, args.pairs, seed, device)
    found = campaign(args, trial, args.pairs, "    (by guessing 1 / pairs)")
    if args.plot:
        picture(args.plot, curves(found), "pairs", "right answers")


def mad_task(args, device):
    """Trains one model for each of the tasks."""
    def trial(name, seed):
        scores = []
        for draw, vocab, _ in data.MAD.values():
            batch = lambda _, g, draw=draw: draw(args.batch_size, generator=g)
            scores += asked(trained(name, seed, args, device, vocab, batch), batch, [0], seed, device)
        return scores
    campaign(args, trial, list(data.MAD))
    say("by guessing: " + ", ".join(f"{name} {chance:.2f}" for name, (_, _, chance) in data.MAD.items()))


# ---- the paper's Table 6: what a part is worth

ABLATION = {  # what is changed: by how much the paper's perplexity rises (from a matrix; its other rows are of an MLP)
    "atlas": None, "atlas,memory=mlp": -1.06, "atlas++": -1.50, "atlas,muon=False": -0.32,
    "atlas,momentum=False": None, "atlas,window=1": 2.01, "atlas,features=none": 2.17, "atlas,conv=False": None,
    "atlas,keep=False": None, "atlas,wiring=mag": -0.07, "atlas,wiring=mal": 0.29}


def ablation_task(args, device):
    """Each row trained on tiny Shakespeare and on the needle, with the same tokens; does the sign agree?"""
    corpus = data.read("shakespeare")
    tokenizer = data.make_tokenizer("char", corpus.text)
    ids, val = corpus.splits(tokenizer, args.seq_len)

    def trial(name, seed):
        text = trained(name, seed, args, device, tokenizer.vocab_size,
                       lambda step, g: data.batch(ids, seed, step, args.batch_size, args.seq_len))
        recall = trained(name, seed, args, device, 49,
                         lambda step, g: data.needle(args.batch_size, 4, LENGTHS[step % 3], g))
        loss = train.evaluate(text, val, args.seq_len, args.batch_size, 128)
        return [loss, *asked(recall, lambda n, g: data.needle(args.batch_size, 4, n, g), args.lengths, seed, device)]
    found = campaign(args, trial, ("text", *args.lengths), names=list(ABLATION))
    base = torch.tensor(found["atlas"]["text"])
    for name, sign in ABLATION.items():
        more = torch.tensor(found[name]["text"]) - base                   # seed by seed
        noise = abs(more.mean()) <= (more.std() if len(more) > 1 else 0.02)
        says = "within noise" if noise else "agrees" if more.mean() * (sign or 0) > 0 else "disagrees"
        paper = f"paper {sign:+.2f} perplexity: {says}" if sign else ""
        say(f"{name:24} text {more.mean():+.3f} nats   {paper}")


# ---- the rule by itself

# the memory of --task online where no flag says otherwise; there is no network around it
PLAIN = dict(n_head=1, head_dim=32, features="none", chunk=1, muon_every=1, ns_steps=5, max_norm=0.0)
STEPS = torch.logspace(-3, 1.5, 25)             # constant inner steps that are tried
MOMENTUM = 0.9


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


def online_layer(args, device, **more):
    """A memory of the flags, and of PLAIN."""
    torch.manual_seed(args.seeds[0])
    layer = models.Memory(models.configure("atlas", **{**PLAIN, **more, **args.config})).to(device)
    if layer.config.features == "exp":
        raise UserError("--features exp has no weights to read back; take none, monomial, elementwise or sketch")
    return layer


def pairs_to_store(kind, n, dim, args, device):
    """n pairs of unit length (B, 1, n, dim) each. Before, the coordinate i of `correlated` keys is divided by i."""
    draws = torch.Generator().manual_seed(args.seeds[0])
    k, v = (torch.randn(args.batch_size, 1, n, dim, generator=draws) for _ in range(2))
    k = k / torch.arange(1, dim + 1) if kind == "correlated" else k
    return [F.normalize(a, dim=-1).to(device) for a in (k, v)]


def least(layer, rule, momentum, k, v):
    """The error of one pass with the best of STEPS."""
    return one_pass(layer, rule, momentum, k, v).nan_to_num(math.inf).min().item()


def show(args, lines, x):
    """Draws and keeps the errors of one pass."""
    if args.json:
        Path(args.json).write_text(json.dumps(lines, indent=1) + "\n")
    if args.plot:
        picture(args.plot, lines, x, "error |M(k) - v|² / |v|²", log="x")


def online_task(args, device):
    """Prints the error of one pass with the best of STEPS, for both kinds of keys and each of args.pairs."""
    layer, kinds, lines = online_layer(args, device), ("independent", "correlated"), {}
    config, rule = layer.config, layer.config.rule()
    say(f"memory {config.memory}, heads of {config.head_dim}, features {config.features}, chunk {config.chunk}:\nmean "
        f"|M(k) - v|^2 / |v|^2 of {args.batch_size} x N pairs read once, two kinds of keys, best of {len(STEPS)} steps")
    cells = [pairs_to_store(kind, n, config.head_dim, args, device) for kind in kinds for n in args.pairs]
    say("\n" + " " * 38 + "".join(f"{kind + ', N':>{max(7 * len(args.pairs), 16)}}" for kind in kinds))
    say(f"{'window  momentum  Newton-Schulz':38}" + "".join(f"{n:7d}" for n in args.pairs) * len(kinds))
    for every, momentum, window in itertools.product((0, rule.muon_every), (False, True), (1, 8, 16)):
        best = [least(layer, rule._replace(window=window, muon_every=every), momentum, k, v) for k, v in cells]
        say(f"{window:6d}  {MOMENTUM if momentum else '-':>8}  {'yes' if every else '-':>13}" + " " * 7
            + "".join(f"{e:7.2f}" for e in best))
        if window < 16:
            name = f"window {window}" + ", momentum" * momentum + ", Newton-Schulz" * bool(every)
            lines[name] = args.pairs, best[len(args.pairs):]
    show(args, lines, "pairs N, correlated keys")


def capacity_task(args, device):
    """Prop 2: a matrix holds as many pairs as there are independent features: by least squares, and in one pass."""
    lines, found = {}, {}
    for features in ("none", "monomial"):
        layer = online_layer(args, device, head_dim=8, features=features)
        rule, E = layer.config.rule(), layer.phi.out_dim
        for n in args.pairs:
            k, v = pairs_to_store("independent", n, layer.config.head_dim, args, device)
            x, y = layer.phi(F.normalize(k.double(), dim=-1)), v.double()        # of length 1 to the last digit
            W = torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(device)
            found["least squares", n] = ((x @ W - y).square().sum(-1) / y.square().sum(-1)).mean().item()
            for window, every in ((1, 0), (8, 0), (8, 1)):
                one = rule._replace(window=window, muon_every=every)
                found[f"window {window}" + ", Newton-Schulz" * every, n] = least(layer, one, False, k, v)
        for name in dict.fromkeys(name for name, _ in found):
            lines[f"{name}, {E} features"] = args.pairs, [found[name, n] for n in args.pairs]
    say(f"error |M(k) - v|^2 / |v|^2 of N pairs, heads of {layer.config.head_dim}")
    say(f"{'N':40}" + "".join(f"{n:7d}" for n in args.pairs))
    for name, (_, errors) in lines.items():
        say(f"{name:40}" + "".join(f"{e:7.2f}" for e in errors))
    show(args, lines, "pairs N")


# ---- main

TASKS = dict(text=text_task, probe=probe_task, needle=needle_task, mqar=mqar_task, mad=mad_task, ablation=ablation_task,
             online=online_task, capacity=capacity_task)
# what the flags are where they are not given
USUAL = dict(batch_size=32, pairs=[4], steps=300, lr=5e-3, seq_len=24, lengths=[128, 256, 512, 1024, 2048, 4096])
BY_TASK = dict(text=dict(batch_size=8), online=dict(pairs=[8, 16, 32]), needle=dict(steps=1200),
               ablation=dict(batch_size=16, seq_len=128, lengths=[1024]), mad=dict(steps=600),
               capacity=dict(pairs=[4, 8, 16, 32, 44, 64, 128]))
SETTINGS = "task", "steps", "lr", "batch_size", "seq_len", "lengths", "pairs", "vocab"      # of a result


def parse(argv=None):
    parser = train.Parser(prog="eval.py", description=__doc__)
    add = parser.add_argument
    add("--task", default="text", choices=tuple(TASKS), help="text: losses of checkpoints; probe: one at work; online, "
        "capacity: the rule by itself; the others train small models [text]")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="[auto]")
    add("--threads", type=at_least(int, 0), default=0, metavar="N", help="CPU threads; 0: torch decides [0]")
    add("--batch-size", type=at_least(int, 1), metavar="N", help="sequences at a time [32; of text 8, of ablation 16]")
    add("--plot", nargs="?", const="", metavar="FILE", help="draw a picture [results/TASK.png]")
    add("--json", metavar="FILE", help="keep the results there; needle, mqar, mad and ablation go on from it")
    add = parser.add_argument_group("--task text and probe").add_argument
    add("--ckpt", nargs="+", default=["out"], help="checkpoint files, or folders with best.pt or ckpt.pt [out]")
    add("--data", help="another text than that of the training; its last tenth counts")
    add("--length", type=at_least(int, 0), default=0, metavar="N",
        help="longest window of the loss by position [4 x training's]; tokens of probe")
    add("--windows", type=at_least(int, 1), default=32, metavar="N", help="windows of the loss by position [32]")
    add("--stream", type=at_least(int, 0), default=50_000, metavar="N",
        help="tokens of the endless stream; 0: none [50000]")
    add("--prompt", help="the text that --task probe reads [the beginning of the last tenth]")
    add("--no-write", action="store_true", help="all inner steps 0: what does the memory bring?")
    add = parser.add_argument_group("the other tasks").add_argument
    add("--model", nargs="+", default=["atlas"], help="presets, changed or not: atlas,memory=mlp,steps=900 [atlas]")
    add("--seeds", type=at_least(int, 0), nargs="+", default=[1337], metavar="N", help="of weights, sequences [1337]")
    add("--steps", type=at_least(int, 1), metavar="N", help="training steps [300; of needle 1200, of mad 600]")
    add("--lr", type=at_least(float, 0), metavar="X", help="peak learning rate of AdamW [0.005]")
    add("--lengths", type=at_least(int, 16), nargs="+", metavar="N", help="tokens a sequence of needle in which it "
        "is asked, of ablation [128 256 512 1024 2048 4096; 1024]")
    add("--pairs", type=at_least(int, 1), nargs="+", metavar="N", help="numbers of pairs of mqar, online, capacity")
    add("--vocab", type=at_least(int, 4), default=16, metavar="N",
        help="tokens of mqar: one that fills, vocab / 2 - 1 keys, vocab / 2 values [16]")
    add("--seq-len", type=at_least(int, 1), metavar="N", help="tokens a sequence of mqar, text of ablation [24; 128]")
    network = parser.add_argument_group("the network", "In [] is what atlas has here. online and capacity take the "
                                        "flags of the memory.")
    train.add_flags(network, models.Config, {**models.PRESETS["atlas"], **SMALL}, skip=train.NO_FLAG)
    args = parser.parse_args(argv)
    args.config = {f.name: vars(args).pop(f.name) for f in fields(models.Config) if hasattr(args, f.name)}
    for name, value in {**USUAL, **BY_TASK.get(args.task, {})}.items():
        setattr(args, name, getattr(args, name) or value)
    args.plot = f"results/{args.task}.png" if args.plot == "" else args.plot
    return args


def main(argv=None):
    args = parse(argv)

    def run():
        if args.plot:
            train.need("matplotlib")
        TASKS[args.task](args, train.setup(args.device, args.threads))
    return train.exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
