"""omega.py - how the memory learns at test time: the Omega rule, decay, momentum and Newton-Schulz (ATLAS sections 3-5).

For every weight matrix W of the memory (ATLAS Eq 9, 16, 32, 33; their signs and misprints: README, choices 3 - 6, 12):

    g_t = sum over i in (t - window, t] of gate[t, i] * grad_W l(M(phi(k_i)), v_i)   at the anchor, W at the last chunk boundary
    S_t = momentum_t * S_{t-1} + g_t
    W_t = keep_t * W_{t-1} - step_t * NS(S_t)                       NS for ATLAS only, else the identity
    y_t = M(phi(q_t); W_t)                                          read after write

keep leads back to zero, as printed, or with forget = "start" to M0: the same rule for W - M0 (choice 21).
chunk = 1 is the sequential rule (Eq 15), chunk > 1 is what the paper trains (Eq 16): all tokens of a chunk take their gradients
at the anchor, including the window tokens from before the chunk. muon_every = m > 1 takes NS once for each block of
m tokens of a chunk, of the sum of the S_t of the block before it; m = 1 is the paper (Eq 40), of its own S_t (choice 15).

`omega_ref` is this text, token by token, with gradients by autograd. `omega_chunk` is the same function as a handful of matrix
products a chunk: at a fixed anchor a token's gradient is x^T d, so

    W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i        P = -A diag(step) Theta Gate,  u = -A diag(step) momprod         Eq 16, 39
    r_t W_t = keepprod * (R W_0) + u * (R S_0) + (P o (R X^T)) D    for all rows r_t at once: attention with P for a softmax (+ R M0, choice 21)

with

    A[t, s], Theta[t, s]      products of keep, of momentum, over tokens s + 1 .. t
    keepprod_t, momprod_t     the same from the chunk's first token to t
    W_0, S_0                  one matrix and its momentum before the chunk (W[0] is the first matrix of a memory, M0 where a text began)
    r_t, x_i, d_i             rows of R, X and D (in this formula alone not the head dim); o multiplies elementwise
    Gate[t, i]                weighs pair i in step t; the tensor `gate` has it at [t, window - 1 - (t - i)]

(The paper's letters are others: its u_i in Eq 34 - 38 is x_i^T d_i here, its beta_t momprod_t, its G the gradients themselves. u here, and G below,
are numbers that multiply them.)

No per-token weight is formed. With Newton-Schulz there are two matrices a block of m tokens: W_j, the W before it, and O_j, the NS of the sum
over the block before it (m = 1: of its own S_t). So r_t W_t = since_t (r_t W_j) + own_t (r_t O_j), two products for a whole block: since_t is the
product of keep from the block's first token to t, own_t minus the sum of the block's steps, each faded up to t. Where m = 1 and
there is no momentum S_t is a sum of `window` pairs x^T d, and so is its NS: attention again, if the window is short (`pairs_chunk`).

P for c = 3, window = 2, no momentum, and a pair 0 from before the chunk (k, s, g for keep, step, gate): each row is the one above times
keep_t, plus step_t times its row of Gate. So pair 2, written at token 2 and once more at token 3, has faded once by then:

                  pair 0        pair 1                   pair 2                   pair 3
    -P = token 1  s1 g[1,0]     s1 g[1,1]                0                        0
         token 2  k2 s1 g[1,0]  k2 s1 g[1,1] + s2 g[2,1] s2 g[2,2]                0
         token 3  k3 k2 ..      k3 (the one above)       k3 s2 g[2,2] + s3 g[3,2] s3 g[3,3]

`omega` is that again, faster and for any length, a long text in pieces: all that depends on the gates alone (`mixing`) and the way from tokens
to chunks and back are here, the products, with their gradient written out, in chunks.py; but those of few pairs (`by_pairs`) are here.
N stands for B H, c for the tokens of a chunk, n for the pairs they learn from.

From long to short: a text is read in pieces (`pieces`: memory), a piece in up to three runs of equal chunks (`cuts`: the rest of a chunk in
progress, whole chunks, a chunk begun), a run in stretches of chunks (chunks.stretches: cache); a chunk has blocks of m tokens (Newton-Schulz),
or, compiled for a GPU, tiles (`tile`).
"""
import sys
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import chunks
import memory
from memory import once_differentiable
from muon import exact_products, few_steps, least_square, newton_schulz_of_pairs, newton_schulz_ref


class Rule(NamedTuple):
    """What is learned and how: the four choices of MIRAS (memory, loss, retention through the gates, algorithm).

    The defaults are Titans as printed; models.Config, whose defaults are those of ATLAS, makes a Rule of its own (`Config.rule`).
    """
    memory: str = "mlp"
    loss: str = "l2"
    window: int = 1
    chunk: int = 64
    muon_every: int = 0                                       # 0: no Newton-Schulz; 1 is the paper (choice 15)
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    straight_through: bool = False
    ns_dtype: torch.dtype | None = None                       # of Newton-Schulz inside; None: as the fast weights
    forget: str = "zero"                                      # what keep < 1 leads back to: zero as printed, or M0 ("start")  (choice 21)
    norm: bool = False                                        # divide what the last matrix of mlp and gated produces by its RMS  (choice 11)
    ball: float = 0.0                                         # largest norm of a matrix of W at a chunk boundary; 0: none  (choice 22)
    ns_gram: bool = True                                      # Newton-Schulz on Gram matrices, where that pays and products are exact
    dtype: torch.dtype | None = None                          # of the products of `omega` and what they multiply: bfloat16 (or float16)

    def ns_args(self):
        """How muon.py is to take Newton-Schulz: its arguments after the matrices."""
        return self.ns_steps, self.ns_coefficients, self.straight_through, self.ns_dtype

    def bound(self, W):
        """W, with matrices of a norm above `ball` scaled back to it: a chunk's one big step may overshoot, but cannot run away. (`exp`
        features: the norm of the coefficients.)

        The outer gradient takes the factor for a constant.
        """
        if not self.ball:
            return W
        norms = (torch.linalg.vector_norm(w.detach(), dim=(-2, -1), keepdim=True) for w in W)
        return tuple(w * (self.ball / n.clamp_min(self.ball)) for w, n in zip(W, norms))


