"""episodic.py - teaching a memory to store and retrieve; and grokking, watched from the inside.

    python episodic.py                                episodes of language and arithmetic, on a CPU five minutes
    python episodic.py --grok --plot                  a + b modulo 97, two minutes: circles in the embedding
    python episodic.py --resume --steps 2000          goes on; on a CPU a stopped run ends in the same bits

An episode is a few batches. The storage phase shows each of them whole, the retrieval phase with words masked:

    storage      to be or not to be , that is the question          23 + 45 = 68 . 90 + 11 = 4 .
    retrieval    to be or not to be , that is the [MASK]            23 + 45 = [MASK] . 90 + 11 = [MASK] .

The model names the masked words. They count ten times as much as the next words in the storage phase. The state is
carried through an episode, and each episode starts anew. Tests are of text and sums that training never shows. They
ask twice: with the state of the storage phase, and with a new one. The difference is what the memory carried.
"""
import argparse
import math
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import train
from data import UserError, read, replacing
from models import LM, PRESETS, Config, Memory, flag, opt
from muon import make_optimizers
from train import say

RETRIEVAL = 10                        # weight of the retrieval phase; storage has 1
CONTEXT, COMMON = 3, 50               # words before a masked one, at least; of the commonest, that are never asked for
TOP = 5                               # frequencies that count as concentrated


@dataclass
class Settings(train.TrainConfig):
    """Everything about a run that is not the network: what train.TrainConfig says, and these."""
    task: str = opt("episodes", "episodes, or grok: modular addition", choices=("episodes", "grok"))
    modulus: int = opt(97, "of the sums, odd", low=2 * TOP + 1)
    batches: int = opt(4, "batches an episode; in training 1 to so many, in turn", low=1)
    masks: int = opt(4, "words asked for in a row of a batch", low=1)
    arithmetic: float = opt(0.5, "share of batches that are sums; the others are text")
    eval_windows: int = opt(10, "test episodes of an evaluation", low=1)
    words: int = opt(2000, "vocabulary: the commonest words of the text", low=COMMON + 1)
    share: float = opt(0.9, "share of all sums to train on; the others are held out; of grok 0.5")
    embed_start: float = opt(0.02, "grok: the embedding at the start, in multiples of models.LM's")
    stablemax: bool = opt(False, "stablemax in the place of softmax; of grok on")
    perp_grad: bool = opt(False, "the gradient less its part along the weights; of grok on")


# what differs from the defaults: of the run, and of the network, under the preset
RUNS = {"episodes": dict(out="out-episodes", model="omeganet", seq_len=24, batch_size=8, steps=600, optimizer="muon",
                         lr=3e-3, embed_lr=0.3, muon_lr=2e-2),
        "grok": dict(out="out-grok", model="transformer", seq_len=3, batch_size=512, steps=800, lr=2e-3, beta2=0.98,
                     weight_decay=1.5, grad_clip=0.0, share=0.5, stablemax=True, perp_grad=True)}
NETWORKS = {"episodes": dict(n_layer=1, n_embd=192, n_head=8, head_dim=16, chunk=24, tie=True),
            "grok": dict(n_layer=1, n_embd=128, n_head=4)}
NO_FLAG = "size tokenizer bpe_size init grad_accum telemetry wandb tensorboard dtype compile remat".split()


def settings(given, old=None):
    """Flags that were given, and the checkpoint of --resume, if any -> Settings, models.Config."""
    was, ours = {**old["config"], **old["train"]} if old else {}, {f.name for f in fields(Settings)}
    if old and "modulus" not in was:
        raise UserError(f"{old['path']} is no run of episodic.py; give its --out")
    for name in (name for name in given.keys() - train.FREE if old and given[name] != was[name]):
        raise UserError(f"{flag(name)} is {was[name]} in {old['path']}, not {given[name]}; drop the flag")
    task = was.get("task", given.get("task", "episodes"))
    run = {**RUNS[task], **{k: a for k, a in was.items() if k not in train.LAUNCH}, **given}
    network = old["config"] if old else {**NETWORKS[task], **PRESETS[run["model"]]}
    config = Config(**{**network, **{k: a for k, a in given.items() if k not in ours}})
    tc = Settings(**{k: a for k, a in run.items() if k in ours})
    if not (tc.modulus % 2 and tc.arithmetic <= 1 and 0 < tc.share < 1 and (tc.seq_len > 5 or tc.task == "grok")):
        raise UserError("--modulus is odd, --arithmetic at most 1, --share in (0, 1), --seq-len of episodes at least 6")
    return tc, config


