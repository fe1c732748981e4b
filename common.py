"""common.py - what all programs share: settings that become flags, one-line errors, files, pictures, the device."""
import argparse
import csv
import importlib.util
import json
import os
import platform
import signal
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field, fields
from functools import partial
from pathlib import Path

import torch


# ---- errors and lines
class UserError(ValueError):
    """A user's mistake, told in one line that names the fault and the remedy. The exit code is 2."""


class Halt(Exception):
    """The end of a program for another reason, told in one line. Saved files are intact. The exit code is 1."""


def say(text, end="\n", flush=True):
    """Print a line. A run outlives its reader, as in `| head`, and its terminal: it still has files to save."""
    try:
        print(text, end=end, flush=flush)
    except OSError:                                           # EPIPE, or EIO of a terminal
        sys.stdout = open(os.devnull, "w")


def tell(text):
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def noted_signals(promise, alone=True):
    """Yield a list to which Ctrl-C, SIGTERM, SIGHUP and SIGUSR1, which Slurm sends before the end,
    are added. A second of the first two stops at once, if alone."""
    # Windows has none of these
    noted, patient = [], {getattr(signal, a, signal.SIGTERM) for a in ("SIGHUP", "SIGUSR1")}

    def note(number, frame):
        # torchrun passes on a Ctrl-C that all have had already; a closed terminal hangs up twice, and sends SIGTERM
        if alone and number not in patient and {*noted} - patient:
            raise KeyboardInterrupt(number)
        noted.append(number)
        with suppress(OSError):                               # the same Ctrl-C may have ended `2>&1 | tee log`
            os.write(2, f"\n{promise}; once more stops at once\n".encode())
    with ExitStack() as restore:
        with suppress(ValueError):                            # outside of the main thread
            for number in {signal.SIGINT, signal.SIGTERM, *patient}:
                # nohup ignores SIGHUP
                if number not in patient or signal.getsignal(number) != signal.SIG_IGN:
                    restore.callback(signal.signal, number, signal.signal(number, note))
        yield noted


def exit_code(task):
    """Run task() and return its exit code. Print on stderr what a user can be told in one line."""
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")            # a sample has letters that a terminal lacks
    try:
        return task() or 0
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")                    # or it would fail again at exit
        return 0
    except KeyboardInterrupt as fault:
        code, message = 128 + (fault.args or [signal.SIGINT])[0], "stopped; files that were saved are intact"
    except (UserError, Halt, OSError) as fault:
        code, message = 2 if isinstance(fault, UserError) else 1, fault
    except (MemoryError, RuntimeError) as fault:
        if not any(words in repr(fault) for words in ("MemoryError", "out of memory", "allocate memory", "ALLOC_FAIL")):
            raise
        code, message = 1, ("out of memory; lower --batch-size, --seq-len or --chunk, or train with --remat, which "
                            "--resume takes, too; files that were saved are intact")
    tell(f"error: {message}")
    return code


# ---- settings and flags
DEVICES = "auto cpu cuda mps".split()


def opt(default, help, choices=None, low=0, high=2**31):
    """Return a dataclass field that is a flag with this help; `check` accepts numbers from low on, below high."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high))


def flag(name):
    """Return the flag of a field: n_embd -> --n-embd"""
    return "--" + name.replace("_", "-")


def check(config):
    """Raise UserError for a field of another type, a number out of range or nan, an unknown choice."""
    for f in fields(config):
        value, how = getattr(config, f.name), f.metadata
        kind = (int, float) if f.type is float else f.type
        if not isinstance(value, kind) or isinstance(value, bool) != (f.type is bool):
            raise UserError(f"{flag(f.name)} must be of type {f.type.__name__}, not {value!r}")
        if f.type in (int, float) and not how["low"] <= value < how["high"]:  # false for nan, too
            raise UserError(f"{flag(f.name)} must be at least {how['low']} and below {how['high']},"
                            f" not {value}")
        if how["choices"] and value not in how["choices"]:
            raise UserError(f"{flag(f.name)} must be one of {', '.join(how['choices'])}, "
                            f"not {value!r}")


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is answered in one line instead of the whole usage."""

    def __init__(self, usage="python %(prog)s [flags]", **how):
        super().__init__(usage=usage, allow_abbrev=False, formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=30, width=118), **how)

    def _get_value(self, action, text):
        """Return the value of a flag. An empty one, as of an unset $OUT, is a mistake, unless the
        default is empty, too."""
        # argparse shows all that follows a subcommand to that, too, which has choices
        if not (text or action.choices or action.default == ""):
            raise argparse.ArgumentError(action, "it is empty; give a value, or drop the flag")
        return super()._get_value(action, text)

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def add_flags(parser, title, cls, presets, skip=()):
    """Add a group of flags, one for each field of a dataclass. One that was not given is absent
    from the result."""
    group = parser.add_argument_group(title)
    for f in fields(cls):
        if f.name not in skip:
            how = dict(type=f.type, choices=f.metadata["choices"])
            how = dict(action=argparse.BooleanOptionalAction) if f.type is bool else how
            text = f"{f.metadata['help']} [{presets.get(f.name, f.default)}]".replace("%", "%%")
            group.add_argument(flag(f.name), default=argparse.SUPPRESS, help=text, **how)


