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
from muon import newton_schulz


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
    forget: str = "zero"                                      # what keep < 1 leads back to: zero as printed, or M0 ("start")  (choice 21)
    norm: bool = False                                        # a layer norm inside the memory, for mlp and gated
    ball: float = 0.0                                         # largest norm of a matrix of W at a chunk boundary; 0: none  (choice 22)

    def ns(self, S):
        return newton_schulz(S, self.ns_steps, self.ns_coefficients, self.straight_through)


    def bound(self, W):
        """W, with matrices of a norm above `ball` scaled back to it: a chunk's one big step may overshoot, but cannot run away."""
        if not self.ball:
            return W
        norms = (torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True) for w in W)
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


def start(rule, phi, M0, batch, S0=None, momentum=True):
    """The state before the first token: W = M0 for every sequence, S = 0 (choice 10). M0: matrices (H, in, out)."""
    W = tuple(w.expand(batch, *w.shape) for w in M0)
    base = tuple(M0) if rule.forget == "start" else ()
    W = tuple(torch.zeros_like(w) for w in W) if base else W
    S = () if not momentum else S0 or tuple(torch.zeros_like(w) for w in W)
    none = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)
    return State(base, W, S, W, (), none, none, none if phi.kind == "exp" else None, 0)


def total(state):
    """The weights the memory computes with now."""
    return tuple(a + b for a, b in zip(state.M0, state.W)) if state.M0 else state.W


# ---------------------------------------------------------------------------------------------------------------------------
# The definition.

def omega_ref(rule, phi, q, k, v, gates, state):
    """The rule of the module docstring, token by token; the gradient is autograd of the printed loss.

    q, k, v (B, H, T, D), gates and state as in their classes -> y (B, H, T, D), state. Slow: for reading and for tests.
    """
    pos, n = state.pos, state.k.shape[2]

    def one(M0, W, S, anchor, O, ks, vs, q, k, v, keep, step, momentum, gate):       # one sequence, one head
        def window_loss(W, i, weights):
            return sum(w * memory.loss(rule.loss, M(W, ks[j]), vs[j]) for w, j in zip(weights, i))

        def M(W, k):
            W = tuple(a + b for a, b in zip(M0, W)) if M0 else W
            return memory.apply(rule.memory, lambda i, rows: rows @ W[i], phi(k), k, rule.norm)

        ks, vs, ys = torch.cat([ks, k]), torch.cat([vs, v]), []
        for t in range(q.shape[0]):
            if (pos + t) % rule.chunk == 0:
                anchor = W
            i = range(max(0, n + t - rule.window + 1), n + t + 1)                # this token and the window - 1 before it
            g = grad(window_loss)(anchor, i, gate[t, rule.window - len(i):])
            S = tuple(momentum[t] * s + g for s, g in zip(S, g)) if len(momentum) else g         # Eq 33
            if rule.muon_every == 0:
                O = S
            elif (pos + t) % rule.chunk % rule.muon_every == 0:
                O = tuple(rule.ns(s) for s in S)                                 # Eq 40
            W = tuple(keep[t] * w - step[t] * o for w, o in zip(W, O))           # Eq 32, choices 4 and 5
            ys.append(M(W, q[t]))                                                # choice 3: read after write
            if (pos + t + 1) % rule.chunk == 0:
                W = rule.bound(W)
        return torch.stack(ys), W, S if len(momentum) else (), anchor, O

    gates = (() if g is None else g for g in gates)
    M0 = tuple(m.expand(len(q), *m.shape) for m in state.M0)
    y, W, S, anchor, O = vmap(vmap(one))(M0, state.W, state.S, state.anchor, state.O, state.k, state.v, q, k, v, *gates)
    pos = (pos + q.shape[2]) % rule.chunk
    O = O if rule.muon_every and pos % rule.muon_every else ()
    tail = [torch.cat([a, b], 2)[:, :, max(0, n + q.shape[2] - rule.window + 1):] for a, b in ((state.k, k), (state.v, v))]
    return y, State(state.M0, W, S, anchor if pos else W, O, *tail, None, pos)


# ---------------------------------------------------------------------------------------------------------------------------
# The chunk-parallel form.

