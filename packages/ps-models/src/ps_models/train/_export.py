"""Export what was trained in Hugging Face's layout: the whole model, or its adapters."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ps_core._units import format_bytes
from ps_core.engine import materialized, save_weights
from ps_models.train._folder_tokenizer import FolderTokenizer
from ps_models.train._loop import ManagedModel
from ps_models.train._options import TrainOptions
from ps_models.train._run_folder import UNFINISHED_EXPORT
from ps_models.train._tokenizers import Tokenizer
from ps_models.train._transformers_model import (
    INDEX,
    WEIGHTS,
    OriginalNames,
    TransformersModel,
    adapted_layers,
    named_tensors,
)

PIECE_BYTES = 2**30
"""The most bytes of a merged model in memory, and in one of its files, unless one tensor is larger."""


def export(options: TrainOptions, source: TransformersModel, managed: ManagedModel, chosen: Tokenizer | None) -> str:
    """Write the model, or its adapters, to ``OUT/export``; return a line that says so. All ranks call this."""
    out, leads = Path(options.out), managed.ranks.leads
    partial, target = out / UNFINISHED_EXPORT, out / "export"
    if leads:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    managed.ranks.total(0.0)  # a barrier: no rank writes before the folder exists
    adapters = options.lora is not None and not options.lora_merge
    if adapters:
        _write_adapters(partial, source, managed)
    elif not source.streams:
        _write_whole(partial, source, managed)
    elif options.lora is None:
        save_weights(partial / WEIGHTS, managed.model)
    else:
        _write_merged(partial, source.names, managed)
    if leads:
        if not adapters:
            source.write_config(partial)
        _write_tokenizer(partial, source, chosen)
        _replace(partial, target)
    size = sum(each.stat().st_size for each in target.iterdir()) if leads else 0
    what, reader = ("adapters", "PeftModel") if adapters else ("model", "AutoModelForCausalLM")
    return f"exported the {what}: {target}, {format_bytes(size)}, for {reader}.from_pretrained"


def _replace(partial: Path, target: Path) -> None:
    """Replace an older folder by the new one."""
    removed = target.with_name(f".removed-{target.name}")
    shutil.rmtree(removed, ignore_errors=True)
    if target.exists():
        target.rename(removed)
    partial.rename(target)
    shutil.rmtree(removed, ignore_errors=True)


def _write_tokenizer(folder: Path, source: TransformersModel, chosen: Tokenizer | None) -> None:
    if isinstance(chosen, FolderTokenizer):
        chosen.tokenizer.save_pretrained(folder)
    if chosen is not None:
        return
    library: Any = importlib.import_module("transformers")
    try:
        library.AutoTokenizer.from_pretrained(source.folder, local_files_only=True).save_pretrained(folder)
    except Exception:  # whatever transformers, or a package that it needs for this one, raises
        return  # the data are token numbers, so the export needs no tokenizer


def _write_adapters(folder: Path, source: TransformersModel, managed: ManagedModel) -> None:
    model: Any = managed.model  # PEFT's
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with materialized(model, trained):
        values = {name: each.detach().clone() for name, each in model.named_parameters() if name in set(trained)}
    if managed.ranks.leads:
        for config in model.peft_config.values():
            config.base_model_name_or_path = str(source.folder)
        model.save_pretrained(folder, state_dict=values, save_embedding_layers=False)


def _write_whole(folder: Path, source: TransformersModel, managed: ManagedModel) -> None:
    """Write the model by transformers, which needs a copy of it in memory."""
    with materialized(managed.model):
        layers = adapted_layers(managed.model)
        for layer in layers:
            layer.merge()
        if managed.ranks.leads:
            values = {name: tensor.detach() for name, tensor in named_tensors(source.names)}
            source.save(folder, values)
        for layer in layers:
            layer.unmerge()


def _write_merged(folder: Path, names: OriginalNames, managed: ManagedModel) -> None:
    """Write the model with its adapters merged, some of its tensors at a time."""
    writer = _Pieces(folder, managed.ranks.leads)
    managed_names = {id(parameter): name for name, parameter in managed.model.named_parameters()}
    layers = {id(layer.base_layer): layer for layer in adapted_layers(managed.model)}
    written: set[int] = set()
    for prefix, module in names.named_modules():
        layer = layers.get(id(module))
        inside = [managed_names[id(each)] for each in (layer or module).parameters(recurse=layer is not None)]
        if not inside and not module._buffers:
            continue
        with materialized(managed.model, dict.fromkeys(inside)):
            if layer is not None:
                layer.merge()
            for name, tensor in named_tensors(_Alone(prefix, module)):
                if id(tensor) not in written:  # of tied names the first
                    writer.add(name, tensor.detach().clone().contiguous())
                written.add(id(tensor))
            if layer is not None:
                layer.unmerge()  # what is left of it: the copies go
    writer.finish()


class _Alone(OriginalNames):
    """A module and its name."""

    def __init__(self, name: str, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._found = [(name, module)]


class _Pieces:
    """Write tensors into safetensors files of about the same size, and their index."""

    def __init__(self, folder: Path, writes: bool) -> None:
        """Begin; ``writes``: False on ranks that only take part in collectives."""
        self._folder, self._writes = folder, writes
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0
        self._save: Any = importlib.import_module("safetensors.torch").save_file

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; write the collected ones if they are enough for a file."""
        if not self._writes:
            return
        if self._held and self._bytes + tensor.nbytes > PIECE_BYTES:
            self._flush()
        self._held[name] = tensor
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def _flush(self) -> None:
        self._save(self._held, self._folder / f"{len(self._files)}.part", {"format": "pt"})
        self._files.append(list(self._held))
        self._held, self._bytes = {}, 0

    def finish(self) -> None:
        """Write the rest, name the files, and write the index if there are several."""
        if not self._writes:
            return
        self._flush()
        count, index = len(self._files), dict[str, str]()
        for number, names in enumerate(self._files):
            name = WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"{number}.part").rename(self._folder / name)
            index |= dict.fromkeys(names, name)
        if count > 1:
            told = {"metadata": {"total_size": self._total}, "weight_map": index}
            (self._folder / INDEX).write_text(json.dumps(told, indent=2) + "\n", "utf-8")
