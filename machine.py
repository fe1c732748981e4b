"""machine.py - what the programs here need of the computer, and nothing of the paper: what a user is told and how a program ends, the processes of
torchrun and their signals, device and precision, CPU threads and memory.
"""
import argparse
import ctypes
import errno
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from muon import exact_products


# ---- what a user is told

class UserError(Exception):
    """A mistake of the user's, told in one line that names the remedy; scripts print it on stderr and exit with 2."""


class Halt(Exception):
    """Ends a run with one line and exit code 1: not the user's mistake, and the last checkpoint is intact."""


class Parser(argparse.ArgumentParser):
    """argparse for all programs here; it answers a mistake with one line, not with its whole usage."""

    def __init__(self, **how):
        style = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=118)
        super().__init__(usage="python %(prog)s [flags]", allow_abbrev=False, formatter_class=style, **how)

    def _get_values(self, action, arg_strings):               # --stop=-- would be an empty list: argparse before Python 3.13
        if arg_strings != ["--"] or action.nargs is not None:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value

    def error(self, message):
        if message.endswith("expected one argument"):
            message += "; one that begins with - is given as --flag=-VALUE"
        self.exit(2, f"error: {message} (python {self.prog} --help lists the flags)\n")


def at_least(kind, low, high=2**31 - 1):
    """An argparse type: a number in [low, high]."""
    def convert(text):
        value = kind(text)
        if not low <= value <= high:                          # false for nan, too
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return value
    convert.__name__ = kind.__name__                          # argparse names it when the text is no number at all
    return convert


UNSAID = []                                                   # why stdout took no more, if not because its reader had gone: exit_code tells it


def say(text=""):
    """A line on stdout. A run outlives its reader (`| head`, or a `| tee` that the same Ctrl-C has ended) and a full disk: it has things to save."""
    if rank():
        return
    try:
        print(text, flush=True)
    except OSError as fault:
        if not isinstance(fault, BrokenPipeError) and fault.errno != errno.EINVAL:       # which is what Windows calls a broken pipe
            UNSAID.append(fault)
        nobody_reads()


def tell(text=""):
    """A line on stderr, for those who read it: nothing is lost where nobody does."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def nobody_reads():
    """What is still to be printed goes nowhere; else it would fail again, and once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def first_line(fault):
    """What an exception says first, or its name if it says nothing."""
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def out_of_memory(fault):
    """Is it that memory ran out: torch's, on a CPU or a GPU, or a compiler's, which tries its kernels there?"""
    told = isinstance(fault, RuntimeError) and any(words in str(fault) for words in ("allocate memory", "out of memory", "ALLOC_FAILED"))
    return told or isinstance(fault, (MemoryError, torch.OutOfMemoryError))


def of_compiler(fault):
    """Is it torch.compile's, or one of the files that it writes? A run can do without."""
    return isinstance(fault, OSError) or type(fault).__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))


def exit_code(task, stopped="stopped", more_memory="take less at a time"):
    """task() -> its exit code; for what a user can be told in one line, that line on stderr."""
    # where stdin, stdout or stderr are closed, the next file would take their number, and what is said would end in it
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    if sys.stderr is None:                                    # it is closed, and print would take stdout for it
        sys.stderr = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")              # a sample may hold letters that the terminal has not
    UNSAID.clear()
    try:
        code = task() or 0
        if not UNSAID:
            return code
        code, message = code or 1, f"stdout took no more of what was said ({first_line(UNSAID[0])}); files that were saved are intact"
    except BrokenPipeError:                                   # `| head` has seen enough; no second flush at exit
        nobody_reads()
        return 0
    except UserError as fault:
        code, message = 2, fault
    except (Halt, OSError) as fault:
        code, message = 1, fault
    except KeyboardInterrupt as fault:
        code, message = 128 + (fault.args or (signal.SIGINT,))[0], stopped
    except (MemoryError, RuntimeError) as fault:
        if out_of_memory(fault):
            message = f"out of memory; {more_memory}"
        elif processes() > 1 and (isinstance(fault, dist.DistError) or "Connection " in str(fault)):
            message = "another process has ended; what it said tells why"
        else:
            raise
        code = 1
    tell(f"error: {message}")
    try:
        print(end="", flush=True)                             # what stdout did not take, it would not take at exit either
    except OSError:
        nobody_reads()
    return code


# ---- processes and signals

