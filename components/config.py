"""The one configuration tree: every section typed, every unknown key refused, one written order of precedence.

Highest first: `key.path=value` on the command line, `ALMANAC__SECTION__KEY` in the environment, the YAML file, defaults.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from components.data.config import DataConfig
from components.encoding import EncodeConfig
from components.evaluation.config import EvaluateConfig
from components.indexing.config import IndexConfig
from components.lookup.table import TabulateConfig
from components.models.config import ModelConfig
from components.objectives.config import TrainConfig
from components.pruning.config import PruneConfig
from components.section import Section
from components.text import TextConfig

ENVIRONMENT_PREFIX = "ALMANAC__"
DEMO = Path(__file__).resolve().parent.parent / "workflows" / "configs" / "demo.yaml"


class ConfigError(ValueError):
    """The configuration is refused; the message names each key, the value found and what would be right."""


class TrackingConfig(Section):
    """Where MLflow records the run."""

    enabled: bool = True
    uri: str | None = None
    """Tracking server; by default `MLFLOW_TRACKING_URI`, else a sqlite file in the runs folder."""
    experiment: str = "almanac"


class ClusterConfig(Section):
    """The Ray cluster that is started when there is none to join."""

    local_cpus: int | None = Field(None, ge=1)
    """CPUs of the local cluster; by default all of this machine's."""


class Config(Section):
    """Everything a pipeline run depends on."""

    run_name: str = Field("demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    runs: str = "runs"
    """Folder that holds the run folders: a local disk or a file system that all nodes mount."""
    seed: int = 42
    data: DataConfig
    model: ModelConfig
    text: TextConfig = TextConfig()
    prune: PruneConfig = PruneConfig()
    train: TrainConfig = TrainConfig()
    tabulate: TabulateConfig = TabulateConfig()
    encode: EncodeConfig = EncodeConfig()
    index: IndexConfig = IndexConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        budget, longest = self.encode.batch_tokens, self.text.document_max_tokens
        if budget < longest:
            raise ValueError(
                f"encode.batch_tokens={budget} cannot hold one document of text.document_max_tokens={longest} tokens"
            )
        return self

    @property
    def root(self) -> Path:
        """The folder of this run, absolute."""
        return Path(self.runs).expanduser().resolve() / self.run_name

    def to_yaml(self) -> str:
        """The whole resolved tree as YAML that `load_config` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration from a YAML file (default: the demo's), the environment and dotted overrides.

    Raises ConfigError with one line a mistake before any work is done.
    """
    path = Path(path) if path is not None else DEMO
    tree = _read_yaml(path)
    for origin, key, value in [*_environment(os.environ), *map(_override, overrides)]:
        _put(tree, key, value, origin)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: the configuration is refused\n" + "\n".join(map(_explain, error.errors()))
        ) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file (shipped ones: workflows/configs/*.yaml)") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a mapping of sections is wanted, found {type(tree).__name__}")
    return tree


def _environment(variables: Mapping[str, str]) -> list[tuple[str, list[str], Any]]:
    found = sorted(name for name in variables if name.startswith(ENVIRONMENT_PREFIX))
    return [
        (name, name[len(ENVIRONMENT_PREFIX) :].lower().split("__"), _value(variables[name], name)) for name in found
    ]


def _override(text: str) -> tuple[str, list[str], Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"{text!r}: an override is written key.path=value, for example train.steps=50")
    return text, key.split("."), _value(value, text)


def _value(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        raise ConfigError(f"{origin}: its value is not valid YAML") from None


def _put(tree: dict[str, Any], key: Sequence[str], value: Any, origin: str) -> None:
    for part in key[:-1]:
        child = tree.setdefault(part, {})
        if child is None:
            child = tree[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: `{part}` is {child!r}, not a section, so nothing can be set below it")
        tree = child
    tree[key[-1]] = value


def _explain(error: Any) -> str:
    """One line for one mistake: the key's path, what is wrong, the value found, the nearest key for an unknown one."""
    path = [str(part) for part in error["loc"]]
    line = f"  {'.'.join(path) or '(whole)'}: {error['msg']}"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _keys_at(path[:-1]), n=1)
        return f"  {'.'.join(path)}: unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
    if error["type"] != "missing" and not isinstance(error.get("input"), dict | BaseModel):
        line += f" (found {error['input']!r})"
    return line


def _keys_at(path: Sequence[str]) -> list[str]:
    """Names of the fields of the section at `path`; none where the path leads through a union or a list."""
    model: Any = Config
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)
    return list(getattr(model, "model_fields", {}))
