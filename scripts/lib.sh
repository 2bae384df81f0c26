# Shared by quickstart.sh and test.sh: progress, failures that say what to do, packages. Sourced, not run.
# shellcheck shell=bash

aenv_started=$(date +%s)

# A line of progress with the time since the start.
step() { printf '\033[1m[%4ds]\033[0m %s\n' "$(($(date +%s) - aenv_started))" "$*" >&2; }

# Stops with what went wrong and what to do about it.
fail() {
    printf '\n\033[1;31mStopped:\033[0m %s\n' "$1" >&2
    [ -z "${2:-}" ] || printf '  → %s\n' "$2" >&2
    exit 1
}

# Runs a long command quietly, a mark every ten seconds, its whole output in a log that is shown if it fails.
# usage: quietly LOG "what to do on failure" COMMAND…
quietly() {
    local log=$1 remedy=$2 pid started
    shift 2
    mkdir -p "$(dirname "$log")"
    "$@" >"$log" 2>&1 &
    pid=$!
    started=$(date +%s)
    while kill -0 "$pid" 2>/dev/null; do
        if ! timeout 10 tail --pid="$pid" -f /dev/null; then
            printf '        … %ds: %s\n' "$(($(date +%s) - started))" "$(tail -n1 "$log" | tr -d '\r' | cut -c1-100)" >&2
        fi
    done
    if ! wait "$pid"; then
        tail -n 40 "$log" >&2
        fail "'$1 ${2:-}…' failed; the end of its output is above, all of it in $log" "$remedy"
    fi
}

require_root() {
    [ "$(uname -s)" = Linux ] || fail "sandboxes run on Linux; this is $(uname -s)" "use the 'aenv' CLI here and the server on a Linux machine"
    [ "$(uname -m)" = x86_64 ] || fail "this version runs guests on x86_64 only; this is $(uname -m)" "use an x86_64 machine"
    [ "$(id -u)" = 0 ] || fail "microVMs, network namespaces and mounts need root" "run: sudo -E env PATH=\"\$PATH\" $0 $*"
    command -v apt-get >/dev/null || fail "this script installs Debian or Ubuntu packages and found no apt-get" "see docs/install.md for the list of what is needed"
}

# Debian 12 has QEMU 7.2 and kernel 6.1; its own backports have the versions that are fastest here. Packages from
# backports are only ever taken when asked for by name, so adding the suite changes nothing else.
enable_backports() {
    # shellcheck disable=SC1091
    . /etc/os-release
    [ "${VERSION_CODENAME:-}" = bookworm ] || return 0
    apt-get indextargets --format '$(SUITE) $(CODENAME)' "Created-By: Packages" | grep backports >/dev/null && return 0
    local uri key
    uri=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' "Created-By: Packages" | awk '$1=="bookworm" && $2=="main" && !found {print $3; found=1}')
    # Debian's own keyring; without the file apt looks where it looks for every other source.
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r "$key" ] || key=
    [ -n "$uri" ] || return 0
    step "adding Debian's backports (for QEMU 10 and kernel 6.12): /etc/apt/sources.list.d/aenv-backports.list"
    echo "deb ${key:+[signed-by=$key] }$uri bookworm-backports main" >/etc/apt/sources.list.d/aenv-backports.list
    apt-get update -qq
}

# Installs those of the named packages that are missing.
packages() {
    local missing=() p
    for p in "$@"; do
        dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing+=("$p")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    step "installing ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive quietly "$aenv_logs/apt.log" "check the network and 'apt-get update'" \
        apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

install_runtime_packages() {
    step "package lists"
    quietly "$aenv_logs/apt-update.log" "check the network and /etc/apt" apt-get update -qq
    enable_backports
    packages build-essential ca-certificates git e2fsprogs nftables iproute2 skopeo umoci mmdebstrap
    if ! command -v qemu-system-x86_64 >/dev/null; then
        step "installing QEMU"
        local from=()
        apt-get indextargets --format '$(CODENAME)' "Created-By: Packages" | grep -x bookworm-backports >/dev/null && from=(-t bookworm-backports)
        DEBIAN_FRONTEND=noninteractive quietly "$aenv_logs/apt-qemu.log" "check the network and 'apt-get update'" \
            apt-get install -y -qq --no-install-recommends "${from[@]}" qemu-system-x86 qemu-system-data seabios
    fi
}

require_rust() {
    [ -r "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
    command -v cargo >/dev/null || fail "Rust is not installed" "install it from https://rustup.rs (one command), then run this again"
    local have
    have=$(rustc --version | awk '{print $2}')
    [ "$(printf '1.95.0\n%s\n' "$have" | sort -V | head -n1)" = 1.95.0 ] || fail "Rust 1.95 or newer is needed; this is $have" "run: rustup update stable"
}

# The program and the guest kit, both into target/.
build_all() {
    step "building aenv (the first time this is most of the wait)"
    quietly "$aenv_logs/build.log" "read the compiler's message above; a clean clone of main builds" cargo build --release --locked -p aenv
    step "building the guest: agent, kernel, initramfs"
    quietly "$aenv_logs/guest.log" "the kernel comes from Debian's linux-image-cloud-amd64; check 'apt-get update', or pass --kernel-deb to 'cargo xtask guest'" \
        cargo xtask guest --out target/guest
}

# A Python environment with the official SDK. usage: python_env DIR REQUIREMENT…
python_env() {
    local dir=$1
    shift
    packages python3-venv
    if [ ! -x "$dir/bin/python" ]; then
        python3 -m venv "$dir" || fail "could not make a Python environment in $dir" "install python3-venv"
    fi
    quietly "$aenv_logs/pip.log" "check the network; the official SDK comes from PyPI" "$dir/bin/python" -m pip install -q --disable-pip-version-check "$@"
}