@contextmanager
def claim(folder):
    """Lets one program at a time write to the folder: two would overwrite each other's files. -> Is that sure? Windows, and some network
    disks, have no such locks. UserError where another program is at it.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    lock, sure = os.open(folder, os.O_RDONLY), False          # it ends with the process, however that ends
    try:
        with suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sure = True
            except BlockingIOError:
                raise UserError(f"another run is writing to --out {folder}; choose another folder, or wait for it to end") from None
        yield sure
    finally:
        os.close(lock)


def rank():
    """The number of this process, of those that torchrun has started; the first one, 0, is the one that talks and writes."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def processes():
    """How many torchrun has started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def greatest(number, device):
    """The greatest of all processes' numbers."""
    if processes() > 1:
        number = torch.tensor(number, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


class StopOnSignal:
    """The first Ctrl-C, SIGTERM or SIGHUP (a terminal that closes) is noted, and the loop stops after its step; a second one stops at once."""

    def __enter__(self):
        self.signal, self.when = 0, 0.0
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:      # not on Windows; not under nohup
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        if self.signal:
            if processes() > 1 and time.monotonic() < self.when + 5:             # torchrun passes on a Ctrl-C that all have had
                return
            raise KeyboardInterrupt(number)
        self.signal, self.when = number, time.monotonic()
        with suppress(OSError):                               # the same Ctrl-C may have ended `| tee`
            os.write(2, b"\nfinishing this step, then saving; once more stops at once\n")  # print is not safe in here


# ---- device and precision

MATMUL = "auto", "highest", "high", "medium"


def pick_device(name):
    """The torch.device of a --device; auto: cuda, else cpu. UserError where torch finds none such."""
    there = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    if not there[name]:
        raise UserError(f"--device {name}: torch {torch.__version__} finds no such device here; use --device cpu")
    return torch.device(name)


def native_bfloat16(device):
    """Does the device compute with bfloat16 faster than with float32? (A CPU that has no instructions for it takes many times as long.)"""
    if device.type == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    cpu = cpu_capabilities()
    return device.type == "cpu" and bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))


def pick_dtype(name, device):
    """The torch.dtype of a --dtype; auto: bfloat16 where the device has it (native_bfloat16), else float32."""
    if name == "auto":
        name = "bfloat16" if native_bfloat16(device) else "float32"
    return getattr(torch, name)


def set_matmul(name, device, dtype):
    """torch.set_float32_matmul_precision(name), which is returned. auto: how float32 products are fast and as exact as they need to be.

    Those of the memory need not be more exact than a GPU's TF32, ten times as fast, where those around it are bfloat16. And an AMD core
    computes them at half its width by MKL; with `medium` torch asks oneDNN, which uses all of it, and on those cores rounds nothing.
    """
    if name != "auto":
        torch.set_float32_matmul_precision(name)
    elif device.type == "cpu" and amd_with_avx512():
        torch.set_float32_matmul_precision("medium")
        if not exact_products(device):
            torch.set_float32_matmul_precision("highest")
    else:
        torch.set_float32_matmul_precision("high" if device.type == "cuda" and dtype == torch.bfloat16 else "highest")
    return torch.get_float32_matmul_precision()


def amd_with_avx512():
    """Is this an AMD core with AVX-512?"""
    cpu = cpu_capabilities()
    return cpu.get("avx512_f") and cpu.get("sse4a")           # SSE4a was never in a core of Intel's


def cpu_capabilities():
    return getattr(torch.cpu, "get_capabilities", dict)()     # older versions of torch do not tell


def autocast(device, dtype):
    """Within, products outside of the memory are in bfloat16, if that is the dtype."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


# ---- CPU and memory

def tune_cpu():
    """Habits of CPUs, containers and glibc that cost a memory more than its arithmetic; to be called before the first product.

    Gates that decay for a chunk make numbers below 1e-38, at which an Intel core takes some hundred times as long: they become 0 (in
    threads that begin after this, too). torch starts a thread for each core, however few of them a container may use. And glibc gives
    large freed blocks back to the system, which has to clear them again.
    """
    torch.set_flush_denormal(True)
    if cpu_quota() < torch.get_num_threads():
        torch.set_num_threads(cpu_quota())
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):              # not glibc
        return
    mallopt(1, 0)                                             # M_MXFAST: no lists of small freed blocks, which large requests first merge
    mallopt(-4, 0)                                            # M_MMAP_MAX: large blocks come from the heap, too
    mallopt(-1, -1)                                           # M_TRIM_THRESHOLD: and stay there, however many


def set_threads(n):
    """torch.set_num_threads, where n is not 0. UserError above 1024."""
    if n > 1024:
        raise UserError(f"--threads {n}: at most 1024; more threads than cores are slower anyway")
    if n:
        torch.set_num_threads(n)


def cpu_quota(root="/sys/fs/cgroup"):
    """How many CPUs Linux lets a container use at a time (docker --cpus), at least 1; infinity without a limit."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):         # of cgroup 2, of cgroup 1
        with suppress(OSError, ValueError):                   # no such file; "max"
            quota, period = (int(n) for name in names for n in Path(root, name).read_text().split())
            return max(1, quota // period) if quota > 0 else math.inf
    return math.inf


def peak_memory(device):
    """The most memory that this program has held so far, as words for a line."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB on the GPU"
    with suppress(OSError, StopIteration):                    # Linux, where getrusage would also tell of the program that started this one
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return f"{int(peak.split()[1]) / 2**10:,.0f} MiB"
    most = most_resident()
    return "unknown" if math.isnan(most) else f"{most / 2**20:,.0f} MiB"


def most_resident():
    """The most bytes of memory that this process has ever occupied; nan on Windows."""
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:
        return math.nan
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
