"""Train from the command line: ``pstar-train``, or `main` with the same arguments. See docs/training.md."""

from ps_models.train._main import main
from ps_models.train._options import TrainOptions

__all__ = ["TrainOptions", "main"]
