"""memory.py - what a memory is: a small network M(x; W), its loss, and the gradient of that loss.

    linear   M(x) = x W                              a matrix, as in linear attention and DeltaNet
    mlp      M(x) = r + gelu(x W1) W2                ATLAS Eq 42, with W1, W2 for its W_2, W_1
    gated    M(x) = r + (gelu(x W1) * (x W2)) W3     ATLAS Eq 43 (ATLAS++), with W1, W2, W3 for its
                                                     W_2, W_3, W_1

x is a row, while the paper has columns. For a key k, x is phi(k), a row of E features, and the
residual r is k itself, of dimension D (choice 9). For a query they are phi(q) and q.

W is a tuple of matrices, the fast weights: each sequence and head has its own. The inner loop
(omega.py) changes W at test time. W starts from M0, a parameter like any other, which the outer
loop trains. All this is plain torch, so autograd differentiates through it.

Symbols (Titans and ATLAS swap eta and theta, so the code uses words). A first reading can skip U,
due and O; omega.py explains blocks.

    code       ATLAS        Titans        meaning
    M, W, M0   M_t, M_0     M_t, M_0      fast weights of a sequence and head; their learned start
    S          S_t          S_t           momentum of the gradients
    U          -            -             the steps of a block so far, step S of each token, added
                                          up with decay. They wait for the block's end (choice 15)
    due        -            -             the same sum of `step` alone
    O          (S'_t)       -             NewtonSchulz(U). At a block's end W loses due O, or O of
                                          the length that choice 24 says. Without Newton-Schulz W
                                          loses U
    keep       alpha_t      1 - alpha_t   fraction of the memory retained, in [0, 1]
    step       eta_t        -             inner step size, > 0  (choice 4)
    momentum   theta_t      eta_t         momentum decay, in [0, 1)
    gate       gamma_i^(t)  theta_t       weight of the i-th window token at step t: `window` values
                                          per token. Titans' theta_t is the step, but it stands
                                          where gate does, inside of S (whose sign is the other)
    window     c            1             tokens that the Omega rule looks back on
    chunk      b            b             tokens that learn together, from one anchor
    anchor     M_t'         -             the memory before a chunk, where its gradients are taken
    degree     p            -             polynomial degree of phi

    B batch   H heads   N = B H   T tokens   D head dim   E features, the dim of phi(k)
    c tokens of a block (the paper's c is `window`)       n pairs that a block learns from
    Tensors are laid out (B, H, T, D). chunks.py has more letters of its own.
"""
from contextlib import nullcontext

import torch
import torch.nn.functional as F

# To add a memory, extend shapes, hidden and gradients; to add a loss, loss and error. MIRAS, which
# has more losses, is arXiv 2504.13173.
MEMORIES = ("linear", "mlp", "gated")
LOSSES = ("l2", "dot", "huber", "lp")
EPS = 1e-6                                              # of the norm inside the memory (choice 11)
LP = 3                                                  # MIRAS' Moneta: |y - v|_p^p / p with p = 3


