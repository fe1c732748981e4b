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

Symbols (Titans and ATLAS swap eta and theta, so the code uses words):

    code       ATLAS        Titans        meaning
    M, W, M0   M_t, M_0     M_t, M_0      fast weights of a sequence and head; their learned start
    S          S_t          S_t           momentum of the gradients
    R          -            -             what Newton-Schulz multiplies S by: NS(S) = S R (muon.py)
    U          -            -             the steps of a chunk so far, added up with decay
    keep       alpha_t      1 - alpha_t   fraction of the memory retained, in [0, 1]
    step       eta_t        -             inner step size, > 0  (choice 4)
    momentum   theta_t      eta_t         momentum decay, in [0, 1)
    gate       gamma_i^(t)  theta_t       weight of the i-th window token at step t: `window` values
                                          per token. (Titans' step multiplies the gradient, as gate
                                          does here, and its S has the other sign)
    window     c            1             tokens that the Omega rule looks back on
    chunk      b            b             tokens that learn together, from one anchor
    anchor     M_t'         -             the memory before a chunk, where its gradients are taken
    degree     p            -             polynomial degree of phi

    B batch   H heads   N = B H   T tokens   D head dim   E features, the dim of phi(k)
    c tokens of a chunk (the paper's c is `window`)       n pairs that a chunk learns from
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


def with_direction(x):
    """Return x, without a gradient where a vector is too short to have a direction."""
    if not x.requires_grad:
        return x
    return x.where(torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True) > 1e-6, x.detach())


def unit(x):
    """Return x / |x|, and 0 for 0, in float32 at least."""
    return F.normalize(with_direction(at_least_float32(x)), dim=-1, eps=1e-6)


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

    read(i, rows) returns rows times matrix i. Raises ValueError for an unknown memory."""
    if kind == "linear":
        return x
    if kind == "mlp":
        return F.gelu(read(0, x))                       # Eq 42
    if kind == "gated":
        return F.gelu(read(0, x)) * read(1, x)          # Eq 43
    raise ValueError(f"no memory {kind!r}; choose one of {', '.join(MEMORIES)}")


def apply(kind, W, x, r, norm=False):
    """Return M(x; W): x (.., T, E), residual r (.., T, D) -> (.., T, D)."""
    a, _ = enter(kind, W, x)
    return output(kind, a @ W[-1], r, norm)


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


def output_error(kind, loss_kind, f, v, norm=False):
    """Return dl/df, where f is the output of the last matrix and v its `target`. With `norm` the
    loss of a deep memory sees n = f / RMS(f), so dl/df = (e - n mean(n e)) / RMS(f), e = dl/dn."""
    if kind == "linear" or not norm:
        return error(loss_kind, f, v)
    scale = (f.square().mean(-1, keepdim=True) + EPS).rsqrt()            # 1 / RMS(f)
    n = f * scale
    e = error(loss_kind, n, v)
    return scale * (e - n * (n * e).mean(-1, keepdim=True))


def enter(kind, W, x):
    """Return what enters the last matrix when x enters the first, and a list of what leaves the
    matrices before it: x (.., n, E) -> (.., n, in), [(.., n, hidden), ..]."""
    z = [x @ w for w in W[:-1]]

    def read(i, rows):
        return z[i]

    return hidden(kind, x, read), z


def gradients(kind, W, x, a, z, d):
    """Return the gradient of each pair's loss at fixed weights W: backpropagation written out.

    The gradient of a matrix is an outer product, dl/dW[i] = a^T d: a is its input and d the error
    of its output. W: matrices (N, in, out); x (N, n, E); a and z from `enter`; d (N, n, out) the
    error of the last matrix -> a list with (a, d) of each matrix, (N, n, in) and (N, n, out)."""
    if kind == "linear":
        return [(x, d)]

    da = d @ W[-1].mT
    gelu_backward = torch.ops.aten.gelu_backward              # (g, z) -> g gelu'(z)
    if kind == "mlp":
        return [(x, gelu_backward(da, z[0])), (a, d)]

    # gated: the last matrix reads gelu(z[0]) z[1]
    gate, up = z
    return [(x, gelu_backward(da * up, gate)), (x, da * F.gelu(gate)), (a, d)]
