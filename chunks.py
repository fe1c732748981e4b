"""chunks.py - the rule of omega.py, fast: chunk after chunk, each in a few matrix products.

What follows is about one chunk and one matrix of W. W_0 and S_0 are the memory and its momentum at
the chunk's start. s and t count the tokens of the chunk from 1, and i counts its pairs: pair i is
that of token i, and pairs 0, -1, .. are those of the window - 1 tokens before the chunk.

The gradient of pair i at W_0 (Eq 16) is an outer product x_i^T d_i: x_i enters the matrix, d_i is
the error of what leaves it. The gates alone say with which coefficients gradients add up. Here are
three tokens and a window of 2; in this picture k, m, e, g are keep, momentum, step and gate:

    Keep = 1                Write = e1                     Gate = g10 g11
           k2    1                  k2e1    e2                        g21 g22
           k3k2  k3  1              k3k2e1  k3e2  e3                      g32 g33

The columns of Gate are the pairs 0 to 3. Keep[t, s] is what is left at token t of what token s
wrote, and Write[t, s] is that times the step of s. Mom is Keep with momentum in the place of keep.

    g_t = sum_i Gate[t, i] x_i^T d_i
    S_t = sum_s Mom[t, s] g_s + momprod_t S_0              momprod_t = m1 m2 .. mt           Eq 33
        = sum_i Pairs[t, i] x_i^T d_i + momprod_t S_0      Pairs = Mom Gate                  Eq 39
    U_t = sum_s Write[t, s] O_s                            O_s = S_s, or NS(S_s)         Eq 40, 41
    W_t = keepprod_t W_0 - U_t                             keepprod_t = k1 k2 .. kt      Eq 16, 32

Nobody needs W_t itself, only what a row r that enters the matrix reads of it: keepprod_t r W_0 less
r U_t. (If W stands for W - M0, r M0 is added.) There are three ways to r U_t, the words of
Rule.muon.

none. O_s = S_s, so U_t is a sum over the pairs. Reading is attention, with P in the place of the
softmax:

    r U_t = sum_i P[t, i] (r . x_i) d_i + drift_t r S_0    P = Write Pairs,  drift = Write momprod

For example P[2, 1] = k2 e1 g11 + e2 (m2 g11 + g21): all that pair 1 adds to U_2.

token. O_s = NS(S_s), as the paper has it. X has the rows x_i, and D_s the rows Pairs[s, i] d_i:

    S_s = X^T D_s + momprod_s S_0

Each S_s is as large as W, and a chunk has one for each token: too many numbers. But NS(S) = S R,
where R comes from S^T S alone (muon.py), and is only (out x out). Neither S^T S nor what r reads
needs S_s itself:

    S_s^T S_s = D_s^T (X S_s) + momprod_s (S_0^T S_s)
        X S_s = (X X^T) D_s + momprod_s X S_0,    S_0^T S_s = (X S_0)^T D_s + momprod_s S_0^T S_0
        r S_s = (r X^T) D_s + momprod_s r S_0
        r U_t = sum_s Write[t, s] (r S_s) R_s

In the code D holds D_1, D_2, .. side by side, so a product serves all tokens of the chunk.

chunk. Within the chunk plain steps are read, as with none. At its end NS takes the whole sum: W_end
= keepprod W_0 - due NS(U), where due is the sum of Write's last row (choice 15). The last token
reads W_end. This is for matrices so wide that R_s for each token would cost too much.

With error = "token" (a window of 1 and none; choice 24) d_i = E_i / |x_i|^2, where E_i is what x_i
reads after token i - 1, less its target v_i. That is the reading above with the coefficients of the
token before: P', drift' and keepprod' are P, drift and keepprod moved down by one row (keepprod'
begins with 1, the others with 0). Without indices, X, d, v and E have a row for each token:

    E = keepprod' X W_0 - drift' X S_0 - (P' * (X X^T)) d - v          * entry by entry
    (I + A) E = E_0,   A[t, i] = P'[t, i] (x_t . x_i) / |x_i|^2

E_0 are the errors that there would be if the chunk had no pairs. A is strictly lower triangular, so
one triangular solve gives E. In a deep memory this holds for the last matrix. From there d goes
back to the others through the memory at the chunk's start.
"""
from contextlib import nullcontext
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F

