# Sourced by quickstart.sh and test.sh: a .venv with this project in it, installed only when something changed.
# Says what is missing before anything is downloaded.

ensure_venv() { # ensure_venv EXTRA, e.g. "" or "[test]"
  local python=${PYTHON:-python3} compiler=${CXX:-c++} stamp
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    die "Python 3.10 or newer is needed; set PYTHON to one (found: $("$python" --version 2>&1 || true))"
  command -v "$compiler" >/dev/null ||
    die "no C++ compiler ('$compiler'): AMD Quark compiles an extension when it is imported." \
      "Debian, Ubuntu: apt-get install g++"
  if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv ||
      die "'$python -m venv' failed; on Debian, Ubuntu: apt-get install python3-venv"
  fi
  # One stamp per extra; a changed requirement or kernel changes the stamp.
  stamp=.venv/.installed-$(cat pyproject.toml constraints.txt glmquant/mxfp4/_kernel.c <(echo "$PWD$1") | cksum | tr -d ' ')
  if [ ! -e "$stamp" ]; then
    echo "installing glmquant$1 into .venv (about 2 GB, a minute or two) ..."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$1" ||
      die "pip could not install the packages of pyproject.toml (see above)"
    # Left empty when an install by the former build backend is replaced; it would hide the package.
    rmdir .venv/lib/python*/site-packages/glmquant 2>/dev/null || true
    touch "$stamp"
  fi
}

die() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}
