"""test_all.py - all tests. They need no network, no GPU, and no files but those of this folder.

    pytest test_all.py                    one to two minutes; tests of a GPU are skipped without one
    python test_all.py --mutants          breaks the rule in 21 ways; a test must notice each

The tests stand in the order of the modules. A docstring says which mistakes a test catches: what it
would notice if someone made it. Numbers are float64 unless a test is about another type.
"""
import csv
import hashlib
import importlib
import io
import json
import math
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from torch.distributed import fsdp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import chunks
import common
import data
import dot
import episodic
import eval
import memory
import models
import muon
import recall
import sample
import shards
import train
import wiring
from layer import detach, select, settings
from memory import LOSSES, MEMORIES
from muon import newton_schulz, newton_schulz_ref, right_factor
from omega import Gates, Rule, omega_ref, paper, start
from poly import Features

ROOT = Path(chunks.__file__).resolve().parent


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    """Set what an earlier test may have changed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


# ---- random tensors, and comparisons

def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def unit(*shape):
    return F.normalize(randn(*shape), dim=-1)


def tensors(tree):
    """Return the tensors in a tuple, list or dict, however nested, without what is no tensor."""
    return [a for a in tree_leaves(tree) if isinstance(a, torch.Tensor)]


def close(found, wanted, tol=1e-10):
    """Assert that tensors, or trees of them, are equal up to `tol` of the largest number."""
    for a, b in zip(tensors(found), tensors(wanted), strict=True):
        size = b.detach().abs().max().item() if b.numel() else 0
        atol = tol * max(1.0, size)
        torch.testing.assert_close(a, b, rtol=0, atol=atol, check_dtype=False)


def finite(tree):
    return all(a.isfinite().all() for a in tensors(tree))


def gradients(loss, model):
    """Return the gradients of a loss by all parameters of a model."""
    return list(torch.autograd.grad(loss, list(model.parameters())))


# ---- muon.py

def by_right_factor(S, *how):
    """Return NS(S) = S R, with R from S^T S alone."""
    if S.shape[1] < S.shape[2]:
        return by_right_factor(S.mT, *how).mT
    return S @ right_factor(S.mT @ S, *how)


FORMS = newton_schulz, newton_schulz_ref, by_right_factor


def with_singular_values(values, m, n):
    """Return random matrices U diag(values) Vh (2, m, n), and their polar factors U Vh."""
    U, _, Vh = torch.linalg.svd(randn(2, m, n), full_matrices=False)
    return (U * values) @ Vh, U @ Vh


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m, n", [(16, 16), (8, 48), (48, 8)])
def test_newton_schulz_evens_out_singular_values(form, m, n):
    """Catches a mistyped coefficient, a tall matrix on its long side, a direction that turns."""
    decades = torch.logspace(0, -2, min(m, n))
    S, polar = with_singular_values(decades, m, n)
    O = form(S)
    values = torch.linalg.svdvals(O)
    assert 0.68 < values.min()
    assert values.max() < 1.21
    close(O @ polar.mT, polar @ O.mT)                         # O = U f(s) V^T, polar = U V^T
    close(form(S, 30, "cubic"), polar)


@pytest.mark.parametrize("name", muon.COEFFICIENTS)
def test_newton_schulz_is_the_printed_iteration(name):
    """Catches a step left out, an input that is overwritten, a wrong outer gradient."""
    a, b, c = muon.COEFFICIENTS[name]
    S = randn(2, 8, 20).requires_grad_()
    before = S.detach().clone()
    up = randn(2, 8, 20)
    X = S / S.norm(dim=(1, 2), keepdim=True)
    for steps in range(1, 8):
        G = X @ X.mT
        X = a * X + b * G @ X + c * G @ G @ X
        wanted = torch.autograd.grad(X, S, up, retain_graph=True)
        for form in FORMS:
            Y = form(S, steps, name)
            close(Y, X)
            close(torch.autograd.grad(Y, S, up), wanted, 1e-9)
    assert torch.equal(S, before)


@pytest.mark.parametrize("form", FORMS)
def test_newton_schulz_of_tiny_huge_and_zero_matrices(form):
    """Catches 0 / 0 at the first momentum, in the gradient too, and an epsilon."""
    S = randn(2, 8, 12)
    close(form(1e-8 * S), form(S))
    close(form(1e8 * S), form(S))
    zero = torch.zeros(2, 8, 12, requires_grad=True)
    O = form(zero)
    O.sum().backward()
    assert not O.any()
    assert not zero.grad.any()
    for exponent in range(6, 24):
        small = (10.0 ** -exponent * S).float().requires_grad_()
        O = form(small)
        close(O, form(S) * O.any(), 1e-4)                     # all of it, or 0
        assert finite(torch.autograd.grad(O.sum(), small))


def test_newton_schulz_in_float32():
    """Catches too many steps on one Gram matrix, where low ranks blow up."""
    low = randn(2, 48, 3) @ randn(2, 3, 8)
    S = (low + 1e-6 * randn(2, 48, 8)).float()
    for steps, name in (10, "muon"), (30, "cubic"):
        values = torch.linalg.svdvals(newton_schulz(S, steps, name))
        assert values.max() < 1.3
    for name, most in muon.MOST_STEPS.items():
        wanted = newton_schulz_ref(low, most, name)
        close(by_right_factor(low.float(), most, name), wanted, 2e-3)


# ---- poly.py

def make_phi(kind, dim, degree=2):
    """Return features with random scales: 1 / sqrt(i!) hides mistakes in degrees 0 and 1."""
    phi = Features(kind, dim, degree, sketch_dim=5).double()
    for p in phi.parameters():
        p.data = 0.5 + rand(*p.shape)
    return phi


@pytest.mark.parametrize("dim, degree", [(3, 2), (3, 4), (1, 3)])
def test_monomials_have_the_kernel_of_a_power(dim, degree):
    """Catches a multinomial weight without its root, a monomial too few."""
    phi = make_phi("monomial", dim, degree)
    binomial = [math.comb(degree, i) ** 0.5 for i in range(degree + 1)]
    phi.scale.data = torch.tensor(binomial, dtype=torch.float64)
    x, y = randn(2, 5, dim), randn(2, 7, dim)
    power = (1 + x @ y.mT) ** degree
    close(phi(x) @ phi(y).mT, power)
    close(phi.inner(x, y), power)
    assert phi(x).shape[-1] == phi.out_dim == math.comb(dim + degree, degree)


def test_sketch_is_right_on_average():
    """Catches a wrong scale of the random matrices, and ones that a checkpoint does not hold."""
    x = unit(2, 6)
    phi, other = (Features("sketch", 6, sketch_dim=9999, seed=seed).double() for seed in (1, 2))
    a, b = phi(x)[:, 7:]                                      # degree 2, of scale 1 / sqrt(2)
    close(2 * a @ b, (x[0] @ x[1]) ** 2, 0.1)
    assert not torch.equal(phi(x), other(x))
    other.load_state_dict(phi.state_dict())
    assert torch.equal(phi(x), other(x))


# ---- memory.py

def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / 2 ** 0.5))


def printed(kind, x, r, W):
    """Return M(x) of Eq 42 or 43 from x = phi(k) and the residual r = k."""
    if kind == "linear":
        return x @ W[0]
    if kind == "mlp":
        return r + gelu(x @ W[0]) @ W[1]
    return r + (gelu(x @ W[0]) * (x @ W[1])) @ W[2]


def weights(kind, e, d, hidden, *lead):
    """Return random matrices (*lead, ..) of a memory with e features, outputs d and this width."""
    shapes = memory.shapes(kind, e, hidden, d)
    return [0.5 * randn(*lead, *shape) for shape in shapes]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_and_its_gradient(kind, loss, norm):
    """Catches a lost residual, a swapped gate, a gradient that is not the loss's."""
    x, r = randn(2, 7, 5), randn(2, 7, 3)
    v = 2 * randn(2, 7, 3)
    W = [w.requires_grad_() for w in weights(kind, 5, 3, 4, 2)]
    said = memory.apply(kind, W, x, r, norm)
    if norm and kind != "linear":
        close((said - r).square().mean(-1), torch.ones(2, 7), 1e-3)
    else:
        close(said, printed(kind, x, r, W))
    wanted = torch.autograd.grad(memory.loss(loss, said, v).sum(), W)
    a, z = memory.enter(kind, W, x)
    target = memory.target(kind, loss, r, v)
    d = memory.output_error(kind, loss, a @ W[-1], target, norm)
    pairs = memory.gradients(kind, W, x, a, z, d)
    close([a.mT @ d for a, d in pairs], wanted)


def test_losses_by_hand():
    """Catches a mean for a sum, a sign that writes - v k^T, an unknown name that runs."""
    y, v = torch.tensor([3.0, -1.0]), torch.tensor([1.0, -1.5])
    wanted = dict(l2=2 + 0.125, dot=-4.5, huber=1.5 + 0.125, lp=(8 + 0.125) / 3)
    found = {kind: memory.loss(kind, y, v).item() for kind in LOSSES}
    assert found == pytest.approx(wanted)
    with pytest.raises(ValueError, match="'new'"):
        memory.loss("new", y, v)


# ---- omega.py and chunks.py: the chunk form is the token-by-token rule
#
# A form of the rule is a function form(rule, phi, q, k, v, gates, state) -> y, state: omega_ref,
# chunks.run or dot.run. `problem` draws what it reads, `play` runs it, and `results` also takes
# gradients. `paper` is the rule for one head, as it is printed.

def problem(T=11, features="none", degree=2, momentum=True, S0=True, reset=(), D=3, **rule):
    """Return a random problem for 2 rows and 2 heads: a Rule, phi, and a dict x of the inputs. x
    also has the matrices M0.0, M0.1, .. of the first memory and, with S0=True, those of the first
    momentum, S0.0, S0.1, .."""
    B, H = 2, 2
    rule = Rule(**dict(window=3, chunk=4) | rule)
    phi = make_phi(features, D, degree)
    x = dict(
        q=unit(B, H, T, D),
        k=unit(B, H, T, D),
        v=randn(B, H, T, D),
        keep=0.5 + rand(B, H, T) / 2,
        step=0.3 * rand(B, H, T),
        momentum=0.9 * rand(B, H, T) if momentum else None,
        gate=rand(B, H, T, rule.window))
    for i, w in enumerate(weights(rule.memory, phi.out_dim, D, 3, H)):
        x[f"M0.{i}"] = w
        if S0 and momentum:
            x[f"S0.{i}"] = 0.1 * randn(B, *w.shape)
    for a in tensors(x):
        a.requires_grad_()
    if reset:                                                 # where row 0 begins anew
        x["reset"] = torch.zeros(B, H, T, dtype=torch.bool)
        x["reset"][0, :, list(reset)] = True
    return rule, phi, x


def named(x, prefix):
    """Return the inputs whose names begin with M0 or S0."""
    return tuple(a for name, a in x.items() if name.startswith(prefix))


def play(form, rule, phi, x, cuts=(), state=None):
    """Run a form of the rule over all tokens, cut into pieces at `cuts`. Return y and the state."""
    if state is None:
        momentum = x["momentum"] is not None
        state = start(rule, phi, named(x, "M0"), 2, momentum)
    if "S0.0" in x:
        state = state._replace(S=named(x, "S0"))

    ys, T = [], x["q"].shape[2]
    inputs = [x.get(name) for name in ("q", "k", "v", *Gates._fields)]
    for a, b in zip((0, *cuts), (*cuts, T)):
        q, k, v, *gates = [part if part is None else part[:, :, a:b] for part in inputs]
        y, state = form(rule, phi, q, k, v, Gates(*gates), state)
        ys.append(y)
    return torch.cat(ys, 2), state


def results(form, rule, phi, x, cuts=()):
    """Return all that two forms must agree on: y, the state, the memory as a query reads it at the
    end, and the gradients by all inputs of a random sum of these."""
    y, state = play(form, rule, phi, x, cuts)
    now = chunks.weights(rule, phi, state)

    torch.manual_seed(1)
    outer = sum((a * randn(*a.shape)).sum() for a in tensors([y, state, now]))
    leaves = [a for a in tensors(x) if a.requires_grad] + list(phi.parameters())
    found = torch.autograd.grad(outer, leaves, allow_unused=True, materialize_grads=True)
    return [y, state, now, found]


def random_rule(seed):
    """Return random arguments of `problem` that fit each other."""
    draw = random.Random(seed)
    chunk = draw.choice([1, 2, 4, 8])
    case = dict(
        chunk=chunk,
        T=draw.choice([1, 7, 11, 17, 21]),
        window=draw.choice([1, 2, 3, 5, 12]),
        memory=draw.choice(MEMORIES),
        features=draw.choice(["none", "monomial"]),
        momentum=draw.random() < 0.7,
        ball=draw.choice([0.0, 0.0, 0.5]),
        ns_coefficients=draw.choice(["muon", "cubic"]))
    if seed % 4 == 0:
        case |= dict(error="token", window=1, loss=draw.choice(["l2", "l2", "dot"]))
    else:
        case["loss"] = draw.choice(LOSSES)
        case["norm"] = draw.random() < 0.3
        case["muon"] = draw.choice(["none", "token", "token", "chunk"])
    if draw.random() < 0.5:
        case["forget"] = "start"
        case["reset"] = range(0, case["T"], 2 * chunk)
    return case


