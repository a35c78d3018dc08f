"""The views of a run. A view is added or deleted with its file and its line here."""

from lm_profiler.report.views.kernels_view import KERNELS
from lm_profiler.report.views.memory_view import MEMORY
from lm_profiler.report.views.ranks_view import RANKS
from lm_profiler.report.views.run_view import RUN
from lm_profiler.report.views.view import View
from lm_profiler.report.views.watch_view import WATCH
from lm_profiler.report.views.why_view import WHY

# In the order of their tabs. The views Compare and Trace are drawn by the browser (``report.page``).
VIEWS: dict[str, View] = {
    view.name: view for view in (RUN, WHY, MEMORY, RANKS, WATCH, KERNELS)
}
