"""chunks.py - the rule of omega.py chunk by chunk: products of triangular matrices (Eq 16, 39, 40).

At fixed weights the gradient of pair i is an outer product x_i^T d_i: x_i enters the matrix, d_i is the derivative of
the loss by what leaves it. So a chunk writes sums of x_i^T d_i, and their coefficients come from the gates alone. Here
are four tokens in two blocks of two, with a window of 2. a is keep, e step, g gate; pair 0 comes from before the chunk:

            s   1     2     3     4            pair  0    1    2    3    4             s   1     2     3     4
         t 1    1                               1   g10  g11                           1   e1
    Keep = 2    a2    1                 Gate =  2        g21  g22            Wait = -  2  a2e1   e2
           3   a3a2   a3    1                   3             g32  g33                 3               e3
           4  a4a3a2 a4a3   a4    1             4                  g43  g44            4              a4e3   e4

Keep[t, s] is what is left at token t of what token s wrote. Mom is the same of momentum. Wait is -Keep times the steps,
inside of blocks. X and D have the rows x_i and d_i:

    S_t  = sum_i (Mom Gate)[t, i] x_i^T d_i + momprod_t S_0                                        Eq 33, 39
    -U_t = sum_i P[t, i] x_i^T d_i + u_t S_0    P = Wait Mom Gate,  u = Wait momprod    steps not yet applied
    O_j  = due_j NS(-U at its end)      due = -Wait 1; without Newton-Schulz O = -U      the update of block j
    W_t  = keepprod_t W_0 + sum over ended blocks j of Keep[t, end of j] O_j                       Eq 16, 32

W_0 and S_0 are those before the chunk; keepprod and momprod are products from its first token on. After its update a
block's U is 0. Without momentum, with a window of 1 and gates of 1, P is Wait. Reading needs no W_t: R has the rows r_t
that tokens multiply by the matrix, and all are read at once, by attention with P in the place of the softmax,

    r_t (W_t - U_t) = keepprod_t r_t W_0 + u_t r_t S_0 + sum_j Keep[t, end of j] r_t O_j + ((P o R X^T) D)_t

where o multiplies elementwise. With error = "token" (choice 24) the error of a pair at token t is what x_i reads after
token t - 1, minus v_i. P', keepprod' and u' are P, keepprod and u moved down by a row. A pair has a different error at
each token whose window holds it, which makes c * window pairs. A chunk is one block. So the errors E solve

    E = keepprod' o (X W_0) + u' o (X S_0) + (P' o X X^T) D - V,   D = E / |x_i|^2    or    (I + A) E = E_0

E_0 are the errors if the chunk had written nothing, and A[i, j] = -(P' o X X^T)[i, j] / |x_j|^2 is strictly lower
triangular. NS(-U) is then scaled to come nearest to -U, so due is 1. The idea is DeltaNet's (Yang et al. 2024, arXiv
2406.06484) and, with momentum, Momentum DeltaNet's (Huang et al. 2026, arXiv 2605.05838).
"""
import sys
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F

import memory
from memory import at_least_float32, without_autocast
from muon import newton_schulz
from omega import Gates, join, nearest, since
from poly import grown, kernel_rows, one_hot, with_keys


# ---- coefficients, which depend on the gates alone. `of` picks rows t of a matrix: all of them, or some
every, last_row = (lambda a: a), (lambda a: a[..., -1:, :])
eager = lambda a: a.device.type == "cpu" and not torch.compiler.is_compiling()
FEW = 64                                  # tokens up to which a CPU makes (c, c) matrices for one row, as in decoding
logs = lambda a: a.clamp_min(torch.finfo(a.dtype).tiny).log()            # 0 counts as the smallest normal number


def ends(rule):
    """Return the function that picks the last tokens of blocks. The end of a chunk ends a block, too."""
    m = rule.muon_every or rule.chunk
    ragged = lambda c: c == rule.chunk and c % m              # the last block of a chunk may be shorter
    return lambda a: torch.cat([a[..., m - 1::m, :], last_row(a)], -2) if ragged(a.shape[-2]) else a[..., m - 1::m, :]


def products(decay):
    """Return the products decay_1 .. decay_t, (.., c) -> (.., c, 1)."""
    return logs(decay).cumsum(-1)[..., None].exp()


