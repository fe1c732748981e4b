"""chunks.py - the rule of omega.py, fast: block after block, each in a few matrix products.

A chunk is one or more blocks. A block is muon_every tokens, fewer at a chunk's end, and ends in one
Newton-Schulz; without Newton-Schulz a chunk is one block. All blocks of a chunk take gradients at
one anchor, the memory at the chunk's start (Eq 16).

What follows is about one block and one matrix of W. W_0 and S_0 are the memory and its momentum at
the block's start. s and t count the tokens of the block from 1, and i counts its pairs: pair i is
that of token i, and pairs 0, -1, .. are those of the window - 1 tokens before the block.

The gradient of pair i is an outer product x_i^T d_i: x_i enters the matrix, d_i is the error of
what leaves it. The gates alone say with which coefficients gradients add up. Here are three tokens
and a window of 2; in this picture k, m, e, g are keep, momentum, step and gate:

    Keep = 1                Write = e1                     Gate = g10 g11
           k2    1                  k2e1    e2                        g21 g22
           k3k2  k3  1              k3k2e1  k3e2  e3                      g32 g33

The columns of Gate are the pairs 0 to 3. Keep[t, s] is what is left at token t of what token s
wrote, and Write[t, s] is that times the step of s. Mom is Keep with momentum in the place of keep.
U_t is the sum of the steps of the block so far, decayed:

    g_t = sum_i Gate[t, i] x_i^T d_i
    S_t = sum_s Mom[t, s] g_s + momprod_t S_0                    momprod_t = m1 m2 .. mt       Eq 33
    U_t = sum_s Write[t, s] S_s,   W_t = keepprod_t W_0 - U_t    keepprod_t = k1 k2 .. kt      Eq 16

So U_t is a sum over the pairs, and nobody needs W_t itself. A row r that enters the matrix reads it
by attention, with P in the place of the softmax (if W stands for W - M0, r M0 is added):

    U_t   = sum_i P[t, i] x_i^T d_i + drift_t S_0      P = Write Mom Gate,   drift = Write momprod
    r W_t = keepprod_t r W_0 - drift_t r S_0 - sum_i P[t, i] (r . x_i) d_i

For example P[2, 1] = k2 e1 g11 + e2 (m2 g11 + g21): all that pair 1 adds to U_2. At the end of a
block Newton-Schulz takes the whole sum: W_end = keepprod W_0 - due NS(U), where due is the sum of
Write's last row (choice 15; with error = "token" NS(U) has another length, choice 24). The last
token reads W_end, and the next block begins from it. At the end of a chunk the norm of W_end is
bounded, too (choice 22).

With error = "token" (choice 24) a pair has another error at each token that looks at it. So each
token has its own copies of its window's pairs, which makes n = c window copies in all. Copy i
belongs to token t(i). In the last matrix d_i = E_i / |x_i|^2, where E_i is what x_i reads after
token t(i) - 1, less its target v_i. That is the reading above with the coefficients of the token
before: row i of P' is row t(i) - 1 of P, and likewise drift' and keepprod'. At the first token P'
and drift' are 0, and keepprod' is 1. In matrices whose rows are x_i, d_i, v_i and E_i:

    E = keepprod' X W_0 - drift' X S_0 - (P' * (X X^T)) D - V          * entry by entry
    (I + A) E = E_0,   A[i, j] = P'[i, j] (x_i . x_j) / |x_j|^2

E_0 are the errors that there would be if the block had no pairs. Row i of A is 0 from the first
copy of t(i) on, so A is strictly lower triangular, and one triangular solve gives E. The other
matrices learn from errors at the anchor.
"""
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F

import memory
from memory import at_least_float32, without_autocast
from muon import newton_schulz
from omega import Gates, join, nearest, plus, since