class Gates(NamedTuple):
    """The data-dependent numbers of the rule, produced by the outer network; see the table in memory.py."""
    keep: torch.Tensor                                        # (B, H, T) in (0, 1]; the gradient's rounding grows as 1 / keep (`decay`); at 0 a part is missing (`log`)
    step: torch.Tensor                                        # (B, H, T)
    momentum: torch.Tensor | None                             # (B, H, T) in (0, 1); at 0 a part of its gradient is missing (`log`); None: no momentum
    gate: torch.Tensor                                        # (B, H, T, window); [..., -1] weighs the token itself


class State(NamedTuple):
    """All that the rule carries from token t to t + 1, of bounded size (but for `exp` features, which keep all keys)."""
    M0: tuple                                                 # matrices (H, in, out) that W is counted from; () for zero
    W: tuple                                                  # W_t (less M0: `total` adds it), matrices (B, H, in, out)
    S: tuple                                                  # S_t, or () without momentum
    anchor: tuple                                             # W at the last chunk boundary
    O: tuple                                                  # NS of the block in progress, or () between blocks
    sums: tuple                                               # sum of the S_t since NS was last taken, or (): none yet, or muon_every <= 1
    k: torch.Tensor                                           # (B, H, min(t, window - 1), D), the pairs a window looks back on
    v: torch.Tensor
    keys: torch.Tensor | None                                 # (B, H, t, D) all keys so far, for `exp` features only
    pos: int                                                  # tokens since the chunk boundary, t mod chunk
    zero: bool = False                                        # by `start` alone: W and S are all zero, and products with them are skipped


def start(rule, phi, M0, batch, momentum=True):
    """The state before the first token: W = M0 for every sequence, S = 0 (choice 10). M0: matrices (H, in, out)."""
    W = tuple(w.expand(batch, *w.shape) for w in M0)
    base = tuple(M0) if rule.forget == "start" else ()        # choice 21
    W = tuple(torch.zeros_like(w) if base else w.clone() for w in W)             # its own: an optimizer changes M0 in place
    S = tuple(torch.zeros_like(w) for w in W) if momentum else ()
    none = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)
    return State(base, W, S, W, (), (), none, none, none if phi.kind == "exp" else None, 0, bool(base))


def total(state):
    """The weights the memory computes with now."""
    M0 = grown(state.M0, [w.shape[-2] for w in state.W])
    return tuple(a + b for a, b in zip(M0, state.W)) if M0 else state.W


def check_momentum(gates, state):
    """ValueError for a state and gates of which one has momentum."""
    if bool(state.S) != (gates.momentum is not None):
        raise ValueError(f"a state {'with' if state.S else 'without'} momentum does not go with gates {'without' if state.S else 'with'} it")


def grown(W, rows):
    """Matrices with as many rows as given, the new ones zero: with `exp` features the first have one for every key (write_keys)."""
    return tuple(F.pad(w, (0, 0, 0, n - w.shape[-2])) if n > w.shape[-2] else w for w, n in zip(W, rows))


# ---------------------------------------------------------------------------------------------------------------------------
# The definition.

def omega_ref(rule, phi, q, k, v, gates, state):
    """The rule of the module docstring, token by token; the gradient is autograd of the printed loss.

    q, k, v (B, H, T >= 1, D), gates and state as in their classes -> y (B, H, T, D), state. Slow: for reading and for tests.
    ValueError for `exp` features, of which no phi(x) can be written out, and for a state and gates of which one has momentum.
    """
    check_momentum(gates, state)
    pos, held = state.pos, state.k.shape[2]                   # tokens from before these

    def one(M0, before, xq, q, xs, ks, vs, gates):
        """One sequence, one head: phi(q) (T, E), q (T, D); of the `held` tokens and these phi(k) (held + T, E), k, v (held + T, D)."""
        (W, S, anchor, O, sums), (keep, step, momentum, gate) = before, gates

        def window_loss(W, pairs, weights):
            return sum(w * memory.loss(rule.loss, M(W, xs[i], ks[i]), vs[i]) for w, i in zip(weights, pairs))

        def M(W, x, r):
            W = tuple(a + b for a, b in zip(M0, W)) if M0 else W                 # choice 21: W is counted from M0
            return memory.apply(rule.memory, W, x, r, rule.norm)

        def NS(S):
            return newton_schulz_ref(S, *rule.ns_args())

        ys = []
        for t in range(len(q)):
            if (pos + t) % rule.chunk == 0:
                anchor = W                                                       # Eq 16; Eq 15 where a chunk is a token
            pairs = range(max(0, held + t - rule.window + 1), held + t + 1)      # this token and the window - 1 before it
            g = grad(window_loss)(anchor, pairs, gate[t, rule.window - len(pairs):])             # Eq 9
            S = tuple(momentum[t] * s + d for s, d in zip(S, g)) if len(momentum) else g         # Eq 33
            if rule.muon_every <= 1:
                O = tuple(map(NS, S)) if rule.muon_every else S                  # Eq 40
            else:                                                                # choice 15
                if (pos + t) % rule.chunk % rule.muon_every == 0:                # a block begins: NS of the one before it, if there is one
                    O = tuple(map(NS, sums)) if sums else tuple(0 * w for w in W)
                    sums = ()
                sums = tuple(a + s for a, s in zip(sums, S)) if sums else S
            W = tuple(keep[t] * w - step[t] * o for w, o in zip(W, O))           # Eq 32, choices 4, 5 and 21
            ys.append(M(W, xq[t], q[t]))                                         # choice 3: read after write
            if (pos + t + 1) % rule.chunk == 0:
                W = rule.bound(W)                                                # choice 22
        return torch.stack(ys), W, S if len(momentum) else (), anchor, O, sums

    gates = tuple(() if g is None else g for g in gates)
    M0 = tuple(m.expand(len(q), *m.shape) for m in state.M0)
    ks, vs = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
    before = state.W, state.S, state.anchor, state.O, state.sums
    y, W, S, anchor, O, sums = vmap(vmap(one))(M0, before, phi(q), q, phi(ks), ks, vs, gates)
    pos = (pos + q.shape[2]) % rule.chunk
    O = O if rule.muon_every and pos % rule.muon_every else ()
    first = max(0, held + q.shape[2] - rule.window + 1)
    return y, State(state.M0, W, S, anchor if pos else W, O, sums, ks[:, :, first:], vs[:, :, first:], None, pos)


