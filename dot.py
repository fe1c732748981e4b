"""dot.py - DeepTransformers and Dot: the rule on the infinite features phi* of Eq 22 (ATLAS 4).

    phi*(q) . phi*(k) = exp(q . k)                                                           Eq 23

phi* has infinitely many features, but nobody needs them one by one. A matrix that reads phi* learns
by adding outer products phi*(k_i)^T d_i. So it always is a sum of phi*(k_i)^T w_i, and it is enough
to keep w_i in a row for each key. It grows with the text, like attention's cache:

    W = [M0; w_1; w_2; ..]   read by rows [q, exp(q . k_1), ..]: q W = q M0 + sum_i exp(q . k_i) w_i

The gradient of pair i changes w_i alone, so pairs write with one-hot rows in the place of phi*. M0
reads q itself, which is the part of degree 1 (choice 19).

With the dot loss, a matrix M0 = 0, a window of 1 and gates of 1 this is Eq 26: y_t = sum of
v_i exp(q_t . k_i). The rest of the rule is that of chunks.py, without Newton-Schulz. (Its Gram
matrix could be computed from exp(k_i . k_j), but here is no code for that.)
"""
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

import chunks
import layer
import memory
import omega


class State(NamedTuple):
    """An omega.State, and all keys so far."""
    M0: tuple
    W: tuple
    S: tuple
    k: torch.Tensor
    v: torch.Tensor
    gates: omega.Gates
    keys: torch.Tensor                    # (B, H, t, D) of all t tokens so far

    pos = omega.State.pos


def start(rule, phi, M0, batch, momentum=True):
    """Return the state before the first token. Arguments as in omega.start."""
    state = omega.start(rule, phi, M0, batch, momentum)
    return State(*state, keys=state.k)


def with_rows(rule, state, k):
    """Return the state with the new keys k (B, H, T, D), and with a row of 0 for each of them in
    the matrices that read phi*."""
    keys = torch.cat([state.keys, k], 2)
    rows = keys.shape[3] + keys.shape[2]                      # D + t
    firsts = memory.firsts(rule.memory)

    def grow(matrices):
        grown = [F.pad(w, (0, 0, 0, rows - w.shape[-2])) for w in matrices[:firsts]]
        return (*grown, *matrices[firsts:])
    return state._replace(keys=keys, M0=grow(state.M0), W=grow(state.W), S=grow(state.S))


class Kernel:
    """What stands in for phi in chunks.py, for keys (N, t, D)."""

    def __init__(self, keys):
        self.keys = keys

    def __call__(self, x):
        return reading_rows(x, self.keys)

    def inner(self, q, k, *_):
        return (q @ k.mT).exp()                                                          # Eq 23


def reading_rows(x, keys):
    """Return [x, exp(x . k_1), ..]: x (.., c, D), keys (.., t, D) -> (.., c, D + t)."""
    return torch.cat([x, (x @ keys.mT).exp()], -1)


def chunk_runner(rule, keys, T):
    """Return the function that chunks.run_all calls for each chunk, in order. The last T of the
    keys are those since the boundary."""
    t, D = keys.shape[2:]
    # the number of keys at the end of each chunk
    ends = iter([t - T + min(begin + rule.chunk, T) for begin in range(0, T, rule.chunk)])

    def one_chunk(rule, kernel, q, k, v, gates, mix, M0, W, S, newton):
        if mix is None:
            mix = chunks.coefficients(rule, gates)
        learned = chunks.learn(rule, kernel, mix, k, v, M0, W, S)

        # the chunk's pairs are those of the last n of the first `end` keys, and each writes to the
        # row of its key. Where n exceeds `end`, pairs from before the text have gates of 0
        end, n = next(ends), k.shape[1]
        one_hot = torch.eye(n, dtype=k.dtype, device=k.device)
        one_hot = F.pad(one_hot, (D + end - n, t - end))[None]               # (1, n, D + t)

        # matrices that read phi* are read by rows of the kernel, but written by one-hot rows
        firsts = memory.firsts(rule.memory)
        written = [a._replace(x=one_hot) for a in learned[:firsts]] + learned[firsts:]
        W_end, S_end = chunks.write(rule, mix, written, W, S, newton)
        return chunks.read(rule, kernel, mix, q, k, M0, W, S, learned), W_end, S_end
    return one_chunk


def run(rule, phi, q, k, v, gates, state):
    """Run the rule. Arguments and results are as in omega.omega_ref, but the state is a `State` of
    this file."""
    state = with_rows(rule, state, k)
    runner = chunk_runner(rule, state.keys, state.pos + k.shape[2])
    kernel = Kernel(state.keys.flatten(0, 1))
    y, state, _ = chunks.run_all(rule, kernel, q, k, v, gates, state, runner)
    return y, state


def weights(rule, phi, state):
    """Return the memory and the momentum after the last token, as chunks.weights does."""
    state = with_rows(rule, state, state.k[:, :, :0])
    runner = chunk_runner(rule, state.keys, state.pos)
    return chunks.weights(rule, Kernel(state.keys.flatten(0, 1)), state, runner)


class DotMemory(layer.Memory):
    """The memory layer with the features phi*."""
    engine = sys.modules[__name__]

    def start(self, x):
        state = super().start(x)
        return state._replace(fast=State(*state.fast, keys=state.fast.k))

    def frozen(self, state, reset=None):
        return (*super().frozen(state, reset), state.fast.keys)

    def recall(self, q, frozen):
        *W, keys = frozen
        return memory.apply(self.config.memory, W, reading_rows(q, keys), q, self.rule.norm)


torch.serialization.add_safe_globals([State])
