"""episodic.py - teach a memory to store and retrieve; and grokking, watched from the inside.

    python episodic.py                                episodes of text and sums mod 97, five minutes on a CPU
    python episodic.py --grok --plot                  a + b modulo 97, two minutes: circles in the embedding

An episode is a few batches. The storage phase shows each of them whole, the retrieval phase with words masked:

    storage      to be or not to be , that is the question          23 + 45 = 68 . 90 + 11 = 4 .
    retrieval    to be or not to be , that is the [MASK]            23 + 45 = [MASK] . 90 + 11 = [MASK] .

The model names the masked words. The state is carried through an episode, and each episode starts anew. Tests ask for
unseen text and sums twice: with the state of the storage phase, and with a new one. The difference is what it carried.
"""
import re
import sys
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import train
from common import (Parser, UserError, add_flags, check_picture, chosen, exit_code, flag, opt, plot,
                    say, seeded)
from data import BORDER, split
from models import Config, Memory, sized

RETRIEVAL = 10                        # weight of the retrieval phase; storage has 1
BATCHES = 4                           # in a test episode; training episodes have 1, 2, .. of them in turn
TESTS = 10                            # test episodes in an evaluation
MASKS = 4                             # words masked in each sequence
SUMS = 0.5                            # share of batches that are sums; the others are text
WORDS = 2000                          # size of the vocabulary, the most frequent words of the text
CONTEXT, COMMON = 3, 50               # least number of words before a masked one; the most frequent are never masked
EMBED_START = 0.02                    # of grok: size of the initial embedding, in multiples of models.LM's


@dataclass
class Settings(train.TrainConfig):
    """Hold everything about a run that is not the network: the fields of train.TrainConfig, and these."""
    grok: bool = opt(False, "modular addition instead of episodes")
    modulus: int = opt(97, "modulus of the sums, odd", low=11)
    stablemax: bool = opt(True, "grok only: stablemax instead of softmax")
    perp_grad: bool = opt(True, "grok only: remove the gradient's part along the weights")
    plot: bool = opt(False, "draw OUT/curves.png at the end")


# what differs from the defaults, of the run and of the network; the model's preset wins
USUAL = {"episodes": dict(out="out-episodes", model="omeganet", seq_len=24, batch_size=8, steps=600, optimizer="muon",
                          lr=3e-3, embed_lr=0.3, n_layer=1, n_embd=192, n_head=8, head_dim=16, chunk=24, tie=True),
         "grok": dict(out="out-grok", model="transformer", seq_len=3, batch_size=512, steps=800, lr=2e-3,
                      weight_decay=1.5, n_layer=1, n_embd=128, n_head=4)}
USES = dict(episodes="data seq_len optimizer embed_lr gates_lr outer_muon_lr", grok="stablemax perp_grad")
NO_FLAG = "size tokenizer init grad_accum repeats log_to dtype compile remat documents".split()


def settings(given, old=None):
    """Return Settings and models.Config from flags and the checkpoint of --resume. Raise UserError where they clash."""
    grok = (old["train"] if old else given).get("grok")
    task, other = ("grok", "episodes") if grok else ("episodes", "grok")
    model = given.get("model", USUAL[task]["model"])
    values = old["config"] | old["train"] if old else USUAL[task] | sized(model, "tiny")
    if wrong := given.keys() & {*USES[other].split()}:
        raise UserError(f"{flag(min(wrong))} is no flag of {task}, but of {other}")
    if old and "modulus" not in values:
        raise UserError(f"{old['path']} is no run of episodic.py; give its --out")
    if old:
        train.keep_to(old, given.keys() - train.FREE - {"plot", "dtype"}, given)
    values |= given
    tc, config = (cls(**chosen(values, cls)) for cls in (Settings, Config))
    if tc.modulus % 2 == 0 or tc.seq_len <= 5 and not tc.grok:
        raise UserError("--modulus is odd, and --seq-len of episodes above 5")
    check_picture(tc.plot and f"{tc.out}/curves.png")
    return tc, config


def sums(p, share, seed):
    """Return about this share of all (a, b), and the others, in random order, (n, 2) each."""
    random = seeded(seed)
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))[torch.randperm(p * p, generator=random)]
    # b + a is on the side of a + b, or else a held-out sum could be looked up, which would pass for grokking
    luck = torch.rand(p, p, generator=random)[pairs.amin(1), pairs.amax(1)]
    first = luck <= luck.sort().values[max(0, int(share * p * p) - 1)]
    return pairs[first], pairs[~first]


class Watched(train.Task):
    """Say and draw at the end what was measured."""

    def finish(self, model, run):
        found = ", ".join(f"{name} {a:.4}" for name, a in run["end"].items() if a == a)
        say(f"done on {self.data['used']}: {found}")
        if self.tc.plot:
            plot([self.tc.out], self.columns, "share")


