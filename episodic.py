"""episodic.py - teach a memory to store and retrieve; or watch a model grok modular addition.

    python episodic.py                    episodes of text and sums mod 97, five minutes on a CPU
    python episodic.py --grok --plot      a + b modulo 97, two minutes: circles in the embedding

An episode reads the same few batches twice. The storage phase shows them whole, and the retrieval
phase shows them with some words masked:

    storage      to be or not to be , that is the question     23 + 45 = 68 . 90 + 11 = 4 .
    retrieval    to be or not to be , that is the [MASK]       23 + 45 = [MASK] . 90 + 11 = [MASK] .

The model has to name the masked words. The state is carried on through an episode, and each episode
starts with a new one. Tests are episodes of unseen text and sums, and ask twice: with the state of
the storage phase ("carried"), and with a new one ("reset"). The difference is what the memory kept.
"""
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial

from common import (Parser, UserError, add_flags, check_picture, chosen, exit_code, flag, plot,
                    say, seeded, seeded_batch)

import torch
import torch.nn.functional as F

import train
from data import BORDER, split
from layer import opt
from models import Config, Memory, sized

RETRIEVAL = 10                        # weight of the retrieval phase's loss; storage has 1
BATCHES = 4                           # in a test episode; those of training have 1 to 4 in turn
TESTS = 10                            # test episodes in an evaluation
MASKS = 4                             # words masked in each sequence
SUMS = 0.5                            # share of batches that are sums; the others are text
WORDS = 2000                          # size of the vocabulary, the most frequent words of the text
CONTEXT = 3                           # least number of words before a masked one
COMMON = 50                           # the most frequent words, which are never masked
EMBED_START = 0.02                    # of Grok: factor that makes the embedding small at the start


@dataclass
class Settings(train.TrainConfig):
    """Hold everything about a run except the network: train.TrainConfig's fields, and these."""
    grok: bool = opt(False, "modular addition instead of episodes")
    modulus: int = opt(97, "modulus of the sums, odd", low=11)
    stablemax: bool = opt(True, "grok only: stablemax instead of softmax")
    perp_grad: bool = opt(True, "grok only: remove the gradient's part along the weights")
    plot: bool = opt(False, "draw OUT/curves.png at the end")


# Differences from the defaults of the run and of the network. A preset of --model overrides them.
EPISODES = dict(out="out-episodes", model="omeganet", seq_len=24, batch_size=8, steps=600,
                optimizer="muon", lr=3e-3, embed_lr=0.3, n_layer=1, n_embd=192, n_head=8,
                head_dim=16, chunk=24, tie=True)
GROK = dict(out="out-grok", model="transformer", seq_len=3, batch_size=512, steps=800, lr=2e-3,
            weight_decay=1.5, n_layer=1, n_embd=128, n_head=4)
NO_FLAG = "size tokenizer init grad_accum dtype compile graph remat documents".split()
ONLY_EPISODES = "data seq_len optimizer embed_lr gates_lr outer_muon_lr".split()
ONLY_GROK = ["stablemax", "perp_grad"]


def settings(given, old=None):
    """Return Settings and models.Config. given: the flags that were given, {name: value}; old: the
    checkpoint of --resume, or None. Raises UserError if they do not fit each other."""
    if old:
        values = old["train"] | old["config"]
        if "grok" not in values:
            raise UserError(f"{old['path']} is no run of episodic.py; give its --out")
    else:
        values = GROK if given.get("grok") else EPISODES
        values = values | sized(given.get("model", values["model"]), "tiny")

    values = values | given
    tc = Settings(**chosen(values, Settings))
    config = Config(**chosen(values, Config))

    useless = ONLY_EPISODES if tc.grok else ONLY_GROK
    for name in given.keys() & useless:
        raise UserError(f"{flag(name)} has no effect with{'' if tc.grok else 'out'} --grok; "
                        "drop it")
    if tc.modulus % 2 == 0 or tc.seq_len <= 5 and not tc.grok:
        raise UserError("--modulus is odd, and --seq-len of episodes above 5")
    if tc.plot:
        check_picture(f"{tc.out}/curves.png")
    return tc, config


