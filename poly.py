"""poly.py - the feature map phi of keys and queries (ATLAS section 3.1): more features, more pairs a memory can hold.

    phi(x) . phi(y) = sum_i s_i^2 (x . y)^i,   i = 0 .. p          ATLAS Eq 5, with s_i = sqrt(a_i) on each side  (choice 7)

A linear memory of E features stores at most E pairs exactly (Prop 2), and E = C(D + p, p) for all monomials of degree <= p.
The other maps are here to be compared with it: `elementwise` powers do not raise the capacity at all, `sketch` approximates the
degree-2 monomials in a chosen number of features, and `exp` is the infinite series of Eq 22, known by its inner products only.
Nothing is normalised here: keys and queries have unit length before they arrive (choice 8).
"""
import math
from itertools import combinations_with_replacement

import torch
from torch import nn

FEATURES = ("none", "elementwise", "monomial", "sketch", "exp")


def features_dim(kind, dim, degree, sketch_dim=0):
    """E, the number of features of phi(x) for x of `dim` numbers; for `exp` those that are written out (degree 1)."""
    if kind == "monomial":
        return math.comb(dim + degree, degree)
    if kind == "sketch":
        return 1 + dim + sketch_dim
    return dim                                                # none, elementwise, exp


def monomial_table(dim, degree):
    """For one degree: the variables of each monomial (n, degree), and its multinomial coefficient in (x . y)^degree (n,)."""
    index = list(combinations_with_replacement(range(dim), degree))
    repeats = [math.prod(math.factorial(i.count(j)) for j in set(i)) for i in index]
    return torch.tensor(index), torch.tensor([math.factorial(degree) / r for r in repeats])


class Features(nn.Module):
    """phi, applied to the last dimension: (..., D) -> (..., E). `inner(x, y)` gives phi(x) phi(y)^T without forming phi.

    kind     one of FEATURES                          degree      p, for monomial and elementwise
    sketch_dim  features of the degree-2 sketch       seed        of the sketch's fixed random matrices
    """

    def __init__(self, kind, dim, degree=2, sketch_dim=0, seed=0):
        super().__init__()
        if kind not in FEATURES:
            raise ValueError(f"unknown features {kind!r}; choose one of {', '.join(FEATURES)}")
        self.kind, self.dim, self.degree = kind, dim, degree
        self.out_dim = features_dim(kind, dim, degree, sketch_dim)
        if kind in ("elementwise", "monomial", "sketch"):
            top = 2 if kind == "sketch" else degree
            # learned scales; s_i^2 = a_i starts at 1/i!, the Taylor series of exp (Eq 5), and cannot turn negative
            self.scale = nn.Parameter(torch.tensor([1 / math.sqrt(math.factorial(i)) for i in range(top + 1)]))
        if kind == "monomial":
            for i in range(2, degree + 1):                    # one-hot matrices that pick the j-th variable of each monomial
                index, multinomial = monomial_table(dim, i)
                pick = nn.functional.one_hot(index, dim).permute(1, 2, 0).to(self.scale.dtype)           # (i, dim, n)
                self.register_buffer(f"pick{i}", pick.contiguous(), persistent=False)
                self.register_buffer(f"multinomial{i}", multinomial, persistent=False)
        if kind == "sketch":                                  # (Ax)(Bx)/sqrt(m) . (Ay)(By)/sqrt(m) is (x . y)^2 on average
            g = torch.Generator().manual_seed(seed)
            self.register_buffer("sketch", torch.randn(2, dim, sketch_dim, generator=g) / sketch_dim ** 0.25)

    def forward(self, x):
        """phi(x): (..., D) -> (..., E)."""
        if self.kind in ("none", "exp"):
            return x
        s = self.scale
        if self.kind == "elementwise":                        # s_0 + s_1 x + s_2 x^2 ..: E = D, no products of variables
            return sum(s[i] * x ** i for i in range(self.degree + 1))
        parts = [s[0].expand(*x.shape[:-1], 1), s[1] * x][: self.degree + 1 if self.kind == "monomial" else 2]
        if self.kind == "sketch":
            parts.append(s[2] * (x @ self.sketch[0]) * (x @ self.sketch[1]))
        else:
            for i in range(2, self.degree + 1):
                # a product with a one-hot matrix is an index_select whose backward is a product too, not a slow scatter
                pick, multinomial = getattr(self, f"pick{i}"), getattr(self, f"multinomial{i}")
                term = x @ (s[i] * multinomial.sqrt() * pick[0])
                for variable in pick[1:]:
                    term = term * (x @ variable)
                parts.append(term)
        return torch.cat(parts, -1)

    def inner(self, x, y):
        """phi(x) phi(y)^T: (..., n, D), (..., m, D) -> (..., n, m), through the kernel where there is one (cheaper by E / D)."""
        if self.kind == "exp":
            return (x @ y.mT).exp()                           # Eq 23
        if self.kind != "monomial":
            return self(x) @ self(y).mT
        dots, a = x @ y.mT, self.scale.square()
        out = a[self.degree] * dots                           # Horner: a_0 + d (a_1 + d (a_2 + ..))
        for i in range(self.degree - 1, 0, -1):
            out = (out + a[i]) * dots
        return out + a[0]
