"""The layouts of published reports, letter by letter."""

from dataclasses import replace

import pytest
from stored_texts import assert_stored
from tabled import made_run_of

from lm_profiler.analysis.steps.summaries import judged_after_warmups
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import MemoryFacts, MemoryLevels, MemoryReading
from lm_profiler.record.sweep_files import Cell
from lm_profiler.report.tables.formats import markdown, terminal
from lm_profiler.report.tables.layouts import blocks, devices, modes, warmups, wide

# mean 2 and 4, sample standard deviation sqrt(2) times the half distance of the pair
STEPS = [(0.1, 0.3), (0.3, 0.5)]


def test_the_layouts_are_as_stored():
    two = [made_run_of("a", STEPS), made_run_of("b", failed=("oom", "no memory left"), size="xl")]
    unlike = [made_run_of("a", STEPS), made_run_of("b", STEPS, precision="bf16-mixed", num_layers=3)]
    warmed = made_run_of("a", STEPS, warmup=[(9.0, 9.0), (0.5, 0.7)])
    cpu, h100 = ("cpu", "EPYC"), ("cuda", "H100")
    across = [
        made_run_of("a", [(0.2507, 0.7151)] * 3, device=cpu),
        made_run_of("b", [(0.0242, 0.0562)] * 3, device=h100),
        made_run_of("c", failed=("oom", "no memory left"), size="medium", device=h100),
    ]
    texts = {
        "blocks: each step, then the summary": terminal(blocks(two)),
        "blocks in Markdown: fenced, and the summary is a table": markdown(blocks([made_run_of("a", STEPS)])),
        "blocks of equal sizes have the facts that differ": terminal(blocks(unlike)),
        "blocks after other warm-ups: what was left out under a banner each": terminal(
            blocks(judged_after_warmups([warmed], [0, 1], 3)[0])
        ),
        "devices across, and sizes down": markdown(devices(across)),
        "a row for each pass and warm-up": markdown(
            warmups(judged_after_warmups([made_run_of("a", STEPS, warmup=[(0.5, 0.5)])], [0, 1], None)[0])
        ),
    }
    assert_stored("report/layouts", texts)


def test_wide_has_a_row_for_each_warm_up():
    """Run a has four steps after a slow one, run b the slow one as its warm-up: then they are the same steps."""
    slow, means_s = (9.0, 9.0), (0.1 + 0.3) / 2
    without_warmup = made_run_of("a", [slow, *STEPS, *STEPS])
    with_warmup = made_run_of("b", [*STEPS, *STEPS], warmup=[slow], size="medium")
    rows = wide(judged_after_warmups([without_warmup, with_warmup], [0, 1], 4)[0]).records()
    facts = [(row["model"], row["warmup_steps"], row["benchmark_steps"]) for row in rows]
    assert facts == [("small", 0, 4), ("small", 1, 4), ("medium", 0, 4), ("medium", 1, 4)]
    with_slow_step_s = (9.0 + 0.1 + 0.3 + 0.1) / 4
    found_s = [row["fwd avg (sec)"] for row in rows]
    assert found_s == pytest.approx([with_slow_step_s, means_s, with_slow_step_s, means_s])


def test_wide_has_a_column_for_each_fact_that_differs():
    both = entry_of_mode("b", forward_s=2.0, backward_s=3.0, optimizer="none")
    full = entry_of_mode("c", forward_s=4.0, backward_s=6.0, attention="math")
    table = wide([both, full])
    facts = [(row["optimizer"], row["attention"]) for row in table.records()]
    assert facts == [("none", "sdpa"), ("adamw", "math")]
    for heading in table.headings:
        if heading.name in ("optimizer", "attention"):
            assert not heading.figures


def test_wide_has_a_column_for_repeats():
    cells = [Cell(id=f"r{repeat}", overrides={}, repeat=repeat, arguments=["fit"]) for repeat in range(2)]
    rows = wide([replace(made_run_of(cell.id, STEPS), cell=cell) for cell in cells]).records()
    assert [row["repeat"] for row in rows] == [0, 1]


def test_two_devices_of_a_type_have_their_names():
    entries = [made_run_of("a", STEPS, device=("cuda", "H100")), made_run_of("b", STEPS, device=("cuda", "A100"))]
    titles = [heading.title for heading in devices(entries).headings][-4:]
    assert titles == ["A100 forward", "A100 forward+backward", "H100 forward", "H100 forward+backward"]


@pytest.mark.parametrize(
    "precision, shown", [("bf16-true", "bfloat16"), ("16-true", "float16"), ("bf16-mixed", "bf16-mixed")]
)
def test_wide_names_mixed_precision(precision: str, shown: str):
    assert wide([made_run_of("a", STEPS, precision=precision)]).records()[0]["dtype"] == shown


