"""What a block of the 340m shape moves, computes and keeps on an H200, forward and backward, counted without one.

    python results/gpu_bytes.py atlas --chunk 256 --muon-every 256 [--memory-dtype bfloat16] [--ns-dtype bfloat16]         a minute each
    python results/gpu_bytes.py omeganet --seq-len 16384                                                       of 2 x 16384 tokens, not 8 x 4096
    python results/gpu_bytes.py atlas --chunk 64 --muon-every 1 --no-momentum                                  as with --matmul highest

Everything that models.LM.compile_memory compiles is lowered by inductor as for an H200: its kernels, what each reads and writes, and Triton compiles
them for sm_90, each in one of its configurations. What is left eager is counted call by call; kernels and calls are launches. Bytes over 4.8 TB/s,
products over 300 TFLOP/s if that takes longer, are a bound on time, for 8 x 4096 tokens, where no kernel has to wait. Kept is what a block leaves
for its backward, without --remat, and the peak the most that it holds in between; of other batches, in proportion. (It runs on a CPU, with a
quarter of these tokens; so the first chunk, which finds no W yet, counts four times: of chunks of 256 that is 4 % too little. SDPA is not counted.
The time to compile is that of the first step less the second's.) Needs a build of torch for CUDA and its Triton, but no GPU; written for torch
2.14 and 2.15, whose insides it uses.
"""
import argparse
import copy
import os
import re
import sys
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch._inductor.config
import torch._inductor.scheduler
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import chunks
import models
import muon
import omega

BANDWIDTH, PRODUCTS = 4.8e12, 3e14                            # bytes and FLOPs a second
GPU = torch.device("cuda:0")
H200 = dict(multi_processor_count=132, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
            warp_size=32)
PRODUCT = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}       # where the factors are among the arguments


@contextmanager
def pretended_gpu():
    """Within, torch.cuda says what inductor asks of an H200."""
    props = SimpleNamespace(name="NVIDIA H200", minor=0, total_memory=140 * 2**30, gcnArchName="", L2_cache_size=50 * 2**20, **H200)
    says = dict(is_available=True, device_count=1, current_device=0, get_device_properties=props, get_device_capability=(9, 0), _lazy_init=None,
                is_initialized=True, get_device_name=props.name)
    with mock.patch.multiple(torch.cuda, **{name: (lambda *_, value=value: value) for name, value in says.items()}):
        yield


def flops(name, args):
    at = PRODUCT.get(name)
    return 0 if at is None else 2 * args[at].numel() * args[at + 1].shape[-1]


def compile_kernels(code):
    """Has Triton compile the kernels of inductor's `code` -> how many there are."""
    kernels = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S)
    for name, source in kernels:
        kernel = getattr(PyCodeCache.load(source), name)
        kernel._precompile_config(kernel.configs[0])
    return len(kernels)


def moved(node):
    """Bytes that one of inductor's kernels reads and writes; not what it only waits for, as for a tensor that it overwrites."""
    sizes, deps = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True), node.read_writes
    real = {dep.name for dep in (*deps.reads, *deps.writes) if node.is_extern() or isinstance(dep, MemoryDep)}
    return sum(size for name, size in sizes.items() if name in real)


