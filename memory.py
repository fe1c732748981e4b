"""memory.py - what a memory is: a small network M(x; W) with fast weights W, its loss, and its gradients in closed form.

    linear   M(x) = x W                                                  a matrix, as in linear attention and DeltaNet
    mlp      M(x) = r + gelu(x W1) W2                                    ATLAS Eq 42
    gated    M(x) = r + (gelu(x W1) * (x W2)) W3                         ATLAS Eq 43 (ATLAS++)

The paper's matrices act on columns, x + W_1 gelu(W_2 x) and x + W_1 (gelu(W_2 x) * W_3 x): its W_2, W_1 are W1, W2 here, and its W_2,
W_3, W_1 are W1, W2, W3. x = phi(k) is a row vector of E features, and the residual r is k itself, of dimension D; for what is read they are
phi(q) and q  (choice 9). W is a tuple of matrices, one set for each sequence and head. The inner loop (omega.py) changes W at test time;
where W starts is a parameter of the outer loop like any other. No biases, as in the paper.

Symbols (Titans and ATLAS swap eta and theta, so the code uses words; shapes in capitals):

    code       ATLAS        Titans      meaning
    M, W       M_t          M_t         fast weights of one sequence and head, a tuple of matrices; M0 where they start
    S          S_t          S_t         momentum of the gradients
    O          -            -           Newton-Schulz of S_t, in Eq 32 (of a block's sum of them: choice 15)
    keep       alpha_t      1 - alpha_t fraction of the memory retained, in (0, 1]
    step       eta_t        -           inner step size, > 0  (choice 4)
    momentum   theta_t      eta_t       momentum decay, in (0, 1)
    gate       gamma_i^(t)  theta_t     weight of the i-th window token at step t: `window` values a token
    window     c            1           tokens the Omega rule looks back on
    chunk      b            b           tokens that share one gradient point
    degree     p            -           polynomial degree of phi

    B batch   H heads   N = B H   T tokens   D head dim   E = dim of phi(k)
    c tokens of a chunk (the paper's c is `window`)   n pairs that a chunk learns from
"""
import math
from contextlib import nullcontext
from functools import wraps
from typing import NamedTuple

import torch
import torch.nn.functional as F

# a new memory of one hidden layer, as `mlp`, needs its lines in shapes, apply, hidden, hidden_backward and gradients_again (its activation, and that
# one's slope and curvature), in test_memory_formula and test_all.EQUAL; one whose hidden layer reads two matrices, as `gated`, also in firsts and bent
MEMORIES = ("linear", "mlp", "gated")
# a new loss needs its lines in loss, error, error_backward, test_losses and test_all.EQUAL; a place in CURVED if the slope of its error is not
# constant; and in `target` if its error does not depend on y. One that is no function of y - v, as a cross entropy, fits a linear memory alone
LOSSES = ("l2", "dot", "huber", "lp")
CURVED = ("huber", "lp")
EPS = 1e-6                                                    # of the norm inside the memory (choice 11)
LP = 3                                                        # MIRAS' Moneta: |y - v|_p^p / p with p = 3


def shapes(kind, e, width, d):
    """The shapes of the weights W of a memory from E features through `width` hidden units to D outputs. KeyError for an unknown one."""
    return {"linear": [(e, d)], "mlp": [(e, width), (width, d)], "gated": [(e, width), (e, width), (width, d)]}[kind]


def apply(kind, W, x, r, norm=False):
    """M(x; W): x (..., T, E), residual r (..., T, D) -> (..., T, D); `norm` divides the output of a deep memory's last matrix by its
    RMS, before the residual is added (choice 11). ValueError for an unknown kind."""
    if kind == "linear":
        f = x @ W[0]
    elif kind == "mlp":
        f = F.gelu(x @ W[0]) @ W[1]                                              # Eq 42
    elif kind == "gated":
        f = (F.gelu(x @ W[0]) * (x @ W[1])) @ W[2]                               # Eq 43
    else:
        raise ValueError(f"no memory {kind!r}; choose one of {', '.join(MEMORIES)}")
    return output(kind, f, r, norm)


def output(kind, f, r, norm=False):
    """What the memory answers, where f is what its last matrix produces."""
    if kind == "linear":
        return f
    return r + (F.rms_norm(f, f.shape[-1:], eps=EPS) if norm else f)


