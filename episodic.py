"""episodic.py - teach a memory to store and retrieve; and grokking, watched from the inside.

    python episodic.py                                episodes of language and arithmetic, five minutes on a CPU
    python episodic.py --grok --plot                  a + b modulo 97, two minutes: circles in the embedding
    python episodic.py --resume --steps 2000          go on; on a CPU a stopped run ends in the same bits

An episode is a few batches. The storage phase shows each of them whole, the retrieval phase with words masked:

    storage      to be or not to be , that is the question          23 + 45 = 68 . 90 + 11 = 4 .
    retrieval    to be or not to be , that is the [MASK]            23 + 45 = [MASK] . 90 + 11 = [MASK] .

The model names the masked words. They count ten times as much as the next words in the storage phase. The state is
carried through an episode, and each episode starts anew. Tests use text and sums that training never shows. Each test
asks twice: with the state of the storage phase, and with a new state. The difference is what the memory carried.
"""
import argparse
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import train
from common import Parser, UserError, add_flags, exit_code, flag, need, opt, picture, say
from data import read
from models import PRESETS, Config, Memory

RETRIEVAL = 10                        # weight of the retrieval phase; storage has 1
CONTEXT, COMMON = 3, 50               # least number of words before a masked one; the most frequent are never masked
TOP = 5                               # frequencies that count as concentrated


@dataclass
class Settings(train.TrainConfig):
    """Everything about a run that is not the network: the fields of train.TrainConfig, and these."""
    task: str = opt("episodes", "episodes, or grok: modular addition", choices=("episodes", "grok"))
    modulus: int = opt(97, "modulus of the sums, odd", low=2 * TOP + 1)
    batches: int = opt(4, "batches in a test episode; training episodes have 1, 2, .. of them in turn", low=1)
    masks: int = opt(4, "words asked for in a row of a batch", low=1)
    arithmetic: float = opt(0.5, "share of batches that are sums; the others are text")
    eval_windows: int = opt(10, "test episodes in an evaluation", low=1)
    words: int = opt(2000, "size of the vocabulary, the most frequent words of the text", low=COMMON + 1)
    share: float = opt(0.9, "share of all sums to train on; the others are held out (grok: 0.5)")
    embed_start: float = opt(0.02, "grok only: size of the initial embedding, in multiples of models.LM's")
    stablemax: bool = opt(False, "grok only: stablemax in the place of softmax (grok: on)")
    perp_grad: bool = opt(False, "grok only: the gradient without its part along the weights (grok: on)")
    plot: bool = opt(False, "draw OUT/curves.png at the end")


# what differs from the defaults: of the run, and of the network, under the preset
RUNS = {"episodes": dict(out="out-episodes", model="omeganet", seq_len=24, batch_size=8, steps=600, optimizer="muon",
                         lr=3e-3, embed_lr=0.3, muon_lr=2e-2),
        "grok": dict(out="out-grok", model="transformer", seq_len=3, batch_size=512, steps=800, lr=2e-3, beta2=0.98,
                     weight_decay=1.5, grad_clip=0.0, share=0.5, stablemax=True, perp_grad=True)}
NETWORKS = {"episodes": dict(n_layer=1, n_embd=192, n_head=8, head_dim=16, chunk=24, tie=True),
            "grok": dict(n_layer=1, n_embd=128, n_head=4)}
NO_FLAG = "size tokenizer bpe_size init grad_accum telemetry wandb tensorboard dtype compile remat".split()
FREE = train.FREE | {"plot"}                                  # what may differ on --resume


def settings(given, old=None):
    """Return Settings and models.Config from the given flags and the checkpoint of --resume, if there is one."""
    was, ours = {**old["config"], **old["train"]} if old else {}, {f.name for f in fields(Settings)}
    if old and "modulus" not in was:
        raise UserError(f"{old['path']} is no run of episodic.py; give its --out")
    for name in (name for name in given.keys() - FREE if old and given[name] != was[name]):
        raise UserError(f"{flag(name)} is {was[name]} in {old['path']}, not {given[name]}; drop the flag")
    task = was.get("task", given.get("task", "episodes"))
    run = {**RUNS[task], **{k: a for k, a in was.items() if k not in train.LAUNCH}, **given}
    network = old["config"] if old else {**NETWORKS[task], **PRESETS[run["model"]]}
    config = Config(**{**network, **{k: a for k, a in given.items() if k not in ours}})
    tc = Settings(**{k: a for k, a in run.items() if k in ours})
    if not (tc.modulus % 2 and tc.arithmetic <= 1 and 0 < tc.share < 1 and (tc.seq_len > 5 or tc.task == "grok")):
        raise UserError("--modulus is odd, --arithmetic at most 1, --share in (0, 1), --seq-len of episodes at least 6")
    if tc.plot:
        need("matplotlib")
    return tc, config