# ---- coefficients, from the gates alone
class Mix(NamedTuple):
    """The coefficients of a block of c tokens. The last three are None without momentum."""
    P: torch.Tensor                       # (N, c, n) of the n pairs in U_t
    keepprod: torch.Tensor                # (N, c, 1) of W_0 in W_t
    due: torch.Tensor                     # (N, 1, 1) of NS(U) in what W loses at the block's end
    drift: torch.Tensor | None = None     # (N, c, 1) of S_0 in U_t
    S_pairs: torch.Tensor | None = None   # (N, 1, n) of the pairs in S at the block's end
    momprod: torch.Tensor | None = None   # (N, 1, 1) of S_0 in S at the block's end


def decays(a):
    """Return Keep and keepprod of a = keep, or Mom and momprod: (N, c) -> (N, c, c), (N, c, 1)."""
    logs = a.clamp_min(torch.finfo(a.dtype).tiny).log()[..., None]
    # sums[t, s] adds the logs of tokens s + 1 .. t; a difference of two long sums would lose digits
    sums = logs.expand(-1, -1, a.shape[1]).tril(-1).cumsum(1)
    return sums.exp().tril(), logs.cumsum(1).exp()


def times_gate(rule, rows, gate):
    """Return rows @ Gate: (N, r, c), gate (N, c, window) -> (N, r, n)."""
    c, window = gate.shape[1:]
    if rule.solves or window == 1:                            # each token has its own pairs
        return (rows[..., None] * gate[:, None]).flatten(2)

    # Gate is a band. Rows of gate padded to n + 1 numbers, laid end to end and cut every n numbers,
    # start one place later in each row
    n = c + window - 1
    padded = F.pad(gate, (0, c)).flatten(1)
    Gate = padded[:, : c * n].unflatten(1, (c, n))
    return rows @ Gate


def coefficients(rule, gates):
    """Return the Mix of a block's gates (N, c, ..)."""
    Keep, keepprod = decays(gates.keep)
    Write = Keep * gates.step[:, None]
    due = Write[:, -1:].sum(-1, keepdim=True)
    if gates.momentum is None:
        return Mix(times_gate(rule, Write, gates.gate), keepprod, due)

    Mom, momprod = decays(gates.momentum)
    P = times_gate(rule, Write @ Mom, gates.gate)
    S_pairs = times_gate(rule, Mom[:, -1:], gates.gate)
    return Mix(P, keepprod, due, Write @ momprod, S_pairs, momprod[:, -1:])


def together(rule, gates):
    """Return a list with the Mix of each block, from a list with the gates of each. All blocks have
    one length. Where blocks are short, one call for all takes less time than a call for each."""
    joined = [None if a[0] is None else torch.cat(a) for a in zip(*gates)]
    mix = coefficients(rule, Gates(*joined))
    parts = [repeat(None) if a is None else a.chunk(len(gates)) for a in mix]
    return [Mix(*part) for part in zip(*parts)]


# ---- one block
def features(phi, a):
    """Return phi(a), cast to autocast's type where autocast is on."""
    x = phi(a)
    device = a.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    return x


def copies(rule, a):
    """Return what a block learns from, (N, n, ..): all its pairs a (N, window - 1 + c, ..), or
    where errors are solved for, each token's copies of the pairs in its window."""
    if not rule.solves or rule.window == 1:
        return a
    return a.unfold(1, rule.window, 1).mT.flatten(1, 2)


def before(rule, a, fill=0.0):
    """Return row t(i) - 1 of a (N, c, ..) for each copy i, and `fill` for copies of the first
    token: (N, n, ..)."""
    a = F.pad(a[:, :-1], (0, 0, 1, 0), value=fill)
    return a if rule.window == 1 else a.repeat_interleave(rule.window, 1)


