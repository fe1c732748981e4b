"""test_all.py - all tests: no network, no GPU, no files but what is here.

    pytest test_all.py                    one to two minutes; GPU tests skip themselves
    python test_all.py --mutants          breaks the mathematics in 45 ways; a test must notice each

In the order of the modules. A docstring says which mistake a test catches.
"""
import builtins
import csv
import hashlib
import importlib
import inspect
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import types
import urllib.request
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from torch.distributed import fsdp
from torch.utils._pytree import tree_leaves

import bench
import chunks
import common
import data
import dot
import episodic
import eval
import layer
import memory
import models
import muon
import omega
import poly
import recall
import sample
import shards
import train
import wiring
from eval import state_bytes
from layer import detach, rule as rule_of, select, settings
from memory import LOSSES, MEMORIES
from muon import COEFFICIENTS, newton_schulz, newton_schulz_ref
from omega import Gates, omega_ref, paper, Rule, start
from poly import Features, features_dim

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")             # a run of train.py before this test chose another


rand, randn = (partial(f, dtype=torch.float64) for f in (torch.rand, torch.randn))


def unit(*shape):
    return F.normalize(randn(*shape), dim=-1)


def tensors(tree):
    return [a for a in tree_leaves(tree) if isinstance(a, torch.Tensor)]


def close(a, b, tol=1e-10):
    """Tensors, or trees of them, equal in shape and value, relative to the largest number. A NaN is a failure."""
    for x, y in zip(tensors(a), tensors(b), strict=True):
        assert x.shape == y.shape, f"shapes {tuple(x.shape)} and {tuple(y.shape)}"
        error, size = ((z.detach().abs().max().item() if z.numel() else 0.0) for z in (x - y, y))
        assert error <= tol * max(1.0, size), f"differ by {error:.1e}"


# ---- muon.py

def conditioned(cond, *shape):
    """A random matrix with singular values from 1 down to 1 / cond, and its polar factor U V^T from the SVD."""
    U, _, Vh = torch.linalg.svd(randn(*shape), full_matrices=False)
    return (U * torch.logspace(0, -math.log10(cond), min(shape[-2:]), dtype=torch.float64)) @ Vh, U @ Vh


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 48), (2, 48, 8)], ids=str)
def test_ns_against_svd(shape):
    """Catches a mistyped coefficient, tall matrices on their long side, a pass-through of some shapes."""
    S, polar = conditioned(100, *shape)
    for N in (newton_schulz(S), newton_schulz_ref(S), newton_schulz_ref(S[0])):
        s = torch.linalg.svdvals(N)
        assert 0.68 < s.min() and s.max() < 1.21
    N, U = (N, polar[0]) if shape[-2] >= shape[-1] else (N.mT, polar[0].mT)
    close(U.mT @ N, N.mT @ U)                                 # N = U f(s) V^T: U^T N is symmetric, and loses nothing
    close(U @ U.mT @ N, N)
    close(newton_schulz(S, 30, "cubic"), polar)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_ns_is_the_plain_iteration(name):
    """Catches a step of R or G left out, an input that is overwritten."""
    S = [randn(*s).requires_grad_() for s in ((2, 8, 20), (1, 3, 5), (3, 20, 8), (2, 8, 8))]
    before, up, (a, b, c) = [s.detach().clone() for s in S], [randn(*s.shape) for s in S], COEFFICIENTS[name]
    X = [s / s.norm(dim=(1, 2), keepdim=True) for s in S]
    for steps in range(1, 8):
        X = [a * x + b * x @ x.mT @ x + c * x @ x.mT @ x @ x.mT @ x for x in X]
        for Y in ([ns(s, steps, name) for s in S] for ns in (newton_schulz, newton_schulz_ref)):
            close(Y, X)
            if steps in (2, 7):
                close(torch.autograd.grad(Y, S, up), torch.autograd.grad(X, S, up, retain_graph=True), 1e-9)
    assert all(map(torch.equal, S, before))


def test_ns_of_any_size_of_matrix():
    """Catches 0 / 0 of the first momentum, in the gradient too; an epsilon; half a sum of squares."""
    for ns in newton_schulz_ref, newton_schulz:
        S, zero = randn(2, 8, 12), torch.zeros(2, 8, 12, requires_grad=True)
        close([ns(1e-8 * S), ns(1e8 * S)], [ns(S), ns(S)])
        ns(zero).sum().backward()
        assert not ns(zero).any() and not zero.grad.any()
        for e in range(15, 24):
            N = ns((10.0 ** -e * S).float())
            close(N.double(), ns(S) * N.any(), 1e-4)


@pytest.mark.parametrize("shape", [(2, 8, 48), (2, 48, 8)], ids=str)
def test_ns_in_float32(shape):
    """Catches: all steps on one Gram matrix, which squares the condition: gradients lose digits, low ranks blow up."""
    S, up = conditioned(1e6, *shape)[0], randn(*shape)
    exact, rounded = (torch.autograd.grad((newton_schulz(s) * up).sum(), s)[0]
                      for s in (S.requires_grad_(), S.detach().float().requires_grad_()))
    assert (rounded - exact).norm() < 1e-4 * exact.norm()
    low = randn(2, shape[1], 3) @ randn(2, 3, shape[2]) + 1e-6 * randn(*shape)
    for steps, name in ((10, "muon"), (30, "cubic")):
        assert torch.linalg.svdvals(newton_schulz(low.float(), steps, name)).max() < 1.3


def test_outer_muon():
    """Two steps by hand; torch's own in bfloat16. Catches: momentum or Nesterov's part lost, a lost factor or decay."""
    first, *grads = ([torch.randn(12, 6), torch.randn(6, 12)] for _ in range(3))
    for native, tol in (False, 1e-5), (True, 2e-3):
        params = [torch.nn.Parameter(p.clone()) for p in (*first, torch.ones(3, 3))]
        optimizer = train.Muon(params, lr=0.02, weight_decay=0.1)
        optimizer.bfloat16 = native
        for params[0].grad, params[1].grad in grads:
            optimizer.step()
        assert torch.equal(params[2], torch.ones(3, 3))       # it has no gradient
        for i, p in enumerate(first):
            B = 0
            for g in (step[i] for step in grads):
                B = 0.95 * B + 0.05 * g
                O = newton_schulz_ref(0.05 * g + 0.95 * B)
                p = (1 - 0.002) * p - 0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * O
            close(params[i] - first[i], p - first[i], tol)    # of 0.07
    how = dict(lr=0.02, nesterov=False, momentum=0.8, ns_steps=3, adjust_lr_fn="match_rms_adamw",
               ns_coefficients=(2, -1.5, 0.5))                # torch's options
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in first] for _ in range(2))
    for params, optimizer in (ours, train.Muon(ours, **how)), (theirs, torch.optim.Muon(theirs, **how)):
        for params[0].grad, params[1].grad in grads:
            assert optimizer.step(lambda: 7) == 7
    close([a - p for a, p in zip(ours, first)], [a - p for a, p in zip(theirs, first)], 2e-3)


@pytest.mark.parametrize("more", [{}, dict(tie=True, wiring="mac")], ids=str)
def test_who_trains_what(more):
    """Catches: a gate, M0 or the head in Muon or decayed; a parameter in two groups, or in none; tied ones in both."""
    tc = train.TrainConfig(optimizer="muon", lr=1e-3, outer_muon_lr=0.02, embed_lr=3.0, gates_lr=0.5, weight_decay=0.1)
    model = small("atlas", **more)
    name = {p: n for n, p in model.named_parameters()}
    names = lambda group: {name[p] for p in group["params"]}
    adamw, outer = train.make_optimizers(model, tc)
    (embed, rest, gates), (hidden,) = adamw.param_groups, outer.param_groups
    linear = r"^blocks.*\b(qkv|out_gate|out|mlp\.gate|mlp\.up)\.weight$"
    assert names(hidden) == {n for n in name.values() if re.search(linear, n)}
    assert names(embed) == {"embed.weight"} and names(gates) == {n for n in name.values() if ".gates." in n}
    assert sum(len(g["params"]) for g in (embed, rest, gates, hidden)) == len(name)
    assert [g["weight_decay"] for g in (embed, rest, gates, hidden)] == [0, 0, 0, 0.1]
    assert (hidden["lr"], rest["lr"], embed["times"], gates["times"]) == (0.02, 1e-3, 3, 0.5)
    alone, = train.make_optimizers(model, replace(tc, optimizer="adamw"))
    assert [names(g) for g in alone.param_groups] == [names(embed), names(rest), names(gates), names(hidden)]


# ---- poly.py

def make_phi(kind, dim, degree=2):
    """Features with random scales: 1 / sqrt(i!) hides a mistake in those of degree 0 and 1."""
    phi = Features(kind, dim, degree, sketch_dim=5).double()
    for p in phi.parameters():
        p.data = 0.5 + rand(*p.shape)
    return phi


@pytest.mark.parametrize("dim, degree", [(3, 2), (3, 4), (1, 3)])
def test_phi_kernel(dim, degree):
    """phi(x) . phi(y) = sum_i s_i^2 (x . y)^i, of C(D + p, p) features. Catches: multinomial weights without root."""
    phi, x, y = make_phi("monomial", dim, degree), randn(2, 5, dim), randn(2, 7, dim)
    kernel = sum(s ** 2 * (x @ y.mT) ** i for i, s in enumerate(phi.scale))
    close([phi(x) @ phi(y).mT, phi.inner(x, y)], [kernel, kernel])
    assert phi(x).shape[-1] == phi.out_dim == features_dim("monomial", dim, degree) == math.comb(dim + degree, degree)


def test_phi_one_by_one():
    """Catches: a shortcut that is not phi phi^T, 1 / i! where its root belongs."""
    x, y = unit(2, 5, 4), unit(2, 6, 4)
    for kind in ("none", "elementwise", "monomial", "sketch"):
        phi = make_phi(kind, 4)
        close(phi.inner(x, y, phi(x), phi(y)), phi(x) @ phi(y).mT)
    powers = make_phi("elementwise", 4, 3)
    close(powers(x), sum(s * x ** i for i, s in enumerate(powers.scale)))
    close([Features("none", 4)(x), dot.Kernel().inner(x, y)], [x, (x @ y.mT).exp()])
    close(Features("monomial", 4, 7).double().inner(x, y), (x @ y.mT).exp(), 1e-4)


def test_sketch_is_right_on_average():
    """Catches: a wrong scale of the random matrices; others in each model; ones that stay out of state_dict."""
    x, m, n = unit(2, 6), 4, 600
    parts = [Features("sketch", 6, sketch_dim=m, seed=seed)(x.float())[:, 7:].double() for seed in range(n)]
    estimate, d = torch.stack([2 * a @ b for a, b in parts]), x[0] @ x[1]        # s_2^2 = 1 / 2
    std = ((1 + 4 * d ** 2 + 3 * d ** 4) / m).sqrt()
    assert (estimate.mean() - d ** 2).abs() < 4 * std / n ** 0.5 and 0.8 < estimate.std() / std < 1.2
    a, b, c = (Features("sketch", 6, sketch_dim=m, seed=seed).state_dict()["sketch"] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


# ---- memory.py

def weights(kind, e, d, hidden, *lead):
    return [0.5 * randn(*lead, *shape) for shape in memory.shapes(kind, e, hidden, d)]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_as_printed(kind, norm):
    """Catches a lost residual, a swapped gate, a misplaced bracket (two forms of fla's agreed in it)."""
    x, r, v, W = randn(2, 7, 5), randn(2, 7, 3), 2 * randn(2, 7, 3), weights(kind, 5, 3, 4, 2)
    gelu = lambda z: z * 0.5 * (1 + torch.erf(z / 2 ** 0.5))
    normed = lambda f: f / (f.square().mean(-1, keepdim=True) + memory.EPS).sqrt() if norm else f
    M = {"linear": lambda A: x @ A,
         "mlp": lambda A, B: r + normed(gelu(x @ A) @ B),
         "gated": lambda A, B, C: r + normed((gelu(x @ A) * (x @ B)) @ C)}[kind]
    close(memory.apply(kind, W, x, r, norm), M(*W))
    W = [w.requires_grad_() for w in W]
    for loss in LOSSES:
        want = torch.autograd.grad(memory.loss(loss, M(*W), v).sum(), W)
        pairs = memory.gradients(kind, loss, W, x, memory.target(kind, loss, r, v), norm)
        close([a.mT @ d for a, d in pairs], list(want))


def test_losses_by_hand():
    """Catches: a mean for a sum (a step D times smaller), the sign that writes - v k^T, a new name that runs as lp."""
    y, v = torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, -1.5]])
    want = {"l2": 0.5 * (2 ** 2 + 0.5 ** 2), "dot": -(3 + 1.5), "huber": 1.5 + 0.125, "lp": (8 + 0.125) / 3}
    assert {kind: memory.loss(kind, y, v).item() for kind in LOSSES} == pytest.approx(want)
    for f, *args in ((memory.loss, y, v), (memory.error, y, v), (memory.apply, [], y, y)):
        with pytest.raises(ValueError, match="'new'"):
            f("new", *args)


# ---- omega.py and chunks.py: the chunk form is the token-by-token rule

def problem(T=11, features="none", degree=2, momentum=True, S0=True, D=3, B=2, H=2, reset=(), **rule):
    """A random problem: the rule, phi, and every input by name, all of them leaves."""
    rule, phi = Rule(**dict(window=3, chunk=4) | rule), make_phi(features, D, degree)
    x = dict(q=unit(B, H, T, D), k=unit(B, H, T, D), v=randn(B, H, T, D), keep=0.5 + rand(B, H, T) / 2,
             step=0.3 * rand(B, H, T), momentum=0.9 * rand(B, H, T) if momentum else None,
             gate=rand(B, H, T, rule.window))
    x |= {f"M0.{i}": w for i, w in enumerate(weights(rule.memory, phi.out_dim, D, 3, H))}
    if S0 and momentum:
        x |= {f"S0.{i}": 0.3 * w for i, w in enumerate(weights(rule.memory, phi.out_dim, D, 3, B, H))}
    x = {name: a if a is None else a.requires_grad_() for name, a in x.items()}
    if reset:                                                 # the tokens at which row 0 begins anew
        x["reset"] = torch.zeros(B, H, T, dtype=torch.bool)
        x["reset"][0, :, list(reset)] = True
    return rule, phi, x


def filled(x, **numbers):
    """The same inputs, with gates that are one number for all tokens."""
    return x | {name: torch.full_like(x[name], number) for name, number in numbers.items()}


def play(fn, rule, phi, x, cuts=(), state=None):
    """Run `fn` over all tokens, or the functions of a list in turn over pieces that begin at `cuts`: y, final state."""
    M0, S0 = (tuple(a for name, a in x.items() if name.startswith(which)) for which in ("M0", "S0"))
    T, ys = x["q"].shape[2], []
    state = state or start(rule, phi, M0, len(x["q"]), momentum=x["momentum"] is not None)
    state = state._replace(S=S0) if S0 else state
    for i, (a, b) in enumerate(zip((0, *cuts), (*cuts, T))):
        parts = map(x.get, ("q", "k", "v", *Gates._fields))
        q, k, v, *gates = (part if part is None else part[:, :, a:b] for part in parts)
        y, state = (fn[i] if isinstance(fn, list) else fn)(rule, phi, q, k, v, Gates(*gates), state)
        ys.append(y)
    return torch.cat(ys, 2), state


def with_gradients(leaves, fn, rule, phi, *how):
    """What `play` gives, the memory after it, and the gradients of the leaves for a random gradient of all of it."""
    y, state = play(fn, rule, phi, *how)
    now = chunks.weights(rule, phi, state) if isinstance(state, omega.State) else ()
    torch.manual_seed(1)
    outer = sum((a * randn(*a.shape)).sum() for a in tensors([y, state, now]))
    return [y, state, now, list(torch.autograd.grad(outer, leaves, allow_unused=True, materialize_grads=True))]


TOKEN = dict(error="token")
EQUAL = {                                                     # differences from `problem`
    "titans":                  dict(window=1, chunk=8, T=14),
    "omeganet":                dict(window=5, chunk=8, momentum=False, features="monomial", T=21),
    "window beyond the chunk": dict(loss="dot", window=12, T=15),
    "T = 1":                   dict(memory="gated", chunk=8, T=1),
    "lp":                      dict(memory="gated", loss="lp"),
    "norm":                    dict(norm=True, loss="huber"),
    "to M0, gated, norm":      dict(memory="gated", forget="start", norm=True, momentum=False),
    "ball":                    dict(ball=0.5, features="monomial"),
    "atlas":                   dict(muon_every=1, window=5, chunk=8, features="monomial"),
    "blocks of 2":             dict(muon_every=2, memory="gated", chunk=8, norm=True, forget="start"),
    "ragged blocks":           dict(muon_every=3, memory="linear", window=1, chunk=8, features="monomial", T=21),
    "blocks, no momentum":     dict(muon_every=2, momentum=False),
    "blocks, ball":            dict(muon_every=3, ball=0.5, forget="start"),
    "block = chunk":           dict(muon_every=8, chunk=8, window=5, T=21, ns_steps=6, ns_coefficients="cubic"),
    "reset":                   dict(reset=[8, 16], forget="start", chunk=8, muon_every=3, memory="linear", T=21),
    "token, window":           dict(TOKEN, memory="linear", window=5, momentum=False, features="monomial"),
    "token, block = chunk":    dict(TOKEN, muon_every=4),
    "token, gated":            dict(TOKEN, memory="gated", forget="start", chunk=8, T=14),
    "token, dot":              dict(TOKEN, loss="dot", muon_every=4, ball=0.5),
    "token, reset":            dict(TOKEN, memory="linear", reset=[4, 8, 20], forget="start", window=5, T=21),
    "token, matrix":           dict(TOKEN, memory="linear", muon_every=8, chunk=8, window=5, T=21),
}


