"""The service without HTTP: equal to offline search, and honest about what it cannot answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.indexing import FusionConfig, HybridIndex
from components.lookup import QueryEncoder
from components.storage import write_json
from components.text import Text
from serve.schemas import FusionRequest, SearchRequest
from serve.search import RequestRefused, SearchService
from serve.settings import ServeSettings
from tests.serve.conftest import DOCUMENTS, write_run

QUERIES = [
    "the lift of a wing",
    "heat transfer in a flat plate",
    "Größe 中文 😀",
    "buckling",
    "cone at supersonic speed",
]


def ask(service: SearchService, queries: list[Any], **options: Any) -> Any:
    return service.search(SearchRequest(queries=queries, **options))


@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
@pytest.mark.parametrize("fusion", [None, {"dense_weight": 0.2, "sparse_weight": 0.8}, {"method": "rrf", "rrf_k": 10}])
def test_answers_are_those_of_offline_search(
    service: SearchService, run_folder: Path, mode: str, fusion: dict[str, Any] | None
) -> None:
    if fusion is not None and mode != "hybrid":
        fusion = None
    encoder, index = QueryEncoder.load(run_folder / "tabulate"), HybridIndex.open(run_folder / "index")
    config = None if fusion is None else FusionConfig(**fusion)
    wanted = index.search(encoder.encode(QUERIES), k=4, mode=mode, fusion=config)
    wide = SearchService(encoder, index, service.settings.model_copy(update={"max_batch": 100}))
    answer = ask(wide, QUERIES * 5, k=4, mode=mode, fusion=FusionRequest(**fusion) if fusion else None)
    for position, result in enumerate(answer.results):
        hits = wanted[position % len(QUERIES)]
        assert [hit.docid for hit in result.hits] == [hit.docid for hit in hits]
        assert [hit.rank for hit in result.hits] == list(range(1, len(hits) + 1))
        np.testing.assert_allclose([hit.score for hit in result.hits], [hit.score for hit in hits], rtol=1e-5)


def test_the_instruction_changes_the_dense_vector(service: SearchService) -> None:
    default = ask(service, ["lift of a wing"], mode="dense", k=8).results[0].hits
    other = ask(service, ["lift of a wing"], mode="dense", k=8, instruction="question").results[0].hits
    assert [hit.docid for hit in default] == [hit.docid for hit in reversed(other)]


@pytest.mark.parametrize("query", ["", "   ", "\u200b"])
@pytest.mark.parametrize("mode", ["hybrid", "dense", "sparse"])
def test_queries_of_nothing_find_nothing_and_say_why(service: SearchService, query: str, mode: str) -> None:
    """Case T-052."""
    result = ask(service, [query], mode=mode).results[0]
    assert result.hits == []
    assert result.error is None
    assert result.note in {"the query is empty", "the query holds only white space or invisible characters"}


def test_one_bad_query_harms_no_other(service: SearchService) -> None:
    bad = [None, 5, True, ["a"], {"a": 1}, "x" * 501, "half \ud800"]
    results = ask(service, [*bad, "lift of a wing"]).results
    codes = [result.error.code for result in results[:-1]]
    assert codes == ["not_a_string"] * 5 + ["query_too_long", "not_text"]
    assert results[-1].hits[0].docid == "d01"
    assert results[6].query == "half ?"


def test_sparse_search_without_a_common_term_says_so(service: SearchService) -> None:
    result = ask(service, ["🜁"], mode="sparse").results[0]
    assert result.hits or result.note


def test_explanation_adds_up_and_tells_matched_from_expanded(service: SearchService) -> None:
    hits = ask(service, ["lift"], mode="sparse", explain=True, k=8).results[0].hits
    for hit in hits:
        assert sum(term.contribution for term in hit.terms) == pytest.approx(hit.sparse, rel=1e-3)
        assert hit.dense_part == 0
        assert hit.sparse_part == pytest.approx(hit.score)
    kinds = {hit.docid: {term.kind for term in hit.terms} for hit in hits}
    assert kinds["d01"] == {"matched"}
    assert "expanded" in kinds["d02"]
    assert {term.word for hit in hits for term in hit.terms} == {"lift"}


def test_parts_of_a_hybrid_score_sum_to_it(service: SearchService) -> None:
    for hit in ask(service, ["lift of a wing"], k=8).results[0].hits:
        assert hit.dense_part + hit.sparse_part == pytest.approx(hit.score, abs=1e-6)


def test_titles_snippets_and_texts(service: SearchService) -> None:
    hits = ask(service, ["lift of a wing"], k=8, with_text=True).results[0].hits
    first = hits[0]
    assert (first.docid, first.title) == ("d01", "lift of a wing")
    assert first.text == "lift of a wing " + DOCUMENTS[0][2]
    assert first.snippet == DOCUMENTS[0][2]
    marked = {first.snippet[span.start : span.end] for span in first.snippet_spans}
    assert {"lift", "wing"} <= marked
    bare = ask(service, ["lift of a wing"], k=1, with_snippet=False).results[0].hits[0]
    assert (bare.snippet, bare.text, bare.terms) == ("", None, None)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"queries": []}, "no_queries"),
        ({"queries": ["a"] * 9}, "batch_too_large"),
        ({"queries": ["a"], "k": 21}, "k_too_large"),
        ({"queries": ["a"], "instruction": "none"}, "unknown_instruction"),
        ({"queries": ["a"], "fusion": {"candidates": 10_001}}, "candidates_too_large"),
        ({"query": "x" * 501}, "query_too_long"),
    ],
)
def test_limits_are_refused_by_name(service: SearchService, request_: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        service.search(SearchRequest(**request_))
    assert caught.value.code == code
    assert caught.value.field


def test_work_stops_at_its_deadline(service: SearchService) -> None:
    with pytest.raises(TimeoutError):
        service.search(SearchRequest(queries=["a"]), deadline=time.monotonic() - 1)


def test_a_table_and_an_index_of_different_models_are_refused(tmp_path: Path, tiny_text: Text) -> None:
    folder = write_run(tmp_path, tiny_text, index_model="model-2")
    with pytest.raises(ValueError, match=r"(?s)model-1.*model-2.*again"):
        SearchService.load(ServeSettings(run_folder=folder))


def test_info_tells_what_is_served(service: SearchService) -> None:
    info = service.info()
    assert info.index.documents == len(DOCUMENTS)
    assert info.instructions == ["default", "question"]
    assert info.limits.max_k == 20


def test_serving_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, json; import serve.app, serve.client; "
        "print(json.dumps([name for name in ('torch', 'transformers', 'workflows') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_run_is_served_with_the_fusion_that_its_evaluation_settled_on(tmp_path: Path, tiny_text: Text) -> None:
    """And a request changes only what it names; a run that was not evaluated has the defaults."""
    folder = write_run(tmp_path, tiny_text)
    assert SearchService.load(ServeSettings(run_folder=folder)).fusion == FusionConfig()
    settled = FusionConfig(dense_weight=0.2, sparse_weight=0.8)
    write_json(folder / "evaluate" / "result.json", {"fusion": settled.model_dump()})
    service = SearchService.load(ServeSettings(run_folder=folder))
    request = SearchRequest(queries=["lift of a wing"], k=5)
    wanted = service.index.search(service.encoder.encode(request.queries), k=5, fusion=settled)[0]
    found = service.search(request).results[0].hits
    assert [(hit.docid, hit.score) for hit in found] == [(hit.docid, hit.score) for hit in wanted]
    assert service.info().fusion["dense_weight"] == 0.2
    changed = SearchRequest(queries=["lift of a wing"], k=5, fusion=FusionRequest(dense_weight=0.5))
    half = FusionConfig(dense_weight=0.5, sparse_weight=0.8)
    wanted = service.index.search(service.encoder.encode(request.queries), k=5, fusion=half)[0]
    assert [hit.score for hit in service.search(changed).results[0].hits] == [hit.score for hit in wanted]