class Tokens(NamedTuple):
    """One chunk of c tokens to read at and of n = window - 1 + c pairs to learn from."""
    q: torch.Tensor                                           # (B, H, c, D)
    xq: torch.Tensor                                          # (B, H, c, E)  phi(q)
    k: torch.Tensor                                           # (B, H, n, D)
    xk: torch.Tensor                                          # (B, H, n, E)  phi(k)
    v: torch.Tensor                                           # (B, H, n, D)
    base: torch.Tensor | None                                 # (B, H, c, F)  phi(q) M0, if W is counted from M0
    write: torch.Tensor | None                                # (B, H, n, E)  what x_i^T d_i is made of, if not phi(k)


class Mixing(NamedTuple):
    """Everything in the formulas above that depends on the gates alone, for one chunk of c tokens and n = window - 1 + c pairs."""
    keepprod: torch.Tensor                                    # (..., c, 1)  keep_1 .. keep_t
    A: torch.Tensor                                           # (..., c, c)  prod keep_{n+1..t}
    AS: torch.Tensor                                          # (..., c, c)  -A diag(step)
    momprod: torch.Tensor | None                              # (..., r, 1)  momentum_1 .. momentum_t              } for the rows t
    G: torch.Tensor                                           # (..., r, n)  Theta Gate, S_t = momprod_t S_0 + G X^T D } in `rows`
    P: torch.Tensor | None = None                             # (..., c, n)  AS G                      }
    u: torch.Tensor | None = None                             # (..., c, 1)  AS momprod                } without Newton-Schulz
    scores: torch.Tensor | None = None                        # (..., c, n)  P o (phi(q) phi(k)^T)     }


def decay(factors):
    """(..., c) -> prod factors_{1..t} (..., c, 1) and the lower triangle of prod factors_{n+1..t} (..., c, c)."""
    logs = factors.clamp_min(torch.finfo(factors.dtype).tiny).log().cumsum(-1)
    c = factors.shape[-1]
    above = torch.full((c, c), -torch.inf, dtype=logs.dtype, device=logs.device).triu(1)         # masked before exp, not after:
    return logs.exp()[..., None], (logs[..., :, None] - logs[..., None, :] + above).exp()         # no 0 * inf in backward


def band(gate):
    """The window mask of section 3.3, weighted: (..., c, w) -> (..., c, w - 1 + c) with row t holding gate[t] from column t on."""
    *lead, c, w = gate.shape
    return F.pad(gate, (0, c)).flatten(-2)[..., : c * (w - 1 + c)].view(*lead, c, w - 1 + c)


def mixing(rule, gates, rows, inner):
    """Mixing of chunks whose gates are (..., c) and (..., c, window).

    rows: the tokens whose S_t is wanted. inner: phi(q) phi(k)^T (..., c, n), or None with Newton-Schulz, which has no use for it.
    """
    keepprod, A = decay(gates.keep)
    AS = A * -gates.step[..., None, :]
    momprod, G = None, band(gates.gate)
    if gates.momentum is not None:
        momprod, Theta = decay(gates.momentum)
        momprod, Theta = momprod[..., rows, :], Theta[..., rows, :]
        G = Theta @ G                                         # Eq 39
    else:
        G = G[..., rows, :]
    if inner is None:
        return Mixing(keepprod, A, AS, momprod, G)
    P = AS @ G
    return Mixing(keepprod, A, AS, momprod, G, P, None if momprod is None else AS @ momprod, P * inner)


def add_product(z, a, b):
    """z + a b for (B, H, ..) matrices, in one pass."""
    return torch.baddbmm(z.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, z.shape[:2])


