"""recall.py - can a small model recall what it saw once? It trains small models on synthetic tasks,
and prints a table of their right answers.

    python recall.py needle --model transformer,head_dim=16 atlas --seeds 1 2 3 --plot
                                                              pairs hidden in long noise
    python recall.py                                          short for recall.py mqar
    python recall.py mqar --pairs 2 4 8 --vocab 32 --seq-len 32        many pairs at once
    python recall.py correlated --head-dim 4 --steps 600      pairs whose keys are alike
    python recall.py halves --head-dim 4                      pairs that are told in two parts

A name of --model is a preset, or a preset with changes, as atlas,memory=mlp,steps=900: one may
change all fields of models.Config, the training steps, and lr.

A campaign trains all models of --model on a task, each with all --seeds. With --json FILE it keeps
each result as soon as it is there, and when it is started again, it trains only what is missing.
Only one campaign at a time may write to a FILE.

To add a task, write a function that draws it, as needle does, and one that makes a Task of it and
starts a campaign, as needle_task does. Name the second in TASKS, and its flags in `parse`.
"""
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import (Parser, UserError, add_flags, add_number, add_tasks, chosen, picture, run_task,
                    say, seeded_batch, with_task, write_json)

import torch

import models
import train


# ---- recall of pairs
def distinct(batch, n, below, generator):
    """Return (batch, n) numbers from 0 to below - 1. Those of a row are different, and in random
    order."""
    return torch.rand(batch, below, generator=generator).topk(n).indices


