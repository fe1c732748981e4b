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

from memory import once_differentiable

# a new map needs its lines in features_dim, Features.__init__ and forward, models.properties and models.idle, test_phi_inner and test_all.EQUAL
FEATURES = ("none", "elementwise", "monomial", "sketch", "exp")


def features_dim(kind, dim, degree, sketch_dim=0):
    """E, the number of features of phi(x) for x of `dim` numbers; for `exp` those that are written out (degree 1)."""
    if kind == "monomial":
        return math.comb(dim + degree, degree)
    if kind == "sketch":
        return 1 + dim + sketch_dim
    return dim                                                # none, elementwise, exp


def monomial_table(dim, degree):
    """Of each monomial of degree <= p, in the order of Monomials: its degree, and its multinomial coefficient in (x . y)^degree.

    On the CPU, also where a model begins on the meta device.
    """
    index = list(combinations_with_replacement(range(dim + 1), degree))          # p factors out of (1, x); factor 0 is the 1
    degrees = [degree - i.count(0) for i in index]
    repeats = [math.prod(math.factorial(i.count(j)) for j in set(i) - {0}) for i in index]
    return torch.tensor(degrees, device="cpu"), torch.tensor([math.factorial(n) / r for n, r in zip(degrees, repeats)], device="cpu")


