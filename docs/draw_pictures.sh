#!/bin/sh
# Draws the pictures of the documentation anew, from the code of this checkout: `make pictures`, on an idle machine.
set -e
bin=$(realpath "$1")  # where python and lm_profiler are
chromium=$2           # the browser's program
images=$(realpath docs/images)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# the views of the tab
SCREENSHOTS="$folder/tab" OMP_NUM_THREADS=1 "$bin/python" -m pytest -q tests/browser
for picture in docs/images/*-light.png docs/images/*-dark.png; do
  cp "$folder/tab/$(basename "$picture")" "$picture"
done

# the terminal of a watched training
"$bin/python" docs/watch_picture.py

# a sweep
cd "$folder"
"$bin/lm_profiler" sweep demo
"$bin/lm_profiler" report logs/demo_sweep --plot phases --by data.context_length --output "$images/phases.png"

# the page of the run that `make demo` makes
"$bin/lm_profiler" fit --config demo
"$bin/lm_profiler" report logs/demo/version_0 --output run.html
"$chromium" --headless --no-sandbox --window-size=1280,1000 --virtual-time-budget=8000 \
  --screenshot="$images/demo.png" "file://$folder/run.html#lm_profiler&p.lm_profiler.view=Run"
