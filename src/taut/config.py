"""A run's settings: frozen dataclasses, read from TOML and key=value, written with every run."""

import difflib
import os
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

SCHEDULES = ("linear", "cosine", "constant", "wsd", "inverse_sqrt")


@dataclass(frozen=True)
class DataConfig:
    source: str = "stdlib-docs"  # or stdlib-code, a text file, a folder, JSON lines
    field: str = "text"  # of JSON lines
    policy: str = "raise"  # on bad records: raise, skip
    folder: str = ""  # of the tokenised corpus; empty: beside the run
    vocab_size: int = 8192
    longest: int = 256  # tokens of a text; longer ones are cut into pieces
    held_out: float = 0.02  # part of the texts that is not trained on


@dataclass(frozen=True)
class ModelConfig:
    kind: str = "bert"  # bert: masked words; gpt2: next words
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    dropout: float = 0.1


@dataclass(frozen=True)
class OptimConfig:
    kind: str = "adamw"  # adamw, lamb
    lr: float = 1e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0
    warmup_steps: int = 60
    schedule: str = "linear"  # behind the warm-up: linear, cosine, constant, wsd, inverse_sqrt


@dataclass(frozen=True)
class TrainConfig:
    out: str = "runs/default"
    steps: int = 600
    budget_tokens: int = 8192  # of a batch
    accumulate: int = 1  # batches of a step
    seed: int = 0
    dtype: str = "auto"  # auto, float32, bfloat16
    log_every: int = 10
    eval_every: int = 100
    non_finite: str = "raise"  # a step whose gradients are not: raise, skip


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _choose("data.policy", self.data.policy, "raise", "skip")
        _choose("model.kind", self.model.kind, "bert", "gpt2")
        _choose("optim.kind", self.optim.kind, "adamw", "lamb")
        _choose("optim.schedule", self.optim.schedule, *SCHEDULES)
        _choose("train.dtype", self.train.dtype, "auto", "float32", "bfloat16")
        _choose("train.non_finite", self.train.non_finite, "raise", "skip")
        for section in ("data", "model", "optim", "train"):
            for name, value in asdict(getattr(self, section)).items():
                is_count = isinstance(value, int) and name not in ("seed", "warmup_steps")
                if is_count and value < 1:
                    raise ValueError(f"config: {section}.{name} must be at least 1; got {value}")
        if not 0 < self.data.held_out < 1:
            raise ValueError(f"config: data.held_out must lie in (0, 1); got {self.data.held_out}")
        if self.data.longest < 8 or self.data.vocab_size < 300:
            raise ValueError(
                "config: data.longest must be at least 8 and data.vocab_size 300; got "
                f"{self.data.longest} and {self.data.vocab_size}"
            )


def _choose(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"config: {name} must be one of {', '.join(allowed)}; got {value!r}")


def read_config(recipe: str | os.PathLike[str] | None, settings: Sequence[str] = ()) -> Config:
    """The settings of a TOML file with section.key=value in the place of its own."""
    given: dict[str, Any] = {}
    if recipe is not None:
        path = Path(recipe)
        if not path.is_file():
            raise ValueError(f"config: there is no recipe {path}")
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"config: {path} is no TOML: {error}") from None
        for section, table in tables.items():
            if not isinstance(table, dict):
                raise ValueError(f"config: {section!r} of {path} must stand in a [section]")
            given |= {f"{section}.{name}": value for name, value in table.items()}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"config: settings are section.key=value; got {setting!r}")
        given[name.strip()] = _value(text.strip())
    return _apply(Config(), given)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a word without quotes


def _apply(config: Config, given: dict[str, Any]) -> Config:
    known = {
        f"{section.name}.{option.name}": type(option.default)
        for section in fields(config)
        for option in fields(getattr(config, section.name))
    }
    changes: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise ValueError(f"config: there is no setting {name!r}; the nearest is {near[0]}")
        wanted = known[name]
        value = float(value) if wanted is float and type(value) is int else value
        if type(value) is not wanted:
            raise ValueError(
                f"config: {name} must be a {wanted.__name__}; got {value!r}, "
                f"a {type(value).__name__}"
            )
        section, _, option = name.partition(".")
        changes.setdefault(section, {})[option] = value
    return replace(
        config, **{key: replace(getattr(config, key), **own) for key, own in changes.items()}
    )


def to_toml(config: Config) -> str:
    """The settings as read_config reads them."""
    lines = []
    for section, table in asdict(config).items():
        lines.append(f"[{section}]")
        for name, value in table.items():
            quoted = (
                '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
                if isinstance(value, str)
                else repr(value)
            )
            lines.append(f"{name} = {quoted}")
        lines.append("")
    return "\n".join(lines)