def loss(kind, y, v):
    """The attentional bias l(y; v), summed over everything (choice 1); 1/2 makes the l2 error y - v (choice 2). ValueError for an unknown one."""
    if kind == "l2":
        return 0.5 * (y - v).square().sum()                                      # Eq 9
    if kind == "dot":
        return -(y * v).sum()                                                    # Eq 19, with the sign that writes + v k^T
    if kind == "huber":
        return F.huber_loss(y, v, reduction="sum")                               # coordinate by coordinate; MIRAS, Yaad (bends with |y - v|)
    if kind == "lp":
        return (y - v).abs().pow(LP).sum() / LP                                  # the q-Omega rule, after Eq 9; MIRAS, Moneta
    raise ValueError(f"no loss {kind!r}")


def error(kind, y, v):
    """dl/dy of the loss above. ValueError for an unknown one."""
    if kind == "dot":
        return -v
    e = y - v
    if kind == "l2":
        return e
    if kind == "huber":
        return e.clamp(-1, 1)
    if kind == "lp":
        return e.abs().pow(LP - 1) * e.sign()
    raise ValueError(f"no error of loss {kind!r}")


def target(kind, loss_kind, r, v):
    """What the last matrix should produce: l(r + f, v) depends on f - (v - r) alone, so the residual moves to the target.

    (The error of the dot loss is -v, whatever r is.)
    """
    return v if kind == "linear" or loss_kind == "dot" else v - r


