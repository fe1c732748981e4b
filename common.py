"""common.py - what all programs share: one-line errors, settings that become flags, files,
pictures and the device."""
import argparse
import csv
import importlib
import json
import os
import signal
import sys
from contextlib import contextmanager, suppress
from dataclasses import fields
from inspect import cleandoc
from pathlib import Path

# Threads of torch spin while they wait for others, which on a busy machine can take 15 times as
# long as the work. This lets them sleep sooner. It must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch

from layer import UserError


# ---- errors and lines
class Halt(Exception):
    """Another reason to stop, told in one line. Saved files are intact. Exit code 1."""


def say(text, end="\n", flush=True):
    """Print a line. If nobody reads stdout any more, as after `| head`, the program continues in
    silence: it still has files to save."""
    try:
        print(text, end=end, flush=flush)
    except OSError:
        sys.stdout = open(os.devnull, "w")


def tell(text):
    """Print a line on stderr, if that is still open."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def noted_signals(promise, alone=True):
    """Yield a list that collects the numbers of signals that arrive: SIGINT (Ctrl-C), SIGTERM,
    SIGHUP and SIGUSR1 (which Slurm sends before it ends a job). For each of them a line with
    `promise` tells the user what happens next. A second Ctrl-C stops at once if this process is
    alone."""
    noted, before = [], {}

    def note(number, frame):
        if noted and alone and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(number)
        tell(f"\n{promise}; Ctrl-C stops at once")

    for number in signal.Signals:
        ignored = signal.getsignal(number) == signal.SIG_IGN  # as nohup does SIGHUP
        if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") and not ignored:
            with suppress(ValueError):                        # in a thread none can be noted
                before[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for number in before:
            signal.signal(number, before[number])


def exit_code(task):
    """Run task() and return its exit code, 0 if it returns None. If it raises what can be told in
    one line, print this on stderr; a KeyboardInterrupt may hold the number of a signal. Characters
    that stdout cannot encode become question marks."""
    with suppress(AttributeError):                            # a notebook's stdout encodes all
        sys.stdout.reconfigure(errors="replace")
    try:
        return task() or 0
    except BrokenPipeError:                                   # the reader has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0
    except KeyboardInterrupt as fault:
        tell("error: stopped; files that were saved are intact")
        return 128 + (fault.args[0] if fault.args else signal.SIGINT)
    except (UserError, Halt, OSError) as fault:
        tell(f"error: {fault}")
        return 2 if isinstance(fault, UserError) else 1
    except (MemoryError, RuntimeError) as fault:
        if "MemoryError" not in repr(fault) and "allocate memory" not in repr(fault):
            raise
        tell("error: out of memory; lower --batch-size, --seq-len or --chunk, or train with "
             "--remat, which --resume takes, too; files that were saved are intact")
        return 1


# ---- settings and flags
DEVICES = ["auto", "cpu", "cuda", "mps"]


def flag(name):
    """Return the flag of a field: n_embd -> --n-embd"""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Parse flags as argparse does, but answer a mistake in one line instead of the whole usage."""

    def __init__(self, usage="python %(prog)s [flags]", description="", **how):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(usage=usage, description=cleandoc(description), allow_abbrev=False,
                         formatter_class=layout, **how)

    def parse_args(self, argv=None):
        """Return the flags. An empty value, as from an unset $OUT, is a mistake unless the default
        is empty, too."""
        args = super().parse_args(argv)
        for name, value in vars(args).items():
            if value in ("", [""]) and self.get_default(name) != "":
                self.error(f"{flag(name)}: it is empty; give a value, or drop the flag")
        return args

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def add_flags(parser, title, cls, presets, skip=()):
    """Add a group of flags, one for each field of a dataclass that layer.opt made. --help shows the
    default of a field, or what presets has in its place. The parsed result has only the flags that
    were given, as no flag has a default of its own."""
    group = parser.add_argument_group(title)
    for f in fields(cls):
        if f.name in skip:
            continue
        usual = presets.get(f.name, f.default)
        text = f"{f.metadata['help']} [{usual}]".replace("%", "%%")
        how = dict(type=f.type, choices=f.metadata["choices"])
        if f.type is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        group.add_argument(flag(f.name), default=argparse.SUPPRESS, help=text, **how)


