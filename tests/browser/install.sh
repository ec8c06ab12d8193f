#!/usr/bin/env bash
# Debian's chromium where it is missing, and playwright into the environment of the interpreter given: install.sh PYTHON
set -eu
if [ ! -x /usr/bin/chromium ]; then
    as_root=""
    if [ "$(id -u)" != 0 ]; then as_root="sudo -n"; fi
    if ! command -v apt-get >/dev/null || { [ -n "$as_root" ] && ! $as_root true 2>/dev/null; }; then
        echo "error: /usr/bin/chromium is missing, and it can't be installed here (apt-get, and root or sudo, are needed)" >&2
        echo "hint: install Debian's chromium by hand, then run this again" >&2
        exit 2
    fi
    $as_root apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi
"$1" -c "import playwright" 2>/dev/null || "$1" -m pip install -q -c constraints.txt playwright