def sums(p, share, seed):
    """Split all pairs (a, b) of numbers below p at random. Return two tensors (n, 2): about this
    share of the pairs, and the others, both in random order."""
    random = seeded(seed)
    numbers = torch.arange(p)
    pairs = torch.cartesian_prod(numbers, numbers)[torch.randperm(p * p, generator=random)]

    # (a, b) and (b, a) draw the same luck, so they are on the same side. Else a model could look up
    # a held-out sum, and this would pass for grokking
    luck = torch.rand(p, p, generator=random)
    luck = luck[pairs.amin(1), pairs.amax(1)]
    last = max(0, int(share * p * p) - 1)
    first = luck <= luck.sort().values[last]
    return pairs[first], pairs[~first]


class Watched(train.Task):
    """Print what was measured when the run is finished, and draw it with --plot."""

    def finish(self, model, run):
        found = [f"{name} {a:.4}" for name, a in run["end"].items()]
        say(f"done on {self.data['used']}: {', '.join(found)}")
        if self.tc.plot:
            plot([self.tc.out], run["end"].keys(), "share")


class Episodes(Watched):
    """Train a model to store and retrieve. The ids from 0 on are the V most frequent words; then
    come V: any other word, V + 1: [MASK], V + 2 to V + 4: + = . and from V + 5 on the numbers.
    self.words is V."""

    def prepare(self, tc, old):
        corpus = train.read_text(tc.data, old)
        words = r"[^\W\d_]+(?:'[^\W\d_]+)*|[^\w\s]"           # a word, or a punctuation mark
        text = re.findall(words, corpus.text.replace(BORDER, " ").lower())
        cut = len(text) * 9 // 10                             # the last tenth is for tests
        common = Counter(text[:cut]).most_common(WORDS)
        ids = {word: i for i, (word, _) in enumerate(common)}
        V = len(ids)
        if V <= COMMON or len(text) - cut < tc.seq_len:
            raise UserError(f"--data {tc.data} has {len(text)} words, {V} of them different: "
                            "give more text")

        self.words = V
        self.vocab_size = V + 5 + tc.modulus
        self.text = split(torch.tensor([ids.get(word, V) for word in text]))
        self.pairs = sums(tc.modulus, 0.9, tc.seed)
        self.data = dict(used=corpus.used, sha256=corpus.sha256)
        self.about = (f"{V:,} words, {len(self.pairs[0]):,} sums to train, "
                      f"{len(self.pairs[1]):,} held out")

    def draw_text(self, random, test):
        """Return tokens (B, T) of the text for training (test=0) or tests (1), and a mask (B, T) of
        those that may be masked."""
        text, T = self.text[test], self.tc.seq_len
        first = torch.randint(len(text) - T + 1, (self.tc.batch_size, 1), generator=random)
        place = torch.arange(T)
        shown = text[first + place]
        may = (COMMON <= shown) & (shown < self.words) & (place >= CONTEXT)
        return shown, may

    def draw_sums(self, random, test):
        """Return tokens (B, T) of sums `a + b = c .` one after the other, for training (test=0) or
        tests (1), and a mask (T,) of the places of c."""
        T, V, pairs = self.tc.seq_len, self.words, self.pairs[test]
        size = self.tc.batch_size, -(-T // 6)                 # sums in a row; the last may be cut
        at = torch.randint(len(pairs), size, generator=random)
        pairs = pairs[at]
        c = pairs.sum(-1, keepdim=True) % self.tc.modulus
        shown = torch.tensor([0, V + 2, 0, V + 3, 0, V + 4]).repeat(*size, 1)    # + = .
        shown[..., ::2] = torch.cat([pairs, c], -1) + V + 5
        may = torch.arange(T) % 6 == 4
        return shown.flatten(1)[:, :T], may

    def draw(self, number, n, test):
        """Yield the n batches of episode `number`, each as kind, shown, asked, answers. kind is
        "language" or "arithmetic". The others are (B, T): shown has all tokens, asked has [MASK] in
        place of some, and answers has the masked tokens, and -100 elsewhere."""
        random = seeded_batch(self.tc.seed, number, test)
        for _ in range(n):
            kind = "language"
            shown, may = self.draw_text(random, test)         # also drawn if sums replace it
            if torch.rand((), generator=random) < SUMS:
                kind = "arithmetic"
                shown, may = self.draw_sums(random, test)

            # of the tokens that may be masked, the MASKS with the highest lots are
            lots = torch.rand(shown.shape, generator=random) * may
            least = lots.topk(MASKS).values[:, -1:]
            masked = may & (lots >= least)
            asked = shown.masked_fill(masked, self.words + 1)
            answers = shown.where(masked, -100)
            batch = [a.to(self.device) for a in (shown, asked, answers)]
            yield kind, *batch

    def begin(self, model):
        """Let the memory find what it wrote from the first step on. Queries are made as keys are,
        both from the three words before, and a value is mostly the word itself. So [MASK] asks for
        the word that was written after the same three words."""
        # from a random start a query meets its key only by chance, and training takes much longer
        if model.config.tie:                                  # long enough to tell words apart
            model.embed.weight *= 4

        for m in model.modules():
            if isinstance(m, Memory):
                q, k, v = torch.arange(len(m.qkv.weight)).chunk(3)
                m.qkv.weight[q] = m.qkv.weight[k]
                if m.conv is not None:                        # conv[-1] weighs the word itself
                    m.conv[:, q] = m.conv[:, k]
                    m.conv[-1, q] = 0
                    m.conv[-1, k] = 0
                    m.conv[:, v] *= 0.2
                    m.conv[-1, v] = 1

    def phase(self, model, state, batches, targets):
        """Read batches (B, T) one after the other from this state on. Return the mean loss over all
        targets (-100: none), and the state after the last batch."""
        said = []
        for x in batches:
            logits, state = model(x, state)
            said.append(logits.flatten(0, 1).float())
            self.tokens_read += x.numel()
        y = torch.cat(targets).flatten()
        loss = F.cross_entropy(torch.cat(said), y, reduction="sum")
        return loss / (y >= 0).sum().clamp_min(1), state

    def loss(self, model, step):
        """Return the loss of episode `step`: first storage, where each next word is a target, then
        retrieval, which begins with the state that storage left. Episodes have 1 to BATCHES batches
        in turn."""
        n = 1 + step % BATCHES
        _, shown, asked, answers = zip(*self.draw(step, n, 0))
        following = [F.pad(x[:, 1:], (0, 1), value=-100) for x in shown]
        storage, state = self.phase(model, None, shown, following)
        retrieval, _ = self.phase(model, state, asked, answers)
        return (storage + RETRIEVAL * retrieval) / (1 + RETRIEVAL)

    def measure(self, model):
        """Return the shares of right answers in the tests, carried and reset, for each kind and for
        both kinds."""
        right = defaultdict(list)
        for number in range(TESTS):
            kinds, shown, asked, answers = zip(*self.draw(number, BATCHES, 1))
            _, stored = model(torch.cat(shown, 1), None)
            for how, state in ("carried", stored), ("reset", None):
                logits, _ = model(torch.cat(asked, 1), state)
                said = logits.argmax(-1).split(self.tc.seq_len, 1)
                for kind, words, y in zip(kinds, said, answers):      # batch by batch
                    hits = (words == y)[y >= 0].tolist()
                    right[how] += hits
                    right[f"{kind}_{how}"] += hits
        return {name: sum(a) / max(1, len(a)) for name, a in right.items()}


# ---- grokking
def log_stablemax(x, dim=-1):
    """Return log(s(x) / sum s), s(x) = x + 1 for x >= 0, else 1 / (1 - x) (Prieto et al. 2025,
    arXiv 2501.04697)."""
    # s does not saturate as exp does, so float32 does not round away what is left to learn
    s = x.sign() * x.abs().log1p()                            # log s(x)
    return s - s.logsumexp(dim, keepdim=True)


@torch.no_grad()
def perpendicular(parameters):
    """Remove from each gradient its part along the weights, so that steps cannot merely lengthen
    the weights (Prieto et al. 2025)."""
    for w in parameters:
        if w.grad is not None:
            along = (w.grad * w).sum() / w.square().sum().clamp_min(1e-30)
            w.grad -= along * w


def circles(E, top=5):
    """Return two shares, (1, 1) if the vectors E (p, d) of the numbers 0 .. p - 1, p odd, lie on a
    circle. The first is the share of E's energy in its `top` strongest frequencies. The second
    takes the plane in which the strongest frequency turns: of E's projection to this plane, it is
    the share that is a circle (R^2)."""
    waves = torch.fft.rfft(E, dim=0)
    energy = waves.abs().square().sum(1)
    energy = energy[1:]                                       # frequency 0, the mean, is left out
    energy = energy / energy.sum().clamp_min(1e-30)
    share = energy.topk(top).values.sum()

    # X: E in the plane in which frequency k, the strongest, turns
    p = len(E)
    k = energy.argmax() + 1
    angle = 2 * torch.pi * k * torch.arange(p, device=E.device) / p
    circle = torch.stack([angle.cos(), angle.sin()], 1)       # (p, 2)
    circle = circle * (2 / p) ** 0.5                          # orthonormal
    plane = torch.linalg.qr(E.T @ circle).Q                   # (d, 2), of frequency k
    X = (E - E.mean(0)) @ plane                               # (p, 2)
    explained = (circle.T @ X).square().sum()
    fit = explained / X.square().sum().clamp_min(1e-30)       # R^2
    return share.item(), fit.item()


class Grok(Watched):
    """Train a model to add modulo p. It reads a, b, "=" and answers a + b. It trains on half of all
    sums, and the others are held out."""
    largest_norm = torch.inf                                  # gradients are not clipped

    def prepare(self, tc, old):
        self.p = tc.modulus
        self.vocab_size = self.p + 1
        self.data = dict(used="sums", sha256="")
        shown, held_out = sums(self.p, 0.5, tc.seed)
        self.shown, self.held_out = shown.to(self.device), held_out.to(self.device)
        self.about = f"{len(shown):,} to train, {len(held_out):,} held out, modulo {self.p}"

    def begin(self, model):
        """Make the embedding small. Its random part hides the circles until it has decayed."""
        model.embed.weight *= EMBED_START

    def optimizers(self, model):
        """Return [AdamW], under which all parameters decay, also the embedding."""
        tc, weights = self.tc, list(model.parameters())
        adamw = torch.optim.AdamW(weights, tc.lr, (0.9, 0.98), weight_decay=tc.weight_decay,
                                  fused=True)
        if tc.perp_grad:
            adamw.register_step_pre_hook(lambda *_: perpendicular(weights))
        return [adamw]

    def logits(self, model, pairs):
        """Return the logits (n, p) of the model for the sums of pairs (n, 2)."""
        tokens = F.pad(pairs, (0, 1), value=self.p)           # a, b, "="
        logits, _ = model(tokens)
        return logits[:, -1, :self.p].float()

    def loss(self, model, step):
        """Return the mean loss of a batch of sums, by log_stablemax or by log_softmax."""
        random = seeded(1_000_003 * self.tc.seed + step)
        at = torch.randint(len(self.shown), (self.tc.batch_size,), generator=random)
        pairs = self.shown[at.to(self.device)]
        self.tokens_read += 3 * len(pairs)
        log_softmax = log_stablemax if self.tc.stablemax else F.log_softmax
        said = log_softmax(self.logits(model, pairs), -1)
        return F.nll_loss(said, pairs.sum(1) % self.p)

    def accuracy(self, model, pairs):
        """Return the share of right answers to pairs (n, 2)."""
        said = self.logits(model, pairs).argmax(-1)
        right = said == pairs.sum(1) % self.p
        return right.float().mean().item()

    def measure(self, model):
        """Return the accuracies on sums that were trained and held out, and what `circles` finds in
        the embedding and, to compare, in random numbers."""
        E = model.embed.weight[:self.p]
        random = torch.randn(E.shape, generator=seeded(0))
        share, fit = circles(E)
        random_share, random_fit = circles(random)
        return dict(fitted=self.accuracy(model, self.shown),
                    held_out=self.accuracy(model, self.held_out),
                    concentration=share, random_concentration=random_share,
                    circular_fit=fit, random_fit=random_fit)


def make_task(tc, *how):
    """Return the Task that the settings ask for; `launch` calls this."""
    cls = Grok if tc.grok else Episodes
    return cls(tc, *how)


def main(argv=None):
    parser = Parser(prog="episodic.py", description=__doc__,
                    epilog="[] shows the values of episodes.")
    presets = EPISODES | sized(EPISODES["model"], "tiny")
    add_flags(parser, "the run", Settings, presets, skip=NO_FLAG)
    add_flags(parser, "the network", Config, presets, skip=(*train.NO_FLAG, "polarise"))
    given = vars(parser.parse_args(argv))
    out = GROK["out"] if given.get("grok") else EPISODES["out"]
    given = dict(out=out, compile=False, dtype="float32") | given
    return exit_code(partial(train.launch, given, settings, make_task))


if __name__ == "__main__":
    sys.exit(main())