def sums(p, share, seed):
    """All (a, b) in random order -> about this share of them, the others; (n, 2) each. a + b is on the side of b + a:
    otherwise many held-out sums could be looked up, and would look like grokking."""
    random = torch.Generator().manual_seed(seed)
    a, b = pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))[torch.randperm(p * p, generator=random)].T
    luck = torch.rand(p, p, generator=random)[torch.minimum(a, b), torch.maximum(a, b)]
    first = luck <= luck.sort().values[max(0, int(share * p * p) - 1)]
    if not 0 < first.sum() < p * p:
        raise UserError(f"--share {share} leaves no sums modulo {p} on one side; take one nearer to 0.5")
    return pairs.T[first], pairs.T[~first]


# ---- episodes

class Episodes:
    """The task. Ids: first `words`, the commonest of the text, then unknown, [MASK], +, =, . and the numbers."""

    def __init__(self, tc, device):
        corpus, self.tc, self.device = read(tc.data), tc, device
        found = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|[^\w\s]", corpus.text.lower())
        cut = len(found) * 9 // 10                            # the last tenth is for tests
        words = [word for word, _ in Counter(found[:cut]).most_common(tc.words)]
        if len(words) <= COMMON or len(found) - cut < tc.seq_len:
            raise UserError(f"--data {tc.data} has {len(found)} words, {len(words)} of them different: give more text")
        ids = dict(zip(words, range(len(words))))
        ids = torch.tensor([ids.get(word, len(words)) for word in found])
        self.words, self.text, self.pairs = words, (ids[:cut], ids[cut:]), sums(tc.modulus, tc.share, tc.seed)
        self.data, self.vocab_size = dict(used=corpus.used, sha256=corpus.sha256), len(words) + 5 + tc.modulus

    def draw(self, number, n, test):
        """Episode `number`: n times its kind; tokens whole, tokens masked, the masked ones (else -100), each (B, T)."""
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
        """A start that finds what it wrote: queries equal keys, both of the words before; a value is the word itself.
        From a random start, where a query meets its key by chance alone, training takes many times as long."""
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
        """Of 1, 2, .. batches in turn, first storage, then retrieval with the state that it left."""
        episode, state, total = self.draw(step, 1 + step % self.tc.batches, 0), None, 0.0
        _, shown, asked, answers = zip(*episode)
        following = [F.pad(x[:, 1:], (0, 1), value=-100) for x in shown]
        for weight, batches, targets in (1, shown, following), (RETRIEVAL, asked, answers):
            said, y = [], torch.cat(targets).flatten()
            for x in batches:
                logits, state = model(x, state)
                said.append(logits.flatten(0, 1).float())
            total = total + weight * F.cross_entropy(torch.cat(said), y, reduction="sum") / (y >= 0).sum().clamp_min(1)
        return total / (1 + RETRIEVAL)

    def measure(self, model):
        """Right answers in tests -> {"carried": share, "reset": share, "language_carried": .., ..}"""
        found = {kind + how: [0, 0] for kind in ("", "language_", "arithmetic_") for how in ("carried", "reset")}
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
    """log of s(x) / sum s, where s(x) = x + 1 for x >= 0, 1 / (1 - x) below (Prieto et al. 2025, arXiv 2501.04697).

    It does not saturate as exp does, so float32 does not round away what is left to learn.
    """
    s = torch.where(x >= 0, x.clamp_min(0).log1p(), -(-x.clamp_max(0)).log1p())
    return s - s.logsumexp(-1, keepdim=True)


@torch.no_grad()
def perpendicular(parameters):
    """g <- g - (g . w / w . w) w: no step that merely makes weights longer (the same paper's perp-Grad)."""
    for w in (w for w in parameters if w.grad is not None):
        w.grad -= (w.grad * w).sum() / w.square().sum().clamp_min(1e-30) * w


def spectrum(E):
    """E (p, d), p odd -> the share of its energy, less the mean (frequency 0), at each of 1 .. (p - 1) / 2."""
    energy = torch.fft.rfft(E, dim=0).abs().square().sum(1)[1:]
    return energy / energy.sum().clamp_min(1e-30)