def sums(p, share, seed):
    """Return about this share of all (a, b), and the others, in random order, (n, 2) each.

    a + b is on the side of b + a. Otherwise many held-out sums could be looked up, which would look like grokking.
    """
    random = torch.Generator().manual_seed(seed)
    a, b = pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))[torch.randperm(p * p, generator=random)].T
    luck = torch.rand(p, p, generator=random)[torch.minimum(a, b), torch.maximum(a, b)]
    first = luck <= luck.sort().values[max(0, int(share * p * p) - 1)]
    if not 0 < first.sum() < p * p:
        raise UserError(f"--share {share} leaves no sums modulo {p} on one side; take one nearer to 0.5")
    return pairs.T[first], pairs.T[~first]


# ---- episodes

class Shown(train.Task):
    """What both tasks share: the names of their measures, and a picture of these at the end."""
    program = "episodic.py"

    def finish(self, model, run):
        """Say the last measures, and draw all of them with --plot."""
        say("done: " + ", ".join(f"{name} {a}" for name, a in run["end"].items() if a == a))
        if self.tc.plot:
            lines = {name: train.curve(self.tc.out, name) for name in self.columns if name != "phase"}
            lines = {name.replace("_", ", "): line for name, line in lines.items() if line}
            picture(Path(self.tc.out, "curves.png"), lines, "step", "share")


