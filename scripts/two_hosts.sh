#!/usr/bin/env bash
# The three services by hand on two hosts, one command each, with a token.
#
#   sudo scripts/two_hosts.sh [--recipe NAME] [--steps N] [--success S] [--keep DIR] [-- --override=value ...]
#
# Two network namespaces joined by a veth pair stand for the hosts; each has its own /dev/shm, and host B cannot see the
# run directory of host A, so everything travels over the wire.
#   host A (10.77.0.1): astraflow dataflow + astraflow trainer      host B (10.77.0.2): astraflow node, nothing else
# Shown on the way: a wrong or missing token is refused, an address beyond loopback is refused without a token, loopback
# needs none, nothing listens on B, and every connection of B was opened by B.
# Environment: VENV (directory of the virtual environment) or ASTRAFLOW (the command, default: astraflow).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

recipe=quickstart steps="" success="" keep="" overrides=()
while (($#)); do
  case $1 in
    --recipe) recipe=$2; shift 2 ;;
    --steps) steps=$2; shift 2 ;;
    --success) success=$2; shift 2 ;;
    --keep) keep=$2; shift 2 ;;
    --) shift; overrides=("$@"); break ;;
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "two-hosts: option=$1 is not known; see --help" >&2; exit 2 ;;
  esac
done
astraflow=${ASTRAFLOW:-${VENV:+$VENV/bin/}astraflow}
fail() { echo "two-hosts: $1" >&2; exit "${2:-1}"; }
say() { echo "two-hosts: $1"; }

[[ $(uname -s) == Linux ]] || fail "system=$(uname -s) has no network namespaces; run this on Linux" 2
[[ $EUID == 0 ]] || fail "user=$(id -un) may not make network namespaces; run this as root (sudo)" 2
for tool in ip ss unshare; do
  command -v "$tool" >/dev/null || fail "command=$tool is missing; install iproute2 and util-linux (apt-get install -y iproute2)" 2
done

