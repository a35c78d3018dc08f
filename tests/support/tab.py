"""The tab "LM Profiler" as a test sees it, and the page that shows the same as one file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Frame, FrameLocator, Locator, Page

MARKUP = "<img src=x onerror=document.title='injected'>"
"""The name of a run, harmless as text."""


@dataclass(frozen=True)
class Tab:
    """``page`` is TensorBoard's; ours is a frame in it."""

    page: Page
    address: str

    @property
    def inside(self) -> FrameLocator:
        return self.page.frame_locator("iframe[src*='name=lm_profiler']")

    @property
    def frame(self) -> Frame:
        [frame] = [frame for frame in self.page.frames if "plugin_entry.html?name=lm_profiler" in frame.url]
        return frame

    def overflow_px(self) -> int:
        """By how much the page is wider than its window."""
        return self.frame.evaluate("document.documentElement.scrollWidth - window.innerWidth")

    def name(self, run: str) -> str:
        """What the run in a folder below the log folder is called."""
        return run

    def choose_run(self, run: str) -> None:
        self.inside.get_by_label("Run", exact=True).select_option(self.name(run))

    def open_run(self, run: str, view: str = "Run") -> Locator:
        self.open_view(view)
        self.choose_run(run)
        section = self.inside.locator(f"section[data-view='{view}']")
        section.locator(".content > *").first.wait_for()
        return section

    def open_view(self, title: str) -> Locator:
        """The view's element, once it shows something."""
        self.inside.get_by_role("tab", name=title).click()
        view = self.inside.locator(f"section[data-view='{title}']")
        view.locator(".content > *").first.wait_for()
        return view

    def card(self, title: str) -> Locator:
        """A part of the view that is open, by its heading."""
        heading = self.inside.get_by_role("heading", name=title)
        return self.inside.locator("article:visible").filter(has=heading)

    def section(self, title: str) -> Locator:
        """A group of figures in the Run view."""
        heading = self.inside.get_by_role("heading", name=title, exact=True)
        return self.inside.locator("section.facts:visible").filter(has=heading)

    def table(self, card: Locator) -> list[list[str]]:
        """Its rows, the header first, as a reader sees them."""
        card.locator("tbody tr").first.wait_for()
        rows: list[list[str]] = card.locator("tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.innerText.trim()))"
        )
        return rows

    def chart(self, card: Locator) -> dict[str, Any]:
        """What plotly has drawn: ``data`` by name, and the layout."""
        card.locator(".chart").scroll_into_view_if_needed()  # it draws itself when it can be seen
        drawn = card.locator(".js-plotly-plot")
        drawn.locator(".barlayer .point, .scatterlayer .point").first.wait_for(state="attached")
        found: dict[str, Any] = drawn.evaluate(
            "({ data, layout }) => ({ data: Object.fromEntries(data.map(({ name, x, y, marker }) =>"
            " [name, { x: [...x], y: [...y], colour: marker.color }])), layout })"
        )
        return found


class Alone(Tab):
    """The page that is one file, of a log folder whose name its runs' names begin with."""

    @property
    def inside(self) -> Page:  # whatever a test does within a frame, a page has, too
        return self.page

    @property
    def frame(self) -> Frame:
        return self.page.main_frame

    def name(self, run: str) -> str:
        return f"{Path(self.address).name}/{run}"


OpenTab = Callable[..., Tab]
"""Opens the tab, in the theme given (light)."""
