"""sample.py - let a trained model write. Its memory goes on learning from what it reads and writes, and its state has a
constant size (except with full attention or exp features), so a new token costs the same however long the text has become.

    python sample.py --prompt "ROMEO:" --tokens 500
    python sample.py --ckpt runs/a/best.pt --prompt-file letter.txt --temperature 0.7 --top-p 0.9 --num 3
    cat letter.txt | python sample.py --prompt - --stop "THE END"

The texts go to stdout as they are generated, a line of dashes between two of them; everything else to stderr.
"""
import sys

import torch

from machine import Halt, Parser, UserError, at_least, exit_code, pick_device, tell, tune_cpu
from train import continue_text, encode_prompt, load_checkpoint, rebuild


def parse(argv=None):
    parser = Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add("--ckpt", default="out", help="checkpoint file, or folder with best.pt or ckpt.pt [out]")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--prompt", default="", help="text to go on from; - reads stdin; empty starts from a newline")
    start.add_argument("--prompt-file", metavar="FILE", help="the same from a UTF-8 file; - reads stdin")
    add("--tokens", type=at_least(int, 0), default=500, metavar="N", help="tokens to write [500]")
    add("--temperature", type=at_least(float, 0), default=0.8, metavar="X", help="0 takes the likeliest token [0.8]")
    add("--top-k", type=at_least(int, 0), default=0, metavar="N", help="draw from the N likeliest tokens; 0: all [0]")
    add("--top-p", type=at_least(float, 1e-9, 1), default=1.0, metavar="X",
        help="draw from the fewest tokens of total probability X [1.0]")
    add("--stop", default="", metavar="TEXT", help="end before this text appears")
    add("--seed", type=at_least(int, 0), default=1337, metavar="N", help="the same seed writes the same text [1337]")
    add("--num", type=at_least(int, 1), default=1, metavar="N", help="texts to write, each from the prompt [1]")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="[auto]")
    return parser.parse_args(argv)


def read_prompt(args):
    """The prompt from --prompt, --prompt-file or stdin."""
    if args.prompt != "-" and args.prompt_file is None:
        return args.prompt
    name = "-" if args.prompt_file is None else args.prompt_file
    try:
        if name == "-":
            if sys.stdin is None:
                raise UserError("cannot read the prompt: stdin is closed; take --prompt TEXT or --prompt-file FILE")
            return sys.stdin.buffer.read().decode("utf-8-sig")
        with open(name, encoding="utf-8-sig", newline="") as f:
            return f.read()
    except OSError as fault:
        raise UserError(f"cannot read the prompt '{name}': {fault.strerror}; check the path") from None
    except UnicodeDecodeError as fault:
        raise UserError(f"the prompt {name} is not UTF-8 (byte {fault.start}); convert it first") from None


def until(stop, pieces):
    """The pieces of text up to the first `stop`, passed on as soon as they cannot be the beginning of one."""
    held = ""
    for piece in pieces:
        held += piece
        if stop and stop in held:
            yield held.partition(stop)[0]
            return
        keep = next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if stop.startswith(held[-n:])), 0)
        yield held[: len(held) - keep]
        held = held[len(held) - keep:]
    yield held


def write(text):
    """To stdout, at once."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as fault:
        raise Halt(f"stdout took no more of the text ({fault.strerror})") from None


def speak(args):
    prompt = read_prompt(args)
    device = pick_device(args.device)
    ckpt = load_checkpoint(args.ckpt)
    model, tokenizer = rebuild(ckpt)
    model.to(device)
    ids = encode_prompt(tokenizer, prompt)
    tell(f"{ckpt['path']}: {ckpt['preset']} trained on {ckpt['data']['used']}, step {ckpt['step']}")
    how = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=torch.Generator(device).manual_seed(args.seed))
    for i in range(args.num):
        if i:
            write("---------------\n")
        write(prompt)
        try:
            for piece in until(args.stop, continue_text(model, tokenizer, ids, args.tokens, **how)):
                write(piece)
        except KeyboardInterrupt:
            tell()                                            # not behind the text
            raise
        except RuntimeError as fault:
            if "probability tensor" in str(fault):            # torch.multinomial's
                raise UserError(f"what {ckpt['path']} predicts is not finite: its training has diverged; take another checkpoint") from None
            raise
        write("\n")


def main(argv=None):
    args = parse(argv)
    tune_cpu()
    return exit_code(lambda: speak(args))


if __name__ == "__main__":
    sys.exit(main())