@pytest.mark.parametrize("seed", range(40))
def test_chunk_form_is_the_reference(seed):
    """Catches a slip in one form: an index, a coefficient, a lost gradient, a state cut short."""
    rule, phi, x = problem(**random_rule(seed))
    T = x["q"].shape[2]
    before = [a.detach().clone() for a in tensors(x)]

    # whole, and in two or three pieces, with gradients
    tol = 1e-9 if rule.muon == "token" else 1e-10             # its gradients are steep
    wanted = results(omega_ref, rule, phi, x)
    close(results(chunks.run, rule, phi, x), wanted, tol)
    cuts = sorted({T // 3, T - 1} - {0})
    close(results(chunks.run, rule, phi, x, cuts), wanted, tol)

    # token by token, and three tokens at a time
    with torch.no_grad():
        close(play(chunks.run, rule, phi, x, range(1, T)), wanted[:2])
        close(play(omega_ref, rule, phi, x, range(2, T, 3)), wanted[:2])

    # no input has changed
    assert all(map(torch.equal, tensors(x), before))
    if rule.ball:
        norms = [w.detach().norm(dim=(-2, -1)).max() for w in wanted[1].W]
        assert max(norms) <= 1.001 * rule.ball


INPUTS = "q k v keep step momentum gate".split()


@pytest.mark.parametrize("kind", MEMORIES)
def test_reference_and_paper_are_the_printed_rule(kind):
    """Catches a reference that drifts from Eq 9, 33 and 32, which stand here once more."""
    how = dict(memory=kind, muon="token", chunk=1, features="elementwise", S0=False)
    rule, phi, x = problem(T=7, **how)
    wanted, _ = play(omega_ref, rule, phi, x)
    for b, h in (0, 0), (0, 1), (1, 0):
        W = [w[h].detach().requires_grad_() for w in named(x, "M0")]
        S = [torch.zeros_like(w) for w in W]
        inputs = [x[name][b, h] for name in INPUTS]
        close(paper(kind, W, phi, *inputs), wanted[b, h])

        q, k, v, keep, step, momentum, gate = inputs
        for t in range(7):
            loss = 0
            for i in range(max(0, t - 2), t + 1):
                error = printed(kind, phi(k[i]), k[i], W) - v[i]
                loss = loss + gate[t, i - t - 1] * error.square().sum() / 2                 # Eq 9
            g = torch.autograd.grad(loss, W)
            S = [momentum[t] * s + a for s, a in zip(S, g)]                                # Eq 33
            W = [keep[t] * w - step[t] * newton_schulz_ref(s) for w, s in zip(W, S)]       # Eq 32
            close(printed(kind, phi(q[t]), q[t], W), wanted[b, h, t])


MATRIX = {                                # arguments of `problem`; usual: window 1, chunk 1, no
                                          # momentum, no Newton-Schulz
    "to M0": dict(forget="start"),
    "Eq 16": dict(window=3, chunk=4),
    "Eq 55": dict(window=3, loss="dot"),
    "Eq 33": dict(window=3, momentum=True),
    "Eq 15": dict(error="token", chunk=4, momentum=True),
    "Eq 32": dict(window=3, muon="token", momentum=True),
    "Eq 40": dict(window=3, chunk=4, muon="token", momentum=True),
    "choice 15": dict(chunk=8, muon="chunk", momentum=True),
    "choice 15, no momentum": dict(chunk=4, muon="chunk"),
}


@pytest.mark.parametrize("case", MATRIX.values(), ids=MATRIX.keys())
def test_matrix_by_hand(case):
    """Catches errors at another W, a wrong decay, Newton-Schulz of another sum."""
    usual = dict(T=17, memory="linear", window=1, chunk=1, momentum=False, S0=False)
    rule, phi, x = problem(**usual | case)
    W, S, ys = x["M0.0"], 0, []
    seen = {name: x[name] for name in INPUTS if x[name] is not None}
    home = W if rule.forget == "start" else 0
    for t in range(17):
        now = {name: a[:, :, t, None, None] for name, a in seen.items()}
        keep, step = now["keep"], now["step"]
        if t % rule.chunk == 0:
            anchor, U, left, due = W, 0, 1, 0

        # the gradient of the window, with its errors at the anchor or at the token before
        i = slice(max(0, t - rule.window + 1), t + 1)
        k, v = x["k"][:, :, i], x["v"][:, :, i]
        gate = x["gate"][:, :, t, rule.window - k.shape[2]:, None]
        error = k @ (W if rule.error == "token" else anchor) - v if rule.loss == "l2" else -v

        # keys have a length of 1, so error = "token" divides by 1
        S = now.get("momentum", 0) * S + (gate * k).mT @ error
        U = keep * U + step * (newton_schulz_ref(S) if rule.muon == "token" else S)
        left, due = keep * left, keep * due + step
        if rule.muon == "chunk" and (t + 1) % rule.chunk == 0:
            U = due * newton_schulz_ref(U)
        W = home + left * (anchor - home) - U
        ys.append(now["q"][..., 0, :] @ W)

    for form in chunks.run, omega_ref:
        y, state = play(form, rule, phi, x)
        close(y, torch.cat(ys, 2))
    close(chunks.weights(rule, phi, state)[0], [W])


@pytest.mark.parametrize("how", [
    dict(memory="linear", forget="zero", error="token", window=1),
    dict(memory="gated", loss="dot", forget="start")], ids=str)
def test_monomials_converge_to_exp(how):
    """Catches keys that dot.py loses or shifts: Eq 22 is a limit, with gradients, in pieces too."""
    rule, phi, x = problem(T=9, features="exp", S0=False, **how)
    leaves = tensors(x)

    def numbers(form, phi, x, cuts=()):
        begin = dot.start if form is dot.run else start
        state = begin(rule, phi, named(x, "M0"), 2)
        y, _ = play(form, rule, phi, x, cuts, state)
        grads = torch.autograd.grad(y.square().mean(), leaves)
        return torch.cat([a.flatten() for a in (y, *grads)])

    wanted = numbers(dot.run, phi, x)
    for cuts in (3, 6), (1, 5, 8), range(1, 9):
        close(numbers(dot.run, phi, x, cuts), wanted)

    errors = []
    for degree in 1, 4, 9:
        taylor = Features("monomial", 3, degree).double()
        grown = dict(x)
        for i in range(memory.firsts(rule.memory)):           # M0 reads the part of degree 1
            rows = 0, 0, 1, taylor.out_dim - 4
            grown[f"M0.{i}"] = F.pad(x[f"M0.{i}"], rows)
        found = numbers(omega_ref, taylor, grown)
        errors.append((found - wanted).abs().max().item())
    assert errors[0] > 10 * errors[1] > 1000 * errors[2], errors


def test_a_bound_takes_its_scale_for_a_constant():
    """Catches a bound (choice 22) that enlarges, or that the outer gradient goes through."""
    for size, factor in (0.01, 1.0), (100.0, 0.05):
        W = size * F.normalize(randn(16), dim=0).view(4, 4)
        W.requires_grad_()
        bounded, = Rule(ball=5.0).bound([W])
        close(bounded, factor * W)
        close(torch.autograd.grad(bounded.sum(), W)[0], factor + 0 * W)


# ---- layer.py, wiring.py, shards.py, models.py: the family in small
#
# A model is named by its preset and what differs from it, as atlas,wiring=mac. `made` builds it
# small, and `shaken` moves its parameters away from their simple starting values.

def value_of(text):
    """Return the value of a setting from its text: a bool, a number or a word."""
    if text in ("True", "False"):
        return text == "True"
    if text in ("inf", "nan"):
        return float(text)
    return int(text) if text.isdigit() else text


def made(name, **more):
    """Return the model of a name like atlas,wiring=mac with everything of its preset, but small:
    narrow, and with windows and chunks of a few tokens. What the name and `more` say counts
    first."""
    preset, *changes = name.split(",")
    given = dict(change.split("=") for change in changes)
    given = {key: value_of(text) for key, text in given.items()} | more

    usual = vars(models.Config()) | models.PRESETS[preset] | given
    small = dict(vocab_size=11, n_layer=1, n_head=2, n_embd=16, head_dim=8)
    small |= dict(chunk=4, persistent=2, expansion=1)
    if preset in models.DEEP:
        small["memory"] = "mlp"
    for window in "window", "attn_window":
        if usual[window] > 1:
            small[window] = 3
    return models.build(preset, **small | given)


def shaken(model):
    """Return the model in float64, with every parameter moved, as zeros and ones hide mistakes."""
    for p in model.double().parameters():
        p.data += 0.2 * randn(*p.shape)
    return model


def tokens(*shape):
    """Return random tokens of the vocabulary that `made` gives a model."""
    return torch.randint(11, shape)


def loss_and_gradients(model, x, mask=None):
    loss = model.loss(x[:, :-1], x[:, 1:], mask)
    return [loss, *gradients(loss, model)]


def in_pieces(model, cuts, *inputs):
    """Cut inputs (B, T, ..) into pieces at `cuts`, and let a model read one after the other. Return
    its joined outputs, and its state."""
    said, state = [], None
    for x, *marks in zip(*(a.tensor_split(cuts, 1) for a in inputs)):
        y, state = model(x, state, *marks)
        said.append(y)
    return torch.cat(said, 1), state


# MODELS: all presets, and settings that take another way through the code. KINDS: one model of each
# kind, for tests that would be too slow on all.
MODELS = [
    *models.PRESETS,
    "atlas,wiring=mag",
    "atlas,wiring=mal",
    "atlas,wiring=mac",
    "atlas,wiring=mac,persistent=0",
    "omeganet,wiring=mag",
    "omeganet,wiring=mac,forget=zero",
    "atlas-delta,wiring=mac,memory=linear",
    "deepomega,wiring=mac",
    "atlas,wiring=mag,polarise=1",
    "atlas,n_layer=2",
    "swa,n_layer=2",
    "atlas,tie=True",
    "atlas,memory=linear",
    "atlas,conv=False",
    "atlas,features=sketch",
    "omeganet,features=elementwise",
    "atlas,chunk=1",
    "atlas,muon=chunk",
    "atlas,momentum=False",
    "titans,n_head=1",
    "deepomega,memory=gated,keep=True",
    "titans,shard=4,wiring=mag",
    "atlas,shard=6",
    "atlas-delta,memory=linear,shard=6",
]
KINDS = [
    "transformer",
    "swa",
    "deepomega",
    "atlas",
    "atlas++",
    "atlas-delta",
    "atlas,wiring=mag",
    "atlas,wiring=mal",
    "omeganet,wiring=mac",
    "atlas,memory=linear,shard=4",
]
every_model = pytest.mark.parametrize("name", MODELS)
every_kind = pytest.mark.parametrize("name", KINDS)


def some_models(*names):
    return pytest.mark.parametrize("name", names)


@every_model
def test_every_model_runs_the_reference(name, monkeypatch):
    """Catches a layer whose fast form is another rule than omega_ref, with padding too."""
    model, x = shaken(made(name)), tokens(2, 14)
    mask = rand(2, 13) > 0.2
    fast = loss_and_gradients(model, x, mask)
    monkeypatch.setattr(chunks, "run", omega_ref)
    monkeypatch.setattr(shards, "shards", shards.shards_ref)
    close(loss_and_gradients(model, x, mask), fast, 1e-9)


@every_model
def test_every_model_trains(name):
    """Catches dead gates, a detached M0, weights that forward changes, parameters of stride 0."""
    model, x = made(name), tokens(2, 11)
    before = deepcopy(model.state_dict())
    assert torch.equal(model.eval()(x)[0], model.train()(x)[0])

    model.loss(x[:, :-1], x[:, 1:]).backward()
    close(model.state_dict(), before, 0)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
        parts = p.grad.chunk(3) if name.endswith("qkv.weight") else [p.grad]     # of q, k and v
        for part in parts:
            assert 0 < part.abs().max() < math.inf, name

    said, _ = in_pieces(model.to("meta"), (6,), x.to("meta"))
    assert said.shape == (2, 11, 11)


def bytes_held(model, T):
    """Return the bytes of a state after T tokens, and of all storages that it keeps alive."""
    _, state = model(tokens(1, T))
    held = [a.untyped_storage() for a in tensors(state)]
    stores = {storage.data_ptr(): storage.nbytes() for storage in held}
    return eval.state_bytes(state), sum(stores.values())


@every_kind
@torch.no_grad()
def test_reading_is_causal_in_pieces_and_row_by_row(name):
    """Catches a token that sees the future or another row, a cache that forgets or grows."""
    model = shaken(made(name))
    x = tokens(1, 10).repeat(10, 1)
    y = (x + torch.eye(10, dtype=torch.long)) % 11            # row j has another token j
    logits, _ = model(x)
    changed, end = model(y)
    for cuts in (3, 8), tuple(range(1, 10)):
        close(in_pieces(model, cuts, y), (changed, end))

    difference = (changed - logits).abs().amax(-1)
    for j in range(10):
        assert difference[j, :j].sum() < 1e-11
        assert difference[j, j] > 1e-6
        if not (model.config.attention and model.config.attn_window):
            assert difference[j, 9] > 1e-9, f"token {j} is forgotten by the end"

    close(model(y[[2, 0, 9]])[0], changed[[2, 0, 9]])
    grows = bytes_held(model, 12) != bytes_held(model, 24)
    assert grows == models.holds_all(model.config)


LAYOUTS = {                               # texts in 3 rows of 16 tokens: row, begin, end
    "padding": [(0, 0, 16), (1, 0, 12), (2, 0, 8)],
    "reset": [(0, 0, 7), (0, 8, 16), (1, 0, 16), (2, 0, 4), (2, 4, 12)],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@every_kind
def test_masks_and_resets_part_texts(name, layout):
    """Catches padding that writes or decays, W, S, a key or an input of the text before."""
    attn_window = 0 if name == "transformer" else 4
    model = shaken(made(name, persistent=0, attn_window=attn_window, max_norm=0.0))
    x, up = tokens(3, 16), randn(3, 16, 11)                   # up: an outer gradient
    mask = torch.zeros(3, 16, dtype=torch.bool)
    reset = torch.zeros(3, 16, dtype=torch.bool)

    # wanted: each text by itself
    wanted, total = torch.zeros(3, 16, 11).double(), 0
    for row, a, b in layout:
        mask[row, a:b] = True
        reset[row, a] = a > 0
        said = model(x[row, None, a:b])[0][0]
        wanted[row, a:b] = said.detach()
        total = total + (said * up[row, a:b]).sum()

    # all texts in one batch
    marks = (mask, reset) if reset.any() else (mask,)
    y, _ = model(x, None, *marks)
    close(y[mask], wanted[mask])
    close(gradients((y * up)[mask].sum(), model), gradients(total, model), 1e-9)
    for cuts in (8,), (3, 4, 5, 13):
        close(in_pieces(model, cuts, x, *marks)[0][mask], wanted[mask])
    if not model.config.attention:
        with pytest.raises(ValueError, match="reset"):
            model(x, None, mask, mask)                        # inside of a chunk


@every_kind
def test_what_stands_in_a_gap_is_not_read(name):
    """Catches a masked token whose NaN spreads, also to gradients."""
    layer, x = shaken(made(name)).blocks[0].layer, randn(3, 16, 16)
    mask = rand(3, 16) > 0.4
    mask[0, 4:8] = False                                      # a whole chunk
    hidden = x.where(mask[..., None], torch.nan)
    y, _ = layer(hidden, None, mask)
    close(y[mask], layer(x, None, mask)[0][mask])
    assert finite(gradients(y[mask].sum(), layer))


@some_models("atlas", "deepomega", "omeganet,wiring=mac", "swa", "atlas-delta")
def test_low_precision(name):
    """Catches fast weights, gates or Newton-Schulz in 16 bits, in such models or by autocast."""
    x = tokens(2, 13)
    for dtype, tol in (torch.bfloat16, 0.06), (torch.half, 0.01):
        model = made(name).to(dtype)
        wanted, _ = deepcopy(model).float()(x)
        said, state = in_pieces(model, (6,), x)
        assert said.dtype == dtype
        close(said, wanted, tol)
        assert finite(gradients(model.loss(x, x), model))
        inner = getattr(state[0], "memory", state[0])         # of a wiring
        for a in tensors(getattr(inner, "fast", ())):
            assert a.dtype == torch.float32

    model = made(name)
    wanted = loss_and_gradients(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(x[:, :-1], x[:, 1:])
    assert loss.dtype == torch.float32
    close([loss, *gradients(loss, model)], wanted, 0.1)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")
def test_fsdp(tmp_path, request):
    """Catches a state of another type: a sharded model says in two calls what a plain one does."""
    dist = torch.distributed
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    plain, x = made("omeganet,wiring=mac"), tokens(2, 13)
    model = deepcopy(plain)
    for part, out in (model.blocks[0], None), (model, torch.float32):
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, None, out, cast_forward_inputs=False)
        fsdp.fully_shard(part, mesh=mesh, mp_policy=policy)
    said, _ = in_pieces(model, (6,), x)
    close(said, in_pieces(plain.bfloat16(), (6,), x)[0], 1e-6)
    model.loss(x, x).backward()


@every_kind
@torch.no_grad()
def test_states_are_selected_and_saved(name):
    """Catches rows of another's memory, a saved state that does not go on to the bit."""
    model, x = shaken(made(name)), tokens(3, 14)
    _, state = model(x[:, :5])
    for rows in [2, 0, 2], torch.tensor([1, 1, 0, 2]):
        said = model(x[rows, 5:], select(state, rows))
        close(said, model(x[rows, 5:], model(x[rows, :5])[1]), 1e-9)
    torch.save(detach(state), file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(model(x[:, 5:], state)[0], model(x[:, 5:], loaded)[0])


SWITCHES = """window=1 degree=1 memory=linear muon=none muon=chunk momentum=False keep=False
    conv=False chunk=8 ns_steps=2 loss=dot ns_coefficients=cubic max_step=2 forget=zero
    expansion=3 features=sketch tie=True max_norm=0 n_layer=2 wiring=mag n_head=4 lookback=0"""
# a model, and a change of it that must change what it says
PAIRS = [("atlas", switch) for switch in SWITCHES.split()]
PAIRS += [("atlas,wiring=mag", "persistent=0"), ("atlas,wiring=mac", "attn_window=4")]
PAIRS += [("atlas-delta", "error=chunk")]


@pytest.mark.parametrize("name, switch", PAIRS)
@torch.no_grad()
def test_a_switch_does_something(name, switch):
    """Catches a setting that nothing reads: an ablation would compare a model with itself."""
    more = dict(max_norm=0.1) if switch == "max_norm=0" else {}
    more |= dict(lookback=1) if switch == "lookback=0" else {}
    said = []
    for model in made(name, **more), made(f"{name},{switch}"):
        torch.manual_seed(0)
        model.init()
        said.append(model(torch.arange(11)[None])[0])
    assert not torch.allclose(*said)


# A state of omeganet with one of MISFITS is none of omeganet. `settings` must refuse all UNKNOWN.
MISFITS = "window=2 chunk=8 muon=token wiring=mag n_head=1 shard=8 features=none".split()
UNKNOWN = """error=tokens features=exp memory=MLP muon=off forget=Start chunk=0
    error=token ns_steps=7 max_norm=inf max_step=nan""".split()


@torch.no_grad()
def test_bad_arguments_are_value_errors():
    """Catches a riddle from inside, or a state of another model that runs on in silence."""
    model, x, hidden = made("omeganet"), tokens(2, 6), torch.randn(2, 6, 16)
    layer = model.blocks[0].layer
    _, state = model(x)
    cases = [                                                 # a word of the message, and a call
        ("batch", model, x[:1], state),
        ("n_layer", model, x, state * 2),
        ("state", model, x, state[0]),
        ("state", layer, hidden, state),
        ("indices", select, state, [0.5]),
        ("targets", model.loss, x, x[:, 1:]),
        ("bool", model, x, None, x),
        ("16", layer, hidden[..., :8]),
        ("one text", layer, hidden[0]),
        ("T >= 1", model, x[0]),
        ("T >= 1", next, model.generate(x[:, :0], 3)),
        ("at least 0", next, model.generate(x, 3, -1.0)),
        ("top_p", next, model.generate(x, 3, 1.0, 0, math.nan)),
        ("whole", next, model.generate(x, 3.0)),
        ("whole", next, model.generate(x, 3, 1.0, 2.5)),
        ("atlas", models.configure, "altas"),
        ("state", layer, hidden, hidden[..., 0] > 0),         # a mask in the state's place
        ("float64", deepcopy(model).double(), x, state),
        ("two memories", made("atlas,shard=4").blocks[0].layer.weights, None),
        ("DotMemory", models.Memory, settings(features="exp", muon="none")),
        ("tie", partial(models.configure, tie="False")),
        ("n_layer", partial(models.configure, n_layer="2")),
    ]
    for switch in MISFITS:
        _, other = made(f"omeganet,{switch}")(x)
        cases.append((switch.split("=")[0], model, x, other))
    for switch in UNKNOWN:
        name, value = switch.split("=")
        cases.append((name, partial(settings, **{name: value_of(value)})))
    for word, f, *args in cases:
        with pytest.raises(ValueError, match=word):
            f(*args)


# ---- parts of layers, by hand

def rms(x, weight):
    """Return RMSNorm(x)."""
    return weight * x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()


def to_heads(a):
    """Return a (B, T, n_embd) as (B, 2 heads, T, D)."""
    return a.unflatten(-1, (2, -1)).transpose(1, 2)


def turned(a):
    """Turn pairs of coordinates of a (.., T, D) by their position, like complex numbers."""
    half = a.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half).double() / half)
    angle = torch.arange(a.shape[-2])[:, None] * frequency
    pairs = torch.complex(a[..., :half], a[..., half:])
    pairs = pairs * torch.exp(1j * angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def softmax_attention(q, k, v, seen):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def attention_by_hand(layer, x, texts, seen):
    """Return what x says after it has attended to texts as long as x, whose tokens have the same
    positions as those of x. seen (T, T) is what each token of x sees of each text."""
    q, _, _ = layer.qkv(x).chunk(3, -1)
    q = turned(rms(to_heads(q), layer.q_norm.weight))
    ks, vs = [], []
    for text in texts:
        _, k, v = layer.qkv(text).chunk(3, -1)
        ks.append(turned(rms(to_heads(k), layer.k_norm.weight)))
        vs.append(to_heads(v))
    seen = torch.cat([seen] * len(texts), -1)
    y = softmax_attention(q, torch.cat(ks, 2), torch.cat(vs, 2), seen)
    return layer.out(y.transpose(1, 2).flatten(2))


def band(T, window):
    """Return a mask (T, T) of the tokens that each token sees: so many, itself included. 0: all."""
    seen = torch.ones(T, T).bool().tril()
    return seen.triu(1 - window) if window else seen


@pytest.mark.parametrize("rope", [True, False])
def test_positions_are_rope(rope):
    """Catches --no-rope that still knows the order of the tokens before, RoPE that does not."""
    model, x = shaken(made("transformer", n_layer=1, rope=rope)), tokens(2, 9)
    mixed = torch.cat([x[:, :-1].flip(1), x[:, -1:]], 1)
    a, b = model(x)[0][:, -1], model(mixed)[0][:, -1]
    assert torch.allclose(a, b) != rope


def test_attention_piece_by_piece():
    """Catches keys missing or doubled where a piece of a long text ends."""
    q, k, v = (randn(1, 2, 605, 4) for _ in range(3))
    for window in 0, 5, 700:
        wanted = softmax_attention(q, k, v, band(605, window))
        for T in 605, 600:
            found = wiring.attend(q[:, :, -T:], k, v, window)
            close(found, wanted[:, :, -T:])


def wired(how):
    """Return a layer of this wiring without persistent tokens, and its input."""
    model = shaken(made("atlas", wiring=how, persistent=0))
    return model.blocks[0].layer, randn(2, 8, 16)


def gated_by(layer, y, m):
    return rms(y, layer.y_norm.weight) * rms(m, layer.m_norm.weight).sigmoid()


@torch.no_grad()
def test_mag_by_hand():
    """Catches a gate the other way round, a window off by one, turns the other way."""
    layer, x = wired("mag")
    m, _ = layer.memory(x)
    y = attention_by_hand(layer.attention, x, [x], band(8, 3))
    close(layer(x)[0], gated_by(layer, y, m), 1e-6)


@torch.no_grad()
def test_mal_by_hand():
    """Catches attention before the memory, a lost norm between them."""
    layer, x = wired("mal")
    m, _ = layer.memory(x)
    m = rms(m, layer.m_norm.weight)
    y = attention_by_hand(layer.attention, m, [m], band(8, 3))
    close(layer(x)[0], y, 1e-6)


@torch.no_grad()
def test_mac_by_hand():
    """Catches a MAC that writes before it attends, reads what it has just written, looks ahead."""
    layer, x = wired("mac")
    inner, outs = layer.memory, []
    state = inner.start(x)
    for s in x.split(3, 1):                                   # segments of attn_window
        W, _ = inner.weights(state)
        q, _, _ = inner.qkv(s).chunk(3, -1)
        q = F.normalize(to_heads(F.silu(q)), dim=-1)
        h = memory.apply(inner.config.memory, W, inner.phi(q), q)
        h = rms(h, inner.norm.weight).transpose(1, 2).flatten(2)
        h = inner.out(h * F.silu(inner.out_gate(s)))
        y = attention_by_hand(layer.attention, s, [h, s], band(s.shape[1], 0))
        m, state = inner(y, state)
        outs.append(gated_by(layer, y, m))
    close(layer(x)[0], torch.cat(outs, 1), 1e-6)


MEMORY_MODELS = [name for name in models.PRESETS if not models.configure(name).attention]


@some_models(*MEMORY_MODELS)
def test_a_gate_that_closes_spoils_no_gradient(name):
    """Catches the square of a tiny norm, whose gradient overflows where the loss is finite."""
    model, x = made(name), tokens(2, 9)
    bias = model.blocks[0].layer.gates.bias.detach().view(2, -1)[0]
    for i, usual in enumerate(bias.tolist()):
        for logit in -200, -40, -20, -17, -15, 40, 200:
            bias[i] = logit
            assert finite(loss_and_gradients(model, x)), (i, logit)
        bias[i] = usual


@torch.no_grad()
def test_a_closed_step_forgets_nothing():
    """Catches a memory that decays where a token is not to be learned (choice 16)."""
    layer = shaken(made("atlas,memory=linear,window=1")).blocks[0].layer
    closed = torch.tensor([-40.0, -40.0, 0.0, 0.0])           # keep, step, momentum, gate
    for now in closed, -closed:
        _, state = layer(randn(2, 8, 16))
        W, _ = layer.weights(state)
        layer.gates.weight.zero_()
        layer.gates.bias.copy_(now.repeat(2))
        _, state = layer(randn(2, 8, 16), state)
        assert torch.equal(layer.weights(state)[0][0], W[0]) == (now[0] < 0)


@some_models("atlas,features=sketch", "atlas,wiring=mag", "omeganet,wiring=mac", "transformer")
def test_init_sets_all_starting_values(name):
    """Catches a parameter or buffer that keeps what to_empty left there, as torchtitan builds."""
    model, other = made(name), made(name)
    for a in (*other.parameters(), *other.buffers()):
        a.data.fill_(math.nan)
    for m in model, other:
        torch.manual_seed(0)
        m.init()
    close(other.state_dict(), model.state_dict(), 0)
    other = made(name).to("meta").to_empty(device="cpu")
    other.init()
    assert finite(other.state_dict())


@some_models("atlas", "atlas,features=sketch", "deepomega", "omeganet,wiring=mac")
@pytest.mark.parametrize("assign", [False, True])
def test_a_model_from_the_meta_device_loads(name, assign):
    """Catches numbers that no checkpoint holds, a generator of another device."""
    model, x = shaken(made(name)).float(), tokens(2, 9)
    with torch.device("meta"):
        other = made(name)
    if not assign:
        other.to_empty(device="cpu")
        for a in (*other.parameters(), *other.buffers()):
            a.data.fill_(math.nan)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(other(x)[0], model(x)[0])


@some_models("ttt-mlp", "atlas,muon=chunk", "atlas++", "deepomega", "linear")
def test_a_memory_starts_at_zero(name):
    """Catches a residual that hides what a memory writes, which keeps training on a plateau."""
    layer = made(name, expansion=3).double().blocks[0].layer
    k = unit(2, 2, 5, 8)
    x = k if name == "deepomega" else layer.phi(k)
    found = memory.apply(layer.config.memory, list(layer.M0), x, k)
    close(found, torch.zeros_like(k), 1e-6)


@torch.no_grad()
def test_forward_leaves_the_gates_alone(monkeypatch):
    """Catches parameters swapped for a moment, which threads see; a wrapper that is passed by."""
    layer, x = made("atlas").bfloat16().blocks[0].layer, torch.randn(2, 9, 16).bfloat16()
    weight, linear, seen = layer.gates.weight, F.linear, []

    def watched(*args):
        seen.append(layer.gates.weight is weight)
        return linear(*args)

    monkeypatch.setattr(F, "linear", watched)
    wanted = layer.make_gates(x)[:4]
    assert seen == [True]
    assert all(a.dtype == torch.float32 for a in wanted)
    monkeypatch.undo()
    layer.gates = torch.nn.Sequential(layer.gates)            # as a LoRA would wrap it
    close(layer.make_gates(x)[:4], wanted, 0.02)


@some_models("atlas,memory=linear,wiring=mac", "omeganet", "swa", "transformer")
def test_a_vector_without_a_direction_passes_no_gradient(name):
    """Catches an RMSNorm of zeros, which multiplies gradients by 2,896."""
    model = made(name)
    layer, x = model.blocks[0].layer, torch.randn(2, 9, 16)
    x[:, 3:6] = 0
    x.requires_grad_()
    found = torch.autograd.grad(layer(x)[0].sum(), [x, *layer.parameters()], allow_unused=True)
    assert all(a.norm() < 300 for a in found if a is not None)


def test_polarise_where_all_is_masked():
    """Catches the mean of nothing, which is NaN."""
    model, x = made("atlas,wiring=mag,polarise=1"), tokens(2, 9)
    assert finite(model.loss(x, x, torch.zeros_like(x).bool()))
    close(model.loss(x, x.int()), model.loss(x, x), 0)


@pytest.mark.parametrize("features", ["monomial", "sketch", "exp"])
@torch.no_grad()
def test_a_step_of_1_learns_a_pair(features):
    """Catches steps that |phi(k)|^2 does not divide, or a norm of another phi."""
    rule = Rule("linear", chunk=4, forget="start", error="token")
    phi = Features(features, 8, 2, 5).double()
    for scale in phi.parameters():
        scale.copy_(torch.tensor([1.0, 0.9, 0.7]))
    k, v = unit(2, 2, 7, 8), randn(2, 2, 7, 8)
    M0, one = torch.zeros(2, phi.out_dim, 8).double(), torch.ones(2, 2, 7).double()
    gates = Gates(one, one, None, one[..., None])
    engine, begin = (dot, dot.start) if features == "exp" else (chunks, start)
    state = begin(rule, phi, [M0], 2, momentum=False)
    y, _ = engine.run(rule, phi, k, k, v, gates, state)
    close(y, v)


@some_models("atlas-delta,memory=linear", "atlas-delta")
@torch.no_grad()
def test_steps_at_their_bound_do_not_explode(name):
    """Catches a step or a gradient that nothing divides: |W| was 1e7 to 1e42."""
    layer = made(name, chunk=16, max_norm=0.0).double().blocks[0].layer
    layer.gates.weight.zero_()
    open_gates = torch.tensor([9.0, 9.0, 4.0, 0.0])           # keep, step, momentum, gate
    layer.gates.bias.copy_(open_gates.repeat(2))
    _, state = layer(randn(1, 1500, 16))
    W, _ = layer.weights(state)
    assert max(w.norm(dim=(-2, -1)).max() for w in W) < 300


@some_models("omeganet,wiring=mac", "swa")
def test_remat(name):
    """Catches a --remat that computes nothing again, or finds other gradients."""
    calls, found, x = [], [], tokens(2, 9)
    for remat in False, True:
        torch.manual_seed(0)
        model = made(name, dropout=0.5, n_layer=2)
        model.remat = remat
        for block in model.blocks:
            block.layer.register_forward_hook(lambda *_: calls.append(remat))
        found.append(loss_and_gradients(model, x))
    assert (calls.count(False), calls.count(True)) == (2, 4)
    assert all(map(torch.equal, *found))


@pytest.fixture
def compiler():
    """Let torch.compile work in this test. In later tests, what it has compiled runs uncompiled."""
    torch.compiler.set_stance("default")
    yield
    torch.compiler.set_stance("force_eager")
    torch._dynamo.reset()


@some_models("atlas", "swa")
def test_the_memory_compiles_whole(name, compiler):
    """Catches a graph break in what runs on every chunk, and other numbers."""
    model, x, graphs = shaken(made(name)), tokens(2, 5), []
    eager = loss_and_gradients(model, x)
    trace = torch._dynamo.lookup_backend("aot_eager")         # its backward too, without code

    def backend(graph, inputs):
        graphs.append(graph)
        return trace(graph, inputs)

    model.compile_memory(fullgraph=True, backend=backend)
    close(loss_and_gradients(model, x), eager)
    assert graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@some_models("omeganet", "atlas", "atlas,wiring=mac", "swa")
def test_a_gpu_computes_the_same(name, compiled, compiler):
    """Catches other numbers of a GPU's kernels and compiled regions, in float64."""
    model, x = shaken(made(name)), tokens(2, 24)
    wanted = loss_and_gradients(model, x)
    if compiled:
        model.compile_memory()
    found = loss_and_gradients(model.cuda(), x.cuda())
    close([a.cpu() for a in found], wanted, 1e-8)


# ---- models.py: the language model

def generated(model, x, n, **how):
    """Return x (B, T) and the n tokens that follow it, joined, and the state that generate
    returns."""
    drawing, drawn = model.generate(x, n, **how), []
    while True:
        try:
            drawn.append(next(drawing)[:, None])
        except StopIteration as end:
            return torch.cat([x, *drawn], 1), end.value


@some_models("atlas", "deepomega", "swa", "omeganet,wiring=mac")
def test_generate_is_reading_again(name):
    """Catches a prompt of which a piece is lost, a cached token that is not the recomputed one."""
    model, x = shaken(made(name)), tokens(2, 7)
    text, end = generated(model, x, 8, temperature=0)
    logits, _ = model(text)
    assert torch.equal(logits[:, 6:-1].argmax(-1), text[:, 7:])
    close(end, model(text[:, :-1])[1])                        # the last one is not read
    close(generated(model, x, 0)[1], model(x)[1])
    _, state = model(x[:, :5])
    for _ in range(2):                                        # the state stays as it was
        again, _ = generated(model, x[:, 5:], 8, temperature=0, state=state)
        assert torch.equal(again[:, 2:], text[:, 7:])
    model(text, end)[0].sum().backward()                      # of tensors like any other


def test_a_long_prompt():
    """Catches a piece of a prompt that is lost, and a seed that is ignored."""
    model, x = made("atlas"), tokens(1, 1030)
    text, _ = generated(model, x, 1, temperature=0)
    assert text[0, -1] == model(x)[0][0, -1].argmax()
    drawn = []
    for seed in 1, 1, 2:
        generator = torch.Generator().manual_seed(seed)
        drawn.append(generated(model, x[:, :9], 9, generator=generator)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("temperature, top_k, top_p, allowed", [
    (1, 0, 1.0, {0, 1, 2, 3}),
    (1, 2, 1.0, {1, 3}),
    (1, 0, 0.0, {1}),
    (1, 0, 0.39, {1}),
    (1, 0, 0.41, {1, 3}),
    (1, 3, 0.5, {1, 3}),
    (0, 0, 1.0, {1}),
    (1e-40, 0, 1.0, {1})])
def test_sample(temperature, top_k, top_p, allowed):
    """Catches a token too many or too few, a temperature upside down."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    drawn = models.sample(p.log().expand(2000, 4), temperature, top_k, top_p)
    assert set(drawn.tolist()) == allowed


# ---- data.py

TEXT = "To be, or not to be:\n\u00e9\u4e2d\U0001f600 the end.  the\n"
BYTE = data.make_tokenizer("byte", "")


@pytest.fixture
def small_gpt2(monkeypatch):
    """Put a small vocabulary in the place of GPT-2's, which would be downloaded."""
    ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257}
    special = {"<|endoftext|>": 258}
    how = dict(pat_str=r"\s?\S+|\s+", mergeable_ranks=ranks)
    gpt2 = tiktoken.Encoding("", special_tokens=special, **how)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: gpt2)


def test_shakespeare_without_a_network(tmp_path, monkeypatch, capsys):
    """Catches a download that is repeated, a login page that is trained on, a silent fallback."""
    path = tmp_path / "new" / "shakespeare.txt"
    served = [b"<html>log in</html>", b"To be", b"To be"]

    def urlopen(url, timeout):
        if not served:
            raise OSError("no network")
        return io.BytesIO(served.pop(0))

    monkeypatch.setattr(data, "SHAKESPEARE", path)
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(b"To be").hexdigest())
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    wrong = data.read("shakespeare")
    assert wrong == data.read("pydoc")
    assert "not comparable" in wrong.used
    write({path.parent / "other": ""})
    path.with_name("shakespeare.txt.tmp").symlink_to("/dev/full")
    assert data.read("shakespeare") == wrong                  # the disk is full
    assert not path.exists()
    assert data.read("shakespeare").text == "To be"
    assert data.read("shakespeare").text == "To be"           # from the file
    path.unlink()
    assert data.read("shakespeare") == wrong
    assert capsys.readouterr().err.count("\n") == 3


def test_files_folders_and_mixes(tmp_path, monkeypatch):
    """Catches a hidden file that is read, one that links bring twice, weights that do nothing,
    mixed splits, a colon in a name that is taken for a mix."""
    monkeypatch.chdir(tmp_path)
    write({
        "d/a.jsonl": '\ufeff{"text": "To\u2028be", "title": "x"}\n{"text": " "}\n\n'
                     '{"text": "or"}\n\n',
        "d/sub/B.TXT": "not",
        "a:2": "colon",
        "d/no.md": "no",
        "d/.git/z.txt": "no",
        "c.txt": "c" * 90 + "C" * 10,
        "d.txt": "d" * 900 + "D" * 100})
    for link, to in ("loop", "."), ("tub", "sub"):
        Path("d", link).symlink_to(to)
    assert data.read("d").text.split(data.BORDER) == ["To\u2028be", "or", "not"]
    assert data.read("a:2").text == "colon"
    mix = data.read("c.txt:1,d.txt:3")
    train, val = (BYTE.decode(ids[:]) for ids in mix.splits(BYTE, 4))
    assert train == "c" * 300 + "d" * 900                     # 1 : 3, in both
    assert val == "C" * 10 + "D" * 30
    assert mix.sha256 != data.read("c.txt:2,d.txt:3").sha256


def write(files):
    """Write texts or bytes by name, in folders that are made."""
    for name, text in files.items():
        raw = text if isinstance(text, bytes) else text.encode()
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(raw)


@pytest.mark.parametrize("kind, size", [("char", 18), ("byte", 257), ("gpt2", 259)])
def test_tokenizers_round_trip(kind, size, small_gpt2):
    """Catches a text that comes back changed, also from a checkpoint or piece by piece."""
    tokenizer = data.make_tokenizer(kind, TEXT + data.BORDER + "b")
    assert tokenizer.vocab_size == size
    ids = tokenizer.encode(TEXT)
    again = data.Tokenizer(**tokenizer.state)
    assert np.array_equal(again.encode(TEXT), ids)
    assert again.decode(torch.tensor(ids)) == again.decode(ids.tolist()) == TEXT
    feed = tokenizer.stream()
    assert "".join([feed(i) for i in ids]) == TEXT            # characters come out whole
    joined = tokenizer.encode(TEXT + data.BORDER + "b")       # END is between documents alone
    assert tokenizer.end == size - 1
    assert np.array_equal(joined[:-2], ids) and joined[-2] == tokenizer.end
    assert tokenizer.bytes_a_token(joined[-3:]) == 0.5


def test_token_files(tmp_path):
    """Catches ids in another order or type, a shard left out, a slice across files."""
    (tmp_path / "t.txt").write_text(TEXT * 20, encoding="utf-8")
    out, wanted = tmp_path / "out", data.split(BYTE.encode(TEXT * 20))
    assert data.main(f"--data {tmp_path}/t.txt --tokenizer byte --out {out}".split()) == 0
    for part, ids in zip(data.read(out).splits(BYTE, 8), wanted, strict=True):
        assert part[:].dtype == np.uint16
        assert np.array_equal(part[:], ids)
    (out / "train_2.bin").write_bytes(wanted[1].astype("<u2").tobytes())
    (out / "train_3.bin").symlink_to("train.bin")             # not once more
    train, _ = data.read(out).splits(BYTE, 8)
    n = len(wanted[0])
    assert len(train) == n + len(wanted[1])
    assert train[n - 2:n + 3].tolist() == [*wanted[0][-2:], *wanted[1][:3]]

    mix = f"{tmp_path}/t.txt:1,{out}:3"                       # mixed when they are made
    assert data.main(f"--data {mix} --tokenizer byte --out {out}2".split()) == 0
    mixed = zip(data.read(f"{out}2").splits(BYTE, 8), data.read(mix).splits(BYTE, 8))
    assert all(np.array_equal(a[:], b[:]) for a, b in mixed)


@pytest.mark.parametrize("broken", ["train.bin", "val.bin"])
def test_token_files_come_both_or_not_at_all(broken, text, tmp_path, monkeypatch, capsys):
    """Catches half a file, or one without the other, on a full disk, and an exit code of 0."""
    (tmp_path / f"{broken}.tmp").symlink_to("/dev/full")      # writes fail at the last flush
    assert broken in refused(capsys, data.main, f"--data {text} --out {tmp_path} --tokenizer byte",
                             code=1)
    assert not list(tmp_path.glob("*.bin*"))


def test_documents_begin_at_chunks():
    """Catches a document that begins inside of a chunk, a token lost, a target not its token's."""
    x = torch.tensor([[1, 2, 9, 3, 4, 5, 9, 6], [9, 1, 2, 3, 9, 9, 1, 2]])
    moved, *_ = data.documents(x, 10 * x, 9, 4)
    assert moved.tolist() == [[1, 2, 0, 0, 9, 3, 4, 5], [9, 1, 2, 3, 9, 0, 0, 0]]
    x = torch.randint(9, (50, 64))
    for chunk in 1, 7, 64:
        moved, y, mask, reset = data.documents(x, x + 100, 8, chunk)
        assert torch.equal(y, torch.where(mask, moved + 100, -100))
        assert torch.equal(reset, (moved == 8) & mask)
        assert not (reset.nonzero()[:, 1] % chunk).any()
        for row, kept, was in zip(moved, mask, x):
            assert torch.equal(row[kept], was[:kept.sum()])   # what is lost is the end


def test_a_batch_is_a_function_of_seed_and_step():
    """Catches a window that comes twice in an epoch, epochs cut alike, a global random state."""
    before = torch.get_rng_state()
    firsts = [data.batch(np.arange(1000), 0, step, 4, 16)[0][:, 0] for step in range(61)]
    epochs = torch.cat(firsts).view(4, 61)
    for starts in epochs:
        side_by_side = starts.min() + torch.arange(0, 61 * 16, 16)
        assert torch.equal(starts.sort().values, side_by_side)
        assert not torch.equal(starts, side_by_side)
    assert len(set(epochs.amin(1).tolist())) > 1
    a, b, c = (data.batch(torch.arange(10_000), *key, 4, 8) for key in ((0, 1), (0, 1), (1, 0)))
    assert torch.equal(a[0], b[0]) and not torch.equal(a[0], c[0])
    assert torch.equal(a[1], a[0] + 1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("n, T, B", [(100, 8, 3), (97, 8, 4), (9, 8, 4), (2, 8, 4), (3, 1, 1)])
def test_windows_and_streams_cover_each_token_once(n, T, B):
    """Catches a dropped tail, which would flatter or spoil the validation loss."""
    targets = [y.flatten() for _, y in data.windows(np.arange(n), T, B)]
    assert torch.cat(targets).tolist() == list(range(1, n))
    rows = torch.cat([y for _, y in data.streams(np.arange(n), T, B)], 1)
    assert rows.flatten().tolist() == list(range(1, 1 + rows.numel()))
    assert n - 1 - rows.numel() < len(rows) <= B


# ---- recall.py

# Each of these works out, from the tokens of a row alone, the targets that it must have.

def mqar_answers(row):
    pairs = dict(zip(row[:8:2], row[1:8:2]))
    return [-100] * 8 + [pairs.get(token, -100) for token in row[8:]]


def needle_answers(row):
    answers = [-100] * 64
    for t in range(56, 64, 2):
        place = row.index(row[t])
        answers[t] = row[place + 1]
    return answers


def correlated_answers(row):
    """Look up in the triples of row, column and value what the pairs at the end ask for."""
    n = len(row) // 5
    values = {tuple(row[i:i + 2]): row[i + 2] for i in range(0, 3 * n, 3)}
    answers = [-100] * 3 * n
    for i in range(3 * n, 5 * n, 2):
        answers += [-100, values[tuple(row[i:i + 2])]]
    return answers


def halves_answers(row):
    """Collect the halves of each key. A token of each combination begins behind 32 keys, 4 left and
    4 right halves."""
    told = 4 * len(row) // 5
    halves = {key: [] for key in row[told:]}
    for key, half in zip(row[:told:2], row[1:told:2]):
        halves[key].append(half)
    return [-100] * told + [40 + 4 * (left - 32) + right - 36 for left, right in halves.values()]


NEEDLE = partial(recall.needle, n_pairs=4, seq_len=64)
MQAR = partial(recall.mqar, n_pairs=4, n_queries=3, vocab=16, seq_len=24)
CORRELATED = partial(recall.correlated, n_pairs=9, family=4)
HALVES = partial(recall.halves, n_pairs=6)
TASKS = dict(needle=(NEEDLE, 49), mqar=(MQAR, 16), correlated=(CORRELATED, 48),
             halves=(HALVES, 56))
ANSWERS = dict(needle=needle_answers, mqar=mqar_answers, correlated=correlated_answers,
               halves=halves_answers)


@pytest.mark.parametrize("name", TASKS)
def test_synthetic_tasks(name):
    """Catches a question without an answer, an example in a docstring that is not drawn so."""
    draw, vocab = TASKS[name]
    x, y = draw(256, generator=common.seeded(0))
    for row, answers in zip(x[:40].tolist(), y.tolist()):
        assert ANSWERS[name](row) == answers

    assert set(torch.cat([x, y]).unique().tolist()) == {-100, *range(vocab)}
    assert torch.equal(x, draw(256, generator=common.seeded(0))[0])
    assert not torch.equal(x, draw(256, generator=common.seeded(1))[0])

    # the example in the docstring
    doc, scope = draw.func.__doc__, dict(vars(recall), g=common.seeded(10521))
    call = re.search(r"\w+\(1, .*?\)(?=[,:])", doc)[0]
    exec(f"example = {call}", scope)
    for word, row in zip(("tokens", "targets"), scope["example"]):
        shown = re.search(rf"{word} +((-?\d+ *)+)\n", doc)[1]
        assert row[0].tolist() == [int(n) for n in shown.split()]


@pytest.mark.parametrize("task, names", [
    ("needle --lengths 16 128", ["atlas,memory=linear,steps=1", "transformer"]),
    ("mqar --pairs 1 2", ["atlas,n_embd=8,muon=none,lr=1e-3"])])
def test_a_campaign_goes_on_where_it_stopped(task, names, tmp_path, capsys):
    """Catches a result that is trained again or lost, a row or seed that is missing."""
    file = tmp_path / "a.json"
    flags = f"""--steps 2 --n-layer 1 --n-head 1 --head-dim 4 --batch-size 2 --device cpu
        --json {file}"""
    argv = [*task.split(), *flags.split(), "--model", *names, "--seeds", "1"]
    assert recall.main(argv) == 0
    first = json.loads(file.read_text())["records"]
    capsys.readouterr()
    assert recall.main([*argv, "2"]) == 0
    said = capsys.readouterr().out
    records = json.loads(file.read_text())["records"]
    assert records[:len(names)] == first
    assert [record["model"] for record in records] == names * 2
    assert all(f"\n{name} " in said for name in names)
    assert "seed 1," not in said


def test_mqar_learns_to_recall(tmp_path):
    """Catches an optimizer that does not step, targets that are not those of the tokens."""
    file = tmp_path / "a.json"
    argv = f"""mqar --model linear --n-layer 1 --n-embd 32 --n-head 2 --vocab 8 --pairs 2 --chunk 8
        --seq-len 8 --steps 90 --lr 1e-2 --device cpu --threads 1 --json {file}"""
    assert recall.main(argv.split()) == 0
    record, = json.loads(file.read_text())["records"]
    assert record["scores"]["2"] > 0.9


# ---- train.py: runs of a small network on a small text
#
# `go` starts a run, and `goes_on` resumes it; both return the exit code. `trained` is the folder of
# a finished run with FLAGS, on the file `text`. `saved` and `log_of` read what a run has written.

RUN = """--device cpu --dtype float32 --threads 1 --seq-len 16 --batch-size 2
    --log-every 3 --eval-every 4"""
NET = f"{RUN} --n-layer 1 --n-embd 16 --n-head 2 --head-dim 8 --chunk 8 --window 3"
FLAGS = "--steps 10 --dropout 0.2 --grad-accum 2"
train.EVAL_WINDOWS, train.SAMPLE = 4, 5                       # the runs here are short


def go(text, out, flags):
    """Run train.py with a small network. Return its exit code."""
    return train.main(f"{NET} --data {text} --out {out} {flags}".split())


def goes_on(out, flags=""):
    """Run train.py --resume. Return its exit code."""
    return train.main(f"--resume --device cpu --out {out} {flags}".split())


def refused(capsys, main, line, code=2):
    """Run main(line). It must end with this exit code, and stderr with its only line of an error.
    Return that line."""
    capsys.readouterr()
    try:
        found = main(shlex.split(line))
    except SystemExit as stop:
        found = stop.code
    said = capsys.readouterr().err
    assert found == code, said
    *_, last = said.splitlines()
    assert last.startswith("error: ") and said.count("error: ") == 1, said
    return last


def log_of(out, *columns):
    """Return the rows of log.csv, a list of these columns each; an empty cell is 0."""
    with (out / "log.csv").open() as file:
        return [[float(row[name] or 0) for name in columns] for row in csv.DictReader(file)]


def saved(out, name="ckpt.pt"):
    return train.load_checkpoint(out / name)


def contents(folder):
    """Return {path: bytes} of all files in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(("to be or not to be: that is the question.\n" * 80)[:3000], newline="\n")
    return path


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Return the folder of a finished run; what it said is in the file `said` beside it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with redirect_stdout(io.StringIO()) as said:
        assert go(text, out, FLAGS) == 0
    (out.parent / "said").write_text(said.getvalue())
    return out


@pytest.fixture
def copied(trained, tmp_path):
    """Return a copy of the finished run, to break."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def disturb(monkeypatch, call, disturbance):
    """Let call number `call` of model.loss, counted from 1, add what disturbance(model) returns to
    the loss."""
    real, calls = models.LM.loss, []

    def loss(self, *args):
        calls.append(self)
        found = real(self, *args)
        return found + disturbance(self) if len(calls) == call else found

    monkeypatch.setattr(models.LM, "loss", loss)


def test_a_run_says_logs_and_saves_what_it_did(trained, text):
    """Catches a figure in the wrong place, an optimizer that does not step, a rate off by one."""
    said = (trained.parent / "said").read_text()
    model, tokenizer = train.rebuild(saved(trained, "best.pt"))
    val = tokenizer.encode(text.read_text())[2700:]
    assert f"{train.evaluate(model, val, 16, 2):.4f} nats" in said.splitlines()[-1]
    assert f"{model.num_params():,} parameters" in said

    steps, losses, rates, vals = zip(*log_of(trained, "step", "loss", "lr", "val"))
    assert steps == (1, 3, 4, 6, 8, 9, 10)
    assert [step for step, val in zip(steps, vals) if val] == [4, 8, 10]
    last, _ = train.rebuild(saved(trained))
    assert vals[-1] == pytest.approx(train.evaluate(last, val, 16, 2, 4), abs=1e-5)
    assert losses[-1] < losses[0] - 0.3

    peak = saved(trained)["train"]["lr"]                      # after a step of warmup, 0 at 11
    assert rates == pytest.approx([peak * (11 - step) / 10 for step in steps], rel=1e-4)
    assert sorted(os.listdir(trained)) == ["best.pt", "ckpt.pt", "config.json", "log.csv"]


def test_stopped_and_resumed_is_bit_equal(text, trained, tmp_path, monkeypatch, capsys):
    """Catches state that a checkpoint lacks, and a validation that disturbs the training."""
    disturb(monkeypatch, 10, lambda model: signal.raise_signal(signal.SIGINT) or 0)
    assert go(text, tmp_path, FLAGS) == 130
    assert f"--resume --out {tmp_path}" in capsys.readouterr().out
    assert saved(tmp_path)["step"] == 5

    with (tmp_path / "log.csv").open("a") as log:
        log.write("7,9.9,1,1,1,1,\n")                         # of a killed run, not saved
    torch.manual_seed(99)
    assert goes_on(tmp_path, "--eval-every 2") == 0

    a, b = saved(trained), saved(tmp_path)
    for key in "model", "optimizers":
        close(a[key], b[key], 0)
    again = log_of(tmp_path, "step", "loss")
    assert 7 not in [step for step, _ in again]
    assert all(row in again for row in log_of(trained, "step", "loss"))

    before = contents(tmp_path)
    assert goes_on(tmp_path) == 0
    assert contents(tmp_path) == before


class Recorder(TorchDispatchMode):
    """Do on a CPU what a CUDA graph does: repeat operations on the same tensors."""

    def __torch_dispatch__(self, f, types, args=(), kwargs={}):
        found = f(*args, **kwargs)
        self.calls.append((f, args, kwargs, found))
        return found

    @torch.no_grad()
    def replay(self):
        for f, args, kwargs, found in self.calls:
            for old, new in zip(tensors(found), tensors(f(*args, **kwargs))):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def record(self, f):
        self.calls = []
        with self:
            return self.replay, f()


@pytest.mark.parametrize("works", [True, False])
def test_a_graph_trains_alike(works, text, trained, tmp_path, monkeypatch, capsys):
    """Catches a batch that is not copied, gradients that are replaced or added up over steps, and a
    graph that computes something else and is used."""
    def asked_for(model, task):                               # without the refusal of a CPU
        task.tc.graph = True

    def broken(f):
        return lambda: None, f()

    monkeypatch.setattr(train, "cuda_graph", Recorder().record if works else broken)
    monkeypatch.setattr(train, "try_compiled", asked_for)
    assert go(text, tmp_path, f"{FLAGS} --compile") == 0
    assert ("--graph failed" in capsys.readouterr().out) != works
    close(saved(tmp_path)["model"], saved(trained)["model"], 1e-6)
    line = f"{NET} --data {text} --out {tmp_path}/cpu --graph"
    assert "--graph needs CUDA" in refused(capsys, train.main, line)


@pytest.mark.parametrize("names, step", [
    ("SIGTERM", 6),
    ("SIGHUP SIGTERM", 6),
    ("SIGINT SIGINT", 4)])
def test_a_signal_finishes_the_step_and_two_stop_at_once(names, step, text, tmp_path, monkeypatch):
    """Catches a step lost to Ctrl-C or a closed terminal, and a handler that stays."""
    numbers = [getattr(signal, name) for name in names.split()]
    before = signal.getsignal(numbers[0])

    def send(model):
        for number in numbers:
            signal.raise_signal(number)
        return 0

    disturb(monkeypatch, 12, send)
    assert go(text, tmp_path, "--steps 9 --grad-accum 2") == 128 + numbers[0]
    assert saved(tmp_path)["step"] == step
    assert signal.getsignal(numbers[0]) is before


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_a_run_that_is_killed_while_it_saves(lost, text, trained, tmp_path, monkeypatch, capsys):
    """Catches a best.pt that is older than ckpt.pt says, a folder that neither a new run nor
    --resume takes. Saves 1 and 2 are those of step 4, and 3 and 4 those of step 8."""
    real, names = train.save_file, []

    def save_file(path, tree):
        names.append(path.name)
        if len(names) == lost:
            raise KeyboardInterrupt
        real(path, tree)

    monkeypatch.setattr(train, "save_file", save_file)
    assert go(text, tmp_path, FLAGS) == 130
    if lost == 1:                                             # nothing is saved: begin again
        assert go(text, tmp_path, FLAGS) == 0
    else:
        assert "--resume" in refused(capsys, train.main, f"{NET} --data {text} --out {tmp_path}")
        best = saved(tmp_path, "best.pt")["best"]
        assert all(train.load_checkpoint(path)["best"] >= best for path in tmp_path.glob("*.pt"))
        assert goes_on(tmp_path) == 0
    for name in "ckpt.pt", "best.pt":
        close(saved(tmp_path, name)["model"], saved(trained, name)["model"], 0)


def test_a_disk_that_is_full_for_the_log(text, tmp_path, monkeypatch, capsys):
    """Catches a run that ends for want of a log, an old log that is lost, a fault without a name or
    told at each step."""
    def full(*_, **how):
        raise OSError(28, "No space left on device")

    def fill(model):
        monkeypatch.setattr(csv, "DictWriter", full)
        return 0

    disturb(monkeypatch, 5, fill)
    assert go(text, tmp_path, FLAGS) == 0
    assert capsys.readouterr().err.count(f"cannot write {tmp_path}/log.csv ([Errno 28]") == 1
    assert log_of(tmp_path, "step") == [[1]]
    assert saved(tmp_path)["step"] == 10


@pytest.mark.parametrize("flags, losses", [("--lr 10", ()), ("", [1.0, 0.8, 1.1])])
def test_a_run_that_grew_worse_says_so(flags, losses, text, trained, tmp_path, monkeypatch, capsys):
    """Catches a learning rate far too high, or a rising loss, that ends as if all were well."""
    def measure(self, model):
        return dict(val=losses.pop(0))

    if losses:
        monkeypatch.setattr(train.Text, "measure", measure)
    assert go(text, tmp_path, f"{FLAGS} {flags}") == 0
    assert "warning: the last validation" in capsys.readouterr().out.splitlines()[-1]
    assert "warning" not in (trained.parent / "said").read_text()


def test_passes_and_processes_make_one_batch(text, tmp_path):
    """Catches gradients of the wrong share, a process that draws what another does."""
    flags = "--steps 3 --log-every 1"
    assert go(text, tmp_path / "whole", f"{flags} --batch-size 4") == 0
    assert go(text, tmp_path / "passes", f"{flags} --grad-accum 2") == 0
    line = f"""-m torch.distributed.run --standalone --nproc-per-node 2 {train.__file__} {NET}
        {flags} --grad-accum 2 --data {text} --out {tmp_path / 'two'}"""
    subprocess.run([sys.executable, *line.split()], check=True, capture_output=True)
    wanted = sum(log_of(tmp_path / "whole", "step", "loss", "grad_norm"), [])
    for out in "passes", "two":
        found = sum(log_of(tmp_path / out, "step", "loss", "grad_norm"), [])
        assert found == pytest.approx(wanted, rel=2e-3)


def test_ranks_are_torchruns(monkeypatch):
    """Catches a rank that a cluster left behind, with which a run writes nothing."""
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = runpy.run_path(train.__file__)
    assert (found["RANK"], found["PROCESSES"]) == (0, 1)


HIDDEN = r"^blocks.*\b(qkv|out_gate|out|mlp\.gate|mlp\.up)\.weight$"


@some_models("atlas,wiring=mac", "swa,tie=True")
def test_who_trains_what(name):
    """Catches a gate, M0 or the head in Muon or decayed; a parameter in two groups or in none."""
    model = made(name)
    name_of = {p: name for name, p in model.named_parameters()}
    adamw, outer = train.make_optimizers(model, train.TrainConfig(optimizer="muon"))
    found = []
    for group in adamw.param_groups + outer.param_groups:
        hidden = group in outer.param_groups
        assert (group["weight_decay"] > 0) == hidden
        for p in group["params"]:
            assert bool(re.search(HIDDEN, name_of[p])) == hidden
            found.append(name_of[p])
    assert sorted(found) == sorted(name_of.values())


@pytest.mark.parametrize("shape", [(12, 6), (6, 12)])
def test_outer_muon_by_hand(shape):
    """Catches lost momentum or Nesterov, a lost factor of the shape, a lost decay."""
    p = torch.nn.Parameter(torch.randn(shape))
    optimizer = train.Muon([p], lr=0.02, weight_decay=0.1)
    wanted, B = p.detach().clone(), 0
    longer = max(1, shape[0] / shape[1]) ** 0.5
    for _ in range(2):
        p.grad = torch.randn(shape)
        optimizer.step()
        B = 0.95 * B + 0.05 * p.grad
        O = newton_schulz_ref(0.05 * p.grad + 0.95 * B)
        wanted = (1 - 0.002) * wanted - 0.02 * longer * O
    close(p, wanted, 1e-5)


def test_a_new_run_begins_with_the_weights_of_another(text, trained, tmp_path):
    """Catches an --init that trains other weights, or another vocabulary."""
    other, out = tmp_path / "other.txt", tmp_path / "second"
    other.write_text(text.read_text()[::-1])
    line = f"{RUN} --data {other} --out {out} --init {trained} --steps 1"
    still = "--lr 0 --outer-muon-lr 0 --chunk 4"
    assert train.main(f"{line} {still}".split()) == 0
    a, b = saved(trained), saved(out)
    close(a["model"], b["model"], 0)
    assert b["tokenizer"] == a["tokenizer"]
    assert b["config"] == a["config"] | dict(chunk=4)


def test_resume_refuses_what_would_change_the_run(copied, text, tmp_path, capsys):
    """Catches a changed setting that is ignored, or taken over, in silence; two runs at once."""
    other, before = tmp_path / "other", contents(copied)
    other.write_text(text.read_text()[::-1])
    resume = f"--resume --out {copied} --steps 20"
    for change in "--window 5", "--model titans", f"--data {other}":
        said = refused(capsys, train.main, f"{resume} {change}")
        assert change.split()[0] in said
    with common.locked(copied):
        assert "in use" in refused(capsys, train.main, resume)
    assert contents(copied) == before
    (copied / "lock").write_text("process 1, which was killed")
    assert goes_on(copied, "--steps 12") == 0
    assert saved(copied)["step"] == 12


def test_what_is_not_finite_stops_before_it_is_saved(text, tmp_path, monkeypatch, capsys):
    """Catches a NaN step, here in the gradient of step 6, that turns all weights to NaN."""
    disturb(monkeypatch, 12, lambda model: (0 * model.norm.weight.sum()).sqrt())
    line = f"{NET} --data {text} --out {tmp_path} --grad-accum 2"
    said = refused(capsys, train.main, line, code=1)
    assert "step 6" in said and "--lr" in said
    assert saved(tmp_path)["step"] == 4


def test_a_damaged_or_foreign_checkpoint_is_refused(copied, capsys):
    """Catches a traceback for whatever lies there, and code that a pickle could run."""
    best, ckpt = copied / "best.pt", saved(copied)
    raw = [b"", best.read_bytes()[:-1]]
    for change in dict(format=0), dict(other=Path("x")):
        torch.save(ckpt | change, file := io.BytesIO())
        raw.append(file.getvalue())
    for found in raw:
        best.write_bytes(found)
        for program in sample, eval:
            assert "best.pt" in refused(capsys, program.main, f"--ckpt {copied}")


@pytest.mark.parametrize("fault, code", [
    (torch.OutOfMemoryError("CUDA out of memory"), 1),
    (OSError("disk full"), 1),
    (common.Halt("a line"), 1),
    (common.UserError("a line"), 2),
    (KeyboardInterrupt(), 130)])
def test_exit_codes(fault, code, capsys):
    """Catches a traceback for what a user can mend, exit code 0 for what failed."""
    def task():
        raise fault
    refused(capsys, lambda argv: common.exit_code(task), "", code)


def test_a_terminal_that_cannot_encode_and_a_thread(monkeypatch):
    """Catches a UnicodeEncodeError in the last line, signals that only the main thread notes."""
    screen = io.TextIOWrapper(raw := io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", screen)
    assert common.exit_code(partial(common.say, "\u00e9\u4e2d")) == 0
    assert raw.getvalue() == b"\xe9?\n"

    def note():
        with common.noted_signals("") as noted:
            return noted

    with ThreadPoolExecutor() as pool:
        assert pool.submit(note).result() == []


def test_documents_floor_and_probe(tmp_path):
    """Catches a run on documents that fails, a floor that eval.py does not load."""
    rows = [json.dumps(dict(text="abcdefg " * n)) for n in range(1, 20)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    out, flags = tmp_path / "out", "--steps 4 --wiring mag --persistent 0 --documents"
    flags += " --polarise 0.1 --memory-floor 0.4,0.2,0.1"
    assert go(tmp_path / "a.jsonl", out, flags) == 0
    assert eval.main(f"probe --device cpu --ckpt {out} --json {out}/p.json".split()) == 0
    found, = json.loads((out / "p.json").read_text())["layers"]
    assert len(found["surprise"]) == 16
    model, _ = train.rebuild(saved(out))
    assert model.blocks[0].layer.floor == 0.1


# ---- all programs: a mistake is one line that names it
#
# Left is a program with its flags, and right are words that its error must hold. `run` is the
# folder of a finished run; the test writes the other files.

MISTAKES = """
train --widnow 3                                    --widnow
train --model atals                                 atals
train --steps 0                                     steps
train --lr nan                                      lr nan
train --muon False                                  False none token chunk
train --device mps                                  mps
train --wiring mag --memory-floor 0.3,2             --memory-floor
train --model deltanet --window 8                   window error
train --documents --wiring mag                      --persistent
train --features exp                                muon none
train --model swa --wiring mag                      memory
train --shard 4 --wiring mac                        --shard
train --degree 4 --head-dim 64                      GB --degree
train --n-head 5 --head-dim 0                       --n-head
train --data words --documents --tokenizer byte     one text
train --data words:0,words:1                        weight
train --data words --seq-len 400                    short
train --data words --out words                      --out
train --data words --steps 1 --out run              --resume --out
train --data gone                                   gone
train --data empty                                  empty
train --data latin                                  latin UTF-8
train --data bad.jsonl                              bad.jsonl
train --data odd                                    odd
train --data wide --tokenizer byte                  wide uint16
train --data own --tokenizer byte                   own input.txt
train --data a.json                                 a.json row .jsonl
train --init run --data two.jsonl --documents       run/best.pt --init
train --data ''                                     --data empty
train --out ''                                      --out empty
train --resume                                      ckpt.pt
train --resume --out run --steps 1                  --steps
train --plot run gone                               gone
train --init words                                  words
train --data words --steps 1 --wandb                --wandb login
train --data words --out logs --steps 1             log.csv
train --init run --data words --model titans        --model
data --data words --tokenizer byte --out words      --out
data --data words --out ''                          --out empty
sample --ckpt gone                                  gone
sample --ckpt run --load-state words                words
sample --ckpt run --save-state words                words
sample --ckpt run --save-state run/best.pt          best.pt
sample --ckpt run --device cpu --prompt \u00e9      \u00e9
sample --ckpt run --device cpu --prompt \udce9       UTF-8
sample --top-p 1.1                                  --top-p
eval --ckpt gone                                    gone
eval circle --json run                              run
eval online --json words                            words
recall mar                                          mqar
recall mqar --window 0                              window
recall mqar --pairs 1 7                             vocab
recall correlated --family 17                       --family
recall halves --pairs 3                             --pairs
recall mqar --model gpt                             transformer
recall mqar --model atlas,muon=no                   none token chunk
recall mqar --json words                            words
bench peers --json gone/x                           gone
episodic --grok --steps 1 --device cpu --out run    --resume --out
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_that_names_it(line, trained, text, capsys, tmp_path, monkeypatch):
    """Catches a typo that trains the wrong model for hours, a file that is lost to a slip."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    write({
        "words": text.read_bytes(),
        "empty": "\n\n",
        "latin": b"ab\xe9t\xe9",
        "bad.jsonl": '{"text": "a"}\n{"b": 1}',
        "odd/train.bin": b"\1\0\1",
        "wide/train.bin": b"\1\0\0\0" * 99,
        "own/train.bin": b"\1\0" * 99, "own/val.bin": b"\1\0" * 99, "own/meta.pkl": "",
        "logs/log.csv": "a,b",
        "a.json": '{"text":\n"a"}',
        "two.jsonl": '{"text": "to be"}\n' * 99})
    no_login = types.SimpleNamespace(init=partial(int, "no login"))   # raises, as wandb does
    monkeypatch.setitem(sys.modules, "wandb", no_login)
    before = contents(tmp_path)
    command, words = re.split("  +", line)
    program, flags = command.split(" ", 1)
    said = refused(capsys, importlib.import_module(program).main, flags)
    assert all(word in said for word in words.split())
    assert contents(tmp_path) == before


# ---- sample.py

def speak(capsys, ckpt, flags):
    """Run sample.py. Return what it says."""
    line = f"--ckpt {ckpt} --device cpu --tokens 30 {flags}"
    assert sample.main(shlex.split(line)) == 0
    return capsys.readouterr().out


def test_what_is_written_is_what_generate_says(trained, capsys):
    """Catches a flag that does not reach the model, a seed that is ignored, a lost prompt."""
    model, tokenizer = train.rebuild(saved(trained, "best.pt"))
    ids = torch.as_tensor(tokenizer.encode("to be"))[None]
    how = dict(temperature=1.3, top_k=7, top_p=0.97, generator=common.seeded(5))
    wanted, _ = generated(model, ids, 30, **how)
    wanted = tokenizer.decode(wanted)
    flags = "--prompt 'to be' --temperature 1.3 --top-k 7 --top-p 0.97 --seed"
    assert speak(capsys, trained, f"{flags} 5") == f"{wanted}\n"
    assert speak(capsys, trained, f"{flags} 6") != f"{wanted}\n"


def test_a_text_goes_on_from_a_saved_state(trained, tmp_path, capsys):
    """Catches a token read twice or lost, a state that is not that of the text."""
    state, flags = tmp_path / "state", "--temperature 0"
    whole = speak(capsys, trained, f"{flags} --prompt 'to be'")
    keep = f"--tokens 12 --save-state {state}"
    first = speak(capsys, trained, f"{flags} --prompt 'to be' {keep}")[:-1]
    flags += f" --load-state {state} --tokens 18"
    assert first + speak(capsys, trained, flags) == whole
    read = f"--prompt '{first}' --tokens 0 --save-state {state}"
    assert speak(capsys, trained, read) == ""                 # a text is read, and not said
    assert first + speak(capsys, trained, flags) == whole


# ---- eval.py and bench.py

def test_losses_of_a_checkpoint(trained, text, capsys):
    """Catches a split, a tokenizer or a window that is not the training's, a frozen memory that
    writes."""
    model, tokenizer = train.rebuild(saved(trained, "best.pt"))
    _, val = data.split(tokenizer.encode(text.read_text()))
    line = f"--ckpt {trained} --device cpu --stream 2048 --length 16"
    assert eval.main(line.split()) == 0
    said = capsys.readouterr().out
    for carry in False, True:
        assert f"{train.evaluate(model, val, 16, 8, carry=carry):.4f} nats/token" in said
    found = re.findall(r"1 - +16   (.*)", said)
    for shown, reader in zip(found, [model, eval.frozen(model)], strict=True):
        at, _ = eval.position_loss(reader, eval.evenly(val, 16, 8))
        assert shown == f"{at.mean():.4f}"
    assert found[0] != found[1]


@pytest.mark.parametrize("line, n", [
    ("bench layer --model omeganet transformer --lengths 8 16 --minutes 0 --size tiny", 4),
    ("bench peers --length 16 --minutes 0 --width 64", 5),
    ("eval online --pairs 3 5", 12)])
def test_a_table_is_whole(line, n, tmp_path, monkeypatch):
    """Catches a task that fails, or lacks a row, or draws before its results are written."""
    file = tmp_path / "b.json"
    program, *argv = f"{line} --device cpu --json {file}".split()
    module = importlib.import_module(program)

    def picture(*_, **how):
        assert file.exists()

    monkeypatch.setattr(module, "picture", picture)
    assert module.main(argv) == 0
    found = json.loads(file.read_text())
    assert len(found.get("records", found)) >= n


def test_a_memory_bends_to_pairs_on_a_circle(tmp_path, capsys):
    """Catches a degree, window or momentum that changes nothing, a curve that is not the memory's,
    no picture."""
    pytest.importorskip("matplotlib")
    path = f"{tmp_path}/c"
    line = f"circle --pairs 5 --device cpu --plot {path}.png --json {path}.json"
    assert eval.main(line.split()) == 0
    said = dict(re.findall(r"^(window .*): error (.*)$", capsys.readouterr().out, re.M))
    errors = [float(said[f"window {a}"]) for a in (
        "8, momentum, degree 2", "8, degree 2", "1, degree 2", "8, momentum, degree 1")]
    assert 0 == errors[0] < errors[1] < errors[2] < 0.05 < 0.4 < errors[3]

    _, v = eval.draw_pairs(5, 2, "cpu")
    curves = json.loads(Path(f"{path}.json").read_text())
    curve = torch.tensor(curves["window 8, momentum\ndegree 2: error 0.00"][-1])
    close(curve[:-1:18], v[eval.SHOWN, 0, :, 0], 0.1)         # each key is 18 points further
    assert Path(f"{path}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ending, begin", [
    ("", b"\x89PNG"),
    (".PDF", b"%PDF"),
    (".svg", b"<?xml")])
def test_a_picture_is_what_its_ending_says(ending, begin, tmp_path, capsys):
    """Catches a PNG in a .pdf, a name that the legend leaves out or takes for mathematics."""
    pytest.importorskip("matplotlib")
    path, names = f"{tmp_path}/f{ending}", ["_run", r"x$\foo$"]
    for _ in range(2):                                        # the second replaces the first
        common.check_picture(path)
        common.picture(path, dict.fromkeys(names, ([1, 2], [3, 4])), "x", "y")
    found = Path(path).read_bytes()
    assert found.startswith(begin)
    assert ending != ".svg" or all(f"<!--  {name} -->".encode() in found for name in names)
    assert ".pdf" in refused(capsys, eval.main, f"circle --plot {path}.xyz")


def test_a_matplotlib_that_does_not_import(tmp_path, monkeypatch, capsys):
    """Catches a traceback after all work, as with a matplotlib made for another NumPy."""
    write({tmp_path / "matplotlib/__init__.py": "raise ImportError('numpy.core failed')"})
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    said = refused(capsys, eval.main, f"circle --pairs 3 --device cpu --plot {tmp_path}/f.png")
    assert "numpy.core" in said and "pip install" in said


# ---- episodic.py

SHORT = """--n-embd 16 --n-head 2 --batch-size 2 --modulus 11 --threads 1 --device cpu
    --eval-every 2 --steps 4"""
EPISODE = "--data text.txt --seq-len 12 --chunk 12 --head-dim 4 --features none"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return a file of 4,000 words, 160 of them different; an evaluation is short."""
    for name, value in dict(WORDS=100, BATCHES=2, TESTS=2).items():
        monkeypatch.setattr(episodic, name, value)
    vocabulary = [a + b for a in "abcdefghij" for b in "klmnopqrstuvwxyz"]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(vocabulary, k=4000)))
    return path


class Oracle(torch.nn.Module):
    """Stand in for a model that remembers all: its state is what it was shown, and when words are
    masked, it names them from the state."""

    def __init__(self, task):
        super().__init__()
        self.mask, self.vocab_size = task.words + 1, task.vocab_size

    def forward(self, tokens, state):
        asks = (tokens == self.mask).any()
        told = state if asks and state is not None else tokens
        return F.one_hot(told, self.vocab_size).float(), told


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["language", "arithmetic"])
def test_an_episode(words, share, monkeypatch):
    """Catches an answer left visible, a word that storage never showed, sums shown in training."""
    monkeypatch.setattr(episodic, "SUMS", share)
    tc = episodic.Settings(data=str(words), seq_len=24, batch_size=4)
    task = episodic.Episodes(tc, torch.device("cpu"), torch.float32)
    pairs = [set(map(tuple, part.tolist())) for part in task.pairs]
    assert not pairs[0] & pairs[1]
    for test in 0, 1:
        for kind, shown, asked, answers in task.draw(3, 3, test):
            hidden = answers >= 0
            assert hidden.any(1).all()
            assert torch.equal(hidden, asked == task.words + 1)
            assert torch.equal(asked.where(~hidden, answers), shown)
            if kind != "language":
                a, _, b, _, c = (shown[:, i::6] - task.words - 5 for i in range(5))
                assert torch.equal((a + b) % tc.modulus, c)
                drawn = zip(a.flatten().tolist(), b.flatten().tolist())
                assert set(drawn) <= pairs[test]
    measured = task.measure(Oracle(task))
    assert (measured["carried"], measured["reset"]) == (1, 0)


@pytest.mark.parametrize("flags", [EPISODE, "--grok"])
def test_episodic_resume(words, flags, tmp_path, monkeypatch, capsys):
    """Catches a step number, optimizer or setting that a checkpoint does not carry on."""
    monkeypatch.chdir(tmp_path)
    line = f"{SHORT} {flags} --out"
    assert episodic.main(f"{line} a".split()) == 0
    with pytest.raises(common.UserError):
        saved(tmp_path / "a")                                 # it has no tokenizer
    assert episodic.main(f"{line} b --steps 2".split()) == 0
    resume = "--resume --steps 4 --threads 1 --device cpu --out b"
    refused(capsys, episodic.main, f"{resume} --seed 3")
    assert episodic.main(resume.split()) == 0
    assert [step for step, in log_of(tmp_path / "b", "step")] == [1, 2, 4]


def test_circles_stablemax_and_perpendicular():
    """Catches a frequency counted wrongly, log 0, a projection on the gradient."""
    angle = 2 * math.pi * torch.arange(97)[:, None] * torch.tensor([3, 14, 40]) / 97
    E = torch.cat([angle.cos(), angle.sin()], 1) @ torch.randn(6, 64)
    assert episodic.circles(E + 5)[0] > 0.9999
    assert episodic.circles(E, 1)[0] < 0.9
    y = torch.tensor([0.0, -1.0, 3.0])                        # s = 1, 1/2, 4
    close(episodic.log_stablemax(y).exp(), torch.tensor([1, 0.5, 4]) / 5.5, 1e-6)
    w, g = torch.nn.Parameter(torch.randn(5, 4)), torch.randn(5, 4)
    w.grad = g.clone()
    episodic.perpendicular([w])
    ratio = (g - w.grad) / w                                  # what was taken is a multiple of w
    assert (w.grad * w).sum().abs() < 1e-5
    assert ratio.std() < 1e-4 < ratio.mean().abs()


# ---- README.md and results/

def document(name):
    return (ROOT / name).read_text(encoding="utf-8")


README, MORE, LADDER = map(document, ("README.md", "results/README.md", "results/ladder.md"))
DOCS = README + MORE + LADDER + document("results/paper.md") + document("results/choices.md")
CODE = {path.stem: document(path) for path in sorted(ROOT.glob("*.py"))}
PROGRAMS = "train sample eval recall bench data episodic".split()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", DOCS, re.S))
def test_python_blocks_run(block, monkeypatch, tmp_path):
    """Catches an example that a change of the API has broken."""
    monkeypatch.setattr(chunks, "run", chunks.run)            # one block replaces it
    monkeypatch.chdir(tmp_path)
    exec(block, {})


RUNGS = [                                 # what ladder.md is after none, one, .. of its diffs
    dict(loss="dot", window=1, chunk=1, momentum=False),
    dict(window=1, chunk=1, momentum=False),
    dict(window=1, chunk=1),
    dict(chunk=1, momentum=False),
    dict(chunk=1, muon="token"),
    dict(muon="token"),
    dict(muon="token"),
    dict(muon="chunk"),
    dict(error="token", window=1)]


@pytest.mark.parametrize("n", range(len(RUNGS)))
def test_the_ladder_leads_to_the_reference(n):
    """Catches a diff of ladder.md that no longer fits, a rung that is another rule."""
    steps = LADDER.split("## Change the rule yourself")[0]
    program = re.search(r"```python\n(.*?)```", steps, re.S)[1]
    diffs = re.findall(r"```diff\n(?:Eq|choice)[^\n]*\n(.*?)\n```", steps, re.S)
    assert len(diffs) == len(RUNGS) - 1
    for hunk in [hunk for diff in diffs[:n] for hunk in diff.split("\n\n")]:
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        assert program.count(old) == 1, hunk
        program = program.replace(old, new)
    rung = {}
    exec(program, rung)

    rule, phi, x = problem(**dict(memory="linear", features="monomial", S0=False) | RUNGS[n])
    if n < 2:
        x["keep"] = torch.ones_like(x["keep"])                # nothing is forgotten yet
    wanted, _ = play(omega_ref, rule, phi, x)
    M0 = [w[1] for w in named(x, "M0")]
    inputs = [x[name] if x[name] is None else x[name][0, 1] for name in INPUTS]
    close(rung["rule"]("linear", M0, phi, *inputs, rule.chunk), wanted[0, 1])


@pytest.mark.parametrize("seed", range(20))
def test_the_page_computes_the_rule(seed):
    """Catches a sign, a coefficient, an edge or an anchor of rule.html that is not omega.py's, a
    page that grew or that loads something."""
    page = document("results/rule.html")
    assert len(page.encode()) <= 30_000 and "://" not in page
    assert max(map(len, page.splitlines())) <= 100
    js = pytest.importorskip("py_mini_racer", reason="needs pip install mini-racer").MiniRacer()
    js.eval(re.search(r'<script id="rule">(.*?)</script>', page, re.S)[1])

    draw = random.Random(seed)
    how = dict(
        loss=draw.choice(["l2", "dot"]),
        window=draw.randint(1, 8),
        chunk=draw.randint(1, 8),
        muon=draw.choice(["none", "token", "chunk"]))
    if seed == 0:                                             # as printed
        how |= dict(loss="l2", chunk=1, muon="token")
    rule, phi, x = problem(12, "monomial", draw.randint(1, 3), D=2, memory="linear", **how)
    phi.scale.data = torch.tensor([1, 1, 2, 6])[:phi.degree + 1].double().rsqrt()
    x["momentum"] = x["momentum"] * draw.randint(0, 1)
    text = [x[name][1, 0] for name in INPUTS]
    run = js.call("learn", how | dict(degree=phi.degree), *[a.tolist() for a in text[1:]])

    M0 = torch.zeros_like(x["M0.0"])
    state = start(rule, phi, [M0], 2)
    for t in range(12):
        q, k, v, *gates = [x[name][:, :, [t]] for name in INPUTS]
        _, state = omega_ref(rule, phi, q, k, v, Gates(*gates), state)
        W = chunks.weights(rule, phi, state)[0][0][1, 0]
        close(torch.tensor(run[t]["W"], dtype=torch.float64), W, 1e-9)
    if seed == 0:
        close(paper("linear", [M0[0]], phi, *text)[-1], phi(q)[1, 0, 0] @ W, 1e-9)


def help_of(program, *argv):
    """Return what a program says to these flags with --help. It must know the values of the
    flags."""
    with redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as stop:
        importlib.import_module(program).main([*argv, "--help"])
    assert not stop.value.code
    return said.getvalue()


def test_flags_in_documents_exist():
    """Catches a flag that was renamed in a program, and not where it is described."""
    known = "--mutants --help --index-url --nproc-per-node"
    for program in PROGRAMS:
        known += help_of(program)
        for task in getattr(importlib.import_module(program), "TASKS", ()):
            known += help_of(program, task)
    named = re.findall(r"(?<![\w-])--[a-z][\w-]*", DOCS)
    assert {flag for flag in named if flag not in known} == set()


def test_commands_in_documents_parse():
    """Catches a value that a program no longer takes, a flag of another program."""
    text = "\n".join([README, *CODE.values()])
    text = re.sub(r" *\\\n *", " ", text)                     # long lines joined
    commands = re.findall(r"^ *(?:python|torchrun \S+ \d) (\w+)\.py(.*?)(?:  .*| [<#].*)?$", text,
                          re.M)
    commands += re.findall(r"`python (\w+)\.py([^`]*)`", DOCS)
    assert len(commands) > 30
    for program, flags in commands:
        if program in PROGRAMS:
            argv = shlex.split(flags)
            said = help_of(program, *argv)
            for flag in argv:
                assert not flag.startswith("--") or flag in said, (program, flags)


def measured(preset, size):
    """Measure the rule of a model with open gates: what Newton-Schulz takes, how long its result is
    as a multiple of step, and what a pair's gradient is divided by. Return cells of README's table
    of parts."""
    config = models.configure(preset, size, n_head=1, head_dim=4, n_embd=8, n_layer=1)
    layer = models.Memory(config).double()
    T = config.chunk
    k, v, one = unit(1, 1, T, 4), randn(1, 1, T, 4), torch.ones(1, 1, T).double()

    def write(step, gate, n):
        """Return what a query for the first key reads after it, and W - M0 after n tokens."""
        gates = Gates(one, step * one, 0 * one if config.momentum else None,
                      gate * one[..., None].expand(-1, -1, -1, config.window))
        gates = Gates(*(a if a is None else a[:, :, :n] for a in gates))
        q, fast = k[:, :, :n], layer.start(k).fast
        y, fast = layer.learn(q, k[:, :, :n], v[:, :, :n], gates, fast)
        W, _ = chunks.weights(layer.rule, layer.phi, layer.with_M0(fast, layer.M0))
        return y[0, 0, 0], [(w - m) / step for w, m in zip(W, layer.M0)]

    # Newton-Schulz does not see how long a gradient is
    y, W = write(1e-3, 1, T)
    longer, more = write(1e-3, 2, T)
    of = "nothing"
    if torch.allclose(y, longer, 0, 1e-9):
        of, W = "S_t", write(1e-3, 1, 1)[1]
    elif all(map(torch.allclose, W, more)):
        of, W = "the chunk's sum", [w / T for w in W]
    length = "-"
    if of != "nothing":
        largest = [torch.linalg.matrix_norm(w, 2).max() for w in W]
        assert all(0.65 < norm < 1.25 for norm in largest), largest
        length = f"0.7 - 1.2 times {'step' if of == 'S_t' else 'its sum'}"

    learned, _ = write(1.0, 1, 1)                             # a step of 1 learns a pair whole
    divided = "x . x" if torch.allclose(learned, v[0, 0, 0]) else "nothing"
    return [of, length, divided]


def starts(config):
    """Return where the gates of a layer start, as a cell of README's table of parts."""
    layer = models.Memory(config)
    layer.gates.weight.data.zero_()
    _, step, momentum, gate, _ = layer.make_gates(torch.zeros(1, 1, config.n_embd))
    share = step / layer.most(momentum)
    numbers = [share[0, 0, 0], momentum[0, 0, 0], config.window * gate[0, 0, 0, 0]]
    return ", ".join(f"{a:g}" for a in numbers)


def parts(preset, size):
    """Return the cells of README's table of parts."""
    c = models.configure(preset, size)
    of, length, divided = measured(preset, size)
    return [
        f"{c.window}",
        c.error,
        f"{c.chunk}",
        "yes" if c.momentum else "no",
        of,
        length,
        "-" if of == "nothing" else f"{c.ns_coefficients}, {c.ns_steps}",
        divided,
        "matrix" if c.memory == "linear" else f"MLP x {c.expansion}",
        f"{c.features}, degree {c.degree}",
        starts(c),
        "no",
        c.forget,
        f"{c.max_norm:g}",
        f"block {c.lookback}"]


def test_readme_table_of_parts():
    """Catches a cell that is not what runs: half of them are measured."""
    table = README.split("in the paper and here\n")[1].split("\n\n")[0]
    rows = [line.split("|")[3:-1] for line in table.splitlines()[2:]]
    columns = [[cell.strip() for cell in column] for column in zip(*rows)]
    columns += [columns[2]] * 4                               # 170m - 1.3b
    sizes = "tiny baby 170m tiny 195m 340m 760m 1.3b".split()
    for column, size in zip(columns, sizes, strict=True):
        preset = "atlas-delta" if column is columns[3] else "atlas"
        assert column == parts(preset, size)


def test_programs_import_common_before_torch():
    """Catches threads that spin: OpenMP reads how long they may when torch is imported."""
    for program in set(PROGRAMS) - {"data"}:
        assert CODE[program].index("\nfrom common import") < CODE[program].index("\nimport torch")


def test_links():
    """Catches a dead link."""
    for folder, text in (ROOT, README), (ROOT / "results", MORE + LADDER):
        links = re.findall(r"\]\(([^)#]+)", text)
        assert [link for link in links if not (folder / link).exists()] == []


def test_the_layer_needs_five_files_beside_it(tmp_path):
    """Catches an import that a model of one's own would have to copy, too."""
    for name in "memory poly muon omega chunks layer".split():
        (tmp_path / f"{name}.py").write_text(CODE[name])
    use = "import torch, layer; layer.Memory(layer.settings())(torch.randn(2, 70, 192))"
    subprocess.run([sys.executable, "-c", use], check=True, cwd=tmp_path)


# ---- python test_all.py --mutants: faults of the rule, each with a test that must notice it

MUTANTS = [                               # file, text in it, what to put there, a test that notices
    ("muon", "alpha=c", "alpha=1.2 * c", "evens_out"),
    ("muon", ".clamp_min(0.5).rsqrt()", ".rsqrt()", "tiny_huge"),
    ("muon", "R = R @ Q if step", "R = Q @ Q if step", "evens_out"),
    ("poly", ".to(x.dtype).sqrt()", ".to(x.dtype)", "kernel_of_a_power"),
    ("memory", "(e - n * (n * e)", "(e - (n * e)", "its_gradient"),
    ("omega", "keep[t] * w - step", "w - step", "printed_rule"),
    ("omega", "t - rule.window + 1)", "t - rule.window)", "printed_rule"),
    ("omega", "pos + rule.window - 1", "pos", "chunk_form"),
    ("omega", "[due * o", "[-due * o", "matrix_by_hand"),
    ("chunks", "(sums - sums.mT)", "(sums.mT - sums)", "chunk_form"),
    ("chunks", "A = before", "A = -before", "chunk_form"),
    ("chunks", "unitriangular=True", "unitriangular=False", "learns_a_pair"),
    ("chunks", "weight = mix.Pairs.mT", "weight = mix.Pairs.flip(1).mT", "chunk_form"),
    ("chunks", "G = G + momprod * S_0S", "G = G + S_0S", "chunk_form"),
    ("chunks", "XS = XS + momprod", "XS = XS + 0 * momprod", "chunk_form"),
    ("chunks", "mix.momprod[..., None] * WR", "WR", "chunk_form"),
    ("chunks", "WR = mix.Write[:, -1,", "WR = mix.Write[:, 0,", "chunk_form"),
    ("chunks", "boundary = W, S\n        full", "pass\n        full", "part_texts"),
    ("layer", "opened * (-keep)", "(-keep)", "forgets_nothing"),
    ("layer", "opened * self.most(momentum)", "opened", "do_not_explode"),
    ("layer", "gate * looks", "gate", "part_texts"),
]


def test_mutants_fit():
    """Catches a fault that nobody tries any more: a line or a test was renamed."""
    for file, old, _, test in MUTANTS:
        assert old in CODE[file], old
        assert any(test in name for name in globals()), test


def mutants():
    """Make each fault in a copy of the folder, and run its test there. Return how many faults no
    test noticed."""
    survivors = 0
    for file, old, new, test in MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "data", "out*"))
            (copy / f"{file}.py").write_text(CODE[file].replace(old, new))
            argv = [sys.executable, "-m", "pytest", "-xq", "-k", test, "test_all.py"]
            done = subprocess.run(argv, cwd=copy, stdout=subprocess.DEVNULL)
        noticed = done.returncode == 1
        print("noticed " if noticed else "SURVIVED", file, old, "->", new, flush=True)
        survivors += not noticed
    return survivors


if __name__ == "__main__" and sys.argv[1:] == ["--mutants"]:
    sys.exit(min(1, mutants()))
