"""Define the command line: every option of ``pstar``."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ps_core._errors import InvalidInput
from ps_core._extents import STATES, Precision
from ps_core._name_suggestions import did_you_mean
from ps_core._planner.eviction_policy import Policy
from ps_core._simulate.built_in_machines import MACHINES
from ps_core._simulate.cluster import FRAGMENTATION, HOST_RESERVE_BYTES, HOST_RESERVE_PER_RANK_BYTES
from ps_core._units import meant_as_gib, parse_bytes
from ps_core._version import __version__

_MOST = 10**9 - 1
"""The largest count that is accepted."""


class _Parser(argparse.ArgumentParser):
    """Report what is wrong in one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as the base class does, which leaves unknown options to the command's parser."""
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            near = did_you_mean(extra[0].partition("=")[0], self._option_string_actions, "")
            self.error(f"unrecognized arguments: {' '.join(extra)}" + (f"; {near}" if near else ""))
        return found, extra

    def error(self, message: str) -> NoReturn:
        asks = message.endswith("?")
        raise InvalidInput(message if asks else f"{message} ({self.prog} --help lists the options)")


def make_parser() -> argparse.ArgumentParser:
    """Return the whole command line; docs/command.md is checked against it."""
    about = "Plan the training of models that are larger than the accelerator's memory. No GPU is needed."
    parser = _Parser(prog="pstar", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pstar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    plan = commands.add_parser("plan", help="predict if a model fits, and how fast it would train", allow_abbrev=False)
    plan.set_defaults(command="plan")
    model = plan.add_mutually_exclusive_group(required=True)
    model.add_argument("model", nargs="?", metavar="NAME", help="a named size (gpt-18b), or gpt-LAYERSxHIDDEN")
    model.add_argument("--hf", metavar="FILE", help="a Hugging Face config.json, or its folder")
    model.add_argument("--trace", metavar="FILE", help="a trace of your model, as ps_core.engine.trace writes it")
    plan.add_argument("--brief", action="store_true", help="print only a few lines if the model fits")
    plan.add_argument("--svg", metavar="FILE", help="draw the device's memory over a step to this file")
    plan.add_argument(
        "--timeline", metavar="FILE", help="draw when each queue works in a step to this file (.json: as a trace)"
    )
    plan.add_argument("--tide", action="store_true", help="draw the device's memory over a step as text")
    _add_where(plan)
    _add_how(plan)

    scale = commands.add_parser("scale", help="find the largest model that some hardware can train", allow_abbrev=False)
    scale.set_defaults(command="scale")
    scale.add_argument(
        "--min-tflops", type=float, metavar="N", help="least TFLOPS per GPU (default: half the machine's matmul rate)"
    )
    _add_where(scale)
    _add_how(scale)

    doctor = commands.add_parser("doctor", help="show what this computer has, or measure its speed", allow_abbrev=False)
    doctor.set_defaults(command="doctor")
    doctor.add_argument("--warm", action="store_true", help="also compile every kernel now, to spare the first step")
    doctor.add_argument(
        "--calibrate", action="store_true", help="measure this computer for a minute instead, and print a machine file"
    )
    doctor.add_argument("--out", metavar="FILE", help="with --calibrate: write the machine file to FILE")
    doctor.add_argument("--json", action="store_true", help="print one JSON document")

    export = commands.add_parser(
        "export", help="write a checkpoint's weights to a safetensors file", allow_abbrev=False
    )
    export.set_defaults(command="export")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder that save_checkpoint wrote")
    export.add_argument("file", metavar="FILE", help="the file to write, as in model.safetensors")
    export.add_argument("--masters", action="store_true", help="write trained weights in fp32 (the masters)")
    export.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hardware").add_argument
    kinds = (
        f"speeds: {', '.join(MACHINES)}, or a TOML file (default: without --device-memory by the name of the GPU here, "
        "else nearest by memory)"
    )
    add("--machine", metavar="NAME|FILE", help=kinds)
    add("--gpus", type=_count, metavar="N", help="GPUs in all (default: those found here, else one a node)")
    add("--nodes", type=_count, default=1, metavar="N", help="nodes they are spread over (default: 1)")
    copies = "copies of the model, each on an equal share of the GPUs, as connect(replicate=N) makes (default: 1)"
    add("--replicate", type=_count, default=1, metavar="N", help=copies)
    found = "(default: without --machine what is found here, else the machine's)"
    add("--device-memory", type=_size, metavar="SIZE", help=f"memory of each GPU; 0: no GPU {found}")
    there = "(default: if a GPU is found here, this computer's; else the machine's)"
    add("--host-memory", type=_size, metavar="SIZE", help=f"host memory of a node {there}")
    add("--disk", type=_size, default=0, metavar="SIZE", help="disk space of a node for a third tier (default: none)")
    size: dict[str, Any] = {"type": _size, "metavar": "SIZE"}
    add("--reserve-device", **size, help="memory kept free on each GPU (default: 0.6GB, with several GPUs 1.2GB)")
    add("--reserve-host", **size, default=HOST_RESERVE_BYTES, help="memory kept free on a node (default: 4GB)")
    rank = HOST_RESERVE_PER_RANK_BYTES
    add("--reserve-host-rank", **size, default=rank, help="more of it for each process there (default: 2.5GB)")
    part: dict[str, Any] = {"type": float, "metavar": "PART", "default": FRAGMENTATION}
    add("--reserve-fragmentation", **part, help="share of non-model bytes kept free besides (default: 0.05)")


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training and plan").add_argument
    flag = argparse.BooleanOptionalAction
    add("--batch", type=_count, default=4, metavar="N", help="sequences per GPU and micro-batch (default: 4)")
    add("--seq", type=_count, default=1024, metavar="N", help="tokens of a sequence (default: 1024)")
    precisions = [each.value for each in Precision]
    add("--precision", choices=precisions, default="bf16", help="compute in this type (default: bf16)")
    add("--accumulate", type=_count, default=1, metavar="N", help="micro-batches per step (default: 1)")
    states = "fp32 states of the optimizer for each parameter, besides its master (default: 2, AdamW's)"
    add("--optimizer-states", type=int, choices=range(len(STATES) + 1), default=2, metavar="N", help=states)
    add("--checkpointing", action=flag, default=True, help="recompute blocks in backward (default: yes)")
    auto = "move inputs of recomputed blocks off the GPU (default: where it helps)"
    add("--offload-checkpoints", action=flag, default=None, help=auto)
    rows = "compute head and loss in chunks of rows (default: yes; with --hf no, as for pstar-train)"
    add("--chunked-loss", action=flag, default=None, help=rows)
    add("--untied-head", action=flag, default=False, help="give the model a head of its own (default: no)")
    away = "keep the token table in host memory and look tokens up there (default: no)"
    add("--cpu-embedding", action=flag, default=False, help=away)
    add("--head-tiles", type=_count, default=1, metavar="N", help="pieces of an untied head (default: 1)")
    add("--vocab", type=_count, metavar="N", help="vocabulary (default: the model's)")
    add("--policy", choices=[each.value for each in Policy], default="belady", help="what to evict (default: belady)")
    early = "step each group once its gradient is complete; excludes clipping (default: no)"
    add("--step-in-backward", action=flag, default=False, help=early)
    undone = "the same with clipping or fp16; steps are undone where gradients are clipped (default: no)"
    add("--step-speculative", action=flag, default=False, help=undone)
    add("--group-bytes", type=_size, metavar="SIZE", help="16-bit weights that move together (default: searched)")
    add("--json", action="store_true", help="print one JSON document")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    if number > _MOST:
        raise argparse.ArgumentTypeError(f"at most {_MOST} is allowed, found {text!r}")
    return number


def _size(text: str) -> int:
    try:
        found = parse_bytes(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if meant := meant_as_gib(text):
        raise argparse.ArgumentTypeError(f"{found} without a unit is {found} bytes; did you mean {meant}?")
    return found