import memory
from memory import at_least_float32, without_autocast
from muon import newton_schulz, right_factor
from omega import Gates, join, plus, since


# ---- coefficients, from the gates alone
class Mix(NamedTuple):
    """The coefficients of a chunk of c tokens and n pairs."""
    Write: torch.Tensor                   # (N, c, c) of O_s in U_t
    keepprod: torch.Tensor                # (N, c, 1) of W_0 in W_t
    Pairs: torch.Tensor                   # of the pairs in S_t: (N, c, n) if muon = "token", else
                                          # (N, 1, n), for the last token alone
    P: torch.Tensor                       # (N, c, n) of the pairs in U_t if O_s = S_s
    momprod: torch.Tensor | None = None   # (N, c, 1) of S_0 in S_t; None without momentum
    drift: torch.Tensor | None = None     # (N, c, 1) of S_0 in U_t if O_s = S_s


def decays(a):
    """Return Keep and keepprod of a = keep, or Mom and momprod: (N, c) -> (N, c, c), (N, c, 1)."""
    logs = a.clamp_min(torch.finfo(a.dtype).tiny).log()[..., None]
    # float32 would lose digits in sums - sums.mT; MPS has nothing better
    wide = a.dtype if a.device.type == "mps" else torch.float64
    sums = logs.to(wide).cumsum(1)
    Keep = (sums - sums.mT).to(a.dtype).tril().exp().tril()
    return Keep, sums.to(a.dtype).exp()


def band(gate):
    """Return Gate: gate (N, c, window) -> (N, c, n)."""
    # rows of gate padded to n + 1 numbers, laid end to end and cut every n numbers, start one place
    # later in each row
    c, window = gate.shape[1:]
    n = c + window - 1
    padded = F.pad(gate, (0, c)).flatten(1)
    return padded[:, : c * n].unflatten(1, (c, n))


def times_gate(rows, gate):
    """Return rows @ Gate: (N, r, c), gate (N, c, window) -> (N, r, n)."""
    if gate.shape[2] == 1:
        return rows * gate.mT
    if rows.shape[1] == 1:
        return band(rows.mT * gate).sum(1, keepdim=True)
    return rows @ band(gate)


def coefficients(rule, gates):
    """Return the Mix of a chunk's gates (N, c, ..). Under autocast P and drift are bfloat16, as are
    the scores that P multiplies. A Gram matrix and a solve need more digits."""
    exact = rule.muon == "token" or rule.solves
    with without_autocast(gates.keep) if exact else nullcontext():
        Keep, keepprod = decays(gates.keep)
        Write = Keep * gates.step[:, None]
        if gates.momentum is None:
            I = torch.eye(Write.shape[1], dtype=Write.dtype, device=Write.device)
            Mom, rows, momprod, drift = I.expand_as(Write), Write, None, None
        else:
            Mom, momprod = decays(gates.momentum)
            rows, drift = Write @ Mom, Write @ momprod
        S_rows = Mom if rule.muon == "token" else Mom[:, -1:]
        Pairs, P = times_gate(S_rows, gates.gate), times_gate(rows, gates.gate)
        return Mix(Write, keepprod, Pairs, P, momprod, drift)


def together(rule, gates):
    """Return a list with the Mix of each chunk, from a list with the gates of each. All chunks have
    one length. Where chunks are short, one call for all takes less time than a call for each."""
    joined = [None if a[0] is None else torch.cat(a) for a in zip(*gates)]
    mix = coefficients(rule, Gates(*joined))
    parts = [repeat(None) if a is None else a.chunk(len(gates)) for a in mix]
    return [Mix(*part) for part in zip(*parts)]


