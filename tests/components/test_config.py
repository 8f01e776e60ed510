"""Every shipped configuration loads; a wrong one is refused with the key, the value and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.config import ConfigError, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "workflows" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_load_and_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config


def test_there_are_the_promised_configurations() -> None:
    assert {"demo", "smollm2", "lightretriever-llama3-8b", "effir-mistral-7b"} <= {path.stem for path in CONFIGS}


def test_the_papers_hyper_parameters_are_the_defaults() -> None:
    train = load_config(next(path for path in CONFIGS if path.stem == "lightretriever-llama3-8b")).train
    assert (train.steps, train.batch_size, train.negatives, train.learning_rate) == (12_000, 128, 7, 2e-5)
    assert train.terms.model_dump() == type(train.terms)().model_dump()


def test_precedence_is_command_line_environment_file_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config().train.steps != 77
    monkeypatch.setenv("ALMANAC__TRAIN__STEPS", "77")
    assert load_config().train.steps == 77
    assert load_config(None, ["train.steps=78"]).train.steps == 78


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "did you mean 'steps'"),
        ("train.steps=many", "train.steps: Input should be a valid integer"),
        ("train.steps=-1", "found -1"),
        ("train.terms.kl_dense=1", "set symmetric_dense above 0"),
        ("train.workers=5", "batch_size=12 cannot be split evenly over workers=5"),
        ("encode.batch_tokens=64", "cannot hold one document"),
        ("data.corpus=jsonl:x", "either `source`"),
        ("steps", "an override is written key.path=value"),
        ("train.steps.x=1", "`steps` is"),
        ("run_name=../x", "run_name"),
    ],
)
def test_mistakes_are_named_before_any_work(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert message in str(error.value)


def test_a_missing_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "broken.yaml")


def test_training_on_the_evaluated_split_is_refused() -> None:
    pairs = "data.pairs=[{name: x, kind: qrels, split: test}]"
    with pytest.raises(ConfigError, match="evaluated"):
        load_config(None, [pairs])
