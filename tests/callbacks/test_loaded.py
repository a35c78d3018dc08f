"""What `import lm_profiler.callbacks` loads, in a fresh interpreter: a run loads the rest."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_callbacks_loads_their_options_and_no_more() -> None:
    code = """
import sys
sys.modules["pytorch_lightning"] = None  # not to be imported: Lightning's other name is not needed
import lm_profiler.callbacks
print(*(name for name in sys.modules if name.startswith("lm_profiler.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "lm_profiler.callbacks" in loaded
    assert len(loaded) <= 120
    assert not {name for name in loaded if name.startswith(("lm_profiler.report", "lm_profiler.tensorboard"))}
    assert "lm_profiler.callbacks.attachment" not in loaded
