#!/usr/bin/env bash
# Sets up and runs every test: Rust (formats, state machines, real QEMU machines), then the official SDKs and the
# end-to-end suite against a running server. Ends with one line of counts. Leaves nothing running.
#   AENV_TEST_ONLY=rust|lab|sdk|e2e   one part only
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

only=${AENV_TEST_ONLY:-all}
aenv_logs=$PWD/target/test-logs
work=$(mktemp -d /tmp/aenv-test.XXXXXX)
aenv=$PWD/target/release/aenv
port=${AENV_TEST_PORT:-18000}
up_flags=(--data-dir "$work/data" --run-dir "$work/run" --listen "127.0.0.1:$port")
# The settings of a server that this person runs besides are not for these tests.
unset E2B_API_KEY E2B_API_URL E2B_SANDBOX_URL E2B_DOMAIN AENV_DATA_DIR AENV_RUN_DIR AENV_LISTEN
export XDG_CONFIG_HOME=$work/config

stop_all() {
    local code=$?
    if [ -e "$work/run/server.pid" ] || [ -e "$work/run/storaged.pid" ]; then
        "$aenv" down --kill "${up_flags[@]}" >>"$aenv_logs/down.log" 2>&1 || step "the test server did not stop cleanly: see $aenv_logs/down.log"
    fi
    if [ $code -eq 0 ]; then rm -rf "$work"; else step "kept for a look: $work"; fi
}
trap stop_all EXIT

require_root "$@"
require_rust
mkdir -p "$aenv_logs"
install_runtime_packages
packages docker-registry python3-venv
command -v node >/dev/null || packages nodejs npm
build_all

passed=0 failed=0 skipped=0

# The base image is made once a checkout: it is the same for every run.
base=$PWD/target/base-image
if [ ! -f "$base/index.json" ]; then
    step "making the base image from Debian packages"
    quietly "$aenv_logs/base-image.log" "check the network and 'apt-get update'" "$aenv" base-image --out "$base"
fi

# The sum of the numbers before a word; no such word is 0, not a failure of the pipeline. usage: counted WORD <TEXT
counted() { { grep -oE "[0-9]+ $1" || true; } | awk '{n+=$1} END {print n+0}'; }

run_rust() {
    step "Rust tests"
    export AENV_GUEST_DIR=$PWD/target/guest AENV_BASE_IMAGE=$base
    local log=$aenv_logs/rust.log code=0
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --workspace --release --locked --no-fail-fast 2>&1 | tee "$log" || code=$?
        local line
        line=$(grep -E '^ *Summary ' "$log" | tail -n1 || true)
        passed=$((passed + $(counted passed <<<"$line")))
        failed=$((failed + $(counted '(failed|timed out|exec failed)' <<<"$line")))
    else
        cargo test --workspace --release --locked --no-fail-fast 2>&1 | tee "$log" || code=$?
        passed=$((passed + $({ grep "^test result: " "$log" || true; } | counted passed)))
        failed=$((failed + $({ grep "^test result: " "$log" || true; } | counted failed)))
    fi
    skipped=$((skipped + $(grep -c '^ *Skipped: ' "$log" || true)))
    grep '^ *Skipped: ' "$log" | sort | uniq -c >&2 || true
    if [ $code -ne 0 ] && [ $failed -eq 0 ]; then failed=1; fi
}

# A machine in QEMU whose kernel has what this one may lack (ublk): the same suites inside.
run_lab() {
    step "the ublk suite in the KVM lab"
    local log=$aenv_logs/lab.log code=0 line
    cargo xtask lab --test ublk --deadline 300 2>&1 | tee "$log" || code=$?
    line=$(grep -aE 'test result: ' "$log" | tail -n1 || true)
    passed=$((passed + $(counted passed <<<"$line")))
    failed=$((failed + $(counted failed <<<"$line")))
    if [ $code -ne 0 ] && ! grep -qaE 'test result: FAILED' "$log"; then failed=$((failed + 1)); fi
}