def decays(decay, of=every, within=True, times=None):
    """Return Keep or Mom of a decay (.., c), or rows of it, 0 outside of `within`; times (.., c): column s times_s."""
    sums, ones = logs(decay).cumsum(-1), torch.ones(decay.shape[-1:] * 2, dtype=torch.bool, device=decay.device)
    hidden = torch.where(of(ones.tril() & within), 0.0, -torch.inf)              # before exp, which could overflow
    columns = -sums if times is None else logs(times) - sums
    return (of(sums[..., None]) + (hidden + columns[..., None, :])).exp()


def windowed(rule, rows, gate, shifts=False):
    """Return rows @ Gate, (.., r, c) -> (.., r, n); n = w - 1 + c, or c w where each token has pairs of its own.
    shifts: a GPU adds up shifted rows, in one kernel, instead of making Gate; a CPU does so for one row."""
    *lead, c, w = gate.shape                                  # w: the window and idle pairs, see `cut`
    if rule.solves:
        return (rows[..., None] * gate[..., None, :, :]).flatten(-2)
    if w == 1:
        return rows * gate.mT
    if shifts if not eager(rows) else rows.shape[-2] == 1 and c > FEW:
        return sum(F.pad(rows * g[..., None, :], (i, w - 1 - i)) for i, g in enumerate(gate.unbind(-1)))
    return rows @ F.pad(gate, (0, c)).flatten(-2)[..., : c * (w - 1 + c)].view(*lead, c, w - 1 + c)


def carried(rows, momentum, Mom=None):
    """Return rows @ Mom, (.., r, c). One long row does without Mom: the tokens that are summed double."""
    if rows.shape[-2] != 1 or rows.shape[-1] <= FEW or Mom is not None or not eager(rows):
        Mom = decays(momentum) if Mom is None else Mom
        return rows @ Mom if rows.shape[-2] != 1 else (rows.mT * Mom).sum(-2, keepdim=True)
    decay, s = F.pad(momentum[..., None, 1:], (0, 1)), 1      # of the next token
    while s < rows.shape[-1]:
        rows, decay = torch.addcmul(rows, decay, F.pad(rows[..., s:], (0, s))), decay * F.pad(decay[..., s:], (0, s))
        s *= 2
    return rows


def waiting(rule, gates, of=every, waits=True, Mom=None):
    """Return P (.., r, n), u (.., r, 1; None without momentum) and due (.., r, 1), 0 for t (c, 1) not in `waits`."""
    if m := rule.muon_every:
        block = torch.arange(gates.keep.shape[-1], device=gates.keep.device)[:, None] // m
        waits = waits & (block == block.mT)
    wait = decays(gates.keep, of, waits, gates.step)          # -Wait; Gate gets the sign
    due = wait.sum(-1, keepdim=True)
    due = torch.ones_like(due) if rule.solves else due        # then `nearest` has the say
    if gates.momentum is None:
        return windowed(rule, wait, -gates.gate), None, due
    G = carried(wait, gates.momentum, Mom)
    return windowed(rule, G, -gates.gate, shifts=True), G[..., :1] * -gates.momentum[..., :1, None], due


def mixing(rule, gates, new, due, Mom=None):
    """Return what the last `new` tokens read: P (.., new, n), and coefficients (.., new, 1) of W_0, S_0, and of the NS
    of each block that has ended; due (.., J, 1): theirs. With Newton-Schulz a block's last token has no U."""
    c, m, of, waits = gates.keep.shape[-1], rule.muon_every, lambda a: a[..., -new:, :], True
    if m:
        t = torch.arange(c, device=gates.keep.device)[:, None]
        waits = (t % m < m - 1) & (t < c - (c == rule.chunk))
    P, u, _ = waiting(rule, gates, of, waits, Mom)
    coef = [of(products(gates.keep))] + [u] * (u is not None and m != 1)
    if m and due.shape[-2]:
        coef += (ends(rule)(decays(gates.keep, of).mT) * due).mT.split(1, -1)
    return P, coef


class Closing(NamedTuple):
    """Coefficients of the J blocks that end, and of the last W and S."""
    P: torch.Tensor                       # (.., J [+ 1], n) rows of P at the ends of blocks, and of the pairs in S
    u: torch.Tensor | None                # (.., J [+ 1], 1) what S_0 is in them
    due: torch.Tensor                     # (.., J, 1)
    of_O: torch.Tensor | None             # (.., J, 1) what -U of each block, or its NS, is in W
    keepprod: torch.Tensor | None         # (.., 1, 1) what W_0 is in W


