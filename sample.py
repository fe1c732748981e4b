"""sample.py - let a trained model write, while its memory goes on learning from what it reads and
writes.

    python sample.py --prompt "ROMEO:" --tokens 500
    python sample.py --ckpt runs/a/best.pt --temperature 0.7 --top-p 0.9 --num 3
    python sample.py --prompt - --tokens 0 --save-state read.pt < book.txt    read a book once, and
    python sample.py --load-state read.pt --prompt "After that"               go on where it ended

Each text goes to stdout while it is generated, and a line of dashes stands between two. All other
lines go to stderr.
"""
import sys
from functools import partial
from pathlib import Path

from common import (Parser, UserError, add_device, add_number, check_output, exit_code,
                    noted_signals, save_file, say, setup, tell)

import torch

from data import continue_text, encode_prompt
from train import load_checkpoint, rebuild

MARK = "state of sample.py"                                   # in each file of --save-state


def read_prompt(given):
    """Return the text of --prompt, or of stdin for "-", with its line ends unchanged. Raises
    UserError if it is not UTF-8."""
    try:
        raw = sys.stdin.buffer.read() if given == "-" else given.encode()
        return raw.decode("utf-8-sig")
    except UnicodeError as fault:
        raise UserError(f"the prompt is not UTF-8 (at {fault.start}); convert it first")


def load_state(path, origin, device):
    """Return what a file of --save-state holds: the state, and the ids that follow and are not yet
    read. Raises UserError if the file was not made with the checkpoint that origin describes."""
    try:
        made_by, state, ids = torch.load(path, map_location=device, weights_only=True)
        if made_by != origin:
            raise ValueError("of another checkpoint")
        return state, ids
    except Exception as fault:                                # its type depends on what the file is
        raise UserError(f"{path} is no --save-state of this --ckpt ({type(fault).__name__}); "
                        "give another file")


def speak(args):
    """Do what the flags `args` say: print the prompt and what the model writes after it, --num
    times, and keep the state."""
    if args.save_state and args.num > 1:
        raise UserError("--save-state keeps the end of one text; drop --num")
    check_output(args.save_state, MARK)                       # it overwrites only such files
    prompt = read_prompt(args.prompt)
    device = setup(args.device, args.threads)
    ckpt = load_checkpoint(args.ckpt)
    model, tokenizer = rebuild(ckpt)
    model.to(device)

    # origin tells checkpoints apart: no other training took exactly as many seconds
    origin = [MARK, ckpt["config"], ckpt["step"], ckpt["seconds"]]
    state, ids = None, []
    if args.load_state:
        state, ids = load_state(args.load_state, origin, device)
    if prompt or not ids:                                     # an empty prompt may follow a state
        ids += map(int, encode_prompt(tokenizer, prompt))
    tell(f"{ckpt['path']}: {ckpt['preset']} trained on {ckpt['data']['used']}, step {ckpt['step']}")

    # say goes on when `| head` has seen enough, so the state is saved; print ends the program
    write = say if args.save_state else print

    def show(text):
        if args.tokens:
            write(text, end="", flush=True)

    draws = torch.Generator(device).manual_seed(args.seed)
    with noted_signals("stopping here") as noted:
        for i in range(args.num):
            if i > 0:
                show("---------------\n")
            show(prompt)
            place = [state, ids.copy()]                       # continue_text moves it on
            pieces = continue_text(model, tokenizer, place, args.tokens, generator=draws,
                                   temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
            for piece in pieces:
                show(piece)
                if noted:
                    break
            show("\n")
            if noted:
                break

    if args.save_state:
        save_file(Path(args.save_state), [origin, *place])
    if noted:
        raise KeyboardInterrupt(noted[0])


def main(argv=None):
    parser = Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add("--ckpt", default="out", help="checkpoint file, or folder with best.pt or ckpt.pt [out]")
    add("--prompt", default="", help="text to go on from; - reads stdin; empty: a newline")
    add_number(parser, "--tokens", 0, 500, "tokens to write")
    add_number(parser, "--temperature", 0.0, 0.8, "0 takes the likeliest token")
    add_number(parser, "--top-k", 0, 0, "draw from the N likeliest tokens; 0: all")
    add_number(parser, "--top-p", 1e-9, 1.0, "draw from the fewest tokens of this mass", high=1)
    add_number(parser, "--seed", 0, 1337, "the same seed writes the same text")
    add_number(parser, "--num", 1, 1, "texts to write, each from the prompt")
    add("--save-state", metavar="FILE", help="keep what the memory has learned from the text")
    add("--load-state", metavar="FILE", help="go on from there, with the prompt or without")
    add_device(parser)
    return exit_code(partial(speak, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
