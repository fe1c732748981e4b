"""omega.py - how the memory learns at test time: the Omega rule, decay, momentum, Newton-Schulz (ATLAS sections 3-5).

For every weight matrix W of the memory (Eq 9, 16, 32, 33; signs and misprints: README, choices 3 - 6 and 12):

    g_t = sum over i in (t - window, t] of gate[t, i] * grad_W l(M(phi(k_i)), v_i)      at the anchor
    S_t = momentum_t * S_{t-1} + g_t
    W_t = keep_t * W_{t-1} - step_t * NS(S_t)                 NS for ATLAS only, else the identity
    y_t = M(phi(q_t); W_t)                                    read after write

The anchor is W at the last chunk boundary. `omega_ref` is this text, token by token, with gradients by autograd.
It is the definition. `omega` is the same function, chunk by chunk. At a fixed anchor the gradient of pair i is
x_i^T d_i: what enters the matrix times the error of what leaves it. So for the tokens t of a chunk

    S_t = momprod_t S_0 + sum_i G[t, i] x_i^T d_i                                             Eq 33, 39
    W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i                                  Eq 16

where W_0 and S_0 stand before the chunk. G, P and the other coefficients come from the gates alone: they are the rule
itself, run on numbers (`mixing`). momprod_t and keepprod_t are the products of momentum and keep up to t; u_t is what
S_0 has added to W_t by then. No W_t is formed to be read. For all rows r_t of a matrix R at once

    r_t W_t = keepprod_t (r_t W_0) + u_t (r_t S_0) + ((P o R X^T) D)_t

which is attention, with P in the place of the softmax. X and D have the rows x_i and d_i, o multiplies elementwise.

With Newton-Schulz a block of m = muon_every tokens writes at once, by its last token (choice 15; m = 1 is the paper):

    W_t = keep_t W_{t-1}, less due_t NS(U_t) at the last token                                Eq 32
    U_t = keep_t U_{t-1} + step_t S_t, due_t = keep_t due_{t-1} + step_t                      from 0 in each block

Here, too, no W_t is formed: r_t W_t = keepprod_t (r_t W_0) + sum over the blocks j of the chunk of C[t, j] (r_t O_j),
where O_j is NS(U) of block j.

keep leads back to zero, as printed, or with forget = "start" to M0: the same rule for W - M0 (choice 21).
Symbols: memory.py.
"""
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import memory
from muon import newton_schulz, newton_schulz_ref


class Rule(NamedTuple):
    """What is learned and how: the four choices of MIRAS (memory, loss, retention through the gates, algorithm)."""
    memory: str = "mlp"
    loss: str = "l2"
    window: int = 1
    chunk: int = 64                       # 1 is the sequential rule, Eq 15; more is Eq 16
    muon_every: int = 0                   # 0: no Newton-Schulz; 1 is the paper (choice 15)
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    forget: str = "zero"                  # what keep < 1 leads back to: zero as printed, or M0 ("start")
    norm: bool = False                    # divide what the last matrix of a deep memory produces by its RMS
    ball: float = 0.0                     # largest norm of a matrix of W at a chunk boundary; 0: none

    def bound(self, W):
        """W, with matrices of a norm above `ball` scaled back to it. To the outer gradient the factor is a constant."""
        if not self.ball:
            return W
        norms = (torch.linalg.vector_norm(w.detach(), dim=(-2, -1), keepdim=True) for w in W)
        return [w * (self.ball / n.clamp_min(self.ball)) for w, n in zip(W, norms)]


class Gates(NamedTuple):
    """The data-dependent numbers of the rule, produced by the outer network."""
    keep: torch.Tensor                    # (B, H, T) in [0, 1]
    step: torch.Tensor                    # (B, H, T)
    momentum: torch.Tensor | None         # (B, H, T) in [0, 1); None: no momentum
    gate: torch.Tensor                    # (B, H, T, window); [..., -1] weighs the token itself