def mqar(batch, n_pairs, n_queries, vocab, seq_len, generator):
    """Draw multi-query associative recall: key-value pairs, then some of the keys, which ask for
    their values (Arora et al. 2023, arXiv 2312.04927), as
    https://github.com/HazyResearch/zoology draws it.
    mqar(1, 3, n_queries=2, vocab=12, seq_len=14, generator=torch.Generator().manual_seed(7)):

                 key  val  key  val  key  val query                               query
        tokens     3   11    4   10    1    8    4    0    0    0    0    0    3    0
        targets -100 -100 -100 -100 -100 -100   10 -100 -100 -100 -100 -100   11 -100

    -> tokens, targets (batch, seq_len) int64 on the CPU; a target is -100 where no answer is asked.
    Keys are 1 .. vocab/2 - 1, values vocab/2 .. vocab - 1, each at most once in a row. A query
    stands 2g places behind the last pair. Its g = 0, 1, .. is drawn with weight (g+1)^-0.99, as
    zoology draws it with power_a = 0.01; zoology puts random tokens in the place of the 0s. Raises
    UserError for sizes that do not fit."""
    enough_keys = 1 <= n_queries <= n_pairs <= vocab // 2 - 1
    if not enough_keys or 2 * (n_pairs + n_queries) > seq_len:
        raise UserError(f"mqar: {n_pairs=}, {n_queries=} do not fit {vocab=}, {seq_len=}; "
                        "raise --vocab or --seq-len")
    keys = 1 + distinct(batch, n_pairs, vocab // 2 - 1, generator)
    values = vocab // 2 + distinct(batch, n_pairs, vocab - vocab // 2, generator)
    asked = distinct(batch, n_queries, n_pairs, generator)
    n_places = (seq_len - 2 * n_pairs) // 2
    weights = torch.arange(1, n_places + 1, dtype=torch.float64) ** -0.99
    g = torch.multinomial(weights.expand(batch, -1), n_queries, generator=generator)
    place = 2 * n_pairs + 2 * g                           # of the queries

    tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    tokens[:, 0:2 * n_pairs:2] = keys
    tokens[:, 1:2 * n_pairs:2] = values
    tokens.scatter_(1, place, keys.gather(1, asked))
    targets = torch.full_like(tokens, -100)
    targets.scatter_(1, place, values.gather(1, asked))
    return tokens, targets


def needle(batch, n_pairs, seq_len, generator, symbols=16):
    """Draw key-value pairs hidden anywhere in noise. At the end all keys come once more, in random
    order, and ask for their values; token 0 stands behind each. The vocabulary is token 0, and then
    `symbols` tokens each for noise, for keys and for values. A row has a key at most once.
    needle(1, 2, 12, g, symbols=3), where g is torch.Generator().manual_seed(10521) here and below:

        tokens     1    1    6    7    1    1    4    9    4    0    6    0
        targets -100 -100 -100 -100 -100 -100 -100 -100    9 -100    7 -100
    """
    n = seq_len - 2 * n_pairs                             # where the questions begin
    slot = distinct(batch, n_pairs, n - n_pairs, generator)       # places, if a pair took only one
    pairs_before = slot.argsort(-1).argsort(-1)
    place = slot + pairs_before                           # a pair takes one place more
    keys = 1 + symbols + distinct(batch, n_pairs, symbols, generator)
    values = torch.randint(1 + 2 * symbols, 1 + 3 * symbols, keys.shape, generator=generator)

    tokens = torch.randint(1, 1 + symbols, (batch, seq_len), generator=generator)
    tokens.scatter_(1, place, keys)
    tokens.scatter_(1, place + 1, values)
    tokens[:, n::2] = keys
    tokens[:, n + 1::2] = 0
    targets = torch.full_like(tokens, -100)
    targets[:, n::2] = values
    return tokens, targets


def correlated(batch, n_pairs, family, generator, symbols=16):
    """Draw pairs whose keys are alike, then all keys in another order, which ask for their values.
    A key is two tokens, a row and a column of a table. Each text draws the table anew: `family`
    rows and `family` columns, out of `symbols` each. Its keys are different cells of the table. So
    most keys share a token with several others, and no fixed projection makes them independent.
    Values may repeat.
    correlated(1, 3, 2, g, symbols=3), where tokens 0 to 2 are rows, 3 to 5 columns, 6 to 8 values:

        tokens     2    5    6    1    5    6    1    4    6    1    4    2    5    1    5
        targets -100 -100 -100 -100 -100 -100 -100 -100 -100 -100    6 -100    6 -100    6
    """
    if family > symbols:
        raise UserError(f"a family of {family} has more rows than there are, {symbols}; "
                        "lower --family")
    if n_pairs > family ** 2:
        raise UserError(f"a family of {family} has {family ** 2} keys, not {n_pairs}; "
                        "raise --family")
    rows = distinct(batch, family, symbols, generator)
    columns = symbols + distinct(batch, family, symbols, generator)
    cell = distinct(batch, n_pairs, family ** 2, generator)
    keys = rows.gather(1, cell // family), columns.gather(1, cell % family)
    values = torch.randint(2 * symbols, 3 * symbols, cell.shape, generator=generator)
    order = distinct(batch, n_pairs, n_pairs, generator)

    pairs = torch.stack([*keys, values], -1).flatten(1)
    asks = torch.stack([key.gather(1, order) for key in keys], -1).flatten(1)
    answers = torch.full_like(asks, -100)
    answers[:, 1::2] = values.gather(1, order)
    unasked = torch.full_like(pairs, -100)
    return torch.cat([pairs, asks], 1), torch.cat([unasked, answers], 1)


def halves(batch, n_pairs, generator, symbols=32):
    """Draw pairs that are told in two parts, then all keys in another order, which ask for both.
    Each of two keys is told its left half, one of 4, and four tokens later its right half, one of
    4. The answer is one of 16, a token for each combination. A memory that replaces what it knows
    of a key loses the left half.
    halves(1, 2, g, symbols=4), where tokens 0 to 3 are keys, 4 to 7 left, 8 to 11 right halves:

        tokens     2    6    1    4    2   10    1    8    2    1
        targets -100 -100 -100 -100 -100 -100 -100 -100   22   12
    """
    if n_pairs % 2 or n_pairs > symbols:
        raise UserError(f"halves takes an even number of --pairs, at most {symbols}, not {n_pairs}")
    keys = distinct(batch, n_pairs, symbols, generator)
    left, right = torch.randint(4, (2, *keys.shape), generator=generator)
    order = distinct(batch, n_pairs, n_pairs, generator)

    told = [torch.stack([keys, half], -1) for half in (symbols + left, symbols + 4 + right)]
    told = torch.stack([a.unflatten(1, (-1, 2)) for a in told], 2)       # two keys, then again
    asks = keys.gather(1, order)
    answers = symbols + 8 + 4 * left + right
    unasked = torch.full((batch, 4 * n_pairs), -100)
    return (torch.cat([told.flatten(1), asks], 1),
            torch.cat([unasked, answers.gather(1, order)], 1))


# ---- small models, trained on a task
SMALL = dict(n_layer=2, n_head=4, n_embd=64, head_dim=8)  # where no flag or --model says otherwise


class Task(NamedTuple):
    """Hold what a model is trained on, and what it is asked. A draw is a function draw(generator=g)
    -> tokens, targets (batch, T); a target is -100 where no answer is asked."""
    name: str
    vocab: int                            # the size of the vocabulary
    train: list                           # draws of batches to train on, in turn
    ask: dict                             # {column of the table: draw of a batch that asks}


def variant(name, args, **more):
    """Read a name of --model, as atlas,memory=mlp,steps=900. Return its models.Config, its training
    steps and its lr. The name overrides `more`, which overrides the flags args. Raises UserError
    for unknown names and values."""
    preset, *changes = name.split(",")
    kinds = {f.name: f.type for f in fields(models.Config) if f.name not in train.NO_FLAG}
    kinds |= dict(steps=int, lr=float)
    given = dict(steps=args.steps, lr=args.lr)
    for change in changes:
        key, _, value = change.partition("=")
        try:
            if kinds[key] is bool:
                given[key] = {"True": True, "False": False}[value]
            else:
                given[key] = kinds[key](value)
        except (KeyError, ValueError):
            raise UserError(f"--model {name}: cannot set {key}={value}; "
                            "give field=value, as keep=False")

    steps, lr = given.pop("steps"), given.pop("lr")
    train.TrainConfig(steps=steps, lr=lr)                     # raises UserError
    network = SMALL | chosen(vars(args), models.Config) | more | given
    return models.configure(preset, **network), steps, lr


def trained(name, seed, args, device, vocab, draw, title):
    """Return the model of this name, trained on the batches draw(number, period) -> x, y, with
    number 0, 1, .. (train.Task.draw explains the period, which has no meaning here)."""
    config, steps, lr = variant(name, args, vocab_size=vocab)
    torch.manual_seed(seed)
    model = models.LM(config).to(device)
    say(f"\n{title}, {name}: {model.num_params():,} parameters, seed {seed}, {steps} steps")
    tc = train.TrainConfig(out="", seed=seed, optimizer="muon", steps=steps, warmup=steps // 10,
                           lr=lr, eval_every=steps, log_every=max(1, steps // 5))
    task = train.Task(tc, device)
    task.draw = draw
    run = dict(step=0, best=math.inf, seconds=0.0)
    stopped = train.train(model, task.optimizers(model), run, task)
    if stopped:
        raise KeyboardInterrupt(stopped)
    return model.eval()


@torch.no_grad()
def accuracy(model, batches):
    """Return the share of right answers in batches x, y; -100 in y asks for none."""
    device = next(model.parameters()).device
    right, asked = 0, 0
    for x, y in batches:
        logits, _ = model(x.to(device))
        right += (logits.argmax(-1).cpu() == y).sum().item()
        asked += (y >= 0).sum().item()
    return right / asked


def score(task, args, device, name, seed):
    """Train a model on a Task. Return its accuracy in each column."""
    def draw(number, period):
        draw_size = task.train[number % len(task.train)]
        return draw_size(generator=seeded_batch(seed, number))

    # drawn before the training, so that sizes that do not fit are refused at once
    asked = {}
    for column, ask in task.ask.items():
        asked[str(column)] = [ask(generator=seeded_batch(seed, i, test=True)) for i in range(4)]

    model = trained(name, seed, args, device, task.vocab, draw, task.name)
    return {column: accuracy(model, batches) for column, batches in asked.items()}


# ---- campaigns
ELSEWHERE = "run mark json plot device threads model seeds".split()     # flags, but no settings


def settings_of(name, args):
    """Return what decides a result beside the names of --model and the seed: a dict of the flags,
    and under "config" the whole network."""
    config = asdict(variant(name, args)[0])
    flags = {key: a for key, a in vars(args).items() if key not in config and key not in ELSEWHERE}
    return flags | dict(config=config)


def identity(record):
    """Return a string by which a result differs from others: its model, seed and settings. Fields
    of the network that have their default are left out, so a result stays valid when models.Config
    gets a new field."""
    usual, settings = asdict(models.Config()), record["settings"]
    changed = {key: a for key, a in settings["config"].items() if a != usual.get(key)}
    settings = settings | dict(config=changed)
    return json.dumps([record["model"], record["seed"], settings], sort_keys=True)


def read_records(file):
    """Return the results in a file of --json, {identity: record}, which is empty if there is no
    file yet. Raises UserError if the file holds something else."""
    try:
        records = json.loads(Path(file).read_text())["records"]
        return {identity(record): record for record in records if record["scores"]}
    except FileNotFoundError:
        return {}
    except Exception:                                         # its type depends on what the file is
        raise UserError(f"--json {file} holds no results of such a task; give another file")


def campaign(args, trial, columns, x="", **how):
    """Run trial(name, seed) -> {column: score} for each name of --model and each of --seeds, except
    those whose result is in the file of --json. Print the table, and draw it over an axis named x;
    how: more arguments of `picture`. Return {name: [one record for each seed]}."""
    settings = {name: settings_of(name, args) for name in args.model}     # raises UserError
    done = read_records(args.json) if args.json else {}
    found = {name: [] for name in args.model}
    for seed in args.seeds:
        for name in args.model:
            record = dict(model=name, seed=seed, settings=settings[name])
            key = identity(record)
            if key not in done:
                began = time.perf_counter()
                record["scores"] = trial(name, seed)
                record["seconds"] = round(time.perf_counter() - began)
                done[key] = record
                if args.json:
                    write_json(args.json, dict(records=list(done.values())))
            found[name].append(done[key])

    picture(args.plot, show(found, columns), x, "right answers", **how)
    return found


def show(found, columns):
    """Print the table of a campaign: the mean and standard deviation over the seeds, for each model
    and column. Return the lines of the table for `picture`."""
    width = max(map(len, found)) + 2
    say("\n" + " " * width + "".join(f"{column!s:>18}" for column in columns) + "   seconds")
    lines = {}
    for name, records in found.items():
        means, spreads, cells = [], [], ""
        for column in columns:
            a = [record["scores"][str(column)] for record in records]
            means.append(statistics.mean(a))
            spreads.append(statistics.stdev(a) if len(a) > 1 else 0.0)
            cell = f"{means[-1]:.3f}"
            if len(a) > 1:
                cell += f" +- {spreads[-1]:.3f}"
            cells += f"{cell:>18}"
        seconds = sum(record["seconds"] for record in records)
        say(f"{name:{width}}{cells}{seconds:10d}")
        lines[name] = columns, means, spreads
    return lines


def needle_task(args, device):
    """Hide four pairs in noise. Train on short texts and ask in long ones."""
    lengths = [32, 64, 128]
    train_on = [partial(needle, args.batch_size, 4, n) for n in lengths]
    ask = {n: partial(needle, args.batch_size, 4, n) for n in args.lengths}
    trial = partial(score, Task("needle", 49, train_on, ask), args, device)
    campaign(args, trial, args.lengths, "length of the text [tokens]", log="x", level=1 / 16,
             marked=(lengths[-1], "longest text in training"))
    say("by guessing: 0.06")


def mqar_task(args, device):
    """Ask for many pairs at once. Train on all numbers of --pairs in turn."""
    def draws(batch):
        return {n: partial(mqar, batch, n, n, args.vocab, args.seq_len) for n in args.pairs}

    rows = max(1, args.batch_size * 128 // max(args.seq_len, 128))        # fewer, if texts are long
    task = Task("mqar", args.vocab, list(draws(rows).values()), draws(args.batch_size))
    campaign(args, partial(score, task, args, device), args.pairs, "pairs")
    say("by guessing: 1 / pairs")


def told_and_asked(name, vocab, draw, args, device):
    """Train on all numbers of --pairs in turn, and ask for all pairs."""
    draws = {n: partial(draw, args.batch_size, n) for n in args.pairs}
    task = Task(name, vocab, list(draws.values()), draws)
    campaign(args, partial(score, task, args, device), args.pairs, "pairs")
    say("by guessing: 0.06")


def correlated_task(args, device):
    """Ask for pairs whose keys share tokens."""
    draw = partial(correlated, family=args.family)
    told_and_asked("correlated", 48, draw, args, device)


def halves_task(args, device):
    """Ask for pairs that were told in two parts."""
    told_and_asked("halves", 56, halves, args, device)


TASKS = dict(needle=needle_task, mqar=mqar_task, correlated=correlated_task, halves=halves_task)


def parse(argv=None):
    parser = Parser(prog="recall.py", description=__doc__, usage="python %(prog)s [TASK] [flags]")
    tasks = list(add_tasks(parser, TASKS, plot=TASKS))
    needle, mqar, correlated, halves = tasks
    for task, steps in zip(tasks, (1200, 300, 600, 600)):
        task.set_defaults(mark='"records"')                   # `read_records` looks closer
        task.add_argument("--model", nargs="+", default=["atlas"],
                          help="presets, or presets with changes, as atlas,memory=mlp [atlas]")
        add_number(task, "--seeds", 0, [1337], "seeds of weights and data; one run for each")
        add_number(task, "--steps", 1, steps, "training steps")
        add_number(task, "--batch-size", 1, 32, "sequences at a time")
        add_number(task, "--lr", 0.0, 5e-3, "peak learning rate of AdamW")
        add_flags(task, "the network; [] shows the values of atlas", models.Config,
                  models.sized("atlas", "tiny") | SMALL, skip=train.NO_FLAG)
    add_number(needle, "--lengths", 16, [128, 256, 512, 1024, 2048, 4096], "tokens of test texts")
    add_number(mqar, "--pairs", 1, [4], "pairs in a text")
    add_number(mqar, "--vocab", 4, 16, "size of the vocabulary; half of it are values")
    add_number(mqar, "--seq-len", 1, 24, "tokens of a text")
    for task in correlated, halves:
        add_number(task, "--pairs", 1, [4, 8, 16], "pairs in a text")
    add_number(correlated, "--family", 1, 4, "rows and columns of keys in a text")
    return parser.parse_args(with_task(argv, "mqar"))


def main(argv=None):
    return run_task(parse, argv)


if __name__ == "__main__":
    sys.exit(main())
