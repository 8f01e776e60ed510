"""What goes over the wire: requests that refuse what they do not know, answers that hold finite numbers only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True, ge=1)]
Query = Annotated[Any, WithJsonSchema({"type": "string"})]
"""One of several queries. Whatever is no usable string gets an error in its own place, so the type is checked there."""


class FusionRequest(BaseModel):
    """How to put dense and sparse scores together in hybrid mode; what is left out stays as the service has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["minmax", "rrf"] | None = None
    dense_weight: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=True)] | None = None
    sparse_weight: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=True)] | None = None
    candidates: Whole | None = None
    """Documents that dense and sparse search each hand over."""
    rrf_k: Whole | None = None


class SearchRequest(BaseModel):
    """One query (`query`) or several (`queries`), and how to answer them."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"examples": [{"queries": ["what is lift"], "k": 10, "mode": "hybrid", "explain": True}]},
    )

    query: str | None = None
    queries: list[Query] | None = None
    k: Whole | None = None
    """Hits for each query; the service's default where it is left out."""
    mode: Literal["hybrid", "dense", "sparse"] = "hybrid"
    fusion: FusionRequest | None = None
    with_snippet: bool = Field(True, strict=True)
    """Give a snippet of each hit, the query's tokens marked. In a small index this takes longer than the search."""
    with_text: bool = Field(False, strict=True)
    """Give the whole text of each hit."""
    explain: bool = Field(False, strict=True)
    """Tell which terms gave how much of each hit's sparse score."""
    instruction: str | None = None
    """Which of the table's instructions the queries are read under; its default where it is left out."""

    @model_validator(mode="after")
    def _one_form(self) -> SearchRequest:
        if (self.query is None) == (self.queries is None):
            raise ValueError("give either `query` (one string) or `queries` (a list of strings)")
        if self.fusion is not None and self.mode != "hybrid":
            raise ValueError(f'`fusion` is about hybrid search, but the mode is "{self.mode}": leave one of them out')
        return self

    def items(self) -> list[Any]:
        """The queries of either form, unchecked."""
        return [self.query] if self.queries is None else self.queries


class Span(BaseModel):
    """A highlighted stretch: code points `start` to `end` (exclusive) of the title or the snippet."""

    start: int
    end: int


class Term(BaseModel):
    """A token's part in a hit's sparse score: `contribution = query_weight × document_weight`."""

    token: str
    token_id: int
    word: str
    """The word of the query that the token is, or is a piece of."""
    query_weight: Finite
    document_weight: Finite
    contribution: Finite
    kind: Literal["matched", "expanded"]
    """matched: the token stands in the document's text; expanded: the language model put it into the vector."""


class HitBody(BaseModel):
    """A document that was found. `dense` and `sparse` are the raw scores, null where that search did not find it."""

    rank: int
    docid: str
    score: Finite
    dense: Finite | None
    sparse: Finite | None
    dense_part: Finite
    """What the dense score gave to `score`, after normalising and weighting; with `sparse_part` it sums to `score`."""
    sparse_part: Finite
    title: str
    title_spans: list[Span] = []
    snippet: str = ""
    snippet_spans: list[Span] = []
    text: str | None = None
    terms: list[Term] | None = None


class Problem(BaseModel):
    """What went wrong: a code for programs, a message for people."""

    code: str
    message: str
    field: str | None = None


class QueryResult(BaseModel):
    """The answer to one query: hits, or a note why there are none, or an error that concerns this query alone."""

    query: str | None
    hits: list[HitBody]
    note: str | None = None
    error: Problem | None = None


class Took(BaseModel):
    """Milliseconds spent in the replica."""

    encode: Finite
    search: Finite
    documents: Finite
    """Texts, snippets and explanations."""
    total: Finite


class IndexState(BaseModel):
    """Which index answered."""

    version: str
    documents: int


class SearchResponse(BaseModel):
    """One result a query, in the order of the request."""

    results: list[QueryResult]
    mode: Literal["hybrid", "dense", "sparse"]
    k: int
    took_ms: Took
    index: IndexState
    request_id: str = ""


class ErrorResponse(BaseModel):
    """The body of every answer that is not 2xx."""

    error: Problem
    details: list[Problem] = []
    request_id: str = ""


class Limits(BaseModel):
    """What a request is held to."""

    max_k: int
    default_k: int
    max_batch: int
    max_query_characters: int
    max_query_tokens: int
    max_candidates: int
    max_body_bytes: int
    request_timeout_seconds: float


class InfoResponse(BaseModel):
    """What is being served."""

    index: IndexState
    shards: int
    vocabulary_size: int
    hidden_size: int
    model_fingerprint: str
    instructions: list[str]
    default_instruction: str
    fusion: dict[str, Any]
    limits: Limits


class HealthResponse(BaseModel):
    """Alive (`/healthz`: a real one-vector search worked) or ready (`/readyz`: table and index are loaded)."""

    status: Literal["ok"]
    index: IndexState
    probe_ms: Finite | None = None
