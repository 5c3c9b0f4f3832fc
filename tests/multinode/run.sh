#!/usr/bin/env bash
# Runs the scenarios of this folder on network namespaces and on containers, and docker-compose.yml.
#
#   bash tests/multinode/run.sh [--skip-without-engine] [ARGUMENTS OF PYTEST]
#
# Nothing is pulled: the base image is a debootstrap of the release that this machine runs, from the mirror that apt
# uses, and the wheels come from the host. Missing tools are installed from Debian's packages and an engine is started
# where none runs, both as root. Afterwards hosts, networks and images are gone, however this ends, and the engine is
# stopped if it was started here; .multinode/ (ignored by git) keeps the bare base system for the next run. Without an
# engine --skip-without-engine runs the scenarios on namespaces alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec </dev/null

readonly PREFIX=mn$$ # begins the names of all hosts: see tests/kits/host_kit.py
readonly IMAGES=(asyncdist-server:multinode asyncdist-node:multinode asyncdist-base:multinode)
readonly ENGINE_START_S=60 SCENARIOS_S=660 BOOTSTRAP_S=900
readonly CACHE=$PWD/.multinode
readonly PYTHON=$PWD/.venv/bin/python

state=     # folder of the engine started here
engine=    # its process id
service=   # 1: the package's installation started the system's engine
scenarios= # process id, and group, of pytest
images=    # 1: there is an engine that may have some of ours

say() { printf '\n== %s\n' "$*"; }

frame() {
  local rule
  rule=$(printf '%*s' 100 '' | tr ' ' '#')
  printf '\n%s\n' "$rule" >&2
  printf '##  %s\n' "$@" >&2
  printf '%s\n\n' "$rule" >&2
}

no_engine() {
  frame "NO SCENARIO RAN ON CONTAINERS: no container engine can be installed here." "$@"
  [[ ${SKIP_WITHOUT_ENGINE:-} ]] || exit 1
  run_scenarios -k "not containers and not compose"
  exit
}

remove_namespaces() {
  local name
  for name in $(ip netns list 2>/dev/null | awk -v prefix="$PREFIX-" 'index($1, prefix) == 1 { print $1 }'); do
    ip netns pids "$name" | xargs --no-run-if-empty kill -KILL
    ip netns del "$name"
  done
}

remove_containers() {
  docker ps --all --quiet --filter "name=^$PREFIX-" | xargs --no-run-if-empty docker rm --force --volumes
  docker network ls --quiet --filter "name=^$PREFIX-" | xargs --no-run-if-empty docker network rm
  docker volume ls --quiet --filter "name=^$PREFIX-" | xargs --no-run-if-empty docker volume rm
  docker image rm --force "${IMAGES[@]}"
} >/dev/null 2>&1

clean_up() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  set +e
  if [[ $scenarios ]]; then kill -KILL -- "-$scenarios" 2>/dev/null; fi
  say "removing hosts, networks and images"
  remove_namespaces
  if [[ $images ]]; then remove_containers; fi
  if [[ $engine ]]; then
    kill "$engine" && wait "$engine"
  fi
  if [[ $state ]]; then
    mount | awk -v state="$state/" 'index($3, state) == 1 { print $3 }' | sort -r | xargs --no-run-if-empty umount
    rm -rf "$state"
  fi
  if [[ $service ]]; then
    systemctl stop docker.socket docker.service
  fi
  mount | awk -v rootfs="$CACHE/rootfs/" 'index($3, rootfs) == 1 { print $3 }' | sort -r | xargs --no-run-if-empty umount
  rm -rf "$CACHE/context" "$CACHE/rootfs" "${TMPDIR:-/tmp}/$PREFIX-"*
  exit "$status"
}