# ---------------------------------------------------------------------------------------------------------------------------
# The chunk-parallel form, as its formulas.

def log(gate):
    """log of a gate in [0, 1]; 0 counts as the smallest number, so that no -inf enters a difference of logs, and gets no gradient through it."""
    return gate.clamp_min(torch.finfo(gate.dtype).tiny).log()


def decay(logs):
    """log factors (..., c) -> prod factors_{1..t} (..., c, 1), lower triangle of prod factors_{s+1..t} (..., c, c)."""
    logs, c = logs.cumsum(-1)[..., None], logs.shape[-1]
    above = torch.full((c, c), -torch.inf, dtype=logs.dtype, device=logs.device).triu(1)
    return logs.exp(), (logs - logs.mT + above).exp()         # masked before exp, not after: no 0 * inf in backward


def band(gate):
    """The window mask of section 3.3, weighted: (..., c, w) -> (..., c, w - 1 + c) with row t holding gate[t] from column t on."""
    *lead, c, w = gate.shape
    return F.pad(gate, (0, c)).flatten(-2)[..., : c * (w - 1 + c)].view(*lead, c, w - 1 + c)


def omega_chunk(rule, phi, q, k, v, gates, state):
    """The same rule as a few matrix products a chunk: for reading, and for whoever writes a kernel. `omega` is the same, faster.

    Arguments, returns and errors of `omega_ref`, which reads the parts of chunks before and after whole ones; the gradient is autograd's.
    """
    check_momentum(gates, state)
    if state.pos or q.shape[2] % rule.chunk:
        return with_parts(rule, phi, q, k, v, gates, state)
    B, T, c, w, m = len(q), q.shape[2], rule.chunk, rule.window, rule.muon_every
    missing = w - 1 - state.k.shape[2]                        # the first tokens of a sequence have a shorter window; choice 12
    gate = gates.gate * (torch.arange(T)[:, None] + torch.arange(w) >= missing).to(q.device)
    ks, vs = (torch.cat([F.pad(old, (0, 0, missing, 0)), new], 2) for old, new in ((state.k, k), (state.v, v)))
    xq, xk, targets = phi(q), phi(ks), memory.target(rule.memory, rule.loss, ks, vs)             # v, less the residual k of Eq 42, 43
    momentum = torch.zeros_like(gates.keep) if gates.momentum is None else gates.momentum        # none is one of 0
    heads = lambda a: a.expand(B, *a.shape[-3:]).flatten(0, 1)                   # (B, H, ..) or (H, ..) -> (N, ..)
    W, zeros = [heads(a) for a in state.W], [heads(torch.zeros_like(a)) for a in state.W]
    M0, S, sums = ([heads(a) for a in group] or zeros for group in (state.M0, state.S, state.sums))
    zs = []                                                   # what the last matrix produces
    for first in range(0, T, c):
        now, seen = slice(first, first + c), slice(first, first + c + w - 1)     # c tokens learn from n = c + w - 1 pairs
        keep, step, mom = (heads(a[:, :, now, None]) for a in (gates.keep, gates.step, momentum))                  # (N, c, 1)
        Gate, cxq = heads(gate[:, :, now]), heads(xq[:, :, now])                 # (N, c, window), phi(q) (N, c, E)
        anchor = memory.pack([a + b for a, b in zip(M0, W)])
        pairs, _ = memory.gradients(rule.memory, rule.loss, anchor, heads(xk[:, :, seen]), heads(targets[:, :, seen]), rule.norm)
        pairs = memory.unpacked_pairs(rule.memory, pairs)     # x_i (N, n, in), d_i (N, n, out) of each matrix; all at the anchor, Eq 16

        momprod, Theta = decay(log(mom[..., 0]))              # Eq 33, 39: S_t = momprod_t S_0 + sum_i G[t, i] x_i^T d_i
        G = Theta @ band(Gate)                                # (N, c, n); Eq 9 weighs pair i in step t by band(Gate)[t, i]

        def written(a, g):                                    # a S_0 + sum_i g_i x_i^T d_i of each matrix, for a (N, 1, 1) and g (N, n)
            return [a * s + x.mT @ (g[..., None] * d) for s, (x, d) in zip(S, pairs)]

        if not m:
            keepprod, A = decay(log(keep[..., 0]))            # Eq 10, 12 by Eq 16: W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i
            P, u = -(A * step.mT) @ G, -(A * step.mT) @ momprod                  # (N, c, n), (N, c, 1)

            def read(i, rows):                                # all r_t W_t of the i-th matrix at once: attention, with P for a softmax
                x, d = pairs[i]
                return rows @ M0[i] + keepprod * (rows @ W[i]) + u * (rows @ S[i]) + (P * (rows @ x.mT)) @ d

            zs.append(through_layers(rule.memory, cxq, read))
            W = [keepprod[:, -1:] * a + b for a, b in zip(W, written(u[:, -1:], P[:, -1]))]
        else:
            for j in range(0, c, m):                          # blocks of m tokens with one O each
                block, before = slice(j, j + m), sums
                sums = written(momprod[:, block].sum(1, keepdim=True), G[:, block].sum(1))        # S_t, summed over the block
                O = [newton_schulz_ref(a, *rule.ns_args()) for a in (sums if m == 1 else before)]           # Eq 40; choice 15
                since, A = decay(log(keep[:, block, 0]))      # Eq 32: W_t = since_t W_j + own_t O_j, from W_j before the block on
                own = -A @ step[:, block]                     # (N, m, 1), as `since`, the product of keep from the block's first token to t

                def read(i, rows):                            # r_t W_t of the i-th matrix
                    return rows @ M0[i] + since * (rows @ W[i]) + own * (rows @ O[i])

                zs.append(through_layers(rule.memory, cxq[:, block], read))
                W = [since[:, -1:] * a + own[:, -1:] * o for a, o in zip(W, O)]
        S, W = written(momprod[:, -1:], G[:, -1]), rule.bound(W)                 # choice 22

    groups = [torch.cat(zs, 1)], W, S if state.S else [], sums if m > 1 else []
    (z,), W, S, sums = (tuple(a.unflatten(0, (B, -1)) for a in group) for group in groups)
    k, v = (tail(a, max(T, missing), T) for a in (ks, vs))
    return memory.output(rule.memory, z, q, rule.norm), State(state.M0, W, S, W, (), sums, k, v, None, 0)


