"""omega.py - how the memory learns at test time: the Omega rule, decay, momentum and Newton-Schulz (ATLAS sections 3-5).

For every weight matrix W of the memory (ATLAS Eq 9, 16, 32, 33; their signs and misprints: README, choices 3 - 6):

    g_t = sum over i in (t - window, t] of gate[t, i] * grad_W l(M(phi(k_i)), v_i)   at the anchor, W at the last chunk boundary
    S_t = momentum_t * S_{t-1} + g_t
    W_t = keep_t * W_{t-1} - step_t * NS(S_t)                       NS for ATLAS only, else the identity
    y_t = M(phi(q_t); W_t)                                          read after write

keep leads back to zero, as printed, or with forget = "start" to M0: the same rule for W - M0 (choice 21).
chunk = 1 is the sequential rule (Eq 15), chunk > 1 is what the paper trains (Eq 16): all tokens of a chunk take their gradients
at the anchor, including the window tokens from before the chunk. muon_every = m refreshes NS at every m-th token of a chunk and
uses it for m tokens; m = 1 is the paper (Eq 40).

`omega_ref` is this text, token by token, with gradients by autograd. `omega` is the same function as a handful of matrix
products a chunk: at a fixed anchor a token's gradient is x^T d, so

    W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i        P = -A diag(step) Theta Gate,  u = -A diag(step) momprod
    r_t W_t = keepprod * (R W_0) + u * (R S_0) + (P o (R X^T)) D    for all rows r_t at once: attention with P for a softmax

with A[t, n] = prod keep_{n+1..t} and Theta[t, n] = prod momentum_{n+1..t}. No per-token weight is formed. With Newton-Schulz
the S_t at the start of each m-token block is formed, and r_t W_t is two products with that block's weights.
"""
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
    chunk: int = 64
    muon_every: int = 0                                       # 0: no Newton-Schulz; 1 is the paper (choice 15)
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    straight_through: bool = False
    ns_dtype: torch.dtype | None = None                       # of Newton-Schulz inside; None: as the fast weights
    forget: str = "zero"                                      # what keep < 1 leads back to: zero as printed, or M0 ("start")  (choice 21)
    norm: bool = False                                        # a layer norm inside the memory, for mlp and gated
    ball: float = 0.0                                         # largest norm of a matrix of W at a chunk boundary; 0: none  (choice 22)

    @property
    def newton_schulz(self):
        """The arguments of Newton-Schulz."""
        return self.ns_steps, self.ns_coefficients, self.straight_through, self.ns_dtype

    def bound(self, W):
        """W, with matrices of a norm above `ball` scaled back to it: a chunk's one big step may overshoot, but cannot run away.

        The outer gradient takes the factor for a constant.
        """
        if not self.ball:
            return W
        norms = (torch.linalg.vector_norm(w.detach(), dim=(-2, -1), keepdim=True) for w in W)
        return tuple(w * (self.ball / n.clamp_min(self.ball)) for w, n in zip(W, norms))


class Gates(NamedTuple):
    """The data-dependent numbers of the rule, produced by the outer network; see the table in memory.py."""
    keep: torch.Tensor                                        # (B, H, T) in (0, 1]
    step: torch.Tensor                                        # (B, H, T)
    momentum: torch.Tensor | None                             # (B, H, T) in [0, 1); None for none
    gate: torch.Tensor                                        # (B, H, T, window); [..., -1] weighs the token itself


class State(NamedTuple):
    """All that the rule carries from token t to t + 1, the same size for every t (but for `exp` features, which keep all keys)."""
    M0: tuple                                                 # matrices (H, in, out) that W is counted from; () for zero
    W: tuple                                                  # W_t (less M0), matrices (B, H, in, out)
    S: tuple                                                  # S_t, or () without momentum
    anchor: tuple                                             # W at the last chunk boundary
    O: tuple                                                  # NS of the block in progress, or () between blocks
    k: torch.Tensor                                           # (B, H, min(t, window - 1), D), the pairs a window looks back on
    v: torch.Tensor
    keys: torch.Tensor | None                                 # (B, H, t, D) all keys so far, for `exp` features only
    pos: int                                                  # tokens since the chunk boundary, t mod chunk
    zero: bool = False                                        # W (counted from M0) and S are still zero: products with them are skipped