def errors_at_tokens(rule, phi, mix, k, v, M0, W, S, x):
    """Return d = E / |x|^2 (N, n, out) of the last matrix, which x (N, n, in) enters. v are the
    targets of that matrix."""
    with without_autocast(x):                                 # a solve piles up rounding errors
        x = x.to(W[-1].dtype)
        if rule.memory == "linear":
            scores = phi.inner(k, k, x, x)
        else:
            scores = x @ x.mT
        size = scores.diagonal(0, 1, 2)[..., None].clamp_min(0.5)    # |x_i|^2

        E_0 = before(rule, mix.keepprod, 1.0) * (x @ W[-1]) - v
        if M0:
            E_0 = E_0 + x @ M0[-1]
        if S:
            E_0 = E_0 - before(rule, mix.drift) * (x @ S[-1])

        A = before(rule, mix.P / size.mT) * scores
        E = torch.linalg.solve_triangular(A, E_0, upper=False, unitriangular=True)
        return E / size


def gradients(rule, phi, mix, k, v, xk, M0, anchor, W, S):
    """Return a list with x (N, n, in) and d (N, n, out) of each matrix, where the gradient of pair
    i is x_i^T d_i. d is the error at the anchor, but of the last matrix that at the token if the
    rule solves for it."""
    def at_tokens(x):
        return errors_at_tokens(rule, phi, mix, k, v, M0, W, S, x)

    last = at_tokens if rule.solves else None
    return memory.gradients(rule.memory, rule.loss, anchor, xk, v, rule.norm, last)


def total(rows, x, d):
    """Return sum_i rows_i x_i^T d_i: rows (N, 1, n), x (N, n, in), d (N, n, out)."""
    return (x.mT @ (rows.mT * d)).to(rows.dtype)


def write(rule, mix, xd, W, S, newton):
    """Return W and S at the end of a block. xd: the x and d of each matrix. newton: whether
    Newton-Schulz ends the block."""
    U = [total(mix.P[:, -1:], x, d) for x, d in xd]
    if S:
        U = [u + mix.drift[:, -1:] * s for u, s in zip(U, S)]
        S = [total(mix.S_pairs, x, d) + mix.momprod * s for (x, d), s in zip(xd, S)]   # Eq 33

    written = U                                                                        # Eq 10, 16
    if newton:                                                                         # Eq 32
        with without_autocast(mix.due):
            O = [newton_schulz(u, rule.ns_steps, rule.ns_coefficients) for u in U]
            if rule.solves:
                written = [nearest(o, u) for o, u in zip(O, U)]
            else:
                written = [mix.due * o for o in O]
    return [mix.keepprod[:, -1:] * w - a for w, a in zip(W, written)], S


def read(rule, phi, mix, q, k, xq, M0, W, S, W_end, xd):
    """Return what the queries q read: y (N, c, D). W_end is what the last token reads where
    Newton-Schulz ends the block, else None."""
    def read_matrix(i, rows):                                 # r W_t of each row r, as above
        x, d = xd[i]
        if i < memory.firsts(rule.memory):                    # rows are phi(q)
            scores = phi.inner(q, k, rows, x)
        else:
            scores = rows @ x.mT
        y = mix.keepprod * (rows @ W[i]) - (mix.P * scores) @ d
        if S:
            y = y - mix.drift * (rows @ S[i])
        if W_end:
            y = torch.cat([y[:, :-1], rows[:, -1:] @ W_end[i]], 1)
        return y + rows @ M0[i] if M0 else y

    a = memory.hidden(rule.memory, xq, read_matrix)
    f = read_matrix(len(xd) - 1, a)
    return memory.output(rule.memory, f, q, rule.norm)


def run_block(rule, phi, q, k, v, gates, mix, M0, anchor, W, S, newton):
    """Learn and read a block: q (N, c, D), k, v (N, window - 1 + c, D), gates (N, c, ..), matrices
    (N, in, out) -> y (N, c, D), W and S at its end. This is what torch.compile compiles. If mix is
    None it is computed here from the gates, so that a compiled backward can recompute it, too."""
    if mix is None:
        with without_autocast(q):
            mix = coefficients(rule, gates)
    xq = features(phi, q)
    xk = copies(rule, features(phi, k))
    k, v = copies(rule, k), copies(rule, v)
    v = memory.target(rule.memory, rule.loss, k, v)

    xd = gradients(rule, phi, mix, k, v, xk, M0, anchor, W, S)
    W_end, S_end = write(rule, mix, xd, W, S, newton)
    y = read(rule, phi, mix, q, k, xq, M0, W, S, W_end if newton else None, xd)
    return y, W_end, S_end