class State(NamedTuple):
    """All that the rule carries from token t to t + 1, of bounded size (`exp` features alone keep all keys)."""
    M0: tuple                             # matrices (H, in, out) that W is counted from; () for zero
    W: tuple                              # W_t (less M0: `total` adds it), matrices (B, H, in, out)
    S: tuple                              # S_t, or () without momentum
    anchor: tuple                         # W at the last chunk boundary
    U: tuple                              # what the block in progress will write, before NS; () without Newton-Schulz
    due: torch.Tensor                     # (B, H) the sum of its steps, decayed
    k: torch.Tensor                       # (B, H, min(t, window - 1), D), the pairs a window looks back on
    v: torch.Tensor
    keys: torch.Tensor | None             # (B, H, t, D) all keys so far, for `exp` features only
    pos: int                              # tokens since the chunk boundary, t mod chunk


def start(rule, phi, M0, batch, momentum=True):
    """The state before the first token: W = M0 for every sequence, S = 0 (choice 10). M0: matrices (H, in, out)."""
    W = tuple(w.expand(batch, *w.shape) for w in M0)
    zeros = tuple(torch.zeros_like(w) for w in W)
    base = tuple(M0) if rule.forget == "start" else ()
    W = zeros if base else tuple(w.clone() for w in W)        # its own: an optimizer changes M0 in place
    none = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)
    keys, due = none if phi.kind == "exp" else None, none.new_zeros(none.shape[:2])
    return State(base, W, zeros if momentum else (), W, zeros if rule.muon_every else (), due, none, none, keys, 0)


def total(state):
    """The weights the memory computes with now."""
    M0 = grown(state.M0, [w.shape[-2] for w in state.W])
    return tuple(a + b for a, b in zip(M0, state.W)) if M0 else state.W


# ---- the definition

def omega_ref(rule, phi, q, k, v, gates, state):
    """The rule of the module docstring, token by token; the gradient is autograd of the printed loss.

    q, k, v (B, H, T >= 1, D), gates and state as in their classes -> y (B, H, T, D), state. It is slow.
    ValueError for `exp` features, of which no phi(x) can be written out.
    """
    pos, held = state.pos, state.k.shape[2]                   # tokens from before these

    def one(M0, before, xq, q, xs, ks, vs, gates):
        """One sequence, one head: phi(q) (T, E), q (T, D), and phi(k) (held + T, E), k, v with the held ones."""
        (W, S, anchor, U, due), (keep, step, momentum, gate) = before, gates

        def window_loss(W, pairs, weights):
            return sum(w * memory.loss(rule.loss, M(W, xs[i], ks[i]), vs[i]) for w, i in zip(weights, pairs))

        def M(W, x, r):
            W = [a + b for a, b in zip(M0, W)] if M0 else W                      # choice 21: W is counted from M0
            return memory.apply(rule.memory, W, x, r, rule.norm)

        def NS(S):
            return newton_schulz_ref(S, rule.ns_steps, rule.ns_coefficients)

        ys = []
        for t in range(len(q)):
            if (pos + t) % rule.chunk == 0:
                anchor = W                                                       # Eq 16; Eq 15 where a chunk is a token
            pairs = range(max(0, held + t - rule.window + 1), held + t + 1)  # this token and the window - 1 before it
            g = grad(window_loss)(anchor, pairs, gate[t, rule.window - len(pairs):])             # Eq 9
            S = tuple(momentum[t] * s + d for s, d in zip(S, g)) if len(momentum) else g         # Eq 33
            if not rule.muon_every:
                W = tuple(keep[t] * w - step[t] * s for w, s in zip(W, S))       # choices 4, 5
            else:                                                                # choice 15
                W, due = tuple(keep[t] * w for w in W), keep[t] * due + step[t]
                U = tuple(keep[t] * u + step[t] * s for u, s in zip(U, S))
                if (pos + t + 1) % rule.chunk % rule.muon_every == 0:            # the block ends; without blocks
                    W = tuple(w - due * NS(u) for w, u in zip(W, U))             # keep W - step NS(S): Eq 32, 40
                    U, due = tuple(torch.zeros_like(u) for u in U), 0 * due
            ys.append(M(W, xq[t], q[t]))                                         # choice 3: read after write
            if (pos + t + 1) % rule.chunk == 0:
                W = tuple(rule.bound(W))                                         # choice 22
        return torch.stack(ys), W, S if len(momentum) else (), anchor, U, due

    gates = tuple(() if g is None else g for g in gates)
    M0 = tuple(m.expand(len(q), *m.shape) for m in state.M0)
    ks, vs = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
    before = state.W, state.S, state.anchor, state.U, state.due
    y, W, S, anchor, U, due = vmap(vmap(one))(M0, before, phi(q), q, phi(ks), ks, vs, gates)
    pos, first = (pos + q.shape[2]) % rule.chunk, max(0, held + q.shape[2] - rule.window + 1)
    return y, State(state.M0, W, S, anchor if pos else W, U, due, ks[:, :, first:], vs[:, :, first:], None, pos)


