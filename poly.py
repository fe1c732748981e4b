"""poly.py - the feature map phi of keys and queries (ATLAS section 3.1).

    exp(q . k) = 1 + q.k + (q.k)^2 / 2! + ...,      phi(q) . phi(k) = a_0 + a_1 q.k + .. + a_p (q.k)^p         Eq 4, 5

A linear memory of head dim D stores D pairs (Prop 1); on phi it stores E, the number of features (Prop 2).

    none          phi(x) = x
    monomial      all monomials of degree <= p, E = C(D + p, p): Eq 5 exactly, with a_i = s_i^2     (choice 7)
    elementwise   sum_i s_i x^i, coordinate by coordinate. E = D, so capacity does not grow
    sketch        degree 2 with fewer features: products of two random projections, right on average

q and k have unit length before phi, which does not normalise (choice 8). The infinite phi* of Eq 22 is in dot.py.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

FEATURES = ("none", "elementwise", "monomial", "sketch")


def features_dim(kind, dim, degree, sketch_dim=79):
    """Return E for inputs of `dim` numbers: C(D + p, p) monomials (Prop 2)."""
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
        self.seed = seed
        if kind in ("elementwise", "monomial", "sketch"):
            self.scale = nn.Parameter(torch.empty(degree + 1))
        if kind == "sketch":
            self.register_buffer("sketch", torch.empty(2, dim, sketch_dim))
        self.init()

    def init(self):
        """Set the starting values. The sketch is the same for each seed, and saved with the model."""
        with torch.no_grad():
            if hasattr(self, "scale"):
                self.scale.copy_(torch.tensor([math.factorial(i) ** -0.5 for i in range(self.degree + 1)]))
            if hasattr(self, "sketch"):
                drawn = torch.randn(self.sketch.shape, generator=torch.Generator().manual_seed(self.seed))
                self.sketch.copy_(drawn / self.sketch.shape[2] ** 0.25)

    def forward(self, x):
        """Return phi(x): (.., dim) -> (.., out_dim)."""
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
        """Return phi(x) phi(y)^T, by Eq 5 or from px = phi(x), py = phi(y); x (.., n, dim), y (.., m, dim)."""
        if self.kind != "monomial":
            return px @ py.mT
        dots, a = x @ y.mT, self.scale.to(x.dtype).square()
        out = a[self.degree]
        for i in reversed(range(self.degree)):                                   # Eq 5, by Horner's scheme
            out = out * dots + a[i]
        return out