tag=af$$ a=af$$-a b=af$$-b ip_a=10.77.0.1 ip_b=10.77.0.2
work=$(mktemp -d) pids=()
run=${keep:-$work/run}
if [[ -n $keep && -e $keep ]]; then fail "directory=$keep already exists; give a new one to --keep" 2; fi
clean_up() {
  local code=$?
  trap - EXIT INT TERM
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for host in "$a" "$b"; do
    ip netns pids "$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "$host" 2>/dev/null || true
  done
  wait 2>/dev/null || true
  if ((code)); then for log in "$work"/*.log; do [[ -s $log ]] && { echo "--- $(basename "$log")"; tail -n 15 "$log"; } >&2; done; fi
  rm -rf "$work"
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

say "hosts A $ip_a and B $ip_b (namespaces $a, $b)"
ip netns add "$a"
ip netns add "$b"
ip -n "$a" link add "$tag" type veth peer name "$tag" netns "$b"
ip -n "$a" addr add $ip_a/24 dev "$tag"
ip -n "$b" addr add $ip_b/24 dev "$tag"
for host in "$a" "$b"; do ip -n "$host" link set lo up && ip -n "$host" link set "$tag" up; done
if command -v nft >/dev/null && ip netns exec "$b" nft -f - 2>/dev/null <<'RULES'; then
table inet closed {
  chain input {
    type filter hook input priority 0; policy accept;
    iif != "lo" tcp flags & (syn | ack) == syn drop
  }
}
RULES
  say "host B drops every inbound connection (nft)"
else
  say "no nft here: host B is closed because nothing listens on it (checked below)"
fi

# A host of its own: private /dev/shm and host name; on B the run directory of A is an empty one.
settle='mount -t tmpfs shm /dev/shm && hostname "$0"'
start='exec ${LIMIT_S:+timeout $LIMIT_S} "$@"'
on_a=(ip netns exec "$a" unshare --mount --uts bash -c "$settle && $start" host-a)
on_b=(ip netns exec "$b" unshare --mount --uts bash -c "$settle && mount -t tmpfs none '$run' && $start" host-b)
until_ready() { # until_ready FILE PID SECONDS WHAT
  local deadline=$((SECONDS + $3))
  until [[ -s $1 ]]; do
    kill -0 "$2" 2>/dev/null || fail "$4 ended before it answered"
    ((SECONDS < deadline)) || fail "$4 did not answer within $3 s"
    sleep 0.2
  done
}
refused() { # refused LOG WORD COMMAND...: must exit with an error whose message contains WORD
  local log=$work/$1.log word=$2 code=0
  shift 2
  LIMIT_S=60 "$@" >"$log" 2>&1 || code=$?
  ((code != 0 && code != 124)) || fail "exit code $code where a refusal was due: $*"
  grep -qi -- "$word" "$log" || fail "the refusal does not mention '$word': $(tail -n 1 "$log")"
  say "refused as it must be (exit code $code): $(grep -i -m 1 -- "$word" "$log" | cut -c1-160)"
  rm -f "$log"
}

mkdir -p "$run"
token=$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')
url=http://$ip_a:7700
[[ -z $steps ]] || overrides+=("--run.steps=$steps")
overrides+=("--weights.host=$ip_a")
DATAFLOW=(dataflow "$recipe" --run-dir)

unset ASTRAFLOW_TOKEN
# shellcheck disable=SC2086  # the command may be several words
{
  refused no-token-bind ASTRAFLOW_TOKEN "${on_a[@]}" $astraflow "${DATAFLOW[@]}" "$work/bare" --host $ip_a --port 7701 "${overrides[@]}"

  "${on_a[@]}" $astraflow "${DATAFLOW[@]}" "$work/loop" --host 127.0.0.1 --port 7702 --ready-file "$work/loop.json" >"$work/loop.log" 2>&1 &
  loop=$! && pids+=("$loop")
  until_ready "$work/loop.json" "$loop" 30 "the dataflow service on loopback"
  "${on_a[@]}" $astraflow status http://127.0.0.1:7702 >"$work/status.log" 2>&1 || fail "loopback must need no token"
  say "loopback needs no token"
  kill "$loop" && { wait "$loop" || true; }

  export ASTRAFLOW_TOKEN=$token
  "${on_a[@]}" $astraflow "${DATAFLOW[@]}" "$run" --host $ip_a --port 7700 --ready-file "$work/ready.json" "${overrides[@]}" >"$work/dataflow.log" 2>&1 &
  dataflow=$! && pids+=("$dataflow")
  until_ready "$work/ready.json" "$dataflow" 60 "the dataflow service"
  ASTRAFLOW_TOKEN=not-this-one refused wrong-token token "${on_b[@]}" $astraflow node --dataflow $url
  ASTRAFLOW_TOKEN='' refused no-token token "${on_b[@]}" $astraflow node --dataflow $url
  ASTRAFLOW_TOKEN=not-this-one refused wrong-token-trainer token "${on_a[@]}" $astraflow trainer --policy actor --run-dir "$work/wrong" --dataflow $url

  "${on_a[@]}" $astraflow trainer --policy actor --run-dir "$run" --dataflow $url --threads 1 >"$work/trainer.log" 2>&1 &
  trainer=$! && pids+=("$trainer")
  "${on_b[@]}" $astraflow node --name far --dataflow $url --threads 1 >"$work/node.log" 2>&1 &
  node=$! && pids+=("$node")
}
say "running: one command each for dataflow and trainer on A, node on B"

checked=""
while kill -0 "$trainer" 2>/dev/null; do
  kill -0 "$node" 2>/dev/null || { wait "$node" || fail "the node ended with exit code $?"; break; }
  kill -0 "$dataflow" 2>/dev/null || { wait "$dataflow" || fail "the dataflow service ended with exit code $?"; break; }
  step=$(tail -n 1 "$run/metrics.jsonl" 2>/dev/null | grep -o '"step": *[0-9]*' | grep -o '[0-9]*$' || true)
  if [[ -n $step && $step -ge 1 && -z $checked ]]; then
    listening=$(ip netns exec "$b" ss -Hltn | awk '{print $4}' | grep -vE '^(127\.|\[::1\])' || true)
    [[ -z $listening ]] || fail "host B listens on $listening; a node must only open outward connections"
    inbound=$(ip netns exec "$b" ss -Htn state established | awk '{print $4}' | grep -vE "^($ip_a:|127\.|\[::1\])" || true)
    [[ -z $inbound ]] || fail "host B has connections that it did not open: $inbound"
    outward=$(ip netns exec "$b" ss -Htn state established | awk '{print $4}' | grep -cE "^$ip_a:" || true)
    checked="nothing listens on host B; its $outward connections all go to host A"
    say "$checked"
  fi
  sleep 0.2
done
wait "$trainer" || fail "the trainer ended with exit code $?"
deadline=$((SECONDS + 30))
while kill -0 "$node" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
wait "$node" || fail "the node ended with exit code $?"
[[ -n $checked ]] || fail "no step was seen while the run went on"
# shellcheck disable=SC2086
{
  "${on_a[@]}" $astraflow status $url --json >"$work/status.json" || fail "the dataflow service must still answer"
  kill "$dataflow" # started by hand, it stays to be asked until it is told to go
  wait "$dataflow" || fail "the dataflow service ended with exit code $?"
  $astraflow report "$run" >/dev/null
}
python3 - "$work/status.json" "$run/report/summary.json" "${success:-0}" <<'CHECK' || fail "the run is not what it should be"
import json, sys

status, summary = (json.load(open(path)) for path in sys.argv[1:3])
account, reached = summary["accounting"], summary["success"]["end"]
law = account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
print(f"two-hosts: {summary['steps']} steps, success {summary['success']['start']} -> {reached}, accounting {account}")
sys.exit(not (status["finished"] and law and reached >= float(sys.argv[3])))
CHECK
say "done: the run of host A with the node of host B completed${keep:+; see $keep}"