start_server() {
    step "starting a server for the end-to-end tests"
    mkdir -p "$work/data"
    cp -r target/guest "$work/data/guest"
    "$aenv" up --detach "${up_flags[@]}" || fail "the test server did not start" "see $work/data/logs/server.log"
    set -a
    . "$XDG_CONFIG_HOME/aenv/env"
    set +a
    step "making the template 'base'"
    "$aenv" pull "oci:$base:base" --name base || fail "the template could not be made" "see $work/data/logs/server.log"
    export AENV_TEMPLATE=base AENV_BIN=$aenv AENV_DATA_DIR=$work/data AENV_RUN_DIR=$work/run
    export AENV_SERVER_PID_FILE=$work/run/server.pid
    export AENV_RESTART_CMD="env -u AENV_DATA_DIR -u AENV_RUN_DIR $aenv up --detach ${up_flags[*]}"
}

# usage: run_pytest NAME VENV FOLDER
run_pytest() {
    local name=$1 venv=$2 folder=$3 code=0 xml=$aenv_logs/$1.xml
    step "$name"
    "$venv/bin/python" -m pytest "$folder" -q -p no:cacheprovider -rs --junitxml "$xml" 2>&1 | tee "$aenv_logs/$name.log" || code=$?
    read -r p f s < <("$venv/bin/python" - "$xml" <<'PY'
import sys, xml.etree.ElementTree as tree
s = tree.parse(sys.argv[1]).getroot().find("testsuite").attrib
bad = int(s["failures"]) + int(s["errors"])
print(int(s["tests"]) - bad - int(s["skipped"]), bad, s["skipped"])
PY
    ) || { p=0 f=1 s=0; }
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ $code -ne 0 ] && [ "$f" -eq 0 ]; then failed=$((failed + 1)); fi
}

run_sdk() {
    step "Python SDK environments"
    python_env "$PWD/target/venv-oldest" -r tests/sdk-python/requirements-2.45.1.txt
    python_env "$PWD/target/venv-newest" -r tests/sdk-python/requirements-newest.txt
    run_pytest sdk-python-2.45.1 "$PWD/target/venv-oldest" tests/sdk-python
    run_pytest sdk-python-newest "$PWD/target/venv-newest" tests/sdk-python
    step "sdk-js"
    quietly "$aenv_logs/npm.log" "check the network; the official SDK comes from npm" npm --prefix tests/sdk-js ci --no-audit --no-fund
    local log=$aenv_logs/sdk-js.log code=0
    (cd tests/sdk-js && npm test --silent) 2>&1 | tee "$log" || code=$?
    passed=$((passed + $(awk '/^(# |ℹ )pass /{n+=$3} END {print n+0}' "$log")))
    failed=$((failed + $(awk '/^(# |ℹ )fail /{n+=$3} END {print n+0}' "$log")))
    skipped=$((skipped + $(awk '/^(# |ℹ )skipped /{n+=$3} END {print n+0}' "$log")))
    if [ $code -ne 0 ] && ! grep -qE '^(# |ℹ )fail [1-9]' "$log"; then failed=$((failed + 1)); fi
}

run_e2e() {
    python_env "$PWD/target/venv-newest" -r tests/sdk-python/requirements-newest.txt
    export AENV_BASE_IMAGE=$base
    run_pytest e2e "$PWD/target/venv-newest" tests/e2e
}

if [ "$only" = all ] || [ "$only" = rust ]; then run_rust; fi
if [ "$only" = all ] || [ "$only" = lab ]; then run_lab; fi
if [ "$only" = all ] || [ "$only" = sdk ] || [ "$only" = e2e ]; then start_server; fi
if [ "$only" = all ] || [ "$only" = sdk ]; then run_sdk; fi
if [ "$only" = all ] || [ "$only" = e2e ]; then run_e2e; fi

printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