# ---- what a chunk learns
class Learned(NamedTuple):
    """What a chunk adds to a matrix. D and R are None except for muon = "token"."""
    x: torch.Tensor                       # (N, n, in): the gradient of pair i is x_i^T d_i
    d: torch.Tensor                       # (N, n, out)
    D: torch.Tensor | None = None         # (N, n, c out), side by side
    R: torch.Tensor | None = None         # (N, c, out, out)


def features(phi, a):
    """Return phi(a), cast to autocast's type where autocast is on."""
    x = phi(a)
    device = a.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    return x


def learn(rule, phi, mix, k, v, M0, W, S):
    """Return a list with what each matrix learns from the pairs k, v (N, n, D)."""
    kind, W_0 = rule.memory, plus(M0, W)
    x = features(phi, k)
    v = memory.target(kind, rule.loss, k, v)
    a, z = memory.enter(kind, W_0, x)                         # a enters the last matrix
    if rule.solves:
        d = errors_at_tokens(rule, phi, mix, k, v, M0, W, S, a)
    else:
        d = memory.output_error(kind, rule.loss, a @ W_0[-1], v, rule.norm)
    learned = [Learned(*xd) for xd in memory.gradients(kind, W_0, x, a, z, d)]
    if rule.muon == "token":
        with without_autocast(k):
            return [at_each_token(rule, mix, *pair) for pair in zip(learned, S or repeat(None))]
    return learned


def errors_at_tokens(rule, phi, mix, k, v, M0, W, S, x):
    """Return d = E / |x|^2 (N, c, out) of the last matrix, which x (N, c, in) enters. v are the
    targets of that matrix."""
    def before(a, fill=0.0):                                  # moved down by one row
        return F.pad(a[:, :-1], (0, 0, 1, 0), value=fill)

    with without_autocast(x):                                 # a solve piles up rounding errors
        x = x.to(W[-1].dtype)
        scores = phi.inner(k, k, x, x) if rule.memory == "linear" else x @ x.mT
        size = scores.diagonal(0, 1, 2)[..., None].clamp_min(0.5)            # |x_i|^2

        E_0 = before(mix.keepprod, 1.0) * (x @ W[-1]) - v
        if M0:
            E_0 = E_0 + x @ M0[-1]
        if S:
            E_0 = E_0 - before(mix.drift) * (x @ S[-1])

        A = before(mix.P / size.mT) * scores
        E = torch.linalg.solve_triangular(A, E_0, upper=False, unitriangular=True)
        return E / size


def at_each_token(rule, mix, pairs, S):
    """Return pairs, a Learned, with D and R. S is the matrix S_0, or None without momentum."""
    x, d = (a.to(mix.Pairs.dtype) for a in pairs[:2])         # a bfloat16 has too few digits
    weight = mix.Pairs.mT[..., None]                          # (N, n, c, 1)
    D = weight * d[:, :, None]                                # (N, n, c, out)
    XS = ((x @ x.mT) @ D.flatten(2)).view_as(D)               # X S_s, so far without S_0
    if S is not None:
        XS_0 = x @ S
        momprod = mix.momprod[:, None]                        # (N, 1, c, 1)
        XS = XS + momprod * XS_0[:, :, None]
    G = (d.mT @ (weight * XS).flatten(2)).unflatten(2, D.shape[2:])          # D_s^T X S_s
    if S is not None:
        S_0S = (XS_0.mT @ D.flatten(2)).view_as(G) + momprod * (S.mT @ S)[:, :, None]
        G = G + momprod * S_0S                                # S_s^T S_s: (N, out, c, out)
    G = G.transpose(1, 2)
    R = right_factor(G.flatten(0, 1), rule.ns_steps, rule.ns_coefficients)
    return Learned(x, d, D.flatten(2), R.view(G.shape))


