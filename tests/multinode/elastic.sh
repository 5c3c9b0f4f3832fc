# Sourced by run.sh: an elastic job on nodes of docker-compose.yml. Two begin, a third comes, that of rank 0 is killed, a
# fourth comes, the other slow one is cut off from the network, and those that are left finish the job.

readonly SLOW_S=0.15 QUICK_S=0 # after each step: the nodes that begin are slow, so that the job is not done before they go
readonly ROUND_S=30 END_S=30
readonly OUTAGE_S=15 # how long a node that is cut off waits for the network to come back

started=() # names of nodes
round=-1   # the last that was seen
step=0     # after which it began

start_node() { # NAME PAUSE
  started+=("$1")
  PAUSE=$2 compose "$UP_S" run --detach --no-deps -e "ASYNCDIST_STORE_OUTAGE=$OUTAGE_S" --name "$1" elastic >/dev/null 2>"$CACHE/run.log" ||
    { cat "$CACHE/run.log"; return 1; }
}

logs_of() { # NAME...
  local name
  for name; do docker logs "$name" 2>&1; done
}

# Waits for a round after the last one, of so many ranks, which goes on where the job had saved.
await_round() { # RANKS WHY
  local deadline=$((SECONDS + ROUND_S)) found="-1 0"
  while ((${found% *} <= round)); do
    if ((SECONDS > deadline)); then
      say "FAILED: $2, and within $ROUND_S s there was no round of $1 ranks"
      return 1
    fi
    sleep 0.1
    found=$(logs_of "${started[@]}" |
      sed -nE "s/.*round ([0-9]+): $1 ranks go on after step ([0-9]+)$/\1 \2/p" | sort -n | tail -n 1)
    found=${found:-"-1 0"}
  done
  if ((${found#* } < step)); then
    say "FAILED: after $2 the job went back from step $step to ${found#* }"
    return 1
  fi
  round=${found% *} step=${found#* }
  echo "$2: round $round has $1 ranks and goes on after step $step"
}

await_end() { # STATUS NAME...
  local statuses
  statuses=$(timeout "$END_S" docker wait "${@:2}") && ! grep -qvx "$1" <<<"$statuses" && return
  say "FAILED: ${*:2} should have exited with $1 within $END_S s and did with" ${statuses:-nothing}
  return 1
}

elastic_scenario() {
  local weights alone begun=$SECONDS
  start_node slow0 "$SLOW_S" && start_node slow1 "$SLOW_S" || return 1
  await_round 4 "two nodes have come" || return 1
  start_node quick0 "$QUICK_S" || return 1
  await_round 6 "a third has come" || return 1

  local victim=slow0 cut=slow1
  if logs_of slow1 | grep -q "round $round: node 0 of"; then victim=slow1 cut=slow0; fi
  docker kill "$victim" >/dev/null
  await_round 4 "the node of rank 0 was killed" || return 1
  start_node quick1 "$QUICK_S" || return 1
  await_round 6 "a fourth has come" || return 1
  docker network disconnect --force "${PROJECT}_ranks" "$cut"
  await_round 4 "a node was cut off" || return 1
  await_end 0 quick0 quick1 || return 1
  await_end 1 "$cut" || return 1

  weights=$(logs_of quick0 quick1 | grep -o "weights:.*")
  alone=$(docker run --rm --network none "${IMAGES[1]}" run --nproc-per-node 2 examples/elastic_training.py 2>&1 |
    grep -o "weights:.*")
  if ! [[ $weights && $weights == "$alone" ]]; then
    say "FAILED: the nodes learned '$weights', and one alone '$alone'"
    return 1
  fi
  logs_of "$cut" | grep "asyncdist run: .*store" | tail -n 2
  echo "all others have ended well, with the $weights that one node alone learns, after $((SECONDS - begun)) s"
}

run_elastic() {
  say "an elastic job whose nodes come, are killed and are cut off"
  elastic_scenario && return
  local name
  for name in "${started[@]}"; do
    printf '\n--- %s\n' "$name"
    logs_of "$name"
  done
  return 1
}
