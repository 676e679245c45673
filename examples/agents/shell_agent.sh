#!/usr/bin/env bash
# An agent of bash, curl and jq, for a swarm door: bash shell_agent.sh http://127.0.0.1:7800
set -euo pipefail
door=$1 client="shell-$HOSTNAME-$$-$RANDOM"
json='content-type: application/json' token=${ASTRAFLOW_TOKEN:-none}
tools='[{"type": "function", "function": {"name": "calc",
  "parameters": {"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]}}}]'

swarm() {  # path, body; the answer is in $reply, its status in $status
  reply=$(curl -sS --retry 60 --retry-connrefused --retry-delay 1 -w '\n%{http_code}' "$door/swarm/$1" \
    -H "$json" -H "authorization: Bearer $token" -d "$2")
  status=${reply##*$'\n'} reply=${reply%$'\n'*}
}

say() {  # the next message of the policy is in $said
  said=$(jq -nc --argjson m "$messages" --argjson t "$tools" '{model: "actor", messages: $m, tools: $t}' |
    curl -sS --fail-with-body "$base_url/chat/completions" -H "$json" -H "authorization: Bearer $api_key" -d @- |
    jq -c '.choices[0].message')
}

solve() {  # $text is the problem; the reward is in $reward
  messages=$(jq -nc --arg text "$text" '[{role: "user", content: $text}]') reward=0
  say || return
  IFS=$'\t' read -r id expr <<<"$(jq -r '.tool_calls[0] // empty | [.id, (.function.arguments | fromjson.expr)] | @tsv' <<<"$said")"
  [[ ${expr:-} =~ ^[0-9][-+*][0-9]$ ]] || return 0
  result=$((expr))
  messages=$(jq -c --argjson said "$said" --arg id "$id" --arg result "<$result>" \
    '. + [$said, {role: "tool", tool_call_id: $id, content: $result}]' <<<"$messages")
  say || return
  points=0 # of six: one for each character of the sum, three for the answer
  for i in 0 1 2; do [[ ${expr:i:1} == "${text:i:1}" ]] && points=$((points + 1)); done
  [[ $(jq -r .content <<<"$said") == "$result." ]] && points=$((points + 3))
  reward=$(jq -n "$points / 6")
}

while swarm leases "{\"client\": \"$client\", \"count\": 4}" && [[ $status != 410 ]]; do
  [[ $status == 200 ]] || { echo "$reply" >&2; exit 1; }
  while IFS=$'\t' read -r episode attempt base_url api_key text; do
    if solve; then
      swarm "episodes/$episode/finish" "{\"client\": \"$client\", \"attempt\": $attempt, \"reward\": $reward}"
    else
      swarm "episodes/$episode/fail" "{\"client\": \"$client\", \"attempt\": $attempt, \"error\": \"workflow: curl\"}"
    fi
  done < <(jq -r '.leases[] | [.episode_id, .attempt, .base_url, .api_key, .task.fields.text] | @tsv' <<<"$reply")
done