class Degree2(torch.autograd.Function):
    """Monomials of degree 2 as gathers, for torch.compile and for few tokens: x_i x_j scale[its degree] root for i <= j.

    (..., n, T) -> (..., E, T), n = 1 + D, as Monomials, to the bit.

    In the gradient a row of dx is a sum of n products: g of (i, j) times x_j, and twice that of x_i^2.
    """

    @staticmethod
    def forward(ctx, x, scale, degrees, root):
        i, j = torch.triu_indices(x.shape[-2], x.shape[-2], device=x.device)
        ctx.save_for_backward(x, scale, degrees, root)
        return x[..., i, :] * x[..., j, :] * (scale[degrees] * root)[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, scale, degrees, root = ctx.saved_tensors
        n = x.shape[-2]
        i, j = torch.triu_indices(n, n, device=x.device)
        a = torch.arange(n, device=x.device)
        low, high = torch.minimum(a[:, None], a), torch.maximum(a[:, None], a)
        place = low * (2 * n - 1 - low) // 2 + high           # (n, n): where the product of two rows lies
        twice = torch.eye(n, dtype=x.dtype, device=x.device) + 1
        weight = (scale[degrees] * root)[place] * twice
        dx = (g[..., place, :] * (weight[..., None] * x[..., None, :, :])).sum(-2)
        sums = (g * x[..., i, :] * x[..., j, :]).transpose(0, -2).flatten(1).sum(-1) * root
        return dx, torch.zeros_like(scale).index_add(0, degrees, sums), None, None


class Monomials(torch.autograd.Function):
    """All products of p factors out of (1, x), each once, times scale[its degree] * root: (..., n, T) -> (..., E, T), n = 1 + D.

    x has ones in its first row. The products of p factors that begin with x_i are x_i times those of p - 1 factors out of x_i, x_{i+1}, ..,
    which are the last ones of the shorter list: n broadcast products a degree. Feature-major, so that they run along the T tokens; gathers, or
    matrix products with one-hot matrices, take longer on a CPU. Differentiable once, in x and scale.
    """

    @staticmethod
    def forward(ctx, x, scale, degrees, root, p):
        root = root[:, None]
        weight, levels, n = scale[degrees][:, None] * root, [x], x.shape[-2]         # levels: the products of 1, 2, .. factors
        out = x * weight if p == 1 else None
        for factors in range(2, p + 1):
            out = x.new_empty(*x.shape[:-2], math.comb(n + factors - 1, factors), x.shape[-1])
            for i, tail, rows in blocks(n, factors):
                torch.mul(x[..., i: i + 1, :], levels[-1][..., tail, :], out=out[..., rows, :])
                if factors == p:                              # while it is in the cache
                    out[..., rows, :].mul_(weight[rows])
            levels.append(out)
        ctx.save_for_backward(scale, degrees, root, weight, *levels[:max(1, p - 1)])
        ctx.p = p
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (scale, degrees, root, weight, *levels), p = ctx.saved_tensors, ctx.p
        x, n = levels[0], levels[0].shape[-2]
        # dscale is summed before scaling, not divided out of scaled sums: a scale may be 0
        few = math.comb(n + p - 2, p - 1) if p > 1 else n     # the first: products of a 1 and p - 1 factors, whose degrees vary
        sums = (g[..., :few, :] * levels[-1] * root[:few]).transpose(0, -2).flatten(1).sum(-1)
        dscale = torch.zeros_like(scale).index_add(0, degrees[:few], sums)
        if p == 1:
            return g * weight, dscale, None, None, None
        dx = torch.zeros_like(x)
        for factors in range(p, 1, -1):
            level = levels[factors - 2]
            d_level = torch.zeros_like(level)
            for i, tail, rows in blocks(n, factors):
                a, part = x[..., i: i + 1, :], g[..., rows, :]
                if factors == p:
                    part = part * (root if i else weight)[rows]                  # of i = 0 degrees vary; of the others scale[p] comes below
                sums = (level[..., tail, :] * part).sum(-2, keepdim=True)
                if factors == p and i:                        # all of degree p
                    dscale[p] += (a * sums).sum()
                    a, sums = a * scale[p], sums * scale[p]
                d_level[..., tail, :].addcmul_(a, part)
                dx[..., i: i + 1, :] += sums
            g = d_level
        return dx + g, dscale, None, None, None


def blocks(n, factors):
    """For each i of n factors: i; where the products of factors - 1 factors from i on lie among theirs; where those that begin with i lie."""
    at, before = 0, math.comb(n + factors - 2, factors - 1)
    for i in range(n):
        size = math.comb(n - i + factors - 2, factors - 1)
        yield i, slice(before - size, before), slice(at, at + size)
        at += size


class Features(nn.Module):
    """phi, applied to the last dimension: (..., n, D) -> (..., n, E). `inner(x, y)` gives phi(x) phi(y)^T, by the kernel where there is one.

    kind     one of FEATURES                          degree      p >= 1, for monomial and elementwise
    sketch_dim  features of the degree-2 sketch       seed        of the sketch's fixed random matrices, the same in every layer
    ValueError for an unknown kind, a degree below 1, and a sketch without features of degree 2.
    """

    def __init__(self, kind, dim, degree=2, sketch_dim=0, seed=0):
        super().__init__()
        if kind not in FEATURES:
            raise ValueError(f"unknown features {kind!r}; choose one of {', '.join(FEATURES)}")
        if degree < 1:
            raise ValueError(f"the degree of features is at least 1, not {degree}")
        if kind == "sketch" and sketch_dim < 1:
            raise ValueError(f"the sketch_dim of features is at least 1, not {sketch_dim}")
        self.kind, self.dim, self.degree = kind, dim, degree
        self.out_dim = features_dim(kind, dim, degree, sketch_dim)
        if kind in ("elementwise", "monomial", "sketch"):
            top = 2 if kind == "sketch" else degree
            self.scale = nn.Parameter(torch.zeros(top + 1))
        if kind == "monomial":
            degrees, multinomial = monomial_table(dim, degree)
            self.register_buffer("degrees", degrees, persistent=False)
            self.register_buffer("multinomial", multinomial, persistent=False)
        if kind == "sketch":                                  # (Ax)(Bx)/sqrt(m) . (Ay)(By)/sqrt(m) is (x . y)^2 on average
            self.seed = seed
            self.register_buffer("sketch", torch.zeros(2, dim, sketch_dim))
        self.init()

    @torch.no_grad()
    def init(self):
        """Learned scales: s_i^2 = a_i starts at 1/i!, the Taylor series of exp (Eq 5), and cannot turn negative; and the fixed sketch."""
        if hasattr(self, "scale"):
            self.scale.copy_(torch.tensor([1 / math.sqrt(math.factorial(i)) for i in range(len(self.scale))], device="cpu"))
        if self.kind == "sketch":
            g = torch.Generator().manual_seed(self.seed)
            self.sketch.copy_(torch.randn(self.sketch.shape, generator=g, device="cpu") / self.sketch.shape[-1] ** 0.25)

    def _apply(self, fn, recurse=True):
        """Module.to, .cuda, ..; after Module.to_empty the tables, which no checkpoint has, are filled again."""
        super()._apply(fn, recurse)
        if self.kind == "monomial":                           # others: a backward may still need those it has
            self.move_tables(self.degrees.device)
        return self

    @torch.inference_mode(False)                              # or training could not use what text being generated has moved
    def move_tables(self, device):
        """The tables anew, on this device."""
        tables = zip((self.degrees, self.multinomial), monomial_table(self.dim, self.degree))
        self.degrees, self.multinomial = (values.to(device, table.dtype) for table, values in tables)

    def forward(self, x):
        """phi(x): (..., n, D) -> (..., n, E); monomials lie feature-major in memory, (..., E, n). ValueError for `exp`."""
        if self.kind == "exp":
            raise ValueError("exp features are infinitely many and cannot be written out; omega() has them, by their kernel")
        if self.kind == "none":
            return x
        s = self.scale
        if self.kind == "elementwise":                        # s_0 + s_1 x + s_2 x^2 ..: E = D, no products of variables
            return sum(s[i] * x ** i for i in range(self.degree + 1))
        if self.kind == "sketch":
            return torch.cat([s[0].expand(*x.shape[:-1], 1), s[1] * x, (s[2] * x) @ self.sketch[0] * (x @ self.sketch[1])], -1)
        if self.degrees.device != x.device:                   # built under torch.device("cuda"), or loaded with assign=True
            self.move_tables(x.device)
        x = nn.functional.pad(x.mT, (0, 0, 1, 0), value=1.0)
        how = s, self.degrees, self.multinomial.sqrt()
        few = x.shape[-1] <= 16 and not torch.is_grad_enabled()                  # text being generated: there each call counts
        if self.degree == 2 and (few or torch.compiler.is_compiling()):
            return Degree2.apply(x, *how).mT
        return Monomials.apply(x, *how, self.degree).mT

    def inner(self, x, y):
        """phi(x) phi(y)^T: (..., n, D), (..., m, D) -> (..., n, m); a kernel is cheaper by E / D."""
        if self.kind == "exp":
            return (x @ y.mT).exp()                           # Eq 23
        if self.kind != "monomial":
            return self(x) @ self(y).mT
        dots, a = x @ y.mT, self.scale.square()
        out = a[self.degree]                                  # Horner: a_0 + d (a_1 + d (a_2 + ..))
        for i in reversed(range(self.degree)):
            out = out * dots + a[i]
        return out