class Episodes(Watched):
    """Store and retrieve. Ids: first `words`, then unknown, [MASK], +, =, . and the numbers."""
    columns = [kind + how for kind in ("", "language_", "arithmetic_") for how in ("carried", "reset")]

    def prepare(self, tc, old):
        corpus = train.read_text(tc.data, old)
        text = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|[^\w\s]", corpus.text.replace(BORDER, "\n").lower())
        cut = len(text) * 9 // 10                             # the last tenth is for tests
        ids = {word: i for i, (word, _) in enumerate(Counter(text[:cut]).most_common(WORDS))}
        self.words = V = len(ids)
        if V <= COMMON or len(text) - cut < tc.seq_len:
            raise UserError(f"--data {tc.data} has {len(text)} words, {V} of them different: give more text")
        self.text = split(torch.tensor([ids.get(word, V) for word in text]))
        self.pairs = sums(tc.modulus, 0.9, tc.seed)
        self.data, self.vocab_size = dict(used=corpus.used, sha256=corpus.sha256), V + 5 + tc.modulus
        self.about = f"{V:,} words, {len(self.pairs[0]):,} sums to train, {len(self.pairs[1]):,} held out"

    def draw(self, number, n, test):
        """Yield n batches of an episode: kind; tokens whole; tokens masked; the masked ones, else -100; (B, T) each."""
        tc, V, T, text, pairs = self.tc, self.words, self.tc.seq_len, self.text[test], self.pairs[test]
        random = seeded(2 * (1_000_003 * tc.seed + number) + test)
        for _ in range(n):
            first = torch.randint(len(text) - T + 1, (tc.batch_size, 1), generator=random)
            kind, shown = "language", text[first + torch.arange(T)]
            may = (COMMON <= shown) & (shown < V) & (torch.arange(T) >= CONTEXT)           # be masked
            if torch.rand((), generator=random) < SUMS:
                a, b = pairs[torch.randint(len(pairs), (tc.batch_size, -(-T // 6)), generator=random)].unbind(-1)
                plus, equals, stop = (torch.full_like(a, V + i) for i in (2, 3, 4))
                row = V + 5 + a, plus, V + 5 + b, equals, V + 5 + (a + b) % tc.modulus, stop
                kind, shown, may = "arithmetic", torch.stack(row, -1).flatten(1)[:, :T], torch.arange(T) % 6 == 4
            lots = torch.rand(shown.shape, generator=random) * may
            masked = may & (lots >= lots.topk(min(MASKS, T)).values[:, -1:])
            batch = shown, shown.masked_fill(masked, V + 1), shown.where(masked, -100)
            yield kind, *(a.to(self.device) for a in batch)

    def begin(self, model):
        """Make the memory find what it wrote: queries equal keys, made of the words before, and a value is the word."""
        # from a random start a query meets its key only by chance, and training takes many times as long
        if model.config.tie:                                  # soon long enough for a word to be told from others
            model.embed.weight *= 4
        for m in model.modules():
            if isinstance(m, Memory):
                n = m.config.n_head * m.config.head_dim       # of each of q, k, v
                m.qkv.weight[:n] = m.qkv.weight[n: 2 * n]
                if m.conv is not None:
                    m.conv[:, :n], m.conv[-1, :2 * n] = m.conv[:, n: 2 * n], 0
                    m.conv[:, 2 * n:] *= 0.2
                    m.conv[-1, 2 * n:] = 1

    def loss(self, model, step):
        """Return the loss of an episode of 1, 2, .. batches in turn: storage, then retrieval with the state it left."""
        _, shown, asked, answers = zip(*self.draw(step, 1 + step % BATCHES, 0))
        self.tokens_read += 2 * sum(x.numel() for x in shown)
        following, state, total = [F.pad(x[:, 1:], (0, 1), value=-100) for x in shown], None, 0.0
        for weight, batches, targets in (1, shown, following), (RETRIEVAL, asked, answers):
            said, y = [], torch.cat(targets).flatten()
            for x in batches:
                logits, state = model(x, state)
                said.append(logits.flatten(0, 1).float())
            total = total + weight * F.cross_entropy(torch.cat(said), y, reduction="sum") / (y >= 0).sum().clamp_min(1)
        return total / (1 + RETRIEVAL)

    def measure(self, model):
        """Return the share of right answers in tests, a dict of the columns; nan where nothing was asked."""
        right = {name: [] for name in self.columns}
        for number in range(TESTS):
            kinds, shown, asked, answers = zip(*self.draw(number, BATCHES, 1))
            for how, state in ("carried", model(torch.cat(shown, 1), None)[1]), ("reset", None):
                said = model(torch.cat(asked, 1), state)[0].split(self.tc.seq_len, 1)
                for kind, logits, y in zip(kinds, said, answers):
                    for name in (how, f"{kind}_{how}"):
                        right[name] += (logits.argmax(-1) == y)[y >= 0].tolist()
        return {name: sum(a) / len(a) if a else torch.nan for name, a in right.items()}


# ---- grokking
def log_stablemax(x, dim=-1):
    """Return log(s(x) / sum s), s(x) = x + 1 for x >= 0, else 1 / (1 - x) (Prieto et al. 2025, arXiv 2501.04697)."""
    # s does not saturate as exp does, so float32 does not round away what is left to learn
    s = torch.where(x >= 0, x.clamp_min(0).log1p(), -(-x.clamp_max(0)).log1p())
    return s - s.logsumexp(dim, keepdim=True)


@torch.no_grad()
def perpendicular(parameters):
    """Take from each gradient its part along the weights, so that steps cannot merely lengthen these (ibid.)."""
    for w in (w for w in parameters if w.grad is not None):
        w.grad -= (w.grad * w).sum() / w.square().sum().clamp_min(1e-30) * w


def circles(E, top=5):
    """Return the concentration and the circular fit of vectors E (p, d), p odd: (1, 1) for numbers on a circle."""
    energy = torch.fft.rfft(E, dim=0).abs().square().sum(1)[1:]                  # of each frequency; 0 is the mean
    energy, p, k = energy / energy.sum().clamp_min(1e-30), len(E), energy.argmax() + 1
    angle = 2 * torch.pi * k * torch.arange(p, device=E.device) / p
    circle = torch.stack([angle.cos(), angle.sin()], 1) * (2 / p) ** 0.5         # (p, 2), orthonormal
    X = (E - E.mean(0)) @ torch.linalg.qr(E.T @ circle).Q                        # (p, 2), on the plane of frequency k
    fit = (circle.T @ X).square().sum() / X.square().sum().clamp_min(1e-30)      # R^2
    return energy.topk(top).values.sum().item(), fit.item()                      # share of the strongest frequencies


class Grok(Watched):
    """Add modulo p: a, b, "=" -> a + b."""
    columns = "fitted held_out concentration random_concentration circular_fit random_fit".split()
    largest_norm = torch.inf

    def prepare(self, tc, old):
        self.p, self.vocab_size, self.data = tc.modulus, tc.modulus + 1, dict(used="sums", sha256="")
        both = sums(tc.modulus, 0.5, tc.seed)
        self.shown, self.held_out = (pairs.to(self.device) for pairs in both)
        self.about = f"{len(self.shown):,} to train, {len(self.held_out):,} held out, modulo {self.p}"

    def begin(self, model):
        """Make the embedding small: what is random there hides the circles until it decays."""
        model.embed.weight *= EMBED_START

    def optimizers(self, model):
        """Return AdamW, under which all weights decay, the embedding too."""
        tc, weights = self.tc, list(model.parameters())
        adamw = torch.optim.AdamW(weights, tc.lr, (0.9, 0.98), weight_decay=tc.weight_decay, fused=True)
        if tc.perp_grad:
            adamw.register_step_pre_hook(lambda *_: perpendicular(weights))
        return [adamw]

    def logits(self, model, pairs):
        """Return the logits (n, p) of the sums of pairs (n, 2)."""
        return model(F.pad(pairs, (0, 1), value=self.p))[0][:, -1, :self.p].float()

    def loss(self, model, step):
        random, n = seeded(1_000_003 * self.tc.seed + step), self.tc.batch_size
        pairs = self.shown[torch.randint(len(self.shown), (n,), generator=random).to(self.device)]
        self.tokens_read += 3 * n
        normal = log_stablemax if self.tc.stablemax else F.log_softmax
        return F.nll_loss(normal(self.logits(model, pairs), -1), pairs.sum(1) % self.p)

    def measure(self, model):
        """Return accuracies, and how circular the embedding and random numbers are."""
        said = lambda pairs: torch.cat([self.logits(model, part).argmax(-1) for part in pairs.split(2048)])
        score = lambda pairs: (said(pairs) == pairs.sum(1) % self.p).float().mean().item()
        E = model.embed.weight[:self.p]
        random = torch.randn(E.shape, generator=seeded(0))
        (share, fit), (share_random, fit_random) = circles(E), circles(random)
        return dict(zip(self.columns, (score(self.shown), score(self.held_out), share, share_random, fit, fit_random)))


def main(argv=None):
    parser = Parser(prog="episodic.py", description=__doc__, epilog="In [] is what episodes have.")
    usual = {**USUAL["episodes"], **sized(USUAL["episodes"]["model"], "tiny")}
    add_flags(parser, "the run", Settings, usual, skip=NO_FLAG)
    add_flags(parser, "the network", Config, usual, skip=(*train.NO_FLAG, "polarise"))
    given = vars(parser.parse_args(argv))
    usual = USUAL["grok" if given.get("grok") else "episodes"]
    given = {"out": usual["out"], "compile": False, "dtype": "float32", **given}
    make_task = lambda tc, *how: (Grok if tc.grok else Episodes)(tc, *how)
    return exit_code(lambda: train.launch(given, settings, make_task))


if __name__ == "__main__":
    sys.exit(main())