def omega(rule, phi, q, k, v, gates, state):
    """The rule of the module docstring, chunk-parallel; arguments and returns of `omega_ref`, any length, any state."""
    T, w = q.shape[2], rule.window
    missing = w - 1 - state.k.shape[2]                        # the first tokens of a sequence have a shorter window; choice 12
    if missing:
        i = torch.arange(T, device=q.device)[:, None] + torch.arange(w, device=q.device)
        gates = gates._replace(gate=gates.gate * (i >= missing))
    ks, vs = (torch.cat([F.pad(a, (0, 0, missing, 0)), b], 2) for a, b in ((state.k, k), (state.v, v)))
    state = state._replace(k=ks[:, :, max(T, missing):], v=vs[:, :, max(T, missing):])
    write_xk = None
    if phi.kind == "exp":
        state, xq, xk, write_xk = write_keys(rule, state, q, k, ks)

    ys, t = [], 0
    for length, count in cuts(T, state.pos, rule.chunk):      # the rest of a chunk in progress; whole chunks; a chunk begun
        now, seen = slice(t, t + length * count), slice(t, t + length * count + w - 1)
        fold = lambda a: a[:, :, now].unflatten(2, (count, length))                               # (B, H, N, C, ..)
        look = lambda a: a[:, :, seen].unfold(2, length + w - 1, length).transpose(-1, -2)        # (B, H, N, n, ..)
        cq, ck, cv = fold(q), look(ks), look(vs)
        cxq, cxk = (phi(cq), phi(ck)) if write_xk is None else (fold(xq), look(xk))
        base = None
        if state.M0:                                          # the part of the first read that is the same for every W
            base = torch.cat([(cxq.transpose(0, 1).flatten(1, 3) @ m) for m in state.M0[: firsts(rule)]], -1)
            base = base.unflatten(1, (-1, count, length)).transpose(0, 1)
        parts = Tokens(cq, cxq, ck, cxk, cv, base, None if write_xk is None else look(write_xk))
        rows, inner = slice(None), None
        if rule.muon_every:
            rows = block_starts(state.pos, length, rule.muon_every) + [length - 1]
        else:
            inner = phi.inner(cq, ck)
        mix = mixing(rule, Gates(*(g if g is None else fold(g) for g in gates)), rows, inner)
        parts, mix = ([a if a is None else a.unbind(2) for a in group] for group in (parts, mix))
        step_chunk = muon_chunk if rule.muon_every else linear_chunk
        for j in range(count):                                # the only loop: chunk after chunk
            tokens, weights = ([a if a is None else a[j] for a in group] for group in (parts, mix))
            y, state = step_chunk(rule, state, Tokens(*tokens), Mixing(*weights))
            ys.append(y)
        t = now.stop
    return torch.cat(ys, 2), state


def compile_chunks(**options):
    """torch.compile the loop's body once for all chunks and layers: compiling the loop itself would unroll it, and take minutes."""
    global mixing, linear_chunk, muon_chunk
    mixing, linear_chunk, muon_chunk = (torch.compile(getattr(f, "_torchdynamo_orig_callable", f), **options)
                                        for f in (mixing, linear_chunk, muon_chunk))


def cuts(T, pos, chunk):
    """T tokens, the first `pos` tokens into a chunk, as runs of (length, count): count stretches of `length` tokens each."""
    head = min(T, -pos % chunk)
    whole, tail = divmod(T - head, chunk)
    return [(n, c) for n, c in ((head, 1), (chunk, whole), (tail, 1)) if n * c]


def advance(rule, state, W, S, O, length):
    """The state `length` tokens on; at a chunk boundary the anchor moves to W."""
    pos = (state.pos + length) % rule.chunk
    W = W if pos else rule.bound(W)
    return state._replace(W=W, S=S, anchor=state.anchor if pos else W, O=O if pos else (), pos=pos)


def block_starts(pos, length, every):
    """The tokens of a chunk at which Newton-Schulz is refreshed, for a chunk that begins `pos` tokens into its own."""
    return list(range(-pos % every, length, every))


def firsts(rule):
    """How many matrices of the memory read x itself."""
    return 2 if rule.memory == "gated" else 1


def read_start(state, tokens, i, rows):
    """rows M0[i], or zero where W is not counted from M0."""
    if not state.M0:
        return 0
    width = state.M0[i].shape[-1]
    return tokens.base[..., i * width: (i + 1) * width] if rows is tokens.xq else rows @ state.M0[i]


def linear_chunk(rule, state, tokens, mix):
    """One chunk (or a part of one) without Newton-Schulz: y (B, H, c, D), and the state after it."""
    q, xq, k, xk, v, _, write = tokens
    anchor = total(state._replace(W=state.anchor))
    pairs = memory.gradients(rule.memory, rule.loss, anchor, xk, k, v, rule.norm)                # x_i, d_i of every token

    def read(i, rows):                                                           # r_t W_t for all t
        a, d = pairs[i]
        z = mix.keepprod * (rows @ state.W[i]) + read_start(state, tokens, i, rows)
        if state.S:
            z = torch.addcmul(z, mix.u, rows @ state.S[i])
        return add_product(z, mix.scores if a is xk else mix.P * (rows @ a.mT), d)

    y = memory.apply(rule.memory, read, xq, q, rule.norm)
    W, S = [], []
    for i, (a, d) in enumerate(pairs):
        a = write if write is not None and a is xk else a
        last = mix.P[..., -1, :, None] * d
        if state.S:                                           # both sums over the chunk in one product
            last = torch.cat([last, mix.G[..., -1, :, None] * d], -1)
            dW, dS = (a.mT @ last).chunk(2, -1)
            W.append(mix.keepprod[..., -1:, :] * state.W[i] + mix.u[..., -1:, :] * state.S[i] + dW)
            S.append(mix.momprod[..., -1:, :] * state.S[i] + dS)
        else:
            W.append(add_product(mix.keepprod[..., -1:, :] * state.W[i], a.mT, last))
    return y, advance(rule, state, tuple(W), tuple(S), (), q.shape[2])


