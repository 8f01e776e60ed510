"""The command line shared by all workflows: config file, run name, dotted overrides; then the stages, one after another."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from components.config import Config, ConfigError, load_config
from workflows.cluster import connect
from workflows.stage import Stage, StageError, run_lock, run_stage, save_config
from workflows.tracking import Tracker, tracking_uri

log = logging.getLogger("almanac")


def set_up_logging() -> None:
    """Log to standard error, one line an event, with the time; libraries only from warnings up."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True)
    for name in ("almanac", "components", "workflows", "__main__"):
        logging.getLogger(name).setLevel(logging.INFO)


def parse_arguments(description: str, arguments: Sequence[str] | None = None) -> Config:
    """The config that the command line describes; a wrong one ends the process with status 2 and a plain message."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Precedence, highest first: key=value on the command line, ALMANAC__SECTION__KEY in the environment, the YAML file, defaults.",
    )
    parser.add_argument("--config", help="YAML file (default: the demo, workflows/configs/demo.yaml)")
    parser.add_argument("--run-name", help="folder below `runs` (default: the config's run_name)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for example train.steps=50")
    parsed = parser.parse_args(arguments)
    overrides = list(parsed.overrides)
    if parsed.run_name:
        overrides.append(f"run_name={parsed.run_name}")
    try:
        return load_config(parsed.config, overrides)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


def run_stages(stages: Sequence[Stage], config: Config) -> dict[str, dict[str, Any]]:
    """Run the stages in order under the run's lock, with Ray joined or started and MLflow open. Returns each result."""
    if config.tracking.enabled:
        tracking_uri(config)  # refused before any work
    with run_lock(config.root):
        config_file = save_config(config)
        connect(config.cluster)
        with Tracker.open(config, config.root) as tracker:
            tracker.log_artifact(config_file)
            return {stage.name: run_stage(stage, config, tracker) for stage in stages}


def run_from_command_line(
    stages: Sequence[Stage], arguments: Sequence[str] | None = None
) -> tuple[Config, dict[str, dict[str, Any]]]:  # fmt: skip
    """Parse and run; gives back the config and each stage's result. A refusal is a message and exit status 1."""
    set_up_logging()
    config = parse_arguments(f"Run {', '.join(stage.name for stage in stages)} of an Almanac pipeline.", arguments)
    try:
        return config, run_stages(stages, config)
    except (ConfigError, StageError) as error:
        log.error("%s", error)
        raise SystemExit(1) from None
