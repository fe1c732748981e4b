"""poly.py - the feature map phi of keys and queries (ATLAS section 3.1).

    exp(q . k) = 1 + q.k + (q.k)^2 / 2! + ...,      phi(q) . phi(k) = a_0 + a_1 q.k + .. + a_p (q.k)^p         Eq 4, 5

A linear memory of head dim D stores D pairs (Prop 1); on phi it stores E, the number of features (Prop 2).

    none          phi(x) = x
    monomial      all monomials of degree <= p, E = C(D + p, p): Eq 5 exactly, with a_i = s_i^2     (choice 7)
    elementwise   sum_i s_i x^i, coordinate by coordinate. E = D, so capacity does not grow
    sketch        degree 2 with fewer features: products of two random projections, right on average
    exp           the infinite phi* of Eq 22, by its kernel exp(q . k) alone (end of this file)

q and k have unit length before phi, which does not normalise (choice 8).
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

FEATURES = ("none", "elementwise", "monomial", "sketch", "exp")


def features_dim(kind, dim, degree, sketch_dim=79):
    """Return E for inputs of `dim` numbers: C(D + p, p) monomials (Prop 2); for `exp` the ones of degree 1 alone."""
    if kind == "monomial":
        return math.comb(dim + degree, degree)
    if kind == "sketch":
        return 1 + dim + sketch_dim
    return dim


def patterns(p):
    """Return all ordered sums that make p: 2 is (2) and (1, 1); 3 is (3), (1, 2), (2, 1) and (1, 1, 1)."""
    return [(p,)] + [(r, *rest) for r in range(1, p) for rest in patterns(p - r)]


def monomials(x, exponents, scale=1):
    """Return all x_i^r x_j^s .. (i < j < ..) of one pattern of exponents (r, s, ..), times scale * sqrt(multinomial). x
    (.., D, T) -> pieces with C(D, len(exponents)) rows in all. Over all patterns of p the root makes their inner
    products (x . y)^p."""
    (r, *rest), D, n = exponents, x.shape[-2], len(exponents) - 1
    powers = (scale * math.comb(sum(exponents), r) ** 0.5) * (x ** r if r > 1 else x)
    if not rest:
        return [powers]
    tail = torch.cat(monomials(x, rest), -2)                  # its last C(D - 1 - i, n) are of x_{i+1}, x_{i+2}, ..
    return [power * tail[..., -math.comb(D - 1 - i, n):, :] for i, power in enumerate(powers.split(1, -2)[: D - n])]


class Features(nn.Module):
    """phi: (.., dim) -> (.., out_dim), with a learned scale s_i of each degree, at first 1 / sqrt(i!)."""

    def __init__(self, kind, dim, degree=2, sketch_dim=79, seed=0):
        super().__init__()
        self.kind, self.dim, self.degree = kind, dim, degree
        self.out_dim = features_dim(kind, dim, degree, sketch_dim)
        if kind in ("elementwise", "monomial", "sketch"):
            self.scale = nn.Parameter(torch.tensor([math.factorial(i) ** -0.5 for i in range(degree + 1)]))
        if kind == "sketch":                                  # the same for each seed, and saved with the model
            drawn = torch.randn(2, dim, sketch_dim, generator=torch.Generator().manual_seed(seed), device="cpu")
            self.register_buffer("sketch", drawn / sketch_dim ** 0.25)

    def forward(self, x):
        """Return phi(x): (.., dim) -> (.., out_dim). Raises ValueError for `exp`, which has infinitely many."""
        if self.kind == "exp":
            raise ValueError("exp features are infinitely many; only chunks.run has them, by their kernel")
        if self.kind == "none":
            return x
        s, one = self.scale.to(x.dtype), torch.ones_like(x[..., :1])
        if self.kind == "elementwise":
            return sum(s[i] * x ** i for i in range(self.degree + 1))
        if self.kind == "sketch":
            a, b = self.sketch.to(x.dtype)
            return torch.cat([s[0] * one, s[1] * x, (s[2] * x) @ a * (x @ b)], -1)
        x = x.mT.contiguous()                                 # (.., D, T): products run along the tokens
        pieces = [s[0] * one.mT]                              # Eq 5: degree 0, 1, .., p
        for p in range(1, self.degree + 1):
            for exponents in (e for e in patterns(p) if len(e) <= self.dim):
                pieces += monomials(x, exponents, s[p])
        return torch.cat(pieces, -2).mT

    def inner(self, x, y, px=None, py=None):
        """Return phi(x) phi(y)^T, by the kernel or from px = phi(x), py = phi(y); x (.., n, dim), y (.., m, dim)."""
        if self.kind == "exp":
            return (x @ y.mT).exp()                                              # Eq 23
        if self.kind != "monomial":
            return px @ py.mT
        dots, a = x @ y.mT, self.scale.to(x.dtype).square()
        out = a[self.degree]
        for i in reversed(range(self.degree)):                                   # Eq 5, by Horner's scheme
            out = out * dots + a[i]
        return out


# ---- exp: phi* is infinite, but the memory is a sum of phi*(k_i)^T d_i, and the first matrix holds d_i in row i. Its
# first D rows are the degree-1 part, where M0 lives (choice 19).
def kernel_rows(r, keys):
    """Return [r, exp(r . k_1), exp(r . k_2), ..], which read such a matrix at r: one number for each key (Eq 23)."""
    return torch.cat([r, (r @ keys.mT).exp()], -1)


def one_hot(k, keys):
    """Return the rows that write the pairs k (B, H, n, D), the last of all keys: (B, H, n, D + number of keys)."""
    hot = F.pad(torch.eye(k.shape[2], dtype=k.dtype, device=k.device), (k.shape[-1] + keys.shape[2] - k.shape[2], 0))
    return hot.expand(*k.shape[:2], *hot.shape)               # a negative pad crops pairs from before the first key


def grown(W, rows):
    """Return matrices with `rows` rows each; the new rows are zero."""
    return tuple(F.pad(w, (0, 0, 0, n - w.shape[-2])) if n > w.shape[-2] else w for w, n in zip(W, rows))


def with_keys(state, k, firsts):
    """Return an omega.State with room for the keys k: a row for each in the matrices that read phi, the `firsts`."""
    keys = torch.cat([state.keys, k], 2)
    rows = [k.shape[-1] + keys.shape[2]] * firsts + [w.shape[-2] for w in state.W[firsts:]]
    return state._replace(keys=keys, **{name: grown(getattr(state, name), rows) for name in ("M0", "W", "S")})