# ---- one chunk
def total(rows, x, d):
    """Return sum_i rows_i x_i^T d_i: rows (N, 1, n), x (N, n, in), d (N, n, out)."""
    return at_least_float32(x.mT @ (rows.mT * d))


def write(rule, mix, learned, W, S, newton):
    """Return W and S at the end of a chunk. newton: whether Newton-Schulz ends it."""
    W_end, S_end = [], []
    for (x, d, D, R), w, s in zip(learned, W, S or repeat(None)):
        if R is None:
            U = total(mix.P[:, -1:], x, d)
            if s is not None:
                U = U + mix.drift[:, -1:] * s
        else:                                                 # sum_s Write[c, s] S_s R_s
            WR = mix.Write[:, -1, :, None, None] * R
            U = x.mT @ (D @ WR.flatten(1, 2))
            if s is not None:
                U = U + s @ (mix.momprod[..., None] * WR).sum(1)
        if newton:
            with without_autocast(U):                                                # choice 15
                due = mix.Write[:, -1:].sum(-1, keepdim=True)
                U = due * newton_schulz(U, rule.ns_steps, rule.ns_coefficients)

        W_end.append(mix.keepprod[:, -1:] * w - U)                                   # Eq 16, 32
        if s is not None:                                                            # Eq 39
            S_end.append(total(mix.Pairs[:, -1:], x, d) + mix.momprod[:, -1:] * s)
    return W_end, S_end


def read(rule, phi, mix, q, k, M0, W, S, learned, W_end=None):
    """Return what the queries q read: y (N, c, D). W_end is what the last token reads where
    Newton-Schulz ends the chunk."""
    def read_matrix(i, rows):
        """Return r_t W_t, where rows has r_t for each token t."""
        x, d, D, R = learned[i]
        if i < memory.firsts(rule.memory):                    # rows are phi(q)
            scores = phi.inner(q, k, rows, x)
        else:
            scores = rows @ x.mT

        if R is None:
            rU = (mix.P * scores) @ d
            if S:
                rU = rU + mix.drift * (rows @ S[i])
        else:
            rS = (scores @ D).unflatten(2, R.shape[1:3])      # r_t S_s: (N, t, s, out)
            if S:
                rS = rS + mix.momprod[:, None] * (rows @ S[i])[:, :, None]
            rU = (mix.Write[..., None] * rS).flatten(2) @ R.flatten(1, 2)

        rW = mix.keepprod * (rows @ W[i]) - rU
        if W_end:
            rW = torch.cat([rW[:, :-1], rows[:, -1:] @ W_end[i]], 1)
        return rW + rows @ M0[i] if M0 else rW

    a = memory.hidden(rule.memory, features(phi, q), read_matrix)
    f = read_matrix(len(learned) - 1, a)
    return memory.output(rule.memory, f, q, rule.norm)


def run_chunk(rule, phi, q, k, v, gates, mix, M0, W, S, newton):
    """Learn and read a chunk: q (N, c, D), k, v (N, window - 1 + c, D), gates (N, c, ..), matrices
    (N, in, out) -> y (N, c, D), W and S at its end. This is what torch.compile compiles. If mix is
    None it is computed here from the gates, so that a compiled backward can recompute it, too.
    newton: whether Newton-Schulz ends the chunk."""
    if mix is None:
        mix = coefficients(rule, gates)
    learned = learn(rule, phi, mix, k, v, M0, W, S)
    W_end, S_end = write(rule, mix, learned, W, S, newton)
    y = read(rule, phi, mix, q, k, M0, W, S, learned, W_end if newton else None)
    return y, W_end, S_end


