"""dot.py - DeepTransformers and Dot: the rule on the infinite features phi* of Eq 22 (ATLAS 4).

    phi*(q) . phi*(k) = exp(q . k)                                                           Eq 23

phi* cannot be formed, and need not be. A matrix that reads phi* is a sum of phi*(k_i)^T w_i, so it
can keep w_i in a row for each key. It grows with the text, like attention's cache:

    W = [M0; w_1; w_2; ..]   read by rows [q, exp(q . k_1), ..], written by one-hot rows

M0 reads q itself, which is the part of degree 1 (choice 19). With the dot loss, a matrix M0 = 0, a
window of 1 and gates of 1 this is Eq 26: y_t = sum of v_i exp(q_t . k_i). The rest of the rule is
that of chunks.py, without Newton-Schulz (which exp(k_i . k_j) would allow).
"""
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

import chunks
import layer
import memory
import omega
from memory import without_autocast


class State(NamedTuple):
    """An omega.State, and all keys so far."""
    M0: tuple
    W: tuple
    S: tuple
    k: torch.Tensor
    v: torch.Tensor
    gates: omega.Gates
    keys: torch.Tensor                    # (B, H, t, D)

    pos = omega.State.pos


def start(rule, phi, M0, batch, momentum=True):
    """Return the state before the first token. Arguments as in omega.start."""
    state = omega.start(rule, phi, M0, batch, momentum)
    return State(*state, keys=state.k)


def with_rows(rule, state, k):
    """Return the state with the keys k (B, H, T, D), and a row for each in what reads phi*."""
    keys = torch.cat([state.keys, k], 2)
    rows = keys.shape[3] + keys.shape[2]
    firsts = memory.firsts(rule.memory)

    def grow(matrices):
        grown = [F.pad(w, (0, 0, 0, rows - w.shape[-2])) for w in matrices[:firsts]]
        return (*grown, *matrices[firsts:])
    return state._replace(keys=keys, M0=grow(state.M0), W=grow(state.W), S=grow(state.S))


class Kernel:
    """What stands in for phi in chunks.py, which there needs inner products alone."""
    def inner(self, q, k, *_):
        return (q @ k.mT).exp()                                                          # Eq 23


def reading_rows(x, keys):
    """Return [x, exp(x . k_1), ..]: x (.., c, D), keys (.., t, D) -> (.., c, D + t)."""
    return torch.cat([x, (x @ keys.mT).exp()], -1)


def block_runner(rule, keys, T):
    """Return what chunks.run_all calls for a block; the last T of keys are since the boundary."""
    t, D = keys.shape[2:]
    keys = keys.flatten(0, 1)
    ends = iter([t - T + block.stop for block in chunks.blocks(rule, T)])

    def one_block(rule, kernel, q, k, v, gates, mix, M0, anchor, W, S, newton):
        if mix is None:
            with without_autocast(q):
                mix = chunks.coefficients(rule, gates)
        # pair i of n writes row D + end - n + i; those from before the text have a gate of 0
        end, n = next(ends), k.shape[1]
        one_hot = torch.eye(n, dtype=k.dtype, device=k.device)
        one_hot = F.pad(one_hot, (D + end - n, t - end))
        xq = reading_rows(q, keys)
        xk = reading_rows(k, keys)
        one_hot, xk, k, v = (chunks.copies(rule, a) for a in (one_hot[None], xk, k, v))
        v = memory.target(rule.memory, rule.loss, k, v)
        xd = chunks.gradients(rule, kernel, mix, k, v, xk, M0, anchor, W, S)
        firsts = memory.firsts(rule.memory)
        # read by kernel rows, written by one-hot rows
        written = [(one_hot, d) for _, d in xd[:firsts]] + xd[firsts:]
        W_end, S_end = chunks.write(rule, mix, written, W, S, newton)
        return chunks.read(rule, kernel, mix, q, k, xq, M0, W, S, None, xd), W_end, S_end
    return one_block


def run(rule, phi, q, k, v, gates, state):
    """Run the rule. Arguments and results as in omega.omega_ref, but for the state."""
    state = with_rows(rule, state, k)
    runner = block_runner(rule, state.keys, state.pos + k.shape[2])
    y, state, _ = chunks.run_all(rule, Kernel(), q, k, v, gates, state, runner)
    return y, state


def weights(rule, phi, state):
    """Return the memory and the momentum after the last token, as chunks.weights does."""
    state = with_rows(rule, state, state.k[:, :, :0])
    runner = block_runner(rule, state.keys, state.pos)
    return chunks.weights(rule, Kernel(), state, runner)


class DotMemory(layer.Memory):
    """The layer with the features phi*."""
    engine = sys.modules[__name__]
    features = ("exp",)

    def start(self, x):
        state = super().start(x)
        return state._replace(fast=State(*state.fast, keys=state.fast.k))

    def frozen(self, state, reset=None):
        return (*super().frozen(state, reset), state.fast.keys)

    def recall(self, q, frozen):
        *W, keys = frozen
        return memory.apply(self.config.memory, W, reading_rows(q, keys), q, self.rule.norm)


torch.serialization.add_safe_globals([State])