def start(rule, phi, M0, batch, S0=None, momentum=True):
    """The state before the first token: W = M0 for every sequence, S = 0 (choice 10). M0: matrices (H, in, out)."""
    W = tuple(w.expand(batch, *w.shape) for w in M0)
    base = tuple(M0) if rule.forget == "start" else ()
    W = tuple(torch.zeros_like(w) for w in W) if base else W
    S = () if not momentum else S0 or tuple(torch.zeros_like(w) for w in W)
    none = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)
    return State(base, W, S, W, (), none, none, none if phi.kind == "exp" else None, 0, bool(base) and S0 is None)


def total(state):
    """The weights the memory computes with now."""
    return tuple(a + b for a, b in zip(state.M0, state.W)) if state.M0 else state.W


def anchor(state):
    """The weights it computed with at the last chunk boundary."""
    return state.M0 if state.zero else total(state._replace(W=state.anchor))


# ---------------------------------------------------------------------------------------------------------------------------
# The definition.

def omega_ref(rule, phi, q, k, v, gates, state):
    """The rule of the module docstring, token by token; the gradient is autograd of the printed loss.

    q, k, v (B, H, T, D), gates and state as in their classes -> y (B, H, T, D), state. Slow: for reading and for tests.
    """
    pos, n = state.pos, state.k.shape[2]

    def one(M0, W, S, anchor, O, xq, q, xs, ks, vs, keep, step, momentum, gate):     # one sequence, one head
        def window_loss(W, i, weights):
            return sum(w * memory.loss(rule.loss, M(W, xs[j], ks[j]), vs[j]) for w, j in zip(weights, i))

        def M(W, x, r):
            W = tuple(a + b for a, b in zip(M0, W)) if M0 else W
            return memory.apply(rule.memory, lambda i, rows: rows @ W[i], x, r, rule.norm)

        ys = []
        for t in range(len(q)):
            if (pos + t) % rule.chunk == 0:
                anchor = W
            i = range(max(0, n + t - rule.window + 1), n + t + 1)                # this token and the window - 1 before it
            g = grad(window_loss)(anchor, i, gate[t, rule.window - len(i):])
            S = tuple(momentum[t] * s + g for s, g in zip(S, g)) if len(momentum) else g         # Eq 33
            if rule.muon_every == 0:
                O = S
            elif (pos + t) % rule.chunk % rule.muon_every == 0:
                O = tuple(newton_schulz_ref(s, *rule.newton_schulz) for s in S)  # Eq 40
            W = tuple(keep[t] * w - step[t] * o for w, o in zip(W, O))           # Eq 32, choices 4 and 5
            ys.append(M(W, xq[t], q[t]))                                         # choice 3: read after write
            if (pos + t + 1) % rule.chunk == 0:
                W = rule.bound(W)
        return torch.stack(ys), W, S if len(momentum) else (), anchor, O

    gates = (() if g is None else g for g in gates)
    M0 = tuple(m.expand(len(q), *m.shape) for m in state.M0)
    ks, vs = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
    y, W, S, anchor, O = vmap(vmap(one))(M0, state.W, state.S, state.anchor, state.O, phi(q), q, phi(ks), ks, vs, *gates)
    pos = (pos + q.shape[2]) % rule.chunk
    O = O if rule.muon_every and pos % rule.muon_every else ()
    first = max(0, n + q.shape[2] - rule.window + 1)
    return y, State(state.M0, W, S, anchor if pos else W, O, ks[:, :, first:], vs[:, :, first:], None, pos)


# ---------------------------------------------------------------------------------------------------------------------------
# The chunk-parallel form.

