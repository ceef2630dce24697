"""Report the run: as lines of text, on a terminal, to TensorBoard or to Weights & Biases."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from ps_core._broken_pipe import tell
from ps_core._errors import InvalidInput
from ps_core._install_hints import how_to_install
from ps_core._units import format_bytes
from ps_models.train._options import TrainOptions
from ps_models.train._step_metrics import StepMetrics

_ENGINE_LOG = logging.getLogger("ps_core")
_CLEAR, _BAR_CELLS = "\r\x1b[K", 24
"""The text that clears the cursor's line, and the width of the bar."""
_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb"}


class RunLogger(Protocol):
    """Protocol of a reporter of one run."""

    def say(self, text: str) -> None:
        """Report a text for people."""

    def step(self, row: StepMetrics, left_s: float | None) -> None:
        """Report a step; ``left_s``: the seconds that remain, None if unknown."""

    def close(self) -> None:
        """End the report."""


class TextLogger:
    """Write lines of text; a closed pipe does not end the training."""

    def __init__(self, options: TrainOptions, stream: TextIO | None) -> None:
        self._every, self._steps, self._stream = options.log_every, options.steps, stream
        self._headed = False

    def say(self, text: str) -> None:
        """Write the text; see `RunLogger`."""
        tell(text, self._stream)

    def step(self, row: StepMetrics, left_s: float | None) -> None:
        """Write a line for the first step, the last one, every ``--log-every`` steps, and those with a validation."""
        if row.step % self._every and self._headed and row.step != self._steps and row.val_loss is None:
            return
        columns = cells(row, self._steps, left_s)
        if not self._headed:
            self.say("  ".join(name.rjust(max(len(name), len(cell))) for name, cell in columns.items()))
            self._headed = True
        self.say("  ".join(cell.rjust(len(name)) for name, cell in columns.items()).rstrip())
        if row.val_loss is not None:
            self.say(f"validation loss after step {row.step}: {row.val_loss:.4f}")

    def close(self) -> None:
        """End the lines; see `RunLogger`."""


def cells(row: StepMetrics, steps: int, left_s: float | None) -> dict[str, str]:
    """Return a step's table cells by their headings, which are as wide as the cells."""
    width = len(str(steps))
    found = {
        "step".rjust(2 * width + 1): f"{row.step:>{width}}/{steps}",
        "   loss": f"{row.loss:.4f}",
        "    norm": f"{row.grad_norm:.3g}",
        "       lr": f"{row.lr:.2e}",
        "tokens/s": f"{row.tokens_per_s:,.0f}",
        "TFLOPS": f"{row.tflops:.2f}",
    }
    if row.mfu is not None:
        found["  MFU"] = f"{row.mfu:.1%}"
    for tier, held in row.memory.items():
        part = held["peak_bytes"] / max(1, held["budget_bytes"])
        found[f"{tier} of {format_bytes(held['budget_bytes'])}"] = f"{format_bytes(held['peak_bytes'])}, {part:.0%}"
    found["moved a step"] = format_bytes(sum(row.moved_bytes.values()))
    found["    left"] = "" if left_s is None else clock(left_s)
    return found


def clock(seconds: float) -> str:
    """Return a time as people write it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


class ProgressBarLogger(TextLogger):
    """Write lines of text, and below them a progress bar that is redrawn in place.

    The engine's log lines are written above the bar too, unless logging was set up for them.
    """

    def __init__(self, options: TrainOptions, stream: TextIO) -> None:
        super().__init__(options, stream)
        self._bar = f"step 0/{options.steps}  the first step also plans memory"
        self._log: logging.Handler | None = None
        if _ENGINE_LOG.level == logging.NOTSET and not _ENGINE_LOG.hasHandlers():
            self._log = _LogLines(self.say)
            _ENGINE_LOG.addHandler(self._log)
            _ENGINE_LOG.setLevel(logging.INFO)
        self._draw()

    def say(self, text: str) -> None:
        """Write the text above the bar."""
        tell(_CLEAR, self._stream, end="")
        super().say(text)
        self._draw()

    def step(self, row: StepMetrics, left_s: float | None) -> None:
        """Write the step's line, and redraw the bar; see `RunLogger`."""
        done = row.step * _BAR_CELLS // self._steps
        self._bar = (
            f"step {row.step}/{self._steps} [{'#' * done}{'.' * (_BAR_CELLS - done)}] loss {row.loss:.4f}, "
            f"{row.tokens_per_s:,.0f} tokens/s" + ("" if left_s is None else f", {clock(left_s)} left")
        )
        super().step(row, left_s)
        self._draw()

    def close(self) -> None:
        """Remove the bar."""
        tell(_CLEAR, self._stream, end="")
        if self._log is not None:
            _ENGINE_LOG.removeHandler(self._log)
            _ENGINE_LOG.setLevel(logging.NOTSET)
            self._log = None

    def _draw(self) -> None:
        columns = shutil.get_terminal_size().columns
        tell(_CLEAR + self._bar[: columns - 1], self._stream, end="")


class _LogLines(logging.Handler):
    """Pass each log record to a function, as the line that the engine would write itself."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, as `logging.Handler` does."""
        self._say(f"ps_core: {record.getMessage()}")


class TensorBoardLogger:
    """Write event files in the run's folder."""

    def __init__(self, out: Path) -> None:
        self._folder = str(out / "tensorboard")
        self._writer: Any = None

    def say(self, text: str) -> None:
        """Do nothing: only numbers are written."""

    def step(self, row: StepMetrics, left_s: float | None) -> None:
        """Write the step's numbers; those of an earlier call for this step and later ones are purged."""
        if self._writer is None:
            self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
                self._folder, purge_step=row.step
            )
        for name, value in row.flat().items():
            self._writer.add_scalar(name.replace(".", "/"), value, row.step)

    def close(self) -> None:
        """Close the files; see `RunLogger`."""
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """Report to a run of ``wandb``, with these options."""

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project="pstar-train", name=out.name, dir=str(out), config=dict(options), resume="allow")

    def say(self, text: str) -> None:
        """Do nothing: only numbers are sent."""

    def step(self, row: StepMetrics, left_s: float | None) -> None:
        """Send the step's numbers; see `RunLogger`."""
        self._run.log(row.flat(), step=row.step)

    def close(self) -> None:
        """End the run; see `RunLogger`."""
        self._run.finish()


def check_installed(options: TrainOptions) -> None:
    """Raise `InvalidInput` if the package that ``--log`` names is not installed."""
    if options.log is not None and importlib.util.find_spec(_NEEDS[options.log]) is None:
        raise InvalidInput(
            f"--log: found {options.log!r}, which is not installed; allowed without it is to leave --log out; to have "
            f"it: {how_to_install(_NEEDS[options.log])}"
        )


def loggers(options: TrainOptions, stream: TextIO | None = None) -> list[RunLogger]:
    """Return the loggers that the options and the terminal need."""
    out: TextIO | None = stream or sys.stdout
    lively = out is not None and out.isatty() and os.environ.get("TERM") != "dumb"
    found: list[RunLogger] = [
        ProgressBarLogger(options, out) if out is not None and lively else TextLogger(options, out)
    ]
    if options.log == "tensorboard":
        found.append(TensorBoardLogger(Path(options.out)))
    elif options.log == "wandb":
        found.append(WandbLogger(Path(options.out), vars(options)))
    return found