# ---- what depends on the gates alone, for all chunks at once

def recur(factors, rows):
    """y_t = factors_t * y_{t-1} + rows_t, from y = 0 on: factors (.., c), rows (.., c, k) -> y (.., c, k), y_c.

    On a CPU step by step, for rows stay in its cache. Elsewhere, and for few columns, by doubling: after log2 c passes
    over all tokens each has the sum of all before it.
    """
    factors, s = factors[..., None], 1
    if rows.device.type == "cpu" and rows.shape[-1] > 4 and not torch.compiler.is_compiling():
        y = [rows[..., :1, :]]
        for factor, row in zip(factors.split(1, -2)[1:], rows.split(1, -2)[1:]):
            y.append(torch.addcmul(row, factor, y[-1]))
        return torch.cat(y, -2), y[-1]
    while s < rows.shape[-2]:
        more = torch.addcmul(rows[..., s:, :], factors[..., s:, :], rows[..., :-s, :])
        rows = torch.cat([rows[..., :s, :], more], -2)
        factors, s = torch.cat([factors[..., :s, :], factors[..., s:, :] * factors[..., :-s, :]], -2), 2 * s
    return rows, rows[..., -1:, :]


def products(factors):
    """The products of the factors 1 .. t: (.., c) -> (.., c, 1)."""
    return recur(factors, F.pad(factors[..., :1, None], (0, 0, 0, factors.shape[-1] - 1)))[0]


def band(gate):
    """The window mask of section 3.3, weighted: (.., c, w) -> (.., c, w - 1 + c). Row t: gate[t] from column t on."""
    *lead, c, w = gate.shape
    return F.pad(gate, (0, c)).flatten(-2)[..., : c * (w - 1 + c)].view(*lead, c, w - 1 + c)


def mixing(gates):
    """The rule, run on the coefficients of each x_i^T d_i, of W_0 and of S_0 instead of on matrices.

        G_t = momentum_t * G_{t-1} + Gate_t,       momprod_t likewise from 1 on        S_t: Eq 33, 39
        P_t = keep_t * P_{t-1} - step_t * G_t,     u_t from momprod_t, keepprod_t      W_t: Eq 16

    gates (.., c) and (.., c, window) -> P (.., c, n); [keepprod, u] (.., c, 1); the last rows of P and G (.., 2, n);
    those of keepprod, u and momprod (.., 3, 1). Without momentum, where S_t is g_t, of P and of keepprod alone.
    """
    coef, G, step = [products(gates.keep)], band(gates.gate), -gates.step[..., None]
    if gates.momentum is None:
        P, last = recur(gates.keep, step * G)
        return P, coef, last, coef[0][..., -1:, :]
    momprod, (G, G_last) = products(gates.momentum), recur(gates.momentum, G)
    P, last = recur(gates.keep, step * G)                     # with momentum
    coef.append(recur(gates.keep, step * momprod)[0])
    ends = torch.cat([a[..., -1:, :] for a in (*coef, momprod)], -2)
    return P, coef, torch.cat([last, G_last], -2), ends


