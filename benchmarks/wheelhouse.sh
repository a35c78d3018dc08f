#!/usr/bin/env bash
# What `make gpu` needs on a machine without a network, beside Python 3.12, torch, Lightning and transformers.
#
#   benchmarks/wheelhouse.sh fetch FOLDER               with a network: download wheels for Python 3.12 on x86-64 Linux
#   benchmarks/wheelhouse.sh install FOLDER [PYTHON]    there: an environment in .venv-gpu, on top of that PYTHON's
#
# scipy (35 MB) stays away: of lm_profiler only tests use it.
set -euo pipefail
cd "$(dirname "$0")/.."
verb=${1:-} folder=${2:-} python=${3:-python3}
there=(torch lightning pytorch-lightning torchmetrics transformers numpy) # with what these bring
extra=(matplotlib plotly pytest pytest-timeout)                           # pictures, the tests
ours=('setuptools>=77,<82')                                               # our own installation; torch 2.11 has no newer one

requirements() { # of pyproject.toml, one a line, without what is there
  "$python" - "${there[@]}" <<'END'
import re, sys
try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"]
print(*(each for each in needed if re.match(r"[\w-]+", each)[0] not in sys.argv[1:]), sep="\n")
END
}

case "$verb:${folder:+given}" in
fetch:given)
  mkdir -p "$folder"
  platforms=()
  for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${platform}_x86_64")
  done
  mapfile -t needed < <(requirements)
  "$python" -m pip download --quiet --disable-pip-version-check --dest "$folder" \
    --constraint <(grep -v '^setuptools==' constraints.txt) --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" "${needed[@]}" "${extra[@]}" "${ours[@]}"
  for name in "${there[@]}"; do rm -f "$folder/${name//-/_}"-*.whl; done
  du -sm "$folder" | { read -r size _ && echo "$size MiB in $folder" && ((size <= 60)); }
  ;;
install:given)
  "$python" -m venv --clear --without-pip .venv-gpu
  made=.venv-gpu/bin/python
  where='import sysconfig; print(sysconfig.get_path("purelib"))'
  # Not --system-site-packages: where that Python is an environment itself, that means the one below it.
  "$python" -c "$where" >"$("$made" -c "$where")/there.pth"
  install=("$python" -m pip --python "$made" install -qq --disable-pip-version-check --no-index --find-links "$folder")
  # Where that Python's own packages do not fit together, pip refuses to add any: then all of the folder, as it is.
  "${install[@]}" --editable . "${extra[@]}" "${ours[@]}" || "${install[@]}" --no-deps --editable . "$folder"/*.whl
  "$made" -m lm_profiler --version
  ;;
*)
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac
