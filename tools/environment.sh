#!/usr/bin/env bash
# Finds a Python and makes virtual environments with it. VERSION is exact ("3.12") or a least one ("3.11+").
#
#   tools/environment.sh find VERSION                          prints a Python of that version
#   tools/environment.sh version PYTHON                        prints the version of PYTHON ("3.12"), which need not be on the PATH
#   tools/environment.sh make FOLDER VERSION [-- ARGUMENT...]...   a virtual environment, and a `pip install` for each group of arguments
#
# The variable PYTHON names the interpreter to try first. An environment that is there is completed; one whose Python is gone or has
# another version is made anew.
set -euo pipefail

fits() {  # VERSION PYTHON
    "$2" -c 'import sys
least = tuple(int(part) for part in sys.argv[1].rstrip("+").split("."))
sys.exit(not (sys.version_info[:2] >= least if sys.argv[1].endswith("+") else sys.version_info[:2] == least))' "$1" 2>/dev/null
}

candidates() {  # VERSION
    local exact="" newest="python3.14 python3.13 python3.12 python3.11"
    case $1 in *+) ;; *) exact="python$1" newest="" ;; esac
    for name in ${PYTHON:-} $exact python3 $newest; do command -v "$name" || true; done
    # pyenv's commands run only for the versions that it was told to use; those that it has lie here.
    if command -v pyenv >/dev/null; then ls -d "$(pyenv root)"/versions/*/bin/python 2>/dev/null || true; fi
}

find_python() {  # VERSION
    local candidate
    while read -r candidate; do
        if fits "$1" "$candidate"; then echo "$candidate" && return; fi
    done < <(candidates "$1")
}

version() {  # PYTHON
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || basename "$1" | sed 's/^python//'
}

make_environment() {  # FOLDER VERSION
    local found
    if fits "$2" "$1/bin/python" && "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "completing the environment in $1"
        return
    fi
    found=$(find_python "$2")
    if [ -z "$found" ]; then
        echo "No Python $2 found. Install one, or name it: make TARGET PYTHON=/path/to/python${2%+}" >&2
        exit 1
    fi
    echo "making the environment in $1 with $found"
    if ! "$found" -m venv --clear "$1"; then
        echo "$found cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
    "$1/bin/python" -m pip install --quiet --upgrade "pip>=23.1"
}

install() {  # FOLDER [-- ARGUMENT...]...
    local folder=$1 group
    shift
    while [ $# -gt 0 ]; do
        shift  # the dashes
        group=()
        while [ $# -gt 0 ] && [ "$1" != -- ]; do group+=("$1") && shift; done
        PYTHONWARNINGS=ignore "$folder/bin/python" -m pip install --quiet "${group[@]}"
    done
}

case ${1:-} in
    find) find_python "$2" | grep . ;;  # no output, no success
    version) version "$2" ;;
    make)
        make_environment "$2" "$3"
        install "$2" "${@:4}"
        touch "$2/.installed"
        ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