def output_error(loss_kind, f, v, norm):
    """dl/df for an output f, or norm(f): through the norm the error loses its part along f and shrinks as f grows."""
    if not norm:
        return error(loss_kind, f, v)
    scale = (f.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n = f * scale
    e = error(loss_kind, n, v)
    return scale * (e - n * (n * e).mean(-1, keepdim=True))


def pack(W):
    """The matrices that read x as one, side by side, and the last one: (W), (W1, W2), ([W1 | W2], W3). Likewise their errors d."""
    return tuple(W) if len(W) < 3 else (torch.cat(W[:-1], -1), W[-1])


def unpack(W, count):
    """The inverse of `pack`, for `count` matrices that read x."""
    return (*W[0].chunk(count, -1), *W[1:])


def firsts(kind):
    """How many matrices of the memory read x itself."""
    return 2 if kind == "gated" else 1


def unpacked_pairs(kind, pairs):
    """The pairs of packed matrices (`gradients`) -> those of each matrix."""
    if firsts(kind) == 1:
        return pairs
    (x, d), last = pairs
    return [*((x, half) for half in d.chunk(2, -1)), last]


def gradients(kind, loss_kind, W, x, v, norm):
    """The gradient of every token's loss at fixed weights W, as one rank-one pair a matrix: dl/dW[i] = a^T d.

    W as `pack` gives it, for all N sequences and heads, x (N, n, E), v (N, n, D) as `target` gives it
    -> for each of W (a (N, n, in), d (N, n, out)): the rows that enter the matrix and the errors that leave it; and for `gradients_again`
    (z, f, e): z = x W[0] of a deep memory (None if it is no shorter than x), f what the last matrix produces (None if its gradient does not
    need it), e the last error. This is backpropagation written out; tests compare it with autograd of `loss`.
    """
    z = torch.bmm(x, W[0])
    if kind == "linear":
        e = error(loss_kind, z, v)
        return [(x, e)], (None, z if loss_kind in CURVED else None, e)
    a = hidden(kind, z)
    f = torch.bmm(a, W[1])
    e = output_error(loss_kind, f, v, norm)                   # dl/df, then back through the last matrix and gelu: dl/dz
    d = hidden_backward(kind, z, torch.bmm(e, W[1].mT))
    return [(x, d), (a, e)], (z if z.shape[-1] < x.shape[-1] else None, f if norm or loss_kind in CURVED else None, e)


def hidden(kind, z):
    """The rows that enter the last matrix: gelu(z) of Eq 42, gelu(z1) * z2 of Eq 43, for z = x W[0] = [z1 | z2]."""
    if kind == "mlp":
        return F.gelu(z)
    if kind != "gated":
        raise ValueError(f"no hidden units of memory {kind!r}")
    z, u = z.chunk(2, -1)
    return F.gelu(z).mul_(u)


def hidden_backward(kind, z, da):
    """The gradient of z, from da, that of the rows which `hidden` makes of it."""
    if kind == "mlp":
        return torch.ops.aten.gelu_backward(da, z)
    if kind != "gated":
        raise ValueError(f"no gradient of the hidden units of memory {kind!r}")
    z, u = z.chunk(2, -1)
    return torch.cat([torch.ops.aten.gelu_backward(da * u, z), F.gelu(z).mul_(da)], -1)


# ---------------------------------------------------------------------------------------------------------------------------
# The outer gradient of these gradients, written out for speed. A first reading needs none of it.

class Recomputed(NamedTuple):
    """The pairs of `gradients` once more, and what else gradients_backward needs."""
    W: tuple                                                  # as `pack` gives it
    pairs: list                                               # (a, d) of each of W
    f: torch.Tensor | None                                    # what the last matrix produces, if its gradient needs it
    factors: tuple                                            # (slope, bend); () of a linear memory


def gradients_again(kind, W, x, saved):
    """The pairs again, from what `gradients` saved: to compute them takes no longer than to load them would. -> Recomputed

    Also slope = dh/dz and bend = g d(slope)/dz, all that gradients_backward needs of the activations h. Of `gated`, h = gelu(z) u, both have
    two halves: slope [gelu' u | gelu], by z and by u; bend [g gelu'' u | g gelu'], by z twice and by z and u (by u twice it is 0).
    """
    z, f, e = saved
    if kind == "linear":
        return Recomputed(W, [(x, e)], f, ())
    z = torch.bmm(x, W[0]) if z is None else z
    g = torch.bmm(e, W[1].mT)                                 # d = slope * g
    if kind == "mlp":
        a, slope, curvature = gelu(z)
        return Recomputed(W, [(x, slope * g), (a, e)], f, (slope, curvature.mul_(g)))
    if kind != "gated":
        raise ValueError(f"no second derivatives of memory {kind!r}")
    z, u = z.chunk(2, -1)
    h, slope, curvature = gelu(z)
    slopes = torch.cat([slope * u, h], -1)
    factors = slopes, torch.cat([curvature * u * g, slope * g], -1)
    return Recomputed(W, [(x, slopes * both(kind, g)), (h * u, e)], f, factors)


def gradients_backward(kind, loss_kind, again, v, norm, dd, da):
    """The outer gradient of the pairs: dd[i] is that of the i-th d, da that of the rows that enter the last matrix of a deep memory.

    dd[1] and da are written over.
    -> the gradient of each of W as a list of rank-one pairs; dz, where dz W[0]^T is the gradient of x; dv.
    """
    W, pairs, f, factors = again
    x = pairs[0][0]
    if kind == "linear":
        dz, dv = error_backward(loss_kind, dd[0], f, v)
        return [[(x, dz)]], dz, dv
    (a, e), (slope, bend) = pairs[1], factors
    dg = fold(kind, dd[0] * slope)                            # of g = e W[1]^T
    df, dv = output_error_backward(loss_kind, add_product(dd[1], dg, W[1]), f, v, norm)
    dz = bent(kind, dd[0], bend).addcmul_(both(kind, add_product(da, df, W[1].mT)), slope)
    return [[(x, dz)], [(dg, e), (a, df)]], dz, dv


def error_backward(kind, de, y, v):
    """The gradients of y and v, for that of error(kind, y, v)."""
    if kind == "dot":
        return torch.zeros_like(de), -de
    if kind == "huber":
        de = de * ((y - v).abs() <= 1)
    elif kind == "lp":
        de = de * (LP - 1) * (y - v).abs().pow(LP - 2)
    elif kind != "l2":
        raise ValueError(f"no gradient of the error of loss {kind!r}")
    return de, -de


def output_error_backward(loss_kind, de, f, v, norm):
    """The gradients of f and v, for that of output_error: e is a gradient in f, so its derivative is symmetric, backward = forward."""
    if not norm:
        return error_backward(loss_kind, de, f, v)
    mean = lambda a: a.mean(-1, keepdim=True)
    scale = (mean(f.square()) + EPS).rsqrt()
    n = f * scale
    along = mean(n * de)
    dn = scale * (de - n * along)                             # how n moves when f moves by de
    dy, dv = error_backward(loss_kind, dn, n, v)
    e = error(loss_kind, n, v)
    ne = mean(n * e)
    df = dy - dn * ne - n * (mean(dn * e) + mean(n * dy)) - along * scale * (e - n * ne)
    return scale * df, dv


def bent(kind, d, bend):
    """What z gets through the slope in `slope * g`, from d, the gradient of that product; `bend` is g times the slope's derivative."""
    if firsts(kind) == 1:
        return d * bend
    (dz, du), (zz, zu) = d.chunk(2, -1), bend.chunk(2, -1)    # second derivatives by z twice, by z and u; by u twice it is 0
    return torch.cat([dz * zz + du * zu, dz * zu], -1)


def both(kind, g):
    """g for each of the matrices that feed the hidden units, side by side."""
    return g if firsts(kind) == 1 else torch.cat([g, g], -1)


def fold(kind, d):
    """The gradient of `both`: the sum of its parts."""
    return d if firsts(kind) == 1 else torch.add(*d.chunk(2, -1))


def gelu(z):
    """gelu(z) = z Phi(z); its slope Phi + z pdf; its curvature (2 - z^2) pdf: three of the shape of z.

    Phi(z) = (1 + erf(z / sqrt 2)) / 2 is the normal distribution's, not the feature map phi; pdf = exp(-z^2 / 2) / sqrt(2 pi) its density.
    """
    square = z * z
    pdf = (square * (-0.5 / math.log(2))).exp2_().mul_((2 * torch.pi) ** -0.5)                   # an AMD core's exp takes 4 times as long
    Phi = (z * 0.5**0.5).erf_().add_(1).mul_(0.5)
    return z * Phi, Phi.addcmul_(z, pdf), square.neg_().add_(2).mul_(pdf)


# ---------------------------------------------------------------------------------------------------------------------------
# Products and their precision, which the other modules use, too.

def outer(pairs, flip=False):
    """The sum of x^T d over the pairs (x, d), or of d^T x."""
    pairs = [pair[::-1] for pair in pairs] if flip else pairs
    y = torch.bmm(pairs[0][0].mT, pairs[0][1])
    for x, d in pairs[1:]:
        y = add_product(y, x.mT, d)
    return y


def add_product(y, a, b):
    """y + a b, in the place of y: torch.baddbmm alone would begin with a copy, and torch's counter of FLOPs does not see baddbmm_."""
    if torch.compiler.is_compiling() or not y.dtype == a.dtype == b.dtype:       # autocast leaves `out` alone; inductor copies y for
        return y.add_(torch.bmm(a, b))                        # baddbmm, but makes this sum part of what comes next
    return torch.baddbmm(y, a, b, out=y)


def autocast(device, dtype=None):
    """Within, products are in `dtype`: torch casts what they multiply. Without one, no autocast of the caller's reaches them."""
    # the meta device, on which shapes and FLOPs cost nothing, has no autocast; and the compiler of torch 2.11 cannot be asked
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def cast(a, dtype):
    """a in that precision, None for its own. (torch's `to` takes a microsecond to find that there is nothing to do: 2 % of a chunk.)"""
    return a if dtype is None or a.dtype == dtype else a.to(dtype)


def product_to(out, a, b):
    """out = a b, in the place of out, which autocast leaves alone."""
    return torch.bmm(a, b, out=out) if out.dtype == a.dtype == b.dtype else out.copy_(torch.bmm(a, b))


def transposed_product(g, W, x, into=None):
    """g W^T, the gradient of x where g is that of x W; it lies in memory as x does, or is added to `into`, in place, and as that lies."""
    if feature_major(x if into is None else into):            # oneDNN is a thousand times slower at adding to a transposed matrix
        return (torch.bmm(W, g.mT) if into is None else add_product(into.mT, W, g.mT)).mT
    return torch.bmm(g, W.mT) if into is None else add_product(into, g, W.mT)


def feature_major(x):
    """Do the rows of x (..., n, E) lie in memory as columns, as monomials do (poly.py)?"""
    return x.stride(-2) == 1 < x.stride(-1)


def once_differentiable(backward):
    """For the `backward` of an autograd.Function: a gradient that was written out has none of its own, so create_graph=True is refused.

    torch's decorator of this name treats such a gradient as a constant if the incoming one is (a linear loss), and else raises only in a
    backward that torch.autograd.grad may never run: a gradient penalty would silently be wrong.
    """
    @wraps(backward)
    def once(ctx, *grads):
        if torch.is_grad_enabled():                           # in a backward, this is create_graph
            raise RuntimeError("this gradient is written out and has none of its own: no create_graph=True, no second derivatives")
        return backward(ctx, *grads)
    return once