@pytest.mark.parametrize("case", EQUAL.values(), ids=EQUAL.keys())
def test_omega_is_omega_ref(case):
    """Catches a slip in one form: an index, a coefficient, a gradient that stops, a state that is cut."""
    rule, phi, x = problem(**case)
    leaves, T = [a for name, a in x.items() if a is not None and name != "reset"], x["q"].shape[2]
    leaves += phi.parameters()
    results = lambda fn, cuts=(): with_gradients(leaves, fn, rule, phi, x, cuts)
    before, want = [a.detach().clone() for a in leaves], results(omega_ref)
    close(results(chunks.run), want)
    close(results(chunks.run, sorted({T // 3, T - 1} - {0})), want)
    with torch.no_grad():
        close(play(chunks.run, rule, phi, x, range(1, T)), want[:2])
        close(play([chunks.run, omega_ref, chunks.run][:min(3, T)], rule, phi, x, (T // 2, T - 2)[:T - 1]), want[:2])
    assert all(map(torch.equal, leaves, before))
    if rule.ball:                                             # it was at work
        assert not torch.allclose(play(chunks.run, rule._replace(ball=0.0), phi, x)[0], want[0])
        assert max(w.detach().norm(dim=(-2, -1)).max() for w in want[1].W) <= 1.001 * rule.ball


@pytest.mark.parametrize("kind, window", [("linear", 1), ("mlp", 3), ("gated", 3)])
def test_omega_ref_is_the_rule_as_printed(kind, window):
    """With muon_every = 1, chunk = 1, forgetting to zero. Catches: a reference that has drifted from the paper."""
    rule, phi, x = problem(T=7, memory=kind, window=window, muon_every=1, chunk=1, features="elementwise", S0=False)
    M0, (y, _) = [a for name, a in x.items() if name.startswith("M0")], play(omega_ref, rule, phi, x)
    for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        q, k, v, keep, step, momentum, gate = (x[name][b, h] for name in ("q", "k", "v", *Gates._fields[:4]))
        close(paper(kind, [w[h] for w in M0], phi, q, k, v, keep, step, momentum, gate), y[b, h])


@pytest.mark.parametrize("case", [
    dict(features="monomial", momentum=False, forget="start", T=7), dict(muon_every=2, window=1)], ids=str)
def test_shards(case):
    """Catches a shard that goes on from another, or writes into the next sequence; sums of k k^T that stay."""
    rule, phi, x = problem(**dict(T=17, S0=False) | case)
    M0, V0 = tuple(x[name] for name in x if name.startswith("M0")), weights(rule.memory, phi.out_dim, 3, 3, 2)
    leaves = [a.requires_grad_() for a in (*V0, *x.values(), *phi.parameters()) if a is not None]
    first = start(shards.global_rule(rule, 5, Gates(0, 0, 0, 0))[0], phi, V0, 2, x["momentum"] is not None)
    state = shards.Shards(M0, first, None, V0[0].new_zeros(2, 2, 3, 3), 0)
    results = lambda fn, *cuts: with_gradients(leaves, partial(fn, 5), rule, phi, x, cuts, state)
    want = results(shards.shards_ref)
    for fn, *cuts in (shards.shards,), (shards.shards, 1, 3, 5, 6), (shards.shards_ref, 4):
        close(results(fn, *cuts), want)


# ---- special cases, each against a formula that shares no code with the rule

def both_forms(want, rule, x, phi=None):
    for fn in (chunks.run, omega_ref):
        close(play(fn, rule, phi or Features("none", 3), x)[0], want)


def by_token(x, *names):
    """The named inputs cut into tokens: (B, H, 1, D) for q, k, v, and (B, H, 1, 1) for the gates."""
    return zip(*((a if a.dim() == 4 else a[..., None]).split(1, 2) for a in (x[name] for name in names)))


MATRIX = {                                                    # differences from: window 1, chunk 1, no momentum
    "to M0": dict(forget="start"), "Eq 11": dict(window=3), "Eq 55": dict(window=3, loss="dot"), "Eq 16": dict(chunk=4),
    "Eq 33": dict(window=3, momentum=True), "Eq 32": dict(window=3, muon_every=1, momentum=True),
    "choice 15": dict(chunk=8, muon_every=3, momentum=True), "choice 15, no momentum": dict(chunk=4, muon_every=2)}


@pytest.mark.parametrize("case", MATRIX.values(), ids=MATRIX.keys())
def test_matrix_by_hand(case):
    """Catches errors at another W, a wrong decay; NS of the memory, of g, of the step, of part of a block."""
    rule, phi, x = problem(**dict(T=17, memory="linear", window=1, chunk=1, momentum=False, S0=False) | case)
    W, S, U, due, ys, m = x["M0.0"], 0, 0, 0, [], rule.muon_every
    home, momentum = W if rule.forget == "start" else 0, x["momentum"] if "momentum" in case else torch.zeros(2, 2, 17)
    for t, (q, keep, step) in enumerate(by_token(x, "q", "keep", "step")):
        i, anchor = slice(max(0, t - rule.window + 1), t + 1), anchor if t % rule.chunk else W
        k, v, gate = x["k"][:, :, i], x["v"][:, :, i], x["gate"][:, :, t, -min(t + 1, rule.window):, None]
        error = k @ anchor - v if rule.loss == "l2" else -v
        S = momentum[:, :, t, None, None] * S + (gate * k).mT @ error
        W, U, due = home + keep * (W - home), keep * U + step * S, keep * due + step
        if not m:
            W, U = W - U, 0
        elif (t + 1) % rule.chunk % m == 0:
            W, U, due = W - due * newton_schulz_ref(U), 0, 0
        ys.append(q @ (W - U))
    both_forms(torch.cat(ys, 2), rule, x)
    found = chunks.weights(rule, phi, play(chunks.run, rule, phi, x)[1])
    close(found, [W - U, *([S] if "momentum" in case else [])])


@pytest.mark.parametrize("kind, loss, forget, error", [
    ("linear", "l2", "zero", "token"), ("gated", "dot", "start", "chunk")])
def test_monomials_converge_to_exp(kind, loss, forget, error):
    """Eq 22 as a limit, in deep memories too, with gradients, whole and in pieces. Catches: keys lost or shifted."""
    rule, phi, x = problem(T=9, memory=kind, loss=loss, forget=forget, error=error, features="exp", D=2, S0=False)
    leaves, errors = list(x.values()), []

    def results(fn, phi, x, cuts=()):
        first = dot.start(rule, phi, [x[name] for name in x if "M0" in name], 2) if fn is dot.run else None
        y = play(fn, rule, phi, x, cuts, first)[0]
        return torch.cat([a.flatten() for a in (y, *torch.autograd.grad(y.square().mean(), leaves))])
    y = results(dot.run, phi, x)
    for cuts in ((3, 6), (1, 5, 8), range(1, 9)):
        close(results(dot.run, phi, x, cuts), y)
    for degree in (1, 4, 14):
        taylor = Features("monomial", 2, degree).double()
        taylor.scale.data = torch.tensor([math.factorial(i) ** -0.5 for i in range(degree + 1)]).double()
        rows = {f"M0.{i}": F.pad(x[f"M0.{i}"], (0, 0, 1, taylor.out_dim - 3)) for i in range(memory.firsts(kind))}
        errors.append((results(omega_ref, taylor, x | rows) - y).abs().max().item())
    assert errors[0] > 10 * errors[1] > 1000 * errors[2] and errors[2] < 1e-6, errors


# ---- omega.py: where it could break

@pytest.mark.parametrize("how", [dict(), dict(muon_every=8), dict(error="token", memory="linear")], ids=str)
def test_extreme_gates(how):
    """Gates of 0 and 1e-30, float32, long chunks. Catches: a mask after exp, 0 * inf in the backward; a log of 0."""
    rule, phi, x = problem(T=70, B=1, chunk=64, S0=False, **how)
    for name, every in (("keep", 5), ("momentum", 7)):
        x[name].data[..., ::every], x[name].data[..., 1::every] = 0, 1e-30
    want, low = play(chunks.run, rule, phi, x)[0], {name: a.detach().float().requires_grad_() for name, a in x.items()}
    y, state = play(chunks.run, rule, phi, low)
    grads = torch.autograd.grad(sum(a.sum() for a in tensors([y, state])), list(low.values()))
    assert all(a.isfinite().all() for a in grads)
    close(y.double(), want, 1e-4)


def test_no_text_makes_the_memory_run_away():
    """Catches a bound (choice 22) that enlarges, or that the outer gradient goes through."""
    norm = lambda w: w.norm(dim=(-2, -1)).max()
    W, times = randn(2, 4, 4).requires_grad_(), torch.tensor([0.01, 100.0]).double()[:, None, None]
    bounded, = Rule(ball=5.0).bound([W * times])
    factor = torch.stack([times[0], 5 / W[1:].detach().norm(dim=(-2, -1), keepdim=True)[0]])
    close([bounded, *torch.autograd.grad(bounded.sum(), W)], [W * factor, factor.expand_as(W)])
    for kind, muon_every, ball in (("linear", 0, 5), ("linear", 0, 0), ("mlp", 0, 5), ("mlp", 4, 5)):
        rule, phi, x = problem(400, momentum=False, memory=kind, chunk=8, muon_every=muon_every, ball=float(ball))
        x = filled(x, step=4, keep=1, gate=1) | {name: x[name][:, :, :1].expand_as(x[name]) for name in "qkv"}
        x = {name: a if a is None else a.detach().float() for name, a in x.items()}
        y, state = play(chunks.run, rule, phi, x)
        assert bool(ball) == bool(y.isfinite().all()) and (not ball or max(map(norm, state.W)) <= ball * 1.001)


@pytest.fixture
def eager_again(monkeypatch):
    """What is compiled for the whole process is compiled for one test."""
    plain = [name for name, f in vars(chunks).items() if isinstance(f, types.FunctionType)]
    classes = [(models.Memory, ["project", "finish"]), (models.SwiGLU, ["forward"]), (models.Norm, ["forward"])]
    for owner, names in [(chunks, plain), *classes]:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    yield
    torch._dynamo.reset()


def loss_and_gradient(model, x):
    loss = model.loss(x[:, :-1], x[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("name", ["swa", "atlas"])
def test_chunks_compile_whole(name, eager_again):
    """Catches: a graph break in what runs on every chunk, a compiled function that is never called, other numbers."""
    model, x, graphs = shaken(made(name)), tokens(2, 5), []
    eager = loss_and_gradient(model, x)
    traced = torch._dynamo.lookup_backend("aot_eager")        # its backward, too, but no code generated
    model.compile_memory(fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or traced(graph, inputs))
    close(loss_and_gradient(model, x), eager)
    assert len(graphs) > 2 * (not model.config.attention)     # mixing, learn, read


# ---- models.py

def small(preset, **more):
    """A model that has everything of the preset in small: two heads, short chunks, windows and segments."""
    default = {f.name: f.default for f in fields(models.Config)} | models.PRESETS[preset]
    size = dict(vocab_size=11, n_layer=1, n_head=2, n_embd=16, head_dim=8)
    size |= dict(chunk=4, muon_every=2, persistent=2, expansion=1)
    size |= {name: 3 for name in ("window", "attn_window") if default[name] > 1}
    size |= dict(muon_every=0) if default["error"] == "token" else {}
    return models.build(preset, **dict(memory="mlp") | models.PRESETS[preset] | size | more)


def shaken(model):
    """In float64, every parameter moved off its starting value: zeros and ones hide mistakes."""
    for p in model.double().parameters():
        p.data += 0.2 * randn(*p.shape)
    return model


def tokens(*shape):
    return torch.randint(11, shape)


CHUNK = dict(error="chunk", muon_every=2)                     # the paper's Eq 16, in blocks
MODELS = {preset: (preset, {}) for preset in models.PRESETS}
MODELS |= {f"{p}-{w}": (p, dict(wiring=w)) for p in ("atlas", "omeganet") for w in wiring.WIRINGS[1:]}
MODELS |= {
    "Eq 16": ("atlas", CHUNK), "two layers": ("atlas", dict(n_layer=2)), "attentions": ("swa", dict(n_layer=2)),
    "tie": ("atlas", dict(tie=True)), "linear memory": ("atlas", dict(memory="linear")),
    "no conv": ("atlas", dict(conv=False)), "sketch": ("atlas", dict(features="sketch")),
    "deepomega-mac": ("deepomega", dict(wiring="mac")), "elementwise": ("omeganet", dict(features="elementwise")),
    "forget M0": ("atlas", dict(CHUNK, forget="zero")),
    "forget M0-mac": ("omeganet", dict(forget="zero", wiring="mac")),
    "muon every token": ("atlas", dict(CHUNK, muon_every=1)), "chunk 1": ("atlas", dict(chunk=1)),
    "no persistent tokens": ("atlas", dict(wiring="mac", persistent=0)), "one head": ("titans", dict(n_head=1)),
    "gated exp": ("deepomega", dict(memory="gated", keep=True)), "shards": ("atlas", dict(CHUNK, shard=6)),
    "shards-mag": ("titans", dict(shard=4, wiring="mag", max_norm=0.0)),
    "token-mac": ("omeganet", dict(TOKEN, memory="linear", wiring="mac")),
    "token-shards": ("titans", dict(TOKEN, memory="linear", window=3, shard=6)),
}
KINDS = ["transformer", "swa", "deepomega", "atlas++", "omeganet-mac", "atlas-mag", "atlas-mal", "forget M0", "shards",
         "atlas"]
some_models = lambda *names: pytest.mark.parametrize("name", names)


def made(name, **more):
    """The model of this name, with other differences on top."""
    preset, its = MODELS[name]
    return small(preset, **its | more)


def in_pieces(model, cuts, *inputs):
    """What a model says to inputs that are cut into pieces, and its state."""
    out, state = [], None
    for x, *marks in zip(*(a.tensor_split(cuts, 1) for a in inputs)):
        y, state = model(x, state, *marks)
        out.append(y)
    return torch.cat(out, 1), state


@some_models(*MODELS)
def test_every_model(name):
    """Catches dead gates, a detached M0, numbers that the host reads back, parameters of stride 0."""
    model, x = made(name), tokens(2, 11)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    close(in_pieces(model, (6,), x)[0], model(x)[0], 1e-4)
    model.loss(x[:, :-1], x[:, 1:]).backward()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        parts = p.grad.chunk(3) if name.endswith("qkv.weight") else [p.grad]     # of q, k and v
        assert all(0 < part.abs().max() < math.inf for part in parts) and not torch.equal(p, before[name]), name
    assert in_pieces(model.to("meta"), (6,), x.to("meta"))[0].shape == (2, 11, 11)


@some_models(*KINDS)
@torch.no_grad()
def test_reading(name):
    """Catches a cache that forgets, repeats, shifts or grows; later tokens or other rows that show."""
    model, x = shaken(made(name)), tokens(1, 10).repeat(10, 1)
    y = (x + torch.eye(10, dtype=torch.long)) % 11            # row j has another token j
    (logits, _), (changed, end) = model(x), model(y)
    for cuts in ((3, 3, 8), tuple(range(1, 10))):
        close(in_pieces(model, cuts, y), [changed, end])
    for j in range(10):
        close(changed[j, :j], logits[j, :j], 1e-12)
        assert (changed[j, j] - logits[j, j]).abs().max() > 1e-6
        if not (model.config.attention and model.config.attn_window):
            assert (changed[j, 9] - logits[j, 9]).abs().max() > 1e-9, f"token {j} is forgotten by the end"
    close(model(y[4:5])[0], changed[4:5])
    close(model(y[[2, 0, 9]])[0], changed[[2, 0, 9]])

    def held(T):
        state = model(tokens(1, T))[1]
        stores = {a.untyped_storage().data_ptr(): a.untyped_storage().nbytes() for a in tensors(state)}
        return state_bytes(state), sum(stores.values())
    assert (held(12) != held(24)) == models.holds_all(model.config)


@pytest.mark.parametrize("preset", ["swa", "deepomega", "omeganet", "atlas"])
def test_memory_in_bfloat16(preset, monkeypatch):
    """Catches gates, Newton-Schulz or fast weights in bfloat16 under autocast, a loss of three digits."""
    model, x = small(preset, n_embd=64, n_head=2, head_dim=32, chunk=16, muon_every=16), tokens(4, 65)
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)

    def gradients(devices, enabled):
        monkeypatch.setattr(models.Memory, "autocast_on", devices)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, state = model.loss(x[:, :-1], x[:, 1:]), model(x)[1]
        assert loss.dtype == torch.float32
        assert model.config.attention or all(a.dtype == torch.float32 for a in tensors(state[0].fast))
        return torch.autograd.grad(loss, list(model.parameters()))
    exact, inside, outside = gradients((), False), gradients(("cpu",), True), gradients((), True)
    for a, b in zip(exact, inside):
        assert (a - b).norm() < 0.08 * a.norm()
    assert model.config.attention or not all(map(torch.equal, inside, outside))


def alone(model, rows, up):
    """What each of rows, (1, T_i) tokens, says alone, its states, and the sum of its gradients."""
    said, states = zip(*(model(row) for row in rows))
    grads = torch.autograd.grad(sum((y * a).sum() for y, a in zip(said, up)), list(model.parameters()))
    return torch.cat(said, 1)[0], states, grads


@some_models(*KINDS)
def test_padding(name):
    """Catches padding that writes, decays, moves the momentum, or is seen by a window, attention or convolution."""
    model = shaken(made(name, max_norm=0.0))                  # a ball works at the ends of chunks
    lengths = 16, 12, 8 if model.config.error == "token" else 6                  # where blocks end, and not in a gap
    x, real, up = tokens(3, 16), torch.arange(16) < torch.tensor(lengths)[:, None], randn(3, 16, 11)
    rows = [x[i:i + 1, :n] for i, n in enumerate(lengths)]
    want, ends, grads = alone(model, rows, [a[:n] for a, n in zip(up, lengths)])
    y, state = model(x, None, real)
    close(y[real], want)
    close(torch.autograd.grad((y * up)[real].sum(), list(model.parameters())), grads, 1e-9)
    layer = model.blocks[0].layer
    for i, end in enumerate(ends):
        if name in ("atlas++", "forget M0", "atlas"):
            close([a[i:i + 1] for a in sum(layer.weights(state[0]), ())], list(sum(layer.weights(end[0]), ())))
    say = lambda x, mask: in_pieces(model, (3, 4, 5, 13), x, mask)[0][mask]
    close(say(x, real), want)
    gaps, x = rand(3, 16) > 0.4, randn(3, 16, 16)             # and what stands in a gap makes no difference, even NaN
    close(layer(x.where(gaps[..., None], torch.nan), None, gaps)[0][gaps], layer(x, None, gaps)[0][gaps])
    with pytest.raises(ValueError, match="bool"):
        model(tokens(3, 16), None, real.long())


@some_models(*KINDS)
def test_reset(name):
    """Catches W, S, an anchor, a pair, a key or an input of the earlier text; a reset of the whole batch."""
    more = dict(persistent=0, attn_window=4 * (name != "transformer"), shard=4 * (name == "shards"))
    model, x, up = shaken(made(name, **more)), tokens(2, 16), randn(2, 16, 11)
    reset, mask = torch.zeros(2, 16, dtype=torch.bool), torch.ones(2, 16, dtype=torch.bool)
    reset[0, 8], mask[0, 7] = True, False
    if model.config.forget == "zero":
        with pytest.raises(ValueError, match="forget"):
            model(x, None, mask, reset)
        return
    rows = [(0, 0, 7), (0, 8, 16), (1, 0, 16)]
    want, _, grads = alone(model, [x[i:i + 1, a:b] for i, a, b in rows], [up[i, a:b] for i, a, b in rows])
    y = model(x, None, mask, reset)[0]
    close(y[mask], want)
    close(torch.autograd.grad((y * up)[mask].sum(), list(model.parameters())), grads, 1e-9)
    for cuts in ((8,), (7, 9, 10)):
        close(in_pieces(model, cuts, x, mask, reset)[0][mask], want)
    if not model.config.attention and model.config.chunk > 1:
        with pytest.raises(ValueError, match="reset"):
            model(x, None, mask, reset.roll(1, 1))


@some_models("atlas", "deepomega", "omeganet-mac", "swa", "shards")
def test_low_precision(name):
    """Catches M0, gates, phi or a turn of 8 bits in models of bfloat16 and half, fast weights that are."""
    x = tokens(2, 13)
    for dtype, tol in (torch.bfloat16, 0.06), (torch.half, 0.01):
        model = made(name).to(dtype)
        exact, (out, state) = deepcopy(model).float()(x)[0], in_pieces(model, (6,), x)
        assert out.dtype == dtype and next(model.generate(x[:, :3], 1)).shape == (2,)
        close(out.float(), exact, tol)
        model.loss(x, x).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        if not model.config.attention:
            assert all(a.dtype == torch.float32 for a in tensors(getattr(state[0], "memory", state[0]).fast))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")
def test_fsdp(tmp_path, request):
    """Catches fast weights or keys of another type: sharded models say in two calls what plain ones say."""
    dist, x = torch.distributed, tokens(2, 13)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for casts in False, True:
        model = deepcopy(plain := made("omeganet-mac"))
        for part, out in (model.blocks[0], None), (model, torch.float32):
            how = fsdp.MixedPrecisionPolicy(torch.bfloat16, None, out, casts)
            fsdp.fully_shard(part, mesh=mesh, mp_policy=how)
        first, state = model(x[:, :6])
        if casts:
            with pytest.raises(ValueError, match="cast_forward_inputs=False"):
                model(x[:, 6:], state)
        else:
            both = torch.cat([first, model(x[:, 6:], state)[0]], 1)
            close(both, in_pieces(plain.bfloat16(), (6,), x)[0].float(), 1e-6)
            model.loss(x, x).backward()


@some_models(*KINDS)
@torch.no_grad()
def test_select_and_save(name):
    """Catches M0 cut by rows or saved, rows of another's memory, a file that does not go on to the bit."""
    model, x = shaken(made(name)), tokens(3, 14)
    other, params = deepcopy(model), {p.data_ptr() for p in model.parameters()}
    for T, rows in (5, [2, 0, 2]), (8, torch.tensor([1, 1, 0, 2])):
        state = model(x[:, :T])[1]
        some, alone = select(state, rows), model(x[rows, :T])[1]
        close([some, model(x[rows, T:], some)], [alone, model(x[rows, T:], alone)], 1e-9)
        torch.save(detach(state), file := io.BytesIO())
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        other.check_state(loaded)
        assert torch.equal(model(x[:, T:], state)[0], other(x[:, T:], loaded)[0])
        assert not params & {a.data_ptr() for a in tensors(state) if a.numel()}


@torch.no_grad()
def test_switches_do_something():
    """Catches: a field of Config that nothing reads; an ablation would compare a model with itself."""
    alone = dict(
        window=1, degree=1, memory="linear", muon=False, momentum=False, keep=False, conv=False,
        chunk=8, ns_steps=2, loss="dot", ns_coefficients="cubic", max_step=0.25, error="chunk",
        forget="zero", expansion=3, features="sketch", tie=True, max_norm=0.1, n_layer=2, wiring="mag")
    pairs = (dict(wiring="mag"), "persistent", 0), (dict(wiring="mac"), "attn_window", 4), (CHUNK, "muon_every", 1)
    for more, name, value in [*(({}, *item) for item in alone.items()), *pairs]:
        out = []
        for switch in (more, more | {name: value}):
            torch.manual_seed(0)
            out.append(small("atlas", **switch)(torch.arange(11)[None])[0])
        assert not torch.allclose(*out), name


def test_config_reaches_the_rule():
    """Catches two fields swapped, and a preset or settings of the layer that are another model."""
    config = models.Config(memory="gated", loss="dot", window=3, chunk=5, muon_every=2, ns_steps=4,
                           ns_coefficients="cubic", forget="zero", max_norm=7.0)
    assert rule_of(config) == Rule("gated", "dot", 3, 5, 2, 4, "cubic", "zero", norm=True, ball=7.0)
    assert [rule_of(models.Config(chunk=5, muon=m)).muon_every for m in (True, False)] == [5, 0]
    assert vars(settings()).items() <= vars(models.configure("atlas")).items()
    assert [models.build(preset).num_params() for preset in models.PRESETS] == [910752, 910752, 878192, 878192, 881280,
        1047158, 899808, 906864, 928480, 928480, 934886, 919446, 1210006, 916358]
    a, b = small("atlas", error="chunk", window=1, muon=False, features="none"), small("titans")
    x = tokens(2, 9)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x)[0], b(x)[0])
    cases = ("atlas", {}), ("titans", {}), ("titans", dict(features="exp"))      # size < preset < override
    assert [models.configure(preset, "340m", **more).features for preset, more in cases] == ["sketch", "none", "exp"]


MISFITS = dict(window=2, chunk=8, muon=True, wiring="mag", n_head=1, shard=8, features="none")


def test_bad_arguments():
    """Catches a riddle from inside, or a state of another model that runs on in silence."""
    model, x, hidden = small("omeganet"), tokens(2, 6), torch.randn(2, 6, 16)
    state, layer, first = model(x)[1], model.blocks[0].layer, lambda *args: next(model.generate(*args))
    states = {name: small("omeganet", **{name: value})(x)[1] for name, value in MISFITS.items()}
    for word, f, *args in (
        *((f"{name} is {value}, not", model, x, states[name]) for name, value in MISFITS.items()),
        ("window is 2, not 3", layer, hidden, states["window"][0]), ("batch is 2, not 1", model, x[:1], state),
        ("window is 2, not 3", model.check_state, states["window"]), ("not a str", model.check_state, {"step": 1}),
        ("of its own, not a tuple", layer, hidden, state), ("states of its layers", model, x, state[0]),
        ("n_layer is 2", model, x, state * 2), ("indices", select, state, [0.5]),
        ("atlas", models.configure, "altas"), ("int", partial(models.configure, n_layer=2.0)),
        ("l2 or dot", partial(models.configure, "titans", error="token", loss="huber")),
        ("batch is 2, not 1", model, x[:1, :0], state), ("targets", model.loss, x, x.mT),
        *((word, partial(settings, **{name: value})) for word, name, value in (
            ("n_heads; there are n_head", "n_heads", 2), ("error is one of", "error", "tokens"),
            ("features is one of", "features", "poly"), ("memory is one of", "memory", "MLP"),
            ("forget is one of", "forget", "Start"), ("muon is True or", "muon", "off"),
            ("at least 1, not 0", "chunk", 0), ("type float", "max_step", math.nan), ("one of", "features", "exp"))),
        ("features is one of", models.Memory, SimpleNamespace(**vars(settings()) | dict(features="exp", muon=False))),
        (r"x\[None\]", layer, hidden[0]), ("16", layer, hidden[..., :8]), ("target", model.loss, x, x[:, 1:]),
        (r"\(B, T >= 1", first, x[:, :0], 3), (r"\(B, T >= 1", model, x[0]),
        ("at least 0", first, x, 3, 1.0, -1), ("top_p to 1", first, x, 3, math.nan),
    ):
        with pytest.raises(ValueError, match=word):
            f(*args)


# ---- models.py: parts of layers

def heads(layer, a, norm=None, turned=False):
    """(T, H D) -> (H, T, D), of unit mean square times `norm`'s weight, turned by the position like complex numbers."""
    a = a.unflatten(-1, (layer.config.n_head, -1)).transpose(0, 1)
    a = a if norm is None else a / a.square().mean(-1, keepdim=True).sqrt() * norm.weight
    if turned:
        half = a.shape[-1] // 2
        angle = torch.arange(a.shape[1])[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        a = torch.view_as_real(torch.complex(a[..., :half], a[..., half:]) * torch.exp(1j * angle)).mT.flatten(-2)
    return a


def softmax_attention(q, k, v, seen):
    """Attention written out: q (.., T, D), k and v (.., n, D), seen (T, n)."""
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("window", [0, 3])
@torch.no_grad()
def test_attention_by_hand(window):
    """Catches: a window off by one, a lost norm, a prefix with a position or out of sight, turns the other way."""
    layer = shaken(small("transformer", attn_window=window)).blocks[0].layer
    x, p, seen = randn(1, 7, 16), randn(2, 16), torch.ones(7, 7).bool().tril()
    seen = seen.triu(1 - window) if window else seen
    (q, k, v), (_, pk, pv) = (layer.qkv(a).chunk(3, -1) for a in (x[0], p))
    q, k, v = heads(layer, q, layer.q_norm, True), heads(layer, k, layer.k_norm, True), heads(layer, v)
    out = lambda y: layer.out(y.transpose(0, 1).flatten(1))
    close(layer(x)[0][0], out(softmax_attention(q, k, v, seen)), 1e-6)
    k, v = torch.cat([heads(layer, pk, layer.k_norm), k], 1), torch.cat([heads(layer, pv), v], 1)
    close(layer(x, prefix=p)[0][0], out(softmax_attention(q, k, v, F.pad(seen, (2, 0), value=True))), 1e-6)


def test_attention_piece_by_piece():
    """Catches keys missing or doubled where one of three pieces of 600 positions ends."""
    q, k, v = (randn(1, 2, T, 4) for T in (600, 605, 605))
    i, j = torch.arange(5, 605)[:, None], torch.arange(605)
    for w in (0, 5, 700):
        close(wiring.attend(q, k, v, w), softmax_attention(q, k, v, (j <= i) & (j > i - (w or 700))))


@torch.no_grad()
def test_wirings_by_hand():
    """Catches a MAC that writes before it attends, reads what it has just written, or looks ahead."""
    x = randn(1, 8, 16)
    for how in "mag", "mal", "mac":
        layer = shaken(small("atlas", **CHUNK, wiring=how)).blocks[0].layer
        y, a, px = layer(x)[0], layer.attention, torch.cat([layer.persistent[None], x], 1)
        gated = lambda y, m: layer.y_norm(y) * layer.m_norm(m).sigmoid()
        if how == "mag":
            close(y, gated(a(x, prefix=layer.persistent)[0], layer.memory(px)[0][:, 2:]))
        if how == "mal":
            close(y, a(layer.m_norm(layer.memory(px)[0]))[0][:, 2:])
    state, outs = layer.memory.start(x), []
    for s in x.split(3, 1):
        h = wiring.retrieve(layer.memory, s, layer.memory.weights(state)[0])
        (_, pk, pv), (_, hk, hv), (q, xk, xv) = (a.qkv(z).chunk(3, -1) for z in (layer.persistent, h[0], s[0]))
        seen = F.pad(torch.ones(len(q), len(q)).tril().bool().repeat(1, 2), (2, 0), value=True)
        k = torch.cat([heads(a, pk, a.k_norm), heads(a, hk, a.k_norm, True), heads(a, xk, a.k_norm, True)], 1)
        v = torch.cat([heads(a, z) for z in (pv, hv, xv)], 1)
        z = a.out(softmax_attention(heads(a, q, a.q_norm, True), k, v, seen).transpose(0, 1).flatten(1))[None]
        m, state = layer.memory(z, state)
        outs.append(gated(z, m))
    close(y, torch.cat(outs, 1), 1e-6)


@torch.no_grad()
def test_a_block_by_hand():
    """Catches a residual or norm lost, a convolution that sees the future, parts of another head or scale."""
    block, x = shaken(small("deltanet", chunk=1, keep=True)).blocks[0], randn(2, 7, 16)
    layer, m, ys = block.layer, block.mlp, []
    rms = lambda x, w: w * x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()
    u, W = rms(x, block.norm1.weight), layer.M0[0]
    qkv = F.silu(F.conv1d(F.pad((u @ layer.qkv.weight.T).mT, (3, 0)), layer.conv.T[:, None], groups=48).mT)
    q, k, v = (a.unflatten(-1, (2, 8)).transpose(1, 2) for a in qkv.chunk(3, -1))
    gates = (u @ layer.gates.weight.T + layer.gates.bias).sigmoid().unflatten(-1, (2, 3)).transpose(1, 2)
    x_ = dict(q=q / q.norm(dim=-1, keepdim=True), k=k / k.norm(dim=-1, keepdim=True), v=v)
    for q, k, v, keep, step, gate in by_token(x_ | dict(zip("abc", gates.unbind(-1))), *"qkvabc"):
        W = W + step**2 * ((keep - 1) * (W - layer.M0[0]) - gate * k.mT @ (k @ W - v))
        ys.append(q @ W)
    y = rms(torch.cat(ys, 2), layer.norm.weight).transpose(1, 2).flatten(2) * F.silu(u @ layer.out_gate.weight.T)
    h = x + y @ layer.out.weight.T
    r = rms(h, block.norm2.weight)
    close(block(x)[0], h + (F.silu(r @ m.gate.weight.T) * (r @ m.up.weight.T)) @ m.out.weight.T)


def test_gates():
    """Catches gates out of range, of 8 bits, or whose weights leave their module, which may have a LoRA around it."""
    layer, x = small("atlas", **CHUNK).blocks[0].layer, torch.randn(2, 7, 16).bfloat16()
    layer.gates.weight.data *= 100
    want = layer.make_gates(x.float())
    assert all(0 <= a.min() and 0.9 * top < a.max() <= top for a, top in zip(want, (1, 2 / 4, 1, 1 / 3)))
    assert want.gate.shape == (2, 2, 7, 3) and want.keep.shape == (2, 2, 7)
    want = deepcopy(layer.bfloat16()).float().make_gates(x.float())
    layer.gates = torch.nn.Sequential(layer.gates, torch.nn.PReLU(init=1.0))
    close([layer.make_gates(x)], [want], 1e-6)
    g = small("atlas", **CHUNK, keep=False, momentum=False).blocks[0].layer.make_gates(torch.zeros(1, 1, 16))
    assert g.keep.min() == 1 and g.momentum is None           # where x says nothing, a bias decides
    close(g.step, torch.full((1, 2, 1), 2 / 4 * 0.5 ** 2), 1e-6)
    model = made("atlas-mac")                                 # nor does MAC ask a wrapped layer for in_features
    model.blocks[0].layer.memory.out = torch.nn.Sequential(model.blocks[0].layer.memory.out)
    model(tokens(2, 7))
    older = 1 / (1 + math.exp(3)) / 2                         # two older pairs share a sum of 1
    gate = small("atlas").blocks[0].layer.make_gates(torch.zeros(1, 1, 16)).gate
    close(gate, torch.tensor([older, older, 0.5]).expand(1, 2, 1, 3), 1e-6)


@some_models("Eq 16", *(preset for preset in models.PRESETS if not models.configure(preset).attention))
def test_a_gate_that_closes_spoils_no_gradient(name):
    """Catches: the square of a tiny norm, whose gradient overflows: the loss was finite, gradients were NaN."""
    model, x = made(name), tokens(2, 9)
    layer = model.blocks[0].layer
    bias = layer.gates.bias.detach().view(2, -1)[0]
    usual, at = bias.clone(), 0
    for n in layer.n_gates:                                   # keep, step, momentum, gamma
        for logit in (-40.0, -20.0, -17.0, -15.0, 15.0, 40.0):
            bias[at:at + n] = logit
            model.zero_grad()
            model.loss(x, x).backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), (at, logit)
        bias.copy_(usual)
        at += n


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_masked_chunk_makes_no_nan():
    """Catches 0 * inf that a later `where` hides: torch.autograd.set_detect_anomaly would stop there."""
    model, x, mask = made("atlas"), tokens(2, 12), torch.ones(2, 12, dtype=torch.bool)
    mask[0, 4:8] = False
    with torch.autograd.set_detect_anomaly(True):
        model.loss(x, x, mask).backward()


def test_init_sets_all_starting_values():
    """Catches a norm, a scale or a sketch that keeps what was there: to_empty, then init, as torchtitan builds."""
    for name in "sketch", "atlas-mag", "omeganet-mac", "transformer":
        torch.manual_seed(0)
        want, other = made(name), made(name)
        for a in (*other.parameters(), *other.buffers()):
            a.data.fill_(math.nan)
        torch.manual_seed(0)
        want.init()
        torch.manual_seed(0)
        other.init()
        close(other.state_dict(), want.state_dict(), 0)
        other = made(name).to("meta").to_empty(device="cpu")
        other.init()
        assert all(a.isfinite().all() for a in other.state_dict().values())


@torch.no_grad()
@pytest.mark.parametrize("features", ["monomial", "sketch", "exp"])
def test_a_step_of_1_learns_a_pair(features):
    """Catches: error = "token" with steps that |phi(k)|^2 does not divide, or a norm of another phi."""
    rule, one, M0 = Rule("linear", chunk=4, forget="start", error="token"), torch.ones(2, 2, 7), torch.zeros(2, 1, 8)
    phi, k, v = Features(features, 8, 2, 5), unit(2, 2, 7, 8).float(), torch.randn(2, 2, 7, 8)
    for scale in phi.parameters():
        scale.copy_(torch.tensor([1.0, 0.9, 0.7]))
    engine, start = (dot, dot.start) if features == "exp" else (chunks, omega.start)
    state = start(rule, phi, [M0.expand(2, phi.out_dim, 8)], 2, momentum=False)
    close(engine.run(rule, phi, k, k, v, omega.Gates(one, one, None, one[..., None]), state)[0], v, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("memory, muon", [("linear", False), ("mlp", True)])
def test_steps_at_their_bound_do_not_explode(memory, muon):
    """Catches a step or a gradient that nothing divides: |W| was 1e7 to 1e42."""
    model = small("atlas", memory=memory, muon=muon, error="token", window=1, muon_every=0, chunk=16, max_norm=0.0)
    layer = model.double().blocks[0].layer
    layer.gates.weight.zero_()
    layer.gates.bias.copy_(torch.tensor([9.0, 9.0, 4.0, 0.0]).repeat(2))        # keep, step, momentum, gate
    state = layer(randn(1, 1500, 16))[1]
    assert max(w.norm(dim=(-2, -1)).max() for w in state.fast.W) < 300


def test_dropout():
    """Catches: dropout of one half of a block alone, or none; dropout that goes on in eval mode."""
    model, x = small("atlas", dropout=1 - 1e-9), tokens(2, 9)
    close(model.train()(x)[0], model.head(model.norm(model.embed(x))), 1e-6)     # nothing that a block adds is left
    plain = small("atlas")
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x)[0], plain(x)[0])


@some_models("omeganet-mac", "swa")
def test_remat(name):
    """Backward computes each block again and finds the same gradients, with dropout. Catches: a --remat in vain."""
    calls, found, x = [], [], tokens(2, 9)
    for remat in (False, True):
        torch.manual_seed(0)
        model = made(name, dropout=0.5, n_layer=2)
        model.remat = remat
        for block in model.blocks:
            block.layer.register_forward_hook(lambda *_: calls.append(remat))
        found.append(loss_and_gradient(model, x))
        with torch.no_grad():
            model(x)
    assert (calls.count(False), calls.count(True)) == (4, 6) and all(map(torch.equal, *map(tensors, found)))


# ---- models.py: the language model

@some_models("atlas", "deepomega", "swa", "omeganet-mac")
def test_generate(name):
    """Catches a prompt that counts by its last token, a state that generating changes, a piece that is lost."""
    model, x = shaken(made(name)), tokens(2, 7)
    greedy = lambda x, n, state=None: torch.stack(list(model.generate(x, n, temperature=0, state=state)), 1)
    text, (_, state), ends = torch.cat([x, greedy(x, 8)], 1), model(x[:, :5]), []
    assert torch.equal(model(text)[0][:, 6:-1].argmax(-1), text[:, 7:])
    assert all(torch.equal(greedy(x[:, 5:], 8, state), text[:, 7:]) for _ in range(2))
    model.loss(text[:, 7:8], text[:, 8:9]).backward()
    for n in (8, 0):                                          # the last token is drawn and not read
        list((lambda: (ends.append((yield from model.generate(x, n, temperature=0)))))())
    close(ends, [model(text[:, :-1])[1], model(x)[1]])
    model(text, ends[0])[0].sum().backward()                  # of tensors like any other
    draw = lambda seed: torch.stack(list(model.generate(x, 9, generator=torch.Generator().manual_seed(seed))), 1)
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    if name == "atlas":
        long = tokens(1, 1030)
        assert torch.equal(greedy(long, 1)[:, 0], model(long)[0][:, -1].argmax(-1))


FILTERS = [                       # temperature, top_k, top_p -> tokens that may come from probabilities .1 .4 .2 .3
    (1, 0, 1.0, {0, 1, 2, 3}), (1, 2, 1.0, {1, 3}), (1, 9, 1.0, {0, 1, 2, 3}), (1, 0, 0.0, {1}), (1, 0, 0.39, {1}),
    (1, 0, 0.41, {1, 3}), (1, 0, 0.71, {1, 2, 3}), (1, 3, 0.5, {1, 3}), (0, 0, 1.0, {1}), (1e-40, 0, 1.0, {1})]


def test_sample():
    """Catches: one token too many or too few, a temperature upside down, filters that do not renormalise."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    for temperature, top_k, top_p, allowed in FILTERS:
        assert set(models.sample(p.log().expand(2000, 4), temperature, top_k, top_p).tolist()) == allowed
    count = lambda *args: models.sample(p.log().expand(20000, 4), *args).bincount(minlength=4) / 20000
    close(count(0.5), p ** 2 / (p ** 2).sum(), 0.02)
    close(count(1, 2), torch.tensor([0, 4 / 7, 0, 3 / 7]), 0.02)


def test_loss_by_hand():
    """Catches: targets of -100 that count, a sum for a mean."""
    model, x, y = small("atlas"), tokens(2, 9), tokens(2, 9)
    p = model(x)[0].log_softmax(-1).gather(-1, y[..., None])[..., 0]
    close(model.loss(x, y), -p.mean(), 1e-6)
    close(model.loss(x, torch.where(torch.arange(9) < 5, y, -100)), -p[:, :5].mean(), 1e-6)
    assert model.loss(x, torch.full_like(y, -100)) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@some_models("omeganet", "atlas", "atlas-mac", "swa")
def test_a_gpu_computes_the_same(name, compiled, eager_again):
    """Other kernels, products for recurrences, compiled regions: the numbers of a CPU, in float64."""
    model, x = shaken(made(name)), tokens(2, 24)
    want = loss_and_gradient(model, x)
    if compiled:
        model.compile_memory()
    close([a.cpu() for a in loss_and_gradient(model.cuda(), x.cuda())], want, 1e-8)


@some_models("atlas", "forget M0", "deepomega")
def test_probe(name):
    """Token by token, the same. Catches: a surprise after the write, M0 that counts as written, a gate of another."""
    model, x = shaken(made(name)).eval(), tokens(2, 10)
    [found], layer, state, surprise = eval.probe(model, x), model.blocks[0].layer, None, []
    z = model.blocks[0].norm1(model.embed(x))
    said = layer(z)[0]
    for t in range(10):
        state = state or layer.start(z)
        k, v = layer.project(z[:, t:t + 1], state)[1:3]
        read = layer.recall(k, layer.frozen(state))
        surprise.append((read - v).square().sum(-1) / 2)
        state = layer(z[:, t:t + 1], state)[1]
    close(found["surprise"], torch.cat(surprise, -1), 1e-9)
    W = layer.weights(state)[0]
    written = [w - F.pad(m, (0, 0, 0, w.shape[2] - m.shape[1])) for w, m in zip(W, layer.M0)]
    close(found["written"], sum(a.square().sum((2, 3)) for a in written).sqrt(), 1e-9)
    close([found["keep"], found["step"]], list(layer.make_gates(z)[:2]), 1e-12)
    model.config.max_step, model.config.keep = 0.0, False
    close(found["share"], (said - layer(z)[0]).norm() / said.norm(), 1e-12)


def test_polarise_and_floor():
    """Catches: a term or a floor that has no gradient, or is of another gate."""
    plain, x, y, told = shaken(made("omeganet-mag")), tokens(2, 9), tokens(2, 9), []
    polar = models.LM(replace(plain.config, polarise=0.5)).double()
    polar.load_state_dict(plain.state_dict())
    norm = polar.blocks[0].layer.m_norm
    norm.register_forward_hook(lambda *a: told.append(a[2].sigmoid()))
    term = polar.loss(x, y) - plain.loss(x, y)
    close(term, 0.5 * (1 - (2 * told[0] - 1).abs()).mean(), 1e-12)
    assert torch.autograd.grad(term, norm.weight)[0].abs().max() > 1e-3
    floored = replace(plain.config, memory_floor="0.3,0.2,0.1")
    layer = wiring.Wiring(floored, models.Memory(floored)).double()
    says, m = randn(2, 9, 16), randn(2, 9, 16)
    close(layer.gated(says, m), 0.9 * layer.y_norm(says) * layer.m_norm(m).sigmoid() + 0.1 * layer.m_norm(m), 1e-12)


# ---- data.py

TEXT = "To be, or not to be:\n\u00e9\u4e2d\U0001f600 the <|endoftext|> the end.  the\n"


@pytest.fixture
def gpt2(monkeypatch):
    ranks = {t: i for i, t in enumerate([*(bytes([b]) for b in range(256)), b"th", b"the"])}
    bpe = tiktoken.Encoding("", pat_str=data.GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: bpe)


@pytest.mark.parametrize("served", [b"To be", b"<html>log in</html>", None])
def test_shakespeare(tmp_path, monkeypatch, capsys, served):
    """A download is kept and not repeated. Without network, or with a login page, pydoc serves, with one line."""
    monkeypatch.setattr(data, "SHAKESPEARE", path := tmp_path / "new" / "shakespeare.txt")
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(b"To be").hexdigest())
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(served) if served else open("/gone"))
    corpus = data.read("shakespeare")
    if served == b"To be":
        monkeypatch.setattr(urllib.request, "urlopen", None)
        assert corpus.text == "To be" and data.read("shakespeare") == corpus and list(path.parent.iterdir()) == [path]
    else:
        assert corpus == data.read("pydoc") and len(corpus.text) > 100_000
        assert capsys.readouterr().err.count("\n") == 1 and not path.exists()
        monkeypatch.setattr(data.Corpus, "splits", lambda *_: (np.arange(500) % 9,) * 2)
        assert train.main([*NET, *RUN, "--steps", "4", "--out", str(tmp_path / "out")]) == 0
        assert eval.main(["--stream", "0", "--device", "cpu", "--ckpt", str(tmp_path / "out")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum("not comparable with README" in line for line in lines) == 4
        assert any(re.match("done: .*not comparable.* loss", line) for line in lines)


def test_files_folders_and_mixes(tmp_path, monkeypatch):
    """Catches another field, a text read twice by a link, weights that do nothing, mixed-up splits."""
    monkeypatch.chdir(tmp_path)
    for name, body in {"d/a.JSONL": '{"text": "To\u2028be", "title": "x"}\n{"text": " "}\n{"text": "or"}\n',
                       "d/z.ndjson": '{"text": "last"}\n',
                       "d/sub/b.json": '[{"text": "not"}, {"text": "to"}]', "d/no.md": "no", "d/.git/z.txt": "no",
                       "c.txt": "c" * 90 + "C" * 10, "d.json": '{"text": "' + "d" * 900 + "D" * 100 + '"}'}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(body)
    Path("d/c.json").symlink_to("sub/b.json")
    assert data.read("d").text.split(data.BORDER) == ["To\u2028be", "or", "not", "to", "last"]
    corpus, byte = data.read("c.txt:1,d.json:3"), data.make_tokenizer("byte", "")
    train, val = (byte.decode(ids[:]) for ids in corpus.splits(byte, 4))
    assert train == "c" * 300 + "d" * 900 and val == "C" * 10 + "D" * 30            # 1 : 3, both of them
    assert corpus.text[:990] == "c" * 90 + "d" * 900 and corpus.used == "c.txt:1,d.json:3"
    assert corpus.sha256 not in (data.read("c.txt:2,d.json:3").sha256, data.read("d.json").sha256)


LLM_C = np.array([20240520, 1, 300] + [0] * 253, "<i4").tobytes()


def test_mistakes_are_told_in_one_line(tmp_path, monkeypatch):
    """The line names the file, the line and what to do. Catches: a traceback, raw JSON as a text, ids of four bytes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: open("/gone"))           # an OSError, as without network
    for name, body in {"empty": b"\n\n", "latin": b"\xef\xbb\xbf ab\xe9t\xe9", "a.jsonl": b'{"text": "a"}\n{"b": 1}',
                       "b.json": b'{"text": 1}', "deep.jsonl": b"[" * 100_000,
                       "c.txt.gz": b"\x1f\x8b\x08", "tok/train.bin": b"\1\0" * 20,
                       "tok/val.bin": b"\1\1\0\0" * 5, "odd/train.bin": b"\1\0\1", "name/medieval.bin": b"\1\0" * 9,
                       "wide/val.bin": np.arange(999, dtype="<u4").tobytes(),
                       "cut/val.bin": LLM_C + b"\1\0" * 299}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(body)
    tokens, byte = data.read("tok"), data.make_tokenizer("byte", "")
    for call, args, word in [
            (data.read, ["gone"], "No such file"), (data.read, ["empty"], "no text"),
            (data.read, ["c.txt.gz"], "gunzip"), (data.read, ["latin"], "byte 0xe9 in position"),
            (data.read, ["a.jsonl"], "a.jsonl.*KeyError"), (data.read, ["b.json"], '"text" is a string'),
            (data.read, ["deep.jsonl"], "deep.jsonl: RecursionError"),
            (data.read, ["tok:0,tok:1"], "weight"),
            *((data.read, [name], "train.bin|val.bin.*four bytes") for name in ("odd", "wide", "cut")),
            (data.read, ["name"], "medieval.bin.*rename"),
            (tokens.splits, [byte, 10], "--seq-len 10"), (tokens.splits, [byte, 9], "up to 257"),
            (data.make_files, [types.SimpleNamespace(data="latin", out=Path("tok"))], "already holds"),
            (data.make_tokenizer("char", TEXT).encode, ["ToZeYZ"], "'YZ'"),
            (data.make_tokenizer, ["char", ""], "needs a text"), (data.make_tokenizer, ["gpt2", ""], "TIKTOKEN_CACHE")]:
        with pytest.raises(common.UserError, match=rf"^[^\n]*({word})[^\n]*\Z"):
            call(*args)


@pytest.mark.parametrize("kind, size", [("char", len(set(TEXT))), ("byte", 257), ("gpt2", 259)])
def test_tokenizer_round_trip(monkeypatch, gpt2, kind, size):
    """Text to ids and back is exact, through a checkpoint too and offline; streamed characters come out whole, once."""
    t = data.make_tokenizer(kind, TEXT)
    ids = t.encode(TEXT)
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    torch.save(t.state, file := io.BytesIO())
    again = data.Tokenizer(**torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert again.vocab_size == size and again.state == t.state and np.array_equal(again.encode(TEXT), ids)
    assert t.decode(torch.tensor(ids)) == again.decode(ids.tolist()) == TEXT and t.decode([]) == ""
    assert t.bytes_a_token(ids) * (len(ids) - 1) == pytest.approx(len(TEXT.encode()) - len(t.decode(ids[:1])))
    feed = t.stream()
    pieces = [feed(i) for i in torch.tensor(ids)]
    assert data.make_tokenizer("char", "hello\n").encode("\nehlo").tolist() == [0, 1, 2, 3, 4]      # as nanoGPT's
    assert "".join(pieces) == TEXT and "\ufffd" not in "".join(pieces)
    if kind == "byte":
        assert feed(0xC3) == "" and t.stream()(0x41) == "A" and feed(final=True) == "\ufffd"
    if kind == "gpt2":
        assert t.encode("the").tolist() == [257] and t.bytes_a_token([0, 65, 258]) == 0.5   # the end of a text is none


def test_token_files(tmp_path, monkeypatch):
    """They hold the ids of the text, however it is cut into blocks. Catches: a half file, one that is misread."""
    monkeypatch.setattr(data, "BLOCK", 7)
    (tmp_path / "t.txt").write_text(TEXT * 20, encoding="utf-8")
    data.main(["--data", str(tmp_path / "t.txt"), "--tokenizer", "byte", "--out", str(out := tmp_path / "out")])
    tokenizer, corpus = data.make_tokenizer("byte", ""), data.read(out)
    for part, ids in zip(corpus.splits(tokenizer, 8), data.split(tokenizer.encode(TEXT * 20)), strict=True):
        assert part[:].dtype == np.uint16 and np.array_equal(part[:], ids)
        assert all(map(torch.equal, data.batch(part, 0, 3, 4, 8), data.batch(ids, 0, 3, 4, 8)))
    with pytest.raises(ZeroDivisionError), common.replacing(out / "val.bin") as temporary:
        temporary.write_text(str(1 / 0))
    assert data.read(out).sha256 == corpus.sha256 and {p.name for p in out.iterdir()} == {"train.bin", "val.bin"}


def test_shards_are_one_stream(tmp_path, text):
    """Catches a header taken for ids, a slice that lacks some, `pretrain-val` trained on."""
    ids = np.random.default_rng(0).integers(0, 200, 1000, dtype="<u2")
    (tmp_path / "tok").mkdir()
    for name, a, b in ("mid_TRAIN_0", 0, 2), ("train_001", 2, 302), ("train_002", 302, 1000), ("pretrain-val-0", 0, 80):
        (tmp_path / f"tok/{name}.bin").write_bytes(LLM_C * (b == 302) + ids[a:b].tobytes())
    corpus, byte = data.read(tmp_path / "tok"), data.make_tokenizer("byte", "")
    train, val = corpus.splits(byte, 8)
    for a, b in (0, 1000), (0, 2), (1, 3), (2, 302), (300, 999), (990, 2000):
        assert train[a:b].tolist() == ids[a:b].tolist()
    assert len(train) == 1000 and val[:].tolist() == ids[:80].tolist()
    assert all(isinstance(part, np.memmap) and not part.flags.writeable for part in train.parts)
    assert go(tmp_path / "tok", tmp_path / "out", "--tokenizer", "byte", "--steps", 2) == 0
    mixed, _ = data.read(f"{tmp_path / 'tok'}:2,{text}:1").splits(byte, 8)
    assert len(mixed) == 5400 + 2700 and mixed[995:1003].tolist() == [*ids[995:], *ids[:3]]
    assert mixed[5399:5402].tolist() == [ids[399], *text.read_bytes()[:2]]        # a part is cut within a file


def test_documents_are_joined_by_end(tmp_path, gpt2):
    """Catches: a newline in the place of END, END in a vocabulary that needs none, a text that says END."""
    texts = "aab\n", "baa<|endoftext|>", "aab"
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(dict(text=text)) for text in texts))
    text = data.read(tmp_path / "d.jsonl").text
    for kind, size in ("char", 14), ("byte", 257), ("gpt2", 259):
        t = data.make_tokenizer(kind, text)
        ids, end = t.encode(text), t.tokens.index(data.END)
        assert t.end == end == t.vocab_size - 1 == size - 1 and (ids == end).sum() == 2 and ids.dtype == np.int64
        assert t.decode(ids) == "<|endoftext|>".join(texts) and t.bytes_a_token([0, end, 1]) == 0.5
    assert data.make_tokenizer("char", "ab").end is None


def test_documents_begin_at_chunks():
    """Catches: a document that begins inside of a chunk, a token lost inside a row, a target not its token's."""
    x = torch.tensor([[1, 2, 9, 3, 4, 5, 9, 6], [9, 1, 2, 3, 9, 9, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
    moved = data.documents(x, 10 * x, 9, 4)
    assert moved[0].tolist() == [[1, 2, 0, 0, 9, 3, 4, 5], [9, 1, 2, 3, 9, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]]
    x = torch.randint(9, (50, 64))
    for chunk in 1, 7, 64:
        a, y, mask, reset = data.documents(x, x + 100, 8, chunk)
        assert torch.equal(y, torch.where(mask, a + 100, -100))
        assert torch.equal(reset, (a == 8) & mask) and not (reset.nonzero()[:, 1] % chunk).any()
        for row, kept, was in zip(a, mask, x):              # nothing is lost but at the end, no gap longer than needed
            assert row[kept].tolist() == was[:kept.sum()].tolist() and kept[0]
            assert all(i % chunk for i in range(64) if not kept[i] and kept[i - 1])
    assert torch.equal(data.documents(x, x, 8, 1)[0], x)


def test_batch():
    """Windows of an epoch come once, no two epochs cut alike, and nothing but (seed, step) decides: exact resume."""
    x = torch.cat([data.batch(np.arange(1000), 0, step, 4, 16)[0][:, 0] for step in range(61)]).view(4, 61)
    for starts, offset in zip(x, offsets := x.min(1)[0].tolist()):
        assert starts.sort()[0].tolist() == list(range(offset, offset + 61 * 16, 16)) and (starts.diff() < 0).any()
    assert len(set(offsets)) > 1 and x.max() < 1000 - 16
    keys, before, firsts = [(0, 0), (0, 1), (1, 0), (1, 1)], torch.get_rng_state(), set()
    for x, y in (data.batch(torch.arange(10_000), *key, 4, 8) for key in keys):
        assert torch.equal(y, x + 1) and x.dtype == torch.int64
        firsts.add(tuple(x[:, 0].tolist()))
    assert len(firsts) == len(keys) and torch.equal(before, torch.get_rng_state())
    assert list(map(len, data.split(range(1_115_394)))) == [1_003_854, 111_540]     # nanoGPT's, of tiny Shakespeare


@pytest.mark.parametrize("n, T, B", [(100, 8, 3), (97, 8, 4), (9, 8, 4), (2, 8, 4), (3, 1, 1)])
def test_windows_and_streams_cover_everything_once(n, T, B):
    """Each token but the first is a target exactly once: a dropped tail would flatter or spoil the validation loss."""
    pieces = list(data.windows(np.arange(n, dtype=np.uint8), T, B))
    assert torch.cat([y.flatten() for _, y in pieces]).tolist() == list(range(1, n))
    assert all(torch.equal(y, x + 1) and len(x) <= B for x, y in pieces) and {x.shape[1] for x, _ in pieces[:-1]} <= {T}
    starts = [i for x, _ in data.windows(np.arange(n), T, B, every=2) for i in x[:, 0].tolist()]
    assert starts == list(range(0, (n - 1) // T * T, 2 * T))
    rows = torch.cat([y for _, y in data.streams(np.arange(n), T, B)], 1)
    assert rows.flatten().tolist() == list(range(1, 1 + rows.numel())) and n - 1 - rows.numel() < len(rows) <= B


def lookup(row, facts, motif=1):
    """What recall.recall asks of a row, read off the row: keys are 0 .. 7, values 8 .. 15, noise is above."""
    table, answers, t = {}, [-100] * len(row), 0
    while t < len(row):
        key, t, value = tuple(row[t:t + motif]), t + (motif if row[t] < 8 else 1), []
        if key in table:
            answers[t - 1:t - 1 + len(table[key])] = table[key]
        while t < len(row) and 8 <= row[t] < 16:
            value, t = value + [row[t]], t + 1
        if key[0] < 8:
            table.setdefault(key, value)
    return answers[:len(row)]


@pytest.mark.parametrize("name, answer", [
    ("mqar", lambda row, facts: [-100] * 8 + [
        dict(zip(row[:8:2], row[1:8:2])).get(token, -100) for token in row[8:]]),
    ("needle", lambda row, facts: [-100] * 56 + sum(
        ([row[row.index(key, 0, 56) + 1], -100] for key in row[56::2]), [])),
    ("recall", lookup), ("noisy-recall", lookup), ("fuzzy-recall", partial(lookup, motif=3)),
    ("compression", lambda row, facts: [-100] * 32 + [row[place - 16] for place in row[32:]]),
    ("memorization", lambda row, facts: [
        facts[row[t - 1]] if token == 254 else -100 for t, token in enumerate(row)]),
    ("selective-copying", lambda row, facts: [-100] * (row.index(15) + 1) + [token for token in row if token < 14])])
def test_synthetic_tasks(name, answer):
    """An oracle that reads tokens alone finds all targets and no more; a seed is a batch; docstrings show it."""
    others = {"needle": (partial(recall.needle, n_pairs=4, seq_len=64), 49, 0.34),
              "mqar": (partial(recall.mqar, n_pairs=4, n_queries=3, vocab=16, seq_len=24), 16, 1 / 3)}
    draw, vocab, _ = {**recall.MAD, **others}[name]
    (tokens, targets), again, other = (draw(256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(tokens, again[0]) and torch.equal(targets, again[1]) and not torch.equal(tokens, other[0])
    facts = dict(zip(other[0][:, :-1].flatten().tolist(), other[1][:, 1:].flatten().tolist()))      # memorization's
    assert [answer(row, facts) for row in tokens.tolist()] == targets.tolist()
    assert set(tokens.unique().tolist() + targets.unique().tolist()) == {-100, *range(vocab)}
    doc = draw.func.__doc__
    g, call = torch.Generator().manual_seed(10521), re.search(r"\w+\(1, .*?\)(?=[,:])", doc)[0]
    made = builtins.eval(call, vars(recall), dict(g=g))
    drawn = [re.search(rf"{word} +((-?\d+ *)+)\n", doc)[1].split() for word in ("tokens", "targets")]
    assert [row[0].tolist() for row in made] == [list(map(int, row)) for row in drawn]


# ---- train.py and sample.py

NET = "--n-layer 1 --n-embd 16 --n-head 2 --head-dim 8 --chunk 8 --window 3 --muon-every 8".split()
RUN = "--device cpu --dtype float32 --threads 1 --seq-len 16 --batch-size 2 --log-every 3 --eval-every 4".split()
train.EVAL_WINDOWS, train.SAMPLE = 4, 5                       # the runs here are short


def go(text, out, *flags):
    """A run of a small network -> exit code."""
    return train.main([*NET, *RUN, "--data", str(text), "--out", str(out), *map(str, flags)])


def refused(capsys, main, *argv, code=2):
    """main must end with this exit code and exactly one line on stderr, which is returned."""
    try:
        got = main([str(a) for a in argv])
    except SystemExit as stop:
        got = stop.code
    err = capsys.readouterr().err
    assert got == code and err.startswith("error: ") and err.count("\n") == 1, (got, err)
    return err


def signal_in(monkeypatch, step, *numbers):
    """These signals come while this step is computed."""
    real = train.train_step

    def signalled(model, optimizers, task, i):
        for number in numbers if i == step - 1 else ():
            signal.raise_signal(number)
        return real(model, optimizers, task, i)
    monkeypatch.setattr(train, "train_step", signalled)


class Closed(io.StringIO):
    """A pipe whose reader has ended, or with another fault a terminal."""
    def __init__(self, fault=BrokenPipeError):
        self.fault = fault

    def write(self, *_):
        raise self.fault


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def same(a, b):
    """Bit equality of nested dicts, lists and tensors."""
    if isinstance(a, (dict, list, tuple)):
        keys = a.keys() if isinstance(a, dict) else range(len(a))
        return len(a) == len(b) and all(same(a[k], b[k]) for k in keys)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def rows(out, *columns):
    return [tuple(row[c] for c in columns) for row in csv.DictReader((out / "log.csv").open())]


def saved(out, name="ckpt.pt"):
    return train.load_checkpoint(Path(out) / name)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(("to be or not to be: that is the question.\n" * 80)[:3000], newline="\n")
    return path


FLAGS = "--steps", 10, "--dropout", 0.2, "--grad-accum", 2


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A finished run of 10 steps: its folder, and what it said in the file `said` beside it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with redirect_stdout(io.StringIO()) as said:
        assert go(text, out, *FLAGS) == 0
    (out.parent / "said").write_text(said.getvalue())
    return out


@pytest.fixture
def copy(trained, tmp_path):
    """The same, to break."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


# ---- settings and flags

def test_settings_are_defaults_then_size_then_model_then_flags(monkeypatch):
    """A preset that wins over a flag, or a misspelt field of a size, trains another network or none."""
    assert all(train.settings(dict(size=size))[0].size == size for size in models.SIZES)
    monkeypatch.setitem(models.PRESETS, "omeganet", dict(n_layer=3, window=5, chunk=7))
    monkeypatch.setitem(models.SIZES, "baby", dict(n_layer=2, window=6))
    monkeypatch.setitem(train.TRAIN_SIZES, "baby", dict(steps=77, lr=0.5))
    tc, config = train.settings(train.parse("--model omeganet --size baby --window 9 --lr 0.25".split()))
    assert (config.chunk, config.n_layer, config.window, config.n_embd) == (7, 3, 9, models.Config.n_embd)
    assert (tc.steps, tc.lr, tc.seq_len) == (77, 0.25, train.TrainConfig.seq_len)
    assert train.settings({"device": "cpu"})[0].size == "tiny"
    assert train.settings(dict(steps=10))[0].warmup == 1                  # the default of 20 would never end


def test_every_field_is_a_flag_and_help_tells_its_default(capsys):
    """A field without a flag cannot be set, one that is always on cannot be switched off."""
    with pytest.raises(SystemExit):
        train.main(["--help"])
    parts = re.split(r"\n  --", capsys.readouterr().out)
    shown = {re.match(r"[\w-]+", part)[0]: re.findall(r"\[(.*?)\]$", part, re.M) for part in parts[1:]}
    run, network = map(asdict, train.settings(dict(size="tiny")))
    assert not run.keys() & network.keys() and train.FREE <= run.keys()
    for name, value in {**run, **network, "size": "auto"}.items():
        if name in train.NO_FLAG:
            continue
        assert shown[name.replace("_", "-")][-1] == str(value), name
        assert not isinstance(value, bool) or train.parse([f"--no-{name.replace('_', '-')}"]) == {name: False}


def test_a_run_on_documents(tmp_path, capsys):
    """Catches gaps that count, another border than a chunk's, a target that is lost."""
    rows = ["".join("abcdefg "[i] for i in torch.randint(8, (n,))) for n in torch.randint(5, 40, (60,))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(dict(text=row)) for row in rows))
    flags = "--steps 4 --documents --seq-len 64"
    assert go(tmp_path / "a.jsonl", tmp_path / "out", *flags.split()) == 0
    assert re.search(r"multiple of 8 tokens; gaps take [1-4]\d\.\d%", capsys.readouterr().out)
    ckpt = train.load_checkpoint(tmp_path / "out")
    model, tc = train.rebuild(ckpt)[0].double(), train.TrainConfig(**ckpt["train"])
    task = train.Text(tc, CPU, torch.float32, ckpt)
    x, y = data.batch(task.splits[0], tc.seed, 3, tc.batch_size, tc.seq_len)
    losses, end = [], task.tokenizer.end
    for row, target in zip(x, y):
        room = 64                                             # a document takes whole chunks; the last one may be cut
        for part in (edges := [0, *(i for i in range(1, 64) if row[i] == end), 64])[:-1]:
            n = min(room, min(e for e in edges if e > part) - part)
            if n > 0:
                logits = model(row[None, part: part + n])[0][0]
                losses += F.cross_entropy(logits, target[part: part + n], reduction="none").tolist()
            room -= -(-n // 8) * 8
    close(task.loss(model, 3), torch.tensor(losses, dtype=torch.float64).mean(), 1e-9)


MISTAKES = [                                                  # program, flags, a word of the line
    (train, "--widnow 3", "--widnow"), (train, "--model atals", "atals"), (train, "--steps 0", "--steps"),
    (train, "--wiring mag --memory-floor 0.3,2", "--memory-floor"), (train, "--muon-every 8", "muon_every of chunk"),
    (train, "--data words:1,words:2 --documents --tokenizer byte", "one text"), (train, "--lr nan", "--lr"),
    (train, "--documents --wiring mag", "--persistent 0\n"), (train, "--features exp", "--no-muon"),
    (train, "--model swa --wiring mag", "memory"), (train, "--shard 4 --wiring mac", "--shard"),
    (train, "--degree 4 --head-dim 64", "107 GB"), (train, "--n-head 5 --head-dim 0", "--n-head"),
    (data, "--data words --tokenizer byte --out words", "--out words"), (train, "--device mps", "mps"),
    *((module, f"{argv} ''", f"{re.findall('--[a-z-]+', argv)[-1]}: it is empty")
      for module, argv in (
        (train, "--out"), (train, "--data"), (train, "--init"), (train, "--plot run"),
        (episodic, "--out"), (data, "--data"), (data, "--data words --out"),
        (eval, "loss --ckpt run"),
        (eval, "--data"), (eval, "--json"), (eval, "mixing --plot"), (recall, "mqar --json"),
        (bench, "rule --json"), (sample, "--ckpt"), (sample, "--save-state"),
        (sample, "--load-state"))),                           # of an unset variable
    (train, "--resume", "ckpt.pt"), (train, "--init words", "words"), (train, "--data gone", "gone"),
    (train, "--data words --seq-len 400", "short"), (train, "--muon False", "False"),
    (train, "--data words --out words", "--out words"), (train, "--repeats 0.5 --seq-len 16", "--seq-len"),
    (sample, "--ckpt run --load-state words", "words"), (sample, "--prompt - --save-state gone/x", "gone/x"),
    (sample, "--prompt - --save-state run/best.pt", "run/best.pt is no"), (sample, "--top-p 1.1", "--top-p"),
    (sample, "--prompt -", "UTF-8"), (sample, "--ckpt run --device cpu --prompt \u00e9", "\u00e9"),
    (eval, "--ckpt gone", "gone"), (eval, "capacity --json run", "run"), (eval, "", "cannot load out"),
    (eval, "probe --ckpt run --no-write", "--no-write"), (recall, "mqar --window 0", "--window"),
    (recall, "mqar --pairs 1 7", "vocab=16"), (recall, "mqar --model gpt", "transformer"), (recall, "mar", "mqar"),
    (recall, "mad --model atlas,muon=no", "muon=no"), (recall, "mqar --json words", "was not"),
    (bench, "rule --json gone/x", "gone"), (episodic, "--stablemax", "grok")]


@pytest.mark.parametrize("module, argv, word", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(module, argv, word, trained, text, capsys, tmp_path, monkeypatch):
    """A typo that is ignored trains the wrong model for hours. A mistake must not leave a folder behind."""
    monkeypatch.chdir(tmp_path)
    Path("words").symlink_to(text)
    Path("run").symlink_to(trained)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"to \xff")))
    assert word in refused(capsys, module.main, *shlex.split(argv)) and len(os.listdir()) == 2


def test_no_program_writes_over_what_it_did_not_write(copy, capsys, monkeypatch):
    """Catches a checkpoint, text, photograph or hours of training lost to a slip. A program does
    replace its own files."""
    monkeypatch.chdir(copy)
    monkeypatch.setattr(common, "need", lambda *_: None)      # matplotlib
    Path("photo.png").write_bytes(b"\x89PNG")
    Path("mine.png").write_bytes(b"Software Matplotlib")
    Path("curves.png").symlink_to("photo.png")
    for name, body in {"keep.txt": "keep", "other.json": '{"name": "x"}', "list.json": "[]",
                       "records.json": '{"records": [0]}', "mine/lock": "keep"}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(body)
    assert eval.main("mixing --json m.json".split()) == 0
    before = contents(copy)
    assert eval.main("mixing --json m.json".split()) == 0 and contents(copy) == before
    common.check_picture("mine.png")
    for module, argv, word in [
            *((program, f"{task} --device cpu --json {file}", file)
              for file in ("best.pt", "other.json", "list.json")
              for program, task in ((eval, "mixing"), (bench, "rule"), (recall, "mqar"))),
            (recall, "mqar --json m.json", "m.json was not"),
            (recall, "mqar --json records.json", "no results"),
            (bench, "peers --json m.json", "m.json was not"),
            (eval, "mixing --json /dev/null", "/dev/null"),
            (eval, "mixing --plot keep.txt", ".png"), (eval, "mixing --plot keep", ".png"),
            (eval, "mixing --plot photo.png", "photo.png"), (train, "--plot .", "curves.png"),
            (episodic, "--plot --out . --device cpu --data keep.txt", "curves.png"),
            (sample, "--ckpt . --save-state keep.txt", "keep.txt"),
            (train, "--out mine --data pydoc", "mine/lock")]:
        assert word in refused(capsys, module.main, *argv.split()), argv
        assert contents(copy) == before, argv


def test_resume_refuses_what_would_change_the_run(copy, text, tmp_path, capsys):
    """Catches a changed setting that is ignored, or taken over, in silence."""
    before = contents(copy)
    (other := tmp_path / "other").write_text(text.read_text()[::-1])
    for argv in (["--window", 5], ["--model", "titans"], ["--no-muon"], ["--data", other]):
        said = refused(capsys, train.main, "--resume", "--out", copy, "--steps", 20, *argv)
        assert argv[0].replace("--no-", "--") in said
    assert contents(copy) == before
    assert train.main(f"--resume --out {copy} --device cpu --steps 12 --lr 1e-3".split()) == 0
    assert "--lr is 0.001 from here on, " in capsys.readouterr().out
    ckpt = saved(copy)
    assert ckpt["train"]["lr"] == 1e-3 and rows(copy, "step", "lr")[-1] == ("12", f"{1e-3 / 12:.6g}")
    torch.save(ckpt | dict(train=ckpt["train"] | dict(data="gone.txt")), at := copy / "ckpt.pt")    # not here
    for main, *argv in (train.main, "--resume", "--out", copy, "--steps", 20), (eval.main, "--ckpt", at):
        assert re.search(f"cannot read gone.txt.*{at}.* --data", refused(capsys, main, *argv, "--device", "cpu"))


# ---- the run

def test_a_run_says_logs_and_saves_what_it_did(trained, text):
    """The figures a reader compares, from one run: each in its place, and all agree."""
    lines, ckpt = (trained.parent / "said").read_text().splitlines(), saved(trained)
    model, tokenizer = train.rebuild(saved(trained, "best.pt"))
    ids = tokenizer.encode(text.read_text())
    full = train.evaluate(model, ids[2700:], 16, 2)
    assert lines[-1].startswith("done: atlas") and f"{full:.4f} nats" in lines[-1]
    assert [line.split()[0] for line in lines[:4]] == ["model", "data", "device", "step"]
    assert f"{model.num_params():,} parameters" in lines[0] and "2,700 tokens to train, 300 to validate" in lines[1]
    assert [step for step, in rows(trained, "step")] == ["1", "3", "4", "6", "8", "9", "10"]
    vals = {step: float(val) for step, val in rows(trained, "step", "val") if val}
    assert list(vals) == ["4", "8", "10"] and sum("val " in line for line in lines) == 4   # and before the first step
    part = train.evaluate(train.rebuild(ckpt)[0], ids[2700:], 16, 2, 4)
    assert vals["10"] == pytest.approx(part, abs=1e-5) != pytest.approx(full, abs=1e-5)
    loss = [float(loss) for loss, in rows(trained, "loss")]
    assert loss[-1] < loss[0] - 0.3                           # an optimizer that is not stepped, or steps uphill
    assert json.loads((trained / "config.json").read_text()) == {n: ckpt[n] for n in ("train", "config", "data")}
    assert sorted(os.listdir(trained)) == ["best.pt", "ckpt.pt", "config.json", "log.csv"]


def test_one_folder_one_run(copy, text, capsys):
    """Catches two runs that mix their files, and a killed run's lock that locks all out."""
    before = contents(copy)
    with common.locked(copy):
        for main, *argv in ((train.main, "--resume", "--steps", 20), (train.main, *NET, *RUN, "--data", text),
                            (episodic.main, "--grok", "--device", "cpu")):
            assert f"process {os.getpid()} " in refused(capsys, main, *argv, "--out", copy)
    assert contents(copy) == before
    (copy / "lock").write_text("process 1, which was killed")
    assert go(text, copy, "--steps", 1) == 0 and not (copy / "lock").exists()


def test_a_checkpoint_is_read_only_when_the_folder_is_held(copy, monkeypatch, capsys):
    """Catches a run that goes on from where another was, over its files. It has finished since."""
    held, real = [], train.load_checkpoint

    def load(path, *how):
        held.append((copy / "lock").exists())
        return real(path, *how)
    monkeypatch.setattr(train, "load_checkpoint", load)
    for name in "ckpt.pt.7.tmp", "best.pt.77.tmp", "notes.tmp":
        (copy / name).write_text("half")                      # of a killed process, and the user's
    assert train.main(f"--resume --device cpu --out {copy}".split()) == 0 and held == [True]
    assert {*os.listdir(copy)} == {"ckpt.pt", "best.pt", "config.json", "log.csv", "notes.tmp"}
    assert "ckpt.pt" in refused(capsys, train.main, "--resume", "--out", copy / "a/b")
    assert not (copy / "a").exists()


def test_a_full_disk_leaves_what_resume_goes_on_from(text, tmp_path, monkeypatch, capsys):
    """Catches a line that knows no checkpoint where best.pt is good, a --resume without it."""
    real = torch.save

    def save(tree, path):
        if path.name.startswith("ckpt.pt"):
            raise OSError(28, "No space left on device")
        real(tree, path)
    monkeypatch.setattr(torch, "save", save)
    argv = [*NET, *RUN, "--data", text, "--out", tmp_path, "--steps", 8]
    said = refused(capsys, train.main, *argv, code=1)
    assert "ckpt.pt" in said and "intact, for --resume: best.pt" in said
    monkeypatch.setattr(torch, "save", real)
    assert train.main(["--resume", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "best.pt, step 4" in capsys.readouterr().out and saved(tmp_path)["step"] == 8


def test_memory_floor_and_probe(text, tmp_path, monkeypatch, capsys):
    """Catches: a floor that does not hold at each step, or that eval.py does not load; a probe of another text."""
    floors = []
    floor = lambda model: [m.floor for m in model.modules() if isinstance(m, wiring.Wiring)]
    for name in "train_step", "validate":
        real = getattr(train, name)
        monkeypatch.setattr(train, name, lambda model, *a, real=real: floors.append(floor(model)) or real(model, *a))
    assert go(text, tmp_path, *FLAGS, *"--wiring mag --memory-floor 0.4,0.2,0.1 --polarise 0.1".split()) == 0
    assert floors == [[0.4]] * 2 + [[0.2]] * 4 + [[0.1]] * 8           # at the start, 10 steps, steps 4, 8 and 10
    probe = f"probe --device cpu --ckpt {tmp_path} --length 20 --json {tmp_path / 'p.json'}".split()
    assert eval.main(probe) == 0
    model, tokenizer = train.rebuild(train.load_checkpoint(tmp_path))
    [found] = eval.probe(model, torch.as_tensor(tokenizer.encode(text.read_text())[2700:2720])[None])
    kept = json.loads((tmp_path / "p.json").read_text())["layers"][0]["surprise"]
    assert floor(model) == [0.1] and kept == pytest.approx(found["surprise"].mean((0, 1)).tolist())
    monkeypatch.setattr(eval, "COLLAPSED", 1.0)
    assert eval.main(probe) == 0 and "is idle" in capsys.readouterr().out


@pytest.mark.parametrize("old, new", [
    (b"\n", b"\n\0\0"), (b",", b";"), (b"0", b"\xff"), (b"1", b"\n,")])
def test_a_damaged_log_moves_aside(old, new, copy, text, capsys):
    """The checkpoint is good: --resume goes on, and says what became of the log."""
    log = copy / "log.csv"
    for n, last in (1, 11), (2, 12):
        log.write_bytes(damaged := log.read_bytes().replace(old, new))
        with pytest.raises(common.UserError, match="log.csv"):
            common.curve(copy, "loss")
        assert train.main(f"--resume --out {copy} --steps {last} --device cpu".split()) == 0
        said = capsys.readouterr().out
        assert f"a damaged log.csv lay in {copy}; it is now in {copy}/old-{n}" in said
        assert (copy / f"old-{n}/log.csv").read_bytes() == damaged
        assert rows(copy, "step") == [(str(last),)]
    log.write_text(log.read_text().partition("\n")[0] + "\n")
    with pytest.raises(common.UserError, match="no step yet"):
        common.plot([str(copy)])


def test_a_folder_of_texts_may_hold_runs(text, tmp_path, monkeypatch, capsys):
    """Catches settings, samples and older runs that are read as texts; also beside the texts."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(text.read_text())
    Path("killed").mkdir()                                    # before it saved
    Path("killed/config.json").write_text('{"train": {}, "config": {}, "data": {}}')
    sha256 = data.read(tmp_path).sha256
    for out in "runs/out", ".":
        assert go(".", out, "--steps", 1) == go(".", out, "--steps", 1, "--seed", 2) == 0
        Path("runs/out/sample.txt").write_text("to be a sample")
        assert train.main(["--resume", "--device", "cpu", "--steps", "2", "--out", out]) == 0
        assert saved(out)["step"] == 2 and saved(out)["data"]["sha256"] == sha256
    assert eval.main("--stream 0 --device cpu --ckpt runs/out".split()) == 0
    assert "left out the runs in .: runs/out/old-1/ runs/out/ old-1/\n" in capsys.readouterr().err


@pytest.mark.parametrize("logger", train.LOGGERS)
def test_loggers_go_on_where_a_run_stopped(logger, text, tmp_path, monkeypatch):
    """Catches rows that get lost, and a resumed run that begins another curve."""
    begun, logged, real = [], [], train.train_step
    monkeypatch.setattr(train, "need", lambda *_: None)
    init = lambda **how: begun.append((how["id"], how["resume"])) or types.SimpleNamespace(id=how["id"] or "w1")
    log = lambda row, step: logged.extend((name, a, step) for name, a in row.items())
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, log=log))

    def writer(folder, purge_step):
        begun.append(purge_step)
        return types.SimpleNamespace(add_scalar=lambda *row: logged.append(row), flush=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=writer))
    signal_in(monkeypatch, 5, signal.SIGTERM)
    assert go(text, tmp_path, "--steps", 8, "--log-to", logger) == 143
    monkeypatch.setattr(train, "train_step", real)
    assert train.main(["--resume", "--device", "cpu", "--out", str(tmp_path), "--log-to", logger]) == 0
    assert [(str(step), f"{a:.6g}") for name, a, step in logged if name == "loss"] == rows(tmp_path, "step", "loss")
    assert begun == dict(wandb=[(None, "allow"), ("w1", "allow")], tensorboard=[1, 6])[logger]


def test_stopped_and_resumed_is_bit_equal(text, trained, tmp_path, monkeypatch, capsys):
    """Any state missing from the checkpoint shows, and so does a validation that disturbs training, here more often."""
    signal_in(monkeypatch, 5, signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["../my code/train.py"])
    assert go(text, tmp_path, *FLAGS) == 130
    assert f"python '../my code/train.py' --resume --out {tmp_path}\n" in capsys.readouterr().out
    with (tmp_path / "log.csv").open("a") as log:
        log.write("7,9.9,1,1,1,1,\n")                         # logged by a killed run, but not saved
    torch.manual_seed(99)
    again = ["--resume", "--out", str(tmp_path), "--device", "cpu", "--eval-every", "2"]
    assert train.main(again) == 0
    a, b = saved(trained), saved(tmp_path)
    for key in ("model", "optimizers", "step", "start", "config", "tokenizer"):
        assert same(a[key], b[key]), key
    every = dict(rows(tmp_path, "step", "loss"))
    assert all(every[step] == loss for step, loss in rows(trained, "step", "loss")) and "7" not in every
    before = contents(tmp_path)
    assert train.main(again) == 0 and "nothing to do" in capsys.readouterr().out and contents(tmp_path) == before


@pytest.mark.parametrize("numbers, code, step", [
    ([2], 130, 6), ([2, 2], 130, 4), ([15], 143, 6), ([1, 15], 129, 6), ([10, 10, 15], 138, 6)])
def test_one_signal_finishes_the_step_and_two_stop_at_once(numbers, code, step, text, tmp_path, monkeypatch):
    """Catches a step lost to Ctrl-C, `2>&1 | tee` or a closed terminal."""
    before = signal.getsignal(signal.SIGINT)
    signal_in(monkeypatch, 6, *numbers)
    monkeypatch.setattr(os, "write", Closed().write)
    monkeypatch.setattr(sys, "stdout", Closed(OSError(5, "Input/output error") if 1 in numbers else BrokenPipeError))
    assert go(text, tmp_path, "--steps", 9) == code and signal.getsignal(signal.SIGINT) is before
    assert saved(tmp_path)["step"] == step and rows(tmp_path, "step")[-1] == (str(step),)


def test_a_second_run_moves_the_first_aside(text, copy, monkeypatch):
    """The second `python train.py` must work, and destroy nothing, least of all when it fails in its first step."""
    before = contents(copy)
    for n in (1, 2):
        assert go(text, copy, "--steps", 1, "--seed", n) == 0
    assert contents(copy / "old-1") == before
    assert [train.load_checkpoint(folder)["train"]["seed"] for folder in (copy / "old-2", copy)] == [1, 2]
    monkeypatch.setattr(train, "train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        go(text, copy)
    assert not (copy / "old-3").exists()


def test_a_new_run_begins_with_the_weights_of_another(text, trained, tmp_path, capsys):
    """--init takes weights, network and tokenizer as they are, and none of the rest."""
    (other := tmp_path / "other.txt").write_text(text.read_text()[::-1])
    run = [*RUN, "--data", str(other), "--out", str(tmp_path / "second"), "--init", str(trained), "--steps", "1"]
    assert train.main([*run, "--lr", "0", "--outer-muon-lr", "0", "--chunk", "4"]) == 0
    a, b = train.load_checkpoint(trained), train.load_checkpoint(tmp_path / "second")
    assert same(a["model"], b["model"]) and b["tokenizer"] == a["tokenizer"] and b["step"] == 1
    assert b["config"] == {**a["config"], "chunk": 4} and b["data"]["used"] == str(other)
    for flags, word in (["--n-embd", 32], "shapes"), (["--model", "titans"], "--model"):
        assert word in refused(capsys, train.main, *run, *flags)


def test_a_run_that_ends_worse_than_it_began_says_so(text, tmp_path, monkeypatch, capsys):
    """Catches a nan that is the best, a start that --resume forgets."""
    values, seen = iter([2.0, 3.0, math.nan, 4.0]), []
    monkeypatch.setattr(train, "evaluate", lambda *a, **k: next(values))
    monkeypatch.setattr(train, "report", lambda model, *_: seen.append(model.state_dict()) or 3.0)
    signal_in(monkeypatch, 5, signal.SIGINT)
    assert go(text, tmp_path, "--steps", 8, "--eval-every", 3) == 130
    assert train.main(["--resume", "--out", str(tmp_path)]) == 0
    best, last = saved(tmp_path, "best.pt"), capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("warning") and "from 2.0000" in last and "to 4.0000" in last
    assert best["step"] == 3 and same(dict(seen[0]), dict(best["model"]))


def test_what_is_not_finite_stops_the_run_before_it_saves(text, tmp_path, monkeypatch, capsys):
    """One NaN step turns all weights to NaN; here it comes in the gradient of step 6, neither logged nor validated."""
    real, calls = models.LM.loss, []

    def loss(self, x, y):
        calls.append(self)
        return real(self, x, y) + ((self.norm.weight.sum() * 0).sqrt() if len(calls) == 7 else 0)
    monkeypatch.setattr(models.LM, "loss", loss)
    said = refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", tmp_path, code=1)
    assert "step 6" in said and "lower --lr" in said and saved(tmp_path)["step"] == 4
    assert all(p.isfinite().all() for p in calls[0].parameters())


def test_a_damaged_or_foreign_checkpoint_is_refused(copy, text, capsys):
    """A line for whatever lies there; of what pickle could make, only tensors and plain values are read."""
    whole, ckpt, cases = (copy / "best.pt").read_bytes(), saved(copy), []
    for other in (dict(format=train.FORMAT - 1), dict(format=train.FORMAT, other=Path("x")),
                  ckpt | dict(config=ckpt["config"] | {"later": 1}),
                  {k: a for k, a in ckpt.items() if k != "tokenizer"},
                  ckpt | dict(model={k: a * math.nan for k, a in ckpt["model"].items()})):
        torch.save(other, file := io.BytesIO())
        cases.append(file.getvalue())
    for raw in b"", whole[:-1], *cases:
        (copy / "best.pt").write_bytes(raw)
        for main, *argv in (sample.main, "--ckpt"), (eval.main, "--ckpt"), (train.main, "--data", text, "--init"):
            assert "best.pt" in refused(capsys, main, *argv, copy)


@pytest.mark.parametrize("fault, code, word", [
    (torch.OutOfMemoryError("CUDA out of memory"), 1, "--remat"), (MemoryError(), 1, "--batch-size"),
    (OSError("disk full"), 1, "full"), (common.Halt("a line"), 1, "a line"), (common.UserError("a line"), 2, "a line"),
    (KeyboardInterrupt(), 130, "stop")])
def test_exit_codes(fault, code, word, capsys, monkeypatch):
    """A traceback for what a user can mend, or exit code 0 for what failed."""
    def task(*_):
        raise fault
    assert word in refused(capsys, lambda _: common.exit_code(task), code=code)
    monkeypatch.setattr(sys, "stdout", Closed())              # `| head` has seen enough
    assert common.exit_code(lambda: print("x")) == 0 and sys.stdout.name == os.devnull


# ---- a step

def test_lr_schedule_by_hand():
    """Off by one, a warmup begins at 0 (a wasted step) or the decay ends above it."""
    tc = train.TrainConfig(steps=10, warmup=4)
    assert [train.lr_scale(i, tc) for i in range(10)] == pytest.approx([.25, .5, .75, .7, .6, .5, .4, .3, .2, .1])
    assert [train.lr_scale(i, replace(tc, warmup=0)) for i in (0, 5)] == [1, 0.5]
    task, model = train.Task(tc, CPU), torch.nn.Linear(1, 1)
    task.loss = lambda model, number: model.weight.sum()
    sgd = torch.optim.SGD([dict(params=[torch.nn.Parameter(torch.ones(1))], times=10.0)], lr=tc.lr)
    train.train_step(model, [sgd], task, 1)
    assert sgd.param_groups[0]["lr"] == pytest.approx(5 * tc.lr)          # of the embedding: --embed-lr


def step_of(clip=math.inf, **shape):
    """One outer step of a small model, with plain SGD -> loss, norm, the parameters after it."""
    torch.manual_seed(0)
    model = models.build("atlas", vocab_size=20, n_layer=2, n_embd=16, n_head=2, head_dim=8, chunk=8, muon_every=8)
    task = train.Task(tc := train.TrainConfig(seq_len=16, warmup=2, **shape), CPU)
    task.largest_norm = clip
    ids = torch.randint(20, (200,), generator=torch.Generator().manual_seed(0))
    task.draw = lambda number, _: data.batch(ids, tc.seed, number, tc.batch_size, tc.seq_len)
    loss, norm = train.train_step(model, [torch.optim.SGD(model.parameters(), lr=1.0)], task, 0)
    return loss, norm, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_accumulated_passes_are_the_larger_batch():
    """Accumulation that forgets to divide, a clip of each part, a norm that is taken after clipping."""
    whole, parts, clipped = step_of(batch_size=4), step_of(batch_size=1, grad_accum=4), step_of(0.01, batch_size=4)
    start = step_of(1e-12, batch_size=4)[2]
    close(list(map(torch.as_tensor, whole)), list(map(torch.as_tensor, parts)), 1e-5)
    assert clipped[:2] == whole[:2] and (clipped[2] - start).norm().item() == pytest.approx(0.5 * 0.01, rel=1e-2)
    assert (whole[2] - start).norm().item() == pytest.approx(0.5 * whole[1].item(), rel=1e-3)    # 0.5 of a rate of 1


def test_two_processes_train_like_one(text, tmp_path, monkeypatch, capsys):
    """Gradients of the wrong share change the loss. Where only the process that had a signal stops, the other hangs."""
    signal_in(monkeypatch, 3, signal.SIGTERM)                 # in this process, the first
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE="2")
    argv = list(map(str, [*NET, *RUN, "--data", text, "--out", tmp_path / "two", "--grad-accum", 2]))
    second = subprocess.Popen([sys.executable, train.__file__, *argv], text=True, stdout=subprocess.PIPE, env={
        **os.environ, **env, "RANK": "1", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1"})           # as torchrun starts it
    assert go(text, tmp_path / "one", "--grad-accum", 2) == 143
    for name, value in dict(env, RANK="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "PROCESSES", 2)
    assert train.main(argv) == 143 and "cpu x 2" in capsys.readouterr().out
    assert re.sub(r"\[Gloo\].*\n", "", second.communicate(timeout=60)[0]) == "" and second.returncode == 143
    assert saved(tmp_path / "two")["step"] == 3
    for a, b in zip(*(rows(tmp_path / out, "step", "loss", "grad_norm") for out in ("one", "two")), strict=True):
        one, two = list(map(float, a)), list(map(float, b))
        assert one[:2] == pytest.approx(two[:2], rel=1e-6) and one[2] == pytest.approx(two[2], rel=2e-3)
    assert "multiple" in refused(capsys, train.main, *argv, "--grad-accum", 3)


def test_without_a_compiler_and_with_remat_the_run_is_the_same(text, trained, tmp_path, monkeypatch, capsys):
    """A machine without a compiler must train, and say so in a line."""
    remat = []

    def fails(model):
        remat.append(model.remat)
        raise torch._dynamo.exc.BackendCompilerFailed(len, RuntimeError("no compiler"), None)
    monkeypatch.setattr(models.LM, "compile_memory", fails)
    assert go(text, tmp_path, *FLAGS, "--compile", "--remat") == 0 and remat == [True]
    torch.compiler.set_stance("default")
    assert re.search("torch.compile failed.*no compiler", capsys.readouterr().out)
    assert same(saved(tmp_path)["model"], saved(trained)["model"])


def test_a_run_that_is_too_large_makes_itself_smaller(text, tmp_path, monkeypatch, capsys):
    """Catches a step of another size, settings that no file tells."""
    real, fits = train.Text.loss, 2

    def loss(task, model, number):
        if task.tc.batch_size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(task, model, number)
    monkeypatch.setattr(train.Text, "loss", loss)
    flags = "--steps", 2, "--batch-size"
    assert go(text, tmp_path / "a", *flags, 8) == 0
    said, told = capsys.readouterr().out, json.loads((tmp_path / "a/config.json").read_text())["train"]
    assert said.count("out of memory; now") == 2 and (told["batch_size"], told["grad_accum"]) == (2, 4)
    assert saved(tmp_path / "a")["train"] == told
    assert go(text, tmp_path / "b", *flags, 2, "--grad-accum", 4) == 0
    assert same(*(saved(tmp_path / out)["model"] for out in "ab"))
    fits = 0
    again = "--resume", "--out", tmp_path / "a", "--steps", 3, "--device", "cpu"
    assert "--batch-size" in refused(capsys, train.main, *again, code=1) and saved(tmp_path / "a")["step"] == 2
    argv = [*NET, *RUN, "--data", text, "--out", tmp_path / "c"]
    assert "--remat" in refused(capsys, train.main, *argv, code=1) and not (tmp_path / "c").exists()


# ---- sampling

def speak(capsys, ckpt, *flags):
    assert sample.main(["--ckpt", str(ckpt), "--device", "cpu", "--tokens", "30", *map(str, flags)]) == 0
    return capsys.readouterr().out


def test_what_is_written_is_what_generate_says(trained, capsys):
    """Flags that do not reach the model, a seed that is ignored, a state that is not carried on."""
    model, tokenizer = train.rebuild(train.load_checkpoint(trained))
    how = dict(temperature=1.3, top_k=7, top_p=0.97, generator=torch.Generator().manual_seed(5))
    tokens = torch.as_tensor(tokenizer.encode("to be"))[None]
    expect = tokenizer.decode([t.item() for t in model.eval().generate(tokens, 30, **how)])
    flags = "--prompt", "to be", "--temperature", 1.3, "--top-k", 7, "--top-p", 0.97
    assert speak(capsys, trained, *flags, "--seed", 5) == f"to be{expect}\n"
    assert speak(capsys, trained, *flags, "--seed", 6) != f"to be{expect}\n"
    texts = speak(capsys, trained, "--prompt", "be", "--num", 3).split("---------------\n")
    assert len(set(texts)) == 3 and all(t.startswith("be") and len(t) == 33 for t in texts)


def test_prompts_and_stop_texts(trained, tmp_path, capsys, monkeypatch):
    """A byte order mark is no letter, line ends are kept, a stop text may lie across pieces, of which none is lost."""
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfthat\nis")
    expect = speak(capsys, trained, "--prompt", "that\nis")
    with open(tmp_path / "p.txt") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert speak(capsys, trained, "--prompt", "-") == expect
    stop = expect[15:18]
    assert speak(capsys, trained, "--prompt", "that\nis", "--stop", stop) == expect[: expect.index(stop, 7)] + "\n"
    for pieces in "one THE END THE ENDS", ["one T", "HE E", "ND TH", "E ENDS"]:
        assert "".join(sample.until("THE END", pieces)) == "one "
        assert "".join(sample.until("five", pieces)) == "".join(pieces)


def test_a_text_goes_on_from_a_saved_state(trained, tmp_path, capsys, monkeypatch):
    """Catches a state of another text, one that `| head` loses, a token read twice."""
    one, two, greedy = tmp_path / "one", tmp_path / "two", ("--temperature", 0, "--tokens", 12)
    whole = speak(capsys, trained, "--prompt", "to be", "--temperature", 0, "--tokens", 24)
    first = speak(capsys, trained, "--prompt", "to be", *greedy, "--save-state", one)
    assert first[:-1] + speak(capsys, trained, "--load-state", one, *greedy) == whole
    assert speak(capsys, trained, "--prompt", first[:-1], "--tokens", 0, "--save-state", two) == ""   # a text is read
    for prompt in "", "or not":
        assert len({speak(capsys, trained, "--load-state", path, *greedy, "--prompt", prompt)
                    for path in (one, two)}) == 1
    shutil.copytree(trained, other := tmp_path / "other")
    (other / "best.pt").unlink()
    torch.save(saved(other) | {"seconds": 0.0}, other / "ckpt.pt")
    assert "--save-state" in refused(capsys, sample.main, "--ckpt", other, "--load-state", one)
    monkeypatch.setattr(sys, "stdout", Closed())
    argv = ["--ckpt", trained, "--device", "cpu", "--prompt", "to be", *greedy, "--save-state", two]
    assert sample.main(list(map(str, argv))) == 0
    a, b = (torch.load(path, weights_only=True) for path in (one, two))
    assert a[2] == b[2] and same(tensors(a[1]), tensors(b[1]))


@pytest.mark.parametrize("call, tokens", [(2, 0), (2, 12), (9, 12)])
def test_ctrl_c_saves_what_was_read(call, tokens, trained, tmp_path, capsys, monkeypatch):
    """Catches a book that is read in vain: the file goes on where the text was left."""
    calls, real, greedy = [], models.LM.forward, ("--temperature", 0)
    whole = speak(capsys, trained, *greedy, "--prompt", "to be or not to be")

    def forward(*args):
        calls.append(args)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return real(*args)
    monkeypatch.setattr(models.LM, "forward", forward)
    monkeypatch.setattr(data, "PIECE", 4)
    argv = ["--ckpt", trained, "--device", "cpu", *greedy, "--prompt", "to be or not to be",
            "--tokens", tokens, "--save-state", tmp_path / "read"]
    assert sample.main(list(map(str, argv))) == 130
    said = capsys.readouterr().out[:-1] if tokens else "to be or not to be"
    assert len(calls) == call and len(said) == 18 + max(0, call - 4)
    more = "--load-state", tmp_path / "read", "--tokens", 48 - len(said)
    assert said + speak(capsys, trained, *greedy, *more) == whole


# ---- eval.py

class Stub(torch.nn.Module):
    """A model that says logits(tokens), with the state grow(state)."""

    def __init__(self, logits, grow=lambda state: torch.zeros(4), **config):
        super().__init__()
        self.p, self.config = torch.nn.Parameter(torch.zeros(1)), models.Config(**config)
        self.logits, self.grow = logits, grow

    def forward(self, tokens, state=None):
        return self.logits(tokens), self.grow(state)


def test_position_loss_by_hand():
    """Catches positions mixed up, windows counted twice: this model is sure from position 3 on."""
    def logits(x):
        return 50 * F.one_hot((x + 1) % 5, 5).float() * (torch.arange(x.shape[1]) >= 3)[:, None]
    at, n = eval.position_loss(Stub(logits), eval.evenly(torch.arange(85) % 5, 8, batch_size=3))
    close(at, torch.tensor([math.log(5)] * 3 + [0.0] * 5).double(), 1e-6)
    assert n == 10 and eval.position_loss(Stub(logits), eval.evenly(torch.arange(8 * 96 + 1) % 5, 8, 3))[1] == 32
    means = eval.buckets(torch.arange(100.0))
    assert means == [[0, 16, 7.5], [16, 32, 23.5], [32, 64, 47.5], [64, 100, 81.5]]


def test_twice(trained, monkeypatch, capsys):
    """Catches readings mixed up, a border that counts, a row without writes that still writes."""
    def logits(x):
        before = torch.cat([x[:, :1].expand(-1, 5), x[:, :-5]], 1)               # 6 tokens long: x_{t-5} is x_{t+1}
        return 50 * F.one_hot(before, 9).float() * (torch.arange(x.shape[1]) >= 5)[:, None]
    ids = torch.randint(9, (61,), generator=torch.Generator().manual_seed(1))
    at, n = eval.position_loss(Stub(logits), eval.read_twice(ids, 6, batch_size=4))
    assert (len(at), n) == (11, 32) and torch.allclose(at[:5], torch.full((5,), math.log(9)).double())
    assert at[6:].max() < 1e-6
    run = ["twice", "--ckpt", str(trained), "--device", "cpu"]
    assert "512" in refused(capsys, eval.main, *run)
    monkeypatch.setattr(eval, "LENGTHS", (8, 16))
    monkeypatch.setattr(eval, "DRAWN", 16)
    assert eval.main(run) == 0
    writes, frozen = [re.findall(r"\d\.\d{3} / \d\.\d{3}", line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert len(writes) == len(frozen) == 2 and writes != frozen


def test_repeated_windows():
    """Catches passages that do not come again, targets that are not the next tokens, a share that is another."""
    ids = torch.arange(65).expand(2000, -1)
    for on in (False, True):
        x, y = data.repeated(ids[:, :-1], ids[:, 1:], 0.25, on, 1, 2)
        back = ids - torch.cat([x, y[:, -1:]], 1)
        rows, period = back.bool().any(1), back.masked_fill(back == 0, 99).amin(1)
        assert (x[:, 1:] == y[:, :-1]).all() and 0.2 < rows.float().mean() < 0.3
        assert period[rows].min() == 16 and period[rows].max() == 32
        assert ((back == period[:, None]).sum(1) == period)[rows].all()


def test_a_block_that_looks_back():
    """Catches a key that does not start as the query of the token before, or does so in every block."""
    model, x = small("atlas", n_layer=2), torch.randn(2, 20, 16)
    for layer, equal in ((model.blocks[0].layer, False), (model.blocks[1].layer, True)):
        q, k, *_ = layer.project(x, layer.start(x))
        assert ((k[:, :, 1:] * q[:, :, :-1]).sum(-1).mean() > 0.97) == equal


def test_stream_tells_growth_and_nan(capsys):
    """Catches a check that never fails, or fails where a cache has to grow; targets that are not the next tokens."""
    ids, uniform = torch.arange(50) % 5, lambda x: torch.zeros(*x.shape, 5)
    for says, nats in (uniform, math.log(5)), (lambda x: 50 * F.one_hot((x + 1) % 5, 5).float(), 0):
        eval.stream(Stub(says), ids, 20_000)
        assert capsys.readouterr().out.count(f" {nats:.4f} ") == 10
    slowly = lambda state: torch.zeros(1000 if state is None else len(state) + 5)          # 9 % from the first tenth on
    with pytest.raises(common.Halt, match="state grows"):
        eval.stream(Stub(uniform, slowly), ids, 20_000)
    eval.stream(Stub(uniform, slowly, attention=True, attn_window=0), ids, 20_000)
    with pytest.raises(common.Halt, match="nan after 1,024 tokens"):
        eval.stream(Stub(lambda x: torch.full((*x.shape, 5), math.nan)), ids, 2_000)


def test_a_frozen_memory_stays_at_its_start(trained):
    """Catches --no-write that writes, or a model that no longer writes: it says what the memory is worth."""
    model = train.rebuild(train.load_checkpoint(trained))[0]
    for no_write, one in (True, eval.frozen(model)), (False, model):
        [state] = one(torch.arange(10)[None])[1]
        layer = one.blocks[0].layer
        assert no_write == all((w == m).all() for w, m in zip(layer.weights(state)[0], layer.M0))


def test_text_task_on_a_checkpoint(trained, text, capsys, monkeypatch):
    """Catches a split, a tokenizer or a window length that is not that of the checkpoint, and exit code 0 after NaN."""
    argv = ["--ckpt", str(trained), "--device", "cpu", "--stream"]
    assert eval.main([*argv, "2048"]) == 0
    said = capsys.readouterr().out
    model, tokenizer = train.rebuild(train.load_checkpoint(trained))
    val = data.split(tokenizer.encode(text.read_text()))[1]
    for carry in (False, True):
        assert f"{train.evaluate(model, val, 16, 8, carry=carry):.4f} nats/token" in said
    at, n = eval.position_loss(model, eval.evenly(val, 64, 8))
    assert f"{at[16:32].mean():.4f}   longer than in training" in said and f"mean of {n} windows of 64" in said
    assert "not the text" not in said and "a stream of 2,048 tokens" in said
    monkeypatch.setattr(eval, "position_loss", lambda *_: (torch.full((64,), math.nan), 1))
    assert eval.main([*argv, "0"]) == 1 and "not finite" in capsys.readouterr().err


def test_accuracy_of_an_oracle_and_of_a_fool():
    """Catches answers counted where nothing is asked, and sequences shared by training and test."""
    train_set, test_set = ([recall.mqar(4, 4, 4, 16, 24, recall.randomness(1337, i, test)) for i in range(3)]
                           for test in (False, True))
    answers = iter([y.clamp_min(0) for _, y in test_set])
    assert recall.accuracy(Stub(lambda x: F.one_hot(next(answers), 16).float()), test_set) == 1.0
    assert recall.accuracy(Stub(lambda x: torch.zeros(*x.shape, 16)), test_set) == 0.0
    assert len({x.numpy().tobytes() for x, _ in train_set + test_set}) == 6


def test_mqar_learns_to_recall(tmp_path, capsys):
    """Catches an optimizer that does not step, targets that are not those of the tokens."""
    argv = ("mqar --model linear --n-layer 1 --n-embd 32 --n-head 2 --vocab 8 --pairs 2 --seq-len 8 --steps 90 "
            "--chunk 8 --lr 1e-2 --device cpu --threads 1 --json").split()
    assert recall.main([*argv, str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["records"][0]["scores"]["2"] > 0.9


@pytest.mark.parametrize("task, names", [
    ("needle --lengths 16 128", ["atlas,memory=linear,steps=1", "transformer"]), ("mad", ["titans"]),
    ("mqar --pairs 1 2", ["atlas,n_embd=8,muon=False,lr=1e-3"]), ("ablation --seq-len 16", ["atlas", "atlas++"])])
def test_campaigns_go_on_where_they_stopped(task, names, tmp_path, capsys, monkeypatch):
    """Catches results that are trained again or lost, a row or a column that is missing, the wrong model of a name."""
    monkeypatch.setattr(data, "read", lambda name: data.Corpus("t", "", "to be or not to be " * 99))
    monkeypatch.setattr(recall, "ABLATION", {name: recall.ABLATION.get(name) for name in names})
    file, trained, made = tmp_path / "a.json", [], recall.trained
    monkeypatch.setattr(recall, "trained", lambda name, *rest: trained.append(name) or made(name, *rest))
    argv = f"{task} --steps 2 --n-layer 1 --n-head 1 --head-dim 4 --batch-size 2 --device cpu --json".split()
    argv += [str(file)] + ["--model", *names] * ("ablation" not in task)
    assert recall.main([*argv, "--seeds", "1"]) == 0
    once, first = len(trained), json.loads(file.read_text())["records"]
    assert recall.main([*argv, "--seeds", "1", "2"]) == 0 and len(trained) == 2 * once
    records = json.loads(file.read_text())["records"]
    assert records[:len(names)] == first and [r["model"] for r in records] == names * 2 and set(trained) == set(names)
    table = capsys.readouterr().out.split("seconds")[-1]
    assert all(f"\n{name} " in table for name in names) and table.count("+-") >= len(names)
    old = first[0]["settings"]                                # such as results/ has: more flags, fewer fields
    older = {**old, "steps_of": 3, "config": {k: a for k, a in old["config"].items() if k != "error"}}
    assert recall.matches(older, {**old, "config": {**old["config"], "error": "chunk"}})
    assert not any(recall.matches(old, {**old, key: 77}) for key in old)


def test_variants():
    """Catches the wrong model of a name, settings of another."""
    args = recall.parse(["mqar"])
    config, steps, lr = recall.variant("atlas,memory=linear,muon=False,steps=9,lr=0.1", args, vocab_size=9)
    assert (config.memory, config.muon, config.vocab_size, config.n_embd, steps, lr) == ("linear", False, 9, 64, 9, 0.1)
    assert recall.variant(re.search(r"transformer\S*", recall.__doc__)[0], args)[0].head_dim == 16     # 64 / 4 heads


def test_one_pass_by_hand(monkeypatch):
    """Catches errors of other pairs, another's step, a lost window or momentum: right angles add up."""
    monkeypatch.setattr(eval, "STEPS", torch.tensor([0.3, 0.7]))
    layer, step = models.Memory(models.configure("atlas", **{**eval.PLAIN, "head_dim": 6})), eval.STEPS[:, None]
    k, v, rest = torch.eye(6).expand(2, 1, 6, 6), torch.randn(2, 1, 6, 6), torch.arange(6, 0, -1)
    for window, momentum, left in ((1, False, 1 - step.expand(2, 6)), (3, False, (1 - step / 3) ** rest.clamp_max(3)),
                                   (1, True, 1 - step * (1 - 0.9 ** rest) / 0.1)):
        close(eval.one_pass(layer, k, v, 0, momentum, window), left.square().mean(1), 1e-5)


def test_capacity(tmp_path, capsys, monkeypatch):
    """Catches a rank that is off (Prop 1, 2), a row that is missing, a step that diverges taken for the best."""
    monkeypatch.setattr(eval, "DRAWS", 2)
    assert eval.main(["capacity", "--pairs", *"8 9 44 45 --device cpu --json".split(), str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["least squares, 8 features"][0] == [8, 9, 44, 45]
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("least")]
    assert [[e == "0.00" for e in row[-4:]] for row in rows] == [[True, False, False, False], [True, True, True, False]]
    assert eval.main("online --pairs 3 5 --device cpu".split()) == 0
    rows = [line.rsplit(None, 2) for line in capsys.readouterr().out.splitlines()[-24:]]
    assert len({name for name, *_ in rows}) == 24 and all(0 <= float(e) < 1 for _, *errors in rows for e in errors)


# ---- bench.py

def test_bench_smoke(tmp_path, capsys):
    """Catches a task that fails or lacks a contestant, JSON that cannot be read."""
    file, argv = tmp_path / "b.json", "--minutes 0 --width 64 --device cpu --json".split()
    for task, n, keys in (("layer --model omeganet transformer --lengths 8 16", 4, "name T"),
                          ("rule --length 16", 10, "window chunk muon_every shard T"),
                          ("peers --length 16", 5, "name chunk newton_schulz")):
        assert bench.main([*task.split(), *argv, str(file)]) == 0
        result, said = json.loads(file.read_text()), capsys.readouterr().out
        assert {*result["machine"]} == {"device", "threads", "torch"} and len(result["records"]) >= n
        for r in result["records"]:
            assert {*r} == {*keys.split(), "tokens_per_s", "spread"} and f"{r['tokens_per_s']:,.0f} tokens/s" in said


# ---- episodic.py

SHORT = "--n-embd 16 --n-head 2 --batch-size 2 --modulus 11 --threads 1 --device cpu --eval-every 2 --steps 4".split()
EPISODE = "--data text.txt --seq-len 12 --chunk 12 --head-dim 4 --features none"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A file of 4,000 words, 200 of them different; an evaluation is short."""
    for name, value in dict(WORDS=100, BATCHES=1, TESTS=1).items():
        monkeypatch.setattr(episodic, name, value)
    number = torch.randint(200, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(chr(97 + i // 20) + chr(97 + i % 20) for i in number))
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["language", "arithmetic"])
def test_episode(words, share, monkeypatch):
    """Catches an answer left visible, a batch that storage never showed, test sums that training shows."""
    for name, value in dict(SUMS=share, BATCHES=3, TESTS=10).items():
        monkeypatch.setattr(episodic, name, value)
    task = episodic.Episodes(episodic.Settings(data=words, seq_len=24, batch_size=4), CPU, torch.float32)
    V = task.words
    for test in (0, 1):
        episode, again, other = (list(task.draw(number, 3, test)) for number in (3, 3, 4))
        assert str(episode) == str(again) and str(episode) != str(other) and str(episode[0]) != str(episode[1])
        for kind, shown, asked, answers in episode:
            hidden = answers >= 0
            assert hidden.any(1).all() and (hidden.sum(1) <= episodic.MASKS).all() and (answers[~hidden] == -100).all()
            assert torch.equal(hidden, asked == V + 1) and torch.equal(asked.where(~hidden, answers), shown)
            if kind != "language":
                a, _, b, _, c = (shown[:, i::6] - V - 5 for i in range(5))
                pairs = set(map(tuple, task.pairs[test].tolist()))
                assert torch.equal((a + b) % task.tc.modulus, c)
                assert set(zip(a.flatten().tolist(), b.flatten().tolist())) <= pairs
    first, second = (set(map(tuple, a.tolist())) for a in task.pairs)
    assert not first & second and all((b, a) in side for side in (first, second) for a, b in side)

    class Oracle(torch.nn.Module):                            # its state is what was shown, in order
        def forward(self, tokens, state):
            asks, stored = (tokens == V + 1).any(), list(state or [])
            told = stored.pop(0) if asks and stored else tokens
            return torch.nn.functional.one_hot(told, task.vocab_size).float(), stored if asks else [*stored, tokens]
    measured = task.measure(Oracle())
    assert measured["carried"] == 1 and measured["reset"] == 0


@pytest.mark.parametrize("flags", [EPISODE, "--grok"])
def test_episodic_resume(words, tmp_path, monkeypatch, flags, capsys):
    """Catches a step number not carried on, optimizers not loaded, settings lost or changed."""
    monkeypatch.chdir(tmp_path)
    for out, code in ("a", 0), ("b", 128 + 15):
        assert episodic.main([*SHORT, *flags.split(), "--out", str(tmp_path / out)]) == code
        assert re.search(r"model +\w+: [\d,]+ parameters", capsys.readouterr().out)            # without a size
        monkeypatch.setattr(train, "noted_signals", common.contextmanager(lambda *_: iter([[15]])))
    monkeypatch.setattr(train, "noted_signals", common.noted_signals)
    assert episodic.main(["--resume", "--seed", "3", "--out", str(tmp_path / "b")]) == 2
    assert episodic.main(["--resume", "--threads", "1", "--device", "cpu", "--out", str(tmp_path / "b")]) == 0
    a, b = (train.load_checkpoint(tmp_path / out, text=False) for out in "ab")
    with pytest.raises(common.UserError):                       # of sample.py, eval.py: it has no tokenizer
        train.load_checkpoint(tmp_path / "a")
    assert a["step"] == b["step"] == 4 and all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    names = ["fitted", "held_out"] if "--grok" in flags else ["carried", "reset"]
    measures = [rows(tmp_path / out, *names) for out in "ab"]
    assert measures[0][-1] == measures[1][-1] and str(a["end"]) == str(b["end"])


def test_circles():
    """Circles have 1 and 1. Catches: a mean or frequency counted wrongly."""
    angle = 2 * math.pi * torch.arange(97)[:, None] * torch.tensor([3, 14, 40]) / 97
    E = torch.cat([angle.cos(), angle.sin()], 1) @ torch.randn(6, 64) + 5 * torch.randn(64)
    assert episodic.circles(E)[0] > 0.9999 and episodic.circles(E, 1)[0] < 0.9


def test_stablemax_and_perp_grad():
    """Catches: log(0), the 0 * inf of a branch not taken, a projection on the gradient instead of the weights."""
    x = torch.tensor([[0.0, -1.0, 1.0, 1e30, -1e30]], requires_grad=True)
    episodic.log_stablemax(x)[0, :3].sum().backward()
    assert x.grad.isfinite().all()
    y = torch.tensor([0.0, -1.0, 3.0])                        # s = 1, 1/2, 4
    close(episodic.log_stablemax(y).exp(), torch.tensor([1, 0.5, 4]) / 5.5, 1e-6)
    w, g = torch.nn.Parameter(torch.randn(5, 4)), torch.randn(5, 4)
    w.grad = g.clone()
    episodic.perpendicular([w, torch.nn.Parameter(torch.zeros(2))])
    ratio = (g - w.grad) / w                                  # what was taken is a multiple of w
    assert (w.grad * w).sum().abs() < 1e-5 and ratio.std() < 1e-4 < ratio.mean().abs()


# ---- README.md, results/ and the house

ROOT = Path(omega.__file__).resolve().parent
README, MORE, LADDER, SLIPS = ((ROOT / name).read_text(encoding="utf-8") for name in (
    "README.md", "results/README.md", "results/ladder.md", "results/paper.md"))
CODE = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.py"))}


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README + LADDER + SLIPS, re.S))
def test_readme_examples_run(block, monkeypatch, tmp_path):
    """Catches an example that a change of the API has broken."""
    monkeypatch.setattr(chunks, "run", chunks.run)
    monkeypatch.chdir(tmp_path)                               # one saves a state
    exec(block, {})


def parts(c):
    """The cells of README's table of parts, from a Config."""
    deep = {"linear": "linear", "mlp": f"MLP, expansion {c.expansion}"}
    ns = f"{c.ns_coefficients}, {c.ns_steps} steps" if c.muon else "none"
    every = {0: "once a chunk", 1: "yes"}[c.muon_every] if c.muon else "not here"
    return [c.window, c.error, c.chunk, "yes" if c.momentum else "no", ns, every, f"{c.features}, degree {c.degree}",
            deep[c.memory], "not here", c.forget, f"{c.max_norm:g}", f"block {c.lookback}" if c.lookback else "no"]


def test_readme_table_of_parts():
    """Catches a cell that is not what models.configure gives."""
    table = README.split("in the paper and here\n")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[3:-1]] for line in table.splitlines()[2:]]
    large = [parts(models.configure("atlas", size)) for size in ("170m", "195m", "340m", "760m", "1.3b")]
    assert all(column == large[0] for column in large)
    columns = [parts(models.configure("atlas", size)) for size in ("tiny", "baby", "170m")]
    columns.append(parts(models.configure("atlas-delta")))
    assert cells == [[str(cell) for cell in row] for row in zip(*columns)]


def patched(diff, *sources):
    """The sources after a diff, whose hunks fit one place each; .. at the end of a hunk is the rest of a line."""
    for hunk in re.findall(r"(?:^[ +-].*\n)+", diff, re.M):
        old, new = ("".join(re.findall(rf"^[ {sign}](.*\n)", hunk, re.M)).removesuffix("..\n") for sign in "-+")
        assert sum(source.count(old) for source in sources) == 1, f"not one place for {old}"
        sources = [source.replace(old, new) for source in sources]
    return sources


@pytest.mark.parametrize("diff", re.findall(r"```diff\n(.*?)```", README + LADDER.split("## Change")[1], re.S))
def test_readme_change_of_the_rule(diff, monkeypatch):
    """Catches a diff that no longer fits the files, or whose chunk form is another rule than its reference."""
    sources, changed = patched(diff, CODE["omega"], CODE["chunks"]), {}
    for name, source in zip(("omega", "chunks"), sources):
        monkeypatch.setitem(sys.modules, name, made := types.ModuleType(name))
        exec(source, made.__dict__)
        changed |= vars(made)
    rule, phi, x = problem(muon_every=2 * ("sign" in diff))
    ys = [play(form, rule, phi, x)[0] for form in (changed["run"], changed["omega_ref"], omega_ref)]
    close(ys[0], ys[1])
    assert not torch.allclose(ys[0], ys[2]), "nothing has changed"


GATED = dict(memory="gated", window=3, error="chunk")
RUNGS = [("linear", dict(chunk=1)), ("deltanet", dict(chunk=1)), ("titans", dict(chunk=1, memory="mlp")),
         ("omeganet", dict(chunk=1, memory="mlp")), ("atlas", dict(GATED, chunk=1)),
         ("atlas", dict(GATED, chunk=4, muon_every=1)), ("atlas", dict(GATED, chunk=4)),
         ("atlas", dict(chunk=4, window=3, **TOKEN)), ("atlas", dict(chunk=4, memory="mlp", **TOKEN))]


def test_ladder():
    """Catches a diff that does not fit, or makes another rule than the project's model."""
    source, *_ = re.findall(r"```python\n(.*?)```", LADDER, re.S)
    diffs = re.findall(r"```diff\n(.*?)```", LADDER.split("## Change")[0], re.S)
    for (name, given), diff in zip(RUNGS, ["", *diffs, ""], strict=True):        # the last one twice: matrix and MLP
        source, = patched(diff, source)
        exec(source, made := {})
        c = models.configure(name, forget="zero", max_norm=0.0, **given)
        rule, phi, x = problem(features=c.features, momentum=c.momentum, S0=False, **rule_of(c)._asdict())
        x, M0 = x if c.keep else filled(x, keep=1.0), [w for n, w in x.items() if n.startswith("M0")]
        made["NS"] = partial(newton_schulz_ref, steps=rule.ns_steps, coefficients=rule.ns_coefficients)
        want = play(omega_ref, rule, phi, x)[0]
        for b, h in (0, 0), (1, 1):
            parts = [a if a is None else a[b, h] for a in map(x.get, ("q", "k", "v", *Gates._fields[:4]))]
            close(made["rule"](rule.memory, [w[h] for w in M0], phi, *parts, rule.chunk), want[b, h])


def test_commands(monkeypatch, capsys):
    """Catches a flag or model that was renamed in a program, and not in a command; sizes that do not fit."""
    spans = re.findall(r"^ *((?:python|torchrun) .*?)(?:  | [<#]|$)", "\n".join([README, *CODE.values()]), re.M)
    spans += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", README + MORE + LADDER, flags=re.S))
    commands = [re.search(r"(?:python|torchrun \S+ \d) (?!test_all)(\w+)\.py(.*)", a, re.S) for a in spans]
    assert len(commands := [c for c in commands if c]) > 40
    monkeypatch.setattr(data, "read", lambda name: data.Corpus("t", "", "to be or not to be " * 99))
    monkeypatch.setattr(train, "launch", lambda given, read=train.settings, *_, **how: read(given) and None)
    monkeypatch.setattr(recall, "campaign", lambda args, *_, **how: {
        name: dict(text=[1.0 * len(recall.variant(name, args))]) for name in args.model})
    for owner in ("data.make_files", "sample.speak", "train.plot", "common.need",
                  "episodic.check_picture"):
        monkeypatch.setattr(owner, lambda *_: None)
    idle = lambda *_: None
    idle.__doc__ = "Do nothing."
    for module in bench, eval:
        monkeypatch.setattr(module, "TASKS", dict.fromkeys(module.TASKS, idle))
    monkeypatch.chdir(ROOT)                                   # --json and --plot name a folder that is there
    for c in commands:
        if importlib.import_module(c[1]).main(shlex.split(c[2].replace("NAME", "mixing"))):
            pytest.fail(f"{c[0]}: {capsys.readouterr().err}")


def test_size_and_links():
    """Catches a line too wide to read, a dead link."""
    assert max(len(line) for text in CODE.values() for line in text.splitlines()) <= 120
    for folder, text in (".", README), ("results", MORE + LADDER + SLIPS):
        assert [a for a in re.findall(r"\]\(([^)#]+)", text) if not (ROOT / folder / a).exists()] == []


def test_the_layer_needs_five_files_beside_it(tmp_path):
    """Catches an import that a model of one's own would have to copy, too."""
    for name in "memory poly muon omega chunks layer".split():
        (tmp_path / f"{name}.py").write_text(CODE[name])
    subprocess.run([sys.executable, "-c", """if True:
        import torch, layer
        made, x = layer.Memory(layer.settings(n_embd=16, n_head=2)), torch.randn(2, 70, 16)
        a, state = made(x[:, :40])
        b, _ = made(x[:, 40:], state)
        assert torch.allclose(torch.cat([a, b], 1), made(x)[0], atol=1e-5)
        b.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
        """], check=True, cwd=tmp_path)


# ---- python test_all.py --mutants: faults of the mathematics, each with a test that must notice it

MUTANTS = [                               # what breaks, function, its source, what that becomes, a test that notices
    ("a coefficient is mistyped", muon.newton_schulz, "alpha=c", "alpha=1.2 * c", "ns_against_svd"),
    ("a zero matrix gives 0 / 0", muon.normalised, ".clamp_min(0.5).rsqrt()", ".rsqrt()", "ns_of_any_size"),
    ("a small matrix stays small", muon.normalised, "1 / largest.clamp_min(smallest)", "1", "ns_of_any_size"),
    ("one Gram matrix for all steps", muon.newton_schulz, "GRAM_STEPS", "9", "ns_in_float32"),
    ("a step on R is lost", muon.newton_schulz, "R = Q if step == first else Q @ R", "R = Q", "ns_is_the_plain"),
    ("Nesterov is lost", train.Muon.direction, 'p.grad.lerp(B, group["momentum"])', "B", "outer_muon"),
    ("Muon trains the head", train.make_optimizers, 'and not name.startswith("head.")', "", "who_trains"),
    ("half of a large batch is lost", train.rehearse, "2 * tc.grad_accum", "tc.grad_accum", "too_large"),
    ("multinomial weights without root", poly.Features.forward, ".to(x.dtype).sqrt()", ".to(x.dtype)", "phi_kernel"),
    ("exp features without exp", dot.reading_rows, "(x @ keys.mT).exp()", "x @ keys.mT", "monomials_converge"),
    ("a mean for a sum", memory.loss, "(y - v).square().sum(-1)", "(y - v).square().mean(-1)", "losses_by_hand"),
    ("a lost residual", memory.output, "return r + (F.rms_norm", "return (F.rms_norm", "memory_as_printed"),
    ("a misplaced bracket", memory.output_error, "(e - n * (n * e)", "(e - (n * e)", "memory_as_printed"),
    ("the paper's rule does not decay", omega.paper, "keep[t] * w - step", "w - step", "is_the_rule"),
    ("an update with the other sign", omega.update, "else due * O", "else -due * O", "matrix_by_hand"),
    ("a window off by one", omega.omega_ref, "t - rule.window + 1)", "t - rule.window)", "matrix_by_hand"),
    ("an update without momentum", omega.omega_ref, "momentum * s + d", "d", "matrix_by_hand"),
    ("every token is a boundary", omega.omega_ref, "if t % rule.chunk == 0:", "if True:", "matrix_by_hand"),
    ("errors before the block's steps", omega.omega_ref, "W[-1] - U[-1]", "W[-1]", "omega_is_omega_ref"),
    ("a state loses pairs", omega.since, "pos + rule.window - 1)", "pos)", "omega_is_omega_ref"),
    ("a ball that enlarges", omega.Rule.bound, "self.ball / n.clamp_min(self.ball)", "self.ball / n", "run_away"),
    ("sums from the block's first token on", chunks.decays, ".tril(-1).cumsum(1)", ".cumsum(1)", "omega_is_omega_ref"),
    ("a window in the other order", chunks.times_gate, "F.pad(gate, (0, c))", "F.pad(gate.flip(-1), (0, c))",
     "omega_is_omega_ref"),
    ("a new anchor at each block", chunks.run_all, "if block.start % rule.chunk == 0:", "if True:",
     "omega_is_omega_ref"),
    ("the last block of a chunk is lost", chunks.run_all, "(chunk_ends or len(block) == rule.muon_every)",
     "len(block) == rule.muon_every", "omega_is_omega_ref"),
    ("a state that does not know of a reset", chunks.run_all, "boundary = W, S\n            anchor",
     "pass\n            anchor", "test_reset"),
    ("the last token reads plain steps", chunks.read, "if W_end:", "if False:", "omega_is_omega_ref"),
    ("errors with the other sign", chunks.errors_at_tokens, "A = before", "A = -before", "omega_is_omega_ref"),
    ("a step that nothing divides", chunks.errors_at_tokens, "unitriangular=True) / size", "unitriangular=True)",
     "learns_a_pair"),
    ("Newton-Schulz without S_0", chunks.write, "u + mix.drift[:, -1:] * s for", "u for", "omega_is_omega_ref"),
    ("reading without P", chunks.read, "(mix.P * scores) @ d", "scores @ d", "omega_is_omega_ref"),
    ("pairs before the first token", chunks.with_past, "(pair >= missing)", "(pair >= 0)", "omega_is_omega_ref"),
    ("shards from the whole's memory", shards.shards, "M0, n * B", "whole.M0 or M0, n * B", "test_shards"),
    ("a closed gate forgets", layer.Memory.make_gates, "opened * (-keep)", "(-keep)", "block_by_hand"),
    ("steps that add up", layer.Memory.most, "else 1 - momentum", "else 1", "do_not_explode"),
    ("short texts vanish", layer.Memory.project, "inputs[:, -n:].clone()", "qkv[:, -n:].clone()", "test_reading"),
    ("padding writes", layer.masked, "gate * looks, reset)", "gate, reset)", "test_padding"),
    ("a reset is not told", layer.masked, "gate * looks, reset)", "gate * looks)", "test_reset"),
    ("M0 does not learn", layer.Memory.with_M0, "tuple(self.M0)", "tuple(m.detach() for m in self.M0)", "every_model"),
    ("--remat in vain", models.LM.forward, "self.remat and", "False and", "test_remat"),
    ("top_p stops too early", models.sample, "probs.cumsum(-1) - probs", "probs.cumsum(-1)", "test_sample"),
    ("attention's window off by one", wiring.attend, "(j > i - w)", "(j >= i - w)", "attention_by_hand"),
    ("MAC reads what it has just written", wiring.Wiring.segment, "state.frozen or self", "self", "test_reading"),
    ("MAC writes its input", wiring.Wiring.segment, "self.memory(y, inner", "self.memory(x, inner", "wirings_by_hand"),
    ("a surprise after the write", eval.watch, "k.roll(-1, 2)", "k", "test_probe"),
]


def broken(function, old, new):
    """Return the code of a function whose source has been changed."""
    function, made = inspect.unwrap(function), {}
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{function.__qualname__} has no {old!r}"
    source = "class Made:\n" + textwrap.indent(source.replace(old, new), "    ")                 # super() needs a class
    exec(source, function.__globals__, made)
    return inspect.unwrap(vars(made["Made"])[function.__name__]).__code__


def test_every_mutant_has_its_text_and_its_test():
    """Catches: a fault that nobody tries any more, for a line or a test was renamed."""
    for _, *fault, pattern in MUTANTS:
        assert broken(*fault) and any(pattern in name for name in globals()), pattern


def mutants():
    """Make each fault in a process of its own and run its tests there -> how many they did not notice."""
    survivors = 0
    for what, function, old, new, pattern in MUTANTS:
        code = broken(function, old, new)
        if not os.fork():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            inspect.unwrap(function).__code__ = code
            os._exit(pytest.main(["-xq", "-p", "no:cacheprovider", "-k", pattern, __file__]))
        noticed = os.waitstatus_to_exitcode(os.wait()[1]) == 1
        print("noticed " if noticed else "SURVIVED", what, flush=True)
        survivors += not noticed
    return survivors


if __name__ == "__main__" and sys.argv[1:] == ["--mutants"]:
    sys.exit(min(1, mutants()))