class Tokens(NamedTuple):
    """One chunk of c tokens to read at and of n pairs to learn from: its c, the window - 1 before them, idle ones of weight 0."""
    q: torch.Tensor                                           # (B, H, c, D)
    xq: torch.Tensor                                          # (B, H, c, E)  phi(q)
    k: torch.Tensor                                           # (B, H, n, D)
    xk: torch.Tensor                                          # (B, H, n, E)  phi(k)
    v: torch.Tensor                                           # (B, H, n, D)
    base: torch.Tensor | None                                 # (B, H, c, F)  phi(q) M0, if W is counted from M0
    write: torch.Tensor | None                                # (B, H, n, E)  what x_i^T d_i is made of, if not phi(k)


class Mixing(NamedTuple):
    """Everything in the formulas above that depends on the gates alone, for one chunk of c tokens and n pairs (as in Tokens)."""
    # without Newton-Schulz     W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i,   S_t = momprod_t S_0 + sum_i G[t, i] x_i^T d_i
    keepprod: torch.Tensor | None = None                      # (..., c, 1)  keep_1 .. keep_t
    u: torch.Tensor | None = None                             # (..., c, 1)  -A diag(step) momprod
    P: torch.Tensor | None = None                             # (..., c, n)  -A diag(step) G
    scores: torch.Tensor | None = None                        # (..., c, n)  P o (phi(q) phi(k)^T)
    last: torch.Tensor | None = None                          # (..., n, 2)  the last rows of P and G; of P alone without momentum
    end: torch.Tensor | None = None                           # (..., 3, 1)  the last of keepprod, u, momprod; of keepprod alone
    # with Newton-Schulz, in blocks of m tokens (or one block of c <= m)     W_t = since_t W_j + own_t O_j     W_j before block j, W_0 the first
    G: torch.Tensor | None = None                             # (..., r, n)  Theta Gate   } at the tokens at which it is refreshed,
    momprod: torch.Tensor | None = None                       # (..., r, 1)               } and the last
    since: torch.Tensor | None = None                         # (..., blocks, m, 1)  keep from the block's first token to t
    own: torch.Tensor | None = None                           # (..., blocks, m, 1)  -sum of A[t, n] step_n over n <= t in the block
    kept: torch.Tensor | None = None                          # (..., blocks, 1)  }  after block j:
    coef: torch.Tensor | None = None                          # (..., blocks, blocks)  }  W = kept_j W_0 + sum_i coef[j, i] O_i


def log(gate):
    return gate.clamp_min(torch.finfo(gate.dtype).tiny).log()


def products(factors):
    """factors (..., c) -> prod factors_{1..t} (..., c, 1)."""
    return log(factors).cumsum(-1).exp()[..., None]


def decay(logs, rows=slice(None)):
    """log factors (..., c) -> prod factors_{1..t} (..., r, 1), lower triangle of prod factors_{n+1..t} (..., r, c); t in `rows`."""
    logs, c = logs.cumsum(-1), logs.shape[-1]
    last = logs[..., rows, None]
    above = torch.full((c, c), -torch.inf, dtype=logs.dtype, device=logs.device).triu(1)[rows]   # masked before exp, not after:
    return last.exp(), (last - logs[..., None, :] + above).exp()                                 # no 0 * inf in backward


class Recurrence(torch.autograd.Function):
    """y_t = factors_t * y_{t-1} + rows_t from y_0 = rows_0 on: factors (..., c), rows (..., c, k) -> y (..., c, k), its last row (..., k).

    The gradient runs through the same recurrence, from the last row to the first.
    """

    @staticmethod
    def forward(ctx, factors, rows):
        y, by = torch.empty_like(rows, memory_format=torch.contiguous_format), factors[..., None]
        y[..., 0, :] = rows[..., 0, :]
        for t in range(1, rows.shape[-2]):
            torch.addcmul(rows[..., t, :], by[..., t, :], y[..., t - 1, :], out=y[..., t, :])
        ctx.save_for_backward(factors, y)
        return y, y[..., -1, :].clone()

    @staticmethod
    def backward(ctx, dy, dlast):
        factors, y = ctx.saved_tensors
        drows, by = torch.empty_like(y), factors[..., None]
        torch.add(dy[..., -1, :], dlast, out=drows[..., -1, :])
        for t in range(y.shape[-2] - 1, 0, -1):
            torch.addcmul(dy[..., t - 1, :], by[..., t, :], drows[..., t, :], out=drows[..., t - 1, :])
        return F.pad((drows[..., 1:, :] * y[..., :-1, :]).sum(-1), (1, 0)), drows


