"""Folders as Hugging Face writes them, config.json and safetensors, to our models and back.

Tensors keep their original names in files: what we hold as one, like q, k and v, is cut on the way
out. What a file holds beyond the model is kept aside and written back. No pickle is ever read.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from taut.models.base import Model

from .families import ACTIVATIONS, FAMILIES, Entry, Family

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD_BYTES = 5_000_000_000
# constants that older files hold: kept, but not worth a warning
_CONSTANT = re.compile(
    r"(position_ids|token_type_ids|attn\.(masked_)?bias|embed_positions\.weight)$"
)


@dataclass
class Source:
    """What a folder said beyond the model, to be written back."""

    model_type: str
    config: dict[str, Any]
    read: Any = None  # config as ours
    names: dict[str, str] = field(default_factory=dict)  # as in FAMILIES -> as in the file
    extras: dict[str, Tensor] = field(default_factory=dict)  # by their names in the file


def load(folder: str | os.PathLike[str], **fields: Any) -> Model:
    """The model of a Hugging Face folder; `fields` take the place of fields of its config.

    With a head that the folder does not have, as head="sequence", num_labels=3, the new head is
    drawn at random. Tensors have the dtype of the file.
    """
    path = Path(folder)
    theirs = _read_config(path)
    family = _family(theirs)
    files = _weight_files(path)
    source = Source(theirs["model_type"], theirs, _config(family, theirs, set(files)))
    known = _refuse_unknown(family, fields)
    if "dropout" in fields:  # it sets all that are not given beside it
        fields = {x: None for x in ("attention_dropout", "head_dropout") if x in known} | fields
    with torch.random.fork_rng(devices=[]):
        model = family.model(replace(source.read, **fields))
    entries = list(family.entries(model.config))
    source.names = _names_in_file(family, entries, set(files))
    read = _Reader(files)
    missing, taken = [], set()
    for entry in entries:
        names = [source.names.get(name, name) for name in entry.theirs]
        absent = [name for name in names if name not in files]
        if absent:
            missing += [(entry, name) for name in absent]
            continue
        taken.update(names)
        parts = [read(name) for name in names]
        ours = _get(model, entry.ours)
        try:
            whole = entry.read(parts, ours.shape)
        except RuntimeError:
            whole = parts[0]
        if whole.shape != ours.shape:
            raise ValueError(
                f"load: by config.json {', '.join(names)} of {path} make {tuple(ours.shape)}; got "
                f"{', '.join(str(tuple(part.shape)) for part in parts)}: one of the two is wrong"
            )
        _set(model, entry.ours, whole)
    _refuse_missing(path, family, model, missing, fields)
    for name in sorted(set(files) - taken):
        source.extras[name] = read(name)
    _check_ties(family, model, source)
    unknown = [name for name in source.extras if not _CONSTANT.search(name)]
    if unknown:
        warnings.warn(
            f"load: {type(model).__name__} has no place for {len(unknown)} tensors of {path}; they "
            f"are kept for save alone: {', '.join(unknown)}",
            stacklevel=2,
        )
    model.hf_source = source
    return model.eval()


def save(
    model: Model, folder: str | os.PathLike[str], *, max_shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write a folder that transformers and `load` read; files take their names when complete."""
    source = getattr(model, "hf_source", None) or _new_source(model)
    family = FAMILIES[source.model_type]
    tensors = dict(_tensors(family, model, source))
    config = source.config | _theirs(family, model.config, source)
    config["model_type"] = source.model_type
    config["architectures"] = [_architecture(family, model.config, source)]
    first = next(model.parameters())
    config["dtype"] = str(first.dtype).removeprefix("torch.")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        _publish(path / _WEIGHTS, shards[0])
        _replace(path / "config.json", config)
        (path / _INDEX).unlink(missing_ok=True)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _publish(path / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _replace(path / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _replace(path / "config.json", config)
    (path / _WEIGHTS).unlink(missing_ok=True)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"load: {path} has no config.json: give a folder of save_pretrained")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"load: {file} is no JSON ({error}): write it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"load: {file} must hold a JSON object; got {type(config).__name__}")
    return config


def _family(theirs: dict[str, Any]) -> Family:
    family = FAMILIES.get(theirs.get("model_type", ""))
    if family is None:
        raise ValueError(
            f"load: model_type must be one of {', '.join(FAMILIES)}; got "
            f"{theirs.get('model_type')!r}: this model is not supported"
        )
    return family


def _refuse_unknown(family: Family, fields: dict[str, Any]) -> set[str]:
    """The fields of our config."""
    known = set(family.config.__dataclass_fields__)
    for name in fields.keys() - known:
        listed = ", ".join(sorted(known))
        raise ValueError(f"load: {family.config.__name__} has no field {name!r}, only {listed}")
    return known


def _config(family: Family, theirs: dict[str, Any], names: set[str]) -> Any:
    """Our config for theirs."""
    for name, value in family.fixed.items():
        if theirs.get(name, value) != value:
            raise ValueError(
                f"load: {name} must be {value}; config.json has {theirs[name]}: such a model is "
                "not supported"
            )
    architecture = (theirs.get("architectures") or [next(iter(family.heads))])[0]
    if architecture not in family.heads:
        raise ValueError(
            f"load: architectures must be one of {', '.join(family.heads)}; got {architecture!r}"
        )
    made = family.more_fields(theirs) | family.heads[architecture]
    for ours, name in family.fields.items():
        if theirs.get(name) is not None:
            made[ours] = theirs[name]
    if "activation" in made:
        if made["activation"] not in ACTIVATIONS:
            raise ValueError(
                f"load: the activation must be one of {', '.join(ACTIVATIONS)}; got "
                f"{made['activation']!r}: such a model is not supported"
            )
        made["activation"] = ACTIVATIONS[made["activation"]]
    if "num_labels" in family.config.__dataclass_fields__:
        made["num_labels"] = len(theirs.get("id2label") or range(theirs.get("num_labels", 2)))
    if "has_pooler" in made:
        made["has_pooler"] = any(name.endswith("pooler.dense.weight") for name in names)
    return family.config(**made)


def _weight_files(path: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if (path / _INDEX).is_file():
        weight_map = json.loads((path / _INDEX).read_text())["weight_map"]
        for name in set(weight_map.values()):
            if Path(name).name != name or not (path / name).is_file():
                raise ValueError(f"load: {path / _INDEX} names {name}, which is not there")
        return {tensor: path / name for tensor, name in weight_map.items()}
    file = path / _WEIGHTS
    if not file.is_file():
        others = [x.name for x in path.glob("*.bin")]
        raise ValueError(
            f"load: {path} has no {_WEIGHTS}"
            + (
                f", only {', '.join(others)}, a pickle, which can run code and is never read: on a "
                "machine that may run it, convert it with python -c 'from transformers import "
                f'AutoModel as M; M.from_pretrained("{path}").save_pretrained("{path}")\''
                if others
                else ": give a folder of save_pretrained"
            )
        )
    with safe_open(file, "pt") as opened:
        return dict.fromkeys(opened.keys(), file)


class _Reader:
    """Tensors by name, each file opened once."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.opened: dict[Path, Any] = {}

    def __call__(self, name: str) -> Tensor:
        file = self.files[name]
        if file not in self.opened:
            self.opened[file] = safe_open(file, "pt")
        try:
            return self.opened[file].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"load: {file} has no sound tensor {name} ({error})") from None


def _names_in_file(family: Family, entries: list[Entry], names: set[str]) -> dict[str, str]:
    """Names that differ in the file: without the prefix of a base model, or of old norms."""
    wanted = [name for entry in entries for name in entry.theirs] + list(family.tied)
    renamed = {}
    for name in wanted:
        bare = name.removeprefix(family.base)
        for candidate in (name, bare, _old(name), _old(bare)):
            if candidate in names:
                if candidate != name:
                    renamed[name] = candidate
                break
    return renamed


def _old(name: str) -> str:
    return re.sub(r"LayerNorm\.(weight|bias)$", lambda m: f"LayerNorm.{_OLD[m[1]]}", name)


_OLD = {"weight": "gamma", "bias": "beta"}


def _refuse_missing(
    path: Path,
    family: Family,
    model: Model,
    missing: list[tuple[Entry, str]],
    fields: dict[str, Any],
) -> None:
    """A head that was asked for may be new; nothing else may be."""
    if not missing:
        return
    is_head = all(not name.startswith(family.base) or "pooler" in name for _, name in missing)
    listed = ", ".join(name for _, name in missing)
    if not ("head" in fields and is_head):
        raise ValueError(f"load: {path} lacks {len(missing)} tensors of the model: {listed}")
    for entry in {entry for entry, _ in missing}:
        dtype = next(model.parameters()).dtype
        _set(model, entry.ours, _get(model, entry.ours).detach().to(dtype))
    warnings.warn(f"load: drawn at random, since {path} lacks them: {listed}", stacklevel=3)


def _check_ties(family: Family, model: Model, source: Source) -> None:
    """Tensors that repeat another must equal it; they are written again by `save`."""
    entries = {name: entry for entry in family.entries(model.config) for name in entry.theirs}
    for name in family.tied:
        in_file = source.names.get(name, name)
        other = _tied_to(family, name, entries)
        if in_file not in source.extras or other is None:
            continue
        if not source.extras[in_file].equal(
            entries[other].write(_get(model, entries[other].ours))[other]
        ):
            raise ValueError(
                f"load: {in_file} must equal {other}, since their weights are tied here; they "
                "differ: such a model is not supported"
            )
        del source.extras[in_file]
        source.names[name] = in_file  # says that the file has it


def _tied_to(family: Family, name: str, entries: dict[str, Entry]) -> str | None:
    while name not in entries:
        if name not in family.tied:
            return None
        name = family.tied[name]
    return name


def _tensors(family: Family, model: Model, source: Source) -> Iterator[tuple[str, Tensor]]:
    entries = list(family.entries(model.config))
    is_bare = family.heads[_architecture(family, model.config, source)].get("head") == "none"
    if source.model_type in ("bart", "marian"):
        is_bare = not model.config.has_head_bias

    def name_of(name: str) -> str:
        return source.names.get(name, name.removeprefix(family.base) if is_bare else name)

    for entry in entries:
        for name, tensor in entry.write(_get(model, entry.ours).detach().cpu()).items():
            yield name_of(name), tensor
    by_name = {name: entry for entry in entries for name in entry.theirs}
    for name in family.tied:
        other = _tied_to(family, name, by_name)
        if name in source.names and other is not None:
            yield source.names[name], by_name[other].write(_get(model, by_name[other].ours))[other]
    yield from source.extras.items()


def _theirs(family: Family, config: Any, source: Source) -> dict[str, Any]:
    """Our config as theirs, but for fields that are still as the folder had them."""
    made = family.more_theirs(config)
    for ours, theirs in family.fields.items():
        value = getattr(config, ours)
        if source.read is not None and value == getattr(source.read, ours):
            continue
        if ours == "activation":
            known = {name: theirs for theirs, name in reversed(ACTIVATIONS.items())}
            if value not in known:
                raise ValueError(f"save: transformers has no {family.base}model with {value}")
            value = known[value]
        made[theirs] = value
    if getattr(config, "head", None) in ("sequence", "token") and (
        source.read is None or config.num_labels != source.read.num_labels
    ):
        made["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
        made["label2id"] = {f"LABEL_{i}": i for i in range(config.num_labels)}
    return made


def _architecture(family: Family, config: Any, source: Source) -> str:
    """The architecture whose head is that of our config."""
    was = (source.config.get("architectures") or [""])[0]
    keys = ("head", "has_head_bias")
    fitting = [
        name
        for name, fields in family.heads.items()
        if all(fields.get(key) == getattr(config, key, None) for key in keys if key in fields)
    ]
    if not fitting:
        raise ValueError(f"save: no model of {', '.join(family.heads)} has the head of {config}")
    return was if was in fitting else fitting[0]


def _new_source(model: Model) -> Source:
    """For a model that did not come from a folder."""
    config = model.config
    for model_type, family in FAMILIES.items():
        is_roberta = getattr(config, "position_offset", 0) > 0
        if not isinstance(model, family.model) or (model_type == "bert" and is_roberta):
            continue
        if model_type == "bart" and config.positions != "learned":
            continue
        if model_type == "marian" and config.positions != "sinusoidal_halves":
            raise ValueError(
                "save: Hugging Face has no Transformer with positions "
                f"{config.positions!r}: use taut's checkpoints"
            )
        return Source(model_type, {})
    raise ValueError(f"save: {type(model).__name__} is not a model of {', '.join(FAMILIES)}")


def _shards(tensors: dict[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _publish(file: Path, tensors: dict[str, Tensor]) -> None:
    part = file.with_name(f".{file.name}.part")
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, file)


def _replace(file: Path, data: dict[str, Any]) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    os.replace(part, file)


def _get(model: nn.Module, name: str) -> Tensor:
    module, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(module), leaf)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    parent = model.get_submodule(module)
    is_parameter = leaf in parent._parameters
    setattr(parent, leaf, nn.Parameter(tensor) if is_parameter else tensor)
