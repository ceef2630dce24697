"""Explain the engine's errors in terms of command-line options."""

from __future__ import annotations

import re
import shlex

from ps_core import DoesNotFit
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.shapes import Family
from ps_models._transformers_loss import CHUNK_TOKENS
from ps_models.train._options import TrainOptions, flag_of
from ps_models.train._setup import budget_of

_BUDGET = re.compile(r"""Budget\(((?:"[^"]*"|[^")])*)\)""")
_ROW = re.compile(r"""(\w+)=(?:"([^"]*)"|([^",]+))""")
_FIELD = re.compile(r"\bBudget\.(device|host|disk_dir|disk)\b")
_OPTION = {"device": "--device-memory", "host": "--host-memory", "disk": "--disk", "disk_dir": "--disk-dir"}
_SMALLER = re.compile(r"(half|a quarter of|an eighth of|a sixteenth of) the batch or sequence(.*)")
_PARTS = {"half": 2, "a quarter of": 4, "an eighth of": 8, "a sixteenth of": 16}
_STRANGE = re.compile(r"\b(?:Budget|Options|chunked)\b|\bmodel\.|accumulation_steps|cut into several")
"""Words of suggestions that make no sense on a command line."""


def in_options(text: str, options: TrainOptions | None = None) -> str:
    """Return ``text`` with fields of `Budget` replaced by command-line options, those that differ from ``options``."""

    def named(match: re.Match[str]) -> str:
        rows = {name: quoted or plain for name, quoted, plain in _ROW.findall(match[1])}
        given = None if options is None else budget_of(options)
        told = {name: size for name, size in rows.items() if size != str(getattr(given, name, ""))}
        said = {name: "" if size == "..." else " " + shlex.quote(size) for name, size in told.items()}
        return " ".join(_OPTION[name] + size for name, size in said.items())

    return _FIELD.sub(lambda match: _OPTION[match[1]], _BUDGET.sub(named, text))


def hint_for(error: DoesNotFit, options: TrainOptions, *, begun: bool = False) -> str:
    """Return what does not fit, and the options that would help. ``begun``: the run in ``--out`` has made steps."""
    what = str(error).splitlines()[0]
    found = [told for suggestion in error.remedies for told in _hint(suggestion, options, error.needed_bytes)]
    if begun:
        fixed = {flag_of(name) for name in options.identity}
        found = [
            f"{told} (with another --out)" if fixed & set(re.findall(r"--[\w-]+", told)) else told for told in found
        ]
    return "; try ".join([what, *dict.fromkeys(found)])


def _hint(suggestion: str, options: TrainOptions, needed_bytes: int) -> list[str]:
    """Return the engine's suggestion as command-line options, or the nearest to it; empty if there is none."""
    if "of ps_models" in suggestion or suggestion.startswith("HostEmbedding"):
        return _apart(suggestion, options)
    part = _SMALLER.match(suggestion.replace("a smaller batch", "half the batch"))
    if part is not None:
        chunks = options.hf and not options.chunked_loss and options.batch * options.seq > CHUNK_TOKENS
        chunked = ["--chunked-loss: not all logits are there at a time"]
        return [*(chunked if chunks else []), _smaller_batch(options, _PARTS[part[1]]) + part[2]]
    if suggestion.startswith("x = torch.utils.checkpoint"):
        return [] if options.checkpointing else ["--checkpointing: only one block's activations are there at a time"]
    if suggestion.startswith("precision="):
        said = suggestion.partition(":")[2]
        narrow = ["--precision bf16"] * (options.precision == "fp32") + ["--accumulate 1"] * (options.accumulate > 1)
        return [" ".join(narrow) + (f":{said}" if said else "")] if narrow else []
    if "half of all parameters" in suggestion and options.disk is None:
        return [f"--disk {-(-needed_bytes // 2**20)}MiB: room for what the computer's memory cannot hold"]
    if suggestion.startswith("a smaller model"):
        return ["a smaller --model" + suggestion.removeprefix("a smaller model")]
    told = in_options(suggestion, options)
    return [] if _STRANGE.search(told) else [told]


def _smaller_batch(options: TrainOptions, part: int) -> str:
    """Return options with a ``part``-th of the batch, and of the sequence where the batch is smaller than that."""
    batch = max(1, options.batch // part)
    rest = -(-part * batch // options.batch)
    told = [f"--batch {batch}"] * (batch < options.batch) + [f"--seq {max(2, options.seq // rest)}"] * (rest > 1)
    return " ".join(told)


def _apart(suggestion: str, options: TrainOptions) -> list[str]:
    """Return options that keep parts of the token table or the head off the accelerator."""
    if options.hf is not None:
        return []
    found = shape(options.model)
    if found.family is Family.BERT:
        return []  # whose head is its table, and has no tiles
    tied = found.tied_head and not options.untied_head
    named = {
        "--untied-head": tied,
        "--cpu-embedding": "HostEmbedding" in suggestion and not options.cpu_embedding,
        f"--head-tiles {max(16, 2 * options.head_tiles)}": tied or "lm_head" in suggestion,
    }
    words = " ".join(word for word, wanted in named.items() if wanted)
    return [f"{words}: token table and head need not be on the accelerator as a whole"] if words else []
