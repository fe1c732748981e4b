"""poly.py - the feature map phi of keys and queries (ATLAS section 3.1).

    exp(q . k) = 1 + q.k + (q.k)^2 / 2! + ..                               Eq 4
    phi(q) . phi(k) = a_0 + a_1 q.k + .. + a_p (q.k)^p                     Eq 5

A linear memory of head dim D stores D pairs (Prop 1); on phi it stores E, the number of features
(Prop 2).

    none          phi(x) = x
    monomial      all monomials of degree <= p, E = C(D + p, p). They give Eq 5 exactly, with
                  a_i = s_i^2, where s_i is a learned scale (choice 7)
    elementwise   sum_i s_i x^i, coordinate by coordinate. E = D, so capacity does not grow
    sketch        degree 2 with fewer features. Those of degree 2 are products of two random
                  projections; their inner products are right on average

q and k have unit length before phi, which does not normalise (choice 8). dot.py computes with the
infinite phi* of Eq 22.
"""
import math
from functools import reduce
from itertools import combinations_with_replacement

import torch
from torch import nn

from memory import without_autocast

FEATURES = ("none", "elementwise", "monomial", "sketch")


def features_dim(kind, dim, degree, sketch_dim=79):
    """Return E for inputs of `dim` numbers: for monomials C(D + p, p) (Prop 2). The default of
    sketch_dim makes E a multiple of 16 if dim is one."""
    if kind == "monomial":
        return math.comb(dim + degree, degree)
    if kind == "sketch":
        return 1 + dim + sketch_dim
    return dim


def selections(dim, p):
    """Return p matrices (dim, n) that select the factors of the n monomials of degree p.

    Column j of the i-th matrix has one number, in the row of the i-th factor of monomial j. It is
    1, but in the first matrix it is the multinomial coefficient of the monomial. Let A, B, .. be
    the roots of the matrices, entry by entry. Then x A * x B * .. are the monomials of x, each
    times the root of its coefficient, and their inner product with those of y is (x . y)^p."""
    choices = list(combinations_with_replacement(range(dim), p))
    maps = torch.zeros(p, dim, len(choices))
    for n, factors in enumerate(choices):
        same = math.prod(math.factorial(factors.count(i)) for i in set(factors))
        coefficient = math.factorial(p) / same                # the multinomial coefficient
        for position, i in enumerate(factors):
            maps[position, i, n] = coefficient if position == 0 else 1
    return maps


class Features(nn.Module):
    """The map phi: (.., dim) -> (.., out_dim), where out_dim is E. Each degree i has a learned
    scale s_i, which starts at 1 / sqrt(i!). For the kind "exp" there is no such map: dot.py
    computes with its kernel."""

    def __init__(self, kind, dim, degree=2, sketch_dim=79, seed=0):
        super().__init__()
        self.kind, self.dim, self.degree, self.seed = kind, dim, degree, seed
        self.out_dim = features_dim(kind, dim, degree, sketch_dim)
        if kind not in ("none", "exp"):
            self.scale = nn.Parameter(torch.empty(degree + 1))
        if kind == "sketch":
            self.register_buffer("sketch", torch.empty(2, dim, sketch_dim))
        self.init()

    def init(self):
        """Set the starting values. A seed always gives the same sketch, on every device."""
        with torch.no_grad():
            if self.kind not in ("none", "exp"):
                factorials = [math.factorial(i) for i in range(self.degree + 1)]
                self.scale.copy_(torch.tensor(factorials) ** -0.5)
            if self.kind == "sketch":
                generator = torch.Generator().manual_seed(self.seed)
                drawn = torch.randn(self.sketch.shape, generator=generator, device="cpu")
                self.sketch.copy_(drawn / self.sketch.shape[2] ** 0.25)
            if self.kind == "monomial":
                for p in range(2, self.degree + 1):
                    maps = selections(self.dim, p).to(self.scale.device)
                    self.register_buffer(f"degree{p}", maps)

    def forward(self, x):
        """Return phi(x): (.., dim) -> (.., out_dim)."""
        if self.kind == "none":
            return x
        s = self.scale.to(x.dtype)
        if self.kind == "elementwise":
            return sum(s[i] * x ** i for i in range(self.degree + 1))

        parts = [s[0] * torch.ones_like(x[..., :1]), s[1] * x]               # Eq 5: degree 0, 1, ..
        for p in range(2, self.degree + 1):
            if self.kind == "sketch":
                maps = self.sketch.to(x.dtype)
            else:                         # a root has the digits of x's type
                maps = getattr(self, f"degree{p}").to(x.dtype).sqrt()
            with without_autocast(x):
                factors = [x @ a for a in maps]
            parts.append(s[p] * reduce(torch.mul, factors))
        return torch.cat(parts, -1)

    def inner(self, x, y, px=None, py=None):
        """Return phi(x) phi(y)^T: x (.., n, dim), y (.., m, dim) -> (.., n, m). For monomials Eq 5
        computes it from x and y; other kinds need px = phi(x) and py = phi(y)."""
        if self.kind != "monomial":
            return px @ py.mT
        dots = x @ y.mT
        a = self.scale.to(x.dtype).square()
        out = a[self.degree]
        for i in reversed(range(self.degree)):                               # Horner's scheme
            out = out * dots + a[i]
        return out
