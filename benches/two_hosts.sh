#!/usr/bin/env bash
# Two ranks in two network namespaces, joined by a link of 1 Gbit/s in each direction: all-reduces beside what the link can
# carry, and training beside its own communication. Needs root, iproute2, and the release build.
#
#     cargo build --release && sudo benches/two_hosts.sh [collectives|train ARGUMENTS...]
#
# An all-reduce of S bytes over two ranks sends S bytes in each direction, by a ring and by the tree alike: the limit of
# algorithm bandwidth is that of the link, 0.125 GB/s, headers of packets included.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${LOCKSTEP:-target/release/lockstep}
rate=${RATE:-1gbit}
first=lockstep-a-$$ second=lockstep-b-$$ directory=$(mktemp -d)

finish() {
  ip netns del "$first" 2>/dev/null || true
  ip netns del "$second" 2>/dev/null || true
  rm -rf "$directory"
}
trap finish EXIT

ip netns add "$first"
ip netns add "$second"
ip link add veth0 netns "$first" type veth peer name veth0 netns "$second"
for side in "$first 10.77.0.1" "$second 10.77.0.2"; do
  read -r namespace address <<<"$side"
  ip -n "$namespace" address add "$address/24" dev veth0
  ip -n "$namespace" link set veth0 up
  ip -n "$namespace" link set lo up
  ip netns exec "$namespace" tc qdisc add dev veth0 root tbf rate "$rate" burst 256kb latency 50ms
done
head -c 32 /dev/urandom | base64 >"$directory/secret"
chmod 600 "$directory/secret"

# both COMMAND...: as rank 0 in one namespace, which is shown, and as rank 1 in the other.
both() {
  local place=(LOCKSTEP_SECRET_FILE="$directory/secret" MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
    WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1)
  ip netns exec "$second" env "${place[@]}" RANK=1 taskset -c 1 "$program" "$@" >"$directory/second.log" 2>&1 &
  local other=$!
  ip netns exec "$first" env "${place[@]}" RANK=0 taskset -c 0 "$program" "$@" || cat "$directory/second.log"
  wait "$other"
}

case ${1:-collectives} in
collectives)
  for algorithm in tree ring; do
    echo "all_reduce by $algorithm, two ranks, $rate:"
    both bench collectives --op all_reduce --sizes 1MiB,16MiB,64MiB --seconds 4 --algorithm $algorithm
  done
  ;;
*) both "$@" ;;
esac