class Episodes(Shown):
    """Store and retrieve. Ids: first `words`, then unknown, [MASK], +, =, . and the numbers."""
    columns = [kind + how for kind in ("", "language_", "arithmetic_") for how in ("carried", "reset")]

    def __init__(self, tc, device, dtype, old=None):
        super().__init__(tc, device)
        corpus = read(tc.data)
        found = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|[^\w\s]", corpus.text.lower())
        cut = len(found) * 9 // 10                            # the last tenth is for tests
        words = [word for word, _ in Counter(found[:cut]).most_common(tc.words)]
        if len(words) <= COMMON or len(found) - cut < tc.seq_len:
            raise UserError(f"--data {tc.data} has {len(found)} words, {len(words)} of them different: give more text")
        ids = dict(zip(words, range(len(words))))
        ids = torch.tensor([ids.get(word, len(words)) for word in found])
        self.words, self.text, self.pairs = words, (ids[:cut], ids[cut:]), sums(tc.modulus, tc.share, tc.seed)
        self.data, self.vocab_size = dict(used=corpus.used, sha256=corpus.sha256), len(words) + 5 + tc.modulus
        self.about = f"{len(words):,} words, {len(self.pairs[0]):,} sums to train, {len(self.pairs[1]):,} held out"

    def draw(self, number, n, test):
        """Draw episode `number`: n times its kind; tokens whole; tokens masked; the masked ones, else -100; (B, T) each."""
        tc, V, T, episode = self.tc, len(self.words), self.tc.seq_len, []
        random = torch.Generator().manual_seed(2 * (1_000_003 * tc.seed + number) + test)
        randint = partial(torch.randint, generator=random)
        for _ in range(n):
            kind, text, pairs = "language", self.text[test], self.pairs[test]
            shown = text[randint(len(text) - T + 1, (tc.batch_size, 1)) + torch.arange(T)]
            may = (COMMON <= shown) & (shown < V) & (torch.arange(T) >= CONTEXT)
            if torch.rand((), generator=random) < tc.arithmetic:
                a, b = pairs[randint(len(pairs), (tc.batch_size, -(-T // 6)))].unbind(-1)
                plus, equals, stop = (torch.full_like(a, V + i) for i in (2, 3, 4))
                row = V + 5 + a, plus, V + 5 + b, equals, V + 5 + (a + b) % tc.modulus, stop
                kind, shown, may = "arithmetic", torch.stack(row, -1).flatten(1)[:, :T], torch.arange(T) % 6 == 4
            lots = torch.rand(shown.shape, generator=random) * may
            picked = torch.zeros_like(shown).scatter(1, lots.topk(min(tc.masks, T)).indices, 1).bool() & may
            batch = shown, shown.masked_fill(picked, V + 1), shown.where(picked, -100)
            episode.append((kind, *(a.to(self.device) for a in batch)))
        return episode

    def begin(self, model):
        """Make the memory find what it wrote: queries equal keys, both made of the words before; a value is the word.

        From a random start a query meets its key only by chance, and training takes many times as long.
        """
        if model.config.tie:                                  # soon long enough for a word to be told from others
            model.embed.weight *= 4
        for m in model.modules():
            if isinstance(m, Memory):
                n = m.out.in_features                         # of each of q, k, v
                m.qkv.weight[:n] = m.qkv.weight[n: 2 * n]
                if m.conv is not None:
                    m.conv[:, :n], m.conv[-1, :2 * n] = m.conv[:, n: 2 * n], 0
                    m.conv[:, 2 * n:] *= 0.2
                    m.conv[-1, 2 * n:] = 1

    def loss(self, model, step):
        """Return the loss of an episode of 1, 2, .. batches in turn: storage, then retrieval with the state it left."""
        episode, state, total = self.draw(step, 1 + step % self.tc.batches, 0), None, 0.0
        _, shown, asked, answers = zip(*episode)
        self.seen += 2 * sum(x.numel() for x in shown)
        following = [F.pad(x[:, 1:], (0, 1), value=-100) for x in shown]
        for weight, batches, targets in (1, shown, following), (RETRIEVAL, asked, answers):
            said, y = [], torch.cat(targets).flatten()
            for x in batches:
                logits, state = model(x, state)
                said.append(logits.flatten(0, 1).float())
            total = total + weight * F.cross_entropy(torch.cat(said), y, reduction="sum") / (y >= 0).sum().clamp_min(1)
        return total / (1 + RETRIEVAL)

    def measure(self, model):
        """Return the share of right answers in tests: {"carried": share, "reset": share, "language_carried": .., ..}."""
        found = {name: [0, 0] for name in self.columns}
        for episode in (self.draw(i, self.tc.batches, 1) for i in range(self.tc.eval_windows)):
            for how in ("carried", "reset"):
                state = None
                for _, shown, _, _ in episode if how == "carried" else ():
                    state = model(shown, state)[1]
                for kind, _, x, y in episode:
                    logits, state = model(x, state)
                    for name in (how, f"{kind}_{how}"):
                        found[name][0] += (logits.argmax(-1) == y).sum().item()
                        found[name][1] += (y >= 0).sum().item()
        return {name: right / asked if asked else math.nan for name, (right, asked) in found.items()}


# ---- grokking

def log_stablemax(x):
    """Return log(s(x) / sum s), s(x) = x + 1 for x >= 0, else 1 / (1 - x) (Prieto et al. 2025, arXiv 2501.04697).

    It does not saturate as exp does, so float32 does not round away what is left to learn.
    """
    s = torch.where(x >= 0, x.clamp_min(0).log1p(), -(-x.clamp_max(0)).log1p())
    return s - s.logsumexp(-1, keepdim=True)


@torch.no_grad()
def perpendicular(parameters):
    """Take from each gradient g its part along the weights w: steps then cannot merely lengthen w (perp-Grad, ibid.)."""
    for w in (w for w in parameters if w.grad is not None):
        w.grad -= (w.grad * w).sum() / w.square().sum().clamp_min(1e-30) * w


def spectrum(E):
    """Return the share of the energy of E (p, d), p odd, at each frequency 1 .. (p - 1) / 2; the mean is left out."""
    energy = torch.fft.rfft(E, dim=0).abs().square().sum(1)[1:]
    return energy / energy.sum().clamp_min(1e-30)


def concentration(E, top=TOP):
    """Return the share of the energy of numbers E (p, d) in their `top` strongest frequencies: 1 on circles."""
    return spectrum(E).topk(top).values.sum().item()


def circular_fit(E):
    """Return R^2 of E, projected on the plane of its strongest frequency k, and cos, sin of 2 pi k a / p: 1 on a circle."""
    p, k = len(E), spectrum(E).argmax() + 1
    angle = 2 * math.pi * k * torch.arange(p, device=E.device) / p
    circle = torch.stack([angle.cos(), angle.sin()], 1) * (2 / p) ** 0.5         # (p, 2), orthonormal
    X = (E - E.mean(0)) @ torch.linalg.qr(E.T @ circle).Q                        # (p, 2)
    return ((circle.T @ X).square().sum() / X.square().sum().clamp_min(1e-30)).item()


def by_chance(p, d, top=TOP):
    """Return concentration and circular_fit of a random E (p, d), on average.

    The energies of frequencies are about normal, with a spread of 1 / sqrt(d). A plane holds 2 / d of any other one.
    """
    K = (p - 1) // 2
    z = torch.special.ndtri((torch.arange(K, 0, -1) - 0.375) / (K + 0.25))      # means of ordered normal numbers (Blom)
    s = 1 + z / d ** 0.5
    return (s[:top].sum() / K).item(), (s[0] / (s[0] + (K - s[0]) * 2 / d)).item()


def phase(fitted, held_out, concentrated, chance):
    """Name the phase by accuracy on the sums of training, on held-out sums, concentration, and its value by chance."""
    if held_out < 0.1 and (fitted < 0.99 or concentrated < 1.1 * chance):
        return "memorisation"
    return "circuit formation" if held_out < 0.5 else "cleanup" if held_out < 0.9 else "grokked"


class Grok(Shown):
    """Modular addition: a, b, "=" -> a + b modulo p."""
    columns = "fitted held_out concentration random_concentration circular_fit random_fit phase".split()

    def __init__(self, tc, device, dtype, old=None):
        super().__init__(tc, device)
        self.p, self.vocab_size, self.data = tc.modulus, tc.modulus + 1, dict(used="sums", sha256="")
        self.shown, self.held_out = (a.to(device) for a in sums(tc.modulus, tc.share, tc.seed))
        self.about = f"{len(self.shown):,} to train, {len(self.held_out):,} held out, modulo {self.p}"

    def begin(self, model):
        """Make the embedding small: what is random there hides the circles until it decays."""
        model.embed.weight *= self.tc.embed_start

    def optimizers(self, model):
        """Return AdamW, under which all weights decay, the embedding too."""
        tc = self.tc
        how = dict(lr=tc.lr, betas=(0.9, tc.beta2), weight_decay=tc.weight_decay, fused=True)
        adamw = torch.optim.AdamW(model.parameters(), **how)
        if tc.perp_grad:
            adamw.register_step_pre_hook(lambda *_: perpendicular(model.parameters()))
        return [adamw]

    def logits(self, model, pairs):
        """Return the logits of the sums of pairs (n, 2)."""
        return model(F.pad(pairs, (0, 1), value=self.p))[0][:, -1, :self.p].float()

    def loss(self, model, step):
        """Return the loss of a batch of sums."""
        random, n = torch.Generator().manual_seed(1_000_003 * self.tc.seed + step), self.tc.batch_size
        pairs = self.shown[torch.randint(len(self.shown), (n,), generator=random).to(self.shown.device)]
        self.seen += 3 * n
        normal = log_stablemax if self.tc.stablemax else partial(F.log_softmax, dim=-1)
        return F.nll_loss(normal(self.logits(model, pairs)), pairs.sum(1) % self.p)

    def measure(self, model):
        """Return accuracies, how circular the embedding is beside a random one, and the phase."""
        score = lambda pairs: sum((self.logits(model, part).argmax(-1) == part.sum(1) % self.p).sum().item()
                                  for part in pairs.split(2048)) / len(pairs)
        E, fitted, held_out = model.embed.weight[:self.p], score(self.shown), score(self.held_out)
        share, (share_random, fit_random) = concentration(E), by_chance(*E.shape)
        named = phase(fitted, held_out, share, share_random)
        return dict(zip(self.columns, (fitted, held_out, share, share_random, circular_fit(E), fit_random, named)))


# ---- a run

def parse(argv=None):
    """Return a dict of the flags that were given."""
    parser = Parser(prog="episodic.py", description=__doc__, epilog="In [] is what --task episodes has.")
    usual = {**NETWORKS["episodes"], **PRESETS[RUNS["episodes"]["model"]], **RUNS["episodes"]}
    add_flags(parser.add_argument_group("the run"), Settings, usual, skip=NO_FLAG)
    add_flags(parser.add_argument_group("the network"), Config, usual, skip=train.NO_FLAG)
    parser.add_argument("--grok", dest="task", action="store_const", const="grok", default=argparse.SUPPRESS,
                        help="--task grok")
    return vars(parser.parse_args(argv))


def launch(given):
    """Make a run by train.launch, in one process, eager."""
    if train.PROCESSES > 1:
        raise UserError("episodic.py is one process; start it without torchrun")
    given = {"out": RUNS[given.get("task", "episodes")]["out"], "compile": False, "dtype": "float32", **given}
    return train.launch(given, settings, lambda tc, *how: (Grok if tc.task == "grok" else Episodes)(tc, *how), text=False)


def main(argv=None):
    given = parse(argv)
    return exit_code(lambda: launch(given))


if __name__ == "__main__":
    sys.exit(main())