def add_number(parser, name, low, usual, help, high=2**31 - 1):
    """Add a flag for a number in [low, high], whole if low is, or for several if `usual`, the default, is a list."""
    def number(text):
        value = type(low)(text)
        if not low <= value <= high:                          # false for nan, too
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return value
    several = dict(nargs="+") if isinstance(usual, list) else {}
    shown = f"{help} {usual if several else [usual]}"
    parser.add_argument(name, type=number, default=usual, metavar="N", help=shown, **several)


def add_device(parser, threads=0):
    parser.add_argument("--device", default="auto", choices=DEVICES, help="[auto]")
    add_number(parser, "--threads", 0, threads, "0: torch decides")


def add_tasks(parser, tasks, plot, **how):
    """Add a subcommand for each of tasks, {name: function}, --json for all and --plot for those that `plot` names.
    Return their parsers. how: more arguments of `add_device`. Each file of --json has `mark`."""
    group = parser.add_subparsers(dest="task", metavar="TASK", required=True, prog=parser.prog)
    for name, run in tasks.items():
        task = group.add_parser(name, help=run.__doc__.partition(".")[0], description=run.__doc__)
        task.set_defaults(run=run, plot=None, mark=f'"program": "{parser.prog}"')
        task.add_argument("--json", metavar="FILE", help="keep the results there")
        if name in plot:
            task.add_argument("--plot", nargs="?", const=f"{name}.png", metavar="FILE", help=f"draw them [{name}.png]")
        add_device(task, **how)
    return group.choices.values()


def with_task(argv, usual):
    """Return the arguments of a program, those of its `usual` task if they name none."""
    argv = sys.argv[1:] if argv is None else argv
    return argv if argv and (argv[0][0] != "-" or argv[0] in ("-h", "--help")) else [usual, *argv]


def chosen(values, cls):
    """Return the values that are fields of a dataclass."""
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}


def run_task(parse, argv):
    """Run the task that the flags name on their device, keep what it returns with --json. Return the exit code."""
    def run():
        args = parse(argv)
        check_picture(args.plot)
        check_output(args.json, args.mark)
        results = args.run(args, setup(args.device, args.threads))
        if args.json and results:
            with replacing(Path(args.json)) as temporary:
                results = json.loads(f"{{{args.mark}}}") | results
                temporary.write_text(json.dumps(results, indent=1) + "\n")
    return exit_code(run)