def closing(rule, gates, Mom=None, whole=True):
    """Return the Closing of gates (.., c); of a part of a chunk, not whole, without the last W and S."""
    if not whole and gates.keep.shape[-1] < (rule.muon_every or rule.chunk):     # no block ends
        empty = gates.keep[..., :0, None]
        return Closing(empty, None, empty, None, None)
    P, u, due = waiting(rule, gates, ends(rule), True, Mom)
    if not whole:
        return Closing(P, u, due, None, None)
    if u is not None:
        S = decays(gates.momentum, last_row)
        P = torch.cat([P, windowed(rule, S, gates.gate, shifts=True)], -2)
        u = torch.cat([u, S[..., :1] * gates.momentum[..., :1, None]], -2)
    kept = ends(rule)(decays(gates.keep, last_row).mT)
    return Closing(P, u, due, kept * due if rule.muon_every else kept, last_row(products(gates.keep)))


# ---- error = "token"
INVERT_ON = ("cuda",)                                         # where a solve is slow and a product with (I + A)^-1 fast
inverts = lambda rule, a: rule.memory == "linear" and a.device.type in INVERT_ON   # for all chunks: A has no W in it


class System(NamedTuple):
    """What the errors E solve."""
    A: torch.Tensor                       # (.., n, n), or (I + A)^-1 where `inverts`
    size: torch.Tensor                    # (.., n, 1) |x_i|^2, at least 0.5
    keepprod: torch.Tensor                # (.., n, 1) keepprod'
    u: torch.Tensor | None                # (.., n, 1) u'


def system(rule, gates, x, phi=None, k=None):
    """Return the System of gates (.., c) and X (.., n, in). With phi X is phi(k)."""
    with without_autocast(x):                                 # in float32: a solve adds up rounding errors
        x = x.to(gates.keep.dtype)
        scores = phi.inner(k, k, x, x) if phi else x @ x.mT
        size = scores.diagonal(0, -2, -1).clamp_min(0.5)
        P, u, _ = waiting(rule, gates._replace(gate=gates.gate / size.unflatten(-1, (-1, rule.window))))
        # row t gets row t - 1, once for each pair of the window
        later = lambda a, first=0.0: F.pad(a[..., :-1, :], (0, 0, 1, 0), value=first).repeat_interleave(rule.window, -2)
        A = -later(P) * scores
        A = inverse(A) if inverts(rule, A) else A
        return System(A, size[..., None], later(products(gates.keep), 1.0), u if u is None else later(u))


def inverse(A):
    """Return (I + A)^-1 of A (.., n, n), strictly lower, in log n steps, which join the inverses of blocks: if a and c
    are those of two blocks, and b lies below the first, [[a, 0], [-c b a, c]] is that of both."""
    n, s = A.shape[-1], 1
    A = F.pad(A, (0, (1 << (n - 1).bit_length()) - n) * 2)
    T = A.new_ones(*A.shape[:-1], 1, 1)                       # the inverses of all blocks of size s
    while s < A.shape[-1]:
        b = A.unflatten(-1, (-1, 2 * s)).unflatten(-3, (-1, 2 * s)).diagonal(0, -4, -2).movedim(-1, -3)[..., s:, :s]
        a, c = T.unflatten(-3, (-1, 2)).unbind(-3)
        T, s = torch.cat([F.pad(a, (0, s)), torch.cat([-c @ b @ a, c], -1)], -2), 2 * s
    return T[..., 0, :n, :n]


def solved(rule, to_solve, x, v, M0, W, S):
    """Return D (N, n, out) of the last matrix, M0 + W, with momentum S, by a System. x (N, n, in) enters it."""
    with without_autocast(v):
        x = x.to(W.dtype)
        E0 = to_solve.keepprod * torch.bmm(x, W) - v
        E0 = E0 if S is None else E0 + to_solve.u * torch.bmm(x, S)
        E0 = E0 if M0 is None else E0 + torch.bmm(x, M0)
        solve = partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
        return (torch.bmm if inverts(rule, v) else solve)(to_solve.A, E0) / to_solve.size


# ---- one chunk learns
class Chunks(NamedTuple):
    """Tokens and pairs of N = B H sequences, cut into chunks: c tokens and n pairs in each."""
    q: torch.Tensor                       # (N, chunks, c, D); of a chunk in progress the new tokens alone
    k: torch.Tensor                       # (N, chunks, n, D)
    xq: torch.Tensor                      # (N, chunks, c, E) phi(q)
    xk: torch.Tensor                      # (N, chunks, n, E) phi(k)
    x: torch.Tensor | None                # (N, chunks, n, E) with `exp` features: what is written in place of phi(k)
    v: torch.Tensor                       # (N, chunks, n, D) what the last matrix should produce