install_tools() {
  local missing=() tool
  for tool in dockerd docker docker-compose debootstrap iptables ip; do
    [[ $tool == docker-compose ]] && docker compose version >/dev/null 2>&1 && continue
    [[ $tool == dockerd ]] && docker info >/dev/null 2>&1 && continue
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  ((${#missing[@]})) || return 0
  say "installing from this machine's packages: ${missing[*]}"
  ((EUID == 0)) || no_engine "Missing: ${missing[*]}. Run as root, or install them."
  command -v apt-get >/dev/null || no_engine "Missing: ${missing[*]}, and there is no apt-get."
  apt-get -qq update || no_engine "apt-get update failed."
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
    docker.io docker-compose debootstrap iptables iproute2 >"$CACHE/apt.log" 2>&1 ||
    { tail -n 20 "$CACHE/apt.log" >&2; no_engine "apt-get install docker.io docker-compose debootstrap failed."; }
  command -v docker >/dev/null || apt-get -qq install --yes --no-install-recommends docker-cli >>"$CACHE/apt.log" 2>&1 ||
    no_engine "apt-get install docker-cli failed."
  if docker info >/dev/null 2>&1 && command -v systemctl >/dev/null; then service=1; fi
}

# Where it cannot be installed, test_slurm.py is skipped and says so. The tests start daemons of their own.
install_slurm() {
  local munge
  munge=$(command -v munged) || true
  [[ $munge ]] && command -v slurmctld >/dev/null && command -v slurmd >/dev/null && return
  ((EUID == 0)) && command -v apt-get >/dev/null || return 0
  say "installing from this machine's packages: slurm-wlm munge"
  apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends slurm-wlm munge >"$CACHE/slurm.log" 2>&1 ||
    say "slurm-wlm cannot be installed: no scenario runs on Slurm"
  [[ $munge ]] || ! command -v systemctl >/dev/null || systemctl stop munge >/dev/null 2>&1 || true
}

# The engine has its own folder and socket, and touches neither the firewall nor the interfaces of the host.
start_engine() {
  docker info >/dev/null 2>&1 && return
  ((EUID == 0)) || { echo "no container engine answers, and only root can start one" >&2; exit 1; }
  say "starting a container engine"
  state=$(mktemp -d /var/tmp/asyncdist-multinode.XXXXXX)
  export DOCKER_HOST=unix://$state/docker.sock
  dockerd --data-root "$state/data" --exec-root "$state/exec" --pidfile "$state/pid" --host "$DOCKER_HOST" \
    --bridge=none --iptables=false --ip-forward=false --ip-masq=false >"$state/log" 2>&1 &
  engine=$!
  local deadline=$((SECONDS + ENGINE_START_S))
  until docker info >/dev/null 2>&1; do
    if ! kill -0 "$engine" 2>/dev/null || ((SECONDS > deadline)); then
      tail -n 30 "$state/log" >&2
      frame "THE MULTI-NODE TEST FAILED: the container engine is installed but does not start (log above)."
      exit 1
    fi
    sleep 0.2
  done
}

# Packs .multinode/base-<release>.tar: the smallest Debian with python3 and venv.
bootstrap() {
  local release=$1 mirror=$2 tarball=$3
  say "bootstrapping $release (kept in .multinode/)"
  eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
  export http_proxy
  rm -rf "$CACHE/rootfs"
  timeout "$BOOTSTRAP_S" debootstrap --variant=minbase --include=python3,python3-venv "$release" "$CACHE/rootfs" "$mirror" \
    >"$CACHE/debootstrap.log" 2>&1 || { tail -n 20 "$CACHE/debootstrap.log" >&2; exit 1; }
  tar --numeric-owner -C "$CACHE/rootfs" --exclude './var/cache/apt/*' --exclude './var/lib/apt/lists/*' \
    --exclude './usr/share/doc/*' --exclude './usr/share/man/*' -cf "$tarball.part" .
  mv "$tarball.part" "$tarball"
  rm -rf "$CACHE/rootfs"
}

import_base() {
  local release mirror tarball
  release=$(. /etc/os-release && echo "$VERSION_CODENAME")
  tarball=$CACHE/base-$release.tar
  if [[ ! -s $tarball ]]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $release" 'Component: main' | head -n 1)
    bootstrap "$release" "$mirror" "$tarball"
  fi
  docker import "$tarball" "${IMAGES[2]}" >/dev/null
}

# Wheels for the image's Python, which may be another than the host's; ml-dtypes is for the program of all collectives.
collect_wheels() {
  say "collecting wheels"
  local version
  version=$(docker run --rm --network none "${IMAGES[2]}" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  rm -rf "$CACHE/context"
  mkdir -p "$CACHE/context/dist"
  cp -r examples "$CACHE/context/"
  "$PYTHON" -m pip -qq --disable-pip-version-check wheel --no-deps --wheel-dir "$CACHE/context/dist" .
  local wheel=("$CACHE"/context/dist/asyncdist-*.whl)
  "$PYTHON" -m pip -qq --disable-pip-version-check download --only-binary=:all: --python-version "$version" \
    --dest "$CACHE/context/dist" "${wheel[0]}[server]" ml-dtypes
}

build_image() { # NAME FILE
  DOCKER_BUILDKIT=0 docker build --quiet --network none --build-arg "BASE_IMAGE=${IMAGES[2]}" \
    --build-arg PIP_NO_INDEX=1 --build-arg PACKAGES=ml-dtypes --tag "$1" --file "$2" "$CACHE/context" \
    >"$CACHE/build.log" 2>&1 || { cat "$CACHE/build.log" >&2; exit 1; }
}

# In a process group of its own, so that this shell hears of signals at once, and ends pytest and its workers.
run_scenarios() { # ARGUMENTS OF PYTEST...
  say "scenarios"
  ASYNCDIST_TEST_HOSTS=$PREFIX setsid timeout --kill-after=10 "$SCENARIOS_S" "$PYTHON" -m pytest -v -n 3 -o faulthandler_timeout=300 \
    --dist worksteal "${arguments[@]}" "$@" tests/multinode/test_*.py &
  scenarios=$!
  wait "$scenarios"
  scenarios=
}

if [[ ${1:-} == --skip-without-engine ]]; then
  SKIP_WITHOUT_ENGINE=1
  shift
fi
arguments=("$@")
mkdir -p "$CACHE"
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
install_slurm
install_tools
start_engine
images=1
import_base
collect_wheels
say "building images"
build_image "${IMAGES[0]}" server/Dockerfile
build_image "${IMAGES[1]}" tests/multinode/Dockerfile
run_scenarios
say "done in $SECONDS s"