# ---- all blocks
def blocks(rule, T):
    """Return a list of the blocks of T tokens, each a range. A block also ends where its chunk
    ends."""
    size, found = rule.muon_every or rule.chunk, []
    for chunk in range(0, T, rule.chunk):
        chunk_end = min(chunk + rule.chunk, T)
        for begin in range(chunk, chunk_end, size):
            found.append(range(begin, min(begin + size, chunk_end)))
    return found


def cut(a, of_blocks, past=0):
    """Return a list with each block's part of a (B, H, past + T, ..), which begins `past` rows
    before the block: (N, past + c, ..) each."""
    if a is None:
        return [None] * len(of_blocks)
    a = a.flatten(0, 1)
    if past:
        return [a[:, block.start: block.stop + past] for block in of_blocks]
    return a.split([len(block) for block in of_blocks], 1)    # its gradient is one concatenation


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


def run_all(rule, phi, q, k, v, gates, state, one_block=None):
    """Return y, the state, and W and S after the last token.

    If the last chunk is unfinished, the state holds W and S at the chunk's start and the chunk's
    tokens so far. The next call puts them before its own and computes the chunk again. one_block is
    the function that runs a block: run_block, or that of dot.py."""
    one_block = one_block or run_block
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

    # lists, with a part for each block
    of_blocks = blocks(rule, T)
    q, k, v = cut(q, of_blocks), cut(k, of_blocks, past), cut(v, of_blocks, past)
    parts = [cut(a, of_blocks) for a in looks]
    gates = [Gates(*of_block) for of_block in zip(*parts)]
    mixes = repeat(None)                                      # run_block computes them
    same_length = len({len(block) for block in of_blocks}) == 1
    if same_length and looks.keep.device.type == "cpu":
        with without_autocast(looks.keep):
            mixes = together(rule, gates)

    M0, W, S = by_head(state.M0), by_head(state.W), by_head(state.S)
    boundary, ys = (W, S), []
    for block, q, k, v, now, mix in zip(of_blocks, q, k, v, gates, mixes):
        if block.start % rule.chunk == 0:
            if now.reset is not None:                         # W and S after it are the boundary's
                W = [w.where(~now.reset[:, :1, None], 0) for w in W]
                S = [s.where(~now.reset[:, :1, None], 0) for s in S]
                boundary = W, S
            anchor = plus(M0, W)                                                       # Eq 16
        chunk_ends = block.stop % rule.chunk == 0
        newton = rule.muon_every > 0 and (chunk_ends or len(block) == rule.muon_every)
        y, W, S = one_block(rule, phi, q, k, v, now, mix, M0, anchor, W, S, newton)
        ys.append(y)
        if chunk_ends:
            W = rule.bound(W)                                                          # choice 22
            boundary = W, S

    y = torch.cat(ys, 1)[:, T - n_new:].unflatten(0, (B, H))
    state = since(rule, state, *map(by_sequence, boundary), ks, vs, all_gates)
    return y, state, (by_sequence(W), by_sequence(S))


def weights(rule, phi, state, one_block=None):
    """Return the matrices M0 + W that a query reads after the last token, and the momentum S."""
    W, S = state.W, state.S
    if state.pos:                                             # run the unfinished chunk again
        nothing = state.k[:, :, :0]
        no_gates = Gates(*(a if a is None else a[:, :, :0] for a in state.gates))
        *_, (W, S) = run_all(rule, phi, nothing, nothing, nothing, no_gates, state, one_block)
    return tuple(plus(state.M0, W)), tuple(S)