def muon_chunk(rule, state, tokens, mix):
    """One chunk (or a part of one) with Newton-Schulz every `muon_every` tokens: y (B, H, c, D), and the state after it.

    The rows of mix.G are those of the block starts, then the last token.
    """
    q, xq, k, xk, v, _, write = tokens
    keepprod, A, AS, momprod, G, *_ = mix
    c, m = q.shape[2], rule.muon_every
    into = state.pos % m                                      # tokens of the first block that are already behind us
    fresh = block_starts(state.pos, c, m)
    first = [0] + fresh if into else fresh                    # a block in progress goes on with the O it has
    ends, blocks = [s - 1 for s in first[1:]], len(first)     # the last token before block 1, 2, ..

    # c_{t,j} = -sum over the tokens n <= t of block j of A[t, n] step_n:   W_t = keepprod_t W_0 + sum_j c_{t,j} O_j
    split = [b - a for a, b in zip(first, first[1:] + [c])]
    coef = torch.stack([s.sum(-1) for s in AS.split(split, -1)], -1)             # (B, H, c, blocks)
    ragged = into or blocks * m > c
    fit = lambda a: F.pad(a, (0, 0, into, blocks * m - into - c)) if ragged else a
    grid = lambda a: fit(a).unflatten(2, (blocks, m))                            # (B, H, blocks, m, ..)
    own = grid(torch.cat([coef[:, :, a: a + n, j: j + 1] for j, (a, n) in enumerate(zip(first, split))], 2))
    since = grid(torch.cat([keepprod[:, :, : split[0]]] + [A[:, :, e + 1: e + 1 + n, e: e + 1] for e, n in zip(ends, split[1:])], 2))

    anchor = total(state._replace(W=state.anchor))
    pairs = memory.gradients(rule.memory, rule.loss, anchor, xk, k, v, rule.norm)
    S, O, W = [], [], []                                      # after the chunk; of each block; of each block's start
    for i, (a, d) in enumerate(pairs):
        a = write if write is not None and a is xk else a
        s = a.mT @ torch.cat([g * d for g in G[..., None].unbind(2)], -1)        # S at all the rows of G in one product
        s = s.unflatten(-1, (-1, d.shape[-1])).transpose(2, 3)                   # (B, H, rows, in, out)
        if state.S:
            s = torch.addcmul(s, momprod[..., None], state.S[i][:, :, None])
        S.append(s[:, :, -1])
        O.append(rule.ns(s[:, :, :-1]) if fresh else s[:, :, :0])
        if into:
            O[i] = torch.cat([state.O[i][:, :, None], O[i]], 2)
        W.append(state.W[i][:, :, None])
        if ends:
            past = keepprod[:, :, ends, :, None] * W[i] + torch.einsum("bhtj,bhjef->bhtef", coef[:, :, ends], O[i])
            W[i] = torch.cat([W[i], past], 2)

    def read(i, rows):
        z, o = (grid(rows) @ torch.cat([W[i], O[i]], -1)).chunk(2, -1)
        z = torch.addcmul(since * z, own, o).flatten(2, 3)
        z = z[:, :, into: into + c] if ragged else z
        return z + read_start(state, tokens, i, rows)

    y = memory.apply(rule.memory, read, xq, q, rule.norm)
    last = coef[:, :, -1, :, None, None]
    end = tuple(keepprod[:, :, -1:] * w + (last * o).sum(2) for w, o in zip(state.W, O))
    O = tuple(o[:, :, -1] for o in O) if (into + c) % m else ()
    return y, advance(rule, state, end, tuple(S) if state.S else (), O, c)


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