def concentration(E, top=TOP):
    """Share of the energy of numbers E (p, d) that their `top` strongest frequencies hold: 1 on circles."""
    return spectrum(E).topk(top).values.sum().item()


def circular_fit(E):
    """E, projected on the plane of its strongest frequency k, against cos, sin of 2 pi k a / p: R^2. A circle has 1."""
    p, k = len(E), spectrum(E).argmax() + 1
    angle = 2 * math.pi * k * torch.arange(p, device=E.device) / p
    circle = torch.stack([angle.cos(), angle.sin()], 1) * (2 / p) ** 0.5         # (p, 2), orthonormal
    X = (E - E.mean(0)) @ torch.linalg.qr(E.T @ circle).Q                        # (p, 2)
    return ((circle.T @ X).square().sum() / X.square().sum().clamp_min(1e-30)).item()


def by_chance(p, d, top=TOP):
    """What concentration and circular_fit are on average for random E (p, d).

    Energies of frequencies are about normal, with a spread of 1 / sqrt(d). A plane holds 2 / d of any other one.
    """
    K = (p - 1) // 2
    z = torch.special.ndtri((torch.arange(K, 0, -1) - 0.375) / (K + 0.25))      # means of ordered normal numbers (Blom)
    s = 1 + z / d ** 0.5
    return (s[:top].sum() / K).item(), (s[0] / (s[0] + (K - s[0]) * 2 / d)).item()


def phase(fitted, held, concentrated, chance):
    """By accuracy on the sums of training, on those held out, concentration, and the latter of a random embedding."""
    if held < 0.1 and (fitted < 0.99 or concentrated < 1.1 * chance):
        return "memorisation"
    return "circuit formation" if held < 0.5 else "cleanup" if held < 0.9 else "grokked"


class Grok:
    """The task: a, b, "=" -> a + b modulo p."""

    def __init__(self, tc, device):
        self.tc, self.p = tc, tc.modulus
        self.shown, self.held = (a.to(device) for a in sums(tc.modulus, tc.share, tc.seed))
        self.data, self.vocab_size = dict(used=f"sums modulo {self.p}"), self.p + 1

    def begin(self, model):
        model.embed.weight *= self.tc.embed_start             # what is random there hides the circles until it decays

    def logits(self, model, pairs):
        return model(F.pad(pairs, (0, 1), value=self.p))[0][:, -1, :self.p].float()

    def loss(self, model, step):
        random, n = torch.Generator().manual_seed(1_000_003 * self.tc.seed + step), self.tc.batch_size
        pairs = self.shown[torch.randint(len(self.shown), (n,), generator=random).to(self.shown.device)]
        normal = log_stablemax if self.tc.stablemax else partial(F.log_softmax, dim=-1)
        return F.nll_loss(normal(self.logits(model, pairs)), pairs.sum(1) % self.p)

    def measure(self, model):
        score = lambda pairs: sum((self.logits(model, part).argmax(-1) == part.sum(1) % self.p).sum().item()
                                  for part in pairs.split(2048)) / len(pairs)
        E, fitted, held = model.embed.weight[:self.p], score(self.shown), score(self.held)
        share, (share_random, fit_random) = concentration(E), by_chance(*E.shape)
        return dict(fitted=fitted, held=held, concentration=share, random_concentration=share_random,
                    circular_fit=circular_fit(E), random_fit=fit_random, phase=phase(fitted, held, share, share_random))


# ---- a run

