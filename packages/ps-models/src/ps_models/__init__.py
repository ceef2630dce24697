"""Model builders, data and the trainer."""

from ps_models._build import build
from ps_models._version import __version__
from ps_models.gpt import GPT, GPTConfig, GPTOutput

__all__ = ["GPT", "GPTConfig", "GPTOutput", "__version__", "build"]
