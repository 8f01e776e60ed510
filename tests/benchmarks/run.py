"""`make bench`: every benchmark, one after another, each in a process of its own so that threads and caches are its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run every `bench_*.py`; the exit status is the worst of theirs."""
    status = 0
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"\n## {path.stem.removeprefix('bench_').replace('_', ' ')}\n", flush=True)
        status = max(status, subprocess.run([sys.executable, str(path)], check=False).returncode)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
