"""memory.py - what a memory is: a small network M(x; W) with fast weights W, its loss, and its gradients in closed form.

    linear   M(x) = x W                                                  a matrix, as in linear attention and DeltaNet
    mlp      M(x) = r + gelu(x W1) W2                                    ATLAS Eq 42
    gated    M(x) = r + (gelu(x W1) * (x W2)) W3                         ATLAS Eq 43 (ATLAS++)

x = phi(k) is a row vector of E features, and the residual r is k itself, of dimension D  (choice 9). W is a tuple of matrices,
one set for each sequence and head. The inner loop (omega.py) changes W at test time; where W starts is a parameter of the
outer loop like any other. No biases, as in the paper.

Symbols (Titans and ATLAS swap eta and theta, so the code uses words; shapes in capitals):

    code       ATLAS        Titans      meaning
    M, W       M_t          M_t         fast weights of one sequence and head, a tuple of matrices; M0 where they start
    S          S_t          S_t         momentum of the gradients
    keep       alpha_t      1 - alpha_t fraction of the memory retained, in (0, 1)
    step       eta_t        theta_t     inner step size, > 0
    momentum   theta_t      eta_t       momentum decay, in [0, 1)
    gate       gamma_i^(t)  -           weight of the i-th window token at step t: `window` values a token
    window     c            1           tokens the Omega rule looks back on
    chunk      b            b           tokens that share one gradient point
    degree     p            1           polynomial degree of phi

    B batch   H heads   T tokens   D head dim   E = dim of phi(k)   F hidden width of the memory   C chunk
"""
import torch
import torch.nn.functional as F

MEMORIES = ("linear", "mlp", "gated")
LOSSES = ("l2", "dot", "huber", "lp")
EPS = 1e-6                                                    # of the norm
LP = 3                                                        # MIRAS' Moneta: |y - v|_p^p with p = 3


def shapes(kind, e, f, d):
    """The shapes of the weights W of a memory from E features through F hidden units to D outputs."""
    return {"linear": [(e, d)], "mlp": [(e, f), (f, d)], "gated": [(e, f), (e, f), (f, d)]}[kind]


def apply(kind, read, x, r, norm=False):
    """M(x), where `read(i, rows)` multiplies rows by the i-th weight matrix - whatever that matrix is at each row.

    x (..., T, E), residual r (..., T, D) -> (..., T, D). With `read = lambda i, a: a @ W[i]` all rows see the same W; the chunk
    form of omega.py reads row t at W_t without ever forming W_t. `norm` puts a layer norm before the residual  (choice 11).
    """
    if kind == "linear":
        return read(0, x)
    if kind == "mlp":
        f = read(1, F.gelu(read(0, x)))                                          # Eq 42
    else:
        f = read(2, F.gelu(read(0, x)) * read(1, x))                             # Eq 43
    return r + (F.rms_norm(f, f.shape[-1:], eps=EPS) if norm else f)


def feature_major(x):
    """Do the rows of x (..., n, E) lie in memory as columns, as monomials do (poly.py)?"""
    return x.stride(-2) == 1 < x.stride(-1)


def product(x, W):
    """x W, for a feature-major x as (W^T x^T)^T: its gradient then lies as x does, and need not be reordered."""
    return (W.mT @ x.mT).transpose(-2, -1).contiguous() if feature_major(x) else x @ W


def loss(kind, y, v):
    """The attentional bias l(y; v), summed over everything (choice 1); 1/2 makes the l2 error y - v (choice 2)."""
    if kind == "l2":
        return 0.5 * (y - v).square().sum()                                      # Eq 9
    if kind == "dot":
        return -(y * v).sum()                                                    # Eq 19, with the sign that writes + v k^T
    if kind == "huber":
        return F.huber_loss(y, v, reduction="sum")                               # MIRAS, Yaad
    return (y - v).abs().pow(LP).sum() / LP                                      # MIRAS, Moneta


def error(kind, y, v):
    """dl/dy of the loss above."""
    if kind == "dot":
        return -v
    e = y - v
    if kind == "huber":
        return e.clamp(-1, 1)
    return e if kind == "l2" else e.abs().pow(LP - 1) * e.sign()


def gradients(kind, loss_kind, W, x, r, v, norm=False):
    """The gradient of every token's loss at fixed weights W, as one rank-one pair a matrix: dl/dW[i] = a^T d.

    x (..., n, E), r and v (..., n, D) -> list over matrices of (a (..., n, in), d (..., n, out)): the rows that enter the matrix
    and the error signals that leave it. This is backpropagation written out; autograd of `loss` is what tests compare it with.
    """
    if kind == "linear":
        return [(x, error(loss_kind, product(x, W[0]), v))]
    z = product(x, W[0])
    h, slope = gelu(z)
    if kind == "mlp":
        e = output_error(loss_kind, h @ W[1], r, v, norm)
        return [(x, (e @ W[1].mT) * slope), (h, e)]
    g = product(x, W[1])
    a = h * g
    e = output_error(loss_kind, a @ W[2], r, v, norm)
    da = e @ W[2].mT
    return [(x, da * g * slope), (x, da * h), (a, e)]


def output_error(loss_kind, f, r, v, norm):
    """dl/df for an output r + f, or r + norm(f): through the norm the error loses its part along f and shrinks as f grows."""
    if not norm:
        return error(loss_kind, r + f, v)
    scale = (f.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n = f * scale
    e = error(loss_kind, r + n, v)
    return scale * (e - n * (n * e).mean(-1, keepdim=True))


class Gelu(torch.autograd.Function):
    """gelu(z) = z Phi(z) and its slope Phi + z pdf, together: the slope is also what the outer gradient of gelu needs.

    The outer gradient of the slope is gelu'' = (2 - z^2) pdf, in fewer operations than autograd's twenty.
    """

    @staticmethod
    def forward(ctx, z):
        h, slope = F.gelu(z), torch.ops.aten.gelu_backward(torch.ones_like(z), z)
        ctx.save_for_backward(z, slope)
        return h, slope

    @staticmethod
    def backward(ctx, dh, dslope):
        z, slope = ctx.saved_tensors
        square = z * z
        pdf = (square * -0.5).exp_()
        return torch.addcmul(dh * slope, (2 - square).mul_(pdf), dslope, value=(2 * torch.pi) ** -0.5)


gelu = Gelu.apply
