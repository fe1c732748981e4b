"""recall.py - can a small model recall what it saw once? Synthetic tasks, and campaigns that train models on them.

    python recall.py needle --model transformer,head_dim=16 atlas --seeds 1 2 3 --plot  pairs hidden in long noise
    python recall.py                                                                    short for recall.py mqar
    python recall.py mqar --pairs 2 4 8 --vocab 32 --seq-len 32                         many pairs at once
    python recall.py mad                                 the six synthetic tasks of MAD: the paper's Table 4, small
    python recall.py ablation                            the paper's Table 6, small: what is each part worth?

A model is a preset, and may be changed: atlas,memory=mlp,steps=900 (fields of models.Config; steps and lr). With
--json FILE a campaign keeps each result as it comes; started again it does what is missing. Campaigns may share FILE.
"""
import itertools
import json
import math
import os
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import torch

import data
import models
import train
from common import (Parser, UserError, add_flags, add_number, add_tasks, chosen, picture, replacing,
                    run_task, say, seeded, with_task)


# ---- recall of pairs
def distinct(batch, n, below, generator):
    """Return (batch, n): n different numbers of 0 .. below - 1 in each row, in random order."""
    return torch.rand(batch, below, generator=generator).topk(n).indices


def mqar(batch, n_pairs, n_queries, vocab, seq_len, generator):
    """Draw multi-query associative recall: key-value pairs, then some of the keys, which ask for their values (Arora et
    al. 2023, arXiv 2312.04927), as https://github.com/HazyResearch/zoology draws it.
    mqar(1, n_pairs=3, n_queries=2, vocab=12, seq_len=14, generator=torch.Generator().manual_seed(7)):

                 key  val  key  val  key  val query                               query
        tokens     3   11    4   10    1    8    4    0    0    0    0    0    3    0
        targets -100 -100 -100 -100 -100 -100   10 -100 -100 -100 -100 -100   11 -100

    -> tokens, targets (batch, seq_len) int64 on the CPU; targets are -100 where no answer is asked. Keys are
    1 .. vocab/2 - 1, values vocab/2 .. vocab - 1, each at most once in a row. Queries stand 2g places behind the last
    pair; g = 0, 1, .. is drawn by weight (g+1)^-0.99 (zoology's power_a = 0.01, without its filler)."""
    if not (1 <= n_queries <= n_pairs <= vocab // 2 - 1 and 2 * (n_pairs + n_queries) <= seq_len):
        raise UserError(f"mqar: {n_pairs=}, {n_queries=} do not fit {vocab=}, {seq_len=}; raise --vocab or --seq-len")
    keys = 1 + distinct(batch, n_pairs, vocab // 2 - 1, generator)
    values = vocab // 2 + distinct(batch, n_pairs, vocab - vocab // 2, generator)
    asked = distinct(batch, n_queries, n_pairs, generator)
    weights = torch.arange(1, (seq_len - 2 * n_pairs) // 2 + 1, dtype=torch.float64) ** -0.99
    place = 2 * n_pairs + 2 * torch.multinomial(weights.expand(batch, -1), n_queries, generator=generator)
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    tokens[:, 0:2 * n_pairs:2], tokens[:, 1:2 * n_pairs:2] = keys, values
    tokens.scatter_(1, place, keys.gather(1, asked))
    targets = torch.full_like(tokens, -100).scatter_(1, place, values.gather(1, asked))
    return tokens, targets


def needle(batch, n_pairs, seq_len, generator, symbols=16):
    """Draw key-value pairs hidden anywhere in noise; at the end each key asks for its value, in random order. Token 0
    stands behind a key that asks. Then come `symbols` tokens each for noise, keys (at most once a row) and values.
    needle(1, 2, 12, g, symbols=3), where g is torch.Generator().manual_seed(10521) here and below:

        tokens     1    1    6    7    1    1    4    9    4    0    6    0
        targets -100 -100 -100 -100 -100 -100 -100 -100    9 -100    7 -100
    """
    n = seq_len - 2 * n_pairs
    slot = distinct(batch, n_pairs, n - n_pairs, generator)
    place = slot + slot.argsort(-1).argsort(-1)                 # one further for each pair that stands before it
    keys = 1 + symbols + distinct(batch, n_pairs, symbols, generator)
    values = torch.randint(1 + 2 * symbols, 1 + 3 * symbols, keys.shape, generator=generator)
    tokens = torch.randint(1, 1 + symbols, (batch, seq_len), generator=generator)
    tokens.scatter_(1, place, keys).scatter_(1, place + 1, values)
    targets = torch.full_like(tokens, -100)
    tokens[:, n::2], tokens[:, n + 1::2], targets[:, n::2] = keys, 0, values
    return tokens, targets


# ---- the tasks of MAD (Poli et al. 2024, arXiv 2403.17844, https://github.com/athms/mad-lab), written anew. Here every
# batch is new and only the answers are trained; MAD has fixed training sets, and its recalls train on every next token
def recall(batch, n_keys, seq_len, generator, symbols=8, motif=1, noise=0.0):
    """Draw in-context recall: n_keys key-value pairs repeat, and each value is asked for from its second time on. A
    share `noise` of the pairs is noise. In fuzzy recall a key has `motif` tokens (in MAD's training also fewer) and a
    value 1 to `motif`. `symbols` tokens each are for keys and values, then twice as many for noise.
    recall(1, 2, 16, g, symbols=3, motif=2, noise=0.2):

        tokens     2    1    3    0    2    5    3    2    1    3    7   11    9    0    2    5
        targets -100 -100 -100 -100 -100 -100 -100 -100    3 -100 -100 -100 -100 -100    5    3
    """
    n, at = seq_len // (motif + 1) + 1, torch.arange(motif)     # n pairs are enough, were all values one token
    keys = distinct(batch, n_keys, symbols ** motif, generator)[..., None] // symbols ** at % symbols
    values = torch.randint(symbols, 2 * symbols, keys.shape, generator=generator)
    values.masked_fill_(at > torch.randint(motif, (batch, n_keys, 1), generator=generator), -1)
    pick = torch.randint(n_keys, (batch, n), generator=generator)
    pick[torch.rand(batch, n, generator=generator) < noise] = -1
    tokens = torch.cat([keys, values], -1)[torch.arange(batch)[:, None], pick]          # (batch, n, 2 motif)
    order = (tokens < 0).flatten(1).int().argsort(stable=True)[:, :seq_len + 1]         # closes the gaps, the -1
    tokens[pick < 0] = torch.randint(2 * symbols, 4 * symbols, tokens[pick < 0].shape, generator=generator)
    seen = (pick[:, :, None] == pick[:, None]).tril(-1).any(-1) & (pick >= 0)
    targets = torch.where(seen[..., None] & (torch.arange(2 * motif) >= motif), tokens, -100)
    return tokens.flatten(1).gather(1, order[:, :-1]), targets.flatten(1).gather(1, order[:, 1:])


def compression(batch, n_tokens, generator, symbols=15):
    """Draw random tokens, a token "compress", then a token for each place that asks what stood there. In MAD an MLP
    answers from the output at "compress" alone; here attention may look further back. compression(1, 4, g, symbols=5):

        tokens     1    0    4    3    5    6    7    8    9
        targets -100 -100 -100 -100 -100    1    0    4    3
    """
    x = torch.randint(symbols, (batch, n_tokens), generator=generator)
    ask = symbols + torch.arange(n_tokens + 1).expand(batch, -1)
    return torch.cat([x, ask], 1), torch.cat([torch.full_like(ask, -100), x], 1)


def memorization(batch, seq_len, generator, symbols=127, seed=0):
    """Draw keys, each with a token "insert" that asks for its value. No value is ever shown: `seed` fixes them for all
    rows and batches, so a model must learn them in training. Tokens: `symbols` each of keys and values, then "insert".
    memorization(1, 8, g, symbols=4):

        tokens     3    8    0    8    3    8    1    8
        targets -100    6 -100    4 -100    6 -100    5
    """
    values = symbols + torch.randperm(symbols, generator=seeded(seed))
    keys = torch.randint(symbols, (batch, seq_len // 2), generator=generator)
    insert, nothing = torch.full_like(keys, 2 * symbols), torch.full_like(keys, -100)
    return torch.stack([keys, insert], -1).flatten(1), torch.stack([nothing, values[keys]], -1).flatten(1)


def selective_copying(batch, n_tokens, seq_len, generator, symbols=14):
    """Draw tokens anywhere among blanks, a token "copy", then as many blanks, each asking for the next of the tokens.
    selective_copying(1, 3, 10, g, symbols=4), where 4 is the blank and 5 is "copy":

        tokens     4    3    0    3    4    4    5    4    4    4
        targets -100 -100 -100 -100 -100 -100 -100    3    0    3
    """
    n = seq_len - n_tokens - 1
    x = torch.randint(symbols, (batch, n_tokens), generator=generator)
    place = distinct(batch, n_tokens, n, generator).sort(-1).values
    tokens = torch.full((batch, seq_len), symbols).scatter_(1, place, x)
    tokens[:, n] = symbols + 1
    return tokens, torch.cat([torch.full((batch, n + 1), -100), x], 1)


# name: (draw, vocabulary size, chance); draw(batch, generator=g) -> tokens, targets. Sizes are MAD's smallest or below.
# Chance is the accuracy of always giving the row's most frequent answer: a model that scores no more recalls nothing.
MAD = {
    "recall": (partial(recall, n_keys=8, seq_len=128), 16, 0.35),
    "noisy-recall": (partial(recall, n_keys=8, seq_len=128, noise=0.2), 32, 0.36),
    "fuzzy-recall": (partial(recall, n_keys=8, seq_len=128, motif=3), 16, 0.31),
    "compression": (partial(compression, n_tokens=31), 47, 0.16),
    "memorization": (partial(memorization, seq_len=32), 255, 1 / 127),      # of a fixed answer: a row shows none
    "selective-copying": (partial(selective_copying, n_tokens=16, seq_len=128), 16, 0.20)}


# ---- small models, trained on a task
SMALL = dict(n_layer=2, n_head=4, n_embd=64, head_dim=8)     # their network where no flag or --model says otherwise
LENGTHS = [32, 64, 128]                         # of texts in training, in turn


def randomness(seed, number, test=False):
    """Return the generator of a batch. Training and test share none."""
    return seeded(2 * (1_000_003 * seed + number) + test)


def variant(name, args, **more):
    """Read a model as --model takes it, as atlas,memory=mlp,steps=900 -> models.Config, its training steps, its lr."""
    preset, *changes = name.split(",")
    given, kinds = dict(steps=args.steps, lr=args.lr), dict(steps=int, lr=float)
    kinds.update((f.name, f.type) for f in fields(models.Config) if f.name not in train.NO_FLAG)
    for key, _, value in (change.partition("=") for change in changes):
        try:
            given[key] = {"True": True, "False": False}[value] if kinds[key] is bool else kinds[key](value)
        except (KeyError, ValueError):
            raise UserError(f"--model {name}: cannot set {key}={value}; "
                            "give field=value, as muon=False")
    steps, lr = given.pop("steps"), given.pop("lr")
    train.TrainConfig(steps=steps, lr=lr)                     # raises UserError
    network = SMALL | chosen(vars(args), models.Config) | more | given
    return models.configure(preset, **network), steps, lr


def trained(name, seed, args, device, vocab, draw, title):
    """Return a model of this name, trained on the batches draw(step, generator) -> x, y."""
    config, steps, lr = variant(name, args, vocab_size=vocab)
    torch.manual_seed(seed)
    model = models.LM(config).to(device)
    say(f"\n{title}, {name}: {model.num_params():,} parameters, seed {seed}, {steps} steps")
    tc = train.TrainConfig(out="", seed=seed, optimizer="muon", steps=steps, warmup=steps // 10, lr=lr,
                           eval_every=steps, log_every=max(1, steps // 5))
    task = train.Task(tc, device)
    task.draw = lambda number, _: draw(number, randomness(seed, number))
    if stopped := train.train(model, task.optimizers(model), dict(step=0, best=math.inf, seconds=0.0), task):
        raise KeyboardInterrupt(stopped)
    return model.eval()


@torch.no_grad()
def accuracy(model, batches):
    """Return the share of right answers in batches x, y; targets of -100 are not asked for."""
    right, asked, device = 0, 0, next(model.parameters()).device
    for x, y in batches:
        right += (model(x.to(device))[0].argmax(-1).cpu() == y).sum().item()
        asked += (y >= 0).sum().item()
    return right / asked


def score(title, args, device, vocab, draw, turns, columns, name, seed):
    """Train a model on draw(size, generator), sizes from turns in turn. Return its accuracy for those of columns."""
    model = trained(name, seed, args, device, vocab, lambda step, g: draw(turns[step % len(turns)], g), title)
    return [accuracy(model, (draw(size, randomness(seed, i, test=True)) for i in range(4))) for size in columns]


# ---- campaigns
def matches(old, settings):
    """Tell whether a result has these settings. What is newer than the result had its default."""
    usual = asdict(models.Config())
    config = usual | {name: a for name, a in old["config"].items() if name in usual}
    newer = dict(config=config, train_lengths=old.get("train_lengths") or LENGTHS)
    return all((old | newer).get(key) == value for key, value in settings.items())


@contextmanager
def alone_in(folder):
    """Let no other campaign write in the folder meanwhile, where the system has such locks."""
    with ExitStack() as end:
        with suppress(ImportError, OSError):
            import fcntl
            end.callback(os.close, file := os.open(folder, os.O_RDONLY))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def campaign(args, trial, columns, x="", **how):
    """Run trial(name, seed), which scores each of the columns, for each name of --model and each of --seeds, but for
    what the file of --json has. Print the table, and draw it over an axis named x; how: more arguments of `picture`.
    Return {name: {column: [a score a seed]}}."""
    shared = {key: a for key, a in vars(args).items() if key in SETTINGS}
    settings, mine = {name: shared | dict(config=asdict(variant(name, args)[0])) for name in args.model}, []
    file = args.json and Path(args.json)

    def known():
        """Return all results, also those of others in the file, and by model and seed those with our settings."""
        try:
            old = json.loads(file.read_text())["records"] if file and file.exists() else []
            records = old + [r for r in mine if r not in old]
            return records, {(r["model"], r["seed"]): r for r in records
                             if r["model"] in settings and matches(r["settings"], settings[r["model"]])}
        except Exception:                                     # its type depends on what the file is
            raise UserError(f"--json {file} holds no results of such a task; give another file")
    for seed, name in itertools.product(args.seeds, args.model):
        if (name, seed) not in known()[1]:
            began = time.perf_counter()
            scores = dict(zip(map(str, columns), trial(name, seed)))
            mine.append(dict(model=name, seed=seed, settings=settings[name], scores=scores,
                             seconds=round(time.perf_counter() - began)))
            if file:
                with alone_in(file.parent), replacing(file) as temporary:
                    temporary.write_text(json.dumps(dict(records=known()[0]), indent=1))
    done, found, lines, width = known()[1], {}, {}, max(map(len, args.model)) + 2
    say(f"\n{'':{width}}" + "".join(f"{c!s:>18}" for c in columns) + "   seconds")
    for name in args.model:
        found[name] = {c: [done[name, seed]["scores"][str(c)] for seed in args.seeds] for c in columns}
        a = torch.tensor(list(found[name].values()), dtype=torch.float64)         # (columns, seeds)
        lines[name] = columns, a.mean(1).tolist(), a.std(1, correction=min(1, len(args.seeds) - 1)).tolist()
        cells = [f"{mean:.3f}" + f" +- {std:.3f}" * (len(args.seeds) > 1) for _, mean, std in zip(*lines[name])]
        seconds = sum(done[name, seed]["seconds"] for seed in args.seeds)
        say(f"{name:{width}}" + "".join(f"{cell:>18}" for cell in cells) + f"{seconds:10d}")
    picture(args.plot, lines, x, "right answers", **how)
    return found


def rows(args, n):
    """Return how many training texts of n tokens a batch has."""
    return max(1, args.batch_size * 128 // max(n, 128))


def needle_task(args, device):
    """Hide four pairs in noise. Train on short texts and ask in long ones."""
    draw = lambda size, g: needle(size[0], 4, size[1], g)
    sizes = [(rows(args, n), n) for n in args.train_lengths]
    trial = partial(score, "needle", args, device, 49, draw, sizes, [(args.batch_size, n) for n in args.lengths])
    campaign(args, trial, args.lengths, "length of the text [tokens]", log="x", level=1 / 16,
             marked=(max(args.train_lengths), "longest text in training"))
    say("by guessing: 0.06")


def mqar_task(args, device):
    """Ask for many pairs at once. Train on all numbers of --pairs in turn."""
    draw = lambda size, g: mqar(size[0], size[1], size[1], args.vocab, args.seq_len, g)
    draw((1, max(args.pairs)), torch.Generator())             # raises UserError before the work begins
    sizes = [(rows(args, args.seq_len), n) for n in args.pairs]
    trial = partial(score, "mqar", args, device, args.vocab, draw, sizes, [(args.batch_size, n) for n in args.pairs])
    campaign(args, trial, args.pairs, "pairs")
    say("by guessing: 1 / pairs")


def mad_task(args, device):
    """Train a model on each of the six tasks of MAD: the paper's Table 4, small."""
    def trial(*model):
        found, n = [], [args.batch_size]
        for task, (draw, vocab, _) in MAD.items():
            found += score(task, args, device, vocab, lambda n, g: draw(n, generator=g), n, n, *model)
        return found
    campaign(args, trial, list(MAD))
    say("by guessing: " + ", ".join(f"{name} {chance:.2f}" for name, (_, _, chance) in MAD.items()))


ABLATION = {  # what is changed: by how much the paper's perplexity rises. Ours begins at a matrix
    "atlas": None, "atlas,memory=mlp": -1.06, "atlas++": -1.50, "atlas,muon=False": -0.32,
    "atlas,momentum=False": None, "atlas,window=1": 2.01, "atlas,features=none": 2.17, "atlas,conv=False": None,
    "atlas,keep=False": None, "atlas,wiring=mag": -0.07, "atlas,wiring=mal": 0.29}


def ablation_task(args, device):
    """Train each row of the paper's Table 6, small, on tiny Shakespeare and to recall 16 pairs."""
    corpus, args.model = data.read("shakespeare"), list(ABLATION)
    tokenizer = data.make_tokenizer("char", corpus.text)
    ids, val = corpus.splits(tokenizer, args.seq_len)

    def trial(name, seed):
        text = trained(name, seed, args, device, tokenizer.vocab_size,
                       lambda step, g: data.batch(ids, seed, step, args.batch_size, args.seq_len), "text")
        loss = train.evaluate(text, val, args.seq_len, args.batch_size, 128)
        pairs = lambda n, g: mqar(2 * args.batch_size, n, n, 64, 64, g)
        return [loss, *score("mqar", args, device, 64, pairs, (2, 4, 8, 16), [16], name, seed)]
    found = campaign(args, trial, ("text", "16 pairs"))
    say(f"text: {corpus.used}")
    base = torch.tensor(found["atlas"]["text"])
    for name, sign in ABLATION.items():
        more = torch.tensor(found[name]["text"]) - base       # seed by seed
        noise = abs(more.mean()) <= (more.std() if len(more) > 1 else 0.02)
        says = "within noise" if noise else "agrees" if more.mean() * (sign or 0) > 0 else "disagrees"
        paper = f"paper {sign:+.2f} perplexity: {says}" if sign else ""
        say(f"{name:24} text {more.mean():+.3f} nats   {paper}")


TASKS = dict(needle=needle_task, mqar=mqar_task, mad=mad_task, ablation=ablation_task)
# of a result
SETTINGS = "task steps lr batch_size seq_len lengths pairs vocab train_lengths".split()


def parse(argv=None):
    parser = Parser(prog="recall.py", description=__doc__, usage="python %(prog)s [TASK] [flags]")
    needle, mqar, _, ablation = parsers = add_tasks(parser, TASKS, plot=("needle", "mqar"))
    for task, steps, batch_size in zip(parsers, (1200, 300, 600, 600), (32, 32, 32, 16)):
        task.set_defaults(mark='"records"')                   # `campaign` looks closer
        if task is not ablation:
            task.add_argument("--model", nargs="+", default=["atlas"], help="presets, changed or not [atlas]")
        add_number(task, "--seeds", 0, [1337], "of weights and data")
        add_number(task, "--steps", 1, steps, "of training")
        add_number(task, "--batch-size", 1, batch_size, "sequences at a time")
        add_number(task, "--lr", 0.0, 5e-3, "peak learning rate of AdamW")
        add_flags(task, "the network; in [] is what atlas has", models.Config,
                  models.sized("atlas", "tiny") | SMALL, skip=train.NO_FLAG)
    add_number(needle, "--lengths", 16, [128, 256, 512, 1024, 2048, 4096], "of test texts")
    add_number(needle, "--train-lengths", 16, LENGTHS, "of training texts, in turn")
    add_number(mqar, "--pairs", 1, [4], "in a text")
    add_number(mqar, "--vocab", 4, 16, "size of the vocabulary; half of it are values")
    add_number(mqar, "--seq-len", 1, 24, "tokens of a text")
    add_number(ablation, "--seq-len", 1, 128, "tokens of a text")
    return parser.parse_args(with_task(argv, "mqar"))


def main(argv=None):
    return run_task(parse, argv)


if __name__ == "__main__":
    sys.exit(main())