def test_wide_of_attention_alone_has_its_memory():
    held = MemoryLevels(start=1 * 2**20, forward=5 * 2**20, backward=3 * 2**20, source="allocator")
    entry = made_run_of("a", STEPS)
    config = {"model": {"d_model": 64, "attention": "math"}, "data": {"batch_size": 8, "context_length": 256}}
    memory = MemoryFacts(measured=MemoryReading(), parts={}, held=held)
    record = entry.record.model_copy(update={"config": config, "memory": memory})
    [row] = wide([Entry(entry.folder, record)]).records()
    assert list(row) == [
        *("device", "batch_size", "compile", "model", "d_model", "context_length", "dtype"),
        *("fwd avg (sec)", "fwd std (sec)", "back avg (sec)", "back std (sec)"),
        *("fwd & back avg (sec)", "fwd & back std (sec)"),
        *("model mem", "model+fwd mem", "model+fwd+back mem", "fwd mem", "back mem", "status"),
    ]
    assert (row["model"], row["d_model"]) == ("math", 64)
    memory = ("model mem", "model+fwd mem", "model+fwd+back mem", "fwd mem", "back mem")
    assert [row[name] / 2**20 for name in memory] == [1, 5, 3, 5 - 1, 3 - 5]


def entry_of_mode(folder: str, forward_s: float, backward_s: float, verb: str = "fit", **options):
    """Two steps, with 0.1 s less and 0.1 s more of forward and backward."""
    entry = made_run_of(folder, [(forward_s - 0.1, backward_s - 0.1), (forward_s + 0.1, backward_s + 0.1)], **options)
    config = {**entry.record.config, "model": {"init_args": {**entry.record.config["model"]["init_args"]}}}
    config["model"]["init_args"]["optimizer"] = options.get("optimizer", "adamw")
    return replace(entry, record=entry.record.model_copy(update={"verb": verb, "config": config}))


def runs_of_three_modes():
    """Of forward alone (1 s), of forward and backward (2 + 3 s), and of whole steps (4 + 6 s)."""
    forward = entry_of_mode("a", forward_s=1.0, backward_s=0.1, verb="validate")
    both = entry_of_mode("b", forward_s=2.0, backward_s=3.0, optimizer="none")
    full = entry_of_mode("c", forward_s=4.0, backward_s=6.0)
    return forward, both, full


def test_each_mode_is_timed_by_its_own_runs_if_there_are_any():
    """Forward alone takes 1 s, 2 s of 5 with backward, 4 s of 10 with the optimizer: each run has another name."""
    forward, both, full = runs_of_three_modes()

    def means_s(*entries):
        [row] = modes(entries).records()
        return [row[key] for key in ("forward_s", "forward_backward_s", "step_s")]

    assert means_s(full, both, forward) == pytest.approx([1.0, 5.0, 10.0])
    assert means_s(full, both) == pytest.approx([2.0, 5.0, 10.0])
    assert means_s(full) == pytest.approx([4.0, 10.0, 10.0])
    assert means_s(both) == [pytest.approx(2.0), pytest.approx(5.0), None]
    [row] = modes([full, both, forward]).rows
    assert [cell.text for cell in row[-3:]] == ["1,000.00 ± 141.42", "5,000.00 ± 282.84", "10,000.00 ± 282.84"]


def test_devices_have_no_mean_over_runs_of_two_modes():
    """The mean of a run without an optimizer and of one with it is the time of neither."""
    forward, both, full = runs_of_three_modes()

    def means_s(*entries):
        [row] = devices(entries).rows
        return [cell.value for cell in row[-2:]]

    assert means_s(full, both, forward) == pytest.approx([1.0, 5.0])
    assert means_s(full, both) == pytest.approx([2.0, 5.0])
    assert means_s(full) == pytest.approx([4.0, 10.0])


@pytest.mark.parametrize("status, word", [("oom", "OOM"), ("refused", "OOM (planned)")])
def test_a_mode_that_did_not_fit_has_the_reason_in_its_cell(status: str, word: str):
    died = made_run_of("d", failed=(status, "no memory left"), size="xl")
    alone = entry_of_mode("a", forward_s=1.0, backward_s=0.1, verb="validate", size="xl")
    table = modes([alone, died, entry_of_mode("b", forward_s=1.0, backward_s=1.0)])
    assert [[cell.text for cell in row][-1] for row in table.rows] == ["2,000.00 ± 282.84", word]
    assert table.rows[1][-3].value == pytest.approx(1.0)
