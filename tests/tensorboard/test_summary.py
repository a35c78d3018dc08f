"""What TensorBoard's own backend makes of what is written for it."""

import json
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
from by_hand import made_outcome
from made_runs import FORWARD_S, made_entry, made_record
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from lm_profiler.record.entry import Entry
from lm_profiler.record.sweep_files import Cell
from lm_profiler.tensorboard.summary import write_hparams

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")

Ask = Callable[..., Any]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Asks a plugin of TensorBoard about what lies below ``tmp_path``."""
    # A module of theirs warns when it is imported, and only within a test that is passed over.
    from tensorboard.plugins.hparams.hparams_plugin import HParamsPlugin
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
    from tensorboard.plugins.text.text_plugin import TextPlugin

    plugins = {"hparams": HParamsPlugin, "text": TextPlugin}

    def ask(plugin: str, route: str, request: object = None, **query: str) -> Any:
        runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
        runs.Reload()
        provider = MultiplexerDataProvider(runs, str(tmp_path))
        context = TBContext(data_provider=provider, logdir=str(tmp_path), plugin_name_to_instance={})
        context.plugin_name_to_instance["scalars"] = ScalarsPlugin(context)
        client = Client(plugins[plugin](context).get_plugin_apps()[route])
        answer = client.get("/", query_string=query) if request is None else client.post("/", json=request)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text)

    return ask


def sessions(ask: Ask) -> dict[str, Any]:
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    request = {"allowedStatuses": statuses, "sliceSize": 100}
    groups = ask("hparams", "/session_groups", request)["sessionGroups"]
    return {group["name"]: group for group in groups}


def metrics(group: dict[str, Any]) -> dict[str, float]:
    return {value["name"]["tag"]: value["value"] for value in group["metricValues"]}


def test_every_run_has_its_options(tmp_path: Path, ask: Ask) -> None:
    """One that ended well, one that ran out of memory, and a cell that left no run."""
    small = made_record({"model.size": "small", "model.compile": "true"})
    large = made_record({"model.size": "large", "model.num_layers": "7"}, status="oom")
    cell = Cell(id="c2", overrides={"model.size": "xl", "data.context_length": "512"}, repeat=0, arguments=["fit"])
    write_hparams(Entry(tmp_path / "small", small))
    write_hparams(Entry(tmp_path / "large", large))
    write_hparams(Entry(tmp_path / "xl", None, cell, made_outcome("c2", "timeout", 600.0, "600 s")))

    found = sessions(ask)
    assert set(found) == {"small", "large", "xl"}
    options = {name: group["hparams"] for name, group in found.items()}
    assert options["small"].items() >= {"model.size": "small", "model.compile": True, "data.batch_size": 4}.items()
    assert options["small"]["steadiness"] == "steady"
    assert options["large"].items() >= {"model.size": "large", "model.num_layers": 7}.items()
    assert options["xl"] == {"model.size": "xl", "data.context_length": 512, "verb": "fit"}
    statuses = {name: group["sessions"][0]["status"] for name, group in found.items()}
    assert statuses == {"small": "STATUS_SUCCESS", "large": "STATUS_FAILURE", "xl": "STATUS_FAILURE"}
    assert metrics(found["large"]) == metrics(found["xl"]) == {}


def test_a_run_has_its_main_figures(tmp_path: Path, ask: Ask) -> None:
    """Steps of 3 ms of forward, 5 of backward and 2 of other, with 512 tokens."""
    write_hparams(Entry(tmp_path / "run", made_record(forward_s=FORWARD_S)))
    (run,) = sessions(ask).values()
    assert metrics(run) == pytest.approx(
        {
            "Summary/step_ms": 10.0,
            "Summary/forward_ms": 3.0,
            "Summary/backward_ms": 5.0,
            "Summary/tokens_per_s": 51_200.0,
            "Summary/mfu_percent": 40.0,
            "Summary/allocated_peak_gib": 2.0,
        }
    )


def test_the_scalars_of_steps_are_no_second_run(tmp_path: Path, ask: Ask):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        for tag in ("host_time_ms/step", "time_ms/step", "train_loss"):
            writer.add_scalar(tag, 1.0, 1)
    write_hparams(made_entry(tmp_path / "run"))
    names = [info["name"]["tag"] for info in ask("hparams", "/experiment", {})["metricInfos"]]
    assert all(name.startswith("Summary/") for name in names[:6])
    assert "Summary/step_ms" in names[:5]  # TensorBoard's page shows five until it is asked for more
    assert set(names[6:]) == {"host_time_ms/step", "time_ms/step", "train_loss"}
    assert list(sessions(ask)) == ["run"]


def test_the_summary_is_what_the_terminal_prints(tmp_path: Path, ask: Ask) -> None:
    name = "x | <img src=//evil> ![y](//evil) `z` **"
    write_hparams(made_entry(tmp_path / "run", name=name))
    [text] = ask("text", "/text", run="run", tag="summary", markdown="true")
    shown = text["text"]
    assert "<img" not in shown
    assert f"{escape(name)}: 20 steps" in shown
    assert len(re.findall("<h2>(.*?)</h2>", shown)) >= 3
    assert "3.000" in shown
    # TensorBoard breaks words in the narrow columns of a table: all of it stands in blocks that keep their lines.
    write_hparams(made_entry(tmp_path / "run"))
    [text] = ask("text", "/text", run="run", tag="summary", markdown="true")
    blocks = re.findall("<pre>.*?</pre>", text["text"], re.DOTALL)
    assert "<table>" not in text["text"]
    assert any(re.search(r"\bverdict +steady; bound by compute", block) for block in blocks)
    assert any(re.search(r"\bforward +3\.000", block) for block in blocks)


def test_settings_are_all_options_of_the_config(tmp_path: Path, ask: Ask) -> None:
    config = {
        "name": "x",
        "log_dir": str(tmp_path),
        "model": {"class_path": "a.Model", "init_args": {"size": "small", "lr": 3e-4, "fused": None}},
        "trainer": {"gradient_clip_val": 1.0, "devices": [0, 1], "plugins": []},
        "data": {"seed": 10**400},
    }
    write_hparams(made_entry(tmp_path / "run", config=config))
    [session] = sessions(ask).values()
    assert session["hparams"] == {
        "model.class_path": "a.Model",
        "model.size": "small",
        "model.lr": 3e-4,
        "trainer.gradient_clip_val": 1.0,
        "trainer.devices": "[0, 1]",
        "data.seed": str(10**400),
        "device": "a GPU",
        "verb": "fit",
        "trainer.precision": "32-true",
        "steadiness": "steady",
    }
