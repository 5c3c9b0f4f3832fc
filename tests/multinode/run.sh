#!/usr/bin/env bash
# Runs docker-compose.yml: the demo on three nodes of two ranks and a store daemon, in containers of a private network,
# and then an elastic job on nodes that come, are killed and are cut off (elastic.sh).
#
#   bash tests/multinode/run.sh [--skip-without-engine]
#
# Nothing is pulled: the base image is a debootstrap of the release that this machine runs, from the mirror that apt
# uses, and the wheels come from the host. Missing tools are installed from Debian's packages and an engine is started
# where none runs, both as root. Afterwards containers, network and images are gone and the engine is stopped if it was
# started here; .multinode/ (ignored by git) keeps the bare base system for the next run. The exit status is 0 if both jobs
# went as they should.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec </dev/null

readonly PROJECT=asyncdist-multinode
readonly NODES=(node0 node1 node2)
readonly IMAGES=(asyncdist-server:multinode asyncdist-node:multinode "$PROJECT-base:latest")
readonly ENGINE_START_S=60 SHORT_S=60 UP_S=120 DEMO_S=180 BOOTSTRAP_S=900
readonly CACHE=$PWD/.multinode
readonly PYTHON=$PWD/.venv/bin/python

state=     # folder of the engine started here
engine=    # its process id
service=   # 1: the package's installation started the system's engine

say() { printf '\n== %s\n' "$*"; }

frame() {
  local rule
  rule=$(printf '%*s' 100 '' | tr ' ' '#')
  printf '\n%s\n' "$rule" >&2
  printf '##  %s\n' "$@" >&2
  printf '%s\n\n' "$rule" >&2
}

no_engine() {
  frame "THE MULTI-NODE TEST DID NOT RUN: no container engine can be installed here." "$@"
  [[ ${SKIP_WITHOUT_ENGINE:-} ]] && exit 0
  exit 1
}

compose() { # SECONDS ARGUMENTS...
  local limit=$1 command=(docker-compose)
  shift
  command -v docker-compose >/dev/null || command=(docker compose)
  timeout --kill-after=10 "$limit" "${command[@]}" --project-name "$PROJECT" --env-file "$CACHE/env" "$@"
}

clean_up() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  set +e
  if [[ -f $CACHE/env ]]; then
    say "removing containers, network and images"
    ((${#started[@]})) && docker rm --force "${started[@]}" >/dev/null 2>&1
    compose "$SHORT_S" down --volumes --timeout 5 >/dev/null 2>&1
    docker image rm --force "${IMAGES[@]}" >/dev/null 2>&1
  fi
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
  rm -rf "$CACHE/env" "$CACHE/context" "$CACHE/rootfs"
  exit "$status"
}

install_tools() {
  local missing=() tool
  for tool in dockerd docker docker-compose debootstrap iptables; do
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
    docker.io docker-compose debootstrap iptables >"$CACHE/apt.log" 2>&1 ||
    { tail -n 20 "$CACHE/apt.log" >&2; no_engine "apt-get install docker.io docker-compose debootstrap failed."; }
  command -v docker >/dev/null || apt-get -qq install --yes --no-install-recommends docker-cli >>"$CACHE/apt.log" 2>&1 ||
    no_engine "apt-get install docker-cli failed."
  if docker info >/dev/null 2>&1 && command -v systemctl >/dev/null; then service=1; fi
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

# Wheels for the image's Python, which may be another than the host's.
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
    --dest "$CACHE/context/dist" "${wheel[0]}[server]"
}

build_image() {
  DOCKER_BUILDKIT=0 docker build --quiet --network none --build-arg "BASE_IMAGE=${IMAGES[2]}" \
    --build-arg PIP_NO_INDEX=1 --tag "$1" --file "$2" "$CACHE/context" >"$CACHE/build.log" 2>&1 ||
    { cat "$CACHE/build.log" >&2; exit 1; }
}

show_logs() {
  compose "$SHORT_S" ps
  compose "$SHORT_S" logs --no-color
}

run_demo() {
  say "store and ${#NODES[@]} nodes"
  compose "$UP_S" up --detach --no-build store "${NODES[@]}" || { show_logs; return 1; }
  local containers statuses failed=0
  containers=$(compose "$SHORT_S" ps --quiet "${NODES[@]}")
  # shellcheck disable=SC2086  # one word per container
  statuses=$(timeout "$DEMO_S" docker wait $containers) || failed=1
  if ((failed)) || grep -qvx 0 <<<"$statuses"; then
    show_logs
    say "FAILED: ${NODES[*]} exited with" ${statuses:-nothing, still running after "$DEMO_S" s}
    return 1
  fi
  compose "$SHORT_S" logs --no-color "${NODES[0]}"
  say "all nodes exited with status 0"
}

case ${1:-} in
  --skip-without-engine) SKIP_WITHOUT_ENGINE=1 ;;
  ?*) echo "usage: bash tests/multinode/run.sh [--skip-without-engine]" >&2; exit 2 ;;
esac
source tests/multinode/elastic.sh
mkdir -p "$CACHE"
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
install_tools
start_engine
(umask 077 && echo "ASYNCDIST_TOKEN=$("$PYTHON" -m asyncdist token)" >"$CACHE/env")
import_base
collect_wheels
say "building images"
build_image "${IMAGES[0]}" server/Dockerfile
build_image "${IMAGES[1]}" tests/multinode/Dockerfile
run_demo
run_elastic
say "done in $SECONDS s"
