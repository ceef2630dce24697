"""The trainer: ``pstar-train``, or `main` of the same words. See docs/training.md."""

from ps_models.train._main import main
from ps_models.train._options import TrainOptions

__all__ = ["TrainOptions", "main"]