def loop(model, optimizers, run, tc, task):
    """The steps from run["step"] on -> the number of the signal that stopped it, or None after --steps."""
    out, first, began = Path(tc.out), run["step"], time.perf_counter() - run["seconds"]
    with train.noted_signals() as noted:
        for step in range(first + 1, tc.steps + 1):
            torch.manual_seed(tc.seed + step)                 # of dropout
            (loss := task.loss(model.train(), step - 1)).backward()
            if tc.perp_grad:
                perpendicular(model.parameters())
            loss, norm = train.update(model, optimizers, tc, step - 1, train.lr_scale(step - 1, tc), loss.detach())
            if step == first + 1:                             # only now that a step has worked are older files touched
                train.begin_files(out, run)
            full = step % tc.eval_every == 0 or step == tc.steps
            with torch.no_grad():
                found = task.measure(model.eval()) if full else {}
            run.update(step=step, seconds=time.perf_counter() - began)
            row = dict(step=step, loss=loss, grad_norm=norm, seconds=run["seconds"], **found)
            row = {name: round(a, 4) if isinstance(a, float) else a for name, a in row.items()}
            if full or step % tc.log_every == 0 or step == 1:
                say("  ".join(f"{name} {a}" for name, a in row.items() if a == a))
            if full:                                          # the log is in the checkpoint, and log.csv a copy of it
                run["log"].append(row)
                with replacing(out / "log.csv") as file:
                    file.write_text("".join(",".join(map(str, a)) + "\n" for a in (row, *map(dict.values, run["log"]))))
            if full or noted:
                train.save_checkpoint(out / "ckpt.pt", run, model, optimizers)
            if noted and step < tc.steps:
                say(f"stopped after step {step}; to go on: python episodic.py --resume --out {tc.out!r}")
                return noted[0]


def launch(given):
    """A run, from its flags to its last line -> exit code."""
    plot, resume, out = given.pop("plot", False), given.get("resume"), RUNS[given.get("task", "episodes")]["out"]
    if train.PROCESSES > 1:
        raise UserError("episodic.py is one process; start it without torchrun")
    if plot:
        train.need("matplotlib")
    old = train.load_checkpoint(Path(given.get("out", out), "ckpt.pt"), text=False) if resume else {}
    tc, config = settings(given, old)
    if resume and old["step"] >= tc.steps:
        return say(f"nothing to do: {tc.out} has {old['step']} of {tc.steps} steps; --steps N trains it longer")
    device = train.setup(tc.device, tc.threads)
    task = (Grok if tc.task == "grok" else Episodes)(tc, device)
    if resume and task.data != old["data"]:
        raise UserError(f"{tc.out} was trained on {old['data']['used']}, another text than --data {tc.data}; give that")
    torch.manual_seed(tc.seed)
    with torch.no_grad():
        task.begin(model := LM(replace(config, vocab_size=task.vocab_size)))
    model.to(device)
    decay = dict(lr=tc.lr, betas=(0.9, tc.beta2), weight_decay=tc.weight_decay, fused=True)
    # of grok all weights decay, the embedding too
    optimizers = [torch.optim.AdamW(model.parameters(), **decay)] if tc.task == "grok" else make_optimizers(model, tc)
    run = dict(preset=tc.model, config=asdict(model.config), train=asdict(tc), data=task.data)
    run |= {name: old.get(name, start) for name, start in (("step", 0), ("seconds", 0.0), ("log", []))}
    if resume:
        model.load_state_dict(old["model"])
        for optimizer, state in zip(optimizers, old["optimizers"]):
            optimizer.load_state_dict(state)
    say(f"{tc.task}: {task.data['used']}; {tc.model}, {model.num_params():,} parameters, on {device}, in {tc.out}")
    if stopped := loop(model, optimizers, run, tc, task):
        return 128 + stopped
    say("done: " + ", ".join(f"{name} {a}" for name, a in list(run["log"][-1].items())[3:] if a == a))
    if plot:
        steps, shares = [row["step"] for row in run["log"]], list(run["log"][0])[4:]
        lines = {name: (steps, [row[name] for row in run["log"]]) for name in shares if name != "phase"}
        train.picture(Path(tc.out, "curves.png"), lines, "step", "share")


def parse(argv=None):
    """-> dict of the flags that were given."""
    parser = train.Parser(prog="episodic.py", description=__doc__, epilog="In [] is what --task episodes has.")
    usual = {**NETWORKS["episodes"], **PRESETS[RUNS["episodes"]["model"]], **RUNS["episodes"]}
    train.add_flags(parser.add_argument_group("the run"), Settings, usual, skip=NO_FLAG)
    train.add_flags(parser.add_argument_group("the network"), Config, usual, skip=train.NO_FLAG)
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--grok", dest="task", action="store_const", const="grok", help="--task grok")
    add("--plot", action="store_true", help="draw OUT/curves.png at the end")
    return vars(parser.parse_args(argv))


def main(argv=None):
    return train.exit_code(lambda: launch(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
