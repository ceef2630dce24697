"""Read and write directories in Hugging Face's format: ``config.json``, and ``model.safetensors`` or parts of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ps_core._errors import CheckpointDamaged, InvalidInput
from ps_core._input_files import MOST_BYTES, read_text, stays_inside
from ps_core._install_hints import how_to_install
from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.shapes import Family, TransformerShape
from ps_core.engine import is_managed, save_weights
from ps_models._config import check_names, option_names
from ps_models._layers import TiledLinear

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_LONGEST_INDEX_BYTES = 2**28
"""An index has a line for each tensor; a trillion parameters have 16 MB of them."""
Entries = dict[str, Any]
"""The contents of a ``config.json``. (Any: JSON.)"""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Describe a family's files: what they say, and in which words."""

    read: Callable[[Entries], Entries]
    """Convert Hugging Face's fields to this package's configuration, except the shape's."""
    write: Callable[[Any], Entries]
    """Convert this package's configuration to Hugging Face's. (Any: a family's configuration.)"""
    architecture: Callable[[str, TransformerShape], str]
    """Return Hugging Face's class for one of this package's, by its name."""
    base: str
    """The prefix of all names but the heads'; files of the bare model leave it out."""
    heads: tuple[str, ...]
    """Prefixes of the heads' names."""
    ignored: tuple[str, ...] = ()
    """Endings of names in files that are no parameter, or a tied one again."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Endings of old names, and the new ones."""


class Pretrained(nn.Module):
    """A model that can be read from such a directory and written to one."""

    files: ClassVar[Files]
    config_type: ClassVar[type[Any]]
    """The class of its configuration. (Any: each family has its own.)"""
    config: Any
    classes: int | None = None
    """Number of a classifier's classes; None: it is no classifier."""
    classifies: ClassVar[bool] = False

    @classmethod
    def from_pretrained(cls, directory: str | Path, **options: Any) -> Self:
        """Return the model in a directory, on the CPU, in its file's types, with dropout off.

        ``options`` replace fields of the configuration (any: they are of the fields' types). A classifier made from a
        language model keeps what both have and draws its head.
        """
        folder = Path(directory)
        entries = read_json(folder / CONFIG)
        check_names(options, option_names(cls.config_type))
        config = cls.config_type(shape=shape_from_config(folder), **cls.files.read(entries) | options)
        with torch.device("meta"):
            model = cls(config, **_classes(cls, entries))
        _load(model, _checked(model, dict(_tensors(folder))))
        for module in model.modules():
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                fresh: Any = module.to_empty(device="cpu", recurse=False)
                fresh.reset_parameters()
        return model.eval()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model for `from_pretrained`, this one and Hugging Face's. The directory may exist.

        For a managed model, rank 0 writes one group after another; all processes that share the model call this.
        """
        if not is_managed(self) and any(parameter.is_meta for parameter in self.parameters()):
            raise InvalidInput("a model on meta has no weights to save: build it on a device, as build(name, 'cpu')")
        entries = self.files.write(self.config)
        _check_said(self.config.shape, entries)
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        entries["architectures"] = [self.files.architecture(type(self).__name__, self.config.shape)]
        if self.classes is not None:
            labels = [f"LABEL_{number}" for number in range(self.classes)]
            entries["id2label"] = {str(number): label for number, label in enumerate(labels)}
            entries["label2id"] = {label: number for number, label in enumerate(labels)}
        # Under other names first: a directory that is written over stays whole until the new files are.
        weights, config = folder / f"{WEIGHTS}.new", folder / f"{CONFIG}.new"
        if not _write(self, weights):
            return
        config.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        weights.replace(folder / WEIGHTS)
        config.replace(folder / CONFIG)


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Entries:
    """Return a file's JSON object."""
    try:
        found = json.loads(read_text(path, most_bytes))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise InvalidInput(f"files of weights need safetensors: {how_to_install('safetensors')}") from error
    return safetensors


def _check_said(shape: TransformerShape, entries: Entries) -> None:
    """Raise `InvalidInput` if a shape has a part that these entries cannot say, or lacks one that they always mean."""
    if shape.family is Family.BERT and not shape.token_types:
        raise InvalidInput(f"{shape.name} is not saved: config.json cannot say token_types=0; build it with 1")
    said = shape_from_config(json.dumps(entries))
    for field in ("qkv_bias", "out_bias", "mlp_bias"):
        if getattr(shape, field) != getattr(said, field):
            raise InvalidInput(
                f"{shape.name} is not saved: its {field} is {getattr(shape, field)}, config.json would mean "
                f"{getattr(said, field)}; build it with that"
            )