def muon_mixing(gates, m, begun, closes, due):
    """The same where Newton-Schulz stands between S and W -> by, first, coef, due.

    by (.., blocks, n): the coefficients of each x_i^T d_i in U at the end of each block, and first (.., 1, 1) that of
    the U before, for `begun` tokens of the first block came before. With momentum `by` has one row more, of the last
    S_t, and one column more, of S_0. coef (.., c, 1 + done): keepprod and C, of the blocks that end here; a block ends
    with the chunk (`closes`), too. due (.., 1, 1): of the last block.
    """
    keep, step, momentum, gate = gates
    c = keep.shape[-1]
    blocks, block = -(-(begun + c) // m), torch.arange(begun, begun + c, device=keep.device) // m
    done = blocks if closes else (begun + c) // m
    inside = block[:, None] == torch.arange(blocks, device=keep.device)          # (c, blocks)
    end = F.pad(inside[1:], (0, 0, 0, 1)) < inside            # the last token of each block, as far as it is here
    ones = end.any(1)[:, None].to(keep).expand(*keep.shape, 1)
    later = recur((keep.roll(-1, -1) * ~end.any(1)).flip(-1), ones.flip(-2))[0].flip(-2)     # keep from here to the end
    first = keep[..., :1, None] * later[..., :1, :]
    own = step[..., None] * later * inside                    # how much of S_s is in U of each block: (.., c, blocks)
    dues = own.sum(-2, keepdim=True)
    dues = torch.cat([dues[..., :1] + first * due, dues[..., 1:]], -1)
    coef = torch.cat([products(keep), recur(keep, -(dues * end)[..., :done])[0]], -1)
    if momentum is not None:                                  # then how much of g_s, and of it in the last S:
        own = torch.cat([own, F.pad(keep.new_ones(1, 1), (0, 0, c - 1, 0)).expand(*keep.shape, 1)], -1)
        own = recur(momentum.roll(-1, -1).flip(-1), own.flip(-2))[0].flip(-2)    # own_s + momentum_{s+1} own_{s+1}
    by = own.mT @ band(gate)
    if momentum is not None:
        by = torch.cat([by, (momentum[..., :1, None] * own[..., :1, :]).mT], -1)
    return by, first, coef, dues[..., -1:]


# ---- one chunk learns; all tokens are read

def features(rule, phi, q, k):
    """phi(q), phi(k), None (the pairs are made of phi(k)), and, where attention reads, phi(q) phi(k)^T."""
    return phi(q), phi(k), None, None if rule.muon_every else phi.inner(q, k)


def gradients(rule, M0, anchor, xk, v, xw=None):
    """x_i (N, n, in) and d_i (N, n, out) of each matrix, all at the anchor (Eq 16), for phi(k) (N, n, E), v (N, n, D).

    xw takes the place of phi(k) in the pairs (`exp` features).
    """
    anchor = [m + w for m, w in zip(M0, anchor)] if M0 else anchor
    pairs = memory.gradients(rule.memory, rule.loss, anchor, xk, v, rule.norm)
    return [(xw if xw is not None and i < memory.firsts(rule.memory) else x, d) for i, (x, d) in enumerate(pairs)]


def write(x, d, by):
    """sum_i by[r, i] x_i^T d_i for each row of by (N, r, n): x (N, n, in), d (N, n, out) -> r matrices (N, in, out)."""
    return torch.bmm(x.mT, (by.mT[..., None] * d[:, :, None]).flatten(2)).chunk(by.shape[1], -1)


def learn(rule, closes, part, M0, W, S, anchor):
    """A chunk, or a part of one, learns without Newton-Schulz -> its last W_t and S_t (Eq 16, 39), and its pairs.

    anchor: [] if the chunk begins here, at W. closes: it ends here, so W is bounded.
    """
    xk, xw, v, by, ends = part                                # by and ends: what mixing returns
    pairs, (keepprod, *more) = gradients(rule, M0, anchor or W, xk, v, xw), ends.split(1, -2)
    new = [write(x, d, by) for x, d in pairs]
    W = [torch.addcmul(add[0], keepprod, w) for add, w in zip(new, W)]
    if S:
        u, momprod = more
        W = [torch.addcmul(w, u, s) for w, s in zip(W, S)]
        S = [torch.addcmul(add[1], momprod, s) for add, s in zip(new, S)]
    return rule.bound(W) if closes else W, S, pairs


def muon_learn(rule, closes, part, M0, W, S, anchor, U):
    """The same with Newton-Schulz -> W, S; U of the last block; O of each block that ends here."""
    xk, v, by, first, coef = part                             # by, first and coef: what muon_mixing returns
    n, done = v.shape[1], coef.shape[-1] - 1
    new = [write(x, d, by[..., :n]) for x, d in gradients(rule, M0, anchor or W, xk, v)]  # of each matrix, a block
    if S:                                                                        # Eq 33
        new = [[torch.addcmul(a, by[:, r, n:, None], s) for r, a in enumerate(group)] for group, s in zip(new, S)]
        S, new = [group[-1] for group in new], [group[:-1] for group in new]
    if U:
        new = [[torch.addcmul(group[0], first, u), *group[1:]] for group, u in zip(new, U)]
    O, U = [[] for _ in W], [group[-1] for group in new]
    if done:                                                  # the outer gradient goes through it (choice 14)
        O = newton_schulz([torch.cat(group[:done]) for group in new], rule.ns_steps, rule.ns_coefficients)       # Eq 40
        O = [o.chunk(done) for o in O]
    keepprod, *C = coef[:, -1:].split(1, -1)
    W = [keepprod * w for w in W]
    for j, c in enumerate(C):                                                    # Eq 32
        W = [torch.addcmul(w, c, o[j]) for w, o in zip(W, O)]
    return rule.bound(W) if closes else W, S, U, O


def read(rule, xq, M0, held, coef, PQK=None, P=None, pairs=None):
    """What all tokens read, each at its own W_t, layer by layer: phi(q) (M, c, E) of M chunks, or blocks -> (M, c, D).

        r_t M0 + keepprod_t (r_t W_0) + u_t (r_t S_0) + ((P o R X^T) D)_t

    held: of each matrix W_0 and S_0, or W_0 and O_1, O_2, .., (M, in, out). coef: their coefficients, (M, c, 1) each.
    PQK: P o phi(q) phi(k)^T.
    """
    def of_matrix(i, rows):
        W, long = list(held[i]), M0 and rows.is_contiguous()
        if M0 and not long:                                   # monomials lie as columns (poly.py): read them once
            W += [M0[i][:, None].expand(-1, len(rows) // len(M0[i]), -1, -1).flatten(0, 1)]
        reads = torch.bmm(rows, torch.cat(W, -1) if len(W) > 1 else W[0]).chunk(len(W), -1)
        y = reads[-1] if M0 else 0
        if long:                                              # all chunks of a sequence share M0: a long product
            y = torch.bmm(rows.view(len(M0[i]), -1, rows.shape[2]), M0[i]).view(*rows.shape[:2], -1)
        for c, r in zip(coef, reads):
            y = torch.addcmul(y, c, r) if M0 or c is not coef[0] else c * r
        if pairs:
            x, d = pairs[i]
            y = torch.baddbmm(y, PQK if i < memory.firsts(rule.memory) else P * torch.bmm(rows, x.mT), d)
        return y
    return memory.through(rule.memory, xq, of_matrix)


def each(*tensors):
    """(N, chunks, ..) each -> for each chunk, one of each; None for None."""
    return zip(*(repeat(None) if a is None else a.unbind(1) for a in tensors))


def by_matrix(runs):
    """Of each chunk, of each matrix a tuple of tensors (N, ..) -> of each matrix the tuple, (N chunks, ..) each."""
    stacked = lambda group: None if group[0] is None else torch.stack(group, 1).flatten(0, 1)
    return [[stacked(group) for group in zip(*tuples)] for tuples in zip(*runs)]


def plain_run(rule, closes, part, gates, M0, anchor, W, S, U, due, *_):
    """Chunks without Newton-Schulz, `part` as in `run` -> z (N, tokens, D), W and S after them; no U, `due` is 0."""
    (xq, xk, xw, v, qk), flat, held, learned = part, lambda a: a.flatten(0, 1), [], []
    P, coef, by, ends = mixing(gates)
    for chunk in each(xk, xw, v, by, ends):
        held.append([*zip(W, S)] if S else [*zip(W)])
        W, S, pairs = learn(rule, closes, chunk, M0, W, S, anchor)
        learned.append([(None if i < memory.firsts(rule.memory) else x, d) for i, (x, d) in enumerate(pairs)])
    coef, pairs = [flat(a) for a in coef], by_matrix(learned)
    z = read(rule, flat(xq), M0, by_matrix(held), coef, flat(P * qk), flat(P), pairs)
    return z.unflatten(0, xq.shape[:2]).flatten(1, 2), W, S, [], due


def muon_run(rule, closes, part, gates, M0, anchor, W, S, U, due, begun):
    """The same with Newton-Schulz. `begun` tokens of the first block came before; then the run is of one chunk."""
    (xq, xk, _, v, _), held = part, []
    by, first, coef, due = muon_mixing(gates, rule.muon_every, begun, closes, due)
    for chunk in each(xk, v, by, first, coef):
        before = W
        W, S, last, O = muon_learn(rule, closes, chunk, M0, W, S, anchor, U)
        held.append([(w, *o) for w, o in zip(before, O)])
    z = read(rule, xq.flatten(0, 1), M0, by_matrix(held), coef.flatten(0, 1).split(1, -1))
    z = z.unflatten(0, xq.shape[:2]).flatten(1, 2)
    if closes or not (begun + xq.shape[2]) % rule.muon_every:                    # the next block begins from 0
        return z, W, S, [torch.zeros_like(u) for u in last], torch.zeros_like(due[:, -1])
    return z, W, S, last, due[:, -1]


def compile_chunks(**options):
    """torch.compile of the functions of the chunk form, for this process. The rest stays eager."""
    # one variant for each shape, rule and part of a chunk
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for f in (features, mixing, muon_mixing, learn, muon_learn, read):
        if not hasattr(f, "_torchdynamo_orig_callable"):
            globals()[f.__name__] = torch.compile(f, dynamic=False, **options)


# ---- from tokens to chunks and back

AT_ONCE = 12_000_000  # numbers of phi(q) in a run: the memory that a long text takes


def omega(rule, phi, q, k, v, gates, state):
    """The rule, chunk-parallel (Eq 16, 39, 40): as `omega_ref`, for any T, with `exp` features, too."""
    E = phi.out_dim if phi.kind != "exp" else phi.dim + state.keys.shape[2] + q.shape[2]
    at_once = max(1, AT_ONCE // max(1, q.shape[:2].numel() * E * rule.chunk))
    runs, ys = cuts(q.shape[2], state.pos, rule.chunk, at_once), []
    lengths = [c * count for c, count in runs]
    parts = (repeat(None) if a is None else a.split(lengths, 2) for a in (q, k, v, *gates))
    for (c, count), q, k, v, *gates in zip(runs, *parts):
        y, state = run(rule, phi, c, count, q, k, v, Gates(*gates), state)
        ys.append(y)
    return torch.cat(ys, 2) if len(ys) > 1 else ys[0], state


def cuts(T, pos, chunk, at_once):
    """T tokens, the first one `pos` tokens into a chunk, as runs of `count` times c tokens: [(c, count), ..].

    First the rest of a chunk in progress; then whole chunks, at most `at_once`; then a chunk begun.
    """
    runs = []
    while T:
        c, count = (min(T, chunk - pos), 1) if pos or T < chunk else (chunk, min(T // chunk, at_once))
        runs.append((c, count))
        T, pos = T - c * count, (pos + c * count) % chunk
    return runs


def run(rule, phi, c, count, q, k, v, gates, state):
    """`count` chunks of c tokens, or c tokens of a chunk: q, k, v (B, H, count c, D) -> y (B, H, count c, D), state."""
    B, H, pos, M0 = *q.shape[:2], (state.pos + c) % rule.chunk, state.M0
    group = lambda name: [a.expand(B, *a.shape[-3:]).flatten(0, 1) for a in getattr(state, name)]  # -> (N, in, out)
    tokens = lambda a: a.flatten(0, 1).unflatten(1, (count, c))                  # (B, H, T, ..) -> (N, count, c, ..)
    ks, vs, gate, past = with_past(rule, state, k, v, gates.gate)
    n = c + ks.shape[2] - k.shape[2]
    pairs = lambda a: windows(a.flatten(0, 1), count, c, n)                      # -> (N, count, n, ..)
    gates = Gates(*(None if a is None else tokens(a) for a in (*gates[:3], gate)))
    cq, ck, cv = tokens(q), pairs(ks), pairs(memory.target(rule.memory, rule.loss, ks, vs))
    if phi.kind == "exp":
        state, xq, xk, xw = write_keys(rule, state, q, k, ks)
        xq, xk, xw, qk = tokens(xq), pairs(xk), pairs(xw), phi.inner(cq, ck)
    else:
        xq, xk, xw, qk = features(rule, phi, cq, ck)
    part = xq, xk, xw, cv, qk
    begun = state.pos % rule.muon_every if rule.muon_every else 0
    z, *fast, due = (muon_run if rule.muon_every else plain_run)(
        rule, not pos, part, gates, group("M0"), group("anchor") if state.pos else [], group("W"), group("S"),
        group("U") if begun else [], state.due.view(-1, 1, 1, 1), begun)
    W, S, U = (tuple(a.unflatten(0, (B, H)) for a in matrices) for matrices in fast)
    y = memory.output(rule.memory, z.unflatten(0, (B, H)), q, rule.norm)
    return y, State(M0, W, S, state.anchor if pos else W, U, due.view(B, H), *past, state.keys, pos)


def with_past(rule, state, k, v, gate):
    """k, v behind the pairs before them, gate for all of these, and the k, v to keep.

    Missing pairs are zeros of weight 0: those before a text begins, and `idle` ones, for a number of columns that is a
    multiple of 8 makes faster products.
    """
    idle, T = -(rule.window - 1) % 8, k.shape[2]
    missing = idle + rule.window - 1 - state.k.shape[2]
    ks, vs = (torch.cat([F.pad(old, (0, 0, missing, 0)), new], 2) for old, new in ((state.k, k), (state.v, v)))
    gate = F.pad(gate, (idle, 0))
    if missing > idle:
        seen = torch.arange(T, device=k.device)[:, None] + torch.arange(gate.shape[-1], device=k.device)
        gate = gate * (seen >= missing)
    return ks, vs, gate, [a[:, :, max(T + idle, missing):].clone() for a in (ks, vs)]            # a view would hold all


def windows(a, count, c, n):
    """Stretches of n rows, one begins every c: (N, (count - 1) c + n, ..) -> (N, count, n, ..), as unfold, but fast."""
    if count == 1:
        return a[:, None]
    more = -(-n // c)
    a = F.pad(a, (0, 0, 0, (count + more - 1) * c - a.shape[1])).unflatten(1, (-1, c))
    return torch.cat([a[:, i: i + count, : n - i * c] for i in range(more)], 2)


# ---- shards (TNT, arXiv 2511.07343, Eq 5 - 7; not in ATLAS): local memories that need not wait for each other

class Shards(NamedTuple):
    """What `shards` carries from token to token."""
    M0: tuple                             # where every local memory starts, matrices (H, in, out)
    whole: State                          # of the global memory
    local: State | None                   # of the shard in progress, if one is
    kk: torch.Tensor                      # (B, H, D, D) the sum of k k^T since the shard's first token
    pos: int                              # its tokens so far


def global_rule(rule, size, gates):
    """That of the global memory: a chunk is a shard, with one Newton-Schulz. So step changes in proportion."""
    whole = rule._replace(chunk=size, muon_every=size if rule.muon_every else 0)
    return whole, gates._replace(step=gates.step * (rule.chunk / size))


def projected(kq):
    """The queries of a local memory: sum_s k_s (k_s . q), as long as a key, for it knows nothing but these keys."""
    return F.normalize(kq, dim=-1, eps=1e-6)


def shards_ref(size, rule, phi, q, k, v, gates, state):
    """Token by token: a global memory V reads and writes all tokens, W those of a shard, of `size` tokens, from M0 on.

        y_t = M(phi(q_t); V_t) + M(phi(q'_t); W_t),   q'_t ~ sum of k_s k_s^T q_t, over s <= t of the shard

    Without Newton-Schulz V is read after it has written (choice 3). TNT reads it as it was before the shard.
    """
    ys, (M0, whole, local, kk, pos) = [], state
    for q, k, v, *gate in zip(*(repeat(None) if a is None else a.split(1, 2) for a in (q, k, v, *gates))):
        if not pos:
            local, kk = start(rule, phi, M0, len(q), gates.momentum is not None), torch.zeros_like(kk)
        kk, pos, (slow, few) = kk + k.mT @ k, (pos + 1) % size, global_rule(rule, size, Gates(*gate))
        y, whole = omega_ref(slow, phi, q, k, v, few, whole)
        z, local = omega_ref(rule, phi, projected(q @ kk), k, v, Gates(*gate), local)
        ys.append(y + z)
    return torch.cat(ys, 2), Shards(M0, whole, local if pos else None, kk if pos else torch.zeros_like(kk), pos)


def shards(size, rule, phi, q, k, v, gates, state):
    """The same, all shards side by side: they are sequences of a batch."""
    M0, whole, local, kk, pos = state
    slow, few = global_rule(rule, size, gates)
    y, whole = omega(slow, phi, q, k, v, few, whole)
    ys, B, runs = [], len(q), cuts(q.shape[2], pos, size, q.shape[2])
    parts = (repeat(None) if a is None else a.split([c * n for c, n in runs], 2) for a in (q, k, v, *gates))
    for (c, n), *part in zip(runs, *parts):                   # (B, H, n c, ..) -> (n B, H, c, ..)
        q, k, v, *gate = (a if a is None else a.unflatten(2, (n, c)).movedim(2, 0).flatten(0, 1) for a in part)
        if not pos:
            local, kk = start(rule, phi, M0, n * B, gates.momentum is not None), torch.zeros_like(kk[:1])
        kq = (q @ k.mT).tril() @ k + q @ kk
        z, local = omega(rule, phi, projected(kq), k, v, Gates(*gate), local)
        ys.append(z.unflatten(0, (n, B)).movedim(0, 2).flatten(2, 3))
        kk, pos = kk + k.mT @ k, (pos + c) % size
        if not pos:
            local, kk = None, kk.new_zeros(B, *kk.shape[1:])
    return y + torch.cat(ys, 2), Shards(M0, whole, local, kk, pos)


# ---- `exp` features: phi* is infinite (Eq 22), but a memory is a sum of phi*(k_i)^T d_i, and here their coefficients

def write_keys(rule, state, q, k, ks):
    """The first matrix gets a row for every key of the text, after D rows for the degree-1 part, where M0 lives.

    Reading multiplies by [r, exp(r . k_1), ..] (Eq 23). Writing pair i adds to its row: x_i is one-hot (choice 19).
    """
    keys, firsts = torch.cat([state.keys, k], 2), memory.firsts(rule.memory)
    width = q.shape[-1] + keys.shape[2]
    rows = [width] * firsts + [w.shape[-2] for w in state.W[firsts:]]
    matrices = {name: grown(getattr(state, name), rows) for name in ("M0", "W", "S", "anchor")}
    hot = F.pad(torch.eye(ks.shape[2], dtype=q.dtype, device=q.device), (width - ks.shape[2], 0))    # missing: all zero
    state = state._replace(keys=keys, **matrices)
    return state, kernel_rows(q, keys), kernel_rows(ks, keys), hot.expand(*k.shape[:2], *hot.shape)


def kernel_rows(r, keys):
    """[r, exp(r . k_1), exp(r . k_2), ..]: what multiplies the coefficients of an `exp` memory."""
    return torch.cat([r, (r @ keys.mT).exp()], -1)


def grown(W, rows):
    """Matrices with as many rows as given, the new ones zero."""
    return tuple(F.pad(w, (0, 0, 0, n - w.shape[-2])) if n > w.shape[-2] else w for w, n in zip(W, rows))
