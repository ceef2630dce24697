"""Run ``pstar-train``."""

from __future__ import annotations

import errno
import io
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ps_core import CheckpointMismatch, DoesNotFit, InvalidInput, PatrickStarError
from ps_core._broken_pipe import tell
from ps_core.engine import statistics
from ps_models.train._command_line import parse
from ps_models.train._data import Corpus, corpus
from ps_models.train._error_hints import hint_for, in_options
from ps_models.train._export import export
from ps_models.train._loggers import check_installed, loggers
from ps_models.train._loop import Loop, ManagedModel, short_collections
from ps_models.train._options import COMMAND, TrainOptions
from ps_models.train._pictures import draw
from ps_models.train._ranks import StopCheck, join_ranks
from ps_models.train._run_folder import begun, open_folder
from ps_models.train._sample_text import sample
from ps_models.train._setup import Found, device_of, fitted, manage, model_of, objective_for, prepare, told
from ps_models.train._step_metrics import Rates
from ps_models.train._stop_signal import StopSignal
from ps_models.train._summary import summary
from ps_models.train._transformers_model import TransformersModel

DONE, FAILED, BAD_INPUT, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    options = TrainOptions()
    try:
        options = parse(argv)
        return train(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InvalidInput as error:
        return _fail(BAD_INPUT, str(error))
    except CheckpointMismatch as error:
        told = str(error).partition("\n  try:")[0]
        return _fail(
            BAD_INPUT, f"--out: {told}\nallowed is a folder whose checkpoints are of this training, or a new one"
        )
    except DoesNotFit as error:
        return _fail(DOES_NOT_FIT, hint_for(error, options, begun=begun(Path(options.out))))
    except (PatrickStarError, torch.OutOfMemoryError) as error:
        return _fail(FAILED, str(error))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        more = ": make room, and run the same command again" if full else ""
        return _fail(FAILED, f"{error}{more}")


def _fail(status: int, told: str) -> int:
    lines = (" ".join(line.split()) for line in in_options(told).splitlines())
    tell(f"{COMMAND}: {'; '.join(lines)}", sys.stderr)
    return status


def train(options: TrainOptions) -> int:
    """Train as the options say, from the newest checkpoint if there is one; return the exit status."""
    check_installed(options)
    found = model_of(options)
    with ExitStack() as stack:
        ranks = stack.enter_context(join_ranks())
        stop = stack.enter_context(StopSignal())
        data = corpus(options, lambda text: tell(text, sys.stdout if ranks.leads else None))
        found = fitted(found, options, data)
        objective = objective_for(options, data, found)
        ranks.check(options, data.digest)
        folder = stack.enter_context(open_folder(options, data.digest, ranks))
        watching = loggers(options) if ranks.leads else []
        for each in watching:
            stack.callback(each.close)
        rates = Rates(found, ranks.own(options), device_of(options))
        for each in watching:
            each.say(f"{told(found, options, ranks)}\n{data.told}\nmaking its weights and optimizer states")
        fresh = not folder.steps()
        managed = manage(options, found, ranks, fresh=fresh)
        loop = Loop(options, objective, managed, folder, rates, watching)
        prepare(options, found, managed, loop.say, fresh=fresh)
        if loop.resume():
            ended = loop.step >= options.steps or loop.out_of_patience
            rest = "nothing is left to train" if ended else "going on from there"
            loop.say(f"{options.out}: step {loop.step} of {options.steps} is done; {rest}")
        before, started = loop.step, time.perf_counter()
        halt = StopCheck(stop, ranks)
        with short_collections():
            loop.run(halt)
        if loop.not_finite:
            if ranks.leads and (drawn := draw(folder.path, found.name, loop.memory)):
                loop.say(drawn)
            stack.close()  # end the display and leave the ranks before the message
            return _fail(FAILED, loop.not_finite) if ranks.leads else FAILED
        seconds = time.perf_counter() - started
        if loop.step > before:
            counted, steps = statistics(managed.model), loop.step - before
            loop.say(summary(options, counted, rates, loop.moved_bytes, steps=steps, seconds=seconds))
            if ranks.leads:
                loop.say(draw(folder.path, found.name, loop.memory))
        if halt():
            done = f"step {loop.step} of {options.steps} is saved; the same command goes on from there"
            loop.say(f"{halt.by}: {done if loop.step else 'no step is done, so nothing is saved'}")
            return DONE
        _finish(options, found, data, managed, loop)
    return DONE


def _finish(options: TrainOptions, found: Found, data: Corpus, managed: ManagedModel, loop: Loop) -> None:
    """Report the training's result, make the sample, and export a model that came from a folder."""
    if loop.out_of_patience and loop.step < options.steps:
        loop.say(
            f"step {loop.step}: the validation loss has not fallen for {options.patience} validations, so training "
            "ends here (--patience)"
        )
    if loop.val_loss is not None:
        loop.say(f"validation loss {loop.val_loss:.4f} {loop.objective.measured_in}")
    if options.sample:
        loop.say(f"making a sample of {options.sample} tokens")
        loop.say(sample(options, data, managed, loop.objective))
    if isinstance(found, TransformersModel):
        loop.say(export(options, found, managed, data.tokenizer))
