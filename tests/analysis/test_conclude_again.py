"""Runs concluded again: the same rules find the same, and changes are reported."""

import gzip
from pathlib import Path

import pytest
from known_loop import make_profiler, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.analysis.conclude import concluded_again
from lm_profiler.analysis.evidence import EVIDENCE_FILE, read_evidence
from lm_profiler.cli.main import main
from lm_profiler.record.run_record import RecordError, RunRecord, read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run of 30 steps, with a step of the memory stage and two traced ones."""
    folder = tmp_path_factory.mktemp("run")
    profiler = make_profiler(warmup=2, measure=30, memory=1, trace=2, log_dir=folder)
    trainer_with([profiler], folder).fit(BoringModel())
    return profiler.folder


def test_differences_of_a_record_made_again_are_reported(run: Path, capsys: pytest.CaptureFixture[str]):
    record, changes = concluded_again(run, read_run(run))
    assert changes == []
    assert record.findings or record.verdict
    assert (record.waterfall is None) == (read_run(run).waterfall is None)
    assert (run / EVIDENCE_FILE).stat().st_size < 2 * 2**20
    now = read_run(run)
    cut = now.steadiness.cut + 7
    old = now.model_copy(update={"steadiness": now.steadiness.model_copy(update={"cut": cut}), "findings": []})
    _, changes = concluded_again(run, RunRecord(**old.model_dump()))
    assert changes[0].field.split(".")[0] in ("steadiness", "findings[0]")
    assert (cut, now.steadiness.cut) in [
        (change.before, change.now) for change in changes if change.field == "steadiness.cut"
    ]
    before = (run / "run.json").read_bytes()
    assert main(["report", str(run), "--again"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("the same conclusions")
    assert (run / "run.json").read_bytes() == before


def test_evidence_of_other_phases_is_refused(run: Path) -> None:
    path, names = run / EVIDENCE_FILE, b'"optimizer","other"]'
    whole = path.read_bytes()
    content = gzip.decompress(whole)
    assert names in content
    try:
        path.write_bytes(gzip.compress(content.replace(names, b'"ema",' + names), mtime=0))
        message = refusal(RecordError, lambda: read_evidence(run))
    finally:
        path.write_bytes(whole)
    assert_stored("analysis/refused: evidence of other phases", {"one more": message}, run=run)


def test_damaged_evidence_is_reported_with_its_file(run: Path) -> None:
    path = run / EVIDENCE_FILE
    whole, messages = path.read_bytes(), {}
    compressed = {"no JSON": gzip.compress(b"{}x"), "a list": gzip.compress(b"[]")}
    try:
        for case, content in {"empty": b"", "no gzip": b"no gzip", **compressed}.items():
            path.write_bytes(content)
            messages[case] = refusal(RecordError, lambda: read_evidence(run))
        path.unlink()
        messages["gone"] = refusal(RecordError, lambda: read_evidence(run))
    finally:
        path.write_bytes(whole)
    assert_stored("analysis/refused: evidence", messages, run=run)
