"""Compute the cross entropy of rows of logits."""

from __future__ import annotations

from ps_kernels._arithmetic_order import to_single
from ps_kernels._arrays import (
    FLOATS,
    Array,
    check_contiguous,
    check_dtype,
    check_flat,
    check_label,
    check_number,
    check_together,
    check_written,
    note_written,
    refuse_flag,
    view,
)
from ps_kernels._backends import choose, named
from ps_kernels._errors import InvalidArgument


def cross_entropy(
    logits: Array,
    labels: Array,
    losses: Array,
    *,
    ignored: int = -100,
    factor: float = 1.0,
    gradient: bool = True,
    backend: str | None = None,
) -> None:
    """Write each row's cross entropy to ``losses`` (float32), and its gradient times ``factor`` over ``logits``.

    ``labels`` (int64) are the columns of the right classes. Rows labelled ``ignored`` get a loss and gradient of zero.
    Without ``gradient`` the logits are only read. A label that is no column is refused. The backend ``cuda``, where the
    host waits for nothing, gives it a loss and gradient of nan instead.
    """
    source, right, target = view("logits", logits), view("labels", labels), view("losses", losses)
    check_together((source, right, target))
    if source.device != "cpu" and not source.device.startswith("cuda"):
        raise InvalidArgument(f"logits: expected on the CPU or a CUDA device, found on {source.device}")
    check_dtype([source], FLOATS)
    check_dtype([right], ("int64",))
    check_dtype([target], ("float32",))
    if len(source.shape) != 2 or not source.shape[1]:
        raise InvalidArgument(f"logits: expected a row of at least one for each label, found shape {source.shape}")
    check_contiguous(source)
    check_flat([right, target], source.shape[0])
    written = [target, source] if gradient else [target]
    check_written(written, [right] if gradient else [right, source])
    check_label("ignored", ignored)
    if not isinstance(gradient, bool):
        refuse_flag("gradient", gradient)
    scale = to_single(check_number("factor", factor))
    chosen = choose(source.name, source.library, source.device, None if backend is None else named(backend))
    wrong = chosen.cross_entropy(
        source.array, right.array, target.array, ignored=ignored, factor=scale, gradient=gradient
    )
    if wrong >= 0:
        raise InvalidArgument(
            f"labels[{wrong}]: expected 0 to {source.shape[1] - 1}, or {ignored} for a row that does not count; "
            f"found {int(right.array[wrong])}"
        )
    note_written(written)