def gradients(rule, chunk, solve, M0, W, S):
    """Return x_i (N, n, in) and d_i (N, n, out) of each matrix at W_0 (Eq 16). solve: None, or what gives the d of the
    last matrix at the tokens: a System, or Gates to make one from."""
    def last_errors(x):
        to_solve = solve if isinstance(solve, System) else system(rule, solve, x)
        return solved(rule, to_solve, x, chunk.v, *(a[-1] if a else None for a in (M0, W, S)))
    anchor, n = [m + w for m, w in zip(M0, W)] if M0 else W, memory.firsts(rule.memory)
    last = last_errors if solve else None
    xd = memory.gradients(rule.memory, rule.loss, anchor, chunk.xk, chunk.v, rule.norm, last)
    return xd if chunk.x is None else [(chunk.x, d) for _, d in xd[:n]] + xd[n:]


def write(x, d, rows):
    """Return the sums of rows[r, i] x_i^T d_i over i: x (N, n, in), d (N, n, out), rows (N, r, n) -> r (N, in, out)."""
    if not rows.shape[1]:
        return []
    sums = torch.bmm(x.mT, (rows.mT[..., None] * d[:, :, None]).flatten(2))
    return [a.to(rows.dtype) for a in sums.chunk(rows.shape[1], -1)]             # under autocast they are bfloat16


def learn(rule, chunk, close, solve, M0, W, S):
    """Learn one chunk -> W and S at its end (of a part of one as they were); of each matrix the NS of the blocks that
    end, and x and d."""
    xd, J, whole = gradients(rule, chunk, solve, M0, W, S), close.due.shape[1], close.keepprod is not None
    new = [write(x, d, close.P) for x, d in xd]               # of each matrix -U of each block, and S
    if S:
        new = [[torch.addcmul(a, close.u[:, r, None], s) for r, a in enumerate(sums)] for sums, s in zip(new, S)]
    last_S, new = [sums[-1] for sums in new if S and whole], [sums[:J] for sums in new]
    if rule.muon_every and J:                                 # the outer gradient goes through it (choice 14)
        with without_autocast(close.due):
            plain = [torch.cat(sums) for sums in new]
            new = newton_schulz(plain, rule.ns_steps, rule.ns_coefficients)      # Eq 40
            new = [nearest(O, U) for O, U in zip(new, plain)] if rule.solves else new
        new = [O.chunk(J) for O in new]
    if whole:
        W, S = [close.keepprod * w for w in W], last_S
        for j in range(J):                                                       # Eq 16, 32
            W = [torch.addcmul(w, close.of_O[:, j, None], O[j]) for w, O in zip(W, new)]
        W = rule.bound(W)                                                        # choice 22
    return W, S, new if rule.muon_every else [[] for _ in W], xd