def with_parts(rule, phi, q, k, v, gates, state):
    """`omega_chunk` of whole chunks, `omega_ref` of the rest of a chunk before them and of one begun after them."""
    parts, ys = cuts(q.shape[2], state.pos, rule.chunk), []
    split = (repeat(None) if a is None else a.split([length * count for length, count in parts], 2) for a in (q, k, v, *gates))
    for (length, _), q, k, v, *gates in zip(parts, *split):
        y, state = (omega_chunk if length == rule.chunk else omega_ref)(rule, phi, q, k, v, Gates(*gates), state)
        ys.append(y)
    return torch.cat(ys, 2), state


def through_layers(kind, x, read):
    """What the last matrix of a memory produces, layer by layer as in memory.apply: read(i, rows) is what rows read of the i-th matrix."""
    if kind != "linear":                                      # Eq 42, 43
        x = memory.hidden(kind, torch.cat([read(i, x) for i in range(memory.firsts(kind))], -1))
    return read(-1, x)


def write_keys(rule, state, q, k, ks):
    """`exp` features (Eq 22): phi* is infinite, but a memory only ever holds sums of phi*(k_i)^T d_i, so it is its coefficients.

    The first matrix gets one row for every key of the sequence, after D rows for the degree-1 part, where M0 lives (choice 19). Reading
    multiplies by [r, exp(r . k_1), exp(r . k_2), ..] (Eq 23), writing token i adds to its row alone: x_i^T d_i with a one-hot x_i.
    """
    keys = torch.cat([state.keys, k], 2)
    width, (*_, last) = q.shape[-1] + keys.shape[2], state.W
    rows = [width] * memory.firsts(rule.memory) + [last.shape[-2]]
    state = state._replace(keys=keys, **{name: grown(getattr(state, name), rows) for name in ("M0", "W", "S", "anchor")})
    hot = torch.eye(ks.shape[2], dtype=q.dtype, device=q.device)
    hot = F.pad(hot, (width - ks.shape[2], 0))                # the last columns belong to the last keys; missing ones write nothing
    return state, kernel_rows(q, keys), kernel_rows(ks, keys), hot.expand(*k.shape[:2], *hot.shape)


def kernel_rows(r, keys):
    """[r, exp(r . k_1), exp(r . k_2), ..]: what multiplies the coefficients of an `exp` memory (Eq 23)."""
    return torch.cat([r, (r @ keys.mT).exp()], -1)


# ---------------------------------------------------------------------------------------------------------------------------
# The chunk-parallel form, fast.

def cumprod(factors):
    """factors (..., c) -> prod factors_{1..t} (..., c, 1)."""
    return log(factors).cumsum(-1).exp()[..., None]


class Recurrence(torch.autograd.Function):
    """y_t = factors_t * y_{t-1} + rows_t from y_0 = rows_0 on: factors (..., c), rows (..., c, k) -> y (..., c, k), its last row (..., k).

    The gradient runs through the same recurrence, from the last row to the first.
    """

    @staticmethod
    def forward(ctx, factors, rows):
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        by, give, take = (a.unbind(-2) for a in (factors[..., None], rows, y))
        take[0].copy_(give[0])
        for t in range(1, len(by)):
            torch.addcmul(give[t], by[t], take[t - 1], out=take[t])
        ctx.save_for_backward(factors, y)
        return y, y[..., -1, :].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dlast):
        factors, y = ctx.saved_tensors
        drows = torch.empty_like(y)
        by, give, take = (a.unbind(-2) for a in (factors[..., None], dy, drows))
        torch.add(give[-1], dlast, out=take[-1])
        for t in range(len(by) - 1, 0, -1):
            torch.addcmul(give[t - 1], by[t], take[t], out=take[t - 1])
        return F.pad((drows[..., 1:, :] * y[..., :-1, :]).sum(-1), (1, 0)), drows


TILE = dict(cuda=16)                                          # tokens that a compiled recurrence takes in one product; by count 8 to 32 move as much


def tile(like, c):
    """The tokens of a tile, where a chunk of c is to be run tile by tile (compiled, for a GPU); else 0."""
    b = TILE.get(like.device.type, 0) if torch.compiler.is_compiling() else 0
    return b if b and c > b and c % b == 0 else 0


