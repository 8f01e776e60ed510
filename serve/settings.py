"""What an operator may set: defaults < `ALMANAC_SERVE_…` variables < `serve run serve.app:app key=value`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

TABLE_FOLDER = "tabulate"
INDEX_FOLDER = "index"


class ServeSettings(BaseSettings):
    """Where the run lies, how many replicas answer, and what a request is held to. Unknown arguments are refused."""

    model_config = SettingsConfigDict(env_prefix="ALMANAC_SERVE_", extra="forbid", frozen=True)

    run_folder: Path = Path("runs/demo")
    """A finished run: its `tabulate/` is the query encoder, its `index/` what is searched. Made absolute when the app
    is built."""

    replicas: PositiveInt = 1
    """Co-located replicas: each holds the table and every shard, and answers a query in one process."""
    cpus_per_replica: PositiveFloat = 1.0
    """CPUs that Ray reserves for a replica."""
    search_threads: PositiveInt = 2
    """Threads of a replica that search. More than its CPUs + 1 only adds waiting."""

    default_k: PositiveInt = 10
    max_k: PositiveInt = 1000
    max_batch: PositiveInt = 256
    """Queries in one request."""
    max_query_characters: PositiveInt = 8192
    """Longest query; a longer one gets its own error in place. Shorter ones are cut to the table's
    `query_max_tokens`."""
    max_candidates: PositiveInt = 10_000
    """Most documents that dense and sparse search may each hand to the fusion."""
    max_body_bytes: PositiveInt = 4 << 20
    """Longest request body, counted before anything is parsed."""
    snippet_characters: PositiveInt = 280

    request_timeout_seconds: PositiveFloat = 10.0
    """After this a request is answered with 504."""
    health_timeout_seconds: PositiveFloat = 10.0
    """A one-vector search that takes longer marks the replica as unhealthy, and Ray Serve replaces it."""
    max_ongoing: PositiveInt = 32
    """Requests that a replica holds at once, running and waiting; the next is answered with 503 and Retry-After."""
    max_queued: NonNegativeInt = 128
    """Requests that Ray Serve holds back when every replica is full, before it answers 503 and Retry-After itself."""
    retry_after_seconds: PositiveInt = 1

    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ("localhost", "127.0.0.1", "[::1]")
    """Names by which browsers and clients may address the service (the Host header, without port), separated by
    commas; `*` allows any. A short list keeps foreign web pages from reaching a local service by DNS rebinding."""
    log_queries: bool = False
    """Write query texts to the access log. Off, because queries tell about people."""

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> ServeSettings:
        if self.default_k > self.max_k:
            raise ValueError(f"default_k is {self.default_k} but max_k is {self.max_k}: raise max_k or lower default_k")
        return self

    @property
    def table_folder(self) -> Path:
        """The lookup table of the run."""
        return self.run_folder / TABLE_FOLDER

    @property
    def index_folder(self) -> Path:
        """The index of the run."""
        return self.run_folder / INDEX_FOLDER

    def located(self) -> ServeSettings:
        """The same settings with an absolute run folder that is known to hold a table and an index.

        Raises FileNotFoundError naming the folder that is missing and the command that makes it.
        """
        run_folder = self.run_folder.expanduser().resolve()
        for name in (TABLE_FOLDER, INDEX_FOLDER):
            if not (run_folder / name).is_dir():
                raise FileNotFoundError(
                    f"{run_folder / name}: not there, so there is nothing to serve. Make the demo with `make demo`, or "
                    "name a finished run: `serve run serve.app:app run_folder=runs/<name>`, or set "
                    "ALMANAC_SERVE_RUN_FOLDER."
                )
        return self.model_copy(update={"run_folder": run_folder})


def settings_from(arguments: dict[str, Any]) -> ServeSettings:
    """Settings from the arguments of `serve run` or of `serve.yaml`, over the environment, over the defaults."""
    return ServeSettings(**arguments)
