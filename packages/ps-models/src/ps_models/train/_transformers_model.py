"""Read a causal language model of transformers from a folder into a managed model, file by file.

[Note: names in files]
The engine reads a file's tensors straight into its chunks, by their names. If the names in the files are the model's,
no tensor is ever in memory twice. PEFT renames the modules that it wraps with adapters, so `OriginalNames` keeps the
names. Some architectures of transformers combine tensors of the files (such as experts). Such a model is read as a
whole by ``from_pretrained``, and written as a whole: only transformers knows how.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ps_core._errors import CheckpointMismatch, InvalidInput
from ps_core.engine import load_weights
from ps_models._transformers_loss import use_chunked_loss
from ps_models.train._import_transformers import package_for, transformers_for
from ps_models.train._options import TrainOptions
from ps_models.train._tokenizers import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _first_part(error: Exception) -> str:
    """Return an error of transformers as one line, without its list of all architectures."""
    return " ".join(str(error).split()).partition(" Model type should be one of ")[0]


class OriginalNames(nn.Module):
    """Show a model's modules under their present names, even if other modules wrap them later."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model_prefix: str = getattr(model, "base_model_prefix", "")
        self._found = list(model.named_modules(remove_duplicate=False))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module with its original name; the arguments are those of `nn.Module` and change nothing."""
        yield from self._found


class TransformersModel:
    """Describe the model in a folder; see `ModelFacts`."""

    def __init__(self, options: TrainOptions) -> None:
        assert options.hf is not None, "there is a folder"
        self.folder = Path(options.hf)
        self._library = transformers_for("--hf", self.folder)
        self._dtype = _TYPES[options.precision]
        self._model = self._without_memory()
        self.names = OriginalNames(self._model)
        text = self._model.config.get_text_config()
        self.name = self.folder.resolve().name
        self.kind = type(self._model).__name__
        self.vocabulary: int = text.vocab_size
        self.parameters = sum(each.numel() for each in self._model.parameters())
        self.positions: int | None = getattr(text, "max_position_embeddings", None)
        whole, index = self.folder / WEIGHTS, self.folder / INDEX
        self._weights = index if index.is_file() and not whole.is_file() else whole  # as transformers chooses
        self.is_read = False
        """True if the model has its weights already, so that `load` has nothing to do."""
        self.streams = self._has_own_names()
        """True if the names in the files are the model's; see [Note: names in files]."""
        if self.positions is not None and options.seq > self.positions:
            raise InvalidInput(
                f"--seq: found {options.seq}, allowed with {str(self.folder)!r} is at most {self.positions}, the "
                "model's positions"
            )

    def _without_memory(self) -> Any:
        """Return the model on ``meta``. (Any: as all of transformers.)"""
        try:
            config = self._library.AutoConfig.from_pretrained(self.folder, local_files_only=True)
            with torch.device("meta"):
                model = self._library.AutoModelForCausalLM.from_config(config, dtype=self._dtype)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InvalidInput(
                f"--hf: {str(self.folder)!r} has no causal language model of transformers: "
                f"{_first_part(error)}; allowed is a folder that save_pretrained has written"
            ) from None
        # Blocks say so, not the configuration: some have this entry, false, for a model that is causal all the same.
        if any(getattr(module, "is_decoder", True) is False for module in model.modules()):
            raise InvalidInput(
                f'--hf: {str(self.folder)!r} has a {type(model).__name__} without "is_decoder": true, in which a token '
                "attends to those after it, also to the one that it is to predict; allowed is a causal language model"
            )
        model.config.get_text_config().use_cache = False  # the cache is only for sampling
        return model

    def _has_own_names(self) -> bool:
        """Return True if each tensor of the model is in the files under one of its names."""
        found, prefix = self._names_in_files(), self.names.base_model_prefix + "."
        wanted: dict[int, list[str]] = {}
        for name, tensor in named_tensors(self.names):
            wanted.setdefault(id(tensor), []).extend((name, prefix + name, name.removeprefix(prefix)))
        return all(not found.isdisjoint(names) for names in wanted.values())

    def _names_in_files(self) -> set[str]:
        safetensors: Any = package_for("--hf", "safetensors")
        try:
            if self._weights.name == INDEX:
                return set(json.loads(self._weights.read_text("utf-8"))["weight_map"])
            with safetensors.safe_open(self._weights, framework="pt") as file:
                return set(file.keys())
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise InvalidInput(
                f"--hf: cannot read the weights in {str(self.folder)!r}: {' '.join(str(error).split())}; allowed is "
                f"{WEIGHTS}, or {INDEX} with the files that it names"
            ) from None

    def check_tokens(self, chosen: Tokenizer | None) -> None:
        """Raise `InvalidInput` if the tokenizer has tokens that the model does not know."""
        if chosen is not None and chosen.vocabulary > self.vocabulary:
            raise InvalidInput(
                f"--tokenizer: found one of {chosen.vocabulary} tokens, allowed with {str(self.folder)!r} is at most "
                f"{self.vocabulary}, which the model knows"
            )

    def build(self, options: TrainOptions, *, whole: bool) -> nn.Module:
        """Return the model for `chunked`: without memory, since its values come later, or ``whole``."""
        if whole:
            self._model, self.is_read = self._read_whole(), True
            self.names = OriginalNames(self._model)
        if options.chunked_loss:
            use_chunked_loss(self._model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames what switches checkpointing on
            found: nn.Module = self._model if options.lora is None else with_adapters(self._model, options)
            self._check_adapters(found, merges=options.lora_merge)
            if options.checkpointing and self._model.supports_gradient_checkpointing:
                self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return found

    def _check_adapters(self, adapted: nn.Module, *, merges: bool) -> None:
        """Raise for adapters that the engine cannot train, and for those that cannot be merged."""
        names: dict[int, str] = {id(module): prefix for prefix, module in self.names.named_modules()}
        uses: dict[int, list[str]] = {}
        for name, tensor in named_tensors(self.names):
            uses.setdefault(id(tensor), []).append(name)
        for layer in adapted_layers(adapted):
            if type(layer).__name__ == "ParamWrapper":
                name = names.get(id(layer.base_layer), "a module")
                raise InvalidInput(
                    f"--lora-targets: {name!r} is no linear layer, so PEFT would exchange its weight while it runs; "
                    "allowed are names of linear layers, as in --lora-targets q_proj v_proj"
                )
            shared = uses[id(layer.base_layer.weight)]
            if merges and len(shared) > 1:
                raise InvalidInput(
                    f"--lora-merge: {shared[0]!r} and {shared[1]!r} are one weight, and one of them has an adapter; "
                    "allowed is to export the adapters, or other --lora-targets"
                )

    def _read_whole(self) -> Any:
        model, found = self._library.AutoModelForCausalLM.from_pretrained(
            self.folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
        if found["missing_keys"]:
            self._refuse_missing(sorted(found["missing_keys"]))
        model.config.get_text_config().use_cache = False
        model.config.dtype = self._dtype
        return model

    def load(self) -> str:
        """Read the files into the managed model; return the names that the model does not use, in words."""
        if self.is_read:
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied tensors that differ, transformers takes the same one, silently
            try:
                missing, unexpected = load_weights(self.names, self._weights, strict=False)
            except CheckpointMismatch as error:
                told = str(error).partition("\n  try:")[0]
                raise InvalidInput(f"--hf: {told}\nallowed is a folder whose files fit its config.json") from None
        if missing:
            self._refuse_missing(missing)
        some = ", ".join(unexpected[:3])
        return f"{self.folder}: {len(unexpected)} tensors are not the model's ({some})" if unexpected else ""

    def write_config(self, folder: Path) -> None:
        """Write the original configuration, with the type of the weights beside it."""
        config = self._library.AutoConfig.from_pretrained(self.folder, local_files_only=True)
        config.dtype, config.architectures = self._dtype, [self.kind]
        config.save_pretrained(folder)
        settings = self.folder / "generation_config.json"
        if settings.is_file():
            shutil.copy(settings, folder)

    def save(self, folder: Path, values: dict[str, Tensor]) -> None:
        """Write weights by transformers, under the names that its files have."""
        self._model.save_pretrained(folder, state_dict=values)

    def _refuse_missing(self, names: list[str]) -> None:
        raise InvalidInput(
            f"--hf: {str(self.folder)!r} lacks {len(names)} tensors of {self.kind} ({', '.join(names[:3])}); allowed "
            "is the folder of a whole causal language model"
        )


def named_tensors(names: OriginalNames) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's files, tied ones under each of their names."""
    for prefix, module in names.named_modules():
        kept = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (module._parameters | kept).items():
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def with_adapters(model: Any, options: TrainOptions) -> Any:
    """Return PEFT's model around ``model``, with adapters that have values. (Any: as all of PEFT.)"""
    peft = package_for("--lora", "peft")
    assert options.lora is not None, "a rank was given"
    targets = "all-linear" if options.lora_targets == ("all-linear",) else list(options.lora_targets) or None
    config = peft.LoraConfig(
        r=options.lora,
        lora_alpha=2 * options.lora if options.lora_alpha is None else options.lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    replaced = _replace_meta_parameters(model)
    try:
        torch.manual_seed(options.seed)
        found = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise InvalidInput(f"--lora-targets: {' '.join(str(error).split())}") from None
    finally:
        for module, name, parameter in replaced:
            parameter.requires_grad = False
            module._parameters[name] = parameter
    return found


def adapted_layers(model: nn.Module) -> list[Any]:
    """Return PEFT's modules around some of the model's. (Any: as PEFT's classes.)"""
    return [each for each in model.modules() if hasattr(each, "base_layer") and hasattr(each, "merge")]


def _replace_meta_parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Replace each parameter on ``meta`` by a single zero, expanded to its shape; return the parameters.

    PEFT moves adapters to the device of the weights beside them: on ``meta`` they would lose their values.
    """
    found: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, nn.Parameter) and parameter.is_meta:
                zero = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(zero, requires_grad=False)
                found.append((module, name, parameter))
    return found