def recur(factors, rows):
    """Recurrence, or the product that is the same: P_t = keep_t P_{t-1} - step_t G_t, or P = -A (diag(step) G).

    The product has c times as much to compute. A GPU prefers it to c short steps; on a CPU they take a third of its time. Compiled for a GPU it is
    of a tile of tokens, after each of which y goes on with the product of its factors. One row is itself.
    """
    c = rows.shape[-2]
    if c == 1:
        return rows, rows[..., 0, :]
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        return Recurrence.apply(factors, rows)
    b = tile(rows, c)
    if b:
        factors = factors.unflatten(-1, (-1, b))
        (y, y_last), kept = recur(factors, rows.unflatten(-2, (-1, b))), cumprod(factors)
        after, last = recur(kept[..., -1, 0], y_last)
        return (y + kept * F.pad(after[..., :-1, :], (0, 0, 1, 0))[..., None, :]).flatten(-3, -2), last
    y = decay(log(factors))[1] @ rows
    return y, y[..., -1, :].clone()                           # a view would be taken, and its gradient added, outside of a compiled `mixing`


def mixing(rule, gates, pos, few=False):
    """What depends on the gates alone, for chunks whose gates are (..., c) and (..., c, window): a dict of fields of chunks.Part.

    With Newton-Schulz their first token is the pos-th of its block; `few`: for pairs_run, where each token adds one matrix.
    """
    if rule.muon_every and not few:
        return muon_mixing(gates, rule.muon_every, pos)
    if few:
        gates = gates._replace(gate=torch.ones_like(gates.gate[..., :1]))
    b = tile(gates.keep, gates.keep.shape[-1])
    mix = tiled_mixing(gates, b) if b else plain_mixing(gates)
    return mix | dict(P=memory.cast(mix["P"], rule.dtype))


def plain_mixing(gates):
    """The rule itself, run on what multiplies W_0, S_0 and each x_i^T d_i instead of on matrices.

        G_t = momentum_t * G_{t-1} + Gate_t,   momprod_t            S_t = momprod_t S_0 + sum_i G[t, i] x_i^T d_i         Eq 33, 39
        P_t = keep_t * P_{t-1} - step_t * G_t,   keepprod_t, u_t    W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i           Eq 16

    u_t runs as P_t, with momprod_t in the place of G_t.
    """
    keepprod, minus_step = cumprod(gates.keep), -gates.step[..., None]
    if gates.momentum is None:                                # S_t is g_t: G is Gate, and there is no S_0
        P, P_last = recur(gates.keep, band(minus_step * gates.gate))
        return dict(coef=keepprod[..., None], P=P, last=P_last[..., None, None], ends=keepprod[..., -1:, :, None])
    momprod, (G, G_last) = cumprod(gates.momentum), recur(gates.momentum, band(gates.gate))
    (P, P_last), (u, u_last) = (recur(gates.keep, minus_step * a) for a in (G, momprod))
    coef, last = torch.stack([keepprod, u], -2), torch.stack([P_last, G_last], -1)[..., None]
    ends = torch.cat([a[..., -1:, :] for a in (keepprod, momprod)], -2)[..., None]
    return dict(coef=coef, P=P, last=last, ends=ends, across=u_last[..., None])


def tiled_mixing(gates, b):
    """plain_mixing for a compiler: the chunk is run as tiles of b tokens, which follow each other as chunks do.

        G_t = momprod_t G_0 + the tile's own,   P_t = keepprod_t P_0 + u_t G_0 + the tile's own           for token t of a tile, the 0-th before it

    Here rows of G and P have columns for W_0 and S_0, too, behind those of the pairs. All of P is then written once, number by number; by products
    of all c tokens its two recurrences go through c x c numbers seven times, and keep them.
    """
    (c, w), by_tile = gates.gate.shape[-2:], (-1, b)
    keep, step, momentum = (None if g is None else g.unflatten(-1, by_tile) for g in gates[:3])
    mix, n, tiles = plain_mixing(Gates(keep, step, momentum, gates.gate.unflatten(-2, by_tile))), c + w - 1, c // b
    coef, last, ends = mix["coef"][..., 0], mix["last"][..., 0], mix["ends"][..., 0, 0]                # (.., tiles, b or b + w - 1, s), (.., tiles, s)
    s = ends.shape[-1]

    def spread(a):                                            # (.., tiles, b + w - 1) -> (.., tiles, n): a tile's pairs to their columns
        return F.pad(a, (0, c)).flatten(-2)[..., : tiles * n].unflatten(-1, (tiles, n))

    def run(i, more=0):                                       # the row before the first tile and that after each: (.., 1 + tiles, n + s)
        rows = F.pad(spread(last[..., i]), (0, s)) + more
        first = F.pad(torch.eye(s, dtype=rows.dtype, device=rows.device)[i], (n, 0)).expand_as(rows[..., :1, :])
        return recur(F.pad(ends[..., i], (1, 0), value=1.0), torch.cat([first, rows], -2))[0]

    G = [run(1)] if s == 2 else []                            # of S
    runs = [run(0, *(mix["across"][..., 0] * g[..., :-1, :] for g in G)), *G]                          # of W, to which a tile adds u S; and of S
    found = lambda to: sum(coef[..., i: i + 1] * a[..., :-1, None, to] for i, a in enumerate(runs))    # (.., tiles, b, n or s)
    own, after = spread(mix["P"].transpose(-3, -2)).transpose(-3, -2), torch.stack([a[..., -1, :] for a in runs], -1)
    P, coef = (a.flatten(-3, -2) for a in (found(slice(n)) + own, found(slice(n, None))))
    views = dict(last=after[..., :n, :, None], ends=after[..., n:, :].diagonal(dim1=-2, dim2=-1)[..., None, None])
    views |= dict(across=after[..., n + 1:, :1]) if s == 2 else {}
    return dict(P=P, coef=coef[..., None]) | {name: a.clone() for name, a in views.items()}            # as in recur