def _classes(cls: type[Pretrained], entries: Entries) -> dict[str, int]:
    if not cls.classifies:
        return {}
    labels = entries.get("id2label")
    if not isinstance(labels, dict | None):
        raise InvalidInput(f"config.json: id2label must be an object, a label for each class, found {labels!r}")
    return {"classes": len(labels or (0, 1))}


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        names = _files_in(folder / INDEX)
    for name in names:
        if not (folder / name).is_file():
            raise InvalidInput(f"{str(folder)!r} has no {name}: expected a directory that save_pretrained wrote")
        yield from _read(folder / name)


def _files_in(index: Path) -> list[str]:
    """Return the files that an index names; raise `InvalidInput` for one outside of its folder."""
    places = read_json(index, _LONGEST_INDEX_BYTES).get("weight_map")
    names: dict[str, None] = {}
    for name in places.values() if isinstance(places, dict) else [places]:
        if not isinstance(name, str) or not stays_inside(name):
            raise InvalidInput(f"{index}: its weight_map names {name!r}, expected files of its own folder")
        names[name] = None
    return sorted(names)


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors, as copies: the file may be overwritten while they are in use."""
    library = _safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                yield key, file.get_tensor(key).clone()
    except library.SafetensorError as error:
        raise CheckpointDamaged(f"{path}: {error}; copy this file anew from where it is whole") from error


def _checked(model: Pretrained, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the file's tensors under this package's names; raise `InvalidInput` unless they are the model's."""
    files, wanted = model.files, {name: value.shape for name, value in _joined(model, dict(model.state_dict())).items()}
    if not any(name.startswith(files.base) for name in found):
        found = {name if name.startswith(files.heads) else files.base + name: found[name] for name in found}
    for old, new in files.renamed:
        found = {name.removesuffix(old) + new if name.endswith(old) else name: found[name] for name in found}
    mine = tuple(head for head in files.heads if any(name.startswith(head) for name in wanted))
    foreign = tuple(head for head in files.heads if head not in mine)
    kept = {
        name: value
        for name, value in found.items()
        if name in wanted or not (name.endswith(files.ignored) or name.startswith(foreign))
    }
    missing = [name for name in wanted if name not in kept]
    if model.classifies:
        missing = [name for name in missing if not name.startswith(mine)]
    beyond = [name for name in kept if name not in wanted]
    for names, what in ((missing, "are missing"), (beyond, "are not the model's")):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise InvalidInput(
                f"{type(model).__name__}.from_pretrained: {len(names)} tensors {what} ({some}): the file is of another "
                "class of model, or damaged"
            )
    for name, value in kept.items():
        if value.shape != wanted[name]:
            raise InvalidInput(f"{name!r} is {tuple(value.shape)} in the file, config.json says {tuple(wanted[name])}")
    return kept


def _write(model: nn.Module, path: Path) -> bool:
    """Write all weights; return True on the process that wrote. All processes that share the model call this."""
    tiled = any(isinstance(module, TiledLinear) for module in model.modules())
    if not is_managed(model):
        state = dict(model.state_dict())
    elif not save_weights(path, model, overwrite=True):
        return False
    elif not tiled:
        return True
    else:
        state = dict(_read(path))
    library = _safetensors()
    joined = {name: value.contiguous() for name, value in _joined(model, state).items()}
    library.torch.save_file(joined, path, {"format": "pt"})
    return True


def _joined(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the tiles of each `TiledLinear` together."""
    for path, module in model.named_modules():
        if not isinstance(module, TiledLinear):
            continue
        for kind in ("weight", "bias"):
            names = [f"{path}.tiles.{index}.{kind}" for index in range(len(module.tiles))]
            if names[0] in state:
                parts = [state.pop(name) for name in names]
                state[f"{path}.{kind}"] = torch.cat(parts, dim=module.cut if kind == "weight" else 0)
    return state


def _load(model: nn.Module, found: dict[str, Tensor]) -> None:
    for path, module in model.named_modules():
        if not isinstance(module, TiledLinear):
            continue
        for kind in ("weight", "bias"):
            if f"{path}.{kind}" in found:
                parts = torch.split(found.pop(f"{path}.{kind}"), module.widths, module.cut if kind == "weight" else 0)
                for index, part in enumerate(parts):
                    found[f"{path}.tiles.{index}.{kind}"] = part.contiguous()
    model.load_state_dict(found, strict=False, assign=True)