def add_number(parser, name, low, usual, help, high=2**31 - 1):
    """Add a flag for a number from low to high: an integer if low is an int, else a float. `usual`
    is its default; if that is a list, the flag takes several numbers."""
    def number(text):
        value = type(low)(text)
        if not low <= value <= high:                          # also refuses nan
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return value

    nargs = "+" if isinstance(usual, list) else None
    parser.add_argument(name, type=number, default=usual, metavar="N", nargs=nargs,
                        help=f"{help} {usual if nargs else [usual]}")


def add_device(parser, threads=0):
    """Add the flags that `setup` takes."""
    parser.add_argument("--device", default="auto", choices=DEVICES, help="[auto]")
    add_number(parser, "--threads", 0, threads, "CPU threads; 0: torch decides")


def add_tasks(parser, tasks, plot, threads=0):
    """Add a subcommand for each of tasks, {name: function}, with the function's docstring as its
    help. All take --json, --device and --threads; those named in `plot` also take --plot. A file of
    --json contains `mark`, by which `check_output` sees that this program wrote it. Return the
    parsers of the subcommands."""
    group = parser.add_subparsers(metavar="TASK", dest="task", prog=parser.prog)
    for name, run in tasks.items():
        task = group.add_parser(name, help=run.__doc__, description=run.__doc__)
        task.set_defaults(run=run, plot=None, mark=parser.prog)
        task.add_argument("--json", metavar="FILE", help="write the results to FILE")
        if name in plot:
            task.add_argument("--plot", nargs="?", const=f"{name}.png", metavar="FILE",
                              help="draw a .png, .pdf or .svg; without FILE TASK.png")
        add_device(task, threads)
    return group.choices.values()


def with_task(argv, usual):
    """Return the arguments of a program. If they do not begin with a task, put `usual` in front."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and (argv[0] == "--help" or not argv[0].startswith("--")):
        return argv
    return [usual, *argv]


def chosen(values, cls):
    """Return the values that are fields of a dataclass."""
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}


def run_task(parse, argv):
    """Run the task that the flags name, args.run(args, device). Write the dict that it yields to
    the file of --json; only then does the task draw. Return the exit code."""
    def run():
        args = parse(argv)
        check_picture(args.plot)
        check_output(args.json, args.mark)
        for results in args.run(args, setup(args.device, args.threads)) or ():
            if args.json:
                write_json(args.json, dict(program=args.mark, **results))

    return exit_code(run)


# ---- files and pictures
@contextmanager
def replacing(path):
    """Yield a temporary path to write to, and rename it to `path` at the end. So a crash leaves
    either the old file or the new one, and never half a file. Raises Halt if it cannot be
    written."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except (OSError, RuntimeError) as fault:                  # RuntimeError: torch on a full disk
        raise Halt(f"cannot write {path} ({fault}); make room; older files are intact")
    finally:
        temporary.unlink(missing_ok=True)


def save_file(path, tree):
    """Save a tree of tensors with torch.save."""
    with replacing(path) as temporary:
        torch.save(tree, temporary)


def write_json(path, tree):
    """Write a tree of dicts, lists and numbers to a file of JSON."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(tree, indent=1))


def check_output(path, mark):
    """Raise UserError if a file cannot be written. Raise it also if the file exists and does not
    contain `mark`: then another program wrote it. Call this before the work begins. An empty path
    or None passes."""
    if not path:
        return
    path = Path(path)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write {path}; give another file, or make its folder")
    if path.exists() and mark.encode() not in path.read_bytes():
        raise UserError(f"{path} was not written by this program; give another file or folder")


def check_picture(path):
    """Raise UserError if `picture` could not draw to this path."""
    try:
        if path:
            importlib.import_module("matplotlib.figure")
    except Exception as fault:                                # of any type, as for another NumPy
        raise UserError(f"--plot: {fault!r:.200}; pip install --force-reinstall matplotlib")
    if Path(path or "").suffix.lower() not in ("", ".png", ".pdf", ".svg"):
        raise UserError(f"--plot {path} does not end in .png, .pdf or .svg; give another name")
    check_output(path, "Matplotlib")


@contextmanager
def locked(folder):
    """Make a folder and lock it for this process while the context lasts. Raises UserError if the
    folder cannot be written or another process has locked it. If this process is killed, the
    kernel frees the lock."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as fault:
        raise UserError(f"cannot write in --out {folder} ({fault.strerror}); give another folder")
    try:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {folder} is in use; give another, or end that run")
    except (ImportError, OSError):                            # no locks: Windows, network disks
        pass
    try:
        yield
    finally:
        lock.close()
        path.unlink(missing_ok=True)
        with suppress(OSError):                               # fails unless the folder is empty
            folder.rmdir()