def muon_mixing(gates, m, pos):
    """The same where Newton-Schulz stands between S and W, so that only what is before it, and what is after it, can be mixed.

    Before: G and momprod, summed over the tokens of each block, for that sum is what it sees; with momentum one row more, of the last S_t.
    After, in a block whose O is fixed: W_t = since_t W_j + own_t O_j with since_t = keep_t since_{t-1}, own_t = keep_t own_{t-1} - step_t
    from 1 and 0 before the block (Eq 32); and from block to block `shares`.
    """
    c, like = gates.keep.shape[-1], dict(dtype=gates.gate.dtype, device=gates.gate.device)
    blocks, fill = -(-(pos + c) // m), chunks.padding(pos, c, m)
    momprod, block = None, torch.arange(pos, pos + c, device=gates.gate.device) // m
    rows = torch.eye(blocks, **like)[block]                   # (c, blocks): 1 where t is in block j
    if gates.momentum is not None:                            # Eq 39: sums over those t of Theta[t, s], R_s = rows_s + momentum_{s+1} R_{s+1}
        rows = torch.cat([rows, torch.eye(c, **like)[:, -1:]], -1).expand(*gates.momentum.shape, -1)
        after = gates.momentum.roll(-1, -1)                   # momentum_{s+1} at s; of the last token, where R begins, recur uses none
        rows = recur(after.flip(-1), rows.flip(-2))[0].flip(-2)
        momprod = gates.momentum[..., :1, None] * rows[..., :1, :].mT
    if c == 1:                                                # G = R^T Gate
        G = rows.mT * gates.gate
    else:                                                     # one diagonal of Gate at a time, for R has few columns
        diagonals = enumerate(gates.gate.unbind(-1))
        G = sum(F.pad(rows.mT * g[..., None, :], (j, gates.gate.shape[-1] - 1 - j)) for j, g in diagonals)
    # tokens that fill up a block keep all (keep 1) and write nothing (step 0)
    keep, minus_step = (F.pad(a, fill, value=x).unflatten(-1, (blocks, -1)) for a, x in ((gates.keep, 1.0), (-gates.step, 0.0)))
    own, own_last = recur(keep, minus_step[..., None])
    kept, A = decay(log(keep).sum(-1))
    shares = torch.cat([kept, A * own_last.mT], -1)
    return dict(coef=torch.stack([cumprod(keep), own], -2), shares=shares, G=G, momprod=momprod)


def features(rule, phi, x):
    """phi(x), in the precision of products; a function, to be compiled by itself."""
    return memory.cast(phi(x), rule.dtype)


def omega(rule, phi, q, k, v, gates, state):
    """The rule of the module docstring, chunk-parallel; arguments and returns of `omega_ref`, any length, any state.

    With a `rule.dtype` all products of tokens and pairs, and what the gradient needs of them, are in that precision. W, S, M0, the products of
    gates, Newton-Schulz with what it sees, and sums over chunks are not.
    ValueError for `exp` features with Newton-Schulz: the memory is known by its coefficients alone, the weights it would see are infinite;
    for a state and gates of which one has momentum; and for a rule.dtype other than bfloat16 and float16, or fast weights not in float32 beside it.
    """
    if phi.kind == "exp" and rule.muon_every:
        raise ValueError("exp features have no finite weights for Newton-Schulz; take muon_every = 0")
    check_momentum(gates, state)
    if rule.dtype and not (rule.dtype in (torch.bfloat16, torch.float16) and state.W[0].dtype == torch.float32):
        raise ValueError(f"rule.dtype is bfloat16 or float16, beside fast weights in float32; not {rule.dtype} beside {state.W[0].dtype}")
    T, wide = q.shape[2], phi.out_dim                         # E, the numbers phi makes of a token in one head
    if phi.kind == "exp" and not chunks.Chunks.compiled:      # and one for each key (write_keys); compiled, each piece would be another shape
        wide += state.keys.shape[2] + T
    lengths = pieces(T, state.pos, rule.chunk, q.shape[:2].numel() * wide, q.device)
    with memory.autocast(q.device, rule.dtype):
        if len(lengths) == 1:
            return chunked(rule, phi, q, k, v, gates, state)
        ys = []
        for q, k, v, *gates in zip(*(repeat(None) if a is None else a.split(lengths, 2) for a in (q, k, v, *gates))):
            y, state = chunked(rule, phi, q, k, v, Gates(*gates), state)
            ys.append(y)
    return torch.cat(ys, 2), state


PIECE = dict(cpu=12_000_000, cuda=2**28)                      # numbers of phi(q); measured on a CPU, a guess for a GPU


def pieces(T, pos, chunk, numbers, device):
    """T tokens, the first `pos` tokens into a chunk, as the lengths of pieces that end with a chunk, each read after the one before it.

    phi(q) is N E `numbers` a token, at most PIECE for a piece of several chunks. With phi(k) and the gradients of both that is two fifths of what
    a long text takes (omeganet's); but the gradients of one piece make room for the next one's. `exp` features are spared up to half of their
    products, too: a piece has no columns for keys that come after it.
    """
    size = max(1, PIECE.get(device.type, PIECE["cpu"]) // max(1, numbers * chunk))
    size = chunk * chunks.even(-(-(pos + T) // chunk), size)
    ends = [*range(size - pos, T, size), T]
    return [end - start for start, end in zip([0, *ends], ends)]


def cuts(T, pos, chunk):
    """T tokens, the first `pos` tokens into a chunk, as runs of (length, count): count stretches of `length` tokens each."""
    head = min(T, -pos % chunk)
    whole, rest = divmod(T - head, chunk)
    return [(n, c) for n, c in ((head, 1), (chunk, whole), (rest, 1)) if n * c]


def chunked(rule, phi, q, k, v, gates, state):
    """omega of one piece: its tokens become chunks.Part, of which pairs_run, chunks.muon_run or chunks.plain_run compute what is read."""
    few, low = by_pairs(rule, gates, state), lambda a: memory.cast(a, rule.dtype)
    idle = 0 if few else -(rule.window - 1) % 8               # products with a multiple of 8 columns are faster (a chunk by 3 - 7 %)
    w = rule.window + idle
    ks, vs, gate, state = with_past(state, low(k), low(v), gates.gate, idle)
    gates = gates._replace(gate=gate)
    targets, xw, M0 = memory.target(rule.memory, rule.loss, ks, vs), None, state.M0
    if phi.kind == "exp":
        state, *rows = write_keys(rule, state, q, k, ks)
        xq, xk, xw = map(low, rows)

    ys, t = [], 0
    for length, count in cuts(q.shape[2], state.pos, rule.chunk):                # the rest of a chunk in progress; whole chunks; a chunk begun
        now, seen = slice(t, t + length * count), slice(t, t + length * count + w - 1)
        tokens = lambda a: by_chunk(a[:, :, now].unflatten(2, (count, length)))                   # (chunks, N, c, ..)
        pairs = lambda a: by_chunk(Overlapping.apply(a[:, :, seen], length, length + w - 1))     # (chunks, N, n, ..)
        cq, ck, cv = tokens(low(q)), pairs(ks), pairs(targets)
        cxq, cxk = (features(rule, phi, cq), features(rule, phi, ck)) if xw is None else (tokens(xq), pairs(xk))
        qk = low(phi.inner(cq, ck)) if phi.kind in ("monomial", "exp") and (few or not rule.muon_every) else None
        cgates = Gates(*(g if g is None else tokens(g) for g in gates))
        with chunks.exact(rule, q.device):                    # not in `mixing`: compiled, its gradient takes products in the autocast outside of it
            mix = mixing(rule, cgates, state.pos % max(1, rule.muon_every), few)
        parts = chunks.Part(cxq, cxk, cv, None if xw is None else pairs(xw), qk, **mix)
        if few:
            z, state = pairs_run(rule, state, parts, cgates.gate, len(q))
        elif rule.muon_every:
            z, state = chunks.muon_run(rule, state, parts, len(q))
        else:
            z, state = chunks.plain_run(rule, state, parts, len(q))
        z = z.unflatten(1, (len(q), -1)).movedim(0, 2).flatten(2, 3)                              # (B, H, T, D)
        ys.append(memory.cast(memory.output(rule.memory, z, q[:, :, now], rule.norm), q.dtype))
        t = now.stop
    return torch.cat(ys, 2) if ys else torch.zeros_like(v), state._replace(M0=M0)                # the parameters, not what has grown


def with_past(state, k, v, gate, idle):
    """k, v (B, H, T, D) behind the w - 1 pairs before them, w = idle + window; `gate` (B, H, T, w) for all of them; the state with the last pairs.

    What is not there is zeros of weight 0: `idle` pairs, and those of a window that would begin before the text (choice 12).
    """
    T, w = k.shape[2], idle + gate.shape[-1]
    missing = w - 1 - state.k.shape[2]
    gate = F.pad(gate, (idle, 0))
    if missing > idle:
        pair = torch.arange(T, device=k.device)[:, None] + torch.arange(w, device=k.device)
        gate = gate * (pair >= missing)
    ks, vs = (torch.cat([F.pad(memory.cast(old, new.dtype), (0, 0, missing, 0)), new], 2) for old, new in ((state.k, k), (state.v, v)))
    last = lambda a: memory.cast(tail(a, max(T + idle, missing), T), state.k.dtype)
    return ks, vs, gate, state._replace(k=last(ks), v=last(vs))


def by_pairs(rule, gates, state):
    """Is Newton-Schulz for every token, of sums of so few pairs that pairs_run is faster, and as exact?"""
    if rule.muon_every != 1 or gates.momentum is not None or rule.dtype or rule.ns_dtype or rule.straight_through:
        return False
    few = few_steps(rule.ns_steps, rule.ns_coefficients) and 2 * rule.window**2 <= min(min(w.shape[-2:]) for w in state.W) ** 2
    return few and rule.ns_gram and exact_products(gates.keep.device) and gates.keep.device.type != "mps"      # which has no float64


def pairs_run(rule, state, parts, gate, B):
    """Newton-Schulz for every token, without momentum (Eq 40 with S_t = g_t; choice 15): arguments and returns of chunks.plain_run, and gate (chunks, N, c,
    window). S_t is a sum of `window` pairs, and so is its Newton-Schulz (newton_schulz_of_pairs): no S_t and no O_t is formed. (Its gradient is to be
    taken outside of an autocast, as usual.)
    """
    heads = lambda group: [a.expand(B, *a.shape[-3:]).flatten(0, 1) for a in group]             # (B, H, ..) or (H, ..) -> (N, ..)
    (count, _, c, _), zs = parts.xq.shape, []
    W, M0, anchor = heads(state.W), heads(state.M0), heads(state.anchor if state.pos else ())
    for part, g in zip(parts.split(), gate):
        z, W = pairs_chunk(rule, part, g, M0, W, anchor or W)
        zs.append(z)
        if (state.pos + c) % rule.chunk == 0:
            W = rule.bound(W)                                 # choice 22
    return torch.stack(zs), chunks.advance(rule, state, tuple(w.unflatten(0, (B, -1)) for w in W), (), count * c)


def pairs_chunk(rule, part, gate, M0, W, anchor):
    """One chunk of pairs_run -> what is read of the last matrix (N, c, D), W after it. The gradient is autograd's.

        O_t = NS(sum over j of gate[t, j] x_{t+j}^T d_{t+j}) = sum over j of x_{t+j}^T KD[t, j]         Eq 40 of Eq 9: pairs t .. t + window - 1
        W_t = keepprod_t W_0 + sum over s of P[t, s] O_s,   P = -A diag(step) (N, c, c)                 Eq 32
        r_t W_t = r_t (keepprod_t W_0 + M0) + sum over s, j of P[t, s] (r_t . x_{s+j}) KD[s, j]         attention once more

    gate (N, c, window): gate[t, j] here weighs pair t + j, which is token t + j - (window - 1) of the chunk. M0 (or empty, for zero), W before the
    chunk and anchor: of each matrix (N, in, out).
    """
    kind, w = rule.memory, gate.shape[-1]
    windows = lambda a: Overlapping.apply(a[:, None], 1, w)[:, 0]                # (N, n, ..) -> (N, c, w, ..)
    at = memory.pack([m + a for m, a in zip(M0, anchor)] if M0 else anchor)
    pairs, _ = memory.gradients(kind, rule.loss, at, part.xk, part.v, rule.norm)                 # Eq 16: all at the anchor
    xs, ds = zip(*memory.unpacked_pairs(kind, pairs))
    KD = []                                                   # of each matrix (N, c, window, out)
    for x, d in zip(xs, ds):                                  # in float64: pairs may cancel
        xx = x.double()
        gram, D = DiagonalBlocks.apply(xx @ xx.mT, w), gate[..., None].double() * windows(d)
        least = least_square(x.dtype, x.shape[-1] * d.shape[-1])
        kd = newton_schulz_of_pairs(gram.flatten(0, 1), D.flatten(0, 1), least, rule.ns_steps, rule.ns_coefficients)
        KD.append(kd.view(D.shape).to(x.dtype))

    def read(i, rows):
        dots = part.qk if part.qk is not None and rows is part.xq else rows @ xs[i].mT           # (N, c, n)
        weights = part.P.mT[:, :, None] * windows(dots.mT)                                       # (N, c of s, w, c of t)
        y = part.coef[..., 0] * (rows @ W[i]) + weights.flatten(1, 2).mT @ KD[i].flatten(1, 2)
        return y + rows @ M0[i] if M0 else y

    z = through_layers(kind, part.xq, read)
    by_pair = lambda a: sum(F.pad(row, (0, 0, j, w - 1 - j)) for j, row in enumerate(a.unbind(2)))             # (N, c, w, ..) -> (N, n, ..)
    return z, [part.ends[..., 0] * a + x.mT @ by_pair(part.last * kd) for a, x, kd in zip(W, xs, KD)]


class DiagonalBlocks(torch.autograd.Function):
    """The w x w blocks along the diagonal of G (N, n, n) -> (N, c, w, w), n = c + w - 1: of X X^T, that of every window of w rows."""

    @staticmethod
    def forward(ctx, G, w):
        N, n, _ = G.shape
        return G.contiguous().as_strided((N, n - w + 1, w, w), (n * n, n + 1, n, 1)).clone()

    @staticmethod
    def backward(ctx, d):
        N, c, w, _ = d.shape
        dG = d.new_zeros(N, c + w - 1, c + w - 1)
        for j, row in enumerate(d.unbind(2)):
            dG[:, j: j + c] += band(row)
        return dG, None


def tail(a, first, T):
    """a[:, :, first:], for the state after T more tokens: a copy, for a view would hold (and torch.save) all tokens of a prompt. After one
    token a view holds little else.
    """
    return a[:, :, first:].clone() if first and T > 1 else a[:, :, first:]


def by_chunk(a):
    """(B, H, chunks, ..) -> (chunks, N, ..)"""
    return a.movedim(2, 0).flatten(1, 2)


class Overlapping(torch.autograd.Function):
    """Stretches of n tokens, one begins every `length` tokens: (B, H, T, D) -> (B, H, count, n, D). unfold, whose own gradient is slow."""

    @staticmethod
    def forward(ctx, a, length, n):
        ctx.length = length
        return a.unfold(2, n, length).transpose(-1, -2)

    @staticmethod
    def backward(ctx, g):
        (B, H, count, n, D), (first, *parts) = g.shape, g.split(ctx.length, 3)   # part i belongs to the i-th stretch of `length` from here on
        da = torch.cat([first, g.new_zeros(B, H, len(parts), ctx.length, D)], 2)
        for i, part in enumerate(parts, 1):
            da[:, :, i: i + count, : part.shape[3]] += part
        return da.flatten(2, 3)[:, :, : (count - 1) * ctx.length + n], None, None


# ---------------------------------------------------------------------------------------------------------------------------
# torch.compile.

# models.py adds what a block does with all tokens at once, and the loss
COMPILED = [(sys.modules[__name__], name) for name in ("mixing", "pairs_chunk")] + [(chunks, name) for name in (
    "learn_chunk", "learn_chunk_backward", "write_rest_backward", "read_chunks", "read_chunks_backward",
    "muon_learn", "muon_learn_backward", "muon_read", "muon_stretch_backward")]

# For a GPU, twice inductor's limits of what it computes again rather than writes and reads: a convolution of four taps reads eight tensors. On a CPU
# that is no faster, and its C++ (torch 2.13) can write past the end of a tensor of two numbers a row.
AGAIN = dict(realize_reads_threshold=8, realize_opcount_threshold=60)


def compiler(device, options):
    """What torch.compile is told beside its `options`: every shape by itself, for they are few, and inductor (torch 2.13) gets the strides of some
    gradients wrong that are to fit all lengths; and on CUDA AGAIN, but not where they name another compiler or how it is to go about it."""
    options = dict(dynamic=False) | options
    if device != "cuda" or options.keys() & {"backend", "mode", "options"}:
        return options
    return options | dict(options={name: n for name, n in AGAIN.items() if name in torch._inductor.list_options()})


def compile_chunks(device=None, **options):
    """torch.compile the loop's body once for all chunks and layers, as all of COMPILED: compiling the loop itself would unroll it, and take
    minutes. device: "cuda" or "cpu", where it is to run [that of a GPU, if there is one]. `options` are torch.compile's.

    Where a recurrence has no tiles (TILE), `mixing` stays eager: a compiled one would be a product of c times the work (`recur`).
    """
    chunks.Chunks.compiled = True
    chunks.compile_every_shape()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = compiler(device, options)
    for module, name in COMPILED:
        if name == "mixing" and device not in TILE:
            continue
        f = getattr(module, name)
        setattr(module, name, torch.compile(getattr(f, "_torchdynamo_orig_callable", f), **options))