def without_autocast(x):
    """Return a context without autocast on the device of x. (The meta device has no autocast.)"""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def at_least_float32(x):
    """Return x, as float32 if it was bfloat16 or half: in bfloat16 a keep of 0.999 would be 1."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x):
    """Return x / |x|, and 0 for 0, in float32 at least."""
    return F.normalize(at_least_float32(x), dim=-1, eps=1e-6)


def shapes(kind, e, width, d):
    """Return the shapes of the matrices W: e features, `width` hidden units, d outputs."""
    if kind == "linear":
        return [(e, d)]
    return firsts(kind) * [(e, width)] + [(width, d)]


def firsts(kind):
    """Return how many of the matrices, the first ones of W, read x itself."""
    return 2 if kind == "gated" else 1


def hidden(kind, x, read):
    """Return what enters the last matrix of the memory when x enters the first.

    read(i, rows) returns rows times matrix i: that of `reads`, or that of chunks.read, which has no
    matrix at hand. Raises ValueError for an unknown memory."""
    if kind == "linear":
        return x
    if kind == "mlp":
        return F.gelu(read(0, x))                       # Eq 42
    if kind == "gated":
        return F.gelu(read(0, x)) * read(1, x)          # Eq 43
    raise ValueError(f"no memory {kind!r}; choose one of {', '.join(MEMORIES)}")


def reads(W):
    """Return the function read(i, rows) of `hidden` for matrices W."""
    def read(i, rows):
        return rows @ W[i]

    return read


def apply(kind, W, x, r, norm=False):
    """Return M(x; W): x (.., T, E), residual r (.., T, D) -> (.., T, D)."""
    f = hidden(kind, x, reads(W)) @ W[-1]
    return output(kind, f, r, norm)


def size(kind, W, x):
    """Return |a|^2, at least 0.5, where a is what enters the last matrix: x (.., T, E) -> (.., T).
    Gradients are divided by it where errors are those at the token (choice 24)."""
    return hidden(kind, x, reads(W)).square().sum(-1).clamp_min(0.5)


def output(kind, f, r, norm=False):
    """Return M(x; W) from f, the output of the last matrix: add the residual r (Eq 42, 43). With
    `norm`, divide f by its RMS first (choice 11)."""
    if kind == "linear":
        return f
    if norm:
        f = F.rms_norm(f, f.shape[-1:], eps=EPS)
    return r + f


def loss(kind, y, v):
    """Return the inner loss l(y; v), the paper's attentional bias, of each pair: y, v (.., D) ->
    (..), a sum over D (choice 1). Raises ValueError for an unknown loss."""
    if kind == "l2":
        return 0.5 * (y - v).square().sum(-1)           # Eq 9; 1/2: choice 2
    if kind == "dot":
        return -(y * v).sum(-1)                         # Eq 19, 45; the sign writes + v k^T
    if kind == "huber":
        return F.huber_loss(y, v, reduction="none").sum(-1)                      # MIRAS' Yaad
    if kind == "lp":
        return (y - v).abs().pow(LP).sum(-1) / LP       # q-Omega, after Eq 9; MIRAS' Moneta
    raise ValueError(f"no loss {kind!r}; choose one of {', '.join(LOSSES)}")


def error(kind, y, v):
    """Return dl/dy of the loss above. Raises ValueError for an unknown loss."""
    if kind == "dot":
        return -v
    e = y - v
    if kind == "l2":
        return e
    if kind == "huber":
        return e.clamp(-1, 1)
    if kind == "lp":
        return e.abs().pow(LP - 1) * e.sign()
    raise ValueError(f"no loss {kind!r}; choose one of {', '.join(LOSSES)}")


def target(kind, loss_kind, r, v):
    """Return what the last matrix should give: v, or v - r if the memory adds a residual r. With
    the dot loss v will do, because its gradient does not depend on r."""
    return v if kind == "linear" or loss_kind == "dot" else v - r


def output_error(loss_kind, f, v, norm):
    """Return dl/df, where f is the output of the last matrix and v its `target`. With `norm` the
    loss sees n = f / RMS(f). Then dl/df = (e - n mean(n e)) / RMS(f), where e = dl/dn."""
    if not norm:
        return error(loss_kind, f, v)
    scale = (f.square().mean(-1, keepdim=True) + EPS).rsqrt()            # 1 / RMS(f)
    n = f * scale
    e = error(loss_kind, n, v)
    return scale * (e - n * (n * e).mean(-1, keepdim=True))


def gradients(kind, loss_kind, W, x, v, norm=False, last=None):
    """Return the gradient of each pair's loss at fixed weights W: backpropagation written out.

    The gradient of a matrix is an outer product, dl/dW[i] = a^T d: a is its input and d the error
    of its output. W: matrices (N, in, out); x (N, n, E); v (N, n, D) from `target` -> a list with
    (a, d) of each matrix, (N, n, in) and (N, n, out). `last` computes d of the last matrix from
    its input a; if it is None, d is the error at W."""
    def at_W(a):
        return output_error(loss_kind, a @ W[-1], v, norm and kind != "linear")

    last = last or at_W
    if kind == "linear":
        return [(x, last(x))]

    # backward from the last matrix: d at its output, d W[-1]^T at its input, dz before the gelu
    z = x @ W[0]
    gelu = F.gelu(z)
    gelu_backward = torch.ops.aten.gelu_backward              # (g, z) -> g gelu'(z)
    if kind == "mlp":
        d = last(gelu)
        dz = gelu_backward(d @ W[-1].mT, z)
        return [(x, dz), (gelu, d)]

    # gated: the last matrix reads gelu(z) u
    u = x @ W[1]
    a = gelu * u
    d = last(a)
    da = d @ W[-1].mT
    dz = gelu_backward(da * u, z)
    return [(x, dz), (x, da * gelu), (a, d)]