# ---- then all tokens are read
def read(rule, phi, chunks, gates, due, Mom, M0, bases, xd):
    """Read the K chunks of all sequences at once, layer by layer -> y (K, c, D). bases: of each chunk and matrix W_0,
    S_0 and each NS; xd: of each chunk and matrix x and d. due, Mom: as in `mixing`."""
    q, k, xq, xk = (a.flatten(0, 1) for a in chunks[:4])
    P, coef = mixing(rule, gates, q.shape[1], due, Mom)
    P, coef = P.flatten(0, 1), [a.flatten(0, 1) for a in coef]
    stacked = lambda parts: torch.stack(parts, 1).flatten(0, 1)                  # of each chunk (N, ..) -> (K, ..)
    bases = [[stacked(base) for base in zip(*matrix)] for matrix in zip(*bases)]
    direct, firsts = rule.muon_every != 1, memory.firsts(rule.memory)            # muon_every = 1: nothing waits
    scores = P * phi.inner(q, k, xq, xk) if direct else None  # once for all matrices that phi(k) enters

    def of_matrix(i, rows):
        """Return what rows (K, c, in) read of the i-th matrix."""
        base = bases[i] + ([M0[i][:, None].expand(-1, len(rows) // len(M0[i]), -1, -1).flatten(0, 1)] if M0 else [])
        reads = torch.bmm(rows, torch.cat(base, -1)).chunk(len(base), -1)
        y = reads[-1] if M0 else 0.0
        for c, r in zip(coef, reads):                         # M0, which comes last, has no coefficient
            y = torch.addcmul(y, c, r) if torch.is_tensor(y) else c * r
        if direct:
            d = stacked([one[i][1] for one in xd])
            mixed = scores if i < firsts else P * torch.bmm(rows, stacked([one[i][0] for one in xd]).mT)
            y = torch.baddbmm(y, mixed, d)                                       # Eq 16
        return y
    return memory.output(rule.memory, memory.through(rule.memory, xq, of_matrix), q, rule.norm)


# ---- from tokens to chunks and back
is_compiled = lambda f: hasattr(f, "_torchdynamo_orig_callable")
AT_ONCE = 12_000_000, 4_000_000_000       # most numbers of phi(q) in a call of `advance`: CPU (its cache), GPU
bases_of = lambda rule, W, S: [*zip(W, S)] if S and rule.muon_every != 1 else [*zip(W)]      # each matrix' W_0, S_0
of_sequences = lambda matrices, B: [at_least_float32(a).expand(B, *a.shape[-3:]).flatten(0, 1) for a in matrices]


def run(rule, phi, q, k, v, gates, state):
    """Run the rule chunk by chunk. Arguments and results as in omega.omega_ref; it knows `exp`, too. Raises ValueError
    for what Rule.fault names."""
    if fault := rule.fault():
        raise ValueError(fault)
    pos, c, E = state.pos, rule.chunk, phi.out_dim
    ks, vs, gates = join(state, k, v, gates)
    if phi.kind == "exp":
        state, E = with_keys(state, k, memory.firsts(rule.memory)), state.keys.shape[2] + q.shape[2]
    most = max(1, AT_ONCE[q.device.type == "cuda"] // max(1, q.shape[:2].numel() * E * c))
    M0, W, S = (of_sequences(a, len(q)) for a in (state.M0, state.W, state.S))
    pairs = (ks, vs) if state.keys is None else (ks, vs, one_hot(ks, state.keys))
    at, end, past, ys = 0, gates.keep.shape[2], ks.shape[2] - gates.keep.shape[2], []
    part = lambda a, i, j: a if a is None or (i, j) == (0, a.shape[2]) else a[:, :, i:j]     # a slice costs a copy
    while at < end:                                           # a chunk in progress, whole chunks, a part of one
        count = 1 if at < pos or end - at < c else min((end - at) // c, most)
        to, first = min(end, at + c * count), max(0, past + at - rule.window + 1)
        y, W, S = advance(rule, phi, count, part(q, max(0, at - pos), to - pos), [part(a, first, past + to)
                          for a in pairs], Gates(*(part(a, at, to) for a in gates)), state.keys, M0, W, S)
        ys, at = ys + [y], to
    W, S = ([a.unflatten(0, q.shape[:2]) for a in matrices] for matrices in (W, S))
    return torch.cat(ys, 2) if len(ys) > 1 else ys[0], since(rule, state, W, S, ks, vs, gates)


def cut(rule, phi, count, q, pairs, gates, keys):
    """Cut what `advance` takes into `count` chunks -> a Chunks, gates (N, count, c, ..). pairs: k, v [and one-hot x] of
    the tokens and of up to window - 1 before. Missing ones become zeros of gate 0, and up to 7 idle ones more make
    their number a multiple of 8, which is faster."""
    T, w, cast, device = gates.keep.shape[2], rule.window, lambda a: a, q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        cast = lambda a: a.to(torch.get_autocast_dtype(device))
    c, idle = T // count, 0 if rule.solves else -(w - 1) % 8
    past, gate = idle + w - 1, F.pad(gates.gate, (idle, 0))
    missing = past + T - pairs[0].shape[2]
    if missing > idle:
        pair = torch.arange(T, device=q.device)[:, None] + torch.arange(past + 1, device=q.device)
        gate = gate * (pair >= missing)
    k, v, *x = (F.pad(a, (0, 0, missing, 0)) if missing else a for a in pairs)
    tokens = lambda a: a.flatten(0, 1).unflatten(1, (count, -1))                 # (B, H, T, ..) -> (N, count, c, ..)
    chunked = lambda a: a.flatten(0, 1).unfold(1, c + past, c).movedim(-1, 2).contiguous()
    if rule.solves:                                          # each token has the pairs of its window
        chunked = lambda a: a.flatten(0, 1).unfold(1, w, 1).mT.flatten(1, 2).unflatten(1, (count, -1))
    cq, ck, cv = tokens(q), chunked(k), chunked(memory.target(rule.memory, rule.loss, k, v))
    if x:
        x, xq, xk = chunked(x[0]), tokens(kernel_rows(q, keys)), chunked(kernel_rows(k, keys))
    else:
        x, xq, xk = None, cast(phi(cq)), cast(phi(ck))
    gates = gates._replace(gate=gate)
    return Chunks(cq, ck, xq, xk, x, cv), Gates(*(a if a is None else tokens(a) for a in gates))


def advance(rule, phi, count, q, pairs, gates, keys, M0, W, S):
    """Run `count` chunks, or a part of one -> y (B, H, T, D), and W, S at the last boundary."""
    chunks, gates = cut(rule, phi, count, q, pairs, gates, keys)
    whole, bases, xd = gates.keep.shape[-1] == rule.chunk, [], []                # a part leaves W and S as they are
    # a compiled `read` makes Mom again instead of keeping it
    Mom = None if gates.momentum is None or is_compiled(read) or q.shape[2] == 1 else decays(gates.momentum)
    close, each = each_chunk(rule, phi, chunks, gates, Mom, whole)
    for reset, *one in each:
        if reset is not None:
            W, S = ([a.where(~reset[:, :1, None], 0) for a in matrices] for matrices in (W, S))
        before = bases_of(rule, W, S)
        W, S, NS, one_xd = learn(rule, *one, M0, W, S)
        bases.append([[*b, *ns] for b, ns in zip(before, NS)])
        xd.append(one_xd)
    return read(rule, phi, chunks, gates, close.due, Mom, M0, bases, xd).view(*q.shape), W, S


def each_chunk(rule, phi, chunks, gates, Mom=None, whole=True):
    """Return a Closing, and for each chunk its reset and what `learn` takes: Chunks, Closing; System, Gates or None."""
    each = lambda a: repeat(None) if a is None else a.unbind(1)
    split = lambda parts: (type(parts)(*one) for one in zip(*map(each, parts)))
    with without_autocast(gates.keep):
        close = closing(rule, gates, Mom, whole)
    solve = repeat(None)
    if rule.solves:
        solve = split(system(rule, gates, chunks.xk, phi, chunks.k) if rule.memory == "linear" else gates)
    return close, zip(each(gates.reset), split(chunks), split(close), solve)


def weights(rule, phi, state):
    """Return the matrices M0 + W - U that a query reads after the last token, and the momentum S then."""
    W, S, B = list(state.W), list(state.S), len(state.k)
    M0 = grown(state.M0, [w.shape[-2] for w in W])
    if state.pos:
        W, S, m0 = (of_sequences(a, B) for a in (W, S, M0))
        pairs = (state.k, state.v) if state.keys is None else (state.k, state.v, one_hot(state.k, state.keys))
        chunks, gates = cut(rule, phi, 1, state.k[:, :, -1:], pairs, state.gates, state.keys)
        close, ((_, *one),) = each_chunk(rule, phi, chunks, gates)
        before, (_, S, NS, xd) = bases_of(rule, W, S), learn(rule, *one, m0, W, S)
        P, coef = mixing(rule, gates, 1, close.due)
        W = [sum(c[:, 0] * a for c, a in zip(coef, [*b, *ns])) + write(x, d, P[:, 0])[0]
             for b, ns, (x, d) in zip(before, NS, xd)]
        W, S = ([a.unflatten(0, (B, -1)) for a in matrices] for matrices in (W, S))
    return tuple(a + b for a, b in zip(M0, W)) if M0 else tuple(W), tuple(S)


def compile_chunks(**options):
    """Compile the functions of the chunk form by torch.compile. The rest stays eager. The settings of torch below hold
    for all that this process compiles."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # shapes, rules, parts
    torch._functorch.config.backward_pass_autocast = "off"    # backward takes the types that forward took
    torch._functorch.config.activation_memory_budget = 0.0    # and computes again what forward would have kept
    for name in ("cut", "closing", "system", "learn", "read"):
        compile_function(sys.modules[__name__], name, **options)


def compile_function(owner, name, **options):
    """Compile a function of a module or class, unless it is compiled."""
    if not is_compiled(f := getattr(owner, name)):
        setattr(owner, name, torch.compile(f, dynamic=False, **options))
