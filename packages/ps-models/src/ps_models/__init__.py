"""Build models, read data, and train."""

from ps_models._build import build
from ps_models._layers import TiledLinear
from ps_models._moe import MixtureOfExperts
from ps_models._transformers_loss import use_chunked_loss
from ps_models._version import __version__
from ps_models.bert import BERT, BERTClassifier, BERTConfig, BERTOutput
from ps_models.gpt import GPT, GPTClassifier, GPTConfig, GPTOutput
from ps_models.llama import Llama, LlamaConfig

__all__ = [
    "BERT",
    "GPT",
    "BERTClassifier",
    "BERTConfig",
    "BERTOutput",
    "GPTClassifier",
    "GPTConfig",
    "GPTOutput",
    "Llama",
    "LlamaConfig",
    "MixtureOfExperts",
    "TiledLinear",
    "__version__",
    "build",
    "use_chunked_loss",
]
