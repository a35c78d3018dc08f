"""Who reads a report waits for numpy at most."""

import subprocess
import sys


def test_analysis_imports_neither_torch_nor_scipy():
    code = (
        "import sys, lm_profiler.analysis\n"
        "print([name for name in ('torch', 'lightning', 'scipy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_is_sorted_and_true():
    import lm_profiler.analysis as analysis

    public = [name for name in analysis.__all__ if not name.isupper()]
    assert public == sorted(public)
    assert all(hasattr(analysis, name) for name in analysis.__all__)
