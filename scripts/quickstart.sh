#!/usr/bin/env bash
# From a bare Debian or Ubuntu machine to a sandbox driven by the official SDK. Can be run again at any time.
#   AENV_DATA_DIR   where all state goes (default /var/lib/aenv)
#   AENV_LISTEN     address of the server (default 127.0.0.1:8000)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

data=${AENV_DATA_DIR:-/var/lib/aenv}
listen=${AENV_LISTEN:-127.0.0.1:8000}
aenv_logs=$data/logs
aenv=$PWD/target/release/aenv
# For this script's own processes only: everything below is told by flags.
unset AENV_DATA_DIR AENV_LISTEN
up_flags=(--listen "$listen")
[ "$data" = /var/lib/aenv ] || up_flags+=(--data-dir "$data")

require_root "$@"
require_rust
mkdir -p "$aenv_logs"
install_runtime_packages
build_all

mkdir -p "$data/guest"
if ! cmp -s target/guest/manifest.json "$data/guest/manifest.json"; then
    if "$aenv" status "${up_flags[@]}" >/dev/null 2>&1; then
        step "the guest kit is new: stopping the server, sandboxes are paused first"
        "$aenv" down "${up_flags[@]}" || fail "the running server didn't stop" "see $aenv_logs/server.log"
    fi
    cp target/guest/vmlinux target/guest/initramfs.cpio "$data/guest/"
    cp target/guest/manifest.json "$data/guest/"
fi

step "checking this machine"
"$aenv" doctor --output table "${up_flags[@]}" >&2 || fail "this machine can't run sandboxes" "the lines marked 'fail' above say what to do"

step "starting the server on $listen"
"$aenv" up --detach "${up_flags[@]}" || fail "the server did not start" "see $aenv_logs/server.log"
. "${XDG_CONFIG_HOME:-$HOME/.config}/aenv/env"
export E2B_API_URL E2B_SANDBOX_URL E2B_API_KEY

if [ ! -f "$data/base-image/index.json" ]; then
    step "making the base image from Debian packages"
    quietly "$aenv_logs/base-image.log" "check the network and 'apt-get update'" "$aenv" base-image --out "$data/base-image"
fi
if ! "$aenv" template info base >/dev/null 2>&1; then
    step "making the template 'base': boot it once, snapshot it"
    "$aenv" pull "oci:$data/base-image:base" --name base >/dev/null || fail "the template could not be made" "see $aenv_logs/server.log"
fi

step "the official Python SDK"
python_env "$data/venv" e2b
step "the demo:"
"$data/venv/bin/python" examples/demo.py || fail "the demo failed" "see $aenv_logs/server.log"

step "done"
cat >&2 <<TEXT

Go on:
  . ~/.config/aenv/env                 settings for the SDKs, and aenv in the PATH
  aenv start base                      a sandbox; then: aenv exec ID -- CMD, aenv connect ID, aenv ls, aenv rm ID
  aenv pull IMAGE --name NAME          a template from any OCI image
  $data/venv/bin/python                has the e2b SDK
Stop:
  aenv down                            pauses what runs and stops the server; nothing is lost
TEXT