def lowered(graph, inputs):
    """A graph of aten's, as inductor makes kernels of it: bytes of products, bytes of all else, FLOPs, launches; and how many of its
    kernels are Triton's.
    """
    graph, fake = copy.deepcopy(graph), detect_fake_mode(inputs)
    on_gpu = lambda a: GPU if isinstance(a, torch.device) else a
    for node in graph.graph.nodes:
        node.meta, node.kwargs = {}, {key: on_gpu(a) for key, a in node.kwargs.items()}
    with fake:
        inputs = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=GPU) for a in inputs]
    propagate = lambda: FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
    with V.set_fake_mode(fake):
        propagate()
        view_to_reshape(graph)
        post_grad_passes(graph, False)
        propagate()
        value = lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else a
        work = sum(flops(node.target.name().split("::")[1].split(".")[0], [value(a) for a in node.args])
                   for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        kernels = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(kernels), V.set_debug_handler(DebugContext()), torch._inductor.config.patch(omega.AGAIN):
            kernels.run(*inputs)
            code = kernels.codegen()[0].value
            nodes = [node for node in kernels.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
            sizes = Counter()
            for node in nodes:
                sizes[node.is_extern()] += moved(node)
    return (sizes[True], sizes[False], work, len(nodes)), compile_kernels(code)


class Calls(TorchDispatchMode):
    """The same of what is not compiled; and how often each graph is called."""
    ignore_compile_internals = classmethod(lambda cls: True)

    def __init__(self):
        super().__init__()
        self.inside, self.eager, self.graphs, self.kernels = False, Counter(), [], 0
        self.alive, self.bytes, self.most = {}, 0, 0

    def backend(self, graph, inputs):
        def compiler(part, inputs):
            with pretended_gpu():
                sizes, kernels = lowered(part, inputs)
            entry = [0, sizes]
            self.graphs.append(entry)
            self.kernels += kernels

            def call(*args):
                entry[0] += 1
                self.inside = True
                try:
                    return part(*args)
                finally:
                    self.inside = False
            return make_boxed_func(call)
        return aot_module_simplified(graph, inputs, fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table(),
                                     partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True)

    def notice(self, storage):
        """Counts a storage's bytes for as long as it is there."""
        size, known = storage.nbytes(), self.alive.get(storage._cdata)
        if known is None or known() is None:
            self.alive[storage._cdata] = weakref.ref(storage)
            weakref.finalize(storage, lambda: setattr(self, "bytes", self.bytes - size))
            self.bytes += size
            self.most = max(self.most, self.bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._schema.name.split("::")[1]
        tensors = lambda tree: [a for a in torch.utils._pytree.tree_leaves(tree) if isinstance(a, torch.Tensor)]
        for a in tensors(out):
            self.notice(a.untyped_storage())
        if self.inside or name.startswith(("empty", "new_empty")):               # counted, or nothing to do
            return out
        given = {a.untyped_storage()._cdata for a in tensors(args)}
        changes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if not changes and all(a.untyped_storage()._cdata in given for a in tensors(out)):       # a view
            return out
        distinct = lambda a: a.element_size() * torch.Size([n for n, stride in zip(a.shape, a.stride()) if stride]).numel()
        read = args[1:] if name in ("copy_", "zero_", "fill_") else args         # what is in kwargs is written: out=
        self.eager[name in PRODUCT] += sum(map(distinct, tensors((read, out))))
        self.eager["flops"] += flops(name, args)
        self.eager["launches"] += 1
        return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=models.PRESETS)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--muon-every", type=int, default=256)
    parser.add_argument("--no-momentum", dest="momentum", action="store_false")
    parser.add_argument("--memory-dtype", default="float32")
    parser.add_argument("--ns-dtype", default="float32")
    parser.add_argument("--seq-len", type=int, default=4096)
    args, share = vars(parser.parse_args()), 4                # a quarter of the tokens
    T = args.pop("seq_len") // share
    B = 8 * 1024 // T
    for bound in (chunks.AT_ONCE, omega.PIECE, omega.TILE):
        bound["cpu"] = bound["compiled"] = bound["cuda"]
    muon.exact_products = chunks.exact_products = lambda device: False           # TF32
    triton_helpers.set_driver_to_gpu = lambda: None           # every kernel's source asks for the one that is active
    torch._refs._strength_reduce_integer = lambda n: torch.int32                 # a CPU has no arange of 16 bits
    DeviceProperties.create = classmethod(lambda cls, device: cls(type="cuda", index=0, cc=90, **H200))
    torch._inductor.scheduler.has_triton = lambda *_: True     # torch 2.14 asks the device, by a name of its own
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_device_interface=lambda: torch.cuda))
    preset = args.pop("model")
    args |= {} if args.pop("momentum") else dict(momentum=False)
    model = models.build(preset, "340m", n_layer=1, **args)
    block, x, calls = model.blocks[0], torch.randn(B, T, 1024, requires_grad=True), Calls()
    model.compile_memory(backend=calls.backend, fullgraph=True)

    def step():
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            y = block(x)[0]
        kept = calls.bytes
        y.backward(y.detach())
        block.zero_grad(), setattr(x, "grad", None)
        return time.perf_counter() - start, kept

    first, _ = step()                                         # compiles
    for entry in calls.graphs:
        entry[0] = 0
    with calls:
        second, kept = step()
    runs = calls.graphs + [(1, [calls.eager[key] for key in (True, False, "flops", "launches")])]
    total = lambda *which: share * sum(n * sizes[i] for n, sizes in runs for i in which)
    seconds = share * sum(n * (max(products / BANDWIDTH, flops / PRODUCTS) + rest / BANDWIDTH) for n, (products, rest, flops, _) in runs)
    GiB = lambda n: f"{share * n / 2**30:.1f} GiB"
    print(f"{' '.join(sys.argv[1:])}: {total(0, 1) / 1e9:.1f} GB, of which eager {share * (calls.eager[True] + calls.eager[False]) / 1e9:.1f}; "
          f"{total(2) / 1e12:.2f} TFLOP; {1000 * seconds:.1f} ms a block, at most {total(3)} launches; kept {GiB(kept)}, peak {GiB(calls.most)}; "
          f"{calls.kernels} kernels of Triton's, compiled in {first - second:.0f} s")


if __name__ == "__main__":
    main()