# ---- files and pictures
@contextmanager
def replacing(path):
    """Yield a temporary name beside `path`, and rename it at the end. A crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())                           # the disk must have the text before the name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_file(path, tree):
    """Save with torch.save. Raises Halt where the file cannot be written, and names those that
    are intact."""
    try:
        with replacing(path) as temporary:
            torch.save(tree, temporary)
    except (OSError, RuntimeError) as fault:                  # torch tells of a full disk by a RuntimeError
        intact = ", ".join(p.name for p in path.parent.glob("*.pt")) or "none"
        raise Halt(f"cannot write {path} ({fault}); disk full? make room; "
                   f"intact, for --resume: {intact}")


def check_output(path, mark):
    """Return whether a file is there. Raises UserError where it cannot be written, or has not the
    mark of this program, which did not write it then. Called before the work begins."""
    if not path:
        return
    exists = (path := Path(path)).exists()
    if exists != path.is_file() or not os.access(path if exists else f"{path.parent}/", os.W_OK):
        raise UserError(f"cannot write {path}; give another file, or make its folder")
    if exists and mark.encode() not in path.read_bytes():
        raise UserError(f"{path} was not written by this program, and would be lost; "
                        "give another file")
    return exists


def check_picture(path):
    """Raise UserError where `picture` cannot draw."""
    need("matplotlib", path)
    if path and Path(path).suffix != ".png":
        raise UserError(f"--plot {path}: a picture is a .png; give such a name")
    check_output(path, "Matplotlib")


@contextmanager
def locked(folder):
    """Make a folder and hold it for this process. Raises UserError where another process holds it,
    or where no file can be written. The kernel frees the lock of a killed process; what that left
    half written is removed. So is at the end, as after a mistake, what was made and is empty."""
    made = [a for a in (folder, *folder.parents) if not a.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (lock := folder / "lock").open("a+")
    except OSError as fault:
        raise UserError(f"cannot write in --out {folder} ({fault.strerror}); give another folder")
    with file:
        holder = lock.read_text(errors="replace")
        if holder and not holder.startswith("process "):
            raise UserError(f"{lock} is no lock, and would be lost; give another --out")
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in "ckpt.pt best.pt log.csv train.bin val.bin".split():
                for left in folder.glob(f"{name}.*.tmp"):
                    left.unlink()
        except BlockingIOError:
            raise UserError(f"--out {folder} is in use by {holder}; give another, or end that run")
        except (ImportError, OSError):                        # Windows and some network disks have no such lock
            pass
        lock.write_text(f"process {os.getpid()} on {platform.node()}")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):                           # not empty
                for empty in made:
                    empty.rmdir()


def need(package, wanted=True):
    """Raise UserError where an optional package is wanted and missing; called before the work begins."""
    if wanted and not importlib.util.find_spec(package):
        raise UserError(f"this needs {package}: pip install {package}")


def picture(path, lines, x, y, log="", level=None, marked=None):
    """Draw lines {label: (xs, ys)}, or (xs, ys, spreads) with bands within [0, 1]. x, y name the axes; those in `log`
    are logarithmic. `level` is a dotted line, marked, (x, label), a vertical one. No path: no picture."""
    if not path:
        return
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    ax = figure.subplots(subplot_kw=dict(xlabel=x, ylabel=y))
    # Okabe, Ito: for all eyes
    colours = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #000000".split()
    for i, (label, (xs, ys, *spreads)) in enumerate(lines.items()):
        how = dict(color=colours[i % 7], marker="os^vDPX"[i % 7], linestyle="-" if i < 7 else "--")
        ax.plot(xs, ys, label=label, markersize=4, markevery=max(1, len(xs) // 12), **how)
        for a in spreads:
            low, high = ((torch.tensor(ys) + sign * torch.tensor(a)).clamp(0, 1) for sign in (-1, 1))
            ax.fill_between(xs, low, high, color=how["color"], alpha=0.15, linewidth=0)
    if level is not None:
        ax.axhline(level, color="gray", linestyle=":", label="guessing")
    if marked:
        ax.axvline(marked[0], color="gray", linestyle="--", label=marked[1])
    for axis in log:
        getattr(ax, f"set_{axis}scale")("log", base=2)
        getattr(ax, f"{axis}axis").set_major_formatter("{x:,g}")
    ax.grid(alpha=0.3)
    figure.legend(loc="outside upper center", fontsize=8, ncols=2)
    save(figure, path)


def save(figure, path):
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=100, format="png")
    say(f"wrote {path}")


def curve(out, name):
    """Return the steps and the values of a column of OUT/log.csv."""
    try:
        table = csv.DictReader(Path(out, "log.csv").open())
        rows = [(int(row["step"]), row.get(name)) for row in table]
        if not rows:
            raise ValueError("it has no step yet")
        return list(zip(*((step, float(value)) for step, value in rows if value)))
    except Exception as fault:                                # its type depends on what the file is
        raise UserError(f"cannot read {Path(out, 'log.csv')}: {fault}; give --plot folders of runs")


def plot(folders, columns=("loss", "val"), y="loss [nats/token]"):
    """Draw columns of the logs of runs over their steps."""
    lines = {f"{out}: {name.replace('_', ' ')}": line for out in folders for name in columns
             if (line := curve(out, name))}
    check_picture(path := Path(folders[0], "curves.png"))
    picture(path, lines, "step", y)


# ---- the device, random numbers
def seeded(number):
    """Return a generator of random numbers."""
    return torch.Generator().manual_seed(number)


def setup(name, threads=0):
    """Return the torch.device of a --device, and set torch up for speed. Call it before the first product."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.get_device_module(name).is_available():
        raise UserError(f"--device {name}: torch {torch.__version__} finds no such device here; use --device cpu")
    torch.set_flush_denormal(True)                            # decayed gates fall below 1e-38, where Intel cores crawl
    torch.set_num_threads(threads or torch.get_num_threads())
    if name == "cuda":
        torch.set_float32_matmul_precision("high")            # TF32
    elif cpu_has("avx512_f") and cpu_has("sse4a"):            # an AMD core: no Intel core has SSE4a
        torch.set_float32_matmul_precision("medium")          # oneDNN instead of MKL, which uses half of such a core
        a = torch.full((64, 64), 1 + 2**-12)
        if (a @ a)[0, 0] <= 64.01:                            # bfloat16 rounds a to 1: not exact on this core
            torch.set_float32_matmul_precision("highest")
    return torch.device(name)


def cpu_has(name):
    return getattr(torch.cpu, "get_capabilities", dict)().get(name)       # an older torch cannot tell


def native_bfloat16(device):
    """Tell whether the device has instructions for bfloat16. A CPU without them takes many times as long."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    return device.type == "cpu" and (cpu_has("avx512_bf16") or cpu_has("amx_bf16"))


def pick_dtype(name, device):
    return getattr(torch, ("bfloat16" if native_bfloat16(device) else "float32") if name == "auto" else name)


def autocast(device, dtype):
    """Run products outside of the memory in bfloat16, if that is the dtype."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