# ---- all chunks
def with_past(k, v, gates):
    """Return k and v with window - 1 pairs before the first token, and the gates. At the beginning
    of a text some of these pairs are zeros, and the gates that look at them are closed."""
    T, window = gates.gate.shape[2:]
    missing = T + window - 1 - k.shape[2]
    if missing:
        # gate [t, w] weighs pair t + w, counted from the first with the zeros
        pair = torch.arange(T, device=k.device)[:, None] + torch.arange(window, device=k.device)
        gates = gates._replace(gate=gates.gate * (pair >= missing))
        k, v = (F.pad(a, (0, 0, missing, 0)) for a in (k, v))
    return k, v, gates


def run(rule, phi, q, k, v, gates, state):
    """Run the rule. Arguments and results as in omega.omega_ref."""
    y, state, _ = run_all(rule, phi, q, k, v, gates, state)
    return y, state


def run_all(rule, phi, q, k, v, gates, state, one_chunk=None):
    """Return y, the state, and W and S after the last token.

    If the last chunk is unfinished, the state holds W and S at the chunk's start and the chunk's
    tokens so far. The next call puts them before its own and computes the chunk again. one_chunk is
    the function that runs a chunk: run_chunk, or that of dot.py."""
    one_chunk = one_chunk or run_chunk
    n_new, past = q.shape[2], rule.window - 1
    ks, vs, all_gates = join(state, k, v, gates)
    B, H, T = all_gates.keep.shape
    k, v, looks = with_past(ks, vs, all_gates)
    q = F.pad(q, (0, 0, T - n_new, 0))                        # 0 for old tokens; their y is cut off

    def by_head(matrices):
        raised = [at_least_float32(a) for a in matrices]
        return [a.expand(B, *a.shape[-3:]).flatten(0, 1) for a in raised]

    def by_sequence(matrices):
        return [a.unflatten(0, (B, H)) for a in matrices]

    def cut(a, past=0):                   # a part for each chunk, which begins `past` rows before
        if a is None:
            return repeat(None)
        a = a.flatten(0, 1)
        if past:
            return [a[:, i:i + rule.chunk + past] for i in range(0, T, rule.chunk)]
        return a.split(rule.chunk, 1)                         # its gradient is one concatenation

    parts = [cut(a) for a in looks]
    gates = [Gates(*part) for part in zip(*parts)]
    mixes = repeat(None)                                      # run_chunk computes them
    if T % rule.chunk == 0 and looks.keep.device.type == "cpu":
        mixes = together(rule, gates)

    M0, W, S = by_head(state.M0), by_head(state.W), by_head(state.S)
    boundary, ys = (W, S), []
    for q, k, v, now, mix in zip(cut(q), cut(k, past), cut(v, past), gates, mixes):
        if now.reset is not None:                             # W and S after it are the boundary's
            W = [w.where(~now.reset[:, :1, None], 0) for w in W]
            S = [s.where(~now.reset[:, :1, None], 0) for s in S]
            boundary = W, S
        full = q.shape[1] == rule.chunk
        newton = rule.muon == "chunk" and full
        y, W, S = one_chunk(rule, phi, q, k, v, now, mix, M0, W, S, newton)
        ys.append(y)
        if full:
            W = rule.bound(W)                                                        # choice 22
            boundary = W, S

    y = torch.cat(ys, 1)[:, T - n_new:].unflatten(0, (B, H))
    state = since(rule, state, *map(by_sequence, boundary), ks, vs, all_gates)
    return y, state, (by_sequence(W), by_sequence(S))


def weights(rule, phi, state, one_chunk=None):
    """Return the matrices M0 + W that a query reads after the last token, and the momentum S."""
    W, S = state.W, state.S
    if state.pos:                                             # run the unfinished chunk again
        nothing = state.k[:, :, :0]
        no_gates = Gates(*(a if a is None else a[:, :, :0] for a in state.gates))
        *_, (W, S) = run_all(rule, phi, nothing, nothing, nothing, no_gates, state, one_chunk)
    return tuple(plus(state.M0, W)), tuple(S)
