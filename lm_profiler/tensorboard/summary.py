"""TensorBoard's view of a run besides its steps: HPARAMS, and the summary under TEXT.

Written with TensorBoard's own pieces, without torch, so that a cell that never began can be written too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lm_profiler.analysis.compare.differences import OF_EACH_RUN, flat
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import MEMORY, QUANTITIES
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.tables.formats import fenced, lines, markdown, plain
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import COLUMNS, COMPARED, OPTIONS, peak_memory

# The suffix of the file. It lies next to the file of the run's steps: in its own folder it would be a second run.
SUFFIX = ".summary"

# The group of the main figures' tags. TensorBoard takes every scalar of a run for a metric, and shows the first few in
# the order of the alphabet until it is asked for others: capitals come before the groups of the steps.
GROUP = "Summary"

_TEXT_WIDTH = 120  # characters of a line under TEXT


def write_hparams(entry: Entry) -> None:
    """Write ``entry`` for TensorBoard into a separate file in its folder, which replaces the file of an earlier try."""
    for old in entry.folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    last = sum(entry.record.steps.get(stage, 0) for stage in ("warmup", "measure")) if entry.record else 0
    write_events(entry.folder, ((last, summary) for summary in _summaries(entry)), SUFFIX)


def write_events(folder: Path, summaries: Iterable[tuple[int, Any]], suffix: str = "") -> None:
    """Write ``summaries``, each with its step, into a separate event file in ``folder``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    try:
        for step, summary in summaries:
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    finally:
        writer.close()


def scalars_summary(values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def settings(entry: Entry) -> dict[str, bool | float | str]:
    """Return the known options by their path, the device, and the words for the run's steps."""
    settings = {fact.option or fact.name: fact.get(entry) for fact in COMPARED}
    for path, value in flat(entry.config or {}).items():
        if settings.get(path) is None and path not in OF_EACH_RUN:
            settings[path] = value
    settings["steadiness"] = COLUMNS["steadiness"].get(entry)  # figures of a noisy run, or a shared machine, say little
    for path, given in entry.overrides.items():
        value = OPTIONS[path].get(entry) if path in OPTIONS else entry.option(path)
        settings[path] = value if isinstance(value, (bool, int, float, str)) else given
    known = {plain(path): value for path, value in settings.items() if value not in (None, [], {})}
    # TensorBoard holds neither lists nor numbers beyond a float: they become text.
    numbers = {name for name, of in known.items() if isinstance(of, (int, float)) and abs(of) <= sys.float_info.max}
    return {name: value if name in numbers else plain(str(value)) for name, value in known.items()}


def figures(entry: Entry) -> dict[str, float]:
    """Return the known main figures by their tags, in the units that the tags name."""
    peaks = {of.name for of in MEMORY.values()} - {peak_memory([entry]).name}
    shown = [of for of in QUANTITIES.values() if of.run_tag is not None and of.name not in peaks]
    known = ((of, COLUMNS[of.name].get(entry)) for of in shown)
    return {f"{GROUP}/{of.run_tag}": value * of.scale for of, value in known if value is not None}


def text(entry: Entry) -> str:
    """Return the page of a run as Markdown: each section as the terminal prints it, under its heading.

    TensorBoard breaks the words of a Markdown table where its columns are narrow, but no line of such a block.
    """
    if entry.record is None:
        return markdown(Table(above=[f"{entry.status}: {entry.reason or 'it left no record'}"]))
    parts = []
    for table in run_page(entry.record, entry.folder):
        title = markdown(Table(title=table.title)) if table.title else ""
        printed = fenced(list(lines(replace(table, title=""), _TEXT_WIDTH)))
        parts.append("\n".join([title, *printed]))
    return "\n\n".join(parts)


def _summaries(entry: Entry) -> Iterator[Any]:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb

    record = entry.record
    try:
        started = datetime.fromisoformat(record.started).timestamp() if record is not None else time.time()
    except (ValueError, OverflowError):
        started = time.time()
    # An empty trial_id makes the folder the session's name; TensorBoard would average sessions of one name.
    yield hparams_pb(settings(entry), trial_id="", start_time_secs=started)
    yield scalars_summary(figures(entry))
    yield text_pb("summary", text(entry))
    if entry.status != "unfinished":
        yield _session_end(entry.status == "ok", started + (record.duration_s if record is not None else 0.0))


def _session_end(ok: bool, ended: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if ok else api_pb2.STATUS_FAILURE
    session = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
    data = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=session))
    tag = metadata.SESSION_END_INFO_TAG
    return Summary(value=[Summary.Value(tag=tag, tensor=metadata.NULL_TENSOR, metadata=data)])
