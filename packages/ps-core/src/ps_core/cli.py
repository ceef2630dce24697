"""Run the command ``pstar``: plan, scale, doctor, export.

Exit status: 0 done (`plan`: it fits), 3 it does not fit, 130 interrupted. Status 2 is input that cannot be used (one
line on stderr), 1 anything else.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ps_core._broken_pipe import progress, silence, tell
from ps_core._command.advice import advice, remedies
from ps_core._command.arguments import make_parser
from ps_core._command.doctor import accelerators, calibrate, examine, host_memory, warm
from ps_core._command.forecast import Subject, Training, forecast, model_of
from ps_core._command.largest_model import TooFast, largest
from ps_core._command.show import (
    Case,
    Document,
    brief_text,
    doctor_text,
    fits_document,
    fits_text,
    nothing_document,
    refusal_document,
    refusal_text,
    scale_document,
    scale_text,
)
from ps_core._command.timeline_files import timeline_text
from ps_core._errors import DoesNotFit, InvalidInput, PatrickStarError
from ps_core._extents import Precision
from ps_core._input_files import read_text
from ps_core._install_hints import how_to_install
from ps_core._planner.eviction_policy import Policy
from ps_core._simulate.built_in_machines import NO_BF16
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import MACHINES, UNSTEADY, Machine, default_machine, machine, machine_from_toml
from ps_core._trace import Trace
from ps_core._units import format_bytes
from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.named_shapes import shape
from ps_core.report import tide, tide_svg, tide_text

FITS, FAILED, BAD_INPUT, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130
ASSUMED_MACHINE = "a100-40"
"""The machine to assume without a machine, device memory or GPU."""
_LEFT_FREE = 0.9
"""The fraction of this computer's available memory that a plan may use if no host memory is given."""
_LONGEST_TRACE_BYTES = 2**30
_FROM_CONFIG = " (for a Hugging Face model: --hf config.json)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    if sys.stdout is None:
        return _fail(FAILED, OSError("there is no output to write to"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = make_parser().parse_args(argv)
        with _collector_paused():
            status = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except InvalidInput as error:
        return _fail(BAD_INPUT, error)
    except (PatrickStarError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the output's reader has gone: write nothing more
            silence(sys.stdout)
            return FAILED
        return _fail(FAILED, error)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: a search for a plan keeps many objects, which every collection would scan."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fail(status: int, error: Exception) -> int:
    print(f"pstar: {' '.join(str(error).split())}", file=sys.stderr)
    return status


# ---------------------------------------------------------------- commands


def _plan(options: argparse.Namespace) -> int:
    place = _place(options)
    training = _training(options, place)
    source = _subject(options)
    if isinstance(source, Trace):
        _compare_precision(source, options)
    subject = model_of(source, training)
    longer = options.hf is None and options.trace is None and options.seq > shape(options.model).positions
    assumed = (f"{options.seq} positions (--seq)",) if longer else ()
    case = Case(subject, training, place.assumed + assumed)
    try:
        found = forecast(subject, case.training)
    except DoesNotFit as refusal:
        tried = remedies(subject, case.training)
        show = refusal_document if options.json else refusal_text
        _print(show(case, refusal, tried))
        return DOES_NOT_FIT
    if options.svg is not None:
        _write(options.svg, tide_svg(tide(found.planned.program, found.planned.plan)))
    if options.timeline is not None:
        _write(options.timeline, timeline_text(found, options.timeline))
    if options.json:
        _print(fits_document(case, found, advice(subject, found)))
        return FITS
    if options.brief:
        _print(brief_text(case, found))
    else:
        _print(fits_text(case, found, advice(subject, found), ascii_only=_ascii_only()))
    if options.tide:
        _print("\n" + tide_text(tide(found.planned.program, found.planned.plan), ascii_only=_ascii_only()))
    return FITS


def _scale(options: argparse.Namespace) -> int:
    place = _place(options)
    training = replace(_training(options, place), quick=True)
    why = "no GPT-like model of any size fits and is fast enough"
    try:
        with progress(sys.stderr) as tell:
            found = largest(training, min_tflops=options.min_tflops, vocabulary=options.vocab, tell=tell)
    except TooFast as refusal:
        found, why = None, str(refusal)
    if found is None:
        _print(nothing_document() if options.json else why)
        return DOES_NOT_FIT
    case = Case(found.shape, found.forecast.training, place.assumed)
    told = advice(found.shape, found.forecast)
    if options.json:
        _print(scale_document(found, fits_document(case, found.forecast, told)))
    else:
        plan = fits_text(case, found.forecast, told, ascii_only=_ascii_only())
        _print(scale_text(found, plan))
    return FITS


def _doctor(options: argparse.Namespace) -> int:
    if options.calibrate:
        if options.warm:
            raise InvalidInput("--calibrate measures in place of what --warm does: give one of them")
        return _calibrate(options)
    if options.out is not None:
        raise InvalidInput("--out is where --calibrate writes: give both")
    found = examine()
    lines = warm() if options.warm else ()
    if options.json:
        _print({**found, "kernels": list(lines)} if options.warm else dict(found))
    else:
        _print(doctor_text(found) + "".join(f"{line}\n" for line in ("", "kernels", *lines) if options.warm))
    return FITS


def _calibrate(options: argparse.Namespace) -> int:
    if options.out is not None:  # before a minute of measuring
        out = Path(options.out)
        if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
            raise InvalidInput(f"cannot write {options.out!r}: expected a file in a folder that may be written to")
    text = calibrate()
    measured = machine_from_toml(text, "what was measured")
    notes = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    if options.out is not None:
        _write(options.out, text)
    if options.json:
        _print({"machine": asdict(measured), "file": options.out, "notes": notes})
    elif options.out is None:
        _print(text)
    else:
        unsteady = [note for note in notes if note.startswith(UNSTEADY)]
        said = f"{options.out}: {measured.name}; use it with pstar plan NAME --machine {options.out}"
        _print("\n".join([said, *unsteady]))
    return FITS


def _export(options: argparse.Namespace) -> int:
    for library in ("torch", "ps_kernels"):
        if importlib.util.find_spec(library) is None:
            raise InvalidInput(f"pstar export needs {library}: {how_to_install(library)}")
    from ps_core.engine import export_checkpoint

    export_checkpoint(options.checkpoint, options.file, masters=options.masters, overwrite=options.overwrite)
    _print(f"{options.file}: {Path(options.file).stat().st_size:,} bytes")
    return FITS


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "plan": _plan,
    "scale": _scale,
    "doctor": _doctor,
    "export": _export,
}


def _print(said: str | Document) -> None:
    print(said.rstrip("\n") if isinstance(said, str) else json.dumps(said))


def _ascii_only() -> bool:
    """Return True if standard output can write ASCII only."""
    try:
        "█─░".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot write {path!r}: {error}") from error


def _subject(options: argparse.Namespace) -> Subject:
    if options.trace is not None:
        try:
            return Trace.from_json(read_text(Path(options.trace), _LONGEST_TRACE_BYTES))
        except OSError as error:
            raise InvalidInput(f"cannot read {options.trace!r}: {error.strerror or error}") from error
        except ValueError as error:
            raise InvalidInput(f"{options.trace}: {error}") from error
    if options.hf is None:
        try:
            named = shape(options.model, vocabulary=options.vocab)
        except InvalidInput as error:
            raise InvalidInput(f"{error}{_FROM_CONFIG}") from error
        return replace(named, positions=max(named.positions, options.seq))
    found = shape_from_config(Path(options.hf))
    return found if options.vocab is None else replace(found, vocabulary=options.vocab)


def _compare_precision(trace: Trace, options: argparse.Namespace) -> None:
    """Warn if activations have another size in the trace than in the precision that the plan is for."""
    found, wanted = trace.precision, options.precision
    if found and (found == "fp32") is not (wanted == "fp32"):
        tell(
            f"pstar: warning: the trace was recorded in {found}, but the plan is for {wanted}, so the sizes of "
            f'activations are wrong: record it with trace(..., precision="{wanted}"), or use --precision {found}',
            sys.stderr,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """The machine and budgets for the training, and those that the user left out."""

    cluster: Cluster
    machine: Machine
    assumed: tuple[str, ...]


def _place(options: argparse.Namespace) -> _Place:
    named = None if options.machine is None else machine(options.machine)
    here = accelerators() if named is None and options.device_memory is None else ()
    assumed = []
    device = options.device_memory
    kind = ""
    if device is None:
        device = (named or MACHINES[ASSUMED_MACHINE]).memory_bytes
        if here:
            device, kind = min((gpu.memory_bytes, gpu.name) for gpu in here)
        assumed.append(f"GPUs of {format_bytes(device)} (--device-memory)" if device else "no GPU (--device-memory)")
    chosen = named or default_machine(device, kind)
    if named is None:
        assumed.append(f"the rates of {chosen.name!r} (--machine)")
    gpus = options.gpus or len(here) or options.nodes
    if options.gpus is None:
        assumed.append(f"{gpus} of them (--gpus)")
    host = options.host_memory
    if host is None:
        host = chosen.host_memory_bytes
        if here and options.nodes == 1:
            _, available, limit = host_memory()
            host = int(min(available, limit or available) * _LEFT_FREE) or host
        assumed.append(f"nodes of {format_bytes(host)} host memory (--host-memory)")
    cluster = Cluster(
        gpus=gpus,
        nodes=options.nodes,
        copies=options.replicate,
        device_memory=device,
        host_memory=host,
        disk=options.disk,
        device_reserve=options.reserve_device,
        host_reserve=options.reserve_host,
        host_reserve_per_rank=options.reserve_host_rank,
        nonmodel_overhead=options.reserve_fragmentation,
    )
    cluster.tiers()
    return _Place(cluster, chosen, tuple(assumed))


def _training(options: argparse.Namespace, place: _Place) -> Training:
    if options.machine in NO_BF16 and options.precision == "bf16":
        tell(
            f"pstar: warning: {options.machine} is not made for bf16: these are the figures of --precision fp16",
            sys.stderr,
        )
    several = options.accumulate > 1 or place.cluster.gpus > 1
    if options.step_speculative and several:
        raise InvalidInput(
            "--step-speculative needs one GPU (--gpus 1) and one micro-batch a step (--accumulate 1): other gradients "
            "are complete only when backward has ended"
        )
    if options.step_in_backward and not options.step_speculative and (several or options.precision == "fp16"):
        raise InvalidInput(
            "--step-in-backward needs one GPU (--gpus 1), one micro-batch a step (--accumulate 1), and --precision "
            "bf16 or fp32 (in fp16: --step-speculative): a group is stepped before all gradients are known"
        )
    chunked_loss = options.chunked_loss
    if chunked_loss is None:  # models of transformers make all logits at once
        chunked_loss = getattr(options, "hf", None) is None
    return Training(
        cluster=place.cluster,
        machine=place.machine,
        batch=options.batch,
        seq=options.seq,
        precision=Precision(options.precision),
        accumulate=options.accumulate,
        optimizer_states=options.optimizer_states,
        checkpointing=options.checkpointing,
        offload_checkpoints=options.offload_checkpoints,
        chunked_loss=chunked_loss,
        untied_head=options.untied_head,
        cpu_embedding=options.cpu_embedding,
        head_tiles=options.head_tiles,
        step_in_backward=options.step_in_backward or options.step_speculative,
        speculative=options.step_speculative,
        policy=Policy(options.policy),
        group_bytes=options.group_bytes,
    )


if __name__ == "__main__":
    sys.exit(main())
