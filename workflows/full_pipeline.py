"""A corpus and a pretrained LM to a searchable hybrid index: `python workflows/full_pipeline.py` is the demo.

    python workflows/full_pipeline.py [--config workflows/configs/demo.yaml] [--run-name demo] [train.steps=50 …]
    ray job submit -- python workflows/full_pipeline.py

ingest → prune → train → tabulate → encode → index → evaluate. (Query-likelihood pre-training belongs between prune and
train.) Started again, it skips what is done and redoes exactly what a changed config changes.
"""

from __future__ import annotations

import sys

from components.evaluation.closing import closing_table
from workflows import encode, evaluate, index, ingest, prune, tabulate, train
from workflows.cli import run_from_command_line
from workflows.tracking import tracking_uri

STAGES = tuple(module.STAGE for module in (ingest, prune, train, tabulate, encode, index, evaluate))


def main() -> None:
    """Run all stages and close with the table of results and where everything lies."""
    config, results = run_from_command_line(STAGES)
    tracking = tracking_uri(config) if config.tracking.enabled else None
    sys.stderr.write(closing_table(results, config.root, tracking) + "\n")


if __name__ == "__main__":
    main()