def picture(path, lines, x, y, log="", level=None, marked=None):
    """Draw lines {label: (xs, ys)} as the ending of path says, else as .png; {label: (xs, ys,
    spreads)} get error bars. x and y are the names of the axes, and an axis whose letter is in
    `log` is logarithmic. level is the score of guessing, drawn as a dotted line; marked is (x,
    label) of a vertical line. Without a path nothing is drawn."""
    if not path:
        return

    from matplotlib.figure import Figure
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for label, (xs, *ys) in lines.items():
        # a label that begins with "_" has no entry in the legend, and two "$" make mathtext
        label = f" {label}".replace("$", r"\$")
        axes.errorbar(xs, *ys, label=label, marker=".", capsize=2)

    if level is not None:
        axes.axhline(level, color="gray", linestyle=":", label="guessing")
    if marked:
        axes.axvline(marked[0], color="gray", linestyle="--", label=marked[1])
    if "x" in log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if "y" in log:
        axes.set_yscale("log")

    axes.set(xlabel=x, ylabel=y)
    figure.legend(loc="outside upper center", fontsize=8, ncols=2)
    save_figure(path, figure)


def save_figure(path, figure):
    """Write a figure as the ending of path says, else as .png."""
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=100, format=Path(path).suffix[1:] or "png")
    say(f"wrote {path}")


def plot(folders, columns=("loss", "val"), y="loss [nats/token]"):
    """Draw these columns of log.csv over the steps, for each of the runs in `folders`, to
    curves.png in the first folder. Raises UserError for a missing or damaged log."""
    lines = {}
    for out in folders:
        try:
            with open(f"{out}/log.csv") as file:
                rows = list(csv.DictReader(file))
            for name in columns:
                found = [row for row in rows if row.get(name)]      # most rows have no "val"
                if found:
                    steps = [int(row["step"]) for row in found]
                    lines[f"{out}: {name}"] = steps, [float(row[name]) for row in found]
        except (OSError, KeyError, ValueError) as fault:
            raise UserError(f"{out} holds no log.csv of a run, or a damaged one ({fault}); give "
                            "--plot other folders")
    if not lines:
        raise UserError(f"there is nothing to draw in {folders} yet; give --plot other folders")
    path = f"{folders[0]}/curves.png"
    check_picture(path)
    picture(path, lines, "step", y)


# ---- the device, random numbers
def seeded(number):
    """Return a generator of random numbers with this seed."""
    return torch.Generator().manual_seed(number)


def seeded_batch(seed, number, test=False):
    """Return the generator of random numbers for batch `number` of a run with this seed. Batches of
    training and of tests have different ones."""
    return seeded(2 * (1_000_003 * seed + number) + test)


def setup(name, threads):
    """Return the torch.device that --device names, and set torch's global options. Call it before
    the first matrix product."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.get_device_module(name).is_available():
        raise UserError(f"--device {name}: torch finds no such device here; use --device cpu")
    torch.set_flush_denormal(True)                            # numbers below 1e-38 slow a CPU down
    torch.set_num_threads(threads or torch.get_num_threads())
    return torch.device(name)


def native_bfloat16(device):
    """Return whether the device has instructions for bfloat16. A CPU without them is many times
    slower in bfloat16 than in float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):    # torch 2.9
        return False
    found = torch.cpu.get_capabilities()
    return found.get("avx512_bf16", False) or found.get("amx_bf16", False)


def pick_dtype(name, device):
    """Return the torch.dtype that --dtype names."""
    if name == "auto":
        name = "bfloat16" if native_bfloat16(device) else "float32"
    return getattr(torch, name)


def autocast(device, dtype):
    """Return a context in which matrix products are computed in bfloat16 if that is the dtype. On a
    CPU the memory computes in float32 all the same (layer.Memory)."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
