"""Searching without HTTP and without Ray: a loaded table and index that turn a request into an answer.

`SearchService` is what a replica holds and what tests compare with offline search. It imports neither torch nor ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from components.indexing import FusionConfig, Hit, HybridIndex
from components.lookup import QueryBatch, QueryEncoder
from components.storage import read_json
from serve.highlight import Words, make_snippet, strong_terms, without_title
from serve.schemas import (
    FusionRequest,
    HitBody,
    IndexState,
    InfoResponse,
    Limits,
    Problem,
    QueryResult,
    SearchRequest,
    SearchResponse,
    Span,
    Term,
    Took,
)
from serve.settings import ServeSettings

logger = logging.getLogger(__name__)

CHUNK = 16
"""Queries searched between two looks at the clock: a batch that is out of time stops instead of holding its thread."""
PROBE = "health"
"""What the health check searches for."""
NO_TERM = "no document has any of the query's terms in its sparse vector"
NO_DOCUMENT = "the index holds no documents"


class RequestRefused(Exception):
    """The request goes beyond a limit of this service, or names something that it does not have."""

    def __init__(self, status: int, code: str, message: str, field: str) -> None:
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


class SearchService:
    """Encodes, searches, and dresses hits with titles, snippets and explanations. Threads may share it."""

    def __init__(
        self, encoder: QueryEncoder, index: HybridIndex, settings: ServeSettings, fusion: FusionConfig | None = None
    ) -> None:  # fmt: skip
        self.encoder, self.index, self.settings = encoder, index, settings
        self.fusion = fusion or FusionConfig()
        _check_match(encoder, index, settings)
        self.words = Words(encoder.text.tokenizer)
        self.index_state = IndexState(version=index.fingerprint, documents=len(index))

    @classmethod
    def load(cls, settings: ServeSettings) -> SearchService:
        """The service of a run folder, warmed up, with the fusion that its evaluation settled on.

        ValueError: table and index are of different models.
        """
        started = time.perf_counter()
        evaluated = settings.run_folder / "evaluate" / "result.json"
        fusion = FusionConfig(**read_json(evaluated).get("fusion", {})) if evaluated.exists() else None
        service = cls(
            QueryEncoder.load(settings.table_folder), HybridIndex.open(settings.index_folder), settings, fusion
        )
        service.probe()
        state = service.index_state
        logger.info(
            "%s: %d documents, index %s, loaded in %.1f s",
            settings.run_folder, state.documents, state.version, time.perf_counter() - started,
        )  # fmt: skip
        return service

    def search(self, request: SearchRequest, *, deadline: float | None = None, request_id: str = "") -> SearchResponse:
        """Answer every query of the request, in order. `deadline` is a time of `time.monotonic`.

        Raises RequestRefused (a limit, an unknown instruction) and TimeoutError (between chunks, when the deadline
        passes). What is wrong with one of `queries` stands in its result; a single `query` that is wrong is refused.
        """
        started = time.perf_counter()
        items, k, fusion = request.items(), self._check(request), self._fusion(request.fusion)
        problems = [self._problem(item) for item in items]
        if request.query is not None and problems[0] is not None:
            raise RequestRefused(422, problems[0].code, problems[0].message, "query")
        results = [
            QueryResult(query=_echo(item), hits=[], error=problem)
            for item, problem in zip(items, problems, strict=True)
        ]
        good = [position for position, problem in enumerate(problems) if problem is None]
        clock = {"encode": 0.0, "search": 0.0, "documents": 0.0}
        for first in range(0, len(good), CHUNK):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            positions = good[first : first + CHUNK]
            marks = [time.perf_counter()]
            batch = self.encoder.encode([items[position] for position in positions], request.instruction)
            marks.append(time.perf_counter())
            found = self.index.search(batch, k=k, mode=request.mode, fusion=fusion)
            marks.append(time.perf_counter())
            for row, (position, hits) in enumerate(zip(positions, found, strict=True)):
                reason = batch.empty[row]
                if reason is None:
                    results[position].hits = self._dress(items[position], batch, row, hits, request)
                    reason = None if hits else NO_TERM if request.mode == "sparse" else NO_DOCUMENT
                results[position].note = reason
            marks.append(time.perf_counter())
            for name, begun, ended in zip(clock, marks, marks[1:], strict=False):
                clock[name] += (ended - begun) * 1000
        took = Took(**clock, total=(time.perf_counter() - started) * 1000)
        return SearchResponse(
            results=results, mode=request.mode, k=k, took_ms=took, index=self.index_state, request_id=request_id
        )

    def probe(self) -> None:
        """A real hybrid search with one vector. Raises whatever goes wrong, RuntimeError when a score is not finite."""
        batch = self.encoder.encode([PROBE])
        hits = self.index.search(batch, k=1, mode="hybrid")[0]
        if not np.isfinite([hit.score for hit in hits]).all():
            raise RuntimeError(f"a search for {PROBE!r} gave a score that is not finite: {hits}")

    def info(self) -> InfoResponse:
        """What is being served."""
        settings, manifest = self.settings, self.encoder.manifest
        return InfoResponse(
            index=self.index_state, shards=len(self.index.shards), vocabulary_size=manifest.vocabulary_size,
            hidden_size=manifest.hidden_size, model_fingerprint=manifest.model_fingerprint,
            instructions=sorted(manifest.instructions), default_instruction=manifest.default_instruction,
            fusion=self.fusion.model_dump(),
            limits=Limits(
                max_k=settings.max_k, default_k=settings.default_k, max_batch=settings.max_batch,
                max_query_characters=settings.max_query_characters, max_candidates=settings.max_candidates,
                max_query_tokens=self.encoder.text.config.query_max_tokens, max_body_bytes=settings.max_body_bytes,
                request_timeout_seconds=settings.request_timeout_seconds,
            ),
        )  # fmt: skip

    def _check(self, request: SearchRequest) -> int:
        """k, after the request has been held to the limits."""
        settings, count = self.settings, len(request.items())
        if count == 0:
            raise RequestRefused(422, "no_queries", "`queries` is empty: give at least one", "queries")
        if count > settings.max_batch:
            message = f"{count} queries at once, at most {settings.max_batch} are allowed: send several requests"
            raise RequestRefused(413, "batch_too_large", message, "queries")
        k = settings.default_k if request.k is None else request.k
        if k > settings.max_k:
            raise RequestRefused(422, "k_too_large", f"k is {k}, at most {settings.max_k} is allowed", "k")
        names = self.encoder.manifest.instructions
        if request.instruction is not None and request.instruction not in names:
            message = f"the table has no such instruction: it has {', '.join(sorted(names))}"
            raise RequestRefused(422, "unknown_instruction", message, "instruction")
        return k

    def _fusion(self, asked: FusionRequest | None) -> FusionConfig:
        """The run's fusion with what the request changes about it."""
        if asked is None:
            return self.fusion
        changes = asked.model_dump(exclude_none=True)
        if changes.get("candidates", 0) > self.settings.max_candidates:
            message = f"candidates is {asked.candidates}, at most {self.settings.max_candidates} is allowed"
            raise RequestRefused(422, "candidates_too_large", message, "fusion.candidates")
        try:
            return FusionConfig(**(self.fusion.model_dump() | changes))
        except ValidationError as error:
            raise RequestRefused(422, "invalid_request", error.errors()[0]["msg"], "fusion") from error

    def _problem(self, item: Any) -> Problem | None:
        """What is wrong with one query, if anything."""
        if not isinstance(item, str):
            return Problem(code="not_a_string", message=f"a query is a string, this is {_json_type(item)}")
        if len(item) > self.settings.max_query_characters:
            limit = self.settings.max_query_characters
            return Problem(code="query_too_long", message=f"{len(item)} characters, at most {limit} are allowed")
        try:
            item.encode()
        except UnicodeEncodeError as error:
            return Problem(
                code="not_text", message=f"character {error.start} is half of a surrogate pair, which is no text"
            )
        return None

    def _dress(
        self, query: str, batch: QueryBatch, row: int, hits: Sequence[Hit], request: SearchRequest
    ) -> list[HitBody]:
        """The hits of one query with title, and what is asked for of snippet, text and terms."""
        docids = [hit.docid for hit in hits]
        documents = self.index.documents(docids)
        bodies = [
            HitBody(
                rank=rank, docid=hit.docid, score=hit.score, dense=hit.dense, sparse=hit.sparse,
                dense_part=hit.dense_part, sparse_part=hit.sparse_part, title=documents[hit.docid][0],
                text=documents[hit.docid][1] if request.with_text else None,
            )
            for rank, hit in enumerate(hits, start=1)
        ]  # fmt: skip
        if request.with_snippet or request.explain:
            columns = slice(batch.indptr[row], batch.indptr[row + 1])
            term_ids, query_weights = batch.indices[columns], batch.weights[columns]
            given = self.index.term_weights(docids, term_ids)
            surfaces = {term: self._surface(term) for term in term_ids.tolist()}
            words = self.words.first_words(query) if request.explain else {}
            for body, document_weights in zip(bodies, given, strict=True):
                text, parts = documents[body.docid][1], query_weights * document_weights
                if request.with_snippet:
                    self._add_snippet(body, text, surfaces, dict(zip(surfaces, parts.tolist(), strict=True)))
                if request.explain:
                    in_text = self.words.ids(text)
                    found = sorted(np.flatnonzero(document_weights).tolist(), key=lambda i: (-parts[i], i))
                    body.terms = [
                        Term(
                            token=surfaces[term], token_id=term, word=words.get(term, ""),
                            query_weight=float(query_weights[i]), document_weight=float(document_weights[i]),
                            contribution=float(parts[i]), kind="matched" if term in in_text else "expanded",
                        )
                        for i, term in zip(found, term_ids[found].tolist(), strict=True)
                    ]  # fmt: skip
        return bodies

    def _add_snippet(self, body: HitBody, text: str, surfaces: dict[int, str], parts: dict[int, float]) -> None:
        strong = strong_terms(parts)
        weights = {surfaces[term]: parts[term] for term in strong}
        body.snippet = make_snippet(without_title(text, body.title), weights, self.settings.snippet_characters)
        body.snippet_spans = [Span(start=start, end=end) for start, end in self.words.spans(body.snippet, strong)]
        body.title_spans = [Span(start=start, end=end) for start, end in self.words.spans(body.title, strong)]

    def _surface(self, term: int) -> str:
        """A token as it stands in text, e.g. " lift"; its name in the vocabulary where it is part of a character."""
        tokenizer = self.encoder.text.tokenizer
        surface = tokenizer.decode([term], skip_special_tokens=False)
        return surface if surface and "\ufffd" not in surface else tokenizer.id_to_token(term) or str(term)


def _check_match(encoder: QueryEncoder, index: HybridIndex, settings: ServeSettings) -> None:
    """Refuse a table and an index that were made by different models: their scores would be noise."""
    manifest = encoder.manifest
    for name, table_value, index_value in (
        ("model_fingerprint", manifest.model_fingerprint, index.model_fingerprint),
        ("vocabulary_size", manifest.vocabulary_size, index.vocabulary_size),
        ("hidden_size", encoder.dimensions, index.hidden_size),
    ):
        if table_value != index_value:
            raise ValueError(
                f"{settings.table_folder} and {settings.index_folder} are of different models: {name} is {table_value} "
                f"in the table and {index_value} in the index. Run its pipeline again, or name another run."
            )


def _echo(item: Any) -> str | None:
    """A query as it can be given back: None for what is no string, question marks for what is no text."""
    return item.encode("utf-8", "replace").decode() if isinstance(item, str) else None


def _json_type(item: Any) -> str:
    if item is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(item), type(item).__name__)
