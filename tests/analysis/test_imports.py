"""Who reads a report waits for numpy at most."""

import subprocess
import sys


def test_analysis_imports_neither_torch_nor_scipy():
    code = (
        "import sys, lm_profiler.analysis.compare.comparison, lm_profiler.analysis.findings\n"
        "print([name for name in ('torch', 'lightning', 'scipy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
