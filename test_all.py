"""test_all.py - all tests: pytest test_all.py. No network, no GPU (tests that want one skip themselves), CPU minutes.

The mathematics comes first: every fast path against its definition, every definition against a formula written here, in
float64. Then data, training and sampling as programs, benchmark and evaluation. Each docstring names the failure that the
test guards against, and `python test_all.py --mutants` shows for more than half of them that it does: it breaks a copy of the project on
purpose, one way at a time, and runs the test that should notice.
"""
import argparse
import ast
import csv
import errno
import gc
import gzip
import hashlib
import importlib
import io
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import weakref
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import count, cycle, product, zip_longest
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import bench
import chunks
import data
import eval
import machine
import memory
import models
import muon
import omega as omega_module
import sample
import train
from memory import LOSSES, MEMORIES
from muon import COEFFICIENTS, newton_schulz, newton_schulz_ref
from omega import Gates, Rule, State, omega, omega_chunk, omega_ref, start, total
from poly import FEATURES, Degree2, Features, features_dim


CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def rubbish_is_collected_seldom():
    """By itself Python walks over all that torch, pytest and this file have made, again and again: 7 seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


# the slowest tests, half of the work: those of torch.compile, of whole programs, of all models
APART = {"test_chunk_steps_compile_whole", "test_chunk_of_few_pairs_compiles_whole", "test_compiled_recurrences_take_a_tile_at_once", "test_export",
         "test_compiled_gates_have_no_gradient_in_half_precision", "test_blocks_of_a_transformer_compile_whole", "test_generating_compiles_nothing",
         "test_what_compiles_only_in_parts_is_still_right", "test_compile_or_no_compiler_the_run_is_the_same", "test_recorded_steps_are_the_same",
         "test_scripts_from_another_folder_to_an_ascii_pipe", "test_what_stdout_does_not_take", "test_two_processes_train_like_one",
         "test_bench_prints_tables_and_json", "test_readme_python_runs", "test_every_field_acts_or_is_idle",
         "test_programs_outlive_the_reader_of_their_messages", "test_every_model_trains", "test_any_split_is_the_whole",
         "test_long_streams_stay_bounded", "test_chunks_read_together", "test_omega_chunk_is_omega_ref"}


@pytest.fixture(scope="session", autouse=True)
def a_second_core(request):
    """When all tests run, those of APART run meanwhile in another process; here they wait for it and tell what became of them: three fifths of the time."""
    items = request.session.items
    apart = [item for item in items if item.originalname in APART]
    if len(items) < 1000 or not apart or "PYTEST_XDIST_WORKER" in os.environ:
        yield
        return
    argv = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *(item.nodeid for item in apart)]
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(argv, stdout=out, stderr=out, cwd=request.config.rootpath) as other:
        def tell(nodeid):
            code = other.wait()
            out.seek(0)
            said = out.read()
            if code > 1 or f"FAILED {nodeid}" in said or f"ERROR {nodeid}" in said:
                pytest.fail(f"in a process of its own:\n{said}", pytrace=False)
        for item in apart:
            item.runtest = partial(tell, item.nodeid)
        items[1:] = sorted(items[1:], key=lambda item: item in apart)            # which wait: the others first
        yield
        other.terminate()


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")             # train.py has set what is best here, if a test before this one called it


def rand(*shape):
    return torch.rand(shape, dtype=torch.float64)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def unit(*shape):
    return F.normalize(randn(*shape), dim=-1)


def close(a, b, tol=1e-10):
    """Equal in shape and in value, relative to the largest number; a NaN on either side is a failure."""
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    error = (a - b).abs().max().item() if a.numel() else 0.0
    assert error <= tol * max(1.0, b.abs().max().item() if b.numel() else 0.0), f"differ by {error:.1e}"


def memories(state):
    """The states of the Omega rule inside of a model's state."""
    if isinstance(state, State):
        return [state]
    return [inner for part in state for inner in memories(part)] if isinstance(state, tuple) else []


def tensors(state):
    """All tensors of a nested tuple, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [t for part in state for t in tensors(part)] if isinstance(state, (tuple, list)) else []


# ---- muon.py

def conditioned(cond, *shape):
    """A random matrix with singular values from 1 down to 1 / cond, and its polar factor U V^T from the SVD."""
    U, _, Vh = torch.linalg.svd(randn(*shape), full_matrices=False)
    return (U * torch.logspace(0, -math.log10(cond), min(shape[-2:]), dtype=torch.float64)) @ Vh, U @ Vh


SHAPES = [(16, 16), (8, 48), (48, 8), (3, 8, 12), (2, 3, 40, 8), (2, 3, 8, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ns_near_polar_factor(shape):
    """Any shape: the singular vectors of S stay, its singular values come into the measured band [0.68, 1.21].

    titans-pytorch returns matrices of fewer than four dimensions untouched; another port fails on tall ones.
    """
    S, polar = conditioned(100, *shape)
    N = newton_schulz(S)
    s = torch.linalg.svdvals(N)
    assert 0.68 < s.min() and s.max() < 1.21
    N, polar = (N, polar) if shape[-2] >= shape[-1] else (N.mT, polar.mT)
    close(polar.mT @ N, N.mT @ polar)                         # N = U f(s) V^T: polar^T N is symmetric, and loses nothing
    close(polar @ polar.mT @ N, N)
    s = torch.linalg.svdvals(newton_schulz(S, 60))            # more steps narrow the band, and do not converge
    assert 0.68 < s.min() and s.max() < 1.14


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ns_cubic_converges(shape):
    """The paper's "k to infinity" needs coefficients that do converge to U V^T, and a polynomial without a slip."""
    S, polar = conditioned(100, *shape)
    close(newton_schulz(S, 30, "cubic"), polar)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(8, 48), (48, 8), (8, 12)], ids=str)
def test_ns_is_the_plain_iteration(shape, name):
    """The short side and the Gram matrix are shortcuts: they must not change the function, for any number of steps."""
    S, (a, b, c) = randn(*shape), COEFFICIENTS[name]
    X = S / S.norm()
    for steps in range(1, 7):
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
        close(newton_schulz(S, steps, name), X)


def test_ns_zero_and_rank_one():
    """A zero matrix (the first momentum of a masked window) must stay zero without a NaN, in the gradient too."""
    for n in (6, 12):
        S = torch.zeros(2, 4, n, requires_grad=True)
        newton_schulz(S).square().sum().backward()
        assert newton_schulz(S).abs().max() == 0 and S.grad.abs().max() == 0
    x, y, s = unit(1, 8).mT, unit(1, 5), 1.0
    for _ in range(5):
        s = sum(c * s ** i for c, i in zip(COEFFICIENTS["muon"], (1, 3, 5)))
    close(newton_schulz(x @ y), s * x @ y)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("shape", [(6, 6), (40, 40), (6, 28), (100, 40)], ids=str)
def test_ns_of_next_to_nothing(shape, flush):
    """Squares underflow long before S does: of |S| = 1e-22 a sum of them had a part or nothing, and NS(S) was NaN, infinite, or that much
    too large. Whatever S is, it counts as zero or in full; a sum of squares that are flushed to zero (machine.tune_cpu) is no exception."""
    S, weight = randn(3, *shape), randn(3, *shape)
    S = (S / S.norm(dim=(1, 2), keepdim=True)).requires_grad_()
    exact = newton_schulz(S)
    dexact, seen = torch.autograd.grad((exact * weight).sum(), S)[0], set()
    was = (torch.full((8,), 1e-38) * 0.1 == 0).all().item()
    try:
        torch.set_flush_denormal(flush)
        for scale in (10 ** (-e / 4) for e in range(60, 97)):                    # 1e-15 to 1e-24
            tiny = (S.detach() * scale).float().requires_grad_()
            N = newton_schulz(tiny)
            dS, = torch.autograd.grad((N * weight.float()).sum(), tiny)
            seen.add(N.count_nonzero().item() > 0)
            full = 1.0 if N.count_nonzero() else 0.0
            close(N.double(), full * exact, 1e-4)
            close(dS.double() * scale / dexact.norm(), full * dexact / dexact.norm(), 1e-4)
            close(newton_schulz_ref(tiny.detach()), N, 1e-4)
    finally:
        torch.set_flush_denormal(was)
    assert seen == {False, True}
    for scale in (1e-1, 1e-3, 1e-4, 1e-6, 1e-8):              # float16, which ends at 65,504: so does 1 / |S|
        assert newton_schulz((S.detach() * scale).half()).isfinite().all()
    assert newton_schulz((S.detach() * 1e-3).half()).abs().max() > 0.01


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_ns_scale_invariant(scale):
    """A norm with an additive epsilon would make small momenta count less: step would no longer set the step."""
    S = randn(3, 8, 12)
    close(newton_schulz(scale * S), newton_schulz(S))
    close(newton_schulz((scale * S).float()).double(), newton_schulz(S), 1e-5)


def test_ns_leaves_its_input_alone():
    """Muon's original normalises in place and so overwrites the caller's momentum."""
    S = randn(8, 12)
    before = S.clone()
    newton_schulz(S)
    assert torch.equal(S, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (8, 48), (48, 8)], ids=str)
def test_ns_half_precision(dtype, shape):
    """Half precision must stay near the exact answer on any matrix, small singular values included, and keep its type."""
    for cond in (2, 30, 1000):
        S, _ = conditioned(cond, *shape)
        for N, kind in ((newton_schulz(S.to(dtype)), dtype), (newton_schulz(S.float(), dtype=dtype), torch.float32)):
            assert N.dtype == kind
            close(N.double(), newton_schulz(S), 0.2)
        more, ref = (ns(S.to(dtype), dtype=torch.float32) for ns in (newton_schulz, newton_schulz_ref))      # and in more than that of S
        close(more.double(), ref.double(), torch.finfo(dtype).eps)
    for ns in (newton_schulz, newton_schulz_ref):
        assert not torch.equal(ns(S.float(), dtype=dtype), ns(S.float()))        # it did iterate in half precision
    assert newton_schulz_ref(S.to(dtype), dtype=torch.float32).dtype == dtype and newton_schulz_ref(S.float(), dtype=dtype).dtype == torch.float32


@pytest.mark.parametrize("shape", [(8, 48), (48, 8), (16, 16)], ids=str)
def test_ns_many_steps_in_float32(shape):
    """Rounding makes the smallest eigenvalues of S S^T negative: iterating on them must not blow up (S of rank 3 is usual)."""
    S = randn(shape[0], 3) @ randn(3, shape[1]) + 1e-6 * randn(*shape)
    for steps, name in ((5, "muon"), (10, "muon"), (30, "cubic")):
        N = newton_schulz(S.float(), steps, name)
        assert torch.linalg.svdvals(N).max() < 1.3, f"{steps} steps of {name}"


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 16, 48), (3, 48, 16)], ids=str)
def test_ns_takes_no_product_zero_times(shape, monkeypatch):
    """torch.baddbmm(y, A, B, beta=b, alpha=0) is y where oneDNN computes it (bfloat16; float32 with --matmul medium): cubic was off by a factor of 3."""
    S, weight = randn(*shape), randn(*shape)
    exact, baddbmm = S.clone().requires_grad_(), torch.baddbmm

    def honest(*args, alpha=1.0, **more):
        assert alpha
        return baddbmm(*args, alpha=alpha, **more)
    want = newton_schulz_ref(exact, 4, "cubic")
    gradient, = torch.autograd.grad((want * weight).sum(), exact)
    monkeypatch.setattr(torch, "baddbmm", honest)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, dtype, eps in (("highest", None, 1e-5), ("medium", None, 0.1), ("highest", torch.bfloat16, 0.1)):
            torch.set_float32_matmul_precision(precision)
            rounded = S.float().requires_grad_()
            N = newton_schulz(rounded, 4, "cubic", dtype=dtype)
            close(N.double(), want, eps)
            dS, = torch.autograd.grad((N * weight.float()).sum(), rounded)
            close(dS.double() / gradient.norm(), gradient / gradient.norm(), eps)
    finally:
        torch.set_float32_matmul_precision(before)


def test_ns_gradient():
    """The outer gradient goes through the iteration (or, straight-through, past it); a detached norm would be wrong by a rank."""
    for shape in ((3, 4), (2, 5), (5, 2)):
        assert torch.autograd.gradcheck(lambda S: newton_schulz(S, 3), randn(*shape).requires_grad_())
    S, weight = randn(4, 3).requires_grad_(), randn(4, 3)
    straight, = torch.autograd.grad((newton_schulz(S, straight_through=True) * weight).sum(), S)
    plain, = torch.autograd.grad((S / S.norm() * weight).sum(), S)
    close(straight, plain)
    close(newton_schulz(S, straight_through=True), newton_schulz(S))


@pytest.mark.parametrize("shape", [(8, 48), (48, 8)], ids=str)
def test_ns_gradient_in_float32(shape):
    """S loses its condition squared in S S^T, and iterating on that alone would multiply the rounding: the gradient would be off by 0.001."""
    S, weight = conditioned(1e6, *shape)[0], randn(*shape)
    leaves = S.requires_grad_(), S.detach().float().requires_grad_()
    exact, rounded = (torch.autograd.grad((newton_schulz(s) * weight).sum(), s)[0] for s in leaves)
    close(rounded.double() / exact.norm(), exact / exact.norm(), 3e-5)


@pytest.mark.parametrize("m, n, rank, most", [(16, 153, 3, 0.004), (153, 16, 3, 0.005), (16, 153, 1, 0.01), (153, 16, 1, 0.04)])
def test_ns_gradient_of_low_rank_in_float32(m, n, rank, most):
    """README, choice 14: what rounding there is in the null space of S grows with each of Muon's steps, and five are few enough."""
    S = randn(m, rank) @ randn(rank, n)
    U, _, V = torch.linalg.svd(S, full_matrices=False)
    P, Q, off = U[:, :rank] @ U[:, :rank].T, V[:rank].T @ V[:rank], []
    weight = P @ randn(m, n) if m < n else randn(m, n) @ Q    # in the range of S; anything else is itself multiplied, and hides that
    for steps in (5, 10):
        leaves = S.clone().requires_grad_(), S.float().requires_grad_()
        exact, rounded = (torch.autograd.grad((newton_schulz(s, steps) * weight).sum(), s)[0] for s in leaves)
        off.append(((rounded - exact).norm() / exact.norm()).item())
    assert off[0] < most and off[1] > 0.1


def test_ns_where_products_are_coarse(monkeypatch):
    """TF32 and bfloat16 products would make S S^T indefinite: then X X^T is taken in every step."""
    S, cuda = randn(2, 8, 48), torch.device("cuda")
    assert muon.exact_products(cuda) and muon.exact_products(S.device) and muon.exact_on_this_cpu.__wrapped__("highest")
    on_gram = newton_schulz(S)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert not muon.exact_products(cuda)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: mm(a.bfloat16(), b.bfloat16()).float())
    muon.exact_on_this_cpu.cache_clear()
    assert not muon.exact_products(S.device)
    muon.exact_on_this_cpu.cache_clear()
    monkeypatch.setattr(muon, "exact_products", lambda device: False)
    monkeypatch.setattr(chunks, "exact_products", lambda device: False)
    monkeypatch.setattr(muon, "iterate_on_gram", None)
    close(newton_schulz(S), on_gram)
    small("atlas")(torch.zeros(1, 9, dtype=torch.long))


def test_precision_set_in_torchs_newer_way():
    """torch.get_float32_matmul_precision refuses to answer then: no atlas would run in a program that allows TF32 so."""
    before, matmul = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    old = matmul.fp32_precision
    for new in ("tf32", "ieee"):
        try:
            matmul.fp32_precision = new
            assert muon.exact_products(torch.device("cuda")) == (new == "ieee") and muon.exact_products(torch.device("cpu"))
            assert small("atlas")(torch.zeros(1, 9, dtype=torch.long))[0].isfinite().all()
        finally:
            matmul.fp32_precision = old
            torch.set_float32_matmul_precision(before)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("steps", [4, 5, 7])
@pytest.mark.parametrize("straight_through", [False, True])
def test_ns_of_several_matrices(straight_through, steps):
    """Matrices of one memory share an iteration where their short sides are equal: each must come back as if it were alone."""
    S = tuple(randn(2, *shape).requires_grad_() for shape in ((9, 3), (3, 3), (4, 9), (3, 7), (4, 5)))
    weight = [randn(*s.shape) for s in S]
    results = []
    for fn in (lambda S: newton_schulz(S, steps, straight_through=straight_through),
               lambda S: tuple(newton_schulz_ref(s, steps, straight_through=straight_through) for s in S)):
        out = fn(S)
        results.append(out + torch.autograd.grad(sum((a * w).sum() for a, w in zip(out, weight)), S))
    for a, b in zip(*results, strict=True):
        close(a, b)


def test_ns_unknown_coefficients():
    """An unknown name must be refused with the list of known ones, not fall through to some default; and no steps at all."""
    with pytest.raises(ValueError, match="cubic"):
        newton_schulz(torch.eye(2), coefficients="quintic")
    with pytest.raises(ValueError, match="at least one step"):
        newton_schulz(torch.eye(2), steps=0)
    phi, x = problem("mlp", "l2", 1, 4)
    with pytest.raises(ValueError, match="cubic"):
        learn(omega, Rule("mlp", "l2", 1, 4, 2, ns_coefficients="quintic"), phi, x)


# ---- poly.py

def make_phi(kind, dim, degree=2, **more):
    """Features in float64 with scales that are neither 1 nor equal."""
    phi = Features(kind, dim, degree, **more).double()
    if hasattr(phi, "scale"):
        phi.scale.data = 0.5 + rand(len(phi.scale))
    return phi


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_phi_kernel(degree):
    """phi(x).phi(y) = sum_i s_i^2 (x.y)^i (Eq 5): wrong multinomials, or s_i^2 where s_i belongs, is another kernel."""
    phi, x, y = make_phi("monomial", 3, degree), randn(5, 3), randn(7, 3)
    kernel = sum(s ** 2 * (x @ y.mT) ** i for i, s in enumerate(phi.scale))
    close(phi(x) @ phi(y).mT, kernel)
    close(phi.inner(x, y), kernel)
    assert phi(x).shape[-1] == phi.out_dim == features_dim("monomial", 3, degree) == math.comb(3 + degree, degree)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_phi_gradient(degree):
    """The written-out gradient of the monomials, to x and to the scales, which may be 0 (a quotient would lose them there)."""
    phi, x = make_phi("monomial", 3, degree), randn(2, 4, 3).requires_grad_()
    call = lambda x, scale: torch.func.functional_call(phi, {"scale": scale}, (x,))
    for some in [torch.ones(degree + 1), *(1 - torch.eye(degree + 1))]:
        scale = (phi.scale.detach() * some).requires_grad_()
        assert torch.autograd.gradcheck(call, (x, scale), fast_mode=True)


def test_phi_starts_as_the_exponential():
    """s_i must start at 1 / sqrt(i!): 1 / i! on both sides squares the Taylor coefficients."""
    x, y = unit(5, 4), unit(5, 4)
    close(Features("monomial", 4, 6).double().inner(x, y), (x @ y.mT).exp(), 1e-3)
    close(Features("sketch", 4, sketch_dim=3).scale.square(), torch.tensor([1, 1, 0.5]), 1e-6)


@pytest.mark.parametrize("kind", ["none", "elementwise", "monomial", "sketch"])
def test_phi_inner(kind):
    """The kernel shortcut must be phi phi^T, for any leading dimensions."""
    phi, x, y = make_phi(kind, 4, 3, sketch_dim=5), randn(2, 3, 5, 4), randn(2, 3, 6, 4)
    close(phi.inner(x, y), phi(x) @ phi(y).mT)
    assert phi(x).shape == (2, 3, 5, phi.out_dim)


def test_phi_one_by_one():
    """none is x itself, elementwise a sum of powers, exp its kernel; an unknown name must not pass for none."""
    x, y = randn(5, 3), randn(6, 3)
    close(Features("none", 3)(x), x)
    powers = Features("elementwise", 3, 3).double()
    powers.scale.data = torch.tensor([0.5, 2.0, 3.0, 4.0]).double()
    close(powers(x), 0.5 + 2 * x + 3 * x * x + 4 * x * x * x)
    close(Features("exp", 3).inner(x, y), (x @ y.mT).exp())
    with pytest.raises(ValueError, match="monomial"):
        Features("polynomial", 3)


def test_sketch_is_unbiased():
    """The sketch's degree-2 part is (x.y)^2 on average, with variance (1 + 4 d^2 + 3 d^4) / m for unit x, y and d = x.y."""
    x, m, n = unit(2, 6), 4, 2000
    parts = [Features("sketch", 6, sketch_dim=m, seed=seed)(x.float())[:, 7:].double() for seed in range(n)]
    estimate = torch.stack([2 * a @ b for a, b in parts])     # s_2^2 = 1 / 2
    d = x[0] @ x[1]
    std = ((1 + 4 * d ** 2 + 3 * d ** 4) / m).sqrt()
    close(estimate.mean(), d ** 2, 4 * std / n ** 0.5)
    close(estimate.std() / std, torch.tensor(1.0).double(), 0.2)


def test_sketch_travels_with_the_model():
    """atlas-pytorch keeps its random matrices outside state_dict: a saved model came back as another one."""
    a, b = Features("sketch", 4, sketch_dim=5, seed=1), Features("sketch", 4, sketch_dim=5, seed=2)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(torch.ones(4)), b(torch.ones(4)))


CAPACITY = [("none", 1, 8), ("elementwise", 2, 8), ("elementwise", 3, 8), ("monomial", 2, 44), ("monomial", 3, 156)]


@pytest.mark.parametrize("kind, degree, most", CAPACITY, ids=str)
def test_capacity(kind, degree, most):
    """Prop 2, by least squares: a linear memory of d = 8 unit keys holds 44 pairs with p = 2, one more does not fit.

    Powers of each variable alone hold no more than the keys themselves: it is the products of variables that count.
    """
    def misfit(m):
        x, v = Features(kind, 8, degree).double()(unit(m, 8)).detach(), randn(m, 3)
        return (x @ torch.linalg.lstsq(x, v, driver="gelsd").solution - v).norm() / v.norm()
    assert misfit(most) < 1e-8 < 1e-3 < misfit(most + 1)


# ---- memory.py

def weights(kind, e, d, hidden, *lead):
    return [0.5 * randn(*lead, *shape) for shape in memory.shapes(kind, e, hidden, d)]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_formula(kind, norm):
    """M(x) as printed: Eq 42 and 43 with the residual on the key; a lost residual or a swapped gate is another memory."""
    x, r = randn(7, 5), randn(7, 3)
    W = weights(kind, 5, 3, 4)
    gelu = lambda z: z * 0.5 * (1 + torch.erf(z / 2 ** 0.5))
    normed = lambda f: f / (f.square().mean(-1, keepdim=True) + memory.EPS).sqrt() if norm else f
    M = {"linear": lambda A: x @ A,
         "mlp": lambda A, B: r + normed(gelu(x @ A) @ B),
         "gated": lambda A, B, C: r + normed((gelu(x @ A) * (x @ B)) @ C)}[kind](*W)
    close(memory.apply(kind, W, x, r, norm), M)


def test_losses():
    """Sums, not means (a mean divides the inner step by D), and the signs that write + v k^T."""
    y, v = torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, -1.5]])
    expect = {"l2": 0.5 * (2 ** 2 + 0.5 ** 2), "dot": -(3 + 1.5), "huber": 1.5 + 0.125, "lp": (8 + 0.125) / 3}
    assert sorted(expect) == sorted(LOSSES)
    for kind, value in expect.items():
        close(memory.loss(kind, y, v), torch.tensor(value), 1e-6)


def test_a_new_loss_is_never_another():
    """A loss that is new in one of three places would run as lp, or with l2's gradient, in the others, without a word; a memory as gated."""
    y, v = randn(2, 3), randn(2, 3)
    for call in (lambda: memory.loss("new", y, v), lambda: memory.error("new", y, v), lambda: memory.error_backward("new", y, y, v),
                 lambda: memory.hidden("new", y), lambda: memory.apply("new", [], y, y), lambda: memory.hidden_backward("new", y, y),
                 lambda: memory.gradients_again("new", [randn(2, 3, 4), randn(2, 4, 3)], randn(2, 5, 3), (randn(2, 5, 4), None, randn(2, 5, 3)))):
        with pytest.raises(ValueError, match="'new'"):
            call()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_gradients(kind, loss, norm):
    """The closed form against autograd of the printed loss; fla's Titans has two forms that agree, and both are wrong."""
    x, r, v = randn(2, 7, 5), randn(2, 7, 3), 2 * randn(2, 7, 3)
    W = [w.requires_grad_() for w in weights(kind, 5, 3, 4, 2)]
    expect = torch.autograd.grad(memory.loss(loss, memory.apply(kind, W, x, r, norm), v), W)
    pairs, _ = memory.gradients(kind, loss, memory.pack(W), x, memory.target(kind, loss, r, v), norm)
    for (a, d), g in zip(pairs, memory.pack(expect), strict=True):
        close(a.mT @ d, g)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_gradients_outer(kind, loss, norm):
    """The outer gradient of the closed form, written out too, against autograd of the closed form."""
    inputs = [randn(2, 7, 5), 2 * randn(2, 7, 3), *memory.pack(weights(kind, 5, 3, 4, 2))]
    x, v, *W = inputs = [a.requires_grad_() for a in inputs]
    pairs, saved = memory.gradients(kind, loss, W, x, v, norm)
    slow = [*(d for _, d in pairs), *(a for a, _ in pairs[1:])]
    up = [randn(*a.shape) for a in slow]
    slow = torch.autograd.grad(slow, inputs, up, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        again = memory.gradients_again(kind, W, x, saved)
        *dd, da = up if len(up) > 1 else [*up, None]
        dW, dz, dv = memory.gradients_backward(kind, loss, again, v, norm, dd, da)
        fast = memory.transposed_product(dz, W[0], x), dv, *(memory.outer(group) for group in dW)
    for a, b in zip(fast, slow, strict=True):
        close(a, b)


# ---- omega.py: the chunk-parallel form is the token-by-token rule

def problem(kind, loss, window, T, momentum=True, features="monomial", degree=2, D=3, B=2, H=2):
    """A random problem for the rule: phi, and every input by name, all of them leaves."""
    phi = make_phi(features, D, degree, sketch_dim=4)
    x = dict(q=unit(B, H, T, D), k=unit(B, H, T, D), v=randn(B, H, T, D), keep=0.5 + rand(B, H, T) / 2,
             step=0.2 * rand(B, H, T), gate=rand(B, H, T, window))
    if momentum:
        x["momentum"] = 0.9 * rand(B, H, T)
        x |= {f"S0[{i}]": 0.3 * w for i, w in enumerate(weights(kind, phi.out_dim, D, 3, B, H))}
    x |= {f"M0[{i}]": w for i, w in enumerate(weights(kind, phi.out_dim, D, 3, H))}
    return phi, {name: a.requires_grad_() for name, a in x.items()}


def learn(fn, rule, phi, x, cuts=()):
    """Run `fn` over the tokens, in pieces that begin at `cuts`: y, final state."""
    M0, S0 = (tuple(a for name, a in x.items() if name.startswith(which)) for which in ("M0", "S0"))
    state = start(rule, phi, M0, len(x["q"]), momentum=x.get("momentum") is not None)
    if S0:                                                    # more than the rule starts with, and so no longer at rest
        state = state._replace(S=S0, zero=False)
    ys = []
    for a, b in zip((0, *cuts), (*cuts, x["q"].shape[2])):
        q, k, v, *gates = (None if x.get(name) is None else x[name][:, :, a:b] for name in ("q", "k", "v", *Gates._fields))
        y, state = fn(rule, phi, q, k, v, Gates(*gates), state)
        ys.append(y)
    return torch.cat(ys, 2), state


EQUAL = {                         # memory, loss, window, chunk, momentum, muon_every, T, tokens in an earlier call, features
    "titans":                    ("mlp",    "l2",    1,  8, True,  0, 21, 0, "none"),
    "linear attention":          ("linear", "dot",   1,  8, False, 0, 16, 0, "none"),
    "omeganet":                  ("mlp",    "l2",    5,  8, False, 0, 21, 0, "monomial"),
    "momentum, mid-chunk":       ("mlp",    "l2",    5,  8, True,  0, 18, 3, "monomial"),
    "window beyond the chunk":   ("mlp",    "dot",  12,  4, True,  0, 13, 5, "none"),
    "window beyond the text":    ("linear", "l2",   12,  4, False, 0,  6, 3, "monomial"),
    "gated":                     ("gated",  "l2",    5,  8, True,  0, 13, 0, "none"),
    "gated, dot":                ("gated",  "dot",   1,  4, False, 0,  9, 2, "elementwise"),
    "T < chunk":                 ("mlp",    "l2",    3,  8, True,  0,  5, 0, "none"),
    "T = 1":                     ("gated",  "l2",    3,  8, True,  0,  1, 0, "none"),
    "T = 1, mid-chunk":          ("mlp",    "l2",    3,  8, True,  0,  1, 5, "none"),
    "linear, cubic features":    ("linear", "l2",    5,  4, True,  0, 10, 0, "monomial, cubic"),
    "sketch":                    ("mlp",    "l2",    2,  4, True,  0, 10, 0, "sketch"),
    "huber":                     ("mlp",    "huber", 3,  8, True,  0, 10, 0, "none"),
    "lp":                        ("gated",  "lp",    3,  8, True,  0, 10, 0, "none"),
    "sequential":                ("mlp",    "l2",    3,  1, True,  0,  6, 0, "none"),
    "forget what was written":   ("mlp",    "l2",    3,  4, True,  0, 10, 2, "monomial, from M0"),
    "from rest":                 ("gated",  "l2",    3,  4, True,  0, 10, 2, "monomial, from M0, from rest"),
    "from rest, no momentum":    ("mlp",    "l2",    3,  4, False, 0, 10, 0, "none, from M0"),
    "norm in the memory":        ("mlp",    "l2",    3,  4, True,  0, 10, 2, "none, norm"),
    "atlas":                     ("mlp",    "l2",    5,  8, True,  1, 11, 0, "monomial"),
    "atlas, norm, from M0":      ("gated",  "l2",    3,  8, True,  2, 10, 3, "none, norm, from M0"),
    "atlas, from rest":          ("mlp",    "l2",    5,  8, True,  8, 19, 0, "monomial, from M0, from rest"),
    "atlas, blocks from rest":   ("gated",  "l2",    5,  8, True,  3, 10, 0, "none, from M0, from rest"),
    "atlas, mid-block":          ("mlp",    "l2",    5,  8, True,  4, 19, 6, "none"),
    "atlas, across blocks":      ("mlp",    "l2",    3,  8, True,  4,  3, 3, "none"),
    "atlas, block = chunk":      ("mlp",    "l2",    5,  8, True,  8, 21, 3, "none"),
    "atlas, ragged block":       ("linear", "l2",    1,  8, True,  3, 21, 7, "monomial"),
    "atlas, window > chunk":     ("gated",  "dot",  12,  4, True,  1,  9, 2, "none"),
    "atlas, no momentum":        ("mlp",    "l2",    5,  8, False, 4, 13, 3, "none"),
    "atlas, no momentum, long":  ("mlp",    "l2",    3,  4, False, 2, 12, 0, "none"),
    "atlas, by pairs":           ("mlp",    "l2",    2,  8, False, 1, 21, 3, "monomial"),
    "atlas, by pairs, gated":   ("gated",  "huber", 2,  8, False, 1, 13, 0, "none, from M0, norm"),
    "atlas, by pairs, linear":  ("linear", "dot",   2,  1, False, 1,  5, 2, "none"),
    "atlas, many pairs":        ("mlp",    "l2",    5,  8, False, 1, 13, 3, "monomial"),
    "atlas, T = 1, mid-block":   ("mlp",    "l2",    3,  8, True,  4,  1, 6, "none"),
    "atlas, six steps":          ("mlp",    "l2",    3,  8, True,  4, 10, 3, "none, six steps"),
    "atlas, straight through":   ("gated",  "l2",    3,  8, True,  4, 10, 0, "none, straight through"),
    "atlas, converging":         ("mlp",    "l2",    3,  8, True,  4, 10, 3, "monomial, converging"),
    "atlas, by pairs, three":    ("mlp",    "l2",    2,  4, False, 1, 10, 3, "monomial, three steps"),
    "atlas, by pairs, conv.":    ("mlp",    "l2",    2,  4, False, 1, 10, 0, "monomial, converging"),
    "atlas, sequential":         ("gated",  "l2",    3,  1, True,  1,  5, 0, "none"),
}


def test_every_choice_is_compared_with_the_reference():
    """A memory, loss or feature map that is new, and in no case above."""
    kinds, losses, _, _, _, _, _, _, features = zip(*EQUAL.values())
    assert set(kinds) == set(MEMORIES) and set(losses) == set(LOSSES)
    assert {name.split(",")[0] for name in features} == set(FEATURES) - {"exp"}                  # which no reference can write out


def of_case(case, ball=0.0):
    """A random problem of EQUAL: rule, phi, inputs, and where the tokens are cut."""
    kind, loss, window, chunk, momentum, muon_every, T, earlier, features = case
    phi, x = problem(kind, loss, window, T + earlier, momentum, features.split(",")[0], degree=3 if "cubic" in features else 2)
    rule = Rule(kind, loss, window, chunk, muon_every, norm="norm" in features, forget="start" if "M0" in features else "zero", ball=ball,
                ns_steps=6 if "six" in features else 3 if "three" in features else 5,
                ns_coefficients="cubic" if "converging" in features else "muon", straight_through="straight" in features)
    if "rest" in features:                                    # without an S0: the fast form then skips products with zero
        x = {name: a for name, a in x.items() if not name.startswith("S0")}
    return rule, phi, x, (earlier,) if earlier else ()


def all_of(fn, rule, phi, x, cuts):
    """Outputs and final state; every outer gradient; the state's pos."""
    y, state = learn(fn, rule, phi, x, cuts)
    out = [y, *tensors(state)]
    torch.manual_seed(1)
    outer = sum((a * randn(*a.shape)).sum() for a in out)              # a random gradient for everything that comes out
    return out, torch.autograd.grad(outer, list(x.values()) + list(phi.parameters())), state.pos


def both_ways(case, ball=0.0, fast=omega):
    """Outputs, final state and every outer gradient of `fast` are those of omega_ref -> outputs and state, `fast` once more, its inputs."""
    problem = of_case(case, ball)
    (out, grads, pos), (fast_out, fast_grads, fast_pos) = (all_of(fn, *problem) for fn in (omega_ref, fast))
    assert pos == fast_pos and len(out) == len(fast_out)
    for a, b in zip(fast_out + list(fast_grads), out + list(grads), strict=True):
        close(a, b)
    return out, lambda: learn(fast, *problem), list(problem[2].values()) + list(problem[1].parameters())


@pytest.mark.parametrize("case", EQUAL.values(), ids=EQUAL.keys())
def test_omega_is_omega_ref(case):
    """A fast path that is only nearly the rule, or not differentiable."""
    both_ways(case)


@pytest.mark.parametrize("name", sorted(EQUAL.keys() - {"atlas, by pairs, gated"}))      # there gradients of S of rank one are beyond float16
def test_products_in_half_precision(name):
    """Rule.dtype: outputs, states and outer gradients are off by what float32 is off, times 2^13 by which float16 rounds more, and 8 for chance."""
    rule, phi, x, cuts = of_case(EQUAL[name])
    single = deepcopy(phi).float(), {name: a.detach().float().requires_grad_() for name, a in x.items()}, cuts
    exact, near, half = (out + list(grads) for out, grads, _ in (
        all_of(omega, rule, phi, x, cuts), all_of(omega, rule, *single), all_of(omega, rule._replace(dtype=torch.float16), *single)))
    off = lambda a, b: (a - b).norm() / b.norm().clamp_min(1e-9)
    for a, b, c in zip(half, near, exact, strict=True):
        assert a.dtype == torch.float32                       # what is carried on
        assert off(a, c) < 2**16 * off(b, c) + 2e-3


def test_who_is_in_half_precision():
    """P, which multiplies in it, for it is as large as all products of pairs; not the gradient of M0, an optimizer's."""
    gates = Gates(torch.rand(2, 4), torch.rand(2, 4), torch.rand(2, 4), torch.rand(2, 4, 3))
    mix = omega_module.mixing(Rule(dtype=torch.bfloat16, window=3), gates, 0)
    assert {name for name, a in mix.items() if a.dtype != torch.float32} == {"P"} and mix["P"].dtype == torch.bfloat16
    m = torch.zeros(2, 3, 4)
    assert chunks.of_heads(torch.ones(2, 3, 4).bfloat16(), m).dtype == chunks.of_heads(torch.ones(6, 3, 4).bfloat16(), m).dtype == torch.float32


def test_who_goes_by_pairs(monkeypatch):
    """Only sums of few pairs, in full precision; the others would be slower, less exact, or wrong."""
    gone, run = [], omega_module.pairs_run
    monkeypatch.setattr(omega_module, "pairs_run", lambda *args: gone.append(name) or run(*args))
    for name, case in EQUAL.items():
        rule, phi, x, cuts = of_case(case)
        learn(omega, rule, phi, x, cuts)
        learn(omega, rule._replace(ns_gram=False), phi, x, cuts)
    assert set(gone) == {name for name in EQUAL if "by pairs" in name}
    gone, name = [], "single"
    rule, phi, x, cuts = of_case(EQUAL["atlas, by pairs"])
    x = {key: a.detach().float() for key, a in x.items()}
    for how in (dict(ns_dtype=torch.bfloat16), dict(dtype=torch.bfloat16), dict(straight_through=True), dict(ns_steps=6),
                dict(ns_steps=16, ns_coefficients="cubic")):
        learn(omega, rule._replace(**how), phi.float(), x, cuts)
    monkeypatch.setattr(omega_module, "exact_products", lambda device: False)
    learn(omega, rule, phi, x, cuts)
    assert not gone


@pytest.mark.parametrize("w, m, n", [(1, 5, 4), (3, 9, 4), (4, 5, 5), (6, 9, 4)])
def test_ns_of_pairs(w, m, n):
    """The same as of the sum itself, and its gradient, of more pairs than it has rank and of equal ones, too; of nothing, nothing."""
    X, D = randn(3, w, m).requires_grad_(), randn(3, w, n).requires_grad_()
    up = randn(3, m, n)
    with torch.no_grad():
        X[1, -1], D[2, -1] = X[1, 0], D[2, 0]
    least, of_float32 = (muon.least_square(dtype, m * n) for dtype in (torch.float64, torch.float32))
    for how in ((5, "muon"), (7, "cubic")):
        of_sum, of_pairs = newton_schulz_ref(X.mT @ D, *how), X.mT @ muon.newton_schulz_of_pairs(X @ X.mT, D, least, *how)
        close(of_pairs, of_sum)
        for a, b in zip(torch.autograd.grad((up * of_pairs).sum(), (X, D)), torch.autograd.grad((up * of_sum).sum(), (X, D)), strict=True):
            close(a, b)
    assert muon.newton_schulz_of_pairs(X @ X.mT, 1e-30 * D, least).any()
    with pytest.raises(ValueError, match="at least one step"):
        muon.newton_schulz_of_pairs(X @ X.mT, D, least, 0)
    for E in (muon.newton_schulz_of_pairs(X @ X.mT, 1e-30 * D, of_float32), muon.newton_schulz_of_pairs(X @ X.mT, 0 * D, least)):
        assert not E.any() and not any(g.any() for g in torch.autograd.grad(E.sum(), (X, D)))


def test_ns_of_pairs_that_cancel():
    """In float64, of pairs in float32, it is as exact as the sum itself in float32 until that is a thousandth of them, and no larger than any other
    below that: one that is divided by too small an |S| ends in NaN.
    """
    torch.manual_seed(0)
    for much in (0.1, 0.01, 1e-4, 0):
        D = torch.randn(500, 8, 16)
        X = F.normalize(torch.randn(500, 1, 24), dim=-1) + much * torch.randn(500, 8, 24) / 5
        D = (D - D.mean(1, keepdim=True)).double().requires_grad_()
        X = X.double().requires_grad_()
        O = X.mT @ muon.newton_schulz_of_pairs(X @ X.mT, D, muon.least_square(torch.float32, 24 * 16))
        assert all(g.isfinite().all() for g in torch.autograd.grad(O.square().sum(), (X, D)))
        assert torch.linalg.matrix_norm(O).max() < 1.25 * 8**0.5
        if much >= 0.01:
            exact = newton_schulz_ref(X.mT @ D)
            assert (O - exact).norm() < 1e-6 * exact.norm()


def test_pairs_go_in_float64():
    """Keys that are alike with values that take turns, in float32: rounding of their inner products would be what is written."""
    phi, T = Features("none", 16), 32
    q = F.normalize(torch.randn(1, 1, 1, 16) + 0.003 * torch.randn(1, 1, T, 16), dim=-1)
    v = torch.randn(1, 1, 1, 16) * torch.tensor([1.0, -1.0]).repeat(T // 2)[:, None] + 0.003 * torch.randn(1, 1, T, 16)
    gates = Gates(torch.full((1, 1, T), 0.9), torch.full((1, 1, T), 0.1), None, torch.ones(1, 1, T, 8))
    rule = Rule("linear", "dot", 8, 16, 1)
    M0 = [torch.randn(1, 16, 16)]
    double = lambda a: None if a is None else a.double()
    exact = omega_ref(rule, phi, *map(double, (q, q, v)), Gates(*map(double, gates)), start(rule, phi, [m.double() for m in M0], 1, False))[0]
    y = omega(rule, phi, q, q, v, gates, start(rule, phi, M0, 1, False))[0]
    assert (y - exact).norm() < 5e-5 * exact.norm()
    state = omega(rule, phi, q, q, 1e-25 * v, gates, start(rule, phi, M0, 1, False)._replace(W=(torch.zeros_like(M0[0][None]),)))[1]
    assert not state.W[0].any()                               # as in float32, where its square is 0


def test_ns_of_pairs_in_float32():
    """Keys that are much alike, as polynomial features are, and values of rank two: as powers of one matrix its rounding would grow to more
    than the whole.
    """
    torch.manual_seed(0)
    x = Features("monomial", 16)(F.normalize(torch.randn(200, 1, 16) + 0.1 * torch.randn(200, 8, 16), dim=-1)).detach()
    for X, D in ((x, torch.randn(200, 8, 16)), (torch.randn(200, 8, 16), torch.randn(200, 8, 2) @ torch.randn(200, 2, 16))):
        exact = newton_schulz_ref(X.double().mT @ D.double())
        off = X.double().mT @ muon.newton_schulz_of_pairs(X @ X.mT, D, 1e-30).double() - exact
        assert off.norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("muon_every, chunk", [(0, 2), (2, 2), (2, 4)])
def test_what_goes_from_chunk_to_chunk_is_not_in_half_precision(muon_every, chunk):
    """Rule.dtype: in bfloat16 a keep of 0.999 is 1. Here it is all that happens, a hundred times, to W and then to its gradient."""
    phi, x = problem("mlp", "l2", 3, 200)
    x = {name: a.detach().float().requires_grad_() for name, a in x.items() if not name.startswith("S0")}
    x |= dict(step=torch.zeros_like(x["step"]), keep=torch.full_like(x["keep"], 0.999))
    M0 = [x["M0[0]"], x["M0[1]"]]
    W = learn(omega, Rule(window=3, chunk=chunk, muon_every=muon_every, dtype=torch.bfloat16), phi.float(), x)[1].W
    for w, m, g in zip(W, M0, torch.autograd.grad(sum(w.sum() for w in W), M0)):
        close(w, 0.999**200 * m.expand_as(w), 1e-4)
        close(g, torch.full_like(g, 2 * 0.999**200), 1e-4)


def recur_by_product(factors, rows):
    """What a GPU and compiled code take for steps."""
    y = omega_module.decay(omega_module.log(factors))[1] @ rows
    return y, y[..., -1, :].clone()


@pytest.mark.parametrize("muon_every, chunk", [(0, 2), (1, 2), (2, 4)])
def test_gates_are_not_in_half_precision(muon_every, chunk, monkeypatch):
    """Rule.dtype: the products that a GPU takes of them, instead of steps, are not in bfloat16, where S would decay by 1 or by too much."""
    monkeypatch.setattr(omega_module, "recur", recur_by_product)
    phi, x = problem("mlp", "l2", 3, 200)
    x |= dict(gate=torch.zeros_like(x["gate"]), momentum=torch.full_like(x["momentum"], 0.999))
    x = {name: a.detach().float() for name, a in x.items()}
    S = learn(omega, Rule(window=3, chunk=chunk, muon_every=muon_every, dtype=torch.bfloat16), phi.float(), x)[1].S
    for i, s in enumerate(S):
        close(s, 0.999**200 * x[f"S0[{i}]"], 1e-4)


@pytest.mark.parametrize("dtype, weights", [
    (torch.bfloat16, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.int8, torch.float32)])
def test_half_precision_is_half_of_float32(dtype, weights):
    """Others would be right by chance alone."""
    phi, x = problem("mlp", "l2", 3, 8)
    with pytest.raises(ValueError, match="float32"):
        learn(omega, Rule(window=3, chunk=2, dtype=dtype), phi.to(weights), {name: a.to(weights) for name, a in x.items()})


@pytest.mark.parametrize("case", EQUAL.values(), ids=EQUAL.keys())
def test_omega_chunk_is_omega_ref(case):
    """Formulas that are not what omega.py's docstring says: of whole chunks, and of those after an earlier one."""
    *rule, T, earlier, features = case
    chunk = rule[3]
    both_ways((*rule, max(1, T // chunk) * chunk, chunk if earlier else 0, features), ball=0.7, fast=omega_chunk)


@pytest.mark.parametrize("muon_every", [0, 2])
@pytest.mark.parametrize("T, earlier", [(6, 0), (4, 3), (4, 6)])
def test_omega_chunk_of_parts_of_chunks(T, earlier, muon_every):
    """Taken for whole ones, the next token would learn at a wrong anchor; refused, who trains with it could neither validate nor sample."""
    both_ways(("mlp", "l2", 2, 4, True, muon_every, T, earlier, "monomial"), fast=omega_chunk)


@pytest.mark.parametrize("T, earlier, by_ref", [(8, (), []), (19, (1,), [1, 3, 3]), (3, (), [3]), (9, (), [1])])
def test_omega_chunk_leaves_only_parts_of_chunks_to_omega_ref(T, earlier, by_ref, monkeypatch):
    """A text of 1,023 tokens, or one behind four persistent tokens, would all be read token by token: 50 times as long."""
    seen = []
    def ref(rule, phi, q, *others):
        seen.append(q.shape[2])
        return omega_ref(rule, phi, q, *others)
    phi, x = problem("mlp", "l2", 2, T, momentum=False)
    rule = Rule(window=2, chunk=4)
    y, expected = (learn(f, rule, phi, x, earlier)[0] for f in (omega_chunk, omega))
    assert torch.allclose(y, expected, rtol=0, atol=1e-10)
    monkeypatch.setattr(sys.modules["omega"], "omega_ref", ref)
    learn(omega_chunk, rule, phi, x, earlier)
    assert seen == by_ref


STRETCHES = {"titans": [3], "omeganet": [2, 3], "gated": [2], "linear, cubic features": [2], "lp": [3], "from rest": [2, 3],
             "from rest, no momentum": [1, 2], "norm in the memory": [2], "momentum, mid-chunk": [3], "atlas, from rest": [2, 3],
             "atlas, block = chunk": [1], "atlas, mid-block": [2], "atlas, no momentum, long": [2]}


@pytest.mark.parametrize("name, size", [(name, size) for name, sizes in STRETCHES.items() for size in sizes])
def test_chunks_read_together(name, size, monkeypatch):
    """Chunks of a long run are read one at a time, in pairs with one left over, in threes and twos; without a gradient, in the room of one
    stretch; with a gradient, and a state at the end that nobody uses."""
    *case, T, earlier, features = EQUAL[name]
    chunk, muon_every = case[3], case[5]
    T = (4 if muon_every else 5) * chunk + T % chunk          # Newton-Schulz makes more of rounding errors with every chunk
    cut = chunks.stretches

    def so_many(parts, weights, alone):
        monkeypatch.setitem(chunks.AT_ONCE, "cpu", size * parts.v.shape[1:3].numel() * max(w.shape[-1] for w in weights))
        return cut(parts, weights, alone)

    monkeypatch.setattr(chunks, "stretches", so_many)
    out, again, leaves = both_ways((*case, T, earlier, features), ball=0.7)
    with torch.no_grad():
        y, state = again()
    for a, b in zip([y, *tensors(state)], out, strict=True):
        close(a, b)
    gradients = []
    for used in (True, False):
        y, state = again()
        loss = y.square().sum() + (0 * sum(a.sum() for a in tensors(state)) if used else 0)
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    for a, b in zip(*gradients, strict=True):
        close(a, b)


def in_pieces(monkeypatch, most):
    """omega reads so many tokens at a time, at most -> a list that will hold how many each time."""
    read, real = [], omega_module.chunked
    monkeypatch.setattr(omega_module, "pieces", lambda T, pos, chunk, numbers, device, cut=omega_module.pieces: cut(T, pos, chunk, 1, CPU))
    monkeypatch.setitem(omega_module.PIECE, "cpu", most)
    monkeypatch.setattr(omega_module, "chunked", lambda rule, phi, q, *more: read.append(q.shape[2]) or real(rule, phi, q, *more))
    return read


@pytest.mark.parametrize("name", ["omeganet", "momentum, mid-chunk", "window beyond the chunk", "from rest", "atlas, mid-block", "atlas, no momentum"])
def test_a_long_text_is_read_in_pieces(name, monkeypatch):
    """Each from the state after the one before it: outputs, states and outer gradients are those of the definition, which knows no pieces."""
    *case, T, earlier, features = EQUAL[name]
    chunk = case[3]
    read = in_pieces(monkeypatch, 2 * chunk)
    both_ways((*case, 5 * chunk + 1, earlier, features), ball=0.7)
    pos = earlier % chunk
    assert read == [earlier] * bool(earlier) + [2 * chunk - pos, 2 * chunk, chunk + 1 + pos]


def test_keys_of_exp_features_in_pieces(monkeypatch):
    """A piece has rows for the keys up to its own: the coefficients grow from piece to piece, and so does what they are the gradient of."""
    rule, (phi, x) = Rule("mlp", "l2", 5, 4), problem("mlp", "l2", 5, 14, features="exp")
    whole, gradient, _ = all_of(omega, rule, phi, x, (3,))
    read = in_pieces(monkeypatch, 4)
    out, again, _ = all_of(omega, rule, phi, x, (3,))
    assert read == [3, 1, 4, 4, 2]
    for a, b in zip([*out, *again], [*whole, *gradient], strict=True):
        close(a, b)


def test_what_counts_as_the_length_of_a_text(monkeypatch):
    """`exp` features have a row as long as all keys so far; but compiled, pieces of them would each be shapes of their own, and take minutes."""
    phi, x = problem("mlp", "l2", 2, 6, features="exp")
    seen, real = [], omega_module.pieces
    monkeypatch.setattr(omega_module, "pieces", lambda T, pos, chunk, numbers, device: seen.append(numbers) or real(T, pos, chunk, numbers, device))
    learn(omega, Rule("mlp", "l2", 2, 4), phi, x, (4,))
    monkeypatch.setattr(chunks.Chunks, "compiled", True)
    learn(omega, Rule("mlp", "l2", 2, 4), phi, x, (4,))
    assert seen == [2 * 2 * (3 + 4), 2 * 2 * (3 + 6), 2 * 2 * 3, 2 * 2 * 3]


def test_pieces_end_with_a_chunk_and_are_of_one_size(monkeypatch):
    """Else a chunk is computed in two parts; and a size that comes once is a shape to compile. A text that is short enough is whole."""
    cut = lambda T, pos, numbers: omega_module.pieces(T, pos, 8, numbers, CPU)
    monkeypatch.setitem(omega_module.PIECE, "cpu", 10 * 8 * 6)                   # ten chunks of six numbers a token
    assert cut(80, 0, 6) == [80] and cut(89, 0, 6) == [48, 41] and cut(96, 0, 6) == [48, 48] and cut(240, 0, 6) == [80] * 3
    assert cut(93, 3, 6) == [45, 48] and cut(81, 0, 6) == [80, 1] and cut(3, 3, 6) == [3] and cut(0, 0, 6) == [0]
    assert cut(20, 0, 10**6) == [8, 8, 4] and cut(20, 0, 0) == [20]              # no piece is less than a chunk; nor is an empty batch cut


@pytest.mark.parametrize("features, less", [("monomial", 0.85), ("exp", 0.7)])
def test_pieces_spare_memory(features, less, monkeypatch):
    """A text of 16 chunks as a whole; in two pieces, where phi makes more of it than PIECE, by a token's numbers; and a chunk at a time."""
    peaks, rule = [], Rule("mlp", "l2", 4, 16)
    phi, x = problem("mlp", "l2", 4, 256, False, features)

    def run():
        y, _ = learn(omega, rule, phi, x)
        torch.autograd.grad(y.sum(), [x["q"], x["k"]])

    wide = phi.out_dim + (256 if features == "exp" else 0)
    for tokens in (256, 255, 16):
        monkeypatch.setitem(omega_module.PIECE, "cpu", tokens * x["q"].shape[:2].numel() * wide)
        peaks.append(bench.peak_bytes(run, CPU))
    assert peaks[1] < 0.95 * peaks[0] and peaks[2] < less * peaks[0]


@pytest.mark.parametrize("features, muon_every", [("monomial", 0), ("monomial", 2), ("exp", 0)])
def test_omega_gradcheck(features, muon_every):
    """The outer loop's gradient against finite differences, through the inner gradients, Newton-Schulz and features without a reference."""
    phi, x = problem("mlp", "l2", 2, 4, features=features, D=2, B=1, H=1)
    rule = Rule("mlp", "l2", 2, 3, muon_every, ns_steps=2)

    def f(*leaves):
        y, state = learn(omega, rule, phi, dict(zip(x, leaves)))
        return y, *tensors(state)
    assert torch.autograd.gradcheck(f, tuple(x.values()), fast_mode=True)


WRITTEN_OUT = {                                               # every autograd.Function of the project, of x (1, 2, 5, 3)
    "Unit": models.unit,
    "ShortConv": lambda x: models.ShortConv.apply(x[0, :, :2], x[0], x[0, 0, :3]),
    "Monomials": lambda x: Features("monomial", 3, 3).double()(x),
    "Degree2": lambda x: Degree2.apply(x, torch.ones(3).double(), torch.zeros(15, dtype=torch.long), torch.ones(15).double()),
    "NewtonSchulz": newton_schulz,
    "Recurrence": lambda x: omega_module.Recurrence.apply(x[..., 0].sigmoid(), x)[0],
    "Chunks": lambda x: omega(Rule("linear", "l2", 1, 2), Features("none", 3), x, x, x, Gates(*[x[..., 0].sigmoid()] * 3, x[..., :1]),
                              start(Rule("linear"), Features("none", 3), [x[0, :, :3]], 1))[0],
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_second_derivatives_are_refused(name):
    """A gradient that was written out knows no gradient of its own: without a word a penalty on gradients would be wrong. torch's
    once_differentiable refuses .backward() alone: torch.autograd.grad of the penalty goes round its error, and a linear loss never meets it."""
    w, x = torch.eye(3).double().requires_grad_(), randn(1, 2, 5, 3).requires_grad_()
    for loss in (torch.Tensor.square, lambda y: y * y.detach()):
        y = loss(WRITTEN_OUT[name](x @ w)).sum()
        dx, again = torch.autograd.grad(y, x, retain_graph=True)[0], torch.autograd.grad(y, x, retain_graph=True)[0]
        assert torch.equal(dx, again)
        with pytest.raises(RuntimeError, match="second derivatives"):
            dx, = torch.autograd.grad(y, x, create_graph=True)
            torch.autograd.grad(dx.square().sum(), [x, w])


def test_every_gradient_that_is_written_out_says_so():
    """An autograd.Function that the test above does not know; one whose second derivative is there, and wrong."""
    modules = [sys.modules[path.stem] for path in Path(__file__).parent.glob("*.py") if path.stem in sys.modules]
    ours = {f.__name__ for m in modules for f in vars(m).values() if isinstance(f, type) and issubclass(f, torch.autograd.Function)}
    assert ours == {*WRITTEN_OUT, "Overlapping", "DiagonalBlocks"}
    overlapping = lambda x: omega_module.Overlapping.apply(x, 2, 3).pow(3)       # their backward is sums, of which torch knows all
    blocks = lambda x: omega_module.DiagonalBlocks.apply(x[0] @ x[0].mT, 3).pow(3)
    for f in (overlapping, blocks):
        assert torch.autograd.gradgradcheck(f, randn(1, 2, 5, 3).requires_grad_())


def test_exp_has_no_reference_and_no_newton_schulz():
    """Neither can be computed from coefficients: an answer would be that of another rule."""
    _, x = problem("mlp", "l2", 2, 4, features="exp", D=2, B=1, H=1)
    for fn, every, why in ((omega_ref, 0, "written out"), (omega, 2, "muon_every = 0")):
        with pytest.raises(ValueError, match=why):
            learn(fn, Rule("mlp", "l2", 2, 3, every), Features("exp", 2), x)


def test_omega_splits_anywhere():
    """Every pair of split points, on and off chunk and block boundaries, with features that keep all keys as well."""
    for features, muon_every, forget in (("monomial", 0, "zero"), ("monomial", 2, "start"), ("exp", 0, "start")):
        phi, x = problem("mlp", "l2", 3, 10, features=features)
        rule = Rule("mlp", "l2", 3, 4, muon_every, forget=forget)
        with torch.no_grad():
            y, state = learn(omega, rule, phi, x)
            for cuts in [(a, b) for a in range(1, 9) for b in range(a + 1, 10)] + [range(1, 10)]:
                z, after = learn(omega, rule, phi, x, cuts)
                for a, b in zip([z, *tensors(after)], [y, *tensors(state)], strict=True):
                    close(a, b)


def test_omega_is_pure():
    """Nothing of the caller's may change: not the inputs, not M0, not the state that was handed in."""
    phi, x = problem("mlp", "l2", 3, 10)
    rule = Rule("mlp", "l2", 3, 4, 2)
    _, state = learn(omega, rule, phi, x)
    held = [*x.values(), *tensors(state)]
    before = [a.clone() for a in held]
    omega(rule, phi, x["q"], x["k"], x["v"], Gates(*(x[name] for name in Gates._fields)), state)
    assert all(torch.equal(a, b) for a, b in zip(held, before))


@pytest.mark.parametrize("fn", [omega, omega_ref])
@pytest.mark.parametrize("muon_every, forget", [(0, "zero"), (1, "zero"), (4, "start")])
@pytest.mark.parametrize("kind", MEMORIES)
def test_step_zero_reads_M0(kind, muon_every, forget, fn):
    """With step 0 nothing is written: LaCT's `w0 = NS(dw0)` gave 0 where the untouched memory's output belongs."""
    phi, x = problem(kind, "l2", 3, 6)
    x["step"] = torch.zeros(2, 2, 6).double()
    x["keep"] = torch.ones(2, 2, 6).double() if forget == "zero" else x["keep"]
    M0 = [a for name, a in x.items() if name.startswith("M0")]
    y, _ = learn(fn, Rule(kind, "l2", 3, 4, muon_every, forget=forget), phi, x)
    close(y, memory.apply(kind, M0, phi(x["q"]), x["q"]))


def test_extreme_gates():
    """keep and momentum of 0 or nearly 0, in float32 and chunks of 64: masking after exp would give 0 * inf in backward."""
    rule = Rule("mlp", "l2", 3, 8)
    for T in (20, 70):
        phi, x = problem("mlp", "l2", 3, T)
        for name, every in (("keep", 5), ("momentum", 7)):
            x[name].data[..., ::every], x[name].data[..., 1::every] = 0, 1e-30
        if T == 20:
            close(learn(omega, rule, phi, x)[0], learn(omega_ref, rule, phi, x)[0])
    x = {name: a.detach().float().requires_grad_() for name, a in x.items()}
    for muon_every in (0, 16):
        y, state = learn(omega, Rule("mlp", "l2", 3, 64, muon_every), phi.float(), x)
        grads = torch.autograd.grad(sum(a.sum() for a in [y, *tensors(state)]), list(x.values()))
        assert all(a.isfinite().all() for a in [y, *grads])


@pytest.mark.parametrize("product, tile", [(False, 0), (True, 0), (True, 2), (True, 7)], ids=["row by row", "one product", "tiles", "one tile"])
@pytest.mark.parametrize("c, k", [(1, 3), (2, 1), (7, 4), (8, 3)])
def test_recurrence(c, k, product, tile, monkeypatch):
    """A CPU computes it row by row, a GPU as one product, compiled as one a tile: all are the loop as autograd sees it. The last row is a tensor of
    its own: of a view, the gradient of all rows is added up outside of compiled code.
    """
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: product)
    monkeypatch.setitem(omega_module.TILE, "cpu", tile)
    factors, rows, out = rand(2, 3, c).requires_grad_(), randn(2, 3, c, k).requires_grad_(), (randn(2, 3, c, k), randn(2, 3, k))
    ys = [rows[..., 0, :] + 0 * factors[..., 0, None]]
    for t in range(1, c):
        ys.append(factors[..., t, None] * ys[-1] + rows[..., t, :])
    y, want = omega_module.recur(factors, rows), (torch.stack(ys, -2), ys[-1])
    for used in ([0], [1], [0, 1]):                           # the last row is an output of its own
        grads = [torch.autograd.grad([z[i] for i in used], (factors, rows), [out[i] for i in used], retain_graph=True, materialize_grads=True)
                 for z in (y, want)]
        for a, b in [*zip(y, want), *zip(*grads)]:
            close(a, b)
    assert c == 1 or y[1].untyped_storage().data_ptr() != y[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("c, w, b", [(4, 1, 2), (12, 3, 4), (9, 5, 3), (8, 9, 2)])
def test_tiles_are_one_chunk(c, w, b, momentum):
    """What a GPU makes of tiles of b tokens is what a chunk has; also where a factor is 0, which is a sigmoid's and has no gradient, and where
    windows reach over several tiles."""
    x = [rand(2, 3, c), rand(2, 3, c), rand(2, 3, c) if momentum else None, rand(2, 3, c, w)]
    for zero in ([], [c // 2], [0, c - 1]):
        gates = [None if a is None else a.clone().requires_grad_() for a in x]
        for a in (gates[0], *gates[2:3] * momentum):
            a.data[..., zero] = 0
        whole, tiles = omega_module.plain_mixing(Gates(*gates)), omega_module.tiled_mixing(Gates(*gates), b)
        assert whole.keys() == tiles.keys()
        gates = [a for a in gates if a is not None]
        for used in (*([name] for name in whole), list(whole)):         # each alone, and all together
            out = [randn(*whole[name].shape) for name in used]
            of_whole, of_tiles = (torch.autograd.grad([mix[name] for name in used], gates, out, retain_graph=True, materialize_grads=True)
                                  for mix in (whole, tiles))
            for name in used:
                close(tiles[name], whole[name])
            for a, want, gate in zip(of_tiles, of_whole, gates, strict=True):
                close(a * (gate != 0), want * (gate != 0))
        assert len({a.untyped_storage().data_ptr() for a in tiles.values()}) == len(tiles)       # as in test_recurrence


# ---- omega.py: special cases, each against a formula that shares no code with it

def stream(T, window=1, kind="linear", features="none", hidden=3, B=2, H=2, D=4, **fixed):
    """q, k, v and every gate at random, with `fixed` ones filled with that number; M0 as asked, or zero."""
    M0 = fixed.pop("M0", 0.0)
    x = dict(q=unit(B, H, T, D), k=unit(B, H, T, D), v=randn(B, H, T, D), keep=0.5 + rand(B, H, T) / 2,
             step=0.3 * rand(B, H, T), momentum=0.9 * rand(B, H, T), gate=rand(B, H, T, window))
    x |= {name: None if value is None else torch.full_like(x[name], value) for name, value in fixed.items()}
    e = features_dim(features, D, 1)
    return x | {f"M0[{i}]": M0 * w for i, w in enumerate(weights(kind, e, D, hidden, H))}


def named_rows(x, *names):
    """The named inputs cut into tokens: (B, H, 1, D) for q, k, v, and (B, H, 1, 1) for the gates."""
    cut = lambda a: [a[:, :, t: t + 1] if a.dim() == 4 else a[:, :, t, None, None] for t in range(a.shape[2])]
    return list(zip(*(cut(x[name]) for name in names)))


both = pytest.mark.parametrize("fn", [omega, omega_ref])
none = Features("none", 4)


@both
def test_linear_attention(fn):
    """Linear memory, dot loss: y_t = sum_{i <= t} (q_t . k_i) v_i. A read before the write would miss i = t."""
    x = stream(11, keep=1, step=1, momentum=None, gate=1)
    close(learn(fn, Rule("linear", "dot", 1, 4), none, x)[0], (x["q"] @ x["k"].mT).tril() @ x["v"])


@both
def test_retention(fn):
    """The same with decay: token i counts keep_{i+1} .. keep_t times its step; a decay shifted by one keeps too much."""
    x = stream(11, momentum=None, gate=1)
    P = torch.zeros(2, 2, 11, 11).double()
    for t, i in [(t, i) for t in range(11) for i in range(t + 1)]:
        P[:, :, t, i] = x["keep"][:, :, i + 1: t + 1].prod(-1) * x["step"][:, :, i]
    close(learn(fn, Rule("linear", "dot", 1, 4), none, x)[0], (P * (x["q"] @ x["k"].mT)) @ x["v"])


@both
@pytest.mark.parametrize("decay, forget", [({"keep": 1}, "zero"), ({}, "zero"), ({}, "start")],
                         ids=["delta", "gated delta", "to M0"])
def test_delta_rule(fn, decay, forget):
    """Linear memory, l2, chunk 1: W <- keep W - step k^T (k W - v), without decay, with decay to zero, and to M0."""
    x = stream(9, momentum=None, gate=1, M0=1, **decay)
    W, ys, home = x["M0[0]"], [], x["M0[0]"] if forget == "start" else 0
    for q, k, v, keep, step in named_rows(x, "q", "k", "v", "keep", "step"):
        W = home + keep * (W - home) - step * k.mT @ (k @ W - v)
        ys.append(q @ W)
    close(learn(fn, Rule("linear", "l2", 1, 1, forget=forget), none, x)[0], torch.cat(ys, 2))


@both
@pytest.mark.parametrize("chunk", [1, 4])
def test_titans(fn, chunk):
    """Window 1, no Muon, no features: Titans Eq 13-14, its theta outside of S (choice 4), gradients at the last chunk boundary (its Eq 16)."""
    x, ys = stream(10, kind="mlp", gate=1, M0=1), []
    W, S = [x["M0[0]"].expand(2, 2, 4, 3), x["M0[1]"].expand(2, 2, 3, 4)], [0, 0]
    mlp = lambda W, a: a + F.gelu(a @ W[0]) @ W[1]
    for t, (q, k, v, keep, step, momentum) in enumerate(named_rows(x, "q", "k", "v", "keep", "step", "momentum")):
        anchor = anchor if t % chunk else [w.detach().requires_grad_() for w in W]
        g = torch.autograd.grad(0.5 * (mlp(anchor, k) - v).square().sum(), anchor)
        S = [momentum * s + g for s, g in zip(S, g)]
        W = [keep * w - step * s for w, s in zip(W, S)]
        ys.append(mlp(W, q))
    close(learn(fn, Rule("mlp", "l2", 1, chunk), none, x)[0], torch.cat(ys, 2))


@both
def test_titans_to_the_letter(fn):
    """Titans' own theta, inside of S, is the gate of a window of 1: S <- eta S - theta grad, M <- (1 - alpha) M + S."""
    x, ys, S = stream(9, kind="linear", step=1, M0=1), [], 0
    W = x["M0[0]"]
    for q, k, v, keep, eta, theta in named_rows(x, "q", "k", "v", "keep", "momentum", "gate"):
        S = eta * S - theta * k.mT @ (k @ W - v)
        W = keep * W + S
        ys.append(q @ W)
    close(learn(fn, Rule("linear", "l2", 1, 1), none, x)[0], torch.cat(ys, 2))


@both
def test_swla_by_brute_force(fn):
    """Sliding-window linear attention: every window sum written out; a window off by one, or gates in reverse, is seen."""
    x = stream(9, window=3, momentum=None)
    P = torch.zeros(2, 2, 9, 9).double()
    for t, n, i in [(t, n, i) for t in range(9) for n in range(t + 1) for i in range(max(0, n - 2), n + 1)]:
        P[:, :, t, i] += x["keep"][:, :, n + 1: t + 1].prod(-1) * x["step"][:, :, n] * x["gate"][:, :, n, i - n + 2]
    close(learn(fn, Rule("linear", "dot", 3, 4), none, x)[0], (P * (x["q"] @ x["k"].mT)) @ x["v"])


@both
def test_omeganet_linear(fn):
    """Eq 11 with the sign put right: W <- (keep - step sum gate k^T k) W + step sum gate k^T v over the window, at chunk 1."""
    x, ys = stream(9, window=3, momentum=None, M0=1), []
    W = x["M0[0]"]
    for t, (q, keep, step) in enumerate(named_rows(x, "q", "keep", "step")):
        i = slice(max(0, t - 2), t + 1)
        k, v, gate = x["k"][:, :, i], x["v"][:, :, i], x["gate"][:, :, t, -min(t + 1, 3):, None]
        W = keep * W - step * ((gate * k).mT @ k) @ W + step * (gate * k).mT @ v
        ys.append(q @ W)
    close(learn(fn, Rule("linear", "l2", 3, 1), none, x)[0], torch.cat(ys, 2))


@both
def test_atlas_linear(fn):
    """Eq 32-33: the momentum is orthogonalised, not the memory and not the gradient, and step stands outside of it."""
    x, ys, S = stream(9, window=3, M0=1), [], 0
    W = x["M0[0]"]
    for t, (q, keep, step, momentum) in enumerate(named_rows(x, "q", "keep", "step", "momentum")):
        i = slice(max(0, t - 2), t + 1)
        k, v, gate = x["k"][:, :, i], x["v"][:, :, i], x["gate"][:, :, t, -min(t + 1, 3):, None]
        S = momentum * S + (gate * k).mT @ (k @ W - v)
        W = keep * W - step * newton_schulz(S)
        ys.append(q @ W)
    close(learn(fn, Rule("linear", "l2", 3, 1, 1), none, x)[0], torch.cat(ys, 2))


@both
def test_atlas_linear_once_in_a_while(fn):
    """choice 15: Newton-Schulz of all S since it was last taken, across a chunk's end, too; gradients at a chunk's first memory."""
    x, ys, S, some = stream(17, window=1, M0=1), [], 0, 0
    W = x["M0[0]"]
    for t, (q, k, v, keep, step, momentum, gate) in enumerate(named_rows(x, "q", "k", "v", "keep", "step", "momentum", "gate")):
        anchor = anchor if t % 8 else W
        S = momentum * S + (gate * k).mT @ (k @ anchor - v)
        if t % 8 % 3 == 0:
            O, some = newton_schulz(some) if t else 0, 0
        some = some + S
        W = keep * W - step * O
        ys.append(q @ W)
    close(learn(fn, Rule("linear", "l2", 1, 8, 3), none, x)[0], torch.cat(ys, 2))


@both
def test_newton_schulz_sees_every_token(fn):
    """Of S_t at every m-th token alone, without momentum nothing would be left of the m - 1 others."""
    x = {name: None if a is None else a.requires_grad_() for name, a in stream(17, window=1, kind="mlp", M0=1, momentum=None).items()}
    y, _ = learn(fn, Rule("mlp", "l2", 1, 8, 8), none, x)
    dv, = torch.autograd.grad(y[:, :, -1].sum(), x["v"])
    assert dv[:, :, :16].abs().amax(-1).min() > 1e-6 * dv.abs().max()


@both
def test_window_of_one_in_a_longer_one(fn):
    """A gate that is zero but for the token itself is window 1; gate[..., -1] must weigh the newest token."""
    x = stream(9, window=3, kind="mlp", M0=1, gate=0)
    x["gate"][..., -1] = 1
    one = x | dict(gate=torch.ones(2, 2, 9, 1).double())
    close(learn(fn, Rule("mlp", "l2", 3, 4), none, x)[0], learn(fn, Rule("mlp", "l2", 1, 4), none, one)[0])


def exponential(D, degree):
    """The Taylor series of exp(x . y) up to `degree`, as monomials."""
    phi = Features("monomial", D, degree).double()
    phi.scale.data = torch.tensor([math.factorial(i) ** -0.5 for i in range(degree + 1)], dtype=torch.float64)
    return phi


def test_unnormalised_softmax_attention():
    """Linear DeepTransformer (Eq 26): y_t = sum_{i <= t} exp(q_t . k_i) v_i, the numerator of attention."""
    x = stream(11, features="exp", keep=1, step=1, momentum=None, gate=1)
    close(learn(omega, Rule("linear", "dot", 1, 4), Features("exp", 4), x)[0], (x["q"] @ x["k"].mT).exp().tril() @ x["v"])


def test_kernel_delta_rule():
    """Linear Dot with window 1 (Eq 30-31): token t writes step (v - what the kernel already answers to k), all decayed."""
    x = stream(9, features="exp", momentum=None, gate=1)
    K, Q, a, ys = (x["k"] @ x["k"].mT).exp(), (x["q"] @ x["k"].mT).exp(), torch.zeros_like(x["v"]), []
    for t, (v, keep, step) in enumerate(named_rows(x, "v", "keep", "step")):
        write = step * (v - K[:, :, t: t + 1] @ a)
        a = torch.cat([keep * a[:, :, :t], write, a[:, :, t + 1:]], 2)
        ys.append(Q[:, :, t: t + 1] @ a)
    close(learn(omega, Rule("linear", "l2", 1, 1), Features("exp", 4), x)[0], torch.cat(ys, 2))


@pytest.mark.parametrize("kind, loss, window, momentum", [
    ("linear", "l2", 3, True), ("mlp", "dot", 1, False), ("mlp", "l2", 3, True), ("gated", "l2", 3, False)], ids=str)
def test_monomials_converge_to_exp(kind, loss, window, momentum):
    """The kernel form of phi* (Eq 22) must be the limit of truncated monomials of growing degree, in deep memories too."""
    x = stream(9, window, kind, "exp", D=2, M0=1, **({} if momentum else dict(momentum=None)))
    rule, errors = Rule(kind, loss, window, 4, forget="start" if loss == "dot" else "zero"), []
    y, state = learn(omega, rule, Features("exp", 2), x, (3, 6))
    for degree in (1, 4, 14):
        phi = exponential(2, degree)
        first = [name for name, a in x.items() if name[:2] == "M0" and a.shape[1] == 2]        # they read x itself
        wide = x | {name: F.pad(x[name], (0, 0, 1, phi.out_dim - 3)) for name in first}
        errors.append((learn(omega_ref, rule, phi, wide)[0] - y).abs().max().item())
    assert errors[0] > 10 * errors[1] > 1000 * errors[2] and errors[2] < 1e-10, errors


# ---- models.py

def small(preset, **more):
    """A model that has everything of the preset in small: two blocks, two heads, short chunks, windows and segments."""
    default = {f.name: f.default for f in fields(models.Config)} | models.PRESETS[preset]
    size = dict(vocab_size=11, n_layer=2, n_head=2, n_embd=16, head_dim=8, chunk=4, muon_every=2, expansion=2, persistent=2)
    size |= {name: 3 for name in ("window", "attn_window") if default[name] > 1}
    return models.build(preset, **size | more)


def shaken(model):
    """In float64, every parameter moved off its starting value: zeros and ones hide mistakes."""
    model = model.double()
    for p in model.parameters():
        p.data += 0.2 * randn(*p.shape)
    return model


MODELS = {preset: (preset, {} if preset in ("atlas", "transformer") else dict(n_layer=1)) for preset in models.PRESETS}
MODELS |= {f"{preset}-{wiring}": (preset, dict(wiring=wiring, n_layer=1)) for preset, what in models.PRESETS.items()
           for wiring in models.WIRINGS if wiring != "lmm" and what.get("mixer") != "attention"}
MODELS |= {f"no memory-{wiring}": ("atlas", dict(wiring=wiring, n_layer=1, memory_branch=False))
           for wiring in ("mag", "mal", "mac")}
MODELS |= {
    name: (preset, dict(more, n_layer=1)) for name, (preset, more) in {
        "no persistent tokens": ("atlas", dict(wiring="mac", persistent=0)), "norm": ("atlas", dict(memory_norm=True)),
        "chunk 1": ("atlas", dict(chunk=1)), "window > chunk": ("atlas", dict(window=9)), "no conv": ("atlas", dict(conv=False)),
        "uniform gate": ("atlas", dict(gate="uniform")), "forget M0": ("atlas", dict(forget="zero")),
        "forget M0-mac": ("atlas", dict(forget="zero", wiring="mac")),
        "sketch": ("omeganet", dict(features="sketch", sketch_dim=5)), "elementwise": ("omeganet", dict(features="elementwise")),
        "exp, gated": ("dot", dict(memory="gated", keep=True))}.items()}
every_model = pytest.mark.parametrize("preset, more", MODELS.values(), ids=MODELS.keys())
every_preset = pytest.mark.parametrize("preset", models.PRESETS)


def places(more):
    """Where to cut or to change 13 tokens: everywhere, but for wirings only on and off segments of 3 and chunks of 4."""
    return (1, 3, 4, 8, 11) if "wiring" in more else range(1, 13)


@every_model
@torch.inference_mode()
def test_any_split_is_the_whole(preset, more):
    """State carried over every split point, over none, and token by token: a cache that forgets, repeats or shifts anything."""
    model, x = shaken(small(preset, **more)), torch.randint(11, (2, 10))
    whole, end = model(x)
    for cuts in [(t,) for t in places(more) if t < 10] + [range(1, 10), (0, 4, 4)]:
        state, out = None, []
        for a, b in zip((0, *cuts), (*cuts, 10)):
            logits, state = model(x[:, a:b], state)
            out.append(logits)
        close(torch.cat(out, 1), whole)
    assert [t.shape for t in tensors(state)] == [t.shape for t in tensors(end)]


REFERENCED = {name: m for name, m in MODELS.items() if models.PRESETS[m[0]].get("mixer") != "attention"
              and models.PRESETS[m[0]].get("features") != "exp" and (name in models.PRESETS or name.startswith(("atlas-", "omeganet-")))}


@pytest.mark.parametrize("preset, more", REFERENCED.values(), ids=REFERENCED.keys())
def test_every_model_is_its_reference(preset, more, monkeypatch):
    """The whole model on the token-by-token rule: the same logits and gradient of every parameter, in every wiring.

    The exp features have no reference with finite weights; their tests are test_unnormalised_softmax_attention and the two after it.
    """
    model, x = shaken(small(preset, **{**more, "n_layer": 1})), torch.randint(11, (2, 7))
    params, results = list(model.parameters()), []
    for fn in (omega_ref, omega):
        monkeypatch.setattr(omega_module, "omega", fn)
        logits, _ = model(x)
        results.append([logits, *torch.autograd.grad(logits.square().mean(), params)])
    for a, b in zip(*results, strict=True):
        close(b, a)


@every_model
@torch.inference_mode()
def test_causal(preset, more):
    """Changing token j must leave logits before j bit-identical and change later ones: half of the ports leak or do not mix."""
    model, x = shaken(small(preset, **more)), torch.randint(11, (1, 13)).repeat(len(places(more)), 1)
    y = x.clone()
    for row, j in enumerate(places(more)):                    # the same text in all rows, and another token in each
        y[row, j] = (y[row, j] + 1) % 11
    logits, changed = model(x)[0], model(y)[0]
    for row, j in enumerate(places(more)):
        assert torch.equal(changed[row, :j], logits[row, :j]), f"token {j} is seen before it is read"
        assert not torch.allclose(changed[row, j], logits[row, j])
        if model.config.mixer == "memory" and model.config.memory_branch or not model.config.attn_window:
            assert not torch.allclose(changed[row, 12], logits[row, 12], rtol=1e-9), f"token {j} is forgotten by the end"


@every_model
@torch.inference_mode()
def test_rows_are_independent(preset, more):
    """One sequence's memory must not reach another's: row alone == row in the batch, and a permuted batch is permuted."""
    model, x = shaken(small(preset, **more)), torch.randint(11, (3, 11))
    logits, _ = model(x)
    close(model(x[1:2])[0], logits[1:2])                      # whatever it has of a row before or behind it
    close(model(x[[2, 0, 1]])[0], logits[[2, 0, 1]])          # and of being the first or the last


@every_model
def test_every_parameter_learns(preset, more):
    """At its own initialisation every parameter gets a gradient, and an optimizer step on a CPU changes it (no stride-0 views).

    Dead gates, a detached M0 and an inner update under no_grad are the commonest fault of the ports.
    """
    model, x = small(preset, **more), torch.randint(11, (2, 10))
    model.loss(x[:, :-1], x[:, 1:]).backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    stuck = [name for (name, p), b in zip(model.named_parameters(), before) if torch.equal(p, b)]
    assert not dead and not stuck


@pytest.mark.parametrize("preset, more", [("atlas", {}), ("omeganet", {}), *(("atlas", dict(wiring=w)) for w in ("mag", "mal", "mac"))])
def test_backward_inside_of_autocast(preset, more):
    """The memory's written-out gradients compute in float32 whatever autocast says, and do not fail on a mixture."""
    model, x, grads = small(preset, **more), torch.randint(11, (2, 14)), []
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(x[:, :-1], x[:, 1:])
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    assert (grads[0] - grads[1]).norm() < 0.01 * grads[0].norm()                 # around it, torch's own change a little


def test_rope_far_into_a_stream():
    """What two tokens make of each other depends on their distance alone; angles in float32 are off by 0.3 after 20 million tokens."""
    q, k = randn(1, 1, 4, 8).float(), randn(1, 1, 4, 8).float()
    near, far = (models.rope(q, pos) @ models.rope(k, pos).mT for pos in (0, 20_000_000))
    close(far, near, 1e-5)


@every_preset
def test_block_is_a_residual_of_each_half(preset):
    """A mixer or a SwiGLU that is subtracted would be learned as well; one that reads what is not normed, or x and not h, nearly so."""
    block, x = shaken(small(preset)).blocks[0], randn(2, 7, 16)
    rms = lambda x, norm: norm.weight * x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()
    h = x + block.mixer(rms(x, block.norm1))[0]
    r, m = rms(h, block.norm2), block.mlp
    gate = r @ m.gate.weight.mT
    close(block(x)[0], h + (gate / (1 + (-gate).exp()) * (r @ m.up.weight.mT)) @ m.out.weight.mT)


def test_norm_is_one_function_in_every_precision():
    """torch's own eps goes with the dtype: a first read of 1e-5 would be another number in float64, where gradients are checked."""
    x, norm = 1e-5 * randn(3, 8), models.Norm(8)
    close(norm(x.float()).double(), norm.double()(x), 1e-5)


def test_w_goes_on_in_float32_where_products_are_coarse(monkeypatch):
    """From block to block by a product, W would be rounded to what TF32 or bfloat16 has of it, whatever keep is."""
    phi, x = problem("mlp", "l2", 1, 8)
    x = {name: a.detach().float() for name, a in x.items()} | dict(keep=torch.ones(2, 2, 8), step=torch.zeros(2, 2, 8))
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, **out: bmm(a.bfloat16().float(), b.bfloat16().float(), **out))
    state = learn(omega, Rule("mlp", "l2", 1, 8, 2), phi.float(), x)[1]
    assert same(state.W, [x["M0[0]"].expand_as(state.W[0]), x["M0[1]"].expand_as(state.W[1])])


@every_preset
def test_gradients_in_float32(preset):
    """Shortcuts that lose digits: the whole gradient in float32 is that in float64 but for a dozen times the rounding of a number."""
    model, x = shaken(small(preset, chunk=16, muon_every=8)), torch.randint(11, (2, 65))
    exact, rounded = (torch.cat([g.flatten().double() for g in forth_and_back(m, x)]) for m in (model, deepcopy(model).float()))
    assert (rounded - exact).norm() < 2e-5 * exact.norm()


@pytest.mark.parametrize("preset", ["atlas", "omeganet"])
def test_nothing_but_speed_hangs_on_a_private_name(preset, monkeypatch):
    """chunks.below_autograd asks torch for what a version to come may not have: the same bits without it."""
    model, x, runs = small(preset), torch.randint(11, (2, 14)), []
    for _ in range(2):
        with torch.no_grad():
            logits = model(x)[0]
        runs.append([logits, *torch.autograd.grad(model.loss(x[:, :-1], x[:, 1:]), list(model.parameters()))])
        monkeypatch.delattr(torch._C, "_AutoDispatchBelowADInplaceOrView", raising=False)
    assert same(*runs)


@pytest.mark.parametrize("preset", ["atlas", "omeganet", "transformer"])
def test_remat_is_bit_equal_in_less_memory(preset):
    """A block computed again with another dropout, or kept all the same."""
    model, x = small(preset, n_layer=4, dropout=0.3), torch.randint(11, (2, 17))
    grads, peaks = [], []
    for model.remat in (False, True):
        def run():
            torch.manual_seed(1)
            grads.append(torch.autograd.grad(model.loss(x[:, :-1], x[:, 1:]), list(model.parameters())))
        peaks.append(bench.peak_bytes(run, CPU))
    assert same(*grads)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("preset, learn, read", [("omeganet", "learn_chunk_backward", "read_chunks_backward"),
                                                 ("atlas", "muon_learn_backward", "muon_read_backward")])
def test_a_stretch_lets_go_of_the_one_after(preset, learn, read, monkeypatch):
    """The gradient goes from the last stretch to the first: what reading has said of a later one's W is then no more than memory taken."""
    storages, alive = [], []

    def watched(name, notice):
        real = getattr(chunks, name)
        monkeypatch.setattr(chunks, name, lambda *args: notice(args) or real(*args))

    watched(learn, lambda args: storages.extend(weakref.ref(d.untyped_storage()) for d in args[5 if preset == "atlas" else 4]))   # dheld, dC
    watched(read, lambda args: alive.append(sum(ref() is not None for ref in storages)))
    monkeypatch.setitem(chunks.AT_ONCE, "cpu", 1)             # a chunk each
    forth_and_back(small(preset, n_layer=1), torch.randint(11, (2, 16)))
    assert len(storages) > 4 and alive[:-1] == [0] * 3        # the first chunk has no W before it, and so no copy of its own


@pytest.mark.parametrize("preset, more", [("swa", {}), ("dot", {}), ("omeganet", {}), ("atlas", dict(wiring="mac")), ("atlas++", {}),
                                          ("atlas", dict(muon_every=1, momentum=False))])
def test_nothing_waits_for_the_host(preset, more):
    """A number read back, or a tensor made on the CPU, holds up a GPU or fails on it: on the meta device, which has no numbers, both fail."""
    model, x = small(preset, n_layer=1, **more).to("meta"), torch.empty(2, 9, dtype=torch.long, device="meta")
    model.loss(x, x).backward()
    assert all(p.grad is None or p.grad.is_meta for p in model.parameters())


@every_model
@torch.no_grad()
def test_forward_changes_nothing(preset, more):
    """The inner loop runs at test time as in training, and never writes to a parameter or a buffer."""
    model, x = small(preset, **more), torch.randint(11, (2, 11))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    train, eval = model(x)[0], model.eval()(x)[0]
    assert torch.equal(train, eval) and all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


class Calls(TorchDispatchMode):
    """Counts what reaches a kernel or makes a view."""
    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("preset, most", [("atlas", 415), ("omeganet", 340)])
@torch.no_grad()
def test_a_token_takes_few_calls(preset, most):
    """Of text that is generated, calls are the time: a block took 680 and 570 a token, when few tokens went the way of many."""
    model, x = models.build(preset, n_layer=1), torch.randint(65, (1, 21))
    _, state = model(x[:, :20])
    with Calls() as calls:
        model(x[:, 20:], state)
    assert most / 2 < calls.count <= most


@every_preset
def test_state_dict_round_trip(preset):
    """All that decides the logits must be in state_dict: two ports redraw random matrices and load another model."""
    a, x = small(preset), torch.randint(11, (2, 11))
    b = small(preset)
    b.load_state_dict({name: p.clone() for name, p in a.state_dict().items()})
    assert torch.equal(a(x)[0], b(x)[0])


def test_config_reaches_the_rule():
    """Every flag of the inner loop must arrive under its own name; muon_every never exceeds the chunk, and is 0 without Muon."""
    config = models.Config(memory="gated", loss="dot", window=3, chunk=5, muon_every=2, ns_steps=4, ns_coefficients="cubic",
                           ns_straight_through=True, ns_dtype="bfloat16", memory_dtype="bfloat16", memory_norm=True, forget="zero",
                           max_norm=7.0)
    assert config.rule() == Rule("gated", "dot", 3, 5, 2, 4, "cubic", True, torch.bfloat16, "zero", norm=True, ball=7.0, dtype=torch.bfloat16)
    assert models.Config(forget="start").rule().forget == "start"
    assert models.Config(chunk=5, muon_every=64).rule().muon_every == 5
    assert models.Config(muon=False).rule().muon_every == 0


def test_atlas_becomes_titans():
    """Window 1, no Muon, no features is Titans: the flags of the ablation must reach the rule."""
    a, b = small("atlas", window=1, muon=False, features="none"), small("titans")
    b.load_state_dict(a.state_dict())
    x = torch.randint(11, (2, 11))
    assert torch.equal(a(x)[0], b(x)[0])


@pytest.mark.parametrize("switch", [
    dict(window=1), dict(degree=1), dict(memory="linear"), dict(muon=False), dict(momentum=False), dict(keep=False),
    dict(conv=False), dict(gate="uniform"), dict(muon_every=1), dict(chunk=8), dict(ns_steps=2), dict(loss="dot"),
    dict(ns_coefficients="cubic"), dict(ns_dtype="bfloat16"), dict(max_step=0.5), dict(memory_norm=True), dict(forget="zero"), dict(expansion=3),
    dict(features="sketch"), dict(features="sketch", sketch_dim=5), dict(tie=True), dict(mlp_hidden=8), dict(wiring="mag"),
    dict(wiring="mal"), dict(wiring="mac"), dict(wiring="mag", memory_branch=False), dict(wiring="mal", persistent=0),
    dict(wiring="mac", attn_window=4)], ids=str)
@torch.no_grad()
def test_switches_do_something(switch):
    """Every axis of the ablation changes the function or its parameters; one that nothing reads would pass for a result."""
    x, out = torch.randint(11, (2, 11)), []
    for more in ({name: switch[name] for name in list(switch)[:-1]}, switch):
        torch.manual_seed(0)
        model = small("atlas", **more)
        out.append([p.shape for p in model.parameters()] + [round(value, 4) for value in model(x)[0].flatten().tolist()])
    assert out[0] != out[1]


def test_gates_are_in_range():
    """keep, momentum and gate in (0, 1), step positive, and a window that weighs the same however long it is."""
    for window in (1, 4):
        g = small("atlas", window=window).blocks[0].mixer.make_gates(3 * torch.randn(2, 7, 16))
        assert g.keep.shape == g.step.shape == g.momentum.shape == (2, 2, 7) and g.gate.shape == (2, 2, 7, window)
        assert all(0 < a.min() and a.max() < 1 for a in (g.keep, g.momentum, g.gate * window)) and g.step.min() > 0
    g = small("atlas", keep=False, momentum=False, gate="uniform").blocks[0].mixer.make_gates(torch.randn(2, 7, 16))
    assert g.keep.min() == 1 and g.momentum is None and torch.allclose(g.gate.sum(-1), torch.ones(2, 2, 7))


def test_gates_limit_what_a_chunk_writes():
    """Without momentum, a key repeated for a whole chunk collects a weight of at most max_step, however wild the gates."""
    layer = small("atlas", chunk=64, momentum=False).double().blocks[0].mixer
    layer.gates.weight.data *= 200
    gates = layer.make_gates(randn(2, 64, 16))
    assert gates.keep.min() < 0.01 and gates.keep.max() > 0.99
    one, M0 = F.pad(torch.ones(2, 2, 64, 1).double(), (0, 7)), (torch.zeros(2, 8, 8).double(),)
    rule, phi = Rule("linear", "dot", 3, 64), Features("none", 8)
    y, _ = omega(rule, phi, one, one, one, gates, start(rule, phi, M0, 2, momentum=False))
    assert 0 < y[..., 0].min() and y[..., 0].max() < layer.config.max_step


def test_gates_of_heads_and_tokens():
    """Each gate has an input of its own, in its own head: (B, T, H n) must not be taken apart as (B, T, n H)."""
    layer = small("atlas").blocks[0].mixer
    x, bias = torch.randn(2, 7, 16), layer.gates.bias.data.view(2, -1)
    before = layer.make_gates(x)
    close(before.keep[1, 0], (x[1] @ layer.gates.weight[0] + layer.gates.bias[0]).sigmoid(), 1e-6)
    for head in (0, 1):
        for j, name in enumerate(("keep", "step", "momentum", "gate", "gate", "gate")):
            bias[head, j] += 1
            after = layer.make_gates(x)
            bias[head, j] -= 1
            assert all(torch.allclose(a[:, 1 - head], b[:, 1 - head]) for a, b in zip(after, before)), "another head"
            a, b = getattr(after, name)[:, head], getattr(before, name)[:, head]
            assert (a[..., j - 3] > b[..., j - 3]).all() if name == "gate" else (a > b).all(), name


@pytest.mark.parametrize("T", [9, 3000])                      # in one piece, in several
def test_convolution(T):
    """Depthwise, causal, width 4, the last tap on the token itself: a conv padded on both sides sees the future."""
    layer = small("atlas").blocks[0].mixer.double()
    n = layer.conv.shape[1]
    x, before, out = (torch.randn(2, length, n, dtype=torch.float64, requires_grad=True) for length in (T, 3, T))
    y, tail = layer.short_conv(x, before)
    want = F.silu(F.conv1d(torch.cat([before, x], 1).mT, layer.conv.T[:, None], groups=n).mT)
    grads = (torch.autograd.grad(z, (x, before, layer.conv), out) for z in (y, want))
    for a, b in [(y, want), *zip(*grads)]:
        close(a, b, 1e-5)
    assert torch.equal(tail, x[:, -3:])


def test_unit_vectors():
    """Keys and queries of length 1, and of length 0 where there is nothing to scale; the gradient has no part along them."""
    x, out = (torch.cat([randn(2, 5, 4), torch.zeros(2, 1, 4).double()], 1).requires_grad_() for _ in range(2))
    for a, b in zip(*((y, torch.autograd.grad(y, x, out)[0]) for y in (models.unit(x), F.normalize(x, dim=-1)))):
        close(a, b)
    close(models.unit(1e-9 * x[:, :-1]), models.unit(x[:, :-1]))                 # however short it is
    slope, = torch.autograd.grad(models.unit(x).sum(), x)
    assert slope[:, :-1].all() and not slope[:, -1].any()     # padding: F.normalize has 1e12 there, which clipping would make all there is


@torch.no_grad()
def test_sliding_window_attention():
    """The last of w tokens in a window of w sees what a sequence of just these w tokens sees: no more, no less."""
    full = shaken(small("transformer", n_layer=1)).blocks[0].mixer
    x = randn(2, 21, 16)
    for w in (1, 4, 5, 8, 30):
        windowed = small("transformer", n_layer=1, attn_window=w).double().blocks[0].mixer
        windowed.load_state_dict(full.state_dict())
        y, _ = windowed(x)
        for t in range(21):
            close(y[:, t], full(x[:, max(0, t - w + 1): t + 1])[0][:, -1], 1e-6)


def heads(layer, a, norm=None, turned=False):
    """(T, H D) -> (H, T, D), of unit mean square times `norm`'s weight, turned by the position as complex numbers are."""
    a = a.unflatten(-1, (layer.config.n_head, -1)).transpose(0, 1)
    if norm:
        a = a / a.square().mean(-1, keepdim=True).sqrt() * norm.weight
    if turned:
        half = a.shape[-1] // 2
        angle = torch.arange(a.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        a = torch.view_as_real(torch.complex(a[..., :half], a[..., half:]) * torch.exp(1j * angle)).mT.flatten(-2)
    return a


def softmax_attention(layer, q, k, v, seen):
    """Attention written out for one sequence: q (H, T, D), k and v (H, n, D), seen (T, n) -> (T, n_embd)."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ layer.out.weight.T


@torch.no_grad()
def test_attention_formula():
    """Softmax attention written out: rotary positions, normalised q and k, and a prefix that all see and that has no position."""
    layer = shaken(small("transformer")).blocks[0].mixer
    x, p, seen = randn(1, 6, 16), randn(2, 16), torch.ones(6, 6).tril().bool()
    (q, k, v), (_, pk, pv) = (layer.qkv(a).chunk(3, -1) for a in (x[0], p))
    q, k, v = heads(layer, q, layer.q_norm, True), heads(layer, k, layer.k_norm, True), heads(layer, v)
    close(layer(x)[0][0], softmax_attention(layer, q, k, v, seen), 1e-6)
    k, v = torch.cat([heads(layer, pk, layer.k_norm), k], 1), torch.cat([heads(layer, pv), v], 1)
    close(layer(x, None, p)[0][0], softmax_attention(layer, q, k, v, F.pad(seen, (2, 0), value=True)), 1e-6)


def wired(wiring, **more):
    """A layer of a small ATLAS, its input, and the memory's input of mag and mal: persistent tokens, then x."""
    layer, x = shaken(small("atlas", wiring=wiring, **more)).blocks[0].mixer, randn(1, 8, 16)
    return layer, x, torch.cat([layer.persistent[None], x], 1)


@torch.no_grad()
def test_mag():
    """Titans Eq 26-28: attention and memory side by side over (p | x), the normed memory gates the normed attention."""
    layer, x, px = wired("mag")
    y, m = layer.attention(x, None, layer.persistent)[0], layer.memory(px)[0][:, 2:]
    close(layer(x)[0], layer.y_norm(y) * layer.m_norm(m).sigmoid())


@torch.no_grad()
def test_mal():
    """Titans Eq 29-31: the memory reads and writes first, attention sees only what it says, persistent tokens included."""
    layer, x, px = wired("mal")
    close(layer(x)[0], layer.attention(layer.m_norm(layer.memory(px)[0]))[0][:, 2:])


@torch.no_grad()
def test_mac():
    """Titans Eq 21-25, the order read, attend, write: h comes from the memory before the segment, y is what is written.

    lucidrains' author on his own: "this was never done correctly"; a port lets a segment's tokens see the h of later ones.
    """
    layer, x, _ = wired("mac", attn_window=3)
    a, state, outs = layer.attention, layer.memory.start(x), []
    for s in x.split(3, 1):
        h = layer.memory.retrieve(s, total(state.rule))
        (_, pk, pv), (_, hk, hv), (q, xk, xv) = (a.qkv(z).chunk(3, -1) for z in (layer.persistent, h[0], s[0]))
        seen = F.pad(torch.ones(len(q), len(q)).tril().bool().repeat(1, 2), (2, 0), value=True)
        k = [heads(a, pk, a.k_norm), heads(a, hk, a.k_norm, True), heads(a, xk, a.k_norm, True)]
        v = [heads(a, z) for z in (pv, hv, xv)]
        y = softmax_attention(a, heads(a, q, a.q_norm, True), torch.cat(k, 1), torch.cat(v, 1), seen)[None]
        m, state = layer.memory(y, state)
        outs.append(layer.y_norm(y) * layer.m_norm(m).sigmoid())
    close(layer(x)[0], torch.cat(outs, 1), 1e-6)


@torch.no_grad()
def test_retrieve():
    """Reading without writing (M* of Titans Eq 21) is what the layer says when it writes nothing and has no convolution."""
    for preset in ("titans", "atlas", "dot", "swla"):
        layer = shaken(small(preset, conv=False, keep=False, max_step=0.0)).blocks[0].mixer
        x = randn(2, 5, 16)
        W = total(layer.start(x).rule)
        close(layer(x)[0], layer.retrieve(x, W, randn(2, 2, 0, 8) if preset == "dot" else None))


def keeps_its_past(model):
    return not model.config.attn_window or model.config.features == "exp"


@every_model
@torch.inference_mode()
def test_state_size_is_constant(preset, more):
    """Decoding must cost the same for ever: only full attention and exp features may keep their past."""
    model, x = small(preset, **more), torch.randint(11, (1, 36))
    sizes, state = [], None
    for piece in x.split(12, 1):
        _, state = model(piece, state)
        sizes.append(sum(t.numel() for t in tensors(state)))
    assert sizes[0] < sizes[1] < sizes[2] if keeps_its_past(model) else sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("preset, more", [*(pytest.param(*model, id=name) for name, model in MODELS.items()
                                            if name in models.PRESETS or name.startswith("atlas-")),
                                          pytest.param("atlas", dict(chunk=16, muon_every=1), id="blocks")])
@torch.inference_mode()
def test_a_state_holds_no_prompt(preset, more):
    """The last tokens of a prompt as views of all of them: a state of 0.4 MB kept 27 MB alive, and torch.save wrote them. Likewise W and S as
    views of those of all blocks.
    """
    model = small(preset, **more)
    for lengths in ((120,), (30, 90), (36, *[1] * 8)):
        state, held = None, {}
        for T in lengths:
            _, state = model(torch.randint(11, (1, T)), state)
        for t in tensors(state):
            if not isinstance(t, torch.nn.Parameter):         # M0
                held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        assert sum(held.values()) <= 2 * models.state_bytes(state)               # full attention: all values, and the q and k beside them


@every_preset
def test_detach(preset):
    """A detached state has the same values and no past, whatever its nesting: otherwise memory grows with the stream."""
    model = small(preset)
    _, state = model(torch.randint(11, (2, 9)))
    cut, [[mine]], yours = (models.detach(s) for s in (state, [[state]], dict(a=state)))          # as a model of one's own may keep it
    assert tensors(mine) and not any(t.grad_fn for t in (*tensors(mine), *tensors(yours["a"])))
    starts = {id(p) for name, p in model.named_parameters() if ".M0." in name}  # which learn from what comes after, too
    assert any(t.requires_grad for t in tensors(state)) and all(id(t) in starts for t in tensors(cut) if t.requires_grad)
    for a, b in zip(tensors(state), tensors(cut), strict=True):
        assert torch.equal(a, b)
    model(torch.randint(11, (2, 3)), cut)[0].sum().backward()
    assert all(p.grad is not None for p in model.parameters() if id(p) in starts)


@pytest.mark.parametrize("tokens", [0, 3])
@torch.no_grad()
def test_a_state_without_M0_does_not_move_with_it(tokens):
    """With forget = "zero" M0 is where W begins: gradients would be taken at the M0 of after an optimizer's step, and W grow from that before."""
    model = small("titans", forget="zero")
    state = models.detach(model(torch.randint(11, (2, tokens)))[1])
    before = [t.clone() for t in tensors(state)]
    for p in model.parameters():
        p.add_(1.0)
    assert before and all(torch.equal(a, b) for a, b in zip(tensors(state), before, strict=True))


def test_detach_of_weights_that_are_no_parameters():
    """Of torch.func.functional_call: M0 would learn nothing from the second segment on, silently."""
    model, (x, y) = small("omeganet"), torch.randint(11, (2, 1, 9))
    plain = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    _, state = torch.func.functional_call(model, plain, (x,))
    logits, _ = torch.func.functional_call(model, plain, (y, models.detach(state)))
    assert torch.autograd.grad(logits.square().sum(), plain["blocks.0.mixer.M0.0"])[0].abs().max() > 0


@pytest.mark.parametrize("preset, more", [*((preset, {}) for preset in models.PRESETS), ("atlas", dict(features="sketch")),
                                          ("atlas", dict(wiring="mac")), ("titans", dict(wiring="mag", tie=True))])
def test_models_that_begin_on_the_meta_device(preset, more):
    """As torch does with large models: what neither a checkpoint nor init fills, the tables of monomials, is what memory happens to hold."""
    want, x = small(preset, n_layer=1, **more).double(), torch.randint(11, (2, 9))
    with torch.device("meta"):
        empty = [small(preset, n_layer=1, **more).double() for _ in range(3)]
    loaded, assigned, begun = (empty[0].to_empty(device="cpu"), empty[1], empty[2].to_empty(device="cpu"))
    loaded.load_state_dict(want.state_dict())
    assigned.load_state_dict(want.state_dict(), assign=True)
    for model in (loaded, assigned):
        close(model(x)[0], want(x)[0])
    for a in begun.state_dict().values():
        a.fill_(math.nan)
    for model in (begun, want):
        torch.manual_seed(1)
        model.init()
    assert all(map(torch.equal, begun.state_dict().values(), want.state_dict().values()))
    close(begun(x)[0], want(x)[0])


@pytest.mark.parametrize("width", [1, 2, 7])
@torch.no_grad()
def test_a_convolution_of_another_width(width):
    """The last 0 inputs, a[:, -0:], are all of them."""
    layer = type("Layer", (models.Memory,), dict(conv_width=width))(models.configure("omeganet", n_embd=8, n_head=2, head_dim=4, chunk=4)).double()
    x = randn(2, 13, 8)
    a, state = layer(x[:, :5])
    close(torch.cat([a, layer(x[:, 5:], state)[0]], 1), layer(x)[0])


@every_model
@torch.no_grad()
def test_select(preset, more):
    """A state that was told apart by its first dimension: of M0 that is the heads."""
    model, x, y = shaken(small(preset, **more)), torch.randint(11, (3, 6)), torch.randint(11, (4, 5))
    _, state = model(x)
    rows = [2, 0, 0, 1]
    want = model(torch.cat([x[rows], y], 1))[0][:, 6:]
    close(model(y, models.select(state, rows))[0], want)
    close(model(y[1:2], models.select(state, slice(0, 1)))[0], want[1:2])


def test_select_of_lists_slices_and_single_numbers():
    """A list of states came back as it was, the sequences in their old order; a slice kept, and saved, the memories of all others."""
    model, x, y = shaken(small("omeganet")), torch.randint(11, (2, 6)), torch.randint(11, (2, 5))
    _, state = model(x)
    want = model(y, models.select(state, [1, 0]))[0]
    for swapped in (models.select([*state], [1, 0]), models.select(dict(a=state), torch.tensor([1, 0]))["a"], models.select(state, (1, 0))):
        assert torch.equal(model(y, swapped)[0], want)
    assert models.state_bytes([*state]) == models.state_bytes(dict(a=state)) == models.state_bytes(state) > 0
    one = models.select(state, slice(0, 1))
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors(one) if not isinstance(t, torch.nn.Parameter))
    for rows in (1, [0.7], (0.7, 1)):
        with pytest.raises(ValueError, match="rows are a slice, or a list"):
            models.select(state, rows)


@every_preset
@torch.no_grad()
def test_autocast_keeps_the_memory_in_float32(preset):
    """Under bfloat16 a keep of 0.999 is 1: fast weights and momentum stay float32, and the logits stay near."""
    model, x = small(preset), torch.randint(11, (2, 13))
    exact = model(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(x[:, :6])
        more, state = model(x[:, 6:], state)
    close(torch.cat([logits, more], 1).float(), exact, 0.05)
    for inner in memories(state):
        assert all(t.dtype == torch.float32 for t in tensors(inner))


def learned(model):
    """A few steps on a sequence of random tokens, so that the gates leave their starting values."""
    x = torch.randint(11, (4, 65))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        model.loss(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


STREAMS = [(preset, False) for preset in models.PRESETS]
STREAMS += [(preset, True) for preset in ("titans", "omeganet", "atlas", "dot")]


@pytest.mark.parametrize("preset, trained", STREAMS, ids=[p + "-trained" * t for p, t in STREAMS])
@torch.no_grad()
def test_long_streams_stay_bounded(preset, trained):
    """10,000 tokens in float32 with the default chunk, one row of a single token, one of random ones: no NaN, no growth."""
    model = models.build(preset, vocab_size=11, n_layer=1, n_head=2, n_embd=16)
    if trained:
        with torch.enable_grad():
            learned(model)
    state, x = None, torch.stack([torch.full((2000,), 3), torch.randint(11, (2000,))])
    for _ in range(5 if not keeps_its_past(model) else 1):
        logits, state = model(x, state)
        assert logits.abs().max() < 100 and all(t.abs().max() < 5e3 for t in tensors(state) if t.numel())


@pytest.mark.parametrize("preset", ["titans", "omeganet"])
@torch.no_grad()
def test_norm_keeps_wide_open_gates_bounded(preset):
    """With the norm in the memory nothing blows up on a repeated token, with all gates open: without it (and the ball) this is NaN, or 1e25."""
    model = models.build(preset, vocab_size=11, n_layer=1, n_head=2, n_embd=16, memory_norm=True, max_norm=0.0)
    bias = model.blocks[0].mixer.gates.bias.data.fill_(3.0)
    bias.view(2, -1)[:, 0] = 6.0                              # keep 0.998
    logits, state = model(torch.full((1, 2000), 3))
    assert logits.abs().max() < 100 and all(t.abs().max() < 1e4 for t in tensors(state) if t.numel())


@every_preset
def test_generate(preset):
    """Greedy text from the cached state is the text from reading everything again; the prompt counts, not its last token."""
    model, x = shaken(small(preset)), torch.randint(11, (2, 7))
    text = torch.cat([x, torch.stack(tokens := list(model.generate(x, 12, temperature=0)), 1)], 1)
    assert text.shape == (2, 19) and not any(token.requires_grad for token in tokens)
    assert torch.equal(model(text)[0][:, 6:-1].argmax(-1), text[:, 7:])
    with torch.no_grad():
        _, state = model(x[:, :5])
    for _ in range(2):                                        # the text that was read once may be asked twice
        assert torch.equal(torch.stack(list(model.generate(x[:, 5:], 12, temperature=0, state=state)), 1), text[:, 7:])


@pytest.mark.parametrize("preset, more", [("atlas", {}), ("omeganet", dict(wiring="mag")), ("titans", dict(wiring="mac")), ("dot", {}), ("swa", {})])
def test_a_state_outlives_the_program(tmp_path, preset, more):
    """What was read must be there from a file, without trust in it, and without the text."""
    model, x = shaken(small(preset, **more)), torch.randint(11, (2, 13))
    with torch.no_grad():
        logits, state = model(x[:, :7])
        torch.save(state, tmp_path / "state.pt")
        again = models.load_state(tmp_path / "state.pt")
        assert type(again[0]) is type(state[0]) and models.state_bytes(again) == models.state_bytes(state)
        assert torch.equal(model(x[:, 7:], again)[0], model(x[:, 7:], state)[0])
        assert all(t.is_meta for t in tensors(models.load_state(tmp_path / "state.pt", "meta")))
    torch.save(model(x)[1], tmp_path / "state.pt")            # of a graph that is not in the file: a frozen model would begin a new one
    assert not any(t.requires_grad for t in tensors(models.load_state(tmp_path / "state.pt")))
    torch.save([os.system], tmp_path / "other.pt")
    with pytest.raises(Exception, match=rf"\b{os.name}\.system\b"):
        models.load_state(tmp_path / "other.pt")


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    """The logits of all its tokens at once would be gigabytes: 100,000 tokens of GPT-2's vocabulary are 20."""
    model, real, lengths = shaken(small("omeganet")), models.LM.forward, []

    def forward(self, tokens, state=None):
        lengths.append(tokens.shape[1])
        return real(self, tokens, state)
    x = torch.randint(11, (1, 2500))
    with torch.no_grad():
        first = model(x)[0][:, -1].argmax(-1)
    monkeypatch.setattr(models.LM, "forward", forward)
    assert torch.equal(next(model.generate(x, 1, temperature=0)), first) and max(lengths) <= 1024 and sum(lengths) == 2500


def test_what_was_read_without_a_gradient_can_be_learned_from():
    """A state of inference mode is of tensors that autograd refuses; detached, it is like any other."""
    model, x = small("atlas"), torch.randint(11, (1, 9))
    with torch.inference_mode():
        _, state = model(x)
    F.cross_entropy(model(x, models.detach(state))[0][0], x[0]).backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_a_token_of_exp_features_is_not_a_square_of_those_before(monkeypatch):
    """One-hot rows as the last of an identity matrix of all keys: at position 50,000 each token took 10 GB for a moment."""
    model, real, sizes = small("dot"), torch.eye, []

    def eye(n, *more, **how):
        sizes.append(n)
        return real(n, *more, **how)
    with torch.no_grad():
        _, state = model(torch.randint(11, (1, 300)))
        monkeypatch.setattr(torch, "eye", eye)
        model(torch.zeros(1, 1, dtype=torch.long), state)
    assert sizes and max(sizes) < 30


def test_a_model_learns_from_what_it_wrote():
    """What is made in inference mode cannot be saved for a gradient: none of it may come out."""
    model = small("atlas")
    *_, token = model.generate(torch.zeros(2, 3, dtype=torch.long), 9)
    model.loss(token[:, None], token[:, None]).backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_generate_is_reproducible():
    """The same generator gives the same text, and different rows and seeds differ."""
    model, x = small("atlas"), torch.zeros(2, 3, dtype=torch.long)
    draw = lambda seed: torch.stack(list(model.generate(x, 20, generator=torch.Generator().manual_seed(seed))), 1)
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2)) and not torch.equal(*draw(1))


FILTERS = [                       # temperature, top_k, top_p -> tokens that may come from probabilities .1 .4 .2 .3
    (1, 0, 1.0, {0, 1, 2, 3}), (1, 2, 1.0, {1, 3}), (1, 1, 1.0, {1}), (1, 9, 1.0, {0, 1, 2, 3}), (1, 0, 0.39, {1}),
    (1, 0, 0.41, {1, 3}), (1, 0, 0.69, {1, 3}), (1, 0, 0.71, {1, 2, 3}), (1, 3, 0.5, {1, 3}), (0, 0, 1.0, {1}), (0.01, 0, 1.0, {1})]


@pytest.mark.parametrize("temperature, top_k, top_p, allowed", FILTERS, ids=str)
def test_sample_filters(temperature, top_k, top_p, allowed):
    """top_k and top_p keep exactly the tokens that they name, the one that crosses top_p included, whatever their order."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(2000, 4)
    assert set(models.sample(logits, temperature, top_k, top_p).tolist()) == allowed


def test_sample_probabilities():
    """Temperature T draws from p^(1/T), and the filters renormalise."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(20000, 4)
    count = lambda *args: models.sample(logits, *args).bincount(minlength=4) / 20000
    p = torch.tensor([0.1, 0.4, 0.2, 0.3]) ** 2
    close(count(0.5), p / p.sum(), 0.02)
    close(count(1, 2), torch.tensor([0, 4 / 7, 0, 3 / 7]), 0.02)
    for temperature in (1e-20, 1e-40, 1e-45):                 # where the logits themselves overflow
        assert (models.sample(100 + logits, temperature) == 1).all()


def test_top_p_of_one_leaves_out_no_token(monkeypatch):
    """The sum of probabilities, rounded, is 1 before it has come to the unlikeliest: half of GPT-2's tokens could not be sampled."""
    seen = []
    monkeypatch.setattr(torch, "multinomial", lambda probs, n, generator: seen.append(probs) or probs.argmax(-1, keepdim=True))
    logits = 5 * torch.randn(4, 50257, generator=torch.Generator().manual_seed(0))
    models.sample(logits)
    models.sample(logits, top_p=0.999)
    assert (seen[0] > 0).all() and 0 < (seen[1] > 0).float().mean() < 0.5


def test_loss_counts_what_it_should():
    """Mean cross entropy in nats over targets that are not -100."""
    model, x = small("atlas"), torch.randint(11, (2, 9))
    y = torch.randint(11, (2, 9))
    p = model(x)[0].log_softmax(-1).gather(-1, y[..., None])[..., 0]
    close(model.loss(x, y), -p.mean(), 1e-6)
    close(model.loss(x, torch.where(torch.arange(9) < 5, y, -100)), -p[:, :5].mean(), 1e-6)


def test_dropout_is_of_both_halves_of_a_block():
    """Of one half alone it still acts, so that a run with it differs from one without."""
    block, x = small("omeganet", dropout=0.5).blocks[0].train(), torch.randn(2, 9, 16)
    block.mlp.forward = torch.zeros_like
    after = block.after(x, torch.ones_like(x)) - x
    assert 0.3 < (after.abs() < 1e-6).float().mean() < 0.7 and after.max() == pytest.approx(2, abs=1e-5)       # what stays is scaled
    block.mlp.forward = torch.ones_like
    after = block.after(x, torch.zeros_like(x)) - x
    assert 0.3 < (after.abs() < 1e-6).float().mean() < 0.7


def test_the_loss_is_in_float32():
    """In bfloat16, which is what autocast leaves, it has three digits."""
    logits, targets = torch.randn(2, 9, 11).bfloat16(), torch.randint(11, (2, 9))
    loss = models.cross_entropy(logits, targets)
    assert loss.dtype == torch.float32 and loss == models.cross_entropy(logits.float(), targets)


def test_defaults_are_those_that_the_readme_tells():
    """A default that moves makes every figure of the README another one's, and no other test would notice."""
    c, of = models.Config(), models.configure
    assert (c.window, c.chunk, c.degree, c.expansion, c.head_dim, c.persistent, c.attn_window) == (8, 64, 2, 1, 16, 4, 64)
    assert (c.max_step, c.max_norm, c.ns_steps, c.forget, c.gate, c.memory_norm, c.dropout, c.tie) == (2.0, 50.0, 5, "start", "token", False, 0.0, False)
    assert {(of(name).chunk, of(name).muon_every) for name in ("atlas", "atlas++")} == {(128, 128)}
    assert all(of(name).window == (8 if name in ("transformer", "swa", "swla", "swdt", "dot", "omeganet", "atlas", "atlas++") else 1) for name in models.PRESETS)
    assert models.SIZES["baby"]["dropout"] == 0.1 and (memory.EPS, memory.LP) == (1e-6, 3)
    sizes = {name: train.settings(dict(size=name, device="cpu"))[0] for name in models.SIZES}
    assert {name: (tc.lr, tc.steps) for name, tc in sizes.items()} == {                          # from 170m on the paper's Table 7
        "tiny": (1.2e-2, 1150), "baby": (1e-3, 5000), "170m": (3e-3, 30_000), "340m": (1.5e-3, 30_000), "760m": (1.25e-3, 60_000), "1.3b": (7e-4, 200_000)}
    for name, tc in sizes.items():
        batch = {"tiny": (8, 1, 256), "baby": (64, 1, 256)}.get(name, (8, 16, 4096))
        assert (tc.batch_size, tc.grad_accum, tc.seq_len) == batch
    assert 8 * 16 * 4096 == 2**19                             # half a million tokens a step
    tc = sizes["tiny"]
    assert (tc.optimizer, tc.muon_lr, tc.embed_lr, tc.minutes, tc.eval_every, tc.weight_decay) == ("muon", 4e-2, 10.0, 4.6, 575, 0.1)


def test_what_stands_before_every_sequence_is_as_loud_as_a_token():
    """Persistent tokens that begin near zero are normalised to the same, but learn as if they were not."""
    wiring = models.Wiring(models.configure("atlas", wiring="mag", n_embd=512, persistent=8))
    assert wiring.persistent.std().item() == pytest.approx(1, rel=0.1)


# graphs go by autograd for compiled ones, as to inductor, but it does not ask what is best done again in backward, which takes a third of the time
AOT = "aot_eager_default_partitioner"


def plain_again(monkeypatch):
    """Undo compile_chunks after the test."""
    for module, name in (*omega_module.COMPILED, (chunks.Chunks, "compiled")):
        monkeypatch.setattr(module, name, getattr(module, name))


@pytest.mark.parametrize("preset, graphs, dtype", [("omeganet", 16, "float32"), ("atlas", 9, "float32"), ("atlas", 9, "bfloat16")],
                         ids=["omeganet", "atlas", "atlas in bfloat16"])
def test_chunk_steps_compile_whole(preset, graphs, dtype, monkeypatch):
    """One graph for a chunk's step, forward and backward, and the same numbers: a graph break costs a GPU more than it saves, and so do graphs
    for the same step twice, as of a list and of a tuple. Only the first chunk is a step of its own.

    Limits of torch._dynamo belong to a thread, and on CUDA gradients have one of their own: there the ninth shape would be eager.
    """
    plain_again(monkeypatch)
    monkeypatch.setitem(omega_module.TILE, "cpu", 16)         # as on a GPU, `mixing` is compiled, too
    made, backend = [], torch._dynamo.lookup_backend(AOT if dtype == "float32" else "eager")
    if preset == "atlas":                                     # what is done with all tokens at once is the same for both
        monkeypatch.setattr(omega_module, "COMPILED", [part for part in omega_module.COMPILED if part[0] is chunks or part[1] == "mixing"])
    model, x = shaken(small(preset, n_layer=1, momentum=True, ns_steps=2, memory_dtype=dtype)), torch.randint(11, (2, 12))
    limits, empty = [], chunks.empty_like
    if dtype == "bfloat16":                                   # beside fast weights in float32
        model.float()
    gradient = lambda loss: torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    plain = gradient(model(x)[0].square().mean())
    monkeypatch.setattr(chunks, "empty_like", lambda a: limits.append(torch._dynamo.config.recompile_limit) or empty(a))     # in backward
    omega_module.compile_chunks(backend=lambda *graph: made.append(graph) or backend(*graph), fullgraph=True)
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(gradient, model(x)[0].square().mean()).result()
    for a, b in zip(compiled, plain, strict=True):
        close(a, b, *([0.05 * b.abs().max().item()] if dtype == "bfloat16" else []))
    assert min(limits) >= 1000 and len(made) == graphs
    linears = [sum("linear" in str(node.target) for node in graph.graph.nodes) for graph, _ in made]
    assert sorted(n for n in linears if n) == ([2, 3] if preset == "omeganet" else [])           # output gate and projection; a SwiGLU


def test_the_compiler_is_not_asked_for_an_autocast(monkeypatch):
    """torch 2.11, which lent GPUs have, cannot: ten graph breaks in each chunk of an atlas in bfloat16."""
    asked = []
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: asked.append(kind) or True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with memory.autocast(CPU):
        assert not torch.is_autocast_enabled("cpu") and not asked


def test_chunk_of_few_pairs_compiles_whole(monkeypatch):
    """One graph for the first chunk, whose W is zero and has no gradient, and one for all others; and the same numbers."""
    plain_again(monkeypatch)
    monkeypatch.setattr(omega_module, "COMPILED", [(omega_module, "pairs_chunk")])
    made, backend = [], torch._dynamo.lookup_backend(AOT)
    model, x = shaken(small("atlas", n_layer=1, momentum=False, muon_every=1, ns_steps=2)), torch.randint(11, (2, 12))
    eager = forth_and_back(model, x)
    omega_module.compile_chunks(backend=lambda *graph: made.append(graph) or backend(*graph), fullgraph=True)
    for a, b in zip(forth_and_back(model, x), eager, strict=True):
        close(a, b)
    assert len(made) == 2


def test_compiled_gates_have_no_gradient_in_half_precision(monkeypatch):
    """torch.compile takes gradients within the autocast that it finds outside of what it compiles: without one inside is not enough."""
    plain_again(monkeypatch)
    monkeypatch.setattr(omega_module, "COMPILED", [(omega_module, "mixing")])
    monkeypatch.setitem(omega_module.TILE, "cpu", 16)
    monkeypatch.setattr(omega_module, "recur", recur_by_product)
    model, x = small("titans", n_layer=1, memory_dtype="bfloat16"), torch.randint(11, (2, 12))
    eager = forth_and_back(model, x)
    omega_module.compile_chunks(backend=AOT)
    for a, b in zip(forth_and_back(model, x), eager, strict=True):
        close(a, b, 1e-7)


@pytest.mark.parametrize("preset, more", [("omeganet", {}), ("omeganet", dict(momentum=True)), ("titans", dict(window=9)), ("atlas", {}),
                                          ("atlas", dict(momentum=False, muon_every=1))], ids=["omeganet", "momentum", "window", "atlas", "pairs"])
def test_compiled_recurrences_take_a_tile_at_once(preset, more, monkeypatch):
    """For a GPU, which then moves a tenth less than in products of whole chunks; with the same numbers. A chunk that is no whole number of tiles,
    as the last may be, is one."""
    plain_again(monkeypatch)
    monkeypatch.setitem(omega_module.TILE, "cpu", 4)
    monkeypatch.setattr(omega_module, "COMPILED", [(omega_module, "mixing")])
    products = []

    def count(graph, inputs):
        products.append([node.meta["example_value"].shape for part in graph.modules() if hasattr(part, "graph") for node in part.graph.nodes
                         if "matmul" in str(node.target)])
        return graph.forward

    omega_module.compile_chunks(backend=count, fullgraph=True)
    model, x = shaken(small(preset, n_layer=1, chunk=16, **more)), torch.randint(11, (2, 38))
    compiled = forth_and_back(model, x)
    with torch.compiler.set_stance("force_eager"):
        for a, b in zip(compiled, forth_and_back(model, x), strict=True):
            close(a, b)
    rows, muon = [max(shape[-2] for shape in of) for of in products], preset == "atlas" and model.config.momentum
    assert rows == [4 if muon else 5, 6]                      # tokens of a tile, or four tiles and what is before them; the 6 tokens left
    assert muon or max(shape.numel() for shape in products[0]) < 2 * 2 * 2 * 16 * 16           # of 2 chunks a head; by recur P would be a larger one


@pytest.mark.parametrize("preset, step", [("titans", "learn_chunk"), ("atlas", "muon_learn")])
def test_validation_compiles_nothing_anew(preset, step, monkeypatch):
    """To torch.compile a parameter is another type than a tensor: without a gradient chunk steps would be compiled once more."""
    seen, real = [], getattr(chunks, step)
    monkeypatch.setattr(chunks, step, lambda how, part, M0, *more: seen.extend(M0) or real(how, part, M0, *more))
    model, x = small(preset), torch.randint(11, (2, 9))
    model(x)
    with torch.no_grad():
        model(x)
    assert len(seen) == 2 * 2 * 3 * 2 and not any(isinstance(w, torch.nn.Parameter) for w in seen)      # 2 passes, blocks, matrices; 3 chunks


def test_what_compiles_only_in_parts_is_still_right(monkeypatch):
    """Monomials of degree 3, whose products are written where dynamo does not follow."""
    plain_again(monkeypatch)
    monkeypatch.setattr(omega_module, "COMPILED", [(omega_module, "features")])
    model, x = shaken(small("omeganet", n_layer=1, degree=3, head_dim=4)), torch.randint(11, (2, 8))
    eager = forth_and_back(model, x)
    omega_module.compile_chunks(backend=AOT)
    for a, b in zip(forth_and_back(model, x), eager, strict=True):
        close(a, b)


def test_compiled_stretches_are_of_one_size(monkeypatch):
    """Fifteen chunks as 6, 6 and 3 are three shapes to compile, some seconds each, with the first. And compiled, more of them fit into the cache."""
    for kind, size in (("cpu", 6), ("compiled", 8)):
        monkeypatch.setitem(chunks.AT_ONCE, kind, size * 2 * 4 * 5)
    sizes = lambda count, alone: [s.stop - s.start for s in chunks.stretches(argparse.Namespace(v=torch.empty(count, 2, 4, 3)), [torch.empty(1, 5)], alone)]
    assert sizes(16, True) == [1, 6, 6, 3] and sizes(4, False) == [4]
    monkeypatch.setattr(chunks.Chunks, "compiled", True)
    assert sizes(16, True) == [1, 5, 5, 5] and sizes(4, False) == [4] and sizes(13, False) == [8, 5] and sizes(1, True) == [1]


def test_generating_compiles_nothing(monkeypatch):
    """A graph for each place in a chunk, and of `exp` features for each token, seconds apiece."""
    plain_again(monkeypatch)
    made, model = [], small("dla", chunk=4).eval()
    model.compile_memory(backend=lambda graph, example: made.append(graph) or graph)
    tokens = [t.item() for t in model.generate(torch.tensor([[1, 2]]), 3, temperature=0)]
    assert len(tokens) == 3 and not made
    model(torch.tensor([[1, 2]]))
    assert made


def test_tables_follow_what_phi_is_used_on():
    """A model built under torch.device("cuda"), or loaded with assign=True, whose tables of monomials are on the CPU: "Expected all tensors to be on
    the same device"; and tables made while text was generated, from which no gradient can be taken."""
    want, x = Features("monomial", 3).double(), randn(5, 3)
    with torch.device("meta"):
        phi = Features("monomial", 3).double()
    assert phi(torch.empty(5, 3, dtype=torch.double, device="meta")).device.type == "meta" and phi.degrees.device.type == "meta"
    phi.scale = want.scale
    with torch.inference_mode():
        assert torch.equal(phi(x), want(x))
    assert phi.multinomial.dtype == torch.double
    (phi(x).sum() - want(x).sum()).backward()
    assert phi.scale.grad.abs().max() < 1e-12


def test_a_model_may_be_moved_before_its_gradient():
    """`model.to(device)` between loss and backward: its tables were written anew, in their place, and the backward was refused."""
    model, x = small("omeganet"), torch.randint(11, (2, 9))
    model.loss(x[:, :-1], x[:, 1:]).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = model.loss(x[:, :-1], x[:, 1:])
    model.to("cpu")
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want))


def test_a_run_on_a_cpu_leaves_the_gpu_alone(tmp_path, monkeypatch):
    """--device cpu beside a GPU that somebody else has for himself: a traceback at the first checkpoint, after the training."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("the GPU was asked"))
    train.save_checkpoint(tmp_path / "ckpt.pt", dict(step=1), tiny_model(), [])
    assert torch.load(tmp_path / "ckpt.pt")["rng"]["cuda"] is None


def test_ragged_windows_are_not_compiled(monkeypatch):
    """A graph for each length that comes once: more than training has."""
    stances = []
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: stances.append(stance) or nullcontext())
    train.evaluate(tiny_model("linear"), torch.zeros(16 * 5 + 9, dtype=torch.long), 16, 2)
    assert stances == ["force_eager"] * 2                     # of (2, 16), (2, 16), (1, 16), (1, 8)


@pytest.mark.parametrize("preset", ["transformer", "swa"])
def test_blocks_of_a_transformer_compile_whole(preset, monkeypatch):
    """The baseline, with what torch.compile makes of it: no graph break in attention, norms or positions, and the same numbers."""
    plain_again(monkeypatch)
    model, x, compiled = shaken(small(preset, n_layer=1)), torch.randint(11, (2, 25)), []
    eager = forth_and_back(model, x)

    def backend(graph, inputs):
        compiled.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    model.compile_memory(backend=backend, fullgraph=True)
    for a, b in zip(forth_and_back(model, x), eager, strict=True):
        close(a, b)
    for op in "scaled_dot_product_attention", "rms_norm", "silu", "cos", "cross_entropy":
        assert any(op in target for target in compiled)


@pytest.mark.parametrize("preset", [name for name in models.PRESETS if models.configure(name).mixer == "memory"])
def test_a_memory_in_bfloat16(preset):
    """--memory-dtype: logits and gradient are float32's but for rounding (which Muon's coefficients multiply here, cubic does not); and the state's
    precision is."""
    model, low = (small(preset, ns_coefficients="cubic", memory_dtype=dtype) for dtype in ("float32", "bfloat16"))
    x = torch.randint(11, (2, 25))
    low.load_state_dict(model.state_dict())
    assert all(a.dtype == b.dtype for a, b in zip(tensors(low(x)[1]), tensors(model(x)[1]), strict=True))
    (a, *da), (b, *db) = forth_and_back(low, x), forth_and_back(model, x)
    da, db = (torch.cat([g.flatten() for g in grads]) for grads in (da, db))
    assert (a - b).norm() < 0.02 * b.norm() and (da - db).norm() < 0.02 * db.norm()


@pytest.mark.parametrize("preset", ["atlas", "atlas++"])
def test_newton_schulz_in_a_memory_in_bfloat16(preset):
    """Of a few pairs S has a low rank; where it is zero Newton-Schulz multiplies all rounding by hundreds: the logits were off by 1.4 - 2 %."""
    model, low = (small(preset, memory_dtype=dtype) for dtype in ("float32", "bfloat16"))
    low.load_state_dict(model.state_dict())
    with torch.no_grad():
        a, b = (m(torch.randint(11, (2, 25), generator=torch.Generator().manual_seed(0)))[0] for m in (low, model))
    assert (a - b).norm() < 0.007 * b.norm()


@pytest.mark.parametrize("preset, most", [("omeganet", 0.65), ("titans", 0.75), ("atlas", 0.87)])
def test_a_memory_in_bfloat16_keeps_less(preset, most):
    """Tensors kept for the gradient, in bytes. Autocast alone gives nearly the same numbers, but keeps what it casts, and moves more for it. (Most of
    what atlas keeps is Newton-Schulz's.)"""
    def kept(dtype):
        sizes, layer = {}, small(preset, memory_dtype=dtype).blocks[0].mixer
        count = lambda a: sizes.update({a.data_ptr(): a.numel() * a.element_size()}) or a
        with torch.autograd.graph.saved_tensors_hooks(count, lambda a: a):
            y, _ = layer(torch.randn(2, 24, 16))
        return sum(sizes.values())
    assert kept("bfloat16") < most * kept("float32")


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def forth_and_back(model, x):
    """Logits and the gradient of their loss, on the CPU."""
    logits = model(x)[0]
    loss = models.cross_entropy(logits[:, :-1], x[:, 1:])
    return [logits.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(loss, list(model.parameters())))]


@gpu
@every_preset
def test_a_gpu_computes_the_same(preset):
    """Other kernels, other branches (a GPU takes products for recurrences), the same numbers in float64."""
    model, x = shaken(small(preset)), torch.randint(11, (2, 24))
    for a, b in zip(forth_and_back(model, x), forth_and_back(model.cuda(), x.cuda()), strict=True):
        close(b, a, 1e-8)


@gpu
@pytest.mark.parametrize("preset", ["omeganet", "atlas", "titans", "atlas++", "transformer", "swa"])
def test_compiled_on_a_gpu_is_eager(preset, monkeypatch):
    """Kernels that inductor writes, with the strides of training; in float64, where no rounding hides a wrong formula."""
    plain_again(monkeypatch)
    model = shaken(small(preset, n_layer=1, head_dim=16, chunk=32, muon_every=32)).cuda()       # of two tiles a chunk
    x = torch.randint(11, (2, 97)).cuda()
    eager = forth_and_back(model, x)
    model.compile_memory()
    for a, b in zip(forth_and_back(model, x), eager, strict=True):
        close(a, b, 1e-8)


def off_by_bfloat16(preset, memory_dtype, device):
    """Relative errors of logits and of the gradient, compiled and in bfloat16, to float32 and eager."""
    size = dict(n_layer=1, n_embd=64, head_dim=32, chunk=32, muon_every=32)
    model, low = (small(preset, memory_dtype=dtype, **size).to(device) for dtype in ("float32", memory_dtype))
    low.load_state_dict(model.state_dict())
    x = torch.randint(11, (2, 129), device=device)
    logits, *grads = forth_and_back(model, x)
    low.compile_memory()
    with torch.autocast(device, torch.bfloat16):
        low_logits, *low_grads = forth_and_back(low, x)
    pairs = (low_logits, logits), (torch.cat([g.flatten() for g in gs]) for gs in (low_grads, grads))
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


@gpu
@pytest.mark.parametrize("preset, memory_dtype", [
    ("omeganet", "float32"), ("omeganet", "bfloat16"), ("atlas", "float32"), ("atlas", "bfloat16"), ("transformer", "float32")])
def test_bfloat16_compiled_on_a_gpu_is_near_float32_eager(preset, memory_dtype, monkeypatch):
    """What train.py does there, against what it is to compute; float32 products without TF32."""
    plain_again(monkeypatch)
    logits, grads = off_by_bfloat16(preset, memory_dtype, "cuda")
    assert logits < 0.02 and grads < 0.04


@gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("preset", ["atlas", "omeganet", "titans", "linear", "transformer"])
def test_recorded_on_a_gpu_is_eager(preset, compile, monkeypatch):
    """A CUDA graph of a whole pass; in float64, for compiled kernels add up in another order."""
    plain_again(monkeypatch)
    tc, runs = train.TrainConfig(batch_size=2, grad_accum=2, seq_len=96, warmup=0), []
    for record in (False, True):
        torch.manual_seed(0)
        model = small(preset, head_dim=16, chunk=32, muon_every=32).double().cuda()
        if record and compile:
            model.compile_memory()
        told, weights, recorded = steps(model, tc, record)
        assert bool(recorded) == record
        runs.append([torch.tensor(told, dtype=torch.float64), *weights])
    for a, b in zip(*runs, strict=True):
        close(a, b, 1e-6)


@pytest.mark.parametrize("preset, more, says", [
    ("altas", {}, "atlas"), ("atlas", dict(windw=3), "windw"), ("atlas", dict(window=0), "window"), ("atlas", dict(muon_every=0), "1 .*--no-muon"),
    ("atlas", dict(chunk=2**31), "chunk"), ("atlas", dict(memory="cubic"), "gated"), ("atlas", dict(n_head=3, n_embd=16, head_dim=0), "n-head"),
    ("atlas", dict(head_dim=-4), "head-dim"), ("swa", dict(head_dim=7), "even"), ("atlas", dict(dropout=math.nan), "dropout"),
    ("atlas", dict(dropout=1.0), "dropout"), ("atlas", dict(max_norm=math.inf), "max-norm"), ("atlas", dict(max_step=-1.0), "max-step"),
    ("atlas", dict(memory_branch=False), "no-memory-branch"), ("omeganet", dict(features="sketch", degree=3), "degree 2, not 3"),
    ("atlas", dict(wiring="mag", attn_window=0), "--attn-window"), ("atlas", dict(features="exp"), "--no-muon"),
    ("omeganet", dict(degree=30), "--degree 30 .* million"), ("swa", dict(wiring="mag"), "memory"), ("atlas", dict(n_layer=True), "--n-layer .* int, not True"),
    ("atlas", dict(features="elementwise", degree=57), "at most 56"), ("atlas", dict(head_dim=1, degree=57), "at most 56"),
    ("atlas", dict(window="8"), "--window .* int"),
    ("atlas", dict(n_layer=2.0), "--n-layer .* int, not 2.0"), ("atlas", dict(muon="no"), "bool"), ("atlas", dict(max_norm=None), "--max-norm .* float"),
    ("atlas", dict(max_norm=1e39), "--max-norm .* float32"), ("atlas", dict(max_norm=1e-40), "--max-norm .* too small"),
    ("atlas", dict(max_norm=3e38), "--max-norm .* too large .* 0 is for no bound")])       # by which a CPU that flushes 1e-38 makes every W zero
def test_bad_configurations(preset, more, says):
    """Each mistake is one clear line that names the flag or the choices."""
    with pytest.raises(ValueError, match=says) as caught:
        models.configure(preset, **more)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", ["atlas", "linear", "dot"])
def test_a_layer_in_half_precision_is_refused(preset, dtype):
    """What is to be done instead, not a product of two precisions somewhere inside."""
    layer = models.Memory(models.configure(preset, n_embd=16, n_head=2, head_dim=8)).to(dtype)
    with pytest.raises(ValueError, match=f"not {dtype}; take torch.autocast"):
        layer(torch.randn(1, 3, 16, dtype=dtype))


@pytest.mark.parametrize("size", models.SIZES)
@pytest.mark.parametrize("preset", models.PRESETS)
def test_a_size_by_name_is_train_pys(preset, size):
    """A preset's own features (none of titans, exp of dot) stand against a size's: else a wide titans is silently another model."""
    config = models.configure(preset, size)
    assert config == train.settings(dict(model=preset, size=size))[1]
    assert config.features == models.PRESETS[preset].get("features", config.features)
    assert models.configure(preset, size, n_layer=3, features="none").features == "none"
    with pytest.raises(ValueError, match="unknown size '340M'; .* 340m"):
        models.configure(preset, "340M")


OTHER = dict(                                                 # of each field of Config another value than `small` has
    vocab_size=12, n_layer=2, n_head=4, n_embd=32, head_dim=2, persistent=3, memory="gated", expansion=3, memory_norm=True, loss="huber", window=2,
    chunk=8, momentum=False, muon=False, muon_every=1, ns_steps=3, ns_coefficients="cubic", memory_dtype="bfloat16", ns_dtype="bfloat16",
    ns_straight_through=True, features="elementwise", degree=3, sketch_dim=3, keep=False, forget="zero", conv=False, gate="uniform", max_step=1.0,
    max_norm=0.01, attn_window=2, mlp_hidden=32, dropout=0.5, tie=True)


@pytest.mark.parametrize("preset, more", [
    *((preset, {}) for preset in ("transformer", "linear", "titans", "omeganet", "atlas", "atlas++", "dot")),
    ("atlas", dict(features="sketch", sketch_dim=5)), ("atlas", dict(features="none")),
    ("atlas", dict(wiring="mag")), ("deltanet", dict(wiring="mac")), ("omeganet", dict(wiring="mal", memory_branch=False))])
def test_every_field_acts_or_is_idle(preset, more):
    """A flag that does nothing makes an ablation compare a model with itself; one that does something must not be called idle. Both ways, by
    the bits of loss and gradient."""
    def result(config):
        """The loss, then the gradient, when it is asked for."""
        torch.manual_seed(0)
        model = models.LM(config)
        for p in model.parameters():                          # where M0 is zero, some settings have nothing to act on
            p.data += 0.3 * torch.randn(p.shape)
        x = torch.arange(14)[None] % 11                       # three chunks of 4 and a token
        loss = model.loss(x[:, :-1], x[:, 1:])
        yield loss
        yield from torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    def same(a, b):
        return all(x is y or x is not None and y is not None and torch.equal(x, y) for x, y in zip_longest(a, b, fillvalue=torch.empty(0)))

    config, nothing = small(preset, n_layer=1, **more).config, set()
    before = list(result(config))
    assert same(before, result(config))
    for f in fields(config):
        if f.name in ("mixer", "wiring", "memory_branch") or (config.features, f.name) in (("sketch", "degree"), ("exp", "muon")):
            continue                                          # which make other models; which would be refused
        value = OTHER[f.name]
        if value == getattr(config, f.name):
            value = not value if f.type is bool else value + 1 if f.type is int else f.default
        if same(before, result(replace(config, **{f.name: value}))):
            nothing.add(f.name)
    assert nothing == models.idle(config) - {"muon"} if config.features == "exp" else nothing == models.idle(config)


def test_flags_that_do_nothing_are_named(text, tmp_path, capsys):
    """An ablation over --window with the wrong --model would say that the window does not matter."""
    run = ["--steps", 1, "--model", "transformer", "--no-keep", "--attn-window", 5]
    assert go(text, tmp_path / "a", *run) == 0
    assert "warning: nothing in this run depends on --chunk, --window, --muon-every, --no-keep\n" in capsys.readouterr().out
    assert go(text, tmp_path / "b", "--steps", 1) == 0 and "warning" not in capsys.readouterr().out
    assert eval.main(["--task", "mqar", "--steps", "1", "--model", "omeganet", "--ns-steps", "3", "--device", "cpu"]) == 0
    assert "warning: nothing in this run depends on --ns-steps\n" in capsys.readouterr().out
    assert go(text, tmp_path / "c", "--steps", 1, "--optimizer", "adamw", "--muon-lr", 1, "--bpe-size", 300, "--muon-every", 9) == 0
    said = capsys.readouterr().out
    assert "depends on --muon-lr, --bpe-size\n" in said and "warning: --muon-every 9 acts as 8" in said and "muon_every 8," in " ".join(said.split())
    assert go(text, tmp_path / "d", "--steps", 1, "--optimizer", "muon", "--muon-lr", 1e-3, "--tokenizer", "bpe", "--bpe-size", 300) == 0
    assert "warning" not in capsys.readouterr().out
    assert eval.main(["--task", "mqar", "--steps", "1", "--chunk", "24", "--muon-every", "32", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "acts as 24" in said and "so never in a sequence of --seq-len 24" in said and "muon_every 24 " in said
    assert eval.main("--task online --pairs 9 8 --chunk 8 --muon-every 8 --batch-size 1 --head-dim 2 --device cpu".split()) == 0
    assert "so never in a sequence of --pairs 8;" in capsys.readouterr().out


def test_odd_but_right_configurations():
    """A whole number does for a float; attention has no features, so no heads too large for them, and none that do not go with the rest."""
    assert models.Config(max_norm=3, dropout=0).max_norm == 3
    for features in (dict(features="exp"), dict(features="sketch", degree=3), dict(degree=57)):
        assert models.configure("transformer", **features).mixer == "attention"
    assert models.configure("transformer", n_embd=4096, n_head=1).head_dim == 4096
    phi = Features("monomial", 2, degree=56)             # the largest: none of its numbers is 0 or infinite
    assert phi.scale.min() >= torch.finfo(torch.float32).tiny and phi(torch.randn(9, 2)).isfinite().all()


def test_bad_arguments():
    """A traceback from somewhere inside, or an answer."""
    prompt, x = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    for how in (dict(temperature=-1.0), dict(top_k=-1), dict(top_p=-0.5)):
        with pytest.raises(ValueError, match="at least 0"):
            next(small("atlas").generate(prompt, 1, **how))
    with pytest.raises(ValueError, match="gated"):
        memory.apply("cubic", [x] * 3, x, x)
    with pytest.raises(ValueError, match=r"tokens\[None\]"):
        next(small("atlas").generate(prompt[0], 1))
    with pytest.raises(ValueError, match="not of the shape"):
        small("atlas").loss(torch.zeros(2, 3, dtype=torch.long), torch.zeros(3, 2, dtype=torch.long))
    with_S, without = (models.Memory(models.configure("omeganet", n_embd=16, n_head=2, momentum=m)) for m in (True, False))
    x = torch.randn(2, 5, 16)
    for a, b in ((with_S, without), (without, with_S)):       # S_0 was W_0, and no word
        with pytest.raises(ValueError, match="momentum"):
            a(x, b(x)[1])
    rule, phi, q, one = Rule("linear", chunk=2), Features("none", 3), randn(1, 1, 2, 3), torch.ones(1, 1, 2)
    for fn, with_S in product((omega_ref, omega_chunk, omega), (True, False)):
        gates = Gates(one, one, None if with_S else one, one[..., None])
        with pytest.raises(ValueError, match="momentum"):
            fn(rule, phi, q, q, q, gates, start(rule, phi, [randn(1, 3, 3)], 1, momentum=with_S))
    with pytest.raises(ValueError, match="sketch_dim of features is at least 1, not 0"):
        Features("sketch", 8)
    with pytest.raises(ValueError, match="degree"):
        Features("monomial", 3, 0)


@pytest.mark.parametrize("preset, wiring", [("transformer", "lmm"), ("atlas", "lmm"), *(("atlas", w) for w in models.WIRINGS[1:])])
def test_a_layer_reads_batches(preset, wiring):
    """One sequence without its batch, or the state of other ones: riddles from torch, about sizes of tensors that nobody has made."""
    layer, x = small(preset, wiring=wiring).blocks[0].mixer, torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        layer(x[0])
    with pytest.raises(ValueError, match="state is of 2 sequences, the batch of 1"):
        layer(x[:1], layer(x)[1])


@pytest.mark.parametrize("more", [{}, dict(wiring="mag"), dict(wiring="mal"), dict(wiring="mac")], ids=str)
def test_a_layer_in_another_model_learns(more):
    """Memory(config) without LM.init had M0 and convolution all zero: it answered 0, its gradient was 1e12 and more, or NaN."""
    config = models.Config(n_embd=16, n_head=2, head_dim=8, chunk=4, muon_every=4, window=2, attn_window=4, **more)
    layer, x, target = (models.Wiring if more else models.Memory)(config), torch.randn(4, 12, 16), torch.randn(4, 12, 16)
    optimizer, losses = torch.optim.Adam(layer.parameters(), 2e-2), []
    for _ in range(12):
        loss = F.mse_loss(layer(x)[0], target)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        assert all(0 < p.grad.norm() < 10 for p in layer.parameters())
        optimizer.step()
    assert 0.01 < layer(x)[0].std() < 10 and losses[-1] < 0.9 * losses[0]


def test_a_layer_draws_numbers_of_its_own():
    """The seed stays where it was, so the next numbers of the program are those that the layer began with, unless it draws others."""
    layer = models.Memory(models.configure("omeganet", n_embd=16, n_head=2, head_dim=8))
    n = layer.conv.numel()
    assert not torch.allclose(torch.randn(n), layer.conv.detach().flatten() * models.Memory.conv_width ** 0.5)


@pytest.mark.parametrize("wiring", models.WIRINGS)
def test_a_model_draws_what_it_always_drew(wiring, monkeypatch):
    """The starting values of layers used apart must not move the seed of the model around them: every figure of the README would go."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append([*small("atlas", wiring=wiring).parameters(), torch.rand(3)])
        monkeypatch.setattr(models, "init_apart", lambda layer: None)
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


@pytest.mark.parametrize("preset", ["atlas", "omeganet", "transformer"])
def test_tokens_of_a_wrong_shape(preset):
    """No tokens to begin with, no batch dimension, no sequences: an IndexError or a division by zero, somewhere inside."""
    model, no = small(preset), torch.zeros(1, 0, dtype=torch.long)
    for prompt in (no, no.T):
        with pytest.raises(ValueError, match="at least one"):
            next(model.generate(prompt, 3))
    for tokens in (no[0], torch.zeros(5, dtype=torch.long), torch.zeros(1, 2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"\(B, T\), not"):
            model(tokens)
    for state in (None, models.select(model(torch.zeros(1, 3, dtype=torch.long))[1], [])):
        with nullcontext() if preset == "transformer" else pytest.raises(ValueError, match="at least one sequence"):
            assert model(torch.zeros(0, 5, dtype=torch.long), state)[0].shape == (0, 5, 11)


def test_a_state_of_another_model():
    """An AttributeError, or an unpacking, somewhere inside; a state of fewer layers said: zip() argument 2 is shorter than argument 1."""
    tokens = torch.randint(11, (2, 6))
    models_ = dict(memory=small("omeganet", n_layer=2), attention=small("transformer", n_layer=2), wiring=small("omeganet", n_layer=2, wiring="mal"))
    states = {name: model(tokens)[1] for name, model in models_.items()}
    for name, model in models_.items():
        for other, state in states.items():
            with nullcontext() if name == other else pytest.raises(ValueError, match="carries on from .*State, not .*State: the state is of another"):
                model(tokens, state)
        with pytest.raises(ValueError, match="the state is of 1 layers, the model has 2"):
            model(tokens, states[name][:1])
        with pytest.raises(ValueError, match="the state is of 2 sequences, the batch of 1"):
            model(tokens[:1], states[name])
    with pytest.raises(ValueError, match="carries on from MemoryState, not State"):              # a layer's state, where one for each layer is due
        models_["memory"](tokens, states["memory"][0])


@pytest.mark.parametrize("other, more, message", [
    ("omeganet", dict(memory="linear"), "another memory"), ("omeganet", dict(memory="gated"), "another memory"), ("omeganet", dict(expansion=3), "another memory"),
    ("omeganet", dict(n_head=4, head_dim=2), "another memory"), ("omeganet", dict(features="none"), "another memory"),
    ("omeganet", dict(chunk=2), "ends 2 tokens into a chunk"), ("omeganet", dict(window=2), "holds 2 tokens for its window"),
    ("dot", dict(features="none"), "another memory"), ("dot", dict(expansion=3), "another memory"), ("dot", {}, ""),
    ("dot", dict(memory="gated"), "another memory"),
    ("omeganet", dict(chunk=8, window=5), ""), ("transformer", dict(n_head=4, head_dim=2), "2 heads of 4, this attention has 4 of 2"),
    ("transformer", {}, "")])
def test_a_state_of_another_layer(other, more, message):
    """An MLP's state in a linear memory: its first matrix was read, in silence; one six tokens into a chunk, where chunks have three: the fast path
    and the reference then differ by 0.2; else sizes that do not match, deep inside."""
    shape = dict(n_head=2, head_dim=4, chunk=4, window=3)
    tokens = torch.randint(11, (2, 6))
    _, state = small(other, **shape)(tokens)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        small(other, **{**shape, **more})(tokens, state)


@every_preset
def test_projections_may_be_wrapped(preset):
    """LoRA has no out_features, and a quantized layer's weight is a method: both were asked for."""
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model, tokens = shaken(small(preset)), torch.randint(11, (2, 9))
    want, _ = model(tokens)
    for name, linear in [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]:
        model.set_submodule(name, Wrapped(linear))
    a, state = model(tokens[:, :4])
    close(torch.cat([a, model(tokens[:, 4:], state)[0]], 1), want)


def test_export():
    """As the README says: of a shape, without gradients."""
    layer = models.Memory(models.configure("omeganet", n_embd=8, n_head=2, head_dim=4, chunk=4)).requires_grad_(False)
    x, y = torch.randn(2, 2, 6, 8)
    close(torch.export.export(layer, (x,)).module()(y)[0], layer(y)[0], 1e-5)


PAPER_TABLE = {               # decay, deep, phi, 2nd order, window; then loss, norm inside, momentum
    "transformer": "--xx-", "swa": "--xxx", "linear": "----- dot", "deltanet": "----- l2", "titans": "xx--- l2 momentum",
    "dla": "xxx-- dot norm", "swla": "x---x dot", "deeptransformer": "-xx-- dot norm", "swdt": "-xx-x dot norm", "dot": "-xx-x l2",
    "omeganet": "xxx-x l2", "atlas": "xxxxx l2 momentum", "atlas++": "xxxxx l2 momentum"}


def test_models_py_prints_the_models_of_the_paper(monkeypatch, capsys):
    """A preset that has lost a column of Table 1 (or its loss, norm, momentum) trains as another model; `python models.py` shows which."""
    assert PAPER_TABLE.keys() == models.PRESETS.keys()
    for name, told in PAPER_TABLE.items():
        c = models.Config(**models.PRESETS[name])
        marks = "".join("-x"[p] for p in models.properties(c))
        more = [c.loss] + ["norm"] * c.memory_norm + ["momentum"] * c.momentum if c.mixer == "memory" else []
        assert " ".join([marks, *more]) == told, name
    for linear in (dict(features="elementwise"), dict(degree=1)):
        assert not models.properties(models.configure("atlas", **linear))[2]     # no product of two numbers: Prop 2 (test_capacity)
    monkeypatch.setattr(models, "PRESETS", {name: models.PRESETS[name] for name in ("transformer", "linear")})
    models.main()
    _, *said = (line.split() for line in capsys.readouterr().out.splitlines())
    cache = 2 * 2 * 256 * 192 * 4                             # k and v of two blocks, 256 tokens, float32
    memory = 2 * 4 * (8 * 16 * 16 + 3 * 3 * 128)              # W of 8 heads and three inputs of the convolution, at any length
    assert said == [["transformer", *"--xx-", "910,752", f"{cache:,}", f"{4 * cache:,}"], ["linear", *"-----", "878,192", f"{memory:,}", f"{memory:,}"]]
    assert "no arguments, not --model" in refused(capsys, models.main, "--model")
    assert models.main(["--help"]) == 0 and "Lists the models" in capsys.readouterr().out
    written = []                                              # of a second write `| head` would be gone: a traceback
    monkeypatch.setattr(sys, "stdout", argparse.Namespace(write=written.append))
    models.main()
    assert len([*filter(None, written)]) == 1 and written[0].endswith("\n")


@pytest.mark.parametrize("cls", [models.Config, train.TrainConfig])
def test_every_choice_and_every_least_number_is_checked(cls):
    """A field that has lost its choices takes any name for the last of them, and one without its least number fails somewhere inside."""
    free = {"persistent", "attn_window", "mlp_hidden", "head_dim", "stop_after", "seed", "warmup", "eval_windows",
            "sample_tokens", "threads"}
    text = {"data", "out", "init"}
    for f in fields(cls):
        if f.type is str and f.name not in text:
            with pytest.raises(ValueError, match=f"{train.flag(f.name)} must be one of .*, not 'none of them'"):
                cls(**{f.name: "none of them"})
        if f.type in (int, float):
            least = 256 if f.name == "bpe_size" else int(f.type is int and f.name not in free)
            with pytest.raises(ValueError, match=f"{train.flag(f.name)} must be at least {least} "):
                cls(**{f.name: f.type(least - 1)})


def test_retrieve_keeps_float32_inside_of_autocast(monkeypatch):
    """What a wiring reads with fast weights would be bfloat16 where what the layer itself reads is float32."""
    model, inside, apply = small("atlas", wiring="mac"), [], memory.apply
    monkeypatch.setattr(memory, "apply", lambda *a: inside.append(torch.is_autocast_enabled("cpu")) or apply(*a))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(11, (2, 7)))
    assert inside and not any(inside)


def test_tie_is_one_matrix():
    """--tie that only scales the embedding has twice the parameters, and two matrices that drift apart."""
    tied, apart = small("atlas", tie=True), small("atlas")
    assert tied.head.weight is tied.embed.weight and tied.num_params() == apart.num_params() - apart.embed.weight.numel()
    assert tied.embed.weight.std() < 0.03 and apart.embed.weight.std() > 0.8
    seen, x = [], torch.randint(11, (2, 5))
    tied.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tied(x)
    close(seen[0], 4 * tied.embed.weight[x], 1e-6)            # sqrt(n_embd): the blocks see tokens of the size that they have without --tie


@pytest.mark.parametrize("preset, blocks", [("atlas", []), ("transformer", ["Block", "Block"])])
def test_compile_memory_compiles_chunk_steps(preset, blocks, monkeypatch):
    """A --compile that leaves the chunk steps eager is slow, and nothing else would tell."""
    model, seen = small(preset), []
    monkeypatch.setattr(omega_module, "compile_chunks", lambda device, **how: seen.append(("chunks", how)))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: seen.append((type(self).__name__, how)))
    model.compile_memory(mode="x")
    assert seen == [("chunks", dict(mode="x"))] + [(name, dict(mode="x", dynamic=False)) for name in blocks]


def test_what_the_compiler_is_told(monkeypatch):
    """To write less and compute it again, memories and blocks of attention alike; not without a GPU, where that is no gain, not where another
    compiler is asked for, which knows nothing of it, nor where a torch to come has dropped the name, which it would refuse. On a CPU it is not given
    `mixing`, whose recurrence is faster as it is."""
    plain_again(monkeypatch)
    told, again, parts = [], dict(options=omega_module.AGAIN), len(omega_module.COMPILED)
    monkeypatch.setattr(torch, "compile", lambda f, **options: told.append(options) or f)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: told.append(options))
    for is_there, device, options in ((True, "cpu", {}), (False, "cpu", {}), (True, "cuda", again)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
        model = small("transformer")                          # what counts is where it is
        del model.embed
        model.embed = argparse.Namespace(weight=argparse.Namespace(device=torch.device(device)))
        model.compile_memory()
        assert told == [dict(dynamic=False) | options] * (parts - (device == "cpu") + 2)
        told.clear()
    for is_there, options in ((True, again), (False, {})):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
        omega_module.compile_chunks()
        assert told == [dict(dynamic=False) | options] * (parts - (not is_there))
        told.clear()
    assert len(again["options"]) == 2
    for given in (dict(backend="eager"), dict(mode="max-autotune"), dict(options={})):
        assert omega_module.compiler("cuda", given) == given | dict(dynamic=False)
    monkeypatch.setattr(torch._inductor, "list_options", list)
    assert omega_module.compiler("cuda", {}) == dict(options={}, dynamic=False)


@pytest.mark.parametrize("preset", ["titans", "atlas", "transformer"])
@torch.no_grad()
def test_state_bytes_counts_each_tensor_once(preset):
    """What models.py, bench.py and eval.py report: at a chunk boundary the anchor is W itself; within a chunk it is not."""
    model = small(preset)
    for T in (8, 9):
        state = model(torch.randint(11, (1, T)))[1]
        each = {id(t): t.nbytes for t in tensors(state) if not isinstance(t, torch.nn.Parameter)}
        assert models.state_bytes(state) == sum(each.values())


def test_linear_memories_start_at_zero():
    """A linear memory that starts from noise is not linear attention: the M0 of the deep ones alone is drawn."""
    for preset in models.PRESETS:
        if models.PRESETS[preset].get("mixer") != "attention":
            M0 = small(preset).blocks[0].mixer.M0
            assert all(bool(w.any()) == (small(preset).config.memory != "linear") for w in M0)


def test_convolution_of_what_autocast_leaves():
    """Its numbers and its answer are float32, whatever x comes in."""
    layer = small("atlas").blocks[0].mixer
    x, before = torch.randn(2, 9, layer.conv.shape[1]).bfloat16(), torch.zeros(2, 3, layer.conv.shape[1])
    y = layer.short_conv(x, before)[0]
    assert y.dtype == torch.float32 and torch.equal(y, layer.short_conv(x.float(), before)[0])


@pytest.mark.parametrize("tie", [False, True])
def test_starting_values_by_hand(tie):
    """Matrices keep the size of what they multiply; what is added to the residual stream shrinks with its depth, and a tied embedding is a head."""
    model = models.build("atlas", vocab_size=200, n_layer=8, n_embd=64, n_head=4, tie=tie)
    for name, m in model.named_modules():
        if isinstance(m, torch.nn.Linear) and not (name == "head" and tie):
            std = 0.02 if name.endswith(".gates") else m.in_features ** -0.5 / (4 if name.endswith(".out") else 1)
            assert m.weight.std().item() == pytest.approx(std, rel=0.1), name
    assert model.embed.weight.std().item() == pytest.approx(0.02 if tie else 1.0, rel=0.1)


def test_starting_values_of_memories():
    """Hidden units, as a vector, are about twice as long as phi(k), whatever the memory; what they add to k is small, unless it is normalised."""
    for preset, last in (("atlas", 0.25), ("atlas++", 0.25), ("dla", 1.0)):
        layer = models.build(preset, n_layer=1, n_head=4, expansion=4).blocks[0].mixer
        for W, times in zip(reversed(layer.M0), (last, 2.0, 2.0)):
            assert W.std().item() == pytest.approx(times * 64 ** -0.5, rel=0.05)                                   # 4 x 16 hidden units
        assert layer.conv.std().item() == pytest.approx(0.5, rel=0.1)            # as random filters, the best start of those tried
        keep, step, momentum, *gate = layer.gates.bias.view(4, -1).T.sigmoid()
        assert keep.tolist() == pytest.approx([1 / (1 + math.exp(-b)) for b in (1, 8 / 3, 13 / 3, 6)])             # heads remember for different spans
        assert models.build(preset, n_layer=1, n_head=1).blocks[0].mixer.gates.bias[0] == 3.5                      # one, for one in between
        close(step, torch.full((4,), 1 / (1 + math.e)), 1e-6)
        assert all((a == 0.5).all() for a in (momentum, *gate))


# ---- the ball of choice 22

@pytest.mark.parametrize("kind, muon_every", [("mlp", 0), ("gated", 0), ("mlp", 4), ("mlp", 1)], ids=["omeganet", "gated", "atlas", "pairs"])
def test_ball_is_the_reference(kind, muon_every):
    """A bound that only the fast form applies, or in the middle of a chunk, makes outputs depend on how the text is cut."""
    phi = make_phi("monomial", 4, 2)
    M0 = [0.5 * randn(2, *s) for s in memory.shapes(kind, phi.out_dim, 5, 4)]
    q, k, v = (unit(2, 2, 21, 4) for _ in range(3))
    momentum, window = (None, 2) if muon_every == 1 else (0.9 * rand(2, 2, 21), 3)
    rule = Rule(kind, "l2", window, 8, muon_every, forget="start", ball=0.4)
    gates = Gates(0.5 + 0.5 * rand(2, 2, 21), 0.3 * rand(2, 2, 21), momentum, rand(2, 2, 21, window))
    inputs = [a.requires_grad_() for a in (q, k, v, *gates, *M0) if a is not None]
    (y, state), (y_ref, ref) = (f(rule, phi, q, k, v, gates, start(rule, phi, M0, 2, momentum is not None)) for f in (omega, omega_ref))
    close(y, y_ref)
    for a, b in zip(state.anchor + state.W, ref.anchor + ref.W):
        close(a, b)
    up, ends = randn(*y.shape), [randn(*w.shape) for w in ref.W]
    grads = [torch.autograd.grad([y, *W], inputs, [up, *ends]) for y, W in ((y, state.W), (y_ref, ref.W))]
    for a, b in zip(*grads, strict=True):
        close(a, b)
    assert max(torch.linalg.matrix_norm(w).max().item() for w in state.anchor) == pytest.approx(0.4)      # it was at work


@pytest.mark.parametrize("preset", ["omeganet", "atlas"])   # with Newton-Schulz and without: a line of code for each
def test_no_text_makes_the_memory_run_away(preset):
    """Gates that learned to write as fast as they can: a repeated token overshoots further with every chunk, up to NaN."""
    model = models.build(preset, vocab_size=20, n_layer=1, n_embd=32, n_head=4, max_step=8.0)
    for parameter in model.blocks[0].mixer.M0:
        parameter.data *= 3
    model.blocks[0].mixer.gates.bias.data.view(4, -1)[:, 1] = 5.0
    tokens, state = torch.arange(20)[:, None].expand(20, 128), None
    with torch.no_grad():
        for _ in range(12):
            logits, state = model(tokens, state)
    assert logits.isfinite().all() and all(t.isfinite().all() for t in tensors(state))


# in wirings, whose code knows no preset, one memory of each kind: with Newton-Schulz, without, with a state that grows, and none
WIRED = re.compile("(atlas|titans|dot|no memory)-(mag|mal|mac)")


@pytest.mark.parametrize("preset, more", [m for name, m in MODELS.items() if name in models.PRESETS or WIRED.fullmatch(name)])
def test_every_model_trains(preset, more):
    """18 steps on text: no NaN, and a loss that falls, for every preset, and every wiring of four."""
    window = {"attn_window": 8} if models.PRESETS[preset].get("attn_window") != 0 else {}
    model = small(preset, **{**more, **window, "n_layer": 1, "vocab_size": 128, "chunk": 8, "muon_every": 8})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, fused=True)
    T = 6 if "wiring" in more else 16                         # two chunks, or one, with the persistent tokens: wirings are slow
    ids, losses = torch.tensor(list(b"the quick brown fox jumps over the lazy dog, and then again: " * 9)), []
    for step in range(18):
        x = torch.stack([ids[i: i + T + 1] for i in torch.randint(len(ids) - T - 1, (2,)).tolist()])
        loss = model.loss(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and sum(losses[-5:]) < 0.8 * sum(losses[:5])


# ----------------------------------------------------------------------------------------------------------------
# data.py

def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("the network\nis blocked")
    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


def fake_shakespeare(monkeypatch, body, served):
    """Let `body` be tiny Shakespeare and `served` what the net gives."""
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(data, "SHAKESPEARE_BYTES", len(body))
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(served))


def fake_gpt2(monkeypatch):
    """A small encoding under GPT-2's name: 256 bytes, two merges, one special token."""
    ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257}
    bpe = tiktoken.Encoding("gpt2", pat_str=data.GPT2_PATTERN, mergeable_ranks=ranks,
                            special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: bpe)


def user_error(call, *args, **kwargs):
    """The message of the UserError that the call must raise: one line."""
    with pytest.raises(machine.UserError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- text

def test_shakespeare_found(tmp_path, monkeypatch):
    """A file that is there must be used without asking the network, and only when it is the right one."""
    fake_shakespeare(monkeypatch, b"To be", b"")
    no_network(monkeypatch)
    (tmp_path / "shakespeare.txt").write_bytes(b"To be")
    assert data.load_text("shakespeare", tmp_path) == ("To be", "shakespeare")
    (tmp_path / "shakespeare.txt").write_bytes(b"To bee")
    message = user_error(data.load_text, "shakespeare", tmp_path)
    assert "sha256" in message and "delete" in message and str(tmp_path / "shakespeare.txt") in message
    assert (tmp_path / "shakespeare.txt").read_bytes() == b"To bee"         # nothing overwritten


def test_shakespeare_download(tmp_path, monkeypatch):
    """A download must be kept whole, under its final name only, and not be repeated."""
    fake_shakespeare(monkeypatch, b"To be", b"To be")
    assert data.load_text("shakespeare", tmp_path / "new") == ("To be", "shakespeare")
    assert os.listdir(tmp_path / "new") == ["shakespeare.txt"]
    no_network(monkeypatch)
    monkeypatch.setattr(urllib.request, "urlopen", None)
    assert data.load_text("shakespeare", tmp_path / "new") == ("To be", "shakespeare")


def test_shakespeare_folder_not_writable(tmp_path, monkeypatch, capsys):
    """A folder that cannot be written (here a file in its place) must not stop a run that has its text."""
    fake_shakespeare(monkeypatch, b"To be", b"To be")
    (tmp_path / "file").write_text("")
    assert data.load_text("shakespeare", tmp_path / "file") == ("To be", "shakespeare")
    assert "could not keep" in capsys.readouterr().err


@pytest.mark.parametrize("served", [b"<html>log in to this hotel</html>", b"To bee or not", b""])
def test_shakespeare_wrong_download(tmp_path, monkeypatch, capsys, served):
    """nanoGPT would train on a 404 page or on a half download; we must neither use nor keep it."""
    fake_shakespeare(monkeypatch, b"To be", served)
    assert data.load_text("shakespeare", tmp_path)[1] == "pydoc"
    assert os.listdir(tmp_path) == [] and "sha256" in capsys.readouterr().err


def test_shakespeare_cut_off_while_writing(tmp_path, monkeypatch):
    """A crash between writing and renaming must leave no half file under the final name, and no rubbish."""
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        with data.replacing(tmp_path / "shakespeare.txt") as temporary:
            temporary.write_bytes(b"To be")
    assert os.listdir(tmp_path) == []


def test_shakespeare_offline(tmp_path, monkeypatch, capsys):
    """Without network the first command must still work, in seconds, and say in one line what it used instead."""
    no_network(monkeypatch)
    start = time.time()
    text, used = data.load_text("shakespeare", tmp_path)
    out, err = capsys.readouterr()
    assert used == "pydoc" and text == data.load_text("pydoc")[0] and len(text) > 100_000
    assert out == "" and err.count("\n") == 1 and "pydoc" in err and "shakespeare.txt" in err
    assert time.time() - start < 2 and os.listdir(tmp_path) == []


def test_shakespeare_request_is_safe(monkeypatch):
    """The request must be https and have a timeout, the answer a size cap: no hang, no full memory."""
    asked = {}

    class Endless(io.BytesIO):
        def read(self, n=-1):
            asked["n"] = n
            return b"x" * n

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: asked.update(url=url, t=timeout) or Endless())
    with pytest.raises(ValueError):
        data._download()
    assert asked["url"].startswith("https://") and 0 < asked["t"] <= 10 and 1_115_394 < asked["n"] < 2_000_000


def test_shakespeare_is_known_by_its_hash():
    """A slip in the hash refuses the real text and trains on pydoc; all other tests put a hash of their own in its place."""
    assert data.SHAKESPEARE_SHA256 == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def test_data_folder_is_beside_the_code(tmp_path, monkeypatch, capsys):
    """From another working directory the same data/ must be found (not ./data)."""
    fake_shakespeare(monkeypatch, b"To be", b"To be")
    monkeypatch.setattr(data, "__file__", str(tmp_path / "repository" / "data.py"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data.load_text("shakespeare")
    assert (tmp_path / "repository" / "data" / "shakespeare.txt").read_bytes() == b"To be"
    assert os.listdir(tmp_path / "elsewhere") == []


def test_pydoc_is_deterministic(monkeypatch):
    """The fall-back text must not depend on the order of a dict: a resumed run would continue on another text."""
    text, used = data.load_text("pydoc")
    assert used == "pydoc" and len(text) > 100_000
    monkeypatch.setattr(topics, "topics", dict(reversed(topics.topics.items())))
    assert data.load_text("pydoc")[0] == text


def test_text_file(tmp_path):
    """A byte order mark must not become a character of the vocabulary; everything else must come back as it is."""
    text = "a\r\n\tb\x00 \u00e9 \u4e2d \U0001f600 <|endoftext|>" + "x" * 100_000
    path = tmp_path / "with space \u00e9.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert data.load_text(str(path)) == (text, str(path))
    assert data.load_text(path)[0] == text                                  # a Path serves too


def test_text_folder(tmp_path):
    """All .txt files of all levels, ordered by path and not by the file system, and nothing else."""
    for name, body in [("b.txt", "B"), ("a/z.txt", "AZ"), ("c.txt", "\ufeffC"), ("notes.md", "no"), ("B.txt", "0")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    (tmp_path / "d.txt").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "e.txt")
    assert data.load_text(str(tmp_path)) == ("0\nAZ\nB\nC", str(tmp_path))


def test_text_mistakes(tmp_path):
    """Each of these must be one line that names the fault and the file; a FIFO must not hang."""
    def message(body=None, name="f.txt"):
        if body is not None:
            (tmp_path / name).write_bytes(body)
        return user_error(data.load_text, str(tmp_path / name))

    assert "no such file" in message(name="missing.txt") and "--data takes" in message(name="missing.txt")
    assert "no such file" in message(name="f/../g") and "no such file" in user_error(data.load_text, "")
    for nothing in (b"", b"\n\n", b"\xef\xbb\xbf"):
        assert "empty" in message(nothing) and "f.txt" in message(nothing)
    assert "no such file" in message(name="f.txt/below")
    assert "byte 0xe9 at offset 3" in message(b"caf\xe9!") and "latin1" in message(b"caf\xe9!")
    assert "offset 6" in message(b"\xef\xbb\xbfabc\xff")                    # counted in the file, its mark included
    for encoding in ("utf-16", "utf-32"):                                    # a loss on letters with NULs between them is flattering
        assert "offset 0" in message("abc".encode(encoding)) and f"iconv -f {encoding}" in message("abc".encode(encoding))
    for binary in (gzip.compress(b"abc" * 99), "abc".encode("utf-16-le"), b"\0" * 99):
        assert "unpack it" in message(binary) and "iconv" not in message(binary)
    (tmp_path / "f.txt").write_bytes(b"abc" * 99 + b"\0")
    assert data.load_text(str(tmp_path / "f.txt"))[0].endswith("c\0")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        assert "regular file" in message(name="fifo") and "regular file" in user_error(data.load_text, os.devnull)
    (tmp_path / "folder").mkdir()
    assert ".txt" in message(name="folder")
    (tmp_path / "folder" / "a.txt").write_text("")
    assert "empty" in message(name="folder")
    (tmp_path / "folder" / "b.txt").write_bytes(b"\xff")
    assert "b.txt" in message(name="folder")                                # the file, not only the folder
    assert "cannot read" in message(name="x" * 300)


def test_a_text_that_was_cut_within_a_character(tmp_path):
    """`head -c` of a text that is no English: read as latin1, as other bytes that are not UTF-8 may be meant, all its letters would be lost."""
    path = tmp_path / "my text.txt"
    path.write_bytes(("\u00e9t\u00e9\n" * 3).encode()[:-2])
    said = user_error(data.load_text, path)
    assert "latin1" not in said and f"truncate -s 15 '{path}'" in said
    os.truncate(path, 15)
    assert data.load_text(path)[0] == "\u00e9t\u00e9\n\u00e9t\u00e9\n\u00e9t"


@pytest.mark.parametrize("end", ["\u00e9".encode()[:1], b"\xff\n"])
def test_where_a_long_text_is_not_utf8(end, tmp_path):
    """An offset that is counted from where the piece begins: `truncate -s` would leave next to nothing of a long text."""
    path = tmp_path / "long.txt"
    path.write_bytes(b"five\n" * 3 + b"t" + end)
    said = user_error(data.load_text, path)
    assert "offset 16" in said and user_error(lambda: list(data._pieces(path, 5))) == said


def test_linked_folders_are_read_and_each_once(tmp_path):
    """A part of the text that is left out without a word, or a link to a folder above, which has no end."""
    (tmp_path / "books" / "more").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "books" / "more" / "A.TXT").write_text("A")
    (tmp_path / "elsewhere" / "b.txt").write_text("B")
    for link, to in (("books/there", "elsewhere"), ("books/more/up", "books"), ("books/twice", "elsewhere")):
        try:
            (tmp_path / link).symlink_to(tmp_path / to)
        except OSError:
            pytest.skip("no symbolic links here")
    assert sorted(data.load_text(tmp_path / "books")[0]) == ["\n", "A", "B"]
    (tmp_path / "books" / "c.txt").symlink_to(tmp_path / "gone.txt")             # nor one that leads nowhere
    assert "c.txt" in user_error(data.load_text, tmp_path / "books")


def test_text_unreadable(tmp_path, monkeypatch):
    """A file without permission is a message, not a traceback (simulated: root may read everything)."""
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")
    (tmp_path / "f.txt").write_text("x")
    monkeypatch.setattr(data, "open", refuse, raising=False)
    assert "Permission denied" in user_error(data.load_text, str(tmp_path / "f.txt"))


def test_a_token_file_is_no_text(tmp_path):
    """Ids of one byte are UTF-8 with a NUL between each two: it would be trained on without a word."""
    token_file(tmp_path / "train.bin", [104, 105] * 50)
    assert str(tmp_path) + "\n" in user_error(data.read, str(tmp_path / "train.bin")) + "\n"
    (tmp_path / "texts.bin").mkdir()
    (tmp_path / "texts.bin" / "a.txt").write_text("a folder may be named as it likes")
    assert "as it likes" in data.read(tmp_path / "texts.bin").text


# ---- tokenizers

TEXT = "To be, or not to be:\n\u00e9\u4e2d\U0001f600 the <|endoftext|> the end.  the\n"


@pytest.mark.parametrize("kind", data.TOKENIZERS)
def test_tokenizer_round_trip(monkeypatch, kind):
    """Text to ids and back must be exact, through a checkpoint too, offline: a sample needs its own vocabulary."""
    fake_gpt2(monkeypatch)
    t = data.make_tokenizer(kind, TEXT)
    ids = t.encode(TEXT)
    assert ids.dtype == np.int64 and 0 <= ids.min() and ids.max() < t.vocab_size
    assert t.kind == kind and t.vocab_size == {"char": len(set(TEXT)), "byte": 256, "bpe": 263, "gpt2": 259}[kind]
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    file = io.BytesIO()
    torch.save(t.state(), file)
    file.seek(0)
    again = data.tokenizer_from_state(torch.load(file, weights_only=True))
    assert again.kind == kind and again.state() == t.state() and np.array_equal(again.encode(TEXT), ids)
    for form in (ids, ids.tolist(), torch.tensor(ids), ids.astype(np.uint16)):
        assert t.decode(form) == again.decode(form) == TEXT
    monkeypatch.setattr(data, "BLOCK", 4)                     # a text of many blocks
    assert t.bytes_in(ids) == len(TEXT.encode()) and t.bytes_in([]) == 0
    assert t.decode([]) == "" and len(t.encode("")) == 0 and t.encode("").dtype == np.int64


@pytest.mark.parametrize("kind", data.TOKENIZERS)
def test_tokenizer_stream(monkeypatch, kind):
    """Printed token by token, a character of several bytes must come out whole, not as U+FFFD, and only once."""
    fake_gpt2(monkeypatch)
    t = data.make_tokenizer(kind, TEXT)
    feed, pieces = t.stream(), []
    for i in torch.tensor(t.encode(TEXT)):
        pieces.append(feed(i))
    assert "".join(pieces) + feed(final=True) == TEXT and max(map(len, pieces)) <= 4
    if kind == "byte":
        assert [feed(b) for b in "\u00e9".encode()] == ["", "\u00e9"]
        other = t.stream()
        assert feed([0xC3]) == "" and other(0x41) == "A"                    # two streams do not share what they hold
        assert feed(final=True) == "\ufffd" and feed(0x41) == "A"
        assert t.decode([0xC3, 0x41]) == "\ufffdA"


def test_char_vocabulary():
    """Ids must follow the sorted characters, as nanoGPT's, and not the order of a hash."""
    t = data.make_tokenizer("char", "hello\n")
    assert t.encode("\nehlo").tolist() == [0, 1, 2, 3, 4]


def test_char_outside_vocabulary():
    """An unknown character must be named; below, between and far beyond the known ones none may pass for another."""
    t = data.make_tokenizer("char", "bd")
    for bad in ("a", "c", "e", "\u4e2d", "\U0010ffff", "\udcff"):
        message = user_error(t.encode, "bd" + bad)
        assert repr(bad) in message and "--tokenizer byte" in message
    message = user_error(t.encode, "zyzxy")
    assert "'z' 'y' 'x'" in message and "'d'" not in message and "2 characters" in message
    message = user_error(t.encode, "acefghijklmnop")
    assert "'k' 'l' and 4 more" in message and "'m'" not in message         # a wrong file is not printed whole


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_half_surrogate(monkeypatch, kind):
    """A prompt from a command line in another encoding holds half surrogates: a message, no traceback, no U+FFFD."""
    fake_gpt2(monkeypatch)
    assert "character 1" in user_error(data.make_tokenizer(kind, TEXT).encode, "a\udce9")


def test_ids_out_of_range():
    """-1 must not decode to the last character, nor a padded vocabulary's id to anything."""
    t = data.make_tokenizer("char", "abc")
    for ids in ([-1], [0, 3]):
        for call in (t.decode, t.bytes_in, t.stream()):
            with pytest.raises(ValueError):
                call(ids)


def test_char_encode_is_fast():
    """A megabyte must not be encoded character by character (a dict lookup each takes four times as long)."""
    text = "".join(map(chr, range(32, 97))) * 17_000
    t = data.make_tokenizer("char", text)
    ids, taken = {c: i for i, c in enumerate(sorted(set(text)))}, []

    def seconds(work):
        start = time.process_time()
        work(text)
        return time.process_time() - start
    for _ in range(3):                                        # in turn, so that whatever slows this machine slows both
        taken.append((seconds(t.encode), seconds(lambda text: [ids[c] for c in text])))
    mine, lookups = map(min, zip(*taken))
    assert mine < lookups / 2


def test_gpt2_is_gpt2s(monkeypatch, capsys):
    """Ids must be tiktoken's own, whole words merged; the download is announced on stderr before it starts."""
    fake_gpt2(monkeypatch)
    real = tiktoken.get_encoding("gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: capsys.readouterr().err.count("\n") == 1 and real)
    t = data.make_tokenizer("gpt2", "")
    assert t.encode(TEXT).tolist() == real.encode_ordinary(TEXT)
    assert t.encode("the").tolist() == [257] and t.decode([258]) == "<|endoftext|>"


def test_gpt2_cannot_be_had(monkeypatch):
    """Without network, with a broken cache, or without tiktoken: the remedy in one line, no silent change of kind."""
    no_network(monkeypatch)
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    tiktoken.registry.ENCODINGS.pop("gpt2", None)
    message = user_error(data.make_tokenizer, "gpt2", TEXT)
    assert "TIKTOKEN_CACHE_DIR" in message and "--tokenizer byte" in message   # all that data.py has besides
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(ValueError("Hash mismatch")))
    assert "TIKTOKEN_CACHE_DIR" in user_error(data.make_tokenizer, "gpt2", TEXT)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for kind in ("bpe", "gpt2"):
        assert "pip install tiktoken" in user_error(data.make_tokenizer, kind, TEXT)


@pytest.mark.parametrize("letters, size", [("ab", 300), ("a", 270), ("abc  \u00e9", 330), ("abcde ,.", 262)])
def test_bpe_merges_what_occurs_most(letters, size):
    """Counts that are kept up to date must be those of counting anew before each merge, and tiktoken must cut the text in the same places.

    Texts of few letters overlap themselves: aaa has two neighbours that make aa, and one merge.
    """
    import regex
    random = np.random.default_rng(0)
    for length in (3, 30, 300):
        text = "".join(random.choice(list(letters), length))
        words = [[bytes([b]) for b in word.encode()] for word in regex.findall(data.GPT2_PATTERN, text)]
        tokens = list(data.EVERY_BYTE)
        while len(tokens) < size:
            counts = Counter(a + b for word in words for a, b in zip(word, word[1:]))
            n, most = min(((-n, token) for token, n in counts.items()), default=(0, b""))
            if n > -2:
                break
            tokens.append(most)
            for word in words:
                for i in range(len(word)):                    # grows shorter as it goes
                    if b"".join(word[i: i + 2]) == most:
                        word[i: i + 2] = [most]
        assert data.train_bpe(text, size) == tokens
        tokenizer = data.Tokenizer("bpe", tokens)
        assert [tokenizer.tokens[i] for i in tokenizer.encode(text)] == [token for word in words for token in word]


def test_words_are_those_of_gpt2():
    """A slip in the regular expression cuts other words than GPT-2 learned; all other tests cut by it on both sides."""
    import regex
    from tiktoken_ext import openai_public
    of_gpt2 = getattr(openai_public, "r50k_pat_str", data.GPT2_PATTERN)          # older versions of tiktoken do not tell
    assert regex.findall(data.GPT2_PATTERN, "don't 12345 we'll  be, \u00e9  ") == ["don", "'t", " 12345", " we", "'ll", " ", " be", ",", " \u00e9", "  "]
    assert regex.findall(data.GPT2_PATTERN, "he'd I'm it's they're I've") == [
        "he", "'d", " I", "'m", " it", "'s", " they", "'re", " I", "'ve"]
    parts = ["'", *"stmdlrve", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", " ", "  ", "\n", "7", "\u0663", "\u00e9", ".", "_"]
    text = "".join(np.random.default_rng(0).choice(parts, 9000))
    assert regex.findall(data.GPT2_PATTERN, text) == regex.findall(of_gpt2, text)


def test_bpe_learns_from_what_is_trained_on():
    """Merges of the last tenth, which validates, would tell what is in it; and of no more tokens than asked for."""
    text = "over and over " * 90 + "zebra " * 20 + "zebra" * 4
    tokenizer = data.make_tokenizer("bpe", text, 261)
    assert tokenizer.vocab_size == 261 and max(map(len, tokenizer.tokens)) > 2
    tokens = data.make_tokenizer("bpe", text, 9999).tokens
    assert b" over" in tokens and not [token for token in tokens if b"ze" in token]


def test_tokenizer_mistakes():
    """An unknown kind lists the kinds; a text without characters makes no vocabulary."""
    assert "char, byte, bpe, gpt2" in user_error(data.make_tokenizer, "words", TEXT)
    for kind in ("char", "bpe"):
        assert "no text" in user_error(data.make_tokenizer, kind, "")


@pytest.mark.parametrize("state", [
    None, [], {}, {"kind": "char"}, {"kind": "word", "tokens": [b"a"]}, {"kind": "char", "tokens": []},
    {"kind": "char", "tokens": None}, {"kind": "char", "tokens": ["a"]}, {"kind": "char", "tokens": [b"a", b"a"]},
    {"kind": "char", "tokens": [b"ab"]}, {"kind": "char", "tokens": [b"\xff"]}, {"kind": "char", "tokens": [b""]},
    {"kind": ["char"], "tokens": [b"a"]},
    {"kind": "byte", "tokens": [b"a"]}, {"kind": "byte", "tokens": [bytes([b]) for b in range(255, -1, -1)]},
    {"kind": "bpe", "tokens": data.EVERY_BYTE[1:] + [b"\0"]},
    {"kind": "gpt2", "tokens": []},
    {"kind": "gpt2", "tokens": [b"a", b"b", b"<|endoftext|>"]}, {"kind": "gpt2", "tokens": data.EVERY_BYTE}])
def test_damaged_tokenizer_state(state):
    """A hostile checkpoint must be refused at once; without all bytes tiktoken would panic past `except Exception`."""
    assert "damaged" in user_error(data.tokenizer_from_state, state)


# ---- token files

def token_file(path, ids, header=None):
    path.parent.mkdir(exist_ok=True)
    head = np.zeros(256 if header else 0, dtype="<i4")
    head[:3 if header else 0] = header or []
    path.write_bytes(head.tobytes() + np.array(ids, dtype="<u2").tobytes())


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_token_files_are_the_text(tmp_path, monkeypatch, kind):
    """However small the pieces, files made of a text must be its ids, cut in the same place."""
    fake_gpt2(monkeypatch)
    lines = [f"\ufeffthe {i}th line, \u00e9\u4e2d of many\r\n" for i in range(40)]
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("".join(lines), encoding="utf-8", newline="")
    (tmp_path / "texts" / "deep" / "b.txt").write_text("and more", encoding="utf-8", newline="")
    text, pieces = data.load_text(str(tmp_path / "texts"))[0], data._pieces
    assert len(list(pieces(tmp_path / "texts", 50))) > 10 and "".join(pieces(tmp_path / "texts", 50)) == text
    monkeypatch.setattr(data, "_pieces", lambda name: pieces(name, 50))
    data.make_token_files(tmp_path / "texts", kind, tmp_path / "made")
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["train.bin", "val.bin"]
    tokenizer, corpus = data.make_tokenizer(kind, ""), data.read(tmp_path / "made")
    for made, ids in zip(corpus.splits(tokenizer, 1), data.split(tokenizer.encode(text)), strict=True):
        assert len(made) == len(ids) and made[:].dtype == np.int64 and made[:].tolist() == ids.tolist()
        assert tokenizer.bytes_a_token(made) == tokenizer.bytes_a_token(ids) > 0
    for name in ("train.bin", "val.bin"):                     # one of them is enough
        token_file(tmp_path / name[:-4] / name, [1])
        assert f"{name} is already there" in user_error(data.make_token_files, tmp_path / "texts", kind, tmp_path / name[:-4])
        assert [p.stat().st_size for p in (tmp_path / name[:-4]).iterdir()] == [2]
    (tmp_path / "b.txt").write_bytes(b"fifteen letters\n" * 9 + b"\xff")
    assert "byte 0xff at offset 144" in user_error(data.make_token_files, tmp_path / "b.txt", kind, tmp_path / "new")
    (tmp_path / "b.txt").write_bytes(b"short")
    assert "too short" in user_error(data.make_token_files, tmp_path / "b.txt", kind, tmp_path / "new")
    assert not any((tmp_path / "new").iterdir())              # nothing half done is left


@pytest.mark.skipif(os.name == "nt", reason="there such a signal ends a program at once")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_making_token_files(number, text, tmp_path, monkeypatch, capsys):
    """A scheduler's SIGTERM left a folder of half made files, as large as the text."""
    monkeypatch.setattr(shutil, "copyfileobj", lambda *_: os.kill(os.getpid(), number))          # while it cuts what it has encoded
    monkeypatch.setattr(sys, "argv", ["data.py", "--data", str(text), "--tokenizer", "byte", "--out", str(tmp_path / "out")])
    # SIGINT is ignored in all that is run by a script's "pytest &"; SIGTERM, where data.py takes no care of it, must not end pytest
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(HERE / "data.py"), run_name="__main__")
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    said = capsys.readouterr().err
    assert end.value.code == 128 + number and ("error: stopped" in said) == (number == signal.SIGINT)
    assert not any((tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    """A corpus without one of its parts, and no word about it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "a.txt").write_text("some text")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("in"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)
    monkeypatch.setattr(os, "scandir", scandir)
    assert "Permission denied" in (said := user_error(data.load_text, tmp_path)) and str(tmp_path / "in") in said


def test_the_end_of_a_text_is_no_text(monkeypatch):
    """Bits a byte of GPT-2's token files, which have an <|endoftext|> between any two documents, counted with its 13 letters."""
    fake_gpt2(monkeypatch)
    tokenizer = data.make_tokenizer("gpt2", "")
    assert tokenizer.bytes_in(np.array([257, 258, 97])) == 4 and tokenizer.decode([258]) == "<|endoftext|>"


def test_a_text_that_tiktoken_cannot_encode(capfd):
    """Its panic is no Exception: a traceback, after a million spaces in a row."""
    assert "--tokenizer byte" in user_error(data.make_tokenizer("bpe", "a b").encode, " " * 1_000_000)


def test_several_token_files_are_one(tmp_path):
    """nanoGPT's files and llm.c's, in the order of their names; every slice, also of the border between two."""
    token_file(tmp_path / "x_train_2.bin", [7, 8, 9])
    token_file(tmp_path / "x_train_1.bin", [1, 2, 3, 4], header=[20240520, 1, 4])
    token_file(tmp_path / "x_train_3_of_retrieval.bin", [65535])
    token_file(tmp_path / "x_val_1.bin", [5, 6])
    token_file(tmp_path / "weights.bin", [0])                 # neither
    corpus, ids = data.read(str(tmp_path)), [1, 2, 3, 4, 7, 8, 9, 65535]
    train_ids, val_ids = corpus.tokens
    for a, b in [(a, b) for a in range(-9, 10) for b in (None, *range(-9, 10))]:
        assert train_ids[a:b].tolist() == ids[a:b] and train_ids[a:b].dtype == np.int64
    assert len(train_ids) == 8 and val_ids[:].tolist() == [5, 6] and corpus.used == str(tmp_path)
    assert corpus.sha256 == data.read(tmp_path).sha256
    token_file(tmp_path / "x_train_2.bin", [7, 0, 9])
    assert corpus.sha256 != data.read(tmp_path).sha256


@pytest.mark.parametrize("at", [0, 5, 8])
def test_a_token_file_is_checked_to_its_end(at, tmp_path, monkeypatch):
    """An id that the vocabulary lacks, in a block that is left out: an index out of range, days into a run."""
    ids = [300 if i == at else i for i in range(9)]
    for name in ("train.bin", "val.bin"):
        token_file(tmp_path / name, ids)
    digest = data.read(tmp_path).sha256
    monkeypatch.setattr(data, "BLOCK", 4)
    corpus = data.read(tmp_path)
    assert "holds id 300" in user_error(corpus.splits, data.make_tokenizer("byte", ""), 1) and corpus.sha256 == digest


def test_token_files_for_a_vocabulary_of_another_text(tmp_path):
    """Ids of bytes, read as some text's letters or byte pairs: figures that mean nothing."""
    token_file(tmp_path / "train.bin", [0, 1, 0, 1] * 300)    # every other one is 0, but these have 2 bytes
    token_file(tmp_path / "val.bin", [0] * 1200)
    corpus = data.read(tmp_path)
    for kind in ("char", "bpe"):
        assert f"--tokenizer {kind}" in user_error(corpus.splits, data.make_tokenizer(kind, "some text, some text"), 4)
    assert len(corpus.splits(data.make_tokenizer("byte", ""), 4)[0]) == 1200


def test_token_files_of_a_vocabulary_of_their_own(tmp_path):
    """nanoGPT's shakespeare_char: ids of 65 characters, taken for bytes, train a model of control characters, and nobody says so."""
    for name in ("train.bin", "val.bin"):
        token_file(tmp_path / name, [i % 65 for i in range(500)])
    data.read(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(b"")
    said = user_error(data.read, tmp_path)
    assert "meta.pkl" in said and str(tmp_path / "input.txt") in said


@pytest.mark.parametrize("ids, header, said", [
    ([], None, "has 0 bytes"), ([], [20240520, 1, 0], "has 1024 bytes, so it is empty"), ([1, 2], [20240520, 1, 3], "with 3 ids"),
    ([1, 2], [20240520, 1, 1], "with 1 ids"),
    ([1, 2], [20240520, 2, 2], "version 2"), ([1, 256], None, "holds id 256, but a byte vocabulary has 256 tokens"),
    ([1, 2], [20240801, 7, 1], "Llama 3"), ([7, 0, 0, 0, 8, 0] * 200, None, "had 4 bytes")])
def test_token_files_that_are_none(tmp_path, ids, header, said):
    """What is no token file, or one of another vocabulary, must be named before training on noise, or days into it."""
    token_file(tmp_path / "train.bin", [1, 2, 3])
    token_file(tmp_path / "val.bin", ids, header)
    message = user_error(lambda: data.read(tmp_path).splits(data.Tokenizer("byte", data.EVERY_BYTE), 1))
    assert said in message and "val.bin" in message
    token_file(tmp_path / "val.bin", [], [20240520, 1, 2**30])
    os.truncate(tmp_path / "val.bin", 1024 + 2**31)           # that many zeros, which take no room: of 2^31 bytes, as many as fit 32 bits
    assert len(data._token_file(tmp_path / "val.bin")) == 2**30
    (tmp_path / "val.bin").write_bytes(b"odd")
    assert "has 3 bytes" in user_error(data.read, tmp_path)
    for train_ids, val_ids in (([1, 2, 3], [1]), ([1], [1, 2, 3])):
        token_file(tmp_path / "train.bin", train_ids)
        token_file(tmp_path / "val.bin", val_ids)
        said = user_error(lambda: data.read(tmp_path).splits(data.Tokenizer("byte", data.EVERY_BYTE), 1))
        assert f"{len(train_ids)} tokens to train and {len(val_ids)} to validate" in said


def test_training_on_token_files_is_training_on_the_text(text, tmp_path, capsys):
    """The same losses to the bit, from data.py's own flags to eval.py; and what the files cannot tell is asked for."""
    made, a, b = (tmp_path / name for name in ("made files", "a", "b"))
    assert data.main(["--data", str(text), "--tokenizer", "byte", "--out", str(made)]) == 0
    assert f"--data '{made}' --tokenizer byte" in capsys.readouterr().err
    for source, out in ((text, a), (made, b)):
        assert go(source, out, "--tokenizer", "byte", "--steps", 4) == 0
    assert rows(a, "loss", "val") == rows(b, "loss", "val")
    capsys.readouterr()
    said = []
    for out in (a, b):
        assert eval.main(["--ckpt", str(out), "--device", "cpu", "--stream", "2048", "--windows", "4"]) == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if "nats/token  " in line or " - " in line])
    assert said[0] == said[1] and len(said[0]) > 3
    assert "--tokenizer gpt2 or byte" in refused(capsys, train.main, "--data", made, "--out", tmp_path / "c")
    assert go(made, tmp_path / "c", "--tokenizer", "byte", "--steps", 4, "--stop-after", 2) == 0
    assert train.main(["--resume", "--stop-after", "3", "--out", str(tmp_path / "c"), "--device", "cpu"]) == 0
    token_file(made / "train.bin", [1] * 3000)
    capsys.readouterr()
    assert "give the same text" in refused(capsys, train.main, "--resume", "--out", tmp_path / "c", "--device", "cpu")
    assert "already there" in refused(capsys, data.main, "--data", text, "--tokenizer", "byte", "--out", made)
    assert "invalid choice" in refused(capsys, data.main, "--data", text, "--tokenizer", "char")


def test_token_files_on_a_full_disk(text, monkeypatch, capsys):
    """numpy's own words, `20000 requested and 4096 written`, name no file and no remedy."""
    def full(*_):
        raise OSError("20000 requested and 4096 written")
    monkeypatch.setattr(data, "make_token_files", full)
    said = refused(capsys, data.main, "--data", text, "--out", "somewhere", code=1)
    assert "somewhere" in said and "disk full" in said and "make room" in said


# ---- batches

def test_split():
    """90 % and 10 % by tokens, nothing lost, nothing shared: nanoGPT's figures on tiny Shakespeare."""
    train, val = data.split(np.arange(1_115_394))
    assert len(train) == 1_003_854 and len(val) == 111_540 and val[0] == 1_003_854


def test_too_short():
    """A short text must name the length it needs, and that length must do."""
    for n, T in [(10, 1), (500, 64), (640, 64), (0, 1)]:
        message = user_error(data.split, np.zeros(n, dtype=int), T)
        assert f"it has {n} tokens" in message and f"windows of {T} need {10 * T + 1}" in message
    assert "--seq-len 49 at most" in user_error(data.split, np.zeros(500), 64) and data.split(np.zeros(500), 49)
    assert "at most" not in user_error(data.split, np.zeros(5), 64)
    train, val = data.split(np.zeros(641, dtype=int), 64)
    assert data.batch(val, 0, 0, 2, 64)[0].shape == (2, 64) and data.batch(train, 0, 0, 2, 64)


def test_batch():
    """y must be x one token later; every start from the first to the last possible one must occur, and no other."""
    x, y = data.batch(np.arange(100, 120, dtype=np.uint8), seed=1, step=0, batch_size=2000, seq_len=16)
    assert x.shape == y.shape == (2000, 16) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(y, x + 1)
    assert x[:, 0].unique().tolist() == [100, 101, 102, 103] and y.max() == 119
    assert x[:, 0].bincount()[100:].min() > 400                              # and evenly: 500 each, sigma 19


def test_an_epoch_has_every_window_once():
    """With repetition a tenth of the text is still unseen after two epochs; and no two epochs may cut it alike."""
    starts = torch.cat([data.batch(np.arange(1000), 0, step, 4, 16)[0][:, 0] for step in range(61)])     # 244 windows: 4 epochs of 61
    offsets = [int(part.min()) for part in starts.split(61)]
    for part, offset in zip(starts.split(61), offsets):
        assert part.sort()[0].tolist() == list(range(offset, offset + 61 * 16, 16)) and not torch.equal(part, part.sort()[0])
    assert len(set(offsets)) > 1 and max(offsets) < 1000 - 61 * 16


def test_batch_is_a_function_of_seed_and_step():
    """Exact resume: the batch of a step may not depend on earlier batches or on torch's or numpy's global state."""
    ids = torch.arange(10_000)
    batches = {key: data.batch(ids, *key, 4, 8)[0] for key in [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0), (2**63, 7)]}
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state()
    for key, x in batches.items():
        assert torch.equal(x, data.batch(ids, *key, 4, 8)[0])
    assert torch.equal(before, torch.get_rng_state())                        # dropout's draws stay where they were
    assert len({tuple(x[:, 0].tolist()) for x in batches.values()}) == len(batches)


@pytest.mark.parametrize("n, T, B", [(100, 8, 3), (97, 8, 4), (98, 8, 4), (9, 8, 4), (8, 8, 4), (2, 8, 4), (3, 1, 1)])
def test_windows_cover_everything_once(n, T, B):
    """Each token but the first must be a target exactly once; a dropped tail would flatter or spoil the full loss."""
    seen = []
    for x, y in data.windows(np.arange(n, dtype=np.uint8), T, B):
        assert x.shape == y.shape and x.shape[0] <= B and x.shape[1] <= T and torch.equal(y, x + 1) and x.numel()
        assert x.dtype == y.dtype == torch.int64
        seen += y.reshape(-1).tolist()
    assert seen == list(range(1, n))
    shapes = [x.shape for x, _ in data.windows(torch.arange(n), T, B)]
    assert all(s[1] == T for s in shapes[:-1]) and sum(s[1] < T for s in shapes) == ((n - 1) % T > 0)


# ---- synthetic tasks

def test_mqar_is_as_drawn():
    """The example in the docstring must be what the call written above it gives."""
    drawn = data.mqar.__doc__
    rows = [list(map(int, re.search(rf"{name} +((-?\d+ *)+)\n", drawn)[1].split())) for name in ("tokens", "targets")]
    call = re.search(r"mqar\(1, n_pairs=(\d+), n_queries=(\d+), vocab=(\d+), seq_len=(\d+), .*seed\((\d+)\)", drawn)
    *sizes, seed = map(int, call.groups())
    made = data.mqar(1, *sizes, generator=torch.Generator().manual_seed(seed))
    assert [t.tolist() for t in made] == [[row] for row in rows]


@pytest.mark.parametrize("sizes", [(4, 4, 16, 16), (8, 3, 64, 41), (1, 1, 4, 4), (16, 16, 8192, 256)])
def test_mqar_is_answerable(sizes):
    """A lookup table must answer all, and only the drawn number: a key drawn twice would make two answers right."""
    n_pairs, n_queries, vocab, T = sizes
    tokens, targets = data.mqar(32, *sizes, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (32, T) and tokens.dtype == targets.dtype == torch.int64
    for row, answers in zip(tokens.tolist(), targets.tolist()):
        keys, values = row[0:2 * n_pairs:2], row[1:2 * n_pairs:2]
        table = dict(zip(keys, values))
        assert len(table) == len(set(values)) == n_pairs
        assert all(1 <= k < vocab // 2 for k in keys) and all(vocab // 2 <= v < vocab for v in values)
        assert answers[:2 * n_pairs] == [-100] * (2 * n_pairs)
        rest = list(zip(row, answers))[2 * n_pairs:]
        asked = [key for key, _ in rest if key]
        assert all(a == table[key] if key else a == -100 for key, a in rest)
        assert len(asked) == len(set(asked)) == n_queries
        assert all(key == 0 for key, _ in rest[1::2])


def test_mqar_distribution():
    """Which key, value and pair must be uniform, the gap a power law of exponent -0.99: else it is another task."""
    tokens, targets = data.mqar(20_000, 2, 1, 10, 14, torch.Generator().manual_seed(0))
    for column, low, high in [(0, 1, 5), (2, 1, 5), (1, 5, 10), (3, 5, 10)]:
        share = tokens[:, column].bincount(minlength=10)[low:high] / 20_000
        assert (share - 1 / (high - low)).abs().max() < 0.015
    place = (targets >= 0).int().argmax(1)
    assert abs((tokens.gather(1, place[:, None])[:, 0] == tokens[:, 0]).double().mean() - 0.5) < 0.015
    share = place.bincount(minlength=14)[4::2] / 20_000
    law = torch.arange(1, 6) ** -0.99
    assert (share - law / law.sum()).abs().max() < 0.015


def test_mqar_of_an_odd_vocabulary():
    """The last of its values is one as the others."""
    tokens, _ = data.mqar(64, 2, 1, 7, 6, torch.Generator().manual_seed(0))
    assert set(tokens[:, 1:4:2].flatten().tolist()) == {3, 4, 5, 6}


def test_mqar_seed():
    """Same generator state, same rows; the global generator must stay out of it."""
    one, two, three = (data.mqar(4, 4, 2, 32, 16, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, three)


@pytest.mark.parametrize("sizes", [(4, 5, 32, 64), (4, 4, 8, 64), (4, 4, 32, 15), (0, 0, 8, 8), (4, 0, 32, 64)])
def test_mqar_sizes_that_do_not_fit(sizes):
    """Sizes without room must be named, not end in a scatter or topk error."""
    message = user_error(data.mqar, 2, *sizes, torch.Generator())
    assert f"n_pairs {sizes[0]}" in message and f"seq_len {sizes[3]}" in message


# ----------------------------------------------------------------------------------------------------------------
# train.py and sample.py

HERE = Path(train.__file__).resolve().parent
NET = "--n-layer 1 --n-embd 16 --n-head 2 --head-dim 8 --chunk 8 --window 3 --muon-every 8".split()
torch.set_num_threads(1)
RUN = ("--device cpu --dtype float32 --threads 1 --seq-len 16 --batch-size 2 --sample-tokens 5 --log-every 3 --eval-every 4 "
       "--eval-windows 4").split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of 3000 characters in which some words return."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    picks = torch.randint(8, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    words = "to be or not that is the question".split()
    path.write_text("".join(words[i] + (" " if i else "\n") for i in picks)[:3000], newline="\n")
    return path


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """The folder of a finished run of 12 steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert go(text, out, "--steps", 12) == 0
    return out


@pytest.fixture
def copy(trained, tmp_path):
    """The same, to break."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def go(text, out, *flags):
    return train.main([*NET, *RUN, "--data", str(text), "--out", str(out), *map(str, flags)])


def refused(capsys, main, *argv, code=2):
    """Run main; it must end with this exit code and exactly one line on stderr, which is returned."""
    try:
        got = main([str(a) for a in argv])
    except SystemExit as stop:
        got = stop.code
    err = capsys.readouterr().err
    assert got == code and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, (got, err)
    return err


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def same(a, b):
    """Bit equality of nested dicts, lists and tensors."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def rows(out, *columns):
    return [tuple(row[c] for c in columns) for row in csv.DictReader((out / "log.csv").open())]


# ---- settings and flags

def test_flags_do_not_collide():
    """A field in both dataclasses would be one flag for two settings; a --no-x would hide behind the switch of x."""
    a, b = ({f.name for f in fields(cls)} for cls in (train.TrainConfig, models.Config))
    assert not a & b
    assert not {"no_" + name for name in a | b} & (a | b)
    assert train.FREE <= a and set(train.TRAIN_SIZES) <= set(models.SIZES)


def test_every_field_is_a_flag_and_help_lists_it_with_its_default(capsys):
    """A store_true flag with default True cannot be turned off; a field without a flag cannot be set; a default that no run has misleads."""
    text = {}
    for main in (eval.main, train.main):
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert stop.value.code == 0
        text[main] = capsys.readouterr().out
    tc, config = train.settings(dict(size="tiny"))
    recall = models.Config(**{**models.PRESETS["atlas"], **eval.SMALL})          # of eval.py --task mqar
    for main, values in ((train.main, {**asdict(tc), **asdict(config), "size": "auto"}), (eval.main, asdict(recall))):
        shown = dict(re.findall(r"^  --([\w-]+).*?\[(.*?)\]$", text[main], re.M | re.S))
        for name, value in values.items():
            assert name in train.NO_FLAG or shown[name.replace("_", "-")] == str(value), name
    text = text[train.main]
    for cls in (train.TrainConfig, models.Config):
        for f in fields(cls):
            if f.name in train.NO_FLAG:
                assert train.flag(f.name) + " " not in text, f.name
                continue
            assert train.flag(f.name) + " " in text.replace(",", " ").replace("\n", " ") and f.metadata["help"], f.name
            if type(f.default) is bool:
                name = train.flag(f.name)
                assert train.parse([name]) == {f.name: True} and train.parse(["--no" + name[1:]]) == {f.name: False}
            else:
                assert train.parse([train.flag(f.name), str(f.default)]) == {f.name: f.default}


def test_precedence_is_defaults_then_size_then_model_then_flags(monkeypatch):
    """A preset that wins over a flag, or a size that undoes what makes the model, trains another network than was asked for."""
    monkeypatch.setitem(models.PRESETS, "omeganet", dict(n_layer=3, window=5, chunk=7))
    monkeypatch.setitem(models.SIZES, "baby", dict(n_layer=2, window=6))
    monkeypatch.setitem(train.TRAIN_SIZES, "baby", dict(steps=77, lr=0.5))
    tc, config = train.settings(train.parse("--model omeganet --size baby --window 9 --lr 0.25".split()))
    assert (config.chunk, config.n_layer, config.window, config.n_embd) == (7, 3, 9, models.Config.n_embd)
    assert (tc.steps, tc.lr, tc.seq_len) == (77, 0.25, train.TrainConfig.seq_len)
    assert train.settings({"device": "cpu"})[0].size == "tiny"


def test_every_size_and_preset_resolves(monkeypatch):
    """A size or preset with a misspelt or invalid field would fail only for the one who asks for it; a new size needs no TRAIN_SIZES."""
    for size in models.SIZES:
        for model in models.PRESETS:
            tc, config = train.settings(dict(size=size, model=model))
            assert tc.size == size and tc.warmup <= tc.steps
    monkeypatch.delitem(train.TRAIN_SIZES, "1.3b")
    assert train.settings(dict(size="1.3b"))[0].seq_len == train.TrainConfig.seq_len


def test_default_warmup_fits_a_short_run_and_an_explicit_one_is_checked(capsys):
    """`--steps 10` with a default warmup of 20 would never reach its learning rate."""
    assert train.settings(dict(steps=10))[0].warmup == 1
    assert "--warmup" in refused(capsys, train.main, "--steps", 10, "--warmup", 11)


@pytest.mark.parametrize("argv, word", [
    ("--widnow 3", "--widnow"), ("--win 3", "--win"), ("--model atals", "atals"), ("--steps 1.5", "1.5"),
    ("--steps 0", "--steps"), ("--lr nan", "--lr"), ("--lr inf", "--lr"), ("--batch-size -1", "--batch-size"),
    ("stray", "stray"), ("--n-embd 9 --n-head 4 --head-dim 0", "n-embd"), ("--window 0", "window"),
    ("--muon maybe", "maybe"), ("--decay-frac 2", "--decay-frac"), ("--vocab-size 5", "--vocab-size")])
def test_wrong_flags_are_refused(argv, word, capsys, tmp_path, monkeypatch):
    """A typo that is ignored trains the wrong model for hours; a wrong value must not leave a folder behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "read", None)
    assert word in refused(capsys, train.main, *argv.split())
    assert not list(tmp_path.iterdir())


def test_a_torch_that_is_too_old(monkeypatch):
    """What pip left from another project: without the line a traceback of a module that has no attribute."""
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(SystemExit, match=f"^torch {re.escape(torch.__version__)} is too old.*pip install"):
        runpy.run_path(str(HERE / "train.py"))


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_device_that_is_not_there(name, capsys, trained, tmp_path, monkeypatch):
    """torch's own words for it are an AssertionError with a traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert f"--device {name}" in refused(capsys, train.main, "--device", name, "--out", tmp_path / "x")
    assert f"--device {name}" in refused(capsys, sample.main, "--device", name, "--ckpt", trained)
    assert machine.pick_device("auto").type == "cpu" and not (tmp_path / "x").exists()


def test_mps_has_to_be_asked_for(text, tmp_path, capsys, monkeypatch):
    """Some versions of macOS and torch leave parts of products unwritten there, and a block that is computed twice has two dropouts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert machine.pick_device("auto").type == "cpu" and machine.pick_device("mps").type == "mps"
    assert "--dropout 0" in refused(capsys, train.main, "--device", "mps", "--remat", "--dropout", "0.1", "--data", text, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    monkeypatch.setattr(train, "prepare_data", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):                    # without dropout it is not refused
        train.launch(dict(device="mps", remat=True))


# ---- data and output folder

def test_bad_texts_are_refused_and_nothing_is_overwritten(copy, tmp_path, capsys):
    """A short, empty, missing or non-UTF-8 text must fail before the earlier run in the folder is touched."""
    before = contents(copy)
    cases = {"short": b"to be or not", "empty": b"", "latin1": "caf\xe9".encode("latin1") * 100}
    for name, raw in cases.items():
        (tmp_path / name).write_bytes(raw)
    said = {name: refused(capsys, train.main, *NET, *RUN, "--out", copy, "--data", tmp_path / name)
            for name in (*cases, "missing")}
    assert "windows of 16" in said["short"] and str(tmp_path / "short") in said["short"] and "not UTF-8" in said["latin1"] and len(set(said.values())) == 4
    assert contents(copy) == before


def test_out_that_cannot_be_written_fails_before_the_first_step(text, tmp_path, capsys, monkeypatch):
    """Otherwise the run dies at its first checkpoint, with the work of all steps before it."""
    monkeypatch.setattr(train, "train_step", None)
    (tmp_path / "file").write_text("keep me")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "--out" in refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", out)
    assert (tmp_path / "file").read_text() == "keep me"

    def readonly(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(train.tempfile, "TemporaryFile", readonly)         # chmod would not stop root
    assert "Permission denied" in refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", tmp_path / "ro")


def test_a_new_run_moves_an_earlier_one_aside(text, copy, capsys):
    """The second `python train.py` must work, and must not destroy the result of the first."""
    before = contents(copy)
    for n in (1, 2):
        assert go(text, copy, "--steps", 1, "--seed", n) == 0
    assert f"it is now in {copy / 'old-2'}" in capsys.readouterr().out
    assert contents(copy / "old-1") == before
    assert [train.load_checkpoint(folder)["train"]["seed"] for folder in (copy / "old-2", copy)] == [1, 2]


# ---- the run

def test_a_run_prints_and_logs_what_it_did(text, tmp_path, capsys):
    """The figures a reader compares: what was trained on what, progress, whole-split loss, and a log that agrees."""
    assert go(text, tmp_path / "out", "--steps", 8) == 0
    said = capsys.readouterr().out
    ckpt = train.load_checkpoint(tmp_path / "out" / "ckpt.pt")
    model, tokenizer = train.rebuild(ckpt)
    val = data.split(tokenizer.encode(text.read_text()), 16)[1]
    full = train.evaluate(train.rebuild(train.load_checkpoint(tmp_path / "out"))[0], val, 16, 2)
    last = said.strip().splitlines()[-1]
    assert str(text) in last and f"{full:.4f} nats" in last and f"{full / math.log(2):.4f} bits" in last
    for part in (f"{model.num_params():,} parameters", "n_embd 16", "batch_size 2", "tokens/s", "eta", "grad norm",
                 "peak memory", f"{full / math.log(2):.4f} bits/token  {full / math.log(2):.4f} bits/byte", "memory carried, 2 streams", "cpu",
                 "float32", ", not compiled, torch", f": {3000 - len(val):,} tokens to train, {len(val):,} to validate"):
        assert part in said, part
    assert [r[0] for r in rows(tmp_path / "out", "step")] == ["1", "3", "4", "6", "8"]
    assert [bool(r[0]) for r in rows(tmp_path / "out", "val")] == [False, False, True, False, True]
    assert [f"{float(r[0]):.4f}" for r in rows(tmp_path / "out", "val") if r[0]] == re.findall(r"  val (\d\S+)", said)         # rounded, not cut
    assert min(float(r[0]) for r in rows(tmp_path / "out", "val") if r[0]) == pytest.approx(ckpt["best"], abs=1e-6)
    assert ckpt["data"]["used"] == str(text) and ckpt["preset"] == "atlas" and ckpt["step"] == 8


@pytest.mark.parametrize("minutes, etas", [(0.0, ["5m12s", "1m48s", "1m10s"]), (6.0, ["3m26s", "1m48s", "1m10s"])])
def test_lines_of_a_run_by_hand(minutes, etas, tmp_path, monkeypatch, capsys):
    """Validation in tokens/s, tokens of one pass of two, steps of before --resume in eta; a command to go on that the shell cuts at a space."""
    now, out = [1000.0], tmp_path / "a b"

    def later(seconds, *value):
        now[0] += seconds
        return value if len(value) > 1 else value[0]
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train, "train_step", lambda *_: later(2.0, 1.25, 0.5))
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: later(100.0, 2.0))
    monkeypatch.setattr(train, "save_checkpoint", lambda *_: None)
    out.mkdir()
    tc = train.TrainConfig(steps=10, minutes=minutes, warmup=0, batch_size=3, grad_accum=2, seq_len=5, log_every=2, eval_every=4, stop_after=8, out=str(out))
    run = dict(step=2, best=math.inf, seconds=50.0)
    assert train.train(torch.nn.Linear(1, 1), [], run, tc, (None, None), CPU, torch.float32) == 0
    *said, end = capsys.readouterr().out.splitlines()
    lrs = ("1.40e-03", "1.00e-03", "6.00e-04")
    assert said == [f"step     {step}/10  loss 1.2500  val {val}  grad norm 0.50  lr {lr}  15 tokens/s  eta {eta}"
                    for step, val, lr, eta in zip((4, 6, 8), ("2.0000", "-     ", "2.0000"), lrs, etas, strict=True)]
    assert end.startswith("stopped after step 8, ") and end.endswith(f"python train.py --resume --out '{out}'")
    assert rows(out, "step", "loss", "val", "tokens_per_s", "seconds") == [
        ("4", "1.250000", "2.000000", "15", "154.0"), ("6", "1.250000", "", "15", "158.0"), ("8", "1.250000", "2.000000", "15", "262.0")]
    assert run == dict(step=8, best=2.0, seconds=262.0)
    monkeypatch.setattr(train, "greatest", lambda number, device: 2)             # Ctrl-C in the last step
    tc, run = replace(tc, stop_after=0, minutes=0.0, steps=9), dict(run, seconds=0.0)
    assert train.train(torch.nn.Linear(1, 1), [], run, tc, (None, None), CPU, torch.float32) == 2
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"python eval.py --ckpt '{out}'")


def loop(monkeypatch, out, took, step=0, seconds=0.0, **flags):
    """train.train with a clock of its own, from 1000 on: steps take `took` seconds by turns, and the validation loss is always the same.

    step, seconds: of before. -> when it validated; what it saved (name, step).
    """
    now, took, ends, saved = [1000.0], cycle(took), [], []

    def train_step(*_):
        now[0] += next(took)
        return 1.0, 1.0
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: ends.append(now[0]) or 1.0)
    monkeypatch.setattr(train, "save_checkpoint", lambda path, run, *_: saved.append((path.name, run["step"])))
    tc = train.TrainConfig(**{"minutes": 0.0, "warmup": 0, "out": str(out), **flags})
    train.train(torch.nn.Linear(1, 1), [], dict(step=step, best=math.inf, seconds=seconds), tc, (None, None), CPU, torch.float32)
    return ends, saved


def test_the_speed_is_that_since_the_last_line(tmp_path, monkeypatch, capsys):
    """A mean over the whole run: it would never show that a machine has become slow."""
    loop(monkeypatch, tmp_path, [1.0, 1.0, 4.0, 4.0], 2, steps=6, batch_size=2, seq_len=20, log_every=2, eval_every=6, stop_after=6)
    assert re.findall(r"(\d+) tokens/s", capsys.readouterr().out) == ["40", "10"]


def test_the_first_of_equals_is_best(tmp_path, monkeypatch):
    """best.pt of a later step, where nothing has become better."""
    _, saved = loop(monkeypatch, tmp_path, [1.0], steps=2, eval_every=1)
    assert saved == [("best.pt", 1), ("ckpt.pt", 1), ("ckpt.pt", 2)]


def test_a_gpu_draws_on_where_it_stopped(monkeypatch):
    """After --resume the dropout of another run."""
    given, cpu, cuda = [], torch.get_rng_state(), torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    for device, state in (("cuda", cuda), ("cuda", None), ("cpu", cuda)):
        train.restore(dict(optimizers=[], rng=dict(cpu=cpu, cuda=state)), [], torch.device(device))
    assert len(given) == 1 and given[0] is cuda


def test_minutes_before_a_resume_count_when_a_run_ends(tmp_path, monkeypatch):
    """A minute's run, resumed after 50 seconds, went on for another minute, at a learning rate of zero."""
    ends, _ = loop(monkeypatch, tmp_path, [4.0], 2, 50.0, steps=1000, minutes=1.0, eval_every=1000)
    assert ends == [1012.0]


def test_a_resumed_run_knows_its_best_and_its_time(text, tmp_path, monkeypatch):
    """A worse validation after --resume took the place of best.pt; minutes that begin anew make the rates rise again."""
    clock, values = count(10**6), iter([1.0] + [2.0] * 99)
    monkeypatch.setattr(train.time, "perf_counter", lambda: float(next(clock)))            # each look at the clock takes a second
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: next(values))
    flags = ["--steps", 1000, "--minutes", 1, "--warmup", 0, "--eval-every", 2, "--log-every", 1]
    assert go(text, tmp_path, *flags, "--stop-after", 5) == 0
    before = train.load_checkpoint(tmp_path / "ckpt.pt")["seconds"]
    assert train.main(["--resume", "--out", str(tmp_path), "--device", "cpu"]) == 0
    seconds, lr = ([float(x) for x in column] for column in zip(*rows(tmp_path, "seconds", "lr")))
    assert before > 10 and seconds == sorted(seconds) and lr == sorted(lr, reverse=True) and seconds[-1] > 55
    assert train.load_checkpoint(tmp_path / "best.pt")["step"] == 2


def test_the_last_step_is_an_end(text, tmp_path, capsys):
    """--stop-after as many as --steps stopped without a figure of the whole split."""
    assert go(text, tmp_path, "--steps", 2, "--stop-after", 2) == 0 and "done: atlas" in capsys.readouterr().out


def test_a_long_end_is_announced(trained, monkeypatch, capsys):
    """`eta 0m00s`, and then minutes of silence: a trial of two steps has a whole validation split to read."""
    ckpt = train.load_checkpoint(trained)
    model, tokenizer = train.rebuild(ckpt)
    tc = replace(train.TrainConfig(**ckpt["train"]), out=str(trained), sample_tokens=1)          # steps of 2 x 16 tokens
    monkeypatch.setattr(train, "report", lambda *_: 1.0)
    for seconds, long in ((5.9, ""), (6.1, " (about 1m01s; Ctrl-C ends it, all is saved)")):     # of ten steps, for 320 tokens; to read are 2 x 4,800
        train.finish(model, dict(step=10, seconds=seconds, data=ckpt["data"]), tc, (None, np.zeros(4800, int)), tokenizer, CPU, torch.float32)
        assert f"4,800 tokens in windows of 16{long}:\n" in capsys.readouterr().out


def test_clock_by_hand():
    """1m1s is read as a minute and ten."""
    assert [train.clock(s) for s in (0, 9.9, 61, 3600)] == ["0m00s", "0m09s", "1m01s", "60m00s"]


def test_the_sample_at_the_end_is_as_asked_for(text, tmp_path, monkeypatch):
    """Of --sample-tokens, by --seed, and neither too wild nor too tame to read."""
    seen = []
    monkeypatch.setattr(train, "continue_text", lambda model, tokenizer, ids, n, **how: seen.append((n, how)) or [])
    assert go(text, tmp_path, "--steps", 1, "--seed", 5, "--sample-tokens", 7) == 0
    (n, how), = seen
    assert n == 7 and how.keys() == {"temperature", "generator"} and how["temperature"] == 0.8 and how["generator"].initial_seed() == 5


def test_the_loss_falls(text, tmp_path):
    """A run whose optimizer is never stepped, or steps uphill, still prints, saves and resumes."""
    assert go(text, tmp_path / "out", "--steps", 30, "--optimizer", "muon", "--decay-frac", "0.5") == 0
    loss = [float(r[0]) for r in rows(tmp_path / "out", "loss")]
    assert loss[-1] < loss[0] - 0.3


def test_lr_schedule_by_hand():
    """Off by one, a warmup begins at 0 (a wasted step) or the decay ends above it."""
    tc = train.TrainConfig(steps=10, warmup=4, decay_frac=0.5)
    expect = [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert [train.lr_scale(i, tc) for i in range(10)] == pytest.approx(expect)
    assert train.lr_scale(10, tc) == 0 and train.lr_scale(9, replace(tc, decay_frac=0.0)) == 1
    assert [train.lr_scale(i, replace(tc, warmup=0, decay_frac=1.0)) for i in (0, 5)] == [1, 0.5]
    timed = replace(tc, minutes=2.0)                          # of 120 s, 60 are as far as step 5, 108 as step 9; more is the end
    assert [train.lr_scale(5, timed, s) for s in (0, 60, 84, 108, 120, 500)] == pytest.approx([1, 1, 0.6, 0.2, 0, 0])
    assert train.lr_scale(9, timed, 1) == pytest.approx(0.2) and train.lr_scale(0, timed, 60) == 0.25


def test_minutes_end_a_run_whose_steps_take_too_long(text, tmp_path, monkeypatch, capsys):
    """A run that is cut off with its rates still high loses what the decay is worth; one that may not be is late."""
    clock = count(10**6)                                      # a real one tells the time since the machine was switched on
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock) / 10)          # each look at the clock takes 0.1 s
    assert go(text, tmp_path / "out", "--steps", 1000, "--minutes", 0.1, "--warmup", 0, "--eval-every", 1000) == 0
    steps, lr, val = zip(*rows(tmp_path / "out", "step", "lr", "val"))
    lr = [float(x) for x in lr]
    assert 4 < int(steps[-1]) < 60 and lr == sorted(lr, reverse=True) and lr[-1] < 0.2 * lr[0] and val[-1]
    assert f"--minutes 0.1 are over after {steps[-1]} of 1000 steps" in capsys.readouterr().out
    assert train.main(["--resume", "--out", str(tmp_path / "out")]) == 0
    assert "nothing to do" in capsys.readouterr().out and rows(tmp_path / "out", "step")[-1] == (steps[-1],)


def test_tiny_has_a_time_limit_unless_steps_are_asked_for():
    """Five minutes are promised without flags; who asks for 20,000 steps wants them all."""
    minutes = lambda **given: train.settings(dict(given, device="cpu"))[0].minutes
    assert 4 < minutes() < 5 and minutes(steps=7) == 0 == minutes(size="baby") and minutes(steps=7, minutes=1.0) == 1


def test_auto_takes_bfloat16_only_where_it_is_native(monkeypatch):
    """Emulated bfloat16 is slower than float32; a CPU of which torch tells nothing must be taken for an old one."""
    for capability, native in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        assert machine.native_bfloat16(torch.device("cuda")) == native
    for can, dtype in (({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16), ({"avx2": True}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can, raising=False)
        assert machine.pick_dtype("auto", CPU) == dtype and machine.pick_dtype("float32", CPU) == torch.float32
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert machine.pick_dtype("auto", CPU) == torch.float32


def test_bfloat16_stays_near_float32(text, tmp_path):
    """Autocast that reaches the memory, or the loss, moves the result by more than rounding."""
    for name in ("float32", "bfloat16"):
        assert go(text, tmp_path / name, "--steps", 4, "--dtype", name) == 0
    a, b = (float(rows(tmp_path / name, "val")[-1][0]) for name in ("float32", "bfloat16"))
    assert a != b and a == pytest.approx(b, rel=0.02)


def test_on_cuda_a_run_is_larger_and_compiled(monkeypatch):
    """README: on CUDA the default is size `baby`, and compiled chunk steps."""
    seen = []
    monkeypatch.setattr(train, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(train, "pick_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(train, "set_matmul", lambda *_: None)
    monkeypatch.setattr(train, "prepare_data", lambda tc, *_: seen.append(tc) or 1 / 0)
    for given in ({}, dict(compile=False)):
        with pytest.raises(ZeroDivisionError):
            train.launch(given)
    assert [(tc.size, tc.compile) for tc in seen] == [("baby", True), ("baby", False)]


def test_the_precision_asked_for_reaches_every_pass(text, tmp_path, monkeypatch):
    """Validation, or training, in float32 under --dtype bfloat16, and nothing to see it by."""
    passes, validations, inside, real, one_pass = [], [], [], train.evaluate, train.one_pass
    monkeypatch.setattr(train, "one_pass", lambda model, x, y, dtype, *more: passes.append(dtype) or one_pass(model, x, y, dtype, *more))
    monkeypatch.setattr(train, "evaluate", lambda *args, **how: validations.append(how["dtype"]) or real(*args, **how))
    assert go(text, tmp_path, "--steps", 1, "--dtype", "bfloat16") == 0
    assert passes == [torch.bfloat16] and validations == 3 * [torch.bfloat16]    # while training, and at the end reset and carried
    model = tiny_model()
    model.register_forward_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")))
    for dtype in (torch.float32, torch.bfloat16):
        real(model, np.arange(40) % 20, 16, dtype=dtype)
    assert set(inside[: len(inside) // 2]) == {False} and set(inside[len(inside) // 2:]) == {torch.bfloat16}


class Recorder:
    """An optimizer that only notes the gradients it is given."""
    def __init__(self, model):
        self.model, self.param_groups, self.seen = model, [{}], None

    def step(self):
        self.seen = torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def zero_grad(self, set_to_none):
        self.model.zero_grad(set_to_none)


def tiny_model(preset="atlas", **more):
    torch.manual_seed(0)
    size = dict(vocab_size=20, n_layer=1, n_embd=16, n_head=2, head_dim=8, chunk=8, window=3, muon_every=8)
    return models.build(preset, **{**size, **more})


def test_gradient_is_of_the_whole_batch_and_clipped_after_its_norm_was_taken():
    """Accumulation that forgets to divide, or clips each part, changes the run; a norm after clipping says little."""
    ids = torch.randint(20, (200,), generator=torch.Generator().manual_seed(0))
    tc = train.TrainConfig(batch_size=4, seq_len=16, warmup=0, grad_clip=0.0)
    model = tiny_model()
    whole, parts, clipped = (Recorder(model) for _ in range(3))
    loss, norm = train.train_step(model, [whole], tc, ids, 0, 1.0, CPU, torch.float32)
    x, y = data.batch(ids, tc.seed, 0, 4, 16)
    assert loss == pytest.approx(model.loss(x, y).item(), rel=1e-6)
    assert norm == pytest.approx(whole.seen.norm().item(), rel=1e-5)
    loss2, norm2 = train.train_step(model, [parts], replace(tc, batch_size=2, grad_accum=2), ids, 0, 1.0, CPU, torch.float32)
    assert (loss2, norm2) == pytest.approx((loss, norm), rel=1e-5) and torch.allclose(whole.seen, parts.seen, atol=1e-6)
    assert train.train_step(model, [clipped], replace(tc, grad_clip=norm / 4), ids, 0, 1.0, CPU, torch.float32)[1] == norm
    assert clipped.seen.norm().item() == pytest.approx(norm / 4, rel=1e-4)
    assert whole.param_groups[0]["lr"] == tc.lr


@pytest.mark.parametrize("preset", ["atlas", "transformer"])
def test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay(preset):
    """A parameter that no optimizer holds never learns; Muon is not for embeddings, nor for the starts of memories."""
    model = tiny_model(preset)
    name = {id(p): n for n, p in model.named_parameters()}
    for kind, count in (("adamw", 1), ("muon", 2)):
        optimizers = train.make_optimizers(model, train.TrainConfig(optimizer=kind, weight_decay=0.1, beta2=0.7))
        groups = [(type(o).__name__, g) for o in optimizers for g in o.param_groups]
        held = [name[id(p)] for _, g in groups for p in g["params"]]
        assert len(optimizers) == count and sorted(held) == sorted(name.values())
        hidden = {name[id(p)] for kind, g in groups for p in g["params"] if g["weight_decay"] or kind == "Muon"}
        assert not any(w in n for n in hidden for w in ("embed", "head", "norm", "gates", "M0", "conv", "bias"))
        assert hidden == {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "head" and not n.endswith("gates")}
        assert all(g["weight_decay"] == (0.1 if name[id(g["params"][0])] in hidden else 0) for _, g in groups)
        assert all(g["betas"] == (0.9, 0.7) and g["eps"] == 1e-8 for o, g in groups if o == "AdamW")
        if kind == "muon":
            assert hidden == {name[id(p)] for o, g in groups if o == "Muon" for p in g["params"]}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_schedule_reaches_every_group(kind):
    """Rates that never rise or fall look much like those that do."""
    model, tc = tiny_model("atlas"), train.TrainConfig(optimizer=kind, lr=0.2, muon_lr=0.4, embed_lr=3.0)
    optimizers = train.make_optimizers(model, tc)
    train.train_step(model, optimizers, tc, torch.randint(16, (5000,)).numpy(), 0, 0.25, CPU, torch.float32)
    embed, rest, *hidden = [g["lr"] for o in optimizers for g in o.param_groups]
    assert (embed, rest, *hidden) == pytest.approx((0.15, 0.05, 0.1 if kind == "muon" else 0.05))


def test_M0_can_be_trained_alone(monkeypatch):
    """Fine-tuning of a few parameters leaves the outer Muon with no gradient at all."""
    monkeypatch.setattr(machine, "cpu_capabilities", lambda: {})
    model, tc, x = tiny_model("omeganet"), train.TrainConfig(optimizer="muon"), torch.randint(16, (2, 12))
    for name, p in model.named_parameters():
        p.requires_grad_(".M0." in name)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizers = train.make_optimizers(model, tc)
    model.loss(x, x).backward()
    train.update(optimizers, tc, 1.0)
    assert all(torch.equal(p, before[name]) != (".M0." in name) for name, p in model.named_parameters())


def test_outer_muon_is_torch_muon(monkeypatch):
    """torch's Newton-Schulz is in bfloat16, which a CPU without instructions for it emulates: ours is float32 there, all else is torch's."""
    start = [randn(3, 5), randn(6, 2), randn(4, 4)]
    gradients, how = [[randn(*a.shape) for a in start] for _ in range(3)], dict(lr=0.3, weight_decay=0.9)

    def run(kind, native):
        monkeypatch.setattr(machine, "cpu_capabilities", lambda: {"avx512_bf16": native})
        params, after = [torch.nn.Parameter(a.clone()) for a in start], []
        optimizer = kind(params, **how)
        for step in gradients:
            for p, g in zip(params, step):
                p.grad = g.clone()
            optimizer.step()
            after.append([p.detach().clone() for p in params])
        return after, optimizer.state_dict()

    (plain, state), (native, _), (ours, same) = run(torch.optim.Muon, False), run(train.Muon, True), run(train.Muon, False)
    for a, g, b in zip(start, gradients[0], ours[0]):
        rows, columns = a.shape
        close(b, 0.73 * a - 0.3 * max(1, rows / columns) ** 0.5 * newton_schulz_ref(g))          # float64: no bfloat16 in it
    for step, others, mine in zip(plain, native, ours):
        for a, b, c in zip(step, others, mine):
            assert torch.equal(a, b) and torch.allclose(a, c, rtol=0.03, atol=0.03)
    for a, b in zip(tensors(tuple(state["state"][0].values())), tensors(tuple(same["state"][0].values())), strict=True):
        close(a, b)                                           # a checkpoint goes on with either
    assert state["state"][0].keys() == same["state"][0].keys()


@pytest.mark.parametrize("tie", [False, True])
def test_embed_lr_is_of_the_embedding_alone(tie):
    """A multiple that reaches the head or the memories, or none at all: the first step of AdamW moves a weight by its rate."""
    ids, moved = torch.randint(20, (200,), generator=torch.Generator().manual_seed(0)), {}
    for times in (1.0, 4.0):
        model = tiny_model(tie=tie)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        tc = train.TrainConfig(batch_size=4, seq_len=16, warmup=0, weight_decay=0.0, embed_lr=times)
        train.train_step(model, train.make_optimizers(model, tc), tc, ids, 0, 1.0, CPU, torch.float32)
        moved[times] = {name: (p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()}
    ratio = {name: moved[4.0][name] / moved[1.0][name] for name in moved[1.0]}
    assert ratio.pop("embed.weight") == pytest.approx(4, rel=1e-3) and ratio == dict.fromkeys(ratio, 1.0)


def test_evaluate_is_the_mean_over_all_tokens_and_leaves_no_trace():
    """A mean of batch means weighs the ragged last window wrongly; a validation that draws random numbers, or leaves
    eval mode on, makes the training depend on --eval-every."""
    model = tiny_model(dropout=0.5).train()
    ids = torch.randint(20, (16 * 5 + 8,), generator=torch.Generator().manual_seed(1))
    rng = torch.get_rng_state()
    reset, carried = train.evaluate(model, ids, 16, 2), train.evaluate(model, ids, 16, 1, carry=True)
    streams = train.evaluate(model, ids, 16, 2, carry=True)
    assert model.training and torch.equal(rng, torch.get_rng_state())
    model.eval()
    parts = [(ids[None, i: i + 16], ids[None, i + 1: i + 17]) for i in range(0, len(ids) - 1, 16)]
    total = sum(model.loss(x[:, : y.shape[1]], y).item() * y.numel() for x, y in parts)
    assert reset == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert carried == pytest.approx(model.loss(ids[None, :-1], ids[None, 1:]).item(), rel=1e-4) and carried != reset
    half = (len(ids) - 1) // 2                                # two streams: each half of the text with a memory of its own
    assert streams == pytest.approx(model.loss(ids[: 2 * half].view(2, half), ids[1: 2 * half + 1].view(2, half)).item(), rel=1e-4)


@pytest.mark.parametrize("batch_size", [2, 8, 64])
def test_evaluation_on_some_windows_spreads_over_the_split(batch_size):
    """The first windows of a text are not its average, and all of them would cost more than the training."""
    model, starts = tiny_model("linear", vocab_size=700), []
    forward = model.forward
    model.forward = lambda x, state=None: (starts.extend(x[:, 0].tolist()), forward(x, state))[1]
    train.evaluate(model, torch.arange(16 * 40 + 9), 16, batch_size, max_windows=8)
    assert starts == list(range(0, 640, 80))
    starts.clear()
    train.evaluate(model, torch.arange(16 * 3 + 9), 16, batch_size, max_windows=100)
    assert starts == [0, 16, 32, 48]                          # what is left over, too


def no_compiler():
    from torch._inductor.exc import InductorError
    return InductorError(RuntimeError("no C++ compiler"), None)


@pytest.mark.parametrize("fault", [no_compiler, lambda: PermissionError(errno.EACCES, "no place for C++ compiler")])
def test_where_compiling_fails_nothing_is_compiled(fault, capsys):
    """A run that goes on without torch.compile would call it, and fail, again in its next step; the next run of the process may compile."""
    graphs, model, x = [], tiny_model("linear"), torch.zeros(1, 4, dtype=torch.long)
    part = torch.compile(lambda a: a + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward)

    def loss(x, y):
        raise fault()
    model.compile_memory, model.loss = lambda: None, loss
    try:
        train.compile_model(model, x, x, torch.float32)
        part(torch.zeros(2))
        assert not graphs and "C++ compiler" in capsys.readouterr().err
        model.loss = lambda x, y: torch.zeros((), requires_grad=True)
        train.compile_model(model, x, x, torch.float32)
        part(torch.zeros(2))
    finally:
        torch.compiler.set_stance("default")
    assert len(graphs) == 1 and "compiled in" in capsys.readouterr().out


class Tape(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: makes torch's calls once more, with the tensors and numbers of the first time, into the tensors of that time.

    Calls that read back, which a GPU refuses while it records, are refused.
    """
    refused = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}

    def __init__(self):
        super().__init__()
        self.calls, self.random = [], torch.get_rng_state()

    def __exit__(self, *_):
        super().__exit__(*_)
        torch.set_rng_state(self.random)                      # a capture computes nothing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._opname not in self.refused
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        leaves = torch.utils._pytree.tree_leaves
        for func, args, kwargs, out in self.calls:
            for old, new in zip(leaves(out), leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():           # else a view, or written in place
                    old.data.copy_(new)


def tapes_for_graphs(patch, make=Tape):
    stream = argparse.Namespace(wait_stream=lambda other: None)
    for name, fake in dict(CUDAGraph=make, graph=lambda tape, stream: tape, Stream=lambda: stream, current_stream=lambda: stream,
                           stream=lambda stream: nullcontext()).items():
        patch.setattr(torch.cuda, name, fake)


def steps(model, tc, record, n=2):
    """n steps of training -> losses and norms; the weights after them; what train.record made, if it was to."""
    ids, optimizers = torch.randint(11, (500,), generator=torch.Generator().manual_seed(0)), train.make_optimizers(model, tc)
    torch.manual_seed(1)
    device = next(model.parameters()).device
    x, y = (a.to(device) for a in data.batch(ids, 0, 0, tc.batch_size, tc.seq_len))
    recorded = train.record(model, x, y, torch.float32, tc.grad_accum) if record else None
    told = [train.train_step(model, optimizers, tc, ids, i, 1.0, device, torch.float32, recorded) for i in range(n)]
    return told, [p.detach().clone() for p in model.parameters()], recorded


@pytest.mark.parametrize("more", [dict(dropout=0.3), dict(remat=True)])
@pytest.mark.parametrize("preset", ["atlas", "omeganet", "transformer", "swa"])
def test_recorded_steps_are_the_same(preset, more, monkeypatch):
    """A graph that reads an old batch, forgets the gradient of a pass, or adds to a p.grad that is no more; and dropout that stands still."""
    tc, runs, kept, checkpoint = train.TrainConfig(batch_size=2, grad_accum=2, seq_len=13, warmup=0, lr=0.01), [], [], models.checkpoint
    monkeypatch.setattr(models, "checkpoint", lambda *args, **how: kept.append(how.get("preserve_rng_state", True)) or checkpoint(*args, **how))
    for record in (False, True):
        torch.manual_seed(0)
        model = small(preset, n_layer=1, dropout=more.get("dropout", 0.0)).train()
        model.remat = more.get("remat", False)
        if record:
            tapes_for_graphs(monkeypatch)
        runs.append(steps(model, tc, record))
    (told, weights, _), (again, recorded, graph) = runs
    assert graph and told == again and same(weights, recorded)
    assert bool(kept) == model.remat and not any(kept)        # a GPU's random state cannot be read while it records


def test_what_cannot_be_recorded_ends_in_a_line(monkeypatch):
    """A capture that fails may leave torch's allocator and random state in it: the next dropout would end in a traceback. All that went wrong is
    said, but for a lack of memory, which has a line of its own."""
    class Fails(Tape):
        def __exit__(self, *_):
            super().__exit__(*_)
            try:
                raise RuntimeError(self.message)
            finally:                                          # as the end of a capture hides what broke it
                raise RuntimeError("an error in what was recorded")
    tc = train.TrainConfig(batch_size=2, grad_accum=2, seq_len=13, warmup=0)
    tapes_for_graphs(monkeypatch, Fails)
    Fails.message = "operation not permitted when stream is capturing\nand more"
    with pytest.raises(machine.UserError) as told:
        steps(small("atlas"), tc, True)
    assert str(told.value) == "--cuda-graph: operation not permitted when stream is capturing, then an error in what was recorded; drop the flag"
    Fails.message = "CUDA out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        steps(small("atlas"), tc, True)


def test_cuda_graph_is_asked_for_by_a_flag(text, tmp_path, monkeypatch, capsys):
    """And refused where there can be none, or where a block computed again would have another dropout."""
    flags = "--data", text, "--out", tmp_path / "x", "--cuda-graph"
    assert "--device cuda" in refused(capsys, train.main, *NET, *RUN, *flags)
    monkeypatch.setattr(train, "pick_device", lambda name: torch.device("cuda"))
    assert "--dropout 0" in refused(capsys, train.main, *NET, *RUN, *flags, "--remat", "--dropout", "0.1")
    assert not (tmp_path / "x").exists()


def test_a_recorded_run_is_the_same(text, tmp_path, monkeypatch):
    """From the flag, which only a GPU's run is let have, to the last checkpoint."""
    replays, real = [], Tape.replay
    assert go(text, tmp_path / "eager", "--steps", 3, "--dropout", "0.2") == 0
    tapes_for_graphs(monkeypatch)
    monkeypatch.setattr(Tape, "replay", lambda tape: replays.append(tape) or real(tape))
    monkeypatch.setattr(train, "describe", lambda tc, *_: setattr(tc, "cuda_graph", True))
    assert go(text, tmp_path / "recorded", "--steps", 3, "--dropout", "0.2") == 0 and len(replays) == 3
    assert same(*(train.load_checkpoint(tmp_path / n)["model"] for n in ("eager", "recorded")))


def test_the_end_is_of_the_best_weights(text, tmp_path, monkeypatch):
    """The figures and the sample at the end are said to be those of best.pt; the last step's may be worse."""
    values, seen = iter([2.0, 3.0] + [1.0] * 9), []
    monkeypatch.setattr(train, "evaluate", lambda model, *_, **__: seen.append(deepcopy(model.state_dict())) or next(values))
    assert go(text, tmp_path, "--steps", 2, "--eval-every", 1) == 0
    best = train.load_checkpoint(tmp_path)["model"]
    assert same(dict(seen[-1]), dict(best)) and not same(dict(seen[1]), dict(best))


def test_validation_is_of_as_many_windows_as_asked_for(text, tmp_path, monkeypatch):
    """--eval-windows and --batch-size in each other's place: another figure, at another price."""
    seen = []
    monkeypatch.setattr(train, "evaluate", lambda model, ids, *how, **more: seen.append(how) or 1.0)
    assert go(text, tmp_path, "--steps", 1, "--batch-size", 3, "--eval-windows", 5) == 0
    assert seen[0] == (16, 3, 5)


def test_lines_arrive_when_they_are_said(monkeypatch):
    """`python train.py | tee log` would show nothing for minutes."""
    said = []
    monkeypatch.setattr("builtins.print", lambda *_, **how: said.append(how))
    machine.say("a line")
    assert said == [dict(flush=True)]


def test_one_process_saves(tmp_path, monkeypatch):
    """Of several processes the first: each has random numbers of its own, and those of the last to save would be resumed with."""
    monkeypatch.setattr(train, "rank", lambda: 1)
    train.save_checkpoint(tmp_path / "ckpt.pt", dict(step=1), tiny_model(), [])
    assert not list(tmp_path.iterdir())


# ---- exact resume

@pytest.mark.parametrize("flags", [["--optimizer", "muon", "--grad-accum", 2], ["--model", "transformer"]])
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(text, tmp_path, flags, capsys):
    """Any state missing from the checkpoint (moments, random numbers of dropout, step) shows as a difference; so does
    a validation that disturbs the training. Step 5 is not a validation step."""
    flags = [*flags, "--steps", 10, "--dropout", "0.2"]
    assert go(text, tmp_path / "a", *flags) == 0
    assert go(text, tmp_path / "b", *flags, "--stop-after", 5) == 0
    assert f"python train.py --resume --out {tmp_path / 'b'}" in capsys.readouterr().out
    torch.manual_seed(99)
    assert go(text, tmp_path / "b", "--resume") == 0                 # --steps and --dropout: from the checkpoint
    a, b = (train.load_checkpoint(tmp_path / name / "ckpt.pt") for name in "ab")
    for key in ("model", "optimizers", "rng", "step", "best", "config"):
        assert same(a[key], b[key]), key
    columns = ("step", "loss", "val", "grad_norm", "lr")
    assert rows(tmp_path / "a", *columns) == rows(tmp_path / "b", *columns)


def test_validation_and_logging_do_not_change_the_run(text, tmp_path):
    """Another --eval-every must give the same weights: it may not draw from the generator that dropout uses."""
    for name, every in (("a", 3), ("b", 5)):
        go(text, tmp_path / name, "--steps", 7, "--dropout", "0.2", "--eval-every", every, "--stop-after", 6)
    assert go(text, tmp_path / "b", "--resume", "--eval-every", 1, "--log-every", 1, "--stop-after", 7) == 0
    assert go(text, tmp_path / "a", "--resume", "--eval-every", 2) == 0
    a, b = (train.load_checkpoint(tmp_path / name / "ckpt.pt") for name in "ab")
    assert same(a["model"], b["model"]) and a["step"] == b["step"] == 7


def test_same_seed_same_run_and_another_seed_another(text, tmp_path):
    """A seed that does not reach weights or batches makes every mean over seeds a lie."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        go(text, tmp_path / name, "--steps", 2, "--seed", seed)
    a, b, c = (train.load_checkpoint(tmp_path / name)["model"] for name in "abc")
    assert same(a, b) and not same(a, c)


def test_a_seed_is_of_weights_and_of_batches(text, tmp_path, monkeypatch):
    """One of the two is enough for two seeds to differ."""
    real, seen = models.LM.loss, []
    monkeypatch.setattr(models.LM, "loss", lambda self, x, y: seen.append((self.head.weight.clone(), x)) or real(self, x, y))
    for seed in (1, 2):
        go(text, tmp_path, "--steps", 1, "--seed", seed)
    assert not any(map(torch.equal, *seen))


def test_resume_of_a_finished_run_does_nothing(copy, text, capsys):
    """It must neither train on nor write."""
    before = contents(copy)
    assert go(text, copy, "--resume") == 0
    said = capsys.readouterr().out
    assert "nothing to do" in said and "--steps N trains it longer" in said and "eval.py" in said and contents(copy) == before
    ckpt = train.load_checkpoint(copy / "ckpt.pt")
    ckpt["train"].update(steps=99)                            # it is not over yet, but by these
    torch.save(ckpt, copy / "ckpt.pt")
    for flag, value in (("--stop-after", 3), ("--minutes", 1e-9)):
        assert go(text, copy, "--resume", flag, value) == 0 and f"the end by {flag};" in capsys.readouterr().out
    ckpt["train"].update(warmup=10)                           # longer than the steps that are asked for, and no flag could change it
    torch.save(ckpt, copy / "ckpt.pt")
    assert train.main(["--resume", "--out", str(copy), "--steps", "7"]) == 0 and "12 of 7 steps" in capsys.readouterr().out


def test_the_same_command_resumes(text, tmp_path, capsys):
    """What the first command left to the program to decide is not another value than what it decided."""
    flags = ["--size", "auto", "--n-head", 4, "--head-dim", 0, "--steps", 4]
    assert go(text, tmp_path, *flags, "--stop-after", 2) == 0
    assert go(text, tmp_path, *flags, "--resume") == 0
    ckpt = train.load_checkpoint(tmp_path / "ckpt.pt")
    assert ckpt["step"] == 4 and ckpt["train"]["size"] == "tiny" and ckpt["config"]["head_dim"] == 4


@pytest.mark.parametrize("planned", [8, 15])
def test_a_finished_run_can_be_made_longer(planned, copy, capsys):
    """More --steps is what a run that still learns needs; a limit of time that is over would end it after one, or at once."""
    ckpt = train.load_checkpoint(copy / "ckpt.pt")
    ckpt["train"].update(minutes=1e-9, steps=planned)
    torch.save(ckpt, copy / "ckpt.pt")
    with (copy / "log.csv").open("ab") as log:
        log.write(b"\xff,\n")                                 # a log that somebody has edited is no reason not to
    assert train.main(["--resume", "--out", str(copy), "--steps", "15", "--device", "cpu"]) == 0
    assert train.load_checkpoint(copy / "ckpt.pt")["step"] == 15 and rows(copy, "step")[-1] == ("15",)


def test_resume_refuses_other_settings_and_names_them(copy, text, capsys):
    """A changed setting that is taken over silently, or silently ignored, is a run that is not what its log says."""
    before = contents(copy)
    for name, was, now in (("window", 3, 5), ("lr", train.TRAIN_SIZES["tiny"]["lr"], 0.5), ("model", "atlas", "titans"),
                           ("batch_size", 2, 4), ("tokenizer", "char", "byte"), ("muon", True, False)):
        argv = [train.flag(name), now] if name != "muon" else ["--no-muon"]
        said = refused(capsys, train.main, "--resume", "--out", copy, *argv)
        assert train.flag(name) in said and str(was) in said and str(now) in said and f"--init {copy}/ckpt.pt --out FOLDER" in said
    said = refused(capsys, train.main, "--resume", "--out", copy, "--eval-every", 0)
    assert said.startswith("error: --eval-every") and "version" not in said      # a mistake in a flag, not in the checkpoint
    assert contents(copy) == before
    assert train.main(["--resume", "--out", str(copy), "--window", "3"]) == 0     # given again, but the same


def test_what_may_change_when_a_run_goes_on():
    """What --help says is to be given again must not come from the checkpoint, and what does not change the run must not be refused."""
    had = dict(out="elsewhere", stop_after=3, device="cuda", compile=True, cuda_graph=True, threads=7)
    ckpt = dict(train={**asdict(train.TrainConfig()), **had}, config=asdict(tiny_model().config), path="ckpt.pt")
    tc = train.settings({}, ckpt)[0]
    assert all(getattr(tc, name) == getattr(train.TrainConfig, name) for name in had)
    for name, value in {**had, **dict(data="moved.txt", steps=601, minutes=1.0, eval_every=7, log_every=7, sample_tokens=1, remat=True)}.items():
        assert getattr(train.settings({name: value}, ckpt)[0], name) == value


def test_resume_of_a_run_of_an_older_version(copy):
    """Its checkpoint does not have the flags that came later: given, they were ignored."""
    ckpt = train.load_checkpoint(copy / "ckpt.pt")
    for settings, name in (("train", "remat"), ("train", "log_every"), ("config", "memory_dtype")):
        del ckpt[settings][name]
    tc, _ = train.settings(dict(remat=True, log_every=3, cuda_graph=True, memory_dtype="float32", minutes=2.0), ckpt)
    assert (tc.remat, tc.log_every, tc.cuda_graph, tc.minutes) == (True, 3, True, 2.0)
    assert "is 'float32'" in user_error(train.settings, dict(memory_dtype="bfloat16"), ckpt)


def test_a_run_that_ends_while_it_is_resumed(copy, monkeypatch, capsys):
    """One that was told to stop still saves while the next one reads its text: that would go on from before, and overwrite what is newer."""
    real, before = train.prepare_data, contents(copy)

    def prepare(*args):
        os.utime(copy / "ckpt.pt", ns=(1, 1))
        return real(*args)
    monkeypatch.setattr(train, "prepare_data", prepare)
    flags = ["--resume", "--out", copy, "--steps", 15, "--device", "cpu"]
    assert "another run has gone on" in refused(capsys, train.main, *flags) and contents(copy) == before
    assert train.main(list(map(str, flags))) == 0             # again: now it reads what lies there


def test_a_text_that_has_moved(text, copy, tmp_path, capsys):
    """`no such file: my.txt`, of a name that nobody has typed, for a checkpoint from another machine."""
    ckpt = train.load_checkpoint(copy / "ckpt.pt")
    ckpt.update(step=6, train={**ckpt["train"], "data": "/no/my.txt"})
    torch.save(ckpt, copy / "best.pt")
    torch.save(ckpt, copy / "ckpt.pt")
    for main, flags in ((eval.main, ["--ckpt", copy]), (train.main, ["--out", copy, "--resume"])):
        assert "'/no/my.txt'" in (said := refused(capsys, main, *flags, "--device", "cpu")) and str(copy) in said and "--data gives another" in said
    assert str(copy) not in refused(capsys, eval.main, "--ckpt", copy, "--data", "/no/other.txt", "--device", "cpu")


def test_a_run_that_begins_with_the_weights_of_another(text, tmp_path, capsys):
    """--init must take weights, network and tokenizer as they are, none of the rest, and leave the other run alone."""
    first, other = tmp_path / "first", tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    assert go(text, first, "--tokenizer", "bpe", "--bpe-size", 260, "--model", "omeganet", "--steps", 2) == 0
    run = [*RUN, "--data", str(other), "--out", str(tmp_path / "second"), "--init", str(first)]
    assert train.main([*run, "--steps", "1", "--lr", "0", "--muon-lr", "0", "--chunk", "4"]) == 0
    a, b = (train.load_checkpoint(out) for out in (first, tmp_path / "second"))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"]) and a["model"].keys() == b["model"].keys()
    assert b["tokenizer"] == a["tokenizer"] and b["config"] == {**a["config"], "chunk": 4}
    assert (b["step"], b["train"]["lr"], b["train"]["model"], b["data"]["used"]) == (1, 0.0, "omeganet", str(other))
    assert train.main(["--resume", "--out", str(tmp_path / "second"), "--device", "cpu"]) == 0             # and knows its --init
    capsys.readouterr()
    for flags, named in ((["--n-embd", 32], "--n-embd"), (["--model", "atlas"], "--model is omeganet"), (["--tokenizer", "char"], "--tokenizer"),
                         (["--bpe-size", 300], "--bpe-size"), (["--size", "baby"], "--size"), (["--init", "nowhere"], "nowhere"),
                         (["--tie"], "drop --tie")):          # of the same shapes: one matrix would overwrite the other
        assert named in refused(capsys, train.main, *run, "--steps", 1, *flags)
    assert train.settings(dict(size="auto"), origin=a)[0].size == "tiny"         # as if it had not been given
    assert "--init" in refused(capsys, train.main, "--resume", "--out", tmp_path / "second", "--init", "elsewhere")


def test_resume_refuses_another_text(text, copy, tmp_path, capsys):
    """The same path with other words in it is another run; the same words under another path are not."""
    mine = Path(shutil.copy(text, tmp_path / "mine.txt"))
    assert go(mine, tmp_path / "run", "--steps", 4, "--stop-after", 2) == 0
    capsys.readouterr()
    mine.write_text(text.read_text()[::-1])
    (tmp_path / "other.txt").write_text(text.read_text()[::-1])
    shutil.copy(text, tmp_path / "moved.txt")
    before = contents(tmp_path / "run")
    resume = ["--resume", "--out", tmp_path / "run", "--device", "cpu", "--data"]
    for changed in (tmp_path / "other.txt", mine):
        assert "sha256" in refused(capsys, train.main, *resume, changed)
    assert contents(tmp_path / "run") == before
    assert train.main([*map(str, resume), str(tmp_path / "moved.txt")]) == 0


def test_log_rows_of_lost_steps_are_dropped(tmp_path, monkeypatch):
    """A run killed after its last checkpoint has logged steps that resuming logs again; its last row may be half."""
    path = tmp_path / "log.csv"
    for step in (0, 4):
        train.begin_log(path, step)
        with path.open("a") as log:
            log.write("".join(f"{i},1,,1,1,1,1\n" for i in range(step + 1, step + 7)) + "11,0.")
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == \
        ["step", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"]
    train.begin_log(path, 99)
    assert path.read_text().splitlines()[-1] == "10,1,,1,1,1,1"
    monkeypatch.setattr(train, "COLUMNS", ("step", "norm", "loss"))
    train.begin_log(path, 9)                           # of a version that logs something else
    assert path.read_text().splitlines()[::9] == ["step,norm,loss", "9,,1"]


@pytest.mark.parametrize("damage", ["\n\n", "\0" * 200_000, "\xb2,1,,1,1,1,1\n", "9" * 5000 + ",1,,1,1,1,1\n", '"' * 9 + "\n"],
                         ids=["lines", "zeros", "square", "digits", "quotes"])
def test_a_damaged_log_is_no_reason_not_to_go_on(damage, tmp_path):
    """What a power cut or a spreadsheet has left in it: checkpoints are good, and so are its other rows."""
    path, row = tmp_path / "log.csv", "1,1,,1,1,1,1\n"
    path.write_text("\ufeff" + ",".join(train.COLUMNS) + "\n" + row + damage, encoding="utf-8")
    train.begin_log(path, 5)
    assert path.read_text() == ",".join(train.COLUMNS) + "\n" + row
    path.write_text(damage, encoding="utf-8")
    train.begin_log(path, 5)
    assert path.read_text().startswith(",".join(train.COLUMNS))


def test_a_log_of_another_kind_is_kept(tmp_path, capsys):
    """A spreadsheet that writes semicolons must not cost the rows of a run."""
    path, log = tmp_path / "log.csv", "step;loss\n1;2.5\n"
    for n in (1, 2):
        path.write_text(log)
        train.begin_log(path, 5)
        assert path.read_text() == ",".join(train.COLUMNS) + "\n" and (tmp_path / f"log-{n}.csv").read_text() == log
        assert f"log-{n}.csv" in capsys.readouterr().out
    path.unlink()
    path.mkdir()
    with pytest.raises(machine.Halt, match="log.csv"):
        train.begin_log(path, 5)


def test_a_first_gradient_of_noise_is_told(text, tmp_path, capsys, monkeypatch):
    """Through many Newton-Schulz of large steps gradients explode, and clipping hides it (README, choice 16)."""
    assert go(text, tmp_path / "a", "--steps", 1) == 0
    assert "first gradient" not in capsys.readouterr().out
    assert go(text, tmp_path / "b", "--steps", 1, "--chunk", 1, "--muon-every", 1, "--seq-len", 96, "--stop-after", 1) == 0
    assert "warning: the first gradient's norm is" in capsys.readouterr().out
    monkeypatch.setattr(train, "train_step", lambda *_: (3.0, 5e3))              # as of a memory of zeros in mac, which learns on
    assert go(text, tmp_path / "c", "--steps", 1, "--model", "linear") == 0
    assert go(text, tmp_path / "d", "--steps", 1, "--grad-clip", 10) == 0        # as long as 500 that are not clipped
    assert "warning: the first gradient" not in capsys.readouterr().out


def test_a_full_disk_is_said_of_the_log(tmp_path, monkeypatch):
    """`No space left on device`, of which file?"""
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(machine.Halt, match="cannot write .*log.csv .*disk full"):
        train.begin_log(tmp_path / "log.csv", 0)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_has_gone_is_no_full_disk(tmp_path):
    """`Checkpoints that were saved are intact`: they were in it."""
    with pytest.raises(machine.Halt, match="cannot write .*ckpt.pt .*folder removed") as fault:
        train.save_checkpoint(tmp_path / "out" / "ckpt.pt", dict(step=1), tiny_model(), [])
    assert "intact" not in str(fault.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, of Linux")
def test_a_disk_that_fills_during_a_run(text, tmp_path, monkeypatch, capsys):
    """At a line of the log, between two checkpoints."""
    monkeypatch.setattr(train, "begin_log", lambda path, step: path.symlink_to("/dev/full"))
    assert "log.csv" in refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", tmp_path / "out", "--steps", 2, code=1)


def test_resume_asks_for_no_vocabulary(text, tmp_path, monkeypatch):
    """A run on GPT-2's tokens must go on where there is no network: its checkpoint has them."""
    fake_gpt2(monkeypatch)
    assert go(text, tmp_path, "--tokenizer", "gpt2", "--steps", 2, "--stop-after", 1) == 0
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    assert go(text, tmp_path, "--resume", "--stop-after", 2) == 0


def test_threads_reach_torch(tmp_path, monkeypatch):
    """--threads that does nothing: two runs beside each other wait for each other."""
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(machine, "cpu_quota", lambda: math.inf)
    monkeypatch.setattr(train, "prepare_data", lambda *_: 1 / 0)
    for flags in ([], ["--threads", "3"]):
        with pytest.raises(ZeroDivisionError):
            train.main(["--device", "cpu", "--out", str(tmp_path), *flags])
    monkeypatch.setattr(eval, "text_task", lambda *_: None)
    assert eval.main(["--device", "cpu", "--threads", "2"]) == 0
    assert threads == [3, 2]


# ---- signals, faults, limits

@pytest.mark.parametrize("number, code", [(getattr(signal, name), 128 + n) for name, n in (("SIGINT", 2), ("SIGTERM", 15), ("SIGHUP", 1))
                                          if hasattr(signal, name)])
def test_a_signal_finishes_the_step_and_saves(number, code, text, tmp_path, monkeypatch, capfd):
    """Ctrl-C must not lose the steps since the last validation, nor leave its handler behind."""
    real = train.train_step

    def step(model, optimizers, tc, ids, i, *rest):
        if i == 1:
            signal.raise_signal(number)
        return real(model, optimizers, tc, ids, i, *rest)
    def mine(*_):                                             # under nohup a hang-up is ignored, here as in train.py
        pass
    before = signal.signal(number, mine)
    monkeypatch.setattr(train, "train_step", step)
    try:
        assert go(text, tmp_path / "out", "--steps", 9) == code
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)
    assert "--resume" in capfd.readouterr().out and train.load_checkpoint(tmp_path / "out")["step"] == 2


def test_a_signal_while_processes_agree_is_not_lost(text, tmp_path, monkeypatch, capfd):
    """They agree on the signals of before; one that came meanwhile was overwritten, and the run said that it would stop, and did not."""
    agreed = []

    def greatest(number, device):
        agreed.append(number)
        if len(agreed) == 1:
            signal.raise_signal(signal.SIGTERM)
        return number
    monkeypatch.setattr(train, "greatest", greatest)
    assert go(text, tmp_path / "out", "--steps", 9) == 128 + signal.SIGTERM
    assert agreed == [0, signal.SIGTERM] and "finishing this step" in capfd.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no hang-up")
def test_nohup():
    """A run that was told to outlive its terminal must."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with machine.StopOnSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.signal and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once_and_keeps_the_last_checkpoint(number, text, tmp_path, monkeypatch, capfd):
    """A user who presses Ctrl-C twice will not wait for a slow step, nor accept a broken file."""
    real = train.train_step

    def step(model, optimizers, tc, ids, i, *rest):
        for _ in range(2 * (i == 5)):
            signal.raise_signal(number)
        return real(model, optimizers, tc, ids, i, *rest)
    monkeypatch.setattr(train, "train_step", step)
    assert go(text, tmp_path / "out", "--steps", 9) == 128 + number
    assert "Traceback" not in capfd.readouterr().err
    assert train.load_checkpoint(tmp_path / "out" / "ckpt.pt")["step"] == 4


# the second of two processes, as torchrun starts them: it alone is told to stop, in its third step, and once more by torchrun, which
# passes on what the terminal has sent to all; then both go on
SECOND_OF_TWO = """
import os, signal, sys, train
real = train.train_step
def step(model, optimizers, tc, ids, i, *rest):
    for _ in range(2 * (i == 2)):
        signal.raise_signal(signal.SIGTERM)
    return real(model, optimizers, tc, ids, i, *rest)
train.train_step = step
assert train.main(sys.argv[1:]) == 143
os.environ["MASTER_PORT"] = os.environ["NEXT_PORT"]           # where the second would still meet what the first left at the old one
assert train.main(["--resume", "--device", "cpu", "--threads", "1", "--out", sys.argv[-1]]) == 0
"""


def test_two_processes_train_like_one(text, tmp_path, capsys, monkeypatch):
    """Gradients not added, or of the wrong share, change the loss; a step that only one of them takes waits for ever."""
    flags = ["--optimizer", "muon", "--grad-accum", "4", "--steps", "6"]
    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        ports = [str(free.getsockname()[1]) for free in (a, b)]
    two = str(tmp_path / "two")
    env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=ports[0], NEXT_PORT=ports[1], WORLD_SIZE="2", TORCHELASTIC_RUN_ID="test")
    second = python("-c", SECOND_OF_TWO, *NET, *RUN, "--data", text, *flags, "--out", two, **env, RANK="1", LOCAL_RANK="1", PYTHONPATH=str(HERE))
    assert go(text, tmp_path / "one", *flags) == 0            # meanwhile; the first of the two is this process, which need not begin
    assert " processes" not in capsys.readouterr().out
    for name, value in dict(env, RANK="0", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    (late := threading.Timer(300, second.kill)).start()       # without which the first would wait for it
    assert go(text, two, *flags) == 143 and train.load_checkpoint(two + "/ckpt.pt")["step"] == 3
    monkeypatch.setenv("MASTER_PORT", ports[1])
    assert train.main(["--resume", "--device", "cpu", "--threads", "1", "--out", two]) == 0
    quiet, wrong = second.communicate()
    late.cancel()
    assert second.returncode == 0, wrong
    said = capsys.readouterr().out
    assert "2 processes" in said and "done: atlas" in said
    assert not [line for line in quiet.splitlines() if not line.startswith("[Gloo]")]             # torch 2.10 tells of connections
    one, two = rows(tmp_path / "one", "step", "loss", "val", "grad_norm"), rows(tmp_path / "two", "step", "loss", "val", "grad_norm")
    for a, b in zip(one, two, strict=True):
        assert [float(x or 0) for x in a] == pytest.approx([float(x or 0) for x in b], rel=2e-3)


def test_a_signal_that_two_processes_have_had_is_one_signal(monkeypatch):
    """Ctrl-C at a terminal reaches all; added up it is another number, and another exit code."""
    def all_reduce(number, op=torch.distributed.ReduceOp.SUM):
        number.copy_(number.clamp(min=15) if op == torch.distributed.ReduceOp.MAX else number + 15)
    monkeypatch.setattr(machine, "processes", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert [machine.greatest(number, CPU) for number in (0, 15)] == [15, 15]


def test_the_other_processes_have_dropout_of_their_own(tmp_path, monkeypatch):
    """The same masks in each step, or after --resume others than a run that was not stopped has had."""
    seeds, tc = [], train.TrainConfig(steps=4, warmup=0, eval_every=4, out=str(tmp_path))
    monkeypatch.setattr(train, "rank", lambda: 1)
    monkeypatch.setattr(train, "train_step", lambda *_: seeds.append(torch.initial_seed()) or (1.0, 1.0))
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: 1.0)
    for first in (0, 2):
        run = dict(step=first, best=math.inf, seconds=0.0)
        train.train(torch.nn.Linear(1, 1), [], run, tc, (None, None), CPU, torch.float32)
    assert len(set(seeds[:4])) == 4 and tc.seed not in seeds and seeds[4:] == seeds[2:4]


def test_windows_too_short_to_read_what_was_written(capsys):
    """Newton-Schulz once in 128 tokens on windows of 128 trains a memory that never answers with what it saw, and nothing else would tell."""
    for flags, warned in (((), False), (("--seq-len", 8), True), (("--seq-len", 8, "--no-muon"), False),
                          (("--seq-len", 8, "--model", "transformer"), False), (("--seq-len", 1, "--muon-every", 1), False),
                          (("--seq-len", 8, "--wiring", "mag"), False), (("--seq-len", 8, "--wiring", "mac"), True)):         # mag: and 4 of its own
        tc, config = train.settings(train.parse([*NET, *RUN, *map(str, flags)]))
        train.warn({}, config, tc.seq_len)
        assert ("lower --muon-every" in capsys.readouterr().out) == warned


def test_processes_share_the_passes_of_a_step(capsys, monkeypatch, tmp_path):
    """Two processes cannot share three passes, nor end together by clocks of their own."""
    for name, value in dict(WORLD_SIZE="2", RANK="0", TORCHELASTIC_RUN_ID="test").items():
        monkeypatch.setenv(name, value)
    flags = ["--device", "cpu", "--out", tmp_path / "out"]
    assert "--grad-accum 2" in refused(capsys, train.main, *flags, "--grad-accum", 3, "--steps", 2)
    assert "--minutes 0" in refused(capsys, train.main, *flags, "--grad-accum", 2)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_stops_before_the_update(fault, text, tmp_path, monkeypatch, capsys):
    """One NaN step turns all weights to NaN; here it comes on a step (6) that is neither logged nor validated."""
    real, calls = models.LM.loss, []

    def loss(self, x, y):
        calls.append(1)
        value = real(self, x, y)
        if len(calls) != 5 + 1:
            return value
        return value * float("inf") if fault == "loss" else value + (self.norm.weight.sum() * 0).sqrt()
    monkeypatch.setattr(models.LM, "loss", loss)
    said = refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", tmp_path / "out", "--steps", 9,
                   "--log-every", 100, code=1)
    assert "step 6" in said and ("loss inf" in said if fault == "loss" else "in norm.weight" in said) and "lower --lr, --muon-lr or --weight-decay" in said
    assert "loss nan" not in said
    ckpt = train.load_checkpoint(tmp_path / "out" / "ckpt.pt")
    assert ckpt["step"] == 4 and all(t.isfinite().all() for t in ckpt["model"].values())


def test_a_first_gradient_that_is_too_large(text, tmp_path, capsys, monkeypatch):
    """No rate of learning has had a part in it; and all its numbers are finite, but not their norm."""
    steep = lambda p: 1e30 * (p - p.detach()).sum()
    monkeypatch.setattr(models.LM, "loss", lambda self, x, y, real=models.LM.loss: real(self, x, y) + steep(self.norm.weight))
    said = refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", tmp_path / "out", code=1)
    assert "step 1: " in said and "norm inf: not finite, first in the norm" in said and "lower --max-step" in said


def test_weights_that_are_not_finite_are_never_saved(text, tmp_path, capsys):
    """The update itself can make them infinite, after the guard; an absurd --lr must end with the guard's message."""
    model = tiny_model()
    model.norm.weight.data[3] = float("inf")
    with pytest.raises(machine.Halt, match="step 7.*not finite"):
        train.save_checkpoint(tmp_path / "ckpt.pt", dict(step=7), model, [])
    assert not list(tmp_path.iterdir())
    assert "not finite" in refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", tmp_path / "out",
                                   "--steps", 9, "--lr", "1e30", code=1)
    assert not (tmp_path / "out" / "ckpt.pt").exists()


def test_a_run_outlives_its_reader(monkeypatch):
    """Ctrl-C ends `| tee` as well: a run that then fails to say that it saves does not save."""
    def closed(*args, **kwargs):
        raise BrokenPipeError
    silenced = []
    monkeypatch.setattr("builtins.print", closed)
    monkeypatch.setattr(os, "write", closed)
    monkeypatch.setattr(machine, "nobody_reads", lambda: silenced.append(True))
    machine.say("a line")
    machine.tell("a line")
    stop = machine.StopOnSignal()
    stop.signal = 0
    stop.note(signal.SIGINT, None)
    assert silenced == [True] and stop.signal == signal.SIGINT


def test_programs_outlive_the_reader_of_their_messages(text, trained, tmp_path, monkeypatch, capsys):
    """`2>&1 | head -1`: no file of tokens, and an exit code of 0 for a text that was not written; `2>&-`: messages among the text."""
    speak = ["--ckpt", str(trained), "--prompt", "t", "--tokens", "3", "--device", "cpu"]
    shut = ["sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, str(HERE / "sample.py"), *speak]
    said = subprocess.run(shut, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True).stdout
    closed, gone = os.pipe()
    os.close(closed)
    stderr = open(gone, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        print("a message", file=stderr)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert data.main(["--data", str(text), "--tokenizer", "byte", "--out", str(tmp_path / "tokens")]) == 0
    assert (tmp_path / "tokens" / "train.bin").exists()
    capsys.readouterr()
    assert sample.main(speak) == 0 and capsys.readouterr().out == said and len(said) == 5
    with pytest.raises(BrokenPipeError):                      # of what it has not written
        stderr.close()


def stdout_is_full(monkeypatch):
    real = print

    def full(*args, file=None, **how):
        if file is None and args:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args, file=file, **how)
    monkeypatch.setattr("builtins.print", full)


def test_a_full_disk_for_what_is_said(monkeypatch, capsys):
    """A table that went nowhere, and exit code 0. What is said next goes nowhere, too, but what is computed goes on, and is saved."""
    done, nowhere = [], []
    stdout_is_full(monkeypatch)
    monkeypatch.setattr(machine, "nobody_reads", lambda: nowhere.append(True))
    for code in (0, 130):
        assert machine.exit_code(lambda: machine.say("a table") or done.append(True) or code) == (code or 1)
        assert capsys.readouterr().err == "error: stdout took no more of what was said ([Errno 28] No space left on device); files that were saved are intact\n"
    assert done == nowhere == [True, True]
    assert machine.exit_code(lambda: 0) == 0                    # of another task it is no fault


def test_a_second_ctrl_c_while_saving_is_no_full_disk(tmp_path, monkeypatch):
    """torch's writer makes a RuntimeError of it: `disk full?`, and exit code 1."""
    def save(ckpt, file):
        try:
            raise KeyboardInterrupt(signal.SIGTERM)
        except KeyboardInterrupt:
            try:
                raise ValueError
            except ValueError:
                raise RuntimeError("unexpected pos 64 vs 0")
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train.save_checkpoint(tmp_path / "ckpt.pt", dict(step=1), tiny_model(), [])
    assert stopped.value.args == (signal.SIGTERM,)


@pytest.mark.parametrize("preset, grows", [("transformer", True), ("dot", True), ("swa", False), ("omeganet", False)])
def test_where_each_token_costs_more_than_the_last_the_last_pass_ends_earlier(preset, grows, monkeypatch, capsys):
    """A transformer on a text of ten megabytes would validate for days; the figures must say of how much they are, and be of that."""
    model, tokenizer = tiny_model(preset), data.Tokenizer("char", [c.encode() for c in "abcdefghij\u00e9"])
    ids = np.where(np.arange(200) < 61, np.arange(200) % 10, 10)                 # at first a byte a token, then two
    monkeypatch.setattr(train, "LONGEST", 30)
    loss = train.report(model, tokenizer, ids, 16, 2)
    said = capsys.readouterr().out.splitlines()
    part = ids[:61] if grows else ids
    assert ("first 61 tokens" in said[1]) == grows and f"{train.evaluate(model, part, 16, 2, carry=True):.4f} nats" in said[1]
    assert f"{loss:.4f} nats" in said[0] and loss == train.evaluate(model, ids, 16, 2)
    for line, bytes_a_token in zip(said, (338 / 199, 1 if grows else 338 / 199)):
        token, byte = (float(re.search(rf"([\d.]+) bits/{of}", line)[1]) for of in ("token", "byte"))
        assert token / byte == pytest.approx(bytes_a_token, rel=1e-3)


def test_more_streams_than_tokens():
    """--batch-size above the length of the validation split: whole, and none of the run before it is lost."""
    assert math.isfinite(train.evaluate(tiny_model(), np.arange(5), 16, 8, carry=True))


def test_a_nan_validation_is_never_the_best(text, tmp_path, monkeypatch):
    """`not (val > best)` would take it, and every later and better one would lose to it."""
    values = iter([2.0, float("nan"), 3.0] + [1.0] * 9)
    monkeypatch.setattr(train, "evaluate", lambda *a, **k: next(values))
    assert go(text, tmp_path / "out", "--steps", 3, "--eval-every", 1) == 0
    assert train.load_checkpoint(tmp_path / "out" / "best.pt")["step"] == 1


@pytest.mark.parametrize("stage", ["save", "fsync", "replace"])
def test_a_failed_save_keeps_the_checkpoint_before_it(stage, copy, monkeypatch, capsys, tmp_path):
    """A full disk or a crash at any point of saving must leave the old file as it was, and no half file beside it."""
    ckpt = train.load_checkpoint(copy / "ckpt.pt")
    model, _ = train.rebuild(ckpt)
    before = contents(copy)
    (copy / f"ckpt.pt.{os.getpid()}.tmp").write_bytes(b"left by a process that was killed, of the same number")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(state, file):
        file.write(b"PK half of a file")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 832 vs 726\nmore")
    with monkeypatch.context() as patch:
        patch.setattr(torch if stage == "save" else os, stage, half if stage == "save" else full)
        with pytest.raises(machine.Halt, match="cannot write.*intact"):
            train.save_checkpoint(copy / "ckpt.pt", dict(step=1), model, [])
    assert contents(copy) == before


def test_two_runs_with_one_folder_save_whole_checkpoints(copy, monkeypatch):
    """One temporary file for both: the first to end renames what the other has half written."""
    path, save, pids = copy / "ckpt.pt", torch.save, [1, 2]
    ckpt = train.load_checkpoint(path)
    model, _ = train.rebuild(ckpt)

    def meanwhile(state, file):
        if pids:
            train.save_checkpoint(path, dict(ckpt, step=2), model, [])
        save(state, file)
    monkeypatch.setattr(os, "getpid", lambda: pids.pop(0))
    monkeypatch.setattr(torch, "save", meanwhile)
    train.save_checkpoint(path, dict(ckpt, step=1), model, [])
    assert train.load_checkpoint(path)["step"] == 1 and not list(copy.glob("*.tmp"))


def test_one_run_a_folder(text, tmp_path, monkeypatch, capsys):
    """Of two runs with one --out each would save over the other's best weights, and both call them theirs."""
    fcntl, out = pytest.importorskip("fcntl"), tmp_path / "out"
    out.mkdir()
    (out / "best.pt.123.tmp").write_bytes(b"left by a run that was killed")
    (out / "log.csv.123.tmp").write_bytes(b"likewise")
    (out / "best.pt.mine.tmp").write_bytes(b"not a run's")
    with machine.claim(out) as alone:
        assert alone
        before = contents(out)
        assert "another run" in refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", out, "--steps", 1) and contents(out) == before
        assert "another run" in refused(capsys, data.main, "--data", text, "--tokenizer", "byte", "--out", out) and contents(out) == before
    train.clear_away(out)
    assert [p.name for p in out.iterdir()] == ["best.pt.mine.tmp"]
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))       # as some network disks
    with machine.claim(out) as alone, machine.claim(out):
        assert not alone
    monkeypatch.setitem(sys.modules, "fcntl", None)           # as Windows
    with machine.claim(out) as alone, machine.claim(out):
        assert not alone


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_killed_run_left_goes_where_no_other_can_be_writing_it(alone, text, tmp_path, monkeypatch):
    """Without locks it may be another run's that is saving just now."""
    left = tmp_path / "best.pt.123.tmp"
    left.write_bytes(b"half of a checkpoint")
    monkeypatch.setattr(train, "claim", lambda out: nullcontext(alone))
    assert go(text, tmp_path, "--steps", 1) == 0 and left.exists() == (not alone)


@pytest.mark.parametrize("main", [sample.main, eval.main])
def test_out_of_memory_elsewhere(main, trained, monkeypatch, capsys):
    """A long prompt, or windows that are too long, must not end in a traceback."""
    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    monkeypatch.setattr(models.LM, "forward", full)
    assert main(["--ckpt", str(trained), "--device", "cpu"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("error: out of memory") and not any("Traceback" in line for line in err)


@pytest.mark.parametrize("fault", [torch.distributed.DistBackendError("no more"), RuntimeError("pair.cc:547] Connection closed by peer")])
def test_another_process_has_ended(fault, monkeypatch, capsys):
    """Beside the one line of the process that has failed, twenty of the one that waited for it."""
    def wait():
        raise fault
    with pytest.raises(RuntimeError):
        machine.exit_code(wait)
    monkeypatch.setattr(machine, "processes", lambda: 2)
    assert machine.exit_code(wait) == 1 and "another process has ended" in capsys.readouterr().err


def test_closed_streams_are_no_files(tmp_path, monkeypatch):
    """`train.py <&- >&- 2>&-`: the log would be number 2, and a message on stderr end in it."""
    kept, got = os.dup(0), []

    def task():
        with open(tmp_path / "log.csv", "w") as file:
            got.append(file.fileno())
    os.close(0)
    try:
        assert machine.exit_code(task) == 0 and got[0] > 2 and os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    numbers, closed = iter([2, 5]), []                        # stderr alone
    monkeypatch.setattr(os, "open", lambda *_: next(numbers))
    monkeypatch.setattr(os, "close", closed.append)
    assert machine.exit_code(lambda: 0) == 0 and closed == [5]


def test_a_model_that_has_diverged(text, tmp_path, capsys):
    """Its weights are finite and what it says is not: a traceback of torch.multinomial's, or `done`."""
    out = tmp_path / "out"
    assert "lower --lr" in refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", out, "--steps", 1, "--lr", 1e30, code=1)
    assert sample.main(["--ckpt", str(out), "--tokens", "3", "--device", "cpu"]) == 2
    assert "has diverged" in capsys.readouterr().err.splitlines()[-1]


def test_empty_names_are_not_ignored(text, trained, tmp_path, capsys, monkeypatch):
    """A variable of the shell that is not set must not choose something else in silence."""
    monkeypatch.chdir(tmp_path)
    run = [*NET, *RUN, "--data", text, "--steps", 1]
    for main, *flags in ((train.main, *run, "--out", ""), (train.main, *run, "--init", ""), (sample.main, "--ckpt", trained, "--prompt-file", ""),
                         (eval.main, "--ckpt", trained, "--data", ""), (bench.main, "--quick", "--json", "")):
        refused(capsys, main, *flags, "--device", "cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("main, flags", [(train.main, [*NET, *RUN]), (eval.main, ["--task", "mqar"]), (bench.main, [])])
def test_more_threads_than_can_be_started(main, flags, capsys):
    """Millions of them end in a segmentation fault."""
    assert "at most 1024" in refused(capsys, main, *flags, "--threads", "5000000")


def test_how_many_threads_are_too_many(monkeypatch):
    """As many as a large machine has cores are not."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for n in (0, 2, 1024):
        machine.set_threads(n)
    assert "1025" in user_error(machine.set_threads, 1025) and asked == [2, 1024]


def test_out_of_memory_names_the_knobs_and_leaves_the_earlier_run_alone(copy, text, monkeypatch, capsys):
    """A CUDA traceback of forty lines does not say which flag to lower; an earlier run must not be moved in vain."""
    before = contents(copy)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    monkeypatch.setattr(models.LM, "loss", full)
    said = refused(capsys, train.main, *NET, *RUN, "--data", text, "--out", copy, code=1)
    assert all(knob in said for knob in ("--batch-size", "--seq-len", "--chunk")) and contents(copy) == before


def fail_first(monkeypatch, fault):
    """The first call of LM.loss raises `fault`; compiling is left out."""
    real, calls = models.LM.loss, []

    def loss(self, x, y):
        calls.append(1)
        value = real(self, x, y)
        if len(calls) == 1 and fault:
            raise fault
        return value
    monkeypatch.setattr(models.LM, "compile_memory", lambda self: None, raising=False)
    monkeypatch.setattr(models.LM, "loss", loss)


def test_compile_or_no_compiler_the_run_is_the_same(text, tmp_path, monkeypatch, capsys):
    """torch.compile fails at the first call, not when asked for; its trial may leave no gradients or random numbers."""
    go(text, tmp_path / "eager", "--steps", 3, "--dropout", "0.2")
    for name, fault in (("works", None), ("fails", no_compiler())):
        with monkeypatch.context() as patch:
            fail_first(patch, fault)
            try:
                assert go(text, tmp_path / name, "--steps", 3, "--dropout", "0.2", "--compile") == 0
            finally:
                torch.compiler.set_stance("default")
        assert capsys.readouterr().err.count("warning: torch.compile failed") == (name == "fails")
        assert same(*(train.load_checkpoint(tmp_path / n)["model"] for n in ("eager", name)))


def test_remat_is_the_same_run(text, tmp_path, monkeypatch):
    """A block computed once more in backward draws the same dropout, and is asked for by a flag."""
    calls, remat = [], models.checkpoint
    monkeypatch.setattr(models, "checkpoint", lambda *args, **more: calls.append(args) or remat(*args, **more))
    for name, flags in (("keep", []), ("remat", ["--remat"])):
        assert go(text, tmp_path / name, "--steps", 2, "--dropout", "0.2", *flags) == 0
        assert bool(calls) == bool(flags)
    assert same(*(train.load_checkpoint(tmp_path / n)["model"] for n in ("keep", "remat")))


@pytest.mark.parametrize("flags", [[], ["--compile"]])
def test_an_error_of_ours_is_not_hidden(flags, text, tmp_path, monkeypatch):
    """A catch-all that prints one line would also swallow the traceback of a bug."""
    fail_first(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        go(text, tmp_path / "out", "--steps", 1, *flags)


def test_tune_cpu_is_silent_without_glibc(monkeypatch, capfd):
    """macOS and Windows have no mallopt."""
    class NoLibc:
        def __init__(self, name):
            raise OSError
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    machine.tune_cpu()
    monkeypatch.setattr(machine.ctypes, "CDLL", NoLibc)
    machine.tune_cpu()
    assert capfd.readouterr() == ("", "")
    told = []                                                 # and where there is one, it hears of all three habits
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: argparse.Namespace(mallopt=lambda *how: told.append(how)))
    machine.tune_cpu()
    assert told == [(1, 0), (-4, 0), (-1, -1)]


@pytest.mark.parametrize("files, cpus", [
    ({}, math.inf), ({"cpu.max": "max 100000"}, math.inf), ({"cpu.max": "250000 100000"}, 2), ({"cpu.max": "50000 100000"}, 1),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4)])
def test_no_more_threads_than_a_container_may_run(files, cpus, tmp_path, monkeypatch):
    """torch starts one for each core of the host; on two cores sixteen make a step take three times as long as two."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert machine.cpu_quota(tmp_path) == cpus
    monkeypatch.setattr(machine, "cpu_quota", lambda: cpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    machine.tune_cpu()
    assert threads == ([cpus] if cpus < 3 else [])


def test_peak_memory_is_of_this_program(monkeypatch):
    """On Linux getrusage also tells of the one that started it, if that was larger."""
    def mebibytes():
        return float(machine.peak_memory(CPU).removesuffix(" MiB").replace(",", ""))
    first, real = mebibytes(), Path.read_text
    assert first == pytest.approx(eval.resident() / 2**20, rel=0.9) and mebibytes() >= first
    monkeypatch.setattr(Path, "read_text", lambda path, *how: "VmHWM:\t  2048 kB\n" if str(path) == "/proc/self/status" else real(path, *how))
    assert mebibytes() == 2

    def no_proc(*_):
        raise FileNotFoundError
    monkeypatch.setattr(Path, "read_text", no_proc)
    assert mebibytes() > 2
    real, how = machine.most_resident(), machine.sys.platform
    monkeypatch.setattr(machine.sys, "platform", "linux" if how == "darwin" else "darwin")         # where it is told in bytes, not in KiB
    assert machine.most_resident() == pytest.approx(real * 1024 if how == "darwin" else real / 1024, rel=0.1)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_gpu_script_makes_its_folder(tmp_path):
    """An hour on a GPU whose logs go nowhere."""
    (tmp_path / "python3").write_text("#!/bin/sh\necho 1\n")                     # MiB of the GPU, without the time that torch takes to say so
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(["bash", HERE / "results" / "gpu.sh", "-o", tmp_path / "new" / "logs", "none"], capture_output=True, text=True, cwd=HERE,
                          env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert "no part none" in (tmp_path / "new" / "logs" / "gpu-none.log").read_text() and not done.stderr


def test_matmul_is_what_torch_multiplies_with(text, tmp_path, capsys, monkeypatch):
    """--matmul that does nothing."""
    monkeypatch.setattr(bench, "PARTS", dict(rule=(lambda b: None, 1)))
    for matmul in ("medium", "highest"):
        go(text, tmp_path / matmul, "--steps", 1, "--matmul", matmul)
        assert torch.get_float32_matmul_precision() == matmul
    assert bench.main(["--quick", "--part", "rule", "--device", "cpu", "--matmul", "medium"]) == 0
    assert torch.get_float32_matmul_precision() == "medium" and '"matmul": "medium"' in capsys.readouterr().out


AMD, AVX2, INTEL = dict(avx512_f=True, sse4a=True), dict(sse4a=True), dict(avx512_f=True)


@pytest.mark.parametrize("can, exact, best", [(AMD, True, "medium"), (AMD, False, "highest"), (AVX2, True, "highest"), (INTEL, True, "highest"),
                                              ({}, True, "highest")])
def test_matmul_by_itself(can, exact, best, monkeypatch):
    """Products that are not float32's, where nobody asked for them; on an AMD core, half of its speed; single tokens by oneDNN."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can, raising=False)
    monkeypatch.setattr(machine, "exact_products", lambda device: exact)
    cuda, half, seen = torch.device("cuda"), torch.bfloat16, []
    wanted = [(cuda, torch.float32, "highest"), (cuda, half, "high"), (CPU, half, best), (torch.device("mps"), torch.float32, "highest")]
    for device, dtype, want in wanted:
        assert machine.set_matmul("auto", device, dtype) == want == torch.get_float32_matmul_precision()
    record = lambda *_: seen.append(torch.get_float32_matmul_precision())
    monkeypatch.setattr(bench, "PARTS", {name: (record, 1) for name in ("layer", "decode", "peers")})
    monkeypatch.setattr(eval, "text_task", record)
    for flags in ([], ["--matmul", "medium"]):
        assert bench.main(["--quick", "--device", "cpu", *flags]) == 0
    eval.main(["--ckpt", "none", "--device", "cpu"])
    assert seen == [best, "highest", best, "medium", "medium", "medium", best]


def test_no_product_is_one_of_plain_loops(capfd):
    """oneDNN has no kernel that adds a product to a matrix whose rows lie across: a layer of degree 1 took 2.3 times as long."""
    torch.set_float32_matmul_precision("medium")
    tokens = torch.randint(65, (1, 256))
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for preset, more in (("atlas", {}), ("omeganet", {}), ("omeganet", dict(degree=1, expansion=2)), ("titans", dict(memory="gated"))):
            models.build(preset, n_layer=1, **more).loss(tokens, tokens).backward()
    products = [line for line in capfd.readouterr().out.splitlines() if "exec,cpu,matmul" in line]
    if not products:
        pytest.skip("oneDNN has no part in products on this CPU")
    assert not [line for line in products if "matmul,ref" in line]


def test_denormals_are_flushed():
    """On an Intel core the gates' decay over a chunk makes a training step take half as long again."""
    before = torch.tensor(1e-30)
    try:
        if torch.set_flush_denormal(True):                    # else this processor cannot
            torch.set_flush_denormal(False)
            machine.tune_cpu()
            assert (before * 1e-10).item() == 0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("script", [train, sample, bench, eval])
def test_every_program_tunes_the_cpu(script, monkeypatch):
    """A program that leaves it out is only slower, and its figures are not those of train.py."""
    called = []
    for module, name in product({machine, script}, ("tune_cpu", "exit_code")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: called.append(name), raising=False)
    script.main([])
    assert called == ["tune_cpu", "exit_code"]                # before the work


# ---- checkpoints from elsewhere

class Bomb:
    """What a malicious pickle does: run a command while it is loaded."""
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickled(value):
    import pickle
    return pickle.dumps(value)


def test_broken_and_foreign_checkpoints_are_refused_each_in_its_own_words(copy, tmp_path, capsys, recwarn):
    """Raw, these are EOFError '', KeyError '101', a flipped weight that loads silently, or code that runs."""
    good = (copy / "best.pt").read_bytes()
    weight = train.load_checkpoint(copy)["model"]["embed.weight"].numpy().tobytes()
    at = good.index(weight) + len(weight) // 2
    cases = {"missing": None, "empty": b"", "text": b"a text", "pickle": pickled([1]), "half": good[: len(good) // 2],
             "flipped": good[:at] + bytes([good[at] ^ 1]) + good[at + 1:]}
    for name, raw in cases.items():
        if raw is not None:
            (tmp_path / name).write_bytes(raw)
    (tmp_path / "folder").mkdir()
    torch.save({"format": 1, "model": Bomb(tmp_path / "boom")}, tmp_path / "bomb")
    (tmp_path / "pickle bomb").write_bytes(pickled(Bomb(tmp_path / "boom")))
    torch.save({"model": {}, "iter_num": 7}, tmp_path / "nanogpt")
    torch.save({**torch.load(copy / "best.pt", weights_only=True), "format": 99}, tmp_path / "version")
    shutil.make_archive(tmp_path / "zip", "zip", HERE / "data" if (HERE / "data").is_dir() else tmp_path / "folder")
    (tmp_path / "zip.zip").rename(tmp_path / "zip")
    torch.save({"model": {}}, tmp_path / "script")
    with zipfile.ZipFile(tmp_path / "script", "a") as archive:
        archive.writestr(archive.namelist()[0].replace("data.pkl", "constants.pkl"), b"")
    said = {}
    for name in (*cases, "folder", "bomb", "pickle bomb", "nanogpt", "version", "zip", "script"):
        said[name] = refused(capsys, sample.main, "--ckpt", tmp_path / name).replace(str(tmp_path / name), "X")
    assert not (tmp_path / "boom").exists() and not recwarn.list
    distinct = ("missing", "empty", "text", "pickle", "half", "folder", "bomb", "nanogpt", "version")
    assert len({said[name] for name in distinct}) == len(distinct)
    assert "damaged" in said["flipped"] and "refused" in said["bomb"] and "refused" in said["pickle bomb"]
    assert said["zip"] == said["text"] == "error: X is not a checkpoint of train.py, which makes best.pt and ckpt.pt in --out\n"
    for size in (1, 2, 10, 1000, len(good) - 1):
        (tmp_path / "short").write_bytes(good[:size])
        refused(capsys, sample.main, "--ckpt", tmp_path / "short")


def test_resume_from_a_broken_checkpoint_overwrites_nothing(copy, text, capsys):
    """The broken file may still be rescued by its owner."""
    (copy / "ckpt.pt").write_bytes((copy / "ckpt.pt").read_bytes()[:-100])
    before = contents(copy)
    assert "damaged" in refused(capsys, train.main, "--resume", "--out", copy)
    assert "no checkpoint" in refused(capsys, train.main, "--resume", "--out", copy / "none")
    assert contents(copy) == before


@pytest.mark.parametrize("key, value, word", [
    ("config", {"n_layr": 1}, "n_layr"), ("config", {"n_embd": 32}, "does not fit"),
    ("config", {"n_head": 0}, "n-head"), ("tokenizer", "byte", "contradicts")])
def test_a_checkpoint_that_contradicts_itself_is_refused(key, value, word, copy, capsys):
    """Decoding with another vocabulary prints fluent nonsense."""
    raw = torch.load(copy / "best.pt", weights_only=True)
    raw[key] = data.make_tokenizer(value, "").state() if key == "tokenizer" else {**raw[key], **value}
    torch.save(raw, copy / "best.pt")
    said = refused(capsys, sample.main, "--ckpt", copy)
    assert str(copy) in said and word in said


def test_a_checkpoint_holds_plain_types_only(trained):
    """A Path, a dataclass or a numpy number in it could only be loaded by running code."""
    def plain(value):
        if isinstance(value, dict):
            return all(plain(k) and plain(v) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or type(value) in (int, float, str, bool, bytes, torch.Tensor)
    ckpt = train.load_checkpoint(trained)
    ckpt["model"] = dict(ckpt["model"])
    assert plain(ckpt) and ckpt["config"] == asdict(models.Config(**ckpt["config"]))


@pytest.mark.parametrize("where", ["torch.load", "sample", "train --resume", "train --init"])
def test_no_memory_for_a_checkpoint(where, text, copy, monkeypatch, capsys):
    """It was called a file that holds more than weights, or one of another version."""
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes")
    main, *argv = {"train --resume": (train.main, "--resume", "--out", copy, "--steps", 15, "--device", "cpu"),
                   "train --init": (train.main, *NET, *RUN, "--init", copy, "--data", text, "--out", copy / "new")}.get(
                       where, (sample.main, "--ckpt", copy, "--device", "cpu"))
    if where == "torch.load":
        monkeypatch.setattr(torch, "load", full)
    else:
        monkeypatch.setattr(torch.optim.AdamW if "--resume" in where else models.LM, "load_state_dict", full)
    assert "out of memory" in refused(capsys, main, *argv, code=1)


def test_a_checkpoint_that_lacks_a_weight(copy, capsys):
    """torch's first line is a title: `Error(s) in loading state_dict`, and that was all that was said."""
    ckpt = torch.load(copy / "best.pt", weights_only=True)
    del ckpt["model"]["norm.weight"]
    torch.save(ckpt, copy / "best.pt")
    said = refused(capsys, sample.main, "--ckpt", copy, "--device", "cpu")
    assert 'Missing key(s) in state_dict: "norm.weight"' in said and "train again" in said


def test_a_path_that_is_no_path(capsys):
    """A name too long, or in a folder that may not be read, failed before it was opened."""
    assert "no checkpoint" in refused(capsys, sample.main, "--ckpt", "a" * 300, "--device", "cpu")


@pytest.mark.parametrize("key, value", [("optimizers", []), ("rng", {}), ("rng", dict(cpu=torch.zeros(2), cuda=None))])
def test_optimizers_of_another_version(key, value, copy, capsys):
    """A traceback, where weights and settings fit."""
    ckpt = torch.load(copy / "ckpt.pt", weights_only=True)
    torch.save({**ckpt, key: value}, copy / "ckpt.pt")
    said = refused(capsys, train.main, "--resume", "--out", copy, "--steps", 15, "--device", "cpu")
    assert "does not fit this version" in said and "--init" in said


def test_torch_load_is_always_weights_only():
    """One torch.load without weights_only=True, one eval or exec, and a checkpoint can run code."""
    for path in set(HERE.glob("*.py")) - {HERE / "test_all.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name == "torch.load":
                    assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path
                assert name not in ("eval", "exec", "pickle.load", "pickle.loads"), (path, node.lineno)


def test_a_checkpoint_without_one_of_its_parts_is_refused(copy, capsys):
    """Else a KeyError, somewhere in a run."""
    good = torch.load(copy / "best.pt", weights_only=True)
    for key in good:
        torch.save({name: value for name, value in good.items() if name != key}, copy / "best.pt")
        assert ("not written by" if key == "format" else key) in refused(capsys, sample.main, "--ckpt", copy)


# ---- sample.py

def speak(capsys, ckpt, *flags):
    assert sample.main(["--ckpt", str(ckpt), "--device", "cpu", "--tokens", "30", *map(str, flags)]) == 0
    return capsys.readouterr().out


def test_sampling_limits(trained, capsys):
    """temperature 0 divides by zero, top-k 0 indexes nothing, top-k beyond the vocabulary raises, a tiny top-p may
    leave no token."""
    greedy = speak(capsys, trained, "--prompt", "to", "--temperature", 0)
    assert greedy.startswith("to") and len(greedy) == 2 + 30 + 1
    for flags in (["--temperature", 0, "--seed", 5], ["--top-k", 1], ["--top-p", 1e-9], ["--temperature", 1e-44]):
        assert speak(capsys, trained, "--prompt", "to", *flags) == greedy
    free = speak(capsys, trained, "--prompt", "to")
    assert free != greedy and free == speak(capsys, trained, "--prompt", "to", "--top-k", 9999, "--top-p", 1)
    assert free != speak(capsys, trained, "--prompt", "to", "--seed", 2)


def test_two_dashes_are_a_value(trained, capsys):
    """argparse made an empty list of --stop=--: plays are full of them."""
    assert sample.parse(["--stop=--", "--prompt=--"]).stop == "--" and train.parse(["--out=--"]) == dict(out="--")
    assert "--model" in refused(capsys, train.main, "--model=--")


def test_sample_of_a_vocabulary_learned_from_the_text(text, tmp_path, capsys):
    """The checkpoint alone must know the merges, and a prompt of bytes that the text never had must do."""
    assert go(text, tmp_path / "out", "--tokenizer", "bpe", "--bpe-size", 270, "--steps", 1) == 0
    assert "bpe vocabulary of 270" in capsys.readouterr().out
    assert speak(capsys, tmp_path / "out", "--prompt", "\u00e9t\u00e9").startswith("\u00e9t\u00e9")


def test_sample_writes_num_different_texts_of_the_same_prompt(trained, capsys):
    """Each text must begin from the prompt and a fresh state, with random numbers of its own."""
    texts = speak(capsys, trained, "--prompt", "be", "--num", 3).split("---------------\n")
    assert len(texts) == len(set(texts)) == 3 and all(t.startswith("be") and len(t) == 33 for t in texts)
    for seed in (1338, 1339):                                 # the next seed's first text is none of them
        assert speak(capsys, trained, "--prompt", "be", "--seed", seed) not in texts


def test_flags_of_sample_reach_the_model(trained, capsys, monkeypatch):
    """--top-p that is cut to 0.9 writes texts that look well."""
    given = []
    monkeypatch.setattr(sample, "continue_text", lambda model, tokenizer, ids, n, **how: given.append((n, how)) or iter(()))
    speak(capsys, trained, "--top-p", 0.97, "--top-k", 7, "--temperature", 1.3, "--seed", 5, "--tokens", 9)
    (n, how), = given
    assert how.pop("generator").initial_seed() == 5 and (n, how) == (9, dict(temperature=1.3, top_k=7, top_p=0.97))


@pytest.mark.parametrize("argv", ["--temperature -1", "--temperature nan", "--top-k -1", "--top-p 1.1", "--top-p 0",
                                  "--top-p nan", "--tokens -1", "--num 0", "--seed x", "--tmp 1"])
def test_sample_refuses_wrong_values(argv, trained, capsys):
    """A negative temperature inverts the distribution and says nothing."""
    assert argv.split()[0] in refused(capsys, sample.main, "--ckpt", trained, *argv.split())


def test_prompts(trained, tmp_path, capsys, monkeypatch):
    """A letter outside the vocabulary must be named, not dropped; the prompt may come from a file or a pipe."""
    said = refused(capsys, sample.main, "--ckpt", trained, "--prompt", "to \u00e9", "--device", "cpu")
    assert "\u00e9" in said and capsys.readouterr().out == ""
    (tmp_path / "p.txt").write_text("that\nis")
    expect = speak(capsys, trained, "--prompt", "that\nis")
    assert speak(capsys, trained, "--prompt-file", tmp_path / "p.txt") == expect
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfthat\nis")                # a byte order mark is no letter
    for flags, name in product((["--prompt", "-"], ["--prompt-file", "-"]), ("p.txt", "mark.txt")):
        with open(tmp_path / name) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert speak(capsys, trained, *flags) == expect
    monkeypatch.setattr(sys, "stdin", None)                   # as `sample.py <&-` has it
    assert "stdin is closed" in refused(capsys, sample.main, "--ckpt", trained, "--prompt", "-")
    assert speak(capsys, trained, "--prompt-file", tmp_path / "mark.txt") == expect
    (tmp_path / "bad").write_bytes(b"to \xff")
    assert "UTF-8" in refused(capsys, sample.main, "--ckpt", trained, "--prompt-file", tmp_path / "bad")
    assert "none'" in refused(capsys, sample.main, "--ckpt", trained, "--prompt-file", tmp_path / "none")
    assert "prompt '': " in refused(capsys, sample.main, "--ckpt", trained, "--prompt-file", "")
    assert "--flag=-VALUE" in refused(capsys, sample.main, "--ckpt", trained, "--prompt", "-that")
    assert "--flag=-VALUE" not in refused(capsys, sample.main, "--ckpt", trained, "--widnow", "3")
    assert speak(capsys, trained) and len(speak(capsys, trained, "--tokens", 0)) == 1


def test_a_full_disk_for_a_sample(trained, monkeypatch, capsys):
    """`No space left on device`, of which file?"""
    stdout_is_full(monkeypatch)
    assert sample.main(["--ckpt", str(trained), "--device", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: stdout took no more of the text (No space left on device)"


def test_line_ends_of_a_prompt_are_kept(tmp_path, monkeypatch):
    """A model of a text of Windows' lines, asked to go on from lines that it has never read."""
    (tmp_path / "p.txt").write_bytes(b"a\r\nb\rc\n")
    with open(tmp_path / "p.txt") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        for name in (str(tmp_path / "p.txt"), "-"):
            assert sample.read_prompt(sample.parse(["--prompt-file", name])) == "a\r\nb\rc\n"


def test_empty_prompt_without_a_newline_in_the_vocabulary():
    """There is always something to start from."""
    assert list(train.encode_prompt(data.make_tokenizer("char", "ab"), "")) == [0]
    assert list(train.encode_prompt(data.make_tokenizer("char", "a\nb"), "")) == [0]
    assert list(train.encode_prompt(data.make_tokenizer("byte", ""), "")) == [10]


def test_a_stop_text_ends_the_sample_wherever_the_pieces_break():
    """Searched piece by piece, a stop text across two tokens is missed; its beginning, once printed, stays."""
    whole = "one two three THE END four THE ENDS"
    for n in (1, 2, 3, 7, 40):
        pieces = [whole[i: i + n] for i in range(0, len(whole), n)]
        assert "".join(sample.until("THE END", pieces)) == "one two three "
        assert "".join(sample.until("", pieces)) == "".join(sample.until("five", pieces)) == whole
    assert all(list(sample.until(stop, ["a", "b"]))[:2] == ["a", "b"] for stop in ("", "xy"))


def test_text_is_written_as_it_is_generated_and_ctrl_c_keeps_it(trained, capsys, monkeypatch):
    """Sampling that collects its text, or does not flush, shows nothing for minutes and loses it all at Ctrl-C."""
    arrived = io.BytesIO()

    def pieces(*_, **__):
        assert arrived.getvalue() == b"to be "
        yield "so "
        assert arrived.getvalue() == b"to be so "
        yield "far"
        raise KeyboardInterrupt
    monkeypatch.setattr(sample, "continue_text", pieces)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(arrived, encoding="utf-8"))
    assert sample.main(["--ckpt", str(trained), "--prompt", "to be ", "--device", "cpu"]) == 130
    assert arrived.getvalue() == b"to be so far" and "Traceback" not in capsys.readouterr().err


def test_half_a_character_is_never_written():
    """With bytes for tokens a letter beyond ASCII comes in parts; printed one by one they are question marks."""
    tokenizer = data.make_tokenizer("byte", "")
    ids = tokenizer.encode("h\u00e9 \u4e16\U0001f642")

    class Model(torch.nn.Linear):
        def generate(self, tokens, n, **_):
            yield from (torch.tensor([i]) for i in ids[:n])
    pieces = list(train.continue_text(Model(1, 1), tokenizer, [10], len(ids)))
    assert "".join(pieces) == "h\u00e9 \u4e16\U0001f642" and not any("\ufffd" in p for p in pieces) and len(pieces) > 4
    assert "".join(train.continue_text(Model(1, 1), tokenizer, [10], 2)) == "h\ufffd"             # cut off in the middle


def python(*argv, **more):
    return subprocess.Popen([sys.executable, *map(str, argv)], text=True, encoding="utf-8", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **more})


def test_scripts_from_another_folder_to_an_ascii_pipe(text, trained, tmp_path, monkeypatch):
    """What only a process shows: imports of neighbours from elsewhere, exit codes, stdout that can only do ASCII."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "caf\u00e9.txt").write_text(text.read_text().replace("e", "\u00e9"), encoding="utf-8")
    out = tmp_path / "with space \u00e9"
    run = python(HERE / "train.py", *NET, *RUN, "--steps", 2, "--data", tmp_path / "caf\u00e9.txt", "--out", out,
                 PYTHONIOENCODING="ascii")
    shutil.copytree(trained, tmp_path / "another \u00e9")
    write = python(HERE / "sample.py", "--ckpt", tmp_path / "another \u00e9", "--tokens", 100000, "--device", "cpu", PYTHONIOENCODING="ascii")
    assert write.stdout.read(1)
    write.stdout.close()                                      # as `| head -c 1` does
    assert write.wait(timeout=300) == 0 and write.stderr.read().count("\n") == 1
    said, err = run.communicate(timeout=300)
    assert run.returncode == 0 and "done: atlas" in said and err == ""


# a bench that measures nothing, when it is told to
WAITING_BENCH = """
import contextlib, select, sys, torch, bench
def rule(kit):
    select.select([sys.stdin], [], [], 20)                    # 20 s, if who would tell it waits for a line that is held back
    kit.keep("rule", "a", dict(median_s=1.0, spread_s=0.0), 5)
bench.PARTS = dict(rule=(rule, 1))
torch.compiler.set_stance = contextlib.nullcontext            # for which torch would import its compiler, for a second
sys.exit(bench.main())
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, of Linux")
def test_what_stdout_does_not_take(trained, tmp_path):
    """A bench kept its lines until 8 KB of them were there, and lost its figures when `| head` had seen enough; Python's own words at exit."""
    file = tmp_path / "b.json"
    run = python("-c", WAITING_BENCH, "--quick", "--part", "rule", "--device", "cpu", "--json", file, PYTHONPATH=str(HERE))
    with open("/dev/full", "w") as full:
        argv = [sys.executable, HERE / "sample.py", "--ckpt", trained, "--tokens", "0", "--device", "cpu"]
        write = subprocess.Popen(argv, stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert run.stdout.readline().startswith("device") and not file.read_text()                   # it has only begun
    run.stdout.close()
    run.stdin.close()
    assert run.wait(timeout=300) == 0 and run.stderr.read() == "" and json.loads(file.read_text())["records"]
    said = write.communicate(timeout=300)[1]
    assert write.returncode == 1 and "No space left" in said and "Exception" not in said


def test_importing_the_scripts_does_nothing(monkeypatch, capfd):
    """An import that sets seeds, handlers or threads, prints or downloads makes the scripts useless as modules."""
    def state():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_float32_matmul_precision(), *handlers

    no_network(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("the GPU was asked"))
    for file in HERE.glob("*.py"):                            # as if none had been imported yet
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    torch.set_num_threads(3)                                  # no number that a script may set
    torch.rand(3)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    before = state()
    try:
        for name in ("train", "sample"):
            importlib.import_module(name)
        assert state() == before and capfd.readouterr() == ("", "")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for file in HERE.glob("*.py"):
            monkeypatch.delitem(sys.modules, file.stem, raising=False)


def test_writing_is_without_dropout():
    """A sample of a model with holes in it."""
    model, tokenizer = tiny_model(dropout=0.9).train(), data.make_tokenizer("char", "abcdefghijklmnopqrst")
    a, b = ("".join(train.continue_text(model.train(), tokenizer, [3], 20, temperature=0)) for _ in range(2))
    assert a == b and len(a) == 20


def test_a_sample_with_letters_that_the_terminal_has_not(trained, monkeypatch):
    """One such letter, and a long text ends in a UnicodeEncodeError."""
    arrived = io.BytesIO()
    monkeypatch.setattr(sample, "continue_text", lambda *_, **__: iter(["caf\u00e9"]))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(arrived, encoding="ascii"))
    assert sample.main(["--ckpt", str(trained), "--device", "cpu"]) == 0
    assert arrived.getvalue().split() == [b"caf?"]


# ----------------------------------------------------------------------------------------------------------------
# bench.py and eval.py

def a_bench(**more):
    return bench.Bench(**{**dict(device=CPU, dtype=torch.float32, compile=False, quick=True, models=["transformer", "atlas"]), **more})


# ---- bench.py: what it measures with

@pytest.mark.parametrize("kind, loss, chunk, muon_every, momentum", [
    ("linear", "l2", 16, 0, False), ("mlp", "l2", 16, 0, True), ("mlp", "l2", 32, 0, False), ("gated", "l2", 16, 0, True),
    ("mlp", "l2", 16, 16, True), ("mlp", "l2", 16, 4, True), ("gated", "l2", 32, 8, True), ("mlp", "l2", 16, 1, False),
    ("gated", "l2", 32, 1, False), ("linear", "dot", 16, 1, False)])
def test_rule_flops_is_what_omega_does(kind, loss, chunk, muon_every, momentum):
    """A formula that flatters, or leaves a product out. It is exact for a window of 9: with most others omega adds idle pairs."""
    rule, D, hidden, H, T = Rule(kind, loss, 9, chunk, muon_every), 24, 48, 2, 64
    q, k, v = (torch.randn(1, H, T, D, requires_grad=True) for _ in range(3))
    keep, step, theta = (torch.rand(1, H, T, requires_grad=True) for _ in range(3))
    gates = Gates(keep, step, theta if momentum else None, torch.rand(1, H, T, 9, requires_grad=True))
    M0 = [torch.randn(H, *s, requires_grad=True) for s in memory.shapes(kind, D, hidden, D)]
    phi = Features("none", D)
    with FlopCounterMode(display=False) as counter:
        y, state = omega_module.omega(rule, phi, q, k, v, gates, start(rule, phi, M0, 1, momentum=momentum))
    formula, forward = H * bench.rule_flops(rule, D, D, hidden, T, momentum), counter.get_total_flops()
    assert formula == forward
    with FlopCounterMode(display=False) as counter:
        (y.sum() + sum(w.sum() for w in state.W)).backward()
    assert 0.75 * 2 * forward < counter.get_total_flops() < 1.3 * 2 * forward            # the gradient of NS takes 1.5x; some is done again


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("m, n", [(8, 12), (12, 8), (8, 24)])
def test_ns_flops_is_what_newton_schulz_does(m, n, gram):
    """Of matrices that are nearly square, or where Gram matrices are not allowed, the formula was never compared."""
    with FlopCounterMode(display=False) as counter:
        muon.orthogonalize([randn(1, m, n)], 5, "muon", False, None, gram)
    assert bench.ns_flops(m, n, 5, gram) == counter.get_total_flops()


def test_race_leaves_time_for_its_rounds(capsys, monkeypatch):
    """A contestant taken in because the calls before it are done, though three rounds of all no longer fit."""
    monkeypatch.setattr(gc, "collect", lambda: None)          # as below: test_rubbish_is_collected_before_the_rounds
    log = []
    monkeypatch.setattr(bench, "clock", lambda run, *_: run() or 1.0)
    monkeypatch.setattr(bench, "now", lambda device: float(len(log)))
    times = bench.race({name: lambda: log.append(1) for name in "abcd"}, 9, CPU, must=2)
    assert list(times) == ["a", "b"] and capsys.readouterr().out == "no time for c, d\n"          # 4 calls done, 3 rounds of 2 to come
    log.clear()
    assert list(bench.race({name: lambda: log.append(1) for name in "abcd"}, 10, CPU, must=2)) == ["a", "b", "c"]


def test_step_flops_of_a_transformer():
    """Catches attention that is not counted (fused kernels are not, on a CPU): 6 N T + 12 L T^2 width, as everybody has it."""
    config, T = models.Config(**{**models.PRESETS["transformer"], "n_layer": 3, "n_embd": 32, "n_head": 2}), 48
    weights = sum(m.weight.numel() for m in models.LM(config).modules() if isinstance(m, torch.nn.Linear))
    assert bench.step_flops(config, T, CPU) == 6 * weights * T + 12 * config.n_layer * T * T * config.n_embd


@pytest.mark.parametrize("preset", ["titans", "linear"])
def test_step_flops_are_those_of_any_device(preset):
    """Elsewhere than on a CPU the recurrence of P is a product of c x c matrices: a tenth of titans' step, which a compiled GPU does not take."""
    config, recur = replace(small(preset).config, chunk=16, muon_every=16), omega_module.recur
    assert bench.step_flops(config, 32, torch.device("meta")) == bench.step_flops(config, 32, CPU) and omega_module.recur is recur


def test_peak_bytes():
    """Catches a peak that forgets what was freed on the way, or that counts what was there before."""
    before = torch.ones(1 << 18)

    def run():
        a = before + 1                                        # 1 MiB
        b = a + 1                                             # 2 MiB
        del a
        c = b + 1                                             # 2 MiB again
        return c
    run()
    assert 2 * 2**20 <= bench.peak_bytes(run, CPU) < 2.1 * 2**20


def test_race_takes_turns_and_drops_who_cannot_run(capsys, monkeypatch):
    """A busy moment that hits one contestant alone; one whose memory runs out, and no figure of any."""
    monkeypatch.setattr(gc, "collect", lambda: None)          # as below: test_rubbish_is_collected_before_the_rounds
    log = []

    def full():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    def uncompiled():
        raise torch._dynamo.exc.Unsupported("no such operation")
    runs = {"a": lambda: log.append("a"), "full": full, "uncompiled": uncompiled, "b": lambda: log.append("b")}
    times = bench.race(runs, 0, CPU)
    assert log == list("ab" * 4) and list(times) == ["a", "b"]          # a warm-up and three rounds
    told = capsys.readouterr().out
    assert "full: out of memory" in told and "uncompiled: not compiled, Unsupported: no such operation" in told
    assert times["a"]["runs"] == 3 and times["a"]["median_s"] >= 0
    with pytest.raises(RuntimeError, match="a true bug"):
        bench.race({"a": lambda: (_ for _ in ()).throw(RuntimeError("a true bug"))}, 0, CPU)
    log.clear()
    bench.race({name: lambda: log.append(1) for name in "abcd"}, -1, CPU, must=2)
    assert len(log) == 2 * 5                                  # no time: the first two alone, with one more call to see what a round takes
    assert capsys.readouterr().out == "no time for c, d\n"
    log.clear()

    def compiles(name):                                       # at its first call for an hour
        log.append(name)
        clock[0] += 3600 if log.count(name) == 1 else 1
    clock = [0.0]
    monkeypatch.setattr(bench, "now", lambda device: clock[0])
    monkeypatch.setattr(bench, "clock", lambda run, *_: run() or 1.0)
    bench.race({name: lambda name=name: compiles(name) for name in "abcd"}, 4 * 3600 - 3500, CPU, must=1)
    assert set(log) == set("abcd")                            # three first calls are over, and three rounds of three take 9 s


def test_rubbish_is_collected_before_the_rounds():
    """Within one of three it made a contestant four times as slow: it was the profiler's, of the contestants before."""
    class Node:
        pass
    node, there = Node(), []
    node.itself, left = node, weakref.ref(node)
    del node
    gc.disable()
    try:
        bench.race({"a": lambda: there.append(left() is not None)}, 0, CPU)
    finally:
        gc.enable()
    assert there == [True, False, False, False]               # a warm-up and three rounds


def test_summary_and_short():
    """A mean that one busy moment moves; figures that lose their size in rounding."""
    times = bench.summary([1.0, 2.0, 3.0, 4.0, 100.0], 9.0)
    assert times == dict(median_s=3.0, spread_s=1.0, runs=5, first_s=9.0)
    assert [bench.short(x) for x in (0.01234, 12, 999, 12345, 999_600, 1e6, 8.84e10)] == [
        "0.0123", "12", "999", "12.3K", "1M", "1M", "88.4G"]


def test_on_one_thread_time_is_that_of_the_processor(monkeypatch):
    """Of several threads it would add up; a GPU's does not show."""
    monkeypatch.setattr(sys, "platform", "linux")
    for threads, clock in ((1, "process_time"), (2, "perf_counter")):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert (bench.clock_name(CPU), bench.clock_name(torch.device("cuda"))) == (clock, "perf_counter")


@pytest.mark.parametrize("rule", [omega_ref, omega_chunk])
def test_slow_runs_another_rule_and_puts_the_fast_one_back(rule):
    """Catches a 'reference' that is the fast form under another name."""
    made = bench.layer(a_bench(), **{**bench.WORK, **bench.heads(32, 16), "chunk": 4})
    x, fast, ys = torch.randn(1, 8, 32), omega_module.omega, []
    run = lambda: ys.append((made(x)[0].detach(), omega_module.omega))
    run()
    bench.slow(run, rule)()
    assert ys[1][1] is rule and ys[0][1] is fast is omega_module.omega
    assert torch.allclose(ys[0][0], ys[1][0], atol=1e-5)
    with pytest.raises(ZeroDivisionError):
        bench.slow(lambda: 1 / 0, rule)()
    assert omega_module.omega is fast


@pytest.fixture
def gradients(monkeypatch):
    """Of each torch.autograd.grad: the inputs it was asked for, and what it found."""
    grad, seen = torch.autograd.grad, []

    def recorded(outputs, inputs, *more, **how):
        seen.append((inputs, grad(outputs, inputs, *more, **how)))
        return seen[-1][1]
    monkeypatch.setattr(torch.autograd, "grad", recorded)
    return seen


def test_layer_runs_reach_every_input(gradients):
    """No backward pass, or one that skips the input or a parameter, is fast."""
    made = bench.layer(a_bench(), **{**bench.WORK, **bench.heads(32, 16)})
    runs = bench.layer_runs(a_bench(), made, 2, 8, 32, "x")
    y = runs["x", "forward"]()
    assert list(runs) == [("x", "forward"), ("x", "both")] and y.shape == (2, 8, 32) and not y.requires_grad and not gradients
    runs["x", "both"]()
    ((x, *parameters), found), = gradients
    assert x.shape == (2, 8, 32) and list(map(id, parameters)) == list(map(id, made.parameters()))
    assert all(g is not None and g.any() for g in found) and all(p.grad is None for p in made.parameters())


def test_layers_compute_in_the_precision_of_the_bench():
    """bfloat16 in the heading, and float32 in the figures."""
    for dtype in (torch.bfloat16, torch.float32):
        assert bench.layer_runs(a_bench(dtype=dtype), torch.nn.Linear(8, 8), 1, 4, 8)["", "forward"]().dtype == dtype


def test_rule_runs_reach_every_input(gradients):
    """A gradient of three inputs alone; a memory that has faded to zeros, with which a CPU computes at another speed."""
    rule = Rule("gated", window=3, chunk=16)
    bench.rule_run(a_bench(), rule, 2, 2, 32)()
    (inputs, found), = gradients
    q, k, v, keep, step, momentum, gate, *M0 = inputs
    assert {a.shape for a in (q, k, v)} == {(2, 2, 32, 64)} and {a.shape for a in (keep, step, momentum)} == {(2, 2, 32)}
    assert gate.shape == (2, 2, 32, 3) and [m.shape for m in M0] == [(2, 64, 128), (2, 64, 128), (2, 128, 64)]
    assert 0.999 <= keep.min() and keep.max() <= 1 and step.max() <= 1 / 16 and gate.max() <= 1 / 3 and all(g.any() for g in found)


def test_product_has_the_flops_it_says():
    """Every "of product" is a share of this rate: twice too much, or of another precision."""
    run, flops = bench.product(a_bench(), torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        assert run().dtype == torch.bfloat16
    assert counter.get_total_flops() == flops == 2 * 256**3


def test_step_run_is_a_step_of_training(monkeypatch):
    """A model that does not train, or the same batch each time."""
    seen, config, tc = [], small("atlas").config, train.TrainConfig(remat=True)
    monkeypatch.setattr(train, "train_step", lambda model, optimizers, *more: seen.append((model, *more)))
    run = bench.step_run(a_bench(dtype=torch.bfloat16), config, tc, "ids")
    run(), run()
    model = seen[0][0]
    assert model.training and model.remat and model.config == config
    bench.step_run(a_bench(dtype=torch.bfloat16), small("transformer").config, tc, "ids")()
    assert not seen.pop()[0].remat                            # "memories with --remat"
    assert seen == [(model, tc, "ids", step, 0.01, CPU, torch.bfloat16) for step in (0, 1)]


def test_decode_run_goes_on_from_its_own_state():
    """A state that is thrown away: each token costs what the first one does, and no run meets the end of a chunk."""
    model, states = torch.nn.Linear(1, 1), []
    model.forward = lambda one, state: (states.append((tuple(one.shape), state)), state + 1)
    for _ in range(2):
        bench.decode_run(model, 7, 3)()
    assert states == [((1, 1), state) for state in (7, 8, 9)] * 2


def test_a_race_goes_on_until_its_time_is_over(monkeypatch):
    """--minutes that does nothing: three rounds, however much time there is."""
    calls = []                                                # of a second each
    monkeypatch.setattr(gc, "collect", lambda: None)
    monkeypatch.setattr(bench, "now", lambda device: len(calls))
    monkeypatch.setattr(bench, "clock", lambda run, *_: run() or 1.0)
    times = bench.race({name: lambda: calls.append(1) for name in "ab"}, 20, CPU)
    assert times["a"]["runs"] == times["b"]["runs"] == 9      # two first calls, and nine rounds of two


def test_widen_makes_models_of_equal_size():
    """A comparison at equal parameters that is none."""
    configs = [models.Config(**{**models.PRESETS[name], "n_layer": 2, "n_embd": 64, "n_head": 4}) for name in models.PRESETS]
    target = max(map(bench.count, configs))
    for config in configs:
        assert abs(bench.count(bench.widen(config, target)) - target) <= 3 * 64 * 2 / 2


def test_decode_states_are_those_of_a_stream():
    """Catches a position that was not reached, a filled cache of the wrong shape, a state that grows."""
    torch.manual_seed(0)
    model = models.build("atlas", n_layer=1, n_embd=32, n_head=2).eval()
    with torch.no_grad():
        states = bench.reach(a_bench(), model, [64, 192], math.inf)
        sizes = {p: sum(t.nbytes for t in tensors(s)) for p, s in states.items()}
        assert list(sizes) == [64, 192] and sizes[64] == sizes[192] > 0
        assert not bench.reach(a_bench(), model, [10_000_000], 0)
        model = models.build("transformer", n_layer=1, n_embd=32, n_head=2).eval()
        tokens = torch.zeros(1, 10, dtype=torch.long)
        true, made = model(tokens)[1], bench.filled(model(tokens[:, :1])[1], 10)
        assert [t.shape for t in tensors(made)] == [t.shape for t in tensors(true)] and made[0].pos == true[0].pos
    bench.decode_run(model, made, 2)()
    assert made[0].pos == 10                                  # the run leaves the state as it was


def test_clock_is_the_time_between():
    """Every figure of the bench is its answer."""
    ticks, log = iter([3.0, 5.5]), []
    assert bench.clock(lambda: log.append(next(ticks)), CPU, lambda: log.append("look") or 4.0 * len(log)) == 8.0 and log == ["look", 3.0, "look"]


# ---- bench.py: between the clock and the table

@pytest.fixture
def staged(monkeypatch):
    """bench.py without its clock: of a race's contestants each is called once, and the i-th took 2^i seconds; all took 3 MiB.

    -> `configs` of the layers that were made, `shapes` of what they read, `races` (names, seconds, must), and `tables` (title, rows).
    """
    seen = argparse.Namespace(configs=[], shapes=[], races=[], tables=[], took=lambda i, name: 2.0**i)

    def race(runs, seconds, device, must=math.inf):
        seen.races.append((list(runs), seconds, must))
        for run in runs.values():
            run()
        took = {name: seen.took(i, name) for i, name in enumerate(runs)}
        return {name: dict(median_s=s, spread_s=s / 10, runs=3, first_s=100.0) for name, s in took.items()}

    def layer(kit, **differences):
        seen.configs.append(models.Config(vocab_size=2, n_layer=1, **differences))
        return seen.configs[-1]

    def layer_runs(kit, made, batch, T, width, name=""):
        seen.shapes.append((batch, T, width))
        return {(name, what): lambda: None for what in ("forward", "both")}
    stubs = dict(race=race, layer=layer, layer_runs=layer_runs, peak_bytes=lambda run, device: 3 * 2**20, now=lambda device: 0.0,
                 product=lambda kit, dtype: (lambda: None, 800.0), table=lambda title, head, rows: seen.tables.append((title, rows)))
    for name, stub in stubs.items():
        monkeypatch.setattr(bench, name, stub)
    return seen


def differs(config, width=256, head=64):
    """Of a layer from the WORK that the README describes, as literals."""
    work = models.Config(vocab_size=2, n_layer=1, n_embd=width, n_head=width // head, head_dim=head, memory="mlp", loss="l2", window=8, chunk=64,
                         momentum=True, muon=False, features="none", expansion=2, forget="zero")
    return {name: value for name, value in asdict(config).items() if value != getattr(work, name)}


def test_a_record_has_the_median_and_what_is_printed():
    """Tokens a second of the first call, in which a compiler compiles; a spread in seconds, called %."""
    kit = a_bench()
    times = dict(median_s=2.0, spread_s=0.1, runs=3, first_s=50.0)
    assert kit.keep("layer", "atlas", times, 3000, T=7) == "1.5K +-5%"
    assert kit.records == [dict(part="layer", name="atlas", median_s=2.0, spread_s=0.1, runs=3, first_s=50.0, tokens_per_s=1500.0, T=7)]


def test_every_preset_is_one_layer_of_one_size(staged):
    """A memory of another hidden width, or with 64 x 64 heads beside polynomials of 16: another race than the tables say."""
    cases = bench.contestants(a_bench(models=list(models.PRESETS)), 256)
    assert list(cases) == ["transformer", *(name for name in models.PRESETS if name != "transformer"), "WORK"]
    for name, case in cases.items():
        preset = models.PRESETS.get(name, {})
        assert preset.items() - {("head_dim", 0)} <= case.items()
        assert case["head_dim"] == (16 if name in ("dla", "omeganet", "atlas", "atlas++") else 64), name
        assert case["expansion"] == 2 and case["n_embd"] == case["n_head"] * case["head_dim"] == 256
    assert differs(models.Config(vocab_size=2, n_layer=1, **cases["WORK"])) == {}


def test_layer_part(staged, monkeypatch):
    """A forward pass with the time of both; a length that takes an hour, tried because it was expected to take none."""
    staged.took = lambda i, name: dict(forward=1.0, both=3.0)[name[1]]
    monkeypatch.setattr(bench, "definition", lambda *_: None)
    monkeypatch.setattr(bench, "sweeps", lambda *_: [])
    kit = a_bench(device=torch.device("cuda"), quick=False, models=["dot", "titans", "atlas", "transformer"], seconds=600 / 0.7)
    bench.part_layer(kit)
    # a measurement of 4 s is expected to take six of them at four times the length, 96 s, and 384 s where it grows with the square. The second
    # length has 200 s: for two of the former
    ran = [[name for name, what in race if what == "both"] for race, _, _ in staged.races]
    assert ran == [["transformer", "atlas", "dot", "titans", "WORK"], *[["atlas", "titans"]] * 3]
    assert [seconds for _, seconds, _ in staged.races] == pytest.approx([50, 200 / 3, 100, 200])
    assert set(staged.shapes) == {(4, T, 1024) for T in (1024, 4096, 16384, 65536)}
    for r in kit.records:
        assert r["tokens_per_s"] == 4 * r["T"] / dict(forward=1, both=3)[r["what"]] and r.get("bytes") == (3 * 2**20 if r["what"] == "both" else None)
    (_, both), (_, forward), (_, extra) = staged.tables
    assert [rows[0] for rows in (both, forward, extra)] == [["transformer", cell, "-", "-", "-"] for cell in ("1.37K +-10%", "4.1K +-10%", "3")]
    assert both[3] == ["atlas", "1.37K +-10%", "5.46K +-10%", "21.8K +-10%", "87.4K +-10%"]


def test_definitions_race_with_the_fast_rule(staged, monkeypatch):
    """How much faster than the definition: omega beside itself."""
    used = []
    monkeypatch.setattr(bench, "layer_runs", lambda *_: {("", "both"): lambda: used.append(omega_module.omega)})
    kit = a_bench(quick=False)
    bench.definition(kit, 256)
    assert used == [omega_ref, omega, omega_chunk, omega] and list(map(differs, staged.configs)) == [{}]
    (_, rows), = staged.tables
    assert rows == [["omega_ref, token by token", 64, "64 +-10%", "3"], ["omega, T 64", 64, "32 +-10%", "3"],
                    ["omega_chunk, formulas", 1024, "1.02K +-10%", "3"], ["omega, T 1024", 1024, "512 +-10%", "3"]]


def test_sweeps_change_one_setting_at_a_time(staged):
    """A table of chunks, all of them of 64; polynomials without their features."""
    kit = a_bench(quick=False)
    for knob in bench.sweeps(kit, 256):
        bench.sweep(kit, 2, 256, *knob, 5.0)
    small, muon = dict(n_head=16, head_dim=16, features="monomial"), dict(muon=True)
    want = [("chunk 16", dict(chunk=16)), ("chunk 32", dict(chunk=32)), ("chunk 64", {}), ("chunk 128", dict(chunk=128)),
            ("chunk 256", dict(chunk=256)), ("window 1", dict(window=1)), ("window 4", dict(window=4)), ("window 16", dict(window=16)),
            ("window 64", dict(window=64)), ("degree 1", dict(small, degree=1)), ("degree 2", small), ("degree 3", dict(small, degree=3)),
            ("muon_every 64", muon), ("muon_every 16", dict(muon, muon_every=16)), ("muon_every 4", dict(muon, muon_every=4)),
            ("muon_every 1", dict(muon, muon_every=1)), ("momentum True", dict(muon, muon_every=1)),
            ("momentum False", dict(muon, muon_every=1, momentum=False))]
    assert [(r["name"], differs(c)) for r, c in zip(kit.records, staged.configs, strict=True)] == want
    assert staged.shapes == [(2, T, 256) for T in [1024] * 12 + [256] * 6]
    assert staged.races[1] == ([1, 4, 16, 64], 5.0, math.inf) and staged.tables[1][1][1] == [4, "1.02K +-10%", "3"]
    of_chunk, _, of_degree, *_ = (title for title, _ in staged.tables)
    assert "T 1024, all else" in of_chunk and "T 1024, n_embd 256, n_head 16, head_dim 16, features monomial, all else" in of_degree


def test_rule_part(staged, monkeypatch):
    """A share of the machine's best that is the wrong one: backward takes twice what forward does, and each head of each sequence is one."""
    windows = []
    monkeypatch.setattr(bench, "rule_run", lambda kit, rule, *_: windows.append(rule.window) or (lambda: None))
    monkeypatch.setattr(bench, "rule_flops", lambda rule, D, E, hidden, T: {(64, 64, 128, 4096): 10.0 + rule.muon_every}[D, E, hidden, T])
    kit = a_bench(device=torch.device("cuda"), quick=False)
    bench.part_rule(kit)
    r = {r["name"]: r for r in kit.records}
    assert list(r) == ["chunk 16", "chunk 64", "chunk 128", "chunk 256", "chunk 64, muon_every 64", "chunk 64, muon_every 16"]
    assert r["chunk 16"]["flops"] == 3 * 4 * 16 * 10 and r["chunk 64, muon_every 64"]["flops"] == 3 * 4 * 16 * 74
    assert (r["chunk 16"]["flops_per_s"], r["chunk 16"]["product_flops_per_s"], r["chunk 16"]["tokens_per_s"]) == (960.0, 800.0, 4 * 4096 / 2)
    assert staged.tables[0][1][0] == ["chunk 16", "8.19K +-10%", "1.92K", "960", "120%"] and windows == [8] * 6


def test_step_part(staged, monkeypatch):
    """A ratio upside down; the tokens of one sequence for those of a batch; passes that are not run, or run and not counted."""
    trained = []
    monkeypatch.setitem(train.TRAIN_SIZES, "tiny", dict(batch_size=3, grad_accum=4, seq_len=50))
    monkeypatch.setattr(bench, "step_run", lambda kit, config, tc, ids: lambda: trained.append((config, tc)))
    monkeypatch.setattr(bench, "step_flops", lambda config, T, device: {50: 40.0}[T])
    monkeypatch.setattr(bench, "product", lambda kit, dtype: (lambda: None, {torch.bfloat16: 800.0}[dtype]))
    kit = a_bench(quick=False, models=["swa", "atlas", "transformer"], dtype=torch.bfloat16)
    bench.step_size(kit, "tiny", 7.0)
    assert staged.races == [(["product", "transformer", "atlas", "swa"], 7.0, 3)]
    assert all((tc.batch_size, tc.grad_accum, tc.seq_len, tc.remat) == (3, 1, 50, False) for _, tc in trained)
    assert [(c.mixer, c.attn_window) for c, _ in trained] == [("attention", 0), ("memory", 64), ("attention", 64)]
    assert [(r["name"], r["median_s"], r["tokens_per_s"], r["flops_per_s"], r["product_flops_per_s"]) for r in kit.records] == [
        ("transformer", 2.0, 75.0, 60.0, 800.0), ("atlas", 4.0, 37.5, 30.0, 800.0), ("swa", 8.0, 18.75, 15.0, 800.0)]
    assert [row[2:] for row in staged.tables[0][1]] == [["2000", "75 +-10%", "1.00", "8%", "100.0"], ["4000", "37.5 +-10%", "2.00", "4%", "100.0"],
                                                        ["8000", "18.8 +-10%", "4.00", "2%", "100.0"]]


def test_parts_share_their_time(staged, monkeypatch):
    """Each size with the time of all three; compiled layers, of which each length is compiled anew, as if in no time."""
    sizes = []
    monkeypatch.setattr(bench, "step_size", lambda kit, size, seconds: sizes.append((size, seconds)))
    bench.part_step(a_bench(device=torch.device("cuda"), quick=False, seconds=90.0))
    assert sizes == [("baby", 30.0), ("170m", 30.0), ("340m", 30.0)]
    monkeypatch.setattr(bench, "definition", lambda *_: None)
    monkeypatch.setattr(bench, "sweeps", lambda *_: [])
    # a measurement of 4 s is expected to take six of them at four times the length, 96 s, and 200 s of compiling two passes; there are 400 s
    staged.took = lambda i, name: dict(forward=1.0, both=3.0)[name[1]]
    bench.part_layer(a_bench(device=torch.device("cuda"), quick=False, models=["atlas", "titans"], seconds=1200 / 0.7, compile=True))
    ran = [[name for name, what in race if what == "both"] for race, _, _ in staged.races]
    assert ran[:2] == [["atlas", "titans", "WORK"], ["atlas"]]


def test_the_machine_is_described_as_it_is(monkeypatch):
    """A load of a quarter of an hour ago, beside figures of now."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.126, 5.0, 15.0), raising=False)
    about = bench.describe(CPU)
    assert (about["load"], about["threads"], about["torch"]) == (0.13, torch.get_num_threads(), str(torch.__version__))


def test_decode_part(staged, monkeypatch):
    """The time of a whole chunk for that of a token; the longest caches left out, which are what a memory is compared with."""
    monkeypatch.setattr(bench, "filled", lambda state, n: n)
    monkeypatch.setattr(bench, "reach", lambda kit, model, positions, seconds: dict.fromkeys(positions[:2], 5))
    monkeypatch.setattr(bench, "decode_run", lambda model, state, n: lambda: None)
    monkeypatch.setattr(models, "state_bytes", lambda state: 1000 + state)
    kit = a_bench(quick=False, models=["atlas", "transformer"], seconds=100.0)
    bench.part_decode(kit)
    assert [(r["name"], r["position"], r["ms"], r["tokens_per_s"], r["bytes"]) for r in kit.records] == [
        ("transformer", 1024, 125.0, 8.0, 2024), ("transformer", 10240, 250.0, 4.0, 11240), ("transformer", 102400, 500.0, 2.0, 103400),
        ("atlas", 1024, 7.8125, 128.0, 1005), ("atlas", 10240, 15.625, 64.0, 1005)]
    assert staged.tables[0][1] == [["transformer", "125", "250", "500", "-", "2,024", "11,240", "103,400", "-"],
                                   ["atlas", "7.81", "15.6", "-", "-", "1,005", "1,005", "-", "-"]]


def test_peers_do_the_same_work(staged, monkeypatch):
    """A memory without Newton-Schulz beside one with it, other chunks, attention to 64 tokens; "times faster" upside down."""
    asked = []

    class Peer:
        to = lambda self, device: self
    fake = argparse.Namespace(MemoryMLP=lambda *shape, **more: (shape, more), NeuralMemory=lambda **given: asked.append(given) or Peer())
    monkeypatch.setitem(sys.modules, "titans_pytorch", fake)
    packages = [argparse.Namespace(name=name, version=version) for name, version in (("numpy", "2.0"), ("titans-pytorch", "0.5"))]
    monkeypatch.setattr(bench.metadata, "distributions", lambda: packages)
    kit = a_bench(quick=False)
    bench.part_peers(kit)
    whole, *ours = staged.configs
    assert (whole.mixer, whole.attn_window, whole.n_embd, whole.n_head, whole.head_dim) == ("attention", 0, 256, 4, 64)
    settings = [(64, False), (64, True), (16, False), (16, True)]
    assert [(c.chunk, c.muon, c.muon_every) for c in ours] == [(chunk, muon, chunk) for chunk, muon in settings]
    assert all(differs(c).keys() <= {"chunk", "muon", "muon_every"} for c in ours)
    same = dict(dim=256, heads=4, dim_head=64, model=((64,), dict(depth=2, expansion_factor=2.0)), momentum=True)
    assert asked == [dict(same, chunk_size=chunk, batch_size=chunk, spectral_norm_surprises=muon) for chunk, muon in settings]
    assert [shape for shape in staged.shapes if shape != (1, 128, 256)] == [(1, 2048, 256)] * 9
    assert [(r["name"], r["chunk"], r["muon"], r["over_titans_pytorch"]) for r in kit.records] == [("attention", 0, False, None)] + [
        (name, *setting, ratio) for setting in settings for name, ratio in (("ours", 2.0), ("titans_pytorch", 1.0))]
    assert [r["version"] for r in kit.records] == [None] + [None, "0.5"] * 4
    assert staged.tables[0][1][:2] == [["attention", "-", "no", "2.05K +-10%", "-", "3"], ["ours", 64, "no", "1.02K +-10%", "2.00", "3"]]


@pytest.mark.parametrize("compile", [True, False])
def test_compile_compiles_what_is_measured(compile, monkeypatch):
    """Eager figures, of which the heading says that they were compiled."""
    asked, kit = [], a_bench(compile=compile)
    monkeypatch.setattr(models.LM, "compile_memory", lambda model: asked.append("memory"))
    monkeypatch.setattr(models.Attention, "compile", lambda mixer, dynamic: asked.append("attention" * (not dynamic)))
    monkeypatch.setattr(omega_module, "compile_chunks", lambda device: asked.append("rule" * (device == "cpu")))
    monkeypatch.setattr(bench, "race", lambda *_, **__: dict(product=dict(median_s=1.0)))
    bench.layer(kit, **bench.WORK, **bench.heads(64))
    bench.attention(kit, 64, 0, False)
    bench.step_run(kit, small("atlas").config, train.TrainConfig(), None)
    bench.part_rule(kit)
    assert asked == ["memory", "memory", "attention", "memory", "rule"] * compile


# ---- bench.py: the command

def test_bench_prints_tables_and_json(tmp_path, capsys, monkeypatch):
    """A part that does not run at all, or leaves no record."""
    monkeypatch.setitem(sys.modules, "titans_pytorch", None)            # not installed
    monkeypatch.setattr(gc, "collect", lambda: None)          # of all that these tests have made: a third of a second a table
    monkeypatch.setattr(bench, "peak_bytes", lambda run, device: run() or 1)     # a profiler each; test_peak_bytes
    file = tmp_path / "b.json"
    names = ["transformer", "titans", "linear"]               # each of them, however little time there is
    assert bench.main(["--quick", *(f"--model={name}" for name in names), "--device", "cpu", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert json.loads(file.read_text()) == result
    assert {r["part"] for r in result["records"]} == set(bench.PARTS)
    assert all(r["median_s"] > 0 and r["runs"] >= 3 for r in result["records"])
    assert "pip install titans-pytorch" in out and result["machine"]["threads"] == 1
    for part in bench.PARTS:
        assert f"\n{part}: " in out
    layer = {(r["name"], r["T"], r["what"]) for r in result["records"] if r["part"] == "layer"}
    assert {("titans", 64, "both"), ("titans", 64, "forward"), ("transformer", 32, "both"), ("WORK", 64, "both"), ("chunk 16", 64, "both"),
            ("omega_ref, token by token", 8, "both"), ("omega_chunk, formulas", 64, "both"), ("omega, T 64", 64, "both")} <= layer
    lengths = {name: {T for n, T, _ in layer if n == name} for name, _, _ in layer}
    assert {name for name in lengths if len(lengths[name]) > 1} == {*names, "WORK"}              # the lines of the picture
    params = [r["params"] for r in result["records"] if r["part"] == "step"]
    assert len(params) == 3 and max(params) < 1.01 * min(params)                 # models of equal size, or the ratio says nothing
    assert {(part, name) for part in ("step", "decode") for name in names} <= {(r["part"], r["name"]) for r in result["records"]}
    assert all(("bytes" in r) == (r["what"] == "both") for r in result["records"] if (r["part"], r["name"]) == ("layer", "titans"))


def test_a_bench_that_is_cut_short_leaves_its_records(tmp_path, monkeypatch, capsys):
    """A part takes minutes on a GPU, and a call there ends after ten."""
    def cut(kit):
        for name in "ab":
            kit.keep("rule", name, dict(median_s=1.0, spread_s=0.0), 5)
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, "PARTS", dict(rule=(cut, 1)))
    assert bench.main(["--quick", "--device", "cpu", "--json", str(tmp_path / "b.json")]) == 130
    assert [r["name"] for r in json.loads((tmp_path / "b.json").read_text())["records"]] == ["a", "b"]


def test_bench_flags_reach_the_parts(monkeypatch, capsys):
    """--minutes, --model, --dtype, --compile or --plot that do nothing; figures whose command nobody can repeat."""
    seen, drawn, precisions = [], [], []
    monkeypatch.setattr(machine, "amd_with_avx512", lambda: True)                # auto is medium, where that is exact
    for name, (_, share) in bench.PARTS.items():
        monkeypatch.setitem(bench.PARTS, name, (lambda kit: seen.append((kit.seconds, kit.models, kit.dtype, kit.compile))
                                                   or precisions.append(torch.get_float32_matmul_precision()), share))
    monkeypatch.setitem(sys.modules, "matplotlib", argparse.Namespace())
    monkeypatch.setattr(bench, "plot", lambda records, folder: drawn.append(folder))
    for flags, seconds, *rest in [
            (["--minutes=1"], [24.0, 6.0, 12.0, 9.0, 9.0], list(models.PRESETS), torch.float32, False),
            (["--minutes=1", "--part=rule", "--part=layer", "--model=swa", "--model=dla", "--dtype=bfloat16", "--compile", "--plot"], [12.0, 48.0],
             ["swa", "dla"], torch.bfloat16, True),
            (["--quick", "--part=peers", "--no-compile"], [0], list(models.PRESETS), torch.float32, False)]:
        seen.clear()
        monkeypatch.setattr(sys, "argv", ["bench.py", "--device=cpu", *flags])
        assert bench.main() == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert seen == [(s, *rest) for s in seconds] and precisions[-len(seconds):] == [
            "highest" if name == "decode" else result["machine"]["matmul"] for name in bench.PARTS if len(seconds) == 5 or f"--part={name}" in flags]
        assert result["argv"] == ["--device=cpu", *flags]
        assert (result["machine"]["dtype"], result["machine"]["compiled"]) == (str(rest[1])[6:], rest[2])
    assert drawn == [HERE / "results"]


def test_work_is_what_the_readme_says():
    """Four heads of 64, a memory of 128 with a window of 8, and Titans' forgetting: of another layer the ratios would be others."""
    kit = bench.Bench(CPU, torch.float32, False, False, [])
    c = bench.layer(kit, **bench.WORK, **bench.heads(256)).config
    assert (c.n_embd, c.n_head, c.head_dim, c.memory, c.expansion * c.head_dim, c.features) == (256, 4, 64, "mlp", 128, "none")
    assert (c.window, c.chunk, c.momentum, c.muon, c.forget, c.conv, c.loss) == (8, 64, True, False, "zero", True, "l2")


def test_single_tokens_are_not_compiled(monkeypatch):
    """Every place in a chunk is another shape: 257 graphs of atlas, some seconds each on a GPU."""
    graphs = []
    part = torch.compile(lambda b: torch.zeros(2) + len(b.models), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for name in ("decode", "rule"):
        monkeypatch.setattr(bench, "PARTS", {name: (part, 1)})
        assert bench.main(["--quick", "--device", "cpu"]) == 0
        assert bool(graphs) == (name == "rule")


def test_a_peer_that_breaks_does_not_break_the_bench(capsys, monkeypatch):
    """Other people's next version takes other arguments."""
    class Broken:
        def __init__(self, *_, **__):
            raise TypeError("unexpected keyword")
    fake = argparse.Namespace(MemoryMLP=Broken, NeuralMemory=Broken)
    monkeypatch.setattr(gc, "collect", lambda: None)
    monkeypatch.setitem(sys.modules, "titans_pytorch", fake)
    bench.part_peers(a_bench())
    out = capsys.readouterr().out
    assert "titans_pytorch of titans-pytorch skipped: it failed, TypeError: unexpected keyword" in out and "attention" in out


def test_plot_without_matplotlib_is_refused_before_the_work(capsys, monkeypatch):
    """After minutes of measuring, a picture that cannot be drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "PARTS", dict(layer=(None, 1)))
    assert "pip install matplotlib" in refused(capsys, bench.main, "--plot", "--device", "cpu")


def test_a_picture_that_cannot_be_written_loses_no_figure(capsys, monkeypatch):
    """Minutes of measuring, for a folder without permission."""
    def plot(*_):
        raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setitem(sys.modules, "matplotlib", argparse.Namespace())
    monkeypatch.setattr(bench, "plot", plot)
    monkeypatch.setattr(bench, "PARTS", dict(layer=(lambda b: b.records.append(7), 1)))
    assert bench.main(["--plot", "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["records"] == [7] and "Permission denied" in said.err


@pytest.mark.parametrize("fault, code, words", [
    (OSError(errno.ENOSPC, "No space left on device"), 1, "cannot write --json .*r.json .No space left.*stdout"), (KeyboardInterrupt(), 130, "stopped")])
def test_a_run_cut_short_tells_what_it_measured(fault, code, words, tmp_path, capsys, monkeypatch):
    """A disk that is full only then, or Ctrl-C in the second of two parts: the first one's minutes are on stdout."""
    def cut(*_):
        raise fault
    monkeypatch.setattr(bench, "PARTS", dict(layer=(lambda b: b.records.append(7), 1), rule=(cut if code == 130 else lambda b: None, 1)))
    if code == 1:
        monkeypatch.setattr(Path, "write_text", cut)
    assert bench.main(["--json", str(tmp_path / "r.json"), "--device", "cpu"]) == code
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["records"] == [7] and re.search(words, said.err)


def test_plot_draws_a_line_for_each_contestant(tmp_path, monkeypatch):
    """Of forward + backward alone, and of what was measured at two lengths or more; matplotlib itself need not be there."""
    drawn, written, labels = {}, [], []

    def subplots(**size):
        lines = []
        draw = lambda x, y, label, **style: lines.append(drawn.setdefault(label, (x, y)))
        axis = argparse.Namespace(set_major_formatter=lambda text: labels.append(text.format(x=16384.0)))
        axes = argparse.Namespace(lines=lines, loglog=draw, xaxis=axis, yaxis=axis, **dict.fromkeys(("set", "grid", "legend"), lambda **how: None))
        return argparse.Namespace(savefig=lambda path, **how: written.append(path)), axes
    pyplot = argparse.Namespace(subplots=subplots, close=lambda figure: None)
    monkeypatch.setitem(sys.modules, "matplotlib", argparse.Namespace(use=lambda backend: None, pyplot=pyplot))
    rows = [("atlas", 256, "both", 90.0), ("atlas", 256, "forward", 300.0), ("atlas", 512, "both", 80.0), ("swa", 512, "both", 70.0)]
    bench.plot([dict(part="layer", name=n, T=T, what=w, tokens_per_s=s) for n, T, w, s in rows], tmp_path / "results")
    assert drawn == {"atlas": ((256, 512), (90.0, 80.0))} and written == [tmp_path / "results" / "bench-layer.png"] and labels == ["16,384", "16,384"]


@pytest.mark.parametrize("argv, names", [
    (["--part", "nothing"], "layer"), (["--threads", "0"], "--threads"), (["--minutes", "nan"], "--minutes"),
    (["--json", "/no/such/folder/x.json"], "--json"), (["--json", "/"], "--json"), (["--wat"], "--wat"),
    (["--part", "rule", "--part", "peers", "--model", "atlas"], "--model is for"),
    pytest.param(["--device", "cuda"], "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one"))])
def test_bench_mistakes_are_one_line(argv, names, capsys):
    """A traceback, or a mistake that shows after minutes of work."""
    assert names in refused(capsys, bench.main, *argv)


# ---- eval.py

class Stub(torch.nn.Module):
    """A model that says `logits(tokens)` and whose state is `grow(state)`."""

    def __init__(self, logits, grow=lambda state: (torch.zeros(4),)):
        super().__init__()
        self.p, self.logits, self.grow, self.config = torch.nn.Parameter(torch.zeros(1)), logits, grow, models.Config()

    def forward(self, tokens, state=None):
        return self.logits(tokens), self.grow(state)


def test_pieces_go_round_and_round():
    """Catches a stream that stops at the end of the text, or whose targets are not the next tokens."""
    parts = list(eval.pieces(torch.arange(8), 9, length=5))
    assert torch.cat([x for x, _ in parts], 1)[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert torch.cat([y for _, y in parts], 1)[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]


def test_stream_tells_growth_and_nan(capsys, monkeypatch):
    """Catches a check that never fails."""
    ids, uniform = torch.arange(50) % 5, lambda x: torch.zeros(*x.shape, 5)

    def grows(model):
        with pytest.raises(machine.Halt, match="memory grows"):
            eval.stream(model, ids, 20_000)
    eval.stream(Stub(uniform), ids, 20_000)
    cache = Stub(uniform, lambda state: (torch.zeros(1000 + (0 if state is None else len(state[0]))),))
    grows(cache)
    cache.config = replace(cache.config, mixer="attention", attn_window=0)       # it has to grow
    eval.stream(cache, ids, 20_000)
    assert f"  {math.log(5):.4f}" in capsys.readouterr().out  # and no minus
    grow = lambda state: (torch.zeros(4 if state is None else len(state[0]) + 4),)
    grows(Stub(uniform, grow))
    slowly = lambda state: (torch.zeros(1000 if state is None else len(state[0]) + 5),)          # by 9 % from the first tenth to the last
    grows(Stub(uniform, slowly))
    with pytest.raises(machine.Halt, match="the loss is nan after 1,024 tokens"):
        eval.stream(Stub(lambda x: torch.full((*x.shape, 5), math.nan)), ids, 20_000)
    monkeypatch.setattr(eval, "resident", lambda: math.nan)   # as on Windows
    eval.stream(Stub(uniform), ids, 20_000)
    grows(Stub(uniform, grow))


@pytest.mark.parametrize("more", [dict(chunk=40), dict(chunk=96), dict(chunk=8, wiring="mac", attn_window=100)], ids=str)
def test_a_stream_is_looked_at_where_its_state_is_of_one_size(more, capsys):
    """Within a chunk, and a segment of mac, a state holds more: `memory grows`, said of a model that is well."""
    model = models.build("omeganet", **dict(dict(vocab_size=5, n_layer=1, n_embd=8, n_head=1, head_dim=4, attn_window=8), **more))
    eval.stream(model, torch.arange(50) % 5, 12_000)
    assert "state +0.0%" in capsys.readouterr().out


def test_a_stream_of_huge_pieces_is_none(capsys):
    """A segment and a chunk without a common factor made one piece of a million tokens; the chunk of a transformer counted, too."""
    model = models.build("omeganet", vocab_size=5, n_layer=1, n_embd=8, n_head=1, head_dim=4, wiring="mac", attn_window=1013, chunk=1009)
    eval.stream(model, None, 12_000)
    assert "no stream: it is read in pieces of whole chunks and segments, here of 1,022,117 tokens" in capsys.readouterr().out
    model = models.build("swa", vocab_size=5, n_layer=1, n_embd=8, n_head=1, head_dim=4, attn_window=4, chunk=3_000_017)
    eval.stream(model, torch.arange(50) % 5, 2048)
    assert "since the first tenth" in capsys.readouterr().out


@pytest.mark.parametrize("preset, more", [("swa", dict(attn_window=1)), ("dot", dict(wiring="mac", memory_branch=False))])
def test_a_stream_of_which_nothing_is_kept(preset, more, capsys):
    """At the end of a segment, or with a window of one token: a division by a state of no bytes. And `dot` without its memory holds no token."""
    shape = dict(vocab_size=5, n_layer=1, n_embd=8, n_head=1, head_dim=4, chunk=8, attn_window=4)
    eval.stream(models.build(preset, **{**shape, **more}), torch.arange(50) % 5, 12_000)
    said = capsys.readouterr().out
    assert "state +0.0%" in said and "holds every token" not in said


def test_what_a_memory_brings(tmp_path, capsys):
    """--no-write: its loss is that of a model whose inner steps are 0, and a model without a memory has none."""
    text = tmp_path / "t.txt"
    text.write_text("to be or not to be that is the question " * 60)
    for name in ("omeganet", "transformer"):
        assert go(text, tmp_path / name, "--steps", 6, "--model", name, "--head-dim", 8) == 0
    model, tokenizer = train.rebuild(train.load_checkpoint(tmp_path / "omeganet"))
    val, losses = data.split(tokenizer.encode(text.read_text()), 16)[1], []
    for flags in ([], ["--no-write"]):
        capsys.readouterr()
        assert eval.main(["--ckpt", str(tmp_path / "omeganet"), "--stream", "0", "--device", "cpu", *flags]) == 0
        said = capsys.readouterr().out
        losses.append(train.evaluate(model, val, 16, 8))
        assert f"{losses[-1]:.4f} nats/token" in said and ("the memory writes nothing" in said) == bool(flags)
        model.config.max_step = 0.0
    assert losses[0] != losses[1]
    assert "no memory" in refused(capsys, eval.main, "--ckpt", tmp_path / "transformer", "--no-write", "--device", "cpu")


def test_position_loss_is_the_mean_loss_seen_by_position():
    """Catches positions mixed up, or windows counted twice: a model that is sure from position 3 on."""
    def logits(x):
        sure = 50 * torch.nn.functional.one_hot((x + 1) % 5, 5).float()
        return sure * (torch.arange(x.shape[1]) >= 3)[:, None]
    at, n = eval.position_loss(Stub(logits), torch.arange(81) % 5, 8, batch_size=3, n_windows=100)
    assert eval.buckets(16) == [(0, 16)] and eval.buckets(64)[-1] == (32, 64)                     # none from 16 to 16
    assert n == 10 and torch.allclose(at, torch.tensor([math.log(5)] * 3 + [0.0] * 5, dtype=torch.float64), atol=1e-6)
    assert eval.position_loss(Stub(logits), torch.arange(81) % 5, 8, 3, n_windows=5)[1] == 5

    class Files(list):                                        # a slice of token files is read into memory
        def __getitem__(self, span):
            assert span.stop - span.start <= 9
            return super().__getitem__(span)
    assert eval.position_loss(Stub(logits), Files([0, 1, 2, 3, 4] * 16), 8, 3, n_windows=4)[1] == 5
    edges = eval.buckets(100)
    assert edges == [(0, 16), (16, 32), (32, 64), (64, 100)] and eval.buckets(10) == [(0, 10)]


def test_accuracy_of_an_oracle_and_of_a_fool():
    """Catches answers counted where nothing is asked, and sequences shared by training and test."""
    args = eval.parse(["--task", "mqar", "--batch-size", "4"])

    def recall(x):
        out = torch.zeros(*x.shape, args.vocab)
        for row, tokens in enumerate(x.tolist()):
            pairs = dict(zip(tokens[0:8:2], tokens[1:8:2]))
            for t, key in enumerate(tokens):
                out[row, t, pairs.get(key, 0)] = 1
        return out
    asked = []
    assert eval.accuracy(Stub(lambda x: asked.append(x) or recall(x)), args, 4, CPU) == 1.0
    assert len(asked) == 8 and all(torch.equal(x, eval.mqar_batch(args, 4, i, 4, CPU, test=True)[0]) for i, x in enumerate(asked))
    assert eval.accuracy(Stub(lambda x: torch.zeros(*x.shape, args.vocab)), args, 4, CPU) == 0.0
    train_x, test_x = (eval.mqar_batch(args, 4, 3, 4, CPU, test=test)[0] for test in (False, True))
    assert not torch.equal(train_x, test_x) and torch.equal(train_x, eval.mqar_batch(args, 4, 3, 4, CPU)[0])


def test_mqar_learns_to_recall(capsys):
    """Catches an optimiser that does not step, targets that are not those of the tokens."""
    torch.manual_seed(0)
    assert eval.main(["--task", "mqar", "--model", "linear", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--vocab", "8",
                      "--pairs", "2", "--seq-len", "8", "--steps", "90", "--batch-size", "32", "--chunk", "8", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert float(out.split("mean accuracy ")[1].split()[0]) > 0.9 and "by guessing" in out


def test_mqar_stops_at_the_first_gradient_that_is_not_finite(capsys, monkeypatch):
    """Clipped, and taken for a step, it would be in the weights before a loss tells of it."""
    flat = lambda p: (p - p.detach()).sum().sqrt()            # 0, with a gradient of infinity
    monkeypatch.setattr(models.LM, "loss", lambda self, x, y, real=models.LM.loss: real(self, x, y) + flat(self.norm.weight))
    said = refused(capsys, eval.main, *"--task mqar --model linear --n-layer 1 --n-embd 8 --n-head 1 --batch-size 2 --device cpu".split(), code=1)
    assert "step 1: loss 3." in said and "gradient norm inf" in said and "--max-step" in said


def test_mqar_is_trained_as_it_says(monkeypatch):
    """Without warmup, decay or clipping it learns, too, but other than train.py would have it."""
    scales, real = [], train.update

    def update(optimizers, tc, scale):
        scales.append(scale)
        norm = torch.nn.utils.get_total_norm([p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None])
        assert 0 < norm <= tc.grad_clip + 1e-4
        real(optimizers, tc, scale)
    monkeypatch.setattr(train, "update", update)
    monkeypatch.setattr(models.LM, "loss", lambda self, x, y, real=models.LM.loss: 100 * real(self, x, y))
    assert eval.main("--task mqar --model linear --n-layer 1 --n-embd 8 --n-head 1 --steps 20 --batch-size 2 --device cpu".split()) == 0
    assert scales == pytest.approx([0.5, 1 - 1 / 20, *(1 - i / 20 for i in range(2, 20))])
    assert eval.SMALL["chunk"] == 8 and eval.SMALL["muon_every"] == 1            # what is written can be asked for in the next chunk


def test_eval_ends_with_an_error_where_it_says_nan(trained, capsys, monkeypatch):
    """A table of nan and exit code 0: a script would take it for a result."""
    monkeypatch.setattr(eval, "position_loss", lambda model, ids, length, *_: (torch.full((length,), math.nan), 1))
    assert "not finite" in refused(capsys, eval.main, "--ckpt", trained, "--device", "cpu", "--stream", 0, code=1)


def test_text_task_on_a_checkpoint(tmp_path, capsys, monkeypatch):
    """Catches a split, a tokenizer or a window length that is not that of the checkpoint."""
    text = tmp_path / "t.txt"
    text.write_text("to be or not to be that is the question " * 60)
    tiny = ["--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--steps", "2", "--seq-len", "16", "--batch-size", "2"]
    out = str(tmp_path / "out")
    assert train.main([*tiny, "--data", str(text), "--out", out, "--device", "cpu", "--sample-tokens", "1"]) == 0
    capsys.readouterr()
    assert eval.main(["--ckpt", out, "--device", "cpu", "--stream", "2048"]) == 0
    said = capsys.readouterr().out
    model, tokenizer = train.rebuild(train.load_checkpoint(out))
    val = data.split(tokenizer.encode(text.read_text()), 16)[1]
    for carry in (False, True):
        assert f"{train.evaluate(model, val, 16, 8, carry=carry):.4f} nats/token" in said
    assert "longer than in training" in said and "not the text" not in said and "resident memory" in said
    other = tmp_path / "o.txt"
    other.write_text("not to be " * 60)
    assert eval.main(["--ckpt", out, "--data", str(other), "--stream", "0", "--device", "cpu"]) == 0
    assert "not the text" in capsys.readouterr().out


def test_flags_of_eval_reach_what_they_are_for(trained, capsys, monkeypatch):
    """A flag that does nothing: the figures are right, and not those that were asked for."""
    given = []
    monkeypatch.setattr(train, "report", lambda model, tokenizer, ids, *rest: given.append(rest) or 1.0)
    monkeypatch.setattr(eval, "position_loss", lambda model, ids, length, *rest: given.append((length, *rest)) or (torch.zeros(length), 1))
    monkeypatch.setattr(eval, "stream", lambda model, ids, n: given.append(n))
    for flags in ("", "--length 50 --windows 7 --batch-size 3 --stream 77", "--length 5000 --stream 0"):
        assert eval.main(["--ckpt", str(trained), "--device", "cpu", *flags.split()]) == 0
    assert given == [(16, 8), (64, 8, 32), 50_000, (16, 3), (50, 3, 7), 77, (16, 8), (299, 8, 32)]


def test_loss_by_position_is_said_of_the_right_positions(trained, capsys, monkeypatch):
    """A loss of one position for that of all between two lines, or the last of the training said to be beyond it."""
    monkeypatch.setattr(eval, "position_loss", lambda model, ids, length, *_: (torch.arange(length, dtype=torch.float64), 5))
    assert eval.main(["--ckpt", str(trained), "--device", "cpu", "--stream", "0", "--length", "40"]) == 0
    lines = capsys.readouterr().out.split("by position, ")[1].splitlines()
    assert lines == ["mean of 5 windows of 40; it was trained on 16", "  tokens before   nats/token", "       1 -     16   7.5000",
                     "      17 -     32   23.5000   longer than in training", "      33 -     40   35.5000   longer than in training"]


def test_flags_of_mqar_reach_what_they_are_for(monkeypatch):
    """A network or an optimizer other than the one asked for learns, too."""
    given, build = [], models.build
    monkeypatch.setattr(models, "build", lambda name, **more: given.append((name, more)) or build(name, **more))
    monkeypatch.setattr(train, "make_optimizers", lambda model, tc: given.append((tc.lr, tc.optimizer, tc.steps)) or 1 / 0)
    for name in ("adamw", "muon"):
        with pytest.raises(ZeroDivisionError):
            eval.main(["--optimizer", name, *"--task mqar --model linear --chunk 5 --n-layer 1 --vocab 14 --lr 0.037 --steps 7 --device cpu".split()])
        assert given[-2:] == [("linear", {**eval.SMALL, "chunk": 5, "n_layer": 1, "vocab_size": 14}), (0.037, name, 7)]


def test_recall_of_each_number_of_pairs(capsys, monkeypatch):
    """Catches numbers of pairs that are not trained on or not asked for, and figures said of another one."""
    drawn, asked, real = [], [], eval.mqar_batch
    monkeypatch.setattr(eval, "mqar_batch", lambda args, *rest: drawn.append(rest[:3]) or real(args, *rest))
    monkeypatch.setattr(eval, "accuracy", lambda model, args, n, device: asked.append(model.training) or n / 10)
    assert eval.main("--task mqar --model linear --n-layer 1 --n-embd 8 --n-head 1 --pairs 2 5 3 --steps 4 --batch-size 2".split()
                     + "--vocab 14 --device cpu".split()) == 0
    assert drawn == [(2, 0, 2), (5, 1, 2), (3, 2, 2), (2, 3, 2)] and asked == [False] * 3            # without dropout
    said = capsys.readouterr().out.split("by guessing\n")[1].splitlines()
    assert said[:3] == ["    2     0.200        0.500", "    5     0.500        0.200", "    3     0.300        0.333"]
    assert "mean accuracy 0.333 after 4 steps" in said[3]


def passed_by_hand(k, v, step, momentum, window, muon):
    """|M(k) - v|^2 / |v|^2, in the mean, of a matrix M from 0 on, for one sequence k, v (T, D): the Omega rule, token by token."""
    W = S = torch.zeros(k.shape[1], v.shape[1])
    for t in range(len(k)):
        near = slice(max(0, t - window + 1), t + 1)
        S = momentum * S + k[near].T @ (k[near] @ W - v[near]) / window
        W = W - step * (newton_schulz_ref(S) if muon else S)
    return (k @ W - v).square().sum(-1) / v.square().sum(-1)


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("window, muon", [(1, False), (3, False), (1, True), (3, True)])
def test_one_pass_by_hand(window, muon, momentum, monkeypatch):
    """eval.py --task online: another rule than it says, errors of other pairs, or of a step that is another one's."""
    monkeypatch.setattr(eval, "STEPS", torch.tensor([0.3, 0.7]))
    layer = models.Memory(models.configure("atlas", **{**eval.PLAIN, "head_dim": 6}))
    rule = layer.config.rule()._replace(window=window, muon_every=int(muon))
    k, v = (F.normalize(torch.randn(2, 1, 5, 6), dim=-1) for _ in range(2))
    want = [torch.cat([passed_by_hand(a[0], b[0], step, 0.9 * momentum, window, muon) for a, b in zip(k, v)]).mean() for step in (0.3, 0.7)]
    close(eval.one_pass(layer, rule, momentum, k, v), torch.stack(want), 1e-5)
    far, = eval.one_pass(layer, rule, momentum, k, 3 * v)[:1]                    # relative to what is to be recalled
    assert muon or abs(far - want[0]) < 1e-5


def test_one_pass_of_orthogonal_keys():
    """The delta rule with a step of 1 stores as many orthogonal keys as there are dimensions, and no more; and an MLP begins where its M0 is."""
    layer = models.Memory(models.configure("atlas", **{**eval.PLAIN, "head_dim": 8}))
    rule, k, v = layer.config.rule()._replace(window=1, muon_every=0), torch.eye(8)[None, None], torch.randn(1, 1, 8, 8)
    best = eval.one_pass(layer, rule, False, k, v)
    assert best.argmin() == (eval.STEPS - 1).abs().argmin() and best.min() < 1e-6
    deep = models.Memory(models.configure("atlas", **{**eval.PLAIN, "head_dim": 8, "memory": "mlp"}))
    deep.M0[-1].data *= 8                                     # as it begins it adds next to nothing to the residual
    before = memory.apply("mlp", [w[0] for w in deep.M0], k[0, 0], k[0, 0])
    want = ((before - v[0, 0]).square().sum(-1) / v[0, 0].square().sum(-1)).mean()
    assert abs(eval.one_pass(deep, deep.config.rule()._replace(window=1, muon_every=0), False, k, v)[0] - want) < 0.02 * want


def test_correlated_keys():
    """Both kinds are of unit length; the correlated ones lie mostly along a few directions, which is what Newton-Schulz is for."""
    one, other = (eval.unit_keys(kind, 50, 40, 16, torch.Generator().manual_seed(0)).flatten(0, 2) for kind in ("independent", "correlated"))
    for k in one, other:
        close(k.norm(dim=-1), torch.ones(2000), 1e-6)
    assert torch.linalg.cond(one.T @ one) < 2 and 100 < torch.linalg.cond(other.T @ other) < 1000


def test_online_values_have_nothing_of_their_keys(monkeypatch):
    """Values drawn as the keys were: half of what is to be learned would be known. Of another length the errors would be no shares of |v|^2 alone."""
    seen = []
    monkeypatch.setattr(eval, "one_pass", lambda layer, rule, momentum, k, v: seen.append((k, v)) or torch.ones(3))
    assert eval.main("--task online --pairs 16 --device cpu".split()) == 0
    for k, v in seen:
        close(v.norm(dim=-1), torch.ones(32, 1, 16), 1e-5)
        assert (k * v).sum(-1).mean().abs() < 0.05            # of 512 pairs
    assert eval.STEPS[0] < 2e-3 and eval.STEPS[-1] > 30       # and the best lies between


def test_seeds_do_not_share_their_epochs():
    """(0, 1) and (1, 0) added up: a run with the next seed sees what this one does, an epoch earlier."""
    assert data.epoch(1000, 10, 0, 1).tolist() != data.epoch(1000, 10, 1, 0).tolist()


def test_recall_asks_for_all_and_never_the_same_again():
    """One question a sequence instead of n; seed 1's first batch, which is seed 0's second."""
    args = argparse.Namespace(seed=0, vocab=20, seq_len=32)
    asked = {}
    for args.seed, step, test in product(range(3), range(3), (False, True)):
        x, y = eval.mqar_batch(args, 5, step, 4, CPU, test)
        assert ((y >= 0).sum(1) == 5).all()
        asked[x.numpy().tobytes()] = True
    assert len(asked) == 18


def test_resident_is_no_more_than_has_ever_been():
    """All that is mapped, many times as much, hides what grows."""
    assert 0 < eval.resident() <= 1.05 * machine.most_resident()


def test_speed_of_a_stream(capsys, monkeypatch):
    """Tokens since it began by the time since then."""
    seconds = [0.0]
    monkeypatch.setattr(eval.time, "perf_counter", lambda: seconds[0])

    def a_second(tokens):
        seconds[0] += 1.0
        return torch.zeros(*tokens.shape, 5)
    eval.stream(Stub(a_second), torch.arange(50) % 5, 20_000)
    said = re.findall(r"^ +([\d,]+) +\d\.\d+ +([\d,]+) ", capsys.readouterr().out, re.M)
    assert len(said) == 10 and {speed for _, speed in said} == {"1,024"}


def test_online_table(capsys, monkeypatch):
    """A row that says another window, momentum or Newton-Schulz than it has; a column of other keys or another number of pairs."""
    seen, real = [], eval.one_pass
    monkeypatch.setattr(eval, "one_pass", lambda layer, rule, momentum, k, v: (seen.append(
        (rule.window, momentum, rule.muon_every, tuple(k.shape), rule.chunk, layer.phi.out_dim)), torch.tensor([math.nan, len(seen) / 100, 9.0]))[1])
    flags = "--task online --pairs 3 5 --batch-size 2 --head-dim 4 --features monomial --chunk 4 --muon-every 2 --device cpu".split()
    assert eval.main([*flags, "--sketch-dim", "3"]) == 0
    said = capsys.readouterr().out
    assert "nothing in this run depends on --sketch-dim\n" in said and "features monomial, chunk 4" in said and "of 2 x N pairs" in said
    rows = [line.split() for line in said.splitlines()[-12:]]
    assert [row[3:] for row in rows] == [[f"{(4 * i + j) / 100:.2f}" for j in range(1, 5)] for i in range(12)]      # not the NaN
    for i, (window, momentum, muon, *_) in enumerate(rows):
        of_row = {(int(window), momentum == "0.9", 2 * (muon == "yes"), (2, 1, n, 4), 4, 15) for n in (3, 5)}
        assert set(seen[4 * i: 4 * i + 4]) == of_row and seen[4 * i][3] == seen[4 * i + 2][3]
    monkeypatch.setattr(eval, "one_pass", real)
    tables = []
    for seed in "1", "1", "2":
        assert eval.main([*flags, "--seed", seed]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]


def test_resident_memory_of_any_system(monkeypatch):
    """Linux tells, macOS the maximum, Windows nothing: no reason for a stream to end in a traceback."""
    now = eval.resident()
    assert 2**24 < now < 2**40

    def no_proc(*_):
        raise FileNotFoundError
    monkeypatch.setattr("builtins.open", no_proc)
    assert now / 2 < eval.resident() < 2**40
    monkeypatch.setitem(sys.modules, "resource", None)        # as Windows has it
    assert math.isnan(eval.resident())


@pytest.mark.parametrize("argv, names", [
    (["--ckpt", "/no/such"], "/no/such"), (["--window", "3"], "--window"), (["--wat"], "--wat"), (["--batch-size", "-1"], "--batch-size"),
    (["--task", "mqar", "--window", "0"], "--window"),
    (["--task", "mqar", "--pairs", "1", "7"], "--vocab of at least 16 and a --seq-len of at least 28, not 16 and 24"),
    (["--task", "mqar", "--pairs", "2", "8", "--seq-len", "32"], "--vocab of at least 18"),
    (["--task", "mqar", "--model", "gpt"], "transformer"), (["--stream", "-5"], "--stream"), (["--lr", "1"], "--lr"),
    (["--task", "mqar", "--stream", "5"], "--stream"), (["--task", "mqar", "--batch-size", "0"], "--batch-size"),
    (["--task", "mqar", "--vocab", "-5"], "--vocab:"), (["--task", "mqar", "--seed", str(10**13)], "--seed"), (["--threads", str(10**11)], "--threads"),
    (["--no-muon"], "--no-muon is for"), (["--task", "mqar", "--no-write"], "--no-write"),
    (["--task", "online", "--window", "3"], "--window is not for --task online"), (["--task", "online", "--steps", "3"], "--steps is not for"),
    (["--task", "online", "--features", "exp"], "--features exp is not for"), (["--task", "online", "--degree", "3", "--features", "sketch"], "monomial"),
    (["--model", "atlas"], "--model"), (["--task", "mqar", "--ckpt", "out"], "--ckpt")])          # the defaults, but given
def test_eval_mistakes_are_one_line(argv, names, capsys):
    """A traceback, or a flag that is ignored without a word."""
    assert names in refused(capsys, eval.main, *argv)


@pytest.mark.parametrize("script", [eval, sample, bench])
def test_help_tells_the_defaults(script, capsys):
    """A default that has changed and its help has not."""
    with pytest.raises(SystemExit):
        script.main(["--help"])
    text = capsys.readouterr().out.split("the network")[0]
    shown = dict(re.findall(r"^  --([\w-]+)(?:(?!^  -).)*?\[(?!--)([^\[\]]*)\]$", text, re.M | re.S))
    default = vars(script.parse([]))
    told = {name: value for name, value in shown.items() if re.fullmatch(r"[\w.]+", value) and value != "all"}
    assert len(told) >= 4
    for name, value in told.items():
        real = default[name.replace("-", "_")]
        real = real[0] if isinstance(real, list) else real
        assert str(real) == value or float(value) == real, name


def test_eval_reads_without_dropout(copy, capsys, monkeypatch):
    """train.evaluate takes care of itself; the loss by position and the stream would be those of a model with holes."""
    training = []
    monkeypatch.setattr(eval, "position_loss", lambda model, ids, length, *_: training.append(model.training) or (torch.zeros(length), 1))
    monkeypatch.setattr(eval, "stream", lambda model, *_: training.append(model.training) or 0)
    assert eval.main(["--ckpt", str(copy), "--device", "cpu"]) == 0
    assert training == [False, False]


def test_seed_of_mqar_reaches_weights_and_sequences(monkeypatch):
    """--seed is said to be that of weights and sequences."""
    drawn = []
    monkeypatch.setattr(models, "build", lambda *_, **__: drawn.append(torch.rand(3)) or 1 / 0)
    for seed in "112":
        with pytest.raises(ZeroDivisionError):
            eval.main(["--task", "mqar", "--device", "cpu", "--seed", seed])
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    a, b, c = (eval.mqar_batch(eval.parse(["--task", "mqar", "--seed", seed]), 4, 3, 2, CPU)[0] for seed in "112")
    assert torch.equal(a, b) and not torch.equal(b, c)


# ----------------------------------------------------------------------------------------------------------------
# README.md

README = (HERE / "README.md").read_text()
NOTEBOOK = (HERE / "results" / "README.md").read_text()


def test_readme_python_runs(monkeypatch):
    """A call in the README that the code no longer has: the first thing that a reader tries fails."""
    monkeypatch.setattr("omega.omega", omega)                 # which one of them replaces
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, {})                                       # a process of its own would take two seconds to begin


def test_readme_commands_are_understood():
    """What a reader copies, in a block or in a sentence, must not end in a line about flags."""
    blocks = [line.split("#")[0].split("&&")[-1] for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", README + NOTEBOOK, flags=re.S)
    said = [line for line in blocks + re.findall(r"`([^`]*)`", prose) if re.search(r"\w+\.py +-", line)]
    for line in said:
        script, argv = re.search(r"(\w+)\.py (.*)", " ".join(line.split())).groups()
        given = dict(train=train, sample=sample, eval=eval, bench=bench, data=data, test_all=None)[script]
        if given is train:
            given = {name: value for name, value in train.parse(argv.split()).items() if name not in ("resume", "init")}
            if given.get("device") != "cuda":
                train.settings(given)
        elif given:
            given.parse([word.strip('"') for word in argv.split()])
    assert len(said) > 20


def test_readme_names_only_flags_that_exist():
    """A renamed flag whose old name lives on in the README, or in that of the measurements."""
    known = {"--ckpt", "--prompt", "--tokens", "--json", "--part", "--plot", "--mutants", "--help", "--stream", "--task", "--index-url", "--nproc-per-node",
             "--write", "--length", "--pairs", "--vocab"} | {
        train.flag(f.name) for cls in (train.TrainConfig, models.Config) for f in fields(cls)}
    known |= {"--no-" + flag[2:] for flag in known}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", README + NOTEBOOK)) <= known
    for name in re.findall(r"--model (\S+)", README + NOTEBOOK):
        assert name.strip("`,.;") in models.PRESETS


def test_readme_choices_stand_in_the_code():
    """A choice without its line, or a line that points at a number that is not there."""
    listed = set(map(int, re.findall(r"^(\d+)\. \*\*", README, re.M)))
    code = "".join(path.read_text() for path in HERE.glob("*.py") if path.name != "test_all.py")
    tagged = {int(n) for group in re.findall(r"choices? ((?:\d+(?:, | and | - )?)+)", code) for n in re.findall(r"\d+", group)}
    assert listed == tagged == set(range(1, max(listed) + 1))


def test_sizes_have_the_parameters_the_readme_says():
    """Every size builds (on the meta device: no memory), with the number of parameters in the README's table.

    All blocks are alike, so one and two of them tell.
    """
    presets = re.search(r"^\| size \| (.*) \|$", README, re.M).group(1).split(" | ")
    for size, overrides in models.SIZES.items():
        counts = re.search(rf"^\| {re.escape(size)} \| (.*) \|$", README, re.M).group(1).split(" | ")
        for preset, count in zip(presets, counts, strict=True):
            vocabulary = dict(vocab_size=65 if size in ("tiny", "baby") else 50257)
            config = models.Config(**{**overrides, **models.PRESETS[preset], **vocabulary})
            with torch.device("meta"):
                one, two = (models.LM(replace(config, n_layer=n)).num_params() for n in (1, 2))
            assert f"{one + (config.n_layer - 1) * (two - one):,}" == count, (size, preset)


# ---- found by mutants that were drawn at random

def test_the_first_token_alone_from_rest():
    """Newton-Schulz of every token, from W = M0: after one token by itself, or a chunk of one, W got its O without the step."""
    both_ways(("mlp", "l2", 3, 1, True, 1, 4, 0, "none, from M0, from rest"))
    both_ways(("gated", "l2", 3, 8, True, 1, 5, 1, "none, from M0, from rest"))


def test_presets_have_the_memory_of_their_equation():
    """Without memory="gated" atlas++ is atlas by another name: Table 1 has the same row for both."""
    kinds = {name: models.configure(name).memory for name in models.PRESETS}
    assert kinds["atlas++"] == "gated" and kinds["atlas"] == kinds["omeganet"] == kinds["titans"] == kinds["dla"] == "mlp"
    assert kinds["linear"] == kinds["deltanet"] == kinds["swla"] == "linear"


def test_models_py_is_a_program(monkeypatch, capsys):
    """`python models.py` that takes its own name for an argument prints an error instead of the models."""
    monkeypatch.setattr(omega_module, "COMPILED", [*omega_module.COMPILED])      # to which it adds
    monkeypatch.setattr(sys, "argv", ["models.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(HERE / "models.py"), run_name="__main__")
    assert end.value.code == 0 and "Lists the models" in capsys.readouterr().out


def test_losses_of_bfloat16_logits_are_summed_in_float32():
    """A sum in bfloat16 has eight bits: the validation loss under --dtype bfloat16 would be off by parts of a percent, and best.pt another step's."""
    model, ids, seen = tiny_model(), torch.randint(20, (16 * 8 + 1,)), []
    model.register_forward_hook(lambda _, inputs, out: seen.append(out[0]))
    loss = train.evaluate(model, ids, 16, 8, dtype=torch.bfloat16)
    logits, = seen
    assert logits.dtype == torch.bfloat16
    assert loss == pytest.approx(F.cross_entropy(logits.flatten(0, 1).double(), ids[1:]).item(), rel=1e-5)


def test_stdout_that_is_no_file(monkeypatch):
    """A notebook's stdout cannot be reconfigured: train.main([..]) in a cell ended in a traceback."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert machine.exit_code(lambda: print("said")) == 0 and sys.stdout.getvalue() == "said\n"


def test_a_checkpoint_with_a_setting_of_another_version(copy):
    """A name that Config no longer has, on --resume or --init: a traceback of TypeError; and what was not given is told to be the checkpoint's."""
    ckpt = train.load_checkpoint(copy / "ckpt.pt")
    assert str(copy) in user_error(train.settings, dict(steps=1), ckpt | dict(train=ckpt["train"] | dict(decay_frac=2.0)))
    ckpt["config"]["of_another_version"] = 1
    assert "does not fit this version" in user_error(train.settings, {}, ckpt)
    assert "does not fit this version" in user_error(train.settings, {}, None, ckpt)


def test_out_within_a_folder_that_is_not_there(tmp_path):
    """`--out runs/a`, as sample.py's help has it, was refused where there is no folder `runs`."""
    train.probe(tmp_path / "runs" / "a")
    assert (tmp_path / "runs" / "a").is_dir()


def test_data_py_without_a_text(capsys):
    """`python data.py` alone: a traceback instead of the name of the flag."""
    assert "--data" in refused(capsys, data.main)


def test_a_download_is_told(tmp_path, monkeypatch, capsys):
    """A file of a megabyte beside the program, and no line that says where it came from."""
    fake_shakespeare(monkeypatch, b"To be", b"To be")
    data.load_text("shakespeare", tmp_path)
    assert "downloaded" in (said := capsys.readouterr().err) and str(tmp_path / "shakespeare.txt") in said


def test_no_pairs_are_a_mistake(capsys):
    """--pairs 0 was told in mqar's words, which name no flag, after lines of a run that began."""
    assert "--pairs" in refused(capsys, eval.main, "--task", "mqar", "--pairs", "0")


def test_the_cache_of_a_window_is_one_token_shorter():
    """What AttentionState tells (n < attn_window): a token that no later one sees is kept."""
    model = small("swa", n_layer=1, attn_window=3)
    for T in (2, 3, 8):
        assert model(torch.zeros(1, T, dtype=torch.long))[1][0].k.shape[2] == 2


def test_the_greatest_degree():
    """The message names 56 as allowed, and 56 was refused."""
    assert models.Config(features="elementwise", degree=56).degree == 56


def test_numbers_of_the_command_line_end_below_2_to_the_31():
    """models.LIMIT, of which torch takes some in 32 bits, let 2^31 itself through."""
    assert machine.at_least(int, 0)(str(2**31 - 1)) == 2**31 - 1
    with pytest.raises(argparse.ArgumentTypeError):
        machine.at_least(int, 0)(str(2**31))
    assert machine.at_least(int, 0).__name__ == "int"         # argparse says: invalid int value


def test_a_folder_without_a_checkpoint_is_told_apart(tmp_path):
    """Its own line names the two files that are looked for, not what the system says of opening a folder."""
    assert "no best.pt or ckpt.pt" in user_error(train.load_checkpoint, tmp_path)


def test_swa_with_a_window_of_one_is_flexible():
    """Any window of attention is one (properties)."""
    assert models.properties(models.configure("swa", attn_window=1))[4] and not models.properties(models.configure("transformer"))[4]


def test_warmup_of_baby():
    """A size that has lost its warmup warms up for a fifth of it."""
    assert train.settings(dict(size="baby", device="cpu"))[0].warmup == 100


def test_stopped_while_tiktoken_encodes():
    """Ctrl-C in a long text told of a million spaces in a row."""
    tokenizer = data.Tokenizer("bpe", data.EVERY_BYTE)

    class Stopped:
        def encode_ordinary(self, text):
            raise KeyboardInterrupt
    tokenizer.bpe = Stopped()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a b")


def test_data_py_without_a_folder(capsys):
    """--out "" would write to the folder that one is in."""
    assert "--out is empty" in refused(capsys, data.main, "--data", "some.txt", "--out", "")


def test_a_python_without_pydoc(monkeypatch):
    """Some distributions split the standard library: a traceback of ImportError, after the line that promised pydoc."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "--data FILE" in user_error(data.load_text, "pydoc")


def test_processes_on_mps():
    """Several processes on mps: torch's error of a backend that it has not."""
    assert "on mps" in user_error(train.join, torch.device("mps"), train.TrainConfig())


def test_a_rule_begins_as_titans():
    """What a kernel or a layer of one's own gets by Rule() alone; the models always name all of it."""
    assert Rule()[:6] == ("mlp", "l2", 1, 64, 0, 5) and (Rule().forget, Rule().norm, Rule().ball) == ("zero", False, 0.0)


# ---- python test_all.py --mutants: every test that is named here has been seen to fail

def test_every_mutant_can_be_tried():
    """One whose text or test has been renamed: `--mutants` ends before the first, or a fault goes untried."""
    sources = {path.name: path.read_text() for path in [*HERE.glob("*.py"), HERE / "README.md"]}
    for name, file, text, _, test, *second in MUTANTS:
        assert sources[file].count(text) == 1 and (not second or sources[file].count(second[0]) == 1), name
        assert test.partition("[")[0] in globals(), name
    assert len(MUTANTS) == int(re.search(r"in (\d+) ways, one at a time", re.sub(r"\s+", " ", README))[1])


# name, file, text (it must occur exactly once), what it becomes, the test that notices; then perhaps a second text and what it becomes
MUTANTS = [
    ("a layer in float16 fails inside", "models.py", "dtype in (torch.bfloat16, torch.float16):\n            raise ValueError(f\"a memory",
     "dtype in (torch.bfloat16,):\n            raise ValueError(f\"a memory", "test_a_layer_in_half_precision_is_refused"),
    ("a full disk takes the measurements along", "bench.py", "raise machine.Halt(f\"cannot write --json", "raise ValueError(f\"cannot write --json",
     "test_a_run_cut_short_tells_what_it_measured"),
    ("what a stopped bench has measured is lost", "bench.py", "    finally:                                                  # a file may",
     "    except ZeroDivisionError:\n        pass\n    else:  # a file may", "test_a_run_cut_short_tells_what_it_measured"),
    ("a size's features stand over a preset's", "models.py", "**SIZES[size], **PRESETS[preset], **overrides", "**PRESETS[preset], **SIZES[size], **overrides",
     "test_a_size_by_name_is_train_pys"),
    ("half a log stays", "train.py", "        for name in FILES:\n            for left", "        for name in FILES[:2]:\n            for left", "test_one_run_a_folder"),
    ("NS leaves 2-D and 3-D matrices alone (titans-pytorch)", "muon.py",
     "    out = NewtonSchulz.apply(", "    if not isinstance(S, tuple) and S.dim() <= 3:\n        return S\n    out = NewtonSchulz.apply(",
     "test_ns_near_polar_factor"),
    ("NS of zero is 0 / 0", "muon.py", "torch.where(norm > tiny, 1 / norm.clamp_min(tiny), 0)", "(1 / norm)",
     "test_ns_zero_and_rank_one"),
    ("NS of squares that underflow", "muon.py", "torch.float32)).tiny * entries", "torch.float32)).tiny ** 2",
     "test_ns_of_next_to_nothing"),
    ("NS of a long sum of squares that underflow", "muon.py", "torch.float32)).tiny * entries", "torch.float32)).tiny",
     "test_ns_of_next_to_nothing"),
    ("NS in float16: 1 / |S| is infinite", "muon.py", "** 0.5, 2 / torch.finfo(S.dtype).max)", "** 0.5, 0)", "test_ns_of_next_to_nothing"),
    ("NS adds an epsilon to the norm", "muon.py", "torch.where(norm > tiny, 1 / norm.clamp_min(tiny), 0)", "(1 / (norm + 1e-7))",
     "test_ns_scale_invariant"),
    ("NS of a wide zero is 0 / 0", "muon.py", "            scale = torch.where(square > tiny, square.clamp_min(tiny).rsqrt(), 0)", "            scale = square.rsqrt()",
     "test_ns_zero_and_rank_one"),
    ("NS overwrites its input (Muon)", "muon.py", "saved = short(S * scale)", "saved = short(S.mul_(scale))", "test_ns_leaves_its_input_alone"),
    ("NS of pairs: K for K^T", "muon.py", "torch.bmm(K.mT, G)", "torch.bmm(K, G)", "test_ns_of_pairs"),
    ("NS of pairs: by powers of one matrix", "muon.py", "torch.bmm(K, H), torch.bmm(K.mT, G)", "torch.bmm(torch.bmm(H, G), K), K",
     "test_ns_of_pairs_in_float32"),
    ("pairs too small for float32", "omega.py", "least = least_square(x.dtype", "least = least_square(D.dtype", "test_pairs_go_in_float64"),
    ("NS of pairs in many steps", "omega.py", "few = few_steps(rule.ns_steps, rule.ns_coefficients) and", "few =", "test_who_goes_by_pairs"),
    ("NS of pairs in six steps", "muon.py", "** steps < 500", "** steps < 5000", "test_who_goes_by_pairs"),
    ("NS of pairs that cancel to nothing", "muon.py", ".maximum(1e-6 * ", ".maximum(1e-16 * ", "test_ns_of_pairs_that_cancel"),
    ("pairs in float32", "omega.py", "DiagonalBlocks.apply(xx @ xx.mT, w)", "DiagonalBlocks.apply((x @ x.mT).double(), w)", "test_pairs_go_in_float64"),
    ("values of pairs in float32", "omega.py", "D = DiagonalBlocks.apply(xx @ xx.mT, w), gate[..., None].double() * windows(d)",
     "D = DiagonalBlocks.apply(xx @ xx.mT, w).float(), gate[..., None] * windows(d)", "test_pairs_go_in_float64"),
    ("NS of pairs: 0 / 0", "muon.py", "torch.where(square > least, square.clamp_min(least).rsqrt(), 0)", "square.rsqrt()", "test_ns_of_pairs"),
    ("a chunk of few pairs: the gate of another token", "omega.py", "gate[..., None].double() * windows(d)", "gate.flip(1)[..., None].double() * windows(d)",
     "test_omega_is_omega_ref"),
    ("a chunk of few pairs: W fades by its first token", "omega.py", "part.ends[..., 0] * a + x.mT", "part.coef[:, :1, 0] * a + x.mT", "test_omega_is_omega_ref"),
    ("few pairs: gradients at W within a chunk", "omega.py", "heads(state.anchor if state.pos else ())", "[]", "test_omega_is_omega_ref"),
    ("few pairs: no ball", "omega.py", "        if (state.pos + c) % rule.chunk == 0:\n            W = rule.bound(W)", "        pass",
     "test_ball_is_the_reference"),
    ("a chunk of few pairs: X^T K D of other pairs", "omega.py", "F.pad(row, (0, 0, j, w - 1 - j)) for j, row in enumerate(a.unbind(2))",
     "F.pad(row, (0, 0, w - 1 - j, j)) for j, row in enumerate(a.unbind(2))", "test_omega_is_omega_ref"),
    ("blocks of a diagonal: gradient one row off", "omega.py", "dG[:, j: j + c] += band(row)", "dG[:, : c] += band(row)", "test_omega_is_omega_ref"),
    ("few pairs: all that is written is counted twice", "bench.py", "for _, b in sizes)      # D D^T", "for a, b in sizes * 2)  # D D^T",
     "test_rule_flops_is_what_omega_does"),
    ("many pairs by pairs", "omega.py", "2 * rule.window**2 <= min", "rule.window**2 <= 3 * min", "test_who_goes_by_pairs"),
    ("pairs where products are coarse", "omega.py", "rule.ns_gram and exact_products(gates.keep.device)", "rule.ns_gram", "test_who_goes_by_pairs"),
    ("pairs past Newton-Schulz", "omega.py", " or rule.ns_dtype or rule.straight_through:", " or rule.ns_dtype:", "test_who_goes_by_pairs"),
    ("pairs in half precision", "omega.py", " or rule.dtype or rule.ns_dtype or", " or rule.ns_dtype or", "test_who_goes_by_pairs"),
    ("NS coefficient mistyped", "muon.py", "2.0315", "2.3015", "test_ns_near_polar_factor"),
    ("NS one update of the Gram matrix short", "muon.py", "R = Q if R is None else", "R = Q if i < 2 else", "test_ns_is_the_plain_iteration"),
    ("NS ignores the precision asked for", "muon.py", "short(S * scale).to(dtype or S.dtype)", "short(S * scale)", "test_ns_half_precision"),
    ("all steps on one Gram matrix", "muon.py", "GRAM_STEPS = 3", "GRAM_STEPS = 5", "test_ns_gradient_in_float32"),
    ("Gram matrices of coarse products", "muon.py", "plain = not gram or ", "plain = ", "test_ns_where_products_are_coarse"),
    ("the chunk form does not ask for exact products", "chunks.py", "rule.ns_gram and exact_products(parts.v.device)", "rule.ns_gram",
     "test_ns_where_products_are_coarse"),
    ("positions in float32", "models.py", 'x.device.type == "mps"', "True", "test_rope_far_into_a_stream"),
    ("a norm's eps goes with the dtype", "models.py", ", eps=2**-23)", ")", "test_norm_is_one_function_in_every_precision"),
    ("W goes on by a product", "chunks.py", "after.addcmul_(shares[:, :, :1, None], W[:, None])",
     "after.add_(torch.bmm(shares[:, :, :1], W[:, None].flatten(2)).view(o.shape))", "test_w_goes_on_in_float32_where_products_are_coarse"),
    ("no gradient through NS", "muon.py", "None, *orthogonalize_backward(stacks, saved, dX, *ctx.how)", "None, *dX", "test_ns_gradient"),
    ("NS of the wrong matrix", "muon.py", "out[i] = x.view(stacks[i].shape)", "out[-i] = x.view(stacks[i].shape)", "test_ns_of_several_matrices"),
    ("gradient of NS not through the norm", "muon.py", "(dX - start * (start", "(dX - 0 * start * (start", "test_ns_gradient"),
    ("gradient of NS: a step less a X", "muon.py", "with_product(D, P, D, a)", "torch.bmm(P, D)", "test_ns_gradient"),
    ("gradient of NS on G not through the norm", "muon.py", ".sub_(along[..., 0])", ".sub_(0 * along[..., 0])", "test_ns_gradient"),
    ("gradient of NS on G: G of one step only", "muon.py", "dQ = torch.baddbmm(dQ, half, G, alpha=2)", "pass",
     "test_ns_gradient"),
    ("NS on G in the precision of S alone", "muon.py", " or inside != stacks[0].dtype", "", "test_ns_half_precision"),
    ("gradient of NS on G: c (dQ G) once", "muon.py", 'dQ4, G, b / 4, c / 2)', 'dQ4, G, b / 4, c / 4)',
     "test_ns_gradient"),
    ("gradient of NS: R of one step only", "muon.py", "Rs.append(torch.bmm(Q, Rs[-1]))", "Rs.append(Q)", "test_ns_gradient"),
    ("gradient of NS: c (dQ G) once", "muon.py", "b / 2, c)", "b / 2, c / 2)", "test_ns_gradient"),

    ("a_i on both sides: 1 / i! where its root belongs", "poly.py", "1 / math.sqrt(math.factorial(i))", "1 / math.factorial(i)",
     "test_phi_starts_as_the_exponential"),
    ("monomials without multinomial weights", "poly.py", "self.multinomial.sqrt()", "1", "test_phi_kernel"),
    ("multinomial weights without their root", "poly.py", "self.multinomial.sqrt()", "self.multinomial", "test_phi_kernel"),
    ("scale of degree 1 missing", "poly.py", "scale[degrees][:, None]", "torch.where(degrees == 1, 1, scale[degrees])[:, None]",
     "test_phi_kernel"),
    ("monomials: a factor's own gradient dropped", "poly.py", "dx[..., i: i + 1, :] += sums", "pass", "test_phi_gradient"),
    ("monomials: a gradient passed to the wrong products", "poly.py", "d_level[..., tail, :].addcmul_", "d_level[..., tail, :].clone().addcmul_", "test_phi_gradient"),
    ("monomials: gradient of the last scale", "poly.py", "dscale[p] += (a * sums).sum()", "pass", "test_phi_gradient"),
    ("kernel with s_i for s_i^2", "poly.py", "self.scale.square()", "self.scale", "test_phi_inner"),
    ("powers only, no products of variables", "poly.py", "levels[-1][..., tail, :], out=out[..., rows, :])",
     "levels[-1][..., [tail.start] * (tail.stop - tail.start), :], out=out[..., rows, :])", "test_capacity"),
    ("sketch outside state_dict (atlas-pytorch)", "poly.py", "torch.zeros(2, dim, sketch_dim))", "torch.zeros(2, dim, sketch_dim), persistent=False)",
     "test_sketch_travels_with_the_model"),
    ("sketch of the wrong size", "poly.py", "self.sketch.shape[-1] ** 0.25", "self.sketch.shape[-1] ** 0.5", "test_sketch_is_unbiased"),

    ("mean for sum in the loss (titans-pytorch)", "memory.py", "0.5 * (y - v).square().sum()", "0.5 * (y - v).square().mean()",
     "test_losses"),
    ("loss without its 1/2", "memory.py", "return 0.5 * (y - v).square()", "return (y - v).square()", "test_losses"),
    ("a new loss runs as l2", "memory.py", "    elif kind != \"l2\":", "    elif False:", "test_a_new_loss_is_never_another"),
    ("sign of the dot-product loss", "memory.py", "return -(y * v).sum()", "return (y * v).sum()", "test_linear_attention"),
    ("sign of its closed gradient", "memory.py", "        return -v\n", "        return v\n", "test_memory_gradients"),
    ("no residual in the memory", "memory.py", "return r + (F.rms_norm", "return (F.rms_norm", "test_memory_formula"),
    ("no residual in the error", "memory.py", "else v - r", "else v", "test_memory_gradients"),
    ("a misplaced bracket in the gradient (fla)", "memory.py", "scale * (e - n * (n * e).mean(-1, keepdim=True))",
     "(scale * e - n * (n * e).mean(-1, keepdim=True))", "test_memory_gradients"),
    ("gated memory: one factor for the other", "memory.py", "gelu_backward(da * u, z), F.gelu(z).mul_(da)]", "gelu_backward(da * u, z), F.gelu(u).mul_(da)]",
     "test_memory_gradients"),
    ("gated memory: its other factor bends not", "memory.py", "[dz * zz + du * zu, dz * zu]", "[dz * zz, dz * zu]", "test_memory_gradients_outer"),
    ("gated memory: one matrix for the other", "memory.py", "torch.cat(W[:-1], -1)", "torch.cat(W[:1] * (len(W) - 1), -1)", "test_memory_gradients"),
    ("inner update under no_grad (Todd_Atlas)", "chunks.py", "put(onegrads[j], **named)", "put(onegrads[j], **{**named, 'xk': None, 'v': None})",
     "test_omega_is_omega_ref[atlas]"),

    ("reference: read before write", "omega.py", "M(W, xq[t], q[t])", "M(W_before, xq[t], q[t])",
     "test_linear_attention", "            W = tuple(keep[t]", "            W_before, W = W, tuple(keep[t]"),
    ("reference: reads the anchor", "omega.py", "M(W, xq[t], q[t])", "M(anchor, xq[t], q[t])", "test_linear_attention"),
    ("reference: window one too short", "omega.py", "max(0, held + t - rule.window + 1), held", "max(0, held + t - rule.window + 2), held",
     "test_swla_by_brute_force"),
    ("reference: gates in reverse", "omega.py", "in zip(weights, pairs))", "in zip(weights.flip(0), pairs))", "test_swla_by_brute_force"),
    ("reference: nothing is forgotten", "omega.py", "keep[t] * w -", "w -", "test_retention"),
    ("reference: momentum of the next token", "omega.py", "tuple(momentum[t] * s + d", "tuple(momentum[t - 1] * s + d", "test_titans"),
    ("reference: no Newton-Schulz", "omega.py", "return newton_schulz_ref(S, *rule.ns_args())", "return S", "test_atlas_linear"),
    ("reference: NS overwrites the momentum", "omega.py", "O = tuple(map(NS, S)) if", "S = O = tuple(map(NS, S)) if", "test_atlas_linear"),
    ("reference: NS of every m-th S alone", "omega.py", "sums = tuple(a + s for a, s in zip(sums, S)) if sums else S", "sums = S",
     "test_newton_schulz_sees_every_token"),
    ("reference: NS of the memory (atlas-pytorch)", "omega.py", "W = tuple(keep[t] * w - step[t] * o for",
     "W = tuple((newton_schulz_ref if rule.muon_every else torch.clone)(keep[t] * w - step[t] * o) for", "test_atlas_linear"),
    ("reference: step inside NS, where it has no effect", "omega.py", "- step[t] * o for", "- (o if rule.muon_every else step[t] * o) for",
     "test_atlas_linear"),
    ("reference: all gradients at M0 (atlas-pytorch)", "omega.py", "                anchor = W  ", "                anchor = anchor  ",
     "test_delta_rule"),
    ("a random memory at every start (Todd_Atlas)", "omega.py", "    return State(base, W, S, W, ()",
     "    W = tuple(w + 0.1 * torch.randn_like(w) for w in W)\n    return State(base, W, S, W, ()", "test_step_zero_reads_M0"),

    ("gradient of a chunk: to the keys through what they write alone", "chunks.py", "to_xw + to_xk, dx)", "to_xw, dx)",
     "test_omega_is_omega_ref[titans]"),
    ("gradient of a chunk: to the keys through what they read alone", "chunks.py", "to_xw + to_xk, dx)", "to_xk)",
     "test_omega_is_omega_ref[titans]"),
    ("gradient of a chunk: to what exp features write, from what they read", "chunks.py", "    if part.xw is None:\n        put", "    if True:\n        put",
     "test_omega_gradcheck[exp-0]"),
    ("gradient of a chunk: to the gates through P", "chunks.py", "dP.addcmul_(dQ, RX)", "dP", "test_omega_is_omega_ref[omeganet]"),
    ("gradient of a chunk: to the gates through what is carried", "chunks.py", "dots(reads, dz)", "0 * dots(reads, dz)",
     "test_omega_is_omega_ref[omeganet]"),
    ("gradient of a chunk: momentum's share of the last W", "chunks.py", "dC[:, 1].addcmul_(dto[:, 0], across)", "pass",
     "test_omega_is_omega_ref[titans]"),
    ("gradient of a chunk: what it hands on keeps nothing", "chunks.py", "    dC.addcmul_(dto, ends)\n", "", "test_omega_is_omega_ref[titans]"),
    ("gradient of a chunk: keep of the whole chunk", "chunks.py", "frobenius(dto, C[i])", "frobenius(dto, dto)", "test_omega_is_omega_ref[titans]"),
    ("W in half precision from chunk to chunk", "chunks.py", "            if how.rule.dtype:", "            if False:",
     "test_what_goes_from_chunk_to_chunk_is_not_in_half_precision"),
    ("its gradient in half precision from chunk to chunk", "chunks.py", "dC, [memory.cast(d, part.coef.dtype) for d in dC]", "dC, dC",
     "test_what_goes_from_chunk_to_chunk_is_not_in_half_precision"),
    ("W in half precision from block to block", "chunks.py", "    with exact(rule, part.G.device):\n        held", "    with nullcontext():\n        held",
     "test_what_goes_from_chunk_to_chunk_is_not_in_half_precision"),
    ("gates in half precision where they are products", "omega.py", "with chunks.exact(rule, q.device):", "if True:",
     "test_gates_are_not_in_half_precision"),
    ("half precision of anything", "omega.py", "if rule.dtype and not (rule.dtype in", "if False and not (rule.dtype in",
     "test_half_precision_is_half_of_float32"),
    ("all of Newton-Schulz in half precision", "chunks.py", "        with exact(rule, part.G.device):\n            new, ns", "        with nullcontext():\n            new, ns", "test_products_in_half_precision"),
    ("the state in half precision", "omega.py", "memory.cast(tail(a, max(T + idle, missing), T), state.k.dtype)", "tail(a, max(T + idle, missing), T)",
     "test_products_in_half_precision[omeganet]"),
    ("answers in half precision", "omega.py", "rule.norm), q.dtype))", "rule.norm), None))", "test_products_in_half_precision[linear attention]"),
    ("what reading gives back is not in half precision", "chunks.py", "for d, c in zip(dlow, dC if rule.dtype else ()):", "for d, c in ():",
     "test_products_in_half_precision[omeganet]"),
    ("gradient of a chunk: u of W from S", "chunks.py", "frobenius(dto[:, 0], C[i][:, 1])", "frobenius(dto[:, 1], C[i][:, 0])", "test_omega_is_omega_ref[titans]"),
    ("gradient of a chunk: its keep at its end", "chunks.py", "plus(dlast, dots(reads, x))\n                combined", "plus(dlast, 0 * dots(reads, x))\n                combined",
     "test_omega_is_omega_ref[titans]"),
    ("gradient of a chunk: to the weights it takes gradients at", "chunks.py", "            c[:, 0].add_(w)", "            pass",
     "test_omega_is_omega_ref[titans]"),
    ("gradient of chunks read together: of each, that of the first", "chunks.py", "ones[j], learned[j], carried", "ones[j], learned[0], carried",
     "test_chunks_read_together[titans-3]"),
    ("gradient of chunks read together: of M0 from the last of them", "chunks.py", "(-1, len(m))).sum(0, dtype=m.dtype)", "(-1, len(m)))[-1]",
     "test_chunks_read_together[from rest-3]"),
    ("chunks read together all read W before the first", "chunks.py", "merged(a[at: at + size])", "merged(a[at: at + 1].expand(size, *a.shape[1:]))",
     "test_chunks_read_together[omeganet-3]"),
    ("without a gradient: a stretch begins with the W that the one before it began with", "chunks.py", "                a[0] = a[size]", "                pass",
     "test_chunks_read_together[omeganet-2]"),
    ("chunks of Newton-Schulz read together take turns at the wrong M0", "chunks.py", "memory.cast(m, how.rule.dtype)[None", "memory.cast(m.flip(0), how.rule.dtype)[None",
     "test_chunks_read_together[atlas, from rest-3]"),
    ("gradient of a Newton-Schulz chunk: W of blocks alone", "chunks.py",
     ".view_as(WO[:, 0]).add_(dheld[:, 0, 0])", ".view_as(WO[:, 0]).mul_(0).add_(dheld[:, 0, 0])",
     "test_omega_is_omega_ref[atlas]"),
    ("gradient of a Newton-Schulz chunk: a single block hands nothing on", "chunks.py",
     "torch.addcmul(dO, dafter, of_O)", "torch.addcmul(dO, dafter, 0 * of_O)",
     "test_omega_is_omega_ref[atlas, from rest]"),
    ("gradient of a Newton-Schulz chunk: to the gates, through the shares of a single block", "chunks.py",
     "F.pad((dafter[:, None] * held)", "F.pad((0 * dafter[:, None] * held)",
     "test_omega_is_omega_ref[atlas, from rest]"),
    ("gradient of a Newton-Schulz chunk: to the gates, through the shares of blocks", "chunks.py",
     "torch.bmm(dafter, WO.flatten(2).mT)", "0 * torch.bmm(dafter, WO.flatten(2).mT)",
     "test_omega_is_omega_ref[atlas]"),
    ("gradient of a Newton-Schulz chunk: to the momentum before", "chunks.py",
     "dS = [(d * momprod).sum(1)", "dS = [(0 * d * momprod).sum(1)",
     "test_omega_is_omega_ref[atlas]"),
    ("gradient of a Newton-Schulz chunk: to what the momentum decays by", "chunks.py",
     "sum((d * s[:, None])", "sum((0 * d * s[:, None])",
     "test_omega_is_omega_ref[atlas]"),
    ("gradient of a Newton-Schulz chunk: every chunk with the S before the first", "chunks.py",
     "            S = last\n", "",
     "test_omega_is_omega_ref[atlas, block = chunk]"),
    ("gradient of a Newton-Schulz chunk: a block in progress", "chunks.py",
     "d[:, -1].add_(dO[i])", "pass",
     "test_omega_is_omega_ref[atlas, mid-block]"),
    ("gradient of a Newton-Schulz chunk: to the weights it takes gradients at", "chunks.py",
     "dfast = dfast._replace(W=[w.add_(d) for w, d in zip(dfast.W, dat)])", "pass",
     "test_omega_is_omega_ref[atlas]"),
    ("gradient of a Newton-Schulz chunk: not through the bound", "chunks.py",
     "dW[i] * balls[i] if balls else dW[i]", "dW[i]",
     "test_ball_is_the_reference[atlas]"),
    ("the sum of S: lost within a block", "chunks.py", "            s[:, 0].add_(fast.sums[i])\n", "            pass\n",
     "test_omega_is_omega_ref[atlas, mid-block]"),
    ("the sum of S: blocks that begin a token late", "omega.py", "device=gates.gate.device) // m", "device=gates.gate.device).sub(1).clamp(0) // m",
     "test_atlas_linear_once_in_a_while"),
    ("Theta Gate: diagonals shifted the wrong way", "omega.py", "(j, gates.gate.shape[-1] - 1 - j)", "(gates.gate.shape[-1] - 1 - j, j)",
     "test_omega_is_omega_ref[atlas]"),
    ("the sum of S: without a gradient from chunk to chunk", "chunks.py", "Fast(dW, dS, dbefore, dO)", "Fast(dW, dS, [0 * d for d in dbefore], dO)",
     "test_omega_is_omega_ref[atlas, no momentum, long]"),
    ("the first block repeats the one before a pause", "chunks.py", "if rule.muon_every > 1 and not sums:", "if rule.muon_every > 1:",
     "test_atlas_linear_once_in_a_while"),
    ("gradient of a Newton-Schulz chunk: to M0 from the first that reads it", "chunks.py", '.sum(0, dtype=m.dtype).sum(1) for d, m', '[0].sum(1) for d, m',
     "test_chunks_read_together[atlas, from rest-3]"),
    ("a chunk that begins at rest is not read alone", "chunks.py", "return [slice(0, 1)] * first", "return [slice(0, 2)] * first",
     "test_chunks_read_together[from rest, no momentum-1]"),
    ("gradient of a chunk: not through the bound", "chunks.py", "        c[:, 0].mul_(ball)", "        pass",
     "test_ball_is_the_reference[omeganet]"),
    ("gradient of a chunk: not through the last bound", "chunks.py", "        d[:, 0].mul_(ball[-N:])", "        pass",
     "test_ball_is_the_reference[omeganet]"),
    ("gelu again: half of Phi", "memory.py", ".erf_().add_(1).mul_(0.5)", ".erf_().add_(1).mul_(0.25)", "test_omega_is_omega_ref[titans]"),
    ("a transformer's attention is not compiled", "models.py", "                block.compile(**omega.compiler(device, options))", "                pass",
     "test_blocks_of_a_transformer_compile_whole"),
    ("blocks with a memory are compiled whole", "models.py", "            if isinstance(block.mixer, Attention):\n                block.compile",
     "            if True:\n                block.compile", "test_compile_memory_compiles_chunk_steps[atlas-blocks0]"),
    ("what follows a mixer is not compiled", "models.py", '[(Block, "after")]', "[]", "test_chunk_steps_compile_whole[omeganet]"),
    ("norms outside of what is compiled are not compiled", "models.py", ', (Norm, "forward")]', "]", "test_chunk_steps_compile_whole[omeganet]"),
    ("what follows a memory is not compiled", "models.py", ', (Memory, "finish")', "", "test_chunk_steps_compile_whole[omeganet]"),
    ("compiled, the recurrence is one product", "omega.py", "b and c > b and c % b == 0 else 0", "False else 0",
     "test_compiled_recurrences_take_a_tile_at_once[omeganet]"),
    ("compiled, what is no whole number of tiles is cut into them", "omega.py", "c > b and c % b == 0 else", "c > b else",
     "test_compiled_recurrences_take_a_tile_at_once[window]"),
    ("compiled, P is not of tiles", "omega.py", "tiled_mixing(gates, b) if b", "plain_mixing(gates) if b",
     "test_compiled_recurrences_take_a_tile_at_once[omeganet]"),
    ("a tile does not go on from the one before it", "omega.py", "(y + kept * F.pad(after", "(y + 0 * kept * F.pad(after", "test_recurrence"),
    ("a tile goes on from itself", "omega.py", "F.pad(after[..., :-1, :], (0, 0, 1, 0))[..., None, :]", "after[..., None, :]", "test_recurrence"),
    ("W does not cross tiles with S", "omega.py", 'run(0, *(mix["across"]', 'run(0, *(0 * mix["across"]', "test_tiles_are_one_chunk"),
    ("a tile's pairs are those of the first", "omega.py", "F.pad(a, (0, c)).flatten(-2)[..., : tiles * n].unflatten(-1, (tiles, n))",
     "F.pad(a, (0, n - b - w + 1))", "test_tiles_are_one_chunk"),
    ("a tile begins with the state after it", "omega.py", "a[..., :-1, None, to]", "a[..., 1:, None, to]", "test_tiles_are_one_chunk"),
    ("what is left of a chunk's state is one tile's", "omega.py", "ends=after[..., n:, :]", "ends=(0 * after[..., n:, :] + 1)", "test_tiles_are_one_chunk"),
    ("what tiles leave are views of their rows", "omega.py", "{name: a.clone() for name, a in views.items()}", "views", "test_tiles_are_one_chunk"),
    ("the compiler writes what it could compute again", "omega.py", "for name, n in AGAIN.items() if name in", "for name, n in {}.items() if name in",
     "test_what_the_compiler_is_told"),
    ("blocks of attention are compiled otherwise", "models.py", "block.compile(**omega.compiler(device, options))", "block.compile(**options)",
     "test_what_the_compiler_is_told"),
    ("a CPU's compiler is told what is for a GPU", "omega.py", "if device != \"cuda\" or options", "if options",
     "test_what_the_compiler_is_told"),
    ("a compiler without the option is told of it", "omega.py", " if name in torch._inductor.list_options()})", "})", "test_what_the_compiler_is_told"),
    ("what was asked of the compiler is replaced", "omega.py", 'device != "cuda" or options.keys() & {"backend", "mode", "options"}', 'device != "cuda"',
     "test_what_the_compiler_is_told"),
    ("what the mixer answers is subtracted", "models.py", "x = x + self.dropout(y)", "x = x - self.dropout(y)", "test_block_is_a_residual_of_each_half"),
    ("the SwiGLU reads what is not normed", "models.py", "self.mlp(self.norm2(x))", "self.mlp(x)", "test_block_is_a_residual_of_each_half"),
    ("top_p below 0 is taken", "models.py", "top_k >= 0 and top_p >= 0", "top_k >= 0", "test_bad_arguments"),
    ("a stream's loss is below 0", "eval.py", "total + loss", "total - loss", "test_stream_tells_growth_and_nan"),
    ("the last row of P is a view of it", "omega.py", "@ rows\n    return y, y[..., -1, :].clone()", "@ rows\n    return y, y[..., -1, :]",
     "test_recurrence"),
    ("a state that nobody uses has a gradient", "chunks.py", "[torch.zeros_like(d, dtype", "[torch.ones_like(d, dtype", "test_chunks_read_together"),
    ("mps by itself", "machine.py", 'name = "cuda" if there["cuda"] else "cpu"', 'name = next(kind for kind in there if there[kind])',
     "test_mps_has_to_be_asked_for"),
    ("a thread for each core of the host", "machine.py", "cpu_quota() < torch.get_num_threads()", "False",
     "test_no_more_threads_than_a_container_may_run"),
    ("no memory to tell of, no stream", "machine.py", "    except ImportError:\n        return math.nan\n", "    except ZeroDivisionError:\n        pass\n",
     "test_resident_memory_of_any_system"),
    ("the outer Muon emulates bfloat16", "train.py", "if native_bfloat16(self.param_groups[0]", "if True or native_bfloat16(self.param_groups[0]",
     "test_outer_muon_is_torch_muon"),
    ("the outer Muon: momentum without Nesterov's", "train.py", "updates.append(p.grad.lerp(buffer, group[\"momentum\"]))",
     "updates.append(buffer)", "test_outer_muon_is_torch_muon"),
    ("the outer Muon: tall matrices as wide ones", "train.py", "max(1, p.shape[0] / p.shape[1])", "max(1, p.shape[1] / p.shape[0])",
     "test_outer_muon_is_torch_muon"),
    ("gradient of gelu'", "memory.py", "neg_().add_(2)", "neg_().add_(1)", "test_omega_is_omega_ref[titans]"),
    ("gradient of gelu", "memory.py", "add_product(da, df, W[1].mT)), slope)", "add_product(da, df, W[1].mT)), 0 * slope)",
     "test_omega_is_omega_ref[titans]"),
    ("gradient of the error: through the norm", "memory.py", "- n * (mean(dn * e) + mean(n * dy))", "- n * mean(n * dy)", "test_memory_gradients_outer"),
    ("a memory that stays zero", "chunks.py", "pos=pos, zero=False)", "pos=pos, zero=state.zero)", "test_omega_is_omega_ref[from rest]"),
    ("W taken for zero where it is not counted from M0", "omega.py", "None, 0, bool(base))", "None, 0, True)",
     "test_omega_is_omega_ref[omeganet]"),
    ("exp features, written out as keys", "poly.py", '        if self.kind == "exp":\n            raise ValueError',
     '        if self.kind == "exp":\n            return x\n            raise ValueError', "test_exp_has_no_reference_and_no_newton_schulz"),
    ("a block keeps what blocks before it forgot", "omega.py", "kept, A = decay(log(keep).sum(-1))", "kept, A = decay(0 * log(keep).sum(-1))",
     "test_omega_is_omega_ref[atlas, mid-block]"),
    ("missing tokens of a block forget", "omega.py", "(gates.keep, 1.0)", "(gates.keep, 0.9)",
     "test_omega_is_omega_ref[atlas, mid-block]"),
    ("a block that another follows taken for a single one", "chunks.py", "if pos + length > every", "if pos + length > 2 * every",
     "test_omega_is_omega_ref[atlas, across blocks]"),
    ("Theta Gate: Theta a token late", "omega.py", "gates.momentum.roll(-1, -1)", "gates.momentum",
     "test_omega_is_omega_ref[atlas]"),
    ("forgetting never reaches zero", "omega.py", 'if rule.forget == "start" else ()', "if True else ()", "test_delta_rule"),
    ("gradients without M0", "chunks.py", "        W = [start_plus(m, w) for m, w in zip(M0, W)]\n", "        pass\n",
     "test_delta_rule"),
    ("M0 is not read", "chunks.py", "else torch.bmm(R, turn(M0, tall))", "else 0 * torch.bmm(R, turn(M0, tall))",
     "test_omega_is_omega_ref[forget what was written]"),
    ("all gradients at zero", "chunks.py", "[c[:, 0] for c in C], len(part.v))", "[0 * c[:, 0] for c in C], len(part.v))",
     "test_delta_rule"),
    ("the anchor of an earlier chunk", "chunks.py", "anchor=state.anchor if pos else W,", "anchor=state.anchor,", "test_omega_splits_anywhere"),
    ("the anchor moves at every call (atlas-rnn)", "chunks.py", "if state.zero or not state.pos:", "if True:", "test_omega_splits_anywhere"),
    ("sign of the write", "omega.py", "cumprod(gates.keep), -gates.step", "cumprod(gates.keep), gates.step", "test_linear_attention"),
    ("decay counts the token's own keep", "omega.py", "(logs - logs.mT + above)", "(logs - logs.mT.roll(1, -1) + above)",
     "test_recurrence"),
    ("a row keeps as much as the row before it", "omega.py", "by[t], take[t - 1]", "by[t - 1], take[t - 1]", "test_retention"),
    ("gradient of the recurrence: of one row", "omega.py", "by[t], take[t], out", "by[t], give[t], out", "test_recurrence"),
    ("gradient of the recurrence: to the next factor", "omega.py", ".sum(-1), (1, 0)), drows", ".sum(-1), (0, 1)), drows",
     "test_recurrence"),
    ("masked after exp", "omega.py", "(logs - logs.mT + above).exp()", "(logs - logs.mT).exp().tril()", "test_extreme_gates"),
    ("gates in reverse", "omega.py", "F.pad(gate, (0, c))", "F.pad(gate.flip(-1), (0, c))", "test_swla_by_brute_force"),
    ("pairs that should be idle", "omega.py", "F.pad(gate, (idle, 0))", "F.pad(gate, (0, idle))", "test_omega_is_omega_ref[omeganet]"),
    ("the state keeps idle pairs", "omega.py", "max(T + idle, missing), T)", "max(T, missing), T)", "test_omega_is_omega_ref[omeganet]"),
    ("first windows off by one", "omega.py", "(pair >= missing)", "(pair > missing)", "test_swla_by_brute_force"),
    ("first windows see padding", "omega.py", "(pair >= missing)", "(pair >= 0)", "test_omega_is_omega_ref[omeganet]"),
    ("no momentum inside a chunk", "omega.py", "recur(gates.momentum, band(gates.gate))\n", "recur(0 * gates.momentum, band(gates.gate))\n", "test_titans"),
    ("momentum dropped from the carried state", "chunks.py", "back(1) if state.S",
     "tuple(0 * s for s in back(1)) if state.S", "test_omega_splits_anywhere"),
    ("window truncated at the end of a call", "omega.py", "k=last(ks), v=last(vs)",
     "k=ks[:, :, :0], v=vs[:, :, :0]", "test_omega_splits_anywhere"),
    ("every position reads with the chunk's last decay (Todd_Atlas)", "chunks.py", "= read_carried(rows, nth_or_none(C, i), part.coef,",
     "= read_carried(rows, nth_or_none(C, i), part.coef[:, -1:].expand_as(part.coef),", "test_causal"),
    ("one memory for the whole batch (Atlas-MAG_OmegaRule)", "chunks.py", "return state._replace(W=W,",
     "return state._replace(W=tuple(w.mean(0, keepdim=True).expand_as(w) for w in W),", "test_rows_are_independent"),
    ("queries and keys in different feature spaces (atlas-pytorch)", "omega.py", "features(rule, phi, cq)", "features(rule, phi, cq.roll(1, -1))",
     "test_omega_is_omega_ref[omeganet]"),
    ("NS of a block in progress forgotten", "chunks.py", "[o[:, -1] for o in new]", "[o[:, 0] for o in new]",
     "test_omega_is_omega_ref[atlas, mid-block]"),
    ("momentum of the first token of a block dropped", "chunks.py", "state, W, S, count * c, O", "state, W, state.S, count * c, O",
     "test_omega_is_omega_ref[atlas, mid-block]"),
    ("exp kernel less one", "poly.py", "(x @ y.mT).exp()", "(x @ y.mT).expm1()", "test_unnormalised_softmax_attention"),
    ("exp memory forgets M0", "omega.py", "torch.cat([r, (r @ keys.mT).exp()], -1)", "torch.cat([0 * r, (r @ keys.mT).exp()], -1)",
     "test_monomials_converge_to_exp"),

    ("M0 detached", "models.py", "list(self.M0)", "[w.detach() for w in self.M0]", "test_every_parameter_learns"),
    ("inner loop outside of the outer graph", "models.py", "with memory.autocast(x.device):                       # fast",
     "with torch.no_grad(), memory.autocast(x.device):      # fast", "test_every_parameter_learns"),
    ("inner loop writes to the parameters (Atlas-MAG_OmegaRule)", "models.py", "        return self.finish(x, y), MemoryState",
     "        self.M0[-1].data = inner.W[-1][0].detach().clone()\n        return self.finish(x, y), MemoryState",
     "test_forward_changes_nothing[titans]"),
    ("no learning in eval (Atlas-MAG_OmegaRule)", "models.py", "step.sigmoid().squeeze(-1)",
     "step.sigmoid().squeeze(-1) * self.training", "test_forward_changes_nothing"),
    ("no token mixing (davidbasilefilho)", "models.py", "return self.finish(x, y), MemoryState", "return self.finish(x, v), MemoryState",
     "test_causal"),
    ("window weight grows with the window", "models.py", ") / c.window", ") / 1", "test_gates_are_in_range"),
    ("step does not know the chunk", "models.py", "c.max_step / c.chunk *", "c.max_step *", "test_gates_limit_what_a_chunk_writes"),
    ("gates of heads and kinds mixed up", "models.py", "x.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2)",
     "x.unflatten(-1, (-1, self.config.n_head)).permute(0, 3, 1, 2)", "test_gates_of_heads_and_tokens"),
    ("keep and momentum swapped", "models.py", "keep, step, momentum, gate = self.heads", "momentum, step, keep, gate = self.heads",
     "test_gates_of_heads_and_tokens"),
    ("--no-muon does not reach the rule", "models.py", "if self.muon else 0", "if True else 0", "test_config_reaches_the_rule"),
    ("convolution sees the next token (atlas-rnn)", "models.py", "convolve(seen, taps, y[:, now])", "convolve(seen.roll(-1, 1), taps, y[:, now])",
     "test_causal"),
    ("a piece of the convolution does not see the one before it", "models.py", "x[:, t - n: now.stop] if t else", "torch.cat([before, x[:, now]], 1) if t else",
     "test_convolution"),
    ("convolution of width 1 (atlas-pytorch)", "models.py", "for j in range(1, len(taps)):", "for j in range(3, len(taps)):",
     "test_convolution"),
    ("gradient of unit vectors: along them", "models.py", "(g * y).sum(-1, keepdim=True), value=-1", "(g * y).sum(-1, keepdim=True), value=0",
     "test_unit_vectors"),
    ("gradient of the convolution: one tap for all", "models.py", "addcmul_(dz, taps[j])", "addcmul_(dz, taps[0])", "test_convolution"),
    ("gradient of the convolution: what was in memory for the tokens before it", "models.py", "dx[:, :n] = 0", "dx[:, :n] = 1", "test_convolution"),
    ("gradient of the convolution: taps a token late", "models.py", "(dz * seen[:, j: j + dz.shape[1]])", "(dz * seen[:, : dz.shape[1]])",
     "test_convolution"),
    ("gradient of a pair in two chunks: from one", "omega.py", "da[:, :, i: i + count, : part", "da[:, :, : count, : part",
     "test_omega_is_omega_ref[omeganet]"),
    ("windows drawn with repetition", "data.py", "random.permutation(count)", "random.integers(count, size=count)",
     "test_an_epoch_has_every_window_once"),
    ("a slice of token files ends with the first", "data.py", "if i < b and a < i + len(part)]", "if i <= a < i + len(part)]",
     "test_several_token_files_are_one"),
    ("a header read as ids", "data.py", 'np.memmap(path, "<u2", "r", header)', 'np.memmap(path, "<u2", "r", 0)',
     "test_several_token_files_are_one"),
    ("ids that the vocabulary lacks", "data.py", "if greatest >= tokenizer.vocab_size:", "if greatest > tokenizer.vocab_size:",
     "test_token_files_that_are_none"),
    ("token files not told apart", "data.py", "                digest.update(block)\n", "", "test_several_token_files_are_one"),
    ("token files that overlap", "data.py", "every.seek(2 * cut)", "every.seek(0)", "test_token_files_are_the_text"),
    ("--resume ignores flags that came later", "train.py",
     "train = {n: v for n, v in train.items() if n not in LAUNCH} | {n: v for n, v in given.items() if n in RUN_FLAGS}",
     "train = {n: given.get(n, v) for n, v in train.items() if n not in LAUNCH}", "test_resume_of_a_run_of_an_older_version"),
    ("--resume compares flags that came later with nothing", "train.py", "{**defaults, **train, **config}[name]", "{**train, **config}.get(name)",
     "test_resume_of_a_run_of_an_older_version"),
    ("--resume from before what another run has saved", "train.py", "if ckpt and not rank() and Path(", "if False and Path(",
     "test_a_run_that_ends_while_it_is_resumed"),
    ("no memory to load: a foreign file", "train.py", '        if out_of_memory(fault):\n            raise\n        why = "holds', '        why = "holds',
     "test_no_memory_for_a_checkpoint"),
    ("no memory for a model: another version", "train.py", '        if out_of_memory(fault):\n            raise\n        why = " "', '        why = " "',
     "test_no_memory_for_a_checkpoint"),
    ("no memory for --init: another shape", "train.py", "            if out_of_memory(fault):\n                raise\n            differ", "            differ",
     "test_no_memory_for_a_checkpoint"),
    ("optimizers of another version", "train.py", "(AttributeError, KeyError, RuntimeError, TypeError, ValueError) as fault:", "AttributeError as fault:",
     "test_optimizers_of_another_version"),
    ("any archive is a hostile one", "train.py", 'if any(n.endswith("data.pkl") for n in names) else', "if True else",
     "test_broken_and_foreign_checkpoints_are_refused_each_in_its_own_words"),
    ("no place for compiled files ends a run", "machine.py", "isinstance(fault, OSError) or type(fault)", "type(fault)",
     "test_where_compiling_fails_nothing_is_compiled"),
    ("what stdout does not take fails at exit, too", "machine.py", 'print(end="", flush=True) ', "pass ", "test_what_stdout_does_not_take"),
    ("the bench holds its lines back", "bench.py", "Parser, UserError, at_least, say\n", "Parser, UserError, at_least\nsay = print\n", "test_what_stdout_does_not_take"),
    ("--init --size auto", "train.py", ' and (n, v) != ("size", "auto")}', "}", "test_a_run_that_begins_with_the_weights_of_another"),
    ("token files for any vocabulary", "data.py", '        if tokenizer.kind not in ("byte", "gpt2"):', "        if False:",
     "test_token_files_for_a_vocabulary_of_another_text"),
    ("token files of 4 bytes an id", "data.py", "if len(ids) >= 1000 and", "if False and", "test_token_files_that_are_none"),
    ("token files of zeros", "data.py", "and ids[: 2**20: 2].any() and not", "and not",
     "test_token_files_for_a_vocabulary_of_another_text"),
    ("token files of Llama's", "data.py", "if magic == LLM_C_LLAMA:", "if False:", "test_token_files_that_are_none"),
    ("mqar: pairs looked at when it is their turn", "eval.py", "for n in args.pairs:\n        if args.vocab", "for n in args.pairs[:1]:\n        if args.vocab",
     "test_eval_mistakes_are_one_line"),
    ("a setting beyond float32", "models.py", 'torch.finfo(torch.float32).max, "finite in float32"', 'math.inf, "finite"',
     "test_bad_configurations"),
    ("Newton-Schulz sees a half's rounding", "chunks.py", "x, d = memory.cast(x, G.dtype), memory.cast(d, G.dtype)\n        with exact(how.rule, G.device): ",
     "if True: ", "test_newton_schulz_in_a_memory_in_bfloat16"),
    ("a ball too small for a number", "models.py", "if 0 < self.max_norm < 1e-30:", "if False:", "test_bad_configurations"),
    ("SIGTERM leaves half made files", "data.py", "    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))", "    pass",
     "test_stopped_making_token_files"),
    ("a mark of byte order dropped in the middle of a file", "data.py", "data if offset else data.removeprefix", "data.removeprefix",
     "test_token_files_are_the_text"),
    ("byte pairs of what a merge has made not counted", "data.py", "((before, -n), (after, n))", "((before, -n),)",
     "test_bpe_merges_what_occurs_most"),
    ("a word of a text counted once", "data.py", "counts[pair] += n", "counts[pair] += 1", "test_bpe_merges_what_occurs_most"),
    ("byte pairs that occur once", "data.py", "if minus_n > -2:", "if minus_n > -1:", "test_bpe_merges_what_occurs_most"),
    ("byte pairs of the text to validate on", "data.py", "text[:len(text) * 9 // 10]", "text", "test_bpe_learns_from_what_is_trained_on"),
    ("--init without the weights", "train.py", "        try:\n            model.load_state_dict(origin", "        try:\n            dict(origin",
     "test_a_run_that_begins_with_the_weights_of_another"),
    ("--init without the network", "train.py", 'origin["config"] if origin else {', 'origin["config"] if not given else {',
     "test_a_run_that_begins_with_the_weights_of_another"),
    ("every epoch cut alike", "data.py", "[seed % 2**64, number]", "[seed % 2**64, 0]", "test_an_epoch_has_every_window_once"),
    ("each process takes all passes", "train.py", "parts[rank()::processes()]", "parts", "test_two_processes_train_like_one"),
    ("each process by its own gradient", "train.py", "for a in (loss, *grads.values()):", "for a in [loss]:",
     "test_two_processes_train_like_one"),
    ("a late run keeps its rates high", "train.py", "lr_scale(step - 1, tc, earlier + tick - began)", "lr_scale(step - 1, tc)",
     "test_minutes_end_a_run_whose_steps_take_too_long"),
    ("a time limit on steps that were asked for", "train.py", '"steps" in given and "minutes" not in given', "False",
     "test_tiny_has_a_time_limit_unless_steps_are_asked_for"),
    ("the embedding's rate for all of AdamW", "train.py", "dict(params=rest, weight_decay=0.0)]", "dict(params=rest, weight_decay=0.0, times=tc.embed_lr)]",
     "test_embed_lr_is_of_the_embedding_alone"),
    ("convolution forgets its tail", "models.py", "last.to(tail.dtype, copy=x.shape[1] > 1)", "tail", "test_any_split_is_the_whole"),
    ("the convolution's tail holds the prompt", "models.py", ", copy=x.shape[1] > 1)", ")", "test_a_state_holds_no_prompt[omeganet]"),
    ("the last pairs and keys hold the prompt", "omega.py", "a[:, :, first:].clone() if first and T > 1 else a", "a",
     "test_a_state_holds_no_prompt[swa]"),
    ("the last pairs hold the prompt", "omega.py", "v=last(vs))", "v=vs[:, :, max(T + idle, missing):])",
     "test_a_state_holds_no_prompt[omeganet]"),
    ("layers used apart draw what comes next", "models.py", 'int(torch.randint(2**31, (), device=device if cuda else "cpu"))', "0",
     "test_a_layer_draws_numbers_of_its_own", "torch.default_generator.manual_seed(seed)", "None"),
    ("two runs in one folder", "machine.py", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "test_one_run_a_folder"),
    ("a longer run ends with its old limit of time", "train.py", '"steps" in given and "minutes" not in given', "not ckpt and 'steps' in given",
     "test_a_finished_run_can_be_made_longer"),
    ("nohup undone", "machine.py", " and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN", "", "test_nohup"),
    ("torchrun's own signal counts as the second", "machine.py", "if processes() > 1 and time.monotonic()", "if False and time.monotonic()",
     "test_two_processes_train_like_one"),
    ("a token of exp features writes all keys", "omega.py", "torch.eye(ks.shape[2], dtype=q.dtype, device=q.device)",
     "torch.eye(n, dtype=q.dtype, device=q.device)[-ks.shape[2]:, -ks.shape[2]:]", "test_a_token_of_exp_features_is_not_a_square_of_those_before"),
    ("a long prompt in one piece", "models.py", "tokens.split(1024, -1)", "[tokens]", "test_a_long_prompt_is_read_in_pieces"),
    ("detached, but of inference mode", "models.py", "t.detach().clone() if t.is_inference() else t.detach()", "t.detach()  ",
     "test_what_was_read_without_a_gradient_can_be_learned_from"),
    ("a token file read as text", "data.py", 'if str(name).endswith(".bin") and', "if False and", "test_a_token_file_is_no_text"),
    ("a last pass without end", "train.py", "            part = ids[: batch_size * LONGEST + 1]", "            part = ids",
     "test_where_each_token_costs_more_than_the_last_the_last_pass_ends_earlier"),
    ("out of memory, in a traceback", "machine.py", "        if out_of_memory(fault):\n            message", "        if False:\n            message",
     "test_out_of_memory_elsewhere"),
    ("a preset without its norm", "models.py", 'loss="dot", window=1, memory_norm=True,             **_simple)',
     'loss="dot", window=1,             **_simple)', "test_models_py_prints_the_models_of_the_paper"),
    ("the table of models tells nothing", "models.py", 'phi = c.features in ("sketch", "exp") or', 'phi = c.features in ("none", "elementwise") or',
     "test_models_py_prints_the_models_of_the_paper"),
    ("python models.py at other lengths", "models.py", "for T in (256, 1024))",
     "for T in (257, 1024))", "test_models_py_prints_the_models_of_the_paper"),
    ("any name for what is forgotten", "models.py", ',\n                      choices=("start", "zero"))',
     ")", "test_every_choice_and_every_least_number_is_checked"),
    ("a network without tokens", "models.py", 'set from the tokenizer", low=1)',
     'set from the tokenizer")', "test_every_choice_and_every_least_number_is_checked"),
    ("mag without a window", "models.py", 'if self.wiring != "lmm" and not self.attn_window:', "if False:", "test_bad_configurations"),
    ("a network of exp features with Newton-Schulz", "models.py", 'if self.muon and self.features == "exp" and not attention:', "if False:",
     "test_bad_configurations"),
    ("a transformer's features are looked at", "models.py", 'self.features == "exp" and not attention', 'self.features == "exp"',
     "test_odd_but_right_configurations"),
    ("features of degree 1 count as products", "models.py", 'c.features == "monomial" and c.degree > 1', 'c.features == "monomial"',
     "test_models_py_prints_the_models_of_the_paper"),
    ("top-p of 1 leaves tokens out", "models.py", "    if top_p < 1: ", "    if True: ", "test_top_p_of_one_leaves_out_no_token"),
    ("a count of ids in 32 bits", "data.py", '"<i4", 3).tolist()', '"<i4", 3)', "test_token_files_that_are_none"),
    ("growth that is hidden by one that is not known", "eval.py", "any(by > 0.05 for by in growth)", "max(growth) > 0.05",
     "test_stream_tells_growth_and_nan"),
    ("features of degree 0", "poly.py", "        if degree < 1:", "        if False:", "test_bad_arguments"),
    ("the reference with half of a momentum", "omega.py", '    check_momentum(gates, state)\n    pos, held', '    pos, held',
     "test_bad_arguments"),
    ("the formulas with half of a momentum", "omega.py", "    check_momentum(gates, state)\n    if state.pos", "    if state.pos", "test_bad_arguments"),
    ("autocast reaches what is retrieved", "models.py", "with memory.autocast(x.device):\n            rule =",
     "with nullcontext():\n            rule =", "test_retrieve_keeps_float32_inside_of_autocast"),
    ("--tie ties nothing", "models.py", "            self.head.weight = self.embed.weight\n", "            pass\n", "test_tie_is_one_matrix"),
    ("compile_memory leaves the chunk steps", "models.py", "        omega.compile_chunks(device, **options)\n",
     "", "test_compile_memory_compiles_chunk_steps"),
    ("the loss is not compiled", "models.py", '[(sys.modules[__name__], "cross_entropy")]', "[]", "test_blocks_of_a_transformer_compile_whole"),
    ("NS of the definition in another type", "muon.py", "    X = X.to(S.dtype)\n    return start", "    return start", "test_ns_half_precision"),
    ("W counted twice at a chunk boundary", "models.py", "        state = state._replace(anchor=())                     # the same",
     "        pass                     # the same", "test_state_bytes_counts_each_tensor_once"),
    ("total of a memory that is counted from zero", "omega.py", "for a, b in zip(M0, state.W)) if M0 else state.W",
     "for a, b in zip(M0, state.W))", "test_any_split_is_the_whole[forget M0-mac]"),
    ("a compiler that failed is asked again", "train.py", '            torch.compiler.set_stance("force_eager")\n',
     "", "test_where_compiling_fails_nothing_is_compiled"),
    ("resuming asks for the vocabulary", "train.py", 'tokenizer_from_state(known["tokenizer"]) if known else make_tokenizer(',
     "make_tokenizer(", "test_resume_asks_for_no_vocabulary"),
    ("--threads does nothing", "machine.py", "    if n:\n        torch.set_num_threads(n)",
     "    if False:\n        torch.set_num_threads(n)", "test_threads_reach_torch"),
    ("--threads of eval.py does nothing", "eval.py", "    machine.set_threads(args.threads)\n", "", "test_threads_reach_torch"),
    ("a bucket of no positions", "eval.py", "for i in range(60) if 16 * 2**i < length)",
     "for i in range(60) if 15 * 2**i < length)", "test_position_loss_is_the_mean_loss_seen_by_position"),
    ("the convolution rounds to what comes in", "models.py", "y = torch.empty_like(x, dtype=taps.dtype)",
     "y = torch.empty_like(x)", "test_convolution_of_what_autocast_leaves"),
    ("a state holds all blocks", "chunks.py", "[a.clone() for group in fast for a in group]",
     "[a for group in fast for a in group]", "test_a_state_holds_no_prompt[blocks]"),
    ("the bench's clock adds", "bench.py", "return timer() - began", "return timer() + began", "test_clock_is_the_time_between"),
    ("eval.py's help tells another default", "eval.py", '"--seq-len", type=int, default=24',
     '"--seq-len", type=int, default=25', "test_help_tells_the_defaults"),
    ("the rates fall with the time since the machine was switched on", "train.py", "lr_scale(step - 1, tc, earlier + tick - began)",
     "lr_scale(step - 1, tc, earlier + tick)", "test_minutes_end_a_run_whose_steps_take_too_long"),
    ("the end is of the last weights", "train.py", '    model.load_state_dict(ckpt["model"])\n    val, trained',
     "    val, trained", "test_the_end_is_of_the_best_weights"),
    ("eval.py reads with dropout", "eval.py", "model.to(device).eval()", "model.to(device)", "test_eval_reads_without_dropout"),
    ("rates to blame before the first step", "train.py", 'or raise --warmup" if step else "--max-step"', 'or raise --warmup"',
     "test_a_first_gradient_that_is_too_large"),
    ("a stream that is not finite", "eval.py", '            raise machine.Halt(f"the loss is {loss} after {seen:,} tokens of the stream")', "            return",
     "test_stream_tells_growth_and_nan"),
    ("tables that are not finite", "eval.py", "if not (math.isfinite(loss) and at.isfinite().all()):", "if False:", "test_eval_ends_with_an_error_where_it_says_nan"),
    ("recall with a gradient that is not finite", "eval.py", "if not (loss.isfinite() and norm.isfinite()):", "if not loss.isfinite():",
     "test_mqar_stops_at_the_first_gradient_that_is_not_finite"),
    ("a folder that is a link", "data.py", ", followlinks=True", "", "test_linked_folders_are_read_and_each_once"),
    ("a folder read twice", "data.py", "            folders.clear()\n            continue\n", "            folders.clear()\n", "test_linked_folders_are_read_and_each_once"),
    ("nanoGPT's characters", "data.py", "(meta := Path(name, \"meta.pkl\")).exists()", "(meta := Path(name, \"no.pkl\")).exists()",
     "test_token_files_of_a_vocabulary_of_their_own"),
    ("a text that was cut", "data.py", 'error.reason == "unexpected end of data"', "False", "test_a_text_that_was_cut_within_a_character"),
    ("-- is an empty list", "machine.py", 'if arg_strings != ["--"] or', "if True or", "test_two_dashes_are_a_value"),
    ("lines wait in a buffer", "machine.py", "print(text, flush=True)", "print(text)", "test_lines_arrive_when_they_are_said"),
    ("every process saves", "train.py", "    if rank():\n        return\n    with writing", "    with writing", "test_one_process_saves"),
    ("the residual stream grows with its depth", "models.py", "(2 * self.config.n_layer) ** -0.5", "2 ** -0.5", "test_starting_values_by_hand"),
    ("a tied embedding starts large", "models.py", "std=0.02 if self.config.tie else 1.0", "std=1.0", "test_starting_values_by_hand"),
    ("samples with dropout", "train.py", "model.eval().generate(", "model.generate(", "test_writing_is_without_dropout"),
    ("a sample is for its own terminal", "machine.py", 'sys.stdout.reconfigure(errors="replace")',
     "pass", "test_a_sample_with_letters_that_the_terminal_has_not"),
    ("M0 of the size of its features", "models.py", "std=times * self.M0[-1].shape[1] ** -0.5",
     "std=times * self.M0[0].shape[1] ** -0.5", "test_starting_values_of_memories"),
    ("M0 adds much to what it reads", "models.py", "else 0.25\n", "else 1.0\n", "test_starting_values_of_memories"),
    ("what a norm undoes begins small", "models.py", "else 1.0 if c.memory_norm else 0.25", "else 0.25", "test_starting_values_of_memories"),
    ("tied embeddings are small", "models.py", "x = x * self.config.n_embd ** 0.5", "x = x / self.config.n_embd ** 0.5", "test_tie_is_one_matrix"),
    ("--seed of mqar is of the sequences alone", "eval.py", "    torch.manual_seed(args.seed)\n    for n", "    for n",
     "test_seed_of_mqar_reaches_weights_and_sequences"),
    ("a checkpoint without its seconds", "train.py", "            seconds=float, model=dict",
     "            model=dict", "test_a_checkpoint_without_one_of_its_parts_is_refused"),
    ("--eval-windows in the place of --batch-size", "train.py", "tc.batch_size, tc.eval_windows, dtype=dtype)",
     "tc.eval_windows, tc.batch_size, dtype=dtype)", "test_validation_is_of_as_many_windows_as_asked_for"),
    ("a command of the README with a flag of another script", "README.md", "python eval.py --ckpt out  ", "python eval.py --prompt out  ",
     "test_readme_commands_are_understood"),
    ("generate forgets the text before the prompt", "models.py", "        for _ in range(max_new_tokens):", "        state = None\n        for _ in range(max_new_tokens):",
     "test_generate"),
    ("layers used apart are dead", "models.py", "        layer.init()\n", "        pass\n", "test_a_layer_in_another_model_learns"),
    ("layers used apart move the seed", "models.py", "with torch.random.fork_rng([device] if cuda else []):", "if True:",
     "test_a_model_draws_what_it_always_drew"),
    ("a field of any type", "models.py", "(int, float) if f.type is float else f.type)  ", "object)  ", "test_bad_configurations"),
    ("no whole number for a float", "models.py", "(int, float) if f.type is float else f.type)  ", "f.type)  ", "test_odd_but_right_configurations"),
    ("an empty prompt", "models.py", "if not tokens.numel():", "if False:", "test_tokens_of_a_wrong_shape"),
    ("tokens without a batch", "models.py", "if tokens.dim() != 2:", "if False:", "test_tokens_of_a_wrong_shape"),
    ("a memory of no sequences", "models.py", "    if len(x) < least:\n", "    if False:\n", "test_tokens_of_a_wrong_shape[omeganet]"),
    ("fast weights follow autocast", "models.py", "with memory.autocast(x.device):                       # fast",
     "with nullcontext():  # fast",
     "test_autocast_keeps_the_memory_in_float32"),

    ("positions start again in every call", "models.py", "pos = state.pos if state else 0", "pos = 0", "test_any_split_is_the_whole"),
    ("sliding window one too long", "models.py", "(j > i - w) if w", "(j >= i - w) if w", "test_sliding_window_attention"),
    ("cache one key too short", "models.py", "max(0, k.shape[2] - w + 1)", "max(0, k.shape[2] - w + 2)", "test_any_split_is_the_whole[swa]"),
    ("blocks of the window look before the sequence", "models.py", "torch.full((1,), front,", "torch.full((1,), 0,",
     "test_sliding_window_attention"),
    ("persistent tokens again in every call (atlas-pytorch)", "models.py", "if state.memory is None and self.persistent is not None:",
     "if self.persistent is not None:", "test_any_split_is_the_whole[atlas-mag]"),
    ("attention does not see the persistent tokens", "models.py", "self.attention(x, state.attention, self.persistent)",
     "self.attention(x, state.attention)", "test_mag"),
    ("mac shows the future (atlas-pytorch)", "models.py", ".tril(n - T).repeat", ".tril(n).repeat", "test_causal[atlas-mac]"),
    ("mac reads M0 for ever (atlas-pytorch)", "models.py", "frozen=(omega.total(state.memory.rule)", "frozen=(omega.total(self.memory.start(x).rule)",
     "test_mac"),
    ("mac reads the newest memory", "models.py", "if not state.frozen:", "if True:", "test_any_split_is_the_whole[atlas-mac]"),
    ("mac writes x, not y", "models.py", "m, memory_state = self.memory(y, state.memory)", "m, memory_state = self.memory(x, state.memory)",
     "test_mac"),
    ("mag without its gate's norm", "models.py", "self.m_norm(m).sigmoid()", "m.sigmoid()", "test_mag"),

    ("the prompt is dropped (atlas-pytorch)", "models.py", "self(piece, state)", "self(piece[:, -1:], state)", "test_generate"),
    ("generation forgets its state", "models.py", "self(piece, state)", "self(piece)", "test_generate"),
    ("generated tokens stay inference tensors", "models.py", "yield token.clone()", "yield token", "test_a_model_learns_from_what_it_wrote"),
    ("top-p drops the token that crosses it", "models.py", "probs.cumsum(-1) - probs >= max", "probs.cumsum(-1) >= max",
     "test_sample_filters"),
    ("top-p keeps one more", "models.py", "probs.cumsum(-1) - probs >= max", "probs.cumsum(-1) - 2 * probs >= max",
     "test_sample_filters"),
    ("top-k keeps one more", "models.py", "logits[:, top_k:]", "logits[:, top_k + 1:]", "test_sample_filters"),
    ("temperature ignored", "models.py", "logits / max(temperature, 1e-30)", "logits / 1", "test_sample_probabilities"),
    ("summed cross entropy", "models.py", "ignore_index=-100)", "ignore_index=-100, reduction='sum')", "test_loss_counts_what_it_should"),
    ("autocast reaches into the memory's gradient", "chunks.py", "with memory.autocast(dy.device, ctx.how.rule.dtype), ", "with ",
     "test_backward_inside_of_autocast[atlas-more0]"),
    ("no autocast on the meta device", "memory.py", "if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device.type):", "if False:",
     "test_nothing_waits_for_the_host"),
    ("gates take what autocast leaves", "models.py", "self.gates(x.to(self.M0[0].dtype))", "self.gates(x)",
     "test_backward_inside_of_autocast[atlas-more4]"),
    ("a tensor made on the host", "omega.py", "pair = torch.arange(T, device=k.device)[:, None]", "pair = torch.arange(T)[:, None]",
     "test_nothing_waits_for_the_host[omeganet-more2]"),
    ("a number read back", "omega.py", "        da = torch.cat([first,", "        da = 0 * g.sum().item() + torch.cat([first,",
     "test_nothing_waits_for_the_host[atlas++-more4]"),
    ("no tokens, no answer", "omega.py", " if ys else torch.zeros_like(v)", "", "test_any_split_is_the_whole[atlas]"),
    ("no reader, no run", "machine.py", "UNSAID.append(fault)\n        nobody_reads()\n", "UNSAID.append(fault)\n        raise\n",
     "test_a_run_outlives_its_reader"),
    ("what a full disk did not take is no fault", "machine.py", "        if not UNSAID:\n            return code\n", "        return code\n",
     "test_a_full_disk_for_what_is_said"),
    ("what stdout did not take of an earlier task", "machine.py", "    UNSAID.clear()\n", "", "test_a_full_disk_for_what_is_said"),
    ("a log of another kind is lost", "train.py", "            os.replace(path, kept)\n", "            path.unlink()\n",
     "test_a_log_of_another_kind_is_kept"),
    ("no word of a gradient that is noise", "train.py", "if norm > 1000 * max(1.0, tc.grad_clip) and", "if False and",
     "test_a_first_gradient_of_noise_is_told"),
    ("the title of a fault", "train.py", '" ".join(str(fault).split("\\n\\t")[1:2]) or first_line(fault)', "first_line(fault)",
     "test_a_checkpoint_that_lacks_a_weight"),
    ("bench: tokens a second of the first call", "bench.py", 'tokens / times["median_s"]', 'tokens / times["first_s"]',
     "test_a_record_has_the_median_and_what_is_printed"),
    ("bench: a spread in seconds, called %", "bench.py", "100 * times['spread_s'] / times['median_s']", "100 * times['spread_s']",
     "test_a_record_has_the_median_and_what_is_printed"),
    ("bench: three rounds, however much time there is", "bench.py", " or now(device) - began < seconds):", "):",
     "test_a_race_goes_on_until_its_time_is_over"),
    ("bench: minutes of a second", "bench.py", "60 * args.minutes * share", "args.minutes * share", "test_bench_flags_reach_the_parts"),
    ("bench: each part gets all the minutes", "bench.py", "60 * args.minutes * share / sum(s for _, s in parts.values())", "60 * args.minutes",
     "test_bench_flags_reach_the_parts"),
    ("bench: --compile does nothing", "bench.py", "if args.compile is None else args.compile", "", "test_bench_flags_reach_the_parts"),
    ("bench: --model does nothing", "bench.py", "names = args.model or list(models.PRESETS)", "names = list(models.PRESETS)",
     "test_bench_flags_reach_the_parts"),
    ("bench: --dtype does nothing", "bench.py", "machine.pick_dtype(args.dtype, device)", 'machine.pick_dtype("float32", device)',
     "test_bench_flags_reach_the_parts"),
    ("bench: figures without their command", "bench.py", "argv=sys.argv[1:]", "argv=[]", "test_bench_flags_reach_the_parts"),
    ("bench: pictures wherever it was started", "bench.py", 'plot(bench.records, Path(__file__).parent / "results")',
     'plot(bench.records, Path("results"))', "test_bench_flags_reach_the_parts"),
    ("bench: gradients of the input alone", "bench.py", "inputs = [x.requires_grad_(), *layer.parameters()]", "inputs = [x.requires_grad_()]",
     "test_layer_runs_reach_every_input"),
    ("bench: gradients of the parameters alone", "bench.py", "inputs = [x.requires_grad_(), *layer.parameters()]", "inputs = [*layer.parameters()]",
     "test_layer_runs_reach_every_input"),
    ("bench: no backward pass of a layer", "bench.py", "torch.autograd.grad(y, inputs, up.to(y.dtype), allow_unused=True) ", "return y ",
     "test_layer_runs_reach_every_input"),
    ("bench: a layer in float32, whatever was asked for", "bench.py", "machine.autocast(bench.device, bench.dtype)",
     "machine.autocast(bench.device, torch.float32)", "test_layers_compute_in_the_precision_of_the_bench"),
    ("bench: omega beside itself", "bench.py", "name: slow(fast, rule)", "name: fast", "test_definitions_race_with_the_fast_rule"),
    ("bench: a sweep of one value", "bench.py", "**differences, knob: value}", "**differences}", "test_sweeps_change_one_setting_at_a_time"),
    ("bench: sweeps of WORK", "bench.py", "**heads(width), **differences, knob", "**heads(width), knob",
     "test_sweeps_change_one_setting_at_a_time"),
    ("bench: presets of a narrower memory", "bench.py", '"expansion": WORK["expansion"]', '"expansion": 1',
     "test_every_preset_is_one_layer_of_one_size"),
    ("bench: small heads without polynomials", "bench.py", 'config.features not in ("none", "exp")', 'config.features != "none"',
     "test_every_preset_is_one_layer_of_one_size"),
    ("bench: small heads for none", "bench.py", "SMALL_HEAD if small else HEAD", "HEAD", "test_every_preset_is_one_layer_of_one_size"),
    ("bench: forward takes as long as both", "bench.py", "name, times[name, what], batch * T, what=what",
     'name, times[name, "both"], batch * T, what=what', "test_layer_part"),
    ("bench: the longest sequences are expected to take no time", "bench.py", "cost[name] = 6 * cost[name] * (", "cost[name] = 0 * cost[name] * (",
     "test_layer_part"),
    ("bench: the transformer is expected to be linear", "bench.py", "(2 if square else 1)", "1", "test_layer_part"),
    ("bench: each may take all the time that is left", "bench.py", "                room -= cost[name]\n", "", "test_layer_part"),
    ("bench: tokens of one sequence of a layer", "bench.py", "times[name, what], batch * T, what=what", "times[name, what], T, what=what",
     "test_layer_part"),
    ("bench: a memory that fades", "bench.py", "1 - 0.001 * rand()", "rand()", "test_rule_runs_reach_every_input"),
    ("bench: gradients of q, k and v alone", "bench.py", "omega.Gates(*gates), state)[0], leaves, up)",
     "omega.Gates(*gates), state)[0], leaves[:3], up)", "test_rule_runs_reach_every_input"),
    ("bench: backward as fast as forward", "bench.py", "flops = 3 * batch * H", "flops = 2 * batch * H", "test_rule_part"),
    ("bench: FLOPs of one head", "bench.py", "3 * batch * H * rule_flops", "3 * batch * rule_flops", "test_rule_part"),
    ("bench: FLOPs of one sequence", "bench.py", "3 * batch * H * rule_flops", "3 * H * rule_flops", "test_rule_part"),
    ("bench: the memory's hidden width is a head's", "bench.py", "rule_flops(rule, HEAD, HEAD, 2 * HEAD, T)",
     "rule_flops(rule, HEAD, HEAD, HEAD, T)", "test_rule_part"),
    ("bench: a product of half its FLOPs", "bench.py", "torch.mm(a, b), 2 * n**3", "torch.mm(a, b), n**3", "test_product_has_the_flops_it_says"),
    ("bench: a product of another precision", "bench.py", "device=bench.device).to(dtype) for", "device=bench.device) for",
     "test_product_has_the_flops_it_says"),
    ("bench: FLOPs without the way back through the memory", "bench.py", " + deep * 2 * n * hidden * D ", " ",
     "test_rule_flops_is_what_omega_does"),
    ("bench: FLOPs without R X^T of the last layer", "bench.py", " + deep * 2 * c * n * hidden ", " ", "test_rule_flops_is_what_omega_does"),
    ("bench: FLOPs without W of each block", "bench.py", "2 * (blocks > 1) * blocks**2 * weights + ", "", "test_rule_flops_is_what_omega_does"),
    ("bench: FLOPs of all blocks but one", "bench.py", "(blocks > 1) * blocks**2", "blocks * (blocks - 1)", "test_rule_flops_is_what_omega_does"),
    ("bench: FLOPs without the last S", "bench.py", "2 * (blocks + momentum) * n", "2 * blocks * n", "test_rule_flops_is_what_omega_does"),
    ("bench: FLOPs of S without momentum", "bench.py", "(1 + momentum) * (2 * c", "2 * (2 * c", "test_rule_flops_is_what_omega_does"),
    ("bench: the transformer's time over ours", "bench.py", 't["median_s"] / times["transformer"]["median_s"]',
     'times["transformer"]["median_s"] / t["median_s"]', "test_step_part"),
    ("bench: FLOPs of one sequence of a step", "bench.py", "tc.batch_size * step_flops", "step_flops", "test_step_part"),
    ("bench: tokens of one sequence of a step", "bench.py", "numpy(), tc.batch_size * tc.seq_len", "numpy(), tc.seq_len", "test_step_part"),
    ("bench: a step of as many passes as in training", "bench.py", "tc = replace(tc, grad_accum=1, remat", "tc = replace(tc, remat",
     "test_step_part"),
    ("bench: whoever comes first in a step", "bench.py", 'names, tc = in_order(bench.models),',
     "names, tc = bench.models,", "test_step_part"),
    ("bench: a step without training", "bench.py", ".to(bench.device).train())", ".to(bench.device).eval())",
     "test_step_run_is_a_step_of_training"),
    ("bench: the same step again", "bench.py", "ids, next(step), scale", "ids, 0, scale", "test_step_run_is_a_step_of_training"),
    ("bench: ms of a whole run for those of a token", "bench.py", '1e3 * t["median_s"] / n,', '1e3 * t["median_s"],', "test_decode_part"),
    ("bench: a short cache", "bench.py", "8 * n * model.config.n_embd <= 2**28", "n < 10**4", "test_decode_part"),
    ("bench: a few tokens for a chunk", "bench.py", 'n = 8 if name == "transformer" or bench.quick else model.config.chunk ', "n = 8 ",
     "test_decode_part"),
    ("bench: the same token's state again", "bench.py", "_, after = model(one, after)", "_, after = model(one, state)",
     "test_decode_run_goes_on_from_its_own_state"),
    ("bench: our time over the peer's", "bench.py", 'rival["median_s"] / t["median_s"]', 't["median_s"] / rival["median_s"]',
     "test_peers_do_the_same_work"),
    ("bench: ours without Newton-Schulz", "bench.py", '"muon": muon, ', "", "test_peers_do_the_same_work"),
    ("bench: ours with Newton-Schulz as it comes", "bench.py", ', "muon_every": chunk}', "}", "test_peers_do_the_same_work"),
    ("bench: ours in chunks of 64", "bench.py", '"chunk": chunk, "muon"', '"muon"', "test_peers_do_the_same_work"),
    ("bench: attention to 64 tokens", "bench.py", 'mixer="attention", attn_window=0,', 'mixer="attention",', "test_peers_do_the_same_work"),
    ("bench: Titans' gradients at M0", "bench.py", "chunk_size=chunk, batch_size=chunk,", "chunk_size=chunk,", "test_peers_do_the_same_work"),
    ("bench: Titans without Newton-Schulz", "bench.py", "spectral_norm_surprises=muon", "spectral_norm_surprises=False",
     "test_peers_do_the_same_work"),
    ("bench: Titans without momentum", "bench.py", "                        momentum=True, spectral",
     "                        momentum=False, spectral", "test_peers_do_the_same_work"),
    ("bench: memories are not compiled", "bench.py", "        model.compile_memory()\n", "        pass\n",
     "test_compile_compiles_what_is_measured"),
    ("bench: a step is not compiled", "bench.py", "model = compiled(bench, models.LM(config).to(bench.device).train())",
     "model = models.LM(config).to(bench.device).train()", "test_compile_compiles_what_is_measured"),
    ("compiled for any shape", "omega.py", "    options = dict(dynamic=False) | options\n", "", "test_what_the_compiler_is_told"),
    ("bench: a layer of attention is not compiled", "bench.py", "        mixer.compile(**omega.compiler(bench.device.type, {}))\n", "        pass\n",
     "test_compile_compiles_what_is_measured"),
    ("bench: the rule is not compiled", "bench.py", "        omega.compile_chunks(bench.device.type)\n", "        pass\n", "test_compile_compiles_what_is_measured"),
    ("FLOPs of the recurrence's products", "bench.py", 'patch.object(omega, "recur", omega.Recurrence.apply)', 'patch.object(omega, "recur", omega.recur)',
     "test_step_flops_are_those_of_any_device"),
    ("a bench keeps its records to itself", "bench.py", "        self.save()\n", "", "test_a_bench_that_is_cut_short_leaves_its_records"),
    ("compile time counts as often as there are rounds", "bench.py", "- began + rounds * a_round > seconds:", "- began + rounds * (now(device) - began) > seconds:",
     "test_race_takes_turns_and_drops_who_cannot_run"),
    ("who was dropped is not told", "bench.py", "            say(f\"no time for {', '.join(", "            str(f\"no time for {', '.join(",
     "test_race_takes_turns_and_drops_who_cannot_run"),
    ("a gradient that begins in half precision is a graph of its own", "chunks.py", "parts.coef.new_zeros(parts.v.shape[1], *inner",
     "h.new_zeros(parts.v.shape[1], *inner", "test_chunk_steps_compile_whole"),
    ("a resumed run forgets its best", "train.py", 'run = {key: ckpt[key] for key in ("step", "best", "seconds")} if ckpt else',
     'run = dict(step=ckpt["step"], best=math.inf, seconds=ckpt["seconds"]) if ckpt else', "test_a_resumed_run_knows_its_best_and_its_time"),
    ("a resumed run forgets its time", "train.py", 'run["seconds"], time.perf_counter()\n', '0.0, time.perf_counter()\n', "test_a_resumed_run_knows_its_best_and_its_time"),
    ("a checkpoint knows the time of its own part", "train.py", "seconds=earlier + elapsed)", "seconds=elapsed)", "test_a_resumed_run_knows_its_best_and_its_time"),
    ("the cubic's gradient by Muon's coefficients", "chunks.py", "new = orthogonalize_backward(seen, ns, new, *rule.ns_args(), rule.ns_gram)",
     "new = orthogonalize_backward(seen, ns, new, rule.ns_steps, 'muon', *rule.ns_args()[2:], rule.ns_gram)", "test_omega_is_omega_ref"),
    ("pairs in five steps", "omega.py", "least, rule.ns_steps, rule.ns_coefficients)", "least, 5, rule.ns_coefficients)", "test_omega_is_omega_ref"),
    ("pairs by Muon's coefficients", "omega.py", "least, rule.ns_steps, rule.ns_coefficients)", "least, rule.ns_steps)", "test_omega_is_omega_ref"),
    ("projections do not decay", "train.py", 'or ".gates." in name', 'or ".gates." in name or ".qkv." in name',
     "test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay"),
    ("gates of the output do not decay", "train.py", 'or ".gates." in name', 'or "gate" in name',
     "test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay"),
    ("signals add up", "machine.py", "dist.all_reduce(number, dist.ReduceOp.MAX)", "dist.all_reduce(number)", "test_a_signal_that_two_processes_have_had_is_one_signal"),
    ("the last step is a stop", "train.py", "step == tc.stop_after and over < 1", "step == tc.stop_after", "test_the_last_step_is_an_end"),
    ("validation in float32", "train.py", "with autocast(device, dtype), nullcontext() if whole", "with autocast(device, torch.float32), nullcontext() if whole",
     "test_the_precision_asked_for_reaches_every_pass"),
    ("validation while training in float32", "train.py", "tc.batch_size, tc.eval_windows, dtype=dtype)", "tc.batch_size, tc.eval_windows, dtype=torch.float32)",
     "test_the_precision_asked_for_reaches_every_pass"),
    ("the last validation in float32", "train.py", "loss = report(model, tokenizer, val, tc.seq_len, tc.batch_size, dtype)",
     "loss = report(model, tokenizer, val, tc.seq_len, tc.batch_size)", "test_the_precision_asked_for_reaches_every_pass"),
    ("training in float32", "train.py", "one_pass(model, *part, dtype, tc.grad_accum)", "one_pass(model, *part, torch.float32, tc.grad_accum)",
     "test_the_precision_asked_for_reaches_every_pass"),
    ("no dropout of the SwiGLU", "models.py", "x + self.dropout(self.mlp(self.norm2(x)))", "x + self.mlp(self.norm2(x))", "test_dropout_is_of_both_halves_of_a_block"),
    ("no dropout of the mixer", "models.py", "x = x + self.dropout(y)", "x = x + y", "test_dropout_is_of_both_halves_of_a_block"),
    ("the loss in bfloat16", "models.py", "F.cross_entropy(at_least_float32(logits.flatten(0, 1))", "F.cross_entropy((logits.flatten(0, 1))", "test_the_loss_is_in_float32"),
    ("tokens/s of one pass", "train.py", "tokens + tc.batch_size * tc.grad_accum * tc.seq_len", "tokens + tc.batch_size * tc.seq_len", "test_lines_of_a_run_by_hand"),
    ("tokens/s with validations", "train.py", "busy + time.perf_counter() - tick", "time.perf_counter() - began", "test_lines_of_a_run_by_hand"),
    ("eta of a run that began at 0", "train.py", "* elapsed / (step - first)", "* elapsed / step", "test_lines_of_a_run_by_hand"),
    ("eta by minutes as seconds", "train.py", "min(eta, 60 * tc.minutes", "min(eta, tc.minutes", "test_lines_of_a_run_by_hand"),
    ("a long end is no news", "train.py", "all is saved)\" if eta > 60 else", "all is saved)\" if False else", "test_a_long_end_is_announced"),
    ("half of the end", "train.py", "eta = 2 * len(val)", "eta = len(val)", "test_a_long_end_is_announced"),
    ("seconds of one figure", "train.py", "{int(seconds) % 60:02d}s", "{int(seconds) % 60}s", "test_clock_by_hand"),
    ("to go on at the end", "train.py", '"eval.py --ckpt" if over >= 1 else', '"eval.py --ckpt" if False else', "test_lines_of_a_run_by_hand"),
    ("a folder that the shell cuts", "train.py", "to go on: python {go_on} {shlex.quote(tc.out)}", "to go on: python {go_on} {tc.out}", "test_lines_of_a_run_by_hand"),
    ("tokens to train of the validation", "train.py", "{used}: {len(splits[0]):,} tokens", "{used}: {len(splits[1]):,} tokens", "test_a_run_prints_and_logs_what_it_did"),
    ("a sample of another length", "train.py", 'encode_prompt(tokenizer, ""), tc.sample_tokens', 'encode_prompt(tokenizer, ""), 20', "test_the_sample_at_the_end_is_as_asked_for"),
    ("a sample too hot", "train.py", "how = dict(temperature=0.8,", "how = dict(temperature=8.0,", "test_the_sample_at_the_end_is_as_asked_for"),
    ("a sample by chance", "train.py", "generator=torch.Generator(device).manual_seed(tc.seed))\n    say(", "generator=torch.Generator(device))\n    say(",
     "test_the_sample_at_the_end_is_as_asked_for"),
    ("another length of the sample is another run", "train.py", '"log_every", "sample_tokens", "remat"}', '"log_every", "remat"}', "test_what_may_change_when_a_run_goes_on"),
    ("threads of another machine", "train.py", '"cuda_graph", "threads"}', '"cuda_graph"}', "test_what_may_change_when_a_run_goes_on"),
    ("the device of another machine", "train.py", '"stop_after", "device", "compile"', '"stop_after", "compile"', "test_what_may_change_when_a_run_goes_on"),
    ("tiny on a GPU", "train.py", '"baby" if pick_device(', '"tiny" if pick_device(', "test_on_cuda_a_run_is_larger_and_compiled"),
    ("eager on a GPU", "train.py", 'given.get("compile", device.type == "cuda")', 'given.get("compile", False)', "test_on_cuda_a_run_is_larger_and_compiled"),
    ("bfloat16 from SM 9 on", "machine.py", "get_device_capability() >= (8, 0)", "get_device_capability() >= (9, 0)", "test_auto_takes_bfloat16_only_where_it_is_native"),
    ("the last pass of one stream", "train.py", "tokenizer, val, tc.seq_len, tc.batch_size, dtype)", "tokenizer, val, tc.seq_len, 1, dtype)",
     "test_a_run_prints_and_logs_what_it_did"),
    ("every second signal is a Ctrl-C", "machine.py", "raise KeyboardInterrupt(number)", "raise KeyboardInterrupt", "test_a_second_signal_stops_at_once_and_keeps_the_last_checkpoint"),
    ("most memory in KiB on a Mac", "machine.py", 'ru_maxrss * (1 if sys.platform == "darwin" else 1024)', "ru_maxrss * 1024", "test_peak_memory_is_of_this_program"),
    ("--remat on mps is refused", "train.py", 'device.type == "mps" and tc.remat and config.dropout:', 'device.type == "mps" and tc.remat:', "test_mps_has_to_be_asked_for"),
    ("freed blocks go back", "machine.py", "    mallopt(-1, -1) ", "    pass ", "test_tune_cpu_is_silent_without_glibc"),
    ("a ball that no one feels", "models.py", "max_norm: float = opt(50.0,", "max_norm: float = opt(500.0,", "test_defaults_are_those_that_the_readme_tells"),
    ("atlas with another muon_every", "models.py", 'chunk=128, muon_every=128),                     # Eq 32', 'chunk=128, muon_every=64),                      # Eq 32',
     "test_defaults_are_those_that_the_readme_tells"),
    ("a quarter of a million tokens a step", "train.py", "PAPER = dict(batch_size=8, grad_accum=16,", "PAPER = dict(batch_size=8, grad_accum=8,",
     "test_defaults_are_those_that_the_readme_tells"),
    ("quiet persistent tokens", "models.py", "nn.init.normal_(self.persistent)", "nn.init.normal_(self.persistent, std=0.02)",
     "test_what_stands_before_every_sequence_is_as_loud_as_a_token"),
    ("short keys stay short", "models.py", "x / norm.clamp_min(1e-12)", "x / norm.clamp_min(1e-3)", "test_unit_vectors"),
    ("P in full precision", "omega.py", 'mix | dict(P=memory.cast(mix["P"], rule.dtype))', "mix", "test_who_is_in_half_precision"),
    ("M0's gradient in half precision", "chunks.py", "d.shape == m.shape and d.dtype == m.dtype else", "d.shape == m.shape else", "test_who_is_in_half_precision"),
    ("what broke a recording is hidden", "train.py", "while causes[0].__context__:", "while False:", "test_what_cannot_be_recorded_ends_in_a_line"),
    ("FLOPs of Newton-Schulz: half of those of G", "bench.py", "return steps * (4 * m * m * n + 2 * m**3)", "return steps * (4 * m * m * n + m**3)",
     "test_ns_flops_is_what_newton_schulz_does"),
    ("a race that gains time by running", "bench.py", "a_round += clock(", "a_round -= clock(", "test_race_leaves_time_for_its_rounds"),
    ("tables where phi is not", "poly.py", "            self.move_tables(x.device)\n", "            pass\n", "test_tables_follow_what_phi_is_used_on"),
    ("tables that training cannot use", "poly.py", "    @torch.inference_mode(False)  ", "    @torch.no_grad()  ", "test_tables_follow_what_phi_is_used_on"),
    ("tables of another precision", "poly.py", "values.to(device, table.dtype)", "values.to(device)", "test_tables_follow_what_phi_is_used_on"),
    ("generating compiles every place in a chunk", "models.py", ", torch.compiler.set_stance(\"force_eager\"):", ":",
     "test_generating_compiles_nothing"),
    ("a checkpoint of a CPU's run opens the GPU", "train.py", "if next(model.parameters()).is_cuda else None)", "if torch.cuda.is_available() else None)",
     "test_a_run_on_a_cpu_leaves_the_gpu_alone"),
    ("compile_chunks without a GPU as for one", "omega.py", "(\"cuda\" if torch.cuda.is_available() else \"cpu\")", "\"cuda\"",
     "test_what_the_compiler_is_told"),
    ("the compiler is asked what it cannot answer", "memory.py", "if not torch.compiler.is_compiling() and not torch.amp", "if not torch.amp",
     "test_the_compiler_is_not_asked_for_an_autocast"),
    ("digits of a number are words", "data.py", r"| ?\p{N}+|", r"| ?\p{N}|", "test_words_are_those_of_gpt2"),
    ("don't is one word more", "data.py", "[sdmt]", "[sdm]", "test_words_are_those_of_gpt2"),
    ("the space before a word is not its own", "data.py", r"|\s+(?!\S)|\s+", r"|\s+", "test_words_are_those_of_gpt2"),
    ("bits a byte: every other block", "data.py", "range(0, len(ids), BLOCK)", "range(0, len(ids), 2 * BLOCK)", "test_tokenizer_round_trip"),
    ("the greatest id of the last block", "data.py", "max(greatest, int(block.max()))", "int(block.max())",
     "test_a_token_file_is_checked_to_its_end"),
    ("every other block of a token file checked", "data.py", "range(0, len(part), BLOCK)", "range(0, len(part), 2 * BLOCK)",
     "test_a_token_file_is_checked_to_its_end"),
    ("an offset in a piece of a text that was cut", "data.py", "within a character, at offset {offset + at}", "within a character, at offset {at}",
     "test_where_a_long_text_is_not_utf8"),
    ("a text that was cut is cut to nothing", "data.py", "truncate -s {offset + at}", "truncate -s {at}", "test_where_a_long_text_is_not_utf8"),
    ("an offset in a piece of a text", "data.py", ":02x} at offset {offset + at}", ":02x} at offset {at}", "test_where_a_long_text_is_not_utf8"),
    ("a token file that is longer than it says", "data.py", "size != header + 2 * n", "size < header + 2 * n", "test_token_files_that_are_none"),
    ("a val.bin is overwritten", "data.py", 'for path in (out / "train.bin", out / "val.bin"):', 'for path in (out / "train.bin",):',
     "test_token_files_are_the_text"),
    ("too few tokens to train on", "data.py", "if min(train, val) < seq_len + 1:", "if val < seq_len + 1:", "test_token_files_that_are_none"),
    ("another hash of Shakespeare", "data.py", '"86c4e6aa9db7', '"86c4e6aa9db1', "test_shakespeare_is_known_by_its_hash"),
    ("--stream is its default", "eval.py", "stream(model, val, args.stream)", "stream(model, val, 50_000)",
     "test_flags_of_eval_reach_what_they_are_for"),
    ("--length does nothing", "eval.py", "args.length or 4 * T", "4 * T", "test_flags_of_eval_reach_what_they_are_for"),
    ("twice the length of the training", "eval.py", "args.length or 4 * T", "args.length or 2 * T", "test_flags_of_eval_reach_what_they_are_for"),
    ("windows longer than the text", "eval.py", "min(args.length or 4 * T, len(val) - 1)", "args.length or 4 * T",
     "test_flags_of_eval_reach_what_they_are_for"),
    ("--windows does nothing", "eval.py", "args.batch_size, args.windows)", "args.batch_size, 32)", "test_flags_of_eval_reach_what_they_are_for"),
    ("--batch-size does nothing to the loss", "eval.py", "val, T, args.batch_size)", "val, T, 8)", "test_flags_of_eval_reach_what_they_are_for"),
    ("nor to that by position", "eval.py", "length, args.batch_size, args.windows)", "length, 8, args.windows)",
     "test_flags_of_eval_reach_what_they_are_for"),
    ("--lr of mqar does nothing", "eval.py", ", lr=args.lr", "", "test_flags_of_mqar_reach_what_they_are_for"),
    ("--optimizer of mqar does nothing", "eval.py", ", optimizer=args.optimizer", "", "test_flags_of_mqar_reach_what_they_are_for"),
    ("the network of mqar is always the same", "eval.py", "{**SMALL, **args.config,", "{**args.config, **SMALL,",
     "test_flags_of_mqar_reach_what_they_are_for"),
    ("mqar trains on the first number of pairs", "eval.py", "args.pairs[step % len(args.pairs)]", "args.pairs[0]",
     "test_recall_of_each_number_of_pairs"),
    ("mqar asks for the first number of pairs", "eval.py", "[accuracy(model, args, n, device)", "[accuracy(model, args, args.pairs[0], device)",
     "test_recall_of_each_number_of_pairs"),
    ("the best accuracy for the mean", "eval.py", "sum(scores) / len(scores)", "max(scores)", "test_recall_of_each_number_of_pairs"),
    ("guessing among all tokens", "eval.py", "{1 / n:11.3f}", "{1 / args.vocab:11.3f}", "test_recall_of_each_number_of_pairs"),
    ("recall with dropout", "eval.py", "    model.eval()\n    say", "    say", "test_recall_of_each_number_of_pairs"),
    ("--seed of mqar is of the weights alone", "eval.py", "(1_000_003 * args.seed + step)", "step",
     "test_seed_of_mqar_reaches_weights_and_sequences"),
    ("the last loss of a bucket for its mean", "eval.py", "at[a:b].mean()", "at[b - 1]", "test_loss_by_position_is_said_of_the_right_positions"),
    ("as long as in training is longer", "eval.py", "if b > T else", "if b >= T else", "test_loss_by_position_is_said_of_the_right_positions"),
    ("eval.py on an untuned CPU", "eval.py", "    machine.tune_cpu()\n", "", "test_every_program_tunes_the_cpu"),
    ("sample.py on an untuned CPU", "sample.py", "    tune_cpu()\n", "", "test_every_program_tunes_the_cpu"),
    ("bench.py on an untuned CPU", "bench.py", "    machine.tune_cpu()\n", "", "test_every_program_tunes_the_cpu"),
    ("train.py on an untuned CPU", "train.py", "    tune_cpu()\n", "", "test_every_program_tunes_the_cpu"),
    ("--top-p is at most 0.9", "sample.py", "top_p=args.top_p", "top_p=min(args.top_p, 0.9)", "test_flags_of_sample_reach_the_model"),
    ("a mark of byte order in a pipe", "sample.py", '.decode("utf-8-sig")', '.decode("utf-8")', "test_prompts"),
    ("line ends of a prompt are changed", "sample.py", ', newline=""', "", "test_line_ends_of_a_prompt_are_kept"),
    ("a prompt from a closed stdin", "sample.py", "if sys.stdin is None:", "if False:", "test_prompts"),
    ("the second text is the first of the next seed", "sample.py", "ids, args.tokens, **how",
     'ids, args.tokens, **{**how, "generator": torch.Generator(device).manual_seed(args.seed + i)}',
     "test_sample_writes_num_different_texts_of_the_same_prompt"),
    ("a stream in huge pieces", "eval.py", "    if period > LONGEST_PIECE:", "    if False:", "test_a_stream_of_huge_pieces_is_none"),
    ("a transformer's chunk", "eval.py", '1 if "chunk" in models.idle(c) else c.chunk', "c.chunk", "test_a_stream_of_huge_pieces_is_none"),
    ("--no-write writes", "eval.py", "        model.config.max_step = 0.0 ", "        model.config.max_step = 2.0 ", "test_what_a_memory_brings"),
    ("a bound that makes all W zero", "models.py", "if self.max_norm > 1e30:", "if self.max_norm > 3.3e38:", "test_bad_configurations"),
    ("a --muon-every that does not act", "train.py", 'if every and given.get("muon_every", 0) > every:', "if False:",
     "test_flags_that_do_nothing_are_named"),
    ("a --bpe-size that does not act", "train.py", '["bpe_size"] * (tokenizer.kind != "bpe")', '["bpe_size"] * False', "test_flags_that_do_nothing_are_named"),
    ("a --muon-lr that does not act", "train.py", "if name in {*nothing, *unused}]", "if name in nothing]", "test_flags_that_do_nothing_are_named"),
    ("as many streams as asked for", "data.py", "    n = min(n, len(ids) - 1)\n", "", "test_more_streams_than_tokens"),
    ("a thread of its own compiles eight shapes", "chunks.py", "        if Chunks.compiled:", "        if False:",
     "test_chunk_steps_compile_whole"),
    ("detach cuts off M0", "models.py", "m if m.is_leaf else m.detach()", "m.detach()", "test_detach[atlas]"),
    ("gradients of gradients that were written out", "memory.py", "if torch.is_grad_enabled():  ", "if False:  ",
     "test_second_derivatives_are_refused"),
    ("torch's once_differentiable", "memory.py", "    return once\n", "    return torch.autograd.function.once_differentiable(backward)\n",
     "test_second_derivatives_are_refused"),
    ("double backward through unit vectors", "models.py", "    @once_differentiable\n    def backward(ctx, g):", "    def backward(ctx, g):",
     "test_second_derivatives_are_refused"),
    ("exp features with Newton-Schulz", "omega.py", 'if phi.kind == "exp" and rule.muon_every:', "if False:",
     "test_exp_has_no_reference_and_no_newton_schulz"),
    ("a cache that grows has failed", "eval.py", "if train.holds_all(model.config):", "if False:",
     "test_stream_tells_growth_and_nan"),
    ("--help shows what no run has", "train.py", "presets.get(f.name, f.default)", "f.default",
     "test_every_field_is_a_flag_and_help_lists_it_with_its_default"),
    ("--remat ignored", "train.py", "    model.remat = tc.remat\n", "", "test_remat_is_the_same_run"),
    ("remat forgets the dropout", "models.py", "preserve_rng_state=self.config.dropout > 0", "preserve_rng_state=False",
     "test_remat_is_bit_equal_in_less_memory[transformer]"),
    ("remat always keeps the random state", "models.py", ", preserve_rng_state=self.config.dropout > 0", "", "test_recorded_steps_are_the_same[atlas-more1]"),
    ("recorded, the first batch again", "train.py", "        self.x.copy_(x)\n", "", "test_recorded_steps_are_the_same[atlas-more0]"),
    ("recorded, the first targets again", "train.py", "        self.y.copy_(y)\n", "", "test_recorded_steps_are_the_same[atlas-more0]"),
    ("recorded, what came before is added up", "train.py", "        model.zero_grad(set_to_none=False)\n", "", "test_recorded_steps_are_the_same[atlas-more0]"),
    ("recorded, p.grad is replaced", "train.py", "set_to_none=not keep_grads", "set_to_none=True", "test_recorded_steps_are_the_same[atlas-more0]"),
    ("recorded, p.grad is a pass's own", "train.py", "for _ in range(3):        ", "for _ in range(0):        ", "test_recorded_steps_are_the_same[atlas-more0]"),
    ("before it records a run draws dropout", "train.py", "torch.cuda.stream(stream), torch.random.fork_rng([x.get_device()] if x.is_cuda else [])",
     "torch.cuda.stream(stream)", "test_recorded_steps_are_the_same[atlas-more0]"),
    ("no memory to record in is no news", "train.py", '                raise cause\n', '                pass\n',
     "test_what_cannot_be_recorded_ends_in_a_line"),
    ("--cuda-graph ignored", "train.py", "grad_accum) if tc.cuda_graph else None", "grad_accum) if False else None", "test_a_recorded_run_is_the_same"),
    ("--cuda-graph without a GPU", "train.py", 'device.type != "cuda" or tc.remat and config.dropout', "tc.remat and config.dropout",
     "test_cuda_graph_is_asked_for_by_a_flag"),
    ("--cuda-graph beside another dropout", "train.py", ' or tc.remat and config.dropout):', "):", "test_cuda_graph_is_asked_for_by_a_flag"),
    ("no bound on the memory", "chunks.py", "if closes and rule.ball:\n            balls.a", "if False:\n            balls.a", "test_no_text_makes_the_memory_run_away[omeganet]"),
    ("no bound on the memory with Newton-Schulz", "omega.py", "if not self.ball:", "if True:", "test_ball_is_the_reference[atlas]"),
    ("the bound within a chunk", "chunks.py", "if closes and rule.ball:\n            balls.a", "if rule.ball:\n            balls.a", "test_ball_is_the_reference[omeganet]"),
    ("the bound within a chunk of Newton-Schulz", "chunks.py", "if closes and rule.ball:\n        balls =", "if rule.ball:\n        balls =",
     "test_ball_is_the_reference[atlas]"),
    ("one bound for two matrices", "chunks.py", "turn(W, tall).chunk(count, -1)", "[turn(W, tall)] * count", "test_ball_is_the_reference[gated]"),
    ("--matmul does nothing", "train.py", "    set_matmul(tc.matmul, device, dtype)\n", "", "test_matmul_is_what_torch_multiplies_with"),
    ("--matmul of the bench does nothing", "bench.py", "machine.set_matmul(args.matmul, device, dtype)", '"highest"',
     "test_matmul_is_what_torch_multiplies_with"),
    ("coarse products on a CPU by themselves", "machine.py", "        if not exact_products(device):", "        if False:", "test_matmul_by_itself"),
    ("medium on an Intel core", "machine.py", 'cpu.get("avx512_f") and cpu.get("sse4a")', 'cpu.get("avx512_f")', "test_matmul_by_itself"),
    ("TF32 beside float32", "machine.py", '"high" if device.type == "cuda" and dtype == torch.bfloat16', '"high" if device.type == "cuda"',
     "test_matmul_by_itself"),
    ("the bench compiles every place in a chunk", "bench.py", '"force_eager" if name == "decode" else "default"', '"default"',
     "test_single_tokens_are_not_compiled"),
    ("the bench decodes by oneDNN", "bench.py", '"highest" if args.matmul == "auto" else matmul', "matmul", "test_matmul_by_itself"),
    ("a flag that is its default is given to the other task", "eval.py", "argparse.Namespace(**dict.fromkeys(defaults))",
     "argparse.Namespace()", "test_eval_mistakes_are_one_line"),
    ("a picture of forward and of both on one line", "bench.py", ' and r.get("what") != "forward"', "",
     "test_plot_draws_a_line_for_each_contestant"),
    ("some windows: those that begin a batch", "data.py", "starts = range(0, whole, every * seq_len)", "starts = range(0, whole // every, seq_len)",
     "test_evaluation_on_some_windows_spreads_over_the_split"),
    ("bits a byte of a part by the bytes of the whole", "train.py", "tokenizer.bytes_a_token(part)", "tokenizer.bytes_a_token(ids)",
     "test_where_each_token_costs_more_than_the_last_the_last_pass_ends_earlier"),
    ("a norm inside the memory that is not there", "models.py", "norm=self.memory_norm", "norm=False",
     "test_norm_keeps_wide_open_gates_bounded"),
    ("the processor's seconds of several threads", "bench.py", " and torch.get_num_threads() == 1", "",
     "test_on_one_thread_time_is_that_of_the_processor"),
    ("a state of exp features keeps a copy of M0", "omega.py", "state._replace(M0=M0)  ", "state  ", "test_detach[dot]"),
    ("a projection has out_features", "models.py", "3 * self.config.n_head * self.config.head_dim)", "self.qkv.out_features)",
     "test_projections_may_be_wrapped[omeganet]"),
    ("a projection has a weight", "models.py", "x.to(self.M0[0].dtype)", "x.to(self.gates.weight.dtype)",
     "test_projections_may_be_wrapped[omeganet]"),
    ("a state of another model", "models.py", "if not isinstance(state, kind):", "if False:", "test_a_state_of_another_model"),
    ("a reader of stderr that has gone", "machine.py", "with suppress(OSError):\n        print(text", "with suppress(ValueError):\n        print(text",
     "test_programs_outlive_the_reader_of_their_messages"),
    ("messages on stdout where stderr is closed", "machine.py", '        sys.stderr = open(os.devnull, "w")\n', "        pass\n",
     "test_programs_outlive_the_reader_of_their_messages"),
    ("a second Ctrl-C is a full disk", "train.py", "            cause = cause.__context__\n", "            cause = None\n",
     "test_a_second_ctrl_c_while_saving_is_no_full_disk"),
    ("a state of no bytes", "eval.py", "max(before, 1)", "before", "test_a_stream_of_which_nothing_is_kept"),
    ("exp features of no memory hold every token", "train.py", 'config.features == "exp" and config.memory_branch if', 'config.features == "exp" if',
     "test_a_stream_of_which_nothing_is_kept"),
    ("a file of the user's own is cleared away", "train.py", "if left.name[len(name) + 1: -4].isdecimal():", "if True:", "test_one_run_a_folder"),
    ("what a killed run has left stays", "train.py", "        if alone:\n", "        if False:\n",
     "test_what_a_killed_run_left_goes_where_no_other_can_be_writing_it"),
    ("what another run saves is cleared away", "train.py", "        if alone:\n", "        if True:\n",
     "test_what_a_killed_run_left_goes_where_no_other_can_be_writing_it"),
    ("two data.py in one folder", "data.py", "    with claim(out), tempfile", "    with tempfile", "test_one_run_a_folder"),
    ("a warm-up that no flag can change", "train.py", '    if "steps" in given:\n        train["warmup"]', '    if False:\n        train["warmup"]',
     "test_resume_of_a_finished_run_does_nothing"),
    ("a state of other matrices", "models.py", "if own != its:", "if False:", "test_a_state_of_another_layer"),
    ("a state of a text of another length is refused, with exp features", "models.py", "step = 2 if", "step = 1 if",
     "test_a_state_of_another_layer"),
    ("a state beyond a chunk's end", "models.py", "if state.pos >= self.config.chunk:", "if False:", "test_a_state_of_another_layer"),
    ("a state of a longer window", "models.py", "if state.k.shape[2] >= self.config.window:", "if False:", "test_a_state_of_another_layer"),
    ("a state of other attention heads", "models.py", "if state and state.k.shape[1::2] != k.shape[1::2]:", "if False:", "test_a_state_of_another_layer"),
    ("tables written in their place", "poly.py", "            self.move_tables(self.degrees.device)\n", "            [a.copy_(b) for a, b in "
     "zip((self.degrees, self.multinomial), monomial_table(self.dim, self.degree))]\n", "test_a_model_may_be_moved_before_its_gradient"),
    ("a sketch of degree 1", "poly.py", 'if kind == "sketch" and sketch_dim < 1:', "if False:", "test_bad_arguments"),
    ("a sketch of degree 1, by a flag", "models.py", "for --features sketch\", low=1)", "for --features sketch\")", "test_every_choice_and_every_least_number_is_checked"),
    ("a state of fewer layers", "models.py", "if len(state) != len(self.blocks):", "if False:", "test_a_state_of_another_model"),
    ("a tuple of rows", "models.py", "rows = [*rows] if isinstance(rows, tuple) else rows", "pass",
     "test_select_of_lists_slices_and_single_numbers"),
    ("M0 is selected like a sequence", "models.py", "mapped(state, chosen, lambda m: m)", "mapped(state, chosen, chosen)", "test_select[atlas]"),
    ("a zero vector's gradient", "models.py", "norm.masked_fill(norm < 1e-12, torch.inf)", "norm.clamp_min(1e-12)", "test_unit_vectors"),
    ("S_0 for W_0", "omega.py", "if bool(state.S) != (gates.momentum is not None):", "if False:", "test_bad_arguments"),
    ("logits over next to nothing", "models.py", "max(temperature, 1e-30)", "temperature", "test_sample_probabilities"),
    ("dropout of the other processes begins again", "train.py", "tc.seed + rank() + step * processes()", "tc.seed + rank() + (step - first)",
     "test_the_other_processes_have_dropout_of_their_own"),
    ("a stream looked at within a chunk", "eval.py", "-(-1024 // period) * period", "1024",
     "test_a_stream_is_looked_at_where_its_state_is_of_one_size"),
    ("a tied matrix from two", "train.py", 'if config.tie != origin["config"].get("tie", False):', "if False:",
     "test_a_run_that_begins_with_the_weights_of_another"),
    ("bits a byte: <|endoftext|> is 13", "data.py", 'len(t) * (kind != "gpt2" or t != END)', "len(t)", "test_the_end_of_a_text_is_no_text"),
    ("a folder left out", "data.py", "os.walk(folder, onerror=_refuse, ", "os.walk(folder, ", "test_a_folder_that_cannot_be_read_is_not_left_out"),
    ("--quick leaves models out", "bench.py", "must=math.inf if bench.quick else 3", "must=2", "test_bench_prints_tables_and_json"),
    ("monomials for torch.compile: squares once", "poly.py", "torch.eye(n, dtype=x.dtype, device=x.device) + 1", "torch.ones(n, n, dtype=x.dtype)",
     "test_chunk_steps_compile_whole[omeganet]"),
    ("nothing but products in the products' precision", "memory.py", "return a if dtype is None or a.dtype == dtype else a.to(dtype)", "return a",
     "test_a_memory_in_bfloat16_keeps_less"),
    ("the first anchor is M0 itself", "omega.py", "w.clone() for w in W)", "w for w in W)", "test_a_state_without_M0_does_not_move_with_it"),
    ("--muon-every 1 is warned of", "train.py", 'every > 1 and length', 'length',
     "test_windows_too_short_to_read_what_was_written"),
    ("few tokens' features as those of many", "poly.py", "few or torch", "torch", "test_a_token_takes_few_calls"),
    ("one token's Theta Gate as that of many", "omega.py", "if c == 1:                                                # G", "if False:  # G", "test_a_token_takes_few_calls"),
    ("Theta Gate of one token, backwards", "omega.py", "rows.mT * gates.gate\n", "rows.mT * gates.gate.flip(-1)\n", "test_any_split_is_the_whole[atlas]"),
    ("one row that recurs", "omega.py", "    if c == 1:\n        return rows, rows[..., 0, :]\n", "", "test_a_token_takes_few_calls"),
    ("one row by its factor", "omega.py", "return rows, rows[..., 0, :]", "return rows * factors[..., None], rows[..., 0, :]", "test_recurrence"),
    ("validation compiles chunk steps of its own", "chunks.py", "[a.detach() for a in group]", "group", "test_validation_compiles_nothing_anew"),
    ("the last chunk compiles a step of its own", "chunks.py", "dafter[:] = given", "dafter = slots[-1]", "test_chunk_steps_compile_whole[omeganet]"),
    ("a stretch keeps the one after it", "chunks.py", "dafter[:] = given", "dafter = list(given)", "test_a_stretch_lets_go_of_the_one_after"),
    ("a stretch with Newton-Schulz keeps the one after it", "chunks.py", "        del each ", "        pass ",
     "test_a_stretch_lets_go_of_the_one_after"),
    ("the convolution for torch.compile: taps the wrong way", "models.py", "taps[j] * seen[:, j: j + T]", "taps[-1 - j] * seen[:, j: j + T]",
     "test_chunk_steps_compile_whole[omeganet]"),
    ("compiled stretches are no longer than eager ones", "chunks.py", '"compiled" if Chunks.compiled else "cpu"', '"cpu"',
     "test_compiled_stretches_are_of_one_size"),
    ("compiled for a CPU, a recurrence is a product", "omega.py", '        if name == "mixing" and device not in TILE:', "        if False:",
     "test_what_the_compiler_is_told"),
    ("compiled stretches of any size", "chunks.py", "    if Chunks.compiled:                                       # each", "    if False:  # each",
     "test_compiled_stretches_are_of_one_size"),
    ("pieces of a text begin from the same state", "omega.py", "y, state = chunked(rule, phi, q, k, v, Gates(*gates), state)",
     "y, after = chunked(rule, phi, q, k, v, Gates(*gates), state)", "test_a_long_text_is_read_in_pieces"),
    ("a piece ends within a chunk", "omega.py", "ends = [*range(size - pos, T, size), T]", "ends = [*range(size, T, size), T]",
     "test_pieces_end_with_a_chunk_and_are_of_one_size"),
    ("pieces of two sizes", "omega.py", "size = chunk * chunks.even(-(-(pos + T) // chunk), size)", "size = chunk * size",
     "test_pieces_end_with_a_chunk_and_are_of_one_size"),
    ("a text of no sequences is cut by zero", "omega.py", "// max(1, numbers * chunk))", "// (numbers * chunk))",
     "test_pieces_end_with_a_chunk_and_are_of_one_size"),
    ("rows as long as the text do not count", "omega.py", "wide += state.keys.shape[2] + T", "wide += 0", "test_pieces_spare_memory"),
    ("compiled, a text with exp features is many shapes", "omega.py", 'if phi.kind == "exp" and not chunks.Chunks.compiled:', 'if phi.kind == "exp":',
     "test_what_counts_as_the_length_of_a_text"),
    ("no text is long", "omega.py", "        if len(lengths) == 1:\n", "        if len(lengths):\n", "test_pieces_spare_memory"),
    ("ragged windows are compiled", "train.py", "nullcontext() if whole else", "nullcontext() if True else", "test_ragged_windows_are_not_compiled"),
    ("evaluation at half speed", "eval.py", '    machine.set_matmul("auto", device, torch.float32)\n', "",
     "test_matmul_by_itself"),
    ("an old torch is not noticed", "train.py", 'if not hasattr(torch.optim, "Muon"):', "if False:", "test_a_torch_that_is_too_old"),
    ("chunk formulas: windows begin before the text", "omega.py", ">= missing).to(q.device)", ">= 0).to(q.device)", "test_omega_chunk_is_omega_ref"),
    ("chunk formulas: padding becomes pairs", "omega.py", "(tail(a, max(T, missing), T)", "(tail(a, T, T)", "test_omega_chunk_is_omega_ref"),
    ("chunk formulas: O of the block itself", "omega.py", "(sums if m == 1 else before)", "sums", "test_omega_chunk_is_omega_ref"),
    ("chunk formulas: P without steps", "omega.py", "-(A * step.mT) @ G", "-A @ G", "test_omega_chunk_is_omega_ref"),
    ("chunk formulas: a part of a chunk is a whole one", "omega.py", "if state.pos or q.shape[2] % rule.chunk:", "if state.pos:",
     "test_omega_chunk_of_parts_of_chunks"),
    ("chunk formulas: what a chunk begins in the middle of one", "omega.py", "if state.pos or q.shape[2] % rule.chunk:",
     "if q.shape[2] % rule.chunk:", "test_omega_chunk_of_parts_of_chunks"),
    ("chunk formulas: whole chunks token by token", "omega.py", "(omega_chunk if length == rule.chunk else omega_ref)(", "omega_ref(",
     "test_omega_chunk_leaves_only_parts_of_chunks_to_omega_ref"),
    ("the version of a peer", "bench.py", "version=versions.get(PEERS.get(make))", "version=versions.get(make)", "test_peers_do_the_same_work"),
    ("a --model that no part takes", "bench.py", "if args.model and args.part and not", "if not args.part and not", "test_bench_mistakes_are_one_line"),
    ("TF32 allowed in the newer way", "muon.py", "    except RuntimeError:", "    except KeyError:", "test_precision_set_in_torchs_newer_way"),
    ("a CPU's precision for a GPU", "muon.py", "torch.backends.cuda if device", "torch.backends.mkldnn if device", "test_precision_set_in_torchs_newer_way"),
    ("tables after to_empty", "poly.py", "            self.move_tables(self.degrees.device)", "            pass", "test_models_that_begin_on_the_meta_device[omeganet-more10]"),
    ("init leaves norms", "models.py", "            elif isinstance(m, (Norm, Features)):\n                m.init()\n", "",
     "test_models_that_begin_on_the_meta_device"),
    ("plain tensors in the place of M0 are cut off", "models.py", "mapped(state, cut, lambda m: m if m.is_leaf else m.detach())", "mapped(state, cut, torch.Tensor.detach)",
     "test_detach_of_weights_that_are_no_parameters"),
    ("a new memory is gated", "memory.py", '    if kind != "gated":\n        raise ValueError(f"no hidden units', '    if False:\n        raise ValueError(f"no hidden units',
     "test_a_new_loss_is_never_another"),
    ("logs of an older version are dropped", "train.py", "if len(row) == len(head)", "if len(row) == len(COLUMNS) and head == list(COLUMNS)",
     "test_log_rows_of_lost_steps_are_dropped"),
    ("denormals stay", "machine.py", "set_flush_denormal(True)", "set_flush_denormal(False)", "test_denormals_are_flushed"),
    ("detach detaches nothing", "models.py", "else t.detach()\n", "else t\n", "test_detach"),
    ("rows that are no whole numbers are rounded", "models.py", "isinstance(rows, list) and any", "False and any",
     "test_select_of_lists_slices_and_single_numbers"),
    ("the table of models in two writes", "models.py", '"\\n".join([*lines, ""]), end=""', '"\\n".join(lines)', "test_models_py_prints_the_models_of_the_paper"),
    ("a list of states is not selected", "models.py", "isinstance(state, (tuple, list)):\n        parts", "isinstance(state, tuple):\n        parts",
     "test_select_of_lists_slices_and_single_numbers"),
    ("a slice of a state holds all of it", "models.py", "return t[which]", "return t[rows]", "test_select_of_lists_slices_and_single_numbers"),
    ("the last 0 inputs are all of them", "models.py", "seen[:, seen.shape[1] - tail.shape[1]:]", "seen[:, -tail.shape[1]:]",
     "test_a_convolution_of_another_width"),
    ("a state from a file begins a graph", "models.py", "return mapped(state, torch.Tensor.detach, lambda m: m.requires_grad_(False))", "return state",
     "test_a_state_outlives_the_program"),
    ("True is a number", "models.py", "or isinstance(value, bool) != (f.type is bool):", ":", "test_bad_configurations"),
    ("a product zero times", "muon.py", "    if not alpha:\n        return beta * y\n", "", "test_ns_takes_no_product_zero_times"),
    ("the factorial of 57", "models.py", "self.degree > 56", "False", "test_bad_configurations"),
    ("powers of one number are products of variables", "models.py", 'phi = c.features in ("sketch", "exp") or',
     'phi = c.features in ("sketch", "exp", "elementwise") or',
     "test_models_py_prints_the_models_of_the_paper"),
    ("the convolution begins at half of its size", "models.py", "nn.init.normal_(self.conv, std=self.conv_width ** -0.5)",
     "nn.init.normal_(self.conv, std=0.25)", "test_starting_values_of_memories"),
    ("one head, and it forgets within two tokens", "models.py", "if H > 1 else torch.full((1,), 3.5)", "", "test_starting_values_of_memories"),
    ("the first gradient warns of what is not there", "train.py", " and model.config.muon:", ":", "test_a_first_gradient_of_noise_is_told"),
    ("torch's own warning of a TorchScript file", "train.py", 'warnings.simplefilter("ignore")\n            return', "return",
     "test_broken_and_foreign_checkpoints_are_refused_each_in_its_own_words"),
    ("a sample's full disk is a bare error", "sample.py", "    except OSError as fault:\n        raise Halt", "    except ValueError as fault:\n        raise Halt",
     "test_a_full_disk_for_a_sample"),
    ("UTF-16 without its mark is a text", "data.py", "if 10 * body.count(0) > len(body):", "if False:", "test_text_mistakes"),
    ("a NUL is no text", "data.py", "if 10 * body.count(0) > len(body):", "if body.count(0):", "test_text_mistakes"),
    ("a compressed file is latin1", "data.py", 'if guess == "latin1" and 0 in data:', "if False:", "test_text_mistakes"),
    ("O of one token from rest without its step", "chunks.py", '            return o[:, None, None], of_O * o\n', '            return o[:, None, None], o\n',
     "test_the_first_token_alone_from_rest"),
    ("atlas++ is atlas", "models.py", 'dict(memory="gated",  loss="l2",  window=8,   chunk=128', 'dict(loss="l2",  window=8,   chunk=128',
     "test_presets_have_the_memory_of_their_equation"),
    ("models.py reads its own name", "models.py", 'sys.exit(main(sys.argv[1:]))', 'sys.exit(main(sys.argv[0:]))',
     "test_models_py_is_a_program"),
    ("validation in bfloat16", "train.py", 'logits.flatten(0, 1).float(), y.flatten(), reduction', 'logits.flatten(0, 1), y.flatten(), reduction',
     "test_losses_of_bfloat16_logits_are_summed_in_float32"),
    ("stdout of a notebook", "machine.py", 'if hasattr(sys.stdout, "reconfigure"):', 'if True:',
     "test_stdout_that_is_no_file"),
    ("settings without their checkpoint", "train.py", '    known = ckpt or origin\n    try', '    known = ckpt and origin\n    try',
     "test_a_checkpoint_with_a_setting_of_another_version"),
    ("--out within nothing", "train.py", 'out.mkdir(parents=True, exist_ok=True)', 'out.mkdir(exist_ok=True)',
     "test_out_within_a_folder_that_is_not_there"),
    ("data.py without a text", "data.py", 'add_argument("--data", required=True', 'add_argument("--data", required=False',
     "test_data_py_without_a_text"),
    ("a download in silence", "data.py", '        tell(f"data: downloaded tiny Shakespeare to {path}")\n', '        pass\n',
     "test_a_download_is_told"),
    ("--pairs 0", "eval.py", 'add("--pairs", type=at_least(int, 1)', 'add("--pairs", type=at_least(int, 0)',
     "test_no_pairs_are_a_mistake"),
    ("cache one key too long", "models.py", 'first = max(0, k.shape[2] - w + 1) if w else 0', 'first = max(0, k.shape[2] - w + 0) if w else 0',
     "test_the_cache_of_a_window_is_one_token_shorter"),
    ("degree 56", "models.py", 'not attention and self.degree > 56', 'not attention and self.degree > 55',
     "test_the_greatest_degree"),
    ("2^31", "machine.py", 'high=2**31 - 1', 'high=2**31 - 0',
     "test_numbers_of_the_command_line_end_below_2_to_the_31"),
    ("a folder without a checkpoint", "train.py", '                raise UserError(f"no best.pt or ckpt.pt in the folder', '                (f"no best.pt or ckpt.pt in the folder',
     "test_a_folder_without_a_checkpoint_is_told_apart"),
    ("swa with a window of one", "models.py", '[False, False, True, True, c.attn_window > 0]', '[False, False, True, True, c.attn_window > 1]',
     "test_swa_with_a_window_of_one_is_flexible"),
    ("baby's warmup", "train.py", 'lr=1e-3, warmup=100, eval_every', 'lr=1e-3, eval_every',
     "test_warmup_of_baby"),
    ("Ctrl-C is tiktoken's fault", "data.py", '                if type(error).__name__ != "PanicException":\n                    raise\n', '',
     "test_stopped_while_tiktoken_encodes"),
    ("data.py without a folder", "data.py", '    if not args.out:\n        parser.error("--out is empty; name a folder")\n', '',
     "test_data_py_without_a_folder"),
    ("a Python without pydoc", "data.py", '        raise UserError("this Python comes without pydoc_data;', '        raise ImportError("this Python comes without pydoc_data;',
     "test_a_python_without_pydoc"),
    ("a rule without a window", "omega.py", '    window: int = 1\n', '    window: int = 0\n',
     "test_a_rule_begins_as_titans"),
    ("processes on mps", "train.py", '        raise UserError("several processes on mps', '        ("several processes on mps',
     "test_processes_on_mps"),
    ("heads that hardly forget", "models.py", "torch.linspace(1, 6, H)", "torch.linspace(1, 7, H)", "test_starting_values_of_memories"),
    ("large first steps", "models.py", "torch.full((H, 1), -1.0)", "torch.full((H, 1), 0.0)", "test_starting_values_of_memories"),
    ("--beta2 does nothing", "train.py", "betas=(0.9, tc.beta2)", "betas=(0.9, 0.95)", "test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay"),
    ("Muon without decay", "train.py", "lr=tc.muon_lr, weight_decay=tc.weight_decay)]", "lr=tc.muon_lr, weight_decay=0.0)]",
     "test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay"),
    ("the schedule reaches no optimizer", "train.py", 'peak * group.get("times", 1.0) * scale', 'peak * group.get("times", 1.0)',
     "test_the_schedule_reaches_every_group"),
    ("Newton-Schulz of nothing", "train.py", "newton_schulz(tuple(updates)) if updates else ()", "newton_schulz(tuple(updates))",
     "test_M0_can_be_trained_alone"),
    ("the same weights for all seeds", "train.py", "torch.manual_seed(tc.seed)\n    model", "torch.manual_seed(1)\n    model",
     "test_a_seed_is_of_weights_and_of_batches"),
    ("the same batches for all seeds", "train.py", "batch(ids, tc.seed, step,", "batch(ids, 1, step,", "test_a_seed_is_of_weights_and_of_batches"),
    ("a signal is overwritten", "train.py", "number = greatest(", "number = stop.signal = greatest(",
     "test_a_signal_while_processes_agree_is_not_lost"),
    ("a log's first column has a byte order mark", "train.py", 'path.read_text("utf-8-sig", "replace")', 'path.read_text("utf-8", "replace")',
     "test_a_damaged_log_is_no_reason_not_to_go_on"),
    ("a number too long for int", "train.py", " and len(a) < 19", "", "test_a_damaged_log_is_no_reason_not_to_go_on"),
    ("a full disk without a name", "train.py", "    with writing(path), replacing(path) as tmp:", "    with replacing(path) as tmp:",
     "test_a_full_disk_is_said_of_the_log"),
    ("a full disk without a name, later", "train.py", 'with writing(path), open(path, "a")', 'with open(path, "a")', "test_a_disk_that_fills_during_a_run"),
    ("the log is file number 2", "machine.py", "os.O_RDWR)) <= 2:", "os.O_RDWR)) < 0:", "test_closed_streams_are_no_files"),
    ("a process that waited for another, in a traceback", "machine.py", 'or "Connection " in str(fault))', ")", "test_another_process_has_ended"),
    ("done, with a loss of nan", "train.py", "    if not math.isfinite(loss):\n        raise Halt(f\"the best", "    if False:\n        raise Halt(f\"the best",
     "test_a_model_that_has_diverged"),
    ("a diverged model writes a traceback", "sample.py", 'if "probability tensor" in str(fault):', "if False:", "test_a_model_that_has_diverged"),
    ("no name is the default's", "sample.py", '"-" and args.prompt_file is None:', '"-" and not args.prompt_file:', "test_empty_names_are_not_ignored"),
    ("no folder is this one", "train.py", "if not self.out:", "if False:", "test_empty_names_are_not_ignored"),
    ("mag's own tokens do not count", "train.py", '(config.wiring in ("mag", "mal"))', "0", "test_windows_too_short_to_read_what_was_written"),
    ("what the program decided is another value", "train.py", '(n, v) not in (("size", "auto"), ("head_dim", 0))', "True", "test_the_same_command_resumes"),
    ("the end by --steps, whatever it is", "train.py", 'if ckpt["step"] >= tc.steps:', "if True:", "test_resume_of_a_finished_run_does_nothing"),
    ("accuracy on what was trained on", "eval.py", "args.batch_size, device, test=True)", "args.batch_size, device)",
     "test_accuracy_of_an_oracle_and_of_a_fool"),
    ("recall is trained without clipping", "eval.py", "clip_grad_norm_(model.parameters(), tc.grad_clip)\n",
     "clip_grad_norm_(model.parameters(), 1e9)\n", "test_mqar_is_trained_as_it_says"),
    ("a flag that does nothing, and is not named", "models.py", 'if c.features in ("none", "exp"):', 'if c.features == "none":',
     "test_every_field_acts_or_is_idle[dot-more6]"),
    ("a flag that acts, and is called idle", "models.py", '"forget", "conv", "gate"', '"forget", "conv", "tie", "gate"',
     "test_every_field_acts_or_is_idle[transformer-more0]"),
    ("no word of flags that do nothing", "train.py", "    warn(given, model.config, tc.seq_len,", "    (given, model.config, tc.seq_len,", "test_flags_that_do_nothing_are_named"),
    ("nor in eval.py", "eval.py", "    train.warn(args.config, model.config, args.seq_len)\n", "", "test_flags_that_do_nothing_are_named"),
    ("one pass: the window's weights sum to its length", "eval.py", "(one / rule.window)", "(one / 1)", "test_one_pass_by_hand[3-False-False]"),
    ("one pass: another momentum", "eval.py", "MOMENTUM * one if momentum", "0.8 * one if momentum", "test_one_pass_by_hand[1-False-True]"),
    ("one pass: steps and sequences mixed up", "eval.py", "repeat_interleave(B)", "repeat(B)", "test_one_pass_by_hand[1-False-False]"),
    ("one pass: an error that grows with what is recalled", "eval.py", " / v.square().sum(-1))", ")", "test_one_pass_by_hand[1-False-False]"),
    ("one pass: phi of the keys is read, not written", "eval.py", "omega.omega(rule, layer.phi, k, k, v", "omega.omega(rule, layer.phi, k, v, v",
     "test_one_pass_by_hand[1-False-False]"),
    ("values of pairs are drawn as their keys were", "eval.py", "torch.randn(k.shape, generator=draws)", "torch.randn(k.shape, generator="
     "draws.manual_seed(args.seed))", "test_online_values_have_nothing_of_their_keys"),
    ("values of any length", "eval.py", "v = F.normalize(torch.randn(k.shape, generator=draws), dim=-1)", "v = torch.randn(k.shape, generator=draws)",
     "test_online_values_have_nothing_of_their_keys"),
    ("inner steps that end at 1", "eval.py", "torch.logspace(-3, 1.5, 25)", "torch.logspace(-3, 0, 25)", "test_online_values_have_nothing_of_their_keys"),
    ("one question a sequence", "eval.py", "data.mqar(batch_size, n_pairs, n_pairs, args", "data.mqar(batch_size, n_pairs, 1, args",
     "test_recall_asks_for_all_and_never_the_same_again"),
    ("recall: the next seed draws the same, a step earlier", "eval.py", "2 * (1_000_003 * args.seed + step) + test", "2 * (args.seed + step) + test",
     "test_recall_asks_for_all_and_never_the_same_again"),
    ("seeds share their epochs", "data.py", "[seed % 2**64, number]", "[seed % 2**64 + number]", "test_seeds_do_not_share_their_epochs"),
    ("resident: all that is mapped", "eval.py", "read().split()[1]", "read().split()[0]", "test_resident_is_no_more_than_has_ever_been"),
    ("a stream's speed is of its last piece", "eval.py", "speed = seen / (", "speed = y.numel() / (", "test_speed_of_a_stream"),
    ("bench: rules of another window", "bench.py", "omega.Rule(window=8, chunk=c", "omega.Rule(window=1, chunk=c", "test_rule_part"),
    ("bench: windows of another weight", "bench.py", "rand(rule.window) / rule.window, *M0", "rand(rule.window), *M0", "test_rule_runs_reach_every_input"),
    ("bench: a transformer with --remat", "bench.py", 'model.remat = tc.remat and config.mixer == "memory"', "model.remat = tc.remat",
     "test_step_run_is_a_step_of_training"),
    ("bench: single tokens by oneDNN", "bench.py", 'alone = "highest" if args.matmul == "auto" else matmul', "alone = matmul",
     "test_bench_flags_reach_the_parts"),
    ("one pass from zero", "eval.py", "layer.phi, list(layer.M0), len(k)", "layer.phi, [0 * w for w in layer.M0], len(k)", "test_one_pass_of_orthogonal_keys"),
    ("one pass: correlated keys are independent", "eval.py", 'if kind == "correlated"', "if False", "test_correlated_keys"),
    ("one pass: what is not finite is best", "eval.py", ".nan_to_num(math.inf).min()", ".min()", "test_online_table"),
    ("one pass: Newton-Schulz for every token", "eval.py", "muon_every=rule.muon_every if muon", "muon_every=1 if muon", "test_online_table"),
    ("one pass: a row says another window", "eval.py", 'say(f"{window:6d}', 'say(f"{8:6d}', "test_online_table"),
    ("one pass: a row says another momentum", "eval.py", "MOMENTUM if momentum else '-'", "MOMENTUM if muon else '-'", "test_online_table"),
    ("one pass: the same pairs for every seed", "eval.py", "draws = torch.Generator().manual_seed(args.seed)", "draws = torch.Generator().manual_seed(0)",
     "test_online_table"),
    ("one pass: flags that do nothing are not named", "eval.py", "    train.warn(args.config, config, min(args.pairs), of=\"--pairs\")\n", "", "test_online_table"),
    ("one pass: flags of the network are taken", "eval.py", "name not in OF_RULE", "False", "test_eval_mistakes_are_one_line"),
    ("recall is trained at one rate", "eval.py", "train.lr_scale(step, tc))", "1.0)", "test_mqar_is_trained_as_it_says"),
    ("memory may grow by half", "eval.py", "any(by > 0.05", "any(by > 0.5", "test_stream_tells_growth_and_nan"),
    ("models of any size beside each other", "bench.py", "{name: widen(config, target) for", "{name: config for", "test_bench_prints_tables_and_json"),
    ("rubbish collected within the rounds", "bench.py", "    gc.collect() ", "    pass ", "test_rubbish_is_collected_before_the_rounds"),
    ("the fast rule beside both definitions as one contestant", "bench.py", 'f"omega, T {T}": fast', '"omega, fast": fast',
     "test_bench_prints_tables_and_json"),
    ("medium on an AMD core with AVX2 alone", "machine.py", 'cpu.get("avx512_f") and cpu.get("sse4a")', 'cpu.get("sse4a")',
     "test_matmul_by_itself[can2-True-highest]"),
    ("invalid convert value", "machine.py", "    convert.__name__ = kind.__name__ ", "    pass  #", "test_numbers_of_the_command_line_end_below_2_to_the_31"),
    ("every mistake is of a value that begins with -", "machine.py", 'if message.endswith("expected one argument"):', "if True:",
     "test_prompts"),
    ("bits to another base", "train.py", "bits = losses[-1] / math.log(2)", "bits = losses[-1] / math.log(3)", "test_a_run_prints_and_logs_what_it_did"),
    ("compiled is said of what is not", "train.py", 'how = "compiled" if tc.compile', 'how = "compiled" if not tc.compile',
     "test_a_run_prints_and_logs_what_it_did"),
    ("minutes before --resume do not end a run", "train.py", "progress(step, tc, earlier + time.perf_counter() - began)",
     "progress(step, tc, time.perf_counter() - began)", "test_minutes_before_a_resume_count_when_a_run_ends"),
    ("bench: backward takes no time to compile", "bench.py", 'first[name] = times[name, "forward"]["first_s"] + times[name, "both"]["first_s"]',
     'first[name] = times[name, "forward"]["first_s"]', "test_parts_share_their_time"),
    ("bench: each size has all the time", "bench.py", "step_size(bench, size, bench.seconds / len(sizes))", "step_size(bench, size, bench.seconds)",
     "test_parts_share_their_time"),
    ("bench: bfloat16 beside a product in float32", "bench.py", "mm, mm_flops = product(bench, bench.dtype)",
     "mm, mm_flops = product(bench, torch.float32)", "test_step_part"),
    ("bench: the load of a quarter of an hour", "bench.py", "os.getloadavg()[0]", "os.getloadavg()[2]", "test_the_machine_is_described_as_it_is"),
    ("bench: a sweep does not say what is fixed", "bench.py", 'also = "".join(f"{name} {value}, " for name, value in differences.items())',
     'also = ""', "test_sweeps_change_one_setting_at_a_time"),
    ("10 times a clip of 10 is noise", "train.py", "norm > 1000 * max(1.0, tc.grad_clip)", "norm > 1000", "test_a_first_gradient_of_noise_is_told"),
    ("speed since the first line", "train.py", "                busy, tokens = 0.0, 0\n            if val", "            if val",
     "test_the_speed_is_that_since_the_last_line"),
    ("a million threads", "machine.py", "if n > 1024:", "if n > 2**20:", "test_how_many_threads_are_too_many"),
    ("mqar: the last value is none", "data.py", "torch.ones(vocab - vocab // 2)", "torch.ones(vocab // 2)", "test_mqar_of_an_odd_vocabulary"),
    ("a run that cannot compile is the last that does", "train.py", '    torch.compiler.set_stance("default")\n', "",
     "test_where_compiling_fails_nothing_is_compiled"),
    ("the last of equals is best", "train.py", 'val < run["best"]:', 'val <= run["best"]:', "test_the_first_of_equals_is_best"),
    ("a GPU draws anew on --resume", "train.py", 'torch.cuda.set_rng_state(ckpt["rng"]["cuda"])', "pass", "test_a_gpu_draws_on_where_it_stopped"),
    ("links that lead nowhere are left out", "data.py", "p.is_file() or p.is_symlink()", "p.is_file()", "test_linked_folders_are_read_and_each_once"),
    ("a folder that has gone is a full disk", "train.py", "isinstance(fault, FileNotFoundError)", "False", "test_a_folder_that_has_gone_is_no_full_disk"),
    ("one pass never reads too late", "eval.py", "config, min(args.pairs), of", "config, math.inf, of", "test_flags_that_do_nothing_are_named"),
    ("one pass reads too late where the longest does", "eval.py", "min(args.pairs), of", "max(args.pairs), of", "test_flags_that_do_nothing_are_named"),
    ("number 2 is left free", "machine.py", "os.open(os.devnull, os.O_RDWR)) <= 2", "os.open(os.devnull, os.O_RDWR)) < 2", "test_closed_streams_are_no_files"),
]


def mutants(only=""):
    """Apply each mutant to a copy of the project and run its test: the exit code is 1 if one survives, or cannot be tried."""
    here = Path(__file__).resolve()

    def failed(tests, edits):
        """Do these tests fail on a copy with these edits? None if they cannot be run."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "results").mkdir()
            for file in [*here.parent.glob("*.py"), here.parent / "README.md", here.parent / "results" / "README.md"]:
                shutil.copy(file, Path(folder) / file.relative_to(here.parent))
            for file, old, new in edits:
                text = (Path(folder) / file).read_text()
                if text.count(old) != 1:
                    print(f"{file} has {text.count(old)} times: {old.strip()}")
                    return None
                (Path(folder) / file).write_text(text.replace(old, new))
            command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *(f"{here.name}::{t}" for t in tests)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode > 1:
                print(done.stdout[-2000:])
            return {0: False, 1: True}.get(done.returncode)

    chosen = [m for m in MUTANTS if only in m[0]]
    if not chosen:
        print(f"no mutant has {only!r} in its name")
        return 1
    if failed(sorted({m[4] for m in chosen}), []) is not False:
        print("the tests fail without any mutant")
        return 1
    names = {True: "killed", False: "SURVIVED", None: "ERROR"}
    counts = dict.fromkeys(names, 0)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        edits = [[(file, old, new)] + [(file, *second)] * bool(second) for _, file, old, new, _, *second in chosen]
        for m, result in zip(chosen, pool.map(failed, [[m[4]] for m in chosen], edits)):
            counts[result] += 1
            print(f"{names[result]:9} {m[0]}   [{m[4]}]", flush=True)
    print(f"{counts[True]} of {len(chosen)} mutants killed, {counts[False]} survived, {counts[None]} could not be tried")
    return int(counts[True] < len(chosen))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--mutants"]:
        sys.exit(mutants(*sys.argv[2:3]))
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