def recur(factors, rows):
    """Recurrence, or the one product that is the same: P_t = keep_t P_{t-1} - step_t G_t, or P = -A (diag(step) G).

    The product has c times as much to compute. A GPU prefers it to c short steps; on a CPU they take a third of its time.
    """
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        return Recurrence.apply(factors, rows)
    y = decay(log(factors))[1] @ rows
    return y, y[..., -1, :]


def band(gate):
    """The window mask of section 3.3, weighted: (..., c, w) -> (..., c, w - 1 + c) with row t holding gate[t] from column t on."""
    *lead, c, w = gate.shape
    return F.pad(gate, (0, c)).flatten(-2)[..., : c * (w - 1 + c)].view(*lead, c, w - 1 + c)


def mixing(rule, gates, pos, inner):
    """Mixing of chunks whose gates are (..., c) and (..., c, window); the first of their tokens is the pos-th of its chunk.

    inner: phi(q) phi(k)^T (..., c, n), or None with Newton-Schulz, which has no use for it. Then the r rows of G are the tokens at
    which it is refreshed, and the last.
    """
    c, m = gates.keep.shape[-1], rule.muon_every
    if not m:                                                 # the rule itself, for the coefficients of W_0, S_0 and the pairs
        keepprod, minus_step = products(gates.keep), -gates.step[..., None]
        if gates.momentum is None:
            P, P_last = recur(gates.keep, band(minus_step * gates.gate))
            return Mixing(keepprod, None, P, P * inner, P_last[..., None], keepprod[..., -1:, :])
        momprod, (G, G_last) = products(gates.momentum), recur(gates.momentum, band(gates.gate))      # Eq 33, 39
        (P, P_last), (u, u_last) = (recur(gates.keep, minus_step * a) for a in (G, momprod))
        end = torch.stack([keepprod[..., -1, :], u_last, momprod[..., -1, :]], -2)
        return Mixing(keepprod, u, P, P * inner, torch.stack([P_last, G_last], -1), end)
    rows = refreshed(pos, c, m) + [c - 1]
    if gates.momentum is None:
        momprod, G = None, band(gates.gate)[..., rows, :]
    else:                                                     # Eq 39, Theta Gate: a sum over the w diagonals of Gate, for the rows are few
        momprod, Theta = decay(log(gates.momentum), rows)
        diagonals = enumerate(gates.gate.unbind(-1))
        G = sum(F.pad(Theta * g[..., None, :], (j, gates.gate.shape[-1] - 1 - j)) for j, g in diagonals)
    blocks, fill = -(-(pos % m + c) // m), padding(pos, c, m)                    # tokens that are not there keep all and write nothing
    keep, minus_step = (F.pad(a, fill, value=x).unflatten(-1, (blocks, -1)) for a, x in ((gates.keep, 1.0), (-gates.step, 0.0)))
    own, own_last = recur(keep, minus_step[..., None])
    kept, A = decay(log(keep).sum(-1))
    return Mixing(G=G, momprod=momprod, since=products(keep), own=own, kept=kept, coef=A * own_last.mT)


def refreshed(pos, length, every):
    """The tokens at which Newton-Schulz is refreshed, in a stretch of `length` that begins `pos` tokens into its chunk."""
    return list(range(-pos % every, length, every))


def padding(pos, length, every):
    """How many tokens to fill up the stretch's first block with, and its last; a single block is taken as it is."""
    front, back = pos % every, -(pos + length) % every
    return (front, back) if front + length > every else (0, 0)


class ReadWrite(torch.autograd.Function):
    """What one chunk does to one matrix of the memory, without Newton-Schulz, with its gradient written out:

        z = base + keepprod * (R W) + u * (R S) + Q D,   Q = P o (R X^T)         reads r_t W_t of all t
        W <- keep W + u S + X^T (P_last * D),   S <- mom S + X^T (G_last * D)    the state after the chunk

    with keep, u, mom (the three of `end`), P_last and G_last (the two of `last`) those of the last token. R (N, c, in), W and S (N,
    in, out), X (N, n, in), D (N, n, out), the rest as in Mixing; base is R M0 or None. Q itself may be given (`scores`) in the
    place of P. W is None where both are zero, S where there is no momentum. Autograd of the same lines takes longer (1.1 - 1.4x for
    the rule) and keeps more: it does each product and sum for itself.
    """

    @staticmethod
    def forward(ctx, R, W, S, X, D, base, P, scores, keepprod, u, last, end):
        out = D.shape[-1]
        WS = W if W is None or S is None else torch.cat([W, S], -1)
        RX = None if P is None else R @ X.mT
        Q = scores if P is None else P * RX
        z = Q @ D if base is None else torch.baddbmm(base, Q, D)
        reads = None
        if W is not None:
            reads = memory.product(R, WS)
            z = torch.addcmul(z, keepprod, reads[..., :out])
        new = X.mT @ (last[..., None] * D[..., None, :]).flatten(-2)             # with P_last * D | G_last * D
        W_end, S_end = new[..., :out], new[..., out:]         # S_end is empty without momentum
        if W is not None:
            W_end = torch.addcmul(W_end, end[:, :1], W)
            if S is not None:
                z = torch.addcmul(z, u, reads[..., out:])
                W_end = torch.addcmul(W_end, end[:, 1:2], S)
                S_end = torch.addcmul(S_end, end[:, 2:], S)
        ctx.save_for_backward(R, WS, X, D, P, scores, RX, reads, keepprod, u, last, end)
        ctx.has_base = base is not None
        ctx.set_materialize_grads(False)
        return z, W_end, S_end

    @staticmethod
    def backward(ctx, dz, dW_end, dS_end):
        R, WS, X, D, P, scores, RX, reads, keepprod, u, last, end = ctx.saved_tensors
        Q = scores if P is None else P * RX
        out, dz = D.shape[-1], dz if dz is not None else D.new_zeros(*R.shape[:2], D.shape[-1])
        dQ, dD = dz @ D.mT, Q.mT @ dz
        dR = dW = dS = dX = dkeepprod = du = dlast = dend = dP = None
        if WS is not None:
            dreads = keepprod * dz if u is None else torch.cat([keepprod * dz, u * dz], -1)
            dW, *dS = (R.mT @ dreads).split(out, -1)
            dR = transposed_product(dreads, WS, R)
            dkeepprod, *du = (reads.unflatten(-1, (-1, out)) * dz[..., None, :]).sum(-1).split(1, -1)
            dS, du = (a[0] if a else None for a in (dS, du))
        if dW_end is not None or dS_end is not None:          # else nobody reads the state after this chunk
            dW_end, dS_end = (D.new_zeros(len(D), X.shape[-1], out) if a is None else a for a in (dW_end, dS_end))
            dnew = dW_end if u is None else torch.cat([dW_end, dS_end], -1)
            dD2 = (X @ dnew).unflatten(-1, (-1, out))         # (N, n, 2, out)
            dlast = (dD2 * D[..., None, :]).sum(-1)
            dD = dD + (dD2 * last[..., None]).sum(-2)
            dX = transposed_product((last[..., None] * D[..., None, :]).flatten(-2), dnew, X)
            if WS is not None:
                W, S = WS[..., :out], WS[..., out:]
                dW = torch.addcmul(dW, end[:, :1], dW_end)
                dend = [(dW_end * W).sum((-2, -1))]
                if u is not None:
                    dS = torch.addcmul(torch.addcmul(dS, end[:, 1:2], dW_end), end[:, 2:], dS_end)
                    dend += [(dW_end * S).sum((-2, -1)), (dS_end * S).sum((-2, -1))]
                dend = torch.stack(dend, -1)[..., None]
        if P is not None:                                     # Q = P o (R X^T)
            dRX = dQ * P
            dP, dQ = dQ * RX, None
            dR = dRX @ X if dR is None else torch.baddbmm(dR, dRX, X)
            dX = dRX.mT @ R if dX is None else torch.baddbmm(dX, dRX.mT, R)
        return dR, dW, dS, dX, dD, dz if ctx.has_base else None, dP, dQ, dkeepprod, du, dlast, dend


def transposed_product(g, W, x):
    """g W^T, the gradient of x where g is that of x W; it lies in memory as x does."""
    return (W @ g.mT).mT if memory.feature_major(x) else g @ W.mT


def omega(rule, phi, q, k, v, gates, state):
    """The rule of the module docstring, chunk-parallel; arguments and returns of `omega_ref`, any length, any state."""
    T, idle = q.shape[2], -(rule.window - 1) % 8              # idle pairs, of weight 0, in front: products with a multiple of 8
    w = rule.window + idle                                    # columns are faster (a chunk by 3 - 7 %)
    missing = w - 1 - state.k.shape[2]                        # the first tokens of a sequence have a shorter window; choice 12
    gates = gates._replace(gate=F.pad(gates.gate, (idle, 0)))
    if missing:
        i = torch.arange(T, device=q.device)[:, None] + torch.arange(w, device=q.device)
        gates = gates._replace(gate=gates.gate * (i >= missing))
    ks, vs = (torch.cat([F.pad(a, (0, 0, missing, 0)), b], 2) for a, b in ((state.k, k), (state.v, v)))
    state = state._replace(k=ks[:, :, max(T + idle, missing):], v=vs[:, :, max(T + idle, missing):])
    write_xk = None
    if phi.kind == "exp":
        state, xq, xk, write_xk = write_keys(rule, state, q, k, ks)

    ys, t = [], 0
    for length, count in cuts(T, state.pos, rule.chunk):      # the rest of a chunk in progress; whole chunks; a chunk begun
        now, seen = slice(t, t + length * count), slice(t, t + length * count + w - 1)
        fold = lambda a: a[:, :, now].unflatten(2, (count, length))                               # (B, H, N, C, ..)
        look = lambda a: Overlapping.apply(a[:, :, seen], length, length + w - 1)                # (B, H, N, n, ..)
        cq, ck, cv = fold(q), look(ks), look(vs)
        cxq, cxk = (phi(cq), phi(ck)) if write_xk is None else (fold(xq), look(xk))
        base = None
        if state.M0:                                          # the part of the first read that is the same for every W
            base = torch.cat([memory.product(cxq, m[:, None]) for m in state.M0[: firsts(rule)]], -1)
        parts = Tokens(cq, cxq, ck, cxk, cv, base, None if write_xk is None else look(write_xk))
        inner = None if rule.muon_every else phi.inner(cq, ck)
        mix = mixing(rule, Gates(*(g if g is None else fold(g) for g in gates)), state.pos, inner)
        parts, mix = ([a if a is None else chunks(a) for a in group] for group in (parts, mix))
        step_chunk = muon_chunk if rule.muon_every else linear_chunk
        for j in range(count):                                # the only loop: chunk after chunk
            tokens, weights = ([a if a is None else a[j] for a in group] for group in (parts, mix))
            y, state = step_chunk(rule, state, Tokens(*tokens), Mixing(*weights))
            ys.append(y)
        t = now.stop
    return torch.cat(ys, 2), state


class Overlapping(torch.autograd.Function):
    """Stretches of n tokens, one begins every `length` tokens: (B, H, T, D) -> (B, H, N, n, D). unfold, whose own gradient is slow."""

    @staticmethod
    def forward(ctx, a, length, n):
        ctx.length = length
        return a.unfold(2, n, length).transpose(-1, -2)

    @staticmethod
    def backward(ctx, g):
        (B, H, N, n, D), parts = g.shape, g.split(ctx.length, 3)             # part i belongs to the i-th stretch of `length` from here on
        da = g.new_zeros(B, H, N + len(parts) - 1, ctx.length, D)
        for i, part in enumerate(parts):
            da[:, :, i: i + N, : part.shape[3]] += part
        return da.flatten(2, 3)[:, :, : (N - 1) * ctx.length + n], None, None


def compile_chunks(**options):
    """torch.compile the loop's body once for all chunks and layers: compiling the loop itself would unroll it, and take minutes."""
    global mixing, linear_chunk, muon_chunk
    mixing, linear_chunk, muon_chunk = (torch.compile(getattr(f, "_torchdynamo_orig_callable", f), **options)
                                        for f in (mixing, linear_chunk, muon_chunk))


def chunks(a):
    """(B, H, N, n, E) as N tensors (B, H, n, E); its gradient will lie in memory as it does."""
    return [c.mT for c in a.mT.unbind(2)] if memory.feature_major(a) else a.unbind(2)


def cuts(T, pos, chunk):
    """T tokens, the first `pos` tokens into a chunk, as runs of (length, count): count stretches of `length` tokens each."""
    head = min(T, -pos % chunk)
    whole, tail = divmod(T - head, chunk)
    return [(n, c) for n, c in ((head, 1), (chunk, whole), (tail, 1)) if n * c]


def advance(rule, state, W, S, O, length):
    """The state `length` tokens on; at a chunk boundary the anchor moves to W."""
    pos = (state.pos + length) % rule.chunk
    W = W if pos else rule.bound(W)
    return state._replace(W=W, S=S, anchor=state.anchor if pos else W, O=O if pos else (), pos=pos, zero=False)


def firsts(rule):
    """How many matrices of the memory read x itself."""
    return 2 if rule.memory == "gated" else 1


def read_start(state, tokens, i, rows):
    """rows M0[i], or None where W is not counted from M0."""
    if not state.M0:
        return None
    width = state.M0[i].shape[-1]
    return tokens.base[..., i * width: (i + 1) * width] if rows is tokens.xq else rows @ state.M0[i]


def linear_chunk(rule, state, tokens, mix):
    """One chunk (or a part of one) without Newton-Schulz: y (B, H, c, D), and the state after it."""
    q, xq, k, xk, v, _, write = tokens
    pairs = memory.gradients(rule.memory, rule.loss, anchor(state), xk, k, v, rule.norm)         # x_i, d_i of every token
    flat = lambda a: None if a is None else a.flatten(0, 1)                      # (B, H, ..) -> (B H, ..)
    keepprod, u, P, scores, last, end = map(flat, mix[:6])
    W, S = [], []

    def read(i, rows):                                                           # r_t W_t for all t
        a, d = pairs[i]
        old = (None, None) if state.zero else (state.W[i], state.S[i] if state.S else None)
        base = read_start(state, tokens, i, rows)
        if a is xk:
            Q, a = (None, scores), a if write is None else write
        else:
            Q = (P, None)
        z, w, s = ReadWrite.apply(flat(rows), *map(flat, (*old, a, d, base)), *Q, keepprod, u, last, end)
        W.append(w.unflatten(0, q.shape[:2]))
        S.append(s.unflatten(0, q.shape[:2]))
        return z.unflatten(0, q.shape[:2])

    y = memory.apply(rule.memory, read, xq, q, rule.norm)
    return y, advance(rule, state, tuple(W), tuple(S) if state.S else (), (), q.shape[2])


def muon_chunk(rule, state, tokens, mix):
    """One chunk (or a part of one) with Newton-Schulz every `muon_every` tokens: y (B, H, c, D), and the state after it."""
    q, xq, k, xk, v, _, write = tokens
    c, blocks, m = q.shape[2], *mix.since.shape[2:4]
    front, back = padding(state.pos, c, rule.muon_every)
    pairs = memory.gradients(rule.memory, rule.loss, anchor(state), xk, k, v, rule.norm)
    S = []                                                    # of each matrix at the rows of mix.G: (B, H, r, in, out)
    for i, (a, d) in enumerate(pairs):
        a = write if write is not None and a is xk else a
        s = a.mT @ (mix.G.mT[..., None] * d[..., None, :]).flatten(-2)           # all rows in one product
        s = s.unflatten(-1, (-1, d.shape[-1])).transpose(2, 3)
        S.append(torch.addcmul(s, mix.momprod[..., None], state.S[i][:, :, None]) if state.S and not state.zero else s)
    O = tuple(s[:, :, :-1] for s in S)
    if O[0].shape[2]:
        O = newton_schulz(O, *rule.newton_schulz)
    if state.pos % rule.muon_every:                           # a block in progress goes on with the O it has
        O = tuple(torch.cat([old[:, :, None], o], 2) for old, o in zip(state.O, O))
    W, end = [], []                                           # before each block (B, H, blocks, in, out), and after the last
    for w, o in zip(state.W, O):
        after = mix.coef @ o.flatten(-2) if blocks > 1 else mix.coef * o.flatten(-2)
        after = (after if state.zero else after + mix.kept * w.flatten(-2)[:, :, None]).view(o.shape)
        W.append(torch.cat([w[:, :, None], after[:, :, :-1]], 2) if blocks > 1 else w[:, :, None])
        end.append(after[:, :, -1])

    def read(i, rows):
        rows_of = (F.pad(rows, (0, 0, front, back)) if front or back else rows).unflatten(2, (blocks, m))
        if state.zero and blocks == 1:
            z = mix.own * memory.product(rows_of, O[i])
        else:
            z, o = memory.product(rows_of, torch.cat([W[i], O[i]], -1)).chunk(2, -1)
            z = torch.addcmul(mix.since * z, mix.own, o)
        z = z.flatten(2, 3)[:, :, front: front + c]
        start = read_start(state, tokens, i, rows)
        return z if start is None else z + start

    y = memory.apply(rule.memory, read, xq, q, rule.norm)
    S, O = (tuple(a[:, :, -1] for a in group) for group in (S, O))
    return y, advance(rule, state, tuple(end), S if state.S else (), O if (state.pos + c) % rule.muon_every else (), c)


def write_keys(rule, state, q, k, ks):
    """`exp` features (Eq 22): phi* is infinite, but a memory only ever holds sums of phi*(k_i)^T d_i, so it is its coefficients.

    The first matrix gets one row for every key of the sequence, after D rows for the degree-1 part, where M0 lives (choice 19). Reading
    multiplies by [r, exp(r . k_1), exp(r . k_2), ..] (Eq 23), writing token i adds to its row alone: x_i^T d_i with a one-hot x_i.
    """
    keys = torch.cat([state.keys, k], 2)
    grow = lambda W: tuple(F.pad(w, (0, 0, 0, k.shape[2])) if i < firsts(rule) else w for i, w in enumerate(W))
    state = state._replace(W=grow(state.W), S=grow(state.S), anchor=grow(state.anchor), O=grow(state.O), keys=keys)
    if state.M0:                                              # M0 itself has no row for any key
        state = state._replace(M0=grow(state.M0))
    n = q.shape[-1] + keys.shape[2]
    hot = torch.eye(n, dtype=q.dtype, device=q.device)
    hot = F.pad(hot, (0, 0, ks.shape[2], 0))[n:]              # the last rows belong to the last keys; missing ones write nothing
    return state, kernel_rows(q, keys), kernel_rows(ks, keys), hot.expand(*k.shape[:2], *hot.shape)


def kernel_rows(r, keys):
    """[r, exp(r . k_1), exp(r . k_2), ..]: what multiplies the coefficients of an `exp` memory."""
    return torch.cat([r, (r @ keys.mT).exp()], -1)
